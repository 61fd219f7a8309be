"""The `dflash-mlx` command: the only module that prints and the only one that exits.

Text goes to stdout, figures, progress and errors to stderr. Everything heavy is imported inside the commands, so that
`dflash-mlx -h` answers at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

from ..errors import DFlashError
from ..machine import switch
from ..version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run language models faster and exactly: DFlash block-diffusion speculative decoding on MLX.",
    epilog="DFLASH_TRACEBACK=1 shows where an error came from.",
)

train_app = typer.Typer(
    no_args_is_help=True,
    help="Train a drafter for a target: let it write text (data), learn from that (run), measure (eval).",
    epilog="dflash-mlx train data --model M --out DATA --minutes 30, then run --model M --data DATA --out DRAFTER --minutes 60, "
    "then generate --model M --draft-model DRAFTER.",
)
app.add_typer(train_app, name="train")


class Dtype(StrEnum):
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    auto = "auto"


def main() -> None:
    """Entry point: runs a command; an error becomes one line on stderr and exit status 1. Typer ends Ctrl-C with 130.

    With DFLASH_TRACEBACK set, an error keeps its traceback.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        app()
    except BrokenPipeError:
        # The reader left (a closed pager): nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as error:
        if switch("DFLASH_TRACEBACK"):
            raise
        if isinstance(error, OSError) and error.filename and error.strerror:
            said = f"expected to use {error.filename}; found: {error.strerror}. Check the path."
        elif isinstance(error, (DFlashError, OSError, ValueError)):
            said = str(error)
        else:
            said = f"{type(error).__name__}: {error}"
        _say(f"Error: {said}")
        raise SystemExit(1) from None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _version(value: bool) -> None:
    if value:
        print(f"dflash-mlx {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    model: Annotated[
        str | None, typer.Option(help="Target: a directory, a hub repo or a built-in pair's name. Default: the built-in pair.")
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="DFlash drafter for --model, or 'auto'. Without it --model decodes plainly.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt; '-' reads it from standard input.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="A file that holds the prompt.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", help="Most tokens to generate; -1: no limit.")] = 256,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; may be given again.")] = None,
    thinking: Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="The template's enable_thinking.")] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat template.")] = None,
    temp: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample among the k likeliest tokens.")] = None,
    min_p: Annotated[float | None, typer.Option(min=0, max=1, help="Least probability relative to the top token's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Noise of sampling: same seed, same text, with or without a drafter.")] = None,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Slots drafted and verified a round, the anchor included. Default: as many as pay here."),
    ] = None,
    copy: Annotated[
        bool | None,
        typer.Option(
            "--copy/--no-copy",
            help="Prompt lookup: draft what the text said before. Default: where it pays; not with --block-size.",
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Type of activations. Default: float32 on a CPU, the files' types on a GPU (auto).")
    ] = None,
    prefill_step_size: Annotated[int | None, typer.Option(min=1, help="Prompt tokens per prefill pass.")] = None,
    max_kv_size: Annotated[int | None, typer.Option(min=1, help="Rotating KV cache of this many rows.")] = None,
    kv_bits: Annotated[int | None, typer.Option(min=2, max=8, help="Quantize the KV cache to this many bits.")] = None,
    kv_group_size: Annotated[int | None, typer.Option(min=1, help="Values that share a scale in it. Default: 64.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub repos.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Let code that comes with a tokenizer run.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Use the prompt as it is, without the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")] = False,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Mark accepted, rejected and bonus tokens in the text.")
    ] = False,
) -> None:
    """Generate text from a prompt and show how much of the drafts was accepted."""
    if draft_model and not model:
        raise typer.BadParameter("it needs --model, the target it was trained for", param_hint="--draft-model")
    if show_drafts and as_json:
        raise typer.BadParameter("--json already holds every draft under 'rounds'", param_hint="--show-drafts")
    if system is not None and raw:
        raise typer.BadParameter("--raw uses no chat template, so there is no place for it", param_hint="--system")
    for name, value in (("--top-p", top_p), ("--top-k", top_k), ("--min-p", min_p)):
        if value and temp == 0:
            raise typer.BadParameter("it has no effect at temperature 0; give --temp", param_hint=name)
    if kv_group_size and not kv_bits:
        raise typer.BadParameter("it has no effect without --kv-bits", param_hint="--kv-group-size")
    if max_tokens == 0 or max_tokens < -1:
        raise typer.BadParameter("give a positive number, or -1 for no limit", param_hint="--max-tokens")
    if stop and (show_drafts or "" in stop):
        hint = "it needs a text" if "" in stop else "--show-drafts shows tokens, which do not end where texts do"
        raise typer.BadParameter(hint, param_hint="--stop")
    if thinking is not None and raw:
        raise typer.BadParameter("--raw uses no chat template, so there is no place for it", param_hint="--thinking")
    if prompt_file is not None:
        if prompt is not None:
            raise typer.BadParameter("give one of --prompt and --prompt-file", param_hint="--prompt-file")
        prompt = _file_text(prompt_file)
    elif prompt is not None and prompt != "-":
        prompt = _utf8(os.fsencode(prompt), "for --prompt")
    if system is not None:
        system = _utf8(os.fsencode(system), "for --system")
    if prompt == "-":
        prompt = _standard_input()
    if prompt == "":
        raise typer.BadParameter("it is empty; give some text", param_hint="--prompt")

    with _only_ours_on_stdout() as stdout:
        from mlx_lm.sample_utils import make_sampler

        from ..generation import stream_generate
        from ..models.target import Target
        from ..pairs import builtin
        from ..sampling import choose_seed
        from ..serving.chat import Settings

        if prompt is None:
            pair = builtin.BUILTIN_PAIRS.get(model or builtin.DEFAULT_PAIR)
            if pair is None:
                raise typer.BadParameter("give -p TEXT, or -p - to read standard input", param_hint="--prompt")
            prompt = pair.prompt
            _say(f"No prompt given; using {prompt!r}.")
        if show_drafts and model is not None and draft_model is None:
            raise DFlashError("expected a drafter for --show-drafts; found none. Give --draft-model, or leave both out.")
        target, drafter, lm, tokenizer, draft = _load_pair(model, draft_model, dtype, revision, trust_remote_code)
        if top_k:
            Settings(top_k=top_k).check_pair(Target(lm).vocabulary, None)
        if draft and block_size and block_size > draft.config.block_size:
            _say(f"This drafter was trained for blocks of {draft.config.block_size}; slots beyond that are seldom right.")
        ids = _encode_prompt(tokenizer, prompt, system, raw, thinking)
        # Below this temperature the distribution is its top token.
        sampler = make_sampler(temp, top_p or 0.0, min_p or 0.0, top_k=top_k or 0) if temp >= 1e-5 else None
        if sampler and seed is None:
            # Drawn here, so that the figures can name it.
            seed = choose_seed(None)
        with _prefill_progress() as progress:
            responses = stream_generate(
                lm,
                tokenizer,
                ids,
                max_tokens=max_tokens,
                draft_model=draft,
                block_size=block_size,
                copy=copy,
                seed=seed,
                sampler=sampler,
                prefill_step_size=prefill_step_size,
                max_kv_size=max_kv_size,
                kv_bits=kv_bits,
                kv_group_size=kv_group_size,
                prompt_progress_callback=progress,
            )
            show = _nothing if as_json else _draft_marker(tokenizer, stdout) if show_drafts else _plain_text(stdout)
            result = _run(_until(responses, stop) if stop else responses, show) | {"seed": seed}
        if as_json:
            print(json.dumps({**result, "model": target, "draft_model": drafter}), file=stdout)
        else:
            print(file=stdout, flush=True)
        _say(_figures(result))
    if result["finish_reason"] == "interrupted":
        raise SystemExit(130)


@app.command()
def convert(
    hf_path: Annotated[str, typer.Option("--hf-path", help="Target or drafter: a directory, a GGUF file or a hub repo.")],
    mlx_path: Annotated[str, typer.Option(help="Directory to write.")] = "mlx_model",
    quantize: Annotated[bool, typer.Option("--quantize", "-q", help="Quantize the matrices.")] = False,
    q_bits: Annotated[int, typer.Option(help="Bits per weight: 2, 3, 4, 5, 6 or 8.")] = 4,
    q_group_size: Annotated[int, typer.Option(help="Inputs that share a scale: 32, 64 or 128.")] = 64,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of what stays float. Default: as in the checkpoint.")] = None,
    quant_predicate: Annotated[str | None, typer.Option(help="One of mlx-lm's mixed recipes, such as mixed_4_6.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub repo.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing directory.")] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Let code that comes with the checkpoint run.")] = False,
) -> None:
    """Convert a target or a drafter to an MLX directory, compare it with its source, and record what was done."""
    with _only_ours_on_stdout(), _status(f"Converting {hf_path} ..."):
        from ..conversion import convert as convert_checkpoint

        done = convert_checkpoint(
            hf_path,
            mlx_path,
            quantize=quantize,
            q_group_size=q_group_size,
            q_bits=q_bits,
            dtype=dtype.value if dtype else None,
            revision=revision,
            quant_predicate=quant_predicate,
            trust_remote_code=trust_remote_code,
            force=force,
        )
    for note in done.notes:
        _say(f"Note: {note}.")
    _say(done.summary())


@app.command()
def chat(
    model: Annotated[str | None, typer.Option(help="Target, as in generate. Default: the built-in pair.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="DFlash drafter for --model, or 'auto'.")] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat template.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-m", min=1, help="Most tokens of one answer. Default: 1024.")
    ] = None,
    temp: Annotated[float | None, typer.Option(min=0, help="Sampling temperature; 0, the default, is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample among the k likeliest tokens.")] = None,
    min_p: Annotated[float | None, typer.Option(min=0, max=1, help="Least probability relative to the top token's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=(1 << 32) - 1, help="Noise of sampling.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Slots drafted a round, the anchor included.")] = None,
    thinking: Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="The template's enable_thinking.")] = None,
    session: Annotated[
        str | None, typer.Option(help="Continue and keep the session of this name; 'last' is where the last chat was left.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Answers as they are, not drawn as Markdown.")] = False,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of activations, as in generate.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub repos.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Let code that comes with a tokenizer run.")] = False,
) -> None:
    """Talk to a model: turns reuse what is computed, Ctrl-C stops an answer, Ctrl-D leaves. /help lists the commands."""
    if draft_model and not model:
        raise typer.BadParameter("it needs --model, the target it was trained for", param_hint="--draft-model")
    if block_size is not None and model and not draft_model:
        raise typer.BadParameter("it needs a drafter", param_hint="--block-size")
    from ..serving.chat import Chat, Conversation, Pair, Settings, read_session, session_path

    def load(name: str | None, drafter: str | None) -> Pair:
        with _only_ours_on_stdout():
            return Pair(*_load_pair(name, drafter, dtype, revision, trust_remote_code))

    given = {
        "temp": temp,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "max_tokens": max_tokens,
        "block_size": block_size,
        "thinking": thinking,
    }
    given = {name: value for name, value in given.items() if value is not None}
    # A file that cannot be continued is found before the models are loaded.
    state = read_session(session) if session and session_path(session).exists() else None
    if state and model is None:
        model, draft_model = state["model"], state["draft_model"]
    conversation = Conversation(load(model, draft_model), Settings(**given), system)
    if state:
        conversation.restore(state, given)
        conversation.system = system or conversation.system
    room = Chat(conversation, load, _draft_marker, session=session or ("last" if sys.stdin.isatty() else None), plain=plain)
    room.run()
    if room.failed and not room.interactive:
        raise SystemExit(1)


@app.command()
def serve(
    model: Annotated[str | None, typer.Option(help="Target, as in generate. Default: the built-in pair.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="DFlash drafter for --model, or 'auto'.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any free one.")] = 8080,
    api_key: Annotated[str | None, typer.Option(envvar="DFLASH_API_KEY", help="Key that clients must send.")] = None,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Largest request in MB (1e6 bytes).")] = 8.0,
    allowed_origins: Annotated[str, typer.Option(help="Web pages that may send requests, comma-separated; '*': all.")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Tokens of an answer unless asked.")] = 512,
    temp: Annotated[float, typer.Option(min=0, help="Temperature unless asked; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Nucleus sampling unless asked.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Top-k unless asked.")] = 0,
    min_p: Annotated[float, typer.Option(min=0, max=1, help="Min-p unless asked.")] = 0.0,
    block_size: Annotated[int | None, typer.Option(min=1, help="Slots drafted a round, the anchor included.")] = None,
    chat_template_args: Annotated[str, typer.Option(help="JSON object, such as '{\"enable_thinking\": false}'.")] = "{}",
    prefill_step_size: Annotated[int, typer.Option(min=1, help="Prompt tokens per prefill pass.")] = 2048,
    prompt_cache_size: Annotated[int, typer.Option(min=1, help="Prompt caches kept across requests.")] = 10,
    prompt_cache_gb: Annotated[
        float | None, typer.Option(min=0, help="Most memory of the kept caches in GB (1e9 bytes).")
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of activations, as in generate.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub repos.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Let code that comes with a tokenizer run.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log every request on stderr.")] = False,
) -> None:
    """Serve OpenAI's chat and text completions. Requests run one at a time in the order in which they come."""
    if draft_model and not model:
        raise typer.BadParameter("it needs --model, the target it was trained for", param_hint="--draft-model")
    if block_size is not None and model and not draft_model:
        raise typer.BadParameter("it needs a drafter", param_hint="--block-size")
    try:
        template_args = json.loads(chat_template_args)
    except ValueError:
        template_args = None
    if not isinstance(template_args, dict):
        raise typer.BadParameter("give a JSON object", param_hint="--chat-template-args")
    import logging

    from ..sampling_settings import SamplingSettings
    from ..serving.app import Options
    from ..serving.app import serve as run

    form = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format=form)
    options = Options(
        host=host,
        port=port,
        api_key=api_key or None,
        max_body_bytes=int(max_body_mb * 1e6),
        allowed_origins=[origin for origin in allowed_origins.split(",") if origin],
        max_tokens=max_tokens,
        sampling=SamplingSettings(temp=temp, top_p=top_p, top_k=top_k, min_p=min_p),
        block_size=block_size,
        chat_template_args=template_args,
        prefill_step_size=prefill_step_size,
        prompt_cache_size=prompt_cache_size,
        prompt_cache_bytes=int(prompt_cache_gb * 1e9) if prompt_cache_gb is not None else None,
    )
    with _only_ours_on_stdout():
        run(options, lambda: _load_pair(model, draft_model, dtype, revision, trust_remote_code), _say)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(help="Target, as in generate. Default: the built-in pair.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="DFlash drafter, for --model or alone.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of activations, as in generate.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub repos.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")] = False,
) -> None:
    """Show what is read from a target, a drafter or a pair, test both, and name what is wrong. Exit status 1 on a fault."""
    with _only_ours_on_stdout() as stdout, _status("Looking ..."):
        from ..pairs.builtin import DEFAULT_PAIR
        from ..tools.doctor import diagnose, render

        if model is None and draft_model is None:
            model = draft_model = DEFAULT_PAIR
        report = diagnose(model, draft_model, dtype.value if dtype else None, revision)
        print(json.dumps(report) if as_json else render(report), file=stdout)
    if report["faults"]:
        raise SystemExit(1)


@app.command()
def bench(
    model: Annotated[str | None, typer.Option(help="Target, as in generate. Default: the built-in pair.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="DFlash drafter for --model, or 'auto'.")] = None,
    kinds: Annotated[str | None, typer.Option(help="Kinds of prompts, comma-separated. Default: all.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help='Your own prompts: a file of {"prompt": ..., "kind": ...} lines, or of plain ones.')
    ] = None,
    temp: Annotated[list[float] | None, typer.Option(min=0, help="Temperature; may be given again. Default: 0 and 1.")] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Tokens of text before each prompt; may be given again. Default: 0, on a GPU also 1024."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=2, help="Most tokens of one answer.")] = 128,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1, help="Answers of each side in every cell; each takes the next prompt. Default: 3, or all of --prompts."
        ),
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Fix the slots a round. Default: as generate does.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 31) - 1, help="Noise of sampling, and text of long contexts.")] = 0,
    out: Annotated[str | None, typer.Option(help="Write a JSON record here; it is up to date after every trial.")] = None,
    plot: Annotated[str | None, typer.Option(help="Draw speed-up by kind into this PNG (needs matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record and nothing else on stdout.")] = False,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(help="Run nothing; show two records beside each other.", metavar="A.json B.json")
    ] = None,
    max_seconds: Annotated[float | None, typer.Option(min=0, help="Begin no pair that would end later than this.")] = None,
    kernels: Annotated[
        str | None, typer.Option(help="Our kernels: off, on or names (as DFLASH_MLX_KERNELS). The record says what was found.")
    ] = None,
    hopeless: Annotated[
        bool, typer.Option("--hopeless", help="Spoil every draft: what speculation costs where it never pays.")
    ] = False,
    dense: Annotated[bool, typer.Option("--dense", help="Write quantized layers of both models out first.")] = False,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of activations, as in generate.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub repos.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Let code that comes with a tokenizer run.")] = False,
) -> None:
    """Time mlx-lm's own decoding and DFlash by turns on the same prompts, and check that they say the same.

    Ctrl-C ends it with what is measured. On a CUDA GPU the kernels of quantized models are compiled at first use, which takes
    minutes; that falls into the cold runs and the warm-up, which are not counted.
    """
    if draft_model and not model:
        raise typer.BadParameter("it needs --model, the target it was trained for", param_hint="--draft-model")
    if model and not draft_model and not compare:
        raise typer.BadParameter("it needs --draft-model (or 'auto'): there is nothing to compare without", param_hint="--model")
    with _only_ours_on_stdout() as stdout:
        from ..tools import bench as b

        if compare:
            print(b.compare(*(b.read_record(path) for path in compare)), file=stdout)
            return
        if plot:
            b.check_plot()
        if kernels:
            from ..kernels.autotune import VARIABLE, setting

            os.environ[VARIABLE] = kernels
            setting()
        target, drafter, lm, tokenizer, draft = _load_pair(model, draft_model, dtype, revision, trust_remote_code)
        if dense:
            from ..loading import activation_dtype, load_drafter
            from ..train.trainer import dense as write_out

            type_ = activation_dtype(lm)
            lm = write_out(lm, type_)
            draft = write_out(load_drafter(drafter, lm, revision=revision), type_)
        own = b.read_prompts(prompts, tokenizer.has_chat_template) if prompts else None
        plan = b.Plan(
            kinds=tuple(kind.strip() for kind in kinds.split(",")) if kinds else (),
            temps=tuple(dict.fromkeys(temp)) if temp else b.Plan.temps,
            # On a CPU a prompt of 1,024 tokens can take a minute.
            contexts=tuple(dict.fromkeys(context or ([0] if own or b.machine()["device"] == "cpu" else [0, 1024]))),
            max_tokens=max_tokens,
            trials=trials or (max(map(len, own.kinds.values())) if own else b.Plan.trials),
            block_size=block_size,
            seed=seed,
            hopeless=hopeless,
        )
        keep = (lambda record: b.write_record(record, out)) if out else (lambda record: None)
        record = b.Bench(lm, tokenizer, draft, plan, own, (target, drafter), _say, keep, max_seconds).go()
        print(json.dumps(record) if as_json else b.table(record), file=stdout)
        if plot:
            b.plot(record, plot)
    if record["ended"] == "interrupted":
        raise SystemExit(130)
    if b.faults(record):
        raise SystemExit(1)


@train_app.command("data")
def train_data(
    model: Annotated[str, typer.Option(help="Target, as in generate.")],
    out: Annotated[str, typer.Option(help="Folder for the text; a folder made with the same settings is continued.")],
    minutes: Annotated[float | None, typer.Option(min=0, help="How long to write; the held-out part comes on top.")] = None,
    answer_tokens: Annotated[int | None, typer.Option(min=1, help="How much to write, counted in answer tokens.")] = None,
    prompts: Annotated[str | None, typer.Option(help="JSONL of prompts to answer; default: self-made questions.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Conversations written at once; 2048 suits a large GPU.")] = 256,
    max_len: Annotated[int, typer.Option(min=64, help="Longest conversation in tokens.")] = 512,
    greedy: Annotated[float, typer.Option(min=0, max=1, help="Share answered greedily; the rest at 0.7 and 1.")] = 0.8,
    held_out: Annotated[int, typer.Option(min=1, help="Held-out questions a kind, for eval.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other text.")] = 0,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of activations, as in generate.")] = None,
    dense: Annotated[bool | None, typer.Option(help="Write quantized layers out first. Default: on CUDA.")] = None,
) -> None:
    """Let the target write its own training text: fresh text is what decides how good the drafter gets."""
    with _only_ours_on_stdout():
        from ..train.data import DataConfig, make_data

        target, tokenizer = _load_for_training(model, dtype, dense)
        config = DataConfig(rows=rows, max_len=max_len, greedy=greedy, held_out_per_kind=held_out, seed=seed)
        seconds = minutes * 60 if minutes else None
        done = make_data(target, tokenizer, out, config, answer_tokens, seconds, prompts, _say)
    _say(f"{done['conversations']} conversations, {done['answer_tokens']} answer tokens ({done['answer_tps']:.0f}/s) in {out}")


@train_app.command("run")
def train_run(
    model: Annotated[str, typer.Option(help="Target, as in generate.")],
    data: Annotated[list[str], typer.Option(help="Folder that train data wrote; may be given again.")],
    out: Annotated[str, typer.Option(help="Folder for the drafter; a stopped run of the same settings is continued.")],
    minutes: Annotated[float | None, typer.Option(min=0, help="How long to train.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="How many steps to train.")] = None,
    init: Annotated[str | None, typer.Option(help="Drafter to start from, as generate takes it.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of a new drafter.")] = 5,
    block_size: Annotated[int, typer.Option(min=2, help="Slots of a block, the anchor included.")] = 16,
    taps: Annotated[str | None, typer.Option(help="Tapped target layers, such as 1,8,14. Default: five, evenly.")] = None,
    mask_token_id: Annotated[int | None, typer.Option(min=0, help="Default: an unused special token.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Conversations a pass.")] = 24,
    anchors: Annotated[int, typer.Option(min=1, help="Blocks a conversation.")] = 96,
    accumulate: Annotated[int, typer.Option(min=1, help="Passes a step.")] = 1,
    max_len: Annotated[int, typer.Option(min=64, help="Conversations are cut to this many tokens.")] = 512,
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 1e-3,
    loss: Annotated[str, typer.Option(help="decay (the paper's weights) or dpace.")] = "dpace",
    pause_minutes: Annotated[float | None, typer.Option(min=0, help="Save and stop after this long, to go on later.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of the target's activations, as in generate.")] = None,
    dense: Annotated[bool | None, typer.Option(help="Write quantized layers out first. Default: on CUDA.")] = None,
) -> None:
    """Train a drafter on a target's own text."""
    with _only_ours_on_stdout():
        from pathlib import Path

        import numpy as np

        from ..conversion import load_drafter_weights
        from ..pairs.builtin import builtin_path
        from ..train.data import load_docs
        from ..train.trainer import TrainConfig, drafter_config, mask_token, target_shape, train

        target, tokenizer = _load_for_training(model, dtype, dense)
        docs = load_docs(*data)
        held = [folder for folder in data if (Path(folder) / "heldout.npz").exists()]
        held_out = load_docs(*held, names="heldout.npz") if held else None
        if held_out is None:
            lacking = ", ".join(data)
            _say(f"{lacking}: no held-out text, so tau is not measured. The same `train data` command writes what is missing.")
        if init is not None:
            init = str(builtin_path(init, "drafter") or init)
            raw, _ = load_drafter_weights(init)
        else:
            V = target_shape(target).get("vocab_size") or len(tokenizer)
            mask = mask_token_id if mask_token_id is not None else mask_token(tokenizer, V, set(np.unique(docs.ids).tolist()))
            chosen = [int(t) for t in taps.split(",")] if taps else None
            raw = drafter_config(target, mask, layers, block_size, chosen)
        config = TrainConfig(
            steps=steps, seconds=minutes * 60 if minutes else None, batch=batch, anchors=anchors, accumulate=accumulate,
            max_len=max_len, lr=lr, loss=loss, seed=seed,
        )  # fmt: skip
        pause_s = pause_minutes * 60 if pause_minutes else None
        train(target, docs.pick(docs.split == 0), out, raw, config, held_out, init, pause_s=pause_s, report=_say)
    _say(f"The drafter is in {out}: dflash-mlx generate --model {model} --draft-model {out}")


@train_app.command("eval")
def train_eval(
    model: Annotated[str, typer.Option(help="Target, as in generate.")],
    draft_model: Annotated[str, typer.Option(help="Drafter trained for it.")],
    data: Annotated[list[str], typer.Option(help="Folder that train data wrote, with its held-out text; may be given again.")],
    block_size: Annotated[list[int] | None, typer.Option(min=2, help="Block sizes; may be given again.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most held-out answers.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of activations, as in generate.")] = None,
    dense: Annotated[bool | None, typer.Option(help="Write quantized layers out first. Default: on CUDA.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")] = False,
) -> None:
    """Measure tau on held-out text by replaying its rounds, beside three simpler sources of drafts."""
    with _only_ours_on_stdout() as stdout:
        import numpy as np

        from ..loading import load_drafter
        from ..models.target import Target
        from ..train.data import load_docs
        from ..train.offline_tau import evaluate

        target, _ = _load_for_training(model, dtype, dense)
        drafter = load_drafter(draft_model, target)
        held_out = load_docs(*data, names="heldout.npz")
        if limit is not None and limit < len(held_out):
            held_out = held_out.pick(np.linspace(0, len(held_out) - 1, limit).astype(int))
        taps = Target(target, drafter.config.target_layer_ids)
        rows = evaluate(drafter, taps, held_out, load_docs(*data), block_size or [drafter.config.block_size])
        if as_json:
            print(json.dumps({"tau": rows, "model": model, "draft_model": draft_model}), file=stdout)
            return
        print("temp block loops kind     answers  drafter  zeroed  lookup  bigram", file=stdout)
        for r in rows:
            loops = "yes" if r["looped"] else "no"
            taus = "".join(f"{r[name]:8.3f}" for name in ("drafter", "zeroed", "lookup", "bigram"))
            print(f"{r['temp']:4g} {r['block_size']:5} {loops:>5} {r['kind']:8} {r['answers']:7} {taus}", file=stdout)
    _say("tau: mean of accepted + 1 over verify rounds, before any cut at EOS; answers that fell into a loop stand apart.")


def _load_for_training(model: str, dtype: Dtype | None, dense: bool | None) -> tuple[Any, Any]:
    """The target and its tokenizer; on CUDA with quantized layers written out, whose kernels take minutes to compile there."""
    import mlx.core as mx

    from ..loading import activation_dtype, load

    target, tokenizer = load(model, dtype=dtype.value if dtype else None)
    if dense or (dense is None and mx.default_device() != mx.cpu and not mx.metal.is_available()):
        from ..train.trainer import dense as write_out

        target = write_out(target, activation_dtype(target) if dtype else mx.float16)
    return target, tokenizer


@app.command()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list and nothing else on stdout.")] = False,
) -> None:
    """List the built-in pairs and the published drafters that --draft-model auto knows, with sizes."""
    from ..pairs.builtin import BUILTIN_PAIRS, DEFAULT_PAIR, builtin_path
    from ..pairs.published import PUBLISHED

    rows = []
    for name, pair in BUILTIN_PAIRS.items():
        drafter = builtin_path(name, "drafter")
        size = sum(f.stat().st_size for f in drafter.glob("*.safetensors")) / 1e9 if drafter else None
        note = pair.about + (" (default)" if name == DEFAULT_PAIR else "")
        rows.append({"target": name, "draft_model": name if drafter else None, "size_gb": size, "built_in": True, "note": note})
    rows += [
        {"target": p.target, "draft_model": p.repo, "size_gb": p.size_gb, "built_in": False, "note": p.note} for p in PUBLISHED
    ]
    if as_json:
        print(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for heading in ("target", "drafter", "drafter GB"):
        table.add_column(heading, no_wrap=True)
    table.add_column("note")
    for row in rows:
        size = "" if row["size_gb"] is None else f"{row['size_gb']:.3g}"
        table.add_row(row["target"], row["draft_model"] or "", size, row["note"])
    console = Console()
    # Names stay whole in a pipe too.
    (console if console.is_terminal else Console(width=200)).print(table)


def _standard_input() -> str:
    """All of standard input, unchanged.

    Raises:
      DFlashError: if it is not UTF-8.
    """
    return _utf8(sys.stdin.buffer.read(), "on standard input")


def _file_text(name: str) -> str:
    """All of a file, unchanged; errors as in `_standard_input`, and OSError."""
    with open(os.path.expanduser(name), "rb") as file:
        return _utf8(file.read(), f"in {name}")


def _utf8(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DFlashError(
            f"expected UTF-8 text {where}; found byte 0x{data[error.start]:02x} at {error.start}. Convert it first."
        ) from None


def _check_revision(revision: str | None, *names: str | None) -> None:
    """Refuse --revision where no name is a hub repo, so that it is never dropped in silence."""
    from ..pairs import builtin

    local = [n for n in names if n and (n in builtin.BUILTIN_PAIRS or os.path.exists(os.path.expanduser(n)))]
    if revision and len(local) == sum(n is not None for n in names):
        raise DFlashError(
            f"expected a hub repo for --revision {revision}; found {' and '.join(dict.fromkeys(local))}. Leave --revision out."
        )


@contextlib.contextmanager
def _only_ours_on_stdout() -> Iterator[Any]:
    """Hand out the real stdout and send everything that libraries print to stderr meanwhile."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield stdout


def _choose_pair(model: str | None, draft_model: str | None) -> tuple[str, str | None]:
    """Names of target and drafter (None: plain decoding), with what was chosen for the user said on stderr."""
    from ..pairs import builtin
    from ..pairs.published import published_drafter

    if model is None:
        return builtin.DEFAULT_PAIR, builtin.DEFAULT_PAIR
    if draft_model is None:
        return model, None
    if draft_model != "auto":
        return model, draft_model
    if builtin.builtin_path(model, "drafter") is not None:
        _say(f"Drafter: {model} (built-in).")
        return model, model
    found = published_drafter(model)
    if found is None:
        raise DFlashError(
            f"expected a target with a known drafter for --draft-model auto; found {model}. `dflash-mlx models` lists them: "
            "name a drafter's directory or repo, or train one."
        )
    _say(f"Drafter: {found.repo}, published for {found.target}{f' ({found.note})' if found.note else ''}.")
    return model, found.repo


def _load_pair(
    model: str | None, draft_model: str | None, dtype: Dtype | None, revision: str | None, trust_remote_code: bool
) -> tuple[str, str | None, Any, Any, Any]:
    """Names of target and drafter, then target, tokenizer and drafter (None: plain decoding)."""

    from .. import loading, traced
    from ..kernels import autotune
    from ..pairs import builtin

    # What the environment asks for and is not known is said before anything is loaded.
    traced.setting()
    autotune.setting()
    target, drafter = _choose_pair(model, draft_model)
    _check_revision(revision, target, drafter)
    builtin.builtin_path(target, "target", say=_say)
    with _status(f"Loading {target} ..."):
        lm, tokenizer = loading.load(
            target, dtype=dtype.value if dtype else None, revision=revision, trust_remote_code=trust_remote_code
        )
        draft = loading.load_drafter(drafter, lm, revision=revision) if drafter else None
    if draft is None:
        _say("No --draft-model: plain decoding.")
    return target, drafter, lm, tokenizer, draft


def _encode_prompt(tokenizer: Any, prompt: str, system: str | None, raw: bool, thinking: bool | None = None) -> list[int] | str:
    """Through the chat template unless --raw; a tokenizer without one gets the text as it is, and says so."""
    if raw:
        return prompt
    if not tokenizer.has_chat_template:
        if system is not None:
            raise DFlashError("expected a chat template for --system; this tokenizer has none. Leave --system out.")
        if thinking is not None:
            raise DFlashError("expected a chat template for --thinking; this tokenizer has none. Leave it out.")
        _say("This tokenizer has no chat template: the prompt is used as it is.")
        return prompt
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    extra = {} if thinking is None else {"enable_thinking": thinking}
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, **extra)


def _until(responses: Iterator[Any], words: list[str]) -> Iterator[Any]:
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


@contextlib.contextmanager
def _status(text: str) -> Iterator[None]:
    """A spinner on stderr while something loads; nothing when stderr is not a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _prefill_progress() -> Iterator[Any]:
    """A progress bar over prompt tokens on stderr; it leaves when the prompt is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("prompt"), BarColumn(), TextColumn("{task.completed}/{task.total} tokens"))
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("prompt", total=None)

    def update(done: int, total: int) -> None:
        if done < total:
            bar.update(task, completed=done, total=total)
            bar.start()
        else:
            bar.stop()

    try:
        yield update
    finally:
        bar.stop()


def _run(responses: Iterator[Any], show: Any) -> dict[str, Any]:
    """Drain a generation, showing each response, into the fields of --json. Ctrl-C ends it with what there is."""
    text, ids, last, reason = [], [], None, None
    try:
        for last in responses:
            text.append(last.text)
            ids.append(last.token)
            show(last)
        reason = last.finish_reason
    except KeyboardInterrupt:
        reason = "interrupted"
    finally:
        responses.close()
    stats = last.stats if last else None
    none = {
        "acceptance_lengths": [],
        "rounds": [],
        "tau": None,
        "widths": {},
        "confidence_cut": {},
        "sources": {},
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


def _figures(result: dict[str, Any]) -> str:
    """The lines under an answer."""
    if result["prompt_tokens"] is None:
        return "Interrupted before the first token."
    lines = [
        f"Prompt: {result['prompt_tokens']} tokens, {result['prompt_tps']:.1f} tokens/s",
        f"Generation: {result['generation_tokens']} tokens, {result['generation_tps']:.1f} tokens/s, "
        f"ended by {result['finish_reason']}; peak memory {result['peak_memory_gb']:.2f} GB",
    ]
    if result["tau"] is not None:
        lengths = result["acceptance_lengths"]
        counts = ", ".join(f"{n - 1}: {lengths.count(n)}" for n in sorted(set(lengths)))
        lines.append(
            f"Acceptance: tau {result['tau']:.2f} (mean of accepted + 1 over {len(lengths)} rounds; accepted: rounds {counts})"
        )
        if (copied := result["sources"]["copy"])["rounds"]:
            lines.append(f"Copied from the text: {copied['accepted']} tokens in {copied['rounds']} of these rounds.")
    elif result["widths"]:
        lines.append("Acceptance: no draft was verified, so there is no tau.")
    if result["width_reason"]:
        lines.append(f"Widths: {result['width_reason']}.")
    if result["seed"] is not None:
        lines.append(f"Seed: {result['seed']}")
    return "\n".join(lines)


def _nothing(response: Any) -> None:
    pass


def _plain_text(stdout: Any) -> Any:
    def show(response: Any) -> None:
        stdout.write(response.text)
        stdout.flush()

    return show


def _draft_marker(tokenizer: Any, stdout: Any) -> Any:
    """Accepted tokens green, rejected ones red and struck through, bonus tokens yellow; without colours, in word-diff marks."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stdout, highlight=False, soft_wrap=True)
    coloured = console.color_system is not None
    styles = {"accepted": ("green", "{}"), "rejected": ("red strike", "[-{}-]"), "bonus": ("bold yellow", "{{+{}+}}")}
    seen = 0

    def put(text: str, kind: str | None) -> None:
        style, marks = styles.get(kind, ("", "{}"))
        if text:
            console.print(Text(text, style) if coloured else Text(marks.format(text)), end="")

    def show(response: Any) -> None:
        nonlocal seen
        if response.from_draft:
            put(response.text, "accepted")
            return
        rounds = response.stats.rounds
        if len(rounds) == seen:
            put(response.text, None)
            return
        seen = len(rounds)
        last = rounds[-1]
        rejected = tokenizer.decode(last["drafted"][last["accepted"] : last["width"]])
        put(rejected.replace("\n", "\u21b5"), "rejected")
        put(response.text, "bonus")

    return show


if __name__ == "__main__":
    main()
