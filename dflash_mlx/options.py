"""Checks the arguments of a run before it starts: raises for those that cannot work, and warns of those that may not help."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.models.cache import make_prompt_cache as make_target_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .drafter_checks import check_context, check_template, largest_block
from .errors import GenerationError, PairError
from .models.drafter import Drafter
from .models.target import Target
from .pair import check_window
from .prompt_cache import KVQuantization, PairCache
from .sampling_settings import check_max_tokens
from .text import TextStream, encode


@dataclass
class RunOptions:
    """The arguments of `stream_generate`, by name. The constructor raises for what is wrong with or without a drafter."""

    model: nn.Module
    tokenizer: Any
    prompt: str | mx.array | list[int]
    max_tokens: int
    draft_model: nn.Module | None
    stream: Any
    block_size: int | None
    seed: int | None
    sampler: Any
    logits_processors: Sequence[Any] | None
    acceptance: str
    prompt_lookup: bool | None
    proposers: Sequence[Any] | None
    constraint: Any
    text_stream: TextStream | None
    prompt_cache: list[Any] | None
    logprobs: bool
    keep_rounds: bool
    prefill_step_size: int | None
    max_kv_size: int | None
    kv_bits: int | None
    kv_group_size: int | None
    quantized_kv_start: int | None
    prompt_progress_callback: Callable[[int, int], None] | None
    num_draft_tokens: int | None
    input_embeddings: mx.array | None
    exact: bool = False
    copy: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tokenizer, TokenizerWrapper):
            self.tokenizer = TokenizerWrapper(self.tokenizer)
        check_draft_model(self.draft_model)
        if self.max_tokens == 0 and self.max_tokens is not False:
            raise ValueError("Maximum number of tokens must be non-zero (use -1 for no limit).")
        check_max_tokens(self.max_tokens)
        if self.copy is not None:
            warnings.warn(
                "copy= is now prompt_lookup=; copy= will be removed in the next release", DeprecationWarning, stacklevel=4
            )
            self.prompt_lookup = self.copy if self.prompt_lookup is None else self.prompt_lookup
        for name, least in (("prefill_step_size", 1), ("max_kv_size", 1), ("quantized_kv_start", 0)):
            if (value := getattr(self, name)) is not None and (type(value) is not int or value < least):
                raise GenerationError(f"{name} is {value!r}; it must be a whole number of at least {least}", "Leave it out")
        for name, default in (("kv_group_size", 64), ("quantized_kv_start", DEFAULT_QUANTIZED_KV_START)):
            # mlx-lm's defaults are accepted: programs written for it pass them without kv_bits.
            if self.kv_bits is None and (value := getattr(self, name)) not in (None, default):
                raise GenerationError(f"{name} is {value!r} without kv_bits", "Give kv_bits or leave it out")
        if self.num_draft_tokens is not None and self.draft_model is None:
            warnings.warn(f"num_draft_tokens={self.num_draft_tokens} has no effect without a draft_model", stacklevel=4)
        if self.max_kv_size is not None and self.prompt_cache is not None:
            raise GenerationError(
                f"max_kv_size is {self.max_kv_size} and there is a prompt_cache, whose size was set when it was made",
                f"Give max_kv_size={self.max_kv_size} to make_prompt_cache instead",
            )
        self.progress: Callable[[int, int], None] = self.prompt_progress_callback or (lambda *_: None)

    @functools.cached_property
    def prompt_ids(self) -> list[int]:
        """The prompt as token ids. Raises: ValueError, as in mlx-lm, if there is nothing to run."""
        ids = encode(self.tokenizer, self.prompt)
        if not ids and self.input_embeddings is None:
            raise ValueError("Either input_embeddings or prompt (or both) must be provided.")
        return ids

    @property
    def uses_prompt_lookup(self) -> bool:
        """On by default if a draft-length policy runs, which can compare it with the drafter and plain decoding."""
        default = self.block_size is None and self.acceptance == "match"
        return default if self.prompt_lookup is None else self.prompt_lookup

    @functools.cached_property
    def quantization(self) -> KVQuantization | None:
        """How to quantize the KV cache (`kv_bits` and the options beside it). It is first tried on three rows.

        Raises:
          GenerationError: mlx-lm cannot run this target with it.
        """
        if self.kv_bits is None:
            return None
        start = DEFAULT_QUANTIZED_KV_START if self.quantized_kv_start is None else self.quantized_kv_start
        quantization = KVQuantization(self.kv_bits, self.kv_group_size or 64, start)
        quantization.check(self.model, make_target_cache(self.model, self.max_kv_size))
        return quantization

    def check_plain(self) -> None:
        """Refuse options that need a DFlash drafter, and options that mlx-lm's own loop would ignore.

        Raises:
          GenerationError, CacheError: names the option.
        """
        needs_drafter = {
            "acceptance": self.acceptance if self.acceptance != "match" else None,
            "prompt_lookup": self.prompt_lookup or None,
            "proposers": self.proposers or None,
            "block_size": self.block_size,
        }
        for name, value in needs_drafter.items():
            if value is not None:
                raise GenerationError(f"{name} is {value!r} and there is no DFlash drafter, which it needs", "Leave it out")
        if self.draft_model is not None:
            if self.seed is not None:
                raise GenerationError(
                    f"seed is {self.seed} with an mlx-lm draft model, whose draws depend on what was drafted", "Leave it out"
                )
            for name in ("max_kv_size", "prompt_progress_callback"):
                if (value := getattr(self, name)) is not None:
                    raise GenerationError(f"{name} is {value!r} with an mlx-lm draft model; mlx-lm would drop it", "Leave it out")
        check_window(self.model, self.max_kv_size)

    def check_drafter(self) -> Drafter:
        """The DFlash drafter. Refuses options that cannot run with it, and sets `block_size`.

        Raises:
          GenerationError, PairError: names the option.
        """
        if self.input_embeddings is not None:
            raise GenerationError(
                "input_embeddings were given with a DFlash drafter, which needs token ids",
                "Pass a prompt, or run without a drafter",
            )
        if self.draft_model.target is not self.model:
            raise PairError("this drafter was loaded for another model object", "Call load_drafter(path, model)")
        self.block_size = block_size_of(self.draft_model, self.block_size, self.num_draft_tokens)
        for name, value in (("prompt_lookup", self.prompt_lookup), ("proposers", self.proposers)):
            if value and self.acceptance != "match":
                # The other rules need the distribution that a draft was drawn from, and copied drafts have none.
                raise GenerationError(
                    f"{name} was given with acceptance={self.acceptance!r}; it works with 'match' only",
                    "Leave one of the two out",
                )
            if value and self.block_size == 1:
                raise GenerationError(
                    f"{name} was given with a block_size of 1, which drafts nothing",
                    "Leave one of the two out, or give at least 2",
                )
        return self.draft_model

    def check_prompt(self, target: Target, cache: PairCache) -> None:
        """Refuse a prompt that, with what the cache holds, is too long for the target; warn if it is too long for the drafter."""
        check_ids(self.prompt_ids, target.vocabulary)
        check_context(target, self.draft_model, len(cache.ids) + len(self.prompt_ids), self.max_tokens)
        check_template(self.draft_model, self.tokenizer, self.prompt_ids)

    def warn_of_unused_kv_bits(self, rows: int) -> None:
        """Warn at the end of a run of `rows` tokens if `kv_bits` had no effect."""
        if self.quantization and rows <= self.quantization.start:
            warnings.warn(
                f"kv_bits={self.kv_bits} had no effect: a cache is quantized from row {self.quantization.start} on and this run "
                f"ended at {rows}; lower quantized_kv_start",
                stacklevel=3,
            )


def check_ids(ids: list[int], rows: int) -> None:
    """Refuse ids without a row in the embedding. MLX does not check: it reads other memory, and for -1 the last row."""
    wrong = [i for i in ids if not 0 <= i < rows]
    if wrong:
        raise GenerationError(
            f"the prompt has token ids {wrong[:5]}; this target's are 0 to {rows - 1}",
            "Encode the prompt with this model's tokenizer",
        )


def check_draft_model(draft_model: Any) -> None:
    """Refuse what is not a model, such as a path."""
    if draft_model is not None and not isinstance(draft_model, nn.Module):
        raise GenerationError(
            f"draft_model is {draft_model!r}; it must be what load_drafter or load returns",
            "Load it first, and pass other arguments by keyword",
        )


def block_size_of(drafter: Drafter, block_size: int | None, num_draft_tokens: int | None) -> int | None:
    """The block size that the user gave, checked; None: the policy chooses."""
    if num_draft_tokens is not None:
        if block_size is not None and block_size != num_draft_tokens + 1:
            raise GenerationError(
                f"block_size is {block_size} and num_draft_tokens is {num_draft_tokens}; block_size must be one more",
                "Give one of them",
            )
        block_size = num_draft_tokens + 1
    if block_size is None:
        return None
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise GenerationError(f"block_size is {block_size!r}; it must be a whole number of at least 1 (it counts the anchor)")
    if block_size > (limit := largest_block(drafter)):
        raise GenerationError(
            f"block_size is {block_size}; this drafter was made for blocks of {drafter.config.block_size}, and a pass over "
            f"more than {limit} could take minutes",
            f"Give at most {limit}",
        )
    return block_size
