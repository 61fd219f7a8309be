"""Tools for text that grows: marks that are found wherever their letters fall, frames round an answer, and JSON that may end.

Knows no grammars: `channels` puts them together.
"""

from __future__ import annotations

from collections.abc import Sequence


class Scanner:
    """Cuts growing text at marks, wherever their letters fall."""

    def __init__(self) -> None:
        self.held = ""

    def next(self, marks: Sequence[str], last: bool) -> tuple[str, str | None]:
        """Text before the first of these marks in what is held, and that mark; without one, the text that begins none."""
        found = [(at, -len(mark), mark) for mark in marks if (at := self.held.find(mark)) >= 0]
        if found:
            at, _, mark = min(found)
            text, self.held = self.held[:at], self.held[at + len(mark) :]
            return text, mark
        cut = len(self.held)
        if not last:
            longest = max(map(len, marks), default=1) - 1
            starts = (n for n in range(min(longest, cut), 0, -1) if any(mark.startswith(self.held[-n:]) for mark in marks))
            cut -= next(starts, 0)
        text, self.held = self.held[:cut], self.held[cut:]
        return text, None


class Frame:
    """Removes marks that are ordinary text: one where an answer begins, the other where it ends. Elsewhere they stay."""

    def __init__(self, start: str, end: str, before: str):
        self.start, self.end, self.held = start, end, ""
        # Whether the first mark may still come; None: it came, or cannot come any more.
        self.begins: bool | None = not before.rstrip().endswith(start)
        self.within = not self.begins

    def open(self) -> None:
        """Its first mark stood before the answer, where it ended reasoning."""
        self.begins, self.within = None, True

    def feed(self, text: str, last: bool) -> str:
        """The text that is the answer's for certain. last: the answer ends after this text."""
        self.held += text
        said = ""
        if self.begins:
            at = len(self.held) - len(self.held.lstrip())
            said, self.held = self.held[:at], self.held[at:]
            if self.held.startswith(self.start):
                self.begins, self.within, self.held = None, True, self.held[len(self.start) :]
            elif self.held and (last or not self.start.startswith(self.held)):
                self.begins = None
        if self.begins:
            return said
        at = len(self.held)
        if self.within:
            at = self.held.rfind(self.end[0])
            tail = self.held[at:].rstrip() if at >= 0 else ""
            ended = tail == self.end
            if at < 0 or not ended and (last or not self.end.startswith(self.held[at:])):
                at = len(self.held)
            elif last and ended:
                self.held, self.within = self.held[:at], False
        said, self.held = said + self.held[:at], self.held[at:]
        return said


class JsonText:
    """Whether growing text can still be JSON (possible), and whether it ends within a string (within)."""

    def __init__(self) -> None:
        self.possible, self.within, self._escaped, self._over = True, False, False, False
        # How many objects and lists are open; None: none was opened yet.
        self._depth: int | None = None

    def feed(self, text: str) -> bool:
        """Add text. Returns: whether it can still be JSON."""
        for letter in text if self.possible and not self._over else "":
            if self._escaped:
                self._escaped = False
            elif self.within:
                # No string holds a line end. So text with a string that was never closed is soon known to be no call.
                self.possible = letter >= " "
                self.within, self._escaped = letter != '"', letter == "\\"
            elif self._depth == 0 and letter == "<":
                # Marks may follow.
                self._over = True
                break
            elif self._depth == 0 and letter == ";":
                # Llama writes it between calls.
                self._depth = None
            elif self._depth == 0 and letter == "{":
                self._depth = 1
            elif not letter.isspace():
                self.possible = bool(self._depth) or self._depth is None and letter in "{["
                self._depth = (self._depth or 0) + (letter in "{[") - (letter in "}]")
                self.within = letter == '"'
            if not self.possible:
                break
        return self.possible
