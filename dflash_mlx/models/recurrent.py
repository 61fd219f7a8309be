"""Finds the modules of a target that change a recurrent or convolution state, and runs a pass's first rows through them again.

A rollback needs the state after any number of a pass's rows, so what these modules were given is kept until the next pass. Of a
gated delta rule it is the inputs of the recurrence, whose first rows are one launch (`kernels.gated_delta`), and of its
convolutions, whose states are pieces of their inputs. Any other module keeps the outputs of its linear layers, and the rest runs
again.
Knows calls of modules and cache entries; knows no family by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList

from ..errors import CacheError
from ..kernels.gated_delta import Launch
from ..kernels.layer_routes import LayerRoutes
from ..kernels.routing import Recurred, Recurrence
from ..rollback import RollbackPoint, leaves
from .intercept import Handler, intercept


class StatefulModules:
    """The modules of a model that change an `ArraysCache`, as few and small as possible; found in the first pass that has one."""

    def __init__(self, model: nn.Module, family: str, routes: LayerRoutes):
        self.model, self.family, self._routes = model, family, routes
        # None before that pass.
        self.found: list[nn.Module] | None = None
        # id(module) -> its convolutions, of those with a gated delta rule.
        self._convolutions: dict[int, list[nn.Module]] = {}

    def during(
        self, cache: Sequence[Any] | None, point: RollbackPoint | None, rows: int, kernels: bool
    ) -> AbstractContextManager:
        """To be entered for one pass of `rows` rows. The first pass finds the modules; one with a rollback point keeps inputs.

        kernels: whether a kernel may serve a recurrence.
        """
        if not any(type(entry) is ArraysCache for entry in leaves(cache or ())):
            return nullcontext()
        if self.found is None:
            return self._find_stateful(cache)
        if point is None:
            return nullcontext()
        handlers: list[tuple[nn.Module, Handler]] = []
        for module in self.found:
            if route := self._routes.recurrences.get(id(module)):
                if (convolutions := self._convolutions.get(id(module))) is None:
                    convolutions = [m for _, m in module.named_modules() if isinstance(m, nn.Conv1d)]
                    self._convolutions[id(module)] = convolutions
                handlers += _recurrence_recorder(route, convolutions, point, rows, kernels)
            else:
                handlers.append((module, _recorder(module, point, rows)))
        return intercept(handlers)

    @contextmanager
    def _find_stateful(self, cache: Sequence[Any]) -> Iterator[None]:
        """Watch one pass for the modules that change an `ArraysCache`.

        Calls are nested. A call is charged with a change that happened in it, but in none of the calls inside it.

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
                f"a recurrent state of {self.family} changes outside of any module that is handed it: it cannot be rolled back",
                "Run this target without a drafter (draft_model=None)",
            )
        found = {id(m): m for calls in open_calls.values() for m in calls[0][2]}
        self.found = list(found.values())


def _given(args: tuple, kwargs: dict) -> list[Any]:
    """The cache entries among a call's arguments; a list of a whole model's entries does not count."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, (ArraysCache, CacheList))]


def _recurrence_recorder(
    route: Recurrence, convolutions: list[nn.Module], point: RollbackPoint, rows: int, kernels: bool
) -> list[tuple[nn.Module, Handler]]:
    """Stores in `point` how to compute a gated delta rule's states after the first n rows of its call.

        convolution's input    s0 s1 s2 | x0 x1 x2 x3     its state after n rows: the three before x[n]
        recurrence's input     q k v g beta, a row each   its first n rows, once more

    Returns: handlers of the module and of its convolutions.
    """
    inputs: list[mx.array] = []

    def convolution(inner, args, kwargs):
        inputs.append(args[0])
        return inner(*args, **kwargs)

    def handler(inner, args, kwargs):
        inputs.clear()
        out, calls = route.recorded(args, kwargs, kernels)
        for entry in _given(args, kwargs):

            def again(n: int) -> None:
                cut = {key: _first_rows(a, rows, n) for key, a in kwargs.items()}
                route.recorded(tuple(_first_rows(a, rows, n) for a in args), cut, kernels)

            replay = _recorded(entry, list(inputs), calls, rows)
            point.replays.setdefault(id(entry), []).append(replay or again)
        return out

    return [(route.module, handler), *((m, convolution) for m in convolutions)]


class Form(NamedTuple):
    """How to compute an entry's arrays after the first n rows of a pass from the pass's input; the same for passes of any
    number of rows.

    size: how many arrays; kept: (index, number of rows) of each array that is a convolution's state; the other one is the
    recurrence's. steps, plan: as in `Recurred`.
    """

    size: int
    kept: tuple[tuple[int, int], ...]
    steps: Launch
    plan: Callable[..., Launch | None]

    @property
    def takes(self) -> int:
        """How many arrays `states` is given: convolutions' inputs, and q, k, v, g, beta and state."""
        return len(self.kept) + 6

    def states(self, n: int, given: Sequence[mx.array]) -> list[mx.array]:
        """The entry's arrays after n rows. given: as in `Recorded`."""
        inputs, recurred = given[: len(self.kept)], tuple(given[len(self.kept) :])
        found = [Recurred(recurred, self.steps, self.plan).first(n)] * self.size
        for (i, more), array in zip(self.kept, inputs, strict=True):
            found[i] = array[:, n : n + more]
        return found


@dataclass
class Recorded:
    """The input of a pass that changed an entry. Called with n, it puts the entry into its state after the first n rows.

    given: the inputs of its convolutions, [B, kept + rows, C] each, then the recurrence's, as `Recurred`.
    """

    entry: ArraysCache
    form: Form
    given: list[mx.array]

    def __call__(self, n: int) -> None:
        self.entry.cache = self.form.states(n, self.given)


def recorded(entries: Sequence[Any], point: RollbackPoint) -> list[Recorded] | None:
    """The result of the pass after `point` for each `ArraysCache`, in order; None if it is unknown for one of them."""
    found = [point.replays.get(id(entry), []) for entry in entries if type(entry) is ArraysCache]
    known = all(len(replays) == 1 and isinstance(replays[0], Recorded) for replays in found)
    return [replays[0] for replays in found] if known else None


def _recorded(entry: Any, inputs: list[mx.array], calls: list[Recurred], rows: int) -> Recorded | None:
    """The call of `rows` rows that left an entry as it is; None if it was not one recurrence with its convolutions, each of which
    has the last rows of its input as its state.
    """
    if type(entry) is not ArraysCache or entry.lengths is not None or entry.left_padding is not None or len(calls) != 1:
        return None
    call, others = calls[0], [i for i, a in enumerate(entry.cache) if a is not calls[0].state]
    if len(others) != len(entry.cache) - 1 or len(others) != len(inputs):
        return None
    kept = tuple((i, entry.cache[i].shape[1]) for i in others)
    for (i, n), given in zip(kept, inputs, strict=True):
        B, _, *rest = entry.cache[i].shape
        if given.shape != (B, n + rows, *rest):
            return None
    return Recorded(entry, Form(len(entry.cache), kept, call.steps, call.plan), [*inputs, *call.given])


def _recorder(module: nn.Module, point: RollbackPoint, rows: int) -> Handler:
    """Stores in `point` how to run the first n rows of this call again, for the state that it leaves in its cache entry.

    Linear layers inside work row by row, so their outputs are kept and cut instead of computed again; what is left to do is
    the convolution and the recurrence. What the call returns is not used, so MLX, which is lazy, does not compute it.
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
