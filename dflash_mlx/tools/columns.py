"""Text for people: counts, ages, lines broken between words, and tables that become lists where there is no room for them.

A word that alone is wider than the terminal, such as a path, stays whole: the terminal breaks it, and it is copied in one piece.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence


def count(n: int, noun: str) -> str:
    """ "1 token", "2,000 tokens"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def age_text(used_at: float, now: float | None = None) -> str:
    """How long ago: "now" within a minute, "12 min", "5 h", "3 days". used_at, now: seconds since 1970; None: the present."""
    seconds = max((time.time() if now is None else now) - used_at, 0)
    if seconds < 60:
        return "now"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    return f"{seconds // 3600:.0f} h" if seconds < 86400 else count(int(seconds // 86400), "day")


def wrap(text: str, width: int | None, indent: int = 0) -> str:
    """A text with its lines broken between words where they are over a width; None: as it is.

    indent: blanks in front of what goes on in another line; fewer before a word that needs the room.
    """
    if width is None:
        return text
    keep = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    indent = min(indent, width // 3)
    lines = []
    for line in text.split("\n"):
        broken = textwrap.wrap(line, width, subsequent_indent=" " * indent, **keep) if len(line) > width else [line]
        lines += [one.strip().rjust(width) if len(one) > width else one for one in broken]
    return "\n".join(lines)


def align(lines: Sequence[Sequence[str]], width: int | None = None, below: Sequence[str] = ()) -> list[str]:
    """Columns of one width each; the first and the last to the left, all others to the right.

    lines: the first names the columns. below: a line under each of the others. Over `width` each row is a list instead, under
    what its first column says:

        function
          T 0, prompt 3, mlx-lm 46.1, DFlash 35.0
    """
    under = lambda i: wrap(f"  {below[i]}", width, 2).split("\n") if below and i >= 0 else []  # noqa: E731
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    if width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        listed = []
        for i, (first, *others) in enumerate(lines[1:]):
            said = ", ".join(f"{name} {value}" for name, value in zip(lines[0][1:], others, strict=True) if value)
            listed += [*wrap(f"{first}\n  {said}", width, 2).split("\n"), *under(i)]
        return listed
    shown = []
    for i, line in enumerate(lines):
        middle = (cell.rjust(n) for cell, n in zip(line[1:-1], widths[1:-1], strict=True))
        shown += ["  ".join([line[0].ljust(widths[0]), *middle, line[-1]]).rstrip(), *under(i - 1)]
    return shown
