"""What the slots of a block should draft, and the loss on what they do draft.

A slot learns from the target's text, or from the target's own probabilities at that place. With a candidate selector
(DFlash 2) two losses are summed: the backbone's, over the whole vocabulary, and the selector's, over a slot's candidates
behind the text's own token. Knows arrays, a head and a selector; knows nothing of layers, files or optimisers.
Source: DFlash, arXiv 2602.06036, section 4.2; weights that adapt to acceptance: D-PACE.

Dimensions: B documents, S ids of a document, A anchors a document, K block_size, N = K - 1, R blocks (B * A or a chunk of
them), H hidden, V vocabulary, k candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..models.dflash2 import CandidateSelector


def labels_of(ids: mx.array, answer: mx.array, anchors: mx.array, keep: mx.array, K: int) -> tuple[mx.array, mx.array]:
    """What each slot should draft, and which slots count.

        ids      u u a b c E u u     answer 0 0 1 1 1 1 0 0, anchor at a (slot 0): slots 1.. want b c E, then none:
                     0 1 2 3 4 5     after the first id that is no answer nothing of the block counts

    Shapes:
      - ids: [B, S] int32; answer: [B, S] bool; anchors: [B, A]; keep: [B, A] bool
    Returns:
      - labels: [B, A, K - 1] int32; counts: [B, A, K - 1] bool
    """
    (B, S), A = ids.shape, anchors.shape[1]
    at = anchors[:, :, None] + mx.arange(1, K)[None, None, :]
    flat = mx.minimum(at, S - 1).reshape(B, A * (K - 1))
    labels = mx.take_along_axis(ids, flat, axis=1).reshape(at.shape)
    inside = mx.take_along_axis(answer, flat, axis=1).reshape(at.shape) & (at < S) & keep[:, :, None]
    return labels, mx.cumprod(inside.astype(mx.int32), axis=-1) > 0


def decay_weights(K: int, gamma: float) -> mx.array:
    """exp(-(k - 1) / gamma) for slots k = 1 .. K - 1: an early miss ends the block, so early slots weigh more."""
    return mx.exp(-mx.arange(K - 1, dtype=mx.float32) / gamma)


def adaptive_weights(ce: mx.array, counts: mx.array, alpha: float = 0.5) -> mx.array:
    """D-PACE: a slot weighs what the slots from it on can still win, given how likely the slots before it pass.

        w_j = sum over m >= j of the product over i <= m of ((1 - alpha) exp(-ce_i) + alpha)

    Shapes:
      - ce: [..., K - 1] float32 cross entropies; counts: [..., K - 1] bool
    Returns: [..., K - 1], to be normalised by the number of blocks (dividing by the sum would cancel their meaning).
    """
    passes = mx.where(counts, (1 - alpha) * mx.exp(-ce) + alpha, 1.0)
    reach = mx.cumprod(passes, axis=-1) * counts
    return mx.cumsum(reach, axis=-1, reverse=True)


@dataclass(frozen=True)
class Wanted:
    """What each slot should draft.

    Shapes:
      - labels: [R, N] int32; counts: [R, N] bool, both as from `labels_of`; anchor: [R] the token before slot 1
      - heat: [R] the temperature that a block's drafts are judged at; None: 1
      - sampled: [R] bool: learn from the target's probabilities at `heat`, not from the label
      - teacher: target logits [T, V] of any number of rows; rows: [R, N] which of them chose the slot's token
    """

    labels: mx.array
    counts: mx.array
    anchor: mx.array
    heat: mx.array | None = None
    sampled: mx.array | None = None
    teacher: mx.array | None = None
    rows: mx.array | None = None

    def part(self, start: int, stop: int) -> Wanted:
        """Some of the blocks."""

        def cut(a: mx.array | None) -> mx.array | None:
            return None if a is None else a[start:stop]

        rest = (cut(self.heat), cut(self.sampled), self.teacher, cut(self.rows))
        return Wanted(self.labels[start:stop], self.counts[start:stop], self.anchor[start:stop], *rest)

    @property
    def before(self) -> mx.array:
        """The text's own token before each slot, [R, N]."""
        return mx.concatenate([self.anchor[:, None], self.labels[:, :-1]], axis=1)


@dataclass(frozen=True)
class LossConfig:
    """gamma: decay of the slots' weights, None for D-PACE. backbone: weight of the loss over the whole vocabulary where there is
    a selector. tv: share of total variation in the selector's loss on sampled text, the rest is cross-entropy. own: a slot
    counts in the selector's loss only while the selector's own picks before it are the text."""

    gamma: float | None = None
    backbone: float = 0.5
    tv: float = 0.0
    own: bool = False
    chunk_blocks: int = 512


def top_candidates(logits: mx.array, k: int) -> mx.array:
    """Ids of the k largest of each row, in any order: [..., V] to [..., k].

    A sort of a whole row is slow (22 ms for 7,680 rows of 49,152 on an H200, this 3 ms): the k best lie in the k groups whose
    best are the best.
    """
    V, size = logits.shape[-1], 64
    if V % size or V // size < 4 * k:
        return mx.argpartition(logits, kth=-k, axis=-1)[..., -k:] if k < V else mx.broadcast_to(mx.arange(V), logits.shape)
    groups = logits.reshape(*logits.shape[:-1], V // size, size)
    best = mx.argpartition(groups.max(-1), kth=-k, axis=-1)[..., -k:]
    found = mx.take_along_axis(groups, best[..., None], axis=-2).flatten(-2)
    at = mx.argpartition(found, kth=-k, axis=-1)[..., -k:]
    return mx.take_along_axis(best, at // size, axis=-1) * size + at % size


@dataclass
class _Chunk:
    """Loss, slopes and counts of some blocks."""

    loss: mx.array
    hidden_slope: mx.array
    selector_slopes: list[mx.array] = field(default_factory=list)
    metrics: dict[str, mx.array] = field(default_factory=dict)


def _target_probabilities(want: Wanted, logits: mx.array) -> mx.array:
    """What a slot's distribution should be, [R, N, V] float32: one-hot at the label, or the target's where text was sampled."""
    label = (mx.arange(logits.shape[-1]) == want.labels[..., None]).astype(mx.float32)
    if want.teacher is None:
        return label
    rows = want.teacher[want.rows].astype(mx.float32) / want.heat[:, None, None]
    return mx.where(want.sampled[:, None, None], mx.softmax(rows, axis=-1), label)


def _passes(want: Wanted, p: mx.array, q: mx.array, chance: mx.array) -> mx.array:
    """How likely a slot passes: its label's probability `chance`, or what two distributions share where text was sampled."""
    if want.teacher is None:
        return chance
    return mx.where(want.sampled[:, None], mx.minimum(p, q).sum(-1), chance)


def _selector_loss(
    selector: CandidateSelector, config: LossConfig, want: Wanted, candidates: mx.array, p: mx.array
) -> Callable[..., tuple[mx.array, tuple]]:
    """A function of (hidden [R, N, H], unary [R, N, k], selector weights) to (sum of weighted losses, what was seen).

    Seen: weights [R, N] of the slots, hits [R, N], whether the label is a candidate [R, N].
    """
    heat = 1.0 if want.heat is None else want.heat[:, None, None]
    is_label = candidates == want.labels[..., None]
    held = is_label.any(-1)

    def loss(hidden: mx.array, unary: mx.array, weights: Any) -> tuple[mx.array, tuple]:
        selector.update(weights)
        scores = selector.scores(hidden, unary, candidates, want.before)
        logq = scores / heat
        logq = logq - mx.logsumexp(logq, axis=-1, keepdims=True)
        q = mx.exp(logq)
        hits = (mx.argmax(scores, axis=-1, keepdims=True) == mx.argmax(is_label, axis=-1, keepdims=True))[..., 0] & held
        counts = want.counts
        if config.own:
            reached = mx.cumprod(mx.concatenate([mx.ones(hits[:, :1].shape), hits[:, :-1].astype(mx.float32)], axis=1), axis=1)
            counts = counts & (reached > 0)
        chance = mx.where(held, (q * is_label).sum(-1), 0.0)
        passes = mx.stop_gradient(_passes(want, p, q, chance))
        weight = slot_weights(-mx.log(mx.maximum(passes, 1e-9)), counts, config.gamma)
        # A label outside the candidates is the backbone's to learn alone: p is then zero at all of them.
        cross = -(p * logq).sum(-1)
        far = 0.5 * mx.abs(p - q).sum(-1)
        slot = cross
        if config.tv and want.teacher is not None:
            slot = mx.where(want.sampled[:, None], (1 - config.tv) * cross + config.tv * far, cross)
        return (weight * slot).sum(), (weight, hits & want.counts, held & want.counts)

    return loss


def slot_weights(ce: mx.array, counts: mx.array, gamma: float | None) -> mx.array:
    """[R, N]: the paper's decay, or D-PACE's weights without a gamma; 0 where a slot does not count."""
    return adaptive_weights(ce, counts) if gamma is None else decay_weights(ce.shape[-1] + 1, gamma) * counts


def _chunk_loss(
    head: Callable[[mx.array], mx.array],
    hidden: mx.array,
    want: Wanted,
    config: LossConfig,
    selector: CandidateSelector | None,
    weights: Any,
) -> _Chunk:
    """Loss and slopes of some blocks: hidden [R, N, H]. The head is frozen: its logits' slope goes straight to hidden."""
    logits = head(hidden)
    high = logits.astype(mx.float32)
    heat = 1.0 if want.heat is None else want.heat[:, None, None]
    p = _target_probabilities(want, logits)
    z = high / heat
    lse = mx.logsumexp(z, axis=-1, keepdims=True)
    q = mx.exp(z - lse)
    chance = mx.take_along_axis(q, want.labels[..., None], axis=-1)[..., 0]
    label_ce = -mx.log(mx.maximum(chance, 1e-30))
    ce = label_ce if want.teacher is None else (lse[..., 0] - (p * z).sum(-1))
    metrics = {"ce": (label_ce * want.counts).sum(), "slots": want.counts.sum(0)}
    if selector is None:
        weight, hits = slot_weights(-mx.log(mx.maximum(_passes(want, p, q, chance), 1e-9)), want.counts, config.gamma), None
        hits = (mx.argmax(logits, axis=-1) == want.labels) & want.counts
        share, chunk = 1.0, _Chunk(mx.array(0.0), mx.array(0.0))
    else:
        share = config.backbone
        candidates = top_candidates(logits[..., : selector.successor_codebook.shape[0]], selector.top_k)
        unary, p_here = (mx.take_along_axis(a, candidates, axis=-1) for a in (high, p))
        run = mx.value_and_grad(_selector_loss(selector, config, want, candidates, p_here), argnums=(0, 1, 2))
        (loss, (own_weight, hits, held)), (by_hidden, by_unary, by_weights) = run(hidden, unary, weights)
        # The backbone learns every slot of the text, reached or not.
        weight = own_weight if not config.own else slot_weights(label_ce, want.counts, config.gamma)
        chunk = _Chunk(loss, by_hidden.astype(mx.float32), [g for _, g in sorted(tree_flatten(by_weights))])
        metrics["held"] = held.sum(0)
    # Divided by the number of blocks behind the head: in float16 these slopes must not get smaller than they are.
    slope = (q - p) * (share * weight / heat[..., 0] if want.heat is not None else share * weight)[..., None]
    if selector is not None:
        slope = mx.put_along_axis(slope, candidates, mx.take_along_axis(slope, candidates, axis=-1) + by_unary, axis=-1)
    chunk.hidden_slope = chunk.hidden_slope + mx.vjp(head, [hidden], [slope.astype(logits.dtype)])[1][0].astype(mx.float32)
    chunk.loss = chunk.loss + share * (weight * ce).sum()
    chunk.metrics = metrics | {"hits": hits.sum(0), "runs": mx.cumprod(hits.astype(mx.int32), axis=-1).sum(0)}
    return chunk


def block_loss(
    head: Callable[[mx.array], mx.array],
    hidden: mx.array,
    want: Wanted,
    config: LossConfig = LossConfig(),  # noqa: B008 (frozen)
    selector: CandidateSelector | None = None,
) -> tuple[mx.array, dict[str, mx.array]]:
    """Weighted loss of drafted slots; memory is that of one chunk of logits, whatever the number of blocks.

    The gradient of each chunk's logits is formed while they exist. The value returned carries it: its derivative is the
    loss's, its number is the loss.

    Shapes:
      - hidden: [R, N, H] rows of slots 1 ..
    Returns:
      - loss, a mean over blocks (over weights with a gamma); {"ce": sum of counted cross entropies of the text under the
        backbone, "slots": [N] counted, "hits": [N] right, "runs": [N] right with all slots before right, "norm": what the loss
        was divided by}, with a selector also "held": [N] slots whose label is a candidate
    """
    if config.gamma is None:
        norm = mx.maximum(want.counts[:, 0].sum(), 1)
    else:
        norm = mx.maximum((want.counts * decay_weights(want.labels.shape[-1] + 1, config.gamma)).sum(), 1e-6)
    outer = selector.trainable_parameters() if selector is not None else {}
    own, weights = [w for _, w in sorted(tree_flatten(outer))], tree_map(mx.stop_gradient, outer)
    loss = surrogate = mx.array(0.0)
    metrics: dict[str, mx.array] = {}
    done = None
    for start in range(0, hidden.shape[0], config.chunk_blocks):
        stop = start + config.chunk_blocks
        h = mx.stop_gradient(hidden[start:stop])
        if done is not None:
            # Chunks run one after the other, so that one chunk of logits is alive at a time.
            h = mx.depends([h], [done])[0]
        chunk = _chunk_loss(head, h, want.part(start, stop), config, selector, weights)
        done = mx.stop_gradient(chunk.hidden_slope)
        surrogate = surrogate + (hidden[start:stop].astype(mx.float32) * done).sum() / norm
        for weight, slope in zip(own, chunk.selector_slopes, strict=bool(chunk.selector_slopes)):
            surrogate = surrogate + (weight.astype(mx.float32) * mx.stop_gradient(slope)).sum() / norm
        loss = loss + chunk.loss / norm
        metrics = chunk.metrics if not metrics else {name: metrics[name] + value for name, value in chunk.metrics.items()}
    if selector is not None:
        selector.update(outer)
    metrics["norm"] = norm
    loss = mx.stop_gradient(loss)
    return loss + surrogate - mx.stop_gradient(surrogate), metrics
