"""Tool calls as rules of a grammar: each family's own way to write them, so that they can be enforced.

`tool_calls` reads what is written here. Knows no requests and no models. Families: JSON, Qwen3-Coder's XML, Mistral's names with
JSON, calls as Python writes them, gpt-oss's channels; any other is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.tool_parsers import json_tools, pythonic, qwen3_coder

from ..constraint import ConstraintError, UnsupportedError, json_rule, json_schema
from .channels import call_grammar, is_harmony, template_source
from .tool_calls import BARE, is_json

# A value of its own in text: not the end of it, and not what the reader takes for null.
_XML_TEXT = r"/(?s:.*)/ & ~/(?s:.*)<\/?parameter(?s:.*)/ & ~/(?i:null)/"
# Keywords of a text that are not enforced where the text stands without quotes.
_LIMITS = {"pattern", "format", "minLength", "maxLength", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}
_PYTHON_ESCAPES = 'nrbtf\\"'


@dataclass(frozen=True)
class Tool:
    """A function that may be called. schema: of its arguments, as JSON; strict: they must match it."""

    name: str
    schema: str
    strict: bool

    @property
    def parameters(self) -> dict[str, Any]:
        return json.loads(self.schema)


@dataclass
class Rules:
    """Rules of a grammar in the making. mark: a mark of the tokenizer's as it stands in a rule."""

    mark: Callable[[str], str]
    lines: list[str] = field(default_factory=list)

    def add(self, body: str, options: str = "", terminal: bool = False) -> str:
        """A rule of its own; its name."""
        name = f"{'T' if terminal else 'r'}{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)


def literal(text: str) -> str:
    """A text as it stands in a rule."""
    return json.dumps(text, ensure_ascii=False)


@dataclass
class CallFormat:
    """How a family writes calls: `start opening call (between call)* closing`; start: "" where the whole answer is a call."""

    start: str
    opening: str
    call: Callable[[Tool, Rules], str]
    between: Sequence[str]
    closing: Sequence[str]

    def several(self, tools: Sequence[Tool], rules: Rules, many: bool) -> str:
        """What follows the start mark: one call of these tools, or as many as the target writes."""
        one = rules.add(" | ".join(self.call(tool, rules) for tool in tools))
        parts = [literal(self.opening)] if self.opening else []
        parts.append(one)
        if many:
            parts.append(f"({_joined(self.between, rules)} {one})*")
        return " ".join([*parts, _joined(self.closing, rules)]).strip()


def _joined(parts: Sequence[str], rules: Rules) -> str:
    """Marks and texts in a row."""
    return " ".join(map(rules.mark, parts))


def format_of(tokenizer: Any, name: str) -> CallFormat | None:
    """How the target of this tokenizer writes calls; None: in gpt-oss's channels.

    Raises:
      UnsupportedError: in a way that cannot be enforced here.
    """
    if is_harmony(tokenizer):
        return None
    start, end, read = call_grammar(tokenizer) or ("", "", None)
    own = getattr(tokenizer, "tool_parser", None)
    if start == "<tool_call>" and (own is qwen3_coder.parse_tool_call or "<parameter=" in template_source(tokenizer)):
        return CallFormat(start, "\n", _xml_call, ["\n", end, "\n", start, "\n"], ["\n", end])
    if start == "<tool_call>" and (is_json(read) or own is json_tools.parse_tool_call):
        return CallFormat(start, "\n", _json_call, ["\n", end, "\n", start, "\n"], ["\n", end])
    if own is pythonic.parse_tool_call:
        return CallFormat(start, "[", _python_call, [", "], ["]", end])
    if start == "[TOOL_CALLS]" and "[ARGS]" in tokenizer.get_vocab():
        return CallFormat(start, "", _headed_call, [start], [])
    if start.endswith("<|role_sep|>"):
        return CallFormat(f"{end}\n\n{start}", "\n", _json_call, [end, "\n\n", start, "\n"], [end])
    if start == "<|function_call|>":
        return CallFormat(start, "", _json_call, [end, start], [end])
    if start in BARE:
        return CallFormat("", "", _objects("name", "parameters"), ["; "], [])
    if start == "[TOOL_CALLS]" or read is not None and is_json(read):
        call = _LISTED.get(start, _json_call)
        return CallFormat(start, "[", call, [", "], ["]", end] if end else ["]"])
    problem = f"calls of {name} begin with {start!r}, and calls of that form cannot be enforced"
    known = "JSON, Qwen3-Coder's XML, Python calls and gpt-oss's channels can"
    raise UnsupportedError(f"{problem}; {known}", 'Send tool_choice "auto", without strict')


def _schema(tool: Tool) -> str:
    """The arguments' schema in a rule. One that is not strict and cannot be enforced is any object."""
    try:
        rule = json_rule(tool.parameters)
        if not tool.strict:
            json_schema(tool.parameters).validate()
        return rule
    except ConstraintError:
        if tool.strict:
            raise
        return json_rule({"type": "object"})


def _objects(name: str, arguments: str, first: str = "") -> Callable[[Tool, Rules], str]:
    """Calls as objects with these keys: `{"name": "ls", "arguments": {...}}`."""

    def call(tool: Tool, rules: Rules) -> str:
        head = f'{{{first}"{name}": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments}": '
        return f'{literal(head)} {_schema(tool)} "}}"'

    return call


_json_call = _objects("name", "arguments")


def _single_key_call(tool: Tool, rules: Rules) -> str:
    """`{"ls": {...}}`"""
    return f'{literal("{" + json.dumps(tool.name, ensure_ascii=False) + ": ")} {_schema(tool)} "}}"'


# Of the families whose calls are a list of objects, those with other keys: Apertus, Command R7B, InternLM.
_LISTED = {
    "<|tools_prefix|>": _single_key_call,
    "<|START_ACTION|>": _objects("tool_name", "parameters", '"tool_call_id": "0", '),
    "<|action_start|><|plugin|>": _objects("name", "parameters"),
}


def _headed_call(tool: Tool, rules: Rules) -> str:
    """`ls[ARGS]{...}`"""
    return f"{literal(tool.name)} {rules.mark('[ARGS]')} {_schema(tool)}"


def harmony_call(tool: Tool, rules: Rules) -> str:
    """`<|channel|>commentary to=functions.ls <|constrain|>json<|message|>{...}`"""
    head = f"{rules.mark('<|channel|>')} {literal(f'commentary to=functions.{tool.name} ')} {rules.mark('<|constrain|>')}"
    return f'{head} "json" {rules.mark("<|message|>")} {_schema(tool)}'


def _xml_call(tool: Tool, rules: Rules) -> str:
    """`<function=ls>`, then each argument in `<parameter=NAME>` on lines of its own."""
    parts = [literal(f"<function={tool.name}>\n")]
    for key, schema, required in _properties(tool):
        value = rules.add(f"{literal(f'<parameter={key}>' + chr(10))} {_xml_value(tool, key, schema, rules)}")
        parts.append(value if required else f"{value}?")
    return " ".join([*parts, literal("</function>")])


def _xml_value(tool: Tool, key: str, schema: dict[str, Any], rules: Rules) -> str:
    """A string is written as it is, anything else as JSON, each with its end. The reader decides by the schema's type."""
    texts, end = schema.get("enum", [schema["const"]] if "const" in schema else None), literal("\n</parameter>\n")
    if texts and all(isinstance(text, str) and "parameter" not in text and text.lower() != "null" for text in texts):
        return f"{rules.add(' | '.join(map(literal, texts)))} {end}"
    kind = schema.get("type")
    if isinstance(kind, str) and kind != "string":
        return f"{json_rule(schema)} {end}"
    where = f"the parameter {key!r} of {tool.name!r}"
    if tool.strict and kind != "string":
        problem = f"{where} has no single type; this target's calls tell no number from a text"
        raise ConstraintError(problem, "Give it one type, or do not send strict")
    if tool.strict and (limits := sorted(schema.keys() & _LIMITS)):
        problem = f"{limits[0]!r} of {where} cannot be enforced in this target's form of calls"
        raise ConstraintError(problem, "Leave it out, or do not send strict")
    # It ends as soon as its end stands there.
    return rules.add(f"{rules.add(_XML_TEXT, terminal=True)} {end}", options="[lazy]")


def _python_call(tool: Tool, rules: Rules) -> str:
    """`ls(path="a", n=3)`; what is not required may be left out."""
    first, more = [rules.add('""')] * 2
    for key, schema, required in reversed(list(_properties(tool))):
        if not key.isidentifier():
            raise ConstraintError(
                f"the parameter {key!r} of {tool.name!r} is not a name in Python, and this target writes calls as Python"
            )
        value = rules.add(f"{literal(key + '=')} {json_rule(schema, json_allowed_escapes=_PYTHON_ESCAPES)}")
        first, more = (
            rules.add(" | ".join([f"{value} {more}", *([] if required else [first])])),
            rules.add(" | ".join([f'", " {value} {more}', *([] if required else [more])])),
        )
    return f'{literal(f"{tool.name}(")} {first} ")"'


def _properties(tool: Tool) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Each argument's name, its schema with the definitions it may refer to, and whether it must be there.

    Raises:
      ConstraintError: the arguments are not declared one by one.
    """
    schema = tool.parameters
    known = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "title", "description"}
    wrong = sorted(schema.keys() - known)
    if wrong and tool.strict:
        problem = f"the parameters of {tool.name!r} have {wrong[0]!r}, which cannot be enforced in this target's form of calls"
        raise ConstraintError(problem, "Leave it out, or do not send strict")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    required = schema.get("required", [])
    for key, part in schema.get("properties", {}).items():
        part = part if isinstance(part, Mapping) else {}
        try:
            json_schema({**part, **shared}).validate()
        except ConstraintError:
            if tool.strict:
                raise
            part = {"type": part["type"]} if isinstance(part.get("type"), str) else {}
        yield key, {**part, **shared}, key in required
