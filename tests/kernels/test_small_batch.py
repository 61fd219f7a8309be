"""Products and attention of few rows by other operations of MLX's: what they compute, when they run, and whole generations."""

import math
import os

import cuda_device
import mlx.core as mx
import mlx.nn as nn
import pytest
from cuda_device import FORMS
from families import FAMILIES, OTHERS, family, known_drafter, some_line
from kit import greedy_ids, rounds_of, run, tiny_drafter, tiny_target
from metal_device import MetalDevice
from mlx_lm.models.cache import make_prompt_cache

import dflash_mlx
from dflash_mlx import stream_generate
from dflash_mlx.kernels import autotune, small_batch, trials
from dflash_mlx.kernels.masks import PassMasks
from dflash_mlx.kernels.small_batch import folded_mask, gqa_folded_attention, matmul_as_gemv
from dflash_mlx.models.target import Target
from dflash_mlx.rollback import rollback, rollback_point
from dflash_mlx.traced import prepare
from dflash_mlx.verify import verify_block


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    return cuda_device.install(monkeypatch, tmp_path)


@pytest.fixture(params=["cuda", "metal"])
def gpu(request, monkeypatch, tmp_path):
    """A made-up GPU of each kind: what ran on it."""
    if request.param == "cuda":
        return cuda_device.install(monkeypatch, tmp_path)
    return MetalDevice().install(monkeypatch, tmp_path).launches


def normal(*shape, seed=0, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


@pytest.mark.parametrize("n, k", [(1, 1), (7, 33), (576, 192), (64, 1536)])
@pytest.mark.parametrize("m", [2, 5, 16, 32])
def test_a_product_is_mlxs_and_its_rows_are_those_of_one_row(n, k, m):
    x, w = normal(1, m, k), normal(n, k, seed=1)
    y = matmul_as_gemv(x, w)
    assert y.shape == (1, m, n)
    assert mx.allclose(y, x @ w.T, rtol=1e-5, atol=1e-4)
    for i in range(m):
        assert mx.array_equal(y[:, i : i + 1], matmul_as_gemv(x[:, i : i + 1], w))


MASKS = {
    "causal": lambda m, s: ("causal", mx.arange(s)[None] <= mx.arange(s - m, s)[:, None]),
    "window": lambda m, s: (lambda b: (b, b))(
        (mx.arange(s)[None] <= mx.arange(s - m, s)[:, None]) & (mx.arange(s)[None] > mx.arange(s - m, s)[:, None] - 6)
    ),
    "buffer": lambda m, s: (lambda b: (b[None, None], b))(mx.arange(s)[None] <= mx.arange(3, 3 + m)[:, None]),
    "added": lambda m, s: (lambda b: (mx.where(b, normal(m, s, seed=9), -math.inf), b))(
        mx.arange(s)[None] <= mx.arange(s - m, s)[:, None]
    ),
}


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("hq, hk, d, e, m, s", [(4, 4, 32, 32, 4, 20), (9, 3, 64, 64, 16, 33), (8, 1, 16, 24, 7, 40)])
def test_attention_is_the_softmax_of_its_definition(kind, hq, hk, d, e, m, s, cuda, monkeypatch):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    q, k, v = normal(1, hq, m, d), normal(1, hk, s, d, seed=1), normal(1, hk, s, e, seed=2)
    mask, seen = MASKS[kind](m, s)
    got = gqa_folded_attention(q, k, v, folded_mask(mask, m, s, hq // hk, q.dtype), 0.3)
    keys, values = (mx.repeat(a, hq // hk, axis=1) for a in (k, v))
    scores = 0.3 * q @ keys.swapaxes(-1, -2) + (mask if kind == "added" else mx.where(seen, 0, -math.inf))
    assert got.shape == (1, hq, m, e)
    assert mx.allclose(got, mx.softmax(scores, axis=-1) @ values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("hq, hk, s", [(6, 2, 9), (4, 1, 40)])
def test_attention_of_one_row_in_each_of_many_texts_is_mlxs(hq, hk, s, cuda, monkeypatch):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    q, buffers = normal(5, hq, 1, 16), [normal(5, hk, 64, 16, seed=seed) for seed in (1, 2)]
    k, v = (buffer[..., :s, :] for buffer in buffers)
    got = gqa_folded_attention(q, k, v, None, 0.3)
    assert got.shape == (5, hq, 1, 16)
    assert mx.allclose(got, mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3), rtol=1e-5, atol=1e-5)


def test_many_texts_are_served_where_mlx_has_no_cudnn_for_one_row(cuda, monkeypatch):
    def served(b=64, hq=6, hk=2, m=1, s=255, d=64, dtype=mx.bfloat16):
        return small_batch.serves_many_texts(*(mx.zeros((b, *shape, d), dtype) for shape in ((hq, m), (hk, s), (hk, s))))

    monkeypatch.setenv(small_batch.CUDNN, "1")
    assert served() and served(dtype=mx.float16, s=1) and served(d=136, s=256)
    assert not any(served(**other) for other in ({"b": 63}, {"hk": 6}, {"m": 2}, {"s": 256}, {"dtype": mx.float32}))
    monkeypatch.setenv(small_batch.CUDNN, "0")
    assert served(s=256)
    monkeypatch.setenv(autotune.VARIABLE, "off")
    assert not served()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_trials_pass_and_a_wrong_form_fails_its_own(cuda, dtype, monkeypatch):
    small_batch.matmul_as_gemv_plan(normal(1, 4, 48, dtype=dtype), normal(24, 48, dtype=dtype))
    small_batch.gqa_folded_attention_plan(*(normal(1, h, n, 32, dtype=dtype) for h, n in ((4, 5), (2, 9), (2, 9))), 0.2, "causal")
    assert {v.kernel for v in autotune.results() if v.use and v.reason.startswith("right")} == FORMS
    autotune._known.clear()
    autotune._results.path.unlink()
    autotune._forget()
    monkeypatch.setattr(small_batch, "matmul_as_gemv", lambda x, w: matmul_as_gemv(x, w) * 1.2)
    monkeypatch.setattr(small_batch, "gqa_folded_attention", lambda *given: gqa_folded_attention(*given[:4], 2 * given[4]))
    assert small_batch.matmul_as_gemv_plan(normal(1, 4, 48, dtype=dtype), normal(24, 48, dtype=dtype)) is None
    given = [normal(1, h, n, 32, dtype=dtype) for h, n in ((4, 5), (2, 9), (2, 9))]
    assert small_batch.gqa_folded_attention_plan(*given, 0.2, "causal") is None
    assert {v.kernel for v in autotune.results() if v.reason.startswith("differs from stock MLX by ")} == FORMS
    assert not any(v.use for v in autotune.results())


@pytest.mark.parametrize(
    "x, w",
    [((1, 1, 32), (8, 32)), ((1, 33, 32), (8, 32)), ((2, 4, 32), (8, 32)), ((4, 32), (8, 32))],
    ids=["one row", "33 rows", "two texts", "no batch"],
)
def test_products_that_are_left_to_mlx(cuda, x, w):
    assert small_batch.matmul_as_gemv_plan(normal(1, 4, 32), normal(8, 32))
    assert small_batch.matmul_as_gemv_plan(normal(*x), normal(*w)) is None
    assert small_batch.matmul_as_gemv_plan(normal(1, 4, 32, dtype=mx.float16), normal(8, 32)) is None


def attention_plan(b=1, hq=4, hk=2, m=5, s=12, d=32, mask="causal", scale=0.2, kv=mx.float32):
    return small_batch.gqa_folded_attention_plan(
        normal(b, hq, m, d), normal(b, hk, s, d, dtype=kv), normal(b, hk, s, d, dtype=kv), scale, mask
    )


def test_attention_that_is_left_to_mlx(cuda):
    assert attention_plan() and attention_plan(mask=mx.ones((1, 1, 5, 12), dtype=mx.bool_)) and attention_plan(hq=2)
    given = [{"b": 2}, {"m": 3}, {"m": 17, "s": 20}, {"mask": None}, {"kv": mx.float16}, {"hq": 3}]
    # A mask of another shape: broadcast over rows, one for each head, for fewer keys.
    given += [{"mask": mx.ones(shape, dtype=mx.bool_)} for shape in ((1, 12), (1, 4, 5, 12), (12, 5))]
    assert [g for g in given if attention_plan(**g)] == []


def test_they_run_unasked_on_cuda_and_nowhere_else(cuda, monkeypatch):
    assert autotune.may_run() and small_batch.matmul_as_gemv_plan(normal(1, 4, 32), normal(8, 32))
    for value, runs in {"off": False, "accept": False, "matmul_as_gemv": True, "on": True}.items():
        monkeypatch.setenv("DFLASH_MLX_KERNELS", value)
        autotune.may_run()
        assert bool(small_batch.matmul_as_gemv_plan(normal(1, 4, 32), normal(8, 32))) is runs, value
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    autotune._forget()
    assert small_batch.matmul_as_gemv_plan(normal(1, 4, 32), normal(8, 32)) is None and small_batch.here() is False


@pytest.mark.parametrize("mask", [None, "causal", "an array"])
def test_on_metal_attention_is_one_call_of_mlxs_over_folded_rows(mask, monkeypatch):
    given, attend = [], mx.fast.scaled_dot_product_attention
    q, k, v = normal(1, 6, 9, 16), normal(1, 2, 21, 16, seed=1), normal(1, 2, 21, 16, seed=2)
    seen = mx.arange(21)[None] <= mx.arange(12, 21)[:, None] if mask == "an array" else mask
    want = attend(q, k, v, scale=0.3, mask=seen)
    monkeypatch.setattr(
        mx.fast, "scaled_dot_product_attention", lambda q, *a, **more: given.append(q.shape) or attend(q, *a, **more)
    )
    got = small_batch.Folded(0.3)(q, k, v, seen)
    assert given == [(1, 2, 27, 16)] and got.shape == want.shape and mx.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_drafters_attention_is_folded_on_metal_where_a_trial_finds_it_faster(monkeypatch, tmp_path):
    MetalDevice().install(monkeypatch, tmp_path)
    monkeypatch.setattr(small_batch, "TRIAL_KEYS", 40)
    left = [{"b": 2}, {"m": 17, "s": 20}, {"kv": mx.float16}, {"hq": 3}, {"hq": 2}]
    assert all(attention_plan(**g) is None for g in [{}, {"mask": None}, *left])
    # What is not known runs on MLX's: two questions wait, one of them about blocks that see all of themselves.
    waiting = [question for question, _ in autotune._waiting.values()]
    assert [question.shape.partition(" of ")[2] for question in waiting] == ["a drafter", "a drafter full"]
    times = lambda *calls, x, **_: [1.0, 2.0] if x.shape[2] == 16 else [2.0, 1.0]  # noqa: E731
    monkeypatch.setattr(trials, "medians_s", times)
    autotune.try_waiting(9.0)
    # MLX has one kernel for up to 8 rows and another for more.
    for mask in ("causal", None, mx.ones((9, 12), dtype=mx.bool_)):
        assert attention_plan(m=9, mask=mask) == small_batch.Folded(0.2) and attention_plan(m=8, mask="causal") is None
    assert [g for g in left if attention_plan(**{"m": 9, "s": 20} | g)] == []


@pytest.mark.parametrize("mask", ["causal", None])
def test_a_wrong_form_fails_its_trial_on_metal(mask, monkeypatch, tmp_path):
    MetalDevice().install(monkeypatch, tmp_path)
    monkeypatch.setattr(small_batch, "TRIAL_KEYS", 40)
    monkeypatch.setattr(trials, "medians_s", lambda *calls, **_: [*range(1, len(calls) + 1)])
    masks = []

    def right(q, k, v, mask, scale):
        masks.append(mask)
        return gqa_folded_attention(q, k, v, mask, scale)

    # Rows in another order, as if those of a head lay apart.
    turned = lambda q, k, v, mask, scale: gqa_folded_attention(q[:, :, ::-1], k, v, mask, scale)  # noqa: E731
    for form, use in ((right, True), (turned, False)):
        monkeypatch.setattr(small_batch, "gqa_folded_attention", form)
        attention_plan(m=9, mask=mask), autotune.try_waiting(9.0)
        assert bool(attention_plan(m=9, mask=mask)) is use
        autotune._known.clear(), autotune._results.path.unlink(), autotune._forget()
    # As a drafter's pass: a block that sees all of itself has no mask.
    assert masks and all((made is None) == (mask is None) for made in masks)


def test_slower_ones_do_not_run(cuda, monkeypatch):
    times = iter(range(10**6, 0, -1))
    monkeypatch.setattr(trials, "medians_s", lambda *calls, **_: [next(times) for _ in calls])
    assert small_batch.matmul_as_gemv_plan(normal(1, 4, 32), normal(8, 32)) is None and attention_plan() is None


def test_a_pass_is_served_by_them_without_flags_and_what_is_left_to_mlx_is_not_routed_again(cuda):
    model = family("llama")
    target, entries = Target(model, (1,)), make_prompt_cache(model)
    target(mx.array([some_line(20)]), entries)
    n = len(model.layers)
    # Those of the layers, and the head, which the model itself runs.
    products = n * sum(type(m) is nn.Linear for _, m in model.layers[0].named_modules()) + 1
    for rows, expected in {1: (0, 0), 2: (products, 0), 5: (products, n)}.items():
        for tried in (False, True):
            cuda.clear()
            point = rollback_point(entries, 20)
            hidden = verify_block(target, mx.array([3]), mx.zeros((1, rows - 1), dtype=mx.int32), entries, point).hidden
            mx.eval(hidden)
            rollback(entries, point, 20)
            if tried:
                assert (cuda.count("matmul_as_gemv"), cuda.count("gqa_folded_attention")) == expected
            assert target.finite_flag(hidden) == []
        kinds = [type(handler).__name__ for _, handler, _ in target.routes.calls(rows)]
        # The embedding of a model that is not tied is never the head: nobody called it, so it stays.
        assert kinds.count("Attention") == expected[1] and kinds.count("Dense") - expected[0] in (0, 1)


def test_the_mask_is_made_once_a_pass(cuda, monkeypatch):
    model = family("llama")
    target, entries = Target(model), make_prompt_cache(model)
    target(mx.array([some_line(20)]), entries)
    target(mx.array([[1, 2, 3, 4]]), entries, kernels=True)
    made = []
    monkeypatch.setattr(small_batch, "folded_mask", lambda *about: made.append(about[:3]) or folded_mask(*about))
    for _ in range(2):
        target(mx.array([[1, 2, 3, 4]]), entries, kernels=True)
    assert made == [("causal", 4, 28), ("causal", 4, 32)]
    masks, (one, other) = PassMasks(), (mx.ones((4, 9), dtype=mx.bool_) for _ in range(2))
    got = [masks.folded(mask, 4, 9, 2, mx.float32) for mask in (one, one, other, one)]
    assert got[0] is got[1] and len(made) == 5
    # Layers with a window and layers without one take turns.
    turns = [masks.folded(mask, 4, 9, 2, mx.float32) for mask in ("causal", one, "causal", one)]
    assert turns[0] is turns[2] and turns[1] is turns[3] is got[3] and len(made) == 6


QUICK = ("llama", "gemma3", "qwen3_moe", "gpt_oss")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in (*FAMILIES, *OTHERS)])
def test_ids_are_plain_decodings(name, gpu):
    model, prompt = family(name), some_line(21)
    want = greedy_ids(model, prompt, 40)
    assert [r.token for r in run(model, known_drafter(model, [*prompt, *want], "noisy"), prompt, 40)] == want
    assert gpu or not any(type(m) is nn.Linear for _, m in model.named_modules())


@pytest.mark.full
def test_compiled_passes_are_made_of_them_and_call_none(cuda, pair, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_COMPILE", "on")
    model, tokenizer, drafter = pair
    prompt = tokenizer.encode("def area(width, height):")
    want = greedy_ids(model, prompt, 60)
    for _ in range(3):
        cuda.clear()
        out = list(stream_generate(model, tokenizer, prompt, 60, drafter, block_size=8))
        assert [r.token for r in out] == want
        rounds = out[-1].stats.rounds
    # The third answer's traces are there.
    blocks, drafts = drafter.pair.accelerator.passes
    assert blocks.passes >= 2 * sum(r.width > 3 for r in rounds) > 10 and drafts.passes > 10
    assert cuda.count("gqa_folded_attention") == 0
    cuda.clear()
    features = normal(1, 2, drafter.fc.weight.shape[1])
    mx.eval(drafter.mask_rows(mx.zeros((1, 8), dtype=mx.int32), features, drafter.make_cache(), 0))
    assert not cuda  # outside of a trace a drafter's products are MLX's
    traced, masks = [], []
    apart = small_batch.rows_apart
    monkeypatch.setattr(small_batch, "rows_apart", lambda x, w: traced.append(w.shape[-2:]) or apart(x, w))
    folded = lambda q, k, v, mask, scale: masks.append(mask.shape) or gqa_folded_attention(q, k, v, mask, scale)  # noqa: E731
    monkeypatch.setattr(small_batch, "gqa_folded_attention", folded)
    autotune._forget()
    list(stream_generate(model, tokenizer, prompt, 20, drafter, block_size=8))
    assert drafter.fc.weight.shape in traced and model.layers[0].mlp.down_proj.weight.shape in traced
    # So are the products of layers that are given the same array.
    for attention, names in ((model.layers[0].self_attn, "qkv"), (drafter.layers[0].self_attn, "kv")):
        weights = [attention[f"{name}_proj"].weight for name in names]
        assert (sum(w.shape[0] for w in weights), weights[0].shape[1]) in traced
    # A drafter's block sees all of itself: one row of the mask is for all.
    assert not drafter.layers[0].self_attn.causal
    shared = model.args.num_attention_heads // model.args.num_key_value_heads
    assert {shape[0] for shape in masks} == {1, 4 * shared, 8 * shared}


@pytest.mark.parametrize("causal", [False, True])
def test_a_compiled_draft_attends_as_an_ordinary_one(causal, cuda, monkeypatch):
    model = tiny_target()
    drafter = tiny_drafter(model, layer_types=None, sliding_window=None, is_causal=causal)
    expected = rounds_of(list(run(model, drafter, [5, 9, 33, 7], 40)))
    monkeypatch.setenv("DFLASH_MLX_COMPILE", "on")
    assert rounds_of(list(run(model, drafter, [5, 9, 33, 7], 40))) == expected and drafter.pair.accelerator.passes[1].passes > 5


@pytest.mark.parametrize("given", [None, "0", "1"])
@pytest.mark.parametrize("compile_setting", ["auto", "off"])
@pytest.mark.parametrize("sliding", [False, True])
def test_cudnn_is_asked_where_all_passes_are_compiled_unless_the_user_says_otherwise(
    given, compile_setting, sliding, cuda, monkeypatch
):
    monkeypatch.setenv("DFLASH_MLX_COMPILE", compile_setting)
    monkeypatch.delenv(small_batch.CUDNN) if given is None else monkeypatch.setenv(small_batch.CUDNN, given)
    model, layers = tiny_target(), {} if sliding else {"layer_types": None, "sliding_window": None}
    prepare(model, tiny_drafter(model, **layers).config.windows)
    expected = given or ("1" if compile_setting == "auto" and not sliding else "0")
    assert os.environ[small_batch.CUDNN] == expected


def test_a_loaded_pair_says_so_before_its_first_attention(cuda, monkeypatch):
    monkeypatch.delenv(small_batch.CUDNN)
    seen, attend = [], mx.fast.scaled_dot_product_attention

    def noting(*args, **kwargs):
        seen.append(os.environ[small_batch.CUDNN])
        return attend(*args, **kwargs)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noting)
    model, _ = dflash_mlx.load("tiny")
    dflash_mlx.load_drafter("tiny", model)
    assert seen and set(seen) == {"1"}


def test_with_cudnn_blocks_over_a_buffer_are_its_own_and_others_never(cuda, monkeypatch):
    monkeypatch.setenv(small_batch.CUDNN, "1")

    def plan(m, dtype=mx.bfloat16, d=64, buffer=False):
        keys = normal(1, 2, 40, d, dtype=dtype)
        mask = mx.zeros((m, 40), dtype=dtype) if buffer else "causal"
        return small_batch.gqa_folded_attention_plan(normal(1, 4, m, d, dtype=dtype), keys, keys, 1.0, mask, buffer)

    assert plan(4, buffer=True) is None and plan(16, buffer=True) is None
    # Any other number of keys would be planned for anew. MLX asks its kernel for up to 3 rows only where cuDNN does not run.
    assert plan(2) and plan(16) and not autotune._known
    # cuDNN does not run these: a trial says.
    for other in ({"dtype": mx.float32}, {"d": 136}, {"d": 60}):
        assert plan(4, **other) and plan(4, buffer=True, **other) and plan(2, **other) is None
    assert len(autotune._known) == 3
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "off")
    autotune.may_run()
    assert plan(16) is None
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "")
    monkeypatch.setenv(small_batch.CUDNN, "0")
    autotune._forget()
    assert plan(4, buffer=True) and plan(2) is None


def test_mlxs_own_attention_over_a_buffer_is_given_the_mask_as_floats(cuda, pair, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_COMPILE", "on")
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "matmul_as_gemv")
    model, tokenizer, drafter = pair
    prompt = tokenizer.encode("def area(width, height):")
    drafter.pair = None
    seen, attend = [], mx.fast.scaled_dot_product_attention

    def noting(queries, keys, values, scale, mask=None, **kwargs):
        seen.append((keys.shape[2], getattr(mask, "dtype", mask)))
        return attend(queries, keys, values, scale=scale, mask=mask, **kwargs)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noting)
    out = list(stream_generate(model, tokenizer, prompt, 20, drafter, block_size=8))
    assert [r.token for r in out] == greedy_ids(model, prompt, 20)
    buffered = {mask for length, mask in seen if length == 1024}
    assert buffered == {mx.float32}


@pytest.mark.parametrize("causal", [False, True])
def test_with_cudnn_an_ordinary_draft_asks_for_no_plan(causal, cuda, monkeypatch):
    monkeypatch.setenv(small_batch.CUDNN, "1")
    # float32 is not cuDNN's.
    monkeypatch.setattr(small_batch, "_cudnn_takes", lambda *_: True)
    model = tiny_target()
    drafter = tiny_drafter(model, layer_types=None, sliding_window=None, is_causal=causal)
    features = normal(1, 9, drafter.fc.weight.shape[1])
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "off")
    autotune.may_run()
    expected = drafter.slots(mx.array([9]), features, drafter.make_cache(), 0, 5)
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "")
    autotune.may_run()
    cuda.clear()
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", lambda *_, **__: pytest.fail("a plan"))
    found = drafter.slots(mx.array([9]), features, drafter.make_cache(), 0, 5)
    assert mx.allclose(found, expected, rtol=1e-5, atol=1e-5) and cuda == ["gqa_folded_attention"] * len(drafter.layers)
