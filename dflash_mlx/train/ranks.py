"""One training run in several processes: each takes a part of every batch, and all keep equal weights (data parallel).

    mlx.launch -n 2 dflash-mlx train run ...

Rank 0 has the clock, evaluates, logs and saves; the others follow it. Knows nothing of drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..errors import ConfigError


class Ranks:
    """The processes that `mlx.launch` started. With one process, every method returns its argument."""

    def __init__(self) -> None:
        self.group = mx.distributed.init()
        self.rank, self.size = self.group.rank(), self.group.size()
        self._pending: mx.array | None = None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def check(self, batch: int, **numbers: int) -> None:
        """Raises ConfigError if a batch cannot be divided evenly, or if a number differs between processes. numbers: by name."""
        if batch % self.size:
            raise ConfigError(
                f"a batch of {batch} cannot be divided among {self.size} processes", f"Give --batch a multiple of {self.size}"
            )
        for name, mine in numbers.items():
            theirs = int(self.broadcast(mx.array(mine)).item())
            differ = mx.distributed.all_sum(mx.array(int(theirs != mine)), group=self.group).item()
            if differ:
                raise ConfigError(f"rank 0 has {theirs} {name}, rank {self.rank} {mine}", "Give every process the same files")

    def part(self, rows: Any) -> Any:
        """This process's rows of a batch [B, ...]."""
        each = len(rows) // self.size
        return rows[self.rank * each : (self.rank + 1) * each]

    def broadcast(self, tree: Any) -> Any:
        """Rank 0's arrays, in all processes."""
        if self.size == 1:
            return tree
        return tree_map(lambda a: mx.distributed.all_sum(a if self.leads else mx.zeros_like(a), group=self.group), _sorted(tree))

    def broadcast_late(self, values: Sequence[float]) -> Sequence[float]:
        """Rank 0's numbers, with several processes those of the call before, so that no step waits for the message."""
        if self.size == 1:
            return values
        sent = self.broadcast(mx.array(values, mx.float32))
        mx.async_eval(sent)
        before, self._pending = self._pending, sent
        return (sent if before is None else before).tolist()

    def wait(self) -> None:
        """Wait until every process is here. A process that ended during a message would end the others too."""
        mx.eval(self._pending, mx.distributed.all_sum(mx.array(0), group=self.group))

    def join(self, loss: mx.array, sums: dict[str, mx.array], gradients: dict) -> tuple[mx.array, dict[str, mx.array], dict]:
        """Loss and gradients averaged over the parts of a batch, and the added sums. A part's weight is its sums["norm"], by
        which its loss was divided."""
        if self.size == 1:
            return loss, sums, gradients
        parts = tree_map(lambda a: a * sums["norm"], {"loss": loss, "gradients": gradients})
        parts["sums"] = tree_map(lambda a: a.astype(mx.float32), sums)
        mean = nn.average_gradients(_sorted(parts), self.group)
        norm = mean["sums"]["norm"]
        whole = tree_map(lambda a: a / norm, {name: mean[name] for name in ("loss", "gradients")})
        return whole["loss"], tree_map(lambda a: a * self.size, mean["sums"]), whole["gradients"]


def _sorted(tree: Any) -> Any:
    """A tree with its leaves in sorted order. MLX builds trees in the order of a set, which differs between processes."""
    return tree if isinstance(tree, mx.array) else tree_unflatten(sorted(tree_flatten(tree)))
