"""x[M, K] times an affine-quantized W[N, K] for M = 1..16 rows: weights are read once, every row is what one row would be.

    a simd group                     lane 0      lane 1      ...  lane 31     lane 0 ...
    takes COLS columns of W,    K -> [16 values] [16 values]      [16 values] [16 values]      4 bit; 8 values in 8 bit
    its lanes split K

Each lane unpacks a word of weights once and uses it for all rows; a row's sum runs over the lane's own values in order, then
over the lanes. Neither order knows M, so rows are bit-identical between row counts.

A second text, `block_qmm_tiles`, multiplies in matrix units, for 16-bit types: see tile_product.py. Knows arrays only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from . import autotune
from .launch import Kernel
from .tile_product import tile_product
from .trials import lazy

MAX_ROWS = 16
SIMDGROUPS = 4
TILE_SIMDGROUPS = 8
# A trial makes its own weights: of an LM head, a part tells as much. Copies in turn, or a cache would hold what a pass reads
# from memory.
TRIAL_COLUMNS = 16384
TRIAL_BYTES = 128_000_000
TYPES = (mx.float32, mx.float16, mx.bfloat16)
TILE_TYPES = (mx.float16, mx.bfloat16)  # matrix units take these
# How far the last bit of a type may move: the trial's bound against stock MLX, which rounds and sums in other places.
TOLERANCE = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}

_SOURCE = """
    constexpr int PER_WORD = 32 / BITS;
    constexpr int CHUNK = 2 * PER_WORD;
    constexpr uint MASK = (1u << BITS) - 1u;
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
        vec<uint, 2> packed[COLS];
        float scale[COLS], bias[COLS];
        #pragma unroll
        for (int c = 0; c < COLS; ++c) {
            // Columns beyond the last one repeat it; their sums are not stored.
            const size_t n = size_t(first + c < N ? first + c : N - 1);
            packed[c] = ((const device vec<uint, 2>*)(w + n * words + k / PER_WORD))[0];
            scale[c] = float(scales[n * groups + k / GROUP]);
            bias[c] = float(biases[n * groups + k / GROUP]);
        }
        #pragma unroll
        for (int word = 0; word < 2; ++word) {
            float weight[COLS][PER_WORD];
            #pragma unroll
            for (int c = 0; c < COLS; ++c) {
                #pragma unroll
                for (int j = 0; j < PER_WORD; ++j) {
                    // q in the last bits of 2^23: a float without a conversion.
                    const uint q = 0x4b000000u | ((packed[c][word] >> (j * BITS)) & MASK);
                    weight[c][j] = metal::fma(as_type<float>(q) - 8388608.0f, scale[c], bias[c]);
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

KERNEL = Kernel("block_qmm", inputs=("x", "w", "scales", "biases"), outputs=("y",), source=_SOURCE)
TILES = tile_product("block_qmm_tiles", quantized=True)


def block_qmm_ops(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int) -> mx.array:
    """[..., K] to [..., N]: the answer, in MLX's own operation."""
    return mx.quantized_matmul(x, w, scales, biases, transpose=True, group_size=group_size, bits=bits)


def row_tile(rows: int) -> int:
    """Rows that the text is compiled for: few values, because each is a compile; the exact number is read from the shape.

    Raises:
      ValueError: for rows outside 1..16.
    """
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"x has {rows} rows; a launch takes 1 to {MAX_ROWS}. The function without _kernel takes any.")
    return next(tile for tile in (1, 2, 4, 8, MAX_ROWS) if rows <= tile)


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
    """`block_qmm_kernel` for x [..., K] of a shape and a type: what takes (x, w, scales, biases), as often as one likes."""
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
) -> mx.array:
    """Launch of the text for matrix units: a threadgroup for `columns` columns of W, its `simdgroups`, 2 to the n, split K.

    Shapes: as `block_qmm_kernel`; float16 or bfloat16.
    """
    return prepare_tiles(x.shape, x.dtype, w.shape[0], group_size, bits, columns, simdgroups)(x, w, scales, biases)


def prepare_tiles(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    n: int,
    group_size: int,
    bits: int,
    columns: int | None = None,
    simdgroups: int | None = None,
) -> Callable[..., mx.array]:
    """`block_qmm_tiles_kernel`, prepared as `prepare` does."""
    rows = math.prod(shape[:-1])
    columns, threadgroup, template = tile_sizes(rows, dtype, n, group_size, bits, columns, simdgroups)
    launch = TILES.prepared(
        template=template,
        grid=(-(-n // columns) * threadgroup, 1, 1),
        threadgroup=(threadgroup, 1, 1),
        output_shapes=[(*shape[:-1], n)],
        output_dtypes=[dtype],
    )
    return lambda x, *weights: launch(inputs=[in_rows(x, rows), *weights])[0]


def tile_sizes(
    rows: int, dtype: mx.Dtype, n: int, group_size: int, bits: int, columns: int | None = None, simdgroups: int | None = None
) -> tuple[int, int, list[tuple[str, object]]]:
    """Columns of W that a threadgroup takes, its threads, and the template of a text of `tile_product`.

    Raises:
      ValueError: for rows outside 1..16.
    """
    words = group_size * bits // 128
    # More columns read x less often, fewer make more threadgroups; a lane's words and sums stay in registers, of which an Apple
    # GPU has 128 a thread. Not timed on a Mac. Results do not depend on it.
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
    """What `block_qmm` of the same arguments hands (x, w, scales, biases) to; None: MLX. For callers with a way of their own.

    Of one weight matrix all row counts that a text of ours serves agree bit for bit; MLX may serve the others.
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
    """Which text serves an eligible product, in which plan; None: stock MLX."""
    made = partial(trials, min(n, TRIAL_COLUMNS), k, group_size, bits, dtype)
    about = f"product {dtype} {bits} bit group {group_size} N {n} K {k}"
    ways = candidates(dtype, n, group_size, bits)
    return autotune.choose(autotune.Question(about, ways, made, nbytes=n * k * bits // 8), rows)


def candidates(dtype: mx.Dtype, n: int, group_size: int, bits: int) -> tuple[autotune.Candidate, ...]:
    """The texts for a matrix, each in the plans that a Mac may find quickest; on CUDA, where a compile takes 2 s, in one."""
    plain = [autotune.Candidate(KERNEL, (("columns", columns),)) for columns in (4, 2)]
    if dtype not in TILE_TYPES:
        tiles = []
    else:
        columns, threads, _ = tile_sizes(1, dtype, n, group_size, bits)
        sizes = [(columns, threads // 32), *((other, TILE_SIMDGROUPS) for other in (16, 32) if other != columns), (columns, 4)]
        options = [(("columns", columns), ("simdgroups", simdgroups)) for columns, simdgroups in sizes]
        tiles = [autotune.Candidate(TILES, option, order=("simdgroups",)) for option in options]
    return tuple([*plain[:1], *tiles[:1]] if mx.cuda.is_available() else [*plain, *tiles])


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
