"""The forms in which a chat template may expect messages, and how to find the one that it renders completely.

Knows chat templates. Knows no requests and no tokenizers.

Templates differ in what they read: where a system message may stand, whether roles must alternate, whether arguments of calls
are objects or text, whether they know calls at all. A template silently drops what it does not read. So each form is tried with
a unique word in place of every text, and the first form that loses the fewest words is used.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..errors import DFlashError

# Names under which templates read earlier reasoning.
REASONING = ("reasoning_content", "reasoning", "thinking")
# Names that templates have for the role of a result, beside `tool`.
_RESULTS = ("environment", "observation", "ipython", "function", "tool_response")
Messages = Sequence[dict[str, Any]]
Rendered = str | list[int]
# Names of calls and their arguments as text, written as one text.
Spelling = Callable[[Sequence[tuple[str, str]]], str]


class Arguments(dict):
    """Arguments of an earlier call as an object, with the text that they came in. Templates take the one or the other."""

    def __init__(self, value: Mapping[str, Any], text: str):
        super().__init__(value)
        self.text = text


def best_form(messages: Messages, write: Callable[[Messages], Rendered], spell: Spelling) -> tuple[Messages, Rendered]:
    """The form of the messages of which the template drops least, and the rendered prompt.

    spell: calls as text, for a template that writes none.
    Raises:
      DFlashError: it refuses every form; says why it refused the first.
    """
    if any(map(_thought_of, messages)) and _reads_thoughts_within(write):
        as_given = write
        write = lambda some: as_given([_thought_within(message) for message in some])  # noqa: E731
    late = any(one["role"] != "system" == two["role"] for one, two in pairwise(messages))
    front = late and _names_late_systems_alone(write)
    within = any(message["role"] == "tool" for message in messages) and _reads_results_within(write)
    stand_ins, words = _stand_ins(messages)
    roles = functools.cache(lambda: _roles_of_results(write))
    fault = None

    def by_loss() -> Iterator[Messages]:
        ranked = []
        every, tries = (_forms(some, front, within, spell, roles) for some in (messages, stand_ins))
        for form, tried in zip(every, tries, strict=True):
            if lost := _lost(tried, words, write):
                ranked.append((lost, form))
            else:
                yield form
        yield from (form for _, form in sorted(ranked, key=lambda one: one[0]))

    for form in by_loss():
        try:
            return form, write(form)
        except Exception as error:  # noqa: BLE001 - a template is a program and may raise anything
            fault = fault or error
    raise DFlashError(f"the chat template refused these messages: {fault}", "Send messages that it takes") from fault


def _stand_ins(messages: Messages) -> tuple[Messages, list[str]]:
    """The same messages with a unique word in place of each text, name of a call and arguments; and these words."""
    words: list[str] = []

    def word() -> str:
        words.append(f"zq{len(words)}q")
        return words[-1]

    def like(value: Any) -> Any:
        return {"zq": word()} if isinstance(value, dict) else [word()] if isinstance(value, list) else word()

    def call(given: dict[str, Any]) -> dict[str, Any]:
        function, name = given.get("function", given), word()
        value = {key: like(inner) for key, inner in function["arguments"].items()}
        changed = {**function, "name": name, "arguments": Arguments(value, json.dumps(value))}
        return {**given, "function": changed} if "function" in given else changed

    found = []
    for message in messages:
        held = {**message, "content": word() if message["content"].strip() else ""}
        if "tool_calls" in message:
            held["tool_calls"] = [call(one) for one in message["tool_calls"]]
        found.append(held)
    return found, words


def _lost(form: Messages, words: Sequence[str], write: Callable[[Messages], Rendered]) -> int:
    """How many of the words a template drops; more than there are if it refuses the form."""
    try:
        rendered = write(form)
    except Exception:  # noqa: BLE001 - a template is a program and may raise anything
        return len(words) + 2
    if not isinstance(rendered, str):
        return 0
    # Arguments, or one of their values, as Python writes objects and lists: the template wants their text.
    spoiled = any(f": '{word}'" in rendered or f"['{word}']" in rendered for word in words)
    return len(words) + 1 if spoiled else sum(word not in rendered for word in words)


def _names_late_systems_alone(write: Callable[[Messages], Rendered]) -> bool:
    """Whether the template writes the role `system` after a user's message and not in front, as Gemma's templates do.

    Such a template copies roles that it does not know; its target was never trained on them.
    """

    def named(*roles: str) -> bool:
        try:
            return "system" in str(write([{"role": role, "content": "x"} for role in roles])).lower()
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything
            return False

    return named("user", "system") and not named("system", "user")


def _reads_results_within(write: Callable[[Messages], Rendered]) -> bool:
    """Whether the template reads results as `tool_responses` of the message with their calls, as Gemma 4's first template does.

    Such a template copies the role `tool` as it would any other; its target was never trained on that.
    """
    asked, word = {"role": "user", "content": "x"}, "zqrq"
    call = {"type": "function", "function": {"name": "f", "arguments": Arguments({}, "{}")}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}

    def written(*some: dict[str, Any]) -> str:
        try:
            return str(write([asked, *some]))
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything
            return ""

    if word not in written({**calls, "tool_responses": [{"name": "f", "response": word}]}):
        return False
    as_tool, as_any = (written(calls, {"role": role, "content": word}) for role in ("tool", "zqrole"))
    return as_any.replace("zqrole", "tool") == as_tool


def _thought_of(message: dict[str, Any]) -> str:
    return next((message[name] for name in REASONING if message.get(name)), "")


def _thought_within(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose reasoning is a part of its content."""
    thought, content = _thought_of(message), message["content"]
    if not thought:
        return message
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    rest = {key: value for key, value in message.items() if key not in REASONING}
    return {**rest, "content": [{"type": "thinking", "thinking": thought}, *parts]}


def _reads_thoughts_within(write: Callable[[Messages], Rendered]) -> bool:
    """Whether the template reads earlier reasoning as a part of the content, and under no name of its own (Ministral 3)."""

    def wrote(change: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
        said = {"role": "assistant", "content": "y", **dict.fromkeys(REASONING, "zqtq")}
        try:
            text = str(write([{"role": "user", "content": "x"}, change(said)]))
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything
            return False
        # Not the list itself, as Python or JSON writes it.
        return "zqtq" in text and not any(f"{quote}thinking{quote}, {quote}thinking" in text for quote in "'\"")

    return wrote(_thought_within) and not wrote(dict)


def _roles_of_results(write: Callable[[Messages], Rendered]) -> list[str]:
    """Roles under which the template reads results, if it reads only roles that it names (OLMo 3)."""

    def wrote(role: str) -> bool:
        said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": role, "content": "zqrq"}]
        try:
            return "zqrq" in str(write(said))
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything
            return False

    return [] if wrote("zqrole") else [role for role in _RESULTS if wrote(role)]


def _forms(
    messages: Messages, front: bool, within: bool, spell: Spelling, roles: Callable[[], Sequence[str]]
) -> Iterator[Messages]:
    """The messages as they came, then the other forms that templates want, the likeliest first.

    front: system messages that came later are joined in front before the messages are tried as they came.
    within: results are tried within the message of their calls before that. roles: other roles of results.
    """
    orders = _orders(messages, front)
    if within:
        orders = [*map(_results_within, orders), *orders]
    yield from orders
    calls = any("tool_calls" in message for message in messages)
    for order in orders if calls else ():
        yield _ids_with_names(order)
        yield [_changed(message, text=True) for message in order]
        yield [_changed(message, null=True) for message in order]
        yield [_changed(message, text=True, null=True) for message in order]
        yield [_changed(message, thought_only=True) for message in order]
        yield [part for message in order for part in _calls_apart(message)]
        yield [_changed(part, text=True, null=True) for message in order for part in _calls_apart(message)]
        yield [_changed(message, whole=True) for message in order]
        yield [_changed(message, values=True) for message in order]
    for order in orders if calls else ():
        single = _one_at_a_time([part for message in order for part in _calls_apart(message)])
        yield single
        yield [_changed(message, text=True, null=True) for message in single]
    for order in orders[:1]:
        yield [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in order]
    if calls or any(message["role"] == "tool" for message in messages):
        for order in orders:
            spelled = [_spelled(message, spell) for message in order]
            yield spelled
            for role in roles():
                yield [_spelled(message, spell, "function_calls") | _renamed(message, role) for message in order]
                yield [one | _renamed(one, role) for one in spelled]
            yield _alternating([{**message, "role": "user"} if message["role"] == "tool" else message for message in spelled])


def _orders(messages: Messages, front: bool) -> list[Messages]:
    """The messages with system messages in the place that templates expect, and with alternating roles."""
    systems = [place for place, message in enumerate(messages) if message["role"] == "system"]
    orders = [messages]
    if systems and systems != [0]:
        orders.append(_joined_in_front(messages))
    if systems:
        orders.append(_in_first_user_message(messages))
    others = [message for message in messages if message["role"] != "system"]
    if any(map(_can_be_one, others, others[1:])) or others and others[0]["role"] == "assistant":
        orders += [_alternating(order) for order in orders[1:] or orders]
    return [*orders[1:], messages] if front else orders


def _joined_in_front(messages: Messages) -> list[dict[str, Any]]:
    """All system messages as one, before the others."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    first = next((message for message in messages if message["role"] == "system"), {"role": "system"})
    return [{**first, "content": "\n\n".join(texts)}, *others]


def _in_first_user_message(messages: Messages) -> list[dict[str, Any]]:
    """For templates without a system role: put its text before the user's first message.

    Without a message of the user it becomes one: some templates drop or refuse a system message alone.
    """
    system, *others = _joined_in_front(messages)
    first = next((place for place, message in enumerate(others) if message["role"] == "user"), None)
    if first is None:
        return [{**system, "role": "user"}, *others]
    others[first] = {**others[first], "content": f"{system['content']}\n\n{others[first]['content']}"}
    return others


def _can_be_one(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Whether two messages in a row are one role's, and text alone."""
    return one["role"] == two["role"] in ("user", "assistant") and not ("tool_calls" in one or "tool_calls" in two)


def _alternating(messages: Messages) -> list[dict[str, Any]]:
    """For templates whose roles must alternate, starting with the user: join successive messages of one role."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if joined and _can_be_one(joined[-1], message):
            before = joined.pop()
            message = {**before, "content": f"{before['content']}\n\n{message['content']}"}
        elif message["role"] == "assistant" and all(one["role"] == "system" for one in joined):
            joined.append({"role": "user", "content": ""})
        joined.append(message)
    return joined


def _changed(
    message: dict[str, Any],
    text: bool = False,
    null: bool = False,
    thought_only: bool = False,
    whole: bool = False,
    values: bool = False,
) -> dict[str, Any]:
    """A message with calls in another form.

    text: arguments as the text that they came in; whole: as the text of an object, also where that was cut off;
    values: an object of them whose own objects and lists are text, for Qwen3-Coder's first template;
    null: no content as null; thought_only: reasoning without content, for gpt-oss's template.
    """
    if "tool_calls" not in message:
        return message
    changed = {**message}
    if text or whole:
        changed["tool_calls"] = [_with_text(call, whole) for call in message["tool_calls"]]
    if values:
        changed["tool_calls"] = [_with_texts_within(call) for call in message["tool_calls"]]
    if null and not message["content"]:
        changed["content"] = None
    if thought_only and any(name in message for name in REASONING):
        changed["content"] = ""
    return changed


def _calls_apart(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Text and calls as two messages, for DeepSeek-R1's template, which renders only one of the two."""
    if "tool_calls" not in message or not message["content"]:
        return [message]
    return [{key: value for key, value in message.items() if key != "tool_calls"}, {**message, "content": ""}]


def _ids_with_names(messages: Messages) -> list[dict[str, Any]]:
    """Calls and results with ids as Kimi K2 makes them, `functions.NAME:0` and so on: its template writes these and no names.

    Results without an id are those of the last calls, in their order.
    """
    found, count, ids, unnamed = [], 0, {}, iter(())
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                calls.append({**call, "id": f"functions.{call.get('function', call)['name']}:{count}"})
                ids[call.get("id")] = calls[-1]["id"]
                count += 1
            message, unnamed = {**message, "tool_calls": calls}, iter([call["id"] for call in calls])
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            message = {**message, "tool_call_id": next(unnamed, None) if given is None else ids.get(given, given)}
        found.append(message)
    return found


def _results_within(messages: Messages) -> list[dict[str, Any]]:
    """Put results and the text after them into the message with the calls; the text before it becomes a message of its own."""
    found: list[dict[str, Any]] = []
    for message in (part for one in messages for part in _calls_apart(one)):
        last = found[-1] if found else {}
        if message["role"] == "tool" and last.get("tool_calls") and not last["content"]:
            results, calls = last.get("tool_responses", []), last["tool_calls"]
            result = {"name": _name_of(message, calls, len(results)), "response": message["content"]}
            found[-1] = {**last, "tool_responses": [*results, result]}
        elif message["role"] == "assistant" and "tool_responses" in last and "tool_calls" not in message and not last["content"]:
            found[-1] = {**last, "content": message["content"]}
        else:
            found.append(message)
    return found


def _name_of(result: dict[str, Any], calls: list[dict[str, Any]], place: int) -> str:
    """The function that a result is of: by the id of its call, else by its own name, else by its place among the results."""
    id, names = result.get("tool_call_id"), [call.get("function", call)["name"] for call in calls]
    by_id = (name for call, name in zip(calls, names, strict=True) if id and call.get("id") == id)
    return next(by_id, result["name"] if result.get("name") in names else names[min(place, len(names) - 1)])


def _with_text(call: dict[str, Any], whole: bool) -> dict[str, Any]:
    function = call.get("function", call)
    given = function["arguments"]
    changed = {**function, "arguments": json.dumps(dict(given), ensure_ascii=False) if whole else given.text}
    return {**call, "function": changed} if "function" in call else changed


def _with_texts_within(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    given = function["arguments"]
    value = {key: json.dumps(one, ensure_ascii=False) if isinstance(one, (dict, list)) else one for key, one in given.items()}
    changed = {**function, "arguments": Arguments(value, given.text)}
    return {**call, "function": changed} if "function" in call else changed


def _one_at_a_time(messages: Messages) -> list[dict[str, Any]]:
    """Each call with its result after it, for templates that take one call at a time (Llama 3)."""
    found, rest = [], list(messages)
    while rest:
        message = rest.pop(0)
        if len(message.get("tool_calls", ())) < 2:
            found.append(message)
            continue
        results = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.pop(0))
        for place, call in enumerate(message["tool_calls"]):
            again = {key: value for key, value in message.items() if key not in REASONING} | {"content": ""}
            found.append({**(again if place else message), "tool_calls": [call]})
            own = (at for at, one in enumerate(results) if one.get("tool_call_id") in (None, "", call.get("id")))
            if (at := next(own, None)) is not None:
                found.append(results.pop(at))
        found += results
    return found


def _renamed(message: dict[str, Any], role: str) -> dict[str, str]:
    """The role of a result under another name; of any other message nothing."""
    return {"role": role} if message["role"] == "tool" else {}


def _spelled(message: dict[str, Any], spell: Spelling, key: str | None = None) -> dict[str, Any]:
    """A message whose calls are part of its text, for templates that write none; or a text of their own, under a key."""
    if "tool_calls" not in message:
        return message
    calls = [call.get("function", call) for call in message["tool_calls"]]
    text = spell([(call["name"], call["arguments"].text) for call in calls])
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    if key:
        # Such a template writes the marks itself.
        return rest | {key: text.removeprefix(f"<{key}>").removesuffix(f"</{key}>").strip()}
    return rest | {"content": f"{message['content']}\n{text}".strip()}
