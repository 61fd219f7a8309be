"""Predicted cost of a verify pass on Macs: what must be read and multiplied, over what a chip can do. PREDICTIONS, not measured.

    python bench/roofline.py                     four models, 4 bit, rows 1 to 16, 4,096 tokens of context
    python bench/roofline.py --bits 8 --context 32768

A part costs the larger of its bytes over the chip's usable bandwidth and its multiply-adds over the rate that vector arithmetic
reaches; parts follow each other. Not in it: launches, norms, the recurrent state of linear attention, the drafter. `measured` is
16 rows over 1 row of block_qmm from a record of `bench/kernels.py` (bench/results/kernels-DEVICE.json), for the chip's owner to
fill. What a CUDA record says is that the text is right and reads memory once; it says nothing about a Mac's time.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
# What of a peak a plain kernel gets. Bandwidth: 122 of 153.6 GB/s were measured by a user on an M5 (metal-roofline);
# arithmetic: a guess for multiply-adds that are fed from cache.
USABLE_BANDWIDTH, USABLE_ARITHMETIC = 0.79, 0.7


@dataclass(frozen=True)
class Chip:
    name: str
    device: str  # as the record's file is called
    gbps: float  # the maker's figure
    tflops: float  # float32 vector: 256 a clock and core at the clock that users report; M5: 3.76 measured by a user
    # Of matrix units that the texts reach, 16 bit. Up to M4 simdgroup_matrix runs on the vector units; whether it reaches an M5's
    # own units is not known here. H100: the maker's 989, of which mma.sync is said to get 0.6.
    matrix_tflops: float = 0


CHIPS = [
    Chip("M1 (8 cores)", "Apple-M1", 68.25, 2.6),
    Chip("M3 Max (40 cores)", "Apple-M3-Max", 400, 14.1),
    Chip("M5 (10 cores)", "Apple-M5", 153.6, 3.76),
    Chip("H100", "NVIDIA-H100-80GB-HBM3", 3350, 67, 593),
]


@dataclass(frozen=True)
class Model:
    """Weights by how many rows share them; attention of the full layers; shapes from the published configs."""

    name: str
    layers: int  # weights of all layers that every row uses
    head: int
    caches: tuple[tuple[int, int, int, int, int], ...]  # (layers, query heads, KV heads, head dimension, window or 0)
    experts: tuple[int, int, int] = (0, 0, 1)  # (weights of one expert over all layers, chosen by a row, there are)


def models() -> list[Model]:
    h = 4096
    qwen3_8b = Model("Qwen3-8B", 36 * (h * (2 * 4096 + 2 * 1024) + 3 * 12288 * h), 151936 * h, ((36, 32, 8, 128, 0),))
    h = 5120
    full = h * (2 * 24 * 256 + 2 * 4 * 256 + 24 * 256)
    linear = h * (2 * 16 * 128 + 3 * 48 * 128)
    qwen35_27b = Model("Qwen3.5-27B", 16 * full + 48 * linear + 64 * 3 * 17408 * h, 248320 * h, ((16, 24, 4, 256, 0),))
    h = 2048
    full = h * (2 * 16 * 256 + 2 * 2 * 256 + 16 * 256)
    linear = h * (2 * 16 * 128 + 3 * 32 * 128)
    shared = 3 * 512 * h
    a3b = Model(
        "Qwen3.6-35B-A3B",
        10 * full + 30 * linear + 40 * (shared + 256 * h),
        248320 * h,
        ((10, 16, 2, 256, 0),),
        (40 * 3 * 512 * h, 8, 256),
    )
    h = 2880
    caches = ((12, 64, 8, 64, 0), (12, 64, 8, 64, 128))
    gpt_oss = Model("gpt-oss-20b", 24 * h * (2 * 4096 + 2 * 512 + 32), 201088 * h, caches, (24 * 3 * h * h, 4, 32))
    return [qwen3_8b, qwen35_27b, a3b, gpt_oss]


def parts(model: Model, rows: int, bits: int, context: int) -> dict[str, tuple[float, float]]:
    """name: (bytes, multiply-adds) of one pass over `rows` rows. Groups of 64 with 16-bit scale and bias."""
    per_weight = bits / 8 + 4 / 64
    weight, chosen, there = model.experts
    used = there * (1 - (1 - chosen / there) ** rows)  # expected distinct experts
    keys = sum(n * hk * d * (min(context, w + rows) if w else context) for n, _, hk, d, w in model.caches)
    attended = sum(n * hq * d * (min(context, w) if w else context) for n, hq, _, d, w in model.caches)
    return {
        "block_qmm": (model.layers * per_weight, model.layers * rows),
        "block_gather_qmm": (weight * used * per_weight, weight * chosen * rows),
        "head_argmax": (model.head * per_weight, model.head * rows),
        "block_attention": (2 * 2 * keys, 2 * attended * rows),
    }


def pass_ms(model: Model, chip: Chip, rows: int, bits: int, context: int) -> dict[str, float]:
    ms = {}
    for name, (nbytes, multiplies) in parts(model, rows, bits, context).items():
        tflops = chip.tflops
        if name == "block_qmm" and chip.matrix_tflops:
            # Matrix units always multiply 8 or 16 rows.
            tflops, multiplies = chip.matrix_tflops, multiplies / rows * (8 if rows <= 8 else 16)
        arithmetic_s = 2 * multiplies / (tflops * 1e12 * USABLE_ARITHMETIC)
        ms[name] = 1e3 * max(nbytes / (chip.gbps * 1e9 * USABLE_BANDWIDTH), arithmetic_s)
    return ms


def measured(chip: Chip, bits: int) -> str:
    """16 rows over 1 row in the owner's record, by the sum over the shapes of block_qmm's better text."""
    try:
        entries = json.loads((RESULTS / f"kernels-{chip.device}.json").read_text())["entries"]
    except (OSError, ValueError, KeyError):
        return "-"
    # Of each shape the quickest plan; records of versions before plans have one.
    best: dict[tuple, float] = {}
    for e in entries:
        if e["what"].startswith(f"{bits} bit") and e.get("kernel_us"):
            key = (e["kernel"], e["rows"], e["what"])
            best[key] = min(best.get(key, e["kernel_us"]), e["kernel_us"])
    times = {
        (kernel, rows): sum(us for (k, m, _), us in best.items() if (k, m) == (kernel, rows))
        for kernel in ("block_qmm", "block_qmm_tiles")
        for rows in (1, 16)
    }
    done = [(times[k, 1] + times[k, 16], times[k, 16] / times[k, 1]) for k in ("block_qmm", "block_qmm_tiles") if times[k, 1]]
    return f"{min(done)[1]:.2f}" if done else "-"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bits", type=int, choices=(4, 8), default=4)
    p.add_argument("--context", type=int, default=4096)
    args = p.parse_args()
    rows = (1, 2, 4, 8, 16)
    print(f"PREDICTED, not measured: {args.bits} bit, {args.context} tokens of context. ms of a pass at 1, 2, 4, 8, 16 rows;")
    print("shares of the 16-row pass: q block_qmm, g block_gather_qmm, h head_argmax, a block_attention\n")
    print(f"{'model':16} {'chip':23} {'ms at ' + ', '.join(map(str, rows)):>42}   16/1   {'shares at 16 rows':24} measured 16/1")
    for model in models():
        for chip in CHIPS:
            by = {m: pass_ms(model, chip, m, args.bits, args.context) for m in rows}
            totals = [sum(by[m].values()) for m in rows]
            shares = " ".join(
                f"{n} {100 * by[16][k] / totals[-1]:.0f}%" for k, n in zip(by[16], "qgha", strict=True) if by[16][k]
            )
            ms = " ".join(f"{t:7.1f}" for t in totals)
            ratio = totals[-1] / totals[0]
            print(f"{model.name:16} {chip.name:23} {ms:>42}  {ratio:5.2f}   {shares:24} {measured(chip, args.bits)}")


if __name__ == "__main__":
    main()
