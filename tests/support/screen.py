"""A command in a terminal of any width: keys go in, and the tests read the screen that a person would see.

    with Screen(["generate", "-p", "x"], columns=40) as screen:
        screen.wait_for("tokens/s")
        screen.end()
    assert not screen.torn and screen.longest_pause < 2

The terminal is `pyte`'s, on a real pseudo-terminal of `pexpect`'s. It notes what it had to break because it was over the width.
"""

from __future__ import annotations

import os
import re
import sys
import time

import pexpect
import pyte

# Words of this project that mean nothing to who uses it. What is said without --stats, --json or --verbose holds none of them.
# A "round" is allowed in "tokens a round".
PRIVATE = (
    "tau anchor slot slots width widths trial trials verdict verdicts accepted bonus taps pending rollback proposer policy "
    "autotune prefill survey fingerprint confidence_cut prompt_lookup calibration acceptance"
).split()
COMMAND = [sys.executable, "-m", "dflash_mlx"]


def private_words(text: str) -> list[str]:
    """The words of ours that a text holds."""
    allowed = re.sub(r"tokens?\s+a\s+round", "", text, flags=re.IGNORECASE)
    return [word for word in [*PRIVATE, "round", "rounds"] if re.search(rf"(?<![\w-]){word}(?!\w)", allowed, re.IGNORECASE)]


class _Terminal(pyte.HistoryScreen):
    """pyte's screen; it answers what programs ask a terminal, and notes each line that it broke at the right edge."""

    def __init__(self, columns: int, lines: int):
        super().__init__(columns, lines, history=100_000, ratio=0.5)
        self.broken: list[tuple[str, str]] = []
        self.answer = lambda data: None

    def draw(self, data: str) -> None:
        for char in data:
            if self.cursor.x == self.columns and pyte.modes.DECAWM in self.mode:
                self.broken.append((self.row(self.cursor.y), char))
            super().draw(char)

    def row(self, y: int) -> str:
        return "".join(self.buffer[y][x].data for x in range(self.columns))

    def write_process_input(self, data: str) -> None:
        self.answer(data)


class Screen:
    """A running command and its terminal.

    Args:
      command: arguments of `dflash-mlx`, or a whole command line with `program=True`.
    Attributes:
      changes: times, since the start, at which what is on the screen changed; the last is the command's end, once it has ended.
      seen: every different screen so far, as text: live lines too, which are gone at the end.
      rows: those of the screens in `seen`, each once, in the order in which they came.
    """

    def __init__(
        self,
        command: list[str],
        columns: int = 80,
        lines: int = 50,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        program: bool = False,
    ):
        words = command if program else [*COMMAND, *command]
        # What the test process was told of its own terminal is not this one.
        base = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CI")}
        env = {**base, "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1", **(env or {})}
        self.terminal, self.columns = _Terminal(columns, lines), columns
        self.child = pexpect.spawn(words[0], words[1:], dimensions=(lines, columns), env=env, cwd=cwd, timeout=None)
        self.terminal.answer = lambda data: self.child.send(data)
        self._stream, self._began = pyte.ByteStream(self.terminal), time.monotonic()
        self.changes: list[float] = [0.0]
        self.seen: list[str] = [""]
        self.rows: dict[str, None] = {}
        self.code: int | None = None

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.close(force=True)

    @property
    def text(self) -> str:
        """What is on the screen and what went off its top, rows without blanks at their ends."""
        gone = ["".join(row[x].data for x in range(self.columns)) for row in self.terminal.history.top]
        return "\n".join(row.rstrip() for row in [*gone, *self.terminal.display]).rstrip()

    @property
    def torn(self) -> list[str]:
        """Rows in which the terminal broke a word: nothing but the width said that the line ends there."""
        return [row for row, char in self.terminal.broken if row[-1:].strip() and char.strip()]

    @property
    def over(self) -> list[str]:
        """Rows that the terminal had to break at all."""
        return [row for row, char in self.terminal.broken if char.strip()]

    @property
    def longest_pause(self) -> float:
        """The longest time in seconds without a change on the screen, up to the last change or the command's end."""
        return max((b - a for a, b in zip(self.changes, self.changes[1:], strict=False)), default=0.0)

    def send(self, keys: str) -> None:
        """Press keys; "\\r" is Return, "\\x03" Ctrl-C, "\\x04" Ctrl-D."""
        self.child.send(keys)

    def read(self, seconds: float = 0.05) -> bool:
        """Take what the command writes for so long at most; False: it has ended."""
        try:
            data = self.child.read_nonblocking(1 << 16, timeout=seconds)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            self._note(ended=True)
            return False
        self._stream.feed(data)
        self._note()
        return True

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Read until a text is on the screen, in one row.

        Raises:
          AssertionError: it did not come; names what is on the screen.
        """
        until = time.monotonic() + seconds
        while text not in self.text:
            going = self.read()
            assert text in self.text or (going and time.monotonic() < until), f"{text!r} did not come:\n{self.text}"

    def end(self, seconds: float = 60) -> int:
        """Read to the command's end; its exit status.

        Raises:
          AssertionError: it did not end; names what is on the screen.
        """
        until = time.monotonic() + seconds
        while self.read():
            assert time.monotonic() < until, f"the command did not end:\n{self.text}"
        self.child.close()
        self.code = self.child.exitstatus if self.child.exitstatus is not None else 128 + self.child.signalstatus
        return self.code

    def _note(self, ended: bool = False) -> None:
        shown = self.text
        if ended or shown != self.seen[-1]:
            self.changes.append(time.monotonic() - self._began)
        if shown != self.seen[-1]:
            self.seen.append(shown)
            self.rows.update(dict.fromkeys(self.text.splitlines()))
