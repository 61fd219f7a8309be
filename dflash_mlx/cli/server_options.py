"""The options of `dflash-mlx serve` that concern its clients: names, addresses, limits and logs. Imports nothing heavy."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from .options import OUTPUT, gathered_options, option, refuse

SERVER, API_KEY = "Server", "DFLASH_API_KEY"
PREFILL_SHARE = 0.5
Level = Literal["debug", "info", "warning", "error"]
# name -> (type, default)
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "model_name": (Annotated[str | None, option(SERVER, help="Model name shown to clients.")], None),
    "model_aliases": (Annotated[str | None, option(SERVER, help="Other names to accept for the model, comma-separated.")], None),
    "any_model_name": (
        Annotated[bool, option(SERVER, "--any-model-name", help="Accept any model name in a request.")],
        False,
    ),
    "host": (Annotated[str, option(SERVER, help="Address to listen on.")], "127.0.0.1"),
    "port": (Annotated[int, option(SERVER, min=0, max=65535, help="Port to listen on; 0: any free one.")], 8080),
    "api_key": (Annotated[str | None, option(SERVER, envvar=API_KEY, help="API key that clients must send.")], None),
    "max_body_mb": (Annotated[float, option(SERVER, min=0.001, help="Largest request in MB (1e6 bytes).")], 8.0),
    "max_queue": (
        Annotated[int, option(SERVER, min=0, help="Requests that may wait in the queue; more get status 503.")],
        128,
    ),
    "max_batch": (
        Annotated[
            int | None,
            option(SERVER, min=1, help="Requests answered at the same time. Default: 8 with a drafter, 1 without one."),
        ],
        None,
    ),
    "prefill_share": (
        Annotated[
            float,
            option(SERVER, min=0.05, max=0.95, help="Share of the time spent on new prompts while other answers run."),
        ],
        PREFILL_SHARE,
    ),
    "unload_after": (
        Annotated[
            float | None,
            option(
                SERVER,
                min=0.001,
                help="Free the models after this many seconds without a request; the next request loads them again.",
            ),
        ],
        None,
    ),
    "allowed_origins": (
        Annotated[str, option(SERVER, help="Origins of web pages that may send requests (CORS), comma-separated; '*': all.")],
        "",
    ),
    "verbose": (
        Annotated[bool, option(OUTPUT, "--verbose", help="Log every request on stderr (same as --log-level info).")],
        False,
    ),
    "log_level": (Annotated[Level, option(OUTPUT, help="Log messages of this level and above on stderr.")], "warning"),
    "log_prompts": (
        Annotated[bool, option(OUTPUT, "--log-prompts", help="Log each prompt as the model gets it; implies --log-level info.")],
        False,
    ),
    "log_json": (Annotated[bool, option(OUTPUT, "--log-json", help="Log one JSON object per line.")], False),
}


def server_options(command: Callable) -> Callable:
    """Give a command these options where its parameter `server` stands; it gets fields of `serving.server.Options`."""
    return gathered_options("server", _OPTIONS, _gathered)(command)


def _gathered(given: Mapping[str, Any]) -> dict[str, Any]:
    if given["api_key"] == "":
        raise refuse("--api-key", "it is empty; give a key, or leave it out")
    raised = given["verbose"] or given["log_prompts"] and given["log_level"] != "debug"
    _log_to_stderr("info" if raised else given["log_level"], given["log_json"])
    names = ("model_name", "any_model_name", "host", "port", "api_key", "max_queue", "log_prompts", "max_batch", "prefill_share")
    return {
        **{name: given[name] for name in names},
        "unload_after_s": given["unload_after"],
        "aliases": _listed(given["model_aliases"]),
        "allowed_origins": [_origin(text) for text in _listed(given["allowed_origins"])],
        "max_body_bytes": int(given["max_body_mb"] * 1e6),
    }


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _origin(text: str) -> str:
    """What a browser may send as Origin: *, null, or a scheme and a host without a path; a slash at the end is taken off."""
    origin = text.rstrip("/")
    if not re.fullmatch(r"\*|null|[A-Za-z][\w.+-]*://[^/\s]+", origin):
        raise refuse("--allowed-origins", f"{text!r} is not an origin; give the scheme and the host, as in http://localhost:3000")
    return origin


def _log_to_stderr(level: str, as_json: bool) -> None:
    about: dict[str, Any] = {"format": "%(asctime)s %(levelname)s %(message)s"}
    if as_json:
        from ..serving.log_lines import JsonLines

        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
        about = {"handlers": [handler]}
    logging.basicConfig(level=getattr(logging, level.upper()), **about)
    # Its own sentences say what ours say, or what a client did wrong.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
