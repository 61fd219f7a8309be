"""What goes back: OpenAI's objects and a stream's events, with usage and log-probabilities.

Knows tokens as the engine gives them and the channels that tell answers from reasoning and calls. Knows no sockets.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from ..text import token_bytes
from .channels import Channels, Piece
from .engine import Generation, LoadedPair, Token
from .messages import Prompt
from .requests import CompletionRequest
from .tool_calls import Call


class Completion:
    """One answer as it grows: `add` takes a token, `end` comes after the last. Both give the events of a stream.

    `body` is the answer in one piece.
    """

    def __init__(self, request: CompletionRequest, pair: LoadedPair, prompt: Prompt, generation: Generation, fingerprint: str):
        self.request, self.tokenizer, self.generation = request, pair.tokenizer, generation
        self.prompt_tokens = len(prompt.ids)
        # A text completion is all text, marks included.
        self.channels = Channels(pair.tokenizer, prompt.before, request.tools) if request.chat else None
        kind = ("chat.completion.chunk" if request.stream else "chat.completion") if request.chat else "text_completion"
        self.head = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4()}",
            "system_fingerprint": fingerprint,
            "object": kind,
            "model": pair.name,
            "created": int(time.time()),
        }
        self.text, self.reasoning, self.calls = "", "", []
        # Calls of the whole answer: each has its place in it.
        self.n_calls, self.count, self.accepted, self.verified = 0, 0, 0, 0
        self.reason: str | None = None
        self.tokens: list[Token] = []
        self.role_told = False

    def add(self, token: Token) -> dict[str, Any] | None:
        """Take a token; the next event of a stream, if there is something to say before the end."""
        self.count, self.verified = self.count + 1, token.verified
        self.accepted += token.from_draft
        self.tokens.append(token)
        self.reason = token.finish_reason
        self._take(self.channels.feed(token.text, self.reason is not None) if self.channels else [Piece("answer", token.text)])
        if not self.request.stream or self.reason or not (self.text or self.reasoning or self.calls):
            return None
        return self._event(None)

    def _take(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.kind == "reasoning":
                self.reasoning += piece.text
            else:
                self.text += piece.text
            for call in piece.calls:
                self.calls.append(self._call(call))
                self.n_calls += 1

    def _call(self, call: Call) -> dict[str, Any]:
        made = {"function": {"name": call.name, "arguments": call.arguments}, "type": "function", "id": call.id}
        return {**made, "index": self.n_calls} if self.request.stream else made

    def end(self) -> list[dict[str, Any]]:
        """The last events of a stream."""
        last = self._event(self._reason())
        return [last, {**self.head, "choices": [], "usage": self.usage()}] if self.request.include_usage else [last]

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        return {**self.head, "choices": [self._choice(self._reason(), "message")], "usage": self.usage()}

    def _reason(self) -> str | None:
        return "tool_calls" if self.reason == "stop" and self.n_calls else self.reason

    def _event(self, reason: str | None) -> dict[str, Any]:
        event = {**self.head, "choices": [self._choice(reason, "delta")]}
        self.text, self.reasoning, self.calls, self.tokens = "", "", [], []
        return event

    def _choice(self, reason: str | None, key: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if self.request.logprobs:
            choice["logprobs"] = self._chat_logprobs() if self.request.chat else self._text_logprobs()
        if not self.request.chat:
            return {**choice, "text": self.text}
        # Clients join the texts of deltas, the role's too: it stands in the first alone.
        said: dict[str, Any] = {} if self.role_told else {"role": "assistant"}
        self.role_told = True
        if key == "message":
            # OpenAI's schema wants a message's content in any case.
            said["content"] = self.text or None
        elif self.text:
            said["content"] = self.text
        if self.reasoning:
            said["reasoning"] = self.reasoning
        if self.calls:
            said["tool_calls"] = self.calls
        return {**choice, key: said}

    def usage(self) -> dict[str, Any]:
        """OpenAI's counts; accepted and rejected are the drafter's."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.count,
            "total_tokens": self.prompt_tokens + self.count,
            "prompt_tokens_details": {"cached_tokens": self.generation.cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": max(self.verified - self.accepted, 0),
            },
        }

    def _text_logprobs(self) -> dict[str, Any]:
        """OpenAI's old form. The chosen token is there also where it is not among the likeliest: up to k + 1 alternatives."""
        tops = []
        for token in self.tokens:
            top = token.top
            if top and token.token not in (i for i, _ in top):
                top = [*top, (token.token, token.logprob)]
            tops.append(by_text(self.tokenizer, top))
        return {
            "tokens": [named(self.tokenizer, token.token)[0] for token in self.tokens],
            "token_logprobs": [token.logprob for token in self.tokens],
            "top_logprobs": tops,
            "text_offset": [token.offset for token in self.tokens],
        }

    def _chat_logprobs(self) -> dict[str, Any]:
        def entry(i: int, value: float | None) -> dict[str, Any]:
            text, data = named(self.tokenizer, i)
            return {"id": i, "token": text, "bytes": None if data is None else list(data), "logprob": value}

        return {
            "content": [
                {**entry(token.token, token.logprob), "top_logprobs": [entry(*pair) for pair in token.top]}
                for token in self.tokens
            ]
        }


def named(tokenizer: Any, token: int) -> tuple[str, bytes | None]:
    """A token's text and bytes; one that is part of a character only has its bytes for text, as OpenAI writes them."""
    data = token_bytes(tokenizer, token)
    if data is None:
        return tokenizer.decode([token]), None
    try:
        return data.decode(), data
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


def by_text(tokenizer: Any, top: list[tuple[int, float]]) -> dict[str, float]:
    """OpenAI's old form: log-probabilities by text. Of two tokens with one text the likelier has it, the other its id."""
    by: dict[str, float] = {}
    for token, value in top:
        text = named(tokenizer, token)[0]
        by[text if text not in by else f"{text} (token {token})"] = value
    return by
