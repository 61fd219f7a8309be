"""A product of a few rows in matrix units of 8 x 8, which is what Metal has: as tile_product.py, at fewer instructions a weight.

    y[8 n, 8 m] += W[8 n, 8 k] x[8 m, 8 k]^T     once for 8 rows, twice for 16; what may stand around it, as in tile_product.py

    which k a tile takes        a lane's word of a column gives its values in pairs p: numbers p and p + 16 / BITS
                                (tile of word j and pair p: k = word, half a word further for the lane's other number)
      left, W, lane (r, t)      word t of column r, whole: unpacked by a mask and an or for two values, each the same number
                                too large, which the group's bias takes off again
      right, x, lane (r, t)     rows 2 t, 2 t + 1 from half r % 2 of word r / 2 on: one load for all pairs of a word, no shuffle
    a group                     scale and bias on the tile's sum in float32; x is summed by the lanes that hold it

A threadgroup takes COLS columns; its simd groups share out the groups of K and add up at the end. Rows beyond M are the last one
again; an output depends on its own row and column alone, so rows have the bits that one has alone. Knows arrays only.

Instructions a weight, counted by the emulator: docs/kernels.md.
"""

from __future__ import annotations

import functools

from . import tile_product, tiles
from .launch import Kernel

_HELPERS = """
// What a value of `tile_left` is too large by.
template <typename T, int BITS>
METAL_FUNC float tile_base(bool half_type) { return BITS == 4 ? (half_type ? 64.0f : 128.0f) : half_type ? 1024.0f : -128.0f; }

// Pair p of a word in the type: values p and p + 16 / BITS.
template <typename T, int BITS>
METAL_FUNC uint tile_left(uint word, int p, bool half_type) {
  if (BITS == 16) return word;
  if (BITS == 4) {
    if (half_type) {
      // In bits 4 to 7, whose last is worth 1 beside 64.
      const uint at = p < 1 ? word << 4 : p > 1 ? word >> (4 * p - 4) : word;
      return (at & 0x00f000f0u) | 0x54005400u;
    }
    // In the last bits of 128.
    const uint at = p < 1 ? word : word >> (4 * p);
    return (at & 0x000f000fu) | 0x43004300u;
  }
  const uint at = p < 1 ? word : word >> 8;
  if (half_type) return (at & 0x00ff00ffu) | 0x64006400u;
  // bfloat has no room for 8 bits and a base: in the last bits of 2^23, whose difference has at most 8.
  const float a = as_type<float>((at & 0xffu) | 0x4b000000u) - 8388736.0f;
  const float b = as_type<float>(((at >> 16) & 0xffu) | 0x4b000000u) - 8388736.0f;
  return pair_seconds(as_type<uint>(a), as_type<uint>(b));
}
"""

_SOURCE = (
    """
    constexpr int PER = 32 / BITS, PAIRS = 16 / BITS;     // values and pairs of a word
    constexpr int WORDS = GROUP / 4 / PER;                // of a group, that a lane has of one column
    constexpr int VECTOR = WORDS < 4 ? 2 : 4;
    constexpr int HALVES = PAIRS < 4 ? 1 : 2;             // uints of a row's values for one word
    constexpr int ROW_TILES = ROWS / 8, TILES = COLS / 8;
    const int M = x_shape[x_ndim - 2], D = x_shape[x_ndim - 1], K = HEADS ? x_shape[x_ndim - 3] * D : D, N = w_shape[0];
    const int lane = int(thread_index_in_simdgroup), part = int(simdgroup_index_in_threadgroup);
    const int groups = K / GROUP;
    const int r = tile_row(lane), t = tile_pair(lane);

    // Columns of y; those of a threadgroup: a gated one comes from two columns of W, in neighbouring tiles.
    const int columns = GATED ? N / 2 : N;
    const int first = int(threadgroup_position_in_grid.x) * (GATED ? COLS / 2 : COLS);

    constexpr int HELD = TILES * ROW_TILES * 2;           // sums of a lane
    threadgroup float others[SIMDGROUPS / 2 * HELD * 32];
    threadgroup float inverse[ROWS];

    float sum[HELD];
    #pragma unroll
    for (int e = 0; e < HELD; ++e) sum[e] = 0.0f;

    // Where a column's groups and a row begin. Those beyond the last one repeat it; their sums are not stored.
    int begin[TILES], row[ROW_TILES][2];
    #pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int c = 8 * m + 2 * t + e;
            row[m][e] = (c < M ? c : M - 1) * D;
        }
    }
    #pragma unroll
    for (int i = 0; i < TILES; ++i) {
        const int c = GATED ? i / 2 * 8 + r + i % 2 * columns : i * 8 + r;
        begin[i] = (first + c < N ? first + c : N - 1) * groups;
    }

    float by[ROW_TILES][2];
    if (NORM) {
"""
    + tile_product.INVERSES
    + """        #pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            #pragma unroll
            for (int e = 0; e < 2; ++e) by[m][e] = inverse[row[m][e] / K];
        }
    }

    for (int g = part; g < groups; g += SIMDGROUPS) {
        uint packed[TILES][WORDS];
        float scale[TILES], bias[TILES];
        #pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const size_t at = size_t((begin[i] + g) * 4 + t) * WORDS;
            if (WORDS == 1) {
                packed[i][0] = ((const device uint*)w)[at];
            } else {
                #pragma unroll
                for (int j = 0; j < WORDS / VECTOR; ++j) {
                    const vec<uint, VECTOR> some = ((const device vec<uint, VECTOR>*)((const device uint*)w + at))[j];
                    #pragma unroll
                    for (int e = 0; e < VECTOR; ++e) packed[i][VECTOR * j + e] = some[e];
                }
            }
            if (BITS < 16) {
                scale[i] = float(scales[begin[i] + g]);
                bias[i] = metal::fma(-tile_base<T, BITS>(HALF), scale[i], float(biases[begin[i] + g]));
            }
        }
        uint right[ROW_TILES][WORDS * PAIRS];
        vec<float, 2> total[ROW_TILES];
        #pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            total[m][0] = 0.0f;
            total[m][1] = 0.0f;
            #pragma unroll
            for (int j = 0; j < WORDS; ++j) {
                const int k = g * GROUP + PER * (r / 2 * WORDS + j) + PAIRS * (r % 2), at = HEADS ? k + k / D * (M - 1) * D : k;
                uint own[2][HALVES];
                #pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (PAIRS == 4) {
                        const vec<uint, 2> some = ((const device vec<uint, 2>*)(x + size_t(row[m][e] + at)))[0];
                        own[e][0] = some[0];
                        own[e][HALVES - 1] = some[1];
                    } else if (PAIRS == 2) {
                        own[e][0] = ((const device uint*)(x + size_t(row[m][e] + at)))[0];
                    } else {
                        own[e][0] = uint(((const device ushort*)(x + size_t(row[m][e] + at)))[0]);
                    }
                    if (NORM) {
                        #pragma unroll
                        for (int q = 0; q < HALVES; ++q) {
                            uint scaled;
                            if (PAIRS > 1) {
                                scaled = ((const device uint*)(weight + k))[q];
                            } else {
                                scaled = uint(((const device ushort*)(weight + k))[0]);
                            }
                            own[e][q] = pair_normed<T>(own[e][q], by[m][e], scaled);
                        }
                    }
                }
                #pragma unroll
                for (int p = 0; p < PAIRS; ++p) {
                    const uint a = own[0][p / 2], b = own[1][p / 2];
                    const uint both = p % 2 ? pair_seconds(a, b) : pair_firsts(a, b);
                    right[m][j * PAIRS + p] = both;
                    if (BITS < 16) {
                        const vec<T, 2> two = as_type<vec<T, 2>>(both);
                        total[m][0] = total[m][0] + float(two[0]);
                        total[m][1] = total[m][1] + float(two[1]);
                    }
                }
            }
            if (BITS < 16) {
                total[m][0] = tile_over_rows(total[m][0]);
                total[m][1] = tile_over_rows(total[m][1]);
            }
        }
        #pragma unroll
        for (int i = 0; i < TILES; ++i) {
            uint left[WORDS * PAIRS];
            #pragma unroll
            for (int s = 0; s < WORDS * PAIRS; ++s) left[s] = tile_left<T, BITS>(packed[i][s / PAIRS], s % PAIRS, HALF);
            #pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) {
                const int at = (i * ROW_TILES + m) * 2;
                vec<float, 2> product;
                #pragma unroll
                for (int e = 0; e < 2; ++e) product[e] = BITS < 16 ? 0.0f : sum[at + e];
                #pragma unroll
                for (int s = 0; s < WORDS * PAIRS; ++s) product = tile_multiply_8<T>(product, left[s], right[m][s]);
                #pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (BITS == 16) {
                        sum[at + e] = product[e];
                    } else {
                        sum[at + e] = metal::fma(scale[i], product[e], metal::fma(bias[i], total[m][e], sum[at + e]));
                    }
                }
            }
        }
    }

"""
    + tile_product.ADD_UP
    + """    if (part == 0) {
        #pragma unroll
        for (int e = 0; e < HELD; ++e) {
            const int i = e / 2 / ROW_TILES, m = e / 2 % ROW_TILES, h = i % 2;
            const int n = first + r + (GATED ? i / 2 : i) * 8, to = 8 * m + 2 * t + e % 2;
            if (n < columns && to < M && (!GATED || h == 0)) {
                float value = float(T(sum[e]));
                if (GATED) {
                    const float up = float(T(sum[e + (GATED ? 2 * ROW_TILES : 0)]));
                    value = float(T(float(T(value * float(T(1.0f / (1.0f + metal::exp(-value)))))) * up));
                }
                if (RESIDUAL) value = float(residual[size_t(to) * columns + n]) + value;
                y[size_t(to) * columns + n] = T(value);
            }
        }
    }
"""
)


@functools.lru_cache(maxsize=64)
def row_tiles(
    name: str, quantized: bool, norm: bool = False, residual: bool = False, gated: bool = False, heads: bool = False
) -> Kernel:
    """The kernel of one form, as `tile_product` of the same arguments: another text of the same name."""
    helpers = tile_product.HELPERS + _HELPERS
    return tile_product.kernel_of(
        name, _SOURCE, tiles.METAL + helpers, tiles.CUDA + helpers, "_EIGHTS", quantized, norm, residual, gated, heads
    )
