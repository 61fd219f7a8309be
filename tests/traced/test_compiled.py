"""Compiled passes over blocks: the states, cache rows, ids and rounds of ordinary ones, and not used where they are others."""

import gc
import logging
import math
import weakref
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from families import family, known_drafter
from kit import greedy_ids, ids_of, letters, rounds_of, run, tiny_drafter, tiny_qwen3, tiny_target
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import llama
from mlx_lm.models.base import create_causal_mask
from traced_kit import BLOCK, PROMPT, blocks_of, filled, near, stream, verify

from dflash_mlx import make_prompt_cache, traced
from dflash_mlx.draft_length.policy import FixedDraftLength
from dflash_mlx.kernels.routing import Linear
from dflash_mlx.models.target import Target
from dflash_mlx.pair import DFlashPair
from dflash_mlx.prompt_cache import PairCache, trim_prompt_cache
from dflash_mlx.rollback import rollback, rollback_point
from dflash_mlx.traced import CompileError, buffers, compiled, compiled_draft
from dflash_mlx.traced.compiled import capacity_for
from dflash_mlx.traced.compiled_draft import CompiledDraft


@pytest.mark.parametrize("make", [tiny_target, tiny_qwen3])
def test_a_compiled_block_gives_the_states_and_the_rows_of_an_ordinary_one(make):
    model = make()
    plain, ours = Target(model, (0, 2)), blocks_of(model)
    caches = [filled(model, plain), filled(model, plain)]
    for keep in (5, 1, 3, 0, 2):
        (expected, undo), (found, undo_ours) = verify(plain, caches[0]), verify(ours, caches[1])
        assert near(found.hidden, expected.hidden) and near(found.features, expected.features)
        for cache, point in zip(caches, (undo, undo_ours), strict=True):
            rollback(cache, point, point.length + keep)
        for a, b in zip(*caches, strict=True):
            assert a.offset == b.offset
            assert all(near(y[:, :, : a.offset], x[:, :, : a.offset]) for x, y in ((a.keys, b.keys), (a.values, b.values)))
    assert ours.accelerator.passes == 5


def test_blocks_are_filled_up_and_what_fills_them_is_not_handed_out():
    model = tiny_target()
    plain, ours = Target(model, (0, 2)), blocks_of(model)
    for rows in (1, 2, 1, 3, 4, 5, 6, 7, 8, 9):
        caches = [filled(model, plain), filled(model, ours)]
        block = [*BLOCK, *BLOCK][:rows]
        expected, found = verify(plain, caches[0], block)[0], verify(ours, caches[1], block)[0]
        for name in ("hidden", "features"):
            a, b = getattr(found, name), getattr(expected, name)
            assert a.shape == b.shape and near(a, b)
        assert {entry.offset for entry in caches[1]} == {7 + rows}
    # One row waits for others to be traced; then it is compared for itself, and shares the trace of four.
    traces = [(key[0], key[-1]) for key in ours.accelerator._known]
    assert ours.accelerator.passes == 9 and traces == [((0, 4), 4), ((0, 4), 1), ((0, 8), 8), ((0, 12), 12)]
    assert len({id(run) for run in ours.accelerator._known.values()}) == 3


@pytest.mark.full
def test_single_rows_are_traced_once_whoever_chose_the_token(pair, forced, monkeypatch):
    model, tokenizer, drafter = pair
    drafter.pair, shapes, original = None, [], compiled.traceable
    monkeypatch.setattr(compiled, "traceable", lambda *args: (shapes.append(args[2][0].dtype), original(*args))[1])
    prompt = tokenizer.encode("def area(width, height):")
    # One answer traces blocks; in the next, tokens of the device's and of the host's stand alone in their passes.
    for widths in ([3] * 20, [3, 0, 0, 0, 3, 0, 0, 3, 0, 3] * 4):
        rule, left = FixedDraftLength(3), iter(widths)
        rule.next_length = lambda pending=0, left=left: next(left, 0)
        monkeypatch.setattr(DFlashPair, "draft_length_policy", lambda *_, rule=rule: rule)
        out = list(run(model, drafter, prompt, 40, tokenizer, block_size=None))
        assert ids_of(out) == greedy_ids(model, prompt, 40)
    blocks, drafts = drafter.pair.accelerator.passes
    assert out[-1].stats.widths[0] > 15 and 1 in {key[-1] for key in blocks._known}
    # A block of 4 rows and a single one are one trace; the drafter's is another, of floats beside ids.
    assert len(shapes) == len({id(known) for passes in (blocks, drafts) for known in passes._known.values()})


def test_a_drafter_that_cannot_be_compiled_is_given_its_context_once():
    model = tiny_target()
    ours, seen = drafts_of(tiny_drafter(model)), []
    assert any(type(entry) is not mlx_lm_cache.KVCache for entry in ours.make_cache())
    inject = type(ours).inject
    object.__setattr__(ours, "inject", lambda *args: (seen.append(1), inject(ours, *args)))
    ours.slots(mx.array([9]), mx.random.normal((1, 40, 48)), ours.make_cache(), 0, 5)
    assert not seen and ours.pair.accelerator.passes == 0


@pytest.mark.parametrize("S, lengths", [(20, []), (21, [20]), (40, [20]), (41, [40]), (75, [60])])
def test_much_context_is_injected_in_few_lengths_before_a_draft(S, lengths):
    model = tiny_target()
    layers = {"layer_types": None, "sliding_window": None}
    plain, ours = tiny_drafter(model, **layers), drafts_of(tiny_drafter(model, **layers))
    features, caches = mx.random.normal((1, S, 48)), [plain.make_cache(), ours.make_cache()]
    seen, inject = [], type(ours).inject
    object.__setattr__(ours, "inject", lambda rows, *args: (seen.append(rows.shape[1]), inject(ours, rows, *args)))
    for _ in range(2):  # the first one meets empty entries
        found = [d.slots(mx.array([9]), features, c, c[0].offset, 5) for d, c in zip((plain, ours), caches, strict=True)]
        assert near(*found) and caches[0][0].offset == caches[1][0].offset
    # At most four blocks of 5 are left to the pass itself.
    assert seen == lengths * 2 and ours.pair.accelerator.passes == (2 if lengths else 1)


@pytest.mark.parametrize("causal", [True, False])
def test_a_drafter_with_windows_is_compiled_as_long_as_they_hold_every_row(causal):
    model = tiny_target()
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 31, "is_causal": causal}
    plain, ours = tiny_drafter(model, **layers), drafts_of(tiny_drafter(model, **layers))
    caches, start, passes = [plain.make_cache(), ours.make_cache()], 0, []
    # Up to 30 rows, with the block's five and what fills up new ones, and then beyond.
    for S in (4, 2, 1, 5, 3, 4, 1, 6, 4, 5, 2):
        features = mx.random.normal((1, S, 48), key=mx.random.key(start))
        found = [drafter.slots(mx.array([9]), features, c, start, 5) for drafter, c in zip((plain, ours), caches, strict=True)]
        start += S
        assert near(found[1], found[0])
        passes.append(ours.pair.accelerator.passes)
        for theirs, entry in zip(*caches, strict=True):
            held = theirs.keys.shape[2] if isinstance(theirs, mlx_lm_cache.RotatingKVCache) else start
            assert (entry.offset, held) == (start, getattr(entry, "_idx", start))
            assert near(entry.keys[:, :, :held], theirs.keys[:, :, :held])
    # Not the first pass, whose entries are empty; behind 20 rows, six and the block, filled up to 15, reach beyond 30.
    assert passes == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 6]


def test_what_is_kept_with_a_drafter_is_no_item_of_the_module(forced):
    model = tiny_target()
    drafter = tiny_drafter(model)
    # Another thread may be walking through it.
    for _ in drafter.items():
        DFlashPair.of(drafter).prepare_target()
    assert drafter.pair.accelerator and "pair" not in drafter


def test_what_fills_a_drafters_rows_is_written_behind_them():
    model = tiny_target()
    layers = {"layer_types": None, "sliding_window": None}
    plain, ours = tiny_drafter(model, **layers), drafts_of(tiny_drafter(model, **layers))
    caches, start = [plain.make_cache(), ours.make_cache()], 0
    # Up to where block, context and what fills it up end with the buffer, and then beyond.
    for S in (1000, 2, 3, 4, 2, 3, 4, 1, 4, 2):
        features = mx.random.normal((1, S, 48))
        found = [drafter.slots(mx.array([9]), features, c, start, 5) for drafter, c in zip((plain, ours), caches, strict=True)]
        start += S
        assert near(found[1], found[0])
        a, b = (c[0].keys[:, :, :start] for c in caches)
        assert near(a, b)
        assert caches[1][0].keys.shape[2] == (1024 if start - S + 10 <= 1024 else 2048)
    # Of the first 1000 rows only the last five are given to a compiled pass.
    assert ours.pair.accelerator.passes == 10


def test_a_row_that_was_rolled_back_is_never_seen_again():
    model = tiny_target()
    ours = blocks_of(model)
    cache = filled(model, ours)
    rollback(cache, verify(ours, cache, [1, 2, 3, 4, 5, 6, 7, 8])[1], 8)
    # What stands behind this block is made huge: it would show.
    for entry in cache:
        entry.keys[:, :, 12:], entry.values[:, :, 12:] = 1e4, 1e4
    found = verify(ours, cache, [30, 31, 32, 33])[0].hidden
    expected = model.model(mx.array([[*PROMPT, 1, 30, 31, 32, 33]]))[:, -4:]
    assert ours.accelerator.passes == 2 and near(found, expected)


@pytest.mark.parametrize("window", [None, 3, 100])
def test_the_mask_over_a_buffer_is_mlx_lms_and_hides_what_is_behind(window):
    buffer = mx.zeros((1, 1, 20, 2))
    place = buffers.Place.of(7, 0, 0, 5, mx.arange(20), mx.float16)
    mask = buffers.TracedKV(buffer, buffer, place, {}).make_mask(5, window_size=window)
    assert mx.array_equal(mask[:, :12], create_causal_mask(5, 7, window)) and not mask[:, 12:].any()


def test_rows_without_meaning_are_written_after_all_others_and_seen_by_none():
    place = buffers.Place.of(7, 3, 2, 4, mx.arange(20), mx.float16)
    assert place.rows.reshape(-1).tolist() == [13, 14, 15, 7, 8, 9, 10, 11, 12] and place.shape == (5, 4)
    assert place.seen.sum(axis=1).tolist() == [10, 11, 12, 13] and bool(mx.all(place.seen[:, :10]))
    assert [a.item() for a in (place.offset, place.block, place.end)] == [4, 9, 13]


def test_a_compiled_pass_waits_for_nothing(waits):
    model = tiny_target()
    ours = blocks_of(model)
    cache = filled(model, ours)
    verify(ours, cache)
    before = dict(waits)
    verify(ours, cache)
    assert ours.accelerator.passes == 2 and waits == before


def places(entries):
    """Where the buffers of a cache lie in memory."""
    mx.eval([(entry.keys, entry.values) for entry in entries])
    return [np.asarray(memoryview(array)).ctypes.data for entry in entries for array in (entry.keys, entry.values)]


def test_buffers_are_written_in_place():
    model = tiny_target(layers=2)
    ours = blocks_of(model, (0,))
    cache = filled(model, ours)
    verify(ours, cache)
    before = places(cache)
    for _ in range(3):
        output, _ = verify(ours, cache)
        mx.eval(output.hidden, output.features)
        assert places(cache) == before
    assert ours.accelerator.passes == 4


def test_capacities_are_few_and_little_too_large():
    assert [capacity_for(n) for n in (1, 1024, 1025, 8192, 8193, 100_000)] == [1024, 1024, 2048, 8192, 10_240, 114_688]
    sizes = {capacity_for(n) for n in range(1, 40_000)}
    assert len(sizes) == 17 and all(capacity_for(n) - n < max(1024, n / 4) for n in range(1, 40_000, 37))


@pytest.mark.parametrize("block_size", [5, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.full
def test_a_generation_that_outgrows_its_buffers_says_what_plain_decoding_says(forced, pair, block_size):
    model, tokenizer, drafter = pair
    prompt = tokenizer.encode("def test_") * 320
    n = 1065 - len(prompt)
    assert 60 < n < 120
    out = list(run(model, drafter, prompt, n, tokenizer, block_size=block_size))
    assert ids_of(out) == greedy_ids(model, prompt, n)
    assert {key[1] for key in drafter.pair.accelerator.passes[0]._known if key[0] == (0, -(-block_size // 4) * 4)} == {1024, 2048}


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma2", "cohere"])
def test_families_say_what_plain_decoding_says_and_round_by_round_what_uncompiled_passes_do(name, monkeypatch):
    model = family(name)
    line = PROMPT + greedy_ids(model, PROMPT, 40)
    answers = []
    for value in ("off", "on"):
        monkeypatch.setenv(traced.VARIABLE, value)
        drafter = known_drafter(model, line, "noisy", block=6)
        answers.append(list(run(model, drafter, PROMPT, 40, block_size=6)))
    assert ids_of(answers[0]) == ids_of(answers[1]) == line[len(PROMPT) :]
    assert rounds_of(answers[0]) == rounds_of(answers[1])
    assert drafter.pair.accelerator.passes[0].passes == len(answers[1][-1].stats.rounds)


def test_without_cuda_no_pass_is_compiled_unless_asked_for(monkeypatch):
    model = tiny_target()
    drafter = tiny_drafter(model)
    for value in (None, "", "off", "auto"):
        monkeypatch.delenv(traced.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(traced.VARIABLE, value)
        assert DFlashPair.of(drafter).prepare_target().accelerator is None
    monkeypatch.setenv(traced.VARIABLE, "yes")
    with pytest.raises(CompileError, match="DFLASH_MLX_COMPILE is 'yes'; it must be off, auto or on. Correct"):
        DFlashPair.of(drafter).prepare_target()


@pytest.mark.parametrize("value", ["off", "on"])
@pytest.mark.parametrize("block", [6, 16])
def test_no_block_reaches_beyond_learned_positions(value, block, monkeypatch):
    monkeypatch.setenv(traced.VARIABLE, value)
    model = family("gpt2")
    table, model.args.n_positions = model.model.wpe.weight, 48
    # What stands in memory behind the table would show: it is no number.
    model.model.wpe.weight = mx.where(mx.arange(len(table))[:, None] < 48, table, math.nan)[:48]
    want = greedy_ids(model, PROMPT, 48 - len(PROMPT))
    for quality in ("noisy", "hopeless"):
        drafter = known_drafter(model, PROMPT + want, quality, block=block)
        assert ids_of(run(model, drafter, PROMPT, len(want))) == want
    assert value == "off" or drafter.pair.accelerator.passes[0].passes > 5 and not drafter.pair.accelerator.passes[0].refused


@pytest.mark.parametrize("name", ["llama, mixed windows", "lfm2", "jamba", "afm7"])
def test_what_cannot_be_compiled_runs_as_ever(name, forced):
    model = family(name)
    line = PROMPT + greedy_ids(model, PROMPT, 30)
    drafter = known_drafter(model, line, "noisy", block=6)
    assert ids_of(run(model, drafter, PROMPT, 30, block_size=6)) == line[len(PROMPT) :]
    assert drafter.pair.accelerator.passes[0].passes == 0


def test_a_model_that_makes_numbers_of_positions_is_tried_once(caplog):
    model, traced = tiny_target(), []
    ours = blocks_of(model)
    cls = llama.Attention

    class Counting(cls):
        def __call__(self, x, mask=None, cache=None):
            traced.append(not isinstance(cache.offset, int))
            return super().__call__(x + int(cache.offset) * 0, mask, cache)

    model.layers[1].self_attn.__class__ = Counting
    cache = filled(model, ours)
    with caplog.at_level(logging.WARNING, logger="dflash_mlx.traced.compiled"):
        for rows in (5, 5, 4):
            verify(ours, cache, BLOCK[:rows])
    assert ours.accelerator.passes == 0 and sum(traced) == 1
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["llama is not compiled"]


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_pass_is_given_up_after_some_comparisons_and_with_one_line(fails, monkeypatch, caplog):
    model = tiny_target()
    ours, compare, compared = blocks_of(model), buffers.distance, []
    monkeypatch.setattr(
        compiled, "distance", lambda *args: (compared.append(1), 0.5 if len(compared) <= fails else compare(*args))[1]
    )
    cache = filled(model, ours)
    with caplog.at_level(logging.WARNING, logger="dflash_mlx.traced.compiled"):
        for _ in range(6):
            rollback(cache, verify(ours, cache)[1], len(PROMPT))
    used = fails < 3
    assert ours.accelerator.passes == (6 - fails if used else 0) and len(compared) == min(fails + 1, 3)
    assert len(caplog.records) == (0 if used else 1) and ours.accelerator.refused is None


def test_where_there_is_no_memory_for_fused_weights_passes_are_ordinary_ones(monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("[malloc] Unable to allocate 8388608 bytes.")

    monkeypatch.setattr(compiled, "fused_linears", fails)
    model = tiny_target()
    plain, ours = Target(model, (0, 2)), blocks_of(model)
    for _ in range(2):
        assert near(verify(ours, filled(model, ours))[0].hidden, verify(plain, filled(model, plain))[0].hidden)
    assert (
        ours.accelerator.passes == 0
        and ours.accelerator.refused.startswith("RuntimeError: [malloc]")
        and len(caplog.records) == 1
    )


def test_weights_that_were_joined_go_with_a_refusal(monkeypatch):
    def trace(*_):
        before.append(mx.get_active_memory())
        raise ValueError("a number was wanted")

    monkeypatch.setattr(compiled, "traceable", trace)
    model = tiny_target(hidden=256)
    ours = blocks_of(model)
    cache, before = filled(model, ours), []
    verify(ours, cache)
    gc.collect()
    assert ours.accelerator.refused == "ValueError: a number was wanted"
    # Of these there were copies.
    joined = sum(
        part[name].weight.nbytes for layer in model.layers for part, name in ((layer.self_attn, "q_proj"), (layer.mlp, "up_proj"))
    )
    assert mx.get_active_memory() < before[0] - joined


def test_a_pass_that_would_differ_is_not_used(caplog):
    """Attention that looks at what it is handed as if it were the rows held: a trace hands out whole buffers."""
    model = tiny_target()
    ours = blocks_of(model)

    class Unmasked(llama.Attention):
        def __call__(self, x, mask=None, cache=None):
            return super().__call__(x, "causal", cache)

    model.layers[2].self_attn.__class__ = Unmasked
    caches = [filled(model, ours), filled(model, ours)]
    before = [mx.array(entry.values) for entry in caches[0]]
    assert ours.accelerator.verify(ours, mx.array([BLOCK]), caches[0], rollback_point(caches[0], 7)) is None
    assert all(mx.array_equal(a, entry.values) and entry.offset == 7 for a, entry in zip(before, caches[0], strict=True))
    found = [verify(ours, caches[0])[0].hidden for _ in range(2)]
    expected = [verify(Target(model, (0, 2)), caches[1])[0].hidden for _ in range(2)]
    assert ours.accelerator.passes == 0 and all(map(near, found, expected))
    assert len(caplog.records) == 1 and "not used" in caplog.text


@pytest.mark.parametrize("rows", [slice(0, 7), slice(7, 12)])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_difference_in_the_rows_of_a_cache_alone_is_found(part, rows, monkeypatch):
    model = tiny_target()
    ours = blocks_of(model)
    write = buffers.TracedKV.update_and_fetch

    def wrong(self, keys, values):
        out = write(self, keys, values)
        off = mx.zeros((1024, 1))
        off[rows] = 0.01
        setattr(self, part, getattr(self, part) + off)
        return out

    monkeypatch.setattr(buffers.TracedKV, "update_and_fetch", wrong)
    verify(ours, filled(model, ours))
    assert ours.accelerator.passes == 0


def test_a_cache_is_used_again_trimmed_and_by_plain_decoding(forced, pair):
    model, tokenizer, drafter = pair
    first, second = tokenizer.encode("def add("), tokenizer.encode("for x in range(")
    cache = make_prompt_cache(model, drafter)
    out = ids_of(run(model, drafter, first, 30, tokenizer, prompt_cache=cache, block_size=8))
    line = [*first, *out]
    trim_prompt_cache(cache, 13)
    line = [*line[:-13], *second]
    got = ids_of(run(model, drafter, second, 20, tokenizer, prompt_cache=cache, block_size=8))
    assert got == greedy_ids(model, line, 20)
    line += got
    target = PairCache.read(cache).target
    assert drafter.pair.accelerator.passes[0].passes and greedy_ids(model, line[len(line) - 1 :], 15, target) == greedy_ids(
        model, line, 15
    )


@pytest.mark.full
def test_generators_by_turns_do_not_disturb_each_other(forced, pair):
    model, tokenizer, drafter = pair
    prompts = [tokenizer.encode("def test_"), tokenizer.encode("The quick brown fox")]
    sizes = zip(prompts, (8, 6), strict=True)
    steps = [stream(model, drafter, prompt, 40, tokenizer, block_size=size) for prompt, size in sizes]
    got = [[], []]
    for _ in range(40):
        for into, step in zip(got, steps, strict=True):
            into.append(next(step).token)
    assert got == [greedy_ids(model, prompt, 40) for prompt in prompts]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_interruption_between_the_entries_of_a_compiled_pass_leaves_the_cache_usable(forced, monkeypatch, after):
    model = tiny_target()
    line = PROMPT + greedy_ids(model, PROMPT, 60)
    drafter = known_drafter(model, line)
    cache = make_prompt_cache(model, drafter)
    got, call = [], buffers.run_traced

    def stopped(run, arrays, entries, place, end):
        before = [dict(vars(entry)) for entry in entries]
        out = call(run, arrays, entries, place, end)
        # A trial's copies are not in the cache.
        if end > 28 and entries[0] is cache[0]:
            for entry, attributes in zip(entries[after:], before[after:], strict=True):
                vars(entry).update(attributes)
            raise KeyboardInterrupt
        return out

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(compiled, "run_traced", stopped)
        for response in stream(model, drafter, PROMPT, 50, prompt_cache=cache):
            got.append(response.token)
    assert 10 < len(got) < 50 and got == line[len(PROMPT) : len(PROMPT) + len(got)]
    held = PairCache.read(cache)
    assert held.ids == PROMPT + got and {entry.offset for entry in held.target} == {len(held.ids) - 1}
    assert greedy_ids(model, held.ids[-1:], 20, held.target) == line[len(held.ids) : len(held.ids) + 20]


def drafts_of(drafter, always=True):
    passes = CompiledDraft(drafter, compiled.model_parts(drafter), always)
    # As its runs draft.
    drafter.pair, drafter.slots = SimpleNamespace(accelerator=passes), partial(drafter.slots, accelerator=passes)
    return drafter


@pytest.mark.parametrize("causal", [False, True])
def test_a_compiled_draft_gives_the_rows_and_the_context_of_an_ordinary_one(causal):
    model = tiny_target()
    layers = {"layer_types": None, "sliding_window": None, "is_causal": causal}
    plain, ours = tiny_drafter(model, **layers), drafts_of(tiny_drafter(model, **layers))
    caches, start = [plain.make_cache(), ours.make_cache()], 0
    for S in (7, 2, 2, 5, 1, 8, 2, 5, 10, 20, 21, 11):
        features = mx.random.normal((1, S, 48))
        found = [drafter.slots(mx.array([9]), features, c, start, 5) for drafter, c in zip((plain, ours), caches, strict=True)]
        start += S
        assert near(found[1], found[0])
        for a, b in zip(*caches, strict=True):
            assert a.offset == b.offset == start
            assert all(near(y[:, :, :start], x[:, :, :start]) for x, y in ((a.keys, b.keys), (a.values, b.values)))
    # The first one found 7 rows and empty entries; of 21 rows the last five are given to a compiled pass. All are few shapes.
    assert ours.pair.accelerator.passes == 11 and {key[0] for key in ours.pair.accelerator._known} == {
        (5, 5),
        (10, 5),
        (15, 5),
        (20, 5),
    }


@pytest.mark.full
def test_the_built_in_drafter_drafts_the_same_ids_compiled(pair, monkeypatch):
    model, tokenizer, drafter = pair
    prompt, answers = tokenizer.encode("def test_"), []
    drafter.pair = None
    for value in ("off", "on"):
        monkeypatch.setenv(traced.VARIABLE, value)
        answers.append(run(model, drafter, prompt, 80, tokenizer))
    assert rounds_of(answers[0]) == rounds_of(answers[1]) and ids_of(answers[1]) == greedy_ids(model, prompt, 80)
    assert [passes.passes for passes in drafter.pair.accelerator.passes] == [len(answers[1][-1].stats.rounds)] * 2


@pytest.mark.parametrize(
    "layers",
    [
        {},
        {
            "layer_types": None,
            "sliding_window": None,
            "rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
        },
    ],
    ids=["sliding", "rotated late"],
)
def test_drafters_that_cannot_be_compiled_draft_as_ever(forced, layers, monkeypatch):
    model = tiny_target()
    drafter = tiny_drafter(model, **layers)
    found = run(model, drafter, PROMPT, 30)
    assert drafter.pair.accelerator.passes[0].passes and not drafter.pair.accelerator.passes[1].passes
    monkeypatch.setenv(traced.VARIABLE, "off")
    assert rounds_of(found) == rounds_of(run(model, drafter, PROMPT, 30)) and drafter.pair.accelerator is None


def test_rows_that_a_drafter_holds_already_are_not_written_twice():
    model = tiny_target()
    layers = {"layer_types": None, "sliding_window": None}
    plain, ours = tiny_drafter(model, **layers), drafts_of(tiny_drafter(model, **layers))
    features, caches = mx.random.normal((1, 6, 48)), [plain.make_cache(), ours.make_cache()]
    for drafter, cache in zip((plain, ours), caches, strict=True):
        drafter.inject(features[:, :4], cache, 0)
    found = [d.slots(mx.array([9]), features, c, 0, 5) for d, c in zip((plain, ours), caches, strict=True)]
    assert near(*found) and [entry.offset for entry in caches[1]] == [6, 6] and ours.pair.accelerator.passes == 0


def test_models_and_traces_go_when_nobody_holds_them(forced):
    model = tiny_target()
    drafter = tiny_drafter(model, layer_types=None, sliding_window=None)
    run(model, drafter, PROMPT, 20)
    assert all(passes.passes for passes in drafter.pair.accelerator.passes)
    gone = [weakref.ref(model), weakref.ref(drafter), weakref.ref(drafter.pair.accelerator.passes[0])]
    gc.disable()
    try:
        del model, drafter
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()


def test_a_round_copies_no_buffer(forced):
    model = tiny_target(layers=2)
    drafter = tiny_drafter(model, taps=(0,), layer_types=None, sliding_window=None)
    cache = make_prompt_cache(model, drafter)
    steps = stream(model, drafter, PROMPT, 60, prompt_cache=cache)
    for _ in range(20):
        next(steps)
    before, passes = places(cache[:-1]), [passes.passes for passes in drafter.pair.accelerator.passes]
    for _ in range(20):
        next(steps)
        assert places(cache[:-1]) == before
    assert all(passes.passes > n for passes, n in zip(drafter.pair.accelerator.passes, passes, strict=True))
    steps.close()


def test_an_end_of_text_inside_a_block_ends_the_answer(forced):
    model = tiny_target()
    line = PROMPT + greedy_ids(model, PROMPT, 40)
    eos = next(token for token in line[len(PROMPT) + 8 :] if token not in line[len(PROMPT) : len(PROMPT) + 8])
    at = line.index(eos, len(PROMPT)) + 1
    drafter = known_drafter(model, line, "oracle")
    out = run(model, drafter, PROMPT, 40, letters(eos))
    assert ids_of(out) == line[len(PROMPT) : at] and out[-1].finish_reason == "stop" and drafter.pair.accelerator.passes[0].passes


def test_weights_that_are_changed_between_answers_are_the_ones_that_run(forced):
    model = tiny_target()
    drafter = known_drafter(model, PROMPT + greedy_ids(model, PROMPT, 30))
    lines = [greedy_ids(model, PROMPT, 30)]
    assert ids_of(run(model, drafter, PROMPT, 30)) == lines[0]
    kept = drafter.pair.accelerator.passes[0]
    run(model, drafter, PROMPT, 30)
    assert drafter.pair.accelerator.passes[0] is kept
    layer = model.layers[1].mlp
    layer.up_proj = nn.Linear(layer.up_proj.weight.shape[1], layer.up_proj.weight.shape[0], bias=True)
    for change in ("a layer", "a weight"):
        if change == "a weight":
            layer.up_proj.weight = 3 * layer.up_proj.weight
        lines.append(greedy_ids(model, PROMPT, 30))
        assert ids_of(run(model, drafter, PROMPT, 30)) == lines[-1] and drafter.pair.accelerator.passes[0] is not kept
        kept = drafter.pair.accelerator.passes[0]
    assert len({tuple(line) for line in lines}) == 3


def test_a_drafter_whose_weights_were_changed_drafts_with_the_new_ones(monkeypatch):
    model = tiny_target()
    drafter = tiny_drafter(model, layer_types=None, sliding_window=None)
    before = rounds_of(run(model, drafter, PROMPT, 30))
    monkeypatch.setenv(traced.VARIABLE, "on")
    assert rounds_of(run(model, drafter, PROMPT, 30)) == before
    drafter.layers[1].mlp.up_proj.weight = -2 * drafter.layers[1].mlp.up_proj.weight
    after = rounds_of(run(model, drafter, PROMPT, 30))
    monkeypatch.setenv(traced.VARIABLE, "off")
    assert after == rounds_of(run(model, drafter, PROMPT, 30)) != before


@pytest.mark.parametrize("cuda", [False, True])
def test_on_cuda_a_traces_quantized_products_are_as_wide_as_a_kernel_wants_them(cuda, forced, monkeypatch):
    model = tiny_target(hidden=32)
    nn.quantize(model, 32, 4, class_predicate=lambda _, m: isinstance(m, nn.Linear) and m.weight.shape[1] % 32 == 0)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    columns, call = [], nn.QuantizedLinear.__call__
    monkeypatch.setattr(nn.QuantizedLinear, "__call__", lambda self, x: (columns.append(len(self["weight"])), call(self, x))[1])
    ours, plain = blocks_of(model), Target(model, (0, 2))
    caches = [filled(model, plain), filled(model, ours)]
    rollback(caches[1], verify(ours, caches[1])[1], 7)
    columns.clear()
    ours.accelerator._pass([mx.array([BLOCK])], [buffers.copied(entry) for entry in caches[1]], 7)
    assert columns and (all(n % compiled.TILE == 0 for n in columns) == cuda)
    assert near(verify(ours, caches[1])[0].hidden, verify(plain, caches[0])[0].hidden) and ours.accelerator.passes == 2


@pytest.mark.parametrize("cuda", [True, False])
def test_kernels_serve_a_drafters_products_but_on_cuda(cuda, monkeypatch):
    drafter = tiny_drafter(tiny_target(hidden=32), intermediate_size=64, layer_types=None, sliding_window=None)
    for layer in drafter.layers:
        nn.quantize(layer, 32, 4)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    calls = compiled_draft._draft_calls(drafter)
    assert [type(handler) for _, handler, _ in calls] == ([] if cuda else [Linear] * 7 * len(drafter.layers))


def test_a_width_is_kept_where_it_is_faster_and_tried_once(monkeypatch):
    model, asked = tiny_target(), []
    ours = blocks_of(model, always=False)
    # Of two seconds the first is the compiled pass's.
    seconds = {4: [1.0, 2.0], 5: [2.0, 1.0], 9: [1.0, 2.0]}
    monkeypatch.setattr(compiled, "_least_s", lambda passes, w: (asked.append(w), seconds.pop(w))[1])
    compare, compared = buffers.distance, []
    monkeypatch.setattr(compiled, "distance", lambda *args: (compared.append(args[3][0].keys.shape[2]), compare(*args))[1])
    cache = filled(model, ours)

    def passes(*widths):
        before = ours.accelerator.passes
        for w in widths:
            rollback(cache, verify(ours, cache, [*BLOCK, *BLOCK][:w])[1], len(PROMPT))
        return ours.accelerator.passes - before

    # Blocks of 5 to 8 rows are one, which is slower.
    assert passes(5, 4, 9) == 2 and passes(5, 6, 4, 3, 10) == 3
    assert asked == [5, 4, 9] and compared == [1024] * 3
    # At another capacity, one comparison for all widths that were right before; 5 rows are not tried again.
    for entry in cache:
        buffers.widen(entry, 2048)
    assert passes(5, 4, 9, 4) == 3 and compared == [1024] * 3 + [2048] and len(asked) == 3
    sizes = [(8, 1024), (4, 1024), (12, 1024), (4, 2048), (12, 2048)]
    assert [key[:2] for key in ours.accelerator._known] == [((0, w), size) for w, size in sizes]


def test_a_trial_times_passes_that_start_where_the_block_does_and_end(waits):
    model = tiny_target()
    ours = blocks_of(model)
    caches, seen = [filled(model, ours), filled(model, ours)], []
    before = dict(waits)

    def timed(i):
        return lambda: (seen.append((i, caches[i][0].offset)), [ours(mx.array([BLOCK]), caches[i]).hidden])[1], caches[i]

    seconds = compiled._least_s([timed(0), timed(1)], 5)
    assert seen == [(0, 2), (1, 2)] * 5 and [cache[0].offset for cache in caches] == [7, 7]
    assert len(seconds) == 2 and all(0 < s < 5 for s in seconds) and waits["wait"] == before["wait"] + 10


def test_caches_of_other_kinds_are_left_alone():
    model = tiny_target()
    ours = blocks_of(model)
    cache = filled(model, ours)
    mixed = filled(model, ours)
    mixed[1] = mlx_lm_cache.ConcatenateKVCache()
    mixed[1].update_and_fetch(cache[1].keys[:, :, :7], cache[1].values[:, :, :7])
    verify(ours, mixed)
    uneven = filled(model, ours)
    uneven[2].trim(1)
    assert ours.accelerator.verify(ours, mx.array([BLOCK]), uneven, rollback_point(uneven, 7)) is None
    two = filled(model, ours, [PROMPT, PROMPT[::-1]])
    assert ours.accelerator.verify(ours, mx.array([BLOCK, BLOCK]), two, rollback_point(two, 7)) is None
    fresh = mlx_lm_cache.make_prompt_cache(model)
    verify(ours, fresh, length=0)
    assert ours.accelerator.passes == 0 and not ours.accelerator._known


def test_buffers_of_different_lengths_are_made_equal():
    model = tiny_target()
    ours = blocks_of(model)
    cache, other = filled(model, ours), filled(model, ours)
    buffers.widen(cache[1], 1100)
    assert near(verify(ours, cache)[0].hidden, verify(Target(model, (0, 2)), other)[0].hidden)
    assert ours.accelerator.passes == 1 and {entry.keys.shape[2] for entry in cache} == {2048}
