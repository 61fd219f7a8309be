"""Names and texts in tool calls as they were written: corrections that parsers of several grammars need.

Knows no grammar's marks but those round tagged values.
"""

from __future__ import annotations

import ast
import contextlib
import json
import keyword
import math
import re
from collections.abc import Callable, Sequence, Set
from typing import Any

# (text between the marks, tools) -> a call as an object, or a list of them.
Reader = Callable[[str, Any], Any]
# Per parameter the types that a schema names for it, by JSON Schema's names; none: it may be anything.
Types = dict[str, set[str]]
# A function's name: no blanks, no letters that JSON, marks or Python calls need, and no end tag.
NAME = re.compile(r"""(?!/)[^\s{}\[\]()<>"'=|,]+""")


def names_of(tools: Sequence[dict[str, Any]]) -> list[Any]:
    """The names of the functions that a client offered."""
    return [function.get("name") for function in _functions(tools)]


def _functions(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    return [made for tool in tools or () if isinstance(made := tool.get("function", tool), dict)]


def types_of(name: str, tools: Sequence[dict[str, Any]] | None) -> Types:
    """The types that the schema of an offered function names for each of its parameters."""
    root = schema_of(name, tools)
    properties = root.get("properties") if isinstance(root, dict) else None
    return {key: types_in(schema, root) for key, schema in properties.items()} if isinstance(properties, dict) else {}


def schema_of(name: str, tools: Sequence[dict[str, Any]] | None) -> Any:
    """The schema of an offered function's arguments; None if it has none."""
    return next((function.get("parameters") for function in _functions(tools) if function.get("name") == name), None)


# What some clients write for JSON Schema's names.
_OTHERS = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "long", "short"), "integer"),
    **dict.fromkeys(("num", "float", "double"), "number"),
    **dict.fromkeys(("bool", "binary"), "boolean"),
    **dict.fromkeys(("arr", "list"), "array"),
    "dict": "object",
}
_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null"}


def types_in(schema: Any, root: Any, seen: frozenset[str] = frozenset()) -> set[str]:
    """The types that a schema names; none where it names none. root: where its references lead."""
    if not isinstance(schema, dict):
        return set()
    stated = schema.get("type")
    types = {kind.lower() for kind in (stated if isinstance(stated, list) else [stated]) if isinstance(kind, str)}
    types = {_OTHERS.get(kind, kind) for kind in types}
    choices = schema.get("enum") if isinstance(schema.get("enum"), list) else []
    types |= {_KINDS[type(value)] for value in (*choices, *([schema["const"]] if "const" in schema else []))}
    parts = [part for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list) for part in schema[key]]
    to = schema.get("$ref")
    if isinstance(to, str) and to.startswith("#") and to not in seen:
        seen, place = seen | {to}, root
        for step in to.split("/")[1:]:
            place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
        parts.append(place)
    return types.union(*(types_in(part, root, seen) for part in parts))


def any_name(read: Reader) -> Reader:
    """A parser that reads letters and digits alone in names, for the others that were offered too (`resolve-library-id`).

    They are functions' names, and parameters' in calls as Python writes them (`max-results`; `from`, which Python keeps).
    """

    def read_any(text: str, tools: Any) -> Any:
        functions, parameters = names_of(tools), [key for name in names_of(tools) for key in types_of(name, tools)]
        given = dict.fromkeys(name for name in (*functions, *parameters) if isinstance(name, str) and name and name in text)
        others = [name for name in given if not name.isidentifier() or keyword.iskeyword(name)]
        # A letter that is part of no name stands for each of them.
        letters = (letter for letter in map(chr, range(0x10380, 0x1039E)) if letter not in text)
        stand_ins = dict(zip(sorted(others, key=len, reverse=True), letters, strict=False))
        for name, letter in stand_ins.items():
            text = re.sub(rf"(?<![\w./:@-]){re.escape(name)}(?=\s*(?:\(|\[ARGS\]|\[CALL_ID\]|=))", letter, text)
        return show(read(text, tools), {ord(letter): name for name, letter in stand_ins.items()})

    return read_any


def or_name(read: Reader) -> Reader:
    """A parser that fails on a call without arguments, which is a name alone."""
    return lambda text, tools: {"name": text.strip()} if NAME.fullmatch(text.strip()) else read(text, tools)


def show(value: Any, shown: dict[int, str]) -> Any:
    """Put the letters back, in everything that was read."""
    if isinstance(value, str):
        return value.translate(shown)
    if isinstance(value, dict):
        return {show(key, shown): show(part, shown) for key, part in value.items()}
    return [show(part, shown) for part in value] if isinstance(value, (list, tuple)) else value


# Per grammar of tagged values: the head of a call with its name, or a key and its value. LongCat's is GLM's with longer tags.
GLM, LONGCAT = (
    rf"\A\s*([^<]*?)\s*(?=<{kind}arg_key>)|<{kind}arg_key>\s*(.*?)\s*</{kind}arg_key>\s*<{kind}arg_value>(.*?)</{kind}arg_value>"
    for kind in ("", "longcat_")
)
MINIMAX = r"""<invoke name=["']?([^"'>]+)["']?>|<parameter name=["']?([^"'>]+)["']?>(.*?)</parameter>"""
MINICPM = (
    r"""(?:\A|<function\s+name\s*=)\s*["']?([^"'<>]+)["']?\s*>"""
    r"""|<param\s+name\s*=\s*["']?([^"'>]+)["']?\s*>(?:\s*<!\[CDATA\[(.*?)\]\]>\s*|(.*?))</param>"""
)
MUSE = r"""<atem:invoke\b[^>]*?\bname="([^"]+)">|<atem:parameter\b[^>]*?\bname="([^"]+)"[^>]*>(.*?)</atem:parameter>"""
# Its values stand on lines of their own.
XML = r"<function=\s*([^\s<>]+)>|<parameter=\s*([^\s<>]+)>\n?(.*?)\n?</parameter>"

# The same grammars, and Kimi's two: a text that is calls from end to end, in which no mark stands within a value.
_FIELDS = r"""(?:\s+\w+="[^"<>]*")*"""
_NAMED = r"""\s*["']?[^"'<>\s]+["']?\s*>"""
GLM_CALL, LONGCAT_CALL = (
    rf"[^<]+(?:<{kind}arg_key>[^<]*</{kind}arg_key>(?:\\n|\s)*<{kind}arg_value>[^<]*</{kind}arg_value>\s*)*"
    for kind in ("", "longcat_")
)
MINIMAX_CALLS = rf"(?:<invoke name={_NAMED}\s*(?:<parameter name={_NAMED}[^<]*</parameter>\s*)*</invoke>\s*)+"
MINICPM_CALL = rf"{_NAMED}\s*(?:<param\s+name\s*={_NAMED}(?:\s*<!\[CDATA\[[^<]*|[^<]*)</param>\s*)*"
MUSE_CALLS = rf"(?:<atem:invoke{_FIELDS}>\s*(?:<atem:parameter{_FIELDS}>[^<]*</atem:parameter>\s*)*</atem:invoke>\s*)+"
XML_CALLS = r"(?:<function=\s*[^\s<>]+>\s*(?:\{[^<]*\}\s*|(?:<parameter=\s*[^\s<>]+>[^<]*</parameter>\s*)*)</function>\s*)+"
_K2_CALL = r"[^<]+<\|tool_call_argument_begin\|>[^<]*"
K2_CALLS = rf"(?:(?:<\|tool_call_begin\|>{_K2_CALL}<\|tool_call_end\|>\s*)+|{_K2_CALL}(?<=\}}))"
K3_CALLS = (
    rf"(?:<\|open\|>call{_FIELDS}<\|sep\|>\s*"
    rf"(?:<\|open\|>(?:argument|json){_FIELDS}<\|sep\|>[^<]*<\|close\|>(?:argument|json)<\|sep\|>\s*)*"
    r"<\|close\|>call<\|sep\|>\s*)+"
)


def all_of(calls: str) -> Callable[[Reader], Reader]:
    """A parser of texts that are calls from end to end. mlx-lm's skip what they do not know beside and between their parts.

    calls: what such a text looks like.
    """
    pattern = re.compile(rf"\s*{calls}\s*")

    def mend(read: Reader) -> Reader:
        def read_all(text: str, tools: Any) -> Any:
            if not pattern.fullmatch(text):
                raise ValueError("not all of it is calls")
            return read(text, tools)

        return read_all

    return mend


def verbatim(part: str) -> Callable[[Reader], Reader]:
    """Gives values as they are meant: mlx-lm's parsers of tagged values differ in what they take off and what they convert."""
    pattern = re.compile(part, re.DOTALL)

    def mend(read: Reader) -> Reader:
        def read_verbatim(text: str, tools: Any) -> Any:
            parsed = read(text, tools)
            calls = iter(parsed if isinstance(parsed, list) else [parsed])
            call, types, keys = None, {}, set()
            for head, key, *values in (found.groups() for found in pattern.finditer(text)):
                if head is not None:
                    call, keys = next(calls, None), set()
                    types = types_of(head, tools)
                elif call and key in call["arguments"]:
                    if key in keys:
                        raise ValueError("two of its values have one name")
                    keys.add(key)
                    value = next(value for value in values if value is not None)
                    call["arguments"][key] = as_meant(value, call["arguments"][key], types.get(key))
            return parsed

        return read_verbatim

    return mend


def untyped(read: Reader, mark: str = "") -> Reader:
    """A parser that knows no schemas: mlx-lm's fail on some of them, and on values of another type.

    mark: what only a call with tagged values has, if the parser reads other calls too.
    """
    return lambda text, tools: read(text, None if mark in text else tools)


def as_meant(written: str, read: Any, types: Set[str] | None) -> Any:
    """A value by the types of its parameter; types: None for a parameter that the tool does not name.

    read: what a parser made of it, which stands where text and other types are allowed.
    """
    if types is None:
        return read
    free = not types or ("string" in types and not is_text(types))
    return read if free and read is not None and not isinstance(read, str) else read_as(written, types)


def is_text(types: Set[str] | None) -> bool:
    """Whether a tool's schema wants text for a parameter, or text or nothing."""
    return bool(types) and "string" in types and types <= {"string", "null"}


def read_as(written: str, types: Set[str]) -> Any:
    """A value as the first of these types that fits, whole numbers exactly; where none does, what it is as JSON, or text."""
    if is_text(types):
        return None if "null" in types and written.lower() == "null" else written
    text = written.strip()
    if text.lower() == "null" and ("null" in types or "string" not in types):
        return None
    for kind, read in _READ.items():
        if kind in types and not (kind == "boolean" and "string" in types and text.lower() not in ("true", "false")):
            with contextlib.suppress(ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError):
                return read(text)
    with contextlib.suppress(ValueError, RecursionError):
        return written if "string" in types else _json(text)
    return written


def _number(text: str) -> int | float:
    with contextlib.suppress(ValueError):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("JSON has no such number")
    return int(value) if value.is_integer() else value


def _integer(text: str) -> int:
    value = _number(text)
    if isinstance(value, float):
        raise ValueError("it is no whole number")
    return value


def _json(text: str) -> Any:
    """JSON, also with line ends in texts. Raises ValueError, also on numbers that JSON lacks."""
    value = json.loads(text, strict=False)
    json.dumps(value, allow_nan=False)
    return value


def _nested(text: str) -> Any:
    """An object or a list, also as Python writes it."""
    with contextlib.suppress(ValueError):
        return _json(text)
    value = ast.literal_eval(text)
    return json.loads(json.dumps(value, allow_nan=False)) if isinstance(value, (dict, list)) else _json(text)


_WORDS = {**dict.fromkeys(("true", "1", "yes", "on"), True), **dict.fromkeys(("false", "0", "no", "off"), False)}
_READ: dict[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": lambda text: _WORDS[text.lower()],
    "object": _nested,
    "array": _nested,
}
