"""What the kernel tests share: the emulator as a fixture's body, float64 views, and error in units of the last place."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

MANTISSA = {mx.float32: 24, mx.float16: 11, mx.bfloat16: 8}
SMALLEST = {mx.float32: -126, mx.float16: -14, mx.bfloat16: -126}

# What a value in tiles of 8 is too large by: `row_tiles.tile_base`.
TOO_LARGE = {(mx.float16, 4): 64, (mx.bfloat16, 4): 128, (mx.float16, 8): 1024, (mx.bfloat16, 8): 128}


def f64(a: mx.array) -> np.ndarray:
    """The array's exact values as float64."""
    return np.array(a.astype(mx.float32)).astype(np.float64)


def five_of_16(case: int) -> list[int]:
    """Five of the numbers 1 to 16 for a case of many: 16 cases in a row have each of them five times."""
    return sorted(1 + (case + 3 * i) % 16 for i in range(5))


def ulp(value: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Distance between neighbours of `dtype` at a value."""
    exponent = np.floor(np.log2(np.maximum(np.abs(value), 2.0 ** SMALLEST[dtype])))
    return 2.0 ** (exponent + 1 - MANTISSA[dtype])


def worst_ulp(got: mx.array, want: np.ndarray, scale: np.ndarray) -> float:
    """The largest error beyond rounding to `got`'s type, in float32 ulps of `scale`.

    `scale` is the sum of the absolute values that a result was added up from: where they cancel, the result's own last place
    says nothing about the arithmetic. Half an ulp of the type itself is every kernel's due for its one rounding.
    """
    error = np.abs(f64(got) - want)
    beyond = np.maximum(error - 0.5 * ulp(want, got.dtype), 0) if got.dtype != mx.float32 else error
    return float((beyond / ulp(scale, mx.float32)).max(initial=0))
