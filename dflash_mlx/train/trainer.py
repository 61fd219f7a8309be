"""Optimise a drafter on a target's own text: schedule, EMA, clipping, checkpoints that resume exactly, metrics.

    out/config.json, model.safetensors   the drafter (EMA weights, bfloat16) in the published layout
    out/state.safetensors                everything an exact resume needs; written whole, then renamed
    out/metrics.jsonl, curves.png        one line every `log_every` steps and every evaluation

The target runs frozen and online: features are never stored. Weights are float32, products run in `dtype`.
Source: DFlash, arXiv 2602.06036, appendix A.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_map_with_path, tree_unflatten

from ..config import DrafterConfig
from ..errors import CheckpointError, ConfigError, PairError
from ..machine import write_atomically
from ..models.drafter import Drafter
from ..models.target import Target
from .data import Docs, batches
from .forward import block_hidden, block_loss, context_keys_values, labels_of
from .offline_tau import mean_tau, walk_docs


@dataclass(frozen=True)
class TrainConfig:
    """How to train. One of `steps` and `seconds` ends the run, and the learning rate follows it.

    batch documents x anchors blocks a pass; accumulate passes a step; loss "decay" (the paper's weights, gamma None: 7, 5
    or 4 by block size) or "dpace"; noise: uniform, as a share of each feature row's size, off for the last fifth.
    """

    steps: int | None = None
    seconds: float | None = None
    batch: int = 24
    anchors: int = 96
    max_len: int = 512
    accumulate: int = 1
    lr: float = 1e-3
    warmup: float = 0.04
    floor: float = 0.02
    weight_decay: float = 0.01
    clip: float = 1.0
    ema: float = 0.999
    loss: str = "decay"
    gamma: float | None = None
    noise: float = 0.05
    seed: int = 0
    log_every: int = 20
    save_every_s: float = 300.0
    eval_every_s: float = 300.0
    eval_docs: int = 128
    chunk_blocks: int = 512


def default_taps(num_layers: int, n: int = 5) -> list[int]:
    """n layers (fewer in a small target) spread evenly from the second to the third from last. Source: the paper, section 5."""
    n = min(n, max(1, num_layers - 3))
    if n == 1:
        return [num_layers // 2]
    return [round(1 + i * (num_layers - 4) / (n - 1)) for i in range(n)]


def target_shape(model: nn.Module) -> dict[str, Any]:
    """What a target's arguments say about its sizes, wherever the family keeps them."""
    found: dict[str, Any] = {}
    args = getattr(model, "args", None)
    places = [vars(args) if args is not None else {}]
    places += [places[0].get("text_config") or {}]
    inner = getattr(getattr(model, "language_model", None), "args", None)
    places += [vars(inner) if inner is not None else {}]
    for place in places:
        found.update({k: v for k, v in place.items() if v is not None and k not in found})
    return found


def drafter_config(
    model: nn.Module,
    mask_token_id: int,
    layers: int = 5,
    block_size: int = 16,
    target_layer_ids: list[int] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A config.json in the published layout for a drafter of this target; sizes are the target's unless changed."""
    shape = target_shape(model)
    n, hidden = len(model.layers), shape.get("hidden_size")
    if not hidden:
        raise PairError("expected the target's arguments to name hidden_size; found none. Pass hidden_size.")
    heads = shape.get("num_attention_heads") or max(1, hidden // 64)
    theta = shape.get("rope_theta") or (shape.get("rope_parameters") or {}).get("rope_theta") or 10000.0
    taps = target_layer_ids or default_taps(n)
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": shape.get("intermediate_size") or 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shape.get("num_key_value_heads") or heads,
        "head_dim": shape.get("head_dim") or hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": shape.get("rms_norm_eps") or 1e-6,
        "vocab_size": shape.get("vocab_size"),
        "max_position_embeddings": shape.get("max_position_embeddings") or 32768,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": float(theta),
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(theta)},
        "tie_word_embeddings": False,
        "block_size": block_size,
        "num_target_layers": n,
        "dflash_config": {"mask_token_id": int(mask_token_id), "target_layer_ids": [int(t) for t in taps]},
        **changes,
    }
    raw["layer_types"] = ["full_attention"] * raw["num_hidden_layers"]
    DrafterConfig.from_dict(raw)
    return {k: v for k, v in raw.items() if v is not None or k == "rope_scaling"}


def mask_token(tokenizer, vocab_size: int, used: set[int]) -> int:
    """A special id that the target never writes: the last special token that no text and no template uses.

    Raises:
      ConfigError: if the tokenizer has no such id.
    """
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    taken = used | set(tokenizer.eos_token_ids) | {tokenizer.bos_token_id, getattr(tokenizer, "pad_token_id", None)}
    free = [i for i, token in added.items() if getattr(token, "special", True) and i < vocab_size and i not in taken]
    if not free:
        raise ConfigError(
            "expected an unused special token to serve as the mask; found none in this tokenizer. "
            "Pass mask_token_id: an id of the embedding that never occurs in text."
        )
    return max(free)


def dense(model: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """The same target with quantized layers written out in `dtype`: on a GPU, training needs no quantized kernels.

    Values are formed in float32 and rounded once: float16 keeps 4-bit weights to 1 part in 2,000, bfloat16 to 1 in 250.
    """
    from mlx_lm.utils import dequantize_model

    model.set_dtype(mx.float32)
    with mx.stream(mx.cpu):
        model = dequantize_model(model)
        mx.eval(model.parameters())
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def init_drafter(raw: dict[str, Any], target: Target, sample: np.ndarray, seed: int) -> Drafter:
    """A fresh drafter: normal weights of size 0.02, smaller where they add to the residual; `fc` evens out the taps.

    Shapes:
      - sample: [B, S] ids to measure the taps on
    """
    config = DrafterConfig.from_dict(raw)
    drafter = Drafter(config)
    features = target(mx.array(sample))[1].astype(mx.float32)
    B, S, _ = features.shape
    n = len(config.target_layer_ids)
    size = mx.sqrt(mx.square(features).reshape(B * S, n, -1).mean(-1))
    # The median row: the first id of a text may be a hundred times larger than all others.
    size = mx.sort(size, axis=0)[B * S // 2]
    key = mx.random.key(seed)
    weights = []
    # Sorted: MLX lists parameters in another order in each process, and a seed should mean the same weights in all.
    for name, value in sorted(tree_flatten(drafter.parameters())):
        if value.ndim < 2:
            weights.append((name, mx.zeros_like(value) if name.endswith("bias") else mx.ones_like(value)))
            continue
        key, now = mx.random.split(key)
        std = 0.02 / math.sqrt(2 * config.num_hidden_layers) if ("o_proj" in name or "down_proj" in name) else 0.02
        value = std * mx.random.normal(value.shape, key=now)
        if name == "fc.weight":
            H = config.hidden_size
            value = (value.reshape(H, n, -1) * (size.mean() / size)[None, :, None]).reshape(H, -1)
        weights.append((name, value))
    drafter.load_weights(weights)
    mx.eval(drafter.parameters())
    # A drafter in bfloat16 beside a target in float16 would meet the head in float32.
    act = target.embed(mx.array(sample[:1, :1])).dtype
    return drafter.bind(target.embed, lambda hidden: target.head(hidden.astype(act)), target.model)


def save_drafter(folder: str | Path, raw: dict[str, Any], weights: dict[str, mx.array], dtype: mx.Dtype = mx.bfloat16) -> None:
    """config.json and model.safetensors in the published layout, each written whole and then renamed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = {mx.bfloat16: "bfloat16", mx.float16: "float16", mx.float32: "float32"}
    typed = {name: value.astype(dtype) for name, value in weights.items()}
    write_atomically(folder / "model.safetensors", lambda part: mx.save_safetensors(str(part), typed))
    text = json.dumps({**raw, "torch_dtype": names[dtype], "dtype": names[dtype]}, indent=1)
    write_atomically(folder / "config.json", text + "\n")


def learning_rate(config: TrainConfig, share: float) -> float:
    """Linear warm-up, then a cosine down to `floor` of the peak; `share` of the run is done."""
    if share < config.warmup:
        return config.lr * max(share, 1e-4) / config.warmup
    down = min(1.0, (share - config.warmup) / (1 - config.warmup))
    return config.lr * (config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * down)))


class Trainer:
    """Training state and one step of it. `run` drives it; tests may too."""

    def __init__(self, drafter: Drafter, target: Target, raw: dict[str, Any], config: TrainConfig, dtype: mx.Dtype):
        if config.loss not in ("decay", "dpace"):
            raise ConfigError(f"expected loss decay or dpace; found {config.loss!r}. Choose one.")
        self.drafter, self.target, self.raw, self.config, self.dtype = drafter, target, raw, config, dtype
        self.K = raw["block_size"]
        # Flattened and built again: modules without weights (RoPE) leave no empty entry behind.
        weights = [(n, p.astype(mx.float32)) for n, p in tree_flatten(drafter.trainable_parameters())]
        self.params = tree_unflatten(weights)
        self.ema = self.params
        self.step, self.elapsed = 0, 0.0
        adam = partial(optim.AdamW, 0.0, betas=[0.9, 0.95], bias_correction=True)
        matrices, rest = adam(weight_decay=config.weight_decay), adam(weight_decay=0.0)
        self.optimizer = optim.MultiOptimizer([matrices, rest], [lambda _, p: p.ndim > 1])
        self.optimizer.init(self.params)

    @property
    def gamma(self) -> float | None:
        if self.config.loss == "dpace":
            return None
        return self.config.gamma or (7.0 if self.K > 12 else 5.0 if self.K > 8 else 4.0)

    def cast(self, params: dict) -> dict:
        """Weights as products use them: `fc` and `hidden_norm` stay float32, they meet features of many sizes."""
        wide = ("fc", "hidden_norm")
        return tree_map_with_path(lambda n, p: p if n.split(".")[0] in wide else p.astype(self.dtype), params)

    def loss(self, params: dict, features: mx.array, ids, answer, anchors, keep) -> tuple[mx.array, dict]:
        """Loss of one pass; see `forward` for the shapes."""
        self.drafter.update(self.cast(params))
        pairs = context_keys_values(self.drafter, features)
        hidden = block_hidden(self.drafter, ids, anchors, pairs, self.K)[:, :, 1:]
        labels, counts = labels_of(ids, answer, anchors, keep, self.K)
        return block_loss(self.drafter._head, hidden, labels, counts, self.gamma, self.config.chunk_blocks)

    # Not compiled: on an H100 (MLX 0.32.4) compiling the kernels of one step took over two minutes, a plain step takes 0.13 s.
    def _gradients(self, params, ids, answer, anchors, keep, key, noise):
        features = mx.stop_gradient(self.target(ids)[1]).astype(mx.float32)
        size = mx.sqrt(mx.square(features).mean(-1, keepdims=True))
        features = features + noise * size * mx.random.uniform(-1, 1, features.shape, key=key)
        (loss, metrics), grads = mx.value_and_grad(self.loss)(params, features, ids, answer, anchors, keep)
        return loss, metrics, grads

    def _update(self, params, ema, grads, rate, keep):
        # The norm is a sum: in another order it rounds otherwise, and a restored state comes in another order.
        grads, norm = optim.clip_grad_norm(tree_unflatten(sorted(tree_flatten(grads))), self.config.clip)
        self.optimizer.learning_rate = rate
        params = self.optimizer.apply_gradients(grads, params)
        ema = tree_map(lambda e, p: keep * e + (1 - keep) * p, ema, params)
        return params, ema, norm

    def take(self, passes: list[tuple], share: float) -> tuple[mx.array, dict, mx.array]:
        """One step on `accumulate` passes of (ids, answer, anchors, keep); `share` of the run is done.

        Returns: loss, metrics and gradient norm, not yet evaluated.
        """
        c, total, loss, metrics = self.config, None, mx.array(0.0), None
        noise = mx.array(c.noise if share < 0.8 else 0.0)
        for i, one in enumerate(passes):
            key = mx.random.key(c.seed * 1_000_003 + self.step * 64 + i)
            part, found, grads = self._gradients(self.params, *(mx.array(a) for a in one), key, noise)
            if c.accumulate > 1:
                mx.eval(part, found, grads)
            total = grads if total is None else tree_map(mx.add, total, grads)
            metrics = found if metrics is None else tree_map(mx.add, metrics, found)
            loss = loss + part / len(passes)
        if len(passes) > 1:
            total = tree_map(lambda g: g / len(passes), total)
        keep = min(c.ema, (1 + self.step) / (10 + self.step))
        rate = mx.array(learning_rate(c, share))
        self.params, self.ema, norm = self._update(self.params, self.ema, total, rate, mx.array(keep))
        self.step += 1
        return loss, metrics, norm

    def use(self, params: dict, dtype: mx.Dtype | None = None) -> Drafter:
        """The drafter with these weights, for an evaluation."""
        self.drafter.update(self.cast(params) if dtype is None else tree_map(lambda p: p.astype(dtype), params))
        return self.drafter

    def save(self, out: Path) -> None:
        """State for an exact resume, and the drafter as it stands."""
        state = {"params": self.params, "ema": self.ema, "optimizer": self.optimizer.state}
        about = {"step": self.step, "elapsed": self.elapsed, "train": asdict(self.config), "drafter": self.raw}
        flat = dict(tree_flatten(state))
        mx.eval(flat)
        write_atomically(
            out / "state.safetensors", lambda part: mx.save_safetensors(str(part), flat, {"about": json.dumps(about)})
        )
        save_drafter(out, self.raw, dict(tree_flatten(self.ema)))

    def restore(self, out: Path) -> None:
        """Go back to what `save` wrote.

        Raises:
          CheckpointError: if the state is of another drafter or another run.
        """
        path = out / "state.safetensors"
        flat, meta = mx.load(str(path), return_metadata=True)
        about = json.loads(meta["about"])
        mine = json.loads(json.dumps(asdict(self.config)))
        differ = sorted(k for k in mine if about["train"].get(k) != mine[k] and not k.startswith(("log_", "save_", "eval_")))
        if json.loads(json.dumps(self.raw)) != about["drafter"]:
            differ.append("the drafter's config")
        if differ:
            raise CheckpointError(
                f"{path}: expected the state of this run; found another {', '.join(differ)}. "
                "Give the same settings, or another folder with init to start from these weights."
            )
        # Read now: MLX loads lazily, and the next save replaces this file.
        mx.eval(flat)
        state = tree_unflatten(list(flat.items()))
        self.params, self.ema = state["params"], state["ema"]
        self.optimizer.state = state["optimizer"]
        self.step, self.elapsed = about["step"], about["elapsed"]


def train(
    model: nn.Module,
    docs: Docs,
    out: str | Path,
    raw: dict[str, Any],
    config: TrainConfig,
    held_out: Docs | None = None,
    init: str | Path | None = None,
    dtype: mx.Dtype | None = None,
    pause_s: float | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train a drafter on a target's text and leave it in `out`; goes on where a stopped run of the same settings was.

    Args:
      model: the target, as served (or `dense` of it). raw: from `drafter_config`.
      init: a drafter to start from, as `load_drafter` takes it, bfloat16 or quantized; the optimizer starts anew.
      pause_s: save and return after so many seconds, to go on in another sitting; the schedule does not notice.
    Returns: the last line of metrics, with `tau_heldout` if there is held-out text.
    """
    if (config.steps is None) == (config.seconds is None):
        raise ConfigError("expected steps or seconds to end the run; found both or neither. Give one.")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    # What is trained is float, whatever it starts from.
    raw = {key: value for key, value in raw.items() if key not in ("quantization", "quantization_config")}
    dtype = dtype or (mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16)
    target = Target(model, raw["dflash_config"]["target_layer_ids"])
    model.freeze()
    longest = np.argsort(docs.lengths)[-4:]
    drafter = init_drafter(raw, target, docs.pad(longest, min(config.max_len, 256))[0], config.seed)
    if init is not None:
        from ..conversion import load_dense_drafter

        drafter.load_weights(list(load_dense_drafter(init)[1].items()))
    trainer = Trainer(drafter, target, raw, config, dtype)
    if (out / "state.safetensors").exists():
        trainer.restore(out)
        report(f"going on at step {trainer.step}")
    feed = batches(docs, config.batch, config.anchors, config.max_len, config.seed, skip=trainer.step * config.accumulate)
    log = (out / "metrics.jsonl").open("a", encoding="utf-8")
    before, begun = trainer.elapsed, time.monotonic()
    saved = evaluated = begun
    line: dict[str, Any] = {}
    window: list[tuple] = []
    marked, seen_docs = time.monotonic(), 0

    def evaluate() -> dict[str, Any]:
        nonlocal evaluated
        greedy = held_out.pick((held_out.temp == 0) & ~held_out.looped)
        if not len(greedy):
            return {}
        every = max(1, len(greedy) // config.eval_docs)
        greedy = greedy.pick(np.arange(0, len(greedy), every))
        mine = trainer.use(trainer.ema)
        walks = walk_docs(mine, target, greedy, trainer.K)
        found = {"step": trainer.step, "tau_heldout": mean_tau(walks)}
        for kind in np.unique(greedy.kind):
            found[f"tau_kind_{int(kind)}"] = mean_tau([w for w, k in zip(walks, greedy.kind, strict=True) if k == kind])
        log.write(json.dumps(found) + "\n")
        log.flush()
        taus = " ".join(f"{k[4:]} {v:.3f}" for k, v in found.items() if k.startswith("tau"))
        report(f"step {trainer.step}: {taus}")
        evaluated = time.monotonic()
        return found

    last: mx.array | None = None
    while True:
        trainer.elapsed = before + time.monotonic() - begun
        share = trainer.step / config.steps if config.steps else trainer.elapsed / config.seconds
        if share >= 1 or (pause_s is not None and time.monotonic() - begun > pause_s):
            break
        passes = [next(feed) for _ in range(config.accumulate)]
        loss, metrics, norm = trainer.take([p[:4] for p in passes], share)
        mx.async_eval(loss, metrics, norm, trainer.params, trainer.ema, trainer.optimizer.state)
        if last is not None:
            mx.eval(last)  # one step ahead of the device, no more
        last = loss
        window.append((loss, metrics, norm))
        seen_docs += sum(len(p[0]) for p in passes)
        if trainer.step % config.log_every == 0:
            line = _summary(window, trainer, passes[-1][4], share, time.monotonic() - marked, seen_docs)
            log.write(json.dumps(line) + "\n")
            log.flush()
            report(
                f"step {line['step']} loss {line['loss']:.3f} run {line['run']:.3f} lr {line['lr']:.2e} "
                f"grad {line['grad_norm']:.2f} {line['step_s'] * 1e3:.0f} ms epoch {line['epoch']} "
                f"peak {line['peak_memory_gb']:.1f} GB {share:.0%}"
            )
            window, seen_docs, marked = [], 0, time.monotonic()
            if not math.isfinite(line["loss"]):
                raise ConfigError(f"expected a finite loss; found {line['loss']} at step {trainer.step}. Lower lr.")
        now = time.monotonic()
        if now - saved > config.save_every_s:
            trainer.save(out)
            saved = time.monotonic()
        if held_out is not None and now - evaluated > config.eval_every_s:
            evaluate()
    trainer.save(out)
    if held_out is not None:
        line = {**line, **evaluate()}
    log.close()
    trainer.use(trainer.ema)
    draw_curves(out)
    return line


def _summary(window: list[tuple], trainer: Trainer, epoch: int, share: float, took: float, docs: int) -> dict[str, Any]:
    loss = float(np.mean([w[0].item() for w in window]))
    total = {k: np.sum([np.array(w[1][k]) for w in window], axis=0) for k in window[0][1]}
    slots = np.maximum(total["slots"], 1)
    blocks = max(int(slots[0]), 1)
    return {
        "step": trainer.step,
        "loss": loss,
        "ce": float(total["ce"] / slots.sum()),
        # Mean of accepted + 1 at random anchors: higher than tau, whose blocks start where the last one failed.
        "run": 1 + float(total["runs"].sum() / blocks),
        "hits": [round(float(h), 4) for h in total["hits"] / slots],
        "lr": learning_rate(trainer.config, share),
        "grad_norm": float(np.mean([w[2].item() for w in window])),
        "epoch": epoch,
        "elapsed_s": round(trainer.elapsed, 2),
        "step_s": took / len(window),
        "blocks_per_s": blocks / took,
        "docs_per_s": docs / took,
        "peak_memory_gb": mx.get_peak_memory() / 1e9,
    }


def draw_curves(out: Path) -> bool:
    """Loss and tau over steps as curves.png; False where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    lines = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"], line["run"]) for line in lines if "loss" in line]
    taus = [(line["step"], line["tau_heldout"]) for line in lines if "tau_heldout" in line]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    if losses:
        left.plot([p[0] for p in losses], [p[1] for p in losses])
        right.plot([p[0] for p in losses], [p[2] for p in losses], label="random anchors, training")
    if taus:
        right.plot([p[0] for p in taus], [p[1] for p in taus], "o-", label="tau, held-out families")
        right.legend()
    left.set(xlabel="step", ylabel="loss", yscale="log")
    right.set(xlabel="step", ylabel="accepted + 1")
    figure.tight_layout()
    write_atomically(out / "curves.png", lambda part: figure.savefig(part, format="png"))
    pyplot.close(figure)
    return True
