"""Every kernel on this machine's GPU: is it right, do its rows agree bit for bit, how long does it take beside stock MLX.

    python bench/kernels.py                          all kernels; a table and bench/results/kernels-DEVICE.json
    python bench/kernels.py --quick                  the largest shapes, rows 1, 4 and 16, most telling first: at most 120 s
    python bench/kernels.py --only block_qmm_tiles --columns 16 32 64
    python bench/kernels.py --generate 2000          the built-in pair with kernels and without: kernels_generate.py

Runs on Apple GPUs (Metal) and NVIDIA GPUs (CUDA). What is checked and timed, and how: `dflash_mlx/tools/kernel_run.py`, which
`dflash-mlx doctor --report` runs too. Each kernel runs in a process of its own with a limit (--seconds): one that does not
compile, faults or hangs costs the others nothing, and what it had measured is kept. A launch costs the host some microseconds:
where a line is near its kernel's smallest time, that is what was timed, and the largest shape (the head) tells of the kernel.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from dflash_mlx.kernels import names
from dflash_mlx.tools.bench_record import write_record
from dflash_mlx.tools.kernel_run import ROWS, Bench

RESULTS = Path(__file__).parent / "results"
TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def sixteen_over_one(entries: list[dict]) -> None:
    """The number that drafting lives on: what 16 rows cost, in rows."""
    print("\ntime of 16 rows over 1 row; last: our 16 rows over stock's 1 row")
    by = {(e["kernel"], f"{e['what']} {e['plan']}", e["rows"]): e for e in entries if "kernel_us" in e and "stock_us" in e}
    for (kernel, what, rows), e in by.items():
        if rows == 16 and (one := by.get((kernel, what, 1))):
            ours, stock = e["kernel_us"] / one["kernel_us"], e["stock_us"] / one["stock_us"]
            print(f"{kernel:17} {what:50} kernel {ours:5.2f}   stock {stock:5.2f}   {e['kernel_us'] / one['stock_us']:5.2f}")


def fault(entry: dict) -> bool:
    return bool(entry["refused"] or entry["wrong"] or entry["rows_bit_equal"] is False)


def apart(names: Sequence[str], arguments: list[str], seconds: float, total: float) -> tuple[list[dict], dict[str, str]]:
    """Run each kernel in a process of its own, one after the other: all their entries, and by name what went wrong.

    Args:
      seconds: the limit of one; `total`: of all: a process may use one and a half times its share of what is left.
    """
    entries, errors = [], {}
    end = time.monotonic() + total
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(names):
            left = max(end - time.monotonic(), 0)
            limit = min(seconds, left, 1.5 * left / (len(names) - i))
            out = Path(folder) / f"{name}.json"
            command = [sys.executable, __file__, *arguments, "--only", name, "--out", str(out)]
            begin = time.perf_counter()
            try:
                code = subprocess.run(command, timeout=limit).returncode
            except subprocess.TimeoutExpired:
                code = f"stopped after {limit:.0f} s"
            part = json.loads(out.read_text()) if out.exists() else {"entries": [], "errors": {}}
            entries += part["entries"]
            errors |= part["errors"]
            if code and not part["errors"] and not any(map(fault, part["entries"])):
                errors[name] = f"its process ended with {code}"
            print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return entries, errors


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="+", choices=names(text=True))
    p.add_argument("--quick", action="store_true", help="rows 1, 4 and 16, and the largest shapes")
    p.add_argument("--seconds", type=float, default=300, help="limit of one process")
    p.add_argument("--total", type=float, help="limit of all; default 120 for --quick, 150 for --generate, else none")
    p.add_argument("--dtype", choices=TYPES, default="bfloat16")
    p.add_argument("--shapes", nargs="+", choices=("8B", "27B"), default=["8B"], help="of models of this size")
    p.add_argument(
        "--columns", type=int, nargs="+", default=[None], help="of a simd group in block_qmm, of a threadgroup in block_qmm_tiles"
    )
    p.add_argument("--generate", type=int, metavar="TOKENS", help="compare generation with kernels on and off instead")
    p.add_argument("--pair", default="tiny")
    p.add_argument("--model", help="path of the pair's target for --generate, where there is no network to fetch it")
    p.add_argument("--bits", type=int, default=4, help="quantize the pair's target for --generate")
    p.add_argument("--block-size", type=int, nargs="+", help="of --generate, one run each; default 7 and 8")
    p.add_argument("--out", type=Path, help="JSON record; default bench/results/kernels-DEVICE.json")
    return p


def main() -> None:
    p = parser()
    args = p.parse_args()
    chosen, args.only = args.only or [], args.only or names(text=True)
    if args.dtype == "float32":
        # Matrix units multiply 16-bit numbers.
        args.only = [name for name in args.only if name not in ("block_qmm_tiles", "block_linear")]
    if not (mx.metal.is_available() or mx.cuda.is_available()):
        p.exit(1, "Error: MLX finds no GPU here. Install its CUDA build, or run on a Mac.\n")
    device = mx.device_info(mx.Device(mx.gpu)).get("device_name", "gpu").replace(" ", "-")
    out = args.out or RESULTS / f"kernels-{device}{'-generate' if args.generate else ''}.json"
    record = {
        "device": device,
        "mlx": mx.__version__,
        "date": str(datetime.date.today()),
        "dtype": "float16" if args.generate else args.dtype,
    }
    record |= {"generate": None} if args.generate else {"entries": [], "errors": {}}
    out.parent.mkdir(parents=True, exist_ok=True)
    rows, keep = (1, 4, 16) if args.quick else ROWS, lambda so_far: write_record(so_far, out)
    bench = Bench(record, keep, TYPES[args.dtype], rows, say=print, quick=args.quick)
    bench.columns, bad = None if args.columns == [None] else args.columns, []
    if args.generate:
        from kernels_generate import ROWS as BLOCKS
        from kernels_generate import compare, wrong

        def keep(runs: dict) -> None:
            record["generate"] = runs
            bench.keep(record)

        given = ["--pair", args.pair, "--bits", str(args.bits), *(["--model", args.model] if args.model else [])]
        runs = compare(args.generate, chosen, given, args.seconds, keep, args.block_size or BLOCKS, args.total or 150)
        bad = [name for name, run in runs.items() if wrong(run)]
    elif len(args.only) > 1:
        own = {"--dtype": [args.dtype], "--shapes": args.shapes}
        own |= {"--columns": [str(c) for c in args.columns]} if args.columns != [None] else {}
        given = [word for name, values in own.items() for word in (name, *values)] + ["--quick"] * args.quick
        total = args.total or (120 if args.quick else float("inf"))
        record["entries"], record["errors"] = apart(args.only, given, args.seconds, total)
    else:
        (name,) = args.only
        try:
            bench.run(name, args.shapes)
        except Exception:  # a compiler's log comes as the message of any of several types
            record["errors"][name] = traceback.format_exc()
            print(f"{name}: {record['errors'][name]}", flush=True)
    if not args.generate and (len(args.only) > 1 or not args.out):
        sixteen_over_one(record.get("entries", []))
    bench.keep(record)
    print(f"written to {out}")
    faults = [e for e in record.get("entries", []) if fault(e)]
    for name, error in record.get("errors", {}).items():
        print(f"{name}: {error.strip().splitlines()[-1]}")
    if record.get("errors") or faults or bad:
        found = f"{len(faults)} faults and {len(bad)} bad runs ({', '.join(bad)})" if bad else f"{len(faults)} faults"
        p.exit(1, f"Error: {found}, and the errors above; every kernel must be right and its rows equal.\n")


if __name__ == "__main__":
    main()
