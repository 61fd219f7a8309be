"""Every family with exact: served, by texts that give a row the same bits, or refused by the name of what has none.

On a made-up device whose rows differ wherever MLX has another kernel or order for several rows than for one; and, one layer of
each kind, where the emulator runs our texts.
"""

import re

import mlx.core as mx
import pytest
import rows
from exact_kit import wide
from families import FAMILIES, OTHERS

from dflash_mlx import exact
from dflash_mlx.errors import DFlashError
from dflash_mlx.row_differences import first_difference

EVERY = {**FAMILIES, **OTHERS}
LATENT = r"no kernel for the attention of \w*(MLA|Attention) with a (KVCache|CacheList) and a mask of"
STATE = "the layers: a row behind a rollback"
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
