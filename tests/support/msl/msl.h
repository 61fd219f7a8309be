// A small Metal Shading Language for the CPU: enough to run the bodies in dflash_mlx/kernels and to find their faults.
//
// A threadgroup's threads are fibres on one OS thread. Each runs until it meets a simd function or a barrier; the scheduler
// lets it go on when the others have met the same one on the same line. Device, constant and threadgroup pointers are
// distinct classes that do not convert; every access is checked for bounds, alignment, initialisation and races.
//
// emulator.py rewrites `device float* p` to `msl::Ptr<msl::Device, float> p` line by line; the rest of a text is plain C++.
#pragma once
#ifdef __APPLE__
#define _XOPEN_SOURCE 700
#define _DARWIN_C_SOURCE
#endif
#include <csetjmp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>
#include <ucontext.h>

// What counting.h counts.
#ifndef MSL_COUNTED
#define MSL_COUNTED(kind) ((void)0)
struct cfloat;
#endif

namespace msl {

// ------------------------------------------------------------------------------------------------ number types

inline uint32_t bits_of(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }
inline float float_of(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }

struct HalfCode {
  static float decode(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
    if (exponent == 31) return float_of(sign | 0x7f800000 | (fraction << 13));
    if (exponent == 0) return float_of(sign | bits_of(float(fraction) * 5.9604644775390625e-8f));  // fraction * 2^-24
    return float_of(sign | ((exponent + 112) << 23) | (fraction << 13));
  }
  static uint16_t encode(float f) {
    uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;                        // 65520 and above round to infinity
    if (magnitude < 0x38800000) {                                             // below 2^-14: a multiple of 2^-24
      return sign | uint16_t(__builtin_nearbyintf(float_of(magnitude) * 16777216.0f));
    }
    uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    return sign | uint16_t((rounded - 0x38000000) >> 13);
  }
};

struct BfloatCode {
  static float decode(uint16_t h) { return float_of(uint32_t(h) << 16); }
  static uint16_t encode(float f) {
    uint32_t u = bits_of(f);
    if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16) | 0x40;
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
};

template <typename Space, typename T> struct Ref;

// Arithmetic between two rounds to the type; with a float it widens. Narrowing needs a cast, as bfloat does on a Mac.
template <typename Code>
struct Small {
  uint16_t code;
  Small() = default;
  template <typename A, typename = std::enable_if_t<std::is_arithmetic<A>::value>>
  explicit Small(A a) : code(Code::encode(float(a))) {}
  template <typename Other, typename = std::enable_if_t<!std::is_same<Other, Code>::value>>
  explicit Small(Small<Other> o) : code(Code::encode(float(o))) {}
  template <typename A, typename = std::enable_if_t<std::is_same<A, cfloat>::value>, typename = void>
  explicit Small(A a);
  template <typename Space, typename T>
  explicit Small(Ref<Space, T> r) : code(Small(r.p.load(r.line)).code) {}
  operator float() const { return Code::decode(code); }
  friend Small operator+(Small a, Small b) { return Small(float(a) + float(b)); }
  friend Small operator-(Small a, Small b) { return Small(float(a) - float(b)); }
  friend Small operator*(Small a, Small b) { return Small(float(a) * float(b)); }
  friend Small operator/(Small a, Small b) { return Small(float(a) / float(b)); }
  friend Small operator-(Small a) { Small r = a; r.code ^= 0x8000; return r; }
};
using half = Small<HalfCode>;
using bfloat = Small<BfloatCode>;

template <typename T, int N> struct vec;
template <typename T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  explicit vec(T a) : x(a), y(a) {}
  vec(T a, T b) : x(a), y(b) {}
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};
template <typename T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  vec(T a, T b, T c) : x(a), y(b), z(c) {}
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};
template <typename T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  explicit vec(T a) : x(a), y(a), z(a), w(a) {}
  vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};

// ------------------------------------------------------------------------------------------------ faults and fibres

constexpr int kSimd = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kThreadgroupBytes = 32 * 1024;
constexpr uint64_t kMaxMeetings = 100000000;
constexpr size_t kStack = 128 * 1024;

enum class Wait : uint8_t { None, Simd, SimdBarrier, Barrier, Done };

// Who touched a word last. Times count the barriers passed, so equal times mean "no barrier between".
struct Touch {
  int32_t group = -1, simd = -1, thread = -1;  // simd -2: several simd groups; thread -2: several threads of one
  uint32_t time = 0, simd_time = 0;
};
struct Shadow {
  Touch write, read;
};

struct Region {
  char* base = nullptr;
  size_t bytes = 0;
  std::vector<Shadow> shadow;                // one per `unit` bytes; empty for inputs
  std::vector<uint8_t> written;              // one per byte
  int unit = 1;
  int begins = 0;                            // bytes, modulo the largest vector's, from its GPU buffer's beginning
  size_t aligned = 16;                       // what is known of the address of its beginning, whatever it is here
  const char* name = "";
};

struct Fibre {
  ucontext_t start;
  jmp_buf at;
  bool started = false;
  Wait wait = Wait::None;
  int line = 0, op = 0, flags = 0;
  uint64_t slot[2] = {0, 0};                  // values brought to simd functions, in turn
  int turn = 0;
};

struct State {
  Fibre* fibre = nullptr;                     // all of the threadgroup
  int current = 0, threads = 0, group = 0;    // thread index in its threadgroup, threads in it, threadgroup number
  jmp_buf scheduler;
  uint32_t time_threadgroup = 1, time_device = 1;
  uint32_t simd_time[kMaxThreads / kSimd];
  int line = 0;
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;
  char* message = nullptr;
  size_t message_bytes = 0;
  bool failed = false;
  uint64_t meetings = 0;                      // of this launch: a loop that never ends meets for ever
  uint32_t position[3][3];                    // thread in grid, thread in threadgroup, threadgroup in grid
  uint32_t grid[3], group_size[3], groups[3];
  std::vector<Region> shared;                 // by declaration number
  size_t shared_bytes = 0;
};
inline State g;

[[noreturn]] inline void leave(int how) { _longjmp(g.scheduler, how); }

[[noreturn]] inline void fault(int line, const char* format, ...) {
  if (!g.failed) {
    g.failed = true;
    int n = std::snprintf(g.message, g.message_bytes, "line %d: ", line);
    va_list list;
    va_start(list, format);
    n += std::vsnprintf(g.message + n, g.message_bytes - n, format, list);
    va_end(list);
    std::snprintf(g.message + n, g.message_bytes - n, " (threadgroup %d, thread %d)", g.group, g.current);
  }
  leave(2);
}

// Where in the text an expression stands: an argument of this type takes the caller's line.
struct Index {
  int64_t i;
  int line;
  template <typename I, typename = std::enable_if_t<std::is_integral<I>::value>>
  Index(I value, int l = __builtin_LINE()) : i(int64_t(value)), line(l) {}
};

// ------------------------------------------------------------------------------------------------ address spaces

struct Device { static constexpr const char* name = "device"; };
struct Constant { static constexpr const char* name = "constant"; };
struct Threadgroup { static constexpr const char* name = "threadgroup"; };

inline void check_race(Region& r, size_t offset, size_t bytes, bool write, bool device, int line) {
  const int simd = g.current / kSimd;
  const uint32_t time = device ? g.time_device : g.time_threadgroup, simd_time = g.simd_time[simd];
  auto conflicts = [&](const Touch& t) {
    if (t.group == -1) return false;
    if (t.group != g.group) return true;                      // nothing orders two threadgroups
    if (t.time != time) return false;
    if (t.simd != simd) return true;
    return t.thread != g.current && t.simd_time == simd_time;
  };
  for (size_t i = offset / r.unit; i * r.unit < offset + bytes; ++i) {
    Shadow& s = r.shadow[i];
    const char* how = conflicts(s.write) ? "written" : write && conflicts(s.read) ? "read" : nullptr;
    if (how) fault(line, "race: %s[%zu] was %s by another thread with no barrier between", r.name, i, how);
    Touch me;
    me.group = g.group, me.simd = simd, me.thread = g.current, me.time = time, me.simd_time = simd_time;
    if (write) {
      s.write = me;
    } else if (s.read.group != g.group || s.read.time != time) {
      s.read = me;
    } else if (s.read.simd != simd) {
      s.read.simd = -2;
    } else {
      if (s.read.thread != g.current && s.read.simd_time == simd_time) me.thread = -2;
      s.read = me;
    }
  }
}

template <typename Space, typename T>
struct Ptr;

template <typename Space, typename T>
struct Ref {
  Ptr<Space, T> p;
  int line;
  using Value = std::remove_const_t<T>;
  operator Value() const { return p.load(line); }
  // half and bfloat reach a number in two steps; C++ takes only one by itself.
  template <typename A, typename = std::enable_if_t<std::is_arithmetic<A>::value && std::is_class<Value>::value>>
  explicit operator A() const { return A(float(p.load(line))); }
  Value operator=(Value v) const { p.store(v, line); return v; }
  Value operator=(const Ref& o) const { Value v = o; p.store(v, line); return v; }
  template <typename V> Value operator+=(V v) const { Value n = Value(Value(*this) + v); p.store(n, line); return n; }
};

// The type of what an expression holds: an element's own type, where C++ would deduce the reference class.
template <typename T> struct Plain { using type = T; };
template <typename Space, typename T> struct Plain<Ref<Space, T>> { using type = std::remove_const_t<T>; };
template <typename T> using plain_t = typename Plain<T>::type;

template <typename Space, typename T>
struct Ptr {
  using Value = std::remove_const_t<T>;
  char* at = nullptr;
  Region* region = nullptr;
  Ptr() = default;
  Ptr(char* a, Region* r) : at(a), region(r) {}
  // To const of the same space, and by an explicit cast to another element type of the same space; never to another space.
  template <typename U, typename = std::enable_if_t<std::is_same<const U, T>::value && !std::is_const<U>::value>>
  Ptr(Ptr<Space, U> o) : at(o.at), region(o.region) {}
  template <typename U, typename = void,
            typename = std::enable_if_t<!std::is_same<std::remove_const_t<U>, Value>::value &&
                                        (std::is_const<T>::value || !std::is_const<U>::value)>>
  explicit Ptr(Ptr<Space, U> o) : at(o.at), region(o.region) {}

  Ref<Space, T> operator[](Index i) const { return {Ptr(at + i.i * int64_t(sizeof(T)), region), i.line}; }
  template <typename I> Ptr operator+(I i) const { return {at + int64_t(i) * int64_t(sizeof(T)), region}; }
  template <typename I> Ptr operator-(I i) const { return {at - int64_t(i) * int64_t(sizeof(T)), region}; }
  template <typename I> Ptr& operator+=(I i) { at += int64_t(i) * int64_t(sizeof(T)); return *this; }

  size_t check(int line) const {
    int64_t offset = at - region->base;
    if (offset < 0 || size_t(offset) + sizeof(T) > region->bytes) {
      fault(line, "out of bounds: %s (%s, %zu bytes) at byte %lld", region->name, Space::name, region->bytes, (long long)offset);
    }
    // A GPU buffer begins at a multiple of any vector's size; an input that is a view of a longer array need not.
    // An array of a text's own lies at a multiple of its element's size, and no more is known: half of a float4 may be elsewhere.
    if (alignof(T) > region->aligned) {
      fault(line, "misaligned: %s is an array of elements of %zu bytes, read or written by %zu", region->name, region->aligned,
            alignof(T));
    }
    if (const int64_t at_byte = offset + region->begins; at_byte % int64_t(alignof(T))) {
      fault(line, "misaligned: %s at byte %lld needs a multiple of %zu", region->name, (long long)at_byte, alignof(T));
    }
    return size_t(offset);
  }
  Value load(int line) const {
    MSL_COUNTED(load);
    size_t offset = check(line);
    if (!region->written.empty()) {
      for (size_t b = 0; b < sizeof(T); ++b) {
        if (!region->written[offset + b]) fault(line, "read before any write: %s at byte %zu", region->name, offset);
      }
      check_race(*region, offset, sizeof(T), false, std::is_same<Space, Device>::value, line);
    }
    Value v;
    std::memcpy(static_cast<void*>(&v), at, sizeof(v));
    return v;
  }
  void store(Value v, int line) const {
    static_assert(!std::is_const<T>::value, "store through a pointer to const");
    size_t offset = check(line);
    check_race(*region, offset, sizeof(T), true, std::is_same<Space, Device>::value, line);
    std::memset(&region->written[offset], 1, sizeof(T));
    std::memcpy(at, static_cast<const void*>(&v), sizeof(v));
  }
};

// `threadgroup T name[n];`: the same memory for every thread of the threadgroup, unset at its start.
template <typename T>
Ptr<Threadgroup, T> shared_array(int number, size_t n, const char* name, int line) {
  if (g.shared.size() <= size_t(number)) g.shared.resize(number + 1);
  Region& r = g.shared[number];
  if (!r.base) {
    g.shared_bytes += n * sizeof(T);
    if (g.shared_bytes > kThreadgroupBytes) fault(line, "%zu bytes of threadgroup memory, 32768 allowed", g.shared_bytes);
    r.bytes = n * sizeof(T);
    r.base = static_cast<char*>(std::aligned_alloc(64, (r.bytes + 63) / 64 * 64));
    std::memset(r.base, 0xcd, r.bytes);
    r.unit = sizeof(T);
    r.aligned = alignof(T);
    r.shadow.assign(n, Shadow());
    r.written.assign(r.bytes, 0);
    r.name = name;
  }
  return {r.base, &r};
}

// ------------------------------------------------------------------------------------------------ meeting points

enum Op { kSum, kMax, kMin, kShuffle, kShuffleXor, kShuffleDown, kBroadcast, kAll, kAny, kMatrix };

inline void meet(Wait wait, int op, int line, int flags) {
  Fibre& f = g.fibre[g.current];
  f.wait = wait, f.op = op, f.line = line, f.flags = flags;
  if (++g.meetings > kMaxMeetings) fault(line, "does not end: %llu simd functions and barriers", (unsigned long long)g.meetings);
  if (_setjmp(f.at) == 0) leave(1);
}

template <typename T>
T value_of(int thread) {
  T v;
  std::memcpy(static_cast<void*>(&v), &g.fibre[thread].slot[g.fibre[g.current].turn], sizeof(T));
  return v;
}

inline int simd_first() { return g.current / kSimd * kSimd; }
inline int simd_end() { int e = simd_first() + kSimd; return e < g.threads ? e : g.threads; }

// Bring a value, wait for the simd group, look at all values. Two slots in turn: nobody can be two meetings ahead.
template <typename T, typename F>
auto exchange(T v, int op, int line, F&& f) {
  static_assert(sizeof(T) <= 8, "simd functions take scalars here");
  Fibre& me = g.fibre[g.current];
  me.turn ^= 1;
  std::memcpy(&me.slot[me.turn], static_cast<const void*>(&v), sizeof(T));
  meet(Wait::Simd, op, line, 0);
  return f();
}

template <typename T, typename F>
T reduce(T v, int op, int line, F&& f) {
  return exchange(v, op, line, [&] {
    T lanes[kSimd];
    int n = 0;
    for (int t = simd_first(); t < simd_end(); ++t) lanes[n++] = value_of<T>(t);
    // A tree, as hardware does it: not the order of a loop, so that no test leans on either.
    for (int step = 1; step < n; step *= 2) {
      for (int i = 0; i + step < n; i += 2 * step) lanes[i] = f(lanes[i], lanes[i + step]);
    }
    return lanes[0];
  });
}

template <typename T>
T from_lane(T v, int lane, int op, int line, bool own_when_outside) {
  MSL_COUNTED(shuffle);
  return exchange(v, op, line, [&] {
    int t = simd_first() + lane;
    if (lane >= 0 && lane < kSimd && t < simd_end()) return value_of<T>(t);
    if (!own_when_outside) fault(line, "simd shuffle from lane %d, which does not exist", lane);
    return v;
  });
}

// ------------------------------------------------------------------------------------------------ running a grid

inline void enter() {
  g.body(g.arguments);
  g.fibre[g.current].wait = Wait::Done;
  leave(1);
}

inline const char* what(Wait w) { return w == Wait::Barrier ? "a barrier" : w == Wait::Done ? "the end" : "a simd function"; }

// Run each thread of [first, end) that may go on until it waits. Returns false on a fault.
inline bool run_until_wait(int first, int end, void (*place)(int)) {
  for (int t = first; t < end; ++t) {
    Fibre& f = g.fibre[t];
    if (f.wait != Wait::None) continue;
    g.current = t;
    place(t);
    int how = _setjmp(g.scheduler);
    if (how == 0) {
      if (f.started) _longjmp(f.at, 1);
      f.started = true;
      setcontext(&f.start);
    }
    if (how == 2) return false;
  }
  return true;
}

inline bool mismatch(int t, int other, const char* kind) {
  Fibre &a = g.fibre[t], &b = g.fibre[other];
  int n = std::snprintf(g.message, g.message_bytes, "line %d: %s not reached by all: thread %d waits there, thread %d ", a.line, kind, t, other);
  if (b.wait == Wait::Done) std::snprintf(g.message + n, g.message_bytes - n, "has ended (threadgroup %d)", g.group);
  else std::snprintf(g.message + n, g.message_bytes - n, "at %s on line %d (threadgroup %d)", what(b.wait), b.line, g.group);
  g.failed = true;
  return false;
}

inline void place_thread(int t) {
  uint32_t x = t % g.group_size[0], y = t / g.group_size[0] % g.group_size[1], z = t / g.group_size[0] / g.group_size[1];
  uint32_t own[3] = {x, y, z};
  for (int a = 0; a < 3; ++a) {
    g.position[1][a] = own[a];
    g.position[0][a] = g.position[2][a] * g.group_size[a] + own[a];
  }
}

inline bool run_threadgroup() {
  int threads = g.threads;
  for (int t = 0; t < threads; ++t) {
    Fibre& f = g.fibre[t];
    f.started = false, f.wait = Wait::None, f.turn = 0;
    getcontext(&f.start);
    f.start.uc_link = nullptr;
    makecontext(&f.start, enter, 0);
  }
  for (int s = 0; s * kSimd < threads; ++s) g.simd_time[s] = 1;
  for (Region& r : g.shared) { std::free(r.base); r = Region(); }
  g.shared.reserve(64);
  g.shared_bytes = 0;
  while (true) {
    for (int first = 0; first < threads; first += kSimd) {
      int end = first + kSimd < threads ? first + kSimd : threads;
      while (true) {
        if (!run_until_wait(first, end, place_thread)) return false;
        // The simd group goes on alone while all of it stands at one simd function or simd-group barrier.
        int at_simd = -1;
        for (int t = first; t < end; ++t) if (g.fibre[t].wait == Wait::Simd || g.fibre[t].wait == Wait::SimdBarrier) at_simd = t;
        if (at_simd < 0) break;
        Fibre& a = g.fibre[at_simd];
        for (int t = first; t < end; ++t) {
          Fibre& b = g.fibre[t];
          if (b.wait != a.wait || b.line != a.line || b.op != a.op || b.flags != a.flags) {
            return mismatch(at_simd, t, a.wait == Wait::Simd ? "simd function" : "simdgroup_barrier");
          }
        }
        if (a.wait == Wait::SimdBarrier) ++g.simd_time[first / kSimd];
        for (int t = first; t < end; ++t) g.fibre[t].wait = Wait::None;
      }
    }
    int waiting = -1, done = -1;
    for (int t = 0; t < threads; ++t) (g.fibre[t].wait == Wait::Done ? done : waiting) = t;
    if (waiting < 0) return true;
    if (done >= 0) return mismatch(waiting, done, "barrier");
    Fibre& a = g.fibre[0];
    for (int t = 1; t < threads; ++t) {
      if (g.fibre[t].line != a.line || g.fibre[t].flags != a.flags) return mismatch(0, t, "barrier");
    }
    if (a.flags & 2) ++g.time_threadgroup;
    if (a.flags & 1) ++g.time_device;
    for (int s = 0; s * kSimd < threads; ++s) ++g.simd_time[s];
    for (int t = 0; t < threads; ++t) g.fibre[t].wait = Wait::None;
  }
}

// Run the whole grid, in an order of threadgroups that a seed turns round. 0: well; 1: a fault, told in `message`.
inline int run_grid(void (*body)(void*), void* arguments, const uint32_t* grid, const uint32_t* group, int order, char* message,
                    size_t message_bytes) {
  g.body = body, g.arguments = arguments, g.message = message, g.message_bytes = message_bytes, g.failed = false;
  g.time_threadgroup = g.time_device = 1, g.meetings = 0;
  g.threads = 1;
  uint64_t groups = 1;
  for (int a = 0; a < 3; ++a) {
    g.grid[a] = grid[a], g.group_size[a] = group[a], g.groups[a] = grid[a] / group[a];
    g.threads *= group[a];
    groups *= grid[a] / group[a];
  }
  static std::vector<Fibre> fibres(kMaxThreads);
  static std::vector<char*> stacks(kMaxThreads, nullptr);
  g.fibre = fibres.data();
  for (int t = 0; t < g.threads; ++t) {
    if (!stacks[t]) stacks[t] = static_cast<char*>(std::malloc(kStack));
    getcontext(&fibres[t].start);
    fibres[t].start.uc_stack.ss_sp = stacks[t];
    fibres[t].start.uc_stack.ss_size = kStack;
  }
  uint32_t nx = grid[0] / group[0], ny = grid[1] / group[1];
  for (uint64_t i = 0; i < groups; ++i) {
    uint64_t n = order ? groups - 1 - i : i;
    g.group = int(n);
    g.position[2][0] = n % nx, g.position[2][1] = n / nx % ny, g.position[2][2] = n / nx / ny;
    if (!run_threadgroup()) return 1;
    ++g.time_threadgroup, ++g.time_device;
  }
  return 0;
}

template <typename T>
Ptr<Device, T> output(Region& r) { return {r.base, &r}; }

}  // namespace msl

// ------------------------------------------------------------------------------------------------ names of the language

using msl::bfloat;
using msl::half;
using msl::vec;
using uchar = uint8_t;
using ushort = uint16_t;
using uint = uint32_t;
using bfloat16_t = bfloat;
using float16_t = half;
using uint2 = vec<uint, 2>;
using uint3 = vec<uint, 3>;
using uint4 = vec<uint, 4>;
using int2 = vec<int, 2>;
using float2 = vec<float, 2>;
using float4 = vec<float, 4>;
#define METAL_FUNC inline
#ifdef INFINITY
#undef INFINITY
#endif
#define INFINITY (__builtin_inff())

template <typename T, typename F>
T as_type(F f) {
  static_assert(sizeof(T) == sizeof(F), "as_type between types of one size");
  T t;
  std::memcpy(static_cast<void*>(&t), static_cast<const void*>(&f), sizeof(T));
  return t;
}

namespace metal {
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float exp(float a) { return __builtin_expf(a); }
inline float exp2(float a) { return __builtin_exp2f(a); }
inline float log(float a) { return __builtin_logf(a); }
inline float tanh(float a) { return __builtin_tanhf(a); }
inline float sqrt(float a) { return __builtin_sqrtf(a); }
inline float rsqrt(float a) { return 1.0f / __builtin_sqrtf(a); }
inline float abs(float a) { return __builtin_fabsf(a); }
inline bool isnan(float a) { return a != a; }
inline bool isinf(float a) { return __builtin_fabsf(a) == INFINITY; }
template <typename A> msl::plain_t<A> min(A a, A b) { msl::plain_t<A> x = a, y = b; return y < x ? y : x; }
template <typename A> msl::plain_t<A> max(A a, A b) { msl::plain_t<A> x = a, y = b; return x < y ? y : x; }
inline uint popcount(uint a) { return uint(__builtin_popcount(a)); }
inline uint ctz(uint a) { return a ? uint(__builtin_ctz(a)) : 32u; }
namespace precise { using metal::exp; using metal::log; using metal::tanh; using metal::sqrt; using metal::rsqrt; }
enum class mem_flags : int { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
}  // namespace metal
using namespace metal;

#define MSL_LINE int line = __builtin_LINE()
#define MSL_FOLD(name, op, expression)                                                                   \
  template <typename A> msl::plain_t<A> name(A value, MSL_LINE) {                                        \
    using T = msl::plain_t<A>;                                                                           \
    return msl::reduce(T(value), msl::op, line, [](T a, T b) { return T(expression); });                 \
  }
MSL_FOLD(simd_sum, kSum, a + b)
MSL_FOLD(simd_max, kMax, a < b ? b : a)
MSL_FOLD(simd_min, kMin, b < a ? b : a)
#define MSL_SHUFFLE(name, op, lane_expression, own)                                                      \
  template <typename A> msl::plain_t<A> name(A value, uint n, MSL_LINE) {                                \
    const int own_lane = msl::g.current % msl::kSimd, given = int(n);                                    \
    (void)own_lane;                                                                                      \
    return msl::from_lane(msl::plain_t<A>(value), lane_expression, msl::op, line, own);                  \
  }
MSL_SHUFFLE(simd_shuffle, kShuffle, given, false)
MSL_SHUFFLE(simd_broadcast, kBroadcast, given, false)
MSL_SHUFFLE(simd_shuffle_xor, kShuffleXor, own_lane ^ given, false)
MSL_SHUFFLE(simd_shuffle_down, kShuffleDown, own_lane + given, true)
inline bool simd_any(bool v, MSL_LINE) { return msl::reduce(int(v), msl::kAny, line, [](int a, int b) { return a | b; }); }
inline bool simd_all(bool v, MSL_LINE) { return msl::reduce(int(v), msl::kAll, line, [](int a, int b) { return a & b; }); }

// 8 x 8 over a simd group. A lane holds two neighbours of a row, as Apple's GPUs lay them out: bits 4, 2, 1 of its number are
// the row, bits 3, 0 the pair of columns.
template <typename T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup_matrix is 8 x 8");
  vec<T, 2> own;
  vec<T, 2>& thread_elements() { return own; }
  static int row(int lane) { return (lane >> 4 & 1) * 4 + (lane >> 1 & 3); }
  static int column(int lane) { return (lane >> 3 & 1) * 4 + (lane & 1) * 2; }
};

namespace msl {
// Everybody's two elements, as floats, where they belong.
template <typename T>
void gather_matrix(simdgroup_matrix<T, 8, 8>& a, int line, float (&all)[8][8]) {
  if (g.threads % kSimd) fault(line, "a matrix needs whole simd groups; the threadgroup has %d threads", g.threads);
  using M = simdgroup_matrix<T, 8, 8>;
  exchange(vec<float, 2>(float(a.own[0]), float(a.own[1])), kMatrix, line, [&] {
    for (int lane = 0; lane < kSimd; ++lane) {
      vec<float, 2> v = value_of<vec<float, 2>>(simd_first() + lane);
      all[M::row(lane)][M::column(lane)] = v[0], all[M::row(lane)][M::column(lane) + 1] = v[1];
    }
    return 0;
  });
}
}  // namespace msl

// d = a b + c. Products and their sum are exact here before the one rounding; what a GPU rounds in between is its own.
template <typename R, typename T, typename U, typename V>
void simdgroup_multiply_accumulate(simdgroup_matrix<R, 8, 8>& d, simdgroup_matrix<T, 8, 8>& a, simdgroup_matrix<U, 8, 8>& b,
                                   simdgroup_matrix<V, 8, 8>& c, MSL_LINE) {
  MSL_COUNTED(matrix);
  float left[8][8], right[8][8];
  msl::gather_matrix(a, line, left);
  msl::gather_matrix(b, line, right);
  const int lane = msl::g.current % msl::kSimd, row = a.row(lane), column = a.column(lane);
  for (int i = 0; i < 2; ++i) {
    double sum = double(float(c.own[i]));
    for (int k = 0; k < 8; ++k) sum += double(left[row][k]) * double(right[k][column + i]);
    d.own[i] = R(float(sum));
  }
}

inline void threadgroup_barrier(metal::mem_flags f, MSL_LINE) { msl::meet(msl::Wait::Barrier, 0, line, int(f)); }
inline void simdgroup_barrier(metal::mem_flags f, MSL_LINE) { msl::meet(msl::Wait::SimdBarrier, 0, line, int(f)); }
