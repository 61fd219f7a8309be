"""Domino: a DFlash drafter whose slots' logits are corrected by a recurrent summary of the tokens drafted before them.

Knows `dspark`, whose walk from slot to slot it uses. Source: sgl-project/SpecForge, modeling/draft/domino.py.

Dimensions: B batch, K block_size, H hidden, G of the recurrence, E of the correction, V of the target's vocabulary.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..config import DrafterConfig
from .dspark import DSparkDrafter


class PrefixGRU(nn.Module):
    """One layer of gated recurrent units without biases, its gates in PyTorch's order: reset, update, new.

    r = s(x Wr + h Ur), z = s(x Wz + h Uz), n = tanh(x Wn + r * (h Un)), h' = (1 - z) * n + z * h
    """

    def __init__(self, inputs: int, size: int):
        super().__init__()
        bound = size**-0.5
        self.weight_ih_l0 = mx.random.uniform(-bound, bound, (3 * size, inputs))
        self.weight_hh_l0 = mx.random.uniform(-bound, bound, (3 * size, size))

    def __call__(self, x: mx.array, state: mx.array | None) -> mx.array:
        """[B, H] and the state before it [B, G], None: zeros; to the state [B, G]."""
        state = mx.zeros((x.shape[0], self.weight_hh_l0.shape[1]), x.dtype) if state is None else state
        reset, update, new = mx.split(x @ self.weight_ih_l0.T, 3, axis=-1)
        reset_h, update_h, new_h = mx.split(state @ self.weight_hh_l0.T, 3, axis=-1)
        update = mx.sigmoid(update + update_h)
        new = mx.tanh(new + mx.sigmoid(reset + reset_h) * new_h)
        return (1 - update) * new + update * state


class DominoDrafter(DSparkDrafter):
    """DFlash's layers; after `pure_draft_prefix_len` slots, logits get `embed_proj` of the slot's row and the state.

        row              0        1        2        3        4 of K = 5
        shift_label      d1       d2       d3       d4       (none)     a row drafts the token after it
        otherwise        (none)   d1       d2       d3       d4         a row drafts its own token

    The state in front of d2 has read the anchor and d1, in either case.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        hidden, size = config.hidden_size, config.gru_hidden_dim
        self.prefix_gru = PrefixGRU(hidden, size)
        narrow = nn.Linear(hidden + size, config.emb_dim, bias=False)
        self.embed_proj = [narrow, nn.SiLU(), nn.Linear(config.emb_dim, config.vocab_size, bias=False)]

    def mask_rows(self, ids: mx.array, features: mx.array, cache: list, start: int) -> mx.array:
        hidden = self(self.embed_block(ids), features, cache, start)
        return hidden[:, :-1] if self.config.shift_label else hidden[:, 1:]

    def correction(
        self, slot: int, before: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, None, mx.array]:
        state = self.prefix_gru(self._embed(before[:, None])[:, 0], state)
        if slot < self.config.pure_draft_prefix_len:
            return mx.zeros((hidden.shape[0], self.config.vocab_size)), None, state
        term = mx.concatenate([hidden, state.astype(hidden.dtype)], axis=-1)
        for layer in self.embed_proj:
            term = layer(term)
        return term.astype(mx.float32), None, state
