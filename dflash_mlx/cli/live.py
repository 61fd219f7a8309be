"""The live line on stderr: what is running, how far it is, how long it has taken, and how long is left.

    Fetching Qwen/Qwen3-4B: 1.2 of 8.0 GB, 14 s, about 2 min left

On a terminal the line is drawn four times a second and is gone at the end. Elsewhere, as in a pipe, it is printed every ten
seconds. The seconds are counted even during one long step. The line answers Ctrl-C at once.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from ..progress import listening
from ..serving.interrupt import at_ctrl_c

# Work that ends sooner shows nothing. Between two drawings, and between two lines in a pipe.
_DELAY_S, _DRAWN_S, _PRINTED_S = 0.3, 0.25, 10.0
# The longest wait for a drawing: a thread that hangs in one must not keep the command from ending.
_LEFT_S = 2.0
# The time left is not estimated before this.
_ENOUGH_S = 2.0
_line: ContextVar[Line | None] = ContextVar("line", default=None)
_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))


class Line:
    """The state of the line. `update` may be called from any thread; it is cheap, and draws nothing."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic, printed_after: float | None = None):
        self._clock, self._thread, self._printed_after = clock, None, printed_after
        self._lock, self._state = threading.Lock(), (what, None, None, "", clock(), 0.0)
        self._end, self._is_stopping = threading.Event(), False

    def update(self, what: str, done: float | None = None, total: float | None = None, unit: str = "") -> None:
        """As `progress.tell`."""
        with self._lock:
            now, began, first = self._state[0], *self._state[4:]
            if what != now or done is not None and done < first:
                began, first = self._clock(), done or 0.0
            self._state = what, done, total, unit, began, first

    def stopping(self) -> None:
        """Show from now on that Ctrl-C was received: Python ends only after the running pass, which may take seconds."""
        self._is_stopping = True

    def heed(self) -> None:
        """End here if Ctrl-C was received and its exception was lost, for example in other code's bare `except`.

        Raises: KeyboardInterrupt.
        """
        if self._is_stopping:
            raise KeyboardInterrupt

    def prefill(self, done: int, total: int) -> None:
        """A `prompt_progress_callback`. The line ends when the prompt is read."""
        if done < total:
            self.update("Reading the prompt", done, total, "tokens")
        else:
            self.stop()

    def text(self, width: int) -> str:
        """The line, in at most `width` characters: the description is cut before the figures."""
        with self._lock:
            what, done, total, unit, began, first = self._state
        what = f"Stopping after this: {what}" if self._is_stopping else what
        took = self._clock() - began
        how_far = far(done, total, unit) if done is not None else ""
        left = ""
        if total and done is not None and done > first and took > _ENOUGH_S:
            left = f"about {time_text((total - done) * took / (done - first))} left"
        for figures in ((how_far, time_text(took), left), (how_far, time_text(took)), (time_text(took),)):
            said = ", ".join(filter(None, figures))
            room = width - len(said) - 2
            if room >= min(len(what), 12):
                break
        what = what if len(what) <= room else what[: max(room - 1, 0)].rstrip() + "…"
        return f"{what}: {said}"[:width]

    @property
    def is_shown(self) -> bool:
        return not self._end.is_set()

    def show(self) -> None:
        """Begin to draw the line, in a thread of its own."""
        # Imported here: Ctrl-C in an import of the main thread can leave the lock of all imports held, and another thread would
        # wait for it without end.
        from rich import console, live, text  # noqa: F401

        self._thread = threading.Thread(target=self._draw, args=(sys.stderr,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Remove the line, as before text for the user. Later messages are not shown."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(_LEFT_S)

    def _draw(self, stderr: Any) -> None:
        if self._end.wait(_DELAY_S):
            return
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        console = Console(file=stderr)
        if not console.is_terminal or console.is_dumb_terminal:
            wait = _PRINTED_S if self._printed_after is None else self._printed_after
            while not self._end.wait(wait):
                print(self.text(200), file=stderr, flush=True)
                wait = _PRINTED_S
            return
        text = lambda: Text(self.text(console.width - 1), no_wrap=True, overflow="crop")  # noqa: E731
        with Live(console=console, get_renderable=text, transient=True, auto_refresh=False) as drawn:
            while not self._end.wait(_DRAWN_S):
                drawn.refresh()


def far(done: float, total: float | None, unit: str) -> str:
    """ "1.2 of 8.0 GB", "3 of 12 tensors", "5 tokens"."""
    if unit == "bytes":
        unit, one = next((name, size) for name, size in _BYTES if (total or done) >= size or size == 1)
        digits = ".1f" if one > 1 else ".0f"
        return f"{done / one:{digits}} of {total / one:{digits}} {unit}" if total else f"{done / one:{digits}} {unit}"
    if unit == "%":
        return f"{done:.0f} %"
    return f"{done:,.0f} of {total:,.0f} {unit}" if total else f"{done:,.0f} {unit}"


def time_text(seconds: float) -> str:
    """ "14 s", "3 min", "2 h 5 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


@contextlib.contextmanager
def live(what: str, printed_after: float | None = None) -> Iterator[Line]:
    """Show a live line until the block ends, or `Line.stop`. It shows what the block reports by `progress.tell`.

    A block inside another one uses its line. printed_after: seconds to the first line in a pipe, if not ten.
    """
    if (outer := _line.get()) is not None and outer.is_shown:
        outer.update(what)
        yield outer
        return
    line = Line(what, printed_after=printed_after)
    line.show()
    token = _line.set(line)
    try:
        with listening(line.update), at_ctrl_c(line.stopping):
            yield line
    finally:
        line.stop()
        _line.reset(token)
