"""Sliding windows for mlx-lm families whose class has none.

Knows how mlx-lm passes a mask and a cache to a layer. Knows no files. Transformers gives mistral, gemma2, phi3, qwen2, qwen3
and others a sliding window that mlx-lm ignores. So mlx-lm is right up to the window, and computes another model beyond it.
"""

import functools

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask


def add_windows(model: nn.Module, windows: list[int | None]) -> None:
    """Give the layers with a window their own mask; the model's mask then serves the other layers.

    The cache stays a plain one that keeps every position, so that a rollback stays a trim. The layer's `__class__` is replaced
    by a class made for it, because many families build `model.layers` anew at each access.
    """
    for layer, window in zip(model.layers, windows, strict=True):
        if window:
            layer.__class__ = _windowed(type(layer), window)


class _Windowed:
    """A mixin that comes before the layer's own class in the bases of the new class."""

    window: int

    def __call__(self, x: mx.array, mask=None, cache=None, **kwargs):
        # x: [B, S, H]; an array mask in every case, since some families cannot take mlx-lm's "causal"
        mask = create_attention_mask(x, cache, window_size=self.window, return_array=x.shape[1] > 1)
        return super().__call__(x, mask, cache, **kwargs)


@functools.cache
def _windowed(cls: type, window: int) -> type:
    return type("Windowed" + cls.__name__, (_Windowed, cls), {"window": window})
