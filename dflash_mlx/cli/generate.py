"""`dflash-mlx generate`: one answer to one prompt, and how much of the drafts was accepted."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from ..errors import DFlashError
from ..kernels.crash_marker import leave_at_once
from ..sampling_settings import recommended_text
from ..serving.interrupt import at_ctrl_c
from ..serving.keys import keys_wait
from ..serving.log_lines import held_log
from . import inputs, output, over_ranks
from .live import live
from .options import (
    DRAFTING,
    OUTPUT,
    PROMPT,
    AdapterPath,
    AsJson,
    BlockSize,
    ChatTemplateArgs,
    DraftBitsOption,
    DraftModel,
    DtypeOption,
    LastTap,
    MaxTokens,
    Model,
    Pipeline,
    PromptCacheFile,
    Revision,
    System,
    Thinking,
    TrustRemoteCode,
    cache_options,
    checked_max_tokens,
    flag,
    mlx_lm_names,
    option,
    refuse,
    refuse_lonely_drafter,
    refuse_lonely_kv_options,
    refuse_without_effect,
    sampling_options,
    template_args,
    thinking_args,
)
from .output import only_ours_on_stdout, say
from .prompt_file import encode_query, read_prompt_file

Prompt = Annotated[
    str | None,
    option(
        PROMPT,
        "--prompt",
        "-p",
        help="The prompt. '-' reads standard input, which is also the default in a pipe.",
    ),
]
PromptFile = Annotated[str | None, option(PROMPT, help="Read the prompt from this file.")]
PrefillResponse = Annotated[str | None, option(PROMPT, help="Text that the answer starts with; only what follows it is printed.")]
JsonSchema = Annotated[
    str | None,
    option(
        OUTPUT,
        metavar="FILE",
        help="Make the answer match a JSON schema: a file, or the schema itself. Needs the package llguidance.",
    ),
]
Raw = Annotated[bool, option(PROMPT, "--raw", help="Pass the prompt to the model as it is, without the chat template.")]
PromptLookup = Annotated[
    bool | None,
    option(
        DRAFTING,
        "--prompt-lookup/--no-prompt-lookup",
        help="Also draft by copying earlier text that fits. Default: when it is faster; off with --block-size.",
    ),
]
Stop = Annotated[
    list[str] | None,
    option(OUTPUT, help="Stop before this text; can be repeated."),
]
ShowDrafts = Annotated[
    bool,
    option(OUTPUT, "--show-drafts", help="Mark drafted tokens in the text, and show wrong drafts."),
]

ShowStats = Annotated[
    bool, option(OUTPUT, "--stats", help="Print statistics after the answer: passes, kept drafts, memory, seconds.")
]


@mlx_lm_names
@sampling_options()
@cache_options
def generate(
    model: Model = None,
    adapter_path: AdapterPath = None,
    dtype: DtypeOption = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    system: System = None,
    thinking: Thinking = None,
    chat_template_args: ChatTemplateArgs = None,
    prefill_response: PrefillResponse = None,
    raw: Raw = False,
    sampling: Any = None,
    draft_model: DraftModel = None,
    pipeline: Pipeline = False,
    draft_bits: DraftBitsOption = None,
    last_tap: LastTap = None,
    block_size: BlockSize = None,
    prompt_lookup: PromptLookup = None,
    copy: Annotated[bool | None, typer.Option("--copy/--no-copy", hidden=True)] = None,
    caches: Any = None,
    prompt_cache_file: PromptCacheFile = None,
    max_tokens: MaxTokens = 256,
    stop: Stop = None,
    json_schema: JsonSchema = None,
    as_json: AsJson = False,
    show_drafts: ShowDrafts = False,
    show_stats: ShowStats = False,
) -> None:
    """Answer one prompt, and report the speed."""
    asked = SimpleNamespace(**locals())
    _check_usage(asked)
    names = {"adapter_path": adapter_path, "prompt_cache_file": prompt_cache_file, "exact": caches["exact"]}
    asked.ranks = over_ranks.begin(pipeline, draft_model, model, **names)
    _read_prompt(asked)
    with keys_wait(sys.stdin, lines=True) as asked.show_keys, only_ours_on_stdout() as stdout, live("Starting"):
        from ..sampling_settings import SamplingSettings

        settings = SamplingSettings(**sampling)
        notes = refuse_without_effect(settings, sampling)
        asked.held = read_prompt_file(prompt_cache_file) if prompt_cache_file is not None else None
        if asked.held:
            model = asked.held.check(model, caches["kv_bits"])
        if asked.prompt is None:
            asked.prompt = _default_prompt(model)
        if show_drafts and model is not None and draft_model in (None, "none"):
            raise DFlashError("--show-drafts needs a drafter; none is given", "Give --draft-model, or leave --model out too")
        size = lambda t: _run(asked, t)  # noqa: E731
        pair = inputs.load_pair(
            model, draft_model, dtype, draft_bits, revision, trust_remote_code, size, adapter_path, last_tap, pipeline
        )
        for note in notes:
            say(note)
        if "temp" not in sampling and (found := inputs.recommended_sampling(pair[0], revision, pair[2])):
            say(f"generation_config.json recommends {recommended_text(found)}; generate uses --temp 0 unless you give these.")
        result = _answer(asked, settings, pair, stdout)
        if as_json:
            print(json.dumps({**result, "model": pair[0], "draft_model": pair[1]}), file=stdout)
        say(output.figures(result, show_stats, result["seed"]))
        how = {"dtype": dtype, "draft_bits": draft_bits, "last_tap": last_tap, "revision": revision}
        if over_ranks.may_compute_after(result["finish_reason"]):
            _measure_for_the_next(pair[0], pair[1], pair[4], how | {"adapter_path": adapter_path})
    if result["finish_reason"] == "interrupted":
        raise SystemExit(130)


def _measure_for_the_next(model: str, draft_model: str | None, drafter: Any, how: dict[str, Any]) -> None:
    """Finish the measurement if the answer was too short for it, or a pass too long. Ctrl-C skips it.

    how: options with which this pair was loaded and that `doctor` has too.
    """
    if drafter is None or not drafter.pair.measures_later:
        return
    from ..pair import AFTER_S

    say(
        f"Timing the model and its drafter once, at most {AFTER_S:.0f} s: the next answers then draft where it is faster. "
        "Ctrl-C skips this."
    )
    with live("Measuring"):
        try:
            drafter.pair.finish_measuring(limit_s=AFTER_S)
        except KeyboardInterrupt:
            say("Skipped; the next run does it.")
            return
    if drafter.pair.measures_later:
        given = {"model": model, "draft_model": draft_model or "none", **how}
        words = [word for name, value in given.items() if value is not None for word in (flag(name), str(value))]
        command = shlex.join(["dflash-mlx", "doctor", *words])
        say(f"Not done after {AFTER_S:.0f} s; the next run tries again. To time them without a limit: {command}")


def _check_usage(asked: SimpleNamespace) -> None:
    """Usage errors that need no model."""
    if asked.copy is not None:
        new = "--prompt-lookup" if asked.copy else "--no-prompt-lookup"
        say(f"--{'' if asked.copy else 'no-'}copy is now {new}; the old name will go with the next release.")
        asked.prompt_lookup = asked.copy if asked.prompt_lookup is None else asked.prompt_lookup
    refuse_lonely_drafter(asked.model, asked.draft_model, asked.draft_bits, asked.last_tap, asked.block_size)
    checked_max_tokens(asked.max_tokens)
    if asked.show_drafts and asked.as_json:
        raise refuse("--show-drafts", "--json already holds every draft under 'rounds'")
    if asked.show_drafts and asked.block_size == 1:
        raise refuse("--show-drafts", "--block-size 1 drafts nothing, so there is nothing to mark")
    for name in ("system", "thinking", "chat_template_args", "prefill_response"):
        if getattr(asked, name) is not None and asked.raw:
            raise refuse(flag(name), "--raw uses no chat template, so there is no place for it")
    thinking_args(asked.thinking, asked.chat_template_args)
    asked.template_args = template_args(asked.chat_template_args)
    refuse_lonely_kv_options(asked.caches)
    for name, value in (("system", asked.system), ("max_kv_size", asked.caches["max_kv_size"])):
        if asked.prompt_cache_file is not None and value is not None:
            raise refuse(flag(name), "it has no effect with --prompt-cache-file: that was settled when the file was made")
    if asked.prefill_response == "":
        raise refuse("--prefill-response", "it is empty; give some text")
    if asked.json_schema is not None and asked.prefill_response is not None:
        raise refuse(
            "--json-schema", "it applies to the whole answer, whose beginning --prefill-response writes; give one of the two"
        )
    if asked.stop and "" in asked.stop:
        raise refuse("--stop", "it needs a text")
    if asked.stop and asked.show_drafts:
        raise refuse("--stop", "--show-drafts shows tokens, which do not end where texts do")
    if asked.prompt_file is not None and asked.prompt is not None:
        raise refuse("--prompt-file", "give one of --prompt and --prompt-file")


def _read_prompt(asked: SimpleNamespace) -> None:
    """Read the prompt from where it is. All texts must be UTF-8."""
    launched = over_ranks.is_over_ranks()
    if launched and asked.prompt == "-":
        raise refuse("--prompt", "mlx.launch never ends standard input; give the text, or --prompt-file")
    if asked.prompt_file is not None:
        asked.prompt = _file_text(asked.prompt_file, "the prompt", asked.ranks)
    elif asked.prompt == "-":
        asked.prompt = inputs.standard_input()
    elif asked.prompt is not None:
        asked.prompt = inputs.utf8(os.fsencode(asked.prompt), "of --prompt")
    elif inputs.is_piped() and not launched:
        # An empty pipe, such as that of a program started by another one, counts as no pipe.
        asked.prompt = inputs.standard_input() or None
    asked.demand = None if asked.json_schema is None else _read_schema(asked.json_schema, asked.ranks)
    for name in ("system", "prefill_response"):
        if (text := getattr(asked, name)) is not None:
            setattr(asked, name, inputs.utf8(os.fsencode(text), f"of {flag(name)}"))
    if asked.prompt == "":
        raise refuse("--prompt", "it is empty; give some text")


def _file_text(path: str, what: str, ranks: Any) -> str:
    """The text of a file. Over ranks it is read on rank 0's machine. what: its name for `Ranks.broadcast`."""
    read = lambda: inputs.file_text(path)  # noqa: E731
    return ranks.run_on_rank_0(read, what) if ranks else read()


def _read_schema(given: str, ranks: Any = None) -> Any:
    """The demand on the answer in a schema, given as a file's name or as the schema itself.

    Raises: DFlashError if it is not a schema, or has a keyword that cannot be enforced.
    """
    from ..serving.answer_grammar import read_answer

    text = given if given.lstrip().startswith("{") else _file_text(given, "the schema", ranks)
    return read_answer({"json_schema": text})


def _grammar(asked: SimpleNamespace, tokenizer: Any, ids: list[int], is_rendered: bool) -> Any:
    """The constraint on the answer to a prompt; None: there is none."""
    from ..serving.answer_grammar import grammar_of

    before = tokenizer.decode(ids[-64:]) if is_rendered else None
    return None if asked.demand is None else grammar_of(asked.demand, tokenizer, asked.model or "this target", before)


def _default_prompt(model: str | None) -> str:
    """A built-in pair's own prompt."""
    from ..pairs import builtin

    pair = builtin.BUILTIN_PAIRS.get(model or builtin.DEFAULT_PAIR)
    if pair is None:
        raise refuse("--prompt", "give -p TEXT, or pipe the prompt in")
    say(f"No prompt given; using {pair.prompt!r}.")
    return pair.prompt


def _run(asked: SimpleNamespace, tokenizer: Any) -> Any:
    """The size of this run's caches: the prompt, without what a chat template adds, and the longest answer."""
    answer = inputs.CONTEXT if asked.max_tokens == -1 else asked.max_tokens
    tokens = len(tokenizer.encode((asked.system or "") + asked.prompt)) + answer + (asked.held.rows if asked.held else 0)
    return inputs.run_size(tokens, asked.caches)


def _prompt_ids(asked: SimpleNamespace, tokenizer: Any) -> list[int] | str:
    """The tokens to read: the whole prompt, or the part that a prompt-cache file does not hold."""
    if asked.held:
        extra = {} if asked.thinking is None else {"enable_thinking": asked.thinking}
        return encode_query(tokenizer, asked.prompt, asked.raw, {**extra, **asked.template_args}, asked.prefill_response)
    return inputs.encode_prompt(
        tokenizer, asked.prompt, asked.system, asked.raw, asked.thinking, asked.template_args, asked.prefill_response
    )


def _answer(asked: SimpleNamespace, settings: Any, pair: tuple[str, str | None, Any, Any, Any], stdout: Any) -> dict[str, Any]:
    """Run the generation and show it; the fields of --json, and the seed."""
    from ..generation import stream_generate
    from ..models.target import Target
    from ..sampling import choose_seed
    from ..text import TextStream, encode

    _, _, lm, tokenizer, draft = pair
    settings.check_vocabulary(Target(lm).vocabulary)
    block_size = asked.block_size
    if draft and block_size and block_size > draft.config.block_size:
        say(f"This drafter was trained for blocks of {draft.config.block_size}; slots beyond that are seldom right.")
    prompt, cache = _prompt_ids(asked, tokenizer), asked.held.open(lm, draft) if asked.held else None
    # The answer continues text, because there is no chat template or the answer was begun: keep a leading blank.
    ids, is_rendered = encode(tokenizer, prompt), not isinstance(prompt, str) and asked.prefill_response is None
    if asked.prompt_lookup is False and (draft is None or block_size):
        say(f"--no-prompt-lookup has no effect {'with --block-size' if draft else 'without a drafter'}: that is the default.")
    sampler, processors = settings.make(tokenizer)
    # Drawn here, so that the figures can name it.
    seed = choose_seed(settings.seed) if sampler else None

    def leave() -> None:
        result = fields_of([], [], None, "interrupted")
        if asked.as_json:
            print(json.dumps({**result, "seed": seed, "model": pair[0], "draft_model": pair[1]}), file=stdout)
        stdout.flush()
        line.stop()
        asked.show_keys()
        say(output.figures(result))

    show = _shown(asked, tokenizer, stdout)
    with live("Reading the prompt") as line, leave_prefill_at_ctrl_c(leave) as begun:
        responses = stream_generate(
            lm,
            tokenizer,
            ids,
            max_tokens=asked.max_tokens,
            draft_model=draft,
            block_size=block_size,
            prompt_lookup=asked.prompt_lookup,
            constraint=_grammar(asked, tokenizer, ids, is_rendered),
            text_stream=TextStream(tokenizer, ids, after_chat_template=is_rendered),
            seed=seed,
            sampler=sampler,
            logits_processors=processors,
            prompt_cache=cache,
            prompt_progress_callback=line.prefill,
            **asked.caches,
        )
        return run(until(responses, asked.stop) if asked.stop else responses, show, begun, lambda _: show.close()) | {
            "seed": seed
        }


class _Nothing:
    """Shows nothing of an answer."""

    def __call__(self, response: Any) -> None:
        pass

    def close(self) -> None:
        pass


class _Answer:
    """Shows the text of each response, between words wrapped on a terminal."""

    def __init__(self, console: Any):
        from ..serving.wrapping import WrappedText

        self.out = WrappedText(console)

    def __call__(self, response: Any) -> None:
        self.out.write(response.text)

    def close(self) -> None:
        self.out.close()


def _shown(asked: SimpleNamespace, tokenizer: Any, stdout: Any) -> Any:
    """What shows each response, and ends the last line by `close`. The legend of marked drafts comes first, on stderr."""
    if asked.as_json:
        return _Nothing()
    from rich.console import Console

    from ..serving.draft_marks import DraftMarks, legend

    console = Console(file=stdout, highlight=False)
    if not asked.show_drafts:
        return _Answer(console)
    notes = Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())
    with notes.capture() as drawn:
        notes.print(legend(console))
    # Not by the console itself: it would write into the live line.
    print(drawn.get(), end="", file=sys.stderr, flush=True)
    return DraftMarks(tokenizer, console)


def until(responses: Iterator[Any], words: list[str]) -> Iterator[Any]:
    """The responses up to the first stop string, their texts cut before it."""
    import dataclasses

    from ..text import StopText

    stop = StopText(words)
    with contextlib.closing(responses):
        for response in responses:
            text, found = stop.feed(response.text, last=response.finish_reason is not None)
            reason = "stop" if found else response.finish_reason
            yield dataclasses.replace(response, text=text, finish_reason=reason)
            if reason:
                return


def run(responses: Iterator[Any], show: Any, begun: Any = None, end: Any = output.nothing) -> dict[str, Any]:
    """Run a generation, show each response, and return the fields of --json. Ctrl-C ends it with what there is.

    begun: an event, set at the first response. end: called after the last response, before notes about the run.
    """
    text, ids, last, reason = [], [], None, None
    with contextlib.ExitStack() as log:
        try:
            for last in responses:
                if not ids:
                    log.enter_context(held_log())
                if begun is not None:
                    begun.set()
                text.append(last.text)
                ids.append(last.token)
                show(last)
                if reason := last.finish_reason:
                    break
        except KeyboardInterrupt:
            reason = "interrupted"
        finally:
            end(last)
            responses.close()
    if over_ranks.may_compute_after(reason):
        _say_where_nothing_was_computed(last)
    return fields_of(text, ids, last, reason)


def _say_where_nothing_was_computed(last: Any) -> None:
    logprobs = getattr(last, "logprobs", None)
    if logprobs is None:
        return
    import mlx.core as mx

    if mx.any(mx.isnan(logprobs)).item():
        say("The model computed NaN, so this text means nothing: its weights are damaged, or overflow. See `dflash-mlx doctor`.")


def fields_of(text: list[str], ids: list[int], last: Any, reason: str | None) -> dict[str, Any]:
    """The fields of --json for a run that gave these texts and ids; last: its last response, None if there was none."""
    stats = last.stats if last else None
    none = {
        "acceptance_lengths": [],
        "rounds": [],
        "tau": None,
        "widths": {},
        "confidence_cut": {},
        "sources": {},
        "plain_tps": None,
        "has_measured": False,
        "width_reason": None,
        "seconds": dict.fromkeys(("draft", "verify", "rollback", "host")),
    }
    return {
        "text": "".join(text),
        "token_ids": ids,
        "prompt_tokens": last.prompt_tokens if last else None,
        "generation_tokens": len(ids),
        "finish_reason": reason,
        **(stats.summary() if stats else none),
        "prompt_tps": last.prompt_tps if last else None,
        "generation_tps": last.generation_tps if last else None,
        "peak_memory_gb": last.peak_memory if last else None,
    }


@contextlib.contextmanager
def leave_prefill_at_ctrl_c(leave: Callable[[], None]) -> Iterator[threading.Event]:
    """Let Ctrl-C end the process within a second while the prompt is read, although a pass may take many seconds.

    leave: prints the last message. Yields an event to set at the first token; from then on Python handles Ctrl-C itself.
    """
    begun, ended = threading.Event(), threading.Event()

    def act() -> None:
        if begun.is_set():
            return
        say("Stopping ...")
        # A short pass ends by itself, and the run with it.
        if not ended.wait(0.7) and not begun.is_set():
            leave()
            leave_at_once(130)

    try:
        with at_ctrl_c(act):
            yield begun
    finally:
        ended.set()
