"""One kernel on this GPU: does it compile, is it right, do its rows agree bit for bit, how long does it take beside stock MLX.

    python -m dflash_mlx.tools.kernel_run block_qmm 8B out.json $(($(date +%s) + 30))

Each shape is tried in the plans that a trial tries, at 1, 2, 4, 8 and 16 rows. Right: against float32 products of the written-out
weights where there are weights, else against stock MLX. Rows equal: a row has the bits that it has in a launch of its own. Times
are `trials.medians_s`: chains of calls, as a pass makes them, over as many copies of the weights as leave every cache. `first` is
the first call, the compile included. Bytes are those that must move once: weights, scales and biases, or keys and values.

The record is written after each line, so a process that dies leaves it. `bench/kernels.py` runs these for a table.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..kernels import block_qmm, trials
from ..kernels.verdicts import Candidate
from ..machine import limit_bytes, size_text
from .bench_record import write_record

ROWS = (1, 2, 4, 8, 16)
# Of the memory that models can have, what one shape may take.
SHARE = 0.5

Call = trials.Call


@dataclass(frozen=True)
class Shape:
    """One kernel at one shape, its arrays made.

    ways: plan -> its call; stock: MLX's; given: rows -> the input of all calls. same: what is wrong with outputs, or None.
    nbytes: rows -> what must move once. right: rows -> the answer, None for stock's own. alone: (call, rows) -> what these rows
    have in launches of their own.
    """

    kernel: str
    what: str
    ways: dict[str, Call]
    stock: Call
    given: Callable[[int], mx.array]
    same: trials.Same
    nbytes: Callable[[int], int]
    right: Callable[[int], Sequence[mx.array]] | None = None
    alone: Callable[[Call, int], Sequence[mx.array]] | None = None


class Bench:
    """Checks and times; `record["entries"]` grows by a line a shape, plan and row count.

    Args:
      keep: given the record after each line. rows: counts. until: of `trials.clock`; no row count begins after it.
      say: called with each line. quick: only the largest shapes.
    """

    def __init__(
        self,
        record: dict[str, Any],
        keep: Callable[[dict], None],
        dtype: mx.Dtype = mx.bfloat16,
        rows: Sequence[int] = ROWS,
        until: float = math.inf,
        say: Callable[[str], None] = lambda text: None,
        quick: bool = False,
    ):
        self.record, self.keep, self.dtype, self.rows = record, keep, dtype, tuple(rows)
        self.until, self.say, self.quick = until, say, quick
        self.bits, self.columns = (4, 8), None
        self.same = trials.same_floats(block_qmm.TOLERANCE[dtype])
        # With a norm before or a gate after, which round too.
        self.same_formed = trials.same_floats(2 * block_qmm.TOLERANCE[dtype])
        # What is timed when all else is done: on CUDA stock MLX compiles for minutes.
        self.later: list[tuple[list[dict], Call, mx.array, int]] = []
        record.setdefault("entries", [])
        record.setdefault("cut", [])

    def run(self, kernel: str, models: Sequence[str] = ("8B",)) -> None:
        """All shapes of a kernel."""
        from .kernel_shapes import SHAPES

        for model in models:
            for shape, least in SHAPES[kernel](self, model):
                self.add(shape, least)
                # Its arrays go before the next one's are made.
                del shape
                mx.clear_cache()
        self.finish()

    def add(self, shape: Shape, least: int = 1) -> None:
        """Check and time the plans of one shape at all row counts, from `least` on."""
        for rows in (rows for rows in self.rows if rows >= least):
            if trials.clock() > self.until:
                self._cut(f"{shape.what}, {rows} rows and more: no time was left")
                break
            x = shape.given(rows)
            want = list(shape.stock(x) if shape.right is None else shape.right(rows))
            mx.eval(x, want)
            entries, sound = [], []
            for plan, call in shape.ways.items():
                entry = {"kernel": shape.kernel, "what": shape.what, "plan": plan, "rows": rows}
                entry |= _checked(call, x, want, shape.same, shape.alone and partial(shape.alone, call, rows))
                self.record["entries"].append(entry)
                if not entry["refused"]:
                    entries.append(entry)
                    sound.append(call)
                self.keep(self.record)
            if not sound:
                continue
            if mx.cuda.is_available():
                self._time(entries, sound, None, x, shape.nbytes(rows))
                self.later.append((entries, shape.stock, x, shape.nbytes(rows)))
            else:
                self._time(entries, sound, shape.stock, x, shape.nbytes(rows))

    def finish(self) -> None:
        """Time stock MLX where that was left for later, few rows first."""
        for entries, stock, x, nbytes in sorted(self.later, key=lambda job: job[0][0]["rows"]):
            self._time(entries, [], stock, x, nbytes)
        self.later = []

    def _time(self, entries: list[dict], calls: list[Call], stock: Call | None, x: mx.array, nbytes: int) -> None:
        """Time calls by turns, with stock MLX's where it is given, and put the times into their entries."""
        timed = [*calls, *([stock] if stock else [])]
        times = trials.medians_s(*timed, x=x, until=self.until)
        if times is None:
            self._cut(f"{entries[0]['what']}, {entries[0]['rows']} rows: checked, not timed")
            return
        stock_s = times[-1] if stock else None
        for i, entry in enumerate(entries):
            if calls:
                entry |= {"kernel_us": times[i] * 1e6, "kernel_gbps": nbytes / times[i] / 1e9}
            if stock_s:
                entry |= {"stock_us": stock_s * 1e6, "stock_gbps": nbytes / stock_s / 1e9}
            self.say(line(entry))
        self.keep(self.record)

    def _cut(self, text: str) -> None:
        self.record["cut"].append(text)
        self.keep(self.record)

    def fits(self, what: str, nbytes: float) -> bool:
        """Whether a shape's arrays leave room; if not, it is named."""
        most = SHARE * limit_bytes()
        if nbytes > most:
            self._cut(f"{what}: it needs {size_text(nbytes)} and {size_text(most)} are taken for this")
        return nbytes <= most

    def plans(self, candidates: Sequence[Candidate]) -> list[tuple[str, dict[str, int]]]:
        """(name, options) of the plans to try: a trial's, or those that the user named."""
        if self.columns and candidates[0].kernel.name.startswith("block_qmm"):
            return [(f"columns {columns}", {"columns": columns}) for columns in self.columns]
        return [(plan_name(candidate), dict(candidate.options)) for candidate in candidates]


def plan_name(candidate: Candidate) -> str:
    """A candidate without its kernel's name, "columns 4"."""
    return " ".join(f"{name} {value}" for name, value in candidate.options)


def line(entry: dict[str, Any]) -> str:
    """An entry for people."""
    text = f"{entry['kernel']:17} {entry['what']:38} {entry['plan']:24} {entry['rows']:3} rows"
    if entry["refused"]:
        return f"{text}  REFUSED: {entry['refused']}"
    if "kernel_us" in entry:
        text += f"  {entry['kernel_us']:9.1f} us {entry['kernel_gbps']:6.0f} GB/s"
    if "stock_us" in entry:
        text += f"  stock {entry['stock_us']:9.1f} us  ours x{entry['stock_us'] / entry['kernel_us']:5.2f}"
    bits = {True: "rows agree", False: "ROWS DIFFER", None: ""}[entry["rows_bit_equal"]]
    found = "right" if entry["wrong"] is None else f"WRONG: {entry['wrong']}"
    return f"{text}  first call {entry['first_s']:5.2f} s  {found}  {bits}"


def _checked(
    call: Call, x: mx.array, want: Sequence[mx.array], same: trials.Same, alone: Callable[[], Sequence[mx.array]] | None
) -> dict[str, Any]:
    """What the first call of a plan shows: whether it runs, is right, and gives rows the bits that they have alone."""
    begin = time.perf_counter()
    try:
        results = list(call(x))
        mx.eval(results)
        first = time.perf_counter() - begin
        equal = None if alone is None else all(bool(mx.array_equal(*pair)) for pair in zip(results, alone(), strict=True))
        return {"refused": None, "wrong": same(results, want), "rows_bit_equal": equal, "first_s": first}
    except Exception as e:  # a text that does not compile or launch comes as any of several types
        said = f"{type(e).__name__}: {str(e).strip() or 'no message'}"
        return {"refused": said[:2000], "wrong": None, "rows_bit_equal": None, "first_s": time.perf_counter() - begin}


def main() -> None:
    """`kernel_run KERNEL MODEL OUT UNTIL`, seconds of the epoch: 4 bit, bfloat16, all row counts."""
    kernel, model, out, until = sys.argv[1:]
    path, record = Path(out), {"ended": "unfinished"}
    bench = Bench(record, lambda so_far: write_record(so_far, path), until=trials.clock() + float(until) - time.time())
    bench.bits = (4,)
    bench.run(kernel, (model,))
    record["ended"] = "complete"
    write_record(record, path)


if __name__ == "__main__":
    main()
