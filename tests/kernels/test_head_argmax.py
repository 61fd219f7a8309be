"""head_argmax's texts against float64 and MLX's argmax, in the emulator."""

import emulator
import mlx.core as mx
import numpy as np
import pytest
from checks import f64, ulp

from dflash_mlx.kernels.head_argmax import REDUCE, head_argmax, head_argmax_kernel, head_argmax_ops

pytestmark = pytest.mark.emulator

TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def made(v, h, dtype, bits, group=32, rows=16, seed=0):
    """x and the head's weights: dense for bits None."""
    keys = mx.random.split(mx.random.key(seed), 2)
    w = (mx.random.normal((v, h), key=keys[0])).astype(dtype)
    x = mx.random.normal((rows, h), key=keys[1]).astype(dtype)
    return x, ([w] if bits is None else [*mx.quantize(w, group_size=group, bits=bits), group, bits])


def logits(x, head):
    """In float64, from the stored numbers."""
    if len(head) == 1:
        return f64(x) @ f64(head[0]).T
    q, scales, biases, group, bits = head
    integers = f64(mx.dequantize(q, mx.ones(scales.shape), mx.zeros(scales.shape), group, bits))
    return f64(x) @ (integers * np.repeat(f64(scales), group, axis=1) + np.repeat(f64(biases), group, axis=1)).T


def check(x, head, cap=None, bias=None):
    """Each id's own logit is the largest, and the margin is right, but for one rounding of the type on either side."""
    with emulator.emulated():
        ids, margin = head_argmax_kernel(x, *head, **({"softcap": cap} if cap else {}), logit_bias=bias)
        for m in (1, 2, 5, x.shape[0]):
            few = head_argmax_kernel(x[:m], *head, **({"softcap": cap} if cap else {}), logit_bias=bias)
            assert mx.array_equal(few[0], ids[:m]) and mx.array_equal(few[1], margin[:m]), f"{m} rows"
    want = logits(x, head)
    if cap:
        want = np.tanh(want / cap) * cap
    if bias is not None:
        want = want + f64(bias)
    order = np.sort(want, axis=1)
    # A logit is rounded once, with a cap or a bias three or four times; the float32 sum is closer than that.
    step = (2 if cap or bias is not None else 1) * np.maximum(ulp(order[:, -1], x.dtype), 1e-5)
    chosen = np.take_along_axis(want, np.array(ids)[:, None], axis=1)[:, 0]
    assert (order[:, -1] - chosen <= step).all()
    assert (np.abs(np.array(margin) - (order[:, -1] - order[:, -2])) <= 2 * step).all()
    return np.array(ids), np.array(margin)


EDGES = [
    (127, 64, "float32", 4),
    (128, 520, "float32", None),
    (129, 288, "bfloat16", 8),
    (300, 512, "float16", 4),
    (33, 40, "bfloat16", None),
]


@pytest.mark.parametrize("v, h, dtype, bits", EDGES)
def test_ids_and_margins(v, h, dtype, bits):
    check(*made(v, h, TYPES[dtype], bits))


@pytest.mark.parametrize("cap, biased", [(30.0, False), (None, True), (5.0, True)])
def test_soft_cap_and_logit_bias(cap, biased):
    x, head = made(200, 64, mx.float32, 4)
    bias = mx.random.normal((200,), key=mx.random.key(5)) * 8 if biased else None
    ids, _ = check(x, head, cap, bias)
    ops = head_argmax_ops(x, *head, softcap=cap, logit_bias=bias)
    assert np.array_equal(ids, np.array(ops[0]))


@pytest.mark.full
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_random_shapes(dtype, bits):
    rng = np.random.default_rng(3)
    for group in (32, 64, 128):
        for v in (8, 31, 32, 257, int(rng.integers(300, 1500))):
            h = group * int(rng.integers(1, 6))
            check(*made(v, h, TYPES[dtype], bits, group, rows=int(rng.integers(6, 17)), seed=v))


@pytest.mark.parametrize("places", [(3, 70), (15, 16), (130, 131), (31, 299), (127, 128), (0, 299)])
def test_the_lowest_id_wins_a_tie_and_the_margin_is_zero(places):
    w = mx.zeros((300, 8), dtype=mx.float32) - 1
    w[mx.array(places)] = 1.0
    with emulator.emulated():
        ids, margin = head_argmax_kernel(mx.ones((2, 8)), w)
    assert ids.tolist() == [places[0]] * 2 and margin.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("place", [0, 17, 32, 128, 298])
def test_the_only_large_logit_is_found_anywhere(place):
    w = mx.zeros((299, 8))
    w[place] = 0.5
    with emulator.emulated():
        ids, margin = head_argmax_kernel(mx.ones((1, 8)), w)
        all_negative = head_argmax_kernel(-mx.ones((1, 8)), 1 - w)
    assert ids.tolist() == [place] and margin.tolist() == [4.0]
    assert all_negative[0].tolist() == [place] and all_negative[1].tolist() == [4.0]


def test_a_nan_logit_is_chosen_as_mlx_does_and_its_margin_is_nan():
    x, (w,) = made(300, 64, mx.float32, None)
    w[200, 3] = float("nan")
    # In the same part of a stripe, in another part of it, in another stripe.
    w[mx.array([210, 240, 290]), 3] = float("nan")
    x[1, 0] = float("nan")
    with emulator.emulated():
        ids, margin = head_argmax_kernel(x[:2], w)
    assert ids.tolist() == mx.argmax(x[:2] @ w.T, axis=-1).tolist() == [200, 0]
    assert bool(mx.all(mx.isnan(margin)))


def test_a_difference_from_mlx_lms_normalised_row_is_a_tie():
    """mlx-lm: argmax(logits - logsumexp(logits)). In bfloat16 with small logits the subtraction merges neighbours."""
    x, head = made(400, 64, mx.bfloat16, None, rows=256)
    x = x * 0.05
    merged = 0
    for i in range(0, 256, 16):
        with emulator.emulated():
            ids, margin = head_argmax_kernel(x[i : i + 16], *head)
        z = x[i : i + 16] @ head[0].T
        row = z - mx.logsumexp(z, axis=-1, keepdims=True)
        differ = np.array(ids != mx.argmax(row, axis=-1))
        merged += differ.sum()
        normalised_step = ulp(f64(mx.max(row, axis=-1)), mx.bfloat16)
        own_step = ulp(f64(mx.max(z, axis=-1)), mx.bfloat16)
        assert (np.array(margin)[differ] <= (normalised_step + 2 * own_step)[differ]).all()
    assert merged  # the case does occur here: otherwise the test says nothing


def test_the_reduction_over_many_stripes():
    rng = np.random.default_rng(0)
    for p in (1, 2, 31, 32, 33, 100):
        best = rng.integers(0, 5, (6, p)).astype(np.float32)
        second = best - rng.integers(0, 3, (6, p))
        ids = np.arange(p)[None] * 128 + rng.integers(0, 128, (6, p))
        best[5, p // 2] = np.nan
        best[4] = -np.inf
        second[4] = -np.inf
        with emulator.emulated():
            got, margin = REDUCE(
                [mx.array(best), mx.array(second.astype(np.float32)), mx.array(ids.astype(np.int32))],
                template=[],
                grid=(192, 1, 1),
                threadgroup=(32, 1, 1),
                output_shapes=[(6,), (6,)],
                output_dtypes=[mx.int32, mx.float32],
            )
        at = best[:5].argmax(axis=1)
        assert got.tolist() == [*ids[np.arange(5), at], ids[5, p // 2]]
        rest = best[:4].copy()
        rest[np.arange(4), at[:4]] = second[np.arange(4), at[:4]]
        assert np.array_equal(np.array(margin)[:4], best[np.arange(4), at[:4]] - rest.max(axis=1)) and np.isnan(margin[5].item())


def test_the_dispatcher_norms_and_keeps_leading_axes(monkeypatch):
    monkeypatch.delenv("DFLASH_MLX_KERNELS", raising=False)
    x, head = made(100, 64, mx.float32, 4, rows=6)
    weight = mx.random.normal((64,))
    ids, margin = head_argmax(x.reshape(2, 3, 64), *head, norm=(weight, 1e-6))
    want = head_argmax_ops(mx.fast.rms_norm(x, weight, 1e-6), *head)
    assert mx.array_equal(ids, want[0].reshape(2, 3)) and mx.array_equal(margin, want[1].reshape(2, 3))


def test_the_launch_keeps_leading_axes():
    x, head = made(100, 64, mx.float32, 4, rows=6)
    with emulator.emulated():
        flat, folded = head_argmax_kernel(x, *head), head_argmax_kernel(x.reshape(2, 3, 64), *head)
    for a, b in zip(flat, folded, strict=True):
        assert mx.array_equal(a.reshape(2, 3), b)
