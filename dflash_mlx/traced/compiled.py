"""Passes over blocks, of the target and the drafter, that are traced once and run again. With a small model the host needs longer
to build a pass than the GPU needs to run it.

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

The states of a recurrent layer go in and come out as they are. Rows without meaning would change them, so blocks of such a model
are traced at their own widths. The pass also returns the inputs of each recurrence and convolution. From these, one more trace
computes the states after the first n rows (`Form`).

Capacities come in few sizes, so that there are few traces. Only models are tried whose entries are all plain `KVCache`s or
states of a gated delta rule. Each width and each capacity is compared with the ordinary pass, on copies, before it is used. If a
model does something that cannot be traced (Python numbers made of the offset, code that looks into entries), it is not compiled.
Weights are constants of a trace: a weight that is replaced, as adapters do, is used from the next answer on; one that is changed
in place (`weight *= 2`) is not noticed.

Knows both models; `buffers` knows cache entries in traces. Knows nothing of acceptance or the loop.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from ..errors import DFlashError
from ..kernels import autotune, block_linear
from ..kernels.exact_routes import ExactRoutes
from ..kernels.routing import Dense, kernel_calls
from ..models.drafter import Drafter
from ..models.intercept import intercept
from ..models.recurrent import Form, recorded
from ..models.target import Target, TargetOutput
from ..rollback import RollbackPoint
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
    states_of,
    traceable,
    widen,
)
from .draft_attention import attention_calls
from .fusion import Call, fused_bytes, fused_linears

# Blocks are filled up to a multiple of this: it keeps traces few, and rows cost little in a compiled pass.
ROWS = 4
# MLX's kernels for several rows on CUDA need a multiple of this many columns of a quantized product; others are slower.
TILE = 128
# The most new context rows of a drafter, in blocks: after looked-up drafts there are more than one block's.
MOST_BLOCKS = 4
# How many traces are kept, by width and capacity; each takes some hundred kilobytes.
_KEPT = 32
# The same for traces that compute the states after the first n rows of a pass, one for each n.
_STATES_KEPT = 64
# How far the two passes may differ, in units of the type's precision and relative to the norm: roundings of a few dozen layers.
# A row that is seen and should not be, or the other way round, differs by far more.
_ROUNDINGS = {mx.float32: 1000, mx.float16: 32, mx.bfloat16: 16}
# How often the comparison may fail before a compiled pass is given up. In a text of one token repeated, two right passes lie far
# apart in half precision (0.2 of the norm in bfloat16: SmolLM2-135M, H100). A wrong pass is wrong in any text.
_COMPARISONS = 3
# A compiled pass must take less than this share of an ordinary one's time.
_FASTER = 0.97

_log = logging.getLogger("dflash_mlx.traced.compiled")


class CompiledPair:
    """The compiled passes of a pair: an `Accelerator`.

    always: use every pass that is right, faster or not. prepares: whether passes are tried before the first answer; else from the
    second one on. drafts: the drafter's, if another pair of its has made them.
    """

    def __init__(
        self, target: Target, drafter: Drafter, always: bool, prepares: bool = True, drafts: CompiledDraft | None = None
    ):
        kind = ExactVerify if isinstance(target.routes, ExactRoutes) else CompiledVerify
        verify, new = kind(target, _parts(target.model), always), drafts is None
        drafts = CompiledDraft(drafter, _parts(drafter), always) if new else drafts
        self.always, self.passes, self.prepares = always, (verify, drafts), prepares
        self.verify, self.draft = verify.verify, drafts.draft
        for run in (verify, drafts) if new else (verify,):
            run.waits = not prepares

    def begin(self) -> CompiledPair:
        """Another answer begins: what had to wait for the end of the first one may start."""
        for run in self.passes:
            run.waits = False
        return self

    def holds_for(self, target: Target, drafter: Drafter, always: bool) -> bool:
        """Whether the models still hold the objects that were traced. An adapter loaded since is another array."""
        return self.drafts_for(drafter, always) is not None and _same(self.passes[0].parts, _parts(target.model))

    def drafts_for(self, drafter: Drafter, always: bool) -> CompiledDraft | None:
        """The drafter's passes, if it still holds the objects that were traced."""
        return self.passes[1] if self.always == always and _same(self.passes[1].parts, _parts(drafter)) else None

    def refuse(self, reason: str) -> None:
        # A pass of another answer may have been refused while this one was running.
        if not self.passes[0].refused:
            self.passes[0].refuse(reason)

    def findings(self) -> list[dict[str, Any]]:
        return [p.findings() for p in self.passes]


def _parts(model: nn.Module) -> list[Any]:
    """All constants of a trace: the arrays, numbers and modules of a model, but nothing that others attach to it."""
    values = (value for module in model.modules() for value in (*module.values(), *vars(module).values()))
    return [value for value in values if isinstance(value, (mx.array, nn.Module, bool, int, float, str))]


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


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
            self.parts = _parts(self._model()) if self.own else self.parts

    def _attention(self, arrays: Sequence[mx.array]) -> tuple[list[Call], list[nn.Module]]:
        """Calls of attention layers in a trace, and the modules that these make unnecessary."""
        return [], []


@dataclass
class _States:
    """For a target with recurrent layers. modules: those that change a state, as the caller's target has found them; forms: how
    to compute the states after the first rows from a pass's output."""

    modules: list[nn.Module] | None = None
    forms: list[Form] = field(default_factory=list)


class CompiledVerify(CompiledPass):
    """A target's passes over blocks and single rows: `Accelerator.verify`.

    alone: whether single rows are compiled before any block was.
    """

    alone = False

    def __init__(self, target: Target, parts: list[Any], always: bool):
        # From a copy of the target: the target holds this object.
        clone, name = target.clone().clone, target.family
        known = self._states_known = _States()
        # (rows of a pass, rows kept) -> the function that computes the states after the kept ones.
        self._first: dict[tuple[int, int], Callable[[list[mx.array]], list[list[mx.array]]]] = {}

        def passes(fused: list[Call]) -> Pass:
            # Not the caller's target: notes that its handlers take during a trace must not reach its own passes.
            target = clone()
            target.fused = fused

            def run(arrays: Sequence[mx.array], entries: Sequence[Any], _: int | mx.array) -> tuple[mx.array, ...]:
                target.states.found = known.modules
                point = RollbackPoint(0, []) if states_of(entries) and arrays[0].shape[1] > 1 else None
                output = target(*arrays, entries, point, kernels=True)
                kept = recorded(entries, point) if point else []
                if kept is None:
                    raise TraceError(f"{name} has recurrent layers that are no gated delta rule")
                known.forms = [of.form for of in kept] or known.forms
                return output.hidden, output.features, *(a for of in kept for a in of.given)

            return run

        super().__init__(name, passes([]), passes, target.model, parts, always)

    def _forget(self) -> None:
        super()._forget()
        self._first = {}

    def verify(self, target: Target, ids: mx.array, cache: Sequence[Any], point: RollbackPoint) -> TargetOutput | None:
        """The pass `target(ids, cache, point, kernels=True)`, compiled; None: run that instead.

        Shapes:
          - ids: [1, w] int32; the output is as of `Target.__call__`, `compiled` and without logits
        """
        w, states = ids.shape[1], states_of(cache)
        self._states_known.modules = target.states.found
        if w == 1 and not (self.alone or self._right[0]) or states and target.states.found is None:
            # The first token does not wait for a trial, nor does a run that never drafts.
            return None
        # A token that the device chose has another type, which would need another trace.
        ids, more = ids.astype(mx.int32), 0 if states else -w % ROWS
        if target.positions is not None and cache[0].offset + w + more > target.positions:
            more = 0
        filled = mx.concatenate([ids, *([ids[:, -1:]] * more)], axis=1) if more else ids
        if (out := self.run([ids], [filled], cache, 0, 0, w + more, w)) is None:
            return None
        hidden, features, *given = out
        if given:
            self._record(point, states, w, given)
        point.ended(w)
        hidden, features = (array[:, :w] for array in (hidden, features)) if more else (hidden, features)
        return TargetOutput(hidden, features, compiled=True)

    def _record(self, point: RollbackPoint, states: Sequence[ArraysCache], rows: int, given: list[mx.array]) -> None:
        """Store in `point` how to compute the states after the first n rows of a pass, in one call for all layers."""
        found: dict[int, list[list[mx.array]]] = {}

        def replay(n: int, i: int, entry: ArraysCache) -> None:
            if n not in found:
                found[n] = self._states(rows, n)(given)
            entry.cache = list(found[n][i])

        for i, entry in enumerate(states):
            point.replays[id(entry)] = [functools.partial(replay, i=i, entry=entry)]

    def _states(self, rows: int, n: int) -> Callable[[list[mx.array]], list[list[mx.array]]]:
        """A function from the output of a pass of `rows` rows to each entry's arrays after the first n rows."""
        if (run := self._first.get((rows, n))) is None:
            forms = self._states_known.forms

            def states(given: list[mx.array]) -> list[list[mx.array]]:
                left = iter(given)
                return [form.states(n, [*itertools.islice(left, form.takes)]) for form in forms]

            run = self._first[rows, n] = mx.compile(states)
            while len(self._first) > _STATES_KEPT:
                del self._first[next(iter(self._first))]
        return run


class ExactVerify(CompiledVerify):
    """The passes of a target in an exact run: each layer takes its exact route, and a trace is used only if no value differs from
    the ordinary pass. So it does not matter which of the two runs. A run without a drafter only has blocks of one row.
    """

    joins, alone, roundings = False, True, {}

    def verify(self, target: Target, ids: mx.array, cache: Sequence[Any], point: RollbackPoint) -> TargetOutput | None:
        # A trial does not compare the states after only some of a pass's rows.
        return None if states_of(cache) else super().verify(target, ids, cache, point)


def _draft_calls(model: nn.Module) -> list[tuple]:
    """The calls of a drafter's layers that take another route. Its finite flag is not read: an error costs drafts, never text.

    On CUDA only those of `kernel_calls` that are MLX's own operations: kernels for products are compiled again in each process.
    """
    return [call for call in kernel_calls(model) if isinstance(call[1], Dense) or not mx.cuda.is_available()]


class CompiledDraft(CompiledPass):
    """A drafter's passes: `Accelerator.draft`."""

    kernels, windows = staticmethod(_draft_calls), True

    @property
    def fused(self) -> bool:
        """True except on CUDA, where kernels for products are compiled again in each process."""
        return not mx.cuda.is_available()

    # The drafter was loaded by us. On CUDA its fused weights are filled up, so they are copies.
    own = fused

    def __init__(self, drafter: Drafter, parts: list[Any], always: bool):
        # The drafter holds this object.
        held = weakref.ref(drafter)

        def passes(fused: list[Call]) -> Pass:
            def run(arrays: Sequence[mx.array], entries: Sequence[Any], start: int | mx.array) -> tuple[mx.array]:
                (ids, features), drafter = arrays, held()
                with intercept([*(calls() if autotune.may_run() else []), *fused]):
                    return (drafter.mask_rows(ids, features, entries, start),)

            return run

        calls = functools.cache(lambda: _draft_calls(held()))
        self._calls, self._routed = calls, passes([])
        super().__init__("the drafter", self._routed, passes, drafter, parts, always)

    def _attention(self, arrays: Sequence[mx.array]) -> tuple[list[Call], list[nn.Module]]:
        ids, features = arrays
        return attention_calls(self._model(), self.kernels, ids.shape[1], features.shape[1])

    def draft(self, ids: mx.array, features: mx.array, cache: Sequence[Any], start: int) -> mx.array | None:
        """`Drafter.mask_rows`, compiled, or on Metal with kernels; None: run that instead."""
        if (out := self._filled_up(ids, features, cache, start)) is not None:
            return out
        if mx.cuda.is_available() or not autotune.may_run() or not self._calls():
            return None
        return self._routed([ids, features], cache, start)[0]

    def _filled_up(self, ids: mx.array, features: mx.array, cache: Sequence[Any], start: int) -> mx.array | None:
        """The compiled pass. New context rows are filled up to one block's or a few."""
        S, K = features.shape[1], ids.shape[1]
        if cache[0].offset != start:
            return None
        most = MOST_BLOCKS * K
        if S > most and self.serves(K) and may_trace(cache, S + K):
            # Context from plain decoding, or a prompt. Its keys and values need no attention, whose length would be a new one.
            # Few lengths are used, since a product of a new shape has to be planned first.
            n = (S - 1) // most * most
            self._model().inject(features[:, :n], cache, start)
            features, start, S = features[:, n:], start + n, S - n
        # Filled up at the front, so that all later rows keep their distances.
        spare = -S % K
        rows = mx.take(features, _filled_rows(spare, S), axis=1) if spare else features
        out = self.run([ids, features], [ids, rows], cache, spare, S, K, S)
        return None if out is None else out[0]


@functools.lru_cache(64)
def _filled_rows(spare: int, S: int) -> mx.array:
    """[spare + S] int32: the first of S rows in place of rows without meaning, then all of them. Made once: see `Place.of`."""
    return mx.array([*[0] * spare, *range(S)], dtype=mx.int32)


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
