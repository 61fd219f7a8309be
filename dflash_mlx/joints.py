"""Layers that a pass gives the same array, as one product: a small model's passes cost by their number of operations.

    q, k, v = Wq x, Wk x, Wv x      one product of [Wq; Wk; Wv], of which each layer's call takes its columns

Which layers these are is seen in a pass: no family's names are known. Their weights are copied, so only those of small layers are
joined. Quantized weights may be filled up with rows of zeros, to a number of columns that a kernel takes.

Knows MLX's `Linear` and `QuantizedLinear`; knows nothing of caches or of tracing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .kernels.layers import Handler, kernel_calls
from .taps import own_class

# Weights of one product. Copies are dear and save little where reading them takes longer than three launches.
MOST_BYTES = 8 << 20
_ARRAYS = ("weight", "scales", "biases", "bias")

# (a layer, its handler), as `intercept` takes them.
Call = tuple[nn.Module, Handler]


def joint_calls(
    model: nn.Module,
    run: Callable[[list[Call]], Any],
    kernels: Callable[[nn.Module], Sequence[tuple]] = kernel_calls,
    columns: int = 1,
) -> list[Call]:
    """The layers that one pass of the model gives the same array, and what serves them instead. Nothing is evaluated.

    Args:
      run: the pass, with these calls of layers in place of their own and of what kernels make of them.
      kernels: what may serve a joint product, as `kernel_calls` gives it.
      columns: quantized products have a multiple of so many, those of one layer too.
    """
    given: dict[int, tuple[mx.array, list[nn.Module]]] = {}
    calls: Counter[int] = Counter()

    def note(module: nn.Module) -> Call:
        def handler(inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            (x,) = args or kwargs.values()
            # The array is held: no other is known by its address meanwhile.
            given.setdefault(id(x), (x, []))[1].append(module)
            calls[id(module)] += 1
            return inner(*args, **kwargs)

        return module, handler

    run([note(module) for _, module in model.named_modules() if own_class(module) in (nn.Linear, nn.QuantizedLinear)])
    groups: dict[tuple, list[nn.Module]] = {}
    for key, (_, modules) in given.items():
        for module in modules:
            if calls[id(module)] == 1:
                groups.setdefault((key, *_form(module)), []).append(module)
    small = [group for group in groups.values() if _bytes(group) <= MOST_BYTES]
    filled = [(group, _missing(group, columns)) for group in small]
    return [call for group, rows in filled if len(group) > 1 or rows for call in _joined(group, kernels, rows)]


def _form(layer: nn.Module) -> tuple:
    """What layers must have in common."""
    arrays = tuple((name, a.shape[1:], a.dtype) for name in _ARRAYS if (a := layer.get(name)) is not None)
    return own_class(layer), arrays, *(getattr(layer, name, None) for name in ("group_size", "bits", "mode"))


def _bytes(layers: Sequence[nn.Module]) -> int:
    return sum(layer[name].nbytes for layer in layers for name in _ARRAYS if layer.get(name) is not None)


def _missing(layers: Sequence[nn.Module], columns: int) -> int:
    """Rows of zeros that their joint weights need."""
    quantized = own_class(layers[0]) is nn.QuantizedLinear
    return -sum(layer["weight"].shape[0] for layer in layers) % columns if quantized else 0


def _joined(layers: Sequence[nn.Module], kernels: Callable[[nn.Module], Sequence[tuple]], missing: int) -> list[Call]:
    """A handler for each of some layers: the first that is called makes the product of all."""
    first, names = layers[0], [name for name in _ARRAYS if layers[0].get(name) is not None]
    whole = own_class(first).__new__(own_class(first))
    nn.Module.__init__(whole)
    for name in ("group_size", "bits", "mode"):
        if hasattr(first, name):
            setattr(whole, name, getattr(first, name))
    for name in names:
        zeros = mx.zeros((missing, *first[name].shape[1:]), dtype=first[name].dtype)
        whole[name] = mx.concatenate([*(layer[name] for layer in layers), zeros])
    mx.eval(whole.parameters())
    last: list[mx.array] = []

    def product(x: mx.array) -> mx.array:
        calls = kernels(whole)
        return calls[0][1](whole, (x,), {}) if calls else whole(x)

    def part(begin: int, end: int) -> Handler:
        def handler(inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            (x,) = args or kwargs.values()
            if not last or last[0] is not x:
                last[:] = x, product(x)
            y = last[1][..., begin:end]
            if end == ends[-1]:
                last.clear()
            return y

        return handler

    ends = [sum(layer["weight"].shape[0] for layer in layers[: i + 1]) for i in range(len(layers))]
    return [(layer, part(begin, end)) for layer, begin, end in zip(layers, [0, *ends], ends, strict=False)]
