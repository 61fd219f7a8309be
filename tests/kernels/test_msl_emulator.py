"""The emulator finds what a Mac would punish: one faulty kernel for each fault, and sound kernels that it must let pass."""

import emulator
import mlx.core as mx
import numpy as np
import pytest
from emulator import CompileFault, KernelFault

from dflash_mlx.kernels import REGISTRY

pytestmark = pytest.mark.emulator

THREADS = 64
BARRIER = "threadgroup_barrier(metal::mem_flags::mem_threadgroup);"


def run(source, inputs=None, threads=THREADS, groups=1, template=(), out=None, dtype=mx.float32, header="", order=0):
    """One kernel `y = f(x, n)` over `groups` threadgroups of `threads`; TID is a thread's index in its threadgroup."""
    source = source.replace("TID", "thread_index_in_threadgroup")
    inputs = inputs or [mx.arange(threads * groups).astype(mx.float32), mx.array([3], dtype=mx.int32)]
    kernel = emulator.metal_kernel("faulty", ["x", "n"], ["y"], source, header=header)
    before, emulator.ORDER[0] = emulator.ORDER[0], order
    try:
        return kernel(
            inputs=inputs,
            template=template,
            grid=(threads * groups, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[out or (threads * groups,)],
            output_dtypes=[dtype],
        )[0]
    finally:
        emulator.ORDER[0] = before


def test_a_sound_kernel_runs_with_barriers_and_simd_functions():
    y = run(f"""
        threadgroup float tile[64];
        const uint t = TID;
        tile[t] = x[thread_position_in_grid.x];
        {BARRIER}
        const float other = tile[63 - t];
        y[thread_position_in_grid.x] = simd_sum(other) + float(n[0]);
    """)
    want = np.repeat([np.arange(32, 64).sum() + 3, np.arange(32).sum() + 3], 32)
    assert np.array_equal(np.array(y), want.astype(np.float32))


@pytest.mark.parametrize("order", [0, 1])
def test_threadgroups_run_in_either_order(order):
    y = run(
        "y[thread_position_in_grid.x] = x[thread_position_in_grid.x] + threadgroup_position_in_grid.x;", groups=3, order=order
    )
    assert np.array_equal(np.array(y), np.arange(192) + np.arange(192) // 64)


MATRICES = """
    simdgroup_matrix<float, 8, 8> a, b, c;
    const int lane = int(TID) % 32;
    const int row = (lane >> 4) * 4 + (lane >> 1) % 4, column = (lane >> 3) % 2 * 4 + lane % 2 * 2;
    for (int i = 0; i < 2; ++i) {
        a.thread_elements()[i] = x[8 * row + column + i];
        b.thread_elements()[i] = x[64 + 8 * row + column + i];
        c.thread_elements()[i] = 1.0f;
    }
    MULTIPLY
    for (int i = 0; i < 2; ++i) y[TID / 32 * 64 + 8 * row + column + i] = c.thread_elements()[i];
"""


def test_matrices_of_a_simd_group_are_multiplied():
    x = np.random.default_rng(0).integers(-9, 9, 128).astype(np.float32)
    y = run(MATRICES.replace("MULTIPLY", "simdgroup_multiply_accumulate(c, a, b, c);"), [mx.array(x), mx.array([0])], out=(128,))
    want = x[:64].reshape(8, 8) @ x[64:].reshape(8, 8) + 1
    assert np.array_equal(np.array(y).reshape(2, 8, 8), [want, want])


def test_a_matrix_product_that_not_all_reach_is_a_fault():
    some = MATRICES.replace("MULTIPLY", "if (lane < 31) simdgroup_multiply_accumulate(c, a, b, c);")
    with pytest.raises(KernelFault, match="line 10: simd function not reached by all"):
        run(some, [mx.zeros((128,)), mx.array([0])], out=(128,))
    with pytest.raises(KernelFault, match="line 10: a matrix needs whole simd groups; the threadgroup has 48 threads"):
        run(
            MATRICES.replace("MULTIPLY", "simdgroup_multiply_accumulate(c, a, b, c);"),
            [mx.zeros((128,)), mx.array([0])],
            threads=48,
        )


@pytest.mark.parametrize("name, source, message", [
    ("read beyond an input", "y[TID] = x[TID + 1];", "line 1: out of bounds: x"),
    ("write before an output", "\ny[int(TID) - 1] = 0.0f;", "line 2: out of bounds: y"),
    ("threadgroup array overrun",
     "threadgroup float t[32];\nt[TID] = 0.0f;\ny[TID] = 0.0f;",
     "line 2: out of bounds: t"),
    ("unset threadgroup memory",
     f"threadgroup float t[128];\nt[TID] = 0.0f;\n{BARRIER}\n"
     "y[TID] = t[TID + 64];",
     "line 4: read before any write: t"),
    ("barrier missing",
     "threadgroup float t[64];\nt[TID] = 0.0f;\ny[TID] = t[TID ^ 1];",
     "line 3: (race: t|read before any write: t)"),
    ("two writers",
     "threadgroup float t[1];\nt[0] = float(TID);\n" + BARRIER + "\ny[TID] = t[0];",
     "line 2: race: t"),
    ("read, then written, with no barrier between",
     f"threadgroup float t[64];\nt[TID] = 1.0f;\n{BARRIER}\n"
     "const float a = t[(TID + 1) % 64];\nt[TID] = a;\ny[TID] = a;",
     "line (4|5): race: t"),
    ("a simd-group barrier does not order two simd groups",
     "threadgroup float t[64];\nt[TID] = 1.0f;\nsimdgroup_barrier(metal::mem_flags::mem_threadgroup);\n"
     "y[TID] = t[(TID + 32) % 64];",
     "line 4: (race: t|read before any write: t)"),
    ("two threads write one output word", "y[TID / 2] = 0.0f;", "line 1: race: y"),
    ("barrier in a branch",
     f"if (TID < 40) {{\n{BARRIER}\n}}\ny[TID] = 0.0f;",
     "line 2: barrier not reached by all"),
    ("two different barriers",
     f"if (TID < 32) {{\n{BARRIER}\n}} else {{\n{BARRIER}\n}}\ny[TID] = 0.0f;",
     "line 2: barrier not reached by all"),
    ("simd function in a branch",
     "float s = 0.0f;\nif (thread_index_in_simdgroup < 31) s = simd_sum(1.0f);\ny[TID] = s;",
     "line 2: simd function not reached by all"),
    ("simd function after some have ended",
     "y[TID] = 0.0f;\nif (thread_index_in_simdgroup == 7) return;\nsimd_max(1.0f);",
     "line 3: simd function not reached by all"),
    ("an output word left out", "if (TID) y[TID] = 0.0f;", "4 bytes of output y were never written"),
    ("misaligned vector load",
     "const device vec<float, 4>* p = (const device vec<float, 4>*)(x + 1);\nconst vec<float, 4> v = p[0];\n"
     "y[TID] = v[0];",
     "line 2: misaligned: x"),
    ("a wide read of threadgroup memory declared for halves",
     f"threadgroup half t[256];\nfor (int i = 0; i < 4; ++i) t[4 * TID + i] = half(1.0f);\n{BARRIER}\n"
     "const vec<half, 4> v = ((threadgroup vec<half, 4>*)t)[TID];\ny[TID] = float(v[0]);",
     "line 4: misaligned: t is an array of elements of 2 bytes, read or written by 8"),
    ("a wide write of threadgroup memory declared for words",
     "threadgroup uint t[256];\n((threadgroup vec<uint, 4>*)t)[TID] = vec<uint, 4>(1u);\ny[TID] = 0.0f;",
     "line 2: misaligned: t is an array of elements of 4 bytes, read or written by 16"),
    ("too much threadgroup memory", "threadgroup float t[8193];\ny[TID] = 0.0f;", "line 1: 32772 bytes"),
    ("a loop that never ends", "while (true) simd_max(1.0f);\ny[TID] = 0.0f;", "line 1: does not end"),
    ("shuffle from no lane", "y[TID] = simd_shuffle(1.0f, 32);", "line 1: simd shuffle from lane 32"),
])  # fmt: skip
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.quick(12)
def test_a_fault_is_reported_with_its_line(name, source, message, order):
    with pytest.raises(KernelFault, match=message):
        run(source, order=order)


def test_threadgroup_memory_declared_of_vectors_is_read_by_vectors_and_by_elements():
    y = run(f"""
        threadgroup vec<float, 4> t[64];
        t[TID] = vec<float, 4>(x[TID]);
        {BARRIER}
        y[TID] = ((threadgroup float*)t)[4 * (63 - TID) + 1];
    """)
    assert np.array_equal(np.array(y), np.arange(63, -1, -1))


@pytest.mark.parametrize("dtype, kind", [(mx.float32, "float"), (mx.float16, "half"), (mx.bfloat16, "bfloat"), (mx.int32, "int")])
def test_a_view_is_read_where_it_begins_in_its_buffer(dtype, kind):
    source = f"""
        const vec<{kind}, 4> four = ((const device vec<{kind}, 4>*)x)[TID];
        y[TID] = float(four[3]);
    """
    long, n = mx.arange(300).astype(dtype), mx.array([0])
    for begin in (0, 4, 8):
        assert mx.array_equal(run(source, [long[begin : begin + 256], n]), long[begin + 3 : begin + 256 : 4])
    for begin in (1, 2, 3, 6):
        with pytest.raises(KernelFault, match=f"line 2: misaligned: x at byte {begin * dtype.size % 16} needs a"):
            run(source, [long[begin : begin + 256], n])
    # One that MLX would copy lies at the beginning of its copy.
    assert run(source, [mx.stack([long, long], axis=1)[1:257, 1], n])[0].item() == 4


def test_threadgroups_may_not_share_an_output_word():
    with pytest.raises(KernelFault, match="line 1: race: y"):
        run("y[TID] = 0.0f;", groups=2, out=(64,))


def test_a_simd_group_barrier_orders_its_own_threads():
    source = """
        threadgroup float t[64];
        t[TID] = x[TID];
        {}
        y[TID] = t[TID ^ 1];
    """
    y = run(source.format("simdgroup_barrier(metal::mem_flags::mem_threadgroup);"))
    assert np.array_equal(np.array(y), np.arange(64) ^ 1)
    with pytest.raises(KernelFault, match="line 5: (race|read before)"):
        run(source.format(""))


def test_a_barrier_for_threadgroup_memory_does_not_order_device_memory():
    source = """
        const uint t = TID;
        y[t] = x[t];
        threadgroup_barrier(metal::mem_flags::{});
        const float other = y[63 - t];
        y[64 + t] = other;
    """
    assert np.array_equal(np.array(run(source.format("mem_device"), out=(128,))[64:]), np.arange(63, -1, -1))
    with pytest.raises(KernelFault, match="line 5: race: y"):
        run(source.format("mem_threadgroup"), out=(128,))


@pytest.mark.parametrize("source, message", [
    ("const device int* p = n; y[TID] = float(p[0]);", "conversion"),  # n has 1 element: constant
    ("const constant float* p = x; y[TID] = p[0];", "conversion"),  # x has 64: device
    ("device float* p = (device float*)x; y[TID] = p[0];", "no matching function"),  # casts const away
    ("const float* p = x; y[TID] = p[0];", "pointer without an address space"),
    ("threadgroup float t[4]; device float* p = t; y[TID] = p[0];", "conversion"),
    ("y[TID] = 1.0 * double(x[0]);", "'double' does not exist in Metal"),
    ("if (true) { threadgroup float t[4]; }", "outermost scope"),
    ("x[TID] = 1.0f;", "store through a pointer to const"),  # an input is const
    ("auto v = x[0]; y[TID] = v;", "name the type"),
    ("y[TID] = undeclared;", "undeclared"),
    ("\nhalf a[4]; const thread vec<half, 2>* p = (const thread vec<half, 2>*)a; y[TID] = float(p[0][0]);", "line 2: a thread's"),
    ("half a[4]; y[TID] = float(reinterpret_cast<thread vec<half, 2>&>(a)[0]);", "aligned for its elements"),
])  # fmt: skip
def test_what_a_mac_would_not_compile_does_not_compile(source, message):
    with pytest.raises(CompileFault, match=message):
        run(source)


def test_bfloat_needs_a_cast_and_rounds_to_nearest_even():
    with pytest.raises(CompileFault):
        run("y[TID] = x[TID];", dtype=mx.bfloat16)
    values = np.concatenate(
        [np.random.default_rng(0).normal(size=4000) * 10.0 ** np.arange(-20, 20).repeat(100), [65504, 65520, 1e-8, np.inf]]
    )
    x = mx.array(np.resize(values, 4096).astype(np.float32))
    for dtype in (mx.bfloat16, mx.float16):
        y = run(
            "y[thread_position_in_grid.x] = T(x[thread_position_in_grid.x]);",
            [x, mx.array([1])],
            groups=64,
            template=[("T", dtype)],
            dtype=dtype,
        )
        assert mx.array_equal(y, x.astype(dtype)), dtype
        back = run("y[thread_position_in_grid.x] = float(x[thread_position_in_grid.x]);", [y, mx.array([1])], groups=64)
        assert mx.array_equal(back, y.astype(mx.float32)), dtype


def test_the_signature_follows_mlx():
    x, s = mx.zeros((2, 4)), mx.array(5, dtype=mx.int32)
    code = emulator.generate(
        "k", ["x", "n"], [x, s], ["y"], [mx.float16], "// x_shape x_ndim threads_per_grid", "", [("B", 4), ("C", True)]
    )
    assert "template <int B, bool C>" in code and "custom_kernel_k<4, true>(" in code
    wanted = [
        "const float>  x",
        "const int>  x_shape",
        "const int x_ndim",
        "const int32_t n",
        "float16_t>  y",
        "uint3 threads_per_grid",
    ]
    at = [code.index(w) for w in wanted]
    assert at == sorted(at) and "x_strides" not in code


def test_strides_of_a_slice_are_handed_over():
    x = mx.arange(48).astype(mx.float32).reshape(4, 12)[:, :5]
    kernel = emulator.metal_kernel(
        "strided", ["x"], ["y"], "uint i = thread_position_in_grid.x;\ny[i] = x[i / 5 * x_strides[0] + i % 5 * x_strides[1]];",
        ensure_row_contiguous=False,
    )  # fmt: skip
    launch = {"grid": (20, 1, 1), "threadgroup": (20, 1, 1), "output_shapes": [(4, 5)], "output_dtypes": [mx.float32]}
    assert mx.array_equal(kernel(inputs=[x], **launch)[0], x)
    launch["grid"], launch["output_shapes"] = (40, 1, 1), [(40,)]
    with pytest.raises(KernelFault, match="out of bounds: x"):
        kernel(inputs=[x], **launch)


def test_a_grid_that_is_no_multiple_and_too_many_threads_are_refused():
    with pytest.raises(KernelFault, match="1024 threads"):
        run("y[thread_position_in_grid.x] = 0.0f;", threads=1056)
    kernel = emulator.metal_kernel("k", ["x"], ["y"], "y[0] = 0.0f;")
    with pytest.raises(KernelFault, match="multiple"):
        kernel(inputs=[mx.zeros((8,))], grid=(33, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(1,)], output_dtypes=[mx.float32])


def test_every_metal_file_for_xcrun_is_written():
    import metal_text

    texts = metal_text.collect()
    loaded = [
        kernel.name for entry in REGISTRY.values() if entry.text and entry.name != "block_linear" for kernel in entry.load()
    ]
    forms = [f"block_linear{units}{form}" for form in metal_text.LINEAR for units in ("", "_EIGHTS")] + ["block_qmm_tiles_EIGHTS"]
    assert {n.rstrip("0123456789_") for n in texts} == {f"dflash_{n}" for n in (*loaded, *forms)}
    assert all(text.count("[[kernel]]") == (2 if "template <" in text else 1) for text in texts.values())
