"""Does a row of a target's pass have the same bits alone as among others? Whole passes are compared, and the operation is named.

    alone     a pass a row                              hidden states, log-probabilities
    among     one pass over 2, 4, 8, 16 rows, and       the same rows; then the first of them are kept, the others rolled back,
              one row after those that are kept         and the next row is a pass alone

Where they differ both ways run once more and every module's call is noted: the first one that was given the same and returned
something else is the operation. Knows targets and their passes; knows no kernel and no family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from .models.target import Target
from .rollback import leaves, rollback, rollback_point
from .verify import logprobs, verify_block

ROWS = (2, 4, 8, 16)
# Rows of the text that stand before those that are compared: two passes.
CONTEXT = 24
_CHUNK = 16
# The target's own parts that are no module's call.
_HEAD, _NORMALISED = "the head", "the log-probabilities (log-sum-exp)"


@dataclass(frozen=True)
class Difference:
    """The first operation whose row is another one among `rows` rows than alone.

    by: the largest difference of two values there. rolled_back: it is in a row after a rollback.
    """

    operation: str
    rows: int
    by: float
    rolled_back: bool = False

    def __str__(self) -> str:
        where = f" behind a rollback of {self.rows} rows" if self.rolled_back else ""
        among = "" if self.rolled_back else f" among {self.rows} rows"
        return f"{self.operation}: a row{among}{where} differs from the row alone by {self.by:.2g}"


def first_difference(
    target: Target, rows: Sequence[int] = ROWS, context: int = CONTEXT, progress: Callable[[int], None] = lambda rows: None
) -> Difference | None:
    """Compare passes over `rows` rows after `context` others with passes of one row. None: bit for bit the same.

    progress: called with each number of rows.
    """
    ids = [int(i) for i in (mx.arange(context + max(rows) + 1) * 7919 + 5) % target.vocabulary]
    text = _Text(target, ids, context)
    alone = [text.run(n, 1) for n in range(max(rows) + 1)]
    for count in rows:
        progress(count)
        text.begin()
        for name, values in text.run(0, count).items():
            for i in range(count):
                if by := _apart(values[:, i : i + 1], alone[i][name]):
                    return Difference(_named(target, ids, context, count) or name, count, by)
        kept = (count + 1) // 2
        text.keep(kept)
        for name, values in text.run(kept, 1).items():
            if by := _apart(values, alone[kept][name]):
                return Difference(_state(text, count, kept) or name, count - kept, by, True)
    return None


def _state(text: _Text, rows: int, kept: int) -> str | None:
    """The first state that differs between the first `kept` rows of a longer pass and a pass over these rows alone."""

    def states() -> list[tuple[str, list[mx.array]]]:
        every = [(i, type(entry).__name__, entry) for i, layer in enumerate(text.cache) for entry in leaves([layer])]
        return [
            (f"layer {i}'s {kind}, its state", [a for _, a in tree_flatten(entry.state) if isinstance(a, mx.array)])
            for i, kind, entry in every
        ]

    text.begin()
    for i in range(kept):
        text.run(i, 1)
    alone = states()
    text.begin()
    text.run(0, rows)
    text.keep(kept)
    for (name, arrays), (_, others) in zip(states(), alone, strict=True):
        if any(_apart(a, b) for a, b in zip(arrays, others, strict=True)):
            return name
    return None


class _Text:
    """A text whose first rows are in a cache; the others are run a few at a time."""

    def __init__(self, target: Target, ids: list[int], context: int):
        self.target, self.ids, self.context = target, ids, context
        self.begin()

    def begin(self) -> None:
        self.cache = make_prompt_cache(self.target.model)
        for at in range(0, self.context, _CHUNK):
            self.target(mx.array([self.ids[at : min(at + _CHUNK, self.context)]]), self.cache, kernels=True)
            mx.eval([entry.state for entry in self.cache])
        self.point = rollback_point(self.cache, self.context)

    def run(self, first: int, rows: int) -> dict[str, mx.array]:
        """A pass over rows from `first` after the context: its hidden states and log-probabilities, [1, rows, ...]."""
        block = mx.array([self.ids[self.context + first :][:rows]], dtype=mx.int32)
        self.point = rollback_point(self.cache, self.context + first)
        output = verify_block(self.target, block[:, 0], block[:, 1:], self.cache, self.point)
        logits = self.target.head(output.hidden) if output.logits is None else output.logits
        parts = {"the layers": output.hidden, _HEAD: logits, _NORMALISED: logprobs(self.target, output.hidden, logits)}
        mx.eval(parts, [entry.state for entry in self.cache])
        return parts

    def keep(self, rows: int) -> None:
        """Keep the first rows of the last pass."""
        rollback(self.cache, self.point, self.context + rows)
        self.point.ended(rows)


def _apart(a: mx.array, b: mx.array) -> float:
    """The largest difference of two arrays that should be the same bits; 0: they are."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if mx.array_equal(a, b, equal_nan=True).item():
        return 0.0
    if not mx.issubdtype(a.dtype, mx.floating):
        return 1.0
    apart = mx.abs(a.astype(mx.float32) - b.astype(mx.float32))
    return mx.max(mx.where(mx.isnan(apart), mx.array(float("inf")), apart)).item() or float("inf")


# ---- which operation


@dataclass(frozen=True)
class _Call:
    """path: of the module; given, gave: the arrays among its arguments and in what it returned."""

    path: str
    given: list[mx.array]
    gave: list[mx.array]


def _named(target: Target, ids: list[int], context: int, rows: int) -> str | None:
    """The innermost module whose call was given the same among `rows` rows as alone, and returned something else."""
    noted: list[_Call] = []

    def note(path: str) -> Callable[..., Any]:
        def handler(inner, args, kwargs):
            given = _arrays((args, kwargs))
            out = inner(*args, **kwargs)
            noted.append(_Call(path, given, _arrays(out)))
            return out

        return handler

    watched = target.clone()
    # Outermost: a route need not call what it stands for.
    watched.fused = [(m, note(path)) for path, m in target.modules.items() if path and callable(m)]
    text = _Text(watched, ids, context)
    alone: list[list[_Call]] = []
    for i in range(rows):
        noted.clear()
        text.run(i, 1)
        alone.append(list(noted))
    text.begin()
    noted.clear()
    text.run(0, rows)
    modules = target.modules
    seen: dict[str, int] = {}
    of_row = [{} for _ in alone]
    for calls, found in zip(alone, of_row, strict=True):
        for call in calls:
            found.setdefault(call.path, []).append(call)
    for call in list(noted):
        n = seen[call.path] = seen.get(call.path, -1) + 1
        single = [found.get(call.path, [])[n : n + 1] for found in of_row]
        if not all(single):
            continue
        pairs = [(row, other[0]) for row, other in enumerate(single)]
        same_in = all(_row_equal(call.given, other.given, row, rows) for row, other in pairs)
        if same_in and not all(_row_equal(call.gave, other.gave, row, rows) for row, other in pairs):
            return _described(call.path, modules[call.path])
    return None


def _described(path: str, module: Any) -> str:
    kind = type(module).__name__
    return f"{path} ({kind}{', its own operations' if module.children() else ''})"


def _arrays(value: Any) -> list[mx.array]:
    """The arrays in a call's arguments or value; caches are none."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, dict):
        value = [*value.values()]
    return [a for part in value for a in _arrays(part)] if isinstance(value, (list, tuple)) else []


def _row_equal(among: list[mx.array], alone: list[mx.array], row: int, rows: int) -> bool:
    """Whether arrays of a call are the row's own wherever they tell rows apart. Masks and sorted pairs do not."""
    for a, b in zip(among, alone, strict=False):
        axes = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=False)) if m != n]
        if a.ndim == b.ndim and len(axes) == 1 and (a.shape[axes[0]], b.shape[axes[0]]) == (rows, 1):
            if _apart(mx.take(a, mx.array([row]), axis=axes[0]), b):
                return False
        elif a.shape == b.shape and _apart(a, b):
            return False
    return True
