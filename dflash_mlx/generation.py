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
    """An empty prompt cache. With a drafter, one list holds the entries of both models.

    The list holds only mlx-lm's own cache classes, so `mlx_lm.models.cache.save_prompt_cache` and `load_prompt_cache` work with
    it. It remembers committed ids, so a later call passes new tokens only, as in mlx-lm.

    Raises:
      CacheError: the target has a kind of cache that cannot be rolled back; or max_kv_size is given for a target that makes its
        own caches (mlx-lm would ignore it), or is too small for a block.
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
      draft_model: what `load_drafter` returned for this model object. With None or an ordinary mlx-lm model, mlx-lm's loop runs.
      prompt_cache: from `make_prompt_cache`. After a run with a drafter it can be used without one; from then on it is the
        target's alone. Copy or save it only when its stream has ended or was closed: a copy made earlier is refused.
      block_size: tokens per block, the anchor included; 1: no drafting. None: passes are timed once on this machine, and each
        round verifies the number of drafts that is fastest, which may be none. `num_draft_tokens` is block_size - 1.
      seed: keys the noise of `sampler` by (seed, position), so the text does not depend on the drafter. None: a random seed.
      acceptance: "match" keeps the drafts that equal the target's own draws. "rejection" and "block" sample the drafts too: the
        text for a seed then depends on drafter and block size, and `sampler` must be a `sampling.Distribution`.
      prompt_lookup: also draft by copying what followed the last tokens earlier. None: if faster, and no block_size is given.
      proposers: your own draft sources (`proposers.Proposer`). Each is asked before every round.
      constraint: restricts the answer, such as `constraint.json_schema(schema)`. Tokens that it forces need no drafter pass.
      text_stream: the detokenizer; None: `TextStream(tokenizer, prompt)`.
      logprobs: evaluate each response's `logprobs` at once (needed if another thread reads it). False: it stays lazy.
      exact: ids and log-probabilities have the same bits with any drafter or none, any block size and prompt lookup, on a GPU
        too. Options that rule this out are refused. Our own loop then runs without a drafter too, and gives `stats`.
      keep_rounds: False keeps only a summary in `stats`, for long runs. copy: the old name of prompt_lookup.
    Without a sampler, decoding is greedy, as in mlx-lm. Logits processors see committed tokens only, and cost one wait per token.

    Raises:
      GenerationError, CacheError, PairError: an option that cannot be honoured, before anything runs.
      ValueError: max_tokens 0 or an empty prompt, as in mlx-lm.
    """
    options = RunOptions(**locals())  # must come first: locals() are then the arguments and nothing else
    if not (exact or isinstance(draft_model, Drafter)):
        return _respond_plainly(plain_responses(options), logprobs)
    pair = exact_pair(options) if exact else DFlashPair.of(options.check_drafter())
    target, prompt = pair.prepare_target(), options.prompt_ids
    cache = pair.open_cache(prompt_cache, max_kv_size)
    options.check_prompt(target, cache)
    cache = pair.prepare_cache(cache, options)
    run = make_run(options, pair, cache)
    if prompt_cache is not None:
        # Only now, when nothing was refused, the caller's list gets the drafter's entries, if mlx-lm's own function made it.
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
            # At the last token the responder closes the steps, so the caches are settled before the caller gets the response.
            response = responder.respond(step, steps.close)
            yield response
            if response.finish_reason:
                run.drafter_proposer.model.pair.after_answer()
                return
    # The steps ended without a finish reason: a later call that reads this prompt cache has closed them (`PairCache.read`).
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
