"""Calls as Gemma writes them: `call:NAME{KEY:VALUE,...}`, texts between marks of their own.

mlx-lm's parsers read names and keys of letters and digits alone, and FunctionGemma's ends an object at its first closing brace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Set
from typing import Any

from .call_texts import Types, read_as, types_of

_BLANKS = re.compile(r"\s*")
_NAME = re.compile(r"\s*,?\s*call:\s*([^\s{}]+)\s*(?=\{)")
# A key of another value ends it: something is missing between the two.
_BARE = re.compile(r"""\s*(?:(?!\s[A-Za-z_@][\w.-]*\s*:(?!//))[^,\]}"<>\n])+(?=[,\]}])""")


def gemma_reader(mark: str) -> Callable[[str, Any], list[dict[str, Any]]]:
    """A reader of calls. mark: stands on both sides of a text.

    The reader raises ValueError on anything else than calls.
    """
    return lambda text, tools: _Text(text, mark).calls(tools)


class _Text:
    """Reads values from a place in a text on."""

    def __init__(self, text: str, mark: str):
        self.text, self.mark, self.at = text, mark, 0

    def calls(self, tools: Any) -> list[dict[str, Any]]:
        calls = []
        while found := _NAME.match(self.text, self.at):
            self.at = found.end() + 1
            calls.append({"name": found[1], "arguments": self._object(types_of(found[1], tools))})
        if not calls or self.text[self.at :].strip():
            raise ValueError("not all of it is calls")
        return calls

    def _take(self, letters: str) -> bool:
        """Go on behind these letters, if they come next."""
        at = _BLANKS.match(self.text, self.at).end()
        if not self.text.startswith(letters, at):
            return False
        self.at = at + len(letters)
        return True

    def _value(self, types: Set[str] = frozenset()) -> Any:
        """A value. types: what a schema wants it to be; none: what is between marks is text, and anything else JSON or text."""
        if self._take(self.mark):
            text = self._until(self.mark)
            return read_as(text, types) if types and "string" not in types else text
        if self._take("{"):
            return self._object({})
        if self._take("["):
            return self._list()
        if self._take('"'):
            value, self.at = json.JSONDecoder().raw_decode(self.text, self.at - 1)
            return value
        found = _BARE.match(self.text, self.at)
        if found is None:
            raise ValueError("a value is missing")
        self.at = found.end()
        return read_as(found[0].strip(), types)

    def _until(self, letters: str) -> str:
        end = self.text.index(letters, self.at)
        value, self.at = self.text[self.at : end], end + len(letters)
        return value

    def _object(self, types: Types) -> dict[str, Any]:
        read: dict[str, Any] = {}
        while not self._take("}"):
            if read and not self._take(","):
                raise ValueError("something stands between two values")
            key = self._until(self.mark) if self._take(self.mark) else ""
            rest = self._until(":").strip()
            key = key or rest.strip('"')
            read[key] = self._value(types.get(key, frozenset()))
        return read

    def _list(self) -> list[Any]:
        read: list[Any] = []
        while not self._take("]"):
            if read and not self._take(","):
                raise ValueError("something stands between two values")
            read.append(self._value())
        return read
