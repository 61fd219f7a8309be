"""What the chat draws: growing Markdown is cut where a block has ended, and printed for good once."""

import os

import pytest
from rich.console import Console

from dflash_mlx.serving.markdown import split_blocks
from dflash_mlx.serving.screen import MarkdownScreen


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("# A\n\ntext\n\n- one\n", "# A\n\ntext\n\n"),
        ("one\n\n", ""),
        ("one\n\ntw", "one\n\n"),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("- a\n\n  still a\n\nb", "- a\n\n  still a\n\n"),
        ("", ""),
    ],
)
def test_growing_markdown_is_cut_behind_its_last_finished_block(text, done):
    assert split_blocks(text) == (done, text[len(done) :])


@pytest.mark.parametrize("redraw", [0.0, float("inf")])
def test_markdown_that_comes_letter_by_letter_is_printed_for_good_once(redraw):
    text = "# Title\n\nSome *words* and `code`.\n\n1. one\n2. two\n\n```python\nx = 1\n\ny = 2\n```\n\nThe end."
    console = Console(force_terminal=True, width=60, height=20, record=True, file=open(os.devnull, "w"))
    screen, kept = MarkdownScreen(console), []
    show = screen._print
    screen._print = lambda part: (kept.append(part), show(part))
    with screen:
        for letter in text:
            # Drawn again at every letter, or never before the end.
            screen.drawn = redraw
            screen.show("answer", letter)
    assert "".join(kept) == text
    drawn = console.export_text()
    assert all(line in drawn for line in ("Title", "Some words and code.", " 1. one", " 2. two", "x = 1", "y = 2", "The end."))
