"""Every kernel's checks on the GPU at hand: right in float64, views too, and each row count bit-equal to one row.

    python tests/support/msl/on_gpu.py block_qmm              one kernel; exit status 1 and the failed check if it is wrong
    python tests/support/msl/on_gpu.py matrix_units           can a simd group multiply matrices there?
    python tests/support/msl/on_gpu.py block_qmm --made-up    the emulator is the GPU, and shapes are small

The checks are those that tests/kernels makes in the emulator. Only the launches go to the GPU: what they are compared with is
computed on the CPU. Times are nobody's business here.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
from functools import partial
from pathlib import Path

import emulator
import mlx.core as mx

TESTS = Path(__file__).parents[2] / "kernels"
ROWS = range(1, 17)


def tests_of(name: str):
    """The module of tests/kernels."""
    spec = importlib.util.spec_from_file_location(f"on_gpu_{name}", TESTS / f"test_{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def products(launch: str, large: bool) -> None:
    t, v = tests_of("block_qmm"), tests_of("views")
    kernel, tiles = t.LAUNCHERS[launch], launch != "plain"
    for dtype, bits, group in t.ALL if large else t.QUICK[1:]:
        if dtype != "float32" or not tiles:
            shapes = [(8, group), (33, 9 * group), *[(1024, 4096)] * large]
            t.check(t.TYPES[dtype], bits, group, shapes, ROWS if large else (2, 9), kernel)
    t.test_a_row_that_is_not_finite_stays_alone(kernel)
    t.test_leading_axes_strides_and_slices(kernel, mx.float16)
    v.test_block_qmm_takes_rows_and_weights_from_the_middle_of_a_buffer(kernel, mx.bfloat16, 4, 64)


def linear(large: bool) -> None:
    t, v = tests_of("block_linear"), tests_of("views")
    for (form, dtype, bits, group), tile in itertools.product(t.QUICK if large else t.QUICK[-1:], (8, 16)):
        launch = partial(t.block_linear_kernel, tile=tile)
        t.check(form, t.TYPES[dtype], bits, group, [(34, 9 * group), *[(1024, 4096)] * large], ROWS if large else (3,), launch)
        t.test_heads_as_attention_gives_them_are_their_rows_bit_for_bit("residual", bits, group, 32, tile)
    v.test_block_linear_takes_views(4, 64)


def heads(large: bool) -> None:
    t, v = tests_of("block_heads"), tests_of("views")
    for form in t.FORMS:
        for dtype in t.TYPES if large else ("float16",):
            t.check(t.FORMS[form], t.TYPES[dtype])
    for K, S in ((8, 8), (16, 5), (1, 64)) if large else ():
        t.check(t.Heads(32, 8, 128, 128, False, t.EPS), mx.bfloat16, K, S, rows=(1, K))
    t.test_a_row_that_is_not_finite_stays_alone()
    v.test_block_heads_takes_views()


def gather(large: bool) -> None:
    t, v = tests_of("block_gather_qmm"), tests_of("views")
    for indices in ([3, 3, 3, 3], [1, 1, 2, 2, 1, 1, 2, 2, 0, 3], [3, 2, 1, 0] * 8 + [2] * 32):
        t.test_pairs_find_their_expert_and_each_other(indices)
    if large:
        for dtype, bits in ((dtype, bits) for dtype in t.TYPES for bits in (4, 8)):
            t.test_random_shapes(dtype, bits)
    v.test_block_gather_qmm_takes_views()


def head(large: bool) -> None:
    t, v = tests_of("head_argmax"), tests_of("views")
    for vocabulary, h, dtype, bits in t.EDGES if large else t.EDGES[3:]:
        t.check(*t.made(vocabulary, h, t.TYPES[dtype], bits))
    for dtype in t.TYPES if large else ():
        t.check(*t.made(32000, 1024, t.TYPES[dtype], 4))
    for cap, biased in ((30.0, False), (5.0, True)):
        t.test_soft_cap_and_logit_bias(cap, biased)
    t.test_the_lowest_id_wins_a_tie_and_the_margin_is_zero((127, 128))
    t.test_the_only_large_logit_is_found_anywhere(298)
    t.test_a_nan_logit_is_chosen_as_mlx_does_and_its_margin_is_nan()
    t.test_the_reduction_over_many_stripes()
    v.test_head_argmax_takes_views(mx.float16, 4)


def attention(large: bool) -> None:
    t, v = tests_of("block_attention"), tests_of("views")
    for dtype, hq, hk, d in t.HEADS if large else ():
        t.check(*t.made(700, hq=hq, hk=hk, d=d, dtype=t.TYPES[dtype]), rows=ROWS)
    t.check(*t.made(258, hq=6, hk=2, m=3), rows=(1, 2), window=20)
    t.check(*t.made(70, hq=6, hk=2, m=3), rows=(), start=250)
    t.test_of_a_buffer_only_the_keys_held_are_seen(33)
    t.test_sinks_and_a_drafters_full_block()
    t.test_a_slice_of_a_longer_cache_is_read_in_place()
    t.test_a_later_row_that_is_not_finite_spoils_no_earlier_row()
    v.test_block_attention_takes_views(mx.float16)


def accept(large: bool) -> None:
    t, v = tests_of("accept"), tests_of("views")
    for n in (1, 7, 15, 65):
        t.test_every_place_of_the_first_difference(n)
    v.test_accept_takes_views()


def recurrence(large: bool) -> None:
    t, v = tests_of("gated_delta"), tests_of("views")
    for dtype in t.TYPES if large else ():
        t.check(*t.made(16, hk=16, hv=32, dk=128, dv=128, dtype=t.TYPES[dtype]), rows=(1, 9, 16))
    t.check(*t.made(3), rows=(2,))
    t.test_heads_sequences_and_columns_that_decay_by_themselves()
    v.test_gated_delta_takes_views()


def matrix_units(large: bool) -> None:
    """A product of two 8 x 8 matrices of a simd group, in both types that kernels multiply."""
    for kind in ("half", "bfloat"):
        source = f"""
        simdgroup_matrix<{kind}, 8, 8> a, b;
        simdgroup_matrix<float, 8, 8> c;
        const int lane = int(thread_index_in_simdgroup);
        for (int i = 0; i < 2; ++i) {{
            a.thread_elements()[i] = {kind}(2.0f);
            b.thread_elements()[i] = {kind}(float(x[lane]));
            c.thread_elements()[i] = 1.0f;
        }}
        simdgroup_multiply_accumulate(c, a, b, c);
        for (int i = 0; i < 2; ++i) y[2 * lane + i] = c.thread_elements()[i];
        """
        with emulator.emulated():
            kernel = mx.fast.metal_kernel(
                name=f"matrix_units_{kind}",
                input_names=["x"],
                output_names=["y"],
                source=source,
                header="#include <metal_simdgroup_matrix>\n",
            )
            shape = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(64,)], "output_dtypes": [mx.float32]}
            (y,) = kernel(inputs=[mx.full((32,), 3.0)], **shape)
            assert y.tolist() == [49.0] * 64, f"{kind}: 8 products of 2 and 3, and 1, are {y.tolist()[:4]}"


# What checks each registered text, by its name.
CHECKS = {
    "block_qmm": lambda large: products("plain", large),
    "block_qmm_tiles": lambda large: [products(launch, large) for launch in ("eights", "tiles")],
    "block_linear": linear,
    "block_heads": heads,
    "block_gather_qmm": gather,
    "accept": accept,
    "head_argmax": head,
    "block_attention": attention,
    "gated_delta": recurrence,
}


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("name", choices=[*CHECKS, "matrix_units"])
    p.add_argument("--made-up", action="store_true", help="the emulator is the GPU")
    args = p.parse_args(arguments)
    mx.set_default_device(mx.cpu)
    if not args.made_up:
        emulator.emulated = lambda: mx.stream(mx.gpu)
    ({**CHECKS, "matrix_units": matrix_units})[args.name](not args.made_up)


if __name__ == "__main__":
    sys.exit(main())
