"""The exact law of a small Markov target, draws from an acceptance rule, and the test that tells whether they agree."""

import mlx.core as mx
import numpy as np

from dflash_mlx.accept import accept_block, accept_rejection

B, N, LENGTH = 20_000, 3, 4
RULES = {"rejection": accept_rejection, "block": accept_block}


def laws(vocab, seed, peaked=1.5):
    """The chain [V, V] and the drafter's rows [N, V]."""
    draw = np.random.default_rng(seed)
    weights = [np.exp(draw.normal(size=shape) * peaked) for shape in ((vocab, vocab), (N, vocab))]
    return [w / w.sum(axis=-1, keepdims=True) for w in weights]


def sample(draw, rows):
    """One draw from each row of probabilities [..., V]."""
    edges = np.cumsum(rows, axis=-1)
    return np.minimum((draw.random(rows.shape[:-1])[..., None] >= edges).sum(axis=-1), rows.shape[-1] - 1).astype(np.int32)


def emitted(rule, chain, q, seed, drafts=None):
    """[B, LENGTH] tokens: one round of a rule after token 0, then the chain. `drafts`: how they are chosen; None: from q."""
    draw = np.random.default_rng(seed)
    rows = np.broadcast_to(q, (B, *q.shape))
    draft = sample(draw, rows) if drafts is None else drafts(rows)
    given = np.concatenate([np.zeros((B, 1), dtype=np.int32), draft], axis=1)
    noise = draw.gumbel(size=(B, chain.shape[0]))
    arrays = (draft, chain[given], rows, draw.random((B, N)), noise)
    accepted, bonus = (np.array(a) for a in rule(*(mx.array(a if a.dtype == np.int32 else a.astype(np.float32)) for a in arrays)))
    out = np.zeros((B, LENGTH), dtype=np.int32)
    out[:, :N] = draft
    for i in range(LENGTH):
        before = out[:, i - 1] if i else np.zeros(B, dtype=np.int32)
        after = np.where(i == accepted, bonus, sample(draw, chain[before]))
        out[:, i] = np.where(i < accepted, out[:, i], after)
    return out, accepted


def p_value(out, chain):
    """Of Pearson's statistic over all sequences, those expected less than five times taken together."""
    vocab = chain.shape[0]
    law = np.array([1.0])
    last = np.array([0])
    for _ in range(LENGTH):
        law, last = (law[:, None] * chain[last]).ravel(), np.tile(np.arange(vocab), len(law))
    counts = np.bincount(out @ vocab ** np.arange(LENGTH)[::-1], minlength=vocab**LENGTH)
    expected, rare = law * len(out), law * len(out) < 5
    counts, expected = ([*a[~rare], a[rare].sum()] for a in (counts, expected))
    statistic = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True) if e > 0)
    return tail(statistic, len(counts) - 1)


def tail(statistic, freedom):
    """Upper tail of the chi-square law, by Wilson and Hilferty's cube root (right to a few percent at these sizes)."""
    from math import erfc, sqrt

    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / sqrt(2 / (9 * freedom))
    return erfc(z / sqrt(2)) / 2


CASES = [(vocab, seed) for vocab in (2, 3, 5, 8) for seed in (1, 2)]
LIMIT = 1e-3 / (2 * len(CASES) + 2)
