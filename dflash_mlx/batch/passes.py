"""One target pass over the blocks of several rows. Each row keeps its own cache entries.

Knows mlx-lm's models and their cache entries; knows no drafts, no acceptance and no loop.

    rows       a: 1 anchor, 3 drafts     b: 1 anchor     c: 1 anchor, 1 draft     d: 1 anchor
    ids        a a a a b c c d           [T, 1]: to the model each token is a batch row with its own position
    linear     one product over all T
    attention  a b c | d                 rows of a group (`groups`) in one call; any other row with its own entry
    others     a | b | c | d             a module that uses its entry in another way (a recurrence, MLA) runs row by row

Rows of a group stand side by side, in the order of their slots.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, CacheList

from ..kernels.routing import ATTENTION, renamed
from ..models.intercept import intercept, own_class
from ..models.target import Target, TargetOutput
from ..rollback import RollbackPoint, masks_by_row, rollback_point
from .group_pass import GroupPass
from .groups import Groups, Seat, SlotKV, group_spans, seat_of

# Tokens of the two rows with which a target is tested.
_PROBE = (5, 3)


@dataclass
class RowPass:
    """One row's part of a pass: `size` tokens after those in its entries. point: undoes them; seat: set if it shares a group.

    is_chunk: they are a piece of its prompt, which is kept or undone as a whole, and is seen under mlx-lm's own masks.
    """

    entries: list[Any]
    point: RollbackPoint
    size: int
    seat: Seat | None = None
    is_chunk: bool = False

    @property
    def cut_by(self) -> RollbackPoint | None:
        """The point, if some of its tokens may be undone and others kept."""
        return None if self.is_chunk or self.size == 1 else self.point


# A layer only hands such an array on. A constant: an operation would belong to the thread that imports this.
_NOTHING = mx.array([[[[0.0]]]])


class _PerShare(mx.array):
    """Carries keys, values or masks through a layer's code: one part for each share, that is, for rows that attend together."""

    entry: RowsEntry
    parts: list[Any]

    @classmethod
    def of(cls, entry: RowsEntry, parts: list[Any]) -> _PerShare:
        made = cls(_NOTHING)
        made.entry, made.parts = entry, parts
        return made


class _OneShare:
    """A row that attends by itself, with its own entry. row: its number; span: its tokens among the T tokens."""

    def __init__(self, row: int, size: int, span: tuple[int, int]):
        self.row, self.size, self.span = row, size, span

    def write(self, entries: list[Any], keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return entries[self.row].update_and_fetch(_as_row(keys), _as_row(values))

    def mask(self, entries: list[Any], asked: dict[str, Any]) -> Any:
        return entries[self.row].make_mask(self.size, **asked)

    def of_row(self, mask: Any, row: int) -> Any:
        return mask

    def attend(self, queries, keys, values, entries, scale, mask, sinks) -> mx.array:
        return _as_tokens([scaled_dot_product_attention(_as_row(queries), keys, values, entries[self.row], scale, mask, sinks)])


class _GroupShare:
    """Rows of a group. row: the number of the first."""

    def __init__(self, row: int, group_pass: GroupPass, span: tuple[int, int]):
        self.row, self.group_pass, self.span, self.rows = row, group_pass, span, range(row, row + len(group_pass.sizes))

    def write(self, entries: list[Any], keys: mx.array, values: mx.array) -> tuple[int, int]:
        index = entries[self.row].index
        self.group_pass.places.write(index, keys, values)
        for row, size in zip(self.rows, self.group_pass.sizes, strict=True):
            entries[row].offset += size
        return index, index

    def mask(self, entries: list[Any], asked: dict[str, Any]) -> dict[str, Any]:
        # The mask is made later, when it is known whether the rows attend together.
        return asked

    def of_row(self, mask: dict[str, Any], row: int) -> Any:
        return self.group_pass.row_mask(row - self.row, **mask)

    def attend(self, queries, index, _, entries, scale, mask, sinks) -> mx.array:
        if not isinstance(mask, dict):
            raise TypeError("a layer attends under a mask that is not the one of its entry")
        if not self.group_pass.is_apart(queries, index):
            return self.group_pass.attend(queries, index, scale, self.group_pass.mask(True, mask.get("window_size")), sinks)

        def alone(q: mx.array, k: mx.array, v: mx.array, m: Any) -> mx.array:
            return scaled_dot_product_attention(q, k, v, entries[self.row], scale, m, sinks)

        masks = [self.of_row(mask, row) for row in self.rows]
        return _as_tokens(self.group_pass.attend_apart(self.group_pass.split(queries), index, alone, masks))


class _Layout:
    """How the T tokens of a pass are divided into shares, and what is the same in all layers."""

    def __init__(self, rows: Sequence[RowPass]):
        self.rows, self.spans, start = rows, [], 0
        for row in rows:
            self.spans.append((start, start + row.size))
            start += row.size
        self._positions: dict[tuple[int, ...], mx.array] = {}
        self._single = [_OneShare(i, row.size, span) for i, (row, span) in enumerate(zip(rows, self.spans, strict=True))]
        self._grouped = list(self._make_shares())

    def _make_shares(self) -> Iterator[_OneShare | _GroupShare]:
        end = 0
        for first, last in group_spans(self.rows):
            yield from self._single[end:first]
            some, end = self.rows[first:last], last
            slots, sizes = [row.seat.slot for row in some], [row.size for row in some]
            ends = [row.point.length + row.size for row in some]
            span = self.spans[first][0], self.spans[last - 1][1]
            # A power of two: each number of places has kernels of its own. On an H200 a round with a new one took 54 ms for 13.
            n = 1 << (max(sizes) - 1).bit_length()
            yield _GroupShare(first, GroupPass(some[0].seat.group, slots, ends, sizes, n), span)
        yield from self._single[end:]

    def shares(self, entries: list[Any]) -> list[_OneShare | _GroupShare]:
        """The shares for the rows with these entries."""
        for share in self._grouped:
            if type(share) is _GroupShare and type(entries[share.row]) is SlotKV:
                break
        else:
            return self._single
        found = []
        for share in self._grouped:
            one_by_one = type(share) is _GroupShare and type(entries[share.row]) is not SlotKV
            found += [self._single[row] for row in share.rows] if one_by_one else [share]
        return found

    def positions(self, offsets: tuple[int, ...]) -> mx.array:
        """[T] int32: the position of each token, if the rows begin at these offsets."""
        if offsets not in self._positions:
            every = [at + i for at, row in zip(offsets, self.rows, strict=True) for i in range(row.size)]
            self._positions[offsets] = mx.array(every, dtype=mx.int32)
        return self._positions[offsets]


class RowsEntry:
    """Stands for a layer's cache entry in a pass over several rows; holds one entry of each row."""

    def __init__(self, layout: _Layout, entries: list[Any]):
        self.layout, self.entries, self.shares = layout, entries, layout.shares(entries)
        self._offset: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        # Layers ask twice, for queries and for keys.
        if self._offset is None:
            self._offset = self.layout.positions(tuple([entry.offset for entry in self.entries]))
        return self._offset

    def __getitem__(self, place: int) -> RowsEntry:
        """If the entries are lists: entry number `place` of each."""
        if type(self.entries[0]) is not CacheList:
            raise TypeError("a recurrent state was read outside of the modules that are given it")
        return RowsEntry(self.layout, [entry[place] for entry in self.entries])

    def _split(self, a: mx.array) -> list[mx.array]:
        """Split [T, ...] into the parts of the shares."""
        return [a[share.span[0] : share.span[1]] for share in self.shares]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [T, heads, 1, D] keys and values. The result is passed to attention unchanged."""
        self._offset = None
        if len(self.shares) == 1:
            held = [self.shares[0].write(self.entries, keys, values)]
        else:
            parts = zip(self.shares, self._split(keys), self._split(values), strict=True)
            held = [share.write(self.entries, k, v) for share, k, v in parts]
        return _PerShare.of(self, [k for k, _ in held]), _PerShare.of(self, [v for _, v in held])

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        asked = {} if type(self.entries[0]) is ArraysCache else {"return_array": return_array, "window_size": window_size}
        masks = [share.mask(self.entries, asked) for share in self.shares]
        return None if all(mask is None for mask in masks) else _PerShare.of(self, masks)

    def attend(self, queries: mx.array, keys: list[Any], values: list[Any], scale: float, mask: Any, sinks: Any) -> mx.array:
        """Takes and returns [T, heads, 1, D]. keys, values: one per share; mask: for all shares, perhaps changed by the layer."""
        masks = [mask] * len(self.shares) if not isinstance(mask, _PerShare) else self.masks(mask)
        if len(self.shares) == 1:
            return self.shares[0].attend(queries, keys[0], values[0], self.entries, scale, masks[0], sinks)
        parts = zip(self.shares, self._split(queries), keys, values, masks, strict=True)
        return mx.concatenate([share.attend(q, k, v, self.entries, scale, m, sinks) for share, q, k, v, m in parts])

    def masks(self, mask: _PerShare) -> list[Any]:
        """The masks of this entry's shares, from a mask that another entry may have made."""
        if len(mask.parts) == len(self.shares):
            return mask.parts
        return [mask_of_row(mask, share.row) for share in self.shares]


def mask_of_row(mask: _PerShare, row: int) -> Any:
    """The mask of one row, as its own entry would have made it."""
    for share, part in zip(mask.entry.shares, mask.parts, strict=True):
        if type(share) is _OneShare and share.row == row:
            return part
        if type(share) is _GroupShare and row in share.rows:
            return share.of_row(part, row)
    raise IndexError(row)


def _as_tokens(parts: list[mx.array]) -> mx.array:
    """Join the rows' [1, heads, n, D] to [T, heads, 1, D]."""
    parts = [a if a.shape[2] == 1 else a.swapaxes(0, 2) for a in parts]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _as_row(a: mx.array) -> mx.array:
    """Turn one row's [n, heads, 1, D] into [1, heads, n, D]."""
    return a if a.shape[0] == 1 else a.swapaxes(0, 2)


class BatchTarget:
    """Passes of a target over several rows.

    make_cache: makes empty cache entries of the target.
    reason: why the target cannot run several rows, found by a test with two short rows; None if it can.
    has_failed: whether the reason is an error, which another test might not meet.
    """

    def __init__(self, target: Target, make_cache: Callable[[], list[Any]]):
        self.target, self.has_failed, self._layout, self._alone = target, False, None, False
        self._split_modules([], [])
        self.reason = self._probe(make_cache)

    def another(self) -> BatchTarget:
        """For passes of another batch, perhaps in another thread. What was found out is not tested again."""
        made = copy.copy(self)
        made._layout, made._alone = None, False
        made._split_modules(*self._modules)
        return made

    def _split_modules(self, attending: Sequence[nn.Module], alone: Sequence[nn.Module]) -> None:
        """Which modules attend for all rows, and which run row by row."""
        self._modules = attending, alone
        self._handlers = [(m, self._attends(m), "__call__") for m in attending]
        self._handlers += [(m, self._one_by_one(m), "__call__") for m in alone]

    def __call__(self, ids: mx.array, rows: Sequence[RowPass], eager: bool = True) -> TargetOutput:
        """Run [T] ids, row after row. Afterwards each row's entries hold its tokens, and its `point` has ended.

        eager: as `Target`'s.
        Returns: hidden [T, 1, H] and features [T, 1, n_taps * H].
        """
        self._layout = _Layout(rows)
        columns = zip(*(row.entries for row in rows), strict=True)
        cache = [RowsEntry(self._layout, list(column)) for column in columns]
        try:
            alone = [entry for row in rows if not row.is_chunk for entry in row.entries if type(entry) is not SlotKV]
            with masks_by_row(alone), intercept(self._handlers):
                out = self.target(ids[:, None], cache, eager=eager)
        finally:
            self._layout = None
        for row in rows:
            row.point.ended(0 if row.is_chunk else row.size)
        return out

    def _attends(self, module: nn.Module) -> Callable[..., Any]:
        """A handler for a module that attends: the module's own call, with the rows' attention in place of mlx-lm's function."""

        def attend(queries, keys, values, cache, scale, mask, sinks=None):
            if not isinstance(keys, _PerShare):
                return scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
            return keys.entry.attend(queries, keys.parts, values.parts, scale, mask, sinks)

        ours = renamed(own_class(module).__call__, ATTENTION, attend)
        return lambda inner, args, kwargs: ours(module, *args, **kwargs)

    def _one_by_one(self, module: nn.Module) -> Callable[..., Any]:
        """A handler for a module that runs row by row, with each row's own entry. What it replays goes to the row's `point`."""
        states = self.target.states

        def handler(inner, args, kwargs):
            if self._alone or self._layout is None:  # a replay comes after the pass
                return inner(*args, **kwargs)
            layout, outs, self._alone = self._layout, [], True
            try:
                for i, (row, span) in enumerate(zip(layout.rows, layout.spans, strict=True)):
                    given = [_of_row(value, i, span) for value in args]
                    named = {name: _of_row(value, i, span) for name, value in kwargs.items()}
                    with states.during(row.entries, row.cut_by, row.size, False):
                        outs.append(module(*given, **named))
            finally:
                self._alone = False
            if isinstance(outs[0], tuple):
                return tuple(_states(parts) for parts in zip(*outs, strict=True))
            return _states(outs)

        return handler

    def _probe(self, make_cache: Callable[[], list[Any]]) -> str | None:
        """Run two rows together and alone; their hidden states must be equal. Finds which modules have to run row by row."""
        blocks = [[3, 5, 2], [4]]
        try:
            with _holders(self.target.model) as found:
                self._prompts(make_cache)
            alone = mx.concatenate(self._singles(blocks, make_cache))
        except Exception as error:  # noqa: BLE001 - any error of a model's code is the reason
            self.has_failed = True
            return f"its caches are of a kind that only one row can use ({error})"
        near, reason = 1e-4 if alone.dtype == mx.float32 else 0.1, "none of its modules is given a cache"
        attending = {id(m): m for _, m in self.target.model.named_modules() if _calls_attention(m)}
        for chosen in (attending, {}) if attending else ({},):
            self._split_modules([*chosen.values()], [m for m in found if id(m) not in chosen])
            try:
                rows = [self._seated(*about) for about in zip(self._prompts(make_cache), _PROBE, blocks, strict=True)]
                Groups().arrange([(row.seat, row.point.length + row.size) for row in rows if row.seat])
                together = self(mx.array([token for block in blocks for token in block]), rows).hidden[:, 0]
                error = (mx.abs(together - alone).max() / mx.abs(alone).max()).item()
                self.has_failed = False
                if error < near:
                    return None
                reason = f"its layers give other values for several rows ({error:.1e} off)"
            except Exception as error:  # noqa: BLE001
                self.has_failed = True
                reason = f"its layers cannot run several rows ({type(error).__name__}: {error})"
        return reason

    @staticmethod
    def _seated(entries: list[Any], held: int, block: list[int]) -> RowPass:
        return RowPass(entries, rollback_point(entries, held), len(block), seat_of(entries))

    def _prompts(self, make_cache: Callable[[], list[Any]]) -> list[list[Any]]:
        """The cache entries of two rows that hold a few tokens."""
        caches = [make_cache() for _ in _PROBE]
        for entries, n in zip(caches, _PROBE, strict=True):
            self.target(mx.array([[(7 * i + n) % self.target.vocabulary for i in range(n)]]), entries)
        return caches

    def _singles(self, blocks: list[list[int]], make_cache: Callable[[], list[Any]]) -> list[mx.array]:
        found = []
        for entries, block in zip(self._prompts(make_cache), blocks, strict=True):
            with masks_by_row(entries):
                found.append(self.target(mx.array([block]), entries, rollback_point(entries, 0)).hidden[0])
        return found


def _of_row(value: Any, i: int, span: tuple[int, int]) -> Any:
    """Row i's part of a module's argument: its entry, its mask, or its tokens' states ([T, 1, H] becomes [1, n, H])."""
    if isinstance(value, RowsEntry):
        return value.entries[i]
    if isinstance(value, _PerShare):
        return mask_of_row(value, i)
    tokens = isinstance(value, mx.array) and value.ndim > 2 and value.shape[1] == 1
    return value[span[0] : span[1]].swapaxes(0, 1) if tokens else value


def _states(parts: Sequence[Any]) -> Any:
    """Join the rows' [1, n, H] to [T, 1, H]."""
    return mx.concatenate([part.swapaxes(0, 1) for part in parts]) if isinstance(parts[0], mx.array) else parts[0]


@contextmanager
def _holders(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Watch passes for the innermost modules that are given a cache entry."""
    found: dict[int, nn.Module] = {}
    depth: list[bool] = []

    def watch(module: nn.Module) -> Callable[..., Any]:
        def handler(inner, args, kwargs):
            if not any(
                hasattr(v, "update_and_fetch") or isinstance(v, (ArraysCache, CacheList)) for v in (*args, *kwargs.values())
            ):
                return inner(*args, **kwargs)
            depth.append(True)
            out = inner(*args, **kwargs)
            if depth.pop():
                found[id(module)] = module
            depth[:] = [False] * len(depth)
            return out

        return handler

    every = {id(m): m for _, m in model.named_modules() if m is not model}
    modules: list[nn.Module] = []
    with intercept([(m, watch(m)) for m in every.values()]):
        yield modules
    modules += found.values()


def _calls_attention(module: nn.Module) -> bool:
    """Whether a module itself calls mlx-lm's attention function."""
    call = own_class(module).__call__ if callable(module) else None
    named = isinstance(call, FunctionType) and call.__globals__.get(ATTENTION) is scaled_dot_product_attention
    return named and ATTENTION in call.__code__.co_names
