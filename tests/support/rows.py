"""Are the rows of a product the same bits, however many rows it has? On this CPU, and on a made-up one where they are not.

    python tests/support/rows.py     says so; exit status 0 either way

MLX hands float products to the CPU's BLAS: the reference BLAS on Linux, Accelerate on a Mac. Whether that adds a row up in the
same order alone and among others is its own affair. Tests marked `rows_equal` need it and are skipped by that name where it is
not so.

DFLASH_MLX_TEST_ROWS=differ   makes this CPU one whose rows differ in their last places, to see which tests need the mark
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import zip_longest

import mlx.core as mx

VARIABLE = "DFLASH_MLX_TEST_ROWS"
# (N, K): the products of tiny models, of the built-in pair, and one that is longer than a BLAS kernel's block of K.
SHAPES = ((61, 24), (36, 20), (192, 96), (512, 2048))

# Where rows may differ, two logits of one row are a tie if they lie nearer than this part of its largest one.
TIE = {mx.float32: 1e-4, mx.float16: 2.0**-8, mx.bfloat16: 2.0**-5}


@functools.cache
def difference() -> str | None:
    """Where a row of a float32 product differs from the row alone, on MLX's CPU device; None: nowhere that was looked."""
    with mx.stream(mx.cpu):
        for n, k in SHAPES:
            keys = mx.random.split(mx.random.key(n), 2)
            w, x = mx.random.normal((n, k), key=keys[0]), mx.random.normal((16, k), key=keys[1])
            alone = mx.concatenate([x[m : m + 1] @ w.T for m in range(16)])
            for rows in range(2, 17):
                if not mx.array_equal(x[:rows] @ w.T, alone[:rows]).item():
                    apart = mx.max(mx.abs(x[:rows] @ w.T - alone[:rows])).item()
                    return f"a product of {rows} rows, N {n} K {k}, differs from its rows alone by up to {apart:.2g}"
    return None


def tolerance() -> float:
    """Of floats that one row and many were computed to, relative and absolute: 7e-5 was the worst seen where rows differ."""
    return 1e-5 if difference() is None else 1e-3


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Index of the first id that differs, or that one of the two lacks."""
    return next((n for n, (a, b) in enumerate(zip_longest(ids, others)) if a != b), None)


def gap(model, text: Sequence[int], a: int, b: int) -> tuple[float, bool]:
    """How far apart the logits of two ids are after `text`, as a part of the largest one there, and whether that is a tie."""
    logits = model(mx.array([text]))[0, -1]
    row = logits.astype(mx.float32)
    apart = (mx.abs(row[a] - row[b]) / mx.max(mx.abs(row))).item()
    return apart, apart <= TIE[logits.dtype]


def same_ids(model, prompt: Sequence[int], ids: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two greedy answers are the same: id by id where rows are equal, else up to the first tie."""
    at = first_difference(ids, others)
    if at is None:
        return True
    if difference() is None or at >= min(len(ids), len(others)):
        return False
    return gap(model, [*prompt, *ids[:at]], ids[at], others[at])[1]


def make_differ() -> None:
    """From here on, products in this process add up a row in an order that depends on how many rows there are."""
    matmul, attention, addmm = mx.matmul, mx.fast.scaled_dot_product_attention, mx.addmm

    def product(a, b, **options):
        rows, k = a.shape[-2] if a.ndim > 1 else 1, a.shape[-1]
        at = k * (1 + rows % 3) // 4
        if rows == 1 or not at or a.ndim < 2 or b.ndim < 2 or a.dtype != mx.float32:
            return matmul(a, b, **options)
        return matmul(a[..., :at], b[..., :at, :], **options) + matmul(a[..., at:], b[..., at:, :], **options)

    def attend(q, k, v, **options):
        # Its products are inside MLX: the last place of what it returns stands for theirs.
        out = attention(q, k, v, **options)
        return out * (1 + 2.0**-23 * (q.shape[-2] % 3)) if q.shape[-2] > 1 and out.dtype == mx.float32 else out

    mx.matmul = mx.array.__matmul__ = product
    mx.addmm = lambda c, a, b, alpha=1.0, beta=1.0, **options: (
        addmm(c, a, b, alpha, beta, **options) if alpha != 1 or beta != 1 else c + product(a, b, **options)
    )
    mx.fast.scaled_dot_product_attention = attend


def main() -> None:
    found = difference()
    print("rows_equal: one row and many are bit-equal on this CPU" if found is None else f"rows_equal: not here: {found}")


if __name__ == "__main__":
    main()
