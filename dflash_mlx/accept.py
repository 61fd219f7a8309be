"""Acceptance rules as pure functions on arrays. Does not know models, caches or samplers."""

from __future__ import annotations

import mlx.core as mx

from .kernels.accept import accept


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
    accepted, bonus, _ = accept(draft, target)
    return accepted, bonus


def accept_rejection(
    draft: mx.array, target: mx.array, drafter: mx.array, uniform: mx.array, gumbel: mx.array
) -> tuple[mx.array, mx.array]:
    """Keep each draft with probability min(1, p / q); in place of the first rejected one, draw from max(0, p - q).

        draft         d1 d2 d3        d2 rejected: accepted = 1, bonus ~ max(0, p2 - q2), normalised
        target        p1 p2 p3 p4     if all are kept, the bonus is drawn from p4

    Exact if d_i was drawn from q_i: the kept token then has the distribution p_i. For a draft chosen in another way, such as by
    argmax, q is one-hot; any other q would bias the result.

    Shapes:
      - draft: [B, N] int32; target p: [B, N + 1, V], drafter q: [B, N, V], probabilities; uniform: [B, N] in [0, 1)
      - gumbel: [B, V], standard Gumbel noise for the bonus
    Returns:
      - accepted: [B] int32, 0..N;  bonus: [B] int32
    Source: arXiv 2211.17192, algorithm 1.
    """
    at = draft[..., None]
    p, q = (mx.take_along_axis(rows, at, axis=-1)[..., 0] for rows in (target[:, :-1], drafter))
    kept = (uniform * q < p).astype(mx.int32)
    accepted = mx.cumprod(kept, axis=1).sum(axis=1).astype(mx.int32)
    return accepted, _draw_rest(target, drafter, accepted, mx.ones(accepted.shape), gumbel)


def accept_block(
    draft: mx.array, target: mx.array, drafter: mx.array, uniform: mx.array, gumbel: mx.array
) -> tuple[mx.array, mx.array]:
    """As `accept_rejection`, but decided over the whole block: a later draft can save one that alone would be rejected. It never
    keeps fewer on average.

        P_0 = 1;  P_i = min(1, P_{i-1} p_i(d_i) / q_i(d_i))         running probability of the first i drafts
        S_i = sum over x of max(0, P_i p_{i+1}(x) - q_{i+1}(x))     probability that p has left after them
        h_i = S_i / (S_i + 1 - P_i), h_N = P_N                      accepted = the LARGEST i with u_i <= h_i, else 0

    Shapes and returns as in `accept_rejection`.
    Source: arXiv 2403.10444.
    """
    n = draft.shape[1]
    at = draft[..., None]
    p, q = (mx.take_along_axis(rows, at, axis=-1)[..., 0] for rows in (target[:, :-1], drafter))
    chance, reached = mx.ones(draft.shape[:1]), [mx.ones(draft.shape[:1])]
    accepted = mx.zeros(draft.shape[:1], dtype=mx.int32)
    for i in range(1, n + 1):
        chance = mx.minimum(1.0, chance * p[:, i - 1] / q[:, i - 1])
        reached.append(chance)
        if i < n:
            left = mx.maximum(chance[:, None] * target[:, i] - drafter[:, i], 0).sum(axis=-1)
            # 0 / 0: p and q are equal from here on, so every draft may be kept.
            rule = mx.where(left + 1 - chance > 0, left / (left + 1 - chance), 1.0)
        else:
            rule = chance
        accepted = mx.where(uniform[:, i - 1] <= rule, i, accepted)
    weight = mx.take_along_axis(mx.stack(reached, axis=1), accepted[:, None], axis=1)[:, 0]
    return accepted, _draw_rest(target, drafter, accepted, weight, gumbel)


def _draw_rest(target: mx.array, drafter: mx.array, accepted: mx.array, weight: mx.array, gumbel: mx.array) -> mx.array:
    """The bonus [B]: from max(0, weight * p - q) in the row after the accepted ones, from p itself after the last."""
    row = accepted[:, None, None]
    p = mx.take_along_axis(target, row, axis=1)[:, 0]
    nothing = mx.zeros_like(drafter[:, :1])
    q = mx.take_along_axis(mx.concatenate([drafter, nothing], axis=1), row, axis=1)[:, 0]
    last = (accepted == drafter.shape[1])[:, None]
    rest = mx.where(last, p, mx.maximum(weight[:, None] * p - q, 0))
    return mx.argmax(mx.log(rest) + gumbel, axis=-1).astype(mx.int32)
