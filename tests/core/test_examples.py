"""The examples run as they are."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *args):
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_with_its_import_changed_runs():
    assert re.search(r"\n48 tokens, \d+\.\d tokens/s; .+\n$", run("change_the_import.py"))


@pytest.mark.full
def test_the_script_with_a_prompt_cache_runs():
    assert "def main(" in run("prompt_cache.py")


def test_the_draft_source_runs_and_is_named():
    assert re.search(r"\n80 tokens; drafts by source: .*'suffix_automaton': {'rounds': [1-9]", run("suffix_automaton.py"))


@pytest.mark.full
def test_the_client_runs_against_the_server():
    command = [sys.executable, "-m", "dflash_mlx.cli.app", "serve", "--model", "tiny", "--draft-model", "tiny", "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        address = re.search(r"http://\S+", server.stderr.readline()).group()
        shown = run("client.py", address)
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert shown.startswith("tiny, drafter tiny, block size 8\n") and re.search(r"48 tokens, \d+ of them drafted", shown)


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix == ".py"} == {
        *("change_the_import.py", "prompt_cache.py", "client.py", "suffix_automaton.py")
    }
