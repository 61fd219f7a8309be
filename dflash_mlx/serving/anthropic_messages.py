"""What goes back at `/v1/messages`: Anthropic's messages, their blocks, the events of their streams, and its words for errors."""

from __future__ import annotations

import json
import uuid
from typing import Any

from .errors import RequestError
from .responses import Writer, event
from .tool_calls import Call

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_KINDS |= {429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error"}


def anthropic_error(error: RequestError) -> tuple[dict[str, Any], int]:
    """An error as Anthropic writes it, and its status: clients wait and ask again at 529."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    # Clients look for these words to shorten a conversation.
    message = "prompt is too long: {} tokens > {} maximum".format(*error.tokens) if error.tokens else str(error)
    return {"type": "error", "error": {"type": kind, "message": message}}, 529 if error.status == 503 else error.status


class MessageWriter(Writer):
    """One message. Its blocks come in the order in which the target wrote them."""

    def __init__(self, *about: Any, **more: Any):
        super().__init__(*about, **more)
        self.id, self.blocks, self._block = f"msg_{uuid.uuid4().hex}", [], None
        # Of a call on its way.
        self._arguments = ""

    def _event(self, kind: str, **body: Any) -> str:
        return event({"type": kind, **body}, kind)

    def start(self) -> list[str]:
        return [self._event("message_start", message=self._message([], None, None))]

    def idle(self) -> str:
        return self._event("ping")

    def _add_text(self, kind: str, text: str) -> list[str]:
        if kind == "arguments":
            self._arguments += text
            return [self._delta("input_json_delta", partial_json=text)]
        name = "thinking" if kind == "reasoning" else "text"
        events = []
        if self._block is None or self._block["type"] != name:
            events = [*self._close(), *self._open({"type": name, name: "", **({"signature": ""} if name == "thinking" else {})})]
        self._block[name] += text
        return [*events, self._delta(f"{name}_delta", **{name: text})]

    def _add_call(self, call: Call) -> list[str]:
        events = [*self._close(), *self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})]
        self.n_calls, self._arguments = self.n_calls + 1, ""
        return [*events, *self._add_text("arguments", call.arguments)] if call.arguments else events

    def _delta(self, kind: str, **body: Any) -> str:
        return self._event("content_block_delta", index=len(self.blocks) - 1, delta={"type": kind, **body})

    def _open(self, block: dict[str, Any]) -> list[str]:
        self._block = block
        self.blocks.append(block)
        return [self._event("content_block_start", index=len(self.blocks) - 1, content_block=block)]

    def _close(self) -> list[str]:
        block, events = self._block, []
        if block is None:
            return []
        if block["type"] == "thinking":
            # Clients need a signature to send thinking back; nothing checks it.
            block["signature"] = self.id
            events.append(self._delta("signature_delta", signature=self.id))
        elif block["type"] == "tool_use":
            block["input"] = _read(self._arguments)
        self._block = None
        return [*events, self._event("content_block_stop", index=len(self.blocks) - 1)]

    def end(self) -> list[str]:
        events = self._close()
        reason, stop = self._reasons()
        last = self._event("message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=self.usage())
        return [*events, last, self._event("message_stop")]

    def error(self, error: RequestError) -> str:
        return event(anthropic_error(error)[0], "error")

    def body(self) -> dict[str, Any]:
        self._close()
        return self._message(self.blocks, *self._reasons())

    def _reasons(self) -> tuple[str, str | None]:
        if self.reason == "length":
            return "max_tokens", None
        if self.last.stop is not None:
            return "stop_sequence", self.last.stop
        return "tool_use" if self.n_calls else "end_turn", None

    def _message(self, content: list[Any], reason: str | None, stop: str | None) -> dict[str, Any]:
        about = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return {**about, "stop_reason": reason, "stop_sequence": stop, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        cached = self.generation.cached
        tokens = {"input_tokens": self.prompt_tokens - cached, "output_tokens": self.count}
        return {**tokens, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}


def _read(arguments: str) -> dict[str, Any]:
    """Arguments as an object; of a call that was cut off there are none."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
