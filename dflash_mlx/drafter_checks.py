"""Warnings for runs in which a drafter cannot help much. Only a prompt beyond the target's context is refused."""

from __future__ import annotations

import warnings

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .errors import GenerationError
from .models.drafter import Drafter
from .models.target import Target
from .text import prompt_thinking

# A drafter with fewer accepted drafts per round than this, over this many rounds, is probably the wrong one.
FEW_ACCEPTED, _JUDGED = 0.1, 50


def check_context(target: Target, drafter: Drafter, prompt_tokens: int, max_tokens: int) -> None:
    """Refuse a prompt longer than the target's context; warn if the run may exceed the drafter's.

    Raises:
      GenerationError: the prompt alone is longer than the target's context.
    """
    length, drafters = target.context_length, drafter.config.max_position_embeddings
    if length is not None and prompt_tokens > length:
        raise GenerationError(
            f"the prompt has {prompt_tokens} tokens; the context of {target.family} holds at most {length}", "Shorten it"
        )
    if drafters is not None and prompt_tokens + max(max_tokens, 0) > drafters:
        warnings.warn(
            f"the drafter was made for {drafters} tokens of context and this run may reach {prompt_tokens + max(max_tokens, 0)}: "
            "beyond that the text is right, but fewer drafts are accepted",
            stacklevel=4,
        )


def check_template(drafter: Drafter, tokenizer: TokenizerWrapper, ids: list[int]) -> None:
    """Warn if the prompt's enable_thinking differs from the drafter's training."""
    if drafter.stated_thinking is None:
        return
    setting, where = drafter.stated_thinking
    if prompt_thinking(tokenizer, ids) == (not setting):
        warnings.warn(
            f"thinking is {'off' if setting else 'on'}, but this drafter was trained {'with' if setting else 'without'} it "
            f"({where}): the text is right, but slower than it could be. Use {'--thinking' if setting else '--no-thinking'} "
            f"(enable_thinking={setting} in the chat template)",
            stacklevel=4,
        )


def warn_of_overflow(drafter: Drafter, features: mx.array) -> None:
    """Warn if these features overflow in the drafter: NaN rows draft token 0, and nothing else shows it."""
    if features.dtype != mx.float16:
        return
    if fault := drafter.first_not_finite(features):
        warnings.warn(
            f"the drafter's values overflow float16 in {fault[0]}: the text stays right and nothing that it drafts is accepted; "
            "load the target with bfloat16 or float32",
            stacklevel=5,
        )


def warn_of_few_accepted(drafter: Drafter, rounds: int, accepted: int) -> None:
    """Count more of the drafter's rounds, and warn once if next to none of its drafts are accepted: nothing else shows it."""
    judged = drafter.pair.judged
    judged.update(rounds=rounds, accepted=accepted)
    if judged["rounds"] < _JUDGED or judged["accepted"] >= FEW_ACCEPTED * judged["rounds"] or judged["said"]:
        return
    judged["said"] = 1
    warnings.warn(
        f"the drafter guessed {judged['accepted']} tokens right in {judged['rounds']} attempts: the text is right, but slower "
        "than it could be. Unless the temperature is high, the drafter is damaged or made for another model: "
        "dflash-mlx doctor checks it",
        stacklevel=5,
    )


def largest_block(drafter: Drafter) -> int:
    """The largest block that may be asked for: far larger than is useful, but no request then takes minutes."""
    return max(4 * drafter.config.block_size, 64)
