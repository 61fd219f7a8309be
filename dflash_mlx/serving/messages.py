"""From messages to a prompt: roles, parts, tool history and the chat template. Chat and server both write prompts with it.

Knows chat templates. Knows no HTTP and no models.

Templates differ in what they read: where a system message may stand, whether arguments of calls are objects or text, under
which name earlier reasoning comes. A prompt is tried as it came, then in the other forms, and the first that keeps what was
said is taken.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mlx_lm.server import convert_chat

from ..errors import DFlashError
from .channels import has_reasoning, template_source
from .errors import shown

_ROLES = ("system", "user", "assistant", "tool")
# OpenAI's newer and older names for these.
_SAME_ROLES = {"developer": "system", "function": "tool"}
# Kinds of parts that are text, and the key that holds it.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_ASKS_FOR_NULL = re.compile(
    r"""(?P<content>\w+(?:\[\w+\])?(?:\[\s*["']content["']\s*\]|\.content))\s+is\s+(?P<negated>(?:not\b)?)\s*none\b""",
    re.IGNORECASE,
)
_WANTS_SHORT_IDS = re.compile(r"\blength\s*!=\s*9\b")
_Rendered = str | list[int]


@dataclass
class Prompt:
    """A prompt's token ids.

    shared: (length, kind) of the beginnings that later prompts will have in common with it, for the prefix cache.
    before: its text from behind the last message on, which may open the reasoning.
    """

    ids: list[int]
    shared: list[tuple[int, str]]
    before: str = ""


class Arguments(dict):
    """Arguments of an earlier call as an object, with the text that they came in. Templates take the one or the other."""

    def __init__(self, value: Mapping[str, Any], text: str):
        super().__init__(value)
        self.text = text


def read_messages(
    messages: Any, tokenizer: Any, role_mapping: Mapping[str, str] | None = None, name: str = "messages"
) -> list[dict[str, Any]]:
    """Messages of a request in one form: known roles, content as text, arguments of calls as `Arguments`.

    Raises:
      DFlashError: names what is no message.
    """
    if not isinstance(messages, list) or not messages:
        raise DFlashError(f"{name} is {shown(messages)}; it must be a list with at least one message", "Add one")
    return [_read_message(message, tokenizer, role_mapping or {}) for message in messages]


def _read_message(message: Any, tokenizer: Any, role_mapping: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DFlashError(f"a message is {shown(message)}; every message must be an object with a role", "Add the role")
    read = {key: value for key, value in message.items() if value is not None and value != []}
    read["role"] = _role(message["role"], tokenizer, role_mapping)
    read["content"] = _text(message.get("content"))
    if called := read.pop("function_call", None):
        # OpenAI's older form of one call.
        read.setdefault("tool_calls", [{"type": "function", "function": called}])
    if "tool_calls" in read:
        read["tool_calls"] = _read_calls(read["tool_calls"])
    if _WANTS_SHORT_IDS.search(template_source(tokenizer)):
        _shorten_ids(read)
    thought = next((read[key] for key in _REASONING if isinstance(read.get(key), str)), None)
    for key in _REASONING:
        read.pop(key, None)
    if thought is not None:
        read |= dict.fromkeys(_reasoning_names(tokenizer), thought)
    return read


def _shorten_ids(message: dict[str, Any]) -> None:
    """Ids of calls as Mistral's templates want them, nine letters or digits; the same one for a call and for its result."""
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


def _text(content: Any) -> str:
    """Content as one text: parts are joined, null is empty."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DFlashError(f"content is {shown(content)}; it must be a text or a list of parts", "Send it as text")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            about = f"has type {shown(kind)}" if isinstance(part, dict) else f"is {shown(part)}"
            raise DFlashError(f"a part of a message {about}; this server reads text only", "Send text parts")
        key = _TEXT_PARTS[kind]
        if not isinstance(part.get(key), str):
            raise DFlashError(f"{shown(key)} of a {kind} part is {shown(part.get(key))}; it must be text", "Send it as text")
    return "".join(part[_TEXT_PARTS[part["type"]]] for part in content)


def _read_calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DFlashError(f"tool_calls is {shown(calls)}; they must be a list of objects", "Send the calls as they came")
    read = []
    for call in calls:
        function = call.get("function", {} if "name" not in call else call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DFlashError(f"a tool call is {shown(call)}; it must have a function with a name", "Send the call as it came")
        inner = {**function, "arguments": read_arguments(function.get("arguments"))}
        # Some templates read `call.name`, others `call.function.name`; OpenAI's is the latter.
        read.append({"type": "function", **call, "function": inner} if function is not call else {**call, **inner})
    return read


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
    """The names under which the template reads earlier reasoning; all of them where it does not tell."""
    source = template_source(tokenizer)
    for name in _REASONING:
        if re.search(rf"""\.{name}\b|["']{name}["']""", source):
            return (name,)
    return _REASONING[:2]


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

    continues: the last message is the beginning of the answer, which goes on behind it.

    Raises:
      DFlashError: the chat template refuses these messages in every form.
    """
    if not tokenizer.has_chat_template:
        return render_text(tokenizer, convert_chat([*messages], dict(role_mapping) if role_mapping else None))
    variables = {"tools": list(tools) if tools else None, **(template_args or {})}
    if not tokenizer.has_thinking and has_reasoning(tokenizer):
        # mlx-lm switches thinking off for marks that it does not know.
        variables.setdefault("enable_thinking", True)

    def write(some: Sequence[dict[str, Any]], **more: Any) -> _Rendered:
        if any(message["content"] is None for message in some):
            more |= _template_for_null(tokenizer)
        return tokenizer.apply_chat_template([*some], tokenize=False, **{**variables, **more})

    end = {"add_generation_prompt": False, "continue_final_message": True} if continues else {"add_generation_prompt": True}
    written, rendered = _first_that_keeps_all(messages, lambda some: write(some, **end))
    ids = list(tokenizer.encode(rendered, add_special_tokens=False)) if isinstance(rendered, str) else list(rendered)
    said = messages[-1]["content"].strip()
    before = rendered.rpartition(said)[2] if isinstance(rendered, str) and said else rendered
    shared = _shared(tokenizer, written, ids, write) if messages[-1]["role"] == "user" else [(len(ids) - 1, "assistant")]
    return Prompt(ids, shared, before if isinstance(before, str) else tokenizer.decode(ids))


def _template_for_null(tokenizer: Any) -> dict[str, str]:
    """A chat template that takes content without a value as null: transformers leaves such keys out of a message."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str) or not _ASKS_FOR_NULL.search(template):
        return {}
    said = {
        "": r"(\g<content> is none or \g<content> is undefined)",
        "not": r"(\g<content> is not none and \g<content> is defined)",
    }
    return {"chat_template": _ASKS_FOR_NULL.sub(lambda found: found.expand(said[found["negated"] or ""]), template)}


def _first_that_keeps_all(
    messages: Sequence[dict[str, Any]], write: Callable[[Sequence[dict[str, Any]]], _Rendered]
) -> tuple[Sequence[dict[str, Any]], _Rendered]:
    """The first form of the messages that the template takes and of which it drops no system message; else the first it takes.

    Raises:
      DFlashError: it takes none; says why it refused the first.
    """
    kept = [m["content"].strip() for m in messages if m["role"] == "system"]
    kept += [m["content"].strip() for m in messages if m["role"] == "user"][-1:]
    calls = [call.get("function", call) for message in messages for call in message.get("tool_calls", ())]
    kept += [call["name"] for call in calls]
    # Arguments as Python writes objects: the template wants their text.
    spoiled = [str(dict(call["arguments"])) for call in calls if call["arguments"]]
    taken, fault = None, None
    late = any(one["role"] != "system" == two["role"] for one, two in pairwise(messages))
    for form in _forms(messages, late and _names_late_systems_alone(write)):
        try:
            rendered = write(form)
        except Exception as error:  # noqa: BLE001 - a template is a program and may raise anything
            fault = fault or error
            continue
        if not isinstance(rendered, str):
            return form, rendered
        if any(text in rendered for text in spoiled):
            continue
        if all(text in rendered for text in kept):
            return form, rendered
        taken = taken or (form, rendered)
    if taken is None:
        raise DFlashError(f"the chat template refused these messages: {fault}", "Send messages that it takes") from fault
    return taken


def _names_late_systems_alone(write: Callable[[Sequence[dict[str, Any]]], _Rendered]) -> bool:
    """Whether the template writes the role `system` behind a user's message and not in front, as Gemma's templates do.

    Such a template copies roles that it does not know; its target was never trained on them.
    """

    def named(*roles: str) -> bool:
        try:
            return "system" in str(write([{"role": role, "content": "x"} for role in roles])).lower()
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything
            return False

    return named("user", "system") and not named("system", "user")


def _forms(messages: Sequence[dict[str, Any]], front: bool) -> Iterator[Sequence[dict[str, Any]]]:
    """The messages as they came, then the other forms that templates want, the likeliest first.

    front: system messages that came later are joined in front before the messages are tried as they came.
    """
    systems = [place for place, message in enumerate(messages) if message["role"] == "system"]
    orders = [messages]
    if systems and systems != [0]:
        orders.append(_joined_in_front(messages))
    if systems:
        orders.append(_in_first_user_message(messages))
    if any(one["role"] == two["role"] == "user" for one, two in pairwise(m for m in messages if m["role"] != "system")):
        orders += [_users_joined(order) for order in orders[1:] or orders]
    if front:
        orders = [*orders[1:], messages]
    for order in orders:
        yield order
    calls = any("tool_calls" in message for message in messages)
    for order in orders if calls else ():
        yield [_changed(message, text=True) for message in order]
        yield [_changed(message, null=True) for message in order]
        yield [_changed(message, text=True, null=True) for message in order]
        yield [_changed(message, thought_only=True) for message in order]
        yield [_changed(part, text=True, null=True) for message in order for part in _calls_apart(message)]
    for order in orders[:1]:
        yield [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in order]


def _joined_in_front(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system messages as one, before the others."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _in_first_user_message(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates without a system role: its text stands before the first message of the user.

    Where the user said nothing it is the user's message: some templates write no system message by itself, or refuse it.
    """
    system, *others = _joined_in_front(messages)
    first = next((place for place, message in enumerate(others) if message["role"] == "user"), None)
    if first is None:
        return [{**system, "role": "user"}, *others]
    others[first] = {**others[first], "content": f"{system['content']}\n\n{others[first]['content']}"}
    return others


def _users_joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates whose roles must alternate: messages of the user that follow each other are one."""
    joined = []
    for message in messages:
        if joined and message["role"] == joined[-1]["role"] == "user":
            before = joined.pop()
            message = {**before, "content": f"{before['content']}\n\n{message['content']}"}
        joined.append(message)
    return joined


def _changed(message: dict[str, Any], text: bool = False, null: bool = False, thought_only: bool = False) -> dict[str, Any]:
    """A message with calls in another form.

    text: arguments as text alone; null: no content as null;
    thought_only: reasoning without content, for gpt-oss's template.
    """
    if "tool_calls" not in message:
        return message
    changed = {**message}
    if text:
        changed["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
    if null and not message["content"]:
        changed["content"] = None
    if thought_only and any(name in message for name in _REASONING):
        changed["content"] = ""
    return changed


def _calls_apart(message: dict[str, Any]) -> list[dict[str, Any]]:
    """What was said and what was called as two messages, for DeepSeek-R1's template, which writes the one or the other."""
    if "tool_calls" not in message or not message["content"]:
        return [message]
    return [{key: value for key, value in message.items() if key != "tool_calls"}, {**message, "content": ""}]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    if "function" not in call:
        return {**call, "arguments": call["arguments"].text}
    return {**call, "function": {**call["function"], "arguments": call["function"]["arguments"].text}}


def _shared(
    tokenizer: Any, messages: Sequence[dict[str, Any]], ids: list[int], write: Callable[..., _Rendered]
) -> list[tuple[int, str]]:
    """Where later prompts part from this one: behind the system message, before an open reasoning, before the last token."""
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
