"""What each ingredient of training gave: tokens a round of several drafters over the same answers, paired by text.

    python bench/ingredients.py --model smollm2 --prompts bench/prompts/smollm2.jsonl --out record.json FIRST SECOND ...
        [--temp 0 0.7 1] [--texts 200] [--max-tokens 96]

The target answers the prompts, all in step, prompt i drawn under seed i. Every drafter's rounds are replayed over these texts
(`train.offline_tau`), above temperature 0 under the noise of the target's own draws. `gain` is over the first drafter.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from acceptance_rules import paired
from dflash2_tiny import answers, measure, tau

from dflash_mlx import load
from dflash_mlx.tools.place import machine
from dflash_mlx.train.start import dense


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """What a chat model is asked, or what a model of source code goes on with."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode(text)
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("drafters", nargs="+", type=Path)
    p.add_argument("--model", required=True)
    p.add_argument("--prompts", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--temp", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    p.add_argument("--texts", type=int, default=200)
    p.add_argument("--max-tokens", type=int, default=96)
    args = p.parse_args()
    model, tokenizer = load(args.model)
    if mx.default_device() == mx.gpu:
        model = dense(model, mx.bfloat16)
    asked = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]
    step = max(len(asked) // args.texts, 1)
    lines = [prompt_ids(tokenizer, text) for text in asked[::step][: args.texts]]
    record = {"model": args.model, "max_tokens": args.max_tokens, **machine(), "rows": []}
    for temp in args.temp:
        written = answers(model, lines, set(tokenizer.eos_token_ids), temp, args.max_tokens)
        found = measure(model, args.drafters, written, temp)
        for folder, one in zip(args.drafters, found, strict=True):
            row = {"temp": temp, "texts": len(written), "drafter": folder.name, "tau": tau(one)}
            record["rows"].append(row | ({} if one is found[0] else {"gain": paired(one, found[0])}))
            print(json.dumps(record["rows"][-1]), flush=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
