"""Passes over blocks, the target's and the drafter's, that are put together once and replayed: where a model is small, the host
takes longer over a pass than the GPU does.

    DFLASH_MLX_COMPILE   unset, off   no pass is compiled
                         auto         on CUDA, the widths at which a trial on this machine found it faster
                         on           all that can be, faster or not, on any device

`mx.compile` takes Python's numbers for constants and traces anew for every new shape. So a compiled pass is given the whole
key and value buffers of the cache, how many rows they hold as an array, and a mask over the buffers:

    buffer   r0 r1 r2 r3 | b0 b1 b2 | .  .  .        the block's rows are written behind the rows held; block row j sees what
             held          block      capacity       stands up to its own place. What stands behind has weight zero.

A weight of zero hides what is finite, and a draft that was rolled back may have overflowed float16. So a replay of the target is
always doubted (`Target.doubts`): one that gives a value that is not finite is the last, and its pass runs again as ever.

Capacities come in few sizes, so that few are traced. Only models whose every entry is a plain `KVCache` are tried, and each
width, and each capacity, is compared with the ordinary pass, on copies, before it is used. Whatever a model does that cannot be
traced (Python numbers made of the offset, entries that are looked into) leaves that model uncompiled.

Knows both models and their KV caches; knows nothing of acceptance or the loop.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from .cache import Checkpoint
from .drafter import Drafter
from .errors import DFlashError
from .kernels import choice
from .kernels.layers import Dense, kernel_calls
from .taps import Target, intercept

VARIABLE = "DFLASH_MLX_COMPILE"
# MLX has a kernel on CUDA for the attention of up to 3 rows, which takes no mask over a buffer.
FEWEST_ROWS = 4
# Traces that are kept, some hundred kilobytes each, by width and capacity.
_KEPT = 32
# Least step of capacities, in rows: a trace takes as long as some ordinary passes.
_STEP = 1024
# What the two passes may differ by, in units of the type's precision and of the norm of what is compared: roundings of a few
# dozen layers. A row that is seen and should not be, or the other way round, is off by far more.
_ROUNDINGS = {mx.float32: 1000, mx.float16: 32, mx.bfloat16: 16}
# A compiled pass must take less of an eager one's time than this.
_FASTER = 0.97

_log = logging.getLogger("dflash_mlx.compiled")


class CompileError(DFlashError, ValueError):
    """DFLASH_MLX_COMPILE says what is not known."""


def asked() -> str:
    """What DFLASH_MLX_COMPILE says: "off", "auto" or "on".

    Raises:
      CompileError: if it says anything else.
    """
    value = os.environ.get(VARIABLE, "").strip().lower() or "off"
    if value not in ("off", "auto", "on"):
        raise CompileError(f"expected {VARIABLE} to be off, auto or on; found {value!r}. Correct the variable.")
    return value


def attach(target: Target, drafter: Drafter) -> Target:
    """Let this target's blocks and the drafter's passes be replayed. Traces are kept with the drafter, as long as both models'
    parts are the same.

    Raises:
      CompileError: as `asked`.
    """
    wanted = asked()
    if wanted == "off" or wanted == "auto" and not (mx.cuda.is_available() and choice.has_gpu()):
        drafter.replays = None
        return target
    blocks, drafts = getattr(drafter, "_replays", None) or (None, None)
    always, parts, own = wanted == "on", _parts(target.model), _parts(drafter)
    # By identity: an adapter loaded since is another array.
    if blocks is None or blocks.always != always or not _same(blocks.parts, parts) or not _same(drafts.parts, own):
        blocks, drafts = Blocks(target.model, target.layer_ids, parts, always), Drafts(drafter, own, always)
        drafter._replays = blocks, drafts
    target.blocks, drafter.replays = blocks, drafts
    return target


def _parts(model: nn.Module) -> list[Any]:
    """All that a trace takes for constant: the arrays, numbers and modules of a model. What others keep with it is not that."""
    values = (value for module in model.modules() for value in (*module.values(), *vars(module).values()))
    return [value for value in values if isinstance(value, (mx.array, nn.Module, bool, int, float, str))]


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def capacity_for(rows: int) -> int:
    """Rows of the buffers that hold so many: few sizes, an eighth to a quarter apart beyond 8192."""
    step = _STEP
    while rows > 8 * step:
        step *= 2
    return -(-rows // step) * step


class _Traced:
    """Stands for a cache entry while a pass is traced: its buffers and its offset are inputs of the compiled function.

    places: what the entries of one trace share, by name and number of rows.
    """

    def __init__(self, keys: mx.array, values: mx.array, offset: mx.array, places: dict[tuple, mx.array]):
        self.keys, self.values, self.offset, self._places = keys, values, offset, places

    def _place(self, name: str, rows: int, make: Callable[[], mx.array]) -> mx.array:
        if (name, rows) not in self._places:
            self._places[name, rows] = make()
        return self._places[name, rows]

    def _rows(self, n: int) -> mx.array:
        """[n] positions from the offset on."""
        return self._place("rows", n, lambda: self.offset + mx.arange(n))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [1, heads, n, D] rows at the offset. Hands out the whole buffers [1, heads, capacity, D]."""
        at = self._place("at", keys.shape[2], lambda: self._rows(keys.shape[2])[None, None, :, None])
        self.keys = mx.put_along_axis(self.keys, at, keys, axis=2)
        self.values = mx.put_along_axis(self.values, at, values, axis=2)
        return self.keys, self.values

    def trim(self, n: int) -> None:
        """The offset stays where it was: what is behind it counts for nothing."""

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """bool [N, capacity], True: seen. As mlx-lm's caches make it."""
        rows, columns = self._rows(N)[:, None], mx.arange(self.keys.shape[2])[None]
        mask = columns <= rows
        return mask if window_size is None else mask & (rows < columns + window_size)

    def block_mask(self, context: int, K: int, causal: bool) -> mx.array:
        """bool [K, capacity] or [1, capacity]: what a drafter's block sees that stands behind `context` rows of this pass."""

        def make() -> mx.array:
            rows = self._rows(context + K)[context:] if causal else self._rows(context + K)[-1:]
            return mx.arange(self.keys.shape[2])[None] <= rows[:, None]

        return self._place("causal" if causal else "block", K, make)


# (arrays, cache entries, how many rows these hold) -> what the pass gives. The same for ordinary entries and for `_Traced` ones.
Pass = Callable[[Sequence[mx.array], Sequence[Any], int | mx.array], tuple[mx.array, ...]]


class Replays:
    """The compiled forms of one pass, by shape (numbers of rows) and capacity.

    always: whether a pass is used that is right, faster or not.
    parts: what the traces took for constant.
    refused: why this model cannot be compiled, if so.
    passes: replays so far.
    """

    def __init__(self, name: str, eager: Pass, parts: list[Any], always: bool):
        self.name, self._eager, self.parts, self.always = name, eager, parts, always
        self.refused: str | None = None
        self.passes = 0
        self._forget()

    def _forget(self) -> None:
        # (shape, capacity, type, stream) -> the compiled pass, None if the ordinary one is to be run.
        self._known: dict[tuple, Callable[..., Any] | None] = {}
        # Shapes, capacities at which a pass was right.
        self._right: tuple[set[tuple], set[int]] = (set(), set())
        # Width, the last number of a shape -> whether it was faster.
        self._faster: dict[int, bool] = {}
        self._plans = choice.plans()

    def refuse(self, reason: str) -> None:
        """No replays any more, with one line in the log: loud where they were asked for."""
        self.refused = reason
        _log.log(logging.WARNING if self.always else logging.INFO, "%s is not compiled: %s", self.name, reason)

    def replay(
        self, arrays: Sequence[mx.array], cache: Sequence[Any], shape: tuple[int, ...], writes: int, keeps: int
    ) -> tuple[mx.array, ...] | None:
        """One pass over a batch of one. None: run the ordinary one; nothing has happened then.

        Args:
          arrays: of shapes that `shape` stands for; writes: rows that the pass writes; keeps: those by which the offset grows.
        """
        if self.refused or self._faster.get(shape[-1]) is False or arrays[0].shape[0] != 1:
            return None
        if any(type(entry) is not KVCache or entry.keys is None for entry in cache):
            return None
        length = cache[0].offset
        if any(entry.offset != length for entry in cache):
            return None
        choice.may_run()
        if self._plans is not choice.plans():
            # A kernel was switched off, or switched on.
            self._forget()
        capacity = capacity_for(max(length + writes, *(entry.keys.shape[2] for entry in cache)))
        key = (shape, capacity, cache[0].keys.dtype, str(mx.default_stream(mx.default_device())))
        if key not in self._known:
            # What a model makes of the one does not depend on the other.
            known = shape in self._right[0] and capacity in self._right[1]
            run = mx.compile(functools.partial(_traceable, self._eager))
            self._known[key] = run if known or self._try(run, arrays, cache, length, capacity, shape, keeps) else None
            while len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        if (run := self._known[key]) is None:
            return None
        for entry in cache:
            _widen(entry, capacity)
        out = _replay(run, arrays, cache, length, keeps)
        self.passes += 1
        return out

    def _try(
        self,
        run: Callable[..., Any],
        arrays: Sequence[mx.array],
        cache: Sequence[KVCache],
        length: int,
        capacity: int,
        shape: tuple[int, ...],
        keeps: int,
    ) -> bool:
        """Whether the compiled pass is to be used: compare it with the ordinary one, both on copies of the cache, and time it."""
        plain, ours = ([_copied(entry) for entry in cache] for _ in range(2))
        for entry in ours:
            _widen(entry, capacity)

        def eager() -> tuple[mx.array, ...]:
            return self._eager(arrays, plain, length)

        def compiled() -> tuple[mx.array, ...]:
            return _replay(run, arrays, ours, length, keeps)

        expected = eager()
        try:
            off = _compared(expected, compiled(), plain, ours, length)
        except Exception as e:  # whatever a model's code makes of arrays where it had numbers
            self.refuse(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'no message'}")
            return False
        allowed = _ROUNDINGS.get(expected[0].dtype, 0) * mx.finfo(expected[0].dtype).eps
        if not off <= allowed:
            found = f"off by {off:.2g} of its norm, {allowed:.2g} allowed"
            _log.warning("a compiled pass of %s over %s rows is not used: it is %s", self.name, shape, found)
            return False
        if not self.always and shape[-1] not in self._faster:
            self._faster[shape[-1]] = _least_s(compiled, ours, keeps) < _FASTER * _least_s(eager, plain, keeps)
        self._right[0].add(shape)
        self._right[1].add(capacity)
        return self._faster.get(shape[-1], True)


class Blocks(Replays):
    """A target's passes over blocks of 4 rows and more: what `Target.blocks` is."""

    def __init__(self, model: nn.Module, layer_ids: Sequence[int], parts: list[Any], always: bool):
        # Not the caller's: what its handlers note while they are traced is nothing to its own passes.
        target = Target(model, layer_ids)
        super().__init__(target.family, lambda arrays, entries, _: target(*arrays, entries, kernels=True), parts, always)

    def __call__(
        self, target: Target, ids: mx.array, cache: Sequence[Any], point: Checkpoint
    ) -> tuple[mx.array, mx.array] | None:
        """The pass `target(ids, cache, point, kernels=True)`, replayed; None: run that instead.

        Shapes:
          - ids: [1, w] int32; the values returned are as of `Target.__call__`
        """
        w = ids.shape[1]
        out = self.replay([ids], cache, (w,), w, w) if w >= FEWEST_ROWS else None
        if out is not None:
            point.ended(w)
            target.logits, target.replayed = None, True
        return out


class Drafts(Replays):
    """A drafter's passes: what `Drafter.replays` is."""

    def __init__(self, drafter: Drafter, parts: list[Any], always: bool):
        # The drafter holds this.
        held = weakref.ref(drafter)

        def eager(arrays: Sequence[mx.array], entries: Sequence[Any], start: int | mx.array) -> tuple[mx.array]:
            (ids, features), drafter = arrays, held()
            calls = [call for call in kernel_calls(drafter) if isinstance(call[1], Dense)] if choice.may_run() else []
            # Nobody doubts a drafter: only MLX's own operations.
            with intercept(calls):
                return (drafter.mask_rows(ids, features, entries, start),)

        super().__init__("the drafter", eager, parts, always)

    def __call__(self, ids: mx.array, features: mx.array, cache: Sequence[Any], start: int) -> mx.array | None:
        """`Drafter.mask_rows`, replayed; None: run that instead. Traced once for each number of new context rows."""
        if cache[0].offset != start:
            return None
        S, K = features.shape[1], ids.shape[1]
        out = self.replay([ids, features], cache, (S, K), S + K, S)
        return None if out is None else out[0]


def _traceable(
    eager: Pass, arrays: list[mx.array], offset: mx.array, keys: list[mx.array], values: list[mx.array]
) -> tuple[tuple[mx.array, ...], list[mx.array], list[mx.array]]:
    """A pass as a function of arrays alone.

    Shapes:
      - offset: [1] int32; keys, values: a layer [1, heads, capacity, D]
    Returns: what the pass gives, and the buffers with its rows.
    """
    places: dict[tuple, mx.array] = {}
    entries = [_Traced(k, v, offset, places) for k, v in zip(keys, values, strict=True)]
    out = eager(arrays, entries, offset)
    return tuple(out), [entry.keys for entry in entries], [entry.values for entry in entries]


def _replay(
    run: Callable[..., Any], arrays: Sequence[mx.array], cache: Sequence[KVCache], length: int, keeps: int
) -> tuple[mx.array, ...]:
    """One call of the compiled function. The entries then hold its buffers alone, so that MLX writes them in place."""
    offset = mx.array([length], dtype=mx.int32)
    out, keys, values = run(list(arrays), offset, [e.keys for e in cache], [e.values for e in cache])
    for entry, k, v in zip(cache, keys, values, strict=True):
        # At once, as far as an interruption can see.
        vars(entry).update(keys=k, values=v, offset=length + keeps)
    return out


def _copied(entry: KVCache) -> KVCache:
    """An entry with arrays of its own, which share their memory until one of them is written."""
    copied = copy.copy(entry)
    copied.keys, copied.values = mx.array(entry.keys), mx.array(entry.values)
    return copied


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
        a, b = a.astype(mx.float32), b.astype(mx.float32)
        shares.append(mx.linalg.norm(a - b) / mx.maximum(mx.linalg.norm(a), 1e-30))
    # One that is not a number is largest.
    return max(mx.stack(shares).tolist(), key=lambda share: (share != share, share))


def _least_s(run: Callable[[], Sequence[mx.array]], entries: Sequence[KVCache], w: int) -> float:
    """Seconds of one pass that is waited for, the least of four; the first is not counted."""
    seconds = []
    for _ in range(5):
        for entry in entries:
            entry.trim(w)
        began = time.perf_counter()
        mx.eval(run())
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
