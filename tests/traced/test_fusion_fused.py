"""What stands around a product, in one launch with it: which launches a pass makes, and that its values are as ever.

No GPU here: the kernel's place is taken by MLX's own operations, in float32.
"""

import io
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import pytest
from kit import greedy_ids
from mlx_lm.models.activations import swiglu

from dflash_mlx import load, load_drafter, stream_generate
from dflash_mlx.kernels import autotune, block_linear, trials
from dflash_mlx.kernels.block_linear import block_linear_ops
from dflash_mlx.kernels.verdicts import Measured
from dflash_mlx.models.intercept import intercept
from dflash_mlx.traced import compiled, compiled_draft
from dflash_mlx.traced.fusion import fused_linears


def forced_trial(candidates, make, limit_s):
    """Every candidate right and twice as fast as stock MLX."""
    return Measured({c.name: c.family for c in candidates}, 2.0, {c.name: 1.0 for c in candidates})


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """As if block_linear ran, in float32: a list of each launch's form, "norm", "gated norm" or "sum" say."""
    made = []

    def prepare(shape, dtype, n, group_size, bits, eps, residual, gated, heads):
        assert not heads
        form = " ".join(w for w, there in (("gated", gated), ("norm", eps is not None), ("sum", residual)) if there)

        def run(x, weights, scale=None, rest=None):
            made.append(form)
            return block_linear_ops(x, weights, None if scale is None else (scale, eps), rest, gated)

        return run

    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    monkeypatch.setenv(autotune.VARIABLE, "block_linear")
    for name in ("_known", "_off", "_plans", "_waiting"):
        monkeypatch.setattr(autotune, name, {})
    monkeypatch.setattr(autotune, "has_gpu", lambda: True)
    monkeypatch.setattr(trials, "run_trial", forced_trial)
    monkeypatch.setattr(block_linear, "TILE_TYPES", (mx.float32,))
    monkeypatch.setattr(block_linear, "prepare", prepare)
    return made


class Layer(nn.Module):
    """A decoder layer without attention: `body` says what is made of its parts, with mlx-lm's `swiglu`."""

    def __init__(self, body, bits=None, bias=False, norm=nn.RMSNorm):
        super().__init__()
        self.norm, self.other = norm(64), nn.RMSNorm(64)
        self.a, self.b = nn.Linear(64, 64, bias=bias), nn.Linear(64, 64, bias=bias)
        self.gate, self.up, self.down = (
            nn.Linear(64, 96, bias=False),
            nn.Linear(64, 96, bias=False),
            nn.Linear(96, 64, bias=False),
        )
        self.norm.weight = mx.random.uniform(0.5, 2, (64,))
        self._body = body
        if bits:
            nn.quantize(self, 32, bits)

    def __call__(self, x):
        # The function that this call names.
        return self._body(self, swiglu, x)


def launches_of(launched, model, x=None):
    """The launches of a pass whose values are those of the model by itself, in no order."""
    x = mx.random.normal((1, 5, 64)) if x is None else x
    expected = model(x)

    def run(calls):
        with intercept(calls):
            model(x)

    calls = fused_linears(model, run, fused=True)
    launched.clear()
    with intercept(calls):
        found = model(x)
    for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (found, expected)), strict=True):
        assert a.shape == b.shape and mx.allclose(a, b, rtol=0, atol=2e-5 * float(mx.abs(b).max()))
    return Counter(launched)


@pytest.mark.parametrize("bits", [None, 4])
def test_norms_sums_and_gates_go_with_their_products(bits, launched):
    def body(m, swiglu, x):
        h = x + m.a(m.norm(x))
        y = m.other(h)
        return m.down(swiglu(m.gate(y), m.up(y))) + h

    # Each product's own launch is made first, and nobody evaluates those that are made again with what follows.
    assert launches_of(launched, Layer(body, bits)) == {"norm": 2, "norm sum": 1, "gated norm": 1, "": 1, "sum": 1}


def test_of_products_that_are_made_again_nothing_is_run(launched):
    def body(m, swiglu, x):
        y = m.norm(x)
        return x + m.down(swiglu(m.gate(y), m.up(y)))

    model, x = Layer(body), mx.random.normal((1, 5, 64))

    def run(calls):
        with intercept(calls):
            return model(x)

    graph = io.StringIO()
    mx.export_to_dot(graph, run(fused_linears(model, run, fused=True)))
    assert len(launched) == 4 and graph.getvalue().count('label ="Matmul"') == 2


# What is launched, and what stands around a product without being what a launch takes.
APART = {
    "the norm's value is changed": (["", ""], lambda m, swiglu, x: changed(m.norm(x), m)),
    "the norm is of another array": (["norm", "norm"], lambda m, swiglu, x: (m.a(m.norm(x)), m.b(m.other(x)))),
    "a norm for two": (["norm"], lambda m, swiglu, x: (lambda y: (m.a(y), m.b(y)))(m.norm(x))),
    "a norm that is read too": (["norm"], lambda m, swiglu, x: (lambda y: m.a(y) * y)(m.norm(x))),
    "scaled before the sum": ([""], lambda m, swiglu, x: x + 0.5 * m.a(x)),
    "subtracted": ([""], lambda m, swiglu, x: x - m.a(x)),
    "a number is added": ([""], lambda m, swiglu, x: m.a(x) + 1.0),
    "one row is added": ([""], lambda m, swiglu, x: m.a(x) + x[:, :1]),
    "another type is added": ([""], lambda m, swiglu, x: m.a(x) + x.astype(mx.float16)),
    "columns are added": ([""], lambda m, swiglu, x: m.a(x)[..., :32] + m.b(x)[..., :32]),
    "changed before the sum": ([""], lambda m, swiglu, x: x + halved(m.a(x))),
    "added twice": (["", "sum", "sum"], lambda m, swiglu, x: (lambda y: (x + y, y + 2 * x))(m.a(x))),
    "two products": (["", "", "sum"], lambda m, swiglu, x: m.a(x * 2) + m.b(x * 3)),
    "three": (["", "", "sum", "sum"], lambda m, swiglu, x: x + m.a(x * 2) + m.b(x * 3)),
    "the gate is the second": ([""], lambda m, swiglu, x: swiglu(*reversed((m.gate(x), m.up(x))))),
    "half a gate": ([""], lambda m, swiglu, x: swiglu(m.gate(x)[..., :48], m.up(x)[..., :48])),
    "the gate is scaled": ([""], lambda m, swiglu, x: (lambda g, u: swiglu(g * 2, u))(m.gate(x), m.up(x))),
    "the gate is changed": ([""], lambda m, swiglu, x: (lambda g, u: swiglu(halved(g), u))(m.gate(x), m.up(x))),
    "the gate of another array": (["", ""], lambda m, swiglu, x: swiglu(m.gate(x * 2), m.up(x))),
    "a part is added": ([""], lambda m, swiglu, x: (lambda g, u: swiglu(g, g) + u)(m.gate(x), m.up(x))),
}


def halved(a):
    a *= 0.5
    return a


def changed(y, m):
    y += 1
    return m.a(y), m.b(y * 2)


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("bits", [None, 4])
def test_what_is_another_matter_is_left_to_mlx(name, bits, launched):
    forms, body = APART[name]
    assert sorted(launches_of(launched, Layer(body, bits)).elements()) == sorted(forms)


def gated_of_two(m, swiglu, x):
    return swiglu(m.gate(x * 2 if m.otherwise else x), m.up(x))


def normed_and_changed(m, swiglu, x):
    y = m.norm(x)
    if m.otherwise:
        y += 1
    return m.a(y)


@pytest.mark.parametrize("rows, forms", [(5, {""}), (17, set())])
@pytest.mark.parametrize("body", [gated_of_two, normed_and_changed])
def test_a_pass_that_goes_another_way_than_the_one_that_was_watched(body, rows, forms, launched):
    model, x = Layer(body), mx.random.normal((1, rows, 64))
    object.__setattr__(model, "otherwise", False)

    def run(calls):
        with intercept(calls):
            return model(x)

    calls = fused_linears(model, run, fused=True)
    object.__setattr__(model, "otherwise", True)
    found = run(calls)
    assert mx.allclose(found, model(x), rtol=0, atol=1e-5) and set(launched) == forms


class Scaled(nn.RMSNorm):
    """Not what it inherits from."""

    def __call__(self, x):
        return 2 * super().__call__(x)


def test_norms_of_other_classes_and_layers_with_a_bias_are_left_to_mlx(launched):
    body = lambda m, swiglu, x: x + m.a(m.norm(x))  # noqa: E731
    assert launches_of(launched, Layer(body, norm=Scaled)) == {"": 1, "sum": 1}
    assert launches_of(launched, Layer(body, bias=True)) == {}
    # Weights of another type than x: MLX's norm would give that type.
    model = Layer(body)
    model.norm.weight = model.norm.weight.astype(mx.float16)
    assert launches_of(launched, model) == {}


def test_where_the_kernel_is_refused_or_off_all_is_mlxs(launched, monkeypatch):
    model = Layer(lambda m, swiglu, x: x + m.a(m.norm(x)))
    assert launches_of(launched, model, mx.random.normal((1, 17, 64))) == {}
    autotune.switch_off("block_linear", "wrong")
    monkeypatch.setenv(autotune.VARIABLE, "auto")
    assert launches_of(launched, model) == {}


# 128 columns: on CUDA.
@pytest.mark.parametrize("bits, columns", [(None, 1), (4, 1), (4, 128)])
def test_ids_of_compiled_passes_are_plain_decodings_and_the_drafter_launches_too_but_on_cuda(
    bits, columns, launched, monkeypatch
):
    metal = columns == 1
    for name in ("fused", "own"):
        monkeypatch.setattr(compiled_draft.CompiledDraft, name, metal)
    monkeypatch.setattr(
        compiled, "fused_linears", lambda m, run, kernels, _, *more: fused_linears(m, run, kernels, columns, *more)
    )
    model, tokenizer = load("tiny", dtype=mx.float32)
    if bits:
        nn.quantize(model, 32, bits)
    drafter, prompt = load_drafter("tiny", model), tokenizer.encode("def fibonacci(n):")
    monkeypatch.setenv("DFLASH_MLX_COMPILE", "on")
    out = list(stream_generate(model, tokenizer, prompt, 50, drafter, block_size=8))
    layers = len(model.layers)
    blocks, drafts = drafter.pair.accelerator.passes
    assert blocks.passes > 10 and drafts.passes > 10 and not blocks.refused
    # One trace of the target; queries, keys and values are one product, the gate another, which is made once for nothing.
    expected = Counter({"norm": 2 * layers, "gated norm": layers, "": 2 * layers, "sum": 2 * layers})
    if metal:
        # One trace of the drafter: its keys and values are of other rows than its queries, and there is fc.
        n = len(drafter.layers)
        expected += Counter({"norm": 2 * n, "gated norm": n, "": 3 * n + 1, "sum": 2 * n})
    assert Counter(launched) == expected
    monkeypatch.setenv(autotune.VARIABLE, "off")
    monkeypatch.setenv("DFLASH_MLX_COMPILE", "off")
    assert [r.token for r in out] == greedy_ids(model, prompt, 50)


def test_a_kernel_that_is_switched_off_between_answers_is_traced_out(launched, monkeypatch):
    model, tokenizer = load("tiny", dtype=mx.float32)
    drafter, prompt = load_drafter("tiny", model), tokenizer.encode("def fibonacci(n):")
    monkeypatch.setenv("DFLASH_MLX_COMPILE", "on")
    answer = lambda: [r.token for r in stream_generate(model, tokenizer, prompt, 30, drafter, block_size=8)]  # noqa: E731
    first = answer()
    assert launched
    for value in ("off", "block_linear"):
        launched.clear()
        monkeypatch.setenv(autotune.VARIABLE, value)
        assert answer() == first and bool(launched) == (value != "off")
