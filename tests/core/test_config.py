"""Drafter configs: every published spelling and shape, the per-layer rules, and refusals that name key and value."""

import copy

import pytest
from kit import raw_config

from dflash_mlx.config import _SPELLINGS, DrafterConfig, RopeConfig
from dflash_mlx.errors import ConfigError
from dflash_mlx.models.drafter import Drafter

# The three shapes of checkpoint-format.md, section 6; keys that it leaves out with "..." are filled in from its table.
A = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
    "vocab_size": 248320, "max_position_embeddings": 262144, "rope_theta": 10000000, "rope_scaling": None, "block_size": 16,
    "num_target_layers": 64, "attention_bias": False, "tie_word_embeddings": False,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048, "use_sliding_window": True,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
}  # fmt: skip
B = {
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_size": 6656, "intermediate_size": 19968,
    "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
    "vocab_size": 202048, "is_causal": False, "num_target_layers": 52,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048,
    "dflash_config": {
        "block_size": 16, "mask_token_id": 201818, "target_layer_ids": [1, 13, 25, 37, 49], "conv_kernel_size": 2,
        "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16, "output_multiplier": 0.19611613513818404,
        "final_logit_softcapping": 20.0,
    },
}  # fmt: skip
C = {
    "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant", "block_size": 16,
    "mask_token_id": 201818, "target_layer_ids": [1, 13, 25, 37, 49],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "sliding_window": 2048, "hidden_size": 6656,
    "intermediate_size": 19968, "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def read(raw):
    return DrafterConfig.from_dict(raw)


def changed(base=None, **changes):
    """A copy of a config with dotted keys set, or removed by `...`."""
    raw = copy.deepcopy(raw_config() if base is None else base)
    for path, value in changes.items():
        *parents, key = path.split("__")
        at = raw
        for parent in parents:
            at = at.setdefault(parent, {})
        if value is ...:
            at.pop(key, None)
        else:
            at[key] = value
    return raw


def refusal(raw, where="config.json"):
    with pytest.raises(ConfigError) as caught:
        DrafterConfig.from_dict(raw, where)
    return str(caught.value)


def test_shape_a_mixed_layers_with_keys_at_top_level():
    c = read(A)
    assert (c.block_size, c.mask_token_id, c.target_layer_ids) == (16, 248070, (1, 16, 31, 46, 61))
    assert c.windows == (2048,) * 4 + (None,) and c.causal == (True,) * 4 + (False,)
    assert c.ropes == (RopeConfig(1e7, 128),) * 5
    assert (c.head_dim, c.num_key_value_heads, c.attention_bias, c.target_hidden_size) == (128, 8, False, 5120)
    assert (c.num_target_layers, c.vocab_size, c.max_position_embeddings, c.rms_norm_eps) == (64, 248320, 262144, 1e-6)
    assert c.read_from["block_size"] == "block_size" and c.read_from["mask_token_id"] == "dflash_config.mask_token_id"


def test_shape_b_nested_block_size_rope_parameters_and_is_causal():
    c = read(B)
    assert (c.architecture, c.block_size, c.mask_token_id) == ("DFlash2DraftModel", 16, 201818)
    assert c.windows == (2048,) * 5 and c.causal == (False,) * 5 and c.ropes[0] == RopeConfig(5e5, 128)
    assert c.read_from["block_size"] == "dflash_config.block_size"


def test_shape_c_everything_at_top_level_slides_and_is_not_causal():
    c = read(C)
    assert (c.block_size, c.mask_token_id, c.target_layer_ids) == (16, 201818, (1, 13, 25, 37, 49))
    assert c.windows == (2048,) * 5 and c.causal == (False,) * 5 and c.vocab_size is None


S, F = "sliding_attention", "full_attention"
# Two real configs first: Qwen3.8-27B-DFlash2 and Qwen3.6-35B-A3B v1 (checkpoint-format.md, section 4).
RULES = {
    "DFlash2, is_causal false": ({"layer_types": [S] * 5, "is_causal": False}, [False] * 5, [2048] * 5),
    "v1, five sliding and one full": ({"layer_types": [S] * 5 + [F]}, [True] * 5 + [False], [2048] * 5 + [None]),
    "full layers": ({"layer_types": [F] * 3}, [False] * 3, [None] * 3),
    "full layers, is_causal true": ({"layer_types": [F] * 3, "is_causal": True}, [True] * 3, [None] * 3),
    "no layer_types": ({"layer_types": ...}, [False] * 3, [None] * 3),
    "no layer_types, use_sliding_window": ({"layer_types": ..., "use_sliding_window": True}, [True] * 3, [2048] * 3),
    "max_window_layers": (
        {"layer_types": ..., "use_sliding_window": True, "max_window_layers": 2},
        [False, False, True],
        [None, None, 2048],
    ),
    "use_sliding_window false": ({"layer_types": ..., "use_sliding_window": False}, [False] * 3, [None] * 3),
    "layer_types win over use_sliding_window": ({"layer_types": [S] * 3, "use_sliding_window": False}, [True] * 3, [2048] * 3),
    "dflash_config.causal": ({"layer_types": [S, F], "dflash_config__causal": False}, [False] * 2, [2048, None]),
    "dflash_query_causal": ({"layer_types": [S, F], "dflash_config__dflash_query_causal": True}, [True] * 2, [2048, None]),
    "is_causal before dflash_config.causal": (
        {"layer_types": [S, F], "is_causal": False, "dflash_config__causal": True},
        [False] * 2,
        [2048, None],
    ),
    "MiMo's use_swa": (
        {"layer_types": ..., "dflash_config__use_swa": True, "dflash_config__swa_window_size": 128},
        [False] * 3,
        [128] * 3,
    ),
    "use_swa and a causal key": (
        {"layer_types": ..., "dflash_config__use_swa": True, "dflash_config__causal": True},
        [True] * 3,
        [2048] * 3,
    ),
    "a pattern number": (
        {"layer_types": ..., "sliding_window_pattern": 2, "num_hidden_layers": 5},
        [True, False] * 2 + [True],
        [2048, None] * 2 + [2048],
    ),
    "a pattern list": (
        {"layer_types": ..., "sliding_window_pattern": [True, False, True]},
        [True, False, True],
        [2048, None, 2048],
    ),
    "gemma4's defaults": (
        {"layer_types": ..., "sliding_window": ..., "model_type": "gemma4_text", "num_hidden_layers": 6},
        [True] * 4 + [False, True],
        [512] * 4 + [None, 512],
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_causality_and_window_of_each_layer(name):
    changes, causal, windows = RULES[name]
    n = len(causal)
    c = read(changed(**{"num_hidden_layers": n, "sliding_window": 2048, **changes}))
    assert c.causal == tuple(causal) and c.windows == tuple(windows)


# new place, keys to remove from the small config, value
SPELLINGS = {
    "block_size": [("block_size", 7), ("dflash_config__block_size", 7)],
    "mask_token_id": [("dflash_config__mask_token_id", 9), ("mask_token_id", 9)],
    "target_layer_ids": [("dflash_config__target_layer_ids", [1, 3]), ("target_layer_ids", [1, 3])],
    "target_hidden_size": [("target_hidden_size", 40), ("dflash_config__target_hidden_size", 40)],
    "num_target_layers": [("num_target_layers", 12), ("dflash_config__num_target_layers", 12)],
    "draft_vocab_size": [("draft_vocab_size", 50), ("dflash_config__draft_vocab_size", 50)],
}
PLACES = [(name, place, value) for name, places in SPELLINGS.items() for place, value in places]


@pytest.mark.parametrize("name,place,value", PLACES, ids=[f"{place}" for _, place, _ in PLACES])
def test_a_key_is_read_from_each_published_place(name, place, value):
    raw = changed(**{other: ... for other, _ in SPELLINGS[name]}, **{})
    c = read(changed(raw, **{place: value}))
    assert getattr(c, name) == (tuple(value) if isinstance(value, list) else value)
    assert c.read_from[name] == place.replace("__", ".")


@pytest.mark.parametrize("name", SPELLINGS)
def test_two_places_may_agree_and_may_not_contradict(name):
    (one, value), (two, _) = SPELLINGS[name]
    assert read(changed(**{one: value, two: value})).read_from[name] == one.replace("__", ".")
    other = [1, 2] if isinstance(value, list) else value + 1
    message = refusal(changed(**{one: value, two: other}))
    one, two = one.replace("__", "."), two.replace("__", ".")
    assert f"{one} = {value!r} contradicts {two} = {other!r}" in message


def test_null_counts_as_absent():
    assert read(changed(block_size=None, dflash_config__block_size=6)).block_size == 6
    assert "block_size or dflash_config.block_size is missing" in refusal(changed(block_size=None))


ROPES = {
    "old": ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5, 8)),
    "new": ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(5e5, 8)),
    "both, agreeing": ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}}, RopeConfig(5e5, 8)),
    "old linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeConfig(1e4, 8, "linear", {"factor": 4.0})),
    "new linear": (
        {"rope_theta": ..., "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        RopeConfig(1e4, 8, "linear", {"factor": 4.0}),
    ),
    "yarn with its original length from the positions": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        RopeConfig(1e4, 8, "yarn", {"factor": 2.0, "original_max_position_embeddings": 4096}),
    ),
    "yarn with its factor from the positions": (
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 1024}},
        RopeConfig(1e4, 8, "yarn", {"factor": 4.0, "original_max_position_embeddings": 1024}),
    ),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, RopeConfig(1e4, 8, "dynamic", {"factor": 2.0})),
    "partial, nested": (
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        RopeConfig(1e4, 8),
    ),
    "partial, top level": ({"partial_rotary_factor": 0.5}, RopeConfig(1e4, 8)),
    "partial, of another kind": (
        {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        RopeConfig(1e4, 4, "linear", {"factor": 2.0}),
    ),
    "pairs": ({"is_neox_style": False}, RopeConfig(1e4, 8, traditional=True)),
    "pairs, other spelling": ({"rope_is_neox_style": False}, RopeConfig(1e4, 8, traditional=True)),
    "halves said": ({"is_neox_style": True}, RopeConfig(1e4, 8)),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_is_read_from_each_spelling(name):
    changes, expected = ROPES[name]
    assert read(changed(**changes)).ropes == (expected,) * 2


def test_rope_parameters_may_differ_by_kind_of_layer():
    rope = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    c = read(changed(rope_theta=..., rope_parameters=rope))
    assert c.ropes == (RopeConfig(1e4, 8), RopeConfig(1e6, 8, "linear", {"factor": 8.0}))


def test_head_dim_and_key_heads_default_as_published():
    c = read(changed(head_dim=..., num_key_value_heads=..., hidden_size=24))
    assert (c.head_dim, c.num_key_value_heads) == (6, 4)


def test_target_hidden_size_defaults_to_the_drafters():
    assert read(raw_config()).target_hidden_size == 24


def test_tied_embeddings_of_the_drafter_say_nothing():
    assert read(changed(tie_word_embeddings=True)) == read(changed(tie_word_embeddings=False))


def test_the_config_cannot_be_changed():
    with pytest.raises(AttributeError, match="cannot assign"):
        read(raw_config()).block_size = 9


REFUSED = {
    "no taps": ({"dflash_config__target_layer_ids": ...}, "dflash_config.target_layer_ids or target_layer_ids"),
    "no mask id": ({"dflash_config__mask_token_id": ...}, "dflash_config.mask_token_id or mask_token_id is missing"),
    "no block size": ({"block_size": ...}, "block_size or dflash_config.block_size is missing"),
    "no dflash_config": (
        {"dflash_config": ...},
        "dflash_config.mask_token_id or mask_token_id is missing; dflash_config.target_",
    ),
    "no theta": ({"rope_theta": ...}, "rope_theta or rope_parameters.rope_theta is missing"),
    "no hidden size": ({"hidden_size": ...}, "hidden_size is missing"),
    "block of one": ({"block_size": 1}, "block_size = 1 must be a whole number of at least 2 (it counts the anchor)"),
    "block as text": ({"block_size": "16"}, "block_size = '16' must be a whole number"),
    "block as a fraction": ({"block_size": 16.5}, "block_size = 16.5 must be a whole number"),
    "negative mask": ({"dflash_config__mask_token_id": -1}, "dflash_config.mask_token_id = -1 must be a token id, 0 or more"),
    "mask outside": ({"dflash_config__mask_token_id": 61}, "mask_token_id = 61 is outside the embedding (vocab_size = 61)"),
    "mask as a flag": ({"dflash_config__mask_token_id": True}, "dflash_config.mask_token_id = True must be a token id"),
    "negative tap": (
        {"dflash_config__target_layer_ids": [1, -2]},
        "target_layer_ids = [1, -2] must be a list of 0-based layer ids (-1: the embedding)",
    ),
    "empty taps": (
        {"dflash_config__target_layer_ids": []},
        "dflash_config.target_layer_ids = [] must be a list of 0-based layer",
    ),
    "taps as a number": ({"dflash_config__target_layer_ids": 3}, "dflash_config.target_layer_ids = 3 must be a list"),
    "tap beyond": (
        {"num_target_layers": 3, "dflash_config__target_layer_ids": [1, 3]},
        "target_layer_ids = [1, 3] is out of range: num_target_layers = 3",
    ),
    "window missing": ({"sliding_window": ...}, "sliding layers need sliding_window of at least 2, found None"),
    "window of one": ({"sliding_window": 1}, "sliding layers need sliding_window of at least 2, found 1"),
    "too few layer types": (
        {"layer_types": [F]},
        "layer_types = ['full_attention'] must name full_attention or sliding_attention for each of 2",
    ),
    "unknown layer type": (
        {"layer_types": [F, "linear_attention"]},
        "must name full_attention or sliding_attention for each of 2 layers",
    ),
    "pattern too short": (
        {"layer_types": ..., "sliding_window_pattern": [True]},
        "sliding_window_pattern = [True] must have one true or false for each",
    ),
    "unknown rope": ({"rope_scaling": {"rope_type": "mrope"}}, "RoPE kind 'mrope' is not known (known: default, linear,"),
    "rope without its keys": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "RoPE kind 'llama3' needs low_freq_factor, high_freq_factor",
    ),
    "rope of an odd part": (
        {"partial_rotary_factor": 0.4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "RoPE rotates pairs: head_dim = 8 times partial_rotary_factor = 0.4 is 3",
    ),
    "llama3 without a middle": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        "low_freq_factor = 4.0 not below high_freq_factor = 4.0",
    ),
    "longrope with too few factors": (
        {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [1.0] * 3,
                "original_max_position_embeddings": 64,
            }
        },
        "RoPE kind 'longrope' has long_factor = [1.0, 1.0, 1.0]: it must be 4 positive numbers",
    ),
    "linear without factor": ({"rope_scaling": {"type": "linear"}}, "RoPE kind 'linear' needs factor"),
    "rope as a list": ({"rope_scaling": [1]}, "rope_scaling = [1] must be an object"),
    "two thetas": (
        {"rope_parameters": {"rope_theta": 5e5}},
        "rope_theta = 10000.0 contradicts rope_parameters.rope_theta = 500000.0",
    ),
    "two scalings": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "contradicts rope_scaling = {'type': 'linear', 'factor': 4.0}",
    ),
    "theta zero": ({"rope_theta": 0}, "rope_theta = 0 must be a positive number"),
    "a kind of layer without rope": (
        {"rope_theta": ..., "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "rope_parameters has no entry for sliding_attention",
    ),
    "heads": ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu': drafters use silu"),
    "eps": ({"rms_norm_eps": -1}, "rms_norm_eps = -1 must be a positive number"),
    "causal as text": ({"is_causal": "no"}, "is_causal = 'no' must be true or false"),
    "bias as text": ({"attention_bias": "yes"}, "attention_bias = 'yes' must be true or false"),
    "dflash_config as a list": ({"dflash_config": [1]}, "dflash_config must be an object, found [1]"),
    "layers as a flag": ({"num_hidden_layers": True}, "num_hidden_layers = True must be a positive whole number"),
    "layers beyond sense": ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000 is beyond any drafter's (1024)"),
    "block beyond sense": ({"block_size": 1025}, "block_size = 1025 is beyond any drafter's (1024)"),
    "eps without end": ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf must be a positive number"),
    "theta without end": ({"rope_theta": float("inf")}, "rope_theta = inf must be a positive number"),
    "soft-cap that is no number": (
        {"dflash_config__final_logit_softcapping": float("nan")},
        "dflash_config.final_logit_softcapping = nan must be a positive number",
    ),
    "architectures of numbers": ({"architectures": [5]}, "architectures = [5] must be a list of names"),
    "model type as a number": ({"model_type": 5}, "model_type = 5 must be a name"),
    "quantization as text": ({"quantization": "four"}, "quantization = 'four' must be an object"),
    "quantization_config as a number": ({"quantization_config": 4}, "quantization_config = 4 must be an object"),
    "no part rotates": ({"partial_rotary_factor": 0}, "RoPE kind 'default' has partial_rotary_factor = 0"),
    "non-causal as text": ({"sliding_window_non_causal": "yes"}, "sliding_window_non_causal = 'yes' must be true or false"),
    "max_window_layers": ({"max_window_layers": "2"}, "max_window_layers = '2' must be a whole number, 0 or more"),
    "two multipliers": (
        {"dflash_config__output_multiplier": 0.5, "logit_scale": 0.25},
        "dflash_config.output_multiplier = 0.5 contradicts logit_scale = 0.25",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_faulty_config_is_refused_by_key_and_value(name):
    changes, message = REFUSED[name]
    text = refusal(changed(**changes), "drafter/config.json")
    assert message in text
    assert text.startswith("drafter/config.json is not a DFlash drafter's config as published; ")
    assert text.endswith("Fix these keys or use the config.json that came with the weights.")


def test_all_faults_are_in_one_message():
    text = refusal(
        changed(
            block_size=1,
            dflash_config__mask_token_id=99,
            dflash_config__target_layer_ids=...,
            rope_theta=...,
            num_key_value_heads=3,
        )
    )
    for fault in (
        "block_size = 1",
        "mask_token_id = 99",
        "dflash_config.target_layer_ids or target_layer_ids",
        "rope_theta",
        "num_attention_heads = 4",
    ):
        assert fault in text
    assert text.count(";") == 5


def test_a_config_that_is_no_object_is_refused():
    assert "holds a list; it must hold a JSON object" in refusal([1, 2])


@pytest.mark.parametrize("config", [{}, {"model_type": "qwen3"}, {"architectures": "DFlashDraftModel"}, {"architectures": []}])
def test_an_empty_config_lists_what_is_missing_and_does_not_crash(config):
    text = refusal(config)
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "block_size or",
        "mask_token_id or",
        "target_layer_ids or",
    ):
        assert key in text
    assert text.count("is missing") >= 7


ODD = (None, -1, 0, 1, 7, 1.5, "x", True, [], [1], ["x"], [[1]], {}, {"x": 1}, float("nan"), float("inf"), 1 << 40, 10**30)
EVERY_KEY = sorted({place.replace(".", "__") for places in _SPELLINGS.values() for place in places}) + [
    "architectures",
    "model_type",
    "dflash_config",
    "is_causal",
    "dflash_config__causal",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_parameters__rope_type",
    "rope_parameters__full_attention",
    "rope_scaling__factor",
    "rope_scaling__type",
    "rope_scaling__rope_theta",
    "partial_rotary_factor",
    "quantization",
]


@pytest.mark.parametrize("key", EVERY_KEY)
def test_an_odd_value_of_a_key_is_taken_or_refused_and_never_another_error(key):
    base = changed(rope_scaling={"type": "linear", "factor": 2.0}) if key.startswith("rope_scaling__") else None
    for value in ODD:
        try:
            config = read(changed(base, **{key: value}))
        except ConfigError as error:
            assert "config.json" in str(error)
        else:
            # What was taken can be built: no odd value waits for the layers.
            if not config.unsupported:
                Drafter(config)


@pytest.mark.parametrize(
    "changes,message",
    [
        (
            {"rope_scaling": {"type": "linear", "factor": "4"}},
            "RoPE kind 'linear' has factor = '4': these must be positive numbers",
        ),
        ({"partial_rotary_factor": 1.5}, "has partial_rotary_factor = 1.5: these must be positive numbers, a part at most 1"),
        ({"rope_scaling": {"type": ["yarn"]}}, r"RoPE kind ['yarn'] is not known"),
    ],
)
def test_rope_numbers_are_checked(changes, message):
    assert message in refusal(changed(**changes))


SPECULATORS = {
    "speculators_model_type": "dflash",
    "transformer_layer_config": {
        k: v for k, v in raw_config().items() if k not in ("architectures", "block_size", "dflash_config")
    },
    "aux_hidden_state_layer_ids": [1, 3],
    "mask_token_id": 3,
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]},
}


def test_a_speculators_config_is_flattened():
    c = read(SPECULATORS)
    assert (c.architecture, c.block_size, c.target_layer_ids, c.hidden_size) == ("DFlashDraftModel", 5, (0, 2), 24)
    assert c.causal == (True, False) and read(SPECULATORS | {"sliding_window_non_causal": True}).causal == (False, False)


@pytest.mark.parametrize(
    "named", [{"speculators_model_type": "dflash2"}, {"speculators_config": {"algorithm": "dflash2"}}], ids=str
)
def test_a_dflash_2_drafter_in_speculators_nesting_is_the_flat_one(named):
    second = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 4}
    nested = DrafterConfig.from_dict(SPECULATORS | {"block_size": 5} | named | second | {"is_causal": False})
    layer = SPECULATORS["transformer_layer_config"]
    flat = {
        **layer,
        **{k: v for k, v in SPECULATORS.items() if k not in ("transformer_layer_config", "speculators_config")},
        **second,
    }
    del flat["speculators_model_type"]
    taps = [i - 1 for i in flat.pop("aux_hidden_state_layer_ids")]
    flat |= {
        "architectures": ["DFlash2DraftModel"],
        "target_layer_ids": taps,
        "is_causal": False,
        "block_size": nested.block_size,
    }
    right = DrafterConfig.from_dict(flat)
    # Where the last layer is tapped hangs on who packed it, and is said by neither.
    told = [field for field in vars(right) if field not in ("read_from", "unread")]
    assert {field: getattr(nested, field) for field in told} == {field: getattr(right, field) for field in told}


@pytest.mark.parametrize("key", [*SPECULATORS, "speculators_config__proposal_methods", "block_size", "draft_vocab_size"])
def test_an_odd_value_in_a_speculators_config_is_taken_or_refused(key):
    for value in ODD:
        try:
            read(changed(SPECULATORS, **{key: value}))
        except ConfigError as error:
            assert "config.json" in str(error)


def test_keys_of_dflash_config_that_nothing_reads_are_listed():
    c = read(changed(dflash_config__conv_activation="silu", dflash_config__causal=False, dflash_config__use_swa=False))
    assert c.unread == ("conv_activation",)


def test_keys_that_concern_a_drafter_and_that_nothing_reads_are_named_wherever_they_stand():
    assert read(changed(runtime_block_size=4)).unread == ("runtime_block_size",)
    assert read(changed(dflash_config__runtime_block_size=4)).unread == ("runtime_block_size",)
    assert read(changed(num_speculative_tokens=4)).unread == ("num_speculative_tokens",)
    assert read(changed(dflash_version=3, attention_dropout=0.0)).unread == ("dflash_version",)
    assert read(changed(runtime_block_size=None)).unread == ()
    assert read(changed(runtime_block_size=4)).block_size == read(raw_config()).block_size and read(raw_config()).unread == ()


@pytest.mark.parametrize("architecture", ["DFlashDraftModel", "DFlash2DraftModel", None])
@pytest.mark.parametrize("place", [{"partial_rotary_factor": 0.25}, {"rope_parameters": {"partial_rotary_factor": 0.25}}])
def test_the_published_architectures_rotate_whole_heads_whatever_part_their_target_rotates(architecture, place):
    base = raw_config(architectures=[architecture] if architecture else None)
    if architecture == "DFlash2DraftModel":
        base["dflash_config"] |= {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": 2}
    if "rope_parameters" in place:
        place = {"rope_parameters": {"rope_theta": base.pop("rope_theta"), **place["rope_parameters"]}}
    with_key, without = (
        read({**base, **place}),
        read({**base, **{k: {"rope_theta": 1e4} for k in place if k == "rope_parameters"}}),
    )
    assert [rope.dims for rope in with_key.ropes] == [with_key.head_dim] * 2 and with_key.ropes == without.ropes
    assert "partial_rotary_factor" in with_key.unread and "partial_rotary_factor" not in without.unread


def test_a_muse_assistant_without_its_architecture_is_read_as_one_and_never_as_causal():
    c = read(changed(architectures=..., model_type="muse_glimmer_assistant", sliding_window=16))
    assert c.architecture == "MuseGlimmerAssistantModel" and c.causal == (False, False) and c.windows == (16, 16)
    assert read(changed(architectures=..., model_type="qwen3")).architecture == ""
