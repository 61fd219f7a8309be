"""A prompt cache carries both models' state: turns, files, processes, closed and interleaved generators change no drafted id.

Comparisons are of rounds (every drafted id) with the trained pair, whose drafts depend on every context row.
"""

import copy
import json
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import pytest
from families import family, known_drafter, some_line
from kit import (
    DATA,
    TINY,
    Oracle,
    greedy_ids,
    ids_of,
    letters,
    plain,
    references,
    rounds_of,
    run,
    tiny_drafter,
    tiny_qwen3,
    tiny_target,
    variant,
)
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.sample_utils import make_sampler

import dflash_mlx
from dflash_mlx import make_prompt_cache, trim_prompt_cache
from dflash_mlx.errors import CacheError
from dflash_mlx.prompt_cache import PairCache

SLIDING = DATA / "variants" / "sliding.json"


@pytest.fixture(scope="module")
def sliding(pair):
    """The trained pair with two sliding layers and a full one, and a prompt longer than their window."""
    reference = references(SLIDING)
    return pair[0], pair[1], variant(pair[0], reference["config"]), reference["prompts"][6]["prompt_ids"]


def same(a, b):
    return ids_of(a) == ids_of(b) and rounds_of(a) == rounds_of(b)


def test_the_prefill_step_changes_no_drafted_id(sliding):
    model, tokenizer, drafter, prompt = sliding
    runs = [run(model, drafter, prompt[:67], 24, tokenizer, prefill_step_size=step) for step in (4, 8, None)]
    assert same(runs[0], runs[1]) and same(runs[0], runs[2])


def test_a_second_turn_drafts_what_a_fresh_run_drafts(sliding):
    model, tokenizer, drafter, prompt = sliding
    cache = make_prompt_cache(model, drafter)
    first = run(model, drafter, prompt[:90], 13, tokenizer, prompt_cache=cache)
    seen = []
    again = run(
        model,
        drafter,
        prompt[90:120],
        24,
        tokenizer,
        prompt_cache=cache,
        prompt_progress_callback=lambda done, total: seen.append((done, total)),
    )
    fresh = run(model, drafter, prompt[:90] + ids_of(first) + prompt[90:120], 24, tokenizer)
    assert same(again, fresh)
    # Only the anchor of the last turn and the new tokens went through the target.
    assert seen[0] == (0, 31) and seen[-1] == (31, 31)
    assert again[0].prompt_tokens == 30


CHILD = """
import json, sys
from pathlib import Path
import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache
from dflash_mlx import load, stream_generate
from dflash_mlx.config import DrafterConfig
from dflash_mlx.loading import make_drafter
job = json.loads(sys.stdin.read())
model, tokenizer = load("tiny", dtype=mx.float32)
drafter = make_drafter(DrafterConfig.from_dict(job["config"]), dict(mx.load(job["weights"])), model)
cache = load_prompt_cache(job["file"])
got = list(stream_generate(model, tokenizer, job["prompt"], max_tokens=24, draft_model=drafter, prompt_cache=cache, block_size=8))
print(json.dumps({"ids": [r.token for r in got], "rounds": got[-1].stats.rounds}))
"""


@pytest.mark.parametrize("turn", [6, 13])
@pytest.mark.quick(1)
def test_a_saved_cache_continues_with_the_same_drafted_ids_in_a_new_process(sliding, tmp_path, turn):
    model, tokenizer, drafter, prompt = sliding
    cache = make_prompt_cache(model, drafter)
    first = run(model, drafter, prompt[:90], turn, tokenizer, prompt_cache=cache)
    file = str(tmp_path / "cache.safetensors")
    mlx_lm_cache.save_prompt_cache(file, cache, {"note": "kept"})
    assert mlx_lm_cache.load_prompt_cache(file, return_metadata=True)[1] == {"note": "kept"}
    weights = str(TINY / "drafter" / "model.safetensors")
    job = {"config": references(SLIDING)["config"], "weights": weights, "file": file, "prompt": prompt[90:99]}
    done = subprocess.run([sys.executable, "-c", CHILD], input=json.dumps(job), capture_output=True, text=True, check=True)
    child = json.loads(done.stdout)
    fresh = run(model, drafter, prompt[:90] + ids_of(first) + prompt[90:99], 24, tokenizer)
    assert child["ids"] == ids_of(fresh)
    assert [(r["drafted"], r["accepted"], r["bonus"]) for r in child["rounds"]] == rounds_of(fresh)


def test_an_empty_cache_can_be_saved_before_its_first_turn(sliding, tmp_path):
    model, tokenizer, drafter, prompt = sliding
    file = str(tmp_path / "cache.safetensors")
    mlx_lm_cache.save_prompt_cache(file, make_prompt_cache(model, drafter))
    loaded = mlx_lm_cache.load_prompt_cache(file)
    assert same(
        run(model, drafter, prompt[:9], 12, tokenizer, prompt_cache=loaded), run(model, drafter, prompt[:9], 12, tokenizer)
    )


def test_a_list_holds_only_classes_of_mlx_lm(sliding):
    model, _, drafter, prompt = sliding
    entries = make_prompt_cache(model, drafter)
    assert {type(e).__module__ for e in entries} == {"mlx_lm.models.cache"}
    assert len(entries) == len(model.layers) + len(drafter.layers) + 1
    assert isinstance(entries[-1], mlx_lm_cache.ArraysCache)
    assert not mlx_lm_cache.can_trim_prompt_cache(entries) and mlx_lm_cache.trim_prompt_cache(entries, 1) == 0


def test_a_fresh_list_of_mlx_lms_own_is_completed_in_place(sliding):
    model, tokenizer, drafter, prompt = sliding
    entries = mlx_lm_cache.make_prompt_cache(model)
    first = run(model, drafter, prompt[:30], 9, tokenizer, prompt_cache=entries)
    assert len(entries) == len(model.layers) + len(drafter.layers) + 1
    again = run(model, drafter, prompt[30:33], 12, tokenizer, prompt_cache=entries)
    assert same(again, run(model, drafter, prompt[:30] + ids_of(first) + prompt[30:33], 12, tokenizer))


# Block 8 drafts in every round, 1 in none, None as the width rule says.
@pytest.mark.parametrize("taken,block", [*((n, 8) for n in range(1, 31)), *((n, b) for n in (1, 2, 3, 9) for b in (1, None))])
@pytest.mark.quick(5)
def test_a_generator_closed_at_any_token_leaves_both_caches_at_that_token(sliding, taken, block):
    model, tokenizer, drafter, prompt = sliding
    cache = make_prompt_cache(model, drafter)
    steps = dflash_mlx.stream_generate(
        model, tokenizer, prompt[:40], max_tokens=-1, draft_model=drafter, prompt_cache=cache, block_size=block
    )
    out = [next(steps).token for _ in range(taken)]
    steps.close()
    held = PairCache.read(cache)
    assert held.ids == prompt[:40] + out
    assert [entry.offset for entry in held.target] == [40 + taken - 1] * 6
    assert {entry.offset + held.pending for entry in held.drafter} == {40 + taken - 1}
    again = run(model, drafter, prompt[40:42], 8, tokenizer, prompt_cache=cache)
    assert same(again, run(model, drafter, prompt[:40] + out + prompt[40:42], 8, tokenizer))


def test_a_generator_that_was_never_started_leaves_its_cache_empty(sliding):
    model, tokenizer, drafter, prompt = sliding
    cache = make_prompt_cache(model, drafter)
    dflash_mlx.stream_generate(model, tokenizer, prompt[:9], draft_model=drafter, prompt_cache=cache).close()
    assert PairCache.read(cache).ids == [] and cache[0].offset == 0
    assert same(
        run(model, drafter, prompt[:9], 12, tokenizer, prompt_cache=cache), run(model, drafter, prompt[:9], 12, tokenizer)
    )


def test_generators_interleaved_token_by_token_do_not_disturb_each_other(pair, sliding):
    model, tokenizer, drafter, prompt = sliding
    other = pair[2]
    prompts = (prompt[:40], prompt[50:63])
    alone = [run(model, d, p, 30, tokenizer) for d, p in zip((drafter, other), prompts, strict=True)]
    text = mlx_lm.generate(model, tokenizer, prompt[70:80], max_tokens=12)
    steps = [
        dflash_mlx.stream_generate(model, tokenizer, p, max_tokens=30, draft_model=d, block_size=8)
        for d, p in zip((drafter, other), prompts, strict=True)
    ]
    together = [[], []]
    for n in range(30):
        for got, step in zip(together, steps, strict=True):
            got.append(next(step))
        if n % 10 == 4:
            assert mlx_lm.generate(model, tokenizer, prompt[70:80], max_tokens=12) == text
    assert same(together[0], alone[0]) and same(together[1], alone[1])


def test_two_targets_in_one_process_do_not_disturb_each_other():
    models = [tiny_target(seed=2), tiny_qwen3(seed=3)]
    prompt = [5, 9, 33, 7]
    lines = [greedy_ids(m, prompt, 16) for m in models]
    oracles = [tiny_drafter(m, cls=Oracle).learn(prompt + line, m) for m, line in zip(models, lines, strict=True)]
    steps = [
        dflash_mlx.stream_generate(m, letters(), prompt, max_tokens=12, draft_model=d, block_size=5)
        for m, d in zip(models, oracles, strict=True)
    ]
    got = [[a.token, b.token] for a, b in zip(*steps, strict=True)]
    assert [list(ids) for ids in zip(*got, strict=True)] == [line[:12] for line in lines]


def test_a_target_is_plain_again_while_a_generator_waits(sliding):
    model, tokenizer, drafter, prompt = sliding
    steps = dflash_mlx.stream_generate(model, tokenizer, prompt[:20], max_tokens=9, draft_model=drafter, block_size=8)
    for _ in range(4):
        next(steps)
        assert {type(layer).__name__ for layer in model.layers} == {"TransformerBlock"}
        assert type(model.model).__name__ == "Qwen3Model"


@pytest.mark.parametrize("cut", [1, 2, 5, 12, 20])
@pytest.mark.quick(3)
def test_trimming_cuts_every_part_and_the_next_turn_drafts_as_a_fresh_run(pair, cut):
    model, tokenizer, drafter = pair
    prompt = references(SLIDING)["prompts"][6]["prompt_ids"]
    cache = make_prompt_cache(model, drafter)
    out = ids_of(run(model, drafter, prompt[:40], 11, tokenizer, prompt_cache=cache))
    assert dflash_mlx.can_trim_prompt_cache(cache) and trim_prompt_cache(cache, cut) == cut
    kept = (prompt[:40] + out)[:-cut]
    assert PairCache.read(cache).ids == kept
    again = run(model, drafter, prompt[50:52], 12, tokenizer, prompt_cache=cache)
    assert same(again, run(model, drafter, kept + prompt[50:52], 12, tokenizer))


def test_a_sliding_context_that_has_not_wrapped_is_trimmed_too(sliding):
    model, tokenizer, drafter, prompt = sliding
    for cut in (1, 3, 8):
        cache = make_prompt_cache(model, drafter)
        out = ids_of(run(model, drafter, prompt[:8], 7, tokenizer, prompt_cache=cache))
        assert trim_prompt_cache(cache, cut) == cut
        kept = (prompt[:8] + out)[:-cut]
        again = run(model, drafter, prompt[50:80], 12, tokenizer, prompt_cache=cache)
        assert same(again, run(model, drafter, kept + prompt[50:80], 12, tokenizer))


def test_a_wrapped_sliding_context_refuses_to_be_trimmed(sliding):
    model, tokenizer, drafter, prompt = sliding
    cache = make_prompt_cache(model, drafter)
    run(model, drafter, prompt[:40], 5, tokenizer, prompt_cache=cache)
    before = PairCache.read(cache).ids
    assert not dflash_mlx.can_trim_prompt_cache(cache) and trim_prompt_cache(cache, 3) == 0
    assert PairCache.read(cache).ids == before


def test_our_trim_cuts_a_plain_list_as_mlx_lms_does():
    model = tiny_target()
    cache = make_prompt_cache(model)
    greedy_ids(model, [5, 9, 33], 4, cache=cache)
    held = cache[0].offset
    assert trim_prompt_cache(cache, 2) == 2 and [e.offset for e in cache] == [held - 2] * 4


def test_a_cache_of_another_drafter_or_none_is_refused(pair, sliding):
    model, tokenizer, drafter, prompt = sliding
    used = mlx_lm_cache.make_prompt_cache(model)
    greedy_ids(model, prompt[:5], 2, cache=used)
    with pytest.raises(CacheError, match="the prompt cache has no drafter's part; .* Make it with dflash_mlx.make_prompt_cache"):
        run(model, drafter, prompt[:5], 4, tokenizer, prompt_cache=used)
    both = make_prompt_cache(model, drafter)
    with pytest.raises(CacheError, match="the prompt cache has a DFlash drafter's part and draft_model is an ordinary model"):
        run(model, tiny_target(), prompt[:5], 4, tokenizer, prompt_cache=both)
    small = tiny_target()
    with pytest.raises(CacheError, match="the prompt cache has 4 target and 2 drafter entries; this pair has 6 and 3"):
        run(model, drafter, prompt[:5], 4, tokenizer, prompt_cache=make_prompt_cache(small, tiny_drafter(small)))


@pytest.mark.parametrize("turn", [0, 1, 9])
def test_a_list_goes_on_without_its_drafter_and_is_then_mlx_lms(pair, turn, tmp_path):
    model, tokenizer, drafter = pair
    prompt = references(SLIDING)["prompts"][6]["prompt_ids"]
    cache, out = make_prompt_cache(model, drafter), []
    if turn:
        out = ids_of(run(model, drafter, prompt[:40], turn, tokenizer, prompt_cache=cache))
        mlx_lm_cache.save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
        cache = mlx_lm_cache.load_prompt_cache(str(tmp_path / "cache.safetensors"))
    whole = [*(prompt[:40] if turn else []), *out, *prompt[40:43]]
    sampler, contexts = make_sampler(temp=0.9), []

    def record(tokens, logits):
        contexts.append(tokens.tolist())
        return logits

    options = {"sampler": sampler, "seed": 5}
    got = run(model, None, prompt[40:43], 9, tokenizer, prompt_cache=cache, logits_processors=[record], **options)
    assert ids_of(got) == ids_of(run(model, None, whole, 9, tokenizer, **options)) and got[0].prompt_tokens == 3
    assert contexts[0] == prompt[40:43]
    assert [type(entry).__name__ for entry in cache] == ["KVCache"] * 6 and {e.offset for e in cache} == {len(whole) + 9}
    more = [*whole, *ids_of(got), *prompt[43:46]]
    assert ids_of(run(model, None, prompt[43:46], 5, tokenizer, prompt_cache=cache)) == ids_of(
        run(model, None, more, 5, tokenizer)
    )


def test_a_run_that_was_never_started_leaves_a_list_with_its_drafter(pair):
    model, tokenizer, drafter = pair
    cache = make_prompt_cache(model, drafter)
    run(model, drafter, [5, 9, 33], 4, tokenizer, prompt_cache=cache)
    before = PairCache.read(cache).ids
    dflash_mlx.stream_generate(model, tokenizer, [7], prompt_cache=cache).close()
    assert PairCache.read(cache).ids == before


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"prompt": []}, {"prompt": ""}])
def test_a_call_without_the_drafter_that_is_refused_leaves_the_list_as_it_was(pair, wrong):
    model, tokenizer, drafter = pair
    cache = make_prompt_cache(model, drafter)
    first = [r.token for r in dflash_mlx.stream_generate(model, tokenizer, "import os", 5, drafter, prompt_cache=cache)]
    held = list(cache)
    with pytest.raises(ValueError, match="must be"):
        list(dflash_mlx.stream_generate(model, tokenizer, **{"prompt": "x", "max_tokens": 3, "prompt_cache": cache, **wrong}))
    assert len(cache) == len(held) and all(a is b for a, b in zip(cache, held, strict=True))
    after = tokenizer.encode("\nimport")
    got = [r.token for r in dflash_mlx.stream_generate(model, tokenizer, after, 6, prompt_cache=cache)]
    assert got == greedy_ids(model, [*tokenizer.encode("import os"), *first, *after], 6)


def test_a_refused_call_adds_nothing_to_a_fresh_list(pair):
    model, tokenizer, drafter = pair
    cache = mlx_lm_cache.make_prompt_cache(model)
    held = list(cache)
    for wrong in ({"seed": -1, "sampler": make_sampler(1.0)}, {"acceptance": "rejection"}, {"prompt": [10**6]}):
        with pytest.raises(dflash_mlx.errors.DFlashError):
            dflash_mlx.stream_generate(
                model, tokenizer, **{"prompt": "x", "max_tokens": 3, "draft_model": drafter, "prompt_cache": cache, **wrong}
            )
        assert len(cache) == len(held) and all(a is b for a, b in zip(cache, held, strict=True))


@pytest.mark.parametrize("wrong", ["tiny", 512])
def test_what_is_no_model_is_refused_by_name(pair, wrong):
    model, tokenizer, _ = pair
    for call in (lambda: make_prompt_cache(model, wrong), lambda: dflash_mlx.stream_generate(model, tokenizer, "x", 3, wrong)):
        with pytest.raises(
            dflash_mlx.errors.GenerationError, match=f"draft_model is {wrong!r}; it must be what load_drafter or load returns"
        ):
            call()


def test_a_plain_list_without_a_drafter_is_mlx_lms(pair):
    model, tokenizer, _ = pair
    cache = make_prompt_cache(model)
    assert len(cache) == 6 and {type(e).__name__ for e in cache} == {"KVCache"}
    first = run(model, None, [10, 20, 30], 5, tokenizer, prompt_cache=cache)
    theirs = mlx_lm_cache.make_prompt_cache(model)
    assert ids_of(first) == ids_of(plain(model, tokenizer, [10, 20, 30], max_tokens=5, prompt_cache=theirs))
    assert [e.offset for e in cache] == [e.offset for e in theirs]
    assert all(mx.array_equal(a.keys, b.keys).item() for a, b in zip(cache, theirs, strict=True))


@pytest.mark.full
def test_every_variant_drafts_the_same_over_prefill_steps_and_turns(pair, conformance):
    """Each variant by one step and some of the turns' lengths, so that all of them occur: the blocks are of 8."""
    model, tokenizer, _ = pair
    for i, path in enumerate(sorted((conformance / "pair" / "variants").glob("*.json"))):
        reference = references(path)
        drafter, prompt = variant(model, reference["config"]), reference["prompts"][7]["prompt_ids"]
        step = (4, 8, 31)[i % 3]
        fresh = run(model, drafter, prompt, 24, tokenizer)
        assert same(run(model, drafter, prompt, 24, tokenizer, prefill_step_size=step), fresh), (path.stem, step)
        for taken in range(1 + 2 * (i % 3), 14, 6):
            cache = make_prompt_cache(model, drafter)
            first = run(model, drafter, prompt[:60], taken, tokenizer, prompt_cache=cache)
            again = run(model, drafter, prompt[60:70], 16, tokenizer, prompt_cache=cache)
            assert same(again, run(model, drafter, prompt[:60] + ids_of(first) + prompt[60:70], 16, tokenizer)), (
                path.stem,
                taken,
            )


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_a_cache_copied_or_saved_while_a_stream_writes_to_it_is_refused(tmp_path, name):
    """mamba's entries are states alone: nothing but the list itself tells that they are ahead of its ids."""
    model = family(name)
    drafter = known_drafter(model, some_line(40))
    cache = make_prompt_cache(model, drafter)
    steps = dflash_mlx.stream_generate(model, letters(), [5, 9, 33], 20, drafter, block_size=5, prompt_cache=cache)
    unread = copy.deepcopy(cache)
    for _ in range(6):
        next(steps)
    mlx_lm_cache.save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    for other in (copy.deepcopy(cache), mlx_lm_cache.load_prompt_cache(str(tmp_path / "cache.safetensors"))):
        with pytest.raises(CacheError, match="copied or saved while a stream was writing to it.*close"):
            run(model, drafter, [7], 4, prompt_cache=other)
    steps.close()
    turns = [run(model, drafter, [7], 8, prompt_cache=entries) for entries in (copy.deepcopy(cache), cache)]
    assert same(*turns)
    # A stream that never began has moved nothing.
    assert run(model, drafter, [5, 9, 33], 4, prompt_cache=unread)
    dflash_mlx.stream_generate(model, letters(), [7], 20, drafter, prompt_cache=cache)
    assert run(model, drafter, [7], 4, prompt_cache=copy.deepcopy(cache))
