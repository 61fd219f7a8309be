"""Latent attention (MLA) in drafters: queries and keys through narrow matrices, part of each key rotated and shared by all heads.

Knows what the other kinds have and puts another attention into their layers. Keys and values are cached as each head's own:
caches, windows and rollback are every drafter's. Sources: sgl-project/SpecForge, pull request 758; TorchSpec's drafters for
Kimi K3; DeepSeek-V3 for the scale under YaRN.

Dimensions as in `drafter`; P of the unrotated part, R of the rotated one, D = P + R, W of a value.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..config import DrafterConfig
from .dflash2 import ConvolutionLayer, DFlash2Drafter
from .domino import DominoDrafter
from .drafter import Attention, DecoderLayer, Drafter
from .dspark import DSparkDrafter
from .rope import make_rope


class LatentAttention(Attention):
    """Keys and values of a row are made of one latent vector; the part that is rotated beside it."""

    def __init__(self, config: DrafterConfig, layer: int):
        nn.Module.__init__(self)
        c, heads, bias = config, config.num_attention_heads, config.attention_bias
        self.n_heads = self.n_kv_heads = heads
        self.nope, self.turned, self.wide = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.causal, self.window = c.causal[layer], c.windows[layer]
        D = self.nope + self.turned
        self.scale = D**-0.5 * _magnitude(c.ropes[layer].parameters) ** 2
        if c.q_lora_rank is None:
            self.q_proj = nn.Linear(c.hidden_size, heads * D, bias=False)
        else:
            self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(c.q_lora_rank, eps=c.rms_norm_eps)
            self.q_b_proj = nn.Linear(c.q_lora_rank, heads * D, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.kv_lora_rank + self.turned, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(c.kv_lora_rank, eps=c.rms_norm_eps)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, heads * (self.nope + self.wide), bias=False)
        self.o_proj = nn.Linear(heads * self.wide, c.hidden_size, bias=bias)
        self.rope = make_rope(c.ropes[layer], c.max_position_embeddings)
        self.rotates_late = False

    def queries(self, x: mx.array, offset: int) -> mx.array:
        q = self.q_proj(x) if "q_proj" in self else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(*x.shape[:2], self.n_heads, -1).transpose(0, 2, 1, 3)
        return mx.concatenate([q[..., : self.nope], self.rope(q[..., self.nope :], offset=offset)], axis=-1)

    def cached_kv(self, x: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        """[B, L, H] rows to keys [B, n_heads, L, D] and values [B, n_heads, L, W]."""
        B, L, _ = x.shape
        latent, turned = mx.split(self.kv_a_proj_with_mqa(x), [-self.turned], axis=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).reshape(B, L, self.n_heads, -1).transpose(0, 2, 1, 3)
        turned = mx.broadcast_to(self.rope(turned[:, None], offset=offset), (B, self.n_heads, L, self.turned))
        return mx.concatenate([both[..., : self.nope], turned], axis=-1), both[..., self.nope :]

    def __call__(self, x: mx.array, context: mx.array, cache: Any, start: int) -> mx.array:
        if hasattr(cache, "attend"):
            raise NotImplementedError("a pass that is put together once has no latent attention")
        return super().__call__(x, context, cache, start)

    def attend(self, q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str | None) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)


def _magnitude(rope: Any) -> float:
    """What YaRN's `mscale_all_dim` makes of queries and of keys, the unrotated parts included."""
    all_dim, factor = rope.get("mscale_all_dim"), rope.get("factor") or 1.0
    return 0.1 * all_dim * math.log(factor) + 1.0 if all_dim and factor > 1 else 1.0


class LatentLayer(DecoderLayer):
    attention_class = LatentAttention


class LatentConvolutionLayer(ConvolutionLayer):
    attention_class = LatentAttention


class LatentDrafter(Drafter):
    layer_class = LatentLayer


class LatentDFlash2Drafter(DFlash2Drafter):
    layer_class = LatentConvolutionLayer


class LatentDSparkDrafter(DSparkDrafter):
    layer_class = LatentLayer


class LatentDominoDrafter(DominoDrafter):
    layer_class = LatentLayer
