"""The mixture-of-experts form of block_qmm: each (row, expert) pair's product, an expert's weights read once for its rows.

    pairs     row 0: e5 e2 | row 1: e5 e7 | row 2: e2 e5        threadgroups stand over (pair, columns)
    leaders         *  *            .  *           .  .         a pair that is not its expert's first leaves at once
    e5 leads        rows 0, 1, 2 in one pass over e5's weights

Nothing is sorted and the host waits for nothing. A row's sum is block_qmm's: its bits do not depend on which other rows chose
the same expert. Knows arrays only.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from . import autotune, unpack
from .block_qmm import SIMDGROUPS, TOLERANCE, TYPES, chunk
from .launch import Kernel
from .trials import lazy

MAX_PAIRS = 256
COLUMNS = 4
# Rows of a layer after the gate, one for each pair.
_PAIRS = (1, 8, 32, 128)

_SOURCE = """
    constexpr int PER_WORD = 32 / BITS, PAIRS = 16 / BITS;
    constexpr int WORDS = CHUNK / PER_WORD, VECTOR = WORDS < 4 ? 2 : 4;
    const int none = 0x7fffffff;
    const int K = x_shape[1], N = w_shape[1], P = indices_shape[0];
    const int share = P / x_shape[0];
    const int lane = int(thread_index_in_simdgroup);
    const int first = (int(threadgroup_position_in_grid.x) * SIMDGROUPS + int(simdgroup_index_in_threadgroup)) * COLS;
    const int own = int(threadgroup_position_in_grid.y);
    const size_t expert = size_t(indices[own]);
    const int words = K / PER_WORD, groups = K / GROUP;

    int leader = none;
    for (int i = lane; i < own; i += 32) {
        if (leader == none && size_t(indices[i]) == expert) leader = i;
    }
    if (simd_min(leader) != none) return;

    int last = own - 1;
    while (true) {
        // The next ROWS pairs of this expert; weights are read again only for more than that.
        int pair[ROWS];
        #pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            int next = none;
            for (int i = lane; i < P; i += 32) {
                if (next == none && i > last && size_t(indices[i]) == expert) next = i;
            }
            pair[m] = simd_min(next);
            last = pair[m] == none ? none : pair[m];
        }
        if (pair[0] == none) return;

        float sum[ROWS][COLS];
        #pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            #pragma unroll
            for (int c = 0; c < COLS; ++c) sum[m][c] = 0.0f;
        }
        for (int k = lane * CHUNK; k < K; k += 32 * CHUNK) {
            uint packed[COLS][WORDS];
            float scale[COLS], bias[COLS];
            #pragma unroll
            for (int c = 0; c < COLS; ++c) {
                // Columns beyond the last one repeat it; their sums are not stored.
                const size_t n = expert * N + size_t(first + c < N ? first + c : N - 1);
                #pragma unroll
                for (int j = 0; j < WORDS / VECTOR; ++j) {
                    const vec<uint, VECTOR> some = ((const device vec<uint, VECTOR>*)(w + n * words + k / PER_WORD))[j];
                    #pragma unroll
                    for (int e = 0; e < VECTOR; ++e) packed[c][VECTOR * j + e] = some[e];
                }
                scale[c] = float(scales[n * groups + k / GROUP]);
                bias[c] = metal::fma(-word_base<BITS>(), scale[c], float(biases[n * groups + k / GROUP]));
            }
            #pragma unroll
            for (int word = 0; word < WORDS; ++word) {
                float weight[COLS][PER_WORD];
                #pragma unroll
                for (int c = 0; c < COLS; ++c) {
                    #pragma unroll
                    for (int p = 0; p < PAIRS; ++p) {
                        const vec<half, 2> two = as_type<vec<half, 2>>(word_pair<BITS>(packed[c][word], p));
                        weight[c][p] = metal::fma(float(two[0]), scale[c], bias[c]);
                        weight[c][p + PAIRS] = metal::fma(float(two[1]), scale[c], bias[c]);
                    }
                }
                #pragma unroll
                for (int m = 0; m < ROWS; ++m) {
                    if (pair[m] != none) {
                        const device vec<T, 4>* row =
                            (const device vec<T, 4>*)(x + size_t(pair[m] / share) * K + k + word * PER_WORD);
                        float value[PER_WORD];
                        #pragma unroll
                        for (int q = 0; q < PER_WORD / 4; ++q) {
                            const vec<T, 4> four = row[q];
                            #pragma unroll
                            for (int i = 0; i < 4; ++i) value[4 * q + i] = float(four[i]);
                        }
                        #pragma unroll
                        for (int j = 0; j < PER_WORD; ++j) {
                            #pragma unroll
                            for (int c = 0; c < COLS; ++c) sum[m][c] = metal::fma(value[j], weight[c][j], sum[m][c]);
                        }
                    }
                }
            }
        }
        #pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            if (pair[m] != none) {
                #pragma unroll
                for (int c = 0; c < COLS; ++c) {
                    const float total = simd_sum(sum[m][c]);
                    if (lane == 0 && first + c < N) y[size_t(pair[m]) * N + first + c] = T(total);
                }
            }
        }
    }
"""

KERNEL = Kernel(
    "block_gather_qmm", ("x", "w", "scales", "biases", "indices"), outputs=("y",), source=_SOURCE, header=unpack.HEADER
)


def block_gather_qmm_ops(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, indices: mx.array, group_size: int, bits: int
) -> mx.array:
    """The answer, in MLX's own operation. Shapes as in `block_gather_qmm`."""
    x = x.reshape(-1, 1, x.shape[-1])
    rows = (mx.arange(indices.size, dtype=mx.uint32) // (indices.size // x.shape[0])).reshape(indices.shape)
    options = {"transpose": True, "group_size": group_size, "bits": bits}
    return mx.gather_qmm(x, w, scales, biases, lhs_indices=rows, rhs_indices=indices, **options)[..., 0, :]


def block_gather_qmm_kernel(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, indices: mx.array, group_size: int, bits: int
) -> mx.array:
    """Launch: a threadgroup for each pair and `COLUMNS * SIMDGROUPS` columns. Shapes as in `block_gather_qmm`."""
    return prepare(x.shape, x.dtype, w.shape, indices.shape, group_size, bits)(x, w, scales, biases, indices)


def prepare(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    w_shape: tuple[int, ...],
    indices_shape: tuple[int, ...],
    group_size: int,
    bits: int,
    columns: int = COLUMNS,
    tile: int | None = None,
) -> Callable[..., mx.array]:
    """`block_gather_qmm_kernel` for arrays of these shapes, as a function of (x, w, scales, biases, indices).

    columns: of a simd group; tile: rows of one expert in one pass over its weights. Results depend on neither.
    """
    pairs, (e, n), flat = math.prod(indices_shape), w_shape[:2], (math.prod(shape[:-1]), shape[-1])
    groups = -(-n // (columns * SIMDGROUPS))
    launch = KERNEL.prepared(
        template=[
            ("T", dtype),
            ("BITS", bits),
            ("GROUP", group_size),
            # Larger tiles where each expert is expected to get more rows.
            ("ROWS", tile or (4 if 2 * pairs <= e else 8)),
            ("COLS", columns),
            ("SIMDGROUPS", SIMDGROUPS),
            ("CHUNK", chunk(shape[-1])),
        ],
        grid=(groups * SIMDGROUPS * 32, pairs, 1),
        threadgroup=(SIMDGROUPS * 32, 1, 1),
        output_shapes=[(*indices_shape, n)],
        output_dtypes=[dtype],
    )

    def run(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, indices: mx.array) -> mx.array:
        return launch(inputs=[mx.reshape(x, flat), w, scales, biases, mx.reshape(indices, (pairs,))])[0]

    return run


def block_gather_qmm(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, indices: mx.array, group_size: int, bits: int
) -> mx.array:
    """Products of rows with the experts that they chose.

    Shapes:
      - x: [..., K], X rows; indices: [...] integers, P of them, a multiple of X: pair p belongs to row p // (P // X)
      - w: [E, N, K * bits / 32] uint32; scales, biases: [E, N, K / group_size]
    Returns:
      - [..., N] in x's type, its leading axes those of the indices
    Raises:
      ValueError: if P is not a multiple of X.
    """
    if indices.size % (x.size // x.shape[-1]):
        raise ValueError(f"there are {indices.size} indices; their number must be a multiple of x's {x.size // x.shape[-1]} rows")
    launch = block_gather_qmm_plan(x, w, scales, biases, indices, group_size, bits)
    if launch:
        return launch(x, w, scales, biases, indices)
    return block_gather_qmm_ops(x, w, scales, biases, indices, group_size, bits)


def block_gather_qmm_plan(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, indices: mx.array, group_size: int, bits: int
) -> Callable[..., mx.array] | None:
    """`block_gather_qmm` of these arguments by a kernel, as a function of (x, w, scales, biases, indices); None: MLX."""
    if biases is None:  # not affine
        return None
    about = (x.shape, x.dtype, w.shape, scales.dtype, indices.shape, group_size, bits)
    return autotune.planned(_plan, *about, given=(w, scales, biases))


def _plan(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    w_shape: tuple[int, ...],
    scales_dtype: mx.Dtype,
    indices_shape: tuple[int, ...],
    group_size: int,
    bits: int,
    *weights: mx.array,
) -> Callable[..., mx.array] | None:
    """`block_gather_qmm_plan` for arrays of these shapes and types; a trial runs on these weights of a loaded layer."""
    pairs, (e, n), k = math.prod(indices_shape), w_shape[:2], shape[-1]
    if not 0 < pairs <= MAX_PAIRS:  # each pair looks through all of them
        return None
    share = pairs // math.prod(shape[:-1])
    eligible = (
        bits in (4, 8)  # a word holds a whole number of weights
        and group_size in (32, 64, 128)  # a lane's values lie in one group
        and dtype in TYPES
        and scales_dtype == dtype  # MLX would promote
        and e * n * k // group_size >= 8  # the scales, so all weights, are in device memory
    )
    if not eligible:
        return None
    about = f"experts {dtype} {bits} bit group {group_size} E {e} N {n} K {k} pairs a row {share}"
    counts = autotune.ROWS if share > 1 else _PAIRS
    # A question that waits for its trial must not keep a layer in memory.
    made = partial(trials, share, group_size, bits, dtype, [weakref.ref(a) for a in weights])
    question = autotune.Question(about, candidates(), made, counts, nbytes=min(e, 8) * n * k * bits // 8)
    chosen = autotune.choose(question, math.prod(shape[:-1]))
    return prepare(shape, dtype, w_shape, indices_shape, group_size, bits, **dict(chosen.options)) if chosen else None


def candidates() -> tuple[autotune.Candidate, ...]:
    """The plans that a Mac may find quickest; on CUDA only the default one."""
    if mx.cuda.is_available():
        return (autotune.Candidate(KERNEL),)
    return tuple(autotune.Candidate(KERNEL, (("columns", c), ("tile", r))) for c, r in ((4, 4), (4, 8), (2, 4), (2, 8)))


def trials(
    share: int,
    group_size: int,
    bits: int,
    dtype: mx.Dtype,
    weights: Sequence[Callable[[], mx.array | None]],
    ways: Sequence[autotune.Candidate],
) -> Callable[[int], autotune.Trial]:
    """Comparisons with MLX on a layer's own weights, experts chosen at random; for a row count.

    Args:
      share: pairs of a row; weights: w, scales and biases, each as a function that returns it, or None if the layer is gone.
    Raises:
      LookupError: the layer is gone.
    """
    arrays = [given() for given in weights]
    if any(a is None for a in arrays):
        raise LookupError("its layer is gone")
    (e, n), k = arrays[0].shape[:2], arrays[1].shape[2] * group_size

    def one(rows: int) -> autotune.Trial:
        keys = mx.random.split(mx.random.key(rows), 9)
        x = mx.random.normal((rows, k), dtype=dtype, key=keys[0])
        # Other experts at each call, or a cache would hold them; the first call of each side has the same.
        some = [mx.random.randint(0, e, (rows * share,), key=key).astype(mx.uint32) for key in keys[1:]]
        mx.eval(x, some)

        def ours(way: autotune.Candidate) -> Callable[[mx.array], list[mx.array]]:
            about = ((rows, k), dtype, (e, n), (rows * share,), group_size, bits)
            launch = lazy(lambda: prepare(*about, **dict(way.options)))
            turn = itertools.cycle(some)
            return lambda x: [launch(x, *arrays, next(turn))]

        turn = itertools.cycle(some)
        stock = lambda x: [block_gather_qmm_ops(x, *arrays, next(turn), group_size, bits)]  # noqa: E731
        return autotune.Trial(x, [ours(way) for way in ways], stock, autotune.same_floats(TOLERANCE[dtype]))

    return one
