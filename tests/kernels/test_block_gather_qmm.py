"""block_gather_qmm's text against float64 and against block_qmm's bits, in the emulator."""

import emulator
import mlx.core as mx
import numpy as np
import pytest
from checks import f64, worst_ulp

from dflash_mlx.kernels.block_gather_qmm import KERNEL, block_gather_qmm, block_gather_qmm_kernel, block_gather_qmm_ops
from dflash_mlx.kernels.block_qmm import block_qmm_kernel

pytestmark = pytest.mark.emulator

ULPS = 8  # as block_qmm, whose sums these are
TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def made(e, n, k, dtype=mx.float32, group=32, bits=4, rows=16, seed=0):
    keys = mx.random.split(mx.random.key(seed), 2)
    q = mx.quantize(mx.random.normal((e * n, k), key=keys[0]).astype(dtype), group_size=group, bits=bits)
    return mx.random.normal((rows, k), key=keys[1]).astype(dtype), [a.reshape(e, n, -1) for a in q]


def check(x, w, indices, group=32, bits=4):
    """Each pair is its row times its expert: right in float64, and the very bits of block_qmm with that row alone."""
    share = len(indices) // x.shape[0]
    got_indices = mx.array(indices, dtype=mx.uint32)
    with emulator.emulated():
        got = block_gather_qmm_kernel(x, *w, got_indices, group, bits)
        for p, expert in enumerate(indices):
            alone = block_qmm_kernel(x[p // share : p // share + 1], *(a[expert] for a in w), group, bits)
            assert mx.array_equal(got[p : p + 1], alone), f"pair {p}"
    integers = f64(mx.dequantize(w[0], mx.ones(w[1].shape), mx.zeros(w[2].shape), group, bits))
    weight = (integers * f64(w[1]).repeat(group, -1) + f64(w[2]).repeat(group, -1))[np.array(indices)]
    rows = f64(x).repeat(share, axis=0)
    want, size = np.einsum("pk,pnk->pn", rows, weight), np.einsum("pk,pnk->pn", np.abs(rows), np.abs(weight))
    assert worst_ulp(got, want, size) <= ULPS


@pytest.mark.parametrize("indices", [
    [0], [3, 3, 3, 3], [0, 1, 2, 3, 0, 1, 2, 3], [2] * 9, [1, 1, 2, 2, 1, 1, 2, 2, 0, 3], [3, 2, 1, 0] * 8 + [2] * 32,
])  # fmt: skip
def test_pairs_find_their_expert_and_each_other(indices):
    x, w = made(4, 17, 96, rows=len(indices))
    check(x, w, indices)


@pytest.mark.parametrize("rows, share", [(1, 4), (2, 3), (5, 2), (16, 4)])
def test_rows_share_their_values_over_their_experts(rows, share):
    rng = np.random.default_rng(rows)
    x, w = made(6, 9, 64, rows=rows)
    check(x, w, [int(i) for _ in range(rows) for i in rng.permutation(6)[:share]])


@pytest.mark.full
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_random_shapes(dtype, bits):
    rng = np.random.default_rng(bits)
    for group in (32, 64, 128):
        e, share, rows = int(rng.integers(8, 200)), int(rng.integers(1, 8)), int(rng.integers(1, 17))
        x, w = made(e, int(rng.integers(8, 40)), group * int(rng.integers(1, 12)), TYPES[dtype], group, bits, rows)
        check(x, w, [int(i) for _ in range(rows) for i in rng.permutation(e)[:share]], group, bits)


def test_the_reference_is_mlx_and_agrees():
    x, w = made(5, 20, 64, rows=4)
    indices = mx.array([0, 4, 4, 1, 2, 0, 3, 4], dtype=mx.uint32)
    with emulator.emulated():
        ours = block_gather_qmm_kernel(x, *w, indices, 32, 4)
    theirs = block_gather_qmm_ops(x, *w, indices, 32, 4)
    assert float(mx.abs(ours - theirs).max() / mx.abs(theirs).max()) < 1e-5


def test_the_dispatcher(monkeypatch):
    monkeypatch.delenv("DFLASH_MLX_KERNELS", raising=False)
    x, w = made(5, 20, 64, rows=2)
    indices = mx.array([0, 4, 4, 1], dtype=mx.uint32)
    assert mx.array_equal(block_gather_qmm(x, *w, indices, 32, 4), block_gather_qmm_ops(x, *w, indices, 32, 4))
    with pytest.raises(ValueError, match="multiple of x's 2 rows"):
        block_gather_qmm(x, *w, indices[:3], 32, 4)
    assert KERNEL.name == "block_gather_qmm"
