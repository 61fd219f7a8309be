"""Training: eight sequences learned by heart are drafted whole in the real loop, and a resumed run is the same run."""

import json
import os
import signal
from types import SimpleNamespace

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from kit import run, tiny_target
from train_kit import V, make_docs

from dflash_mlx import convert
from dflash_mlx.errors import CheckpointError, ConfigError
from dflash_mlx.loading import load_drafter
from dflash_mlx.models.target import Target
from dflash_mlx.train import trainer as loop
from dflash_mlx.train.docs import batches, choose_anchors
from dflash_mlx.train.offline_tau import mean_tau, replay_docs
from dflash_mlx.train.start import check_text, default_taps, drafter_config, own_share
from dflash_mlx.train.trainer import STATE, TrainConfig, learning_rate, train

BLOCK = 6


@pytest.fixture(scope="module")
def docs(model):
    return make_docs(model)


@pytest.fixture(scope="module")
def raw(model):
    return drafter_config(model, mask_token_id=1, layers=2, block_size=BLOCK, target_layer_ids=[1, 2, 4])


def config(**changes):
    defaults = {"batch": 8, "anchors": 24, "max_len": 64, "ema": 0.98, "noise": 0.0, "lr": 4e-3, "eval_docs": 8, "log_every": 50}
    return TrainConfig(**{**defaults, **changes})


@pytest.mark.full
def test_eight_sequences_are_learned_and_then_accepted_whole_in_the_real_loop(model, docs, raw, tmp_path):
    last = train(model, docs, tmp_path, raw, config(steps=400), held_out=docs)
    drafter = load_drafter(str(tmp_path), model)
    replays = replay_docs(drafter, Target(model, [1, 2, 4]), docs, BLOCK)
    assert last["tau_heldout"] == pytest.approx(mean_tau(replays), abs=0.05)
    for i in range(8):
        ids, answer = docs.doc(i)
        prompt, want = ids[~answer].tolist(), ids[answer].tolist()
        out = run(model, drafter, prompt, 40, block_size=BLOCK)
        assert [r.token for r in out] == want
        lengths = out[-1].stats.acceptance_lengths
        full = [n for n in lengths[:-1]]
        assert full and all(n == BLOCK for n in full), lengths
        # Walking the known text replays the very same rounds.
        assert [a + 1 for a in replays[i].accepted] == lengths[: len(replays[i].accepted)]
    zeroed = replay_docs(drafter, Target(model, [1, 2, 4]), docs, BLOCK, zero_features=True)
    assert mean_tau(zeroed) < mean_tau(replays) - 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-2]["loss"] < 0.1 * lines[0]["loss"]
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == ["DFlashDraftModel"] and saved["dflash_config"]["target_layer_ids"] == [1, 2, 4]


def test_a_resumed_run_equals_the_uninterrupted_one(model, docs, raw, tmp_path):
    train(model, docs, tmp_path / "whole", raw, config(steps=12, batch=4, accumulate=2, noise=0.05))

    class Stop(Exception):
        pass

    def stop_after_seven(self, passes, share, take=loop.Trainer.take):
        if self.step == 7:
            self.save(tmp_path / "cut")
            raise Stop
        return take(self, passes, share)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "take", stop_after_seven)
        with pytest.raises(Stop):
            train(model, docs, tmp_path / "cut", raw, config(steps=12, batch=4, accumulate=2, noise=0.05))
    said = []
    train(model, docs, tmp_path / "cut", raw, config(steps=12, batch=4, accumulate=2, noise=0.05), report=said.append)
    assert said[0] == "Going on at step 7."
    whole, cut = (mx.load(str(tmp_path / name / STATE)) for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert [n for n in whole if not mx.array_equal(whole[n], cut[n])] == []


@pytest.mark.parametrize(
    "place", ["an update", *(pytest.param(place, marks=pytest.mark.full) for place in ("a step's report", "the last evaluation"))]
)
def test_ctrl_c_saves_and_the_same_command_goes_on_to_the_same_end(model, docs, raw, tmp_path, monkeypatch, place):
    settings = config(steps=4, log_every=1, batch=2, anchors=4)
    train(model, docs, tmp_path / "whole", raw, settings)
    due, said = [True], []

    def ctrl_c(now=True):
        if now and due:
            due.clear()
            os.kill(os.getpid(), signal.SIGINT)

    def then(name, owner, now):
        old = getattr(owner, name)

        def done(self, *given):
            made = old(self, *given)
            ctrl_c(now(self))
            return made

        monkeypatch.setattr(owner, name, done)

    if place == "an update":
        then("apply_gradients", optim.MultiOptimizer, lambda self: int(self.optimizers[0].step) == 3)
    elif place == "the last evaluation":
        then("evaluate", loop._Run, lambda self: True)
    held_out = docs if place == "the last evaluation" else None
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            report = lambda text: (said.append(text), ctrl_c(place == "a step's report" and text.startswith("Step 2")))  # noqa: E731
            train(model, docs, tmp_path / "cut", raw, settings, held_out, report=report)
    finally:
        signal.signal(signal.SIGINT, handler)
    step = 4 if held_out else 2
    assert said[-1].startswith(f"Stopped at step {step};")
    train(model, docs, tmp_path / "cut", raw, settings, held_out, report=said.append)
    assert f"Going on at step {step}." in said
    whole, cut = (mx.load(str(tmp_path / name / STATE)) for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() and [n for n in whole if not mx.array_equal(whole[n], cut[n])] == []


def test_weights_and_steps_follow_from_the_seed_whatever_the_order_of_names(model, docs, raw, tmp_path):
    # MLX lists a module's parameters in another order in each process (they pass through a set).
    for name, order in (("a", 1), ("b", -1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "tree_flatten", lambda tree, f=loop.tree_flatten, o=order: sorted(f(tree))[::o])
            train(model, docs, tmp_path / name, raw, config(steps=6))
    a, b = (mx.load(str(tmp_path / name / STATE)) for name in "ab")
    assert [n for n in a if not mx.array_equal(a[n], b[n])] == []


def test_a_killed_run_does_not_log_its_last_steps_twice(model, docs, raw, tmp_path):
    train(model, docs, tmp_path, raw, config(steps=4, log_every=1), pause_s=0.0)
    done = mx.load(str(tmp_path / STATE), return_metadata=True)[1]
    at = json.loads(done["about"])["step"]
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": at + 1, "loss": 9.0}) + '\n{"step": ')
    train(model, docs, tmp_path, raw, config(steps=4, log_every=1))
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4] and all(line.get("loss") != 9.0 for line in lines)


def test_a_disk_too_small_for_a_save_is_told_before_the_first_step(model, docs, raw, tmp_path, monkeypatch):
    train(model, docs, tmp_path / "one", raw, config(steps=1))
    written = sum((tmp_path / "one" / name).stat().st_size for name in (STATE, "model.safetensors"))
    for free, fits in ((written // 2, False), (2 * written, True)):
        monkeypatch.setattr(loop.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        if fits:
            train(model, docs, tmp_path / "three", raw, config(steps=1))
            continue
        with pytest.raises(ConfigError, match="MB free; a save of this run takes up to"):
            train(model, docs, tmp_path / "two", raw, config(steps=1))
        assert not (tmp_path / "two/metrics.jsonl").exists()


def test_a_state_of_other_settings_is_refused(model, docs, raw, tmp_path):
    train(model, docs, tmp_path, raw, config(steps=2))
    with pytest.raises(CheckpointError, match="another run: lr [0-9.e-]+, now [0-9.e-]+; steps [0-9]+, now [0-9]+"):
        train(model, docs, tmp_path, raw, config(steps=3, lr=1e-3))
    with pytest.raises(ConfigError, match="neither steps nor seconds"):
        train(model, docs, tmp_path, raw, config())
    # A tensor a weight, as versions before rows of weights wrote it.
    flat, about = mx.load(str(tmp_path / STATE), return_metadata=True)
    mx.eval(flat)
    mx.save_safetensors(str(tmp_path / STATE), {name.replace("matrices", "fc"): value for name, value in flat.items()}, about)
    with pytest.raises(CheckpointError, match="another version of this package"):
        train(model, docs, tmp_path, raw, config(steps=2))


def test_init_starts_from_the_given_weights(model, docs, raw, tmp_path):
    train(model, docs, tmp_path / "first", raw, config(steps=8, lr=1e-3))
    train(model, docs, tmp_path / "second", raw, config(steps=1, lr=1e-9), init=tmp_path / "first")
    first, second = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("first", "second"))
    for name in first:
        np.testing.assert_allclose(first[name].astype(mx.float32), second[name].astype(mx.float32), atol=1e-5)
        assert first[name].dtype == mx.bfloat16


def test_init_takes_quantized_weights_and_trains_float_ones(model, docs, raw, tmp_path):
    train(model, docs, tmp_path / "first", raw, config(steps=8, lr=1e-3))
    convert(str(tmp_path / "first"), str(tmp_path / "4bit"), quantize=True, q_group_size=32)
    quantized = json.loads((tmp_path / "4bit" / "config.json").read_text())
    assert quantized["quantization"]["bits"] == 4
    train(model, docs, tmp_path / "second", quantized, config(steps=1, lr=1e-9), init=tmp_path / "4bit")
    assert "quantization" not in json.loads((tmp_path / "second" / "config.json").read_text())
    first, second = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("first", "second"))
    assert set(first) == set(second)
    for name in first:
        step = mx.abs(first[name]).max().item() / 7.5  # of a 4-bit scale, about
        np.testing.assert_allclose(first[name].astype(mx.float32), second[name].astype(mx.float32), atol=step + 1e-5)


def test_a_trained_drafter_has_the_published_tensors_and_config_keys_and_no_others(model, docs, tmp_path):
    raw = drafter_config(model, 1, layers=2, block_size=BLOCK, target_layer_ids=[1, 2, 4], intermediate_size=44)
    train(model, docs, tmp_path, raw, config(steps=1))
    H, mlp, heads, kv, D, taps = 32, 44, 4, 2, 8, 3
    layer = {
        "input_layernorm.weight": [H],
        "post_attention_layernorm.weight": [H],
        "self_attn.q_proj.weight": [heads * D, H],
        "self_attn.k_proj.weight": [kv * D, H],
        "self_attn.v_proj.weight": [kv * D, H],
        "self_attn.o_proj.weight": [H, heads * D],
        "self_attn.q_norm.weight": [D],
        "self_attn.k_norm.weight": [D],
        "mlp.gate_proj.weight": [mlp, H],
        "mlp.up_proj.weight": [mlp, H],
        "mlp.down_proj.weight": [H, mlp],
    }
    want = {"fc.weight": [H, taps * H], "hidden_norm.weight": [H], "norm.weight": [H]}
    want |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    weights = mx.load(str(tmp_path / "model.safetensors"))
    assert {name: list(w.shape) for name, w in weights.items()} == want
    assert {w.dtype for w in weights.values()} == {mx.bfloat16}
    saved = json.loads((tmp_path / "config.json").read_text())
    # What the authors' PyTorch class reads; tried with theirs: no key missing or left over, ids and rounds equal to ours.
    sizes = {"hidden_size": H, "intermediate_size": mlp, "num_hidden_layers": 2, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": kv, "head_dim": D, "vocab_size": V, "block_size": BLOCK, "num_target_layers": 6}
    assert sizes.items() <= saved.items() and saved["layer_types"] == ["full_attention"] * 2
    assert saved["dflash_config"] == {"mask_token_id": 1, "target_layer_ids": [1, 2, 4]}
    assert {"rms_norm_eps", "max_position_embeddings", "attention_bias", "rope_theta", "rope_parameters"} <= saved.keys()
    assert (saved["architectures"], saved["model_type"], saved["torch_dtype"]) == (["DFlashDraftModel"], "qwen3", "bfloat16")


def test_default_taps_match_published_configs():
    assert default_taps(30) == [1, 8, 14, 20, 27]
    assert default_taps(36) == [1, 9, 17, 25, 33]
    assert default_taps(28, 1) == [14]
    assert default_taps(6) == [1, 2, 3]


def test_learning_rate_warms_up_and_ends_at_the_floor():
    c = config(steps=100, lr=1.0, warmup=0.1, floor=0.02)
    assert learning_rate(c, 0.05) == pytest.approx(0.5)
    assert learning_rate(c, 0.1) == pytest.approx(1.0)
    assert learning_rate(c, 1.0) == pytest.approx(0.02)


def test_choose_anchors_takes_answer_ids_that_an_answer_id_follows():
    answer = np.zeros((2, 12), bool)
    answer[0, 3:7] = answer[1, 5:] = True
    anchors, keep = choose_anchors(np.random.default_rng(0), answer, 5)
    assert anchors[0, keep[0]].tolist() == [3, 4, 5]
    assert keep.sum(1).tolist() == [3, 5] and len(set(anchors[1])) == 5 and anchors[1].min() >= 5 and anchors[1].max() <= 10


def test_batches_follow_from_seed_and_number_alone(docs):
    feed = batches(docs, 4, 6, 64, seed=3)
    seen = [next(feed) for _ in range(5)]
    late = batches(docs, 4, 6, 64, seed=3, skip=3)
    for a, b in zip(seen[3:], [next(late) for _ in range(2)], strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert [b[5] for b in seen] == [0, 0, 1, 1, 2]


def test_text_of_another_target_is_refused(model, docs):
    check_text(model, docs, "M")
    assert own_share(model, docs) == 1.0 and own_share(model, make_docs(model, (1,) * 8)) is None
    other = tiny_target(seed=6, layers=6, hidden=32, vocab=V)
    with pytest.raises(ConfigError, match=r"another model wrote this text: \d+% of its greedy answers' tokens are what N says"):
        check_text(other, docs, "N")
    with pytest.raises(ConfigError, match="text: 0% of"):
        check_text(tiny_target(seed=5, layers=6, hidden=32, vocab=V // 2), docs, "N")
