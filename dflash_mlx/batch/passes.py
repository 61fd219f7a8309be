"""One target pass over the blocks of several rows, each of which keeps its own cache entries.

Knows models as mlx-lm has them and their cache entries; knows no drafts, no acceptance and no loop.

    rows       a: 1 anchor, 3 drafts     b: 1 anchor     c: 1 anchor, 1 draft
    ids        a a a a b c c             [T, 1]: each token is a row of its own to the model, at its own position
    linear     one product over all T
    attention  a | b | c                 each row's queries with that row's own keys, as it attends alone
    others     a | b | c                 a module that uses its entry in another way (a recurrence, MLA) runs row by row

No key is copied or padded when rows join, leave or grow apart: memory is what the rows take alone, a row's cache is at all times
what a run alone would have, and its values are those of a run alone, bit by bit where products do not depend on their rows.
"""

from __future__ import annotations

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
from ..rollback import RollbackPoint, exact_windows, rollback_point

# Tokens of the two rows that are tried.
_PROBE = (5, 3)


@dataclass
class RowPass:
    """One row's part of a pass: `size` tokens after what its entries hold; `point` undoes them."""

    entries: list[Any]
    point: RollbackPoint
    size: int


class _PerRow(mx.array):
    """Stands for keys, values or masks, one of each row, on their way through a layer's code."""

    rows: list[Any]
    entries: list[Any]

    @classmethod
    def of(cls, rows: list[Any], entries: list[Any] = ()) -> _PerRow:
        made = cls(mx.zeros((1, 1, 1, 1)))
        made.rows, made.entries = rows, entries
        return made


class _Spans:
    """The spans of a pass's rows among its T tokens, and what layers have in common."""

    def __init__(self, rows: Sequence[RowPass]):
        self.rows, self.spans, start = rows, [], 0
        for row in rows:
            self.spans.append((start, start + row.size))
            start += row.size
        self._positions: dict[tuple[int, ...], mx.array] = {}

    def positions(self, offsets: tuple[int, ...]) -> mx.array:
        """[T] int32: where each token stands, rows beginning at these offsets."""
        if offsets not in self._positions:
            every = [at + i for at, row in zip(offsets, self.rows, strict=True) for i in range(row.size)]
            self._positions[offsets] = mx.array(every, dtype=mx.int32)
        return self._positions[offsets]

    def split(self, a: mx.array) -> list[mx.array]:
        """[T, heads, 1, D] to one [1, heads, n, D] a row."""
        return [a[s:e] if e - s == 1 else a[s:e].swapaxes(0, 2) for s, e in self.spans]


def _joined(parts: list[mx.array]) -> mx.array:
    """[1, heads, n, D] of each row to [T, heads, 1, D]."""
    return mx.concatenate([a if a.shape[2] == 1 else a.swapaxes(0, 2) for a in parts])


class RowsEntry:
    """What a layer is given as its cache entry: one entry of each row."""

    def __init__(self, rows: _Spans, entries: list[Any]):
        self.of, self.entries = rows, entries

    @property
    def offset(self) -> mx.array:
        return self.of.positions(tuple(entry.offset for entry in self.entries))

    def __getitem__(self, place: int) -> RowsEntry:
        """Of lists of entries, the same of one place."""
        if type(self.entries[0]) is not CacheList:
            raise TypeError("a recurrent state was read outside of the modules that are given it")
        return RowsEntry(self.of, [entry[place] for entry in self.entries])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """[T, heads, 1, D] each; what is returned goes to attention as it is."""
        parts = zip(self.entries, self.of.split(keys), self.of.split(values), strict=True)
        held = [entry.update_and_fetch(k, v) for entry, k, v in parts]
        return _PerRow.of([k for k, _ in held], self.entries), _PerRow.of([v for _, v in held])

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        asked = {} if type(self.entries[0]) is ArraysCache else {"return_array": return_array, "window_size": window_size}
        masks = [entry.make_mask(row.size, **asked) for entry, row in zip(self.entries, self.of.rows, strict=True)]
        return None if all(mask is None for mask in masks) else _PerRow.of(masks)


class BatchTarget:
    """Passes of a target over several rows.

    make_cache: gives empty cache entries of the target.
    reason: why it cannot run them, found by two rows of a few tokens; None where it can.
    """

    def __init__(self, target: Target, make_cache: Callable[[], list[Any]]):
        self.target, self._rows, self._alone = target, None, False
        self._handlers: list[tuple[nn.Module, Callable[..., Any], str]] = []
        self.reason = self._probe(make_cache)

    def __call__(self, ids: mx.array, rows: Sequence[RowPass]) -> TargetOutput:
        """Run [T] ids, the rows' one behind the other. Each row's entries hold its tokens then, and its `point` has ended.

        Returns: hidden [T, 1, H] and features [T, 1, n_taps * H].
        """
        self._rows = _Spans(rows)
        columns = zip(*(row.entries for row in rows), strict=True)
        cache = [RowsEntry(self._rows, list(column)) for column in columns]
        try:
            with exact_windows([entry for row in rows for entry in row.entries]), intercept(self._handlers):
                out = self.target(ids[:, None], cache, eager=True)
        finally:
            self._rows = None
        for row in rows:
            row.point.ended(row.size)
        return out

    def _attends(self, module: nn.Module) -> Callable[..., Any]:
        """A handler of a module that attends: its own call, with each row's attention in the place of mlx-lm's function."""

        def attend(queries, keys, values, cache, scale, mask, sinks=None):
            if not isinstance(keys, _PerRow):
                return scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
            masks = mask.rows if isinstance(mask, _PerRow) else [mask] * len(keys.rows)
            parts = zip(self._rows.split(queries), keys.rows, values.rows, keys.entries, masks, strict=True)
            return _joined([scaled_dot_product_attention(q, k, v, e, scale, m, sinks) for q, k, v, e, m in parts])

        ours = renamed(own_class(module).__call__, ATTENTION, attend)
        return lambda inner, args, kwargs: ours(module, *args, **kwargs)

    def _one_by_one(self, module: nn.Module) -> Callable[..., Any]:
        """A handler of a module that runs for each row with that row's own entry; what it replays, the row's point has."""
        states = self.target.states

        def handler(inner, args, kwargs):
            if self._alone or self._rows is None:  # a replay comes behind the pass
                return inner(*args, **kwargs)
            rows, outs, self._alone = self._rows, [], True
            try:
                for i, (row, span) in enumerate(zip(rows.rows, rows.spans, strict=True)):
                    given = [_of_row(value, i, span) for value in args]
                    named = {name: _of_row(value, i, span) for name, value in kwargs.items()}
                    with states.during(row.entries, row.point if row.size > 1 else None, row.size, False):
                        outs.append(module(*given, **named))
            finally:
                self._alone = False
            if isinstance(outs[0], tuple):
                return tuple(_as_tokens(parts) for parts in zip(*outs, strict=True))
            return _as_tokens(outs)

        return handler

    def _probe(self, make_cache: Callable[[], list[Any]]) -> str | None:
        """Run two rows together and each alone: their hidden states must be the same. Settles which modules run row by row."""
        blocks = [[3, 5, 2], [4]]
        try:
            with _holders(self.target.model) as found:
                self._prompts(make_cache)
            alone = mx.concatenate(self._singles(blocks, make_cache))
        except Exception as error:  # noqa: BLE001 - whatever a model's code does not take is the answer
            return f"its caches are of a kind that only one row can use ({error})"
        near, reason = 1e-4 if alone.dtype == mx.float32 else 0.1, "none of its modules is given a cache"
        attending = {id(m): m for _, m in self.target.model.named_modules() if _calls_attention(m)}
        for chosen in (attending, {}) if attending else ({},):
            self._handlers = [(m, self._attends(m), "__call__") for m in chosen.values()]
            self._handlers += [(m, self._one_by_one(m), "__call__") for m in found if id(m) not in chosen]
            try:
                rows = [RowPass(e, rollback_point(e, 0), len(b)) for e, b in zip(self._prompts(make_cache), blocks, strict=True)]
                together = self(mx.array([token for block in blocks for token in block]), rows).hidden[:, 0]
                error = (mx.abs(together - alone).max() / mx.abs(alone).max()).item()
                if error < near:
                    return None
                reason = f"its layers give other values for several rows ({error:.1e} off)"
            except Exception as error:  # noqa: BLE001
                reason = f"its layers cannot run several rows ({type(error).__name__}: {error})"
        return reason

    def _prompts(self, make_cache: Callable[[], list[Any]]) -> list[list[Any]]:
        """The entries of two rows of a few tokens."""
        caches = [make_cache() for _ in _PROBE]
        for entries, n in zip(caches, _PROBE, strict=True):
            self.target(mx.array([[(7 * i + n) % self.target.vocabulary for i in range(n)]]), entries)
        return caches

    def _singles(self, blocks: list[list[int]], make_cache: Callable[[], list[Any]]) -> list[mx.array]:
        found = []
        for entries, block in zip(self._prompts(make_cache), blocks, strict=True):
            with exact_windows(entries):
                found.append(self.target(mx.array([block]), entries, rollback_point(entries, 0)).hidden[0])
        return found


def _of_row(value: Any, i: int, span: tuple[int, int]) -> Any:
    """Row i's part of what a module is given: its entry, its mask, its tokens' states [T, 1, H] as [1, n, H]."""
    if isinstance(value, RowsEntry):
        return value.entries[i]
    if isinstance(value, _PerRow):
        return value.rows[i]
    tokens = isinstance(value, mx.array) and value.ndim > 2 and value.shape[1] == 1
    return value[span[0] : span[1]].swapaxes(0, 1) if tokens else value


def _as_tokens(parts: Sequence[Any]) -> Any:
    """[1, n, H] of each row to [T, 1, H]."""
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
