"""Training a DFlash 2 drafter: its gradients, where it starts, and that replayed rounds equal the served ones."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from kit import run
from mlx.utils import tree_flatten, tree_unflatten
from train_kit import make_docs

from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import CheckpointError, ConfigError
from dflash_mlx.loading import load_drafter
from dflash_mlx.models.dflash2 import DFlash2Drafter, top_candidates
from dflash_mlx.models.target import Target
from dflash_mlx.sampling import Distribution
from dflash_mlx.train import trainer
from dflash_mlx.train.cost import Rates
from dflash_mlx.train.docs import batches
from dflash_mlx.train.forward import block_hidden, context_keys_values
from dflash_mlx.train.losses import LossConfig, Wanted, block_loss
from dflash_mlx.train.offline_tau import SharedNoise, drafter_guess, mean_tau, perfect_guesses, replay_docs, replay_with
from dflash_mlx.train.start import as_dflash2, drafter_config, init_drafter
from dflash_mlx.train.trainer import TrainConfig, Trainer, learning_rate, train

BLOCK = 6


@pytest.fixture(scope="module")
def first(model):
    return drafter_config(model, mask_token_id=1, layers=2, block_size=BLOCK, target_layer_ids=[1, 2, 4])


def config(**changes):
    defaults = {"batch": 8, "anchors": 24, "max_len": 64, "ema": 0.98, "noise": 0.0, "lr": 4e-3, "eval_docs": 8, "log_every": 50}
    return TrainConfig(**{**defaults, **changes})


def loud_drafter(seed=0):
    """A DFlash 2 drafter with random weights everywhere, convolutions and codebooks included."""
    mx.random.seed(seed)
    raw = {
        "architectures": ["DFlash2DraftModel"], "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 10000.0, "target_hidden_size": 20,
        "block_size": 5, "vocab_size": 61,
        "dflash_config": {
            "mask_token_id": 3, "target_layer_ids": [1, 2, 4], "conv_kernel_size": 2, "conv_group_size": 8,
            "selector_rank": 6, "selector_top_k": 7,
        },
    }  # fmt: skip
    drafter = DFlash2Drafter(DrafterConfig.from_dict(raw))
    grown = [(n, mx.random.normal(v.shape) * (0.2 if v.ndim > 1 else 0.1) + (v.ndim == 1)) for n, v in sorted(flat(drafter))]
    drafter.load_weights(grown)
    table = mx.random.normal((61, 24))
    return drafter.bind(lambda ids: table[ids], lambda h: h @ table.T)


def flat(module):
    return tree_flatten(module.parameters())


def test_training_pass_of_convolution_layers_equals_the_generation_pass():
    drafter = loud_drafter()
    ids, features = mx.random.randint(4, 61, (2, 19)), mx.random.normal((2, 19, 60))
    anchors = mx.array([[2, 7, 18], [1, 5, 12]])
    got = block_hidden(drafter, ids, anchors, context_keys_values(drafter, features), 5)
    for b in range(2):
        for a, at in enumerate(anchors[b].tolist()):
            block = mx.full((1, 5), 3, dtype=mx.int32)
            block[:, 0] = ids[b, at]
            want = drafter(drafter._embed(block), features[b : b + 1, :at], drafter.make_cache(), 0)
            np.testing.assert_allclose(got[b, a], want[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab", [30, 64, 4096])
def test_top_candidates_are_the_largest(vocab):
    mx.random.seed(vocab)
    rows = mx.random.normal((3, 4, vocab))
    ids = top_candidates(rows, 16)
    assert ids.shape == (3, 4, 16)
    got = np.sort(mx.take_along_axis(rows, ids, axis=-1), axis=-1)
    assert np.array_equal(got, np.sort(rows, axis=-1)[..., -16:])


CASES = {
    "text": LossConfig(),
    "decay": LossConfig(gamma=3.0),
    "own picks": LossConfig(own=True),
    "target": LossConfig(backbone=0.3),
    "target, total variation": LossConfig(tv=0.9, backbone=0.3),
}


def wanted(case, teacher_rows=30):
    mx.random.seed(7)
    R, N = 6, 4
    labels = mx.random.randint(0, 61, (R, N))
    counts = mx.cumprod(mx.random.uniform(shape=(R, N)) > 0.15, axis=-1).astype(mx.bool_)
    anchor = mx.random.randint(0, 61, (R,))
    if not case.startswith("target"):
        return Wanted(labels, counts, anchor)
    heat = np.array([0.7, 1.0, 1.0, 0.7, 0.5, 0.5], np.float32)
    teacher, rows = 2 * mx.random.normal((teacher_rows, 61)), mx.random.randint(0, teacher_rows, (4, N))
    return Wanted(labels, counts, anchor, heat, lambda at: teacher[at], rows)


def numpy_loss(hidden, table, selector, want, config, weights=None):
    """The loss again, from its definition, in float64 and with loops. weights: of the slots, taken as constants."""
    logits = hidden @ table.T
    R, N, V = logits.shape
    labels, counts = np.array(want.labels), np.array(want.counts)
    total, kept = 0.0, np.zeros((2, R, N))
    for r in range(R):
        heat = 1.0 if want.heat is None else float(want.heat[r].item())
        soft = r < want.soft
        passes, base, own, reach = np.zeros(N), np.zeros(N), np.zeros(N), counts[r].copy()
        right = True
        for i in range(N):
            z = logits[r, i] / heat
            logq = z - np.log(np.exp(z - z.max()).sum()) - z.max()
            if soft:
                t = np.array(want.teacher(want.rows[r, i]), np.float64) / heat
                p = np.exp(t - t.max()) / np.exp(t - t.max()).sum()
            else:
                p = np.eye(V)[labels[r, i]]
            base[i] = -(p * logq).sum()
            best = np.argsort(-logits[r, i])[: selector["k"]]
            before = int(want.anchor[r].item()) if i == 0 else labels[r, i - 1]
            query = selector["predecessor"][before] * (selector["projection"] @ hidden[r, i])
            scores = logits[r, i, best] + selector["successor"][best] @ query
            s = scores / heat
            logs = s - s.max() - np.log(np.exp(s - s.max()).sum())
            own[i] = -(p[best] * logs).sum()
            if soft and config.tv:
                own[i] = (1 - config.tv) * own[i] + config.tv * 0.5 * np.abs(p[best] - np.exp(logs)).sum()
            passes[i] = np.minimum(p[best], np.exp(logs)).sum()
            if config.own:
                reach[i] &= right
            right = right and best[np.argmax(scores)] == labels[r, i]
        if weights is None:
            for which, (chance, count) in enumerate(((passes, reach), (np.exp(-base) if config.own else passes, counts[r]))):
                if config.gamma is None:
                    through = np.cumprod(np.where(count, 0.5 * np.maximum(chance, 1e-9) + 0.5, 1.0)) * count
                    kept[which, r] = through[::-1].cumsum()[::-1]
                else:
                    kept[which, r] = np.exp(-np.arange(N) / config.gamma) * count
        else:
            kept[:, r] = weights[:, r]
        total += (kept[0, r] * own).sum() + config.backbone * (kept[1, r] * base).sum()
    norm = counts[:, 0].sum() if config.gamma is None else (counts * np.exp(-np.arange(N) / config.gamma)).sum()
    return total / norm, kept


@pytest.mark.parametrize("case", CASES)
def test_loss_and_its_gradients_equal_the_definition_and_finite_differences_in_float64(case):
    drafter, config, want = loud_drafter(), CASES[case], wanted(case)
    table, selector = mx.random.normal((61, 24)), drafter.candidate_selector
    hidden = mx.random.normal((6, 4, 24))

    def loss(hidden, weights):
        selector.update(weights)
        return block_loss(lambda h: h @ table.T, hidden, want, config, selector)[0]

    given = selector.trainable_parameters()
    for chunk in (4, 64):
        config = LossConfig(**{**vars(config), "chunk_blocks": chunk})
        value, (by_hidden, by_weights) = mx.value_and_grad(loss, argnums=(0, 1))(hidden, given)
        selector.update(given)
        wide = {
            "k": selector.top_k,
            "predecessor": np.array(selector.predecessor_codebook, np.float64),
            "successor": np.array(selector.successor_codebook, np.float64),
            "projection": np.array(selector.hidden_projection.weight, np.float64),
        }
        h, E = np.array(hidden, np.float64), np.array(table, np.float64)
        wanted_value, weights = numpy_loss(h, E, wide, want, config)
        assert value.item() == pytest.approx(wanted_value, rel=2e-5)
        slopes = {
            "hidden": by_hidden,
            "predecessor": by_weights["predecessor_codebook"],
            "successor": by_weights["successor_codebook"],
            "projection": by_weights["hidden_projection"]["weight"],
        }
        rng = np.random.default_rng(0)
        for name, slope in slopes.items():
            assert mx.abs(slope).max() > 0
            way = rng.standard_normal(slope.shape)
            ends = []
            for step in (1e-6, -1e-6):
                moved = {**wide, name: wide[name] + step * way} if name != "hidden" else wide
                ends.append(numpy_loss(h + step * way if name == "hidden" else h, E, moved, want, config, weights)[0])
            assert (np.array(slope) * way).sum() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=2e-3, abs=2e-6), name


def test_a_label_outside_the_candidates_moves_nothing_in_the_selector():
    drafter = loud_drafter()
    table, selector = mx.random.normal((61, 24)), drafter.candidate_selector
    hidden = mx.random.normal((3, 4, 24))
    logits = hidden @ table.T
    want = Wanted(mx.argmin(logits, axis=-1).astype(mx.int32), mx.ones((3, 4), mx.bool_), mx.zeros(3, mx.int32))

    def loss(weights):
        selector.update(weights)
        return block_loss(lambda h: h @ table.T, hidden, want, LossConfig(), selector)[0]

    given = selector.trainable_parameters()
    slopes = mx.grad(loss)(given)
    assert all(mx.abs(g).max() == 0 for _, g in tree_flatten(slopes))


@pytest.mark.full
def test_a_fresh_dflash2_drafter_drafts_what_the_dflash_drafter_that_it_starts_from_does(model, docs, first, tmp_path):
    train(model, docs, tmp_path / "one", first, config(steps=30))
    train(model, docs, tmp_path / "two", as_dflash2(first), config(steps=1, lr=1e-12), init=tmp_path / "one")
    target = Target(model, [1, 2, 4])
    one, two = (load_drafter(str(tmp_path / name), model) for name in ("one", "two"))
    assert isinstance(two, DFlash2Drafter)
    pair = [[r.accepted for r in replay_docs(d, target, docs, BLOCK)] for d in (one, two)]
    assert pair[0] == pair[1] and max(max(a) for a in pair[0]) > 0
    with pytest.raises(CheckpointError, match="no drafter to start from"):
        train(model, docs, tmp_path / "three", first, config(steps=1), init=tmp_path / "two")


@pytest.fixture(scope="module")
def trained(model, docs, first, tmp_path_factory):
    out = tmp_path_factory.mktemp("dflash2")
    settings = config(steps=60, learn_from="target", tv=0.5, loss="dpace", patience=9)
    last = train(model, docs, out, as_dflash2(first, rank=8), settings, held_out=docs.pick(np.array([0, 3, 4, 7])))
    return out, last


@pytest.mark.full
def test_replayed_rounds_equal_the_served_ones_at_temperature_0(model, docs, trained):
    drafter = load_drafter(str(trained[0]), model)
    replays = replay_docs(drafter, Target(model, [1, 2, 4]), docs, BLOCK)
    for i in range(8):
        ids, answer = docs.doc(i)
        out = run(model, drafter, ids[~answer].tolist(), 40, block_size=BLOCK)
        lengths = out[-1].stats.acceptance_lengths
        assert [a + 1 for a in replays[i].accepted] == lengths[: len(replays[i].accepted)]
    assert mean_tau(replays) > 1.2


@pytest.mark.parametrize("temp", [0.7, 1.0])
@pytest.mark.quick(1)
def test_replayed_rounds_equal_drafts_under_shared_noise_slot_by_slot(model, docs, trained, temp):
    sampler = Distribution(temp)
    drafter = load_drafter(str(trained[0]), model)
    target, prompts = Target(model, [1, 2, 4]), [docs.doc(i) for i in range(4)]
    texts = []
    for seed, (ids, answer) in enumerate(prompts):
        texts.append([r.token for r in run(model, None, ids[~answer].tolist(), 30, sampler=sampler, seed=seed)])
    given = [ids[~answer].tolist() for ids, answer in prompts]
    whole = [p + t for p, t in zip(given, texts, strict=True)]
    padded = np.zeros((4, max(map(len, whole))), np.int32)
    for row, ids in zip(padded, whole, strict=True):
        row[: len(ids)] = ids
    guess = drafter_guess(drafter, target, padded, BLOCK, noise=SharedNoise(temp, np.arange(4)))
    at = np.array([len(p) + 2 for p in given])
    got = guess(padded, at, np.arange(4))
    for seed, ids in enumerate(whole):
        features = target(mx.array([ids[: at[seed]]])).features
        anchor = mx.array([ids[at[seed]]])
        hidden = drafter.slots(anchor, features, drafter.make_cache(), 0, BLOCK)
        noise = []
        for position in range(int(at[seed]) + 1, int(at[seed]) + BLOCK):
            mx.random.seed((seed << 32) | position)
            noise.append(mx.random.gumbel((1, 1, target.vocabulary)))
        want, _ = drafter.choose(hidden, anchor, sampler.noised, mx.concatenate(noise, axis=1))
        assert got[seed].tolist() == want[0].tolist()
    spans = [(len(p), len(w)) for p, w in zip(given, whole, strict=True)]
    assert mean_tau(replay_with(guess, padded, spans, BLOCK)) > 1


def test_perfect_drafters_are_wrong_where_the_targets_rows_say_so(model, docs):
    """Of greedy text all is right. Of any text: ranks by a loop over plain passes."""
    ids, answer = docs.doc(0)
    drawn = np.concatenate([ids[~answer], np.random.default_rng(3).integers(4, 60, 20)])
    padded = np.zeros((2, 48), np.int32)
    padded[0, : len(ids)], padded[1, : len(drawn)] = ids, drawn
    target, start = Target(model, [1, 2, 4]), int(answer.argmax())
    guesses = perfect_guesses(target, padded, BLOCK, candidates=30)
    [greedy] = replay_with(guesses["perfect_argmax"], padded[:1], [(start, len(ids))], BLOCK)
    assert greedy.accepted and set(greedy.accepted) == {BLOCK - 1}
    row, at = np.array([1]), np.array([start])
    for name, n in (("perfect_argmax", 1), ("perfect_candidates", 30)):
        [drafts] = guesses[name](padded, at, row)
        for k, draft in enumerate(drafts.tolist(), start=1):
            rows = np.array(model(mx.array(drawn[None, : start + k]))[0, -1].astype(mx.float32))
            wanted = int(drawn[start + k])
            assert draft == (wanted if (rows > rows[wanted]).sum() < n else -1)
    assert (
        -1 in guesses["perfect_candidates"](padded, at, row)[0] and (guesses["perfect_candidates"](padded, at, row)[0] >= 0).any()
    )


def test_a_card_says_what_the_drafter_was_made_of(docs, trained):
    card = (trained[0] / "README.md").read_text()
    assert f"{int(docs.answer.sum())} answer tokens in 8 conversations" in card and "DFlash2DraftModel" in card
    assert f"{trained[1]['tau_heldout']:.3f}" in card


def test_a_card_gives_temperatures_as_they_were_asked_for(model, tmp_path):
    """Shards keep them in float16, whose 0.7 is 0.700195."""
    docs = make_docs(model, (0, 0, 0, 0, 0, 0.7, 0.7, 1))
    raw = drafter_config(model, mask_token_id=1, layers=1, block_size=3, target_layer_ids=[1])
    train(model, docs, tmp_path, raw, config(steps=1, anchors=2))
    assert "| 5 at 0, 2 at 0.7, 1 at 1 |" in (tmp_path / "README.md").read_text()


def test_a_run_whose_tau_stalls_ends_and_keeps_the_best(model, docs, first, tmp_path):
    said = []
    settings = config(steps=400, lr=1e-12, warmup=0.0, patience=2, eval_every_s=0.0, log_every=400)
    train(model, docs, tmp_path, as_dflash2(first, rank=8), settings, held_out=docs, report=said.append)
    assert len([line for line in said if "on held-out text" in line]) == 4  # the first is the best; two more; one at the end


def test_a_run_says_what_it_will_cost_once_it_knows(model, docs, first, tmp_path):
    said = []
    train(model, docs, tmp_path, first, config(steps=13, batch=4, anchors=4), report=said.append)
    [line] = [text for text in said if "minutes for" in text]
    # One step of 4 conversations, of the 8 with 40 answer tokens each.
    assert "minutes for what is left: 1 steps, 4 conversations with 160 answer tokens, each conversation seen 0.5 times" in line
    told = Rates(0.25, 24, 9000, 2_000_000, 7 << 30).line(None, 3600.0)
    assert told.startswith("At 250 ms a step and 7.5 GB: 60.0 minutes for what is left: 14,400 steps, 345,600 conversations")
    assert told.endswith("with 76.8 million answer tokens, each conversation seen 38.4 times.")


def test_the_cost_is_that_of_steps_alone_and_of_what_is_left(model, docs, first, tmp_path, monkeypatch):
    """A step takes a second here, a look at held-out text a hundred; the run was stopped before."""
    clock, said, take = [0.0], [], Trainer.take

    def taking(self, passes, share):
        clock[0] += 1
        if self.step == 5 and len(said) < 2:
            said.append("stopped")
            raise KeyboardInterrupt
        return take(self, passes, share)

    def looking(self):
        clock[0] += 100
        self.evaluated = clock[0]
        return {}

    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(Trainer, "take", taking)
    monkeypatch.setattr(trainer._Run, "evaluate", looking)
    settings = config(steps=40, batch=4, anchors=2, eval_every_s=0.0, log_every=100, max_len=16)
    with pytest.raises(KeyboardInterrupt):
        train(model, docs, tmp_path, first, settings, held_out=docs, report=said.append)
    train(model, docs, tmp_path, first, settings, held_out=docs, report=said.append)
    [line] = [text for text in said if "minutes for" in text]
    tokens = docs.answer_tokens(16)
    assert tokens == sum(min(16, len(docs.doc(i)[0])) - int((~docs.doc(i)[1]).sum()) for i in range(8))
    # 12 steps of this sitting behind 5 of the one before.
    assert line.startswith("At 1000 ms a step") and "0.4 minutes for what is left: 23 steps, 92 conversations" in line
    assert f"with {tokens * 92 / 8:,.0f} answer tokens" in line


def test_settings_that_contradict_each_other_are_named():
    for changes, match in {
        "loss": ({"loss": "kl"}, "loss is 'kl'"),
        "predecessor": ({"predecessor": "none"}, "predecessor is 'none'"),
        "backbone": ({"backbone": 0.0}, "backbone is 0.0"),
        "tv": ({"tv": 0.5}, "tv is 0.5 with learn_from 'text'"),
    }.values():
        with pytest.raises(ConfigError, match=match):
            config(steps=1, **changes).check()


def test_gradients_of_sampled_and_greedy_text_do_not_depend_on_their_order(model, docs, first):
    target, raw = Target(model, [1, 2, 4]), as_dflash2(first, rank=8)
    trainer = Trainer(
        init_drafter(raw, target, docs.pad([0], 32)[0], 0), target, raw, config(steps=1, learn_from="target"), mx.float32
    )
    one = next(batches(docs, 8, 24, 64, 0))[:5]
    found = []
    # Sampled text last, first, and mixed with greedy text.
    for order in (np.argsort(one[4] > 0, kind="stable"), np.argsort(one[4] == 0, kind="stable"), np.arange(8)):
        turned = tuple(mx.array(a[order]) for a in one)
        found.append(sorted(tree_flatten(trainer._gradients(trainer.params, turned, mx.random.key(0), mx.array(0.0))[2])))
    for grads in found[1:]:
        for (name, got), (_, want) in zip(grads, found[0], strict=True):
            np.testing.assert_allclose(got, want, atol=1e-6, rtol=2e-4, err_msg=name)


@pytest.mark.parametrize("conv_lr", [0.25, 0.0])
def test_one_trained_step_moves_weights_as_an_independent_adamw_does(model, docs, first, conv_lr):
    target, raw = Target(model, [1, 2, 4]), as_dflash2(first, rank=8)
    settings = config(steps=10, learn_from="target", tv=0.5, weight_decay=0.01, clip=0.5, conv_lr=conv_lr)
    trainer = Trainer(init_drafter(raw, target, docs.pad([0], 32)[0], 0), target, raw, settings, mx.float32)
    one = next(batches(docs, 8, 24, 64, 0))[:5]
    before = {n: np.array(v, np.float64) for n, v in tree_flatten(trainer.packing.tree(trainer.params))}
    grads = trainer._gradients(trainer.params, tuple(mx.array(a) for a in one), mx.random.key(0), mx.array(0.0))[2]
    grads = {n: np.array(v, np.float64) for n, v in tree_flatten(trainer.packing.tree(grads))}
    trainer.drafter.update(tree_unflatten([(n, mx.array(v.astype(np.float32))) for n, v in before.items()]))
    trainer.take([one], share=0.5)
    norm = np.sqrt(sum((g * g).sum() for g in grads.values()))
    rate = learning_rate(settings, 0.5)
    for name, value in tree_flatten(trainer.packing.tree(trainer.params)):
        g = grads[name] * min(1.0, 0.5 / (norm + 1e-6))
        own = name.startswith("candidate_selector.")
        lr = rate * (settings.selector_lr if own else conv_lr if "_conv." in name else 1.0)
        decay = settings.weight_decay if before[name].ndim > 1 and not own else 0.0
        # First step: bias-corrected moments are the gradient and its square.
        want = before[name] * (1 - lr * decay) - lr * g / (np.abs(g) + 1e-8)
        np.testing.assert_allclose(value, want, atol=3e-2 * lr, rtol=1e-5, err_msg=name)
