"""Tool calls in the text that a target writes: which grammars there are, and how a call is read.

Most calls are read by mlx-lm's tool parsers; `CALLS` holds the grammars that mlx-lm's wrapper lacks. Knows no streams: `channels`
finds where a call begins and ends.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.tool_parsers import glm47, json_tools, qwen3_coder
from mlx_lm.tool_parsers.pythonic import _JSONLiterals as JsonLiterals

from .call_texts import (
    GLM,
    GLM_CALL,
    K2_CALLS,
    K3_CALLS,
    LONGCAT,
    LONGCAT_CALL,
    MINICPM,
    MINICPM_CALL,
    MINIMAX,
    MINIMAX_CALLS,
    MUSE,
    MUSE_CALLS,
    NAME,
    XML,
    XML_CALLS,
    Reader,
    Types,
    all_of,
    any_name,
    names_of,
    or_name,
    read_as,
    show,
    types_of,
    untyped,
    verbatim,
)
from .gemma_calls import gemma_reader
from .minimax_m3_calls import MARK as MINIMAX_M3
from .minimax_m3_calls import minimax_m3_calls
from .mistral_calls import end_of_mistrals, mistral_calls


@dataclass
class Call:
    """A tool call as a client gets it; arguments is the text of a JSON object."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: str(uuid.uuid4()))


def _json_calls(text: str, tools: Any) -> Any:
    """An object or a list; also several objects in a row (MiniMax-M1), or with semicolons between them (Llama)."""
    text, calls = text.strip().removesuffix("<|eom_id|>").removesuffix("<|eot_id|>").strip(), []
    while text:
        call, end = json.JSONDecoder().raw_decode(text)
        calls.append(call)
        text = text[end:].strip().removeprefix(";").strip()
    return calls[0] if len(calls) == 1 else calls


def _llama_calls(text: str, tools: Any) -> Any:
    """Llama's: objects, or a list of calls as Python writes them."""
    try:
        return _json_calls(text, tools)
    except json.JSONDecodeError:
        return _pythonic(text.strip().removesuffix("<|eom_id|>").removesuffix("<|eot_id|>"), tools)


def _llama4_calls(text: str, tools: Any) -> Any:
    """Llama 4's: between its marks, or after them if there is nothing between."""
    within, _, behind = text.partition("<|python_end|>")
    if within.strip() and behind.strip():
        raise ValueError("something stands beside a call")
    return _llama_calls(within.strip() or behind, tools)


def _python_lines(text: str, tools: Any) -> Any:
    """A call as Python writes it on each line."""
    calls = [_pythonic(f"[{line.strip()}]", tools) for line in text.splitlines() if line.strip()]
    return [call for one in calls for call in (one if isinstance(one, list) else [one])]


def _functools_calls(text: str, tools: Any) -> Any:
    """Firefunction's list, whose bracket is a part of its mark."""
    return _json_calls(f"[{text}", tools)


def _headed_call(text: str, tools: Any) -> Any:
    """Functionary's: a name, and an object."""
    name, _, arguments = text.partition(">")
    return {"name": name, "arguments": arguments}


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


_SOLAR_CALL = re.compile(
    r"<\|tool_call:begin\|>(.*?)<\|tool_call:name\|>(.*?)<\|tool_call:args\|>(.*?)<\|tool_call:end\|>", re.DOTALL
)


def _solar_calls(text: str, tools: Any) -> Any:
    found = _SOLAR_CALL.findall(text)
    if not found or _SOLAR_CALL.sub("", text).replace("<|calls|>", "").strip():
        raise ValueError("not all of it is calls")
    return [{"name": name.strip(), "arguments": arguments, "id": id.strip() or None} for id, name, arguments in found]


# DeepSeek 3.2's; 4 and 4.1 spell the outer tags in other ways, and with a blank.
_DSML_CALL = re.compile(r'<｜DSML｜ ?invoke name="([^"]+)">(.*?)</｜DSML｜ ?invoke>', re.DOTALL)
_DSML_PART = re.compile(r'<｜DSML｜ ?parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)</｜DSML｜ ?parameter>', re.DOTALL)
_DSML_ENDS = re.compile(r"\s*(?:｜DSML｜)? ?\w*calls>\s*</｜DSML｜ ?\w*calls>\s*")


def _dsml_calls(text: str, tools: Any) -> Any:
    """An argument is text if its attribute `string` or the schema says so, else JSON. A call may also hold one JSON object."""
    found = _DSML_CALL.findall(text)
    if not found or not _DSML_ENDS.fullmatch(_DSML_CALL.sub("", text)):
        raise ValueError("not all of it is calls")
    return [{"name": name, "arguments": _dsml_arguments(body, types_of(name, tools))} for name, body in found]


def _dsml_arguments(body: str, types: Types) -> Any:
    parts = _DSML_PART.findall(body)
    if _DSML_PART.sub("", body).strip():
        return body
    return {
        key: value
        if stated == "true" or types.get(key) == {"string"}
        else json.loads(value)
        if stated
        else read_as(value, types.get(key, set()))
        for key, stated, value in parts
    }


@any_name
def _pythonic(text: str, tools: Any) -> Any:
    """A list of calls as Python writes them; also JSON. There may be JSON's true, false and null, and line ends in texts.

    What is no literal is its text. mlx-lm's parser guesses at what is no Python, and so drops and changes values.
    Raises ValueError or SyntaxError on anything else than calls with named values.
    """
    if re.match(r"\s*(?:\[\s*)?\{", text):
        return _json_calls(text, tools)
    text = text.strip()
    try:
        made = ast.parse(text, mode="eval").body
    except SyntaxError:
        text = re.sub(_QUOTED, lambda found: found[0].replace("\n", "\\n").replace("\r", "\\r"), text)
        made = ast.parse(text, mode="eval").body
    calls = made.elts if isinstance(made, ast.List) else []
    if not calls or any(not isinstance(call, ast.Call) or call.args for call in calls):
        raise ValueError("it is no list of calls with named values")
    if any(len({part.arg for part in call.keywords if part.arg}) < len(call.keywords) for call in calls):
        raise ValueError("two of its values have one name, or one has none")
    read = []
    for call in calls:
        types = types_of(ast.unparse(call.func), tools)
        values = {part.arg: _python_value(part.value, text, types.get(part.arg, set())) for part in call.keywords}
        read.append({"name": ast.unparse(call.func), "arguments": values})
    return read


def _python_value(node: ast.expr, text: str, types: set[str]) -> Any:
    """A value. What a tool wants as an object may come as a text of it, as LFM2.5's template writes objects."""
    written = ast.get_source_segment(text, node)
    try:
        value = ast.literal_eval(JsonLiterals().visit(node))
    except ValueError:
        return written
    return read_as(value, types) if isinstance(value, str) and types and "string" not in types else value


def _with_schemas(part: re.Pattern, text: str, tools: Any, rewrite: Callable[[re.Match, Types], str]) -> str:
    """A text with each argument that `part` finds rewritten by the types of its call: group 1 is the name of a call."""
    types: Types = {}

    def seen(found: re.Match) -> str:
        nonlocal types
        if found[1] is None:
            return rewrite(found, types)
        types = types_of(found[1], tools)
        return found[0]

    return part.sub(seen, text)


_K3_PART = re.compile(
    r'<\|open\|>call\b(?:(?!<\|sep\|>).)*?\btool="([^"]*)"|(<\|open\|>argument\b)((?:(?!<\|sep\|>).)*)(?=<\|sep\|>)', re.DOTALL
)


def _kimi_k3(read: Reader) -> Reader:
    """mlx-lm's parser, with the type of the tool's schema for arguments that state no type or another one."""

    def typed(found: re.Match, known: Types) -> str:
        key = re.search(r'\bkey="([^"]*)"', found[3])
        types = (known.get(key[1]) if key else None) or {"string", "null"}
        stated = re.search(r'\s*\btype="[^"]*"', found[3])
        if stated and "string" in types and len(types) > 1:
            return found[0]
        rest = found[3].replace(stated[0], "") if stated else found[3]
        return f'{found[2]}{rest} type="{"string" if types == {"string"} else "json"}"'

    def read_typed(text: str, tools: Any) -> Any:
        calls = read(_with_schemas(_K3_PART, text, tools, typed), tools)
        for call in calls:
            types = types_of(call["name"], tools)
            for key, value in call["arguments"].items():
                if isinstance(value, str) and types.get(key) and "string" not in types[key]:
                    call["arguments"][key] = read_as(value, types[key])
        return calls

    return read_typed


_read_parameters = all_of(XML_CALLS)(verbatim(XML)(untyped(qwen3_coder.parse_tool_call)))
_read_glm = all_of(GLM_CALL)(verbatim(GLM)(untyped(glm47.parse_tool_call, "<arg_key>")))


def parse_xml_call(text: str, tools: Any) -> Any:
    """Qwen3-Coder's call; also one whose arguments are a JSON object, or that is JSON altogether."""
    if text.lstrip().startswith("{"):
        return _json_calls(text, tools)
    whole = re.fullmatch(r"\s*<function=\s*([^\s<>]+)>([^<]*)</function>\s*", text)
    return {"name": whole[1], "arguments": whole[2]} if whole else _read_parameters(text.strip(), tools)


def _glm_call(text: str, tools: Any) -> Any:
    """GLM's call, also as JSON; of a list mlx-lm reads the first alone."""
    return _json_calls(text, tools) if text.lstrip().startswith("[") else _read_glm(text, tools)


_TOOL_CALL = {
    json_tools.parse_tool_call: _json_calls,
    glm47.parse_tool_call: _glm_call,
    qwen3_coder.parse_tool_call: parse_xml_call,
}
# Corrections of mlx-lm's parsers, by the mark that starts their calls.
_MENDED = {
    "[TOOL_CALLS]": lambda read: mistral_calls,
    "<|tool_call_start|>": lambda read: _pythonic,
    "<|tool_call>": lambda read: gemma_reader('<|"|>'),
    "<start_function_call>": lambda read: gemma_reader("<escape>"),
    "<|tool_calls_section_begin|>": all_of(K2_CALLS),
    "<|open|>tools<|sep|>": lambda read: all_of(K3_CALLS)(_kimi_k3(read)),
    "<atem:function_calls>": lambda read: all_of(MUSE_CALLS)(verbatim(MUSE)(read)),
    "<minimax:tool_call>": lambda read: all_of(MINIMAX_CALLS)(verbatim(MINIMAX)(untyped(read))),
    "<function name=": lambda read: all_of(MINICPM_CALL)(verbatim(MINICPM)(untyped(read))),
    "<longcat_tool_call>": lambda read: all_of(LONGCAT_CALL)(verbatim(LONGCAT)(untyped(or_name(read)))),
    "<tool_call>": lambda read: _TOOL_CALL.get(read, read),
}


def mended(start: str, read: Reader) -> Reader:
    """A parser of mlx-lm, corrected if `_MENDED` has its mark."""
    return _MENDED[start](read) if start in _MENDED else read


def end_of_calls(read: Reader, text: str) -> int:
    """Where calls that no mark ends are at an end within a text; 0 if that is not known of this grammar."""
    return end_of_mistrals(text) if read is mistral_calls else 0


def shows_its_end(start: str, read: Reader) -> bool:
    """Whether a call's own text shows that it is whole. Otherwise only the mark behind it does, as GLM's."""
    return read is not _glm_call and start not in ("<longcat_tool_call>", "<function name=")


def is_json(read: Reader) -> bool:
    """Whether calls are JSON; of Llama's also calls as Python writes them (`begins_python`)."""
    return read in (_json_calls, _single_key_calls, _llama_calls, json_tools.parse_tool_call)


# Llama's marks of a call, which it leaves out as often as not: then the whole answer is the call.
BARE = ("<|python_tag|>", "<|python_start|>")
# (start, end, reader) of tool calls that mlx-lm's wrapper does not know; "" ends with the answer.
CALLS: tuple[tuple[str, str, Reader], ...] = (
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek_calls),
    ("<seed:tool_call>", "</seed:tool_call>", parse_xml_call),
    ("<|START_ACTION|>", "<|END_ACTION|>", _json_calls),
    ("<|tools_prefix|>", "<|tools_suffix|>", _single_key_calls),
    ("<|tool_call|>", "<|/tool_call|>", _json_calls),
    ("<TOOLCALL>", "</TOOLCALL>", _json_calls),
    ("<tool_call>", "</tool_call>", _json_calls),
    # Hunyuan and Jamba; OLMo.
    ("<tool_calls>", "</tool_calls>", _json_calls),
    ("<function_calls>", "</function_calls>", _python_lines),
    ("<|tool_call|>", "", _json_calls),
    ("<|action_start|><|plugin|>", "<|action_end|>", _json_calls),
    ("<|tool_calls|>", "", _solar_calls),
    # GigaChat 3.1 and 3.
    ("<|function_call|>", "<|message_sep|>", _json_calls),
    ("function call<|role_sep|>", "<|message_sep|>", _json_calls),
    ("<｜DSML｜", "", _dsml_calls),
    ("functools[", "", _functools_calls),
    ("<function=", "</function>", _headed_call),
    (BARE[0], "", _llama_calls),
    (BARE[1], "", _llama4_calls),
)


# Those whose marks mlx-lm takes for another family's.
TAKEN_FOR_OTHERS: tuple[tuple[str, str, Reader], ...] = (
    (f"{MINIMAX_M3}<tool_call>", f"{MINIMAX_M3}</tool_call>", minimax_m3_calls),
)


def spell(calls: Sequence[tuple[str, str]], start: str, end: str, read: Reader, source: str) -> str:
    """Calls as a target would write them, for chat templates that write none.

    They get the marks of a grammar of JSON, of Python or of DeepSeek's. For any other grammar, or none, they are JSON alone.

    calls: names and arguments as JSON; source: of the chat template, which tells DeepSeek's two spellings apart.
    """
    key = "parameters" if start in BARE else "arguments"
    each = [f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": {arguments}}}' for name, arguments in calls]
    if read is _deepseek_calls:
        form = "function<｜tool▁sep｜>{}\n```json\n{}\n```" if "```json" in source else "{}<｜tool▁sep｜>{}"
        written = (f"<｜tool▁call▁begin｜>{form.format(*call)}<｜tool▁call▁end｜>" for call in calls)
        return f"{start}{''.join(written)}{end}"
    if read is _single_key_calls:
        each = [f"{{{json.dumps(name, ensure_ascii=False)}: {arguments}}}" for name, arguments in calls]
    if read in (_python_lines, _pythonic):
        written = [f"{name}({_python_values(arguments)})" for name, arguments in calls]
        return f"{start}[{', '.join(written)}]{end}" if read is _pythonic else "\n".join(written).join((start, end))
    if not is_json(read) or start in BARE:
        return "; ".join(each)
    if start == "<tool_call>":
        return "\n".join(f"{start}\n{call}\n{end}" for call in each)
    return f"{start}[{', '.join(each)}]{end}"


def _python_values(arguments: str) -> str:
    """The arguments of a call in Python, from the text of an object; any other text as it is."""
    try:
        read = json.loads(arguments)
        return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in read.items())
    except (ValueError, AttributeError):
        return arguments


def begins_bare(text: str) -> bool:
    """Whether an answer's beginning may be a call without its mark.

    That is an object whose first name is one of a call's, or a list whose first entry may be a call in Python.
    """
    if begins_python(text):
        return re.match(r"\s*\[\s*(?:[A-Za-z_][\w.-]*\s*(?:\(|$)|$)", text) is not None
    first = re.match(r'\s*\{\s*"([^"\\]*)"', text)
    return text.lstrip()[:1] == "{" and (first is None or first[1] in _BESIDE)


def begins_python(text: str) -> bool:
    """Whether a call of Llama's is in brackets: calls as Python writes them, or a list."""
    return text.lstrip()[:1] == "["


def offered(calls: Sequence[Call], tools: Sequence[dict[str, Any]]) -> bool:
    """Whether all calls are of functions that the client offered."""
    known = names_of(tools)
    return all(call.name in known for call in calls)


def read_calls(parsed: Any) -> list[Call]:
    """Calls from what a parser gives: an object or a list of them.

    Arguments may be an object or its text, absent or null: then there are none.

    Raises:
      ValueError: one of them has no name, or its arguments are no JSON object or under another name. Then none is a call.
    """
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls:
        raise ValueError("there is no call in it")
    return [_read_call(call) for call in calls]


# What a call without arguments may hold. Anything else may be arguments, which a call must not lose.
_BESIDE = {"name", "tool_name", "arguments", "parameters", "function", "type", "id", "tool_call_id", "index"}


def _read_call(call: Any) -> Call:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = {**call, **call["function"]}
    name = (call.get("name") or call.get("tool_name")) if isinstance(call, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call has no name")
    arguments = next((call[key] for key in ("arguments", "parameters") if call.get(key) is not None), None)
    if arguments is None:
        if beside := call.keys() - _BESIDE:
            raise ValueError(f"its arguments may be under {sorted(beside)}")
        arguments = {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        # Half of a surrogate pair stays escaped: it is no character of its own.
        text = json.dumps(arguments, allow_nan=False)
    text = text.strip() or "{}"
    if not isinstance(json.loads(text), dict):
        raise ValueError("its arguments are no object")
    given = call.get("id") or call.get("tool_call_id")
    return Call(name.strip(), text, given) if isinstance(given, str) else Call(name.strip(), text)


# Where a call begins, in grammars that put several between one pair of marks.
_CALL = re.compile(r"<function=|<invoke\b|<atem:invoke\b|<\|open\|>call\b|<\|tool_call_begin\|>|\bcall:[\w-]+\{")


def read_whole(read: Reader, text: str, tools: Any) -> Any:
    """Parse the text of a call. Marks inside values are part of the values, and no call is left out.

    mlx-lm's parsers end a call at its first end mark, in a value too, and some read only the first of several calls.
    """
    hidden, shown = _hide_marks(text)
    try:
        return show(_read_each(read, hidden, tools), shown)
    except Exception:  # noqa: BLE001 - as in `tried`
        # What looked like a value may have been none: an apostrophe is no quote.
        if hidden == text:
            raise
        return _read_each(read, text, tools)


def _read_each(read: Reader, text: str, tools: Any) -> Any:
    starts = [found.start() for found in _CALL.finditer(text)]
    parsed = read(text, tools)
    if len(starts) <= (len(parsed) if isinstance(parsed, list) else 1):
        return parsed
    pieces = [read(text[at:end], tools) for at, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    calls = [call for piece in pieces for call in (piece if isinstance(piece, list) else [piece])]
    if len(calls) != len(starts):
        raise ValueError(f"{len(starts)} calls are written and {len(calls)} can be read")
    return calls


def _hide_marks(text: str) -> tuple[str, dict[int, str]]:
    """A call's text in which letters that may begin a mark are replaced inside values; and the table that puts them back."""
    spare = (chr(n) for n in range(0xF0000, 0xFFFFE) if chr(n) not in text)
    hidden = dict(zip("<{}", spare, strict=False))

    def hide(found: re.Match, letters: str) -> str:
        value, opening, closing = found[0], *_ends_of(found)
        end = value.rfind(closing) if closing and len(value) > len(opening) else -1
        end = len(value) if end < len(opening) else end
        table = str.maketrans({letter: hidden[letter] for letter in letters})
        return opening + value[len(opening) : end].translate(table) + value[end:]

    tagged = any(not found["quote"] for found in _VALUE.finditer(text))
    letters = {"mark": "<{}", "quote": "" if tagged else "<"}
    made = _VALUE.sub(lambda found: hide(found, next((letters[kind] for kind in letters if found[kind]), "<")), text)
    return made, {ord(other): letter for letter, other in hidden.items()}


def tried(read: Callable[[], Any], written: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
    """The calls, or [] if they cannot be read: on bad text mlx-lm's parsers raise errors of many kinds.

    Some take anything for a call. So each name must be one that was offered, or stand in the text.
    """
    try:
        calls = read_calls(read())
    except Exception:  # noqa: BLE001 - KeyError, AttributeError, RecursionError and others of mlx-lm's parsers
        return []
    known = [made.get("name") for tool in tools if isinstance(made := tool.get("function", tool), dict)]
    names = [name for call in calls for name in {call.name, *_UNREAD.intersection(json.loads(call.arguments))}]
    stand = all(name in known or name in written or json.dumps(name)[1:-1] in written for name in names)
    return calls if stand and all(NAME.fullmatch(call.name) for call in calls) else []


# The argument under which mlx-lm's glm47 and laguna give what they could not read.
_UNREAD = {"raw"}
_QUOTED = r"""(?P<quote>["'])(?:\\.|(?!(?P=quote))[^\\])*(?:(?P=quote)|\Z)"""
# A value in a call: of MiniCPM's CDATA, between tags, between Kimi K3's, between marks as Gemma's, or quoted.
_VALUE = re.compile(
    r"""(?P<cdata><param\b[^>]*>\s*<!\[CDATA\[).*?(?:\]\]>\s*</param>|\Z)"""
    r"""|(?P<opening><(?P<tag>(?:\w+:|｜DSML｜\ ?)?param(?:eter)?|\w*arg_value)\b[^>]*>).*?(?:</(?P=tag)>|(?=<(?P=tag)\b)|\Z)"""
    r"""|(?P<begun><\|open\|>(?P<part>argument|json)\b(?:(?!<\|sep\|>).)*<\|sep\|>).*?"""
    r"""(?:<\|close\|>(?P=part)<\|sep\|>|(?=<\|open\|>(?P=part)\b)|\Z)"""
    rf"""|(?P<mark><\|"\|>|<escape>).*?(?:(?P=mark)|\Z)|{_QUOTED}""",
    re.DOTALL,
)


def _ends_of(value: re.Match) -> tuple[str, str]:
    """What opens a value, and what closes it."""
    if value["cdata"]:
        return value["cdata"], "]]>"
    if value["tag"]:
        return value["opening"], f"</{value['tag']}>"
    if value["part"]:
        return value["begun"], f"<|close|>{value['part']}<|sep|>"
    mark = value["mark"] or value["quote"]
    return mark, mark


def open_value(text: str, end: str) -> str:
    """The value that is still open where this text of a call ends, from its opening mark on; "" if none is.

    A value that runs over the end of a call into the tags of the next one is open too: it was never closed.
    """
    text_end = "\0"
    for found in _VALUE.finditer(text + text_end):
        torn = (found["tag"] or found["part"]) and end and end in found[0] and not found[0].endswith(_ends_of(found)[1])
        if torn or found[0].endswith(text_end):
            return found[0]
    return ""
