"""`dflash-mlx serve`: OpenAI's chat and text completions over HTTP, on mlx-lm's own server classes.

mlx-lm's handler reads requests, its generator thread tokenizes and runs them in order, its helpers tell thinking and tool
calls from answers. Here is what differs: a DFlash pair instead of models by request, prompt caches that carry both, one
request at a time in the order of arrival, and refusals for everything that would otherwise be ignored.
`tests/serving/test_app.py` names what this file relies on in `mlx_lm.server`.
"""

from __future__ import annotations

import hmac
import inspect
import io
import json
import logging
import select
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from http.server import ThreadingHTTPServer
from math import isfinite
from queue import Queue
from typing import Any
from urllib.parse import unquote

import mlx.core as mx
from mlx_lm.generate import TextStateMachine
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.server import (
    APIHandler,
    CompletionRequest,
    GenerationArguments,
    GenerationContext,
    LogitsProcessorArguments,
    ModelDescription,
    ModelProvider,
    ResponseGenerator,
    SamplingArguments,
    ToolCallFormatter,
    get_system_fingerprint,
)
from transformers import PreTrainedTokenizerBase

from ..errors import DFlashError
from ..models.target import Target
from ..options import largest_block
from ..text import StopText, token_bytes
from .prefix_cache import PrefixCache, stream_from_prefix

_log = logging.getLogger(__name__)


@dataclass
class Options:
    """What the server was started with; the names that mlx-lm's classes read as `cli_args` are theirs."""

    model: str | None = None
    draft_model: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    max_body_bytes: int = 8_000_000
    allowed_origins: list[str] = field(default_factory=list)
    block_size: int | None = None
    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 512
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    prefill_step_size: int = 2048
    prompt_cache_size: int = 10
    prompt_cache_bytes: int | None = None
    # Read by mlx-lm's classes and fixed here.
    adapter_path: None = None
    trust_remote_code: bool = False
    chat_template: str = ""
    use_default_chat_template: bool = False
    pipeline: bool = False
    num_draft_tokens: int = 0
    decode_concurrency: int = 1
    prompt_concurrency: int = 1
    kv_bits: None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0


class Refusal(Exception):
    """A request that is answered with an error: status, a sentence, OpenAI's code word."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


class _Gone(Exception):
    """The client has left: there is nobody to answer."""


@dataclass
class Request(CompletionRequest):
    """mlx-lm's request, and a way to ask whether its client is still there."""

    gone: Callable[[], bool] = lambda: False


@dataclass
class Token:
    """One generated token on its way from the generating thread to the handler's.

    logprob, top: only when asked for; top is (id, logprob), the likeliest first.
    """

    text: str
    token: int
    finish_reason: str | None
    from_draft: bool
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)
    # Drafted tokens that were verified in this run so far.
    verified: int = 0


class Provider(ModelProvider):
    """The one pair that is served. `load_default` runs in the generating thread, which owns the arrays' stream."""

    def __init__(self, options: Options, open_pair: Callable[[], tuple[str, str | None, Any, Any, Any]]):
        super().__init__(options)
        self._open = open_pair
        self.ready = threading.Event()
        self.fault: BaseException | None = None
        self.name, self.draft_name, self.vocabulary = "", None, 0
        # Positions the target was made for, where its config says.
        self.limit: int | None = None

    def load_default(self) -> None:
        """Load the pair; a fault is kept for the thread that waits for `ready`."""
        try:
            self.name, self.draft_name, self.model, self.tokenizer, self.draft_model = self._open()
            target = Target(self.model)
            self.vocabulary, self.limit = target.vocabulary, target.context_length
            self._check_options()
            self.model_key = (self.name, None, self.draft_name)
        except BaseException as error:
            self.fault = error
        finally:
            self.ready.set()

    def _check_options(self) -> None:
        """Raises: DFlashError for what would make every request fail."""
        options = self.cli_args
        if options.top_k >= self.vocabulary:
            raise DFlashError(f"expected top_k below {self.vocabulary}, the target's vocabulary; found {options.top_k}.")
        if self.draft_model is not None and (options.block_size or 1) > (largest := largest_block(self.draft_model)):
            raise DFlashError(f"expected block_size of at most {largest} with this drafter; found {options.block_size}.")

    def load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> tuple[Any, Any]:
        """The pair; the handler has refused other names."""
        return self.model, self.tokenizer


class Generator(ResponseGenerator):
    """Runs requests one after the other in the order in which they came."""

    def __init__(self, provider: Provider, store: PrefixCache):
        self.running = False
        super().__init__(provider, store)

    def _run_generate(self) -> None:
        try:
            super()._run_generate()
        finally:
            # A thread of MLX's that is left behind ends the process with an abort.
            mx.clear_streams()

    @property
    def waiting(self) -> int:
        return self.requests.qsize()

    def _is_batchable(self, args: GenerationArguments) -> bool:
        return False

    def _serve_single(self, request: tuple[Queue, Request, GenerationArguments], stream: Any) -> None:
        answers, request, args = request
        self.running = True
        try:
            if request.gone():
                raise _Gone
            self._run(answers, request, args, stream)
            answers.put(None)
        except (Refusal, _Gone) as error:
            answers.put(error)
        except (DFlashError, ValueError) as error:
            answers.put(Refusal(400, str(error)))
        except Exception as error:
            _log.exception("a request failed")
            answers.put(Refusal(500, f"{type(error).__name__}: {error}"))
        finally:
            self.running = False

    def _run(self, answers: Queue, request: Request, args: GenerationArguments, stream: Any) -> None:
        provider, options = self.model_provider, self.cli_args
        tokenizer = provider.tokenizer
        try:
            prompt, segments, kinds, initial, _ = self._tokenize(tokenizer, request, args)
        except Exception as error:
            # Templates raise what they like.
            raise Refusal(400, f"the chat template refused these messages: {error}") from error
        if not prompt:
            raise Refusal(400, "expected a prompt of at least one token; it is empty.")
        room = provider.limit - len(prompt) if provider.limit else args.max_tokens
        if room < 1:
            raise Refusal(
                400,
                f"expected a prompt below the target's {provider.limit} positions; it has {len(prompt)} tokens.",
                "context_length_exceeded",
            )
        if args.num_draft_tokens is not None:
            block_size = args.num_draft_tokens + 1
        else:
            block_size = options.block_size if provider.draft_model is not None else None
        # Where later prompts may part from this one: behind its segments, and before its last token, which any answer follows.
        lengths = [sum(map(len, segments[: i + 1])) for i in range(len(segments) - 1)] + [len(prompt) - 1]
        ctx = GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=self._make_state_machine(provider.model_key, tokenizer, [])[1],
            initial_state=initial,
            prompt=prompt,
        )
        self._log_cache_stats()
        wants_rows = args.logprobs or args.top_logprobs > 0
        turn = stream_from_prefix(
            provider.model,
            tokenizer,
            prompt,
            self.prompt_cache,
            provider.model_key,
            draft_model=provider.draft_model,
            shared=list(zip(lengths, kinds, strict=True)),
            should_stop=lambda: ctx._should_stop or self._stop or request.gone(),
            logits_processors=make_logits_processors(**asdict(args.logits)),
            prompt_progress_callback=lambda done, total: answers.put((done, total)),
            max_tokens=min(args.max_tokens, room),
            sampler=_sampler(args.sampling, tokenizer),
            seed=args.seed,
            block_size=block_size,
            prefill_step_size=options.prefill_step_size,
            keep_rounds=False,
            stream=stream,
        )
        ctx.prompt_cache_count = turn.held
        answers.put(ctx)
        stop, reason = StopText(args.stop_words), None
        with closing(turn.responses) as responses:
            for response in responses:
                text, found = stop.feed(response.text, last=response.finish_reason is not None)
                reason = "stop" if found else response.finish_reason
                row = response.logprobs if wants_rows else None
                answers.put(
                    Token(
                        text,
                        response.token,
                        reason,
                        response.from_draft,
                        row[response.token].item() if wants_rows else None,
                        _top(row, args.top_logprobs) if wants_rows else [],
                        response.stats.n_verified if response.stats else 0,
                    )
                )
                if reason:
                    break
        if reason is None:
            raise _Gone


# Fields that nobody's answer depends on.
_IGNORED = {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"}
# Fields of OpenAI's that ask for what this server does not do, unless they hold this value.
_ONLY = {
    "adapters": None,
    "audio": None,
    "best_of": 1,
    "echo": False,
    "function_call": None,
    "functions": None,
    "modalities": ["text"],
    "n": 1,
    "parallel_tool_calls": True,
    "prediction": None,
    "reasoning_effort": None,
    "response_format": {"type": "text"},
    "suffix": "",
    "verbosity": None,
    "web_search_options": None,
}
# Fields that this server or mlx-lm's handler acts upon.
_KNOWN = {
    *("messages", "prompt", "model", "draft_model", "stream", "stream_options", "stop", "tools", "tool_choice"),
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "num_draft_tokens"),
    *("repetition_penalty", "repetition_context_size", "presence_penalty", "presence_context_size"),
    *("frequency_penalty", "frequency_context_size", "xtc_probability", "xtc_threshold", "logit_bias"),
    *("logprobs", "top_logprobs", "chat_template_kwargs", "role_mapping"),
}
# Of those, what only chats, or only text completions, have.
_OF_CHATS = ("messages", "tools", "tool_choice", "chat_template_kwargs", "role_mapping")
_OF_TEXTS = ("prompt",)
# What transformers' function takes beside a template's variables.
_TEMPLATES_OWN = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents", "kwargs"}
_STREAM = {"include_usage", "include_obfuscation"}
_MOST_STOPS, _LONGEST_STOP = 64, 1000
# Larger numbers have no further effect, and MLX cannot read all of them.
_LARGEST = 1e6
_SIZES = dict.fromkeys(("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"), _LARGEST)
_SIZES |= dict.fromkeys(("repetition_context_size", "presence_context_size", "frequency_context_size"), (1 << 31) - 1)
# mlx-lm's handler allows as many alternatives a token.
_MOST_TOP = 11
_CHAT, _TEXT = ("/v1/chat/completions", "/chat/completions"), ("/v1/completions",)


class Handler(APIHandler):
    """mlx-lm's handler behind a border that checks, and with answers written as they are asked for."""

    # Seconds that a client may leave a request unfinished or an answer unread.
    timeout = 60
    started = False

    @property
    def provider(self) -> Provider:
        return self.response_generator.model_provider

    @property
    def options(self) -> Options:
        return self.response_generator.cli_args

    def do_POST(self) -> None:
        self._guard(self._post)

    def do_GET(self) -> None:
        self._guard(self._get)

    # As GET; `_json` leaves the body out.
    do_HEAD = do_GET

    def _guard(self, act: Callable[[], None]) -> None:
        """Every request ends with an answer or with a client that has left; none takes the thread's neighbours along."""
        # No address here has a meaning for what follows a question mark.
        self.path = self.path.partition("?")[0]
        try:
            act()
        except Refusal as error:
            self._refuse(error)
        except (_Gone, ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            _log.exception("a request failed")
            self._refuse(Refusal(500, f"{type(error).__name__}: {error}"))

    def _refuse(self, error: Refusal) -> None:
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

    def _json(self, body: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(body).encode()
        self._set_completion_headers(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
            self.wfile.flush()

    def _set_cors_headers(self) -> None:
        super()._set_cors_headers()
        # mlx-lm's '*' does not stand for this one.
        self.send_header("Access-Control-Allow-Headers", "Authorization")

    def _event(self, body: dict[str, Any]) -> None:
        if not self.started:
            self._set_stream_headers(200)
            self.end_headers()
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()

    def _admit(self) -> None:
        """Raises: Refusal for a foreign web page or a wrong key."""
        origin, allowed = self.headers.get("Origin"), self.options.allowed_origins
        if origin and origin not in allowed and "*" not in allowed:
            raise Refusal(403, f"expected no request from web pages; found origin {origin}. --allowed-origins admits it.")
        if self.options.api_key is not None and self.path != "/health":
            scheme, _, given = self.headers.get("Authorization", "").partition(" ")
            same = hmac.compare_digest(given.strip().encode(), self.options.api_key.encode())
            if not same or scheme.lower() != "bearer":
                raise Refusal(401, "expected the server's API key as a bearer token.", "invalid_api_key")

    # GET

    def _get(self) -> None:
        self._admit()
        if self.path == "/health":
            self.handle_health_check()
        elif self.path == "/v1/models" or self.path.startswith("/v1/models/"):
            self.handle_models_request()
        else:
            raise Refusal(404, f"expected /v1/models or /health; found {self.path}.")

    def handle_health_check(self) -> None:
        generator = self.response_generator
        healthy = generator.is_healthy
        body = {"status": "ok" if healthy else "unavailable", "queue": generator.waiting, "running": generator.running}
        self._json(body, 200 if healthy else 503)

    def handle_models_request(self) -> None:
        """The served target, with its drafter and the default block size."""
        provider = self.provider
        drafter = provider.draft_model
        model = {
            "id": provider.name,
            "object": "model",
            "created": self.created,
            "owned_by": "dflash-mlx",
            "draft_model": provider.draft_name,
            "block_size": (self.options.block_size or drafter.config.block_size) if drafter is not None else None,
        }
        asked = unquote(self.path.removeprefix("/v1/models").lstrip("/"))
        if not asked:
            self._json({"object": "list", "data": [model]})
        elif asked == provider.name:
            self._json(model)
        else:
            self._check_model(asked)

    def _check_model(self, name: Any) -> None:
        if name not in (self.provider.name, "default_model"):
            raise Refusal(404, f"expected the model {self.provider.name!r}; found {name!r}.", "model_not_found")

    # POST

    def _post(self) -> None:
        self._admit()
        if self.path not in (*_CHAT, *_TEXT):
            raise Refusal(404, f"expected {_CHAT[0]} or {_TEXT[0]}; found {self.path}.")
        body = self._checked(self._read_body())
        # mlx-lm's handler reads what was checked.
        try:
            data = json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Refusal(400, "expected texts of whole characters; found half of a surrogate pair.") from None
        self.rfile = io.BytesIO(data)
        self.headers.replace_header("Content-Length", str(len(data)))
        super().do_POST()

    def _read_body(self) -> Any:
        length = self.headers.get("Content-Length")
        if length is None:
            raise Refusal(411, "expected a Content-Length header; found none.")
        # 18 digits: Python refuses to read numbers of thousands.
        if not length.isascii() or not length.isdigit() or len(length) > 18:
            raise Refusal(400, f"expected Content-Length to be a number; found {length[:40]!r}.")
        limit = self.options.max_body_bytes
        if int(length) > limit:
            self._refuse(Refusal(413, f"expected a body of at most {limit} bytes; found {length}. --max-body-mb raises it."))
            self._drain()
            raise _Gone
        raw = self.rfile.read(int(length))
        if len(raw) < int(length):
            raise _Gone
        try:
            return json.loads(raw.decode(), parse_constant=_no_constant, parse_float=_finite(float), parse_int=_finite(int))
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"expected JSON in UTF-8; {error}.") from None

    def _drain(self) -> None:
        """Read on for a while: a client that is still sending would otherwise see a reset instead of the answer."""
        self.connection.settimeout(2)
        left = 16 * self.options.max_body_bytes
        while left > 0 and (piece := self.rfile.read1(1 << 16)):
            left -= len(piece)

    def _checked(self, body: Any) -> dict[str, Any]:
        """The body without nulls and with what mlx-lm's handler expects.

        Raises:
          Refusal: names the field that is wrong, unknown, or asks for what cannot be done.
        """
        if not isinstance(body, dict):
            raise Refusal(400, f"expected a JSON object; found {type(body).__name__}.")
        chat = self.path in _CHAT
        body = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
        for name, value in list(body.items()):
            if name in _ONLY:
                if type(value) is not type(_ONLY[name]) or value != _ONLY[name]:
                    expected = "it left out" if _ONLY[name] is None else f"{name} = {json.dumps(_ONLY[name])}"
                    raise Refusal(400, f"expected {expected}; this server cannot do {name} = {_shown(value)}.")
                del body[name]
            elif name not in _KNOWN:
                raise Refusal(400, f"expected known fields only; found {name!r}.")
        self._check_model(body.get("model", "default_model"))
        if body.get("draft_model", "default_model") not in ("default_model", self.provider.draft_name):
            raise Refusal(400, f"expected draft_model {self.provider.draft_name!r} or none; found {_shown(body['draft_model'])}.")
        for name in _OF_CHATS if not chat else _OF_TEXTS:
            if name in body:
                raise Refusal(400, f"expected no {name} at {self.path}; found {_shown(body[name])}.")
        self._check_drafts(body.get("num_draft_tokens"))
        stop = body.get("stop", [])
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(word, str) and word for word in stop):
            raise Refusal(400, f"expected stop to be a text or a list of texts, none of them empty; found {_shown(stop)}.")
        # They are looked for behind every token.
        if len(stop) > _MOST_STOPS or any(len(word) > _LONGEST_STOP for word in stop):
            found = f"{len(stop)}, the longest of {max(map(len, stop))}"
            raise Refusal(400, f"expected at most {_MOST_STOPS} stop texts of at most {_LONGEST_STOP} letters; found {found}.")
        body["stop"] = stop
        options = body.get("stream_options", {})
        if not isinstance(options, dict) or options.keys() - _STREAM or not all(type(v) is bool for v in options.values()):
            raise Refusal(400, f"expected stream_options to hold include_usage, true or false; found {_shown(options)}.")
        if options.get("include_usage") and not body.get("stream"):
            raise Refusal(400, "expected stream = true with stream_options; an answer in one piece always tells its usage.")
        self._check_bias(body.get("logit_bias"))
        for name in _SIZES:
            if type(body.get(name)) in (int, float) and abs(body[name]) > _SIZES[name]:
                raise Refusal(400, f"expected {name} of at most {_SIZES[name]:g} in size; found {_shown(body[name])}.")
        if chat:
            _check_messages(body.get("messages"))
            self._check_tools(body)
            self._check_template(body)
        else:
            _check_prompt(body)
            # OpenAI's old form: how many alternatives to report.
            count = body.get("logprobs")
            if type(count) is int:
                if not 0 <= count <= _MOST_TOP:
                    raise Refusal(400, f"expected logprobs from 0 to {_MOST_TOP}; found {count}.")
                body["logprobs"], body["top_logprobs"] = True, count
        if body.get("top_logprobs") == -1:
            # To mlx-lm's handler: none.
            raise Refusal(400, f"expected top_logprobs from 0 to {_MOST_TOP}; found -1.")
        for name in ("xtc_probability", "xtc_threshold"):
            if type(body.get(name)) is int:
                # JSON does not tell 1 from 1.0, mlx-lm's handler does.
                body[name] = float(body[name])
        return body

    def _check_bias(self, biases: Any) -> None:
        """Raises: Refusal for ids beyond the vocabulary and what is no bias; mlx-lm's handler refuses what is no object."""
        for token, bias in biases.items() if isinstance(biases, dict) else ():
            if not (token.isascii() and token.isdigit() and len(token) < 19) or int(token) >= self.provider.vocabulary:
                raise Refusal(
                    400, f"expected logit_bias for token ids 0 to {self.provider.vocabulary - 1}; found {_shown(token)}."
                )
            if type(bias) not in (int, float) or abs(bias) > _LARGEST:
                raise Refusal(400, f"expected numbers of at most {_LARGEST:g} in size as logit_bias; found {_shown(bias)}.")

    def _check_drafts(self, count: Any) -> None:
        """Raises: Refusal unless so many drafted tokens are possible; mlx-lm's handler looks at their type."""
        if count is None:
            return
        drafter = self.provider.draft_model
        if drafter is None:
            raise Refusal(400, "expected a drafter for num_draft_tokens; this server runs without one.")
        if type(count) is int and count >= (most := largest_block(drafter)):
            raise Refusal(400, f"expected num_draft_tokens of at most {most - 1}; found {count}.")

    def _check_template(self, body: dict[str, Any]) -> None:
        """Raises: Refusal for arguments that this tokenizer's way of writing messages has no use for."""
        templated = self.provider.tokenizer.has_chat_template
        name, other = ("role_mapping", "chat_template_kwargs")[:: 1 if templated else -1]
        if name in body:
            what = "has a chat template" if templated else "has no chat template"
            raise Refusal(400, f"expected no {name}; {self.provider.name} {what}.")
        value = body.get(other, {})
        if templated and isinstance(value, dict) and (own := sorted(value.keys() & _TEMPLATES_OWN)):
            # Another template may run for ever, and others wait; the rest would be no prompt.
            raise Refusal(400, f"expected variables of the chat template in chat_template_kwargs; found {own[0]!r}.")
        if not isinstance(value, dict) or other == "role_mapping" and not all(isinstance(v, str) for v in value.values()):
            raise Refusal(400, f"expected {other} to be an object{' of texts' * (not templated)}; found {_shown(value)}.")

    def _check_tools(self, body: dict[str, Any]) -> None:
        choice, tools = body.pop("tool_choice", "auto"), body.get("tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise Refusal(400, f"expected tools to be a list of objects; found {_shown(tools)}.")
        if choice == "none":
            body.pop("tools", None)
        elif choice != "auto":
            raise Refusal(400, f"expected tool_choice auto or none; this server cannot force {_shown(choice)}.")
        elif tools and not self.provider.tokenizer.has_tool_calling:
            raise Refusal(400, f"expected no tools; mlx-lm knows no tool calls for the chat template of {self.provider.name}.")

    def _validate(self, name: str, expected_type: Any, *args: Any, **kwargs: Any) -> None:
        # True and False are whole numbers for Python.
        if expected_type is not bool and isinstance(getattr(self, name), bool):
            raise ValueError(f"{name} must be a number")
        super()._validate(name, expected_type, *args, **kwargs)

    def validate_model_parameters(self) -> None:
        """mlx-lm's checks; what they find becomes a refusal."""
        try:
            super().validate_model_parameters()
        except (ValueError, TypeError) as error:
            raise Refusal(400, f"{error}.") from None
        if self.top_k >= self.provider.vocabulary:
            raise Refusal(400, f"expected top_k below {self.provider.vocabulary}; found {self.top_k}.")
        if self.xtc_threshold > 0.5:
            raise Refusal(400, f"expected xtc_threshold of at most 0.5; found {self.xtc_threshold}.")
        # Answers name what made them.
        self.requested_model = self.provider.name
        if "num_draft_tokens" not in self.body:
            self.num_draft_tokens = None

    def handle_chat_completions(self) -> Request:
        self.request_id, self.object_type = (
            f"chatcmpl-{uuid.uuid4()}",
            "chat.completion.chunk" if self.stream else "chat.completion",
        )
        body = self.body
        return Request("chat", "", body["messages"], body.get("tools"), body.get("role_mapping"), self._gone)

    def handle_text_completions(self) -> Request:
        self.request_id, self.object_type = f"cmpl-{uuid.uuid4()}", "text_completion"
        return Request("text", self.body["prompt"], [], None, None, self._gone)

    def _gone(self) -> bool:
        """Whether the client has closed its side; asked by the generating thread once a token.

        A client that closes only the half it writes to counts as gone too: HTTP clients do not.
        """
        try:
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def handle_completion(self, request: Request, stop_words: list[str]) -> None:
        """Answer one request: queue it, then write its tokens as one object or as events."""
        args = self._arguments(stop_words)
        try:
            ctx, tokens = self.response_generator.generate(request, args, self._keep_alive)
        except RuntimeError as error:
            raise Refusal(503, f"{error}.") from None
        try:
            self._answer(ctx, tokens, request, args)
        finally:
            ctx.stop()

    def _arguments(self, stop_words: list[str]) -> GenerationArguments:
        return GenerationArguments(
            model=ModelDescription("default_model", "default_model", None),
            sampling=SamplingArguments(
                self.temperature, self.top_p, self.top_k, self.min_p, self.xtc_probability, self.xtc_threshold
            ),
            logits=LogitsProcessorArguments(
                self.logit_bias,
                self.repetition_penalty,
                self.repetition_context_size,
                self.presence_penalty,
                self.presence_context_size,
                self.frequency_penalty,
                self.frequency_context_size,
            ),
            stop_words=stop_words,
            max_tokens=self.max_tokens,
            num_draft_tokens=self.num_draft_tokens,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            seed=self.seed,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _keep_alive(self, done: int, total: int) -> None:
        """While a long prompt runs, a stream gets comments; they also find a broken connection."""
        if self.stream and done < total:
            if not self.started:
                self._set_stream_headers(200)
                self.end_headers()
            self.wfile.write(f": prompt {done}/{total}\n\n".encode())
            self.wfile.flush()

    def _answer(self, ctx: GenerationContext, tokens: Iterator[Token], request: Request, args: GenerationArguments) -> None:
        format_calls = ToolCallFormatter(ctx.tool_parser, request.tools, self.stream)
        state, kind = ctx.text_sm.make_state(ctx.initial_state), ctx.initial_state
        text, thinking, call, calls, called = "", "", "", [], False
        reason, count, accepted, verified, fresh, offset = "stop", 0, 0, 0, [], 0
        for token in tokens:
            count, accepted, verified = count + 1, accepted + token.from_draft, token.verified
            fresh.append(token)
            state, pieces = TextStateMachine.split(state, token.text)
            if token.finish_reason:
                reason = token.finish_reason
                state, rest, last = TextStateMachine.flush(state)
                # The empty piece behind it closes a call that the answer's end cut off.
                pieces += [(last, rest), ("normal", "")]
            for new, piece in pieces:
                if kind == "tool" and new != "tool":
                    made = format_calls([call]) if call else []
                    calls, called = calls + made, called or bool(made)
                    # A call that cannot be read is text.
                    text, call = text + ("" if made else call), ""
                kind = new
                if kind == "tool":
                    call += piece
                elif kind == "reasoning":
                    thinking += piece
                else:
                    text += piece
            if self.stream and not token.finish_reason and (text or calls or thinking):
                chunk = self.generate_response(text, None, tool_calls=calls, reasoning_text=thinking)
                self._event(self._with_logprobs(chunk, fresh, args, offset))
                offset += len(text)
                text, thinking, calls, fresh = "", "", [], []
        if reason == "stop" and called:
            reason = "tool_calls"
        usage = _usage(len(ctx.prompt), count, ctx.prompt_cache_count, accepted, verified)
        body = self.generate_response(
            text, reason, len(ctx.prompt), count, ctx.prompt_cache_count, tool_calls=calls, reasoning_text=thinking
        )
        body = self._with_logprobs(body, fresh, args, offset)
        if not self.stream:
            self._json({**body, "usage": usage})
            return
        self._event(body)
        if (self.stream_options or {}).get("include_usage"):
            self._event({**body, "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.wfile.flush()

    def _with_logprobs(self, body: dict[str, Any], tokens: list[Token], args: GenerationArguments, offset: int) -> dict[str, Any]:
        """Add what OpenAI's two forms say about these tokens, if it was asked for."""
        if not (args.logprobs or args.top_logprobs > 0):
            return body
        tokenizer = self.provider.tokenizer
        if self.object_type == "text_completion":
            lengths = [len(token.text) for token in tokens]
            body["choices"][0]["logprobs"] = {
                "tokens": [_named(tokenizer, token.token)[0] for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": [_by_text(tokenizer, token.top) for token in tokens],
                "text_offset": [offset + sum(lengths[:i]) for i in range(len(tokens))],
            }
            return body

        def entry(i: int, value: float) -> dict[str, Any]:
            text, data = _named(tokenizer, i)
            return {"id": i, "token": text, "bytes": None if data is None else list(data), "logprob": value}

        body["choices"][0]["logprobs"] = {
            "content": [
                {**entry(token.token, token.logprob), "top_logprobs": [entry(*pair) for pair in token.top]} for token in tokens
            ]
        }
        return body


class Server(ThreadingHTTPServer):
    """A thread a connection; connections beyond the generating thread's queue wait in theirs."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, generator: Generator):
        options = generator.cli_args
        info = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = info[0]
        self.generator, self.fingerprint = generator, get_system_fingerprint()
        super().__init__(info[4], Handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        self.RequestHandlerClass(self.generator, request, client_address, self, system_fingerprint=self.fingerprint)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.info("connection from %s ended early", client_address, exc_info=True)


def serve(options: Options, open_pair: Callable[[], tuple[str, str | None, Any, Any, Any]], say: Callable[[str], None]) -> None:
    """Load the pair and serve it until SIGINT or SIGTERM.

    Args:
      open_pair: gives names of target and drafter, then target, tokenizer and drafter; runs in the generating thread.
      say: told in a sentence when the server listens.
    Raises:
      OSError: the address cannot be bound. What `open_pair` raises.
    """
    provider = Provider(options, open_pair)
    generator = Generator(provider, PrefixCache(options.prompt_cache_size, options.prompt_cache_bytes or 1 << 63))
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        while not provider.ready.wait(0.2):
            pass
        if provider.fault is not None:
            raise provider.fault
        with Server(generator) as server:
            host, port = server.server_address[:2]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if options.api_key is None and host not in ("127.0.0.1", "::1"):
                say(f"Anyone who reaches {host} can use this server: --api-key asks for a key.")
            how = f"drafter {provider.draft_name}" if provider.draft_name else "plain decoding"
            say(f"Serving {provider.name} ({how}) at http://{address}/v1")
            server.serve_forever()
    except KeyboardInterrupt:
        say("Stopped.")
    finally:
        signal.signal(signal.SIGTERM, before)
        generator.stop_and_join()


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(kind: type) -> Callable[[str], Any]:
    """A reader of numbers that a float can hold."""

    def read(text: str) -> Any:
        if not isfinite(float(text)):
            raise ValueError(f"{_shown(text)} is too large a number")
        return kind(text)

    return read


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_messages(messages: Any) -> None:
    """Raises: Refusal unless they are texts with roles."""
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, f"expected messages to be a list with at least one message; found {_shown(messages)}.")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refusal(400, f"expected every message to be an object with a role; found {_shown(message)}.")
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                kind = part.get("type") if isinstance(part, dict) else None
                if kind != "text" or not isinstance(part.get("text"), str):
                    raise Refusal(400, f"expected text only; this server cannot read a part of type {_shown(kind)}.")
        elif content is not None and not isinstance(content, str):
            raise Refusal(400, f"expected content to be a text or a list of parts; found {_shown(content)}.")


def _check_prompt(body: dict[str, Any]) -> None:
    """Raises: Refusal unless there is one text; a list of one is taken out of it."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = body["prompt"] = prompt[0]
    if not isinstance(prompt, str):
        raise Refusal(400, f"expected prompt to be one text; found {_shown(prompt)}.")


def _sampler(sampling: SamplingArguments, tokenizer: Any) -> Any:
    """mlx-lm's sampler; None is greedy."""
    if sampling.temperature < 1e-5:
        return None
    return make_sampler(
        sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        xtc_probability=sampling.xtc_probability,
        xtc_threshold=sampling.xtc_threshold,
        xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
    )


def _top(row: mx.array, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest ids of a row [V] with their log-probabilities, the likeliest first."""
    if count <= 0:
        return []
    ids = mx.argpartition(-row, kth=count - 1)[:count]
    return sorted(zip(ids.tolist(), row[ids].tolist(), strict=True), key=lambda pair: -pair[1])


def _named(tokenizer: Any, token: int) -> tuple[str, bytes | None]:
    """A token's text and bytes; one that is part of a character only has its bytes for text, as OpenAI writes them."""
    data = token_bytes(tokenizer, token)
    if data is None:
        return tokenizer.decode([token]), None
    try:
        return data.decode(), data
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


def _by_text(tokenizer: Any, top: list[tuple[int, float]]) -> dict[str, float]:
    """OpenAI's old form: log-probabilities by text. Of two tokens with one text the likelier has it, the other its id."""
    named: dict[str, float] = {}
    for token, value in top:
        text = _named(tokenizer, token)[0]
        named[text if text not in named else f"{text} (token {token})"] = value
    return named


def _usage(prompt: int, completion: int, cached: int, accepted: int, verified: int) -> dict[str, Any]:
    """OpenAI's counts; accepted and rejected are the drafter's."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": max(cached, 0)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(verified - accepted, 0),
        },
    }
