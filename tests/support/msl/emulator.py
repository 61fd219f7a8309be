"""Run a Metal kernel's text on the CPU: `emulator.metal_kernel` stands in for `mx.fast.metal_kernel`, same arguments.

It writes the signature as MLX does (an input of fewer than 8 elements is `constant`, any other `device`; `_shape`, `_strides`,
`_ndim` and thread attributes where the text names them), turns the text into C++ line by line, compiles it once, runs it over
the grid and returns arrays. What msl.h finds wrong is a `KernelFault`; what the C++ compiler refuses, a `CompileFault`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

HERE = Path(__file__).parent
CONSTANT_BELOW = 8  # elements; MLX's rule
VECTOR = 16  # bytes of the largest vector

TYPES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.bool_: "bool",
}
# In MLX's order: it is the order of the arguments.
ATTRIBUTES = {
    "grid_size": "uint3",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}
VALUES = {
    "grid_size": "xyz(msl::g.grid)",
    "simdgroup_index_in_threadgroup": "uint(msl::g.current / 32)",
    "simdgroups_per_threadgroup": "uint((msl::g.threads + 31) / 32)",
    "thread_index_in_simdgroup": "uint(msl::g.current % 32)",
    "thread_index_in_threadgroup": "uint(msl::g.current)",
    "thread_position_in_grid": "xyz(msl::g.position[0])",
    "thread_position_in_threadgroup": "xyz(msl::g.position[1])",
    "threadgroup_position_in_grid": "xyz(msl::g.position[2])",
    "threadgroups_per_grid": "xyz(msl::g.groups)",
    "threads_per_grid": "xyz(msl::g.grid)",
    "threads_per_simdgroup": "32u",
    "threads_per_threadgroup": "xyz(msl::g.group_size)",
}

_SPACE = {"device": "msl::Device", "constant": "msl::Constant", "threadgroup": "msl::Threadgroup"}
_TYPE = r"[A-Za-z_]\w*(?:<[^<>;()]*>)?"
_POINTER = re.compile(
    rf"\b(?P<before>const\s+)?(?P<space>device|constant|threadgroup)\s+(?P<after>const\s+)?(?P<type>{_TYPE})\s*(?P<kind>[*&])"
)
_SHARED = re.compile(rf"\bthreadgroup\s+(?P<type>{_TYPE})\s+(?P<name>\w+)\s*\[(?P<size>[^\]]+)\]\s*;")
_NUMBER = r"(?:float|half|bfloat|u?int|u?short|u?char|u?int\d+_t|bool|T|U|vec\s*<[^<>]*>|float\d|u?int\d|half\d)"
_BARE_POINTER = re.compile(rf"(?<![\w:<,])(?<!thread )(?<!thread const )(?:const\s+)?\b{_NUMBER}\s*\*\s*(?=\w|\))")
_NOT_METAL = re.compile(r"\b(double|std::|printf|new|delete|throw|try|malloc|static_assert_cast)\b|\bstd::")
_THREAD_CAST = re.compile(
    rf"\(\s*(?:const\s+)?thread\s+(?:const\s+)?{_TYPE}\s*[*&]\s*\)|reinterpret_cast\s*<\s*(?:const\s+)?thread\b"
)
_AUTO_ELEMENT = re.compile(r"\bauto\s+\w+\s*=\s*\w+\[[^;]*\]\s*;")


class CompileFault(Exception):
    """The text is not Metal, or breaks a rule that a Mac's compiler would hold it to."""


class KernelFault(Exception):
    """The text ran and did something that is undefined on a GPU; the message begins with the line."""


def compiler() -> str | None:
    """The C++ compiler at hand: $CXX, else g++ or clang++, else None."""
    return next((c for c in (os.environ.get("CXX"), "g++", "clang++") if c and shutil.which(c)), None)


@functools.cache
def missing() -> str | None:
    """Why no text runs here, in a few words; None: texts run. A Mac's fibres (`ucontext`) are tried in a process of their own."""
    if compiler() is None:
        return "no C++ compiler: set CXX, or install g++ or clang++"
    if sys.platform != "darwin":
        return None
    try:
        done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "a small text does not end"
    if done.returncode == 0:
        return None
    said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
    return f"a small text ends with {done.returncode}: {said[-1].strip()}"


def _try_out() -> None:
    """Run a small text with a barrier and a simd function: what `missing` asks for."""
    source = """
    threadgroup float t[64];
    t[thread_index_in_threadgroup] = x[thread_index_in_threadgroup];
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    y[thread_index_in_threadgroup] = simd_sum(t[63 - thread_index_in_threadgroup]);
    """
    shape = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,)], "output_dtypes": [mx.float32]}
    (y,) = metal_kernel("try_out", ["x"], ["y"], source)(inputs=[mx.arange(64).astype(mx.float32)], **shape)
    if y.tolist() != [1520.0] * 32 + [496.0] * 32:
        raise KernelFault(f"a small text gives {y[0].item()} and {y[-1].item()}; it must give 1520 and 496")


def _blank_comments(text: str) -> str:
    """Comments and Metal's own includes as spaces, lines kept."""
    text = re.sub(r"#include <metal_\w+>", " ", text)
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S)


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def translate(text: str, shared_from: int = 0, kernel_body: bool = True) -> str:
    """MSL to C++ with the same lines: pointers with an address space, threadgroup arrays, and the rules C++ does not know."""
    text = _blank_comments(text)
    if found := _NOT_METAL.search(text):
        raise CompileFault(f"line {_line(text, found.start())}: {found.group()!r} does not exist in Metal")
    if kernel_body and (cast := _THREAD_CAST.search(text)):
        raise CompileFault(
            f"line {_line(text, cast.start())}: a thread's own array is aligned for its elements, and no pointer makes it wider "
            f"({cast.group()!r}): name the elements one by one, or declare it of the wider type"
        )
    number = shared_from

    def shared(m: re.Match) -> str:
        nonlocal number
        before = text[: m.start()]
        if not kernel_body or before.count("{") != before.count("}"):
            raise CompileFault(
                f"line {_line(text, m.start())}: threadgroup memory is declared in the kernel's outermost scope only"
            )
        number += 1
        name = m["name"]
        return f'auto {name} = msl::shared_array<{m["type"]}>({number - 1}, size_t({m["size"]}), "{name}", __LINE__);'

    def pointer(m: re.Match) -> str:
        const = "const " if m["before"] or m["after"] else ""
        if m["kind"] == "&":
            if m["space"] != "constant":
                raise CompileFault(f"line {_line(text, m.start())}: the emulator knows references in constant memory only")
            return f"const {m['type']} "
        if m["space"] == "constant" and not const:
            raise CompileFault(f"line {_line(text, m.start())}: a pointer to constant memory must be const")
        return f"msl::Ptr<{_SPACE[m['space']]}, {const}{m['type']}> "

    out = _SHARED.sub(shared, text)
    out = _POINTER.sub(pointer, out)
    out = re.sub(r"\breinterpret_cast\s*<\s*msl::Ptr", "static_cast<msl::Ptr", out)
    if bare := _BARE_POINTER.search(re.sub(r"\s+", " ", out)):
        raise CompileFault(f"pointer without an address space: {bare.group()!r}")
    if element := _AUTO_ELEMENT.search(out):
        raise CompileFault(f"line {_line(out, element.start())}: name the type of an element ({element.group()!r}), not auto")
    return re.sub(r"\bthread\s+(?=const\b|[A-Za-z_])", "", out)


def _template(template: Sequence[tuple[str, Any]]) -> tuple[str, str]:
    """The template line of a kernel and the arguments that it is made with."""
    if not template:
        return "", ""
    kinds, values = [], []
    for name, value in template:
        if isinstance(value, bool):
            kinds.append(f"bool {name}"), values.append("true" if value else "false")
        elif isinstance(value, int):
            kinds.append(f"int {name}"), values.append(str(value))
        else:
            kinds.append(f"typename {name}"), values.append(TYPES[value])
    return f"template <{', '.join(kinds)}>", f"<{', '.join(values)}>"


def generate(name, input_names, inputs, output_names, output_dtypes, source, header, template) -> str:
    """The whole C++ file of one kernel for these arrays: MLX's signature, the text, and the entry that ctypes calls."""
    parameters, arguments = [], []

    def add(parameter: str, argument: str) -> None:
        parameters.append("  " + translate(parameter, kernel_body=False).strip()), arguments.append(argument)

    regions = 0
    for i, (n, a) in enumerate(zip(input_names, inputs, strict=True)):
        space = "constant" if a.size < CONSTANT_BELOW else "device"
        where = f"{{c->region[{regions}].base, &c->region[{regions}]}}"
        regions += 1
        if a.ndim == 0:
            kind = TYPES[a.dtype]
            (
                parameters.append(f"  const {kind} {n}"),
                arguments.append(f"*reinterpret_cast<const {kind}*>(c->region[{regions - 1}].base)"),
            )
            continue
        add(f"const {space} {TYPES[a.dtype]}* {n}", where)
        if f"{n}_shape" in source:
            add(f"const constant int* {n}_shape", f"{{c->shape[{i}].base, &c->shape[{i}]}}")
        if f"{n}_strides" in source:
            add(f"const constant int64_t* {n}_strides", f"{{c->strides[{i}].base, &c->strides[{i}]}}")
        if f"{n}_ndim" in source:
            parameters.append(f"  const int {n}_ndim"), arguments.append(str(a.ndim))
    for n, dtype in zip(output_names, output_dtypes, strict=True):
        add(f"device {TYPES[dtype]}* {n}", f"{{c->region[{regions}].base, &c->region[{regions}]}}")
        regions += 1
    for n, kind in ATTRIBUTES.items():
        if n in source:
            parameters.append(f"  {kind} {n}"), arguments.append(VALUES[n])
    line, values = _template(template)
    call, signature = ",\n    ".join(arguments), ",\n".join(parameters)
    say = _counted if COUNTED[0] is not None else str
    front = "counting.h" if COUNTED[0] is not None else "msl.h"
    return f"""#include "{front}"
#line 1 "header"
{say(translate(header, kernel_body=False))}
{line}
void custom_kernel_{name}(
{signature}) {{
#line 1 "{name}"
{say(translate(source))}
}}
#line 1 "entry"
namespace {{
struct Call {{ msl::Region *region, *shape, *strides; }};
[[maybe_unused]] uint3 xyz(const uint32_t* p) {{ return uint3(p[0], p[1], p[2]); }}
void body(void* arguments) {{
  [[maybe_unused]] Call* c = static_cast<Call*>(arguments);
  custom_kernel_{name}{values}(
    {call});
}}
msl::Region plain(const void* p, int64_t bytes, const char* name) {{
  msl::Region r;
  r.base = static_cast<char*>(const_cast<void*>(p)), r.bytes = bytes, r.name = name;
  return r;
}}
}}
extern "C" int msl_run(int n_in, int n_out, const char** names, void** data, const int64_t* bytes, const int64_t* units,
                       const int32_t* begins, const int32_t** shapes, const int64_t** strides, const int32_t* ndims,
                       uint8_t** written, const uint32_t* grid, const uint32_t* group, int order, char* message,
                       int message_bytes) {{
  std::vector<msl::Region> region, shape, stride;
  for (int i = 0; i < n_in + n_out; ++i) {{
    region.push_back(plain(data[i], bytes[i], names[i]));
    if (i < n_in) {{
      region[i].begins = begins[i];
      shape.push_back(plain(shapes[i], ndims[i] * 4, "shape"));
      stride.push_back(plain(strides[i], ndims[i] * 8, "strides"));
    }} else {{
      region[i].unit = units[i];
      region[i].shadow.resize(bytes[i] / units[i]);
      region[i].written.assign(written[i - n_in], written[i - n_in] + bytes[i]);
    }}
  }}
  Call call{{region.data(), shape.data(), stride.data()}};
  int failed = msl::run_grid(body, &call, grid, group, order, message, message_bytes);
  for (int i = 0; i < n_out; ++i) std::memcpy(written[i], region[n_in + i].written.data(), bytes[n_in + i]);
  return failed;
}}
"""


def _cache() -> Path:
    path = Path(tempfile.gettempdir()) / f"dflash-msl-{os.getuid()}-{platform.node()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@functools.cache
def _native(cxx: str) -> tuple[str, ...]:
    """Options that make `fma` one instruction and unset variables visible, where the compiler has them."""
    wanted = ("-march=native", "-ftrivial-auto-var-init=pattern")
    ok = []
    for option in wanted:
        with tempfile.TemporaryDirectory() as tmp:
            test = Path(tmp) / "a.cpp"
            test.write_text("int main() { return 0; }\n")
            if subprocess.run([cxx, option, "-c", test, "-o", Path(tmp) / "a.o"], capture_output=True).returncode == 0:
                ok.append(option)
    return tuple(ok)


@functools.cache
def _build(code: str) -> ctypes.CDLL:
    """Compile once per text: libraries are kept by hash in the temporary folder."""
    cxx = compiler()
    if cxx is None:
        raise CompileFault("no C++ compiler: set CXX, or install g++ or clang++")
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w", *_native(cxx)]
    key = hashlib.sha256(
        "\0".join([code, *(h.read_text() for h in sorted(HERE.glob("*.h"))), cxx, *options]).encode()
    ).hexdigest()[:32]
    library = _cache() / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as tmp:
            source, made = Path(tmp) / "kernel.cpp", Path(tmp) / "kernel.so"
            source.write_text(code)
            done = subprocess.run([cxx, *options, "-I", str(HERE), str(source), "-o", str(made)], capture_output=True, text=True)
            if done.returncode:
                raise CompileFault(done.stderr[:4000])
            os.replace(made, library)
    return ctypes.CDLL(str(library))


def _buffer(a: mx.array, contiguous: bool) -> tuple[np.ndarray, np.ndarray, int]:
    """The array's memory as raw items (bfloat16 as its codes); its strides in elements; where it begins in its buffer, in bytes
    modulo `VECTOR`. A copy when asked and needed, as MLX makes one: a view that lies row by row is handed over where it is.
    """
    raw = a.view(mx.uint16) if a.dtype in (mx.bfloat16, mx.float16) else a
    mx.eval(raw)
    view = np.asarray(memoryview(raw)) if raw.ndim else np.array(raw.item(), dtype=np.asarray(raw).dtype).reshape(1)
    given = view
    if contiguous:
        view = np.ascontiguousarray(view)
    begins = (view.ctypes.data - _first_byte()) % VECTOR if view is given and raw.ndim and view.size else 0
    return view, np.array([s // view.itemsize for s in view.strides], dtype=np.int64), begins


@functools.cache
def _first_byte() -> int:
    """Where MLX's own buffers begin in this process, modulo `VECTOR`: its CPU allocator puts a size before each."""
    fresh = mx.full((64,), 1, dtype=mx.uint8)
    mx.eval(fresh)
    return np.asarray(memoryview(fresh)).ctypes.data % VECTOR


def _extent(view: np.ndarray) -> int:
    """Bytes from the first element to the end of the last one."""
    if view.size == 0:
        return 0
    return sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) + view.itemsize


class _Kernel:
    def __init__(self, name, input_names, output_names, source, header="", ensure_row_contiguous=True, **others):
        self.name, self.input_names, self.output_names = name, tuple(input_names), tuple(output_names)
        self.source, self.header, self.contiguous = source, header, ensure_row_contiguous
        if set(others) - {"atomic_outputs", "compile_options"} or others.get("atomic_outputs"):
            raise NotImplementedError(f"the emulator has no {sorted(others)}")

    def __call__(
        self, *, inputs, grid, threadgroup, output_shapes, output_dtypes, template=(), init_value=None, stream=None, verbose=False
    ):
        if len(inputs) != len(self.input_names):
            raise ValueError(f"expected {len(self.input_names)} inputs; found {len(inputs)}")
        if any(n % t for n, t in zip(grid, threadgroup, strict=True)):
            raise KernelFault(f"grid {grid} is not a multiple of the threadgroup {threadgroup}: CUDA would run threads beyond it")
        if int(np.prod(threadgroup)) > 1024:
            raise KernelFault(f"{threadgroup} is more than 1024 threads")
        inputs = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        code = generate(self.name, self.input_names, inputs, self.output_names, output_dtypes, self.source, self.header, template)
        if verbose:
            print(code)
        library = _build(code)
        run = library.msl_run
        views, strides, begins = zip(*[_buffer(x, self.contiguous) for x in inputs], strict=True)
        outputs, written = [], []
        for shape, dtype in zip(output_shapes, output_dtypes, strict=True):
            item = mx.zeros((1,), dtype=dtype).nbytes
            # Poison: NaN as a float, -1 as an integer.
            out = np.full(int(np.prod(shape)) * item, 0xFF, dtype=np.uint8)
            if init_value is not None:
                out = np.asarray(memoryview(mx.full(shape, init_value, dtype=dtype).view(mx.uint8))).reshape(-1).copy()
            outputs.append(out), written.append(np.full(out.size, init_value is not None, dtype=np.uint8))
        n = len(inputs) + len(outputs)
        shapes = [np.array(x.shape, dtype=np.int32) for x in inputs]
        sizes = [_extent(v) for v in views] + [o.nbytes for o in outputs]
        units = [1] * len(inputs) + [mx.zeros((1,), dtype=d).nbytes for d in output_dtypes]
        message = ctypes.create_string_buffer(1024)
        names = [s.encode() for s in (*self.input_names, *self.output_names)]
        failed = run(
            len(inputs), len(outputs), (ctypes.c_char_p * n)(*names),
            (ctypes.c_void_p * n)(*[a.ctypes.data for a in (*views, *outputs)]),
            (ctypes.c_int64 * n)(*sizes), (ctypes.c_int64 * n)(*units), (ctypes.c_int32 * n)(*begins),
            (ctypes.c_void_p * n)(*[a.ctypes.data for a in shapes]), (ctypes.c_void_p * n)(*[a.ctypes.data for a in strides]),
            (ctypes.c_int32 * n)(*[len(s) for s in shapes]), (ctypes.c_void_p * len(written))(*[w.ctypes.data for w in written]),
            (ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(*threadgroup), ORDER[0], message, len(message),
        )  # fmt: skip
        if failed:
            raise KernelFault(f"{self.name}: {message.value.decode()}")
        if COUNTED[0] is not None:
            found = (ctypes.c_uint64 * len(KINDS))()
            library.msl_counts(found)
            COUNTED[0].update(dict(zip(KINDS, found, strict=True)))
        for name, w in zip(self.output_names, written, strict=True):
            if not w.all():
                raise KernelFault(f"{self.name}: {int((w == 0).sum())} bytes of output {name} were never written")
        return [
            mx.array(o).view(d).reshape(s) if o.size else mx.zeros(s, dtype=d)
            for o, s, d in zip(outputs, output_shapes, output_dtypes, strict=True)
        ]


# 0: threadgroups from first to last; 1: from last to first.
ORDER = [0]
# What counting.h counts, in its order; where the sums go, None where nothing is counted.
KINDS = ("alu", "fma", "half_to_float", "bfloat_to_float", "to_small", "shuffle", "load", "matrix")
COUNTED: list[Counter[str] | None] = [None]


def _counted(text: str) -> str:
    """Floats and words of a text as the classes that count."""
    return re.sub(r"\b(float|uint)\b(?!\d)", r"c\1", text)


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Sums over all threads of all launches meanwhile, by kind: what a text does with floats, words, loads and matrices."""
    COUNTED[0] = Counter()
    try:
        yield COUNTED[0]
    finally:
        COUNTED[0] = None


def metal_kernel(name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, **options: Any) -> _Kernel:
    """As `mx.fast.metal_kernel`, on the CPU."""
    return _Kernel(name, input_names, output_names, source, **options)


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """`mx.fast.metal_kernel` is the emulator's until the block ends: the project's own launchers run unchanged."""
    before = mx.fast.metal_kernel
    mx.fast.metal_kernel = metal_kernel
    try:
        yield
    finally:
        mx.fast.metal_kernel = before


if __name__ == "__main__":
    _try_out()
