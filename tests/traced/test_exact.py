"""Traced exact passes on a made-up Metal GPU: the bits of the ordinary ones, or none is used."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from exact_kit import wide
from kit import ids_of, run, tiny_drafter
from metal_device import MetalDevice
from traced_kit import PROMPT

from dflash_mlx import traced
from dflash_mlx.kernels import autotune
from dflash_mlx.traced import compiled


@pytest.fixture
def device(monkeypatch, tmp_path):
    monkeypatch.delenv(traced.VARIABLE, raising=False)
    monkeypatch.setattr(compiled, "_least_s", lambda *_: [1.0, 2.0])
    return MetalDevice().install(monkeypatch, tmp_path)


@pytest.fixture
def pair():
    """A target in 4 bit with heads of 32, and a drafter."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = wide("llama", **sizes, num_hidden_layers=2, vocab_size=61)
    drafter = tiny_drafter(model, dflash_config={"mask_token_id": 60, "target_layer_ids": [0, 1]})
    nn.quantize(model, 32, 4)
    return model, drafter


@pytest.fixture
def traceable(pair):
    """The pair with a drafter that kernels serve and that can be traced: in 4 bit, full attention."""
    model, _ = pair
    config = {"mask_token_id": 60, "target_layer_ids": [0, 1]}
    drafter = tiny_drafter(
        model, hidden_size=64, intermediate_size=128, layer_types=None, sliding_window=None, dflash_config=config
    )
    for layer in drafter.layers:
        nn.quantize(layer, 32, 4)
    return model, drafter


def answer(model, drafter, **options):
    responses = run(model, drafter, PROMPT, 16, exact=True, **options)
    return ids_of(responses), mx.stack([r.logprobs for r in responses])


def same(a, b):
    return a[0] == b[0] and mx.array_equal(a[1], b[1]).item()


def test_traced_passes_give_the_bits_of_the_ordinary_ones_with_drafts_and_without(device, pair, monkeypatch):
    model, drafter = pair
    monkeypatch.setenv(traced.VARIABLE, "off")
    untraced = answer(model, None)
    monkeypatch.delenv(traced.VARIABLE)
    runs = [(None, {}), *((drafter, {"block_size": size}) for size in (3, 8)), (drafter, {"prompt_lookup": True})]
    for draft, options in runs:
        for turn in range(2):
            assert same(untraced, answer(model, draft, **options)), (options, turn)
    alone, drafted = vars(model)["_exact_alone"].accelerator, drafter.pair.exact.accelerator
    # On Metal from the second answer on, single rows too.
    assert alone.passes[0].passes == 16 and drafted.passes[0].passes > 4
    assert set(drafted.passes[0].findings()["faster"]) == {"1", "4", "8"}, drafted.findings()


def test_a_drafter_is_served_by_kernels_and_traced_though_no_ordinary_run_was_made(device, traceable, monkeypatch):
    model, drafter = traceable
    untraced = answer(model, None)
    assert same(untraced, answer(model, drafter, block_size=6))
    # Only a drafter's layers have this product.
    down = "product mlx.core.float32 4 bit group 32 N 64 K 128"
    assert next(r for r in autotune.results() if r.shape == down).use
    passes = drafter.pair.exact.accelerator.passes[1]
    assert passes.passes == 0 and same(untraced, answer(model, drafter, block_size=6)) and passes.passes > 1
    assert drafter.pair.accelerator is None


def test_ordinary_and_exact_runs_by_turns_have_one_set_of_the_drafters_traces(device, traceable):
    model, drafter = traceable
    for _ in range(2):
        answer(model, drafter, block_size=6)
        run(model, drafter, PROMPT, 16, block_size=6)
    kept, pair = [drafter.pair.exact.accelerator, drafter.pair.accelerator], drafter.pair
    drafts = kept[0].passes[1]
    before = drafts.passes
    answer(model, drafter, block_size=6)
    between = drafts.passes
    run(model, drafter, PROMPT, 16, block_size=6)
    assert [pair.exact.accelerator, pair.accelerator] == kept and kept[1].passes[1] is drafts
    assert before < between < drafts.passes


def test_a_trace_that_differs_in_a_last_place_is_not_used(device, pair, monkeypatch):
    model, _ = pair
    attend = device._block_attention

    def buffers_round_otherwise(inputs, given, shapes):
        out, *rest = attend(inputs, given, shapes)
        return [out * mx.where(list(inputs.values())[-1] > 0, 1 + 2.0**-23, 1.0), *rest]

    monkeypatch.setattr(device, "_block_attention", buffers_round_otherwise)
    monkeypatch.setenv(traced.VARIABLE, "off")
    untraced = answer(model, None)
    monkeypatch.delenv(traced.VARIABLE)
    for _ in range(2):
        assert same(untraced, answer(model, None))
    (verify, _) = vars(model)["_exact_alone"].accelerator.passes
    assert verify.passes == 0 and sum(verify._failed.values()) == compiled._COMPARISONS


def test_a_traced_pass_that_is_not_finite_is_run_again_as_an_ordinary_one(device, pair, monkeypatch):
    model, drafter = pair
    usual, calls = answer(model, drafter, block_size=5), []
    run_traced = compiled.run_traced

    def spoilt(*given):
        calls.append(given)
        out = run_traced(*given)
        return [a * float("nan") for a in out] if len(calls) == 6 else out

    monkeypatch.setattr(compiled, "run_traced", spoilt)
    assert same(usual, answer(model, drafter, block_size=5))
    (verify, _) = drafter.pair.exact.accelerator.passes
    assert verify.refused == "a pass gave a value that is not finite" and len(calls) >= 6


def test_attention_that_no_kernel_takes_leaves_a_target_untraced(device, monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = wide("llama", **sizes, num_hidden_layers=1, vocab_size=61)
    nn.quantize(model, 32, 4)
    first = answer(model, None)
    assert same(first, answer(model, None))
    (verify, _) = vars(model)["_exact_alone"].accelerator.passes
    assert "no kernel for these heads in a traced pass" in verify.refused and verify.passes == 0
