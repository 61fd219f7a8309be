"""Calls as Mistral writes them: `NAME[ARGS]{...}`, also with an id, several in a row; or a list in JSON.

mlx-lm's parser takes an id for the name, reads letters and digits alone in names, and skips what stands between calls.
"""

from __future__ import annotations

import json
import re
from typing import Any

MARK = "[TOOL_CALLS]"
_HEAD = re.compile(r"""\s*(?:\[TOOL_CALLS\]\s*)?([^\s{}\[\]()<>"'=|,]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\]\s*""")


def mistral_calls(text: str, tools: Any) -> Any:
    """All calls in a text. Raises: ValueError on anything else than calls."""
    calls, end = _read(text)
    if not calls or text[end:].strip():
        raise ValueError("not all of it is calls")
    return calls


def end_of_mistrals(text: str) -> int:
    """Where the calls end at the beginning of a text, after which no mark stands; 0 if it begins with none."""
    return _read(text)[1]


def _read(text: str) -> tuple[list[Any], int]:
    """The calls at the beginning of a text, and where they end."""
    calls, end, decoder = [], 0, json.JSONDecoder()
    start = len(text) - len(text.lstrip())
    try:
        if text.startswith("[", start) and not text.startswith(MARK, start):
            return decoder.raw_decode(text, start)
        while found := _HEAD.match(text, end):
            arguments, end = decoder.raw_decode(text, found.end())
            calls.append({"name": found[1], "arguments": arguments, "id": found[2]})
    except ValueError:
        # The last one is cut off or no call.
        pass
    return calls, end
