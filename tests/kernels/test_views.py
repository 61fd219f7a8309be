"""Inputs that are views: MLX hands a kernel an address in the middle of a buffer, and a vector load there must be aligned.

The contract (kernels/kernel.py): a view begins at a multiple of 8 elements where a text loads vectors, anywhere where it does
not. The emulator counts addresses from the buffer's own beginning, so a text that needs more fails here as on a GPU.
"""

from functools import partial

import emulator
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

pytestmark = pytest.mark.emulator

FORMATS = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]


def view(a, rows=0, items=0):
    """The same values, `rows` rows and `items` elements into a longer buffer that holds NaN or large numbers before them."""
    flat = a.reshape(-1)
    before = mx.full((rows * a.shape[-1] + items,), float("nan") if mx.issubdtype(a.dtype, mx.floating) else 77, dtype=a.dtype)
    return mx.concatenate([before, flat])[before.size :].reshape(a.shape)


def normal(*shape, dtype=mx.float16, seed=0):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def linear_kernel(x, *weights):
    return block_linear_kernel(x, Weights(*weights))


def same(kernel, given, moved):
    """The kernel's outputs are bit-equal for arrays and for views with the same values."""
    with emulator.emulated():
        want, got = kernel(*given), kernel(*moved)
    for a, b in zip(*([o] if isinstance(o, mx.array) else o for o in (want, got)), strict=True):
        assert mx.array_equal(a, b)


@pytest.mark.parametrize("launch, dtype", [(block_qmm_kernel, mx.float32), (block_qmm_kernel, mx.float16),
                                           (partial(block_qmm_tiles_kernel, tile=16), mx.bfloat16),
                                           (partial(block_qmm_tiles_kernel, tile=8), mx.bfloat16)])  # fmt: skip
@pytest.mark.parametrize("bits, group", FORMATS)
def test_block_qmm_takes_rows_and_weights_from_the_middle_of_a_buffer(launch, dtype, bits, group):
    for k in (group, 3 * group):
        q = mx.quantize(normal(9, k, dtype=dtype, seed=1), group_size=group, bits=bits)
        x = normal(3, k, dtype=dtype)
        same(launch, (x, *q, group, bits), (view(x, 1), view(q[0], 1), view(q[1], 0, 1), view(q[2], 0, 3), group, bits))
        same(launch, (x[:1], *q, group, bits), (view(x[:1], 0, 8), *q, group, bits))


@pytest.mark.parametrize("bits, group", [(4, 64), (16, 32)])
def test_block_linear_takes_views(bits, group):
    dtype, k = mx.bfloat16, 3 * group
    w, x, r = normal(18, k, dtype=dtype, seed=1), normal(3, k, dtype=dtype), normal(3, 9, dtype=dtype, seed=2)
    w = (w,) if bits == 16 else mx.quantize(w, group_size=group, bits=bits)
    moved = (view(w[0], 1), *(view(a, 0, i) for i, a in zip((1, 3), w[1:], strict=False)))
    given, elsewhere = (Weights(*a)._replace(group_size=group, bits=bits) for a in (w, moved))
    weight, eps = normal(k, dtype=dtype, seed=3), 1e-5
    norm = view(weight, 0, 8), eps
    same(block_linear_kernel, (x, given, (weight, eps), r, True), (view(x, 1), elsewhere, norm, view(r, 0, 1), True))
    same(block_linear_kernel, (x[:1], given, None, None, True), (view(x[:1], 0, 8), given, None, None, True))


def test_block_gather_qmm_takes_views():
    w = [a.reshape(3, 5, -1) for a in mx.quantize(normal(15, 96, seed=1), group_size=32, bits=4)]
    x, indices = normal(3, 96), mx.array([0, 2, 2, 1, 0, 1], dtype=mx.uint32)
    moved = (view(x, 1), view(w[0], 5), view(w[1], 0, 1), view(w[2], 0, 3), view(indices, 0, 1), 32, 4)
    same(block_gather_qmm_kernel, (x, *w, indices, 32, 4), moved)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_head_argmax_takes_views(dtype, bits):
    h = 24 if bits is None else 96
    w, x, bias = normal(150, h, dtype=dtype, seed=1), normal(2, h, dtype=dtype), normal(150, dtype=dtype, seed=2)
    if bits is None:
        head, moved = (w, None, None, 64, 4), (view(w, 1), None, None, 64, 4)
    else:
        q = mx.quantize(w, group_size=32, bits=bits)
        head, moved = (*q, 32, bits), (view(q[0], 1), view(q[1], 0, 1), view(q[2], 0, 3), 32, bits)
    same(head_argmax_kernel, (x, *head, None, bias), (view(x, 1), *moved, None, view(bias, 0, 1)))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_block_attention_takes_views(dtype):
    q, k, v = (normal(1, heads, rows, 32, dtype=dtype, seed=rows + heads) for heads, rows in ((4, 3), (2, 40), (2, 40)))
    sinks = normal(4, dtype=dtype)
    given = (q, k, v, 0.2, True, 20, sinks)
    same(block_attention_kernel, given, (view(q, 1), view(k, 0, 1), view(v, 0, 3), 0.2, True, 20, view(sinks, 0, 1)))


def test_block_heads_takes_views():
    heads = Heads(2, 1, 32, 16, False, 1e-5)
    y, context, weight, turns = (
        normal(1, 3, 4 * 32),
        normal(1, 2, 5 * 32, seed=1),
        normal(32, seed=2),
        normal(1, 1, 5, 16, dtype=mx.float32),
    )
    first = mx.array([64], dtype=mx.int32)
    moved = (view(y, 0, 1), view(context, 0, 3), view(first, 0, 1), view(weight, 0, 1), view(weight, 0, 5), view(turns, 0, 1))
    same(block_heads_kernel, (y, context, first, weight, weight, turns, heads), (*moved, heads))


def test_accept_takes_views():
    draft, target = mx.array([[5, 6, 7]], dtype=mx.int32), mx.array([[5, 6, 9, 1]], dtype=mx.int32)
    same(accept_kernel, (draft, target), (view(draft, 0, 1), view(target, 0, 3)))


def test_gated_delta_takes_views():
    k, v = normal(1, 3, 2, 32), normal(1, 3, 4, 8, seed=1)
    g, state = mx.full((1, 3, 4), 0.5), normal(1, 4, 8, 32, dtype=mx.float32)
    moved = (view(k, 0, 1), view(k, 1), view(v, 0, 3), view(g, 0, 1), view(v[..., 0], 0, 1), view(state, 0, 1))
    same(gated_delta_kernel, (k, k, v, g, v[..., 0], state), moved)


@pytest.mark.skipif(mx.cuda.is_available(), reason="on a GPU a misaligned address ends the process")
@pytest.mark.parametrize("launch", [block_qmm_kernel, block_qmm_tiles_kernel, linear_kernel])
def test_a_row_that_begins_elsewhere_is_the_fault_that_a_gpu_reports(launch):
    q = mx.quantize(normal(9, 64, seed=1), group_size=64, bits=4)
    with emulator.emulated(), pytest.raises(emulator.KernelFault, match="misaligned: x at byte"):
        mx.eval(launch(view(normal(1, 64), 0, 1), *q, 64, 4))


@pytest.mark.full
def test_no_family_cuts_a_products_row_out_of_the_middle(monkeypatch):
    """What the contract leaves to models. Their sizes are odd here: a row that is cut would begin at no multiple of 16 bytes."""
    import families
    import mlx.nn as nn
    from mlx_lm.models.cache import make_prompt_cache

    begins, inner = [], nn.Linear.__call__

    def product(layer, x):
        begins.append((family, layer.weight.shape, emulator._buffer(x, True)[2]))
        return inner(layer, x)

    monkeypatch.setattr(nn.Linear, "__call__", product)
    family = "none"
    nn.Linear(20, 4)(view(normal(1, 20, dtype=mx.float32), 0, 1))
    assert begins.pop() == ("none", (4, 20), 4)  # one that is cut would be seen
    for family in (*families.FAMILIES, *families.OTHERS):
        model = families.family(family)
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([[1, 2, 3]]), cache=cache))
        mx.eval(model(mx.array([[4]]), cache=cache))
    assert len(begins) > 20 * len(families.FAMILIES) and not [b for b in begins if b[2]]
