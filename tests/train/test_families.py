"""Targets with recurrent layers and with experts: the text that they write, and every gradient of a drafter trained on it."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from families import _GDN, BASE, OTHERS, V, family
from kit import greedy_ids
from train_kit import check_slopes

from dflash_mlx.loading import load_drafter
from dflash_mlx.models.target import Target
from dflash_mlx.train.docs import Docs, batches
from dflash_mlx.train.rollout import Frame, Row, write_rows
from dflash_mlx.train.start import as_dflash2, drafter_config, init_drafter
from dflash_mlx.train.trainer import TrainConfig, Trainer, train

# Gated delta layers between full attention, without experts and with them.
HYBRID = {"text_config": {**BASE, **_GDN, "model_type": "qwen3_5_text", "full_attention_interval": 2}}


def written(model):
    """Six conversations of the target's own, half drawn."""
    rng = np.random.default_rng(0)
    rows = [Row(rng.integers(5, V, 3 + i).tolist(), user=False, temp=(i % 2) * 1.0) for i in range(6)]
    found = write_rows(model, rows, Frame((5,), (), (), (V - 1,)), 30, check_every=5)
    starts, zeros = np.concatenate([[0], np.cumsum([len(w.ids) for w in found])]), np.zeros(6, np.uint8)
    ids, answer = (np.concatenate([getattr(w, name) for w in found]) for name in ("ids", "answer"))
    temps = np.array([w.row.temp for w in found], np.float16)
    return rows, found, Docs(ids, answer, starts, zeros, zeros, temps, zeros.astype(bool), zeros)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_text_gradients_and_training_of_a_hybrid_target(name, tmp_path, monkeypatch):
    monkeypatch.setitem(OTHERS, "qwen3_5", ("qwen3_5", HYBRID))
    model = family(name)
    rows, found, docs = written(model)
    for row, w in zip(rows, found, strict=True):
        if not row.temp:
            assert w.ids[len(row.given) :].tolist() == greedy_ids(model, row.given, len(w.ids) - len(row.given))
    # All ids are candidates: a set that changes makes a step, which has no slope.
    raw = as_dflash2(drafter_config(model, V - 2, layers=2, block_size=4, target_layer_ids=[0, 2]), rank=6, top_k=V)
    settings = TrainConfig(
        steps=30, batch=6, anchors=8, max_len=32, noise=0.0, learn_from="target", tv=0.5, lr=4e-3, log_every=10
    )
    target = Target(model, [0, 2])
    trainer = Trainer(init_drafter(raw, target, docs.pad([0], 16)[0], 0), target, raw, settings, mx.float32)
    check_slopes(trainer, next(batches(docs, 6, 8, 32, 0, bucket=32))[:5])

    losses = []
    train(model, docs, tmp_path, raw, replace(settings, log_every=10), report=lambda text: losses.append(text))
    losses = [float(text.split("loss ")[1].split(",")[0]) for text in losses if "loss" in text]
    assert losses[-1] < 0.8 * losses[0]
    assert load_drafter(str(tmp_path), model).config.target_layer_ids == (0, 2)
