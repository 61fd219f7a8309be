"""Which layers of a target run in another way than the model's own code in a pass of few rows, and which of them did.

The head too. Knows the routes (`routing`) and what was tuned (`autotune`); knows no pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn

from . import autotune
from .block_qmm import MAX_ROWS
from .head_argmax import head_argmax_plan
from .routing import KernelRoute, PassState, Recurrence, attention_calls, kernel_calls, recurrence_calls
from .small_batch import attention

__all__ = ["LayerRoutes", "attention", "finite_bits", "is_finite"]

# The exponent of a float32 that is infinite or no number.
_NOT_FINITE = 0x7F800000


class LayerRoutes:
    """The routes of one model, for each number of rows in a pass.

    own_class: gives a module's own class, also during a pass, when `intercept` has given it another.
    """

    def __init__(self, model: nn.Module, own_class: Callable[[nn.Module], type]):
        self.model, self._own_class, self._passes = model, own_class, PassState()
        # Layers that a kernel may serve; listed in the first pass of few rows on a GPU.
        self._calls: list[tuple[nn.Module, KernelRoute, str]] | None = None
        # Rows of a pass -> `autotune.plans()` then, and the layers that were still routed.
        self._routed: dict[int, tuple[object, list[tuple[nn.Module, KernelRoute, str]]]] = {}

    def calls(self, rows: int) -> list[tuple[nn.Module, KernelRoute, str]]:
        """(layer, handler, method) of each layer that is routed in a pass over `rows` rows, one included."""
        if rows > MAX_ROWS or not autotune.may_run():
            return []
        if self._calls is None:
            about = (self.model, self._own_class, self._passes)
            recurrences = [(route.module, route, "__call__") for route in self.recurrences.values()]
            self._calls = kernel_calls(*about) + attention_calls(*about) + recurrences
        plans = autotune.plans()
        if self._routed.get(rows, (None,))[0] is not plans:
            self._routed[rows] = (plans, self._calls)
        return self._routed[rows][1]

    @cached_property
    def recurrences(self) -> dict[int, Recurrence]:
        """id(module) -> the route of each module with a gated delta rule; also where no kernel may run."""
        found = recurrence_calls(self.model, self._own_class, self._passes)
        return {id(module): route for module, route, _ in found}

    def begin(self) -> None:
        """To be called before a pass of this thread."""
        self._passes.served.clear()
        self._passes.left.clear()

    def ended(self, rows: int) -> None:
        """."""
        plans, calls = self._routed.get(rows, (None, ()))
        if (idle := self._passes.left - self._passes.served) and plans is autotune.plans():
            self._routed[rows] = (plans, [call for call in calls if call[1] not in idle])

    @property
    def served(self) -> bool:
        """Whether a kernel ran for a layer in this thread's last pass, or for the head since then."""
        return bool(self._passes.served)

    def can_argmax(self, rows: int) -> bool:
        return rows <= MAX_ROWS and autotune.may_run()

    def greedy_ids(self, hidden: mx.array, head: nn.Module) -> tuple[mx.array, mx.array] | None:
        """The argmax of each row's logits, by a kernel that writes no logits; None: there is no such kernel here.

        Shapes:
          - hidden: [B, L, H] final normed states; ids: [B, L] int32; margin: [B, L] float32, NaN where a logit is
        """
        weights = _head_weights(head)
        launch = head_argmax_plan(hidden, *weights) if weights else None
        return launch(hidden, *weights[:3], weights[-1]) if launch else None


def _head_weights(head: nn.Module) -> tuple | None:
    """The head as `head_argmax` takes it: (w, scales, biases, group size, bits, soft-cap, bias)."""
    if type(head) in (nn.Linear, nn.Embedding):
        return (head["weight"], None, None, 64, 4, None, head.get("bias"))
    if type(head) in (nn.QuantizedLinear, nn.QuantizedEmbedding) and getattr(head, "mode", "affine") == "affine":
        return (head["weight"], head["scales"], head["biases"], head.group_size, head.bits, None, head.get("bias"))
    return None


def finite_bits(hidden: mx.array, margin: mx.array | None = None, logits: mx.array | None = None) -> mx.array:
    """[1] int32: the bits of one float32 that is finite if all values are. Each operation costs the host's time."""
    total = hidden.astype(mx.float32).sum()
    if margin is not None:
        total = total + margin.sum()
    if logits is not None:
        # logsumexp, because a single logit of minus infinity is no fault.
        total = total + mx.logsumexp(logits, axis=-1).astype(mx.float32).sum()
    return total[None].view(mx.int32)


def is_finite(bits: int) -> bool:
    return bits & _NOT_FINITE != _NOT_FINITE
