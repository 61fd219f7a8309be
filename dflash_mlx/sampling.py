"""How the target's token is chosen at a position: greedy, or a user's sampler under noise keyed by (seed, position).

Knows mlx-lm's sampler and logits-processor signatures. Knows nothing of blocks, drafters or caches.

Keyed noise makes the draw at a position a function of the prefix, the seed and the position alone, so the text for a seed
is the same with any drafter, any block size, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from .errors import GenerationError

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
_LIMIT = 1 << 32


def choose_seed(seed: int | None) -> int:
    """The given seed checked, or one drawn from `mx.random`.

    Raises:
      GenerationError: if the seed is not a whole number in 0 .. 2^32 - 1.
    """
    if seed is None:
        return mx.random.randint(0, (1 << 31) - 1).item()
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _LIMIT:
        raise GenerationError(f"expected a seed from 0 to {_LIMIT - 1}; found {seed!r}. Choose another.")
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


class KeyedSampler:
    """A sampler for mlx-lm's own loop: call number i draws under the noise of (seed, position + i)."""

    def __init__(self, sampler: Sampler, seed: int, position: int):
        self.sampler, self.seed, self.position = sampler, seed, position

    def __call__(self, logprobs: mx.array) -> mx.array:
        token = sample_at(self.sampler, self.seed, self.position, logprobs)
        self.position += 1
        return token


def process(processors: Sequence[LogitsProcessor], history: mx.array, logits: mx.array) -> mx.array:
    """mlx-lm's processors in order, then log-probabilities.

    Shapes:
      - history: [T] every token up to the one whose successor is chosen; logits: [1, V]
    Returns: [1, V], normalised.
    """
    for processor in processors:
        logits = processor(history, logits)
    return logits - mx.logsumexp(logits, keepdims=True)
