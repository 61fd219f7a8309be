"""What a training run will cost, from the rates of its own first steps. Knows numbers and words; nothing of drafters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """step_s: seconds a step; conversations: of a step, of `total` ones with answer_tokens in all; memory: bytes so far."""

    step_s: float
    conversations: int
    total: int
    answer_tokens: int
    memory: int

    def line(self, steps: int | None, seconds: float | None) -> str:
        """One sentence about what a run will take. It has a number of steps left, or of seconds."""
        n = steps if steps is not None else round(seconds / self.step_s)
        seen = n * self.conversations
        tokens = seen * self.answer_tokens / max(self.total, 1)
        minutes = n * self.step_s / 60
        many = f"{tokens / 1e6:,.1f} million" if tokens >= 1e6 else f"{tokens:,.0f}"
        return (
            f"At {self.step_s * 1e3:.0f} ms a step and {self.memory / 1e9:.1f} GB: {minutes:,.1f} minutes for what is left: "
            f"{n:,} steps, {seen:,} conversations with {many} answer tokens, each conversation seen "
            f"{seen / max(self.total, 1):.1f} times."
        )
