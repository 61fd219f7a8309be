"""A pass over blocks that is traced once and run again. With a small model the host needs longer to build a pass than the GPU
needs to run it. `compiled_verify` and `compiled_draft` have the two passes that are compiled, and `compiled_pair` joins them.

    DFLASH_MLX_COMPILE   unset, auto   on a GPU: the widths at which a trial on this machine found it faster; on Metal from the
                                       second answer on
                         off           no pass
                         on            all passes that can be traced, faster or not, on any device

`mx.compile` treats Python numbers as constants and makes a new trace for every new shape. So a compiled pass takes the whole key
and value buffers of the cache, and its position as arrays: places to write to, and a mask over the buffers.

    buffer   r0 r1 r2 r3 | b0 b1 b2 | .  .  .        the block's rows are written after the held rows; block row j sees rows
             held          block      capacity       up to its own place. Rows after it have weight zero.

What is shorter than a traced shape is filled up with rows without meaning. In a trace, layers that take the same array are
computed as one product (see `fusion`).

A weight of zero hides only finite values, and a draft that was rolled back may have overflowed float16. So the finite flag is
always read after a compiled pass of the target (`Target.finite_flag`). If a value was not finite, the pass runs again as an
ordinary one, and this target runs no more compiled passes.

Capacities come in few sizes, so that there are few traces. Only models are tried whose entries are all plain `KVCache`s or
states of a gated delta rule. Each width and each capacity is compared with the ordinary pass, on copies, before it is used. If a
model does something that cannot be traced (Python numbers made of the offset, code that looks into entries), it is not compiled.
Weights are constants of a trace: a weight that is replaced, as adapters do, is used from the next answer on; one that is changed
in place (`weight *= 2`) is not noticed.

Knows trials and traces; `buffers` knows cache entries in traces. Knows neither of the models, nothing of acceptance or the loop.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import DFlashError
from ..kernels import autotune, block_linear
from ..kernels.routing import kernel_calls
from .buffers import (
    Pass,
    Place,
    capacity_for,
    copied,
    distance,
    fits,
    held,
    may_trace,
    rows_of,
    run_traced,
    traceable,
    widen,
)
from .fusion import Call, fused_bytes, fused_linears

# Blocks are filled up to a multiple of this: it keeps traces few, and rows cost little in a compiled pass.
ROWS = 4
# MLX's kernels for several rows on CUDA need a multiple of this many columns of a quantized product; others are slower.
TILE = 128
# How many traces are kept, by width and capacity; each takes some hundred kilobytes.
_KEPT = 32
# How far the two passes may differ, in units of the type's precision and relative to the norm: roundings of a few dozen layers.
# A row that is seen and should not be, or the other way round, differs by far more.
_ROUNDINGS = {mx.float32: 1000, mx.float16: 32, mx.bfloat16: 16}
# How often the comparison may fail before a compiled pass is given up. In a text of one token repeated, two right passes lie far
# apart in half precision (0.2 of the norm in bfloat16: SmolLM2-135M, H100). A wrong pass is wrong in any text.
_COMPARISONS = 3
# A compiled pass must take less than this share of an ordinary one's time.
_FASTER = 0.97

_log = logging.getLogger("dflash_mlx.traced.compiled")


def model_parts(model: nn.Module) -> list[Any]:
    """All constants of a trace: the arrays, numbers and modules of a model, but nothing that others attach to it."""
    values = (value for module in model.modules() for value in (*module.values(), *vars(module).values()))
    return [value for value in values if isinstance(value, (mx.array, nn.Module, bool, int, float, str))]


class TraceError(DFlashError, ValueError):
    """The passes of a model cannot be traced, for the reason given."""


def _timed(rows: int) -> int:
    """The number of rows under which a trial of `rows` rows is filed: only a few widths are timed."""
    return 1 if rows == 1 else rows + -rows % ROWS


class CompiledPass:
    """The compiled forms of one pass, by shape (numbers of rows) and capacity.

    eager: the ordinary pass, with which a trace is compared.
    traced: fused -> the pass to trace, with these calls in place of the layers' own.
    model: what the pass runs; parts: the constants of its traces.
    always: use every pass that is right, faster or not.
    refused: why this model cannot be compiled, or None.
    passes: number of compiled passes so far.
    joins: whether layers are joined; kernels: what may compute a fused linear, like `kernel_calls`; fused: whether kernels may
      also take the norm, sum or gate around one.
    windows: whether entries with a window may be traced while they hold all rows. own: whether the model is ours, so that its
      layers may hold views of fused weights. roundings: how far a pass may differ, like `_ROUNDINGS`.
    """

    joins, kernels, fused, windows, own, roundings = True, staticmethod(kernel_calls), True, False, False, _ROUNDINGS
    prepares = True

    def __init__(
        self, name: str, eager: Pass, traced: Callable[[list[Call]], Pass], model: nn.Module, parts: list[Any], always: bool
    ):
        self.name, self._eager, self._traced, self.parts, self.always = name, eager, traced, parts, always
        # A weak reference: the model holds this object.
        self._model = weakref.ref(model)
        self.refused: str | None = None
        self.passes = 0
        # Whether compiling has to wait; bytes of the fused weights that traces hold.
        self.waits, self.held = False, 0
        self._forget()

    def _forget(self) -> None:
        # The pass to trace; set by the first trial.
        self._pass: Pass | None = None
        # (shape, capacity, type, stream, rows asked for: 1, or the shape's) -> the compiled pass; None: run the ordinary one.
        self._known: dict[tuple, Callable[..., Any] | None] = {}
        # (shape, rows asked for) and capacities at which a pass was right.
        self._right: tuple[set[tuple], set[int]] = (set(), set())
        # `_timed` rows of a block -> whether it was faster.
        self._faster: dict[int, bool] = {}
        # A key of `_known` -> number of failed comparisons.
        self._failed: Counter[tuple] = Counter()
        # Capacity -> its row numbers, 0, 1, ...
        self._columns: dict[int, mx.array] = {}
        self._plans = autotune.plans()

    def findings(self) -> dict[str, Any]:
        """Plain values: the model's name, why it is refused or None, number of passes, and whether faster, by rows of a block."""
        return {
            "name": self.name,
            "refused": self.refused,
            "passes": self.passes,
            "held_mb": round(self.held / 1e6, 1),
            "faster": {str(rows): faster for rows, faster in self._faster.items()},
        }

    def refuse(self, reason: str) -> None:
        """Run no more compiled passes, and say so in one log line; as a warning if the user asked for them."""
        self.refused = reason
        # Traces hold copies of weights: half of a small model's.
        self._pass, self._known, self.held = None, {}, 0
        _log.log(logging.WARNING if self.always else logging.INFO, "%s is not compiled: %s", self.name, reason)

    def serves(self, rows: int) -> bool:
        """Whether blocks of this many rows are compiled, as far as is known."""
        return not self.refused and self._faster.get(_timed(rows), True)

    def run(
        self,
        arrays: Sequence[mx.array],
        filled: Sequence[mx.array],
        cache: Sequence[Any],
        spare: int,
        context: int,
        K: int,
        keeps: int,
    ) -> tuple[mx.array, ...] | None:
        """One pass over a batch of one. None: run the ordinary one; nothing has happened then.

        Args:
          arrays: input of the ordinary pass; filled: the same with `spare` rows without meaning before it and others after it, so
            that few shapes are traced. The output may have as many extra rows at its end.
          context, K: numbers of context rows and block rows after `spare`; the arrays' shapes follow from these.
          keeps: rows by which the offset grows.
        """
        rows = 1 if arrays[0].shape[1] == 1 else K
        if self.waits or not self.serves(rows) or arrays[0].shape[0] != 1:
            return None
        new = spare + context + K
        if not may_trace(cache, new if self.windows else None) or any(a is None for entry in cache for a in held(entry)):
            return None
        entries = rows_of(cache)
        length, dtype = entries[0].offset, entries[0].keys.dtype
        if any(entry.offset != length for entry in entries):
            return None
        autotune.may_run()
        if self._plans is not autotune.plans():
            # A kernel was turned on or off.
            self._forget()
        capacity = capacity_for(max(length + new, *(entry.keys.shape[2] for entry in entries)))
        if capacity not in self._columns:
            self._columns[capacity] = mx.arange(capacity, dtype=mx.int32)
            mx.eval(self._columns[capacity])
        place = Place.of(length, spare, context, K, self._columns[capacity], dtype)
        key = (place.shape, capacity, dtype, str(mx.default_stream(mx.default_device())), rows)
        if key not in self._known:
            # Shape and capacity are checked apart: what a model does with one does not depend on the other.
            known = (place.shape, rows) in self._right[0] and capacity in self._right[1]
            run = self._compiled(key, cache) if known else self._tried(arrays, filled, cache, place, length, keeps, key)
            if run is None and 0 < self._failed[key] < _COMPARISONS:
                return None
            self._known[key] = run
            while len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        # Another thread may have removed it.
        if (run := self._known.get(key)) is None:
            return None
        for entry in entries:
            widen(entry, capacity)
        out = run_traced(run, filled, cache, place, length + keeps)
        self.passes += 1
        return out

    def _compiled(self, key: tuple, cache: Sequence[Any]) -> Callable[..., Any]:
        # One row and a filled-up block share a trace; they are compared with different passes.
        shared = next((run for other, run in self._known.items() if run and other[:-1] == key[:-1]), None)
        return shared or mx.compile(functools.partial(traceable, self._pass, [*map(type, cache)]))

    def _tried(
        self,
        arrays: Sequence[mx.array],
        filled: Sequence[mx.array],
        cache: Sequence[Any],
        place: Place,
        length: int,
        keeps: int,
        key: tuple,
    ) -> Callable[..., Any] | None:
        """Compare the compiled pass with the ordinary one, both on copies of the cache, and time it. None: do not use it.

        If memory is too small for those copies, nothing is compiled at this capacity.
        """
        if not fits(cache):
            return None
        plain, ours = ([copied(entry) for entry in cache] for _ in range(2))
        for entry in rows_of(ours):
            widen(entry, place.capacity)

        def eager() -> tuple[mx.array, ...]:
            return self._eager(arrays, plain, length)

        def compiled() -> tuple[mx.array, ...]:
            return run_traced(run, filled, ours, place, length + keeps)

        try:
            expected = eager()
            if self._pass is None:
                noted = self._noted(arrays, [copied(entry) for entry in cache], length) if self.joins else []
                self._pass, self.held = self._traced(noted), fused_bytes(noted)
            run = self._compiled(key, cache)
            off = distance(expected, compiled(), plain, ours, length)
        except Exception as e:  # code of a model that cannot take arrays for numbers; no memory for fused weights
            self.refuse(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'no message'}")
            return None
        allowed = self.roundings.get(expected[0].dtype, 0) * mx.finfo(expected[0].dtype).eps
        if not off <= allowed:
            self._failed[key] += 1
            if self._failed[key] == _COMPARISONS:
                found = f"off by {off:.2g} of its norm, {allowed:.2g} allowed"
                _log.warning("a compiled pass of %s over %d rows is not used: it is %s", self.name, place.rows.size, found)
            return None
        rows = _timed(key[-1])
        if not self.always and rows not in self._faster:
            ours_s, plain_s = _least_s([(compiled, ours), (eager, plain)], keeps)
            self._faster[rows] = ours_s < _FASTER * plain_s
        self._right[0].add((place.shape, key[-1]))
        self._right[1].add(place.capacity)
        return run if self._faster.get(rows, True) else None

    def _noted(self, arrays: Sequence[mx.array], spare: Sequence[Any], length: int) -> list[Call]:
        """The calls that replace the layers' own in a trace."""
        columns = TILE if mx.cuda.is_available() else 1
        fused = self.fused and autotune.may_run() and autotune.allowed(block_linear.KERNEL)
        run = lambda calls: self._traced(calls)(arrays, spare, length)  # noqa: E731
        # Held here, the old weights of a model that is joined in place would stay in memory too.
        self.parts = [] if self.own else self.parts
        try:
            calls, taken = self._attention(arrays) if fused else ([], [])
            return [*calls, *fused_linears(self._model(), run, self.kernels, columns, fused, self.own, taken)]
        finally:
            self.parts = model_parts(self._model()) if self.own else self.parts

    def _attention(self, arrays: Sequence[mx.array]) -> tuple[list[Call], list[nn.Module]]:
        """Calls of attention layers in a trace, and the modules that these make unnecessary."""
        return [], []


def _least_s(passes: Sequence[tuple[Callable[[], Sequence[mx.array]], Sequence[Any]]], keeps: int) -> list[float]:
    """Seconds of each pass with its cache, waiting for the result: the least of four, by turns; a first one does not count."""
    seconds: list[list[float]] = [[] for _ in passes]
    for _ in range(5):
        for (run, entries), into in zip(passes, seconds, strict=True):
            for entry in rows_of(entries):
                entry.trim(keeps)
            began = time.perf_counter()
            mx.eval(run())
            into.append(time.perf_counter() - began)
    return [min(into[1:]) for into in seconds]
