"""x[M, K] times an affine-quantized W[N, K] for M = 1..16 rows: weights are read once, every row is what one row would be.

    a simd group                     lane 0      lane 1      ...  lane 31     lane 0 ...
    takes COLS columns of W,    K -> [32 values] [32 values]      [32 values] [32 values]      16 where K leaves lanes idle
    its lanes split K

Each lane unpacks a word of weights once and uses it for all rows; a row's sum runs over the lane's own values in order, then
over the lanes. Neither order knows M, so rows are bit-identical between row counts.

`block_qmm_tiles` multiplies in matrix units, for 16-bit types: row_tiles.py on Metal, tile_product.py on CUDA. Knows arrays only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from . import autotune, unpack
from .launch import Kernel
from .row_tiles import row_tiles
from .tile_product import tile_product
from .trials import lazy

MAX_ROWS = 16
SIMDGROUPS = 4
TILE_SIMDGROUPS = 8
# A trial makes its own weights; a part of an LM head is enough. It uses copies in turn: otherwise the GPU's cache would hold what
# a pass reads from memory.
TRIAL_COLUMNS = 16384
TRIAL_BYTES = 128_000_000
TYPES = (mx.float32, mx.float16, mx.bfloat16)
TILE_TYPES = (mx.float16, mx.bfloat16)  # matrix units take these
# How far the last bit of a type may move: the trial's bound against stock MLX, which rounds and sums in other places.
TOLERANCE = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}

_SOURCE = """
    constexpr int PER_WORD = 32 / BITS, PAIRS = 16 / BITS;
    constexpr int WORDS = CHUNK / PER_WORD, VECTOR = WORDS < 4 ? 2 : 4;
    const int M = x_shape[0], K = x_shape[1], N = w_shape[0];
    const int lane = int(thread_index_in_simdgroup);
    const int first = (int(threadgroup_position_in_grid.x) * SIMDGROUPS + int(simdgroup_index_in_threadgroup)) * COLS;
    const int words = K / PER_WORD, groups = K / GROUP;

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
            const size_t n = size_t(first + c < N ? first + c : N - 1);
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
                if (m < M) {
                    const device vec<T, 4>* row = (const device vec<T, 4>*)(x + size_t(m) * K + k + word * PER_WORD);
                    float value[PER_WORD];
                    #pragma unroll
                    for (int q = 0; q < PER_WORD / 4; ++q) {
                        const vec<T, 4> four = row[q];
                        #pragma unroll
                        for (int i = 0; i < 4; ++i) value[4 * q + i] = float(four[i]);
                    }
                    // Columns inside: neighbouring multiply-adds do not wait for each other.
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
        if (m < M) {
            #pragma unroll
            for (int c = 0; c < COLS; ++c) {
                const float total = simd_sum(sum[m][c]);
                if (lane == 0 && first + c < N) y[size_t(m) * N + first + c] = T(total);
            }
        }
    }
"""

KERNEL = Kernel("block_qmm", inputs=("x", "w", "scales", "biases"), outputs=("y",), source=_SOURCE, header=unpack.HEADER)
TILES = tile_product("block_qmm_tiles", quantized=True)
EIGHTS = row_tiles("block_qmm_tiles", quantized=True)


def block_qmm_ops(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int) -> mx.array:
    """[..., K] to [..., N]: the answer, in MLX's own operation."""
    return mx.quantized_matmul(x, w, scales, biases, transpose=True, group_size=group_size, bits=bits)


def row_tile(rows: int) -> int:
    """Rows that the text is compiled for: few values, because each needs a compile. It reads the exact number from the shape.

    Raises:
      ValueError: for rows outside 1..16.
    """
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"x has {rows} rows; a launch takes 1 to {MAX_ROWS}. The function without _kernel takes any.")
    return next(tile for tile in (1, 2, 4, 8, MAX_ROWS) if rows <= tile)


def chunk(k: int) -> int:
    """Values of a column that a lane takes at a time: 32 read scales least often, 16 where those would leave more lanes idle.

    The order of a row's sums depends on it, so it follows from the matrix alone.
    """
    return min((32, 16), key=lambda values: -(-k // (32 * values)) * values)


def block_qmm_kernel(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int, columns: int | None = None
) -> mx.array:
    """Launch: a simd group for `columns` columns of W, `SIMDGROUPS` of them a threadgroup.

    Shapes:
      - x: [..., K] float, its leading axes 1..16 rows together; w: [N, K * bits / 32] uint32; scales, biases: [N, K / group_size]
    Returns:
      - y: [..., N] in x's type
    """
    return prepare(x.shape, x.dtype, w.shape[0], group_size, bits, columns)(x, w, scales, biases)


def prepare(
    shape: tuple[int, ...], dtype: mx.Dtype, n: int, group_size: int, bits: int, columns: int | None = None
) -> Callable[..., mx.array]:
    """`block_qmm_kernel` for x [..., K] of one shape and type, as a function of (x, w, scales, biases)."""
    rows = math.prod(shape[:-1])
    # Sums and unpacked weights stay in registers: 16 x 4 sums and 4 x 8 weights are near an Apple GPU's 128 a thread.
    # Not timed on a Mac. Results do not depend on it.
    columns = columns or (2 if rows > 8 and not mx.cuda.is_available() else 4)
    groups = -(-n // (columns * SIMDGROUPS))
    launch = KERNEL.prepared(
        template=[
            ("T", dtype),
            ("BITS", bits),
            ("GROUP", group_size),
            ("ROWS", row_tile(rows)),
            ("COLS", columns),
            ("SIMDGROUPS", SIMDGROUPS),
            ("CHUNK", chunk(shape[-1])),
        ],
        grid=(groups * SIMDGROUPS * 32, 1, 1),
        threadgroup=(SIMDGROUPS * 32, 1, 1),
        output_shapes=[(*shape[:-1], n)],
        output_dtypes=[dtype],
    )
    return _of_rows(launch, rows, shape[-1])


def _of_rows(launch: Callable[..., list[mx.array]], rows: int, k: int) -> Callable[..., mx.array]:
    """A launch whose text takes x [rows, K], for x [..., K]."""

    def run(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return launch(inputs=[mx.reshape(x, (rows, k)), w, scales, biases])[0]

    return run


def in_rows(x: mx.array, rows: int) -> mx.array:
    """x [..., rows, K] as it is, for texts that read its last two axes; else [rows, K]. An operation less in each pass."""
    return x if x.ndim > 1 and x.shape[-2] == rows else mx.reshape(x, (rows, x.shape[-1]))


def block_qmm_tiles_kernel(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    group_size: int,
    bits: int,
    columns: int | None = None,
    simdgroups: int | None = None,
    tile: int | None = None,
) -> mx.array:
    """Launch of a text for matrix units: a threadgroup for `columns` columns of W, its `simdgroups`, 2 to the n, split K.

    Shapes: as `block_qmm_kernel`; float16 or bfloat16.
    Args:
      tile: columns of W that are multiplied at once: 8, Metal's (row_tiles.py), or 16, CUDA's (tile_product.py). None: the
        device's own.
    """
    return prepare_tiles(x.shape, x.dtype, w.shape[0], group_size, bits, columns, simdgroups, tile)(x, w, scales, biases)


def prepare_tiles(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    n: int,
    group_size: int,
    bits: int,
    columns: int | None = None,
    simdgroups: int | None = None,
    tile: int | None = None,
) -> Callable[..., mx.array]:
    """`block_qmm_tiles_kernel`, prepared as `prepare` does."""
    rows = math.prod(shape[:-1])
    columns, threadgroup, template = tile_sizes(rows, dtype, n, group_size, bits, columns, simdgroups)
    launch = (EIGHTS if (tile or own_tile()) == 8 else TILES).prepared(
        template=template,
        grid=(-(-n // columns) * threadgroup, 1, 1),
        threadgroup=(threadgroup, 1, 1),
        output_shapes=[(*shape[:-1], n)],
        output_dtypes=[dtype],
    )
    return lambda x, *weights: launch(inputs=[in_rows(x, rows), *weights])[0]


def own_tile() -> int:
    """Columns of W that the units of the device at hand multiply at once."""
    return 16 if mx.cuda.is_available() else 8


def tile_sizes(
    rows: int, dtype: mx.Dtype, n: int, group_size: int, bits: int, columns: int | None = None, simdgroups: int | None = None
) -> tuple[int, int, list[tuple[str, object]]]:
    """Columns of W that a threadgroup takes, its threads, and the template of a text of `tile_product`.

    Raises:
      ValueError: for rows outside 1..16.
    """
    words = group_size * bits // 128
    # With more columns x is read less often; with fewer there are more threadgroups. A lane keeps its words and sums in
    # registers, and an Apple GPU has 128 per thread. Not timed on a Mac. Results do not depend on it.
    widest = 64 if n >= 8192 and mx.cuda.is_available() else 32 if n >= 2048 else 16
    columns = columns or min(widest, max(16, 128 // words))
    # With few threadgroups, more threads in each keep an H100's memory busy, if all find room in its registers: tests/
    # kernels/test_cuda_text.py counts them. The sums' order depends on it: it may follow from the matrix, not from the rows.
    many = n < 8192 and columns < 64 and group_size < 128 and mx.cuda.is_available()
    simdgroups = simdgroups or (16 if many else TILE_SIMDGROUPS)
    template = [
        ("T", dtype),
        ("HALF", dtype == mx.float16),
        ("BITS", bits),
        ("GROUP", group_size),
        ("ROWS", 8 if row_tile(rows) <= 8 else 16),
        ("COLS", columns),
        ("SIMDGROUPS", simdgroups),
    ]
    return columns, simdgroups * 32, template


def block_qmm(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int) -> mx.array:
    """x times a quantized weight matrix, by the kernel where it is eligible and chosen, else by MLX.

    Shapes: as `block_qmm_kernel`; any number of rows.
    """
    launch = block_qmm_plan(x, w, scales, biases, group_size, bits)
    return launch(x, w, scales, biases) if launch else block_qmm_ops(x, w, scales, biases, group_size, bits)


def block_qmm_plan(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int
) -> Callable[..., mx.array] | None:
    """`block_qmm` of these arguments by a kernel, as a function of (x, w, scales, biases); None: MLX.

    For callers that have another way where it is None. For one weight matrix, all row counts that one family of ours serves agree
    bit for bit; MLX may serve the others.
    """
    if biases is None:  # not affine
        return None
    return autotune.planned(_plan, x.shape, x.dtype, w.shape, scales.dtype, group_size, bits)


def _plan(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    w_shape: tuple[int, ...],
    scales_dtype: mx.Dtype,
    group_size: int,
    bits: int,
) -> Callable[..., mx.array] | None:
    """`block_qmm_plan` for arrays of these shapes and types."""
    if not 1 <= math.prod(shape[:-1]) <= MAX_ROWS:  # the sums of all rows are in registers
        return None
    n, k = w_shape[0], shape[-1]
    eligible = (
        bits in (4, 8)  # a word holds a whole number of weights
        and group_size in (32, 64, 128)  # a lane's values lie in one group
        and dtype in TYPES
        and scales_dtype == dtype  # MLX would promote; the kernel returns x's type
        and n * k // group_size >= 8  # the scales, so all weights, are certainly in device memory
    )
    if not eligible:
        return None
    chosen = candidate(math.prod(shape[:-1]), dtype, n, k, group_size, bits)
    return prepare_as(chosen, shape, dtype, n, group_size, bits) if chosen else None


def candidate(rows: int, dtype: mx.Dtype, n: int, k: int, group_size: int, bits: int) -> autotune.Candidate | None:
    """The kernel and plan that serve an eligible product; None: stock MLX."""
    made = partial(trials, min(n, TRIAL_COLUMNS), k, group_size, bits, dtype)
    about = f"product {dtype} {bits} bit group {group_size} N {n} K {k}"
    ways = candidates(dtype, n, group_size, bits)
    return autotune.choose(autotune.Question(about, ways, made, nbytes=n * k * bits // 8), rows)


def candidates(dtype: mx.Dtype, n: int, group_size: int, bits: int) -> tuple[autotune.Candidate, ...]:
    """The texts for a matrix, each in the plans that a Mac may find quickest; on CUDA, where a compile takes 2 s, in one."""
    if mx.cuda.is_available():
        return tuple([autotune.Candidate(KERNEL, (("columns", 4),)), *tile_candidates(TILES, dtype, n, group_size, bits)[:1]])
    plain = [autotune.Candidate(KERNEL, (("columns", columns),)) for columns in (4, 2)]
    return (*plain, *tile_candidates(EIGHTS, dtype, n, group_size, bits))


def tile_candidates(text: Kernel, dtype: mx.Dtype, n: int, group_size: int, bits: int) -> list[autotune.Candidate]:
    """A text for matrix units in its plans, the likeliest first: columns and simd groups of a threadgroup."""
    if dtype not in TILE_TYPES:
        return []
    columns, threads, _ = tile_sizes(1, dtype, n, group_size, bits)
    # More columns share a row's values, fewer make more threadgroups; another number of simd groups is another order of sums.
    sizes = [(columns, threads // 32), *((c, TILE_SIMDGROUPS) for c in (16, 32, 64) if c != columns), (columns, 4)]
    options = [(("columns", columns), ("simdgroups", simdgroups)) for columns, simdgroups in sizes]
    return [autotune.Candidate(text, option, order=("simdgroups",)) for option in options]


def prepare_as(
    candidate: autotune.Candidate, shape: tuple[int, ...], dtype: mx.Dtype, n: int, group_size: int, bits: int
) -> Callable[..., mx.array]:
    """`prepare` or `prepare_tiles`, in a candidate's plan."""
    way = prepare if candidate.kernel is KERNEL else prepare_tiles
    return way(shape, dtype, n, group_size, bits, **dict(candidate.options))


def trials(
    n: int, k: int, group_size: int, bits: int, dtype: mx.Dtype, ways: Sequence[autotune.Candidate]
) -> Callable[[int], autotune.Trial]:
    """Comparisons of texts with MLX on made-up values of the real shape, for a row count."""
    keys = mx.random.split(mx.random.key(0), 2)
    first = mx.quantize(mx.random.normal((n, k), dtype=dtype, key=keys[0]), group_size=group_size, bits=bits)
    copies = min(16, 1 + TRIAL_BYTES // sum(a.nbytes for a in first))
    weights = [first, *([a + 0 for a in first] for _ in range(copies - 1))]
    x = mx.random.normal((MAX_ROWS, k), dtype=dtype, key=keys[1])
    mx.eval(weights, x)
    turn = itertools.cycle(weights)

    def one(m: int) -> autotune.Trial:
        def ours(way: autotune.Candidate) -> Callable[[mx.array], list[mx.array]]:
            launch = lazy(lambda: prepare_as(way, (m, k), dtype, n, group_size, bits))
            return lambda x: [launch(x, *next(turn))]

        def stock(x: mx.array) -> list[mx.array]:
            return [block_qmm_ops(x, *next(turn), group_size, bits)]

        return autotune.Trial(x[:m], [ours(way) for way in ways], stock, autotune.same_floats(TOLERANCE[dtype]))

    return one
