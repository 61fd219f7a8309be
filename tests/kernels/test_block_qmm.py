"""block_qmm's two texts against float64, and every row count against one row, in the emulator."""

from functools import partial

import emulator
import mlx.core as mx
import numpy as np
import pytest
from checks import TOO_LARGE, f64, five_of_16, worst_ulp

from dflash_mlx.kernels import block_qmm as module
from dflash_mlx.kernels.block_qmm import block_qmm, block_qmm_kernel, block_qmm_ops, block_qmm_tiles_kernel, row_tile

pytestmark = pytest.mark.emulator

# A sum of K products takes K / 32 steps in a lane and 5 over the lanes; with random signs few of their roundings add up. What
# values are too large by when they are unpacked is taken off a group's bias, rounded once: 64 scales beside weights of some 5 are
# up to 7 ulps in all, where all x of a group have one sign; at one group 3.8 was the worst seen here, 8.1 on an H200. In matrix
# units a group's products are summed before they are scaled, in Metal's text of values that are too large (`TOO_LARGE`), whose
# sizes count then. The emulator rounds a step once; a GPU's units may cut bits off at each of the 2 to 8 steps of a group,
# towards zero.
ULPS, TILE_ULPS = 9, 4
TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
QUICK = [("float32", 4, 64), ("float16", 4, 32), ("bfloat16", 8, 128)]
ALL = [(t, b, g) for t in TYPES for b in (4, 8) for g in (32, 64, 128)]
# Of the two texts in matrix units that with 8 columns at once is Metal's, that with 16 CUDA's.
EIGHTS, TILES = (partial(block_qmm_tiles_kernel, tile=tile) for tile in (8, 16))
LAUNCHERS = {"plain": block_qmm_kernel, "eights": EIGHTS, "tiles": TILES}


def weights(n, k, dtype, group, bits, seed=0):
    keys = mx.random.split(mx.random.key(seed), 2)
    w = mx.random.normal((n, k), key=keys[0]).astype(dtype)
    x = mx.random.normal((16, k), key=keys[1]).astype(dtype)
    return x, mx.quantize(w, group_size=group, bits=bits)


def exact(x, q, group, bits):
    """The product and the sum of absolute products in float64, from the stored scales and biases."""
    # mx.dequantize rounds its multiply-add; from the integers it is exact.
    integers = f64(mx.dequantize(q[0], mx.ones(q[1].shape), mx.zeros(q[2].shape), group, bits))
    w = integers * np.repeat(f64(q[1]), group, axis=1) + np.repeat(f64(q[2]), group, axis=1)
    return f64(x) @ w.T, np.abs(f64(x)) @ np.abs(w).T


def check(dtype, bits, group, shapes, rows, launch=block_qmm_kernel):
    for n, k in shapes:
        x, q = weights(n, k, dtype, group, bits, seed=n * 1000 + k)
        want, scale = exact(x, q, group, bits)
        with emulator.emulated():
            one = mx.concatenate([launch(x[m : m + 1], *q, group, bits) for m in range(16)])
            if launch is EIGHTS:
                scale = scale + TOO_LARGE[dtype, bits] * (np.abs(f64(x)) @ np.repeat(np.abs(f64(q[1])), group, axis=1).T)
            assert worst_ulp(one, want, scale) <= (ULPS if launch is block_qmm_kernel else TILE_ULPS), (n, k)
            for m in rows:
                many = launch(x[:m], *q, group, bits)
                assert many.dtype == dtype and many.shape == (m, n)
                assert mx.array_equal(many, one[:m]), f"{m} rows differ from one row at N {n} K {k}"


@pytest.mark.parametrize("dtype, bits, group", QUICK)
def test_rows_are_right_and_do_not_know_how_many_they_are(dtype, bits, group):
    chunk = 2 * 32 // bits
    step = 32 * chunk
    # N around a simd group's 4 columns and a threadgroup's 16; K of one group, and around one step of the simd group.
    shapes = [(8, max(group, 32)), (31, step), (33, step + group), (17, 2 * step - group)]
    check(TYPES[dtype], bits, group, shapes, rows=(1, 2, 3, 5, 8, 15, 16))


@pytest.mark.parametrize(
    "tile, dtype, bits, group",
    [
        *((16, *case) for case in [("float16", 4, 64), ("bfloat16", 4, 128), ("bfloat16", 8, 32), ("float16", 8, 64)]),
        *((8, *case) for case in [("float16", 4, 128), ("bfloat16", 4, 32), ("bfloat16", 8, 64), ("float16", 8, 32)]),
    ],
)
def test_matrix_units_are_right_and_rows_do_not_know_how_many_they_are(tile, dtype, bits, group):
    # N around a threadgroup's 16 columns; groups fewer than the simd groups, one for each, and a step more.
    shapes = [(8, group), (17, 8 * group), (33, 9 * group)]
    check(TYPES[dtype], bits, group, shapes, rows=(1, 2, 7, 8, 9, 16), launch=partial(block_qmm_tiles_kernel, tile=tile))


@pytest.mark.parametrize("tile", [8, 16])
def test_matrix_units_with_other_numbers_of_simd_groups(tile):
    for simdgroups in (2, 16):
        launch = partial(block_qmm_tiles_kernel, simdgroups=simdgroups, tile=tile)
        check(mx.bfloat16, 4, 64, [(17, 18 * 64)], rows=(3,), launch=launch)


@pytest.mark.full
@pytest.mark.parametrize("launch", LAUNCHERS)
@pytest.mark.parametrize("dtype, bits, group", ALL)
def test_rows_over_random_shapes(dtype, bits, group, launch):
    if launch != "plain" and dtype == "float32":
        pytest.skip("matrix units multiply 16-bit numbers")
    rng = np.random.default_rng(bits * group)
    shapes = [(int(rng.integers(8, 70)), group * int(rng.integers(1, 1500 // group))) for _ in range(4)]
    rows = five_of_16(ALL.index((dtype, bits, group)))
    check(TYPES[dtype], bits, group, [(32, 1024), *shapes], rows=rows, launch=LAUNCHERS[launch])


def test_the_reference_is_mlx_and_agrees():
    x, q = weights(40, 512, mx.float32, 64, 4)
    with emulator.emulated():
        ours = block_qmm_kernel(x, *q, 64, 4)
    theirs = block_qmm_ops(x, *q, 64, 4)
    assert float(mx.abs(ours - theirs).max() / mx.abs(theirs).max()) < module.TOLERANCE[mx.float32]


@pytest.mark.parametrize("columns", [1, 2, 8])
def test_columns_of_a_simd_group_do_not_change_a_bit(columns):
    x, q = weights(37, 640, mx.float32, 64, 4)
    with emulator.emulated():
        assert mx.array_equal(block_qmm_kernel(x[:4], *q, 64, 4), block_qmm_kernel(x[:4], *q, 64, 4, columns=columns))


@pytest.mark.parametrize("columns, launch", [(32, TILES), (64, TILES), (64, EIGHTS)])
def test_columns_of_a_threadgroup_do_not_change_a_bit(columns, launch):
    x, q = weights(70, 640, mx.bfloat16, 64, 4)
    with emulator.emulated():
        want = launch(x, *q, 64, 4, columns=16, simdgroups=8)
        assert mx.array_equal(launch(x, *q, 64, 4, columns=columns, simdgroups=8), want)


def test_the_three_texts_agree():
    x, q = weights(40, 512, mx.float16, 64, 4)
    with emulator.emulated():
        plain = block_qmm_kernel(x, *q, 64, 4)
        for launch in (TILES, EIGHTS):
            assert mx.allclose(launch(x, *q, 64, 4), plain, rtol=2e-3, atol=0)


def test_a_device_is_given_its_own_text(monkeypatch):
    monkeypatch.delenv("DFLASH_MLX_KERNELS", raising=False)
    assert {c.kernel.form for c in module.candidates(mx.bfloat16, 4096, 64, 4)} == {"", "_EIGHTS"}
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    assert [c.kernel for c in module.candidates(mx.bfloat16, 4096, 64, 4)] == [module.KERNEL, module.TILES]


@pytest.mark.parametrize("launch, dtype", [(block_qmm_kernel, mx.float32), (TILES, mx.float16), (EIGHTS, mx.float16)])
def test_leading_axes_strides_and_slices(launch, dtype):
    x, q = weights(72, 256, dtype, 64, 4)
    x = x[:8]
    even = [a[::2] for a in q]
    with emulator.emulated():
        want = launch(x, *even, 64, 4)
        assert mx.array_equal(launch(x.reshape(2, 4, 256), *even, 64, 4), want.reshape(2, 4, 36))
        turned = mx.array(np.array(x).T.copy()).T
        assert mx.array_equal(launch(turned, *even, 64, 4), want)
        wide = mx.concatenate([x, x], axis=1)
        assert mx.array_equal(launch(wide[:, 256:], *even, 64, 4), want)


@pytest.mark.parametrize("launch", LAUNCHERS.values())
def test_a_row_that_is_not_finite_stays_alone(launch):
    x, q = weights(33, 256, mx.float16, 64, 4)
    spoilt = mx.concatenate([x[:2], mx.full((1, 256), float("nan"), dtype=mx.float16), x[3:5]])
    with emulator.emulated():
        got, want = launch(spoilt, *q, 64, 4), launch(x[:5], *q, 64, 4)
    keep = mx.array([0, 1, 3, 4])
    assert mx.array_equal(got[keep], want[keep]) and bool(mx.all(mx.isnan(got[2])))


def test_without_a_gpu_the_dispatcher_is_stock_mlx(monkeypatch):
    monkeypatch.delenv("DFLASH_MLX_KERNELS", raising=False)
    x, q = weights(40, 256, mx.float32, 64, 4)
    assert mx.array_equal(block_qmm(x, *q, 64, 4), block_qmm_ops(x, *q, 64, 4))


@pytest.mark.parametrize("change", ["17 rows", "3 bit", "float32 x with float16 scales", "tiny"])
def test_what_is_not_eligible_goes_to_mlx(change, monkeypatch):
    monkeypatch.setattr(module.autotune, "choose", lambda *a: pytest.fail("asked for a choice"))
    monkeypatch.setattr(module.autotune, "_plans", {})
    x, q = weights(40, 256, mx.float32, 64, 4)
    bits = 4
    if change == "17 rows":
        x = mx.concatenate([x, x])[:17]
    elif change == "3 bit":
        bits, q = 3, mx.quantize(mx.random.normal((40, 256)), group_size=64, bits=3)
    elif change == "tiny":
        x, q = x[:1, :64], mx.quantize(mx.random.normal((4, 64)), group_size=64, bits=4)
    else:
        q = (q[0], q[1].astype(mx.float16), q[2].astype(mx.float16))
    assert mx.array_equal(block_qmm(x, *q, 64, bits), block_qmm_ops(x, *q, 64, bits))


def test_weights_that_are_not_affine_are_no_kernels(monkeypatch):
    monkeypatch.setattr(module.autotune, "choose", lambda *a: pytest.fail("asked for a choice"))
    monkeypatch.setattr(module.autotune, "_plans", {})
    x, q = weights(40, 256, mx.float32, 64, 4)
    assert module.block_qmm_plan(x, *q[:2], None, 64, 4) is None


def test_five_texts_serve_sixteen_row_counts():
    assert {row_tile(m) for m in range(1, 17)} == {1, 2, 4, 8, 16}
    for m in (0, 17):
        with pytest.raises(ValueError, match=f"x has {m} rows; a launch takes 1 to 16"):
            row_tile(m)
