"""Drafter checkpoints: prefixes, spellings, quantization, and what a converted directory records."""

import hashlib
import json

import mlx.core as mx
import pytest
from convert_kit import write_checkpoint
from dflash_mlx.conversion import load_drafter_weights

from dflash_mlx import convert, load_drafter
from dflash_mlx.errors import CheckpointError, ConversionError
from dflash_mlx.loading import builtin_path


@pytest.fixture
def published():
    """(config, weights) of the built-in drafter."""
    path = builtin_path("tiny", "drafter")
    return json.loads((path / "config.json").read_text()), dict(mx.load(str(path / "model.safetensors")))


def hidden_of(drafter):
    """Hidden states of one pass over fixed features and block."""
    config = drafter.config
    keys = mx.random.split(mx.random.key(5), 2)
    features = mx.random.normal((1, 9, len(config.target_layer_ids) * config.target_hidden_size), key=keys[0])
    block = mx.random.normal((1, config.block_size, config.hidden_size), key=keys[1])
    return drafter(block, features, drafter.make_cache(), 0)


@pytest.mark.parametrize("prefix", ["model.", "_orig_mod.", "module._orig_mod.model.", "draft_model."])
def test_bare_and_prefixed_tensors_are_one_drafter(tmp_path, pair, published, prefix):
    config, weights = published
    prefixed = {prefix + name: value for name, value in weights.items()}
    path = write_checkpoint(tmp_path / "prefixed", config, prefixed)
    expected = hidden_of(load_drafter("tiny", pair[0]))
    assert mx.array_equal(hidden_of(load_drafter(str(path), pair[0])), expected)
    done = convert(str(path), str(tmp_path / "mlx"))
    assert done.kind == "drafter" and any(f"prefix {prefix} removed" in note for note in done.notes)
    assert set(mx.load(str(tmp_path / "mlx" / "model.safetensors"))) == set(weights)
    assert mx.array_equal(hidden_of(load_drafter(str(tmp_path / "mlx"), pair[0])), expected)


def test_a_tensor_with_and_without_prefix_is_refused(tmp_path, published):
    config, weights = published
    twice = weights | {"model.fc.weight": weights["fc.weight"]}
    with pytest.raises(CheckpointError, match="has fc.weight twice, with and without a prefix"):
        load_drafter_weights(write_checkpoint(tmp_path / "twice", config, twice))


def test_a_converted_drafter_keeps_the_published_config(tmp_path, published):
    config, _ = published
    convert(str(builtin_path("tiny", "drafter")), str(tmp_path / "mlx"))
    written = json.loads((tmp_path / "mlx" / "config.json").read_text())
    assert {k: v for k, v in written.items() if config.get(k) != v} == {}
    assert set(config) - set(written) <= {"auto_map", "_name_or_path"}


def test_drafters_quantized_but_for_some_layers_load(tmp_path, pair):
    source = str(builtin_path("tiny", "drafter"))
    convert(source, str(tmp_path / "mixed"), quantize=True, q_bits=8, quant_predicate=lambda path, _: path != "fc")
    drafter = load_drafter(str(tmp_path / "mixed"), pair[0])
    assert not hasattr(drafter.fc, "scales") and hasattr(drafter.layers[0].mlp.up_proj, "scales")
    record = json.loads((tmp_path / "mixed" / "conversion.json").read_text())
    assert record["tensors"]["fc.weight"]["recipe"] == "float: the predicate says so"
    assert record["tensors"]["hidden_norm.weight"]["recipe"] == "float: norm"


def test_mixed_bits_load_with_each_layers_own(tmp_path, pair):
    def predicate(path, module):
        return {"bits": 8, "group_size": 32} if path == "fc" else True

    convert(str(builtin_path("tiny", "drafter")), str(tmp_path / "mixed"), quantize=True, quant_predicate=predicate)
    drafter = load_drafter(str(tmp_path / "mixed"), pair[0])
    assert (drafter.fc.bits, drafter.fc.group_size, drafter.layers[0].self_attn.q_proj.bits) == (8, 32, 4)


def test_codebooks_are_quantized_and_convolution_kernels_stay_float(tmp_path, published, conformance, pair):
    _, weights = published
    extra = dict(mx.load(str(conformance / "pair" / "dflash2" / "extra.safetensors")))
    config = json.loads((conformance / "pair" / "dflash2" / "rounds.json").read_text())["config"]
    source = write_checkpoint(tmp_path / "dflash2", config, weights | extra)
    record = convert(str(source), str(tmp_path / "mlx"), quantize=True, q_bits=8, q_group_size=32).record
    assert 0 < record["parity"]["max_hidden_difference"] < 0.1 * record["parity"]["max_hidden"]
    recipes = {name: entry["recipe"] for name, entry in record["tensors"].items()}
    assert recipes["candidate_selector.predecessor_codebook.weight"] == recipes["fc.weight"] == "affine 8-bit, group 32"
    assert recipes["layers.0.attention_conv.base_kernel"] == "float: not a matrix"
    selector = load_drafter(str(tmp_path / "mlx"), pair[0]).candidate_selector
    assert (selector.predecessor_codebook.bits, selector.successor_codebook.group_size) == (8, 32)
    # Written out again they have their published names and what they held, to 8 bits.
    convert(str(tmp_path / "mlx"), str(tmp_path / "float"), dequantize=True)
    back = mx.load(str(tmp_path / "float" / "model.safetensors"))
    assert set(back) == {*weights, *extra}
    for name in ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"):
        was = extra[name].astype(mx.float32)
        assert mx.abs(back[name] - was).max() < 0.02 * mx.abs(was).max()


def test_a_reduced_vocabulary_keeps_its_head_and_its_map(tmp_path, published):
    config, weights = published
    config = config | {"draft_vocab_size": 64}
    own = {"lm_head.weight": mx.ones((64, 192)), "d2t": mx.arange(64), "t2d": mx.zeros((1536,), dtype=mx.bool_)}
    source = write_checkpoint(tmp_path / "reduced", config, weights | own)
    convert(str(source), str(tmp_path / "mlx"), dtype="float32")
    written = mx.load(str(tmp_path / "mlx" / "model.safetensors"))
    assert mx.array_equal(written["d2t"], own["d2t"]) and written["lm_head.weight"].shape == (64, 192)


def test_a_drafter_without_tokenizer_files_keeps_its_mask_id(tmp_path):
    convert(str(builtin_path("tiny", "drafter")), str(tmp_path / "mlx"))
    assert not (tmp_path / "mlx" / "tokenizer.json").exists()
    assert load_drafter_weights(tmp_path / "mlx")[0]["dflash_config"]["mask_token_id"] == 3


def test_tensors_that_do_not_fit_the_config_are_said(tmp_path, published):
    config, weights = published
    del weights["norm.weight"]
    source = write_checkpoint(tmp_path / "source", config, weights)
    with pytest.raises(ConversionError, match="are not those that config.json describes: .*norm.weight"):
        convert(str(source), str(tmp_path / "mlx"))


def test_targets_and_drafters_are_not_taken_for_one_another(tmp_path, pair):
    with pytest.raises(CheckpointError, match="is an ordinary model .*; a DFlash drafter belongs here"):
        load_drafter_weights(builtin_path("tiny", "target"))
    from dflash_mlx import load

    with pytest.raises(CheckpointError, match="is a DFlash drafter, which has no embedding and no head"):
        load(str(builtin_path("tiny", "drafter")))


def test_the_record_tells_hashes_fates_versions_types_and_parity(tmp_path):
    source = builtin_path("tiny", "drafter")
    convert(str(source), str(tmp_path / "mlx"), quantize=True, q_bits=8)
    record = json.loads((tmp_path / "mlx" / "conversion.json").read_text())
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert record["source"]["files"]["model.safetensors"]["sha256"] == digest
    digest = hashlib.sha256((tmp_path / "mlx" / "model.safetensors").read_bytes()).hexdigest()
    assert record["written"]["model.safetensors"]["sha256"] == digest
    assert set(record["versions"]) >= {"dflash-mlx", "python", "mlx", "mlx-lm"}
    assert record["number_types"]["source"] == {"BF16": 36} and "uint32" in record["number_types"]["written"]
    assert record["source_tensors"]["fc.weight"] == "as fc.weight"
    assert record["tensors"]["fc.weight"]["recipe"] == "affine 8-bit, group 64"
    parity = record["parity"]
    assert 0 < parity["max_hidden_difference"] < 0.1 * parity["max_hidden"]
    assert 0 < parity["rms_hidden_difference_share"] < 0.1
    assert parity["drafted_id_agreement"] >= 0.8


def test_a_float_record_says_what_it_cannot_prove(tmp_path):
    convert(str(builtin_path("tiny", "drafter")), str(tmp_path / "mlx"))
    parity = json.loads((tmp_path / "mlx" / "conversion.json").read_text())["parity"]
    assert parity["max_hidden_difference"] == 0
    assert parity["cannot_prove"].startswith("Both sides were read through the same mapping")
