"""Every kernel on this machine's GPU: is it right, do its rows agree bit for bit, how long does it take beside stock MLX.

    python bench/kernels.py                          all kernels; a table and bench/results/kernels-DEVICE.json
    python bench/kernels.py --quick                  the largest shapes, rows 1, 4 and 16, most telling first: at most 120 s
    python bench/kernels.py --only block_qmm_tiles --columns 16 32 64
    python bench/kernels.py --generate 2000          the built-in pair with kernels and without: kernels_generate.py

Runs on Apple GPUs (Metal) and NVIDIA GPUs (CUDA). Each kernel runs in a process of its own with a limit (--seconds): one that
does not compile, faults or hangs costs the others nothing, and what it had measured is kept. Times are medians over samples; a
sample evaluates many calls at once, over as many copies of the weights as it takes to leave every cache (512 MB), so that GB/s
are the memory's. Bytes are those that must move once: weights, scales and biases, or keys and values. `first` is the first call,
the compile included. A launch costs the host some microseconds: where a line is near its kernel's smallest time, that is what
was timed, and the largest shape (the head) tells of the kernel.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx

from dflash_mlx.kernels import accept, autotune, block_attention, block_gather_qmm, block_linear, block_qmm, head_argmax, names

RESULTS = Path(__file__).parent / "results"
ROWS = (1, 2, 4, 8, 16)
SPREAD_BYTES = 512e6
TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# Qwen3-8B: (name, N, K)
LAYERS = [
    ("head", 151936, 4096),
    ("gate or up", 12288, 4096),
    ("down", 4096, 12288),
    ("q or o", 4096, 4096),
    ("k or v", 1024, 4096),
]

# Of SmolLM2-135M, whose launches bind, and of Qwen3-8B: (name, N, K, what stands around the product)
AROUND = [
    ("qkv", 960, 576, "norm"),
    ("gate and up", 3072, 576, "norm gated"),
    ("down", 576, 1536, "residual"),
    ("qkv", 6144, 4096, "norm"),
    ("gate and up", 24576, 4096, "norm gated"),
    ("down", 4096, 12288, "residual"),
]

HEAD = (151936, 4096)

# (model, query heads, KV heads, head dimension, keys, window)
CACHES = [
    ("Qwen3-8B", 32, 8, 128, 8192, 0),
    ("Qwen3-8B", 32, 8, 128, 32768, 0),
    ("Qwen3-8B", 32, 8, 128, 1024, 0),
    ("Qwen3.5-27B", 24, 4, 256, 8192, 0),
    ("gpt-oss", 64, 8, 64, 8192, 128),
]


def median_s(calls: Sequence[Callable[[], Sequence[mx.array]]], samples: int) -> float:
    """Seconds of one call, the median over samples that evaluate all calls together; two samples are thrown away first."""
    times = []
    for _ in range(samples + 2):
        begin = time.perf_counter()
        mx.eval([c() for c in calls])
        times.append((time.perf_counter() - begin) / len(calls))
    return statistics.median(times[2:])


def spread(bytes_each: int, most: int = 64) -> int:
    """Copies that together are larger than any cache, at least 8 so that launches overlap as in a pass."""
    return max(8, min(most, int(SPREAD_BYTES // max(bytes_each, 1)) + 1))


def size(arrays: Sequence[mx.array]) -> int:
    return sum(a.nbytes for a in arrays)


Calls = list[Callable[[], Sequence[mx.array]]]


def dense(weights: Sequence[mx.array], group_size: int, bits: int) -> mx.array:
    """[..., N, K] float32."""
    w, scales, biases = weights
    return mx.dequantize(w, scales.astype(mx.float32), biases.astype(mx.float32), group_size, bits)


def over(f: Callable, arguments: Sequence[tuple]) -> Calls:
    """One call of f for each tuple of arguments."""
    return [partial(f, *a) for a in arguments]


def listed(x: mx.array | Sequence[mx.array]) -> list[mx.array]:
    return [x] if isinstance(x, mx.array) else list(x)


def first_s(call: Callable) -> tuple[float, list[mx.array]]:
    """Seconds of a call that may have to compile, and what it returns."""
    begin = time.perf_counter()
    results = listed(call())
    mx.eval(results)
    return time.perf_counter() - begin, results


class Bench:
    """Checks, times and prints; `record` is written to `out` after each line, so that a process that dies leaves its lines."""

    def __init__(self, record: dict, out: Path, dtype: mx.Dtype, samples: int, quick: bool):
        self.record, self.out, self.dtype, self.samples = record, out, dtype, samples
        self.rows, self.quick = (1, 4, 16) if quick else ROWS, quick
        self.same = autotune.same_floats(block_qmm.TOLERANCE[dtype])
        # With a norm before or a gate behind, which round too.
        self.same_formed = autotune.same_floats(2 * block_qmm.TOLERANCE[dtype])
        self.later: list[tuple[dict, Calls, int]] = []

    def save(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.record, indent=1) + "\n")

    def add(
        self,
        kernel: str,
        what: str,
        rows: int,
        ours: Calls,
        stock: Calls,
        same: Callable,
        nbytes: int,
        right: Sequence[mx.array] | None = None,
        alone: Sequence[mx.array] | None = None,
    ) -> None:
        """Check and time one shape of ours; stock follows in `finish`, because what it compiles first may take minutes.

        Args:
          right: the answer, None for stock's own; alone: what the same rows have in other launches. Both not yet evaluated.
        """
        first, results = first_s(ours[0])
        wrong = same(results, listed(stock[0]()) if right is None else right)
        equal = None if alone is None else all(bool(mx.array_equal(*pair)) for pair in zip(results, alone, strict=True))
        kernel_s = median_s(ours, self.samples)
        entry = {
            "kernel": kernel,
            "what": what,
            "rows": rows,
            "wrong": wrong,
            "rows_bit_equal": equal,
            "first_s": first,
            "kernel_us": kernel_s * 1e6,
            "kernel_gbps": nbytes / kernel_s / 1e9,
        }
        self.record["entries"].append(entry)
        self.later.append((entry, stock, nbytes))
        self.save()
        found = "right" if wrong is None else f"WRONG: {wrong}"
        bits = {True: "rows agree", False: "ROWS DIFFER", None: ""}[equal]
        print(f"{kernel:17} {what:34} {rows:3} rows  {kernel_s * 1e6:9.1f} us {entry['kernel_gbps']:6.0f} GB/s", end="")
        print(f"  first call {first:5.2f} s  {found}  {bits}", flush=True)

    def finish(self) -> None:
        """Time stock MLX at the same shapes, few rows first."""
        for entry, stock, nbytes in sorted(self.later, key=lambda job: job[0]["rows"]):
            first, _ = first_s(stock[0])
            stock_s = median_s(stock, self.samples)
            entry |= {"stock_first_s": first, "stock_us": stock_s * 1e6, "stock_gbps": nbytes / stock_s / 1e9}
            self.save()
            print(f"{entry['kernel']:17} {entry['what']:34} {entry['rows']:3} rows  stock {stock_s * 1e6:9.1f} us", end="")
            print(f" {entry['stock_gbps']:6.0f} GB/s  first call {first:5.2f} s", end="")
            print(f"  ours x{entry['stock_us'] / entry['kernel_us']:5.2f}", flush=True)
        self.later = []

    def block_qmm(self, columns: int | None = None) -> None:
        self.products("block_qmm", block_qmm.block_qmm_kernel, columns)

    def block_qmm_tiles(self, columns: int | None = None) -> None:
        self.products("block_qmm_tiles", block_qmm.block_qmm_tiles_kernel, columns)

    def products(self, kernel: str, launch: Callable, columns: int | None) -> None:
        f, g = partial(launch, columns=columns), block_qmm.block_qmm_ops
        for bits in (4, 8):
            for name, n, k in LAYERS[: 1 if self.quick else None]:
                keys = mx.random.split(mx.random.key(1), 2)
                first = mx.quantize(mx.random.normal((n, k), dtype=self.dtype, key=keys[0]), group_size=64, bits=bits)
                weights = [[a + 0 for a in first] for _ in range(spread(size(first)))]
                x = mx.random.normal((16, k), dtype=self.dtype, key=keys[1])
                mx.eval(weights, x)
                right = x.astype(mx.float32) @ dense(first, 64, bits).T
                alone = [f(x[m : m + 1], *first, 64, bits) for m in range(16)]
                for m in self.rows:
                    given = [(x[:m], *w, 64, bits) for w in weights]
                    what = f"{bits} bit {name} N {n} K {k}" + (f" columns {columns}" if columns else "")
                    one = [mx.concatenate(alone[:m])]
                    self.add(kernel, what, m, over(f, given), over(g, given), self.same, size(first), [right[:m]], one)

    def block_linear(self) -> None:
        for bits, (name, n, k, form) in itertools.product((4, 16), AROUND):
            eps, residual, gated = 1e-6 if "norm" in form else None, "residual" in form, "gated" in form
            x, first, scale, rest = block_linear.made(n, k, 64, bits, self.dtype, bool(eps), residual, gated)
            weights = [first.copied() for _ in range(spread(size(first.arrays)))]
            mx.eval([w.arrays for w in weights], x, scale, rest)
            of = (lambda m, rest=rest: rest[m]) if residual else lambda m: None
            f, norm = block_linear.block_linear_kernel, (scale, eps) if eps else None
            alone = [f(x[m : m + 1], first, norm, of(slice(m, m + 1)), gated) for m in range(16)]
            for m in self.rows:
                some = slice(0, m)
                given = [(x[some], w, norm, of(some), gated) for w in weights]
                one, stock = [mx.concatenate(alone[:m])], over(block_linear.block_linear_ops, given)
                what = f"{bits} bit {name} N {n} K {k} {form}"
                self.add("block_linear", what, m, over(f, given), stock, self.same_formed, size(first.arrays), alone=one)

    def block_gather_qmm(self) -> None:
        f, g = block_gather_qmm.block_gather_qmm_kernel, block_gather_qmm.block_gather_qmm_ops
        # Qwen3.6-35B-A3B: 256 experts, 8 a row; gpt-oss-20b: 32 experts, 4 a row.
        for name, e, share, n, k in (("A3B gate or up", 256, 8, 512, 2048), ("gpt-oss gate or up", 32, 4, 2880, 2880)):
            keys = mx.random.split(mx.random.key(2), 3)
            w = mx.random.normal((e * n, k), dtype=self.dtype, key=keys[0])
            w = [a.reshape(e, n, -1) for a in mx.quantize(w, group_size=32, bits=4)]
            x = mx.random.normal((16, k), dtype=self.dtype, key=keys[1])
            ids = mx.argsort(mx.random.uniform(shape=(16, e), key=keys[2]), axis=-1)[:, :share].astype(mx.uint32)
            copies = [[a + 0 for a in w] for _ in range(2)]
            mx.eval(copies, x, ids)
            right = mx.stack([x[m].astype(mx.float32) @ dense([a[ids[m]] for a in w], 32, 4).swapaxes(1, 2) for m in range(16)])
            alone = [f(x[m : m + 1], *w, ids[m], 32, 4) for m in range(16)]
            for m in self.rows:
                given = [(x[:m], *c, ids[:m].reshape(-1), 32, 4) for c in copies] * 8
                one = [mx.concatenate(alone[:m])]
                used = len({i for row in ids[:m].tolist() for i in row})
                nbytes = size(w) * used // e
                want, what = [right[:m].reshape(-1, n)], f"4 bit {name}"
                self.add("block_gather_qmm", what, m, over(f, given), over(g, given), self.same, nbytes, want, one)

    def head_argmax(self) -> None:
        f, g = head_argmax.head_argmax_kernel, head_argmax.head_argmax_ops
        v, h = HEAD
        keys = mx.random.split(mx.random.key(0), 2)
        w = mx.random.normal((v, h), dtype=self.dtype, key=keys[0])
        x = mx.random.normal((16, h), dtype=self.dtype, key=keys[1])
        same = head_argmax.same_choices(self.dtype, h)
        for bits in (4, None):
            weights = [*mx.quantize(w, group_size=64, bits=bits), 64, bits] if bits else [w]
            mx.eval(weights[:3], x)
            right = g(x, dense(weights[:3], 64, bits).astype(self.dtype) if bits else w)
            nbytes = size([a for a in weights if isinstance(a, mx.array)])
            alone = [f(x[m : m + 1], *weights) for m in range(16)]
            rows = [mx.concatenate(parts) for parts in zip(*alone, strict=True)]
            for m in self.rows:
                given, what = [(x[:m], *weights)] * 8, f"{f'{bits} bit' if bits else 'dense'} V {v} H {h}"
                want, rows_alone = [a[:m] for a in right], [a[:m] for a in rows]
                self.add("head_argmax", what, m, over(f, given), over(g, given), same, nbytes, want, rows_alone)

    def accept(self) -> None:
        for n in (7, 15):
            t = accept.trials(1, (autotune.Candidate(accept.KERNEL),))(n + 1)
            ours, stock = [partial(t.ours[0], t.x)] * 64, [partial(t.stock, t.x)] * 64
            self.add("accept", f"N {n}", 1, ours, stock, t.same, 4 * (2 * n + 1))

    def block_attention(self) -> None:
        f, g = block_attention.block_attention_kernel, block_attention.block_attention_ops
        same = autotune.same_floats({4: 1e-4, 2: 5e-2}[self.dtype.size])
        for name, hq, hk, d, s, window in CACHES[: 2 if self.quick else None]:
            if d * self.dtype.size > 512:
                continue
            keys = mx.random.split(mx.random.key(3), 3)
            q = mx.random.normal((1, hq, 16, d), dtype=self.dtype, key=keys[0])
            k, v = (mx.random.normal((1, hk, s, d), dtype=self.dtype, key=key) for key in keys[1:])
            copies = [[k + 0, v + 0] for _ in range(spread(2 * k.nbytes, 16))]
            mx.eval(q, copies)
            rest = (d**-0.5, True, window)
            alone = [f(q[:, :, i : i + 1], k[:, :, : s - 15 + i], v[:, :, : s - 15 + i], *rest) for i in range(16)]
            for m in self.rows:
                given = [(q[:, :, 16 - m :], *c, *rest) for c in copies]
                one = [mx.concatenate(alone[16 - m :], axis=2)]
                seen = min(s, window + m) if window else s
                what = f"{name} S {s}" + (f" window {window}" if window else "")
                nbytes = 2 * k.nbytes * seen // s
                self.add("block_attention", what, m, over(f, given), over(g, given), same, nbytes, alone=one)


def sixteen_over_one(entries: list[dict]) -> None:
    """The number that drafting lives on: what 16 rows cost, in rows."""
    print("\ntime of 16 rows over 1 row; last: our 16 rows over stock's 1 row")
    by = {(e["kernel"], e["what"], e["rows"]): e for e in entries}
    for (kernel, what, rows), e in by.items():
        if rows == 16 and (one := by.get((kernel, what, 1))) and "stock_us" in e:
            ours, stock = e["kernel_us"] / one["kernel_us"], e["stock_us"] / one["stock_us"]
            print(f"{kernel:17} {what:34} kernel {ours:5.2f}   stock {stock:5.2f}   {e['kernel_us'] / one['stock_us']:5.2f}")


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
            if code and not part["errors"] and not any(e["wrong"] or e["rows_bit_equal"] is False for e in part["entries"]):
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
    p.add_argument("--samples", type=int, default=9)
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
    bench, bad = Bench(record, out, TYPES[args.dtype], args.samples, args.quick), []
    if args.generate:
        from kernels_generate import ROWS as BLOCKS
        from kernels_generate import compare, wrong

        def keep(runs: dict) -> None:
            record["generate"] = runs
            bench.save()

        given = ["--pair", args.pair, "--bits", str(args.bits), *(["--model", args.model] if args.model else [])]
        runs = compare(args.generate, chosen, given, args.seconds, keep, args.block_size or BLOCKS, args.total or 150)
        bad = [name for name, run in runs.items() if wrong(run)]
    elif len(args.only) > 1:
        own = {"--dtype": [args.dtype], "--samples": [str(args.samples)]}
        own |= {"--columns": [str(c) for c in args.columns]} if args.columns != [None] else {}
        given = [word for name, values in own.items() for word in (name, *values)] + ["--quick"] * args.quick
        total = args.total or (120 if args.quick else float("inf"))
        record["entries"], record["errors"] = apart(args.only, given, args.seconds, total)
    else:
        (name,) = args.only
        try:
            for columns in args.columns if name.startswith("block_qmm") else [None]:
                getattr(bench, name)(*([columns] if name.startswith("block_qmm") else []))
            bench.finish()
        except Exception:  # a compiler's log comes as the message of any of several types
            record["errors"][name] = traceback.format_exc()
            print(f"{name}: {record['errors'][name]}", flush=True)
    if not args.generate and (len(args.only) > 1 or not args.out):
        sixteen_over_one(record.get("entries", []))
    bench.save()
    print(f"written to {out}")
    faults = [e for e in record.get("entries", []) if e["wrong"] or e["rows_bit_equal"] is False]
    for name, error in record.get("errors", {}).items():
        print(f"{name}: {error.strip().splitlines()[-1]}")
    if record.get("errors") or faults or bad:
        found = f"{len(faults)} faults and {len(bad)} bad runs ({', '.join(bad)})" if bad else f"{len(faults)} faults"
        p.exit(1, f"Error: {found}, and the errors above; every kernel must be right and its rows equal.\n")


if __name__ == "__main__":
    main()
