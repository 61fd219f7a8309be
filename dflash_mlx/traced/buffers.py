"""A cache as the arrays that go into a traced pass and come out of it.

    KVCache           its whole buffers; the pass's position is given as arrays: places to write to, and a mask over the buffers
    RotatingKVCache   a drafter's: like a KVCache, as long as it holds every row of its text
    ArraysCache       its arrays, as a recurrence or a convolution left them

Knows mlx-lm's cache entries; knows no model and no pass.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from ..kernels import autotune
from ..kernels.masks import BufferMask
from ..kernels.small_batch import folded_mask, folded_or_none
from ..machine import array_bytes, limit_bytes

# The smallest step between capacities, in rows: making a trace takes as long as several ordinary passes.
_STEP = 1024

# (arrays, cache entries, number of rows in them) -> the pass's output. For ordinary entries and for traced ones.
Pass = Callable[[Sequence[mx.array], Sequence[Any], int | mx.array], tuple[mx.array, ...]]


def may_trace(entries: Sequence[Any], rows: int | None = None) -> bool:
    """Whether passes over these entries may be traced: only plain caches with one row per token, and states of one request.

    Args:
      rows: of a drafter's pass, after which its entries with a window must still hold all rows; None: no windows are allowed.
    """
    kinds = {type(entry) for entry in entries}
    apart = any(entry.lengths is not None or entry.left_padding is not None for entry in states_of(entries))
    whole = rows is not None and all(_holds_all(entry, rows) for entry in rows_of(entries) if type(entry) is RotatingKVCache)
    known = {KVCache, ArraysCache} | ({RotatingKVCache} if whole else set())
    return bool(rows_of(entries)) and kinds <= known and not apart


def _holds_all(entry: RotatingKVCache, rows: int) -> bool:
    """Whether a drafter's entry with a window holds every row of its text in order, and still will after `rows` more."""
    return not entry.keep and entry._idx == entry.offset and entry.offset + rows <= entry.max_size


def states_of(entries: Sequence[Any]) -> list[ArraysCache]:
    """The entries that hold states instead of one row per token."""
    return [entry for entry in entries if type(entry) is ArraysCache]


def rows_of(entries: Sequence[Any]) -> list[KVCache | RotatingKVCache]:
    """The entries that hold one row per token."""
    return [entry for entry in entries if type(entry) in (KVCache, RotatingKVCache)]


def held(entry: Any) -> list[mx.array]:
    """An entry's arrays; None for each one that an empty entry does not have yet."""
    return list(entry.cache) if type(entry) is ArraysCache else [entry.keys, entry.values]


def capacity_for(rows: int) -> int:
    """Size of the buffers for this many rows. There are few sizes, an eighth to a quarter apart beyond 8192."""
    step = _STEP
    while rows > 8 * step:
        step *= 2
    return -(-rows // step) * step


class Place(NamedTuple):
    """The position of a pass, as arrays for the compiled function. Plain numbers would be constants and need a new trace.

    Shapes:
      - offset, block, end: [1] int32, the positions of the pass's first row, of its block's first row (in a drafter's pass after
        the new context rows), and just after the block
      - rows: [1, 1, n, 1] int32, where the rows of the pass are written
      - seen, added: [K, capacity], what each block row sees: True in `seen`; in `added` 0, else minus infinity (cache's type)
    """

    offset: mx.array
    block: mx.array
    end: mx.array
    rows: mx.array
    seen: mx.array
    added: mx.array

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows before the block, and of the block."""
        return self.rows.size - len(self.seen), len(self.seen)

    @property
    def capacity(self) -> int:
        return self.seen.shape[1]

    @classmethod
    def of(cls, length: int, spare: int, context: int, K: int, columns: mx.array, dtype: mx.Dtype) -> Place:
        """The position after `length` rows. spare: rows without meaning before the new ones, which are written after them;
        columns: [capacity], 0, 1, ..."""
        # Made outside of the trace, by few operations that need no compiling, and on the device: CUDA fetches an array from the
        # host by a page fault, which takes some hundred microseconds.
        end = length + context + K
        seen = columns <= columns[length + context : end, None]
        added = mx.where(seen, mx.array(0, dtype), mx.array(-math.inf, dtype))
        rows = _rows_from(spare, spare + context + K) + length if spare else columns[length:end]
        at = [mx.array([n], dtype=mx.int32) for n in (length - spare, length + context, end)]
        return cls(*at, rows[None, None, :, None], seen, added)


@functools.cache
def _rows_from(spare: int, n: int) -> mx.array:
    """[n] int32: the last `spare` of 0, 1, ..., n - 1, then the others."""
    return mx.array([*range(n - spare, n), *range(n - spare)], dtype=mx.int32)


class TracedKV:
    """Stands for a cache entry while a pass is traced. Its buffers and the pass's position are inputs of the trace.

    spread: one dictionary for all entries of a pass, for arrays that they share.
    """

    def __init__(self, keys: mx.array, values: mx.array, place: Place, spread: dict[tuple, mx.array]):
        self.keys, self.values, self.offset, self._place, self._spread = keys, values, place.offset, place, spread

    @property
    def block_offset(self) -> mx.array:
        """[1]: where a drafter's block begins, after the new context rows."""
        return self._place.block

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [1, heads, n, D] rows at the offset. Returns: the whole buffers [1, heads, capacity, D]."""
        self.keys = mx.put_along_axis(self.keys, self._rows(keys.shape), keys, axis=2)
        self.values = mx.put_along_axis(self.values, self._rows(values.shape), values, axis=2)
        return self.keys, self.values

    def _rows(self, shape: tuple[int, ...]) -> mx.array:
        """Indices at which the values of [1, heads, n, D] are written."""
        return self._once("rows", self._place.rows, shape)

    def _once(self, name: str, array: mx.array, shape: tuple[int, ...]) -> mx.array:
        if (name, shape) not in self._spread:
            self._spread[name, shape] = mx.broadcast_to(array, shape)
        return self._spread[name, shape]

    def trim(self, n: int) -> None:
        """Nothing to do: the offset has not moved, and rows after it are never read."""

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """[N, capacity] bool, True for keys that a row sees; as mlx-lm's caches make it."""
        place = self._place
        if window_size is None:
            return BufferMask.of(place.seen, place.added, place.end)
        columns = mx.arange(self.keys.shape[2])[None]
        return place.seen & (place.rows.reshape(N, 1) < columns + window_size)

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, causal: bool) -> mx.array:
        """Attention of a drafter's block [1, HQ, K, D] to the buffers [1, HK, capacity, D]: causal, or every row to the whole
        block."""
        seen, added = self._place.seen, self._place.added
        # If every row sees the whole block, one mask row serves all.
        fold = (lambda _, *about: folded_mask(added, *about)) if causal else lambda *_: added[-1:]
        if autotune.may_run():
            out = folded_or_none(queries, keys, values, scale, seen, True, fold)
            if out is not None:
                return out
        mask = self._once("causal" if causal else "all", added if causal else added[-1:], (*queries.shape[:3], keys.shape[2]))
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def traceable(
    run: Pass, kinds: Sequence[type], arrays: list[mx.array], place: Sequence[mx.array], given: list[list[mx.array]]
) -> tuple[tuple[mx.array, ...], list[list[mx.array]]]:
    """A pass as a function of arrays alone.

    Shapes:
      - place: as `Place`; given: each entry's arrays, of a KVCache [1, heads, capacity, D]
    Args:
      kinds: the entries' classes.
    Returns: the pass's output, and the entries' arrays after it.
    """
    place = Place(*place)
    spread: dict[tuple, mx.array] = {}
    entries = [_state(of) if kind is ArraysCache else TracedKV(*of, place, spread) for kind, of in zip(kinds, given, strict=True)]
    out = run(arrays, entries, place.offset)
    return tuple(out), [held(entry) for entry in entries]


def _state(arrays: Sequence[mx.array]) -> ArraysCache:
    entry = ArraysCache(len(arrays))
    entry.cache = list(arrays)
    return entry


def run_traced(
    run: Callable[..., Any], arrays: Sequence[mx.array], cache: Sequence[Any], place: Place, end: int
) -> tuple[mx.array, ...]:
    """Call the compiled function. Afterwards only the entries hold its arrays, so that MLX can write the buffers in place."""
    out, behind = run(list(arrays), list(place), [held(entry) for entry in cache])
    for entry, found in zip(cache, behind, strict=True):
        # One statement, so that an interruption cannot fall in between.
        if type(entry) is ArraysCache:
            entry.cache = found
        else:
            mark = {"_idx": end} if type(entry) is RotatingKVCache else {}
            vars(entry).update(keys=found[0], values=found[1], offset=end, **mark)
    return out


def copied(entry: Any) -> Any:
    """A copy of an entry. The arrays share memory until one of them is written."""
    copied, arrays = copy.copy(entry), [mx.array(a) for a in held(entry)]
    vars(copied).update({"cache": arrays} if type(entry) is ArraysCache else dict(zip(("keys", "values"), arrays, strict=True)))
    return copied


def fits(cache: Sequence[Any]) -> bool:
    """Whether the memory is enough for the copies of a trial: for an ordinary pass, for a compiled one and for widening it."""
    return mx.get_active_memory() + 3 * array_bytes(a for entry in cache for a in held(entry)) <= limit_bytes()


def widen(entry: KVCache | RotatingKVCache, capacity: int) -> None:
    """Give an entry buffers of `capacity` rows; new rows are zero."""
    if more := capacity - entry.keys.shape[2]:
        arrays = {"keys": entry.keys, "values": entry.values}
        wider = {k: mx.concatenate([a, mx.zeros((*a.shape[:2], more, a.shape[3]), a.dtype)], axis=2) for k, a in arrays.items()}
        vars(entry).update(wider)


def distance(
    expected: Sequence[mx.array], found: Sequence[mx.array], plain: Sequence[Any], ours: Sequence[Any], length: int
) -> float:
    """The largest relative distance (to the norm) between the results of two passes: states, taps, the new rows of the caches
    (by themselves: among many others they would not count), and what recurrences left. 0: every value is the same.
    """
    pairs = [*zip(expected, found, strict=True)]
    for a, b in zip(states_of(plain), states_of(ours), strict=True):
        pairs += zip(a.cache, b.cache, strict=True)
    for a, b in zip(rows_of(plain), rows_of(ours), strict=True):
        for cut in (slice(0, length), slice(length, a.offset)):
            pairs += [(a.keys[:, :, cut], b.keys[:, :, cut]), (a.values[:, :, cut], b.values[:, :, cut])]
    shares = []
    for a, b in pairs:
        a, b = a.astype(mx.float32), b[:, : a.shape[1]].astype(mx.float32)
        share = mx.linalg.norm(a - b) / mx.maximum(mx.linalg.norm(a), 1e-30)
        # The square of a small difference may underflow to zero.
        shares.append(mx.where(mx.array_equal(a, b), 0.0, mx.maximum(share, 1e-30)))
    # NaN counts as the largest.
    return max(mx.stack(shares).tolist(), key=lambda share: (share != share, share))
