"""Turns that begin as earlier ones: only what is new runs, and tokens, drafts and texts are those of a fresh run."""

import itertools
import random

import mlx.core as mx
import pytest
from families import RIGHT, Known, family, known_drafter, some_line
from kit import grow, ids_of, letters, rounds_of, run, tiny_qwen3, tiny_target
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from dflash_mlx import make_prompt_cache, stream_generate
from dflash_mlx.models.drafter import Drafter
from dflash_mlx.models.target import Target
from dflash_mlx.prompt_cache import PairCache
from dflash_mlx.serving.prefix_cache import CacheOptions, PrefixCache, stream_from_prefix

KINDS = {"plain": "llama", "sliding window": "gemma3", "hybrid": "qwen3_next"}


class Mixed(Known):
    """Drafts the known line at some positions and its own tokens, made from its context, elsewhere."""

    def draft(self, anchor, features, cache, start, block_size):
        own = Drafter.draft(self, anchor, features, cache, start, block_size)
        at = start + features.shape[1] + 1
        known = [*self._line[at : at + block_size - 1], *[0] * block_size][: block_size - 1]
        right = mx.array([[self.right(at + i) for i in range(block_size - 1)]])
        return mx.where(right, mx.array([known], dtype=mx.int32), own)


def mixed(model, line, **changes):
    """A drafter whose rounds end at all depths and whose other drafts tell what its context holds."""
    drafter = known_drafter(model, line, **changes)
    drafter.__class__ = Mixed
    return grow(drafter)


# A drafter whose every cache can be cut anywhere.
FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": None}


@pytest.fixture
def rows(monkeypatch):
    """Rows of every target pass, in order."""
    seen, call = [], Target.__call__

    def counted(self, tokens, *args, **kwargs):
        seen.append(tokens.shape[1])
        return call(self, tokens, *args, **kwargs)

    monkeypatch.setattr(Target, "__call__", counted)
    return seen


def turn(model, drafter, prompt, store, n=16, **options):
    if drafter is not None:
        options.setdefault("block_size", drafter.config.block_size)
    opened = stream_from_prefix(model, letters(), prompt, store, "pair", draft_model=drafter, max_tokens=n, **options)
    return opened.held, list(opened.responses)


def same(a, b):
    return ids_of(a) == ids_of(b) and rounds_of(a) == rounds_of(b)


@pytest.mark.parametrize(
    ("caches", "kind"),
    [
        (CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=40, prefill_step_size=9), QuantizedKVCache),
        (CacheOptions(max_kv_size=24), RotatingKVCache),
    ],
)
def test_turns_on_quantized_or_windowed_caches_say_the_same_with_a_drafter_and_without(caches, kind):
    model = tiny_target(seed=3, head_dim=32) if caches.kv_bits else tiny_qwen3()
    line, stores = [i % 50 for i in some_line(80)], (PrefixCache(6), PrefixCache(6))
    # One whose caches can be cut where the target's can: what a turn finds held decides what of it was quantized when.
    drafter = mixed(model, line, **FULL)
    # Over the row from which caches are quantized, a change behind what is held, and on.
    for length, new in ((30, 0), (60, 0), (50, 7), (70, 7)):
        whole = line[: length - new] + [3] * new
        asked = {"caches": caches, "shared": [(length - new - 4, "user")]}
        (_, plain), (_, drafted) = (turn(model, d, whole, s, **asked) for d, s in zip((None, drafter), stores, strict=True))
        assert ids_of(drafted) == ids_of(plain), length
        assert drafted[-1].stats.n_drafting
    entries, _ = stores[1].fetch_nearest_cache("pair", whole)
    assert type(entries[0]) is kind and getattr(entries[0], "max_size", None) == caches.max_kv_size


@pytest.mark.parametrize("length", [150, pytest.param(2000, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_runs_only_what_is_new_and_drafts_as_a_fresh_run(kind, length, rows):
    model, prompt, new = family(KINDS[kind]), some_line(length), some_line(12)[::-1]
    first = ids_of(run(model, None, prompt, 16))
    whole = [*prompt, *first, *new]
    second = ids_of(run(model, None, whole, 16))
    drafter = mixed(model, [*whole, *second])
    store = PrefixCache(4)
    assert ids_of(turn(model, drafter, prompt, store, prefill_step_size=64)[1]) == first
    rows.clear()
    opened = stream_from_prefix(model, letters(), whole, store, "pair", draft_model=drafter, max_tokens=16, block_size=5)
    responses = [next(opened.responses)]
    # The last turn's last token, which the target had not read yet, and the new ones.
    assert sum(rows) == len(new) + 1 and opened.held == len(prompt) + len(first)
    responses += opened.responses
    fresh = run(model, drafter, whole, 16)
    assert ids_of(fresh) == second and same(responses, fresh)
    assert {len(r["drafted"]) for r in fresh[-1].stats.rounds} == {4} and 1 < fresh[-1].stats.tau < 5


@pytest.mark.parametrize("with_drafter", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_history_that_changed_behind_a_kept_copy_goes_on_from_there(kind, with_drafter):
    # As when a template drops the thinking of earlier answers.
    model, prompt = family(KINDS[kind]), some_line(90)
    shared = [(40, "system"), (80, "user")]
    drafter = mixed(model, prompt) if with_drafter else None
    store = PrefixCache(6)
    held, first = turn(model, drafter, prompt, store, shared=shared)
    assert held == 0 and ids_of(first) == ids_of(run(model, None, prompt, 16))
    for cut in (80, 40):
        other = [*prompt[:cut], *some_line(7)[::-1]]
        held, again = turn(model, drafter, other, store)
        fresh = run(model, drafter, other, 16)
        assert held == cut
        assert ids_of(again) == ids_of(fresh) and (drafter is None or same(again, fresh))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_prompt_again_gives_the_same_answer(kind):
    model, prompt = family(KINDS[kind]), some_line(60)
    drafter = mixed(model, prompt, **(FULL if kind == "plain" else {}))
    store = PrefixCache(6)
    held, first = turn(model, drafter, prompt, store, shared=[(55, "user")])
    again_held, again = turn(model, drafter, prompt, store, shared=[(55, "user")])
    assert same(first, again) and held == 0 and again_held == (59 if kind == "plain" else 55)


@pytest.mark.parametrize("with_drafter", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(5)
def test_a_turn_that_is_stopped_anywhere_leaves_what_it_computed(kind, with_drafter):
    model, prompt = family(KINDS[kind]), some_line(50)
    drafter = mixed(model, prompt) if with_drafter else None
    expected = ids_of(run(model, None, prompt, 16))
    for asked in (1, 2, 4, 9, 15):
        store, count = PrefixCache(6), itertools.count(1)
        options = {"prefill_step_size": 8, "shared": [(20, "user")]}
        _, cut = turn(model, drafter, prompt, store, should_stop=lambda n=asked, c=count: next(c) >= n, **options)
        # It is asked between the prompt's passes (4 times up to the kept copy and 5 behind it, if there is one), then after
        # each token.
        looks = 9 if with_drafter or kind != "plain" else 8
        assert ids_of(cut) == expected[: max(asked - looks, 0)]
        held, whole = turn(model, drafter, prompt, store)
        assert ids_of(whole) == expected
        assert drafter is None or same(whole, run(model, drafter, prompt, 16))
        assert held > 0 or asked == 1


@pytest.mark.parametrize("with_drafter", [True, False])
def test_a_closed_turn_is_kept_and_one_that_fails_is_not(with_drafter):
    model, prompt = tiny_target(), some_line(20, 61)
    drafter = mixed(model, prompt) if with_drafter else None
    store = PrefixCache(6)
    opened = stream_from_prefix(model, letters(), prompt, store, "pair", draft_model=drafter, max_tokens=9)
    next(opened.responses)
    opened.responses.close()
    assert len(store) == 1

    def fails(tokens, logits):
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        turn(model, drafter, some_line(30, 61)[::-1], store, logits_processors=[fails])
    assert len(store) == 1


@pytest.mark.parametrize("changes", [{}, FULL], ids=["from a copy", "from a cut"])
def test_two_turns_that_branch_off_one_do_not_disturb_each_other(changes):
    model, prompt = tiny_target(), some_line(30, 61)
    drafter, store = mixed(model, prompt, **changes), PrefixCache(8)
    turn(model, drafter, prompt, store, shared=[(29, "user")])
    branches = [[*prompt, n, n + 1, n + 2] for n in (5, 25, 5)]
    options = {"draft_model": drafter, "max_tokens": 12, "block_size": 5}
    opened = [stream_from_prefix(model, letters(), b, store, "pair", **options) for b in branches]
    assert [o.held for o in opened] == [30 if changes else 29] * 3
    got = list(zip(*(o.responses for o in opened), strict=True))
    for i, branch in enumerate(branches):
        assert same([step[i] for step in got], run(model, drafter, branch, 12))


def test_a_conversation_keeps_one_cache_and_its_bytes_are_counted():
    model, prompt = tiny_target(), some_line(10, 61)
    drafter, store = mixed(model, prompt, **FULL), PrefixCache(4)
    for _ in range(5):
        held, responses = turn(model, drafter, prompt, store, n=6)
        prompt = [*prompt, *ids_of(responses), 3, 4]
    assert len(store) == 1 and held == len(prompt) - 10
    entry = store.fetch_nearest_cache("pair", prompt)[0]
    assert store.nbytes == sum(e.nbytes for e in entry) == sum(s["n_bytes"] for s in store.stats_by_type().values())
    assert PairCache.read(entry).ids == prompt[:-2]


def test_caches_of_other_models_are_never_taken_and_full_stores_drop_the_oldest():
    model, prompt = tiny_target(), some_line(12, 61)
    store = PrefixCache(2)
    for key in ("a", "b", "c"):
        opened = stream_from_prefix(model, letters(), prompt, store, key, max_tokens=3)
        list(opened.responses)
        assert opened.held == 0
    assert len(store) == 2 and store.fetch_nearest_cache("a", prompt)[0] is None
    small = PrefixCache(4, max_bytes=10)
    turn(model, mixed(model, prompt, **FULL), prompt, small, 3)
    assert len(small) == 0 and small.nbytes == 0


def test_copies_are_made_only_where_cutting_may_fail():
    lengths = {}
    for kind, name in KINDS.items():
        model, store = family(name), PrefixCache(8)
        list(stream_from_prefix(model, letters(), some_line(40), store, "m", max_tokens=3, shared=[(20, "user")]).responses)
        lengths[kind] = len(store)
        kinds = {type(e) for e in store.fetch_nearest_cache("m", some_line(40))[0]}
        assert kinds & {"plain": {KVCache}, "sliding window": {RotatingKVCache}, "hybrid": {ArraysCache}}[kind]
    assert lengths == {"plain": 1, "sliding window": 2, "hybrid": 2}


# Two values each of temperature, top-p, top-k, min-p, XTC, bias and two penalties, in six settings that hold every pair of
# values: row r of column c is its second value if r is in the c-th of the threes out of 1..5.
FACTORS = [
    ("temp", (0.7, 1.1)),
    ("top_p", (0.0, 0.9)),
    ("top_k", (0, 30)),
    ("min_p", (0.0, 0.02)),
    ("xtc_probability", (0.0, 0.5)),
    ("logit_bias", (None, {3: 2.0, 17: -4.0})),
    ("repetition_penalty", (None, 1.2)),
    ("presence_penalty", (None, 0.8)),
]
_SAMPLER = {"temp", "top_p", "top_k", "min_p", "xtc_probability"}


def settings(row):
    threes = itertools.combinations(range(1, 6), 3)
    chosen = {name: values[row in three] for (name, values), three in zip(FACTORS, threes, strict=False)}
    sampler = make_sampler(**{k: v for k, v in chosen.items() if k in _SAMPLER}, xtc_threshold=0.05)
    processors = make_logits_processors(**{k: v for k, v in chosen.items() if k not in _SAMPLER})
    return chosen, {"sampler": sampler, "logits_processors": processors, "seed": 11}


def test_the_six_settings_hold_every_pair_of_values():
    rows = [settings(row)[0] for row in range(6)]
    for a, b in itertools.combinations(FACTORS, 2):
        pairs = {(str(r[a[0]]), str(r[b[0]])) for r in rows}
        assert len(pairs) == 4, (a[0], b[0])


CELLS = [
    (row, drafter, block, reused)
    for row in range(6)
    for drafter in ("none", "hopeless", "noisy", "oracle", "trained")
    for block in ((None,) if drafter == "none" else (1, 4, 16))
    for reused in (False, True)
]


def _check(cells, pair):
    model, tokenizer, trained = pair
    turns = [list(tokenizer.encode(text)) for text in ("def add(a, b):\n    return a + b\n\ndef sub", "\n\nclass Stack:\n")]
    lines = {}
    for row, quality, block, reused in cells:
        _, options = settings(row)
        if row not in lines:
            first = ids_of(run(model, None, turns[0], 8, **options))
            prompt = [*turns[0], *first, *turns[1]]
            lines[row] = prompt, ids_of(run(model, None, prompt, 16, **options)), first
        prompt, expected, first = lines[row]
        drafter = None if quality == "none" else trained
        if quality in RIGHT:
            drafter = known_drafter(model, [*prompt, *expected], quality)
        if drafter:
            options["block_size"] = block
        store = PrefixCache(4)
        if reused:
            assert ids_of(turn(model, drafter, turns[0], store, 8, **options)[1]) == first
        held, got = turn(model, drafter, prompt, store, 16, **options)
        assert (held > 0) == reused
        assert ids_of(got) == expected, (row, quality, block, reused)
        if quality == "oracle" and block == 16:
            assert got[-1].stats.tau == 16


@pytest.mark.parametrize("name", ["llama", "mamba", "rwkv7", "falcon_h1", "deepseek_v32", "qwen3_next"])
@pytest.mark.quick(2)
def test_a_seeds_text_is_the_same_where_entries_do_not_know_their_rows(name):
    model, prompt = family(name), some_line(8)
    options = {"sampler": make_sampler(1.0), "seed": 3}
    want = ids_of(list(stream_generate(model, letters(), prompt, 12, **options)))
    for drafter in (None, known_drafter(model, [*prompt, *want], "noisy", block=4)):
        turn = stream_from_prefix(
            model,
            letters(),
            prompt,
            PrefixCache(6),
            "m",
            draft_model=drafter,
            shared=[(7, "user")],
            max_tokens=12,
            **options,
        )
        assert ids_of(list(turn.responses)) == want, drafter
    # A second turn over a list that a drafter was used with, without it and with it.
    texts = []
    for with_drafter in (True, False):
        drafter = known_drafter(model, [*prompt, *want], "noisy", block=4)
        cache = make_prompt_cache(model, drafter)
        first = ids_of(list(stream_generate(model, letters(), prompt, 4, drafter, prompt_cache=cache, block_size=4)))
        given = {"draft_model": drafter, "block_size": 4} if with_drafter else {}
        texts.append(
            [first, ids_of(list(stream_generate(model, letters(), some_line(5), 8, prompt_cache=cache, **given, **options)))]
        )
    assert texts[0] == texts[1]


@pytest.mark.full
def test_a_seeds_text_is_the_same_with_any_drafter_block_and_cache(pair):
    _check(random.Random(5).sample(CELLS, 18), pair)


@pytest.mark.full
@pytest.mark.parametrize("row", range(6))
def test_a_seeds_text_is_the_same_in_every_cell(pair, row):
    _check([cell for cell in CELLS if cell[0] == row], pair)


@pytest.mark.parametrize("limit", [{"max_size": 0}, {"max_bytes": 0}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_of_no_size_keeps_nothing_and_makes_no_copies(kind, limit, rows):
    model, prompt, store = family(KINDS[kind]), some_line(40), PrefixCache(**limit)
    want = ids_of(run(model, None, prompt, 8))
    drafter = mixed(model, prompt)
    for _ in range(2):
        rows.clear()
        held, responses = turn(model, drafter, prompt, store, 8, shared=[(20, "user")])
        # The prompt in one pass: nothing stops at 20 for a copy.
        assert held == 0 and ids_of(responses) == want and max(rows) == 39
    assert len(store) == 0 and store.nbytes == 0


@pytest.mark.parametrize(("back", "kept"), [(1, 0), (9, 0), (-5, 65)])
def test_a_chunk_whose_front_is_gone_is_not_cut_without_a_drafter(back, kept):
    # llama4's layers attend from their chunk's first row; what is held of 68 rows begins at row 52, chunks at 48 and 64.
    model, prompt, store = family("llama4"), some_line(60), PrefixCache(6)
    _, first = turn(model, None, prompt, store, 8)
    other = [*[*prompt, *ids_of(first)][: len(prompt) - back], 6, 7]
    held, responses = turn(model, None, other, store, 8)
    assert ids_of(responses) == ids_of(run(model, None, other, 8)) and held == kept
