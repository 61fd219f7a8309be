"""Where drafts come from: the drafter, prompt lookup, or a draft source of the user's own.

Knows the drafter and its context cache. Does not know the target's passes, acceptance, or when to draft.

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
from .models.target import Target
from .prompt_cache import PairCache
from .target_sampler import TargetSampler, pack_drafts, unpack_drafts


@dataclass
class Draft:
    """Drafted tokens. The first one follows the anchor.

    ids: a list, or an array [1, N] int32 that is not evaluated yet.
    confidence: the source's own probability of each token, [1, N]; None if it has none.
    source: its name in `rounds` and `stats.sources`.
    """

    ids: list[int] | mx.array
    confidence: mx.array | None = None
    source: str = "plain"
    # Set by the loop:
    width: int = 0  # how many ids are verified
    seconds: float = 0.0  # spent so far
    draft_s: float | None = None  # until the host had read the draft; None: it did not wait
    host_values: tuple[list[int], list[float] | None] | None = None  # ids and confidences, once the host has read them
    confidence_cut: bool = False  # whether confidence chose the width

    def __post_init__(self) -> None:
        self.row = mx.array([self.ids], dtype=mx.int32) if isinstance(self.ids, list) else self.ids  # [1, N] int32

    @property
    def by_drafter(self) -> bool:
        """Whether a pass of the drafter made it."""
        return self.source == DrafterProposer.source

    def read(self) -> None:
        """Wait for the ids and confidences."""
        self.host_values = unpack_drafts(pack_drafts(self.row, self.confidence).tolist(), self.row.shape[1])


def check_draft(draft: Draft, vocabulary: int) -> None:
    """Refuse ids that are not below `vocabulary`, the rows of the target's embedding."""
    wrong = [i for i in draft.ids if not 0 <= i < vocabulary] if isinstance(draft.ids, list) else []
    if wrong:
        raise GenerationError(
            f"the draft source {draft.source!r} drafted token {wrong[0]}; the target's tokens are 0 to {vocabulary - 1}",
            "Correct its propose method",
        )


class Proposer(Protocol):
    """A draft source that runs no model. It is asked before each round, and the most promising one drafts.

    source: its name in `rounds` and `stats.sources`.
    """

    source: str

    def rates(self, ids: Sequence[int], n: int) -> Sequence[float]:
        """How likely each of the next n drafts is accepted if those before it are; [] if it has no drafts.

        ids: all committed tokens with the prompt, the anchor last. The same list at each call; it only grows.
        """

    def propose(self, anchor: mx.array, n: int) -> Draft:
        """At most n tokens to follow the ids that `rates` saw last, and at least as many as it returned rates for.

        anchor: [1], the last committed token.
        """


def best_offer(proposers: Sequence[Proposer], ids: list[int], n: int) -> tuple[Proposer | None, list[float]]:
    """The proposer with the most expected tokens in n drafts, and its rates; (None, []) if none has drafts."""
    offers = [(proposer, list(proposer.rates(ids, n))) for proposer in proposers]
    return max(offers, key=lambda offer: expected_tokens(offer[1])[-1], default=(None, []))


class PromptLookupProposer:
    """Drafts by copying: what followed the last tokens earlier in the text."""

    source = "prompt_lookup"

    def __init__(self, lookup: PromptLookup | None = None):
        self.lookup = lookup or PromptLookup()

    def rates(self, ids: list[int], n: int) -> list[float]:
        return self.lookup.rates(n) if self.lookup.follow(ids) else []

    def propose(self, anchor: mx.array, n: int) -> Draft:
        return Draft(self.lookup.draft(n), source=self.source)


class Context(NamedTuple):
    """What the drafter's cache holds. Replaced as a whole, so that an interruption never leaves it half changed.

    rows: context rows in the cache; pending: the target's features of later rows, which are not in the cache yet; sliding: arrays
    that set sliding-window entries back to `rows` (see `DrafterProposer.sliding`).
    """

    rows: int
    pending: FeatureRows
    sliding: list[Any]


class DrafterProposer:
    """Drafts by a pass of the drafter over a block, and keeps its context cache up to date.

        target's rows     p0 ... pm  ... pn        n + 1 rows
        drafter's rows    p0 ... pm                m + 1 rows; the others are pending: their features are kept

    target: the run's; cache: the drafter's entries of the run's (given as a whole, with the pending features).
    """

    source = "drafter"

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        cache: PairCache,
        target_sampler: TargetSampler,
        policy: DraftLengthPolicy | FixedDraftLength,
    ):
        self.model, self._target, self.cache, self._sampler, self.policy = drafter, target, cache.drafter, target_sampler, policy
        self.context = Context(cache.rows - cache.pending, FeatureRows(cache.features), self.sliding())
        # Rows at the start of the text that the target read without a drafter (`PairCache.adopt`). The drafter's positions start
        # after them.
        self.skipped = self.context.rows - self.cache[0].offset

    def propose(self, anchor: mx.array, n: int, width: int) -> Draft:
        """Enqueue a drafter pass over a block of the anchor [1] and n masks. It also puts the pending rows into the cache.

        width: how many drafts will be verified. The head runs for the first `drafts_needed(width)` masks only.
        """
        features, rows = self.context.pending.joined(), self.context.rows
        block, position = (anchor, features, self.cache, rows - self.skipped, n + 1), rows + features.shape[1] + 1
        drafted, confidence = self._sampler.draft(self.model, self._target, block, self.policy.drafts_needed(width), position)
        draft = Draft(drafted, confidence if self.policy.wants_confidence else None, self.source, width)
        # Started before the host builds the target's pass. For a large model, building takes about as long as drafting.
        mx.async_eval(draft.row, draft.confidence)
        return draft

    def inject(self, *features: mx.array) -> None:
        """Put the pending rows and these [1, S, n_taps * H] into the cache. The caller then sets `context` (see `injected`)."""
        self.model.inject(self.context.pending.joined(*features), self.cache, self.context.rows - self.skipped)

    def injected(self, rows: int) -> Context:
        """The context of a cache that holds `rows` rows, with none pending."""
        return Context(rows, FeatureRows(), self.sliding())

    def mark_injected(self, rows: int) -> None:
        """Record that the pending rows are in the cache, which now holds `rows`."""
        mx.async_eval([entry.state for entry in self.cache])
        self.context = self.injected(rows)

    def sliding(self) -> list[Any]:
        """Per cache entry, the arrays that undo a pass in a sliding-window entry. None for the others: they are cut instead, and
        holding their arrays would make MLX copy what it now writes in place."""
        return [None if isinstance(entry, KVCache) else entry.state for entry in self.cache]

    def settle(self, rows: int) -> mx.array | None:
        """Undo an interrupted pass in the cache. Returns: the features that are pending when the target has `rows` rows."""
        for entry, state in zip(self.cache, self.context.sliding, strict=True):
            # An interrupted pass may have dropped the oldest rows of a sliding entry, so the old arrays are put back.
            if state is None:
                entry.trim(max(entry.offset + self.skipped - self.context.rows, 0))
            else:
                entry.state = state
        pending = rows - self.context.rows
        return self.context.pending.joined()[:, :pending] if pending > 0 else None
