"""The drafter's parts against plain references in numpy: rotations, masks, windows and the context cache."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from kit import flat, raw_config, tiny_drafter, tiny_target
from mlx_lm.models.cache import RotatingKVCache
from rows import tolerance

from dflash_mlx.config import DrafterConfig
from dflash_mlx.models.drafter import Drafter, block_mask
from dflash_mlx.models.rope import make_rope
from dflash_mlx.rollback import append_window

D, POSITIONS = 16, (0, 100, 5000)


# Rotations: written down from the papers and the published reference implementations, not from MLX code.


def base_frequencies(dims, theta):
    return theta ** (-np.arange(0, dims, 2) / dims)


def frequencies(kind, p, dims, theta, max_positions, length):
    """(radians a position [dims / 2], scale of the rotated part) for a sequence of `length` positions."""
    f = base_frequencies(dims, theta)
    if kind == "default":
        return f, 1.0
    if kind == "linear":
        return f / p["factor"], 1.0
    if kind == "dynamic":
        length = max(length, max_positions)
        grown = theta * (p["factor"] * length / max_positions - (p["factor"] - 1)) ** (dims / (dims - 2))
        return base_frequencies(dims, grown), 1.0
    if kind == "llama3":
        waves, original = 2 * math.pi / f, p["original_max_position_embeddings"]
        smooth = (original / waves - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
        smooth = np.clip(smooth, 0, 1)
        return (1 - smooth) * f / p["factor"] + smooth * f, 1.0
    if kind == "longrope":
        original = p["original_max_position_embeddings"]
        factors = p["long_factor"] if length > original else p["short_factor"]
        stretch = max_positions / original
        scale = p.get("attention_factor") or math.sqrt(1 + math.log(stretch) / math.log(original))
        return f / np.array(factors), scale
    assert kind == "yarn"
    factor, original = p["factor"], p["original_max_position_embeddings"]

    def dim_of(rotations):
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(p.get("beta_fast", 32)), dim_of(p.get("beta_slow", 1))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low or 0.001), 0, 1)

    def grow(m):
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    if p.get("attention_factor"):
        scale = p["attention_factor"]
    elif p.get("mscale") and p.get("mscale_all_dim"):
        scale = grow(p["mscale"]) / grow(p["mscale_all_dim"])
    else:
        scale = grow(1)
    return f * (1 - ramp) + f / factor * ramp, scale


def rotate(x, offset, rope, max_positions):
    """[..., L, D] rotated from position `offset` on, in float64."""
    x = np.array(x, dtype=np.float64)
    L, dims = x.shape[-2], rope.dims
    f, scale = frequencies(rope.kind, dict(rope.parameters), dims, rope.theta, max_positions, offset + L)
    angle = (offset + np.arange(L))[:, None] * f
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    out = x.copy()
    if rope.traditional:
        a, b = x[..., 0:dims:2], x[..., 1:dims:2]
        out[..., 0:dims:2], out[..., 1:dims:2] = a * cos - b * sin, a * sin + b * cos
    else:
        a, b = x[..., : dims // 2], x[..., dims // 2 : dims]
        out[..., : dims // 2], out[..., dims // 2 : dims] = a * cos - b * sin, a * sin + b * cos
    return out


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS = {
    "default": {},
    "theta": {"rope_theta": 5e5},
    "linear": {"rope_scaling": {"type": "linear", "factor": 8.0}},
    "llama3": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "yarn": {"rope_scaling": YARN},
    "yarn, betas": {"rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0}},
    "yarn, attention_factor": {"rope_scaling": {**YARN, "attention_factor": 1.7}},
    "yarn, mscale": {"rope_scaling": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}},
    "yarn, mscale alone": {"rope_scaling": {**YARN, "mscale": 0.7}},
    "yarn, truncate false": {"rope_scaling": {**YARN, "truncate": False}},
    "yarn, factor from positions": {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 128}},
    "longrope": {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)],
            "original_max_position_embeddings": 256,
        }
    },
    "longrope, attention_factor": {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 256,
            "attention_factor": 1.3,
        }
    },
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 3.0}},
    "partial": {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 1.5}},
    "traditional": {"is_neox_style": False},
    "traditional, linear, partial": {
        "is_neox_style": False,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "traditional longrope": {
        "is_neox_style": False,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)],
            "original_max_position_embeddings": 256,
        },
    },
    "traditional yarn": {"is_neox_style": False, "rope_scaling": YARN},
}


@pytest.mark.parametrize("offset", POSITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rotation_agrees_with_the_numpy_reference(kind, offset):
    config = DrafterConfig.from_dict(raw_config(head_dim=D, **{"max_position_embeddings": 2048, **KINDS[kind]}))
    rope = config.ropes[0]
    mx.random.seed(0)
    x = mx.random.normal((1, 2, 5, D))
    got = np.array(make_rope(rope, config.max_position_embeddings)(x, offset=offset))
    # float32 angles up to 5000 radians, each off by half a unit in the last place: 2.4e-4 radians.
    np.testing.assert_allclose(got, rotate(x, offset, rope, 2048), atol=2e-3, rtol=0)


def test_the_kinds_of_rotation_differ_from_each_other():
    mx.random.seed(0)
    x = mx.random.normal((1, 2, 5, D))
    seen = {}
    for kind, changes in KINDS.items():
        config = DrafterConfig.from_dict(raw_config(head_dim=D, **{"max_position_embeddings": 2048, **changes}))
        seen[kind] = rotate(x, 100, config.ropes[0], 2048)
    same = {(a, b) for a in seen for b in seen if a < b and np.abs(seen[a] - seen[b]).max() < 0.02}
    # One key of two has no effect, and up to max_position_embeddings dynamic is the default.
    assert same == {("yarn", "yarn, mscale alone"), ("default", "dynamic")}


# Masks and windows


def seen(K, C, causal, window):
    """Row by row: whether block row j sees context row c or block row i."""
    rows = []
    for j in range(K):
        context = [window is None or (C + j) - c < window for c in range(C)]
        rows.append(context + [i <= j or not causal for i in range(K)])
    return np.array(rows)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 2, 7, 11, 40])
@pytest.mark.parametrize("C", [0, 1, 5, 6, 10, 30])
@pytest.mark.parametrize("K", [2, 5, 16])
def test_a_block_row_sees_the_context_in_its_window_and_the_block(K, C, window, causal):
    mask = block_mask(K, C, causal, window)
    if mask is None:
        mask = np.ones((K, C + K), dtype=bool)
    elif isinstance(mask, str):
        assert mask == "causal"
        mask = np.tril(np.ones((K, C + K), dtype=bool), k=C)
    assert np.array_equal(np.array(mask), seen(K, C, causal, window))


def rows(*numbers):
    return mx.array(numbers, dtype=mx.float32).reshape(1, 1, -1, 1)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1, 1), (3, 1, 2, 5, 1), (12, 1, 1), (2, 0, 9, 0, 1), (4, 4, 4)])
def test_a_sliding_cache_keeps_its_last_rows_in_time_order(sizes):
    cache, n = RotatingKVCache(max_size=4), 0
    for size in sizes:
        new = mx.arange(n, n + size, dtype=mx.float32).reshape(1, 1, size, 1)
        keys, values = append_window(cache, new, new + 100)
        n += size
        expected = list(range(n))[-4:]
        assert keys.flatten().tolist() == expected and values.flatten().tolist() == [100 + i for i in expected]
        assert cache.offset == n and cache.size() == len(expected)


def test_a_sliding_cache_that_was_trimmed_forgets_the_trimmed_rows():
    cache = RotatingKVCache(max_size=8)
    append_window(cache, rows(0, 1, 2, 3, 4), rows(0, 1, 2, 3, 4))
    assert cache.trim(2) == 2
    keys, _ = append_window(cache, rows(7), rows(7))
    assert keys.flatten().tolist() == [0, 1, 2, 7] and cache.offset == 4


# The whole drafter


def reference_pass(drafter, block, features):
    """The drafter's pass with no cache: all context rows at once, masks from `seen`, float32 MLX ops written out."""
    weights, config = flat(drafter), drafter.config

    def rms(x, w):
        return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps) * w

    context = rms(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])[0]
    h, C, K = block[0], features.shape[1], block.shape[1]
    for n in range(config.num_hidden_layers):
        w = {k.removeprefix(f"layers.{n}."): v for k, v in weights.items() if k.startswith(f"layers.{n}.")}
        x = rms(h, w["input_layernorm.weight"])
        both = mx.concatenate([context, x])

        def heads(x, name, w=w):
            y = x @ w[f"self_attn.{name}_proj.weight"].T + w.get(f"self_attn.{name}_proj.bias", 0)
            return y.reshape(x.shape[0], -1, config.head_dim).transpose(1, 0, 2)

        q = rms(heads(x, "q"), w["self_attn.q_norm.weight"])
        k = rms(heads(both, "k"), w["self_attn.k_norm.weight"])
        v = heads(both, "v")
        q = mx.array(rotate(q, C, config.ropes[n], config.max_position_embeddings), dtype=mx.float32)
        k = mx.array(rotate(k, 0, config.ropes[n], config.max_position_embeddings), dtype=mx.float32)
        group = config.num_attention_heads // config.num_key_value_heads
        k, v = mx.repeat(k, group, axis=0), mx.repeat(v, group, axis=0)
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(config.head_dim)
        mask = mx.array(seen(K, C, config.causal[n], config.windows[n]))
        weights_ = mx.softmax(mx.where(mask, scores, -mx.inf), axis=-1)
        out = (weights_ @ v).transpose(1, 0, 2).reshape(K, -1)
        h = h + out @ w["self_attn.o_proj.weight"].T + w.get("self_attn.o_proj.bias", 0)
        x = rms(h, w["post_attention_layernorm.weight"])
        gate = x @ w["mlp.gate_proj.weight"].T
        h = h + (gate * mx.sigmoid(gate) * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return rms(h, weights["norm.weight"])[None]


LAYOUTS = {
    "sliding and full": {},
    "causal key": {"is_causal": True},
    "not causal": {"is_causal": False, "layer_types": ["sliding_attention"] * 2},
    "bias": {"attention_bias": True, "layer_types": ["full_attention"] * 2},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads": {"num_key_value_heads": 4},
    "heads wider than H": {"head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3},
    "eps": {"rms_norm_eps": 1e-2},
    "three layers": {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "window shorter than a block": {"sliding_window": 3},
    # 23 rows and a block cross these lengths, where all earlier keys turn too.
    "dynamic beyond its positions": {"max_position_embeddings": 12, "rope_scaling": {"type": "dynamic", "factor": 3.0}},
    "longrope across its border": {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 14,
        }
    },
}


def varied_norms(drafter):
    """Norm weights and biases are ones and zeros at random start: give them other values, so that a missing one shows."""
    mx.random.seed(9)
    changed = [(k, v * mx.random.uniform(0.5, 1.5, v.shape) if "norm" in k else v) for k, v in flat(drafter).items()]
    changed = [(k, mx.random.normal(v.shape) if k.endswith("bias") else v) for k, v in changed]
    drafter.load_weights(changed)
    return drafter


@pytest.mark.parametrize("parts", [(23,), (1,) * 23, (9, 1, 4, 1, 1, 7)], ids=["at once", "row by row", "in parts"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_chained_calls_equal_a_pass_without_a_cache(name, parts):
    drafter = varied_norms(tiny_drafter(tiny_target(), factor=2.0, **LAYOUTS[name]))
    mx.random.seed(4)
    features, block = mx.random.normal((1, 23, 48)), mx.random.normal((1, 5, 24))
    cache, start = drafter.make_cache(), 0
    for size in parts:
        got = drafter(block, features[:, start : start + size], cache, start)
        start += size
        if size > 1 or start in (1, 12, 23):
            expected = reference_pass(drafter, block, features[:, :start])
            error = (mx.abs(got - expected).max() / mx.abs(expected).max()).item()
            # float32, other summation orders and a float64 rotation on one side.
            assert error < 1e-4, f"after {start} rows: {error:.1e} relative"
        assert [entry.offset for entry in cache] == [start] * len(drafter.layers)


def test_injected_rows_are_those_that_a_pass_would_have_added():
    drafter = tiny_drafter(tiny_target(), factor=2.0)
    mx.random.seed(4)
    features, block = mx.random.normal((1, 23, 48)), mx.random.normal((1, 5, 24))
    cache = drafter.make_cache()
    drafter.inject(features[:, :14], cache, 0)
    drafter.inject(features[:, 14:20], cache, 14)
    # Rows that are held already are skipped.
    drafter.inject(features[:, 17:21], cache, 17)
    got = drafter(block, features[:, 19:], cache, 19)
    expected = reference_pass(drafter, block, features)
    assert (mx.abs(got - expected).max() / mx.abs(expected).max()).item() < 1e-4
    assert [entry.offset for entry in cache] == [23, 23]


def test_a_sliding_layer_never_holds_more_than_its_window():
    drafter = tiny_drafter(tiny_target())
    cache = drafter.make_cache()
    for start in range(0, 500, 50):
        drafter.inject(mx.random.normal((1, 50, 48)), cache, start)
    assert cache[0].keys.shape[2] == 10 and cache[0].offset == cache[1].offset == 500


def test_a_block_leaves_no_row_of_its_own_in_the_context():
    drafter = tiny_drafter(tiny_target())
    mx.random.seed(4)
    features, cache = mx.random.normal((1, 9, 48)), drafter.make_cache()
    drafter(mx.random.normal((1, 5, 24)), features, cache, 0)
    clean = drafter.make_cache()
    drafter.inject(features, clean, 0)
    for a, b in zip(cache, clean, strict=True):
        assert a.offset == b.offset == 9
        for x, y in ((a.keys, b.keys), (a.values, b.values)):
            # float32, another number of rows in one product
            assert mx.allclose(x[:, :, :9], y[:, :, :9], rtol=tolerance(), atol=tolerance()).item()


def test_a_draft_is_the_targets_head_at_each_mask_slot():
    model = tiny_target()
    drafter = tiny_drafter(model, factor=2.0)
    mx.random.seed(4)
    features = mx.random.normal((1, 9, 48))
    got = drafter.draft(mx.array([17]), features, drafter.make_cache(), 0, 6)
    block = model.model.embed_tokens(mx.array([[17, 3, 3, 3, 3, 3]]))
    hidden = reference_pass(drafter, block, features)
    assert got.shape == (1, 5) and got.dtype == mx.int32
    assert got[0].tolist() == mx.argmax(model.lm_head(hidden[0, 1:]), axis=-1).tolist()
    surely, confidence = drafter.draft_with_confidence(mx.array([17]), features, drafter.make_cache(), 0, 6)
    assert surely.tolist() == got.tolist() and confidence.dtype == mx.float32
    # float32; another order of sums.
    assert mx.allclose(confidence[0], mx.softmax(model.lm_head(hidden[0, 1:]), axis=-1).max(axis=-1), rtol=1e-4).item()
    assert 0 < confidence.min().item() < confidence.max().item() <= 1


def test_parameter_names_are_the_published_tensor_names():
    drafter = Drafter(DrafterConfig.from_dict(raw_config(attention_bias=True)))
    layer = {
        "input_layernorm.weight": [24],
        "post_attention_layernorm.weight": [24],
        "self_attn.q_proj.weight": [32, 24],
        "self_attn.k_proj.weight": [16, 24],
        "self_attn.v_proj.weight": [16, 24],
        "self_attn.o_proj.weight": [24, 32],
        "self_attn.q_proj.bias": [32],
        "self_attn.k_proj.bias": [16],
        "self_attn.v_proj.bias": [16],
        "self_attn.o_proj.bias": [24],
        "self_attn.q_norm.weight": [8],
        "self_attn.k_norm.weight": [8],
        "mlp.gate_proj.weight": [36, 24],
        "mlp.up_proj.weight": [36, 24],
        "mlp.down_proj.weight": [24, 36],
    }
    expected = {"fc.weight": [24, 48], "hidden_norm.weight": [24], "norm.weight": [24]}
    expected |= {f"layers.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}
    assert {name: list(value.shape) for name, value in flat(drafter).items()} == expected


def test_the_borrowed_target_is_no_module_of_the_drafter():
    model = tiny_target()
    drafter = tiny_drafter(model)
    assert drafter.target is model and not {id(m) for m in model.modules()} & {id(m) for m in drafter.modules()}
    nn.quantize(drafter, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[1] % 32 == 0)
    assert not any(isinstance(m, nn.QuantizedLinear) for m in model.modules())
    assert any(isinstance(m, nn.QuantizedLinear) for m in drafter.modules())


def test_the_borrowed_target_is_no_parameter_of_the_drafter():
    model = tiny_target()
    drafter = tiny_drafter(model)
    assert drafter.target is model
    assert not any(value is other for value in flat(drafter).values() for other in flat(model).values())
