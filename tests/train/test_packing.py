"""A tree of weights as a few rows: there and back."""

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from dflash_mlx.train.packing import Packing


def test_a_tree_comes_back_from_its_rows_whatever_order_it_was_given_in():
    tree = {
        "layers": [{"w": mx.arange(6).reshape(2, 3), "b": mx.array([7.0])}, {"w": mx.arange(4).reshape(4, 1) + 20}],
        "n": mx.ones(2),
    }
    packing = Packing(reversed(tree_flatten(tree)), lambda path, weight: "wide" if weight.ndim > 1 else path[-1])
    rows = packing.pack(tree)
    assert {row: value.tolist() for row, value in rows.items()} == {
        "b": [7.0], "n": [1.0, 1.0], "wide": [0, 1, 2, 3, 4, 5, 20, 21, 22, 23]
    }  # fmt: skip
    assert all(row.dtype == mx.float32 for row in rows.values())
    for (path, got), (want_path, want) in zip(sorted(tree_flatten(packing.tree(rows))), sorted(tree_flatten(tree)), strict=True):
        assert path == want_path and np.array_equal(got, want)
