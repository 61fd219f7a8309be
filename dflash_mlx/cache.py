"""Rolling caches back, and the one list that carries a target's and a drafter's caches together.

Knows mlx-lm's cache classes. Knows nothing of models, tokens' meaning or the loop.

A prompt cache for a pair is a flat list of mlx-lm's own classes, so mlx-lm's save and load carry it:

    [target entries ...] [drafter entries ...] [ArraysCache: ids, pending features, layout]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from .errors import CacheError

# First number of the layout row: tells our ArraysCache from a recurrent layer's.
_MAGIC, _VERSION = 0x0DF1A54, 1


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


def check_rollback(entries: Sequence[Any], family: str) -> None:
    """Refuse, before anything runs, a target with a cache kind that cannot be rolled back exactly.

    Raises:
      CacheError: names each kind and its layers.
    """
    kinds: dict[str, list[int]] = {}
    for layer, entry in enumerate(entries):
        if type(entry) is not KVCache:
            kinds.setdefault(type(entry).__name__, []).append(layer)
    if kinds:
        found = "; ".join(f"{name} in layers {', '.join(map(str, layers))}" for name, layers in kinds.items())
        raise CacheError(
            f"a drafter needs target caches that roll back exactly, which is KVCache so far; {family} has {found}. "
            "Run this target without a drafter (draft_model=None)."
        )


def checkpoint(entries: Sequence[Any]) -> int:
    """Rows that every target entry holds now: the number to hand to `rollback` later. Cheap: nothing is copied."""
    return entries[0].offset


def rollback(entries: Sequence[Any], length: int) -> None:
    """Cut every entry back to its first `length` rows. Entries may be ahead by different amounts (an interrupted pass).

    Raises:
      CacheError: if an entry holds fewer rows than `length`, or does not cut as asked.
    """
    for entry in entries:
        if entry.offset > length:
            entry.trim(entry.offset - length)
        if entry.offset != length:
            raise CacheError(
                f"expected a cache of at least {length} rows; {type(entry).__name__} holds {entry.offset}. "
                "Start again with an empty prompt cache."
            )


@dataclass
class PairCache:
    """A view of the flat list: which entries are the target's, which the drafter's, and what is pending.

    `ids`: every committed token. The target holds the first `rows` of them; the last may still be missing (the anchor).
    `features`: [1, S, n_taps * H] tapped states of the last S rows, which the drafter's cache does not hold yet.
    """

    entries: list[Any]
    n_target: int
    ids: list[int]
    features: mx.array | None

    @property
    def target(self) -> list[Any]:
        return self.entries[: self.n_target]

    @property
    def drafter(self) -> list[Any]:
        return self.entries[self.n_target : -1]

    @property
    def rows(self) -> int:
        """Rows the target's cache holds."""
        return checkpoint(self.target)

    @property
    def pending(self) -> int:
        """Rows the target holds and the drafter does not."""
        return 0 if self.features is None else self.features.shape[1]

    @classmethod
    def read(cls, entries: list[Any]) -> PairCache:
        """Read the list that `make` made, also after mlx-lm's save and load.

        Raises:
          CacheError: if the list is not one for a drafter and its target.
        """
        if not is_pair_cache(entries):
            raise CacheError(
                "expected a prompt cache for a target with a DFlash drafter; found one without a drafter's part. "
                "Make it with dflash_mlx.make_prompt_cache(model, draft_model)."
            )
        ids, features, layout = entries[-1].cache
        n_target = layout[0, 2].item()
        return cls(entries, n_target, [] if ids is None else ids[0].tolist(), features)

    @classmethod
    def make(cls, target: list[Any], drafter: list[Any]) -> list[Any]:
        """The flat list for empty target and drafter caches."""
        state = ArraysCache(3)
        state[2] = mx.array([[_MAGIC, _VERSION, len(target)]], dtype=mx.int32)
        return [*target, *drafter, state]

    def write(self) -> None:
        """Store ids and pending features back into the list's last entry."""
        state = self.entries[-1]
        state[0] = mx.array([self.ids], dtype=mx.int32) if self.ids else None
        state[1] = self.features


def is_pair_cache(entries: Sequence[Any]) -> bool:
    """Whether the list was made by `PairCache.make` (its last entry says so)."""
    last = entries[-1] if entries else None
    if not isinstance(last, ArraysCache) or len(last.cache) != 3 or last.cache[2] is None:
        return False
    layout = last.cache[2]
    return layout.dtype == mx.int32 and layout.shape == (1, 3) and layout[0, 0].item() == _MAGIC


def can_trim_prompt_cache(entries: list[Any]) -> bool:
    """Whether `trim_prompt_cache` can cut this list: plain mlx-lm lists by mlx-lm's rule, pair lists part by part."""
    if not is_pair_cache(entries):
        return all(entry.is_trimmable() for entry in entries)
    pair = PairCache.read(entries)
    return all(entry.is_trimmable() for entry in [*pair.target, *pair.drafter])


def trim_prompt_cache(entries: list[Any], num_tokens: int) -> int:
    """Cut the last `num_tokens` committed tokens off every part: mlx-lm's function, for pair lists too.

    Returns: tokens cut; 0 if some entry cannot be cut (then nothing is).
    """
    if not entries or not can_trim_prompt_cache(entries):
        return 0
    if not is_pair_cache(entries):
        return [entry.trim(num_tokens) for entry in entries][0]
    pair = PairCache.read(entries)
    num_tokens = min(num_tokens, len(pair.ids))
    length = len(pair.ids) - num_tokens
    held = pair.rows - pair.pending
    pair.ids = pair.ids[:length]
    for entry in [*pair.target, *pair.drafter]:
        entry.trim(max(entry.offset - length, 0))
    # What is left of the pending rows starts where the drafter's cache ends.
    left = max(min(length, held + pair.pending) - held, 0)
    pair.features = pair.features[:, :left] if left else None
    pair.write()
    return num_tokens
