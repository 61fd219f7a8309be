"""Ctrl-C while the main thread is inside MLX: Python would tell of it only when the pass is through, seconds later."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
