"""Tool calls while they are written: name first, then the arguments' letters as they come.

What was sent cannot be taken back. So a call begins only once its name is an offered one and its arguments are an open JSON
object. Grammars: JSON objects, `name[ARGS]{...}` and its like, `<function=...><parameter=...>`.
Calls of other grammars come whole, at their end. Reading a whole call is `tool_calls`'.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tool_parsers.qwen3_coder import _convert_param_value as convert_value

from .call_texts import Reader, Types, as_meant, is_text, names_of, types_of
from .tool_calls import Call, is_json, parse_xml_call


@dataclass
class Part:
    """Part of a call: its beginning, then letters of its arguments. A call whose arguments are closed is followed by no more."""

    call: Call | None = None
    arguments: str = ""


class LiveCalls:
    """The calls in one stretch of text between marks. begun: how many were let go."""

    def __init__(self, tools: Sequence[dict[str, Any]]):
        self.tools, self.names = tools, set(names_of(tools))
        self.begun = 0

    def feed(self, text: str) -> list[Part]:
        """The parts that these letters complete."""
        return []

    def finish(self) -> list[Part]:
        """What is held of a value that was cut off."""
        return []

    def rest(self) -> str:
        """The text behind what was let go, if it is no part of a call; "" if marks alone stand there."""
        return ""

    def _begin(self, name: str, id: str | None = None) -> Part:
        self.begun += 1
        return Part(Call(name, "", id) if id else Call(name, ""))


def live_calls(read: Reader, start: str, tools: Sequence[dict[str, Any]]) -> LiveCalls:
    """What follows the calls of a grammar: of a reader and of the mark that starts them."""
    if is_json(read):
        return JsonCalls(tools)
    if read is parse_xml_call:
        return XmlCalls(tools)
    return HeadedCalls(tools) if start in ("[TOOL_CALLS]", "<|tool_calls_section_begin|>") else LiveCalls(tools)


class JsonObject:
    """Finds the end of a JSON object that has begun."""

    def __init__(self) -> None:
        self.depth, self._within, self._escaped = 0, False, False

    def feed(self, text: str) -> int:
        """How many of these letters belong to it; fewer than all: it is closed after them."""
        for at, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._within:
                self._within, self._escaped = letter != '"', letter == "\\"
            elif letter == '"':
                self._within = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if not self.depth:
                    return at + 1
        return len(text)


class HeadedCalls(LiveCalls):
    """A name, a mark, and an object: `ls[ARGS]{...}`, `functions.ls:0<|tool_call_argument_begin|>{...}`."""

    # What may stand between two calls.
    _BETWEEN = r"\s*(?:(?:\[TOOL_CALLS\]|<\|tool_call_end\|>|<\|tool_call_begin\|>)\s*)*"
    _HEAD = re.compile(
        _BETWEEN + r"(?:functions\.)?([\w./:-]{1,128}?)(?::\d+)?\s*(?:\[CALL_ID\]\s*(\w+)\s*)?"
        r"(?:\[ARGS\]|<\|tool_call_argument_begin\|>)\s*(?=\{)"
    )

    def __init__(self, tools: Sequence[dict[str, Any]]):
        super().__init__(tools)
        self._held, self._object = "", None

    def feed(self, text: str) -> list[Part]:
        parts, self._held = [], self._held + text
        while self._held:
            if self._object is None:
                found = self._HEAD.match(self._held)
                if found is None or found[1] not in self.names:
                    return parts
                parts.append(self._begin(found[1], found[2]))
                self._held, self._object = self._held[found.end() :], JsonObject()
            count = self._object.feed(self._held)
            parts.append(Part(arguments=self._held[:count]))
            self._held = self._held[count:]
            if not self._object.depth:
                self._object = None
        return parts

    def rest(self) -> str:
        return "" if re.fullmatch(self._BETWEEN, self._held) else self._held


class JsonCalls(LiveCalls):
    """`{"name": "ls", "arguments": {...}}`. Not lists: only their end shows whether all entries are calls."""

    def __init__(self, tools: Sequence[dict[str, Any]]):
        super().__init__(tools)
        self._depth, self._key, self._name, self._value = 0, None, None, False
        self._string: str | None = None
        self._escaped, self._object = False, None
        # The letters of an object so far, without its arguments' own; behind: those after its arguments.
        self._object_text, self._behind = "", ""

    def feed(self, text: str) -> list[Part]:
        parts, at = [], 0
        while at < len(text):
            if self._object is not None:
                count = self._object.feed(text[at:])
                parts.append(Part(arguments=text[at : at + count]))
                at += count
                if not self._object.depth:
                    self._object, self._object_text, self._behind = None, self._object_text + "{}", ""
                continue
            if self._take(text[at]):
                parts.append(self._begin(self._name))
                self._object = JsonObject()
                continue
            self._object_text += text[at]
            self._behind += text[at]
            at += 1
        return parts

    def rest(self) -> str:
        return "" if self._object else self._behind.lstrip(" \n\r\t};")

    def _is_sound(self, end: str) -> bool:
        """Whether the object is JSON with this end."""
        try:
            return isinstance(json.loads(self._object_text + end), dict)
        except ValueError:
            return False

    def _take(self, letter: str) -> bool:
        """Whether arguments begin with this letter."""
        if self._string is not None:
            self._in_string(letter)
        elif letter == '"':
            self._string = ""
        elif letter in "{[":
            wanted = letter == "{" and self._depth == 1 and self._value and self._key in ("arguments", "parameters")
            if wanted and self._name in self.names and self._is_sound("{}}"):
                self._value = False
                return True
            if not self._depth:
                # Another call in a row.
                self._key, self._name, self._object_text = None, None, ""
            # Within a list no depth is a call's.
            self._depth += 1 if letter == "{" else 1000
        elif letter in "}]":
            self._depth -= 1 if letter == "}" else 1000
            if not self._depth and not self._is_sound("}"):
                # What comes next may be no call either.
                self.names = set()
        elif self._depth == 1 and letter in ":,":
            self._value = letter == ":"
        return False

    def _in_string(self, letter: str) -> None:
        if not self._escaped and letter == '"':
            text, self._string = self._string, None
            if self._depth == 1:
                if not self._value:
                    self._key = text
                elif self._key == "name":
                    self._name = text
            return
        self._escaped = letter == "\\" and not self._escaped
        self._string += letter


class XmlCalls(LiveCalls):
    """`<function=ls><parameter=path>...</parameter></function>`: texts as they come, other values at their end."""

    _FUNCTION, _PARAMETER = (re.compile(rf"\s*<{kind}=\s*([^\s<>]+)>") for kind in ("function", "parameter"))
    _CLOSE = "</parameter>"

    def __init__(self, tools: Sequence[dict[str, Any]]):
        super().__init__(tools)
        self._held, self._name, self._key, self._first, self._open = "", None, None, True, False
        self._types: Types = {}

    def feed(self, text: str) -> list[Part]:
        parts, self._held = [], self._held + text
        while True:
            if self._key is not None:
                more = self._in_value(parts)
            else:
                more = self._between(parts)
            if not more:
                return [part for part in parts if part.call or part.arguments]

    def _between(self, parts: list[Part]) -> bool:
        """Outside of values: a call begins, a parameter begins, or a call ends."""
        if self._name is None:
            found = self._FUNCTION.match(self._held)
            if found is None or found[1] not in self.names:
                return False
            self._name, self._first, self._held = found[1], True, self._held[found.end() :]
            self._types = types_of(self._name, self.tools)
        found, end = self._PARAMETER.match(self._held), self._held.find("</function>")
        if found is not None:
            self._key, self._open = found[1], False
            self._held = self._held[found.end() :]
            if self._first:
                parts.append(self._begin(self._name))
            parts.append(Part(arguments=("{" if self._first else ", ") + json.dumps(found[1], ensure_ascii=False) + ": "))
            self._first = False
            return True
        if end < 0:
            return False
        if self._first:
            # Without parameters it is not known before the end whether it is a call, so it comes whole.
            return self._whole_call(self._held[:end].strip() or "{}", end, parts)
        if self._held[:end].strip():
            return False
        parts.append(Part(arguments="}"))
        self._name, self._held = None, self._held[end + len("</function>") :]
        return True

    def _whole_call(self, arguments: str, end: int, parts: list[Part]) -> bool:
        """A call without parameters, if its arguments are an object all the same."""
        try:
            if not isinstance(json.loads(arguments), dict):
                return False
        except ValueError:
            return False
        parts += [self._begin(self._name), Part(arguments=arguments)]
        self._name, self._held = None, self._held[end + len("</function>") :]
        return True

    def _in_value(self, parts: list[Part]) -> bool:
        end = self._held.find(self._CLOSE)
        if end >= 0:
            value, self._held = self._held[:end], self._held[end + len(self._CLOSE) :]
            value = value if self._open else value.removeprefix("\n")
            parts.append(Part(arguments=self._whole(value.removesuffix("\n"))))
            self._key = None
            return True
        # A line end before the close is no part of it, nor is what may begin the close; "null" is no text.
        settled = self._held[: -len(self._CLOSE) - 1]
        if self._is_text() and (self._open or len(settled) > len("\nnull")):
            self._held = self._held[len(settled) :]
            letters = json.dumps(settled if self._open else settled.removeprefix("\n"), ensure_ascii=False)[1:-1]
            parts.append(Part(arguments=letters if self._open else '"' + letters))
            self._open = True
        return False

    def finish(self) -> list[Part]:
        if self._key is None:
            return []
        letters = json.dumps(self._held if self._open else self._held.removeprefix("\n"), ensure_ascii=False)[1:-1]
        self._held = ""
        return [Part(arguments=letters if self._open else '"' + letters)]

    def rest(self) -> str:
        head = f"<function={self._name}>" if self._name and self._first else ""
        return head + self._held if head or self._held.strip() else ""

    def _is_text(self) -> bool:
        return is_text(self._types.get(self._key))

    def _whole(self, value: str) -> str:
        """A value that is closed, or the rest of an open text with its quote."""
        if self._open:
            return json.dumps(value, ensure_ascii=False)[1:]
        read = as_meant(value, convert_value(value, self._key, {}), self._types.get(self._key))
        return json.dumps(read, ensure_ascii=False, allow_nan=False)
