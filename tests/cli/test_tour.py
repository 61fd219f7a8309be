"""docs/tour.md and docs/options.md: every command as a terminal of 80 columns shows it, in words that need no knowledge of this
project."""

import getpass
import importlib.util
import re
import socket
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from screen import private_words

ROOT = Path(__file__).resolve().parents[2]
PAGE, OPTIONS = ROOT / "docs/tour.md", ROOT / "docs/options.md"
spec = importlib.util.spec_from_file_location("tour", ROOT / "scripts/tour.py")
tour = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = tour
spec.loader.exec_module(tour)

# What was asked for by name may hold words of ours.
ASKED_FOR = ("--stats",)


def shown_of(text):
    """(command, what it said) of each block of a page."""
    blocks = re.findall(r"```text\n\$ (.*?[^\\])\n(.*?)\n```\n", text, re.DOTALL)
    return [(command, said) for command, said in blocks if not command.startswith("curl")]


def test_the_tour_shows_every_command_within_80_columns_and_in_no_words_of_ours():
    import typer

    from dflash_mlx.cli.app import app

    found = [one for file in (PAGE, OPTIONS) for one in shown_of(file.read_text(encoding="utf-8"))]
    names = set(typer.main.get_command(app).commands)
    assert {command.split()[1] for command, _ in found if not command.endswith("--help")} == names
    assert {command.split()[1] for command, _ in found if command.endswith("--help")} >= names
    for command, said in found:
        assert max(map(len, said.splitlines())) <= tour.COLUMNS, command
        words = [] if command.endswith(ASKED_FOR) else private_words(" ".join(said.replace("│", " ").split()))
        assert not words, f"{command}: {words}"


def test_the_tour_names_neither_machine_nor_user_nor_path():
    text = PAGE.read_text(encoding="utf-8") + OPTIONS.read_text(encoding="utf-8")
    assert not re.findall(r"(?<![\w.])/(?:home|Users|root|tmp|private|var|work)/|\b[0-9a-f]{12}\b", text)
    given = [socket.gethostname(), getpass.getuser()]
    assert not [name for name in given if len(name) > 4 and re.search(rf"\b{re.escape(name)}\b", text)]


def test_pages_are_the_same_up_to_figures_and_no_further():
    page = PAGE.read_text(encoding="utf-8") + OPTIONS.read_text(encoding="utf-8")
    other = re.sub(r"\d+\.\d+ tokens/s", "99.25 tokens/s", re.sub(r"(?<=\d) MB\b", " GB", page))
    assert other != page and not tour.differences(page, other)
    # What a first answer of a slower machine says besides.
    wait = "Timing the model and its drafter once, 10 s at most: it drafts where it is faster. Ctrl-C skips\nthis.\n"
    late = "Not done after 10 s; the next run tries again. To time them without a limit: dflash-mlx doctor --model tiny\n"
    late += "--draft-model tiny\n"
    assert not tour.differences(page, page.replace("number.\n```", f"number.\n{wait}{late}```", 1))
    for word, wrong in (("tokens/s", "tokens/h"), ("No fault found.", "No faults."), ("--top-k", "--tip-k")):
        assert word in page and tour.differences(page, page.replace(word, wrong, 1)), word


@pytest.mark.full
@pytest.mark.long
@pytest.mark.skipif(mx.metal.is_available() or mx.cuda.is_available(), reason="the tour is a CPU's")
@pytest.mark.parametrize(
    ("file", "intro", "made"),
    [(PAGE, tour.INTRO, tour.tour), (OPTIONS, tour.OPTIONS_INTRO, tour.help_pages)],
    ids=["tour", "options"],
)
def test_a_fresh_run_says_what_the_page_says(file, intro, made):
    fresh = list(made())
    assert not [(one.command, one.over, one.torn) for one in fresh if one.over or one.torn]
    found = tour.differences(file.read_text(encoding="utf-8"), tour.page(intro, fresh))
    assert not found, "\n".join([*found, "python scripts/tour.py makes the pages anew."])
