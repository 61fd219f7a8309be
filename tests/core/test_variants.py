"""What single publishers add: sinks, scaled values, gates, norms, a vector for masks, taps of both ends; every id is NumPy's."""

import json
import zipfile

import mlx.core as mx
import numpy as np
import pytest
import reference
from kit import flat, full_forward, grow, ids_of, raw_config, rounds_of, run, tiny_target

from dflash_mlx import convert, load_drafter
from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import CheckpointError, ConfigError, PairError
from dflash_mlx.loading import make_drafter
from dflash_mlx.models.architectures import build_drafter
from dflash_mlx.models.target import Target

H, V, LAYERS = 24, 61, 4
PROMPT = [5, 9, 33, 7, 20, 41, 2, 8, 50, 11, 30, 17]


def tensors(raw, seed=5):
    mx.random.seed(seed)
    weights = flat(grow(build_drafter(DrafterConfig.from_dict(raw), {}), 3.0))
    # Vectors differ from one and from zero: a norm or a sink that is left out shows.
    spread = lambda name: 6.0 if "sink" in name else 0.6  # noqa: E731
    return {name: v if v.ndim > 1 else v + spread(name) * mx.random.normal(v.shape) for name, v in weights.items()}


def make(raw, weights, model):
    return make_drafter(DrafterConfig.from_dict(raw), dict(weights), model)


def states(model, ids):
    """Hidden states as transformers lists them: the embedding, each layer's output, the last one after the final norm."""
    gave = full_forward(model, ids)
    listed = [model.model.embed_tokens(mx.array(ids)), *gave[:-1], model.model.norm(gave[-1])]
    return [np.array(h, dtype=np.float64) for h in listed], np.array(gave[-1], dtype=np.float64)


def check(raw, weights, model, hidden_ids, last=None, mask=None, n=10):
    """Every drafted id of a run is NumPy's from `hidden_ids` of the list of hidden states; last: in place of the last one."""
    drafter = make(raw, weights, model)
    got = run(model, drafter, PROMPT, n, block_size=5, prefill_step_size=5)
    plain = run(model, None, PROMPT, n)
    assert ids_of(got) == ids_of(plain)
    check_rounds(drafter, weights, model, [*PROMPT, *ids_of(plain)], rounds_of(got), hidden_ids, last, mask)
    return drafter


def check_rounds(drafter, weights, model, line, rounds, hidden_ids, last=None, mask=None):
    numbers = {name: np.array(value.astype(mx.float32), dtype=np.float64) for name, value in weights.items()}
    embedding = np.array(model.model.embed_tokens.weight, dtype=np.float64)
    head, at = np.array(model.lm_head.weight, dtype=np.float64), len(PROMPT)
    for drafted, accepted, _ in rounds:
        if at >= len(line):
            break
        listed, raw_last = states(model, line[:at])
        listed[-1] = raw_last if last == "before" else listed[-1]
        block = embedding[[line[at], *[drafter.config.mask_token_id] * 4]]
        if mask is not None:
            block[1:] = mask
        features = np.concatenate([listed[i] for i in hidden_ids], axis=-1)
        hidden = reference.hidden_states(numbers, drafter.config, features, block)[1:]
        assert drafted == (hidden @ head.T).argmax(-1).tolist(), at
        at += accepted + 1


VARIANTS = {
    "sinks": {"dflash_config": {"attention_sink_bias": True}},
    "sinks, all sliding": {"attention_sink_bias": True, "layer_types": ["sliding_attention"] * 2, "sliding_window": 6},
    "scaled values": {"dflash_config": {"attention_value_scale": 0.612}},
    "sinks and scaled values": {"dflash_config": {"attention_sink_bias": True, "attention_value_scale": 0.612}},
    "Laguna": {"architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna", "is_causal": True},
    "Laguna by its model type": {"model_type": "laguna", "layer_types": ["sliding_attention"] * 2, "sliding_window": 6},
}


def variant(name):
    changes = dict(VARIANTS[name])
    raw = raw_config(H, V)
    raw["dflash_config"] |= changes.pop("dflash_config", {})
    return raw | changes


@pytest.mark.parametrize("name", VARIANTS)
def test_every_drafted_id_of_a_variant_is_numpys(name):
    model, raw = tiny_target(), variant(name)
    weights = tensors(raw)
    drafter = check(raw, weights, model, (1, 3))
    # It matters: without what the variant adds other ids are drafted.
    bare = {k: v for k, v in weights.items() if not any(part in k for part in ("sink", "g_proj", "aux_hidden_norms"))}
    plain = make(raw_config(H, V) | {k: raw[k] for k in ("layer_types", "sliding_window", "is_causal") if k in raw}, bare, model)
    features = Target(model, (0, 2))(mx.array([PROMPT])).features
    drafted = [d.draft(mx.array([7]), features, d.make_cache(), 0, 12).tolist() for d in (drafter, plain)]
    assert drafted[0] != drafted[1]


def test_a_fused_projection_is_read_as_three(tmp_path):
    """Laguna's files hold rows of q, k and v in one matrix."""
    model, raw = tiny_target(), variant("Laguna")
    weights = tensors(raw)
    fused = {k: v for k, v in weights.items() if not any(f".{part}_proj." in k for part in "qkv")}
    for layer in range(2):
        parts = [weights[f"layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        fused[f"layers.{layer}.self_attn.qkv_proj.weight"] = mx.concatenate(parts)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), fused)
    expected = rounds_of(run(model, make(raw, weights, model), PROMPT, 8, block_size=5))
    assert rounds_of(run(model, load_drafter(str(tmp_path), model), PROMPT, 8, block_size=5)) == expected


# name: (changes, indices into transformers' list of hidden states, where the last one is taken)
TAPS = {
    "the embedding": ({"taps": (-1, 2)}, (0, 3), None),
    "the embedding beside the first layer": ({"taps": (0, -1)}, (1, 0), None),
    "the last layer, as transformers lists it": ({"taps": (1, 3)}, (2, 4), "after"),
    "the last layer before the norm": ({"taps": (1, 3), "last_tap": "before"}, (2, 4), "before"),
    "the last layer of a SpecForge drafter": (
        {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3], "attention_mode": "gqa"}}, (2, 4), "before",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAPS)
def test_taps_of_both_ends_are_those_that_the_packer_means(name):
    changes, listed, last = TAPS[name]
    model, raw = tiny_target(), raw_config(H, V, **changes)
    weights = tensors(raw)
    check(raw, weights, model, listed, last)
    if last:
        other = {"before": "after", "after": "before"}[last]
        with pytest.raises(AssertionError):
            check(raw | {"last_tap": other}, weights, model, listed, last)


def test_the_last_tap_can_be_said_where_it_is_loaded(tmp_path):
    model, raw = tiny_target(), raw_config(H, V, taps=(1, 3))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    weights = tensors(raw)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    for said, last in (("before", "before"), ("after", "after"), (None, "after")):
        drafter = load_drafter(str(tmp_path), model, last_tap=said)
        got = run(model, drafter, PROMPT, 6, block_size=5)
        line = [*PROMPT, *ids_of(got)]
        check_rounds(drafter, weights, model, line, rounds_of(got), (2, 4), last)
    with pytest.raises(ConfigError, match="the last tap is 'middle'; it must be before or after"):
        load_drafter(str(tmp_path), model, last_tap="middle")
    with pytest.raises(ConfigError, match="last_tap = 'middle' must be before or after"):
        DrafterConfig.from_dict(raw | {"last_tap": "middle"})


def test_the_last_tap_is_said_to_have_no_effect_where_the_last_layer_is_not_read(tmp_path):
    model, raw = tiny_target(), raw_config(H, V, taps=(0, 2))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors(raw))
    with pytest.warns(UserWarning, match=r"the last tap has no effect: the drafter reads layers \[0, 2\], not the last \(3\)"):
        load_drafter(str(tmp_path), model, last_tap="before")


def test_speculators_and_laguna_take_the_last_layer_before_its_norm():
    raw = {**raw_config(H, V), "model_type": "laguna"}
    packed = {k: v for k, v in raw.items() if k not in ("architectures", "dflash_config", "block_size", "model_type")}
    spec = {"speculators_model_type": "dflash", "transformer_layer_config": packed, "aux_hidden_state_layer_ids": [2, 4]}
    for given in (raw, spec | {"mask_token_id": 3, "block_size": 5}):
        assert DrafterConfig.from_dict(given).tapped_last == "before"
    assert DrafterConfig.from_dict(raw_config(H, V)).tapped_last == "after"


def torch_file(path, vector):
    """A .pt as PyTorch writes it: a zip, the numbers in a storage of their own. Reading its pickle would fail."""
    bits = np.array(vector.view(mx.uint16 if vector.itemsize == 2 else mx.uint32))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mask_embedding/data.pkl", b"not a pickle that anybody may load")
        archive.writestr("mask_embedding/data/0", bits.tobytes())
        archive.writestr("mask_embedding/version", b"3\n")


@pytest.mark.parametrize("kept", ["tensor", "safetensors", "pt", "pt in float32"])
def test_a_vector_for_masks_is_used_wherever_it_is_kept(tmp_path, kept):
    """XiaomiMiMo's: the target's own row of the mask token was never trained."""
    model = tiny_target()
    raw = raw_config(H, V)
    raw["dflash_config"]["mask_embedding"] = True
    vector, weights = (2 * mx.random.normal((H,), key=mx.random.key(3))).astype(mx.bfloat16), tensors(raw)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(raw))
    extra = {"mask_embedding": vector.astype(mx.float32)} if kept == "tensor" else {}
    mx.save_safetensors(str(tmp_path / "source" / "model.safetensors"), weights | extra)
    if kept == "safetensors":
        mx.save_safetensors(str(tmp_path / "source" / "mask_embedding.safetensors"), {"mask_embedding": vector})
    elif kept.startswith("pt"):
        torch_file(tmp_path / "source" / "mask_embedding.pt", vector.astype(mx.float32) if "float32" in kept else vector)
    drafter = load_drafter(str(tmp_path / "source"), model)
    got = run(model, drafter, PROMPT, 6, block_size=5)
    mask = np.array(vector.astype(mx.float32), dtype=np.float64)
    check_rounds(drafter, weights, model, [*PROMPT, *ids_of(got)], rounds_of(got), (1, 3), mask=mask)
    convert(str(tmp_path / "source"), str(tmp_path / "out"))
    assert rounds_of(run(model, load_drafter(str(tmp_path / "out"), model), PROMPT, 6, block_size=5)) == rounds_of(got)


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "npz", "npy", "bin", "pth"])
def test_a_file_for_masks_that_is_not_used_is_named(tmp_path, suffix):
    model, raw = tiny_target(), raw_config(H, V)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors(raw))
    file = tmp_path / f"mask_embedding.{suffix}"
    file.write_bytes(b"no vector")
    with pytest.warns(
        UserWarning, match=rf"mask_embedding.{suffix} (holds no vector of {H} numbers; it is not used|\(not safetensors)"
    ):
        load_drafter(str(tmp_path), model)
    if suffix == "safetensors":
        mx.save_safetensors(str(file), {"mask_embedding": mx.ones((H + 1,))})
        with pytest.warns(UserWarning, match="it is not used"):
            load_drafter(str(tmp_path), model)


@pytest.mark.parametrize("side", [False, True], ids=["tensor", "file"])
@pytest.mark.parametrize("value", [0.0, 1e-9, mx.nan])
def test_a_vector_for_masks_that_is_none_is_said(tmp_path, side, value):
    """Zeros draft next to nothing; no number is the drafter's fault, not a layer's."""
    model, raw, vector = tiny_target(), raw_config(H, V), {"mask_embedding": mx.full((H,), value)}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors(raw) | ({} if side else vector))
    if side:
        mx.save_safetensors(str(tmp_path / "mask_embedding.safetensors"), vector)
    if value != value:
        with pytest.raises(PairError, match="the drafter's own vector for mask slots has NaN or infinity. The drafter's files"):
            load_drafter(str(tmp_path), model)
        return
    with pytest.warns(UserWarning, match="the drafter's own vector for mask slots is (next to )?zero.*get the drafter's files"):
        load_drafter(str(tmp_path), model)


def test_a_missing_vector_for_masks_is_said():
    model, raw = tiny_target(), raw_config(H, V)
    weights = tensors(raw)
    raw["dflash_config"]["mask_embedding"] = True
    with pytest.raises(CheckpointError, match="missing mask_embedding, which the config says the drafter has"):
        make(raw, weights, model)


def test_a_muse_assistant_is_read_under_its_own_names(tmp_path):
    model = tiny_target()
    raw = raw_config(H, V, architectures=["MuseGlimmerAssistantModel"], model_type="muse_glimmer_assistant", layer_types=None)
    raw |= raw.pop("dflash_config")
    weights = tensors(raw)
    named = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {named.get(k, k): v for k, v in weights.items()})
    drafter = load_drafter(str(tmp_path), model)
    assert drafter.config.causal == (False, False) and drafter.config.windows == (11, 11)
    got = run(model, drafter, PROMPT, 6, block_size=5)
    check_rounds(drafter, weights, model, [*PROMPT, *ids_of(got)], rounds_of(got), (1, 3))


def test_a_whole_vocabulary_said_as_a_draft_vocabulary_needs_no_head():
    """Laguna's and MiniCPM's configs say it, and their files have no head."""
    raw = raw_config(H, V, draft_vocab_size=V)
    check(raw, tensors(raw), tiny_target(), (1, 3), n=4)
