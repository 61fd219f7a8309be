"""Passes over blocks, the target's and the drafter's, that are put together once and run again: where a model is small, the
host takes longer over a pass than the GPU does.

    DFLASH_MLX_COMPILE   unset, auto   on a GPU, the widths at which a trial on this machine found it faster; on Metal from the
                                       second answer on
                         off           no pass
                         on            all that can be, faster or not, on any device

`mx.compile` takes Python's numbers for constants and traces anew for every new shape. So a compiled pass is given the whole
key and value buffers of the cache, and where it stands as arrays: places to write to, and a mask over the buffers.

    buffer   r0 r1 r2 r3 | b0 b1 b2 | .  .  .        the block's rows are written behind the rows held; block row j sees what
             held          block      capacity       stands up to its own place. What stands behind has weight zero.

Rows without meaning fill up what is shorter than a traced shape. In a trace, layers that are given the same array are one
product (see `fused`).

A weight of zero hides what is finite, and a draft that was rolled back may have overflowed float16. So after a compiled pass of
the target the finite flag is always read (`Target.finite_flag`). Where it says that a value is not finite, that was the last
compiled pass of this target, and the pass runs again as an ordinary one.

Capacities come in few sizes, so that few are traced. Only models whose every entry is a plain `KVCache` are tried, and each
width, and each capacity, is compared with the ordinary pass, on copies, before it is used. Whatever a model does that cannot be
traced (Python numbers made of the offset, entries that are looked into) leaves that model uncompiled.
Weights are constants of a trace: one put in another's place, as adapters are, runs from the next answer on; one changed in place
(`weight *= 2`) is not noticed.

Knows both models and their KV caches; knows nothing of acceptance or the loop.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from ..kernels import autotune, block_linear
from ..kernels.masks import BufferMask
from ..kernels.routing import Dense, kernel_calls
from ..kernels.small_batch import folded_mask, folded_or_none
from ..machine import array_bytes, limit_bytes
from ..models.drafter import Drafter
from ..models.intercept import intercept
from ..models.target import Target, TargetOutput, family
from ..rollback import RollbackPoint
from .fusion import Call, fused_bytes, fused_linears

# Blocks are filled up to a multiple of this: few traces, and rows cost little where a pass is compiled.
ROWS = 4
# Columns of a quantized product that MLX's kernels for several rows on CUDA take; any other number goes by a slower one.
TILE = 128
# A drafter's new context rows, in blocks: after copied drafts it is given more than one block's.
MOST_BLOCKS = 4
# Traces that are kept, some hundred kilobytes each, by width and capacity.
_KEPT = 32
# Least step of capacities, in rows: a trace takes as long as some ordinary passes.
_STEP = 1024
# What the two passes may differ by, in units of the type's precision and of the norm of what is compared: roundings of a few
# dozen layers. A row that is seen and should not be, or the other way round, is off by far more.
_ROUNDINGS = {mx.float32: 1000, mx.float16: 32, mx.bfloat16: 16}
# Comparisons that a compiled pass may fail before it is given up. One row over and over is such a text that two right passes lie
# far apart in half precision (0.2 of the norm in bfloat16: SmolLM2-135M, H100); what is wrong is so in any text.
_COMPARISONS = 3
# A compiled pass must take less of an eager one's time than this.
_FASTER = 0.97

_log = logging.getLogger("dflash_mlx.traced.compiled")


class CompiledPair:
    """The compiled passes of a pair: an `Accelerator`.

    always: whether a pass is used that is right, faster or not. prepares: whether passes are tried before the first answer; else
    from the second one on.
    """

    def __init__(self, target: Target, drafter: Drafter, always: bool, prepares: bool = True):
        verify = CompiledVerify(target.model, target.layer_ids, _parts(target.model), always)
        self.always, self.passes = always, (verify, CompiledDraft(drafter, _parts(drafter), always))
        self.verify, self.draft = verify.verify, self.passes[1].draft
        self.prepares = prepares
        for run in self.passes:
            run.waits = not prepares

    def begin(self) -> CompiledPair:
        """Another answer begins: what had to wait for the first one no longer does."""
        for run in self.passes:
            run.waits = False
        return self

    def holds_for(self, target: Target, drafter: Drafter, always: bool) -> bool:
        """Whether the models are what their traces were made of: by identity, an adapter loaded since is another array."""
        parts = (_parts(target.model), _parts(drafter))
        return self.always == always and all(_same(p.parts, now) for p, now in zip(self.passes, parts, strict=True))

    def refuse(self, reason: str) -> None:
        # Another answer's pass may have been refused while this one was on its way.
        if not self.passes[0].refused:
            self.passes[0].refuse(reason)

    def findings(self) -> list[dict[str, Any]]:
        return [p.findings() for p in self.passes]


def _parts(model: nn.Module) -> list[Any]:
    """All that a trace takes for constant: the arrays, numbers and modules of a model. What others keep with it is not that."""
    values = (value for module in model.modules() for value in (*module.values(), *vars(module).values()))
    return [value for value in values if isinstance(value, (mx.array, nn.Module, bool, int, float, str))]


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _plain(entries: Sequence[Any]) -> bool:
    """Whether passes over these may be compiled."""
    return all(type(entry) is KVCache for entry in entries)


def capacity_for(rows: int) -> int:
    """Rows of the buffers that hold so many: few sizes, an eighth to a quarter apart beyond 8192."""
    step = _STEP
    while rows > 8 * step:
        step *= 2
    return -(-rows // step) * step


class _Place(NamedTuple):
    """Where a pass stands. Arrays that the compiled function is given: a number would be a constant, and traced anew.

    Shapes:
      - offset, block, end: [1] int32, the positions of the pass's first row, of its block's (behind new context rows, of a
        drafter), and behind the block
      - rows: [1, 1, n, 1] int32, where all rows of the pass are written
      - seen, added: [K, capacity], what each block row sees: True, or 0 and else minus infinity in the cache's type
    """

    offset: mx.array
    block: mx.array
    end: mx.array
    rows: mx.array
    seen: mx.array
    added: mx.array

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of the pass in front of its block, rows of the block."""
        return self.rows.size - len(self.seen), len(self.seen)

    @property
    def capacity(self) -> int:
        return self.seen.shape[1]

    @classmethod
    def of(cls, length: int, spare: int, context: int, K: int, columns: mx.array, dtype: mx.Dtype) -> _Place:
        """Behind `length` rows. spare: rows in front of the new ones that mean nothing, and are written behind them; columns:
        [capacity], 0, 1, ..."""
        # Made outside of the trace, by operations that need no compiling, and on the device: CUDA fetches an array of the host's
        # by a page fault, some hundred microseconds.
        end = length + context + K
        rows = mx.arange(length, end, dtype=mx.int32)
        seen = columns <= rows[context:, None]
        added = mx.where(seen, mx.array(0, dtype), mx.array(-math.inf, dtype))
        if spare:
            rows = mx.concatenate([mx.arange(end, end + spare, dtype=mx.int32), rows])
        at = [mx.array([n], dtype=mx.int32) for n in (length - spare, length + context, end)]
        return cls(*at, rows[None, None, :, None], seen, added)


class _Traced:
    """Stands for a cache entry while a pass is traced: its buffers, and where the pass stands, are inputs.

    spread: one dictionary for all entries of a pass, in which what they have in common is made once.
    """

    def __init__(self, keys: mx.array, values: mx.array, place: _Place, spread: dict[tuple, mx.array]):
        self.keys, self.values, self.offset, self._place, self._spread = keys, values, place.offset, place, spread

    @property
    def block_offset(self) -> mx.array:
        """[1]: where a drafter's block begins, behind the new context rows."""
        return self._place.block

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [1, heads, n, D] rows at the offset. Hands out the whole buffers [1, heads, capacity, D]."""
        self.keys = mx.put_along_axis(self.keys, self._rows(keys.shape), keys, axis=2)
        self.values = mx.put_along_axis(self.values, self._rows(values.shape), values, axis=2)
        return self.keys, self.values

    def _rows(self, shape: tuple[int, ...]) -> mx.array:
        """Where each number of [1, heads, n, D] is written."""
        return self._once("rows", self._place.rows, shape)

    def _once(self, name: str, array: mx.array, shape: tuple[int, ...]) -> mx.array:
        if (name, shape) not in self._spread:
            self._spread[name, shape] = mx.broadcast_to(array, shape)
        return self._spread[name, shape]

    def trim(self, n: int) -> None:
        """The offset stays where it was: what is behind it counts for nothing."""

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """bool [N, capacity], True: seen. As mlx-lm's caches make it."""
        place = self._place
        if window_size is None:
            return BufferMask.of(place.seen, place.added, place.end)
        columns = mx.arange(self.keys.shape[2])[None]
        return place.seen & (place.rows.reshape(N, 1) < columns + window_size)

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, causal: bool) -> mx.array:
        """Attention of a drafter's block [1, HQ, K, D] to the buffers [1, HK, capacity, D]: each row to what stands up to its own
        place, or all to the whole block."""
        seen, added = self._place.seen, self._place.added
        # One row serves all where each sees the whole block.
        fold = (lambda _, *about: folded_mask(added, *about)) if causal else lambda *_: added[-1:]
        if autotune.may_run():
            out = folded_or_none(queries, keys, values, scale, seen, True, fold)
            if out is not None:
                return out
        mask = self._once("causal" if causal else "all", added if causal else added[-1:], (*queries.shape[:3], keys.shape[2]))
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


# (arrays, cache entries, how many rows these hold) -> what the pass gives. The same for ordinary entries and for `_Traced` ones.
Pass = Callable[[Sequence[mx.array], Sequence[Any], int | mx.array], tuple[mx.array, ...]]


class CompiledPass:
    """The compiled forms of one pass, by shape (numbers of rows) and capacity.

    eager: the ordinary pass, which a trace is compared with.
    traced: fused -> the pass that is traced, with these calls of layers in place of their own.
    model: what the pass runs; parts: what its traces take for constant.
    always: whether a pass is used that is right, faster or not.
    refused: why this model cannot be compiled, if so.
    passes: compiled passes so far.
    kernels, fused: what may serve a fused linear, as `kernel_calls`, and whether kernels may take what stands around one.
    """

    kernels, fused = staticmethod(kernel_calls), True
    prepares = True

    def __init__(
        self, name: str, eager: Pass, traced: Callable[[list[Call]], Pass], model: nn.Module, parts: list[Any], always: bool
    ):
        self.name, self._eager, self._traced, self.parts, self.always = name, eager, traced, parts, always
        # Whoever is held by the model must not hold it.
        self._model = weakref.ref(model)
        self.refused: str | None = None
        self.passes = 0
        # Whether nothing is compiled yet; bytes of the fused weights that traces hold.
        self.waits, self.held = False, 0
        self._forget()

    def _forget(self) -> None:
        # What is traced, from the first trial on.
        self._pass: Pass | None = None
        # (shape, capacity, type, stream, rows that were asked for: 1, or the shape's) -> the compiled pass, None if the ordinary
        # one is to be run.
        self._known: dict[tuple, Callable[..., Any] | None] = {}
        # Shapes with the rows asked for, capacities at which a pass was right.
        self._right: tuple[set[tuple], set[int]] = (set(), set())
        # Rows of a block, 1 for a single one -> whether it was faster.
        self._faster: dict[int, bool] = {}
        # As `_known` -> comparisons that failed.
        self._failed: Counter[tuple] = Counter()
        # Capacity -> the numbers of its rows.
        self._columns: dict[int, mx.array] = {}
        self._plans = autotune.plans()

    def findings(self) -> dict[str, Any]:
        """Plain values: whose passes, why there are none if so, how many there were, and by rows of a block whether faster."""
        return {
            "name": self.name,
            "refused": self.refused,
            "passes": self.passes,
            "held_mb": round(self.held / 1e6, 1),
            "faster": {str(rows): faster for rows, faster in self._faster.items()},
        }

    def refuse(self, reason: str) -> None:
        """No compiled passes any more, with one line in the log: loud where they were asked for."""
        self.refused = reason
        # What was traced holds copies of weights, half a model's where it is small.
        self._pass, self._known, self.held = None, {}, 0
        _log.log(logging.WARNING if self.always else logging.INFO, "%s is not compiled: %s", self.name, reason)

    def serves(self, rows: int) -> bool:
        """Whether blocks of so many rows are compiled, as far as is known."""
        return not self.refused and self._faster.get(rows, True)

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
          arrays: what the ordinary pass is given; filled: the same with `spare` rows in front and others behind that mean
            nothing, so that few shapes are traced. What the pass gives may have as many rows more behind.
          context, K: rows of the pass behind `spare`, K of them its block's; the arrays' shapes follow from these.
          keeps: rows by which the offset grows.
        """
        rows = 1 if arrays[0].shape[1] == 1 else K
        if self.waits or not self.serves(rows) or arrays[0].shape[0] != 1:
            return None
        if not _plain(cache) or any(entry.keys is None for entry in cache):
            return None
        length = cache[0].offset
        if any(entry.offset != length for entry in cache):
            return None
        autotune.may_run()
        if self._plans is not autotune.plans():
            # A kernel was switched off, or switched on.
            self._forget()
        capacity = capacity_for(max(length + spare + context + K, *(entry.keys.shape[2] for entry in cache)))
        if capacity not in self._columns:
            self._columns[capacity] = mx.arange(capacity, dtype=mx.int32)
            mx.eval(self._columns[capacity])
        place = _Place.of(length, spare, context, K, self._columns[capacity], cache[0].keys.dtype)
        key = (place.shape, capacity, cache[0].keys.dtype, str(mx.default_stream(mx.default_device())), rows)
        if key not in self._known:
            # What a model makes of the one does not depend on the other.
            known = (place.shape, rows) in self._right[0] and capacity in self._right[1]
            run = self._compiled(key) if known else self._tried(arrays, filled, cache, place, length, keeps, key)
            if run is None and 0 < self._failed[key] < _COMPARISONS:
                return None
            self._known[key] = run
            while len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        # Another thread may have forgotten it.
        if (run := self._known.get(key)) is None:
            return None
        for entry in cache:
            _widen(entry, capacity)
        out = _call(run, filled, cache, place, length + keeps)
        self.passes += 1
        return out

    def _compiled(self, key: tuple) -> Callable[..., Any]:
        # One row and a filled-up block share a trace: they differ in what they are compared with.
        shared = next((run for other, run in self._known.items() if run and other[:-1] == key[:-1]), None)
        return shared or mx.compile(functools.partial(_traceable, self._pass))

    def _tried(
        self,
        arrays: Sequence[mx.array],
        filled: Sequence[mx.array],
        cache: Sequence[KVCache],
        place: _Place,
        length: int,
        keeps: int,
        key: tuple,
    ) -> Callable[..., Any] | None:
        """The compiled pass, if it is to be used: compare it with the ordinary one, both on copies of the cache, and time it.

        Where there is no room for those copies nothing is compiled at this capacity.
        """
        if not _fits(cache):
            return None
        plain, ours = ([_copied(entry) for entry in cache] for _ in range(2))
        for entry in ours:
            _widen(entry, place.capacity)

        def eager() -> tuple[mx.array, ...]:
            return self._eager(arrays, plain, length)

        def compiled() -> tuple[mx.array, ...]:
            return _call(run, filled, ours, place, length + keeps)

        expected = eager()
        try:
            if self._pass is None:
                spare, columns = [_copied(entry) for entry in cache], TILE if mx.cuda.is_available() else 1
                fused = self.fused and autotune.may_run() and autotune.allowed(block_linear.KERNEL)
                noted = fused_linears(
                    self._model(), lambda calls: self._traced(calls)(arrays, spare, length), self.kernels, columns, fused
                )
                self._pass, self.held = self._traced(noted), fused_bytes(noted)
            run = self._compiled(key)
            off = _compared(expected, compiled(), plain, ours, length)
        except Exception as e:  # whatever a model's code makes of arrays where it had numbers; no memory for fused weights
            self.refuse(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'no message'}")
            return None
        allowed = _ROUNDINGS.get(expected[0].dtype, 0) * mx.finfo(expected[0].dtype).eps
        if not off <= allowed:
            self._failed[key] += 1
            if self._failed[key] == _COMPARISONS:
                found = f"off by {off:.2g} of its norm, {allowed:.2g} allowed"
                _log.warning("a compiled pass of %s over %d rows is not used: it is %s", self.name, place.rows.size, found)
            return None
        rows = key[-1]
        if not self.always and rows not in self._faster:
            ours_s, plain_s = _least_s([(compiled, ours), (eager, plain)], keeps)
            self._faster[rows] = ours_s < _FASTER * plain_s
        self._right[0].add((place.shape, rows))
        self._right[1].add(place.capacity)
        return run if self._faster.get(rows, True) else None


class CompiledVerify(CompiledPass):
    """A target's passes over blocks, single rows included: `Accelerator.verify`."""

    def __init__(self, model: nn.Module, layer_ids: Sequence[int], parts: list[Any], always: bool):
        def passes(fused: list[Call]) -> Pass:
            # Not the caller's target: what its handlers note while they are traced is nothing to its own passes.
            target = Target(model, layer_ids)
            target.fused = fused

            def run(arrays: Sequence[mx.array], entries: Sequence[Any], _: int | mx.array) -> tuple[mx.array, mx.array]:
                output = target(*arrays, entries, kernels=True)
                return output.hidden, output.features

            return run

        super().__init__(family(model), passes([]), passes, model, parts, always)

    def verify(self, target: Target, ids: mx.array, cache: Sequence[Any], point: RollbackPoint) -> TargetOutput | None:
        """The pass `target(ids, cache, point, kernels=True)`, compiled; None: run that instead.

        Shapes:
          - ids: [1, w] int32; the output is as of `Target.__call__`, `compiled` and without logits
        """
        w = ids.shape[1]
        if w == 1 and not self._right[0]:
            # The first token does not wait for a trial, nor does who never drafts.
            return None
        # A token that the device chose is of another type, for which there would be another trace.
        ids, more = ids.astype(mx.int32), -w % ROWS
        if target.positions is not None and cache[0].offset + w + more > target.positions:
            more = 0
        filled = mx.concatenate([ids, *([ids[:, -1:]] * more)], axis=1) if more else ids
        if (out := self.run([ids], [filled], cache, 0, 0, w + more, w)) is None:
            return None
        point.ended(w)
        hidden, features = (array[:, :w] for array in out) if more else out
        return TargetOutput(hidden, features, compiled=True)


def _draft_calls(model: nn.Module) -> list[tuple]:
    """The calls of a drafter's layers that go other ways. Nobody reads its finite flag: what is wrong costs drafts, no text.

    On CUDA those of `kernel_calls` that are MLX's own operations: the texts for its products are compiled anew in each process.
    """
    return [call for call in kernel_calls(model) if isinstance(call[1], Dense) or not mx.cuda.is_available()]


class CompiledDraft(CompiledPass):
    """A drafter's passes: `Accelerator.draft`."""

    kernels, fused = staticmethod(_draft_calls), False

    def __init__(self, drafter: Drafter, parts: list[Any], always: bool):
        # The drafter holds this.
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

    def draft(self, ids: mx.array, features: mx.array, cache: Sequence[Any], start: int) -> mx.array | None:
        """`Drafter.mask_rows`, compiled, or on Metal by kernels; None: run that instead."""
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
        if S > most and self.serves(K) and _plain(cache):
            # Context that plain decoding gathered, or a prompt. Keys and values do not ask for its attention, whose length would
            # be a new one; in few lengths, for a product of a new shape is planned first.
            n = (S - 1) // most * most
            self._model().inject(features[:, :n], cache, start)
            features, start, S = features[:, n:], start + n, S - n
        # In front, where all rows behind keep their places to one another.
        spare = -S % K
        rows = mx.pad(features, [(0, 0), (spare, 0), (0, 0)]) if spare else features
        out = self.run([ids, features], [ids, rows], cache, spare, S, K, S)
        return None if out is None else out[0]


def _traceable(
    run: Pass, arrays: list[mx.array], place: Sequence[mx.array], keys: list[mx.array], values: list[mx.array]
) -> tuple[tuple[mx.array, ...], list[mx.array], list[mx.array]]:
    """A pass as a function of arrays alone.

    Shapes:
      - place: as `_Place`; keys, values: a layer [1, heads, capacity, D]
    Returns: what the pass gives, and the buffers with its rows.
    """
    place = _Place(*place)
    spread: dict[tuple, mx.array] = {}
    entries = [_Traced(k, v, place, spread) for k, v in zip(keys, values, strict=True)]
    out = run(arrays, entries, place.offset)
    return tuple(out), [entry.keys for entry in entries], [entry.values for entry in entries]


def _call(
    run: Callable[..., Any], arrays: Sequence[mx.array], cache: Sequence[KVCache], place: _Place, end: int
) -> tuple[mx.array, ...]:
    """One call of the compiled function. The entries then hold its buffers alone, so that MLX writes them in place."""
    out, keys, values = run(list(arrays), list(place), [e.keys for e in cache], [e.values for e in cache])
    for entry, k, v in zip(cache, keys, values, strict=True):
        # At once, as far as an interruption can see.
        vars(entry).update(keys=k, values=v, offset=end)
    return out


def _copied(entry: KVCache) -> KVCache:
    """An entry with arrays of its own, which share their memory until one of them is written."""
    copied = copy.copy(entry)
    copied.keys, copied.values = mx.array(entry.keys), mx.array(entry.values)
    return copied


def _fits(cache: Sequence[KVCache]) -> bool:
    """Whether the copies of a trial, an ordinary pass's, a compiled one's and what widens it, find room on this machine."""
    return mx.get_active_memory() + 3 * array_bytes(a for entry in cache for a in (entry.keys, entry.values)) <= limit_bytes()


def _widen(entry: KVCache, capacity: int) -> None:
    """Give an entry buffers of `capacity` rows, the new ones zero."""
    if more := capacity - entry.keys.shape[2]:
        arrays = {"keys": entry.keys, "values": entry.values}
        wider = {k: mx.concatenate([a, mx.zeros((*a.shape[:2], more, a.shape[3]), a.dtype)], axis=2) for k, a in arrays.items()}
        vars(entry).update(wider)


def _compared(
    expected: Sequence[mx.array], found: Sequence[mx.array], plain: Sequence[KVCache], ours: Sequence[KVCache], length: int
) -> float:
    """The largest distance between what two passes gave, each as a share of its norm: states, taps, and the rows of the caches,
    those of the passes by themselves (among many others they would not count)."""
    pairs = [*zip(expected, found, strict=True)]
    for a, b in zip(plain, ours, strict=True):
        for cut in (slice(0, length), slice(length, a.offset)):
            pairs += [(a.keys[:, :, cut], b.keys[:, :, cut]), (a.values[:, :, cut], b.values[:, :, cut])]
    shares = []
    for a, b in pairs:
        a, b = a.astype(mx.float32), b[:, : a.shape[1]].astype(mx.float32)
        shares.append(mx.linalg.norm(a - b) / mx.maximum(mx.linalg.norm(a), 1e-30))
    # One that is not a number is largest.
    return max(mx.stack(shares).tolist(), key=lambda share: (share != share, share))


def _least_s(passes: Sequence[tuple[Callable[[], Sequence[mx.array]], Sequence[KVCache]]], keeps: int) -> list[float]:
    """Seconds of passes that are waited for, each with its cache: the least of four, by turns; the first is not counted."""
    seconds: list[list[float]] = [[] for _ in passes]
    for _ in range(5):
        for (run, entries), into in zip(passes, seconds, strict=True):
            for entry in entries:
                entry.trim(keeps)
            began = time.perf_counter()
            mx.eval(run())
            into.append(time.perf_counter() - began)
    return [min(into[1:]) for into in seconds]
