"""Adds the scale and soft-cap of logits that a drafter's config states to a head whose own code lacks them.

Knows two functions of a head. Knows no drafter and no target.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..config import DrafterConfig
from ..errors import PairError


def finish_head(
    config: DrafterConfig,
    head: Callable[[mx.array], mx.array],
    matrix: Callable[[mx.array], mx.array],
    whose: str,
) -> Callable[[mx.array], mx.array]:
    """The head with the config's scale and soft-cap. Each is added only if the head's own code lacks it.

    The config repeats what the target does to its logits, for code that has only the target's matrix.

    Shapes:
      - head: hidden [B, L, H] to logits [B, L, V]; matrix: the same by the bare matrix product of that head
    Raises:
      PairError: the head scales its logits by another number.
    """
    scale, cap = config.output_multiplier, config.final_logit_softcapping
    if not scale and not cap:
        return head
    probe = mx.random.normal((1, 1, config.hidden_size), key=mx.random.key(5))

    def size(of: Callable[[mx.array], mx.array], n: float) -> float:
        return mx.abs((of(n * probe) - of(0 * probe)).astype(mx.float32)).mean().item()

    if scale:
        # Of a small row, which a soft-cap does not change. 0.02 is more than the rounding of a scale kept in bfloat16.
        has = size(head, 1e-3) / size(matrix, 1e-3)
        if abs(has / scale - 1) < 0.02:
            scale = None
        elif abs(has - 1) >= 0.02:
            raise PairError(
                f"{whose} scales its logits by {has:.3g}; the drafter's {config.read_from['output_multiplier']} says {scale:g}",
                "Use the drafter trained for this target",
            )
    if cap and size(head, 256) < 0.9 * 256 * size(head, 1):
        cap = None
    if not scale and not cap:
        return head

    def finished(hidden: mx.array) -> mx.array:
        logits = head(hidden).astype(mx.float32) * (scale or 1.0)
        return mx.tanh(logits / cap) * cap if cap else logits

    return finished
