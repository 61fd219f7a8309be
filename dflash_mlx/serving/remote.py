"""A conversation that another server answers: `chat --url`. OpenAI's chat completions, streamed.

Knows HTTP as a client. Knows no models: names, limits and counts come from the server.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from ..errors import DFlashError, one_line, os_error_text
from .conversation import Conversation, Pair, Settings
from .fields import SAMPLING

# While nothing comes, a stop takes effect within this many seconds.
_POLL_S = 0.1
# What a server writes while it reads a prompt: ours, and mlx_lm.server's.
_PROGRESS = re.compile(r": ?(?:prompt|keepalive) (\d+)/(\d+)")
_BROKE_OFF = "ended the answer in the middle"


class Remote:
    """The address of a server that speaks OpenAI's chat completions.

    Args:
      url: with or without a path; without one it is /v1. That of an endpoint stands for its server. key: sent as a bearer token.
    Raises:
      DFlashError: it is not an address.
    """

    def __init__(self, url: str, key: str | None = None):
        url = url.strip()
        place = urlsplit(url if "://" in url else f"http://{url}")
        if place.scheme not in ("http", "https") or not place.hostname:
            raise DFlashError(f"{url!r} is not the address of a server", "Give one such as http://127.0.0.1:8080")
        path = re.sub(r"(/chat/completions|/models)?/*$", "", place.path.rstrip("/")) or "/v1"
        self.url = f"{place.scheme}://{place.netloc}{path}"
        # A proxy does not know this machine's own servers.
        own = place.hostname in ("localhost", "127.0.0.1", "::1")
        self.client: dict[str, Any] = {
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": httpx.Timeout(None, connect=10),
            "trust_env": not own,
        }

    def pair(self, name: str | None) -> Pair:
        """The server's model of this name; None: the only one that it lists.

        Raises:
          DFlashError: the server does not answer, or lists several.
        """
        try:
            with httpx.Client(**{**self.client, "timeout": 30}) as client:
                answer = client.get(f"{self.url}/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreached(error) from None
        if answer.status_code in (401, 403):
            raise _refused(answer.status_code, answer.content)
        if name is None and answer.status_code == 404:
            raise DFlashError(f"{self.url} has no list of models (HTTP 404)", "Check the address, or name a model with --model")
        try:
            models = {one["id"]: one for one in answer.json()["data"]}
        except (ValueError, LookupError, TypeError):
            models = {}
        if name is None and len(models) != 1:
            listed = f"lists {len(models)} models" + (f": {', '.join([*models][:20])}" if models else "")
            remedy = "Name one with --model" + ("" if models else ", such as default_model for mlx_lm.server's own")
            raise DFlashError(f"{self.url} {listed}", remedy)
        name = name or next(iter(models))
        about = models.get(name, {})
        limit = about.get("context_length") or about.get("max_model_len")
        return RemotePair(name, None, None, None, None, limit=limit)

    def _unreached(self, error: Exception) -> DFlashError:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        reason = one_line(os_error_text(cause) if cause else error, None).rstrip(".")
        return DFlashError(f"no server answers at {self.url}: {reason}", "Start it, or give another --url")

    def events(self, body: dict[str, Any], should_stop: Callable[[], bool]) -> Iterator[dict[str, Any] | tuple[int, int]]:
        """The server's answer to a chat completion: its chunks, and (tokens read, tokens of the prompt) while it reads.

        It ends where the stream does or at `should_stop`; then the connection is closed, which stops the server.
        Raises:
          DFlashError: the server cannot be reached, refuses, or breaks off.
        """
        with asyncio.Runner() as runner:
            events: asyncio.Queue[Any] = asyncio.Queue()
            pump = runner.get_loop().create_task(self._pump(body, events))
            try:
                while (event := runner.run(_next(events, should_stop))) is not None:
                    if isinstance(event, Exception):
                        raise event
                    yield event
            finally:
                pump.cancel()
                runner.run(asyncio.wait([pump]))

    async def _pump(self, body: dict[str, Any], events: asyncio.Queue[Any]) -> None:
        broke_off = "closed the connection before it answered"
        try:
            async with (
                httpx.AsyncClient(**self.client) as client,
                client.stream("POST", f"{self.url}/chat/completions", json=body) as answer,
            ):
                broke_off = _BROKE_OFF
                if answer.status_code != 200:
                    raise _refused(answer.status_code, await answer.aread())
                if "json" in answer.headers.get("content-type", ""):
                    # A server that does not stream.
                    events.put_nowait(_chunk(await answer.aread()))
                else:
                    async for line in answer.aiter_lines():
                        if progress := _PROGRESS.match(line):
                            events.put_nowait((int(progress[1]), int(progress[2])))
                        elif line.startswith("data:") and line[5:].strip() != "[DONE]":
                            events.put_nowait(_chunk(line[5:]))
            events.put_nowait(None)
        except httpx.ConnectError as error:
            events.put_nowait(self._unreached(error))
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            events.put_nowait(DFlashError(f"{self.url} {broke_off}", "/retry asks again"))
        except httpx.HTTPError as error:
            events.put_nowait(DFlashError(f"{self.url} broke off: {str(error) or type(error).__name__}", "/retry asks again"))
        except Exception as error:
            events.put_nowait(error)


async def _next(events: asyncio.Queue[Any], should_stop: Callable[[], bool]) -> Any:
    """The next event; None if it should stop."""
    while not should_stop():
        try:
            return await asyncio.wait_for(events.get(), _POLL_S)
        except TimeoutError:
            continue
    return None


def _chunk(data: bytes | str) -> dict[str, Any]:
    """One chunk of a stream, or a whole answer. Raises: DFlashError for what is none, or tells an error."""
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise DFlashError(f"the server sent something other than a chat completion: {str(data)[:100]!r}", "Is it OpenAI's API?")
    if chunk.get("error"):
        raise DFlashError(f"the server says: {_said(chunk)}", "/retry asks again")
    return chunk


def _refused(status: int, data: bytes) -> DFlashError:
    try:
        said = _said(json.loads(data))
    except ValueError:
        said = " ".join(data.decode(errors="replace").split())[:300]
    key, place = "Give its key with --api-key", "Look at --url and --model"
    remedy = {401: key, 403: key, 404: place, 405: place}.get(status, "/retry asks again" if status >= 500 else "")
    return DFlashError(f"the server answers with status {status}: {said.rstrip('.')}", remedy)


def _said(body: Any) -> str:
    """The message of an error, in whatever shape it came."""
    while isinstance(body, dict) and (inner := body.get("error", body.get("message", body.get("detail")))):
        body = inner
    return (body if isinstance(body, str) else json.dumps(body))[:500]


@dataclass
class RemotePair(Pair):
    """A server's model: only its name is known, and perhaps how many tokens it reads."""

    limit: int | None = None


@dataclass
class RemoteResponse:
    """What is known of an answer so far, in the words of `GenerationResponse`."""

    generation_tokens: int = 0
    generation_tps: float = 0.0
    finish_reason: str | None = None
    stats: None = None


class RemoteConversation(Conversation):
    """A conversation whose answers come from a server.

    Only settings that the user gave are sent: the server has its own for the rest.
    """

    pair: RemotePair

    def __init__(self, remote: Remote, pair: RemotePair, given: Mapping[str, Any], system: str | None = None):
        self.remote, self.url = remote, remote.url
        super().__init__(pair, given, system)

    def use(self, pair: Pair) -> None:
        self.settings, self.pair, self.limit = Settings(**self.given), pair, pair.limit
        self.vocabulary, self.largest = 1 << 62, None
        self.used = self.held = 0
        self.last, self.stopped = None, False

    def without_effect(self, names: Collection[str]) -> dict[str, str]:
        # Whether the others have an effect is up to the server.
        return self.settings.without_effect({*names} - {"thinking"}) if "temp" in self.given else {}

    @property
    def greedy(self) -> bool:
        return "temp" in self.given and self.settings.greedy

    def body(self) -> dict[str, Any]:
        """The request for the next answer."""
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        # Some servers refuse the thinking of earlier answers, and templates drop it.
        messages += [{"role": one["role"], "content": one["content"]} for one in self.messages]
        values, names = vars(self.settings), {**{own: name for name, own in SAMPLING.items()}, "max_tokens": "max_tokens"}
        sent = {name: values[own] for own, name in names.items() if own in self.given and values[own] is not None}
        if self.settings.thinking is not None:
            sent["chat_template_kwargs"] = {"enable_thinking": self.settings.thinking}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.pair.name, "messages": messages, **options, **sent}

    def answer(
        self, should_stop: Callable[[], bool], progress: Callable[[int, int], None]
    ) -> Iterator[tuple[str, str, RemoteResponse]]:
        """As `Conversation.answer`. Tokens are the server's count at the end, pieces until then."""
        self.last, self.stopped, self.held = None, False, 0
        texts, usage, began, last = {"answer": "", "thinking": ""}, {}, 0.0, RemoteResponse()
        try:
            for event in self.remote.events(self.body(), should_stop):
                if isinstance(event, tuple):
                    progress(*event)
                    continue
                usage = event.get("usage") or usage
                for kind, text, reason in _pieces(event):
                    last.finish_reason = reason or last.finish_reason
                    if text:
                        now = time.monotonic()
                        began = began or now
                        last.generation_tokens += 1
                        last.generation_tps = (last.generation_tokens - 1) / (now - began) if now > began else 0.0
                        self.last, texts[kind] = last, texts[kind] + text
                        yield kind, text, last
                if last.finish_reason:
                    self.last = last
            if not should_stop() and last.finish_reason is None:
                raise DFlashError(f"{self.url} {_BROKE_OFF}", "/retry asks again")
        finally:
            self.stopped = last.finish_reason is None
            if self.last is not None:
                self._end(last, texts, usage)

    def _end(self, last: RemoteResponse, texts: dict[str, str], usage: Mapping[str, Any]) -> None:
        pieces, counted = last.generation_tokens, usage.get("completion_tokens") or 0
        if counted and pieces > 1:
            last.generation_tps *= (counted - 1) / (pieces - 1)
        last.generation_tokens = counted or pieces
        self.held = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self._keep(texts, last.generation_tokens, usage.get("prompt_tokens") or 0)
        # Without the server's counts it is not known how full the context is.
        self.used = self.used if usage else 0

    def state(self) -> dict[str, Any]:
        return {**super().state(), "url": self.url}


def _pieces(chunk: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None]]:
    """(kind, text, why it ended) of a chunk's first choice."""
    for choice in (chunk.get("choices") or [])[:1]:
        said = choice.get("delta") or choice.get("message") or {}
        thought = said.get("reasoning") or said.get("reasoning_content") or ""
        yield "thinking", thought if isinstance(thought, str) else "", None
        yield "answer", said.get("content") or "", choice.get("finish_reason")
