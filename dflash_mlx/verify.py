"""One target pass over a block. Knows the target. Does not know sampling, acceptance or the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .models.target import Target, TargetOutput
from .rollback import RollbackPoint, masks_by_row


def verify_block(target: Target, anchor: mx.array, drafted: mx.array, cache: Sequence[Any], point: RollbackPoint) -> TargetOutput:
    """Run the target over `[anchor, drafted...]` after the rows its cache holds.

    Shapes:
      - anchor: [B] int32; drafted: [B, N] int32, N = width of this round
    Args:
      point: `rollback_point(cache)`
    Returns: N + 1 rows; row i of `hidden` predicts the token after block slot i.
    The cache then holds N + 1 more rows; the caller rolls back those that it does not commit.
    """
    # eager: the device starts while the host still builds the later layers. It matters for small models, where the host takes as
    # long as the device: a plain pass of `tiny` takes 0.89 of mlx-lm's time on a CPU (2 cores, loaded).
    block = mx.concatenate([anchor[:, None], drafted], axis=1) if drafted.shape[1] else anchor[:, None]
    if target.accelerator and (out := target.accelerator.verify(target, block, cache, point)) is not None:
        return out
    if not drafted.shape[1]:
        # Plain decoding: one row is kept or undone as a whole, so inputs of recurrent modules need not be kept.
        out = target(block, cache, kernels=True, eager=True)
        point.ended(1)
        return out
    with masks_by_row(cache):
        return target(block, cache, point, kernels=True, eager=True)


def logprobs(target: Target, hidden: mx.array, logits: mx.array | None = None) -> mx.array:
    """[B, L, H] final normed states to log-probabilities [B, L, V], normalised as mlx-lm's loop does.

    logits: [B, L, V], if the pass has computed them already.
    """
    logits = target.head(hidden) if logits is None else logits
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
