"""Many prompts at once: `batch_generate` of this package beside mlx-lm's, by turns in one process.

    python bench/batch.py --model smollm2 --draft-model smollm2 --prompts bench/prompts/smollm2.jsonl --out RESULT.json
        [--rows 1 4 8 16] [--max-tokens 128] [--turns 5] [--max-seconds 110] [--dense --dtype bfloat16] [--parts]

Greedy, the same prompts on both sides; the order of sides changes from turn to turn, and the first turn only warms up. For each
number of rows: tokens/s of all rows together, prompts included (medians), the median ratio of the same turn with both quarters,
and how many rows had the same text (on a GPU texts may part at near ties). `rounds`: by drafted tokens, how many rounds ran so
far in this process and how long one takes. A turn is told as it ends; what was measured by `--max-seconds` is what is written.

--parts also measures ours without drafts (`plain`), and both sides with one token a row (`first`: seconds, nearly all of them for
the prompts). --split measures, after the turns, where the time of one more turn goes (`batch_split.py`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from acceptance import DTYPES
from acceptance_rules import as_prompt, read_prompts
from batch_split import OURS, THEIRS, split_of
from mlx_lm import batch_generate as mlx_lm_batch_generate

from dflash_mlx import batch_generate, load, load_drafter
from dflash_mlx.batch.policy import RoundCosts
from dflash_mlx.train.start import dense


def rounds_of(costs: RoundCosts | None, rows: int) -> dict[int, str]:
    """Drafted tokens a row: how many rounds of so many rows ran, and the time of one."""
    ran = sorted((width, n) for (some, width), n in costs.rounds.items() if some == rows) if costs else []
    return {width: f"{n} of {1000 * costs.seconds(rows, width):.1f} ms" for width, n in ran}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--draft-model", required=True)
    p.add_argument("--prompts", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16])
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--turns", type=int, default=5)
    p.add_argument("--max-seconds", type=float, default=110, help="begin no turn later than this")
    p.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    p.add_argument("--dense", action="store_true", help="write quantized layers out first")
    p.add_argument("--parts", action="store_true", help="also ours without drafts, and both sides with one token a row")
    p.add_argument("--split", action="store_true", help="also where the time of one turn goes, step by step")
    args = p.parse_args()
    begun, dtype = time.monotonic(), DTYPES[args.dtype]
    model, tokenizer = load(args.model, dtype=dtype)
    model = dense(model, dtype) if args.dense else model
    drafter = load_drafter(args.draft_model, model)
    drafter = dense(drafter, dtype) if args.dense else drafter
    args.limit, args.part = None, "0/1"
    texts = [as_prompt(tokenizer, one["prompt"]) for one in read_prompts(args)]
    prompts = [text if isinstance(text, list) else tokenizer.encode(text) for text in texts]

    # By number of rows: how many rounds of a row that drafted gave so many tokens.
    kept = {rows: Counter() for rows in args.rows}

    def ours(some: list[list[int]], **options: Any) -> list[list[int]]:
        asked = {"draft_model": drafter, "max_tokens": args.max_tokens, "return_token_ids": True, **options}
        found = batch_generate(model, tokenizer, some, max_batch=len(some), **asked)
        kept[len(some)].update(length for stats in found.stats for length in stats.acceptance_lengths)
        return found.token_ids

    def theirs(some: list[list[int]], most: int = args.max_tokens) -> list[list[int]]:
        # It returns texts alone.
        texts = mlx_lm_batch_generate(model, tokenizer, some, max_tokens=most).texts
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def seconds(side: Callable[[], Any]) -> float:
        start = time.perf_counter()
        side()
        return time.perf_counter() - start

    def parts(some: list[list[int]]) -> dict[str, float]:
        start = time.perf_counter()
        tokens = sum(map(len, ours(some, block_size=1)))
        plain = tokens / (time.perf_counter() - start)
        first = {"first, ours": seconds(lambda: ours(some, max_tokens=1)), "first, mlx-lm": seconds(lambda: theirs(some, 1))}
        return {"plain": plain, **first}

    sides, seen, pieces = {"ours": ours, "mlx-lm": theirs}, {rows: [] for rows in args.rows}, {rows: [] for rows in args.rows}
    for turn in range(args.turns + 1):
        for rows in args.rows:
            if time.monotonic() - begun > args.max_seconds:
                break
            some, found = (prompts * rows)[(turn * rows) % len(prompts) :][:rows], {}
            for name in sorted(sides, reverse=turn % 2 == 1):
                start = time.perf_counter()
                ids = sides[name](some)
                found[name] = (sum(map(len, ids)) / (time.perf_counter() - start), ids)
            same = sum(
                tokenizer.decode(a) == tokenizer.decode(b) for a, b in zip(found["ours"][1], found["mlx-lm"][1], strict=True)
            )
            found_parts = parts(some) if args.parts else {}
            if turn:
                pieces[rows].append(found_parts)
                seen[rows].append((found["ours"][0], found["mlx-lm"][0], same))
            rates = ", ".join(f"{name} {rate:.0f}" for name, (rate, _) in found.items())
            print(f"{time.monotonic() - begun:.0f} s: turn {turn}, {rows} rows: {rates} tokens/s, {same} rows equal", flush=True)
    table = []
    for rows, turns in seen.items():
        if turns:
            a, b, same = (np.array(column) for column in zip(*turns, strict=True))
            over = np.percentile(a / b, [50, 25, 75]).round(3).tolist()
            rates = {"ours": round(float(np.median(a)), 1), "mlx-lm": round(float(np.median(b)), 1)}
            table.append({"rows": rows, "turns": len(turns), "tokens_per_second": rates, "over": over[0], "quarters": over[1:]})
            table[-1]["equal"] = f"{int(same.sum())} of {rows * len(turns)}"
            table[-1] |= {name: round(float(np.median([part[name] for part in pieces[rows]])), 3) for name in pieces[rows][0]}
            table[-1]["tokens of a row's drafting rounds"] = dict(sorted(kept[rows].items()))
            table[-1]["rounds"] = rounds_of(drafter.pair.round_costs, rows)
    about: dict[str, Any] = {"settings": {k: v for k, v in vars(args).items() if k not in ("out", "part", "limit")}}
    about |= {"device": str(mx.default_device()), "mlx": mx.__version__, "drafter_sha256": drafter.digest()}

    def write() -> None:
        Path(args.out).write_text(json.dumps(about | {"table": table}, indent=1) + "\n")

    write()
    for row in table if args.split else ():
        some = (prompts * row["rows"])[: row["rows"]]
        row["split"] = {"ours": split_of(lambda some=some: ours(some), OURS)}
        row["split"]["plain"] = split_of(lambda some=some: ours(some, block_size=1), OURS)
        row["split"]["mlx-lm"] = split_of(lambda some=some: theirs(some), THEIRS)
        write()
        print(f"{time.monotonic() - begun:.0f} s: {row['rows']} rows split", flush=True)
    for row in table:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
