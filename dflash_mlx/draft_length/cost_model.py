"""What passes cost: seconds as measured, corrected by the rounds that were run. Knows numbers only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

# Widths that are measured first (2, 4, 8, ... rows); others as time allows.
_FIRST = (1, 3, 7, 15, 31)
# The costs on disk are corrected after _SETTLED rounds of a width, if its cost relative to plain decoding is off by _OFF.
_SETTLED, _OFF = 8, 1.5


class NotYet(Enum):
    """Why there are no costs yet: MORE passes follow between tokens, or LATER, after the answer."""

    MORE, LATER = "more", "later"


@dataclass
class CostModel:
    """Seconds that passes take on this machine.

    plain_s: one token of plain decoding; draft_s: one drafter pass over its block; inject_s: the drafter's keys and values of
    one pending row; verify_s: width -> one target pass over the anchor and that many drafts, until its result is read;
    cut_s: extra time of a round that waits for the drafts and reads the drafter's confidence.
    All come from one measurement; `refine` then follows the time of real rounds. The caller's own work can overlap with plain
    passes, so plain decoding may cost less than its passes. keep: saves a model for later processes, or None.
    """

    plain_s: float
    draft_s: float
    inject_s: float
    verify_s: dict[int, float]
    cut_s: float = 0.0
    measured_in_s: float = 0.0
    # width -> (time of rounds over measured time, number of usual rounds); rounds of prompt lookup apart.
    _seen: dict[int, tuple[float, int]] = field(default_factory=dict)
    _looked_up: dict[int, tuple[float, int]] = field(default_factory=dict)
    keep: Callable[[CostModel], object] | None = field(default=None, repr=False, compare=False)
    # Rounds that `reprice` has used.
    _priced: int = 0
    # Rounds with drafts since plain decoding was last timed, in this run and earlier ones.
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
        """Forget the times of prompt lookup's rounds, so that those of the drafter's rounds count for them."""
        self._looked_up.clear()

    def doubt_plain(self) -> None:
        """Let the next plain rounds outweigh earlier ones."""
        self._seen[0] = (self._ratio(0), 0)

    def plain(self) -> float:
        return self.plain_s * self._ratio(0)

    def verify(self, width: int) -> float:
        """Seconds of the target's pass over width + 1 rows: measured, or interpolated from the two nearest measured widths."""
        if width in self.verify_s:
            return self.verify_s[width]
        known = sorted(self.verify_s)
        if len(known) == 1:
            return self.verify_s[known[0]]
        i = min(max(bisect_left(known, width), 1), len(known) - 1)
        (a, b) = known[i - 1 : i + 1]
        slope = (self.verify_s[b] - self.verify_s[a]) / (b - a)
        return max(self.verify_s[a] + slope * (width - a), self.plain_s)

    def widths(self, most: int) -> list[int]:
        """The widths up to `most` with a known cost: measured, or run. Others may cost far more than interpolation says.

        A matrix product in tiles of rows costs as much for 5 rows as for 8; interpolating between 4 and 8 would miss that.
        """
        return sorted(w for w in {*self.verify_s, *self._seen} if 0 < w <= most)

    def round(self, width: int, looked_up: bool = False) -> float:
        """Seconds of a round that verifies `width` drafts, of the drafter or (looked_up) of prompt lookup."""
        return self._passes(width, looked_up) * self._ratio(width, looked_up)

    def cut_round(self, width: int) -> float:
        """Seconds of a round that is cut by confidence to `width` drafts; 0: a plain pass after the draft."""
        if width:
            return self.round(width) + self.cut_s
        return (self.draft_s + max(self.verify(0), self.plain_s)) * self._ratio(1) + self.cut_s

    def _passes(self, width: int, looked_up: bool) -> float:
        """Seconds of a round's passes as measured."""
        return (self.verify(width) if looked_up else self.draft_s + self.verify(width)) if width else self.plain_s

    def _ratio(self, width: int, looked_up: bool = False) -> float:
        if looked_up:
            # Until one ran, as the drafter's rounds.
            near = min(self._looked_up, key=lambda w: abs(w - width), default=None)
            return self._ratio(width) if near is None else self._looked_up[near][0]
        if width in self._seen:
            return self._seen[width][0]
        if width == 0:
            return 1.0
        # A width that never ran gets the ratio of the nearest that did. Before any ran, the smaller of 1 and plain decoding's
        # ratio: rounds correct a cost that is too low, but a cost that is too high might never be tried.
        drafting = [w for w in self._seen if w]
        return self._seen[min(drafting, key=lambda w: abs(w - width))][0] if drafting else min(self._ratio(0), 1.0)

    def reprice(self, width: int, seconds: float, waited: bool) -> None:
        """Update `cut_s` by a round that waited for its drafts while others do not, or the other way round."""
        if not width or self._seen.get(width, (1.0, 0))[1] < 3:
            return
        beyond = seconds - self.round(width) - self.cut_s if waited else self.round(width) - seconds
        # No single round moves it far: there are few such rounds.
        most, self._priced = seconds / 4, self._priced + 1
        self.cut_s = max(self.cut_s + max(1 / (self._priced + 2), 0.05) * min(max(beyond, -most), most), 0.0)

    def refine(self, width: int, seconds: float, usual: bool = True, looked_up: bool = False, waited: bool = False) -> None:
        """Update the cost of a width by a round: a running mean in which an outlier counts for little.

        usual: it ran like most rounds of its width; waited: it was cut by confidence.
        """
        if waited:
            if not width:
                return
            seconds = max(seconds - self.cut_s, seconds / 2)
        table = self._looked_up if looked_up else self._seen
        known = width in table
        (ratio, n), seen = table.get(width, (self._ratio(width, looked_up), 0)), seconds / self._passes(width, looked_up)
        # A round after rounds of another width takes longer, so it can only show that a cost is much too high. Then the costs of
        # all widths are outdated. Rounds of prompt lookup always come between others: they count, except the first of a width,
        # which may compile.
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
        # The first rounds outweigh the measurement, which other work may have disturbed; the fastest counts. A round with drafts
        # that took far longer, perhaps because it compiled, is believed in part: there may be no other.
        if n < 3:
            slow = width and seen > 2 * ratio
            ratio = 2 * ratio if slow else min(ratio, seen) if n else seen
        else:
            ratio += max(1 / (n + 1), 0.1) * (min(max(seen, ratio / 2), ratio * 2) - ratio)
        table[width] = (ratio, n + 1)
        low, high = sorted((ratio, self._ratio(0)))
        if width and not looked_up and n + 1 == _SETTLED and self.keep and high > _OFF * low:
            verify_s = {w: took * ratio for w, took in self.verify_s.items()}
            self.keep(CostModel(self.plain(), self.draft_s * ratio, self.inject_s * ratio, verify_s, self.cut_s))


def first_widths(most: int) -> list[int]:
    """The widths that are measured first, in order."""
    return sorted({w for w in _FIRST if w < most} | {most})
