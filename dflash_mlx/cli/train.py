"""`dflash-mlx train data`, `run` and `eval`: from a target to a drafter of its own."""

from __future__ import annotations

import json
from enum import StrEnum
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from . import inputs
from .live import live
from .narrow_help import HelpfulGroup
from .options import (
    MODEL,
    OUTPUT,
    AdapterPath,
    AsJson,
    CheckedCommand,
    Dense,
    DraftBitsOption,
    Dtype,
    DtypeOption,
    LastTap,
    example,
    flag,
    option,
    refuse,
)
from .output import columns_of, only_ours_on_stdout, say

TEXT, DRAFTER, TRAINING, MEASURED = "Text", "Drafter", "Training", "What is measured"

train_app = typer.Typer(
    cls=HelpfulGroup,
    no_args_is_help=True,
    help="Train a drafter for a model of your own: write text (data), train (run), measure (eval).",
    epilog="In this order: dflash-mlx train data --model M --out DATA --minutes 30; dflash-mlx train run --model M --data DATA "
    "--out DRAFTER --minutes 60; dflash-mlx generate --model M --draft-model DRAFTER.",
)


class Architecture(StrEnum):
    dflash = "dflash"
    dflash2 = "dflash2"
    dspark = "dspark"


_KINDS = {"DFlash2DraftModel": Architecture.dflash2, "DSparkDraftModel": Architecture.dspark}
_NAMES = {Architecture.dflash: "DFlash", Architecture.dflash2: "DFlash 2", Architecture.dspark: "DSpark"}
# Options that mean something for these kinds of drafter alone.
_ONLY_FOR = {
    "selector_rank": (Architecture.dflash2, Architecture.dspark),
    "tv": (Architecture.dflash2,),
    "predecessor": (Architecture.dflash2,),
}


class LearnFrom(StrEnum):
    text = "text"
    target = "target"


class Predecessor(StrEnum):
    text = "text"
    own = "own"


_EXAMPLES = {
    "data": example("dflash-mlx train data --model smollm2 --out DATA --minutes 30"),
    "run": example("dflash-mlx train run --model smollm2 --data DATA --out DRAFTER --minutes 60"),
    "eval": example("dflash-mlx train eval --model smollm2 --draft-model DRAFTER --data DATA"),
}

Target = Annotated[
    str,
    option(MODEL, help="The model to train a drafter for: a Hugging Face repo, a directory or a built-in name."),
]
Data = Annotated[list[str], option(TEXT, help="Folder that `train data` wrote; can be repeated.")]


@train_app.command("data", cls=CheckedCommand, epilog=_EXAMPLES["data"])
def train_data(
    model: Target,
    out: Annotated[str, option(OUTPUT, help="Folder for the text. A folder made with the same settings is continued.")],
    minutes: Annotated[
        float | None, option(TEXT, min=0, help="How long to write, in minutes; the held-out part is extra.")
    ] = None,
    answer_tokens: Annotated[int | None, option(TEXT, min=1, help="How much to write, in answer tokens.")] = None,
    prompts: Annotated[
        str | None, option(TEXT, help="JSONL file of prompts to answer. Default: questions that the program makes up.")
    ] = None,
    rows: Annotated[int, option(TEXT, min=1, help="Conversations written at the same time; 2048 suits a large GPU.")] = 256,
    max_len: Annotated[int, option(TEXT, min=64, help="Longest conversation in tokens.")] = 512,
    greedy: Annotated[float, option(TEXT, min=0, max=1, help="Share of answers at temperature 0; the rest at 0.7 and 1.")] = 0.8,
    held_out: Annotated[int, option(TEXT, min=1, help="Held-out questions per kind, for eval.")] = 128,
    seed: Annotated[int, option(TEXT, min=0, help="Another seed gives other text.")] = 0,
    adapter_path: AdapterPath = None,
    dtype: DtypeOption = None,
    dense: Dense = None,
) -> None:
    """Let the model write the training text. The more fresh text, the better the drafter."""
    if minutes is None and answer_tokens is None:
        raise refuse("--minutes", "nothing says how much to write: give --minutes or --answer-tokens")
    _refuse_zero("--minutes", minutes)
    with only_ours_on_stdout(), live(f"Loading {model}"):
        from ..train.data import DataConfig, make_data

        target, tokenizer = _load_for_training(model, dtype, dense, adapter_path)
        config = DataConfig(rows=rows, max_len=max_len, greedy=greedy, held_out_per_kind=held_out, seed=seed)
        seconds = minutes * 60 if minutes else None
        try:
            done = make_data(target, tokenizer, out, config, answer_tokens, seconds, prompts, say)
        except KeyboardInterrupt:
            say(f"Stopped; {out} keeps its whole parts, and the same command goes on after them.")
            raise SystemExit(130) from None
    say(f"{done['conversations']} conversations, {done['answer_tokens']} answer tokens ({done['answer_tps']:.0f}/s) in {out}")


def _refuse_zero(name: str, minutes: float | None) -> None:
    if minutes == 0:
        raise refuse(name, "it is 0; give more")


def _check_run(asked: SimpleNamespace) -> None:
    """Usage errors that need no model."""
    if (asked.minutes is None) == (asked.steps is None):
        which = "nothing says how long to train" if asked.minutes is None else "both say how long to train"
        raise refuse("--minutes", f"{which}: give one of --minutes and --steps")
    _refuse_zero("--minutes", asked.minutes)
    _refuse_zero("--pause-minutes", asked.pause_minutes)
    for name in ("layers", "block_size", "taps", "mask_token_id"):
        if asked.init is not None and getattr(asked, name) is not None:
            raise refuse(flag(name), "it has no effect with --init, whose drafter keeps its shape")


def _settings(asked: SimpleNamespace) -> dict[str, Any]:
    """What of a run goes into its `TrainConfig`."""
    same = ("steps", "batch", "anchors", "accumulate", "max_len", "lr", "loss", "seed", "patience")
    return {name: getattr(asked, name) for name in same} | {
        "seconds": asked.minutes * 60 if asked.minutes else None,
        "learn_from": asked.learn_from.value,
        "tv": asked.tv or 0.0,
        "predecessor": (asked.predecessor or Predecessor.text).value,
    }


def _drafter_to_train(
    target: Any, tokenizer: Any, docs: Any, asked: SimpleNamespace, taps: list[int] | None
) -> tuple[str | None, dict[str, Any]]:
    """Where the drafter to start from lies, if there is one, and the config of the drafter to train."""
    import numpy as np

    from ..config import DrafterConfig
    from ..conversion import load_drafter_weights
    from ..pairs.builtin import builtin_path
    from ..train.start import as_dflash2, as_dspark, drafter_config, mask_token, target_shape

    init = asked.init
    if init is not None:
        init = str(builtin_path(init, "drafter") or init)
        raw, _ = load_drafter_weights(init)
    else:
        V, mask = target_shape(target).get("vocab_size") or len(tokenizer), asked.mask_token_id
        mask = mask_token(tokenizer, V, set(np.unique(docs.ids).tolist())) if mask is None else mask
        raw = drafter_config(target, mask, asked.layers or 5, asked.block_size or 16, taps)
    kind = _KINDS.get(DrafterConfig.from_dict(raw).architecture, Architecture.dflash)
    wanted = asked.architecture or kind
    if kind != Architecture.dflash:
        if wanted != kind:
            raise refuse("--architecture", f"{init} is a {_NAMES[kind]} drafter; no {_NAMES[wanted]} drafter can start from it")
        if asked.selector_rank is not None:
            raise refuse("--selector-rank", "it has no effect with --init, whose drafter keeps its codebooks")
    for name, kinds in _ONLY_FOR.items():
        if getattr(asked, name) is not None and wanted not in kinds:
            raise refuse(flag(name), f"it has no effect without --architecture {' or '.join(kinds)}")
    if kind == Architecture.dflash and wanted != kind:
        make = as_dflash2 if wanted == Architecture.dflash2 else as_dspark
        raw = make(raw, asked.selector_rank or 64)
    return init, raw


def _held_out(data: list[str]) -> Any:
    """The held-out text of all folders; None, and a word about it, where there is none."""
    from pathlib import Path

    from ..train.docs import load_docs

    held = [folder for folder in data if (Path(folder) / "heldout.npz").exists()]
    if not held:
        lacking = ", ".join(data)
        say(f"{lacking}: no held-out text to measure with. The same `train data` command writes what is missing.")
    return load_docs(*held, names="heldout.npz") if held else None


def _source(model: str, adapter_path: str | None, data: list[str]) -> Any:
    """What the drafter's card says of where it comes from, the target's weights by their digest."""
    from ..checkpoint import inspect_checkpoint
    from ..pairs.builtin import builtin_path
    from ..train.card import Source

    digest = inspect_checkpoint(builtin_path(model, "target") or model).digest()
    return Source(f"{model} with {adapter_path}" if adapter_path else model, digest, tuple(data))


def _layer_numbers(text: str | None) -> list[int] | None:
    """ "1,8,14" as [1, 8, 14]."""
    try:
        return [int(number) for number in text.split(",")] if text else None
    except ValueError:
        raise refuse("--taps", f"it is {text!r}; give layer numbers such as 1,8,14") from None


ArchitectureOption = Annotated[
    Architecture | None,
    option(
        DRAFTER,
        help="dflash, dflash2 (adds a selector) or dspark (adds a Markov head). Default: that of --init, or dflash.",
    ),
]
SelectorRankOption = Annotated[
    int | None,
    option(DRAFTER, min=1, help="dflash2, dspark: rank of the selector or Markov head. Default: 64."),
]
LearnFromOption = Annotated[
    LearnFrom,
    option(TRAINING, help="text: its tokens. target: where text was sampled, the target's probabilities."),
]
PredecessorOption = Annotated[
    Predecessor | None,
    option(TRAINING, help="dflash2: train the selector on the text (default), or on its own picks while they are right."),
]


TotalVariation = Annotated[
    float | None,
    option(
        TRAINING,
        min=0,
        max=1,
        help="dflash2: weight of the total variation distance in the selector's loss; the rest is cross-entropy.",
    ),
]
PlotPage = Annotated[str | None, option(OUTPUT, help="Draw loss and tokens a round here, as a page that needs no network.")]


@train_app.command("run", cls=CheckedCommand, epilog=_EXAMPLES["run"])
def train_run(
    model: Target,
    data: Data,
    out: Annotated[str, option(OUTPUT, help="Folder for the drafter; a stopped run of the same settings is continued.")],
    minutes: Annotated[float | None, option(TRAINING, min=0, help="How long to train.")] = None,
    steps: Annotated[int | None, option(TRAINING, min=1, help="How many steps to train.")] = None,
    init: Annotated[str | None, option(DRAFTER, help="Drafter to start from, as generate takes it.")] = None,
    architecture: ArchitectureOption = None,
    selector_rank: SelectorRankOption = None,
    layers: Annotated[int | None, option(DRAFTER, min=1, help="Layers of a new drafter. Default: 5.")] = None,
    block_size: Annotated[
        int | None,
        option(DRAFTER, min=2, help="Tokens of its block, the last known one included. Default: 16."),
    ] = None,
    taps: Annotated[str | None, option(DRAFTER, help="Tapped target layers, such as 1,8,14. Default: five, evenly.")] = None,
    mask_token_id: Annotated[
        int | None, option(DRAFTER, min=0, help="Token that stands where a draft is still to be made. Default: an unused one.")
    ] = None,
    batch: Annotated[int, option(TRAINING, min=1, help="Conversations per pass.")] = 24,
    anchors: Annotated[int, option(TRAINING, min=1, help="Blocks to learn per conversation.")] = 96,
    accumulate: Annotated[int, option(TRAINING, min=1, help="Passes per training step.")] = 1,
    max_len: Annotated[int, option(TRAINING, min=64, help="Conversations are cut to this many tokens.")] = 512,
    lr: Annotated[float, option(TRAINING, min=0, help="Peak learning rate.")] = 1e-3,
    loss: Annotated[str, option(TRAINING, help="decay (the paper's weights) or dpace.")] = "dpace",
    learn_from: LearnFromOption = LearnFrom.text,
    tv: TotalVariation = None,
    predecessor: PredecessorOption = None,
    patience: Annotated[
        int, option(TRAINING, min=0, help="Stop after this many evaluations without a better drafter; 0: never.")
    ] = 5,
    pause_minutes: Annotated[float | None, option(TRAINING, min=0, help="Save and stop after this long, to go on later.")] = None,
    seed: Annotated[int, option(TRAINING, min=0, help="Another seed gives another order and start.")] = 0,
    plot: PlotPage = None,
    adapter_path: AdapterPath = None,
    dtype: DtypeOption = None,
    dense: Dense = None,
) -> None:
    """Train a drafter on a target's own text. Ctrl-C saves what is trained; the same command goes on from there.

    `mlx.launch -n 2 dflash-mlx train run ...` shares each batch out among processes.
    """
    asked = SimpleNamespace(**locals())
    _check_run(asked)
    chosen = _layer_numbers(taps)
    with only_ours_on_stdout(), live(f"Loading {model}"):
        from ..train.docs import load_docs
        from ..train.ranks import Ranks
        from ..train.start import check_text
        from ..train.trainer import TrainConfig, train

        target, tokenizer = _load_for_training(model, dtype, dense, adapter_path)
        docs, held_out = load_docs(*data), _held_out(data)
        check_text(target, docs, model)
        init, raw = _drafter_to_train(target, tokenizer, docs, asked, chosen)
        config = TrainConfig(**_settings(asked))
        pause_s = pause_minutes * 60 if pause_minutes else None
        try:
            part, source = docs.pick(docs.split == 0), _source(model, adapter_path, data)
            train(target, part, out, raw, config, held_out, init, pause_s=pause_s, report=say, source=source)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        finally:
            _draw(out, plot)
    if Ranks().leads:
        over = f" --adapter-path {adapter_path}" if adapter_path else ""
        say(f"The drafter is in {out}: dflash-mlx generate --model {model}{over} --draft-model {out}")


def _draw(out: str, plot: str | None) -> None:
    """The page of --plot, of what a run has written so far."""
    from ..train.curves import write_curves
    from ..train.ranks import Ranks

    if plot and Ranks().leads:
        write_curves(out, plot)


@train_app.command("eval", cls=CheckedCommand, epilog=_EXAMPLES["eval"])
def train_eval(
    model: Target,
    draft_model: Annotated[str, option(MEASURED, help="Drafter trained for it.")],
    data: Data,
    block_size: Annotated[list[int] | None, option(MEASURED, min=2, help="Block size to measure; can be repeated.")] = None,
    limit: Annotated[int | None, option(MEASURED, min=1, help="Measure on at most this many held-out answers.")] = None,
    adapter_path: AdapterPath = None,
    dtype: DtypeOption = None,
    draft_bits: DraftBitsOption = None,
    last_tap: LastTap = None,
    dense: Dense = None,
    as_json: AsJson = False,
) -> None:
    """Measure tokens a round on held-out text, with the drafter and with three simpler ways to draft."""
    with only_ours_on_stdout() as stdout, live(f"Loading {model}") as line:
        import numpy as np

        from ..loading import load_drafter
        from ..models.target import Target
        from ..tools.columns import align
        from ..train.docs import load_docs
        from ..train.offline_tau import evaluate
        from ..train.start import check_text

        target, _ = _load_for_training(model, dtype, dense, adapter_path)
        drafter = load_drafter(draft_model, target, bits=draft_bits, last_tap=last_tap)
        held_out = load_docs(*data, names="heldout.npz")
        check_text(target, held_out, model)
        if limit is not None and limit < len(held_out):
            held_out = held_out.pick(np.linspace(0, len(held_out) - 1, limit).astype(int))
        taps = Target(target, drafter.config.taps(len(target.layers)))
        rows = evaluate(drafter, taps, held_out, load_docs(*data), block_size or [drafter.config.block_size])
        line.stop()
        if as_json:
            print(json.dumps({"tau": rows, "model": model, "draft_model": draft_model}), file=stdout)
            return
        lines = [["kind", "temp", "block", "loops", "answers", "drafter", "zeroed", "lookup", "bigram"]]
        for r in rows:
            taus = [f"{r[name]:.3f}" for name in ("drafter", "zeroed", "lookup", "bigram")]
            loops = "yes" if r["looped"] else "no"
            lines.append([r["kind"], f"{r['temp']:g}", f"{r['block_size']}", loops, f"{r['answers']}", *taus])
        print("Tokens a round:", *align(lines, columns_of(stdout)), sep="\n", file=stdout)
    say(
        "Kept drafts and the model's own token, per check of drafts. zeroed: the drafter without the model's hidden states. "
        "lookup: copies from the text. bigram: the most frequent next token. loops: answers that repeat themselves."
    )


def _load_for_training(model: str, dtype: Dtype | None, dense: bool | None, adapter_path: str | None) -> tuple[Any, Any]:
    """The target and its tokenizer; on CUDA with quantized layers written out, whose kernels take minutes to compile there."""
    import mlx.core as mx

    from ..loading import activation_dtype, load

    target, tokenizer = load(model, adapter_path=adapter_path, dtype=dtype.value if dtype else None)
    on_cuda = mx.default_device() != mx.cpu and not mx.metal.is_available()
    if inputs.is_written_out(target, dense, default=on_cuda):
        from ..train.start import dense as write_out

        # On a GPU float16: it keeps 4-bit weights more exactly than bfloat16.
        keeps = dtype or mx.default_device() == mx.cpu
        target = write_out(target, activation_dtype(target) if keeps else mx.float16)
    return target, tokenizer
