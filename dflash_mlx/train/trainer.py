"""Optimise a drafter on a target's own text: schedule, EMA, clipping, checkpoints that resume exactly, metrics.

    out/config.json, model.safetensors   the drafter (EMA weights, bfloat16) in the published layout
    out/README.md                        its card: data, tokens, tau, the target's digest
    out/training/state.safetensors       everything an exact resume needs; written whole, then renamed
    out/metrics.jsonl, curves.html       one line every `log_every` steps and every evaluation

The target runs frozen and online: features are never stored. Weights are float32, products run in `dtype`.
Source: DFlash, arXiv 2602.06036, appendix A.
"""

from __future__ import annotations

import json
import math
import shutil
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
from ..errors import CheckpointError, ConfigError, differences
from ..machine import write_atomically
from ..models.drafter import Drafter
from ..models.target import Target
from ..progress import tell
from .card import Source, write_card
from .cost import Rates
from .curves import write_curves
from .docs import Docs, batches
from .forward import context_keys_values, slot_hidden
from .losses import LossConfig, Wanted, block_loss, labels_of
from .offline_tau import mean_tau, replay_docs
from .packing import Packing
from .prompts import KINDS
from .ranks import Ranks
from .start import init_drafter, load_start

# In a folder of its own: beside the weights it would be taken for a part of the drafter.
STATE = "training/state.safetensors"
# The first steps load and compile kernels; the cost of a step is measured on later ones.
_COST_FROM, _COST_TO = 4, 12


@dataclass(frozen=True)
class TrainConfig:
    """How to train. One of `steps` and `seconds` ends the run, and the learning rate follows it.

    batch documents x anchors blocks a pass; accumulate passes a step; loss "decay" (the paper's weights, gamma None: 7, 5
    or 4 by block size) or "dpace"; noise: uniform, as a share of each feature row's size, off for the last fifth.
    learn_from "text": every slot learns the text's token. "target": slots of sampled text learn the target's probabilities at
    the temperature that it was sampled at, and drafts of greedy text are judged at `greedy_heat`.
    patience: end after this many evaluations in a row without a better tau, and keep the best weights; 0: never.
    Of DFlash 2 only: backbone, tv and predecessor ("text" or "own") as in `LossConfig`; selector_lr: times `lr`, because most
    rows of a codebook are seldom seen; conv_lr: times `lr`, for convolutions of slots, which begin as if they were not there.
    0 leaves them so: better in short runs (docs/training.md).
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
    learn_from: str = "text"
    greedy_heat: float = 0.5
    backbone: float = 0.5
    tv: float = 0.0
    predecessor: str = "text"
    selector_lr: float = 3.0
    conv_lr: float = 1.0
    noise: float = 0.05
    seed: int = 0
    patience: int = 0
    log_every: int = 20
    save_every_s: float = 300.0
    eval_every_s: float = 300.0
    eval_docs: int = 128
    chunk_blocks: int = 512

    def check(self) -> None:
        """Raises ConfigError for settings that no run can have."""
        if (self.steps is None) == (self.seconds is None):
            which = "neither steps nor seconds" if self.steps is None else "both steps and seconds"
            raise ConfigError(f"{which} is given to end the run", "Give one of them")
        for name, allowed in (("loss", ("decay", "dpace")), ("learn_from", ("text", "target")), ("predecessor", ("text", "own"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {' or '.join(allowed)}", "Choose one")
        if not self.backbone > 0:
            raise ConfigError(f"backbone is {self.backbone}; it is a weight above 0", "Give such a weight, 0.5 by default")
        if not 0 <= self.tv <= 1 or (self.tv and self.learn_from == "text"):
            raise ConfigError(
                f"tv is {self.tv} with learn_from {self.learn_from!r}; it is a share of learning from the target",
                "Give learn_from 'target', or leave tv out",
            )


def save_drafter(folder: str | Path, raw: dict[str, Any], weights: dict[str, mx.array], dtype: mx.Dtype = mx.bfloat16) -> None:
    """config.json and model.safetensors in the published layout, each written whole and then renamed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = {mx.bfloat16: "bfloat16", mx.float16: "float16", mx.float32: "float32"}
    cast = {k: v.astype(dtype) for k, v in weights.items()}
    write_atomically(folder / "model.safetensors", lambda p: mx.save_safetensors(str(p), cast))
    text = json.dumps({**raw, "torch_dtype": names[dtype], "dtype": names[dtype]}, indent=1)
    write_atomically(folder / "config.json", text + "\n")


def learning_rate(config: TrainConfig, share: float) -> float:
    """Linear warm-up, then a cosine down to `floor` of the peak; `share` of the run is done."""
    if share < config.warmup:
        return config.lr * max(share, 1e-4) / config.warmup
    down = min(1.0, (share - config.warmup) / (1 - config.warmup))
    return config.lr * (config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * down)))


def _group(path: str, weight: mx.array) -> str:
    """Which weights are optimised alike: selector and convolutions at rates of their own, and weight decay is for matrices."""
    if path.startswith(("candidate_selector.", "markov_head.")):
        return "selector"
    if "_conv." in path:
        return "convolutions"
    return "matrices" if weight.ndim > 1 else "vectors"


class Trainer:
    """Training state and one step of it. `run` drives it; tests may too."""

    def __init__(self, drafter: Drafter, target: Target, raw: dict[str, Any], config: TrainConfig, dtype: mx.Dtype):
        self.drafter, self.target, self.raw, self.config, self.dtype = drafter, target, raw, config, dtype
        self.K, self.ranks = drafter.config.block_size, Ranks()
        self.packing = Packing(tree_flatten(drafter.trainable_parameters()), _group)
        self.params = self.packing.pack(drafter.trainable_parameters())
        self.ema = self.params
        self.step, self.elapsed = 0, 0.0
        # The best held-out tau, its weights where a stall may end the run, and the evaluations since.
        self.best: float | None = None
        self.best_ema: dict | None = None
        self.stalled = 0
        adam = partial(optim.AdamW, 0.0, betas=[0.9, 0.95], bias_correction=True)
        # DFlash 2's selector or DSpark's Markov head: what knows the token before a slot.
        self.selector = drafter.get("candidate_selector") or drafter.get("markov_head")
        decay = {"selector": 0.0, "convolutions": config.weight_decay, "matrices": config.weight_decay, "vectors": 0.0}
        filters = [lambda n, _, name=name: n == name for name in decay]
        self.optimizer = optim.MultiOptimizer([adam(weight_decay=value) for value in decay.values()], filters[:-1])
        self.optimizer.init(self.params)

    @property
    def gamma(self) -> float | None:
        if self.config.loss == "dpace":
            return None
        return self.config.gamma or (7.0 if self.K > 12 else 5.0 if self.K > 8 else 4.0)

    def cast(self, params: dict) -> dict:
        """Weights as products use them. `fc` and `hidden_norm` stay float32, they meet features of many sizes; the selector's
        products are small."""
        wide = ("fc", "hidden_norm", "candidate_selector")
        return tree_map_with_path(lambda n, p: p if n.split(".")[0] in wide else p.astype(self.dtype), params)

    def loss(self, params: dict, features: mx.array, states: mx.array | None, one: tuple) -> tuple[mx.array, dict]:
        """Loss of one pass on (ids, answer, anchors, keep, temps); see `forward` for the shapes.

        params: a tree; states: [n, S, H] what the target's head is given, of the first n conversations, those of sampled text;
        None: all learn from the text.
        """
        c, (ids, answer, anchors, keep), temps = self.config, one[:4], np.array(one[4])
        self.drafter.update(self.cast(params))
        pairs = context_keys_values(self.drafter, features)
        hidden = slot_hidden(self.drafter, ids, anchors, pairs, self.K).flatten(0, 1)
        labels, counts = (a.flatten(0, 1) for a in labels_of(ids, answer, anchors, keep, self.K))
        anchor = mx.take_along_axis(ids, anchors, axis=1).flatten()
        heat = teacher = at = None
        if c.learn_from == "target":
            heat = np.repeat(np.where(temps > 0, temps, np.float32(c.greedy_heat)), anchors.shape[1])
        if states is not None:
            (n, S, _), N = states.shape, self.K - 1
            # The target's row at anchor + k - 1 chose the token of slot k.
            at = mx.minimum(anchors[:n, :, None] + mx.arange(N), S - 1) + S * mx.arange(n)[:, None, None]
            states, at = states.flatten(0, 1), at.flatten(0, 1)
            # Rows of states and the product again, not rows of logits: gathering those takes three times as long.
            teacher = lambda rows: self.target.head(states[rows][None])[0]  # noqa: E731
        want = Wanted(labels, counts, anchor, heat, teacher, at)
        loss = LossConfig(self.gamma, c.backbone, c.tv, c.predecessor == "own", c.chunk_blocks)
        return block_loss(self.drafter._head, hidden, want, loss, self.selector)

    # Not compiled as a whole: on an H100 (MLX 0.32.4) compiling the kernels of one step took over two minutes, a step 0.13 s.
    def _gradients(self, params, one, key, noise):
        output = self.target(one[0])
        features = mx.stop_gradient(output.features).astype(mx.float32)
        size = mx.sqrt(mx.square(features).mean(-1, keepdims=True))
        # Every process makes the noise of the whole batch: a row's does not depend on their number.
        rows = mx.random.uniform(-1, 1, (len(features) * self.ranks.size, *features.shape[1:]), key=key)
        features = features + noise * size * self.ranks.part(rows)
        states = None
        if self.config.learn_from == "target":
            # Sampled text goes first: the rest needs none of the target's logits. Equal temperatures lie together.
            temps = np.array(one[4])
            places = np.argsort(-temps, kind="stable")
            order, sampled = mx.array(places), int((temps > 0).sum())
            # Temperatures stay on the host: reading them back from the device would be a wait.
            features, one = features[order], (*(a[order] for a in one[:4]), temps[places])
            if sampled:
                states = mx.stop_gradient(output.hidden[order[:sampled]])
        (loss, metrics), grads = mx.value_and_grad(self.loss)(self.packing.tree(params), features, states, one)
        return self.ranks.join(loss, metrics, self.packing.pack(grads))

    def _update(self, params, ema, grads, rate, keep):
        # The norm is a sum: in another order it rounds otherwise, and a restored state comes in another order.
        grads, norm = optim.clip_grad_norm(dict(sorted(grads.items())), self.config.clip)
        self.optimizer.learning_rate = rate
        for group, times in zip(self.optimizer.optimizers, (self.config.selector_lr, self.config.conv_lr), strict=False):
            group.learning_rate = rate * times
        params = self.optimizer.apply_gradients(grads, params)
        ema = tree_map(lambda e, p: keep * e + (1 - keep) * p, ema, params)
        return params, ema, norm

    def take(self, passes: list[tuple], share: float) -> tuple[mx.array, dict, mx.array]:
        """One step on `accumulate` passes of (ids, answer, anchors, keep, temps), each process on its part of them; `share` of
        the run is done.

        Returns: loss, metrics and gradient norm, not yet evaluated.
        """
        c, total, loss, metrics = self.config, None, mx.array(0.0), None
        noise = mx.array(c.noise if share < 0.8 else 0.0)
        for i, one in enumerate(passes):
            key = mx.random.key(c.seed * 1_000_003 + self.step * 64 + i)
            mine = tuple(mx.array(self.ranks.part(a)) for a in one)
            part, found, grads = self._gradients(self.params, mine, key, noise)
            if c.accumulate > 1:
                mx.eval(part, found, grads)
            total = grads if total is None else tree_map(mx.add, total, grads)
            metrics = found if metrics is None else tree_map(mx.add, metrics, found)
            loss = loss + part / len(passes)
        if len(passes) > 1:
            total = tree_map(lambda g: g / len(passes), total)
        keep = min(c.ema, (1 + self.step) / (10 + self.step))
        rate = mx.array(learning_rate(c, share))
        before = self.params, self.ema, self.step, tree_map(lambda value: value, self.optimizer.state)
        try:
            self.params, self.ema, norm = self._update(self.params, self.ema, total, rate, mx.array(keep))
            self.step += 1
        except KeyboardInterrupt:
            # A step is taken whole or not at all: what is saved next must resume exactly.
            self.params, self.ema, self.step, self.optimizer.state = before
            raise
        return loss, metrics, norm

    def use(self, params: dict, dtype: mx.Dtype | None = None) -> Drafter:
        """The drafter with these weights, for an evaluation."""
        tree = self.packing.tree(params)
        self.drafter.update(self.cast(tree) if dtype is None else tree_map(lambda p: p.astype(dtype), tree))
        return self.drafter

    def note_tau(self, tau: float) -> None:
        """Keep the best weights, if a stall of tau may end the run."""
        if self.best is None or tau > self.best:
            self.best, self.stalled = tau, 0
            self.best_ema = self.ema if self.config.patience else None
        else:
            self.stalled += 1

    @property
    def kept(self) -> dict:
        """The weights to keep: the EMA's, or the best ones where the run watches for a stall."""
        return self.ema if self.best_ema is None else self.best_ema

    def follow(self) -> None:
        """Take rank 0's weights, state and place in the run."""
        if self.ranks.size == 1:
            return
        state = self.ranks.broadcast({"params": self.params, "ema": self.ema, "optimizer": self.optimizer.state})
        self.params, self.ema, self.optimizer.state = state["params"], state["ema"], state["optimizer"]
        step, self.elapsed = self.ranks.broadcast(mx.array([self.step, self.elapsed])).tolist()
        self.step = int(step)

    def check_disk(self, out: Path) -> None:
        """Raises ConfigError if what `save` writes would not fit beside what is there: the first save may be minutes away."""
        # Weights, moving average, two moments and the best, each float32; the drafter in bfloat16. What is replaced goes last.
        numbers = sum(row.size for row in self.params.values())
        wanted, free = (4 * 5 + 2) * numbers, shutil.disk_usage(out).free
        if free < wanted:
            raise ConfigError(
                f"{out} has {free / 1e6:.1f} MB free; a save of this run takes up to {wanted / 1e6:.1f}",
                "Free some space, or write elsewhere",
            )

    def save(self, out: Path) -> None:
        """State for an exact resume, and the drafter as it stands."""
        state = {"params": self.params, "ema": self.ema, "optimizer": self.optimizer.state}
        if self.best_ema is not None:
            state["best"] = self.best_ema
        about = {
            "step": self.step,
            "elapsed": self.elapsed,
            "best": self.best,
            "stalled": self.stalled,
            "train": asdict(self.config),
            "drafter": self.raw,
        }
        flat = dict(tree_flatten(state))
        mx.eval(flat)
        (out / STATE).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out / STATE, lambda part: mx.save_safetensors(str(part), flat, {"about": json.dumps(about)}))
        save_drafter(out, self.raw, dict(tree_flatten(self.packing.tree(self.kept))))

    def restore(self, out: Path) -> None:
        """Continue from what `save` wrote.

        Raises:
          CheckpointError: if the state is of another drafter or another run.
        """
        path = out / STATE
        flat, meta = mx.load(str(path), return_metadata=True)
        about = json.loads(meta["about"])
        mine = json.loads(json.dumps(asdict(self.config)))
        mine = {name: value for name, value in mine.items() if not name.startswith(("log_", "save_", "eval_"))}
        differ = differences(about["train"], mine)
        if json.loads(json.dumps(self.raw)) != about["drafter"]:
            differ.append("another drafter")
        if any(f"params.{row}" not in flat for row in self.packing.rows):
            differ.append("another version of this package")
        if differ:
            raise CheckpointError(
                f"{path} is the state of another run: {'; '.join(differ)}",
                "Give the same settings, or another folder with init to start from these weights",
            )
        # Read now: MLX loads lazily, and the next save replaces this file.
        mx.eval(flat)
        state = tree_unflatten(list(flat.items()))
        self.params, self.ema = state["params"], state["ema"]
        self.optimizer.state = state["optimizer"]
        self.step, self.elapsed = about["step"], about["elapsed"]
        self.best, self.stalled, self.best_ema = about.get("best"), about.get("stalled", 0), state.get("best")


def _silent(text: str) -> None:
    pass


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
    report: Callable[[str], None] = _silent,
    source: Source = Source(),  # noqa: B008 (frozen)
) -> dict[str, Any]:
    """Train a drafter on a target's text and leave it in `out`; goes on where a stopped run of the same settings was.

    Ctrl-C ends the run: its state and the drafter as it stands are saved, then KeyboardInterrupt goes on.
    Started by `mlx.launch`, every process calls this with the same arguments; rank 0 alone reads and writes `out`.

    Args:
      model: the target, as served (or `dense` of it). raw: from `drafter_config` or `as_dflash2`.
      init: a drafter to start from, as `load_drafter` takes it, bfloat16 or quantized; the optimizer starts anew.
      pause_s: save and return after this many seconds; a later call continues with the same schedule.
    Returns: the last line of metrics, with `tau_heldout` if there is held-out text.
    """
    config.check()
    out = Path(out)
    # What is trained is float, whatever it starts from.
    raw = {key: value for key, value in raw.items() if key not in ("quantization", "quantization_config")}
    dtype = dtype or (mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16)
    target = Target(model, DrafterConfig.from_dict(raw).taps(len(model.layers)))
    model.freeze()
    longest = np.argsort(docs.lengths)[-4:]
    drafter = init_drafter(raw, target, docs.pad(longest, min(config.max_len, 256))[0], config.seed)
    if init is not None:
        load_start(drafter, init)
    trainer = Trainer(drafter, target, raw, config, dtype)
    trainer.ranks.check(config.batch, conversations=len(docs), ids=len(docs.ids))
    if trainer.ranks.leads:
        out.mkdir(parents=True, exist_ok=True)
        trainer.check_disk(out)
        if (out / STATE).exists():
            trainer.restore(out)
            report(f"Going on at step {trainer.step}.")
        _cut_metrics(out / "metrics.jsonl", trainer.step)
    else:
        report = _silent
        tell(f"Training as rank {trainer.ranks.rank}; rank 0 says how far")
    trainer.follow()
    return _Run(trainer, docs, held_out, out, report, source).go(pause_s)


def _cut_metrics(path: Path, step: int) -> None:
    """Keep the lines up to a step: a run that was killed goes on from before its last ones, one of which may be half written."""
    kept = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            kept += [text] if json.loads(text)["step"] <= step else []
        except ValueError:
            continue
    write_atomically(path, "".join(text + "\n" for text in kept))


class _Run:
    """One sitting of a training run: takes steps until an end, evaluates, logs and saves on the way."""

    def __init__(
        self,
        trainer: Trainer,
        docs: Docs,
        held_out: Docs | None,
        out: Path,
        report: Callable[[str], None],
        source: Source,
    ):
        self.trainer, self.docs, self.out, self.report, self.source = trainer, docs, out, report, source
        self.ranks, self.held_out = trainer.ranks, None
        if held_out is not None and self.ranks.leads:
            greedy = held_out.pick((held_out.temp == 0) & ~held_out.looped)
            every = max(1, len(greedy) // trainer.config.eval_docs)
            self.held_out = greedy.pick(np.arange(0, len(greedy), every)) if len(greedy) else None
        self.line: dict[str, Any] = {}
        self.window: list[tuple] = []
        self.seen_docs, self.marked = 0, time.monotonic()
        self.saved = self.evaluated = time.monotonic()
        # Steps of this sitting, where the clock of its cost began, and the seconds since that went elsewhere.
        self.taken, self.timed_from, self.elsewhere = 0, 0.0, 0.0

    def go(self, pause_s: float | None) -> dict[str, Any]:
        """Run to the end, to the pause, to a stall of tau or to Ctrl-C; returns the last line of metrics."""
        trainer, c = self.trainer, self.trainer.config
        feed = batches(self.docs, c.batch, c.anchors, c.max_len, c.seed, skip=trainer.step * c.accumulate)
        before, begun = trainer.elapsed, time.monotonic()
        last: mx.array | None = None
        try:
            while True:
                here = time.monotonic() - begun
                ends = (pause_s is not None and here > pause_s) or (c.patience > 0 and trainer.stalled >= c.patience)
                trainer.elapsed, ends = self.ranks.broadcast_late([before + here, ends])
                share = trainer.step / c.steps if c.steps else trainer.elapsed / c.seconds
                if self.ranks.leads:
                    self._tell(share)
                if share >= 1 or ends:
                    break
                loss = self._step([next(feed) for _ in range(c.accumulate)], share)
                if last is not None:
                    mx.eval(last)  # one step ahead of the device, no more
                last = loss
                self._tell_cost()
                self._look_up()
            if self.held_out is not None:
                self.line = {**self.line, **self.evaluate()}
        except KeyboardInterrupt:
            if self.ranks.leads:
                trainer.save(self.out)
                self.report(f"Stopped at step {trainer.step}; {self.out} is saved, and the same command goes on from there.")
            raise
        if self.ranks.leads:
            trainer.save(self.out)
            write_card(self.out, trainer, self.docs, self.line, self.source)
            write_curves(self.out, self.out / "curves.html")
        self.ranks.wait()
        trainer.use(trainer.kept)
        return self.line

    def _tell(self, share: float) -> None:
        trainer, c = self.trainer, self.trainer.config
        if c.steps:
            tell("Training", trainer.step, c.steps, "steps")
        else:
            tell("Training", 100 * share, 100, "%")

    def _tell_cost(self) -> None:
        """What the rest of the run will cost, once, from this sitting's first steps."""
        self.taken += 1
        if self.taken == _COST_FROM:
            self.timed_from, self.elsewhere = time.monotonic(), 0.0
        if self.taken == _COST_TO:
            trainer, c = self.trainer, self.trainer.config
            step_s = (time.monotonic() - self.timed_from - self.elsewhere) / (_COST_TO - _COST_FROM)
            answer_tokens = self.docs.answer_tokens(c.max_len)
            here = Rates(step_s, c.batch * c.accumulate, len(self.docs), answer_tokens, mx.get_peak_memory())
            steps, seconds = c.steps and c.steps - trainer.step, c.seconds and c.seconds - trainer.elapsed
            self.report(here.line(steps, seconds))

    def _step(self, passes: list[tuple], share: float) -> mx.array:
        trainer = self.trainer
        loss, metrics, norm = trainer.take([p[:5] for p in passes], share)
        mx.async_eval(loss, metrics, norm, trainer.params, trainer.ema, trainer.optimizer.state)
        self.window.append((loss, metrics, norm))
        self.seen_docs += sum(len(p[0]) for p in passes)
        if trainer.step % trainer.config.log_every == 0:
            took = time.monotonic() - self.marked
            self.line = line = _summary(self.window, trainer, passes[-1][5], share, took, self.seen_docs)
            self._log(line)
            self.report(
                f"Step {line['step']}: loss {line['loss']:.3f}, {line['run']:.3f} tokens a round at random places, "
                f"learning rate {line['lr']:.2e}, gradient {line['grad_norm']:.2f}, {line['step_s'] * 1e3:.0f} ms a step, "
                f"epoch {line['epoch']}, peak {line['peak_memory_gb']:.1f} GB, {share:.0%}"
            )
            self.window, self.seen_docs, self.marked = [], 0, time.monotonic()
            if not math.isfinite(line["loss"]):
                raise ConfigError(f"the loss is {line['loss']} at step {trainer.step}; it must be finite", "Lower lr")
        return loss

    def _look_up(self) -> None:
        """Save and evaluate if it is time to."""
        now, c = time.monotonic(), self.trainer.config
        if self.ranks.leads and now - self.saved > c.save_every_s:
            self.trainer.save(self.out)
            self.saved = time.monotonic()
        if self.held_out is not None and now - self.evaluated > c.eval_every_s:
            self.evaluate()
        self.elsewhere += time.monotonic() - now

    def evaluate(self) -> dict[str, Any]:
        """tau on held-out greedy text with the EMA weights, in all and by kind; notes the best and how long ago it was."""
        trainer, held_out = self.trainer, self.held_out
        tell("Measuring on held-out text")
        replays = replay_docs(trainer.use(trainer.ema), trainer.target, held_out, trainer.K)
        found = {"step": trainer.step, "tau_heldout": mean_tau(replays)}
        for kind in np.unique(held_out.kind):
            mine = [r for r, k in zip(replays, held_out.kind, strict=True) if k == kind]
            found[f"tau_{KINDS[kind]}"] = mean_tau(mine)
        trainer.note_tau(found["tau_heldout"])
        self._log(found)
        kinds = ", ".join(f"{k[4:]} {v:.3f}" for k, v in found.items() if k.startswith("tau") and k != "tau_heldout")
        self.report(f"Step {trainer.step}: {found['tau_heldout']:.3f} tokens a round on held-out text ({kinds})")
        self.evaluated = time.monotonic()
        return found

    def _log(self, line: dict[str, Any]) -> None:
        if self.ranks.leads:
            with (self.out / "metrics.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")


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
