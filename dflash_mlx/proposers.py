"""Where drafts come from: the drafter's blocks, the text itself, or a source of the user's own.

Knows the drafter and its context cache. Knows nothing of the target's passes, of acceptance, or of when to draft.

A new draft source is one class with the members of `Proposer`; `stream_generate(..., proposers=[source])` uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .draft_length.acceptance import expected_tokens
from .draft_length.policy import DraftLengthPolicy, FixedDraftLength
from .draft_length.prompt_lookup import PromptLookup
from .errors import GenerationError
from .feature_rows import FeatureRows
from .models.drafter import Drafter
from .target_sampler import TargetSampler, pack_drafts, unpack_drafts


@dataclass
class Draft:
    """Drafted tokens, the first of which follows the anchor.

    ids: a list, or an array [1, N] int32 that is not evaluated yet.
    confidence: the source's own probability of each token, [1, N]; None: it has none.
    source: the name that `rounds` and `stats.sources` show.
    """

    ids: list[int] | mx.array
    confidence: mx.array | None = None
    source: str = "plain"
    # The loop sets these. width: how many ids are verified; confidence_cut: the confidences chose it. seconds: spent so far;
    # draft_s: those until the host had read the draft, None if it did not wait; drafted_ids: what it read, ids and confidences.
    width: int = 0
    seconds: float = 0.0
    draft_s: float | None = None
    drafted_ids: tuple[list[int], list[float] | None] | None = None
    confidence_cut: bool = False

    def __post_init__(self) -> None:
        self.row = mx.array([self.ids], dtype=mx.int32) if isinstance(self.ids, list) else self.ids  # [1, N] int32

    @property
    def by_drafter(self) -> bool:
        """Whether a pass of the drafter made it."""
        return self.source == DrafterProposer.source

    def read(self) -> None:
        """Wait for the ids and confidences."""
        self.drafted_ids = unpack_drafts(pack_drafts(self.row, self.confidence).tolist(), self.row.shape[1])


def check_draft(draft: Draft, vocabulary: int) -> None:
    """Refuse ids without a row in the target's embedding of so many rows."""
    wrong = [i for i in draft.ids if not 0 <= i < vocabulary] if isinstance(draft.ids, list) else []
    if wrong:
        raise GenerationError(
            f"the draft source {draft.source!r} drafted token {wrong[0]}; the target's tokens are 0 to {vocabulary - 1}",
            "Mend its propose",
        )


class Proposer(Protocol):
    """A draft source that needs no pass of a model. It is asked before each round; the best offer is verified.

    source: its name.
    """

    source: str

    def rates(self, ids: Sequence[int], n: int) -> Sequence[float]:
        """What the next n drafts are worth: how likely each is accepted if those before it are; [] where there are none.

        ids: every committed token, the prompt's too, the anchor last. It is the same list each time, and only grows.
        """

    def propose(self, anchor: mx.array, n: int) -> Draft:
        """At most n tokens to follow those that `rates` was given last, at least as many as it gave rates for.

        anchor: [1], the last committed token.
        """


def best_offer(proposers: Sequence[Proposer], ids: list[int], n: int) -> tuple[Proposer | None, list[float]]:
    """Whose n drafts promise most after these ids, and its rates; [] where there are none."""
    offers = [(proposer, list(proposer.rates(ids, n))) for proposer in proposers]
    return max(offers, key=lambda offer: expected_tokens(offer[1])[-1], default=(None, []))


class PromptLookupProposer:
    """Drafts what followed the last tokens where they stood before."""

    source = "prompt_lookup"

    def __init__(self, lookup: PromptLookup | None = None):
        self.lookup = lookup or PromptLookup()

    def rates(self, ids: list[int], n: int) -> list[float]:
        return self.lookup.rates(n) if self.lookup.follow(ids) else []

    def propose(self, anchor: mx.array, n: int) -> Draft:
        return Draft(self.lookup.draft(n), source=self.source)


class Context(NamedTuple):
    """How far the drafter's cache is. Replaced as a whole, so that an interruption falls before or after.

    rows: context rows that the cache holds; pending: the target's features of the rows behind them; sliding: what puts the
    cache's sliding entries back to `rows` (see `DrafterProposer.sliding`).
    """

    rows: int
    pending: FeatureRows
    sliding: list[Any]


class DrafterProposer:
    """Drafts by a pass of the drafter over a block, and keeps up its context.

        target's rows     p0 ... pm  ... pn        n + 1 rows
        drafter's rows    p0 ... pm                m + 1 rows; those behind are pending, as features

    cache: the drafter's entries; features: those pending, [1, S, n_taps * H] or None; rows: the target's.
    """

    source = "drafter"

    def __init__(
        self,
        drafter: Drafter,
        cache: list[Any],
        features: mx.array | None,
        rows: int,
        target_sampler: TargetSampler,
        policy: DraftLengthPolicy | FixedDraftLength,
    ):
        self.model, self.cache, self._sampler, self.policy = drafter, cache, target_sampler, policy
        self.context = Context(rows - (0 if features is None else features.shape[1]), FeatureRows(features), self.sliding())
        self.skipped = self.context.rows - cache[0].offset  # rows in front that no drafter saw: `PairCache.adopt`

    def propose(self, anchor: mx.array, n: int, width: int) -> Draft:
        """Enqueue n drafts after the anchor [1], or as many of them as the policy needs for a width. Nothing is pending then."""
        features, rows = self.context.pending.joined(), self.context.rows
        args = (anchor, features, self.cache, rows - self.skipped, n + 1), self.policy.drafts_needed(width)
        drafted, confidence = self._sampler.draft(self.model, *args, position=rows + features.shape[1] + 1)
        draft = Draft(drafted, confidence if self.policy.wants_confidence else None, self.source, width)
        # Begun before the host builds the target's pass: for a large model that takes as long as the draft takes on the device.
        mx.async_eval(draft.row, draft.confidence)
        return draft

    def inject(self, *features: mx.array) -> None:
        """Put what is pending into the cache, and these rows [1, S, n_taps * H] behind it. `context` follows by `injected`."""
        self.model.inject(self.context.pending.joined(*features), self.cache, self.context.rows - self.skipped)

    def injected(self, rows: int) -> Context:
        """The context once the cache holds so many rows and nothing is pending."""
        return Context(rows, FeatureRows(), self.sliding())

    def mark_injected(self, rows: int) -> None:
        """What was pending is in the cache, which holds so many rows now."""
        mx.async_eval([entry.state for entry in self.cache])
        self.context = self.injected(rows)

    def sliding(self) -> list[Any]:
        """The arrays that undo a pass in the sliding entries. Of the others, None, rows are cut, and their arrays are not held:
        MLX would copy what it writes in place."""
        return [None if isinstance(entry, KVCache) else entry.state for entry in self.cache]

    def settle(self, rows: int) -> mx.array | None:
        """Undo what an interrupted pass did to the cache. Returns: the features that are pending at so many target rows."""
        for entry, state in zip(self.cache, self.context.sliding, strict=True):
            # A sliding cache that an interrupted pass has moved lost its oldest rows: it gets its old arrays back.
            if state is None:
                entry.trim(max(entry.offset + self.skipped - self.context.rows, 0))
            else:
                entry.state = state
        pending = rows - self.context.rows
        return self.context.pending.joined()[:, :pending] if pending > 0 else None
