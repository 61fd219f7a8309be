"""Drafts that are drawn from the drafter's own distribution, and kept by a rule on both distributions.

Beside `target_sampler`: it keeps more drafts, and the text for a seed then depends on the drafter and the block size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from .accept import accept_block, accept_rejection
from .errors import GenerationError
from .models.drafter import Drafter
from .models.target import Target
from .sampling import Distribution, LogitsProcessor, Sampler
from .target_sampler import TargetSampler


class RejectionSampler(TargetSampler):
    """Draws the drafts from the drafter's own distribution and keeps them by a rule on both distributions."""

    def __init__(self, sampler: Distribution, seed: int | None, rule: Callable[..., tuple[mx.array, mx.array]]):
        super().__init__(sampler, (), seed)
        self.rule = rule

    def _keys(self, position: int) -> mx.array:
        """Three keys for a round whose first draft is at an absolute position: drafts, acceptance, bonus."""
        return mx.random.split(mx.random.key((self.seed << 32) | position), 3)

    def draft(
        self, drafter: Drafter, target: Target, block: tuple[mx.array, mx.array, list, int, int], n: int | None, position: int
    ) -> tuple[mx.array, None]:
        hidden = drafter.slots(*block, target.accelerator)[:, :n]
        key, anchor = self._keys(position)[0], block[0]
        # Kept for this round's `_accept`: drafts must be judged by what they were drawn from.
        drawn, *self._drawn_from = drafter.draw(hidden, anchor, self.sampler.probabilities, self.sampler.temp, key)
        return drawn, None

    def _accept(self, drafted: mx.array, rows: mx.array, position: int) -> tuple[mx.array, mx.array]:
        width = drafted.shape[1]
        if not width:
            return super()._accept(drafted, rows, position)
        keys = self._keys(position)
        uniform = mx.random.uniform(shape=drafted.shape, key=keys[1])
        gumbel = mx.random.gumbel((1, rows.shape[-1]), key=keys[2])
        ids, q = self._drawn_from
        if ids is not None:
            # No other token could be drawn.
            q = mx.put_along_axis(mx.zeros((*q.shape[:2], rows.shape[-1])), ids, q.astype(mx.float32), axis=-1)
        return self.rule(drafted, self.sampler.probabilities(rows), q[:, :width], uniform, gumbel)


_RULES = {"rejection": accept_rejection, "block": accept_block}


def make_target_sampler(
    sampler: Sampler | None, processors: Sequence[LogitsProcessor], seed: int | None, acceptance: str, prompt: list[int]
) -> TargetSampler:
    """Raises: GenerationError if the rule is unknown, or what it needs is not there."""
    if acceptance == "match":
        return TargetSampler(sampler, processors, seed, prompt)
    if acceptance not in _RULES:
        raise GenerationError(f"acceptance is {acceptance!r}; it must be match, {' or '.join(_RULES)}")
    if not isinstance(sampler, Distribution):
        raise GenerationError(
            f"the sampler is a {type(sampler).__name__}; acceptance={acceptance!r} needs probabilities, as a "
            "dflash_mlx.sampling.Distribution has them",
            "Pass one, or leave acceptance out",
        )
    if processors:
        raise GenerationError(
            f"logits_processors were given with acceptance={acceptance!r}; they would see drafts that are not kept",
            "Leave one of the two out",
        )
    return RejectionSampler(sampler, seed, _RULES[acceptance])
