"""Text that comes in pieces, wrapped at a terminal's width as it comes: a word is never torn, unless no line could hold it."""

from __future__ import annotations

import re

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

# What would move the cursor, ring or change colours: a model's text is shown, not obeyed.
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_JOINER = "\u200d"
_TAB = 4


def printable(text: str) -> str:
    """A text without control characters; line ends and tabs stay."""
    return _CONTROLS.sub("", text)


class WrappedText:
    """Writes pieces of text to a console, each word once it is whole.

        write("one tw") write("o three")    width 9:    one two
                                                        three

    A terminal gets wrapped lines without control characters; anything else gets every piece as it is, at once.

    Args:
      width: columns of a line; None: the console's, asked anew at every piece.
    """

    def __init__(self, console: Console, width: int | None = None):
        self.console, self._width = console, width
        self.wraps = console.is_terminal or width is not None
        # Columns written in this line, blanks that stand before the next word, and that word in (letter, style) pairs.
        self.column, self.blanks = 0, ""
        self.word: list[tuple[str, str]] = []
        self.columns = 0

    def write(self, text: str, style: str = "") -> None:
        """Show a piece of text. style: as rich writes it; in a line that is wrapped it stays."""
        if not self.wraps:
            self._put(text, style)
        else:
            for letter in printable(text).replace("\t", " " * _TAB):
                self._take(letter, style)
        self.console.file.flush()

    def close(self) -> None:
        """Write the last word and end the line: on a terminal if the line has begun; in a pipe always."""
        self._word_ends()
        if self.column or not self.wraps:
            self.console.file.write("\n")
        self.column, self.blanks = 0, ""
        self.console.file.flush()

    def _take(self, letter: str, style: str) -> None:
        if letter == "\n":
            self._word_ends()
            self._put("\n", "")
            self.column, self.blanks = 0, ""
            return
        if letter == " ":
            self._word_ends()
            self.blanks += letter
            return
        cells = cell_len(letter)
        before = self.word[-1][0] if self.word else ""
        # A wide letter is a word of its own; what takes no column, or is joined to the letter before it, stays with that.
        if before and cells and before != _JOINER and (cells == 2 or cell_len(before) == 2):
            self._word_ends()
        if self.columns + cells > self._line():
            self._word_ends()
        self.word.append((letter, style))
        self.columns += cells

    def _line(self) -> int:
        return max(self._width or self.console.width, 2)

    def _word_ends(self) -> None:
        if not self.word:
            return
        if self.column + len(self.blanks) + self.columns > self._line():
            if self.column:
                self._put("\n", "")
            self.column, self.blanks = 0, ""
        self._put(self.blanks, "")
        start = 0
        for i in range(1, len(self.word) + 1):
            # A style's letters go out together, so that no colour breaks up a word's letters.
            if i == len(self.word) or self.word[i][1] != self.word[start][1]:
                self._put("".join(letter for letter, _ in self.word[start:i]), self.word[start][1])
                start = i
        self.column += len(self.blanks) + self.columns
        self.word, self.columns, self.blanks = [], 0, ""

    def _put(self, text: str, style: str) -> None:
        if style and text:
            self.console.print(Text(text, style), end="", soft_wrap=True)
        else:
            self.console.file.write(text)
