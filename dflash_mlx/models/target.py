"""The outputs of chosen layers of any mlx-lm model during one target pass, and the two ends a drafter borrows.

Knows how to find a model's layers and the module that owns them (its backbone). Knows no family by name and no drafter.

mlx-lm models offer no hook, and many build `model.layers` afresh at each access. What works for all of them: the layer
OBJECT gets a subclass of its own class for the length of one pass, and its old class back afterwards.

The same interception finds the modules that change a recurrent or convolution state, and remembers their inputs for the
length of a block, so that any number of the block's rows can be run through them again; and it sends the quantized layers and
the attention of a pass over few rows through our kernels, where a GPU has shown them right and faster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList

from ..errors import CacheError, TapError
from ..kernels import autotune
from ..kernels.block_qmm import MAX_ROWS
from ..kernels.head_argmax import head_argmax_plan
from ..kernels.routing import Handler, KernelRoute, WatchedArray, attention_calls, kernel_calls
from ..rollback import RollbackPoint, leaves


class _Local(threading.local):
    """Per thread: (id(module), method) -> what to do with its call. Never on a module, where an array would be a parameter."""

    handlers: dict[tuple[int, str], Handler] = {}


# One made class per class: a new type each pass would defeat caches keyed by type.
_made: dict[type, type] = {}
_local = _Local()
# The modules, by id, that each pass of any thread holds in their made classes.
_held: dict[object, Collection[int]] = {}
_lock = threading.Lock()


def _swapped(cls: type) -> type:
    """The subclass of a module's class whose calls go through this thread's handlers, where it has one.

    An embedding's `as_linear`, the head of a tied model, is such a call too.
    """
    made = _made.get(cls)
    if made is None:
        methods = [method for method in ("__call__", "as_linear") if hasattr(cls, method)]
        made = _made[cls] = type("Tapped" + cls.__name__, (cls,), {})
        for method in methods:
            setattr(made, method, _through_handler(made, method))
    return made


def _through_handler(made: type, method: str) -> Callable[..., Any]:
    def call(self, *args, **kwargs):
        handler = _local.handlers.get((id(self), method))
        # Not by `super`: another thread, which alone held the module, may have let go of it since this call was looked up.
        inner = getattr(made.__base__, method).__get__(self)
        return inner(*args, **kwargs) if handler is None else handler(inner, args, kwargs)

    return call


def _is_swapped(cls: type) -> bool:
    """Whether a module's class is a made one. A class of its own that inherits from one that was tapped is not that."""
    return _made.get(cls.__base__) is cls


def own_class(module: nn.Module) -> type:
    """A module's class, also while a pass of some thread holds it in a made one."""
    cls = type(module)
    return cls.__base__ if _is_swapped(cls) else cls


def _chain(outer: Handler, within: Handler) -> Handler:
    return lambda inner, args, kwargs: outer(lambda *a, **k: within(inner, a, k), args, kwargs)


# The exponent of a float32 that is infinite or no number.
_NOT_FINITE = 0x7F800000

# nn.Module's own looks whether the value is a parameter, which takes as long as the rest of an interception.
_set = object.__setattr__


@contextmanager
def intercept(handlers: Sequence[tuple[nn.Module, Handler] | tuple[nn.Module, Handler, str]]) -> Iterator[None]:
    """Route the calls of some modules through handlers, in this thread, until the block ends; the newest is outermost.

    A third item names another method than `__call__`.
    """
    before, me = _local.handlers, object()
    routed, modules = dict(before), {}
    for module, handler, *method in handlers:
        key = (id(module), method[0] if method else "__call__")
        routed[key] = _chain(handler, before[key]) if key in before else handler
        modules[key[0]] = module
    try:
        with _lock:
            _held[me] = modules.keys()
            for module in modules.values():
                cls = type(module)
                # Of hundreds of modules the classes are few: most are known here.
                if made := _made.get(cls):
                    _set(module, "__class__", made)
                elif not _is_swapped(cls):
                    _set(module, "__class__", _swapped(cls))
        _local.handlers = routed
        yield
    finally:
        _local.handlers = before
        with _lock:
            # Right for any part of the above that an interruption left undone.
            _held.pop(me, None)
            others = set().union(*_held.values())
            for key, module in modules.items():
                cls = type(module)
                own = cls.__base__
                if _made.get(own) is cls and key not in others:
                    _set(module, "__class__", own)


class _Stop(BaseException):
    """Ends a pass at the first layer, carrying that layer's input."""


def _array(value: Any) -> mx.array:
    return value[0] if isinstance(value, (tuple, list)) else value


def _keep(outputs: list[mx.array], eager: bool = False) -> Handler:
    """A handler that only notes what the call returns, and with `eager` hands it to the device."""

    def handler(inner, args, kwargs):
        out = inner(*args, **kwargs)
        outputs.append(_array(out))
        if eager:
            mx.async_eval(outputs[-1])
        return out

    return handler


def _given(args: tuple, kwargs: dict) -> list[Any]:
    """The caches among a call's arguments: entries, not lists of a whole model's."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, (ArraysCache, CacheList))]


def _recorder(module: nn.Module, point: RollbackPoint, rows: int) -> Handler:
    """Leaves in `point` how to run the first n rows of this call again, for the state that it leaves in its cache entry.

    Linear layers inside work row by row, so their outputs are kept and cut instead of computed again; what is left to do is
    the convolution and the recurrence. What the call returns is not looked at, and MLX computes only what is.
    """
    linears = [m for _, m in module.named_modules() if isinstance(m, (nn.Linear, nn.QuantizedLinear))]

    def handler(inner, args, kwargs):
        # Per layer, in the order of its calls: (shape of the input without its rows, output).
        kept: dict[int, list[tuple[tuple, mx.array]]] = {id(m): [] for m in linears}

        def keep(key: int) -> Handler:
            def linear(inner, args, kwargs):
                out = inner(*args, **kwargs)
                B, *shape = args[0].shape
                if len(shape) > 1 and shape[0] == rows:
                    kept[key].append(((B, *shape[1:]), out))
                return out

            return linear

        def replay(n: int) -> None:
            left = {key: list(outputs) for key, outputs in kept.items()}

            def give(key: int) -> Handler:
                def linear(inner, args, kwargs):
                    B, *shape = args[0].shape
                    if left[key] and shape[0] == n and left[key][0][0] == (B, *shape[1:]):
                        return left[key].pop(0)[1][:, :n]
                    return inner(*args, **kwargs)

                return linear

            with intercept([(m, give(id(m))) for m in linears]):
                inner(*(_first_rows(a, rows, n) for a in args), **{k: _first_rows(a, rows, n) for k, a in kwargs.items()})

        with intercept([(m, keep(id(m))) for m in linears]):
            out = inner(*args, **kwargs)
        for entry in _given(args, kwargs):
            point.replays.setdefault(id(entry), []).append(replay)
        return out

    return handler


def _first_rows(value: Any, rows: int, n: int) -> Any:
    """An argument of a call over `rows` rows cut to the first n: [B, rows, ...] states and [..., rows, T + rows] masks."""
    if not isinstance(value, mx.array) or value.ndim < 2:
        return value
    if value.shape[1] == rows:
        return value[:, :n]
    if value.shape[-2] == rows and value.shape[-1] > rows:
        return value[..., :n, : value.shape[-1] - (rows - n)]
    return value


def family(model: nn.Module) -> str:
    """What messages call a model: its config's model_type."""
    return getattr(model, "model_type", None) or type(model).__name__


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
        self.family = family(model)
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
        # As they are now: a walk over them takes 0.6 ms of a model of 30 layers.
        self._modules: dict[str, nn.Module] = dict(model.named_modules())
        self.backbone = self._owner()
        # Rows of a learned table of positions, as GPT-2 has one: what stands behind it in memory may be no number, and a block
        # that reaches there is spoilt whole.
        self.positions: int | None = getattr(getattr(model, "args", None), "n_positions", None)
        # What the model itself returned for the last pass if that was over one row, [1, 1, V]: `head` need not run.
        self.logits: mx.array | None = None
        # Modules that change an ArraysCache, from the first pass that had one.
        self._stateful: list[nn.Module] | None = None
        # Layers that kernels may serve, from the first pass of few rows on a GPU.
        self._kernel_calls: list[tuple[nn.Module, KernelRoute, str]] | None = None
        # Rows of a pass -> what the kernels' plans rested on, and which of those layers are routed.
        self._routed: dict[int, tuple[object, list[tuple[nn.Module, KernelRoute, str]]]] = {}
        # Whether the last pass was a compiled one, whose calls nobody sees.
        self.was_compiled = False
        # Calls of layers that go another way in passes of few rows, before any kernel: see `traced`.
        self.fused: Sequence[tuple[nn.Module, Handler]] = ()
        # Runs a pass over a block in place of this target's own where it can: see `traced`.
        self.accelerator: Any = None
        # Where the head is, once it was looked for: see `_find_head`.
        self._head: tuple[nn.Module, str, str] | tuple[()] | None = None

    def _owner(self) -> nn.Module:
        """The innermost module that holds the layers and the token embedding: its output is the final normed hidden state.

        The list of the layers may lie further inside, in a decoder that is never called or whose output is not normed yet.
        """
        modules, first = self._modules, self.layers[0]
        owners = [
            path for path, m in modules.items() if any(isinstance(v, list) and any(x is first for x in v) for v in m.values())
        ]
        if len(owners) != 1 or owners[0] == "":
            raise TapError(
                f"expected one module inside {self.family} that owns its layers; found {len(owners)}. "
                "This model keeps its head and its layers in one module and cannot be tapped."
            )
        embeddings = [path for path, m in modules.items() if isinstance(m, (nn.Embedding, nn.QuantizedEmbedding))]
        outwards = owners[0]
        while outwards:
            if any(path.startswith(f"{outwards}.") for path in embeddings):
                return modules[outwards]
            outwards = outwards.rpartition(".")[0]
        return modules[owners[0]]

    @property
    def context_length(self) -> int | None:
        """Positions that the model's own config gives it, scaled RoPE included; None where it gives none."""
        for module in self._modules.values():
            for args in (getattr(module, "args", None), getattr(module, "config", None)):
                args = args if isinstance(args, dict) else getattr(args, "__dict__", {})
                for part in (args, args.get("text_config")):
                    part = part if isinstance(part, dict) else getattr(part, "__dict__", {})
                    if isinstance(length := part.get("max_position_embeddings"), int):
                        scaling = part.get("rope_scaling") or part.get("rope_parameters") or {}
                        factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
                        return max(length, int(factor * original)) if factor and original else length
        return None

    @property
    def embedding(self) -> nn.Module:
        """The token embedding itself, without the scale that the model may give it: the table with the most rows."""
        modules = [m for part in (self.backbone, self.model) for _, m in part.named_modules()]
        tables = [m for m in modules if isinstance(m, (nn.Embedding, nn.QuantizedEmbedding))]
        if not tables:
            raise TapError(f"expected a token embedding inside {self.family}; found none. This model cannot be paired.")
        return max(tables, key=lambda table: table.weight.shape[0])

    @property
    def vocabulary(self) -> int:
        """Rows of the token embedding as it lies in memory: ids from here on would read garbage."""
        return self.embedding.weight.shape[0]

    def __call__(
        self,
        ids: mx.array,
        cache: Sequence[Any] | None = None,
        point: RollbackPoint | None = None,
        kernels: bool = False,
        eager: bool = False,
    ) -> tuple[mx.array, mx.array]:
        """One target pass without the head.

        Shapes:
          - ids: [B, L] int32
        Args:
          point: made by `rollback_point(cache)` just now; then `rollback` takes back rows of this pass. For blocks only:
            inputs of stateful modules are kept, for every row.
          kernels: of few rows, let our kernels serve its layers. For who looks at `finite_flag`: prefill does not.
          eager: hand each tap to the device as it comes, so that it works while the host puts the layers behind it together. Not
            inside a compiled function.
        Returns:
          - hidden: [B, L, H] final normed states; features: [B, L, n_taps * H] taps joined in the order of `layer_ids`
        Raises:
          TapError: if a tapped layer did not run exactly once (a model compiled beforehand never calls it).
        """
        got: dict[int, list[mx.array]] = {i: [] for i in self.layer_ids}
        final: list[mx.array] = []
        handlers = [(self.layers[i], _keep(outputs, eager)) for i, outputs in got.items()] + [(self.backbone, _keep(final))]
        self.was_compiled = False
        for _, handler, _ in self._kernel_calls or ():
            handler.served = handler.left = False
        routed = [*self._kernels(ids.size), *self.fused] if kernels else []
        with intercept([*routed, *handlers]), self._states(cache, point, ids.shape[1]):
            # The head's logits are evaluated for a single row only: MLX is lazy, so this costs no head product.
            out = self.model(ids, cache=cache)
        if kernels:
            self._not_again(ids.size)
        self.logits = _array(out) if ids.size == 1 else None
        if len(final) != 1 or any(len(outputs) != 1 for outputs in got.values()):
            runs = {f"layer {i}": len(v) for i, v in got.items()} | {type(self.backbone).__name__: len(final)}
            wrong = [f"{part} ran {n} times" for part, n in runs.items() if n != 1]
            raise TapError(
                f"expected each tapped part of {self.family} to run once in a pass; {'; '.join(wrong)}. "
                f"{self._why_not_once(runs)}"
            )
        if point is not None:
            point.ended(ids.shape[1])
        taps = [got[i][0] for i in self.layer_ids]
        if any(t.ndim != 3 for t in taps):
            odd = [f"layer {i} gives {list(t.shape)}" for i, t in zip(self.layer_ids, taps, strict=True) if t.ndim != 3]
            raise TapError(
                f"expected each layer of {self.family} to give [B, L, H]; {'; '.join(odd)}. Its layers carry several streams: no "
                "drafter can be fed with them."
            )
        return final[0], (mx.concatenate(taps, axis=-1) if taps else final[0][..., :0])

    def _why_not_once(self, runs: dict[str, int]) -> str:
        if max(runs.values()) > 1:
            return "It runs its layers in loops, so a layer has several outputs: no drafter can be fed with them."
        if not callable(self.layers[0]):
            return "It runs its layers piece by piece, never as a whole, so they have no output: no drafter can be fed with it."
        return "If the model or a part of it was compiled with mx.compile, pass the uncompiled one."

    def _kernels(self, rows: int) -> list[tuple[nn.Module, KernelRoute, str]]:
        """How a pass over few rows, one included, calls the target's layers: row by row the same for any number."""
        if rows > MAX_ROWS or not autotune.may_run():
            return []
        if self._kernel_calls is None:
            self._kernel_calls = kernel_calls(self.model, own_class) + attention_calls(self.model, own_class)
        plans = autotune.plans()
        if self._routed.get(rows, (None,))[0] is not plans:
            self._routed[rows] = (plans, self._kernel_calls)
        return self._routed[rows][1]

    def _not_again(self, rows: int) -> None:
        """After a pass: layers that it left to MLX are not routed for as many rows, as long as what was planned holds."""
        plans, calls = self._routed.get(rows, (None, ()))
        if plans is autotune.plans() and any(handler.left for _, handler, _ in calls):
            self._routed[rows] = (plans, [call for call in calls if call[1].served or not call[1].left])

    def _states(self, cache: Sequence[Any] | None, point: RollbackPoint | None, rows: int) -> AbstractContextManager:
        """Round one pass: the first one finds the modules that change states, those with a rollback point record them."""
        if not any(type(entry) is ArraysCache for entry in leaves(cache or ())):
            return nullcontext()
        if self._stateful is None:
            return self._find_stateful(cache)
        if point is None:
            return nullcontext()
        return intercept([(module, _recorder(module, point, rows)) for module in self._stateful])

    @contextmanager
    def _find_stateful(self, cache: Sequence[Any]) -> Iterator[None]:
        """Watch one pass for the smallest modules outside of which no `ArraysCache` changes.

        A call is charged with a change that happens before, between or after the calls inside it.

        Raises:
          CacheError: if a state changes where no module can be run again.
        """
        states = {id(entry): entry for entry in leaves(cache) if type(entry) is ArraysCache}
        # Per state the open calls, outermost first: [arrays as last seen, charged, modules charged inside].
        open_calls = {key: [[list(entry.cache), False, []]] for key, entry in states.items()}

        def charge(key: int) -> None:
            call, now = open_calls[key][-1], states[key].cache
            call[1] |= any(a is not b for a, b in zip(call[0], now, strict=True))
            call[0] = list(now)

        def watch(module: nn.Module) -> Handler:
            def handler(inner, args, kwargs):
                keys = [id(e) for e in leaves(_given(args, kwargs)) if id(e) in states]
                for key in keys:
                    charge(key)
                    open_calls[key].append([list(states[key].cache), False, []])
                out = inner(*args, **kwargs)
                for key in keys:
                    charge(key)
                    arrays, charged, inside = open_calls[key].pop()
                    outer = open_calls[key][-1]
                    outer[0] = arrays
                    outer[2] += [module] if charged else inside
                return out

            return handler

        modules = {id(m): m for _, m in self.model.named_modules() if m is not self.model}
        with intercept([(m, watch(m)) for m in modules.values()]):
            yield
        for key in states:
            charge(key)
        if any(calls[0][1] for calls in open_calls.values()):
            raise CacheError(
                f"expected each recurrent state of {self.family} to change inside a module that is handed it; found one that "
                "does not, so it cannot be rolled back. Run this target without a drafter (draft_model=None)."
            )
        found = {id(m): m for calls in open_calls.values() for m in calls[0][2]}
        self._stateful = list(found.values())

    def embed(self, ids: mx.array) -> mx.array:
        """[B, L] ids to [B, L, H]: what the first layer is given, any embedding scale included."""

        def stop(inner, args, kwargs):
            raise _Stop(args[0] if args else next(iter(kwargs.values())))

        try:
            with intercept([(self.layers[0], stop)]):
                self.model(ids)
        except _Stop as reached:
            return reached.args[0]
        raise TapError(f"expected {self.family} to call its first layer; it did not. Pass the uncompiled model.")

    def choices(self, hidden: mx.array) -> tuple[mx.array, mx.array] | None:
        """The argmax of each row's logits without the logits, where head_argmax does that here; None: take it from `head`.

        Shapes:
          - hidden: [B, L, H] final normed states
        Returns:
          - ids: [B, L] int32; margin: [B, L] float32, NaN where a logit is
        """
        if hidden.size // hidden.shape[-1] > MAX_ROWS or not autotune.may_run():
            return None
        if self._head is None:
            self._head = self._find_head(hidden)
        weights = self._head_weights()
        launch = head_argmax_plan(hidden, *weights) if weights else None
        return launch(hidden, *weights[:3], weights[-1]) if launch else None

    def finite_flag(self, hidden: mx.array, margin: mx.array | None = None, logits: mx.array | None = None) -> list[mx.array]:
        """What a caller reads with its other numbers, to hand to `check`: nothing after a pass of MLX's own, else one [1] int32,
        the bits of a float32.

        Args:
          hidden: of the last pass; margin: from `choices`, whose kernel ran then; logits: from `head`, normalised or not.
        """
        # Who switched kernels off meanwhile, in another thread say, did not undo this pass.
        if margin is None and not self.may_be_nonfinite:
            return []
        # One number that is finite if all are, and its bits for who reads integers: each operation costs the host's time.
        total = hidden.astype(mx.float32).sum()
        if margin is not None:
            total = total + margin.sum()
        if logits is not None and self._served:
            # What MLX's own head makes of sound states is the model's own; so is a logit of minus infinity.
            total = total + mx.logsumexp(logits, axis=-1).astype(mx.float32).sum()
        return [total[None].view(mx.int32)]

    @property
    def may_be_nonfinite(self) -> bool:
        """Whether the last pass was a compiled one (see `traced`), or a kernel of ours ran in it or in `head` since."""
        return self.was_compiled or self._served

    @property
    def _served(self) -> bool:
        return any(handler.served for _, handler, _ in self._kernel_calls or ())

    def check(self, flag: list[int], was_compiled: bool | None = None, head: bool = False) -> None:
        """Switch off what may be at fault, with one line in the log: its compiled passes if it was one, else all kernels.

        Args:
          flag: what `finite_flag` gave; was_compiled: `was_compiled` after that pass, where others came since;
            head: its states were known to be sound, so it is about `head`.
        Raises:
          NotFiniteError: where one of them says so. The pass is to be run again.
        """
        if any(bits & _NOT_FINITE == _NOT_FINITE for bits in flag):
            if (self.was_compiled if was_compiled is None else was_compiled) and not head:
                self.accelerator.refuse("a pass gave a value that is not finite")
            else:
                autotune.disable_all("a pass gave a value that is not finite")
            raise autotune.NotFiniteError

    def _find_head(self, hidden: mx.array) -> tuple[nn.Module, str, str] | tuple[()]:
        """The layer that is the whole head: given the hidden states as they are, and what it gives is what the model returns.

        Returns: its owner, its name there and the method, so that one put in its place later is found; () if there is none.
        """
        modules, seen = self._modules, []

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

    def _head_weights(self) -> tuple | None:
        """The head as `head_argmax` takes it: (w, scales, biases, group size, bits, soft-cap, bias)."""
        if not self._head:
            return None
        owner, name, _ = self._head
        head = owner[name]
        if type(head) in (nn.Linear, nn.Embedding):
            return (head["weight"], None, None, 64, 4, None, head.get("bias"))
        if type(head) in (nn.QuantizedLinear, nn.QuantizedEmbedding) and getattr(head, "mode", "affine") == "affine":
            return (head["weight"], head["scales"], head["biases"], head.group_size, head.bits, None, head.get("bias"))
        return None

    def head(self, hidden: mx.array) -> mx.array:
        """[B, L, H] final normed states to logits [B, L, V]: the model's own code after its layers, soft-cap included."""
        handlers = self._kernels(hidden.size // hidden.shape[-1])
        if self._head is None:
            self._head = self._find_head(hidden)
        if not self._head:
            return self._logits(hidden, handlers)
        owner, name, method = self._head
        layer, call = owner[name], getattr(owner[name], method)
        # By hand, because routing the hundreds of layers that kernels may serve takes as long as building a pass.
        handler = next((h for module, h, way in handlers if module is layer and way == method), None)
        return handler(call, (hidden,), {}) if handler else call(hidden)

    def _logits(self, hidden: mx.array, handlers: Sequence[tuple[nn.Module, Handler, str]]) -> mx.array:
        def skip(inner, args, kwargs):
            return hidden

        with intercept([*handlers, (self.backbone, skip)]):
            return _array(self.model(mx.zeros(hidden.shape[:2], dtype=mx.int32)))

    def matrix(self, hidden: mx.array) -> mx.array:
        """[B, L, H] to [B, L, V] by the bare matrix product of `head`: no scale, no soft-cap."""
        inside = {id(m) for _, m in self.backbone.named_modules()}
        found: list[nn.Module] = []

        def noting(module: nn.Module) -> Handler:
            return lambda inner, args, kwargs: found.append(module) or inner(*args, **kwargs)

        linears = [m for _, m in self.model.named_modules() if isinstance(m, (nn.Linear, nn.QuantizedLinear))]
        self._logits(hidden, [(m, noting(m), "__call__") for m in linears if id(m) not in inside])
        return found[-1](hidden) if found else self.embedding.as_linear(hidden)
