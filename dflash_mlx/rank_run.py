"""A run on several ranks: the loop as it is, on what rank 0 has read.

Beside the corridor: a `Run` whose passes are read on rank 0, a draft whose ids are rank 0's, and a pair that measures by rank 0's
clock. What policies, caches and texts then do is the same on every rank, because they are given the same.
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


class _ToldDraft(Draft):
    """A draft that the host reads on rank 0."""

    ranks: Ranks

    def read(self) -> None:
        if self.ranks.leads:
            super().read()
        self.drafted_ids = self.ranks.told(self.drafted_ids, "a draft")


class RankProposer(DrafterProposer):
    """The drafter's blocks with rank 0's ids: another rank's own differ where its states do."""

    def propose(self, anchor: mx.array, n: int, width: int) -> Draft:
        own, ranks = super().propose(anchor, n, width), self.model.pair.ranks
        draft = _ToldDraft(ranks.first(own.row), own.confidence, own.source, own.width)
        draft.ranks = ranks
        mx.async_eval(draft.row)
        return draft


class RankRun(Run):
    """One generation of several ranks."""

    proposer_class = RankProposer

    def __init__(self, options: Any, pair: RankPair, *rest: Any):
        super().__init__(options, pair, *rest)
        self.ranks = pair.ranks
        if self.target_sampler.processors:
            self.target_sampler._match_rows = functools.partial(_match_rows, self.target_sampler)

    def _enqueue(self, anchor: mx.array, draft: Draft, lookahead: bool) -> PendingPass:
        output = super()._enqueue(anchor, draft, lookahead)
        if (token := output.token) is not None:
            # What the next pass begins with, before anybody has read it.
            output.token = lambda: self.ranks.first(token())
        return output

    def read(self, output: PendingPass) -> Kept:
        """What rank 0 has read, and how long its round took: the message of a round."""
        try:
            result = super().read(output).result
        except NotFiniteError:
            result = None
        told = self.ranks.told(None if result is None else [output.seconds, *_fields(result)], "a round")
        if told is None:
            if result is not None:
                autotune.disable_all("a pass gave a value that is not finite on rank 0")
            raise NotFiniteError
        output.seconds, *fields = told
        # Where a kernel was at fault on this rank alone nobody looks at its rows.
        rows = result.row_logprobs if result is not None else lambda i: mx.zeros((self.target.vocabulary,))
        return Kept(output, _result(fields, rows))


def _fields(result: RoundResult) -> list[Any]:
    """What of a result is told; rows of log-probabilities stay where they are."""
    return [result.drafted, result.accepted, result.bonus, result.confidence]


def _result(fields: list[Any], rows: Callable[[int], mx.array]) -> RoundResult:
    drafted, accepted, bonus, confidence = fields
    return RoundResult(drafted, accepted, bonus, rows, confidence)


class _Headed:
    """A target to a sampler that is given logits for hidden states."""

    def __init__(self, target: Target):
        self._target = target
        self.check = target.check

    def head(self, logits: mx.array) -> mx.array:
        return logits

    def finite_flag(self, *_: Any, **__: Any) -> list[mx.array]:
        return []


def _match_rows(sampler: Any, target: Target, hidden: mx.array, *rest: Any) -> RoundResult:
    """With processors: one head for all rows, since a head that is shared out runs on all ranks or none."""
    return type(sampler)._match_rows(sampler, _Headed(target), target.head(hidden), *rest)


def refuse_forced_kernels() -> None:
    """All ranks run the kernels that rank 0's trials found right and faster, or none.

    Raises:
      KernelError: DFLASH_MLX_KERNELS asks for kernels whatever trials find.
    """
    if autotune.setting() not in ("auto", "off"):
        raise KernelError(
            f"{autotune.VARIABLE} is {switch(autotune.VARIABLE)}, and over several machines rank 0's trials choose the kernels",
            "Unset the variable, or set it to off, on all machines",
        )


class RankPair(DFlashPair):
    """A pair whose target is shared out among ranks. Its passes are measured by rank 0's clock."""

    run_class = RankRun

    def __init__(self, model: Any, drafter: Drafter, ranks: Ranks):
        super().__init__(model, drafter)
        self.ranks = ranks
        # Set once, as by `DFlashPair.of`.
        object.__setattr__(drafter, "pair", self)

    def clock(self) -> float:
        return self.ranks.clock()

    def told(self, value: Any, what: str) -> Any:
        return self.ranks.told(value, what)

    def first(self, ids: mx.array) -> mx.array:
        return self.ranks.first(ids)

    def told_result(self, result: RoundResult) -> RoundResult:
        return _result(self.ranks.told(_fields(result), "a row"), result.row_logprobs)

    def prepare_target(self) -> Target:
        """The target for one run. No pass is put together once: a collective operation has no place in one that is replayed."""
        with self._lock:
            self._renew()
            if self._tried is not self.target:
                refuse_forced_kernels()
                try_before_answers(self.target, drafter=self.drafter)
                autotune.share_results(self.ranks.told)
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
        ends = lambda: self.ranks.told(stop() or time.monotonic() > until, "whether to stop")  # noqa: E731
        if self.measures_later:
            self.history.take(lambda: self._measurement.finish(ends))


_COSTS = ("plain_s", "draft_s", "inject_s", "verify_s", "cut_s")


class RankMeasurement(Measurement):
    """Costs that rank 0 measured or kept."""

    def __init__(self, target: Target, drafter: Drafter, ranks: Ranks):
        super().__init__(target, drafter, ranks.clock)
        known = ranks.told(None if self.costs is None else [getattr(self.costs, name) for name in _COSTS], "costs")
        self.costs = None if known is None else CostModel(*known[:3], {int(width): s for width, s in known[3].items()}, known[4])
