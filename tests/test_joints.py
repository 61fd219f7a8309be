"""Layers that a pass gives the same array, served by one product: which these are, and that each gets what is its own."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import family
from kit import tiny_target

from dflash_mlx import joints
from dflash_mlx.joints import joint_calls
from dflash_mlx.taps import intercept


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

    return joint_calls(model, run, **options)


def names(model, calls):
    by_id = {id(module): name for name, module in model.named_modules()}
    return [by_id[id(module)] for module, _ in calls]


def products(monkeypatch):
    """A list that every product of MLX's is written into: columns of its result."""
    made, linear, quantized = [], nn.Linear.__call__, nn.QuantizedLinear.__call__

    def noting(call):
        return lambda self, x: (made.append(self["weight"].shape[0]), call(self, x))[1]

    monkeypatch.setattr(nn.Linear, "__call__", noting(linear))
    monkeypatch.setattr(nn.QuantizedLinear, "__call__", noting(quantized))
    return made


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("biases", [(False, False), (True, True), (True, False)])
def test_layers_of_one_array_are_one_product_with_the_values_of_each(bits, biases, monkeypatch):
    model, x = Layers(bits, biases), mx.random.normal((1, 5, 64))
    expected = model(x)
    calls = found_in(model, x)
    # `e` is called twice; layers with a bias and without are two products.
    assert names(model, calls) == (["a", "b"] if biases[0] == biases[1] else []) + ["c", "d"]
    made = products(monkeypatch)
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
    calls = found_in(model, x, columns=64)
    made = products(monkeypatch)
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
    monkeypatch.setattr(joints, "MOST_BYTES", 96 * 64 * 4)
    assert names(model, found_in(model, x)) == ["a", "b"]
    monkeypatch.setattr(joints, "MOST_BYTES", 96 * 64 * 4 - 1)
    assert found_in(model, x) == []
    monkeypatch.undo()
    model.b = model.b.to_quantized(64, 4)
    assert names(model, found_in(model, x)) == ["c", "d"]
    model = Layers(bits=4)
    model.d = nn.Linear(64, 64).to_quantized(64, 4)
    assert names(model, found_in(model, x)) == ["a", "b"]


def test_a_transformers_projections_are_found_by_what_they_are_given():
    model = tiny_target(layers=2)
    calls = found_in(model, mx.array([[1, 2, 3]]))
    found = [name.removeprefix("model.layers.") for name in names(model, calls)]
    attention, mlp = [f"self_attn.{n}_proj" for n in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
    assert found == [f"{i}.{name}" for i in range(2) for name in attention + mlp]


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "deepseek_v3", "phi3", "gpt_oss"])
def test_a_pass_of_any_family_is_the_same_with_its_joints(name):
    model, ids = family(name), mx.array([[5, 9, 33, 7, 12]])
    expected = model(ids)
    calls = found_in(model, ids)
    with intercept(calls):
        found = model(ids)
    assert (mx.abs(found - expected).max() <= 1e-5 * mx.abs(expected).max()).item() and (calls or name == "phi3")
