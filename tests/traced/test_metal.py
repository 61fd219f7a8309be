"""Traced passes on a made-up Metal GPU: what is tried when, the same ids, and a drafter whose products kernels serve."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from kit import ids_of, rounds_of, run, tiny_drafter, tiny_target
from metal_device import MetalDevice
from mlx.utils import tree_flatten
from traced_kit import PROMPT

from dflash_mlx import traced
from dflash_mlx.kernels import autotune
from dflash_mlx.pair import DFlashPair
from dflash_mlx.traced import buffers, compiled, fusion


@pytest.fixture
def device(monkeypatch, tmp_path):
    monkeypatch.delenv(traced.VARIABLE, raising=False)
    return MetalDevice().install(monkeypatch, tmp_path)


@pytest.fixture
def pair():
    """A target and a drafter in 4 bit, full attention: (model, drafter)."""
    model = tiny_target(hidden=32)
    drafter = tiny_drafter(model, hidden_size=32, intermediate_size=64, layer_types=None, sliding_window=None)
    for layer in drafter.layers:
        nn.quantize(layer, 32, 4)
    return model, drafter


def answer(model, drafter):
    return list(run(model, drafter, PROMPT, 24, block_size=6))


def test_nothing_is_compiled_before_the_second_answer_and_then_what_is_faster(device, pair, monkeypatch):
    model, drafter = pair
    monkeypatch.setattr(compiled, "_least_s", lambda *_: [1.0, 2.0])
    first = answer(model, drafter)
    accelerator = drafter.pair.accelerator
    assert not accelerator.prepares and [p.passes for p in accelerator.passes] == [0, 0]
    second = answer(model, drafter)
    assert drafter.pair.accelerator is accelerator and all(p.passes for p in accelerator.passes)
    monkeypatch.setenv(traced.VARIABLE, "off")
    plain = answer(model, drafter)
    assert drafter.pair.accelerator is None
    assert ids_of(first) == ids_of(second) == ids_of(plain) and rounds_of(second) == rounds_of(plain)


def test_what_is_slower_compiled_stays_as_it_is(device, pair, monkeypatch):
    model, drafter = pair
    monkeypatch.setattr(compiled, "_least_s", lambda *_: [2.0, 1.0])
    for _ in range(3):
        answer(model, drafter)
    accelerator = drafter.pair.accelerator
    assert [p.passes for p in accelerator.passes] == [0, 0] and accelerator.passes[0].findings()["faster"]["8"] is False


def test_a_drafters_products_are_tried_with_the_targets_and_served(device, pair):
    model, drafter = pair
    first = answer(model, drafter)
    shapes = {r.shape for r in autotune.results()}
    # Its down projection: no layer of the target is of that form.
    assert "product mlx.core.float32 4 bit group 32 N 32 K 64" in shapes and not autotune.waiting()
    assert "block_qmm" in {name for name, *_ in device.launches}
    device.launches.clear()
    drafter.pair.accelerator.passes[1].waits = True
    ids = mx.zeros((1, 6), dtype=mx.int32)
    features = mx.zeros((1, 2, drafter.fc.weight.shape[1]))
    out = drafter.pair.accelerator.draft(ids, features, drafter.make_cache(), 0)
    mx.eval(out)
    assert len(device.launches) == 7 * len(drafter.layers)
    assert mx.allclose(out, drafter.mask_rows(ids, features, drafter.make_cache(), 0), atol=1e-4) and first


def test_passes_are_not_put_together_before_an_answer_to_measure_them(device, pair, monkeypatch):
    model, drafter = pair
    monkeypatch.setattr("dflash_mlx.draft_length.measure.Measurement.prepare", lambda self: pytest.fail("put together before"))
    target = DFlashPair.of(drafter).prepare_target()
    assert target.accelerator and DFlashPair.of(drafter).draft_length_policy(mx.default_stream(mx.cpu))


def test_what_traces_hold_is_told_and_without_room_for_a_trial_nothing_is_compiled(device, pair, monkeypatch):
    model, drafter = pair
    monkeypatch.setattr(compiled, "_least_s", lambda *_: [1.0, 2.0])
    monkeypatch.setattr(buffers, "limit_bytes", lambda: 0)
    for _ in range(2):
        answer(model, drafter)
    accelerator = drafter.pair.accelerator
    assert [p.passes for p in accelerator.passes] == [0, 0] and [f["held_mb"] for f in accelerator.findings()] == [0, 0]
    drafter.pair.accelerator = None
    monkeypatch.setattr(buffers, "limit_bytes", lambda: 1 << 40)
    for _ in range(2):
        answer(model, drafter)
    # The target's q, k and v, gate and up: copies. The drafter's own layers hold views of theirs.
    layer = model.layers[0]
    joined = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj]
    most = sum(a.nbytes for linear in joined for a in linear.parameters().values()) * len(model.layers)
    held = [passes.held for passes in drafter.pair.accelerator.passes]
    assert 0 < held[0] <= most and held[1] == 0


def address(array):
    return np.asarray(memoryview(array)).ctypes.data


def test_a_drafters_layers_hold_views_of_their_fused_weights_and_its_trace_stays(device, pair, monkeypatch):
    model, drafter = pair
    monkeypatch.setattr(compiled, "_least_s", lambda *_: [1.0, 2.0])
    monkeypatch.setattr(fusion, "MOST_BYTES", 0)
    before = {name: np.asarray(a) for name, a in tree_flatten(drafter.parameters())}
    for _ in range(2):
        answer(model, drafter)
    accelerator = drafter.pair.accelerator
    for gate, up in ((layer.mlp.gate_proj, layer.mlp.up_proj) for layer in drafter.layers):
        for name in ("weight", "scales", "biases"):
            assert address(up[name]) == address(gate[name]) + gate[name].nbytes
    assert all(np.array_equal(before[name], np.asarray(a)) for name, a in tree_flatten(drafter.parameters()))
    passes = accelerator.passes[1].passes
    answer(model, drafter)
    # Views are what the trace was made of, not another's weights.
    assert drafter.pair.accelerator is accelerator and accelerator.passes[1].passes > passes > 0


def test_a_drafter_whose_layers_could_not_be_joined_is_not_tried_again_at_each_answer(device, pair, monkeypatch):
    model, drafter = pair
    monkeypatch.setattr(compiled, "_least_s", lambda *_: [1.0, 2.0])
    join, tried = compiled.fused_linears, []

    def without_room(of, *given):
        if of is not drafter:
            return join(of, *given)
        tried.append(of)
        raise RuntimeError("no room for fused weights")

    monkeypatch.setattr(compiled, "fused_linears", without_room)
    first, second = answer(model, drafter), answer(model, drafter)
    accelerator = drafter.pair.accelerator
    third = answer(model, drafter)
    assert drafter.pair.accelerator is accelerator and tried == [drafter]
    assert accelerator.passes[0].passes > 0 and "no room for fused weights" in accelerator.passes[1].refused
    assert ids_of(first) == ids_of(second) == ids_of(third)
