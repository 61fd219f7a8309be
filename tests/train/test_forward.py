"""The training pass: what each block sees, that it equals the pass at generation time, and the loss."""

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import ConfigError
from dflash_mlx.train.forward import block_hidden, context_keys_values, context_mask
from dflash_mlx.train.losses import LossConfig, Wanted, adaptive_weights, block_loss, decay_weights, labels_of
from dflash_mlx.train.start import TRAINED, init_drafter, not_trained

H, V, K, S, TAPS = 24, 61, 5, 19, (1, 2, 4)


def make_drafter(seed=0, **changes):
    """Random, scaled up, all sizes different, with an embedding and a head of its own."""
    mx.random.seed(seed)
    config = DrafterConfig.from_dict(make_raw(**changes))
    drafter = TRAINED[config.architecture](config)
    grown = {k: 4 * v if v.ndim > 1 else v * mx.random.uniform(0.5, 2, v.shape) for k, v in flat(drafter).items()}
    drafter.load_weights(list(grown.items()))
    table = mx.random.normal((V, H))
    return drafter.bind(lambda ids: table[ids], lambda h: h @ table.T)


def make_raw(**changes):
    return {
        "hidden_size": H,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 10000.0,
        "target_hidden_size": 20,
        "block_size": K,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": list(TAPS)},
        **changes,
    }


def flat(drafter):
    from mlx.utils import tree_flatten

    return dict(tree_flatten(drafter.parameters()))


def inputs(seed=1, B=2):
    mx.random.seed(seed)
    ids = mx.random.randint(4, V, (B, S))
    features = mx.random.normal((B, S, len(TAPS) * 20))
    anchors = mx.array([[2, 3, 7, 11, 18], [1, 5, 6, 12, 17]][:B])
    return ids, features, anchors


def loss_of(head, hidden, labels, counts, **settings):
    """`block_loss` of rows [B, A, N, H] on the text's own tokens."""
    want = Wanted(labels.flatten(0, 1), counts.flatten(0, 1), mx.zeros(labels.shape[0] * labels.shape[1], mx.int32))
    return block_loss(head, hidden.flatten(0, 1), want, LossConfig(**settings))


def run(drafter, ids, features, anchors):
    return block_hidden(drafter, ids, anchors, context_keys_values(drafter, features), K)


VARIANTS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "wide window": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "is_causal": False},
    "bias": {"attention_bias": True},
    # The anchor's row and those of masks are told their noise.
    "log-SNR": {"architectures": ["DSparkDraftModel"], "vocab_size": V, "log_snr_conditioning": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_training_pass_equals_generation_pass(name):
    drafter = make_drafter(**VARIANTS[name])
    ids, features, anchors = inputs()
    got = run(drafter, ids, features, anchors)
    for b in range(2):
        for a, at in enumerate(anchors[b].tolist()):
            block = mx.full((1, K), 3, dtype=mx.int32)
            block[:, 0] = ids[b, at]
            cache, start = drafter.make_cache(), 0
            # Context in two pieces, as after a prefill and one round.
            if at > 4:
                drafter.inject(features[b : b + 1, :4], cache, 0)
                start = 4
            want = drafter(drafter.embed_block(block), features[b : b + 1, start:at], cache, start)
            np.testing.assert_allclose(got[b, a], want[0], atol=1e-5, rtol=1e-5)


OTHERS = {
    "the architecture DFlareDraftModel": {"architectures": ["DFlareDraftModel"]},
    "the architecture DFlashLagunaForCausalLM": {"architectures": ["DFlashLagunaForCausalLM"]},
    "attention sinks": {"attention_sink_bias": True},
    "scaled values": {"attention_value_scale": 0.5},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_drafter_that_the_training_pass_does_not_compute_is_refused_by_name(name):
    raw = make_raw(vocab_size=V, num_target_layers=6, **OTHERS[name])
    assert not_trained(DrafterConfig.from_dict(raw)) == [name]
    with pytest.raises(ConfigError, match=f"this drafter has {name}, which training does not compute"):
        init_drafter(raw, None, np.zeros((1, 4), np.int32), 0)


def test_context_mask_rows_hold_exactly_the_rows_before_the_anchor():
    anchors = mx.array([[0, 1, 7, 18]])
    assert context_mask(anchors, S, K, None).sum(-1).tolist() == [[[0], [1], [7], [18]]]
    # With a window of 6, row j sees 5 - j rows at most.
    assert context_mask(anchors, S, K, 6).sum(-1)[0, 2].tolist() == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_at_or_after_the_anchor_leaks(name):
    drafter = make_drafter(**VARIANTS[name])
    ids, features, anchors = inputs()
    before = run(drafter, ids, features, anchors)
    a = 2
    at = anchors[0, a].item()
    other_ids, other_features, _ = inputs(seed=9)
    late = mx.arange(S) > at
    changed = run(drafter, mx.where(late, other_ids, ids), features, anchors)
    assert mx.array_equal(changed[0, a], before[0, a])
    late = (mx.arange(S) >= at)[None, :, None]
    changed = run(drafter, ids, mx.where(late, other_features, features), anchors)
    assert mx.array_equal(changed[0, a], before[0, a])
    # And what lies before does matter, as does the anchor's own id.
    changed = run(drafter, ids, mx.where(mx.arange(S)[None, :, None] == at - 1, other_features, features), anchors)
    assert mx.abs(changed[0, a] - before[0, a]).max() > 1e-3
    changed = run(drafter, mx.where(mx.arange(S) == at, 60, ids), features, anchors)
    assert mx.abs(changed[0, a] - before[0, a]).max() > 1e-3


def test_blocks_are_blind_to_each_other_and_to_their_order():
    drafter = make_drafter()
    ids, features, anchors = inputs()
    got = run(drafter, ids, features, anchors)
    order = mx.array([3, 0, 4, 1, 2])
    np.testing.assert_allclose(run(drafter, ids, features, anchors[:, order]), got[:, order], atol=1e-5)
    alone = run(drafter, ids, features, anchors[:, 1:2])
    np.testing.assert_allclose(alone[:, 0], got[:, 1], atol=1e-5)


def test_labels_stop_at_the_first_id_that_is_no_answer():
    ids = mx.array([[5, 6, 10, 11, 12, 0, 7, 8]])
    answer = mx.array([[0, 0, 1, 1, 1, 1, 0, 1]]).astype(mx.bool_)
    labels, counts = labels_of(ids, answer, mx.array([[2, 4, 5, 3]]), mx.array([[True, True, True, False]]), 5)
    assert labels[0, 0].tolist() == [11, 12, 0, 7]
    assert counts.astype(mx.int32)[0].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_adaptive_weights_match_their_definition():
    ce = mx.array([[0.1, 0.9, 2.0, 0.3]])
    passes = [0.5 * np.exp(-c) + 0.5 for c in ce[0].tolist()]
    want = [sum(np.prod(passes[: m + 1]) for m in range(j, 4)) for j in range(4)]
    np.testing.assert_allclose(adaptive_weights(ce, mx.ones(ce.shape, mx.bool_))[0], want, rtol=1e-5)
    cut = adaptive_weights(ce, mx.array([[True, True, False, False]]))[0].tolist()
    np.testing.assert_allclose(cut, [passes[0] + passes[0] * passes[1], passes[0] * passes[1], 0, 0], rtol=1e-5)


@pytest.mark.parametrize("gamma", [7.0, None])
def test_block_loss_equals_the_plain_formula_with_its_gradient_for_any_chunk(gamma):
    mx.random.seed(3)
    table = mx.random.normal((V, H))
    hidden = mx.random.normal((2, 5, K - 1, H))
    labels = mx.random.randint(0, V, (2, 5, K - 1))
    counts = mx.cumprod(mx.random.uniform(shape=labels.shape) > 0.2, axis=-1).astype(mx.bool_)

    def head(h):
        return 8 * mx.tanh(h @ table.T / 8)

    def plain(hidden):
        logits = head(hidden)
        ce = mx.logsumexp(logits, -1) - mx.take_along_axis(logits, labels[..., None], -1)[..., 0]
        if gamma is None:
            w, norm = mx.stop_gradient(adaptive_weights(ce, counts)), counts[..., 0].sum()
        else:
            w = decay_weights(K, gamma) * counts
            norm = w.sum()
        return (w * ce).sum() / norm

    want, slope = mx.value_and_grad(plain)(hidden)
    for chunk in (3, 64):
        (got, metrics), grad = mx.value_and_grad(
            lambda h, c=chunk: loss_of(head, h, labels, counts, gamma=gamma, chunk_blocks=c)
        )(hidden)
        np.testing.assert_allclose(got.item(), want.item(), rtol=1e-5)
        np.testing.assert_allclose(grad, slope, atol=1e-6)
        assert metrics["slots"].tolist() == counts.sum((0, 1)).tolist()
        hits = (mx.argmax(head(hidden), -1) == labels) & counts
        assert metrics["hits"].tolist() == hits.sum((0, 1)).tolist()


def test_gradient_reaches_every_parameter():
    import mlx.nn as nn

    drafter = make_drafter()
    ids, features, anchors = inputs()
    answer = mx.ones(ids.shape, mx.bool_)

    def loss(model):
        labels, counts = labels_of(ids, answer, anchors, mx.ones(anchors.shape, mx.bool_), K)
        hidden = run(model, ids, features, anchors)
        return loss_of(drafter._head, hidden[:, :, 1:], labels, counts, gamma=7.0)[0]

    value, grads = nn.value_and_grad(drafter, loss)(drafter)
    from mlx.utils import tree_flatten

    for name, g in tree_flatten(grads):
        assert mx.abs(g).max() > 0, name
    # Finite difference along the gradient of one matrix that only the context uses.
    g = dict(tree_flatten(grads))["fc.weight"]
    drafter.fc.weight = drafter.fc.weight + 1e-3 * g / mx.linalg.norm(g)
    assert abs((loss(drafter) - value).item() / 1e-3 / mx.linalg.norm(g).item() - 1) < 0.05
