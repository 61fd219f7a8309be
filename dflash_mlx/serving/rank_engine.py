"""The engine of a server on several machines: rank 0 has the clients, and broadcasts which request is next and which has ended.

Every rank runs the engine's loop. The other ranks have no clients; what they generate is dropped.
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
    """The other ranks' part of a generation whose client is at rank 0."""

    job: Job
    cached: int = 0
    done: int = 0
    cancelled: bool = False

    def put(self, event: object) -> None:
        """Drop the event: the client is at rank 0."""


class RankEngine(Engine):
    """An `Engine` whose thread does the same on every rank, in the same order."""

    def __init__(self, options: Options, open_pair: Callable[[], tuple], ranks: Ranks):
        super().__init__(options, open_pair)
        self._ranks = ranks
        # The first waiting request, once rank 0 has broadcast it.
        self._known_first: Any = None

    def _read(self, value: bool) -> bool:
        return self._ranks.broadcast(value, "whether to end")

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
        is_new = self._ranks.broadcast(found is not self._known_first, "whether another request waits")
        if is_new:
            self._known_first = self._followed(found)
        return self._known_first

    def _take_first(self) -> None:
        self._known_first = None
        if self._ranks.leads:
            super()._take_first()

    def _followed(self, found: Generation | None) -> Any:
        """Rank 0's generation, and on the other ranks one that follows it; None if rank 0 has none."""
        values = self._ranks.broadcast(None if found is None else job_fields(found.job), "a request")
        return found if self._ranks.leads or values is None else FollowedGeneration(job_from(values))


def job_fields(job: Job) -> dict[str, Any]:
    """A job as JSON values."""
    plain = {field.name: getattr(job, field.name) for field in fields(Job)}
    return plain | {
        "sampling": asdict(job.sampling),
        "logit_bias": list(job.logit_bias.items()),
        "processors": [asdict(budget) for budget in job.processors],
        "constraint": job.constraint and {"lark": job.constraint.lark, "what": job.constraint.what},
    }


def job_from(values: dict[str, Any]) -> Job:
    """The reverse of `job_fields`."""
    return Job(
        **values
        | {
            "shared": [(length, kind) for length, kind in values["shared"]],
            "sampling": SamplingSettings(**values["sampling"]),
            "logit_bias": dict(map(tuple, values["logit_bias"])),
            "processors": [ThinkingBudget(**budget | {"marks": tuple(budget["marks"])}) for budget in values["processors"]],
            "constraint": values["constraint"] and Grammar(**values["constraint"]),
        }
    )


def follow(options: Options, open_pair: Callable[[], tuple], ranks: Ranks) -> None:
    """Run rank 0's requests on another rank, until rank 0's server ends.

    Raises: what `open_pair` raises.
    """
    engine = RankEngine(options, open_pair, ranks)
    engine.start()
    while not engine.join(0.2):
        pass
    if engine.fault is not None:
        raise engine.fault
