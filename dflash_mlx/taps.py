"""The outputs of chosen layers of any mlx-lm model during one target pass, and the two ends a drafter borrows.

Knows how to find a model's layers and the module that owns them (its backbone). Knows no family by name and no drafter.

mlx-lm models offer no hook, and many build `model.layers` afresh at each access. What works for all of them: the layer
OBJECT gets a subclass of its own class for the length of one pass, and its old class back afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .errors import TapError

# One made class per (class, role): a new type each pass would defeat caches keyed by type.
_made: dict[tuple[type, str], type] = {}
# Per thread: id(module) -> what to do with its call. Values live here, never on a module (an array there is a parameter).
_local = threading.local()
# How many passes, over all threads, hold a module in its made class.
_held: dict[int, int] = {}
_lock = threading.Lock()

Handler = Callable[[Callable[..., Any], tuple, dict], Any]


def _swapped(cls: type, role: str) -> type:
    """The subclass of a module's class whose call goes through this thread's handler, if it has one."""

    def __call__(self, *args, **kwargs):
        handler = getattr(_local, "handlers", {}).get(id(self))
        inner = super(made, self).__call__
        return inner(*args, **kwargs) if handler is None else handler(inner, args, kwargs)

    made = _made.get((cls, role))
    if made is None:
        made = _made[cls, role] = type(role + cls.__name__, (cls,), {"__call__": __call__})
    return made


@contextmanager
def _intercept(handlers: Sequence[tuple[nn.Module, Handler]]) -> Iterator[None]:
    """Route the calls of some modules through handlers, in this thread, until the block ends."""
    before = getattr(_local, "handlers", {})
    _local.handlers = {**before, **{id(m): h for m, h in handlers}}
    with _lock:
        for module, _ in handlers:
            if not _held.get(id(module)):
                module.__class__ = _swapped(type(module), "Tapped")
            _held[id(module)] = _held.get(id(module), 0) + 1
    try:
        yield
    finally:
        with _lock:
            for module, _ in handlers:
                _held[id(module)] -= 1
                if not _held[id(module)]:
                    del _held[id(module)]
                    module.__class__ = type(module).__mro__[1]
        _local.handlers = before


class _Stop(BaseException):
    """Ends a pass at the first layer, carrying that layer's input."""


def _array(value: Any) -> mx.array:
    return value[0] if isinstance(value, (tuple, list)) else value


class Target:
    """A target model seen from outside: passes that also return taps, and its embedding and head.

    Nothing is held on the model between calls.

    Args:
      model: any mlx-lm model (text part of a wrapper included): `model.layers` lists its layers, one module owns them.
      layer_ids: 0-based layers whose outputs are tapped, in the order in which they are joined.
    Raises:
      TapError: if layers, their owner or a tapped layer cannot be found.
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int] = ()):
        self.model, self.layer_ids = model, tuple(layer_ids)
        self.family = getattr(model, "model_type", None) or type(model).__name__
        try:
            self.layers = list(model.layers)
        except (AttributeError, TypeError):
            raise TapError(
                f"expected an mlx-lm model with .layers; {self.family} ({type(model).__name__}) has none. "
                "Pass the model that load returned, not a compiled or wrapped function."
            ) from None
        out = [i for i in self.layer_ids if not 0 <= i < len(self.layers)]
        if out:
            raise TapError(
                f"expected taps among {self.family}'s layers 0..{len(self.layers) - 1}; found {out}. "
                "Use the drafter that was trained for this target."
            )
        self.backbone = self._owner()

    def _owner(self) -> nn.Module:
        """The innermost module whose own list holds the layers: its output is the final normed hidden state."""
        first = self.layers[0]
        owners = [
            m
            for _, m in self.model.named_modules()
            if any(isinstance(v, list) and any(x is first for x in v) for v in m.values())
        ]
        if len(owners) != 1 or owners[0] is self.model:
            raise TapError(
                f"expected one module inside {self.family} that owns its layers; found {len(owners)}. "
                "This model keeps its head and its layers in one module and cannot be tapped."
            )
        return owners[0]

    @property
    def vocabulary(self) -> int:
        """Rows of the token embedding as it lies in memory: ids from here on would read garbage."""
        tables = [m for _, m in self.backbone.named_modules() if isinstance(m, (nn.Embedding, nn.QuantizedEmbedding))]
        if not tables:
            raise TapError(f"expected a token embedding inside {self.family}; found none. This model cannot be paired.")
        return max(table.weight.shape[0] for table in tables)

    def __call__(self, ids: mx.array, cache: Sequence[Any] | None = None) -> tuple[mx.array, mx.array]:
        """One target pass without the head.

        Shapes:
          - ids: [B, L] int32
        Returns:
          - hidden: [B, L, H] final normed states; features: [B, L, n_taps * H] taps joined in the order of `layer_ids`
        Raises:
          TapError: if a tapped layer did not run exactly once (a model compiled beforehand never calls it).
        """
        got: dict[int, list[mx.array]] = {i: [] for i in self.layer_ids}
        final: list[mx.array] = []

        def tap(i: int) -> Handler:
            def handler(inner, args, kwargs):
                out = inner(*args, **kwargs)
                got[i].append(_array(out))
                return out

            return handler

        def keep_final(inner, args, kwargs):
            out = inner(*args, **kwargs)
            final.append(_array(out))
            return out

        handlers = [(self.layers[i], tap(i)) for i in got] + [(self.backbone, keep_final)]
        with _intercept(handlers):
            # The head's logits are never evaluated: MLX is lazy, so this costs no head product.
            self.model(ids, cache=cache)
        wrong = [f"layer {i} ran {len(v)} times" for i, v in got.items() if len(v) != 1]
        if len(final) != 1:
            wrong.append(f"{type(self.backbone).__name__} ran {len(final)} times")
        if wrong:
            raise TapError(
                f"expected each tapped part of {self.family} to run once in a pass; {'; '.join(wrong)}. "
                "If the model or a part of it was compiled with mx.compile, pass the uncompiled one."
            )
        taps = [got[i][0] for i in self.layer_ids]
        return final[0], (mx.concatenate(taps, axis=-1) if taps else final[0][..., :0])

    def embed(self, ids: mx.array) -> mx.array:
        """[B, L] ids to [B, L, H]: what the first layer is given, any embedding scale included."""

        def stop(inner, args, kwargs):
            raise _Stop(args[0] if args else next(iter(kwargs.values())))

        try:
            with _intercept([(self.layers[0], stop)]):
                self.model(ids)
        except _Stop as reached:
            return reached.args[0]
        raise TapError(f"expected {self.family} to call its first layer; it did not. Pass the uncompiled model.")

    def head(self, hidden: mx.array) -> mx.array:
        """[B, L, H] final normed states to logits [B, L, V]: the model's own code after its layers, soft-cap included."""

        def skip(inner, args, kwargs):
            return hidden

        with _intercept([(self.backbone, skip)]):
            return _array(self.model(mx.zeros(hidden.shape[:2], dtype=mx.int32)))
