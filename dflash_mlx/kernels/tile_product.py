"""A product of a few rows in matrix units, with what may come before and after it in one text. tiles.py has the units.

    y = x[M, K] W[N, K]^T                 W affine in 4 or 8 bit, or of x's type
    NORM       x = rms(x) * weight        each threadgroup norms all rows: they are few
    RESIDUAL   y = residual + y
    GATED      y = silu(gate) * up        W = [gate; up], N / 2 columns come out
    HEADS      x as attention gives it    [K / D, M, D], head by head; not with NORM

    a threadgroup takes 16 to 64 columns; its simd groups share out the groups of K and add up at the end
    a lane's part of a group      4 bit, group 64: values 16 t .. 16 t + 15 of column r: two words, whose bits, masked and
                                  counted from their middle, are the 16-bit pairs that the units take; x in the same order

Rows are 8 or 16, those beyond M the last one again; an output depends on its own row and column alone. What stands around rounds
where the operations by themselves would: a normed x, a product and a gate are of x's type. Knows arrays only.
"""

from __future__ import annotations

import functools

from . import tiles
from .launch import Kernel

HELPERS = """
// Two numbers of a row, normed: each rounds to the type where MLX's operation does.
template <typename T>
METAL_FUNC uint pair_normed(uint pair, float by, uint weights) {
  const vec<T, 2> w = as_type<vec<T, 2>>(weights);
  vec<T, 2> y = as_type<vec<T, 2>>(pair);
  y[0] = T(float(w[0]) * float(T(float(y[0]) * by)));
  y[1] = T(float(w[1]) * float(T(float(y[1]) * by)));
  return as_type<uint>(y);
}
template <typename T>
METAL_FUNC float pair_squares(float sum, uint pair) {
  const vec<T, 2> x = as_type<vec<T, 2>>(pair);
  return metal::fma(float(x[1]), float(x[1]), metal::fma(float(x[0]), float(x[0]), sum));
}
"""

# A group's integers, less the middle of their range, are exact in 16 bits: the matrix units multiply them with x, and scale and
# bias are put on afterwards, in float32, the bias through the sum of x. Weights of x's type are multiplied as they are.
# Of both texts: the inverse root of each row's mean of squares, and the sum of the parts of K that simd groups have.
INVERSES = """        for (int m = part; m < M; m += SIMDGROUPS) {
            float squares = 0.0f;
            for (int k = 8 * lane; k < K; k += 8 * 32) {
                const vec<uint, 4> four = ((const device vec<uint, 4>*)(x + size_t(m) * K + k))[0];
                #pragma unroll
                for (int e = 0; e < 4; ++e) squares = pair_squares<T>(squares, four[e]);
            }
            squares = simd_sum(squares);
            if (lane == 0) inverse[m] = metal::rsqrt(squares / float(K) + as_type<float>(EPS));
        }
        threadgroup_barrier(metal::mem_flags::mem_threadgroup);
"""

ADD_UP = """    // Parts of K, by halves: the upper half of the simd groups gives to the lower.
    for (int half_of = SIMDGROUPS / 2; half_of > 0; half_of /= 2) {
        if (part >= half_of && part < 2 * half_of) {
            #pragma unroll
            for (int e = 0; e < HELD; ++e) others[((part - half_of) * HELD + e) * 32 + lane] = sum[e];
        }
        threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        if (part < half_of) {
            #pragma unroll
            for (int e = 0; e < HELD; ++e) sum[e] = sum[e] + others[(part * HELD + e) * 32 + lane];
        }
        threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
"""

_SOURCE = (
    """
    constexpr int OWN = GROUP / 4;               // values of a group that a lane has, of one column of W or row of x
    constexpr int WORDS = OWN * BITS / 32;
    constexpr int VECTOR = WORDS < 4 ? 2 : 4;
    constexpr int PAIRS = 16 / BITS;             // of a word
    constexpr int STEPS = OWN / 4;               // products of tiles in a group
    constexpr int ROW_TILES = ROWS / 8, TILES = COLS / 16;
    constexpr uint MASK = BITS < 16 ? (1u << (BITS % 16)) - 1u : 0xffffu;
    constexpr float CENTRE = BITS == 4 ? 8.0f : 128.0f;
    const int M = x_shape[x_ndim - 2], D = x_shape[x_ndim - 1], K = HEADS ? x_shape[x_ndim - 3] * D : D, N = w_shape[0];
    const int lane = int(thread_index_in_simdgroup), part = int(simdgroup_index_in_threadgroup);
    const int groups = K / GROUP;
    const int r = tile_row(lane), t = tile_pair(lane);

    // Columns of y; those of a threadgroup: gated ones come from two columns of W, in the two halves of a tile.
    const int columns = GATED ? N / 2 : N, half_way = GATED ? columns : 8, step = GATED ? 8 : 16;
    const int first = int(threadgroup_position_in_grid.x) * TILES * step;

    constexpr int HELD = TILES * ROW_TILES * 4;  // sums of a lane
    threadgroup float others[SIMDGROUPS / 2 * HELD * 32];
    threadgroup float inverse[ROWS];

    float sum[HELD];
    #pragma unroll
    for (int e = 0; e < HELD; ++e) sum[e] = 0.0f;

    // Where a column's groups and a row begin. Those beyond the last one repeat it; their sums are not stored.
    int begin[TILES][2], row[ROW_TILES];
    #pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) row[m] = (8 * m + r < M ? 8 * m + r : M - 1) * D;
    #pragma unroll
    for (int i = 0; i < TILES; ++i) {
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int c = step * i + r + h * half_way;
            begin[i][h] = (first + c < N ? first + c : N - 1) * groups;
        }
    }

    float by[ROW_TILES];
    if (NORM) {
"""
    + INVERSES
    + """        #pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) by[m] = inverse[row[m] / K];
    }

    // The next group's words are on their way while this group's are multiplied.
    uint packed[TILES][2][WORDS], ahead[TILES][2][WORDS];
    for (int g = part - SIMDGROUPS; g < groups; g += SIMDGROUPS) {
        const int next = g + SIMDGROUPS;
        if (next < groups) {
            #pragma unroll
            for (int i = 0; i < TILES; ++i) {
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const size_t at = size_t((begin[i][h] + next) * 4 + t) * WORDS;
                    if (WORDS == 1) {
                        ahead[i][h][0] = ((const device uint*)w)[at];
                    } else {
                        #pragma unroll
                        for (int j = 0; j < WORDS / VECTOR; ++j) {
                            const vec<uint, VECTOR> some = ((const device vec<uint, VECTOR>*)((const device uint*)w + at))[j];
                            #pragma unroll
                            for (int e = 0; e < VECTOR; ++e) ahead[i][h][VECTOR * j + e] = some[e];
                        }
                    }
                }
            }
        }
        if (g >= 0) {
            uint right[ROW_TILES][2 * STEPS];
            vec<float, 2> total[ROW_TILES];
            #pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) {
                uint own[OWN / 2];
                #pragma unroll
                for (int j = 0; j < OWN / 8; ++j) {
                    const int k = g * GROUP + t * OWN, other_heads = HEADS ? (k + 8 * j) / D * (M - 1) * D : 0;
                    const vec<uint, 4> four = ((const device vec<uint, 4>*)(x + size_t(row[m] + other_heads + k)))[j];
                    #pragma unroll
                    for (int e = 0; e < 4; ++e) own[4 * j + e] = four[e];
                    if (NORM) {
                        const vec<uint, 4> scaled = ((const device vec<uint, 4>*)(weight + k))[j];
                        #pragma unroll
                        for (int e = 0; e < 4; ++e) own[4 * j + e] = pair_normed<T>(own[4 * j + e], by[m], scaled[e]);
                    }
                }
                // In the order in which a word gives its pairs: 0 and 4, 1 and 5, 2 and 6, 3 and 7; in 8 bit 0 and 2, 1 and 3.
                #pragma unroll
                for (int p = 0; p < 2 * STEPS; ++p) {
                    if (BITS == 16) {
                        right[m][p] = tile_right(own[p], lane);
                    } else {
                        const int at = p / PAIRS * PAIRS + p % PAIRS / 2;
                        const uint a = own[at], b = own[at + PAIRS / 2];
                        right[m][p] = tile_right(p % 2 ? pair_seconds(a, b) : pair_firsts(a, b), lane);
                    }
                }
                total[m][0] = 0.0f;
                total[m][1] = 0.0f;
                #pragma unroll
                for (int s = 0; s < STEPS; ++s) {
                    if (BITS < 16) {
                        total[m] = tile_sums<T>(total[m], HALF ? 0x3c003c00u : 0x3f803f80u, right[m][2 * s], right[m][2 * s + 1]);
                    }
                }
            }
            #pragma unroll
            for (int i = 0; i < TILES; ++i) {
                uint left[2][2 * STEPS];
                float scale[2], bias[2];
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    if (BITS < 16) {
                        scale[h] = float(scales[begin[i][h] + g]);
                        bias[h] = metal::fma(CENTRE, scale[h], float(biases[begin[i][h] + g]));
                    }
                    #pragma unroll
                    for (int p = 0; p < 2 * STEPS; ++p) {
                        const uint word = packed[i][h][p / PAIRS] >> (p % PAIRS * BITS);
                        if (BITS == 16) {
                            left[h][p] = word;
                        } else if (HALF) {
                            // In the last bits of 1024.
                            left[h][p] = pair_less<T>(bits_over(word, MASK * 0x10001u, 0x64006400u), 1024.0f + CENTRE);
                        } else if (BITS == 4) {
                            // In the last bits of 128.
                            left[h][p] = pair_less<T>(bits_over(word, MASK * 0x10001u, 0x43004300u), 128.0f + CENTRE);
                        } else {
                            // bfloat has no room for 8 bits: in the last bits of 2^23, whose difference has at most 8.
                            const float a = as_type<float>(bits_over(word, MASK, 0x4b000000u)) - (8388608.0f + CENTRE);
                            const float b = as_type<float>(bits_over(word >> 16, MASK, 0x4b000000u)) - (8388608.0f + CENTRE);
                            left[h][p] = pair_seconds(as_type<uint>(a), as_type<uint>(b));
                        }
                    }
                }
                #pragma unroll
                for (int m = 0; m < ROW_TILES; ++m) {
                    vec<float, 4> product;
                    #pragma unroll
                    for (int e = 0; e < 4; ++e) product[e] = 0.0f;
                    #pragma unroll
                    for (int s = 0; s < STEPS; ++s) {
                        product = tile_multiply<T>(product, left[0][2 * s], left[1][2 * s], left[0][2 * s + 1],
                                                   left[1][2 * s + 1], right[m][2 * s], right[m][2 * s + 1]);
                    }
                    #pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int at = (i * ROW_TILES + m) * 4 + e;
                        if (BITS == 16) {
                            sum[at] = sum[at] + product[e];
                        } else {
                            sum[at] = metal::fma(scale[e / 2], product[e], sum[at]);
                            sum[at] = metal::fma(bias[e / 2], total[m][e % 2], sum[at]);
                        }
                    }
                }
            }
        }
        #pragma unroll
        for (int i = 0; i < TILES; ++i) {
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                #pragma unroll
                for (int j = 0; j < WORDS; ++j) packed[i][h][j] = ahead[i][h][j];
            }
        }
    }

"""
    + ADD_UP
    + """    if (part == 0) {
        #pragma unroll
        for (int e = 0; e < HELD; ++e) {
            const int i = e / 4 / ROW_TILES, m = e / 4 % ROW_TILES, h = e % 4 / 2;
            const int n = first + step * i + r + (GATED ? 0 : h * 8), to = 8 * m + 2 * t + e % 2;
            if (n < columns && to < M && (!GATED || h == 0)) {
                float value = float(T(sum[e]));
                if (GATED) {
                    const float up = float(T(sum[e + (GATED ? 2 : 0)]));
                    value = float(T(float(T(value * float(T(1.0f / (1.0f + metal::exp(-value)))))) * up));
                }
                if (RESIDUAL) value = float(residual[size_t(to) * columns + n]) + value;
                y[size_t(to) * columns + n] = T(value);
            }
        }
    }
"""
)

# What a form is not given is called by another name, and nothing is read through it.
_ABSENT = "    const auto {} = x;\n"


@functools.lru_cache(maxsize=64)
def tile_product(
    name: str, quantized: bool, norm: bool = False, residual: bool = False, gated: bool = False, heads: bool = False
) -> Kernel:
    """The kernel of one form. Inputs: x, w; scales and biases if quantized; weight of a norm; residual.

    The template of a norm's form has EPS, the bits of its eps: a number of the host's would have to be fetched.
    """
    return kernel_of(name, _SOURCE, tiles.METAL + HELPERS, tiles.CUDA + HELPERS, "", quantized, norm, residual, gated, heads)


def kernel_of(
    name: str,
    source: str,
    header: str,
    cuda_header: str,
    form: str,
    quantized: bool,
    norm: bool,
    residual: bool,
    gated: bool,
    heads: bool,
) -> Kernel:
    """The source of a product, with or without a norm before it and a sum or gate after it. form: added to MLX's name of it."""
    given = {"scales": quantized, "biases": quantized, "weight": norm, "residual": residual}
    forms = {"NORM": norm, "RESIDUAL": residual, "GATED": gated, "HEADS": heads}
    said = "".join(f"    constexpr bool {form} = {str(value).lower()};\n" for form, value in forms.items())
    said += "" if norm else "    constexpr int EPS = 0;\n"
    absent = "".join(_ABSENT.format(other) for other, there in given.items() if not there)
    return Kernel(
        name,
        inputs=("x", "w", *(other for other, there in given.items() if there)),
        outputs=("y",),
        source=f"\n{said}{absent}{source}",
        header=header,
        cuda_header=cuda_header,
        form=form + "".join(f"_{form.lower()}" for form, value in {"DENSE": not quantized, **forms}.items() if value),
    )
