"""The HTTP application: its addresses, who may use them, and how answers are sent.

Knows requests and responses of HTTP, and the engine by three calls: submit, iterate over tokens, cancel. `server` owns sockets,
`requests` reads bodies, `messages` writes prompts; `responses`, `openai_responses` and `anthropic_messages` write answers.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from mlx_lm.server import get_system_fingerprint
from prometheus_client import CONTENT_TYPE_LATEST
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
from .anthropic_messages import MessageWriter, anthropic_error
from .channels import end_of_thinking, opens_reasoning
from .engine import Engine, Generation, Job, LoadedPair, Options
from .errors import ClientDisconnected, RequestError, shown
from .fields import ADDRESSES, APIS, CHAT, MESSAGES, RESPONSES
from .messages import Prompt
from .metrics import Metrics, log_prompt
from .openai_responses import ResponseWriter, Store
from .page_files import is_page, page_file
from .requests import CompletionRequest, check_model, parse_body, read_request
from .responses import Completion, Writer, error_body, joined, total
from .thinking_budget import ThinkingBudget

_log = logging.getLogger(__name__)
# Endings of host names that nobody can register, so no foreign web page can have such a name and point it at this machine.
_PRIVATE = (".localhost", ".local", ".internal", ".home.arpa", ".lan")
# How long the rest of a too large body is read. A client that is still sending would otherwise see a reset connection.
_DRAIN_S = 2.0


def make_app(engine: Engine) -> ASGIApp:
    """The application that serves an engine's pair; the engine is ready before the first request comes."""
    options = engine.options
    app = Starlette(
        routes=[
            *(Route(ADDRESSES[api].removeprefix("/v1"), _generate(api), methods=["POST"]) for api in APIS),
            Route("/responses/{name}", stored_response, methods=["GET", "DELETE"]),
            Route("/messages/count_tokens", count_tokens, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/models", models),
            Route("/models/{name:path}", models),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/", page_file),
            Route("/page/{name}", page_file),
        ],
        middleware=[
            Middleware(Guard, check=_check_host, options=options),
            Middleware(
                CORSMiddleware,
                allow_origins=options.allowed_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["Retry-After", "x-ignored-fields", "x-seed"],
            ),
            Middleware(Guard, check=_check_client, options=options),
        ],
        exception_handlers={
            RequestError: refusal,
            HTTPException: _of_the_router,
            ClientDisconnect: lambda request, error: Response(status_code=400),
            Exception: lambda request, error: refusal(request, RequestError(f"{type(error).__name__}: {error}", status=500)),
        },
    )
    app.state.engine, app.state.tokenizing, app.state.store = engine, asyncio.Lock(), Store()
    app.state.metrics = Metrics(engine)
    app.state.fingerprint, app.state.created = get_system_fingerprint(), int(time.time())

    async def with_any_prefix(scope: Scope, receive: Receive, send: Send) -> None:
        # /v1 may be left out, or come twice from a client that adds it to an address that has it; so may slashes.
        path = re.sub("^/+(v1/+)*", "/", scope["path"].rstrip("/")) or "/"
        await app({**scope, "path": path}, receive, send)

    return with_any_prefix


# Errors


def refusal(request: Request, error: RequestError) -> Response:
    """An error in the form of the API that was asked."""
    request.app.state.metrics.refused.labels(error.status).inc()
    if request.scope["path"].startswith("/messages"):
        return _json(*anthropic_error(error), error.headers)
    return _json(error_body(error), error.status, error.headers)


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body), status, headers, "application/json")


def _of_the_router(request: Request, error: HTTPException) -> Response:
    """An address that does not exist, or not for this method."""
    asked = f"{request.method[:20]} {request.scope['raw_path'].decode()[:80]}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        problem = f"{asked}: this address takes {allowed} only"
        return refusal(request, RequestError(problem, "Use it", 405, headers={"Allow": allowed}))
    return refusal(request, RequestError(f"{asked}: there is nothing at this address", "Ask for /v1/models", error.status_code))


# Who may ask


class Guard:
    """Middleware that runs a check and answers its RequestError."""

    def __init__(self, app: ASGIApp, check: Callable[[Request, Options], None], options: Options):
        self.app, self.check, self.options = app, check, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            self.check(request, self.options)
        except RequestError as error:
            await refusal(request, error)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _check_host(request: Request, options: Options) -> None:
    """Raises: RequestError for a Host header that does not name this server."""
    host, allowed = request.headers.get("Host", ""), options.allowed_origins
    if "*" not in allowed and not is_own_name(host, options.host, allowed):
        problem = f"the request is for the host {host[:80]!r}, which is not a name of this server"
        raise RequestError(problem, "Use its address, or allow http://NAME with --allowed-origins", 403)


def _check_client(request: Request, options: Options) -> None:
    """Raises: RequestError for a foreign web page, or a wrong key."""
    origin, allowed = request.headers.get("Origin"), options.allowed_origins
    if request.method == "OPTIONS":
        return
    # The page at / has the same host as the request, and `Host` was checked before.
    own = (origin or "").rpartition("//")[2] == request.headers.get("Host")
    if origin and not own and origin not in allowed and "*" not in allowed:
        problem = f"the request comes from the web page {origin[:80]}, which is not allowed"
        raise RequestError(problem, "Allow it with --allowed-origins", 403)
    # The page at / needs no key: it asks the user for one.
    if options.api_key is not None and (path := request.scope["path"]) != "/health" and not is_page(path):
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.strip().encode(), options.api_key.encode()):
            remedy = "Send it as bearer token in the Authorization header, or in x-api-key"
            raise RequestError("the server's API key is missing or wrong", remedy, 401, "invalid_api_key")


def is_own_name(host: str, bound: str, allowed_origins: list[str]) -> bool:
    """Whether a Host header names this server: an address, a name that no stranger can register, or one that the user allowed.

    Otherwise a foreign page could point its own name at this machine and read answers (DNS rebinding).
    """
    name = host
    if host.isascii() and not set(host) & set("/?#@\\ "):
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
    name = name.rstrip(".").lower()
    if not name or name == bound.lower() or "." not in name and ":" not in name or name.endswith(_PRIVATE):
        return True
    try:
        ip_address(name)
        return True
    except ValueError:
        return name in (origin.rpartition("//")[2].partition(":")[0].lower() for origin in allowed_origins)


# GET


def metrics(request: Request) -> Response:
    """Counts for Prometheus."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def health(request: Request) -> Response:
    """Whether the server takes requests, how many wait, and how much of the running request's prompt is read."""
    engine: Engine = request.app.state.engine
    body = {"status": "ok" if engine.is_healthy else "unavailable", "queue": engine.waiting, "running": engine.running}
    body["loaded"] = engine.is_loaded
    if (generation := engine.current) is not None:
        body["prompt"] = {"tokens": len(generation.job.prompt), "reused": generation.cached, "done": generation.done}
    return _json(body, 200 if engine.is_healthy else 503)


def models(request: Request) -> Response:
    """The served target with its drafter, default block size and context length, in the fields of both APIs."""
    state, asked = request.app.state, request.path_params.get("name")
    pair = state.engine.pair
    block = state.engine.options.block_size or pair.block if pair.draft_name else None
    model = {"id": pair.name, "object": "model", "created": state.created, "owned_by": "dflash-mlx"}
    model |= {"draft_model": pair.draft_name, "block_size": block, "context_length": pair.limit, "max_model_len": pair.limit}
    model |= {"type": "model", "display_name": pair.name, "created_at": _rfc3339(state.created)}
    if asked is None:
        return _json({"object": "list", "data": [model], "has_more": False, "first_id": pair.name, "last_id": pair.name})
    check_model(asked, pair, state.engine.options)
    return _json(model)


def _rfc3339(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


async def stored_response(request: Request) -> Response:
    """A response that is kept for `previous_response_id`."""
    store, name = request.app.state.store, request.path_params["name"]
    if request.method != "DELETE":
        return _json(store.body(name))
    store.drop(name)
    return _json({"id": name, "object": "response", "deleted": True})


# POST


def _generate(api: str) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> ASGIApp:
        state = request.app.state
        asked, prompts = await _prepared(request, api)
        try:
            return Answer(asked, _submit(state, asked, prompts), state.metrics)
        except RequestError as error:
            if not asked.stream or api != RESPONSES or error.code != "context_length_exceeded":
                raise
            # OpenAI's clients look for this header in the stream.
            return _stream_of(ResponseWriter(asked, state.engine.pair, prompts[0], Generation(Job([])), store=state.store), error)

    return endpoint


def _stream_of(writer: Writer, error: RequestError) -> Response:
    return Response("".join([*writer.start(), writer.error(error)]), media_type="text/event-stream")


async def _prepared(request: Request, api: str) -> tuple[CompletionRequest, list[Prompt]]:
    """What a body asks for, and its prompts."""
    state = request.app.state
    raw = await _read_body(request, state.engine.options.max_body_bytes)
    async with state.tokenizing:
        # One at a time: a tokenizer is not safe for two threads.
        return await run_in_threadpool(_prepare, raw, api, state.engine, state.store)


def _prepare(raw: bytes, api: str, engine: Engine, store: Store) -> tuple[CompletionRequest, list[Prompt]]:
    request = read_request(parse_body(raw), api, engine.pair, engine.options, store.messages, store.item)
    try:
        prompts = request.render(engine.pair.tokenizer)
        for grammar in {request.grammar(engine.pair, prompt) for prompt in prompts} - {None}:
            grammar.begin(engine.pair.tokenizer)
    except DFlashError as error:
        raise RequestError(error.problem, error.remedy) from None
    if engine.options.log_prompts:
        for prompt in prompts:
            log_prompt(api, engine.pair.tokenizer.decode(prompt.ids))
    return request, prompts


def _submit(state: Any, asked: CompletionRequest, prompts: list[Prompt]) -> list[Writer]:
    """A writer per prompt, each with its generation in the queue. If one is refused, none is queued."""
    writers: list[Writer] = []
    make = {
        RESPONSES: partial(ResponseWriter, store=state.store),
        MESSAGES: MessageWriter,
    }.get(asked.api, partial(Completion, fingerprint=state.fingerprint))
    try:
        for index, prompt in enumerate(prompts):
            generation = state.engine.submit(_job(asked, prompt, state.engine.pair, index))
            writers.append(make(asked, state.engine.pair, prompt, generation, index=index))
    except BaseException:
        for writer in writers:
            writer.generation.cancel()
        raise
    return writers


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a message has."""
    _, prompts = await _prepared(request, MESSAGES)
    return _json({"input_tokens": len(prompts[0].ids)})


async def tokenize(request: Request) -> Response:
    """The token ids of a text (`content` or `prompt`), or of `messages` rendered with the chat template."""
    state = request.app.state
    body = parse_body(await _read_body(request, state.engine.options.max_body_bytes))
    text = body.get("content", body.get("prompt")) if isinstance(body, dict) else None
    chat = isinstance(body, dict) and "messages" in body
    if not chat and not isinstance(text, str):
        raise RequestError(f"content is {shown(text)}; it must be text", "Send content, prompt or messages")
    pair = state.engine.pair
    async with state.tokenizing:
        if chat:
            said = {key: body[key] for key in ("messages", "tools") if key in body}
            asked = read_request(said, CHAT, pair, state.engine.options)
            ids = (await run_in_threadpool(asked.render, pair.tokenizer))[0].ids
        else:
            ids = list(await run_in_threadpool(pair.tokenizer.encode, text))
    return _json({"tokens": ids, "count": len(ids), "max_model_len": pair.limit})


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state = request.app.state
    body = parse_body(await _read_body(request, state.engine.options.max_body_bytes))
    ids, most = body.get("tokens") if isinstance(body, dict) else None, state.engine.pair.vocabulary
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < most for i in ids):
        raise RequestError(f"tokens is {shown(ids)}; it must be a list of token ids from 0 to {most - 1}")
    async with state.tokenizing:
        text = await run_in_threadpool(state.engine.pair.tokenizer.decode, ids)
    return _json({"content": text, "prompt": text})


async def _read_body(request: Request, limit: int) -> bytes:
    """Raises: RequestError if it has more than `limit` bytes; the rest is then read for a while."""
    declared = int(request.headers.get("Content-Length") or 0)
    pieces, size, until = [], 0, None
    # A client that sent Expect: 100-continue gets the refusal before it sends the body.
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


def _job(request: CompletionRequest, prompt: Prompt, pair: LoadedPair, index: int) -> Job:
    budget = []
    if request.thinking_budget is not None:
        opened = opens_reasoning(pair.tokenizer, prompt.before)
        budget.append(ThinkingBudget(request.thinking_budget, len(prompt.ids), end_of_thinking(pair.tokenizer), opened))
    # An answer that continues a word keeps its leading blank. If the message ends with one, the template may have cut that.
    begun = request.messages[-1]["content"] if request.continues and pair.tokenizer.has_chat_template else ""
    return Job(
        prompt=prompt.ids,
        shared=prompt.shared,
        after_template=request.chat and not begun[-1:].strip(),
        sampling=request.sampling_of(index),
        logit_bias=request.logit_bias,
        max_tokens=request.max_tokens,
        block_size=request.block_size,
        stop=request.stop,
        top=request.top_logprobs if request.logprobs else None,
        processors=budget,
        constraint=request.grammar(pair, prompt),
    )


class Answer:
    """The answer, as one object or as the events of a stream. It ends if the client leaves."""

    # Seconds without text after which a stream gets a comment: the first, and each further one.
    first_comment_s, next_comment_s = 1.0, 3.0

    def __init__(self, request: CompletionRequest, writers: list[Writer], metrics: Metrics):
        self.request, self.writers, self.metrics, self.failed = request, writers, metrics, False
        self.headers = {}
        if request.ignored:
            # The client chose these names: keep only characters that a header may hold, and not too many.
            names = ", ".join(dict.fromkeys(request.ignored))[:2000]
            self.headers["x-ignored-fields"] = re.sub(r"[^\x20-\x7e]", "?", names)
        if "seed" in request.body and request.sampling.seed is not None:
            self.headers["x-seed"] = str(request.sampling.seed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._cancel_when_gone(receive))
        try:
            if self.request.stream:
                headers = {"Cache-Control": "no-cache", **self.headers}
                await StreamingResponse(self._events(), headers=headers, media_type="text/event-stream").stream_response(send)
            else:
                await (await self._whole(Request(scope)))(scope, receive, send)
        except ClientDisconnected:
            pass
        finally:
            watch.cancel()
            self._cancel()
            for writer in self.writers:
                self.metrics.note(writer, self.request.api, "error" if self.failed else writer.reason or "left")

    def _cancel(self) -> None:
        for writer in self.writers:
            writer.generation.cancel()

    async def _cancel_when_gone(self, receive: Receive) -> None:
        """Cancel when the client is gone. One that closes only its sending side counts as gone; HTTP clients do not do that."""
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await receive()
        self._cancel()

    async def _whole(self, request: Request) -> Response:
        try:
            for writer in self.writers:
                async for tokens in writer.generation.bursts():
                    for token in tokens:
                        writer.add(token)
            bodies = [writer.body() for writer in self.writers]
            return _json(bodies[0] if len(bodies) == 1 else joined(bodies), headers=self.headers)
        except RequestError as error:
            self.failed = True
            return refusal(request, error)

    async def _events(self) -> AsyncIterator[str]:
        """Events as they come. After a while without one, a comment tells how much of the prompt is read."""
        try:
            for writer in self.writers:
                async for text in self._written(writer):
                    yield text
            if isinstance(writer, Completion):
                yield "".join(writer.end_of_all(total([one.usage() for one in self.writers])))
        except RequestError as error:
            # The status was sent already, so the error is an event of the stream.
            self.failed = True
            yield writer.error(error)
        except ClientDisconnected:
            return
        except Exception as error:
            _log.exception("a request failed")
            self.failed = True
            yield writer.error(RequestError(f"{type(error).__name__}: {error}", status=500))

    async def _written(self, writer: Writer) -> AsyncIterator[str]:
        """A writer's events. All tokens of a round are sent together, so a client that left is noticed between rounds."""
        yield "".join(writer.start())
        wait, written = self.first_comment_s, time.monotonic()
        async for tokens in writer.generation.bursts(min(0.25, self.first_comment_s)):
            text, due = "".join(event for token in tokens for event in writer.add(token)), time.monotonic() - written >= wait
            if text or due:
                yield text or writer.idle()
                wait, written = self.first_comment_s if text else self.next_comment_s, time.monotonic()
        yield "".join(writer.end())
