"""One drafter pass over the blocks of several rows, each with its own context.

All blocks have the same length. As in `passes`, rows of a group attend in one call; any other row attends with its own entries.
Sliding-window layers run row by row. Knows the drafter's layers; knows no target pass, no acceptance and no loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..distribution import Distribution
from ..kernels.layer_routes import attention
from ..models.drafter import Attention, DecoderLayer, Drafter, block_mask
from ..models.dspark import DSparkDrafter
from .group_pass import GroupPass
from .groups import Places, Seat, SlotKV, group_spans

# Methods that a drafter class, its layers and their attention must not override, if it is to draft for several rows. DSpark's
# slots are an exception: they are handled here.
_OWN = {"draft_with_confidence": (Drafter,), "__call__": (Drafter,)}
_OWN |= dict.fromkeys(("slots", "mask_rows"), (Drafter, DSparkDrafter))
_OF_LAYERS = {"__call__": (DecoderLayer,), "own_context": (DecoderLayer,)}
_OF_ATTENTION = dict.fromkeys(("__call__", "inject", "fetch", "attend", "gate_output"), (Attention,))


@dataclass
class RowDraft:
    """One row's part of a drafter pass.

    Shapes:
      - features: [1, S, n_taps * H_target], new context rows, the first at position `start`, which is what `cache` holds
    draw: the target's distribution and its noise [N, V] at the slots, if drafts are sampled with the target's random numbers.
    seat: where the row's keys are, if it shares a group.
    """

    anchor: int
    features: mx.array
    cache: list[Any]
    start: int
    draw: Distribution | None = None
    noise: mx.array | None = None
    seat: Seat | None = None


def can_draft_rows(drafter: Drafter) -> bool:
    """Whether `draft_rows` gives each row what the drafter would give it alone."""
    layer = drafter.layer_class
    parts = ((type(drafter), _OWN), (layer, _OF_LAYERS), (layer.attention_class, _OF_ATTENTION))
    return all(
        getattr(part, name) in [getattr(kind, name) for kind in kinds] for part, own in parts for name, kinds in own.items()
    )


def draft_rows(drafter: Drafter, rows: Sequence[RowDraft], block_size: int, n: int | None) -> tuple[mx.array, mx.array | None]:
    """What `Drafter.draft_with_confidence` gives each row: ids [B, N] int32 and confidences [B, N]. n: as there.

    Afterwards each row's cache holds its new context rows.
    """
    from_anchor = isinstance(drafter, DSparkDrafter) and drafter.config.sample_from_anchor
    block_size -= from_anchor
    anchors = mx.array([row.anchor for row in rows], dtype=mx.int32)
    masks = mx.full((len(rows), block_size - 1), drafter.config.mask_token_id, dtype=mx.int32)
    h = drafter.embed_block(mx.concatenate([anchors[:, None], masks], axis=1))
    context = drafter.context(_joined([row.features for row in rows], 1))
    layout = _Layout(rows, block_size)
    for i, layer in enumerate(drafter.layers):
        h = layer.sublayers(h, lambda x, i=i, layer=layer: layout.attend(layer.self_attn, i, x, context))
    hidden = drafter.norm(h)[:, 0 if from_anchor else 1 :][:, :n]
    return _choose(drafter, rows, hidden, anchors)


class _Layout:
    """Where the new context rows and the blocks of all rows are, in the order in which their keys are computed:

        context a | context b | ... | block a | block b | ...        [C + B * K]

    spans: each row's part of the joined context; ends: the positions of the anchors.
    """

    def __init__(self, rows: Sequence[RowDraft], K: int):
        self.rows, self.K, self.spans, start = rows, K, [], 0
        for row in rows:
            self.spans.append((start, start + row.features.shape[1]))
            start = self.spans[-1][1]
        self._context, self.ends = start, [row.start + row.features.shape[1] for row in rows]
        at = [row.start + i for row in rows for i in range(row.features.shape[1])]
        self._positions = mx.array(at + [end + i for end in self.ends for i in range(K)])
        self._anchors = mx.array(self.ends)
        self._groups = [self._of_group(*span) for span in group_spans(rows)]

    def _of_group(self, first: int, last: int) -> tuple[int, int, GroupPass, Places] | None:
        """Rows first to last - 1, which share a group: (first, last, their pass, where their keys are written)."""
        some, ends = self.rows[first:last], [end + self.K for end in self.ends[first:last]]
        group, slots = some[0].seat.group, [row.seat.slot for row in some]
        at = [(row.seat.slot, row.start + i) for row in some for i in range(row.features.shape[1])]
        at += [(slot, end - self.K + i) for slot, end in zip(slots, ends, strict=True) for i in range(self.K)]
        return first, last, GroupPass(group, slots, ends, [self.K] * len(some)), Places(group, at)

    def attend(self, attn: Attention, layer: int, x: mx.array, context: mx.array) -> mx.array:
        """`Attention.__call__` of each row: [B, K, H] normed block rows and [1, C, H] context rows to [B, K, H]."""
        B, K, H = x.shape
        # To the rotation each context row and each block row is a batch row with its own position.
        k, v = attn.cached_kv(mx.concatenate([context.reshape(-1, 1, H), x.reshape(-1, 1, H)]), self._positions)
        if attn.rotates_late:
            # How a row is rotated depends on its whole length.
            q = mx.concatenate([attn.queries(x[r : r + 1], end) for r, end in enumerate(self.ends)])
        else:
            q = attn.queries(x, self._anchors)
        outs, r = [], 0
        for first, last, group, places in self._groups if attn.window is None and not attn.rotates_late else ():
            if type(self.rows[first].cache[layer]) is SlotKV:
                outs += [self._row(attn, layer, i, q, k, v) for i in range(r, first)]
                outs.append(self._together(attn, layer, range(first, last), group, places, q, k, v))
                r = last
        outs += [self._row(attn, layer, i, q, k, v) for i in range(r, B)]
        return attn.o_proj(_joined(outs, 0).transpose(0, 2, 1, 3).reshape(B, K, -1))

    def _of_rows(self, first: int, last: int, a: mx.array) -> mx.array:
        """The part of rows first to last - 1 in [C + B * K, heads, 1, D]."""
        if last - first == len(self.rows):
            return a
        block = self._context + first * self.K
        return mx.concatenate([a[self.spans[first][0] : self.spans[last - 1][1]], a[block : block + (last - first) * self.K]])

    def _row(self, attn: Attention, layer: int, r: int, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        mine = (self._of_rows(r, r + 1, a).swapaxes(0, 2) for a in (k, v))
        return _attend_row(attn, self.rows[r].cache[layer], self.rows[r].start, q[r : r + 1], *mine)

    def _together(
        self, attn: Attention, layer: int, some: range, group: GroupPass, places: Places, q: mx.array, k: mx.array, v: mx.array
    ) -> mx.array:
        """Attention of rows of a group: [len(some), n_heads, K, D]. Keys that a layer already holds are written again."""
        entries = [self.rows[r].cache[layer] for r in some]
        places.write(entries[0].index, *(self._of_rows(some.start, some.stop, a) for a in (k, v)))
        for r, entry in zip(some, entries, strict=True):
            entry.offset = self.ends[r]
        q = q if len(some) == len(self.rows) else q[some.start : some.stop]
        if not group.is_apart(q, entries[0].index):
            return group.attend_rows(q, entries[0].index, attn.scale, attn.causal)

        def alone(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str | None) -> mx.array:
            return attention(q, k, v, attn.scale, mask)

        rows, masks = [q[i : i + 1] for i in range(len(some))], ["causal" if attn.causal else None] * len(some)
        return _joined(group.attend_apart(rows, entries[0].index, alone, masks), 0)


def _attend_row(attn: Attention, cache: Any, start: int, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """One row's queries [1, n_heads, K, D] with its context and block: keys and values as the cache holds them."""
    K, held = q.shape[2], cache.offset - start
    if held:
        k, v = k[:, :, held:], v[:, :, held:]
    end = start + held + k.shape[2] - K
    k, v = attn.fetch(k, v, cache, K)
    if attn.rotates_late:
        k = attn.rope(k, offset=end + K - k.shape[2])
    return attention(q, k, v, attn.scale, block_mask(K, k.shape[2] - K, attn.causal, attn.window))


def _choose(drafter: Drafter, rows: Sequence[RowDraft], hidden: mx.array, anchors: mx.array) -> tuple[mx.array, mx.array | None]:
    """`Drafter.choose` for all rows; rows with the same sampling settings go together."""
    alike: dict[tuple, list[int]] = {}
    for r, row in enumerate(rows):
        alike.setdefault(() if row.draw is None else row.draw.settings, []).append(r)
    found = []
    for places in alike.values():
        draw, noise = rows[places[0]].draw, ()
        if draw is not None:
            noise = (draw.noised, mx.stack([rows[r].noise[: hidden.shape[1]] for r in places]))
        at = mx.array(places)
        found.append(
            drafter.choose(hidden, anchors, *noise) if len(alike) == 1 else drafter.choose(hidden[at], anchors[at], *noise)
        )
    if len(found) == 1:
        return found[0]
    order = mx.argsort(mx.array([r for places in alike.values() for r in places]))
    ids, confidences = zip(*found, strict=True)
    return mx.concatenate(ids)[order], None if confidences[0] is None else mx.concatenate(confidences)[order]


def _joined(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)
