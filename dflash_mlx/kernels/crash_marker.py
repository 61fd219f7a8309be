"""Remembers trials in which a process died: a marker file beside the results, locked while a trial runs. Knows no kernel."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

# For how many starts a trial is left out after a process died in it, for each time that one did.
OFF_STARTS = 5


@dataclass
class Marker:
    """What is known of processes that died in one trial.

    locked: whether this process may store the trial's result. If another one runs the same trial, or there is no cache directory,
      the result is for this process alone.
    crash: why there is to be no trial; None: try. done: set when the trial's result is kept, so that nothing is left behind.
    """

    locked: bool = False
    crash: str | None = None
    done: bool = False


@contextlib.contextmanager
def marked(path: Path) -> Iterator[Marker]:
    """Round one trial: a locked file says "trying" for as long as it runs.

        file         {"trying": true, "crashes": 0, "skipped": 0}
        exit seen    an error, Ctrl-C, SIGTERM, SIGHUP, SIGQUIT, `leave_at_once`, the end of a program whose other thread is in
                     the trial: the file is as it was before, and the next start tries again
        exit unseen  a later start finds "trying" in a file that nobody locks: the process died, or the GPU hung

    After a crash the shape is off for `OFF_STARTS` starts, after each further one for as many more; then it is tried again.
    A thread other than the main one cannot see a SIGTERM that nobody handles: it writes "unwatched" too, and the first end of
    such a trial is forgiven, for it may be the user's.
    """
    with contextlib.ExitStack() as open_files:
        file, marker = _locked(path, open_files), Marker()
        if file is None:
            yield marker
            return
        marker.locked = True
        before = _marker_state(file.read())
        if before["trying"] and before["unwatched"] and not before["forgiven"]:
            before |= {"trying": False, "forgiven": True}
        elif before["trying"]:
            before |= {"trying": False, "crashes": before["crashes"] + 1, "skipped": 0}
        if before["crashes"] and before["skipped"] < OFF_STARTS * before["crashes"]:
            before["skipped"] += 1
            left, times = OFF_STARTS * before["crashes"] - before["skipped"] + 1, before["crashes"]
            marker.crash = f"a process ended in its trial ({times} times); tried again {left} starts later, or delete {path}"
            _write_marker(path, file, before)
            yield marker
            return

        def forget() -> None:
            _write_marker(path, file, before)

        _under_way.append(forget)
        try:
            with _signals_first(forget):
                _write_marker(path, file, {**before, "trying": not _ending.is_set(), "unwatched": _is_unwatched()})
                yield marker
        finally:
            _under_way.remove(forget)
            _write_marker(path, file, None if marker.done else before)


# Of each trial that runs in this process: what undoes its marker. Whether the process ends, so that no trial is marked any more.
_under_way: list[Callable[[], None]] = []
_ending = threading.Event()
# A child of a fork is in no trial.
os.register_at_fork(after_in_child=_under_way.clear)


@atexit.register
def _end() -> None:
    """What runs in daemon threads stops where it is when a program ends: that is no crash."""
    _ending.set()
    _forget_all()


def _forget_all() -> None:
    for forget in list(_under_way):
        forget()


def leave_at_once(status: int) -> NoReturn:
    """End the process from any thread without waiting for what MLX computes; a trial that runs is no crash."""
    _forget_all()
    os._exit(status)


def _locked(path: Path, open_files: contextlib.ExitStack) -> IO[str] | None:
    """The file at `path`, locked; the system lets go of the lock when the process ends, however it ends. None: it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_files.enter_context(path.open("a+"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.seek(0)
        return file
    except OSError:
        return None


def _marker_state(text: str) -> dict[str, Any]:
    """What a marker says; one that cannot be read was left by a crash."""
    state = {"trying": bool(text), "crashes": 0, "skipped": 0, "unwatched": False, "forgiven": False}
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        state |= {name: type(state[name])(value) for name, value in json.loads(text).items() if name in state}
    return state


def _write_marker(path: Path, file: IO[str], state: dict[str, Any] | None) -> None:
    """Write a locked marker. One that says nothing is removed: emptied too, for another process may have opened it already."""
    with contextlib.suppress(OSError):
        file.truncate(0)
        if state and (state["trying"] or state["crashes"] or state["forgiven"]):
            file.write(json.dumps(state))
            file.flush()
        else:
            path.unlink()


# Signals that end a process which does not handle them.
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def _is_unwatched() -> bool:
    """Whether SIGTERM would end the process unseen: `_signals_first` watches from the main thread alone."""
    main = threading.current_thread() is threading.main_thread()
    return not main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@contextlib.contextmanager
def _signals_first(then: Callable[[], None]) -> Iterator[None]:
    """Call `then` before SIGTERM, SIGQUIT, or SIGHUP of a closed terminal ends the process, where nobody else handles it.

    Only the main thread may ask for that.
    """
    main = threading.current_thread() is threading.main_thread()
    ours = [number for number in _ENDING if main and signal.getsignal(number) == signal.SIG_DFL]

    def handler(number: int, frame: Any) -> None:
        then()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in ours:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
