"""The built-in pair with our kernels and without, same ids? Each run is a process of its own: an error of the device ends one.

    python bench/kernels.py --generate 2000                          without, then with all kernels; each alone if that run died
    python bench/kernels.py --generate 2000 --only accept head_argmax         without, then with these, one run each
    python bench/kernels_generate.py MODE TOKENS ...                 one such run; MODE as DFLASH_MLX_KERNELS, "off" first

A run that dies is run again with every operation evaluated as it comes: the record then says at which one. Kernels are forced
without trials. Blocks and prefill steps have 7 rows: stock MLX's CUDA kernels for quantized products are ready-made up to there,
and compiled for minutes from 8 on. With `--block-size 8` both texts and stock's other kernels are met too.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx import load, load_drafter, stream_generate
from dflash_mlx.kernels import choice
from dflash_mlx.kernels.kernel import Kernel
from dflash_mlx.kernels.layers import kernel_calls

ROWS = 7
TRACE_SECONDS = 60
ALONE = ("block_qmm_tiles", "block_qmm", "head_argmax", "accept")
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


def compare(tokens: int, only: Sequence[str], arguments: Sequence[str], seconds: float, save: Callable[[dict], None]) -> dict:
    """By mode: what `generate` recorded; if its process died, `error`, and `traced`: how a traced run ended, and where.

    Args:
      only: kernels to run one by one; none: all at once, and one by one if that run died.
      save: is given the runs so far after each.
    """
    runs: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        waiting = ["off", *(only or ["on"])]
        while waiting and "error" not in runs.get("off", {}):  # where stock MLX dies, there is nothing to compare with
            mode = waiting.pop(0)
            runs[mode] = run = _apart(mode, tokens, arguments, seconds, Path(folder))
            if mode != "off" and "error" not in run and not run["launches"]:
                run |= {"error": "no kernel ran: is there a GPU that MLX sees?", "traced": None}
            elif "error" in run:
                traced = _apart(mode, tokens, [*arguments, "--trace"], TRACE_SECONDS, Path(folder))
                run["traced"] = {"error": traced.get("error"), "last": traced.get("last")}
                waiting += ALONE if mode == "on" else []
            save({name: {k: v for k, v in r.items() if k != "answers"} for name, r in runs.items()})
            print(f"{mode}: {summary(run)}", flush=True)
    return runs


def summary(run: dict) -> str:
    """One line about a run."""
    launches = ", ".join(f"{name} {n}" for name, n in run.get("launches", {}).items()) or "none"
    counts = ", ".join(f"{run.get(name, 0)} {name}" for name in ("tokens", "ties", "faults"))
    line = f"{counts} in {run.get('seconds', 0):.1f} s; launches: {launches}"
    return line + (f"; {run['error']}; traced: {run['traced']}" if "error" in run else "")


def wrong(run: dict) -> bool:
    """Whether a run died, chose another token where there was no tie, or met more ties than 0.5 % of its tokens."""
    return "error" in run or run["faults"] > 0 or 200 * run["ties"] > run["tokens"]


def _apart(mode: str, tokens: int, arguments: Sequence[str], seconds: float, folder: Path) -> dict:
    """One run in a process and with a cache directory of its own."""
    out = folder / f"{mode}{'-traced' if '--trace' in arguments else ''}.json"
    command = [sys.executable, __file__, mode, str(tokens), *arguments, "--out", str(out), "--against", str(folder / "off.json")]
    environment = {**os.environ, choice.VARIABLE: mode, "DFLASH_MLX_CACHE": str(folder)}
    try:
        done = subprocess.run(command, timeout=seconds, stderr=subprocess.PIPE, text=True, env=environment)
        error = f"exit {done.returncode}: {' | '.join(done.stderr.strip().splitlines()[-2:])}" if done.returncode else None
    except subprocess.TimeoutExpired:
        error = f"stopped after {seconds:.0f} s"
    run = json.loads(out.read_text()) if out.exists() else {}
    return run | ({"error": error} if error else {})


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
) -> dict:
    """Answers until there are `tokens`, written to `out` after each; against those of `off`, where given, id by id.

    A difference is a tie only if the top-2 gap there is below twice the difference between the two passes; the comparison goes on
    behind it with the text of `off`.
    """
    record: dict = {"tokens": 0, "seconds": 0.0, "ties": 0, "faults": 0, "differences": [], "launches": {}, "answers": []}

    def save() -> None:
        out.write_text(json.dumps(record))

    _force(record["launches"])
    model, tokenizer = load(pair, dtype=dtype)
    if not kernel_calls(model):
        nn.quantize(model, 32, bits)
    drafter = load_drafter(pair, model)
    if trace:
        _trace(record, save)

    def answer(prompt: list[int], most: int) -> list[int]:
        # A fixed width, so that all modes pass over the same rows.
        options = {"draft_model": drafter, "block_size": block, "prefill_step_size": ROWS, "max_tokens": most}
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
                    gap, apart = last_row(model, [*prompt, *said[:done]], mode)
                    tie = gap < 2 * apart
                    record["ties" if tie else "faults"] += 1
                    record["differences"].append({"answer": i, "token": done, "gap": gap, "apart": apart, "tie": tie})
                    print(f"answer {i} token {done}: top-2 gap {gap:.4g}, passes {apart:.4g} apart: {'tie' if tie else 'NO TIE'}")
                    done += 1
        record["tokens"], record["seconds"] = record["tokens"] + len(said), record["seconds"] + time.perf_counter() - begin
        save()
        if record["tokens"] >= tokens:
            break
    return record


def last_row(model, text: list[int], mode: str) -> tuple[float, float]:
    """Of the row after `text`: the top-2 gap, and the largest difference of a logit with kernels and without, from one cache."""
    from mlx_lm.models.cache import make_prompt_cache

    from dflash_mlx.taps import Target

    cache, target, rows = make_prompt_cache(model), Target(model), []
    for i in range(0, len(text) - 1, ROWS):
        model(mx.array([text[i : min(i + ROWS, len(text) - 1)]]), cache=cache)
    for way in ("off", mode):
        os.environ[choice.VARIABLE] = way
        hidden, _ = target(mx.array([text[-1:]]), copy.deepcopy(cache), kernels=True)
        rows.append(target.head(hidden)[0, -1].astype(mx.float32))
        mx.eval(rows[-1])
    two = mx.topk(rows[0], 2)
    return float(mx.abs(two[0] - two[1])), float(mx.max(mx.abs(rows[0] - rows[1])))


def _force(launches: dict[str, int]) -> None:
    """No trials: what may run does, the text for matrix units before the other. Count launches by kernel."""
    # The cache directory is this run's own, so nobody finds these verdicts.
    choice._judge = lambda name, shape, trial: choice.Verdict(name, shape, True, "forced", 1.0 if "tiles" in name else 2.0, 3.0)
    launch = Kernel.__call__

    def counted(kernel: Kernel, *given, **options):
        launches[kernel.name] = launches.get(kernel.name, 0) + 1
        return launch(kernel, *given, **options)

    Kernel.__call__ = counted


def _trace(record: dict, save: Callable[[], None]) -> None:
    """Evaluate every operation of a pass as it comes; `record["last"]` names the latest ones and is saved before each."""
    from mlx_lm.models.cache import KVCache

    def noted(owner, name: str) -> None:
        inner = getattr(owner, name)

        def call(*given, **options):
            arrays = [a for g in given for a in (g if isinstance(g, list | tuple) else [g]) if isinstance(a, mx.array)]
            mx.eval(arrays)
            what = given[0].name if owner is Kernel else f"{owner.__name__}.{name}"
            record["last"] = [*record.get("last", [])[-3:], f"{what} {[f'{a.dtype} {a.shape}' for a in arrays]}"]
            save()
            result = inner(*given, **options)
            mx.eval(result)
            mx.synchronize()
            return result

        setattr(owner, name, call)

    for owner in (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding, nn.RMSNorm, nn.RoPE, Kernel):
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
    p.add_argument("--bits", type=int, default=4)
    p.add_argument("--block-size", type=int, default=ROWS)
    p.add_argument("--against", type=Path, required=True, help="the record of the run with kernels off; not read by that run")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--trace", action="store_true", help="evaluate each operation as it comes and record the last ones")
    args = p.parse_args()
    os.environ[choice.VARIABLE] = args.mode
    against = None if args.mode == "off" else args.against
    generate(args.mode, args.tokens, args.pair, args.bits, args.block_size, against, args.out, args.trace)


if __name__ == "__main__":
    main()
