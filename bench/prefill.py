"""Seconds to the first token of a prompt that nobody has read yet: `dflash-mlx serve` beside `mlx_lm.server`.

    python bench/prefill.py --pair smollm2 --dense --folder DIR --out bench/results/prefill-smollm2.json
        [--lengths 1000 4000 8000] [--trials 5] [--sides mlx-lm ours ours-plain]

The target is written out once in the number type of this machine, so that both servers load the same numbers; --dense dequantizes
it. Sides: mlx-lm (`mlx_lm.server`), ours (`serve` with the pair's drafter, which reads the prompt too), ours-plain (without).
All servers stay loaded and answer in turn, one at a time, the order turned round after every trial; each prompt begins with a
number of its own, so that no cache holds it. A request asks for one token, and its time is from sending it to its last byte.
`ratio` is mlx-lm's median seconds over a side's: 1 is as fast, more is faster. `cpu_ratio` is the same of CPU seconds of the
server (Linux, on a CPU): other work on the machine changes them less.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mlx_lm.tokenizer_utils import load as load_tokenizer  # noqa: E402
from peers import machine_dtype, written_target  # noqa: E402

from dflash_mlx.pairs.builtin import builtin_path  # noqa: E402
from dflash_mlx.tools.place import machine, versions  # noqa: E402

SIDES = ("mlx-lm", "ours", "ours-plain")
WORDS = (
    "the sea takes back what every tide has left upon a beach where nobody had walked since winter came over these hills".split()
)


def command(side: str, target: str, drafter: str, port: int) -> list[str]:
    if side == "mlx-lm":
        return [sys.executable, "-m", "mlx_lm.server", "--model", target, "--port", str(port)]
    drafts = ["--draft-model", drafter] if side == "ours" else []
    started = [sys.executable, "-m", "dflash_mlx.cli.app", "serve", "--model", target, *drafts, "--port", str(port)]
    return [*started, "--dtype", machine_dtype()]


def free_port() -> int:
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        return link.getsockname()[1]


@contextmanager
def server(side: str, target: str, drafter: str, port: int, log: Path):
    """A server's process, once it answers."""
    with log.open("w") as file:
        process = subprocess.Popen(command(side, target, drafter, port), stdout=file, stderr=file)
        try:
            began = time.monotonic()
            while True:
                assert process.poll() is None and time.monotonic() - began < 600, log.read_text()
                try:
                    link = HTTPConnection("127.0.0.1", port, timeout=10)
                    link.request("GET", "/v1/models")
                    link.getresponse().read()
                    break
                except OSError:
                    time.sleep(0.2)
            yield process
        finally:
            process.terminate()
            process.wait(60)


def cpu_seconds(process: subprocess.Popen) -> float | None:
    stat = Path(f"/proc/{process.pid}/stat")
    if not stat.exists() or mx.default_device() != mx.cpu:
        return None
    return sum(int(ticks) for ticks in stat.read_text().rpartition(")")[2].split()[11:13]) / os.sysconf("SC_CLK_TCK")


def prompt_of(tokens: int, tokenizer, number: int) -> str:
    """A text of so many tokens that begins as no other does."""
    words = [f"{number}", *(WORDS[i * (number + 3) % len(WORDS)] for i in range(2 * tokens))]
    ids = tokenizer.encode(" ".join(words))[:tokens]
    return tokenizer.decode(ids, skip_special_tokens=True)


def ask(process: subprocess.Popen, port: int, target: str, prompt: str) -> dict:
    """Seconds of one request, and the tokens that the server counted."""
    body = json.dumps({"model": target, "prompt": prompt, "max_tokens": 1, "temperature": 0})
    link, cpu, began = HTTPConnection("127.0.0.1", port, timeout=3600), cpu_seconds(process), time.perf_counter()
    link.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = json.loads(link.getresponse().read())
    seconds, after = time.perf_counter() - began, cpu_seconds(process)
    link.close()
    assert "choices" in answer, answer
    return {
        "tokens": answer["usage"]["prompt_tokens"],
        "seconds": round(seconds, 4),
        "cpu_seconds": None if cpu is None else round(after - cpu, 2),
    }


def summarise(runs: list[dict]) -> list[dict]:
    """Medians by side and length, over mlx-lm's of the same length."""
    rows = []
    for length in sorted({run["length"] for run in runs}):
        of = {side: [run for run in runs if (run["side"], run["length"]) == (side, length)] for side in SIDES}
        base = of["mlx-lm"]
        for side in (side for side in SIDES if of[side]):
            row = {"side": side, "length": length, "trials": len(of[side])}
            for name, told in (("seconds", "ratio"), ("cpu_seconds", "cpu_ratio")):
                values = [run[name] for run in of[side] if run[name] is not None]
                row[name] = round(statistics.median(values), 4) if values else None
                row[told] = round(statistics.median(run[name] for run in base) / row[name], 3) if values and base else None
            row["tokens_per_second"] = round(of[side][0]["tokens"] / row["seconds"], 1)
            rows.append(row)
    return rows


def measure(given: argparse.Namespace) -> dict:
    given.folder.mkdir(parents=True, exist_ok=True)
    source = str(builtin_path(given.pair, "target") or given.pair)
    target = written_target(given.pair, source, given.folder, given.dense)
    tokenizer, runs, number = load_tokenizer(Path(target)), [], 0
    with ExitStack() as stack:
        servers = {}
        for side in given.sides:
            log, port = given.folder / f"{side}.log", free_port()
            servers[side] = stack.enter_context(server(side, target, given.draft_model or given.pair, port, log)), port
        for length in given.lengths:
            for trial in range(-1, given.trials):
                # The first one compiles kernels, of which long prompts have others, and is not counted.
                order = given.sides if trial % 2 else given.sides[::-1]
                number += 1
                prompt = prompt_of(length, tokenizer, number)
                for side in order:
                    run = ask(*servers[side], target, prompt)
                    print(side, length, trial, run, flush=True)
                    if trial >= 0:
                        runs.append({"side": side, "length": length, "trial": trial, **run})
    return {
        "what": "bench/prefill.py",
        "pair": given.pair,
        "dtype": machine_dtype(),
        "dense": given.dense,
        "machine": machine(),
        "versions": versions(),
        "summary": summarise(runs),
        "runs": runs,
    }


def report(record: dict, out: Path | None) -> None:
    """Print a record's summary and write it, a line for each of its parts."""
    for row in record["summary"]:
        print(row)
    if out:
        out.write_text(re.sub(r"\n {2,}", " ", json.dumps(record, indent=1)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--draft-model", help="another drafter than the pair's")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--folder", type=Path, required=True, help="where the target is written out, and logs")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 4000, 8000])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report(measure(given), given.out)


if __name__ == "__main__":
    main()
