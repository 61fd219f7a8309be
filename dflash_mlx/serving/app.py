"""The HTTP application: addresses, who may ask, how answers go out.

Knows requests and responses of HTTP, and the engine by three calls: submit, iterate over tokens, cancel. `server` owns sockets,
`requests` reads bodies, `messages` writes prompts, `responses` makes what goes back.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from mlx_lm.server import get_system_fingerprint
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import DFlashError
from .engine import Engine, Generation, Job, Options
from .messages import Prompt
from .requests import ClientDisconnected, CompletionRequest, RequestError, check_model, parse_body, read_request
from .responses import Completion

_log = logging.getLogger(__name__)
# Names that nobody can register: no foreign page can have one of them point here.
_PRIVATE = (".localhost", ".local", ".internal", ".home.arpa", ".lan")
# Seconds that the rest of a body that is too large is read on for. A client that is still sending would see a reset otherwise.
_DRAIN_S = 2.0


def make_app(engine: Engine) -> ASGIApp:
    """The application that serves an engine's pair; the engine is ready before the first request comes."""
    options = engine.options
    app = Starlette(
        routes=[
            Route("/chat/completions", _complete(chat=True), methods=["POST"]),
            Route("/completions", _complete(chat=False), methods=["POST"]),
            Route("/models", models),
            Route("/models/{name:path}", models),
            Route("/health", health),
        ],
        middleware=[
            Middleware(Guard, check=_check_host, options=options),
            Middleware(CORSMiddleware, allow_origins=options.allowed_origins, allow_methods=["*"], allow_headers=["*"]),
            Middleware(Guard, check=_check_client, options=options),
        ],
        exception_handlers={
            RequestError: lambda request, error: refusal(error),
            HTTPException: _of_the_router,
            ClientDisconnect: lambda request, error: Response(status_code=400),
            Exception: lambda request, error: refusal(RequestError(f"{type(error).__name__}: {error}", status=500)),
        },
    )
    app.state.engine, app.state.tokenizing = engine, asyncio.Lock()
    app.state.fingerprint, app.state.created = get_system_fingerprint(), int(time.time())

    async def with_any_prefix(scope: Scope, receive: Receive, send: Send) -> None:
        # /v1 may be left out, and a slash may end an address.
        path = scope["path"].rstrip("/").removeprefix("/v1") or "/"
        await app({**scope, "path": path}, receive, send)

    return with_any_prefix


# Errors


def refusal(error: RequestError) -> Response:
    """An error as OpenAI writes it."""
    return _json(error_body(error), error.status, error.headers)


def error_body(error: RequestError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body), status, headers, "application/json")


def _of_the_router(request: Request, error: HTTPException) -> Response:
    """An address that is not there, or not for this method."""
    asked = f"{request.method[:20]} {request.scope['raw_path'].decode()[:80]}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return refusal(RequestError(f"{asked}: this address takes {allowed} only", "Use it", 405, headers={"Allow": allowed}))
    return refusal(RequestError(f"{asked}: there is nothing at this address", "Ask for /v1/models", error.status_code))


# Who may ask


class Guard:
    """Middleware that refuses what a check raises a RequestError for."""

    def __init__(self, app: ASGIApp, check: Callable[[Request, Options], None], options: Options):
        self.app, self.check, self.options = app, check, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.check(Request(scope), self.options)
        except RequestError as error:
            await refusal(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _check_host(request: Request, options: Options) -> None:
    """Raises: RequestError for a foreign name of this machine."""
    host, allowed = request.headers.get("Host", ""), options.allowed_origins
    if "*" not in allowed and not is_own_name(host, options.host, allowed):
        problem = f"the request is for the host {host[:80]!r}, which is not a name of this server"
        raise RequestError(problem, "Use its address, or admit http://NAME with --allowed-origins", 403)


def _check_client(request: Request, options: Options) -> None:
    """Raises: RequestError for a foreign web page, or a wrong key."""
    origin, allowed = request.headers.get("Origin"), options.allowed_origins
    if request.method == "OPTIONS":
        return
    if origin and origin not in allowed and "*" not in allowed:
        problem = f"the request comes from the web page {origin[:80]}, which is not admitted"
        raise RequestError(problem, "Admit it with --allowed-origins", 403)
    if options.api_key is not None and request.scope["path"] != "/health":
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), options.api_key.encode())
        if not same or scheme.lower() != "bearer":
            remedy = "Send it in the Authorization header"
            raise RequestError("the server's API key is missing or wrong as bearer token", remedy, 401, "invalid_api_key")


def is_own_name(host: str, bound: str, allowed_origins: list[str]) -> bool:
    """Whether a Host header names this server: an address, a name that no stranger can register, or one that was admitted.

    A page of a foreign name that its owner has pointed at this machine would otherwise read answers as its own.
    """
    name = (urlsplit(f"//{host}").hostname or "") if host.isascii() and not set(host) & set("/?#@\\ ") else host
    name = name.rstrip(".").lower()
    if not name or name == bound.lower() or "." not in name and ":" not in name or name.endswith(_PRIVATE):
        return True
    try:
        ip_address(name)
        return True
    except ValueError:
        return name in (urlsplit(origin).hostname for origin in allowed_origins)


# GET


def health(request: Request) -> Response:
    """Whether requests are taken, how many wait, and how far the prompt of the running one is."""
    engine: Engine = request.app.state.engine
    body = {"status": "ok" if engine.is_healthy else "unavailable", "queue": engine.waiting, "running": engine.running}
    if (generation := engine.current) is not None:
        body["prompt"] = {"tokens": len(generation.job.prompt), "reused": generation.cached, "done": generation.done}
    return _json(body, 200 if engine.is_healthy else 503)


def models(request: Request) -> Response:
    """The served target, with its drafter and the default block size."""
    state, asked = request.app.state, request.path_params.get("name")
    pair, block = state.engine.pair, None
    if pair.drafter is not None:
        block = state.engine.options.block_size or pair.drafter.config.block_size
    model = {"id": pair.name, "object": "model", "created": state.created, "owned_by": "dflash-mlx"}
    model |= {"draft_model": pair.draft_name, "block_size": block}
    if asked is None:
        return _json({"object": "list", "data": [model]})
    if asked != pair.name:
        check_model(asked, pair)
    return _json(model)


# POST


def _complete(chat: bool) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> ASGIApp:
        state = request.app.state
        raw = await _read_body(request, state.engine.options.max_body_bytes)
        async with state.tokenizing:
            # One at a time: a tokenizer is not made for two threads.
            asked, prompt = await run_in_threadpool(_prepare, raw, chat, state.engine)
        generation = state.engine.submit(_job(asked, prompt))
        completion = Completion(asked, state.engine.pair, prompt, generation, state.fingerprint)
        return Answer(generation, completion, asked.stream)

    return endpoint


async def _read_body(request: Request, limit: int) -> bytes:
    """Raises: RequestError where it has more than `limit` bytes; the rest is read for a while."""
    declared = int(request.headers.get("Content-Length") or 0)
    pieces, size, until = [], 0, None
    # A client that asks first is told before it sends.
    if declared <= limit or "Expect" not in request.headers:
        async for piece in request.stream():
            size += len(piece)
            if size <= limit:
                pieces.append(piece)
                continue
            until = until or time.monotonic() + _DRAIN_S
            if size > 16 * limit or time.monotonic() > until:
                break
    if max(size, declared) > limit:
        problem = f"the body has {max(size, declared)} bytes; at most {limit} are read"
        raise RequestError(problem, "--max-body-mb raises the limit", 413, headers={"Connection": "close"})
    return b"".join(pieces)


def _prepare(raw: bytes, chat: bool, engine: Engine) -> tuple[CompletionRequest, Prompt]:
    request = read_request(parse_body(raw), chat, engine.pair, engine.options)
    try:
        return request, request.render(engine.pair.tokenizer)
    except DFlashError as error:
        raise RequestError(error.problem, error.remedy) from None


def _job(request: CompletionRequest, prompt: Prompt) -> Job:
    return Job(
        prompt=prompt.ids,
        shared=prompt.shared,
        after_template=request.chat,
        sampling=request.sampling,
        logit_bias=request.logit_bias,
        max_tokens=request.max_tokens,
        block_size=request.block_size,
        stop=request.stop,
        top=request.top_logprobs if request.logprobs else None,
    )


class Answer:
    """What is generated, as one object or as the events of a stream. A client that leaves ends it."""

    # Seconds without a word after which a stream gets a comment: the first time, then again.
    first_comment_s, next_comment_s = 1.0, 3.0

    def __init__(self, generation: Generation, completion: Completion, stream: bool):
        self.generation, self.completion, self.stream = generation, completion, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._cancel_when_gone(receive))
        try:
            if self.stream:
                headers = {"Cache-Control": "no-cache"}
                await StreamingResponse(self._events(), headers=headers, media_type="text/event-stream").stream_response(send)
            else:
                await (await self._whole())(scope, receive, send)
        except ClientDisconnected:
            pass
        finally:
            watch.cancel()
            self.generation.cancel()

    async def _cancel_when_gone(self, receive: Receive) -> None:
        """A client that closes only the half it writes to counts as gone too: HTTP clients do not."""
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await receive()
        self.generation.cancel()

    async def _whole(self) -> Response:
        try:
            async for token in self.generation.tokens():
                self.completion.add(token)
            return _json(self.completion.body())
        except RequestError as error:
            return refusal(error)

    async def _events(self) -> AsyncIterator[str]:
        """Events as they come; a comment when nothing was written for long, which tells how far the prompt is."""
        try:
            async for text in self._written():
                yield text
            yield "data: [DONE]\n\n"
        except RequestError as error:
            # The status line is out: the stream itself has to say it.
            yield _event(error_body(error))
        except ClientDisconnected:
            return

    async def _written(self) -> AsyncIterator[str]:
        wait, written = self.first_comment_s, time.monotonic()
        async for token in self.generation.tokens(min(0.25, self.first_comment_s)):
            event = self.completion.add(token) if token else None
            if event:
                yield _event(event)
                wait, written = self.first_comment_s, time.monotonic()
            elif time.monotonic() - written >= wait:
                yield f": prompt {self.generation.done}/{len(self.generation.job.prompt)}\n\n"
                wait, written = self.next_comment_s, time.monotonic()
        for event in self.completion.end():
            yield _event(event)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
