"""How many drafted tokens a target accepts: tau by the real loop and by walking, per kind of question.

    python bench/acceptance.py --model M --draft-model D --prompts bench/prompts/smollm2.jsonl --out result.json
        [--block-size 4 8 16] [--real 16] [--temp 0 1] [--max-tokens 256] [--limit N] [--max-seconds S]
        [--data DIR] [--dense] [--part 0/8]
    python bench/acceptance.py --merge part-*.json --out result.json
    python bench/acceptance.py --markdown result.json       docs/training.md's table of it

The prompts file holds {"kind": ..., "prompt": ...} a line. For every prompt the real loop (`dflash_mlx.stream_generate`)
writes the answer at the block sizes of `--real`; the text is then walked (`dflash_mlx.train.offline_tau`) at every block
size, with the drafter, with its context features zeroed, by prompt lookup and, with `--data`, by a bigram table of the text.
Walked rounds must equal the real ones. `--real none` writes the text without a drafter. Answers that fall into a loop stand
apart. Intervals: 95 %, bootstrap over prompts. `--dense` writes quantized layers of both out first (no quantized kernels).
tau: mean of accepted + 1 over verify rounds of width > 0, before any cut at EOS or max_tokens; rounds at the very end of a
text, which the text cannot judge, are left out of walked figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def histogram(accepted: list[int], K: int) -> list[int]:
    """Rounds with 0, 1, ... K - 1 accepted."""
    return np.bincount(accepted, minlength=K).tolist() if accepted else [0] * K


def tau_of(counts: np.ndarray) -> float:
    """tau of summed histograms [K]."""
    return float((counts * (np.arange(len(counts)) + 1)).sum() / max(counts.sum(), 1))


def summarise(counts: list[list[int]], draws: int = 1000) -> dict:
    """tau with its interval, and acceptance by slot, from one histogram a prompt."""
    table = np.array(counts)
    total, rng = table.sum(0), np.random.default_rng(0)
    drawn = [tau_of(table[rng.integers(0, len(table), len(table))].sum(0)) for _ in range(draws)]
    reached = total[::-1].cumsum()[::-1]  # rounds with at least k accepted
    by_slot = [round(float(reached[k + 1] / reached[k]), 4) if reached[k] else None for k in range(len(total) - 1)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {
        "prompts": len(table),
        "rounds": int(total.sum()),
        "tau": round(tau_of(total), 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
        "histogram": total.tolist(),
        "acceptance_by_slot": by_slot,
    }


def summary(records: list[dict]) -> list[dict]:
    """One row a (series, block size, temperature, looped, kind) and one for the mean over kinds."""
    groups: dict[tuple, list] = {}
    for r in records:
        for series, by_block in r["series"].items():
            for K, counts in by_block.items():
                if sum(counts):
                    groups.setdefault((series, int(K), r["temp"], r["looped"], r["kind"]), []).append(counts)
    rows, means = [], {}
    for key, counts in sorted(groups.items()):
        row = dict(zip(("series", "block_size", "temp", "looped", "kind"), key, strict=True)) | summarise(counts)
        rows.append(row)
        means.setdefault(key[:4], []).append(row["tau"])
    for key, taus in means.items():
        mean = {"kind": "mean", "tau": round(float(np.mean(taus)), 4), "kinds": len(taus)}
        rows.append(dict(zip(("series", "block_size", "temp", "looped"), key, strict=True)) | mean)
    return rows


def table(rows: list[dict]) -> str:
    """The rows at a glance."""
    lines = [f"{'series':9} {'block':>5} {'temp':>4} {'loops':>5} {'kind':8} {'prompts':>7} {'rounds':>7}  tau (95 %)"]
    for r in rows:
        interval = f" ({r['low']:.2f}-{r['high']:.2f})" if "low" in r else ""
        lines.append(
            f"{r['series']:9} {r['block_size']:5} {r['temp']:4g} {'yes' if r['looped'] else 'no':>5} {r['kind']:8} "
            f"{r.get('prompts', ''):>7} {r.get('rounds', ''):>7}  {r['tau']:.3f}{interval}"
        )
    return "\n".join(lines)


def markdown(result: dict) -> str:
    """The docs' table, answers that loop left out, a row a kind: the real loop with intervals, then figures of the greedy texts.

    A record of the real loop at one block size and temperature gets walked blocks and baselines beside it; one of more gets the
    real loop's alone. A kind all of whose answers loop has a dash.
    """
    rows = {(r["series"], r["block_size"], r["temp"], r["kind"]): r for r in result["summary"] if not r["looped"]}
    kinds = [*dict.fromkeys(kind for *_, kind in rows if kind != "mean"), "mean"]
    real = sorted({(temp, K) for series, K, temp, _ in rows if series == "real"})
    if len(real) > 1:
        shown = [("real", K, temp, f"T {temp:g}, block {K}") for temp, K in real]
    elif not real:
        raise SystemExit("expected a record of the real loop; found none, or all answers loop. Leave out --real none.")
    else:
        ((temp, most),) = real
        walked = sorted({K for series, K, *_ in rows if series == "walk"} - {most})
        shown = [("real", most, temp, f"tau, block {most} (95 %)"), *(("walk", K, temp, f"block {K}") for K in walked)]
        shown += [("lookup", most, temp, "prompt lookup"), ("zeroed", most, temp, "features zeroed")]
    head = ["kind", "answers", *(name for *_, name in shown)]
    lines = [f"| {' | '.join(head)} |", "| --- " + "| ---: " * (len(head) - 1) + "|"]
    for kind in kinds:
        found = [rows.get((*key, kind), {}) for *key, _ in shown]
        counts = sorted({r["prompts"] for r, key in zip(found, shown, strict=True) if "prompts" in r and key[0] == "real"})
        cells = [kind, " to ".join(str(n) for n in counts[:: max(1, len(counts) - 1)])]
        for r, key in zip(found, shown, strict=True):
            interval = f" ({r['low']:.2f} to {r['high']:.2f})" if "low" in r and key[0] == "real" else ""
            cells.append(f"{r['tau']:.2f}{interval}" if r else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def share(asked: list, part: int, of: int) -> list:
    """Every `of`-th, one place further each time, so that a part has all of the kinds that take turns in the list."""
    return [one for i, one in enumerate(asked) if (i + i // of) % of == part]


def measure(args: argparse.Namespace) -> dict:
    """Run the prompts of this part."""
    from mlx_lm.sample_utils import make_sampler

    from dflash_mlx import load, load_drafter, stream_generate
    from dflash_mlx.models.target import Target
    from dflash_mlx.train.data import loop_cuts
    from dflash_mlx.train.docs import Docs, load_docs
    from dflash_mlx.train.offline_tau import bigram_guess, lookup_guess, replay_docs, replay_with
    from dflash_mlx.train.prompts import chat_ids
    from dflash_mlx.train.start import dense

    dtype = DTYPES.get(args.dtype)
    model, tokenizer = load(args.model, dtype=dtype)
    if args.dense:
        model = dense(model, dtype or mx.float16)
    drafter = load_drafter(args.draft_model, model)
    if args.dense:
        drafter = dense(drafter, dtype or mx.float16)
    target = Target(model, drafter.config.taps(len(model.layers)))
    part, of = (int(n) for n in args.part.split("/"))
    asked: list[dict] = []
    counts: dict[str, int] = {}
    for line in Path(args.prompts).read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        one["number"] = counts[one["kind"]] = counts.get(one["kind"], 0) + 1
        if args.limit is None or one["number"] <= args.limit:
            asked.append(one)
    # Mixed, so that a run that ends early has the same share of each kind.
    held = {kind: min(n, args.limit or n) for kind, n in counts.items()}
    asked = share(sorted(asked, key=lambda one: one["number"] / held[one["kind"]]), part, of)

    records, begun, tokens = [], time.monotonic(), 0
    for temp in args.temp:
        texts, started = [], time.monotonic()
        for one in asked:
            if args.max_seconds and texts and time.monotonic() - started > args.max_seconds:
                break
            prompt = chat_ids(tokenizer, [{"role": "user", "content": one["prompt"]}])
            real, answer = {}, None
            for K in args.real or [None]:
                with_drafter = {} if K is None else {"draft_model": drafter, "block_size": K}
                sampler = make_sampler(temp=temp) if temp else None
                run = list(
                    stream_generate(
                        model, tokenizer, prompt, max_tokens=args.max_tokens, sampler=sampler, seed=one["number"], **with_drafter
                    )
                )
                ids = [r.token for r in run]
                # On a GPU a verify pass of another width may flip a near tie: each text is walked as the largest block wrote it.
                if answer is None or K == max(args.real):
                    answer = ids
                if K is not None:
                    real[K] = {"lengths": [n - 1 for n in run[-1].stats.acceptance_lengths], "ids": ids}
                tokens += len(ids)
            texts.append((prompt, answer, real))
        lengths = [len(p) + len(a) for p, a, _ in texts]
        docs = Docs(
            ids=np.concatenate([np.array(p + a, np.int32) for p, a, _ in texts]),
            answer=np.concatenate([np.array([0] * len(p) + [1] * len(a), bool) for p, a, _ in texts]),
            starts=np.concatenate([[0], np.cumsum(lengths)]),
            **{name: np.zeros(len(texts), np.uint8) for name in ("kind", "family", "temp", "looped", "split")},
        )
        ids, flags = docs.pad(range(len(docs)), max(lengths))
        looped = loop_cuts(ids, flags)[1] < np.array(lengths)
        spans = [(len(p), len(p) + len(a)) for p, a, _ in texts]
        train = load_docs(args.data) if args.data else None
        walked: dict[str, dict[int, list]] = {}
        for K in sorted({*args.block_size, *(args.real or [])}):
            walked.setdefault("walk", {})[K] = replay_docs(drafter, target, docs, K, None)
            walked.setdefault("zeroed", {})[K] = replay_docs(drafter, target, docs, K, None, zero_features=True)
            walked.setdefault("lookup", {})[K] = replay_with(lookup_guess(K), ids, spans, K)
            if train:
                walked.setdefault("bigram", {})[K] = replay_with(bigram_guess(train, K), ids, spans, K)
        for i, (one, (prompt, answer, real)) in enumerate(zip(asked, texts, strict=False)):
            series = {name: {K: histogram(w[i].accepted, K) for K, w in by_block.items()} for name, by_block in walked.items()}
            agree = {}
            for K, run in real.items():
                series.setdefault("real", {})[K] = histogram(run["lengths"], K)
                if run["ids"] == answer:
                    replay = walked["walk"][K][i].accepted
                    agree[K] = replay == run["lengths"][: len(replay)]
            records.append(
                {"kind": one["kind"], "number": one["number"], "temp": temp, "looped": bool(looped[i]), "tokens": len(answer)}
                | {"prompt_tokens": len(prompt), "rounds_agree": agree, "series": series}
            )
            print(f"{len(records)} {one['kind']} temp {temp:g}: {records[-1]['rounds_agree']}", file=sys.stderr)
    return {
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "merge", "part")},
        "drafter_sha256": drafter.digest(),
        "device": str(mx.default_device()),
        "mlx": mx.__version__,
        "seconds": round(time.monotonic() - begun, 1),
        "tokens": tokens,
        "records": records,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model")
    p.add_argument("--draft-model")
    p.add_argument("--prompts")
    p.add_argument("--out")
    p.add_argument("--block-size", type=int, nargs="+", default=[4, 8, 16])
    p.add_argument("--real", nargs="+", default=["16"], help="block sizes of the real loop, or none")
    p.add_argument("--temp", type=float, nargs="+", default=[0.0, 1.0])
    p.add_argument("--max-tokens", type=int, default=256)
    p.add_argument("--limit", type=int, help="prompts a kind")
    p.add_argument("--max-seconds", type=float, help="begin no text of a temperature later than this")
    p.add_argument("--data", help="training text, for the bigram table")
    p.add_argument("--dtype", choices=sorted(DTYPES))
    p.add_argument("--dense", action="store_true")
    p.add_argument("--part", default="0/1")
    p.add_argument("--merge", nargs="+", metavar="PART")
    p.add_argument("--markdown", metavar="RESULT")
    args = p.parse_args()
    if args.markdown:
        print(markdown(json.loads(Path(args.markdown).read_text())))
        return
    if not args.out:
        p.error("--out is needed")
    if args.merge:
        parts = [json.loads(Path(name).read_text()) for name in args.merge]
        if len(drafters := sorted({str(part.get("drafter_sha256")) for part in parts})) > 1:
            p.error(f"expected parts of one drafter; found {', '.join(drafters)}. Run those of another one anew.")
        result = parts[0] | {"records": [r for part in parts for r in part["records"]]}
        result |= {"seconds": max(part["seconds"] for part in parts), "tokens": sum(part["tokens"] for part in parts)}
    else:
        if not (args.model and args.draft_model and args.prompts):
            p.error("--model, --draft-model and --prompts are needed (or --merge)")
        args.real = [] if args.real == ["none"] else [int(K) for K in args.real]
        result = measure(args)
    result["summary"] = summary(result["records"])
    agreed = [ok for r in result["records"] for ok in r["rounds_agree"].values()]
    result["walk_equals_real"] = {"compared": len(agreed), "equal": sum(agreed)}
    Path(args.out).write_text(json.dumps(result, separators=(",", ":")))
    print(table(result["summary"]))
    print(f"walked rounds equal the real ones in {sum(agreed)} of {len(agreed)} answers", file=sys.stderr)


if __name__ == "__main__":
    main()
