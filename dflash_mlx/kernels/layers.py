"""The calls of a model's quantized layers that go through block_qmm and block_gather_qmm.

Knows MLX's `QuantizedLinear`, the head that a `QuantizedEmbedding` is in tied models, and, by its name and call, mlx-lm's
`QuantizedSwitchLinear`. Knows no family, and not how a call is intercepted: taps.py does that, for the length of a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .block_gather_qmm import block_gather_qmm
from .block_qmm import MAX_ROWS, block_qmm

# (what the layer's own class would do, the call's arguments by place and by name) -> the call's value.
Handler = Callable[[Callable[..., Any], tuple, dict], Any]


def kernel_calls(model: nn.Module) -> list[tuple[nn.Module, Handler, str]]:
    """(layer, handler, method) for each affine quantized layer: its products of 1..16 rows by the kernels.

    Only layers of exactly the classes that the handlers were written for.
    """
    found: list[tuple[nn.Module, Handler, str]] = []
    for _, module in model.named_modules():
        if getattr(module, "mode", "affine") != "affine" or module.get("biases") is None:
            continue
        if type(module) is nn.QuantizedLinear:
            found.append((module, _linear(module), "__call__"))
        elif type(module) is nn.QuantizedEmbedding:
            found.append((module, _linear(module), "as_linear"))
        elif type(module).__name__ == "QuantizedSwitchLinear":
            found.append((module, _switch(module), "__call__"))
    return found


def _linear(layer: nn.Module) -> Handler:
    """The product of a QuantizedLinear's call or a QuantizedEmbedding's as_linear, then the layer's own bias."""

    def handler(inner, args, kwargs):
        (x,) = (*args, *kwargs.values())
        if not 1 <= x.size // x.shape[-1] <= MAX_ROWS:
            return inner(x)
        y = block_qmm(x, layer["weight"], layer["scales"], layer["biases"], layer.group_size, layer.bits)
        return y + layer["bias"] if "bias" in layer else y

    return handler


def _switch(layer: nn.Module) -> Handler:
    """QuantizedSwitchLinear's call. x: [..., 1 or k, 1, K], indices: [..., k], to [..., k, 1, N]."""

    def handler(inner, args, kwargs):
        x, indices = args[0], args[1] if len(args) > 1 else kwargs["indices"]
        if not _rows_fit(x, indices):
            return inner(*args, **kwargs)
        rows = x.reshape(-1, x.shape[-1])
        weights = (layer["weight"], layer["scales"], layer["biases"])
        y = block_gather_qmm(rows, *weights, indices.reshape(-1), layer.group_size, layer.bits).reshape(*indices.shape, 1, -1)
        return y + mx.expand_dims(layer["bias"][indices], -2) if "bias" in layer else y

    return handler


def _rows_fit(x: mx.array, indices: mx.array) -> bool:
    """Whether the rows' leading axes are those of the indices, or those with one row for all k experts."""
    lead = x.shape[:-2]
    return x.shape[-2] == 1 and indices.size > 0 and lead in (indices.shape, (*indices.shape[:-1], 1))
