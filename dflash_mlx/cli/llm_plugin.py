"""The models of this package for the command `llm`: `llm -m dflash/smollm2 "Write a haiku."`, `llm chat -m dflash/smollm2`.

`llm` imports this by the entry point of its group. Loads a pair at its first prompt and keeps it, and what its answers computed,
while `llm` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields
from typing import Any

import llm
from pydantic import Field, create_model

from ..errors import DFlashError
from ..sampling_settings import SamplingSettings

# Beside the sampling settings; what they may be is checked where they are used.
_MORE = {
    "max_tokens": (int | None, "Maximum tokens per answer; -1: no limit. Default: 1024."),
    "block_size": (int | None, "Tokens of a block, the last known one included. Default: what is fastest here."),
    "thinking": (bool | None, "Turn a reasoning model's thinking on or off (enable_thinking)."),
    "json_object": (bool | None, "Hold the answer to one JSON object."),
}


def _options() -> type[llm.Options]:
    known = {one.name: (one.metadata["kind"] | None, one.metadata["help"]) for one in fields(SamplingSettings)} | _MORE
    made = {name: (kind, Field(default=None, description=about)) for name, (kind, about) in known.items()}
    return create_model("DFlashOptions", __base__=llm.Options, **made)


class DFlashModel(llm.Model):
    """A target with the drafter that is known for it."""

    can_stream = supports_schema = True
    Options = _options()

    def __init__(self, target: str):
        self.target, self.model_id = target, f"dflash/{target}"
        self._talk: Any = None

    def __str__(self) -> str:
        return f"DFlash: {self.model_id}"

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        """Yield an answer's text as it comes. Thinking is left out.

        Raises:
          DFlashError: options or messages that the pair cannot take.
        """
        talk = self._talk = self._talk or self._load()
        from ..serving.answer_grammar import read_answer
        from ..serving.conversation import Settings

        given = {name: value for name, value in prompt.options.model_dump().items() if value is not None}
        held = {
            "json_schema": prompt.schema,
            "response_format": {"type": "json_object"} if given.pop("json_object", False) else None,
        }
        talk.demand = read_answer({name: value for name, value in held.items() if value})
        before = [one for one in conversation.responses if one is not response] if conversation else []
        systems = [text for one in (*(one.prompt for one in before), prompt) if (text := one.system)]
        if systems and talk.raw:
            raise DFlashError("this tokenizer has no chat template, so there is no place for a system prompt", "Leave it out")
        talk.settings, talk.system = Settings(**given), systems[-1] if systems else None
        talk.settings.check_pair(talk.vocabulary, talk.largest)
        talk.messages = []
        for one in before:
            talk.messages.append({"role": "user", "content": one.prompt.prompt})
            talk.messages.append({"role": "assistant", "content": one.text()})
        talk.messages.append({"role": "user", "content": prompt.prompt})
        with closing(talk.answer(lambda: False, lambda done, total: None)) as pieces:
            for kind, text, _ in pieces:
                if kind == "answer" and text:
                    yield text
        if (last := talk.last) is not None:
            response.set_usage(input=last.prompt_tokens, output=last.generation_tokens)

    def _load(self) -> Any:
        from .inputs import load_pair
        from .live import live
        from .output import only_ours_on_stdout

        with only_ours_on_stdout(), live("Starting"):
            from ..serving.conversation import Conversation, Pair

            return Conversation(Pair(*load_pair(self.target, "auto", None, None, None, False)), {})


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    from ..pairs.builtin import BUILTIN_PAIRS
    from ..pairs.published import PUBLISHED

    for target in dict.fromkeys([*BUILTIN_PAIRS, *(pair.target for pair in PUBLISHED)]):
        register(DFlashModel(target))
