"""Matrix units for kernel bodies: products of 16-bit tiles with float32 sums, the same names on Metal and CUDA.

    tile_multiply     sum[16 n, 8 m] += left[16 n, 16 k] . right[16 k, 8 m]        k in two halves of 8
    tile_multiply_8   sum[8 n, 8 m] += left[8 n, 8 k] . right[8 k, 8 m]          right as it lies: k = r, m = 2 t, 2 t + 1
    tile_over_rows    the sum of a number over the lanes of one t
    a lane            r = tile_row(lane), t = tile_pair(lane)
      left, of n = r and n = r + 8        k = 2 t, 2 t + 1 of each half: two 16-bit numbers in a uint, the first one low
      right                               is given as the left ones are, m = r and k = 2 t, 2 t + 1, through tile_right
      sum                                 n = r: m = 2 t, 2 t + 1;  n = r + 8: m = 2 t, 2 t + 1

A body never says which lane that is, nor how a right tile lies in registers: Metal (four products of 8 x 8) and CUDA (one
mma.sync of 16 x 8 x 16) differ in both. All helpers take values, so that no address space is named. An output depends on its own
row of left and its own column of right alone. Knows no kernel.
"""

METAL = """
#include <metal_simdgroup_matrix>

// Of two pairs: the first numbers of both, the second ones.
METAL_FUNC uint pair_firsts(uint a, uint b) { return (a & 0xffffu) | (b << 16); }
METAL_FUNC uint pair_seconds(uint a, uint b) { return (a >> 16) | (b & 0xffff0000u); }
METAL_FUNC uint bits_over(uint word, uint mask, uint below) { return (word & mask) | below; }

METAL_FUNC int tile_row(int lane) { return ((lane >> 4) & 1) * 4 + ((lane >> 1) & 3); }
METAL_FUNC int tile_pair(int lane) { return ((lane >> 3) & 1) * 2 + (lane & 1); }
METAL_FUNC uint tile_lane(int row, int pair) {
  return uint((row >> 2) * 16 + (pair >> 1) * 8 + (row & 3) * 2 + (pair & 1));
}

// From m = r, k = 2 t, 2 t + 1 to k = r, m = 2 t, 2 t + 1: the tile turned round, by two lanes' pairs.
METAL_FUNC uint tile_right(uint pair, int lane) {
  const int r = tile_row(lane), t = tile_pair(lane);
  const uint a = simd_shuffle(pair, tile_lane(2 * t, r / 2));
  const uint b = simd_shuffle(pair, tile_lane(2 * t + 1, r / 2));
  return r % 2 ? pair_seconds(a, b) : pair_firsts(a, b);
}

template <typename T>
METAL_FUNC simdgroup_matrix<T, 8, 8> tile_of(uint pair) {
  simdgroup_matrix<T, 8, 8> tile;
  reinterpret_cast<thread vec<T, 2>&>(tile.thread_elements()) = as_type<vec<T, 2>>(pair);
  return tile;
}

template <typename T>
METAL_FUNC vec<float, 2> tile_add(vec<float, 2> sum, uint left_0, uint left_1, uint right_0, uint right_1) {
  simdgroup_matrix<float, 8, 8> total;
  reinterpret_cast<thread vec<float, 2>&>(total.thread_elements()) = sum;
  simdgroup_matrix<T, 8, 8> a = tile_of<T>(left_0), b = tile_of<T>(right_0);
  simdgroup_multiply_accumulate(total, a, b, total);
  a = tile_of<T>(left_1);
  b = tile_of<T>(right_1);
  simdgroup_multiply_accumulate(total, a, b, total);
  return reinterpret_cast<thread vec<float, 2>&>(total.thread_elements());
}

// left: n = r in the first half of k, n = r + 8 in it, then both in the second half.
template <typename T>
METAL_FUNC vec<float, 4> tile_multiply(vec<float, 4> sum, uint a, uint b, uint c, uint d, uint right_0, uint right_1) {
  const vec<float, 2> low = tile_add<T>(vec<float, 2>(sum[0], sum[1]), a, c, right_0, right_1);
  const vec<float, 2> high = tile_add<T>(vec<float, 2>(sum[2], sum[3]), b, d, right_0, right_1);
  return vec<float, 4>(low[0], low[1], high[0], high[1]);
}

// left: n = r, k = 2 t, 2 t + 1; right: k = r, m = 2 t, 2 t + 1; sum: n = r, m = 2 t, 2 t + 1.
template <typename T>
METAL_FUNC vec<float, 2> tile_multiply_8(vec<float, 2> sum, uint left, uint right) {
  simdgroup_matrix<float, 8, 8> total;
  reinterpret_cast<thread vec<float, 2>&>(total.thread_elements()) = sum;
  simdgroup_matrix<T, 8, 8> a = tile_of<T>(left), b = tile_of<T>(right);
  simdgroup_multiply_accumulate(total, a, b, total);
  return reinterpret_cast<thread vec<float, 2>&>(total.thread_elements());
}

METAL_FUNC float tile_over_rows(float value) {
  value = value + simd_shuffle_xor(value, 2u);
  value = value + simd_shuffle_xor(value, 4u);
  return value + simd_shuffle_xor(value, 16u);
}

// Two of a number of the type, given as its bits, on the left: the sums over k of what is on the right, m = 2 t, 2 t + 1.
template <typename T>
METAL_FUNC vec<float, 2> tile_sums(vec<float, 2> sum, uint ones, uint right_0, uint right_1) {
  return tile_add<T>(sum, ones, ones, right_0, right_1);
}

template <typename T>
METAL_FUNC uint pair_less(uint pair, float by) {
  const vec<T, 2> two = as_type<vec<T, 2>>(pair);
  return as_type<uint>(vec<T, 2>(T(float(two[0]) - by), T(float(two[1]) - by)));
}
"""

CUDA = """
// Each of the three is one instruction, which the compiler does not find by itself.
METAL_FUNC uint pair_firsts(uint a, uint b) { return __byte_perm(a, b, 0x5410); }
METAL_FUNC uint pair_seconds(uint a, uint b) { return __byte_perm(a, b, 0x7632); }
METAL_FUNC uint bits_over(uint word, uint mask, uint below) {
  uint out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "r"(mask), "r"(below));
  return out;
}

METAL_FUNC int tile_row(int lane) { return lane / 4; }
METAL_FUNC int tile_pair(int lane) { return lane % 4; }
METAL_FUNC uint tile_right(uint pair, int) { return pair; }

template <typename T>
METAL_FUNC vec<float, 4> tile_multiply(vec<float, 4> sum, uint a, uint b, uint c, uint d, uint right_0, uint right_1) {
  if constexpr (cuda::std::is_same_v<T, half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum.at[0]), "+f"(sum.at[1]), "+f"(sum.at[2]), "+f"(sum.at[3])
        : "r"(a), "r"(b), "r"(c), "r"(d), "r"(right_0), "r"(right_1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum.at[0]), "+f"(sum.at[1]), "+f"(sum.at[2]), "+f"(sum.at[3])
        : "r"(a), "r"(b), "r"(c), "r"(d), "r"(right_0), "r"(right_1));
  }
  return sum;
}

// The right tile turned round is what the instruction takes; half of its 16 rows of the left stay empty: a text for Metal.
template <typename T>
METAL_FUNC vec<float, 2> tile_multiply_8(vec<float, 2> sum, uint left, uint right) {
  uint turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(right));
  float empty_0 = 0.0f, empty_1 = 0.0f;
  if constexpr (cuda::std::is_same_v<T, half>) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sum.at[0]), "+f"(sum.at[1]), "+f"(empty_0), "+f"(empty_1) : "r"(left), "r"(0), "r"(turned));
  } else {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sum.at[0]), "+f"(sum.at[1]), "+f"(empty_0), "+f"(empty_1) : "r"(left), "r"(0), "r"(turned));
  }
  return sum;
}

METAL_FUNC float tile_over_rows(float value) {
  value = value + simd_shuffle_xor(value, 4u);
  value = value + simd_shuffle_xor(value, 8u);
  return value + simd_shuffle_xor(value, 16u);
}

template <typename T>
METAL_FUNC vec<float, 2> tile_sums(vec<float, 2> sum, uint ones, uint right_0, uint right_1) {
  vec<float, 4> all = {sum[0], sum[1], sum[0], sum[1]};
  all = tile_multiply<T>(all, ones, ones, ones, ones, right_0, right_1);
  return {all[0], all[1]};
}

template <typename T>
METAL_FUNC uint pair_less(uint pair, float by) {
  if constexpr (cuda::std::is_same_v<T, half>) {
    return as_type<uint>(__hsub2(as_type<__half2>(pair), __float2half2_rn(by)));
  } else {
    return as_type<uint>(__hsub2(as_type<__nv_bfloat162>(pair), __float2bfloat162_rn(by)));
  }
}
"""
