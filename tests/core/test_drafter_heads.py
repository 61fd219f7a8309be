"""Whose embedding and head a drafter uses: its own is never replaced, the target's never dropped; and refusals by name."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import family
from kit import TINY, flat, ids_of, raw_config, rounds_of, run, tiny_qwen3, tiny_target

from dflash_mlx import load_drafter
from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import CheckpointError, ConfigError, PairError
from dflash_mlx.loading import make_drafter
from dflash_mlx.models.drafter import Drafter
from dflash_mlx.models.target import Target

H, V = 24, 61
PROMPT = [5, 9, 33, 7, 20, 41, 2, 8, 50]


def published(seed=3, **changes):
    """A random drafter's config and tensors as a v1 checkpoint has them."""
    raw = raw_config(H, V, **changes)
    mx.random.seed(seed)
    drafter = Drafter(DrafterConfig.from_dict(raw))
    return raw, {name: value * 4 if value.ndim > 1 else value for name, value in flat(drafter).items()}


def make(raw, weights, model):
    return make_drafter(DrafterConfig.from_dict(raw), dict(weights), model)


def drafts(drafter, model, n=20):
    got = run(model, drafter, PROMPT, n, block_size=5)
    plain = run(model, None, PROMPT, n)
    assert ids_of(got) == ids_of(plain)
    return rounds_of(got)


def reduced(model, weights, keep):
    """The same drafter with a head of its own: the target's rows of the tokens in `keep`, and the map to them."""
    head = model.lm_head.weight[mx.array(keep)]
    d2t = mx.array(keep) - mx.arange(len(keep))
    t2d = mx.array([i in keep for i in range(V)])
    return {**weights, "lm_head.weight": head, "d2t": d2t.astype(mx.int64), "t2d": t2d}


def speculators(raw, **changes):
    """A v1 config as vLLM's speculators library writes it: layers in an object of their own, taps counted from the embedding."""
    inner = {k: raw[k] for k in raw if k not in ("architectures", "block_size", "dflash_config")}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": inner,
        "aux_hidden_state_layer_ids": [i + 1 for i in raw["dflash_config"]["target_layer_ids"]],
        "mask_token_id": raw["dflash_config"]["mask_token_id"],
        "block_size": raw["block_size"],
        "speculators_config": {"algorithm": "dflash", "proposal_methods": [{"speculative_tokens": raw["block_size"] - 1}]},
        **changes,
    }


def test_a_head_of_all_the_targets_rows_drafts_what_the_targets_head_does():
    model, (raw, weights) = tiny_target(), published()
    expected = drafts(make(raw, weights, model), model)
    whole = make(raw | {"draft_vocab_size": V}, reduced(model, weights, list(range(V))), model)
    assert drafts(whole, model) == expected
    own = make(
        raw, {**weights, "lm_head.weight": model.lm_head.weight, "embed_tokens.weight": model.model.embed_tokens.weight}, model
    )
    assert drafts(own, model) == expected


def test_a_reduced_vocabulary_drafts_the_best_of_its_own_tokens():
    """vllm-ascend #11374: the target's head in its place took acceptance from 25 % to 1.7 %."""
    model, (raw, weights) = tiny_target(), published()
    keep = [i for i in range(V) if i % 3 != 1]
    drafter = make(raw | {"draft_vocab_size": len(keep)}, reduced(model, weights, keep), model)
    got = drafts(drafter, model)
    assert {t for ids, _, _ in got for t in ids} <= set(keep)
    # The whole head, with the other rows put out of reach, draws the same.
    whole = make(raw, weights, model)
    out = mx.array([0.0 if i in keep else -1e9 for i in range(V)])
    target = Target(model)
    whole.bind(target.embed, lambda hidden: target.head(hidden) + out, model)
    assert drafts(whole, model) == got
    assert drafts(make(raw, weights, model), model) != got


def test_an_own_embedding_is_used_and_not_replaced():
    model, (raw, weights) = tiny_target(), published()
    mine = mx.random.normal((V, H), key=mx.random.key(9))
    own = make(raw, {**weights, "embed_tokens.weight": mine}, model)
    assert mx.array_equal(own._embed(mx.array([[7]]))[0, 0], mine[7])
    assert drafts(own, model) != drafts(make(raw, weights, model), model)
    # bind() again, as a trainer or a test does, does not bring the target's back.
    own.bind(Target(model).embed, Target(model).head, model)
    assert mx.array_equal(own._embed(mx.array([[7]]))[0, 0], mine[7])


def test_a_speculators_folder_loads_with_its_taps_counted_from_the_first_layer(tmp_path):
    model, (raw, weights) = tiny_target(), published()
    keep = list(range(0, V, 2))
    tensors = reduced(model, weights, keep)
    expected = drafts(make(raw | {"draft_vocab_size": len(keep)}, tensors, model), model)
    tensors |= {"verifier_lm_head.weight": model.lm_head.weight, "verifier_norm.weight": model.model.norm.weight}
    (tmp_path / "config.json").write_text(json.dumps(speculators(raw, draft_vocab_size=len(keep), sample_from_anchor=False)))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    drafter = load_drafter(str(tmp_path), model)
    assert drafter.config.target_layer_ids == (0, 2)
    assert drafts(drafter, model) == expected


def test_speculators_keys_become_the_published_ones():
    raw = raw_config(H, V)
    config = DrafterConfig.from_dict(speculators(raw, block_size=None, draft_vocab_size=40))
    assert (config.architecture, config.block_size, config.draft_vocab_size, config.mask_token_id) == (
        "DFlashDraftModel",
        5,
        40,
        3,
    )
    assert config.target_layer_ids == (0, 2) and config.read_from["target_layer_ids"] == "aux_hidden_state_layer_ids - 1"
    assert config.causal == (True, False) and config.windows == (11, None)
    assert DrafterConfig.from_dict(speculators(raw, sliding_window_non_causal=True)).causal == (False, False)
    # Hidden state 0 is the embedding: what the first layer is given.
    assert DrafterConfig.from_dict(speculators(raw, aux_hidden_state_layer_ids=[0, 3])).target_layer_ids == (-1, 2)


def test_a_padded_vocabulary_borrows_the_head_all_the_same():
    """vllm #46435: sizes that differ by padding alone."""
    model, (raw, weights) = tiny_target(), published()
    expected = drafts(make(raw, weights, model), model)
    assert drafts(make(raw | {"vocab_size": V + 16}, weights, model), model) == expected


def test_a_tied_target_lends_its_embedding_as_head():
    model = tiny_qwen3(layers=4, hidden=H, vocab=V)
    raw, weights = published()
    drafter = make(raw, weights, model)
    hidden = mx.random.normal((1, 2, H))
    assert mx.array_equal(drafter._head(hidden), model.model.embed_tokens.as_linear(hidden))


@pytest.mark.parametrize("name", ["gemma4", "recurrent_gemma", "granitemoehybrid"])
def test_a_borrowed_head_and_embedding_keep_the_targets_scale_and_soft_cap(name):
    model = family(name)
    target, ids = Target(model), mx.array([[3, 40, 7, 11]])
    hidden = target(ids).hidden
    assert mx.array_equal(target.head(hidden), model(ids))
    table = next(m for _, m in model.named_modules() if isinstance(m, nn.Embedding) and m.weight.shape == (83, 48))
    # Scaled in each of these families; the drafter sees what the first layer sees.
    scale = (target.embed(ids) / table(ids)).flatten()
    assert abs(scale[0].item() - 1) > 0.5 and mx.allclose(scale, scale[0], rtol=1e-5)


def test_a_quantized_target_lends_its_quantized_head():
    """sglang #35534: code that reads `.weight` breaks on a quantized head."""
    model = tiny_target(hidden=32, intermediate_size=64)
    nn.quantize(model, 32, 8)
    drafter = tiny_drafter_for(model)
    hidden = mx.random.normal((1, 2, 32))
    assert mx.array_equal(drafter._head(hidden), model.lm_head(hidden))
    run(model, drafter, PROMPT, 5)


def tiny_drafter_for(model):
    raw = raw_config(32, V)
    mx.random.seed(1)
    return make_drafter(DrafterConfig.from_dict(raw), flat(Drafter(DrafterConfig.from_dict(raw))), model)


def test_a_stated_embedding_scale_is_applied_once():
    """Where the target's own code scales (Gemma) the config only says it again; where it does not, the drafter needs it."""
    raw = raw_config(48, 83, input_embedding_scale=48**0.5)
    weights = flat(Drafter(DrafterConfig.from_dict(raw)))
    gemma, llama = family("gemma3"), family("llama")
    ids = mx.array([[7, 9]])
    assert mx.array_equal(make(raw, weights, gemma)._embed(ids), Target(gemma).embed(ids))
    assert mx.array_equal(make(raw, weights, llama)._embed(ids), llama.model.embed_tokens(ids) * 48**0.5)
    own = {**weights, "embed_tokens.weight": mx.ones((83, 48))}
    assert mx.allclose(make(raw, own, gemma)._embed(ids), mx.full((1, 2, 48), 48**0.5))
    with pytest.raises(PairError, match="scales its embedding by 6.9.*; the drafter's input_embedding_scale says 3"):
        make(raw | {"input_embedding_scale": 3.0}, weights, gemma)


@pytest.mark.parametrize("skipped", ["", "fc"])
def test_a_quantized_drafter_loads_whole_or_in_part(pair, skipped):
    model, tokenizer, float_drafter = pair
    raw = json.loads((TINY / "drafter" / "config.json").read_text())
    drafter = Drafter(DrafterConfig.from_dict(raw))
    drafter.load_weights(list(mx.load(str(TINY / "drafter" / "model.safetensors")).items()))
    nn.quantize(drafter, 32, 8, class_predicate=lambda n, m: hasattr(m, "to_quantized") and n != skipped)
    loaded = make(raw | {"quantization": {"group_size": 32, "bits": 8}}, flat(drafter), model)
    prompt = tokenizer.encode("def test_")
    got, exact = (run(model, d, prompt, 60, tokenizer) for d in (loaded, float_drafter))
    assert ids_of(got) == ids_of(exact)
    assert got[-1].stats.tau > 0.8 * exact[-1].stats.tau


FAULTS = {
    "a reduced head without its map": (
        {"draft_vocab_size": 20},
        {"lm_head.weight": (20, H)},
        "missing d2t, the map from the reduced vocabulary",
    ),
    "a map without a head": ({"draft_vocab_size": 20}, {"d2t": (20,)}, "lm_head.weight has 0 rows, draft_vocab_size says 20"),
    "a map of another length": (
        {"draft_vocab_size": 20},
        {"lm_head.weight": (20, H), "d2t": (30,)},
        r"d2t is \[30\], the config says \[20\]",
    ),
    "a map that the config does not know": ({}, {"lm_head.weight": (20, H), "d2t": (20,)}, "the config has no draft_vocab_size"),
    "a head of another width": ({}, {"lm_head.weight": (V, H + 1)}, r"lm_head.weight is \[61, 25\], the config says \[61, 24\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_does_not_fit_its_config_is_refused(fault):
    model, (raw, weights) = tiny_target(), published()
    keys, shapes, message = FAULTS[fault]
    extra = {name: mx.zeros(shape, dtype=mx.int32 if name == "d2t" else mx.float32) for name, shape in shapes.items()}
    with pytest.raises(CheckpointError, match=message):
        make(raw | keys, weights | extra, model)


def test_a_head_that_names_tokens_the_target_has_not_is_refused():
    model, (raw, weights) = tiny_target(), published()
    with pytest.raises(PairError, match=r"head names tokens 0\.\.69; llama's embedding has rows 0\.\.60"):
        make(raw | {"draft_vocab_size": 70, "vocab_size": 70}, {**weights, "lm_head.weight": mx.zeros((70, H))}, model)
    tensors = reduced(model, weights, [4, 5, 6])
    tensors["d2t"] = mx.array([-1, 0, 99])
    with pytest.raises(PairError, match=r"head names tokens -1\.\.101"):
        make(raw | {"draft_vocab_size": 3}, tensors, model)


def test_an_own_embedding_too_short_for_the_target_or_the_mask_is_refused():
    model, (raw, weights) = tiny_target(), published()
    with pytest.raises(
        PairError, match="own embedding has 40 rows, llama's has 61; drafter's mask token 50 has no row in its own"
    ):
        raw["dflash_config"]["mask_token_id"] = 50
        make(raw, {**weights, "embed_tokens.weight": mx.zeros((40, H))}, model)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"architectures": ["KDADraftModel"]}, "has KDADraftModel"),
        ({"markov_rank": 4, "markov_head_type": "lstm"}, "has markov_head_type = 'lstm'"),
        ({"projector_type": "duet"}, "has projector_type = 'duet'"),
        ({"architectures": ["DFlashLagunaForCausalLM"], "log_snr_conditioning": True}, "has log_snr_conditioning = True"),
    ],
)  # fmt: skip
def test_other_drafters_and_extensions_are_refused_by_name(changes, message):
    model, (raw, weights) = tiny_target(), published()
    with pytest.raises(ConfigError, match=f"{message}, which this version does not run; it runs DFlashDraftModel, "):
        make(raw | changes, weights, model)
