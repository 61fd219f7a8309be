"""What passes cost: corrected by rounds, timed by turns, kept on disk."""

import itertools
import json
import os
import platform
import threading
import time
import weakref
from pathlib import Path

import mlx.nn as nn
import pytest
from kit import greedy_ids, ids_of, run, tiny_drafter, tiny_target
from simulation import MACHINES, PROCESSES, Simulation, rule_for

from dflash_mlx import machine
from dflash_mlx.draft_length import cost_store, measure
from dflash_mlx.draft_length.cost_model import CostModel, NotYet
from dflash_mlx.draft_length.cost_store import load_cost_model, save_cost_model
from dflash_mlx.draft_length.policy import DraftLengthHistory
from dflash_mlx.pair import DFlashPair


def time_by_turns(*passes, **options):
    return measure.drained(measure.turns(*passes, **options))


def test_a_wider_pass_that_took_a_little_less_is_noise_that_is_shared_out():
    assert measure._level({1: 1.0, 3: 2.0, 7: 4.0, 15: 8.0}) == {1: 1.0, 3: 2.0, 7: 4.0, 15: 8.0}
    assert measure._level({15: 5.0, 7: 5.6, 3: 4.4, 1: 4.6}) == {1: 4.5, 3: 4.5, 7: 5.3, 15: 5.3}
    # One that is pooled lies below another.
    assert measure._level({1: 4.0, 2: 4.2, 3: 3.6, 4: 4.2}) == pytest.approx({1: 11.8 / 3, 2: 11.8 / 3, 3: 11.8 / 3, 4: 4.2})
    # Far less is no noise.
    assert measure._level({1: 10.0, 3: 7.4, 7: 8.0}) == {1: 10.0, 3: 7.4, 7: 8.0}
    # Nor by steps: the last of these took a third less than the first.
    assert measure._level({1: 10.0, 3: 7.6, 7: 6.7}) == pytest.approx({1: 8.8, 3: 8.8, 7: 6.7})


def test_measured_costs_are_levelled():
    clock = [0.0]

    def spend(seconds):
        clock[0] += seconds

    verify, both = lambda w: spend({1: 5.0, 3: 4.6}[w]), lambda w, waits: spend(6.0)
    # No time for a third width.
    costs = time_by_turns(lambda: spend(4.0), lambda: spend(1.0), lambda n: spend(1e-3), verify, both, 15, clock=lambda: clock[0])
    assert costs.verify_s == pytest.approx({1: 4.8, 3: 4.8})


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
        self.seconds = {"plain": plain, "draft": draft, "inject": inject}
        self.verify_cost = verify

    def run(self, name, seconds):
        self.now += seconds + (0 if name in self.calls else self.compiles)
        self.calls.append(name)

    def measure(self, most, **options):
        return time_by_turns(*self.passes(), most, clock=lambda: self.now, **options)

    def turns(self, most):
        return measure.turns(*self.passes(), most, clock=lambda: self.now)

    def passes(self):
        return (
            lambda: self.run("plain", self.seconds["plain"]),
            lambda: self.run("draft", self.seconds["draft"]),
            lambda n: self.run(("inject", n), self.seconds["inject"] * n),
            lambda w: self.run(w, self.verify_cost(w)),
            lambda w, waits: self.run(("both", w, waits), self.seconds["draft"] + self.verify_cost(w) + waits * self.cut),
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


@pytest.mark.parametrize("stalled", [("plain", 1), (1, 1), (3, 1)])
def test_a_stall_of_a_minute_leaves_no_width_unmeasured(stalled):
    class Stalling(Machine):
        def run(self, name, seconds):
            super().run(name, seconds + 60.0 * ((name, self.calls.count(name)) == stalled))

    costs = Stalling(0.006, 0.003, 0.0001, lambda w: 0.006 + 0.0005 * w).measure(15)
    assert costs.verify_s == pytest.approx({w: 0.006 + 0.0005 * w for w in (1, 3, 7, 15)})


def test_a_run_says_that_passes_were_timed_between_its_tokens():
    costs, answers = CostModel(1.0, 0.1, 0.0, {1: 1.0, 7: 1.0}), [NotYet.MORE]
    history = DraftLengthHistory()
    first = history.next_policy(7, lambda: answers.pop() if answers else costs)
    said = []
    for _ in range(2):
        first.next_length()
        said.append((first.has_measured, first.plain_s))
    # Until costs are there, nothing was found; the runs after it are as fast as they can be.
    assert said == [(False, None), (True, None)]
    second = history.next_policy(7, lambda: costs)
    second.next_length()
    assert (second.has_measured, second.plain_s) == (False, 1.0)


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
    path = tmp_path / "deep" / "cost_models.json"
    monkeypatch.setattr(cost_store._records, "name", str(path))
    return path


COSTS = CostModel(0.5, 0.25, 0.125, {1: 0.5, 15: 2.0}, 0.0625)


def test_costs_are_kept_for_the_next_process(file):
    assert load_cost_model("a") is None
    save_cost_model("a", COSTS)
    save_cost_model("b", CostModel(1.0, 1.0, 1.0, {1: 1.0}))
    found = load_cost_model("a")
    assert (found.plain_s, found.draft_s, found.inject_s, found.verify_s) == (0.5, 0.25, 0.125, {1: 0.5, 15: 2.0})
    assert found.cut_s == 0.0625
    assert load_cost_model("c") is None and [p.name for p in file.parent.iterdir()] == ["cost_models.json"]


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
    now = cost_store.time.time()
    for later, kept in ((0.9, True), (1.1, False), (-1.0, False)):
        monkeypatch.setattr(cost_store.time, "time", lambda later=later: now + later * cost_store._STALE_S)
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
    for i in range(cost_store._records.most + 5):
        save_cost_model(str(i), COSTS)
    assert len(json.loads(file.read_text())) == cost_store._records.most
    assert load_cost_model("4") is None and load_cost_model("5") and load_cost_model(str(cost_store._records.most + 4))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_directory_that_cannot_be_written_costs_a_measurement_only(tmp_path, monkeypatch):
    tmp_path.chmod(0o500)
    monkeypatch.setattr(cost_store._records, "name", str(tmp_path / "x" / "cost_models.json"))
    save_cost_model("a", COSTS)
    assert load_cost_model("a") is None


def test_a_file_in_the_way_of_the_directory_costs_a_measurement_only(tmp_path, monkeypatch):
    (tmp_path / "x").write_text("")
    monkeypatch.setattr(cost_store._records, "name", str(tmp_path / "x" / "cost_models.json"))
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
    def homeless(self):
        raise RuntimeError("Could not determine home directory.")

    for name in ("DFLASH_MLX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cost_store._records, "name", "cost_models.json")
    monkeypatch.setattr(Path, "expanduser", homeless)
    save_cost_model("a", COSTS)
    assert load_cost_model("a") is None


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(file):
    file.mkdir(parents=True)
    save_cost_model("a", COSTS)
    assert load_cost_model("a") is None and [p.name for p in file.parent.iterdir()] == ["cost_models.json"]


# Machines


def test_costs_hold_for_the_chip_and_the_systems_build_and_not_for_a_hosts_name(monkeypatch):
    model = nn.Linear(3, 5)
    before = cost_store.pair_key([model], "mlx 1")
    monkeypatch.setattr(platform, "node", lambda: "renamed")
    assert cost_store.pair_key([model], "mlx 1") == before
    changed = [cost_store.pair_key([model], "mlx 2"), cost_store.pair_key([nn.Linear(3, 6)], "mlx 1")]
    for owner, name, value in (
        (machine, "chip", "Apple M4 Pro"),
        (platform, "version", "Darwin Kernel Version 25.0.0: xnu-12377"),
        (platform, "release", "25.0.0"),
        (platform, "mac_ver", ("26.0", ("", "", ""), "arm64")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda value=value: value)
            changed.append(cost_store.pair_key([model], "mlx 1"))
    assert len({before, *changed}) == 7


def test_two_runs_of_one_pair_measure_once_and_share_what_rounds_show():
    history, measured = DraftLengthHistory(), []

    def slow():
        measured.append(1)
        time.sleep(0.05)
        return CostModel(1.0, 0.5, 0.0, {w: 1.0 for w in range(1, 8)})

    policies = [history.next_policy(7, slow) for _ in range(4)]

    def rounds(policy):
        for n in range(300):
            width = policy.next_length(n % 3)
            policy.observe(width, min(width, n % 4), False, 1.0 + n % 5, bool(n % 3))

    threads = [threading.Thread(target=rounds, args=(policy,)) for policy in policies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert measured == [1] and len({id(policy.cost_model) for policy in policies}) == 1
    assert history.next_policy(7, lambda: pytest.fail("measured")).cost_model is policies[0].cost_model


# In pieces between tokens


def measurement(monkeypatch, machine, most=7):
    """A `Measurement` whose passes are a made-up machine's; what it keeps is in the list."""
    kept = []
    monkeypatch.setattr(measure, "load_cost_model", lambda key: None)
    monkeypatch.setattr(measure, "save_cost_model", lambda key, costs: kept.append(costs))
    monkeypatch.setattr(measure, "measuring", lambda *_: machine.turns(most))
    model = tiny_target(seed=2)
    made = measure.Measurement(DFlashPair.of(drafter := tiny_drafter(model)).prepare_target(), drafter)
    made.holds = drafter
    made._clock = lambda: machine.now
    return made, kept


def pieces(made, machine):
    """Seconds of each piece until there are costs, or what is left waits."""
    took, found = [], NotYet.MORE
    while found is NotYet.MORE:
        began, found = machine.now, made.piece()
        took.append(machine.now - began)
    return took, found


def test_costs_are_measured_in_pieces_of_at_most_200_ms_and_are_the_same(monkeypatch):
    args = (0.02, 0.013, 0.0001, lambda w: 0.03 + 0.005 * w)
    machine = Machine(*args)
    made, kept = measurement(monkeypatch, machine)
    took, found = pieces(made, machine)
    assert len(took) > 5 and max(took) <= measure.PIECE_S == 0.2
    whole = Machine(*args).measure(7)
    assert kept == [found] and found == whole and sum(took) == pytest.approx(whole.measured_in_s)


def test_all_passes_are_timed_by_the_clock_that_was_given():
    """Over ranks it is rank 0's: by clocks of their own they would run different passes, and wait for each other for ever."""
    model = tiny_target()
    drafter, ticks = tiny_drafter(model), itertools.count()
    target = DFlashPair(model, drafter).target
    costs = measure.drained(measure.measuring(target, weakref.ref(drafter), lambda: next(ticks)))
    assert costs.draft_s == 1 and set(costs.verify_s.values()) == {1}


def test_a_pass_that_takes_longer_than_a_piece_waits_for_the_end_of_the_answer(monkeypatch):
    machine = Machine(0.05, 0.02, 0.001, lambda w: 0.1 + 0.03 * w)
    made, kept = measurement(monkeypatch, machine, most=15)
    took, found = pieces(made, machine)
    # A pass over 8 rows takes 310 ms, by the line through those before it too: it never ran.
    assert found is NotYet.LATER and not kept and 7 not in machine.calls and max(took) < 2 * measure.PIECE_S
    assert made.piece() is NotYet.LATER and made.finish(stop=lambda: True) is NotYet.LATER and 7 not in machine.calls
    assert made.finish() is kept[0] and made.piece() is kept[0] and set(kept[0].verify_s) >= {1, 3, 7}


def test_what_is_interrupted_inside_a_pass_is_measured_anew(monkeypatch):
    machine = Machine(0.02, 0.01, 0.0001, lambda w: 0.03)
    made, kept = measurement(monkeypatch, machine)
    made.piece()
    with monkeypatch.context() as patch:
        patch.setattr(machine, "run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            made.finish()
    machine.calls.clear()
    assert made.finish() is kept[0] and machine.calls[:2] == ["plain", "plain"]


def test_a_policy_decodes_plainly_until_costs_are_there_and_looks_ahead_while_they_wait():
    costs, answers = CostModel(1.0, 0.1, 0.0, {1: 1.0, 7: 1.0}, _seen={0: (1.0, 2)}), [NotYet.MORE, NotYet.LATER]
    history = DraftLengthHistory()
    policy = history.next_policy(7, lambda: answers.pop(0) if answers else costs)
    assert policy.next_length() == 0 and not policy.ready and policy.plain_s is None
    assert policy.next_length() == 0 and policy.ready
    # Behind the answer; the next one knows them from the start.
    history.take(lambda: costs)
    later = history.next_policy(7, lambda: pytest.fail("measured"))
    assert later.cost_model is costs and policy.next_length() > 0
    # Pieces of the measurement lie in this answer's time, so its rate is held against nothing.
    assert policy.plain_s is None and later.plain_s == 1.0


def test_ids_do_not_depend_on_what_is_measured_between_tokens(monkeypatch):
    model, steps = tiny_target(seed=2), []
    drafter = tiny_drafter(model)

    def one_pass(self):
        steps.append(self._step())
        return self.costs or NotYet.MORE

    monkeypatch.setattr(measure, "load_cost_model", lambda key: None)
    monkeypatch.setattr(measure.Measurement, "piece", one_pass)
    got = run(model, drafter, [5, 9, 33, 7, 20], 24, block_size=None)
    assert len(steps) >= 22 and ids_of(got) == greedy_ids(model, [5, 9, 33, 7, 20], 24)
    assert not drafter.pair.measures_later and got[-1].stats.widths == {0: 23}
