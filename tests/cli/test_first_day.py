"""What someone meets on the first day: something not installed, a name with a typo, a command without its limit."""

import errno
import logging
import os
import subprocess
import sys
import traceback
from importlib import metadata
from types import SimpleNamespace

import pytest
from cli_kit import run
from kit import tiny_drafter, tiny_target
from screen import Screen
from typer.testing import CliRunner

from dflash_mlx import load, requirements
from dflash_mlx.cli import generate, inputs, options
from dflash_mlx.cli.app import app, sentence
from dflash_mlx.cli.options import DraftBits, Dtype
from dflash_mlx.errors import CheckpointError
from dflash_mlx.pair import DFlashPair

COMMAND = [sys.executable, "-m", "dflash_mlx.cli.app"]


def test_without_mlx_linux_users_are_told_the_extras(monkeypatch):
    monkeypatch.setattr(requirements.sys, "platform", "linux")
    said = requirements.explain(ModuleNotFoundError("No module named 'mlx'", name="mlx"))
    assert said.startswith("MLX is not installed") and all(f"[{extra}]" in said for extra in ("cpu", "cuda12", "cuda13"))
    # The front end without the library that an extra brings.
    assert requirements.explain(ImportError("libmlx.so: cannot open shared object file", name="mlx.core")) == said
    monkeypatch.setattr(requirements.sys, "platform", "darwin")
    monkeypatch.setattr(requirements.platform, "machine", lambda: "arm64")
    assert "pip install mlx (macOS" in requirements.explain(ModuleNotFoundError("No module named 'mlx'", name="mlx"))


@pytest.mark.parametrize(
    ("machine", "macos", "translated", "said"),
    [
        ("x86_64", "15.1", "1", "this Python is an x86 build that runs under Rosetta, and MLX has none for it. Install an arm64"),
        ("x86_64", "10.16", "", "this Mac has an Intel processor, and MLX needs Apple silicon"),
        ("arm64", "13.6.1", "", "this is macOS 13.6.1, and MLX needs macOS 14 or later. Update macOS"),
        ("arm64", "14.0", "", None),
        ("arm64", "", "", None),
    ],
)
def test_a_mac_or_a_python_on_which_mlx_cannot_run_is_told_in_one_sentence(monkeypatch, machine, macos, translated, said):
    monkeypatch.setattr(requirements.sys, "platform", "darwin")
    monkeypatch.setattr(requirements.platform, "machine", lambda: machine)
    monkeypatch.setattr(requirements.platform, "mac_ver", lambda: (macos, ("", "", ""), machine))
    answer = subprocess.CompletedProcess([], 0, stdout=f"{translated}\n")
    monkeypatch.setattr(requirements.subprocess, "run", lambda *command, **options: answer)
    found = requirements.machine_fault()
    assert found is said is None or found.startswith(said)
    # Before the remedy for what is not installed: installing it would not help.
    for error in (
        ModuleNotFoundError("No module named 'mlx'", name="mlx"),
        ModuleNotFoundError("No module named 'mlx_lm'", name="mlx_lm"),
        ImportError("dlopen(libmlx.dylib): incompatible architecture (have 'arm64', need 'x86_64')", name="mlx.core"),
    ):
        explained = requirements.explain(error)
        assert explained == said is None or explained.startswith(said or explained[:8])
    assert requirements.explain(ImportError("x", name="no_such_package")) is None


def test_a_package_that_lacks_a_name_is_told_with_its_version_and_the_wanted_one():
    said = requirements.explain(ImportError("cannot import name 'x' from 'mlx_lm.y' (y.py)", name="mlx_lm.y"))
    assert said.startswith(f"mlx-lm {metadata.version('mlx-lm')} has no x; this version needs mlx-lm")
    wanted = requirements._wanted("mlx-lm")
    assert "0.32.2" in wanted and said.endswith(f'pip install "mlx-lm{wanted}"')


@pytest.mark.parametrize("name", ["no_such_package", "dflash_mlx.nope", None])
def test_an_import_of_nothing_that_is_needed_is_not_explained(name):
    assert requirements.explain(ImportError("cannot import name 'x'", name=name)) is None


def test_a_command_without_mlx_ends_with_one_sentence(tmp_path):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    command = [*COMMAND, "generate", "--model", "tiny", "-p", "x"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1 and not done.stdout
    assert "MLX is not installed" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("command", "flags"), [("data", ("--minutes", "--answer-tokens")), ("run --data d", ("--minutes", "--steps"))]
)
def test_training_without_a_limit_names_the_commands_own_flags(tmp_path, command, flags):
    done = run("train", *command.split(), "--model", "tiny", "--out", str(tmp_path / "out"), env={"COLUMNS": "200"})
    assert done.returncode == 2 and not done.stdout
    assert all(flag in done.stderr for flag in flags) and "seconds" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("train data", "--model and --out"),
        ("train run", "--model, --data and --out"),
        ("train run --model tiny --steps 3", "--data and --out"),
        ("train eval --data d", "--model and --draft-model"),
        ("convert", "--hf-path"),
    ],
)
def test_a_command_without_its_options_names_all_of_them_and_gives_an_example(command, missing):
    done = CliRunner().invoke(app, command.split(), env={"COLUMNS": "200"})
    assert done.exit_code == 2 and not done.stdout
    assert f"Give {missing}, as in: dflash-mlx {' '.join(command.split(' --')[0].split())} --" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("run", "No such command 'run': use dflash-mlx chat --model MODEL, or dflash-mlx generate --model MODEL -p"),
        ("pull qwen3", "download the model that --model names."),
        ("list", "dflash-mlx models lists models with a drafter, dflash-mlx cache what is on disk."),
        ("help serve", "dflash-mlx COMMAND -h."),
        ("frobnicate", "the commands are generate, convert, chat, serve, doctor, bench, models, cache and train."),
        ("train start", "No such command 'start': the commands are data, run and eval."),
        ("train list", "the commands are data, run and eval."),
        ("server", "Did you mean 'serve'?"),
        ("generate hello", "No option takes 'hello': each value follows the name of its option, and a text of several words is"),
        ("generate -p hello world", "No option takes 'world'"),
        ("chat org/name --temp 0.5", "as in: dflash-mlx chat --model "),
        ("cache clear", "as in: dflash-mlx cache --delete "),
    ],
)
def test_a_guessed_command_or_a_stray_word_is_answered_with_what_there_is(command, said):
    done = CliRunner().invoke(app, command.split(), env={"COLUMNS": "400"})
    assert done.exit_code == 2 and not done.stdout and said in done.stderr, done.stderr


# As mlx-lm's takes it.
@pytest.mark.parametrize("flag", ["--hf-path", "--model"])
def test_convert_takes_a_built_in_name(tmp_path, flag):
    done = run("convert", flag, "tiny", "--mlx-path", str(tmp_path / "made"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made" / "config.json").exists()


def test_draft_model_none_is_plain_decoding():
    plain, none = (run("generate", "--model", "tiny", "-p", "x", "-m", "4", *more) for more in ([], ["--draft-model", "none"]))
    assert none.returncode == 0 and none.stdout == plain.stdout
    words = {" None": "none", "auto\n": "auto", "a dir ": "a dir ", "": "", None: None}
    assert {word: options.drafter_name(word) for word in words} == words
    assert "decoding without drafts" in none.stderr and "tau" not in none.stderr
    assert "--draft-model auto takes tiny's own." in plain.stderr and "auto" not in none.stderr
    assert inputs._drafter_of("mlx-community/Qwen3-8B-4bit") == " --draft-model auto takes z-lab/Qwen3-8B-DFlash-b16."
    assert inputs._drafter_of("org/unknown") == ""


def test_a_typo_is_answered_with_the_name_in_the_command_and_in_python():
    done = run("generate", "--model", "smolm2", "-p", "x")
    assert done.returncode == 1 and done.stderr.endswith("Did you mean smollm2?\n") and "Traceback" not in done.stderr
    with pytest.raises(CheckpointError) as error:
        load("smolm2")
    shown = "".join(traceback.format_exception(error.value))
    assert shown.count("Traceback") == 1 and shown.endswith("Did you mean smollm2?\n"), shown


def test_ctrl_c_while_the_prompt_is_read_says_stopping():
    words = ["generate", "--model", "tiny", "-m", "2", "--prefill-step-size", "4", "-p", "def f(x): return x + 1 " * 500]
    with Screen(words, lines=200) as screen:
        screen.wait_for("Reading the prompt: ")
        screen.send("\x03")
        assert screen.end() == 130
    said = screen.text
    assert "Stopping ..." in said and "Stopped before the first token." in said and "Traceback" not in said, said


@pytest.mark.parametrize("ends", ["in time", "not in time", "by Ctrl-C"])
def test_what_is_timed_behind_a_first_answer_ends_and_says_how(monkeypatch, capsys, ends):
    model = tiny_target(seed=2)
    drafter = tiny_drafter(model)
    pair, passes = DFlashPair.of(drafter), []

    class Measuring:
        costs = None

        def finish(self, stop):
            while not (stop() or len(passes) == 3):
                passes.append(1)
                if ends == "by Ctrl-C":
                    raise KeyboardInterrupt
            self.costs = "known" if len(passes) == 3 else None

    pair._measurement = Measuring()
    ticks = iter(range(0, 1000, 3 if ends == "in time" else 6))
    monkeypatch.setattr("dflash_mlx.pair.time", SimpleNamespace(monotonic=ticks.__next__))
    how = {"dtype": Dtype.float16, "draft_bits": DraftBits.eight, "last_tap": None, "adapter_path": "my adapter"}
    generate._measure_for_the_next("org/some model", "org/drafter", drafter, how)
    said = " ".join(capsys.readouterr().err.split())
    assert "at most 10 s" in said and "Ctrl-C skips" in said
    assert len(passes) == {"in time": 3, "not in time": 1, "by Ctrl-C": 1}[ends]
    names = "--model 'org/some model' --draft-model org/drafter"
    command = f"doctor {names} --dtype float16 --draft-bits 8 --adapter-path 'my adapter'"
    assert (command in said) == (ends == "not in time")
    assert ("Skipped" in said) == (ends == "by Ctrl-C")
    if ends == "not in time":
        # As much again where a caller's own loop waits for it.
        pair.after_answer()
        assert len(passes) == 2


def test_a_full_disk_is_a_sentence_also_where_the_system_names_no_file():
    assert sentence(OSError(errno.ENOSPC, "No space left on device")) == "The disk is full. Free some space."


def test_a_locale_that_lacks_a_character_does_not_end_the_answer():
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    command = [*COMMAND, "generate", "--model", "tiny", "--draft-model", "none", "-p", "# größe — ü 日本", "-m", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and "?" in done.stdout and "8 tokens" in done.stderr, done.stderr


def test_the_log_comes_before_an_answer_or_after_it(monkeypatch):
    shown, log = [], logging.getLogger("dflash_mlx.machine")
    listener = logging.Handler()
    listener.emit = lambda record: shown.append(record.getMessage())
    monkeypatch.setattr(logging.getLogger(), "handlers", [listener])

    def responses():
        log.warning("before")
        for token in range(3):
            yield SimpleNamespace(text=str(token), token=token, finish_reason=None, stats=None)
            log.warning("between")

    monkeypatch.setattr(generate, "fields_of", lambda *_: {})
    generate.run(responses(), lambda response: shown.append(response.text), end=lambda last: shown.append("end"))
    assert shown == ["before", "0", "1", "2", "end", "between", "between", "between"]
    log.warning("later")
    assert shown[-1] == "later"


@pytest.mark.parametrize("command", [["chat"], ["generate", "-m", "2"]])
def test_standard_input_that_was_closed_reads_as_empty(command):
    closed, empty = (run(*command, "--model", "tiny", stdin=stdin) for stdin in (None, ""))
    assert (closed.returncode, closed.stdout) == (empty.returncode, empty.stdout) == (0, empty.stdout), closed.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_cache_that_cannot_be_written_tears_no_line_of_an_answer(command, tmp_path):
    """The costs of passes are saved, or are not, as soon as they are known, which may be in the middle of an answer."""
    (tmp_path / "file").write_text("x")
    environment = {**os.environ, "DFLASH_MLX_CACHE": str(tmp_path / "file"), "XDG_STATE_HOME": str(tmp_path)}
    words = [*COMMAND, command, "--model", "tiny", "--draft-model", "tiny", "-m", "48"]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 120, "env": environment}
    done = subprocess.run(words, input="def test_\n", **piped)
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "is not kept" in line]
    assert line.startswith("cost_models.json is not kept"), done.stdout
