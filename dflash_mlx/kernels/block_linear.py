"""A layer's product of 1..16 rows with the norm before it and the sum or gate after it, in one launch.

For passes whose time is that of their launches.

    x -- RMSNorm --> Linear -->        one launch for two         norm=(weight, eps)
              o_proj, down_proj --> + residual                    residual=r
    x -- RMSNorm --> gate, up --> silu(gate) * up                 gated=True; W = [gate; up]
    attention --> heads side by side --> o_proj                   heads=True; x as attention gives it, [heads, M, D]

In matrix units, so for 16-bit types: row_tiles.py on Metal, tile_product.py on CUDA. Weights may be affine or of x's type. A row
gets the same bits among few and many. Knows arrays only; `fusion` sees which layers belong together.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from . import autotune
from .block_qmm import MAX_ROWS, TILE_TYPES, TOLERANCE, TRIAL_BYTES, in_rows, own_tile, tile_sizes
from .launch import Kernel
from .row_tiles import row_tiles
from .small_batch import matmul_as_gemv_plan
from .tile_product import tile_product
from .trials import lazy

# The form of nothing but a product, for what all forms have in common.
KERNEL = tile_product("block_linear", quantized=True)
# Row counts at which it is tried: traced passes are filled up to at least 4.
_ROWS = (4, MAX_ROWS)
# A norm before the product and a gate after it round once each.
_ROUNDINGS = 2

Launch = Callable[..., mx.array]


class Weights(NamedTuple):
    """W[N, K]: w uint32 [N, K * bits / 32] with scales and biases [N, K / group_size]; or w [N, K] of 16 bits each, without."""

    w: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    group_size: int = 64
    bits: int = 16

    @property
    def arrays(self) -> list[mx.array]:
        return [a for a in (self.w, self.scales, self.biases) if a is not None]

    def copied(self) -> Weights:
        """The same values in memory of their own."""
        return Weights(*(a if a is None else a + 0 for a in self[:3]), self.group_size, self.bits)


def block_linear_ops(
    x: mx.array,
    weights: Weights,
    norm: tuple[mx.array, float] | None = None,
    residual: mx.array | None = None,
    gated: bool = False,
    product: Launch | None = None,
    heads: bool = False,
) -> mx.array:
    """[..., K], or [..., K / D, M, D] if heads, to [..., N], or N / 2 if gated: the answer, in MLX's own operations.

    product: of (x, w), in place of MLX's for weights that are not quantized.
    """
    if heads:
        x = x.swapaxes(-3, -2).flatten(-2)
    if norm is not None:
        x = mx.fast.rms_norm(x, *norm)
    if weights.scales is not None:
        w, scales, biases, group_size, bits = weights
        y = mx.quantized_matmul(x, w, scales, biases, transpose=True, group_size=group_size, bits=bits)
    else:
        y = product(x, weights.w) if product else x @ weights.w.T
    if gated:
        gate, up = mx.split(y, 2, axis=-1)
        y = nn.silu(gate) * up
    return y if residual is None else residual + y


def block_linear_kernel(
    x: mx.array,
    weights: Weights,
    norm: tuple[mx.array, float] | None = None,
    residual: mx.array | None = None,
    gated: bool = False,
    columns: int | None = None,
    simdgroups: int | None = None,
    tile: int | None = None,
    heads: bool = False,
) -> mx.array:
    """Launch. tile: as in `block_qmm_tiles_kernel`.

    Shapes:
      - x: [..., K] float16 or bfloat16, its leading axes 1..16 rows together; if heads, [1, K / D, M, D], and no norm
      - norm: weight [K] in x's type, eps; residual: [..., N], N / 2 if gated, in x's type
    Returns:
      - y: [..., N], N / 2 if gated, in x's type
    """
    (scale, eps), n = norm or (None, None), weights.w.shape[0]
    launch = prepare(x.shape, x.dtype, n, *weights[3:], eps, residual is not None, gated, columns, simdgroups, tile, heads)
    return launch(x, weights, scale, residual)


def prepare(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    n: int,
    group_size: int,
    bits: int,
    eps: float | None,
    residual: bool,
    gated: bool,
    columns: int | None = None,
    simdgroups: int | None = None,
    tile: int | None = None,
    heads: bool = False,
) -> Launch:
    """`block_linear_kernel` for x [..., K] of one shape and type, as a function of (x, weights, norm's weight, residual).

    Args:
      eps: of the norm; None: there is none.
    Raises:
      ValueError: for rows outside 1..16.
    """
    shape = _in_rows(shape) if heads else shape
    rows, out = math.prod(shape[:-1]), n // 2 if gated else n
    columns, threadgroup, template = tile_sizes(rows, dtype, n, group_size, bits, columns, simdgroups)
    if eps is not None:
        template.append(("EPS", struct.unpack("i", struct.pack("f", eps))[0]))
    launch = _kernel(bits, eps is not None, residual, gated, tile, heads).prepared(
        template=template,
        grid=(-(-n // columns) * threadgroup, 1, 1),
        threadgroup=(threadgroup, 1, 1),
        output_shapes=[(*shape[:-1], out)],
        output_dtypes=[dtype],
    )

    def run(x: mx.array, weights: Weights, scale: mx.array | None = None, residual: mx.array | None = None) -> mx.array:
        arrays = [x if heads else in_rows(x, rows), *weights.arrays, scale, residual]
        return launch(inputs=[a for a in arrays if a is not None])[0]

    return run


def _in_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[..., K / D, M, D] to [..., M, K]."""
    *lead, heads, rows, D = shape
    return (*lead, rows, heads * D)


def _kernel(bits: int, norm: bool, residual: bool, gated: bool, tile: int | None = None, heads: bool = False) -> Kernel:
    text = row_tiles if (tile or own_tile()) == 8 else tile_product
    return text(KERNEL.name, bits < 16, norm, residual, gated, heads)


def block_linear_plan(
    x: mx.array, weights: Weights, eps: float | None, residual: bool, gated: bool, heads: bool = False
) -> Launch | None:
    """A function of (x, weights, norm's weight, residual) by a kernel; None: MLX's operations serve them."""
    scales = None if weights.scales is None else weights.scales.dtype
    if weights.scales is not None and weights.biases is None:  # not affine
        return None
    types = x.dtype, weights.w.dtype, scales
    return autotune.planned(_plan, x.shape, types, weights.w.shape[0], *weights[3:], eps, residual, gated, heads)


def _plan(
    shape: tuple[int, ...],
    types: tuple[mx.Dtype, mx.Dtype, mx.Dtype | None],
    n: int,
    group_size: int,
    bits: int,
    eps: float | None,
    residual: bool,
    gated: bool,
    heads: bool,
) -> Launch | None:
    """`block_linear_plan` for arrays of these shapes and types."""
    D, given, (dtype, w, scales) = shape[-1], shape, types
    shape = _in_rows(shape) if heads else shape
    k = shape[-1]
    eligible = (
        # No vector of x lies in two heads.
        (not heads or D % 8 == 0 and eps is None and math.prod(shape[:-2]) == 1)
        and 1 <= math.prod(shape[:-1]) <= MAX_ROWS
        and dtype in TILE_TYPES
        and (bits in (4, 8) and scales == dtype or bits == 16 and w == dtype)
        and group_size in (32, 64, 128)
        and k % group_size == 0
        and n % (16 if gated else 8) == 0
        and n * k // group_size >= 8  # the scales, so all arrays of two axes, are certainly in device memory
    )
    if not eligible:
        return None
    kernel = _kernel(bits, eps is not None, residual, gated, heads=heads)
    form = kernel.form.replace("_EIGHTS", "").replace("_", " ")
    about = f"product{form} {dtype} {bits} bit group {group_size} N {n} K {k}"
    about += f" of {D}" if heads else ""
    made = partial(trials, n, k, group_size, bits, dtype, eps, residual, gated, D=D if heads else 0)
    question = autotune.Question(about, (autotune.Candidate(kernel),), made, _ROWS, nbytes=n * k * bits // 8)
    if not autotune.choose(question, math.prod(shape[:-1])):
        return None
    return prepare(given, dtype, n, group_size, bits, eps, residual, gated, heads=heads)


def made(
    n: int, k: int, group_size: int, bits: int, dtype: mx.Dtype, norm: bool, residual: bool, gated: bool, rows: int = MAX_ROWS
) -> tuple[mx.array, Weights, mx.array | None, mx.array | None]:
    """Made-up x [rows, K], weights, the norm's weight and residual of these forms."""
    keys = mx.random.split(mx.random.key(n + k), 4)
    w = (mx.random.normal((n, k), key=keys[0]) * k**-0.5).astype(dtype)
    weights = Weights(w) if bits == 16 else Weights(*mx.quantize(w, group_size=group_size, bits=bits), group_size, bits)
    out = n // 2 if gated else n
    x, r = (mx.random.normal((rows, size), key=key).astype(dtype) for size, key in ((k, keys[1]), (out, keys[2])))
    scale = mx.random.uniform(0.5, 2, (k,), key=keys[3]).astype(dtype) if norm else None
    return x, weights._replace(group_size=group_size), scale, r if residual else None


def trials(
    n: int,
    k: int,
    group_size: int,
    bits: int,
    dtype: mx.Dtype,
    eps: float | None,
    residual: bool,
    gated: bool,
    ways: Sequence[autotune.Candidate],
    D: int = 0,
) -> Callable[[int], autotune.Trial]:
    """Comparisons with MLX's operations on made-up values of the real shape, for a row count.

    D: numbers of a head, for an x of heads; 0: an x of rows.
    """
    norm = eps is not None
    x, first, scale, r = made(n, k, group_size, bits, dtype, norm, residual, gated)
    copies = min(16, 1 + TRIAL_BYTES // sum(a.nbytes for a in first.arrays))
    weights = [first, *(first.copied() for _ in range(copies - 1))]
    mx.eval(x, scale, r, [w.arrays for w in weights])

    def one(m: int) -> autotune.Trial:
        some, rest, turn = x[None, :m], None if r is None else r[None, :m], itertools.cycle(weights)
        product = matmul_as_gemv_plan(some, first.w) if bits == 16 else None
        some = mx.contiguous(some.reshape(1, m, -1, D).swapaxes(1, 2)) if D else some
        launch = lazy(lambda: prepare(some.shape, dtype, n, group_size, bits, eps, residual, gated, heads=D > 0))
        ours = lambda x: [launch(x, next(turn), scale, rest)]  # noqa: E731
        around = (scale, eps) if norm else None
        stock = lambda x: [block_linear_ops(x, next(turn), around, rest, gated, product, D > 0)]  # noqa: E731
        return autotune.Trial(some, [ours for _ in ways], stock, autotune.same_floats(_ROUNDINGS * TOLERANCE[dtype]))

    return one
