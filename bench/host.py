"""Host time a round: what the loop costs beyond its model passes, as a share of a round.

    python bench/host.py                                     the built-in pair, block 16 or the drafter's
    python bench/host.py --model M --draft-model D --block-size 8 --tokens 256 --repeats 7 --out host.json
    python bench/host.py --built qwen3-8b                    what a config's 16-row pass and round cost to build
    python bench/host.py --built qwen3-8b --rows 4 16 --before CHECKOUT --turns 3      beside an older checkout of this project

The real loop (`stream_generate`, fixed block size) writes an answer. Then the same passes are made again without it: for every
round one drafter pass over the same context rows and one target pass over the same block at the same position, head and argmax
included, with nothing decided in between. Two ways: with one wait a round, as the loop must have, and without waits, which is
what the device alone needs. host share = 1 - bare / real. Runs alternate; medians. A cut is what a second wait, for the drafts,
and reading how sure the drafter is of them add to a round: as the width rule measures it, at the drafter's own block.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx import load, load_drafter, make_prompt_cache, stream_generate
from dflash_mlx.draft_length.measure import measure_cost_model
from dflash_mlx.loading import activation_dtype
from dflash_mlx.pair import DFlashPair
from dflash_mlx.pairs.builtin import BUILTIN_PAIRS, DEFAULT_PAIR
from dflash_mlx.prompt_cache import PairCache
from dflash_mlx.rollback import rollback, rollback_point
from dflash_mlx.tools import bench, bench_record
from dflash_mlx.traced import buffers
from dflash_mlx.traced.compiled import CompiledPass
from dflash_mlx.traced.compiled_pair import CompiledPair
from dflash_mlx.train.start import dense
from dflash_mlx.verify import logprobs, verify_block


def bare_s(model: nn.Module, drafter: nn.Module, prompt: list[int], rounds: list[Any], ids: list[int], waits: bool) -> float:
    """Seconds for the model passes of `rounds`, made again.

    Args:
      rounds: `stats.rounds` of a run at one block size that answered `prompt` with `ids`.
      waits: evaluate every round before the next one is put together.
    """
    # Replayed where the loop's are.
    target = DFlashPair.of(drafter).prepare_target()
    pair = PairCache.read(make_prompt_cache(model, drafter))
    features = target(mx.array([prompt]), pair.target).features
    # As after the loop's prefill: the drafter holds all context rows but the last.
    row, start, pending, outputs = len(prompt), len(prompt) - 1, features[:, -1:], []
    drafter.inject(features[:, :-1], pair.drafter, 0)
    mx.eval(pending, [entry.state for entry in pair.entries[:-1]])
    begun = time.perf_counter()
    for r in rounds:
        anchor = mx.array([ids[row - len(prompt)]], dtype=mx.int32)
        block = (anchor, pending, pair.drafter, start, len(r.drafted) + 1)
        drafted = drafter.draft_with_confidence(*block, accelerator=target.accelerator)[0]
        point = rollback_point(pair.target, row)
        output = verify_block(target, anchor, drafted[:, : r.width], pair.target, point)
        choices = mx.argmax(logprobs(target, output.hidden), axis=-1)
        (mx.eval if waits else mx.async_eval)(choices, drafted, output.features)
        outputs.append(choices)
        start, pending = row, output.features[:, : r.accepted + 1]
        row += r.accepted + 1
        rollback(pair.target, point, row)
    mx.eval(outputs)
    seconds = time.perf_counter() - begun
    for r, choices in zip(rounds, outputs, strict=True):
        if choices[0, r.accepted].item() != r.bonus and mx.default_device() == mx.cpu:
            raise AssertionError("the passes made again chose another token: they are not those of the run")
    return seconds


def measure(model: nn.Module, tokenizer: Any, drafter: nn.Module, prompt: list[int], K: int, tokens: int, repeats: int) -> dict:
    """Milliseconds a round of the loop and of its passes, and the host's share."""

    def real() -> tuple[float, list[Any], list[int]]:
        responses = stream_generate(model, tokenizer, prompt, max_tokens=tokens, draft_model=drafter, block_size=K)
        ids, first = [], 0.0
        for response in responses:
            if not ids:
                first = time.perf_counter()
            ids.append(response.token)
        return time.perf_counter() - first, response.stats.rounds, ids

    _, rounds, ids = real()
    for waits in (True, False):
        bare_s(model, drafter, prompt, rounds, ids, waits)
    target = DFlashPair.of(drafter).target
    times: dict[str, list[float]] = {"loop": [], "passes_with_waits": [], "passes_without_waits": []}
    for _ in range(repeats):
        times["loop"].append(real()[0])
        times["passes_with_waits"].append(bare_s(model, drafter, prompt, rounds, ids, True))
        times["passes_without_waits"].append(bare_s(model, drafter, prompt, rounds, ids, False))
    ms = {name: 1e3 * statistics.median(values) / len(rounds) for name, values in times.items()}
    return {
        "block_size": K,
        "rounds": len(rounds),
        "tokens": len(ids),
        "ms_a_round": ms,
        "spread_ms": {name: [1e3 * f(values) / len(rounds) for f in (min, max)] for name, values in times.items()},
        "cut_ms": 1e3 * statistics.median(measure_cost_model(target, drafter).cut_s for _ in range(repeats)),
        "host_share": 1 - ms["passes_with_waits"] / ms["loop"],
        "host_and_wait_share": 1 - ms["passes_without_waits"] / ms["loop"],
    }


def built(name: str, rows: int, context: int = 1024, repeats: int = 24) -> dict[str, float]:
    """Thread CPU milliseconds of building a target's pass, and a round, of a config of `bench/ledger.py`; nothing is evaluated.

    As Metal's build makes it: a call of `mx.fast` is one node. mlx_lm: the model's own call; ordinary: with taps, as `Target`
    makes it; traced: put together once and run again; round: draft, pass, accept, commit and the rollback of half of the rows,
    as the loop makes them, by ordinary passes, and traced_round by traced ones. Least of `repeats`.
    """
    import ledger_models
    from ledger_walk import Walk, _one_node_each, as_on_metal

    walk = Walk(ledger_models.build(ledger_models.published()[name]), context)
    walk.widen(buffers.capacity_for(context + 4 * rows))
    model, pair, accelerator = walk.pair.model, walk.pair, CompiledPair(walk.pair.target, walk.drafter, True)
    ids, kept = mx.zeros((1, rows), mx.int32), rows // 2

    def least_ms(build: Callable[[list[Any]], Any]) -> float:
        times = []
        for _ in range(repeats + 1):
            cache = walk.target_cache()
            began = time.thread_time()
            build(cache)
            times.append(time.thread_time() - began)
        return 1e3 * min(times[1:])

    def ordinary(cache: list[Any]) -> Any:
        return pair.target(ids, cache, rollback_point(cache, context), kernels=True)

    def traced(cache: list[Any]) -> Any:
        out = accelerator.verify(pair.target, ids, cache, rollback_point(cache, context))
        assert out is not None, accelerator.findings()
        return out

    def round_ms() -> float:
        return 1e3 * min(walk.timed(rows, kept, kept + 1)["whole"] for _ in range(repeats + 1))

    ways = {"mlx_lm": lambda cache: model(ids, cache=cache), "ordinary": ordinary, "traced": traced}
    with as_on_metal(lambda *_: None), _one_node_each(), mock.patch.object(CompiledPass, "_tried", _untried):
        found = {way: least_ms(build) for way, build in ways.items()} | {"round": round_ms()}
        pair.accelerator = pair.target.accelerator = accelerator
        found["traced_round"] = round_ms()
        drafts = accelerator.passes[1].passes
    return found | ({} if drafts else {"of these ordinary": "draft"})


def _untried(passes: CompiledPass, arrays: Any, filled: Any, cache: Any, place: Any, length: int, keeps: int, key: tuple) -> Any:
    """In the place of a trial, which would run the model: the traced pass."""
    passes._pass = passes._pass or passes._traced([])
    return passes._compiled(key, cache)


# Run with an older checkout's package and bench/: its round as `Walk.timed` makes ours, in thread CPU ms.
_BEFORE = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import ledger
from ledger_walk import _one_node_each, as_on_metal

walk, rows, times = ledger.walk(sys.argv[2], 1024), int(sys.argv[3]), []
for _ in range(25):
    began, arrays = [0.0], walk.inputs(rows // 2 + 1)

    def enter(stage):
        began[0] = time.thread_time() if stage == "draft" else began[0]

    with as_on_metal(lambda *_: None), _one_node_each():
        walk._round(arrays, rows, rows // 2, rows // 2 + 1, enter)
        times.append(time.thread_time() - began[0])
print(json.dumps({"before": 1e3 * min(times[1:])}))
"""


def beside(name: str, rows: int, laid: str, checkout: Path, turns: int) -> dict[str, Any]:
    """Medians of `built` and of an older state's round, each in `turns` processes of their own, by turns.

    laid: folder of that state's package (`peers.laid_out`); checkout: what it was made of. Ratios are of one turn.
    """
    # -P: the package comes from the given path, not from the working directory.
    sides = {
        "now": ([str(Path(__file__)), "--built", name, "--rows", str(rows), "--json"], {}),
        "before": (["-P", "-c", _BEFORE, str(checkout / "bench"), name, str(rows)], {"PYTHONPATH": laid}),
    }
    found = []
    for turn in range(turns):
        both: dict[str, Any] = {}
        for side in list(sides)[:: (-1) ** turn]:
            command, environ = sides[side]
            done = subprocess.run(
                [sys.executable, *command], env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True, check=True
            )
            both |= json.loads(done.stdout)
        found.append(both | {f"{way} over before": both[way] / both["before"] for way in ("round", "traced_round")})
    return (
        {"config": name, "rows": rows}
        | {way: statistics.median(one[way] for one in found) for way in found[0]}
        | {"turns": found}
    )


def print_built(args: argparse.Namespace) -> None:
    """What `--built` asks for; with `--out` into a record too, where it stands beside an older state."""
    rows = [(name, n) for name in args.built for n in args.rows]
    if args.before is None:
        for name, n in rows:
            found = built(name, n)
            if args.json:
                print(json.dumps(found))
                continue
            shown = {way: ms if isinstance(ms, str) else round(ms, 2) for way, ms in found.items()}
            print(name, shown, f"ms of thread CPU at {n} rows")
        return
    import peers

    record = {"what": "bench/host.py --built", "machine": bench.machine(), "versions": bench.versions(), "cells": []}
    with tempfile.TemporaryDirectory() as folder:
        laid = peers.laid_out(args.before, Path(folder) / "before")
        for name, n in rows:
            record["cells"].append(beside(name, n, laid, args.before, args.turns))
            shown = {way: round(v, 2) for way, v in record["cells"][-1].items() if isinstance(v, float)}
            print(name, f"{n} rows, medians of {args.turns} processes, ms of thread CPU:", shown, flush=True)
            if args.out:
                bench_record.write_record(record, args.out)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=DEFAULT_PAIR)
    p.add_argument("--draft-model")
    p.add_argument("--prompt", help="default: the built-in pair's")
    p.add_argument("--block-size", type=int)
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    p.add_argument("--dense", action="store_true", help="write quantized layers of both models out first")
    p.add_argument("--out", type=Path)
    p.add_argument("--built", nargs="+", metavar="CONFIG", help="of bench/ledger.py: only what a pass and a round cost to build")
    p.add_argument("--rows", nargs="+", type=int, default=[16], help="with --built: of the target's pass")
    p.add_argument("--before", type=Path, help="with --built: an older checkout of this project, timed by turns with this one")
    p.add_argument("--turns", type=int, default=3, help="with --before: processes of each")
    p.add_argument("--json", action="store_true", help="with --built: for programs")
    args = p.parse_args()
    if args.built:
        return print_built(args)
    model, tokenizer = load(args.model, dtype=args.dtype)
    dtype = activation_dtype(model)
    model = dense(model, dtype) if args.dense else model
    drafter = load_drafter(args.draft_model or args.model, model)
    drafter = dense(drafter, dtype) if args.dense else drafter
    text = args.prompt or (BUILTIN_PAIRS[args.model].prompt if args.model in BUILTIN_PAIRS else "Explain why the sky is blue.")
    prompt = bench.chat_ids(tokenizer, text, drafter)
    K = args.block_size or drafter.config.block_size
    result = measure(model, tokenizer, drafter, prompt, K, args.tokens, args.repeats)
    record = {"what": "bench/host.py", "model": args.model, "machine": bench.machine(), "versions": bench.versions()}
    record |= {"weights": bench.weights_of(model), "drafter_sha256": drafter.digest(), "result": result}
    ms = result["ms_a_round"]
    print(f"{args.model} ({record['weights']['dtype']}) on {record['machine']['chip']}, block {K}, {result['rounds']} rounds")
    print(f"loop {ms['loop']:.3f} ms a round; its passes {ms['passes_with_waits']:.3f} ms with one wait a round: ", end="")
    print(f"host share {100 * result['host_share']:.1f} %")
    print(f"passes without waits {ms['passes_without_waits']:.3f} ms: host and waits {100 * result['host_and_wait_share']:.1f} %")
    print(f"a cut adds {result['cut_ms']:.3f} ms")
    if args.out:
        bench_record.write_record(record, args.out)


if __name__ == "__main__":
    main()
