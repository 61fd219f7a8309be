"""Gated delta layers on this GPU: is the kernel right, and what do passes and rollbacks cost with it and without?

    python bench/recurrence.py --shape qwen3.5-4b --layers 8 --max-seconds 50

The first layers of a published shape (`bench/shapes.py`), random weights, bfloat16. First the kernel against mlx-lm's own steps
at that shape; then passes of 1, 4, 8 and 16 rows by turns, medians. Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from shapes import SHAPES

from dflash_mlx.kernels import gated_delta
from dflash_mlx.kernels.verdicts import Candidate
from dflash_mlx.models.target import Target
from dflash_mlx.rollback import rollback, rollback_point
from dflash_mlx.verify import verify_block

CONTEXT, ROWS = 64, (1, 4, 8, 16)


def check(shape: dict) -> None:
    """The kernel's values at this shape, all row counts, in the three types; raises where one is wrong."""
    text = shape["text_config"]
    hk, hv, dk, dv = (text[f"linear_{k}"] for k in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        about = ((1, 16, hk, dk), (1, 16, hv, dv), False, dtype, mx.float32, dtype, mx.float32)
        made = gated_delta.trials(*about, (Candidate(gated_delta.KERNEL),))
        for rows in (1, 5, 16):
            trial = made(rows)
            if fault := trial.same(trial.ours[0](trial.x), trial.stock(trial.x)):
                raise SystemExit(f"{dtype}, {rows} rows: {fault}")
    print("values are mlx-lm's in float32, float16 and bfloat16", flush=True)


def milliseconds(run: Callable[[], None], times: list[float]) -> None:
    begun = time.perf_counter()
    run()
    times.append(1e3 * (time.perf_counter() - begun))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", default="qwen3.5-4b", choices=[name for name in SHAPES if name.startswith("qwen3.5")])
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--max-seconds", type=float, default=50)
    args = p.parse_args()
    begun, config = time.perf_counter(), SHAPES[args.shape][0]
    config["text_config"] |= {"num_hidden_layers": args.layers, "vocab_size": 4096}
    check(config)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    model.eval()
    mx.eval(model.parameters())
    ids = mx.arange(1, CONTEXT + 1)[None] * 37 % 4096
    targets = {"kernel": Target(model, (0,)), "mlx-lm": Target(model, (0,))}
    caches = {name: make_prompt_cache(model) for name in targets}
    for name, target in targets.items():
        mx.eval(target(ids, caches[name]).hidden, [entry.state for entry in caches[name]])
    times: dict[str, list[float]] = {}

    def one(name: str, rows: int, part: str) -> None:
        os.environ["DFLASH_MLX_KERNELS"] = "gated_delta" if name == "kernel" else "off"
        cache, target = caches[name], targets[name]
        point = rollback_point(cache, CONTEXT)

        def verify() -> None:
            mx.eval(verify_block(target, ids[0, :1], ids[:, 1:rows], cache, point).hidden, [entry.state for entry in cache])

        def undo() -> None:
            rollback(cache, point, CONTEXT + (rows // 2 if rows > 1 and part == "timed" else 0))
            mx.eval([entry.state for entry in cache])

        milliseconds(verify, times.setdefault(f"{name}, {rows} rows", []))
        if rows > 1:
            milliseconds(undo, times.setdefault(f"{name}, rollback of {rows}", []))
        rollback(cache, point, CONTEXT)
        mx.eval([entry.state for entry in cache])

    for part in ("compiles", "timed"):
        if part == "timed":
            times.clear()
        for _ in range(1 if part == "compiles" else 15):
            for rows in ROWS:
                for name in targets:
                    if time.perf_counter() - begun < args.max_seconds:
                        one(name, rows, part)
        print(f"{part}: {time.perf_counter() - begun:.0f} s", flush=True)
    medians = {what: statistics.median(took) for what, took in times.items()}
    for what, took in medians.items():
        print(f"{what:28} {took:8.2f} ms")
    ratio = medians["kernel, 16 rows"] / medians["mlx-lm, 1 rows"]
    print(f"16 rows with the kernel cost {ratio:.2f} of one row of mlx-lm's")
    print(json.dumps({"shape": args.shape, "layers": args.layers, "device": mx.device_info(), "ms": medians, "ratio": ratio}))


if __name__ == "__main__":
    main()
