"""Generation under a constraint: rows of a block masked by what may follow their drafts, and forced stretches as drafts.

Beside `target_sampler`. Knows constraints (`constraint`) by mask, advance and rollback. Knows no grammars.

    device    draft | target's pass over anchor and drafts | choice
    host            | reads the draft, follows it, masks     | waits

The host follows the drafts while the pass runs, and the masks of all rows go to the device as one array. So the device waits for
nothing: of the round's two waits the first ends within the pass. Plain decoding keeps its look-ahead: the next pass is enqueued,
then the last token is read and the mask made, then the choice enqueued.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .constraint import Constraint, ConstraintError, ConstraintProcessor, Guide, apply_masks, begin_constraint
from .models.target import Target, TargetOutput
from .options import RunOptions
from .proposers import Draft, Proposer
from .rejection_sampler import make_target_sampler
from .sampling import LogitsProcessor, Sampler
from .target_sampler import RoundResult, TargetSampler


def make_sampler(options: RunOptions, proposers: list[Proposer]) -> tuple[TargetSampler, list[Proposer]]:
    """The sampler of a run and its draft sources, these and what its constraint forces.

    Raises:
      GenerationError: the acceptance rule is unknown, or does not go with what was given; the constraint cannot be enforced.
    """
    processors = options.logits_processors or ()
    if options.constraint is None:
        rest = options.seed, options.acceptance, options.prompt_ids
        return make_target_sampler(options.sampler, processors, *rest), proposers
    if options.acceptance != "match":
        problem = f"a constraint was given with acceptance={options.acceptance!r}; it works with 'match' only"
        raise ConstraintError(problem, "Leave one of the two out")
    constraint = begin_constraint(options.constraint, options.tokenizer)
    sampler = ConstrainedSampler(constraint, options.sampler, processors, options.seed, options.prompt_ids)
    # At a block size of 1 nothing is drafted.
    return sampler, [ForcedProposer(sampler), *proposers] if options.block_size != 1 else proposers


class ConstrainedSampler(TargetSampler):
    """Draws among the tokens that the constraint allows.

    With processors rows are chosen one by one on the host, and the constraint is the last of them.
    """

    def __init__(
        self,
        constraint: Constraint,
        sampler: Sampler | None,
        processors: Sequence[LogitsProcessor],
        seed: int | None,
        prompt: Sequence[int],
    ):
        self.guide, self._masks = Guide(constraint, len(prompt)), None
        super().__init__(sampler, [*processors, ConstraintProcessor(self.guide)] if processors else [], seed, prompt)
        self.needs_rows = True

    def follow(self) -> Guide:
        """The constraint after every committed token."""
        self.guide.follow(self.history.since(self.guide.seen))
        return self.guide

    def set_width(self, draft: Draft, n: int) -> int:
        """As in `TargetSampler`; if the host knows the ids, the width also ends before the first that the constraint refuses."""
        width = super().set_width(draft, n)
        ids, confidence = draft.host_values or (draft.ids if isinstance(draft.ids, list) else [], None)
        if width and ids and (legal := self.follow().legal(ids[:width])) < width:
            draft.width = legal
            if confidence:
                # The policy would count these drafts by their confidence; the constraint refuses them.
                confidence[legal:] = [0.0] * (len(confidence) - legal)
        return draft.width

    def enqueue(self, target: Target, output: TargetOutput, drafted: mx.array, context: list[Any], *rest: Any) -> tuple:
        args, width = (target, output, drafted, context, *rest), output.hidden.shape[1] - 1
        if self.processors:
            return super().enqueue(*args)
        mx.async_eval(output.hidden, output.features, context, output.logits)
        if width:
            # The slice is taken on the host: on the device it would be computed after the pass.
            return self._start(self.follow().masks(drafted.tolist()[0][:width]), args)
        # The token before this row may not be read yet, and the mask depends on it: the choice is enqueued later.
        late = functools.cache(lambda: self._start(self.follow().masks([]), args))
        return lambda: late()[0](), lambda: late()[1](), bool(target.finite_flag(output.hidden, compiled=output.compiled))

    def _start(self, masks: mx.array | None, args: tuple[Any, ...]) -> tuple[Callable, Callable, bool]:
        self._masks = masks
        token, wait, ours = super().enqueue(*args)

        def read() -> RoundResult:
            result = wait()
            free = result.row_logprobs
            result.row_logprobs = lambda i: apply_masks(free(i)[None], None if masks is None else masks[i : i + 1])[0]
            return result

        return token, read, ours

    def _sample(self, rows: mx.array, position: int) -> mx.array:
        # With processors the constraint was the last of them, and the rows are masked already.
        return super()._sample(rows if self.processors else apply_masks(rows, self._masks), position)


class ForcedProposer:
    """Drafts what the constraint forces: names of fields, quotes and commas, an answer's end.

    The target has other tokens for the same text, so they are verified as any others are.
    """

    source = "grammar"
    # Weight that older counts keep at each new one; the rate to begin with, and how many counts it weighs as much as.
    FADE, START, LEAN = 0.97, 0.95, 8.0

    def __init__(self, sampler: ConstrainedSampler):
        self._sampler, self._tokens = sampler, []
        self._kept, self._seen = self.START * self.LEAN, self.LEAN
        # The tokens that were forced lately, and where they begin.
        self._forced, self._at = [], 0

    def rates(self, ids: Sequence[int], n: int) -> list[float]:
        self._count(ids)
        self._tokens = self._sampler.follow().constraint.forced()[:n]
        if self._tokens:
            self._forced, self._at = self._tokens, len(ids)
        return [self._kept / self._seen] * len(self._tokens)

    def _count(self, ids: Sequence[int]) -> None:
        """Count how often the target writes a forced text in the tokens that were drafted for it, whoever drafted them."""
        while self._forced and self._at < len(ids):
            wanted, *self._forced = self._forced
            hit = wanted == ids[self._at]
            self._kept, self._seen, self._at = self._kept * self.FADE + hit, self._seen * self.FADE + 1, self._at + 1
            self._forced = self._forced if hit else []

    def propose(self, anchor: mx.array, n: int) -> Draft:
        return Draft(self._tokens, source=self.source)
