"""Several clients at once: `dflash-mlx serve` beside `mlx_lm.server`, the same eight prompts, by turns.

    python bench/clients.py --pair tiny --folder DIR --out bench/results/clients-tiny.json
        [--clients 1 4 8] [--max-tokens 128] [--trials 5]

Both servers stay loaded and answer in turn, the order turned round after every trial. In a trial so many clients send prompts,
each the next one when it has its answer; a prompt begins with a number of its own, so that no cache holds it. Greedy, streamed by
`/v1/completions`. For each number of clients: tokens/s of all together, and the latest first token, medians; `over` is the median
ratio to mlx-lm's of the same trial. `cpu_over` is that of tokens by CPU second (Linux, on a CPU): other work changes it less.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from http.client import HTTPConnection
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers import machine_dtype, written_target  # noqa: E402
from prefill import cpu_seconds, report, server  # noqa: E402

from dflash_mlx.pairs.builtin import builtin_path  # noqa: E402
from dflash_mlx.tools.place import machine  # noqa: E402

SIDES, PROMPTS = ("mlx-lm", "ours"), 8
FIGURES = {"tokens_per_second": "over", "tokens_per_cpu_second": "cpu_over", "latest_first_s": "first_over"}


def answer(port: int, target: str, prompt: str, max_tokens: int) -> tuple[int, float]:
    """Tokens of one streamed answer, and seconds to its first one."""
    body = {"model": target, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body = json.dumps(body | {"stream_options": {"include_usage": True}})
    link, began, first, tokens = HTTPConnection("127.0.0.1", port, timeout=600), time.perf_counter(), None, 0
    link.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    for line in link.getresponse():
        if not line.startswith(b"data: {"):
            continue
        told = json.loads(line[6:])
        assert "error" not in told, told
        if any(choice.get("text") for choice in told["choices"]):
            first = first or time.perf_counter() - began
        tokens = (told.get("usage") or {}).get("completion_tokens", tokens)
    link.close()
    return tokens, first or time.perf_counter() - began


def trial(process, port: int, target: str, prompts: list[str], clients: int, max_tokens: int) -> dict:
    """All prompts by so many clients at once."""
    left, answers = queue.SimpleQueue(), []
    for prompt in prompts:
        left.put(prompt)

    def client() -> None:
        while True:
            try:
                answers.append(answer(port, target, left.get_nowait(), max_tokens))
            except queue.Empty:
                return

    threads = [threading.Thread(target=client) for _ in range(clients)]
    cpu, began = cpu_seconds(process), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, after = time.perf_counter() - began, cpu_seconds(process)
    assert len(answers) == len(prompts), answers
    tokens = sum(n for n, _ in answers)
    latest = round(max(s for _, s in answers), 4)
    rate = {"tokens": tokens, "tokens_per_second": round(tokens / seconds, 1), "latest_first_s": latest}
    return rate | {"tokens_per_cpu_second": None if cpu is None else round(tokens / max(after - cpu, 0.01), 1)}


def summarise(runs: list[dict]) -> list[dict]:
    rows = []
    for clients in sorted({run["clients"] for run in runs}):
        ours, theirs = ([run for run in runs if (run["side"], run["clients"]) == (side, clients)] for side in SIDES[::-1])
        row = {"clients": clients, "trials": len(ours)}
        for name, told in (
            ("tokens_per_second", "over"),
            ("tokens_per_cpu_second", "cpu_over"),
            ("latest_first_s", "first_over"),
        ):
            if ours[0][name] is None:
                continue
            row[name] = {"ours": statistics.median(r[name] for r in ours), "mlx-lm": statistics.median(r[name] for r in theirs)}
            row[told] = round(statistics.median(a[name] / b[name] for a, b in zip(ours, theirs, strict=True)), 3)
        rows.append(row)
    return rows


def measure(given: argparse.Namespace) -> dict:
    given.folder.mkdir(parents=True, exist_ok=True)
    source = str(builtin_path(given.pair, "target") or given.pair)
    target = written_target(given.pair, source, given.folder, False)
    lines = (Path(__file__).parent / "prompts" / f"{given.pair}.jsonl").read_text().splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[:PROMPTS]]
    runs, number = [], 0
    with ExitStack() as stack:
        servers = {}
        for place, side in enumerate(SIDES):
            log, port = given.folder / f"{side}.log", given.port + place
            servers[side] = stack.enter_context(server(side, target, given.pair, port, log)), port
        for n in range(-1, given.trials):
            # The first one compiles and measures, and is not counted.
            for clients in given.clients:
                number += 1
                prompts = [f"# {number} {i}\n{text}" for i, text in enumerate(texts)]
                for side in SIDES if n % 2 else SIDES[::-1]:
                    run = trial(*servers[side], target, prompts, clients, given.max_tokens)
                    print(side, clients, n, run, flush=True)
                    if n >= 0:
                        runs.append({"side": side, "clients": clients, "trial": n, **run})
    versions = {name: metadata.version(name) for name in ("mlx", "mlx-lm", "dflash-mlx")}
    about = {"what": "bench/clients.py", "pair": given.pair, "dtype": machine_dtype(), "machine": machine(), "versions": versions}
    return about | {"max_tokens": given.max_tokens, "summary": summarise(runs), "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", default="tiny")
    parser.add_argument("--folder", type=Path, required=True, help="where the target is written out, and logs")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--port", type=int, default=8480)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report(measure(given), given.out)


if __name__ == "__main__":
    main()
