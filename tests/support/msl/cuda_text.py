"""The CUDA file that MLX would generate for a kernel, compiled (not run) with nvcc: the prelude's twin of the emulator.

MLX hands CUDA texts to NVRTC, which has no host headers; `-D__CUDACC_RTC__` is not enough to imitate that with nvcc, so the
text is searched for includes instead: it may have none of its own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx

TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
    mx.bool_: "bool",
}
# What MLX puts in front: its own header brings these.
FRONT = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
#include <cuda/std/cstdint>
#include <cuda/std/limits>
#include <cuda/std/tuple>
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
}
"""


REGISTERS = 65536  # of a streaming multiprocessor, compute capability 5.0 to 12.x: one threadgroup has no more


def nvcc() -> str | None:
    return shutil.which("nvcc")


def cuda_kernel(name, input_names, output_names, source, header="", ensure_row_contiguous=True, shared_memory=0):
    """Stands in for `mx.fast.cuda_kernel`; a launch compiles the text and gives zeros back."""

    def launch(*, inputs, grid, threadgroup, output_shapes, output_dtypes, template=(), **others):
        front, body = (re.sub(r'^#include "(/.*)"$', _text_of, part, flags=re.M) for part in (header, source))
        assert "#include" not in front + body, "a text for NVRTC has no includes of its own"
        parameters = []
        for n, a in zip(input_names, inputs, strict=True):
            parameters.append(f"const {TYPES[a.dtype]}* {n}")
            for end, kind in (("_shape", "Shape"), ("_strides", "Strides"), ("_ndim", "int")):
                if n + end in source and a.ndim:
                    parameters.append(f"const __grid_constant__ {kind} {n}{end}")
        parameters += [f"{TYPES[d]}* {n}" for n, d in zip(output_names, output_dtypes, strict=True)]
        constants = []
        for n, v in template:
            kind = "bool" if isinstance(v, bool) else "int" if isinstance(v, int) else None
            constants.append(f"constexpr {kind} {n} = {str(v).lower()};" if kind else f"using {n} = {TYPES[v]};")
        compile_text(
            f"{FRONT}{front}\nnamespace mlx::core::cu {{\n__global__ void custom_kernel_{name}(\n"
            + ",\n".join(parameters)
            + ") {\n"
            + "\n".join(constants)
            + f"\n{body}\n}}\n}}\n",
            threads=threadgroup[0] * threadgroup[1] * threadgroup[2],
        )
        return [mx.zeros(s, dtype=d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

    return launch


def _text_of(m: re.Match) -> str:
    """A file that a text was written to as it is, so that MLX has less to hash."""
    return Path(m[1]).read_text()


def compile_text(code: str, arch: str = "sm_90", threads: int = 1) -> None:
    """Fails where the text does not compile, or so many threads of it find too few registers: such a launch is refused."""
    with tempfile.TemporaryDirectory() as tmp:
        file = Path(tmp) / "kernel.cu"
        file.write_text(code)
        done = subprocess.run(
            [
                nvcc(),
                "-std=c++20",
                f"-arch={arch}",
                "-cubin",
                str(file),
                "-o",
                str(Path(tmp) / "kernel.cubin"),
                "--resource-usage",
            ],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        REPORTS.append(done.stderr)
        # Given out to a warp by eights a thread.
        registers = -(-int(re.search(r"Used (\d+) registers", done.stderr)[1]) // 8) * 8
        assert registers * threads <= REGISTERS, f"{threads} threads of {registers} registers: expected at most {REGISTERS}"


# What nvcc said of each text: registers, spills.
REPORTS: list[str] = []
