"""The round loop: prefill, then draft -> verify -> accept -> commit until EOS or max_tokens.

The only module that sees the target's and the drafter's caches at once. Knows no files and no terminals.
Read `_rounds` first: it is the whole method. `stream_generate` puts text and counts round it, as mlx-lm's does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, generation_stream
from mlx_lm.generate import GenerationResponse as MlxLmResponse
from mlx_lm.generate import stream_generate as mlx_lm_stream_generate
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .draft_length.measure import draft_length_policy
from .draft_length.policy import DraftLengthPolicy, FixedDraftLength
from .draft_length.prompt_lookup import PromptLookup, make_prompt_lookup
from .errors import CacheError, GenerationError, PairError
from .kernels.autotune import NotFiniteError
from .machine import wired_limit
from .models.drafter import Drafter
from .models.target import Target, family
from .options import (
    block_size_of,
    check_context,
    check_draft_model,
    check_ids,
    check_kv_quantization,
    check_template,
    check_window,
    encode,
    warn_of_overflow,
)
from .prompt_cache import KVQuantization, PairCache, is_pair_cache
from .rollback import RollbackPoint, check_rollback, leaves, plain_windows, rollback, rollback_point
from .sampling import KeyedSampler, LogitsProcessor, Sampler, choose_seed
from .stats import GenerationStats
from .target_sampler import RoundResult, TargetSampler, make_target_sampler, pack_drafts, unpack_drafts
from .traced.compiled import attach
from .verify import verify_block


@dataclass
class GenerationResponse(MlxLmResponse):
    """mlx-lm's response for one token, plus `stats`: the run's `GenerationStats` so far, None without a DFlash drafter."""

    stats: GenerationStats | None = None


def make_prompt_cache(model: nn.Module, draft_model: nn.Module | None = None, max_kv_size: int | None = None) -> list[Any]:
    """An empty prompt cache: mlx-lm's for the target alone, one list for both with a drafter.

    The list holds only mlx-lm's own cache classes, so `mlx_lm.models.cache.save_prompt_cache` and `load_prompt_cache` carry
    it. It remembers committed ids, so a later call passes new tokens only, as in mlx-lm.

    Raises:
      CacheError: if the target has a cache kind that cannot be rolled back, if max_kv_size is given for a target that makes its
        own caches (mlx-lm would ignore it), or if it is too small for a block.
    """
    check_window(model, max_kv_size)
    target = mlx_lm_cache.make_prompt_cache(model, max_kv_size)
    if draft_model is None:
        return target
    check_draft_model(draft_model)
    if not isinstance(draft_model, Drafter):
        return target + mlx_lm_cache.make_prompt_cache(draft_model, max_kv_size)
    kept = max((entry.keep for entry in target if isinstance(entry, mlx_lm_cache.RotatingKVCache)), default=0)
    if max_kv_size is not None and max_kv_size <= kept:
        raise CacheError(
            f"expected max_kv_size of at least {kept + 1} with a drafter; found {max_kv_size}. mlx-lm keeps the first {kept} "
            "rows always: no other would fit."
        )
    check_rollback(target, family(model))
    return PairCache.make(target, draft_model.make_cache())


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: nn.Module | None = None,
    stream: Any = generation_stream,
    *,
    block_size: int | None = None,
    seed: int | None = None,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    acceptance: str = "match",
    copy: bool | None = None,
    prompt_cache: list[Any] | None = None,
    logprobs: bool = False,
    keep_rounds: bool = True,
    prefill_step_size: int | None = None,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
    quantized_kv_start: int | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    num_draft_tokens: int | None = None,
    input_embeddings: mx.array | None = None,
) -> Generator[GenerationResponse, None, None]:
    """Generate text, one response a token: `mlx_lm.stream_generate` with a DFlash drafter as `draft_model`.

    Args beyond mlx-lm's:
      draft_model: what `load_drafter` returned for this model object. None runs mlx-lm's own loop; an ordinary mlx-lm model
        is passed through to mlx-lm's speculative decoding.
      prompt_cache: a list that a drafter was used with goes on without one too; it is then the target's alone. One whose entries
        are recurrences alone (Mamba) does not know how long its text is: without a drafter, `seed` counts from 0 again there.
      block_size: slots drafted and verified in every round, the anchor included; 1: no drafting. `num_draft_tokens` is the same
        less one. None: the drafter config's slots are drafted, and how many of them are verified, or whether to draft at all, is
        chosen round by round by what passes cost on this machine (measured once, in about a second) and what was accepted.
      seed: keys the noise of `sampler` by (seed, position), so the text does not depend on the drafter; None draws one.
      acceptance: "match" keeps the drafts that equal the target's own draws. "rejection" and "block" draw the drafts too and keep
        more of them; the text for a seed then depends on drafter and block size, and `sampler` is a `sampling.Distribution`.
      copy: prompt lookup: where the last tokens stood before, draft what came after them there, without the drafter. None: where
        that pays, as widths are chosen; not at a fixed block_size. True: at a fixed one too, wherever they did. False: never.
      logprobs: evaluate each response's `logprobs` now (needed when another thread reads it); else it is lazy.
      keep_rounds: False keeps only the summary of a long run in `stats`.
    Greedy (no sampler) is mlx-lm's: the argmax of the normalised row. With a sampler or processors the target's token is
    drawn row by row and drafts are matched with it. Processors are called for committed rows only, one wait a row.

    Raises:
      GenerationError, CacheError, PairError: an option that cannot be honoured, before anything runs.
      ValueError: max_tokens 0 or an empty prompt, as in mlx-lm.
    """
    given = {
        "prefill_step_size": prefill_step_size,
        "max_kv_size": max_kv_size,
        "kv_bits": kv_bits,
        "kv_group_size": kv_group_size,
        "quantized_kv_start": quantized_kv_start,
        "prompt_progress_callback": prompt_progress_callback,
        "num_draft_tokens": num_draft_tokens,
        "input_embeddings": input_embeddings,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    check_draft_model(draft_model)
    if max_tokens == 0:
        raise ValueError("Maximum number of tokens must be non-zero (use -1 for no limit).")
    if max_kv_size is not None and prompt_cache is not None:
        raise GenerationError(
            f"expected max_kv_size or prompt_cache; found both. Pass max_kv_size = {max_kv_size} to make_prompt_cache instead."
        )
    if not isinstance(draft_model, Drafter):
        if acceptance != "match":
            raise GenerationError(f"expected a DFlash drafter for acceptance; found {acceptance!r} without one. Leave it out.")
        if copy:
            raise GenerationError("expected a DFlash drafter for copy; found True without one. Leave it out.")
        given |= {"sampler": sampler, "logits_processors": logits_processors, "prompt_cache": prompt_cache}
        return _mlx_lm(model, tokenizer, prompt, max_tokens, draft_model, stream, block_size, seed, logprobs, given)
    if input_embeddings is not None:
        raise GenerationError(
            "expected no input_embeddings with a DFlash drafter; they were given. The drafter needs token ids: pass a prompt, or "
            "run without a drafter."
        )
    if draft_model.target is not model:
        raise PairError(
            "expected the model object that this drafter was loaded for; found another. Call load_drafter(path, model)."
        )
    for name, value in (("prefill_step_size", prefill_step_size), ("max_kv_size", max_kv_size)):
        if value is not None and value < 1:
            raise GenerationError(f"expected {name} of at least 1; found {value!r}. Leave it out for the default.")
    for name, value in (("kv_group_size", kv_group_size), ("quantized_kv_start", quantized_kv_start)):
        if value is not None and kv_bits is None:
            raise GenerationError(f"expected kv_bits with {name}; found {name} = {value!r} alone. Give kv_bits or leave it out.")
    block_size = block_size_of(draft_model, block_size, num_draft_tokens)
    ids = encode(tokenizer, prompt)
    if not ids:
        raise ValueError(_NOTHING_TO_RUN)
    target = attach(Target(model, draft_model.config.target_layer_ids), draft_model)
    check_ids(ids, target)
    entries = prompt_cache
    if entries is None:
        entries = make_prompt_cache(model, draft_model, max_kv_size)
    elif not is_pair_cache(entries) and all(entry.empty() for entry in entries):
        check_rollback(entries, target.family)
        entries = PairCache.make(list(entries), draft_model.make_cache())
    pair = PairCache.read(entries)
    n_target = len(mlx_lm_cache.make_prompt_cache(model))
    if len(pair.drafter) != len(draft_model.layers) or len(pair.target) != n_target:
        raise CacheError(
            f"expected a prompt cache of {n_target} target and {len(draft_model.layers)} drafter entries; found "
            f"{len(pair.target)} and {len(pair.drafter)}. Make it with make_prompt_cache(model, draft_model)."
        )
    check_context(target, draft_model, len(pair.ids) + len(ids), max_tokens)
    check_template(draft_model, tokenizer, ids)
    quantization = _quantization(model, given)
    target_sampler = make_target_sampler(sampler, logits_processors or (), seed, acceptance, ids)
    if block_size is None and acceptance == "match":
        rule: FixedDraftLength | DraftLengthPolicy = draft_length_policy(model, draft_model, stream)
    else:
        # Drafts that are drawn give the same text for a seed only at the same widths: none is chosen by time.
        rule = FixedDraftLength((block_size or draft_model.config.block_size) - 1)
    lookup = make_prompt_lookup(copy, acceptance, block_size)
    stats = GenerationStats(block_size or draft_model.config.block_size, keep_rounds, rule=rule)
    if prompt_cache is not None and prompt_cache is not entries:
        # A fresh list from mlx-lm's own make_prompt_cache gets the drafter's part added in place, now that nothing was refused.
        prompt_cache[:] = entries
    run = _Run(
        target,
        draft_model,
        pair,
        target_sampler,
        lookup,
        rule,
        stats,
        max_tokens,
        stream,
        quantization,
        prefill_step_size,
        prompt_progress_callback,
    )
    steps = _rounds(run, ids)
    return _respond(steps, tokenizer, len(ids), max_tokens, [model, draft_model], stream, stats, logprobs)


def generate(model: nn.Module, tokenizer: Any, prompt: str | mx.array | list[int], verbose: bool = False, **kwargs: Any) -> str:
    """The whole answer as text; keywords as in `stream_generate`. `verbose` prints text and figures, as mlx-lm's does."""
    text, response = "", None
    if verbose:
        print("=" * 10)
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose:
        print()
        print("=" * 10)
        print(f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
        print(f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec")
        print(f"Peak memory: {response.peak_memory:.3f} GB")
        if response.stats is not None and response.stats.tau is not None:
            print(f"Acceptance: tau {response.stats.tau:.3f} (mean of accepted + 1 over {response.stats.n_drafting} rounds)")
    return text


# mlx-lm's words.
_NOTHING_TO_RUN = "Either input_embeddings or prompt (or both) must be provided."
# One step: (token, log-probabilities [V], whether the drafter proposed it).
Step = tuple[int, mx.array, bool]
# Kinds of entries that hold what two passes of one row did apart.
_UNDONE_TWICE = (mlx_lm_cache.KVCache, mlx_lm_cache.QuantizedKVCache, mlx_lm_cache.ArraysCache)
# Kinds of entries with arrays that the tokens read so far did not need.
_LEFT_LAZY = (mlx_lm_cache.ArraysCache, mlx_lm_cache.RotatingKVCache, mlx_lm_cache.ConcatenateKVCache)
# Features that may wait for the drafter while it is not used: its keys and values cost 1 to 4 % of decoding on a CPU.
_PENDING_BYTES = 32 << 20
# The drafter's rounds in a row without an accepted draft after which one of float16 is looked at.
_REFUSED = 4


def _rounds(run: _Run, prompt: list[int]) -> Iterator[Step]:
    """Yield committed tokens; a round is one drafter pass (none at width 0), one target pass and one wait for the device, or two
    where the rule has a look at the drafts before it chooses how many the target is given.

    However this ends (EOS seen by the caller, closed generator, Ctrl-C, an error), `finally` leaves the pair of caches at
    exactly the tokens that were yielded.
    """
    emitted = 0
    try:
        current = run.enqueue(run.prefill(prompt), 0)
        while True:
            lookahead, width = None, None
            if not current.width:
                # Plain decoding: the row is kept whatever it says, so the next pass starts from the token on the device.
                run.commit(current, 0)
                if run.can_look_ahead(current, emitted):
                    width = run.next_width()
                    # What to copy depends on the token.
                    if not width and not run.copy_width(0):
                        lookahead = run.enqueue(current.token, 0, lookahead=True)
            try:
                ids, accepted, bonus, row_logprobs, confidence = run.read(current)
            except NotFiniteError:
                # A replay or one of our kernels was at fault. They are off now: the pass runs once more without them.
                current = run.retry(current, lookahead)
                continue
            if current.width:
                run.commit(current, accepted)
            if emitted:
                run.record(current, ids, accepted, bonus, confidence)
            else:
                run.report_prefill()

            # Hand out what the round committed; the bonus becomes the next anchor.
            for i, token in enumerate([*ids[:accepted], bonus]):
                # Made first: where that fails, the token was not handed out.
                row = row_logprobs(i)
                run.pair.ids.append(token)
                run.target_sampler.history.append(token)
                emitted += 1
                yield token, row, i < accepted
                if emitted == run.max_tokens:
                    return
                if emitted % 256 == 1:
                    mx.clear_cache()
            current = lookahead or run.enqueue_block(bonus, run.next_width() if width is None else width)
    finally:
        run.settle()


@dataclass
class PendingPass:
    """A target pass over the anchor and `width` drafted tokens that is enqueued and not read yet.

    anchor: [1]; drafted: [1, N], of which N >= width; source: who drafted them; lookahead: enqueued before the pass in front of
    it was read; point: undoes it.
    features: [1, width + 1, n_taps * H]; token: [1] at width 0 the target's choice, on the device; read: waits for the outcome.
    context: what undoes passes of the drafter after this round's (see `_slid`); may_be_nonfinite: one of our kernels ran in it.
    seconds: spent enqueuing and waiting so far, draft_s of them on the draft if that was waited for; then
    drafted_ids: its ids and how sure the drafter is of each; confidence_cut: these chose the width.
    """

    anchor: mx.array
    drafted: mx.array
    width: int
    source: str
    lookahead: bool
    point: RollbackPoint
    features: mx.array
    token: mx.array | None
    read: Callable[[], RoundResult]
    context: list[Any]
    may_be_nonfinite: bool
    drafted_ids: tuple[list[int], list[float] | None] | None = None
    confidence_cut: bool = False
    seconds: float = 0.0
    draft_s: float | None = None


class _Run:
    """One generation: both models, both caches and how far each of them is.

        ids (committed)      p0 ... pn  a | d1 d2 b         a: anchor, committed but not yet in the target's cache
        target cache rows    p0 ... pn    |                 after verify: + a d1 d2 d3..., rolled back to + a d1 d2
        drafter cache rows   p0 ... pm    |                 m <= n: the rows between are pending as features

    rows: n + 1; injected: m + 1; context: the drafter's sliding entries at `injected`; point: undoes the last target pass.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        pair: PairCache,
        target_sampler: TargetSampler,
        lookup: PromptLookup | None,
        rule: FixedDraftLength | DraftLengthPolicy,
        stats: GenerationStats,
        max_tokens: int,
        stream: Any,
        quantization: KVQuantization | None,
        prefill_step_size: int | None,
        progress: Callable[[int, int], None] | None,
    ):
        self.drafter, self.pair, self.target_sampler, self.lookup, self.rule, self.stats = (
            drafter,
            pair,
            target_sampler,
            lookup,
            rule,
            stats,
        )
        self.max_tokens, self.stream, self.quantization = max_tokens, stream, quantization
        self.prefill_step_size, self.progress = prefill_step_size or 2048, progress or (lambda *_: None)
        self.target = target
        self.rows, self.injected = pair.rows, pair.rows - pair.pending
        self.pending = _Rows(pair.features)
        self.context = _slid(pair.drafter)
        self.point = rollback_point(pair.target, pair.rows)
        # Which kind of round the last one was, and the drafter's rounds in a row that accepted nothing.
        self._kind, self._refused = None, 0
        # Whether two passes of one row can be undone: a full ring has lost the row that the second one replaced.
        self._deep = all(type(entry) in _UNDONE_TWICE for entry in leaves(pair.target))
        # Entries whose arrays a pass or a rollback leaves lazy, and those of them that a pass does.
        self._lazy = [entry for entry in leaves(pair.target) if type(entry) in _LEFT_LAZY]
        self._states = [entry for entry in self._lazy if type(entry) is mlx_lm_cache.ArraysCache]

    def prefill(self, prompt: list[int]) -> mx.array:
        """All but the last token in chunks, whose features go straight into the drafter's cache. Returns the last one, [1]."""
        pair = self.pair
        feed = pair.ids[pair.rows :] + prompt
        self._prompt_rows = len(feed)
        self.progress(0, len(feed))
        while len(feed) > 1:
            chunk = feed[: min(self.prefill_step_size, len(feed) - 1)]
            with mx.stream(self.stream):
                _, features = self.target(mx.array([chunk]), pair.target)
                # None of its rows can be kept alone.
                self.point.ended(0)
                features = self.pending.joined(features)
                self.drafter.inject(features, pair.drafter, self.injected)
                if self.quantization:
                    self.quantization.apply(pair)
                mx.eval([entry.state for entry in pair.entries[:-1]])
                mx.clear_cache()
            pair.ids = pair.ids[: self.rows] + chunk
            feed, done = feed[len(chunk) :], self.rows + len(chunk)
            context = _slid(pair.drafter)
            self._move(done, done, _Rows(), context, rollback_point(pair.target, done))
            self.progress(self._prompt_rows - len(feed), self._prompt_rows)
        pair.ids = pair.ids[: self.rows] + feed
        self._begun = self.rows
        return mx.array(feed, dtype=mx.int32)

    def report_prefill(self) -> None:
        self.progress(self._prompt_rows, self._prompt_rows)

    def can_look_ahead(self, current: PendingPass, emitted: int) -> bool:
        """Whether the pass after a plain one may be enqueued before that one is read: not if the host has a say in between."""
        last, measures = emitted + 1 == self.max_tokens, not emitted and not self.rule.ready
        # A pass that may have to run again is not followed by one that changes the cache otherwise than by a row.
        quantizes = self.quantization is not None and self.rows == max(self.quantization.start, self._begun + 1)
        may_be_nonfinite = current.may_be_nonfinite and (quantizes or not self._deep)
        return not (last or measures or self.target_sampler.processors or may_be_nonfinite)

    def next_width(self) -> int:
        return self._cut(self.rule.choose(self.rows - self.injected))

    def copy_width(self, width: int) -> int:
        """How many copied ids to verify in place of a round of `width`; 0: none."""
        if self.lookup is None or not self.lookup.follow(self.pair.ids):
            return 0
        return self._cut(self.rule.prompt_lookup_width(width, self.lookup.rates(self.stats.block_size - 1)))

    def _cut(self, width: int) -> int:
        if self.target.positions is not None:
            width = max(min(width, self.target.positions - self.rows - 1), 0)
        # Plain decoding quantizes its cache after row start - 1, so no block may reach over that row.
        return self.quantization.cut(self.rows, width) if self.quantization else width

    def enqueue_block(self, anchor: int, width: int) -> PendingPass:
        """Enqueue a round after a token that was read: of `width`, or of copied drafts where they promise more."""
        copied = self.copy_width(width)
        drafts = self.lookup.draft(self.stats.block_size - 1) if copied else None
        return self.enqueue(mx.array([anchor], dtype=mx.int32), copied or width, drafts=drafts)

    def enqueue(self, anchor: mx.array, width: int, lookahead: bool = False, drafts: list[int] | None = None) -> PendingPass:
        """Enqueue a round after the token `anchor` [1]: the drafter's pass, if drafts are due from it; the target's."""
        pair, stats = self.pair, self.stats
        began, draft_s, drafted_ids, confidence_cut = time.perf_counter(), None, None, False
        drafted, confidence = mx.array([drafts or []], dtype=mx.int32), None
        source = "copy" if drafts else "drafter" if width else "plain"
        if self.quantization and self.rows > self._begun:
            # As mlx-lm does, behind a pass: the first one may find a cache that is not quantized yet.
            self.quantization.apply(pair)
        self.point = rollback_point(pair.target, self.rows)
        with mx.stream(self.stream):
            if source == "drafter":
                args = (self.drafter, anchor, self.pending.joined(), pair.drafter, self.injected, stats.block_size)
                drafted, confidence = (
                    self.target_sampler.draft_with_confidence(*args)
                    if self.rule.wants_confidence
                    else (self.target_sampler.draft(*args), None)
                )
                confidence_cut = self.rule.cuts_by_confidence and confidence is not None
                if confidence_cut or stats.times_next_round:
                    drafted_ids = unpack_drafts(pack_drafts(drafted, confidence).tolist(), drafted.shape[1])
                    draft_s = time.perf_counter() - began
                if confidence_cut:
                    width = self._cut(self.rule.confidence_cut(drafted_ids[1]))
                    if not width:
                        # A plain pass follows, and the drafter has what was pending.
                        self._hold()
            elif self.pending.nbytes > _PENDING_BYTES:
                self.drafter.inject(self.pending.joined(), pair.drafter, self.injected)
                self._hold()
            current = self._verify(anchor, drafted, width, source, lookahead, None if drafted_ids else confidence)
        current.drafted_ids, current.confidence_cut = drafted_ids, confidence_cut
        current.seconds, current.draft_s = time.perf_counter() - began, draft_s
        return current

    def _verify(
        self, anchor: mx.array, drafted: mx.array, width: int, source: str, lookahead: bool, confidence: mx.array | None = None
    ) -> PendingPass:
        """Enqueue the target's pass over a block [anchor, drafted...] and the accepting of its drafts."""
        pair, target, point = self.pair, self.target, self.point
        # Where the drafter did not run its entries are as they were: nothing of them is new.
        context = [entry.state for entry in pair.drafter] if source == "drafter" else []
        hidden, features = verify_block(target, anchor, drafted[:, :width], pair.target, point)
        token, read, may_be_nonfinite = self.target_sampler.start(
            target, hidden, features, drafted, context, self.rows + 1, confidence
        )
        if not width:
            self._evaluate(self._states)
        context = _slid(pair.drafter) if source == "drafter" else self.context
        return PendingPass(anchor, drafted, width, source, lookahead, point, features, token, read, context, may_be_nonfinite)

    def retry(self, current: PendingPass, lookahead: PendingPass | None) -> PendingPass:
        """Undo a target pass, and the plain one after it, and enqueue it once more."""
        with mx.stream(self.stream):
            if lookahead is not None:
                rollback(self.pair.target, lookahead.point, lookahead.point.length)
            self.point = current.point
            if not current.width:
                self.rows -= 1
                self.pending.drop()
            rollback(self.pair.target, self.point, self.rows)
            self.point.rows = 0
            self.point.replays.clear()
            again = self._verify(current.anchor, current.drafted, current.width, current.source, current.lookahead)
        again.drafted_ids, again.confidence_cut, again.seconds, again.draft_s = (
            current.drafted_ids,
            current.confidence_cut,
            current.seconds,
            current.draft_s,
        )
        return again

    def read(self, current: PendingPass) -> RoundResult:
        """Wait for a round."""
        began = time.perf_counter()
        with mx.stream(self.stream):
            outcome = current.read()
        current.seconds += time.perf_counter() - began
        return outcome

    def commit(self, current: PendingPass, accepted: int) -> None:
        """Keep the anchor and the accepted drafts; roll the target's cache back to them."""
        if not current.width:
            with mx.stream(self.stream):
                self.pending.append(current.features)
            self.rows += 1
            return
        began = time.perf_counter()
        with mx.stream(self.stream):
            kept = current.features[:, : accepted + 1]
            rows = self.rows + accepted + 1
            if current.source == "drafter":
                self._move(rows, self.rows, _Rows(kept), current.context, self.point)
            else:
                # The drafter was not asked: these rows wait for it with those before them.
                self.pending.append(kept)
                self.rows = rows
            rollback(self.pair.target, self.point, self.rows)
            self._evaluate(self._lazy, kept)
        self.stats.seconds["rollback"] += time.perf_counter() - began

    def record(self, current: PendingPass, ids: list[int], accepted: int, bonus: int, confidence: list[float] | None) -> None:
        """Count a round that has been read, and tell the width rule what it took if it ran as such rounds mostly do."""
        width, source, waited = current.width, current.source, current.draft_s is not None
        kind = (source, "confidence_cut" if current.confidence_cut else width, current.lookahead)
        self.stats.add_passes(current.seconds, current.draft_s, source)
        self.stats.add_round(ids, accepted, bonus, width, source, current.confidence_cut)
        # What the caller's work hides of a pass ahead counts for nothing: to this caller, plain decoding is that much cheaper.
        usual = kind == self._kind
        if source == "drafter" and width:
            self._refused = 0 if accepted else self._refused + 1
            if self._refused == _REFUSED:
                warn_of_overflow(self.drafter, self.pending.joined())
        ids, confidence = current.drafted_ids or (ids, confidence)
        more = accepted == width < len(ids) and ids[width] == bonus
        self.rule.observe(width, accepted, more, current.seconds, usual, source == "copy", confidence, waited)
        self._kind = kind

    @staticmethod
    def _evaluate(entries: list[Any], *arrays: mx.array) -> None:
        """Evaluate what the next pass reads: another thread may ask for it, which cannot evaluate what is lazy here."""
        held = [entry.cache if type(entry) is mlx_lm_cache.ArraysCache else (entry.keys, entry.values) for entry in entries]
        if held or arrays:
            mx.async_eval(held, *arrays)

    def settle(self) -> None:
        """Leave both caches at the tokens that were handed out, whatever was going on."""
        pair, point = self.pair, self.point
        # The last token handed out is the anchor: the target does not hold it. Only what the last pass did can be undone.
        keep = max(point.length, min(self.rows, len(pair.ids) - 1))
        with mx.stream(self.stream):
            plain_windows(pair.target)
            rollback(pair.target, point, keep)
            if self.quantization:
                self.quantization.apply(pair)
            for entry, state in zip(pair.drafter, self.context, strict=True):
                # A sliding cache that an interrupted pass has moved lost its oldest rows: it gets its old arrays back.
                if state is None:
                    entry.trim(max(entry.offset - self.injected, 0))
                else:
                    entry.state = state
            pair.features = self.pending.joined()[:, : keep - self.injected] if keep > self.injected else None
            pair.rows = keep
            pair.write()
            # What is lazy, such as a replayed state, is computed now: the cache may go on in another thread.
            mx.eval([entry.state for entry in pair.entries])

    def _hold(self) -> None:
        """What was pending is in the drafter's cache."""
        mx.async_eval([entry.state for entry in self.pair.drafter])
        self._move(self.rows, self.rows, _Rows(), _slid(self.pair.drafter), self.point)

    def _move(self, rows: int, injected: int, pending: _Rows, context: list[Any], point: RollbackPoint) -> None:
        # One statement, so that an interruption falls before or after it.
        self.rows, self.injected, self.pending, self.context, self.point = rows, injected, pending, context, point


def _slid(drafter: list[Any]) -> list[Any]:
    """The arrays that undo a drafter's pass in its sliding entries. Of the others, None, rows are cut, and their arrays are not
    held: MLX would copy what it writes in place."""
    return [None if isinstance(entry, mlx_lm_cache.KVCache) else entry.state for entry in drafter]


class _Rows:
    """Feature rows [1, S, F] in order, joined when they are needed: a plain pass adds one row at a time, a copied block some."""

    def __init__(self, features: mx.array | None = None):
        self._parts = [] if features is None else [features]
        self.nbytes, self._single = 0 if features is None else features.nbytes, 0

    def append(self, row: mx.array) -> None:
        self._parts.append(row)
        self.nbytes, self._single = self.nbytes + row.nbytes, self._single + 1
        if self._single == 64:
            # Few arrays, however long it takes.
            self._parts[-64:], self._single = [mx.concatenate(self._parts[-64:], axis=1)], 0
            mx.async_eval(self._parts[-1])

    def drop(self) -> None:
        """Take the last row away."""
        last = self._parts.pop()[:, :-1]
        if last.shape[1]:
            self._parts.append(last)
        self._single = max(self._single - 1, 0)

    def joined(self, *more: mx.array) -> mx.array:
        parts = [*self._parts, *more]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def _respond(
    steps: Iterator[Step],
    tokenizer: TokenizerWrapper,
    prompt_tokens: int,
    max_tokens: int,
    models: Sequence[nn.Module],
    stream: Any,
    stats: GenerationStats,
    evaluate: bool,
) -> Generator[GenerationResponse, None, None]:
    """Text, counts and rates round the steps, as mlx-lm's stream_generate gives them."""
    detokenizer = tokenizer.detokenizer
    with wired_limit(models, stream), closing(steps):
        began = time.perf_counter()
        for n, (token, row, from_draft) in enumerate(steps, start=1):
            if n == 1:
                prompt_tps = prompt_tokens / (time.perf_counter() - began)
                began = time.perf_counter()
            if evaluate:
                mx.eval(row)
            stop = token in tokenizer.eos_token_ids
            last = stop or n == max_tokens
            if not stop:
                detokenizer.add_token(token)
            if last:
                detokenizer.finalize()
                # Caches are at this token before the caller sees it.
                steps.close()
            elapsed = time.perf_counter() - began
            spent = stats.seconds
            spent["host"] = max(elapsed - spent["draft"] - spent["verify"] - spent["rollback"], 0.0)
            yield GenerationResponse(
                text=detokenizer.last_segment,
                token=token,
                logprobs=row,
                from_draft=from_draft,
                prompt_tokens=prompt_tokens,
                prompt_tps=prompt_tps,
                generation_tokens=n,
                generation_tps=n / elapsed if elapsed else 0.0,
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=("stop" if stop else "length") if last else None,
                stats=stats,
            )
            if last:
                return


def _quantization(model: nn.Module, options: dict[str, Any]) -> KVQuantization | None:
    """What `kv_bits` and the options beside it ask for, tried; None: nothing.

    Raises:
      GenerationError: mlx-lm cannot run this target with it.
    """
    if (bits := options.get("kv_bits")) is None:
        return None
    # mlx-lm's defaults.
    start = options.get("quantized_kv_start", DEFAULT_QUANTIZED_KV_START)
    quantization = KVQuantization(bits, options.get("kv_group_size") or 64, start)
    check_kv_quantization(model, quantization, mlx_lm_cache.make_prompt_cache(model, options.get("max_kv_size")))
    return quantization


def _mlx_lm(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str | mx.array | list[int],
    max_tokens: int,
    draft_model: nn.Module | None,
    stream: Any,
    block_size: int | None,
    seed: int | None,
    evaluate: bool,
    options: dict[str, Any],
) -> Generator[GenerationResponse, None, None]:
    """mlx-lm's own loop, plain or with an ordinary draft model; plain sampling goes through keyed noise."""
    if block_size is not None:
        raise GenerationError(f"expected a DFlash drafter for block_size; found {block_size} without one. Leave it out.")
    if draft_model is not None and seed is not None:
        raise GenerationError(
            f"expected no seed with an mlx-lm draft model; found {seed}. Its draws depend on what was drafted: leave it out."
        )
    unheard = [name for name in ("max_kv_size", "prompt_progress_callback") if draft_model is not None and name in options]
    if unheard:
        raise GenerationError(
            f"expected no {' or '.join(unheard)} with an mlx-lm draft model; found it. mlx-lm would drop it: leave it out."
        )
    check_window(model, options.get("max_kv_size"))
    _quantization(model, options)
    cache, pair = options["prompt_cache"], None
    ids = encode(tokenizer, prompt)
    if not ids and options.get("input_embeddings") is None:
        raise ValueError(_NOTHING_TO_RUN)
    anchor: list[int] = []
    if cache is not None and is_pair_cache(cache):
        if draft_model is not None:
            raise CacheError(
                "expected a prompt cache without a DFlash drafter's part; found one with it. Pass that drafter as draft_model, "
                "or make_prompt_cache(model, draft_model)."
            )
        pair = PairCache.read(cache)
        anchor = pair.ids[pair.rows :]
        if len(pair.target) != len(mlx_lm_cache.make_prompt_cache(model)):
            raise CacheError(
                f"expected a prompt cache of {len(mlx_lm_cache.make_prompt_cache(model))} target entries; found "
                f"{len(pair.target)}. Make it with make_prompt_cache(model)."
            )
        if anchor and options["logits_processors"]:
            # With a drafter they do not see it either: it belongs to the turn before.
            options = {**options, "logits_processors": [_without(len(anchor), p) for p in options["logits_processors"]]}
    prompt = mx.array(anchor + ids) if ids else mx.array(ids)
    if seed is not None:
        choose_seed(seed)
    if draft_model is None and options["sampler"] is not None and not isinstance(options["sampler"], KeyedSampler):
        embeddings = options.get("input_embeddings")
        # Entries of a recurrence alone do not say how many rows they have seen: there, a text that goes on begins at 0 again.
        held = pair.rows if pair else next((e.offset for e in leaves(cache or []) if hasattr(e, "offset")), 0)
        start = held + max(prompt.size, 0 if embeddings is None else len(embeddings))
        options = {**options, "sampler": KeyedSampler(options["sampler"], choose_seed(seed), start)}
    steps = mlx_lm_stream_generate(
        model, tokenizer, prompt, max_tokens=max_tokens, draft_model=draft_model, stream=stream, **options
    )

    def respond() -> Generator[GenerationResponse, None, None]:
        if pair:
            # From here on the list is the target's alone, as mlx-lm's.
            cache[:] = pair.target
        with closing(steps):
            for response in steps:
                if evaluate:
                    mx.eval(response.logprobs)
                yield GenerationResponse(**{**vars(response), "prompt_tokens": response.prompt_tokens - len(anchor)})

    return respond()


def _without(n: int, processor: LogitsProcessor) -> LogitsProcessor:
    """A processor that does not see the first n tokens of a run."""
    return lambda tokens, logits: processor(tokens[n:], logits)
