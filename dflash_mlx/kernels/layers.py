"""A model's quantized layers through block_qmm and block_gather_qmm for the length of one pass.

Knows MLX's `QuantizedLinear`, the head that a `QuantizedEmbedding` is in tied models, and, by its name and call, mlx-lm's
`QuantizedSwitchLinear`. Knows no family. A layer object gets a
subclass of its own class while a pass runs and its old class back afterwards, as taps.py does; another thread that meets a
swapped layer in that time gets the layer's own call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .block_gather_qmm import block_gather_qmm
from .block_qmm import MAX_ROWS, block_qmm

_made: dict[type, type] = {}
_held: dict[int, int] = {}
_lock = threading.Lock()
_local = threading.local()


def _linear(self: nn.Module, x: mx.array) -> mx.array:
    """The product of a QuantizedLinear's call or a QuantizedEmbedding's as_linear, then the layer's own bias."""
    y = block_qmm(x, self["weight"], self["scales"], self["biases"], self.group_size, self.bits)
    return y + self["bias"] if "bias" in self else y


def _switch(self: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
    """QuantizedSwitchLinear's call. x: [..., 1 or k, 1, K], indices: [..., k], to [..., k, 1, N]."""
    rows = x.reshape(-1, x.shape[-1])
    y = block_gather_qmm(rows, self["weight"], self["scales"], self["biases"], indices.reshape(-1), self.group_size, self.bits)
    y = y.reshape(*indices.shape, 1, -1)
    return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


def _rows_fit(x: mx.array, indices: mx.array) -> bool:
    """Whether the rows' leading axes are those of the indices, or those with one row for all k experts."""
    lead = x.shape[:-2]
    return x.shape[-2] == 1 and indices.size > 0 and lead in (indices.shape, (*indices.shape[:-1], 1))


def _subclass(cls: type) -> type:
    method = "as_linear" if issubclass(cls, nn.QuantizedEmbedding) else "__call__"

    def call(self, x, *args, **kwargs):
        inner = getattr(super(made, self), method)
        if not getattr(_local, "passes", 0):
            return inner(x, *args, **kwargs)
        if isinstance(self, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            few = 1 <= x.size // x.shape[-1] <= MAX_ROWS
            return _linear(self, x) if few else inner(x, *args, **kwargs)
        indices = args[0] if args else kwargs["indices"]
        return _switch(self, x, indices) if _rows_fit(x, indices) else inner(x, *args, **kwargs)

    made = type("Block" + cls.__name__, (cls,), {method: call})
    return made


def _can_swap(module: Any) -> bool:
    """An affine quantized linear, embedding or expert layer of exactly the classes that the calls above were written for."""
    named = type(module) in (nn.QuantizedLinear, nn.QuantizedEmbedding) or type(module).__name__ == "QuantizedSwitchLinear"
    return named and getattr(module, "mode", "affine") == "affine" and module.get("biases") is not None


class BlockLayers:
    """The quantized layers of a model, found once.

    Usage: `layers = BlockLayers(model)`, then `with layers.swapped(): hidden, taps = target(ids, cache)` for each pass; the
    pass must be uncompiled, or the swap inside the compiled function. Never held across a `yield`.
    """

    def __init__(self, model: nn.Module):
        self.layers = [m for _, m in model.named_modules() if _can_swap(m)]

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Until the block ends, in this thread: products of 1..16 rows by the kernels, where they are eligible and chosen."""
        with _lock:
            for layer in self.layers:
                if not _held.get(id(layer)):
                    cls = type(layer)
                    if cls not in _made:
                        _made[cls] = _subclass(cls)
                    layer.__class__ = _made[cls]
                _held[id(layer)] = _held.get(id(layer), 0) + 1
        _local.passes = getattr(_local, "passes", 0) + 1
        try:
            yield
        finally:
            _local.passes -= 1
            with _lock:
                for layer in self.layers:
                    _held[id(layer)] -= 1
                    if not _held[id(layer)]:
                        del _held[id(layer)]
                        layer.__class__ = type(layer).__mro__[1]
