"""Training a DSpark drafter: its gradients, where it starts, and that replayed rounds equal the served ones."""

import mlx.core as mx
import numpy as np
import pytest
from kit import run
from train_kit import check_slopes

from dflash_mlx.loading import load_drafter
from dflash_mlx.models.dspark import DSparkDrafter
from dflash_mlx.models.target import Target
from dflash_mlx.train.data import batches
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
