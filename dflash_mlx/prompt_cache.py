"""The one list that carries a target's and a drafter's caches together, trimming it, and quantizing its KV entries.

Knows mlx-lm's cache classes, and how entries are cut (`rollback`). Knows no models.

A prompt cache for a pair is a flat list of mlx-lm's own classes, so mlx-lm's save and load carry it:

    [target entries ...] [drafter entries ...] [ArraysCache: ids, pending features, layout]
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import ArraysCache

from .errors import CacheError, GenerationError
from .rollback import check_rollback, cut_entries, leaves

# In the place of ids that are not known: of rows that mlx-lm read into the cache.
UNKNOWN = -1
# First number of the layout row: tells our ArraysCache from a recurrent layer's.
_MAGIC, _VERSION = 0x0DF1A54, 2
# Stored as the number of rows while a stream writes to the list. The entries are then ahead of the stored ids, some by a pass
# that may be rolled back. A copy of such a list is of no use, and mlx-lm's classes have no hook that could end the stream first.
_AT_WORK = -1


@dataclass(frozen=True)
class KVQuantization:
    """mlx-lm's kv_bits: a target's KV entries are replaced by quantized ones once they hold `start` rows."""

    bits: int
    group_size: int
    start: int

    def convert(self, entries: list[Any], start: int) -> None:
        maybe_quantize_kv_cache(entries, start, self.group_size, self.bits)

    def apply(self, pair: PairCache) -> None:
        target = pair.target
        self.convert(target, self.start)
        pair.entries[: pair.n_target] = target

    def check(self, model: Any, cache: list[Any]) -> None:
        """Run three rows with a quantized cache, as plain decoding would, before anything else runs.

        Raises:
          GenerationError: mlx-lm cannot run this target with it, or a size is no whole number.
        """
        for name, value in (("kv_bits", self.bits), ("kv_group_size", self.group_size)):
            if type(value) is not int or value < 1:
                raise GenerationError(f"{name} is {value!r}; it must be a whole number of at least 1", "Leave it out")
        try:
            for _ in range(3):
                logits = model(mx.zeros((1, 1), dtype=mx.int32), cache=cache)
                self.convert(cache, 0)
            mx.eval(logits)
        except Exception as error:
            family = getattr(model, "model_type", None) or type(model).__name__
            raise GenerationError(
                f"mlx-lm cannot quantize the caches of {family} to {self.bits} bits in groups of {self.group_size} ({error})",
                "Leave kv_bits out",
            ) from None

    def cut(self, rows: int, width: int) -> int:
        """The most drafted tokens that a block after `rows` rows may have, to end where the cache is quantized."""
        return min(width, self.start - rows - 1) if rows < self.start else width


# The generator that writes to a pair's list, by the list's last entry. One that was left open must not block the cache.
_streams: weakref.WeakKeyDictionary[Any, weakref.ref] = weakref.WeakKeyDictionary()


def _end_stream(entry: Any) -> None:
    """Close the stream that writes to the list with this last entry. The list then holds the tokens that the stream handed out.

    Raises:
      CacheError: it is at work right now.
    """
    steps = _streams.pop(entry, lambda: None)()
    if steps is None:
        return
    if steps.gi_running:
        _streams[entry] = weakref.ref(steps)
        raise CacheError("another stream is writing to this prompt cache right now", "Wait for it, or use a cache of its own")
    steps.close()


@dataclass
class PairCache:
    """A view of the flat list: which entries are the target's, which the drafter's, and what is pending.

    `ids`: every committed token, `UNKNOWN` where mlx-lm filled the cache. The target holds the first `rows` of them; the last may
    still be missing (the anchor).
    `features`: [1, S, n_taps * H] tapped states of the last S rows, which the drafter's cache does not hold yet.
    `exact`: (step, border) of an exact run that writes to it (`exact.ExactPair.prepare_cache`); no file carries it.
    """

    entries: list[Any]
    n_target: int
    ids: list[int]
    rows: int
    features: mx.array | None
    exact: tuple[int, int] | None = None

    @property
    def target(self) -> list[Any]:
        return self.entries[: self.n_target]

    @property
    def drafter(self) -> list[Any]:
        return self.entries[self.n_target : -1]

    @property
    def pending(self) -> int:
        """Rows the target holds and the drafter does not."""
        return 0 if self.features is None else self.features.shape[1]

    @classmethod
    def read(cls, entries: list[Any]) -> PairCache:
        """Read the list that `make` made, also after mlx-lm's save and load.

        Raises:
          CacheError: if the list is not one for a drafter and its target, or something else has moved its entries.
        """
        if not is_pair_cache(entries):
            raise CacheError(
                "the prompt cache has no drafter's part; a target with a DFlash drafter needs one",
                "Make it with dflash_mlx.make_prompt_cache(model, draft_model)",
            )
        _end_stream(entries[-1])
        ids, features, layout = entries[-1].cache
        n_target, rows = layout.tolist()[0][2:]
        if rows == _AT_WORK:
            raise CacheError(
                "this prompt cache was copied or saved while a stream was writing to it; its parts do not belong together",
                "Read the stream to its end or close() it, then copy or save the cache",
            )
        pair = cls(entries, n_target, [] if ids is None else ids.tolist()[0], rows, features)
        # An entry that the model does not use stays empty.
        moved = [e for e in leaves(pair.target) if type(e) is not ArraysCache and e.offset not in (0, rows)]
        if moved:
            raise CacheError(
                f"{type(moved[0]).__name__} holds {moved[0].offset} rows; this prompt cache has {rows}",
                "Start a new one. Only dflash_mlx may generate with it or trim it",
            )
        return pair

    @classmethod
    def make(cls, target: list[Any], drafter: list[Any]) -> list[Any]:
        """The flat list for empty target and drafter caches."""
        entries = [*target, *drafter, ArraysCache(3)]
        cls(entries, len(target), [], 0, None).write()
        return entries

    @classmethod
    def adopt(cls, target: list[Any], drafter: list[Any]) -> list[Any]:
        """The flat list for target entries that mlx-lm filled, with empty drafter caches: the drafter sees only later rows.

        Its ids are `UNKNOWN`.

        Raises:
          CacheError: no entry says how many rows there are, or they do not agree.
        """
        held = {e.offset for e in leaves(target) if type(e) is not ArraysCache and e.offset}
        if len(held) != 1:
            found = f"entries of {sorted(held)} rows" if held else "no entry that says how many rows it holds"
            raise CacheError(f"the prompt cache has {found}, so a drafter cannot go on with it", "Run without a drafter")
        rows, entries = held.pop(), [*target, *drafter, ArraysCache(3)]
        cls(entries, len(target), [UNKNOWN] * rows, rows, None).write()
        return entries

    def register_writer(self, steps: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Record the generator that writes to this list from now on. `read` closes it when the list is used again."""
        _streams[self.entries[-1]] = weakref.ref(steps)
        return steps

    def mark_in_use(self) -> None:
        """Record that passes write to the entries from now on. Until `write`, a copy of the list is refused."""
        self._store_layout(_AT_WORK)
        self.entries[-1].exact = self.exact

    def write(self) -> None:
        """Store ids, rows and pending features back into the list's last entry."""
        state = self.entries[-1]
        state[0] = mx.array([self.ids], dtype=mx.int32) if self.ids else None
        state[1] = self.features
        self._store_layout(self.rows)

    def _store_layout(self, rows: int) -> None:
        self.entries[-1][2] = mx.array([[_MAGIC, _VERSION, self.n_target, rows]], dtype=mx.int32)


def is_pair_cache(entries: Sequence[Any]) -> bool:
    """Whether the list was made by `PairCache.make` (its last entry says so)."""
    last = entries[-1] if entries else None
    if not isinstance(last, ArraysCache) or len(last.cache) != 3 or last.cache[2] is None:
        return False
    layout = last.cache[2]
    # The whole array: an operation, such as a slice, would wait for everything that the device has to do.
    return layout.dtype == mx.int32 and layout.shape == (1, 4) and layout.tolist()[0][:2] == [_MAGIC, _VERSION]


def can_trim_prompt_cache(entries: list[Any]) -> bool:
    """Whether `trim_prompt_cache` can cut this list: mlx-lm's rule, for pair lists part by part."""
    if is_pair_cache(entries):
        entries = entries[:-1]
    return all(entry.is_trimmable() for entry in entries)


def trim_prompt_cache(entries: list[Any], num_tokens: int) -> int:
    """Cut the last `num_tokens` committed tokens off every part: mlx-lm's function, for pair lists too.

    Returns: tokens cut; 0 if some entry cannot be cut (then nothing is).
    """
    if not entries or not can_trim_prompt_cache(entries):
        return 0
    if not is_pair_cache(entries):
        try:
            check_rollback(entries, "this target")
        except CacheError:
            return [entry.trim(num_tokens) for entry in entries][0]
        # mlx-lm's own trim is wrong for chunked entries that dropped their first rows, and for concatenated ones.
        rows = max(entry.offset for entry in leaves(entries))
        num_tokens = min(num_tokens, rows)
        return num_tokens if cut_entries(entries, rows - num_tokens) else 0
    pair = PairCache.read(entries)
    num_tokens = min(num_tokens, len(pair.ids))
    length = len(pair.ids) - num_tokens
    held = pair.rows - pair.pending
    # Rows that the drafter never saw (`adopt`).
    begin = held - pair.drafter[0].offset
    if not cut_entries(pair.target, length):
        return 0
    cut_entries(pair.drafter, max(length - begin, 0))
    pair.ids, pair.rows = pair.ids[:length], min(pair.rows, length)
    # What is left of the pending rows starts where the drafter's cache ends.
    left = max(min(length, held + pair.pending) - held, 0)
    pair.features = pair.features[:, :left] if left else None
    pair.write()
    return num_tokens
