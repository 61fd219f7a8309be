"""Prompts of `dflash-mlx bench`: the package's own by kind, or a user's file; the text before a prompt of a long context; and how
a prompt is rendered."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ..chat_template import without_effect
from ..errors import DFlashError


class BenchError(DFlashError, ValueError):
    """Prompts or records that cannot be used."""


@dataclass(frozen=True)
class Prompts:
    """Prompts by kind, and what the text before a prompt of a long context is made of."""

    source: str
    kinds: Mapping[str, Sequence[str]]
    before: Mapping[str, Any]

    def text(self, kind: str, number: int) -> str:
        return self.kinds[kind][number % len(self.kinds[kind])]

    def filler(self, tokens: int, count: Callable[[str], int], seed: int) -> str:
        """About `tokens` tokens of text, the same for a seed everywhere; `count` says how many tokens a text has."""
        rng, parts, left = random.Random(seed), [self.before["opening"]], tokens
        while left > 0:
            words = {name: rng.choice(values) for name, values in self.before["words"].items()}
            line = Template(rng.choice(self.before["lines"])).substitute(words, n=rng.randint(2, 99), m=rng.randint(2, 12)) + "\n"
            parts.append(line)
            left -= count(line)
        return "".join([*parts, self.before["closing"]])

    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.kinds, self.before], sort_keys=True).encode()).hexdigest()[:16]


def builtin_prompts(chat: bool) -> Prompts:
    """The package's own prompts: questions, or beginnings of Python source for a model without a chat template."""
    name = "chat" if chat else "source"
    raw = json.loads(resources.files("dflash_mlx").joinpath(f"prompts/{name}.json").read_text(encoding="utf-8"))
    return Prompts(f"built-in {name}", raw["kinds"], raw["before"])


def read_prompts(path: str, chat: bool) -> Prompts:
    """A user's file: JSON lines {"prompt": ..., "kind": ...}, kind optional, or one plain prompt a line.

    Raises:
      BenchError: the file holds no prompt, or a line of it is JSON without one.
    """
    kinds: dict[str, list[str]] = {}
    for number, line in enumerate(Path(path).expanduser().read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        one = {"prompt": line}
        if line.lstrip().startswith("{"):
            try:
                one = json.loads(line)
            except ValueError as error:
                raise BenchError(f"line {number} of {path} is no JSON: {error}", "Correct it") from None
        text, kind = one.get("prompt"), one.get("kind", "own")
        if not isinstance(text, str) or not text or not isinstance(kind, str):
            raise BenchError(
                f'line {number} of {path} is {line[:60]!r}; it must be {{"prompt": TEXT, "kind": NAME}}', "Correct it"
            )
        kinds.setdefault(kind, []).append(text)
    if not kinds:
        raise BenchError(f"{path} holds no prompts", "Write one a line")
    return Prompts(str(path), kinds, builtin_prompts(chat).before)


def stated_thinking(tokenizer: Any, drafter: Any) -> tuple[bool, str] | None:
    """`drafter.stated_thinking`; None where there is no drafter, or the chat template does not read enable_thinking."""
    stated = getattr(drafter, "stated_thinking", None)
    return None if stated is None or without_effect(tokenizer, ["enable_thinking"]) else stated


def chat_ids(tokenizer: Any, text: str, drafter: Any = None) -> list[int]:
    """A user's message as a prompt, through the chat template where there is one.

    drafter: its prompt thinks or not as this drafter was trained, where that is stated.
    """
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(text))
    stated, messages = stated_thinking(tokenizer, drafter), [{"role": "user", "content": text}]
    extra = {"enable_thinking": stated[0]} if stated else {}
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, **extra))
