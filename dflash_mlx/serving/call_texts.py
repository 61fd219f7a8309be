"""Names and texts in tool calls as they were written: corrections that parsers of several grammars need.

Knows no grammar's marks but those round tagged values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.tool_parsers.minimax_m2 import _convert_param_value_with_types as read_as
from mlx_lm.tool_parsers.minimax_m2 import _get_param_types_from_config as types_of
from mlx_lm.tool_parsers.qwen3_coder import _get_arguments_config as schemas_of

# (text between the marks, tools) -> a call as an object, or a list of them.
Reader = Callable[[str, Any], Any]
# A function's name: no blanks, no letters that JSON, marks or Python calls need, and no end tag.
NAME = re.compile(r"""(?!/)[^\s{}\[\]()<>"'=|,]+""")


def names_of(tools: Sequence[dict[str, Any]]) -> list[Any]:
    """The names of the functions that a client offered."""
    return [made.get("name") for tool in tools or () if isinstance(made := tool.get("function", tool), dict)]


def any_name(read: Reader) -> Reader:
    """A parser that reads letters and digits alone in names, for the others that were offered too (`resolve-library-id`)."""

    def read_any(text: str, tools: Any) -> Any:
        others = [name for name in names_of(tools) if isinstance(name, str) and not name.isidentifier() and name in text]
        # A letter that is part of no name stands for each of them.
        letters = (letter for letter in map(chr, range(0x10380, 0x1039E)) if letter not in text)
        stand_ins = dict(zip(sorted(others, key=len, reverse=True), letters, strict=False))
        for name, letter in stand_ins.items():
            text = re.sub(rf"(?<![\w./:-]){re.escape(name)}(?=\s*(?:\(|\[ARGS\]|\[CALL_ID\]))", letter, text)
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
    r"""|<param\s+name\s*=\s*["']?([^"'>]+)["']?\s*>(?!\s*<!\[CDATA\[)(.*?)</param>"""
)
MUSE = r"""<atem:invoke\b[^>]*?\bname="([^"]+)">|<atem:parameter\b[^>]*?\bname="([^"]+)"[^>]*>(.*?)</atem:parameter>"""
# Its values stand on lines of their own.
XML = r"<function=\s*([^\s<>]+)>|<parameter=\s*([^\s<>]+)>\n?(.*?)\n?</parameter>"


def verbatim(part: str) -> Callable[[Reader], Reader]:
    """Gives values as they are meant: mlx-lm's parsers of tagged values differ in what they take off and what they convert."""
    pattern = re.compile(part, re.DOTALL)

    def mend(read: Reader) -> Reader:
        def read_verbatim(text: str, tools: Any) -> Any:
            parsed = read(text, tools)
            calls = iter(parsed if isinstance(parsed, list) else [parsed])
            call, schemas = None, {}
            for head, key, value in (found.groups() for found in pattern.finditer(text)):
                if head is not None:
                    call = next(calls, None)
                    schemas = schemas_of(head, tools)
                elif call and key in call["arguments"]:
                    call["arguments"][key] = as_meant(value, call["arguments"][key], key, schemas)
            return parsed

        return read_verbatim

    return mend


def as_meant(written: str, read: Any, key: str, schemas: dict[str, Any]) -> Any:
    """A value by the schema of its parameter: text with all its blanks, or of the one type that is wanted or null.

    read: what a parser made of it.
    """
    types = _stated(key, schemas)
    if read is None or not types:
        return read
    if is_text(key, schemas):
        return written
    return read_as(written.strip(), [*types]) if isinstance(read, str) and "string" not in types else read


def is_text(key: str, schemas: dict[str, Any]) -> bool:
    """Whether a tool's schema wants text for a parameter, or text or nothing."""
    types = _stated(key, schemas)
    return "string" in types and types <= {"string", "null"}


def _stated(key: str, schemas: dict[str, Any]) -> set[str]:
    """The types that a schema names for a parameter; none where it names none."""
    schema = schemas.get(key)
    stated = isinstance(schema, dict) and schema.keys() & {"type", "enum", "anyOf", "oneOf", "allOf"}
    return {*types_of(key, schemas)} if stated else set()
