"""Checkpoints that other tools quantized: every packing, built in NumPy, loads with exactly the values that it stands for."""

import json
import re
import shutil
from functools import partial

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import packers
import pytest
from dflash_mlx.conversion import load_target
from dflash_mlx.conversion.dequantize import Record
from dflash_mlx.conversion.packings import Packed, _fp4, read_matrix
from kit import TINY, greedy_ids, ids_of, rounds_of, run
from mlx.utils import tree_flatten
from mlx_lm.models import falcon_h1, qwen3_moe
from packers import (
    as_type,
    awq,
    bf16,
    gptq,
    int_quantized,
    mxfp4,
    mxfp8,
    nvfp4,
    pack_quantized,
    read_safetensors,
    write_safetensors,
)

from dflash_mlx import convert, load, load_drafter
from dflash_mlx.errors import ConversionError

PROMPT = list(range(40, 60))
MATRIX = re.compile(r"(_proj|^fc)\.weight$")


def group_of(bits=4, kind="int", form="pack-quantized", targets=("Linear",), **weights):
    return {"format": form, "targets": list(targets), "weights": {"num_bits": bits, "type": kind, **weights}}


def compressed(*groups, form="pack-quantized", ignore=("lm_head",)):
    """The record of compressed-tensors as llm-compressor writes it."""
    named = {f"group_{number}": group for number, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": named, "ignore": list(ignore)}


def write(directory, pack, record=None, role="target", extra=None):
    """Half of the built-in pair, matrices packed by `pack(module)`, None for those that stay. -> (path, module -> values)."""
    source, tensors, values = TINY / role, {}, {}
    for name, value in mx.load(str(source / "model.safetensors")).items():
        module, exact = name.removesuffix(".weight"), np.array(value.astype(mx.float32))
        packer = pack(module) if MATRIX.search(name) else None
        if packer is None:
            tensors[name] = as_type(exact, "BF16")[:2]
            continue
        parts, values[module] = packer(exact)
        tensors |= {f"{module}.{part}": entry for part, entry in parts.items()}
    shutil.copytree(source, directory)
    for file in directory.iterdir():
        file.chmod(0o644)
    config = json.loads((source / "config.json").read_text())
    if record:
        config["quantization_config"] = record
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", tensors | (extra or {}))
    return directory, values


def dense(directory, values, role="target"):
    """The same half in floats: `values` where they are given."""
    return write(directory, lambda module: lambda _: ({"weight": ("F32", values[module])}, values[module]), role=role)[0]


def weight_of(module):
    if not hasattr(module, "scales"):
        return np.array(module.weight.astype(mx.float32))
    parts = (module.weight, module.scales, module.get("biases"))
    options = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    return np.array(mx.dequantize(*parts, **options, dtype=mx.float32))


def modules_of(model):
    return {path: module for path, module in model.named_modules() if hasattr(module, "weight")}


def differing(model, values):
    """Modules whose weights are not exactly the values that were packed."""
    found = modules_of(model)
    return [name for name, wanted in values.items() if not np.array_equal(weight_of(found[name]), wanted)]


def rounded(packer):
    """For packings that MLX has no mode for: the values in bfloat16, as the publishers' tools write them out."""

    def pack(weight):
        tensors, values = packer(weight)
        return tensors, bf16(values)

    return pack


def quark(weight):
    """AMD Quark's names for the same bytes."""
    tensors, values = mxfp4(weight)
    return {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}, values


def gptq_with_biases(weight):
    """As AutoGPTQ writes it: zeros for every matrix, of models that have no biases too."""
    tensors, values = gptq(weight)
    return tensors | {"bias": ("F16", np.zeros(len(weight), np.float16))}, values


AWQ_ZEROS = "AWQ, zero points"
INT4 = partial(pack_quantized, bits=4)
CASES = {
    # name: (packer, record, mode that the matrices have, None for floats)
    "int4, group 64": (INT4, compressed(group_of(4, group_size=64, strategy="group", symmetric=True)), "affine"),
    "int4, group 32": (partial(INT4, group=32), compressed(group_of(4, group_size=32, strategy="group")), "affine"),
    # rows of 192 and 512 inputs
    "int4, the last group short": (partial(INT4, group=128), compressed(group_of(4, group_size=128)), "affine"),
    "int4, short groups that MLX lacks": (
        partial(INT4, group=80, float_out=True),
        compressed(group_of(4, group_size=80)),
        None,
    ),
    "int4, a zero point a group": (
        partial(INT4, symmetric=False, dtype="F16"),
        compressed(group_of(4, group_size=64, symmetric=False)),
        "affine",
    ),
    "int4, zero points as bytes": (
        partial(INT4, symmetric=False, packed_zeros=False),
        compressed(group_of(4, group_size=64, symmetric=False)),
        "affine",
    ),
    "int4, a scale a row": (partial(INT4, group=0), compressed(group_of(4, strategy="channel")), "affine"),
    "int4, zero point a row": (
        partial(INT4, group=0, symmetric=False),
        compressed(group_of(4, strategy="channel", symmetric=False)),
        "affine",
    ),
    "int8 in words": (partial(pack_quantized, bits=8), compressed(group_of(8, group_size=64)), "affine"),
    "int3, dense": (partial(pack_quantized, bits=3), compressed(group_of(3, group_size=64)), "affine"),
    "int3, whole values in words, zero points": (
        partial(pack_quantized, bits=3, dense=False, symmetric=False),
        compressed(group_of(3, group_size=64, symmetric=False)),
        "affine",
    ),
    "int6, zero points": (partial(pack_quantized, bits=6, symmetric=False), compressed(group_of(6, symmetric=False)), "affine"),
    "int7, which MLX lacks": (partial(pack_quantized, bits=7), compressed(group_of(7, group_size=64)), "affine"),
    "int4, group 16": (partial(INT4, group=16, float_out=True), compressed(group_of(4, group_size=16)), None),
    "int8, a scale a row": (int_quantized, compressed(group_of(8, form="int-quantized"), form="int-quantized"), "affine"),
    "int8, zero point a row": (
        partial(int_quantized, symmetric=False),
        compressed(group_of(8, form="int-quantized", symmetric=False), form="int-quantized"),
        "affine",
    ),
    "int8, one scale": (
        partial(int_quantized, tensor=True),
        compressed(group_of(8, form="naive-quantized", strategy="tensor"), form="naive-quantized"),
        "affine",
    ),
    "int8, one scale and zero point": (
        partial(int_quantized, tensor=True, symmetric=False, dtype="F16"),
        compressed(group_of(8, form="naive-quantized", strategy="tensor", symmetric=False), form="naive-quantized"),
        "affine",
    ),
    "int4 in bytes": (
        partial(int_quantized, bits=4, group=32),
        compressed(group_of(4, form="int-quantized", group_size=32), form="int-quantized"),
        "affine",
    ),
    "MXFP4": (mxfp4, compressed(group_of(4, "float", "mxfp4-pack-quantized", group_size=32)), "mxfp4"),
    "MXFP4, scales typed E8M0": (
        partial(mxfp4, scale_type="F8_E8M0"),
        compressed(group_of(4, "float", "mxfp4-pack-quantized", group_size=32)),
        "mxfp4",
    ),
    "MXFP4 of Quark": (quark, {"quant_method": "quark"}, "mxfp4"),
    "NVFP4 that folds": (
        partial(nvfp4, divisor=0.5),
        compressed(group_of(4, "float", "nvfp4-pack-quantized", group_size=16)),
        "nvfp4",
    ),
    "NVFP4": (
        rounded(partial(nvfp4, divisor=1234.5)),
        compressed(group_of(4, "float", "nvfp4-pack-quantized", group_size=16)),
        None,
    ),
    "NVFP4 of ModelOpt": (
        rounded(partial(nvfp4, divisor=987.6, modelopt=True)),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        None,
    ),
    "NVFP4 of ModelOpt, no record": (partial(nvfp4, divisor=0.5, modelopt=True), None, "nvfp4"),
    "MXFP8": (mxfp8, compressed(group_of(8, "float", "mxfp8-quantized", group_size=32)), "mxfp8"),
    "fp8 with powers of two for blocks": (
        partial(mxfp8, block_rows=64, block=64, scale_type="F8_E8M0", name="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [64, 64], "scale_fmt": "ue8m0"},
        "mxfp8",
    ),
    "fp8 with powers of two for small blocks": (
        rounded(partial(mxfp8, block_rows=16, block=16, scale_type="F8_E8M0", name="scale")),
        {"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0"},
        None,
    ),
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}, "affine"),
    "GPTQ, biases of zeros": (gptq_with_biases, {"quant_method": "gptq", "bits": 4, "group_size": 64}, "affine"),
    "GPTQ, the last group short": (
        partial(gptq, group=128),
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
        "affine",
    ),
    "GPTQ with zero points": (
        partial(gptq, symmetric=False),
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False},
        "affine",
    ),
    "GPTQ v2, zero points": (
        partial(gptq, symmetric=False, v2=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"},
        "affine",
    ),
    "GPTQ layout of AutoRound, zero points as they are": (
        partial(gptq, symmetric=False, v2=True),
        {"quant_method": "auto-round", "bits": 4, "group_size": 64, "packing_format": "auto_round:gptqmodel"},
        "affine",
    ),
    "GPTQ, symmetric, v2 and not said": (partial(gptq, v2=True), None, "affine"),
    "GPTQ, 8 bits": (partial(gptq, bits=8, group=32), {"quant_method": "gptq", "bits": 8, "group_size": 32}, "affine"),
    "GPTQ, 3 bits": (partial(gptq, bits=3), {"quant_method": "gptq", "bits": 3, "group_size": 64}, "affine"),
    "GPTQ, 2 bits": (partial(gptq, bits=2), {"quant_method": "gptq", "bits": 2, "group_size": 64}, "affine"),
    AWQ_ZEROS: (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
        "affine",
    ),
    "AWQ without zero points": (
        partial(awq, zeros=False),
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False},
        "affine",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(6)
def test_a_packed_target_has_exactly_the_values_that_were_packed(tmp_path, case):
    packer, record, mode = CASES[case]
    path, values = write(tmp_path / "packed", lambda module: packer, record)
    model, _ = load(str(path), dtype=mx.float32)
    assert differing(model, values) == []
    assert {getattr(modules_of(model)[name], "mode", None) for name in values} == {mode}
    float_model, _ = load(str(dense(tmp_path / "dense", values)), dtype=mx.float32)
    assert greedy_ids(model, PROMPT, 16) == greedy_ids(float_model, PROMPT, 16)


# the others are converted in the slow tier
CONVERTED = (
    "int4, a zero point a group",
    "int8, one scale",
    "int4, group 16",
    "MXFP4",
    "NVFP4",
    "MXFP8",
    "GPTQ, 3 bits",
    AWQ_ZEROS,
)


@pytest.mark.parametrize("case", [case if case in CONVERTED else pytest.param(case, marks=pytest.mark.full) for case in CASES])
def test_a_packed_target_converts_and_mlx_lm_loads_the_same_values(tmp_path, case):
    packer, record, _ = CASES[case]
    path, values = write(tmp_path / "packed", lambda module: packer, record)
    # a zero point times its scale may need more bits than the scales' own type has
    done = convert(str(path), str(tmp_path / "out"), dtype="float32" if "zero point" in case else None)
    assert done.record["parity"]["max_logit_difference"] == 0
    assert any(word in note for note in done.notes for word in ("kept packed", "dequantized"))
    model, _ = mlx_lm.utils.load_model(tmp_path / "out")
    model.set_dtype(mx.float32)
    assert differing(model, values) == []
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text()) or hasattr(
        model.layers[0].mlp.up_proj, "scales"
    )


@pytest.mark.parametrize(
    "case", ["int4, group 64", "int8, a scale a row", "MXFP4", "NVFP4", "NVFP4 that folds", "GPTQ", AWQ_ZEROS]
)
@pytest.mark.quick(3)
def test_a_packed_drafter_drafts_what_its_values_draft(tmp_path, case):
    packer, record, mode = CASES[case]
    path, values = write(tmp_path / "packed", lambda module: packer, record, role="drafter")
    model, _ = load("tiny", dtype=mx.float32)
    drafter = load_drafter(str(path), model)
    assert differing(drafter, values) == []
    assert getattr(drafter.fc, "mode", None) == mode
    float_drafter = load_drafter(str(dense(tmp_path / "dense", values, role="drafter")), model)
    ours, floats = (run(model, each, PROMPT, 16, block_size=6) for each in (drafter, float_drafter))
    assert ids_of(ours) == greedy_ids(model, PROMPT, 16)
    assert rounds_of(ours) == rounds_of(floats)
    convert(str(path), str(tmp_path / "out"))
    assert differing(load_drafter(str(tmp_path / "out"), model), values) == []


@pytest.mark.parametrize("dtype, kind", [("F16", mx.float16), ("BF16", mx.bfloat16)])
def test_scales_take_the_files_type_where_every_weight_does_so_that_activations_stay_in_it(tmp_path, dtype, kind):
    packer = partial(INT4, symmetric=False, dtype=dtype)
    path, values = write(tmp_path / "packed", lambda module: packer, compressed(group_of(4, group_size=64, symmetric=False)))
    as_filed, _ = load(str(path), dtype="auto")
    assert {m.scales.dtype for m in modules_of(as_filed).values() if hasattr(m, "scales")} == {kind}
    for name, wanted in values.items():
        # at most 15 steps, rounded to the type's precision
        step = np.array(modules_of(as_filed)[name].scales.astype(mx.float32)).max()
        assert np.abs(weight_of(modules_of(as_filed)[name]) - wanted).max() <= 15 * step * mx.finfo(kind).eps
    assert differing(load(str(path), dtype="float32")[0], values) == []


def mixed(module):
    """Attention in 8 bits, the first layer's gate in MXFP4, its up projection ignored, the others in 4 bits."""
    if "layers.0.mlp.up_proj" in module:
        return None
    if "layers.0.mlp.gate_proj" in module:
        return mxfp4
    return partial(int_quantized, symmetric=False) if "self_attn" in module else INT4


MIXED = compressed(
    group_of(8, form="int-quantized", targets=["re:.*self_attn.*"], symmetric=False),
    group_of(4, "float", "mxfp4-pack-quantized", targets=["layers.0.mlp.gate_proj"], group_size=32),
    group_of(4, targets=["Linear"], group_size=64),
    form="mixed-precision",
    ignore=["lm_head", "re:.*layers.0.mlp.up_proj"],
)


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_packings_are_mixed_and_modules_are_left_out(tmp_path, role):
    path, values = write(tmp_path / "packed", mixed, MIXED, role=role)
    convert(str(path), str(tmp_path / "out"), dtype="float32")
    target, _ = load("tiny", dtype=mx.float32)
    for directory in (path, tmp_path / "out"):
        model = load(str(directory), dtype=mx.float32)[0] if role == "target" else load_drafter(str(directory), target)
        assert differing(model, values) == []
        assert len({(m.mode, m.bits) for m in modules_of(model).values() if hasattr(m, "scales")}) == 3


AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "packing_format": "auto_round:auto_gptq"}
OWN = {"bits": 8, "group_size": 32}
OWN_SETTINGS = {
    "AutoRound, by name": AUTOROUND
    | {"extra_config": {f"model.layers.{n}.self_attn.{x}_proj": OWN for n in range(6) for x in "qkvo"}},
    "AutoRound, by pattern": AUTOROUND | {"extra_config": {r"layers\.\d+\.self_attn": OWN, r".*lm_head.*": {"bits": 16}}},
    "GPTQModel": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "dynamic": {r"+:.*self_attn.*": OWN, r"-:.*lm_head.*": {}},
    },
}


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("case", OWN_SETTINGS)
def test_settings_of_one_module_are_read_however_the_tool_writes_them(tmp_path, case, role):
    """With 64 outputs the shapes alone allow 7 bits too."""
    own = partial(gptq, bits=8, group=32, symmetric=False)
    path, values = write(
        tmp_path / "packed", lambda module: own if "self_attn" in module else gptq, OWN_SETTINGS[case], role=role
    )
    target, _ = load("tiny", dtype=mx.float32)
    model = load(str(path), dtype=mx.float32)[0] if role == "target" else load_drafter(str(path), target)
    assert differing(model, values) == []


@pytest.mark.parametrize(
    "name, record",
    [
        ("quantize_config.json", {"bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"}),
        ("quantization_config.json", AUTOROUND | {"packing_format": "auto_round"}),
    ],
)
def test_a_record_that_only_a_file_of_its_own_holds_is_read(tmp_path, name, record):
    path, values = write(tmp_path / "packed", lambda module: partial(gptq, symmetric=False, v2=True))
    (path / name).write_text(json.dumps(record))
    assert differing(load(str(path), dtype=mx.float32)[0], values) == []


def in_float16(path):
    """Give the checkpoint's own floats another half type."""
    tensors = read_safetensors(path / "model.safetensors")
    for name, (kind, array) in tensors.items():
        if kind == "BF16" and "scale" not in name:
            tensors[name] = as_type((array.astype(np.uint32) << 16).view(np.float32), "F16")[:2]
    write_safetensors(path / "model.safetensors", tensors)


@pytest.mark.parametrize("case", ["NVFP4", "fp8 with powers of two for small blocks", "fp8 a row"])
def test_what_is_dequantized_has_the_half_type_of_the_files_so_that_activations_stay_in_it(tmp_path, recwarn, case):
    by_row = (partial(packers.fp8, dtype="F32"), compressed(group_of(8, "float", "float-quantized", strategy="channel")))
    packer, record = by_row if case == "fp8 a row" else CASES[case][:2]
    path, _ = write(tmp_path / "packed", lambda module: packer, record)
    for kind in (mx.bfloat16, mx.float16):
        model, _ = load(str(path), dtype="auto")
        assert {value.dtype for _, value in tree_flatten(model.parameters())} == {kind}
        in_float16(path)
    assert not [one for one in recwarn if "float32" in str(one.message)]


def test_scales_of_another_half_type_than_the_floats_are_said_with_what_makes_them_one(tmp_path):
    """As AutoRound leaves them: activations are float32, in mlx-lm too."""
    path, _ = write(tmp_path / "packed", lambda module: gptq, CASES["GPTQ"][1])
    with pytest.warns(
        UserWarning, match="scales in bfloat16 and float16, so everything is computed in float32. --dtype bfloat16"
    ):
        model, _ = load(str(path), dtype="auto")
    assert model(mx.array([[1, 2]])).dtype == mx.float32
    assert load(str(path), dtype="bfloat16")[0](mx.array([[1, 2]])).dtype == mx.bfloat16


def test_calibration_of_activations_and_caches_is_dropped_and_said(tmp_path):
    one = ("F32", np.array([0.5], np.float32))
    names = [f"model.layers.{n}.self_attn.{part}" for n in range(6) for part in ("k_scale", "q_proj.input_global_scale")]
    record = compressed(group_of(4, group_size=64))
    path, values = write(tmp_path / "packed", lambda module: INT4, record, extra=dict.fromkeys(names, one))
    model, _ = load(str(path), dtype=mx.float32)
    assert differing(model, values) == []
    notes = convert(str(path), str(tmp_path / "out")).notes
    assert any(f"{len(names)} scales that were calibrated" in note for note in notes)


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize(
    "record",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "mxfp4"},
        {"quant_method": "awq", "bits": 4, "group_size": 64},
        {"quant_method": "gptq", "bits": 4, "group_size": 64},
        {"quant_method": "hqq"},
        compressed(group_of(8, form="dense"), form="dense"),
        compressed(group_of(4, group_size=64)),
    ],
    ids=lambda record: record["quant_method"] + record.get("format", ""),
)
@pytest.mark.quick(6)
def test_float_weights_under_a_left_over_record_are_read_as_they_are(tmp_path, record, role):
    path, _ = write(tmp_path / "left", lambda module: None, record, role=role)
    target, _ = load("tiny", dtype=mx.float32)
    made = load(str(path), dtype=mx.float32)[0] if role == "target" else load_drafter(str(path), target)
    plain = target if role == "target" else load_drafter("tiny", target)
    assert differing(made, {name: weight_of(module) for name, module in modules_of(plain).items()}) == []
    done = convert(str(path), str(tmp_path / "out"))
    assert any("the weights are float" in note for note in done.notes)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(
    ("part", "record"),
    [
        ("weight_scale", compressed(group_of(8, form="dense"), form="dense")),
        ("weight_scale_inv", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ("weight_scale_inv", None),
    ],
)
def test_scales_left_beside_weights_that_are_float_are_not_used(tmp_path, part, record):
    def frozen(weight):
        tensors, values = int_quantized(weight)
        return {"weight": ("F32", values), part: tensors["weight_scale"]}, values

    path, values = write(tmp_path / "left", lambda module: frozen, record)
    assert differing(load(str(path), dtype=mx.float32)[0], values) == []


def without(packer, *parts):
    def pack(weight):
        tensors, values = packer(weight)
        return {part: entry for part, entry in tensors.items() if part not in parts}, values

    return pack


def marlin(weight):
    return {"weight_packed": ("I32", np.zeros((4, 8), np.int32)), "scale_packed": ("F16", np.ones((1, 8), np.float16))}, None


def nf4(weight):
    packed = np.zeros((weight.size // 2, 1), np.uint8)
    return {"weight": ("U8", packed), "weight.absmax": ("F32", np.ones(weight.size // 64, np.float32))}, None


def llm_int8(weight):
    return {"weight": ("I8", weight.astype(np.int8)), "SCB": ("F32", np.ones(len(weight), np.float32))}, None


ROTATED = {"R4": {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"], "location": "input"}]}}


def bitmask(weight):
    return {"compressed": ("F32", weight[:1]), "bitmask": ("U8", np.zeros((len(weight), 8), np.uint8))}, None


ACT_ORDER = "is quantized in activation order \\(act-order, {}g_idx\\)"
REFUSED = {
    # name: (packer, record, what the error says)
    "act-order": (
        lambda weight: gptq(weight, order=np.roll(np.arange(weight.shape[1]) // 64, 7)),
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True},
        ACT_ORDER.format(""),
    ),
    "act-order of compressed-tensors": (
        lambda weight: (
            INT4(weight)[0] | {"weight_g_idx": ("I32", np.roll(np.arange(weight.shape[1]) // 64, 7).astype(np.int32))},
            None,
        ),
        compressed(group_of(4, group_size=64, actorder="group")),
        ACT_ORDER.format("weight_"),
    ),
    "other bits than stated": (INT4, compressed(group_of(8, group_size=64)), "24 words for 192 inputs; config.json says 8 bits"),
    "bytes beyond the bits stated": (
        int_quantized,
        compressed(group_of(4, form="int-quantized"), form="int-quantized"),
        "has bytes beyond the 4 bits that config.json says",
    ),
    "zero points missing": (
        without(partial(INT4, symmetric=False), "weight_zero_point"),
        compressed(group_of(4, group_size=64, symmetric=False)),
        "weight_zero_point is missing",
    ),
    "scales missing": (without(INT4, "weight_scale"), compressed(group_of(4)), "weight_scale is missing"),
    "scales of NVFP4 missing": (
        without(partial(nvfp4, divisor=2), "weight_scale"),
        compressed(group_of(4, "float", "nvfp4-pack-quantized")),
        "weight_scale is missing",
    ),
    "rotated while it runs": (
        INT4,
        compressed(group_of(4, group_size=64)) | {"transform_config": {"config_groups": ROTATED}},
        r"rotates activations while it runs .*transform_config R4",
    ),
    "marlin-24": (marlin, compressed(group_of(4), form="marlin-24"), "marlin-24"),
    "sparse": (bitmask, compressed(group_of(4), form="sparse-bitmask"), r"quantized with compressed-tensors \(sparse-bitmask\)"),
    "inputs that are scaled": (
        lambda weight: (nvfp4(weight, 2, modelopt=True)[0] | {"pre_quant_scale": as_type(weight[0], "BF16")[:2]}, None),
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        r"with modelopt \(NVFP4_AWQ\), which is not read: .*pre_quant_scale",
    ),
    "bitsandbytes nf4": (
        nf4,
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "quantized with bitsandbytes, which is not",
    ),
    "bitsandbytes int8": (llm_int8, {"quant_method": "bitsandbytes"}, r"with bitsandbytes, which is not read: .* \(I8\)"),
}


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_its_own_name(tmp_path, case, role):
    packer, record, message = REFUSED[case]
    path, _ = write(tmp_path / "packed", lambda module: packer, record, role=role)
    target, _ = load("tiny")
    with pytest.raises(ConversionError, match=message) as caught:
        load(str(path)) if role == "target" else load_drafter(str(path), target)
    assert caught.value.remedy and "fp8 weights" not in str(caught.value)


def test_the_order_of_neighbouring_inputs_is_no_act_order(tmp_path):
    def unused(weight):
        tensors, values = INT4(weight)
        return tensors | {"weight_g_idx": ("I32", np.full(weight.shape[1], -1, np.int32))}, values

    path, values = write(tmp_path / "packed", lambda module: unused, compressed(group_of(4, group_size=64)))
    assert differing(load(str(path), dtype=mx.float32)[0], values) == []


@pytest.mark.parametrize(
    "settings", [{"config_groups": 3}, {"config_groups": {"g": {"targets": 5, "weights": 7}}}, {"format": []}]
)
def test_a_damaged_record_does_not_hide_what_the_tensors_say(tmp_path, settings):
    path, values = write(tmp_path / "packed", lambda module: mxfp4, {"quant_method": "compressed-tensors", **settings})
    assert differing(load(str(path), dtype=mx.float32)[0], values) == []


def test_the_packers_of_these_tests_agree_with_mlx_where_both_have_a_format():
    numbers = np.delete(np.arange(256, dtype=np.uint8), (127, 255))
    assert np.array_equal(packers.E4M3[numbers], np.array(mx.from_fp8(mx.array(numbers), dtype=mx.float32)))
    tensors, values = mxfp4(np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32))
    codes, scales = mx.array(tensors["weight_packed"][1]).view(mx.uint32), mx.array(tensors["weight_scale"][1])
    assert np.array_equal(np.array(mx.dequantize(codes, scales, group_size=32, bits=4, mode="mxfp4", dtype=mx.float32)), values)


def experts_checkpoint(directory, packer, record, block, names):
    """A random mixture of experts whose matrices are packed one expert at a time. -> expert path -> values."""
    rng, h, i = np.random.default_rng(4), 64, 128
    shapes = {f"self_attn.{n}_proj": (r, h) for n, r in (("q", 64), ("k", 32), ("v", 32), ("o", 64))}
    shapes |= {f"{block}.experts.{e}.{n}": s for e in range(4) for n, s in zip(names, ((i, h), (h, i), (i, h)), strict=True)}
    vectors = {"input_layernorm": h, "post_attention_layernorm": h, "self_attn.q_norm": 16, "self_attn.k_norm": 16}
    tensors = {"model.norm.weight": np.ones(h)} | {
        n: rng.standard_normal((96, h)) for n in ("model.embed_tokens.weight", "lm_head.weight")
    }
    tensors |= {f"model.layers.0.{n}.weight": np.ones(s) for n, s in vectors.items() if block == "mlp" or "attn." not in n}
    tensors[f"model.layers.0.{block}.gate.weight"] = rng.standard_normal((4, h))
    entries, values = {name: as_type(value, "F32")[:2] for name, value in tensors.items()}, {}
    for name, shape in shapes.items():
        parts, values[name] = packer(rng.standard_normal(shape).astype(np.float32))
        entries |= {f"model.layers.0.{name}.{part}": entry for part, entry in parts.items()}
    config = {
        "model_type": "qwen3_moe" if block == "mlp" else "mixtral", "hidden_size": h, "num_hidden_layers": 1, "vocab_size": 96,
        "intermediate_size": i, "moe_intermediate_size": i, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True, "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "rope_theta": 1e4,
        "tie_word_embeddings": False, "quantization_config": record,
    }  # fmt: skip
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", entries)
    return values


@pytest.mark.parametrize("block", ["mlp", "block_sparse_moe"])
@pytest.mark.parametrize(
    "case", ["int4, group 64", "int4, a zero point a group", "MXFP4", "NVFP4 that folds", "NVFP4", AWQ_ZEROS]
)
def test_packed_experts_are_stacked(tmp_path, case, block):
    packer, record, mode = CASES[case]
    names = ("gate_proj", "down_proj", "up_proj") if block == "mlp" else ("w1", "w2", "w3")
    values = experts_checkpoint(tmp_path / "packed", packer, record, block, names)
    convert(str(tmp_path / "packed"), str(tmp_path / "out"), dtype="float32")
    for directory in (tmp_path / "packed", tmp_path / "out"):
        model, _ = load_target(directory)
        model.set_dtype(mx.float32)
        experts = getattr(model.layers[0], block).switch_mlp
        for name, module in zip(names, (experts.gate_proj, experts.down_proj, experts.up_proj), strict=True):
            assert getattr(module, "mode", None) == mode
            wanted = np.stack([values[f"{block}.experts.{e}.{name}"] for e in range(4)])
            assert np.array_equal(weight_of(module), wanted)


@pytest.mark.parametrize(("part", "value"), [("weight_global_scale", 0.0), ("weight_global_scale", float("nan"))])
def test_nvfp4_scales_that_are_no_numbers_are_refused(part, value):
    stored, _ = nvfp4(np.ones((4, 32), np.float32), 2.0)
    tensors = {name: mx.array(array) for name, (_, array) in stored.items()} | {part: mx.array([value])}
    packed = Packed("m.up_proj", "DIR", tensors, {name: kind for name, (kind, _) in stored.items()}, {})
    with pytest.raises(ConversionError, match="m.up_proj in DIR has scales that are no numbers, or are divided"):
        _fp4(packed)


ACT_ORDER = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}
LACKING = {
    "weight_global_scale": CASES["NVFP4 that folds"][:2],
    "weight_scale_2": CASES["NVFP4 of ModelOpt, no record"][:2],
    "qzeros": CASES[AWQ_ZEROS][:2],
    "g_idx": (gptq, ACT_ORDER),
    "weight_g_idx": (INT4, compressed(group_of(4, group_size=64, actorder="group"))),
}


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("part", LACKING)
def test_a_part_without_which_the_values_are_others_is_missed_by_name(tmp_path, part, role):
    packer, record = LACKING[part]
    path, values = write(tmp_path / "packed", lambda module: packer, record, role=role)
    tensors = read_safetensors(path / "model.safetensors")
    for module in values:
        tensors.pop(f"{module}.{part}", None)
    write_safetensors(path / "model.safetensors", tensors)
    named = part.replace("scale_2", "global_scale")
    with pytest.raises(ConversionError, match=f"_proj.{named} is missing in .*Download the checkpoint again"):
        load(str(path)) if role == "target" else load_drafter(str(path), load("tiny")[0])


@pytest.mark.parametrize("part", ["weight_scale", "weight_zero_point"])
@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "groups"])
@pytest.mark.parametrize("packed_zeros", [True, False])
def test_scales_and_zero_points_that_are_cut_are_refused(part, axis, packed_zeros):
    """Half of them would be spread over all rows, or over all groups."""
    values = np.random.default_rng(1).normal(size=(64, 128)).astype(np.float32)
    stored, _ = INT4(values, symmetric=False, packed_zeros=packed_zeros, dtype="F16")
    tensors = {name: mx.array(array) for name, (_, array) in stored.items()}
    tensors[part] = mx.split(tensors[part], 2, axis=axis)[0]
    stated = Record(compressed(group_of(4, strategy="group"))).of_module("m.up_proj")
    packed = Packed("m.up_proj", "DIR", tensors, {name: kind for name, (kind, _) in stored.items()}, stated)
    with pytest.raises(ConversionError, match="m.up_proj in DIR has (zero points for .* rows and groups|weight_)"):
        read_matrix(packed)


def stack_experts(path, names):
    """Stack the experts of `experts_checkpoint` in its file. names: (of gate and up in one, of down), "{}" for the part."""
    tensors = read_safetensors(path / "model.safetensors")
    base, experts = "model.layers.0.mlp.experts", {}
    for name in [name for name in tensors if name.startswith(f"{base}.")]:
        _, module, part = name.removeprefix(f"{base}.").split(".")
        experts.setdefault(part, {}).setdefault(module, []).append(tensors.pop(name))
    for part, modules in experts.items():
        (kind, _), *_ = modules["up_proj"]
        gate, up, down = (np.stack([array for _, array in modules[f"{name}_proj"]]) for name in ("gate", "up", "down"))
        if part == "weight_shape":
            both = gate * (2, 1)
        else:
            both = gate if part == "weight_global_scale" else np.concatenate([gate, up], 1)
        tensors |= {f"{base}.{name.format(part)}": (kind, value) for name, value in zip(names, (both, down), strict=True)}
    write_safetensors(path / "model.safetensors", tensors)


@pytest.mark.parametrize(
    "names", [("gate_up_proj.{}", "down_proj.{}"), ("w13_weight.{}", "w2_weight.{}"), ("gate_up_proj_{}", "down_proj_{}")]
)
@pytest.mark.parametrize("case", ["int4, a zero point a group", "MXFP4", "NVFP4"])
def test_experts_that_are_filed_stacked_are_read(tmp_path, case, names):
    packer, record, mode = CASES[case]
    values = experts_checkpoint(tmp_path / "packed", packer, record, "mlp", ("gate_proj", "down_proj", "up_proj"))
    stack_experts(tmp_path / "packed", names)
    model, _ = load_target(tmp_path / "packed")
    model.set_dtype(mx.float32)
    for name in ("gate_proj", "down_proj", "up_proj"):
        module = model.layers[0].mlp.switch_mlp[name]
        assert getattr(module, "mode", None) == mode
        assert np.array_equal(weight_of(module), np.stack([values[f"mlp.experts.{e}.{name}"] for e in range(4)]))


@pytest.mark.parametrize("names", [("odd.{}", "down_proj.{}"), ("gate_up_proj__{}", "down_proj__{}")])
def test_stacked_experts_of_another_spelling_are_refused_by_name(tmp_path, names):
    packer, record, _ = CASES["NVFP4"]
    experts_checkpoint(tmp_path / "packed", packer, record, "mlp", ("gate_proj", "down_proj", "up_proj"))
    stack_experts(tmp_path / "packed", names)
    with pytest.raises(ConversionError, match=r"experts\.(odd in .* packed with the shape|down_proj__weight_packed \(U8\))"):
        load_target(tmp_path / "packed")


FALCON = {
    "model_type": "falcon_h1", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "max_position_embeddings": 512, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16,
    "mamba_n_groups": 1, "mamba_n_heads": 4, "attention_in_multiplier": 0.5, "attention_out_multiplier": 2.0,
    "embedding_multiplier": 3.0, "key_multiplier": 0.7, "lm_head_multiplier": 0.2, "mlp_multipliers": [0.6, 1.7],
    "ssm_in_multiplier": 1.3, "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9], "ssm_out_multiplier": 0.4,
    "tie_word_embeddings": False,
}  # fmt: skip


def falcon(directory, packer=None):
    """A Falcon-H1 as published, in bfloat16 or with its projections packed. -> the model that mlx-lm makes of the values."""
    own = falcon_h1.Model(falcon_h1.ModelArgs.from_dict(FALCON))
    rng, entries, values = np.random.default_rng(2), {}, {}
    for name, value in tree_flatten(own.parameters()):
        shape = [value.shape[i] for i in (0, 2, 1)] if "conv1d.weight" in name else value.shape
        made = 0.3 * rng.standard_normal(shape).astype(np.float32)
        if packer and name.endswith("_proj.weight"):
            parts, values[name] = packer(made)
            entries |= {f"{name.removesuffix('.weight')}.{part}": entry for part, entry in parts.items()}
        else:
            *entries[name], values[name] = as_type(made, "BF16")
    directory.mkdir()
    record = {"quantization_config": compressed(group_of(4, group_size=32))} if packer else {}
    (directory / "config.json").write_text(json.dumps(FALCON | record))
    write_safetensors(directory / "model.safetensors", entries)
    own.load_weights(list(own.sanitize({name: mx.array(value) for name, value in values.items()}).items()))
    return own


@pytest.mark.parametrize("packer", [None, partial(INT4, group=32)], ids=["bfloat16", "int4"])
def test_matrices_that_mlx_lm_multiplies_while_it_loads_are_multiplied_once(tmp_path, packer):
    own = falcon(tmp_path / "source", packer)
    model, _ = load_target(tmp_path / "source")
    for path, module in modules_of(own).items():
        # three factors in bfloat16
        np.testing.assert_allclose(weight_of(modules_of(model)[path]), weight_of(module), rtol=2**-6, err_msg=path)


def test_a_packed_head_that_mlx_lm_computes_with_is_dequantized(tmp_path, monkeypatch):
    """As bailing_moe's class, which scales the rows of its head."""
    ordinary = qwen3_moe.Model.sanitize

    def doubling(self, weights):
        ready = ordinary(self, weights)
        head = ready["lm_head.weight"]
        return ready | {"lm_head.weight": (head * 2).astype(head.dtype)}

    monkeypatch.setattr(qwen3_moe.Model, "sanitize", doubling)
    packer, record, _ = CASES["int4, group 64"]
    experts_checkpoint(tmp_path / "packed", packer, record, "mlp", ("gate_proj", "down_proj", "up_proj"))
    tensors = read_safetensors(tmp_path / "packed" / "model.safetensors")
    parts, wanted = packer(tensors.pop("lm_head.weight")[1])
    write_safetensors(tmp_path / "packed" / "model.safetensors", tensors | {f"lm_head.{part}": p for part, p in parts.items()})
    model, _ = load_target(tmp_path / "packed")
    np.testing.assert_allclose(weight_of(model.lm_head), 2 * wanted, rtol=2**-7)
