"""A tree of weights as a few long rows, so that an optimizer launches its operations once a row and not once a tensor.

On an H200, AdamW, clipping and the moving average of 110 tensors of a small drafter took 23 ms a step, of one row 1.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten


class Packing:
    """Which tensor lies where.

    Args:
      weights: (path, tensor) of each; their values are not kept. row_of: path and tensor to the name of its row.
    """

    def __init__(self, weights: Iterable[tuple[str, mx.array]], row_of: Callable[[str, mx.array], str]):
        self.rows: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for path, weight in sorted(weights, key=lambda one: one[0]):
            self.rows.setdefault(row_of(path, weight), []).append((path, weight.shape))

    def pack(self, tree: Any) -> dict[str, mx.array]:
        """The rows, float32, of a tree with these paths and shapes."""
        found = dict(tree_flatten(tree))
        parts = {row: [found[path].astype(mx.float32).flatten() for path, _ in places] for row, places in self.rows.items()}
        return {row: mx.concatenate(some) for row, some in parts.items()}

    def tree(self, rows: dict[str, mx.array]) -> dict:
        """The tree again. Built from paths: modules without weights (RoPE) leave no empty entry behind."""
        weights = []
        for row, places in self.rows.items():
            at = 0
            for path, shape in places:
                weights.append((path, rows[row][at : at + math.prod(shape)].reshape(shape)))
                at += math.prod(shape)
        return tree_unflatten(weights)
