"""Counts the rounds of a run, and reports their times to the draft-length policy."""

from __future__ import annotations

from typing import Any

from .draft_length.policy import DraftLengthPolicy, FixedDraftLength
from .drafter_checks import warn_of_few_accepted, warn_of_overflow
from .proposers import DrafterProposer
from .stats import GenerationStats

# After this many drafter rounds in a row without an accepted draft, a float16 drafter is checked for overflow.
_REFUSED = 4


class RoundCounter:
    """Counts rounds for `stats`, and reports them to the policy.

    judges: whether few accepted drafts mean a bad drafter. Not if processors or a constraint, which it does not know, choose.
    """

    def __init__(
        self, stats: GenerationStats, policy: DraftLengthPolicy | FixedDraftLength, proposer: DrafterProposer, judges: bool
    ):
        self.stats, self.policy, self.drafter_proposer, self._judges = stats, policy, proposer, judges
        # The kind of the last round, and the number of drafter rounds in a row that accepted nothing.
        self._kind, self._refused = None, 0

    def add(self, kept: Any) -> None:
        """Count a round (`loop.Kept`) that was read and committed."""
        output, draft, result = kept.output, kept.output.draft, kept.result
        width, by_drafter = draft.width, draft.by_drafter
        self.stats.add_passes(output.seconds, draft.draft_s, by_drafter)
        self.stats.add_round(result.drafted, result.accepted, result.bonus, width, draft.source, draft.confidence_cut)
        if by_drafter and width:
            self._refused = 0 if result.accepted else self._refused + 1
            if self._refused == _REFUSED:
                warn_of_overflow(self.drafter_proposer.model, self.drafter_proposer.context.pending.joined())
        kind = (draft.source, "confidence_cut" if draft.confidence_cut else width, output.lookahead)
        # The caller's own work is not counted while a pass that was enqueued ahead runs: plain decoding hides it.
        usual, self._kind = kind == self._kind, kind
        ids, confidence = draft.host_values or (result.drafted, result.confidence)
        more = result.accepted == width < len(ids) and ids[width] == result.bonus
        looked_up, waited = bool(width) and not by_drafter, draft.draft_s is not None
        self.policy.observe(width, result.accepted, more, output.seconds, usual, looked_up, confidence, waited)

    def finish(self) -> None:
        """Call at the end of a run: count its rounds for the pair, and warn if the drafter is of no use."""
        if self._judges:
            warn_of_few_accepted(self.drafter_proposer.model, **self.stats.sources["drafter"])
