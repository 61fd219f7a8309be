"""Layers that a pass gives the same array, as one product: a small model's passes cost by their number of operations.

    q, k, v = Wq x, Wk x, Wv x      one product of [Wq; Wk; Wv], of which each layer's call takes its columns
    rope(q), rope(k)                one rotation of the product's columns, all as heads, of which each call takes its heads

Which layers these are is seen in a pass: no family's names are known. Their weights are copied, so only those of small layers are
joined. Quantized weights may be filled up with rows of zeros, to a number of columns that a kernel takes.

Knows MLX's `Linear`, `QuantizedLinear` and `RoPE`, and mlx-lm's rotations; knows nothing of caches or of tracing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils

from .kernels.layers import Handler, WatchedArray, kernel_calls
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
    """The layers that one pass of the model gives the same array, and what serves them instead; where it rotates what these give,
    its rotations too. Nothing is evaluated.

    Args:
      run: the pass, with these calls of layers in place of their own and of what kernels make of them.
      kernels: what may serve a joint product, as `kernel_calls` gives it.
      columns: quantized products have a multiple of so many, those of one layer too.
    """
    given: dict[int, tuple[mx.array, list[nn.Module]]] = {}
    calls: Counter[int] = Counter()
    products: dict[int, _Product] = {}

    def note(module: nn.Module) -> Call:
        def handler(inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            (x,) = args or kwargs.values()
            # The array is held: no other is known by its address meanwhile.
            given.setdefault(id(x), (x, []))[1].append(module)
            calls[id(module)] += 1
            products[id(module)] = _Product(inner(*args, **kwargs))
            return products[id(module)].part(0, module["weight"].shape[0])

        return module, handler

    every = [module for _, module in model.named_modules()]
    rotating = [_rotating(module) for module in every if _turns_heads(module)]
    run([*(note(module) for module in every if own_class(module) in (nn.Linear, nn.QuantizedLinear)), *rotating])
    rotated = {key for key, product in products.items() if product.last}
    groups: dict[tuple, list[nn.Module]] = {}
    for key, (_, modules) in given.items():
        for module in modules:
            if calls[id(module)] == 1:
                groups.setdefault((key, *_form(module)), []).append(module)
    small = [group for group in groups.values() if _bytes(group) <= MOST_BYTES]
    filled = [(group, _missing(group, columns)) for group in small]
    found = [call for group, rows in filled if len(group) > 1 or rows for call in _joined(group, kernels, rows, rotated)]
    return [*found, *rotating] if any(id(module) in rotated for module, _ in found) else found


def _turns_heads(module: nn.Module) -> bool:
    """Whether its call makes the same of a head whichever it is."""
    return own_class(module) is nn.RoPE or own_class(module).__module__ == rope_utils.__name__


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


def _joined(
    layers: Sequence[nn.Module], kernels: Callable[[nn.Module], Sequence[tuple]], missing: int, rotated: set[int]
) -> list[Call]:
    """A handler for each of some layers: the first that is called makes the product of all.

    rotated: layers, by id, whose products are rotated. Of others it is not noted where they come from: to note that is a cast.
    """
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
    last: list[Any] = []

    def product(x: mx.array) -> _Product:
        calls = kernels(whole)
        return _Product(calls[0][1](whole, (x,), {}) if calls else whole(x))

    def part(layer: nn.Module, begin: int, end: int) -> Handler:
        def handler(inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            (x,) = args or kwargs.values()
            if not last or last[0] is not x:
                last[:] = x, product(x)
            y = last[1].part(begin, end) if id(layer) in rotated else last[1].y[..., begin:end]
            if end == ends[-1]:
                last.clear()
            return y

        return handler

    ends = [sum(layer["weight"].shape[0] for layer in layers[: i + 1]) for i in range(len(layers))]
    return [(layer, part(layer, begin, end)) for layer, begin, end in zip(layers, [0, *ends], ends, strict=False)]


class _Product:
    """A joint product y, and its last rotation. Only the parts that calls got hold it, so it goes with them."""

    def __init__(self, y: mx.array):
        self.y = y
        # What the rotation was given, what it gave.
        self.last: tuple[list[Any], mx.array] | None = None

    def part(self, begin: int, end: int) -> mx.array:
        y = self.y[..., begin:end]
        return _Part.of(y, self, begin) if y.ndim == 3 else y

    def rotated(self, D: int, given: list[Any], rotation: Callable[[mx.array], mx.array]) -> mx.array:
        """All columns as heads of D, rotated: [B, L, N] -> [B, N // D, L, D]. Those of no use cost less than a second operation.

        given: what else the rotation depends on. By identity: an offset is an array in a trace.
        """
        last = self.last
        if not last or last[1].shape[3] != D or [*map(id, last[0])] != [*map(id, given)]:
            B, L, N = self.y.shape
            heads = self.y[..., : N - N % D].reshape(B, L, -1, D).transpose(0, 2, 1, 3)
            last = self.last = given, rotation(heads)
        return last[1]


class _Part(WatchedArray):
    """Columns of a joint product [B, L, n D], split into heads [B, L, n, D], turned as rotations take them [B, n, L, D].

    What else is made of it is an ordinary array.
    """

    product: _Product
    begin: int
    turned: bool

    @classmethod
    def of(cls, array: mx.array, product: _Product, begin: int, turned: bool = False) -> _Part:
        part = cls(array)
        part.product, part.begin, part.turned = product, begin, turned
        return part

    def reshape(self, *shape: Any, **kwargs: Any) -> mx.array:
        y = super().reshape(*shape, **kwargs)
        split = not self.changed and self.ndim == 3 and y.ndim == 4 and y.shape[:2] == self.shape[:2]
        return _Part.of(y, self.product, self.begin) if split and self.begin % y.shape[3] == 0 else y

    def transpose(self, *axes: Any, **kwargs: Any) -> mx.array:
        y = super().transpose(*axes, **kwargs)
        turned = not self.changed and self.ndim == 4 and not self.turned and axes == (0, 2, 1, 3)
        return _Part.of(y, self.product, self.begin, True) if turned else y


def _rotating(module: nn.Module) -> Call:
    """A rotation's handler: the first call for heads of a joint product rotates those of all its columns."""

    def handler(inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        x, *others = args or (None,)
        if not isinstance(x, _Part) or x.changed or not x.turned:
            return inner(*args, **kwargs)
        _, n, _, D = x.shape
        given = [module, *others, *kwargs, *kwargs.values()]
        heads = x.product.rotated(D, given, lambda whole: inner(whole, *others, **kwargs))
        return heads[:, x.begin // D : x.begin // D + n]

    return module, handler
