"""How many drafted tokens to verify next, from the measured costs of passes and the acceptance so far.

Knows numbers only. Runs no model, reads no file and sees no token.

Each round takes the width w and the draft source with the most committed tokens per second; 0 is plain decoding. Only widths with
a measured cost are considered, at first 1, 3, 7 and 15: with the anchor, row counts that suit a chip (see `CostModel.widths`).

    value(w) = expected(w) / round_s(w)        expected(w) = 1 + p1 + p1 p2 + ... + p1 ... pw
    value(0) = 1 / plain_s                     p_i: chance that slot i is accepted if those before it are

Drafts come from the drafter, or from the text by prompt lookup, which needs no drafter pass.

A round may also be cut by confidence: the host waits for the drafts, reads the drafter's confidence in each, and verifies the w
with the largest expected(w) - rate * round_s(w), 0 included; rate: recent tokens per second. The extra wait is measured too, and
rounds are cut only while shorter passes save more than it costs.

The target's tokens do not depend on which drafts are verified, so a choice of width cannot bias the output. Where drafts are
sampled, widths are fixed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps

from .acceptance import AcceptanceRate, Calibration, expected_tokens
from .cost_model import CostModel, NotYet, first_widths

# Shares of the time at width 0 that may go to trying drafts again, and to keeping the drafter's context up to date.
_TRY_SHARE, _CONTEXT_SHARE = 0.006, 0.004
# Factors of plain decoding's rate: start drafting above the first, and stop below the second.
_LEAVE, _STAY = 1.03, 0.99
# Prompt lookup must promise this many times plain decoding's rate. Passes do not overlap before and after its block, and its
# expected acceptance is a mean over kinds of text (at 1.1, chat lost 8 % on an H100 where a block cost 5 plain passes).
_LOOKUP_GAIN = 1.25
# Tokens that the first try of drafting may cost.
_FIRST_TRY_TOKENS = 2.5
# Rounds in which drafting must earn back the injection of pending rows.
_PAYBACK_ROUNDS = 32
# Acceptance to hope for in a slot that has not been tried for long.
_HOPE = 0.98
# Rounds of width 0 before the next choice.
_REST = 8
# Plain decoding is timed again after this many drafting rounds (twice as many if the gain exceeds 2), for this many rounds.
_LOOK_AGAIN, _LOOK = 200, 5
# Cutting by confidence must promise this factor. One in _BLIND rounds is not cut, so that both kinds are timed; where none is
# cut, one in _ASK is asked for confidences. Rounds of each kind to know before they are trusted: _ENOUGH.
_CUT_GAIN, _BLIND, _ASK, _ENOUGH = 1.02, 32, 4, 16
# Weight of older rounds in the comparison of both kinds, per round.
_CUT_FADE = 0.97


class FixedDraftLength:
    """The same width in every round, whatever the drafter's confidence."""

    ready, wants_confidence, cuts_by_confidence, plain_s, has_measured = True, False, False, None, False

    def __init__(self, width: int):
        self.width = width

    def next_length(self, pending: int = 0) -> int:
        return self.width

    def drafts_needed(self, width: int) -> int | None:
        """All: `rounds` shows each of them, also where a round has room for fewer."""
        return None

    def prompt_lookup_width(self, width: int, rates: list[float]) -> int:
        """The whole width if the first id is more likely right than wrong, else 0."""
        return self.width if rates[0] > 0.5 else 0

    def observe(self, *_: object, **__: object) -> None:
        pass

    def reason(self, *rounds: Mapping[int, int]) -> str | None:
        return None


def _locked(step: Callable) -> Callable:
    @wraps(step)
    def locked(self, *args, **kwargs):
        with self._lock:
            return step(self, *args, **kwargs)

    return locked


class DraftLengthPolicy:
    """Takes the width with the highest value, and at width 0 tries drafting again from time to time.

    Tries are paid from a credit, a small share of the time spent at width 0. A try that gains pays for the next one, so a
    drafter that gets better is used at once, and a bad one is tried less and less often.

    Args:
      most: the largest width; measure: runs a piece of the measurement, called for each round until there are costs.
      lock: held during each step; the policies of one pair share it with their cost model.
    """

    def __init__(
        self,
        most: int,
        acceptance: AcceptanceRate,
        costs: CostModel | None,
        measure: Callable[[], CostModel | NotYet],
        lock: threading.RLock | None = None,
    ):
        self.most, self.acceptance, self.cost_model, self._measure = most, acceptance, costs, measure
        self._lock = lock or threading.RLock()
        # _later: measuring waits for the end of the answer; _is_slowed: it slowed this run; has_measured: it ran in it.
        self._later = self._is_slowed = self.has_measured = False
        self.share = _TRY_SHARE
        self.credit: float | None = None
        # last: the last round's width; _trying: the next round's number in a try, 0 if it is not in one.
        self.last, self._trying, self._rest = 0, 0, 0
        # Whether plain rounds add to the credit.
        self._saves = True
        # Rounds of width 0 since plain decoding was last timed.
        self._plain = 0
        # Offers of prompt lookup that were declined since its costs were last forgotten, and after how many they are forgotten.
        self._declined, self._patience = 0, _LOOK_AGAIN
        # For how many more offers that are no better than the last declined one the answer stays no.
        self._lookup_rest, self._declined_at = 0, 0.0
        self.calibration = Calibration()
        # cuts_by_confidence: whether to cut the round that was chosen last; _cutting: such rounds in general. Of the drafter's
        # rounds: how many there were, and of those with confidences how many, what they promised as (tokens, seconds) at the
        # widths that a cut would take, and as tokens by fixed width.
        self.cuts_by_confidence, self._cutting, self._drafted, self._asked = False, False, 0, 0
        self._cut_sums, self._fixed = (0.0, 0.0), [0.0] * (most + 1)
        # Recent tokens per second.
        self._rate = 0.0

    def take_up(self, other: DraftLengthPolicy) -> None:
        """Continue with another run's credit, calibration and counts: a single answer may be too short to save for a try, or to
        reach a round that is not cut by confidence."""
        self.credit, self.share = other.credit, other.share
        self.calibration.weights = list(other.calibration.weights)
        self._cut_sums, self._fixed, self._asked = other._cut_sums, list(other._fixed), other._asked
        self._drafted, self._declined, self._patience = other._drafted, other._declined, other._patience

    @property
    def ready(self) -> bool:
        """Whether the next choice runs no measurement."""
        return self.cost_model is not None or self._later

    @property
    def plain_s(self) -> float | None:
        """Seconds of one token of plain decoding; None: not measured yet, or measured during this run, which that slowed."""
        return None if self._is_slowed or self.cost_model is None else self.cost_model.plain()

    @_locked
    def next_length(self, pending: int = 0) -> int:
        """The next round's width. pending: rows that the drafter has to inject before it can draft."""
        if self.cost_model is None:
            found = self._measure()
            if isinstance(found, NotYet):
                self._later, self._is_slowed = found is NotYet.LATER, True
                return 0
            self.cost_model, self.has_measured = found, self._is_slowed
        costs, plain_s = self.cost_model, self.cost_model.plain()
        self.cuts_by_confidence = False
        if self.credit is None:
            # A pair that never drafted gets one cheap try at once, or saves for it if its round is expensive.
            self.credit = 0.0 if any(seen for _, seen in self.acceptance.counts) else _FIRST_TRY_TOKENS * plain_s
        if self._rest or self._looks:
            return 0
        edge = self._edge
        self._cutting = edge > 1
        # Where injection is expensive, drafting again must pay for the pending rows.
        inject_s = pending * costs.inject_s if costs.inject_s > _CONTEXT_SHARE * plain_s else 0.0
        rounds_s = {w: costs.round(w) for w in costs.widths(self.most)}
        tokens = expected_tokens(self.acceptance.rates())
        late_s = inject_s / _PAYBACK_ROUNDS if self.last == 0 else 0.0
        best = max(rounds_s, key=lambda w: tokens[w] / (rounds_s[w] + late_s))
        gain = edge * tokens[best] / (rounds_s[best] + late_s) * plain_s
        self._rate = max(gain, 1.0) / plain_s
        tried, self._trying = self._trying, 0
        if gain > (_LEAVE if self.last == 0 else _STAY):
            if self._looks_again(gain):
                return 0
            self.cuts_by_confidence = self._cutting and self._drafted % _BLIND < _BLIND - 1
            return best
        if tried == 1 and not costs.has_seen_drafting:
            # The first try has two rounds: the second shows the usual cost.
            self._trying = 2
            return self.last
        # A try takes the width that loses least, among those with half of the best possible gain or more. If no width could
        # gain, a try can only show that a cost is wrong, and any width does that.
        hopes = expected_tokens([max(p, _HOPE) for p in self.acceptance.rates()])
        gains = {w: hopes[w] / rounds_s[w] * plain_s - 1 for w in rounds_s}
        least = max(gains.values()) / 2 if max(gains.values()) > _LEAVE - 1 else -1.0
        loss, best = min((rounds_s[w] + inject_s - tokens[w] * plain_s, w) for w in gains if gains[w] >= least)
        if self.credit < loss:
            # If pending rows make a try too expensive, as in a long text, stop saving: many tries would follow at once.
            self._rest, self._saves = _REST, self.credit < loss - inject_s + _FIRST_TRY_TOKENS * plain_s
            return 0
        self._trying, self._saves = 1, True
        return best

    @property
    def wants_confidence(self) -> bool:
        """Whether to ask for the drafter's confidences in the next round."""
        return self.cuts_by_confidence or self.last == 0 or self._asked < _ENOUGH or self._drafted % _ASK == 0

    def drafts_needed(self, width: int) -> int | None:
        """How many drafts the drafter's head computes if `width` are verified: one more, which shows whether a wider round would
        have accepted it. None: all, because their confidences are wanted."""
        return None if self.wants_confidence else width + 1

    @_locked
    def confidence_cut(self, confidence: Sequence[float]) -> int:
        """How many drafts of a round to verify, 0 included. confidence: by slot, the drafter's probability."""
        return self._cut(expected_tokens(self.calibration.rates(confidence, self.acceptance.rates())))

    def _cut(self, tokens: list[float]) -> int:
        costs = self.cost_model
        return max([0, *costs.widths(len(tokens) - 1)], key=lambda w: tokens[w] - self._rate * costs.cut_round(w))

    @property
    def _edge(self) -> float:
        """Gain in tokens per second of rounds cut by confidence over the best fixed width; 1 if it is too small."""
        if self._asked < _ENOUGH:
            return 1.0
        # A round of width 0 has one token, so this is the number of rounds.
        rounds, fixed = self._fixed[0], self.cost_model.widths(self.most)
        edge = self._cut_sums[0] / self._cut_sums[1] / max(self._fixed[w] / (rounds * self.cost_model.round(w)) for w in fixed)
        return edge if edge > _CUT_GAIN else 1.0

    def _judge(self, confidence: Sequence[float], accepted: int, more: bool, waited: bool) -> None:
        """Learn from a round of the drafter with known confidences."""
        slots, costs = self.acceptance.rates(), self.cost_model
        guesses = self.calibration.rates(confidence, slots)
        tokens = expected_tokens(guesses)
        w, kept = self._cut(tokens), _CUT_FADE
        self._cut_sums = (self._cut_sums[0] * kept + tokens[w], self._cut_sums[1] * kept + costs.cut_round(w))
        self._fixed = [total * kept + n for total, n in zip(self._fixed, tokens, strict=True)]
        self._asked += 1
        self.calibration.add(confidence, slots, accepted, more)
        self.acceptance.add(accepted, more, guesses if waited else ())

    @_locked
    def prompt_lookup_width(self, width: int, rates: list[float]) -> int:
        """How many copied ids to verify instead of the chosen round of `width`; 0 if that is not better.

        rates: per slot, from `PromptLookup.rates`.
        """
        costs = self.cost_model
        if costs is None or self._looks:
            return 0
        if self._lookup_rest and rates[0] <= self._declined_at:
            # Plain decoding has no time to weigh this at every token; a better offer is considered at once.
            self._lookup_rest -= 1
            return 0
        # Only these widths: a pass of a new shape may have to be compiled.
        tokens, widths = expected_tokens(rates), {*costs.verify_s, *first_widths(len(rates))}
        gain, best = max((tokens[w] / costs.round(w, looked_up=True), w) for w in widths if w < len(tokens))
        plain_s = costs.plain()
        chosen = expected_tokens(self.acceptance.rates())[width] / costs.round(width) if width else 0.0
        chosen *= self._edge if self.cuts_by_confidence else 1.0
        if gain > max(_LEAVE * chosen, _LOOKUP_GAIN / plain_s):
            return 0 if self._looks_again(gain * plain_s) else best
        self._lookup_rest, self._declined_at = _REST, rates[0]
        self._declined += costs.has_seen_prompt_lookup
        if self._declined == self._patience:
            # The measured costs may be from a busy moment, and nothing else corrects them.
            self._declined, self._patience = 0, 2 * self._patience
            costs.forget_prompt_lookup()
        return 0

    @property
    def _looks(self) -> bool:
        """Whether plain decoding must be timed now, in real rounds.

        It comes first, because other work may have disturbed the measurement, and nothing else corrects that.
        """
        return not self.cost_model.has_seen_plain and self._plain < _LOOK

    def _looks_again(self, gain: float) -> bool:
        """Whether to time plain decoding again. gain: tokens per token of plain decoding."""
        if self.cost_model.rounds_since_plain < _LOOK_AGAIN * (2 if gain > 2 else 1):
            return False
        self.cost_model.rounds_since_plain, self._plain = 0, 0
        self.cost_model.doubt_plain()
        return True

    @_locked
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
        """Learn from a round: its time, and whether it ran like most rounds of its width (usual).

        accepted, more: as for `AcceptanceRate.add`; confidence: the drafter's, if asked for; waited: whether the host waited
        for the drafts, to cut or to time them.
        """
        if self.cost_model is None:
            return
        drafted = bool(width) or waited
        # A try is charged at most its expected time: a first round may take far longer.
        expected_s = self.cost_model.round(width)
        if drafted and not looked_up and waited != self._cutting:
            self.cost_model.reprice(width, seconds, waited)
        else:
            self.cost_model.refine(width, seconds, usual, looked_up, waited)
        self.cost_model.rounds_since_plain += drafted
        if looked_up:
            # This round may have taken the place of a try.
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
                # The time for pending rows is not lost: the drafter needs them as context.
                lost = min(seconds, expected_s) - (accepted + 1) * self.cost_model.plain()
                self.credit -= lost
                if self.last == 0 or lost <= 0:
                    self.share = max(self.share / 2, _TRY_SHARE / 4) if lost > 0 else _TRY_SHARE
        else:
            self.credit += self._saves * self.share * self.cost_model.plain()
            self._rest, self._plain = max(self._rest - 1, 0), self._plain + 1
        # A round that was cut to width 0 counts as drafting.
        self.last = width or int(drafted)

    @_locked
    def reason(
        self,
        widths: Mapping[int, int],
        looked_up: Mapping[int, int] | None = None,
        confidence_cut: Mapping[int, int] | None = None,
    ) -> str | None:
        """One sentence on the rounds of a run by width; None if this policy chose none.

        looked_up: those with drafts from the text among them; confidence_cut: those that were cut by confidence.
        """
        return _reason(self, widths, looked_up or {}, confidence_cut or {})


def _reason(
    policy: DraftLengthPolicy, widths: Mapping[int, int], looked_up: Mapping[int, int], confidence_cut: Mapping[int, int]
) -> str | None:
    if looked_up and policy.cost_model is not None:
        own = {w: n - looked_up.get(w, 0) for w, n in widths.items() if n > looked_up.get(w, 0)}
        # What follows is of the others alone.
        return "; apart from them ".join(
            filter(
                None,
                [f"drafts copied from the text in {sum(looked_up.values())} rounds", _reason(policy, own, {}, confidence_cut)],
            )
        )
    rounds = sum(widths.values())
    if policy.cost_model is None or not rounds:
        return None
    plain_s, off = policy.cost_model.plain(), widths.get(0, 0) - confidence_cut.get(0, 0)
    if 2 * off >= rounds:
        # All but a few is not all.
        share = f"{min(99, round(100 * off / rounds))} % of passes checked no drafts"
        most, cost = "no pass checked drafts" if off == rounds else share, policy.cost_model.round(policy.most) / plain_s
        return f"{most}: checking {policy.most} takes {cost:.1f} times as long as one token here; --block-size forces it"
    if 2 * sum(confidence_cut.values()) >= rounds - off:
        mean = sum(w * n for w, n in confidence_cut.items()) / sum(confidence_cut.values())
        text = f"{mean:.1f} of {policy.most} drafts verified on average, as many as the drafter was sure enough of"
        return f"{text}: {policy._rate * plain_s:.2f}x plain decoding expected here"
    width = max((w for w in widths if w), key=widths.__getitem__)
    cost, kept = policy.cost_model.round(width) / plain_s, expected_tokens(policy.acceptance.rates())[width]
    most = f"{width} of {policy.most} drafts verified in most rounds"
    return f"{most}: {cost:.1f}x the cost of one token here, for {kept:.1f} tokens"


class DraftLengthHistory:
    """What the runs of one pair have learned. The next run's policy continues with it. Safe for two generators at once.

    Policies of one history share its cost model and its lock. So two generators measure once, and each round of one is a whole
    step for the other.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._last: DraftLengthPolicy | None = None
        self._costs: CostModel | None = None

    def next_policy(self, most: int, measure: Callable[[], CostModel | NotYet]) -> DraftLengthPolicy:
        """The policy of a new run. most: the largest width; measure: called until it gives costs, once for all policies."""
        with self._lock:
            known, acceptance = self._last, AcceptanceRate(most)
            if known is not None:
                acceptance.counts = [list(counts) for counts in known.acceptance.counts]
                acceptance.forget(4)
            policy = DraftLengthPolicy(most, acceptance, self._costs, partial(self.take, measure), self._lock)
            if known is not None:
                policy.take_up(known)
            self._last = policy
            return policy

    def take(self, measure: Callable[[], CostModel | NotYet]) -> CostModel | NotYet:
        """Run a part of the measurement, unless the costs are there."""
        with self._lock:
            found = self._costs or measure()
            if isinstance(found, CostModel):
                self._costs = found
            return found
