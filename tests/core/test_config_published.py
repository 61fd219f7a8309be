"""Every published drafter's config that is known, row by row: what its authors state is what is read.

A row holds what is stated of it (None: not stated, a small number stands in), in one of the two published spellings.
"""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from kit import flat, grow, ids_of, rounds_of, run, tiny_target

from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import ConfigError
from dflash_mlx.loading import make_drafter
from dflash_mlx.models.architectures import ARCHITECTURES, build_drafter, not_computed
from dflash_mlx.models.rope import ExactRoPE, make_rope
from dflash_mlx.packagings import KNOWN

S, F = "sliding_attention", "full_attention"
ALL = object()

# name: (hidden, intermediate, layers, heads, key heads, head size), block, mask id, taps, target layers, layer kinds, window,
# theta, vocabulary, positions, and what else the file holds.
ROWS = {
    "Qwen3-4B b16": (
        (2560, 9728, 5, 32, 8, 128), 16, 151669, (1, 9, 17, 25, 33), 36, None, None, 1e6, 151936, 40960, {},
    ),
    "Qwen3-8B b16": ((4096, 12288, 5, 32, 8, 128), 16, 151669, (1, 9, 17, 25, 33), 36, None, None, 1e6, 151936, 40960, {}),
    "Qwen2.5-0.5B": ((896, 4864, 5, 14, 2, 64), 16, 151669, (1, 6, 11, 16, 21), 24, None, None, 1e6, 151936, 32768, {}),
    "Qwen3.5-4B": ((2560, 9728, 5, 32, 8, 128), 16, 248070, (1, 8, 15, 22, 29), 32, None, None, 1e7, 248320, 262144, {}),
    "Qwen3.5-35B-A3B": ((2048, 6144, 8, 32, 4, 128), 16, 248070, (1, 10, 19, 28, 37), 40, None, None, 1e7, 248320, 262144, {}),
    "Qwen3.6-35B-A3B": (
        (2048, 6144, 6, 32, 8, 128), 16, 248077, (1, 6, 11, 16, 22, 27, 32, 37), 40, [S] * 5 + [F], 4096, 1e7, 248320, 262144,
        {"new": True},
    ),
    "Ornith-1.5-35B-A3B": (
        (2048, 6144, 6, 32, 8, 128), 16, 248077, (1, 6, 11, 16, 22, 27, 32, 37), 40, [S] * 5 + [F], 4096, 1e7, 248320, 262144,
        {"new": True},
    ),
    "Qwen3.6-27B": (
        (5120, 17408, 5, 32, 8, 128), 16, 248070, (1, 16, 31, 46, 61), 64, [S] * 4 + [F], 2048, 1e7, 248320, 262144, {},
    ),
    "Qwen3.5-122B-A10B": ((None,) * 6, 16, 248077, (1, 10, 19, 28, 37, 46), 48, None, None, 1e7, 248320, 262144, {}),
    "gpt-oss-20b": ((2880, None, 8, None, None, None), 8, 200000, (1, 6, 11, 16, 21), 24, None, None, 1.5e5, 201088, 131072, {}),
    "Llama3.1-8B": (
        (4096, None, None, None, None, None), 10, 128255, (1, 8, 15, 22, 29), 32, None, None, 5e5, 128256, 131072, {},
    ),
    "Kimi-K2.5": (
        (7168, None, 6, None, None, None), 8, 163838, (1, 12, 24, 35, 47, 58), 61, None, None, 5e4, 163840, 262144,
        {"rope_scaling": {"type": "yarn", "factor": 64.0, "mscale": 1.0, "original_max_position_embeddings": 4096}},
    ),
    "LFM2.5-1.2B": ((2048, 6144, 8, 32, 8, 64), 16, 16, (1, 4, 7, 10, 13), 16, None, None, 1e6, 65536, 128000, {}),
    "LongCat-Flash": ((6144, 12288, 5, 32, 8, 128), 16, 2, (1, 7, 13, 19, 25), 28, None, None, 1e7, 131072, 131072, {}),
    "HunyuanOCR": ((None,) * 6, 16, 5, (1, 8, 15, 22), 24, None, None, 1e4, 120818, 32768, {}),
    "Gemma-4 31B": (
        (None, None, 5, None, None, None), 16, 4, (1, 15, 30, 44, 58), 60, "default", 512, 1e6, 262144, 131072,
        {"model_type": "gemma4_text", "dflash_config": {"final_logit_softcapping": 30.0, "input_embedding_scale": 73.3}},
    ),
    "Muse-Glimmer assistant": (
        (6656, 19968, 5, 32, 8, 128), 16, 201818, (1, 13, 25, 37, 49), None, ALL, 2048, 5e5, None, None,
        {"architectures": ["MuseGlimmerAssistantModel"], "flat": True},
    ),
    "Qwen3.8-27B DFlash 2": (
        (5120, 17408, 5, 32, 8, 128), 8, 248070, (5, 19, 33, 47, 61), 64, [S] * 5, 2048, 1e7, 248320, 262144,
        {"new": True, "is_causal": False, "dflash2": {}},
    ),
    "Qwen3.6-35B-A3B DFlash 2": (
        (2048, 6144, 6, 32, 8, 128), 8, 248077, (1, 6, 11, 16, 22, 27, 32, 37), 40, [S] * 6, 2048, 1e7, 248320, 262144,
        {"new": True, "is_causal": False, "dflash2": {}},
    ),
    "Muse-Glimmer-30B DFlash 2": (
        (6656, 19968, 5, 32, 8, 128), 16, 201818, (1, 13, 25, 37, 49), 52, [S] * 5, 2048, 5e5, 202048, None,
        {
            "new": True,
            "is_causal": False,
            "dflash2": {"output_multiplier": 0.19611613513818404, "final_logit_softcapping": 20.0},
        },
    ),
    "GLM-5.3-Flash DFlash 2": (
        (4096, None, None, None, None, None), 8, 154822, (5, 14, 24, 33, 42), 45, "all", 2048, 1e6, 154880, None,
        {"new": True, "is_causal": False, "dflash2": {}},
    ),
    "Qwen3.8-Flash-Next DFlash 2": (
        (2560, 8704, 6, 20, 4, None), 16, 248077, (1, 7, 13, 20, 26, 33, 39, 46), 48, [S] * 5 + [F], 4096, 1e7, 248320, 262144,
        {"new": True, "dflash2": {"selector_vocab_size": 248077}},
    ),
}  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
STAND_IN = (64, 96, 4, 4, 2, 16)


def written(name):
    """A row as its config.json."""
    sizes, block, mask, taps, target_layers, kinds, window, theta, vocabulary, positions, more = ROWS[name]
    more = dict(more)
    new, flat, dflash2 = more.pop("new", False), more.pop("flat", False), more.pop("dflash2", None)
    raw = dict(zip(SIZES, (given or other for given, other in zip(sizes, STAND_IN, strict=True)), strict=True))
    nested = {"mask_token_id": mask, "target_layer_ids": list(taps)}
    raw |= {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "num_target_layers": target_layers,
    }
    raw |= {"vocab_size": vocabulary, "max_position_embeddings": positions}
    if kinds is not None and kinds != "default":
        raw |= {"sliding_window": window}
        if kinds is not ALL:
            raw["layer_types"] = [S] * raw["num_hidden_layers"] if kinds == "all" else kinds
    if new:
        raw["rope_parameters"], nested["block_size"] = {"rope_type": "default", "rope_theta": theta}, block
    else:
        raw |= {"rope_theta": theta, "block_size": block, "rope_scaling": None}
    if dflash2 is not None:
        raw["architectures"] = ["DFlash2DraftModel"]
        nested |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16, **dflash2}
    nested |= more.pop("dflash_config", {})
    raw |= nested if flat else {"dflash_config": nested}
    return {k: v for k, v in (raw | more).items() if v is not None or k == "rope_scaling"}


@pytest.mark.parametrize("name", ROWS)
def test_a_published_config_is_read_as_stated(name):
    sizes, block, mask, taps, target_layers, kinds, window, theta, vocabulary, positions, more = ROWS[name]
    c = DrafterConfig.from_dict(written(name))
    for key, size in zip(SIZES, sizes, strict=True):
        assert size is None or getattr(c, key) == size, key
    assert (c.block_size, c.mask_token_id, c.target_layer_ids, c.num_target_layers) == (block, mask, taps, target_layers)
    assert (c.vocab_size, c.max_position_embeddings) == (vocabulary, positions)
    assert {rope.theta for rope in c.ropes} == {theta} and len(c.ropes) == c.num_hidden_layers
    n = c.num_hidden_layers
    if kinds is None:
        kinds = [F] * n
    elif kinds == "default":
        # Gemma's own: a full layer after four sliding ones.
        kinds = [S] * 4 + [F]
    elif kinds in (ALL, "all"):
        kinds = [S] * n
    assert c.windows == tuple(window if kind == S else None for kind in kinds)
    never_causal = more.get("is_causal") is False or c.architecture == "MuseGlimmerAssistantModel"
    assert c.causal == tuple(kind == S and not never_causal for kind in kinds)
    assert c.unread == () and c.unsupported == ()
    assert c.architecture in ARCHITECTURES


@pytest.mark.parametrize("name", [name for name in ROWS if name.endswith("DFlash 2")])
def test_a_published_dflash2_config_has_its_convolutions_and_selector(name):
    c = DrafterConfig.from_dict(written(name))
    assert (c.conv_kernel_size, c.conv_group_size, c.selector_rank, c.selector_top_k) == (2, 16, 256, 16)
    assert c.selector_vocab_size == (248077 if "Flash-Next" in name else None)
    muse = name.startswith("Muse")
    assert (c.output_multiplier, c.final_logit_softcapping) == ((0.19611613513818404, 20.0) if muse else (None, None))


def test_kimis_yarn_and_gemmas_scales_are_read():
    c = DrafterConfig.from_dict(written("Kimi-K2.5"))
    assert c.ropes[0].kind == "yarn"
    assert c.ropes[0].parameters == {"factor": 64.0, "mscale": 1.0, "original_max_position_embeddings": 4096}
    rope = make_rope(c.ropes[0], c.max_position_embeddings)
    # 0.1 ln 64 + 1: mscale alone has no divisor.
    assert isinstance(rope, ExactRoPE) and abs(rope.scale - 1.4158883) < 1e-6
    c = DrafterConfig.from_dict(written("Gemma-4 31B"))
    assert (c.final_logit_softcapping, c.input_embedding_scale) == (30.0, 73.3)


# Files as they are published, and excerpts of them; a row says where it was read, and which values stand in for unstated ones.
FILES = {row["name"]: row for row in json.loads((Path(__file__).parents[1] / "data/published_configs.json").read_text())}
SMALL = {
    "hidden_size": 24, "intermediate_size": 32, "head_dim": 8, "v_head_dim": 8, "vocab_size": 61, "sliding_window": 6,
    "swa_window_size": 6, "num_target_layers": 4, "max_window_layers": 2, "conv_group_size": 4, "selector_rank": 4,
    "selector_top_k": 3, "markov_rank": 4, "dspark_markov_rank": 4, "mask_token_id": 60, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "global_head_dim": 8, "emb_dim": 5, "gru_hidden_dim": 6, "q_lora_rank": 9,
    "target_hidden_size": 24, "target_num_hidden_layers": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
}  # fmt: skip
TAPS = {"target_layer_ids": [0, 2], "aux_hidden_state_layer_ids": [1, 3]}


def shrunk(part):
    """A config of the same keys and ways, whose sizes are the tiny target's."""
    found = {}
    for key, value in part.items():
        if key == "layer_types":
            value = [value[0], value[-1]]
        elif isinstance(value, dict):
            value = shrunk(value)
        elif value and key in SMALL:
            value = SMALL[key]
        elif value and key == "draft_vocab_size":
            value = SMALL["vocab_size"]
        found[key] = TAPS.get(key, value)
    return found


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_every_architecture_that_is_read_has_a_class():
    assert {*KNOWN} == {*ARCHITECTURES}


def test_the_table_is_of_many_publishers_and_says_where_each_row_was_read():
    publishers = {name.split("/")[0] for name in FILES if "/" in name.split(" ")[0]}
    assert len(FILES) + len(ROWS) >= 80 and len(publishers) >= 15, sorted(publishers)
    assert all(row["source"] and row["config"] for row in FILES.values())
    assert all(row.get("excerpt") for row in FILES.values() if row.get("stand_in"))


@pytest.mark.parametrize("name", FILES)
def test_a_published_file_runs_or_is_refused_by_name(name, target):
    raw, refused = FILES[name]["config"], FILES[name].get("refused")
    try:
        config = DrafterConfig.from_dict(raw)
    except ConfigError as fault:
        assert refused and refused in str(fault) and "missing" not in str(fault)
        return
    assert not_computed(config) == ([refused] if refused else [])
    if refused:
        return
    # Counted as its publisher counts, with another packer's convention undone.
    packed = raw.get("transformer_layer_config") or {}
    nested = raw.get("dflash_config") or {}
    stated = nested.get("target_layer_ids") or raw.get("target_layer_ids")
    assert list(config.target_layer_ids) == (stated or [i - 1 for i in raw["aux_hidden_state_layer_ids"]])
    assert config.hidden_size == (packed or raw)["hidden_size"]
    # Whole heads, but where the layers are Qwen 3.5's own.
    part = raw["partial_rotary_factor"] if config.architecture == "Qwen35DSparkModel" else 1
    assert config.ropes[0].dims == (config.qk_rope_head_dim or config.head_dim * part)

    small = DrafterConfig.from_dict(shrunk(raw))
    kept = (
        "architecture",
        "block_size",
        "sample_from_anchor",
        "tapped_last",
        "markov_head_type",
        "traditional",
        "attention_sinks",
    )
    assert all(getattr(small, key, None) == getattr(config, key, None) for key in kept)
    mx.random.seed(7)
    drafter = make_drafter(small, flat(grow(build_drafter(small, {}), 3.0)), target)
    prompt = [5, 9, 33, 7, 20, 41, 2, 8]
    got = run(target, drafter, prompt, 6, block_size=min(5, small.block_size))
    assert ids_of(got) == ids_of(run(target, None, prompt, 6)) and rounds_of(got)
