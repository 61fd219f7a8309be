"""A tiny target and eight sequences that it wrote itself, for the tests of training."""

import numpy as np
from kit import greedy_ids, tiny_target

from dflash_mlx.train.data import Docs

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
