"""Training a DSpark drafter: its gradients, where it starts, and that replayed rounds equal the served ones."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from kit import run
from mlx.utils import tree_flatten, tree_map
from train_kit import check_slopes

from dflash_mlx.loading import load_drafter
from dflash_mlx.models.dspark import DSparkDrafter, MarkovHead
from dflash_mlx.models.target import Target
from dflash_mlx.train.docs import batches
from dflash_mlx.train.losses import LossConfig, Wanted, block_loss
from dflash_mlx.train.offline_tau import mean_tau, replay_docs
from dflash_mlx.train.start import as_dspark, drafter_config, init_drafter
from dflash_mlx.train.trainer import TrainConfig, Trainer, train

BLOCK, TAPS = 5, [1, 2, 4]


def raw(model, kind="vanilla", from_anchor=False):
    of = as_dspark(drafter_config(model, mask_token_id=1, layers=1, block_size=BLOCK, target_layer_ids=TAPS), rank=6)
    head = {**of["dflash_config"], "markov_head_type": kind}
    return of | {"dflash_config": head, "sample_from_anchor": from_anchor, "block_size": BLOCK - from_anchor}


def config(**changes):
    return TrainConfig(
        **{"batch": 8, "anchors": 8, "max_len": 64, "noise": 0.0, "lr": 4e-3, "ema": 0.9, "log_every": 50} | changes
    )


@pytest.mark.parametrize(
    "kind, from_anchor, learn_from",
    [("vanilla", False, "target"), pytest.param("gated", True, "target", marks=pytest.mark.full),
     pytest.param("rnn", False, "text", marks=pytest.mark.full)],
)  # fmt: skip
def test_every_gradient_equals_finite_differences(model, docs, kind, from_anchor, learn_from):
    target, of = Target(model, TAPS), raw(model, kind, from_anchor)
    drafter = init_drafter(of, target, docs.pad([0], 32)[0], 0)
    trainer = Trainer(drafter, target, of, config(steps=1, learn_from=learn_from), mx.float32)
    assert trainer.K == BLOCK
    check_slopes(trainer, next(batches(docs, 8, 8, 64, 0))[:5])


def numpy_loss(w, kind, want, gamma, weights=None):
    """The loss again, from its definition, in float64 and with loops; and the slots' weights, which are constants of it.

    w: "hidden" [R, N, H], "head" [V, H], and the Markov head's tensors by name.
    """
    labels, counts = np.array(want.labels), np.array(want.counts)
    (R, N), total, kept = labels.shape, 0.0, np.zeros(labels.shape)
    for r in range(R):
        heat, state, before = want.heat[r], np.zeros(w["w1"].shape[1]), int(want.anchor[r].item())
        passes, ce = np.zeros(N), np.zeros(N)
        for i in range(N):
            hidden, mixed = w["hidden"][r, i], w["w1"][before]
            if kind == "gated":
                mixed = mixed / (1 + np.exp(-(w["gate"] @ np.concatenate([hidden, mixed]) + w["gate_bias"])))
            if kind == "rnn":
                gate, new, out = np.split(w["joint"] @ np.concatenate([state, mixed, hidden]) + w["joint_bias"], 3)
                gate = 1 / (1 + np.exp(-gate))
                state, mixed = gate * state + (1 - gate) * np.tanh(new), np.tanh(out)
            z = (w["head"] @ hidden + w["w2"] @ mixed) / heat
            logq = z - np.log(np.exp(z).sum())
            p = np.eye(len(z))[labels[r, i]]
            if r < want.soft:
                p = np.exp(np.array(want.teacher(want.rows[r, i]), np.float64) / heat)
                p = p / p.sum()
            ce[i], passes[i], before = -(p * logq).sum(), np.minimum(p, np.exp(logq)).sum(), labels[r, i]
        if gamma is None:
            through = np.cumprod(np.where(counts[r], 0.5 * passes + 0.5, 1.0)) * counts[r]
            kept[r] = through[::-1].cumsum()[::-1]
        else:
            kept[r] = np.exp(-np.arange(N) / gamma) * counts[r]
        total += ((kept if weights is None else weights)[r] * ce).sum()
    norm = counts[:, 0].sum() if gamma is None else (counts * np.exp(-np.arange(N) / gamma)).sum()
    return total / norm, kept


@pytest.mark.parametrize("kind, gamma", [("vanilla", None), ("gated", None), ("rnn", 3.0)])
def test_loss_and_its_gradients_equal_the_definition_in_float64(kind, gamma):
    R, N, H, rank, vocab = 5, 4, 24, 6, 61
    mx.random.seed(4)
    sizes = {"markov_rank": rank, "hidden_size": H, "vocab_size": vocab, "draft_vocab_size": None}
    markov = MarkovHead(SimpleNamespace(**sizes, markov_head_type=kind))
    markov.update(tree_map(lambda a: 0.6 * mx.random.normal(a.shape), markov.parameters()))
    hidden, table = mx.random.normal((R, N, H)), 0.3 * mx.random.normal((vocab, H))
    counts = mx.cumprod(mx.random.uniform(shape=(R, N)) > 0.2, axis=-1).astype(mx.bool_)
    labels, anchor = mx.random.randint(0, vocab, (R, N)), mx.random.randint(0, vocab, (R,))
    teacher, heat = 2 * mx.random.normal((9, vocab)), np.array([0.7, 1.0, 1.0, 0.5, 0.5], np.float32)
    want = Wanted(labels, counts, anchor, heat, lambda at: teacher[at], mx.random.randint(0, 9, (3, N)))

    def loss(hidden, weights):
        markov.update(weights)
        return block_loss(lambda h: h @ table.T, hidden, want, LossConfig(gamma=gamma, chunk_blocks=2), markov)[0]

    given = markov.trainable_parameters()
    value, (by_hidden, by_weights) = mx.value_and_grad(loss, argnums=(0, 1))(hidden, given)
    names = {"markov_w1.weight": "w1", "markov_w2.weight": "w2", "gate_proj.weight": "gate", "gate_proj.bias": "gate_bias",
             "joint_proj.weight": "joint", "joint_proj.bias": "joint_bias"}  # fmt: skip
    wide = {names[n]: np.array(v, np.float64) for n, v in tree_flatten(given)}
    wide |= {"hidden": np.array(hidden, np.float64), "head": np.array(table, np.float64)}
    wanted, weights = numpy_loss(wide, kind, want, gamma)
    assert value.item() == pytest.approx(wanted, rel=2e-5)
    slopes, rng = {names[n]: v for n, v in tree_flatten(by_weights)} | {"hidden": by_hidden}, np.random.default_rng(0)
    for name, slope in slopes.items():
        way = rng.standard_normal(slope.shape)
        ends = [numpy_loss(wide | {name: wide[name] + step * way}, kind, want, gamma, weights)[0] for step in (1e-6, -1e-6)]
        assert (np.array(slope) * way).sum() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=2e-3, abs=2e-6), name


@pytest.mark.full
@pytest.mark.parametrize("from_anchor", [False, True])
def test_rounds_replayed_with_a_trained_drafter_equal_the_served_ones(model, docs, tmp_path, from_anchor):
    train(model, docs, tmp_path, raw(model, from_anchor=from_anchor), config(steps=60, anchors=24))
    drafter = load_drafter(str(tmp_path), model)
    assert isinstance(drafter, DSparkDrafter) and drafter.config.block_size == BLOCK
    replays = replay_docs(drafter, Target(model, TAPS), docs, BLOCK)
    for i in range(8):
        ids, answer = docs.doc(i)
        out = run(model, drafter, ids[~answer].tolist(), 40, block_size=BLOCK)
        lengths = out[-1].stats.acceptance_lengths
        assert [a + 1 for a in replays[i].accepted] == lengths[: len(replays[i].accepted)]
    assert mean_tau(replays) > 1.1


@pytest.mark.full
def test_a_fresh_drafter_drafts_what_the_dflash_drafter_that_it_starts_from_does(model, docs, tmp_path):
    first = drafter_config(model, mask_token_id=1, layers=1, block_size=BLOCK, target_layer_ids=TAPS)
    train(model, docs, tmp_path / "one", first, config(steps=15))
    train(model, docs, tmp_path / "two", as_dspark(first), config(steps=1, lr=1e-12), init=tmp_path / "one")
    one, two = (load_drafter(str(tmp_path / name), model) for name in ("one", "two"))
    assert isinstance(two, DSparkDrafter) and not two.config.sample_from_anchor
    pair = [[r.accepted for r in replay_docs(d, Target(model, TAPS), docs, BLOCK)] for d in (one, two)]
    assert pair[0] == pair[1] and np.concatenate(pair[0]).max() > 0
