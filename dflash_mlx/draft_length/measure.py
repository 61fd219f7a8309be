"""Times the passes of a pair once on this machine, with caches of their own, in pieces between tokens. Knows nothing of the loop.

A pass cannot be interrupted, so a piece ends before a pass that would exceed its time. A pass longer than a whole piece, and all
that follow, wait for the end of the answer. The time of a kind of pass is known from its second run on, because the first may
compile; so two runs of a new kind, such as a draft, may take longer than a piece.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from ..kernels.autotune import fingerprint
from ..models.drafter import Drafter
from ..models.target import Target
from ..progress import tell
from ..rollback import rollback, rollback_point
from ..target_sampler import pack_drafts
from ..traced import setting
from ..verify import logprobs, verify_block
from .cost_model import CostModel, NotYet, first_widths
from .cost_store import load_cost_model, pair_key, save_cost_model

# Time that a piece of the measurement may take between two tokens of an answer.
PIECE_S = 0.2
# Tokens of text in the cache before the timed passes, and how many of them the target reads at once.
_CONTEXT, _CHUNK = 32, 4
# Yields the expected seconds of the next pass before running it; None: a preparation, which is not timed and may take long.
Times = Generator[float | None, None, CostModel]


class Measurement:
    """What passes of one pair cost on this machine: read from disk, or measured now in pieces.

    Each piece runs on the current stream; the next may run in another thread, which has other streams. clock: for tests.
    """

    def __init__(self, target: Target, drafter: Drafter, clock: Callable[[], float] = time.perf_counter):
        # A weak reference: the drafter holds its pair, and the pair holds this object.
        self.target, self._drafter, self._clock = target, weakref.ref(drafter), clock
        info = mx.device_info()
        device = (mx.default_device(), info.get("device_name"), info.get("architecture"), info.get("memory_size"))
        # Another kind of target has other costs.
        kind = () if type(target) is Target else (type(target).__name__,)
        key = pair_key([target.model, drafter], drafter.config, *device, mx.__version__, setting(), fingerprint(), *kind)
        self._key, self.costs = key, load_cost_model(key)
        self._passes: Times | None = None
        # Expected seconds of the next pass, and the number of passes run.
        self._next: float | None = None
        self._n, self._is_prepared = 0, False

    def prepare(self) -> CostModel | NotYet:
        """Let the accelerator compile its passes, if there is one. That may take long, so it is done before an answer."""
        if self.costs is None and self.target.accelerator and self.target.accelerator.prepares:
            tell("First run on this machine: preparing")
            while self._step() and not (self._is_prepared and self._next is not None):
                self._is_prepared |= self._next is None
        return self.costs or NotYet.MORE

    def piece(self, limit_s: float = PIECE_S) -> CostModel | NotYet:
        """Run passes for at most `limit_s`. LATER: the next one takes longer, so it must wait for the end of the answer."""
        began = self._clock()
        while self.costs is None:
            spent, expected = self._clock() - began, self._next or 0.0
            if expected > limit_s:
                return NotYet.LATER
            if spent and spent + expected > limit_s:
                return NotYet.MORE
            self._step()
        return self.costs

    def finish(self, stop: Callable[[], bool] = lambda: False) -> CostModel | NotYet:
        """Run all remaining passes. stop: called before each; True ends this, and the rest stays for later."""
        most = len(first_widths(self._drafter().config.block_size - 1))
        while self.costs is None and not stop():
            # The minimum: each kind of pass twice. More turns follow while there is time.
            total = _CONTEXT // _CHUNK + 2 * most + 12
            tell("Timing", self._n, total if self._n < total else None, "passes")
            self._step()
        return self.costs or NotYet.LATER

    def _step(self) -> bool:
        """Run one pass; False: it was the last."""
        if (passes := self._passes) is None:
            passes, self._n = measuring(self.target, self._drafter, self._clock), 0
        # An interruption inside a pass starts the measurement again.
        self._passes = self._next = None
        try:
            expected = next(passes)
        except StopIteration as end:
            self.costs = end.value
            save_cost_model(self._key, self.costs)
            return False
        self._passes, self._next, self._n = passes, expected, self._n + 1
        return True


def measure_cost_model(target: Target, drafter: Drafter) -> CostModel:
    """Time the passes of a pair, all at once."""
    return drained(measuring(target, weakref.ref(drafter)))


def drained(passes: Times) -> CostModel:
    """Run all passes of a measurement. Returns: its costs."""
    while True:
        try:
            next(passes)
        except StopIteration as end:
            return end.value


def measuring(target: Target, drafter: Callable[[], Drafter], clock: Callable[[], float] = time.perf_counter) -> Times:
    """Time the passes of a pair; yields before each. drafter: a weak reference."""
    models, took = _Passes(target, drafter), []
    for at in range(0, _CONTEXT, _CHUNK):
        yield min(took[1:], default=0.0)
        began = clock()
        models.read(at)
        took.append(clock() - began)
    # First, on a filled cache, so that kernels are tried before anything is timed.
    yield None
    models.inject(1)
    if target.accelerator and target.accelerator.prepares:
        for prepare in (models.draft, lambda: models.verify(1), models.plain):
            yield None
            prepare()
    for _ in range(2):
        yield min(took[1:])
        began = clock()
        models.plain()
    # As many plain passes in a row as fit a piece: a single pass takes longer than one in a row.
    models.chain = max(1, min(4, int(PIECE_S / max(clock() - began, 1e-9))))
    costs = yield from turns(models.plain, models.draft, models.inject, models.verify, models.both, models.K - 1, clock=clock)
    costs.plain_s /= models.chain
    return costs


class _Passes:
    """The passes of a pair after `_CONTEXT` tokens of text, each run to its end. chain: plain passes in a row."""

    def __init__(self, target: Target, drafter: Callable[[], Drafter]):
        self.target, self._drafter, self.K, self.chain = target, drafter, drafter().config.block_size, 1
        self.entries, self.context = mlx_lm_cache.make_prompt_cache(target.model), drafter().make_cache()
        # Any text of different tokens.
        self.start = mx.arange(1, _CONTEXT + 1, dtype=mx.int32)[None] * 37 % target.vocabulary
        self.text = mx.broadcast_to(self.start, (1 + self.K // _CONTEXT, _CONTEXT)).reshape(1, -1)
        self.token, self.rows, self.injected = self.start[0, :1], 0, 0
        # Evaluate now: the next piece may run in another thread, which cannot evaluate this one's arrays.
        mx.eval(self.start, self.text, self.token)

    def read(self, at: int) -> None:
        """Read some tokens of the text."""
        self.features = self.target(self.start[:, at : at + _CHUNK], self.entries).features
        mx.eval(self.features, [entry.state for entry in self.entries])

    def verify(self, width: int, drafted: mx.array | None = None) -> mx.array:
        """The target's pass over the anchor and `width` tokens."""
        point = rollback_point(self.entries, self.rows)
        drafted = (self.text if drafted is None else drafted)[:, :width]
        output = verify_block(self.target, self.token, drafted, self.entries, point)
        chosen = mx.argmax(logprobs(self.target, output.hidden, output.logits), axis=-1)
        mx.async_eval(chosen, output.features)
        self.rows += 1
        if width:
            chosen.tolist()
            rollback(self.entries, point, self.rows)
            mx.eval([entry.state for entry in self.entries])
        return chosen

    def plain(self) -> None:
        """Plain passes. As in the loop, the next one is enqueued before the last one is read."""
        before = self.verify(0)
        for _ in range(self.chain - 1):
            before, now = self.verify(0), before
            now.tolist()
        before.tolist()
        mx.eval([entry.state for entry in self.entries])

    def draft(self) -> None:
        """The drafter's pass over its block."""
        mx.eval(self._drafted()[0], [entry.state for entry in self.context])
        self.injected += 1

    def _drafted(self) -> tuple[mx.array, mx.array | None]:
        """Ids and confidences of a block behind one new row of context."""
        block = (self.token, self.features[:, :1], self.context, self.injected, self.K)
        return Drafter.draft_with_confidence(self._drafter(), *block, accelerator=self.target.accelerator)

    def inject(self, n: int) -> None:
        """The drafter's keys and values of n rows."""
        features = mx.broadcast_to(self.features[:, :1], (1, n, self.features.shape[2]))
        Drafter.inject(self._drafter(), features, self.context, self.injected)
        mx.eval([entry.state for entry in self.context])
        self.injected += n

    def both(self, width: int, waits: bool) -> None:
        """A draft and its verifying; waits: the host reads the drafter's confidences in between."""
        drafted, confidence = self._drafted()
        if waits:
            pack_drafts(drafted, confidence).tolist()
        self.verify(width, drafted)
        mx.eval([entry.state for entry in self.context])
        self.injected += 1


def turns(
    plain: Callable[[], None],
    draft: Callable[[], None],
    inject: Callable[[int], None],
    verify: Callable[[int], None],
    both: Callable[[int, bool], None],
    most: int,
    budget_s: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Time passes in turns, because a machine's speed varies. Each function runs one pass to its end; the fastest run counts.

    Args:
      draft, verify: one block; inject: that many rows, of which plain decoding gathers many.
      both: draft and verify a width with one wait, or (True) with a second one in between, at which the drafter's confidences
        are read.
      most: the largest width, block_size - 1.
      budget_s: once it is spent, without each pass's first run, no wider block is measured; two always are. The widths between
        are measured only while all runs together took no longer. What is left goes to more turns.
    Yields: before each pass, what it should take.
    """
    spent, in_all = 0.0, 0.0
    runs: dict[Any, Callable[[], object]] = {}
    times: dict[Any, list[float]] = {}

    def once(name: object, expected_s: float = 0.0) -> Times:
        nonlocal spent, in_all
        # The first run may compile, so the time is known after two.
        yield min(times[name]) if len(times.get(name, ())) > 1 else expected_s
        start = clock()
        runs[name]()
        took = max(clock() - start, 1e-9)
        in_all += took
        # The first run may compile, for seconds or minutes. A run that stalls counts as its fastest: a moment in which the
        # machine was busy or the process stopped would leave widths unmeasured for as long as costs are kept.
        spent += min(took, *times[name]) if name in times else 0.0
        times.setdefault(name, []).append(took)

    def begin(name: object, run: Callable[[], object], expected_s: float = 0.0) -> Times:
        runs[name] = run
        yield from once(name, expected_s)
        yield from once(name, expected_s)

    yield from begin("plain", plain)
    yield from begin("draft", draft)
    pending = [32]
    yield from begin(("inject", 32), lambda: inject(32))
    if min(times["inject", 32]) < budget_s / 50:
        yield from begin(("inject", 256), lambda: inject(256))
        pending.append(256)
    first, widths = first_widths(most), []
    for width in [*first, *(w for w in range(1, most) if w not in first)]:
        if len(widths) >= 2 and (spent > budget_s or (width not in first and in_all > budget_s)):
            break
        expected = _beyond(width, {w: min(times[w]) for w in widths})
        yield from begin(width, lambda width=width: verify(width), expected)
        widths.append(width)
    some = first[len(widths) > 2]
    runs.update({("both", waits): lambda waits=waits: both(some, waits) for waits in (False, True)})
    expected = min(times["draft"]) + min(times[some])
    for _ in range(1 + (spent <= budget_s)):
        yield from once(("both", False), expected)
        yield from once(("both", True), expected)
    while spent < budget_s and len(times["plain"]) < 9:
        for name in runs:
            yield from once(name)
    least = {name: min(took) for name, took in times.items()}
    inject_s = min(least["inject", n] / n for n in pending)
    cut_s = max(least["both", True] - least["both", False], 0.0)
    return CostModel(least["plain"], least["draft"], inject_s, _level({w: least[w] for w in widths}), cut_s, in_all)


def _beyond(width: int, known: dict[int, float]) -> float:
    """Expected seconds of a pass at `width`, extrapolated from the two nearest narrower widths."""
    narrower = sorted(w for w in known if w < width)
    if len(narrower) < 2:
        return known[narrower[0]] if narrower else 0.0
    a, b = narrower[-2:]
    return known[b] + max(known[b] - known[a], 0.0) / (b - a) * (width - b)


def _level(verify_s: dict[int, float]) -> dict[int, float]:
    """Remove noise from costs by width: where a wider pass took up to a quarter less than narrower ones, all get their mean."""
    pools: list[tuple[float, list[int]]] = []
    for width in sorted(verify_s):
        mean, pool = verify_s[width], [width]
        while pools and mean < pools[-1][0]:
            before, widths = pools[-1]
            # Compared with the measured times, not the means: otherwise many small steps could add up.
            if min(verify_s[w] for w in pool) < 0.75 * max(verify_s[w] for w in widths):
                break
            pools.pop()
            mean, pool = (before * len(widths) + mean * len(pool)) / (len(widths) + len(pool)), widths + pool
        pools.append((mean, pool))
    return {width: mean for mean, pool in pools for width in pool}
