"""Multimodal wrappers: the text model inside is tapped, and borrows a drafter its embedding and head, as one that stands alone.

The checkpoints have a vision part, in config and tensors, as transformers 5 saves them; only the text model is loaded.
"""

import json

import mlx.core as mx
import pytest
from convert_kit import copy_checkpoint, in_float32, write_checkpoint
from convert_kit import family as made_family
from families import Recorder, agree, error, greedy_line, known_drafter, quantize, some_line
from kit import ids_of, run
from mlx_lm.models import cache as mlx_lm_cache

from dflash_mlx.models.drafter import Drafter
from dflash_mlx.models.target import Target

VISION = {"model.visual.blocks.0.attn.qkv.weight": mx.ones((6, 2)), "model.visual.patch_embed.proj.weight": mx.ones((2, 3))}


def qwen3_5(conformance, directory):
    """As it lies there, with a vision_config; its tensors are added."""
    path = conformance / "targets" / "qwen3_5"
    copy = copy_checkpoint(path, directory)
    weights = dict(mx.load(str(path / "model.safetensors"))) | VISION
    mx.save_safetensors(str(copy / "model.safetensors"), weights, metadata={"format": "pt"})
    return copy, mx.load(str(path / "golden.safetensors"))


def qwen3_5_moe(conformance, directory):
    path = conformance / "targets" / "qwen3_5_moe_text"
    text = json.loads((path / "config.json").read_text())
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": {"model_type": "qwen3_5_moe", "depth": 1, "hidden_size": 2},
    }
    weights = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: value
        for name, value in mx.load(str(path / "model.safetensors")).items()
    }
    return write_checkpoint(directory, config, weights | VISION), mx.load(str(path / "golden.safetensors"))


def gemma4_unified(_, directory):
    vision = {"vision_config": {"model_type": "gemma4_vision", "hidden_size": 2}}
    return made_family("gemma4-wrapper", directory, lambda raw: raw | vision | {"model_type": "gemma4_unified"})


WRAPPERS = {maker.__name__: maker for maker in (qwen3_5, qwen3_5_moe, gemma4_unified)}


@pytest.fixture(params=WRAPPERS)
def wrapped(request, tmp_path):
    """The loaded text model and what transformers computes with it."""
    needs = request.param != "gemma4_unified"
    path, golden = WRAPPERS[request.param](request.getfixturevalue("conformance") if needs else None, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    assert config["vision_config"] and config["model_type"] == request.param
    return in_float32(path), golden


def test_taps_embedding_and_head_of_a_wrapper_are_its_text_models(wrapped):
    model, golden = wrapped
    ids = golden["input_ids"].astype(mx.int32)
    layers = len(model.layers)
    target = Target(model, range(layers))
    output = target(ids)
    hidden, features = output.hidden, output.features
    H = hidden.shape[-1]
    # The last one is stored after the final norm.
    known = [i for i in range(layers - 1) if f"hidden_states.{i + 1}" in golden]
    for i in known:
        assert error(features[..., i * H : (i + 1) * H], golden[f"hidden_states.{i + 1}"]) < 2e-4, i
    assert error(hidden, golden.get("last_hidden", golden.get(f"hidden_states.{layers}"))) < 2e-4
    assert error(target.head(hidden), golden["logits"]) < 2e-4
    if "hidden_states.0" in golden:
        assert error(target.embed(ids), golden["hidden_states.0"]) < 2e-4
    drafter = known_drafter(model, [])
    assert mx.array_equal(drafter._embed(ids), target.embed(ids)) and mx.array_equal(drafter._head(hidden), target.head(hidden))


def test_a_drafter_on_a_wrapper_drafts_as_one_without_caches(wrapped):
    """At every round: features of the whole text from one plain pass, and a drafter that has never seen any of it."""
    model, _ = wrapped
    line = greedy_line(model, some_line(19), 40)
    drafter = known_drafter(model, line, "noisy")
    drafter.__class__ = Recorder
    drafter.drafted = {}
    assert ids_of(run(model, drafter, line[:19], 40, block_size=5, prefill_step_size=7)) == line[19:]
    assert len(drafter.drafted) > 8
    target = Target(model, drafter.config.target_layer_ids)
    for at, drafted in drafter.drafted.items():
        features = target(mx.array([line[:at]]), mlx_lm_cache.make_prompt_cache(model)).features
        assert drafted == Drafter.draft(drafter, mx.array([line[at]]), features, drafter.make_cache(), 0, 5)[0].tolist(), at


@pytest.mark.full
@pytest.mark.parametrize("bits", [None, 4])
def test_a_wrapper_is_exact_for_200_tokens(wrapped, bits):
    model, _ = wrapped
    if bits:
        quantize(model, bits)
    line = greedy_line(model, some_line(19), 200)
    assert agree(model, line, 19) == []
    assert greedy_line(model, some_line(19), 200) == line
