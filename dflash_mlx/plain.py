"""Generation without a DFlash drafter: mlx-lm's own loop, plain or with an ordinary draft model, under our seeds and our text."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing

import mlx.core as mx
from mlx_lm.generate import GenerationResponse as MlxLmResponse
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import make_prompt_cache

from .constraint import ConstraintError, ConstraintProcessor, Guide, begin_constraint
from .errors import CacheError
from .models.parts import token_embedding
from .options import RunOptions, check_ids
from .prompt_cache import PairCache, is_pair_cache
from .rollback import leaves
from .sampling import KeyedSampler, LogitsProcessor, choose_seed
from .shares import ranks_of
from .text import TextStream

# What mlx-lm's own `stream_generate` is given where it was given here.
_PASSED_ON = (
    *("prefill_step_size", "max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start"),
    *("prompt_progress_callback", "num_draft_tokens", "input_embeddings"),
)


def plain_responses(options: RunOptions) -> Iterator[tuple[MlxLmResponse, str, int]]:
    """mlx-lm's responses; with each the text that its token adds, and the prompt's tokens without those that a cache held.

    Plain sampling goes through keyed noise, so that `seed` works. A prompt cache that a drafter was used with goes on as the
    target's alone.

    Raises:
      GenerationError, CacheError: an option that cannot be honoured, before anything runs.
    """
    options.check_plain()
    quantization, ids = options.quantization, options.prompt_ids
    if (table := token_embedding(options.model)) is not None:
        check_ids(ids, table.weight.shape[0])
    given = {name: value for name in _PASSED_ON if (value := getattr(options, name)) is not None}
    given |= {name: getattr(options, name) for name in ("sampler", "logits_processors", "prompt_cache")}
    pair = _read_pair(options)
    anchor = pair.ids[pair.rows :] if pair else []
    if anchor and given["logits_processors"]:
        # With a drafter they do not see it either: it belongs to the turn before.
        given["logits_processors"] = [_without(len(anchor), processor) for processor in given["logits_processors"]]
    if options.constraint is not None:
        if options.draft_model is not None:
            raise ConstraintError(
                "a constraint was given with an mlx-lm draft model, which knows none", "Leave one of the two out"
            )
        held = ConstraintProcessor(Guide(begin_constraint(options.constraint, options.tokenizer)))
        given["logits_processors"] = [*(given["logits_processors"] or ()), held]
    if options.seed is not None:
        choose_seed(options.seed)
    prompt = mx.array(anchor + ids) if ids else mx.array(ids)
    # Entries of a recurrence alone do not say how many rows they have seen: there, a text that goes on begins at 0 again.
    held = pair.rows if pair else next((e.offset for e in leaves(options.prompt_cache or []) if hasattr(e, "offset")), 0)
    rows = held + max(prompt.size, 0 if options.input_embeddings is None else len(options.input_embeddings))
    sampler = options.sampler
    if options.draft_model is None and sampler is not None and not isinstance(sampler, KeyedSampler):
        given["sampler"] = KeyedSampler(sampler, choose_seed(options.seed), rows)
    if (ranks := ranks_of(options.model)) is not None:
        given["sampler"] = ranks.sampler(given["sampler"])
    text = options.text_stream or TextStream(options.tokenizer, [*(pair.ids if pair else []), *ids])
    models = {"draft_model": options.draft_model, "stream": options.stream, "max_tokens": options.max_tokens}
    steps = stream_generate(options.model, options.tokenizer, prompt, **models, **given)

    def respond() -> Generator[tuple[MlxLmResponse, str, int], None, None]:
        if pair:
            # From here on the list is the target's alone, as mlx-lm's.
            options.prompt_cache[:] = pair.target
        response = None
        try:
            with closing(steps):
                for response in steps:
                    piece = "" if response.finish_reason == "stop" else text.feed(response.token)
                    piece += text.finish() if response.finish_reason is not None else ""
                    yield response, piece, response.prompt_tokens - len(anchor)
        finally:
            if quantization:
                options.warn_of_unused_kv_bits(rows + (response.generation_tokens if response else 0))

    return respond()


def _read_pair(options: RunOptions) -> PairCache | None:
    """The prompt cache, if a drafter was used with it.

    Raises:
      CacheError: it does not fit the target, or an ordinary draft model is to go on with it.
    """
    if options.prompt_cache is None or not is_pair_cache(options.prompt_cache):
        return None
    if options.draft_model is not None:
        raise CacheError(
            "the prompt cache has a DFlash drafter's part and draft_model is an ordinary model",
            "Pass that drafter as draft_model, or make a cache with make_prompt_cache(model, draft_model)",
        )
    pair, wanted = PairCache.read(options.prompt_cache), len(make_prompt_cache(options.model))
    if len(pair.target) != wanted:
        raise CacheError(
            f"the prompt cache has {len(pair.target)} target entries; this target needs {wanted}",
            "Make it with make_prompt_cache(model)",
        )
    return pair


def _without(n: int, processor: LogitsProcessor) -> LogitsProcessor:
    """A processor that does not see the first n tokens of a run."""
    return lambda tokens, logits: processor(tokens[n:], logits)
