"""DFlash 2: dynamic convolutions in every drafter layer, and a candidate selector in place of the argmax at each slot.

Knows what `drafter` has and adds to it. Source: the published DFlash 2 checkpoints and their authors' code.

Dimensions: B batch, K block_size, N = K - 1, H hidden, k candidates a slot.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ..config import DrafterConfig
from .drafter import DecoderLayer, Drafter, Draw


class DynamicConvolution(nn.Module):
    """DFlash 2: short causal convolutions over the block's rows, before and after a sublayer, with kernels made per row.

        out[i, ch] = sum over t of (base[side, t, ch] + c[i, side, t, ch // group]) * x[i - t, ch]        rows before 0 are zero

    One projection of the sublayer's input gives c for both sides: 0 before the sublayer, 1 after it.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.taps, self.groups = config.conv_kernel_size, config.hidden_size // config.conv_group_size
        self.base_kernel = mx.zeros((2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)

    def kernels(self, x: mx.array) -> mx.array:
        """[B, K, H] input of the sublayer to [2, taps, B, K, H]."""
        B, K, H = x.shape
        c = self.kernel_projection(x).reshape(B, K, 2, self.taps, self.groups).transpose(2, 3, 0, 1, 4)
        return self.base_kernel[:, :, None, None] + mx.repeat(c, H // self.groups, axis=-1)

    @staticmethod
    def convolve(x: mx.array, kernel: mx.array) -> mx.array:
        """[B, K, H] rows by kernels [taps, B, K, H]; tap t looks t rows back."""
        K = x.shape[1]
        rows = [mx.pad(x, [(0, 0), (t, 0), (0, 0)])[:, :K] for t in range(kernel.shape[0])]
        return sum(k * row for k, row in zip(kernel, rows, strict=True))


class ConvolutionLayer(DecoderLayer):
    """A DFlash 2 layer: both sublayers between two dynamic convolutions. Context rows pass by them."""

    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__(config, layer)
        self.attention_conv = DynamicConvolution(config)
        self.mlp_conv = DynamicConvolution(config)

    def sublayers(self, h: mx.array, attend: Callable[[mx.array], mx.array]) -> mx.array:
        x = self.input_layernorm(h)
        before, after = self.attention_conv.kernels(x)
        x = attend(DynamicConvolution.convolve(x, before))
        h = h + DynamicConvolution.convolve(x, after)
        x = self.post_attention_layernorm(h)
        before, after = self.mlp_conv.kernels(x)
        return h + DynamicConvolution.convolve(self.mlp(DynamicConvolution.convolve(x, before)), after)


class CandidateSelector(nn.Module):
    """DFlash 2: chooses a path through each slot's best candidates, left to right from the anchor.

    score(p -> c) = unary[c] + <predecessor[p] * projection(h), successor[c]>
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.top_k, rows = config.selector_top_k, config.selector_vocab_size or config.vocab_size
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        self.predecessor_codebook = mx.zeros((rows, config.selector_rank))
        self.successor_codebook = mx.zeros((rows, config.selector_rank))

    def __call__(
        self,
        hidden: mx.array,
        unary: mx.array,
        candidates: mx.array,
        anchor: mx.array,
        draw: Draw | None = None,
        noise: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Walk the slots.

        Shapes:
          - hidden: [B, N, H]; unary, candidates: [B, N, k] float32 and token ids; anchor: [B] the token before slot 0
        Args:
          draw, noise: chooses from log-probabilities [B, k] under noise [B, N, k] of the slot; None: the best candidate.
        Returns: the path [B, N] int32, and the scores [B, N, k] that each of its tokens was chosen by.
        """
        projected = self.hidden_projection(hidden).astype(mx.float32)
        successors = self.successor_codebook[candidates].astype(mx.float32)
        token, path, seen = anchor, [], []
        for i in range(hidden.shape[1]):
            scores = self._scores(projected[:, i], unary[:, i], successors[:, i], token)
            if draw is None:
                slot = mx.argmax(scores, axis=-1)
            else:
                slot = draw(scores - mx.logsumexp(scores, axis=-1, keepdims=True), noise[:, i])
            token = mx.take_along_axis(candidates[:, i], slot[:, None], axis=1)[:, 0]
            path.append(token)
            seen.append(scores)
        return mx.stack(path, axis=1).astype(mx.int32), mx.stack(seen, axis=1)

    def scores(self, hidden: mx.array, unary: mx.array, candidates: mx.array, before: mx.array) -> mx.array:
        """Scores of all slots at once, of which the tokens before them are known.

        Shapes:
          - hidden: [..., H]; unary, candidates: [..., k]; before: [...] token ids
        Returns: [..., k] float32
        """
        projected = self.hidden_projection(hidden).astype(mx.float32)
        return self._scores(projected, unary, self.successor_codebook[candidates].astype(mx.float32), before)

    def _scores(self, projected: mx.array, unary: mx.array, successors: mx.array, before: mx.array) -> mx.array:
        """`scores`, of projected rows [..., rank] and the candidates' rows of the codebook [..., k, rank]."""
        # A token beyond the codebooks (added after training) has no row: it borrows the last one.
        last = self.predecessor_codebook.shape[0] - 1
        query = self.predecessor_codebook[mx.minimum(before, last)].astype(mx.float32) * projected
        return unary + (successors @ query[..., None])[..., 0]


class DFlash2Drafter(Drafter):
    """DFlash with dynamic convolutions in every layer, and a selector in place of the argmax at each slot."""

    layer_class = ConvolutionLayer

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def choose(
        self, hidden: mx.array, anchor: mx.array, draw: Draw | None = None, noise: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        if not hidden.shape[1]:
            return mx.zeros(hidden.shape[:2], dtype=mx.int32), mx.zeros(hidden.shape[:2])
        unary, candidates = self.candidates(hidden)
        if noise is not None:
            # A candidate beyond the target's vocabulary is padding of the head.
            noise = mx.take_along_axis(noise, mx.minimum(candidates, noise.shape[-1] - 1), axis=-1)
        path, scores = self.candidate_selector(hidden, unary, candidates, anchor, draw, noise)
        return path, mx.softmax(scores, axis=-1).max(axis=-1)

    def draw(
        self, hidden: mx.array, anchor: mx.array, probabilities: Callable[[mx.array], mx.array], temperature: float, key: mx.array
    ) -> tuple[mx.array, mx.array | None, mx.array]:
        """As `Drafter.draw`, by the selector's walk: over the candidates of a slot, at the temperature alone, no filters."""
        unary, candidates = self.candidates(hidden)
        noise = mx.random.gumbel(unary.shape, key=key)

        def hot(logprobs: mx.array, noise: mx.array) -> mx.array:
            return mx.argmax(logprobs / temperature + noise, axis=-1)

        path, scores = self.candidate_selector(hidden, unary, candidates, anchor, hot, noise)
        return path, candidates, mx.softmax(scores / temperature, axis=-1, precise=True)

    def candidates(self, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """[B, N, H] to each slot's best tokens: their logits, float32, as the head's scale and soft-cap leave them, and ids.

        Shapes of both results: [B, N, top_k]
        """
        logits = self._head(hidden).astype(mx.float32)
        if "d2t" not in self:
            # No candidate without a row in the codebooks: padding of the head.
            logits = logits[..., : self.candidate_selector.successor_codebook.shape[0]]
        k = min(self.candidate_selector.top_k, logits.shape[-1])
        ids = mx.argpartition(logits, kth=-k, axis=-1)[..., -k:]
        return mx.take_along_axis(logits, ids, axis=-1), self.target_ids(ids)
