"""A drafter's attention in a trace: few products, and `block_heads` for all that lies between them and the cache.

    block's rows      norm, [Wq; Wk; Wv] of the layer   --.
    context's rows    norm, [Wk; Wv] of all layers      --+-- block_heads -- cache -- attention -- heads -- o_proj, residual
    positions         what they turn by, once a pass    --'

The context is the same for all layers, so its keys and values are one product of a pass. Its weights are copies; the block's are
the layers' own. Where a Mac has not found `block_heads` right and faster, attention stays as it is.

Knows the plain drafter's attention; variants with attention of their own are left to themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..kernels import autotune
from ..kernels.block_heads import KERNEL, Heads, block_heads_plan, turned, turns_of
from ..models.drafter import Attention, DecoderLayer, Drafter
from ..models.intercept import own_class
from . import fusion
from .fusion import Call, Handler

# Up to this many rows, MLX's attention on Metal writes its output head by head. With more it writes row by row, where all heads
# of a row lie side by side already.
BY_HEADS = 8


def attention_calls(drafter: Drafter, kernels: Callable, K: int, S: int) -> tuple[list[Call], list[nn.Module]]:
    """Calls of the drafter's attention layers in a trace, and the modules that these calls make unnecessary for `fused_linears`.
    Two empty lists if `block_heads` does not serve the layers at these numbers of rows.

    Args:
      kernels: as in `fused_linears`; K, S: rows of a block and of its new context.
    """
    layers = [layer.self_attn for layer in drafter.layers]
    if not (autotune.allowed(KERNEL) and all(_is_plain(layer) for layer in drafter.layers)):
        return [], []
    heads = [_heads_of(layer) for layer in layers]
    if None in heads or any(_plan(layer, of, K, S) is None for layer, of in zip(layers, heads, strict=True)):
        return [], []
    products = [[layer.q_proj, layer.k_proj, layer.v_proj] for layer in layers]
    of_context = [product for _, *keys_values in products for product in keys_values]
    if not all(map(fusion.can_join, [*products, of_context])):
        return [], []
    blocks = [fusion.joined(some, own=True) for some in products]
    calls = _Pass(layers, heads, blocks, fusion.joined(of_context), kernels).calls()
    norms = [drafter.hidden_norm, *(layer.input_layernorm for layer in drafter.layers)]
    return calls, [*norms, *(product for some in products for product in some)]


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer attends as `models.drafter` does, to the context that all layers share."""
    attention = layer.self_attn
    own = own_class(layer).own_context is DecoderLayer.own_context
    return own and own_class(attention) is Attention and not attention.rotates_late


def _heads_of(layer: Attention) -> Heads | None:
    """What `block_heads` has to know of a layer; None if it cannot do the same."""
    dims, traditional = (getattr(layer.rope, name, None) for name in ("dims", "traditional"))
    if dims is None or traditional is None or layer.q_norm.eps != layer.k_norm.eps:
        return None
    heads = Heads(layer.n_heads, layer.n_kv_heads, layer.q_norm.weight.shape[0], dims, traditional, layer.q_norm.eps)
    x = mx.random.normal((1, 1, 2, heads.D), key=mx.random.key(0))
    same = mx.allclose(layer.rope(x[:], offset=1000), turned(x, _turns(layer, heads)[0, 0], traditional), rtol=0, atol=1e-4)
    return heads if same.item() else None


def _turns(layer: Attention, heads: Heads) -> mx.array:
    return turns_of(layer.rope, heads, 2, 1000)


def _plan(layer: Attention, heads: Heads, K: int, S: int, *types: mx.Dtype) -> Callable | None:
    """types: of the block's and the context's products; the norms' type if they are not known yet."""
    weights = layer.q_norm.weight.dtype, layer.k_norm.weight.dtype
    y, context = types or (weights[0], weights[0])
    return block_heads_plan(K, S, y, weights, context, heads)


class _Pass:
    """The attention layers of a pass, and what they share in it: the context's product and the cosines and sines of positions.

    blocks: each layer's [Wq; Wk; Wv]; context: [Wk; Wv] of one layer after the other.
    """

    def __init__(
        self,
        layers: Sequence[Attention],
        heads: Sequence[Heads],
        blocks: Sequence[nn.Module],
        context: nn.Module,
        kernels: Callable,
    ):
        self._layers, self._heads, self._context = layers, heads, context
        self._make = [_maker(whole, kernels) for whole in (*blocks, context)]
        # Layers with equal cosines and sines get the same number.
        seen: dict[bytes, int] = {}
        self._alike = [seen.setdefault(np.array(_turns(*of)).tobytes(), len(seen)) for of in zip(layers, heads, strict=True)]
        widths = [2 * of.kv_heads * of.D for of in heads]
        self._first = [mx.array([sum(widths[:i])], dtype=mx.int32) for i in range(len(layers))]
        mx.eval(self._first)
        # A context, its product, and cosines and sines by the numbers of `_alike`; None between two passes.
        self._shared: tuple[mx.array, mx.array, dict[int, mx.array]] | None = None

    def calls(self) -> list[Call]:
        return [(layer, self._handler(i)) for i, layer in enumerate(self._layers)]

    def _handler(self, i: int) -> Handler:
        layer, heads, last = self._layers[i], self._heads[i], i == len(self._layers) - 1

        def handler(inner: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            x, context, cache, start = args
            # Only in a trace are the cache's rows and the new ones in one buffer.
            if not hasattr(cache, "attend") or not autotune.may_run():
                return inner(*args)
            K, S = x.shape[1], context.shape[1]
            y, (shared, turns) = self._make[i](x).y, self._of_pass(context)
            if last:
                self._shared = None
            if (launch := _plan(layer, heads, K, S, y.dtype, shared.dtype)) is None:
                return inner(*args)
            if self._alike[i] not in turns:
                turns[self._alike[i]] = turns_of(layer.rope, heads, S + K, start)
            norms = layer.q_norm.weight, layer.k_norm.weight
            q, k, v = launch(y, shared, self._first[i], *norms, turns[self._alike[i]])
            k, v = layer.fetch(k, v, cache, K)
            out = cache.attend(q, k, v, layer.scale, layer.causal)
            return layer.o_proj(fusion.JoinedHeads.of(out) if K <= BY_HEADS else out.transpose(0, 2, 1, 3).flatten(2))

        handler.copy = self._context
        return handler

    def _of_pass(self, context: mx.array) -> tuple[mx.array, dict[int, mx.array]]:
        # Another thread may be tracing too.
        if (shared := self._shared) is None or shared[0] is not context:
            shared = self._shared = context, self._make[-1](context).y, {}
        return shared[1:]


def _maker(whole: nn.Module, kernels: Callable) -> Callable[..., Any]:
    columns = whole["weight"].shape[0]
    return fusion.product_maker(whole, kernels, fusion.weights_of(whole, columns), [columns], whole)
