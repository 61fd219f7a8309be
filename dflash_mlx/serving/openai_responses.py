"""What goes back at `/v1/responses`: OpenAI's response objects, their items, their streams, and what is kept of them.

Knows OpenAI's items. `responses.Writer` divides what the target wrote.
"""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from typing import Any

from .errors import RequestError, shown
from .responses import Writer, error_body, event
from .tool_calls import Call

# Answers that are kept for `previous_response_id`, and letters of all of them.
_MOST_KEPT, _MOST_LETTERS = 256, 64_000_000


class Store:
    """Earlier answers with their conversations, in memory: the oldest go first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[dict[str, Any], list[Any], int]] = OrderedDict()
        self._letters = 0

    def put(self, body: dict[str, Any], messages: list[Any]) -> None:
        """Keep a response and the messages up to its end."""
        size = len(json.dumps(messages, default=str))
        self._kept[body["id"]] = body, messages, size
        self._letters += size
        while len(self._kept) > _MOST_KEPT or self._letters > _MOST_LETTERS:
            self._letters -= self._kept.popitem(last=False)[1][2]

    def messages(self, name: Any) -> list[Any]:
        """Raises: RequestError for an id that is not kept."""
        return self._find(name)[1]

    def body(self, name: Any) -> dict[str, Any]:
        """Raises: RequestError for an id that is not kept."""
        return self._find(name, 404)[0]

    def item(self, name: Any) -> dict[str, Any]:
        """An item of a kept response. Raises: RequestError for an id that is not kept."""
        # A list: answers may be added meanwhile.
        for body, *_ in reversed(list(self._kept.values())):
            for item in body["output"]:
                if item["id"] == name:
                    return item
        raise RequestError(f"the item {shown(name)} is not kept", "Send the item itself")

    def drop(self, name: str) -> None:
        """Raises: RequestError for an id that is not kept."""
        self._letters -= self._find(name, 404)[2]
        del self._kept[name]

    def _find(self, name: Any, status: int = 400) -> tuple[dict[str, Any], list[Any], int]:
        if not isinstance(name, str) or name not in self._kept:
            remedy = f"Send the whole conversation: the last {_MOST_KEPT} stored answers are kept, until the server ends"
            raise RequestError(f"the response {shown(name)} is not kept", remedy, status, "previous_response_not_found")
        return self._kept[name]


class ResponseWriter(Writer):
    """One response. Its items come in the order in which the target wrote them."""

    def __init__(self, *about: Any, store: Store, **more: Any):
        super().__init__(*about, **more)
        self.id, self.store, self.items, self._number = f"resp_{uuid.uuid4().hex}", store, [], 0
        # The item that grows.
        self._item: dict[str, Any] | None = None

    def _event(self, kind: str, **body: Any) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **body}, kind)

    def start(self) -> list[str]:
        return [self._event(f"response.{kind}", response=self._response("in_progress")) for kind in ("created", "in_progress")]

    def _add_text(self, kind: str, text: str) -> list[str]:
        if kind == "arguments":
            self._item["arguments"] += text
            return [self._event("response.function_call_arguments.delta", **self._place(), delta=text)]
        wanted = "reasoning" if kind == "reasoning" else "message"
        events = [] if self._item and self._item["type"] == wanted else [*self._close(), *self._open_text(wanted)]
        self._item["content"][0]["text"] += text
        more = {"logprobs": []} if wanted == "message" else {}
        return [*events, self._event(f"response.{self._part()}.delta", **self._place(), content_index=0, delta=text, **more)]

    def _add_call(self, call: Call) -> list[str]:
        item = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
        events = [*self._close(), *self._open("fc", item)]
        self.n_calls += 1
        return [*events, *self._add_text("arguments", call.arguments)] if call.arguments else events

    def _open(self, prefix: str, item: dict[str, Any]) -> list[str]:
        self._item = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item}
        self.items.append(self._item)
        return [self._event("response.output_item.added", output_index=len(self.items) - 1, item=self._item)]

    def _open_text(self, kind: str) -> list[str]:
        if kind == "reasoning":
            events = self._open("rs", {"type": "reasoning", "summary": [], "content": []})
            part = {"type": "reasoning_text", "text": ""}
        else:
            events = self._open("msg", {"type": "message", "role": "assistant", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        events.append(self._event("response.content_part.added", **self._place(), content_index=0, part=part))
        self._item["content"].append(part)
        return events

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self.items) - 1}

    def _part(self) -> str:
        return self._item["content"][0]["type"]

    def _close(self, status: str = "completed") -> list[str]:
        item, events = self._item, []
        if item is None:
            return []
        if item["type"] == "function_call":
            whole = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **self._place(), **whole))
        else:
            part, more = item["content"][0], {"logprobs": []} if item["type"] == "message" else {}
            events.append(
                self._event(f"response.{self._part()}.done", **self._place(), content_index=0, text=part["text"], **more)
            )
            events.append(self._event("response.content_part.done", **self._place(), content_index=0, part=part))
        item["status"] = status
        events.append(self._event("response.output_item.done", output_index=len(self.items) - 1, item=item))
        self._item = None
        return events

    @property
    def _status(self) -> str:
        return "incomplete" if self.reason == "length" else "completed"

    def end(self) -> list[str]:
        events = self._close(self._status)
        body = self.body()
        return [*events, self._event(f"response.{body['status']}", response=body)]

    def error(self, error: RequestError) -> str:
        about = error_body(error)["error"]
        failed = {"code": about["code"] or "server_error", "message": about["message"]}
        return self._event("response.failed", response={**self._response("failed"), "error": failed})

    def body(self) -> dict[str, Any]:
        self._close(self._status)
        body = self._response(self._status)
        if self.request.body.get("store", True):
            self.store.put(body, [*self._conversation(), *self._said()])
        return body

    def _conversation(self) -> list[dict[str, Any]]:
        """The messages before this request, without its own instructions, which hold for this request only."""
        return self.request.messages[1 if "instructions" in self.request.body else 0 :]

    def _said(self) -> list[dict[str, Any]]:
        """The answer as messages of a chat: one for each text, with its reasoning and calls."""
        said: dict[str, Any] = {"role": "assistant", "content": None}
        for item in self.items:
            if item["type"] == "reasoning":
                said["reasoning"] = said.get("reasoning", "") + item["content"][0]["text"]
            elif item["type"] == "message":
                said["content"] = (said["content"] or "") + item["content"][0]["text"]
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                said.setdefault("tool_calls", []).append({"type": "function", "id": item["call_id"], "function": function})
        return [said] if self.items else []

    def _response(self, status: str) -> dict[str, Any]:
        asked, job = self.request.body, self.generation.job
        ended = status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata", {}),
            "model": self.model,
            "output": list(self.items),
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "previous_response_id": asked.get("previous_response_id"),
            "reasoning": {"effort": None, "summary": None, **asked.get("reasoning", {})},
            "store": asked.get("store", True),
            "temperature": job.sampling.temp,
            "text": {"format": {"type": "text"}, **asked.get("text", {})},
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": asked.get("tools", []),
            "top_p": job.sampling.top_p,
            "truncation": "disabled",
            "usage": self.usage() if ended else None,
        }

    def usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.generation.cached, "cache_write_tokens": 0},
            "output_tokens": self.count,
            "output_tokens_details": {"reasoning_tokens": self.thought},
            "total_tokens": self.prompt_tokens + self.count,
        }
