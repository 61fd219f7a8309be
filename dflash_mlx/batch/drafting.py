"""One drafter pass over the blocks of several rows, each with its own context.

Knows the drafter's layers; knows no target pass, no acceptance and no loop. All blocks are equally long. As in `passes`, a row's
keys are its own and are attended to by it alone, so its drafts are those of the row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..distribution import Distribution
from ..kernels.layer_routes import attention
from ..models.drafter import Attention, Drafter, block_mask
from ..models.dspark import DSparkDrafter
from ..rollback import append_window

# What a kind of drafter may not do in its own way, to draft for several rows; DSpark's slots are known.
_OWN = {"draft_with_confidence": (Drafter,), "__call__": (Drafter,)}
_OWN |= dict.fromkeys(("slots", "mask_rows"), (Drafter, DSparkDrafter))


@dataclass
class RowDraft:
    """One row's part of a drafter pass.

    Shapes:
      - features: [1, S, n_taps * H_target], new context rows, the first at position `start`, which is what `cache` holds
    draw: the target's distribution, where drafts are drawn as it draws, and its noise [N, V] at the slots.
    """

    anchor: int
    features: mx.array
    cache: list[Any]
    start: int
    draw: Distribution | None = None
    noise: mx.array | None = None


def can_draft_rows(drafter: Drafter) -> bool:
    """Whether `draft_rows` does what the drafter does for one row."""
    return all(getattr(type(drafter), name) in [getattr(kind, name) for kind in kinds] for name, kinds in _OWN.items())


def draft_rows(drafter: Drafter, rows: Sequence[RowDraft], block_size: int, n: int | None) -> tuple[mx.array, mx.array | None]:
    """What `Drafter.draft_with_confidence` gives each row: ids [B, N] int32 and confidences [B, N]. n: as there.

    Each row's cache then holds its new context rows.
    """
    from_anchor = isinstance(drafter, DSparkDrafter) and drafter.config.sample_from_anchor
    block_size -= from_anchor
    anchors = mx.array([row.anchor for row in rows], dtype=mx.int32)
    masks = mx.full((len(rows), block_size - 1), drafter.config.mask_token_id, dtype=mx.int32)
    h = drafter._embed(mx.concatenate([anchors[:, None], masks], axis=1))
    context = drafter.context(_joined([row.features for row in rows], 1))
    spans, ends, at, start = [], [], [], 0
    for row in rows:
        S = row.features.shape[1]
        spans.append((start, start + S))
        ends.append(row.start + S)
        at += range(row.start, row.start + S + block_size)
        start += S
    places = _Places(rows, spans, mx.array(ends), mx.array(at))
    for i, layer in enumerate(drafter.layers):
        h = layer.sublayers(h, lambda x, i=i, layer=layer: places.attend(layer.self_attn, i, x, context))
    hidden = drafter.norm(h)[:, 0 if from_anchor else 1 :][:, :n]
    return _choose(drafter, rows, hidden, anchors)


@dataclass
class _Places:
    """spans: each row's context rows in the joined context; ends: the anchors' positions; positions: [P], of every row."""

    rows: Sequence[RowDraft]
    spans: list[tuple[int, int]]
    ends: mx.array
    positions: mx.array

    def attend(self, attn: Attention, layer: int, x: mx.array, context: mx.array) -> mx.array:
        """`Attention.__call__` of each row: [B, K, H] normed block rows and [1, C, H] context rows to [B, K, H]."""
        B, K, H = x.shape
        parts = [part for r, (s, e) in enumerate(self.spans) for part in (context[:, s:e], x[r : r + 1])]
        # Each row of context and blocks is a row of the batch, with a position of its own.
        k, v = attn.cached_form(_joined(parts, 1).reshape(-1, 1, H), self.positions)
        outs, start = [], 0
        if attn.rotates_late:
            # The whole length of a row says how it is rotated.
            rotated = [attn.queries(x[r : r + 1], end) for r, end in enumerate(self.ends.tolist())]
            q = mx.concatenate(rotated)
        else:
            q = attn.queries(x, self.ends)
        for r, (row, (s, e)) in enumerate(zip(self.rows, self.spans, strict=True)):
            end = start + e - s + K
            mine = (a[start:end].swapaxes(0, 2) for a in (k, v))
            outs.append(_attend_row(attn, row.cache[layer], row.start, q[r : r + 1], *mine))
            start = end
        return attn.o_proj(_joined(outs, 0).transpose(0, 2, 1, 3).reshape(B, K, -1))


def _attend_row(attn: Attention, cache: Any, start: int, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """One row's queries [1, n_heads, K, D] with its context and block: keys and values as the cache holds them."""
    K, held = q.shape[2], cache.offset - start
    if held:
        k, v = k[:, :, held:], v[:, :, held:]
    end = start + held + k.shape[2] - K
    if attn.window is None:
        k, v = cache.update_and_fetch(k, v)
        cache.trim(K)
    else:
        new = k.shape[2] - K
        keys, values = append_window(cache, k[:, :, :new], v[:, :, :new])
        k, v = mx.concatenate([keys, k[:, :, new:]], axis=2), mx.concatenate([values, v[:, :, new:]], axis=2)
    if attn.rotates_late:
        k = attn.rope(k, offset=end + K - k.shape[2])
    return attention(q, k, v, attn.scale, block_mask(K, k.shape[2] - K, attn.causal, attn.window))


def _choose(drafter: Drafter, rows: Sequence[RowDraft], hidden: mx.array, anchors: mx.array) -> tuple[mx.array, mx.array | None]:
    """`Drafter.choose` of all rows, those that draw alike together."""
    alike: dict[tuple, list[int]] = {}
    for r, row in enumerate(rows):
        alike.setdefault(() if row.draw is None else row.draw.settings, []).append(r)
    found = []
    for places in alike.values():
        draw, noise = rows[places[0]].draw, ()
        if draw is not None:
            noise = (draw.draw, mx.stack([rows[r].noise[: hidden.shape[1]] for r in places]))
        at = mx.array(places)
        found.append(
            drafter.choose(hidden, anchors, *noise) if len(alike) == 1 else drafter.choose(hidden[at], anchors[at], *noise)
        )
    if len(found) == 1:
        return found[0]
    order = mx.argsort(mx.array([r for places in alike.values() for r in places]))
    ids, sure = zip(*found, strict=True)
    return mx.concatenate(ids)[order], None if sure[0] is None else mx.concatenate(sure)[order]


def _joined(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)
