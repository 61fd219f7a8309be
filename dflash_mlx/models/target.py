"""A target pass of any mlx-lm model that also returns the outputs of some layers (taps); its embedding and head for the drafter.

Knows no family by name, and no drafter. `parts` finds the module that owns the layers (the backbone) and the embedding,
`intercept` catches calls of layers, `recurrent` keeps recurrent states, `kernels.layer_routes` sends calls to kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import TapError
from ..kernels import autotune
from ..kernels.layer_routes import LayerRoutes, finite_bits, is_finite
from ..kernels.masks import WatchedArray
from ..rollback import RollbackPoint
from .intercept import Handler, intercept, own_class
from .parts import context_length, find_backbone, learned_positions, token_embedding
from .recurrent import StatefulModules


class _Stop(BaseException):
    """Ends a pass at the first layer, carrying that layer's input."""


def _first(args: tuple, kwargs: dict) -> mx.array:
    return args[0] if args else next(iter(kwargs.values()))


def _array(value: Any) -> mx.array:
    return value[0] if isinstance(value, (tuple, list)) else value


def _keep(outputs: list[mx.array], eager: bool = False, given: bool = False) -> Handler:
    """A handler that stores what a call returns, or its input if `given`. With `eager` it also starts evaluating that."""

    def handler(inner, args, kwargs):
        out = inner(*args, **kwargs)
        outputs.append(_first(args, kwargs) if given else _array(out))
        if eager:
            mx.async_eval(outputs[-1])
        return out

    return handler


def family(model: nn.Module) -> str:
    """The name of a model in messages: its config's model_type."""
    return getattr(model, "model_type", None) or type(model).__name__


@dataclass(frozen=True)
class TargetOutput:
    """What one target pass over [B, L] ids gives.

    Shapes:
      - hidden: [B, L, H] final normed states, what `head` takes
      - features: [B, L, n_taps * H] taps joined in the order of `layer_ids`
      - logits: [1, 1, V] what the model itself returned for a single row, not evaluated; None where not computed: ask `head`
    compiled: whether an accelerator ran it; then its finite flag is always read.
    """

    hidden: mx.array
    features: mx.array
    logits: mx.array | None = None
    compiled: bool = False


class Target:
    """A target model seen from outside: passes that also return taps, and its embedding and head.

    Nothing is held on the model between calls.

    Args:
      model: any mlx-lm model (text part of a wrapper included): `model.layers` lists its layers, one module owns them.
      layer_ids: 0-based layers whose outputs are tapped, in the order in which they are joined. -1 is the first layer's input;
        the number of layers is the last layer's output after the final norm.
    Raises:
      TapError: if layers, their owner or a tapped layer cannot be found.
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int] = ()):
        self.model, self.layer_ids = model, tuple(layer_ids)
        self.family = family(model)
        try:
            self.layers = list(model.layers)
        except (AttributeError, TypeError):
            raise TapError(
                f"{self.family} ({type(model).__name__}) has no .layers, as an mlx-lm model has them",
                "Pass the model that load returned, not a compiled or wrapped function",
            ) from None
        out = [i for i in self.layer_ids if not -1 <= i <= len(self.layers)]
        if out:
            raise TapError(
                f"taps at layers {out} are outside of {self.family}'s layers 0..{len(self.layers) - 1}",
                "Use the drafter that was trained for this target",
            )
        # Stored, because named_modules takes 0.6 ms for a model of 30 layers.
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.backbone = find_backbone(self.modules, self.layers[0], self.family)
        # The most rows that a learned table of positions allows. Memory behind the table may be NaN and spoil a whole block.
        self.positions = learned_positions(model)
        # Sends layers to kernels in passes of few rows.
        self.routes = LayerRoutes(model, own_class)
        # Modules that change an ArraysCache.
        self.states = StatefulModules(model, self.family, self.routes)
        # More layer calls to replace in these passes; set while a pass is compiled.
        self.fused: Sequence[tuple[nn.Module, Handler]] = ()
        # Runs a pass faster than the model's own code, where it can; set by the pair.
        self.accelerator: Any = None
        # Where the head is, after `_find_head`: () if no single layer is the head.
        self._head: tuple[nn.Module, str, str] | tuple[()] | None = None

    @property
    def context_length(self) -> int | None:
        """The positions that the model's config allows, scaled RoPE included; None if it does not say."""
        return context_length(self.modules.values())

    @cached_property
    def embedding(self) -> nn.Module:
        """See `token_embedding`. Raises TapError if there is none."""
        found = token_embedding(self.model, self.backbone)
        if found is None:
            raise TapError(f"{self.family} has no token embedding", "This model cannot be paired")
        return found

    @property
    def vocabulary(self) -> int:
        """Rows of the token embedding in memory. Larger ids would read garbage."""
        return self.embedding.weight.shape[0]

    def __call__(
        self,
        ids: mx.array,
        cache: Sequence[Any] | None = None,
        point: RollbackPoint | None = None,
        kernels: bool = False,
        eager: bool = False,
    ) -> TargetOutput:
        """One target pass without the head.

        Shapes:
          - ids: [B, L] int32
        Args:
          point: a fresh `rollback_point(cache)`, so that `rollback` can remove rows of this pass. Costs memory: the inputs of
            stateful modules are kept, for every row. So a pass over one row leaves it out.
          kernels: let our kernels run the layers of a pass of few rows. The caller must then read `finite_flag`.
          eager: start evaluating each tap at once, so that the device works while the host builds the later layers. Not allowed
            inside a compiled function.
        Raises:
          TapError: if a tapped layer did not run exactly once (a model compiled beforehand never calls it).
        """
        # One list per tap. A tap after the final norm is the backbone's output.
        final: list[mx.array] = []
        got: dict[int, list[mx.array]] = {i: [] if i < len(self.layers) else final for i in self.layer_ids}
        handlers = [(self.layers[max(i, 0)], _keep(kept, eager, i < 0)) for i, kept in got.items() if kept is not final]
        handlers.append((self.backbone, _keep(final)))
        self.routes.begin()
        routed = [*self.routes.calls(ids.size), *self.fused] if kernels else []
        with intercept([*routed, *handlers]), self.states.during(cache, point, ids.shape[1], kernels):
            # The head's logits are evaluated for a single row only: MLX is lazy, so this costs no head product.
            out = self.model(ids, cache=cache)
        if kernels:
            self.routes.ended(ids.size)
        if len(final) != 1 or any(len(outputs) != 1 for outputs in got.values()):
            runs = {f"layer {i}": len(v) for i, v in got.items()} | {type(self.backbone).__name__: len(final)}
            wrong = [f"{part} ran {n} times" for part, n in runs.items() if n != 1]
            raise TapError(
                f"{'; '.join(wrong)} in a pass; each tapped part of {self.family} must run once",
                _why_not_once(runs, self.layers),
            )
        if point is not None:
            point.ended(ids.shape[1])
        taps = [got[i][0] for i in self.layer_ids]
        if any(t.ndim != 3 for t in taps):
            odd = [f"layer {i} gives {list(t.shape)}" for i, t in zip(self.layer_ids, taps, strict=True) if t.ndim != 3]
            raise TapError(
                f"{'; '.join(odd)}; each layer of {self.family} must give [B, L, H]",
                "Its layers carry several streams: no drafter can be fed with them",
            )
        features = mx.concatenate(taps, axis=-1) if taps else final[0][..., :0]
        return TargetOutput(final[0], features, _array(out) if ids.size == 1 else None)

    def clone(self) -> Target:
        """A new target of the same model and taps, for passes that are watched or compiled."""
        return Target(self.model, self.layer_ids)

    def prefill_chunk(self, at: int, step: int | None, left: int) -> int:
        """How many prompt tokens to read in one pass. at: rows in the cache; step: the user's choice; left: tokens to go."""
        return min(step or 2048, left)

    def embed(self, ids: mx.array) -> mx.array:
        """[B, L] ids to [B, L, H]: the first layer's input, with the embedding scale if there is one."""

        def stop(inner, args, kwargs):
            raise _Stop(_first(args, kwargs))

        try:
            with intercept([(self.layers[0], stop)]):
                self.model(ids)
        except _Stop as reached:
            return reached.args[0]
        raise TapError(f"{self.family} did not call its first layer", "Pass the uncompiled model")

    def greedy_ids(self, hidden: mx.array) -> tuple[mx.array, mx.array] | None:
        """The argmax of each row's logits, by a kernel that never writes the logits. None if no kernel can: use `head`.

        Shapes:
          - hidden: [B, L, H] final normed states
        Returns:
          - ids: [B, L] int32; margin: [B, L] float32, NaN where a logit is
        """
        if not self.routes.can_argmax(hidden.size // hidden.shape[-1]):
            return None
        if self._head is None:
            self._head = self._find_head(hidden)
        return self.routes.greedy_ids(hidden, self._head[0][self._head[1]]) if self._head else None

    def finite_flag(
        self, hidden: mx.array, margin: mx.array | None = None, logits: mx.array | None = None, compiled: bool = False
    ) -> list[mx.array]:
        """A flag that the host reads with the round's other numbers and gives to `check`. [] if only MLX's own code ran, else one
        array [1] int32 with the bits of a float32.

        Args:
          hidden, compiled: of the pass's output; margin: from `greedy_ids`; logits: from `head`, normalised or not.
        """
        # `served`: whether kernels ran in this pass. They may be off by now, because of another thread.
        if margin is None and not (compiled or self.routes.served):
            return []
        return [finite_bits(hidden, margin, logits if self.routes.served else None)]

    def check(self, flag: list[int], compiled: bool = False) -> None:
        """If a value is not finite, switch off what may have caused it, with one line in the log: the accelerator or all kernels.

        Args:
          flag: what `finite_flag` gave; compiled: of the pass's output. False where only `head` ran since the last check.
        Raises:
          NotFiniteError: a value is not finite. The pass must run again.
        """
        if not all(map(is_finite, flag)):
            if compiled:
                self.accelerator.refuse("a pass gave a value that is not finite")
            else:
                autotune.disable_all("a pass gave a value that is not finite")
            raise autotune.NotFiniteError

    def _find_head(self, hidden: mx.array) -> tuple[nn.Module, str, str] | tuple[()]:
        """Find the layer that is the whole head: it takes the hidden states, and the model returns its output unchanged.

        Returns: its owner, attribute name and method, so that a replacement is found too; () if there is no such layer.
        """
        modules, seen = self.modules, []

        def watch(path: str, method: str) -> tuple[nn.Module, Handler, str]:
            def handler(inner, args, kwargs):
                out = WatchedArray(inner(*args, **kwargs))
                seen.append((path, method, args, out))
                return out

            return modules[path], handler, method

        linears = [watch(path, "__call__") for path, m in modules.items() if isinstance(m, nn.Linear | nn.QuantizedLinear)]
        tables = [watch(path, "as_linear") for path, m in modules.items() if hasattr(m, "as_linear")]
        logits = self._logits(hidden, [*linears, *tables])
        for path, method, args, out in seen:
            owner, _, name = path.rpartition(".")
            whole = out is logits and not out.changed and args and args[0] is hidden
            if whole and name in modules.get(owner, ()):
                return modules[owner], name, method
        return ()

    def head(self, hidden: mx.array) -> mx.array:
        """[B, L, H] final normed states to logits [B, L, V]: the model's own code after its layers, soft-cap included."""
        handlers = self.routes.calls(hidden.size // hidden.shape[-1])
        if self._head is None:
            self._head = self._find_head(hidden)
        if not self._head:
            return self._logits(hidden, handlers)
        owner, name, method = self._head
        layer, call = owner[name], getattr(owner[name], method)
        # Called directly: `intercept` over hundreds of layers would take as long as building a pass.
        handler = next((h for module, h, way in handlers if module is layer and way == method), None)
        return handler(call, (hidden,), {}) if handler else call(hidden)

    def _logits(self, hidden: mx.array, handlers: Sequence[tuple[nn.Module, Handler, str]]) -> mx.array:
        def skip(inner, args, kwargs):
            return hidden

        with intercept([*handlers, (self.backbone, skip)]):
            return _array(self.model(mx.zeros(hidden.shape[:2], dtype=mx.int32)))

    def matrix(self, hidden: mx.array) -> mx.array:
        """[B, L, H] to [B, L, V] by the head's matrix product alone: no scale, no soft-cap."""
        inside = {id(m) for _, m in self.backbone.named_modules()}
        found: list[nn.Module] = []

        def noting(module: nn.Module) -> Handler:
            return lambda inner, args, kwargs: found.append(module) or inner(*args, **kwargs)

        linears = [m for _, m in self.model.named_modules() if isinstance(m, (nn.Linear, nn.QuantizedLinear))]
        self._logits(hidden, [(m, noting(m), "__call__") for m in linears if id(m) not in inside])
        return found[-1](hidden) if found else self.embedding.as_linear(hidden)


def _why_not_once(runs: dict[str, int], layers: Sequence[Any]) -> str:
    if max(runs.values()) > 1:
        return "It runs its layers in loops, so a layer has several outputs: no drafter can be fed with them."
    if not callable(layers[0]):
        return "It runs its layers piece by piece, never as a whole, so they have no output: no drafter can be fed with it."
    return "If the model or a part of it was compiled, pass the uncompiled one."
