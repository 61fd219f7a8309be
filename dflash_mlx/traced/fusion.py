"""Layers of a pass joined into fewer operations: the cost of a small model's pass is its number of operations.

    q, k, v = Wq x, Wk x, Wv x      one product of [Wq; Wk; Wv]; each layer's call takes its columns
    rope(q), rope(k)                one rotation of all the product's heads; each call takes its own
    W rms(x);  x + W y;  silu(Wg x) * Wu x      one launch of `block_linear`, where that kernel runs

Which layers can be joined is found by watching a pass; no names of model families are needed. The fused weights of a target are
copies, so only its small layers are joined. A drafter's layers become views of the fused weights. Quantized weights may be filled
up with rows of zeros, to a number of columns that a kernel takes.

Knows MLX's `Linear`, `QuantizedLinear`, `RMSNorm` and `RoPE`, and mlx-lm's rotations and `swiglu`; knows nothing of caches or of
tracing.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils
from mlx_lm.models.activations import swiglu

from ..kernels import autotune, small_batch
from ..kernels.block_linear import Weights, block_linear_plan
from ..kernels.masks import WatchedArray
from ..kernels.routing import ATTENTION, Handler, kernel_calls, renamed
from ..models.intercept import own_class

# The largest weights that are copied, per product. Copying larger ones costs memory and saves little: reading them takes longer
# than three launches.
MOST_BYTES = 8 << 20
_ARRAYS = ("weight", "scales", "biases", "bias")

# (a layer, its handler), as for `intercept`.
Call = tuple[nn.Module, Handler]


def fused_linears(
    model: nn.Module,
    run: Callable[[list[Call]], Any],
    kernels: Callable[[nn.Module], Sequence[tuple]] = kernel_calls,
    columns: int = 1,
    fused: bool = False,
    own: bool = False,
    taken: Collection[nn.Module] = (),
) -> list[Call]:
    """The calls that replace a model's layers in traces. Layers that get the same array in a pass are joined, with the rotations
    of their results. Every other product has a call of its own. With `fused`, norms and gates have calls too, which pass what
    they know to the products' launches. Nothing of the pass is evaluated.

    Args:
      run: the pass, with the given calls in place of the layers' own and of kernels.
      kernels: what may compute a fused linear, as `kernel_calls` returns it.
      columns: quantized products are filled up to a multiple of this, also products of one layer.
      fused: whether `block_linear` may take the norm, sum or gate around a product.
      own: whether the model is ours. Then layers of any size are joined, and become views of the fused weights.
      taken: linears whose products others make, and norms before those.
    """
    made = {id(module) for module in taken}
    every = [module for _, module in model.named_modules()]
    linears = [module for module in every if own_class(module) in (nn.Linear, nn.QuantizedLinear)]
    rotating = [_rotating(module) for module in every if _turns_heads(module)]
    norms = [module for module in every if own_class(module) is nn.RMSNorm and "weight" in module] if fused else []
    seen = _Seen()
    gating = _gating(every, seen.gate) if fused else []
    run([*(seen.product(module) for module in linears), *(_norming(module) for module in norms), *rotating, *gating])

    groups: dict[tuple, list[nn.Module]] = {}
    for key, (_, modules) in seen.given.items():
        for module in modules:
            if seen.calls[id(module)] == 1 and id(module) not in made:
                groups.setdefault((key, *_form(module)), []).append(module)
    small = [group for group in groups.values() if own or _bytes(group) <= MOST_BYTES]
    filled = [(group, _missing(group, columns)) for group in small]
    found = [call for group, rows in filled if len(group) > 1 or rows for call in _joined(group, kernels, rows, seen, fused, own)]
    made |= {id(module) for module, _ in found}
    rotations = rotating if any(seen.rotated(module) for module, _ in found) else []
    alone = [_alone(module, kernels, seen, fused) for module in linears if id(module) not in made and seen.calls[id(module)]]
    around = [*(_norming(norm) for norm in norms if id(norm) in seen.norms | made), *_gating(every, _gate)] if fused else []
    return [*found, *rotations, *alone, *around]


def fused_bytes(calls: Sequence[Call]) -> int:
    """Bytes of the weight copies that the handlers of `fused_linears` hold."""
    wholes = {id(whole): whole for _, handler in calls if (whole := getattr(handler, "copy", None)) is not None}
    return sum(_bytes([whole]) for whole in wholes.values())


@dataclass
class _Seen:
    """What is around the products of a pass.

    given: address of an array -> the array and the layers that took it. The array is held, so that no other array can get its
      address.
    norms: ids of norms whose values went into a product; gated: ids of layers whose product is a gate or is gated.
    """

    given: dict[int, tuple[mx.array, list[nn.Module]]] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)
    products: dict[int, _Product] = field(default_factory=dict)
    norms: set[int] = field(default_factory=set)
    gated: set[int] = field(default_factory=set)

    def product(self, module: nn.Module) -> Call:
        def handler(inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            (x,) = args or kwargs.values()
            self.given.setdefault(id(x), (x, []))[1].append(module)
            self.calls[id(module)] += 1
            if isinstance(x, _Normed) and not x.changed:
                self.norms.add(id(x.module))
            y = inner(*args, **kwargs)
            made = self.products[id(module)] = _Product(y, y.shape, [y.shape[-1]], [id(module)])
            return made.part(y.shape[-1], True)

        return module, handler

    def gate(self, gate: mx.array, up: mx.array) -> mx.array:
        if isinstance(gate, _Part) and isinstance(up, _Part):
            self.gated.update([*gate.product.layers, *up.product.layers])
        return swiglu(gate, up)

    def rotated(self, module: nn.Module) -> bool:
        """Whether the layer's product was split into heads that were rotated."""
        return bool(self.products[id(module)].last)

    def followed(self, module: nn.Module) -> bool:
        """Whether a later operation can use the product as a whole. Else its origin is not noted, because noting costs a cast."""
        product = self.products[id(module)]
        return product.turned or product.added or id(module) in self.gated


def _turns_heads(module: nn.Module) -> bool:
    """Whether the module treats all heads alike."""
    return own_class(module) is nn.RoPE or own_class(module).__module__ == rope_utils.__name__


def _form(layer: nn.Module) -> tuple:
    """What must be equal in layers that are joined."""
    arrays = tuple((name, a.shape[1:], a.dtype) for name in _ARRAYS if (a := layer.get(name)) is not None)
    return own_class(layer), arrays, *(getattr(layer, name, None) for name in ("group_size", "bits", "mode"))


def _bytes(layers: Sequence[nn.Module]) -> int:
    return sum(layer[name].nbytes for layer in layers for name in _ARRAYS if layer.get(name) is not None)


def _missing(layers: Sequence[nn.Module], columns: int) -> int:
    """How many rows of zeros their fused weights need."""
    quantized = own_class(layers[0]) is nn.QuantizedLinear
    return -sum(layer["weight"].shape[0] for layer in layers) % columns if quantized else 0


def _joined(
    layers: Sequence[nn.Module],
    kernels: Callable[[nn.Module], Sequence[tuple]],
    missing: int,
    seen: _Seen,
    fused: bool,
    own: bool,
) -> list[Call]:
    """One handler per layer. The first that is called computes the product of all; it is held until all have been called."""
    ends = [sum(layer["weight"].shape[0] for layer in layers[: i + 1]) for i in range(len(layers))]
    whole = joined(layers, missing, own)
    make = product_maker(whole, kernels, weights_of(whole, ends[-1]) if fused else None, ends, whole)
    last: list[Any] = []  # an x, its product, the ends of layers not yet called with it

    def part(layer: nn.Module, end: int) -> Handler:
        followed, rotates = seen.followed(layer), seen.rotated(layer)

        def handler(inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            (x,) = args or kwargs.values()
            if not last or last[0] is not x:
                last[:] = x, make(x), {*ends}
            _, product, waiting = last
            waiting.discard(end)
            if not waiting:
                last.clear()
            return product.part(end, rotates) if followed else product.columns(end)

        handler.copy = None if own else whole
        return handler

    return [(layer, part(layer, end)) for layer, end in zip(layers, ends, strict=True)]


def can_join(layers: Sequence[nn.Module]) -> bool:
    """Whether these are linears whose weights differ in their values and columns alone."""
    return all(own_class(layer) in (nn.Linear, nn.QuantizedLinear) for layer in layers) and len({*map(_form, layers)}) == 1


def joined(layers: Sequence[nn.Module], missing: int = 0, own: bool = False) -> nn.Module:
    """A linear whose columns are those of the layers one behind the other, then `missing` columns of zeros.

    own: the layers' weights become views of its weights.
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
    if own:
        end = 0
        for layer in layers:
            begin, end = end, end + layer["weight"].shape[0]
            layer.update({name: whole[name][begin:end] for name in names})
            mx.eval(layer.parameters())
    return whole


def _alone(layer: nn.Module, kernels: Callable[[nn.Module], Sequence[tuple]], seen: _Seen, fused: bool) -> Call:
    """The handler of a layer that is not joined to others."""
    N, followed, rotates = layer["weight"].shape[0], fused and seen.products[id(layer)].added, seen.rotated(layer)
    make = product_maker(layer, kernels, weights_of(layer, N) if fused else None, [N])

    def handler(inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        (x,) = args or kwargs.values()
        product = make(x, inner)
        return product.part(N, rotates) if followed else product.y

    return layer, handler


def weights_of(layer: nn.Module, rows: int) -> Weights | None:
    """The first rows of a layer's weights, as `block_linear` takes them; None if it cannot."""
    if "bias" in layer or getattr(layer, "mode", "affine") != "affine":
        return None
    if own_class(layer) is nn.Linear:
        weights = Weights(layer["weight"][:rows], group_size=32 if layer["weight"].shape[1] % 64 else 64)
    else:
        weights = Weights(*(layer[name][:rows] for name in ("weight", "scales", "biases")), layer.group_size, layer.bits)
    mx.eval(weights.arrays)
    return weights


def product_maker(
    layer: nn.Module,
    kernels: Callable[[nn.Module], Sequence[tuple]],
    weights: Weights | None,
    ends: Sequence[int],
    own: Callable[[mx.array], mx.array] | None = None,
) -> Callable[..., _Product]:
    """(x, the layer's own call) -> its product, in one launch with the norm before it if that is possible.

    weights: for that launch and those that also take a sum or gate; None: there are no such launches. ends: where the parts of
    the product end. own: the call to use if none is given.
    """
    fixed = small_batch.fixed_product(layer["weight"]) if own_class(layer) is nn.Linear and "bias" not in layer else None

    def launched(
        x: mx.array, norm: nn.Module | None, heads: bool = False, residual: mx.array | None = None, gated: bool = False
    ) -> mx.array | None:
        if weights is None or not autotune.may_run():
            return None
        scale, eps = (None, None) if norm is None else (norm["weight"], norm.eps)
        if scale is not None and scale.dtype != x.dtype:
            return None
        launch = block_linear_plan(x, weights, eps, residual is not None, gated, heads)
        return launch(x, weights, scale, residual) if launch else None

    def make(x: mx.array, inner: Callable[[mx.array], mx.array] | None = own) -> _Product:
        normed = isinstance(x, _Normed) and not x.changed
        # A copy: the product may be computed again after the model has changed this array in place.
        headed = isinstance(x, JoinedHeads) and not x.changed
        given = (x.source, x.module) if normed else (x.heads, None, True) if headed else (copy.copy(x), None)
        if (y := launched(*given)) is not None:
            shape = y.shape
        else:
            # Use the plain array: the noted one is a cast.
            plain = x.plain if normed or headed else x
            calls = [] if fixed else kernels(layer)
            y = calls[0][1](inner, (plain,), {}) if calls else (fixed or inner)(plain)
            shape = *x.shape[:-1], layer["weight"].shape[0]
        return _Product(y, shape, ends, launched=(lambda **around: launched(*given, **around)) if weights else None)

    return make


class _Product:
    """One product y of several layers (by id), and its last rotation. It lives as long as a part that was handed to a caller.

    made: its values, perhaps in another shape: a reshape is an operation too, so it is made once for all uses.
    ends: where each layer's columns end; columns of no layer may follow.
    launched: computes it again in one launch with a residual or a gate, or returns None.
    """

    def __init__(
        self,
        made: mx.array,
        shape: Sequence[int],
        ends: Sequence[int],
        layers: Sequence[int] = (),
        launched: Callable[..., mx.array | None] | None = None,
    ):
        self._made, self._shape, self.layers, self._ends, self._launched = made, shape, layers, ends, launched
        # The rotation's arguments, and its results by the first head of each part.
        self.last: tuple[list[Any], dict[int, mx.array]] | None = None
        self._heads: mx.array | None = None
        # Whether it was added to another array, or split into heads.
        self.added = self.turned = False

    @functools.cached_property
    def y(self) -> mx.array:
        return self._made.reshape(self._shape)

    @functools.cached_property
    def _columns(self) -> dict[int, mx.array]:
        ends, N = [*self._ends], self._shape[-1]
        parts = [self.y] if ends == [N] else mx.split(self.y, [end for end in ends if end < N], axis=-1)
        return dict(zip(ends, parts, strict=False))

    def columns(self, end: int) -> mx.array:
        """A layer's columns, by one operation for all layers. A new object each time, in case it is changed in place."""
        return self._columns[end][:]

    def part(self, end: int, rotates: bool) -> mx.array:
        y = self.columns(end)
        return _Part.of(y, self, end - y.shape[-1], rotates) if y.ndim == 3 else y

    def plus(self, part: mx.array, residual: mx.array) -> mx.array:
        """residual + a part of the product; in the product's launch, if the part is the whole product."""
        self.added = True
        y = self._launched(residual=residual) if self._launched and part.shape[-1] == self._ends[-1] else None
        return residual + part if y is None else y

    def gated(self, half: int) -> mx.array | None:
        """silu(first half) * second half, of `half` columns each; None if one launch cannot do it, or there are more columns."""
        return self._launched(gated=True) if self._launched and 2 * half == self._ends[-1] else None

    def heads(self, D: int) -> mx.array:
        """All columns as heads of D: [B, L, N] -> [B, N // D, L, D]."""
        if self._heads is None or self._heads.shape[3] != D:
            B, L, N = self._shape
            whole = self.y[..., : N - N % D] if N % D else self._made
            self._heads = whole.reshape(B, L, -1, D).transpose(0, 2, 1, 3)
        return self._heads

    def by_layer(self, heads: mx.array) -> dict[int, mx.array]:
        """Each layer's heads, by its first head: one operation for all layers."""
        n, D = heads.shape[1], heads.shape[3]
        between = [end // D for end in self._ends if end % D == 0 and end // D < n]
        return dict(zip([0, *between], mx.split(heads, between, axis=1) if between else [heads], strict=True))

    def rotated(self, D: int, given: list[Any], rotation: Callable[[mx.array], mx.array]) -> dict[int, mx.array]:
        """All heads, rotated, as from `by_layer`. Rotating unneeded heads costs less than a second operation.

        given: what else the rotation depends on, compared by identity, since an offset is an array in a trace.
        """
        last = self.last
        if not last or last[1][0].shape[3] != D or [*map(id, last[0])] != [*map(id, given)]:
            # A new object, in case it is changed in place.
            last = self.last = given, self.by_layer(rotation(self.heads(D)[:]))
        return last[1]


class _Part(WatchedArray):
    """Columns of a product [B, L, n D]; split into heads [B, L, n, D]; transposed as rotations take them [B, n, L, D].

    Any other operation on it gives an ordinary array.
    plain: the same array, not noted; rotates: whether its heads may go to a rotation.
    """

    plain: mx.array
    product: _Product
    begin: int
    rotates: bool
    turned: bool

    @classmethod
    def of(cls, array: mx.array, product: _Product, begin: int, rotates: bool, turned: bool = False) -> _Part:
        part = cls(array)
        part.plain, part.product, part.begin, part.rotates, part.turned = array, product, begin, rotates, turned
        return part

    def reshape(self, *shape: Any, **kwargs: Any) -> mx.array:
        y = super().reshape(*shape, **kwargs)
        split = not self.changed and self.ndim == 3 and y.ndim == 4 and y.shape[:2] == self.shape[:2]
        return _Part.of(y, self.product, self.begin, self.rotates) if split and self.begin % y.shape[3] == 0 else y

    def transpose(self, *axes: Any, **kwargs: Any) -> mx.array:
        y = super().transpose(*axes, **kwargs)
        if self.changed or self.ndim != 4 or self.turned or axes != (0, 2, 1, 3):
            return y
        self.product.turned = True
        if self.rotates:
            return _Part.of(y, self.product, self.begin, True, True)
        # Transposed like all heads, for a rotation.
        _, n, _, D = y.shape
        return self.product.heads(D)[:, self.begin // D : self.begin // D + n]

    def __add__(self, other: Any) -> mx.array:
        if self.changed or self.ndim != 3 or not isinstance(other, mx.array):
            return super().__add__(other)
        other = other.plain if isinstance(other, _Part) and not other.changed else other
        if other.shape != self.shape or other.dtype != self.dtype:
            return self.plain + other
        return self.product.plus(self.plain, other)

    __radd__ = __add__


class _Normed(WatchedArray):
    """The result of a norm of `source`, which the model cannot change in place. plain: the same array, not noted."""

    plain: mx.array
    source: mx.array
    module: nn.Module


class JoinedHeads(WatchedArray):
    """Attention's heads side by side [1, L, n D], which a product can do without. heads: [1, n, L, D]; plain: as of `_Part`."""

    plain: mx.array
    heads: mx.array

    @classmethod
    def of(cls, heads: mx.array) -> JoinedHeads:
        plain = heads.transpose(0, 2, 1, 3).flatten(2)
        joined = cls(plain)
        joined.plain, joined.heads = plain, heads
        return joined


def _norming(module: nn.Module) -> Call:
    def handler(inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        (x,) = args or kwargs.values()
        y = inner(x)
        normed = _Normed(y)
        normed.plain, normed.source, normed.module = y, copy.copy(x), module
        return normed

    return module, handler


def _gating(modules: Sequence[nn.Module], gate: Callable[[mx.array, mx.array], mx.array]) -> list[Call]:
    """Calls of the modules that use mlx-lm's `swiglu` themselves, with `gate` in its place."""
    found, name = [], swiglu.__name__
    for module in modules:
        call = own_class(module).__call__ if callable(module) else None
        if isinstance(call, FunctionType) and call.__globals__.get(name) is swiglu and name in call.__code__.co_names:
            # A module that attends too has its own handler.
            if ATTENTION not in call.__code__.co_names:
                found.append((module, _through(module, renamed(call, name, gate))))
    return found


def _through(module: nn.Module, call: FunctionType) -> Handler:
    return lambda inner, args, kwargs: call(module, *args, **kwargs)


def _gate(gate: mx.array, up: mx.array) -> mx.array:
    if not all(isinstance(a, _Part) and not a.changed for a in (gate, up)):
        return swiglu(gate, up)
    halves = gate.begin == 0 and up.begin == gate.shape[-1] == up.shape[-1]
    y = gate.product.gated(up.begin) if gate.product is up.product and halves else None
    return swiglu(gate.plain, up.plain) if y is None else y


def _rotating(module: nn.Module) -> Call:
    """A rotation's handler: the first call for heads of a fused linear rotates all its heads."""

    def handler(inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        x, *others = args or (None,)
        if not isinstance(x, _Part) or x.changed or not x.turned:
            return inner(*args, **kwargs)
        D = x.shape[3]
        given = [module, *others, *kwargs, *kwargs.values()]
        # A new object here too.
        return x.product.rotated(D, given, lambda whole: inner(whole, *others, **kwargs))[x.begin // D][:]

    return module, handler
