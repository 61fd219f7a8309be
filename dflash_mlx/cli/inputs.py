"""What the command line is given: prompts from arguments, files and standard input, and the models that names stand for."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..chat_template import without_effect
from ..errors import DFlashError
from ..sampling_settings import recommended, recommended_text, used_of
from ..serving.interrupt import insistent
from .live import live
from .options import DraftBits, Dtype, drafter_name
from .output import say

if TYPE_CHECKING:
    from ..memory import RunSize

# Tokens of context for which memory is checked in chat, server and bench, whose texts are not known yet.
CONTEXT = 4096


def is_piped() -> bool:
    """Whether standard input is not a terminal."""
    return not sys.stdin.isatty()


def standard_input() -> str:
    """All of standard input, unchanged. After two seconds of waiting a line says so.

    Raises:
      DFlashError: if it is not UTF-8.
    """
    waiting = threading.Timer(2, say, ["Reading the prompt from standard input; Ctrl-D ends it ..."])
    waiting.daemon = True
    waiting.start()
    try:
        return utf8(sys.stdin.buffer.read(), "on standard input")
    finally:
        waiting.cancel()


def file_text(name: str) -> str:
    """All of a file, unchanged; errors as in `standard_input`, and OSError."""
    with open(os.path.expanduser(name), "rb") as file:
        return utf8(file.read(), f"in {name}")


def utf8(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DFlashError(
            f"the text {where} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}", "Convert it first"
        ) from None


def check_revision(revision: str | None, *names: str | None) -> None:
    """Refuse --revision if no name is a hub repo, because it would have no effect."""
    from ..pairs import builtin

    local = [n for n in names if n and (n in builtin.BUILTIN_PAIRS or os.path.exists(os.path.expanduser(n)))]
    if revision and len(local) == sum(n is not None for n in names):
        what = " and ".join(dict.fromkeys(local))
        raise DFlashError(f"--revision {revision} needs a Hugging Face repo; {what} is not one", "Leave --revision out")


def choose_pair(model: str | None, draft_model: str | None) -> tuple[str, str | None]:
    """Names of target and drafter (None: plain decoding). A line on stderr shows what was chosen for the user."""
    from ..pairs import builtin
    from ..pairs.published import nearest_target, published_drafter

    if draft_model is not None and drafter_name(draft_model) == "none":
        return model or builtin.DEFAULT_PAIR, None
    if model is None:
        return builtin.DEFAULT_PAIR, builtin.DEFAULT_PAIR
    if draft_model != "auto":
        return model, draft_model
    if builtin.builtin_path(model, "drafter") is not None:
        say(f"Drafter: {model} (built-in).")
        return model, model
    found = published_drafter(model)
    if found is None:
        near = nearest_target(model)
        raise DFlashError(
            f"no drafter is known for {model}{f' (there is one for {near})' if near else ''}, so --draft-model auto finds none",
            "Leave --draft-model out to run without drafts, or name a drafter's directory or repo; `dflash-mlx models` lists the "
            "known ones, `dflash-mlx train` makes one",
        )
    say(f"Drafter: {found.repo}, published for {found.target}{f' ({found.note})' if found.note else ''}.")
    return model, found.repo


def run_size(tokens: int, caches: Mapping[str, int | None]) -> RunSize:
    """The size of a run of `tokens` tokens, with caches made with these options (`cache_options`)."""
    from ..memory import RunSize

    return RunSize.of(tokens, caches)


@insistent()
def load_pair(
    model: str | None,
    draft_model: str | None,
    dtype: Dtype | None,
    draft_bits: DraftBits | None,
    revision: str | None,
    trust_remote_code: bool,
    run: Callable[[Any], RunSize] | None = None,
    adapter_path: str | None = None,
    last_tap: str | None = None,
    pipeline: bool = False,
) -> tuple[str, str | None, Any, Any, Any]:
    """Names of target and drafter, then target, tokenizer and drafter (None: plain decoding).

    Args:
      run: called with the tokenizer, returns the size of the run, which is compared with memory before weights are read.
        None: `CONTEXT` tokens.
      adapter_path: an adapter that mlx-lm trained for the target. last_tap: as in `load_drafter`.
      pipeline: over ranks, each takes whole layers, not a share of each layer.
    """
    from .. import loading, traced
    from ..kernels import autotune
    from ..memory import RunSize
    from ..pairs import builtin
    from ..rank_run import RankPair, refuse_forced_kernels
    from ..ranks import joined

    ranks = joined()
    # Unknown values of environment variables are an error before anything is loaded.
    traced.setting()
    autotune.setting()
    target, drafter = choose_pair(model, draft_model)
    check_revision(revision, target, drafter)
    if ranks is not None and drafter:
        refuse_forced_kernels()
    builtin.builtin_path(target, "target", say=say)
    with live(f"Loading {target}") as line:
        lm, tokenizer = loading.load(
            target,
            adapter_path=adapter_path,
            lazy=True,
            revision=revision,
            trust_remote_code=trust_remote_code,
            dtype=dtype.value if dtype else None,
            **({"ranks": ranks, "pipeline": pipeline} if ranks else {}),
        )
        asked = run(tokenizer) if run else RunSize(CONTEXT)
        loading.check_run(lm, drafter, asked, revision=revision, bits=draft_bits)
        loading.read_weights(lm, f"Loading {target}")
        how = {"revision": revision, "bits": draft_bits, "last_tap": last_tap}
        draft = loading.load_drafter(drafter, lm, **how) if drafter else None
        if draft is not None and ranks is not None:
            RankPair(lm, draft, ranks)
        line.heed()
    if draft is None:
        why = "No --draft-model" if draft_model is None else "--draft-model none"
        say(f"{why}: decoding without drafts.{_drafter_of(target) if draft_model is None else ''}")
    if trust_remote_code and not _brings_code(tokenizer):
        say(f"--trust-remote-code has no effect: no code comes with {target}'s tokenizer.")
    return target, drafter, lm, tokenizer, draft


def _drafter_of(target: str) -> str:
    """A sentence on the drafter that --draft-model auto would take; empty without one."""
    from ..pairs.builtin import builtin_path
    from ..pairs.published import published_drafter

    if builtin_path(target, "drafter") is not None:
        return f" --draft-model auto takes {target}'s own."
    found = published_drafter(target)
    return f" --draft-model auto takes {found.repo}." if found else ""


def recommended_sampling(name: str, revision: str | None, model: Any) -> dict[str, Any]:
    """The settings that a loaded target's generation_config.json recommends. Lines on stderr name those that are ignored."""
    import json

    from ..hub import file_beside
    from ..models.target import Target
    from ..pairs.builtin import builtin_path

    # Loading has fetched it. A GGUF file has none.
    file = file_beside(builtin_path(name, "target") or name, _RECOMMENDS, revision)
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError):
        # If it were not JSON, loading would have failed.
        return {}
    found, ignored = recommended(config, Target(model).vocabulary)
    for why in ignored.values():
        say(f"{_RECOMMENDS} of {name}: {why}; it is ignored.")
    return found


def use_recommended(name: str, recommended: Mapping[str, Any], given: Mapping[str, Any], drafter: Any) -> dict[str, Any]:
    """The recommended settings that the user did not override. A line shows them, and what they cost in drafts."""
    found = used_of(recommended, given)
    if found:
        cost = ""
        if drafter is not None and "temp" in found:
            cost = " Sampling keeps fewer drafts: the built-in tiny pair gives 4.9 tokens a pass at --temp 0, 2.2 at 1."
        say(f"{_RECOMMENDS} of {name} recommends {recommended_text(found)}: used. --temp 0 turns that off.{cost}")
    return found


_RECOMMENDS = "generation_config.json"


def _brings_code(tokenizer: Any) -> bool:
    """Whether a tokenizer comes with Python code."""
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    return "auto_map" in getattr(inner, "init_kwargs", {}) or type(inner).__module__.startswith("transformers_modules")


def _thinking_flag(thinking: bool | None) -> str:
    return "--thinking" if thinking else "--no-thinking"


def refuse_without_template(given: Mapping[str, Any]) -> None:
    """Raises DFlashError for the first given option if the tokenizer has no chat template."""
    for name, value in given.items():
        if value is not None:
            raise DFlashError(f"{name} needs a chat template; this tokenizer has none", f"Leave {name} out")


def encode_prompt(
    tokenizer: Any,
    prompt: str,
    system: str | None,
    raw: bool,
    thinking: bool | None = None,
    template_args: Mapping[str, Any] | None = None,
    prefill: str | None = None,
) -> list[int] | str:
    """Render the prompt with the chat template, unless --raw. Without a template the text stays as it is, and a line says so.

    Raises:
      DFlashError: an option of the chat template without one, or what the template refuses.
    """
    if raw:
        if not tokenizer.has_chat_template:
            say("--raw has no effect: this tokenizer has no chat template.")
        return prompt
    if not tokenizer.has_chat_template:
        needed = {"--system": system, _thinking_flag(thinking): thinking, "--chat-template-args": template_args or None}
        refuse_without_template({**needed, "--prefill-response": prefill})
        say("This model has no chat template: it continues the prompt as plain text.")
        return prompt
    from ..serving.messages import read_messages, render_chat

    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    if prefill is not None:
        messages.append({"role": "assistant", "content": prefill})
    extra = ({} if thinking is None else {"enable_thinking": thinking}) | (template_args or {})
    say_unread_template_args(tokenizer, extra, thinking)
    return render_chat(tokenizer, read_messages(messages, tokenizer), template_args=extra, continues=prefill is not None).ids


def is_written_out(model: Any, dense: bool | None, *, default: bool) -> bool:
    """Whether a target's quantized layers are turned into plain ones. A line says if --dense or --no-dense has no effect."""
    if dense is not None and dense == default:
        say(f"--{'' if dense else 'no-'}dense has no effect: on this device that is the default.")
    elif dense and not any(hasattr(module, "bits") for _, module in model.named_modules()):
        say("--dense has no effect on the target: none of its layers is quantized.")
        return False
    return default if dense is None else dense


def say_unread_template_args(tokenizer: Any, arguments: Mapping[str, Any], thinking: bool | None = None) -> None:
    """Name the variables that the chat template does not read, with the flag that set them. thinking: of --thinking."""
    for name in without_effect(tokenizer, arguments):
        given = f"{name} of --chat-template-args"
        if thinking is not None and name == "enable_thinking":
            given = _thinking_flag(thinking)
        why = f"this chat template does not read {name}" if tokenizer.has_chat_template else "this tokenizer has no chat template"
        say(f"{given} has no effect: {why}.")
