"""Loading a pair: what is borrowed from the target, in which type, and pairs that do not belong together."""

import json
import warnings

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import family
from kit import TINY, flat, grow, ids_of, letters, raw_config, run, tiny_qwen3, tiny_target

from dflash_mlx import load, load_drafter
from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import CheckpointError, ConfigError, DFlashError, PairError
from dflash_mlx.loading import make_drafter
from dflash_mlx.models.drafter import Drafter
from dflash_mlx.models.target import Target
from dflash_mlx.pair_checks import mask_row_fault


def weights_for(raw, seed=1):
    mx.random.seed(seed)
    return flat(grow(Drafter(DrafterConfig.from_dict(raw))))


def pair_with(model, raw, weights=None):
    return make_drafter(DrafterConfig.from_dict(raw), dict(weights_for(raw) if weights is None else weights), model)


def save(folder, raw, weights):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def test_the_built_in_pair_loads_by_name_and_by_path(pair):
    model, tokenizer = load("tiny", dtype=mx.float32)
    assert {v.dtype for v in flat(model).values()} == {mx.float32}
    drafter = load_drafter(str(TINY / "drafter"), model)
    named = load_drafter("tiny", model)
    assert drafter.target is model and drafter.config.target_layer_ids == named.config.target_layer_ids == (1, 2, 3)
    assert all(mx.array_equal(a, b).item() for a, b in zip(flat(drafter).values(), flat(named).values(), strict=True))
    assert tokenizer.eos_token_ids == {0}


def test_a_folder_with_a_built_in_pairs_name_is_that_folder(tmp_path, monkeypatch, pair):
    monkeypatch.chdir(tmp_path)
    raw = json.loads((TINY / "drafter" / "config.json").read_text())
    raw["dflash_config"]["target_layer_ids"] = [0, 1, 2]
    save(tmp_path / "tiny", raw, dict(mx.load(str(TINY / "drafter" / "model.safetensors"))))
    assert load_drafter("tiny", pair[0]).config.target_layer_ids == (0, 1, 2)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_the_drafter_runs_in_the_targets_activation_type(dtype):
    model = tiny_target()
    model.set_dtype(dtype)
    drafter = pair_with(model, raw_config())
    assert {v.dtype for v in flat(drafter).values()} == {dtype}
    assert drafter.draft(mx.array([5]), mx.zeros((1, 3, 48), dtype), drafter.make_cache(), 0, 4).shape == (1, 3)


def norm_scaled(model):
    """Final norm weights other than one, so that a head on the wrong side of it shows."""
    mx.random.seed(8)
    model.model.norm.weight = mx.random.uniform(0.5, 2, model.model.norm.weight.shape)
    return model


@pytest.mark.parametrize("name", ["untied", "tied", "quantized", "tied and quantized", "soft-capped", "scaled embedding"])
def test_embedding_and_head_are_the_targets_own_functions(name):
    if name in ("soft-capped", "scaled embedding"):
        model = family("gemma2" if name == "soft-capped" else "gemma3")
    else:
        model = norm_scaled(tiny_qwen3(hidden=64, layers=4) if name.startswith("tied") else tiny_target(hidden=64))
    if "quantized" in name:
        nn.quantize(model, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0)
        assert not isinstance(model.model.embed_tokens, nn.Embedding)
    ids = mx.array([[5, 9, 33]])
    hidden = model.model(ids)
    size, vocab = hidden.shape[-1], model(ids).shape[-1]
    drafter = pair_with(model, raw_config(size, vocab))
    assert mx.array_equal(drafter._head(hidden), model(ids)).item()
    embedded = drafter._embed(ids)
    # mlx-lm rounds gemma3's scale to bfloat16, as the model's authors do.
    scale = {"soft-capped": size**0.5, "scaled embedding": mx.array(size**0.5, mx.bfloat16).item()}.get(name, 1.0)
    # float32: one product.
    assert mx.allclose(embedded, model.model.embed_tokens(ids) * scale, rtol=1e-5).item()


def test_tied_embeddings_in_the_drafters_config_say_nothing_about_the_head():
    model = tiny_target()
    for tied in (True, False):
        raw = raw_config(tie_word_embeddings=tied)
        hidden = model.model(mx.array([[5, 9]]))
        assert mx.array_equal(pair_with(model, raw)._head(hidden), model(mx.array([[5, 9]]))).item()


def test_a_drafter_vocabulary_padded_beyond_the_targets_changes_nothing():
    # 38: the target's head is borrowed whatever the drafter's vocab_size says.
    model, weights = tiny_target(), weights_for(raw_config())
    drafters = [pair_with(model, raw_config(vocab=vocab), weights) for vocab in (61, 77)]
    first, second = (run(model, d, [5, 9, 33], 12)[-1].stats.rounds for d in drafters)
    assert first == second


def test_the_mask_id_of_the_config_wins_over_the_tokenizers(pair):
    # 14: no tokenizer is asked.
    drafter = pair_with(tiny_target(), raw_config(mask=7))
    assert drafter.config.mask_token_id == 7
    seen = []
    drafter._embed = lambda ids: (seen.append(ids.tolist()), mx.zeros((*ids.shape, 24)))[1]
    drafter.draft(mx.array([5]), mx.zeros((1, 3, 48)), drafter.make_cache(), 0, 4)
    assert seen == [[[5, 7, 7, 7]]]


# Pairs that do not belong together

PAIRS = {
    "hidden size": (raw_config(hidden=20, target_hidden_size=24), "drafter has hidden_size 20, llama embeds into 24"),
    "target hidden size": (
        raw_config(target_hidden_size=20),
        "drafter expects target hidden_size 20, llama has 24",
    ),
    "tap beyond the layers": (raw_config(taps=(1, 4)), r"drafter taps layers \[1, 4\], llama has 4"),
    "number of layers": (raw_config(num_target_layers=6), "drafter expects 6 target layers, llama has 4"),
    "mask row": (raw_config(mask=61, vocab=80), "drafter's mask token 61 has no row in llama's embedding of 61"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_that_does_not_belong_together_is_refused(name):
    raw, message = PAIRS[name]
    with pytest.raises(PairError, match=f"do not belong together: {message}.* Use the drafter trained for this target"):
        pair_with(tiny_target(), raw)


@pytest.mark.parametrize(
    "swap",
    [
        *(lambda model: (model, "tiny"), lambda model: ("tiny", (model, letters()))),
        *(lambda model: ("tiny", "tiny"), lambda model: ("tiny", letters())),
    ],
)
def test_what_is_no_name_and_no_target_is_said_with_how_to_load_them(swap):
    with pytest.raises(PairError, match=r"load_drafter was given \w+ and \w+; it takes .* Write: model, tokenizer = load"):
        load_drafter(*swap(tiny_target()))


def test_all_faults_of_a_pair_are_in_one_message():
    raw = raw_config(hidden=20, taps=(1, 9), mask=70, vocab=80, num_target_layers=12)
    with pytest.raises(PairError) as caught:
        pair_with(tiny_target(), raw)
    text = str(caught.value)
    for part in ("taps layers [1, 9]", "expects 12 target layers", "target hidden_size 20", "embeds into 24", "mask token 70"):
        assert part in text


def test_missing_unexpected_and_misshapen_tensors_are_all_named():
    raw = raw_config()
    weights = weights_for(raw)
    del weights["fc.weight"], weights["layers.1.self_attn.q_norm.weight"]
    weights["layers.2.mlp.up_proj.weight"] = mx.zeros((36, 24))
    weights["layers.0.self_attn.k_proj.weight"] = mx.zeros((32, 24))
    with pytest.raises(CheckpointError) as caught:
        pair_with(tiny_target(), raw, weights)
    text = str(caught.value)
    assert "missing fc.weight; missing layers.1.self_attn.q_norm.weight" in text
    assert "unexpected layers.2.mlp.up_proj.weight" in text
    assert "layers.0.self_attn.k_proj.weight is [32, 24], the config says [16, 24]" in text


def test_an_unknown_architecture_is_refused_by_name():
    with pytest.raises(ConfigError, match="has EagleModel, which this version does not run"):
        pair_with(tiny_target(), raw_config(architectures=["EagleModel"]), {})


def test_a_target_given_as_drafter_and_a_drafter_given_as_target_are_refused(pair):
    with pytest.raises(DFlashError, match="(?i)drafter"):
        load_drafter(str(TINY / "target"), pair[0])
    with pytest.raises(DFlashError, match="(?i)drafter"):
        load(str(TINY / "drafter"))


def test_a_prefixed_drafter_is_the_bare_one(tmp_path, pair):
    raw = json.loads((TINY / "drafter" / "config.json").read_text())
    weights = dict(mx.load(str(TINY / "drafter" / "model.safetensors")))
    folder = save(tmp_path / "prefixed", raw, {f"model.{name}": value for name, value in weights.items()})
    model, tokenizer, bare = pair
    prefixed = load_drafter(str(folder), model)
    assert all(mx.array_equal(a, b).item() for a, b in zip(flat(prefixed).values(), flat(bare).values(), strict=True))
    assert (
        run(model, prefixed, [10, 20], 12, tokenizer)[-1].stats.rounds
        == run(model, bare, [10, 20], 12, tokenizer)[-1].stats.rounds
    )


def test_loading_a_drafter_leaves_the_target_as_it_was(pair):
    # 111: also if it fails.
    model = tiny_target()
    before, classes = ids_of(run(model, None, [5, 9], 12)), [type(m) for m in model.modules()]
    with pytest.raises(PairError):
        pair_with(model, raw_config(hidden=20))
    pair_with(model, raw_config())
    assert [type(m) for m in model.modules()] == classes
    assert ids_of(run(model, None, [5, 9], 12)) == before


def test_two_drafters_on_one_target_draft_as_if_alone():
    model = tiny_target()
    raws = [raw_config(), raw_config(block=3, taps=(1, 2), is_causal=False)]
    weights = [weights_for(raw, seed) for seed, raw in enumerate(raws)]
    alone = [run(model, pair_with(model, raw, w), [5, 9, 33], 12)[-1].stats.rounds for raw, w in zip(raws, weights, strict=True)]
    both = [pair_with(model, raw, w) for raw, w in zip(raws, weights, strict=True)]
    assert [run(model, d, [5, 9, 33], 12)[-1].stats.rounds for d in both] == alone


def test_the_targets_vocabulary_is_its_embeddings_rows():
    assert Target(tiny_target()).vocabulary == 61 and Target(tiny_qwen3()).vocabulary == 53


# What the files beside the weights, the vocabulary and the mask row tell


@pytest.fixture
def drafter_folder(tmp_path):
    raw = json.loads((TINY / "drafter" / "config.json").read_text())
    return save(tmp_path / "drafter", raw, dict(mx.load(str(TINY / "drafter" / "model.safetensors"))))


@pytest.mark.parametrize("name", ["more.safetensors", "more.npz", "more.pt"])
def test_files_beside_the_weights_that_are_not_read_are_named(drafter_folder, pair, name):
    if name.endswith(".safetensors"):
        mx.save_safetensors(str(drafter_folder / name), {"more": mx.ones((4,))})
    else:
        (drafter_folder / name).write_bytes(b"x")
    with pytest.warns(UserWarning, match=f"not read in .*drafter: {name}"):
        load_drafter(str(drafter_folder), pair[0])


def test_files_beside_a_target_that_are_not_read_are_named(tmp_path):
    for file in (TINY / "target").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.warns(UserWarning, match="not read in .*: pytorch_model.bin .not safetensors"):
        load(str(tmp_path))


def test_a_mask_row_of_zeros_is_said():
    model, raw = tiny_target(), raw_config(mask=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert mask_row_fault(pair_with(model, raw)) is None
    model.model.embed_tokens.weight[7] = 0
    with pytest.warns(UserWarning, match="row of the mask token 7 is zero"):
        drafter = pair_with(model, raw)
    assert "tau stays near 1" in mask_row_fault(drafter)


@pytest.mark.parametrize("value", [1e-8, 1e-30])
def test_a_mask_row_that_a_norms_epsilon_hides_is_said(value):
    model, raw = tiny_target(), raw_config(mask=7)
    model.model.embed_tokens.weight[7] = value
    with pytest.warns(UserWarning, match="row of the mask token 7 is next to zero"):
        pair_with(model, raw)


@pytest.mark.parametrize("value", [mx.nan, -mx.inf])
def test_a_mask_row_that_is_no_number_is_the_targets_fault(value):
    model = tiny_target()
    model.model.embed_tokens.weight[7] = value
    with pytest.raises(PairError, match="the embedding's row of the mask token 7 has NaN or infinity. The target's files"):
        pair_with(model, raw_config(mask=7))


def test_a_vocabulary_of_another_model_is_refused_and_a_padded_one_is_said():
    with pytest.warns(UserWarning, match="vocab_size 64, llama's embedding has 61 rows: right only where one of them is padded"):
        pair_with(tiny_target(), raw_config(vocab=64), weights_for(raw_config()))
    with pytest.raises(PairError, match="drafter's config says vocab_size 32000, llama's embedding has 61 rows"):
        pair_with(tiny_target(), raw_config(vocab=32000), weights_for(raw_config()))


def test_a_drafter_with_a_head_of_its_own_may_have_another_vocabulary():
    model, raw = tiny_target(), raw_config(vocab=61)
    weights = weights_for(raw) | {"lm_head.weight": mx.random.normal((61, 24))}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pair_with(model, raw | {"vocab_size": 64}, weights)
