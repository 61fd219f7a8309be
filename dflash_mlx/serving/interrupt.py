"""Ctrl-C while the main thread is inside MLX: Python would tell of it only when the pass is through, seconds later."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Seconds after which a lost Ctrl-C comes again: by then whatever could raise nothing has returned.
_AGAIN_S = 0.05
# Seconds after which one comes again that a library's `except` caught.
_CAUGHT_S = 1.0


def bring_back(lost: Any) -> None:
    """A `sys.unraisablehook`: Ctrl-C comes again where its exception could not be raised, as in a finalizer.

    An import has such places too: each module's lock has a callback that Python runs when it is freed.
    """
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        return sys.__unraisablehook__(lost)
    again = threading.Timer(_AGAIN_S, _again)
    again.daemon = True
    again.start()


def _again() -> None:
    # A program that ends has given the signal back to the system, which would kill it.
    if threading.main_thread().is_alive() and not sys.is_finalizing():
        os.kill(os.getpid(), signal.SIGINT)


def is_ctrl_c(error: BaseException | None) -> bool:
    """Whether an error is Ctrl-C, or came of it: Python and libraries wrap what a class's body or an import raises."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def insistent() -> Iterator[None]:
    """Ctrl-C comes again each second until the block ends: libraries catch it where they are imported or load a model.

    For blocks that have nothing to keep.
    """
    ended = threading.Event()

    def act() -> None:
        while not ended.wait(_CAUGHT_S):
            os.kill(os.getpid(), signal.SIGINT)

    with at_ctrl_c(act):
        try:
            yield
        finally:
            # Before waiting for the watcher: what is closed after the block must not be interrupted again.
            ended.set()


@contextmanager
def at_ctrl_c(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` in another thread as soon as SIGINT comes, once. What the signal's own handler does stays as it is.

    Outside the main thread, which alone gets signals, nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Python's C handler writes the signal's number here at once, whatever the main thread is doing.
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        while byte := os.read(read, 1):
            if before >= 0:
                os.write(before, byte)
            if byte[0] == signal.SIGINT:
                act()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)
        watcher.join(1)
        os.close(read)
