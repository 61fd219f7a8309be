"""Quantized values as 16-bit floats by bits alone, for kernel bodies: no conversion and no subtraction a value.

    word_pair<BITS>   of a word's values, number p and number p + 16 / BITS, as two halves in a uint, each `word_base` too large:
                      4 bit: 64 + q, q in bits 4 to 7 of a half; 8 bit: 256 + q, q in bits 2 to 9

What is too large is taken off where the bias is put on: fma(64 + q, scale, bias - 64 scale). Knows no kernel.
"""

HEADER = """
// What a value of `word_pair` is too large by.
template <int BITS>
METAL_FUNC float word_base() { return BITS == 4 ? 64.0f : 256.0f; }

template <int BITS>
METAL_FUNC uint word_pair(uint word, int p) {
  if (BITS == 4) {
    const uint at = p < 1 ? word << 4 : p > 1 ? word >> (4 * p - 4) : word;
    return (at & 0x00f000f0u) | 0x54005400u;
  }
  const uint at = p < 1 ? word << 2 : word >> 6;
  return (at & 0x03fc03fcu) | 0x5c005c00u;
}
"""
