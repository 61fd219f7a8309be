"""Feature rows that wait for the drafter: the target's features of tokens that are not in the drafter's cache yet."""

from __future__ import annotations

import mlx.core as mx


class FeatureRows:
    """Feature rows [1, S, F] in order. A plain pass adds one row at a time; they are joined when they are needed."""

    def __init__(self, features: mx.array | None = None):
        self._parts = [] if features is None else [features]
        self.nbytes, self._single = 0 if features is None else features.nbytes, 0

    def append(self, rows: mx.array) -> None:
        self._parts.append(rows)
        self.nbytes, self._single = self.nbytes + rows.nbytes, self._single + 1
        if self._single == 64:
            # Keeps the number of arrays small.
            self._parts[-64:], self._single = [mx.concatenate(self._parts[-64:], axis=1)], 0
            mx.async_eval(self._parts[-1])

    def drop(self) -> None:
        """Remove the last row."""
        last = self._parts.pop()[:, :-1]
        if last.shape[1]:
            self._parts.append(last)
        self._single = max(self._single - 1, 0)

    def joined(self, *more: mx.array) -> mx.array:
        """[1, S, F]"""
        parts = [*self._parts, *more]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
