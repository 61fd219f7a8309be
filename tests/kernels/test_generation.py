"""Generation with kernels in it, on the CPU: a made-up GPU whose kernels are MLX's own operations, so ids must not change."""

import logging

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from rows import same_ids

from dflash_mlx import stream_generate
from dflash_mlx.first_use import try_before_answers
from dflash_mlx.kernels import accept, autotune, block_attention, block_qmm, head_argmax, trials
from dflash_mlx.kernels.autotune import KernelError
from dflash_mlx.kernels.block_attention import block_attention_ops
from dflash_mlx.kernels.block_qmm import block_qmm_ops
from dflash_mlx.models import target as taps
from dflash_mlx.models.target import Target

PROMPT = "def fibonacci(n):"


def prepare_qmm(shape, dtype, n, group_size, bits, columns=None):
    return lambda x, *weights: block_qmm_ops(x, *weights, group_size, bits)


def prepare_head(shape, dtype, v, quantized, softcap=None, biased=False, columns=None):
    return lambda x, w, scales, biases, bias=None: head_argmax.head_argmax_ops(x, w, scales, biases, *quantized, softcap, bias)


def prepare_attention(shape, dtype, hk, scale, causal, window, has_sinks, simdgroups=None):
    return lambda q, k, v, sinks=None, start=0, held=None: block_attention_ops(q, k, v, scale, causal, window, sinks, start)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """As if there were a GPU where our kernels are right and faster; a list of the rows of each product."""
    launched = []

    def prepare(*about, **plan):
        launch = prepare_qmm(*about)
        return lambda x, *weights: launched.append(x.size // x.shape[-1]) or launch(x, *weights)

    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    monkeypatch.delenv("DFLASH_MLX_KERNELS", raising=False)
    for name in ("_known", "_off", "_plans", "_waiting"):
        monkeypatch.setattr(autotune, name, {})
    monkeypatch.setattr(autotune, "has_gpu", lambda: True)
    monkeypatch.setattr(autotune, "tries_first", lambda: True)
    times = iter(range(1, 10**6))
    monkeypatch.setattr(
        trials, "medians_s", lambda *calls, **_: [next(times) for _ in calls]
    )  # stock is timed after ours: it takes longer
    monkeypatch.setattr(block_qmm, "prepare", prepare)
    monkeypatch.setattr(accept, "prepare", lambda b, n: accept.accept_ops)
    monkeypatch.setattr(head_argmax, "prepare", prepare_head)
    monkeypatch.setattr(block_attention, "TRIAL_KEYS", 64)
    monkeypatch.setattr(block_attention, "prepare", prepare_attention)
    return launched


def ids(quantized, n, block_size=8, **options):
    model, tokenizer, drafter = quantized
    # As a new process.
    drafter.pair = None
    # A fixed width: choosing one would measure passes first, which nobody reads.
    steps = stream_generate(model, tokenizer, PROMPT, max_tokens=n, draft_model=drafter, block_size=block_size, **options)
    return [r.token for r in steps]


def plain(quantized, n):
    model, tokenizer, _ = quantized
    steps = generate_step(mx.array(tokenizer.encode(PROMPT)), model, max_tokens=n)
    out = []
    for token, _ in steps:
        out.append(token)
        if token in tokenizer.eos_token_ids:
            break
    return out


def tried(model):
    """The target, its kernels tried as before a first answer."""
    target = Target(model)
    try_before_answers(target)
    return target


def said(caplog):
    """What the log says besides that trials are run."""
    return [line for line in caplog.messages if not line.startswith("first run of this model")]


@pytest.mark.parametrize("n", [60, pytest.param(500, marks=pytest.mark.full)])
def test_ids_are_plain_decodings_and_every_pass_of_few_rows_goes_through(quantized, gpu, n):
    assert same_ids(quantized[0], quantized[1].encode(PROMPT), ids(quantized, n), plain(quantized, n))
    linears = sum(isinstance(m, nn.QuantizedLinear) for _, m in quantized[0].named_modules())
    assert len(gpu) > linears * n / 8 and max(gpu) > 1 and 1 in gpu
    texts = {"accept", "block_attention", "block_qmm", "head_argmax"}
    assert {v.kernel for v in autotune.results() if v.use} == texts | {"gqa_folded_attention"}


def test_off_and_a_cpu_launch_nothing(quantized, gpu, monkeypatch):
    want = ids(quantized, 20)
    assert gpu
    gpu.clear()
    # From the next pass on.
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "off")
    assert ids(quantized, 20) == want and not gpu
    monkeypatch.delenv("DFLASH_MLX_KERNELS")
    assert ids(quantized, 20) == want and gpu
    gpu.clear()
    monkeypatch.setattr(autotune, "has_gpu", lambda: False)
    assert ids(quantized, 20) == want and not gpu
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "block_qmm")
    with pytest.raises(KernelError, match="DFLASH_MLX_KERNELS is block_qmm and MLX finds no GPU here"):
        ids(quantized, 20)


@pytest.mark.parametrize("faster", [True, False])
def test_a_layer_that_was_left_to_mlx_is_not_routed_again_until_that_may_change(quantized, gpu, monkeypatch, faster):
    model = quantized[0]
    if not faster:
        monkeypatch.setattr(trials, "medians_s", lambda *calls, **_: [1.1] * (len(calls) - 1) + [1.0])
    target = tried(model)
    found = len(target.routes.calls(5))

    def run():
        gpu.clear()
        hidden = target(mx.array([[1, 2, 3, 4, 5]]), make_prompt_cache(model), kernels=True).hidden
        return len(target.routes.calls(5)), len(gpu) > 0, len(target.finite_flag(hidden)) > 0

    run()  # trials launch too
    assert run() == (found if faster else 0, faster, faster)
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "on")
    assert len(target.routes.calls(5)) == found and run() == (found, True, True)
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "auto")
    run()
    autotune.switch_off("block_qmm", "a test")
    assert len(target.routes.calls(5)) == found and run() == (len(model.layers) if faster else 0, False, faster)


@pytest.mark.parametrize("name", ["block_qmm", "block_attention", "accept"])
def test_a_pass_is_flagged_where_some_kernel_serves_its_layers(quantized, gpu, monkeypatch, name):
    monkeypatch.setenv("DFLASH_MLX_KERNELS", name)
    target = Target(quantized[0])
    hidden = target(mx.array([[1, 2, 3]]), make_prompt_cache(quantized[0]), kernels=True).hidden
    assert len(target.finite_flag(hidden)) == (name != "accept")


def test_a_kernel_that_fails_is_off_with_one_line_and_the_answer_is_right(quantized, gpu, monkeypatch, caplog):
    def broken(*arrays):
        raise RuntimeError("Failed to compile kernel: a line\nand more")

    monkeypatch.setattr(block_qmm, "prepare", lambda *about, **plan: broken)
    with caplog.at_level(logging.WARNING):
        assert ids(quantized, 30) == plain(quantized, 30)
    (line,) = said(caplog)
    assert "kernel block_qmm is off: RuntimeError: Failed to compile kernel: a line (" in line


def spoil(monkeypatch, module, n, spoilt, which=lambda *about: True, last=None):
    """Launches n to `last` after the trials spoil their outputs, of those that were prepared for `which`; what is left of n."""
    prepare, left, in_trial, run_trial = module.prepare, [n], [0], trials.run_trial

    def spoiling(*about, **plan):
        sound = prepare(*about, **plan)

        def run(*arrays):
            out = sound(*arrays)
            left[0] -= which(*about) and not in_trial[0]
            if which(*about) and n - (n if last is None else last) <= left[0] <= 0 and not in_trial[0]:
                return (out[0], spoilt(out[1])) if isinstance(out, tuple) else spoilt(out)
            return out

        return run

    def judged(*args):
        in_trial[0] += 1
        try:
            return run_trial(*args)
        finally:
            in_trial[0] -= 1

    monkeypatch.setattr(trials, "run_trial", judged)
    monkeypatch.setattr(module, "prepare", spoiling)
    return left


@pytest.mark.parametrize("block_size", [8, 1])
@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("name, n", [("block_qmm", 5), ("block_qmm", 700), ("head_argmax", 5), ("block_attention", 40)])
@pytest.mark.quick(3)
def test_a_value_that_is_not_finite_switches_kernels_off_with_one_line_and_the_answer_is_right(
    quantized, gpu, monkeypatch, caplog, name, n, value, block_size
):
    module = {"block_qmm": block_qmm, "head_argmax": head_argmax, "block_attention": block_attention}[name]
    left = spoil(monkeypatch, module, n, lambda out: out * mx.array(float(value)))
    with caplog.at_level(logging.WARNING):
        assert ids(quantized, 40, block_size) == plain(quantized, 40)
    assert said(caplog) == ["all kernels are off: a pass gave a value that is not finite"]
    assert left[0] <= 0


@pytest.mark.parametrize("block_size", [8, 1])
@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("options", [{}, {"logits_processors": [lambda tokens, logits: logits]}])
@pytest.mark.quick(3)
def test_one_logit_that_is_not_finite_is_seen_where_the_head_is_a_product(
    quantized, gpu, monkeypatch, caplog, options, value, block_size
):
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "block_qmm")
    v = Target(quantized[0]).vocabulary
    heads = lambda shape, dtype, n, *_: n == v  # noqa: E731
    left = spoil(monkeypatch, block_qmm, 6, lambda out: mx.where(mx.arange(v) == 7, mx.array(float(value)), out), heads, 1000)
    with caplog.at_level(logging.WARNING):
        assert ids(quantized, 40, block_size, **options) == plain(quantized, 40)
    assert said(caplog) == ["all kernels are off: a pass gave a value that is not finite"]
    assert left[0] <= 0


def test_a_pass_with_kernels_is_flagged_also_where_they_were_switched_off_behind_it(quantized, gpu):
    target = tried(quantized[0])
    hidden = target(mx.array([[1, 2, 3]]), make_prompt_cache(quantized[0]), kernels=True).hidden
    autotune.disable_all("another thread")
    assert target.finite_flag(hidden)
    hidden = target(mx.array([[1, 2, 3]]), make_prompt_cache(quantized[0]), kernels=True).hidden
    assert not target.finite_flag(hidden)


def test_the_head_alone_goes_through_its_kernel_and_calls_no_other_layer(quantized, gpu, monkeypatch):
    model = quantized[0]
    target, rows = tried(model), mx.random.normal((1, 17, model.args.hidden_size))
    target.head(rows[:, :5])
    gpu.clear()
    with monkeypatch.context() as patch:
        patch.setattr(taps, "intercept", lambda handlers: pytest.fail("some other layer was routed"))
        few, many = target.head(rows[:, :5]), target.head(rows)
    assert gpu == [5] and mx.allclose(few, many[:, :5], rtol=1e-4, atol=1e-4)


def test_choices_are_the_heads_and_none_where_a_model_does_more_to_its_logits(quantized, gpu):
    model = quantized[0]
    hidden = mx.random.normal((1, 5, model.args.hidden_size))
    target = tried(model)
    ids, margin = target.greedy_ids(hidden)
    logits = target.head(hidden)
    assert mx.array_equal(ids, mx.argmax(logits, axis=-1)) and margin.shape == (1, 5)

    class Capped(type(model)):
        def __call__(self, *args, **kwargs):
            return mx.tanh(super().__call__(*args, **kwargs))

    before, model.__class__ = type(model), Capped
    try:
        assert Target(model).greedy_ids(hidden) is None
    finally:
        model.__class__ = before
    assert target.greedy_ids(mx.zeros((1, 17, model.args.hidden_size))) is None
