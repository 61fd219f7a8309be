"""support/products.py is a faster way to the same floats: the tests' products have the bits of MLX's."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import products
import pytest

MAPS = Path("/proc/self/maps")
ROW_BY_ROW, COLUMN_BY_COLUMN, AS_IT_IS, TRANSPOSED = 101, 102, 111, 112

pytestmark = pytest.mark.skipif(os.environ.get(products.VARIABLE, "mlx") == "mlx", reason="MLX's own products are in use here")


def sgemm(library):
    function = ctypes.CDLL(str(library)).cblas_sgemm
    one, number, array = ctypes.c_float, ctypes.c_int, ctypes.c_void_p
    function.argtypes = [number] * 6 + [one, array, number, array, number, one, array, number]
    function.restype = None
    return function


def mlx_library():
    [path] = {line.split()[-1] for line in MAPS.read_text().splitlines() if re.search(r"/libblas[^/]*\.so", line)}
    return path


def matrix(rng, order, rows, columns, odd):
    """One that may be wider in memory; `odd` ones hold zeros of both signs, infinities and the smallest and largest floats."""
    rows, columns = (rows, columns) if order == ROW_BY_ROW else (columns, rows)
    array = rng.standard_normal((rows, columns + rng.integers(0, 5)), dtype=np.float32)
    if odd:
        array[rng.random(array.shape) < 0.1] = rng.choice(np.array([0, -0.0, np.inf, 1e-42, 3e38], np.float32))
    return array


def differing(own, theirs, seed):
    """Whether the two write other bits in one random call."""
    rng = np.random.default_rng(seed)
    order, *sides = (int(rng.choice(two)) for two in ((ROW_BY_ROW, COLUMN_BY_COLUMN), *[(AS_IT_IS, TRANSPOSED)] * 2))
    m, n, k = (int(size) for size in rng.integers(seed % 9 > 0, (40, 70, 300)))
    alpha, beta = float(rng.choice([1, 1, 0.37, 0, -2])), float(rng.choice([0, 0, 1, 0.5]))
    shapes = [(a, b) if side == AS_IT_IS else (b, a) for side, (a, b) in zip(sides, ((m, k), (k, n)), strict=True)]
    a, b, c = (matrix(rng, order, *shape, odd=seed % 5 == 0) for shape in (*shapes, (m, n)))
    made = []
    for function in (own, theirs):
        out = c.copy()
        at = [x for array in (a, b) for x in (array.ctypes.data, max(1, array.shape[1]))]
        function(order, *sides, m, n, k, alpha, *at, beta, out.ctypes.data, max(1, out.shape[1]))
        made.append(out)
    # A NaN is a NaN: which of two operands' it is, no text says.
    return not np.array_equal(*(np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32) for x in made))


def test_every_product_has_the_bits_of_the_one_in_mlxs_wheel():
    own, theirs = sgemm(os.environ[products.VARIABLE]), sgemm(mlx_library())
    assert not [seed for seed in range(400) if differing(own, theirs, seed)]


def test_a_product_that_is_rounded_once_is_seen(tmp_path):
    assert products.build(tmp_path / "fused.so", [*products.OPTIONS, "-ffp-contract=fast"])
    own, theirs = sgemm(tmp_path / "fused.so"), sgemm(mlx_library())
    assert any(differing(own, theirs, seed) for seed in range(40))


MADE = """
import ctypes, os
import mlx.core as mx
made = ctypes.c_long.in_dll(ctypes.CDLL(os.environ["DFLASH_MLX_TEST_PRODUCTS"]), "products_made")
before = made.value
mx.eval(mx.ones((5, 7)) @ mx.ones((7, 11)))
print(made.value - before)
"""


def test_mlx_uses_them_here_and_in_a_child(capsys):
    exec(MADE, {})
    assert capsys.readouterr().out == "1\n"
    assert subprocess.run([sys.executable, "-c", MADE], capture_output=True, text=True, check=True).stdout == "1\n"
