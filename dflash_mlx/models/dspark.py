"""DSpark: a drafter whose slots' logits get a term of the token before them, and which says how likely each is accepted.

Knows what `drafter` has and adds to it. The layers are DFlash's; where the config says `sample_from_anchor`, the anchor's own row
drafts the first token, so that a block of K - 1 rows drafts K - 1 tokens.
Source: arXiv 2607.05147; deepseek-ai/DeepSpec, sgl-project/SpecForge and vllm-project/speculators, which agree on the heads.

Dimensions: B batch, K block_size, N = K - 1, H hidden, r rank, R rows of the head, V of the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..config import DrafterConfig
from .drafter import Drafter, Noised


class MarkovHead(nn.Module):
    """What a slot's logits get of the token before it: a product of two matrices of a low rank.

        vanilla   w2 w1[p]                                p: the token before
        gated     w2 (sigmoid(gate [h, w1[p]]) * w1[p])   h: the slot's hidden row
        rnn       w2 tanh(o), s' = g * s + (1 - g) * tanh(c), with [g, c, o] = joint [s, w1[p], h] and s = 0 at first

    `markov_w1` has a row for each of the target's tokens, `markov_w2` for each of the drafter's head.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.kind, self.rows = config.markov_head_type, config.vocab_size
        self.markov_w1 = nn.Embedding(self.rows, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or self.rows, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def embed(self, before: mx.array) -> mx.array:
        """[B] token ids of the target to [B, r]."""
        # A token beyond the table (added after training) has no row: it borrows the last one.
        return self.markov_w1(mx.minimum(before, self.rows - 1))

    def __call__(self, embedded: mx.array, hidden: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """The term of one slot, [B, R] float32, and the state for the next; as `mix`."""
        row, state = self.mix(embedded, hidden, state)
        return self.markov_w2(row).astype(mx.float32), state

    def mix(self, embedded: mx.array, hidden: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """What `markov_w2` is given for one slot, and the state for the next.

        Shapes:
          - embedded: [B, r] of the token before; hidden: [B, H] of the slot; state: [B, r], None at the first slot
        Returns: [B, r], and [B, r] or None
        """
        if self.kind == "gated":
            embedded = mx.sigmoid(self.gate_proj(mx.concatenate([hidden, embedded], axis=-1))) * embedded
        elif self.kind == "rnn":
            state = mx.zeros_like(embedded) if state is None else state
            gate, new, out = mx.split(self.joint_proj(mx.concatenate([state, embedded, hidden], axis=-1)), 3, axis=-1)
            gate = mx.sigmoid(gate)
            state, embedded = gate * state + (1 - gate) * mx.tanh(new), mx.tanh(out)
        return embedded, state


class ConfidenceHead(nn.Module):
    """How likely a slot's token is accepted: a product of its hidden row and, where trained so, the embedded token before it."""

    def __init__(self, inputs: int, bias: bool):
        super().__init__()
        self.proj = nn.Linear(inputs, 1, bias=bias)

    def __call__(self, features: mx.array) -> mx.array:
        """[B, N, H or H + r] to probabilities [B, N] float32."""
        return mx.sigmoid(self.proj(features)[..., 0].astype(mx.float32))


class LogSnrEmbed(nn.Module):
    """The noise level that a block's rows get as input: none at the anchor, full noise at the masks.

    Of a log signal-to-noise ratio only its place between the least and the greatest counts: 1000 at the anchor, 0 at a mask.
    64 sines of it and 64 cosines go through two matrices. Source: PrismML's Bonsai drafters as mlx-dspark 0.20 runs them.
    """

    def __init__(self, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(128, hidden), nn.Linear(hidden, hidden)

    def __call__(self, rows: int) -> mx.array:
        """[rows, H] to be added to a block's embedding."""
        places = mx.where(mx.arange(rows) == 0, 1000.0, 0.0)
        angles = places[:, None] * mx.power(10000.0, -mx.arange(64) / 64)
        waves = mx.concatenate([mx.sin(angles), mx.cos(angles)], axis=-1)
        return self.fc2(nn.silu(self.fc1(waves.astype(self.fc1.bias.dtype))))


class DSparkDrafter(Drafter):
    """DFlash's layers, a Markov head that walks the slots from left to right, and a confidence head where the files have one."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        if config.markov_rank:
            self.markov_head = MarkovHead(config)
        if config.log_snr_conditioning:
            self.log_snr_embed = LogSnrEmbed(config.hidden_size)

    def embed_block(self, ids: mx.array) -> mx.array:
        block = super().embed_block(ids)
        return block + self.log_snr_embed(ids.shape[1]).astype(block.dtype) if "log_snr_embed" in self else block

    def add_confidence_head(self, inputs: int, bias: bool) -> None:
        """inputs: columns of its matrix as the files have it: H, or more where it reads the token before."""
        config = self.config
        wide = inputs != config.hidden_size and config.markov_rank
        self.confidence_head = ConfidenceHead(config.hidden_size + (config.markov_rank if wide else 0), bias)

    def slots(
        self, anchor: mx.array, features: mx.array, cache: list, start: int, block_size: int, accelerator: Any = None
    ) -> mx.array:
        # The anchor's row is the first slot: one mask fewer.
        return super().slots(anchor, features, cache, start, block_size - self.config.sample_from_anchor, accelerator)

    def mask_rows(self, ids: mx.array, features: mx.array, cache: list, start: int) -> mx.array:
        hidden = self(self.embed_block(ids), features, cache, start)
        return hidden if self.config.sample_from_anchor else hidden[:, 1:]

    def choose(
        self, hidden: mx.array, anchor: mx.array, noised: Noised | None = None, noise: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        def pick(slot: int, logits: mx.array) -> mx.array:
            return mx.argmax(logits if noised is None else self._noised(logits, noise[:, slot], noised), axis=-1)

        ids, logits, embedded = self._walk(hidden, anchor, pick)
        if not hidden.shape[1]:
            return ids, mx.zeros(ids.shape)
        if "confidence_head" not in self:
            return ids, mx.softmax(mx.stack(logits, axis=1), axis=-1).max(axis=-1)
        is_wide = self.confidence_head.proj.weight.shape[-1] != hidden.shape[-1]
        features = mx.concatenate([hidden, mx.stack(embedded, axis=1).astype(hidden.dtype)], axis=-1) if is_wide else hidden
        return ids, self.confidence_head(features)

    def draw(
        self, hidden: mx.array, anchor: mx.array, probabilities: Callable[[mx.array], mx.array], temperature: float, key: mx.array
    ) -> tuple[mx.array, mx.array | None, mx.array]:
        """As `Drafter.draw`, each slot after what was drawn before it."""
        keys, q = mx.random.split(key, max(hidden.shape[1], 1)), []

        def pick(slot: int, logits: mx.array) -> mx.array:
            q.append(probabilities(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
            return mx.random.categorical(mx.log(q[-1]), key=keys[slot])

        drawn, _, _ = self._walk(hidden, anchor, pick)
        told = mx.stack(q, axis=1)
        every = self.target_ids(mx.broadcast_to(mx.arange(told.shape[-1]), told.shape)) if "d2t" in self else None
        return drawn, every, told

    def _walk(
        self, hidden: mx.array, anchor: mx.array, pick: Callable[[int, mx.array], mx.array]
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        """The slots from left to right, each after the token of the one before, the first after the anchor.

        Shapes:
          - hidden: [B, N, H]; anchor: [B]
        Args:
          pick: (slot, its logits [B, R] float32) to the head's ids [B]
        Returns: the target's ids [B, N] int32; of each slot its logits [B, R], and [B, r] of the token before it
        """
        base, before, state = self._head(hidden).astype(mx.float32), anchor, None
        ids, rows, embeddings = [], [], []
        for slot in range(hidden.shape[1]):
            logits = base[:, slot]
            term, embedded, state = self.correction(slot, before, hidden[:, slot], state)
            if embedded is not None:
                embeddings.append(embedded)
            if term is not None:
                both = min(term.shape[-1], logits.shape[-1])  # what one has more is padding
                logits = logits[:, :both] + term[:, :both]
            rows.append(logits)
            before = self.target_ids(pick(slot, logits))
            ids.append(before)
        return mx.stack(ids, axis=1) if ids else mx.zeros(hidden.shape[:2], dtype=mx.int32), rows, embeddings

    def correction(
        self, slot: int, before: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array | None, mx.array | None, mx.array | None]:
        """What a slot's logits get of the tokens before it.

        Shapes:
          - before: [B], the last of them; hidden: [B, H] of the slot; state: of the slot before it, None at the first one
        Returns: the term [B, R] float32, what the token before is embedded as [B, r], and the state; None where there is none
        """
        if "markov_head" not in self:
            return None, None, None
        embedded = self.markov_head.embed(before)
        term, state = self.markov_head(embedded, hidden, state)
        return term, embedded, state
