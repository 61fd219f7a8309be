"""What the slots of a block should draft, and the loss on what they do draft.

A slot learns from the target's text, or from the target's own probabilities at that place. With a candidate selector
(DFlash 2) two losses are summed: the backbone's, over the whole vocabulary, and the selector's, over a slot's candidates
after the text's own token. A Markov head (DSpark) adds a term of that token to each slot's logits. Knows arrays, a head and a
selector; knows nothing of layers, files or optimisers.
Source: DFlash, arXiv 2602.06036, section 4.2; weights that adapt to acceptance: D-PACE.

Dimensions: B documents, S ids of a document, A anchors a document, K block_size, N = K - 1, R blocks (B * A or a chunk of
them), H hidden, V vocabulary, k candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..models.dflash2 import CandidateSelector, top_candidates
from ..models.dspark import MarkovHead


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
    """D-PACE: a slot's weight is what it and the later slots can still win, given how likely the slots before it are to pass.

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
      - heat: [R] the temperature at which a block's drafts are judged (NumPy, not on the device); None: 1
      - rows: [P, N] the target's row that chose each slot's token; teacher: takes such row numbers [M] and returns the target's
        logits [M, V]. The first P blocks learn from the target's probabilities at `heat`, the rest from labels.
    """

    labels: mx.array
    counts: mx.array
    anchor: mx.array
    heat: np.ndarray | None = None
    teacher: Callable[[mx.array], mx.array] | None = None
    rows: mx.array | None = None

    def part(self, start: int, stop: int) -> Wanted:
        """The blocks start..stop, a pair from `cuts`."""
        soft = stop <= self.soft
        rest = (self.teacher, self.rows[start:stop]) if soft else (None, None)
        heat = None if self.heat is None else self.heat[start:stop]
        return Wanted(self.labels[start:stop], self.counts[start:stop], self.anchor[start:stop], heat, *rest)

    def cuts(self, size: int) -> list[tuple[int, int]]:
        """Starts and stops of parts of at most `size` blocks. In a part all blocks have one heat, and all or none learn from
        probabilities."""
        ends = {0, self.soft, len(self.labels)}
        if self.heat is not None:
            ends |= set((np.flatnonzero(np.diff(self.heat)) + 1).tolist())
        ends = sorted(ends)
        parts = zip(ends, ends[1:], strict=False)
        return [(start, min(start + size, stop)) for first, stop in parts for start in range(first, stop, size)]

    @property
    def soft(self) -> int:
        """How many blocks learn from the target's probabilities."""
        return 0 if self.rows is None else len(self.rows)

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


@dataclass
class _Chunk:
    """Loss, slopes and counts of some blocks."""

    loss: mx.array
    hidden_slope: mx.array
    selector_slopes: list[mx.array] = field(default_factory=list)
    metrics: dict[str, mx.array] = field(default_factory=dict)


def _add_at(rows: mx.array, ids: mx.array, more: mx.array) -> mx.array:
    """rows [..., V] with more [..., k] added at the columns ids [..., k], which differ within a row."""
    sums = mx.take_along_axis(rows, ids, axis=-1) + more
    return mx.put_along_axis(rows, ids, sums.astype(rows.dtype), axis=-1)


# Compiled, because each step would otherwise be a pass over the whole vocabulary. The factor is a scalar, no column [M, 1]: with
# a column, MLX's kernels on CUDA compute an index for every number (7,680 rows of 49,152 on an H200: 15.5 ms, these 9.4).
@mx.compile
def _scaled(rows: mx.array, by: mx.array) -> mx.array:
    return (rows.astype(mx.float32) * by).astype(rows.dtype)


@mx.compile
def _scaled_wide(rows: mx.array, by: mx.array) -> mx.array:
    return rows.astype(mx.float32) * by


@mx.compile
def _less(q: mx.array, p: mx.array, like: mx.array) -> mx.array:
    return (q - p).astype(like.dtype)


class _SlotRows:
    """The distributions of the slots of some blocks with one heat, and the wanted ones, over whole rows of the vocabulary.

    Those that learn from text stay in the logits' type; those that learn from probabilities are float32.

    Shapes:
      - logits: [R, N, V]; inside, M = R * N rows
    """

    def __init__(self, logits: mx.array, want: Wanted):
        self.shape, self.want, self.dtype = logits.shape, want, logits.dtype
        R, N, V = logits.shape
        self.heat = 1.0 if want.heat is None else float(want.heat[0])
        self.label, self.p = want.labels.reshape(R * N, 1), None
        self.z = self._heated(logits.reshape(R * N, V))
        self.q = mx.softmax(self.z, axis=-1, precise=True)
        high = self.z.max(-1, keepdims=True).astype(mx.float32)
        self.lse = high - mx.log(self.q.max(-1, keepdims=True).astype(mx.float32))
        if want.rows is not None:
            self.p = mx.softmax(self._heated(want.teacher(want.rows.flatten())), axis=-1, precise=True)

    def _heated(self, rows: mx.array) -> mx.array:
        if self.want.rows is not None:
            return _scaled_wide(rows, mx.array(1 / self.heat))
        return rows if self.heat == 1 else _scaled(rows, mx.array(1 / self.heat))

    def _back(self, a: mx.array) -> mx.array:
        return a.reshape(*self.shape[:2], *a.shape[1:])

    def label_ce(self) -> mx.array:
        """[R, N]: cross-entropy at the label."""
        return self._back((self.lse - mx.take_along_axis(self.z, self.label, axis=-1).astype(mx.float32))[:, 0])

    def ce(self) -> mx.array:
        """[R, N]: cross-entropy of what a slot learns."""
        return self.label_ce() if self.p is None else self._back(self.lse[:, 0] - (self.p * self.z).sum(-1))

    def passes(self) -> mx.array:
        """[R, N]: the probability that a slot passes: that of its label, or the overlap of the two distributions."""
        return mx.exp(-self.label_ce()) if self.p is None else self._back(mx.minimum(self.q, self.p).sum(-1))

    def p_at(self, ids: mx.array) -> mx.array:
        """The wanted probabilities of ids [R, N, k]."""
        if self.p is None:
            return (ids == self.want.labels[..., None]).astype(mx.float32)
        return self._back(mx.take_along_axis(self.p, ids.flatten(0, 1), axis=-1))

    def slope(self, weight: mx.array, at: mx.array | None = None, more: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """Derivative of the sum of weight [R, N] times `ce` by the logits, and `more` [R, N, k] at the ids `at`; `more` is 0
        where weight is.

        Returns: [R, N, V] in the logits' type, and a factor [R, N, 1] float32 that its rows have not been multiplied by yet
        """
        scale = weight.reshape(-1, 1) / self.heat
        if self.p is not None:
            slope = _less(self.q, self.p, mx.array(0, self.dtype))
        else:
            slope = _add_at(self.q, self.label, mx.array(-1.0))
        if at is not None:
            slope = _add_at(slope, at.flatten(0, 1), more.flatten(0, 1) / mx.maximum(scale, 1e-20))
        return self._back(slope), self._back(scale)


def _selector_loss(
    selector: CandidateSelector, config: LossConfig, want: Wanted, candidates: mx.array, p: mx.array
) -> Callable[..., tuple[mx.array, tuple]]:
    """A function that takes (hidden [R, N, H], unary [R, N, k], selector weights) and returns (sum of weighted losses, seen).

    p: [R, N, k] what the candidates' probabilities should be.
    Seen: weights [R, N] of the slots, hits [R, N], whether the label is a candidate [R, N].
    """
    heat = 1.0 if want.heat is None else mx.array(want.heat)[:, None, None]
    is_label = candidates == want.labels[..., None]
    held = is_label.any(-1)

    def loss(hidden: mx.array, unary: mx.array, weights: Any) -> tuple[mx.array, tuple]:
        selector.update(weights)
        scores = selector.scores(hidden, unary, candidates, want.before[..., None])[..., 0, :]
        logq = scores / heat
        logq = logq - mx.logsumexp(logq, axis=-1, keepdims=True)
        q = mx.exp(logq)
        hits = (mx.argmax(scores, axis=-1, keepdims=True) == mx.argmax(is_label, axis=-1, keepdims=True))[..., 0] & held
        counts = want.counts
        if config.own:
            reached = mx.cumprod(mx.concatenate([mx.ones(hits[:, :1].shape), hits[:, :-1].astype(mx.float32)], axis=1), axis=1)
            counts = counts & (reached > 0)
        # If the label is no candidate, p is zero at all candidates, and only the backbone learns it.
        passes = mx.stop_gradient(mx.minimum(p, q).sum(-1))
        weight = slot_weights(-mx.log(mx.maximum(passes, 1e-9)), counts, config.gamma)
        slot = -(p * logq).sum(-1)
        if config.tv and want.rows is not None:
            slot = (1 - config.tv) * slot + config.tv * 0.5 * mx.abs(p - q).sum(-1)
        return (weight * slot).sum(), (weight, hits & want.counts, held & want.counts)

    return loss


def _markov_term(markov: MarkovHead, want: Wanted, like: mx.array) -> Callable[..., mx.array]:
    """A function that takes (hidden [R, N, H], Markov head's weights) and returns what the text's token before each slot adds to
    the slot's logits: [R, N, V] in the type of `like`. scale [R, N, 1]: factors of the rows."""

    def term(hidden: mx.array, weights: Any, scale: mx.array | float = 1.0) -> mx.array:
        markov.update(weights)
        embedded, rows, state = markov.embed(want.before), [], None
        if markov.kind == "rnn":
            for slot in range(hidden.shape[1]):
                row, state = markov.mix(embedded[:, slot], hidden[:, slot], state)
                rows.append(row)
        mixed = mx.stack(rows, axis=1) if rows else markov.mix(embedded, hidden, None)[0]
        found = markov.markov_w2((mixed * scale).astype(like.dtype)).astype(like.dtype)
        return mx.pad(found, [(0, 0), (0, 0), (0, like.shape[-1] - found.shape[-1])])  # the rest is padding of the head

    return term


def slot_weights(ce: mx.array, counts: mx.array, gamma: float | None) -> mx.array:
    """[R, N]: the paper's decay with a gamma, D-PACE's weights without one; 0 where a slot does not count."""
    return adaptive_weights(ce, counts) if gamma is None else decay_weights(ce.shape[-1] + 1, gamma) * counts


def _chunk_loss(
    head: Callable[[mx.array], mx.array],
    hidden: mx.array,
    want: Wanted,
    config: LossConfig,
    selector: CandidateSelector | MarkovHead | None,
    weights: Any,
) -> _Chunk:
    """Loss and slopes of some blocks, hidden [R, N, H]. The head is frozen: its logits' slope goes straight to hidden."""
    logits = head(hidden)
    term = _markov_term(selector, want, logits) if isinstance(selector, MarkovHead) else None
    if term is not None:
        logits = logits + term(hidden, weights)
    rows = _SlotRows(logits, want)
    label_ce = rows.label_ce()
    metrics = {"ce": (label_ce * want.counts).sum(), "slots": want.counts.sum(0)}
    if selector is None or term is not None:
        weight = slot_weights(-mx.log(mx.maximum(rows.passes(), 1e-9)), want.counts, config.gamma)
        hits = (mx.argmax(logits, axis=-1) == want.labels) & want.counts
        share, chunk = 1.0, _Chunk(mx.array(0.0), mx.array(0.0))
        slope, scale = rows.slope(weight)
        if term is not None:
            flat = sorted(tree_flatten(weights))
            names = [name for name, _ in flat]
            run = lambda h, *w: term(h, tree_unflatten(list(zip(names, w, strict=True))), scale)  # noqa: E731
            chunk.hidden_slope, *chunk.selector_slopes = mx.vjp(run, [hidden, *(w for _, w in flat)], [slope])[1]
    else:
        share = config.backbone
        candidates = top_candidates(logits[..., : selector.rows], selector.top_k)
        unary = mx.take_along_axis(logits, candidates, axis=-1).astype(mx.float32)
        run = mx.value_and_grad(_selector_loss(selector, config, want, candidates, rows.p_at(candidates)), argnums=(0, 1, 2))
        (loss, (own_weight, hits, held)), (by_hidden, by_unary, by_weights) = run(hidden, unary, weights)
        # The backbone learns every counted slot, whether or not the selector's own picks reach it.
        weight = own_weight if not config.own else slot_weights(label_ce, want.counts, config.gamma)
        chunk = _Chunk(loss, by_hidden.astype(mx.float32), [g for _, g in sorted(tree_flatten(by_weights))])
        metrics["held"] = held.sum(0)
        slope, scale = rows.slope(share * weight, candidates, by_unary)
    # The division by the number of blocks comes after the head: before it, these slopes could underflow in float16.
    by_logits = mx.vjp(head, [hidden], [slope])[1][0].astype(mx.float32)
    chunk.hidden_slope = chunk.hidden_slope.astype(mx.float32) + by_logits * scale
    chunk.loss = chunk.loss + share * (weight * rows.ce()).sum()
    chunk.metrics = metrics | {"hits": hits.sum(0), "runs": mx.cumprod(hits.astype(mx.int32), axis=-1).sum(0)}
    return chunk


def block_loss(
    head: Callable[[mx.array], mx.array],
    hidden: mx.array,
    want: Wanted,
    config: LossConfig = LossConfig(),  # noqa: B008 (frozen)
    selector: CandidateSelector | MarkovHead | None = None,
) -> tuple[mx.array, dict[str, mx.array]]:
    """Weighted loss of drafted slots. It holds one chunk of logits at a time, whatever the number of blocks.

    The gradient of each chunk's logits is computed while they exist. The array returned has the loss as its value and these
    gradients as its derivative.

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
    for start, stop in want.cuts(config.chunk_blocks):
        h = mx.stop_gradient(hidden[start:stop])
        if done is not None:
            # One chunk after the other, so that only one chunk of logits is alive.
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
