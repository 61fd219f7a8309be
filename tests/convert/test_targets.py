"""Targets of every spelling against reference outputs of transformers, loaded directly and converted."""

import json

import mlx.core as mx
import mlx_lm
import pytest
from convert_kit import (
    CONFORMANCE,
    DATA,
    FAMILIES,
    copy_checkpoint,
    family,
    golden_faults,
    in_float32,
    llama_config,
    llama_weights,
    mark_fp8,
    spelled_by_transformers_4,
    write_checkpoint,
)
from dflash_mlx.conversion import load_target
from dflash_mlx.conversion.configs import normalise_config, rope_for_layer_type
from dflash_mlx.conversion.families import FAMILIES as SPECIAL
from dflash_mlx.conversion.rope import expected_frequencies
from kit import TINY

from dflash_mlx import convert, generate, load
from dflash_mlx.errors import CheckpointError, ConfigError, ConversionError


@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_mlx_lm_reads_wrongly_meet_their_goldens(tmp_path, name):
    path, golden = family(name, tmp_path / "source")
    assert golden_faults(in_float32(path), golden) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_converted_families_meet_their_goldens_in_the_older_spelling_too(tmp_path, name):
    path, golden = family(name, tmp_path / "source", spelled_by_transformers_4)
    convert(str(path), str(tmp_path / "mlx"), dtype="float32")
    assert golden_faults(in_float32(tmp_path / "mlx"), golden) == []


@pytest.mark.parametrize("name", CONFORMANCE)
def test_reference_targets_meet_their_goldens(conformance, name):
    source = conformance / "targets" / name
    assert golden_faults(in_float32(source), mx.load(str(source / "golden.safetensors"))) == []


@pytest.mark.parametrize("rewrite", [None, spelled_by_transformers_4], ids=["transformers-5", "transformers-4"])
@pytest.mark.parametrize("name", CONFORMANCE)
@pytest.mark.quick(8)
def test_converted_reference_targets_meet_their_goldens(conformance, tmp_path, name, rewrite):
    source = copy_checkpoint(conformance / "targets" / name, tmp_path / "source", rewrite)
    done = convert(str(source), str(tmp_path / "mlx"), dtype="float32")
    assert done.record["parity"]["max_logit_difference"] <= 1e-3 * done.record["parity"]["max_logit"]
    golden = mx.load(str(conformance / "targets" / name / "golden.safetensors"))
    assert golden_faults(in_float32(tmp_path / "mlx"), golden) == []


def test_converting_a_converted_directory_changes_nothing(conformance, tmp_path):
    first = convert(str(conformance / "targets" / "gemma4_text"), str(tmp_path / "one"))
    second = convert(str(tmp_path / "one"), str(tmp_path / "two"))
    assert second.record["written"]["model.safetensors"]["sha256"] == first.record["written"]["model.safetensors"]["sha256"]
    assert second.record["parity"]["max_logit_difference"] == 0


# --- faults planted in a conversion: each must fail a golden ----------------------------------------------------------


def swapped_rows(weights):
    """Rows 0 and 1 of the first query projection exchanged, as a wrong RoPE permutation would."""
    name = next(n for n in weights if n.endswith("q_proj.weight"))
    order = mx.concatenate([mx.array([1, 0]), mx.arange(2, weights[name].shape[0])])
    weights[name] = weights[name][order]


def swapped_key_rows(weights):
    name = next(n for n in weights if n.endswith("k_proj.weight"))
    order = mx.concatenate([mx.array([1, 0]), mx.arange(2, weights[name].shape[0])])
    weights[name] = weights[name][order]


def shifted_vocabulary(weights):
    """Every token embedded as its neighbour."""
    name = next(n for n in weights if n.endswith("embed_tokens.weight"))
    weights[name] = mx.roll(weights[name], 1, axis=0)


def transposed_expert(weights):
    """One expert's down projection transposed where its shape allows (hidden = expert size in this family)."""
    name = next(n for n in weights if "experts" in n and weights[n].ndim == 3 and weights[n].shape[1] == weights[n].shape[2])
    weights[name] = weights[name].swapaxes(1, 2)


@pytest.mark.parametrize(
    "name, fault",
    [
        ("qwen3", swapped_rows),
        ("llama", swapped_key_rows),
        ("qwen2", shifted_vocabulary),
        ("gpt_oss", transposed_expert),
    ],
)
def test_faults_planted_in_the_weights_fail_the_golden(conformance, tmp_path, name, fault):
    source = conformance / "targets" / name
    weights = dict(mx.load(str(source / "model.safetensors")))
    fault(weights)
    write_checkpoint(tmp_path / "planted", json.loads((source / "config.json").read_text()), weights)
    faults = golden_faults(in_float32(tmp_path / "planted"), mx.load(str(source / "golden.safetensors")))
    assert any(f.startswith("logits") for f in faults)


def test_a_lost_rope_base_fails_the_golden(conformance, monkeypatch):
    from dflash_mlx.conversion import configs, targets

    source = conformance / "targets" / "smollm3"
    # without the derived keys, and without the audit that would put the base back
    monkeypatch.setattr(configs, "_fill_rope", lambda *_: None)
    monkeypatch.setattr(targets, "correct_rope", lambda *_: [])
    faults = golden_faults(in_float32(source), mx.load(str(source / "golden.safetensors")))
    assert any(f.startswith("logits") for f in faults)


def test_the_rope_audit_alone_restores_a_lost_base(conformance, monkeypatch):
    from dflash_mlx.conversion import configs

    source = conformance / "targets" / "smollm3"
    monkeypatch.setattr(configs, "_fill_rope", lambda *_: None)
    assert golden_faults(in_float32(source), mx.load(str(source / "golden.safetensors"))) == []


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_norms_formed_in_bfloat16_fail_the_golden(conformance, monkeypatch, name):
    from dflash_mlx.conversion import targets

    source = conformance / "targets" / name
    monkeypatch.setattr(targets, "_vectors_in_float32", lambda weights: weights)
    faults = golden_faults(in_float32(source), mx.load(str(source / "golden.safetensors")))
    assert any(f.startswith("logits") for f in faults)


def test_formed_norms_are_written_in_their_tensors_type_and_in_float32_with_every_bit(conformance, tmp_path):
    """Written wider than the matrices they would have mlx-lm and this package compute in float32 on a GPU."""
    source = conformance / "targets" / "qwen3_5"
    convert(str(source), str(tmp_path / "own"))
    convert(str(source), str(tmp_path / "wide"), dtype="float32")
    own, wide = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("own", "wide"))
    assert {value.dtype for value in own.values()} == {mx.bfloat16}
    name = next(name for name in own if name.endswith("input_layernorm.weight"))
    filed = next(v for k, v in mx.load(str(source / "model.safetensors")).items() if k.endswith(name.partition("layers")[2]))
    assert mx.array_equal(wide[name], 1 + filed.astype(mx.float32)) and mx.array_equal(own[name], wide[name].astype(mx.bfloat16))


# --- spellings --------------------------------------------------------------------------------------------------------


def logits_of(path):
    return in_float32(path)(mx.arange(20)[None])


@pytest.fixture
def plain(tmp_path):
    """(weights, logits) of a llama in the usual spelling."""
    weights = llama_weights()
    return weights, logits_of(write_checkpoint(tmp_path / "plain", llama_config(), weights))


def test_a_missing_model_prefix_changes_nothing(tmp_path, plain):
    weights, logits = plain
    bare = {name.removeprefix("model."): value for name, value in weights.items()}
    assert mx.array_equal(logits_of(write_checkpoint(tmp_path / "bare", llama_config(), bare)), logits)


def test_extra_vision_and_mtp_tensors_are_dropped_and_said(tmp_path, plain):
    weights, logits = plain
    extra = {"mtp.layers.0.proj.weight": mx.ones((4, 4)), "vision_tower.blocks.0.weight": mx.ones((4, 4))}
    extra |= {"model.layers.2.mlp.gate_proj.weight": mx.ones((48, 32))}
    path = write_checkpoint(tmp_path / "extra", llama_config(), weights | extra)
    assert mx.array_equal(logits_of(path), logits)
    done = convert(str(path), str(tmp_path / "mlx"))
    assert [n for n in done.notes if n.startswith("dropped")] == [
        "dropped 1 tensor (layer 2 of 2 (multi-token prediction)), 1 tensor (multi-token prediction), 1 tensor (vision tower)"
    ]
    assert done.record["source_tensors"]["vision_tower.blocks.0.weight"] == "dropped: vision tower"


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_a_prefix_that_a_trainer_left_changes_nothing(tmp_path, plain, prefix):
    weights, logits = plain
    left = {prefix + name: value for name, value in weights.items()}
    assert mx.array_equal(logits_of(write_checkpoint(tmp_path / "left", llama_config(), left)), logits)


def test_a_text_model_inside_an_unknown_wrapper_is_taken_out(tmp_path, plain):
    weights, logits = plain
    wrapped = {f"language_model.{name}": value for name, value in weights.items()} | {"vision_tower.a.weight": mx.ones((2, 2))}
    config = {"model_type": "some_new_vlm", "architectures": ["SomeVLM"], "text_config": llama_config()}
    assert mx.array_equal(logits_of(write_checkpoint(tmp_path / "vlm", config, wrapped)), logits)


def test_a_tied_model_that_ships_a_head_uses_its_embedding(tmp_path, plain):
    weights, _ = plain
    path = write_checkpoint(tmp_path / "tied", llama_config(tie_word_embeddings=True), weights)
    without = {k: v for k, v in weights.items() if k != "lm_head.weight"}
    expected = logits_of(write_checkpoint(tmp_path / "without", llama_config(tie_word_embeddings=True), without))
    assert mx.array_equal(logits_of(path), expected)


def test_a_head_that_is_absent_and_not_spoken_of_is_the_embedding(tmp_path, plain):
    weights = {k: v for k, v in plain[0].items() if k != "lm_head.weight"}
    silent = write_checkpoint(tmp_path / "silent", llama_config(tie_word_embeddings=None), weights)
    tied = write_checkpoint(tmp_path / "tied", llama_config(tie_word_embeddings=True), weights)
    assert mx.array_equal(logits_of(silent), logits_of(tied))


def test_an_absent_head_that_the_config_demands_is_said(tmp_path, plain):
    weights = {k: v for k, v in plain[0].items() if k != "lm_head.weight"}
    with pytest.raises(CheckpointError, match="has no lm_head.weight, and its config says tie_word_embeddings false"):
        load_target(write_checkpoint(tmp_path / "headless", llama_config(), weights))


def test_a_key_that_is_absent_takes_the_default_of_transformers(tmp_path, plain):
    weights = plain[0]
    # mlx-lm's llama takes base 10000 too, but ties the head where transformers does not
    silent = write_checkpoint(tmp_path / "silent", llama_config(tie_word_embeddings=None, rope_theta=None), weights)
    said = write_checkpoint(tmp_path / "said", llama_config(rope_theta=10000.0), weights)
    assert mx.array_equal(logits_of(silent), logits_of(said))


def test_null_bits_in_quantization_mean_not_quantized(tmp_path, plain):
    weights, logits = plain
    config = llama_config(quantization={"bits": None, "group_size": None}, quantization_config={"bits": None})
    path = write_checkpoint(tmp_path / "null", config, weights)
    assert mx.array_equal(logits_of(path), logits)
    convert(str(path), str(tmp_path / "mlx"), quantize=True, q_group_size=32)


def test_every_missing_unexpected_and_misshapen_tensor_is_in_one_message(tmp_path, plain):
    weights = dict(plain[0])
    del weights["model.layers.1.mlp.up_proj.weight"], weights["model.norm.weight"]
    weights["model.layers.0.extra.weight"] = mx.ones((3,))
    weights["model.layers.0.mlp.down_proj.weight"] = mx.ones((48, 32))
    with pytest.raises(CheckpointError) as error:
        load_target(write_checkpoint(tmp_path / "broken", llama_config(), weights))
    for part in (
        "2 missing and 1 unexpected and 1 of another shape",
        "missing model.layers.1.mlp.up_proj.weight [48, 32]",
        "missing model.norm.weight [32]",
        "unexpected model.layers.0.extra.weight [3]",
        "model.layers.0.mlp.down_proj.weight is [48, 32] where [32, 48] belongs",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.5},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
)
def test_rope_scaling_gives_one_model_in_either_spelling(tmp_path, plain, scaling):
    old = write_checkpoint(tmp_path / "old", llama_config(rope_scaling=scaling), plain[0])
    parameters = {"rope_theta": 5000.0, **scaling}
    parameters["rope_type"] = parameters.pop("type", parameters.get("rope_type"))
    new = write_checkpoint(tmp_path / "new", llama_config(rope_theta=None, rope_parameters=parameters), plain[0])
    assert mx.array_equal(logits_of(old), logits_of(new))
    assert not mx.allclose(logits_of(old), plain[1], rtol=1e-2)


def test_unknown_rope_scaling_is_said(tmp_path, plain):
    config = llama_config(rope_scaling={"rope_type": "spiral", "factor": 2.0})
    with pytest.raises(ConfigError, match="spiral|RoPE"):
        load_target(write_checkpoint(tmp_path / "spiral", config, plain[0]))


def test_another_activation_than_the_familys_is_computed(tmp_path, plain):
    weights, logits = plain
    gelu = logits_of(write_checkpoint(tmp_path / "gelu", llama_config(hidden_act="gelu"), weights))
    assert not mx.allclose(gelu, logits, rtol=1e-2)
    with pytest.raises(ConfigError, match='config.json says "sine"'):
        load_target(write_checkpoint(tmp_path / "sine", llama_config(hidden_act="sine"), weights))


def test_fp8_weights_with_block_scales_are_dequantized(tmp_path, plain):
    weights, _ = plain
    fp8, rounded = dict(weights), dict(weights)
    raw = {}
    for name in [n for n in weights if n.endswith("_proj.weight")]:
        codes = mx.to_fp8(weights[name] * 8)
        raw[name] = codes
        fp8[name + "_scale_inv"] = mx.full((1, 1), 0.125)
        rounded[name] = (mx.from_fp8(codes, dtype=mx.float32) * 0.125).astype(mx.bfloat16)
    path = write_checkpoint(
        tmp_path / "fp8",
        llama_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        fp8 | raw,
    )
    mark_fp8(path / "model.safetensors", raw)
    expected = logits_of(write_checkpoint(tmp_path / "rounded", llama_config(), rounded))
    assert mx.array_equal(logits_of(path), expected)


def test_bytes_without_a_stated_meaning_are_refused_by_name(tmp_path, plain):
    weights = dict(plain[0])
    weights["model.layers.0.mlp.up_proj.weight"] = mx.ones((48, 32), dtype=mx.uint8)
    weights["model.layers.0.mlp.up_proj.weight_scale"] = mx.ones((48, 1))
    with pytest.raises(ConversionError, match="has integers .* model.layers.0.mlp.up_proj.weight"):
        load_target(write_checkpoint(tmp_path / "bytes", llama_config(), weights))


def test_eos_ids_are_joined_from_tokenizer_config_and_generation_config(tmp_path, conformance):
    source = copy_checkpoint(conformance / "pair" / "target", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
    _, tokenizer = load(str(source))
    assert tokenizer.eos_token_ids == {tokenizer._tokenizer.eos_token_id, 7, 9, 11}
    convert(str(source), str(tmp_path / "mlx"))
    assert load(str(tmp_path / "mlx"))[1].eos_token_ids == tokenizer.eos_token_ids


@pytest.mark.parametrize("beside", ["", "null", "jinja", "tokenizer_config", "setting"])
def test_a_chat_template_in_a_processors_file_is_the_tokenizers_unless_it_has_one(tmp_path, beside):
    """As Mistral Small 3.1 and other multimodal models are published: transformers' tokenizers do not read that file."""
    source = copy_checkpoint(TINY / "target", tmp_path / "source")
    (source / "chat_template.json").write_text(json.dumps({"chat_template": "processor's é"}), encoding="utf-8")
    if beside == "jinja":
        (source / "chat_template.jinja").write_text("own")
    if beside in ("tokenizer_config", "null"):
        settings = json.loads((source / "tokenizer_config.json").read_text())
        own = "own" if beside == "tokenizer_config" else None
        (source / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": own}))
    given = {"chat_template": "own"} if beside == "setting" else None
    _, tokenizer = load(str(source), tokenizer_config=given)
    assert tokenizer.has_chat_template and tokenizer.chat_template == ("processor's é" if beside in ("", "null") else "own")
    convert(str(source), str(tmp_path / "mlx"))
    theirs = mlx_lm.load(str(tmp_path / "mlx"))[1].chat_template
    assert theirs == ("own" if beside in ("jinja", "tokenizer_config") else "processor's é")


def test_an_auto_map_neither_runs_code_nor_asks(tmp_path, plain, monkeypatch):
    weights, logits = plain
    path = write_checkpoint(tmp_path / "auto", llama_config(auto_map={"AutoModelForCausalLM": "evil.Model"}), weights)
    (path / "evil.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    assert mx.array_equal(logits_of(path), logits)


def test_a_model_file_is_refused_also_where_mlx_lm_has_a_class_of_that_name(tmp_path, plain):
    path = write_checkpoint(tmp_path / "own", llama_config(model_file="model.py"), plain[0])
    for trust in (False, True):
        with pytest.raises(CheckpointError, match=r"computes by code of its own \(model.py\)"):
            load(str(path), trust_remote_code=trust)


def test_families_that_mlx_lm_computes_differently_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="mlx-lm computes jamba.*normalises the expert weights over the chosen experts"):
        load_target(write_checkpoint(tmp_path / "jamba", {"model_type": "jamba"}, {"a": mx.ones((1,))}))


def test_plain_mlx_lm_loads_a_converted_directory(conformance, tmp_path):
    from mlx_lm.utils import load_model

    source = conformance / "targets" / "qwen3_moe"
    convert(str(source), str(tmp_path / "mlx"), dtype="float32")
    model, _ = load_model(tmp_path / "mlx")
    golden = mx.load(str(source / "golden.safetensors"))
    assert mx.allclose(model(golden["input_ids"]), golden["logits"], rtol=0, atol=1e-3)


def test_a_target_without_tokenizer_files_takes_ids_and_says_so(tmp_path, plain):
    path = write_checkpoint(tmp_path / "ids", llama_config(eos_token_id=[5, 6]), plain[0])
    with pytest.warns(UserWarning, match="has no tokenizer files .*: token ids only"):
        model, tokenizer = load(str(path))
    assert tokenizer.eos_token_ids == {5, 6} and not tokenizer.has_chat_template
    with pytest.raises(CheckpointError, match="has no tokenizer files"):
        generate(model, tokenizer, "text", max_tokens=2)
    assert generate(model, tokenizer, [1, 2, 3], max_tokens=4) == ""


@pytest.mark.parametrize("name", [name for name, family in SPECIAL.items() if family.same_as])
def test_equivalent_model_types_lead_to_a_family_of_mlx_lm(name):
    text = {"model_type": name, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
    assert normalise_config(text).family in (SPECIAL[name].same_as, "llama")


@pytest.mark.parametrize("wrapper", ["gemma4", "gemma4_unified"])
def test_new_names_of_a_wrapper_are_the_same_model(tmp_path, wrapper):
    path, golden = family("gemma4-wrapper", tmp_path / "source", lambda raw: raw | {"model_type": wrapper})
    assert golden_faults(in_float32(path), golden) == []


def test_relative_paths_tildes_and_trailing_slashes_convert(tmp_path, plain, monkeypatch):
    write_checkpoint(tmp_path / "m", llama_config(), plain[0])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for source, out in (("m", "out1"), ("./m/", "new/out2/"), ("~/m", "~/out3")):
        convert(source, out)
    for out in ("out1", "new/out2", "out3"):
        assert mx.array_equal(logits_of(tmp_path / out), plain[1])


def test_loading_changes_nothing_global(tmp_path, plain):
    """Another model made by mlx-lm itself behaves as before: no class, table or verbosity is changed."""
    import transformers
    from mlx_lm.models import llama
    from mlx_lm.utils import load_model

    path = write_checkpoint(tmp_path / "m", llama_config(), plain[0])
    before = load_model(path)[0](mx.arange(9)[None])
    verbosity, classes = transformers.logging.get_verbosity(), (llama.TransformerBlock.__call__, llama.MLP.__call__)
    window = llama_config(model_type="mistral", sliding_window=4, hidden_act="gelu")
    load_target(write_checkpoint(tmp_path / "w", window, plain[0]))
    assert (llama.TransformerBlock.__call__, llama.MLP.__call__) == classes
    assert transformers.logging.get_verbosity() == verbosity
    assert mx.array_equal(load_model(path)[0](mx.arange(9)[None]), before)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_gguf_file_loads_and_converts_to_one_model(tmp_path, kind):
    from gguf import GGMLQuantizationType
    from gguf_files import FAMILIES as GGUF_FAMILIES
    from gguf_files import random_weights, write_model

    config = GGUF_FAMILIES["llama"]
    meant = write_model(tmp_path / "m.gguf", "llama", random_weights(config), GGMLQuantizationType[kind])
    done = convert(str(tmp_path / "m.gguf"), str(tmp_path / "mlx"))
    assert done.record["parity"]["max_logit_difference"] == 0
    assert kind in done.record["source_tensors"]["blk.0.attn_q.weight"]
    direct, converted = in_float32(tmp_path / "m.gguf"), in_float32(tmp_path / "mlx")
    floats = write_checkpoint(tmp_path / "floats", config, {name: mx.array(weight) for name, weight in meant.items()})
    ids = mx.arange(20)[None]
    assert mx.array_equal(direct(ids), converted(ids))
    expected = in_float32(floats)(ids)
    assert mx.abs(direct(ids) - expected).max() < 2e-4 * mx.abs(expected).max()
    assert (tmp_path / "mlx" / "tokenizer.json").exists()


def test_mxfp4_experts_as_gpt_oss_publishes_them_stay_packed(conformance, tmp_path):
    source = conformance / "targets" / "gpt_oss"
    config = json.loads((source / "config.json").read_text())
    packed, rounded = {}, {}
    for name, value in mx.load(str(source / "model.safetensors")).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = rounded[name] = value
            continue
        # published: blocks [E, out, in / 32, 16] of two 4-bit codes a byte, scales [E, out, in / 32]
        codes, scales = mx.quantize(value.swapaxes(1, 2), group_size=32, bits=4, mode="mxfp4")
        packed[name + "_blocks"] = codes.view(mx.uint8).reshape(*scales.shape, 16)
        packed[name + "_scales"] = scales
        rounded[name] = mx.dequantize(codes, scales, group_size=32, bits=4, mode="mxfp4").swapaxes(1, 2).astype(mx.bfloat16)
    path = write_checkpoint(tmp_path / "packed", config | {"quantization_config": {"quant_method": "mxfp4"}}, packed)
    expected = in_float32(write_checkpoint(tmp_path / "rounded", config, rounded))
    model = in_float32(path)
    assert model.layers[0].mlp.experts.gate_proj.mode == "mxfp4"
    ids = mx.arange(20)[None]
    difference = mx.abs(model(ids) - expected(ids)).max()
    assert difference < 2e-4 * mx.abs(expected(ids)).max()
    done = convert(str(path), str(tmp_path / "mlx"))
    assert done.record["parity"]["max_logit_difference"] == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_normalised_config_normalises_to_itself(name):
    _, metadata = mx.load(str(DATA / "families" / f"{name}.safetensors"), return_metadata=True)
    once = normalise_config(json.loads(metadata["config"]))
    twice = normalise_config(once.config)
    for part in ("family", "layer_types", "windows", "while_building", "head_dims", "activation", "usual_activation", "tied"):
        assert getattr(once, part) == getattr(twice, part), part
    for layer_type in set(once.layer_types or [None]):
        tables = [expected_frequencies(rope_for_layer_type(c.rope, layer_type), 8, c, 0).inverse.tolist() for c in (once, twice)]
        assert tables[0] == tables[1]
