"""What is asked of a run before it begins: options and prompts that cannot be honoured are refused, doubtful ones warned of."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .errors import CacheError, GenerationError
from .models.drafter import Drafter
from .models.target import Target, family
from .prompt_cache import KVQuantization
from .text import prompt_thinking


def encode(tokenizer: TokenizerWrapper, prompt: str | mx.array | Sequence[int]) -> list[int]:
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


def check_ids(ids: list[int], target: Target) -> None:
    """Refuse ids without a row in the embedding: MLX reads whatever lies there, and -1 reads the last row."""
    rows = target.vocabulary
    wrong = [i for i in ids if not 0 <= i < rows]
    if wrong:
        raise GenerationError(
            f"expected prompt token ids from 0 to {rows - 1}; found {wrong[:5]}. Encode the prompt with this model's tokenizer."
        )


def check_draft_model(draft_model: Any) -> None:
    """Refuse what is no model, such as a path or, in mlx-lm's order of arguments, a size."""
    if draft_model is not None and not isinstance(draft_model, nn.Module):
        raise GenerationError(
            f"expected draft_model as load_drafter or load returns it; found {draft_model!r}. Load it first; other arguments go "
            "by name."
        )


def check_window(model: nn.Module, max_kv_size: int | None) -> None:
    """Refuse a window for a target that makes its own caches: mlx-lm would ignore it.

    Raises:
      CacheError: names the target.
    """
    if max_kv_size is not None and hasattr(model, "make_cache"):
        raise CacheError(
            f"expected no max_kv_size; found {max_kv_size}. {family(model)} sizes its caches itself, so the number "
            "would have no effect: leave it out."
        )


def block_size_of(drafter: Drafter, block_size: int | None, num_draft_tokens: int | None) -> int | None:
    """The block size that was asked for, checked; None: any."""
    if num_draft_tokens is not None:
        if block_size is not None and block_size != num_draft_tokens + 1:
            raise GenerationError(
                f"expected block_size to be num_draft_tokens + 1; found {block_size} and {num_draft_tokens}. Give one of them."
            )
        block_size = num_draft_tokens + 1
    if block_size is None:
        return None
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


def check_context(target: Target, drafter: Drafter, prompt_tokens: int, max_tokens: int) -> None:
    """Refuse a prompt beyond the target's positions; warn, once a text, where the drafter's end first.

    Raises:
      GenerationError: the prompt alone is longer than the target's context.
    """
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


def warn_of_overflow(drafter: Drafter, features: mx.array) -> None:
    """Say so where these features overflow in the drafter: NaN rows draft token 0 and nothing else shows."""
    if features.dtype != mx.float16:
        return
    if fault := drafter.first_not_finite(features):
        warnings.warn(
            f"the drafter's values overflow float16 in {fault[0]}: the text stays right and nothing that it drafts is accepted; "
            "load the target with bfloat16 or float32",
            stacklevel=5,
        )


def check_template(drafter: Drafter, tokenizer: TokenizerWrapper, ids: list[int]) -> None:
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


def check_kv_quantization(model: nn.Module, quantization: KVQuantization, cache: list[Any]) -> None:
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
            f"{quantization.group_size}; {family(model)} fails with it ({error}). Leave kv_bits out."
        ) from None
