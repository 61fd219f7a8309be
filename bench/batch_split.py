"""Where the time of `batch_generate` goes, step by step, ours and mlx-lm's: for `bench/batch.py --split`.

Each step's seconds are its own: those of the steps inside it are not counted twice. Knows both sides' functions by name.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx_lm.generate  # noqa: F401 - the module; the package has a function of this name
from mlx_lm.generate import BatchGenerator as MlxLmBatch
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

from dflash_mlx.batch import reading, rounds
from dflash_mlx.batch.generator import BatchGenerator
from dflash_mlx.batch.groups import Groups
from dflash_mlx.batch.passes import BatchTarget
from dflash_mlx.batch.policy import BatchPolicy
from dflash_mlx.batch.rounds import Round
from dflash_mlx.batch.row import Row

OURS = [
    (BatchGenerator, ("next", "insert", "remove", "_read", "_plan", "_look_ahead", "_hand_out")),
    (Row, ("join",)),
    (reading, ("_run_pass",)),
    (Groups, ("arrange",)),
    (BatchPolicy, ("plan",)),
    (BatchTarget, ("__call__",)),
    (Round, ("__init__", "_enqueue", "read", "commit")),
    (rounds, ("_draft", "_guarded", "evaluate")),
]
THEIRS = [
    (MlxLmBatch, ("_next", "insert")),
    (PromptProcessingBatch, ("prompt", "generate", "split")),
    (GenerationBatch, ("next", "_step", "filter", "extract_cache", "extend")),
]


class Split:
    """seconds, calls: by step, its own; nexts: seconds of each call of `next`, by what was done in it."""

    def __init__(self) -> None:
        self.seconds, self.calls, self.nexts = defaultdict(float), defaultdict(int), defaultdict(list)
        # What the steps inside each running step took; what the running `next` did.
        self._inside: list[float] = []
        self._did: list[str] = []

    def _timed(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if name.endswith(".next"):
                self._did.clear()
            began = time.perf_counter()
            self._inside.append(0.0)
            try:
                return inner(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                self.seconds[name] += took - self._inside.pop()
                self.calls[name] += 1
                if self._inside:
                    self._inside[-1] += took
                self._note(name, args, took)

        return step

    def _note(self, name: str, args: tuple[Any, ...], took: float) -> None:
        if name == "Round.commit":
            one: Round = args[0]
            width = max(row.draft.width for row in one.rows)
            self._did.append(f"{len(one.rows)} rows, width {width}{', ahead' if one.is_ahead else ''}")
        elif name in ("reading._run_pass", "PromptProcessingBatch.prompt"):
            self._did[:] = ["prompts", *[did for did in self._did if did != "prompts"]]
        elif name == "BatchGenerator.remove":
            self._did[:] = [*[did for did in self._did if did != "rows leave"], "rows leave"]
        elif name == "GenerationBatch._step" and args[0].uids:
            self._did.append(f"{len(args[0].uids)} rows")
        elif name.endswith(".next"):
            self.nexts[", ".join(self._did) or "nothing"].append(took)

    @contextmanager
    def of(self, steps: list[tuple[Any, tuple[str, ...]]]) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, names in steps:
                label = owner.__name__.rpartition(".")[2]
                for name in names:
                    stack.enter_context(patch.object(owner, name, self._timed(f"{label}.{name}", getattr(owner, name))))
            yield

    def record(self, whole: float) -> dict[str, Any]:
        """Seconds of a step with its calls; milliseconds of a `next` (sum and median) with how many did the same."""
        steps = {
            name: f"{1000 * s:.0f} ms in {self.calls[name]}" for name, s in sorted(self.seconds.items(), key=lambda x: -x[1])
        }
        steps["outside"] = f"{1000 * (whole - sum(self.seconds.values())):.0f} ms"
        kinds = sorted(self.nexts.items(), key=lambda x: -sum(x[1]))
        nexts = {kind: f"{len(t)} of {1000 * statistics.median(t):.1f}, {1000 * sum(t):.0f} ms" for kind, t in kinds}
        return {"seconds": round(whole, 3), "steps": steps, "next": nexts}


def split_of(side: Callable[[], Any], steps: list[tuple[Any, tuple[str, ...]]]) -> dict[str, Any]:
    """Run `side` twice: with timers in its steps, and under cProfile, which slows Python down and counts every call."""
    split = Split()
    with split.of(steps):
        began = time.perf_counter()
        side()
        found = split.record(time.perf_counter() - began)
    profile = cProfile.Profile()
    profile.runcall(side)
    stats = pstats.Stats(profile)
    top = sorted(stats.stats.items(), key=lambda one: -one[1][2])[:30]
    found["calls"] = stats.total_calls
    found["profile"] = {
        f"{Path(file).name}:{line} {name}": f"{1000 * own:.0f} ms in {n}" for (file, line, name), (_, n, own, *_) in top
    }
    return found
