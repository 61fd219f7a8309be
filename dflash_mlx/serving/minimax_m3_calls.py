"""Calls as MiniMax-M3 writes them: tags with a mark before each, objects and lists as further tags within them.

mlx-lm takes its marks for those of calls in JSON.
"""

from __future__ import annotations

import re
from typing import Any

from .call_texts import read_as, schema_of, types_in

MARK = "]<]minimax[>["
_TAG = re.compile(re.escape(MARK) + r"""<(/?)([^<>\s]+)(?:\s+name=["']?([^"'<>]+)["']?)?>""")
# A text, or parts with their names.
_Node = str | list[tuple[str, Any]]


def minimax_m3_calls(text: str, tools: Any) -> list[dict[str, Any]]:
    """All calls in a text. Raises: ValueError on anything else than calls."""
    calls, at = [], 0
    while found := _TAG.search(text, at):
        if found[1] or found[2] != "invoke" or not found[3] or text[at : found.start()].strip():
            raise ValueError("not all of it is calls")
        node, at = _parts(text, found.end(), "invoke")
        if isinstance(node, str) and node.strip():
            raise ValueError("its arguments have no names")
        root = schema_of(found[3], tools)
        parts = [] if isinstance(node, str) else node
        calls.append({"name": found[3], "arguments": _object(parts, root, root)})
    if not calls or text[at:].strip():
        raise ValueError("not all of it is calls")
    return calls


def _parts(text: str, at: int, end: str) -> tuple[_Node, int]:
    """What stands from a place on up to an end tag, and where that ends."""
    parts: list[tuple[str, Any]] = []
    while found := _TAG.search(text, at):
        between, at = text[at : found.start()], found.end()
        if found[1]:
            if found[2] != end or parts and between.strip():
                break
            return parts or between, at
        if between.strip():
            break
        node, at = _parts(text, at, found[2])
        parts.append((found[2], node))
    raise ValueError("a tag is not closed, or text stands between tags")


def _object(parts: list[tuple[str, Any]], schema: Any, root: Any) -> dict[str, Any]:
    if len({key for key, _ in parts}) < len(parts):
        raise ValueError("two of its values have one name")
    known = schema.get("properties") if isinstance(schema, dict) else None
    inner = known if isinstance(known, dict) else {}
    return {key: _value(node, inner.get(key), root) for key, node in parts}


def _value(node: _Node, schema: Any, root: Any) -> Any:
    types = types_in(schema, root)
    if isinstance(node, str):
        empty = {"string": node, "array": [], "object": {}}
        return next((value for kind, value in empty.items() if kind in types and not node.strip()), read_as(node, types))
    if "object" not in types and all(key == "item" for key, _ in node):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [_value(part, items, root) for _, part in node]
    return _object(node, schema, root)
