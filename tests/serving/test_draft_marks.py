"""`generate --show-drafts` in a terminal: colours, their legend, wrapped words."""

import pytest
from screen import Screen

WORDS = ["generate", "--model", "tiny", "--draft-model", "tiny", "-m", "24", "--block-size", "8", "-p", "def f", "--show-drafts"]


@pytest.mark.full
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_drafts_are_marked_in_the_colours_of_the_legend(columns, tmp_path):
    with Screen(WORDS, columns=columns, env={"XDG_STATE_HOME": str(tmp_path)}) as screen:
        assert screen.end() == 0
        cells = [cell for row in screen.terminal.buffer.values() for cell in row.values()]
    text = " ".join(screen.text.split())
    assert "Drafts: drafted and right; drafted and wrong, not part of the text;" in text and "24 tokens" in text
    assert {"green", "red", "brown"} <= {cell.fg for cell in cells} and any(cell.strikethrough for cell in cells)
    assert not screen.torn and not screen.over


@pytest.mark.full
def test_without_colours_the_marks_are_letters_and_the_legend_shows_them(tmp_path):
    with Screen(WORDS, columns=60, env={"XDG_STATE_HOME": str(tmp_path), "NO_COLOR": "1"}) as screen:
        assert screen.end() == 0
    text = " ".join(screen.text.split())
    assert "[-drafted and wrong, not part of the text-]; {+the model's own token" in text
    assert text.count("[-") > 1 and text.count("{+") > 1 and not screen.torn
