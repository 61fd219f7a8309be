"""DFlash 2: dynamic convolutions in every drafter layer, and a candidate selector in place of the argmax at each slot.

Knows what `drafter` has and adds to it. Source: the published DFlash 2 checkpoints and their authors' code.

Dimensions: B batch, K block_size, N = K - 1, H hidden, k candidates a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from ..config import DrafterConfig
from .drafter import DecoderLayer, Drafter, Noised

# Of a side of a convolution: base and dynamic kernels by tap.
Kernel = tuple[list[mx.array], list[mx.array]]


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

    def kernels(self, x: mx.array) -> tuple[Kernel, Kernel]:
        """[B, K, H] input of the sublayer to the kernels of both sides, each as two summands a tap.

        Shapes of a tap: base [1, groups, H // groups]; dynamic [B, K, 1, groups, 1]
        """
        (B, K, _), taps = x.shape, self.taps
        # Split and not indexed: parts are then views, and no launch.
        dynamic = mx.split(self.kernel_projection(x).reshape(B, K, 2 * taps, self.groups, 1), 2 * taps, axis=2)
        base = mx.split(self.base_kernel.reshape(2 * taps, self.groups, -1), 2 * taps)
        return (base[:taps], dynamic[:taps]), (base[taps:], dynamic[taps:])

    @staticmethod
    def convolve(x: mx.array, kernel: Kernel) -> mx.array:
        """[B, K, H] rows by the kernels of a side; tap t looks t rows back."""
        (base, dynamic), (B, K, H) = kernel, x.shape
        rows = [x, *(mx.pad(x, [(0, 0), (t, 0), (0, 0)])[:, :K] for t in range(1, len(base)))]
        return weighted_rows(base, dynamic, [r.reshape(B, K, *base[0].shape) for r in rows]).reshape(B, K, H)


@mx.compile
def weighted_rows(base: list[mx.array], dynamic: list[mx.array], rows: list[mx.array]) -> mx.array:
    """Sum over taps of (base [1, groups, size] + dynamic [B, K, 1, groups, 1]) * rows [B, K, 1, groups, size], in one launch."""
    first, *more = [(b + c) * row for b, c, row in zip(base, dynamic, rows, strict=True)]
    for one in more:
        first = first + one
    return first


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

    A codebook is an array [rows, rank], or a quantized embedding of as many.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.top_k, self.rows = config.selector_top_k, config.selector_vocab_size or config.vocab_size
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        self.predecessor_codebook = mx.zeros((self.rows, config.selector_rank))
        self.successor_codebook = mx.zeros((self.rows, config.selector_rank))

    def __call__(
        self,
        hidden: mx.array,
        unary: mx.array,
        candidates: mx.array,
        anchor: mx.array,
        noised: Noised | None = None,
        noise: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Choose a path. What a slot would choose after each candidate of the slot before is known at once for all slots.

        Shapes:
          - hidden: [B, N, H]; unary, candidates: [B, N, k] float32 and token ids; anchor: [B] the token before slot 0
        Args:
          noised, noise: chooses by scores of log-probabilities [..., k] under noise [B, N, k]; None: the best candidate.
        Returns: the path [B, N] int32, and the scores [B, N, k] that each of its tokens was chosen by.
        """
        first = mx.broadcast_to(anchor[:, None, None], (*anchor.shape, 1, candidates.shape[-1]))
        before = mx.concatenate([first, candidates[:, :-1]], axis=1)
        scores = self.scores(hidden, unary, candidates, before)  # [B, N, k before, k]
        by = scores
        if noised is not None:
            by = noised(scores - mx.logsumexp(scores, axis=-1, keepdims=True), noise[:, :, None])
        slots = follow(mx.argmax(by, axis=-1))
        came_from = mx.pad(slots[:, :-1], [(0, 0), (1, 0)])
        path = mx.take_along_axis(candidates, slots[..., None], axis=-1)[..., 0]
        return path.astype(mx.int32), mx.take_along_axis(scores, came_from[..., None, None], axis=2)[:, :, 0]

    def scores(self, hidden: mx.array, unary: mx.array, candidates: mx.array, before: mx.array) -> mx.array:
        """Scores of a slot's candidates after each token that may come before it.

        Shapes:
          - hidden: [..., H]; unary, candidates: [..., k]; before: [..., j] token ids
        Returns: [..., j, k] float32
        """
        projected = self.hidden_projection(hidden).astype(mx.float32)
        # A token beyond the codebooks (added after training) has no row: it borrows the last one.
        query = _rows_of(self.predecessor_codebook, mx.minimum(before, self.rows - 1)) * projected[..., None, :]
        return unary[..., None, :] + query @ _rows_of(self.successor_codebook, candidates).swapaxes(-1, -2)


def _rows_of(codebook: mx.array | nn.Module, ids: mx.array) -> mx.array:
    """[...] token ids to their rows [..., rank], float32."""
    return (codebook[ids] if isinstance(codebook, mx.array) else codebook(ids)).astype(mx.float32)


def follow(chosen: mx.array) -> mx.array:
    """The path through the slots, if each slot has a choice for every candidate of the slot before it.

        chosen   0 0 0 | 2 1 0 | 1 1 2      slot 0 chooses 0; after that, slot 1 chooses 2; after that, slot 2 chooses 2

    Each step doubles the length of the joined choices: four steps for 15 slots.

    Shapes:
      - chosen: [B, N, k] places among a slot's candidates by place of the one before; all of slot 0 are equal
    Returns: [B, N] places
    """
    step, N = 1, chosen.shape[1]
    while step < N:
        behind = mx.take_along_axis(chosen[:, step:], chosen[:, :-step], axis=-1)
        chosen = mx.concatenate([chosen[:, :step], behind], axis=1)
        step *= 2
    return chosen[..., 0]


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


class DFlash2Drafter(Drafter):
    """DFlash with dynamic convolutions in every layer, and a selector in place of the argmax at each slot."""

    layer_class = ConvolutionLayer

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def choose(
        self, hidden: mx.array, anchor: mx.array, noised: Noised | None = None, noise: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        if not hidden.shape[1]:
            return mx.zeros(hidden.shape[:2], dtype=mx.int32), mx.zeros(hidden.shape[:2])
        unary, candidates = self.candidates(hidden, noised, noise)
        if noise is not None:
            noise = mx.take_along_axis(noise, candidates, axis=-1)
        path, scores = self.candidate_selector(hidden, unary, candidates, anchor, noised, noise)
        return path, mx.softmax(scores, axis=-1).max(axis=-1)

    def draw(
        self, hidden: mx.array, anchor: mx.array, probabilities: Callable[[mx.array], mx.array], temperature: float, key: mx.array
    ) -> tuple[mx.array, mx.array | None, mx.array]:
        """As `Drafter.draw`, by the selector's walk: over the candidates of a slot, at the temperature alone, no filters."""
        unary, candidates = self.candidates(hidden)
        noise = mx.random.gumbel(unary.shape, key=key)

        def heated(logprobs: mx.array, noise: mx.array) -> mx.array:
            return logprobs / temperature + noise

        path, scores = self.candidate_selector(hidden, unary, candidates, anchor, heated, noise)
        return path, candidates, mx.softmax(scores / temperature, axis=-1, precise=True)

    def candidates(
        self, hidden: mx.array, noised: Noised | None = None, noise: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """[B, N, H] to each slot's best tokens: their logits, float32, as the head's scale and soft-cap leave them, and ids.

        Under noise [B, N, V] half are the likeliest and half those that the noise lifts: what the target draws at temperature 1
        is outside its 16 likeliest tokens every fourth time in chat.

        Shapes of both results: [B, N, top_k]
        """
        logits = self._head(hidden).astype(mx.float32)
        if "d2t" not in self:
            # No candidate without a row in the codebooks: padding of the head.
            logits = logits[..., : self.candidate_selector.rows]
        k = self.candidate_selector.top_k
        if noised is None:
            ids = top_candidates(logits, k)
        else:
            # Filters are for the selector's own choice: over the whole vocabulary they would sort it. Padding has no score.
            scores = self._noised(logits, noise, partial(noised, filtered=False))
            ids = top_candidates(logits[..., : scores.shape[-1]], max(k // 2, 1))[..., : k // 2]
            left = mx.put_along_axis(scores, ids, mx.array(-mx.inf), axis=-1)
            ids = mx.concatenate([ids, top_candidates(left, k - k // 2)], axis=-1)
        return mx.take_along_axis(logits, ids, axis=-1), self.target_ids(ids)
