"""--q-mode and --dequantize: MLX's own formats, tensor by tensor what mlx-lm's functions give, and read back by mlx-lm."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from convert_kit import llama_config, llama_weights, write_checkpoint
from dflash_mlx.conversion import load_drafter_weights
from kit import TINY, flat
from mlx_lm.utils import dequantize_model, load_model, quantize_model

from dflash_mlx import convert, load, load_drafter
from dflash_mlx.errors import ConversionError

# Each with its group size and bits.
MODES = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
IDS = mx.array([[1, 5, 2, 9, 30, 4]])


def same(ours, theirs):
    ours, theirs = flat(ours), flat(theirs)
    return ours.keys() == theirs.keys() and all(mx.array_equal(ours[name], theirs[name]).item() for name in ours)


@pytest.fixture
def source(tmp_path):
    return str(write_checkpoint(tmp_path / "source", llama_config(), llama_weights()))


@pytest.mark.parametrize("mode", MODES)
def test_a_target_is_quantized_and_dequantized_as_by_mlx_lm(tmp_path, source, mode):
    group = 32 if mode == "affine" else None
    done = convert(source, str(tmp_path / "q"), quantize=True, q_mode=mode, q_group_size=group)
    theirs, config = load_model(Path(source))
    theirs, config = quantize_model(theirs, config, group, None, mode=mode)
    ours, _ = load_model(tmp_path / "q")
    assert same(ours, theirs) and mx.array_equal(ours(IDS), theirs(IDS)).item()
    assert {"mode": "affine", **done.record["quantization"]} == config["quantization"]
    again = convert(str(tmp_path / "q"), str(tmp_path / "f"), dequantize=True)
    written = json.loads((tmp_path / "f" / "config.json").read_text())
    assert "quantization" not in written and "quantization_config" not in written and again.record["quantization"] is None
    floats, _ = load_model(tmp_path / "f")
    assert same(floats, dequantize_model(theirs)) and not any(name.endswith("scales") for name in flat(floats))


@pytest.mark.parametrize("mode", MODES)
def test_a_drafter_is_quantized_and_dequantized_in_every_mode(tmp_path, mode):
    source = str(TINY / "drafter")
    group, bits = (32, 4) if mode == "affine" else MODES[mode]
    convert(source, str(tmp_path / "q"), quantize=True, q_mode=mode, q_group_size=group)
    _, packed = load_drafter_weights(tmp_path / "q")
    _, floats = load_drafter_weights(source)
    name = "layers.0.mlp.up_proj"
    parts = mx.quantize(floats[f"{name}.weight"], group, bits, mode=mode)
    assert mx.array_equal(packed[f"{name}.weight"], parts[0]) and mx.array_equal(packed[f"{name}.scales"], parts[1])
    model, _ = load("tiny")
    assert load_drafter(str(tmp_path / "q"), model).layers[0].mlp.up_proj.mode == mode
    convert(str(tmp_path / "q"), str(tmp_path / "f"), dequantize=True)
    config, back = load_drafter_weights(tmp_path / "f")
    assert "quantization" not in config and back.keys() == floats.keys()
    assert mx.array_equal(back[f"{name}.weight"], mx.dequantize(*parts, group_size=group, bits=bits, mode=mode))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": True, "q_mode": "mxfp4", "q_bits": 8}, r"q_bits 8 in mxfp4 \(it has 4\)"),
        ({"quantize": True, "q_mode": "nvfp4", "q_group_size": 64}, r"q_group_size 64 in nvfp4 \(it has 16\)"),
        ({"quantize": True, "q_mode": "int4"}, "MLX has no q_mode int4"),
        ({"quantize": True, "q_mode": "mxfp4", "quant_predicate": "mixed_4_6"}, "recipes are for affine"),
        ({"quantize": True, "dequantize": True}, "both quantize"),
        ({"dequantize": True}, "nothing in .* is quantized"),
    ],
)
def test_what_mlx_does_not_have_is_refused(tmp_path, source, options, message):
    for one in (source, str(TINY / "drafter")):
        with pytest.raises(ConversionError, match=message):
            convert(one, str(tmp_path / "out"), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "hardly be told"),
        ({"quantize": True, "q_bits": 8}, "That is fine"),
        ({"quantize": True, "q_bits": 2}, "That is much"),
    ],
)
def test_the_summary_says_whether_its_figures_are_fine(tmp_path, options, said):
    group = {"q_group_size": 32} if options else {}
    for part in ("target", "drafter"):
        *_, last = convert(str(TINY / part), str(tmp_path / part), **options, **group).summary().splitlines()
        assert said in last or part == "drafter" and said == "hardly be told" and "as the source does" in last
