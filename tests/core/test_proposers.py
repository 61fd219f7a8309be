"""Draft sources of a user's own: one class, asked before each round, named in `rounds`."""

import sys
from pathlib import Path

import mlx.core as mx
import pytest
from kit import greedy_ids, ids_of, letters, run, tiny_drafter, tiny_target

from dflash_mlx import loop
from dflash_mlx.draft_length.policy import DraftLengthPolicy, FixedDraftLength
from dflash_mlx.errors import GenerationError
from dflash_mlx.models.target import Target
from dflash_mlx.pair import DFlashPair
from dflash_mlx.proposers import Draft
from dflash_mlx.sampling import Distribution

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from suffix_automaton import SuffixAutomaton  # noqa: E402

PROMPT = [5, 9, 33, 7, 20]


@pytest.fixture(scope="module")
def tiny():
    model = tiny_target(seed=2)
    return model, greedy_ids(model, PROMPT, 60), tiny_drafter(model)


class Known:
    """Drafts a known line, every third token wrong."""

    source = "known"

    def __init__(self, line, rate=0.9, source="known"):
        self.line, self.rate, self.source, self.asked = line, rate, source, 0

    def rates(self, ids, n):
        assert self.line[: len(ids)] == list(ids)
        self.at, self.asked = len(ids), self.asked + 1
        return [self.rate] * min(n, len(self.line) - self.at)

    def propose(self, anchor, n):
        assert anchor.tolist() == [self.line[self.at - 1]]
        ids = [(token + 1) % 50 if (self.at + i) % 3 == 0 else token for i, token in enumerate(self.line[self.at :][:n])]
        return Draft(ids, source=self.source)


@pytest.mark.parametrize("block_size", [2, 5, None])
def test_a_source_of_ones_own_drafts_and_changes_no_id(tiny, monkeypatch, block_size):
    model, line, drafter = tiny
    monkeypatch.setattr(DFlashPair, "draft_length_policy", lambda *_: FixedDraftLength(4))
    source = Known(PROMPT + line)
    got = run(model, drafter, PROMPT, 40, block_size=block_size, proposers=[source])
    rounds = [r for r in got[-1].stats.rounds if r["source"] == "known"]
    assert ids_of(got) == line[:40] and len(rounds) > 5 and sum(r["accepted"] for r in rounds) > 5
    assert got[-1].stats.sources["known"]["rounds"] == len(rounds) and source.asked >= len(rounds)


def test_the_policy_weighs_a_source_and_the_ids_stay(tiny):
    model, line, drafter = tiny
    got = run(model, drafter, PROMPT, 50, block_size=None, proposers=[Known(PROMPT + line)])
    assert ids_of(got) == line[:50] and set(got[-1].stats.sources) <= {"drafter", "prompt_lookup", "known"}


def test_of_several_sources_the_one_that_promises_most_drafts(tiny):
    model, line, drafter = tiny
    sources = [Known(PROMPT + line, 0.6, "less"), Known(PROMPT + line, 0.9, "more")]
    got = run(model, drafter, PROMPT, 30, block_size=5, proposers=sources)
    assert ids_of(got) == line[:30] and "less" not in got[-1].stats.sources and got[-1].stats.sources["more"]["rounds"] > 5


def test_the_suffix_automaton_of_the_examples_drafts_what_stood_before():
    automaton, text = SuffixAutomaton(), [1, 2, 3, 4, 5, 6, 7, 9, 2, 3, 4]
    for n in range(1, len(text)):
        assert automaton.rates(text[:n], 4) == []
    assert automaton.rates(text, 4) == [0.75] * 4 and automaton.propose(None, 4).ids == [5, 6, 7, 9]


def test_the_suffix_automaton_finds_the_longest_suffix_that_stood_before():
    import random

    chance = random.Random(0)
    text, automaton = [chance.randrange(3) for _ in range(120)], SuffixAutomaton()
    for n in range(1, len(text) + 1):
        rates = automaton.rates(text[:n], 5)
        longest = max(m for m in range(n) if any(text[i : i + m] == text[n - m : n] for i in range(n - m)))
        assert (rates != []) == (longest > 2) and automaton.matched == longest
        if rates:
            found = automaton.propose(None, 5).ids
            places = [i + longest for i in range(n - longest) if text[i : i + longest] == text[n - longest : n]]
            assert any(text[at:n][:5] == found for at in places)


def test_the_suffix_automaton_runs_and_its_drafts_are_named(pair):
    model, tokenizer, drafter = pair
    prompt = tokenizer.encode("import os\nimport sys\n\n\nimport os\nimport sys\n")
    got = run(model, drafter, prompt, 80, tokenizer, block_size=8, proposers=[SuffixAutomaton()])
    assert ids_of(got) == greedy_ids(model, prompt, 80) and got[-1].stats.sources["suffix_automaton"]["rounds"] > 0


WRONG = {
    "acceptance": ({"acceptance": "rejection", "sampler": Distribution(0.9)}, "proposers was given with acceptance='rejection'"),
    "no drafts": ({"block_size": 1}, "proposers was given with a block_size of 1"),
}


@pytest.mark.parametrize("options,message", WRONG.values(), ids=WRONG)
def test_a_source_that_could_not_draft_is_refused(tiny, options, message):
    model, line, drafter = tiny
    with pytest.raises(GenerationError, match=message):
        run(model, drafter, PROMPT, 10, proposers=[Known(PROMPT + line)], **options)


def test_a_source_without_a_drafter_is_refused(tiny):
    with pytest.raises(GenerationError, match="proposers is .* and there is no DFlash drafter"):
        run(tiny[0], None, PROMPT, 10, proposers=[Known(PROMPT)])


def test_a_source_that_drafts_what_is_no_token_is_named(tiny):
    class Beyond(Known):
        def propose(self, anchor, n):
            return Draft([61] * n, source="beyond")

    model, line, drafter = tiny
    with pytest.raises(GenerationError, match="the draft source 'beyond' drafted token 61; the target's tokens are 0 to 60"):
        run(model, drafter, PROMPT, 10, letters(), block_size=5, proposers=[Beyond(PROMPT + line)])


class Chosen(FixedDraftLength):
    """A width that the policy has chosen, with its own say of how many drafts it needs."""

    drafts_needed = DraftLengthPolicy.drafts_needed

    def prompt_lookup_width(self, width, rates):
        return 0


def rows_of_the_head(drafter, monkeypatch):
    """How many rows the drafter's head is run for, each time."""
    rows, head = [], drafter._head
    monkeypatch.setattr(drafter, "_head", lambda hidden: rows.append(hidden.shape[1]) or head(hidden))
    return rows


@pytest.mark.parametrize("width, wants, needed", [(1, False, 2), (2, False, 3), (4, False, 4), (2, True, 4)])
def test_the_head_runs_for_the_drafts_that_are_needed(tiny, monkeypatch, width, wants, needed):
    model, line, drafter = tiny
    policy = Chosen(width)
    policy.wants_confidence = wants
    monkeypatch.setattr(DFlashPair, "draft_length_policy", lambda *_: policy)
    rows = rows_of_the_head(drafter, monkeypatch)
    got = run(model, drafter, PROMPT, 30, block_size=None)
    drafted = [r["drafted"] for r in got[-1].stats.rounds if r["width"]]
    assert ids_of(got) == line[:30] and set(rows) == {needed} == {len(ids) for ids in drafted}
    # The first of those that are drafted where the head runs for all.
    monkeypatch.setattr(DFlashPair, "draft_length_policy", lambda *_: FixedDraftLength(width))
    all_of_them = [r["drafted"] for r in run(model, drafter, PROMPT, 30, block_size=None)[-1].stats.rounds if r["width"]]
    assert rows[-1] == 4 and drafted == [ids[:needed] for ids in all_of_them]


def test_a_block_size_that_was_asked_for_keeps_every_draft(tiny, monkeypatch):
    model, line, drafter = tiny
    rows = rows_of_the_head(drafter, monkeypatch)
    got = run(model, drafter, PROMPT, 30, block_size=5, acceptance="match")
    assert set(rows) == {4} and all(len(r["drafted"]) == 4 for r in got[-1].stats.rounds if r["width"])


def test_the_draft_is_handed_over_before_the_targets_pass_is_put_together(tiny, monkeypatch):
    model, _, drafter = tiny
    order, hand_over, target_pass = [], mx.async_eval, Target.__call__

    def handing(*arrays):
        order.append("handed")
        return hand_over(*arrays)

    def passing(self, ids, *args, **kwargs):
        order.append(f"pass of {ids.size}")
        return target_pass(self, ids, *args, **kwargs)

    monkeypatch.setattr(mx, "async_eval", handing)
    monkeypatch.setattr(Target, "__call__", passing)
    drafted = type(drafter).slots

    def drafting(self, *args):
        order.append("draft")
        return drafted(self, *args)

    monkeypatch.setattr(type(drafter), "slots", drafting)
    run(model, drafter, PROMPT, 20, block_size=5)
    drafts = [i for i, what in enumerate(order) if what == "draft"]
    assert len(drafts) > 5 and {tuple(order[i : i + 2]) for i in drafts} == {("draft", "handed")}
    assert order.count("pass of 5") == len(drafts)


@pytest.mark.parametrize("cuts", [False, True])
def test_the_rollback_is_put_together_behind_the_draft_and_before_a_wait_for_it(tiny, monkeypatch, cuts):
    model, line, drafter = tiny
    order, hand_over, undo, read, slots = [], mx.async_eval, loop.rollback, Draft.read, type(drafter).slots

    class Cutting(FixedDraftLength):
        wants_confidence = cuts_by_confidence = cuts

        def confidence_cut(self, confidence):
            return 4

    def noting(what, function):
        return lambda *args: order.append(what) or function(*args)

    monkeypatch.setattr(DFlashPair, "draft_length_policy", lambda *_: Cutting(4))
    monkeypatch.setattr(mx, "async_eval", noting("handed", hand_over))
    monkeypatch.setattr(loop, "rollback", noting("rollback", undo))
    monkeypatch.setattr(Draft, "read", noting("read", read))
    monkeypatch.setattr(type(drafter), "slots", noting("draft", slots))
    got = run(model, drafter, PROMPT, 20, block_size=None, prompt_lookup=False)
    assert ids_of(got) == line[:20]
    # The first round has nothing to roll back, and the second waits for its draft in any case.
    drafts = [i for i, what in enumerate(order) if what == "draft"][2:-1]
    found = {tuple(what for what in order[i : i + 5] if what != "handed") for i in drafts}
    assert len(drafts) > 5 and found == {("draft", "rollback", "read") if cuts else ("draft", "rollback")}
