"""The loop: prefill, then rounds of propose, verify, accept, commit and emit until EOS or max_tokens.

Only this module changes the caches of the two models during a run. It knows nothing of files, text or terminals.
Read `generate_steps` first: it is the whole method. `generation` makes responses of its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from .constrained import make_sampler
from .draft_length.policy import DraftLengthPolicy, FixedDraftLength
from .feature_rows import FeatureRows
from .kernels.autotune import NotFiniteError
from .options import RunOptions
from .pair import DFlashPair
from .prompt_cache import PairCache
from .proposers import Context, Draft, DrafterProposer, PromptLookupProposer, Proposer, best_offer, check_draft
from .rollback import RollbackPoint, leaves, restore_masks, rollback, rollback_point
from .round_counter import RoundCounter
from .stats import GenerationStats
from .target_sampler import RoundResult, TargetSampler
from .verify import verify_block

# One step: (token, log-probabilities [V], whether it was drafted).
Step = tuple[int, mx.array, bool]
# Cache entries that can undo two single-token passes, one after the other.
_UNDONE_TWICE = (KVCache, QuantizedKVCache, ArraysCache)
# Cache entries whose arrays may still be unevaluated after the tokens were read.
_LEFT_LAZY = (ArraysCache, RotatingKVCache, ConcatenateKVCache)
# Bytes of features that may wait for the drafter while it is idle: computing its keys and values costs 1 to 4 % on a CPU.
_PENDING_BYTES = 32 << 20


def generate_steps(run: Run, prompt: list[int]) -> Iterator[Step]:
    """Yield committed tokens.

        propose   draft tokens to follow the anchor; none where plain decoding is faster
        verify    start one target pass over anchor and drafts
        accept    wait for the pass: keep the drafts that the target agrees with, and one token of its own, the bonus
        commit    keep their rows in the caches; the others are rolled back once the next draft is enqueued
        emit      hand out the tokens; the bonus is the next anchor

    A round waits for the device once, or twice where the drafter's confidence decides how many drafts are verified.
    However it ends (EOS, closed generator, Ctrl-C, error), `settle` leaves both caches with exactly the yielded tokens.
    """
    try:
        anchor = run.prefill(prompt)
        while not run.finished:
            n = run.next_draft_length()
            draft = run.propose(anchor, n)
            output = run.verify(anchor, draft)
            if draft.width == 0:
                anchor = yield from plain_rounds(run, output)
                continue
            kept = run.accept(output)
            run.commit(kept)
            yield from run.emit(kept)
            anchor = kept.bonus
    finally:
        run.settle()


def plain_rounds(run: Run, output: PendingPass) -> Iterator[Step]:
    """Decode one token per pass until it is time to draft. Returns the next anchor.

    output: a target pass over the anchor alone. Its row is always kept. So the next pass can be enqueued before the host reads
    this one's token: it takes the token from the device.
    """
    while True:
        run.commit_row(output)
        following = run.look_ahead(output)
        try:
            kept = run.read(output)
        except NotFiniteError:
            output = run.retry(output, following)
            continue
        yield from run.emit(kept)
        if following is None:
            return kept.bonus
        output = following


@dataclass
class PendingPass:
    """A target pass over the anchor and `draft.width` drafts that is enqueued and not read yet.

    anchor: [1]; lookahead: it was enqueued before the pass before it was read; point: undoes it; seconds: spent so far.
    features: [1, width + 1, n_taps * H]; token: at width 0, returns the target's token [1] on the device; read: waits for the
    result. sliding: the drafter's sliding-window arrays after this round; may_be_nonfinite: kernels or the accelerator ran.
    """

    anchor: mx.array
    draft: Draft
    lookahead: bool
    point: RollbackPoint
    features: mx.array
    token: Callable[[], mx.array] | None
    read: Callable[[], RoundResult]
    sliding: list[Any]
    may_be_nonfinite: bool
    seconds: float = 0.0


@dataclass
class Kept:
    """A pass that the host has read, with its outcome."""

    output: PendingPass
    result: RoundResult

    @property
    def bonus(self) -> int:
        return self.result.bonus


class Run:
    """One generation: both models, both caches, and how many rows each cache holds.

        ids (committed)      p0 ... pn  a | d1 d2 b         a: anchor, committed but not yet in the target's cache
        target cache rows    p0 ... pn    |                 after verify: + a d1 d2 d3..., rolled back to + a d1 d2
        drafter cache rows   p0 ... pm    |                 m <= n: the rows between are pending (see `DrafterProposer`)

    rows: n + 1, prompt_end: rows after the prompt; point: undoes the last target pass; emitted: tokens handed out.
    """

    proposer_class = DrafterProposer  # a subclass where several machines share the target (`rank_run`)

    def __init__(
        self,
        options: RunOptions,
        pair: DFlashPair,
        cache: PairCache,
        target_sampler: TargetSampler,
        proposers: Sequence[Proposer],
        policy: DraftLengthPolicy | FixedDraftLength,
        stats: GenerationStats,
    ):
        self.options, self.stream, self.quantization = options, options.stream, options.quantization
        self.target, self.cache, self.target_sampler, self.policy, self.stats = pair.target, cache, target_sampler, policy, stats
        self.drafter_proposer = self.proposer_class(options.draft_model, pair.target, cache, target_sampler, policy)
        self.proposers, self.rows, self.emitted = proposers, cache.rows, 0
        self.point = rollback_point(cache.target, cache.rows)
        # The draft source of the next round, and its width if `look_ahead` has already chosen it.
        self.proposer: Proposer | DrafterProposer = self.drafter_proposer
        self.next_width: int | None = None
        self.counter = RoundCounter(stats, policy, self.drafter_proposer, not (options.logits_processors or options.constraint))
        # Whether two single-token passes can be undone. In a full ring buffer they cannot: each overwrites a row.
        self._two_undoable = all(type(entry) in _UNDONE_TWICE for entry in leaves(cache.target))
        # Entries whose arrays must be evaluated after a rollback or a pass (`lazy`), and after a plain pass (`_recurrent`).
        self.lazy = [entry for entry in leaves(cache.target) if type(entry) in _LEFT_LAZY]
        self._recurrent = [entry for entry in self.lazy if type(entry) is ArraysCache]

    @property
    def finished(self) -> bool:
        return self.emitted == self.options.max_tokens

    def prefill(self, prompt: list[int]) -> int:
        """Read the prompt in chunks, all but its last token, and give their features to the drafter. Returns: the last token."""
        feed, progress = begin_prefill(self, prompt), self.options.progress
        progress(0, len(feed))
        while len(feed) > 1:
            chunk = feed[: self.target.prefill_chunk(self.rows, self.options.prefill_step_size, len(feed) - 1)]
            with mx.stream(self.stream):
                mx.eval(inject_chunk(self, self.target(mx.array([chunk]), self.cache.target).features))
                mx.clear_cache()
            keep_chunk(self, chunk)
            feed = feed[len(chunk) :]
            progress(self.prompt_rows - len(feed), self.prompt_rows)
        self.cache.ids = self.cache.ids[: self.rows] + feed
        return feed[0]

    def next_draft_length(self) -> int:
        """How many drafts to verify next; 0: plain decoding, as for the first token. Sets `proposer`."""
        self.proposer, n, self.next_width = self.drafter_proposer, self.next_width, None
        if not self.emitted:
            return 0
        n = self._draft_length() if n is None else n
        proposer, offered = self._best_source(n)
        if offered:
            self.proposer, n = proposer, offered
        return n

    def propose(self, anchor: int | mx.array, n: int) -> Draft:
        """Draft tokens to follow the anchor; n of them will be verified. n = 0 drafts nothing."""
        began, most = time.perf_counter(), self.stats.block_size - 1
        with mx.stream(self.stream):
            if n and self.proposer is self.drafter_proposer:
                draft = self.drafter_proposer.propose(_row(anchor), most, n)
                began += self.roll_back()  # these seconds count as rollback, not as draft
                self._cut_by_confidence(draft, began)
            else:
                draft = self.proposer.propose(_row(anchor), most) if n else Draft([])
                check_draft(draft, self.target.vocabulary)
                self.target_sampler.set_width(draft, n)
                if self.drafter_proposer.context.pending.nbytes > _PENDING_BYTES:
                    self.drafter_proposer.inject()
                    self.drafter_proposer.mark_injected(self.rows)
        draft.seconds = time.perf_counter() - began
        return draft

    def _cut_by_confidence(self, draft: Draft, began: float) -> None:
        """Wait for the draft if its confidence chooses the width, or if this round times the drafter."""
        cuts = self.policy.cuts_by_confidence and draft.confidence is not None
        if cuts or self.stats.times_next_round:
            draft.read()
            draft.draft_s = time.perf_counter() - began
        if cuts:
            draft.confidence_cut, width = True, self._limit(self.policy.confidence_cut(draft.host_values[1]))
            if not self.target_sampler.set_width(draft, width):
                # A plain pass follows. The drafter's pass has put the pending rows into its cache.
                self.drafter_proposer.mark_injected(self.rows)

    def verify(self, anchor: int | mx.array, draft: Draft, lookahead: bool = False) -> PendingPass:
        """Enqueue the target's pass over [anchor, drafts...], and the comparison of its tokens with the drafts."""
        with mx.stream(self.stream):
            self.roll_back()
            began = time.perf_counter()
            self.mark_rollback_point()
            output = self._enqueue(_row(anchor), draft, lookahead)
        output.seconds = draft.seconds + time.perf_counter() - began
        return output

    def mark_rollback_point(self) -> None:
        """Remember the state of the target's cache before a pass."""
        if self.quantization and self.rows > self.prompt_end:
            # After a pass, as mlx-lm does: the first pass may still find a cache that is not quantized.
            self.quantization.apply(self.cache)
        self.point = rollback_point(self.cache.target, self.rows)

    def _enqueue(self, anchor: mx.array, draft: Draft, lookahead: bool) -> PendingPass:
        drafted, by_drafter = draft.row, draft.by_drafter
        # Evaluated with the pass. If the drafter did not run, its entries have not changed.
        drafter_states = [entry.state for entry in self.cache.drafter] if by_drafter else []
        confidence = None if draft.host_values else draft.confidence
        output = verify_block(self.target, anchor, drafted[:, : draft.width], self.cache.target, self.point)
        args = (self.target, output, drafted, drafter_states, self.rows + 1, confidence)
        token, read, may_be_nonfinite = self.target_sampler.enqueue(*args)
        if not draft.width:
            evaluate(self._recurrent)
        sliding = self.drafter_proposer.sliding() if by_drafter else self.drafter_proposer.context.sliding
        return PendingPass(anchor, draft, lookahead, self.point, output.features, token, read, sliding, may_be_nonfinite)

    def accept(self, output: PendingPass) -> Kept:
        """Wait for the pass. If it gave a value that is not finite, run it again without kernels."""
        while True:
            try:
                return self.read(output)
            except NotFiniteError:
                output = self.retry(output)

    def read(self, output: PendingPass) -> Kept:
        """Wait for a pass. Raises NotFiniteError if one of our kernels failed; all are then off, and the pass must run again."""
        began = time.perf_counter()
        with mx.stream(self.stream):
            result = output.read()
        output.seconds += time.perf_counter() - began
        return Kept(output, result)

    def retry(self, output: PendingPass, following: PendingPass | None = None) -> PendingPass:
        """Undo a target pass and enqueue it again. following: the plain pass that was enqueued after it, which is undone too."""
        with mx.stream(self.stream):
            if following is not None:
                rollback(self.cache.target, following.point, following.point.length)
            self.point = output.point
            if not output.draft.width:
                self.rows -= 1  # `commit_row` kept its row before it was read
                self.drafter_proposer.context.pending.drop()
            rollback(self.cache.target, self.point, self.rows)
            self.point.rows = 0
            self.point.replays.clear()
            again = self._enqueue(output.anchor, output.draft, output.lookahead)
        again.seconds = output.seconds
        return again

    def commit_row(self, output: PendingPass) -> None:
        """Keep the anchor's row of a plain pass, before the pass is read."""
        with mx.stream(self.stream):
            self.drafter_proposer.context.pending.append(output.features)
        self.rows += 1

    def commit(self, kept: Kept) -> None:
        """Keep the rows of the anchor and the accepted drafts. `roll_back` removes the others later."""
        with mx.stream(self.stream):
            features = keep_rows(self, kept)
            evaluate(self.lazy if kept.result.accepted == kept.output.draft.width else [], features)

    def roll_back(self) -> float:
        """Remove the last round's rejected rows from the target's cache. Returns: seconds.
        Called after the next draft was enqueued, which does not read this cache, so that the device has work meanwhile."""
        began = time.perf_counter()
        if self.rows < self.point.length + self.point.rows:
            rollback(self.cache.target, self.point, self.rows)
            self.point.ended(self.rows - self.point.length)
            evaluate(self.lazy)
        self.stats.seconds["rollback"] += (took := time.perf_counter() - began)
        return took

    def emit(self, kept: Kept) -> Iterator[Step]:
        """Count a round and hand out its tokens."""
        result = kept.result
        if self.emitted:
            self.counter.add(kept)
        else:  # the first token's pass ends the prefill, and is no round
            self.options.progress(self.prompt_rows, self.prompt_rows)
        for i, token in enumerate([*result.drafted[: result.accepted], result.bonus]):
            # First, because it may fail: the token is then not counted as handed out.
            row = result.row_logprobs(i)
            self.cache.ids.append(token)
            self.target_sampler.history.append(token)
            self.emitted += 1
            yield token, row, i < result.accepted
            if self.finished:
                return
            if self.emitted % 256 == 1:
                mx.clear_cache()

    def look_ahead(self, output: PendingPass) -> PendingPass | None:
        """Enqueue the next plain pass before the last one is read. None if the host must decide something first."""
        self.next_width = None
        last, times_passes = self.emitted + 1 == self.options.max_tokens, not self.policy.ready
        # A pass that may have to run again must be the last one, unless both can be undone.
        quantizes = self.quantization is not None and self.rows == max(self.quantization.start, self.prompt_end + 1)
        may_be_nonfinite = output.may_be_nonfinite and (quantizes or not self._two_undoable)
        if last or times_passes or self.target_sampler.processors or may_be_nonfinite:
            return None
        n = self._draft_length()
        # If the next round drafts, this pass is read first, and `generate_steps` continues with that width.
        if n or self._best_source(0)[1]:
            self.next_width = n
            return None
        return self.verify(token := output.token(), self.propose(token, 0), lookahead=True)

    def _draft_length(self) -> int:
        """How many of the drafter's drafts the policy wants to verify next."""
        return self._limit(self.policy.next_length(self.rows - self.drafter_proposer.context.rows))

    def _best_source(self, n: int) -> tuple[Proposer | None, int]:
        """The draft source that beats n drafts of the drafter, and how many of its drafts to verify; 0: none does."""
        proposer, rates = best_offer(self.proposers, self.cache.ids, self.stats.block_size - 1)
        return proposer, min(self._limit(self.policy.prompt_lookup_width(n, rates)), len(rates)) if rates else 0

    def _limit(self, width: int) -> int:
        """Cut a width to the target's last position, and to the row where its cache will be quantized."""
        if self.target.positions is not None:
            width = max(min(width, self.target.positions - self.rows - 1), 0)
        # Plain decoding quantizes the cache after row start - 1, so no block may cross it.
        return self.quantization.cut(self.rows, width) if self.quantization else width

    def settle(self) -> None:
        """Leave both caches with exactly the tokens that were handed out, however the run ended."""
        cache, point = self.cache, self.point
        # The last token handed out is the anchor, which is not in the target's cache. Only the last pass can be undone.
        keep = max(point.length, min(self.rows, len(cache.ids) - 1))
        with mx.stream(self.stream):
            restore_masks(cache.target)
            rollback(cache.target, point, keep)
            if self.quantization:
                self.quantization.apply(cache)
            cache.features, cache.rows = self.drafter_proposer.settle(keep), keep
            cache.write()
            # Evaluate now: if another thread continues with the cache, it cannot evaluate this thread's arrays.
            mx.eval([entry.state for entry in cache.entries])


def evaluate(entries: list[Any], *arrays: mx.array) -> None:
    """Start evaluating what the next pass reads: it may run in another thread, which cannot evaluate this one's arrays."""
    mx.async_eval([entry.cache if type(entry) is ArraysCache else (entry.keys, entry.values) for entry in entries], *arrays)


def _row(anchor: int | mx.array) -> mx.array:
    """[1]"""
    return mx.array([anchor], dtype=mx.int32) if isinstance(anchor, int) else anchor


def begin_prefill(run: Run, prompt: list[int]) -> list[int]:
    """Returns: the tokens to read, which begin with those that the cache's text has beyond its rows."""
    run.cache.mark_in_use()
    feed = run.cache.ids[run.cache.rows :] + prompt
    run.prompt_rows, run.prompt_end = len(feed), run.rows
    return feed


def inject_chunk(run: Run, features: mx.array) -> list[Any]:
    """Give a chunk's features to the drafter. Returns: what must be evaluated before `keep_chunk`."""
    run.point.ended(0)  # a chunk is kept or undone as a whole
    run.drafter_proposer.inject(features)
    if run.quantization:
        run.quantization.apply(run.cache)
    return [entry.state for entry in run.cache.entries[:-1]]


def keep_chunk(run: Run, chunk: list[int]) -> None:
    """Commit a chunk of the prompt, which both models have read."""
    run.cache.ids, done = run.cache.ids[: run.rows] + chunk, run.rows + len(chunk)
    context, point = run.drafter_proposer.injected(done), rollback_point(run.cache.target, done)
    # One statement, so that an interruption falls before or after it.
    run.rows, run.prompt_end, run.drafter_proposer.context, run.point = done, done, context, point


def keep_rows(run: Run, kept: Kept) -> mx.array:
    """`Run.commit` without evaluating anything. Returns: the kept rows' features, [1, n, n_taps * H]."""
    output, n = kept.output, kept.result.accepted + 1
    features, rows = output.features[:, :n], run.rows + n
    if output.draft.by_drafter:
        run.rows, run.drafter_proposer.context = rows, Context(run.rows, FeatureRows(features), output.sliding)
    else:
        # The drafter did not run: these rows are pending too.
        run.drafter_proposer.context.pending.append(features)
        run.rows = rows
    return features


def make_run(options: RunOptions, pair: DFlashPair, cache: PairCache) -> Run:
    """A run that has not started. `RunOptions` has already refused what cannot be honoured."""
    proposers = [*([PromptLookupProposer()] if options.uses_prompt_lookup else []), *(options.proposers or ())]
    sampler, proposers = make_sampler(options, proposers)
    block_size = options.block_size or pair.drafter.config.block_size
    if options.block_size is None and options.acceptance == "match":
        policy: DraftLengthPolicy | FixedDraftLength = pair.draft_length_policy(options.stream)
    else:
        # Where drafts are sampled, a seed gives the same text only with the same widths, so timing must not choose them.
        policy = FixedDraftLength(block_size - 1)
    stats = GenerationStats(block_size, options.keep_rounds, rule=policy)
    return (pair.run_class or Run)(options, pair, cache, sampler, proposers, policy, stats)
