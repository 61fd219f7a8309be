"""The built-in pair with our kernels and without, same ids? Each run is a process of its own: an error of the device ends one.

    python bench/kernels.py --generate 2000                          without, then with all kernels
    python bench/kernels.py --generate 2000 --only accept head_argmax         without, then with these, one run each
    python bench/kernels_generate.py MODE TOKENS ...                 one such run; MODE as DFLASH_MLX_KERNELS, "off" first

Runs at several numbers of rows a pass go side by side, so their seconds are not to be compared: 7, up to where stock MLX's CUDA
kernels for quantized products are ready-made, and 8, from where on it compiles others; then an eighth of the tokens at 8 with
cuDNN's attention, which MLX takes unless told otherwise and a loaded pair turns off. Kernels are forced without trials, so only
the variants that run are compiled. With all kernels passes are compiled, without them never: a launch is counted where it was
made, once for a trace, and `compiled` says how many compiled passes ran.

A run that dies is run again in three ways at once: with every operation evaluated as it comes, which names the one that dies;
without CUDA graphs; and with a core dump, in which the device's kernel is named. One with kernels also with each kernel alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx import load, load_drafter, stream_generate, traced
from dflash_mlx.kernels import autotune, names
from dflash_mlx.kernels.launch import Kernel
from dflash_mlx.kernels.routing import kernel_calls

ROWS = (7, 8)
LEAST_SECONDS = 15  # of a run: less is not enough to load and compile
CUDNN, GRAPHS, COMPILED = "MLX_CUDA_USE_CUDNN_SDPA", "MLX_USE_CUDA_GRAPHS", "MLX_PTX_CACHE_DIR"
CORE = ("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP", "CUDA_COREDUMP_SHOW_PROGRESS")
# No built-in pair has experts.
WITHOUT_WORK = ("block_gather_qmm",)
WAYS = ("traced", "without graphs", "core dump")
QUESTIONS = [
    "Write a story about a small boat.",
    "Explain why the sky is blue.",
    "List ten animals and what they eat.",
    "def fibonacci(n):",
    "The history of the bridge begins",
    "Once upon a time there was a girl who",
    "What is the sum of the first ten numbers?",
    "import os\n\ndef main():",
]


def alone_names() -> list[str]:
    """Kernels that a run which died is tried with one by one."""
    return [name for name in names(text=True) if name not in WITHOUT_WORK]


@dataclass(frozen=True)
class Job:
    """One run: MODE as DFLASH_MLX_KERNELS, rows of a pass, whose attention stock MLX uses, and how it is watched."""

    mode: str
    rows: int
    cudnn: bool = False
    way: str = ""

    @property
    def setting(self) -> str:
        return f"{self.rows} rows{', cuDNN' * self.cudnn}"

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.setting}{f', {self.way}' if self.way else ''}"

    def share(self, tokens: int) -> int:
        """How many of so many tokens this run writes."""
        return max(1, tokens // 8) if self.cudnn else tokens

    def environment(self, folder: Path) -> dict[str, str]:
        # block_linear stands in compiled passes alone; without kernels every operation is MLX's as mlx-lm has it.
        passes = "on" if self.mode in ("on", "block_linear") else "off"
        own = {autotune.VARIABLE: self.mode, traced.VARIABLE: passes, CUDNN: str(int(self.cudnn))}
        if self.way == "without graphs":
            own[GRAPHS] = "0"
        if self.way == "core dump":
            own |= {name: "1" for name in CORE} | {"CUDA_COREDUMP_FILE": str(folder / "generate.core")}
        return own

    def file(self, folder: Path) -> Path:
        return folder / f"{re.sub('[^a-z0-9]+', '-', self.name.lower())}.json"


def compare(
    tokens: int,
    only: Sequence[str],
    arguments: Sequence[str],
    seconds: float,
    save: Callable[[dict], None],
    rows: Sequence[int] = ROWS,
    total: float = 150,
) -> dict:
    """By the name of a job: what `generate` recorded, with `error` if its process died or was stopped.

    Args:
      only: kernels to run one by one; none: all at once.
      seconds: the limit of one process; `total`: of all, those that look for a culprit included.
      save: is given the runs so far after each.
    """
    runs: dict[str, dict] = {}
    end = time.monotonic() + total

    def together(jobs: Sequence[Job]) -> list[Job]:
        """Run side by side; those that ended well."""
        limit = min(seconds, end - time.monotonic())
        if limit < LEAST_SECONDS:
            runs.update({job.name: {"error": f"not run: the {total:.0f} s were over"} for job in jobs})
        else:
            with ThreadPoolExecutor(max(len(jobs), 1)) as pool:
                ended = pool.map(lambda job: _apart(job, job.share(tokens), arguments, limit, Path(folder)), jobs)
                for job, run in zip(jobs, ended, strict=True):
                    if job.mode != "off" and "error" not in run and not run["launches"]:
                        run["error"] = "no kernel ran: is there a GPU that MLX sees?"
                    runs[job.name] = run
                    print(f"{job.name}: {summary(run)}", flush=True)
        save({name: {k: v for k, v in r.items() if k != "answers"} for name, r in runs.items()})
        return [job for job in jobs if "error" not in runs[job.name]]

    with tempfile.TemporaryDirectory() as folder:
        every: list[Job] = []
        # With cuDNN last: it makes a plan for each new length, a tenth of a second each.
        for stock in ([Job("off", n) for n in rows], [Job("off", rows[-1], cudnn=True)] * mx.cuda.is_available()):
            # Where stock MLX dies, there is nothing to compare with.
            ours = [replace(job, mode=mode) for job in together(stock) for mode in only or ["on"]]
            together(ours)
            every += [*stock, *ours]
        dead = [job for job in every if runs[job.name].get("died")]
        # One of each mode: what is found out about it holds for the others or is asked in a run of its own.
        first = list({job.mode: job for job in reversed(dead)}.values())
        again = [replace(job, way=way) for job in first for way in WAYS]
        again += [replace(job, mode=name) for job in first if job.mode == "on" for name in alone_names()]
        if again:
            together(again)
            print(*(f"\n{job.name} died. {found(job, runs)}" for job in first), sep="", flush=True)
    return runs


def found(job: Job, runs: dict[str, dict]) -> str:
    """What the runs after a death say of its cause."""

    def ended(run: dict) -> str:
        return run.get("error", "did not die")

    traced, graphs, core = (runs[replace(job, way=way).name] for way in WAYS)
    alone = {name: runs[replace(job, mode=name).name] for name in alone_names()} if job.mode == "on" else {}
    lines = [
        f"operation by operation: {ended(traced)}; last: {(traced.get('last') or ['none'])[-1]}",
        f"without CUDA graphs: {ended(graphs)}",
        f"the device's kernels in the core dump: {', '.join(core.get('kernels', [])) or 'none: ' + ended(core)}",
        *(f"{name} alone: {ended(run)}" for name, run in alone.items()),
    ]
    return "\n  ".join(["It ended with: " + ended(runs[job.name]), *lines])


def summary(run: dict) -> str:
    """One line about a run."""
    launches = ", ".join(f"{name} {n}" for name, n in run.get("launches", {}).items()) or "none"
    counts = ", ".join(f"{run.get(name, 0)} {name}" for name in ("tokens", "ties", "faults"))
    passes = sum(r["passes"] for r in run.get("compiled", []))
    line = f"{counts} in {run.get('seconds', 0):.1f} s; {len(run.get('variants', []))} compiled; launches: {launches}"
    line += f"; {passes} passes compiled" if passes else ""
    return line + (f"; {run['error']}" if "error" in run else "")


def wrong(run: dict) -> bool:
    """Whether a run died, chose another token where there was no tie, or met more ties than 0.5 % of its tokens."""
    return "error" in run or run["faults"] > 0 or 200 * run["ties"] > run["tokens"]


def _apart(job: Job, tokens: int, arguments: Sequence[str], seconds: float, folder: Path) -> dict:
    """One run in a process of its own. `died`: by itself, not by the limit."""
    out, against = job.file(folder), replace(job, mode="off", way="").file(folder)
    options = ["--block-size", str(job.rows), "--out", str(out), *(["--against", str(against)] if job.mode != "off" else [])]
    command = [sys.executable, __file__, job.mode, str(tokens), *arguments, *options, *["--trace"] * (job.way == "traced")]
    (home := out.with_suffix("")).mkdir(exist_ok=True)
    # MLX writes what it compiles into files that another process may read half written: a folder each, joined afterwards.
    shared, own = Path(os.environ.get(COMPILED, folder / "compiled")), home / "compiled"
    _join(shared, own)
    ended = {}
    try:
        environment = {**os.environ, **job.environment(home), COMPILED: str(own)}
        done = subprocess.run(command, timeout=seconds, stderr=subprocess.PIPE, text=True, env=environment)
        _join(own, shared)
        if done.returncode:
            said = [line for line in done.stderr.strip().splitlines() if "Warning" not in line]
            ended = {"error": f"exit {done.returncode}: {' | '.join(said[-2:])}", "died": True}
    except subprocess.TimeoutExpired:
        ended = {"error": f"stopped after {seconds:.0f} s"}
    if (core := home / "generate.core").exists():
        # Names of functions, as the images of the modules that were running have them.
        ended["kernels"] = sorted({n.decode() for n in re.findall(rb"(?:_Z\w{12,}|custom_kernel_\w+)", core.read_bytes())})[:20]
    return (json.loads(out.read_text()) if out.exists() else {}) | ended


_joining = threading.Lock()


def _join(source: Path, into: Path) -> None:
    """Copy what a folder has into another."""
    with _joining:
        into.mkdir(parents=True, exist_ok=True)
        if source.exists():
            shutil.copytree(source, into, dirs_exist_ok=True)


def generate(
    mode: str,
    tokens: int,
    pair: str,
    bits: int,
    block: int,
    against: Path | None,
    out: Path,
    trace: bool = False,
    dtype: mx.Dtype = mx.float16,
    path: str | None = None,
) -> dict:
    """Answers until there are `tokens`, written to `out` after each; against those of `off`, where given, id by id.

    A difference is a tie only if the top-2 gap there is below twice the difference between the two passes; the comparison goes on
    behind it with the text of `off`. `path`: of the pair's target, where it is not where pairs are kept.
    """
    record: dict = {"tokens": 0, "seconds": 0.0, "ties": 0, "faults": 0, "differences": [], "launches": {}, "variants": []}
    record["answers"] = []

    def save() -> None:
        out.write_text(json.dumps(record))

    _force(record["launches"], record["variants"])
    model, tokenizer = load(path or pair, dtype=dtype)
    if not kernel_calls(model):
        nn.quantize(model, 32, bits)
    drafter = load_drafter(pair, model)
    record["drafter_sha256"] = drafter.digest()
    if trace:
        _trace(record, save)

    def answer(prompt: list[int], most: int) -> list[int]:
        # A fixed width, so that all modes pass over the same rows.
        options = {"draft_model": drafter, "block_size": block, "prefill_step_size": block, "max_tokens": most}
        return [r.token for r in stream_generate(model, tokenizer, prompt, **options)]

    right = json.loads(against.read_text())["answers"] if against else None
    for i, question in enumerate(QUESTIONS if right is None else QUESTIONS[: len(right)]):
        prompt, begin = tokenizer.encode(question), time.perf_counter()
        if tokenizer.has_chat_template:
            prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        if right is None:
            said = answer(prompt, min(tokens // 4, tokens - record["tokens"]))
            record["answers"].append(said)
        else:
            said, done = right[i], 0
            while done < len(said):
                ours = answer([*prompt, *said[:done]], len(said) - done)
                done += next((n for n, (a, b) in enumerate(zip_longest(said[done:], ours)) if a != b), len(said) - done)
                if done < len(said):
                    gap, apart = last_row(model, [*prompt, *said[:done]], mode, block)
                    tie = gap < 2 * apart
                    record["ties" if tie else "faults"] += 1
                    record["differences"].append({"answer": i, "token": done, "gap": gap, "apart": apart, "tie": tie})
                    print(f"answer {i} token {done}: top-2 gap {gap:.4g}, passes {apart:.4g} apart: {'tie' if tie else 'NO TIE'}")
                    done += 1
        record["tokens"], record["seconds"] = record["tokens"] + len(said), record["seconds"] + time.perf_counter() - begin
        record["compiled"] = drafter.pair.accelerator.findings() if drafter.pair and drafter.pair.accelerator else []
        save()
        if record["tokens"] >= tokens:
            break
    return record


def last_row(model, text: list[int], mode: str, step: int) -> tuple[float, float]:
    """Of the row after `text`: the top-2 gap, and the largest difference of a logit with kernels and without, from one cache."""
    from mlx_lm.models.cache import make_prompt_cache

    from dflash_mlx.models.target import Target

    cache, target, rows = make_prompt_cache(model), Target(model), []
    for i in range(0, len(text) - 1, step):
        model(mx.array([text[i : min(i + step, len(text) - 1)]]), cache=cache)
    for way in ("off", mode):
        os.environ[autotune.VARIABLE] = way
        hidden = target(mx.array([text[-1:]]), copy.deepcopy(cache), kernels=True).hidden
        rows.append(target.head(hidden)[0, -1].astype(mx.float32))
        mx.eval(rows[-1])
    two = mx.topk(rows[0], 2)
    return float(mx.abs(two[0] - two[1])), float(mx.max(mx.abs(rows[0] - rows[1])))


def _force(launches: dict[str, int], variants: list[str]) -> None:
    """No trials: what may run does, the text for matrix units before the other. Count launches, note what is compiled."""

    def forced(question: autotune.Question, rows: int) -> autotune.Candidate | None:
        # Neither read from the cache directory nor kept there.
        may = [candidate for candidate in question.candidates if autotune.allowed(candidate.kernel)]
        return max(may, key=lambda candidate: "tiles" in candidate.kernel.name, default=None)

    autotune.choose = forced
    prepared = Kernel.prepared

    def counted(kernel: Kernel, **given):
        launch = prepared(kernel, **given)
        variant = " ".join([kernel.name, *(f"{name} {value}" for name, value in given["template"])])

        def run(**options):
            launches[kernel.name] = launches.get(kernel.name, 0) + 1
            if variant not in variants:
                variants.append(variant)
            return launch(**options)

        return run

    Kernel.prepared = counted


def _trace(record: dict, save: Callable[[], None]) -> None:
    """Evaluate every operation of a pass as it comes; `record["last"]` names the latest ones, before each and when it is done.

    What has no name of its own here is evaluated as the input of the next one.
    """
    from mlx_lm.models.cache import KVCache

    def noting(what: str, inner: Callable) -> Callable:
        def call(*given, **options):
            given_all = (*given, *options.values())
            arrays = [a for g in given_all for a in (g if isinstance(g, list | tuple) else [g]) if isinstance(a, mx.array)]
            mx.eval(arrays)
            record["last"] = [*record.get("last", [])[-3:], f"{what} {[f'{a.dtype} {a.shape}' for a in arrays]}"]
            save()
            result = inner(*given, **options)
            mx.eval(result)
            mx.synchronize()
            record["last"][-1] += ": done"
            save()
            return result

        return call

    def noted(owner, name: str) -> None:
        setattr(owner, name, noting(f"{owner.__name__}.{name}", getattr(owner, name)))

    prepared = Kernel.prepared
    Kernel.prepared = lambda kernel, **given: noting(kernel.name, prepared(kernel, **given))
    for owner in (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding, nn.RMSNorm, nn.RoPE):
        noted(owner, "__call__")
    noted(nn.QuantizedEmbedding, "as_linear")
    noted(KVCache, "update_and_fetch")
    noted(mx.fast, "scaled_dot_product_attention")
    for name in ("concatenate", "argmax", "logsumexp"):
        noted(mx, name)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("mode")
    p.add_argument("tokens", type=int)
    p.add_argument("--pair", default="tiny")
    p.add_argument("--model", help="path of the pair's target, where there is no network to fetch it")
    p.add_argument("--bits", type=int, default=4)
    p.add_argument("--block-size", type=int, default=ROWS[0])
    p.add_argument("--against", type=Path, help="the record of the run with kernels off")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--trace", action="store_true", help="evaluate each operation as it comes and record the last ones")
    args = p.parse_args()
    os.environ[autotune.VARIABLE] = args.mode
    options = {"trace": args.trace, "path": args.model}
    generate(args.mode, args.tokens, args.pair, args.bits, args.block_size, args.against, args.out, **options)


if __name__ == "__main__":
    main()
