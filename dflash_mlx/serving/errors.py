"""The exceptions that end a request: an error that is sent to the client, and a client that has left."""

from __future__ import annotations

import json
from typing import Any

from ..errors import DFlashError


class RequestError(DFlashError):
    """Answers a request with an error: a sentence, the HTTP status, OpenAI's error code, headers.

    tokens: for a prompt that is too long, its tokens and the most that the target takes.
    """

    def __init__(
        self,
        problem: str,
        remedy: str = "",
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        tokens: tuple[int, int] | None = None,
    ):
        super().__init__(problem, remedy)
        self.status, self.code, self.headers, self.tokens = status, code, headers, tokens


class ClientDisconnected(Exception):
    """The client has left, so no answer is sent."""


def shown(value: Any) -> str:
    """A value of a request as an error shows it, cut to one line."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
