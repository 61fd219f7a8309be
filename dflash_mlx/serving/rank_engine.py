"""The engine of a server on several machines: rank 0 has the clients and tells the others which request comes, and which is over.

Every rank runs the engine's loop. The others have no address: nobody asks them, and what they generate goes nowhere.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..constraint import Grammar
from ..ranks import Ranks
from ..sampling import SamplingSettings
from .engine import Engine, Generation, Job, Options
from .thinking_budget import ThinkingBudget


@dataclass
class FollowedGeneration:
    """A generation whose client is rank 0's."""

    job: Job
    cached: int = 0
    done: int = 0
    cancelled: bool = False

    def put(self, event: object) -> None:
        """Nobody waits for it here."""


class RankEngine(Engine):
    """An `Engine` whose thread does the same on every rank."""

    def __init__(self, options: Options, open_pair: Callable[[], tuple], ranks: Ranks):
        super().__init__(options, open_pair)
        self._ranks = ranks
        # The request that waits first and was told already.
        self._told_first: Any = None

    def _read(self, value: bool) -> bool:
        return self._ranks.told(value, "whether to end")

    def _next_job(self) -> Any:
        found = None
        if self._ranks.leads:
            with suppress(queue.Empty):
                found = super()._next_job()
        if (found := self._followed(found)) is None:
            raise queue.Empty
        return found

    def _first_waiting(self) -> Any:
        found = super()._first_waiting() if self._ranks.leads else None
        is_new = self._ranks.told(found is not self._told_first, "whether another request waits")
        if is_new:
            self._told_first = self._followed(found)
        return self._told_first

    def _take_first(self) -> None:
        self._told_first = None
        if self._ranks.leads:
            super()._take_first()

    def _followed(self, found: Generation | None) -> Any:
        """Rank 0's generation, or one that follows it; None: there is none."""
        told = self._ranks.told(None if found is None else job_fields(found.job), "a request")
        return found if self._ranks.leads or told is None else FollowedGeneration(job_of(told))


def job_fields(job: Job) -> dict[str, Any]:
    """A job as JSON has it."""
    plain = {field.name: getattr(job, field.name) for field in fields(Job)}
    return plain | {
        "sampling": asdict(job.sampling),
        "logit_bias": list(job.logit_bias.items()),
        "processors": [asdict(budget) for budget in job.processors],
        "constraint": job.constraint and {"lark": job.constraint.lark, "what": job.constraint.what},
    }


def job_of(told: dict[str, Any]) -> Job:
    """The job that `job_fields` told of."""
    return Job(
        **told
        | {
            "shared": [(length, kind) for length, kind in told["shared"]],
            "sampling": SamplingSettings(**told["sampling"]),
            "logit_bias": dict(map(tuple, told["logit_bias"])),
            "processors": [ThinkingBudget(**budget | {"marks": tuple(budget["marks"])}) for budget in told["processors"]],
            "constraint": told["constraint"] and Grammar(**told["constraint"]),
        }
    )


def follow(options: Options, open_pair: Callable[[], tuple], ranks: Ranks) -> None:
    """Run rank 0's requests on another rank, until its server ends.

    Raises: what `open_pair` raises.
    """
    engine = RankEngine(options, open_pair, ranks)
    engine.start()
    while not engine.join(0.2):
        pass
    if engine.fault is not None:
        raise engine.fault
