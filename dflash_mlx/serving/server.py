"""`dflash-mlx serve`: binds an address, loads the pair, and serves it until a signal comes.

Knows sockets, time limits of clients, and signals. `app` knows requests and answers.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import DFlashError
from ..kernels.crash_marker import leave_at_once
from .app import make_app
from .engine import Engine, Options

__all__ = ["Options", "Server", "serve"]
# After this many seconds the user is shown what the shutdown waits for.
_PATIENCE_S = 0.4


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, but drops clients that do not finish a request or do not read their answer.

    A limit holds for all headers, and for all of a body: a client that sends a byte now and then is no better than one that
    sends nothing.
    """

    headers_s, body_s, unread_s = 30.0, 60.0, 60.0
    _stage: Any = None
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._limit()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limit()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stage = self._stop(self._reading) or self._stop(self._writing)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop(self._writing)

    def _limit(self) -> None:
        """Start and stop the clock for headers and for a body."""
        limits = {h11.IDLE: self.headers_s, h11.SEND_BODY: self.body_s}
        stage = self.conn.their_state, self.cycle
        if stage == self._stage:
            return
        self._stop(self._reading)
        self._stage = stage
        if self.conn.their_state in limits:
            self._reading = self.loop.call_later(limits[self.conn.their_state], self.transport.close)

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, in JSON."""
        body = b'{"error": {"message": "this is no HTTP request.", "type": "invalid_request_error", "param": null, "code": null}}'
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=body)):
                self.transport.write(self.conn.send(event))
        self.transport.close()


class Server:
    """An address that is bound; `start` answers there in a thread of its own, with `engine` ready.

    Raises:
      DFlashError: the address cannot be bound.
    """

    def __init__(self, options: Options):
        self.options = options
        try:
            family, kind, _, _, place = socket.getaddrinfo(
                options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._socket = socket.socket(family, kind, socket.IPPROTO_TCP)  # unnamed, asyncio lets small writes wait (Nagle)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(place)
            self._socket.listen(128)
        except socket.gaierror as error:
            problem = f"the host {options.host!r} is unknown: {error.strerror}"
            raise DFlashError(problem, "Give an address of this machine with --host, such as 127.0.0.1") from None
        except OSError as error:
            self._socket.close()
            reason = (error.strerror or str(error)).lower()
            problem = f"cannot listen at {options.host}, port {options.port}: {reason}"
            raise DFlashError(problem, "Choose another with --port or --host; --port 0 takes any free port") from None
        self.address = self._socket.getsockname()[:2]
        self._uvicorn: uvicorn.Server | None = None
        # Not `Thread.join`: in Python 3.11 a signal during it makes the thread look ended.
        self._ended = threading.Event()

    def start(self, engine: Engine) -> None:
        """Take requests."""
        config = uvicorn.Config(
            make_app(engine),
            http=TimedProtocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=65,
            timeout_graceful_shutdown=1,
        )
        self._uvicorn = uvicorn.Server(config)
        threading.Thread(target=self._run, name="http", daemon=True).start()

    def _run(self) -> None:
        try:
            self._uvicorn.run([self._socket])
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Wait until it has ended."""
        while not self._ended.wait(0.2):
            pass

    def stop(self) -> None:
        """Take no more requests, and end. Running answers end with the engine."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
            self.wait()
        self._socket.close()


def serve(
    options: Options,
    open_pair: Callable[[], tuple[str, str | None, Any, Any, Any]],
    say: Callable[[str], None],
    engine_class: Callable[..., Engine] = Engine,
) -> None:
    """Bind the address, load the pair and serve it until SIGINT, SIGTERM, or SIGHUP of a terminal that is closed.

    Args:
      open_pair: as for `Engine`.
      say: called with a sentence when the server listens, and when it ends. engine_class: makes the engine of the first two.
    Raises:
      DFlashError: the address cannot be bound; nothing was loaded. What `open_pair` raises.
    """
    # Under nohup SIGHUP is ignored, and stays so.
    ends = [signal.SIGTERM, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else [])]
    before = {number: signal.signal(number, _interrupt) for number in ends}
    try:
        server = Server(options)
        engine = engine_class(options, open_pair)
        try:
            engine.start()
            while not engine.ready.wait(0.2):
                pass
            if engine.fault is not None:
                raise engine.fault
            server.start(engine)
            _introduce(server, engine, say)
            server.wait()
        finally:
            _end(server, engine, say)
    except KeyboardInterrupt:
        say("Stopped.")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _introduce(server: Server, engine: Engine, say: Callable[[str], None]) -> None:
    host, port = server.address
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if engine.options.api_key is None and host not in ("127.0.0.1", "::1"):
        say(f"Anyone who reaches {host} can use this server: --api-key asks for a key.")
    how = f"drafter {engine.pair.draft_name}" if engine.pair.draft_name else "plain decoding"
    say(f"Serving {engine.pair.name} ({how}) at http://{address}/v1")
    say(f"Chat in a browser at http://{address}/")


def _end(server: Server, engine: Engine, say: Callable[[str], None]) -> None:
    """Let the running pass end, and say so if it takes a while. A second signal ends the process: MLX cannot stop a pass."""
    try:
        engine.close()
        if not engine.join(_PATIENCE_S):
            say("Stopping: what is being computed or written ends first. Ctrl-C again leaves at once.")
            engine.join()
        server.stop()
    except KeyboardInterrupt:
        say("Stopped.")
        leave_at_once(130)


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt
