"""gated_delta's text against the recurrence in float64 and mlx-lm's own steps, in the emulator."""

import emulator
import mlx.core as mx
import numpy as np
import pytest
from checks import f64

from dflash_mlx.kernels.gated_delta import gated_delta, gated_delta_kernel, gated_delta_ops

pytestmark = pytest.mark.emulator
TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def made(m=5, b=1, hk=2, hv=4, dk=32, dv=8, dtype=mx.float32, vector=False, seed=0):
    """(q, k, v, g, beta, state)"""
    rng = np.random.default_rng(seed)

    def array(*shape, size=1.0):
        return mx.array(size * rng.normal(size=shape), dtype=mx.float32)

    q, k = (array(b, m, hk, dk, size=dk**-0.5).astype(dtype) for _ in range(2))
    v, beta = array(b, m, hv, dv).astype(dtype), mx.sigmoid(array(b, m, hv)).astype(dtype)
    g = mx.array(rng.uniform(0.3, 1, (b, m, hv, dk) if vector else (b, m, hv)), dtype=mx.float32)
    return q, k, v, g, beta, array(b, hv, dv, dk)


def exact(q, k, v, g, beta, state):
    """Row by row in float64: outputs [B, M, Hv, Dv] and the states after each row."""
    q, k, v, g, beta, s = map(f64, (q, k, v, g, beta, state))
    q, k = (np.repeat(a, v.shape[2] // a.shape[2], axis=2) for a in (q, k))
    ys, states = [], []
    for t in range(v.shape[1]):
        s = s * (g[:, t, :, None, :] if g.ndim == 4 else g[:, t, :, None, None])
        error = (v[:, t] - np.einsum("bhvk,bhk->bhv", s, k[:, t])) * beta[:, t][..., None]
        s = s + error[..., None] * k[:, t][:, :, None]
        ys.append(np.einsum("bhvk,bhk->bhv", s, q[:, t]))
        states.append(s)
    return np.stack(ys, axis=1), states


def check(q, k, v, g, beta, state, rows=()):
    """All rows, and the first ones of a launch: within rounding of float64, and row by row the bits of single rows."""
    ys, states = exact(q, k, v, g, beta, state)
    # Sums of Dk float32 products, twice a row, and one rounding to the type of q.
    near = {"rtol": 0, "atol": 1e-5 * np.abs(states[-1]).max()}
    of_y = {"rtol": {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}[q.dtype], "atol": 1e-4}
    with emulator.emulated():
        y, after = gated_delta_kernel(q, k, v, g, beta, state)
        mx.eval(y, after)
        np.testing.assert_allclose(f64(y), ys, **of_y)
        np.testing.assert_allclose(f64(after), states[-1], **near)
        for n in rows:
            head, behind = gated_delta_kernel(q, k, v, g, beta, state, n)
            np.testing.assert_allclose(f64(behind), states[n - 1], **near)
            assert mx.array_equal(head[:, :n], y[:, :n]), f"the first {n} rows are other bits among {q.shape[1]}"
        alone = state
        for t in range(q.shape[1]):
            row, alone = gated_delta_kernel(*(a[:, t : t + 1] for a in (q, k, v, g, beta)), alone)
            assert mx.array_equal(row, y[:, t : t + 1]), f"row {t} alone is other bits than among {q.shape[1]}"
        assert mx.array_equal(alone, after)


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_and_the_first_of_them_are_the_recurrence(dtype):
    check(*made(dtype=TYPES[dtype]), rows=(1, 2, 4))


def test_heads_sequences_and_columns_that_decay_by_themselves():
    check(*made(m=2, b=2, hk=3, hv=6, dk=64, dv=12, vector=True))
    check(*made(m=3, hk=1, hv=3, dk=96, dv=4, dtype=mx.bfloat16), rows=(2,))


def test_it_is_what_mlx_lm_does_row_by_row():
    arrays = made(m=4)
    with emulator.emulated():
        ours = gated_delta_kernel(*arrays)
        mx.eval(ours)
    for mine, theirs in zip(ours, gated_delta_ops(*arrays), strict=True):
        np.testing.assert_allclose(np.array(mine), np.array(theirs), rtol=0, atol=1e-5)


def test_without_a_gpu_mlx_lms_steps_serve(monkeypatch):
    monkeypatch.delenv("DFLASH_MLX_KERNELS", raising=False)
    arrays = made(m=4)
    for a, b in zip(gated_delta(*arrays, rows=3), gated_delta_ops(*(a[:, :3] for a in arrays[:5]), arrays[5]), strict=True):
        assert mx.array_equal(a, b)
