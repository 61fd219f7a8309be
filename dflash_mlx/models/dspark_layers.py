"""DSpark drafters with layers of another family: DeepSpec's for Gemma 4, and gated ones for Qwen 3.5.

Knows what `dspark` has and adds to its layers. Sources: deepseek-ai/DeepSpec, modeling/dspark/gemma4; for Qwen 3.5
stanleyphoong's Ornith drafter as mlx-dspark 0.20 runs it.

Dimensions as in `drafter`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..config import DrafterConfig
from .drafter import MLP, Attention, DecoderLayer
from .dspark import DSparkDrafter


class Gemma4Attention(Attention):
    """Scores without a scale; values normed without a weight, and made of the keys' matrix where `attention_k_eq_v` says so."""

    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__(config, layer)
        self.scale, self.eps = 1.0, config.rms_norm_eps
        if config.attention_k_eq_v:
            self.pop("v_proj")

    def cached_kv(self, x: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        k = self.k_proj(x)
        k, v = self.normed_kv(k, self.v_proj(x) if "v_proj" in self else k, offset)
        return k, mx.fast.rms_norm(v, None, self.eps)


class Gemma4MLP(MLP):
    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


class Gemma4Layer(DecoderLayer):
    """Norms before and after each sublayer; the whole is multiplied by a number."""

    attention_class = Gemma4Attention

    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__(config, layer)
        self.mlp = Gemma4MLP(config)
        self.pre_feedforward_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layer_scalar = mx.ones((1,))

    def sublayers(self, h: mx.array, attend: Any) -> mx.array:
        h = h + self.post_attention_layernorm(attend(self.input_layernorm(h)))
        h = h + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(h)))
        return h * self.layer_scalar


class Gemma4DSparkDrafter(DSparkDrafter):
    layer_class = Gemma4Layer


class GatedAttention(Attention):
    """Attention whose output is weighed, value by value, by gates that the block's own rows give."""

    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__(config, layer)
        # Rows of `q_proj` in the files: of each head its queries, then its gates.
        self.q_gate = nn.Linear(config.hidden_size, self.n_heads * config.head_dim, bias=config.attention_bias)

    def gate_output(self, out: mx.array, x: mx.array) -> mx.array:
        return out * mx.sigmoid(self.q_gate(x)).reshape(out.shape)


class GatedLayer(DecoderLayer):
    attention_class = GatedAttention


class OffsetRMSNorm(nn.RMSNorm):
    """Its weight is stored less one."""

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, 1.0 + self.weight, self.eps)


class Qwen35DSparkDrafter(DSparkDrafter):
    """Gated attention, part of each head rotated, and norms whose weights are stored less one."""

    layer_class = GatedLayer

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        for _, module in self.named_modules() if config.offset_norms else ():
            for name, norm in module.children().items():
                if isinstance(norm, nn.RMSNorm):
                    setattr(module, name, OffsetRMSNorm(norm.weight.shape[0], norm.eps))
