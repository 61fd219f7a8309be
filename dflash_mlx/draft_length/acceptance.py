"""How likely each slot of a block is accepted: from recent rounds, and from the drafter's own confidence.

Knows numbers only: no tokens, no arrays, no costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Expected tokens of a round at width 0, 1, ... len(rates): the accepted drafts and the bonus."""
    total, reach, found = 1.0, 1.0, [1.0]
    for chance in rates:
        reach *= chance
        total += reach
        found.append(total)
    return found


class AcceptanceRate:
    """How often each slot is accepted if the slots before it are.

    FADE: weight that older rounds keep at each new one. A slot with few rounds takes part of its rate from the slot before it, as
    if it had been seen LEAN times more with that rate; START: the rate before the first slot.
    """

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
          more: all verified drafts were accepted, and the next draft, which was not verified, equals the bonus.
          guesses: the expected acceptance per slot in this round, if it chose the width. Slots that were not verified then count
            by their guesses; otherwise only promising rounds would count for the last slots.
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
        """Let old rounds weigh no more than `most` new ones."""
        for counts in self.counts:
            if counts[1] > most:
                counts[0], counts[1] = counts[0] * most / counts[1], most


class Calibration:
    """From the drafter's own probability of a draft to its chance of being accepted, learned while running.

        chance = sigmoid(a * logit(confidence) + b * logit(slot's chance) + c)

    Each verified slot is one step of stochastic gradient descent on the log loss, so old rounds fade. If confidences carry no
    information, a goes to 0 and b to 1, which leaves the slots' own rates; c and the sign of a correct confidences that are too
    high or inverted. On greedy answers of the built-in pairs the log loss per slot is 0.48 (smollm2) and 0.49 (tiny); slot rates
    alone give 0.67 and 0.61, confidences alone 0.48 and 0.52.
    """

    RATE, SHORTER, START = 0.05, 0.1, (0.5, 0.5, 0.0)

    def __init__(self) -> None:
        self.weights = list(self.START)

    def rates(self, confidence: Sequence[float], slots: Sequence[float]) -> list[float]:
        """Chance of acceptance per slot. slots: `AcceptanceRate.rates()`."""
        a, b, c = self.weights
        return [_sigmoid(a * _logit(p) + b * _logit(q) + c) for p, q in zip(confidence, slots, strict=True)]

    def add(self, confidence: Sequence[float], slots: Sequence[float], accepted: int, more: bool) -> None:
        """One round, as for `AcceptanceRate.add`; `slots`: as they were when it was drafted."""
        a, b, c = self.weights
        for i in range(min(accepted + 1, len(slots))):
            x, y = _logit(confidence[i]), _logit(slots[i])
            # Large logits change the sum more, so their steps are shorter.
            step = self.RATE / (1 + self.SHORTER * (x * x + y * y)) * ((i < accepted or more) - _sigmoid(a * x + b * y + c))
            a, b, c = a + step * x, b + step * y, c + step
        self.weights = [a, b, c]


def _logit(p: float) -> float:
    p = min(max(p, 0.01), 0.99)
    return math.log(p / (1 - p))


def _sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-min(max(z, -30.0), 30.0)))
