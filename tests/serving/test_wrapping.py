"""Text in pieces is wrapped between words, also wide, joined and very long ones; a model's text moves no cursor."""

import io

import pytest
from rich.console import Console

from dflash_mlx.serving.draft_marks import KINDS, legend
from dflash_mlx.serving.markdown import AnswerMarkdown
from dflash_mlx.serving.wrapping import WrappedText


def wrapped(text, width, size=1):
    out = io.StringIO()
    writer = WrappedText(Console(file=out), width)
    for i in range(0, len(text), size):
        writer.write(text[i : i + size])
    writer.close()
    return out.getvalue()


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", "one two\nthree\n"),
        ("one two\n   three", "one two\n   three\n"),
        ("12345678 9", "12345678\n9\n"),
        ("a 123456789abc", "a\n12345678\n9abc\n"),
        ("\u4f60\u597d\u4f60\u597d\u4f60", "\u4f60\u597d\u4f60\u597d\n\u4f60\n"),
        ("abcde \U0001f469\u200d\U0001f680x", "abcde\n\U0001f469\u200d\U0001f680x\n"),
        ("a\x1b[2Jb\x07\rc", "abc\n"),
        ("a\tb\n", "a    b\n"),
        ("", ""),
    ],
)
def test_pieces_of_any_size_are_wrapped_alike(text, lines, size):
    if "\x1b" in text and size < 9:
        pytest.skip("an escape sequence that is cut shows its letters, and moves nothing")
    assert wrapped(text, 8, size) == lines


def test_a_pipe_gets_every_piece_as_it_is():
    out = io.StringIO()
    writer = WrappedText(Console(file=out))
    writer.write("one two \x1b[2J" * 9)
    assert out.getvalue() == "one two \x1b[2J" * 9
    writer.close()
    assert out.getvalue().endswith("\n")


def drawn(text, width):
    console = Console(width=width, file=io.StringIO())
    console.print(AnswerMarkdown(text))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_markdown_loses_no_number_tag_line_or_address():
    lines = drawn("9. nine\n10. ten\n\nList<int> and <b>x</b>\nnext [site](http://x.y/z)\n\n<div>\nin it\n</div>", 40)
    assert lines[1:3] == ["  9. nine", " 10. ten"]
    assert {"List<int> and <b>x</b>", "next site (http://x.y/z)", "<div>", "in it", "</div>"} <= set(lines)


@pytest.mark.parametrize("width", [20, 30, 36, 40, 60, 200])
def test_no_word_of_a_table_is_torn(width):
    words = ["meaning", "incomprehensible", "alphabet", "first", "letters", "nothing"]
    lines = drawn("| name | meaning | incomprehensible |\n|-|-|-|\n| alphabet | the first of letters | nothing |", width)
    assert all(word in " ".join(lines) for word in words) and "\u2026" not in "".join(lines) and max(map(len, lines)) <= width


def test_the_legend_has_colours_where_there_are_some_and_marks_elsewhere(monkeypatch):
    assert "[-drafted and wrong" in legend(Console(file=io.StringIO())).plain
    assert "[-" not in legend(Console(file=io.StringIO(), force_terminal=True, color_system="256")).plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert "{+the model's own" in legend(Console(file=io.StringIO(), force_terminal=True, color_system="256")).plain
    assert len({style for style, _ in KINDS.values()}) == len(KINDS)
