"""Every kind of cache entry rolls back to where one-row passes would have it, through the window's edge and back.

Passes over blocks with rejected rows are compared with mlx-lm's own passes over single rows, logits of every kept row. The
tolerance is for families whose many-row pass sums in another order (MLA, Mamba-2, rings): float32, 1e-4 of the largest logit;
a wrong row is seen at 1e-2 and more.
"""

import threading
from contextlib import suppress

import mlx.core as mx
import pytest
from families import FAMILIES, PLAN, WINDOW, error, family, greedy_line, in_blocks, known_drafter, one_at_a_time, some_line
from kit import greedy_ids, ids_of, letters, plain, plant, run, tiny_qwen3, tiny_target
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, ConcatenateKVCache, KVCache, RotatingKVCache

from dflash_mlx import can_trim_prompt_cache, make_prompt_cache, stream_generate, trim_prompt_cache
from dflash_mlx import rollback as cache_module
from dflash_mlx.errors import CacheError, GenerationError
from dflash_mlx.models.target import Target
from dflash_mlx.prompt_cache import KVQuantization, PairCache
from dflash_mlx.rollback import check_rollback, rollback, rollback_point
from dflash_mlx.verify import verify_block

TOLERANCE = 1e-4
# One family for each kind of entry, and for each way in which a module is handed it.
KINDS = {
    "plain": "llama",
    "rotating": "llama, mixed windows",
    "rotating, shared between layers": "gemma4",
    "chunked": "llama4",
    "MLA": "deepseek_v3",
    "lists": "deepseek_v32",
    "gated delta": "qwen3_next",
    "short convolution": "lfm2",
    "Mamba": "mamba",
    "Mamba-2": "mamba2",
    "linear attention": "bailing_moe_linear",
    "two modules on one state": "rwkv7",
    "a list with a state of its own module": "falcon_h1",
    "a module that is handed the whole list": "baichuan_m1",
    "a state in front of the layers": "longcat_flash_ngram",
}


def blocks_differ(name, start=21, n=70, plan=PLAN):
    model, line = family(name), some_line(n)
    return error(in_blocks(model, line, start, plan), one_at_a_time(model, line, start)) > TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_with_rejected_rows_give_the_logits_of_single_rows(kind):
    assert not blocks_differ(KINDS[kind])


ONE_TOO_MANY = ("rollback", "keep = length - point.length", "keep = min(length - point.length + 1, point.rows)")
FAULTS = {
    "one row too many": (ONE_TOO_MANY, KINDS),
    "one row too few": (
        ("rollback", "keep = length - point.length", "keep = max(length - point.length - 1, 0)"),
        ["plain", "rotating", "chunked", "gated delta", "a module that is handed the whole list"],
    ),
    "state not restored": (
        ("_undo", "entry.cache = list(saved)", "pass"),
        [k for k in KINDS if k not in ("plain", "rotating", "rotating, shared between layers", "chunked", "MLA", "lists")],
    ),
    "state restored and nothing replayed": (
        ("_undo", "if 0 < keep < point.rows:", "if False:"),
        [k for k in KINDS if k not in ("plain", "rotating", "rotating, shared between layers", "chunked", "MLA", "lists")],
    ),
    "window index off": (
        ("_cut_rotating", "entry._idx - n, entry.keys", "entry._idx - n + 1, entry.keys"),
        ["rotating", "rotating, shared between layers"],
    ),
    "rows behind the mark kept": (
        ("_cut_rotating", "(k[..., :mark, :], v[..., :mark, :])", "(k, v)"),
        ["rotating", "rotating, shared between layers"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault,kind", [(fault, kind) for fault, (_, kinds) in FAULTS.items() for kind in kinds])
@pytest.mark.quick(6)
def test_a_planted_rollback_fault_changes_the_logits(monkeypatch, fault, kind):
    plant(monkeypatch, cache_module, *FAULTS[fault][0])
    monkeypatch.setitem(cache_module._CUT, RotatingKVCache, cache_module._cut_rotating)
    try:
        assert blocks_differ(KINDS[kind], n=50)
    except (CacheError, ValueError):
        # The caches are no longer of one length: seen at once.
        pass


@pytest.mark.parametrize("start", [1, 2, 9, 14, 15, 16, 17, 18, 31, 32, 33, 47])
@pytest.mark.quick(5)
def test_a_window_is_right_wherever_a_block_meets_its_edge(start):
    model = tiny_target(layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW)
    line = some_line(start + 8, 61)
    expected = one_at_a_time(model, line, start)
    for size in (1, 2, 5, 16, 21):
        for keep in {0, 1, 2, size - 1, size} & set(range(min(size, 7) + 1)):
            # Then single rows, which write into the ring, and a block, which reorders it.
            plan = [(size, keep), (1, 1), (1, 0), (1, 1), (4, 2)]
            assert error(in_blocks(model, line, start, plan), expected) < TOLERANCE, (start, size, keep)


@pytest.mark.parametrize("start", [1, 3, 4, 5, 11, 12, 13, 15, 16, 17, 20, 33])
@pytest.mark.quick(5)
def test_kept_rows_are_seen_by_every_row_of_a_block(start):
    model, line = tiny_qwen3(), some_line(start + 14, 53)

    def fresh():
        return mlx_lm_cache.make_prompt_cache(model, max_kv_size=12)

    assert all(entry.keep == 4 for entry in fresh())
    expected = one_at_a_time(model, line, start, fresh())
    for plan in ([(5, 2)], [(16, 3), (1, 1), (3, 0)], [(1, 1), (2, 1)], [(13, 13)], PLAN):
        assert error(in_blocks(model, line, start, plan, fresh()), expected) < TOLERANCE, (start, plan)


def test_without_the_mask_for_kept_rows_blocks_are_wrong(monkeypatch):
    monkeypatch.setattr(cache_module, "_MasksByRow", RotatingKVCache)
    with pytest.raises(AssertionError):
        test_kept_rows_are_seen_by_every_row_of_a_block(13)


def test_a_window_inside_kept_rows_is_refused():
    entry = RotatingKVCache(max_size=12, keep=4)
    entry.update_and_fetch(mx.zeros((1, 1, 12, 4)), mx.zeros((1, 1, 12, 4)))
    with (
        cache_module.masks_by_row([entry]),
        pytest.raises(CacheError, match="inside a rotating cache that keeps 4 first rows; they exclude each other"),
    ):
        entry.make_mask(3, window_size=5)
    assert type(entry) is RotatingKVCache


def test_a_concatenated_cache_loses_the_rows_that_are_cut():
    entry, rows = ConcatenateKVCache(), mx.arange(10.0).reshape(1, 1, 10, 1)
    entry.update_and_fetch(rows[:, :, :6], rows[:, :, :6])
    point = rollback_point([entry], 6)
    entry.update_and_fetch(rows[:, :, 6:9], rows[:, :, 6:9])
    point.rows = 3
    rollback([entry], point, 7)
    keys, values = entry.update_and_fetch(rows[:, :, 9:], rows[:, :, 9:])
    assert keys.flatten().tolist() == values.flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 9] and entry.offset == 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(7)
def test_a_round_can_be_cut_again_to_any_shorter_length(kind):
    """What a generator does that is closed after some of a round's tokens."""
    model, line = family(KINDS[kind]), some_line(36)
    expected = one_at_a_time(model, line, 21)
    target = Target(model, (0,))
    for first, second in [(6, 3), (5, 1), (4, 0)]:
        cache = mlx_lm_cache.make_prompt_cache(model)
        target(mx.array([line[:21]]), cache)
        point = rollback_point(cache, 21)
        block = line[21 : 21 + first] + [2] * (8 - first)
        verify_block(target, mx.array(block[:1]), mx.array([block[1:]]), cache, point)
        rollback(cache, point, 21 + first)
        rollback(cache, point, 21 + second)
        rows = [model(mx.array([[token]]), cache=cache)[0, -1] for token in line[21 + second :]]
        assert error(mx.stack(rows), expected[second:]) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(8)
def test_an_interrupted_pass_is_undone_in_every_entry(kind):
    model, line = family(KINDS[kind]), some_line(34)
    expected = one_at_a_time(model, line, 21)
    target, cache = Target(model, (0,)), mlx_lm_cache.make_prompt_cache(model)
    target(mx.array([line[:21]]), cache)
    for rows in (1, 6):
        point = rollback_point(cache, 21)

        class Interrupted(type(model.layers[-1])):
            def __call__(self, *args, **kwargs):
                raise KeyboardInterrupt

        layer = model.layers[-1]
        before, layer.__class__ = layer.__class__, Interrupted
        with pytest.raises(KeyboardInterrupt):
            verify_block(target, mx.array([1]), mx.array([[2] * (rows - 1)], dtype=mx.int32), cache, point)
        layer.__class__ = before
        assert point.rows == 0
        rollback(cache, point, 21)
    rows = [model(mx.array([[token]]), cache=cache)[0, -1] for token in line[21:]]
    assert error(mx.stack(rows), expected) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(6)
def test_a_pass_interrupted_between_an_entrys_keys_and_values_is_undone(kind, monkeypatch):
    model, line = family(KINDS[kind]), some_line(34)
    expected = one_at_a_time(model, line, 21)
    target, cache = Target(model, (0,)), mlx_lm_cache.make_prompt_cache(model)
    target(mx.array([line[:21]]), cache)
    concatenate, left = mx.concatenate, 0

    def interrupted(*args, **kwargs):
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return concatenate(*args, **kwargs)

    for rows in (1, 6):
        for nth in range(1, 200):
            point, left = rollback_point(cache, 21), nth
            with monkeypatch.context() as patch:
                patch.setattr(mx, "concatenate", interrupted)
                with suppress(KeyboardInterrupt):
                    verify_block(target, mx.array([1]), mx.array([[2] * (rows - 1)], dtype=mx.int32), cache, point)
            rollback(cache, point, 21)
            if point.rows:
                break
        # The last one met no interruption.
        assert point.rows == rows and not point.whole
    rows = [model(mx.array([[token]]), cache=cache)[0, -1] for token in line[21:]]
    assert error(mx.stack(rows), expected) < TOLERANCE


@pytest.mark.parametrize("kind", ["rotating", "gated delta", "Mamba-2", "a module that is handed the whole list"])
@pytest.mark.quick(3)
def test_a_generator_closed_at_any_token_leaves_a_cache_that_goes_on_exactly(kind, tmp_path):
    model, prompt, more = family(KINDS[kind]), some_line(19), some_line(4)
    line = greedy_line(model, prompt, 10)
    for n in range(1, 9):
        again = line[: 19 + n] + more
        expected = greedy_ids(model, again, 12)
        drafter = known_drafter(model, line)
        cache = make_prompt_cache(model, drafter)
        steps = stream_generate(model, letters(), prompt, 20, drafter, block_size=5, prompt_cache=cache)
        assert [next(steps).token for _ in range(n)] == line[19 : 19 + n]
        steps.close()
        if n % 2:
            mlx_lm_cache.save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
            cache = mlx_lm_cache.load_prompt_cache(str(tmp_path / "cache.safetensors"))
        drafter._line = again + expected
        assert ids_of(run(model, drafter, more, 12, prompt_cache=cache, block_size=5)) == expected, n


@pytest.mark.parametrize("kind", ["gated delta", "Mamba-2"])
def test_a_closed_generators_states_go_on_in_another_thread(kind):
    model, prompt, more = family(KINDS[kind]), some_line(19), some_line(4)
    line = greedy_line(model, prompt, 10)
    drafter = known_drafter(model, line)
    cache = make_prompt_cache(model, drafter)

    def first():
        steps = stream_generate(model, letters(), prompt, 20, drafter, block_size=5, prompt_cache=cache)
        assert [next(steps).token for _ in range(6)] == line[19:25]
        steps.close()

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    again = line[:25] + more
    assert ids_of(run(model, drafter, more, 12, prompt_cache=cache, block_size=5)) == greedy_ids(model, again, 12)


def test_a_state_is_replayed_without_repeating_its_projections():
    import mlx.nn as nn

    model, line = family("qwen3_next"), some_line(30)
    target, cache = Target(model, (0,)), mlx_lm_cache.make_prompt_cache(model)
    target(mx.array([line[:21]]), cache)
    point = rollback_point(cache, 21)
    verify_block(target, mx.array(line[21:22]), mx.array([line[22:27]]), cache, point)
    before, called = nn.Linear.__call__, []
    nn.Linear.__call__ = lambda self, x: called.append(x.shape) or before(self, x)
    try:
        rollback(cache, point, 24)
    finally:
        nn.Linear.__call__ = before
    assert len(point.replays) == 2 and not called


def test_what_a_round_holds_does_not_grow_with_the_text():
    """Float32 bytes that live at the same point of a round: constant states, so nothing of earlier rounds is kept."""
    model = family("mamba2")
    line = greedy_line(model, some_line(8), 260)
    drafter = known_drafter(model, line)
    held = {}
    for r in stream_generate(model, letters(), line[:8], 260, drafter, block_size=5, keep_rounds=False):
        if r.generation_tokens in (60, 250):
            held[r.generation_tokens] = mx.get_active_memory()
    # The drafter's own full-attention layer grows by 190 rows of 2 heads of 8 keys and values, in steps of 256 rows.
    assert held[250] - held[60] < 100_000


def test_an_unknown_cache_is_refused_by_name_and_layer():
    class Odd(KVCache):
        pass

    with pytest.raises(CacheError, match=r"fam has Odd in layers 1, 2, which cannot .*\. Run this target without a drafter"):
        check_rollback([KVCache(), Odd(), CacheList(ArraysCache(2), Odd())], "fam")
    check_rollback([CacheList(ArraysCache(2), RotatingKVCache(8)), ChunkedKVCache(8)], "fam")


def test_an_entry_that_does_not_cut_as_asked_is_an_error(monkeypatch):
    model, line = family("llama"), some_line(30)
    target, cache = Target(model, (0,)), mlx_lm_cache.make_prompt_cache(model)
    target(mx.array([line[:21]]), cache)
    point = rollback_point(cache, 21)
    verify_block(target, mx.array(line[21:22]), mx.array([line[22:27]]), cache, point)
    monkeypatch.setitem(cache_module._CUT, KVCache, lambda entry, n: 0)
    with pytest.raises(CacheError, match="KVCache holds 27 rows; it must hold 23"):
        rollback(cache, point, 23)
    with pytest.raises(CacheError, match="the cache cannot be rolled back to 28 rows; the last pass left 21 to 27"):
        rollback(cache, point, 28)


def test_trimming_refuses_what_it_cannot_undo():
    for name in ("mamba", "qwen3_next", "falcon_h1"):
        model = family(name)
        drafter = known_drafter(model, [])
        cache = make_prompt_cache(model, drafter)
        run(model, drafter, some_line(9), 5, prompt_cache=cache)
        before = PairCache.read(cache)
        assert not can_trim_prompt_cache(cache) and trim_prompt_cache(cache, 2) == 0
        assert PairCache.read(cache).rows == before.rows and PairCache.read(cache).ids == before.ids


def test_a_chunked_cache_is_trimmed_only_within_the_rows_it_holds():
    model = family("llama4")
    drafter = known_drafter(model, [], layer_types=["full_attention"] * 2)
    # 40 rows held less the first 24: the chunk 16..31 is no longer whole.
    for n, cut in [(3, 3), (6, 6), (12, 0)]:
        cache = make_prompt_cache(model, drafter)
        out = ids_of(run(model, drafter, some_line(37), 5, prompt_cache=cache))
        line = some_line(37) + out
        assert trim_prompt_cache(cache, n) == cut
        left, more = line[: len(line) - cut], [4, 9]
        assert PairCache.read(cache).ids == left
        assert ids_of(run(model, drafter, more, 6, prompt_cache=cache)) == greedy_ids(model, left + more, 6)


def test_a_cache_that_something_else_has_moved_is_refused():
    model = family("llama")
    drafter = known_drafter(model, [])
    cache = make_prompt_cache(model, drafter)
    run(model, drafter, some_line(9), 5, prompt_cache=cache)
    cache[1].trim(2)
    with pytest.raises(CacheError, match="KVCache holds 11 rows; this prompt cache has 13"):
        run(model, drafter, [1], 5, prompt_cache=cache)


@pytest.mark.parametrize("quality", ["oracle", "noisy", "hopeless"])
@pytest.mark.parametrize("size", [6, 16])
@pytest.mark.quick(4)
def test_max_kv_size_gives_plain_decodings_ids(size, quality):
    model, prompt = tiny_qwen3(), some_line(11, 53)
    line = greedy_line(model, prompt, 60, max_kv_size=size)
    drafter = known_drafter(model, line, quality)
    for block in (2, 5, 16):
        assert ids_of(run(model, drafter, prompt, 60, max_kv_size=size, block_size=block)) == line[11:]


def test_max_kv_size_that_would_be_ignored_is_an_error():
    model = family("llama")
    with pytest.raises(CacheError, match="max_kv_size is 16 and llama sizes its caches itself"):
        make_prompt_cache(model, known_drafter(model, []), max_kv_size=16)
    # mlx-lm would run on without it.
    for call in (
        lambda: make_prompt_cache(model, max_kv_size=16),
        lambda: stream_generate(model, letters(), [1], max_kv_size=16),
    ):
        with pytest.raises(CacheError, match="max_kv_size is 16"):
            call()


def test_a_window_without_room_for_a_block_is_an_error_and_the_next_larger_is_exact(pair):
    model, tokenizer, drafter = pair
    for size in (1, 4):
        with pytest.raises(CacheError, match=f"max_kv_size is {size}; with a drafter it must be at least 5"):
            stream_generate(model, tokenizer, "import os", 20, drafter, max_kv_size=size)
    want = [r.token for r in stream_generate(model, tokenizer, "import os", 20, max_kv_size=5)]
    got = [r.token for r in stream_generate(model, tokenizer, "import os", 20, drafter, max_kv_size=5, block_size=4)]
    assert got == want


def test_what_mlx_lm_would_drop_without_a_dflash_drafter_is_an_error(pair):
    model, tokenizer, _ = pair
    given = {"max_kv_size": 32, "prompt_progress_callback": lambda done, total: None}
    for name, value in given.items():
        with pytest.raises(GenerationError, match=f"{name} is .* with an mlx-lm draft model; mlx-lm would drop it"):
            stream_generate(model, tokenizer, "a", 3, model, **{name: value})
    with pytest.raises(GenerationError, match="max_kv_size is .* and there is a prompt_cache"):
        stream_generate(model, tokenizer, "a", 3, max_kv_size=32, prompt_cache=make_prompt_cache(model))
    with pytest.raises(GenerationError, match="mlx-lm cannot quantize the caches of qwen3 to 7 bits in groups of 64"):
        stream_generate(model, tokenizer, "a", 3, kv_bits=7)


def wide_llama():
    """Heads of 32, the smallest group that MLX quantizes."""
    return tiny_target(seed=7, head_dim=32)


@pytest.mark.parametrize("start", [0, 12, 17, 24, 1000])
@pytest.mark.quick(3)
def test_a_quantized_cache_gives_plain_decodings_ids_wherever_it_starts(start):
    model, prompt = wide_llama(), some_line(12, 61)
    options = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": start}
    line = greedy_line(model, prompt, 40, **options)
    for quality, blocks in (("oracle", (5,)), ("noisy", (2, 5, 16)), ("hopeless", (16,))):
        drafter = known_drafter(model, line, quality)
        for block in blocks:
            got = run(model, drafter, prompt, 40, block_size=block, **options)
            assert ids_of(got) == line[12:], (quality, block)
            assert all(len(r.drafted) == block - 1 for r in got[-1].stats.rounds if r.width)
    if start < 40:
        assert greedy_line(model, prompt, 40)[12:] != line[12:]


def test_a_block_that_reaches_over_the_quantized_start_would_be_wrong(monkeypatch):
    plant(monkeypatch, KVQuantization, "cut", "return min(width, self.start - rows - 1) if", "return width if")
    with pytest.raises(AssertionError):
        for start in (14, 17, 24):
            test_a_quantized_cache_gives_plain_decodings_ids_wherever_it_starts(start)


def test_a_quantized_cache_goes_on_in_a_second_turn():
    model, prompt, more = wide_llama(), some_line(12, 61), some_line(5, 61)
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 15}
    theirs = mlx_lm_cache.make_prompt_cache(model)
    first = ids_of(plain(model, letters(), mx.array(prompt), max_tokens=9, prompt_cache=theirs, **options))
    mlx_lm_cache.trim_prompt_cache(theirs, theirs[0].offset - 20)
    second = greedy_ids(model, first[-1:] + more, 9, theirs, **options)
    drafter = known_drafter(model, prompt + first)
    cache = make_prompt_cache(model, drafter)
    assert ids_of(run(model, drafter, prompt, 9, prompt_cache=cache, block_size=5, **options)) == first
    assert {type(e).__name__ for e in PairCache.read(cache).target} == {"QuantizedKVCache"}
    assert ids_of(run(model, drafter, more, 9, prompt_cache=cache, block_size=5, **options)) == second


@pytest.mark.parametrize("name,reason", [("llama, mixed windows", "NYI"), ("deepseek_v3", ""), ("llama", "last dimension")])
def test_kv_bits_that_mlx_lm_cannot_run_is_an_early_error(name, reason):
    model = family(name)
    with pytest.raises(GenerationError, match=f"mlx-lm cannot quantize the caches of .* to 4 bits in groups of 64 .*{reason}"):
        next(stream_generate(model, letters(), some_line(9), 5, known_drafter(model, []), kv_bits=4))


def test_every_family_has_a_kind():
    assert set(KINDS.values()) <= set(FAMILIES)
