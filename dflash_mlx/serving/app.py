"""`dflash-mlx serve`: OpenAI's chat and text completions over HTTP.

Knows sockets, headers and addresses. `requests` reads bodies, `messages` writes prompts, `engine` generates, `responses` makes
what goes back.
"""

from __future__ import annotations

import hmac
import json
import logging
import select
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any
from urllib.parse import unquote, urlsplit

from mlx_lm.server import get_system_fingerprint

from ..errors import DFlashError
from ..kernels.crash_marker import leave_at_once
from .engine import Engine, Generation, Job, Options
from .messages import Prompt
from .requests import ClientDisconnected, CompletionRequest, RequestError, check_model, parse_body, read_request
from .responses import Response

__all__ = ["Handler", "Options", "Server", "serve"]
_log = logging.getLogger(__name__)
# Seconds after which a user is told what an end waits for.
_PATIENCE_S = 0.4
_CHAT, _TEXT = "/chat/completions", "/completions"
# Names that nobody can register: no foreign page can have one of them point here.
_PRIVATE = (".localhost", ".local", ".internal", ".home.arpa", ".lan")


class Handler(BaseHTTPRequestHandler):
    """One connection: admits it, reads it, and writes the answer as it comes."""

    server: Server
    # Seconds that a client may leave a request unfinished or an answer unread.
    timeout = 60
    # Seconds without a word after which a stream gets a comment: the first time, then again.
    first_comment_s, next_comment_s = 1.0, 3.0
    started = False

    @property
    def engine(self) -> Engine:
        return self.server.engine

    @property
    def options(self) -> Options:
        return self.server.options

    def do_POST(self) -> None:
        self._guard(self._post)

    def do_GET(self) -> None:
        self._guard(self._get)

    # As GET; `_json` leaves the body out.
    do_HEAD = do_GET

    def do_OPTIONS(self) -> None:
        self._guard(self._preflight)

    def _guard(self, act: Callable[[], None]) -> None:
        """Every request ends with an answer or with a client that has left; none takes the thread's neighbours along."""
        # No address here has a meaning for what follows a question mark; /v1 may be left out.
        self.path = self.path.partition("?")[0].rstrip("/") or "/"
        self.route = self.path.removeprefix("/v1")
        try:
            self._admit()
            act()
        except RequestError as error:
            self._refuse(error)
        except (ClientDisconnected, ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            _log.exception("a request failed")
            self._refuse(RequestError(f"{type(error).__name__}: {error}", status=500))

    def _refuse(self, error: RequestError) -> None:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        body = {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}
        try:
            if self.started:
                # The status line is out: the stream itself has to say it.
                self._event(body)
            else:
                self._json(body, error.status)
        except (ConnectionError, TimeoutError):
            pass
        self.close_connection = True

    def end_headers(self) -> None:
        self.started = True
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        _log.info("%s %s", self.address_string(), format % args)

    def _headers(self, status: int, kind: str, **more: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        origin, allowed = self.headers.get("Origin"), self.options.allowed_origins
        if "*" in allowed:
            self.send_header("Access-Control-Allow-Origin", "*")
        elif origin in allowed:
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Vary", "Origin")
        self.send_header("Access-Control-Allow-Methods", "*")
        self.send_header("Access-Control-Allow-Headers", "*")
        # The star does not stand for this one.
        self.send_header("Access-Control-Allow-Headers", "Authorization")
        for name, value in more.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _json(self, body: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(body).encode()
        self._headers(status, "application/json", Content_Length=str(len(data)))
        if self.command != "HEAD":
            self._write(data)

    def _event(self, body: dict[str, Any]) -> None:
        self._start_stream()
        self._write(f"data: {json.dumps(body)}\n\n".encode())

    def _start_stream(self) -> None:
        if not self.started:
            self._headers(200, "text/event-stream", Cache_Control="no-cache")

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    # Who may ask

    def _admit(self) -> None:
        """Raises: RequestError for a foreign web page, a foreign name of this machine, or a wrong key."""
        allowed = self.options.allowed_origins
        hosts = self.headers.get_all("Host", [])
        host = next((host for host in hosts if not is_own_name(host, self.options.host, allowed)), None)
        if "*" not in allowed and host is not None:
            problem = f"the request is for the host {host[:80]!r}, which is not a name of this server"
            raise RequestError(problem, "Use its address, or admit http://NAME with --allowed-origins", 403)
        origin = self.headers.get("Origin")
        if origin and origin not in allowed and "*" not in allowed and self.command != "OPTIONS":
            problem = f"the request comes from the web page {origin[:80]}, which is not admitted"
            raise RequestError(problem, "Admit it with --allowed-origins", 403)
        if self.options.api_key is not None and self.path != "/health" and self.command != "OPTIONS":
            scheme, _, given = self.headers.get("Authorization", "").partition(" ")
            same = hmac.compare_digest(given.strip().encode(), self.options.api_key.encode())
            if not same or scheme.lower() != "bearer":
                remedy = "Send it in the Authorization header"
                raise RequestError("the server's API key is missing or wrong as bearer token", remedy, 401, "invalid_api_key")

    def _preflight(self) -> None:
        self._headers(204, "application/json")

    # GET

    def _get(self) -> None:
        if self.path == "/health":
            healthy = self.engine.is_healthy
            body = {"status": "ok" if healthy else "unavailable", "queue": self.engine.waiting, "running": self.engine.running}
            self._json(body, 200 if healthy else 503)
        elif self.route == "/models" or self.route.startswith("/models/"):
            self._models(unquote(self.route.removeprefix("/models").lstrip("/")))
        else:
            raise RequestError(f"there is nothing at {self.path[:80]}", "Ask for /v1/models or /health", 404)

    def _models(self, asked: str) -> None:
        """The served target, with its drafter and the default block size."""
        pair = self.engine.pair
        block = (self.options.block_size or pair.drafter.config.block_size) if pair.drafter is not None else None
        model = {"id": pair.name, "object": "model", "created": self.server.created, "owned_by": "dflash-mlx"}
        model |= {"draft_model": pair.draft_name, "block_size": block}
        if not asked:
            self._json({"object": "list", "data": [model]})
        else:
            if asked != pair.name:
                check_model(asked, pair)
            self._json(model)

    # POST

    def _post(self) -> None:
        if self.route not in (_CHAT, _TEXT):
            remedy = f"Post to /v1{_CHAT} or /v1{_TEXT}"
            raise RequestError(f"there is nothing to post to at {self.path[:80]}", remedy, 404)
        pair = self.engine.pair
        request = read_request(parse_body(self._read_body()), self.route == _CHAT, pair, self.options)
        try:
            # One at a time: a tokenizer is not made for two threads.
            with self.server.tokenizing:
                prompt = request.render(pair.tokenizer)
        except DFlashError as error:
            raise RequestError(error.problem, error.remedy) from None
        generation = self.engine.submit(_job(request, prompt), self._is_gone)
        try:
            self._answer(Response(request, pair, prompt, generation, self.server.fingerprint), generation, request.stream)
        finally:
            generation.cancel()

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length")
        if length is None:
            raise RequestError("the request has no Content-Length header", "Send it", 411)
        # 18 digits: Python refuses to read numbers of thousands.
        if not length.isascii() or not length.isdigit() or len(length) > 18:
            raise RequestError(f"Content-Length is {length[:40]!r}; it must be a number")
        limit = self.options.max_body_bytes
        if int(length) > limit:
            problem = f"the body has {length} bytes; at most {limit} are read"
            self._refuse(RequestError(problem, "--max-body-mb raises the limit", 413))
            self._drain()
            raise ClientDisconnected
        raw = self.rfile.read(int(length))
        if len(raw) < int(length):
            raise ClientDisconnected
        return raw

    def _drain(self) -> None:
        """Read on for a while: a client that is still sending would otherwise see a reset instead of the answer."""
        self.connection.settimeout(2)
        left = 16 * self.options.max_body_bytes
        while left > 0 and (piece := self.rfile.read1(1 << 16)):
            left -= len(piece)

    def _is_gone(self) -> bool:
        """Whether the client has closed its side; asked by the generating thread once a token.

        A client that closes only the half it writes to counts as gone too: HTTP clients do not.
        """
        try:
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def _answer(self, response: Response, generation: Generation, stream: bool) -> None:
        """Write one object, or the events of a stream: its headers at once, a comment when nothing was written for long."""
        if stream:
            self._start_stream()
        wait, written = self.first_comment_s, time.monotonic()
        for token in generation.tokens(min(0.25, self.first_comment_s) if stream else None):
            event = response.add(token) if token else None
            if event:
                self._event(event)
                wait, written = self.first_comment_s, time.monotonic()
            elif stream and time.monotonic() - written >= wait:
                # It also finds a broken connection.
                self._write(f": prompt {generation.done}/{len(generation.job.prompt)}\n\n".encode())
                wait, written = self.next_comment_s, time.monotonic()
        if not stream:
            self._json(response.body())
            return
        for event in response.end():
            self._event(event)
        self._write(b"data: [DONE]\n\n")


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


class Server(ThreadingHTTPServer):
    """A thread a connection; connections beyond the generating thread's queue wait in theirs.

    The address is bound when the server is made; requests are taken once `engine` is set and `serve_forever` runs.

    Raises:
      DFlashError: the address cannot be bound.
    """

    daemon_threads = True
    request_queue_size = 128
    engine: Engine

    def __init__(self, options: Options):
        self.options, self.tokenizing = options, threading.Lock()
        self.fingerprint, self.created = get_system_fingerprint(), int(time.time())
        try:
            info = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self.address_family = info[0]
            super().__init__(info[4], Handler)
        except socket.gaierror as error:
            problem = f"the host {options.host!r} is unknown: {error.strerror}"
            raise DFlashError(problem, "Give an address of this machine with --host, such as 127.0.0.1") from None
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            problem = f"cannot listen at {options.host}, port {options.port}: {reason}"
            raise DFlashError(problem, "Choose another with --port or --host; --port 0 takes any free port") from None

    def server_bind(self) -> None:
        # HTTPServer's own asks for this machine's full name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.info("connection from %s ended early", client_address, exc_info=True)


def serve(options: Options, open_pair: Callable[[], tuple[str, str | None, Any, Any, Any]], say: Callable[[str], None]) -> None:
    """Bind the address, load the pair and serve it until SIGINT, SIGTERM, or SIGHUP of a terminal that is closed.

    Args:
      open_pair: as for `Engine`.
      say: told in a sentence when the server listens, and when it ends.
    Raises:
      DFlashError: the address cannot be bound; nothing was loaded. What `open_pair` raises.
    """
    # Under nohup SIGHUP is ignored, and stays so.
    ends = [signal.SIGTERM, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else [])]
    before = {number: signal.signal(number, _interrupt) for number in ends}
    try:
        with Server(options) as server:
            engine = server.engine = Engine(options, open_pair)
            try:
                engine.start()
                while not engine.ready.wait(0.2):
                    pass
                if engine.fault is not None:
                    raise engine.fault
                _introduce(server, say)
                server.serve_forever()
            finally:
                _end(engine, say)
    except KeyboardInterrupt:
        say("Stopped.")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _introduce(server: Server, say: Callable[[str], None]) -> None:
    host, port = server.server_address[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if server.engine.options.api_key is None and host not in ("127.0.0.1", "::1"):
        say(f"Anyone who reaches {host} can use this server: --api-key asks for a key.")
    pair = server.engine.pair
    how = f"drafter {pair.draft_name}" if pair.draft_name else "plain decoding"
    say(f"Serving {pair.name} ({how}) at http://{address}/v1")


def _end(engine: Engine, say: Callable[[str], None]) -> None:
    """Let the pass under way end, and say so where that takes a while. A second signal ends the process: MLX has no other way."""
    try:
        engine.close()
        if not engine.join(_PATIENCE_S):
            say("Stopping: what is being computed ends first. Ctrl-C again leaves at once.")
            engine.join()
    except KeyboardInterrupt:
        say("Stopped.")
        leave_at_once(130)


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt
