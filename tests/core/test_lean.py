"""Rounds of changing width: exact whatever the widths, plain where nothing is drafted, one wait a round, and lean.

`kit.Shuffled` stands in for the width rule, so that rounds of every width and plain passes follow each other in any order.
"""

import gc
import re
import sys
import time

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import family, known_drafter, some_line
from kit import (
    DATA,
    Noisy,
    Oracle,
    Shuffled,
    failing_pass,
    greedy_ids,
    ids_of,
    letters,
    references,
    rounds_of,
    run,
    tiny_drafter,
    tiny_target,
    variant,
)
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from rows import same_ids

import dflash_mlx
from dflash_mlx import loop, make_prompt_cache, proposers, sampling
from dflash_mlx import rollback as cache_module
from dflash_mlx import target_sampler as choose
from dflash_mlx.draft_length import measure as timing
from dflash_mlx.draft_length.cost_model import CostModel
from dflash_mlx.draft_length.policy import DraftLengthHistory, FixedDraftLength
from dflash_mlx.models import drafter as drafter_module
from dflash_mlx.models.drafter import Drafter
from dflash_mlx.models.target import Target
from dflash_mlx.pair import DFlashPair
from dflash_mlx.prompt_cache import PairCache
from dflash_mlx.proposers import DrafterProposer
from dflash_mlx.traced.compiled import CompiledPass

PROMPT = [5, 9, 33, 7, 20]


@pytest.fixture
def shuffled(monkeypatch):
    """Makes runs with block_size=None change widths; call it with a seed. The list gets each run's rule."""
    rules = []

    def use(seed):
        def rule(pair, stream):
            rules.append(Shuffled(pair.drafter.config.block_size - 1, seed))
            return rules[-1]

        monkeypatch.setattr(DFlashPair, "draft_length_policy", rule)
        return rules

    return use


@pytest.fixture(scope="module")
def tiny():
    model = tiny_target(seed=2)
    line = greedy_ids(model, PROMPT, 130)
    return model, line, tiny_drafter(model, cls=Noisy).learn(PROMPT + line, model)


@pytest.mark.parametrize("seed", range(4))
def test_widths_that_change_all_the_time_change_no_token_and_no_context_row(tiny, shuffled, seed):
    model, line, noisy = tiny
    rules = shuffled(seed)
    # The drafter compares every context row that it is given with a full forward.
    got = run(model, noisy, PROMPT, 100, block_size=None)
    assert ids_of(got) == line[:100]
    widths = [r["width"] for r in got[-1].stats.rounds]
    assert 0 in widths and len(set(widths)) > 3 and sum(a == 0 < b for a, b in zip(widths, widths[1:], strict=False)) >= 3
    assert [t[:2] for t in rules[0].told] == [(r["width"], r["accepted"]) for r in got[-1].stats.rounds]
    assert any(told[2] for told in rules[0].told)
    # Of the rounds that draft half are cut by confidence, and any of their drafts verified, none included.
    confidence_cut = got[-1].stats.confidence_cut
    assert (
        sum(confidence_cut.values()) == len(rules[0].confidence) >= 5
        and got[-1].stats.summary()["confidence_cut"] == confidence_cut
    )
    # Once a round: a try that was chosen and not run would be lost.
    assert rules[0].asked <= len(widths) + 1
    for r in got[-1].stats.rounds:
        assert len(r["drafted"]) == (4 if r["width"] else 0) and r["accepted"] <= r["width"]
    assert got[-1].stats.widths == {w: widths.count(w) for w in set(widths)}
    drafting = [r for r in got[-1].stats.rounds if r["width"]]
    assert got[-1].stats.tau == sum(r["accepted"] + 1 for r in drafting) / len(drafting)


@pytest.mark.parametrize("width", [0, 3])
def test_a_slow_caller_does_not_keep_the_rule_from_learning_what_rounds_take(tiny, monkeypatch, width):
    model, _, noisy = tiny
    told = []

    class Told(FixedDraftLength):
        def prompt_lookup_width(self, width, rates):
            return 0

        def observe(self, width, accepted, more, seconds, usual, *rest):
            told.append(usual)

    monkeypatch.setattr(DFlashPair, "draft_length_policy", lambda *_: Told(width))
    for _ in dflash_mlx.stream_generate(model, letters(), PROMPT, 40, noisy):
        time.sleep(0.02)
    assert len(told) >= 10 and sum(told) >= 0.7 * len(told)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_a_slice_of_the_drafts_is_what_a_narrow_round_verifies(pair, shuffled, seed):
    model, tokenizer, drafter = pair
    shuffled(seed)
    got = run(model, drafter, "import os\n", 60, tokenizer, block_size=None)
    assert ids_of(got) == greedy_ids(model, tokenizer.encode("import os\n"), 60)
    ids = tokenizer.encode("import os\n") + [got[0].token]
    for r in got[-1].stats.rounds:
        if r["width"]:
            # A fresh run whose first round stands at the same place drafts the same block.
            fresh = run(model, drafter, ids[:-1], 2, tokenizer)[-1].stats.rounds[0]
            assert fresh["drafted"] == r["drafted"]
        ids += [*r["drafted"][: r["accepted"]], r["bonus"]]


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.quick(1)
def test_a_round_that_is_cut_by_confidence_drafts_what_others_draft_and_verifies_what_it_is_told(pair, monkeypatch, most):
    model, tokenizer, drafter = pair
    confidences, told = {}, []

    class Cutting(FixedDraftLength):
        wants_confidence, cuts_by_confidence = True, False

        def prompt_lookup_width(self, width, rates):
            return 0

        def confidence_cut(self, confidence):
            told.append(confidence)
            return most

        def observe(self, width, accepted, more, seconds, usual, copied, confidence, waited):
            if not self.cuts_by_confidence:
                confidences[len(confidences)] = confidence

    monkeypatch.setattr(DFlashPair, "draft_length_policy", lambda *_: Cutting(7))
    prompt = tokenizer.encode("def test_")
    blind = run(model, drafter, prompt, 40, tokenizer, block_size=None)
    Cutting.cuts_by_confidence = True
    got = run(model, drafter, prompt, 40, tokenizer, block_size=None)
    assert ids_of(got) == ids_of(blind) == greedy_ids(model, prompt, 40)
    rounds, stats = got[-1].stats.rounds, got[-1].stats
    assert stats.confidence_cut == stats.widths == {most: len(rounds)} and len(told) >= len(rounds)
    if most:
        assert rounds[0].drafted == blind[-1].stats.rounds[0].drafted and rounds[0].source == "drafter"
        assert all(len(r.drafted) == 7 for r in rounds)
    else:
        assert [(r.drafted, r.accepted, r.source) for r in rounds] == [([], 0, "plain")] * len(rounds)
    # Read early or with the outcome, to 2^-20.
    assert told[0] == confidences[0] and all(0 < p <= 1 for p in told[0]) and len(set(told[0])) == 7
    hidden = fresh_slots(model, drafter, [*prompt, got[0].token])
    expected = mx.softmax(drafter._head(hidden)[0], axis=-1).max(axis=-1)
    assert mx.allclose(mx.array(told[0]), expected, atol=1e-4).item()


class Cutting(FixedDraftLength):
    """Cuts every round and verifies `kept` of its drafts."""

    wants_confidence = cuts_by_confidence = True

    def __init__(self, width, kept):
        self.width, self.kept, self.told = width, kept, []

    def prompt_lookup_width(self, width, rates):
        return 0

    def confidence_cut(self, confidence):
        return self.kept

    def observe(self, width, accepted, more, seconds, usual, copied, confidence, waited):
        self.told.append((width, len(confidence or ()), waited))


@pytest.mark.parametrize("kept", [0, 2])
def test_a_cut_round_in_which_a_kernel_failed_stays_one(tiny, monkeypatch, kept):
    model, line, noisy = tiny
    rule = Cutting(4, kept)
    monkeypatch.setattr(DFlashPair, "draft_length_policy", lambda *_: rule)
    for nth in (2, 3, 5):
        rule.told.clear()
        with monkeypatch.context() as patch:
            failing_pass(patch, nth)
            got = run(model, noisy, PROMPT, 20, block_size=None)
        assert ids_of(got) == line[:20] and got[-1].stats.confidence_cut == got[-1].stats.widths == {kept: len(rule.told)}
        assert set(rule.told) == {(kept, 4, True)}


@pytest.mark.parametrize("name", ["llama, mixed windows", "qwen3_next"])
@pytest.mark.parametrize("where", ["confidence_cut", "mark_injected", "_enqueue"])
@pytest.mark.quick(4)
def test_an_interruption_at_a_cut_leaves_both_caches_at_what_was_said(monkeypatch, name, where):
    model, prompt = family(name), some_line(30)
    line, drafter = greedy_ids(model, prompt, 60), tiny_drafter(model)
    for nth in (1, 2, 9):
        rule, calls = Cutting(4, 0 if where == "mark_injected" else 3), []
        owner = {"confidence_cut": rule, "mark_injected": DrafterProposer}.get(where, loop.Run)
        original = getattr(owner, where)

        def interrupted(*args, calls=calls, original=original, nth=nth):
            calls.append(1)
            if len(calls) == nth:
                raise KeyboardInterrupt
            return original(*args)

        got, cache = [], make_prompt_cache(model, drafter)
        with monkeypatch.context() as patch:
            patch.setattr(DFlashPair, "draft_length_policy", lambda *_, rule=rule: rule)
            patch.setattr(owner, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                for r in dflash_mlx.stream_generate(model, letters(), prompt, 40, drafter, prompt_cache=cache):
                    got.append(r.token)
        assert got == line[: len(got)], (nth, where)
        if not got:
            continue
        again = run(model, drafter, [line[len(got)]], 12, prompt_cache=cache)
        fresh = run(model, drafter, prompt + line[: len(got) + 1], 12)
        assert ids_of(again) == ids_of(fresh) and rounds_of(again) == rounds_of(fresh), (nth, where)


def test_a_round_that_is_cut_by_confidence_reaches_over_no_row_where_the_cache_is_quantized(monkeypatch):
    drafter = tiny_drafter(tiny_target(seed=4, head_dim=32))
    monkeypatch.setattr(DFlashPair, "draft_length_policy", lambda *_: Cutting(1, 4))
    for start in range(len(PROMPT) + 1, len(PROMPT) + 8):
        options = {"kv_bits": 2, "kv_group_size": 32, "quantized_kv_start": start}
        expected = greedy_ids(drafter.target, PROMPT, 24, **options)
        known = known_drafter(drafter.target, PROMPT + expected)
        got = run(known.target, known, PROMPT, 24, block_size=None, **options)
        assert ids_of(got) == expected, start
        assert sum(got[-1].stats.confidence_cut.values()) > 4


def fresh_slots(model, drafter, ids):
    """The drafter's rows [1, N, H] for the block after `ids`, whose last one is the anchor, without any cache before it."""
    features = Target(model, drafter.config.target_layer_ids)(mx.array([ids[:-1]])).features
    return drafter.slots(mx.array(ids[-1:]), features, drafter.make_cache(), 0, drafter.config.block_size)


FAMILIES = ["llama, mixed windows", "qwen3_next", "mamba2", "llama4", "falcon_h1"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.quick(3)
def test_widths_that_change_change_no_token_of_any_kind_of_cache(shuffled, name):
    model, prompt = family(name), some_line(30)
    line = greedy_ids(model, prompt, 80)
    shuffled(7)
    drafter = known_drafter(model, prompt + line)
    cache = make_prompt_cache(model, drafter)
    steps = dflash_mlx.stream_generate(model, letters(), prompt, 80, drafter, prompt_cache=cache)
    got = [next(steps).token for _ in range(41)]
    # Closed while a pass is under way, and taken up again.
    steps.close()
    held = PairCache.read(cache)
    assert held.ids == prompt + line[:41] and held.rows == len(held.ids) - 1
    got += ids_of(run(model, drafter, [line[41]], 30, block_size=None, prompt_cache=cache))
    assert got == line[:41] + line[42:72]


def test_widths_that_change_change_no_token_with_a_quantized_cache(tiny, shuffled):
    model, _, noisy = tiny
    shuffled(3)
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 40}
    drafter = tiny_drafter(tiny_target(seed=4, head_dim=32))
    expected = greedy_ids(drafter.target, PROMPT, 90, **options)
    assert ids_of(run(drafter.target, drafter, PROMPT, 90, block_size=None, **options)) == expected


@pytest.mark.parametrize("make", [make_sampler, sampling.Distribution])
def test_a_seed_gives_the_same_text_whatever_the_widths(tiny, shuffled, make):
    model, *_ = tiny
    drafter = tiny_drafter(model)
    options = {"sampler": make(temp=0.9, top_p=0.95), "seed": 11}
    expected = ids_of(run(model, None, PROMPT, 60, **options))
    for seed in range(3):
        shuffled(seed)
        assert ids_of(run(model, drafter, PROMPT, 60, block_size=None, **options)) == expected


def test_processors_see_the_committed_text_only_whatever_the_widths(tiny, shuffled):
    model, _, noisy = tiny
    drafter, seen, plain_seen = tiny_drafter(model), [], []

    def recording(into):
        return [*make_logits_processors(repetition_penalty=1.3), lambda ids, row: (into.append(ids.tolist()), row)[1]]

    expected = ids_of(run(model, None, PROMPT, 60, logits_processors=recording(plain_seen)))
    shuffled(5)
    got = run(model, drafter, PROMPT, 60, block_size=None, logits_processors=recording(seen))
    assert ids_of(got) == expected and seen == plain_seen[:60]


# Automatic runs


def test_by_default_the_rule_chooses_and_the_ids_are_plain_decodings(pair):
    model, tokenizer, drafter = pair
    prompt = tokenizer.encode("import os\n")
    for turn in range(2):
        got = run(model, drafter, prompt, 80, tokenizer, block_size=None)
        # A busy machine does not finish in the time that is given after an answer.
        drafter.pair.finish_measuring()
        stats = got[-1].stats
        assert ids_of(got) == greedy_ids(model, prompt, 80)
        assert sum(stats.widths.values()) == stats.n_rounds == len(stats.rounds)
        # Whether drafting is faster is this machine's; a slow one measures behind its first answer.
        reason = stats.width_reason
        assert reason is None and not turn or re.search(r"\dx |takes \d+\.\d times|drafts copied", reason), reason
    assert stats.summary()["widths"] == dict(sorted(stats.widths.items()))


def test_costs_are_measured_once_a_pair_after_the_first_token(tiny, monkeypatch, costs_file):
    model = tiny_target(seed=2, intermediate_size=52)
    calls = []
    original = timing.measuring
    monkeypatch.setattr(timing, "measuring", lambda *args: (calls.append(1), original(*args))[1])
    steps = dflash_mlx.stream_generate(model, letters(), PROMPT, 9, tiny_drafter(model))
    next(steps)
    assert calls == []
    rest = [r.token for r in steps]
    assert len(rest) == 8 and calls == [1] and costs_file.exists()
    # The same shapes again, with other weights and in another run: known from the file, then from memory.
    other = tiny_drafter(tiny_target(seed=3, intermediate_size=52), seed=4)
    for _ in range(2):
        run(other.target, other, PROMPT, 9, block_size=None)
    assert calls == [1]


def test_what_a_cut_adds_is_measured_with_the_wait_that_it_is(tiny, monkeypatch, waits):
    model, *_ = tiny
    passes, counted = {}, []

    def measure(plain, draft, inject, verify, both, most, clock):
        passes["both"] = both
        yield from ()
        return CostModel(1.0, 1.0, 1.0, {1: 1.0})

    monkeypatch.setattr(timing, "turns", measure)
    drafter = tiny_drafter(model)
    timing.measure_cost_model(DFlashPair.of(drafter).prepare_target(), drafter)
    for second in (False, True, False):
        before = waits["wait"]
        passes["both"](3, second)
        counted.append(waits["wait"] - before)
    assert counted[1] == counted[0] + 1 == counted[2] + 1


def test_what_is_tried_at_first_use_is_tried_before_passes_are_timed(tiny, monkeypatch):
    # With cuDNN an ordinary draft at a new length takes 60 ms where a compiled one takes 2: timed, it was the cost of drafting.
    model, *_ = tiny
    drafter, tried, original = tiny_drafter(model, layer_types=None, sliding_window=None), [], CompiledPass._tried
    monkeypatch.setenv("DFLASH_MLX_COMPILE", "on")
    monkeypatch.setattr(
        CompiledPass, "_tried", lambda self, *args: (tried.append((self.name, args[-1][-1])), original(self, *args))[1]
    )

    def measure(plain, draft, inject, verify, both, most, clock):
        before = [*tried]
        assert ("the drafter", most + 1) in before and ("llama", 1) in before
        for _ in range(2):
            plain()
            draft()
        assert tried == before and all(passes.passes for passes in drafter.pair.accelerator.passes)
        yield from ()
        return CostModel(1.0, 1.0, 1.0, {1: 1.0})

    monkeypatch.setattr(timing, "turns", measure)
    timing.measure_cost_model(DFlashPair.of(drafter).prepare_target(), drafter)


def test_measuring_touches_neither_the_caches_nor_the_random_state(tiny):
    model, line, _ = tiny
    drafter, state = tiny_drafter(model), mx.random.state[0].tolist()
    costs = timing.measure_cost_model(DFlashPair.of(drafter).prepare_target(), drafter)
    assert mx.random.state[0].tolist() == state and set(costs.verify_s) == {1, 2, 3, 4}
    assert all(s > 0 for s in (costs.plain_s, costs.draft_s, costs.inject_s, *costs.verify_s.values()))
    assert {type(layer).__name__ for layer in model.layers} == {"TransformerBlock"}
    assert ids_of(run(model, drafter, PROMPT, 20)) == line[:20]


def test_an_asked_for_block_size_measures_nothing_and_gives_no_reason(tiny, monkeypatch):
    model, line, noisy = tiny
    monkeypatch.setattr(timing, "measuring", lambda *_: pytest.fail("measured"))
    stats = run(model, noisy, PROMPT, 20, block_size=4)[-1].stats
    assert set(stats.widths) == {3} and stats.width_reason is None and stats.confidence_cut == {}


def test_drawn_drafts_keep_the_drafters_width_so_that_a_seed_gives_one_text(pair):
    model, tokenizer, drafter = pair
    from dflash_mlx.sampling import Distribution

    options = {"sampler": Distribution(0.9), "acceptance": "rejection", "seed": 3, "block_size": None}
    runs = [run(model, drafter, "import os\n", 40, tokenizer, **options) for _ in range(2)]
    assert ids_of(runs[0]) == ids_of(runs[1]) and set(runs[0][-1].stats.widths) == {7} and runs[0][-1].stats.confidence_cut == {}


# Lean rounds


@pytest.fixture
def order(monkeypatch):
    """What the loop does, in order: "verify" and "read" of passes."""
    seen = []
    for name in ("verify", "read"):
        original = getattr(loop.Run, name)

        def call(self, *args, name=name, original=original, **kwargs):
            seen.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(loop.Run, name, call)
    return seen


def test_plain_passes_are_enqueued_before_the_one_in_front_is_read(tiny, order):
    model, line, noisy = tiny
    assert ids_of(run(model, noisy, PROMPT, 20, block_size=1)) == line[:20]
    # As in mlx-lm: one pass more is under way at each read, and none after the last token.
    assert order == ["verify"] + ["verify", "read"] * 19 + ["read"]


def test_drafting_rounds_are_read_before_the_next_one(tiny, order):
    model, line, noisy = tiny
    run(model, noisy, PROMPT, 20, block_size=4)
    assert order == ["verify", "read"] * (len(order) // 2)


def test_a_plain_stretch_waits_once_a_token_and_evaluates_nothing_else(tiny, waits):
    model, line, _ = tiny
    at = []
    for _ in dflash_mlx.stream_generate(model, letters(), PROMPT, 100, tiny_drafter(model), block_size=1):
        at.append(waits["wait"])
    assert {b - a for a, b in zip(at[:-2], at[1:-1], strict=True)} == {1}


@pytest.mark.parametrize(
    "options", [{"block_size": 1}, {"block_size": 4, "prompt_lookup": False}, {"block_size": 4, "prompt_lookup": True}], ids=str
)
def test_no_round_walks_through_the_modules(tiny, monkeypatch, options):
    """That takes 0.6 ms of a model of 30 layers. What a run finds out about its models, it finds out once."""
    model, _, _ = tiny
    drafter, walks = tiny_drafter(model), []
    # Every walk through a module ends here.
    walk = nn.Module.apply_to_modules
    monkeypatch.setattr(nn.Module, "apply_to_modules", lambda *a: walks.append(1) or walk(*a))

    def walks_of(tokens):
        walks.clear()
        run(model, drafter, PROMPT * 3, tokens, **options)
        return len(walks)

    walks_of(5)
    assert walks_of(10) == walks_of(60) > 0


@pytest.mark.parametrize(
    "options,most,most_between",
    [({"block_size": 8}, 745, 121), ({"block_size": 1}, 430, 90), ({"block_size": 8, "prompt_lookup": True}, 730, 153)],
    ids=str,
)
def test_python_calls_of_a_round_and_between_its_read_and_the_next_pass_are_few(pair, monkeypatch, options, most, most_between):
    """On a GPU the host's time is a small model's time, and the device rests from a read to the next pass. Calls are counted and
    not timed, so other work on this machine does not matter. A tenth more than there were is allowed."""
    model, tokenizer, drafter = pair
    tolist, passes, counts = mx.array.tolist, (Drafter.slots.__code__, Target.__call__.__code__), {"all": 0, "between": 0}
    waiting = False

    def read(array):
        nonlocal waiting
        waiting = True
        return tolist(array)

    def count(frame, event, arg):
        nonlocal waiting
        if event == "call" and frame.f_code is not read.__code__:
            waiting = waiting and frame.f_code not in passes
            counts["all"] += 1
            counts["between"] += waiting

    monkeypatch.setattr(mx.array, "tolist", read)
    responses = dflash_mlx.stream_generate(model, tokenizer, "def test_", 45, drafter, **options)
    for _ in range(15):
        stats = next(responses).stats
    rounds = stats.n_rounds
    sys.setprofile(count)
    try:
        for _ in responses:
            pass
    finally:
        sys.setprofile(None)
    rounds = stats.n_rounds - rounds
    assert counts["all"] / rounds < most and counts["between"] / rounds < most_between


def test_a_plain_stretch_leaves_the_drafters_cache_alone(tiny, monkeypatch):
    """Nothing of it is new between two plain tokens: nobody asks for a `state` to evaluate."""
    model, *_ = tiny
    asked = []
    for kind in (KVCache, RotatingKVCache):
        state = kind.state
        getter = lambda self, state=state: (asked.append(1), state.fget(self))[1]  # noqa: E731
        monkeypatch.setattr(kind, "state", property(getter, state.fset))
    steps = dflash_mlx.stream_generate(model, letters(), PROMPT, 100, tiny_drafter(model), block_size=1)
    next(steps)
    assert asked
    asked.clear()
    for _ in range(50):
        next(steps)
    assert not asked


def test_plain_passes_run_the_drafter_only_for_what_its_memory_bound_asks(tiny, monkeypatch):
    model, line, _ = tiny
    drafter, calls = tiny_drafter(model), []
    original = drafter_module.Drafter.inject
    monkeypatch.setattr(
        drafter_module.Drafter,
        "inject",
        lambda self, features, *args: (calls.append(features.shape[1]), original(self, features, *args)),
    )
    cache = make_prompt_cache(model, drafter)
    run(model, drafter, PROMPT, 100, block_size=1, prompt_cache=cache)
    assert calls == [4] and PairCache.read(cache).pending == 100
    # 48 features a row, float32: 30 rows.
    monkeypatch.setattr(loop, "_PENDING_BYTES", 30 * 48 * 4)
    calls.clear()
    more = make_prompt_cache(model, drafter)
    run(model, drafter, PROMPT, 100, block_size=1, prompt_cache=more)
    assert calls[0] == 4 and all(30 <= n <= 32 for n in calls[1:]) and len(calls) == 4
    # Both go on with the same drafts.
    turns = [run(model, drafter, [8], 12, prompt_cache=c) for c in (cache, more)]
    assert ids_of(turns[0]) == ids_of(turns[1]) and rounds_of(turns[0]) == rounds_of(turns[1])


@pytest.mark.parametrize("block", [1, 5])
def test_a_pass_runs_once_more_around_the_row_where_the_cache_is_quantized(monkeypatch, block):
    """The pass behind it finds the cache quantized; the failed one must see it as it was."""
    model = tiny_target(seed=4, head_dim=32)
    options = {"kv_bits": 2, "kv_group_size": 32, "quantized_kv_start": len(PROMPT) + 3}
    line = greedy_ids(model, PROMPT, 16, **options)
    assert line != greedy_ids(model, PROMPT, 16)
    for nth in range(1, 8):
        with monkeypatch.context() as patch:
            failing_pass(patch, nth)
            got = run(model, known_drafter(model, PROMPT + line), PROMPT, 16, block_size=block, **options)
        assert ids_of(got) == line, (block, nth)


@pytest.mark.parametrize("name", ["llama", "llama, mixed windows", "qwen3_next"])
@pytest.mark.parametrize("block", [1, 5])
@pytest.mark.quick(4)
def test_a_pass_in_which_a_kernel_failed_runs_once_more_also_with_another_behind_it(monkeypatch, order, name, block):
    model, prompt = family(name), some_line(30)
    line = greedy_ids(model, prompt, 30)
    for nth in (1, 2, 3, 6):
        drafter = known_drafter(model, prompt + line)
        with monkeypatch.context() as patch:
            failing_pass(patch, nth)
            cache = make_prompt_cache(model, drafter)
            order.clear()
            got = run(model, drafter, prompt, 20, block_size=block, prompt_cache=cache)
        assert ids_of(got) == line[:20], (name, block, nth)
        assert order.count("read") == got[-1].stats.n_rounds + 2, "every round, the prompt's and the failed one"
        # Passes overlap where two of them can be undone: a full ring has lost what the second one replaced.
        overlap = block == 1 and name != "llama, mixed windows"
        assert (order[:2] == ["verify", "verify"]) == overlap
        again = run(model, drafter, line[20:21], 8, prompt_cache=cache)
        fresh = run(model, drafter, prompt + line[:21], 8)
        assert ids_of(again) == ids_of(fresh) and rounds_of(again) == rounds_of(fresh)


def test_an_interruption_that_leaves_a_window_in_its_made_class_is_put_right_at_the_end():
    model, prompt = family("llama, mixed windows"), some_line(30)
    line, drafter = greedy_ids(model, prompt, 30), tiny_drafter(model)
    cache = make_prompt_cache(model, drafter)
    steps = dflash_mlx.stream_generate(model, letters(), prompt, 30, drafter, block_size=5, prompt_cache=cache)
    got = [next(steps).token for _ in range(12)]
    rotating = [entry for entry in cache[: len(model.layers)] if type(entry) is RotatingKVCache]
    for entry in rotating:
        entry.__class__ = cache_module._MasksByRow
    steps.close()
    assert rotating and all(type(entry) is RotatingKVCache for entry in rotating)
    assert got == line[:12] and ids_of(run(model, drafter, line[12:13], 10, prompt_cache=cache)) == line[13:23]


class Stub:
    """Makes a tiny target cheap and long-lived: its layers pass their input on, and caches hold one number a row."""

    @staticmethod
    def target(vocab=61):
        model = tiny_target(seed=2, layers=2, vocab=vocab)

        def call(self, x, mask=None, cache=None):
            row = x[:, None, :, :1]
            # As in a real layer, what comes out needs the cache: else its updates would never be evaluated.
            return mx.depends([x], list(cache.update_and_fetch(row, row)))[0]

        for layer in model.layers:
            layer.__class__ = type("StubLayer", (type(layer),), {"__call__": call})
        return model


def test_no_list_made_into_an_array_for_a_token_grows_with_the_context(monkeypatch):
    """With and without processors, drafting or not: host time a token does not depend on the context."""
    model = Stub.target()
    drafter = tiny_drafter(model, taps=(0, 1), max_position_embeddings=40_000)
    made = []

    class Recording:
        """mlx.core as the loop sees it."""

        def __getattr__(self, name):
            return getattr(mx, name)

        def array(self, value, *args, **kwargs):
            made.append(len(value) if isinstance(value, (list, tuple)) else 0)
            return mx.array(value, *args, **kwargs)

    prompt = [(7 * i) % 61 for i in range(32_000)]
    for options in (
        {"block_size": 1},
        {"block_size": 5},
        {"block_size": 5, "prompt_lookup": True},
        {"block_size": 5, "logits_processors": [lambda ids, row: row]},
    ):
        steps = dflash_mlx.stream_generate(model, letters(), prompt, 40, drafter, **options)
        for _ in range(5):
            next(steps)
        with monkeypatch.context() as patch:
            for module in (choose, loop, proposers, sampling):
                patch.setattr(module, "mx", Recording())
            for _ in range(30):
                next(steps)
        steps.close()
    assert made and max(made) <= 8


@pytest.mark.full
@pytest.mark.parametrize("block,copy", [(1, None), (5, None), (5, True)])
def test_host_time_is_flat_with_context_to_32k(block, copy):
    model = Stub.target()
    drafter = tiny_drafter(model, taps=(0, 1), layer_types=["sliding_attention", "sliding_attention"])

    def per_token(context):
        prompt = [(7 * i) % 61 for i in range(context)]
        options = {"block_size": block, "prompt_lookup": copy, "keep_rounds": False}
        steps = dflash_mlx.stream_generate(model, letters(), prompt, -1, drafter, **options)
        times = []
        for _ in range(400):
            began = time.perf_counter()
            next(steps)
            times.append(time.perf_counter() - began)
        steps.close()
        # The best tenth: whatever else runs on this machine.
        return sum(sorted(times)[:40])

    # Appending one number to 32,000 costs the device little; a list or concatenation of them on the host costs milliseconds.
    assert min(per_token(32_000) for _ in range(3)) < 2 * min(per_token(100) for _ in range(3))


@pytest.mark.full
@pytest.mark.parametrize("block", [1, 5, None])
def test_memory_over_4000_tokens_grows_only_by_the_caches(block):
    model = Stub.target()
    drafter = tiny_drafter(model, taps=(0, 1))
    cache = make_prompt_cache(model, drafter)
    steps = dflash_mlx.stream_generate(
        model, letters(), PROMPT, -1, drafter, block_size=block, keep_rounds=False, prompt_cache=cache
    )
    held = []
    for n in range(4_000):
        next(steps)
        if n in (1_000, 3_999):
            gc.collect()
            state = sum(a.nbytes for entry in cache[:-1] for a in (entry.keys, entry.values) if a is not None)
            held.append(mx.get_active_memory() - state)
    steps.close()
    assert PairCache.read(cache).rows == len(PROMPT) + 4_000 - 1
    # Pending features (their bound, and 48 floats a row) and an entry's growth by 256 rows. Fewer than 100 bytes a token besides.
    pending = min(loop._PENDING_BYTES, 3_000 * 48 * 4) if block != 5 else 0
    assert held[1] - held[0] < pending + 3e5, held


def test_the_drafter_reads_the_context_in_full_layers_and_the_window_in_sliding_ones(pair, monkeypatch):
    reference = references(DATA / "variants" / "sliding.json")
    model, tokenizer, prompt = pair[0], pair[1], reference["prompts"][6]["prompt_ids"]
    drafter = variant(model, reference["config"])
    read = []
    original = mx.fast.scaled_dot_product_attention

    def reading(q, k, v, **options):
        if q.shape[2] == drafter.config.block_size:
            read.append(k.shape[2] - q.shape[2])
        return original(q, k, v, **options)

    monkeypatch.setattr(drafter_module.mx.fast, "scaled_dot_product_attention", reading)
    cache = make_prompt_cache(model, drafter)
    windows, contexts = drafter.config.windows, []
    assert None in windows and any(windows)
    steps = dflash_mlx.stream_generate(model, tokenizer, prompt, 40, drafter, block_size=8, prompt_cache=cache)
    for _ in steps:
        pass
    stats = _.stats
    at = len(prompt)
    for r in stats.rounds:
        contexts.append(at)
        at += r["accepted"] + 1
    # The target's passes over as many rows come after the drafter's layers of the same round.
    per_round = len(windows)
    own = [read[i : i + per_round] for i in range(0, len(read), per_round + len(model.layers))]
    for context, sizes in zip(contexts, own, strict=True):
        assert sizes == [context if w is None else min(context, w - 1) for w in windows]
    assert isinstance(cache[len(model.layers) + windows.index(None)], KVCache)


def test_an_oracle_is_found_where_drafting_pays(tiny, monkeypatch):
    """The rule itself in the loop, with costs in which drafting is free: from the second round on blocks are full."""
    model, line, _ = tiny
    oracle = tiny_drafter(model, cls=Oracle).learn(PROMPT + line, model)
    # Far less than any pass takes, so that only their ratios count.
    costs = CostModel(1e-6, 1e-8, 0.0, {1: 1e-6, 4: 1e-6}, _seen={0: (1.0, 2)})
    monkeypatch.setattr(DFlashPair, "measure", lambda *_: costs)
    monkeypatch.setattr(CostModel, "refine", lambda *_: None)
    stats = run(model, oracle, PROMPT, 60, block_size=None)[-1].stats
    assert stats.widths.get(4, 0) >= 11 and stats.tau > 4.5
    assert stats.width_reason.startswith("4 of 4 drafts verified in most rounds: 1.0x the cost of one token here")


@pytest.mark.full
def test_where_rows_cost_the_trained_drafters_confidence_chooses_the_widths(pair, monkeypatch):
    model, tokenizer, drafter = pair
    costs = CostModel(6e-6, 5e-7, 0.0, {w: 6e-6 + 1.5e-6 * w for w in range(1, 8)}, 1e-8, _seen={0: (1.0, 2)})
    monkeypatch.setattr(DFlashPair, "measure", lambda *_: costs)
    monkeypatch.setattr(CostModel, "refine", lambda *_: None)
    monkeypatch.setattr(CostModel, "reprice", lambda *_: None)
    monkeypatch.setattr(DFlashPair.of(drafter), "history", DraftLengthHistory())
    prompt = tokenizer.encode("def test_")
    got = run(model, drafter, prompt, 300, tokenizer, block_size=None, prompt_lookup=False)
    stats = got[-1].stats
    assert same_ids(model, prompt, ids_of(got), greedy_ids(model, prompt, 300))
    assert sum(stats.confidence_cut.values()) > 0.5 * stats.n_rounds and len(stats.confidence_cut) > 3
    assert "7 drafts verified on average, as many as the drafter was sure enough of: 1." in stats.width_reason
    # Less time by these costs than at any fixed width.
    blind = {w: n - stats.confidence_cut.get(w, 0) for w, n in stats.widths.items()}
    seconds = sum(n * costs.cut_round(w) for w, n in stats.confidence_cut.items()) + sum(
        n * costs.round(w) for w, n in blind.items()
    )
    for width in (1, 2, 3, 4, 7):
        fixed = run(model, drafter, prompt, 300, tokenizer, block_size=width + 1)[-1].stats
        assert seconds < 0.99 * fixed.n_rounds * costs.round(width), width


def test_a_hopeless_drafter_is_left_alone_soon(tiny, monkeypatch):
    model, line, _ = tiny
    costs = CostModel(1e-6, 1e-6, 0.0, {1: 1e-6, 4: 1.5e-6}, _seen={0: (1.0, 2)})
    monkeypatch.setattr(DFlashPair, "measure", lambda *_: costs)
    monkeypatch.setattr(CostModel, "refine", lambda *_: None)
    stats = run(model, tiny_drafter(model), PROMPT, 100, block_size=None)[-1].stats
    assert stats.widths[0] > 90
    assert "% of passes checked no drafts: checking 4 takes 2.5 times" in stats.width_reason
