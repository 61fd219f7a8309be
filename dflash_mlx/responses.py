"""The response for each token of a run: text, counts and rates, as in mlx-lm's stream_generate.

Knows runs by their options, caches and counts. Knows no rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.generate import GenerationResponse as MlxLmResponse

from .loop import Run, Step
from .stats import GenerationStats
from .text import TextStream


@dataclass
class GenerationResponse(MlxLmResponse):
    """mlx-lm's response for one token, plus `stats`: the run's `GenerationStats` so far, None without a DFlash drafter."""

    stats: GenerationStats | None = None


class Responder:
    """Makes the response for each step of a run. prompt: the ids that the run reads."""

    def __init__(self, run: Run, prompt: Sequence[int]):
        self.run, self.prompt_tokens, self.prompt_tps, self.n = run, len(prompt), 0.0, 0
        self._text = run.options.text_stream or TextStream(run.options.tokenizer, [*run.cache.ids, *prompt])
        self._began = time.perf_counter()

    def respond(self, step: Step, at_end: Callable[[], None] = lambda: None) -> GenerationResponse:
        """The response for one token. at_end: called before the last response is returned."""
        (token, row, from_draft), options, stats = step, self.run.options, self.run.stats
        self.n += 1
        if self.n == 1:
            self.prompt_tps = self.prompt_tokens / (time.perf_counter() - self._began)
            self._began = time.perf_counter()
        if options.logprobs:
            mx.eval(row)
        stop = token in options.tokenizer.eos_token_ids
        last = stop or self.n == options.max_tokens
        piece = "" if stop else self._text.feed(token)
        if last:
            piece += self._text.finish()
            at_end()
        elapsed, spent = time.perf_counter() - self._began, stats.seconds
        spent["host"] = max(elapsed - spent["draft"] - spent["verify"] - spent["rollback"], 0.0)
        return GenerationResponse(
            text=piece,
            token=token,
            logprobs=row,
            from_draft=from_draft,
            prompt_tokens=self.prompt_tokens,
            prompt_tps=self.prompt_tps,
            generation_tokens=self.n,
            generation_tps=self.n / elapsed if elapsed else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=("stop" if stop else "length") if last else None,
            stats=stats,
        )
