"""What training a drafter costs at true model shapes: random weights, random ids; text by the target, and steps of `train run`.

    python bench/train_shapes.py --shape qwen3-4b --bits 4 --out bench/results/train-qwen3-4b-4bit.json [--max-seconds 55]
    python bench/train_shapes.py --count                                  what a step asks of a Mac, by count: nothing is run
    python bench/train_shapes.py --table bench/results/train-*.json

Measured: rows that the target writes at once (`train data`), then steps of a DFlash or DFlash 2 drafter of the target's width, as
`train run` takes them, targets' features included, nothing saved. --bits 16 is a target that --dense wrote out. Values are
random: nothing is learned, and tau is not looked at. The minutes for a million answer tokens are those of writing them once and
of learning each conversation once. Milliseconds of a Mac are PREDICTIONS: a step's multiply-adds at the rate of the matrix kernel
that `ledger_time` fitted on public figures, and the loss's passes over the vocabulary at its bandwidth; no Mac was measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import ledger_time
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from shapes import SHAPES as TARGETS

from dflash_mlx.config import DrafterConfig
from dflash_mlx.models.architectures import ARCHITECTURES
from dflash_mlx.models.target import Target
from dflash_mlx.tools import bench, bench_record
from dflash_mlx.tools.columns import align
from dflash_mlx.train.docs import Docs, batches
from dflash_mlx.train.rollout import Frame, Row, write_rows
from dflash_mlx.train.start import as_dflash2, drafter_config, init_drafter
from dflash_mlx.train.trainer import TrainConfig, Trainer

_QWEN3 = TARGETS["qwen3-8b"][0]
_SMALL = {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "vocab_size": 512}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
# name: target's config. Numbers of Qwen3-4B, Qwen3-8B and Qwen3-30B-A3B; tiny is for a trial of this script.
SHAPES = {
    "tiny": _QWEN3 | _TINY,
    "qwen3-4b": _QWEN3 | _SMALL,
    "qwen3-8b": _QWEN3,
    "qwen3-30b-a3b": _QWEN3 | _MOE,
}


def random_target(config: dict[str, Any], bits: int, count: bool = False) -> nn.Module:
    """A target of these shapes in bfloat16, or quantized; weights are made one by one, or not at all where they only count."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if bits < 16:
        nn.quantize(model, 64, bits)
    for _, array in tree_flatten(model.parameters()):
        if not count:
            mx.eval(array)
    model.eval()
    return model


def random_docs(vocab: int, n: int, length: int, asked: int) -> Docs:
    """n conversations of `length` random ids, of which all but the first `asked` are an answer; half of them drawn."""
    rng, zeros = np.random.default_rng(0), np.zeros(n, np.uint8)
    answer = np.tile(np.arange(length) >= asked, n)
    temps = np.where(np.arange(n) % 2, 1.0, 0.0).astype(np.float16)
    ids, starts = rng.integers(5, vocab, n * length).astype(np.uint32), np.arange(n + 1) * length
    return Docs(ids, answer, starts, zeros, zeros, temps, zeros.astype(bool), zeros)


def writing(model: nn.Module, vocab: int, rows: int, asked: int, until: float) -> dict[str, Any]:
    """Answer tokens a second of `rows` conversations that the target writes at once, behind `asked` given ids."""
    rng, marks = np.random.default_rng(1), []
    given = [Row(rng.integers(5, vocab, asked).tolist(), user=False) for _ in range(rows)]
    # An id that no text has ends nothing: all rows are written to the end.
    frame = Frame((5,), (), (), (vocab - 1,))
    mx.reset_peak_memory()
    note = lambda position, active, written: marks.append((time.perf_counter(), written))  # noqa: E731
    write_rows(model, given, frame, asked + 8, 0, check_every=4)  # compiles
    write_rows(model, given, frame, asked + 97, 0, check_every=8, progress=note, deadline=until)
    rate = (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0]) if len(marks) > 1 else None
    return {"rows": rows, "tokens_per_s": rate, "peak_memory_gb": mx.get_peak_memory() / 1e9}


def multiply_adds(model: nn.Module, weights: list[tuple[str, mx.array]], args: argparse.Namespace) -> dict[str, float]:
    """Of one step: the target's pass, the drafter's three products a weight, and the head's two."""
    shape, blocks, rows = model.args, args.batch * args.anchors, args.batch * args.length
    taken = {"target": 0.0, "drafter": 0.0}
    for name, p in tree_flatten(model.parameters()):
        if p.ndim < 2 or name.endswith((".scales", ".biases")) or "embed" in name or "lm_head" in name:
            continue
        size = p.size * (32 // args.bits if p.dtype == mx.uint32 else 1)
        taken["target"] += size * (shape.num_experts_per_tok / shape.num_experts if "switch_mlp" in name else 1) * rows
    for name, p in weights:
        if p.ndim >= 2 and "codebook" not in name and "base_kernel" not in name:
            of_context = rows if name.startswith("fc.") or "k_proj" in name or "v_proj" in name else 0
            taken["drafter"] += 3 * p.size * (of_context + (0 if name.startswith("fc.") else blocks * 16))
    head = shape.vocab_size * shape.hidden_size
    # Forward and back for the slots; once for the target's rows of the half that was drawn.
    return taken | {"head": head * (2 * blocks * 15 + rows / 2)}


def counted(args: argparse.Namespace) -> dict[str, Any]:
    """A step's multiply-adds, numbers of the vocabulary and least memory, from shapes alone."""
    model = random_target(SHAPES[args.shape], args.bits, count=True)
    raw = drafter_config(model, SHAPES[args.shape]["vocab_size"] - 2, layers=args.layers, block_size=16)
    config = DrafterConfig.from_dict(as_dflash2(raw) if args.architecture == "dflash2" else raw)
    weights = tree_flatten(ARCHITECTURES[config.architecture](config).parameters())
    size, vocab = sum(p.size for _, p in weights), model.args.vocab_size
    # Weights, gradients, both moments and the moving average in float32, products in bfloat16; a chunk of logits, thrice.
    least = sum(p.nbytes for _, p in tree_flatten(model.parameters())) + 22 * size + 3 * 4 * args.chunk_blocks * 15 * vocab
    numbers = args.batch * args.anchors * 15 * vocab
    return {"multiply_adds": multiply_adds(model, weights, args), "vocabulary_numbers": numbers, "least_memory_gb": least / 1e9}


def training(model: nn.Module, vocab: int, args: argparse.Namespace, until: float) -> dict[str, Any]:
    """Steps of a run on random conversations: milliseconds, memory and what they hold."""
    raw = drafter_config(model, vocab - 2, layers=args.layers, block_size=16)
    if args.architecture == "dflash2":
        raw = as_dflash2(raw)
    target = Target(model, raw["dflash_config"]["target_layer_ids"])
    model.freeze()
    c = TrainConfig(steps=1000, batch=args.batch, anchors=args.anchors, learn_from="target", chunk_blocks=args.chunk_blocks)
    docs = random_docs(vocab - 2, 4 * args.batch, args.length, args.asked)
    trainer = Trainer(init_drafter(raw, target, docs.pad([0], 256)[0], 0), target, raw, c, mx.bfloat16)
    feed, took, last = batches(docs, c.batch, c.anchors, args.length, 0), [], None
    mx.reset_peak_memory()
    while len(took) < args.steps and (len(took) < 3 or time.perf_counter() < until):
        begun = time.perf_counter()
        loss, metrics, norm = trainer.take([next(feed)[:5]], 0.5)
        mx.async_eval(loss, metrics, norm, trainer.params, trainer.ema, trainer.optimizer.state)
        if last is not None:
            mx.eval(last)
        last = loss
        took.append(time.perf_counter() - begun)
    mx.eval(last)
    steady = took[2:] if len(took) > 4 else took[-1:]
    step_s, answers = statistics.median(steady), c.batch * (args.length - args.asked)
    return {
        "steps": len(took),
        "step_s": step_s,
        "least_s": min(steady),
        "peak_memory_gb": mx.get_peak_memory() / 1e9,
        "drafter_weights": sum(p.size for _, p in tree_flatten(trainer.params)),
        "answer_tokens_per_s": answers / step_s,
        "blocks_per_s": c.batch * c.anchors / step_s,
    } | counted(args)


def on_macs(step: dict[str, Any]) -> dict[str, float]:
    """Seconds a step would take by count, PREDICTED. 30 bytes a number of the vocabulary's rows, as the loss has it."""
    macs, numbers = sum(step["multiply_adds"].values()), step["vocabulary_numbers"]
    return {
        chip.name: macs / chip.block + 30 * numbers / (chip.gbps * 1e9 * chip.bandwidth)
        for chip in (ledger_time.M3_MAX, ledger_time.M5_MAX)
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    began, config = time.perf_counter(), SHAPES[args.shape]
    model, vocab = random_target(config, args.bits), config["vocab_size"]
    record = {
        "what": "bench/train_shapes.py",
        "shape": args.shape,
        "machine": bench.machine(),
        "versions": bench.versions(),
        "weights": bench.weights_of(model),
        "settings": {name: value for name, value in vars(args).items() if name not in ("out", "table")},
        "built_s": time.perf_counter() - began,
        "writing": [],
    }
    print(f"{args.shape}, {args.bits} bits: built in {record['built_s']:.0f} s", flush=True)
    left = args.max_seconds - record["built_s"]
    for i, rows in enumerate(args.rows, 1):
        found = writing(model, vocab, rows, args.asked, began + record["built_s"] + 0.4 * left * i / len(args.rows))
        record["writing"].append(found)
        mx.clear_cache()
        print(f"writing, {rows} rows: {found['tokens_per_s']} tokens/s, {found['peak_memory_gb']:.1f} GB", flush=True)
    record["training"] = training(model, vocab, args, began + args.max_seconds)
    record["predicted_s"] = on_macs(record["training"])
    return record


def table(records: list[dict[str, Any]]) -> str:
    """Records for people, one row each."""
    head = ["shape", "bits", "written, tokens/s", "step, ms", "memory, GB", "learned, tokens/s", "minutes a million tokens"]
    rows = [[*head, *(f"{name}, step in s, PREDICTED" for name in records[0]["predicted_s"])]]
    for r in records:
        t, rates = r["training"], [w["tokens_per_s"] for w in r["writing"] if w["tokens_per_s"]]
        written = max(rates, default=None)
        minutes = (1e6 / written if written else 0) / 60 + 1e6 / t["answer_tokens_per_s"] / 60
        cells = [r["shape"], r["settings"]["bits"], f"{written:,.0f}" if written else "", f"{1e3 * t['step_s']:,.0f}"]
        cells += [f"{t['peak_memory_gb']:.1f}", f"{t['answer_tokens_per_s']:,.0f}", f"{minutes:.1f}"]
        rows.append([str(cell) for cell in cells] + [f"{s:.1f}" for s in r["predicted_s"].values()])
    return "\n".join(align(rows))


def count_table(args: argparse.Namespace) -> str:
    """Every shape, by count."""
    rows: list[list[str]] = []
    for args.shape in [name for name in SHAPES if name != "tiny"]:
        found = counted(args)
        macs, seconds = found["multiply_adds"], on_macs(found)
        rows = rows or [
            ["shape", *(f"{name}, e12" for name in macs), "memory, GB, at least", *(f"{n}, s, PREDICTED" for n in seconds)]
        ]
        cells = [
            *(f"{n / 1e12:.1f}" for n in macs.values()),
            f"{found['least_memory_gb']:.0f}",
            *(f"{s:.1f}" for s in seconds.values()),
        ]
        rows.append([args.shape, *cells])
    return "\n".join(align(rows))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", choices=SHAPES, default="tiny")
    p.add_argument("--bits", type=int, choices=(4, 8, 16), default=4, help="16: not quantized")
    p.add_argument("--architecture", choices=("dflash", "dflash2"), default="dflash")
    p.add_argument("--layers", type=int, default=5)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--anchors", type=int, default=64)
    p.add_argument("--length", type=int, default=512)
    p.add_argument("--asked", type=int, default=128, help="ids before the answer")
    p.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--chunk-blocks", type=int, default=128)
    p.add_argument("--max-seconds", type=float, default=55, help="in all; three steps are taken in any case")
    p.add_argument("--count", action="store_true", help="print what a step takes by count, and run nothing")
    p.add_argument("--out", type=Path, help="JSON record")
    p.add_argument("--table", type=Path, nargs="+", help="print a table of records, measure nothing")
    args = p.parse_args()
    if args.count:
        print(count_table(args))
        return
    records = [json.loads(path.read_text()) for path in args.table] if args.table else [measure(args)]
    print(table(records))
    if args.out and not args.table:
        bench_record.write_record(records[0], args.out)


if __name__ == "__main__":
    main()
