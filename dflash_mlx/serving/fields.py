"""The fields of the three APIs: which are honoured, which change nothing, and which are refused.

One table. `docs/api.md` is made from it by `python -m dflash_mlx.serving.fields`; a test compares the two.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

from ..sampling_settings import SamplingSettings
from .errors import RequestError, shown

_log = logging.getLogger(__name__)
CHAT, TEXT, RESPONSES, MESSAGES = APIS = ("chat", "text", "responses", "messages")
ADDRESSES = {
    CHAT: "/v1/chat/completions",
    TEXT: "/v1/completions",
    RESPONSES: "/v1/responses",
    MESSAGES: "/v1/messages",
}
# The settings of `SamplingSettings`, under their names in a request.
SAMPLING = {{"temp": "temperature"}.get(one.name, one.name): one.name for one in fields(SamplingSettings)}
_OURS = {
    **{name: "as `--" + own.replace("_", "-") + "`" for name, own in SAMPLING.items()},
    "seed": "at most 64 bits, folded into 32 from 2^32 on; -1 draws one; the header `x-seed` returns it",
    "model": "one of the names of the served model",
    "draft_model": "the name of the served drafter",
    "stream": "",
    "logit_bias": "",
    "num_draft_tokens": "drafts per round; 0 turns drafting off",
}
_OF_OPENAI = {
    "n": "number of answers to each prompt, at most 16; with a seed, each answer takes the next seed",
    "stream_options": "`include_usage`",
    "stop": "a text or a list of texts; empty texts are ignored",
    "max_tokens": "-1 means no limit",
    "max_completion_tokens": "as `max_tokens`; if both are given, the smaller one counts",
    "logprobs": "",
    "top_logprobs": "up to 20",
}
_OF_TEMPLATES = {
    "chat_template_kwargs": "variables of the chat template",
    "reasoning_effort": "passed to the chat template, or it turns thinking on and off",
}
_TOOLS = (
    "functions; hosted tools are left out and named in `x-ignored-fields`; with `strict`, arguments are constrained to the schema"
)
_CHOICE = '"auto", "none", "required", a function, or `allowed_tools` (a part of the tools offered)'
_MANY_CALLS = "false allows at most one call"
# Rules for the form of an answer: one of these may be given.
_HELD = {
    "structured_outputs": "as in vLLM: one of `json`, `regex`, `choice`, `grammar`, `json_object`",
    "guided_json": "a JSON schema",
    "guided_regex": "a regular expression",
    "guided_choice": "a list of texts",
    "guided_grammar": "a grammar in Lark or GBNF",
    "json_schema": "as `guided_json`",
    "grammar": "as `guided_grammar`",
}
_FORMAT = "text, json_object or json_schema; [the answer is constrained to it](server.md#answers-that-match-a-schema)"
_DRAFTS = "[`drafts` of a choice](server.md#where-tokens-come-from) says where each token came from"
HONOURED: dict[str, dict[str, str]] = {
    CHAT: {
        "messages": "texts only",
        "tools": _TOOLS,
        "tool_choice": _CHOICE,
        "parallel_tool_calls": _MANY_CALLS,
        "response_format": _FORMAT,
        **_HELD,
        "role_mapping": "for models without a chat template",
        "show_drafts": _DRAFTS,
        **_OF_TEMPLATES,
        **_OF_OPENAI,
        **_OURS,
    },
    TEXT: {
        "prompt": "a text, token ids, or a list of these",
        "show_drafts": _DRAFTS,
        "response_format": _FORMAT,
        **_HELD,
        **_OF_OPENAI,
        **_OURS,
    },
    RESPONSES: {
        "input": "a text, or a list of items: messages, tool calls and their outputs, reasoning, `item_reference`",
        "instructions": "put before the input as a system message",
        "max_output_tokens": "",
        "previous_response_id": "one of the last 256 stored answers, until the server ends",
        "store": "false: the answer is not kept for `previous_response_id`",
        "reasoning": "`effort` as `reasoning_effort`",
        "tools": _TOOLS,
        "tool_choice": _CHOICE,
        "parallel_tool_calls": _MANY_CALLS,
        "text": "`format` as `response_format`; `verbosity` has no effect",
        **_HELD,
        "metadata": "returned with the answer",
        "truncation": '"disabled"; "auto" is refused',
        **_OF_TEMPLATES,
        **_OURS,
    },
    MESSAGES: {
        "messages": "texts, tool calls and their results, thinking; if the last message is the assistant's, it is continued",
        "system": "a text or text blocks",
        "max_tokens": "",
        "stop_sequences": "",
        "tools": _TOOLS,
        "tool_choice": '"auto", "none", "any" or a tool; `disable_parallel_tool_use`: at most one call',
        "output_config": "`effort` as `reasoning_effort`; `format`: a schema that the answer is constrained to",
        **_HELD,
        "thinking": "turns the template's thinking on and off; `budget_tokens` ends it",
        **_OF_TEMPLATES,
        **_OURS,
    },
}
# Fields that change no answer.
_SILENT = ("metadata", "service_tier", "user", "cache_prompt", "keep_alive")
# Options of samplers that are refused when they are turned on.
_SILENT_ALONE = ("dry_base", "dry_allowed_length", "dry_sequence_breakers", "mirostat_tau", "mirostat_eta")
_SILENT_OPENAI = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "store", "verbosity")
_SILENT_RESPONSES = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "include")
IGNORED: dict[str, tuple[str, ...]] = {
    CHAT: (*_SILENT, *_SILENT_ALONE, *_SILENT_OPENAI),
    TEXT: (*_SILENT, *_SILENT_ALONE, *_SILENT_OPENAI),
    RESPONSES: (
        *_SILENT[1:],
        *_SILENT_ALONE,
        *_SILENT_RESPONSES,
        *("client_metadata", "max_tool_calls", "stream_options"),
    ),
    MESSAGES: (
        *_SILENT,
        *_SILENT_ALONE,
        *("cache_control", "context_management", "diagnostics", "inference_geo", "speed"),
    ),
}
# Fields that ask for something this server cannot do, and the values that ask for nothing. A null always counts as left out.
_OFF = {"mirostat": (0,), "dry_multiplier": (0,), "typical_p": (1,), "tfs_z": (1,), "min_tokens": (0,), "ignore_eos": (False,)}
_NEVER = {name: () for name in ("adapters", "lora", "num_ctx")}
_MANY = {"best_of": (1,), "echo": (False,), "suffix": ("",)}
REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    CHAT: {
        **{name: () for name in ("audio", "function_call", "functions", "prediction", "web_search_options")},
        "modalities": (["text"],),
        "prompt": (),
        **_MANY,
        **_OFF,
        **_NEVER,
    },
    TEXT: {
        **{name: () for name in ("messages", "tools", "tool_choice", "chat_template_kwargs", "role_mapping")},
        **{name: () for name in ("reasoning_effort", "modalities", "audio", "prediction")},
        **_MANY,
        **_OFF,
        **_NEVER,
    },
    RESPONSES: {
        **{name: () for name in ("conversation", "prompt", "context_management", "image")},
        "background": (False,),
        "top_logprobs": (0,),
        **_OFF,
        **_NEVER,
    },
    MESSAGES: {"container": (), "mcp_servers": ([],), "n": (1,), **_OFF, **_NEVER},
}
_TOLD: set[tuple[str, str]] = set()


def sort_fields(body: Any, api: str) -> tuple[dict[str, Any], list[str]]:
    """The honoured fields of a body, without nulls, and the names that this server does not know.

    A number is whole however it is written: clients whose only numbers are floats send 256.0.

    Raises:
      RequestError: it is no object, or a field asks for what this server does not do.
    """
    if not isinstance(body, dict):
        raise RequestError(f"the body is of type {type(body).__name__}; it must be a JSON object", "Send an object")
    known, ignored = {}, []
    for name, value in body.items():
        if value is None or name in IGNORED[api]:
            continue
        if name in HONOURED[api]:
            known[name] = whole(value)
        elif name in REFUSED[api]:
            _check_neutral(name, whole(value), REFUSED[api][name])
        else:
            ignored.append(name)
    note_ignored(ignored, api)
    return known, ignored


def whole(value: Any) -> Any:
    """A whole number that came as a float; anything else as it is."""
    return int(value) if type(value) is float and value.is_integer() else value


def note_ignored(names: list[str], api: str) -> None:
    """Log what has no effect, each name once."""
    for name in names:
        if (api, name) not in _TOLD and len(_TOLD) < 1000:
            _TOLD.add((api, name))
            _log.warning("the field %r has no effect at %s: this server does not know it", name[:80], ADDRESSES[api])


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    if not any(type(value) is type(one) and value == one for one in neutral):
        remedy = f"Leave it out, or send {shown(neutral[-1])}" if neutral else "Leave it out"
        raise RequestError(f"{name} is {shown(value)}; this server cannot do that", remedy)


def table() -> str:
    """All fields in Markdown, a row each and a column for each API."""
    names = sorted({name for api in APIS for name in (*HONOURED[api], *IGNORED[api], *REFUSED[api])})
    lines = ["| field | " + " | ".join(f"`{ADDRESSES[api]}`" for api in APIS) + " |", "| --- " * (len(APIS) + 1) + "|"]
    lines += [f"| `{name}` | " + " | ".join(_cell(name, api) for api in APIS) + " |" for name in names]
    return "\n".join(lines)


def _cell(name: str, api: str) -> str:
    if name in HONOURED[api]:
        note = HONOURED[api][name]
        return f"honoured: {note}" if note else "honoured"
    if name in IGNORED[api]:
        return "ignored"
    if name in REFUSED[api]:
        neutral = " or ".join(f"`{shown(value)}`" for value in REFUSED[api][name])
        return f"refused unless {neutral}" if neutral else "refused"
    return "unknown"


if __name__ == "__main__":
    print(table())
