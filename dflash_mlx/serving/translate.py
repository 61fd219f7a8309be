"""Bodies of `/v1/responses` and `/v1/messages` in the words of a chat completion, so that one reader checks all.

Knows the shapes of OpenAI's items and of Anthropic's blocks. What cannot be read in them is refused here; values are checked by
`requests`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import RequestError, shown
from .fields import whole

# Names of a chat completion's fields that another API calls otherwise, for the sentences of errors.
OTHER_NAMES = {
    "chat": {},
    "text": {},
    "responses": {
        **{"messages": "input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"},
        **{"response_format": "text.format", "response_format:": "text.format:"},
    },
    "messages": {
        "stop": "stop_sequences",
        **{"response_format": "output_config.format", "response_format:": "output_config.format:"},
        **{"parallel_tool_calls:": "tool_choice.disable_parallel_tool_use:"},
    },
}
_SYSTEM = ((str, list), "text or a list of text parts")
_RENAMED = {"max_output_tokens": "max_tokens", "stop_sequences": "stop"}


def _no_item(name: Any) -> dict[str, Any]:
    raise RequestError(f"the item {shown(name)} is not kept", "Send the item itself")


def of_responses(
    body: dict[str, Any], earlier: Callable[[str], list[Any]], item: Callable[[Any], dict[str, Any]] = _no_item
) -> dict[str, Any]:
    """A body of `/v1/responses` as one of a chat completion.

    earlier: the messages after a `previous_response_id`. item: the item of an earlier response that an `item_reference` names.
    Raises:
      RequestError: names what cannot be read.
    """
    chat = _renamed(
        body, ("input", "instructions", "previous_response_id", "store", "reasoning", "metadata", "truncation", "text")
    )
    messages = [{"role": "system", "content": body["instructions"]}] if "instructions" in body else []
    if "previous_response_id" in body:
        messages += earlier(body["previous_response_id"])
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    elif not isinstance(given, list):
        raise RequestError(f"input is {shown(given)}; it must be text or a list of items", "Send text")
    chat["messages"] = messages + _messages_of_items([item(one.get("id")) if _is_reference(one) else one for one in given])
    if body.get("truncation", "disabled") != "disabled":
        raise RequestError(f"truncation is {shown(body['truncation'])}; this server leaves nothing out", 'Send "disabled"')
    reasoning = _object(body, "reasoning")
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    for name, kind, wanted in (("store", bool, "true or false"), ("metadata", dict, "an object"), ("instructions", *_SYSTEM)):
        _check_type(body, name, kind, wanted)
    form = _object(body, "text").get("format")
    if form is not None:
        flat = isinstance(form, dict) and form.get("type") == "json_schema"
        chat["response_format"] = {"type": "json_schema", "json_schema": form} if flat else form
    _read_tools(chat, _tool_of_responses)
    return chat


def _is_reference(item: Any) -> bool:
    """Whether an item is the id of another one. Its type may be left out."""
    return isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"})


def _check_type(body: dict[str, Any], name: str, kind: Any, wanted: str) -> None:
    if name in body and not isinstance(body[name], kind):
        raise RequestError(f"{name} is {shown(body[name])}; it must be {wanted}")


def _renamed(body: dict[str, Any], own: tuple[str, ...]) -> dict[str, Any]:
    return {_RENAMED.get(name, name): value for name, value in body.items() if name not in own}


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name, {})
    if not isinstance(value, dict):
        raise RequestError(f"{name} is {shown(value)}; it must be an object")
    return value


def _read_tools(chat: dict[str, Any], read: Callable[[dict[str, Any]], Any]) -> None:
    """Read the tools where they are objects; whether they are is checked for all APIs in one place."""
    if isinstance(tools := chat.get("tools"), list):
        chat["tools"] = [read(tool) if isinstance(tool, dict) else tool for tool in tools]


def _tool_of_responses(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "function") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _messages_of_items(items: list[Any]) -> list[dict[str, Any]]:
    """Items as messages: reasoning, text and calls that follow each other are one message of the assistant."""
    messages: list[dict[str, Any]] = []
    open_message = False

    def assistant() -> dict[str, Any]:
        nonlocal open_message
        if not open_message:
            messages.append({"role": "assistant", "content": None})
        open_message = True
        return messages[-1]

    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message" and item.get("role") == "assistant":
            message = assistant()
            if message["content"] is not None or "tool_calls" in message:
                open_message = False
                message = assistant()
            message["content"] = item.get("content")
        elif kind == "message":
            messages.append({key: item[key] for key in ("role", "content") if key in item})
            open_message = False
        elif kind == "reasoning":
            if open_message and "tool_calls" in messages[-1]:
                open_message = False
            message = assistant()
            message["reasoning"] = message.get("reasoning", "") + _reasoning(item)
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input")}
            call = {"type": "function", "id": item.get("call_id"), "function": {"name": item.get("name"), "arguments": arguments}}
            assistant().setdefault("tool_calls", []).append(call)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
            open_message = False
        else:
            problem = f"an item of input is {shown(item)}; it must be a message, a call, a call's output or reasoning"
            raise RequestError(problem, "Leave it out")
    return messages


def _reasoning(item: dict[str, Any]) -> str:
    """The text of a reasoning item; its summary, where there is no text."""
    for name in ("content", "summary"):
        parts = item.get(name)
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if texts:
            return "\n".join(text for text in texts if isinstance(text, str))
    return ""


def of_messages(body: dict[str, Any]) -> dict[str, Any]:
    """A body of `/v1/messages` as one of a chat completion.

    Raises:
      RequestError: names what cannot be read.
    """
    chat = _renamed(body, ("messages", "system", "thinking", "tool_choice", "output_config"))
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise RequestError(f"messages is {shown(given)}; it must be a list with at least one message", "Add one")
    _check_type(body, "system", *_SYSTEM)
    chat["messages"] = [{"role": "system", "content": body["system"]}] if "system" in body else []
    for message in given:
        chat["messages"] += _messages_of_blocks(message)
    _read_tools(chat, _tool_of_messages)
    choice = _object(body, "tool_choice")
    if choice:
        named = {"type": "function", "name": choice.get("name")}
        kinds = {"auto": "auto", "none": "none", "any": "required", "tool": named}
        if not isinstance(kind := choice.get("type"), str) or kind not in kinds:
            raise RequestError(f'tool_choice is {shown(choice)}; its type must be "auto", "none", "any" or "tool"')
        chat["tool_choice"] = kinds[kind]
        if choice.get("disable_parallel_tool_use") is True:
            chat["parallel_tool_calls"] = False
    thinking = _object(body, "thinking")
    if thinking.get("type") in ("enabled", "adaptive", "disabled"):
        chat["thinking"] = thinking["type"] != "disabled"
    elif thinking:
        raise RequestError(f'thinking is {shown(thinking)}; its type must be "enabled", "adaptive" or "disabled"')
    if thinking.get("type") == "enabled":
        chat["thinking_budget"] = whole(thinking.get("budget_tokens"))
    config = _object(body, "output_config")
    if (form := config.get("format")) is not None:
        schema = isinstance(form, dict) and form.get("type") == "json_schema"
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}} if schema else form
    if config.get("effort") is not None:
        chat["reasoning_effort"] = config["effort"]
    return chat


def _tool_of_messages(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        return tool
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    function["strict"] = tool.get("strict")
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _messages_of_blocks(message: Any) -> list[dict[str, Any]]:
    """A message of blocks: results of tools become messages of their own, thinking and calls belong to the assistant's."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return [message]
    results, parts, calls, thought = [], [], [], []
    for block in message["content"]:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"type": "function", "id": block.get("id"), "function": function})
        elif kind == "thinking":
            thought.append(block.get("thinking"))
        elif kind != "redacted_thinking":
            parts.append(block)
    said = {"role": message.get("role"), "content": parts}
    if calls:
        said["tool_calls"] = calls
    if thought and all(isinstance(text, str) for text in thought):
        said["reasoning"] = "\n".join(thought)
    return [*results, *([said] if parts or calls or thought or not results else [])]
