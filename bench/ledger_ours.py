"""A round with our own products on Macs, by the model of `ledger_time`: PREDICTIONS, nothing here was measured.

    python bench/ledger_ours.py            rounds of 4, 8 and 16 rows in plain steps, at 1k; of 8 rows at 4k and 32k

Every quantized product takes MLX's kernel or ours, whichever the model says is quicker, as a trial would decide. Ours takes the
longer of reading its weights once and its instructions (`INSTRUCTIONS`, counted by the emulator, 4 bit, group 64, bfloat16) at
0.79 of a chip's rate: the share that MLX's matrix kernel shows on an M3 Max (mlx 3863). Bandwidth 0.85 of the maker's, 0.97 on an
M3 Max, 0.93 on an M5 Max (`ledger_time`). Matrix units of an M5 are not counted on. Launches are those of MLX's round; at 4k and
32k, a stage's are also those with attention over folded rows (`small_batch`) where the model says that they are quicker.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from unittest import mock

import ledger
import ledger_models
import ledger_time
from ledger_metal import Gpu, Launch, Ledger
from ledger_time import Chip
from ledger_walk import Round, Walk

from dflash_mlx.kernels import autotune
from dflash_mlx.kernels.small_batch import FOLDED

# Rows: instructions a weight. docs/kernels.md has the table, tests/kernels/test_instructions.py the count.
INSTRUCTIONS = {1: 4.0, 2: 5.4, 4: 8.2, 8: 10.8, 16: 20.8}
ISSUE = 0.79
# Clocks as users report them, 256 operations a clock and core; bandwidth as Apple announced it.
OTHERS = [
    ("M1 (8 cores)", Gpu(13, "g"), 68.25, 2.6),
    ("M2 Pro (19 cores)", Gpu(14, "s"), 200, 6.8),
    ("M4 Max (40 cores)", Gpu(16, "s"), 546, 16.2),
    ("M3 Ultra (80 cores)", Gpu(15, "d"), 819, 28.3),
]
MODELS, ROWS = ("qwen3-8b", "qwen3.5-9b", "qwen3.5-27b", "qwen3.6-35b-a3b"), (4, 8, 16)
LONG = 4096, 32768


def chips() -> list[Chip]:
    """All chips; MLX's rates for rows scaled by their arithmetic from the M3 Max's, which were measured."""
    m3, m5, _ = ledger.chips()
    made = []
    for name, gpu, gbps, tflops in OTHERS:
        by = tflops / m3.tflops
        made.append(Chip(name, gpu, gbps, tflops, 0.85, m3.wide * by, m3.block * by, m3.gap_us))
    return [*made[:2], m3, *made[2:], m5]


def product_s(launch: Launch, chip: Chip) -> float:
    """Seconds of our text in the place of a quantized product."""
    per = INSTRUCTIONS[next(rows for rows in INSTRUCTIONS if launch.rows <= rows)]
    bandwidth = chip.gbps * 1e9 * chip.bandwidth
    read = launch.weight_bytes / bandwidth
    work = launch.macs / launch.rows * per / (ISSUE * chip.tflops * 1e12 / 2)
    return max(read, work) + (launch.nbytes - launch.weight_bytes) / bandwidth


def launch_s(launch: Launch, chip: Chip) -> float:
    stock = ledger_time.launch_s(launch, chip)
    return min(stock, product_s(launch, chip)) if launch.weight_bytes and launch.rows <= max(INSTRUCTIONS) else stock


def round_ms(launches: Sequence[Launch], chip: Chip) -> float:
    return 1e3 * sum(launch_s(launch, chip) + launch.waits * chip.gap_us * 1e-6 for launch in launches)


def ratio(name: str, rows: int, chip: Chip, stock: bool = False) -> tuple[float, float]:
    """Milliseconds of a round on the device, and that in plain steps of MLX's own."""
    gpu = f"{chip.gpu.generation}{chip.gpu.size}"
    launches, plain = (ledger.ledger(name, n, 1024, gpu).launches for n in (rows, 1))
    ms = (ledger_time.round_ms if stock else round_ms)(launches, chip)
    return ms, ms / ledger_time.round_ms(plain, chip)


def table() -> str:
    lines = ["| model | rows | " + " | ".join(chip.name for chip in chips()) + " |"]
    lines.append("| --- | ---: |" + " ---: |" * len(chips()))
    for name in MODELS:
        for rows in ROWS:
            cells = []
            for chip in chips():
                (ms, steps), (_, before) = ratio(name, rows, chip), ratio(name, rows, chip, stock=True)
                cells.append(f"{ms:.1f} ms, {steps:.2f} ({before:.2f})")
            lines.append(f"| {name} | {rows} | {' | '.join(cells)} |")
    return "\n".join(lines)


@cache
def folded(name: str, rows: int, context: int) -> Round:
    """The round with attention over folded rows wherever it may serve, and none of our texts."""
    choose = lambda question, rows: next((c for c in question.candidates if c.kernel is FOLDED), None)  # noqa: E731
    with mock.patch.object(autotune, "choose", choose), mock.patch.object(autotune, "_plans", {}):
        walk = Walk(ledger_models.build(ledger_models.published()[name]), context, kernels=True)
        return walk.primitives(rows, rows // 2, rows // 2 + 1)


def folding_ms(name: str, rows: int, context: int, chip: Chip) -> tuple[float, float]:
    """Milliseconds of a round with MLX's attention, and with the quicker of it and folded rows in each stage."""
    gpu = f"{chip.gpu.generation}{chip.gpu.size}"
    ways = ledger.ledger(name, rows, context, gpu).launches, Ledger(folded(name, rows, context), chip.gpu).launches
    names = {launch.stage for launch in ways[0]}
    stages = [[round_ms([launch for launch in way if launch.stage == stage], chip) for way in ways] for stage in names]
    return sum(stock for stock, _ in stages), sum(map(min, stages))


def long_table() -> str:
    """At 8 rows, by the context."""
    lines = ["| model | context | " + " | ".join(chip.name for chip in chips()) + " |"]
    lines.append("| --- | ---: |" + " ---: |" * len(chips()))
    for name in MODELS:
        for context in LONG:
            cells = ["{:.1f}, {:.1f} ms".format(*folding_ms(name, 8, context, chip)) for chip in chips()]
            lines.append(f"| {name} | {context // 1024}k | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), long_table(), sep="\n\n")
