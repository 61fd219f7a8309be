"""Sources that look whole and are not: values that are no numbers, tokenizers that do not load, configs of nonsense."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from convert_kit import family, llama_config, llama_weights, write_checkpoint
from dflash_mlx.conversion import report
from gguf import GGMLQuantizationType as Kind
from gguf_files import FAMILIES, random_weights, write_model

from dflash_mlx import convert
from dflash_mlx.errors import CheckpointError, ConfigError, ConversionError
from dflash_mlx.loading import builtin_path


def with_values(kind, directory, changes):
    """A copy of half of the built-in pair whose tensors have other first elements: name -> value."""
    source = builtin_path("tiny", kind)
    weights = dict(mx.load(str(source / "model.safetensors")))
    for name, value in changes.items():
        flat = weights[name].flatten()
        flat[0] = value
        weights[name] = flat.reshape(weights[name].shape)
    shutil.copytree(source, directory)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "pt"})
    return str(directory)


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize(
    "kind, names",
    [
        ("target", ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]),
        ("drafter", ["layers.0.mlp.up_proj.weight", "norm.weight"]),
    ],
)
def test_weights_that_are_no_numbers_are_refused_by_name_in_one_message(tmp_path, kind, names, quantize):
    source = with_values(kind, tmp_path / "source", {names[0]: float("nan"), names[1]: float("inf")})
    with pytest.raises(CheckpointError, match="2 tensors of .* have NaN or infinite values: ") as error:
        convert(source, str(tmp_path / "out"), quantize=quantize)
    assert all(name in str(error.value) for name in names)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_unused_tensors_may_hold_infinities(tmp_path):
    weights = llama_weights() | {"model.layers.0.mlp.down_proj.input_max": mx.array(float("inf"))}
    source = write_checkpoint(tmp_path / "source", llama_config(), weights)
    assert convert(str(source), str(tmp_path / "out")).record["parity"]["argmax_agreement"] == 1.0


@pytest.mark.parametrize("compare", [report.compare_logits, report.compare_drafters])
def test_a_comparison_with_values_that_are_no_numbers_is_refused(compare):
    good = mx.array(np.arange(48 * 7).reshape(48, 7), dtype=mx.float32)
    bad = mx.where(good == 5, float("nan"), good)
    for pair, whose in (((bad, good), "the source"), ((good, bad), "the converted model"), ((bad, bad), "the source")):
        with pytest.raises(ConversionError, match=f"{whose} gives NaN or infinite"):
            compare(*pair)


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gguf_weights_that_are_no_numbers_are_refused_by_the_files_own_names(tmp_path, quantize):
    weights = random_weights(FAMILIES["llama"])
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        weights[name].flat[0] = np.nan
    write_model(tmp_path / "m.gguf", "llama", weights)
    with pytest.raises(CheckpointError, match="2 tensors of .* have NaN or infinite values: ") as error:
        convert(str(tmp_path / "m.gguf"), str(tmp_path / "out"), quantize=quantize, q_group_size=32)
    assert "blk.1.ffn_up.weight" in str(error.value) and "output_norm.weight" in str(error.value)


def appearing(monkeypatch, destination):
    """Someone else writes a file to the destination while the conversion runs."""
    compare = report.compare_logits

    def meanwhile(*args):
        destination.mkdir(parents=True)
        (destination / "theirs").write_text("precious")
        return compare(*args)

    monkeypatch.setattr(report, "compare_logits", meanwhile)


@pytest.mark.parametrize("place", ["out", "new/parent/out"])
def test_a_destination_that_appears_during_the_conversion_is_not_replaced(tmp_path, monkeypatch, place):
    appearing(monkeypatch, tmp_path / place)
    with pytest.raises(ConversionError, match="out exists. Choose another path, or pass --force"):
        convert(str(builtin_path("tiny", "target")), str(tmp_path / place))
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == [f"{place}/theirs"]
    assert [path.name for path in (tmp_path / place).parent.iterdir()] == ["out"]


def test_with_force_a_destination_that_appears_is_replaced(tmp_path, monkeypatch):
    appearing(monkeypatch, tmp_path / "out")
    convert(str(builtin_path("tiny", "target")), str(tmp_path / "out"), force=True)
    assert (tmp_path / "out" / "config.json").exists() and not (tmp_path / "out" / "theirs").exists()


def pointer(path):
    (path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def cut(path):
    (path / "tokenizer.json").write_bytes((path / "tokenizer.json").read_bytes()[:5000])


def half_settings(path):
    (path / "tokenizer_config.json").write_text('{"a"')


def another_json(path):
    (path / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (pointer, "/tokenizer.json is a Git-LFS pointer, not the file itself. Run `git lfs pull`"),
        (cut, "/tokenizer.json is no valid JSON: "),
        (half_settings, "/tokenizer_config.json is no valid JSON: "),
        (another_json, "transformers cannot load the tokenizer in .*source: "),
    ],
)
def test_a_damaged_tokenizer_is_refused_and_leaves_nothing(tmp_path, damage, sentence):
    shutil.copytree(builtin_path("tiny", "target"), tmp_path / "source")
    damage(tmp_path / "source")
    with pytest.raises(CheckpointError, match=sentence):
        convert(str(tmp_path / "source"), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_tokenizer_with_code_of_its_own_is_copied_with_a_note(tmp_path):
    shutil.copytree(builtin_path("tiny", "target"), tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").unlink()
    (tmp_path / "source" / "vocab.txt").write_text("a\nb\n")
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "source" / "tokenizer_config.json").write_text(json.dumps(settings))
    done = convert(str(tmp_path / "source"), str(tmp_path / "out"))
    assert any("brings its own code, which was neither run nor copied" in note for note in done.notes)
    assert (tmp_path / "out" / "vocab.txt").exists()


def with_config(kind, directory, **changes):
    shutil.copytree(builtin_path("tiny", kind), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return str(directory)


NONSENSE = [
    *[("num_hidden_layers", value) for value in ("x", 0, -1, 1.5)],
    *[(key, 0) for key in ("hidden_size", "num_attention_heads", "head_dim", "intermediate_size", "vocab_size")],
    *[("vocab_size", -1), ("tie_word_embeddings", "x"), ("quantization", "four"), ("model_type", 5)],
    *[("rope_parameters", value) for value in ("x", -1, 1.5)],
    *[("layer_types", value) for value in (-1, 1.5, "x", [1])],
    *[("max_position_embeddings", value) for value in ("x", -1)],
    *[("text_config", value) for value in ([1], "x", 5)],
]


@pytest.mark.parametrize("key, value", NONSENSE)
def test_a_config_with_a_useless_value_is_refused_by_the_keys_name(tmp_path, key, value):
    with pytest.raises(ConfigError, match=f"/config.json has values of no use: {key} "):
        convert(with_config("target", tmp_path / "source", **{key: value}), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_all_useless_values_of_a_config_are_in_one_message(tmp_path):
    source = with_config("target", tmp_path / "source", hidden_size=0, layer_types="x", vocab_size=True)
    with pytest.raises(ConfigError, match="hidden_size '0' .a positive integer.; vocab_size 'True' .*; layer_types 'x' "):
        convert(source, str(tmp_path / "out"))


def test_a_depth_far_from_the_tensors_is_refused_before_a_model_is_built(tmp_path):
    source = with_config("target", tmp_path / "source", num_hidden_layers=1000000)
    with pytest.raises(ConfigError, match="num_hidden_layers 1000000; the tensors in .* have 6 layers"):
        convert(source, str(tmp_path / "out"))


def test_a_module_of_mlx_lm_that_is_no_model_is_no_model_type(tmp_path):
    with pytest.raises(ConfigError, match='the installed mlx-lm has no model type "cache"'):
        convert(with_config("target", tmp_path / "source", model_type="cache"), str(tmp_path / "out"))


@pytest.mark.parametrize("changes", [{"rope_parameters": {"rope_theta": "x"}}, {"rms_norm_eps": {}}, {"head_dim": 31}])
def test_values_that_no_model_can_be_built_from_are_one_error_of_this_package(tmp_path, changes):
    with pytest.raises(
        (ConfigError, CheckpointError), match="cannot be built|no model can be built|has other tensors|has values of no use"
    ):
        convert(with_config("target", tmp_path / "source", **changes), str(tmp_path / "out"))


@pytest.mark.parametrize("kind", ["target", "drafter"])
@pytest.mark.parametrize("answer", [7, None, "8"])
def test_a_predicate_that_answers_with_something_else_is_refused(tmp_path, kind, answer):
    source = str(builtin_path("tiny", kind))
    sentence = f"the predicate gives {answer!r} for .*; it must give False, True or a dict of bits and group_size"
    with pytest.raises(ConversionError, match=sentence):
        convert(source, str(tmp_path / "out"), quantize=True, quant_predicate=lambda path, module: answer)


@pytest.mark.parametrize("changes", [{"use_cache": "yes"}, {"bos_token_id": "abc"}, {"id2label": 5}])
def test_a_config_that_transformers_refuses_is_not_blamed_on_the_tokenizer(tmp_path, changes):
    with pytest.raises(
        ConfigError, match="transformers, which reads config.json for the tokenizer, does not accept the one in .*source: "
    ):
        convert(with_config("target", tmp_path / "source", **changes), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


KILLED = """
import os, signal, sys
from dflash_mlx import convert
from dflash_mlx.conversion import write

def killed(*args):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[3] == "saving":
    write._save = killed
else:
    rename = write.Path.rename
    write.Path.rename = lambda self, to: killed() if to.name == "out" else rename(self, to)
convert(sys.argv[1], sys.argv[2], force=True)
"""


@pytest.mark.parametrize("when", ["saving", "renaming"])
def test_what_a_killed_conversion_left_is_undone_by_the_next_one(tmp_path, when):
    source, out = str(builtin_path("tiny", "target")), tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("before")
    child = subprocess.run([sys.executable, "-c", KILLED, source, str(out), when], capture_output=True)
    assert child.returncode == -signal.SIGKILL
    left = sorted(path.name.split("-")[0] for path in tmp_path.iterdir())
    assert left == ([".out.partial", "out"] if when == "saving" else [".out.partial", ".out.replaced"])
    # One that a living process owns stays; so does what only looks alike.
    for name in (
        f".out.partial-{platform.node()}-{os.getppid()}-x",
        f".out.partial-{platform.node()}-x-y",
        ".out.partial-other-1-x",
    ):
        (tmp_path / name).mkdir()
    with pytest.raises(ConversionError, match="out exists"):
        convert(source, str(out))
    assert (out / "mine").read_text() == "before"
    convert(source, str(out), force=True)
    assert (out / "config.json").exists() and not (out / "mine").exists()
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 5},
        {"dflash_config": [1]},
        {"model_type": 5},
        {"quantization": "four"},
        {"quantization_config": [4]},
        {"speculators_model_type": "dflash", "transformer_layer_config": [1]},
    ],
)
def test_a_drafter_config_of_nonsense_is_one_sentence(tmp_path, changes):
    with pytest.raises((ConfigError, CheckpointError), match="is no config|is not a DFlash drafter's config") as error:
        convert(with_config("drafter", tmp_path / "source", **changes), str(tmp_path / "out"))
    assert list(changes)[-1] in str(error.value)


@pytest.mark.parametrize("kind, matrix", [("target", "model.embed_tokens"), ("drafter", "fc")])
def test_the_record_of_a_source_already_quantized_says_with_how_many_bits(tmp_path, kind, matrix):
    def predicate(path, module):
        return {"bits": 8, "group_size": 32} if path == matrix else True

    convert(str(builtin_path("tiny", kind)), str(tmp_path / "q"), quantize=True, quant_predicate=predicate)
    record = convert(str(tmp_path / "q"), str(tmp_path / "again")).record
    assert record["quantization"] == json.loads((tmp_path / "again" / "config.json").read_text())["quantization"]
    for part in ("weight", "scales", "biases"):
        recipe = record["tensors"][f"{matrix}.{part}"]["recipe"]
        assert recipe == "part of a quantized matrix: affine 8-bit, group 32"
    usual = {entry["recipe"] for entry in record["tensors"].values()}
    assert "part of a quantized matrix: affine 4-bit, group 64" in usual and "kept as it was" in usual


def test_the_record_of_a_gguf_file_names_each_tensors_origin_and_bits(tmp_path):
    write_model(tmp_path / "m.gguf", "llama", random_weights(FAMILIES["llama"]), Kind.Q4_1)
    record = convert(str(tmp_path / "m.gguf"), str(tmp_path / "out")).record
    entry = record["tensors"]["model.layers.0.self_attn.q_proj.weight"]
    assert entry["recipe"] == "part of a quantized matrix: affine 4-bit, group 32"
    assert entry["source"].startswith("blk.0.attn_q.weight: Q4_1 carried over exactly")
    assert record["quantization"]["bits"] == 4
    assert all("source" in entry for entry in record["tensors"].values())


def test_the_record_has_the_hash_of_the_sources_tokenizer(tmp_path):
    record = convert(str(builtin_path("tiny", "target")), str(tmp_path / "out")).record
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert record["source"]["files"][name] == record["written"][name]


def test_the_record_names_the_tensor_that_experts_were_combined_into(tmp_path):
    path, _ = family("qwen3-moe-stacked", tmp_path / "source")
    record = convert(str(path), str(tmp_path / "out")).record
    base = "model.layers.0.mlp"
    fate = record["source_tensors"][f"{base}.experts.gate_up_proj"]
    assert fate.endswith(f" into {base}.switch_mlp.gate_proj.weight and {base}.switch_mlp.up_proj.weight")
    assert record["source_tensors"][f"{base}.experts.down_proj"].endswith(f" into {base}.switch_mlp.down_proj.weight")
