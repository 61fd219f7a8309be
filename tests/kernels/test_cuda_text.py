"""The same bodies compile as CUDA through the prelude. Compiled only: launching them needs a GPU (bench/kernels.py)."""

import cuda_text
import mlx.core as mx
import pytest

from dflash_mlx.kernels.accept import accept_kernel
from dflash_mlx.kernels.block_attention import block_attention_kernel
from dflash_mlx.kernels.block_gather_qmm import block_gather_qmm_kernel
from dflash_mlx.kernels.block_heads import Heads, block_heads_kernel
from dflash_mlx.kernels.block_linear import Weights, block_linear_kernel
from dflash_mlx.kernels.block_qmm import block_qmm_kernel, block_qmm_tiles_kernel
from dflash_mlx.kernels.gated_delta import gated_delta_kernel
from dflash_mlx.kernels.head_argmax import head_argmax_kernel

pytestmark = pytest.mark.skipif(cuda_text.nvcc() is None, reason="no nvcc")


# A compiler takes two seconds for a text: of many cases every pair of values meets, not every three.
TYPES = [mx.float32, mx.float16, mx.bfloat16]


@pytest.fixture(autouse=True)
def compile_only(monkeypatch):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_text.cuda_kernel)
    monkeypatch.setattr(cuda_text, "REPORTS", [])


def quantized(n, k, dtype, bits, group=64):
    return mx.quantize(mx.random.normal((n, k)).astype(dtype), group_size=group, bits=bits)


def no_spills():
    assert cuda_text.REPORTS and all("0 bytes spill stores, 0 bytes spill loads" in r for r in cuda_text.REPORTS)


def test_accept():
    accept_kernel(mx.zeros((1, 15), dtype=mx.int32), mx.zeros((1, 16), dtype=mx.int32))
    no_spills()


@pytest.mark.parametrize("traditional", [False, True])
def test_block_heads(traditional):
    D, first = 128, mx.zeros((1,), dtype=mx.int32)
    y, context, weight = (mx.zeros(shape, dtype=mx.bfloat16) for shape in ((1, 8, 48 * D), (1, 8, 80 * D), (D,)))
    heads = Heads(32, 8, D, 64 if traditional else D, traditional, 1e-6)
    block_heads_kernel(y, context, first, weight, weight, mx.zeros((1, 1, 16, heads.dims)), heads)
    no_spills()


@pytest.mark.full
@pytest.mark.parametrize("vector", [False, True])
def test_gated_delta(vector):
    k, v = mx.zeros((1, 16, 16, 128), dtype=mx.bfloat16), mx.zeros((1, 16, 32, 128), dtype=mx.bfloat16)
    g = mx.zeros((1, 16, 32, 128) if vector else (1, 16, 32))
    gated_delta_kernel(k, k, v, g, v[..., 0], mx.zeros((1, 32, 128, 128)))
    no_spills()


@pytest.mark.full
@pytest.mark.parametrize(
    "dtype, bits, rows", [(dtype, bits, (1, 16)[(i + j) % 2]) for i, dtype in enumerate(TYPES) for j, bits in enumerate((4, 8))]
)
def test_block_qmm(dtype, bits, rows):
    block_qmm_kernel(mx.zeros((rows, 512), dtype=dtype), *quantized(64, 512, dtype, bits), 64, bits)
    no_spills()


@pytest.mark.full
@pytest.mark.parametrize(
    "dtype, bits, n, group, rows",
    [
        (dtype, *shape, (1, 16)[(i + j) % 2])
        for i, dtype in enumerate(TYPES[1:])
        for j, shape in enumerate([(4, 8192, 64), (8, 2048, 128), (4, 64, 64)])
    ],
)
def test_block_qmm_tiles(dtype, bits, n, group, rows):
    block_qmm_tiles_kernel(mx.zeros((rows, 512), dtype=dtype), *quantized(n, 512, dtype, bits, group), group, bits)
    no_spills()


@pytest.mark.full
@pytest.mark.parametrize(
    "dtype, bits, n, group, form, rows",
    [
        (*weights, form, (1, 16)[(i + j) % 2])
        for i, weights in enumerate(
            [(mx.float16, 4, 8192, 64), (mx.bfloat16, 8, 2048, 128), (mx.bfloat16, 16, 64, 64), (mx.float16, 4, 2048, 128)]
        )
        for j, form in enumerate(["norm", "residual", "norm gated", "norm residual gated", "residual heads"])
    ],
)
def test_block_linear(dtype, bits, n, group, form, rows):
    w = mx.zeros((n, 512), dtype=dtype)
    w = Weights(w, group_size=group) if bits == 16 else Weights(*quantized(n, 512, dtype, bits, group), group, bits)
    gated = "gated" in form
    norm = (mx.zeros((512,), dtype=dtype), 1e-6) if "norm" in form else None
    residual = mx.zeros((rows, n // 2 if gated else n), dtype=dtype) if "residual" in form else None
    x = mx.zeros((1, 8, rows, 64) if "heads" in form else (rows, 512), dtype=dtype)
    block_linear_kernel(x, w, norm, residual, gated, heads="heads" in form)
    no_spills()


@pytest.mark.full
@pytest.mark.parametrize("bits", [4, 8])
def test_block_gather_qmm(bits):
    w = [a.reshape(8, 16, -1) for a in quantized(128, 512, mx.bfloat16, bits)]
    block_gather_qmm_kernel(mx.zeros((4, 512), dtype=mx.bfloat16), *w, mx.zeros((16,), dtype=mx.uint32), 64, bits)
    no_spills()


@pytest.mark.full
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_head_argmax(bits):
    x, dtype = mx.zeros((16, 512), dtype=mx.float16), mx.float16
    head = [mx.zeros((256, 512), dtype=dtype)] if bits is None else [*quantized(256, 512, dtype, bits), 64, bits]
    head_argmax_kernel(x, *head, softcap=30.0, logit_bias=mx.zeros((256,), dtype=dtype))
    no_spills()


@pytest.mark.full
@pytest.mark.parametrize("hq, hk, d, dtype", [(32, 8, 128, mx.bfloat16), (64, 8, 64, mx.float16), (24, 4, 256, mx.bfloat16)])
def test_block_attention(hq, hk, d, dtype):
    q, kv = mx.zeros((1, hq, 16, d), dtype=dtype), mx.zeros((1, hk, 300, d), dtype=dtype)
    block_attention_kernel(q, kv, kv, 0.1, window=128, sinks=mx.zeros((hq,), dtype=dtype))
    no_spills()
