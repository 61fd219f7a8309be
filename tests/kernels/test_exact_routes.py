"""Exact routes: each family's passes through our texts, a row alone and among others; trials that fail; planted differences."""

import re

import mlx.core as mx
import mlx.nn as nn
import pytest
from exact_kit import wide
from families import FAMILIES
from kit import plant, tiny_target
from metal_device import MetalDevice

from dflash_mlx import exact
from dflash_mlx.kernels import autotune, block_qmm, exact_routes
from dflash_mlx.row_differences import first_difference

SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
TWO = {**SMALL, "num_hidden_layers": 2}
# family: (arguments beside, type, whether in 4 bit, texts that serve it)
SERVED = {
    "llama": (SMALL, mx.float16, False, {"block_linear", "block_attention"}),
    "gemma3": (TWO, mx.float16, True, {"block_qmm_tiles", "block_attention"}),
    "gpt_oss": ({**SMALL, "num_local_experts": 4}, mx.float32, True, {"block_qmm", "block_gather_qmm", "block_attention"}),
    "qwen3_next": ({**TWO, "linear_key_head_dim": 32, "linear_value_head_dim": 8}, mx.float32, False, {"gated_delta"}),
}


@pytest.mark.emulator
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.full
def test_a_familys_rows_are_the_same_bits_alone_and_among_others(untried, name):
    changes, dtype, quantized, texts = SERVED[name]
    model = wide(name, **changes)
    model.set_dtype(dtype)
    if quantized:
        nn.quantize(model, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 64 == 0)
    # A window's keys and one, whose ring has wrapped.
    assert first_difference(exact.ExactTarget(model), (2,), 17) is None
    assert not [text for text in texts if not any(name.startswith(text) for name in untried)], untried


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "gemma3", "llama, mixed windows", "gpt_oss"])
@pytest.mark.full
def test_where_no_text_serves_a_row_is_computed_by_itself(name):
    model = wide(name, head_dim=8) if name in FAMILIES else wide(name)
    target = exact.ExactTarget(model)
    # More rows of text than a window.
    assert first_difference(target, (2, 5), 24) is None


def test_a_mask_that_has_no_kernel_is_refused_with_the_modules_name():
    model = wide("llama", num_hidden_layers=1)
    route = exact_routes.ExactAttention(model.layers[0].self_attn, type(model.layers[0].self_attn).__call__, None, None)
    q = mx.zeros((1, 4, 2, 32))
    with pytest.raises(exact.GenerationError, match=r"no kernel for the attention of Attention .* and a mask of \[2, 2\]"):
        route._attend(q, q[:, :2], q[:, :2], None, 1.0, mx.zeros((2, 2)))


@pytest.fixture
def device(monkeypatch, tmp_path):
    return MetalDevice().install(monkeypatch, tmp_path)


def product(rows=3):
    x = mx.random.normal((1, rows, 64), key=mx.random.key(1))
    packed = mx.quantize(mx.random.normal((40, 64), key=mx.random.key(2)), 32, 4)
    return autotune.sure(block_qmm.block_qmm_plan, x, *packed, 32, 4)


def test_a_text_serves_exactly_however_slow_and_what_was_found_is_kept(device):
    device.costs = lambda name, template: 1.0
    assert product() and product(16)
    tried = len(device.launches)
    device.restart()
    assert product() and len(device.launches) < tried


def test_a_text_that_is_wrong_at_one_row_count_serves_none(device, monkeypatch):
    right = device._block_qmm

    def wrong(inputs, given, shapes):
        return [a + (inputs["x"].shape[0] == 8) for a in right(inputs, given, shapes)]

    monkeypatch.setattr(device, "_block_qmm", wrong)
    with pytest.raises(autotune.KernelError, match=r"exact needs a kernel .*: block_qmm.*differs from stock MLX"):
        product()


def test_names_that_leave_a_text_out_are_told(device, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "accept")
    with pytest.raises(autotune.KernelError, match="DFLASH_MLX_KERNELS is 'accept'; exact needs block_qmm"):
        product()


PLANTED = {
    # A sum whose order depends on how many rows there are.
    "a product": (
        exact_routes.Product,
        "_some",
        "mx.reshape(rows_apart(x, w), (1, m, w.shape[0]))",
        "mx.reshape(rows_apart(x, w), (1, m, w.shape[0])) * (1 + 2.0**-6 * (m > 2))",
        r"model.layers.0.self_attn.q_proj \(Linear\)",
    ),
    "attention": (
        exact_routes.ExactAttention,
        "_attend",
        "mx.concatenate(rows, axis=2)",
        "mx.concatenate(rows, axis=2) * (1 + 2.0**-6 * (m > 2))",
        r"model.layers.0.self_attn \(Attention, its own operations\)",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_doctor_names_a_planted_dependence_on_rows(monkeypatch, name):
    owner, method, old, new, said = PLANTED[name]
    model = tiny_target(seed=3, layers=2)
    model.set_dtype(mx.bfloat16)
    monkeypatch.setattr(exact, "ROWS", (3,))
    monkeypatch.setattr(exact, "_LONG", 8)
    assert exact.row_test(model, (0,)).startswith("passed: rows are the same bits alone and among 3 through 2 layers")
    plant(monkeypatch, owner, method, old, new)
    found = exact.row_test(model, (0,))
    assert found.startswith("failed: ") and re.search(said, found), found
