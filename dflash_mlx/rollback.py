"""Rollback: keep the first rows of a target pass in every kind of mlx-lm cache, and remove the others.

Knows mlx-lm's cache classes. Does not know models, tokens or the loop.

A target pass over a block is undone in two calls: `rollback_point(entries, length)` before it, `rollback(entries, point, keep)`
after it. The kind of entry decides how (`_CUT`, `_undo`):

    entry                                       before the pass          to keep the first n rows of it
    KV, quantized, chunked, concatenated, MLA   its offset               cut the later rows
    rotating (sliding window, kept rows)        its offset               cut the newest rows, wherever the ring has them
    arrays (recurrence, convolution)            the arrays themselves    put them back, replay n rows (see `RollbackPoint`)
    list of these                               one of each              one by one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from .errors import CacheError
from .kernels.masks import WindowMask


def _cut_concatenated(entry: ConcatenateKVCache, n: int) -> None:
    """Drop the last n rows. mlx-lm's own trim only moves the offset, and the next update would bring the rows back."""
    length = entry.offset - n
    entry.keys, entry.values, entry.offset = entry.keys[..., :length, :], entry.values[..., :length, :], length


def _cut_rotating(entry: RotatingKVCache, n: int) -> None:
    """Drop the newest n rows, all of one pass, from a cache with a window of M = max_size rows.

        growing   r0 r1 r2 r3 .  .      a mark after the newest row: move it back
        ordered   r4 r5 r6 r7 r8 r9     after a pass of several rows: M - 1 old rows and the new ones, cut the tail
        ring      r8 r9 r4 r5 r6 r7     after a pass of one row: it took the place of r(offset - 1 - M), which no later
                                        row may see; move the mark back and the next row is written there

    With `keep` first rows that always stay, all of this happens after them.
    """
    length, mark, held = entry.offset - n, entry._idx - n, entry.keys.shape[2]
    if entry._idx < held:
        if n > 1 and entry.offset != entry._idx:
            raise CacheError(
                f"{n} rows cannot be dropped from a ring of {held} rows; it can drop one", "Start a new prompt cache"
            )
        entry.offset, entry._idx = length, mark
        return
    k, v = entry.keys, entry.values
    if mark < min(length, entry.max_size):
        # The whole pass is dropped, so a full ring lacks one row. Any row may fill the oldest place: it is never seen.
        at = entry.keep
        k, v = (mx.concatenate([a[..., :at, :], a[..., mark : mark + 1, :], a[..., at:mark, :]], axis=2) for a in (k, v))
        mark += 1
    entry.keys, entry.values = (k[..., :mark, :], v[..., :mark, :]) if length else (None, None)
    entry.offset, entry._idx = length, mark


# How an entry with one row per token drops its last n rows.
_CUT: dict[type, Callable[[Any, int], Any]] = {
    KVCache: KVCache.trim,
    QuantizedKVCache: QuantizedKVCache.trim,
    ChunkedKVCache: ChunkedKVCache.trim,
    ConcatenateKVCache: _cut_concatenated,
    RotatingKVCache: _cut_rotating,
}


def leaves(entries: Sequence[Any]) -> Iterator[Any]:
    """The entries, with each CacheList replaced by the entries inside it."""
    for entry in entries:
        if type(entry) is CacheList:
            yield from leaves(entry.caches)
        else:
            yield entry


def check_rollback(entries: Sequence[Any], family: str) -> None:
    """Refuse, before anything runs, a target with a cache kind that cannot be rolled back exactly.

    Raises:
      CacheError: names each kind and its layers.
    """
    kinds: dict[str, list[int]] = {}
    for layer, entry in enumerate(entries):
        for leaf in leaves([entry]):
            if type(leaf) is not ArraysCache and type(leaf) not in _CUT:
                kinds.setdefault(type(leaf).__name__, []).append(layer)
    if kinds:
        found = "; ".join(f"{name} in layers {', '.join(map(str, layers))}" for name, layers in kinds.items())
        known = ", ".join(sorted(kind.__name__ for kind in (*_CUT, ArraysCache, CacheList)))
        raise CacheError(
            f"{family} has {found}, which cannot be rolled back exactly; a drafter needs caches that can ({known})",
            "Run this target without a drafter (draft_model=None)",
        )


@dataclass
class RollbackPoint:
    """What `rollback` needs to keep any number of rows of one target pass.

    length: rows committed before the pass.
    saved: for each entry its offset, its arrays, or a list of these. Nothing is copied.
    rows: rows of the pass, once it has ended; 0 before that, and if it was interrupted.
    replays: id(entry) -> functions; f(n) runs the first n rows of the pass again through the module that changed the entry's
      arrays. The pass puts them here; they hold that module's inputs for the block.
    whole: id(entry) -> its attributes, until the pass has ended. They undo a pass that was interrupted after writing an entry's
      keys and before writing its values.
    """

    length: int
    saved: list[Any]
    rows: int = 0
    replays: dict[int, list[Callable[[int], None]]] = field(default_factory=dict)
    whole: dict[int, dict[str, Any]] = field(default_factory=dict)

    def ended(self, rows: int) -> None:
        """Call when the pass is enqueued. rows: how many of its rows can be kept. Releases the arrays that the pass replaced."""
        self.rows = rows
        self.whole.clear()


def rollback_point(entries: Sequence[Any], length: int) -> RollbackPoint:
    """Remember the state of the entries, which hold `length` tokens. Cheap: references and numbers only."""
    whole: dict[int, dict[str, Any]] = {}
    return RollbackPoint(length, [_save(entry, whole) for entry in entries], whole=whole)


def _save(entry: Any, whole: dict[int, dict[str, Any]]) -> Any:
    kind = type(entry)
    if kind is ArraysCache:
        return list(entry.cache)
    if kind is CacheList:
        return [_save(inner, whole) for inner in entry.caches]
    if kind in _CUT:
        # Not of an entry in a batch's shared arrays (`batch.groups`), which never grows: its offset undoes any pass.
        whole[id(entry)] = dict(vars(entry))
    return entry.offset


def rollback(entries: Sequence[Any], point: RollbackPoint, length: int) -> None:
    """Bring every entry to the state that plain decoding has after `length` tokens: up to `point`, and the pass's first rows.

    Until the next pass it may be called again with a smaller length. An interrupted pass, which may have changed only some
    entries, can be undone as a whole.

    Raises:
      CacheError: if the pass did not have that many rows, or an entry cannot be cut to that length.
    """
    keep = length - point.length
    if not 0 <= keep <= point.rows:
        raise CacheError(
            f"the cache cannot be rolled back to {length} rows; the last pass left {point.length} to {point.length + point.rows}",
            "Start again with an empty prompt cache",
        )
    for entry, saved in zip(entries, point.saved, strict=True):
        _undo(entry, saved, point, keep)


def _undo(entry: Any, saved: Any, point: RollbackPoint, keep: int) -> None:
    replays = point.replays.get(id(entry), [])
    if type(entry) is CacheList:
        # A module that takes the whole list appends to all its entries in a replay, so the pass is first removed from each.
        for inner, inner_saved in zip(entry.caches, saved, strict=True):
            _undo(inner, inner_saved, point, 0 if replays and keep < point.rows else keep)
    elif type(entry) is not ArraysCache:
        if not point.rows and (attributes := point.whole.get(id(entry))):
            # Safe: the interrupted pass wrote only to places that no kept row reads.
            vars(entry).update(attributes)
        else:
            _cut_to(entry, saved, keep)
    elif keep == point.rows and keep:
        return
    else:
        entry.cache = list(saved)
    if 0 < keep < point.rows:
        for replay in replays:
            replay(keep)


def _cut_to(entry: Any, offset: int, keep: int) -> None:
    """Cut an entry that held `offset` rows before the pass to `offset + keep`. One that the model does not use stays as is."""
    length = offset + keep
    if entry.offset > length:
        _CUT.get(type(entry), KVCache.trim)(entry, entry.offset - length)
    if entry.offset not in (offset, length):
        raise CacheError(
            f"{type(entry).__name__} holds {entry.offset} rows; it must hold {length}",
            "Start again with an empty prompt cache",
        )


class _MasksByRow(RotatingKVCache):
    """A rotating cache whose mask for several rows lets each row see what it would see alone.

    mlx-lm's own mask hides the j oldest rows of the buffer from row j, even those that `keep` protects. With a window larger than
    the cache it shows rows that the ring has dropped.
    """

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | str | None:
        if window_size is not None and window_size >= self.max_size:
            window_size = None
        if N == 1 or not self.keep or self.offset + N <= self.max_size:
            mask = super().make_mask(N, window_size, return_array)
            if isinstance(mask, mx.array) and N > 1 and window_size is None and not self.keep:
                # A pass over one row has no mask, because the ring holds exactly the window's keys. So mark this as a window.
                mask = WindowMask(mask)
                mask.window = self.max_size
            return mask
        if window_size is not None:
            raise CacheError(
                f"a layer has a window of {window_size} inside a rotating cache that keeps {self.keep} first rows; they exclude "
                "each other",
                "Leave max_kv_size out",
            )
        first = min(self.max_size - 1, self.offset)
        rows, columns = mx.arange(first, first + N)[:, None], mx.arange(first + N)[None]
        return (columns <= rows) & ((columns < self.keep) | (rows - columns < self.max_size - self.keep))


@contextmanager
def masks_by_row(entries: Sequence[Any]) -> Iterator[None]:
    """During one pass over a block, rotating caches give each row a mask that shows what it would see alone."""
    found = [entry for entry in leaves(entries) if type(entry) is RotatingKVCache]
    try:
        for entry in found:
            entry.__class__ = _MasksByRow
        yield
    finally:
        restore_masks(found)


def restore_masks(entries: Sequence[Any]) -> None:
    """Give rotating caches mlx-lm's own class and masks back, also after an interruption of `masks_by_row`."""
    for entry in leaves(entries):
        if type(entry) is _MasksByRow:
            entry.__class__ = RotatingKVCache


def cut_entries(entries: Sequence[Any], length: int) -> bool:
    """Cut trimmable entries to `length` rows. False, and nothing is cut, if a chunked entry has lost rows that it would need."""
    every = list(leaves(entries))
    for entry in every:
        # Attention starts at a chunk's first row: that must still be there.
        if type(entry) is ChunkedKVCache and entry.offset > length:
            if length // entry.chunk_size * entry.chunk_size < entry.start_position:
                return False
    for entry in every:
        if entry.offset > length:
            _CUT[type(entry)](entry, entry.offset - length)
    return True


def append_window(cache: RotatingKVCache, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
    """Append rows to a sliding context cache and keep the last `max_size`, always in time order.

    mlx-lm's own update writes a single row in ring order, which a mask by position then misreads.

    Shapes:
      - k, v: [B, n_kv_heads, S, D], S may be 0
    Returns: all rows now held, [B, n_kv_heads, min(offset, max_size), D] each.
    """
    new = k.shape[2]
    if cache.keys is not None:
        # Up to _idx: mlx-lm's trim moves that mark and leaves the rows behind it.
        k = mx.concatenate([cache.keys[:, :, : cache._idx], k], axis=2)
        v = mx.concatenate([cache.values[:, :, : cache._idx], v], axis=2)
    cache.keys, cache.values = k[:, :, -cache.max_size :], v[:, :, -cache.max_size :]
    cache.offset += new
    cache._idx = cache.keys.shape[2]
    return cache.keys, cache.values
