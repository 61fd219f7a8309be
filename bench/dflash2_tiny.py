"""DFlash 2 beside DFlash on `tiny`'s target: both go on from its built-in drafter with the same text for as many steps, on a CPU.

    python bench/dflash2_tiny.py --out FOLDER [--steps 200] [--seed 0] [--backbone 0.5] [--conv-lr 0]

Some ten minutes of a core.

It leaves text, both drafters and record.json. The text is of one sort: how functions that begin by refusing a wrong type go on,
half greedy and half drawn at temperature 0.7 or 1. Words of the 200 held-out questions are not in the training text's. tau:
offline rounds over the target's own answers, of at most 32 tokens; at temperature 1 drafts are drawn under the noise of the
target's own draws. The gain is paired by text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from acceptance import histogram
from acceptance_rules import paired
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx import load, load_drafter
from dflash_mlx.models.target import Target
from dflash_mlx.pairs.builtin import builtin_path
from dflash_mlx.sampling import Distribution, noise_at
from dflash_mlx.train.data import DataConfig, make_data
from dflash_mlx.train.docs import load_docs
from dflash_mlx.train.offline_tau import SharedNoise, bigram_guess, drafter_guess, mean_tau, replay_with
from dflash_mlx.train.start import as_dflash2
from dflash_mlx.train.trainer import TrainConfig, train

HELD_OUT = "read write open close copy move list dict set tuple string bytes name path file line word date".split()
WORDS = (
    "get put add remove insert delete find match search replace sort merge push pop hash key item node tree graph stack queue "
    "cache lock thread process signal socket server client request response header body json html csv zip tar url host port "
    "user group mode flag option config default empty zero long short left right first last next parent child root leaf"
).split()
TOKENS, TEXTS = 32, 200


def questions(words: list[str], n: int) -> list[str]:
    """n beginnings of a type check, no two the same."""
    pairs = [(a, b) for a in words for b in words if a != b]
    chosen = [pairs[i] for i in np.random.default_rng(1).permutation(len(pairs))[:n]]
    return [f"    if not isinstance({a}, {b.title()}):\n        raise TypeError(" for a, b in chosen]


def answers(model: Any, lines: Sequence[Sequence[int]], eos: set[int], temp: float, most: int) -> list[tuple[list[int], int]]:
    """(ids, where the answer starts) of the target's answers of at most `most` tokens to prompts of ids, prompt i drawn under
    seed i: what `stream_generate` says of each, all in step."""
    lines = [list(line) for line in lines]
    starts, seeds = [len(line) for line in lines], list(range(len(lines)))
    cache, first = make_prompt_cache(model), min(starts)
    rows = model(mx.array([line[:first] for line in lines]), cache=cache)[:, -1].astype(mx.float32)
    for at in range(first, max(starts) + most):
        logprobs = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
        noise = noise_at(seeds, [at] * len(lines), rows.shape[-1]) if temp else None
        chosen = mx.argmax(rows, axis=-1) if noise is None else Distribution(temp).draw(logprobs, noise)
        for line, token in zip(lines, chosen.tolist(), strict=True):
            if len(line) == at:
                line.append(token)
        rows = model(mx.array([[line[at]] for line in lines]), cache=cache)[:, -1].astype(mx.float32)
    found = []
    for line, start in zip(lines, starts, strict=True):
        ends = [i + 1 for i in range(start, start + most) if line[i] in eos]
        found.append((line[: min([*ends, start + most])], start))
    return found


def measure(model: Any, folders: Sequence[Path], written: list[tuple[list[int], int]], temp: float) -> list[list[list[int]]]:
    """Each drafter's rounds over the target's answers: a histogram of accepted drafts a text."""
    ids, spans = padded(written)
    noise, found = SharedNoise(temp, np.arange(len(written))) if temp else None, []
    for folder in folders:
        drafter = load_drafter(str(folder), model, bits="none")
        K = drafter.config.block_size
        target = Target(model, drafter.config.taps(len(model.layers)))
        replays = replay_with(drafter_guess(drafter, target, ids, K, noise=noise), ids, spans, K)
        found.append([histogram(r.accepted, K) for r in replays])
        report(f"Temperature {temp}, {folder.name}: {mean_tau(replays):.3f} tokens a round")
    return found


def padded(written: list[tuple[list[int], int]]) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Answers as `replay_with` takes them: ids [B, S], and each answer's span."""
    ids = np.zeros((len(written), max(len(line) for line, _ in written)), np.int32)
    for row, (line, _) in zip(ids, written, strict=True):
        row[: len(line)] = line
    return ids, [(start, len(line)) for line, start in written]


def tau(found: Sequence[list[int]]) -> float:
    """Mean of accepted + 1 over all rounds of some texts."""
    sums = np.array(found).sum(0)
    return round(float((sums * np.arange(1, len(sums) + 1)).sum() / sums.sum()), 4)


def report(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--seed", type=int, default=0, help="of the order of the text, and of what is drawn at the start")
    p.add_argument("--backbone", type=float, default=0.5, help="weight of DFlash 2's loss without its selector")
    p.add_argument("--conv-lr", type=float, default=0.0, help="times lr, of DFlash 2's convolutions; 0: as they begin")
    args = p.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    begun = time.process_time()
    model, tokenizer = load("tiny")
    asked = args.out / "questions.jsonl"
    asked.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions(WORDS, 270)))
    for name, greedy, seed in (("greedy", 1.0, 0), ("drawn", 0.0, 1)):
        config = DataConfig(rows=128, max_len=80, greedy=greedy, held_out_per_kind=1, looped_share=0.05, seed=seed)
        make_data(model, tokenizer, args.out / name, config, answer_tokens=6_000, prompts=asked, report=report)
    docs = load_docs(args.out / "greedy", args.out / "drawn")
    start = builtin_path("tiny", "drafter")
    first = json.loads((start / "config.json").read_text())
    settings = TrainConfig(
        steps=args.steps, batch=1, anchors=16, max_len=80, lr=5e-4, ema=0.98, noise=0.0, log_every=20, eval_every_s=1e9,
        seed=args.seed, backbone=args.backbone, conv_lr=args.conv_lr,
    )  # fmt: skip
    folders = [args.out / "dflash", args.out / "dflash2"]
    for folder, raw in zip(folders, (first, as_dflash2(first, rank=32)), strict=True):
        train(model, docs, folder, raw, settings, init=start, report=report)
    lines, eos = [tokenizer.encode(text) for text in questions(HELD_OUT, TEXTS)], set(tokenizer.eos_token_ids)
    texts, rows, K = {temp: answers(model, lines, eos, temp, TOKENS) for temp in (0.0, 1.0)}, [], first["block_size"]
    for temp, written in texts.items():
        one, two = measure(model, folders, written, temp)
        table = [histogram(r.accepted, K) for r in replay_with(bigram_guess(docs, K), *padded(written), K)]
        row = {"temp": temp, "texts": len(written), "dflash": tau(one), "dflash2": tau(two), "bigram": tau(table)}
        rows.append(row | {"gain": paired(two, one), "over_bigram": paired(two, table)})
    record = {
        "settings": {"steps": args.steps, "seed": args.seed, "backbone": args.backbone, "conv_lr": args.conv_lr},
        "answer_tokens": int(docs.answer.sum()),
        "conversations": len(docs),
        "cpu_seconds": round(time.process_time() - begun),
        "rows": rows,
    }
    (args.out / "texts.json").write_text(json.dumps(texts))
    (args.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
