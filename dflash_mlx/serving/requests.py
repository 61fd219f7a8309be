"""Reads requests of all APIs into one form, and refuses with a sentence what cannot be done.

Knows the values of fields and what the loaded pair can do; `fields` lists the fields. Knows no sockets and no generation.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from ..chat_template import NO_VARIABLES, template_variables
from ..constraint import ConstraintError, Grammar, UnsupportedError
from ..errors import DFlashError, GenerationError
from ..sampling import SamplingSettings
from ..sampling_settings import check_max_tokens
from .answer_grammar import Demand, grammar_of, read_answer, read_tool
from .channels import end_of_thinking, has_reasoning, has_tool_calls
from .errors import RequestError, shown
from .fields import MESSAGES, RESPONSES, SAMPLING, TEXT, note_ignored, sort_fields
from .messages import Prompt, read_messages, render_chat, render_text
from .translate import OTHER_NAMES, of_messages, of_responses

if TYPE_CHECKING:
    from .engine import LoadedPair, Options


@dataclass
class CompletionRequest:
    """One request of any API, read and checked.

    api: a name of `fields.APIS`. prompts: of a text completion, each a text or token ids; one answer for each.
    n: answers to each prompt. continues: the last message begins the answer. thinking_budget: tokens of it, None is no limit.
    demand: what constrains the answer. ignored: names of fields that have no effect. body: the fields that were read.
    """

    api: str
    prompts: list[str | list[int]]
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
    # top_logprobs: how many of the likeliest tokens to report for each token.
    logprobs: bool
    top_logprobs: int
    show_drafts: bool = False
    n: int = 1
    continues: bool = False
    thinking_budget: int | None = None
    demand: Demand = Demand()
    ignored: list[str] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        """Whether it has messages, which are answered. Otherwise it has texts, which are continued."""
        return self.api != TEXT

    def render(self, tokenizer: Any) -> list[Prompt]:
        """One prompt per answer; the answers to one prompt are side by side.

        Raises:
          DFlashError: the chat template refuses the messages.
        """
        if not self.chat:
            found = [render_text(tokenizer, prompt) for prompt in self.prompts]
        else:
            variables = self.template_args, self.role_mapping, self.continues
            found = [render_chat(tokenizer, self.messages, self.tools, *variables)]
        return [prompt for prompt in found for _ in range(self.n)]

    def sampling_of(self, index: int) -> SamplingSettings:
        """Those of answer `index`. With a seed, the first answer to a prompt has this seed, the others the seeds after it."""
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=(seed + index % self.n) % (1 << 32))

    def grammar(self, pair: LoadedPair, prompt: Prompt) -> Grammar | None:
        """What constrains the answer to a prompt; None: nothing. Raises: ConstraintError if it cannot be enforced."""
        return grammar_of(self.demand, pair.tokenizer, pair.name, prompt.before if self.chat else None)


_STREAM_OPTIONS = {"include_usage", "include_obfuscation"}
# Larger numbers have no further effect, and MLX cannot read all of them.
_LARGEST_BIAS = 1_000_000
_MOST_TOP = 20
_MOST_PROMPTS = 64
_MOST_ANSWERS = 16
# OpenAI's names of efforts, and the nearest ones that chat templates know.
_EFFORTS = {"none": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def parse_body(raw: bytes) -> Any:
    """Raises: RequestError unless it is JSON in UTF-8 of whole characters and of numbers that a float can hold."""
    try:
        body = json.loads(
            raw.decode("utf-8-sig"), parse_constant=_no_constant, parse_float=_finite(float), parse_int=_finite(int)
        )
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON in UTF-8: {error}", "Send one JSON object") from None
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


def read_request(body: Any, api: str, pair: LoadedPair, options: Options, *kept: Callable[[Any], Any]) -> CompletionRequest:
    """A body as a request. Fields that it leaves out have the server's defaults.

    kept: what `of_responses` asks for of earlier responses.
    Raises:
      RequestError: names the field that is wrong or cannot be honoured.
    """
    own, ignored = sort_fields(body, api)
    try:
        body = (
            of_responses(own, *(kept or (lambda name: [],))) if api == RESPONSES else of_messages(own) if api == MESSAGES else own
        )
        return _read(body, api, pair, options, ignored, own)
    except DFlashError as error:
        # The field has another name in this API.
        first, _, rest = error.problem.partition(" ")
        problem = f"{OTHER_NAMES[api].get(first, first)} {rest}"
        if isinstance(error, RequestError):
            raise RequestError(problem, error.remedy, error.status, error.code, error.headers) from None
        raise RequestError(problem, error.remedy) from None


def _read(
    body: dict[str, Any], api: str, pair: LoadedPair, options: Options, ignored: list[str], own: dict[str, Any]
) -> CompletionRequest:
    check_model(body.get("model", "default_model"), pair, options)
    _check_draft_model(body.get("draft_model", "default_model"), pair)
    stream, chat = _flag(body, "stream"), api != TEXT
    count = _logprobs(body, chat)
    messages, tools, variables, demand = [], [], {}, read_answer(body)
    if chat:
        kinds: list[str] = []
        messages = read_messages(body.get("messages"), pair.tokenizer, _role_mapping(body, pair), left_out=kinds)
        _ignore(ignored, api, *(f"messages: {kind[:40]}" for kind in dict.fromkeys(kinds)))
        tools = _tools(body, pair, api, ignored)
        demand = _held_calls(demand, body, tools, pair, api, ignored)
        asked = {**_template_args(body, pair), **_effort(body, pair, ignored)}
        variables = {**options.chat_template_args, **asked}
    # Only in Anthropic's API does the answer always continue a last message of the assistant.
    continues = api == MESSAGES and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    if continues and demand.holds:
        problem = "messages ends with one of the assistant; where an answer continues it, no format can be enforced"
        raise RequestError(problem, "Leave one of the two out")
    return CompletionRequest(
        api=api,
        prompts=[] if chat else _prompts(body, pair),
        messages=messages,
        tools=tools,
        template_args=variables,
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
        show_drafts=_flag(body, "show_drafts"),
        n=_count(body),
        continues=continues,
        demand=demand,
        thinking_budget=_thinking_budget(body, pair),
        ignored=ignored,
        body=own,
    )


def check_model(name: Any, pair: LoadedPair, options: Options) -> None:
    """Raises: RequestError for a name that is not the served target's."""
    if isinstance(name, str) and (options.any_model_name or name in pair.names):
        return
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


def _prompts(body: Mapping[str, Any], pair: LoadedPair) -> list[str | list[int]]:
    """A text or token ids, or a list of them."""
    given = body.get("prompt")
    prompts = given if isinstance(given, list) and given and not _is_id(given[0], pair) else [given]
    if not all(isinstance(one, str) or isinstance(one, list) and one and all(_is_id(i, pair) for i in one) for one in prompts):
        problem = f"prompt is {shown(given)}; it must be text, token ids from 0 to {pair.vocabulary - 1}, or a list of these"
        raise RequestError(problem)
    if len(prompts) > _MOST_PROMPTS:
        raise RequestError(f"prompt has {len(prompts)} prompts; at most {_MOST_PROMPTS} are taken", "Send several requests")
    return prompts


def _count(body: Mapping[str, Any]) -> int:
    """How many answers to each prompt."""
    n = body.get("n", 1)
    if type(n) is not int or not 1 <= n <= _MOST_ANSWERS:
        raise RequestError(f"n is {shown(n)}; it must be a whole number from 1 to {_MOST_ANSWERS}")
    return n


def _is_id(value: Any, pair: LoadedPair) -> bool:
    return type(value) is int and 0 <= value < pair.vocabulary


def fold_seed(seed: Any) -> int:
    """A seed of up to 64 bits as one of 32, by which noise is keyed. -1: a random one."""
    if type(seed) is not int or not -(1 << 63) <= seed < 1 << 64:
        raise RequestError(f"seed is {shown(seed)}; it must be a whole number of at most 64 bits, or -1 for a random one")
    if 0 <= seed < 1 << 32:
        return seed
    if seed == -1:
        return secrets.randbits(32)
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4])


def _effort(body: Mapping[str, Any], pair: LoadedPair, ignored: list[str]) -> dict[str, Any]:
    """Variables of the chat template for `reasoning_effort` and for Anthropic's `thinking`."""
    effort, thinks = body.get("reasoning_effort"), body.get("thinking")
    if effort is not None and (not isinstance(effort, str) or effort not in _EFFORTS):
        raise RequestError(f"reasoning_effort is {shown(effort)}; it must be one of {', '.join(_EFFORTS)}")
    if effort is None and thinks is None:
        return {}
    known = template_variables(pair.tokenizer)
    if effort is not None and (known is None or "reasoning_effort" in known):
        return {"reasoning_effort": _EFFORTS[effort]}
    if known is None or "enable_thinking" in known or has_reasoning(pair.tokenizer) and "thinking" not in known:
        return {"enable_thinking": effort != "none" if thinks is None else thinks}
    if "thinking" in known:
        return {"thinking": effort != "none" if thinks is None else thinks}
    ignored.append("thinking" if effort is None else "reasoning_effort")
    return {}


def _thinking_budget(body: Mapping[str, Any], pair: LoadedPair) -> int | None:
    budget = body.get("thinking_budget")
    if budget is None:
        return None
    if type(budget) is not int or budget < 1:
        raise RequestError(f"thinking.budget_tokens is {shown(budget)}; it must be a whole number of at least 1")
    return budget if end_of_thinking(pair.tokenizer) is not None else None


def _sampling(body: Mapping[str, Any], pair: LoadedPair, options: Options) -> SamplingSettings:
    asked = {name: body[field] for field, name in SAMPLING.items() if field in body}
    if "seed" in asked:
        asked["seed"] = fold_seed(asked["seed"])
    if asked.get("temp") != 0:
        asked = options.recommended | asked
    try:
        settings = replace(options.sampling, **asked)
        settings.check_vocabulary(pair.vocabulary)
    except GenerationError as error:
        problem = error.problem
        for field, name in SAMPLING.items():
            problem = _as_sent(problem, name, field, asked.get(name))
        raise RequestError(problem, error.remedy) from None
    return settings


def _as_sent(problem: str, name: str, field: str, value: Any) -> str:
    """What is wrong with a setting, by its name in a request and with its value in JSON."""
    found = f"{name} is {value!r}"
    return f"{field} is {shown(value)}{problem[len(found) :]}" if problem.startswith(found) else problem


def _max_tokens(body: Mapping[str, Any], options: Options) -> int:
    """The smaller of two limits; -1: no limit."""
    given = {name: body[name] for name in ("max_completion_tokens", "max_tokens") if name in body}
    for name, value in given.items():
        try:
            check_max_tokens(value, name)
        except GenerationError as error:
            raise RequestError(_as_sent(error.problem, name, name, value), error.remedy) from None
    return min(given.values(), key=lambda value: (value == -1, value), default=options.max_tokens)


def _stop(body: Mapping[str, Any]) -> list[str]:
    given = body.get("stop", [])
    stop = [given] if isinstance(given, str) else given
    if not isinstance(stop, list) or not all(isinstance(word, str) for word in stop):
        raise RequestError(f"stop is {shown(given)}; it must be text or a list of texts")
    return list(dict.fromkeys(word for word in stop if word))


def _logprobs(body: Mapping[str, Any], chat: bool) -> int | None:
    """How many of the likeliest tokens to report for each token; None: no log-probabilities."""
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
    """The block size that the body asks for (it counts the anchor); None: chosen in each round."""
    count = body.get("num_draft_tokens")
    if count is None:
        return options.block_size if pair.most_drafts is not None else None
    if pair.most_drafts is None:
        raise RequestError(f"num_draft_tokens is {shown(count)}; this server runs without a drafter", "Leave it out")
    most = pair.most_drafts
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
    if own := sorted(given.keys() & NO_VARIABLES):
        raise RequestError(f"chat_template_kwargs has {own[0]!r}; it may hold variables of the chat template only")
    return given


def _tools(body: Mapping[str, Any], pair: LoadedPair, api: str, ignored: list[str]) -> list[dict[str, Any]]:
    """The tools that may be called; [] if the client offers or allows none. Only functions: other kinds of tools are left out."""
    choice, tools = body.get("tool_choice", "auto"), body.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError(f"tools is {shown(tools)}; it must be a list of objects")
    if choice == "none":
        return []
    hosted = [str(tool["type"])[:40] for tool in tools if tool.get("type", "function") != "function"]
    tools = [tool for tool in tools if tool.get("type", "function") == "function"]
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name.strip():
            raise RequestError(f"tools has {shown(tool)}; every function must have a name", "Name it, or leave it out")
        schema = function.get("parameters")
        if not isinstance(schema, (dict, type(None))):
            raise RequestError(f"parameters of the tool {shown(name)} are {shown(schema)}; they must be a JSON schema")
    _ignore(ignored, api, *(f"tools: {name}" for name in dict.fromkeys(hosted)))
    if tools and not has_tool_calls(pair.tokenizer):
        problem = f"tools are offered; how the chat template of {pair.name} writes calls is not known"
        raise RequestError(problem, "Leave tools out, or serve another target")
    return tools


def _ignore(ignored: list[str], api: str, *names: str) -> None:
    note_ignored(list(names), api)
    ignored += names


def _held_calls(
    demand: Demand, body: Mapping[str, Any], tools: list[dict[str, Any]], pair: LoadedPair, api: str, ignored: list[str]
) -> Demand:
    """Add to a demand which calls may or must come, how many, and whose arguments must follow their schema.

    tools: changed if this target's calls cannot be enforced: tools that `tool_choice` rules out are removed from it.
    """
    one = "parallel_tool_calls" in body and not _flag(body, "parallel_tool_calls")
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]
    choice = body.get("tool_choice", "auto")
    names, forced = _chosen(choice, {str(function.get("name")) for function in functions})
    if forced and not functions:
        raise RequestError("tool_choice asks for a call, and tools offers no function", "Offer one")
    chosen = [function for function in functions if names is None or function.get("name") in names]
    many, some = not one and _named(choice) is None, len(chosen) < len(functions)
    calls = replace(demand, tools=tuple(map(read_tool, chosen)), forced=forced, many=many, some=some)
    if not calls.tools or not calls.holds:
        return calls
    try:
        grammar_of(calls, pair.tokenizer, pair.name).validate()
        return calls
    except ConstraintError as error:
        # Not an error: agents send `strict` by default, and could then offer no tool at all.
        asked = [
            name
            for name, sent in (("tools: strict", any(tool.strict for tool in calls.tools)), ("parallel_tool_calls", one))
            if sent
        ]
        if forced or demand.answer or not (asked or some) or not isinstance(error, UnsupportedError):
            field = "tool_choice" if forced else "tools" if asked[:1] == ["tools: strict"] else "parallel_tool_calls"
            raise RequestError(f"{field}: {error.problem}", error.remedy) from None
        _ignore(ignored, api, *asked)
        tools[:] = [tool for tool in tools if tool.get("function") in chosen]
        return replace(demand, tools=())


def _chosen(choice: Any, offered: set[str]) -> tuple[set[str] | None, bool]:
    """The functions that a `tool_choice` allows (None: all), and whether one must be called. Reads both of OpenAI's shapes."""
    if choice in ("auto", "none", "required"):
        return None, choice == "required"
    if (name := _named(choice)) is not None:
        names, forced = {name}, True
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        given = choice.get("allowed_tools", choice)
        mode, allowed = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (None, None)
        # Tools that OpenAI hosts are left out here too.
        names = (
            {_named(tool) for tool in allowed if not isinstance(tool, dict) or tool.get("type", "function") == "function"}
            if isinstance(allowed, list)
            else set()
        )
        if mode not in ("auto", "required") or not names or None in names:
            problem = (
                f'tool_choice is {shown(choice)}; allowed_tools must have mode "auto" or "required", and tools with functions'
            )
            raise RequestError(problem)
        forced = mode == "required"
    else:
        problem = f'tool_choice is {shown(choice)}; it must be "auto", "none", "required", allowed_tools, or name a function'
        raise RequestError(problem)
    if missing := sorted(names - offered):
        verb = "names" if forced and len(names) == 1 else "allows"
        raise RequestError(f"tool_choice {verb} {shown(missing[0])}, and tools offers no such function", "Offer it")
    return names, forced


def _named(choice: Any) -> str | None:
    """The name of the function in an object, in either of OpenAI's shapes."""
    if not isinstance(choice, dict) or choice.get("type", "function") != "function":
        return None
    name = choice.get("name", choice["function"].get("name") if isinstance(choice.get("function"), dict) else None)
    return name if isinstance(name, str) else None
