"""Deliberately broken inputs: each gives its sentence on stderr, exit status 1, and leaves the disk as it was."""

import json
import os
import re
import subprocess
import sys

import mlx.core as mx
import pytest
from convert_kit import llama_config, llama_weights, mark_fp8, shards, write_checkpoint

from dflash_mlx import convert
from dflash_mlx.cli import app as cli
from dflash_mlx.errors import ConversionError


def whole(directory):
    return write_checkpoint(directory, llama_config(), llama_weights())


def truncated(d):
    file = whole(d) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pointer(d):
    (whole(d) / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def headless_file(d):
    (whole(d) / "model.safetensors").write_bytes(b"\xff" * 64)


def empty_file(d):
    (whole(d) / "model.safetensors").write_bytes(b"")


def lying_header(d):
    file = whole(d) / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [33]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def missing_shard(d):
    (shards(d) / "model-00002-of-00002.safetensors").unlink()


def missing_shard_without_index(d):
    (shards(d, count=3, index=False) / "model-00002-of-00003.safetensors").unlink()


def stale_index(d):
    index = shards(d) / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"gone": "model-00001-of-00002.safetensors"}}))


def index_beside_single(d):
    shards(d)
    whole(d)


def mixed_sets(d):
    shards(d, index=False)
    write_checkpoint(d, llama_config(), {"t9": mx.ones((1,))}, "model-00001-of-00004.safetensors")


def tensor_twice(d):
    shards(d, index=False)
    write_checkpoint(d, llama_config(), {"t1": mx.ones((1, 3))}, "model-00002-of-00002.safetensors")


def climbing_index(d):
    index = shards(d) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"t1": "../outside.safetensors"}}))


def outside_link(d):
    whole(d)
    (d.parent / "outside").mkdir()
    (d / "model.safetensors").rename(d.parent / "outside" / "w.safetensors")
    (d / "model.safetensors").symlink_to(d.parent / "outside" / "w.safetensors")


def no_config(d):
    (whole(d) / "config.json").unlink()


def broken_config(d):
    (whole(d) / "config.json").write_text('{"model_type": "llama",')


def adapter(d):
    d.mkdir()
    (d / "adapter_config.json").write_text("{}")
    mx.save_safetensors(str(d / "adapter_model.safetensors"), {"a": mx.ones((1,))})


def pickles(d):
    d.mkdir()
    (d / "config.json").write_text(json.dumps(llama_config()))
    (d / "pytorch_model.bin").write_bytes(b"x")


def unknown_type(d):
    write_checkpoint(d, llama_config(model_type="nonesuch"), llama_weights())


def typeless(d):
    write_checkpoint(d, llama_config(model_type=None), llama_weights())


def speculators(d):
    write_checkpoint(d, {"speculators_model_type": "eagle3"}, {"fc.weight": mx.ones((2, 2))})


def eagle(d):
    write_checkpoint(d, {"architectures": ["LlamaForCausalLMEagle3"]}, {"midlayer.q.weight": mx.ones((2, 2))})


def other_weights(d):
    write_checkpoint(d, llama_config(hidden_size=40), llama_weights())


def drafter_without_taps(d):
    write_checkpoint(d, {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, {"fc.weight": mx.ones((2, 2))})


def fp8_without_scales(d):
    name = "model.layers.0.mlp.up_proj.weight"
    write_checkpoint(d, llama_config(), llama_weights() | {name: mx.ones((48, 32), dtype=mx.uint8)})
    mark_fp8(d / "model.safetensors", [name])


def integer_matrix(d):
    name = "model.layers.0.mlp.up_proj.weight"
    write_checkpoint(d, llama_config(), llama_weights() | {name: mx.ones((48, 32), dtype=mx.int16)})


def integer_norm(d):
    write_checkpoint(d, llama_config(), llama_weights() | {"model.norm.weight": mx.ones((32,), dtype=mx.uint32)})


def integer_scales(d):
    path = "model.layers.0.mlp.up_proj"
    packed, scales, biases = mx.quantize(llama_weights()[f"{path}.weight"], group_size=32, bits=4)
    parts = {f"{path}.weight": packed, f"{path}.scales": scales.astype(mx.int32), f"{path}.biases": biases}
    write_checkpoint(d, llama_config(quantization={"group_size": 32, "bits": 4}), llama_weights() | parts)


def packed_in_floats(d):
    path = "model.layers.0.mlp.up_proj"
    packed, scales, biases = mx.quantize(llama_weights()[f"{path}.weight"], group_size=32, bits=4)
    parts = {f"{path}.weight": packed.astype(mx.float32), f"{path}.scales": scales, f"{path}.biases": biases}
    write_checkpoint(d, llama_config(quantization={"group_size": 32, "bits": 4}), llama_weights() | parts)


def integer_drafter(d):
    config = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": {"target_layer_ids": [1]}}
    write_checkpoint(d, config, {"fc.weight": mx.ones((2, 2), dtype=mx.int64), "d2t": mx.ones((2,), dtype=mx.int64)})


def foreign_quantization(d):
    weights = llama_weights()
    weights["model.layers.0.mlp.up_proj.codes"] = weights.pop("model.layers.0.mlp.up_proj.weight").astype(mx.int16)
    write_checkpoint(d, llama_config(quantization_config={"quant_method": "aqlm"}), weights)


def two_ggufs(d):
    d.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (d / name).write_bytes(b"GGUF")


def no_gguf(d):
    d.mkdir()
    (d / "a.gguf").write_bytes(b"not a GGUF file at all")


BROKEN = {
    truncated: "model.safetensors is no whole safetensors file: .*Download the file again",
    pointer: "is a Git-LFS pointer, not the file itself. Run `git lfs pull`",
    headless_file: "model.safetensors is no whole safetensors file",
    empty_file: "model.safetensors is no whole safetensors file",
    lying_header: "model.safetensors is no whole safetensors file",
    missing_shard: "lacks 1 of the 2 files .*: model-00002-of-00002.safetensors",
    missing_shard_without_index: "lacks 1 of 3 shards: model-00002-of-00003.safetensors",
    stale_index: r"is stale: 1 tensors are not in the files that it names \(gone\)",
    index_beside_single: "two sets of weights: model.safetensors, and an index that names 2 other files. Delete the stale one",
    mixed_sets: "holds shards of 2 sets",
    tensor_twice: "t1 is in two files of",
    climbing_index: r"names files outside the directory: \.\./outside.safetensors. Do not use this checkpoint",
    outside_link: "model.safetensors is a symbolic link out of the directory",
    no_config: "has no config.json. Give",
    broken_config: "config.json is no valid JSON",
    adapter: "is a LoRA adapter",
    pickles: r"has only PyTorch files \(pytorch_model.bin\)",
    unknown_type: 'the installed mlx-lm has no model type "nonesuch"',
    typeless: 'has no "model_type"',
    speculators: "is a folder of vLLM's speculators library",
    eagle: "is an EAGLE head",
    other_weights: "has other tensors than mlx-lm's llama; .* of another shape",
    drafter_without_taps: "target_layer_ids",
    fp8_without_scales: "fp8 weights without a scale beside them: model.layers.0.mlp.up_proj.weight",
    integer_matrix: r"has integers without a stated meaning: model.layers.0.mlp.up_proj.weight \(I16\)",
    integer_norm: r"has integers without a stated meaning: model.norm.weight \(U32\)",
    integer_scales: "int32 where float32 belongs: model.layers.0.mlp.up_proj.scales",
    packed_in_floats: "float32 where uint32 belongs: model.layers.0.mlp.up_proj.weight",
    integer_drafter: r"has integers without a stated meaning: fc.weight \(I64\)",
    foreign_quantization: r"quantized with aqlm, which is not read: model.layers.0.mlp.up_proj.codes \(I16\)",
    two_ggufs: "holds 2 GGUF files",
    no_gguf: "begins with b'not '; a GGUF file begins with b'GGUF'",
}


def state(directory):
    return {p: p.stat().st_mtime_ns for p in sorted(directory.rglob("*"))}


def run_cli(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["dflash-mlx", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code, capsys.readouterr()


@pytest.mark.parametrize("breaking", BROKEN, ids=lambda f: f.__name__)
def test_a_broken_input_gives_its_sentence_and_leaves_the_disk_alone(tmp_path, monkeypatch, capsys, breaking):
    breaking(tmp_path / "source")
    before = state(tmp_path)
    code, output = run_cli(
        monkeypatch, capsys, "convert", "--hf-path", tmp_path / "source", "--mlx-path", tmp_path / "deep" / "out"
    )
    assert code == 1
    assert output.out == ""
    lines = output.err.strip().splitlines()
    assert len(lines) == 1 and re.fullmatch(r"Error: .+\. .+\.", lines[0])
    assert re.search(BROKEN[breaking], lines[-1]), lines
    assert state(tmp_path) == before


def test_an_existing_output_needs_force_and_is_replaced_whole(tmp_path, monkeypatch, capsys):
    source, out = whole(tmp_path / "source"), tmp_path / "out"
    convert(str(source), str(out))
    (out / "mine.txt").write_text("old")
    before = state(tmp_path)
    code, output = run_cli(monkeypatch, capsys, "convert", "--hf-path", source, "--mlx-path", out)
    assert code == 1 and "exists. Choose another path, or pass --force" in output.err
    assert state(tmp_path) == before
    convert(str(source), str(out), force=True)
    assert not (out / "mine.txt").exists() and (out / "model.safetensors").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("where", ["source", "source/inside", "."])
def test_an_output_that_touches_the_source_is_refused_even_with_force(tmp_path, where):
    source = whole(tmp_path / "source")
    before = state(tmp_path)
    with pytest.raises(ConversionError, match="the output .* and the source .* contain one another"):
        convert(str(source), str(tmp_path / where), force=True)
    assert state(tmp_path) == before


@pytest.mark.parametrize(
    "options, message",
    [
        ({"q_bits": 7}, r"MLX has no q_bits 7 \(it has 2, 3, 4, 5, 6, 8\)"),
        ({"q_group_size": 16}, r"q_group_size 16 \(it has 32, 64, 128\)"),
        ({"dtype": "int8"}, "dtype int8"),
        ({"quant_predicate": "mixed_4_6"}, r"quantize \(-q\) is off"),
    ],
)
def test_options_that_mlx_lacks_are_refused_before_anything_is_read(tmp_path, options, message):
    with pytest.raises(ConversionError, match=message):
        convert(str(tmp_path / "absent"), str(tmp_path / "out"), **options)


def test_values_beyond_float16_are_refused_by_name(tmp_path):
    weights = llama_weights()
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"] * 1e6
    source = write_checkpoint(tmp_path / "source", llama_config(), weights)
    with pytest.raises(ConversionError, match="model.layers.1.mlp.up_proj.weight exceeds what float16 holds"):
        convert(str(source), str(tmp_path / "out"), dtype="float16")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_too_little_disk_space_is_said_before_writing(tmp_path, monkeypatch):
    source = whole(tmp_path / "source")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(ConversionError, match="GB of free disk space"):
        convert(str(source), str(tmp_path / "out"))
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("[write] failed"), KeyboardInterrupt()])
def test_whatever_stops_the_writing_leaves_nothing_behind(tmp_path, monkeypatch, error):
    source = whole(tmp_path / "source")
    before = state(tmp_path)

    def stop(*_, **__):
        raise error

    monkeypatch.setattr("mlx.core.save_safetensors", stop)
    with pytest.raises((ConversionError, KeyboardInterrupt)):
        convert(str(source), str(tmp_path / "new" / "out"))
    assert state(tmp_path) == before


def test_a_write_that_falls_short_is_noticed(tmp_path):
    """A file size limit stands in for a full disk: MLX itself reports nothing."""
    source = whole(tmp_path / "source")
    program = (
        "import resource, sys; from dflash_mlx import convert\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "convert(sys.argv[1], sys.argv[2])"
    )
    done = subprocess.run([sys.executable, "-c", program, source, tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 1 and "could not be written" in done.stderr, done.stderr[-500:]
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    """The interrupt arrives while the weights are being written."""
    source = whole(tmp_path / "source")
    program = (
        "import os, signal, sys; from dflash_mlx.conversion import write; from dflash_mlx.cli import app as cli\n"
        "save = write._save\n"
        "def interrupted(*a):\n    save(*a); os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(60)\n"
        "write._save = interrupted\n"
        "sys.argv = ['dflash-mlx', 'convert', '--hf-path', sys.argv[1], '--mlx-path', sys.argv[2]]; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program, source, tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
    assert os.path.exists(source / "model.safetensors")


def test_a_destination_below_a_file_is_said(tmp_path):
    source = whole(tmp_path / "source")
    (tmp_path / "file").write_text("x")
    before = state(tmp_path)
    with pytest.raises(ConversionError, match="could not be written: Not a directory. Nothing was left behind"):
        convert(str(source), str(tmp_path / "file" / "deep" / "out"))
    assert state(tmp_path) == before
