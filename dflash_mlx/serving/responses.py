"""Writes answers: OpenAI's completions as objects and as events of a stream, and the parts that the other APIs share.

Knows tokens as the engine gives them and the channels that tell answers from reasoning and calls. Knows no sockets.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from ..text import token_bytes
from .channels import Channels, Piece
from .draft_kinds import LetterKinds
from .engine import Generation, LoadedPair, Token
from .errors import RequestError
from .messages import Prompt
from .requests import CompletionRequest
from .tool_calls import Call

# Kinds of pieces that are text, with their names in `drafts`.
_TEXTS = {"answer": "content", "reasoning": "reasoning"}


def event(body: dict[str, Any], name: str = "") -> str:
    """One event of a stream."""
    return f"event: {name}\ndata: {json.dumps(body)}\n\n" if name else f"data: {json.dumps(body)}\n\n"


def error_body(error: RequestError) -> dict[str, Any]:
    """An error as OpenAI writes it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def total(usages: list[dict[str, Any]]) -> dict[str, Any]:
    """The counts of several answers, added up."""
    first = usages[0]
    return {
        name: total([usage[name] for usage in usages]) if isinstance(value, dict) else sum(usage[name] for usage in usages)
        for name, value in first.items()
    }


def joined(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """The answers to several prompts as one object."""
    choices = [choice for body in bodies for choice in body["choices"]]
    return {**bodies[0], "choices": choices, "usage": total([body["usage"] for body in bodies])}


class Writer:
    """One answer as it grows, in the words of an API.

    `start`, `add` (a token), `end` and `error` give the events of a stream; `idle` gives one after a while without any.
    `body` is the whole answer as one object, after all tokens were added.
    """

    def __init__(self, request: CompletionRequest, pair: LoadedPair, prompt: Prompt, generation: Generation, index: int = 0):
        self.request, self.tokenizer, self.generation, self.index = request, pair.tokenizer, generation, index
        self.model, self.prompt_tokens, self.created = pair.name, len(prompt.ids), int(time.time())
        # A text completion is all text, marks included.
        live = {"live": request.stream}
        self.channels = (
            Channels(pair.tokenizer, prompt.before, request.tools, marked=request.demand.holds, **live) if request.chat else None
        )
        # n_calls: of the whole answer, each has its place in it.
        self.n_calls, self.count, self.thought, self.accepted = 0, 0, 0, 0
        # Seconds of the clock, for logs and metrics.
        self.began, self.first_token_at, self.last_token_at = time.monotonic(), None, None
        # The last token so far: it holds the counts of its run.
        self.last = Token("", 0, 0, None, False)

    @property
    def reason(self) -> str | None:
        """Why the answer ended; None while it runs."""
        return self.last.finish_reason

    def start(self) -> list[str]:
        return []

    def add(self, token: Token) -> list[str]:
        events = []
        for piece in self.take(token):
            if piece.text:
                events += self._add_text(piece.kind, piece.text)
            for call in piece.calls:
                events += self._add_call(call)
        return events

    def _add_text(self, kind: str, text: str) -> list[str]:
        raise NotImplementedError

    def _add_call(self, call: Call) -> list[str]:
        raise NotImplementedError

    def end(self) -> list[str]:
        raise NotImplementedError

    def body(self) -> dict[str, Any]:
        raise NotImplementedError

    def error(self, error: RequestError) -> str:
        return event(error_body(error))

    def idle(self) -> str:
        """A comment; it also finds a broken connection."""
        return f": prompt {self.generation.done}/{len(self.generation.job.prompt)}\n\n"

    def take(self, token: Token) -> list[Piece]:
        """Count a token; the pieces of the answer that it completes."""
        self.last, self.last_token_at = token, time.monotonic()
        self.count, self.accepted = self.count + 1, self.accepted + token.from_draft
        self.first_token_at = self.first_token_at or self.last_token_at
        is_last = self.reason is not None
        pieces = self.channels.feed(token.text, is_last) if self.channels else [Piece("answer", token.text)]
        self.thought += any(piece.kind == "reasoning" for piece in pieces)
        return pieces


class Completion(Writer):
    """OpenAI's chat and text completions."""

    def __init__(self, *about: Any, fingerprint: str = "", **more: Any):
        super().__init__(*about, **more)
        request = self.request
        kind = ("chat.completion.chunk" if request.stream else "chat.completion") if request.chat else "text_completion"
        self.head = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4()}",
            "system_fingerprint": fingerprint,
            "object": kind,
            "model": self.model,
            "created": self.created,
        }
        self.text, self.reasoning, self.calls = "", "", []
        self.tokens: list[Token] = []
        self.letters, self.drafts = LetterKinds(), {"content": [], "reasoning": []}
        self.role_told = False

    def add(self, token: Token) -> list[str]:
        self.tokens.append(token)
        if self.request.show_drafts:
            self.letters.add(token.text, token.kind)
        self._take(self.take(token))
        if not self.request.stream or self.reason or not (self.text or self.reasoning or self.calls):
            return []
        return [self._event(None)]

    def _take(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.kind == "reasoning":
                self.reasoning += piece.text
            elif piece.kind == "arguments":
                self.calls.append({"function": {"arguments": piece.text}, "index": self.n_calls - 1})
            else:
                self.text += piece.text
            if self.request.show_drafts and piece.kind in _TEXTS:
                self.drafts[_TEXTS[piece.kind]] += self.letters.take(piece.text)
            for call in piece.calls:
                self.calls.append(self._call(call))
                self.n_calls += 1

    def _call(self, call: Call) -> dict[str, Any]:
        made = {"function": {"name": call.name, "arguments": call.arguments}, "type": "function", "id": call.id}
        return {**made, "index": self.n_calls} if self.request.stream else made

    def end(self) -> list[str]:
        """The last event of the answer."""
        return [self._event(self._reason())]

    def end_of_all(self, usage: dict[str, Any]) -> list[str]:
        """What follows the last events of all answers."""
        events = [event({**self.head, "choices": [], "usage": usage})] if self.request.include_usage else []
        return [*events, "data: [DONE]\n\n"]

    def body(self) -> dict[str, Any]:
        return {**self.head, "choices": [self._choice(self._reason(), "message")], "usage": self.usage()}

    def _reason(self) -> str | None:
        return "tool_calls" if self.reason == "stop" and self.n_calls else self.reason

    def _event(self, reason: str | None) -> str:
        line = event({**self.head, "choices": [self._choice(reason, "delta")]})
        self.text, self.reasoning, self.calls, self.tokens = "", "", [], []
        self.drafts = {"content": [], "reasoning": []}
        return line

    def _choice(self, reason: str | None, key: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self.index, "finish_reason": reason}
        if self.request.logprobs:
            choice["logprobs"] = self._chat_logprobs() if self.request.chat else self._text_logprobs()
        if self.request.show_drafts:
            figures = {"tokens_per_second": self.last.tps, "tokens_per_round": self.last.a_round}
            choice["drafts"] = {name: parts for name, parts in self.drafts.items() if parts} | figures
        if not self.request.chat:
            return {**choice, "text": self.text}
        # Clients join the texts of deltas, even the role. So only the first delta has it.
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
        """OpenAI's counts; accepted and rejected count the drafter's tokens. A prompt is counted with its first answer."""
        own = self.index % self.request.n == 0
        prompt_tokens = self.prompt_tokens if own else 0
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.count,
            "total_tokens": prompt_tokens + self.count,
            "prompt_tokens_details": {"cached_tokens": self.generation.cached if own else 0},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": max(self.last.verified - self.accepted, 0),
            },
        }

    def _text_logprobs(self) -> dict[str, Any]:
        """OpenAI's old form. The chosen token is listed even if it is not among the k likeliest: up to k + 1 alternatives."""
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
    """OpenAI's old form: log-probabilities by text. If two tokens have the same text, the less likely one is listed by its id."""
    by: dict[str, float] = {}
    for token, value in top:
        text = named(tokenizer, token)[0]
        by[text if text not in by else f"{text} (token {token})"] = value
    return by
