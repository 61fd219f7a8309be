"""How many drafted tokens to verify next: from what passes cost on this machine and what was accepted so far.

Knows numbers, and the file in the cache directory that keeps measured costs. Runs no model and sees no token.

Each round takes the width w and the source of drafts with the most committed tokens a second; 0 is plain decoding:

    value(w) = expected(w) / round_s(w)        expected(w) = 1 + p1 + p1 p2 + ... + p1 ... pw
    value(0) = 1 / plain_s                     p_i: chance that slot i is accepted if those before it are

Drafts are the drafter's, or come from the text itself (`prompt_lookup`), which costs no drafter pass.

A round may also be cut by confidence. The host waits for its drafts and reads how confident the drafter is of each. It then
verifies the w with the largest expected(w) - rate * round_s(w), 0 included; rate: tokens a second of late. That second wait has
a price, which is measured. Rounds are cut while narrower passes save more than it costs.

Drafts that are judged here are the likeliest tokens, never drawn, and the target's tokens do not depend on them: whatever a
width is chosen from, it can bias no distribution. Where drafts are drawn widths are fixed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from ..machine import cache_directory
from ..version import __version__
from .acceptance import AcceptanceRate, Calibration, expected_tokens

# Time for tries as a share of the time at width 0, and what keeping the drafter's context up may cost besides.
_TRY_SHARE, _CONTEXT_SHARE = 0.006, 0.004
# To leave width 0, drafting must promise this much more; to go back there, this much less is enough.
_LEAVE, _STAY = 1.03, 0.99
# Copied drafts must promise so much more than plain decoding: on both sides of a copied block passes do not overlap, and what a
# match's length promises is a mean over kinds of text (at 1.1, chat lost 8 % on an H100 where a block cost 5 plain passes).
_COPY = 1.25
# What the first try may lose, in plain tokens.
_FIRST_TRY_TOKENS = 2.5
# Rounds that drafting has to pay back the injection of what is pending.
_PAYBACK_ROUNDS = 32
# Widths that are measured first (2, 4, 8, ... rows); the others as far as time allows.
_FIRST = (1, 3, 7, 15, 31)
# What a slot might be worth where drafting has not been tried for long.
_HOPE = 0.98
# Rounds of width 0 before the next choice.
_REST = 8
# Drafting rounds after which plain decoding is timed again, twice as many beyond a gain of twofold; rounds that this may take.
_LOOK_AGAIN, _LOOK = 200, 5
# Usual rounds of one width after which the file is corrected, if they cost so much more or less of plain decoding than it says.
_SETTLED, _OFF = 8, 1.5
# Cutting by confidence must promise this much more than not to. One round in so many that could be cut is not, so that both
# kinds are timed. Where none is cut, one in so many is asked for confidences. Rounds that are known before any is trusted.
_CUT_GAIN, _BLIND, _ASK, _ENOUGH = 1.02, 32, 4, 16
# How fast rounds fade in the comparison of both kinds.
_CUT_FADE = 0.97
# Age at which a measurement is made again.
_STALE_S = 7 * 24 * 3600
# Pairs whose costs the file keeps.
_KEPT = 64


@dataclass
class CostModel:
    """Seconds that passes take here.

    plain_s: one token of plain decoding; draft_s: one drafter pass over its block; inject_s: the drafter's keys and values of
    one pending row; verify_s: by width, one target pass over the anchor and so many drafted tokens, until its outcome is read;
    cut_s: what waiting for the drafts in between, and reading how sure the drafter is of them, adds to a round.
    All come from one measurement; `refine` then follows what rounds really take. What the caller does while a plain pass runs
    hides that much of the pass, so plain decoding may come to cost less than its passes. key: the entry in the file, if any.
    """

    plain_s: float
    draft_s: float
    inject_s: float
    verify_s: dict[int, float]
    cut_s: float = 0.0
    measured_in_s: float = 0.0
    # What rounds took over what was measured, by width; as (ratio, usual rounds). Rounds of copied drafts apart.
    _seen: dict[int, tuple[float, int]] = field(default_factory=dict)
    _looked_up: dict[int, tuple[float, int]] = field(default_factory=dict)
    key: str | None = None
    # Rounds that told what a cut adds.
    _priced: int = 0
    # Rounds of drafting or copying since plain decoding was last looked at, of this run and those before it.
    rounds_since_plain: int = 0

    @property
    def has_seen_plain(self) -> bool:
        """Whether plain decoding was timed in real rounds."""
        return self._seen.get(0, (1.0, 0))[1] >= 2

    @property
    def has_seen_drafting(self) -> bool:
        """Whether a width other than 0 was timed in real rounds."""
        return any(n for w, (_, n) in self._seen.items() if w)

    @property
    def has_seen_prompt_lookup(self) -> bool:
        """Whether copied drafts were timed in real rounds."""
        return bool(self._looked_up)

    def forget_prompt_lookup(self) -> None:
        """Take copied drafts' rounds to be as far off as others are."""
        self._looked_up.clear()

    def doubt_plain(self) -> None:
        """Let the next rounds outweigh what was seen of plain decoding."""
        self._seen[0] = (self._ratio(0), 0)

    def plain(self) -> float:
        return self.plain_s * self._ratio(0)

    def verify(self, width: int) -> float:
        """The target's pass over width + 1 rows, as measured or on the line through the two nearest measured widths."""
        if width in self.verify_s:
            return self.verify_s[width]
        known = sorted(self.verify_s)
        if len(known) == 1:
            return self.verify_s[known[0]]
        i = min(max(bisect_left(known, width), 1), len(known) - 1)
        (a, b) = known[i - 1 : i + 1]
        slope = (self.verify_s[b] - self.verify_s[a]) / (b - a)
        return max(self.verify_s[a] + slope * (width - a), self.plain_s)

    def round(self, width: int, looked_up: bool = False) -> float:
        """A round that verifies `width` tokens, the drafter's or copied ones."""
        return self._passes(width, looked_up) * self._ratio(width, looked_up)

    def cut_round(self, width: int) -> float:
        """A round that is cut by confidence and then verifies `width` of its drafts, 0 being a plain pass."""
        if width:
            return self.round(width) + self.cut_s
        return (self.draft_s + max(self.verify(0), self.plain_s)) * self._ratio(1) + self.cut_s

    def _passes(self, width: int, looked_up: bool) -> float:
        """What a round's passes were measured to take."""
        return (self.verify(width) if looked_up else self.draft_s + self.verify(width)) if width else self.plain_s

    def _ratio(self, width: int, looked_up: bool = False) -> float:
        if looked_up:
            # As the drafter's rounds until one ran.
            near = min(self._looked_up, key=lambda w: abs(w - width), default=None)
            return self._ratio(width) if near is None else self._looked_up[near][0]
        if width in self._seen:
            return self._seen[width][0]
        if width == 0:
            return 1.0
        # A width that never ran is as far off as the nearest that did. Before any did, the cheaper of two guesses (as measured,
        # as far off as plain decoding) is taken: rounds correct one that is too cheap, but one too dear might never be tried.
        drafting = [w for w in self._seen if w]
        return self._seen[min(drafting, key=lambda w: abs(w - width))][0] if drafting else min(self._ratio(0), 1.0)

    def reprice(self, width: int, seconds: float, waited: bool) -> None:
        """Follow what a cut adds: by a round with the second wait among such without, or the other way round."""
        if not width or self._seen.get(width, (1.0, 0))[1] < 3:
            return
        beyond = seconds - self.round(width) - self.cut_s if waited else self.round(width) - seconds
        # No round moves it far: there are few, and an odd one counts for many.
        most, self._priced = seconds / 4, self._priced + 1
        self.cut_s = max(self.cut_s + max(1 / (self._priced + 2), 0.05) * min(max(beyond, -most), most), 0.0)

    def refine(self, width: int, seconds: float, usual: bool = True, looked_up: bool = False, waited: bool = False) -> None:
        """Follow what a round took: a running mean in which one odd round counts for little.

        usual: as its width mostly does; waited: it was cut by confidence.
        """
        if waited:
            if not width:
                return
            seconds = max(seconds - self.cut_s, seconds / 2)
        table = self._looked_up if looked_up else self._seen
        known = width in table
        (ratio, n), seen = table.get(width, (self._ratio(width, looked_up), 0)), seconds / self._passes(width, looked_up)
        # The first round after others takes longer, so it tells only that a cost is much lower than was thought. Then what was
        # seen of the other widths is as old. Copied drafts come between other rounds: theirs count all the same, but for the
        # first of a width, which may compile.
        if width and seen < 0.8 * ratio and (looked_up or not usual):
            for w in [w for w in table if w]:
                del table[w]
            table[width] = (seen, 0)
            return
        if (looked_up or waited) and not known:
            table[width] = (ratio, 0)
            return
        if not usual and not looked_up:
            return
        # The first real rounds outweigh the measurement, which may have been made beside other work; the fastest counts. Of those
        # with drafts, one that took far longer, as where something is compiled, is believed by and by: there may be no next one.
        if n < 3:
            slow = width and seen > 2 * ratio
            ratio = 2 * ratio if slow else min(ratio, seen) if n else seen
        else:
            ratio += max(1 / (n + 1), 0.1) * (min(max(seen, ratio / 2), ratio * 2) - ratio)
        table[width] = (ratio, n + 1)
        low, high = sorted((ratio, self._ratio(0)))
        if width and not looked_up and n + 1 == _SETTLED and self.key and high > _OFF * low:
            verify_s = {w: took * ratio for w, took in self.verify_s.items()}
            save_cost_model(self.key, CostModel(self.plain(), self.draft_s * ratio, self.inject_s * ratio, verify_s, self.cut_s))


def measure(
    plain: Callable[[], None],
    draft: Callable[[], None],
    inject: Callable[[int], None],
    verify: Callable[[int], None],
    both: Callable[[int, bool], None],
    most: int,
    budget_s: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel:
    """Time passes by turns, because a machine is now faster, now slower; each function runs one to its end. The fastest counts.

    Args:
      draft, verify: one block; inject: that many rows, of which plain decoding gathers many.
      both: draft and verify a width with one wait, or (True) with a second one in between, at which the drafter's confidences
        are read.
      most: the largest width, block_size - 1.
      budget_s: once it is spent, without each pass's first run, no wider block is measured; two always are. The widths between
        are measured only while all runs together took no longer. What is left goes to more turns.
    """
    began, spent = clock(), 0.0
    runs: dict[Any, Callable[[], object]] = {}
    times: dict[Any, list[float]] = {}

    def once(name: object) -> float:
        nonlocal spent
        start = clock()
        runs[name]()
        took = max(clock() - start, 1e-9)
        # The first run may compile, for seconds or minutes.
        spent += took if name in times else 0.0
        times.setdefault(name, []).append(took)
        return took

    def begin(name: object, run: Callable[[], object]) -> float:
        runs[name] = run
        return min(once(name), once(name))

    begin("plain", plain)
    begin("draft", draft)
    pending = [32]
    if begin(("inject", 32), lambda: inject(32)) < budget_s / 50:
        begin(("inject", 256), lambda: inject(256))
        pending.append(256)
    first, widths = _first(most), []
    for width in [*first, *(w for w in range(1, most) if w not in first)]:
        if len(widths) >= 2 and (spent > budget_s or (width not in first and clock() - began > budget_s)):
            break
        begin(width, lambda width=width: verify(width))
        widths.append(width)
    some = first[len(widths) > 2]
    runs.update({("both", waits): lambda waits=waits: both(some, waits) for waits in (False, True)})
    for _ in range(1 + (spent <= budget_s)):
        once(("both", False))
        once(("both", True))
    while spent < budget_s and len(times["plain"]) < 9:
        for name in runs:
            once(name)
    least = {name: min(took) for name, took in times.items()}
    inject_s = min(least["inject", n] / n for n in pending)
    cut_s = max(least["both", True] - least["both", False], 0.0)
    return CostModel(least["plain"], least["draft"], inject_s, _level({w: least[w] for w in widths}), cut_s, clock() - began)


def _level(verify_s: dict[int, float]) -> dict[int, float]:
    """Costs by width without what is noise in them: a wider pass that took up to a quarter less than narrower ones takes as long,
    so what they were measured to take is shared out among them."""
    pools: list[tuple[float, list[int]]] = []
    for width in sorted(verify_s):
        mean, pool = verify_s[width], [width]
        while pools and mean < pools[-1][0]:
            before, widths = pools[-1]
            # Of what is shared out too: by small steps, one would come to be far less.
            if min(verify_s[w] for w in pool) < 0.75 * max(verify_s[w] for w in widths):
                break
            pools.pop()
            mean, pool = (before * len(widths) + mean * len(pool)) / (len(widths) + len(pool)), widths + pool
        pools.append((mean, pool))
    return {width: mean for mean, pool in pools for width in pool}


def _first(most: int) -> list[int]:
    return sorted({w for w in _FIRST if w < most} | {most})


def pair_key(models: Sequence[Any], *others: object) -> str:
    """A name for what costs depend on: every parameter's name, shape and type, this machine, and what else is given."""
    shapes = [(name, a.shape, str(a.dtype)) for model in models for name, a in tree_flatten(model.parameters())]
    kinds = [type(model).__qualname__ for model in models]
    machine = (platform.node(), platform.machine(), os.cpu_count())
    return hashlib.sha256(repr((__version__, kinds, sorted(shapes), machine, *map(str, others))).encode()).hexdigest()[:16]


def _cost_file() -> Path:
    return cache_directory() / "widths.json"


def _read() -> dict[str, dict]:
    try:
        found = json.loads(_cost_file().read_text())
    except (OSError, ValueError, RuntimeError):
        # RuntimeError: nested too deeply, or a user without a home directory.
        return {}
    return found if isinstance(found, dict) else {}


def load_cost_model(key: str) -> CostModel | None:
    """What was measured lately, on any run on this machine; None if nothing was, or the file does not say it right."""
    try:
        entry = _read()[key]
        if not 0 <= time.time() - entry["saved_at"] < _STALE_S:
            return None
        verify_s = {int(width): float(seconds) for width, seconds in entry["verify_s"].items()}
        names = ("plain_s", "draft_s", "inject_s")
        costs = CostModel(*(float(entry[name]) for name in names), verify_s, float(entry["cut_s"]), key=key)
        numbers = (costs.plain_s, costs.draft_s, costs.inject_s, *verify_s.values())
        right = verify_s and min(verify_s) > 0 and all(0 < n < 3600 for n in numbers) and 0 <= costs.cut_s < 3600
        return costs if right else None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def save_cost_model(key: str, costs: CostModel) -> None:
    """Keep costs beside the newest others. A file that cannot be written is not needed: the next run measures again."""
    costs.key = key
    entries = {name: entry for name, entry in _read().items() if name != key}
    while len(entries) >= _KEPT:
        entries.pop(next(iter(entries)))
    names = ("plain_s", "draft_s", "inject_s", "verify_s", "cut_s")
    entries[key] = {name: getattr(costs, name) for name in names} | {"saved_at": time.time()}
    scratch = None
    try:
        file = _cost_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".widths-", delete=False) as scratch:
            json.dump(entries, scratch, indent=1)
        os.replace(scratch.name, file)
    except (OSError, RuntimeError):
        if scratch is not None:
            Path(scratch.name).unlink(missing_ok=True)


class FixedDraftLength:
    """The same width in every round, whatever the drafter is sure of."""

    ready, wants_confidence, cuts_by_confidence = True, False, False

    def __init__(self, width: int):
        self.width = width

    def choose(self, pending: int = 0) -> int:
        return self.width

    def prompt_lookup_width(self, width: int, rates: list[float]) -> int:
        """As many copied ids where the first is more likely right than not."""
        return self.width if rates[0] > 0.5 else 0

    def observe(self, *_: object, **__: object) -> None:
        pass

    def reason(self, *rounds: Mapping[int, int]) -> str | None:
        return None


class DraftLengthPolicy:
    """Chooses widths by value, and at width 0 tries drafting again now and then.

    Tries are paid from a credit: a small share of the time spent at width 0. A try that gains pays for the next one, so a
    drafter that has become good is taken up at once; one that stays bad costs less and less often.

    Args:
      most: the largest width; measure: called at the first choice that needs costs, unless they are there already.
    """

    def __init__(self, most: int, acceptance: AcceptanceRate, costs: CostModel | None, measure: Callable[[], CostModel]):
        self.most, self.acceptance, self.cost_model, self._measure = most, acceptance, costs, measure
        self.share = _TRY_SHARE
        self.credit: float | None = None
        # last: the last round's width; _trying: which round of a try the next one is, 0 if of none.
        self.last, self._trying, self._rest = 0, 0, 0
        # Whether plain rounds save for tries.
        self._saves = True
        # Rounds of width 0 since plain decoding was last looked at.
        self._plain = 0
        # Chances to copy that were declined since one was taken, and after how many what was seen of copying is forgotten.
        self._declined, self._patience = 0, _LOOK_AGAIN
        # For how many more rates like the one declined last, or worse, the answer is the same.
        self._copy_rest, self._declined_at = 0, 0.0
        self.calibration = Calibration()
        # cuts_by_confidence: whether to cut the round that was chosen last; _cutting: such rounds in general. Of the drafter's
        # rounds: how many there were, and of those with confidences how many, what they promised as (tokens, seconds) at the
        # widths that a cut would take, and as tokens by fixed width.
        self.cuts_by_confidence, self._cutting, self._drafted, self._asked = False, False, 0, 0
        self._cut_sums, self._fixed = (0.0, 0.0), [0.0] * (most + 1)
        # Tokens a second of late.
        self._rate = 0.0

    def take_up(self, other: DraftLengthPolicy) -> None:
        """Go on with what another run of the same pair has learned of the drafter's confidences, has saved for tries, and has
        counted: answers may be shorter than it takes to save for a try, or to come to a round that is not cut by confidence."""
        self.credit, self.share = other.credit, other.share
        self.calibration.weights = list(other.calibration.weights)
        self._cut_sums, self._fixed, self._asked = other._cut_sums, list(other._fixed), other._asked
        self._drafted, self._declined, self._patience = other._drafted, other._declined, other._patience

    @property
    def ready(self) -> bool:
        """Whether the next choice measures nothing."""
        return self.cost_model is not None

    def choose(self, pending: int = 0) -> int:
        """The next round's width. `pending`: rows that the drafter must be given before it can draft."""
        if self.cost_model is None:
            self.cost_model = self._measure()
        costs, plain_s = self.cost_model, self.cost_model.plain()
        self.cuts_by_confidence = False
        if self.credit is None:
            # A pair that never drafted gets one cheap try at once; one whose round is dear here saves for it.
            self.credit = 0.0 if any(seen for _, seen in self.acceptance.counts) else _FIRST_TRY_TOKENS * plain_s
        if self._rest or self._looks:
            return 0
        edge = self._edge
        self._cutting = edge > 1
        # Where the drafter's context is dear to keep up, whoever drafts again has to pay for what is pending.
        inject_s = pending * costs.inject_s if costs.inject_s > _CONTEXT_SHARE * plain_s else 0.0
        rounds_s = [costs.round(w) for w in range(1, self.most + 1)]
        tokens = expected_tokens(self.acceptance.rates())
        late_s = inject_s / _PAYBACK_ROUNDS if self.last == 0 else 0.0
        best = max(range(1, self.most + 1), key=lambda w: tokens[w] / (rounds_s[w - 1] + late_s))
        gain = edge * tokens[best] / (rounds_s[best - 1] + late_s) * plain_s
        self._rate = max(gain, 1.0) / plain_s
        tried, self._trying = self._trying, 0
        if gain > (_LEAVE if self.last == 0 else _STAY):
            if self._looks_again(gain):
                return 0
            self.cuts_by_confidence = self._cutting and self._drafted % _BLIND < _BLIND - 1
            return best
        if tried == 1 and not costs.has_seen_drafting:
            # The first try is two rounds: the second shows what rounds cost.
            self._trying = 2
            return self.last
        # A try takes the width that loses least, of those with at least half of the best hope. Where nothing could gain, only a
        # wrong cost is to be found out, which every width shows.
        hopes = expected_tokens([max(p, _HOPE) for p in self.acceptance.rates()])
        gains = [hopes[w] / rounds_s[w - 1] * plain_s - 1 for w in range(1, self.most + 1)]
        least = max(gains) / 2 if max(gains) > _LEAVE - 1 else -1.0
        hopeful = [w for w in range(1, self.most + 1) if gains[w - 1] >= least]
        loss, best = min((rounds_s[w - 1] + inject_s - tokens[w] * plain_s, w) for w in hopeful)
        if self.credit < loss:
            # Where rows that pend are too dear for a try, as in a long text, no more is saved: many would follow at once.
            self._rest, self._saves = _REST, self.credit < loss - inject_s + _FIRST_TRY_TOKENS * plain_s
            return 0
        self._trying, self._saves = 1, True
        return best

    @property
    def wants_confidence(self) -> bool:
        """Whether the drafter's confidences in the next round are wanted."""
        return self.cuts_by_confidence or self.last == 0 or self._asked < _ENOUGH or self._drafted % _ASK == 0

    def confidence_cut(self, confidence: Sequence[float]) -> int:
        """How many drafts of a round to verify, 0 included. confidence: by slot, the drafter's probability."""
        return self._cut(expected_tokens(self.calibration.rates(confidence, self.acceptance.rates())))

    def _cut(self, tokens: list[float]) -> int:
        return max(range(len(tokens)), key=lambda w: tokens[w] - self._rate * self.cost_model.cut_round(w))

    @property
    def _edge(self) -> float:
        """Tokens a second of rounds that are cut by confidence over those of the best fixed width; 1 where that is too little."""
        if self._asked < _ENOUGH:
            return 1.0
        # At width 0 each round has one token: these are how many there were.
        rounds, fixed = self._fixed[0], range(1, self.most + 1)
        edge = self._cut_sums[0] / self._cut_sums[1] / max(self._fixed[w] / (rounds * self.cost_model.round(w)) for w in fixed)
        return edge if edge > _CUT_GAIN else 1.0

    def _judge(self, confidence: Sequence[float], accepted: int, more: bool, waited: bool) -> None:
        """Learn from a round of the drafter's whose confidences were read."""
        slots, costs = self.acceptance.rates(), self.cost_model
        guesses = self.calibration.rates(confidence, slots)
        tokens = expected_tokens(guesses)
        w, kept = self._cut(tokens), _CUT_FADE
        self._cut_sums = (self._cut_sums[0] * kept + tokens[w], self._cut_sums[1] * kept + costs.cut_round(w))
        self._fixed = [total * kept + n for total, n in zip(self._fixed, tokens, strict=True)]
        self._asked += 1
        self.calibration.add(confidence, slots, accepted, more)
        self.acceptance.add(accepted, more, guesses if waited else ())

    def prompt_lookup_width(self, width: int, rates: list[float]) -> int:
        """How many copied ids to verify in place of the round of `width` that was chosen; 0 where that promises no more.

        rates: by slot, what `PromptLookup.rates` says.
        """
        costs = self.cost_model
        if costs is None or self._looks:
            return 0
        if self._copy_rest and rates[0] <= self._declined_at:
            # Plain decoding has no time to ask at every token; a longer match is looked at at once.
            self._copy_rest -= 1
            return 0
        # Other widths than these never ran, and a pass of a new shape may have to be compiled for.
        tokens, widths = expected_tokens(rates), {*costs.verify_s, *_first(len(rates))}
        gain, best = max((tokens[w] / costs.round(w, looked_up=True), w) for w in widths if w < len(tokens))
        plain_s = costs.plain()
        chosen = expected_tokens(self.acceptance.rates())[width] / costs.round(width) if width else 0.0
        chosen *= self._edge if self.cuts_by_confidence else 1.0
        if gain > max(_LEAVE * chosen, _COPY / plain_s):
            return 0 if self._looks_again(gain * plain_s) else best
        self._copy_rest, self._declined_at = _REST, rates[0]
        self._declined += costs.has_seen_prompt_lookup
        if self._declined == self._patience:
            # What was seen may be from beside other work, and nothing else corrects it.
            self._declined, self._patience = 0, 2 * self._patience
            costs.forget_prompt_lookup()
        return 0

    @property
    def _looks(self) -> bool:
        """Whether plain decoding is to be timed now.

        What it costs is seen first: a measurement beside other work may be far off, and nothing else corrects it.
        """
        return not self.cost_model.has_seen_plain and self._plain < _LOOK

    def _looks_again(self, gain: float) -> bool:
        """Whether it is time to look at plain decoding again, at so much tokens for one of it."""
        if self.cost_model.rounds_since_plain < _LOOK_AGAIN * (2 if gain > 2 else 1):
            return False
        self.cost_model.rounds_since_plain, self._plain = 0, 0
        self.cost_model.doubt_plain()
        return True

    def observe(
        self,
        width: int,
        accepted: int,
        more: bool,
        seconds: float,
        usual: bool,
        looked_up: bool = False,
        confidence: Sequence[float] | None = None,
        waited: bool = False,
    ) -> None:
        """One round that has ended, what it took, and whether it ran as rounds of its width mostly do.

        accepted, more: as for `AcceptanceRate.add`; confidence: of a round of the drafter's, where they were asked for; waited:
        the host waited for its drafts, to cut them or to time them.
        """
        if self.cost_model is None:
            return
        drafted = bool(width) or waited
        # A try is charged what it was allowed for: one round that took far longer, as the first ones may, is soon corrected.
        expected_s = self.cost_model.round(width)
        if drafted and not looked_up and waited != self._cutting:
            self.cost_model.reprice(width, seconds, waited)
        else:
            self.cost_model.refine(width, seconds, usual, looked_up, waited)
        self.cost_model.rounds_since_plain += drafted
        if looked_up:
            # In place of a try, perhaps.
            self._trying = 0
            return
        if drafted:
            self._drafted += 1
            if self.last == 0:
                self.acceptance.forget(6)
            if confidence is None:
                self.acceptance.add(accepted, more)
            else:
                self._judge(confidence, accepted, more, waited)
            if self._trying:
                # What the drafter was given late is not lost: that is its context.
                lost = min(seconds, expected_s) - (accepted + 1) * self.cost_model.plain()
                self.credit -= lost
                if self.last == 0 or lost <= 0:
                    self.share = max(self.share / 2, _TRY_SHARE / 4) if lost > 0 else _TRY_SHARE
        else:
            self.credit += self._saves * self.share * self.cost_model.plain()
            self._rest, self._plain = max(self._rest - 1, 0), self._plain + 1
        # After a round that was cut by confidence and verified nothing, drafting goes on.
        self.last = width or int(drafted)

    def reason(
        self,
        widths: Mapping[int, int],
        looked_up: Mapping[int, int] = {},  # noqa: B006
        confidence_cut: Mapping[int, int] = {},  # noqa: B006
    ) -> str | None:
        """One sentence on the rounds of a run by width; None if this policy chose none.

        looked_up: those with drafts from the text among them; confidence_cut: those that were cut by confidence.
        """
        if looked_up and self.cost_model is not None:
            own = {w: n - looked_up.get(w, 0) for w, n in widths.items() if n > looked_up.get(w, 0)}
            # What follows is of the others alone.
            return "; apart from them ".join(
                filter(
                    None,
                    [f"drafts copied from the text in {sum(looked_up.values())} rounds", self.reason(own, {}, confidence_cut)],
                )
            )
        rounds = sum(widths.values())
        if self.cost_model is None or not rounds:
            return None
        plain_s, off = self.cost_model.plain(), widths.get(0, 0) - confidence_cut.get(0, 0)
        if 2 * off >= rounds:
            cost = f"{self.most + 1} rows cost {self.cost_model.round(self.most) / plain_s:.1f}x one row here"
            # All but a few is not all.
            share = 100 if off == rounds else min(99, round(100 * off / rounds))
            return f"drafting off in {share} % of rounds: {cost}; force with --block-size"
        if 2 * sum(confidence_cut.values()) >= rounds - off:
            mean = sum(w * n for w, n in confidence_cut.items()) / sum(confidence_cut.values())
            text = f"{mean:.1f} of {self.most} drafts verified on average, as many as the drafter was sure enough of"
            return f"{text}: {self._rate * plain_s:.2f}x plain decoding expected here"
        width = max((w for w in widths if w), key=widths.__getitem__)
        cost, kept = self.cost_model.round(width) / plain_s, expected_tokens(self.acceptance.rates())[width]
        most = f"{width} of {self.most} drafts verified in most rounds"
        return f"{most}: {cost:.1f}x the cost of one token here, for {kept:.1f} tokens"
