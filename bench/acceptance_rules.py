"""tau of drafters by temperature, kind of draft and rule, in the real loop, prompt by prompt.

    python bench/acceptance_rules.py --model tiny --draft-model tiny [OTHER] --prompts bench/prompts/tiny.jsonl --out result.json
        [--temp 0 0.7 1] [--methods argmax shared rejection block] [--block-size 8] [--max-tokens 80] [--limit N]
        [--max-seconds S] [--dense] [--part 0/8]
    python bench/acceptance_rules.py --merge part-*.json --out result.json

Every prompt is answered with each drafter, at each temperature, by each of
  argmax     the drafter's likeliest tokens, kept while they equal the target's draws           (of a sampler that is a function)
  shared     drafts drawn with the noise that the target's own draw at the position has, matched likewise        (the default)
  rejection  drafts drawn from the drafter, kept with probability min(1, p / q)                 acceptance="rejection"
  block      as rejection, judged as a whole                                                    acceptance="block"
At temperature 0 there is argmax alone. The first two keep the seed's promise: they write one text, which is checked (on a GPU
those that differ are counted).
Differences are taken prompt by prompt: of a method to argmax, and of a later drafter to the first.
The prompts file holds {"kind": ..., "prompt": ...} a line; a tokenizer without a chat template gets the text as it is.
Intervals: 95 %, bootstrap over texts. tau: mean of accepted + 1 over verify rounds of width > 0, before any cut at EOS or
max_tokens. Counts do not depend on how busy the machine is. Texts that fall into a loop stand apart ("looped").
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from acceptance import DTYPES, histogram, share, summarise, tau_of

METHODS = ("argmax", "shared", "rejection", "block")


def answer(method: str, model: Any, tokenizer: Any, drafter: Any, prompt: Any, temp: float, seed: int, **options: Any) -> Any:
    """(ids, accepted in each round) of one answer."""
    from dflash_mlx import stream_generate
    from dflash_mlx.sampling import Distribution

    sampler: Any = Distribution(temp) if temp else None
    if method in ("rejection", "block"):
        options["acceptance"] = method
    elif method == "argmax" and temp:
        # Draws the same, and cannot be asked to draw at given noise.
        sampler = partial(Distribution(temp))
    run = list(stream_generate(model, tokenizer, prompt, draft_model=drafter, sampler=sampler, seed=seed, **options))
    return [r.token for r in run], [n - 1 for n in run[-1].stats.acceptance_lengths]


def paired(a: Sequence[list[int]], b: Sequence[list[int]], draws: int = 2000) -> dict[str, float]:
    """tau of `a` less and over tau of `b`, histograms of the same prompts in the same order, with intervals."""
    one, two, rng = np.array(a), np.array(b), np.random.default_rng(0)
    drawn = []
    for _ in range(draws):
        rows = rng.integers(0, len(one), len(one))
        taus = tau_of(one[rows].sum(0)), tau_of(two[rows].sum(0))
        drawn.append((taus[0] - taus[1], taus[0] / taus[1]))
    (less_low, over_low), (less_high, over_high) = np.percentile(drawn, [2.5, 97.5], axis=0)
    first, second = tau_of(one.sum(0)), tau_of(two.sum(0))
    values = (first - second, less_low, less_high, first / second, over_low, over_high)
    return dict(
        zip(("less", "less_low", "less_high", "over", "over_low", "over_high"), (round(float(v), 4) for v in values), strict=True)
    )


def looped(ids: list[int]) -> bool:
    """Whether an answer falls into a loop."""
    from dflash_mlx.train.data import loop_cuts

    row = np.array([ids])
    return bool(loop_cuts(row, np.ones(row.shape, bool))[1][0] < len(ids))


def read_prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The prompts of this part, kinds by turns."""
    asked: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    for line in Path(args.prompts).read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        one["number"] = counts[one["kind"]] = counts.get(one["kind"], 0) + 1
        if args.limit is None or one["number"] <= args.limit:
            asked.append(one)
    part, of = (int(n) for n in args.part.split("/"))
    return share(sorted(asked, key=lambda one: one["number"] / counts[one["kind"]]), part, of)


def as_prompt(tokenizer: Any, text: str) -> Any:
    """A user's text behind the chat template; without one, as it is."""
    if not tokenizer.has_chat_template:
        return text
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All prompts of this part with all drafters, by all methods at all temperatures."""
    from dflash_mlx import load, load_drafter
    from dflash_mlx.train.start import dense

    dtype = DTYPES[args.dtype]
    model, tokenizer = load(args.model, dtype=dtype)
    if args.dense:
        model = dense(model, dtype)
    drafters = [load_drafter(name, model) for name in args.draft_model]
    digests = [drafter.digest() for drafter in drafters]
    if args.dense:
        drafters = [dense(drafter, dtype) for drafter in drafters]
    records: list[dict[str, Any]] = []
    begun, parted, answered = time.monotonic(), 0, 0
    for one in read_prompts(args):
        if args.max_seconds and time.monotonic() - begun > args.max_seconds:
            break
        prompt = as_prompt(tokenizer, one["prompt"])
        for temp in args.temp:
            texts = []
            for number, drafter in enumerate(drafters):
                for method in args.methods if temp else ("argmax",):
                    options = {"block_size": args.block_size, "max_tokens": args.max_tokens}
                    ids, accepted = answer(method, model, tokenizer, drafter, prompt, temp, one["number"], **options)
                    record = {"kind": one["kind"], "number": one["number"], "temp": temp, "drafter": number, "method": method}
                    records.append(record | {"looped": looped(ids), "histogram": histogram(accepted, args.block_size)})
                    if method in ("argmax", "shared"):
                        texts.append(ids)
            if any(text != texts[0] for text in texts):
                # On a GPU a pass of another width may turn a near tie, and the texts part there.
                if mx.default_device() == mx.cpu:
                    raise SystemExit(f"the seed of {one} wrote two texts; with either draft it must write one")
                parted += 1
        answered += 1
        print(f"{answered} answered, {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return {
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "merge", "part")},
        "drafters_sha256": digests,
        "device": str(mx.default_device()),
        "mlx": mx.__version__,
        "seconds": round(time.monotonic() - begun, 1),
        "records": records,
        "texts_that_a_near_tie_parted": parted,
    }


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a (temperature, method, drafter, kind, looped or not), and one over all kinds; with the paired differences."""
    found: dict[tuple, dict[tuple, list[int]]] = {}
    apart = {(r["temp"], r["kind"], r["number"]) for r in records if r["looped"] and r["method"] in ("argmax", "shared")}
    for r in records:
        # A prompt stands apart at a temperature for every method and drafter, so that pairs stay pairs.
        is_apart = (r["temp"], r["kind"], r["number"]) in apart
        for kind in (r["kind"], "all"):
            key = (r["temp"], r["method"], r["drafter"], is_apart, kind)
            if sum(r["histogram"]):
                found.setdefault(key, {})[(r["kind"], r["number"])] = r["histogram"]

    def compared(mine: dict, other: dict | None) -> dict | None:
        both = [name for name in mine if name in (other or {})]
        return paired([mine[n] for n in both], [other[n] for n in both]) if both else None

    rows = []
    for key in sorted(found):
        temp, method, drafter, is_apart, kind = key
        mine = found[key]
        row = {"temp": temp, "method": method, "drafter": drafter, "looped": is_apart, "kind": kind}
        row |= {"keeps_seed": method in ("argmax", "shared"), **summarise(list(mine.values()))}
        if method != "argmax":
            row["to_argmax"] = compared(mine, found.get((temp, "argmax", drafter, is_apart, kind)))
        if drafter:
            row["to_first_drafter"] = compared(mine, found.get((temp, method, 0, is_apart, kind)))
            row["to_first_drafter_argmax"] = compared(mine, found.get((temp, "argmax", 0, is_apart, kind)))
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows over all kinds at a glance."""
    lines = [f"{'temp':>4} {'method':9} {'drafter':>7} {'kind':8} {'texts':>5}  tau (95 %)           times the first (95 %)"]
    for r in rows:
        if r["looped"]:
            continue
        over = r.get("to_first_drafter")
        times = f"{over['over']:.3f} ({over['over_low']:.3f}-{over['over_high']:.3f})" if over else ""
        lines.append(
            f"{r['temp']:4g} {r['method']:9} {r['drafter']:7} {r['kind']:8} {r['prompts']:5}  {r['tau']:.3f} "
            f"({r['low']:.3f}-{r['high']:.3f})  {times}"
        )
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model")
    p.add_argument("--draft-model", nargs="+")
    p.add_argument("--prompts")
    p.add_argument("--out", required=True)
    p.add_argument("--temp", type=float, nargs="+", default=[0.7, 1.0])
    p.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    p.add_argument("--block-size", type=int, default=8)
    p.add_argument("--max-tokens", type=int, default=80)
    p.add_argument("--limit", type=int, help="prompts a kind")
    p.add_argument("--max-seconds", type=float, help="begin no prompt later than this")
    p.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    p.add_argument("--dense", action="store_true", help="write quantized layers out first: faster on a CPU")
    p.add_argument("--part", default="0/1")
    p.add_argument("--merge", nargs="+", metavar="PART")
    args = p.parse_args()
    if args.merge:
        parts = [json.loads(Path(name).read_text()) for name in args.merge]
        result = parts[0] | {"records": [r for part in parts for r in part["records"]]}
        result["seconds"] = max(part["seconds"] for part in parts)
        result["texts_that_a_near_tie_parted"] = sum(part["texts_that_a_near_tie_parted"] for part in parts)
    else:
        if not (args.model and args.draft_model and args.prompts):
            p.error("--model, --draft-model and --prompts are needed (or --merge)")
        result = measure(args)
    result["rows"] = summary(result["records"])
    Path(args.out).write_text(json.dumps(result, separators=(",", ":")) + "\n")
    print(table(result["rows"]))


if __name__ == "__main__":
    main()
