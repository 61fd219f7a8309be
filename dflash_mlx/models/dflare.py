"""DFlare: a DFlash drafter whose layers each weigh the taps in their own way, and have keys and values of the context apart.

Knows what `drafter` has and adds to it. Source: Tencent/AngelSlim's draft model for Qwen 3, and a fork of
vllm-project/speculators.

Dimensions as in `drafter`; T taps, L layers.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..config import DrafterConfig
from .drafter import Attention, DecoderLayer, Drafter, block_mask


class DFlareAttention(Attention):
    """Attention with matrices of their own for the keys and values of the context."""

    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__(config, layer)
        sizes = (config.hidden_size, self.n_kv_heads * config.head_dim)
        self.k_proj_target = nn.Linear(*sizes, bias=config.attention_bias)
        self.v_proj_target = nn.Linear(*sizes, bias=config.attention_bias)

    def cached_kv(self, x: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        return self.normed_kv(self.k_proj_target(x), self.v_proj_target(x), offset)

    def __call__(self, x: mx.array, context: mx.array, cache: Any, start: int) -> mx.array:
        if hasattr(cache, "attend"):
            raise NotImplementedError("a pass that is put together once has one product for context and block")
        K, end = x.shape[1], start + context.shape[1]
        held = cache.offset - start
        k, v = self.cached_kv(context, start)
        k, v = self._append(cache, k[:, :, held:], v[:, :, held:])
        own = super().cached_kv(x, end)
        k, v = (mx.concatenate(both, axis=2) for both in zip((k, v), own, strict=True))
        if self.rotates_late:
            k = self.rope(k, offset=end + K - k.shape[2])
        out = self.attend(self.queries(x, end), k, v, block_mask(K, k.shape[2] - K, self.causal, self.window))
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))


class FusedLayer(DecoderLayer):
    """A layer with context rows of its own."""

    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__(config, layer)
        self.layer = layer

    def own_context(self, context: mx.array) -> mx.array:
        """[B, S, L, H] to this layer's rows [B, S, H]."""
        return context[:, :, self.layer]


class DFlareLayer(FusedLayer):
    attention_class = DFlareAttention


class DFlareDrafter(Drafter):
    """A DFlare drafter: `layer_fusion_weights` [L, T], a softmax over the taps for each layer, in the place of one projection."""

    layer_class = DFlareLayer

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.pop("fc")
        self.fc = self.fuse
        self.layer_fusion_weights = mx.random.normal((config.num_hidden_layers, len(config.target_layer_ids)))

    def fuse(self, features: mx.array) -> mx.array:
        """[B, S, T * H] to each layer's mean of the taps [B, S, L, H]."""
        return fused_taps(self.layer_fusion_weights, features)


def fused_taps(weights: mx.array, features: mx.array) -> mx.array:
    """Each layer's mean of the taps: logits of their shares [L, T] and features [B, S, T * H] to [B, S, L, H]."""
    shares = mx.softmax(weights.astype(mx.float32), axis=-1).astype(features.dtype)
    return shares @ features.reshape(*features.shape[:2], shares.shape[1], -1)
