"""The distribution that settings for sampling stand for: as a sampler, under given noise, and its probabilities.

Knows mlx-lm's filters. Knows nothing of seeds and positions.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from .errors import GenerationError


class Distribution:
    """Temperature, top-p, min-p and top-k as mlx-lm has them, drawn by Gumbel-max: argmax of log p / temp + noise.

    Two distributions that are almost equal then draw the same token from the same noise nearly always. With mlx-lm's
    `make_sampler`, which turns one number into a token through sums over all ids, they seldom do. A top_p of 0 leaves the
    likeliest token alone, as in `SamplingSettings`.

    Raises:
      GenerationError: at a temperature of 0, which has no distribution: leave the sampler out instead.
    """

    def __init__(self, temp: float, top_p: float = 1.0, min_p: float = 0.0, top_k: int = 0):
        if not temp >= 1e-5:
            raise GenerationError(f"temp is {temp}; it must be at least 1e-5", "Leave the sampler out: that is greedy")
        if top_p < 2.0**-126:
            # mlx-lm's 0 switches the filter off, and MLX reads a smaller number as 0.
            top_p, top_k = 1.0, 1
        self.temp, self.top_p, self.min_p, self.top_k = temp, top_p, min_p, top_k

    @property
    def settings(self) -> tuple[float, float, float, int]:
        """Its identity: two distributions with the same settings draw alike under the same noise."""
        return self.temp, self.top_p, self.min_p, self.top_k

    def __call__(self, logprobs: mx.array) -> mx.array:
        """[..., V] log-probabilities to ids [...], under noise of `mx.random`."""
        return self.draw(logprobs, mx.random.gumbel(logprobs.shape))

    def draw(self, logprobs: mx.array, noise: mx.array) -> mx.array:
        """[..., V] log-probabilities and Gumbel noise to ids [...]."""
        return mx.argmax(self.noised(logprobs, noise), axis=-1)

    def noised(self, logprobs: mx.array, noise: mx.array, filtered: bool = True) -> mx.array:
        """[..., V] log-probabilities and Gumbel noise to the scores [..., V] whose largest is drawn.

        filtered: False leaves the filters out.
        """
        return (self._heated(logprobs) if filtered else logprobs.astype(mx.float32) * (1 / self.temp)) + noise

    def probabilities(self, logprobs: mx.array) -> mx.array:
        """[..., V] log-probabilities to the probabilities that tokens are drawn with, [..., V]."""
        return mx.softmax(self._heated(logprobs), axis=-1, precise=True)

    def _heated(self, logprobs: mx.array) -> mx.array:
        """Filters, then temperature."""
        if self.top_p < 1:
            logprobs = apply_top_p(logprobs, self.top_p)
        if self.min_p:
            logprobs = apply_min_p(logprobs, self.min_p)
        if 0 < self.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, self.top_k)
        # float16 does not hold log-probabilities divided by a low temperature.
        return logprobs.astype(mx.float32) * (1 / self.temp)
