"""The public face of generation: mlx-lm's functions, with a DFlash drafter as `draft_model`.

Turns the tokens of `loop` into responses with text, counts and rates. `options` checks the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse as MlxLmResponse
from mlx_lm.generate import generation_stream
from mlx_lm.models import cache as mlx_lm_cache

from .constraint import Constraint, Grammar
from .errors import GenerationError
from .exact import exact_pair
from .loop import Run, Step, generate_steps, make_run
from .machine import open_stream, wired_limit
from .models.drafter import Drafter
from .options import RunOptions, check_draft_model
from .pair import DFlashPair, check_window, make_pair_cache
from .plain import plain_responses
from .proposers import Proposer
from .responses import GenerationResponse, Responder
from .sampling import LogitsProcessor, Sampler
from .stats import figures_of
from .text import TextStream


def make_prompt_cache(model: nn.Module, draft_model: nn.Module | None = None, max_kv_size: int | None = None) -> list[Any]:
    """An empty prompt cache: mlx-lm's for the target alone, one list for both with a drafter.

    The list holds only mlx-lm's own cache classes, so `mlx_lm.models.cache.save_prompt_cache` and `load_prompt_cache` carry
    it. It remembers committed ids, so a later call passes new tokens only, as in mlx-lm.

    Raises:
      CacheError: if the target has a cache kind that cannot be rolled back, if max_kv_size is given for a target that makes its
        own caches (mlx-lm would ignore it), or if it is too small for a block.
    """
    check_draft_model(draft_model)
    if isinstance(draft_model, Drafter):
        return make_pair_cache(model, draft_model, max_kv_size)
    check_window(model, max_kv_size)
    target = mlx_lm_cache.make_prompt_cache(model, max_kv_size)
    return target if draft_model is None else target + mlx_lm_cache.make_prompt_cache(draft_model, max_kv_size)


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
    prompt_lookup: bool | None = None,
    proposers: Sequence[Proposer] | None = None,
    constraint: Grammar | Constraint | None = None,
    text_stream: TextStream | None = None,
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
    exact: bool = False,
    copy: bool | None = None,
) -> Generator[GenerationResponse, None, None]:
    """Generate text, one response a token: `mlx_lm.stream_generate` with a DFlash drafter as `draft_model`.

    Args beyond mlx-lm's:
      draft_model: what `load_drafter` returned for this model object. None: mlx-lm's own loop; so with an ordinary mlx-lm model.
      prompt_cache: from `make_prompt_cache`. One that was used with a drafter can go on without it, and is then the target's
        alone. Copy or save it only after its stream has ended or was closed: an earlier copy is refused.
      block_size: tokens per block, the anchor included; 1: no drafting. None: passes are timed once on this machine, and each
        round verifies the number of drafts that is fastest, which may be none. `num_draft_tokens` is the same minus one.
      seed: keys the noise of `sampler` by (seed, position), so the text does not depend on the drafter; None draws one.
      acceptance: "match" keeps the drafts that equal the target's own draws. "rejection" and "block" draw the drafts too; the
        text for a seed then depends on drafter and block size, and `sampler` is a `sampling.Distribution`.
      prompt_lookup: also draft by copying what followed the last tokens earlier. None: where faster, without a block_size.
      proposers: your own draft sources (`proposers.Proposer`), asked before each round.
      constraint: what the answer may say, such as `constraint.json_schema(schema)`. Tokens that it forces need no drafter pass.
      text_stream: the detokenizer; None: `TextStream(tokenizer, prompt)`.
      logprobs: evaluate each response's `logprobs` now (needed when another thread reads it); else it is lazy.
      exact: ids and log-probabilities have the same bits with any drafter or none, any block size and prompt lookup, on a GPU
        too. Options that rule this out are refused. Without a drafter, too, our own loop runs, and there are `stats`.
      keep_rounds: False keeps only a summary in `stats`, for long runs. copy: the old name of prompt_lookup.
    Without a sampler it is greedy, as mlx-lm is. Logits processors see committed tokens only, and cost one wait per token.

    Raises:
      GenerationError, CacheError, PairError: an option that cannot be honoured, before anything runs.
      ValueError: max_tokens 0 or an empty prompt, as in mlx-lm.
    """
    options = RunOptions(**locals())
    if not (exact or isinstance(draft_model, Drafter)):
        return _respond_plainly(plain_responses(options), logprobs)
    pair = exact_pair(options) if exact else DFlashPair.of(options.check_drafter())
    target, prompt = pair.prepare_target(), options.prompt_ids
    cache = pair.open_cache(prompt_cache, max_kv_size)
    options.check_prompt(target, cache)
    cache = pair.prepare_cache(cache, options)
    run = make_run(options, pair, cache)
    if prompt_cache is not None:
        # Nothing was refused: a fresh list from mlx-lm's own make_prompt_cache gets the drafter's part.
        prompt_cache[:] = cache.entries
        cache.entries = prompt_cache
    return _respond(run, cache.register_writer(generate_steps(run, prompt)))


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
        print(f"\n{'=' * 10}\n{figures_of(response)}")
    return text


def _respond(run: Run, steps: Iterator[Step]) -> Generator[GenerationResponse, None, None]:
    options = run.options
    with open_stream(), wired_limit([options.model, options.draft_model], options.stream), ExitStack() as at_end, closing(steps):
        at_end.callback(lambda: options.warn_of_unused_kv_bits(len(run.cache.ids)))
        at_end.callback(run.counter.finish)
        responder = Responder(run, options.prompt_ids)
        for step in steps:
            # At the last token this closes the steps, so the caches are settled before the caller sees it.
            response = responder.respond(step, steps.close)
            yield response
            if response.finish_reason:
                run.drafter.model.pair.after_answer()
                return
    # No finish reason: the call that read this prompt cache next has closed the steps (`PairCache.read`).
    raise GenerationError(
        "a later call uses this stream's prompt cache, so this stream cannot go on",
        "Give each stream a prompt cache of its own",
    )


def _respond_plainly(
    steps: Iterator[tuple[MlxLmResponse, str, int]], logprobs: bool
) -> Generator[GenerationResponse, None, None]:
    with open_stream(), closing(steps):
        for response, piece, prompt_tokens in steps:
            if logprobs:
                mx.eval(response.logprobs)
            yield GenerationResponse(**{**vars(response), "text": piece, "prompt_tokens": prompt_tokens})
