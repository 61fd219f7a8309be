"""Acceptance rules as pure functions on arrays. Knows nothing of models, caches or samplers."""

from __future__ import annotations

import mlx.core as mx


def accept_match(draft: mx.array, target: mx.array) -> tuple[mx.array, mx.array]:
    """Keep the leading draft tokens that the target chose too.

        draft         d1 d2 d3        d3 differs from t3: accepted = 2, bonus = t3
        target        t1 t2 t3 t4     t1 is the target's choice after the anchor

    Exact for any way in which the target chooses, greedy or sampled: what is kept is always the target's own choice.

    Shapes:
      - draft: [B, N] int32; target: [B, N + 1] int32
    Returns:
      - accepted: [B] int32, 0..N;  bonus: [B] int32
    Raises:
      ValueError: if target is not one longer than draft.
    Source: arXiv 2602.06036, section 4.
    """
    if target.shape[1] != draft.shape[1] + 1:
        raise ValueError(f"expected one target choice more than drafts; found {target.shape[1]} for {draft.shape[1]}")
    match = (draft == target[:, :-1]).astype(mx.int32)
    accepted = mx.cumprod(match, axis=1).sum(axis=1).astype(mx.int32)
    bonus = mx.take_along_axis(target, accepted[:, None], axis=1)[:, 0]
    return accepted, bonus
