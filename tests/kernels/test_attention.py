"""block_attention in a target's passes: whose attention it serves, what it is handed, and that one row and many agree."""

import copy
import importlib
from types import FunctionType

import emulator
import mlx.core as mx
import mlx.nn as nn
import pytest
from families import BASE, FAMILIES, OTHERS, family, known_drafter, some_line, varied
from kit import greedy_ids, ids_of, run
from metal_device import MetalDevice
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from dflash_mlx.kernels import autotune, block_attention, small_batch
from dflash_mlx.kernels import routing as layers
from dflash_mlx.kernels.block_attention import block_attention_ops
from dflash_mlx.kernels.routing import attention_calls
from dflash_mlx.kernels.small_batch import FOLDED
from dflash_mlx.models.intercept import intercept
from dflash_mlx.models.target import Target
from dflash_mlx.rollback import masks_by_row, rollback_point
from dflash_mlx.verify import verify_block

needs_compiler = pytest.mark.emulator
# With heads of 32, which the kernel takes. gpt_oss has sinks; all but llama windows of 16 in every other layer.
SERVED = ["llama", "llama, mixed windows", "gemma3", "gpt_oss", "olmo3"]
WINDOW = 16


def wide(name, **changes):
    """The family's random model with heads of 32."""
    module, args = {**FAMILIES, **OTHERS}[name]
    module = importlib.import_module(f"mlx_lm.models.{module}")
    mx.random.seed(3)
    args = {**BASE, "model_type": module.__name__.rpartition(".")[2], **args, "head_dim": 32, **changes}
    model = varied(module.Model(module.ModelArgs.from_dict(args)), 3.0)
    for layer in model.layers:
        if "sinks" in getattr(layer, "self_attn", {}):
            layer.self_attn.sinks = mx.array([3.0, -1.0, 0.5, 2.0])
    return model


def serve(monkeypatch, does):
    """`does(question, rows)` says whether a question's first candidate serves it."""
    monkeypatch.setattr(autotune, "choose", lambda question, rows: question.candidates[0] if does(question, rows) else None)


@pytest.fixture
def everywhere(monkeypatch):
    """Our kernel runs wherever it can, no other does; a list of (rows, window, sinks, start, keys) of each launch."""
    monkeypatch.setattr(autotune, "may_run", lambda: True)
    serve(monkeypatch, lambda question, rows: question.candidates[0].kernel.name == "block_attention")
    monkeypatch.setattr(autotune, "_plans", {})
    return noting(monkeypatch, block_attention.prepare)


def noting(monkeypatch, prepare):
    launched = []

    def noted(shape, dtype, hk, scale, causal, window, has_sinks, simdgroups=None):
        launch = prepare(shape, dtype, hk, scale, causal, window, has_sinks)

        def run(q, k, v, sinks, start, held=None):
            assert q.shape == shape and (sinks is not None) == has_sinks
            launched.append((q.shape[2], window, has_sinks, start, k.shape[2] if held is None else "a buffer"))
            return launch(q, k, v, sinks, start, held)

        return run

    monkeypatch.setattr(block_attention, "prepare", noted)
    return launched


def prepare_ops(shape, dtype, hk, scale, causal, window, has_sinks):
    """MLX's own operations in the kernel's place."""

    def run(q, k, v, sinks, start, held):
        if held is None:
            return block_attention_ops(q, k, v, scale, causal, window, sinks, start)
        # Of a buffer, a mask hides what is behind the rows held.
        rows = held - shape[2] + mx.arange(shape[2])
        mask = mx.arange(k.shape[2])[None] <= rows[:, None]
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)

    return run


@pytest.fixture
def stand_in(everywhere, monkeypatch):
    """`everywhere`, MLX's own operations in the kernel's place."""
    return noting(monkeypatch, prepare_ops)


@pytest.mark.parametrize("name", SERVED)
def test_ids_are_plain_decodings_through_wrapped_windows(name, stand_in):
    model = wide(name)
    prompt = some_line(21)
    want = greedy_ids(model, prompt, 70)
    drafter = known_drafter(model, [*prompt, *want], "noisy")
    assert [r.token for r in run(model, drafter, prompt, 70)] == want
    windows = {0} if name == "llama" else {0, WINDOW}
    assert {launch[1] for launch in stand_in} == windows
    assert {launch[2] for launch in stand_in} == {name == "gpt_oss"}
    rows = [launch[0] for launch in stand_in]
    assert 1 in rows and max(rows) > 1 and len(stand_in) % len(model.layers) == 0
    # Windows have dropped keys: the first that is left is not the text's first.
    assert (max(launch[3] for launch in stand_in) > 0) == (name != "llama")
    assert max(launch[4] for launch in stand_in if launch[1]) < WINDOW + 16 if name != "llama" else True


@pytest.mark.full
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_every_familys_ids_are_plain_decodings_and_one_row_goes_where_many_go(name, stand_in, monkeypatch):
    """Heads of any width, as if the kernel took them."""

    def taken(q, k, v, scale, causal, window, sinks, folds):
        takes = q.shape[2] <= 16 and k.shape == v.shape
        return takes and block_attention.prepare(q.shape, q.dtype, k.shape[1], scale, causal, window, sinks is not None)

    monkeypatch.setattr(layers, "block_attention_plan", taken)
    model, prompt = family(name), some_line(21)
    want = greedy_ids(model, prompt, 40)
    assert [r.token for r in run(model, known_drafter(model, [*prompt, *want], "noisy"), prompt, 40)] == want
    one, many = ({launch[1:3] for launch in stand_in if (launch[0] == 1) is single} for single in (True, False))
    assert one == many


@pytest.mark.rows_equal
@needs_compiler
@pytest.mark.parametrize("name", SERVED)
def test_a_blocks_rows_are_bit_for_bit_those_of_one_row_at_a_time(name, everywhere):
    """Whole passes, the kernel's text in the emulator, a ring that is wrapped and one that a block put in order."""
    model, ids = wide(name), mx.array([some_line(31)])
    cache = make_prompt_cache(model)
    mx.eval(model(ids[:, :14], cache=cache))
    target = Target(model)

    def run(ids, cache):
        with masks_by_row(cache if ids.shape[1] > 1 else []):
            hidden = target(ids, cache, kernels=True).hidden
        mx.eval(hidden, [entry.state for entry in cache])
        return hidden

    with emulator.emulated():
        one, blocks = copy.deepcopy(cache), copy.deepcopy(cache)
        rows = mx.concatenate([run(ids[:, i : i + 1], one) for i in range(14, 31)], axis=1)
        steps = [(14, 19), (19, 20), (20, 21), (21, 28), (28, 31)]  # blocks and single rows by turns
        mixed = mx.concatenate([run(ids[:, a:b], blocks) for a, b in steps], axis=1)
    assert mx.array_equal(rows, mixed)
    assert len(everywhere) == (17 + len(steps)) * len(model.layers)
    assert float(mx.abs(rows - Target(model)(ids[:, 14:], cache).hidden).max()) < 1e-4 * float(mx.abs(rows).max())


@needs_compiler
def test_a_verify_pass_sees_what_plain_passes_see(everywhere):
    """verify_block, with its own masks, after a ring that single rows wrapped."""
    model, line = wide("gpt_oss"), some_line(34)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([line[:21]]), cache=cache))
    target = Target(model)
    with emulator.emulated():
        hidden = verify_block(target, mx.array(line[21:22]), mx.array([line[22:26]]), cache, rollback_point(cache, 21)).hidden
        mx.eval(hidden)
    want = Target(model)(mx.array([line[:26]]), make_prompt_cache(model)).hidden[:, 21:]
    assert len(everywhere) == len(model.layers) and {launch[0] for launch in everywhere} == {5}
    assert float(mx.abs(hidden - want).max()) < 1e-4 * float(mx.abs(want).max())


class Attend(nn.Module):
    """Attention as mlx-lm's models call it."""

    def __call__(self, q, k, v, cache, mask=None, scale=0.2, sinks=None):
        k, v = cache.update_and_fetch(k, v)
        return scaled_dot_product_attention(q, k, v, cache=cache, scale=scale, mask=mask, sinks=sinks)


def rows(m, b=1, hq=4, hk=2, d=32, seed=0):
    keys = mx.random.split(mx.random.key(seed), 3)
    return [mx.random.normal((b, h, m, d), key=k) for h, k in zip((hq, hk, hk), keys, strict=True)]


def attended(cache, m=3, filled=20, mask="causal", module=None, **options):
    """(through the kernel's handler, mlx-lm's own) for m rows after `filled`, with equal caches."""
    module = Attend() if module is None else module
    if filled:
        cache.update_and_fetch(*rows(filled, seed=1)[1:])
    ours, theirs = cache, copy.deepcopy(cache)
    options = {"mask": mask(ours) if callable(mask) else mask, **options}
    b = options.pop("b", 1)
    with intercept(attention_calls(module)):
        got = module(*rows(m, b, seed=2), ours, **options)
    return got, module(*rows(m, b, seed=2), theirs, **options)  # new arrays: mlx-lm scales quantized attention's in place


def window_mask(window=WINDOW, change=lambda mask: mask):
    """Makes a cache's mask for three rows."""

    def make(cache):
        with masks_by_row([cache]):
            return change(create_attention_mask(mx.zeros((1, 3, 1)), cache, window_size=window))

    return make


def wider(cache):
    """The mask of a window of 17, of the shape that one of 16 has after 20 rows."""
    other = RotatingKVCache(WINDOW + 1)
    other.update_and_fetch(*rows(WINDOW - 1, seed=1)[1:])
    mask = window_mask(WINDOW + 1)(other)
    assert mask.shape == window_mask()(cache).shape and mask.window == WINDOW + 1
    return mask


def anded(mask):
    mask &= mx.ones(mask.shape, dtype=mx.bool_)
    return mask


@pytest.mark.parametrize("m, cache, mask", [
    (3, KVCache(), "causal"),
    (1, KVCache(), None),
    (1, RotatingKVCache(WINDOW), None),
    (3, RotatingKVCache(WINDOW), window_mask()),
    (3, RotatingKVCache(40), "causal"),
])  # fmt: skip
def test_what_is_taken(m, cache, mask, stand_in):
    got, want = attended(cache, m, mask=mask, sinks=mx.array([1.0, 0.0, -1.0, 2.0]))
    assert len(stand_in) == 1 and mx.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("what, cache, options", [
    ("quantized keys", QuantizedKVCache(group_size=32, bits=8), {}),
    ("a kind of cache that it does not know", ChunkedKVCache(64), {}),
    ("first rows that are kept", RotatingKVCache(WINDOW, keep=4), {"m": 1, "mask": None}),
    ("more than one text", KVCache(), {"b": 2, "filled": 0}),
    ("17 rows", KVCache(), {"m": 17}),
    ("several rows that all see each other", KVCache(), {"mask": None}),
    ("a mask of one's own", KVCache(), {"mask": lambda cache: mx.ones((3, 23), dtype=mx.bool_)}),
    ("a window's mask, changed into another array", RotatingKVCache(WINDOW), {"mask": window_mask(change=lambda m: m | m)}),
    ("a window's mask, changed in place", RotatingKVCache(WINDOW), {"mask": window_mask(change=anded)}),
    ("the mask of another cache's window", RotatingKVCache(WINDOW), {"mask": wider}),
    ("more keys than the window's without a window's mask", RotatingKVCache(WINDOW), {}),
    ("a window inside the cache's", RotatingKVCache(WINDOW + 4), {"mask": window_mask()}),
    ("a scale that is an array", KVCache(), {"scale": mx.array(0.2)}),
])  # fmt: skip
def test_what_is_left_to_mlx(what, cache, options, stand_in):
    got, want = attended(cache, **options)
    assert not stand_in and mx.array_equal(got, want), what


def test_keys_that_are_not_the_caches_are_left_to_mlx(stand_in):
    class Shared(Attend):
        """As layers that attend to another layer's keys, rows behind the last one included."""

        def __call__(self, q, k, v, cache, **options):
            return scaled_dot_product_attention(q, cache.keys, cache.values, cache, 0.2, None)

    got, want = attended(KVCache(), m=1, module=Shared(), mask=None)
    assert not stand_in and mx.array_equal(got, want)


def test_a_layer_that_was_given_a_foreign_mask_stays_with_mlx_for_one_row_too(stand_in):
    module, cache = Attend(), KVCache()
    calls = attention_calls(module)
    with intercept(calls):
        module(*rows(1), cache)
        assert len(stand_in) == 1
        module(*rows(3), cache, mx.ones((3, 4), dtype=mx.bool_))
        module(*rows(1), cache)
    assert len(stand_in) == 1


def test_a_function_of_that_name_that_is_not_mlx_lms_is_left_alone():
    names = {"nn": nn, "scaled_dot_product_attention": lambda q, k, v, **_: q}
    exec("class Own(nn.Module):\n    def __call__(self, q):\n        return scaled_dot_product_attention(q, q, q)", names)
    assert len(attention_calls(Attend())) == 1 and not attention_calls(names["Own"]())


def test_a_model_that_caps_its_scores_attends_by_itself(stand_in):
    model = wide("gemma2", query_pre_attn_scalar=32.0)
    assert not attention_calls(model)
    prompt = some_line(9)
    want = greedy_ids(model, prompt, 20)
    assert [r.token for r in run(model, known_drafter(model, [*prompt, *want]), prompt, 20)] == want and not stand_in


def test_quantized_caches_switch_to_mlx_in_the_middle_of_a_text(stand_in):
    model, prompt = wide("llama"), some_line(9)
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 24}
    want = greedy_ids(model, prompt, 40, **options)
    drafter = known_drafter(model, [*prompt, *want])
    assert [r.token for r in run(model, drafter, prompt, 40, **options)] == want
    assert 9 < max(launch[4] for launch in stand_in) <= 24


@pytest.mark.parametrize("faster", [True, False])
def test_a_pass_is_flagged_only_if_a_kernel_ran_in_it(faster, stand_in, monkeypatch):
    serve(monkeypatch, lambda question, rows: faster and question.candidates[0].kernel.name == "block_attention")
    model = wide("llama")
    target = Target(model)
    hidden = target(mx.array([[1, 2, 3]]), make_prompt_cache(model), kernels=True).hidden
    assert len(target.finite_flag(hidden)) == faster and bool(stand_in) == faster


def test_nobody_elses_calls_change(stand_in):
    """The model's module, another model of the same class and this one outside its pass call mlx-lm's own function."""
    module = importlib.import_module("mlx_lm.models.llama")
    model, other = wide("llama"), wide("llama")
    call = type(model.layers[0].self_attn).__call__
    with intercept(attention_calls(model)):
        other(mx.array([[1, 2]]), cache=make_prompt_cache(other))
        assert not stand_in and module.scaled_dot_product_attention is scaled_dot_product_attention
        model(mx.array([[1, 2]]), cache=make_prompt_cache(model))
    assert len(stand_in) == len(model.layers)
    model(mx.array([[1, 2]]), cache=make_prompt_cache(model))
    assert len(stand_in) == len(model.layers) and type(model.layers[0].self_attn).__call__ is call


def test_layers_are_found_while_another_pass_holds_them(monkeypatch):
    model = wide("llama")
    nn.quantize(model, 32, 4, class_predicate=lambda path, m: path.endswith("o_proj"))
    held = [(m, lambda inner, args, kwargs: inner(*args, **kwargs)) for _, m in model.named_modules()]
    monkeypatch.setattr(autotune, "may_run", lambda: True)
    with intercept(held):
        assert len(Target(model).routes.calls(1)) == 2 * len(model.layers)


def test_one_verdict_serves_all_lengths(monkeypatch):
    asked = []
    monkeypatch.setattr(autotune, "_plans", {})
    serve(monkeypatch, lambda question, rows: asked.append((question.shape, rows)))
    for m, s in ((1, 20), (16, 300), (1, 5000)):
        q, k = mx.zeros((1, 4, m, 32)), mx.zeros((1, 2, s, 32))
        assert not block_attention.block_attention_plan(q, k, k, 0.2)
    assert asked == [("attention mlx.core.float32 HQ 4 HK 2 D 32", rows) for rows in (1, 16)]


# Heads, key heads and their size, as in Qwen3.5-9B, 27B and 35B-A3B, and where each has keys of its own.
@pytest.mark.parametrize("hq, hk, d", [(16, 4, 256), (24, 4, 256), (16, 2, 256), (4, 4, 64)])
@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("sinks, cuda", [(False, False), (True, False), (False, True)])
def test_who_may_serve_a_targets_attention(hq, hk, d, folds, sinks, cuda, monkeypatch):
    asked = {}
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(autotune, "_plans", {})
    monkeypatch.setattr(autotune, "choose", lambda question, rows: asked.update({rows: [c.name for c in question.candidates]}))
    for m in (1, 8, 16):
        q, k = mx.zeros((1, hq, m, d), dtype=mx.bfloat16), mx.zeros((1, hk, 300, d), dtype=mx.bfloat16)
        block_attention.block_attention_plan(q, k, k, 0.2, True, 0, mx.zeros((hq,)) if sinks else None, folds)
    texts = ["block_attention"] if cuda else ["block_attention simdgroups 8", "block_attention simdgroups 4"]
    # Exact runs never ask for it: a row's bits there are its own.
    folded = ["gqa_folded_attention"] if folds and hq > hk and not sinks and not cuda else []
    assert asked == dict.fromkeys((1, 8, 16), texts + folded)


@pytest.fixture
def folding(monkeypatch):
    """MLX's attention over folded rows serves wherever it may, no kernel does; (queries, keys, mask) of each call."""
    for name in ("may_run", "has_gpu"):
        monkeypatch.setattr(autotune, name, lambda: True)
    folded = lambda question, rows: next((c for c in question.candidates if c.kernel is FOLDED), None)  # noqa: E731
    monkeypatch.setattr(autotune, "choose", folded)
    monkeypatch.setattr(autotune, "_plans", {})
    calls, form = [], small_batch.gqa_folded_attention

    def noted(q, k, v, mask, scale):
        calls.append((q.shape, k.shape, mask if mask is None else mask.shape))
        return form(q, k, v, mask, scale)

    monkeypatch.setattr(small_batch, "gqa_folded_attention", noted)
    return calls


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("name", SERVED)
def test_ids_are_plain_decodings_over_folded_rows(name, compiled, folding, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_COMPILE", compiled)
    model, prompt = wide(name), some_line(21)
    want = greedy_ids(model, prompt, 70)
    folding.clear()
    assert [r.token for r in run(model, known_drafter(model, [*prompt, *want], "noisy"), prompt, 70)] == want
    targets = [call for call in folding if call[0][1:4:2] == (4, 32)]
    assert bool(targets) == (name != "gpt_oss") and all(k[1] == 2 for _, k, _ in targets)
    # Masks have the rows of both heads that share keys. One row is MLX's: it has more kernels for it.
    assert all(q[2] > 1 and mask[0] in (1, 2 * q[2]) for q, _, mask in targets)


@pytest.mark.parametrize("folded_s, served", [(5e-4, small_batch.Folded), (1.5e-3, FunctionType)])
def test_a_text_and_folded_rows_are_tried_in_one_question(folded_s, served, monkeypatch, tmp_path):
    device = MetalDevice().install(monkeypatch, tmp_path)
    device.stock_costs = lambda name: folded_s if name == "gqa_folded_attention" else 2e-3
    q, k = mx.zeros((1, 4, 8, 32)), mx.zeros((1, 2, 40, 32))
    ask = lambda: block_attention.block_attention_plan(q, k, k, 0.2, folds=True)  # noqa: E731
    assert ask() is None and len(autotune._waiting) == 1
    autotune.try_waiting(9.0)
    assert autotune._waiting == {} and type(ask()) is served
    assert {result.kernel for result in autotune.results()} == {"block_attention", "gqa_folded_attention"}


def test_a_targets_attention_is_asked_about_once(monkeypatch, tmp_path):
    MetalDevice().install(monkeypatch, tmp_path)
    model = wide("llama")
    Target(model)(mx.array([[1, 2, 3]]), make_prompt_cache(model), kernels=True)
    assert [question.shape for question, _ in autotune._waiting.values()] == ["attention mlx.core.float32 HQ 4 HK 2 D 32"]


def test_heads_with_sinks_are_tried_with_sinks(monkeypatch):
    tried = []
    monkeypatch.setattr(autotune, "_plans", {})
    serve(monkeypatch, lambda question, rows: tried.append((question.shape, question.make(question.candidates))))
    monkeypatch.setattr(block_attention, "trials", lambda *about: about[-2])
    q, k = mx.zeros((1, 4, 1, 32)), mx.zeros((1, 2, 20, 32))
    for sinks in (None, mx.zeros((4,))):
        block_attention.block_attention_plan(q, k, k, 0.2, True, 16, sinks)
    about = "attention mlx.core.float32 HQ 4 HK 2 D 32 window 16"
    assert tried == [(about, False), (f"{about} sinks", True)]


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_compiled_passes_hand_the_kernel_whole_buffers(name, stand_in, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_COMPILE", "on")
    model, prompt = wide(name), [5, 9, 33, 7, 12]
    want = greedy_ids(model, prompt, 40)
    drafter = known_drafter(model, [*prompt, *want], "noisy", block=6)
    stand_in.clear()
    assert ids_of(run(model, drafter, prompt, 40, block_size=6)) == want
    blocks = drafter.pair.accelerator.passes[0]
    assert blocks.passes > 5
    # Once a layer of the one trace: 6 rows are filled up to 8. The ordinary pass that it was compared with has 6.
    assert [launch for launch in stand_in if launch[4] == "a buffer"] == [(8, 0, False, 0, "a buffer")] * len(model.layers)
    assert sum(launch[0] == 6 for launch in stand_in) >= len(model.layers)
