"""Sliding windows for mlx-lm families whose class has none.

Knows: how mlx-lm hands a mask and a cache to a layer. Knows no files. Transformers gives mistral, gemma2, phi3, qwen2, qwen3
and others a sliding window that mlx-lm ignores: right up to the window, another model beyond it.
"""

import functools

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask


def add_windows(model: nn.Module, windows: list[int | None]) -> None:
    """Give the layers with a window a mask of their own; the model's one mask then serves the other layers.

    The cache stays a plain one that keeps every position, so that rolling back stays a trim. `__class__` is swapped for a
    class made for it because many families build `model.layers` afresh at each access.
    """
    for layer, window in zip(model.layers, windows, strict=True):
        if window:
            layer.__class__ = _windowed(type(layer), window)


class _Windowed:
    """Mixed into a layer's class in front of it, so that no other layer's class is a base of the made one."""

    window: int

    def __call__(self, x: mx.array, mask=None, cache=None, **kwargs):
        # x: [B, S, H]; an array mask in every case, since some families cannot take mlx-lm's "causal"
        mask = create_attention_mask(x, cache, window_size=self.window, return_array=x.shape[1] > 1)
        return super().__call__(x, mask, cache, **kwargs)


@functools.cache
def _windowed(cls: type, window: int) -> type:
    return type("Windowed" + cls.__name__, (_Windowed, cls), {"window": window})
