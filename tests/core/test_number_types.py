"""Number types: a model keeps those of its files on a GPU, everything is float32 on a CPU, and `dtype` casts what it may."""

import json
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from convert_kit import CONFORMANCE, copy_checkpoint, write_checkpoint
from convert_kit import FAMILIES as REFERENCE
from convert_kit import family as reference
from dflash_mlx.conversion.dequantize import types_of_scales
from dflash_mlx.conversion.targets import LoadedTarget
from families import FAMILIES, OTHERS, agree, family, greedy_line
from gguf import GGMLQuantizationType
from gguf_files import FAMILIES as GGUF_FAMILIES
from gguf_files import random_weights, write_model
from kit import flat
from mlx_lm.utils import load_model

from dflash_mlx import convert, load, load_drafter
from dflash_mlx.checkpoint import inspect_checkpoint
from dflash_mlx.errors import ConfigError
from dflash_mlx.loading import activation_dtype, loaded_dtype, weight_bytes

pytestmark = pytest.mark.filterwarnings("ignore:.*tokenizer files")


@pytest.fixture
def source(tmp_path, conformance):
    """source(name, types) -> a reference checkpoint whose tensors have the types that `types(name, value)` says."""

    def make(name, types):
        if name in CONFORMANCE:
            path = copy_checkpoint(conformance / "targets" / name, tmp_path / "source")
        else:
            path, _ = reference(name, tmp_path / "source")
        weights = mx.load(str(path / "model.safetensors"))
        weights = {key: value.astype(types(key, value)) for key, value in weights.items()}
        mx.eval(weights)
        return write_checkpoint(path, json.loads((path / "config.json").read_text()), weights)

    return make


def types_of(model):
    return {name: value.dtype for name, value in flat(model).items()}


def mlx_lms_types(path):
    """What mlx_lm.load gives each parameter, None where it cannot read the files."""
    try:
        return types_of(load_model(path, lazy=True)[0])
    except (ValueError, TypeError, KeyError):
        return None


def half(name, value):
    return mx.float16


def wide_vectors(name, value):
    """As published: decays, biases, norms in float32 beside bfloat16 matrices."""
    return mx.float32 if value.ndim == 1 else mx.bfloat16


@pytest.mark.parametrize("name", CONFORMANCE + REFERENCE)
def test_on_a_gpu_a_parameter_has_the_type_of_the_tensors_it_was_made_from(source, tmp_path, monkeypatch, name):
    for kind in (wide_vectors, half):
        path = source(name, kind)
        with monkeypatch.context() as gpu:
            gpu.setattr(mx, "default_device", lambda: mx.gpu)
            model, _ = load(str(path), lazy=True)
        found = types_of(model)
        assert found == {key: kind(key, value) for key, value in flat(model).items()}
        assert mlx_lms_types(path) in (None, found)


@pytest.mark.parametrize("name", CONFORMANCE + REFERENCE)
def test_a_converted_directory_has_the_types_of_its_source_and_mlx_lm_reads_them(source, tmp_path, name):
    path = source(name, wide_vectors)
    convert(str(path), str(tmp_path / "mlx"))
    expected = types_of(load(str(path), dtype="auto", lazy=True)[0])
    assert types_of(load(str(tmp_path / "mlx"), dtype="auto", lazy=True)[0]) == expected
    assert mlx_lms_types(tmp_path / "mlx") in (None, expected)


def test_scales_that_a_quantized_file_holds_in_float32_stay_so(source, tmp_path):
    """As of a float32 head beside bfloat16 layers: activations there are float32 in mlx-lm too."""
    path = source("llama", lambda name, value: mx.float32 if "lm_head" in name else mx.bfloat16)
    convert(str(path), str(tmp_path / "mlx"), quantize=True, q_group_size=32)
    found = types_of(load(str(tmp_path / "mlx"), dtype="auto", lazy=True)[0])
    assert found == mlx_lms_types(tmp_path / "mlx") and found["lm_head.scales"] == mx.float32


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_of_a_tools_scales_of_two_types_each_layer_keeps_its_own(prefix):
    model = nn.Module()
    model.a, model.b = nn.QuantizedLinear(64, 32), nn.QuantizedLinear(64, 32)
    filed = [(f"{prefix}a.weight_scale", "BF16"), (f"{prefix}b.weight_scale", "F32"), ("c.weight_scale", "BF16")]
    checkpoint = SimpleNamespace(tensors={name: SimpleNamespace(name=name, dtype=dtype) for name, dtype in filed})
    assert types_of_scales(model, checkpoint) == dict.fromkeys(("a.scales", "a.biases"), mx.bfloat16)


def test_on_a_cpu_everything_is_float32_unless_a_type_is_named(source):
    path = source("qwen3_5", wide_vectors)
    assert set(types_of(load(str(path))[0]).values()) == {mx.float32}
    assert set(types_of(load(str(path), dtype="auto")[0]).values()) == {mx.float32, mx.bfloat16}
    with pytest.raises(ConfigError, match="dtype is 'int8'; it must be one of float32, bfloat16, float16 or auto"):
        load(str(path), dtype="int8")


@pytest.mark.parametrize("name", [name for name in {**FAMILIES, **OTHERS} if hasattr(family(name), "cast_predicate")])
def test_a_named_type_casts_what_the_familys_class_allows(name):
    model = family(name)
    LoadedTarget(model, {}, None, "").cast(mx.float16)
    found = types_of(model)
    assert found == {key: mx.float16 if model.cast_predicate(key) else mx.float32 for key in found}


@pytest.mark.parametrize("dtype", ["float16", mx.bfloat16])
def test_load_and_convert_cast_alike_and_spare_the_decay(source, tmp_path, dtype):
    path = source("qwen3_5", wide_vectors)
    loaded = types_of(load(str(path), dtype=dtype)[0])
    kept = {key for key, found in loaded.items() if found == mx.float32}
    assert kept and all(key.endswith("A_log") for key in kept)
    convert(str(path), str(tmp_path / "mlx"), dtype=str(dtype).removeprefix("mlx.core."))
    assert types_of(load(str(tmp_path / "mlx"), dtype="auto")[0]) == loaded


@pytest.mark.parametrize("name", CONFORMANCE)
@pytest.mark.quick(6)
def test_in_the_files_types_greedy_ids_are_mlx_lms_own(source, name):
    model, _ = load(str(source(name, wide_vectors)), dtype="auto")
    line = greedy_line(model, [1, 5, 9, 14, 3, 7], 24)
    assert agree(model, line, 6, (("noisy", 2), ("noisy", 5), ("oracle", 5))) == []


@pytest.mark.parametrize("dtype", [None, "auto", "float16"])
def test_the_memory_that_is_checked_is_what_the_loaded_weights_take(source, dtype):
    checkpoint = inspect_checkpoint(source("llama", wide_vectors))
    model, _ = load(str(checkpoint.path), dtype=dtype)
    assert weight_bytes(checkpoint, loaded_dtype(checkpoint, dtype)) == sum(value.nbytes for value in flat(model).values())


@pytest.mark.parametrize("dtype", [None, "auto", "float16"])
def test_a_drafter_runs_in_the_type_that_its_target_computes_in(dtype):
    model, _ = load("tiny", dtype=dtype)
    assert set(types_of(load_drafter("tiny", model)).values()) - {mx.uint32} == {activation_dtype(model)}


@pytest.mark.parametrize(
    "kind, activations", [("F32", mx.float32), ("F16", mx.float16), ("BF16", mx.bfloat16), ("Q8_0", mx.bfloat16)]
)
def test_a_gguf_file_on_a_gpu_computes_in_the_type_of_its_matrices(tmp_path, monkeypatch, kind, activations):
    """Its vectors are always float32: kept so they would have every layer compute in float32."""
    write_model(tmp_path / "m.gguf", "llama", random_weights(GGUF_FAMILIES["llama"]), GGMLQuantizationType[kind])
    with monkeypatch.context() as gpu:
        gpu.setattr(mx, "default_device", lambda: mx.gpu)
        model, _ = load(str(tmp_path / "m.gguf"), lazy=True)
    assert activation_dtype(model) == activations
