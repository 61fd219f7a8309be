"""What a request holds its answer to: fields of all APIs as one `Demand`, and that as a grammar in the target's own marks.

    start: thinking? (answer | calls)        thinking is free; the answer is JSON, say; calls are the family's (`call_grammars`)

Knows fields and marks. Knows no masks: they are `constraint`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..constraint import ConstraintError, Grammar, UnsupportedError, is_special, json_rule, json_schema, lark, one_of, regex
from .call_grammars import CallFormat, Rules, Tool, format_of, harmony_call, literal
from .channels import SPECIAL_MARK, frames, is_harmony, opens_reasoning, thinking_marks
from .errors import RequestError, shown

_TEXT = "/(?s:.*)/"
# White space that targets write after their thinking.
_BLANKS = r"/[ \r\n]{1,4}/"
# Fields that hold an answer to something, of which one may be given; of structured_outputs likewise.
FIELDS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "grammar"),
)
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class Demand:
    """What an answer has to match.

    answer: rules of a grammar that begins with `answer`; "" where text is free. what: names it in errors.
    tools: those that may be called; some: others are offered too; forced: at least one is; many: more than one may be.
    """

    answer: str = ""
    what: str = "the answer"
    tools: tuple[Tool, ...] = ()
    forced: bool = False
    many: bool = True
    some: bool = False

    @property
    def holds(self) -> bool:
        """Whether anything is asked for that free text would not do."""
        calls = self.forced or self.some or not self.many or any(tool.strict for tool in self.tools)
        return bool(self.answer or self.tools and calls)


def read_answer(body: Mapping[str, Any]) -> Demand:
    """What the fields of a request hold the answer to, in the words of a chat completion.

    Raises:
      RequestError: names a field that is wrong, or that asks for what cannot be done.
    """
    given = [name for name in FIELDS if name in body and not _is_text(name, body[name])]
    if len(given) > 1:
        raise RequestError(f"{given[0]} and {given[1]} are both given; only one of them can constrain an answer", "Leave one out")
    if not given:
        return Demand()
    name = given[0]
    read = {"response_format": _response_format, "structured_outputs": _structured}.get(name)
    kind, value = read(body[name]) if read else ({"json_schema": "json"}.get(name, name.removeprefix("guided_")), body[name])
    try:
        return replace(_demand(kind, value), what=name)
    except ConstraintError as error:
        raise RequestError(f"{name}: {error.problem}", error.remedy) from None


def _is_text(name: str, value: Any) -> bool:
    return name == "response_format" and value == {"type": "text"}


def _refuse_structural_tags(where: str) -> None:
    problem = (
        f"{where} asks for structural_tag; this server holds whole answers, and calls, to a schema, and no parts of free text"
    )
    raise RequestError(problem, "Send tools with strict, or a grammar")


def _response_format(value: Any) -> tuple[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "structural_tag":
        _refuse_structural_tags("response_format")
    if kind == "json_object":
        return ("json", value["schema"]) if value.get("schema") is not None else ("json_object", True)
    inner = value.get("json_schema") if kind == "json_schema" else None
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), (dict, bool)):
        problem = f"response_format is {shown(value)}; its type must be text, json_object, or json_schema with a schema"
        raise RequestError(problem, 'Send {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}')
    return "json", inner["schema"]


def _structured(value: Any) -> tuple[str, Any]:
    """vLLM's object of one kind; its settings of blanks are the schema's `x-guidance` here."""
    asked = {key: part for key, part in value.items() if part not in (None, False)} if isinstance(value, dict) else {}
    if "structural_tag" in asked:
        _refuse_structural_tags("structured_outputs")
    if len(asked) != 1 or asked.keys() - set(_KINDS):
        problem = f"structured_outputs is {shown(value)}; it must have one of {', '.join(_KINDS)}"
        raise RequestError(problem)
    return next(iter(asked.items()))


def _demand(kind: str, value: Any) -> Demand:
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else value
        json_schema(schema).validate()
        return Demand(f"answer: {json_rule(schema)}\n")
    if kind == "choice":
        found = one_of(tuple(value) if isinstance(value, list) else ())
    elif not isinstance(value, str):
        raise ConstraintError(f"it is {shown(value)}, and must be text", "Send a text")
    elif kind == "regex":
        found = regex(value)
    else:
        found = lark(_as_lark(value))
    found.validate()
    return Demand(_under_answer(found.lark))


def _as_lark(text: str) -> str:
    """A grammar in GBNF, as llama.cpp has it, as one in Lark; one in Lark as it is."""
    if "::=" not in text:
        return text
    try:
        from llguidance.gbnf_to_lark import any_to_lark
    except ImportError:
        return text
    try:
        return any_to_lark(text)
    except Exception as error:  # noqa: BLE001 - whatever a converter of foreign text raises
        raise ConstraintError(f"it cannot be read: {error}", "Correct it") from None


def _under_answer(text: str) -> str:
    """A whole grammar as the rule `answer` of another."""
    return "\n".join("answer" + line[5:] if line.startswith(("start:", "start ")) else line for line in text.splitlines()) + "\n"


def read_tool(function: Mapping[str, Any]) -> Tool:
    """A function that a client offers."""
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(str(function.get("name")), json.dumps(parameters), bool(function.get("strict")))


def grammar_of(demand: Demand, tokenizer: Any, name: str, before: str | None = "") -> Grammar | None:
    """A demand as a grammar for what the target writes after a prompt; None if it may write anything.

    name: the target's, for errors. before: the end of the prompt, which may have opened the reasoning; None: of a text that is
    continued, without any marks.
    Raises:
      ConstraintError: the target writes calls in a way that cannot be enforced; names it.
    """
    if not demand.holds:
        return None
    if before is None:
        return lark(f"start: answer\n{demand.answer}", demand.what)
    rules = Rules(lambda mark: _mark(tokenizer, mark))
    form = format_of(tokenizer, name) if demand.tools else None
    start = _harmony(demand, rules, before) if is_harmony(tokenizer) else _marked(demand, form, rules, tokenizer, name, before)
    return lark(f"start: {start}\n{rules.text}{demand.answer}", demand.what)


def _mark(tokenizer: Any, mark: str) -> str:
    """A mark of special tokens by their numbers, anything else as text; a mark of both in its parts."""
    ids = tokenizer.encode(mark, add_special_tokens=False)
    if all(is_special(tokenizer, id) for id in ids):
        return " ".join(f"<[{id}]>" for id in ids)
    parts = [part for part in SPECIAL_MARK.split(mark) if part]
    return literal(mark) if len(parts) == 1 else " ".join(_mark(tokenizer, part) for part in parts)


def _until(mark: str, rules: Rules) -> str:
    """Free text up to a mark, and the mark: as soon as it stands there, what follows is held."""
    text = rules.add(_TEXT, terminal=True)
    if mark.endswith("]>"):
        return f"{text} {mark}"
    return rules.add(f"{text} {mark}", options="[lazy]")


def _marked(demand: Demand, form: CallFormat | None, rules: Rules, tokenizer: Any, name: str, before: str) -> str:
    """Thinking, then the answer or calls, for families of marks in one stream of text."""
    ways, free = [], not demand.answer and not demand.forced
    if demand.answer and not demand.forced:
        ways += _framed(tokenizer, rules)
    if form is not None:
        calls = form.several(demand.tools, rules, demand.many)
        if free and not form.start:
            problem = f"calls of {name} have no mark, so that nobody can tell where one begins in an answer"
            raise UnsupportedError(problem, 'Send tool_choice "required", or leave strict out')
        start = rules.mark(form.start) if form.start else ""
        ways.append(f"{_until(start, rules) if free else start} {calls}")
    if free:
        ways.append(rules.add(_TEXT, terminal=True))
    thinking = _thinking(rules, tokenizer, before)
    return " ".join([*([thinking] if thinking else []), rules.add(" | ".join(ways))])


def _framed(tokenizer: Any, rules: Rules) -> list[str]:
    """The answer alone, or between marks. Those that are tokens may stand alone too: a prompt may have opened the frame."""
    found, vocabulary = next(iter(frames(tokenizer)), None), tokenizer.get_vocab()
    if found is None:
        return ["answer"]
    blanks, (opening, closing) = f"{rules.add(_BLANKS, terminal=True)}?", map(rules.mark, found)
    if all(mark in vocabulary for mark in found):
        return [f"({opening} {blanks})? answer ({blanks} {closing})?"]
    return ["answer", f"{opening} {blanks} answer {blanks} {closing}"]


def _thinking(rules: Rules, tokenizer: Any, before: str) -> str:
    """What stands before the answer: reasoning to its end where the prompt opened it, else as the target likes."""
    marks = thinking_marks(tokenizer)
    if marks is None:
        return ""
    start, end = map(rules.mark, marks)
    blanks = f"{rules.add(_BLANKS, terminal=True)}?"
    if opens_reasoning(tokenizer, before) or tokenizer.response_initial_state == "reasoning":
        return f"{_until(end, rules)} {blanks}"
    if marks[1] in before:
        return ""
    return f"({rules.add(f'{start} {_until(end, rules)} {blanks}')})?"


def _harmony(demand: Demand, rules: Rules, before: str) -> str:
    """gpt-oss: messages of analysis, then one of the final channel or a call."""
    if "<|channel|>" in before.rpartition("<|start|>")[2]:
        problem = "the prompt already opens one of the answer's channels; a grammar has to begin before that"
        raise ConstraintError(problem, "Leave that beginning of the answer or the grammar out")
    channel, message, end, begin = map(rules.mark, ("<|channel|>", "<|message|>", "<|end|>", "<|start|>"))
    text = rules.add(_TEXT, terminal=True)
    aside = rules.add(f'{channel} ("analysis" | "commentary") {message} {text} {end} {begin} "assistant"')
    ways = [harmony_call(tool, rules) for tool in demand.tools]
    if not demand.forced:
        json_mark = f'(" " {rules.mark("<|constrain|>")} "json")?' if demand.answer else ""
        ways.append(f'{channel} "final" {json_mark} {message} {"answer" if demand.answer else text}')
    return f"{aside}* {rules.add(' | '.join(ways))}"
