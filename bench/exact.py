"""Exact runs on this device: the same ids and bits of log-probabilities with a drafter as without, and what that costs.

    python bench/exact.py --dtype bfloat16 --temp 0 --out exact-H200.json --seconds 540      float16, 4bit; --temp 1
    python bench/exact.py --targets shared/conformance/targets --out exact-H200.json
    python bench/exact.py --dtype bfloat16 --times --out exact-H200.json

Each prompt is answered without a drafter, at the policy's own draft lengths and, for the first ten, in blocks of 2 and 8. Counted
are ids that differ and log-probabilities that are not the same bits, up to the first id that differs. `--targets`: every target
of a directory, twelve prompts each, with a made-up drafter that is right two times in three; one that exact refuses is named.
`--times`: rounds with exact and without, by turns. What is done is kept in the record after each prompt: the same command goes on
where it was stopped; several processes may each do a `--part`, into a record of its own. Exit status 1: something differs; 3:
there was no time for all of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx import load, load_drafter, stream_generate
from dflash_mlx.config import DrafterConfig
from dflash_mlx.distribution import Distribution
from dflash_mlx.errors import DFlashError
from dflash_mlx.models.drafter import Drafter
from dflash_mlx.models.target import Target
from dflash_mlx.tools import system
from dflash_mlx.train.start import dense

PROMPTS = Path(__file__).parent / "prompts"
BLOCKS, BLOCK_PROMPTS = (2, 8), 10
SEED = 7


class Planned(Drafter):
    """Drafts what the target is known to say, and another token at every third position."""

    def draft_with_confidence(self, anchor, features, cache, start, block_size, *noise, n=None, accelerator=None):
        super().inject(features, cache, start)
        at = start + features.shape[1]
        known = [*vars(self)["line"][at + 1 : at + block_size], *[0] * block_size][: block_size - 1]
        rows = self.pair.target.vocabulary
        ids = [(token + 1) % rows if (at + i) * 7919 % 3 == 0 else token for i, token in enumerate(known)]
        return mx.array([ids], dtype=mx.int32)[:, :n], None


def planned_drafter(model: nn.Module) -> Planned:
    target, token = Target(model, (0, 1)), mx.zeros((1, 1), dtype=mx.int32)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **{"hidden_size": target.embed(token).shape[-1], "intermediate_size": 32, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6},
        **{"vocab_size": target.vocabulary, "max_position_embeddings": 4096, "rope_theta": 10000.0, "block_size": 8},
        "target_hidden_size": target(token).features.shape[-1] // 2,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1]},
    }
    drafter = Planned(DrafterConfig.from_dict(config))
    mx.eval(drafter.parameters())
    return drafter.bind(target.embed, target.head, model)


def answer(
    model: nn.Module, tokenizer: Any, prompt: Any, tokens: int, temp: float, **options: Any
) -> tuple[list[int], mx.array, Any]:
    """Ids, log-probabilities [n, V] and stats of one run."""
    sampler, ids, rows, response = Distribution(temp) if temp else None, [], [], None
    for response in stream_generate(model, tokenizer, prompt, tokens, sampler=sampler, seed=SEED, **options):
        ids.append(response.token)
        rows.append(response.logprobs)
        if len(rows) % 64 == 0:
            mx.eval(rows)
    return ids, mx.stack(rows), response.stats


def compared(plain: tuple, drafted: tuple) -> dict[str, Any]:
    """What differs between two answers."""
    ids, others = plain[0], drafted[0]
    n = min(len(ids), len(others))
    differs = [i for i in range(n) if ids[i] != others[i]]
    first = differs[0] if differs else None
    upto = n if first is None else first + 1
    same = mx.all(mx.equal(plain[1][:upto], drafted[1][:upto]) | mx.isnan(plain[1][:upto]), axis=-1)
    unequal = upto - int(mx.sum(same).item())
    return {
        "tokens": n,
        "different_ids": len(differs) + abs(len(ids) - len(others)),
        "first": first,
        "unequal_logprobs": unequal,
        "accepted": sum(round["accepted"] for round in drafted[2].rounds),
        "widths": {str(width): count for width, count in drafted[2].widths.items()},
    }


class Record:
    """The record's file: cases by name, written after each."""

    def __init__(self, path: Path | None, seconds: float):
        self.path, self.until = path, time.monotonic() + seconds
        held = json.loads(path.read_text()) if path and path.is_file() else {}
        self.data = {"what": "exact", "machine": system.facts(), "cases": {}, "refused": {}, "failed": {}, "times": {}} | held
        self.left = 0

    def has_time(self) -> bool:
        self.left += time.monotonic() >= self.until
        return time.monotonic() < self.until

    def keep(self, part: str, name: str, value: Any) -> None:
        self.data[part][name] = value
        if self.path:
            self.path.write_text(json.dumps(self.data, indent=1) + "\n")


def load_pair(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    dtype = "bfloat16" if args.dtype == "4bit" else args.dtype
    model, tokenizer = load(args.pair, dtype=dtype)
    drafter = load_drafter(args.pair, model)
    if args.dtype == "4bit":
        nn.quantize(model, args.group, 4)
        mx.eval(model.parameters())
        return model, tokenizer, drafter
    # Quantized layers of the files are written out.
    dtype = getattr(mx, dtype)
    return dense(model, dtype), tokenizer, dense(drafter, dtype)


def read_prompts(args: argparse.Namespace, tokenizer: Any) -> list[Any]:
    lines = (PROMPTS / f"{args.pair}.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[:: max(1, len(lines) // args.prompts)][: args.prompts]]
    if not tokenizer.has_chat_template:
        return texts
    ask = lambda text: [{"role": "user", "content": text}]  # noqa: E731
    return [tokenizer.apply_chat_template(ask(text), add_generation_prompt=True) for text in texts]


def compare_pair(args: argparse.Namespace, record: Record) -> None:
    model, tokenizer, drafter = load_pair(args)
    for n, prompt in [*enumerate(read_prompts(args, tokenizer))][args.part]:
        about = f"{args.pair} {args.dtype} temp {args.temp:g} prompt {n}"
        ways = {"policy": None, **({f"block {size}": size for size in BLOCKS} if n < args.block_prompts else {})}
        wanted = {way: size for way, size in ways.items() if f"{about} {way}" not in record.data["cases"]}
        if not wanted or not record.has_time():
            continue
        given = (model, tokenizer, prompt, args.tokens, args.temp)
        plain = answer(*given, exact=True)
        for way, size in wanted.items():
            found = compared(plain, answer(*given, exact=True, draft_model=drafter, block_size=size))
            record.keep("cases", f"{about} {way}", found)
        print(f"{about}: {found}", flush=True)


def compare_targets(args: argparse.Namespace, record: Record) -> None:
    for folder in sorted(p for p in args.targets.iterdir() if p.is_dir())[args.part]:
        if folder.name in record.data["refused"] or not record.has_time():
            continue
        try:
            model, tokenizer = load(str(folder), dtype=args.dtype)
            drafter = planned_drafter(model)
            golden = mx.load(str(folder / "golden.safetensors"))["input_ids"][0].tolist()
            for n in range(args.target_prompts):
                about = f"{folder.name} prompt {n}"
                if about in record.data["cases"] or not record.has_time():
                    continue
                prompt = golden[n : 2 * n + 12]
                given = (model, tokenizer, prompt, args.target_tokens, n % 2)
                plain = answer(*given, exact=True)
                vars(drafter)["line"], worst = [*prompt, *plain[0]], None
                for size in (2, 8, 16):
                    found = compared(plain, answer(*given, exact=True, draft_model=drafter, block_size=size)) | {"block": size}
                    if worst is None or found["different_ids"] + found["unequal_logprobs"] > 0:
                        worst = found
                record.keep("cases", about, worst)
            print(f"{folder.name}: done", flush=True)
        except (DFlashError, ImportError) as error:
            print(f"{folder.name}: refused: {error}", flush=True)
            record.keep("refused", folder.name, str(error))
        except RuntimeError as error:
            print(f"{folder.name}: failed: {error}", flush=True)
            record.keep("failed", folder.name, str(error).splitlines()[0])


def time_rounds(args: argparse.Namespace, record: Record) -> None:
    """Milliseconds of a round: the median of answers, with exact and without by turns."""
    model, tokenizer, drafter = load_pair(args)
    prompts = read_prompts(args, tokenizer)[: args.turns]
    for size in (1, 2, 8, 16):
        took: dict[bool, list[float]] = {True: [], False: []}
        for turn, prompt in enumerate([prompts[0], *prompts]):
            if not record.has_time():
                return
            for exact in (True, False):
                responses = stream_generate(model, tokenizer, prompt, args.tokens, drafter, block_size=size, exact=exact)
                stats, begun = next(responses).stats, time.perf_counter()
                for _ in responses:
                    pass
                # The first turn compiles.
                if turn:
                    took[exact].append(1e3 * (time.perf_counter() - begun) / max(stats.n_rounds, 1))
        ms = {("exact" if exact else "usual"): round(statistics.median(times), 3) for exact, times in took.items()}
        ms["ratio"] = round(ms["exact"] / ms["usual"], 3)
        record.keep("times", f"{args.pair} {args.dtype} block {size}", ms)
        print(f"block {size}: {ms}", flush=True)


def part(text: str) -> slice:
    """Of I/N: every N-th from I on."""
    first, step = map(int, text.split("/"))
    return slice(first, None, step)


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pair", default="smollm2")
    p.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32", "4bit"))
    p.add_argument("--group", type=int, default=64, help="group size of 4bit")
    p.add_argument("--temp", type=float, default=0.0)
    p.add_argument("--prompts", type=int, default=40)
    p.add_argument("--block-prompts", type=int, default=BLOCK_PROMPTS, help="prompts that are also answered in blocks of 2 and 8")
    p.add_argument("--tokens", type=int, default=256)
    p.add_argument("--targets", type=Path, help="a directory of targets with goldens")
    p.add_argument("--target-prompts", type=int, default=12)
    p.add_argument("--target-tokens", type=int, default=48)
    p.add_argument("--times", action="store_true")
    p.add_argument("--part", type=part, default="0/1", metavar="I/N", help="every N-th prompt or target from I on")
    p.add_argument("--turns", type=int, default=5)
    p.add_argument("--seconds", type=float, default=540, help="no prompt begins after so many")
    p.add_argument("--out", type=Path, help="the record; what it holds is not done again")
    args = p.parse_args(arguments)
    record = Record(args.out, args.seconds)
    (time_rounds if args.times else compare_targets if args.targets else compare_pair)(args, record)
    cases = record.data["cases"]
    ids, bits = (sum(case[name] for case in cases.values()) for name in ("different_ids", "unequal_logprobs"))
    tokens = sum(case["tokens"] for case in cases.values())
    failed = record.data["failed"]
    print(f"{len(cases)} answers, {tokens} tokens: {ids} ids differ, {bits} log-probabilities are not the same bits")
    print(f"refused: {', '.join(record.data['refused']) or 'none'}; failed: {', '.join(failed) or 'none'}")
    if record.left:
        print("no time for the rest: run it again")
    sys.exit(1 if ids or bits or failed else 3 if record.left else 0)


if __name__ == "__main__":
    main()
