"""What products cost in instructions a weight, counted from their texts: docs/kernels.md has the table."""

import sys
from functools import partial
from pathlib import Path

import emulator
import instructions
import mlx.core as mx
import pytest

from dflash_mlx.kernels.launch import Kernel

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize("dtype, most", [("float16", 11.0), ("bfloat16", 11.4)])
def test_eight_rows_cost_their_matrix_products_and_little_more(dtype, most):
    found = instructions.a_weight(partial(instructions.EIGHTS, columns=32), instructions.TYPES[dtype], 4, 64, 8, 32)
    # 8 of them are the multiply-adds themselves.
    assert 8 < found <= most


@pytest.mark.parametrize("dtype, most", [("float16", 7.1), ("bfloat16", 8.2)])
def test_four_rows_unpack_a_weight_once(dtype, most):
    found = instructions.a_weight(instructions.block_qmm_kernel, instructions.TYPES[dtype], 4, 64, 4, 4)
    assert 4 < found <= most


@pytest.mark.full
def test_the_ledger_reckons_with_what_is_counted():
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    from ledger_ours import INSTRUCTIONS

    four = partial(instructions.block_qmm_kernel, columns=4)
    ways = {rows: (four, 4) for rows in (1, 2, 4)} | {8: (partial(instructions.EIGHTS, columns=64), 64)}
    ways[16] = (partial(instructions.EIGHTS, columns=32), 32)
    for rows, (launch, columns) in ways.items():
        found = instructions.a_weight(launch, mx.bfloat16, 4, 64, rows, columns)
        assert round(found, 1) == INSTRUCTIONS[rows], rows


def test_what_is_counted_is_what_a_text_does():
    """A shift, two sums, a product and a multiply-add each; nothing for what is known before."""
    source = """
    constexpr uint MASK = (1u << 4) - 1u;
    const int i = int(thread_index_in_threadgroup);
    const float a = float(x[i]);
    const uint word = w[i] >> 4;
    y[i] = T(metal::fma(a + 1.0f, a, float(MASK)) + 0.0f * float(int(word)));
    """
    text = Kernel("counted", ("x", "w"), ("y",), source)
    given = [mx.zeros((32,), dtype=mx.bfloat16), mx.zeros((32,), dtype=mx.uint32)]
    shape = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(32,)], "output_dtypes": [mx.bfloat16]}
    with emulator.emulated(), emulator.counting() as found:
        text(given, template=[("T", mx.bfloat16)], **shape)
    a_thread = {kind: n / 32 for kind, n in found.items() if n}
    assert a_thread == {"load": 2, "alu": 4, "fma": 1, "bfloat_to_float": 1, "to_small": 1}
