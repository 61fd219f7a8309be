"""DSpark: every drafted id and confidence against NumPy from the published formulas, in the loop and beside it."""

import json

import mlx.core as mx
import numpy as np
import pytest
import reference
from kit import flat, grow, ids_of, plant, raw_config, rounds_of, run, tiny_target

from dflash_mlx import convert, load_drafter
from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import CheckpointError, ConfigError
from dflash_mlx.loading import make_drafter
from dflash_mlx.models import dspark
from dflash_mlx.models.architectures import build_drafter
from dflash_mlx.models.dspark import DSparkDrafter, MarkovHead
from dflash_mlx.models.target import Target
from dflash_mlx.sampling import Distribution, KeyedNoise
from dflash_mlx.train.start import load_start

H, V, N, RANK = 24, 61, 4, 7
KINDS = ["vanilla", "gated", "rnn"]
PROMPT = [5, 9, 33, 7, 20, 41, 2, 8, 50]


def raw_dspark(kind="vanilla", rank=RANK, block=N, **changes):
    """A config as DeepSpec writes it: everything at the top level, as many drafts as `block_size` says."""
    raw = raw_config(H, V, block=block, dflash_config=None, layer_types=["full_attention"] * 2, sliding_window=None)
    own = {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "mask_token_id": 3, "target_layer_ids": [0, 2]}
    head = {"markov_rank": rank, "markov_head_type": kind, "enable_confidence_head": True, "confidence_head_with_markov": True}
    return {k: v for k, v in (raw | own | head | changes).items() if v is not None}


def tensors(raw, confidence=H + RANK, bias=True, seed=5):
    """Random tensors of every part, as published; `confidence`: columns of that head, 0 for none."""
    shapes = {"confidence_head.proj.weight": (1, confidence)} if confidence else {}
    shapes |= {"confidence_head.proj.bias": (1,)} if confidence and bias else {}
    mx.random.seed(seed)
    drafter = grow(build_drafter(DrafterConfig.from_dict(raw), shapes), 3.0)
    if raw.get("markov_rank"):
        grow(drafter.markov_head, 2.0)
    given = flat(drafter)
    return given | {name: mx.random.normal(given[name].shape) for name in given if name.endswith("_proj.bias")}


def doubles(weights):
    return {name: np.array(value.astype(mx.float32), dtype=np.float64) for name, value in weights.items()}


def make(raw, weights, model):
    return make_drafter(DrafterConfig.from_dict(raw), dict(weights), model)


def drafts_by_numpy(model, config, weights, line, at, pick=lambda slot, logits: logits.argmax()):
    """Ids and confidences behind `line[at]`, from the features of one plain pass and no cache."""
    features = np.array(Target(model, config.target_layer_ids)(mx.array([line[:at]])).features[0], dtype=np.float64)
    head = np.array(model.lm_head.weight, dtype=np.float64)
    rows = config.block_size - config.sample_from_anchor
    embedding = np.array(model.model.embed_tokens.weight, dtype=np.float64)
    block = embedding[[line[at], *[config.mask_token_id] * (rows - 1)]]
    hidden = reference.hidden_states(weights, config, features, block)[not config.sample_from_anchor :]
    head = weights.get("lm_head.weight", head)
    return reference.markov_rows(weights, config.markov_head_type, hidden, hidden @ head.T, line[at], pick)


def learned(weights, line):
    """The Markov tables of a text's own pairs, so that rounds end at all depths: V columns, one for each token."""
    after = np.zeros((V, V))
    for first, second in zip(line, line[1:], strict=False):
        after[second, first] = 40.0 if (first * 7 + second) % 4 else 0.0
    w1 = np.eye(V)
    return weights | {"markov_head.markov_w1.weight": mx.array(w1), "markov_head.markov_w2.weight": mx.array(after)}


CASES = {
    "DeepSpec, vanilla": ("vanilla", {}),
    "DeepSpec, gated": ("gated", {}),
    "DeepSpec, rnn": ("rnn", {}),
    "from the masks alone": ("vanilla", {"sample_from_anchor": False, "block_size": N + 1}),
    "from the masks alone, rnn": ("rnn", {"sample_from_anchor": False, "block_size": N + 1}),
    "causal and sliding": (
        "vanilla", {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 6},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_drafted_id_of_the_loop_is_numpys_without_caches(name):
    model, (kind, changes) = tiny_target(), CASES[name]
    raw = raw_dspark(kind, V if kind == "vanilla" else RANK, **changes)
    weights = tensors(raw, confidence=H + (V if kind == "vanilla" else RANK))
    n = 24 if kind == "vanilla" else 10
    plain = run(model, None, PROMPT, n)
    line = [*PROMPT, *ids_of(plain)]
    if kind == "vanilla":
        weights = learned(weights, line)
    drafter, numbers = make(raw, weights, model), doubles(weights)
    got = run(model, drafter, PROMPT, n, block_size=N + 1, prefill_step_size=4)
    assert ids_of(got) == ids_of(plain)
    at, depths = len(PROMPT), set()
    for drafted, accepted, _ in rounds_of(got):
        if at >= len(line):
            break
        assert drafted == drafts_by_numpy(model, drafter.config, numbers, line, at)[0], at
        depths.add(accepted)
        at += accepted + 1
    assert kind != "vanilla" or len(depths) > 2, depths


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reads_token,bias", [(True, True), (True, False), (False, True)])
def test_confidences_are_the_confidence_heads(kind, reads_token, bias):
    """They are what the confidence cut is given, for the drafts that the head ran for."""
    model, raw = tiny_target(), raw_dspark(kind)
    weights = tensors(raw, H + RANK * reads_token, bias)
    drafter, line = make(raw, weights, model), [*PROMPT, 11]
    features = Target(model, (0, 2))(mx.array([PROMPT])).features
    ids, sure = drafter.draft_with_confidence(mx.array([11]), features, drafter.make_cache(), 0, N + 1, n=3)
    want, told = drafts_by_numpy(model, drafter.config, doubles(weights), line, len(PROMPT))
    assert ids.tolist() == [want[:3]] and sure.shape == (1, 3)
    # float32 against float64.
    assert np.abs(np.array(sure[0]) - told[:3]).max() < 1e-4 and len({round(s, 3) for s in told}) > 1


def test_without_a_confidence_head_the_greatest_probability_stands_in():
    model, raw = tiny_target(), raw_dspark(enable_confidence_head=None, confidence_head_with_markov=None)
    drafter = make(raw, tensors(raw, confidence=0), model)
    hidden = mx.random.normal((1, N, H), key=mx.random.key(1))
    ids, sure = drafter.choose(hidden, mx.array([7]))
    before = mx.concatenate([mx.array([[7]]), ids[:, :-1]], axis=1)
    bias = drafter.markov_head.markov_w2(drafter.markov_head.markov_w1(before))
    expected = mx.softmax(drafter._head(hidden) + bias, axis=-1).max(axis=-1)
    assert mx.allclose(sure, expected, atol=1e-5)


def reduced(weights, keep, seed=6):
    rows = {"lm_head.weight": (len(keep), H), "markov_head.markov_w2.weight": (len(keep), RANK)}
    mx.random.seed(seed)
    made = {name: mx.random.normal(shape) for name, shape in rows.items()}
    return weights | made | {"d2t": mx.array(keep) - mx.arange(len(keep))}


@pytest.mark.parametrize("kind", KINDS)
def test_a_reduced_vocabulary_walks_the_targets_ids(kind):
    """W1 is indexed by the target's tokens, W2 by the head's: a draft is mapped before it is the next slot's token."""
    model, keep = tiny_target(), [i for i in range(V) if i % 3 != 1]
    raw = raw_dspark(kind, draft_vocab_size=len(keep))
    weights = reduced(tensors(raw), keep)
    drafter = make(raw, weights, model)
    features = Target(model, (0, 2))(mx.array([PROMPT])).features
    for anchor in (11, 34, 60):
        ids = drafter.draft(mx.array([anchor]), features, drafter.make_cache(), 0, N + 1)
        want, _ = drafts_by_numpy(model, drafter.config, doubles(weights), [*PROMPT, anchor], len(PROMPT))
        assert ids.tolist() == [want] and set(want) <= set(keep)


def test_rows_of_a_batch_do_not_mix():
    model, raw = tiny_target(), raw_dspark("rnn")
    drafter = make(raw, tensors(raw), model)
    hidden, anchors = mx.random.normal((3, N, H), key=mx.random.key(1)), mx.array([7, 40, 2])
    together = drafter.choose(hidden, anchors)
    for row in range(3):
        alone = drafter.choose(hidden[row : row + 1], anchors[row : row + 1])
        assert together[0][row].tolist() == alone[0][0].tolist() and mx.allclose(together[1][row], alone[1][0], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampled_draft_uses_the_targets_noise_of_its_position(kind):
    """In the loop, at T = 0.9: each slot is the argmax of its log-probabilities over T and the target's own noise there."""
    model, raw, seed, temp = tiny_target(), raw_dspark(kind), 7, 0.9
    weights = tensors(raw)
    drafter, sampler = make(raw, weights, model), Distribution(temp)
    options = {"sampler": sampler, "seed": seed}
    got = run(model, drafter, PROMPT, 8, block_size=N + 1, **options)
    plain = run(model, None, PROMPT, 8, **options)
    assert ids_of(got) == ids_of(plain)
    line, at, noise = [*PROMPT, *ids_of(plain)], len(PROMPT), KeyedNoise(seed)
    for drafted, accepted, _ in rounds_of(got):
        if at >= len(line):
            break
        rows = np.array(noise.rows(at + 1, N, V), dtype=np.float64)
        want, _ = drafts_by_numpy(
            model,
            drafter.config,
            doubles(weights),
            line,
            at,
            lambda slot, logits, rows=rows: (logits / temp + rows[slot]).argmax(),
        )
        assert drafted == want, at
        at += accepted + 1


def hottest(noise):
    """Picks by Gumbel-max: noise [N, V] of the slots, times the temperature."""
    return lambda slot, logits: (logits + noise[slot]).argmax()


# name: (config, drafts, from the anchor's row, rank, kind, taps)
NESTED = {"mask_token_id": 3, "target_layer_ids": [0, 2]}
SPECULATORS = {
    "architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark", "mask_token_id": 3, "block_size": 8,
    "aux_hidden_state_layer_ids": [1, 3], "markov_rank": 4, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
LAYERS = {k: v for k, v in raw_dspark().items() if k in (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rope_theta", "layer_types", "model_type",
)}  # fmt: skip


def packed(tokens=None, **changes):
    methods = {"speculators_config": {"algorithm": "dspark", "proposal_methods": [{"speculative_tokens": tokens}]}}
    return SPECULATORS | {"transformer_layer_config": LAYERS} | (methods if tokens else {}) | changes


SPELLINGS = {
    "DeepSpec": (raw_dspark(block=7), 7, True, RANK, "vanilla"),
    "DeepSpec, rnn": (raw_dspark("rnn", block=7), 7, True, RANK, "rnn"),
    "DeepSpec, no Markov head": (raw_dspark(rank=0, markov_head_type=None), N, True, 0, "vanilla"),
    "SpecForge": (
        LAYERS | {
            "architectures": ["DSparkDraftModel"], "block_size": 7,
            "dflash_config": NESTED | {"projector_type": "dspark", "markov_rank": 4, "markov_head_type": "gated"},
        }, 7, True, 4, "gated",
    ),
    "SpecForge, keys said twice": (
        LAYERS | {
            "architectures": ["DSparkDraftModel"], "block_size": 7, "markov_rank": 4, "markov_head_type": "vanilla",
            "dflash_config": NESTED | {"projector_type": "dspark", "markov_rank": 4, "markov_head_type": "vanilla"},
        }, 7, True, 4, "vanilla",
    ),
    "LiquidAI": (
        LAYERS | {
            "architectures": ["Lfm2DSparkDraftModel"], "block_size": 9, "markov_rank": 4, "markov_head_type": "vanilla",
            "enable_confidence_head": True, "rope_is_neox_style": False, "dflash_config": NESTED | {"num_target_layers": 16},
        }, 9, True, 4, "vanilla",
    ),
    "a DFlash drafter with a Markov head": (
        LAYERS | {"architectures": ["DFlashDraftModel"], "block_size": 16, "markov_rank": 4} | NESTED, 15, False, 4, "vanilla",
    ),
    "DeepSpec's under DFlash's name": (
        LAYERS | {"architectures": ["DFlashDraftModel"], "block_size": 7, "markov_rank": 4, "num_anchors": 64} | NESTED,
        7, True, 4, "vanilla",
    ),
    "DFlash from the anchor": (
        LAYERS | {"architectures": ["DFlashDraftModel"], "block_size": 6, "sample_from_anchor": True, "dflash_config": NESTED},
        6, True, 0, "vanilla",
    ),
    "speculators, as many drafts as slots": (packed(8), 8, True, 4, "vanilla"),
    "speculators, one draft fewer": (packed(7), 7, False, 4, "vanilla"),
    "speculators, nothing said": (packed(), 7, False, 4, "vanilla"),
    "speculators, the key": (packed(sample_from_anchor=True), 8, True, 4, "vanilla"),
    "speculators, the key, false": (packed(sample_from_anchor=False), 7, False, 4, "vanilla"),
    "speculators, no block size": (packed(7, block_size=None), 7, False, 4, "vanilla"),
    "speculators, no block size, the key": (packed(7, block_size=None, sample_from_anchor=True), 7, True, 4, "vanilla"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_published_spelling_is_read(name):
    raw, drafts, from_anchor, rank, kind = SPELLINGS[name]
    config = DrafterConfig.from_dict(raw)
    assert (config.architecture, config.block_size - 1, config.sample_from_anchor) == ("DSparkDraftModel", drafts, from_anchor)
    assert (config.markov_rank, config.markov_head_type, config.target_layer_ids) == (rank, kind, (0, 2))
    assert not config.unsupported and isinstance(build_drafter(config, {}), DSparkDrafter)
    # A draft of the trained size has as many ids, and the pass as many rows as the config says.
    drafter = build_drafter(config, {}).bind(lambda ids: mx.zeros((*ids.shape, H)), lambda h: mx.zeros((*h.shape[:2], V)))
    features = mx.zeros((1, 2, 2 * config.target_hidden_size))
    assert drafter.draft(mx.array([5]), features, drafter.make_cache(), 0, config.block_size).shape == (1, drafts)
    assert drafter.slots(mx.array([5]), features, drafter.make_cache(), 0, 2).shape == (1, 1, H)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"markov_rank": -1}, "markov_rank = -1 must be a whole number, 0 or more"),
        ({"block_size": 0}, "block_size = 0 must be a whole number of at least 1"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"sample_from_anchor": "yes"}, "sample_from_anchor = 'yes' must be true or false"),
    ],
)
def test_impossible_values_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        DrafterConfig.from_dict(raw_dspark(**changes))


@pytest.fixture
def folder(tmp_path):
    """(directory, config, tensors) of a drafter in files, with 32 of everything that is quantized in groups."""
    raw = raw_dspark("gated", 32, num_attention_heads=4, num_key_value_heads=2)
    weights = tensors(raw, confidence=H + 32)
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(raw))
    mx.save_safetensors(str(source / "model.safetensors"), weights)
    return source, raw, weights


def test_a_drafter_in_files_is_loaded_converted_and_held_in_bits(folder, tmp_path):
    source, raw, weights = folder
    model = tiny_target()
    expected = rounds_of(run(model, make(raw, weights, model), PROMPT, 10, block_size=N + 1))
    assert rounds_of(run(model, load_drafter(str(source), model), PROMPT, 10, block_size=N + 1)) == expected
    convert(str(source), str(tmp_path / "copy"))
    assert rounds_of(run(model, load_drafter(str(tmp_path / "copy"), model), PROMPT, 10, block_size=N + 1)) == expected
    for drafter in (load_drafter(str(source), model, bits=8), quantized(source, tmp_path / "q", model)):
        assert drafter.markov_head.markov_w1.bits == drafter.markov_head.markov_w2.bits == 8
        # One row: nothing is saved, and every draft length hangs on it.
        assert drafter.confidence_head.proj.weight.dtype == mx.float32
        run(model, drafter, PROMPT, 10)


def quantized(source, to, model):
    convert(str(source), str(to), quantize=True, q_bits=8, q_group_size=32, quant_predicate=lambda path, m: "markov" in path)
    return load_drafter(str(to), model)


def test_training_does_not_start_from_a_dspark_drafter(folder):
    drafter = build_drafter(DrafterConfig.from_dict(raw_config(H, V)), {})
    with pytest.raises(CheckpointError, match="is no drafter to start from: .*markov_head"):
        load_start(drafter, folder[0])


FAULTS = {
    "the anchor before every slot": (dspark.DSparkDrafter, "_walk", "ids.append(before)", "ids.append(before); before = anchor"),
    "no gate": (MarkovHead, "mix", "mx.sigmoid(self.gate_proj(", "mx.ones_like(self.gate_proj("),
    "gate and candidate swapped": (MarkovHead, "mix", "gate, new, out = mx", "new, gate, out = mx"),
    "a state that is not carried on": (MarkovHead, "mix", "if state is None else state", "if True else state"),
    "hidden before the token": (
        MarkovHead, "mix", "mx.concatenate([state, embedded, hidden]", "mx.concatenate([state, hidden, embedded]",
    ),
    "the hidden row of the next slot": (dspark.DSparkDrafter, "_walk", "hidden[:, slot], state", "hidden[:, slot - 1], state"),
    "a mask too many": (dspark.DSparkDrafter, "mask_rows", "(ids)", "(mx.concatenate([ids, ids[:, -1:]], axis=1))"),
    "the anchor's row left out": (
        dspark.DSparkDrafter, "mask_rows", "hidden if self.config.sample_from_anchor", "hidden if False",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_the_drafted_ids(monkeypatch, fault):
    owner, name, old, new = FAULTS[fault]
    model = tiny_target()
    plant(monkeypatch, owner, name, old, new)
    features = Target(model, (0, 2))(mx.array([PROMPT])).features
    for kind in KINDS:
        raw = raw_dspark(kind)
        weights = tensors(raw)
        drafter = make(raw, weights, model)
        for anchor in (11, 30, 45, 60):
            ids = drafter.draft(mx.array([anchor]), features, drafter.make_cache(), 0, N + 1)
            want, _ = drafts_by_numpy(model, drafter.config, doubles(weights), [*PROMPT, anchor], len(PROMPT))
            if ids.tolist() != [want]:
                return
    raise AssertionError(f"{fault}: every draft is right all the same")
