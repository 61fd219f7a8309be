"""What is refused or said before and at the end of a run: lengths, renamed and silent options, caches of streams left open."""

import gc
import warnings

import mlx.core as mx
import numpy as np
import pytest
from kit import greedy_ids, ids_of, letters, rounds_of, run, tiny_drafter, tiny_target
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as plain_cache

import dflash_mlx
from dflash_mlx import batch_generate, make_prompt_cache, stream_generate
from dflash_mlx.errors import CacheError, GenerationError
from dflash_mlx.prompt_cache import PairCache, trim_prompt_cache

PROMPT = [5, 9, 33, 7, 20]


@pytest.fixture(scope="module")
def tiny():
    model = tiny_target(seed=2, head_dim=32)
    return model, greedy_ids(model, PROMPT, 60), tiny_drafter(model)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("n", [-5, -2, 1.5, "8", True, None, float("inf")])
def test_lengths_that_are_none_are_refused(tiny, n, drafts):
    with pytest.raises(GenerationError, match=r"max_tokens is .*; it must be a whole number of at least 1, or -1 for no limit"):
        stream_generate(tiny[0], letters(), PROMPT, n, tiny[2] if drafts else None)


@pytest.mark.parametrize("drafts", [False, True])
def test_whole_numbers_and_ids_may_be_numpys(tiny, drafts):
    drafter = tiny[2] if drafts else None
    ids = lambda prompt, n: [r.token for r in stream_generate(tiny[0], letters(), prompt, n, drafter)]  # noqa: E731
    assert ids(np.array(PROMPT), np.int64(5)) == ids([*map(np.int32, PROMPT)], 5) == ids(PROMPT, 5)


@pytest.mark.parametrize("drafts", [None, False, True], ids=["batch", "plain", "drafts"])
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        # MLX reads whatever lies behind its table, and the last row for -1.
        ([5, 61, 7], r"token ids \[61\]; this target's are 0 to 60"),
        ([5, -1], r"token ids \[-1\]; this target's are 0 to 60"),
        (mx.array([2**30]), r"token ids \[1073741824\]; this target's are 0 to 60"),
        ([5, True], "a list that holds 'True' of type bool"),
        ([5, 7.0], "a list that holds '7.0' of type float"),
        ("a\ud800b", r"the prompt has U\+D800, half of a surrogate pair"),
        (b"ab", "the prompt is of type bytes"),
        (None, "the prompt is of type NoneType"),
    ],
)
def test_a_prompt_that_is_none_is_refused_on_every_way(tiny, prompt, message, drafts):
    with pytest.raises(GenerationError, match=message):
        if drafts is None:
            batch_generate(tiny[0], letters(), [PROMPT, prompt], draft_model=tiny[2])
        else:
            list(stream_generate(tiny[0], letters(), prompt, 4, tiny[2] if drafts else None))


@pytest.mark.parametrize("drafts", [False, True])
def test_a_length_of_0_is_mlx_lms_error_and_minus_1_none(tiny, drafts):
    model, line, drafter = tiny[0], tiny[1], tiny[2] if drafts else None
    with pytest.raises(ValueError, match="Maximum number of tokens must be non-zero"):
        stream_generate(model, letters(), PROMPT, 0, drafter)
    steps = stream_generate(model, letters(), PROMPT, -1, drafter)
    assert [next(steps).token for _ in range(50)] == line[:50]
    steps.close()


def test_the_old_name_of_prompt_lookup_is_taken_with_a_warning(tiny):
    model, line, drafter = tiny
    with pytest.warns(DeprecationWarning, match="copy= is now prompt_lookup="):
        got = run(model, drafter, PROMPT, 30, block_size=5, copy=False)
    assert ids_of(got) == line[:30]
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        run(model, drafter, PROMPT, 10, block_size=5, prompt_lookup=True)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("start,silent", [(None, True), (200, True), (20, False), (0, False)])
def test_kv_bits_that_came_to_nothing_are_said(tiny, start, silent, drafts):
    model, _, drafter = tiny
    options = {"kv_bits": 8, "kv_group_size": 32, **({} if start is None else {"quantized_kv_start": start})}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(model, drafter if drafts else None, PROMPT, 30, **options)
    found = [str(w.message) for w in said if "kv_bits" in str(w.message)]
    rows = f"from row {5000 if start is None else start} on and this run ended at 35"
    assert len(found) == silent and all("kv_bits=8 had no effect" in text and rows in text for text in found)


@pytest.mark.parametrize("drafts", [False, True])
def test_kv_bits_are_said_also_where_the_caller_stops_early(tiny, drafts):
    model, _, drafter = tiny
    options = {"kv_bits": 8, "kv_group_size": 32, "max_tokens": 30, "draft_model": drafter if drafts else None}
    responses = stream_generate(model, letters(), PROMPT, **options)
    with pytest.warns(UserWarning, match="kv_bits=8 had no effect"):
        next(responses)
        responses.close()


def test_what_mlx_lms_programs_pass_on_for_nothing_is_taken(tiny):
    model, line, drafter = tiny
    given = {"kv_group_size": 64, "quantized_kv_start": 5000}
    assert ids_of(run(model, drafter, PROMPT, 5, **given)) == ids_of(run(model, None, PROMPT, 5, **given)) == line[:5]
    with pytest.warns(UserWarning, match="num_draft_tokens=3 has no effect without a draft_model"):
        run(model, None, PROMPT, 5, num_draft_tokens=3)


# Streams left open

KINDS = {"fixed": {"block_size": 4}, "plain rounds": {"block_size": 1}, "wide": {"block_size": 5}, "chosen": {"block_size": None}}


@pytest.mark.parametrize("taken", [1, 4, 9])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(5)
def test_a_stream_left_open_gives_its_cache_up_to_the_next(tiny, kind, taken):
    model, line, drafter = tiny
    left = plain_cache(model)
    plain_steps = dflash_mlx.stream_generate(model, letters(), PROMPT, 20, prompt_cache=left)
    assert [next(plain_steps).token for _ in range(taken)] == line[:taken]
    expected = ids_of(run(model, None, [8, 3], 12, prompt_cache=left))
    cache = make_prompt_cache(model, drafter)
    steps = stream_generate(model, letters(), PROMPT, 20, drafter, prompt_cache=cache, **KINDS[kind])
    assert [next(steps).token for _ in range(taken)] == line[:taken]
    again = run(model, drafter, [8, 3], 12, prompt_cache=cache, **KINDS[kind])
    fresh = run(model, drafter, PROMPT + line[:taken] + [8, 3], 12, **KINDS[kind])
    assert ids_of(again) == ids_of(fresh) == expected
    assert kind == "chosen" or rounds_of(again) == rounds_of(fresh)
    ids = PairCache.read(cache).ids
    with pytest.raises(GenerationError, match="a later call uses this stream.s prompt cache"):
        next(steps)
    del steps
    gc.collect()
    assert PairCache.read(cache).ids == ids


@pytest.mark.parametrize("next_is", ["plain", "trim", "unstarted"])
def test_whoever_comes_next_gets_the_cache(tiny, next_is):
    model, line, drafter = tiny
    cache = make_prompt_cache(model, drafter)
    steps = stream_generate(model, letters(), PROMPT, 20, drafter, prompt_cache=cache, block_size=5)
    if next_is != "unstarted":
        next(steps), next(steps)
    if next_is == "trim":
        assert trim_prompt_cache(cache, 1) == 1 and PairCache.read(cache).ids == PROMPT + line[:1]
    else:
        begun = PROMPT + line[:2] if next_is == "plain" else []
        got = run(model, None if next_is == "plain" else drafter, [8, 3], 12, prompt_cache=cache)
        assert ids_of(got) == greedy_ids(model, [*begun, 8, 3], 12)
    with pytest.raises(GenerationError, match="a later call uses this stream.s prompt cache"):
        next(steps)


def test_a_cache_that_is_being_written_to_is_not_taken_away(tiny):
    model, _, drafter = tiny
    cache, seen = make_prompt_cache(model, drafter), []

    def progress(done, total):
        with pytest.raises(CacheError, match="another stream is writing to this prompt cache right now"):
            PairCache.read(cache)
        seen.append(done)

    got = run(model, drafter, PROMPT, 10, prompt_cache=cache, prompt_progress_callback=progress)
    assert seen and ids_of(got) == greedy_ids(model, PROMPT, 10)


def test_streams_with_a_cache_each_go_on_by_turns(tiny):
    model, line, drafter = tiny
    streams = [stream_generate(model, letters(), PROMPT, 20, drafter, block_size=b) for b in (5, 3, None)]
    got = [[] for _ in streams]
    for _ in range(20):
        for steps, into in zip(streams, got, strict=True):
            into.append(next(steps).token)
    assert got == [line[:20]] * 3


def test_a_plain_cache_stays_mlx_lms(tiny):
    model, line, _ = tiny
    cache = plain_cache(model)
    run(model, None, PROMPT, 5, prompt_cache=cache)
    assert {type(entry) for entry in cache} == {KVCache} and cache[0].offset >= len(PROMPT) + 4 and mx.default_device()
