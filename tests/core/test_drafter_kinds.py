"""Domino, DFlare, DSpark for Gemma 4 and with gates for Qwen 3.5: every drafted id is NumPy's, by their authors' formulas."""

import json

import mlx.core as mx
import numpy as np
import pytest
import reference
import reference_kinds
from kit import flat, grow, ids_of, plant, raw_config, rounds_of, run, tiny_target

from dflash_mlx import convert, load_drafter
from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import ConfigError, ConversionError
from dflash_mlx.loading import make_drafter
from dflash_mlx.models import dflare, dfly, domino, dspark, dspark_layers, mla
from dflash_mlx.models.architectures import ARCHITECTURES, build_drafter
from dflash_mlx.models.target import Target

H, V, N = 24, 61, 4
PROMPT = [5, 9, 33, 7, 20, 41, 2, 8, 50]
FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": None}
MARKOV = {"markov_rank": 7, "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}
DEEPSPEC = {"dflash_config": None, "mask_token_id": 3, "target_layer_ids": [0, 2], "block_size": N, "num_anchors": 64, **MARKOV}


def domino_config(shift, prefix):
    nested = {"mask_token_id": 3, "target_layer_ids": [0, 2], "projector_type": "domino", "emb_dim": 10, "gru_hidden_dim": 14}
    nested |= {"shift_label": shift, "pure_draft_prefix_len": prefix}
    return raw_config(H, V, **FULL, architectures=["DominoDraftModel"], dflash_config=nested)


GEMMA = {
    **DEEPSPEC, "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 6, "global_head_dim": 16, "num_global_key_value_heads": 1, "final_logit_softcapping": 5.0, "rope_theta": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}  # fmt: skip
QWEN35 = {
    **DEEPSPEC, "architectures": ["Qwen35DSparkModel"], "model_type": "qwen3_5", "enable_qwen35_gated_q_proj": True,
    "partial_rotary_factor": 0.5, "rope_theta": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_interleaved": True},
}  # fmt: skip
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7, "head_dim": None}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
SECOND = {"conv_kernel_size": 2, "conv_group_size": 6, "selector_rank": 5, "selector_top_k": 4, "block_size": N + 1}


def latent_config(nested=None, **changes):
    """SpecForge's: a mode of the nested object, its sizes beside the others."""
    nested = {"mask_token_id": 3, "target_layer_ids": [0, 2], "attention_mode": "mla", **(nested or {})}
    return raw_config(H, V, **({**FULL, **LATENT, "dflash_config": nested} | changes))


# name: (config, the reference's class)
KINDS = {
    "MLA": (latent_config(rope_theta=None, rope_parameters=YARN), reference_kinds.Latent),
    "MLA, queries through one matrix, halves as pairs": (
        latent_config(q_lora_rank=None, rope_interleave=False),
        reference_kinds.Latent,
    ),
    "MLA, DFlash 2": (
        latent_config(SECOND, architectures=["DFlash2DraftModel"], block_size=None, is_causal=False),
        reference_kinds.Latent,
    ),
    "MLA, DSpark": (
        latent_config(MARKOV | {"projector_type": "dspark"}, architectures=["DSparkDraftModel"], block_size=N),
        reference_kinds.Latent,
    ),
    "MLA, Domino": (
        domino_config(True, 1) | LATENT | {"dflash_config": domino_config(True, 1)["dflash_config"] | {"attention_mode": "mla"}},
        reference_kinds.Latent,
    ),
    "Domino, a row drafts the token behind it": (domino_config(True, 1), reference_kinds.Kind),
    "Domino, a row drafts its own token": (domino_config(False, 0), reference_kinds.Kind),
    "DFlare": (raw_config(H, V, **FULL, architectures=["QwenDFlareDraftModel"]), reference_kinds.DFlare),
    "DFly": (
        raw_config(
            H,
            V,
            **FULL,
            architectures=["Qwen3DFlyModel"],
            dflash_config=None,
            mask_token_id=3,
            target_layer_ids=[0, 2],
            num_target_layers=2,
            target_num_hidden_layers=4,
            hidden_correction_intermediate_size=15,
        ),
        reference_kinds.DFly,
    ),
    "Bonsai": (
        raw_config(
            H,
            V,
            **FULL,
            **DEEPSPEC,
            architectures=["Qwen3DSparkModel"],
            log_snr_conditioning=True,
            min_log_snr=-9.0,
            max_log_snr=9.0,
        ),
        reference_kinds.Kind,
    ),
    "Gemma 4": (raw_config(H, V, **FULL, **GEMMA, attention_k_eq_v=True), reference_kinds.Gemma4),
    "Gemma 4, values of their own": (raw_config(H, V, **FULL, **GEMMA, attention_k_eq_v=False), reference_kinds.Gemma4),
    "Qwen 3.5": (raw_config(H, V, **FULL, **QWEN35), reference_kinds.Qwen35),
    "Qwen 3.5, plain norms": (raw_config(H, V, **FULL, **(QWEN35 | {"model_type": "qwen3_5_text"})), reference_kinds.Qwen35),
}


def filed(raw, seed=5):
    """Random tensors under the names and in the shapes of the authors' files."""
    config = DrafterConfig.from_dict(raw)
    shapes = {"confidence_head.proj.weight": (1, H + 7), "confidence_head.proj.bias": (1,)} if config.markov_rank else {}
    if raw["architectures"] == ["Gemma4DSparkModel"]:
        shapes |= {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}
    mx.random.seed(seed)
    weights = flat(grow(build_drafter(config, shapes), 3.0))
    weights = {name: v if v.ndim > 1 else v + 0.4 * mx.random.normal(v.shape) for name, v in weights.items()}
    heads, D = raw["num_attention_heads"], raw.get("head_dim")
    for name in [name for name in weights if ".q_gate." in name]:
        query = name.replace("q_gate", "q_proj")
        both = [weights[query].reshape(heads, D, H), weights.pop(name).reshape(heads, D, H)]
        weights[query] = mx.concatenate(both, axis=1).reshape(2 * heads * D, H)
    return weights


def written(path, raw, weights):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    return str(path)


def by_numpy(model, raw, kind, weights, line, at):
    numbers = {name: np.array(value.astype(mx.float32), dtype=np.float64) for name, value in weights.items()}
    features = np.array(Target(model, (0, 2))(mx.array([line[:at]])).features[0], dtype=np.float64)
    embedding = numbers.get("embed_tokens.weight", np.array(model.model.embed_tokens.weight, dtype=np.float64))
    head = numbers.get("lm_head.weight", np.array(model.lm_head.weight, dtype=np.float64))
    nested = raw.get("dflash_config") or {}
    is_dspark, gemma = "markov_rank" in raw | nested, kind is reference_kinds.Gemma4
    rows = N if is_dspark else N + 1
    block = embedding[[line[at], *[3] * (rows - 1)]] * (H**0.5 if gemma else 1.0)
    if "log_snr_conditioning" in raw:
        block = block + reference_kinds.noise_levels(numbers, raw, len(block))
    hidden = kind(raw, numbers).hidden(features, block)
    if is_dspark:
        logits = hidden @ head.T
        logits = np.tanh(logits / 5.0) * 5.0 if gemma else logits
        return reference.markov_rows(numbers, "vanilla", hidden, logits, line[at], lambda _, row: row.argmax())[0]
    if "prefix_gru.weight_ih_l0" in numbers:
        return reference_kinds.domino_path(raw, numbers, embedding, hidden, head, line[at])
    if kind is reference_kinds.DFly:
        return kind(raw, numbers).path(hidden[1:], embedding, head, line[at])
    if "selector_rank" in nested:
        config = DrafterConfig.from_dict(raw)
        return reference.selected(numbers, config, hidden[1:], hidden[1:] @ head.T, line[at])
    return (hidden[1:] @ head.T).argmax(-1).tolist()


@pytest.mark.parametrize("name", KINDS)
def test_every_drafted_id_of_a_kind_is_numpys(tmp_path, name):
    (raw, kind), model = KINDS[name], tiny_target()
    weights = filed(raw)
    plain = ids_of(run(model, None, PROMPT, 6))
    convert(written(tmp_path / "published", raw, weights), str(tmp_path / "out"))
    for folder in ("published", "out"):
        drafter, at = load_drafter(str(tmp_path / folder), model), len(PROMPT)
        got = run(model, drafter, PROMPT, 6, block_size=N + 1, prefill_step_size=4)
        assert ids_of(got) == plain
        for drafted, accepted, _ in rounds_of(got):
            line = [*PROMPT, *plain]
            if at < len(line):
                assert drafted == by_numpy(model, raw, kind, weights, line, at), (folder, at)
            at += accepted + 1
    with pytest.raises(ConversionError, match="has no place|no place"):
        convert(str(tmp_path / "published"), str(tmp_path / "gguf"), to="gguf")


SHIFTED, OWN = [name for name in KINDS if name.startswith("Domino")]
LATENT_ATTENTION = mla.LatentAttention
DOMINO, GRU = domino.DominoDrafter, domino.PrefixGRU
GEMMA4, DFLARE = dspark_layers.Gemma4Attention, dflare.DFlareAttention
FAULTS = {
    "the update gate turned round": (SHIFTED, GRU, "__call__", "(1 - update) * new", "update * new"),
    "no reset gate": (OWN, GRU, "__call__", "mx.sigmoid(reset + reset_h) * new_h", "new_h"),
    "the last row not left out": (SHIFTED, DOMINO, "mask_rows", "if self.config.shift_label", "if False"),
    "a correction from the first slot on": (
        SHIFTED,
        DOMINO,
        "correction",
        "slot < self.config.pure_draft_prefix_len",
        "slot < 0",
    ),
    "the unrotated part not scaled under YaRN": ("MLA", mla, "_magnitude", "if all_dim and factor > 1", "if False"),
    "keys of the values' columns": (
        "MLA",
        LATENT_ATTENTION,
        "cached_kv",
        "both[..., : self.nope], turned",
        "both[..., self.wide :], turned",
    ),
    "no norm of the latent": ("MLA", LATENT_ATTENTION, "cached_kv", "self.kv_a_layernorm(latent)", "latent"),
    "queries turned from their first part on": (
        "MLA",
        LATENT_ATTENTION,
        "queries",
        "self.rope(q[..., self.nope :], offset=offset)",
        "self.rope(q[..., : self.turned], offset=offset)",
    ),
    "one mean of the taps for all layers": ("DFlare", dflare.DFlareLayer, "own_context", "self.layer]", "0]"),
    "the context by the block's matrices": ("DFlare", DFLARE, "cached_kv", "self.k_proj_target(x)", "self.k_proj(x)"),
    "the anchor before every slot": ("DFly", dfly.DFlyDrafter, "_walk", "before[:, None]", "anchor[:, None]"),
    "the mean in the projection's place": ("DFly", dfly.DFlyDrafter, "context", "self.fc(features)[:, :, None] + ", ""),
    "the anchor as noisy as a mask": ("Bonsai", dspark.LogSnrEmbed, "__call__", "mx.arange(rows) == 0", "mx.arange(rows) < 0"),
    "values without a norm": ("Gemma 4", GEMMA4, "cached_kv", "mx.fast.rms_norm(v, None, self.eps)", "v"),
    "no number behind a layer": ("Gemma 4", dspark_layers.Gemma4Layer, "sublayers", "h * self.layer_scalar", "h"),
    "silu": ("Gemma 4, values of their own", dspark_layers.Gemma4MLP, "__call__", "nn.gelu_approx", "nn.silu"),
    "no gates": ("Qwen 3.5", dspark_layers.GatedAttention, "gate_output", "out * mx", "out + 0 * mx"),
    "norms as they are stored": ("Qwen 3.5", dspark_layers.OffsetRMSNorm, "__call__", "1.0 + self", "0.0 + self"),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_the_drafted_ids(tmp_path, monkeypatch, fault):
    name, owner, function, old, new = FAULTS[fault]
    (raw, kind), model = KINDS[name], tiny_target()
    weights = filed(raw)
    source = written(tmp_path / "published", raw, weights)
    plant(monkeypatch, owner, function, old, new)
    drafter, features = load_drafter(source, model), Target(model, (0, 2))(mx.array([PROMPT])).features
    for anchor in range(V):
        ids = drafter.draft(mx.array([anchor]), features, drafter.make_cache(), 0, N + 1)
        if ids.tolist() != [by_numpy(model, raw, kind, weights, [*PROMPT, anchor], len(PROMPT))]:
            return
    raise AssertionError(f"{fault}: every draft is right all the same")


SPELLINGS = {
    "DFlash's name, Domino's projector": (domino_config(True, 1) | {"architectures": ["DFlashDraftModel"]}, "DominoDraftModel"),
    "another fork's name for DeepSpec's layers": (
        raw_config(H, V, **FULL, **DEEPSPEC, architectures=["Qwen35DSparkModel"], model_type="qwen3_5_text"), "DSparkDraftModel",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_kind_is_told_by_what_it_has(name):
    raw, architecture = SPELLINGS[name]
    config = DrafterConfig.from_dict(raw)
    assert config.architecture == architecture in ARCHITECTURES and config.unsupported == ()


REFUSED = {
    "a gate behind latent attention": (
        latent_config({"mla_use_output_gate": True}), "dflash_config.mla_use_output_gate = True",
    ),
    "latent attention of Laguna": (
        latent_config(architectures=["DFlashLagunaForCausalLM"]), "dflash_config.attention_mode = 'mla'",
    ),
    "another mode of attention": (latent_config({"attention_mode": "kda"}), "dflash_config.attention_mode = 'kda'"),
    "no gates and norms less one": (QWEN35 | {"enable_qwen35_gated_q_proj": None}, "without enable_qwen35_gated_q_proj"),
    "gates under another name": (QWEN35 | {"architectures": ["Qwen3DSparkModel"]}, "enable_qwen35_gated_q_proj = True"),
    "hidden_size that counts all taps": (
        {"architectures": ["DFlareDraftModel"], "draft_hidden_size": H}, "draft_hidden_size = 24",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_of_a_kind_is_refused_by_name(name):
    changes, message = REFUSED[name]
    raw = {k: v for k, v in (raw_config(H, V, **FULL) | changes).items() if v is not None}
    with pytest.raises(ConfigError, match=message):
        make_drafter(DrafterConfig.from_dict(raw), {}, tiny_target())


def test_a_trainers_own_names_are_read(tmp_path):
    """AngelSpec files `context_proj`, `context_norm` and `final_norm`."""
    (raw, _), model = KINDS["DFly"], tiny_target()
    weights = filed(raw)
    own = {"fc.weight": "context_proj.weight", "hidden_norm.weight": "context_norm.weight", "norm.weight": "final_norm.weight"}
    drafter = load_drafter(written(tmp_path / "own", raw, {own.get(k, k): v for k, v in weights.items()}), model)
    assert all(mx.array_equal(value, weights[name]) for name, value in flat(drafter).items())


def test_early_specforge_heads_are_found_under_their_prefix(tmp_path):
    raw, model = domino_config(True, 1), tiny_target()
    weights = filed(raw)
    old = {f"logit_head.{k}" if k.startswith(("prefix_gru", "embed_proj")) else k: v for k, v in weights.items()}
    drafter = load_drafter(written(tmp_path / "old", raw, old), model)
    assert mx.array_equal(drafter.prefix_gru.weight_hh_l0, weights["prefix_gru.weight_hh_l0"])
