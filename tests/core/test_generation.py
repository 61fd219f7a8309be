"""The loop's contract: options, responses, EOS and limits, waits, memory, threads and interruptions."""

import gc
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import pytest
from families import family, known_drafter, some_line
from kit import (
    DATA,
    Noisy,
    Oracle,
    flat,
    greedy_ids,
    ids_of,
    letters,
    plain,
    references,
    rounds_of,
    run,
    text_of,
    tiny_drafter,
    tiny_target,
    variant,
)
from rows import tolerance

import dflash_mlx
from dflash_mlx import loop, make_prompt_cache
from dflash_mlx import options as checks
from dflash_mlx import target_sampler as choose
from dflash_mlx.draft_length import prompt_lookup as copying
from dflash_mlx.draft_length.policy import FixedDraftLength
from dflash_mlx.errors import GenerationError, PairError
from dflash_mlx.models import drafter as drafter_module
from dflash_mlx.models import target as taps
from dflash_mlx.pair import DFlashPair
from dflash_mlx.prompt_cache import PairCache

PROMPT = [5, 9, 33, 7, 20]


@pytest.fixture(scope="module")
def tiny():
    """A random target, its greedy line after PROMPT, and an oracle and a noisy drafter that know it."""
    model = tiny_target(seed=2)
    line = greedy_ids(model, PROMPT, 60)
    oracle, noisy = (tiny_drafter(model, cls=cls).learn(PROMPT + line, model) for cls in (Oracle, Noisy))
    return model, line, oracle, noisy


@pytest.fixture(scope="module")
def sliding(pair):
    reference = references(DATA / "variants" / "sliding.json")
    return pair[0], pair[1], variant(pair[0], reference["config"]), reference["prompts"][6]["prompt_ids"]


# EOS, limits, text


def test_all_eos_ids_of_the_tokenizer_end_the_answer(tiny):
    model, line, oracle, _ = tiny
    for eos in ((line[9],), (line[9], line[4]), (60, line[4], line[9])):
        got = run(model, oracle, PROMPT, 30, letters(*eos))
        theirs = plain(model, letters(*eos), PROMPT, max_tokens=30)
        assert ids_of(got) == ids_of(theirs) and got[-1].finish_reason == "stop" and text_of(got) == text_of(theirs)


def test_eos_as_the_first_token_is_one_response_without_text_and_no_round(tiny):
    model, line, oracle, _ = tiny
    (only,) = run(model, oracle, PROMPT, 30, letters(line[0]))
    assert (only.token, only.text, only.generation_tokens, only.finish_reason) == (line[0], "", 1, "stop")
    assert only.stats.rounds == [] and only.stats.tau is None


def test_a_tokenizer_without_eos_runs_to_the_limit(tiny):
    model, line, oracle, _ = tiny
    got = run(model, oracle, PROMPT, 17, letters())
    assert ids_of(got) == line[:17] and got[-1].finish_reason == "length"


def test_a_huggingface_tokenizer_is_wrapped_as_mlx_lm_does(pair):
    model, tokenizer, drafter = pair
    got = run(model, drafter, "def main", 20, tokenizer._tokenizer)
    assert ids_of(got) == ids_of(run(model, drafter, "def main", 20, tokenizer))


def forcing(script, prompt):
    """A processor that makes the target say `script` after `prompt`."""

    def force(history, logits):
        token = script[min(len(history) - len(prompt), len(script) - 1)]
        return mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -mx.inf)[None]

    return [force]


TEXT = "é€ 😀"


def test_characters_split_over_tokens_and_blocks_arrive_whole(pair):
    model, tokenizer, drafter = pair
    script = tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(script) > len(TEXT), "no character is split over tokens"
    for block in (1, 5):
        processors = forcing(script, [10, 20])
        got = run(model, drafter, [10, 20], len(script), tokenizer, block_size=block, logits_processors=processors)
        assert ids_of(got) == script and text_of(got) == TEXT
        assert not any("\ufffd" in r.text for r in got)


def test_text_that_ends_inside_a_character_or_at_a_space_ends_as_mlx_lms(pair):
    """mlx-lm holds a blank back until the next token; here it comes at once."""
    model, tokenizer, drafter = pair
    script = tokenizer.encode(TEXT, add_special_tokens=False)
    ends = set()
    for n in range(1, len(script)):
        options = {"max_tokens": n, "logits_processors": forcing(script, [10, 20])}
        got = run(model, drafter, [10, 20], tokenizer=tokenizer, **options)
        theirs = plain(model, tokenizer, [10, 20], **options)
        assert text_of(got) == text_of(theirs)
        ends.add(text_of(got)[-1:])
    assert {"\ufffd", " "} <= ends


@pytest.mark.parametrize("block", [5, 1, None])
@pytest.mark.parametrize("end", ["eos", "max_tokens"])
def test_caches_are_at_the_last_token_when_the_caller_sees_it(tiny, end, block):
    model, line, oracle, _ = tiny
    cache = make_prompt_cache(model, oracle)
    tokenizer, limit = (letters(line[6]), 30) if end == "eos" else (letters(), 7)
    for r in dflash_mlx.stream_generate(model, tokenizer, PROMPT, limit, oracle, prompt_cache=cache, block_size=block):
        if r.finish_reason:
            # The generator is still open here, as for a caller that breaks and keeps a reference.
            held = PairCache.read(cache)
            assert held.ids == PROMPT + line[:7] and [e.offset for e in held.target] == [11] * 4
    assert r.generation_tokens == 7


def test_max_tokens_minus_one_goes_on_until_the_caller_stops(tiny):
    model, line, oracle, _ = tiny
    steps = dflash_mlx.stream_generate(model, letters(), PROMPT, max_tokens=-1, draft_model=oracle, block_size=5)
    assert [next(steps).token for _ in range(40)] == line[:40]
    steps.close()


@pytest.mark.parametrize("drafted", [True, False])
def test_max_tokens_zero_and_an_empty_prompt_raise_as_in_mlx_lm(tiny, drafted):
    model, _, oracle, _ = tiny
    draft_model = oracle if drafted else None
    with pytest.raises(ValueError, match="Maximum number of tokens must be non-zero"):
        run(model, draft_model, PROMPT, 0)
    with pytest.raises(ValueError, match="Either input_embeddings or prompt"):
        run(model, draft_model, [], 4)


def test_prompts_may_be_text_lists_or_arrays(pair):
    model, tokenizer, drafter = pair
    ids = tokenizer.encode("import os", add_special_tokens=True)
    for prompt in ("import os", ids, mx.array(ids)):
        assert ids_of(run(model, drafter, prompt, 12, tokenizer)) == ids_of(plain(model, tokenizer, "import os", max_tokens=12))


def test_generate_returns_the_streams_text_and_prints_only_when_verbose(pair, capsys):
    model, tokenizer, drafter = pair
    expected = text_of(run(model, drafter, "import os", 12, tokenizer))
    assert dflash_mlx.generate(model, tokenizer, "import os", draft_model=drafter, max_tokens=12) == expected
    assert capsys.readouterr() == ("", "")
    dflash_mlx.generate(model, tokenizer, "import os", verbose=True, draft_model=drafter, max_tokens=12)
    assert expected in capsys.readouterr().out


# Drafters


@pytest.mark.parametrize("block", [2, 5, 8, 16])
def test_an_oracle_is_accepted_in_full_and_a_noisy_one_changes_nothing(tiny, block):
    model, line, oracle, noisy = tiny
    got = run(model, oracle, PROMPT, 40, block_size=block)
    assert ids_of(got) == line[:40]
    assert all(r["accepted"] == block - 1 for r in got[-1].stats.rounds) and got[-1].stats.tau == block
    # All but the prefill's token and each round's bonus came from the drafter.
    assert [r.from_draft for r in got][: 1 + block] == [False] + [True] * (block - 1) + [False]
    worse = run(model, noisy, PROMPT, 40, block_size=block)
    assert ids_of(worse) == line[:40]
    assert 1 < worse[-1].stats.tau < block and len(worse[-1].stats.rounds) > len(got[-1].stats.rounds)


def test_an_oracle_notices_a_wrong_feature_row(tiny):
    model, line, oracle, _ = tiny
    right = oracle._features
    oracle._features = right + 0
    oracle._features[7, 3] += 0.01
    with pytest.raises(AssertionError, match="are not the target's states there"):
        run(model, oracle, PROMPT, 20, block_size=5)
    oracle._features = right


def test_a_hopeless_drafter_changes_nothing(tiny):
    model, line, *_ = tiny
    got = run(model, tiny_drafter(model), PROMPT, 30)
    assert ids_of(got) == line[:30] and got[-1].stats.tau < 1.5


def test_every_round_drafts_the_full_block_also_at_the_end(tiny):
    model, _, oracle, _ = tiny
    rounds = run(model, oracle, PROMPT, 8, block_size=5)[-1].stats.rounds
    assert [len(r["drafted"]) for r in rounds] == [4, 4] and sum(r["accepted"] + 1 for r in rounds) == 10


def test_block_size_one_decodes_without_drafting_and_keeps_the_context(tiny):
    model, line, oracle, _ = tiny
    cache = make_prompt_cache(model, oracle)
    got = run(model, oracle, PROMPT, 10, block_size=1, prompt_cache=cache)
    assert ids_of(got) == line[:10] and got[-1].stats.tau is None
    assert {(tuple(r["drafted"]), r["accepted"], r["width"]) for r in got[-1].stats.rounds} == {((), 0, 0)}
    # The oracle compares every context row: those of the rounds without a draft are there.
    oracle.learn(PROMPT + line[:10] + line[10:], model)
    again = run(model, oracle, [line[10]], 10, block_size=5, prompt_cache=cache)
    assert ids_of(again) == line[11:21]


# Options


def test_a_block_size_may_be_given_as_draft_tokens(tiny):
    model, _, oracle, _ = tiny
    widths = [
        run(model, oracle, PROMPT, 12, **options)[-1].stats.rounds[0]["width"]
        for options in ({"block_size": 3}, {"num_draft_tokens": 6}, {"num_draft_tokens": 6, "block_size": 7})
    ]
    assert widths == [2, 6, 6]


@pytest.mark.parametrize("block", [0, -1, 2.0, True, "5"])
def test_an_impossible_block_size_is_refused(tiny, block):
    with pytest.raises(GenerationError, match=r"block_size is .*; it must be a whole number of at least 1 \(it counts"):
        run(tiny[0], tiny[2], PROMPT, 4, block_size=block)


def test_a_block_far_beyond_the_drafters_is_refused_and_one_at_the_limit_runs(tiny):
    model, line, oracle, _ = tiny
    assert checks.largest_block(oracle) == 64
    assert ids_of(run(model, oracle, PROMPT, 4, block_size=64)) == line[:4]
    for options in ({"block_size": 65}, {"num_draft_tokens": 64}, {"block_size": 10**9}):
        with pytest.raises(GenerationError, match=r"block_size is \d+; this drafter was made for blocks of 5.*Give at most 64"):
            run(model, oracle, PROMPT, 4, **options)


def test_contradicting_block_sizes_are_refused(tiny):
    with pytest.raises(GenerationError, match="block_size is 5 and num_draft_tokens is 5; block_size must be one more"):
        run(tiny[0], tiny[2], PROMPT, 4, block_size=5, num_draft_tokens=5)


def test_input_embeddings_are_refused_with_a_drafter(tiny):
    with pytest.raises(GenerationError, match="input_embeddings were given with a DFlash drafter, which needs token ids"):
        run(tiny[0], tiny[2], PROMPT, 4, input_embeddings=mx.zeros((5, 24)))


def test_a_block_size_without_a_dflash_drafter_is_refused(tiny):
    with pytest.raises(GenerationError, match="block_size is 5 and there is no DFlash drafter"):
        run(tiny[0], None, PROMPT, 4, block_size=5)


def test_a_drafter_of_another_model_object_is_refused(tiny):
    with pytest.raises(PairError, match="this drafter was loaded for another model object. Call load_drafter"):
        run(tiny_target(seed=2), tiny[2], PROMPT, 4)


def test_an_unknown_keyword_is_an_error(tiny):
    with pytest.raises(TypeError, match="temperature"):
        run(tiny[0], tiny[2], PROMPT, 4, temperature=0.5)


def test_every_keyword_of_mlx_lm_is_in_the_signature():
    import inspect

    from mlx_lm.generate import generate_step, speculative_generate_step

    ours = set(inspect.signature(dflash_mlx.stream_generate).parameters)
    for theirs in (generate_step, speculative_generate_step):
        assert set(inspect.signature(theirs).parameters) - {"tokenizer"} <= ours


def test_progress_reports_the_tokens_that_went_through_the_target(tiny):
    model, _, oracle, _ = tiny
    seen = []
    run(model, oracle, PROMPT, 4, prefill_step_size=2, prompt_progress_callback=lambda *args: seen.append(args))
    theirs = []
    run(model, None, PROMPT, 4, prefill_step_size=2, prompt_progress_callback=lambda *args: theirs.append(args))
    assert seen == theirs == [(0, 5), (2, 5), (4, 5), (5, 5)]


def test_an_mlx_lm_draft_model_is_passed_through(tiny):
    model, line, *_ = tiny
    got = run(model, tiny_target(seed=2), PROMPT, 12, num_draft_tokens=3)
    assert ids_of(got) == line[:12] and got[-1].stats is None and any(r.from_draft for r in got)
    with pytest.raises(GenerationError, match="seed is 3 with an mlx-lm draft model"):
        run(model, tiny_target(seed=2), PROMPT, 12, seed=3)


def test_without_a_drafter_the_responses_are_mlx_lms(tiny):
    model, line, *_ = tiny
    got, theirs = run(model, None, PROMPT, 12, letters(line[7])), plain(model, letters(line[7]), PROMPT, max_tokens=12)
    fields = ("text", "token", "from_draft", "prompt_tokens", "generation_tokens", "finish_reason")
    assert [[getattr(r, f) for f in fields] for r in got] == [[getattr(r, f) for f in fields] for r in theirs]
    assert all(r.stats is None for r in got)


def test_another_stream_may_be_given(tiny):
    model, line, oracle, _ = tiny
    assert ids_of(run(model, oracle, PROMPT, 12, stream=mx.new_stream(mx.cpu))) == line[:12]


# Responses


def test_responses_count_and_time_as_mlx_lms(tiny):
    model, _, oracle, _ = tiny
    got = run(model, oracle, PROMPT, 12)
    assert [r.generation_tokens for r in got] == list(range(1, 13)) and {r.prompt_tokens for r in got} == {5}
    assert all(r.prompt_tps > 0 and r.generation_tps > 0 and r.peak_memory > 0 for r in got)
    assert {id(r.stats) for r in got} == {id(got[0].stats)}
    assert set(got[-1].stats.seconds) == {"draft", "verify", "rollback", "host"}


def test_logprobs_equal_plain_decodings(pair):
    model, tokenizer, drafter = pair
    got = run(model, drafter, "import os", 30, tokenizer)
    theirs = plain(model, tokenizer, "import os", max_tokens=30)
    # float32, many rows against one: bit-equal with the reference BLAS, nearly so with others.
    for a, b in zip(got, theirs, strict=True):
        assert a.logprobs.shape == b.logprobs.shape == (1536,) and a.logprobs.dtype == b.logprobs.dtype
        assert mx.allclose(a.logprobs, b.logprobs, rtol=0, atol=tolerance()).item() and mx.argmax(a.logprobs).item() == a.token


def test_kept_logprobs_keep_neither_block_logits_nor_caches_alive(tiny):
    vocab = 20000
    model = tiny_target(seed=3, layers=2, vocab=vocab)
    line = greedy_ids(model, PROMPT, 40)
    oracle = tiny_drafter(model, cls=Oracle, taps=(0, 0)).learn(PROMPT + line, model)
    kept = [r.logprobs for r in run(model, oracle, PROMPT, 33, block_size=16)]
    cache = make_prompt_cache(model, oracle)
    steps = dflash_mlx.stream_generate(model, letters(), PROMPT, 33, oracle, block_size=16, prompt_cache=cache)
    del kept
    gc.collect()
    before = mx.get_active_memory()
    kept = [r.logprobs for r in steps]
    weak = weakref.ref(cache[0])
    del steps, cache
    gc.collect()
    assert weak() is None
    # 33 unevaluated rows hold hidden states and constants, by far not one row of logits each.
    assert mx.get_active_memory() - before < 8 * vocab * 4
    assert [mx.argmax(row).item() for row in kept] == line[:33]


def test_logprobs_can_be_asked_for_now_and_read_by_another_thread(tiny):
    model, line, oracle, _ = tiny
    rows = [r.logprobs for r in run(model, oracle, PROMPT, 12, logprobs=True)]
    got = []
    reader = threading.Thread(target=lambda: got.extend(mx.argmax(row).item() for row in rows))
    reader.start()
    reader.join()
    assert got == line[:12]


def test_a_summary_only_run_keeps_tau_and_drops_rounds(tiny):
    model, _, _, noisy = tiny
    full = run(model, noisy, PROMPT, 30)[-1].stats
    short = run(model, noisy, PROMPT, 30, keep_rounds=False)[-1].stats
    assert short.rounds == [] and short.acceptance_lengths == [] and short.tau == full.tau > 1
    assert short.n_rounds == len(full.rounds)


# Waits, memory, output


def test_a_round_waits_for_the_device_once(tiny, waits, monkeypatch):
    model, line, *_ = tiny
    drafter = tiny_drafter(model)
    per_round = []
    add_round = loop.GenerationStats.add_round

    def record(self, *args):
        per_round.append(waits["wait"])
        return add_round(self, *args)

    monkeypatch.setattr(loop.GenerationStats, "add_round", record)
    assert ids_of(run(model, drafter, PROMPT, 40)) == line[:40]
    waited = [b - a for a, b in zip(per_round, per_round[1:], strict=False)]
    # The second round waits for its draft apart, to split the time.
    assert len(waited) > 20 and waited[0] == 2 and set(waited[1:]) == {1}, waited


@pytest.mark.parametrize(
    "wants_confidence,cuts_by_confidence,width", [(True, False, 4), (True, True, 4), (True, True, 1), (False, False, 4)]
)
def test_a_round_waits_twice_only_if_it_is_cut_by_confidence(
    tiny, waits, monkeypatch, wants_confidence, cuts_by_confidence, width
):
    model, line, *_ = tiny
    per_round, told = [], []

    class Cutting(FixedDraftLength):
        def prompt_lookup_width(self, width, rates):
            return 0

        def confidence_cut(self, confidence):
            assert len(confidence) == 4
            return width

        def observe(self, width, accepted, more, seconds, usual, copied, confidence, waited):
            per_round.append(waits["wait"])
            told.append((confidence, waited))

    Cutting.wants_confidence, Cutting.cuts_by_confidence = wants_confidence, cuts_by_confidence
    monkeypatch.setattr(DFlashPair, "draft_length_policy", lambda *_: Cutting(4))
    got = run(model, tiny_drafter(model), PROMPT, 40, block_size=None)
    assert ids_of(got) == line[:40] and set(got[-1].stats.widths) == {width}
    waited = [b - a for a, b in zip(per_round, per_round[1:], strict=False)]
    assert len(waited) > 15 and waited[0] == 2 and set(waited[1:]) == {1 + cuts_by_confidence}, waited
    assert all(
        (confidence is not None) == wants_confidence and waited == (cuts_by_confidence or n == 1)
        for n, (confidence, waited) in enumerate(told)
    )


def test_the_buffer_cache_is_cleared_at_mlx_lms_cadence(tiny, monkeypatch):
    model = tiny[0]
    oracle = tiny_drafter(model, cls=Oracle).learn(PROMPT + greedy_ids(model, PROMPT, 280), model)
    calls = []
    clear = mx.clear_cache
    monkeypatch.setattr(mx, "clear_cache", lambda: (calls.append(1), clear()))
    counts = []
    for draft_model, tokens in ((None, 200), (oracle, 200), (None, 262), (oracle, 262)):
        calls.clear()
        run(model, draft_model, PROMPT, tokens, prefill_step_size=2)
        counts.append(len(calls))
    assert counts == [3, 3, 4, 4], "two prefill chunks, and tokens 1 and 257"


def test_prefill_evaluates_chunk_by_chunk(tiny, monkeypatch):
    model = tiny[0]
    drafter, calls = tiny_drafter(model), []
    original = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *args: (calls.append(1), original(*args))[1])
    run(model, drafter, PROMPT * 8, 1, prefill_step_size=4)
    assert len(calls) == 10 + 1, "39 tokens in chunks of 4, and the caches once at the end"


def peak_of(run_it):
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run_it()
    return mx.get_peak_memory() - before


def test_prefill_makes_no_logits_of_the_prompt_and_no_row_of_features_twice():
    vocab, prompt = 20000, [(7 * i) % 61 for i in range(513)]
    model = tiny_target(seed=3, layers=3, vocab=vocab)
    drafter = tiny_drafter(model)
    run(model, drafter, prompt, 1)
    peak = peak_of(lambda: run(model, drafter, prompt, 1))
    # 123: logits of all rows would be 41 MB; caches, features and one layer's scores of 512 rows are far less.
    assert peak < 512 * vocab * 4 / 2, f"{peak / 1e6:.1f} MB"


def test_memory_of_prefill_grows_with_the_caches_alone():
    model = tiny_target(seed=3)
    # Many taps: features kept for the whole prompt would be 1152 bytes a row.
    drafter = tiny_drafter(model, taps=(0, 1, 2) * 4)
    peaks = []
    for n in (512, 2048):
        prompt = [(7 * i) % 61 for i in range(n + 1)]
        peaks.append(peak_of(lambda prompt=prompt: run(model, drafter, prompt, 1, prefill_step_size=64)))
    # Keys and values of 4 target layers and a full drafter layer, 2 heads of 8, float32; twice while they grow.
    rows = 2 * 5 * 2 * 2 * 8 * 4
    assert peaks[1] - peaks[0] < 1.5 * 1536 * rows, peaks


def test_a_drafter_takes_no_copy_of_the_target(pair):
    model = pair[0]
    drafter_bytes = sum(a.nbytes for a in flat(pair[2]).values())
    held = []
    grown = peak_of(lambda: held.append(dflash_mlx.load_drafter("tiny", model)))
    # The file's bfloat16 weights and their float32 form.
    assert grown < 2 * drafter_bytes, f"{grown / 1e6:.1f} MB for a drafter of {drafter_bytes / 1e6:.1f} MB"


def test_the_whole_prompt_is_in_the_drafters_context_before_round_one():
    model = tiny_target(seed=2)
    prompt = [(7 * i + i // 5) % 61 for i in range(600)]
    oracle = tiny_drafter(model, cls=Oracle).learn(prompt + greedy_ids(model, prompt, 20), model)
    rows = []
    check = oracle.check
    oracle.check = lambda features, cache, start: (rows.append((start, features.shape[1])), check(features, cache, start))
    run(model, oracle, prompt, 9, prefill_step_size=128)
    assert rows[:6] == [(0, 128), (128, 128), (256, 128), (384, 128), (512, 87), (599, 1)]


@pytest.mark.parametrize(("start", "n"), [(start, n) for start in (0, 1, 2) for n in (1, 2)])
@pytest.mark.quick(4)
def test_a_cache_is_quantized_behind_the_first_pass(start, n):
    """As mlx-lm does: a prompt of one token sees its own row as it is."""
    model, options = tiny_target(seed=4, head_dim=32), {"kv_bits": 2, "kv_group_size": 32, "quantized_kv_start": start}
    expected = greedy_ids(model, [37, 4][:n], 40, **options)
    for block in (1, 5):
        assert ids_of(run(model, tiny_drafter(model), [37, 4][:n], 40, block_size=block, **options)) == expected


def test_a_drafter_that_overflows_in_float16_changes_no_token():
    model = tiny_target(seed=2)
    model.set_dtype(mx.float16)
    drafter = tiny_drafter(model)
    drafter.fc.weight = drafter.fc.weight * 1e5
    drafter.set_dtype(mx.float16)
    assert not mx.isfinite(drafter.fc(mx.ones((1, 1, 48), mx.float16))).all().item()
    with pytest.warns(UserWarning, match="overflow float16 in the drafter's fc: the text stays right and nothing that it drafts"):
        got = ids_of(run(model, drafter, PROMPT, 20))
    assert got == greedy_ids(model, PROMPT, 20)
    # One whose drafts are merely wrong is not spoken of.
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(model, tiny_drafter(model), PROMPT, 20)


def test_nothing_is_written_to_stdout_or_stderr():
    code = (
        "from dflash_mlx import load, load_drafter, stream_generate\n"
        "m, t = load('tiny'); d = load_drafter('tiny', m)\n"
        "assert len(list(stream_generate(m, t, 'import os', 20, d))) == 20\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Threads and interruptions


@pytest.mark.parametrize("block", [8, None, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2))])
def test_each_token_may_be_asked_for_by_another_thread(sliding, block):
    """As frameworks do that hand a generator to a pool; it may also be closed by a thread that never advanced it."""
    model, tokenizer, drafter, prompt = sliding
    cache = make_prompt_cache(model, drafter)
    steps = dflash_mlx.stream_generate(
        model, tokenizer, prompt, max_tokens=40, draft_model=drafter, block_size=block, prompt_cache=cache
    )
    pools = [ThreadPoolExecutor(1) for _ in range(3)]
    got = [pools[i % 3].submit(lambda: next(steps).token).result() for i in range(15)]
    pools[0].submit(steps.close).result()
    line = greedy_ids(model, prompt, 24)
    assert got == line[:15]
    assert ids_of(run(model, drafter, [line[15]], 8, tokenizer, prompt_cache=cache)) == line[16:24]


@pytest.mark.parametrize("name", ["llama, mixed windows", "qwen3_next", "mamba2", "falcon_h1"])
@pytest.mark.parametrize("block", [1, 6])
def test_threads_may_take_turns_over_every_kind_of_cache(name, block):
    """States and cut windows are not what a token is read from, so nothing else evaluates them in the thread that made them."""
    model, prompt = family(name), some_line(30)
    line = greedy_ids(model, prompt, 50)
    steps = dflash_mlx.stream_generate(model, letters(), prompt, 60, known_drafter(model, prompt + line), block_size=block)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        got = [pool.submit(lambda: next(steps).token).result() for pool in (one, other, other, one, other) * 8]
        other.submit(steps.close).result()
    assert got == line[:40]


def test_a_worker_thread_generates_what_the_main_thread_does(sliding):
    model, tokenizer, drafter, prompt = sliding
    expected = run(model, drafter, prompt[:30], 20, tokenizer)
    got, errors = [], []

    def work():
        try:
            got.extend(run(model, drafter, prompt[:30], 20, tokenizer, prefill_step_size=8))
        except Exception as error:
            errors.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert not errors and ids_of(got) == ids_of(expected) and rounds_of(got) == rounds_of(expected)


def interrupt(monkeypatch, owner, name, nth, after):
    """Raise KeyboardInterrupt at call number `nth` of owner.name, before or after it ran."""
    original, calls = getattr(owner, name), [0]

    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == nth and not after:
            raise KeyboardInterrupt
        result = original(*args, **kwargs)
        if calls[0] == nth:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, call)
    return calls


PLACES = {
    "drafter's slots": (drafter_module.Drafter, "slots", (1, 3)),
    "drafter attention": (drafter_module.Attention, "__call__", (1, 2, 3, 7)),
    "drafter injection": (drafter_module.Drafter, "inject", (1, 2)),
    "injection of a layer": (drafter_module.Attention, "inject", (1, 2, 5)),
    "target pass": (taps.Target, "__call__", (1, 2, 4, 6)),
    "verify": (loop, "verify_block", (1, 3)),
    "match": (choose.TargetSampler, "enqueue", (1, 2, 4)),
    "reading": (loop.Run, "read", (1, 2, 4)),
    "commit": (loop.Run, "commit", (1, 2, 4)),
    "commit of a row": (loop.Run, "commit_row", (1,)),
    "rollback": (loop, "rollback", (1, 2)),
    "end of round": (loop.GenerationStats, "add_round", (1, 3)),
}
MOMENTS = [
    # The quick tier takes the last call of each place, the full one all.
    pytest.param(place, nth, after, marks=[] if nth == nths[-1] else pytest.mark.full)
    for place, (_, _, nths) in PLACES.items()
    for nth in nths
    for after in (False, True)
]


@pytest.mark.parametrize("place,nth,after", MOMENTS)
@pytest.mark.quick(24)
def test_an_interruption_anywhere_leaves_both_caches_consistent(sliding, monkeypatch, place, nth, after, block=8, copy=False):
    model, tokenizer, drafter, prompt = sliding
    cache = make_prompt_cache(model, drafter)
    out = ids_of(run(model, drafter, prompt[:30], 3, tokenizer, prompt_cache=cache))
    before = prompt[:30] + out
    calls = interrupt(monkeypatch, *PLACES[place][:2], nth, after)
    got = []
    with pytest.raises(KeyboardInterrupt):
        for r in dflash_mlx.stream_generate(
            *(model, tokenizer, prompt[30:50], 30, drafter),
            prompt_cache=cache,
            prefill_step_size=8,
            block_size=block,
            prompt_lookup=copy,
        ):
            got.append(r.token)
    assert calls[0] >= nth
    monkeypatch.undo()
    ids = PairCache.read(cache).ids
    line = before + prompt[30:50] + got
    assert ids == line[: len(ids)] and len(ids) >= len(before)
    assert len(ids) == len(line) or not got
    assert {type(layer).__name__ for layer in model.layers} == {"TransformerBlock"}
    again = run(model, drafter, prompt[60:63], 10, tokenizer, prompt_cache=cache)
    fresh = run(model, drafter, ids + prompt[60:63], 10, tokenizer)
    assert ids_of(again) == ids_of(fresh) and rounds_of(again) == rounds_of(fresh)


PLAIN_PLACES = ("target pass", "verify", "match", "reading", "end of round")


@pytest.mark.parametrize("place", [*PLAIN_PLACES, "commit of a row"])
@pytest.mark.quick(2)
def test_an_interruption_while_plain_passes_overlap_leaves_both_caches_consistent(sliding, monkeypatch, place):
    for nth in range(4, 7):
        for after in (False, True):
            with monkeypatch.context() as patch:
                test_an_interruption_anywhere_leaves_both_caches_consistent(sliding, patch, place, nth, after, block=1)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("place", [*PLAIN_PLACES, "commit"])
@pytest.mark.quick(4)
def test_an_interruption_while_drafts_are_copied_leaves_both_caches_consistent(sliding, monkeypatch, place, after):
    copied, draft = [], copying.PromptLookup.draft
    # Wherever one id stood before.
    monkeypatch.setattr(copying, "SHORTEST", 1)
    monkeypatch.setattr(copying.PromptLookup, "START", {1: 0.9, **copying.PromptLookup.START})
    monkeypatch.setattr(FixedDraftLength, "prompt_lookup_width", lambda self, width, rates: width)
    monkeypatch.setattr(copying.PromptLookup, "draft", lambda self, n: copied.append(draft(self, n)) or copied[-1])
    test_an_interruption_anywhere_leaves_both_caches_consistent(sliding, monkeypatch, place, 7, after, copy=True)
    assert copied


@pytest.mark.parametrize("trials,block", [(6, 8), (6, 1), pytest.param(40, 8, marks=pytest.mark.full)])
def test_a_signal_at_any_moment_leaves_both_caches_consistent(sliding, trials, block):
    model, tokenizer, drafter, prompt = sliding
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupted = 0
    try:
        for trial in range(trials):
            cache, got = make_prompt_cache(model, drafter), []
            steps = dflash_mlx.stream_generate(
                model, tokenizer, prompt[:60], 40, drafter, prompt_cache=cache, prefill_step_size=8, block_size=block
            )
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.3 * ((trial * 0.618) % 1) ** 2)
                for r in steps:
                    got.append(r.token)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            # The signal may have come between two tokens.
            steps.close()
            ids = PairCache.read(cache).ids
            line = prompt[:60] + got
            # A token may have been committed and not been handed out any more.
            assert ids[: len(line)] == line[: len(ids)] and len(ids) <= len(line) + 1
            again = run(model, drafter, prompt[60:63], 8, tokenizer, prompt_cache=cache)
            fresh = run(model, drafter, ids + prompt[60:63], 8, tokenizer)
            assert ids_of(again) == ids_of(fresh) and rounds_of(again) == rounds_of(fresh), f"trial {trial}, {len(ids)} ids"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted


@pytest.mark.parametrize("block", [8, 1])
def test_an_error_in_the_users_sampler_leaves_both_caches_consistent(sliding, block):
    model, tokenizer, drafter, prompt = sliding
    cache, calls, got = make_prompt_cache(model, drafter), [0], []

    def sampler(row):
        calls[0] += 1
        if calls[0] == 20:
            raise RuntimeError("sampler broke")
        return mx.argmax(row, axis=-1)

    with pytest.raises(RuntimeError, match="sampler broke"):
        options = {"sampler": sampler, "prompt_cache": cache, "block_size": block}
        for r in dflash_mlx.stream_generate(model, tokenizer, prompt[:30], 30, drafter, **options):
            got.append(r.token)
    assert got and PairCache.read(cache).ids == prompt[:30] + got
    again = run(model, drafter, prompt[60:63], 10, tokenizer, prompt_cache=cache)
    fresh = run(model, drafter, prompt[:30] + got + prompt[60:63], 10, tokenizer)
    assert rounds_of(again) == rounds_of(fresh)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"prefill_step_size": n}, f"prefill_step_size is {n}; it must be a whole number of at least 1") for n in (0, -3, 1.5)),
        ({"quantized_kv_start": -5, "kv_bits": 8}, "quantized_kv_start is -5; it must be a whole number of at least 0"),
        *(
            ({"kv_bits": 8, name: value}, f"{name} is {value!r}; it must be a whole number of at least 1")
            for name, value in (("max_kv_size", 0), ("kv_bits", "4"), ("kv_group_size", 64.0))
        ),
        ({"kv_group_size": 32}, "kv_group_size is 32 without kv_bits"),
        ({"quantized_kv_start": 4}, "quantized_kv_start is 4 without kv_bits"),
    ],
)
def test_an_option_without_effect_or_meaning_is_refused_before_anything_runs(tiny, options, message):
    model, _, oracle, _ = tiny
    for drafter in (oracle, None):
        with pytest.raises(GenerationError, match=message):
            run(model, drafter, PROMPT, 5, **options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        *(([5, odd, 7], rf"token ids \[{odd}\]; this target's are 0 to 60") for odd in (-1, 61)),
        (mx.array([[5, 9]]), r"an array of int32 and shape \[1, 2\]; it must be text"),
        (mx.array([1.0]), r"an array of float32 and shape \[1\]; it must be text"),
        (None, "of type NoneType; it must be text"),
        ([5, 1.5], "a list that holds '1.5' of type float; it must be text"),
        ([[5]], r"a list that holds '\[5\]' of type list; it must be text.* Pass one prompt at a time"),
        ([{"role": "user", "content": "x"}], r"of type dict; it must be .* Write messages with tokenizer.apply_chat_template"),
    ],
)
def test_a_prompt_that_is_no_line_of_ids_is_refused(tiny, prompt, message):
    model, _, oracle, _ = tiny
    with pytest.raises(GenerationError, match=message):
        run(model, oracle, prompt, 5)


def test_a_token_whose_row_cannot_be_made_is_not_in_the_cache(monkeypatch):
    model = tiny_target()
    drafter = tiny_drafter(model)
    cache, start = make_prompt_cache(model, drafter), choose.TargetSampler.enqueue

    def failing(row):
        raise MemoryError("planted")

    def without_rows(self, *args):
        token, read, may_be_nonfinite = start(self, *args)
        return token, lambda: replace(read(), row_logprobs=failing), may_be_nonfinite

    monkeypatch.setattr(choose.TargetSampler, "enqueue", without_rows)
    with pytest.raises(MemoryError):
        next(dflash_mlx.stream_generate(model, letters(), [5, 9, 33], 20, drafter, prompt_cache=cache, block_size=5))
    assert PairCache.read(cache).ids == [5, 9, 33]
