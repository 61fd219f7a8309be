"""M rows against a long KV cache: each key and value is read once per KV head, for all rows and all query heads of it.

    threadgroup = one KV head x one chunk of 256 keys             row r = query head r / M, block row r % M
      tile of 32 keys in threadgroup memory     lane = key        score[row] = q . k
      then 32 values in the same memory         lane = part of D  out[row] += p[key] * v[key]
    block_attention_reduce: one simd group a row joins the chunks, sinks included

Chunks are counted from position 0 of the text, never from the end, and masked keys are skipped rather than multiplied by
zero: a row's bits depend on its own query and the keys up to it, not on M and not on what later rows hold.
Knows arrays only; the keys and values may be slices of a longer cache and are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from . import autotune
from .block_qmm import MAX_ROWS, TYPES, row_tile
from .launch import Kernel
from .small_batch import FOLDED, Folded, folded_mask
from .trials import lazy

CHUNK_TILES = 8
CHUNK = 32 * CHUNK_TILES
# Keys of a trial. Its result holds for all lengths, so that a row is served in the same way however long the text has become.
TRIAL_KEYS = 4096
# Outputs that a thread holds: 48 floats beside scores and weights stay in an Apple GPU's registers.
MAX_HELD = 48

_SOURCE = """
    constexpr int STRIDE = D + 4;
    constexpr int PARTS = D / 32;
    const int M = queries_shape[2], S = held[0] > 0 ? held[0] : keys_shape[2];
    const int HK = keys_shape[1], HQ = queries_shape[1];
    const int REP = HQ / HK, R = REP * M;
    const int lane = int(thread_index_in_simdgroup), part = int(simdgroup_index_in_threadgroup);
    const int thread_id = int(thread_index_in_threadgroup);
    // More rows than a threadgroup holds are shared out among several, each of which reads the keys.
    const int first_row = int(threadgroup_position_in_grid.z) * SIMDGROUPS * ROWS + part;
    const int group = int(threadgroup_position_in_grid.x), groups = int(threadgroups_per_grid.x);
    const int b = int(threadgroup_position_in_grid.y) / HK, hk = int(threadgroup_position_in_grid.y) % HK;
    // Positions in the text: key j stands at begin + j, block row m at own + m.
    const int begin = start[0], own = begin + S - M;
    const int chunk = (first_chunk[0] + group) * 32 * TILES;

    threadgroup T tile[32 * STRIDE];

    float out[ROWS][PARTS], top[ROWS], total[ROWS], weight[ROWS];
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        top[i] = -INFINITY;
        total[i] = 0.0f;
        #pragma unroll
        for (int t = 0; t < PARTS; ++t) out[i][t] = 0.0f;
    }

    for (int n = 0; n < TILES; ++n) {
        const int first = chunk + 32 * n - begin;
        // Nothing to see here for any row; all threads agree.
        const bool before = first + 31 < 0 || (WINDOW > 0 && begin + first + 31 <= own - WINDOW);
        if (first < S && !before) {
            const auto head_keys = keys + b * keys_strides[0] + hk * keys_strides[1];
            for (int e = 4 * thread_id; e < 32 * D; e += 4 * 32 * SIMDGROUPS) {
                const int j = first + e / D, d = e % D;
                const bool inside = j >= 0 && j < S;
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    tile[e / D * STRIDE + d + i] =
                        inside ? T(head_keys[j * keys_strides[2] + (d + i) * keys_strides[3]]) : T(0.0f);
                }
            }
            threadgroup_barrier(metal::mem_flags::mem_threadgroup);

            #pragma unroll
            for (int i = 0; i < ROWS; ++i) weight[i] = 0.0f;
            for (int d = 0; d < D; d += 4) {
                float key[4];
                #pragma unroll
                for (int c = 0; c < 4; ++c) key[c] = float(tile[lane * STRIDE + d + c]);
                #pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    const int r = first_row + SIMDGROUPS * i;
                    if (r < R) {
                        const int row = (b * HQ + hk * REP + r / M) * M + r % M;
                        const vec<T, 4> query = ((const device vec<T, 4>*)(queries + size_t(row) * D + d))[0];
                        #pragma unroll
                        for (int c = 0; c < 4; ++c) weight[i] = metal::fma(float(query[c]), key[c], weight[i]);
                    }
                }
            }
            #pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int r = first_row + SIMDGROUPS * i;
                if (r < R) {
                    const int j = first + lane, position = own + r % M;
                    bool seen = j >= 0 && j < S;
                    if (CAUSAL) seen = seen && begin + j <= position;
                    if (WINDOW > 0) seen = seen && begin + j > position - WINDOW;
                    const float score = seen ? times(weight[i], scale[0]) : -INFINITY;
                    const float new_top = metal::max(top[i], float(simd_max(score)));
                    weight[i] = seen ? metal::exp(score - new_top) : 0.0f;
                    const float sum = simd_sum(weight[i]);
                    // Nothing seen before: nothing to shrink, and infinity less infinity is no number.
                    const float shrink = top[i] > -INFINITY ? metal::exp(top[i] - new_top) : 0.0f;
                    total[i] = metal::fma(total[i], shrink, sum);
                    top[i] = new_top;
                    #pragma unroll
                    for (int t = 0; t < PARTS; ++t) out[i][t] = out[i][t] * shrink;
                }
            }
            threadgroup_barrier(metal::mem_flags::mem_threadgroup);

            const auto head_values = values + b * values_strides[0] + hk * values_strides[1];
            for (int e = 4 * thread_id; e < 32 * D; e += 4 * 32 * SIMDGROUPS) {
                const int j = first + e / D, d = e % D;
                const bool inside = j >= 0 && j < S;
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    tile[e / D * STRIDE + d + i] =
                        inside ? T(head_values[j * values_strides[2] + (d + i) * values_strides[3]]) : T(0.0f);
                }
            }
            threadgroup_barrier(metal::mem_flags::mem_threadgroup);

            for (int j = 0; j < 32; ++j) {
                float value[PARTS];
                #pragma unroll
                for (int t = 0; t < PARTS; ++t) value[t] = float(tile[j * STRIDE + 32 * t + lane]);
                #pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    if (first_row + SIMDGROUPS * i < R) {
                        const float p = simd_broadcast(weight[i], uint(j));
                        // A masked value may be anything; zero times it may not.
                        if (p != 0.0f) {
                            #pragma unroll
                            for (int t = 0; t < PARTS; ++t) out[i][t] = metal::fma(p, value[t], out[i][t]);
                        }
                    }
                }
            }
            threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        }
    }

    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int r = first_row + SIMDGROUPS * i;
        if (r < R) {
            const size_t at = (size_t(b * HQ + hk * REP + r / M) * M + r % M) * groups + group;
            #pragma unroll
            for (int t = 0; t < PARTS; ++t) chunk_out[at * D + 32 * t + lane] = out[i][t];
            if (lane == 0) {
                chunk_top[at] = top[i];
                chunk_total[at] = total[i];
            }
        }
    }
"""

_REDUCE_SOURCE = """
    constexpr int PARTS = D / 32;
    const int C = chunk_top_shape[3], M = chunk_top_shape[2], HQ = chunk_top_shape[1];
    const int row = int(threadgroup_position_in_grid.x), lane = int(thread_index_in_simdgroup);

    float top = -INFINITY;
    for (int c = lane; c < C; c += 32) top = metal::max(top, float(chunk_top[row * C + c]));
    top = simd_max(top);
    float total = 0.0f;
    if (SINKS) {
        const float sink = float(sinks[row / M % HQ]);
        top = metal::max(top, sink);
        total = metal::exp(sink - top);
    }
    float sum[PARTS];
    #pragma unroll
    for (int t = 0; t < PARTS; ++t) sum[t] = 0.0f;
    for (int c = 0; c < C; ++c) {
        const float part = chunk_total[row * C + c];
        // A chunk that the row does not see adds nothing, as if it were not there.
        if (part != 0.0f) {
            const float shrink = metal::exp(float(chunk_top[row * C + c]) - top);
            total = metal::fma(part, shrink, total);
            #pragma unroll
            for (int t = 0; t < PARTS; ++t) {
                sum[t] = metal::fma(float(chunk_out[(size_t(row) * C + c) * D + 32 * t + lane]), shrink, sum[t]);
            }
        }
    }
    #pragma unroll
    for (int t = 0; t < PARTS; ++t) y[size_t(row) * D + 32 * t + lane] = T(sum[t] / total);
"""

KERNEL = Kernel(
    "block_attention",
    inputs=("queries", "keys", "values", "scale", "start", "first_chunk", "held"),
    outputs=("chunk_out", "chunk_top", "chunk_total"),
    source=_SOURCE,
    row_contiguous=False,
)
REDUCE = Kernel(
    "block_attention_reduce", inputs=("chunk_out", "chunk_top", "chunk_total", "sinks"), outputs=("y",), source=_REDUCE_SOURCE
)


def block_attention_ops(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    causal: bool = True,
    window: int = 0,
    sinks: mx.array | None = None,
    start: int = 0,
) -> mx.array:
    """The answer, in MLX's own operation. Shapes as in `block_attention`."""
    m, s = queries.shape[2], keys.shape[2]
    mask = _mask(m, s, causal, window)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def _mask(m: int, s: int, causal: bool, window: int) -> mx.array | str | None:
    """What the last m of s rows see, as MLX's attention takes it."""
    if not window or s <= window:
        return "causal" if causal else None
    row, key = mx.arange(s - m, s)[:, None], mx.arange(s)[None]
    return (key <= row) & (key > row - window)


def layout(rows: int, head_dim: int, simdgroups: int | None = None) -> tuple[int, int, int]:
    """(simd groups of a threadgroup, rows of each, threadgroups that share the rows) for `rows` = query heads a KV head x block
    rows. Bits do not depend on it. On CUDA one threadgroup takes all rows, or none does: 0."""
    most = MAX_HELD // (head_dim // 32)
    for few in (simdgroups,) if simdgroups else (4, 8, 16, 32) if mx.cuda.is_available() else (4, 8):
        each = -(-rows // few)
        if each <= most:
            return few, each, 1
    # Fewer than 512 threads: at head size 256 an M1 or M2 refuses to launch more of this kernel.
    return (0, 0, 0) if mx.cuda.is_available() else (few, most, -(-rows // (few * most)))


def block_attention_kernel(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    causal: bool = True,
    window: int = 0,
    sinks: mx.array | None = None,
    start: int = 0,
    held: mx.array | None = None,
) -> mx.array:
    """Two launches: a threadgroup for each KV head and chunk of keys, then a simd group for each row.

    Shapes: as in `block_attention`.
    Args:
      held: [1] int32, how many of the keys there are, where the arrays are buffers of more; then without a window.
    """
    launch = prepare(queries.shape, queries.dtype, keys.shape[1], scale, causal, window, sinks is not None)
    return launch(queries, keys, values, sinks, start, held)


def prepare(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    hk: int,
    scale: float,
    causal: bool,
    window: int,
    has_sinks: bool,
    simdgroups: int | None = None,
) -> Callable[..., mx.array]:
    """`block_attention_kernel` for queries of a shape, any number of keys, taking (queries, keys, values, sinks, start, held)."""
    b, hq, m, d = shape
    simdgroups, each, slices = layout(hq // hk * row_tile(m), d, simdgroups)
    launch = KERNEL.prepared(
        template=[
            ("T", dtype),
            ("D", d),
            ("ROWS", each),
            ("SIMDGROUPS", simdgroups),
            ("TILES", CHUNK_TILES),
            ("CAUSAL", causal),
            ("WINDOW", window),
        ],
        threadgroup=(simdgroups * 32, 1, 1),
        output_dtypes=[mx.float32] * 3,
    )
    reduce = REDUCE.prepared(
        template=[("T", dtype), ("D", d), ("SINKS", has_sinks)],
        grid=(32 * b * hq * m, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(b, hq, m, d)],
        output_dtypes=[dtype],
    )
    scaled, no_sinks = mx.array([scale], dtype=mx.float32), mx.array([0] * 8, dtype=mx.float32)
    zero = mx.array([0], dtype=mx.int32)

    def run(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        sinks: mx.array | None = None,
        start: int = 0,
        held: mx.array | None = None,
    ) -> mx.array:
        end = start + keys.shape[2]
        first = max(start, end - m - window + 1 if window else start) // CHUNK
        chunks = (end - 1) // CHUNK - first + 1
        # Without a window both stay zero.
        begin = mx.array([start], dtype=mx.int32) if start else zero
        first_chunk = mx.array([first], dtype=mx.int32) if first else zero
        out, top, total = launch(
            inputs=[mx.contiguous(queries), keys, values, scaled, begin, first_chunk, zero if held is None else held],
            grid=(chunks * simdgroups * 32, b * hk, slices),
            output_shapes=[(b, hq, m, chunks, d), (b, hq, m, chunks), (b, hq, m, chunks)],
        )
        return reduce(inputs=[out, top, total, no_sinks if sinks is None else sinks])[0]

    return run


def block_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    causal: bool = True,
    window: int = 0,
    sinks: mx.array | None = None,
    start: int = 0,
) -> mx.array:
    """Attention of the last M positions of a text, all M of them among the keys.

    Shapes:
      - queries: [B, HQ, M, D]; keys, values: [B, HK, S, D], S >= M, in the order of the text; sinks: [HQ]
    Args:
      causal: a row sees keys up to its own; False (a drafter's block): all S.
      window: a row sees only its last `window` keys; 0: all.
      start: position in the text of key 0, for caches that have dropped earlier ones: chunks are counted from there.
    Returns:
      - [B, HQ, M, D]
    Raises:
      ValueError: for a window that is not causal.
    """
    if window and not causal:
        raise ValueError(f"window is {window} with causal=False; a window needs causal=True. Leave one of them out.")
    launch = block_attention_plan(queries, keys, values, scale, causal, window, sinks)
    if launch:
        return launch(queries, keys, values, sinks, start)
    return block_attention_ops(queries, keys, values, scale, causal, window, sinks, start)


def block_attention_plan(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    causal: bool = True,
    window: int = 0,
    sinks: mx.array | None = None,
    folds: bool = False,
) -> Callable[..., mx.array] | Folded | None:
    """`block_attention` of these arguments by a kernel, as a function of (queries, keys, values, sinks, start, held); None: MLX.

    For callers that have another way where it is None, which is so for all lengths or for none.

    Args:
      folds: whether it may be MLX's attention over folded rows: a `Folded`, which takes the pass's mask.
    """
    _, hk, s, _ = k_shape = keys.shape
    if s < queries.shape[2] or values.shape != k_shape:  # all rows are among the keys
        return None
    has_sinks = sinks is not None
    return autotune.planned(
        _plan, queries.shape, queries.dtype, hk, k_shape[3], keys.dtype, values.dtype, scale, causal, window, has_sinks, folds
    )


def _plan(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    hk: int,
    k_dim: int,
    k_dtype: mx.Dtype,
    v_dtype: mx.Dtype,
    scale: float,
    causal: bool,
    window: int,
    has_sinks: bool,
    folds: bool,
) -> Callable[..., mx.array] | Folded | None:
    """`block_attention_plan` for arrays of these shapes and types."""
    b, hq, m, d = shape
    if not (1 <= m <= MAX_ROWS and math.prod(shape) >= 8):  # sums in registers; in device memory
        return None
    eligible = (
        hq % hk == 0
        and d % 32 == 0  # lanes share a head's values evenly
        and k_dim == d
        and dtype in TYPES
        and k_dtype == v_dtype == dtype  # MLX would promote
        and d * dtype.size <= 512  # a tile of 32 keys fits threadgroup memory
        and layout(hq // hk * MAX_ROWS, d)[0] > 0  # outputs fit registers at any row count
    )
    length = min(TRIAL_KEYS, window + MAX_ROWS) if window else TRIAL_KEYS
    about = f"{dtype} HQ {hq} HK {hk} D {d}{'' if causal else ' full'}{f' window {window}' if window else ''}"
    about = f"attention {about}{' sinks' if has_sinks else ''}"
    if not eligible:
        return None
    made = partial(trials, hq, hk, d, length, dtype, causal, window, has_sinks)
    # A sink is a head's own; on CUDA the form is asked about by itself.
    folded = folds and hq > hk and not has_sinks and not mx.cuda.is_available()
    ways = (*candidates(), *((autotune.Candidate(FOLDED),) if folded else ()))
    question = autotune.Question(about, ways, made, nbytes=2 * hk * length * d * dtype.size)
    chosen = autotune.choose(question, m)
    if chosen and chosen.kernel is FOLDED:
        # For one row MLX has other kernels at other lengths, which a trial at this length says nothing about.
        return Folded(scale) if m > 1 else None
    return prepare(shape, dtype, hk, scale, causal, window, has_sinks, **dict(chosen.options)) if chosen else None


def candidates() -> tuple[autotune.Candidate, ...]:
    """The plans that a Mac may find quickest; on CUDA the one that there is."""
    sizes = () if mx.cuda.is_available() else (8, 4)
    return tuple(autotune.Candidate(KERNEL, (("simdgroups", size),)) for size in sizes) or (autotune.Candidate(KERNEL),)


def trials(
    hq: int,
    hk: int,
    d: int,
    s: int,
    dtype: mx.Dtype,
    causal: bool,
    window: int,
    has_sinks: bool,
    ways: Sequence[autotune.Candidate],
) -> Callable[[int], autotune.Trial]:
    """Comparisons with MLX on made-up values, for a row count."""
    keys = mx.random.split(mx.random.key(0), 4)
    s = max(s, MAX_ROWS)
    q = mx.random.normal((1, hq, MAX_ROWS, d), dtype=dtype, key=keys[0])
    k, v = (mx.random.normal((1, hk, s, d), dtype=dtype, key=key) for key in keys[1:3])
    sinks = mx.random.normal((hq,), dtype=dtype, key=keys[3]) if has_sinks else None
    mx.eval(q, k, v, sinks)
    same = autotune.same_floats({mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}[dtype])

    def one(m: int) -> autotune.Trial:
        some, about = q[:, :, :m], (dtype, hk, d**-0.5, causal, window, has_sinks)

        def ours(way: autotune.Candidate) -> Callable[[mx.array], list[mx.array]]:
            if way.kernel is FOLDED:
                mask = _mask(m, s, causal, window)
                # Made beforehand, as a pass makes it once for its layers.
                added = None if mask is None else folded_mask(mask, m, s, hq // hk, dtype)
                mx.eval(added)
                return lambda q: [Folded(d**-0.5)(q, k, v, mask, lambda *_: added)]
            launch = lazy(lambda: prepare(some.shape, *about, **dict(way.options)))
            return lambda q: [launch(q, k, v, sinks, 0)]

        def stock(q: mx.array) -> list[mx.array]:
            return [block_attention_ops(q, k, v, d**-0.5, causal, window, sinks)]

        return autotune.Trial(some, [ours(way) for way in ways], stock, same)

    return one
