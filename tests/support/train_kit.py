"""A tiny target and eight sequences that it wrote itself, for the tests of training."""

import mlx.core as mx
import numpy as np
import pytest
from kit import greedy_ids, tiny_target
from mlx.utils import tree_flatten, tree_map_with_path

from dflash_mlx.train.docs import Docs

V = 89


def make_target():
    return tiny_target(seed=5, layers=6, hidden=32, vocab=V)


def make_docs(model, temperatures=(0,) * 8):
    """Eight prompts of three to eight ids, each with 40 greedy ids of the target, labelled with `temperatures`."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, V, int(rng.integers(3, 9))).tolist() for _ in range(8)]
    texts = [(p, greedy_ids(model, p, 40)) for p in prompts]
    ids = np.concatenate([np.array(p + a, np.uint16) for p, a in texts])
    answer = np.concatenate([np.array([0] * len(p) + [1] * len(a), bool) for p, a in texts])
    starts = np.concatenate([[0], np.cumsum([len(p) + len(a) for p, a in texts])])
    zeros = np.zeros(8, np.uint8)
    return Docs(ids, answer, starts, zeros, zeros, np.array(temperatures, np.float16), np.zeros(8, bool), zeros)


def check_slopes(trainer, one):
    """Hold the gradient of each tensor to the loss along it, on one batch."""
    mx.random.seed(1)
    # Weights of a fresh drafter hide faults: a codebook of zeros lets no gradient through.
    trainer.params = tree_map_with_path(lambda _, p: p + 0.1 * mx.random.normal(p.shape), trainer.params)
    pack, tree, one = trainer.packing.pack, trainer.packing.tree, tuple(mx.array(a) for a in one)

    def run(params):
        return trainer._gradients(params, one, mx.random.key(0), mx.array(0.0))

    slopes, given = dict(tree_flatten(tree(run(trainer.params)[2]))), tree(trainer.params)
    for name, slope in sorted(slopes.items()):
        size = mx.linalg.norm(slope.flatten()).item()
        assert size > 0, name
        ends, far = [], min(0.1, 1e-2 / size)
        for step in (far, -far):
            moved = tree_map_with_path(lambda n, p, s=step: p + s * slope / size if n == name else p, given)  # noqa: B023
            ends.append(run(pack(moved))[0].item())
        assert (ends[0] - ends[1]) / (2 * far) == pytest.approx(size, rel=0.02, abs=2e-4), name
