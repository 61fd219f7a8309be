"""The options that several commands share, each declared once, and the usage errors that several commands share.

The sampling options come from the fields of `SamplingSettings`. Imports nothing heavy: `dflash-mlx -h` answers at once.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from enum import StrEnum
from typing import Annotated, Any

import typer

from .. import sampling_settings
from ..chat_template import NO_VARIABLES
from ..errors import GenerationError
from ..sampling_settings import check
from .narrow_help import HelpfulCommand, UsageError


class Dtype(StrEnum):
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    auto = "auto"


# 4, 8 and none.
LastTapKind = StrEnum("LastTapKind", {"before": "before", "after": "after"})
DraftBits = StrEnum("DraftBits", {"four": "4", "eight": "8", "none": "none"})

# Groups of --help. A command shows the groups of its options, in the order in which it declares them.
MODEL, PROMPT, SAMPLING, DRAFTING, MEMORY, OUTPUT = "Model", "Prompt", "Sampling", "Drafting", "Memory", "Output"


def option(panel: str, *names: str, **more: Any) -> Any:
    """An option of one group; the rest as in `typer.Option`."""
    return typer.Option(*names, rich_help_panel=panel, **more)


Model = Annotated[
    str | None,
    option(
        MODEL,
        help="The model to run: a Hugging Face repo, a directory, a GGUF file or a built-in name. Default: smollm2, built in.",
    ),
]
AdapterPath = Annotated[
    str | None,
    option(MODEL, help="Directory of a LoRA, DoRA or full fine-tune of this model made with mlx_lm.lora."),
]
DtypeOption = Annotated[
    Dtype | None,
    option(
        MODEL,
        "--dtype",
        metavar="<type>",
        help="Number type to compute in: float32, float16, bfloat16 or auto. Default: float32 on a CPU, the files' own on a GPU "
        "(auto).",
    ),
]
Revision = Annotated[str | None, option(MODEL, help="Branch, tag or commit of the Hugging Face repo.")]
TrustRemoteCode = Annotated[
    bool,
    option(MODEL, "--trust-remote-code", help="Allow Python code that comes with the model's files to run."),
]
Dense = Annotated[
    bool | None,
    option(MODEL, help="Dequantize the model first. Default: only on an NVIDIA GPU."),
]
System = Annotated[str | None, option(PROMPT, help="System message, put in front of the conversation.")]
Thinking = Annotated[
    bool | None,
    option(PROMPT, "--thinking/--no-thinking", help="Turn a reasoning model's thinking on or off (enable_thinking)."),
]
ChatTemplateArgs = Annotated[
    str | None,
    option(PROMPT, help="Extra chat template variables as a JSON object, such as '{\"enable_thinking\": false}'."),
]


def drafter_name(name: str | None) -> str | None:
    """A drafter as it was typed; 'auto' and 'none' in lower case, as they are compared everywhere."""
    word = (name or "").strip().lower()
    return word if word in ("auto", "none") else name


DraftModel = Annotated[
    str | None,
    option(
        DRAFTING,
        callback=drafter_name,
        help="The model's DFlash drafter: 'auto' (the published one), a Hugging Face repo or a directory. "
        "A --model without this option runs without drafts, as with 'none'.",
    ),
]
DraftBitsOption = Annotated[
    DraftBits | None,
    option(
        DRAFTING,
        "--draft-bits",
        help="Quantize the drafter to this many bits when loading. Default: 4 on a Mac's GPU, none elsewhere.",
    ),
]
Pipeline = Annotated[
    bool,
    option(
        MODEL, "--pipeline", help="On several machines: give each some whole layers, not a part of every layer. No drafter then."
    ),
]
LastTap = Annotated[
    LastTapKind | None,
    option(
        DRAFTING,
        "--last-tap",
        help="For drafters that read the target's last layer: read it before or after the final norm. "
        "Default: as the drafter's files say.",
    ),
]
BlockSize = Annotated[
    int | None,
    option(
        DRAFTING,
        min=1,
        help="Tokens per block, counting the last known one: N drafts N - 1 tokens at a time; 1: no drafts. "
        "Default: measured on this machine.",
    ),
]
# The options of prompt caches: `cache_options`.
_CACHES = {
    "prefill_step_size": option(MEMORY, min=1, help="Prompt tokens read in one pass."),
    "max_kv_size": option(MEMORY, min=1, help="Keep only the last N tokens in the KV cache."),
    "kv_bits": option(MEMORY, min=2, max=8, help="Quantize the KV cache to this many bits."),
    "kv_group_size": option(MEMORY, min=1, help="Group size of the quantized KV cache. Default: 64."),
    "quantized_kv_start": option(MEMORY, min=0, help="Number of tokens after which --kv-bits takes effect. Default: 5000."),
    "exact": option(
        DRAFTING,
        "--exact",
        help="Give exactly the same text with and without a drafter, on a GPU too (slower). Options that rule "
        "this out are refused.",
    ),
}
PromptCacheFile = Annotated[
    str | None,
    option(MEMORY, help="Prompt cache file written by mlx_lm.cache_prompt; the prompt continues it."),
]
MaxTokens = Annotated[
    int | None,
    option(OUTPUT, "--max-tokens", "-m", help="Maximum tokens per answer; -1: no limit."),
]
AsJson = Annotated[bool, option(OUTPUT, "--json", help="Print one JSON object on stdout instead of text.")]


class CheckedCommand(HelpfulCommand):
    """A command whose usage error names all missing options, or the words that belong to no option, and an example; typer's gives
    no example. A command that does not run over ranks is refused there."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(args))
        except UsageError as error:
            if type(error) is not UsageError and type(error).__name__ != "MissingParameter":
                raise
            given, stray, _ = self.make_parser(ctx).parse_args(args=list(args))
            as_in = f"as in: {self.epilog.removeprefix(_EXAMPLE)}"
            missing = [one.opts[0] for one in self.get_params(ctx) if one.required and one.name not in given]
            if missing:
                *others, last = missing
                named = f"{', '.join(others)} and {last}" if others else last
                raise UsageError(f"Give {named}, {as_in}", ctx) from None
            if stray:
                words = " ".join(stray)
                why = "each value follows the name of its option, and a text of several words is quoted"
                raise UsageError(f"No option takes {words!r}: {why}, {as_in}", ctx) from None
            raise

    def invoke(self, ctx: Any) -> Any:
        from .over_ranks import check_command

        names, of = [], ctx
        while of.parent is not None:
            names, of = [of.info_name, *names], of.parent
        check_command(" ".join(names))
        return super().invoke(ctx)


_EXAMPLE = "Example: "


def example(command: str) -> str:
    """The last line of a command's --help."""
    return _EXAMPLE + command


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def refuse(name: str, why: str) -> typer.BadParameter:
    """A usage error about one option: `raise refuse("--stop", "it is empty; give some text")`."""
    return typer.BadParameter(why, param_hint=name)


def sampling_options(*, leave_out: tuple[str, ...] = ()) -> Callable:
    """Give a command one option for each field of `SamplingSettings`, where its parameter `sampling` stands.

    The command gets `sampling`: the values that the user gave, by name, each of them checked.
    """

    made = {one.name: one for one in fields(sampling_settings.SamplingSettings) if one.name not in leave_out}

    def given(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: checked(made[name], value) for name, value in values.items() if value is not None}

    return _in_place_of("sampling", [_parameter(one) for one in made.values()], given)


def cache_options(command: Callable) -> Callable:
    """Give a command the options of caches where its parameter `caches` stands; it gets their values by name, None by default."""
    kinds = {name: int | None for name in _CACHES} | {"exact": bool | None}
    made = [_keyword(name, Annotated[kinds[name], made]) for name, made in _CACHES.items()]
    return _in_place_of("caches", made, lambda values: {**values, "exact": values["exact"] or None})(command)


def gathered_options(name: str, options: Mapping[str, tuple[Any, Any]], gathered: Callable[[Mapping[str, Any]], Any]) -> Callable:
    """Give a command options, each with its type and default, where its parameter `name` stands; it gets what is `gathered`."""
    made = [
        inspect.Parameter(one, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)
        for one, (kind, default) in options.items()
    ]
    return _in_place_of(name, made, gathered)


def _in_place_of(name: str, parameters: list[inspect.Parameter], gathered: Callable[[Mapping[str, Any]], Any]) -> Callable:
    """Give a command these parameters where its parameter `name` stands, which gets what `gathered` makes of their values."""

    def add(command: Callable) -> Callable:
        own = inspect.signature(command, eval_str=True).parameters

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            taken = {one.name: values.pop(one.name) for one in parameters}
            return command(**values, **{name: gathered(taken)})

        return _with_parameters(run, [new for old in own.values() for new in (parameters if old.name == name else [old])])

    return add


# mlx-lm's names of our options: the parameter, its type, and the value that the name stands for.
_MLX_LM_NAMES: dict[str, tuple[str, Any, Callable[[Any], Any]]] = {
    "system_prompt": ("system", str | None, lambda text: text),
    "ignore_chat_template": ("raw", bool | None, lambda given: given),
    "num_draft_tokens": ("block_size", int | None, lambda drafts: drafts + 1),
    "chat_template_config": ("chat_template_args", str | None, lambda text: text),
}


def mlx_lm_names(command: Callable) -> Callable:
    """Let a command also take mlx-lm's names of its options. --help does not show them."""
    own = inspect.signature(command, eval_str=True).parameters
    taken = {name: entry for name, entry in _MLX_LM_NAMES.items() if entry[0] in own}

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        for name, (meant, _, value_of) in taken.items():
            if (value := values.pop(name)) is None:
                continue
            if values[meant] not in (None, False):
                raise refuse(flag(name), f"it is mlx-lm's name of {flag(meant)}; give one of the two")
            values[meant] = value_of(value)
        return command(**values)

    parameters = [*own.values()]
    for name, (_, kind, _) in taken.items():
        least = 0 if kind == int | None else None
        hidden = typer.Option(flag(name), hidden=True, min=least)
        parameters.append(_keyword(name, Annotated[kind, hidden]))
    return _with_parameters(run, parameters)


def _with_parameters(run: Callable, parameters: list[inspect.Parameter]) -> Callable:
    """A wrapped command that shows typer these parameters."""
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    del run.__wrapped__
    return run


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    """A parameter that may be left out."""
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


def _parameter(one: Field) -> inspect.Parameter:
    """The option of one sampling setting."""
    zero = one.metadata["zero"] if one.metadata["zero"] != "refused" else ""
    if one.default == 0 and zero:
        default, zero = f" Default: 0 ({zero}).", ""
    else:
        default, zero = f" Default: {one.default:g}." if one.default is not None else "", zero and f" 0: {zero}."
    kind = one.metadata["kind"]
    return _keyword(one.name, Annotated[kind | None, option(SAMPLING, help=f"{one.metadata['help']}{default}{zero}")])


def checked(one: Field, value: Any) -> Any:
    """A value that a field may have; a usage error otherwise."""
    try:
        check(one, value)
    except GenerationError as error:
        raise refuse(flag(one.name), error.problem) from None
    return value


def checked_max_tokens(value: int | None, *, least: int = 1) -> None:
    """A usage error unless it is a number of tokens, or -1 for no limit."""
    if value is not None and value != -1 and value < least:
        raise refuse("--max-tokens", "give a positive number, or -1 for no limit")


def refuse_without_effect(settings: sampling_settings.SamplingSettings, given: Mapping[str, Any]) -> list[str]:
    """A usage error for a sampling option that has no effect in this run; a seed alone only gets a note.

    Returns: sentences for the user. The same seed gives the same text without sampling too, so that is no error.
    """
    notes = []
    for name, why in settings.without_effect(given).items():
        if name != "seed":
            more = "; give --temp" if why == "at temperature 0" else ""
            raise refuse(flag(name), f"it has no effect {why}{more}".replace("without ", "without --").replace("_", "-"))
        notes.append(f"--seed has no effect {why}.")
    return notes


def template_args(text: str | None) -> dict[str, Any]:
    """The value of --chat-template-args; a usage error unless it is a JSON object."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise refuse("--chat-template-args", "give a JSON object")
    if own := sorted(value.keys() & NO_VARIABLES):
        raise refuse("--chat-template-args", f"it has {own[0]}; give variables of the chat template only")
    return value


def thinking_args(thinking: bool | None, text: str | None) -> dict[str, Any]:
    """The template's variables of --thinking and --chat-template-args; a usage error if both set enable_thinking."""
    arguments = template_args(text)
    if thinking is not None and "enable_thinking" in arguments:
        raise refuse("--chat-template-args", "it sets enable_thinking, as --thinking does; give one of the two")
    return arguments if thinking is None else {**arguments, "enable_thinking": thinking}


def refuse_lonely_kv_options(caches: Mapping[str, int | None]) -> None:
    """Usage errors for options of --kv-bits that are given without it."""
    for name in ("max_kv_size", "kv_bits"):
        if caches["exact"] and caches[name] is not None:
            raise refuse("--exact", f"it cannot honour {flag(name)}; give one of the two")
    for name in ("kv_group_size", "quantized_kv_start"):
        if caches[name] is not None and not caches["kv_bits"]:
            raise refuse(flag(name), "it has no effect without --kv-bits")


def has_no_drafter(model: str | None, draft_model: str | None) -> bool:
    """Whether a command decodes plainly with these names; without any it runs the built-in pair."""
    return draft_model == "none" or bool(model) and not draft_model


def refuse_lonely_drafter(
    model: str | None,
    draft_model: str | None,
    draft_bits: DraftBits | None = None,
    last_tap: LastTapKind | None = None,
    block_size: int | None = None,
) -> None:
    """Usage errors for a drafter without a target, and for options of a drafter when there is none."""
    if has_no_drafter(model, draft_model):
        for name, given in (("--draft-bits", draft_bits), ("--last-tap", last_tap), ("--block-size", block_size)):
            if given:
                raise refuse(name, "it needs a drafter; name one with --draft-model, or auto to look for it")
    if draft_model and draft_model != "none" and not model:
        raise refuse("--draft-model", "it needs --model, the target it was trained for")
