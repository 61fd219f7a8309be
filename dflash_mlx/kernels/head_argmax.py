"""LM head, soft-cap, logit bias and argmax for all rows without writing [M, V] logits.

    head_argmax           a threadgroup takes a stripe of the vocabulary, its simd groups parts of it, in ascending order
                          lane m keeps row m's best, its id and the runner-up     -> [M, stripes]
    head_argmax_reduce    one simd group a row goes over the stripes              -> id, margin

Logits are rounded to the activation type as the head would store them, so ties are the head's own ties and the lowest id
wins, as in `mx.argmax`. mlx-lm takes the argmax of `logits - logsumexp`, which can merge two neighbouring logits of a 16-bit
type: such a row has a `margin` of one step or less, and counts as a tie.

The final norm is not fused: each stripe would redo it, three operations a value beside four multiply-adds, to save 2 M H
values of traffic where the head is V H / 2 bytes. `norm=` runs MLX's own before the launch. Knows arrays only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from . import autotune, block_qmm
from .block_qmm import MAX_ROWS, TRIAL_COLUMNS, TYPES, row_tile
from .launch import Kernel
from .trials import lazy

SIMDGROUPS = 4
STRIPE = 128  # ids of a threadgroup: its simd groups take COLS columns at a time, as often as that needs

_SOURCE = """
    constexpr int PER_WORD = 32 / BITS;
    constexpr int CHUNK = 2 * PER_WORD;
    constexpr uint MASK = (1u << (BITS - 1)) * 2u - 1u;
    const int M = x_shape[0], K = x_shape[1], N = w_shape[0];
    const int lane = int(thread_index_in_simdgroup), part = int(simdgroup_index_in_threadgroup);
    const int stripe = int(threadgroup_position_in_grid.x), stripes = int(threadgroups_per_grid.x);
    const int words = K / PER_WORD, groups = K / GROUP;

    threadgroup float part_best[SIMDGROUPS * ROWS];
    threadgroup float part_second[SIMDGROUPS * ROWS];
    threadgroup int part_id[SIMDGROUPS * ROWS];

    // Of row `lane`.
    float best = -INFINITY, second = -INFINITY;
    int id = 0;

    for (int step = 0; step < STEPS; ++step) {
        const int first = ((stripe * SIMDGROUPS + part) * STEPS + step) * COLS;
        if (first < N) {
            float sum[ROWS][COLS];
            #pragma unroll
            for (int m = 0; m < ROWS; ++m) {
                #pragma unroll
                for (int c = 0; c < COLS; ++c) sum[m][c] = 0.0f;
            }
            for (int k = lane * CHUNK; k < K; k += 32 * CHUNK) {
                #pragma unroll
                for (int word = 0; word < 2; ++word) {
                    float weight[COLS][PER_WORD];
                    #pragma unroll
                    for (int c = 0; c < COLS; ++c) {
                        // Ids beyond the last one repeat it; they are not compared.
                        const size_t n = size_t(first + c < N ? first + c : N - 1);
                        if (DENSE) {
                            const vec<T, 4> four = ((const device vec<T, 4>*)(w + n * K + k + word * PER_WORD))[0];
                            #pragma unroll
                            for (int j = 0; j < PER_WORD; ++j) weight[c][j] = float(four[j % 4]);
                        } else {
                            const uint packed = ((const device uint*)(w + n * words + k / PER_WORD + word))[0];
                            const float scale = float(scales[n * groups + k / GROUP]);
                            const float bias = float(biases[n * groups + k / GROUP]);
                            #pragma unroll
                            for (int j = 0; j < PER_WORD; ++j) {
                                // q in the last bits of 2^23: a float without a conversion.
                                const uint q = 0x4b000000u | ((packed >> (j * BITS)) & MASK);
                                weight[c][j] = metal::fma(as_type<float>(q) - 8388608.0f, scale, bias);
                            }
                        }
                    }
                    #pragma unroll
                    for (int m = 0; m < ROWS; ++m) {
                        if (m < M) {
                            const device vec<T, 4>* row = (const device vec<T, 4>*)(x + size_t(m) * K + k + word * PER_WORD);
                            #pragma unroll
                            for (int q = 0; q < PER_WORD / 4; ++q) {
                                const vec<T, 4> four = row[q];
                                #pragma unroll
                                for (int i = 0; i < 4; ++i) {
                                    #pragma unroll
                                    for (int c = 0; c < COLS; ++c) {
                                        sum[m][c] = metal::fma(float(four[i]), weight[c][4 * q + i], sum[m][c]);
                                    }
                                }
                            }
                        }
                    }
                }
            }
            #pragma unroll
            for (int m = 0; m < ROWS; ++m) {
                if (m < M) {
                    #pragma unroll
                    for (int c = 0; c < COLS; ++c) {
                        const float total = simd_sum(sum[m][c]);
                        if (lane == m && first + c < N) {
                            // Rounded where the head's own operations round.
                            T logit = T(total);
                            if (CAPPED) {
                                logit = T(float(logit) / cap[0]);
                                logit = T(metal::tanh(float(logit)));
                                logit = T(float(logit) * cap[0]);
                            }
                            if (BIASED) logit = T(float(logit) + float(logit_bias[first + c]));
                            const float value = float(logit);
                            // The first NaN wins and stays, as in mx.argmax.
                            if (value > best || (value != value && best == best)) {
                                second = best;
                                best = value;
                                id = first + c;
                            } else {
                                second = metal::max(second, value);
                            }
                        }
                    }
                }
            }
        }
    }

    if (lane < ROWS) {
        part_best[part * ROWS + lane] = best;
        part_second[part * ROWS + lane] = second;
        part_id[part * ROWS + lane] = id;
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (part == 0 && lane < M) {
        for (int p = 1; p < SIMDGROUPS; ++p) {
            const float other = part_best[p * ROWS + lane], other_second = part_second[p * ROWS + lane];
            if (other > best || (other != other && best == best)) {
                second = metal::max(best, other_second);
                best = other;
                id = part_id[p * ROWS + lane];
            } else {
                second = metal::max(second, other);
            }
        }
        stripe_best[lane * stripes + stripe] = best;
        stripe_second[lane * stripes + stripe] = second;
        stripe_id[lane * stripes + stripe] = id;
    }
"""

_REDUCE_SOURCE = """
    const int P = stripe_best_shape[1];
    const int row = int(threadgroup_position_in_grid.x), lane = int(thread_index_in_simdgroup);
    const int none = 0x7fffffff;

    float best = -INFINITY, second = -INFINITY;
    int id = none, not_a_number = none;
    for (int p = lane; p < P; p += 32) {
        const float value = stripe_best[row * P + p];
        const int at = stripe_id[row * P + p];
        if (value != value) {
            not_a_number = metal::min(not_a_number, at);
        } else if (value > best || id == none) {
            second = metal::max(best, float(stripe_second[row * P + p]));
            best = value;
            id = at;
        } else {
            second = metal::max(second, value);
        }
    }
    const float top = simd_max(best);
    const int winner = simd_min(best == top ? id : none);
    const float runner_up = simd_max(id == winner ? second : best);
    const int spoilt = simd_min(not_a_number);
    if (lane == 0) {
        ids[row] = spoilt < none ? spoilt : winner;
        margin[row] = spoilt < none ? as_type<float>(0x7fc00000u) : top - runner_up;
    }
"""

KERNEL = Kernel(
    "head_argmax",
    inputs=("x", "w", "scales", "biases", "logit_bias", "cap"),
    outputs=("stripe_best", "stripe_second", "stripe_id"),
    source=_SOURCE,
)
REDUCE = Kernel(
    "head_argmax_reduce",
    inputs=("stripe_best", "stripe_second", "stripe_id"),
    outputs=("ids", "margin"),
    source=_REDUCE_SOURCE,
)


def head_argmax_ops(
    x: mx.array,
    w: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    group_size: int = 64,
    bits: int = 4,
    softcap: float | None = None,
    logit_bias: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The answer, in MLX's own operations. Shapes as in `head_argmax_kernel`."""
    if scales is None:
        logits = x @ w.T
    else:
        logits = mx.quantized_matmul(x, w, scales, biases, transpose=True, group_size=group_size, bits=bits)
    if softcap is not None:
        logits = mx.tanh(logits / softcap) * softcap
    if logit_bias is not None:
        logits = logits + logit_bias.astype(logits.dtype)
    two = mx.topk(logits.astype(mx.float32), 2, axis=-1)
    return mx.argmax(logits, axis=-1).astype(mx.int32), mx.max(two, axis=-1) - mx.min(two, axis=-1)


def head_argmax_kernel(
    x: mx.array,
    w: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    group_size: int = 64,
    bits: int = 4,
    softcap: float | None = None,
    logit_bias: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Two launches: a stripe of 128 ids a threadgroup, then one simd group a row over the stripes.

    Shapes:
      - x: [M, H] final normed states, M = 1..16; w: [V, H] in x's type, or [V, H * bits / 32] uint32 with scales and biases
        [V, H / group_size]; logit_bias: [V]
    Returns:
      - ids: [M] int32; margin: [M] float32, best logit less runner-up, NaN where a logit of the row is NaN
    """
    quantized = None if scales is None else (group_size, bits)
    return prepare(x.shape, x.dtype, w.shape[0], quantized, softcap, logit_bias is not None)(x, w, scales, biases, logit_bias)


def prepare(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    v: int,
    quantized: tuple[int, int] | None,
    softcap: float | None = None,
    biased: bool = False,
    columns: int | None = None,
) -> Callable[..., tuple[mx.array, mx.array]]:
    """`head_argmax_kernel` for x [..., H] of a shape, ids and margins as its leading axes.

    Args:
      quantized: (group size, bits), None where w is not. columns: of a simd group at a time, 2 to the n up to 32.
    Returns: a function of (x, w, scales, biases, logit_bias), None for those that there are not.
    """
    flat = m, _ = math.prod(shape[:-1]), shape[-1]
    group_size, bits = quantized or (64, 8)  # not quantized: two vectors of 4, as two words of 8 bit
    # At 16 rows, sums, weights and x of 4 columns are more than an Apple GPU's 128 registers a thread. Results do not change.
    columns = columns or (2 if m > 8 and not mx.cuda.is_available() else 4)
    stripes = -(-v // STRIPE)
    launch = KERNEL.prepared(
        template=[
            ("T", dtype),
            ("DENSE", quantized is None),
            ("BITS", bits),
            ("GROUP", group_size),
            ("ROWS", row_tile(m)),
            ("COLS", columns),
            ("STEPS", STRIPE // SIMDGROUPS // columns),
            ("SIMDGROUPS", SIMDGROUPS),
            ("CAPPED", softcap is not None),
            ("BIASED", biased),
        ],
        grid=(stripes * SIMDGROUPS * 32, 1, 1),
        threadgroup=(SIMDGROUPS * 32, 1, 1),
        output_shapes=[(m, stripes)] * 3,
        output_dtypes=[mx.float32, mx.float32, mx.int32],
    )
    reduce = REDUCE.prepared(
        template=[],
        grid=(32 * m, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[shape[:-1]] * 2,
        output_dtypes=[mx.int32, mx.float32],
    )
    unused, cap = mx.array([0] * 8, dtype=dtype), mx.array([softcap or 0.0], dtype=mx.float32)

    def run(x, w, scales=None, biases=None, logit_bias=None):
        given = [unused if a is None else a for a in (scales, biases, logit_bias)]
        best, second, ids = launch(inputs=[mx.reshape(x, flat), w, *given, cap])
        chosen, margin = reduce(inputs=[best, second, ids])
        return chosen, margin

    return run


def head_argmax(
    x: mx.array,
    w: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    group_size: int = 64,
    bits: int = 4,
    softcap: float | None = None,
    logit_bias: mx.array | None = None,
    norm: tuple[mx.array, float] | None = None,
) -> tuple[mx.array, mx.array]:
    """The greedy choice of each row and how clear it was.

    Shapes:
      - x: [..., H] hidden states after the final norm, or before it with `norm` = (weight [H], eps)
      - w, scales, biases, logit_bias: as in `head_argmax_kernel`
    Returns:
      - ids: [...] int32; margin: [...] float32, a tie where it is at most one step of the activation type
    """
    if norm is not None:
        x = mx.fast.rms_norm(x, *norm)
    launch = head_argmax_plan(x, w, scales, biases, group_size, bits, softcap, logit_bias)
    if launch:
        return launch(x, w, scales, biases, logit_bias)
    return head_argmax_ops(x, w, scales, biases, group_size, bits, softcap, logit_bias)


def head_argmax_plan(
    x: mx.array,
    w: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    group_size: int = 64,
    bits: int = 4,
    softcap: float | None = None,
    logit_bias: mx.array | None = None,
) -> Callable[..., tuple[mx.array, mx.array]] | None:
    """`head_argmax` of these arguments by a kernel, as a function of (x, w, scales, biases, logit_bias); None: MLX's operations.

    For callers that have another way where it is None.
    """
    if scales is None:
        quantized, type_of_weights = None, w.dtype
    elif biases is None:  # not affine
        return None
    else:
        quantized, type_of_weights = (group_size, bits), scales.dtype
    biased = logit_bias is not None
    return autotune.planned(_plan, x.shape, x.dtype, w.shape[0], type_of_weights, quantized, softcap, biased)


def _plan(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    v: int,
    type_of_weights: mx.Dtype,
    quantized: tuple[int, int] | None,
    softcap: float | None,
    biased: bool,
) -> Callable[..., tuple[mx.array, mx.array]] | None:
    """`head_argmax_plan` for arrays of these shapes and types."""
    h = shape[-1]
    eligible = (
        1 <= math.prod(shape[:-1]) <= MAX_ROWS  # sums in registers, and one lane a row
        and dtype in TYPES
        and math.prod(shape) >= 8  # in device memory
        and h % 8 == 0  # two whole vectors of 4
        and type_of_weights == dtype  # MLX would promote
        and (quantized is None or (quantized[0] in (32, 64, 128) and quantized[1] in (4, 8)))
        and v >= 8
    )
    kind = "dense" if quantized is None else f"{quantized[1]} bit group {quantized[0]}"
    about = f"head {dtype} {kind} V {v} H {h}{' cap' if softcap is not None else ''}{' bias' if biased else ''}"
    if not eligible:
        return None
    made = partial(trials, v, h, dtype, quantized)
    nbytes = v * h * (quantized[1] if quantized else 8 * dtype.size) // 8
    chosen = autotune.choose(autotune.Question(about, candidates(), made, nbytes=nbytes), math.prod(shape[:-1]))
    return prepare(shape, dtype, v, quantized, softcap, biased, **dict(chosen.options)) if chosen else None


def candidates() -> tuple[autotune.Candidate, ...]:
    """The plans that a Mac may find quickest; on CUDA one."""
    return tuple(autotune.Candidate(KERNEL, (("columns", n),)) for n in ((4,) if mx.cuda.is_available() else (4, 2)))


def trials(
    v: int, h: int, dtype: mx.Dtype, quantized: tuple[int, int] | None, ways: Sequence[autotune.Candidate]
) -> Callable[[int], autotune.Trial]:
    """Comparisons with MLX on made-up values, for a row count; ids may differ where the margin is within rounding."""
    keys, whole, v = mx.random.split(mx.random.key(0), 2), v, min(v, TRIAL_COLUMNS)
    w = mx.random.normal((v, h), dtype=dtype, key=keys[0])
    x = mx.random.normal((MAX_ROWS, h), dtype=dtype, key=keys[1])
    weights = (w,) if quantized is None else (*mx.quantize(w, group_size=quantized[0], bits=quantized[1]), *quantized)
    mx.eval(weights[:3], x)

    def product(m: int) -> Callable[..., mx.array]:
        """The head's product as the loop computes it without this kernel: by another kernel of ours, if one serves it."""
        way = quantized and block_qmm.candidate(m, dtype, whole, h, *quantized)
        if not way:
            return lambda x: x @ w.T if quantized is None else block_qmm.block_qmm_ops(x, *weights)
        launch = block_qmm.prepare_as(way, (m, h), dtype, v, *quantized)
        return lambda x: launch(x, *weights[:3])

    def one(m: int) -> autotune.Trial:
        def ours(way: autotune.Candidate) -> Callable[[mx.array], tuple[mx.array, mx.array]]:
            launch = lazy(lambda: prepare((m, h), dtype, v, quantized, **dict(way.options)))
            return lambda x: launch(x, *weights[:3])

        logits_of = product(m)

        def stock(x: mx.array) -> list[mx.array]:
            logits = logits_of(x)
            return [mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1).astype(mx.int32)]

        return autotune.Trial(x[:m], [ours(way) for way in ways], stock, same_choices(dtype, h))

    return one


def same_choices(dtype: mx.Dtype, h: int):
    """A `same` for (ids, margin, ...) and (ids, ...) of made-up values of size 1: a choice with a clear margin is the other's."""

    def same(ours, theirs) -> str | None:
        # Logits are of size sqrt(H): two steps of the type there, for rounding in another place.
        step = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}[dtype] * 4 * h**0.5
        clear = ours[1] > step
        if bool(mx.any(mx.isnan(ours[1]))):
            return "a margin is not a number"
        return None if bool(mx.all((ours[0] == theirs[0]) | ~clear)) else "ids differ from stock MLX's beyond ties"

    return same
