"""The modules of a target that change a recurrent or convolution state: which they are, and running them again.

Their inputs are remembered for the length of a block, so that any number of the block's rows can be run through them again.
Knows calls of modules and cache entries; knows no family by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList

from ..errors import CacheError
from ..rollback import RollbackPoint, leaves
from .intercept import Handler, intercept


class StatefulModules:
    """The smallest modules of a model outside of which no `ArraysCache` changes; found in the first pass that has one."""

    def __init__(self, model: nn.Module, family: str):
        self.model, self.family = model, family
        self._found: list[nn.Module] | None = None

    def during(self, cache: Sequence[Any] | None, point: RollbackPoint | None, rows: int) -> AbstractContextManager:
        """Round one pass of `rows` rows: the first one finds the modules, those with a rollback point record their inputs."""
        if not any(type(entry) is ArraysCache for entry in leaves(cache or ())):
            return nullcontext()
        if self._found is None:
            return self._find_stateful(cache)
        if point is None:
            return nullcontext()
        return intercept([(module, _recorder(module, point, rows)) for module in self._found])

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
                f"a recurrent state of {self.family} changes outside of any module that is handed it: it cannot be rolled back",
                "Run this target without a drafter (draft_model=None)",
            )
        found = {id(m): m for calls in open_calls.values() for m in calls[0][2]}
        self._found = list(found.values())


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
