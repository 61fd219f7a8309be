"""`train data` in one process beside several at once, by turns in one run: how many tokens a second each way writes.

    python bench/train_data.py --model smollm2 --dense --out record.json [--rows 2048] [--processes 4] [--rows-each 832]
        [--seconds 20] [--turns 3]

All processes load the target and write one part each first, which also makes their held-out text; then the one and the several
take turns, the order turned round each time, while the others wait. A process that waits goes on where it was: no turn pays for
a start or an end, and turns of one process hold different parts of a shard, so rates are means over all turns. Under CUDA start
NVIDIA's MPS before (`nvidia-cuda-mps-control -d`), or the several take turns on the device too.

Tokens are those of answers, as written, before the filter. `cpu`: CPU seconds a second of a process, of all its threads; `main`:
of the one that launches kernels. A process whose main thread is busy all the time is bound by the host.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any


class Turns:
    """Listens to the progress of writing, and holds it up between the turns: a turn begins when a line of seconds comes in, and
    ends with a line of JSON at the first progress after them."""

    def __init__(self):
        self.until: float | None = None

    def __call__(self, what: str, done: float | None, total: float | None, unit: str) -> None:
        if what != "Writing text":
            return
        if self.until is not None:
            if time.monotonic() < self.until:
                return
            took, cpu, main = (now - then for now, then in zip(self.clocks(), self.begun, strict=True))
            shares = {"cpu": round(cpu / took, 3), "main": round(main / took, 3)}
            print(json.dumps({"tokens_per_s": (done - self.done) / took, "seconds": took} | shares), flush=True)
        self.until = float(sys.stdin.readline() or sys.exit())
        self.begun, self.done = self.clocks(), done
        self.until += self.begun[0]

    @staticmethod
    def clocks() -> tuple[float, float, float]:
        return time.monotonic(), time.process_time(), time.thread_time()


def work(args: argparse.Namespace) -> None:
    """One process: writes by turns until nobody asks any more."""
    import mlx.core as mx

    from dflash_mlx import load
    from dflash_mlx.progress import listening
    from dflash_mlx.train.data import DataConfig, make_data
    from dflash_mlx.train.start import dense

    model, tokenizer = load(args.model)
    if args.dense:
        model = dense(model, mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16)
    config = DataConfig(rows=args.rows, max_len=args.max_len, held_out_per_kind=1, seed=args.seed)
    # As many shards as come before the held-out text: none of it falls into a turn.
    make_data(model, tokenizer, args.out, config, answer_tokens=1)
    print(json.dumps({"memory_gb": mx.get_peak_memory() / 1e9}), flush=True)
    with listening(Turns()):
        make_data(model, tokenizer, args.out, config, answer_tokens=10**12)


def start(args: argparse.Namespace, folder: Path, rows: int, seed: int) -> subprocess.Popen:
    options = {"model": args.model, "rows": rows, "max-len": args.max_len, "seed": seed, "out": folder / str(seed)}
    line = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    line += ["--dense"] * args.dense
    return subprocess.Popen(
        [sys.executable, __file__, "--worker", *line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def answer(worker: subprocess.Popen) -> dict[str, float]:
    """A worker's next line."""
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"Error: a process that writes ended with {worker.wait()}; its message is above")
    return json.loads(line)


def turn(workers: list[subprocess.Popen], seconds: float) -> dict[str, Any]:
    """All of these at once for so long."""
    for worker in workers:
        worker.stdin.write(f"{seconds}\n")
        worker.stdin.flush()
    found = [answer(worker) for worker in workers]
    total = sum(one["tokens_per_s"] for one in found)
    return {"processes": len(workers), "tokens_per_s": round(total, 1), "by_process": found}


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of both ways over all turns, and the one over the several; turn by turn too."""
    one, several = ([t["tokens_per_s"] for t in turns if (t["processes"] == 1) is alone] for alone in (True, False))
    rates = {"one": round(mean(one), 1), "several": round(mean(several), 1), "over": round(mean(one) / mean(several), 3)}
    return rates | {"by_turn": [round(a / b, 3) for a, b in zip(one, several, strict=True)]}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--rows", type=int, default=2048)
    p.add_argument("--processes", type=int, default=4)
    p.add_argument("--rows-each", type=int, default=832)
    p.add_argument("--max-len", type=int, default=512)
    p.add_argument("--seconds", type=float, default=20)
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--dense", action="store_true", help="write quantized layers out first")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        return work(args)
    if args.processes < 2:
        p.error("--processes is less than 2; one is what they are compared with")
    from dflash_mlx.tools.place import machine, versions

    with tempfile.TemporaryDirectory() as folder:
        sizes = [args.rows, *[args.rows_each] * args.processes]
        workers = [start(args, Path(folder), rows, seed) for seed, rows in enumerate(sizes)]
        try:
            memory = [answer(worker)["memory_gb"] for worker in workers]
            sides, turns = [workers[:1], workers[1:]], []
            for i in range(args.turns):
                for side in sides[:: -1 if i % 2 else 1]:
                    turns.append(turn(side, args.seconds))
                    print(json.dumps(turns[-1]), flush=True)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "worker", "seed")}
    record = {"what": "bench/train_data.py", "machine": machine(), "versions": versions(), "settings": settings}
    record |= {"memory_gb": [round(value, 2) for value in memory], "summary": summary(turns), "turns": turns}
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["summary"]))


if __name__ == "__main__":
    main()
