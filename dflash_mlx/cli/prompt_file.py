"""`generate --prompt-cache-file`: a beginning that was read before, by `mlx_lm.cache_prompt` or with a drafter.

As mlx-lm does it: the prompt is what the chat template writes from the user's text on; what stands in front is in the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CacheError, DFlashError
from .inputs import refuse_without_template
from .output import count, say

# Stands in the user's place to find where that begins; mlx-lm's own.
_QUERY = "<query>"


@dataclass
class PromptFile:
    """A prompt cache from a file. rows: tokens that it holds; model: the name under which it was made, None if it says none."""

    name: str
    entries: list[Any]
    rows: int
    model: str | None

    def check(self, model: str | None, kv_bits: int | None) -> str | None:
        """The model to run. Raises: DFlashError, CacheError: it was made with another, or in other bits."""
        from ..pairs.published import base_name

        if model is not None and self.model is not None and base_name(model) != base_name(self.model):
            raise CacheError(
                f"{self.name} was made with {self.model}, and --model is {model}", "Give the model that it was made with"
            )
        bits = {entry.bits for entry in self.entries if hasattr(entry, "bits")}
        if kv_bits is not None and bits and bits != {kv_bits}:
            raise CacheError(f"{self.name} holds {bits.pop()} bits, and --kv-bits is {kv_bits}", "Leave --kv-bits out")
        if model is None and self.model is not None:
            say(f"Model: {self.model}, which {self.name} was made with.")
        return model or self.model

    def open(self, model: Any, drafter: Any) -> list[Any]:
        """The cache for a run, and a word on what it holds."""
        from ..pair import adopt_cache
        from ..prompt_cache import is_pair_cache

        says = f"{self.name} holds {count(self.rows, 'token')}"
        if drafter is None or is_pair_cache(self.entries):
            say(f"{says}: they are not read again.")
            return self.entries
        say(f"{says}, read without a drafter: drafting starts from what follows.")
        return adopt_cache(model, drafter, self.entries)


def read_prompt_file(name: str) -> PromptFile:
    """A file by its path, or by its name among those of the cache directory.

    Raises:
      OSError: it cannot be read. CacheError: it is no prompt cache.
    """
    from ..machine import cache_directory
    from ..prompt_files import read_cache_file
    from ..tools.stored import PROMPT_CACHES

    path = Path(os.path.expanduser(name))
    kept = cache_directory() / PROMPT_CACHES / f"{name.removesuffix('.safetensors')}.safetensors"
    if not path.exists() and os.sep not in name and kept.exists():
        path = kept
    try:
        entries, metadata, rows = read_cache_file(path)
    except CacheError as error:
        if error.problem.startswith("no prompt cache"):
            raise CacheError(f"{name} is {error.problem}", error.remedy) from None
        raise
    return PromptFile(name, entries, rows, metadata.get("model"))


def encode_query(
    tokenizer: Any, prompt: str, raw: bool, template_args: Mapping[str, Any], prefill: str | None = None
) -> list[int]:
    """What follows a beginning that a file holds, as mlx-lm's generate makes it.

    Raises:
      DFlashError: what belongs to a chat template without one, or a template that changes the user's text.
    """
    if raw or not tokenizer.has_chat_template:
        refuse_without_template({"--prefill-response": prefill, "--chat-template-args": template_args or None})
        return list(tokenizer.encode(prompt, add_special_tokens=False))
    end = {"add_generation_prompt": True} if prefill is None else {"add_generation_prompt": False, "continue_final_message": True}

    def write(said: str) -> str:
        messages = [{"role": "user", "content": said}]
        messages += [{"role": "assistant", "content": prefill}] if prefill is not None else []
        return tokenizer.apply_chat_template(messages, tokenize=False, **end, **template_args)

    at = write(_QUERY).find(_QUERY)
    if at < 0:
        raise DFlashError("--prompt-cache-file needs a chat template that keeps the user's text; this one does not", "Give --raw")
    return list(tokenizer.encode(write(prompt)[at:], add_special_tokens=False))
