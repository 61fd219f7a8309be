"""A target's compiled passes over blocks and single rows.

The states of a recurrent layer go in and come out as they are. Rows without meaning would change them, so blocks of such a model
are traced at their own widths. The pass also returns the inputs of each recurrence and convolution. From these, one more trace
computes the states after the first n rows (`Form`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from ..models.recurrent import Form, recorded
from ..models.target import Target, TargetOutput
from ..rollback import RollbackPoint
from .buffers import Pass, states_of
from .compiled import ROWS, CompiledPass, TraceError
from .fusion import Call

# How many traces that compute the states after the first n rows of a pass are kept, one for each n.
_STATES_KEPT = 64


@dataclass
class _States:
    """For a target with recurrent layers. modules: those that change a state, as the caller's target has found them; forms: how
    to compute the states after the first rows from a pass's output."""

    modules: list[nn.Module] | None = None
    forms: list[Form] = field(default_factory=list)


class CompiledVerify(CompiledPass):
    """A target's passes over blocks and single rows: `Accelerator.verify`.

    alone: whether single rows are compiled before any block was.
    """

    alone = False

    def __init__(self, target: Target, parts: list[Any], always: bool):
        # From a copy of the target: the target holds this object.
        clone, name = target.clone().clone, target.family
        known = self._states_known = _States()
        # (rows of a pass, rows kept) -> the function that computes the states after the kept ones.
        self._first: dict[tuple[int, int], Callable[[list[mx.array]], list[list[mx.array]]]] = {}

        def passes(fused: list[Call]) -> Pass:
            # Not the caller's target: notes that its handlers take during a trace must not reach its own passes.
            target = clone()
            target.fused = fused

            def run(arrays: Sequence[mx.array], entries: Sequence[Any], _: int | mx.array) -> tuple[mx.array, ...]:
                target.states.found = known.modules
                point = RollbackPoint(0, []) if states_of(entries) and arrays[0].shape[1] > 1 else None
                output = target(*arrays, entries, point, kernels=True)
                kept = recorded(entries, point) if point else []
                if kept is None:
                    raise TraceError(f"{name} has recurrent layers that are no gated delta rule")
                known.forms = [of.form for of in kept] or known.forms
                return output.hidden, output.features, *(a for of in kept for a in of.given)

            return run

        super().__init__(name, passes([]), passes, target.model, parts, always)

    def _forget(self) -> None:
        super()._forget()
        self._first = {}

    def verify(self, target: Target, ids: mx.array, cache: Sequence[Any], point: RollbackPoint) -> TargetOutput | None:
        """The pass `target(ids, cache, point, kernels=True)`, compiled; None: run that instead.

        Shapes:
          - ids: [1, w] int32; the output is as of `Target.__call__`, `compiled` and without logits
        """
        w, states = ids.shape[1], states_of(cache)
        self._states_known.modules = target.states.found
        if w == 1 and not (self.alone or self._right[0]) or states and target.states.found is None:
            # The first token does not wait for a trial, nor does a run that never drafts.
            return None
        # A token that the device chose has another type, which would need another trace.
        ids, more = ids.astype(mx.int32), 0 if states else -w % ROWS
        if target.positions is not None and cache[0].offset + w + more > target.positions:
            more = 0
        filled = mx.concatenate([ids, *([ids[:, -1:]] * more)], axis=1) if more else ids
        if (out := self.run([ids], [filled], cache, 0, 0, w + more, w)) is None:
            return None
        hidden, features, *given = out
        if given:
            self._record(point, states, w, given)
        point.ended(w)
        hidden, features = (array[:, :w] for array in (hidden, features)) if more else (hidden, features)
        return TargetOutput(hidden, features, compiled=True)

    def _record(self, point: RollbackPoint, states: Sequence[ArraysCache], rows: int, given: list[mx.array]) -> None:
        """Store in `point` how to compute the states after the first n rows of a pass, in one call for all layers."""
        found: dict[int, list[list[mx.array]]] = {}

        def replay(n: int, i: int, entry: ArraysCache) -> None:
            if n not in found:
                found[n] = self._states(rows, n)(given)
            entry.cache = list(found[n][i])

        for i, entry in enumerate(states):
            point.replays[id(entry)] = [functools.partial(replay, i=i, entry=entry)]

    def _states(self, rows: int, n: int) -> Callable[[list[mx.array]], list[list[mx.array]]]:
        """A function from the output of a pass of `rows` rows to each entry's arrays after the first n rows."""
        if (run := self._first.get((rows, n))) is None:
            forms = self._states_known.forms

            def states(given: list[mx.array]) -> list[list[mx.array]]:
                left = iter(given)
                return [form.states(n, [*itertools.islice(left, form.takes)]) for form in forms]

            run = self._first[rows, n] = mx.compile(states)
            while len(self._first) > _STATES_KEPT:
                del self._first[next(iter(self._first))]
        return run


class ExactVerify(CompiledVerify):
    """The passes of a target in an exact run: each layer takes its exact route, and a trace is used only if no value differs from
    the ordinary pass. So it does not matter which of the two runs. A run without a drafter only has blocks of one row.
    """

    joins, alone, roundings = False, True, {}

    def verify(self, target: Target, ids: mx.array, cache: Sequence[Any], point: RollbackPoint) -> TargetOutput | None:
        # A trial does not compare the states after only some of a pass's rows.
        return None if states_of(cache) else super().verify(target, ids, cache, point)
