"""From messages to a prompt: roles, parts, tool history and the chat template. Chat and server both write prompts with it.

Knows chat templates. Knows no HTTP and no models.

Templates differ in what they read: `prompt_forms` finds the form of the messages that a template renders completely.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from mlx_lm.server import convert_chat

from ..chat_template import template_variables
from ..errors import DFlashError
from ..text import common_start
from .channels import call_spelling, has_reasoning, template_source
from .errors import shown
from .prompt_forms import REASONING, Arguments, Rendered, Spelling, best_form

_ROLES = ("system", "user", "assistant", "tool")
# OpenAI's newer and older names for these.
_SAME_ROLES = {"developer": "system", "function": "tool"}
# Kinds of parts that are text, and the key that holds it.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_ASKS_FOR_NULL = re.compile(
    r"""(?P<content>\w+(?:\[\w+\])?(?:\[\s*["']content["']\s*\]|\.content))\s+is\s+(?P<negated>(?:not\b)?)\s*none\b""",
    re.IGNORECASE,
)
_WANTS_SHORT_IDS = re.compile(r"\blength\s*!=\s*9\b")


@dataclass
class Prompt:
    """A prompt's token ids.

    shared: (length, kind) of the beginnings that later prompts will have in common with it, for the prefix cache.
    before: its text after the last message, which may open the reasoning.
    """

    ids: list[int]
    shared: list[tuple[int, str]]
    before: str = ""


def read_messages(
    messages: Any,
    tokenizer: Any,
    role_mapping: Mapping[str, str] | None = None,
    name: str = "messages",
    left_out: list[str] | None = None,
) -> list[dict[str, Any]]:
    """Messages of a request in one form: known roles, content as text, arguments of calls as `Arguments`.

    A part that is no text (an image) is refused in what the user asks now, who can take it out. In what a tool found and in
    earlier messages a line says in its place that it is not shown: every later request of an agent has it again.

    left_out: gets the kinds of such parts.
    Raises:
      DFlashError: names what is not a message.
    """
    if not isinstance(messages, list) or not messages:
        raise DFlashError(f"{name} is {shown(messages)}; it must be a list with at least one message", "Add one")
    kinds: list[str] = [] if left_out is None else left_out
    asked = _asked_now(messages)
    return [
        _read_message(message, tokenizer, role_mapping or {}, None if place == asked else kinds)
        for place, message in enumerate(messages)
    ]


def _asked_now(messages: Sequence[Any]) -> int | None:
    """The place of the message with which the user asks; None if the last one answers, or comes with what a tool found."""
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    last = next((place for place in range(len(roles) - 1, -1, -1) if roles[place] in ("user", "assistant")), 0)
    return last if roles[last] == "user" and roles[last - 1 : last] not in (["tool"], ["function"]) else None


def _read_message(message: Any, tokenizer: Any, role_mapping: Mapping[str, str], left_out: list[str] | None) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DFlashError(f"a message is {shown(message)}; every message must be an object with a role", "Add the role")
    read = {key: value for key, value in message.items() if value is not None and value != []}
    read["role"] = _role(message["role"], tokenizer, role_mapping)
    _check_id(read, "tool_call_id")
    thoughts = _thoughts(message.get("content")) if read["role"] == "assistant" else []
    shown_parts = [part for part in message["content"] if not _is_thought(part)] if thoughts else message.get("content")
    read["content"] = _text(shown_parts, left_out)
    if called := read.pop("function_call", None):
        # OpenAI's older form of one call.
        read.setdefault("tool_calls", [{"type": "function", "function": called}])
    if "tool_calls" in read:
        read["tool_calls"] = _read_calls(read["tool_calls"])
    if _WANTS_SHORT_IDS.search(template_source(tokenizer)):
        _shorten_ids(read)
    thought = next((read[key] for key in REASONING if isinstance(read.get(key), str)), "\n".join(thoughts) or None)
    for key in REASONING:
        read.pop(key, None)
    if thought is not None:
        read |= dict.fromkeys(_reasoning_names(tokenizer), thought)
    return read


def _is_thought(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("thinking", "reasoning")


def _thoughts(content: Any) -> list[str]:
    """Reasoning that comes as parts of the content, as in Mistral's own API: each a text, or parts with texts."""
    found = [part.get("thinking", part.get("text")) for part in content if _is_thought(part)] if isinstance(content, list) else []
    return [_text(thought, []) for thought in found]


def _shorten_ids(message: dict[str, Any]) -> None:
    """Change ids of calls to nine letters or digits, as Mistral's templates want them; a call and its result get the same."""
    holders = [(call, "id") for call in message.get("tool_calls", ())]
    if message["role"] == "tool":
        holders.append((message, "tool_call_id"))
    for holder, key in holders:
        given = str(holder.get(key) or "")
        if not re.fullmatch("[A-Za-z0-9]{9}", given):
            holder[key] = hashlib.sha256(given.encode()).hexdigest()[:9]


def _role(role: str, tokenizer: Any, role_mapping: Mapping[str, str]) -> str:
    source = template_source(tokenizer)
    if role == "developer" and '"system"' not in source and "'system'" not in source and "developer" in source:
        return role
    role = _SAME_ROLES.get(role, role)
    if role in _ROLES or role in role_mapping or role in _template_roles(source):
        return role
    known = ", ".join((*_ROLES, *_SAME_ROLES))
    raise DFlashError(f"a message has the role {shown(role)}; this server knows {known}", "Use one of these roles")


def _template_roles(source: str) -> set[str]:
    """Roles that a template asks for by name."""
    asked = re.findall(r"""role["'\])\s]*(?:==|!=|in)\s*([\[(]?(?:\s*["'][^"']*["']\s*,?)+)""", source)
    return {name for names in asked for name in re.findall(r"""["']([^"']*)["']""", names)}


def _text(content: Any, left_out: list[str] | None) -> str:
    """Content as one text: parts are joined, null is empty. A part that is no text is refused if left_out is None."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DFlashError(f"content is {shown(content)}; it must be text or a list of parts", "Send it as text")
    return "".join(_text_of(part, left_out) for part in content)


def _text_of(part: Any, left_out: list[str] | None) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise DFlashError(f"a part of a message is {shown(part)}; it must be an object with a type", "Send text parts")
    if kind not in _TEXT_PARTS:
        if left_out is None:
            raise DFlashError(f"a part of a message has type {shown(kind)}; this server reads text only", "Send text parts")
        left_out.append(kind)
        return f"\n[{kind.removeprefix('input_').removesuffix('_url')[:40]} not shown: this model reads text only]\n"
    key = _TEXT_PARTS[kind]
    if not isinstance(part.get(key), str):
        raise DFlashError(f"{shown(key)} of a {kind} part is {shown(part.get(key))}; it must be text", "Send it as text")
    return part[key]


def _read_calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DFlashError(f"tool_calls is {shown(calls)}; they must be a list of objects", "Send the calls as they came")
    read = []
    for call in calls:
        function = call.get("function", {} if "name" not in call else call)
        if isinstance(custom := call.get("custom"), dict):
            # OpenAI's call of a tool that takes text.
            function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
            call = {"id": call.get("id"), "type": "function", "function": function}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DFlashError(f"a tool call is {shown(call)}; it must have a function with a name", "Send the call as it came")
        _check_id(call, "id")
        inner = {**function, "arguments": read_arguments(function.get("arguments"))}
        # Some templates read `call.name`, others `call.function.name`; OpenAI's is the latter.
        read.append({"type": "function", **call, "function": inner} if function is not call else {**call, **inner})
    return read


def _check_id(message: Mapping[str, Any], key: str) -> None:
    if not isinstance(message.get(key), (str, int, NoneType)):
        raise DFlashError(f"the id of a tool call is {shown(message[key])}; it must be text", "Send the id as it came")


def read_arguments(given: Any) -> Arguments:
    """Arguments of an earlier call, an object or its text. Empty text is no arguments; a text that was cut off stays readable."""
    if given is None or isinstance(given, str) and not given.strip():
        return Arguments({}, "{}")
    if isinstance(given, dict):
        return Arguments(given, json.dumps(given, ensure_ascii=False))
    text, value = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False), given
    for _ in range(2):
        # A second time for text that was encoded twice.
        if isinstance(value, str):
            try:
                text, value = value, _whole_characters(json.loads(value))
            except (ValueError, RecursionError):
                break
    return Arguments(value if isinstance(value, dict) else {"arguments": text}, text)


def _whole_characters(value: Any) -> Any:
    """A JSON value with U+FFFD for half of a surrogate pair, which JSON may escape and no tokenizer takes."""
    text = json.dumps(value, ensure_ascii=False)
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value if whole == text else json.loads(whole)


def _reasoning_names(tokenizer: Any) -> tuple[str, ...]:
    """The names under which the template reads earlier reasoning; all known names if it does not show that."""
    source = template_source(tokenizer)
    for name in REASONING:
        if re.search(rf"""\.{name}\b|["']{name}["']""", source):
            return (name,)
    return REASONING[:2]


def render_text(tokenizer: Any, text: str | list[int]) -> Prompt:
    """A prompt, text or token ids, that is continued as it is."""
    ids = list(tokenizer.encode(text)) if isinstance(text, str) else text
    return Prompt(ids, [(len(ids) - 1, "assistant")], "")


def render_chat(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    template_args: Mapping[str, Any] | None = None,
    role_mapping: Mapping[str, str] | None = None,
    continues: bool = False,
) -> Prompt:
    """Messages as `read_messages` gives them, written by the chat template; without one roles are written out.

    continues: the last message is the beginning of the answer, which goes on after it.

    Raises:
      DFlashError: the chat template refuses these messages in every form.
    """
    if not tokenizer.has_chat_template:
        return render_text(tokenizer, convert_chat([*messages], dict(role_mapping) if role_mapping else None))
    variables = {"tools": list(tools) if tools else None, **(template_args or {})}
    if not tokenizer.has_thinking and has_reasoning(tokenizer):
        # For marks that it does not know, mlx-lm would switch thinking off.
        variables.setdefault("enable_thinking", True)

    def write(some: Sequence[dict[str, Any]], **more: Any) -> Rendered:
        if any(message["content"] is None for message in some):
            more |= _template_for_null(tokenizer)
        return tokenizer.apply_chat_template([*some], tokenize=False, **{**variables, **more})

    spell = call_spelling(tokenizer)
    if other := _other_variables(tokenizer, variables, write):
        variables |= other
    elif variables["tools"]:
        messages = _with_tools(messages, variables["tools"], write, spell)
    end = {"add_generation_prompt": False, "continue_final_message": True} if continues else {"add_generation_prompt": True}
    written, rendered = best_form(messages, lambda some: write(some, **end), spell)
    ids = list(tokenizer.encode(rendered, add_special_tokens=False)) if isinstance(rendered, str) else list(rendered)
    if isinstance(rendered, str):
        before = _after_the_last(messages[-1]["content"].strip(), written, rendered, lambda some: str(write(some, **end)))
    else:
        before = tokenizer.decode(ids)
    shared = _shared(tokenizer, written, ids, write) if messages[-1]["role"] == "user" else [(len(ids) - 1, "assistant")]
    return Prompt(ids, shared, before)


def _after_the_last(said: str, written: Sequence[dict[str, Any]], rendered: str, write: Callable[..., Rendered]) -> str:
    """What the template writes after the text of the last message, `said`.

    The text itself cannot be looked for: `n`, `think` or `user` may stand in what follows too. So it is written with one letter
    more, and what both have in common at their ends follows it.
    """
    *others, last = written
    parts = last["content"] if isinstance(last["content"], list) else None
    text = (parts[-1]["text"] if parts else last["content"] or "").rstrip()
    try:
        if text.endswith(said) and "tool_responses" not in last:
            longer = text + ("y" if text.endswith("x") else "x")
            other = write([*others, {**last, "content": [{"type": "text", "text": longer}] if parts else longer}])
            return rendered[len(rendered) - common_start(rendered[::-1], other[::-1]) :]
    except Exception:  # noqa: BLE001, S110 - a template is a program and may raise anything; this one then tells nothing
        pass
    return rendered.rpartition(said)[2] if said else rendered


def _other_variables(tokenizer: Any, variables: Mapping[str, Any], write: Callable[..., Rendered]) -> dict[str, Any]:
    """Variables without which a template is incomplete: tools under another name (SmolLM3's, Firefunction's), and the day."""
    known = (template_variables(tokenizer) or set()) & {"xml_tools", "functions", "datetime"} - variables.keys()
    if not known:
        return {}
    tools = variables["tools"] or []
    functions = [made for tool in tools if isinstance(made := tool.get("function", tool), dict)]
    day = {"datetime": time.strftime("%Y-%m-%d")} if "datetime" in known else {}

    def written(**more: Any) -> str | None:
        try:
            return str(write([{"role": "user", "content": "x"}], **more))
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything
            return None

    plain = written()
    if plain is not None and all(str(function.get("name")) in plain for function in functions):
        return {}
    listed = json.dumps(functions, ensure_ascii=False)
    for more in ({}, {"xml_tools": tools}, {"functions": listed}, {"functions": functions}):
        text = written(**more, **day)
        if text is not None and more.keys() <= known and all(str(function.get("name")) in text for function in functions):
            return more | day
    return {}


def _with_tools(
    messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]], write: Callable[..., Rendered], spell: Spelling
) -> Sequence[dict[str, Any]]:
    """Messages in which the template finds the tools: as a variable, or within a system message in front.

    Templates read them there as text (Phi-4-mini; OLMo 3 as `functions`) or as a list (GLM-4); others write none (DeepSeek's).
    """

    def written(*some: dict[str, Any], **more: Any) -> str:
        try:
            return str(write([*some, {"role": "user", "content": "x"}], **more))
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything
            return ""

    if written() != written(tools=None) or not written(tools=None):
        return messages
    functions = [made for tool in tools if isinstance(made := tool.get("function", tool), dict)]
    front, rest = {"role": "system", "content": ""}, messages
    if messages[0]["role"] == "system":
        front, *rest = messages
    listed = json.dumps(functions, ensure_ascii=False)
    for key, held in (("tools", listed), ("tools", tools), ("functions", listed)):
        first = {**front, key: held}
        text = written(first)
        if all(json.dumps(function.get("name"), ensure_ascii=False) in text for function in functions):
            return [first, *rest]
    lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    about = f"You can call these functions:\n{lines}\n\nTo call one, write its name and its arguments as JSON:\n"
    text = f"{front['content']}\n\n{about}{spell([('NAME', 'ARGUMENTS')])}".strip()
    return [{**front, "content": text}, *rest]


def _template_for_null(tokenizer: Any) -> dict[str, str]:
    """The chat template, changed to take a message without content as one whose content is null: transformers drops such keys."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str) or not _ASKS_FOR_NULL.search(template):
        return {}
    said = {
        "": r"(\g<content> is none or \g<content> is undefined)",
        "not": r"(\g<content> is not none and \g<content> is defined)",
    }
    return {"chat_template": _ASKS_FOR_NULL.sub(lambda found: found.expand(said[found["negated"] or ""]), template)}


def _shared(
    tokenizer: Any, messages: Sequence[dict[str, Any]], ids: list[int], write: Callable[..., Rendered]
) -> list[tuple[int, str]]:
    """Where later prompts may differ from this one: after the system message, before open reasoning, before the last token.

    Returns: (length in tokens, kind) each, as in `Prompt.shared`.
    """
    shared = []
    count = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count:
        try:
            text = write([*messages[:count], {"role": "user", "content": ""}], add_generation_prompt=False)
        except Exception:  # noqa: BLE001 - as above: this template then tells nothing
            text = ""
        start = list(tokenizer.encode(text, add_special_tokens=False)) if isinstance(text, str) else list(text)
        end = next((i for i, (a, b) in enumerate(zip(start, ids, strict=False)) if a != b), 0)
        shared += [(end, "system")] if end else []
    tail = tokenizer.rfind_think_start(ids, start=len(ids) - 11) if tokenizer.has_thinking else -1
    if tail > (shared[-1][0] if shared else 0):
        shared.append((tail, "user"))
    return [*shared, (len(ids) - 1, "assistant" if tail >= 0 else "user")]
