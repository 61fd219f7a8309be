"""Ends reasoning after a number of tokens: a logits processor of mlx-lm's kind."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass
class ThinkingBudget:
    """Allows only the closing mark once an answer has `budget` tokens and its reasoning is open.

    start: of the answer, the length of the prompt. marks: tokens that open and close reasoning. opened: by the prompt.
    """

    budget: int
    start: int
    marks: tuple[int, int]
    opened: bool

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Shapes: tokens [n], prompt and answer so far; logits [..., V]."""
        said = tokens[self.start :]
        if said.shape[0] < self.budget:
            return logits
        opening, closing = self.marks
        is_open = mx.logical_or(self.opened, mx.any(said == opening))
        due = mx.logical_and(is_open, mx.logical_not(mx.any(said == closing)))
        others = mx.arange(logits.shape[-1]) != closing
        return mx.where(mx.logical_and(due, others), mx.array(-mx.inf, logits.dtype), logits)
