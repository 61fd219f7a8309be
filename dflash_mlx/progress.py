"""How far long work is: the work tells, and who listens shows it. Shows nothing itself.

The command line listens (`cli/live.py`). Without a listener `tell` costs only a look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, float | None, float | None, str], None]

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def tell(what: str, done: float | None = None, total: float | None = None, unit: str = "") -> None:
    """Say what goes on now, and how far it is.

    Args:
      what: in words, such as "Converting"; the same words while it is the same work.
      done, total: in `unit`, which is "bytes", "s" or a plural noun; None: not known.
    """
    if (listener := _listener.get()) is not None:
        listener(what, done, total, unit)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """While the block runs, pass progress messages of this thread to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def hub_bar(what: str) -> type:
    """A class of bar for the hub's downloads. It draws nothing and tells how many bytes are here."""
    from tqdm.auto import tqdm

    # Its threads have no listener of their own.
    listener, here = _listener.get(), {}

    class Bar(tqdm):
        # Without a thread of tqdm's that looks after its bars.
        monitor_interval = 0

        def display(self, *_: object, **__: object) -> None:
            # Bytes that came and bytes that are written have a bar each. Another one counts files.
            if listener is not None and self.unit == "B" and self.total:
                here[id(self)] = self.n
                listener(what, min(max(here.values()), self.total), self.total, "bytes")

        def close(self) -> None:
            self.disable = True

    return Bar
