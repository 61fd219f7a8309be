"""`dflash-mlx convert`, `doctor` and `bench`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from enum import StrEnum
from types import SimpleNamespace
from typing import Annotated, Any

from ..serving.interrupt import insistent
from . import inputs
from .live import live
from .options import (
    DRAFTING,
    MODEL,
    OUTPUT,
    AdapterPath,
    AsJson,
    BlockSize,
    DraftBits,
    DraftBitsOption,
    DraftModel,
    Dtype,
    DtypeOption,
    LastTap,
    MaxTokens,
    Model,
    Revision,
    TrustRemoteCode,
    drafter_name,
    has_no_drafter,
    option,
    refuse,
    refuse_lonely_drafter,
    refuse_without_effect,
    sampling_options,
)
from .output import columns_of, only_ours_on_stdout, say, wrapped

QuantizationMode = StrEnum("QuantizationMode", ["affine", "mxfp4", "nvfp4", "mxfp8"])

Layout = StrEnum("Layout", ["mlx", "gguf"])

QUANTIZING, PLAN = "Quantizing", "What is measured"


To = Annotated[
    Layout | None,
    option(
        OUTPUT,
        metavar="<layout>",
        help="mlx, or gguf: a drafter as drafter.gguf for llama.cpp; -q is then Q4_0 or Q8_0. Default: mlx.",
    ),
]
# Its names in mlx-lm's converter.
HF_PATH = ("--hf-path", "--model")
Vocab = Annotated[str | None, option(OUTPUT, metavar="FILE", help="GGUF file of the target, whose vocabulary llama.cpp wants.")]


def convert(
    hf_path: Annotated[
        str,
        option(
            MODEL,
            *HF_PATH,
            help="Model or drafter to convert: a Hugging Face repo, a directory, a GGUF file or a built-in name.",
        ),
    ],
    mlx_path: Annotated[str, option(OUTPUT, help="Directory to write.")] = "mlx_model",
    quantize: Annotated[bool, option(QUANTIZING, "--quantize", "-q", help="Quantize the weight matrices.")] = False,
    q_bits: Annotated[int | None, option(QUANTIZING, help="Bits per weight: 2, 3, 4, 5, 6 or 8. Default: 4.")] = None,
    q_group_size: Annotated[int | None, option(QUANTIZING, help="Quantization group size: 32, 64 or 128. Default: 64.")] = None,
    dtype: Annotated[
        Dtype | None,
        option(
            QUANTIZING,
            metavar="<type>",
            help="Number type of weights that are not quantized: float32, float16, bfloat16 or auto. Default: the file's.",
        ),
    ] = None,
    q_mode: Annotated[
        QuantizationMode | None,
        option(
            QUANTIZING,
            metavar="<mode>",
            help="Quantization mode of MLX: affine, mxfp4, nvfp4 or mxfp8. Default: affine; the others fix bits and group size.",
        ),
    ] = None,
    dequantize: Annotated[
        bool, option(QUANTIZING, "--dequantize", "-d", help="Turn quantized weights back into floats.")
    ] = False,
    quant_predicate: Annotated[
        str | None, option(QUANTIZING, help="One of mlx-lm's mixed-bit recipes, such as mixed_4_6.")
    ] = None,
    to: To = None,
    vocab: Vocab = None,
    revision: Revision = None,
    force: Annotated[bool, option(OUTPUT, "--force", help="Replace an existing directory.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Convert a model or a drafter to an MLX directory, and compare the result with its source."""
    if not quantize:
        _refuse_bits({"--q-bits": q_bits, "--q-group-size": q_group_size, "--q-mode": q_mode})
    _refuse_vain(q_bits, quant_predicate, to, vocab)
    with only_ours_on_stdout(), live(f"Converting {hf_path}"):
        from ..conversion import convert as convert_checkpoint
        from ..pairs import builtin

        inputs.check_revision(revision, hf_path)
        done = convert_checkpoint(
            str(builtin.builtin_path(hf_path, "target", say=say) or hf_path),
            mlx_path,
            quantize=quantize,
            q_group_size=q_group_size,
            q_bits=q_bits,
            dtype=dtype.value if dtype else None,
            revision=revision,
            quant_predicate=quant_predicate,
            trust_remote_code=trust_remote_code,
            force=force,
            q_mode=q_mode.value if q_mode else "affine",
            dequantize=dequantize,
            to=to.value if to else "mlx",
            vocab=vocab,
        )
    for note in done.notes:
        say(f"Note: {note}.")
    say(done.summary())


def _refuse_bits(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise refuse(name, "it has no effect without --quantize")


def _refuse_vain(q_bits: int | None, quant_predicate: str | None, to: Layout | None, vocab: str | None) -> None:
    if q_bits is not None and quant_predicate:
        raise refuse("--q-bits", "it has no effect with --quant-predicate, whose recipe sets the bits")
    if vocab is not None and to != Layout.gguf:
        raise refuse("--vocab", "it has no effect without --to gguf")


def doctor(
    model: Model = None,
    adapter_path: AdapterPath = None,
    draft_model: Annotated[
        str | None, option(DRAFTING, callback=drafter_name, help="DFlash drafter to check, with --model or alone.")
    ] = None,
    dtype: DtypeOption = None,
    draft_bits: DraftBitsOption = None,
    last_tap: LastTap = None,
    revision: Revision = None,
    report: Annotated[
        str | None,
        option(
            OUTPUT,
            metavar="FILE",
            help="Measure kernels and built-in pairs on this machine (5 minutes at most) and write a report to send to us.",
        ),
    ] = None,
    exact: Annotated[
        bool,
        option(
            OUTPUT,
            "--exact",
            help="Also compare one row alone with the same row among 2, 4, 8 and 16, and name the operations that differ.",
        ),
    ] = False,
    details: Annotated[
        bool, option(OUTPUT, "--details", help="Also show how each key of the drafter's config was read.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine, a model and its drafter, and say what is wrong. Exit status 1 on a fault."""
    if report is not None:
        given = {"model": model, "adapter_path": adapter_path, "draft_model": draft_model, "dtype": dtype}
        given |= {"exact": exact or None, "details": details or None}
        _report(report, as_json, **given, draft_bits=draft_bits, last_tap=last_tap, revision=revision)
        return
    with only_ours_on_stdout() as stdout, live("Starting") as line:
        with insistent():
            from ..pairs.builtin import DEFAULT_PAIR
            from ..tools.doctor import diagnose, render

        if draft_model == "none":
            model, draft_model = model or DEFAULT_PAIR, None
        elif model is None and draft_model is None:
            model = draft_model = DEFAULT_PAIR
        for name, value in (("--draft-bits", draft_bits), ("--last-tap", last_tap)):
            if value and draft_model is None:
                raise refuse(name, "it needs a drafter")
        if adapter_path and model is None:
            raise refuse("--adapter-path", "it needs --model")
        if draft_model == "auto":
            if model is None:
                raise refuse("--draft-model", "'auto' needs --model")
            model, draft_model = inputs.choose_pair(model, draft_model)
        inputs.check_revision(revision, model, draft_model)
        if exact and model is None:
            raise refuse("--exact", "it needs --model")
        how = {"draft_bits": draft_bits, "adapter_path": adapter_path, "last_tap": last_tap, "exact": exact}
        found = diagnose(model, draft_model, dtype.value if dtype else None, revision, **how)
        line.stop()
        print(json.dumps(found) if as_json else wrapped(render(found, details), stdout, indent=12), file=stdout)
    if found["faults"]:
        raise SystemExit(1)


def _report(path: str, as_json: bool, **others: Any) -> None:
    """`doctor --report`: a file to send. It is about the machine, so what names a model has no effect and is refused."""
    for name, value in others.items():
        if value is not None:
            raise refuse(f"--{name.replace('_', '-')}", "it has no effect with --report, which runs the built-in pairs")
    with only_ours_on_stdout() as stdout:
        from ..tools.report import BUDGET_S, make_report, summary

        say(f"Measuring for at most {BUDGET_S / 60:.0f} minutes; Ctrl-C ends it and keeps what is measured.")
        with live("Measuring"):
            record = make_report(path, say)
        print(json.dumps(record) if as_json else wrapped("\n".join(summary(record, path)), stdout), file=stdout)
    if record["ended"] == "interrupted":
        raise SystemExit(130)


BatchRows = Annotated[
    str | None,
    option(
        PLAN, help="Time several requests at once: their numbers, comma-separated, such as 1,4,8. --temp is then 0 by default."
    ),
]
BenchExact = Annotated[
    bool, option(DRAFTING, "--exact", help="Draft as generate --exact does, and compare with its text without a drafter.")
]


@sampling_options(leave_out=("temp", "seed"))
def bench(
    model: Model = None,
    adapter_path: AdapterPath = None,
    kinds: Annotated[str | None, option(PLAN, help="Kinds of prompts, comma-separated. Default: all.")] = None,
    prompts: Annotated[
        str | None,
        option(
            PLAN, help='Your own prompts: a file with one {"prompt": ..., "kind": ...} per line, or one plain prompt per line.'
        ),
    ] = None,
    temp: Annotated[list[float] | None, option(PLAN, min=0, help="Temperature; can be repeated. Default: 0 and 1.")] = None,
    sampling: Any = None,
    draft_model: DraftModel = None,
    context: Annotated[
        list[int] | None,
        option(PLAN, min=0, help="Tokens of text before each prompt; can be repeated. Default: 0, on a GPU also 1024."),
    ] = None,
    max_tokens: MaxTokens = None,
    trials: Annotated[
        int | None,
        option(PLAN, min=1, help="Answers per kind and temperature on each side. Default: 3, or all of --prompts."),
    ] = None,
    batch: BatchRows = None,
    block_size: BlockSize = None,
    exact: BenchExact = False,
    seed: Annotated[int | None, option(PLAN, help="Seed of sampling and of the text of long contexts. Default: 0.")] = None,
    out: Annotated[str | None, option(OUTPUT, help="Write the results to this JSON file as they come.")] = None,
    plot: Annotated[str | None, option(OUTPUT, help="Plot the speed-up by kind to this PNG (needs matplotlib).")] = None,
    html: Annotated[str | None, option(OUTPUT, help="Write figures and charts to this HTML page (works offline).")] = None,
    as_json: AsJson = False,
    compare: Annotated[
        tuple[str, str] | None,
        option(OUTPUT, help="Run nothing; compare two result files.", metavar="A.json B.json"),
    ] = None,
    max_seconds: Annotated[float | None, option(PLAN, min=0, help="Stop early enough to end within this many seconds.")] = None,
    kernels: Annotated[
        str | None,
        option(MODEL, help="Our Metal kernels: off, on or names (as DFLASH_MLX_KERNELS)."),
    ] = None,
    hopeless: Annotated[bool, option(PLAN, "--hopeless", help="Make every draft wrong, to measure the worst case.")] = False,
    dense: Annotated[bool, option(MODEL, "--dense", help="Dequantize both models first.")] = False,
    dtype: DtypeOption = None,
    draft_bits: DraftBitsOption = None,
    last_tap: LastTap = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Time DFlash against mlx-lm on the same prompts, taking turns, and check that both give the same text.

    Ctrl-C ends it with what is measured. On a CUDA GPU the kernels of quantized models are compiled at first use, which takes
    minutes; that falls into the cold runs and the warm-up, which are not counted.
    """
    asked = SimpleNamespace(**locals())
    with only_ours_on_stdout() as stdout:
        b, records = _bench_modules()
        if compare:
            _refuse_beside_compare(asked)
            both = map(records.read_record, compare)
            print(wrapped(records.compare(*both, columns_of(stdout)), stdout), file=stdout)
            return
        _check_bench(asked, b)
        record = _bench(asked, b, records.write_record)
        print(json.dumps(record) if as_json else wrapped(records.table(record, columns_of(stdout)), stdout), file=stdout)
        _draw(record, plot, html)
    if record["ended"] == "interrupted":
        raise SystemExit(130)
    if records.faults(record):
        raise SystemExit(1)


def _draw(record: dict[str, Any], plot: str | None, html: str | None) -> None:
    if plot:
        from ..tools.bench_plot import plot as draw

        draw(record, plot)
    if html:
        from ..tools.bench_page import write_page

        write_page(record, html)


def _refuse_beside_compare(asked: SimpleNamespace) -> None:
    """--compare runs nothing: every other option would be dropped in silence."""
    others = {**vars(asked), **asked.sampling}
    for name, value in others.items():
        if name not in ("compare", "sampling") and value not in (None, False):
            raise refuse("--json" if name == "as_json" else f"--{name.replace('_', '-')}", "it has no effect with --compare")


def _check_bench(asked: SimpleNamespace, b: Any) -> None:
    """Usage errors that need no model."""
    from ..sampling_settings import SamplingSettings

    refuse_lonely_drafter(asked.model, asked.draft_model, asked.draft_bits, asked.last_tap)
    if has_no_drafter(asked.model, asked.draft_model):
        raise refuse("--draft-model", "there is no drafter, so there is nothing to compare: name one, or auto to look for it")
    if asked.draft_bits not in (None, "none") and asked.dense:
        raise refuse("--draft-bits", "--dense turns quantized layers of the drafter into plain ones")
    if asked.max_tokens is not None and asked.max_tokens < 2:
        raise refuse("--max-tokens", f"it is {asked.max_tokens}; a speed needs at least 2 tokens")
    if _rows(asked.batch) and asked.exact:
        raise refuse("--exact", "it cannot honour --batch, whose passes hold rows of several prompts")
    if _rows(asked.batch) and asked.plot:
        raise refuse("--plot", "it draws one answer at a time; --html draws many at once")
    if asked.plot:
        from ..tools.bench_plot import check_plot

        check_plot()
    if asked.seed is not None and not 0 <= asked.seed < 1 << 31:
        raise refuse("--seed", f"it is {asked.seed}; give a number from 0 to {(1 << 31) - 1}")
    # At temperature 0 beside others, options of sampling rightly do nothing.
    for temp in [temp for temp in _temps(asked, b) if temp] or [0.0]:
        refuse_without_effect(SamplingSettings(temp=temp, **asked.sampling), asked.sampling)


def _temps(asked: SimpleNamespace, b: Any) -> tuple[float, ...]:
    """The temperatures of the plan."""
    return tuple(dict.fromkeys(asked.temp)) if asked.temp else (0.0,) if asked.batch else b.Plan.temps


def _rows(text: str | None) -> tuple[int, ...]:
    """What --batch says."""
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if text is not None and not (parts and all(part.isdecimal() and int(part) for part in parts)):
        raise refuse("--batch", f"it is {text!r}; give numbers of rows from 1 on, as 1,4,8")
    return tuple(dict.fromkeys(map(int, parts)))


@live("Starting")
@insistent()
def _bench_modules() -> tuple[Any, Any]:
    """`bench` and `bench_record`. Importing them takes seconds, so the user sees that something happens."""
    from ..tools import bench, bench_record

    return bench, bench_record


@live("Starting")
def _bench(asked: SimpleNamespace, b: Any, write: Callable[[dict, str], None]) -> dict[str, Any]:
    """Load the pair and run the plan; the record."""
    if asked.kernels:
        _ask_for_kernels(asked.kernels)
    from ..memory import RunSize
    from ..tools.bench_prompts import read_prompts

    run = lambda tokenizer: RunSize(max(asked.context or [0]) + inputs.CONTEXT)  # noqa: E731
    bits = DraftBits.none if asked.dense else asked.draft_bits
    how = (asked.dtype, bits, asked.revision, asked.trust_remote_code, run, asked.adapter_path, asked.last_tap)
    target, drafter, lm, tokenizer, draft = inputs.load_pair(asked.model, asked.draft_model, *how)
    if asked.adapter_path:
        # A record names what was measured.
        target = f"{target} with {asked.adapter_path}"
    if asked.dense:
        lm, draft = _dense(asked, lm, drafter)
    own = read_prompts(asked.prompts, tokenizer.has_chat_template) if asked.prompts else None
    plan = b.Plan(
        kinds=tuple(kind.strip() for kind in asked.kinds.split(",")) if asked.kinds else (),
        temps=_temps(asked, b),
        # On a CPU a prompt of 1,024 tokens can take a minute.
        contexts=tuple(dict.fromkeys(asked.context or ([0] if own or b.machine()["device"] == "cpu" else [0, 1024]))),
        max_tokens=asked.max_tokens or 128,
        trials=asked.trials or (max(map(len, own.kinds.values())) if own else b.Plan.trials),
        block_size=asked.block_size,
        seed=asked.seed or 0,
        sampling=asked.sampling,
        hopeless=asked.hopeless,
        batch=_rows(asked.batch),
        exact=asked.exact,
    )
    if asked.seed is not None and not any((*plan.temps, *plan.contexts)):
        say("--seed has no effect at temperature 0 without --context: nothing is drawn.")
    keep = (lambda record: write(record, asked.out)) if asked.out else (lambda record: None)
    return b.Bench(lm, tokenizer, draft, plan, own, (target, drafter), say, keep, asked.max_seconds).go()


def _ask_for_kernels(kernels: str) -> None:
    """What --kernels says, as DFLASH_MLX_KERNELS says it; an unknown name is an error of the flag."""
    import mlx.core as mx

    from ..kernels import autotune

    try:
        autotune.parse_setting(kernels, "it")
    except autotune.KernelError as error:
        raise refuse("--kernels", str(error)) from None
    os.environ[autotune.VARIABLE] = kernels
    if mx.default_device() == mx.cpu:
        say("--kernels has no effect: MLX computes on the CPU here, and our kernels need a GPU.")


def _dense(asked: SimpleNamespace, lm: Any, drafter: str | None) -> tuple[Any, Any]:
    """Both models with quantized layers turned into plain ones."""
    from ..loading import activation_dtype, load_drafter
    from ..train.start import dense as write_out

    inputs.is_written_out(lm, asked.dense, default=False)
    type_ = activation_dtype(lm)
    lm = write_out(lm, type_)
    draft = load_drafter(drafter, lm, revision=asked.revision, bits="none", last_tap=asked.last_tap)
    return lm, write_out(draft, type_)
