"""One kernel object, three back ends: Metal on a Mac, CUDA on an NVIDIA GPU, and whatever tests put in Metal's place.

Knows how a body becomes a launch. A body is Metal; CUDA reads the same string through `_CUDA_PRELUDE`, which gives meaning
to the Metal names that our bodies use. Rules that keep one text good for both: `metal::fma` for every multiply-add and `times`
for a product that something is added to afterwards (so that no compiler decides about contraction, one way among few rows and
another among many; on Metal a pragma says it too), `auto` for pointers derived from an input (MLX puts one of fewer than 8
elements in constant memory), `vec<T, n>` for vectors, a grid that is a multiple of its threadgroup.

A vector is loaded only where its address is a multiple of its size (16 bytes at most). MLX hands over a row-contiguous view as
it lies in its buffer, and Python cannot ask where: so a text loads vectors only from inputs whose rows are multiples of 16
bytes, which any slice by rows, heads or experts keeps. What remains is one row cut out of a longer last axis, at a multiple of 8
elements: texts may count on that. No product of 63 families of mlx-lm is given a row that begins off 16 bytes in float32; in
float16 38 of them were seen (the others' experts do not run so on a CPU). Scales, biases, sinks and ids are read one by one.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..machine import cache_directory, write_atomically

Triple = tuple[int, int, int]

_CUDA_PRELUDE = """
#define METAL_FUNC __device__ __forceinline__
#undef INFINITY
#define INFINITY __int_as_float(0x7f800000)

namespace mlx::core::cu {

using half = __half;
using bfloat = __nv_bfloat16;
using float16_t = __half;
using bfloat16_t = __nv_bfloat16;
using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;

template <typename T, int N>
struct alignas(N * sizeof(T)) vec {
  T at[N];
  __device__ T& operator[](int i) { return at[i]; }
  __device__ const T& operator[](int i) const { return at[i]; }
};

template <typename T, typename F>
METAL_FUNC T as_type(F f) {
  static_assert(sizeof(T) == sizeof(F), "as_type between types of one size");
  T t;
  memcpy(&t, &f, sizeof(T));
  return t;
}

// Lanes a and b of each step hold the same sum: addition of two numbers does not depend on their order.
template <typename T>
METAL_FUNC T simd_sum(T v) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) v = v + __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}
template <typename T>
METAL_FUNC T simd_max(T v) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    T o = __shfl_xor_sync(0xffffffffu, v, step);
    v = v < o ? o : v;
  }
  return v;
}
template <typename T>
METAL_FUNC T simd_min(T v) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    T o = __shfl_xor_sync(0xffffffffu, v, step);
    v = o < v ? o : v;
  }
  return v;
}
template <typename T>
METAL_FUNC T simd_shuffle(T v, uint lane) { return __shfl_sync(0xffffffffu, v, lane); }
template <typename T>
METAL_FUNC T simd_broadcast(T v, uint lane) { return __shfl_sync(0xffffffffu, v, lane); }
template <typename T>
METAL_FUNC T simd_shuffle_xor(T v, uint mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }

METAL_FUNC float times(float a, float b) { return __fmul_rn(a, b); }

namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
METAL_FUNC float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
METAL_FUNC float exp(float a) { return ::expf(a); }
METAL_FUNC float tanh(float a) { return ::tanhf(a); }
METAL_FUNC float rsqrt(float a) { return ::rsqrtf(a); }
METAL_FUNC float sqrt(float a) { return ::sqrtf(a); }
template <typename T>
METAL_FUNC T min(T a, T b) { return b < a ? b : a; }
template <typename T>
METAL_FUNC T max(T a, T b) { return a < b ? b : a; }
}  // namespace metal

METAL_FUNC void threadgroup_barrier(metal::mem_flags) { __syncthreads(); }
METAL_FUNC void simdgroup_barrier(metal::mem_flags) { __syncwarp(); }
METAL_FUNC uint dflash_thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

}  // namespace mlx::core::cu
"""

_METAL_PRELUDE = """
#pragma STDC FP_CONTRACT OFF
METAL_FUNC float times(float a, float b) { return a * b; }
"""

# These come after every use of __device__, a macro for __attribute__((device)), which the define below would break. So a helper
# in `header` takes values only.
_CUDA_WORDS = """
#define device
#define constant const
#define thread
#define threadgroup __shared__
#define thread_position_in_grid \\
  (uint3{blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z})
#define threadgroup_position_in_grid (uint3{blockIdx.x, blockIdx.y, blockIdx.z})
#define threadgroups_per_grid (uint3{gridDim.x, gridDim.y, gridDim.z})
#define thread_index_in_threadgroup (dflash_thread())
#define simdgroup_index_in_threadgroup (dflash_thread() / 32)
#define thread_index_in_simdgroup (dflash_thread() % 32)
"""


@dataclass(frozen=True)
class Kernel:
    """A body with its names, launched on the device at hand.

    Args:
      name: of the kernel and of its file.
      inputs, outputs: argument names, in order. A shape is read in the body as `NAME_shape[i]`, strides as `NAME_strides[i]`.
      source: the body, the very string that `mx.fast.metal_kernel` and `mx.fast.cuda_kernel` are given.
      header: helper functions, each `METAL_FUNC`, on values: no address space is named in it.
      cuda_header: the same functions where CUDA has other instructions for them; None: `header` serves both.
      row_contiguous: False hands inputs over as they lie, so that a slice of a long cache is not copied.
      form: added to the name: MLX caches kernels by name, so several texts of one name need different forms.
      at_once: whether it may run on CUDA by default. MLX compiles it there in every process, which takes some 2 s.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    header: str = ""
    cuda_header: str | None = None
    row_contiguous: bool = True
    form: str = ""
    at_once: bool = False

    @property
    def text(self) -> str:
        """What tuning results depend on."""
        return self.header + self.source

    def __call__(self, inputs: Sequence[mx.array], **given: Any) -> list[mx.array]:
        """Launch once, with the arguments of a kernel of `mx.fast.metal_kernel`."""
        return self.prepared(**given)(inputs=list(inputs))

    def prepared(self, *, threadgroup: Triple, grid: Triple | None = None, **given: Any) -> Callable[..., list[mx.array]]:
        """A launch with these arguments fixed. Each call gives the others, by name.

        Raises:
          ValueError: if the grid is not a multiple of the threadgroup (Metal would cut the last group, CUDA would not). A grid
            that is given later must be checked by the caller.
          RuntimeError: if there is no GPU.
        """
        if grid is not None:
            if any(n % t for n, t in zip(grid, threadgroup, strict=True)):
                raise ValueError(f"the grid is {grid}; it must be a multiple of the threadgroup, {threadgroup}")
            given["grid"] = grid
        return functools.partial(_make(self, maker(), mx.cuda.is_available()), threadgroup=threadgroup, **given)


@dataclass(frozen=True)
class Form:
    """Another way to compute something with MLX's own operations, tuned as kernels are.

    text: a version. Change it with the code, so that older tuning results no longer apply.
    """

    name: str
    text: str = "1"
    # Nothing is compiled.
    at_once = True


def maker() -> Callable[..., Any]:
    """What compiles a kernel's source here. Tests put an emulator in its place."""
    return mx.fast.cuda_kernel if mx.cuda.is_available() else mx.fast.metal_kernel


@functools.lru_cache(maxsize=256)
def _make(kernel: Kernel, make: Callable, cuda: bool) -> Callable[..., list[mx.array]]:
    header = f"{_METAL_PRELUDE}{kernel.header}"
    if cuda:
        own = kernel.header if kernel.cuda_header is None else kernel.cuda_header
        header = f"{_CUDA_PRELUDE}namespace mlx::core::cu {{\n{own}\n}}\n{_CUDA_WORDS}"
    source = kernel.source
    if cuda:
        # MLX searches the source for these names, to know which shapes and strides to pass.
        named = {f"{name}{end}" for name in kernel.inputs for end in ("_shape", "_strides", "_ndim") if f"{name}{end}" in source}
        header, source = _filed(header), f"// {' '.join(sorted(named))}\n{_filed(source)}"
    return make(
        name=f"dflash_{kernel.name}{kernel.form}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=source,
        header=header,
        ensure_row_contiguous=kernel.row_contiguous,
    )


def _filed(text: str) -> str:
    """A line that includes a text from a file in the cache directory; the text, where none can be written.

    MLX's CUDA build hashes a kernel's whole text at each launch: 2.8 us for 16,600 characters (std::hash, x86).
    """
    data = text.encode()
    file = cache_directory() / "kernels" / f"{hashlib.sha256(data).hexdigest()[:24]}.cuh"
    try:
        if not file.exists() or file.read_bytes() != data:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, data)
    except OSError:
        return text
    path = str(file.absolute())
    # Nor a name of bytes that are no text: MLX takes UTF-8.
    return f'#include "{path}"\n' if path.isprintable() and not set(path) & {'"', "\\"} else text
