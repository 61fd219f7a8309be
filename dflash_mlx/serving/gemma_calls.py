"""Calls as Gemma writes them: `call:NAME{KEY:VALUE,...}`, texts between marks of their own.

mlx-lm's parsers read names and keys of letters and digits alone, and FunctionGemma's ends an object at its first closing brace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_NAME = re.compile(r"\s*,?\s*call:\s*([^\s{}]+)\s*(?=\{)")
_BARE = re.compile(r"""[^,\]}"'<>:\n]+(?=[,\]}])""")


def gemma_reader(mark: str) -> Callable[[str, Any], list[dict[str, Any]]]:
    """A reader of calls. mark: stands on both sides of a text.

    The reader raises ValueError on anything else than calls.
    """
    return lambda text, tools: _Text(text, mark).calls()


class _Text:
    """Reads values from a place in a text on."""

    def __init__(self, text: str, mark: str):
        self.text, self.mark, self.at = text, mark, 0

    def calls(self) -> list[dict[str, Any]]:
        calls = []
        while found := _NAME.match(self.text, self.at):
            self.at = found.end()
            calls.append({"name": found[1], "arguments": self._value()})
        if not calls or self.text[self.at :].strip():
            raise ValueError("not all of it is calls")
        return calls

    def _take(self, letters: str) -> bool:
        """Go on behind these letters, if they come next."""
        at = len(self.text) - len(self.text[self.at :].lstrip())
        if not self.text.startswith(letters, at):
            return False
        self.at = at + len(letters)
        return True

    def _value(self) -> Any:
        if self._take(self.mark):
            return self._until(self.mark)
        if self._take("{"):
            return self._object()
        if self._take("["):
            return self._list()
        if self._take('"'):
            value, self.at = json.JSONDecoder().raw_decode(self.text, self.at - 1)
            return value
        found = _BARE.match(self.text, self.at)
        if found is None:
            raise ValueError("a value is missing")
        self.at = found.end()
        try:
            return json.loads(found[0])
        except ValueError:
            return found[0].strip()

    def _until(self, letters: str) -> str:
        end = self.text.index(letters, self.at)
        value, self.at = self.text[self.at : end], end + len(letters)
        return value

    def _object(self) -> dict[str, Any]:
        read: dict[str, Any] = {}
        while not self._take("}"):
            if read and not self._take(","):
                raise ValueError("something stands between two values")
            key = self._until(self.mark) if self._take(self.mark) else ""
            rest = self._until(":").strip()
            read[key or rest.strip('"')] = self._value()
        return read

    def _list(self) -> list[Any]:
        read: list[Any] = []
        while not self._take("]"):
            if read and not self._take(","):
                raise ValueError("something stands between two values")
            read.append(self._value())
        return read
