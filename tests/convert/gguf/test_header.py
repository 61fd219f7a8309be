"""GGUF headers: what is no whole file is said, a header is parsed once, and a drafter is told from a target."""

import gguf
import mlx.core as mx
import numpy as np
import pytest
from dflash_mlx.conversion.gguf.header import open_gguf
from dflash_mlx.conversion.gguf.source import read_gguf
from gguf import GGMLQuantizationType as Kind
from gguf_files import FAMILIES, random_weights, write_model

from dflash_mlx import convert, load, load_drafter
from dflash_mlx.checkpoint import inspect_checkpoint
from dflash_mlx.errors import CheckpointError, ConversionError
from dflash_mlx.pairs.builtin import builtin_path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"begins with b''; a GGUF file begins with b'GGUF'"),
        (b"PK\x03\x04 a zip", r"begins with b'PK.*; a GGUF file begins with b'GGUF'"),
        (b"version https://git-lfs.github.com/spec/v1\n", r"is a Git LFS pointer, not a GGUF file. Run `git lfs pull`"),
        (b"GGUF", r"is no whole GGUF file: its 4 bytes end early or are damaged"),
        (b"GGUF\x63\0\0\0" + bytes(32), r"is no whole GGUF file: its 40 bytes .* version 99"),
    ],
    ids=["empty", "another format", "LFS pointer", "magic only", "unknown version"],
)
def test_what_is_no_gguf_file_is_said(tmp_path, content, message):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("part", [0.001, 0.01, 0.02, 0.04, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_said_wherever_it_ends(tmp_path, sound, part):
    (tmp_path / "m.gguf").write_bytes(sound[: int(len(sound) * part)])
    with pytest.raises(CheckpointError, match="is no whole GGUF file: .* Download it again"):
        read_gguf(tmp_path / "m.gguf")


def test_a_damaged_array_length_is_said_at_once(tmp_path, sound):
    at = sound.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 4 + 4
    assert int.from_bytes(sound[at : at + 8], "little") == 262
    (tmp_path / "m.gguf").write_bytes(sound[: at + 5] + b"\x7f" + sound[at + 6 :])
    with pytest.raises(CheckpointError, match="is no whole GGUF file: .*byte [0-9]+ of [0-9]+ is needed"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("offset", [0, 32, 2**64 - 64, 2**40])
def test_tensors_that_share_bytes_or_lie_outside_the_file_are_said(tmp_path, sound, offset):
    name = b"blk.1.attn_q.weight"
    at = sound.index(name) + len(name) + 4 + 2 * 8 + 4
    (tmp_path / "m.gguf").write_bytes(sound[:at] + offset.to_bytes(8, "little") + sound[at + 8 :])
    with pytest.raises(CheckpointError, match="is no whole GGUF file: .* Download it again"):
        read_gguf(tmp_path / "m.gguf")


def test_a_load_and_a_conversion_parse_the_header_once(tmp_path, monkeypatch):
    write_model(tmp_path / "m.gguf", "llama", random_weights(FAMILIES["llama"]), Kind.Q4_1)
    parsed = []
    build = gguf.GGUFReader._build_tensors
    monkeypatch.setattr(gguf.GGUFReader, "_build_tensors", lambda self, *given: parsed.append(self) or build(self, *given))
    load(str(tmp_path / "m.gguf"))
    assert len(parsed) == 1
    convert(str(tmp_path / "m.gguf"), str(tmp_path / "out"))
    assert len(parsed) == 2


def test_a_file_that_was_replaced_is_parsed_again(tmp_path, sound):
    (tmp_path / "m.gguf").write_bytes(sound)
    held = inspect_checkpoint(tmp_path / "m.gguf")
    assert inspect_checkpoint(tmp_path / "m.gguf").gguf is held.gguf
    (tmp_path / "new.gguf").write_bytes(sound)
    (tmp_path / "new.gguf").rename(tmp_path / "m.gguf")
    assert inspect_checkpoint(tmp_path / "m.gguf").gguf is not held.gguf


def test_damaged_bytes_anywhere_in_the_header_give_a_sentence_or_a_sound_file(tmp_path, sound):
    header = sound.index(b"output_norm.weight") + 60
    rng = np.random.default_rng(5)
    refused = 0
    for at in rng.integers(4, header, 150):
        (tmp_path / "m.gguf").write_bytes(sound[:at] + bytes([sound[at] ^ (1 << rng.integers(8))]) + sound[at + 1 :])
        try:
            read_gguf(tmp_path / "m.gguf")
        except (CheckpointError, ConversionError) as error:
            refused += bool(error.problem and error.remedy)
    assert refused > 20


def test_paths_that_are_no_file_are_said(tmp_path):
    with pytest.raises(CheckpointError, match="absent.gguf does not exist. Check the path"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match="is a directory, not a GGUF file. Check the path"):
        read_gguf(tmp_path)


def test_a_big_endian_file_is_said(tmp_path):
    write_model(tmp_path / "m.gguf", "llama", random_weights(FAMILIES["llama"]), endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(CheckpointError, match="is big-endian; little-endian GGUF is read"):
        read_gguf(tmp_path / "m.gguf")


def test_an_unknown_tensor_type_number_is_said(tmp_path, sound):
    name = b"blk.0.attn_q.weight"
    at = sound.index(name) + len(name) + 4 + 2 * 8
    assert sound[at] == Kind.Q4_1
    (tmp_path / "m.gguf").write_bytes(sound[:at] + b"\xfa" + sound[at + 1 :])
    with pytest.raises(ConversionError, match="tensors of type number 250, .* Update gguf"):
        read_gguf(tmp_path / "m.gguf")


def drafter_file(path, architecture, leave_out=(), renamed=(), keys=()):
    """A drafter's tensors in a GGUF file, under the names of a published drafter or `renamed` ones."""
    writer = gguf.GGUFWriter(path, architecture)
    for key in keys:
        writer.add_uint32(key, 8)
    for name, value in mx.load(str(builtin_path("tiny", "drafter") / "model.safetensors")).items():
        if name not in leave_out:
            writer.add_tensor(dict(renamed).get(name, name), np.array(value.astype(mx.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["dflash", "dflash-draft", "llama"])
@pytest.mark.parametrize("leave_out", [(), ("hidden_norm.weight",)], ids=["whole", "no hidden_norm"])
def test_a_drafter_is_named_as_a_gguf_drafter_whatever_it_lacks(tmp_path, architecture, leave_out):
    (tmp_path / "other").mkdir()
    path = drafter_file(tmp_path / "d.gguf", architecture, leave_out)
    known = architecture != "llama" or not leave_out
    assert open_gguf(path).is_drafter == known
    model, _ = load("tiny")
    upper = drafter_file(tmp_path / "other" / "D.GGUF", architecture, leave_out)
    for given in (path, path.parent, upper, upper.parent):
        with pytest.raises((CheckpointError, ConversionError)) as caught:
            load_drafter(str(given), model)
        assert ("is a DFlash drafter in a GGUF file that cannot be read: no key" in str(caught.value)) == known
        assert "safetensors" in caught.value.remedy or not known


@pytest.mark.parametrize("architecture", ["dflash", "dflash2", "qwen3-DFlash", "eagle3"])
@pytest.mark.parametrize("name", ["d.gguf", "D.GGUF", "d-00001-of-00002.gguf"])
def test_a_gguf_drafter_given_as_a_target_is_named_as_a_drafter(tmp_path, name, architecture):
    path = drafter_file(tmp_path / name, architecture)
    with pytest.raises(
        ConversionError, match="is a DFlash drafter in GGUF; a target .* belongs here. Give it as the draft model"
    ):
        load(str(path))
    with pytest.raises(ConversionError, match="is a DFlash drafter in a GGUF file that cannot be read: no key"):
        convert(str(path), str(tmp_path / "out"))


FUSION = ("fc.weight", "hidden_norm.weight")


@pytest.mark.parametrize(
    "filed",
    [{"renamed": tuple((name, f"dflash_{name}") for name in FUSION)}, {"leave_out": FUSION, "keys": ("dflash.block_size",)}],
)
def test_a_drafter_that_is_filed_as_an_ordinary_architecture_is_known_by_its_names(tmp_path, filed):
    model, _ = load("tiny")
    path = drafter_file(tmp_path / "d.gguf", "qwen3", **filed)
    with pytest.raises(ConversionError, match="is a DFlash drafter in a GGUF file"):
        load_drafter(str(path), model)
    with pytest.raises(ConversionError, match="a DFlash drafter in GGUF"):
        load(str(path))


def test_another_kind_of_speculator_in_gguf_is_no_ordinary_model(tmp_path):
    path = drafter_file(tmp_path / "e.gguf", "eagle3", leave_out=FUSION)
    with pytest.raises(CheckpointError, match="is an EAGLE head, which is not supported"):
        load_drafter(str(path), load("tiny")[0])
