"""Keys typed while the program does not read input: the terminal does not show them, and they are not lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


@contextmanager
def keys_wait(stdin: TextIO | None, *, lines: bool = False) -> Iterator[Callable[[], None]]:
    """Keys that are typed here are not shown; they wait in the terminal until somebody reads them. Ctrl-C stays a signal.

    Elsewhere than in a terminal, and in a job that a shell runs behind others, nothing happens.
    Args:
      lines: whoever reads them reads lines, and no keys.
    Yields: what shows keys again, for who ends the process at once.
    """
    try:
        import termios

        fd = stdin.fileno()
        before, quiet = termios.tcgetattr(fd), termios.tcgetattr(fd)
        is_ours = _is_in_front(fd)
    except (ImportError, AttributeError, OSError, ValueError, termios.error):
        # No terminal of this kind, so none that shows keys.
        is_ours = False
    if not is_ours:
        yield lambda: None
        return

    def show() -> None:
        with suppress(OSError, termios.error):
            if _is_in_front(fd):
                termios.tcsetattr(fd, termios.TCSANOW, before)

    if not lines:
        quiet[0] &= ~termios.ICRNL
        quiet[3] &= ~termios.ICANON
    quiet[3] &= ~termios.ECHO
    # A signal's key would throw away what was typed before it.
    quiet[3] |= termios.NOFLSH
    termios.tcsetattr(fd, termios.TCSANOW, quiet)
    try:
        yield show
    finally:
        show()


def _is_in_front(fd: int) -> bool:
    """Whether the terminal is this job's: the system stops one that changes it from behind."""
    return os.tcgetpgrp(fd) == os.getpgrp()
