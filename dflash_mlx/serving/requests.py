"""Reading OpenAI's requests: what is asked for, and a sentence for what cannot be done.

Knows the fields of a body and what the loaded pair can do. Knows no sockets and no generation.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from ..drafter_checks import largest_block
from ..errors import DFlashError, GenerationError
from ..sampling import SamplingSettings
from ..sampling_settings import check_max_tokens
from .channels import has_tool_calls
from .messages import Prompt, read_messages, render_chat, render_text, shown

if TYPE_CHECKING:
    from .engine import LoadedPair, Options


class RequestError(DFlashError):
    """A request that is answered with an error: a sentence, the status, OpenAI's code word, headers."""

    def __init__(
        self, problem: str, remedy: str = "", status: int = 400, code: str | None = None, headers: dict[str, str] | None = None
    ):
        super().__init__(problem, remedy)
        self.status, self.code, self.headers = status, code, headers


class ClientDisconnected(Exception):
    """The client has left: there is nobody to answer."""


@dataclass
class CompletionRequest:
    """One request, read and checked. chat: messages come and an answer goes; else a text is continued."""

    chat: bool
    prompt: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_args: dict[str, Any]
    role_mapping: dict[str, str]
    sampling: SamplingSettings
    logit_bias: dict[int, float]
    max_tokens: int
    block_size: int | None
    stop: list[str]
    stream: bool
    include_usage: bool
    # top_logprobs: the likeliest tokens to name beside each.
    logprobs: bool
    top_logprobs: int

    def render(self, tokenizer: Any) -> Prompt:
        """Raises: DFlashError where the chat template refuses the messages."""
        if self.chat:
            return render_chat(tokenizer, self.messages, self.tools, self.template_args, self.role_mapping)
        return render_text(tokenizer, self.prompt)


# Fields that nobody's answer depends on.
IGNORED = {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"}
# Fields of OpenAI's that ask for what this server does not do, unless they hold this value.
NEUTRAL = {
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
# The settings of `SamplingSettings`, under their names in a request.
SAMPLING = {{"temp": "temperature"}.get(one.name, one.name): one.name for one in fields(SamplingSettings)}
# Fields of both kinds of completions, then those that only chats, or only texts, have.
COMMON = {
    *("model", "draft_model", "stream", "stream_options", "stop", "max_tokens", "max_completion_tokens"),
    *("num_draft_tokens", "logit_bias", "logprobs", "top_logprobs"),
    *SAMPLING,
}
OF_CHATS = ("messages", "tools", "tool_choice", "chat_template_kwargs", "role_mapping")
OF_TEXTS = ("prompt",)
# What transformers' function takes beside a template's variables.
_TEMPLATES_OWN = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents", "kwargs"}
_STREAM_OPTIONS = {"include_usage", "include_obfuscation"}
_MOST_STOPS, _LONGEST_STOP = 64, 1000
# Larger numbers have no further effect, and MLX cannot read all of them.
_LARGEST_BIAS = 1_000_000
_MOST_TOP = 20


def parse_body(raw: bytes) -> Any:
    """Raises: RequestError unless it is JSON in UTF-8 of whole characters and of numbers that a float can hold."""
    try:
        body = json.loads(raw.decode(), parse_constant=_no_constant, parse_float=_finite(float), parse_int=_finite(int))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON in UTF-8: {error}", "Send one JSON object") from None
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("a text has half of a surrogate pair", "Send whole characters") from None
    return body


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(kind: type) -> Callable[[str], Any]:
    """A reader of numbers that a float can hold."""

    def read(text: str) -> Any:
        if not isfinite(float(text)):
            raise ValueError(f"{shown(text)} is too large a number")
        return kind(text)

    return read


def read_request(body: Any, chat: bool, pair: LoadedPair, options: Options) -> CompletionRequest:
    """What a body asks for; what it leaves out is as the server was started.

    Raises:
      RequestError: names the field that is wrong, unknown, or asks for what cannot be done.
    """
    body = _known_fields(body, chat)
    check_model(body.get("model", "default_model"), pair)
    _check_draft_model(body.get("draft_model", "default_model"), pair)
    stream = _flag(body, "stream")
    count = _logprobs(body, chat)
    try:
        messages = read_messages(body.get("messages"), pair.tokenizer, _role_mapping(body, pair)) if chat else []
    except RequestError:
        raise
    except DFlashError as error:
        raise RequestError(error.problem, error.remedy) from None
    return CompletionRequest(
        chat=chat,
        prompt="" if chat else _prompt(body),
        messages=messages,
        tools=_tools(body, pair) if chat else [],
        template_args={**options.chat_template_args, **_template_args(body, pair)} if chat else {},
        role_mapping=_role_mapping(body, pair) if chat else {},
        sampling=_sampling(body, pair, options),
        logit_bias=_logit_bias(body, pair),
        max_tokens=_max_tokens(body, options),
        block_size=_block_size(body, pair, options),
        stop=_stop(body),
        stream=stream,
        include_usage=_include_usage(body, stream),
        logprobs=count is not None,
        top_logprobs=count or 0,
    )


def _known_fields(body: Any, chat: bool) -> dict[str, Any]:
    """The body without nulls and without what nobody's answer depends on."""
    if not isinstance(body, dict):
        raise RequestError(f"the body is of type {type(body).__name__}; it must be a JSON object", "Send an object")
    body = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name, value in list(body.items()):
        if name in NEUTRAL:
            wanted = NEUTRAL[name]
            if type(value) is not type(wanted) or value != wanted:
                remedy = "Leave it out" if wanted is None else f"Leave it out, or send {shown(wanted)}"
                raise RequestError(f"{name} is {shown(value)}; this server cannot do that", remedy)
            del body[name]
        elif name not in COMMON and name not in (*OF_CHATS, *OF_TEXTS):
            raise RequestError(f"the field {name!r} is unknown to this server", "Leave it out")
    kind = "chat" if chat else "text"
    for name in OF_TEXTS if chat else OF_CHATS:
        if name in body:
            raise RequestError(f"{name} is {shown(body[name])}; {kind} completions have no such field", "Leave it out")
    return body


def check_model(name: Any, pair: LoadedPair) -> None:
    """Raises: RequestError for any name but the served one's."""
    if name not in (pair.name, "default_model"):
        problem = f"the model {name!r} is not served here; this server has {pair.name!r}"
        raise RequestError(problem, "Ask for that, or leave model out", 404, "model_not_found")


def _check_draft_model(name: Any, pair: LoadedPair) -> None:
    if name not in ("default_model", pair.draft_name):
        has = f"this server has {pair.draft_name!r}" if pair.draft_name else "this server runs without a drafter"
        raise RequestError(f"draft_model is {shown(name)}; {has}", "Leave it out")


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {shown(value)}; it must be true or false")
    return value


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options", {})
    flags = isinstance(options, dict) and all(type(value) is bool for value in options.values())
    if not flags or options.keys() - _STREAM_OPTIONS:
        raise RequestError(f"stream_options is {shown(options)}; it must hold include_usage, true or false")
    if options.get("include_usage") and not stream:
        remedy = "Leave it out: an answer in one piece always tells its usage"
        raise RequestError("stream_options came without stream = true", remedy)
    return options.get("include_usage", False)


def _prompt(body: Mapping[str, Any]) -> str:
    given = body.get("prompt")
    prompt = given[0] if isinstance(given, list) and len(given) == 1 else given
    if not isinstance(prompt, str):
        raise RequestError(f"prompt is {shown(given)}; it must be one text", "Send one request for each prompt")
    return prompt


def _sampling(body: Mapping[str, Any], pair: LoadedPair, options: Options) -> SamplingSettings:
    asked = {name: body[field] for field, name in SAMPLING.items() if field in body}
    if asked.get("temp") != 0:
        asked = options.recommended | asked
    try:
        settings = replace(options.sampling, **asked)
        settings.check_vocabulary(pair.vocabulary)
    except GenerationError as error:
        # In a request the temperature has its whole name.
        problem = error.problem.replace("temp is", "temperature is", 1) if error.problem.startswith("temp is") else error.problem
        raise RequestError(problem, error.remedy) from None
    return settings


def _max_tokens(body: Mapping[str, Any], options: Options) -> int:
    name = next((name for name in ("max_completion_tokens", "max_tokens") if name in body), "max_tokens")
    value = body.get(name, options.max_tokens)
    try:
        check_max_tokens(value, name)
    except GenerationError as error:
        raise RequestError(error.problem, error.remedy) from None
    return value


def _stop(body: Mapping[str, Any]) -> list[str]:
    given = body.get("stop", [])
    stop = [given] if isinstance(given, str) else given
    if not isinstance(stop, list) or not all(isinstance(word, str) and word for word in stop):
        raise RequestError(f"stop is {shown(given)}; it must be a text or a list of texts, none of them empty")
    # They are looked for behind every token.
    if len(stop) > _MOST_STOPS or any(len(word) > _LONGEST_STOP for word in stop):
        found = f"stop has {len(stop)} texts, the longest of {max(map(len, stop))} letters"
        raise RequestError(f"{found}; at most {_MOST_STOPS} texts of {_LONGEST_STOP} letters are looked for", "Send fewer")
    return stop


def _logprobs(body: Mapping[str, Any], chat: bool) -> int | None:
    """How many of the likeliest tokens to name beside each; None: no log-probabilities at all."""
    given, top = body.get("logprobs", False), body.get("top_logprobs")
    if not chat and type(given) is int:
        # OpenAI's old form: the number itself.
        given, top = True, given if top is None else top
        name = "logprobs"
    else:
        name = "top_logprobs"
    if not isinstance(given, bool):
        what = "true or false" if chat else f"a whole number from 0 to {_MOST_TOP}"
        raise RequestError(f"logprobs is {shown(given)}; it must be {what}")
    if top is not None and (type(top) is not int or not 0 <= top <= _MOST_TOP):
        raise RequestError(f"{name} is {shown(top)}; it must be a whole number from 0 to {_MOST_TOP}")
    return (top or 0) if given or top else None


def _logit_bias(body: Mapping[str, Any], pair: LoadedPair) -> dict[int, float]:
    biases = body.get("logit_bias", {})
    if not isinstance(biases, dict):
        raise RequestError(f"logit_bias is {shown(biases)}; it must be an object of token ids and numbers")
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) < 19) or int(token) >= pair.vocabulary:
            raise RequestError(f"logit_bias names {shown(token)}; token ids are 0 to {pair.vocabulary - 1} here")
        if type(bias) not in (int, float) or abs(bias) > _LARGEST_BIAS:
            raise RequestError(f"a logit_bias is {shown(bias)}; it must be a number of at most {_LARGEST_BIAS} in size")
    return {int(token): float(bias) for token, bias in biases.items()}


def _block_size(body: Mapping[str, Any], pair: LoadedPair, options: Options) -> int | None:
    """The anchor and so many drafted tokens; None leaves the number to each round."""
    count = body.get("num_draft_tokens")
    if count is None:
        return options.block_size if pair.drafter is not None else None
    if pair.drafter is None:
        raise RequestError(f"num_draft_tokens is {shown(count)}; this server runs without a drafter", "Leave it out")
    most = largest_block(pair.drafter) - 1
    if type(count) is not int or not 0 <= count <= most:
        raise RequestError(f"num_draft_tokens is {shown(count)}; it must be a whole number from 0 to {most}")
    return count + 1


def _role_mapping(body: Mapping[str, Any], pair: LoadedPair) -> dict[str, str]:
    if "role_mapping" not in body:
        return {}
    mapping = body["role_mapping"]
    if pair.tokenizer.has_chat_template:
        raise RequestError(f"role_mapping is given; {pair.name} has a chat template", "Leave it out")
    if not isinstance(mapping, dict) or not all(isinstance(text, str) for text in mapping.values()):
        raise RequestError(f"role_mapping is {shown(mapping)}; it must be an object of texts")
    return mapping


def _template_args(body: Mapping[str, Any], pair: LoadedPair) -> dict[str, Any]:
    given = body.get("chat_template_kwargs")
    if given is None:
        return {}
    if not pair.tokenizer.has_chat_template:
        raise RequestError(f"chat_template_kwargs is given; {pair.name} has no chat template", "Leave it out")
    if not isinstance(given, dict):
        raise RequestError(f"chat_template_kwargs is {shown(given)}; it must be an object")
    if own := sorted(given.keys() & _TEMPLATES_OWN):
        # Another template may run for ever, and others wait; the rest would be no prompt.
        raise RequestError(f"chat_template_kwargs has {own[0]!r}; it may hold variables of the chat template only")
    return given


def _tools(body: Mapping[str, Any], pair: LoadedPair) -> list[dict[str, Any]]:
    """The tools that may be called; [] where the client offers or wants none."""
    choice, tools = body.get("tool_choice", "auto"), body.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError(f"tools is {shown(tools)}; it must be a list of objects")
    if choice == "none":
        return []
    if choice != "auto":
        raise RequestError(f"tool_choice is {shown(choice)}; this server cannot force calls", 'Send "auto" or "none"')
    if tools and not has_tool_calls(pair.tokenizer):
        problem = f"tools are offered; how the chat template of {pair.name} writes calls is not known"
        raise RequestError(problem, "Leave tools out, or serve another target")
    return tools
