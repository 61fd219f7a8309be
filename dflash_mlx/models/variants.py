"""What single publishers add to DFlash's layers: attention sinks, a scale of the values, gated heads, norms of the context.

Knows what `drafter` has and adds to it. Sources: XiaomiMiMo's and NVIDIA Nemotron's drafters as vLLM and Modular's MAX run them
(sinks, scale of the values); poolside's Laguna drafters as vLLM's laguna_dflash and SGLang run them.

Dimensions as in `drafter`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..config import DrafterConfig
from .drafter import Attention, DecoderLayer, Drafter
from .dspark import DSparkDrafter


class SinkAttention(Attention):
    """Attention with a learned logit a head that takes its share of each row and adds nothing, and values times a number."""

    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__(config, layer)
        self.value_scale = config.attention_value_scale or 1.0
        if config.attention_sinks:
            self.attention_sink_bias = mx.zeros((self.n_heads,))

    def __call__(self, x: mx.array, context: mx.array, cache: Any, start: int) -> mx.array:
        if hasattr(cache, "attend"):
            raise NotImplementedError("a pass that is put together once has no attention sinks")
        return super().__call__(x, context, cache, start)

    def attend(self, q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str | None) -> mx.array:
        if "attention_sink_bias" not in self:
            return super().attend(q, k, v, mask)
        sinks = self.attention_sink_bias.astype(q.dtype)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask, sinks=sinks)

    def gate_output(self, out: mx.array, x: mx.array) -> mx.array:
        return out if self.value_scale == 1.0 else out * self.value_scale


class SinkLayer(DecoderLayer):
    attention_class = SinkAttention


class SinkDrafter(Drafter):
    """A DFlash drafter with attention sinks or scaled values."""

    layer_class = SinkLayer


class SinkDSparkDrafter(DSparkDrafter):
    """A DSpark drafter with attention sinks or scaled values."""

    layer_class = SinkLayer


class LagunaAttention(Attention):
    """Attention whose heads are each weighed by a gate that the block's own rows give: softplus, in float32."""

    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__(config, layer)
        self.g_proj = nn.Linear(config.hidden_size, self.n_heads, bias=False)

    def gate_output(self, out: mx.array, x: mx.array) -> mx.array:
        gate = nn.softplus(self.g_proj(x).astype(mx.float32)).astype(out.dtype)
        return out * gate[..., None]


class LagunaLayer(DecoderLayer):
    """Context rows pass the layer's input norm too."""

    attention_class = LagunaAttention

    def own_context(self, context: mx.array) -> mx.array:
        return self.input_layernorm(context)


class LagunaDrafter(Drafter):
    """A Laguna drafter: each tap has a norm of its own before they are joined and projected."""

    layer_class = LagunaLayer

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        size, eps = config.target_hidden_size, config.rms_norm_eps
        self.aux_hidden_norms = [nn.RMSNorm(size, eps=eps) for _ in config.target_layer_ids]

    def context(self, features: mx.array) -> mx.array:
        taps = mx.split(features, len(self.aux_hidden_norms), axis=-1)
        normed = [norm(tap) for norm, tap in zip(self.aux_hidden_norms, taps, strict=True)]
        return super().context(mx.concatenate(normed, axis=-1))
