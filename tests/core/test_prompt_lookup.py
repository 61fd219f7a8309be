"""Drafts copied from the text: what is copied, against a plain search, and that copying changes no id of any target.

When copying pays is the width rule's: test_width.py.
"""

import random

import mlx.core as mx
import pytest
from families import family, known_drafter, some_line
from kit import Noisy, Shuffled, failing_pass, greedy_ids, ids_of, letters, run, tiny_drafter, tiny_target
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from dflash_mlx import loop, make_prompt_cache, stream_generate
from dflash_mlx.draft_length import prompt_lookup as copying
from dflash_mlx.draft_length.policy import FixedDraftLength
from dflash_mlx.draft_length.prompt_lookup import PromptLookup
from dflash_mlx.errors import GenerationError
from dflash_mlx.pair import DFlashPair
from dflash_mlx.prompt_cache import PairCache, trim_prompt_cache
from dflash_mlx.proposers import PromptLookupProposer
from dflash_mlx.sampling import Distribution

PROMPT = [5, 9, 33, 7, 20]


class PlainSearch:
    """The same by looking through the whole text at every id."""

    def __init__(self):
        self.source = self.known = 0

    def follow(self, ids):
        for n in range(self.known + 1 if self.known else len(ids), len(ids) + 1):
            if self.source and ids[self.source] == ids[n - 1]:
                self.source += 1
                continue
            k = copying.SHORTEST
            places = [e for e in range(k, n) if ids[e - k : e] == ids[n - k : n]]
            self.source = places[-1] if places else 0
        self.known, self.ids = len(ids), list(ids)
        return self.source > 0

    def length(self):
        n = 0
        while n < min(self.source, 32) and self.ids[self.source - 1 - n] == self.ids[-1 - n]:
            n += 1
        return n

    def draft(self, n):
        text = list(self.ids)
        for i in range(n):
            text.append(text[self.source + i])
        return text[len(self.ids) :]


def repeating(seed, n, letters=50):
    """Random ids in which stretches of 1 to 60 stand again, some of them at once."""
    chance, ids = random.Random(seed), [3, 1, 2]
    while len(ids) < n:
        start = chance.randrange(len(ids))
        ids += [*ids[start : start + chance.randint(1, 60)], *(chance.randrange(letters) for _ in range(chance.randint(0, 6)))]
    return ids[:n]


@pytest.mark.parametrize("letters", [2, 6, 50])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_copied_equals_a_plain_searchs(seed, letters):
    text, chance = repeating(seed, 500, letters), random.Random(seed)
    lookup, plain, ids, found = PromptLookup(), PlainSearch(), [], 0
    while len(ids) < len(text):
        ids += text[len(ids) : len(ids) + chance.choice([1] * 8 + [2, 7, 90])]
        assert lookup.follow(ids) == plain.follow(ids)
        assert lookup.source == plain.source
        if lookup.source:
            found += 1
            assert lookup.length == plain.length() and lookup.draft(40) == plain.draft(40)
    assert found > 20


def test_as_much_is_copied_as_by_the_longest_match(pair):
    """On text of a model: the longest earlier occurrence of the end, by looking everywhere."""
    model, tokenizer, _ = pair
    prompt = tokenizer.encode("class Stack:\n    def push(self, x):\n        self.items.append(x)\n\n    def pop(self):\n")
    text = prompt + greedy_ids(model, prompt, 300)

    def longest(ids):
        found = (0, 0)
        for e in range(1, len(ids)):
            n = 0
            while n < e and ids[e - 1 - n] == ids[-1 - n]:
                n += 1
            found = max(found, (n, e))
        return found[1] if found[0] >= copying.SHORTEST else 0

    def accepted(source_of):
        at, total, rounds = len(prompt), 0, 0
        while at < len(text):
            source, n = source_of(text[:at]), 0
            while source and n < 7 and at + n < len(text) and text[at + n] == (text[:at] + text[at : at + n])[source + n]:
                n += 1
            at, total, rounds = at + n + 1, total + n, rounds + 1
        return total, rounds

    lookup = PromptLookup()
    ours, theirs = accepted(lambda ids: lookup.follow(ids) and lookup.source), accepted(longest)
    assert ours[0] > 100 and ours[1] <= 1.05 * theirs[1]


def test_chances_follow_what_came_after_matches_of_each_length():
    lookup, ids = PromptLookup(), repeating(1, 40) + list(range(60, 160))
    lookup.follow(ids)
    # The same 100 ids again and again, with another one after every 5.
    for _ in range(6):
        for at in range(0, 100, 5):
            ids += [*range(60 + at, 65 + at), 1000 + len(ids)]
            for n in range(len(ids) - 5, len(ids) + 1):
                lookup.follow(ids[:n])
    counts = lookup._counts
    two, three, four = (counts[length][0] / counts[length][1] for length in (2, 3, 4))
    # After 2 ids the third is right, after 3 the fourth, after 4 the fifth, after 5 never; nothing longer was seen.
    assert two > 0.9 < three and 0.45 < four < 0.6
    assert counts[16] == PromptLookup()._counts[16]
    ids += [60, 61]
    assert lookup.follow(ids) and lookup.length == 2
    rates = lookup.rates(8)
    assert rates[:2] == [two, three] and rates[2:6] == [four] * 4 and rates[6] > four


def test_a_prompt_is_not_counted_and_does_not_keep_its_sources():
    lookup = PromptLookup()
    assert lookup.follow(repeating(2, 400) + [1, 2, 3, 4, 1, 2, 3]) and lookup.draft(3) == [4, 1, 2]
    assert lookup._counts == PromptLookup()._counts


def test_short_texts_have_nothing_to_copy():
    for ids in ([], [1], [1, 1]):
        assert not PromptLookup().follow(ids)
    assert PromptLookup().follow([1, 1, 1])


# In the loop


def rounds_by_search(prompt, stats, block):
    """Checks every round of a run at a fixed block size: copied ids where there is something to copy, else the drafter's."""
    search, ids = PlainSearch(), None
    for r in stats.rounds:
        ids = prompt if ids is None else ids
        found = search.follow(ids)
        assert r.source == ("prompt_lookup" if found else "drafter"), len(ids)
        if found:
            assert r.drafted == search.draft(block - 1), len(ids)
        ids = [*ids, *r.drafted[: r.accepted], r.bonus]


class KnownPromptLookup(PromptLookup):
    """Says at two ids of three that there is something to copy, and copies the known line, with errors."""

    def __init__(self, line):
        super().__init__()
        self.line = line

    def follow(self, ids):
        super().follow(ids)
        return len(ids) % 3 > 0

    def draft(self, n):
        places = range(len(self.ids), len(self.ids) + n)
        known = [*self.line, *[0] * (len(self.ids) + n)]
        return [known[at] if (at * 7919) % 10 > 1 else (known[at] + 1) % 50 for at in places]

    def rates(self, n):
        return [0.5] * n


@pytest.fixture
def mixed(monkeypatch):
    """Makes runs with block_size=None change widths and copy now and then; call it with a line of ids and a seed."""

    def use(line, seed):
        rule = []

        def draft_length_policy(pair, stream):
            rule[:] = [Shuffled(pair.drafter.config.block_size - 1, seed, copies=True)]
            return rule[0]

        monkeypatch.setattr(DFlashPair, "draft_length_policy", draft_length_policy)
        monkeypatch.setattr(loop, "PromptLookupProposer", lambda: PromptLookupProposer(KnownPromptLookup(line)))
        return rule

    return use


@pytest.fixture
def short(monkeypatch):
    """One id that stood before is followed: a random target seldom says three ids twice, and then for ever."""
    monkeypatch.setattr(copying, "SHORTEST", 1)
    monkeypatch.setattr(PromptLookup, "START", {1: 0.3, **PromptLookup.START})
    monkeypatch.setattr(FixedDraftLength, "prompt_lookup_width", lambda self, width, rates: self.width)


@pytest.fixture(scope="module")
def tiny():
    model = tiny_target(seed=2)
    line = greedy_ids(model, PROMPT, 130)
    return model, line, tiny_drafter(model, cls=Noisy).learn(PROMPT + line, model)


FAMILIES = ["llama", "llama, mixed windows", "qwen3_next", "mamba2", "llama4", "falcon_h1"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.quick(3)
def test_copied_drafts_are_a_plain_searchs_and_change_no_token(short, name):
    model, prompt = family(name), some_line(30)
    line = greedy_ids(model, prompt, 90)
    drafter = known_drafter(model, prompt + line)
    got = run(model, drafter, prompt, 90, block_size=6, prompt_lookup=True)
    stats = got[-1].stats
    assert ids_of(got) == line
    rounds_by_search(prompt + line[:1], stats, 6)
    assert stats.sources["prompt_lookup"]["rounds"] > 2 and stats.sources["drafter"]["rounds"] > 2
    assert stats.looked_up == {5: stats.sources["prompt_lookup"]["rounds"]}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.quick(3)
def test_sources_and_widths_that_change_change_no_token_of_any_kind_of_cache(mixed, name):
    model, prompt = family(name), some_line(30)
    line = greedy_ids(model, prompt, 120)
    mixed(prompt + line, seed=7)
    drafter = known_drafter(model, prompt + line)
    cache = make_prompt_cache(model, drafter)
    steps = stream_generate(model, letters(), prompt, 90, drafter, prompt_cache=cache)
    got = [next(steps) for _ in range(61)]
    # Closed in the middle, and taken up again.
    steps.close()
    held = PairCache.read(cache)
    assert ids_of(got) == line[:61] and held.ids == prompt + line[:61]
    sources = got[-1].stats.sources
    assert sources["prompt_lookup"]["rounds"] > 4 < sources["prompt_lookup"]["accepted"] and sources["drafter"]["accepted"] > 4
    assert ids_of(run(model, drafter, [line[61]], 40, block_size=None, prompt_cache=cache)) == line[62:102]


@pytest.mark.parametrize("seed", range(4))
def test_the_drafter_is_given_every_row_that_copies_committed(tiny, mixed, seed):
    # It compares every context row with a full forward.
    model, line, noisy = tiny
    rule = mixed(PROMPT + line, seed)
    got = run(model, noisy, PROMPT, 120, block_size=None)
    stats = got[-1].stats
    assert ids_of(got) == line[:120]
    order = [r.source for r in stats.rounds]
    followed = set(zip(order, order[1:], strict=False))
    found = "prompt_lookup"
    assert {(found, "drafter"), ("drafter", found), (found, "plain"), ("plain", found)} <= followed
    for r in stats.rounds:
        assert (r.width == 0) == (r.source == "plain") and len(r.drafted) == (4 if r.width else 0) and r.accepted <= r.width
    assert [copied for *_, copied in rule[0].told] == [source == "prompt_lookup" for source in order]
    accepted = [r.accepted for r in stats.rounds if r.source == "prompt_lookup"]
    assert len(set(accepted)) >= 4
    for source, found in stats.sources.items():
        assert found == {
            "rounds": order.count(source),
            "accepted": sum(r.accepted for r in stats.rounds if r.source == source),
        }


def test_rows_that_wait_for_the_drafter_are_bounded_while_drafts_are_copied(tiny, mixed, monkeypatch):
    model, line, noisy = tiny
    # 48 features a row, float32: 20 rows.
    monkeypatch.setattr(loop, "_PENDING_BYTES", 20 * 48 * 4)
    mixed(PROMPT + line, 0)
    monkeypatch.setattr(Shuffled, "next_length", lambda self, pending=0: 0)
    monkeypatch.setattr(KnownPromptLookup, "follow", lambda self, ids: PromptLookup.follow(self, ids) or True)
    monkeypatch.setattr(Shuffled, "prompt_lookup_width", lambda self, width, rates: 4)
    cache = make_prompt_cache(model, noisy)
    got = run(model, noisy, PROMPT, 120, block_size=None, prompt_cache=cache)
    stats = got[-1].stats
    assert ids_of(got) == line[:120] and stats.widths.keys() <= {0, 4} and stats.sources["prompt_lookup"]["rounds"] > 30
    assert PairCache.read(cache).pending <= 20 + 5


@pytest.mark.parametrize("start", range(8, 14))
def test_copying_changes_no_token_with_a_quantized_cache(mixed, start):
    # At 2 bits the text turns where the cache is quantized, so no block may reach over that row.
    model = tiny_target(seed=4, head_dim=32)
    options = {"kv_bits": 2, "kv_group_size": 32, "quantized_kv_start": start}
    line = greedy_ids(model, PROMPT, 60, **options)
    mixed(PROMPT + line, start)
    got = run(model, tiny_drafter(model), PROMPT, 60, block_size=None, **options)
    assert ids_of(got) == line and got[-1].stats.sources["prompt_lookup"]["accepted"] > 5


def test_a_seed_gives_the_same_text_with_copied_drafts(tiny, mixed, short):
    model, *_ = tiny
    drafter, options = tiny_drafter(model), {"sampler": make_sampler(temp=0.9, top_p=0.95), "seed": 11}
    expected = ids_of(run(model, None, PROMPT, 80, **options))
    assert ids_of(run(model, drafter, PROMPT, 80, prompt_lookup=True, **options)) == expected
    mixed(PROMPT + expected, 3)
    got = run(model, drafter, PROMPT, 80, block_size=None, **options)
    assert ids_of(got) == expected and got[-1].stats.sources["prompt_lookup"]["accepted"] > 10


def test_processors_see_the_committed_text_only_while_drafts_are_copied(tiny, mixed):
    model, *_ = tiny
    drafter, seen, plain_seen = tiny_drafter(model), [], []

    def recording(into):
        return [*make_logits_processors(repetition_penalty=1.3), lambda ids, row: (into.append(ids.tolist()), row)[1]]

    expected = ids_of(run(model, None, PROMPT, 60, logits_processors=recording(plain_seen)))
    mixed(PROMPT + expected, 5)
    got = run(model, drafter, PROMPT, 60, block_size=None, logits_processors=recording(seen))
    # The last round may go on behind the last token.
    assert ids_of(got) == expected and seen[:60] == plain_seen[:60] and got[-1].stats.sources["prompt_lookup"]["accepted"] > 10


def test_a_turn_copies_from_the_turns_before_and_not_from_what_was_cut(tiny, short):
    model, line, _ = tiny
    drafter = tiny_drafter(model, layer_types=["full_attention"] * 2)
    cache = make_prompt_cache(model, drafter)
    run(model, drafter, PROMPT, 40, prompt_cache=cache)
    assert trim_prompt_cache(cache, 15) == 15
    held = PROMPT + line[:25]
    assert PairCache.read(cache).ids == held
    again = run(model, drafter, [9, 33], 30, prompt_cache=cache, prompt_lookup=True)
    fresh = run(model, drafter, held + [9, 33], 30, prompt_lookup=True)
    assert ids_of(again) == ids_of(fresh) == greedy_ids(model, held + [9, 33], 30)
    assert [dict(r) for r in again[-1].stats.rounds] == [dict(r) for r in fresh[-1].stats.rounds]
    rounds_by_search(held + [9, 33, again[0].token], again[-1].stats, 5)
    assert again[-1].stats.sources["prompt_lookup"]["rounds"] > 5


def test_a_pass_in_which_a_kernel_failed_runs_once_more_with_the_same_copies(tiny, mixed, monkeypatch):
    model, line, noisy = tiny
    for nth in range(2, 12):
        with monkeypatch.context() as patch:
            mixed(PROMPT + line, nth)
            failing_pass(patch, nth)
            assert ids_of(run(model, noisy, PROMPT, 60, block_size=None)) == line[:60], nth


def test_accepted_copies_do_not_hide_a_drafter_that_overflows(mixed, monkeypatch):
    model = tiny_target(seed=2)
    model.set_dtype(mx.float16)
    line = greedy_ids(model, PROMPT, 60)
    mixed(PROMPT + line, 0)
    monkeypatch.setattr(FixedDraftLength, "prompt_lookup_width", lambda self, width, rates: self.width)
    drafter = tiny_drafter(model)
    drafter.fc.weight = drafter.fc.weight * 1e5
    drafter.set_dtype(mx.float16)
    with pytest.warns(UserWarning, match="overflow float16 in the drafter's fc"):
        got = run(model, drafter, PROMPT, 40, prompt_lookup=True)
    order = [(r.source, r.accepted > 0) for r in got[-1].stats.rounds]
    assert [] == [1 for at in range(len(order)) if order[at : at + 4] == [("drafter", False)] * 4]
    assert ids_of(got) == line[:40]


def test_no_copying_at_a_fixed_block_size_or_where_it_is_off(tiny, short, monkeypatch):
    model, line, noisy = tiny
    for options in ({"block_size": 5}, {"block_size": 5, "prompt_lookup": False}, {"block_size": None, "prompt_lookup": False}):
        assert run(model, noisy, PROMPT, 40, **options)[-1].stats.sources["prompt_lookup"]["rounds"] == 0
    made = []
    monkeypatch.setattr(copying.PromptLookup, "__init__", lambda self: made.append(1))
    monkeypatch.setattr(copying.PromptLookup, "follow", lambda self, ids: False)
    run(model, noisy, PROMPT, 40, block_size=None)
    assert made == [1]


@pytest.mark.parametrize(
    "options,message",
    [
        ({"acceptance": "rejection", "sampler": Distribution(0.9)}, "prompt_lookup was given with acceptance='rejection'"),
        ({"block_size": 1}, "prompt_lookup was given with a block_size of 1, which drafts nothing"),
    ],
)
def test_copying_that_cannot_be_had_is_refused(tiny, options, message):
    model, _, noisy = tiny
    with pytest.raises(GenerationError, match=message):
        run(model, noisy, PROMPT, 10, prompt_lookup=True, **options)


def test_copying_without_a_drafter_is_refused(tiny):
    with pytest.raises(GenerationError, match="prompt_lookup is True and there is no DFlash drafter"):
        run(tiny[0], None, PROMPT, 10, prompt_lookup=True)


def test_drawn_drafts_are_never_copied(pair):
    model, tokenizer, drafter = pair
    options = {"sampler": Distribution(0.9), "acceptance": "rejection", "seed": 3, "block_size": None}
    got = run(model, drafter, "x = 1\nx = 1\nx = 1\n", 40, tokenizer, **options)
    assert got[-1].stats.sources["prompt_lookup"]["rounds"] == 0
