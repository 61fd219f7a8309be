"""The round loop: prefill, then draft -> verify -> accept -> commit until EOS or max_tokens.

The only module that sees the target's and the drafter's caches at once. Knows no files and no terminals.
Read `_rounds` first: it is the whole method. `stream_generate` puts text and counts round it, as mlx-lm's does.
"""

from __future__ import annotations

import time
import warnings
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

from .accept import accept_block, accept_match, accept_rejection
from .cache import Checkpoint, KVQuantization, PairCache, check_rollback, checkpoint, is_pair_cache, rollback
from .drafter import Drafter
from .errors import CacheError, GenerationError, PairError
from .kernels.choice import NotFiniteError
from .memory import wired_limit
from .sampling import Distribution, KeyedSampler, LogitsProcessor, Sampler, choose_seed, process, sample_at
from .stats import GenerationStats
from .taps import Target
from .text import prompt_thinking
from .verify import logprobs, verify_block


@dataclass
class GenerationResponse(MlxLmResponse):
    """mlx-lm's response for one token, plus `stats`: the run's `GenerationStats` so far, None without a DFlash drafter."""

    stats: GenerationStats | None = None


def make_prompt_cache(model: nn.Module, draft_model: nn.Module | None = None, max_kv_size: int | None = None) -> list[Any]:
    """An empty prompt cache: mlx-lm's for the target alone, one list for both with a drafter.

    The list holds only mlx-lm's own cache classes, so `mlx_lm.models.cache.save_prompt_cache` and `load_prompt_cache` carry
    it. It remembers committed ids, so a later call passes new tokens only, as in mlx-lm.

    Raises:
      CacheError: if the target has a cache kind that cannot be rolled back, or with a DFlash drafter max_kv_size is given for a
        target that makes its own caches (mlx-lm would ignore it).
    """
    target = mlx_lm_cache.make_prompt_cache(model, max_kv_size)
    if draft_model is None:
        return target
    if not isinstance(draft_model, Drafter):
        return target + mlx_lm_cache.make_prompt_cache(draft_model, max_kv_size)
    if max_kv_size is not None and hasattr(model, "make_cache"):
        raise CacheError(
            f"expected no max_kv_size; found {max_kv_size}. {Target(model).family} sizes its caches itself, so the number "
            "would have no effect: leave it out."
        )
    check_rollback(target, Target(model).family)
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
      prompt_cache: a list that a drafter was used with goes on without one too; it is then the target's alone.
      block_size: slots drafted in a round, the anchor included; None: the drafter config's; 1: no drafting.
        `num_draft_tokens` is the same less one.
      seed: keys the noise of `sampler` by (seed, position), so the text does not depend on the drafter; None draws one.
      acceptance: "match" keeps the drafts that equal the target's own draws. "rejection" and "block" draw the drafts too and keep
        more of them; the text for a seed then depends on drafter and block size, and `sampler` is a `sampling.Distribution`.
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
    if not isinstance(draft_model, Drafter):
        if acceptance != "match":
            raise GenerationError(f"expected a DFlash drafter for acceptance; found {acceptance!r} without one. Leave it out.")
        given |= {"sampler": sampler, "logits_processors": logits_processors, "prompt_cache": prompt_cache}
        return _mlx_lm(model, tokenizer, prompt, max_tokens, draft_model, stream, block_size, seed, logprobs, given)
    if max_tokens == 0:
        raise ValueError("Maximum number of tokens must be non-zero (use -1 for no limit).")
    if input_embeddings is not None:
        raise GenerationError(
            "expected no input_embeddings with a DFlash drafter; they were given. The drafter needs token ids: pass a prompt, or "
            "run without a drafter."
        )
    if max_kv_size is not None and prompt_cache is not None:
        raise GenerationError(
            f"expected max_kv_size or prompt_cache; found both. Pass max_kv_size = {max_kv_size} to make_prompt_cache instead."
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
    stats = GenerationStats(_block_size(draft_model, block_size, num_draft_tokens), keep_rounds)
    ids = _encode(tokenizer, prompt)
    if not ids:
        raise ValueError("Either input_embeddings or prompt (or both) must be provided.")
    _check_ids(ids, model)
    if prompt_cache is None:
        prompt_cache = make_prompt_cache(model, draft_model, max_kv_size)
    elif not is_pair_cache(prompt_cache) and all(entry.empty() for entry in prompt_cache):
        # A fresh list from mlx-lm's own make_prompt_cache gets the drafter's part added in place.
        check_rollback(prompt_cache, Target(model).family)
        prompt_cache[:] = PairCache.make(list(prompt_cache), draft_model.make_cache())
    pair = PairCache.read(prompt_cache)
    n_target = len(mlx_lm_cache.make_prompt_cache(model))
    if len(pair.drafter) != len(draft_model.layers) or len(pair.target) != n_target:
        raise CacheError(
            f"expected a prompt cache of {n_target} target and {len(draft_model.layers)} drafter entries; found "
            f"{len(pair.target)} and {len(pair.drafter)}. Make it with make_prompt_cache(model, draft_model)."
        )
    _check_context(model, draft_model, len(pair.ids) + len(ids), max_tokens)
    _check_template(draft_model, tokenizer, ids)
    quantization = None
    if kv_bits is not None:
        # mlx-lm's defaults.
        start = DEFAULT_QUANTIZED_KV_START if quantized_kv_start is None else quantized_kv_start
        quantization = KVQuantization(kv_bits, kv_group_size or 64, start)
        _check_kv_quantization(model, quantization, mlx_lm_cache.make_prompt_cache(model, max_kv_size))
    chooser = _chooser(sampler, logits_processors or (), seed, acceptance)
    steps = _rounds(
        ids,
        model,
        draft_model,
        pair,
        stats,
        chooser,
        max_tokens,
        stream,
        prefill_step_size or 2048,
        prompt_progress_callback,
        quantization,
    )
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


# One step: (token, log-probabilities [V], whether the drafter proposed it).
Step = tuple[int, mx.array, bool]


def _rounds(
    prompt: list[int],
    model: nn.Module,
    drafter: Drafter,
    pair: PairCache,
    stats: GenerationStats,
    chooser: _Chooser,
    max_tokens: int,
    stream: Any,
    prefill_step_size: int,
    progress: Callable[[int, int], None] | None,
    quantization: KVQuantization | None,
) -> Iterator[Step]:
    """Yield committed tokens; every round is one drafter pass, one target pass and one wait for the device.

        ids (committed)      p0 ... pn  a | d1 d2 b         a: anchor, committed but not yet in the target's cache
        target cache rows    p0 ... pn    |                 after verify: + a d1 d2 d3..., rolled back to + a d1 d2
        drafter cache rows   p0 ... pm    |                 m <= n: the rows between are pending as features

    However this ends (EOS seen by the caller, closed generator, Ctrl-C, an error), `finally` leaves the pair of caches at
    exactly the tokens that were yielded.
    """
    target = Target(model, drafter.config.target_layer_ids)
    feed = pair.ids[pair.rows :] + prompt
    history = list(prompt)
    rows, pending, emitted = pair.rows, pair.features, 0
    injected, refused = rows - pair.pending, 0
    context = [entry.state for entry in pair.drafter]
    point = checkpoint(pair.target, rows)
    try:
        # Prefill: all but the last token in chunks, whose features go straight into the drafter's cache.
        total = len(feed)
        report = progress or (lambda *_: None)
        report(0, total)
        while len(feed) > 1:
            chunk = feed[: min(prefill_step_size, len(feed) - 1)]
            with mx.stream(stream):
                _, features = target(mx.array([chunk]), pair.target)
                features = _join(pending, features)
                drafter.inject(features, pair.drafter, injected)
                if quantization:
                    quantization.apply(pair)
                mx.eval([entry.state for entry in pair.entries[:-1]])
                mx.clear_cache()
            pair.ids = pair.ids[:rows] + chunk
            feed, done = feed[len(chunk) :], rows + len(chunk)
            # One statement, so that an interruption falls before or after it.
            rows, injected, pending, context = done, done, None, [entry.state for entry in pair.drafter]
            point = checkpoint(pair.target, rows)
            report(total - len(feed), total)
        with mx.stream(stream):
            nothing = mx.zeros((1, 0), dtype=mx.int32)
            features, _, _, token, row_logprobs = _verify(
                target, chooser, mx.array(feed), nothing, nothing, pair, point, history, rows
            )
        pair.ids = pair.ids[:rows] + feed
        rows, pending = rows + 1, _join(pending, features)
        point = checkpoint(pair.target, rows)
        report(total, total)
        steps: list[Step] = [(token, row_logprobs(0), False)]

        while True:
            # Hand out what the last round committed.
            for step in steps:
                pair.ids.append(step[0])
                history.append(step[0])
                emitted += 1
                yield step
                if emitted == max_tokens:
                    return
                if emitted % 256 == 1:
                    mx.clear_cache()

            width = stats.block_size - 1
            if quantization:
                # Plain decoding quantizes its cache after row start - 1, so no block may reach over that row.
                quantization.apply(pair)
                width = quantization.cut(rows, width)
            began = time.perf_counter()
            with mx.stream(stream):
                anchor = mx.array([pair.ids[-1]], dtype=mx.int32)
                if width:
                    drafted = chooser.draft(drafter, anchor, pending, pair.drafter, injected, stats.block_size)
                else:
                    # No drafting: the context stays injectable at the cost of the drafter's key and value products.
                    drafter.inject(pending, pair.drafter, injected)
                    drafted = nothing
                draft_s = None
                if width and stats.times_next_round:
                    mx.eval(drafted)
                    draft_s = time.perf_counter() - began
                point = checkpoint(pair.target, rows)
                features, ids, accepted, bonus, row_logprobs = _verify(
                    target, chooser, anchor, drafted, drafted[:, :width], pair, point, history, rows
                )
            stats.add_passes(time.perf_counter() - began, draft_s)

            # Commit the anchor and the accepted drafts; the bonus becomes the next anchor.
            began = time.perf_counter()
            injected, pending, context = rows, features[:, : accepted + 1], [entry.state for entry in pair.drafter]
            rows += accepted + 1
            with mx.stream(stream):
                rollback(pair.target, point, rows)
            stats.seconds["rollback"] += time.perf_counter() - began
            stats.add_round(ids, accepted, bonus, width)
            refused = 0 if accepted else refused + bool(width)
            if refused == _REFUSED:
                _warn_of_overflow(drafter, pending)
            tokens = [*ids[:accepted], bonus]
            steps = [(t, row_logprobs(i), i < accepted) for i, t in enumerate(tokens)]
    finally:
        # The last token handed out is the anchor: the target does not hold it.
        keep = min(rows, len(pair.ids) - 1) if emitted else rows
        with mx.stream(stream):
            rollback(pair.target, point, keep)
        if quantization:
            quantization.apply(pair)
        for entry, state in zip(pair.drafter, context, strict=True):
            # A sliding cache that an interrupted pass has moved lost its oldest rows: it gets its old arrays back.
            if isinstance(entry, mlx_lm_cache.KVCache):
                entry.trim(max(entry.offset - injected, 0))
            else:
                entry.state = state
        pair.features = pending[:, : keep - injected] if pending is not None and keep > injected else None
        pair.rows = keep
        pair.write()
        # What is lazy, such as a replayed state, is computed now: the cache may go on in another thread.
        mx.eval([entry.state for entry in pair.entries])


def _verify(
    target: Target,
    chooser: _Chooser,
    anchor: mx.array,
    drafted: mx.array,
    block: mx.array,
    pair: PairCache,
    point: Checkpoint,
    history: list[int],
    rows: int,
) -> tuple[mx.array, list[int], int, int, Callable[[int], mx.array]]:
    """One target pass over a block and what is accepted of it; both once more where one of our kernels was at fault.

    Returns: features of the pass, and what `_Chooser.match` returns.
    """
    while True:
        hidden, features = verify_block(target, anchor, block, pair.target, point)
        try:
            return features, *chooser.match(target, hidden, features, drafted, pair.drafter, history, rows + 1)
        except NotFiniteError:
            # The kernels are off now.
            rollback(pair.target, point, rows)
            point.rows = 0
            point.replays.clear()


class _Chooser:
    """Draws the target's token at each row of a block and matches the drafts with it."""

    def __init__(self, sampler: Sampler | None, processors: Sequence[LogitsProcessor], seed: int | None):
        self.sampler, self.processors = sampler, processors
        self.seed = choose_seed(seed) if sampler or seed is not None else 0

    def _choose(self, row: mx.array, position: int) -> mx.array:
        """[1, V] log-probabilities to the token [1] at an absolute position."""
        token = mx.argmax(row, axis=-1) if self.sampler is None else sample_at(self.sampler, self.seed, position, row)
        return token.astype(mx.int32)

    def draft(
        self, drafter: Drafter, anchor: mx.array, features: mx.array, cache: list[Any], start: int, block_size: int
    ) -> mx.array:
        """The drafter's likeliest tokens, as `Drafter.draft`.

        Drafts drawn with the target's own noise match no more often: tau 1.93 against 1.97 at temperature 0.7 and 1.48 against
        1.50 at 1, built-in pair tiny, 36 texts of 96 tokens (bench/acceptance_rules.py).
        """
        return drafter.draft(anchor, features, cache, start, block_size)

    def match(
        self,
        target: Target,
        hidden: mx.array,
        features: mx.array,
        drafted: mx.array,
        drafter_cache: list[Any],
        history: list[int],
        position: int,
    ) -> tuple[list[int], int, int, Callable[[int], mx.array]]:
        """Accept drafts while they equal the target's own choice; the round's one wait for the device is here.

        Shapes:
          - hidden: [1, N + 1, H]; drafted: [1, >= N]; row 0 chooses the token at absolute `position`, after `history`
        Returns: drafted ids, accepted, bonus, and a function from a row to its log-probabilities [V].
        """
        state = [entry.state for entry in drafter_cache]
        if self.processors:
            doubts = target.doubts(hidden)
            mx.eval(drafted, hidden, features, state, doubts)
            target.check([doubt.item() for doubt in doubts])
            return self._match_rows(target, hidden, drafted[0].tolist(), history, position)
        block, margin = drafted[:, : hidden.shape[1] - 1], None
        if self.sampler is None and (found := target.choices(hidden)):
            choices, margin = found
            accepted, bonus = accept_match(block, choices)
        else:
            accepted, bonus = self._accept(block, logprobs(target, hidden), position)
        doubts = target.doubts(hidden, margin)
        packed = mx.concatenate([drafted[0], accepted, bonus, *doubts])
        # Everything is enqueued; reading one small array is the only wait.
        mx.async_eval(packed, hidden, features, state)
        ids = packed.tolist()
        target.check([ids.pop() for _ in doubts])
        *ids, n, last = ids
        # Made again from the evaluated hidden row: the block's logits and the caches are not kept alive.
        return ids, n, last, lambda i: logprobs(target, hidden[:, i : i + 1])[0, 0]

    def _accept(self, drafted: mx.array, rows: mx.array, position: int) -> tuple[mx.array, mx.array]:
        """Drafts [1, N] and log-probabilities [1, N + 1, V] to accepted [1] and bonus [1]."""
        if self.sampler is None:
            choices = mx.argmax(rows, axis=-1).astype(mx.int32)
        else:
            choices = mx.stack([self._choose(rows[:, i], position + i) for i in range(rows.shape[1])], axis=1)
        return accept_match(drafted, choices)

    def _match_rows(
        self, target: Target, hidden: mx.array, ids: list[int], history: list[int], position: int
    ) -> tuple[list[int], int, int, Callable[[int], mx.array]]:
        """With processors: row by row and only as far as drafts are accepted, so a processor with memory sees what it would
        see in plain decoding."""
        context, rows = list(history), []
        width = hidden.shape[1] - 1
        for i in range(width + 1):
            row = process(self.processors, mx.array(context), target.head(hidden[:, i : i + 1])[:, 0])
            token = self._choose(row, position + i).item()
            rows.append(row[0])
            if i == width or token != ids[i]:
                break
            context.append(token)
        return ids, i, token, rows.__getitem__


class _Rejecter(_Chooser):
    """Draws the drafts from the drafter's own distribution and keeps them by a rule on both distributions."""

    def __init__(self, sampler: Distribution, seed: int | None, rule: Callable[..., tuple[mx.array, mx.array]]):
        super().__init__(sampler, (), seed)
        self.rule = rule

    def _keys(self, position: int) -> mx.array:
        """Three keys for a round whose first draft is at an absolute position: drafts, acceptance, bonus."""
        return mx.random.split(mx.random.key((self.seed << 32) | position), 3)

    def draft(
        self, drafter: Drafter, anchor: mx.array, features: mx.array, cache: list[Any], start: int, block_size: int
    ) -> mx.array:
        hidden = drafter.slots(anchor, features, cache, start, block_size)
        key = self._keys(start + features.shape[1] + 1)[0]
        # Kept for this round's `_accept`: drafts must be judged by what they were drawn from.
        drawn, *self._drawn_from = drafter.draw(hidden, anchor, self.sampler.probabilities, self.sampler.temp, key)
        return drawn

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


def _chooser(sampler: Sampler | None, processors: Sequence[LogitsProcessor], seed: int | None, acceptance: str) -> _Chooser:
    """Raises: GenerationError if the rule is unknown, or what it needs is not there."""
    if acceptance == "match":
        return _Chooser(sampler, processors, seed)
    if acceptance not in _RULES:
        raise GenerationError(f"expected acceptance to be match, {' or '.join(_RULES)}; found {acceptance!r}.")
    if not isinstance(sampler, Distribution):
        raise GenerationError(
            f"expected a dflash_mlx.sampling.Distribution as sampler for acceptance={acceptance!r}, which needs probabilities; "
            f"found {type(sampler).__name__}. Pass one, or leave acceptance out."
        )
    if processors:
        raise GenerationError(
            f"expected no logits_processors with acceptance={acceptance!r}; found some. They would see drafts that are not kept: "
            "leave one of the two out."
        )
    return _Rejecter(sampler, seed, _RULES[acceptance])


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
    cache, pair = options["prompt_cache"], None
    ids = _encode(tokenizer, prompt)
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
    if draft_model is None and options["sampler"] is not None:
        embeddings = options.get("input_embeddings")
        entries = pair.target if pair else cache or []
        held = next((entry.offset for entry in entries if hasattr(entry, "offset")), 0)
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


def _encode(tokenizer: TokenizerWrapper, prompt: str | mx.array | Sequence[int]) -> list[int]:
    """Token ids of a prompt; special tokens are added to text that does not begin with BOS, as in mlx-lm."""
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        return list(tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos)))
    ids = prompt.tolist() if isinstance(prompt, mx.array) else prompt
    if not isinstance(ids, (list, tuple)) or not all(isinstance(i, int) for i in ids):
        raise GenerationError(
            f"expected a prompt as text, a list of token ids or an array [T] of them; found {type(prompt).__name__}"
            f"{f' of shape {list(prompt.shape)}' if isinstance(prompt, mx.array) else ''}. Pass one prompt at a time."
        )
    return list(ids)


def _check_ids(ids: list[int], model: nn.Module) -> None:
    """Refuse ids without a row in the embedding: MLX reads whatever lies there, and -1 reads the last row."""
    rows = Target(model).vocabulary
    wrong = [i for i in ids if not 0 <= i < rows]
    if wrong:
        raise GenerationError(
            f"expected prompt token ids from 0 to {rows - 1}; found {wrong[:5]}. Encode the prompt with this model's tokenizer."
        )


def _block_size(drafter: Drafter, block_size: int | None, num_draft_tokens: int | None) -> int:
    if num_draft_tokens is not None:
        if block_size is not None and block_size != num_draft_tokens + 1:
            raise GenerationError(
                f"expected block_size to be num_draft_tokens + 1; found {block_size} and {num_draft_tokens}. Give one of them."
            )
        block_size = num_draft_tokens + 1
    if block_size is None:
        return drafter.config.block_size
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise GenerationError(f"expected block_size of at least 1 (it counts the anchor); found {block_size!r}.")
    if block_size > (limit := largest_block(drafter)):
        raise GenerationError(
            f"expected block_size of at most {limit}; found {block_size}. This drafter was made for blocks of "
            f"{drafter.config.block_size}, and a pass over so many rows could take minutes: give less."
        )
    return block_size


def largest_block(drafter: Drafter) -> int:
    """The most slots that a round may draft, the anchor included: far beyond what pays, so that no request takes minutes."""
    return max(4 * drafter.config.block_size, 64)


def _check_context(model: nn.Module, drafter: Drafter, prompt_tokens: int, max_tokens: int) -> None:
    """Refuse a prompt beyond the target's positions; warn, once a text, where the drafter's end first.

    Raises:
      GenerationError: the prompt alone is longer than the target's context.
    """
    target = Target(model)
    length, drafters = target.context_length, drafter.config.max_position_embeddings
    if length is not None and prompt_tokens > length:
        raise GenerationError(
            f"expected at most {length} tokens, the context of {target.family}; found a prompt of {prompt_tokens}. Shorten it."
        )
    if drafters is not None and prompt_tokens + max(max_tokens, 0) > drafters:
        warnings.warn(
            f"the drafter was made for {drafters} positions and this run may reach {prompt_tokens + max(max_tokens, 0)}: "
            "beyond them the text stays right and fewer drafts are accepted",
            stacklevel=3,
        )


# Rounds in a row without an accepted draft after which a float16 drafter is looked at.
_REFUSED = 4


def _warn_of_overflow(drafter: Drafter, features: mx.array) -> None:
    """Say so where these features overflow in the drafter: NaN rows draft token 0 and nothing else shows."""
    if features.dtype != mx.float16:
        return
    if fault := drafter.first_not_finite(features):
        warnings.warn(
            f"the drafter's values overflow float16 in {fault[0]}: the text stays right and nothing that it drafts is accepted; "
            "load the target with bfloat16 or float32",
            stacklevel=4,
        )


def _check_template(drafter: Drafter, tokenizer: TokenizerWrapper, ids: list[int]) -> None:
    """Warn, once a text, where the prompt has another setting of enable_thinking than the drafter was trained with."""
    if drafter.stated_thinking is None:
        return
    setting, where = drafter.stated_thinking
    if prompt_thinking(tokenizer, ids) == (not setting):
        warnings.warn(
            f"the drafter was trained {'with' if setting else 'without'} thinking ({where} says so) and this prompt has it "
            f"{'off' if setting else 'on'}: the text stays right and fewer drafts are accepted; render the prompt with "
            f"enable_thinking={str(setting).lower()}",
            stacklevel=3,
        )


def _check_kv_quantization(model: nn.Module, quantization: KVQuantization, cache: list[Any]) -> None:
    """Run three rows with a quantized cache, as plain decoding would, before anything else runs.

    Raises:
      GenerationError: mlx-lm cannot run this target with it.
    """
    try:
        for _ in range(3):
            logits = model(mx.zeros((1, 1), dtype=mx.int32), cache=cache)
            quantization.convert(cache, 0)
        mx.eval(logits)
    except Exception as error:
        raise GenerationError(
            f"expected a target whose caches mlx-lm can quantize to {quantization.bits} bits in groups of "
            f"{quantization.group_size}; {Target(model).family} fails with it ({error}). Leave kv_bits out."
        ) from None


def _join(pending: mx.array | None, features: mx.array) -> mx.array:
    """Feature rows [1, S, F] after those still pending."""
    return features if pending is None else mx.concatenate([pending, features], axis=1)
