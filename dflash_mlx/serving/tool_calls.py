"""Tool calls in the text that a target writes: which grammars there are, and how a call is read.

Reading is mlx-lm's tool parsers'. `CALLS` holds the grammars that mlx-lm's wrapper lacks. Knows no streams: `channels` finds
where a call begins and ends.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.tool_parsers.qwen3_coder import parse_tool_call as parse_xml_call


@dataclass
class Call:
    """A tool call as a client gets it; arguments is the text of a JSON object."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: str(uuid.uuid4()))


def _json_calls(text: str, tools: Any) -> Any:
    return json.loads(text.strip().removesuffix("<|eom_id|>").removesuffix("<|eot_id|>"))


def _single_key_calls(text: str, tools: Any) -> Any:
    return [{"name": name, "arguments": value} for call in json.loads(text) for name, value in call.items()]


def _deepseek_calls(text: str, tools: Any) -> Any:
    body = (
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(.+?)"
        r"(?:\s*```json\s*|<｜tool▁sep｜>)(.*?)(?:\s*```)?\s*<｜tool▁call▁end｜>"
    )
    calls = [{"name": name.strip(), "arguments": arguments} for name, arguments in re.findall(body, text, re.DOTALL)]
    if not calls or re.sub(body, "", text, flags=re.DOTALL).strip():
        raise ValueError("not all of it is calls")
    return calls


_CALL_ID = re.compile(r"\[CALL_ID\]\s*(\w+)\s*(?=\[ARGS\])")


def mistral_calls(read: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """mlx-lm's parser of `name[ARGS]{...}`, for `name[CALL_ID]id[ARGS]{...}` too: it takes the id for the name."""

    def read_with_ids(text: str, tools: Any) -> Any:
        ids, parsed = _CALL_ID.findall(text), read(_CALL_ID.sub("", text), tools)
        calls = parsed if isinstance(parsed, list) else [parsed]
        return [{**call, "id": id} for call, id in zip(calls, ids, strict=True)] if len(ids) == len(calls) else parsed

    return read_with_ids


# (start, end, reader) of tool calls that mlx-lm's wrapper does not know; "" ends with the answer.
CALLS: tuple[tuple[str, str, Callable[[str, Any], Any]], ...] = (
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek_calls),
    ("<seed:tool_call>", "</seed:tool_call>", parse_xml_call),
    ("<|START_ACTION|>", "<|END_ACTION|>", _json_calls),
    ("<|tools_prefix|>", "<|tools_suffix|>", _single_key_calls),
    ("<|tool_call|>", "<|/tool_call|>", _json_calls),
    ("<TOOLCALL>", "</TOOLCALL>", _json_calls),
    ("<tool_call>", "</tool_call>", _json_calls),
    ("<|tool_call|>", "", _json_calls),
    ("<|python_tag|>", "", _json_calls),
)


def read_calls(parsed: Any) -> list[Call]:
    """Calls from what a parser gives: an object or a list of them.

    Arguments may be an object or its text, absent or null: then there are none.

    Raises:
      ValueError: one of them has no name, or its arguments are no JSON object. Then none of them is a call.
    """
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls:
        raise ValueError("there is no call in it")
    return [_read_call(call) for call in calls]


def _read_call(call: Any) -> Call:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = {**call, **call["function"]}
    name = (call.get("name") or call.get("tool_name")) if isinstance(call, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call has no name")
    arguments = next((call[key] for key in ("arguments", "parameters") if call.get(key) is not None), {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text = text.strip() or "{}"
    if not isinstance(json.loads(text), dict):
        raise ValueError("its arguments are no object")
    given = call.get("id") or call.get("tool_call_id")
    return Call(name.strip(), text, given) if isinstance(given, str) else Call(name.strip(), text)


def tried(read: Callable[[], Any], written: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
    """The calls, or none where they cannot be read: parsers raise what they like on what a target may write.

    Others take anything for a call. So a name must be one that was offered or written.
    """
    try:
        calls = read_calls(read())
    except Exception:  # noqa: BLE001 - KeyError, AttributeError, RecursionError and others of mlx-lm's parsers
        return []
    known = [made.get("name") for tool in tools if isinstance(made := tool.get("function", tool), dict)]
    names = [name for call in calls for name in {call.name, *_UNREAD.intersection(json.loads(call.arguments))}]
    stand = all(name in known or name in written or json.dumps(name)[1:-1] in written for name in names)
    return calls if stand and all(_NAME.fullmatch(call.name) for call in calls) else []


# The argument under which mlx-lm's glm47 and laguna give what they could not read.
_UNREAD = {"raw"}
# Of a function: no blanks, and no letters of JSON, of marks or of Python calls; no end tag.
_NAME = re.compile(r"""(?!/)[^\s{}\[\]()<>"'=|,]+""")


# A value in a call: between tags, between marks as Gemma's, or quoted.
_VALUE = re.compile(
    r"""<((?:\w+:)?param(?:eter)?|\w*arg_value)\b[^>]*>.*?(?:</\1>|(?=<\1\b)|\Z)"""
    r"""|(<\|"\|>|<escape>).*?(?:\2|\Z)|(["'])(?:\\.|(?!\3)[^\\])*(?:\3|\Z)""",
    re.DOTALL,
)


def open_value(text: str, end: str) -> str:
    """The value within which this text of a call ends, from its opening on; "" where none is open.

    A value that runs over the end of a call into the tags of the next one is open too: it was never closed.
    """
    behind = "\0"
    for found in _VALUE.finditer(text + behind):
        torn = found[1] and end and end in found[0] and not found[0].endswith(f"</{found[1]}>")
        if torn or found[0].endswith(behind):
            return found[0]
    return ""
