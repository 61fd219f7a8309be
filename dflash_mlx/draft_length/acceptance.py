"""How likely each slot of a block is accepted: from what was accepted lately, and from the drafter's own confidence.

Knows numbers only: no tokens, no arrays, no costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Committed tokens of a round by width 0, 1, ... len(rates): the accepted ones and the bonus."""
    total, reach, found = 1.0, 1.0, [1.0]
    for chance in rates:
        reach *= chance
        total += reach
        found.append(total)
    return found


class AcceptanceRate:
    """How often each slot is accepted when those before it are: counts that fade, a slot leaning on the one before it."""

    FADE, LEAN, START = 0.97, 2.0, 0.7

    def __init__(self, slots: int):
        # [accepted, seen] a slot.
        self.counts = [[0.0, 0.0] for _ in range(slots)]

    def rates(self) -> list[float]:
        found, before = [], self.START
        for accepted, seen in self.counts:
            before = (accepted + self.LEAN * before) / (seen + self.LEAN)
            found.append(before)
        return found

    def add(self, accepted: int, more: bool, guesses: Sequence[float] = ()) -> None:
        """One round.

        Args:
          more: all that were verified were accepted, and the drafted token after them equals the target's own too.
          guesses: by slot, the chance in this round; given where the width was chosen by these. Slots that would have been
            reached and were not looked at count by them: else only promising rounds would tell of the last slots.
        """
        judged = min(accepted + 1, len(self.counts))
        for i in range(judged):
            self._count(i, i < accepted or more)
        weight = float(more)
        for i in range(judged, len(guesses)):
            self._count(i, guesses[i], weight)
            weight *= guesses[i]

    def _count(self, slot: int, hit: float, weight: float = 1.0) -> None:
        counts, fade = self.counts[slot], 1 - (1 - self.FADE) * weight
        counts[0], counts[1] = counts[0] * fade + hit * weight, counts[1] * fade + weight

    def forget(self, most: float) -> None:
        """Let old rounds count for no more than `most` new ones."""
        for counts in self.counts:
            if counts[1] > most:
                counts[0], counts[1] = counts[0] * most / counts[1], most


class Calibration:
    """From the drafter's own probability of a draft to its chance of being accepted, learned while running.

        chance = sigmoid(a * logit(confidence) + b * logit(slot's chance) + c)

    Every slot that was judged moves a, b, c by one step of stochastic gradient on the log loss, so old rounds fade. Confidences
    that say nothing drive a to 0 and b to 1, which is the slots' own rates; ones that are too high or upside down are bent
    by c and the sign of a. On greedy answers of the built-in pairs the log loss a slot is 0.48 (smollm2) and 0.49 (tiny); the
    slots' rates alone have 0.67 and 0.61, the bare confidences 0.48 and 0.52.
    """

    RATE, SHORTER, START = 0.05, 0.1, (0.5, 0.5, 0.0)

    def __init__(self) -> None:
        self.weights = list(self.START)

    def rates(self, confidence: Sequence[float], slots: Sequence[float]) -> list[float]:
        """By slot. slots: what `AcceptanceRate.rates` says."""
        a, b, c = self.weights
        return [_sigmoid(a * _logit(p) + b * _logit(q) + c) for p, q in zip(confidence, slots, strict=True)]

    def add(self, confidence: Sequence[float], slots: Sequence[float], accepted: int, more: bool) -> None:
        """One round, as for `AcceptanceRate.add`; `slots`: as they were when it was drafted."""
        a, b, c = self.weights
        for i in range(min(accepted + 1, len(slots))):
            x, y = _logit(confidence[i]), _logit(slots[i])
            # Logits far from 0 move the sum far: their steps are shorter.
            step = self.RATE / (1 + self.SHORTER * (x * x + y * y)) * ((i < accepted or more) - _sigmoid(a * x + b * y + c))
            a, b, c = a + step * x, b + step * y, c + step
        self.weights = [a, b, c]


def _logit(p: float) -> float:
    p = min(max(p, 0.01), 0.99)
    return math.log(p / (1 - p))


def _sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-min(max(z, -30.0), 30.0)))
