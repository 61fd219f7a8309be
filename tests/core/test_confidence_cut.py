"""Widths that the drafter's confidence cuts, on a simulated machine."""

from functools import cache

import pytest
from simulation import MACHINES, MOST, PROCESSES, TELLS, Simulation, answers, rule_for

from dflash_mlx.draft_length.acceptance import expected_tokens
from dflash_mlx.draft_length.policy import DraftLengthPolicy, FixedDraftLength

# Cutting: widths by what the drafter is sure of


def cutting(machine, process, tells, rule=rule_for, seeds=range(11, 15), tokens=4000, **how):
    """(seconds of all seeds, the runs)"""
    rule = rule if callable(rule) else (lambda machine, rule=rule: rule)
    runs = [Simulation(machine, process, rule(machine), seed, tokens=tokens, tells=TELLS[tells], **how) for seed in seeds]
    return sum(run.seconds for run in runs), runs


def share_cut(runs):
    return sum(sum(run.confidence_cut) for run in runs) / sum(len(run.confidence_cut) for run in runs)


@cache
def best_fixed_of(machine, process, **how):
    widths = (0, 1, 2, 3, 4, 5, 7, 9, 11, 15)
    return min(cutting(machine, process, "of all", lambda _, w=w: FixedDraftLength(w), **how)[0] for w in widths)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("process", ["hopeless", "fair", "good"])
@pytest.mark.quick(2)
def test_whatever_the_drafter_says_the_rule_is_within_3_percent_of_the_best_fixed_width(machine, process):
    rising = machine not in ("flat", "every row costs one") and process != "hopeless"
    machine, process = MACHINES[machine], PROCESSES[process]
    best = best_fixed_of(machine, process)
    for tells in TELLS:
        seconds, runs = cutting(machine, process, tells)
        assert seconds < 1.03 * best, tells
        assert sum(run.switching for run in runs) < 0.02 * seconds, tells
        if rising and tells in ("of the truth", "of the opposite"):
            # On one of these the best fixed width is 0, and the rule must find out what cutting would make of drafting.
            assert seconds < 0.97 * best or best == best_fixed_of(machine, PROCESSES["hopeless"]), tells


def test_confidences_are_worth_a_tenth_where_rows_cost_and_the_drafter_knows():
    for machine in ("quantized", "stairs"):
        machine, process = MACHINES[machine], PROCESSES["fair"]
        seconds, runs = cutting(machine, process, "of the truth")
        assert 1.1 * seconds < best_fixed_of(machine, process) and share_cut(runs) > 0.9


@pytest.mark.parametrize("process", ["bad, then good", "good, then bad"])
@pytest.mark.quick(1)
def test_a_drafter_that_changes_is_followed_while_cutting(process):
    machine = MACHINES["quantized"]
    seconds, _ = cutting(machine, PROCESSES[process], "of the truth", tokens=6000)
    assert seconds < 0.97 * best_fixed_of(machine, PROCESSES[process], tokens=6000)


def test_confidences_that_say_nothing_are_soon_left_alone():
    for machine, process in (("quantized", "fair"), ("stairs", "fair"), ("flat", "good")):
        assert share_cut(cutting(MACHINES[machine], PROCESSES[process], "of anything")[1]) < 0.1, (machine, process)


def test_where_rows_cost_nothing_no_round_is_cut_by_confidence():
    _, runs = cutting(MACHINES["flat"], PROCESSES["good"], "of the truth", lambda machine: rule_for(machine, cut=0.3), cut=0.3)
    assert share_cut(runs) < 0.03


@pytest.mark.parametrize("measured", [0.0, 1.0, 3.0])
def test_a_cuts_price_that_was_measured_wrong_is_corrected(measured):
    # 1 ms is a tenth of a round: more than narrower passes save where rows cost little, less where they cost much.
    machine = (6.0, 3.0, lambda w: 6.0 + 3 * w / 15)
    rule = rule_for(machine, cut=measured)
    cutting(machine, PROCESSES["fair"], "of the truth", rule, seeds=[3], tokens=8000, cut=1.0)
    assert rule.cost_model.cut_s == pytest.approx(1.0, abs=0.45)


def test_a_cut_that_costs_more_than_it_saves_is_given_up():
    machine = (6.0, 3.0, lambda w: 6.0 + 3 * w / 15)
    rule = rule_for(machine, cut=0.0)
    first = cutting(machine, PROCESSES["fair"], "of the truth", rule, seeds=[3], tokens=3000, cut=2.0)[1]
    then = cutting(machine, PROCESSES["fair"], "of the truth", rule, seeds=[4, 5], cut=2.0)[1]
    assert sum(first[0].confidence_cut) > 20 and share_cut(then) < 0.05


@pytest.mark.parametrize("tokens", [40, 128])
@pytest.mark.parametrize("machine", ["quantized", "stairs"])
def test_a_cut_that_costs_too_much_is_given_up_in_short_answers_too(machine, tokens, monkeypatch):
    # The price was measured as 0.1 ms.
    how = {"tells": TELLS["of the truth"], "cut": 5.0}
    runs = list(answers(monkeypatch, MACHINES[machine], PROCESSES["good"], 60, tokens, **how))
    assert any(any(run.confidence_cut) for run in runs[:10]) and share_cut(runs[45:]) < 0.05


def test_a_cuts_price_that_was_measured_too_high_is_corrected_soon():
    rule = rule_for(MACHINES["quantized"], cut=5.0)
    assert share_cut(cutting(MACHINES["quantized"], PROCESSES["fair"], "of the truth", rule, seeds=[3], cut=0.1)[1]) > 0.5


def test_a_round_that_is_cut_by_confidence_may_verify_nothing():
    machine = MACHINES["every row costs one, cheap drafter"]
    _, runs = cutting(machine, PROCESSES["good"], "of the truth")
    nothing = sum(
        w == 0 for run in runs for w, confidence_cut in zip(run.widths, run.confidence_cut, strict=True) if confidence_cut
    )
    assert nothing > 50


def test_after_a_round_that_verified_nothing_drafting_goes_on_as_before():
    rule = rule_for(MACHINES["quantized"])
    cutting(MACHINES["quantized"], PROCESSES["fair"], "of the truth", rule, seeds=[3])
    seen = [counts[1] for counts in rule.acceptance.counts]
    for _ in range(2):
        rule.next_length()
        rule.observe(0, 0, False, 9.0, True, False, [0.1] * MOST, True)
    assert rule.next_length() > 0 and [counts[1] for counts in rule.acceptance.counts] == pytest.approx(seen, rel=0.05)


@pytest.mark.full
def test_drafting_that_pays_only_with_cutting_is_taken_up():
    # At any fixed width it loses.
    machine, process = (6.0, 3.0, lambda w: 6.0 + 3.0 * w), PROCESSES["good"]
    assert best_fixed_of(machine, process) == best_fixed_of(machine, PROCESSES["hopeless"])
    seconds, runs = cutting(machine, process, "of the truth", tokens=8000)
    assert seconds < 0.97 * 4 * 8000 * 6.0 and share_cut(runs) > 0.3


def test_slots_that_cutting_seldom_reaches_do_not_look_better_than_they_are():
    machine, process, found = MACHINES["quantized"], PROCESSES["good"], []
    for tells in ("of the truth", "of anything"):
        rule = rule_for(machine)
        rule.acceptance.FADE = 0.998
        cutting(machine, process, tells, rule, seeds=[3], tokens=8000)
        found.append(expected_tokens(rule.acceptance.rates())[MOST])
    assert found[0] < 1.04 * found[1], found


def test_some_rounds_are_not_cut_by_confidence_so_that_both_kinds_are_timed():
    _, runs = cutting(MACHINES["quantized"], PROCESSES["fair"], "of the truth")
    for run in runs:
        drafted = [
            confidence_cut for w, confidence_cut in zip(run.widths, run.confidence_cut, strict=True) if w or confidence_cut
        ][100:]
        assert 0.02 < drafted.count(False) / len(drafted) < 0.06


def test_what_confidences_are_worth_is_known_to_the_next_run():
    rule = rule_for(MACHINES["quantized"])
    cutting(MACHINES["quantized"], PROCESSES["fair"], "of the truth", rule, seeds=[3])
    later = DraftLengthPolicy(MOST, rule.acceptance, rule.cost_model, None)
    later.take_up(rule)
    assert later.next_length() > 0 and later.cuts_by_confidence
    assert later.calibration.weights == rule.calibration.weights and later.calibration.weights is not rule.calibration.weights


def test_without_confidences_nothing_is_cut_by_confidence_and_the_slots_decide():
    told = Simulation(MACHINES["quantized"], PROCESSES["fair"], rule_for(MACHINES["quantized"]), 3, tokens=2000)
    assert not any(told.confidence_cut) and sum(w > 0 for w in told.widths) > 300
