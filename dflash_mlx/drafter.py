"""The DFlash drafter: one pass fills a block `[anchor, MASK, MASK, ...]` from the target's context features.

Knows its layers, their masks and positions, and its own context cache. Knows nothing of files, and of the target only the
two functions that `bind` hands it: token ids to embeddings, hidden states to logits.
Source: DFlash, arXiv 2602.06036, section 4 and appendix A; masks and windows as in the published checkpoints.

Dimensions: B batch, S new context rows, C context rows in all, K block_size, H hidden, D head_dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.rope_utils import SuScaledRoPE, initialize_rope

from .cache import append_window
from .config import DrafterConfig, RopeConfig


class YarnRoPE(nn.Module):
    """YaRN (arXiv 2309.00071) with the two keys that mlx-lm's class does not read: `attention_factor` and `truncate`."""

    def __init__(self, rope: RopeConfig):
        super().__init__()
        p, dims = rope.parameters, rope.dims
        factor, original = p["factor"], p["original_max_position_embeddings"]

        def dim_of(rotations: float) -> float:
            return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

        low, high = dim_of(p.get("beta_fast", 32)), dim_of(p.get("beta_slow", 1))
        if p.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        ramp = mx.clip((mx.arange(dims // 2, dtype=mx.float32) - low) / max(high - low, 0.001), 0, 1)
        base = rope.theta ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
        # Wavelengths: kept where the ramp is 0, stretched by factor where it is 1.
        self._freqs = 1.0 / ((1.0 - ramp) / base + ramp / (factor * base))
        self.dims, self.traditional = dims, rope.traditional
        self.scale = p.get("attention_factor") or _yarn_scale(factor, p.get("mscale"), p.get("mscale_all_dim"))

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        if self.scale != 1.0:
            x = x.at[..., : self.dims].multiply(self.scale)
        return mx.fast.rope(x, self.dims, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=self._freqs)


def _yarn_scale(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def scale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


class LongRoPE(nn.Module):
    """LongRoPE (arXiv 2402.13753): short factors up to the original context length, long factors beyond it."""

    def __init__(self, rope: RopeConfig, max_position_embeddings: int):
        super().__init__()
        p = rope.parameters
        self.original = p["original_max_position_embeddings"]

        def one(factors: list[float]) -> SuScaledRoPE:
            return SuScaledRoPE(
                rope.dims,
                base=rope.theta,
                max_position_embeddings=max_position_embeddings,
                original_max_position_embeddings=self.original,
                long_factor=factors,
                long_mscale=p.get("attention_factor"),
            )

        self._short, self._long = one(p["short_factor"]), one(p["long_factor"])

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        return (self._short if offset + x.shape[-2] <= self.original else self._long)(x, offset=offset)


def make_rope(rope: RopeConfig, max_position_embeddings: int | None) -> nn.Module:
    """The module that rotates [B, heads, L, D] from position `offset` on, for any kind that `RopeConfig` may name."""
    if rope.kind == "yarn":
        return YarnRoPE(rope)
    if rope.kind == "longrope":
        return LongRoPE(rope, max_position_embeddings)
    scaling = {"rope_type": rope.kind, **rope.parameters}
    return initialize_rope(rope.dims, rope.theta, rope.traditional, scaling, max_position_embeddings)


class Attention(nn.Module):
    """Block attention with KV injection: keys and values of the context come from the target's features."""

    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__()
        heads, kv_heads, D, bias = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.attention_bias
        self.n_heads, self.n_kv_heads, self.scale = heads, kv_heads, D**-0.5
        self.causal, self.window = config.causal[layer], config.windows[layer]
        self.q_proj = nn.Linear(config.hidden_size, heads * D, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * D, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * D, bias=bias)
        self.o_proj = nn.Linear(heads * D, config.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(D, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(D, eps=config.rms_norm_eps)
        self.rope = make_rope(config.ropes[layer], config.max_position_embeddings)

    def queries(self, x: mx.array, offset: int) -> mx.array:
        """[B, K, H] block rows to rotated queries [B, n_heads, K, D]; `offset` is the anchor's position."""
        B, K, _ = x.shape
        q = self.q_norm(self.q_proj(x).reshape(B, K, self.n_heads, -1)).transpose(0, 2, 1, 3)
        return self.rope(q, offset=offset)

    def keys_values(self, x: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        """[B, L, H] rows to rotated keys and values, both [B, n_kv_heads, L, D]; `offset` is the first row's position."""
        B, L, _ = x.shape
        k = self.k_norm(self.k_proj(x).reshape(B, L, self.n_kv_heads, -1)).transpose(0, 2, 1, 3)
        v = self.v_proj(x).reshape(B, L, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
        return self.rope(k, offset=offset), v

    def inject(self, context: mx.array, cache: Any, start: int) -> None:
        """Append keys and values of context rows at positions start, start + 1, ... that the cache does not hold yet."""
        k, v = self.keys_values(context, start)
        held = cache.offset - start
        if held < context.shape[1]:
            self._append(cache, k[:, :, held:], v[:, :, held:])

    def _append(self, cache: Any, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        if self.window is None:
            return cache.update_and_fetch(k, v)
        return append_window(cache, k, v)

    def __call__(self, x: mx.array, context: mx.array, cache: Any, start: int) -> mx.array:
        """Attend from the block to the context and to the block.

        Shapes:
          - x: [B, K, H] normed block rows, the first at position start + S; context: [B, S, H] new context rows
        Returns: [B, K, H]. The cache then holds context rows only: block keys and values serve this pass alone.
        """
        B, K, _ = x.shape
        end = start + context.shape[1]
        q = self.queries(x, end)
        # One product and one rotation for context and block: block rows follow the last context row.
        k, v = self.keys_values(mx.concatenate([context, x], axis=1), start)
        held = cache.offset - start
        k, v = k[:, :, held:], v[:, :, held:]
        if self.window is None:
            k, v = cache.update_and_fetch(k, v)
            cache.trim(K)
        else:
            new = k.shape[2] - K
            keys, values = append_window(cache, k[:, :, :new], v[:, :, :new])
            k = mx.concatenate([keys, k[:, :, new:]], axis=2)
            v = mx.concatenate([values, v[:, :, new:]], axis=2)
        mask = block_mask(K, k.shape[2] - K, self.causal, self.window)
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(B, K, -1))


def block_mask(K: int, C: int, causal: bool, window: int | None) -> mx.array | str | None:
    """Which of the last C context rows and K block rows each block row sees; None: all of them.

        position   p-C ... p-1 | p  p+1 ... p+K-1     row j sees context row c if (p + j) - c < window,
                     context   |      block           and of the block all rows, or those up to j if causal

    Returns: bool [K, C + K] (True: seen), "causal", or None.
    Source: the published checkpoints' reference code; the window never cuts inside the block.
    """
    if window is None or C + K <= window:
        return "causal" if causal else None
    j, c = mx.arange(K)[:, None], mx.arange(C)[None, :]
    context = (C - c) + j < window
    block = mx.arange(K)[None, :] <= j if causal else mx.ones((K, K), dtype=mx.bool_)
    return mx.concatenate([context, block], axis=1)


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, h: mx.array, context: mx.array, cache: Any, start: int) -> mx.array:
        """[B, K, H] to [B, K, H]; context rows enter attention as they are, without this layer's input norm."""
        h = h + self.self_attn(self.input_layernorm(h), context, cache, start)
        return h + self.mlp(self.post_attention_layernorm(h))


class Drafter(nn.Module):
    """A DFlash drafter with the published tensor names. `bind` it to a target before `draft`."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        features = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._embed = self._head = self._target = None

    def bind(self, embed: Callable[[mx.array], mx.array], head: Callable[[mx.array], mx.array], target: Any = None) -> Drafter:
        """Borrow the target's embedding (ids [B, L] to [B, L, H]) and head (hidden [B, L, H] to logits [B, L, V])."""
        self._embed, self._head, self._target = embed, head, target
        return self

    @property
    def target(self) -> Any:
        """The target model object whose embedding and head are borrowed, or None."""
        return self._target

    def make_cache(self) -> list[Any]:
        """One empty context cache a layer: all rows for full layers, the last window - 1 for sliding ones."""
        return [KVCache() if w is None else RotatingKVCache(max_size=w - 1) for w in self.config.windows]

    def context(self, features: mx.array) -> mx.array:
        """Tapped states [B, S, n_taps * H_target] to the context rows [B, S, H] that every layer is given."""
        return self.hidden_norm(self.fc(features))

    def inject(self, features: mx.array, cache: list[Any], start: int) -> None:
        """Put context rows into the cache without drafting: prefill, and rounds that draft nothing.

        Shapes:
          - features: [B, S, n_taps * H_target], row 0 at position `start`. Rows that a layer holds already are skipped.
        """
        context = self.context(features)
        for layer, entry in zip(self.layers, cache, strict=True):
            layer.self_attn.inject(context, entry, start)

    def __call__(self, block: mx.array, features: mx.array, cache: list[Any], start: int) -> mx.array:
        """One drafter pass.

        Shapes:
          - block: [B, K, H] embedded block, anchor first, at position start + S
          - features: [B, S, n_taps * H_target] new context rows, row 0 at position `start`
        Returns: [B, K, H] after the final norm; row k stands for the token at the anchor's position + k.
        """
        context = self.context(features)
        h = block
        for layer, entry in zip(self.layers, cache, strict=True):
            h = layer(h, context, entry, start)
        return self.norm(h)

    def draft(self, anchor: mx.array, features: mx.array, cache: list[Any], start: int, block_size: int) -> mx.array:
        """Propose the block_size - 1 tokens after the anchor.

        Shapes:
          - anchor: [B] int32; features: [B, S, n_taps * H_target], row 0 at position `start`
        Returns: [B, block_size - 1] int32, the argmax of the target's head at each mask slot.
        """
        masks = mx.full((anchor.shape[0], block_size - 1), self.config.mask_token_id, dtype=mx.int32)
        ids = mx.concatenate([anchor[:, None].astype(mx.int32), masks], axis=1)
        hidden = self(self._embed(ids), features, cache, start)
        # Slot 0 is the anchor itself: its row predicts nothing.
        return mx.argmax(self._head(hidden[:, 1:]), axis=-1).astype(mx.int32)
