"""x[M, K] times an affine-quantized W[N, K] for M = 1..16 rows: weights are read once, every row is what one row would be.

    a simd group                     lane 0      lane 1      ...  lane 31     lane 0 ...
    takes COLS columns of W,    K -> [16 values] [16 values]      [16 values] [16 values]      4 bit; 8 values in 8 bit
    its lanes split K

Each lane unpacks a word of weights once and uses it for all rows; a row's sum runs over the lane's own values in order, then
over the lanes. Neither order knows M, so rows are bit-identical between row counts. Knows arrays only.
"""

from __future__ import annotations

import itertools

import mlx.core as mx

from . import choice
from .kernel import Kernel

MAX_ROWS = 16
SIMDGROUPS = 4
# A trial makes its own weights: of an LM head, a part tells as much. Copies in turn, or a cache would hold what a pass reads
# from memory.
TRIAL_COLUMNS = 16384
TRIAL_BYTES = 128_000_000
TYPES = (mx.float32, mx.float16, mx.bfloat16)
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


def block_qmm_ops(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int) -> mx.array:
    """[..., K] to [..., N]: the answer, in MLX's own operation."""
    return mx.quantized_matmul(x, w, scales, biases, transpose=True, group_size=group_size, bits=bits)


def row_tile(rows: int) -> int:
    """Rows that the text is compiled for: few values, because each is a compile; the exact number is read from the shape.

    Raises:
      ValueError: for rows outside 1..16.
    """
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"expected 1 to {MAX_ROWS} rows; found {rows}. Call the function without _kernel, which takes any.")
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
    k, n = x.shape[-1], w.shape[0]
    rows = x.reshape(-1, k)
    # Sums and unpacked weights stay in registers: 16 x 4 sums and 4 x 8 weights are near an Apple GPU's 128 a thread.
    # Not timed on a Mac. Results do not depend on it.
    columns = columns or (2 if rows.shape[0] > 8 and not mx.cuda.is_available() else 4)
    groups = -(-n // (columns * SIMDGROUPS))
    (y,) = KERNEL(
        [rows, w, scales, biases],
        template=[
            ("T", x.dtype),
            ("BITS", bits),
            ("GROUP", group_size),
            ("ROWS", row_tile(rows.shape[0])),
            ("COLS", columns),
            ("SIMDGROUPS", SIMDGROUPS),
        ],
        grid=(groups * SIMDGROUPS * 32, 1, 1),
        threadgroup=(SIMDGROUPS * 32, 1, 1),
        output_shapes=[(rows.shape[0], n)],
        output_dtypes=[x.dtype],
    )
    return y.reshape(*x.shape[:-1], n)


def block_qmm(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int) -> mx.array:
    """x times a quantized weight matrix, by the kernel where it is eligible and chosen, else by MLX.

    For one weight matrix the choice is the same for all of 1..16 rows, so that rows agree bit for bit between them.

    Shapes: as `block_qmm_kernel`; any number of rows.
    """
    rows, n = x.size // x.shape[-1], w.shape[0]
    eligible = (
        1 <= rows <= MAX_ROWS  # the sums of all rows are in registers
        and bits in (4, 8)  # a word holds a whole number of weights
        and group_size in (32, 64, 128)  # a lane's values lie in one group
        and x.dtype in TYPES
        and scales.dtype == x.dtype  # MLX would promote; the kernel returns x's type
        and biases is not None  # affine
        and scales.size >= 8  # the weights are certainly in device memory
        and x.size >= 8
    )
    shape = f"{x.dtype} {bits} bit group {group_size} N {n} K {x.shape[-1]}"
    if eligible and choice.use(KERNEL, shape, lambda: trials(min(n, TRIAL_COLUMNS), x.shape[-1], group_size, bits, x.dtype)):
        return block_qmm_kernel(x, w, scales, biases, group_size, bits)
    return block_qmm_ops(x, w, scales, biases, group_size, bits)


def trials(
    n: int, k: int, group_size: int, bits: int, dtype: mx.Dtype, rows: tuple[int, ...] = (1, 4, 8, 16)
) -> list[choice.Trial]:
    """Comparisons with MLX on made-up values of the real shape, at several row counts."""
    keys = mx.random.split(mx.random.key(0), 2)
    first = mx.quantize(mx.random.normal((n, k), dtype=dtype, key=keys[0]), group_size=group_size, bits=bits)
    copies = min(16, 1 + TRIAL_BYTES // sum(a.nbytes for a in first))
    weights = [first, *([a + 0 for a in first] for _ in range(copies - 1))]
    x = mx.random.normal((max(rows), k), dtype=dtype, key=keys[1])
    mx.eval(weights, x)

    def calls(f, m: int):
        turn = itertools.cycle(weights)
        return lambda: [f(x[:m], *next(turn), group_size, bits)]

    same = choice.same_floats(TOLERANCE[dtype])
    return [choice.Trial(calls(block_qmm_kernel, m), calls(block_qmm_ops, m), same) for m in rows]
