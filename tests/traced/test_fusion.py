"""Layers that a pass gives the same array, served by one product: which these are, and that each gets what is its own; and
rotations of such a product's columns."""

import gc
import io

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import family
from kit import tiny_qwen3, tiny_target
from mlx_lm.models import rope_utils
from mlx_lm.models.activations import swiglu
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx.kernels import autotune, small_batch
from dflash_mlx.kernels.block_linear import block_linear_ops
from dflash_mlx.models.intercept import intercept
from dflash_mlx.models.target import Target
from dflash_mlx.rollback import rollback_point
from dflash_mlx.traced import compiled, compiled_verify, fusion
from dflash_mlx.traced.fusion import fused_linears


class Layers(nn.Module):
    """Two layers on the input, two on what comes of it, one on both."""

    def __init__(self, bits=None, biases=(False, False)):
        super().__init__()
        self.a, self.b = nn.Linear(64, 32, bias=biases[0]), nn.Linear(64, 64, bias=biases[1])
        self.c, self.d, self.e = (nn.Linear(64, n, bias=True) for n in (32, 64, 64))
        if bits:
            nn.quantize(self, 32, bits)

    def __call__(self, x):
        a, b = self.a(x), self.b(x)
        h = mx.tanh(b)
        return mx.concatenate([a, b, self.c(h), self.d(x=h), self.e(h), self.e(x)], axis=-1)


def found_in(model, x, **options):
    def run(calls):
        with intercept(calls):
            model(x)

    return fused_linears(model, run, **options)


def names(model, calls):
    """Those of layers that have products of their own left out."""
    by_id = {id(module): name for name, module in model.named_modules()}
    return [by_id[id(module)] for module, handler in calls if "_alone" not in handler.__qualname__]


def products(monkeypatch):
    """A list that every product of MLX's is written into: columns of its result."""
    made, linear, quantized, fixed = [], nn.Linear.__call__, nn.QuantizedLinear.__call__, small_batch.fixed_product

    def noting(call):
        return lambda self, x: (made.append(self["weight"].shape[0]), call(self, x))[1]

    def fixing(w):
        product = fixed(w)
        return lambda x: (made.append(w.shape[0]), product(x))[1]

    monkeypatch.setattr(small_batch, "fixed_product", fixing)
    monkeypatch.setattr(nn.Linear, "__call__", noting(linear))
    monkeypatch.setattr(nn.QuantizedLinear, "__call__", noting(quantized))
    return made


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("biases", [(False, False), (True, True), (True, False)])
def test_layers_of_one_array_are_one_product_with_the_values_of_each(bits, biases, monkeypatch):
    model, x = Layers(bits, biases), mx.random.normal((1, 5, 64))
    expected = model(x)
    made = products(monkeypatch)
    calls = found_in(model, x)
    # `e` is called twice; layers with a bias and without are two products.
    assert names(model, calls) == (["a", "b"] if biases[0] == biases[1] else []) + ["c", "d"]
    for _ in range(2):
        made.clear()
        with intercept(calls):
            found = model(x)
        assert mx.array_equal(found, expected)
        assert made == ([96] if biases[0] == biases[1] else [32, 64]) + [96, 64, 64]
    # Other values, and other numbers of rows, with the same calls.
    for rows in (1, 16):
        x = mx.random.normal((1, rows, 64))
        expected = model(x)
        with intercept(calls):
            assert mx.allclose(model(x), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("biases", [(False, False), (True, True)])
def test_quantized_products_are_filled_up_to_a_number_of_columns(bits, biases, monkeypatch):
    model, x = Layers(bits, biases), mx.random.normal((1, 5, 64))
    expected = model(x)
    assert names(model, found_in(model, x, columns=32)) == ["a", "b", "c", "d"]
    made = products(monkeypatch)
    calls = found_in(model, x, columns=64)
    made.clear()
    with intercept(calls):
        assert mx.allclose(model(x), expected, rtol=0, atol=1e-5)
    # 96 columns are filled up; `e` has 64, and is called twice.
    assert made == ([128, 128, 64, 64] if bits else [96, 96, 64, 64])
    # Layers that share nothing: each by itself, where its columns are not enough.
    alone = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    if bits:
        nn.quantize(alone, 32, bits)
    calls = found_in(alone, x, columns=64)
    assert names(alone, calls) == (["layers.0"] if bits else [])
    expected = alone(x)
    made.clear()
    with intercept(calls):
        assert mx.allclose(alone(x), expected, rtol=0, atol=1e-5)
    assert made == ([128, 64] if bits else [96, 64])


def test_a_layer_that_is_given_another_array_than_the_last_makes_its_own_product():
    model, x, y = Layers(), mx.random.normal((1, 3, 64)), mx.random.normal((1, 3, 64))
    calls = found_in(model, x)
    with intercept(calls):
        a, b, again = model.a(x), model.b(y), model.a(y)
    assert all(mx.array_equal(got, layer(given)) for got, layer, given in ((a, model.a, x), (b, model.b, y), (again, model.a, y)))


def test_large_layers_and_layers_of_different_kinds_are_left_apart(monkeypatch):
    model, x = Layers(), mx.random.normal((1, 3, 64))
    monkeypatch.setattr(fusion, "MOST_BYTES", 96 * 64 * 4)
    assert names(model, found_in(model, x)) == ["a", "b"]
    monkeypatch.setattr(fusion, "MOST_BYTES", 96 * 64 * 4 - 1)
    assert names(model, found_in(model, x)) == []
    monkeypatch.undo()
    model.b = model.b.to_quantized(64, 4)
    assert names(model, found_in(model, x)) == ["c", "d"]
    model = Layers(bits=4)
    model.d = nn.Linear(64, 64).to_quantized(64, 4)
    assert names(model, found_in(model, x)) == ["a", "b"]


class Ordered(nn.Module):
    """Layers on one input, and what `body` makes of them."""

    def __init__(self, body, bits=None):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, n, bias=True) for n in (32, 64, 32))
        self.body = body
        if bits:
            nn.quantize(self, 32, bits)

    def __call__(self, x):
        return self.body(self, x)


@pytest.mark.parametrize("bits", [None, 4])
def test_layers_that_are_called_in_another_order_than_seen_are_one_product_all_the_same(bits, monkeypatch):
    model, x = Ordered(lambda m, x: [m.a(x), m.b(x), m.c(x)], bits), mx.random.normal((1, 5, 64))
    calls = found_in(model, x)
    model.body = lambda m, x: [mx.tanh(m.c(x)), mx.tanh(m.a(x)), mx.tanh(m.b(x))]
    expected, made = model(x), products(monkeypatch)

    def called(x):
        with intercept(calls):
            return model(x)

    # Compiled too: of two equal splits of one sum MLX 0.32.4 loses one.
    for run in (called, mx.compile(called)):
        made.clear()
        assert all(mx.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(run(x), expected, strict=True))
        assert made == [128]


@pytest.mark.parametrize("rows", [(1, 5), (5,)])
def test_a_layer_that_is_called_again_does_not_see_what_became_of_its_first_values(rows):
    model, x = Ordered(lambda m, x: [m.a(x), m.b(x), m.c(x)]), mx.random.normal((*rows, 64))
    calls = found_in(model, x)

    def twice(m, x):
        first = m.a(x)
        first += 1
        return [first, m.a(x), m.b(x), m.c(x)]

    model.body = twice
    expected = model(x)
    with intercept(calls):
        assert all(mx.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(model(x), expected, strict=True))


def test_a_transformers_projections_are_found_by_what_they_are_given():
    model = tiny_target(layers=2)
    calls = found_in(model, mx.array([[1, 2, 3]]))
    found = [name.removeprefix("model.layers.") for name in names(model, calls) if not name.endswith("rope")]
    attention, mlp = [f"self_attn.{n}_proj" for n in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
    assert found == [f"{i}.{name}" for i in range(2) for name in attention + mlp]


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "deepseek_v3", "phi3", "gpt_oss"])
def test_a_pass_of_any_family_is_the_same_with_fused_linears(name):
    model, ids = family(name), mx.array([[5, 9, 33, 7, 12]])
    expected = model(ids)
    calls = found_in(model, ids)
    with intercept(calls):
        found = model(ids)
    assert (mx.abs(found - expected).max() <= 1e-5 * mx.abs(expected).max()).item() and (calls or name == "phi3")


class Heads(nn.Module):
    """Queries of 4 heads of 8, keys of 2 and values of 4, and what `body` makes of them."""

    def __init__(self, body, rope=None):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, n, bias=False) for n in (32, 16, 32))
        # A module without arrays is as false as an empty dict.
        self.rope = nn.RoPE(8) if rope is None else rope
        self.other, self._body = nn.RoPE(8, base=100.0), body

    def __call__(self, x):
        return self._body(self, self.q(x), self.k(x), self.v(x))


def heads(a, D=8):
    return a.reshape(*a.shape[:2], -1, D).transpose(0, 2, 1, 3)


def rotations(monkeypatch):
    """A list that every rotation is written into: its number of heads."""
    made, rope = [], mx.fast.rope
    monkeypatch.setattr(mx.fast, "rope", lambda x, *args, **kwargs: (made.append(x.shape[1]), rope(x, *args, **kwargs))[1])
    return made


def rotated_by(made, model, x=None):
    """The rotations' numbers of heads of one pass, whose values are those of one in which products alone are joint."""
    x = mx.random.normal((2, 5, 24)) if x is None else x
    calls = found_in(model, x)
    with intercept([call for call in calls if isinstance(call[0], nn.Linear)]):
        expected = model(x)
    made.clear()
    with intercept(calls):
        found = model(x)
    assert calls and all(mx.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    return made


def changed(a, when):
    """Heads that are another array's from some moment on, though the object is the same."""
    if when == "columns":
        a += 1
    a = a.reshape(*a.shape[:2], -1, 8)
    if when == "split":
        a[..., 0] = 3
    a = a.transpose(0, 2, 1, 3)
    if when == "turned":
        a *= 2
    return a


TOGETHER = {
    "queries, keys": lambda m, q, k, v: (m.rope(heads(q), offset=300), m.rope(heads(k), offset=300)),
    "keys, queries": lambda m, q, k, v: (m.rope(heads(k), offset=7), m.rope(heads(q), offset=7)),
    "not side by side": lambda m, q, k, v: (m.rope(heads(v), 7), m.rope(heads(q), 7)),
    "no offset": lambda m, q, k, v: (m.rope(heads(q)), m.rope(heads(k))),
    "all three": lambda m, q, k, v: (m.rope(heads(q)), m.rope(heads(k)), m.rope(heads(v)), v),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_heads_of_one_product_are_rotated_once(name, monkeypatch):
    assert rotated_by(rotations(monkeypatch), Heads(TOGETHER[name])) == [10]


def test_an_offset_that_is_an_array_is_known_by_its_identity(monkeypatch):
    made, one, same = rotations(monkeypatch), mx.array([3, 9]), mx.array([3, 9])
    assert rotated_by(made, Heads(lambda m, q, k, v: (m.rope(heads(q), offset=one), m.rope(heads(k), offset=one)))) == [10]
    assert rotated_by(made, Heads(lambda m, q, k, v: (m.rope(heads(q), offset=one), m.rope(heads(k), offset=same)))) == [10, 10]


# Each rotation that is asked for is made: of all heads where only the arguments differ, else of those that were given.
APART = {
    "offsets": ([10, 10], lambda m, q, k, v: (m.rope(heads(q), offset=3), m.rope(heads(k), offset=4))),
    "no offset and one": ([10, 10], lambda m, q, k, v: (m.rope(heads(q)), m.rope(heads(k), 4))),
    "rotations": ([10, 10], lambda m, q, k, v: (m.rope(heads(q)), m.other(heads(k)))),
    "three calls": ([10, 10, 10], lambda m, q, k, v: (m.rope(heads(q), 3), m.rope(heads(q), 4), m.rope(heads(k), 3))),
    "sizes of heads": ([10, 5, 2], lambda m, q, k, v: (m.rope(heads(q)), m.rope(heads(k, 16)), m.rope(heads(q, 32)))),
    "heads that begin between others": ([2, 1], lambda m, q, k, v: (m.rope(heads(q, 32)), m.rope(heads(v, 32)))),
    "norms between": ([4, 2], lambda m, q, k, v: tuple(m.rope(mx.fast.rms_norm(heads(a), None, 1e-5)) for a in (q, k))),
    "sums between": ([4, 10], lambda m, q, k, v: (m.rope(heads(q + q)), m.rope(heads(k)))),
    "sums of heads": ([4, 10], lambda m, q, k, v: (m.rope(heads(q) + 1), m.rope(heads(k)))),
    "rows and heads mixed": ([5, 10], lambda m, q, k, v: (m.rope(q.reshape(2, 4, 5, 8).transpose(0, 2, 1, 3)), m.rope(heads(k)))),
    "split again": ([2, 10], lambda m, q, k, v: (m.rope(heads(heads(q).reshape(2, 4, 40), 20)), m.rope(heads(k)))),
    "split elsewhere": (
        [2, 10],
        lambda m, q, k, v: (m.rope(heads(q).reshape(2, 4, 2, 20).transpose(0, 2, 1, 3)), m.rope(heads(k))),
    ),
    "not turned": ([5, 10], lambda m, q, k, v: (m.rope(q.reshape(2, 5, 4, 8)), m.rope(heads(k)))),
    "turned twice": ([5, 10], lambda m, q, k, v: (m.rope(heads(q).transpose(0, 2, 1, 3)), m.rope(heads(k)))),
    "turned otherwise": ([2, 10], lambda m, q, k, v: (m.rope(k.reshape(2, 5, 2, 8).transpose(2, 0, 1, 3)), m.rope(heads(q)))),
    "three axes": ([5, 5], lambda m, q, k, v: (m.rope(q), m.rope(k.transpose(0, 1, 2)))),
    "changed columns": ([4, 10], lambda m, q, k, v: (m.rope(changed(q, "columns")), m.rope(heads(k)))),
    "changed after the split": ([4, 10], lambda m, q, k, v: (m.rope(changed(q, "split")), m.rope(heads(k)))),
    "changed heads": ([4, 10], lambda m, q, k, v: (m.rope(changed(q, "turned")), m.rope(heads(k)))),
}


@pytest.mark.parametrize("name", APART)
def test_heads_that_are_another_matter_are_rotated_apart(name, monkeypatch):
    numbers, body = APART[name]
    assert rotated_by(rotations(monkeypatch), Heads(body)) == numbers


def test_products_of_four_axes_are_not_taken_for_heads(monkeypatch):
    model = Heads(lambda m, q, k, v: (m.rope(q.transpose(0, 2, 1, 3)), m.rope(k.transpose(0, 2, 1, 3))), nn.RoPE(16))
    assert rotated_by(rotations(monkeypatch), model, mx.random.normal((2, 5, 3, 24))) == [3, 3]


class Shared(nn.Module):
    """Two layers with one rotation, which the second also calls for queries and keys of the first."""

    def __init__(self):
        super().__init__()
        self.rope, kept = nn.RoPE(8), []

        def first(m, q, k, v):
            kept[:] = q, k
            return m.rope(heads(q), offset=3), m.rope(heads(k), offset=3)

        def second(m, q, k, v):
            pairs = [(q, 3), (kept[1], 3), (kept[0], 3), (k, 3)]
            return tuple(m.rope(heads(a), offset=offset) for a, offset in pairs)

        self.layers = [Heads(first, self.rope), Heads(second, self.rope)]

    def __call__(self, x):
        out = self.layers[0](x)
        return (*out, *self.layers[1](mx.concatenate(out, axis=1)[:, :3].reshape(2, 5, 24)))


def test_layers_that_share_a_rotation_get_what_is_their_own(monkeypatch):
    # The first product's is known when the second layer asks for it.
    assert rotated_by(rotations(monkeypatch), Shared()) == [10, 10]


class PerHead(nn.RoPE):
    """Not what it inherits from: heads are at different places."""

    def __call__(self, x, offset=0):
        return super().__call__(x, offset) * mx.arange(x.shape[1])[:, None, None]


class InPlace(nn.RoPE):
    """Scales its input where it lies."""

    def __call__(self, x, offset=0):
        x[..., :4] = 3 * x[..., :4]
        return super().__call__(x, offset)


def test_rotations_of_unknown_classes_are_called_as_ever(monkeypatch):
    assert rotated_by(rotations(monkeypatch), Heads(TOGETHER["queries, keys"], PerHead(8))) == [4, 2]


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
SCALED = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    LLAMA3,
    LONG,
]


@pytest.mark.parametrize("scaling", SCALED, ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize("traditional", [False, True])
def test_every_rotation_of_mlx_lms_is_made_once(scaling, traditional, monkeypatch):
    rope = rope_utils.initialize_rope(8, 10000.0, traditional, scaling, 256)
    assert rotated_by(rotations(monkeypatch), Heads(TOGETHER["queries, keys"], rope)) == [10]


def test_a_rotation_that_writes_into_its_input_writes_into_no_product(monkeypatch):
    monkeypatch.setattr(InPlace, "__module__", rope_utils.__name__)
    body = lambda m, q, k, v: (m.rope(heads(q)), m.rope(heads(k)), v, m.rope(heads(q), 3), k)  # noqa: E731
    assert rotated_by(rotations(monkeypatch), Heads(body, InPlace(8))) == [10, 10]


def test_no_product_is_held_behind_its_pass():
    model, x = Heads(TOGETHER["queries, keys"]), mx.random.normal((1, 5, 24))
    calls = found_in(model, x)
    with intercept(calls):
        found = model(x)
    gc.collect()
    assert found and not any(isinstance(a, (fusion._Product, fusion._Part)) for a in gc.get_objects())


@pytest.mark.parametrize("make, per_layer", [(tiny_target, 1), (tiny_qwen3, 2)])
def test_a_traced_pass_rotates_once_a_layer_unless_norms_are_between(make, per_layer, monkeypatch):
    model, made, traced, trace = make(), rotations(monkeypatch), [], compiled.traceable

    def noting(*args):
        made.clear()
        out, behind = trace(*args)
        mx.export_to_dot(text := io.StringIO(), *out, *(array for arrays in behind for array in arrays))
        traced.append((len(made), text.getvalue().count('label ="AsType"')))
        return out, behind

    monkeypatch.setattr(compiled, "traceable", noting)
    for found in (fused_linears, lambda *args: []):
        monkeypatch.setattr(compiled, "fused_linears", found)
        target, cache = Target(model), make_prompt_cache(model)
        target(mx.array([[1, 2, 3]]), cache)
        blocks = compiled_verify.CompiledVerify(target, compiled.model_parts(model), True)
        assert blocks.verify(target, mx.array([[4, 5, 6, 7]]), cache, rollback_point(cache, 3)) is not None
    (once, casts), (twice, most) = traced
    assert (once, twice) == (per_layer * len(model.layers), 2 * len(model.layers))
    # To note where an array comes from is a cast to its own type, and may be none of the pass's. Rotations on a CPU have some.
    assert casts <= most


class Around(nn.Module):
    """A norm, two layers that make a gated product, one behind it, two of the input's size and one of a few columns, and what
    `body` makes of them."""

    def __init__(self, body, bits=None):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.norm.weight = mx.random.uniform(0.5, 2, (64,), key=mx.random.key(1))
        self.gate, self.up, self.down = (nn.Linear(*shape, bias=False) for shape in ((64, 96), (64, 96), (96, 64)))
        self.a, self.b, self.few = (nn.Linear(64, n, bias=False) for n in (64, 64, 16))
        self._body = body
        if bits:
            nn.quantize(self, 32, bits, class_predicate=lambda _, m: isinstance(m, nn.Linear))

    def __call__(self, x):
        # Named here: the gate is looked for in a module's own call.
        return self._body(self, x, swiglu)


@pytest.fixture
def launches(monkeypatch):
    """A list of the forms that block_linear is launched in, with MLX's operations in its place: (norm, residual, gated)."""
    made = []

    def plan(x, weights, eps, residual, gated, heads):
        assert not heads
        shape = (*x.shape[:-1], weights.w.shape[0] // (2 if gated else 1))

        def launch(given, weights, scale, r):
            made.append((scale is not None, residual, gated))
            # More than these the kernel would read, or write.
            assert given.shape == x.shape and (r.shape == shape if residual else r is None)
            return block_linear_ops(given, weights, None if scale is None else (scale, eps), r, gated)

        return launch

    monkeypatch.setattr(fusion, "block_linear_plan", plan)
    monkeypatch.setattr(autotune, "may_run", lambda: True)
    return made


def fused(model, x, columns=1):
    """What a pass gives whose products are launched with what stands around them."""
    calls = found_in(model, x, fused=True, columns=columns)
    with intercept(calls):
        return model(x)


def alike(found, expected):
    # float32: a fused linear sums in another order. 1e-5 of the largest value.
    return all(
        a.shape == b.shape and (mx.abs(a - b).max() <= 1e-5 * mx.abs(b).max()).item()
        for a, b in zip(found, expected, strict=True)
    )


def scaled(a):
    """Another array of the same values, which may be changed."""
    return a * 1.0


def added_to_late(m, x, gated):
    x = scaled(x)
    n = m.norm(x)
    x += 1
    return x + m.a(n), m.down(gated(m.gate(x), m.up(x)))


def norms_changed_behind(m, x, gated):
    n = m.norm(x)
    y = m.a(n)
    n *= 2
    return x + y, n


def inputs_changed_behind(m, x, gated):
    n = m.norm(x)
    gate, up = m.gate(n), m.up(n)
    n += 1
    y = scaled(x)
    z = m.a(y)
    y[..., 0] = 5
    return y + z, gated(gate, up)


def sources_changed_behind(m, x, gated):
    x = scaled(x)
    n = m.norm(x)
    gate, up = m.gate(n), m.up(n)
    x += 1
    return gated(gate, up), x


CHANGED = {
    "between the norm and the product": added_to_late,
    "the norm's value": norms_changed_behind,
    "the input": inputs_changed_behind,
    "the norm's input": sources_changed_behind,
}


# Of quantized products, filled up to a number of columns that the launch has not.
@pytest.mark.parametrize("bits, columns", [(None, 1), (4, 1), (4, 128)])
@pytest.mark.parametrize("when", CHANGED)
def test_a_product_that_is_launched_again_is_one_of_the_values_that_it_was_given(when, bits, columns, launches):
    model, x = Around(CHANGED[when], bits), mx.random.normal((1, 5, 64))
    assert alike(fused(model, x, columns), model(x)) and launches


PARTS = {
    "added to another": lambda m, n, x, gated: (m.a(n) + m.b(n),),
    "added to what is as wide": lambda m, n, x, gated: (x + m.a(n), m.b(n)),
    "gated with more behind": lambda m, n, x, gated: (x + m.down(gated(m.gate(n), m.up(n))), m.few(n)),
    "of a layer beside a gated product": lambda m, n, x, gated: (x + m.a(n) + m.down(gated(m.gate(n), m.up(n))),),
}


@pytest.mark.parametrize("bits, columns", [(None, 1), (4, 1), (4, 128)])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_joint_product_are_not_taken_for_all_of_it(name, bits, columns, launches):
    model, x = Around(lambda m, x, gated: PARTS[name](m, m.norm(x), x, gated), bits), mx.random.normal((1, 5, 64))
    assert alike(fused(model, x, columns), model(x)) and (True, False, False) in launches
