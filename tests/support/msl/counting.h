// The emulator with counted numbers: `float` and `uint` of a text become classes that count what is done with them.
//
// Counted: operations on floats and words, by kind. Not counted: signs, comparisons' branches, integers (`int`, `size_t`: addresses and
// loop counters), what is known when a text is compiled. emulator.counting() reads the sums over all threads.
#pragma once
#include <cstdint>

namespace msl {
struct Counts {
  uint64_t alu, fma, half_to_float, bfloat_to_float, to_small, shuffle, load, matrix;
};
inline Counts counts{};
}  // namespace msl

#define MSL_COUNTED(kind) ++msl::counts.kind
struct cfloat;
#include "msl.h"

template <typename A> constexpr bool is_number = std::is_arithmetic<A>::value;

struct cuint {
  uint32_t v;
  cuint() = default;
  template <typename A, typename = std::enable_if_t<is_number<A>>> constexpr cuint(A a) : v(uint32_t(a)) {}
  template <typename Space, typename T> cuint(msl::Ref<Space, T> r) : v(cuint(typename msl::Ref<Space, T>::Value(r)).v) {}
  constexpr operator uint32_t() const { return v; }
};
#define MSL_WORDS(op)                                                                                            \
  inline cuint operator op(cuint a, cuint b) { return MSL_COUNTED(alu), cuint(a.v op b.v); }                       \
  template <typename A, typename = std::enable_if_t<is_number<A>>>                                               \
  cuint operator op(cuint a, A b) { return MSL_COUNTED(alu), cuint(a.v op uint32_t(b)); }                          \
  template <typename A, typename = std::enable_if_t<is_number<A>>>                                               \
  cuint operator op(A a, cuint b) { return MSL_COUNTED(alu), cuint(uint32_t(a) op b.v); }
MSL_WORDS(<<) MSL_WORDS(>>) MSL_WORDS(&) MSL_WORDS(|) MSL_WORDS(+) MSL_WORDS(-)

inline void count_widened(half) { MSL_COUNTED(half_to_float); }
inline void count_widened(bfloat) { MSL_COUNTED(bfloat_to_float); }
template <typename A> void count_widened(A) {}

struct cfloat {
  float v;
  cfloat() = default;
  template <typename A, typename = std::enable_if_t<is_number<A>>> constexpr cfloat(A a) : v(float(a)) {}
  cfloat(cuint a) : v(float(a.v)) { MSL_COUNTED(alu); }
  template <typename Code> explicit cfloat(msl::Small<Code> a) : v(float(a)) { count_widened(a); }
  template <typename Space, typename T> cfloat(msl::Ref<Space, T> r) : v(cfloat(typename msl::Ref<Space, T>::Value(r)).v) {}
  explicit operator float() const { return v; }
};
template <> template <> inline half::Small(cfloat a) : code(msl::HalfCode::encode(a.v)) { MSL_COUNTED(to_small); }
template <> template <> inline bfloat::Small(cfloat a) : code(msl::BfloatCode::encode(a.v)) { MSL_COUNTED(to_small); }
#define MSL_FLOATS(op) \
  inline cfloat operator op(cfloat a, cfloat b) { return MSL_COUNTED(alu), cfloat(a.v op b.v); }
MSL_FLOATS(+) MSL_FLOATS(-) MSL_FLOATS(*) MSL_FLOATS(/)
inline cfloat operator-(cfloat a) { return cfloat(-a.v); }
inline bool operator<(cfloat a, cfloat b) { return MSL_COUNTED(alu), a.v < b.v; }
inline bool operator>(cfloat a, cfloat b) { return b < a; }
inline bool operator==(cfloat a, cfloat b) { return a.v == b.v; }
inline bool operator!=(cfloat a, cfloat b) { return a.v != b.v; }

namespace metal {
inline cfloat fma(cfloat a, cfloat b, cfloat c) { return MSL_COUNTED(fma), cfloat(fma(a.v, b.v, c.v)); }
inline cfloat exp(cfloat a) { return MSL_COUNTED(alu), cfloat(exp(a.v)); }
inline cfloat rsqrt(cfloat a) { return MSL_COUNTED(alu), cfloat(rsqrt(a.v)); }
}  // namespace metal

extern "C" void msl_counts(uint64_t* out) {
  std::memcpy(out, &msl::counts, sizeof(msl::counts));
  msl::counts = msl::Counts{};
}
