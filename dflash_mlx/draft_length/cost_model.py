"""What a pass costs: the measured seconds of each kind, corrected by what rounds really take. Knows numbers only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

# Widths that are measured first (2, 4, 8, ... rows); the others as far as time allows.
_FIRST = (1, 3, 7, 15, 31)
# Usual rounds of one width after which the kept costs are corrected, if rounds cost so much more or less of plain decoding.
_SETTLED, _OFF = 8, 1.5


class NotYet(Enum):
    """Why there are no costs yet: MORE passes are to be measured between tokens, or LATER, behind the answer."""

    MORE, LATER = "more", "later"


@dataclass
class CostModel:
    """Seconds that passes take here.

    plain_s: one token of plain decoding; draft_s: one drafter pass over its block; inject_s: the drafter's keys and values of
    one pending row; verify_s: by width, one target pass over the anchor and so many drafted tokens, until its outcome is read;
    cut_s: what waiting for the drafts in between, and reading how sure the drafter is of them, adds to a round.
    All come from one measurement; `refine` then follows what rounds really take. What the caller does while a plain pass runs
    hides that much of the pass, so plain decoding may come to cost less than its passes. keep: writes such a model where the
    next process finds it, if anything does.
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
    keep: Callable[[CostModel], object] | None = field(default=None, repr=False, compare=False)
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

    def widths(self, most: int) -> list[int]:
        """Those up to `most` whose cost is known: they were measured, or ran. What lies between may be dear.

        Of products by tiles of rows, 5 rows cost what 8 do; a line between 4 and 8 would say half of that.
        """
        return sorted(w for w in {*self.verify_s, *self._seen} if 0 < w <= most)

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
        if width and not looked_up and n + 1 == _SETTLED and self.keep and high > _OFF * low:
            verify_s = {w: took * ratio for w, took in self.verify_s.items()}
            self.keep(CostModel(self.plain(), self.draft_s * ratio, self.inject_s * ratio, verify_s, self.cut_s))


def first_widths(most: int) -> list[int]:
    """The widths that are measured first, in order."""
    return sorted({w for w in _FIRST if w < most} | {most})
