"""What ends a request: an error that is sent to the client, or a client that has left."""

from __future__ import annotations

import json
from typing import Any

from ..errors import DFlashError


class RequestError(DFlashError):
    """A request that is answered with an error: a sentence, the status, OpenAI's code word, headers.

    tokens: of a prompt that is too long, and the most that the target takes.
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
    """The client has left: there is nobody to answer."""


def shown(value: Any) -> str:
    """A value of a request for an error's sentence, cut to a line."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
