"""How likely slots are accepted: counts that fade, and the drafter's own probabilities, calibrated while running."""

import math
import random

import pytest

from dflash_mlx.draft_length.acceptance import AcceptanceRate, Calibration, expected_tokens


def test_expected_tokens_are_the_accepted_ones_and_the_bonus():
    assert expected_tokens([]) == [1.0]
    assert expected_tokens([0.5, 0.5, 0.0]) == [1.0, 1.5, 1.75, 1.75]


def test_a_slot_is_judged_only_where_those_before_it_were_accepted():
    seen = AcceptanceRate(4)
    seen.add(2, False)
    assert [counts[1] for counts in seen.counts] == [1, 1, 1, 0] and [counts[0] for counts in seen.counts] == [1, 1, 0, 0]
    seen = AcceptanceRate(4)
    seen.add(2, True)
    # The drafted token after the verified ones can be compared with the bonus.
    assert seen.counts[2] == [1, 1] and seen.counts[3] == [0, 0]
    seen = AcceptanceRate(2)
    seen.add(2, False)
    assert seen.counts == [[1, 1], [1, 1]]


def test_chances_follow_a_change_and_far_slots_lean_on_near_ones():
    seen = AcceptanceRate(3)
    for _ in range(200):
        seen.add(3, False)
    assert min(seen.rates()) > 0.95
    for _ in range(60):
        seen.add(0, False)
    first, second, third = seen.rates()
    assert first < 0.3 and second < 0.99 and third > 0.9


def test_slots_that_were_not_looked_at_count_by_what_was_guessed_of_them():
    seen = AcceptanceRate(4)
    seen.add(1, True, [0.9, 0.9, 0.5, 0.25])
    assert seen.counts == [[1, 1], [1, 1], [0.5, 1.0], [0.125, 0.5]]
    # After a refusal there was nothing more to look at.
    seen = AcceptanceRate(4)
    seen.add(1, False, [0.9, 0.9, 0.5, 0.25])
    assert [counts[1] for counts in seen.counts] == [1, 1, 0, 0]


def test_widths_cut_where_drafts_are_poor_do_not_make_slots_look_better_than_they_are():
    # Every other round's drafts are poor; of those only one is verified. Slot 2 is right in (0.9 * 0.9 + 0.4 * 0.4) / 1.3.
    draws, seen = random.Random(3), AcceptanceRate(2)
    seen.FADE = 0.999
    for n in range(20000):
        chance = (0.9, 0.4)[n % 2]
        right = [draws.random() < chance for _ in range(2)]
        width = 2 - n % 2
        accepted = 0 if not right[0] else 1 if width == 1 or not right[1] else 2
        seen.add(accepted, False if width == 2 else right[0] and right[1], [chance] * 2)
    assert seen.rates()[1] == pytest.approx(0.97 / 1.3, abs=0.03)


SAYS = {
    "the truth": lambda c, draws: c,
    "anything": lambda c, draws: draws.random(),
    "too much": lambda c, draws: c**0.1,
    "the opposite": lambda c, draws: 1 - c,
    "always the same": lambda c, draws: 1.0,
}


def losses(says, rounds=1500, slots=6):
    """Mean log loss a judged slot, after the first 300 rounds: calibrated, by the slots' rates alone, and of the truth."""
    draws, calibration, seen = random.Random(1), Calibration(), AcceptanceRate(slots)
    total, judged = [0.0, 0.0, 0.0], 0
    for n in range(rounds):
        truth = [1 / (1 + math.exp(-(1.2 - 0.2 * i + 2 * draws.gauss(0, 1)))) for i in range(slots)]
        confidence, accepted = [says(c, draws) for c in truth], 0
        while accepted < slots and draws.random() < truth[accepted]:
            accepted += 1
        own = seen.rates()
        guesses = calibration.rates(confidence, own)
        assert all(0 < g < 1 for g in guesses)
        for i in range(min(accepted + 1, slots) if n >= 300 else 0):
            for k, q in enumerate((guesses[i], own[i], truth[i])):
                total[k] -= math.log(q if i < accepted else 1 - q)
            judged += 1
        calibration.add(confidence, own, accepted, False)
        seen.add(accepted, False)
    return [loss / judged for loss in total]


@pytest.mark.parametrize("says", SAYS)
def test_calibrated_confidences_are_never_much_worse_than_the_slots_own_chances(says):
    calibrated, own, truth = losses(SAYS[says])
    # 0.02 of it where the same is said of all drafts: the three weights then share what one should learn.
    assert calibrated < own + 0.025
    if says in ("the truth", "the opposite"):
        assert calibrated < truth + 0.15 * (own - truth)
    if says == "too much":
        assert calibrated < truth + 0.5 * (own - truth)


def test_a_calibration_follows_a_drafter_that_is_not_to_be_trusted_any_more():
    calibration = Calibration()
    for _ in range(200):
        calibration.add([0.95], [0.5], 1, False)
        calibration.add([0.05], [0.5], 0, False)
    assert calibration.rates([0.95], [0.5])[0] > 0.9 > 0.1 > calibration.rates([0.05], [0.5])[0]
    for n in range(600):
        calibration.add([0.95 if n % 3 else 0.05], [0.5], n % 2, False)
    assert all(0.35 < calibration.rates([p], [0.5])[0] < 0.65 for p in (0.05, 0.95))
