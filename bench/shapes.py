"""What drafting gains at true model shapes: random weights, and drafts that are right at a set rate.

    python bench/shapes.py --shape qwen3-8b --bits 4 --out bench/results/shapes-qwen3-8b-4bit.json
        [--accept 0.5 0.7 0.8 0.9] [--block-size 2 4 8 16] [--context 512] [--tokens 128] [--trials 3] [--max-seconds 400]

Target and drafter have published shapes and pay every pass in full: embedding, layers, head, drafter, verification, rollback.
Only the values are planned. The target's last hidden states are replaced by the head's own row of the planned next token, so
its greedy text is known and no rounding changes it; the drafter runs and its choice is replaced by the planned tokens, each of
them wrong with probability 1 - accept. Text and errors do not repeat within 65,536 tokens, so nothing can be copied. Both loops
are the real ones: mlx-lm's `stream_generate` and this package's. By turns: mlx-lm's own loop runs before and after each other
run, whose speed-up is over the mean of these two; the order is turned round after every trial. Where the policy chooses the
widths, each acceptance has a draft-length history of its own, which one run before the timed ones begins: as a pair has whose
drafter is that good. `--block-size` without numbers: only the policy. A record in --out that ran out of time is continued.

Break-even: the acceptance at which a fixed block is as fast as plain decoding, from measured costs: expected tau, the sum of
accept^i for i = 0..block_size - 1, equals a round's cost in plain steps. On a CUDA GPU MLX compiles the kernels of quantized
models at first use, for minutes; that falls into the warm-up. Without Metal, mlx-lm's gated delta layers (qwen3.5) run step by
step, which makes a block cost about its number of rows there; a Mac has one kernel for it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx import stream_generate
from dflash_mlx.config import DrafterConfig
from dflash_mlx.draft_length.policy import DraftLengthHistory
from dflash_mlx.models.drafter import Drafter
from dflash_mlx.models.target import Target
from dflash_mlx.pair import DFlashPair
from dflash_mlx.tools import bench, bench_record
from dflash_mlx.tools.columns import align
from dflash_mlx.traced import prepare


def qwen3_5(hidden: int, intermediate: int, tied: bool) -> dict[str, Any]:
    """Config of a Qwen3.5 text model of 32 layers, every fourth with full attention."""
    return {
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_num_value_heads": 32,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "vocab_size": 248320,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
    }


def drafter_config(hidden: int, intermediate: int, vocab: int, mask: int, taps: list[int], theta: float) -> dict[str, Any]:
    """Config of a published DFlash drafter: 5 full layers, 32 heads of 128 over 8, block 16."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 40960,
        "rope_theta": theta,
        "block_size": 16,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
    }


# name: (target's config, drafter's config, where the numbers are from)
SHAPES = {
    "qwen3-8b": (
        {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
        drafter_config(4096, 12288, 151936, 151669, [1, 9, 17, 25, 33], 1e6),
        "configs of Qwen/Qwen3-8B and z-lab/Qwen3-8B-DFlash-b16",
    ),
    "qwen3.5-4b": (
        qwen3_5(2560, 9216, tied=True),
        drafter_config(2560, 9728, 248320, 248070, [1, 8, 15, 22, 29], 1e7),
        "Qwen/Qwen3.5-4B and z-lab/Qwen3.5-4B-DFlash as third parties give them; the target's config file was not read",
    ),
    "qwen3.5-9b": (
        qwen3_5(4096, 12288, tied=False),
        drafter_config(4096, 12288, 248320, 248070, [1, 8, 15, 22, 29], 1e7),
        "Qwen/Qwen3.5-9B as third parties give it, its config file was not read; drafter: Qwen3-8B's with this vocabulary",
    ),
}


class Line:
    """A text in which every token tells the next one, without repeating for `period` tokens (a power of two below V).

    next(x) = (25173 x + 13849) mod period. `wrong` says of a token, by hashing it, whether it is drafted wrongly.
    """

    def __init__(self, vocab: int):
        self.period = min(1 << (vocab.bit_length() - 1), 1 << 16)
        self.accept = 1.0

    def next(self, ids: mx.array) -> mx.array:
        return ((ids.astype(mx.uint32) * 25173 + 13849) % self.period).astype(mx.uint32)

    def tokens(self, first: int, n: int) -> list[int]:
        line = [first % self.period]
        while len(line) < n:
            line.append((line[-1] * 25173 + 13849) % self.period)
        return line

    def drafts(self, anchor: mx.array, n: int) -> mx.array:
        """[B] anchors to [B, n] int32 drafts; a wrong one is the right id + 1."""
        right, a, c = [], 1, 0
        for _ in range(n):
            a, c = a * 25173 % self.period, (c * 25173 + 13849) % self.period
            right.append((anchor.astype(mx.uint32) * a + c) % self.period)
        ids = mx.stack(right, axis=1)
        return mx.where(self.wrong(ids), (ids + 1) % self.period, ids).astype(mx.int32)

    def wrong(self, ids: mx.array) -> mx.array:
        mixed = ids.astype(mx.uint32) * 0x9E3779B1
        mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77
        return ((mixed >> 16) & 0xFFFF) >= round(self.accept * 65536)


def output_head(model: nn.Module) -> nn.Module:
    """The module that scores tokens: `lm_head`, or the embedding where both are one."""
    heads = [m for name, m in model.named_modules() if name.split(".")[-1] == "lm_head"]
    return heads[0] if heads else Target(model).embedding


def head_rows(head: nn.Module, ids: mx.array) -> mx.array:
    """Rows [..., H] of the output head for token ids: what the head scores highest for that token."""
    if isinstance(head, (nn.Embedding, nn.QuantizedEmbedding)):
        return head(ids)
    if isinstance(head, nn.QuantizedLinear):
        parts = (part[ids] for part in (head.weight, head.scales, head.biases))
        return mx.dequantize(*parts, group_size=head.group_size, bits=head.bits)
    return head.weight[ids]


def planned_target(config: dict[str, Any], bits: int, dtype: mx.Dtype) -> tuple[nn.Module, Line]:
    """A random target that says a `Line`, whatever it computes; every layer is computed all the same."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    if bits < 16:
        nn.quantize(model, 64, bits)
    for _, array in tree_flatten(model.parameters()):
        # One by one: the float32 they are drawn in is never there for all of them.
        mx.eval(array)
    model.eval()
    # Found once: a walk over all modules in each pass would be timed.
    backbone, line, head = Target(model).backbone, Line(Target(model).vocabulary), output_head(model)

    class Planned(type(backbone)):
        def __call__(self, inputs, *args, **kwargs):
            hidden = super().__call__(inputs, *args, **kwargs)
            return mx.depends(head_rows(head, line.next(inputs)).astype(hidden.dtype), hidden)

    backbone.__class__ = Planned
    return model, line


class PlannedDrafter(Drafter):
    """Runs in full and proposes the line's tokens."""

    line: Line

    def choose(self, hidden: mx.array, anchor: mx.array) -> tuple[mx.array, None]:
        # What the random drafter is sure of says nothing of these.
        return mx.depends(self.line.drafts(anchor, hidden.shape[1]), super().choose(hidden, anchor)[0]), None


def planned_drafter(config: dict[str, Any], model: nn.Module, line: Line) -> PlannedDrafter:
    drafter = PlannedDrafter(DrafterConfig.from_dict(config))
    target = Target(model)
    drafter.set_dtype(target.embed(mx.zeros((1, 1), dtype=mx.int32)).dtype)
    drafter.eval()
    mx.eval(drafter.parameters())
    object.__setattr__(drafter, "line", line)
    prepare(model, drafter.config.windows)
    return drafter.bind(target.embed, target.head, model)


class Letters:
    """A tokenizer without files; a line ends every 16 tokens, so that text costs the same all along."""

    chat_template = bos_token = eos_token_id = None

    def decode(self, ids: list[int]) -> str:
        return "".join(f"{i}" + ("\n" if i % 16 == 0 else " ") for i in ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        return self.encode(messages[-1]["content"])

    def get_vocab(self) -> dict[str, int]:
        return {}


def expected_tau(accept: float, width: int) -> float:
    """Mean of accepted + 1 when each of `width` drafts is right with probability `accept`, independently."""
    return sum(accept**i for i in range(width + 1))


def break_even(cost: float, width: int) -> float | None:
    """Acceptance at which a round that costs `cost` plain steps pays; 0 if it always does, None if it never can."""
    if cost <= 1:
        return 0.0
    if cost > width + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tau(middle, width) < cost else (low, middle)
    return high


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All runs of one shape, into a record of plain values."""
    config, draft_config, source = SHAPES[args.shape]
    dtype = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}[args.dtype]
    began = time.perf_counter()
    model, line = planned_target(config, args.bits, dtype)
    drafter = planned_drafter(draft_config, model, line)
    tokenizer = TokenizerWrapper(Letters(), eos_token_ids=[])
    prompt, expected = line.tokens(1, args.context), line.tokens(1, args.context + args.tokens)[args.context :]
    histories: dict[float, DraftLengthHistory] = {}
    record = {
        "what": "bench/shapes.py",
        "shape": args.shape,
        "source": source,
        "machine": bench.machine(),
        "versions": bench.versions(),
        "weights": bench.weights_of(model),
        "settings": {name: value for name, value in vars(args).items() if name not in ("out", "max_seconds")},
        "built_s": time.perf_counter() - began,
        "runs": [],
        "ended": "unfinished",
    }
    record["runs"] = earlier_runs(record, args.out)

    def run(cell: tuple[float | None, int | None] | None) -> dict[str, Any]:
        """`cell`: (acceptance, block size or None where the policy chooses); None: mlx-lm's own loop."""
        if cell is None:
            responses = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=args.tokens)
        else:
            line.accept = cell[0]
            if cell[1] is None:
                DFlashPair.of(drafter).history = histories.setdefault(cell[0], DraftLengthHistory())
            # The acceptance is planned: copied drafts would have their own.
            drafting = {"draft_model": drafter, "block_size": cell[1], "prompt_lookup": False}
            responses = stream_generate(model, tokenizer, prompt, max_tokens=args.tokens, **drafting)
        figures, ids = bench.timed(responses, len(prompt))
        return (
            figures
            | {"accept": cell and cell[0], "block_size": cell and cell[1], "plain": cell is None}
            | {"equal": ids == expected[: len(ids)]}
        )

    cells = [(a, K) for K in [*args.block_size, None] for a in args.accept]
    plan = [(t, cell) for t in range(args.trials) for cell in [None, *(c for of in cells[:: (-1) ** t] for c in (of, None))]]
    start = time.perf_counter()
    # As long as the timed ones: passes are traced anew where a cache outgrows its buffers.
    for cell in (None, *((args.accept[-1], K) for K in args.block_size), *((a, None) for a in args.accept)):
        run(cell)
        DFlashPair.of(drafter).finish_measuring()
    record["warm_up_s"], record["kernels"] = time.perf_counter() - start, bench.kernels()
    print(f"{args.shape}: built in {record['built_s']:.0f} s, warm after {record['warm_up_s']:.0f} s more", flush=True)
    try:
        for trial, cell in plan[len(record["runs"]) :]:
            if args.max_seconds and time.perf_counter() - began > args.max_seconds:
                record["ended"] = "out of time"
                return record
            record["runs"].append(run(cell) | {"trial": trial})
            if args.out:
                bench_record.write_record(record, args.out)
        record["ended"] = "complete"
    except KeyboardInterrupt:
        record["ended"] = "interrupted"
    finally:
        record["summary"] = summarise(record["runs"])
    return record


def earlier_runs(record: dict[str, Any], out: Path | None) -> list[dict[str, Any]]:
    """The runs in `out`, where it is a record of the same settings, machine and versions that was not finished."""
    if out is None or not out.exists():
        return []
    found, chip = json.loads(out.read_text()), record["machine"]["chip"]
    same = found["machine"]["chip"] == chip and all(found[of] == record[of] for of in ("shape", "versions", "settings"))
    return found["runs"] if same and found["ended"] != "complete" else []


def speed_ups(runs: list[dict[str, Any]]) -> list[float | None]:
    """Of each run, tokens/s over the mean of the plain runs just before and after it; None of a plain run."""
    found: list[float | None] = []
    for i, run in enumerate(runs):
        beside = [r["decode_tps"] for r in runs[max(i - 1, 0) : i + 2] if r["plain"]]
        found.append(None if run["plain"] else run["decode_tps"] / statistics.fmean(beside))
    return found


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians: plain tokens/s; by block size (None: the policy) a round's cost, break-even, and speed-up by acceptance."""
    plain = [r for r in runs if r["plain"]]
    if not plain:
        return {"plain_tps": None, "blocks": []}
    plain_tps = statistics.median(r["decode_tps"] for r in plain)
    by_block: dict[int | None, list] = {}
    for r, up in zip(runs, speed_ups(runs), strict=True):
        if not r["plain"]:
            by_block.setdefault(r["block_size"], []).append((r, up))
    blocks = []
    for K, of in by_block.items():
        cells = []
        for accept in dict.fromkeys(r["accept"] for r, _ in of):
            same, ups = [r for r, _ in of if r["accept"] == accept], [up for r, up in of if r["accept"] == accept]
            drafting = sum(r["drafting_rounds"] for r in same)
            cells.append(
                {"accept": accept, "speedup": statistics.median(ups), "low": min(ups), "high": max(ups)}
                | {"tau": sum(r["committed"] for r in same) / drafting if drafting else None}
                | {"widths": dict(sum((Counter({str(w): n for w, n in r["widths"].items()}) for r in same), Counter()))}
            )
        block = {"block_size": K, "cells": cells}
        if K is not None:
            round_s = statistics.median(r["decode_s"] / r["rounds"] for r, _ in of)
            block |= {"round_ms": 1e3 * round_s, "cost": round_s * plain_tps}
            block["break_even"] = break_even(block["cost"], K - 1)
        blocks.append(block)
    return {"plain_tps": plain_tps, "blocks": blocks, "equal": sum(r["equal"] for r in runs), "runs": len(runs)}


def table(record: dict[str, Any]) -> str:
    """A record for people."""
    s, w, m = record["summary"], record["weights"], record["machine"]
    bits = f"{'/'.join(map(str, w['bits']))} bit" if w["bits"] else w["dtype"]
    lines = [f"{record['shape']} ({bits}, random weights, {w['gb']:g} GB) on {m['chip']}; mlx {record['versions']['mlx']}"]
    if not s["blocks"]:
        return "\n".join([*lines, f"no figures: {record['ended']}"])
    accepts = record["settings"]["accept"]
    lines += [f"mlx-lm alone: {s['plain_tps']:.1f} tokens/s", ""]
    rows = [["block", "round, ms", "in plain steps", "break-even", *(f"accept {a:g}" for a in accepts), ""]]
    for block in s["blocks"]:
        ups = {cell["accept"]: f"{cell['speedup']:.2f}" for cell in block["cells"]}
        K, even = block["block_size"], block.get("break_even")
        fixed = (
            ["", "", ""]
            if K is None
            else [f"{block['round_ms']:.2f}", f"{block['cost']:.2f}", "never" if even is None else f"{even:.2f}"]
        )
        rows.append([str(K or "policy"), *fixed, *(ups.get(a, "") for a in accepts), ""])
    chosen = [cell for block in s["blocks"] if block["block_size"] is None for cell in block["cells"]]
    for cell in chosen:
        rounds = ", ".join(f"{w} in {n}" for w, n in sorted(cell["widths"].items(), key=lambda item: int(item[0])))
        lines.append(f"accept {cell['accept']:g}: {cell['low']:.2f} to {cell['high']:.2f}; drafts verified, in rounds: {rounds}")
    lines += [*align(rows), "", f"Planned text in {s['equal']} of {s['runs']} runs; this run is {record['ended']}."]
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", choices=SHAPES, required=True)
    p.add_argument("--bits", type=int, choices=(4, 8, 16), default=16, help="16: not quantized")
    p.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    p.add_argument("--accept", type=float, nargs="+", default=[0.0, 0.5, 0.7, 0.8, 0.9])
    p.add_argument("--block-size", type=int, nargs="*", default=[2, 4, 8, 16])
    p.add_argument("--context", type=int, default=512)
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--trials", type=int, default=3)
    p.add_argument("--max-seconds", type=float, help="begin no run after this, building and warm-up included")
    p.add_argument("--out", type=Path, help="JSON record")
    args = p.parse_args()
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    record = measure(args)
    print(table(record))
    if args.out:
        bench_record.write_record(record, args.out)
    if record["summary"].get("equal") != record["summary"].get("runs"):
        p.exit(1, "Error: expected the planned text in every run; found others. Drafts or rollback are wrong.\n")


if __name__ == "__main__":
    main()
