"""The gated delta rule over a block's rows in one launch: the recurrence of Qwen3.5, Qwen3-Next, Kimi Linear and others.

    simd group = one row of one head's state [Dv, Dk]; lane = Dk / 32 of its columns, in registers from row to row
      per row    S = g S      e = beta (v - S k)      S = S + e k      y = S q

The same text runs all rows of a pass, and for a rollback its first ones again, from the same q, k, v, g and beta: how many is
an input. A row's bits do not depend on how many rows go with it. mlx-lm has a kernel on Metal; on CUDA it runs row by row.
Knows arrays only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import mlx.core as mx
from mlx_lm.models import gated_delta as stock

from . import autotune
from .block_qmm import MAX_ROWS, TYPES
from .launch import Kernel
from .trials import lazy

# Columns of a state that a simd group holds at most: 8 a lane.
MAX_COLUMNS = 256
# Rows of states a threadgroup takes.
_GROUP = 4

_SOURCE = """
    constexpr int PER = DK / 32;
    const int M = k_shape[1], HK = k_shape[2], HV = v_shape[2], DV = v_shape[3];
    const int lane = int(thread_index_in_simdgroup);
    const int row = int(thread_position_in_grid.y), n = int(thread_position_in_grid.z);
    const int b = n / HV, hv = n % HV, hk = hv / (HV / HK);
    const int steps = rows[0];

    const size_t at = (size_t(n) * DV + row) * DK + PER * lane;
    float held[PER];
    #pragma unroll
    for (int i = 0; i < PER; ++i) held[i] = float(state[at + i]);

    for (int t = 0; t < steps; ++t) {
        const size_t head = size_t(b * M + t) * HV + hv;
        const size_t first = (size_t(b * M + t) * HK + hk) * DK + PER * lane;
        float key[PER], known = 0.0f;
        #pragma unroll
        for (int i = 0; i < PER; ++i) {
            const float decay = VECTOR ? float(g[head * DK + PER * lane + i]) : float(g[head]);
            key[i] = float(k[first + i]);
            held[i] = held[i] * decay;
            known = metal::fma(held[i], key[i], known);
        }
        const float error = (float(v[head * DV + row]) - simd_sum(known)) * float(beta[head]);
        float out = 0.0f;
        #pragma unroll
        for (int i = 0; i < PER; ++i) {
            held[i] = metal::fma(key[i], error, held[i]);
            out = metal::fma(held[i], float(q[first + i]), out);
        }
        out = simd_sum(out);
        if (lane == 0) y[head * DV + row] = T(out);
    }

    for (int t = steps; t < M; ++t) {
        if (lane == 0) y[(size_t(b * M + t) * HV + hv) * DV + row] = T(0.0f);
    }

    #pragma unroll
    for (int i = 0; i < PER; ++i) state_out[at + i] = S(held[i]);
"""

KERNEL = Kernel(
    "gated_delta",
    inputs=("q", "k", "v", "g", "beta", "state", "rows"),
    outputs=("y", "state_out"),
    source=_SOURCE,
    at_once=True,
)

# Takes (q, k, v, g, beta, state, rows) and gives (y, state), all as in `gated_delta`.
Launch = Callable[..., tuple[mx.array, mx.array]]


def gated_delta_ops(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    rows: int | None = None,
    mask: mx.array | None = None,
    use_kernel: bool = True,
) -> tuple[mx.array, mx.array]:
    """The answer, by mlx-lm's own code: its kernel on Metal, a row at a time elsewhere. Shapes as in `gated_delta`.

    mask: [B, M], rows that count; use_kernel: as in mlx-lm's `gated_delta_update`, which chooses in the same way.
    """
    if rows is not None:
        q, k, v, g, beta = (a[:, :rows] for a in (q, k, v, g, beta))
    metal = use_kernel and mx.default_device() == mx.gpu and mx.metal.is_available() and k.shape[-1] % 32 == 0
    return (stock.gated_delta_kernel if metal else stock.gated_delta_ops)(q, k, v, g, beta, state, mask)


def gated_delta_kernel(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, rows: int | None = None
) -> tuple[mx.array, mx.array]:
    """One launch. Shapes as in `gated_delta`; with `rows`, those of y after them are zero."""
    return prepare(k.shape, v.shape, q.dtype, state.dtype, g.ndim == 4)(q, k, v, g, beta, state, rows)


@cache
def _count(rows: int) -> mx.array:
    # Made once a process: on CUDA each new array from the host costs a page fault, and a rollback would have one for each layer.
    return mx.array([rows], dtype=mx.int32)


def prepare(k_shape: tuple[int, ...], v_shape: tuple[int, ...], dtype: mx.Dtype, state_dtype: mx.Dtype, vector: bool) -> Launch:
    """`gated_delta_kernel` for arrays of these shapes and types. vector: g has a decay for each column."""
    (b, m, _, dk), (_, _, hv, dv) = k_shape, v_shape
    launch = KERNEL.prepared(
        template=[("T", dtype), ("S", state_dtype), ("DK", dk), ("VECTOR", vector)],
        grid=(32, dv, b * hv),
        threadgroup=(32, _GROUP, 1),
        output_shapes=[v_shape, (b, hv, dv, dk)],
        output_dtypes=[dtype, state_dtype],
    )

    def run(
        q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, rows: int | None = None
    ) -> tuple[mx.array, mx.array]:
        y, after = launch(inputs=[q, k, v, g, beta, state, _count(m if rows is None else rows)])
        return y, after

    return run


def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, rows: int | None = None
) -> tuple[mx.array, mx.array]:
    """Run rows through the recurrence, or the first `rows` of them again.

    Shapes:
      - q, k: [B, M, Hk, Dk], normed and scaled; v: [B, M, Hv, Dv]; g: [B, M, Hv] or [B, M, Hv, Dk], decay in (0, 1)
      - beta: [B, M, Hv]; state: [B, Hv, Dv, Dk]
    Returns:
      - y: [B, M, Hv, Dv] in the type of q; with `rows`, [B, rows or M, Hv, Dv], of which no more than these are to be read
      - state: as it was, after these rows
    """
    launch = gated_delta_plan(q, k, v, g, beta, state) if autotune.may_run() else None
    return (launch or gated_delta_ops)(q, k, v, g, beta, state, rows)


def gated_delta_plan(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array) -> Launch | None:
    """The kernel that `gated_delta` launches for arrays like these; None: mlx-lm's own code."""
    types = q.dtype, k.dtype, v.dtype, g.dtype, beta.dtype, state.dtype
    return autotune.planned(_plan, k.shape, v.shape, g.ndim == 4, *types)


def _plan(k_shape: tuple[int, ...], v_shape: tuple[int, ...], vector: bool, dtype: mx.Dtype, *others: mx.Dtype) -> Launch | None:
    (b, m, hk, dk), (_, _, hv, dv) = k_shape, v_shape
    k_dtype, v_dtype, *floats = others
    eligible = (
        1 <= m <= MAX_ROWS
        and dtype in TYPES
        and k_dtype == v_dtype == dtype  # MLX would promote
        and all(of in TYPES for of in floats)
        and dk % 32 == 0
        and dk <= MAX_COLUMNS  # a row of a state fits registers
        and dv % _GROUP == 0
        and hv % hk == 0
    )
    if not eligible:
        return None
    g_dtype, beta_dtype, state_dtype = floats
    about = f"recurrence {dtype} g {g_dtype}{' by column' if vector else ''} beta {beta_dtype} state {state_dtype}"
    about = f"{about} B {b} HK {hk} HV {hv} DK {dk} DV {dv}"
    made = partial(trials, k_shape, v_shape, vector, dtype, *floats)
    nbytes = 2 * b * hv * dv * dk * state_dtype.size
    question = autotune.Question(about, (autotune.Candidate(KERNEL),), made, nbytes=nbytes)
    return prepare(k_shape, v_shape, dtype, state_dtype, vector) if autotune.choose(question, m) else None


def trials(
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    vector: bool,
    dtype: mx.Dtype,
    g_dtype: mx.Dtype,
    beta_dtype: mx.Dtype,
    state_dtype: mx.Dtype,
    ways: Sequence[autotune.Candidate],
) -> Callable[[int], autotune.Trial]:
    """Comparisons with mlx-lm on made-up values, for a row count."""
    (b, _, hk, dk), (_, _, hv, dv) = k_shape, v_shape
    keys = mx.random.split(mx.random.key(0), 6)
    q, k = (mx.random.normal((b, MAX_ROWS, hk, dk), key=key) * dk**-0.5 for key in keys[:2])
    v = mx.random.normal((b, MAX_ROWS, hv, dv), key=keys[2]).astype(dtype)
    heads = (b, MAX_ROWS, hv)
    g = mx.random.uniform(0.5, 1.0, (*heads, dk) if vector else heads, key=keys[3]).astype(g_dtype)
    beta = mx.random.uniform(shape=heads, key=keys[4]).astype(beta_dtype)
    state = mx.random.normal((b, hv, dv, dk), key=keys[5]).astype(state_dtype)
    q, k = q.astype(dtype), k.astype(dtype)
    mx.eval(q, k, v, g, beta, state)
    same = autotune.same_floats({mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}[dtype])

    def one(m: int) -> autotune.Trial:
        some = [a[:, :m] for a in (k, v, g, beta)]
        launch = lazy(lambda: prepare(some[0].shape, some[1].shape, dtype, state_dtype, vector))
        return autotune.Trial(
            q[:, :m], [lambda q: launch(q, *some, state) for _ in ways], lambda q: gated_delta_ops(q, *some, state), same
        )

    return one
