"""Queries, keys and values of a drafter's layer out of their products: norm, rotation and layout in one launch.

    product of the block's rows     [K, (HQ + 2 HK) D]  -- norm of a head, rotation -->  q [HQ, K, D]
    product of the context's rows   [S, ..., 2 HK D]    ------------------------------>  k, v [HK, S + K, D]

    simd group = one head of one row; lane = every 32nd pair of numbers that are turned together

What a rotation does is read off its own module: it turns (1, 0) to (cos, sin), scale included (`turns_of`). So the text knows no
frequencies, and one text serves every kind of RoPE. A row's bits do not depend on how many rows there are. Knows arrays only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from . import autotune
from .block_qmm import MAX_ROWS, TOLERANCE, TYPES
from .launch import Kernel
from .trials import lazy

# A norm and a rotation round once each.
_ROUNDINGS = 2

_HEADER = """
// A number of a head, normed: it rounds to the type where MLX's operation does.
template <typename T>
METAL_FUNC float head_normed(T x, float by, T weight) { return float(T(float(weight) * float(T(float(x) * by)))); }
"""

_SOURCE = """
    constexpr int HALF = DIMS / 2, ALL = HEADS + 2 * KV_HEADS;
    const int K = y_shape[y_ndim - 2], S = context_shape[context_ndim - 2];
    const int item = int(threadgroup_position_in_grid.x), lane = int(thread_index_in_simdgroup);

    // First keys and values of the context's rows, then all heads of the block's. Heads count from the block's first query on.
    const int of_context = S * 2 * KV_HEADS, later = item - of_context;
    const bool in_block = later >= 0;
    const int row = in_block ? S + later / ALL : item / (2 * KV_HEADS);
    const int head = in_block ? later % ALL : HEADS + item % (2 * KV_HEADS);
    const size_t from = in_block ? size_t(row - S) * y_shape[y_ndim - 1] + head * D
                                 : size_t(row) * context_shape[context_ndim - 1] + first[0] + (head - HEADS) * D;
    const auto x = in_block ? y : context;

    if (head >= HEADS + KV_HEADS) {
        const size_t to = (size_t(head - HEADS - KV_HEADS) * (S + K) + row) * D;
        for (int e = lane; e < D; e += 32) v[to + e] = x[from + e];
    } else {
        const bool queries = head < HEADS;
        const size_t to = (queries ? size_t(head) * K + row - S : size_t(head - HEADS) * (S + K) + row) * D;
        const auto out = queries ? q : k;
        const auto weight = queries ? q_weight : k_weight;
        float squares = 0.0f;
        for (int e = lane; e < D; e += 32) squares = metal::fma(float(x[from + e]), float(x[from + e]), squares);
        const float by = metal::rsqrt(simd_sum(squares) / float(D) + as_type<float>(EPS));
        for (int p = lane; p < HALF; p += 32) {
            const int i = TRADITIONAL ? 2 * p : p, j = TRADITIONAL ? 2 * p + 1 : p + HALF;
            const float a = head_normed<T>(x[from + i], by, weight[i]), b = head_normed<T>(x[from + j], by, weight[j]);
            const float c = turns[size_t(row) * DIMS + i], s = turns[size_t(row) * DIMS + j];
            out[to + i] = T(metal::fma(a, c, -times(b, s)));
            out[to + j] = T(metal::fma(a, s, times(b, c)));
        }
        for (int e = DIMS + lane; e < D; e += 32) out[to + e] = T(head_normed<T>(x[from + e], by, weight[e]));
    }
"""

KERNEL = Kernel(
    "block_heads",
    inputs=("y", "context", "first", "q_weight", "k_weight", "turns"),
    outputs=("q", "k", "v"),
    source=_SOURCE,
    header=_HEADER,
)

# Takes (y, context, first, q_weight, k_weight, turns) and gives (q, k, v), all as in `block_heads_kernel`.
Launch = Callable[..., tuple[mx.array, mx.array, mx.array]]
# Of heads [1, heads, L, D] from a position on.
Rotation = Callable[..., mx.array]


class Heads(NamedTuple):
    """A layer's heads: queries, keys, numbers of a head, how many of these are rotated, whether those beside each other go
    together (else: a number and the one half of them further), and the norms' eps."""

    heads: int
    kv_heads: int
    D: int
    dims: int
    traditional: bool
    eps: float


def turns_of(rotation: Rotation, heads: Heads, rows: int, offset: int | mx.array) -> mx.array:
    """[1, 1, rows, dims] float32: the rotations of positions offset, offset + 1, ... The cosine stands at a pair's first number,
    the sine at its second one."""
    firsts = np.arange(heads.dims) % 2 == 0 if heads.traditional else np.arange(heads.dims) < heads.dims // 2
    ones = mx.array(np.tile(firsts.astype(np.float32), (1, 1, rows, 1)))
    return rotation(ones, offset=offset)


def block_heads_ops(
    y: mx.array,
    context: mx.array,
    first: mx.array | int,
    q_weight: mx.array,
    k_weight: mx.array,
    turns: mx.array,
    heads: Heads,
    rotation: Rotation | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """The answer, in MLX's own operations. Shapes as in `block_heads_kernel`; first: a number too.

    rotation: rotates as the layer does, from position 0 on; else by `turns`.
    """
    HQ, HK, D, (K, S) = *heads[:3], (y.shape[-2], context.shape[-2])
    own = y[..., : (HQ + 2 * HK) * D].reshape(1, K, -1, D)
    whole = context.reshape(1, S, -1)
    columns = mx.arange(2 * HK * D) + first if isinstance(first, mx.array) else slice(first, first + 2 * HK * D)
    shared = whole[:, :, columns].reshape(1, S, 2 * HK, D)
    rotate = rotation or (lambda x, offset: turned(x, turns.reshape(S + K, -1)[offset:], heads.traditional))
    q = mx.fast.rms_norm(own[:, :, :HQ], q_weight, heads.eps).transpose(0, 2, 1, 3)
    k = mx.concatenate([shared[:, :, :HK], own[:, :, HQ : HQ + HK]], axis=1)
    v = mx.concatenate([shared[:, :, HK:], own[:, :, HQ + HK :]], axis=1)
    k = mx.fast.rms_norm(k, k_weight, heads.eps).transpose(0, 2, 1, 3)
    return rotate(q, offset=S), rotate(k, offset=0), v.transpose(0, 2, 1, 3)


def turned(x: mx.array, turns: mx.array, traditional: bool) -> mx.array:
    """x [..., L, D] by turns [L, dims], of `turns_of`."""
    dims, wide = turns.shape[-1], x.astype(mx.float32)

    def pairs(a: mx.array) -> tuple[mx.array, mx.array]:
        return (a[..., 0:dims:2], a[..., 1:dims:2]) if traditional else (a[..., : dims // 2], a[..., dims // 2 : dims])

    (a, b), (c, s) = pairs(wide), pairs(turns)
    parts = a * c - b * s, a * s + b * c
    both = mx.stack(parts, axis=-1).flatten(-2) if traditional else mx.concatenate(parts, axis=-1)
    return mx.concatenate([both, wide[..., dims:]], axis=-1).astype(x.dtype)


def block_heads_kernel(
    y: mx.array, context: mx.array, first: mx.array, q_weight: mx.array, k_weight: mx.array, turns: mx.array, heads: Heads
) -> tuple[mx.array, mx.array, mx.array]:
    """Launch: one simd group for each head of a row.

    Shapes:
      - y: [1, K, N], the block's rows: columns of queries, of keys, of values, then of nobody
      - context: [1, S, N'], the rows before them; first: [1] int32, the column at which the layer's keys begin: then its values
      - q_weight, k_weight: [D] of the norms; turns: [1, 1, S + K, dims] float32, of `turns_of` from the first row on
    Returns:
      - q: [1, HQ, K, D]; k, v: [1, HK, S + K, D], the context's rows first; all in y's type, as every array but turns
    """
    return prepare(y.shape[-2], context.shape[-2], y.dtype, heads)(y, context, first, q_weight, k_weight, turns)


def prepare(K: int, S: int, dtype: mx.Dtype, heads: Heads) -> Launch:
    """`block_heads_kernel` for K rows of a block after S of a context, as a function of its arrays."""
    HQ, HK, D = heads[:3]
    sizes = [("T", dtype), ("HEADS", HQ), ("KV_HEADS", HK), ("D", D), ("DIMS", heads.dims), ("TRADITIONAL", heads.traditional)]
    launch = KERNEL.prepared(
        template=[*sizes, ("EPS", struct.unpack("i", struct.pack("f", heads.eps))[0])],
        grid=(32 * (K * (HQ + 2 * HK) + S * 2 * HK), 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(1, HQ, K, D), *[(1, HK, S + K, D)] * 2],
        output_dtypes=[dtype] * 3,
    )

    def run(
        y: mx.array, context: mx.array, first: mx.array, q_weight: mx.array, k_weight: mx.array, turns: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        q, k, v = launch(inputs=[y, context, first, q_weight, k_weight, turns])
        return q, k, v

    return run


def block_heads_plan(
    K: int, S: int, dtype: mx.Dtype, weights: tuple[mx.Dtype, mx.Dtype], context: mx.Dtype, heads: Heads
) -> Launch | None:
    """A function of (y, context, first, q_weight, k_weight, turns) by the kernel; None: MLX's operations serve them.

    Args:
      dtype, weights, context: types of y, of the two norms' weights, and of the context's product.
    """
    return autotune.planned(_plan, K, S, dtype, *weights, context, heads)


def _plan(
    K: int, S: int, dtype: mx.Dtype, q_weight: mx.Dtype, k_weight: mx.Dtype, context: mx.Dtype, heads: Heads
) -> Launch | None:
    eligible = (
        1 <= K <= MAX_ROWS
        and S > 0  # an empty array has no buffer
        and dtype in TYPES
        and q_weight == k_weight == context == dtype  # MLX would promote
        and heads.D % 8 == 0  # the weights, so all arrays but `first`, are certainly in device memory
        and 0 < heads.dims <= heads.D
        and heads.dims % 2 == 0
    )
    if not eligible:
        return None
    HQ, HK, D, dims, traditional, _ = heads
    about = f"heads {dtype} HQ {HQ} HK {HK} D {D} rotated {dims}{' traditional' if traditional else ''}"
    nbytes = 2 * MAX_ROWS * (HQ + 2 * HK) * D * dtype.size
    question = autotune.Question(about, (autotune.Candidate(KERNEL),), partial(trials, dtype, heads), nbytes=nbytes)
    return prepare(K, S, dtype, heads) if autotune.choose(question, K) else None


def made(dtype: mx.Dtype, heads: Heads) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array, Rotation]:
    """Made-up y and context of `MAX_ROWS` rows each, first, the norms' weights, and a rotation."""
    HQ, HK, D, dims, traditional, _ = heads
    keys = mx.random.split(mx.random.key(D), 4)
    y, context = (
        mx.random.normal((1, MAX_ROWS, n * D), key=key).astype(dtype) for n, key in ((HQ + 2 * HK, keys[0]), (4 * HK, keys[1]))
    )
    q_weight, k_weight = (mx.random.uniform(0.5, 2, (D,), key=key).astype(dtype) for key in keys[2:])
    rotation = partial(mx.fast.rope, dims=dims, traditional=traditional, base=1e6, scale=1.0)
    return y, context, mx.array([2 * HK * D], dtype=mx.int32), q_weight, k_weight, rotation


def trials(dtype: mx.Dtype, heads: Heads, ways: Sequence[autotune.Candidate]) -> Callable[[int], autotune.Trial]:
    """For a row count of the block: a comparison with MLX's operations on made-up values, with as many rows of context."""
    y, context, first, q_weight, k_weight, rotation = made(dtype, heads)
    number = first.item()

    def one(m: int) -> autotune.Trial:
        turns = turns_of(rotation, heads, 2 * m, 0)
        mx.eval(y, context, q_weight, k_weight, turns)
        arrays = context[:, :m], first, q_weight, k_weight, turns
        launch = lazy(lambda: prepare(m, m, dtype, heads))
        stock = lambda y: block_heads_ops(y, arrays[0], number, *arrays[2:], heads, rotation)  # noqa: E731
        ours = [lambda y: launch(y, *arrays) for _ in ways]
        return autotune.Trial(y[:, :m], ours, stock, autotune.same_floats(_ROUNDINGS * TOLERANCE[dtype]))

    return one
