"""In how many bits a drafter is held: 4 on Metal where its files hold floats, as asked elsewhere, as its files say otherwise."""

import json
import logging

import mlx.core as mx
import mlx.nn as nn
import pytest
from convert_kit import write_checkpoint
from dflash_mlx.conversion.drafters import LoadedDrafter, hold_in_bits, read_drafter
from kit import DATA, TINY, flat, greedy_ids, grow, ids_of, raw_config, run, tiny_target
from typer.testing import CliRunner

from dflash_mlx import convert, load_drafter
from dflash_mlx.checkpoint import inspect_checkpoint
from dflash_mlx.cli.app import app
from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import ConfigError
from dflash_mlx.loading import drafter_bytes, held_bits
from dflash_mlx.memory import model_bytes
from dflash_mlx.models.drafter import Drafter
from dflash_mlx.tools.place import bits_of


def write_drafter(path, raw):
    """A random drafter's directory."""
    mx.random.seed(1)
    return write_checkpoint(path, raw, flat(grow(Drafter(DrafterConfig.from_dict(raw)))))


def told_bytes(path, bits):
    """What is told of a drafter's size before it is loaded."""
    return drafter_bytes(read_drafter(inspect_checkpoint(path)).weights, mx.float32, bits)


def test_on_metal_a_float_drafter_is_held_in_4_bits_and_one_line_says_so(pair, metal, caplog):
    drafter = load_drafter("tiny", pair[0])
    assert bits_of(drafter) == [4] and drafter.config.quantization == {"group_size": 64, "bits": 4}
    assert all(hasattr(m, "scales") for m in drafter.modules() if isinstance(m, (nn.Linear, nn.QuantizedLinear)))
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith("the drafter is held in 4 bits: 0.8 MB instead of 5.2 MB (--draft-bits none")
    caplog.clear()
    assert bits_of(load_drafter("tiny", pair[0], bits="none")) == [] and bits_of(load_drafter("tiny", pair[0], bits=8)) == [8]
    assert not caplog.records


def test_elsewhere_a_float_drafter_is_held_in_bits_only_when_asked(pair, monkeypatch, caplog):
    assert bits_of(load_drafter("tiny", pair[0])) == [] and bits_of(load_drafter("tiny", pair[0], bits="4")) == [4]
    # A GPU that is not a Mac's; a Mac whose CPU was chosen.
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert held_bits(["fc.weight"], "D", None) is None
    monkeypatch.undo()
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert held_bits(["fc.weight"], "D", None) is None
    assert not caplog.records


def test_a_drafter_whose_files_are_quantized_stays_as_it_is(tmp_path, pair, metal, caplog):
    convert(str(TINY / "drafter"), str(tmp_path / "8"), quantize=True, q_bits=8)
    for bits in (None, "none"):
        assert bits_of(load_drafter(str(tmp_path / "8"), pair[0], bits=bits)) == [8]
    assert not caplog.records
    with pytest.raises(ConfigError, match=r"cannot be quantized to 4 bits: .* is quantized already\. Leave the bits out"):
        load_drafter(str(tmp_path / "8"), pair[0], bits=4)


@pytest.mark.parametrize("bits", [3, "q4", True, 0])
def test_other_bits_are_refused(bits):
    with pytest.raises(ConfigError, match="a drafter's bits are .*; they must be 4, 8 or none"):
        held_bits([], "D", bits)


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_that_no_group_size_divides_stay_float_and_are_named(tmp_path, caplog, bits):
    # 64 divides by 64, 96 by 32 alone, and 40 by neither.
    model, raw = tiny_target(hidden=64), raw_config(64, intermediate_size=40, num_attention_heads=6, head_dim=16)
    drafter = load_drafter(str(write_drafter(tmp_path / "d", raw)), model, bits=bits)
    layer = drafter.layers[0]
    assert (layer.self_attn.q_proj.group_size, layer.self_attn.o_proj.group_size) == (64, 32)
    assert isinstance(layer.mlp.down_proj, nn.Linear) and drafter.fc.bits == bits
    (record,) = caplog.records
    assert "; layers.*.mlp.down_proj stay float, because no group size divides their inputs (--draft" in record.getMessage()
    assert told_bytes(tmp_path / "d", bits) == model_bytes(drafter)
    ids = run(model, drafter, [5, 9, 33], 12)
    assert ids_of(ids) == greedy_ids(model, [5, 9, 33], 12)


def test_a_drafter_with_no_layer_that_divides_stays_float(tmp_path, caplog):
    model, raw = tiny_target(), raw_config(head_dim=10)
    drafter = load_drafter(str(write_drafter(tmp_path / "d", raw)), model, bits=4)
    assert bits_of(drafter) == [] and "cannot be held in 4 bits: fc, layers.*.mlp.down_proj, " in caplog.text
    assert told_bytes(tmp_path / "d", 4) == model_bytes(drafter)


def test_the_matrices_held_are_those_that_conversion_makes(tmp_path, pair):
    convert(str(TINY / "drafter"), str(tmp_path / "4"), quantize=True)
    made, held = flat(load_drafter(str(tmp_path / "4"), pair[0])), flat(load_drafter("tiny", pair[0], bits=4))
    assert made.keys() == held.keys() and all(mx.array_equal(made[name], held[name]).item() for name in made)


def test_floats_are_freed_one_matrix_after_the_other(tmp_path):
    """All floats beside a target that just fits would be more than the machine has."""
    matrix = 512 * 512 * 4
    path = str(tmp_path / "w.safetensors")
    mx.save_safetensors(path, {f"layers.{i}.mlp.up_proj.weight": mx.random.normal((512, 512)) for i in range(8)})
    read = LoadedDrafter({}, DrafterConfig.from_dict(raw_config()), mx.load(path))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert hold_in_bits(read, 4) == []
    # One matrix in floats, eight at 5 bits a weight (scales and biases are float32), and what the quantizer itself takes.
    assert mx.get_peak_memory() - before < 8 * matrix * 5 / 32 + 3 * matrix
    assert mx.get_active_memory() - before <= 8 * matrix * 5 / 32 + 4096


def test_a_dflash_2_drafter_and_one_with_a_head_of_its_own_are_held_in_4_bits(tmp_path, pair):
    weights = dict(mx.load(str(TINY / "drafter" / "model.safetensors")))
    own = {"lm_head.weight": pair[0].model.embed_tokens.weight, "embed_tokens.weight": pair[0].model.embed_tokens.weight}
    config = json.loads((TINY / "drafter" / "config.json").read_text())
    headed = load_drafter(str(write_checkpoint(tmp_path / "own", config, weights | own)), pair[0], bits=4)
    assert headed.lm_head.bits == headed.embed_tokens.bits == 4
    extra = dict(mx.load(str(DATA / "dflash2" / "extra.safetensors")))
    config = json.loads((DATA / "dflash2" / "rounds.json").read_text())["config"]
    path = write_checkpoint(tmp_path / "dflash2", config, weights | extra)
    selecting = load_drafter(str(path), pair[0], bits=4)
    assert bits_of(selecting) == [4] and selecting.candidate_selector.predecessor_codebook.bits == 4
    assert told_bytes(path, 4) == model_bytes(selecting)
    for drafter in (headed, selecting):
        assert len(run(pair[0], drafter, [5, 9, 33], 4)) == 4


def test_bits_without_a_drafter_are_a_usage_error():
    for words in (
        ["generate", "--model", "tiny", "-p", "x", "--draft-bits", "4"],
        ["chat", "--draft-model", "none", "--draft-bits", "8"],
        ["doctor", "--model", "tiny", "--draft-bits", "none"],
    ):
        result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
        assert result.exit_code == 2 and "it needs a drafter" in result.output
    result = CliRunner().invoke(app, ["bench", "--dense", "--draft-bits", "4"], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "--dense turns" in result.output
