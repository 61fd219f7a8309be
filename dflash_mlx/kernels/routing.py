"""Finds the calls of a model that kernels can serve, and makes the handlers that send them there.

    quantized products    block_qmm           quantized experts     block_gather_qmm
    attention             block_attention     gated delta rules     gated_delta
    by other operations of MLX (`small_batch`): attention of few rows, and on CUDA float products

Knows MLX's linear layers and embeddings, which are the head of tied models; mlx-lm's `QuantizedSwitchLinear`, by its name; its
`scaled_dot_product_attention` with caches and masks; and its `gated_delta_update`, whose inputs are kept in a `Recurred`.
Knows no family, and not how a call is intercepted: `models.intercept` does that, for the length of a pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache

from . import autotune, small_batch
from .block_attention import block_attention_plan
from .block_gather_qmm import block_gather_qmm_plan
from .block_qmm import block_qmm_plan
from .gated_delta import Launch, gated_delta_ops, gated_delta_plan
from .masks import BufferMask, PassMasks, WindowMask

ATTENTION = scaled_dot_product_attention.__name__
UPDATE = gated_delta.gated_delta_update.__name__

# (what the layer's own class would do, the call's arguments by place and by name) -> the call's value.
Handler = Callable[[Callable[..., Any], tuple, dict], Any]


class PassState(threading.local):
    """What happened to the calls of a model's layers since this thread's last pass began.

    served: routes by which a kernel of ours ran; left: routes that left a call to MLX, as they will at this number of rows.
    """

    def __init__(self) -> None:
        self.served: set[KernelRoute] = set()
        self.left: set[KernelRoute] = set()


class KernelRoute:
    """A handler of a module's call that a kernel may serve. passes: shared by the routes of one model."""

    def __init__(self, module: nn.Module, passes: PassState):
        self.module, self.passes = module, passes


def attention_calls(
    model: nn.Module,
    class_of: Callable[[nn.Module], type] = type,
    passes: PassState | None = None,
    route: type[Attention] | None = None,
) -> list[tuple[nn.Module, KernelRoute, str]]:
    """(module, handler, method) for each module that itself calls mlx-lm's `scaled_dot_product_attention`.

    Not those that attend in another way: with capped scores, or by MLX's own function.

    Args:
      class_of: a module's own class, where something may stand in its place. passes: notes what happens to the calls.
      route: the handlers' class; None: `Attention`.
    """
    found: list[tuple[nn.Module, KernelRoute, str]] = []
    masks, passes = PassMasks(), passes or PassState()
    for _, module in model.named_modules():
        cls = class_of(module)
        call = cls.__call__ if callable(module) else None
        if isinstance(call, FunctionType) and call.__globals__.get(ATTENTION) is scaled_dot_product_attention:
            if ATTENTION in call.__code__.co_names:
                found.append((module, (route or Attention)(module, call, masks, passes), "__call__"))
    return found


def renamed(call: FunctionType, name: str, value: Any) -> FunctionType:
    """A copy of a function that sees another value under a global name. The function itself is not changed."""
    named = {**call.__globals__, name: value}
    copied = FunctionType(call.__code__, named, call.__name__, call.__defaults__, call.__closure__)
    copied.__kwdefaults__ = call.__kwdefaults__
    return copied


class Attention(KernelRoute):
    """A handler of a module that attends: its call with the kernel in the place of mlx-lm's function."""

    def __init__(self, module: nn.Module, call: FunctionType, masks: PassMasks, passes: PassState):
        super().__init__(module, passes)
        self._masks = masks
        # Set once a pass came with a mask that the kernel cannot express. A single row has no mask, but the kernel must not serve
        # it either: it would get other bits than among several.
        self._other_mask = False
        self._call = renamed(call, ATTENTION, self._attend)

    def __call__(self, inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        return self._call(self.module, *args, **kwargs)

    def _attend(self, queries, keys, values, cache, scale, mask, sinks=None):
        # In a compiled pass attention gets the cache's whole buffers.
        buffer = isinstance(mask, BufferMask) and not mask.changed and keys is cache.keys and values is cache.values
        self._other_mask = self._other_mask or isinstance(mask, mx.array) and not buffer and not _is_window(mask, cache)
        laid = None
        if not self._other_mask:
            laid = (keys, values, 0, 0) if buffer else laid_keys(queries, keys, values, cache, mask)
        said = isinstance(scale, (int, float))
        if laid and said:
            k, v, start, window = laid
            launch = block_attention_plan(queries, k, v, scale, True, window, sinks, folds=True)
            if isinstance(launch, small_batch.Folded):
                return launch(queries, keys, values, mask, self._masks.folded)
            if launch:
                self.passes.served.add(self)
                return launch(queries, k, v, sinks, start, mask.end if buffer else None)
        if small_batch.here() and said and sinks is None and mask is not None and isinstance(keys, mx.array):
            out = small_batch.folded_or_none(queries, keys, values, scale, mask, buffer, self._masks.folded)
            if out is not None:
                return out
        if laid is not None:
            self.passes.left.add(self)
        # Otherwise MLX would convert and broadcast it again in each layer.
        mask = self._masks.spread(mask, (*queries.shape[:3], keys.shape[2])) if buffer else mask
        return scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)


class ManyTexts(Attention):
    """A handler of a module that attends from one row in each of many texts, without padding."""

    def _attend(self, queries, keys, values, cache, scale, mask, sinks=None):
        plain = mask is None and sinks is None and isinstance(keys, mx.array)
        if plain and small_batch.serves_many_texts(queries, keys, values):
            return small_batch.gqa_folded_attention(queries, keys, values, None, scale)
        return scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)


def _recurrence_plan(*given: mx.array) -> Launch | None:
    return gated_delta_plan(*given) if autotune.may_run() else None


@dataclass
class Recurred:
    """What a call of a recurrence was given, and the state that it left: enough to run its first rows again in one launch.

    given: (q, k, v, g, beta, state) as `gated_delta` takes them; steps: mlx-lm's own code for this call; plan: gives the kernel
    to run in its place, or None.
    """

    given: tuple[mx.array, ...]
    steps: Launch
    plan: Callable[..., Launch | None] = _recurrence_plan
    state: mx.array | None = None

    def first(self, rows: int) -> mx.array:
        """The state after the first rows."""
        return (self.plan(*self.given) or self.steps)(*self.given, rows)[1]


class _Listening(threading.local):
    """Of this thread's running call: the list that keeps its recurrences, if any, and whether a kernel may serve it."""

    noted: list[Recurred] | None = None
    kernels = True


class Recurrence(KernelRoute):
    """A handler of a module with a gated delta rule: its call with ours in the place of mlx-lm's function."""

    plan = staticmethod(_recurrence_plan)

    def __init__(self, module: nn.Module, call: FunctionType, passes: PassState):
        super().__init__(module, passes)
        self._call, self._listening = renamed(call, UPDATE, self._update), _Listening()

    def __call__(self, inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        return self._call(self.module, *args, **kwargs)

    def recorded(self, args: tuple, kwargs: dict, kernels: bool) -> tuple[Any, list[Recurred]]:
        """The call's value, and each recurrence in it."""
        here, noted = self._listening, []
        here.noted, here.kernels = noted, kernels
        try:
            return self._call(self.module, *args, **kwargs), noted
        finally:
            here.noted, here.kernels = None, True

    def _update(
        self, q, k, v, a, b, A_log, dt_bias, state=None, mask=None, *, use_kernel=True, lower_bound=None, allow_neg_eigval=False
    ):
        here, beta = self._listening, mx.sigmoid(b)
        beta = beta * 2.0 if allow_neg_eigval else beta
        by_bound = (A_log, a, dt_bias, lower_bound)
        g = gated_delta.compute_g(A_log, a, dt_bias) if lower_bound is None else gated_delta.compute_lower_bound_g(*by_bound)
        if state is None:
            state = mx.zeros((q.shape[0], v.shape[2], v.shape[3], q.shape[3]), dtype=mx.float32)
        if mask is not None:
            return gated_delta_ops(q, k, v, g, beta, state, None, mask, use_kernel)
        # v is a slice of the convolution's output. A kernel would copy it twice: now, and in a rollback.
        given = (q, k, v if here.noted is None else mx.contiguous(v), g, beta, state)
        launch = self.plan(*given) if here.kernels else None
        (self.passes.served if launch else self.passes.left).add(self)
        call = Recurred(given, partial(gated_delta_ops, use_kernel=use_kernel), self.plan)
        y, call.state = (launch or call.steps)(*given)
        if here.noted is not None:
            here.noted.append(call)
        return y, call.state


def recurrence_calls(
    model: nn.Module, class_of: Callable[[nn.Module], type], passes: PassState, route: type[Recurrence] = Recurrence
) -> list[tuple[nn.Module, Recurrence, str]]:
    """(module, handler, method) for each module that itself calls mlx-lm's `gated_delta_update`."""
    found = []
    for _, module in model.named_modules():
        call = class_of(module).__call__ if callable(module) else None
        if isinstance(call, FunctionType) and call.__globals__.get(UPDATE) is gated_delta.gated_delta_update:
            if UPDATE in call.__code__.co_names:
                found.append((module, route(module, call, passes), "__call__"))
    return found


def _is_window(mask: mx.array, cache: Any) -> bool:
    """Whether a mask is one that `WindowMask` describes, with the window of this cache."""
    own = isinstance(mask, WindowMask) and not mask.changed and isinstance(cache, RotatingKVCache)
    return own and mask.window == cache.max_size


def laid_keys(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, mask: Any
) -> tuple[mx.array, mx.array, int, int] | None:
    """The keys and values that a cache has just returned, as the kernel takes them: in the order of the text, with the position
    of the first, and the window (0: none). None if they are of another kind, or a row sees fewer keys than those up to its own.
    """
    rotates = isinstance(cache, RotatingKVCache)
    if not (type(cache) is KVCache or rotates and not cache.keep) or queries.shape[0] != 1:
        return None
    m, s = queries.shape[2], keys.shape[2]
    if cache.keys is None or s != min(cache.offset, cache.keys.shape[2]):
        return None  # another layer's keys, or more than the cache's
    if isinstance(mask, mx.array):
        if not _is_window(mask, cache):
            return None
    elif mask != "causal" and (mask is not None or m > 1) or rotates and s > cache.max_size:
        return None
    if not rotates:
        return keys, values, 0, 0
    if (turn := cache._idx) < s:
        # The ring has wrapped. The kernel sums in the order of the text, on which the bits depend.
        keys, values = (mx.concatenate([a[:, :, turn:], a[:, :, :turn]], axis=2) for a in (keys, values))
    return keys, values, cache.offset - s, cache.max_size


def kernel_calls(
    model: nn.Module, class_of: Callable[[nn.Module], type] = type, passes: PassState | None = None
) -> list[tuple[nn.Module, KernelRoute, str]]:
    """(layer, handler, method) for the products of each affine quantized layer; on CUDA also of layers that are not quantized.

    Only layers of exactly the classes that the handlers were written for. `class_of`, `passes`: as in `attention_calls`.
    """
    found: list[tuple[nn.Module, KernelRoute, str]] = []
    passes = passes or PassState()
    dense = {nn.Linear: "__call__", nn.Embedding: "as_linear"} if small_batch.here() else {}
    for _, module in model.named_modules():
        if method := dense.get(class_of(module)):
            found.append((module, Dense(module, passes), method))
        if getattr(module, "mode", "affine") != "affine" or module.get("biases") is None:
            continue
        if (cls := class_of(module)) is nn.QuantizedLinear:
            found.append((module, Linear(module, passes), "__call__"))
        elif cls is nn.QuantizedEmbedding:
            found.append((module, Linear(module, passes), "as_linear"))
        elif cls.__name__ == "QuantizedSwitchLinear":
            found.append((module, Switch(module, passes), "__call__"))
    return found


class Linear(KernelRoute):
    """The product of a QuantizedLinear's call or a QuantizedEmbedding's as_linear, then the layer's own bias."""

    def __call__(self, inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        (x,) = args or kwargs.values()
        layer = self.module
        w, scales, biases = layer["weight"], layer["scales"], layer["biases"]
        launch = block_qmm_plan(x, w, scales, biases, layer.group_size, layer.bits)
        if launch is None:
            self.passes.left.add(self)
            return inner(x)
        self.passes.served.add(self)
        y = launch(x, w, scales, biases)
        return y + layer["bias"] if "bias" in layer else y


class Dense(KernelRoute):
    """The product of a Linear's call or an Embedding's as_linear, then the layer's own bias."""

    def __call__(self, inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        (x,) = args or kwargs.values()
        layer = self.module
        launch = small_batch.matmul_as_gemv_plan(x, layer["weight"])
        if launch is None:
            self.passes.left.add(self)
            return inner(x)
        y = launch(x, layer["weight"])
        return y + layer["bias"] if "bias" in layer else y


class Switch(KernelRoute):
    """QuantizedSwitchLinear's call. x: [..., 1 or k, 1, K], indices: [..., k], to [..., k, 1, N]."""

    def __call__(self, inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        x, indices = args[0], args[1] if len(args) > 1 else kwargs["indices"]
        layer = self.module
        w, scales, biases = layer["weight"], layer["scales"], layer["biases"]
        launch = None
        if rows_fit(x.shape, indices.shape):
            launch = block_gather_qmm_plan(x, w, scales, biases, indices, layer.group_size, layer.bits)
        if launch is None:
            self.passes.left.add(self)
            return inner(*args, **kwargs)
        self.passes.served.add(self)
        y = mx.expand_dims(launch(x, w, scales, biases, indices), -2)
        return y + mx.expand_dims(layer["bias"][indices], -2) if "bias" in layer else y


def rows_fit(x: tuple[int, ...], indices: tuple[int, ...]) -> bool:
    """Whether the rows' leading axes are those of the indices, or those with one row for all k experts. Takes shapes."""
    return x[-2] == 1 and (x[:-2] == indices or x[:-2] == (*indices[:-1], 1))
