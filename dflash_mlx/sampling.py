"""How the target's token is chosen at a position: greedy, or a user's sampler under noise keyed by (seed, position).

Knows mlx-lm's sampler and logits-processor signatures. Knows nothing of blocks, drafters or caches.

Keyed noise makes the draw at a position a function of the prefix, the seed and the position alone, so the text for a seed
is the same with any drafter, any block size, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from .distribution import Distribution
from .errors import GenerationError
from .sampling_settings import SamplingSettings

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
_LIMIT = 1 << 32

__all__ = [
    "Distribution", "History", "KeyedNoise", "KeyedSampler", "SamplingSettings", "choose_seed", "noise_at", "process",
    "sample_at", "sample_rows",
]  # fmt: skip


def choose_seed(seed: int | None) -> int:
    """The given seed checked, or one drawn from `mx.random`.

    Raises:
      GenerationError: if the seed is not a whole number in 0 .. 2^32 - 1.
    """
    if seed is None:
        return mx.random.randint(0, (1 << 31) - 1).item()
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _LIMIT:
        raise GenerationError(f"seed is {seed!r}; it must be a whole number from 0 to {_LIMIT - 1}", "Choose another")
    return seed


def sample_at(sampler: Sampler, seed: int, position: int, logprobs: mx.array) -> mx.array:
    """One call of the sampler for one row, under the noise of (seed, position); mx.random's own state is put back.

    Shapes:
      - logprobs: [1, V]; position: the sampled token's absolute position
    Returns: [1] token id, not evaluated.
    """
    # The state is a key of two words and cannot be assigned; seeding with both makes the same key again.
    high, low = mx.random.state[0].tolist()
    mx.random.seed((seed << 32) | position)
    try:
        return sampler(logprobs)
    finally:
        mx.random.seed((high << 32) | low)


def noise_at(seeds: Sequence[int], positions: Sequence[int], vocabulary: int) -> mx.array:
    """[N, V] Gumbel noise of N pairs of seed and position: row by row what `sample_at` would have a `Distribution` draw."""
    keys = mx.array([*zip(seeds, positions, strict=True)], dtype=mx.uint32)
    # Seeding makes a key of both words; the first use of `mx.random`'s own state takes the second half of its split.
    return mx.vmap(lambda key: mx.random.gumbel((vocabulary,), key=mx.random.split(key)[1]))(keys)


class KeyedNoise:
    """The noise of one seed. A round's drafts and their verifying ask for the same rows, which are made once."""

    def __init__(self, seed: int):
        self.seed, self._last = seed, (-1, mx.zeros((0, 0)))

    def rows(self, position: int, n: int, vocabulary: int) -> mx.array:
        """[n, V] from an absolute position on."""
        first, rows = self._last
        if first != position or len(rows) < n or rows.shape[1] != vocabulary:
            rows = noise_at([self.seed] * n, range(position, position + n), vocabulary)
            self._last = position, rows
        return rows[:n]


def sample_rows(sampler: Sampler, noise: KeyedNoise, position: int, rows: mx.array) -> mx.array:
    """[N, V] log-probabilities to ids [N], row i under the noise at position + i; at once where the sampler can."""
    if isinstance(sampler, Distribution):
        return sampler.draw(rows, noise.rows(position, *rows.shape))
    return mx.concatenate([sample_at(sampler, noise.seed, position + i, rows[i : i + 1]) for i in range(len(rows))])


class KeyedSampler:
    """A sampler for mlx-lm's own loop: call number i draws under the noise of (seed, position + i)."""

    def __init__(self, sampler: Sampler, seed: int, position: int):
        self.sampler, self.seed, self.position = sampler, seed, position

    def __call__(self, logprobs: mx.array) -> mx.array:
        token = sample_at(self.sampler, self.seed, self.position, logprobs)
        self.position += 1
        return token


class History:
    """The tokens that processors are shown. It grows in place: a step copies a buffer, and makes no list as long as the text."""

    def __init__(self, ids: Sequence[int]):
        self._ids, self._n = np.array(ids, dtype=np.int32), len(ids)

    def __len__(self) -> int:
        return self._n

    def append(self, token: int) -> None:
        if self._n == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(self._n + 256, dtype=np.int32)])
        self._ids[self._n] = token
        self._n += 1

    def since(self, n: int) -> list[int]:
        """The tokens after the first n."""
        return self._ids[n : self._n].tolist()

    def cut(self, n: int) -> None:
        """Keep the first n tokens."""
        self._n = n

    def array(self) -> mx.array:
        """[T] int32"""
        return mx.array(self._ids[: self._n])


def process(processors: Sequence[LogitsProcessor], history: mx.array, logits: mx.array) -> mx.array:
    """mlx-lm's processors in order, then log-probabilities.

    Shapes:
      - history: [T] every token up to the one whose successor is chosen; logits: [1, V]
    Returns: [1, V], normalised.
    """
    for processor in processors:
        logits = processor(history, logits)
    return logits - mx.logsumexp(logits, keepdims=True)
