"""Drafters in GGUF files: every drafted id is that of the same values in safetensors, and of the independent implementation."""

import json

import gguf
import gguf_drafters
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_drafters import write_drafter
from kit import DATA, TINY, flat, grow, meets, raw_config, references, rounds_of, run, tiny_target

from dflash_mlx import convert, load_drafter
from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import ConfigError, ConversionError
from dflash_mlx.loading import make_drafter
from dflash_mlx.models.architectures import build_drafter

H, V = 64, 61
PROMPT = [5, 9, 33, 7, 20, 41, 2, 8, 50]
SECOND = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 5, "block_size": 5}


def small(kind="DFlash", **changes):
    """A random drafter whose matrices all have rows of a multiple of 32: its config and tensors."""
    raw = raw_config(H, V, intermediate_size=96, head_dim=16, **changes)
    shapes = {}
    if kind == "DFlash 2":
        raw |= {"architectures": ["DFlash2DraftModel"], "is_causal": False}
        raw["dflash_config"] |= SECOND
        raw.pop("block_size")
    elif kind == "DSpark":
        raw |= {"architectures": ["DSparkDraftModel"], "markov_rank": 32, "sample_from_anchor": True}
        shapes = {"confidence_head.proj.weight": (1, H + 32), "confidence_head.proj.bias": (1,)}
    mx.random.seed(4)
    weights = flat(grow(build_drafter(DrafterConfig.from_dict(raw), shapes), 2.0))
    fill = lambda value: value if mx.any(value).item() else 0.3 * mx.random.normal(value.shape)  # noqa: E731
    return raw, {name: fill(value) for name, value in weights.items()}


def drafts(drafter, model, n=6):
    return rounds_of(run(model, drafter, PROMPT, n, block_size=5))


@pytest.fixture(scope="module")
def model():
    return tiny_target(hidden=H)


TYPES = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0]


@pytest.mark.parametrize("kind", ["DFlash", "DFlash 2", "DSpark"])
@pytest.mark.parametrize("type_", TYPES, ids=lambda kind: kind.name)
def test_a_gguf_drafter_drafts_what_its_values_do(tmp_path, model, kind, type_):
    """The reference: what gguf's own dequantization gives, as float tensors under the published names."""
    raw, weights = small(kind)
    meant = write_drafter(tmp_path / "d.gguf", raw, weights, type_)
    config = DrafterConfig.from_dict(raw)
    loaded = load_drafter(str(tmp_path / "d.gguf"), model)
    read = loaded.config
    assert (read.block_size, read.target_layer_ids, read.mask_token_id) == (5 + (kind == "DSpark"), (0, 2), 3)
    assert read.causal == config.causal and read.windows == config.windows
    assert drafts(loaded, model) == drafts(make_drafter(config, meant, model), model)


@pytest.mark.parametrize("type_", [Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_k_blocks_drafts_what_their_values_do(tmp_path, type_):
    """Rows of 256. gguf writes no K blocks, so their bytes are made here: small scales and random bits."""
    model = tiny_target(hidden=256)
    raw = raw_config(256, V, intermediate_size=256, head_dim=64, taps=(1,))
    mx.random.seed(4)
    weights = flat(grow(build_drafter(DrafterConfig.from_dict(raw), {}), 2.0))
    draw, size = np.random.default_rng(3), gguf.GGML_QUANT_SIZES[type_][1]

    def blocks(data, kind):
        if kind != type_:
            return gguf.quants.quantize(data, kind)
        made = draw.integers(0, 256, (data.shape[0], data.shape[1] // 256, size), dtype=np.uint8)
        scale = np.array([0.004, 0.02] if type_ == Kind.Q4_K else [0.0005], dtype=np.float16).view(np.uint8)
        at = slice(0, 4) if type_ == Kind.Q4_K else slice(size - 2, size)
        made[..., at] = scale
        return made.reshape(data.shape[0], -1)

    original = gguf_drafters.gguf.quantize
    gguf_drafters.gguf.quantize = blocks
    try:
        meant = write_drafter(tmp_path / "d.gguf", raw, weights, type_)
    finally:
        gguf_drafters.gguf.quantize = original
    expected = drafts(make_drafter(DrafterConfig.from_dict(raw), meant, model), model)
    assert drafts(load_drafter(str(tmp_path / "d.gguf"), model), model) == expected


@pytest.mark.parametrize("style", ["llama.cpp", "pre-merge", "dflash-draft"])
@pytest.mark.parametrize("kind", ["DFlash", "DFlash 2"])
def test_layers_are_read_in_both_numberings(tmp_path, model, style, kind):
    """llama.cpp counts the layer whose input is tapped; what came before it, and forks, the layer itself."""
    raw, weights = small(kind)
    write_drafter(tmp_path / "d.gguf", raw, weights, style=style)
    loaded = load_drafter(str(tmp_path / "d.gguf"), model)
    assert loaded.config.target_layer_ids == (0, 2)
    assert drafts(loaded, model) == drafts(make_drafter(DrafterConfig.from_dict(raw), dict(weights), model), model)


@pytest.mark.full
@pytest.mark.parametrize("second", [False, True], ids=["DFlash", "DFlash 2"])
def test_every_drafted_id_is_the_independent_implementations(tmp_path, pair, second):
    data = references(DATA / "dflash2" / "rounds.json") if second else references(DATA / "variants" / "sliding.json")
    weights = dict(mx.load(str(TINY / "drafter" / "model.safetensors")))
    weights |= mx.load(str(DATA / "dflash2" / "extra.safetensors")) if second else {}
    write_drafter(tmp_path / "d.gguf", data["config"], weights, Kind.BF16)
    model, tokenizer, _ = pair
    loaded = load_drafter(str(tmp_path / "d.gguf"), model)
    for case in data["prompts"][1:3]:
        assert meets(run(model, loaded, case["prompt_ids"], len(case["ids"]), tokenizer), case["ids"], case["rounds"])


def test_a_reduced_vocabulary_comes_with_its_map_and_head(tmp_path, model):
    raw, weights = small(draft_vocab_size=20)
    keep = mx.arange(20) * 3
    weights |= {"lm_head.weight": mx.random.normal((20, H)), "d2t": keep - mx.arange(20)}
    meant = write_drafter(tmp_path / "d.gguf", raw, weights)
    got = drafts(load_drafter(str(tmp_path / "d.gguf"), model), model)
    assert got == drafts(make_drafter(DrafterConfig.from_dict(raw), meant, model), model)
    assert {token for drafted, _, _ in got for token in drafted} <= set(keep.tolist())


def test_a_dspark_file_without_the_key_drafts_from_the_anchor(tmp_path, model):
    """As llama.cpp reads it."""
    raw, weights = small("DSpark")
    write_drafter(tmp_path / "d.gguf", raw, weights, keys={"dflash.sample_from_anchor": None})
    loaded = load_drafter(str(tmp_path / "d.gguf"), model)
    assert loaded.config.sample_from_anchor and loaded.config.block_size == 6
    write_drafter(tmp_path / "e.gguf", raw, weights, keys={"dflash.sample_from_anchor": False})
    assert load_drafter(str(tmp_path / "e.gguf"), model).config.block_size == 5


@pytest.mark.parametrize("kind", ["DFlash", "DFlash 2"])
def test_a_gguf_drafter_is_converted_and_drafts_the_same(tmp_path, model, kind):
    raw, weights = small(kind)
    write_drafter(tmp_path / "d.gguf", raw, weights, Kind.Q8_0)
    expected = drafts(load_drafter(str(tmp_path / "d.gguf"), model), model)
    done = convert(str(tmp_path / "d.gguf"), str(tmp_path / "out"))
    assert done.kind == "drafter" and done.record["source_tensors"]["enc.output_norm.weight"] == "as hidden_norm.weight"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["bits"] == 8
    assert drafts(load_drafter(str(tmp_path / "out"), model), model) == expected


@pytest.mark.parametrize(
    "change,message",
    [
        ({"keys": {"dflash.target_layers": None}}, "no key dflash.target_layers"),
        ({"keys": {"dflash.target_layers": ["a", "b"]}}, r"dflash.target_layers = \['a', 'b'\], which are no layers"),
        ({"keys": {"dflash.target_layers": [1.5, 3.0]}}, r"dflash.target_layers = \[1.5, 3.0\], which are no layers"),
        ({"keys": {"dflash.attention.sliding_window_pattern": 6}}, "sliding_window_pattern = 6; which layers slide is read"),
        ({"keys": {"dflash.block_size": None}}, "no key dflash.block_size"),
        ({"keys": {"tokenizer.ggml.mask_token_id": None}}, "no key tokenizer.ggml.mask_token_id"),
        ({"extra": "blk.0.attn_sinks.weight"}, r"blk.0.attn_sinks.weight \(attention sinks\) has no place"),
        ({"extra": "blk.0.odd.weight"}, "blk.0.odd.weight has no place in the drafters"),
    ],
)
def test_what_a_file_lacks_or_has_too_much_is_named(tmp_path, model, monkeypatch, change, message):
    raw, weights = small()
    if extra := change.get("extra"):
        monkeypatch.setitem(gguf_drafters._ROOT, "more", extra)
        weights["more"] = mx.zeros((H,))
    write_drafter(tmp_path / "d.gguf", raw, weights, keys=change.get("keys", {}))
    with pytest.raises(ConversionError, match=f"d.gguf is a DFlash drafter in a GGUF file that cannot be read: .*{message}"):
        load_drafter(str(tmp_path / "d.gguf"), model)


@pytest.mark.parametrize("key, value", [("block_size", 0), ("attention.head_count_kv", [2, 1]), ("embedding_length", "x")])
def test_a_value_of_no_use_is_told_of_the_file_and_not_of_a_config_json(tmp_path, model, key, value):
    write_drafter(tmp_path / "d.gguf", *small(), keys={f"dflash.{key}": value})
    with pytest.raises(ConfigError, match="d.gguf is not a DFlash drafter's.*Give the safetensors that the GGUF file was made"):
        load_drafter(str(tmp_path / "d.gguf"), model)


@pytest.mark.parametrize(
    "pattern, window, slides",
    [(None, 12, [1, 1]), (False, 12, [0, 0]), (True, 12, [1, 1]), ([0, 1], 12, [0, 1]), ([1, 1], 0, [0, 0])],
)
def test_the_layers_that_slide_are_those_that_the_file_means(tmp_path, model, pattern, window, slides):
    """llama.cpp takes one value for all layers; a window of 0 is none."""
    keys = {"dflash.attention.sliding_window_pattern": pattern, "dflash.attention.sliding_window": window}
    write_drafter(tmp_path / "d.gguf", *small(), keys=keys)
    assert load_drafter(str(tmp_path / "d.gguf"), model).config.windows == tuple(12 if slide else None for slide in slides)


def test_a_value_for_each_layer_is_one_where_they_are_alike(tmp_path, model):
    lists = {"attention.head_count_kv": [2, 2], "attention.head_count": [4, 4], "feed_forward_length": [96, 96]}
    write_drafter(tmp_path / "d.gguf", *small())
    expected = drafts(load_drafter(str(tmp_path / "d.gguf"), model), model)
    write_drafter(tmp_path / "e.gguf", *small(), keys={f"dflash.{key}": value for key, value in lists.items()})
    assert drafts(load_drafter(str(tmp_path / "e.gguf"), model), model) == expected


def published(folder, raw, weights):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return str(folder)


WRITTEN = {"as it is": ({}, Kind.BF16), "float16": ({"dtype": "float16"}, Kind.F16), "float32": ({"dtype": "float32"}, Kind.F32)}
WRITTEN |= {"Q8_0": ({"quantize": True, "q_bits": 8}, Kind.Q8_0), "Q4_0": ({"quantize": True}, Kind.Q4_0)}


@pytest.mark.parametrize("kind", ["DFlash", "DFlash 2", "DSpark"])
@pytest.mark.parametrize("how", WRITTEN)
def test_a_written_file_is_what_llama_cpps_converter_writes(tmp_path, model, kind, how):
    """The reference: the fixture's writer, whose names and keys are llama.cpp's; each byte and each id."""
    raw, weights = small(kind)
    weights = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    options, type_ = WRITTEN[how]
    done = convert(published(tmp_path / "source", raw, weights), str(tmp_path / "out"), to="gguf", **options)
    assert done.kind == "drafter" and "drafter.gguf" in done.record["written"]
    held = {name: value.astype(mx.float16) if how == "float16" else value for name, value in weights.items()}
    meant = write_drafter(tmp_path / "theirs.gguf", raw, held, type_, leave_out=())
    ours, theirs = (gguf.GGUFReader(path) for path in (tmp_path / "out" / "drafter.gguf", tmp_path / "theirs.gguf"))
    by_name = {tensor.name: tensor for tensor in theirs.tensors}
    assert {tensor.name for tensor in ours.tensors} == set(by_name)
    for tensor in ours.tensors:
        other = by_name[tensor.name]
        if tensor.name.startswith("conf_proj"):
            continue
        assert tensor.tensor_type == other.tensor_type and tensor.data.tobytes() == other.data.tobytes(), tensor.name
    for key, field in theirs.fields.items():
        if not key.startswith(("GGUF.", "general.")):
            assert ours.fields[key].contents() == field.contents(), key
    drafter = load_drafter(str(tmp_path / "out" / "drafter.gguf"), model)
    expected = make_drafter(DrafterConfig.from_dict(raw), {name: mx.array(value) for name, value in meant.items()}, model)
    assert drafts(drafter, model) == drafts(expected, model)


def test_the_targets_vocabulary_goes_into_the_file(tmp_path):
    raw, weights = small()
    writer = gguf.GGUFWriter(tmp_path / "target.gguf", "qwen3")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(V)])
    writer.add_token_types([1] * V)
    writer.add_eos_token_id(7)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(published(tmp_path / "source", raw, weights), str(tmp_path / "out"), to="gguf", vocab=str(tmp_path / "target.gguf"))
    ours, theirs = (gguf.GGUFReader(tmp_path / name) for name in ("out/drafter.gguf", "target.gguf"))
    kept = [name for name in theirs.fields if name.startswith("tokenizer.")]
    assert len(kept) == 5
    for name in kept:
        assert (ours.fields[name].contents(), ours.fields[name].types) == (
            theirs.fields[name].contents(),
            theirs.fields[name].types,
        )
    assert ours.fields["tokenizer.ggml.mask_token_id"].contents() == raw["dflash_config"]["mask_token_id"]


NO_PLACE = {
    "sinks": ({"attention_sink_bias": True}, "attention_sink_bias"),
    "a scale of the values": ({"attention_value_scale": 0.5}, "attention_value_scale = 0.5"),
    "pairs": ({"rope_is_neox_style": False}, "ropes"),
    "the embedding as a tap": ({"last_tap": "before"}, "last_tap = 'before'"),
}


@pytest.mark.parametrize("name", NO_PLACE)
def test_what_llama_cpp_has_no_place_for_is_refused(tmp_path, name):
    changes, message = NO_PLACE[name]
    raw, weights = small(**changes)
    with pytest.raises(ConversionError, match=message):
        convert(published(tmp_path / "source", raw, weights), str(tmp_path / "out"), to="gguf")
    assert not (tmp_path / "out").exists()


def test_a_target_is_not_written_as_gguf(tmp_path):
    with pytest.raises(ConversionError, match="is a target"):
        convert(str(TINY / "target"), str(tmp_path / "out"), to="gguf")
