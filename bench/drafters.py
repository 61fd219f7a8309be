"""Whole answers with each of several drafters of one target, and without one, by turns in one process.

    python bench/drafters.py --model smollm2 --draft-model smollm2 OTHER --prompts bench/prompts/smollm2.jsonl --out RESULT.json
        [--block-size 8 auto] [--max-tokens 128] [--limit 10] [--max-seconds 60] [--dense --dtype bfloat16]

Each prompt is answered greedily by every drafter at every block size, the order changes from prompt to prompt, and the first
prompt only warms up. For each drafter and block size: tokens/s over the answers, tau, milliseconds a round, and the median of the
ratios to plain decoding and to the first drafter, prompt by prompt, with a 95 % interval by bootstrap. On a GPU texts may part at
near ties; `same` says how many did not.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from acceptance import DTYPES
from acceptance_rules import as_prompt, read_prompts

from dflash_mlx import load, load_drafter, stream_generate
from dflash_mlx.train.start import dense


def answer(model: Any, tokenizer: Any, drafter: Any, prompt: Any, block: str, max_tokens: int) -> dict[str, Any]:
    """Ids, seconds behind the first token, and rounds of one answer."""
    options = {} if block == "auto" or drafter is None else {"block_size": int(block)}
    ids, begun = [], 0.0
    for r in stream_generate(model, tokenizer, prompt, draft_model=drafter, max_tokens=max_tokens, **options):
        begun = begun or time.perf_counter()
        ids.append(r.token)
    seconds = time.perf_counter() - begun
    rounds = r.stats.acceptance_lengths if r.stats else []
    return {"ids": ids, "rate": (len(ids) - 1) / seconds, "seconds": seconds, "rounds": len(rounds), "tokens": sum(rounds)}


def ratio(a: list[dict], b: list[dict]) -> dict[str, float]:
    """Median of rates of `a` over those of `b`, prompt by prompt, with its interval."""
    over, rng = np.array([x["rate"] / y["rate"] for x, y in zip(a, b, strict=True)]), np.random.default_rng(0)
    low, high = np.percentile([np.median(rng.choice(over, len(over))) for _ in range(2000)], [2.5, 97.5])
    return {"over": round(float(np.median(over)), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def summary(answers: dict[tuple[str, str], list[dict]], names: list[str]) -> list[dict[str, Any]]:
    """One row a drafter and block size."""
    rows, plain = [], answers["plain", "auto"]
    for (name, block), mine in answers.items():
        row: dict[str, Any] = {"drafter": name, "block_size": block, "texts": len(mine)}
        row["tokens_per_second"] = round(sum(len(a["ids"]) - 1 for a in mine) / sum(a["seconds"] for a in mine), 1)
        if name != "plain":
            rounds = sum(a["rounds"] for a in mine)
            row |= {"tau": round(sum(a["tokens"] for a in mine) / max(rounds, 1), 3)}
            row |= {"round_ms": round(1e3 * float(np.median([a["seconds"] / max(a["rounds"], 1) for a in mine])), 2)}
            row |= {"to_plain": ratio(mine, plain), "same": sum(a["ids"] == p["ids"] for a, p in zip(mine, plain, strict=True))}
        if name not in ("plain", names[0]):
            row["to_first"] = ratio(mine, answers[names[0], block])
        rows.append(row)
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--draft-model", nargs="+", required=True)
    p.add_argument("--prompts", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--block-size", nargs="+", default=["8", "auto"], help="numbers, or auto: chosen as it runs")
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--limit", type=int, help="prompts a kind")
    p.add_argument("--max-seconds", type=float, default=120, help="begin no prompt later than this")
    p.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    p.add_argument("--dense", action="store_true", help="write quantized layers out first")
    args = p.parse_args()
    args.part, begun = "0/1", time.monotonic()
    model, tokenizer = load(args.model, dtype=DTYPES[args.dtype])
    if args.dense:
        model = dense(model, DTYPES[args.dtype])
    names = [f"{i} {Path(name).name}" for i, name in enumerate(args.draft_model)]
    drafters = [load_drafter(name, model) for name in args.draft_model]
    digests = [drafter.digest() for drafter in drafters]
    if args.dense:
        drafters = [dense(drafter, DTYPES[args.dtype]) for drafter in drafters]
    sides = [("plain", "auto", None), *((n, b, d) for n, d in zip(names, drafters, strict=True) for b in args.block_size)]
    answers: dict[tuple[str, str], list[dict]] = {side[:2]: [] for side in sides}
    prompts = read_prompts(args)
    for i, one in enumerate([prompts[0], *prompts]):
        if time.monotonic() - begun > args.max_seconds:
            break
        prompt = as_prompt(tokenizer, one["prompt"])
        for name, block, drafter in sides[i % len(sides) :] + sides[: i % len(sides)]:
            made = answer(model, tokenizer, drafter, prompt, block, args.max_tokens)
            if i:
                answers[name, block].append(made)
        print(f"{i} answered, {time.monotonic() - begun:.0f} s", flush=True)
    rows = summary(answers, names)
    about = {"settings": {k: v for k, v in vars(args).items() if k not in ("out", "part")}, "drafters_sha256": digests}
    about |= {"device": str(mx.default_device()), "mlx": mx.__version__}
    Path(args.out).write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
