"""How an exact pass (`--exact`) computes each operation, so that a row gets the same bits alone and among up to 16.

    products          affine 4, 8 bit: block_qmm or its tiles      16 bits: block_linear without norm or sum
                      other floats: for each row a product of a matrix and a vector       other quantized ones: row by row
    attention         block_attention; heads that it cannot take: MLX's, row by row, over that row's own keys
    experts           block_gather_qmm; others: all experts of a row in one call, row by row
    recurrences       gated_delta; states that it cannot take: mlx-lm's code, row by row
    convolutions      for each tap a product and a sum; those that mix channels: row by row
    rotations         MLX's kernel for several rows, also for one

Everything else is MLX's own: its norms, softmax, log-sum-exp, argmax, sums over few experts and elementwise operations compute
each row by itself, as far as is known (docs/kernels.md); `dflash_mlx.exact` compares whole passes. Neither time nor the number of
rows changes a route. Knows no pass, and of caches only what its attention is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import GenerationError
from . import autotune
from .block_attention import block_attention_plan
from .block_gather_qmm import block_gather_qmm_plan
from .block_linear import Weights, block_linear_plan
from .block_qmm import MAX_ROWS, block_qmm_plan
from .gated_delta import gated_delta_ops, gated_delta_plan
from .layer_routes import LayerRoutes
from .masks import BufferMask
from .routing import Attention, KernelRoute, PassState, Recurrence, attention_calls, laid_keys, recurrence_calls, rows_fit
from .small_batch import rows_apart

# A group of K for weights that are not quantized: what a lane of the text takes at once.
_GROUP = 64
# The most taps of a convolution that are summed one by one.
_MOST_TAPS = 16

Call = tuple[nn.Module, KernelRoute, str]


class ExactRoutes(LayerRoutes):
    """The routes of one model for exact passes: every pass of up to 16 rows takes them, whatever is fast here."""

    def calls(self, rows: int) -> list[Call]:
        if rows > MAX_ROWS:
            return []
        # It forgets plans that were made for another device or setting.
        autotune.may_run()
        if self._calls is None:
            about = (self.model, self._own_class, self._passes)
            recurrences = [(route.module, route, "__call__") for route in self.recurrences.values()]
            self._calls = [*exact_calls(*about), *attention_calls(*about, ExactAttention), *recurrences]
        return self._calls

    @cached_property
    def recurrences(self) -> dict[int, Recurrence]:
        found = recurrence_calls(self.model, self._own_class, self._passes, ExactRecurrence)
        return {id(module): route for module, route, _ in found}

    def ended(self, rows: int) -> None:
        """No layer leaves its route."""

    def can_argmax(self, rows: int) -> bool:
        """The head writes its logits: log-probabilities and choices are made of the same ones."""
        return False


def exact_calls(model: nn.Module, class_of: Callable[[nn.Module], type], passes: PassState) -> list[Call]:
    """(layer, handler, method) of the calls that are routed, except attention and recurrences."""
    found: list[Call] = []
    inside: set[int] = set()
    for _, module in model.named_modules():
        cls = class_of(module)
        if id(module) in inside:
            continue
        if cls in (nn.Linear, nn.QuantizedLinear):
            found.append((module, Product(module, passes), "__call__"))
        elif cls in (nn.Embedding, nn.QuantizedEmbedding):
            found.append((module, Product(module, passes), "as_linear"))
        elif _is_switch(module):
            layers = [m for _, m in module.named_modules() if class_of(m).__name__ in ("SwitchLinear", "QuantizedSwitchLinear")]
            inside |= {id(m) for m in layers}
            if all(_has_text(layer) for layer in layers):
                found += [(layer, Experts(layer, passes), "__call__") for layer in layers]
            else:
                found.append((module, ByRow(module, passes), "__call__"))
        elif cls is nn.Conv1d:
            found.append((module, Convolution(module, passes), "__call__"))
        elif _rotates(module, cls):
            found.append((module, Rotation(module, passes), "__call__"))
    return found


def _is_switch(module: nn.Module) -> bool:
    """Whether a module owns layers of experts and is called with rows and the experts that they chose."""
    children = [m for value in module.children().values() for m in (value if isinstance(value, list) else [value])]
    return any(type(m).__name__.removeprefix("Tapped") in ("SwitchLinear", "QuantizedSwitchLinear") for m in children)


def _has_text(layer: nn.Module) -> bool:
    """Whether block_gather_qmm knows the layer's packing. Where there is no GPU it serves nothing."""
    affine = getattr(layer, "mode", "affine") == "affine" and layer.get("biases") is not None
    return autotune.has_gpu() and affine and layer.bits in (4, 8) and layer.group_size in (32, 64, 128)


def _rotates(module: nn.Module, cls: type) -> bool:
    """Whether it rotates heads by their positions, with nothing inside."""
    code = getattr(cls.__call__, "__code__", None) if callable(module) else None
    return code is not None and {"fast", "rope"} <= {*code.co_names} and not module.children()


class Product(KernelRoute):
    """A layer's product, at most 16 rows at a time, then its own bias."""

    def __call__(self, inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        (x,) = args or kwargs.values()
        rows = math.prod(x.shape[:-1])
        self.passes.served.add(self)
        if x.ndim == 3 and x.shape[0] == 1 and rows <= MAX_ROWS:
            # A view costs the host as much as a launch.
            return self._some(inner, x)
        flat = mx.reshape(x, (1, rows, x.shape[-1]))
        y = [self._some(inner, flat[:, at : at + MAX_ROWS]) for at in range(0, rows, MAX_ROWS)]
        y = y[0] if len(y) == 1 else mx.concatenate(y, axis=1)
        return mx.reshape(y, (*x.shape[:-1], y.shape[-1]))

    def _some(self, inner: Callable[..., Any], x: mx.array) -> mx.array:
        """x [1, M, K], M up to 16, to [1, M, N]."""
        layer, m = self.module, x.shape[1]
        w, bias = layer["weight"], layer.get("bias")
        if "scales" not in layer:
            if launch := autotune.sure(block_linear_plan, x, Weights(w, group_size=_GROUP), None, False, False):
                y = launch(x, Weights(w, group_size=_GROUP))
            else:
                y = mx.reshape(rows_apart(x, w), (1, m, w.shape[0]))
            return y if bias is None else y + bias
        launch = None
        if getattr(layer, "mode", "affine") == "affine" and layer.get("biases") is not None:
            packed = w, layer["scales"], layer["biases"]
            launch = autotune.sure(block_qmm_plan, x, *packed, layer.group_size, layer.bits)
        if launch is None:
            return by_row(inner, (x,), 1)
        y = launch(x, *packed)
        return y if bias is None else y + bias


class Experts(KernelRoute):
    """A layer of experts. x: [..., 1 or k, 1, K], indices: [..., k], to [..., k, 1, N]; sorted pairs too."""

    def __call__(self, inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        x, indices = args[0], args[1] if len(args) > 1 else kwargs["indices"]
        layer, launch = self.module, None
        packed = layer["weight"], layer["scales"], layer["biases"]
        if rows_fit(x.shape, indices.shape):
            launch = autotune.sure(block_gather_qmm_plan, x, *packed, indices, layer.group_size, layer.bits)
        if launch is None:
            raise GenerationError(
                f"exact has no kernel for {type(layer).__name__} with x {list(x.shape)} and indices {list(indices.shape)}",
                "Run this target without exact",
            )
        self.passes.served.add(self)
        y = mx.expand_dims(launch(x, *packed, indices), -2)
        return y + mx.expand_dims(layer["bias"][indices], -2) if "bias" in layer else y


class ByRow(KernelRoute):
    """A module whose arguments are all [1, M, ...]: called for each row by itself."""

    def __call__(self, inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        return by_row(partial(inner, **kwargs), args, 1)


def by_row(call: Callable[..., mx.array], arrays: tuple[mx.array, ...], axis: int) -> mx.array:
    """`call` of one row of each of these arrays at a time, joined: a row is computed as if it were alone."""
    split = (mx.split(a, a.shape[axis], axis) for a in arrays)
    rows = [call(*(mx.contiguous(a) for a in some)) for some in zip(*split, strict=True)]
    return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=axis)


class Convolution(KernelRoute):
    """A short convolution over rows, x [1, M + taps - 1, C]: each channel by itself, or a call a row."""

    def __call__(self, inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        (x,), layer = args, self.module
        w, taps = layer["weight"], layer["weight"].shape[1]
        plain = (layer.stride, layer.padding, layer.dilation) == (1, 0, 1)
        if not plain:
            return inner(x)
        rows = x.shape[1] - taps + 1
        if w.shape[2] != 1 or layer.groups != x.shape[2] or taps > _MOST_TAPS or w.shape[0] != x.shape[2]:
            windows = [inner(mx.contiguous(x[:, i : i + taps])) for i in range(rows)]
            return mx.concatenate(windows, axis=1)
        y = None
        for i in range(taps):
            # One operation each: nobody can contract a product and a sum.
            product = x[:, i : i + rows].astype(mx.float32) * w[:, i, 0].astype(mx.float32)
            y = product if y is None else y + product
        y = y.astype(x.dtype)
        return y + layer["bias"] if "bias" in layer else y


class Rotation(KernelRoute):
    """Heads [B, H, T, D] rotated by their positions. MLX has another kernel for one row: that row is doubled."""

    def __call__(self, inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        x, *rest = args
        if x.ndim != 4:
            return inner(x, *rest, **kwargs)
        # In the layout of a projection's output, whatever the model made of it: a kernel may differ by layout.
        turned, t = mx.swapaxes(x, 1, 2), x.shape[2]
        # A view of the row twice, written out: one launch.
        turned = mx.contiguous(mx.broadcast_to(turned, (turned.shape[0], max(t, 2), *turned.shape[2:])))
        return inner(mx.swapaxes(turned, 1, 2), *rest, **kwargs)[:, :, :t]


class ExactAttention(Attention):
    """A module that attends: block_attention, or a call of MLX's a row over the keys that the row sees."""

    def _attend(self, queries, keys, values, cache, scale, mask, sinks=None):
        # A trace's: the cache's whole buffers (see `compiled`).
        buffer = isinstance(mask, BufferMask) and not mask.changed and keys is cache.keys and values is cache.values
        laid = (keys, values, 0, 0) if buffer else None
        if laid is None and isinstance(keys, mx.array):
            laid = laid_keys(queries, keys, values, cache, mask)
        if laid is None or not isinstance(scale, (int, float)):
            raise GenerationError(
                f"exact has no kernel for the attention of {type(self.module).__name__.removeprefix('Tapped')} with "
                f"{_kind(cache)} and {_said(mask)}",
                "Run this target without exact",
            )
        k, v, start, window = laid
        self.passes.served.add(self)
        if launch := autotune.sure(block_attention_plan, queries, k, v, scale, True, window, sinks):
            return launch(queries, k, v, sinks, start, mask.end if buffer else None)
        if buffer:
            raise GenerationError("exact has no kernel for these heads in a traced pass", "Run this target without exact")
        m, s, rows = queries.shape[2], k.shape[2], []
        for i in range(m):
            end = s - m + i + 1
            seen = slice(max(end - window, 0) if window else 0, end)
            own = [mx.contiguous(a) for a in (queries[:, :, i : i + 1], k[:, :, seen], v[:, :, seen])]
            rows.append(mx.fast.scaled_dot_product_attention(*own, scale=scale, sinks=sinks))
        return mx.concatenate(rows, axis=2)


def _kind(cache: Any) -> str:
    return "keys of another layer" if cache is None else f"a {type(cache).__name__.removeprefix('_')}"


def _said(mask: Any) -> str:
    return f"a mask of {list(mask.shape)}" if isinstance(mask, mx.array) else "no mask" if mask is None else f"mask {mask!r}"


class ExactRecurrence(Recurrence):
    """A module with a gated delta rule: `gated_delta`, or mlx-lm's code row by row; never mlx-lm's kernel, which takes chunks."""

    @staticmethod
    def plan(*given: mx.array) -> Any:
        return autotune.sure(gated_delta_plan, *given) or partial(gated_delta_ops, use_kernel=False)
