"""tau at temperature > 0 by kind of draft and by rule, in the real loop.

    python bench/acceptance_rules.py --model tiny --draft-model tiny --prompts bench/prompts/tiny.jsonl --out result.json
        [--temp 0.7 1] [--block-size 8] [--max-tokens 80] [--limit N] [--dense]

Every prompt is answered by each of
  argmax     the drafter's likeliest tokens, kept while they equal the target's draws           (the default)
  shared     drafts drawn with the noise that the target's own draw at the position has, matched likewise
  rejection  drafts drawn from the drafter, kept with probability min(1, p / q)                 acceptance="rejection"
  block      as rejection, judged as a whole                                                    acceptance="block"
The first two keep the seed's promise: they write one text, which is checked (on a GPU those that differ are counted), and their
difference is taken pair by pair. The prompts file holds {"kind": ..., "prompt": ...} a line; a tokenizer without a chat template
gets the text as it is.
Intervals: 95 %, bootstrap over texts. tau: mean of accepted + 1 over verify rounds of width > 0, before any cut at EOS or
max_tokens. Counts do not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from acceptance import histogram, summarise, tau_of

METHODS = ("argmax", "shared", "rejection", "block")


def share_noise(drafter: Any, sampler: Any, seed: int) -> type:
    """Make the drafter draw its drafts under the target's noise; returns the class to give back to it."""
    from dflash_mlx.sampling import sample_at

    before = type(drafter)

    def draft(self: Any, anchor: mx.array, features: mx.array, cache: list[Any], start: int, block_size: int) -> mx.array:
        first = start + features.shape[1] + 1
        logits = self._head(self.slots(anchor, features, cache, start, block_size))
        rows = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        drawn = [sample_at(sampler, seed, first + i, rows[:, i]) for i in range(block_size - 1)]
        return mx.stack(drawn, axis=1).astype(mx.int32)

    drafter.__class__ = type("SharedNoise", (before,), {"draft": draft})
    return before


def answer(method: str, model: Any, tokenizer: Any, drafter: Any, prompt: Any, temp: float, seed: int, **options: Any) -> Any:
    """(ids, accepted in each round) of one answer."""
    from dflash_mlx import stream_generate
    from dflash_mlx.sampling import Distribution

    sampler, before = Distribution(temp), type(drafter)
    if method in ("rejection", "block"):
        options["acceptance"] = method
    elif method == "shared":
        share_noise(drafter, sampler, seed)
    try:
        run = list(stream_generate(model, tokenizer, prompt, draft_model=drafter, sampler=sampler, seed=seed, **options))
    finally:
        drafter.__class__ = before
    return [r.token for r in run], [n - 1 for n in run[-1].stats.acceptance_lengths]


def difference(a: list[list[int]], b: list[list[int]], draws: int = 1000) -> dict[str, float]:
    """tau of `a` less tau of `b`, histograms of the same texts in the same order, with its interval."""
    one, two, rng = np.array(a), np.array(b), np.random.default_rng(0)
    drawn = []
    for _ in range(draws):
        rows = rng.integers(0, len(one), len(one))
        drawn.append(tau_of(one[rows].sum(0)) - tau_of(two[rows].sum(0)))
    low, high = np.percentile(drawn, [2.5, 97.5])
    whole = tau_of(one.sum(0)) - tau_of(two.sum(0))
    return {"tau": round(whole, 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All prompts by all methods at all temperatures."""
    from dflash_mlx import load, load_drafter
    from dflash_mlx.train.trainer import dense

    model, tokenizer = load(args.model, dtype=mx.float32)
    if args.dense:
        model = dense(model, mx.float32)
    drafter = load_drafter(args.draft_model, model)
    if args.dense:
        drafter = dense(drafter, mx.float32)
    asked: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    for line in Path(args.prompts).read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        counts[one["kind"]] = counts.get(one["kind"], 0) + 1
        if args.limit is None or counts[one["kind"]] <= args.limit:
            asked.append(one)
    rows: list[dict[str, Any]] = []
    turned = 0
    for temp in args.temp:
        found: dict[str, list[list[int]]] = {method: [] for method in METHODS}
        for seed, one in enumerate(asked):
            prompt = one["prompt"]
            if tokenizer.has_chat_template:
                prompt = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
            texts = {}
            for method in METHODS:
                options = {"block_size": args.block_size, "max_tokens": args.max_tokens}
                texts[method], accepted = answer(method, model, tokenizer, drafter, prompt, temp, seed, **options)
                found[method].append(histogram(accepted, args.block_size))
            if texts["argmax"] != texts["shared"]:
                # On a GPU a pass of another width may turn a near tie, and the texts part there.
                if mx.default_device() == mx.cpu:
                    raise SystemExit(f"expected one text for seed {seed} with either draft; found two")
                turned += 1
            print(f"T {temp:g}: {seed + 1} of {len(asked)}", file=sys.stderr)
        for method in METHODS:
            row = {"temp": temp, "method": method, "keeps_seed": method in ("argmax", "shared"), **summarise(found[method])}
            rows.append({**row, "less_argmax": difference(found[method], found["argmax"])})
    return {
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "drafter_sha256": drafter.digest(),
        "device": str(mx.default_device()),
        "mlx": mx.__version__,
        "rows": rows,
        "texts_that_a_near_tie_parted": turned,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows at a glance."""
    lines = [f"{'temp':>4} {'method':9} {'texts':>5} {'rounds':>6}  tau (95 %)           less argmax (95 %)"]
    for r in rows:
        less = r["less_argmax"]
        lines.append(
            f"{r['temp']:4g} {r['method']:9} {r['prompts']:5} {r['rounds']:6}  {r['tau']:.3f} ({r['low']:.3f}-{r['high']:.3f})"
            f"  {less['tau']:+.3f} ({less['low']:+.3f} to {less['high']:+.3f})"
        )
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--draft-model", required=True)
    p.add_argument("--prompts", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--temp", type=float, nargs="+", default=[0.7, 1.0])
    p.add_argument("--block-size", type=int, default=8)
    p.add_argument("--max-tokens", type=int, default=80)
    p.add_argument("--limit", type=int, help="prompts a kind")
    p.add_argument("--dense", action="store_true", help="write quantized layers out first: faster on a CPU")
    args = p.parse_args()
    result = measure(args)
    Path(args.out).write_text(json.dumps(result, separators=(",", ":")) + "\n")
    print(table(result["rows"]))


if __name__ == "__main__":
    main()
