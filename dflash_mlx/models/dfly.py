"""DFly: a DFlash drafter whose layers each add a mean of the taps to the context, and whose rows are corrected one after another.

Knows `dspark`, whose walk from slot to slot it uses, and how DFlare's layers choose their context.
Source: Tencent's AngelSpec, models/draft and docs/concepts/dfly.md; a fork of vllm-project/speculators.

Dimensions as in `drafter`; T taps, L layers, N slots.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from ..config import DrafterConfig
from .dflare import FusedLayer, fused_taps
from .dspark import DSparkDrafter


class HiddenCorrection(nn.Module):
    """A slot's row plus a gated product of itself and of the token before it, each normed."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        inner = config.hidden_correction_intermediate_size or H
        self.hidden_norm, self.embed_norm = nn.RMSNorm(H, eps=eps), nn.RMSNorm(H, eps=eps)
        self.gate_proj, self.up_proj = nn.Linear(2 * H, inner, bias=False), nn.Linear(2 * H, inner, bias=False)
        self.down_proj = nn.Linear(inner, H, bias=False)

    def __call__(self, hidden: mx.array, embedded: mx.array) -> mx.array:
        """[B, H] of the slot and [B, H] of the token before it to [B, H]."""
        both = mx.concatenate([self.hidden_norm(hidden), self.embed_norm(embedded).astype(hidden.dtype)], axis=-1)
        return hidden + self.down_proj(swiglu(self.gate_proj(both), self.up_proj(both)))


class DFlyDrafter(DSparkDrafter):
    layer_class = FusedLayer

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.layer_fusion_weights = mx.random.normal((config.num_hidden_layers, len(config.target_layer_ids)))
        if config.enable_hidden_correction:
            self.hidden_correction = HiddenCorrection(config)

    def context(self, features: mx.array) -> mx.array:
        """[B, S, T * H] to each layer's context rows [B, S, L, H]."""
        return self.hidden_norm(self.fc(features)[:, :, None] + fused_taps(self.layer_fusion_weights, features))

    def _walk(
        self, hidden: mx.array, anchor: mx.array, pick: Callable[[int, mx.array], mx.array]
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        if "hidden_correction" not in self:
            return super()._walk(hidden, anchor, pick)
        before, ids, rows = anchor, [], []
        for slot in range(hidden.shape[1]):
            row = self.hidden_correction(hidden[:, slot], self._embed(before[:, None])[:, 0])
            rows.append(self._head(row[:, None])[:, 0].astype(mx.float32))
            before = self.target_ids(pick(slot, rows[-1]))
            ids.append(before)
        return mx.stack(ids, axis=1) if ids else mx.zeros(hidden.shape[:2], dtype=mx.int32), rows, []
