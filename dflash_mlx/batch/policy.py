"""How many drafts each row of a batch verifies: from the time of earlier rounds and from what each row accepted.

Knows numbers only. For a row that runs alone its own policy chooses (`draft_length.policy`).

    value(w) = tokens(w) / seconds(B, w)        tokens(w): committed tokens of a round of width w, all rows together
                                                seconds(B, w): how long a round of B rows at width w took lately

The width with the largest value is taken; 0 is plain batching. The drafts of a row add time to the round. If they bring less than
half of the tokens that the batch would give in that time, the row does not draft in this round. Seconds that were never measured
are taken from the nearest number of rows. A width that never ran is tried with a few rounds, since the first may have to prepare
kernels, if it would pay at the cost that it has for one row; where other widths cost more than that, so does this one. All rows
draft in the first rounds of a width, with the drafter: only such rounds say what it costs. Later some rows look up or do not
draft. Such mixed rounds should take less time than the others; where they take more (each number of tokens may need kernels of
its own), drafting is charged with it. Drafting is compared with plain rounds: a few come first, and then some now and then while
rows draft.

A request may ask for a width of its own. Such a row drafts in every round; what the others do beside it has costs of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..draft_length.acceptance import expected_tokens
from ..draft_length.cost_model import CostModel, first_widths
from ..draft_length.policy import DraftLengthPolicy, FixedDraftLength

# After this many rounds the second best width is timed again, if its value is at least this share of the best one's. After this
# many rounds a row that does not draft is tried.
_LOOK_AGAIN, _NEAR, _TRY_ROW = 96, 0.8, 24
# The first rounds of a kind, which also is how many plain rounds come before rows may draft. Of so many rounds while rows draft,
# these are plain: the first and the last cannot be timed, as only one of the two starts before the round before it was read.
_FEW, _PLAIN_AGAIN, _PLAIN = 3, 64, 4
# Rounds with which a width is tried, on a CPU and on a GPU. On an H200 the first two at width 15 took 78 ms, later ones 13.
TRIES, TRIES_ON_GPU = 2, 6
# Prompt lookup must promise this many times what the drafter or plain decoding does: its promise is a mean over kinds of text.
_LOOKUP_GAIN = 1.25
# What a plain round loses, in tokens of each of its rows, if one looks up: it is not started before the previous one is read, and
# that one is not either.
_NOT_AHEAD = 0.3
# A width that never ran must gain this much over one that did: its first round may have to prepare kernels.
_NEW = 1.1
# How far one round moves an estimate; how many times the estimate an unusual round counts for at most; the fixed part of a pass
# (reading weights), in rows.
_FOLLOW, _ODD, _FIXED = 0.25, 2.0, 4
# How much of what mixed rounds take too long is remembered after each plain round: their kernels may be ready by now.
_REMEMBER = 0.998


class RoundCosts:
    """Seconds of a round by (rows, width): the relative cost of such a round, times how fast the machine is at present.

    Many rounds of one kind in a row say how fast the machine is. The estimates of other kinds are scaled with it; else kinds that
    ran before the machine had other work would look cheap. The first rounds of a kind, and those just after another kind, say
    what the kind costs. An unusual round counts for little. Of the first few the fastest counts, since other work only adds.

    tries: rounds with which a width is tried.
    """

    def __init__(self, tries: int = TRIES) -> None:
        self.tries = tries
        self.rounds: Counter[tuple[int, int]] = Counter()
        self._pace, self._shares = 1.0, {}
        # By number of rows: the time of mixed rounds, in rounds of that width in which all rows draft.
        self._mixed: dict[int, float] = {}
        # The kind of the last rounds, and their number.
        self._kind, self._in_a_row = None, 0

    def add(self, rows: int, width: int, seconds: float) -> None:
        kind = rows, width
        self._in_a_row = self._in_a_row + 1 if kind == self._kind else 1
        self._kind, self.rounds[kind] = kind, self.rounds[kind] + 1
        off = seconds / (self._pace * self._shares.setdefault(kind, seconds / self._pace))
        moved = off if off < 1 / _ODD else 1 + _FOLLOW * (min(off, _ODD) - 1)
        if self.rounds[kind] <= max(_FEW, self.tries):
            self._shares[kind] *= min(off, 1.0)
        elif self._in_a_row <= _FEW:
            self._shares[kind] *= moved
        else:
            self._pace *= moved
        if not width:
            self._mixed = {b: 1 + _REMEMBER * (times - 1) for b, times in self._mixed.items()}

    def add_mixed(self, rows: int, width: int, seconds: float) -> None:
        """Note a round in which not all rows drafted as many tokens as most of them, `width`."""
        if self.is_tried(width):
            off, known = seconds / self.seconds(rows, width), self._mixed.get(rows, 1.0)
            self._mixed[rows] = known + _FOLLOW * (min(off, _ODD * known) - known)

    def mixed(self, rows: int) -> float:
        """How many times as long drafting rounds take if rows differ; 1 where they take less."""
        near = min(self._mixed, key=lambda b: abs(b - rows), default=rows)
        return max(self._mixed.get(near, 1.0), 1.0)

    def seconds(self, rows: int, width: int) -> float | None:
        """None if no round of this width was ever measured. Never more than for a larger number of rows. If the width was tried
        with some number of rows, numbers with fewer rounds do not count."""
        least = self.tries if self.is_tried(width) else 1
        same = {b: share * self._pace for (b, w), share in self._shares.items() if w == width and self.rounds[b, w] >= least}
        if rows not in same and same:
            near = min(same, key=lambda b: abs(b - rows))
            same[rows] = same[near] * (_FIXED + rows) / (_FIXED + near)
        return min((s for b, s in same.items() if b >= rows), default=None)

    def is_tried(self, width: int) -> bool:
        """Whether what this width costs is known for some number of rows."""
        return any(w == width and n >= self.tries for (_, w), n in self.rounds.items())

    def is_known(self, rows: int, width: int) -> bool:
        """Whether a few rounds of this width ran with as many rows or more. A batch that rows leave need not measure again."""
        return any(w == width and b >= rows and n >= _FEW for (b, w), n in self.rounds.items())


class BatchPolicy:
    """Chooses the rows' widths, round by round. most: the drafter's largest width; costs: from earlier batches."""

    def __init__(self, most: int, costs: RoundCosts | None = None):
        self.most, self.costs = most, costs or RoundCosts()
        # By number of rows with a fixed width, and the sum of these widths.
        self._costs = {(0, 0): self.costs}
        self._rounds = 0

    def plan(self, rows: Sequence[RowPolicy]) -> int:
        """Set each row's width for the next round. Returns: the width that most of them have."""
        free = [row for row in rows if row.is_free and not row.waits]
        for row in rows:
            row.width = 0
        if not free:
            return 0
        self._rounds += 1
        B, widths, costs = len(rows), [0, *first_widths(self.most)], self._costs_with(rows)
        tokens = [expected_tokens(row.own.acceptance.rates()) for row in free]
        seconds, others = self._seconds(costs, B, widths, free[0].own.cost_model), len(rows) - len(free)
        mixed = costs.mixed(B)
        value = {w: (others + sum(t[w] for t in tokens)) / (s * mixed if w else s) for w, s in seconds.items()}
        best = sorted(value, key=value.__getitem__, reverse=True)
        # Plain rounds first: drafting is compared with them. A width that is almost as good is timed again now and then.
        width, second = best[0], best[1] if len(best) > 1 else best[0]
        if self._rounds % _LOOK_AGAIN == 0 and value[second] > _NEAR * value[width]:
            width = second
        elif self._rounds % _PLAIN_AGAIN < _PLAIN:
            width = 0
        is_known, drafting = costs.is_known(B, width), sum(row.is_free for row in rows)
        if width and is_known:
            free = self._worth(free, tokens, width, value[best[0]], (seconds[width] - seconds[0]) / drafting)
            width = width if free else 0
        for row in rows:
            row.price, row.looks_up = value[best[0]] * self._token_s(costs, B, drafting, seconds), is_known
            row.stake = 0.0 if width else _NOT_AHEAD * B
        for row in free:
            row.width = width
        return width

    def _costs_with(self, rows: Sequence[RowPolicy]) -> RoundCosts:
        """The costs of rounds with as many rows of fixed width as here, which draft as much."""
        fixed = [row.own.width for row in rows if not row.is_free]
        return self._costs.setdefault((len(fixed), sum(fixed)), RoundCosts(self.costs.tries))

    @staticmethod
    def _seconds(costs: RoundCosts, B: int, widths: list[int], alone: CostModel | None) -> dict[int, float]:
        """Seconds of a round of B rows by width; only width 0 before a few plain rounds ran. alone: costs of one row's passes."""
        plain = costs.seconds(B, 0)
        if plain is None or not costs.is_known(B, 0):
            return {0: 1.0}
        as_one = {w: max(alone.round(w) / alone.plain(), 1.0) if alone is not None and w else 1.0 for w in widths}
        tried = [w for w in widths if w and costs.is_tried(w)]
        found = {w: costs.seconds(B, w) for w in (0, *tried)}
        for w in (w for w in widths if w not in found):
            near = min(tried, key=lambda other: abs(other - w), default=0)
            found[w] = max(plain, found[near] * as_one[w] / as_one[near]) * (_NEW if tried else 1.0)
        return found

    @staticmethod
    def _token_s(costs: RoundCosts, B: int, drafting: int, seconds: Mapping[int, float]) -> float:
        """Seconds that a verified token adds to a round, without the drafter's pass if rounds of two widths were measured.

        drafting: rows that have a round's width.
        """
        measured = [w for w in seconds if w and costs.seconds(B, w) is not None]
        few, many = min(measured) if len(measured) > 1 else 0, max(measured or seconds)
        return max(seconds[many] - seconds[few], 0.0) / (drafting * (many - few)) if many else 0.0

    @staticmethod
    def _worth(free: list[RowPolicy], tokens: list[list[float]], width: int, rate: float, added_s: float) -> list[RowPolicy]:
        """Rows whose drafts bring at least half of the tokens that their time is worth, and rows that are due for a try."""
        found = []
        for row, expected in zip(free, tokens, strict=True):
            row.idle = 0 if expected[width] - 1 >= rate * added_s / 2 else row.idle + 1
            if row.idle % _TRY_ROW == 0:
                found.append(row)
        return found

    def observe(self, rows: Sequence[RowPolicy], width: int, seconds: float, alike: bool = True) -> None:
        """Note the seconds of a round. width: of all rows whose width is chosen by time if alike, else of most of them."""
        costs = self._costs_with(rows)
        if alike:
            costs.add(len(rows), width, seconds)
        elif width:
            costs.add_mixed(len(rows), width, seconds)


class RowPolicy:
    """A row's policy: its own while the row runs alone, the batch's while it runs with others.

    width: the batch's choice; waits: the row has no first token yet, so it does not draft; idle: rounds since drafting paid.
    price: of verifying one token, in tokens that the batch would give in that time.
    looks_up: whether prompt lookup may draft; not in the rounds that say what plain decoding or the drafter costs.
    stake: what the batch loses, in tokens, if a row looks up.
    """

    def __init__(self, own: DraftLengthPolicy | FixedDraftLength):
        self.own, self.in_company, self.width, self.waits, self.idle, self.price = own, False, 0, True, 0, 0.0
        self.looks_up, self.stake = True, 0.0

    @property
    def is_free(self) -> bool:
        """Whether widths are chosen by time."""
        return isinstance(self.own, DraftLengthPolicy)

    @property
    def ready(self) -> bool:
        return self.in_company or self.own.ready

    @property
    def wants_confidence(self) -> bool:
        return not self.in_company and self.own.wants_confidence

    @property
    def cuts_by_confidence(self) -> bool:
        return not self.in_company and self.own.cuts_by_confidence

    @property
    def plain_s(self) -> float | None:
        return self.own.plain_s

    @property
    def has_measured(self) -> bool:
        return self.own.has_measured

    @property
    def _goes_by_batch(self) -> bool:
        return self.in_company and self.is_free

    def next_length(self, pending: int = 0) -> int:
        if not self._goes_by_batch:
            self.width = self.own.next_length(pending)
        return self.width

    def drafts_needed(self, width: int) -> int | None:
        return width + 1 if self._goes_by_batch else self.own.drafts_needed(width)

    def confidence_cut(self, confidence: Sequence[float]) -> int:
        return self.own.confidence_cut(confidence)

    def prompt_lookup_width(self, width: int, rates: list[float]) -> int:
        """With other rows: the number of looked-up ids that gains most, if that is more than the drafter promises; else 0."""
        if not self._goes_by_batch:
            return self.own.prompt_lookup_width(width, rates)
        if not self.looks_up:
            return 0
        gains = [tokens - self.price * w for w, tokens in enumerate(expected_tokens(rates))]
        best = max(range(len(gains)), key=gains.__getitem__)
        drafted = expected_tokens(self.own.acceptance.rates())[width] - self.price * width
        return best if gains[best] > max(_LOOKUP_GAIN * max(drafted, 1.0), 1.0 + self.stake) else 0

    def observe(
        self, width: int, accepted: int, more: bool, seconds: float, usual: bool, looked_up: bool = False, *about: Any
    ) -> None:
        if not self._goes_by_batch:
            self.own.observe(width, accepted, more, seconds, usual, looked_up, *about)
        elif width and not looked_up:
            # The seconds of a round of many rows say nothing about one row's.
            self.own.acceptance.add(accepted, more)

    def reason(self, *rounds: Mapping[int, int]) -> str | None:
        return self.own.reason(*rounds)
