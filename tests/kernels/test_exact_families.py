"""Every family with exact: served, by texts that give a row the same bits, or refused by the name of what has none.

On a made-up device whose rows differ wherever MLX has another kernel or order for several rows than for one; and, one layer of
each kind, where the emulator runs our texts.
"""

import re

import mlx.core as mx
import mlx.nn as nn
import pytest
import rows
from exact_kit import wide
from families import FAMILIES, OTHERS

from dflash_mlx import exact
from dflash_mlx.errors import DFlashError
from dflash_mlx.row_differences import first_difference

EVERY = {**FAMILIES, **OTHERS}
LATENT = r"no kernel for the attention of \w*(MLA|Attention) with a (KVCache|CacheList) and a mask of"
STATE = r"layer [01]'s ArraysCache, its state: a row behind a rollback"
# family: what its refusal says.
REFUSED = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k25", "kimi_vl", "kimi_linear", "kimi_k3"), LATENT),
    **dict.fromkeys(("longcat_flash_ngram", "bailing_hybrid", "bailing_moe_v3", "minimax_m3_vl", "mistral4"), LATENT),
    **dict.fromkeys(("mamba", "jamba", "bailing_moe_linear"), STATE),
    "mamba2": r"backbone.layers.0.mixer \(Mamba2Block, its own operations\)",
    "nemotron_h": r"backbone.layers.0.mixer \(NemotronHMamba2Mixer",
    "granitemoehybrid": r"model.layers.0.mamba \(GraniteMoeHybridMamba2Mixer",
    "falcon_h1": r"model.layers.0.mamba \(FalconH1Mixer",
    "plamo2": r"model.layers.layers.0.mixer \(Mamba,",
    "recurrent_gemma": r"model.layers.0.temporal_block \(RecurrentBlock",
    "gemma2": r"model.layers.0.self_attn \(Attention, its own operations\)",
    "gear": r"model.layers.1.self_attn \(Attention, its own operations\)",
    "nanochat": r"transformer.h.0.attn \(Attention, its own operations\)",
    "mimo_v2_flash": r"model.layers.\d.mlp.gate \(MoEGate\)",
    "baichuan_m1": "no kernel for the attention of Attention with a RotatingKVCache",
    "llama4": "no kernel for the attention of Attention with a ChunkedKVCache",
    **dict.fromkeys(("gemma4", "afm7"), r"no kernel for the attention of \w+ with keys of another layer"),
}


@pytest.fixture
def rows_differ(monkeypatch):
    """Products, attention, convolutions and rotations whose last place depends on how many rows there are."""
    for owner, name in ((mx, "matmul"), (mx.array, "__matmul__"), (mx, "addmm"), (mx.fast, "scaled_dot_product_attention")):
        # To be put back.
        monkeypatch.setattr(owner, name, getattr(owner, name))
    rows.make_differ()

    def by_rows(owner, name, count):
        call = getattr(owner, name)

        def differing(x, *about, **more):
            y = call(x, *about, **more)
            return y * (1 + 2.0**-23 * (count(x) % 3)) if count(x) > 1 else y

        monkeypatch.setattr(owner, name, differing)

    by_rows(mx, "quantized_matmul", lambda x: x.shape[-2])
    by_rows(mx, "conv1d", lambda x: x.shape[1])
    for name in ("gather_mm", "gather_qmm"):
        by_rows(mx, name, lambda x: x.size // x.shape[-1])
    rope = mx.fast.rope
    monkeypatch.setattr(mx.fast, "rope", lambda x, *a, **k: rope(x, *a, **k) * (1 + 2.0**-23 * (x.shape[-2] == 1)))


def said_of(target, counts, context):
    """What refuses a target, or None."""
    try:
        return first_difference(target, counts, context)
    except DFlashError as error:
        return error


@pytest.mark.parametrize("name", EVERY)
def test_where_rows_differ_a_family_is_served_or_refused_by_name(rows_differ, name):
    found = said_of(exact.ExactTarget(wide(name, sized=False)), (2, 5), 20)
    if name in REFUSED:
        assert found is not None and re.search(REFUSED[name], str(found)), found
    else:
        assert found is None, found


def test_without_routes_that_device_gives_rows_that_differ(rows_differ):
    for name in ("llama", "gpt_oss", "qwen3_next", "lfm2", "gpt2"):
        assert first_difference(exact.ExactTarget(wide(name, sized=False), routed=False), (2,), 20), name


ATTENTION, EXPERTS, PRODUCTS, PACKED = "block_attention", "block_gather_qmm", "block_linear", "block_qmm"
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
EXPERT = {"moe_intermediate_size": 64}
# What a family calls its sizes otherwise, or needs more of.
OTHER_SIZES = {
    "nemotron-nas": {"num_hidden_layers": 4},
    "spark2_5": {"num_hidden_layers": 4},
    "gpt2": {"n_embd": 64, "n_head": 2, "n_layer": 2},
    "lfm2": {"block_dim": 64, "block_ff_dim": 64, "full_attn_idxs": [1]},
    "lfm2_moe": {"full_attn_idxs": [1], **EXPERT},
    "afmoe": {"num_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "step3p5": {"num_hidden_layers": 1},
    "mixtral": {"num_local_experts": 4},
    "qwen3_5_moe": {
        "text_config": {**EVERY["qwen3_5_moe"][1]["text_config"], **SIZES, "head_dim": 32, "moe_intermediate_size": 64}
    },
    "qwen3_next": {"moe_intermediate_size": 64},
}
# Families whose heads are not of 32, or that do not attend: MLX's attention, a call a row, or none.
NO_ATTENTION = ("cohere2", "rwkv7", "minicpm3")


@pytest.mark.emulator
@pytest.mark.parametrize("name", [name for name in EVERY if name not in REFUSED])
@pytest.mark.full
def test_a_layer_of_each_kind_gives_a_row_the_same_bits_in_the_emulator(untried, name):
    model = wide(name, **{**SIZES, **OTHER_SIZES.get(name, {})})
    experts = any("Switch" in type(m).__name__ for _, m in model.named_modules())
    # MLX's CPU build gathers experts in float32 alone; 4 bit is what people run them in.
    model.set_dtype(mx.float32 if experts else mx.bfloat16)
    if experts:
        nn.quantize(model, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 64 == 0)
    found = said_of(exact.ExactTarget(model), (2,), 5)
    assert found is None, found
    wanted = {EXPERTS, PACKED} if experts else {PRODUCTS}
    wanted |= set() if name in NO_ATTENTION else {ATTENTION}
    assert not [text for text in wanted if not any(one.startswith(text) for one in untried)], untried


PLANTED = {
    "block_linear": ("llama", r"model.layers.0.self_attn.q_proj \(Linear\)"),
    "block_attention_reduce": ("llama", r"model.layers.0.self_attn \(Attention, its own operations\)"),
    "block_gather_qmm": ("mixtral", r"model.layers.0.block_sparse_moe.switch_mlp.\w+ \(QuantizedSwitchLinear\)"),
}


@pytest.mark.emulator
@pytest.mark.parametrize("text", PLANTED)
@pytest.mark.full
def test_a_text_whose_sums_depend_on_the_rows_is_found_and_its_layer_named(untried, monkeypatch, text):
    name, said = PLANTED[text]
    made = mx.fast.metal_kernel

    def planted(name, **options):
        launch, kernel = made(name, **options), name

        def off(**how):
            outs = launch(**how)
            several = any(size % 3 == 0 for a in outs for size in a.shape[:-1])
            return [a * (1 + 2.0**-7) if several and text in kernel else a for a in outs]

        return off

    monkeypatch.setattr(mx.fast, "metal_kernel", planted)
    model = wide(name, **{**SIZES, **OTHER_SIZES.get(name, {}), "num_hidden_layers": 1})
    model.set_dtype(mx.bfloat16 if name == "llama" else mx.float32)
    if name != "llama":
        nn.quantize(model, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 64 == 0)
    found = said_of(exact.ExactTarget(model), (3,), 3)
    assert found is not None and re.search(said, str(found)), found
