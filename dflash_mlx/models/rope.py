"""Rotations by position: the frequencies of YaRN and LongRoPE, and the module that turns by given ones.

Knows formulas and arrays. The drafter's layers and the converter, which checks mlx-lm's own modules, both take them from here.
Source: YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753; transformers 5, modeling_rope_utils.py, for `attention_factor`,
`truncate` and `mscale`, which mlx-lm's classes do not read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import initialize_rope

from ..config import RopeConfig


@dataclass(frozen=True)
class Frequencies:
    """inverse: [dims / 2] float64 turns per position; scale multiplies q and k; beyond `threshold` positions use `long`."""

    inverse: np.ndarray
    scale: float = 1.0
    long: np.ndarray | None = None
    threshold: int = 0


class ExactRoPE(nn.Module):
    """Rotation by given frequencies.

    Shapes:
      - x: [..., S, head_dim]; the first `dims` of the last axis are rotated
    """

    def __init__(self, dims: int, frequencies: Frequencies, traditional: bool):
        super().__init__()
        self.dims = dims
        self.traditional = traditional
        self.scale = frequencies.scale
        self.threshold = frequencies.threshold
        self._freqs = _periods(frequencies.inverse)
        self._long_freqs = None if frequencies.long is None else _periods(frequencies.long)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        freqs = self._freqs
        if self._long_freqs is not None:
            beyond = offset + x.shape[-2] > self.threshold
            if isinstance(beyond, mx.array):
                freqs = mx.where(mx.any(beyond), self._long_freqs, self._freqs)
            elif beyond:
                freqs = self._long_freqs
        if self.scale != 1.0:
            x = x.at[..., : self.dims].multiply(self.scale)
        return mx.fast.rope(x, self.dims, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=freqs)


def _periods(inverse: np.ndarray) -> mx.array:
    """What mx.fast.rope takes: the reciprocal of the turns."""
    with np.errstate(divide="ignore"):
        return mx.array((1.0 / inverse).astype(np.float32))


def plain_inverse(theta: float, dims: int) -> np.ndarray:
    """[dims / 2] float64: theta ** (-2 i / dims)."""
    return 1.0 / np.power(float(theta), np.arange(0, dims, 2, dtype=np.float64) / dims)


def yarn(theta: float, dims: int, p: Mapping[str, Any], max_position_embeddings: int | None) -> Frequencies:
    """YaRN's frequencies: turns are kept where the ramp is 0 and divided by `factor` where it is 1."""
    original = float(p.get("original_max_position_embeddings") or max_position_embeddings)
    factor = float(p.get("factor") or max_position_embeddings / original)
    scale = p.get("attention_factor")
    if scale is None:
        mscale, mscale_all = p.get("mscale"), p.get("mscale_all_dim")
        scale = _magnitude(factor, mscale) / _magnitude(factor, mscale_all) if mscale and mscale_all else _magnitude(factor)

    def dimension_of(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(p.get("beta_fast") or 32), dimension_of(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    plain = plain_inverse(theta, dims)
    return Frequencies(plain / factor * ramp + plain * (1 - ramp), float(scale))


def _magnitude(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def longrope(theta: float, dims: int, p: Mapping[str, Any], max_position_embeddings: int | None) -> Frequencies:
    """LongRoPE's frequencies: short factors up to the original context length, long factors beyond it."""
    original = float(p.get("original_max_position_embeddings") or max_position_embeddings)
    factor = p.get("factor") or max_position_embeddings / original
    scale = p.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    plain = plain_inverse(theta, dims)
    short, long = (plain / np.array(p[key], dtype=np.float64) for key in ("short_factor", "long_factor"))
    return Frequencies(short, float(scale), long=long, threshold=int(original))


_SCALED = {"yarn": yarn, "longrope": longrope}


def make_rope(rope: RopeConfig, max_position_embeddings: int | None) -> nn.Module:
    """The module that rotates [B, heads, L, D] from position `offset` on, for any kind that `RopeConfig` may name."""
    if formula := _SCALED.get(rope.kind):
        found = formula(rope.theta, rope.dims, rope.parameters, max_position_embeddings)
        return ExactRoPE(rope.dims, found, rope.traditional)
    scaling = {"rope_type": rope.kind, **rope.parameters}
    return initialize_rope(rope.dims, rope.theta, rope.traditional, scaling, max_position_embeddings)
