"""The quantization recipe, and quantized targets and drafters in every combination."""

import itertools
import json
import subprocess
import sys
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from convert_kit import copy_checkpoint, llama_config, llama_weights, write_checkpoint
from dflash_mlx.conversion import Conversion
from kit import DATA, greedy_ids, ids_of, run

from dflash_mlx import convert, load, load_drafter
from dflash_mlx.errors import ConversionError

# the llama of these tests has no tokenizer files, of which `load` warns
pytestmark = pytest.mark.filterwarnings("ignore:.* has no tokenizer files")
GENERATION = json.loads((DATA / "generation.json").read_text())


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """(kind, bits) -> path of that half of the built-in pair, converted once; bits 0 is the float original."""
    from dflash_mlx.loading import builtin_path

    made = {}

    def get(kind, bits):
        source = builtin_path("tiny", kind)
        if not bits:
            return str(source)
        if (kind, bits) not in made:
            path = tmp_path_factory.mktemp("quantized") / f"{kind}-{bits}"
            convert(str(source), str(path), quantize=True, q_bits=bits)
            made[kind, bits] = str(path)
        return made[kind, bits]

    return get


def lengths_of(model, drafter, lines):
    """Acceptance lengths over all lines, (prompt, what mlx-lm says behind it on the same model object); every id must be that."""
    lengths = []
    for prompt, ids in lines:
        got = run(model, drafter, prompt, len(ids), block_size=8)
        assert ids_of(got) == ids
        lengths += got[-1].stats.acceptance_lengths
    return lengths


def lines_of(model, prompts, tokens):
    return [(prompt, greedy_ids(model, prompt, tokens)) for prompt in prompts]


@pytest.mark.parametrize("target_bits, drafter_bits", list(itertools.product((0, 4, 8), repeat=2))[1:])
@pytest.mark.quick(2)
def test_every_combination_generates_what_mlx_lm_does_on_the_same_model(quantized, target_bits, drafter_bits):
    model, _ = load(quantized("target", target_bits), dtype=mx.float32)
    drafter = load_drafter(quantized("drafter", drafter_bits), model)
    assert hasattr(drafter.fc, "scales") == bool(drafter_bits)
    assert hasattr(model.model.embed_tokens, "scales") == bool(target_bits)
    lines = lines_of(model, [case["prompt_ids"] for case in GENERATION[:2]], 24)
    assert np.mean(lengths_of(model, drafter, lines)) > 1.5


@pytest.mark.full
@pytest.mark.parametrize("target_bits", [0, 4, 8])
def test_tau_of_quantized_drafters_stays_near_the_float_drafters(quantized, conformance, target_bits):
    variants = json.loads((conformance / "pair" / "variants" / "plain.json").read_text())["prompts"]
    prompts = [case["prompt_ids"] for case in [*GENERATION, *variants[:3]]]
    model, _ = load(quantized("target", target_bits), dtype=mx.float32)
    lines = lines_of(model, prompts, 48)
    tau = {bits: np.mean(lengths_of(model, load_drafter(quantized("drafter", bits), model), lines)) for bits in (0, 8, 4)}
    assert abs(tau[8] - tau[0]) <= 0.05
    assert abs(tau[4] - tau[0]) <= 0.2


def converted(tmp_path, config=None, weights=None, **options):
    source = write_checkpoint(tmp_path / "source", config or llama_config(), weights or llama_weights())
    return convert(str(source), str(tmp_path / "out"), quantize=True, q_group_size=32, **options)


def test_matrices_are_quantized_and_vectors_stay_float_with_the_reason(tmp_path):
    record = converted(tmp_path, q_bits=8).record
    recipes = {name: entry["recipe"] for name, entry in record["tensors"].items()}
    assert recipes["model.embed_tokens.weight"] == recipes["lm_head.weight"] == "affine 8-bit, group 32"
    assert recipes["model.layers.0.self_attn.q_proj.weight"] == "affine 8-bit, group 32"
    assert recipes["model.norm.weight"] == recipes["model.layers.1.input_layernorm.weight"] == "float: norm"
    assert record["quantization"] == {"group_size": 32, "bits": 8}


def test_rows_that_do_not_divide_into_groups_stay_float_and_are_listed(tmp_path):
    done = converted(tmp_path)
    # intermediate size 48: the down projections have rows of 48
    reason = "float: input size 48 is not a multiple of group size 32"
    expected = {f"model.layers.{layer}.mlp.down_proj.weight": reason for layer in range(2)}
    assert done.record["kept_float"] == expected
    assert f"model.layers.0.mlp.down_proj.weight: {reason}" in done.notes
    model, _ = load(str(tmp_path / "out"), dtype=mx.float32)
    assert not hasattr(model.layers[0].mlp.down_proj, "scales")


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_bit_width_of_mlx_loads_again(tmp_path, bits):
    converted(tmp_path, q_bits=bits)
    model, _ = load(str(tmp_path / "out"), dtype=mx.float32)
    assert model.layers[1].mlp.up_proj.bits == bits
    assert model.layers[1].mlp.up_proj.scales.dtype == mx.float32


def test_a_predicate_mixes_bits_and_leaves_layers_float(tmp_path):
    def predicate(path, module):
        if path.endswith("lm_head"):
            return False
        return {"bits": 8, "group_size": 32} if "v_proj" in path else True

    record = converted(tmp_path, quant_predicate=predicate).record
    assert record["tensors"]["lm_head.weight"]["recipe"] == "float: the predicate says so"
    assert record["quantization"]["model.layers.0.self_attn.v_proj"] == {"group_size": 32, "bits": 8}
    model, _ = load(str(tmp_path / "out"), dtype=mx.float32)
    assert (model.layers[0].self_attn.v_proj.bits, model.layers[0].self_attn.q_proj.bits) == (8, 4)


def test_mlx_lms_recipes_are_known_by_name(tmp_path):
    converted(tmp_path, weights=llama_weights(), quant_predicate="mixed_4_6")
    with pytest.raises(ConversionError, match="there is no recipe mixed_1_2; mlx-lm has mixed_2_6"):
        convert(str(tmp_path / "source"), str(tmp_path / "two"), quantize=True, quant_predicate="mixed_1_2")


def test_quantizing_twice_is_refused_and_keeping_is_exact(tmp_path):
    converted(tmp_path)
    again = partial(convert, str(tmp_path / "out"), str(tmp_path / "again"))
    with pytest.raises(ConversionError, match="weights are quantized already|weights that are quantized already"):
        again(quantize=True)
    assert again().record["parity"]["max_logit_difference"] == 0


def test_a_router_keeps_the_bits_that_its_family_asks_for(tmp_path, conformance):
    source = copy_checkpoint(conformance / "targets" / "qwen3_moe", tmp_path / "source")
    record = convert(str(source), str(tmp_path / "out"), quantize=True).record
    assert record["tensors"]["model.layers.0.mlp.gate.weight"]["recipe"] == "affine 8-bit, group 64"


def test_quantized_parity_is_reported_against_the_float_source(tmp_path):
    coarse = converted(tmp_path, q_bits=2).record["parity"]
    fine = convert(str(tmp_path / "source"), str(tmp_path / "fine"), quantize=True, q_group_size=32, q_bits=8).record["parity"]
    assert 0 < fine["max_logit_difference"] < coarse["max_logit_difference"]
    assert 0 < fine["mean_kl_nats"] < coarse["mean_kl_nats"]
    assert coarse["argmax_agreement"] <= fine["argmax_agreement"] <= 1
    assert "cannot_prove" not in fine


def test_a_short_row_and_a_large_group_stay_float(tmp_path):
    source = write_checkpoint(tmp_path / "source", llama_config(), llama_weights())
    with pytest.raises(ConversionError, match="no matrix has rows that divide into groups of 128"):
        convert(str(source), str(tmp_path / "out"), quantize=True, q_group_size=128)


def large_checkpoint(directory, layers=24, per_shard=6):
    """A bfloat16 llama of about 200 MB in shards of about 50 MB, with an index."""
    h, i, v = 512, 2048, 4000
    config = llama_config(
        hidden_size=h, intermediate_size=i, num_hidden_layers=layers, vocab_size=v, num_attention_heads=8, num_key_value_heads=8,
        head_dim=64,
    )  # fmt: skip
    weight_map, part, count = {}, {}, layers // per_shard
    part |= {"model.embed_tokens.weight": (v, h), "lm_head.weight": (v, h), "model.norm.weight": (h,)}
    for layer in range(layers):
        p = f"model.layers.{layer}."
        part |= {p + f"self_attn.{n}_proj.weight": (h, h) for n in "qkvo"}
        part |= {p + f"mlp.{n}_proj.weight": s for n, s in (("gate", (i, h)), ("up", (i, h)), ("down", (h, i)))}
        part |= {p + f"{n}_layernorm.weight": (h,) for n in ("input", "post_attention")}
        if layer % per_shard == per_shard - 1:
            name = f"model-{layer // per_shard + 1:05d}-of-{count:05d}.safetensors"
            weights = {k: mx.random.normal(shape).astype(mx.bfloat16) * 0.05 for k, shape in part.items()}
            write_checkpoint(directory, config, weights, name)
            weight_map |= dict.fromkeys(part, name)
            part = {}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.mark.full
@pytest.mark.parametrize("options", ["", "quantize=True", "dtype='float32'"])
def test_memory_stays_under_twice_the_largest_shard(tmp_path, options):
    source = large_checkpoint(tmp_path / "source")
    largest = max(file.stat().st_size for file in source.glob("*.safetensors"))
    program = (
        "import resource, sys; from dflash_mlx import convert; import mlx_lm.models.llama, mlx_lm.utils\n"
        "from transformers.models.auto.configuration_auto import CONFIG_MAPPING; CONFIG_MAPPING['llama']()\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == 'linux' else 1)\n"
        f"before = peak(); convert(sys.argv[1], sys.argv[2], {options}); print(peak() - before)"
    )
    command = [sys.executable, "-c", program, source, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2 * largest


def test_the_summary_of_a_small_model_tells_megabytes(tmp_path):
    record = {"written": {"model.safetensors": {"bytes": 5_300_000}}, "tensors": {"a": {}}, "parity": {"not_checked": "x"}}
    assert Conversion(tmp_path, "target", record).summary().startswith(f"Wrote target {tmp_path}: 1 tensors, 5.3 MB\n")
