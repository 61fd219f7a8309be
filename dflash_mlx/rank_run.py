"""A run on several ranks: the ordinary loop, with the values that rank 0 reads.

It subclasses the corridor's objects: a `Run` whose passes are read on rank 0, a draft with rank 0's ids, and a pair that measures
with rank 0's clock. Policies, caches and texts get the same inputs on every rank, so they do the same.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .draft_length.cost_model import CostModel
from .draft_length.measure import Measurement
from .first_use import try_before_answers
from .kernels import autotune
from .kernels.autotune import KernelError, NotFiniteError
from .loop import Kept, PendingPass, Run
from .machine import switch
from .models.drafter import Drafter
from .models.target import Target
from .pair import AFTER_S, DFlashPair
from .proposers import Draft, DrafterProposer
from .ranks import Ranks
from .target_sampler import RoundResult


class _BroadcastDraft(Draft):
    """A draft that rank 0 reads and broadcasts."""

    ranks: Ranks

    def read(self) -> None:
        if self.ranks.leads:
            super().read()
        self.host_values = self.ranks.broadcast(self.host_values, "a draft")


class RankProposer(DrafterProposer):
    """Drafts with rank 0's ids. Another rank would draft other tokens if its states round differently."""

    def propose(self, anchor: mx.array, n: int, width: int) -> Draft:
        own, ranks = super().propose(anchor, n, width), self.model.pair.ranks
        draft = _BroadcastDraft(ranks.broadcast_array(own.row), own.confidence, own.source, own.width)
        draft.ranks = ranks
        mx.async_eval(draft.row)
        return draft


class RankRun(Run):
    """One generation on several ranks."""

    proposer_class = RankProposer

    def __init__(self, options: Any, pair: RankPair, *rest: Any):
        super().__init__(options, pair, *rest)
        self.ranks = pair.ranks
        if self.target_sampler.processors:
            self.target_sampler._match_rows = functools.partial(_match_rows, self.target_sampler)

    def _enqueue(self, anchor: mx.array, draft: Draft, lookahead: bool) -> PendingPass:
        output = super()._enqueue(anchor, draft, lookahead)
        if (token := output.token) is not None:
            # The next pass starts from this token before the host reads it.
            output.token = lambda: self.ranks.broadcast_array(token())
        return output

    def read(self, output: PendingPass) -> Kept:
        """Rank 0 reads the pass and broadcasts the result with its seconds: one message per round."""
        try:
            result = super().read(output).result
        except NotFiniteError:
            result = None
        message = self.ranks.broadcast(None if result is None else [output.seconds, *_fields(result)], "a round")
        if message is None:
            if result is not None:
                autotune.disable_all("a pass gave a value that is not finite on rank 0")
            raise NotFiniteError
        output.seconds, *fields = message
        # If a kernel failed on this rank alone, its log-probabilities are lost; rank 0 has its own.
        rows = result.row_logprobs if result is not None else lambda i: mx.zeros((self.target.vocabulary,))
        return Kept(output, _result(fields, rows))


def _fields(result: RoundResult) -> list[Any]:
    """The parts of a result that are broadcast. Log-probabilities stay on each rank."""
    return [result.drafted, result.accepted, result.bonus, result.confidence]


def _result(fields: list[Any], rows: Callable[[int], mx.array]) -> RoundResult:
    drafted, accepted, bonus, confidence = fields
    return RoundResult(drafted, accepted, bonus, rows, confidence)


class _Headed:
    """Stands for the target in a sampler that gets logits in place of hidden states."""

    def __init__(self, target: Target):
        self._target = target
        self.check = target.check

    def head(self, logits: mx.array) -> mx.array:
        return logits

    def finite_flag(self, *_: Any, **__: Any) -> list[mx.array]:
        return []


def _match_rows(sampler: Any, target: Target, hidden: mx.array, *rest: Any) -> RoundResult:
    """With processors: run the head once for all rows. Ranks may share it, so each must run it equally often."""
    return type(sampler)._match_rows(sampler, _Headed(target), target.head(hidden), *rest)


def refuse_forced_kernels() -> None:
    """Refuse DFLASH_MLX_KERNELS=on or names: all ranks run the kernels that rank 0's trials chose, or none.

    Raises:
      KernelError: the variable forces kernels.
    """
    if autotune.setting() not in ("auto", "off"):
        raise KernelError(
            f"{autotune.VARIABLE} is {switch(autotune.VARIABLE)}, and over several machines rank 0's trials choose the kernels",
            "Unset the variable, or set it to off, on all machines",
        )


class RankPair(DFlashPair):
    """A pair whose target is split among ranks. Its passes are timed with rank 0's clock."""

    run_class = RankRun

    def __init__(self, model: Any, drafter: Drafter, ranks: Ranks):
        super().__init__(model, drafter)
        self.ranks = ranks
        # Neither a parameter nor a submodule, as in `DFlashPair.of`.
        object.__setattr__(drafter, "pair", self)

    def clock(self) -> float:
        return self.ranks.clock()

    def broadcast(self, value: Any, what: str) -> Any:
        return self.ranks.broadcast(value, what)

    def broadcast_array(self, ids: mx.array) -> mx.array:
        return self.ranks.broadcast_array(ids)

    def broadcast_result(self, result: RoundResult) -> RoundResult:
        return _result(self.ranks.broadcast(_fields(result), "a row"), result.row_logprobs)

    def prepare_target(self) -> Target:
        """The target for one run. It gets no accelerator: compiled passes cannot contain the ranks' collective operations."""
        with self._lock:
            self._renew()
            if self._tried is not self.target:
                refuse_forced_kernels()
                try_before_answers(self.target, drafter=self.drafter)
                autotune.share_results(self.ranks.broadcast)
                self._tried = self.target
            return self.target

    def _measuring(self) -> Measurement:
        if self._measurement is None or self._measurement.target is not self.target:
            self._measurement = RankMeasurement(self.target, self.drafter, self.ranks)
        return self._measurement

    def after_answer(self) -> None:
        self.finish_measuring(limit_s=AFTER_S)

    def finish_measuring(self, stop: Callable[[], bool] = lambda: False, limit_s: float = float("inf")) -> None:
        until = time.monotonic() + limit_s
        ends = lambda: self.ranks.broadcast(stop() or time.monotonic() > until, "whether to stop")  # noqa: E731
        if self.measures_later:
            self.history.take(lambda: self._measurement.finish(ends))


_COSTS = ("plain_s", "draft_s", "inject_s", "verify_s", "cut_s")


class RankMeasurement(Measurement):
    """Costs of passes, as rank 0 measured or stored them."""

    def __init__(self, target: Target, drafter: Drafter, ranks: Ranks):
        super().__init__(target, drafter, ranks.clock)
        known = ranks.broadcast(None if self.costs is None else [getattr(self.costs, name) for name in _COSTS], "costs")
        self.costs = None if known is None else CostModel(*known[:3], {int(width): s for width, s in known[3].items()}, known[4])
