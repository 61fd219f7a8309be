"""What every command says is held at 40, 80 and 200 columns: no line over the width, no torn word, no word of ours.

Here it runs in the tests' own process, where `os.get_terminal_size` is that of a made-up terminal; what depends on a real one
(live lines, silence, the chat) is in test_seen.py and serving/test_chat_screen.py.
"""

import os
import re
import sys

import pytest
from screen import Screen, private_words
from typer.main import get_command
from typer.testing import CliRunner

from dflash_mlx import machine
from dflash_mlx.cli import app as cli_app
from dflash_mlx.cli import live as cli_live
from dflash_mlx.cli import narrow_help
from dflash_mlx.tools.columns import wrap

WIDTHS = [40, 80, 200]
# Wider than anything that is said.
WIDE = 2_000


def pages(command, path=()):
    yield path
    for name, one in getattr(command, "commands", {}).items():
        yield from pages(one, (*path, name))


PAGES = [*pages(get_command(cli_app.app))]


def words_of(text):
    return set(re.sub(r"[│─╭╮╰╯,]", " ", text).split())


def hold(seen, columns, whole=None):
    """seen, whole: the same at this width and at no width's limit. A word that is wider than all is the terminal's to break."""
    assert seen.strip()
    over = [line for line in seen.splitlines() if len(line) > columns and len(line.split()) > 1]
    assert not over, over
    if whole is not None:
        torn = words_of(seen) - words_of(whole)
        assert not torn, torn
    assert not private_words(seen), private_words(seen)


@pytest.fixture
def at(monkeypatch, capfd):
    """Run a command line in a terminal of so many columns: all that it says."""

    def run(columns, *words):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((columns, 50)))
        monkeypatch.setattr(sys, "argv", ["dflash-mlx", *words])
        # Which is printed in a pipe, as here, where no terminal has a width.
        monkeypatch.setattr(cli_live, "_PRINTED_S", 600)
        capfd.readouterr()
        try:
            cli_app.main()
        except SystemExit:
            pass
        return "".join(capfd.readouterr())

    return run


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("path", PAGES, ids=lambda path: " ".join(path) or "dflash-mlx")
def test_help_is_within_the_width_and_cuts_no_word(path, columns, monkeypatch):
    page = lambda n: CliRunner().invoke(cli_app.app, [*path, "--help"], env={"COLUMNS": str(n)}).output  # noqa: E731
    seen = page(columns)
    assert "…" not in seen and "Usage: " in seen
    if columns < narrow_help.ROOM:
        monkeypatch.setattr(narrow_help, "ROOM", WIDE + 1)
    hold(seen, columns, page(WIDE))


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("path", [(), ("train",)], ids=["dflash-mlx", "train"])
def test_a_group_of_commands_alone_shows_its_help(path, columns):
    shown = [CliRunner().invoke(cli_app.app, [*path, *more], env={"COLUMNS": str(columns)}) for more in ([], ["--help"])]
    assert "Usage: " in shown[0].output and shown[0].output.strip() == shown[1].output.strip()


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_list_of_models_is_within_the_width(at, columns):
    hold(at(columns, "models"), columns, at(WIDE, "models"))
    assert ("size 98.4 MB, drafter 10.9 MB" in at(columns, "models")) == (columns == 40)


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_list_of_what_is_kept_is_within_the_width(at, columns, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = machine.cache_directory()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a_name_of_many_letters.json").write_text("{}")
    seen = at(columns, "cache")
    assert "measured/a_name_of_many_letters" in seen
    hold(seen, columns, at(WIDE, "cache"))


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize(
    "words",
    [
        ("generate", "--bogus"),
        ("convert",),
        ("generate", "--model", "no-such/model-of-a-long-name", "-p", "x"),
        ("generate", "--stop", "", "-p", "x"),
        ("bench", "--compare", "a.json", "b.json"),
        ("train", "run", "--model", "tiny", "--data", "no-such-folder", "--out", "d", "--steps", "1"),
    ],
    ids=" ".join,
)
def test_errors_are_within_the_width(at, words, columns, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hold(at(columns, *words), columns, at(WIDE, *words))


LONG = """
convert --hf-path tiny --mlx-path m -q --force
generate --model tiny --draft-model tiny -p x -m 8
doctor --model tiny --draft-model tiny
bench --model tiny --draft-model tiny --kinds function --temp 0 --trials 1 -m 4 --block-size 4 --out b.json
bench --compare b.json b.json
train data --model tiny --out text --answer-tokens 20 --rows 2 --max-len 64 --held-out 1
train run --model tiny --data text --out d --steps 1 --layers 1 --block-size 4 --batch 2 --anchors 4 --max-len 64
train eval --model tiny --draft-model d --data text
"""


@pytest.mark.full
@pytest.mark.parametrize("columns", [40, 200])
def test_commands_that_run_models_are_within_the_width(at, tmp_path, monkeypatch, columns):
    # At 80 columns they stand in docs/tour.md, which a test makes anew.
    monkeypatch.chdir(tmp_path)
    for line in LONG.strip().splitlines():
        seen = at(columns, *line.split())
        assert "Error" not in seen, seen
        hold(seen, columns)


@pytest.mark.full
@pytest.mark.parametrize("columns", [40, 200])
def test_the_server_is_within_the_width_from_its_start_to_its_end(columns):
    with Screen("serve --model tiny --draft-model tiny --port 0".split(), columns=columns) as screen:
        screen.wait_for("Chat in a browser at")
        screen.send("\x03")
        assert screen.end() == 0 and "Stopped." in screen.text
    hold(screen.text, columns)
    assert not screen.over and not screen.torn, screen.text


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_line_goes_on_under_its_text_and_a_long_word_gets_the_room_that_it_needs(columns):
    words = "one two three four five six seven eight nine ten " * 12 + "dflash_config.target_layer_ids x"
    lines = wrap(f"result      {words}", columns, 12).splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= columns
    blanks = {len(line) - len(line.lstrip()) for line in lines[1:] if "dflash_config" not in line}
    assert blanks == {12} and " ".join(" ".join(lines).split()) == f"result {words}"
