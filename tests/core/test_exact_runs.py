"""Exact runs: the same ids and log-probabilities with any drafts and none, from any prompt cache; the rest is refused."""

import copy

import mlx.core as mx
import pytest
from kit import ids_of, run, tiny_drafter, tiny_target
from mlx_lm.models.cache import make_prompt_cache as plain_cache

from dflash_mlx import exact, make_prompt_cache
from dflash_mlx.batch.generator import options_of
from dflash_mlx.draft_length import measure
from dflash_mlx.draft_length.policy import NotYet
from dflash_mlx.errors import CacheError, GenerationError
from dflash_mlx.kernels import autotune
from dflash_mlx.kernels.exact_routes import ExactRoutes
from dflash_mlx.prompt_cache import trim_prompt_cache

PROMPT = [5, 9, 33, 7, 20]


@pytest.fixture(scope="module")
def pair():
    model = tiny_target(seed=2)
    model.set_dtype(mx.bfloat16)
    return model, tiny_drafter(model)


@pytest.fixture
def rounds_otherwise(monkeypatch):
    """MLX's own operations give rows of a pass over more than 16 other values."""
    norm = mx.fast.rms_norm
    monkeypatch.setattr(mx.fast, "rms_norm", lambda x, *about: norm(x, *about) * (1 + 0.25 * (x.shape[-2] > 16)))


def bits_of(responses):
    return ids_of(responses), mx.stack([r.logprobs for r in responses])


def same(a, b):
    return a[0] == b[0] and mx.array_equal(a[1], b[1]).item()


@pytest.mark.parametrize(
    ("dtype", "blocks"),
    [(mx.float32, (2,)), (mx.bfloat16, (5,)), pytest.param(mx.bfloat16, (2, None), marks=pytest.mark.full)],
)
def test_no_drafter_and_any_block_give_the_same_bits(dtype, blocks):
    model = tiny_target(seed=2)
    model.set_dtype(dtype)
    alone = bits_of(run(model, None, PROMPT, 20, exact=True))
    for block in blocks:
        drafted = run(model, tiny_drafter(model), PROMPT, 20, exact=True, block_size=block)
        assert same(alone, bits_of(drafted)), block
    proved = exact.prove(exact.ExactTarget(model))
    assert isinstance(proved.routes, ExactRoutes) == proved.routed == (dtype != mx.float32)


def test_without_a_drafter_it_is_our_own_loop_and_drafts_nothing(pair):
    responses = run(pair[0], None, PROMPT, 8, exact=True)
    assert responses[-1].stats.widths == {0: 7}
    with pytest.raises(GenerationError, match="block_size is 4 and there is no DFlash drafter"):
        run(pair[0], None, PROMPT, 8, exact=True, block_size=4)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_reused_prefix_gives_the_bits_of_the_whole_prompt(pair, rounds_otherwise, drafts):
    model, drafter = pair[0], pair[1] if drafts else None
    text, step = [i * 7 % 61 for i in range(60)], 20
    for length in (10, 21, 45):
        cache = make_prompt_cache(model, drafter)
        said = ids_of(run(model, drafter, text[:length], 3, exact=True, prefill_step_size=step, prompt_cache=cache))
        whole = [*text[:length], *said, *text[length:]]
        fresh = bits_of(run(model, drafter, whole, 4, exact=True, prefill_step_size=step))
        again = run(model, drafter, text[length:], 4, exact=True, prefill_step_size=step, prompt_cache=copy.deepcopy(cache))
        assert same(fresh, bits_of(again)), length


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(("kept", "more"), [(35, 15), (30, 30), (35, 4), (20, 25)])
def test_a_cache_that_was_cut_gives_the_bits_of_the_whole_prompt(pair, rounds_otherwise, drafts, kept, more):
    # Full attention: entries that can be cut.
    model, step = pair[0], 20
    drafter = tiny_drafter(model, layer_types=None, sliding_window=None)
    text, cache = [i * 7 % 61 for i in range(60)], make_prompt_cache(model, drafter)
    run(model, drafter, text[:45], 3, exact=True, prefill_step_size=step, prompt_cache=cache)
    assert trim_prompt_cache(cache, 48 - kept) == 48 - kept
    fresh = bits_of(run(model, None, text[: kept + more], 4, exact=True, prefill_step_size=step))
    rest = text[kept : kept + more]
    drafter = drafter if drafts else None
    assert same(fresh, bits_of(run(model, drafter, rest, 4, exact=True, prefill_step_size=step, prompt_cache=cache)))


def test_whole_chunks_find_the_buffers_that_a_fresh_reading_finds(pair, monkeypatch):
    """A kernel of MLX's may be chosen by an array's strides."""
    model, seen, call = pair[0], [], exact.ExactTarget.__call__

    def noting(self, ids, cache=None, *about, **more):
        output = call(self, ids, cache, *about, **more)
        seen.append([entry.keys.shape for entry in cache]) if ids.size > 16 else None
        return output

    monkeypatch.setattr(exact.ExactTarget, "__call__", noting)
    text, cache = [i * 7 % 61 for i in range(500)], make_prompt_cache(model)
    said = ids_of(run(model, None, text, 20, exact=True, prefill_step_size=256, prompt_cache=cache))
    seen.clear()
    run(model, None, [*text, *said, 7], 1, exact=True, prefill_step_size=256)
    fresh = list(seen)
    seen.clear()
    run(model, None, [7], 1, exact=True, prefill_step_size=256, prompt_cache=cache)
    assert len(fresh) == 2 and seen == fresh[1:]


def test_passes_that_take_long_are_timed_after_an_exact_answer(monkeypatch):
    model = tiny_target(seed=2)
    drafter = tiny_drafter(model)
    monkeypatch.setattr(measure, "load_cost_model", lambda key: None)
    monkeypatch.setattr(measure.Measurement, "piece", lambda self: NotYet.LATER)
    assert run(model, drafter, PROMPT, 6, exact=True, block_size=None)[-1].stats.widths == {0: 5}
    assert not drafter.pair.measures_later and drafter.pair.exact.draft_length_policy(None).ready
    # What an answer is interrupted before counts as to be done, for who asks the drafter's pair.
    drafter.pair.exact._measurement = measure.Measurement(drafter.pair.exact.target, drafter)
    assert drafter.pair.measures_later


def test_a_cache_that_was_not_exact_is_read_again(pair, rounds_otherwise):
    model, drafter = pair
    text = [i * 7 % 61 for i in range(30)]
    cache = make_prompt_cache(model, drafter)
    said = ids_of(run(model, drafter, text, 3, prompt_cache=cache))
    whole = bits_of(run(model, drafter, [*text, *said, 8], 5, exact=True))
    assert same(whole, bits_of(run(model, drafter, [8], 5, exact=True, prompt_cache=cache)))


def test_a_drafters_cache_goes_on_without_one(pair):
    model, drafter = pair
    cache = make_prompt_cache(model, drafter)
    said = ids_of(run(model, drafter, PROMPT, 5, exact=True, prompt_cache=cache))
    whole = bits_of(run(model, None, [*PROMPT, *said, 8], 5, exact=True))
    assert same(whole, bits_of(run(model, None, [8], 5, exact=True, prompt_cache=cache)))


@pytest.mark.parametrize("exact", [False, True])
def test_a_cache_without_a_drafter_given_to_one_of_a_single_layer_is_refused_in_a_sentence(pair, exact):
    model, cache = pair[0], make_prompt_cache(pair[0])
    run(model, None, PROMPT, 5, exact=True, prompt_cache=cache)
    one = tiny_drafter(model, num_hidden_layers=1, layer_types=None, sliding_window=None)
    said = "filled without a drafter: features of width 0 wait in it, and this drafter takes 48. Start a new one"
    with pytest.raises(CacheError, match=said):
        run(model, one, [8], 5, exact=exact, prompt_cache=cache)


REFUSED = {
    "max_kv_size": ({"max_kv_size": 64}, "max_kv_size was given with exact"),
    "kv_bits": ({"kv_bits": 8}, "kv_bits was given with exact"),
    "acceptance": ({"acceptance": "block"}, "acceptance is 'block' with exact"),
    "block": ({"block_size": 17}, "block_size is 17 with exact; a pass of exact has at most 16 rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_text_is_refused_by_name(pair, name):
    options, said = REFUSED[name]
    with pytest.raises(GenerationError, match=said):
        run(*pair, PROMPT, 4, exact=True, **options)


def test_kernels_off_caches_that_mlx_lm_filled_and_batches_are_refused(pair, monkeypatch):
    model, drafter = pair
    monkeypatch.setattr(autotune, "has_gpu", lambda: True)
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "off")
    with pytest.raises(GenerationError, match="DFLASH_MLX_KERNELS is 'off' and exact needs our kernels on a GPU"):
        run(model, drafter, PROMPT, 4, exact=True)
    monkeypatch.undo()
    rotating = plain_cache(model)
    run(model, None, PROMPT, 2, prompt_cache=rotating)
    with pytest.raises(CacheError, match="the prompt cache was filled by mlx-lm, whose rows are not exact"):
        run(model, None, PROMPT, 4, exact=True, prompt_cache=rotating)
    with pytest.raises(GenerationError, match="exact was given in a batch"):
        options_of(model, None, PROMPT, exact=True)


def test_where_nothing_is_routed_the_widest_pass_is_compared_too(monkeypatch):
    norm = mx.fast.rms_norm
    monkeypatch.setattr(mx.fast, "rms_norm", lambda x, *about: norm(x, *about) * (1 + 2.0**-20 * (x.shape[-2] == 16)))
    with pytest.raises(
        GenerationError, match=r"cannot be served exactly: model.layers.0.input_layernorm \(RMSNorm\): a row among 16"
    ):
        run(tiny_target(seed=3), None, PROMPT, 4, exact=True)


def test_a_row_dependent_norm_is_refused_by_the_modules_name(pair, monkeypatch):
    model, drafter = tiny_target(seed=3), None
    model.set_dtype(mx.bfloat16)
    norm = mx.fast.rms_norm

    def planted(x, *about):
        y = norm(x, *about)
        return y * (1 + 2.0**-7 * (x.shape[-2] % 3 == 2)) if x.ndim == 3 else y

    monkeypatch.setattr(mx.fast, "rms_norm", planted)
    with pytest.raises(GenerationError, match=r"llama cannot be served exactly: model.layers.0.input_layernorm \(RMSNorm\)"):
        run(model, drafter, PROMPT, 4, exact=True)
