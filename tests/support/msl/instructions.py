"""Instructions a weight of a product's text, counted by the emulator: what one more K costs all threads, over its weights.

    python tests/support/msl/instructions.py          the table of docs/kernels.md

Two lengths of K are subtracted, so that what a launch does once is not in it. An 8 x 8 x 8 matrix product is 16 of a lane (its
512 multiply-adds over 32 lanes), a load 2 (its address is a sum), all else 1, but a half as an operand of float arithmetic, which
costs nothing on Apple's GPUs. Not counted: addresses and loop counters.
Sources: of both rules, the instruction set as dougallj/applegpu found it and philipturner/metal-benchmarks timed it, M1 and M2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import emulator
import mlx.core as mx

from dflash_mlx.kernels.block_qmm import block_qmm_kernel, block_qmm_tiles_kernel

COSTS = {"matrix": 16, "load": 2, "half_to_float": 0}
EIGHTS = partial(block_qmm_tiles_kernel, tile=8, simdgroups=8)
# What is counted: (text, rows, launch, columns of a product that share x).
TEXTS = [
    *(("block_qmm, 4 columns", rows, partial(block_qmm_kernel, columns=4), 4) for rows in (1, 2, 4, 8)),
    *((f"block_qmm_tiles, {columns} columns", 8, partial(EIGHTS, columns=columns), columns) for columns in (32, 64)),
    ("block_qmm_tiles, 32 columns", 16, partial(EIGHTS, columns=32), 32),
    ("CUDA's block_qmm_tiles, 32 columns", 8, partial(block_qmm_tiles_kernel, tile=16, columns=32, simdgroups=8), 32),
]
TYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16}


def a_weight(launch: Callable[..., mx.array], dtype: mx.Dtype, bits: int, group: int, rows: int, columns: int) -> float:
    """Instructions of all threads a weight."""
    step = 1024 if columns <= 8 else 8 * group
    found = []
    for k in (step, 2 * step):
        x = mx.zeros((rows, k), dtype=dtype)
        n = 4 * columns if columns <= 8 else columns
        w = mx.quantize(mx.zeros((n, k), dtype=dtype), group_size=group, bits=bits)
        with emulator.emulated(), emulator.counting() as counts:
            launch(x, *w, group, bits)
        found.append(sum(COSTS.get(kind, 1) * times for kind, times in counts.items()) / n)
    return (found[1] - found[0]) / step


def main() -> None:
    print("| text | rows | " + " | ".join(f"{bits} bit, group {group}, {t}" for bits, group in FORMATS for t in TYPES) + " |")
    print("| --- | ---: |" + " ---: |" * len(FORMATS) * len(TYPES))
    for what, rows, launch, columns in TEXTS:
        cells = [a_weight(launch, t, bits, group, rows, columns) for bits, group in FORMATS for t in TYPES.values()]
        print(f"| {what} | {rows} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")


FORMATS = [(4, 64), (4, 32), (4, 128), (8, 64)]

if __name__ == "__main__":
    main()
