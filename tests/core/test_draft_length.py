"""The width rule on a simulated machine (a table of costs, an acceptance process with a seed), and what it is told.

Times are simulated: nothing here depends on how busy the machine is.
"""

import json
import math
import os
import random
import time
from types import SimpleNamespace

import pytest

from dflash_mlx.draft_length import cost_store
from dflash_mlx.draft_length import policy as width
from dflash_mlx.draft_length.acceptance import AcceptanceRate, expected_tokens
from dflash_mlx.draft_length.policy import (
    CostModel,
    DraftLengthPolicy,
    FixedDraftLength,
    load_cost_model,
    measure,
    save_cost_model,
)
from dflash_mlx.draft_length.prompt_lookup import PromptLookup

MOST = 15


def logit(p):
    return math.log(p / (1 - p))


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def stairs(w):
    """Kernels that work by 4, 8 and 16 rows."""
    return 6.0 if w < 4 else 9.0 if w < 8 else 14.0


# Milliseconds: one plain token, one drafter pass, a target pass over w + 1 rows.
MACHINES = {
    "flat": (5.3, 3.0, lambda w: 6.1 + 0.7 * w / 15),
    "quantized": (6.0, 3.0, lambda w: 6.0 + 8.3 * w / 15),
    "every row costs one": (2.7, 7.0, lambda w: 2.7 * (1 + 0.55 * w)),
    "every row costs one, cheap drafter": (2.7, 0.5, lambda w: 2.7 * (1 + 0.55 * w)),
    "stairs": (6.0, 1.5, stairs),
}
# Chance that a slot is accepted if those before it are, by tokens so far and slot.
PROCESSES = {
    "hopeless": lambda t, i: 0.03,
    "fair": lambda t, i: 0.75 * 0.97**i,
    "good": lambda t, i: 0.9,
    "bad, then good": lambda t, i: 0.05 if t < 2000 else 0.9,
    "good, then bad": lambda t, i: 0.9 if t < 2000 else 0.05,
}
# What the drafter says it is sure of, by the true chance of a slot in this round.
TELLS = {
    "of the truth": lambda c, chance: sigmoid(logit(c) + chance.gauss(0, 0.5)),
    "of anything": lambda c, chance: chance.random(),
    "of all": lambda c, chance: c**0.1,
    "of the opposite": lambda c, chance: 1 - c,
}
SETTINGS = [(machine, process) for machine in MACHINES for process in PROCESSES]
# Texts in which stretches of earlier text stand again: by tokens so far, the chance that one begins, and that it goes on.
COPIES = {
    "never": lambda t: (0.0, 0.0),
    "seldom": lambda t: (0.02, 0.9),
    "often": lambda t: (0.05, 0.97),
    "in short": lambda t: (0.1, 0.6),
    "long, then short": lambda t: (0.05, 0.97) if t < 1500 else (0.15, 0.5),
    "short, then long": lambda t: (0.15, 0.5) if t < 1500 else (0.05, 0.97),
}


def repeating(process, seed, tokens=4000, prompt=300):
    """A prompt and as many tokens in which stretches stand again."""
    chance, source = random.Random(seed), 0
    ids = [chance.randrange(5000) for _ in range(prompt)]
    while len(ids) < prompt + tokens:
        begins, goes_on = process(len(ids) - prompt)
        if source and chance.random() < goes_on:
            source += 1
        else:
            source = chance.randrange(1, len(ids)) if chance.random() < begins else 0
        ids.append(ids[source] if source else chance.randrange(5000))
    return ids


class Simulation:
    """Runs rounds of the widths that `rule` chooses, until `tokens` are committed; adds up what they take.

    caller: what the consumer takes for a token; only a plain pass after a plain one runs meanwhile.
    text: what is committed, after 300 tokens of prompt, where drafts may be copied from it.
    tells: a drafter that says how sure it is; then a slot's chance differs from round to round round that of the process.
    cut: what a cut takes.
    """

    def __init__(
        self, machine, process, rule, seed, tokens=6000, noise=0.05, inject=0.02, caller=0.0, text=None, tells=None, cut=0.1
    ):
        plain, draft, verify = machine
        chance, lookup, ids = random.Random(seed), PromptLookup(), text[:300] if text else []
        self.seconds, self.switching, self.tried, self.widths, pending, before = 0.0, 0.0, 0.0, [], 0, None
        self.copied, self.confidence_cut, drafts = [], [], random.Random(seed + 1000)
        t, tokens = 0, len(text) - 300 if text else tokens
        while t < tokens:
            w = rule.choose(pending)
            c = rule.prompt_lookup_width(w, lookup.rates(MOST)) if text and lookup.follow(ids) else 0
            accepted, more, late, confidence, confidence_cut, drafted = 0, False, 0.0, None, False, bool(w and not c)
            waits = False
            at = [process(t, i) for i in range(MOST)] if drafted else ()
            if tells and drafted:
                luck = drafts.gauss(0, 1)
                at = [sigmoid(logit(p) + 1.5 * luck + 1.5 * drafts.gauss(0, 1)) for p in at]
                says = [tells(p, drafts) for p in at]
                confidence, confidence_cut = says if rule.wants_confidence else None, rule.cuts_by_confidence
                w = rule.confidence_cut(says) if confidence_cut else w
                # The loop times one round in 64 apart, with the same wait.
                waits = confidence_cut or len(self.widths) % 64 == 1
            right = 0
            while drafted and right < MOST and chance.random() < at[right]:
                right += 1
            passes = verify(c) if c else draft + verify(w) + cut * waits if drafted else plain
            seconds = passes * chance.uniform(1 - noise, 1 + noise)
            if c:
                rest = text[len(ids) :]
                while accepted < min(c, len(rest)) and lookup.draft(c)[accepted] == rest[accepted]:
                    accepted += 1
                self.copied.append((c, accepted))
                w, pending = c, pending + accepted + 1
            elif drafted:
                accepted, more = min(w, right), right > w
                # What the drafter was not given while it was not used.
                late, pending = max(pending - MOST, 0) * inject, accepted + 1
                if getattr(rule, "_trying", False):
                    self.tried += max(seconds + late - (accepted + 1) * plain, 0)
            else:
                pending += 1
            # A plain pass after a drafting round is not enqueued ahead.
            kind = "confidence_cut" if confidence_cut else w
            late += 0.3 if not drafted and not c and before else 0.0
            self.switching += late
            if kind == before == 0:
                seconds = max(seconds - caller, 0.01 * plain)
            self.seconds += seconds + late + caller * (accepted + 1)
            if text:
                ids += text[len(ids) : len(ids) + accepted + 1]
            t += accepted + 1
            self.widths.append(w)
            self.confidence_cut.append(confidence_cut)
            rule.observe(w, accepted, more, seconds + late, kind == before, bool(c), confidence, waits)
            before = kind


def rule_for(machine, off=1.0, plain_off=1.0, cut=0.1):
    """`off`, `plain_off`: how wrong the measured costs of drafting and of plain decoding are; cut: the measured price."""
    plain, draft, verify = machine
    costs = CostModel(plain * plain_off, draft * off, 0.02, {w: verify(w) * off for w in range(1, 16)}, cut)
    return DraftLengthPolicy(MOST, AcceptanceRate(MOST), costs, None)


def best_fixed(machine, process, seeds=(1, 2), **how):
    totals = [[Simulation(machine, process, FixedDraftLength(w), seed, **how).seconds for seed in seeds] for w in range(MOST + 1)]
    return min(sum(runs) / len(seeds) for runs in totals)


@pytest.mark.parametrize("machine,process", SETTINGS)
def test_the_rule_is_within_3_percent_of_the_best_fixed_width(machine, process):
    machine, process = MACHINES[machine], PROCESSES[process]
    runs = [Simulation(machine, process, rule_for(machine), seed) for seed in range(11, 16)]
    mean = sum(run.seconds for run in runs) / len(runs)
    assert mean < 1.03 * best_fixed(machine, process)
    assert sum(run.switching for run in runs) < 0.02 * sum(run.seconds for run in runs)


def test_the_settings_have_zero_best_and_every_kind_of_width_best():
    best = set()
    for machine in MACHINES.values():
        for process in PROCESSES.values():
            totals = [Simulation(machine, process, FixedDraftLength(w), 1, tokens=2000).seconds for w in range(MOST + 1)]
            best.add(totals.index(min(totals)))
    assert 0 in best and 15 in best and len(best) >= 5


@pytest.mark.parametrize("machine", MACHINES)
def test_tries_at_width_zero_cost_less_than_one_percent(machine):
    run = Simulation(MACHINES[machine], PROCESSES["hopeless"], rule_for(MACHINES[machine]), 3, tokens=20000)
    assert run.tried < 0.01 * run.seconds
    assert run.seconds < 1.01 * 20000 * MACHINES[machine][0]


def test_tries_that_keep_losing_become_rarer():
    run = Simulation(MACHINES["flat"], PROCESSES["hopeless"], rule_for(MACHINES["flat"]), 3, tokens=20000)
    tries = [i for i, w in enumerate(run.widths) if w]
    waits = [b - a for a, b in zip(tries, tries[1:], strict=False) if b - a > 1]
    assert len(waits) > 5 and waits[-1] > 3 * waits[0]


@pytest.mark.parametrize("off", [0.6, 1.5])
def test_costs_that_were_measured_wrong_are_corrected_while_running(off):
    for name in ("flat", "quantized"):
        machine, process = MACHINES[name], PROCESSES["fair"]
        mean = sum(Simulation(machine, process, rule_for(machine, off), seed).seconds for seed in range(5, 9)) / 4
        assert mean < 1.06 * best_fixed(machine, process), name


def test_with_a_hopeless_drafter_the_first_64_tokens_pay_for_finding_out():
    for machine in MACHINES.values():
        rule = rule_for(machine)
        first = Simulation(machine, PROCESSES["hopeless"], rule, 4, tokens=64)
        rest = Simulation(machine, PROCESSES["hopeless"], rule, 5, tokens=1000)
        assert rest.seconds < 1000 * machine[0] / 0.97
        assert first.seconds < 2 * 64 * machine[0]


@pytest.mark.parametrize("off", [0.2, 5.0])
def test_a_plain_pass_that_was_measured_wrong_is_seen_first(off):
    # Beside other work a measurement may be far off; a rule that drafts at once would never time a plain pass again.
    plain, draft, verify = MACHINES["every row costs one"]
    costs = CostModel(plain * off, draft, 0.02, {w: verify(w) for w in range(1, 16)})
    rule = DraftLengthPolicy(MOST, AcceptanceRate(MOST), costs, None)
    run = Simulation((plain, draft, verify), PROCESSES["fair"], rule, 3, tokens=300)
    assert run.widths[:2] == [0, 0] and run.seconds < 1.2 * 300 * plain
    assert set(run.widths[-200:]) == {0}


def answers(monkeypatch, machine, process, n, tokens=128, slow=1.0, seed=1, **how):
    """Answers of one drafter, each with a rule of its own; the first four rounds that verify drafts take `slow` times as long."""
    costs, (plain, draft, verify), rounds = rule_for(machine).cost_model, machine, []
    drafter = SimpleNamespace(config=SimpleNamespace(block_size=MOST + 1))
    monkeypatch.setattr(cost_store, "stored_cost_model", lambda *_: costs)

    def slow_at_first(w):
        rounds.append(w)
        return verify(w) * (slow if len(rounds) <= 4 else 1)

    for i in range(n):
        rule = cost_store.draft_length_policy(None, drafter, None)
        yield Simulation((plain, draft, slow_at_first), process, rule, 1000 * seed + i, tokens=tokens, **how)


# As an H100 with a small model: rows cost next to nothing, a round costs 1.6 plain passes; with a quantized one, 2 to 2.2.
HOST_BOUND = {16: (4.6, 1.7, lambda w: 5.9 + 0.2 * w / 15), 4: (5.0, 2.4, lambda w: 7.5 + 1.3 * w / 15)}


@pytest.mark.parametrize("slow", [3, 10, 50])
@pytest.mark.parametrize("bits", HOST_BOUND)
@pytest.mark.parametrize("seed", range(3))
def test_short_answers_do_not_stay_plain_because_the_first_rounds_were_slow(seed, bits, slow, monkeypatch):
    machine, process = HOST_BOUND[bits], PROCESSES["fair"]
    runs = list(answers(monkeypatch, machine, process, 40, slow=slow, seed=seed))
    assert sum(any(run.widths) for run in runs[10:]) == 30
    assert sum(run.seconds for run in runs[10:]) < 1.06 * 30 * best_fixed(machine, process, tokens=128, seeds=range(9))


@pytest.mark.parametrize("machine", MACHINES)
def test_tries_in_short_answers_cost_less_than_one_percent_too(machine, monkeypatch):
    runs = list(answers(monkeypatch, MACHINES[machine], PROCESSES["hopeless"], 150, seed=5))
    assert any(any(run.widths) for run in runs[75:])
    assert sum(run.seconds for run in runs[1:]) < 1.01 * sum(len(run.widths) for run in runs[1:]) * MACHINES[machine][0]


@pytest.mark.parametrize("machine", MACHINES)
def test_after_a_long_plain_text_tries_in_the_next_answer_are_few(machine):
    # Where rows that pend are dear no try is paid for within it, and what is saved grows.
    machine, rule = MACHINES[machine], rule_for(MACHINES[machine])
    Simulation(machine, PROCESSES["hopeless"], rule, 2, tokens=20000)
    then = Simulation(machine, PROCESSES["hopeless"], rule, 3, tokens=100)
    assert then.seconds < 1.2 * 100 * machine[0]


def test_plain_decoding_is_timed_again_while_drafting_gains_little():
    plain, draft, verify = MACHINES["quantized"]
    run = Simulation((plain, draft, verify), PROCESSES["fair"], rule_for((plain, draft, verify)), 3)
    drafting = [i for i, w in enumerate(run.widths) if w]
    plain_rounds = [i for i in range(drafting[0], len(run.widths)) if run.widths[i] == 0]
    assert 5 <= len(plain_rounds) < 0.05 * len(drafting)


@pytest.mark.parametrize("caller", [0.1, 0.3, 0.6, 0.9, 1.5])
@pytest.mark.parametrize("process", ["hopeless", "fair", "good"])
def test_what_the_caller_does_with_a_token_is_weighed(process, caller):
    # Plain decoding runs beside the caller and drafting does not: with a slow enough one the better of the two is another.
    machine, process = MACHINES["quantized"], PROCESSES[process]
    took = caller * machine[0]
    mean = sum(Simulation(machine, process, rule_for(machine), seed, caller=took).seconds for seed in (11, 12, 13)) / 3
    assert mean < 1.03 * best_fixed(machine, process, caller=took)


def test_a_drafter_that_is_always_right_is_used_whatever_part_of_a_pass_the_caller_hides():
    machine = MACHINES["flat"]
    for caller in (0.1, 0.3, 0.6):
        run = Simulation(machine, lambda t, i: 1.0, rule_for(machine), 3, tokens=400, caller=caller * machine[0])
        assert run.widths[-20:] == [15] * 20, caller


def test_drafting_does_not_wait_for_usual_plain_rounds_for_ever():
    rule = rule_for(MACHINES["flat"])
    for _ in range(width._LOOK):
        assert rule.choose() == 0
        rule.observe(0, 0, False, 0.001, False)
    assert rule.choose() > 0


WRONG = [(off, 1.0) for off in (0.2, 0.5, 2.0, 3.0, 5.0)] + [(1.0, off) for off in (0.2, 0.5, 2.0, 3.0)]


@pytest.mark.parametrize("off,plain_off", WRONG)
def test_wrong_measurements_are_found_out(off, plain_off):
    for name in ("flat", "quantized", "stairs"):
        machine, rule = MACHINES[name], rule_for(MACHINES[name], off, plain_off)
        Simulation(machine, PROCESSES["good"], rule, 3, tokens=1300)
        then = Simulation(machine, PROCESSES["good"], rule, 4, tokens=3000)
        assert then.seconds < 1.03 * best_fixed(machine, PROCESSES["good"], tokens=3000), name


@pytest.mark.parametrize("off,plain_off", WRONG)
@pytest.mark.parametrize("machine", MACHINES)
def test_wrong_measurements_cost_less_than_one_percent_where_the_drafter_is_hopeless(machine, off, plain_off):
    machine = MACHINES[machine]
    run = Simulation(machine, PROCESSES["hopeless"], rule_for(machine, off, plain_off), 3, tokens=20000)
    assert run.seconds < 1.01 * 20000 * machine[0]


def test_rounds_that_were_slow_beside_other_work_are_tried_again():
    plain, draft, verify = machine = MACHINES["quantized"]
    rule = rule_for(machine)
    Simulation((plain, 3 * draft, lambda w: 3 * verify(w)), PROCESSES["good"], rule, 3, tokens=400)
    Simulation(machine, PROCESSES["good"], rule, 4, tokens=1500)
    mean = sum(Simulation(machine, PROCESSES["good"], rule, seed).seconds for seed in (5, 6, 7)) / 3
    assert mean < 1.03 * best_fixed(machine, PROCESSES["good"], seeds=(5, 6, 7))


def test_one_slow_plain_pass_does_not_make_drafting_look_good():
    plain, draft, verify = machine = MACHINES["every row costs one"]
    rule = rule_for(machine)
    for seconds in (plain, 50 * plain, plain):
        assert rule.choose() == 0
        rule.observe(0, 0, False, seconds, True)
    assert Simulation(machine, PROCESSES["fair"], rule, 3, tokens=2000).seconds < 1.03 * 2000 * plain


def test_plain_decoding_is_timed_again_whatever_drafting_seems_to_gain():
    plain, draft, verify = machine = MACHINES["every row costs one"]
    rule = rule_for(machine)
    for _ in range(2):
        assert rule.choose() == 0
        rule.observe(0, 0, False, 20 * plain, True)
    # Drafting seems to gain fourfold and loses as much.
    Simulation(machine, PROCESSES["hopeless"], rule, 3, tokens=500)
    then = Simulation(machine, PROCESSES["hopeless"], rule, 4, tokens=2000)
    assert then.seconds < 1.01 * 2000 * plain


def test_plain_decoding_is_timed_again_also_if_every_answer_is_short():
    # Seen five times too slow, as beside other work.
    plain, draft, verify = machine = MACHINES["every row costs one"]
    costs = CostModel(plain, draft, 0.02, {w: verify(w) for w in range(1, 16)}, _seen={0: (5.0, 5)})
    runs = [
        Simulation(
            machine, PROCESSES["fair"], DraftLengthPolicy(MOST, AcceptanceRate(MOST), costs, None), seed, tokens=60
        ).seconds
        for seed in range(60)
    ]
    assert sum(runs[:3]) > 1.2 * 180 * plain and sum(runs[40:]) < 1.01 * 20 * 60 * plain


def test_a_caller_that_becomes_slow_is_noticed():
    machine, took = MACHINES["quantized"], 1.5 * MACHINES["quantized"][0]
    rule = rule_for(machine)
    first = Simulation(machine, PROCESSES["fair"], rule, 3, tokens=1000)
    Simulation(machine, PROCESSES["fair"], rule, 4, tokens=1500, caller=took)
    then = Simulation(machine, PROCESSES["fair"], rule, 5, tokens=2000, caller=took)
    assert sum(w > 0 for w in first.widths) > 200
    assert then.seconds < 1.03 * best_fixed(machine, PROCESSES["fair"], tokens=2000, caller=took)


def test_a_width_of_no_gain_is_tried_only_from_credit():
    # Even if every draft were right, a round would be slower than plain decoding, unless it was measured wrong.
    machine = (10.0, 500.0, lambda w: 10.0 + w)
    run = Simulation(machine, PROCESSES["good"], rule_for(machine), 3, tokens=40000)
    assert 1 <= sum(w > 0 for w in run.widths) < 10 and run.seconds < 1.01 * 40000 * 10.0


def test_pending_rows_count_against_a_try():
    rule = DraftLengthPolicy(
        MOST, AcceptanceRate(MOST), CostModel(1.0, 0.5, 0.1, {w: 1.0 for w in range(1, 16)}, _seen={0: (1.0, 2)}), None
    )
    rule.acceptance.add(0, False)
    for _ in range(40):
        rule.acceptance.add(0, False)
    rule.credit = 5.0
    assert rule.choose(pending=1000) == 0
    rule._rest = 0
    assert rule.choose(pending=1) > 0


def test_costs_are_measured_at_the_first_choice_only():
    calls = []

    def measured():
        calls.append(1)
        return CostModel(1.0, 0.1, 0.0, {1: 1.0, 15: 1.0}, _seen={0: (1.0, 2)})

    rule = DraftLengthPolicy(MOST, AcceptanceRate(MOST), None, measured)
    assert not rule.ready and rule.reason({0: 3}) is None
    assert rule.choose() > 0 and rule.ready
    rule.choose()
    assert calls == [1]


def test_a_wider_pass_that_took_a_little_less_is_noise_that_is_shared_out():
    assert width._level({1: 1.0, 3: 2.0, 7: 4.0, 15: 8.0}) == {1: 1.0, 3: 2.0, 7: 4.0, 15: 8.0}
    assert width._level({15: 5.0, 7: 5.6, 3: 4.4, 1: 4.6}) == {1: 4.5, 3: 4.5, 7: 5.3, 15: 5.3}
    # One that is pooled lies below another.
    assert width._level({1: 4.0, 2: 4.2, 3: 3.6, 4: 4.2}) == pytest.approx({1: 11.8 / 3, 2: 11.8 / 3, 3: 11.8 / 3, 4: 4.2})
    # Far less is no noise.
    assert width._level({1: 10.0, 3: 7.4, 7: 8.0}) == {1: 10.0, 3: 7.4, 7: 8.0}
    # Nor by steps: the last of these took a third less than the first.
    assert width._level({1: 10.0, 3: 7.6, 7: 6.7}) == pytest.approx({1: 8.8, 3: 8.8, 7: 6.7})


def test_measured_costs_are_levelled():
    clock = [0.0]

    def spend(seconds):
        clock[0] += seconds

    verify, both = lambda w: spend({1: 5.0, 3: 4.6}[w]), lambda w, waits: spend(6.0)
    # No time for a third width.
    costs = measure(lambda: spend(4.0), lambda: spend(1.0), lambda n: spend(1e-3), verify, both, 15, clock=lambda: clock[0])
    assert costs.verify_s == pytest.approx({1: 4.8, 3: 4.8})


# Copying


class Fixed(FixedDraftLength):
    """One width of the drafter's rounds and another one wherever there is something to copy."""

    def __init__(self, width, copied):
        self.width, self.copied = width, copied

    def prompt_lookup_width(self, width, rates):
        return self.copied


class Without:
    """A rule that is never asked for copies."""

    wants_confidence = cuts_by_confidence = False

    def __init__(self, rule):
        self.choose, self.observe = rule.choose, rule.observe

    def prompt_lookup_width(self, width, rates):
        return 0


def copying(machine, process, rule, text):
    return Simulation(machine, process, rule, 5, text=text)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("process", ["hopeless", "fair"])
def test_with_copying_the_rule_is_within_3_percent_of_the_best_fixed_widths(machine, process, copies):
    machine, process, text = MACHINES[machine], PROCESSES[process], repeating(COPIES[copies], 1, tokens=3000)
    run = copying(machine, process, rule_for(machine), text)
    widths = [(w, c) for w in (0, 2, 3, 7, 11) for c in (0, 1, 3, 7, 15)]
    best = min(copying(machine, process, Fixed(w, c), text).seconds for w, c in widths)
    assert run.seconds < 1.03 * best
    # Never slower than without it.
    assert run.seconds < 1.01 * copying(machine, process, Without(rule_for(machine)), text).seconds


def test_copying_is_worth_its_name_where_text_stands_again():
    machine, text = MACHINES["quantized"], repeating(COPIES["often"], 1)
    for process, least in (("hopeless", 1.7), ("fair", 1.4)):
        plain = copying(machine, PROCESSES[process], Fixed(0 if process == "hopeless" else 7, 0), text)
        run = copying(machine, PROCESSES[process], rule_for(machine), text)
        assert plain.seconds > least * run.seconds and len(run.copied) > 100


def test_longer_matches_are_copied_further():
    rule = rule_for(MACHINES["quantized"])
    rule.cost_model.refine(0, 6.0)
    rule.cost_model.refine(0, 6.0)
    lookup, found = PromptLookup(), []
    for n in (2, 3, 8, 20, 32):
        lookup.length = n
        found.append(rule.prompt_lookup_width(0, lookup.rates(MOST)))
    assert found == sorted(found) and found[0] < found[-1] == MOST


def test_copied_drafts_take_no_width_that_would_be_compiled_for():
    plain, draft, verify = MACHINES["quantized"]
    costs = CostModel(plain, draft, 0.02, {w: verify(w) for w in (1, 3)}, _seen={0: (1.0, 2)})
    rule = DraftLengthPolicy(MOST, AcceptanceRate(MOST), costs, None)
    for _ in range(40):
        rule.acceptance.add(0, False)
    taken = {rule.prompt_lookup_width(0, [chance] * MOST) for chance in (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99)}
    assert taken <= {0, 1, 3, 7, 15} and len(taken) >= 4


@pytest.mark.parametrize("off", [0.3, 3.0])
def test_wrong_costs_of_copying_are_corrected_by_its_rounds(off):
    plain, draft, verify = machine = MACHINES["every row costs one"]
    costs = CostModel(plain, draft * off, 0.02, {w: verify(w) * off for w in range(1, 16)})
    text = repeating(COPIES["often"], 3)
    run = copying(machine, PROCESSES["hopeless"], DraftLengthPolicy(MOST, AcceptanceRate(MOST), costs, None), text)
    best = min(copying(machine, PROCESSES["hopeless"], Fixed(0, c), text).seconds for c in (0, 1, 3, 5, 7, 11, 15))
    assert run.seconds < (1.03 if off < 1 else 1.25) * best


def test_a_first_copied_round_that_compiles_is_not_taken_for_its_cost():
    rule, rates = rule_for(MACHINES["flat"]), [0.9] * MOST
    for _ in range(2):
        rule.choose()
        rule.observe(0, 0, False, 5.3, True)
    w = rule.prompt_lookup_width(0, rates)
    rule.observe(w, 5, False, 500.0, False, looked_up=True)
    assert rule.prompt_lookup_width(0, rates) == w
    for _ in range(30):
        rule.observe(w, 5, False, 500.0, False, looked_up=True)
    assert rule.cost_model.round(w, looked_up=True) > 100


def test_the_first_copied_rounds_do_not_end_copying_if_they_were_slow():
    rule, rates = rule_for(MACHINES["flat"]), [0.95] * MOST
    for _ in range(2):
        rule.choose()
        rule.observe(0, 0, False, 5.3, True)
    w = rule.prompt_lookup_width(0, rates)
    for _ in range(2):
        rule.observe(w, 5, False, 70.0, False, looked_up=True)
    assert rule.prompt_lookup_width(0, rates) > 0


def test_copying_that_was_slow_beside_other_work_is_taken_up_again_also_if_every_answer_is_short():
    machine, text = MACHINES["quantized"], repeating(COPIES["often"], 1, tokens=128)
    rule, runs = rule_for(machine), []
    rule.cost_model._looked_up = {MOST: (20.0, 5)}
    for _ in range(60):
        before, rule = rule, DraftLengthPolicy(MOST, rule.acceptance, rule.cost_model, None)
        rule.take_up(before)
        runs.append(copying(machine, PROCESSES["hopeless"], rule, text))
    assert not runs[0].copied and runs[-1].copied


@pytest.mark.parametrize("machine", ["every row costs one", "quantized"])
def test_copied_rounds_that_were_slow_beside_other_work_are_taken_up_again(machine):
    plain, draft, verify = machine = MACHINES[machine]
    rule, text = rule_for(machine), repeating(COPIES["often"], 1)
    copying((3 * plain, 3 * draft, lambda w: 3 * verify(w)), PROCESSES["hopeless"], rule, text[:1500])
    copying(machine, PROCESSES["hopeless"], rule, text)
    run = copying(machine, PROCESSES["hopeless"], rule, text)
    assert run.seconds < 1.03 * min(copying(machine, PROCESSES["hopeless"], Fixed(0, c), text).seconds for c in (3, 5, 15))


def test_where_copying_cannot_pay_finding_out_costs_less_than_one_percent():
    # Measured five times too cheap.
    machine = plain, draft, verify = 2.7, 7.0, lambda w: 2.7 * (1 + 1.2 * w)
    for off in (0.2, 1.0):
        costs = CostModel(plain, draft, 0.02, {w: verify(w) * off for w in range(1, 16)})
        text = repeating(COPIES["often"], 2, tokens=20000)
        run = copying(machine, PROCESSES["hopeless"], DraftLengthPolicy(MOST, AcceptanceRate(MOST), costs, None), text)
        assert run.seconds < 1.01 * 20000 * plain and (not run.copied) == (off == 1.0)


def test_at_a_fixed_width_ids_are_copied_where_the_first_is_more_likely_right_than_not():
    assert (
        FixedDraftLength(4).prompt_lookup_width(4, [0.51, 0.1, 0.1, 0.1]) == 4
        and FixedDraftLength(4).prompt_lookup_width(4, [0.49, 0.9, 0.9, 0.9]) == 0
    )


def test_copied_rounds_tell_nothing_of_the_drafter():
    rule = rule_for(MACHINES["flat"])
    before = rule.acceptance.rates(), rule.cost_model.round(7), rule.last
    for _ in range(250):
        rule.observe(7, 7, False, 50.0, True, looked_up=True)
    assert (rule.acceptance.rates(), rule.cost_model.round(7), rule.last) == before
    assert rule.cost_model.round(7, looked_up=True) == pytest.approx(50.0)


def test_plain_decoding_is_timed_again_while_all_is_copied():
    text = list(range(300)) * 60
    rule = rule_for(MACHINES["flat"])
    for _ in range(40):
        rule.acceptance.add(0, False)
    run = copying(MACHINES["flat"], PROCESSES["hopeless"], rule, text)
    assert len(run.copied) > 300 and 4 <= run.widths[5:].count(0) < 0.04 * len(run.widths)


# Cutting: widths by what the drafter is sure of


def cutting(machine, process, tells, rule=rule_for, seeds=range(11, 15), tokens=4000, **how):
    """(seconds of all seeds, the runs)"""
    rule = rule if callable(rule) else (lambda machine, rule=rule: rule)
    runs = [Simulation(machine, process, rule(machine), seed, tokens=tokens, tells=TELLS[tells], **how) for seed in seeds]
    return sum(run.seconds for run in runs), runs


def share_cut(runs):
    return sum(sum(run.confidence_cut) for run in runs) / sum(len(run.confidence_cut) for run in runs)


def best_fixed_of(machine, process, **how):
    widths = (0, 1, 2, 3, 4, 5, 7, 9, 11, 15)
    return min(cutting(machine, process, "of all", lambda _, w=w: FixedDraftLength(w), **how)[0] for w in widths)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("process", ["hopeless", "fair", "good"])
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
        rule.choose()
        rule.observe(0, 0, False, 9.0, True, False, [0.1] * MOST, True)
    assert rule.choose() > 0 and [counts[1] for counts in rule.acceptance.counts] == pytest.approx(seen, rel=0.05)


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
    assert later.choose() > 0 and later.cuts_by_confidence
    assert later.calibration.weights == rule.calibration.weights and later.calibration.weights is not rule.calibration.weights


def test_without_confidences_nothing_is_cut_by_confidence_and_the_slots_decide():
    told = Simulation(MACHINES["quantized"], PROCESSES["fair"], rule_for(MACHINES["quantized"]), 3, tokens=2000)
    assert not any(told.confidence_cut) and sum(w > 0 for w in told.widths) > 300


# CostModel


def test_costs_between_and_beyond_measured_widths_lie_on_a_line():
    costs = CostModel(1.0, 0.5, 0.0, {1: 2.0, 3: 4.0, 7: 4.0})
    assert [costs.verify(w) for w in (1, 2, 3, 5, 7, 11)] == [2.0, 3.0, 4.0, 4.0, 4.0, 4.0]
    assert costs.round(2) == 3.5
    # No pass is cheaper than one row.
    assert CostModel(1.0, 0.5, 0.0, {7: 1.2, 15: 2.0}).verify(1) == 1.0


def test_one_odd_round_moves_a_cost_little_and_many_move_it_all_the_way():
    costs = CostModel(1.0, 0.5, 0.0, {1: 1.5, 3: 3.5})
    for _ in range(50):
        costs.refine(1, 2.0)
    costs.refine(1, 2000.0)
    assert costs.round(1) < 2.3
    for _ in range(200):
        costs.refine(1, 4.0)
    assert costs.round(1) == pytest.approx(4.0, rel=0.01)
    # A width that never ran is as far off as its neighbour.
    assert costs.round(3) == pytest.approx(8.0, rel=0.01)


class Machine:
    """Passes that take a set time on a clock of their own; the first of each kind compiles."""

    def __init__(self, plain, draft, inject, verify, compiles=0.0, cut=0.0):
        self.now, self.calls, self.compiles, self.cut = 0.0, [], compiles, cut
        self.cost_model = {"plain": plain, "draft": draft, "inject": inject}
        self.verify_cost = verify

    def run(self, name, seconds):
        self.now += seconds + (0 if name in self.calls else self.compiles)
        self.calls.append(name)

    def measure(self, most, **options):
        return measure(
            lambda: self.run("plain", self.cost_model["plain"]),
            lambda: self.run("draft", self.cost_model["draft"]),
            lambda n: self.run(("inject", n), self.cost_model["inject"] * n),
            lambda w: self.run(w, self.verify_cost(w)),
            lambda w, waits: self.run(("both", w, waits), self.cost_model["draft"] + self.verify_cost(w) + waits * self.cut),
            most,
            clock=lambda: self.now,
            **options,
        )


def test_a_small_pair_is_measured_at_every_width_without_what_compiling_took():
    machine = Machine(0.003, 0.002, 0.0001, lambda w: 0.003 + 0.001 * w, compiles=0.02)
    costs = machine.measure(7)
    assert (costs.plain_s, costs.draft_s, costs.inject_s) == pytest.approx((0.003, 0.002, 0.0001))
    assert costs.verify_s == pytest.approx({w: 0.003 + 0.001 * w for w in range(1, 8)})
    assert machine.now < 1.3 and costs.measured_in_s == machine.now


def test_compiling_for_half_a_minute_a_shape_is_not_taken_for_a_cost():
    machine = Machine(0.006, 0.003, 0.0001, lambda w: 0.006 + 0.0005 * w, compiles=30.0)
    costs = machine.measure(15)
    assert (costs.plain_s, costs.draft_s) == pytest.approx((0.006, 0.003))
    # Only the widths of the coarse grid are compiled for.
    assert costs.verify_s == pytest.approx({w: 0.006 + 0.0005 * w for w in (1, 3, 7, 15)})


def test_a_machine_that_is_slower_at_times_is_measured_right():
    class Moody(Machine):
        def run(self, name, seconds):
            super().run(name, seconds * (2.5 if int(self.now / 0.15) % 2 else 1))

    costs = Moody(0.0045, 0.0018, 0.0001, lambda w: 0.006 + 0.0001 * w).measure(15)
    assert (costs.plain_s, costs.draft_s) == pytest.approx((0.0045, 0.0018))
    assert costs.verify_s == pytest.approx({w: 0.006 + 0.0001 * w for w in range(1, 16)})


def test_what_a_cut_adds_is_measured():
    machine = Machine(0.003, 0.002, 0.0001, lambda w: 0.003 + 0.001 * w, compiles=0.02, cut=0.0004)
    assert machine.measure(7).cut_s == pytest.approx(0.0004)
    assert Machine(0.003, 0.002, 0.0001, lambda w: 0.003, cut=-0.001).measure(7).cut_s == 0.0


def test_a_large_pair_is_measured_in_about_ten_passes():
    machine = Machine(0.4, 0.4, 0.003, lambda w: 0.1 + 0.1 * w)
    costs = machine.measure(15)
    assert len(machine.calls) <= 12 and len(costs.verify_s) >= 2
    assert costs.round(15) == pytest.approx(0.4 + 1.6)


# The file


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "widths.json"
    monkeypatch.setattr(width, "_cost_file", lambda: path)
    return path


COSTS = CostModel(0.5, 0.25, 0.125, {1: 0.5, 15: 2.0}, 0.0625)


def test_costs_are_kept_for_the_next_process(file):
    assert load_cost_model("a") is None
    save_cost_model("a", COSTS)
    save_cost_model("b", CostModel(1.0, 1.0, 1.0, {1: 1.0}))
    found = load_cost_model("a")
    assert (found.plain_s, found.draft_s, found.inject_s, found.verify_s) == (0.5, 0.25, 0.125, {1: 0.5, 15: 2.0})
    assert found.cut_s == 0.0625
    assert load_cost_model("c") is None and [p.name for p in file.parent.iterdir()] == ["widths.json"]


def test_what_rounds_show_to_be_wrong_is_corrected_for_the_next_process(file):
    machine, rule = MACHINES["quantized"], rule_for(MACHINES["quantized"], off=2.0)
    save_cost_model("a", rule.cost_model)
    Simulation(machine, PROCESSES["good"], rule, 3, tokens=2000)
    found = load_cost_model("a")
    assert found.round(7) == pytest.approx(machine[1] + machine[2](7), rel=0.1) and found.plain_s == pytest.approx(6.0, rel=0.1)


def test_other_work_that_slows_all_passes_corrects_nothing_in_the_file(file):
    plain, draft, verify = MACHINES["quantized"]
    rule = rule_for(MACHINES["quantized"])
    save_cost_model("a", rule.cost_model)
    Simulation((3 * plain, 3 * draft, lambda w: 3 * verify(w)), PROCESSES["good"], rule, 3, tokens=2000)
    assert load_cost_model("a").verify_s == rule.cost_model.verify_s and load_cost_model("a").plain_s == plain


def test_an_old_measurement_is_made_again(file, monkeypatch):
    save_cost_model("a", COSTS)
    now = width.time.time()
    for later, kept in ((0.9, True), (1.1, False), (-1.0, False)):
        monkeypatch.setattr(width.time, "time", lambda later=later: now + later * width._STALE_S)
        assert (load_cost_model("a") is not None) == kept


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        '{"a": 3}',
        '{"a": {}}',
        '{"a": {"saved_at": NOW, "plain_s": 1, "draft_s": 1, "inject_s": 1, "verify_s": [], "cut_s": 0}}',
        '{"a": {"saved_at": NOW, "plain_s": 1, "draft_s": 1, "inject_s": 1, "verify_s": {}, "cut_s": 0}}',
        '{"a": {"saved_at": NOW, "plain_s": -1, "draft_s": 1, "inject_s": 1, "verify_s": {"1": 1}, "cut_s": 0}}',
        '{"a": {"saved_at": NOW, "plain_s": NaN, "draft_s": 1, "inject_s": 1, "verify_s": {"1": 1}, "cut_s": 0}}',
        '{"a": {"saved_at": NOW, "plain_s": 1, "draft_s": "x", "inject_s": 1, "verify_s": {"1": 1}, "cut_s": 0}}',
        '{"a": {"saved_at": NOW, "plain_s": 1, "draft_s": 1, "inject_s": 1, "verify_s": {"w": 1}, "cut_s": 0}}',
        '{"a": {"saved_at": NOW, "plain_s": 1, "draft_s": 1, "inject_s": 1, "verify_s": {"-3": 1, "5": 1}, "cut_s": 0}}',
        '{"a": {"saved_at": NOW, "plain_s": 1, "draft_s": 1, "inject_s": 1, "verify_s": {"1": 1}, "cut_s": -1}}',
        '{"a": {"saved_at": NOW, "plain_s": 1, "draft_s": 1, "inject_s": 1, "verify_s": {"1": 1}}}',
    ],
)
def test_a_broken_file_is_measured_anew_and_rewritten(file, text):
    file.parent.mkdir()
    file.write_text(text.replace("NOW", str(time.time())))
    assert load_cost_model("a") is None
    save_cost_model("a", COSTS)
    assert load_cost_model("a").verify_s == COSTS.verify_s
    file.write_bytes(b"\xff\xfe\x00")
    assert load_cost_model("a") is None


def test_the_file_keeps_the_newest_pairs_only(file):
    for i in range(width._KEPT + 5):
        save_cost_model(str(i), COSTS)
    assert len(json.loads(file.read_text())) == width._KEPT
    assert load_cost_model("4") is None and load_cost_model("5") and load_cost_model(str(width._KEPT + 4))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_directory_that_cannot_be_written_costs_a_measurement_only(tmp_path, monkeypatch):
    tmp_path.chmod(0o500)
    monkeypatch.setattr(width, "_cost_file", lambda: tmp_path / "x" / "widths.json")
    save_cost_model("a", COSTS)
    assert load_cost_model("a") is None


def test_a_file_in_the_way_of_the_directory_costs_a_measurement_only(tmp_path, monkeypatch):
    (tmp_path / "x").write_text("")
    monkeypatch.setattr(width, "_cost_file", lambda: tmp_path / "x" / "widths.json")
    save_cost_model("a", COSTS)
    assert load_cost_model("a") is None


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": {"saved_at": 1%s}}' % ("0" * 400)])
def test_a_file_that_no_reader_survives_is_measured_again(file, text):
    file.parent.mkdir()
    file.write_text(text)
    assert load_cost_model("a") is None
    save_cost_model("a", COSTS)
    assert load_cost_model("a").plain_s == 0.5


def test_a_user_without_a_home_directory_measures_each_time(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(width, "_cost_file", homeless)
    save_cost_model("a", COSTS)
    assert load_cost_model("a") is None


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(file):
    file.mkdir(parents=True)
    save_cost_model("a", COSTS)
    assert load_cost_model("a") is None and [p.name for p in file.parent.iterdir()] == ["widths.json"]


# What is said


def test_the_reason_says_how_often_drafting_was_off_and_what_it_would_cost():
    rule = DraftLengthPolicy(15, AcceptanceRate(15), CostModel(1.0, 1.0, 0.0, {1: 2.0, 15: 8.0}), None)
    assert rule.reason({0: 92, 3: 8}) == (
        "drafting off in 92 % of rounds: 16 rows cost 9.0x one row here; force with --block-size"
    )
    assert rule.reason({0: 999, 3: 1}).startswith("drafting off in 99 %")
    assert rule.reason({0: 9}).startswith("drafting off in 100 %")
    assert rule.reason({15: 10}).startswith("15 of 15 drafts verified in most rounds: 9.0x the cost of one token here, for ")
    assert rule.reason({}) is None and FixedDraftLength(4).reason({4: 3}, {}) is None
    # A share of the rounds that copied nothing.
    assert rule.reason({0: 92, 3: 8, 15: 30}, {15: 30}) == (
        "drafts copied from the text in 30 rounds; apart from them drafting off in 92 % of rounds: 16 rows cost 9.0x one row "
        "here; force with --block-size"
    )
    assert rule.reason({15: 30}, {15: 30}) == "drafts copied from the text in 30 rounds"


def test_the_reason_says_that_the_drafters_confidence_chose_the_widths():
    rule = DraftLengthPolicy(15, AcceptanceRate(15), CostModel(1.0, 1.0, 0.0, {1: 2.0, 15: 8.0}), None)
    rule._rate = 1.375
    assert rule.reason({0: 20, 2: 30, 4: 10}, {}, {0: 10, 2: 30, 4: 10}) == (
        "2.0 of 15 drafts verified on average, as many as the drafter was sure enough of: 1.38x plain decoding expected here"
    )
    # Rounds that were cut by confidence and verified nothing are not plain ones, and a few that were do not make it so.
    assert rule.reason({0: 30, 4: 10}, {}, {0: 20}).startswith("0.0 of 15 drafts verified on average")
    assert rule.reason({0: 90, 2: 10}, {}, {2: 10}).startswith("drafting off in 90 % of rounds")
    assert rule.reason({4: 90, 2: 10}, {}, {2: 10}).startswith("4 of 15 drafts verified in most rounds")
