"""One trial: candidates for an operation against stock MLX at one row count. They are checked, then timed.

Calls are timed as a pass makes them: the input of each depends on the output of the one before. MLX runs independent calls
concurrently, so a loop over such calls would time something else. Knows no kernel; keeps nothing.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .verdicts import Candidate, Measured

Call = Callable[[mx.array], Sequence[mx.array]]
Same = Callable[[Sequence[mx.array], Sequence[mx.array]], str | None]

SAMPLES, LENGTH = 7, 8
# What every timing here reads; tests put the clock of a made-up device in its place.
clock = time.perf_counter
_local = threading.local()


class TrialError(RuntimeError):
    """A trial that says nothing about its candidates: memory was short, or stock MLX failed."""


@dataclass(frozen=True)
class Trial:
    """What one row count compares: all calls return the same outputs of the same input.

    x: that input; other arrays belong to the calls. ours: one call for each candidate; stock: stock MLX's.
    `same(ours, stock)` says whether a candidate is right: None, or what is wrong.
    """

    x: mx.array
    ours: Sequence[Call]
    stock: Call
    same: Same

    def check(self) -> list[str | None]:
        """What is wrong with each of ours, None where nothing is."""
        theirs = self.stock(self.x)
        return [self.same(call(self.x), theirs) for call in self.ours]


def lazy(make: Callable[[], Callable]) -> Callable:
    """What `make()` returns, made at the first call: so a plan that cannot be prepared fails its candidate, not the trial."""
    made = functools.cache(make)
    return lambda *arrays: made()(*arrays)


def run_trial(candidates: Sequence[Candidate], make: Callable[[], Trial], limit_s: float) -> Measured | None:
    """What one trial finds; None: nothing, because `limit_s` was over before each side was timed once.

    The limit is checked between calls; a call that runs is not ended. The trial runs on this thread's own stream for trials.

    Raises:
      TrialError: its arrays or stock MLX's call could not be made.
    """
    until = clock() + limit_s
    with mx.stream(_stream()):
        try:
            trial = make()
            theirs = trial.stock(trial.x)
            mx.eval(theirs)
        except Exception as e:  # nothing is said of ours
            raise TrialError(f"no trial could be made: {_said(e)}") from e
        wrong, refused, sound = {}, {}, {}
        for candidate, call in zip(candidates, trial.ours, strict=True):
            if clock() > until:
                return None
            try:
                ours = call(trial.x)
                mx.eval(ours)
                if fault := trial.same(ours, theirs):
                    wrong[candidate.name] = fault
                else:
                    sound[candidate.name] = call
            except Exception as e:  # a text that does not compile or launch comes as any of several types
                refused[candidate.name] = _said(e)
        times = medians_s(*sound.values(), trial.stock, x=trial.x, until=until) if sound else [None]
    if times is None:
        return None
    *ours_s, stock_s = times
    families = {candidate.name: candidate.family for candidate in candidates}
    return Measured(families, stock_s, dict(zip(sound, ours_s, strict=True)), wrong, refused)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def _stream() -> mx.Stream:
    """This thread's own stream for trials: a stream belongs to the thread that made it."""
    if not hasattr(_local, "stream"):
        _local.stream = mx.new_stream(mx.default_device())
    return _local.stream


def medians_s(*calls: Call, x: mx.array, until: float = float("inf")) -> list[float] | None:
    """Seconds of one call of each: the median over `SAMPLES` chains of `LENGTH` calls; None if `until` comes before one each.

    The calls take turns, because a machine's speed varies.
    """
    times: list[list[float]] = [[] for _ in calls]
    for n in range(SAMPLES):
        for call, into in zip(calls, times, strict=True):
            if clock() > until:
                return [statistics.median(of) for of in times] if n else None
            begin = clock()
            mx.eval(chained(call, x, LENGTH))
            into.append((clock() - begin) / LENGTH)
    return [statistics.median(into) for into in times]


def chained(call: Call, x: mx.array, length: int) -> Sequence[mx.array]:
    """The outputs of the last of `length` calls. Each is given x plus 0 times the output of the one before."""
    out = call(x)
    for _ in range(length - 1):
        nothing = mx.reshape(out[0], (-1,))[:1] * 0
        out = call(x + nothing.astype(x.dtype))
    return out


def same_floats(tolerance: float) -> Same:
    """A `same` for float outputs: finite where stock is, and within `tolerance` of the largest stock value of each output."""

    def same(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> str | None:
        for a, b in zip(ours, theirs, strict=True):
            a, b = a.astype(mx.float32), b.astype(mx.float32)
            if not bool(mx.all(mx.isfinite(a) | ~mx.isfinite(b))):
                return "a value is not finite where stock MLX's is"
            off = float(mx.max(mx.abs(a - b)) / mx.maximum(mx.max(mx.abs(b)), 1e-30))
            if not off <= tolerance:
                return f"differs from stock MLX by {off:.2g} of the largest value, {tolerance:.2g} allowed"
        return None

    return same


def same_ids(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> str | None:
    """A `same` for integer outputs."""
    return None if all(bool(mx.array_equal(a, b)) for a, b in zip(ours, theirs, strict=True)) else "ids differ from stock MLX's"
