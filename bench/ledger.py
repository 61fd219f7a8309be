"""What one round of ours consists of on a Mac, counted on any machine: launches, bytes, multiply-adds, the host's time.

    python bench/ledger.py                                  every model at 1, 4, 8 and 16 rows, 1k and 32k of context
    python bench/ledger.py --models qwen3.5-27b --kernels   one model, and how often each kernel is launched
    python bench/ledger.py --table                          what each primitive launches on Metal, and where that is written
    python bench/ledger.py --write                          bench/results/ledger.json, and its section of docs/benchmarks.md

A round drafts a block, verifies `rows - 1` drafts with the anchor, accepts half of them and commits; at 1 row it is a plain
step. `ledger_models` has the published shapes, `ledger_walk` makes a round's list of primitives, `ledger_metal` its launches,
`ledger_time` milliseconds. Our own Metal kernels are not in it: a Mac turns them on by trial. Milliseconds are predictions.
Nothing here ran on a Mac.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import ledger_metal
import ledger_models
import ledger_time
from ledger_metal import Gpu, Ledger
from ledger_walk import Walk

from dflash_mlx.tools import bench

ROWS, CONTEXTS = (1, 4, 8, 16), (1024, 32768)
RECORD = Path(__file__).parent / "results" / "ledger.json"
DOCS = Path(__file__).parents[1] / "docs" / "benchmarks.md"
MARKS = "<!-- made by bench/ledger.py -->", "<!-- end of the ledger -->"
# The chance that a draft is accepted if those before it are, for milliseconds a committed token.
ACCEPT = 0.8
# As MLX names an M3 Max; the record's counts are its.
GPU = Gpu(15, "s")


@cache
def walk(name: str, context: int) -> Walk:
    return Walk(ledger_models.build(ledger_models.published()[name]), context)


@cache
def ledger(name: str, rows: int, context: int, gpu: str = "15s") -> Ledger:
    """The launches of a round of which half the drafts are kept, after another one like it. gpu: generation and size."""
    round_ = walk(name, context).primitives(rows, rows // 2, rows // 2 + 1)
    return Ledger(round_, Gpu(int(gpu[:-1]), gpu[-1]))


def count(name: str, rows: int, context: int) -> dict[str, Any]:
    """One cell of the record without what depends on this machine."""
    found = ledger(name, rows, context)
    return {
        "model": name,
        "rows": rows,
        "context": context,
        "stages": {stage: {k: round(v) for k, v in of.items()} for stage, of in found.by_stage().items()},
        "kernels": dict(sorted(found.kernels().items())),
    }


def cells(names: list[str]) -> Iterator[tuple[str, int, int]]:
    for name in names:
        for context in CONTEXTS:
            for rows in ROWS:
                if rows <= ledger_models.published()[name].drafter["block_size"]:
                    yield name, rows, context


def measured(name: str, rows: int, context: int) -> dict[str, Any]:
    """A cell with the host's time here."""
    cell = count(name, rows, context)
    host = walk(name, context).host_seconds(rows, rows // 2, rows // 2 + 1)
    return cell | {"host_ms": {stage: round(1e3 * s, 2) for stage, s in host.items()}}


def chips() -> tuple[ledger_time.Chip, ...]:
    plain = {name: ledger(name, 1, 1024, "17s").launches for name in ledger_time.PLAIN_MS}
    return ledger_time.fitted(plain)


def host_parts(cell: dict[str, Any]) -> tuple[float, float, float]:
    """The host's milliseconds: from a round's result until the next draft is handed over, for the rollback, and for the pass."""
    host = cell["host_ms"]
    first, committed = host.get("draft", 0.0), host.get("committed", host["whole"])
    return first + committed - host["verified"], host["whole"] - committed, host["passed"] - first


def predicted_ms(cell: dict[str, Any], chip: ledger_time.Chip) -> float:
    """A round with the host's time of the record.

    With drafts the device stands still until it has the draft, and while the host takes longer for the rollback and the pass's
    first layers, up to a tap, than it for the draft; it cannot be done before the host is. A plain pass is enqueued before the
    last one is read: there the slower of the two counts.
    """
    gpu = f"{chip.gpu.generation}{chip.gpu.size}"
    launches = ledger(cell["model"], cell["rows"], cell["context"], gpu).launches
    device, host, (first, rollback, then) = ledger_time.round_ms(launches, chip), cell["host_ms"], host_parts(cell)
    if cell["rows"] == 1:
        return max(device, host["whole"])
    draft = ledger_time.round_ms([launch for launch in launches if launch.stage == "draft"], chip)
    begun = host["verify"] - host["draft"]
    return first + max(device + max(rollback + begun - draft, 0.0), rollback + then)


def tau(rows: int) -> float:
    return sum(ACCEPT**i for i in range(rows))


def section(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    m3, m5, *_ = chips()
    heads = "model|context|rows|launches (draft, verify, accept, rollback)|of these wait|GB|10^9 multiply-adds"
    heads += "|host ms: draft, rollback, pass"
    heads += "".join(f"|{chip.name}: ms a round|ms a token" for chip in (m3, m5))
    lines = [f"| {heads.replace('|', ' | ')} |", "| --- | ---: | ---: | --- |" + " ---: |" * 8]
    for cell in record["cells"]:
        rows, stages = cell["rows"], cell["stages"]
        each = ", ".join(str(stages.get(s, {}).get("launches", 0)) for s in ("draft", "verify", "accept", "rollback"))
        total = {k: sum(of[k] for of in stages.values()) for k in ("launches", "waits", "bytes", "macs")}
        row = [cell["model"], f"{cell['context'] // 1024}k", rows, f"{total['launches']} ({each})", total["waits"]]
        row += [f"{total['bytes'] / 1e9:.1f}", f"{total['macs'] / 1e9:.0f}", ", ".join(f"{ms:.1f}" for ms in host_parts(cell))]
        for chip in (m3, m5):
            ms = predicted_ms(cell, chip)
            row += [f"{ms:.1f}", f"{ms / tau(rows):.1f}"]
        lines.append(f"| {' | '.join(map(str, row))} |")
    fit = f"Fitted: {m5.bandwidth:.2f} of an M5's bandwidth, a gap of {m5.gap_us:.1f} us. Public figures, and the model's:"
    lines += ["", fit, "", "| figure | public ms | predicted ms | error | |", "| --- | ---: | ---: | ---: | --- |"]
    for check in checks():
        use = "fitted on it" if check.fitted else "tried" if abs(check.error) <= ledger_time.MOST_ERROR else "too far off"
        lines.append(f"| {check.what} | {check.public_ms:.3g} | {check.predicted_ms:.3g} | {100 * check.error:+.0f} % | {use} |")
    return "\n".join(lines)


def checks() -> list[ledger_time.Check]:
    def launches(name: str, rows: int, chip: ledger_time.Chip) -> list[ledger_metal.Launch]:
        return ledger(name, rows, 1024, f"{chip.gpu.generation}{chip.gpu.size}").launches

    return ledger_time.checks(chips(), launches)


def put(text: str, section: str) -> str:
    """docs/benchmarks.md with the section between its marks."""
    head, rest = text.split(MARKS[0], 1)
    return f"{head}{MARKS[0]}\n{section}\n{MARKS[1]}{rest.split(MARKS[1], 1)[1]}"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=ledger_models.published(), default=list(ledger_models.published()))
    p.add_argument("--kernels", action="store_true", help="how often each kernel is launched")
    p.add_argument("--table", action="store_true", help="what each primitive launches, and where MLX's source says so")
    p.add_argument("--write", action="store_true", help="keep the record and put its table into docs/benchmarks.md")
    args = p.parse_args()
    if args.table:
        for kind, (launches, where) in ledger_metal.SOURCES.items():
            print(f"{kind:16} {launches}  [{where}]")
        return
    record = {"what": "bench/ledger.py", "machine": bench.machine(), "versions": bench.versions(), "cells": []}
    record |= {"sources": {name: of.sources for name, of in ledger_models.published().items()}}
    for cell in cells(args.models):
        found = measured(*cell)
        record["cells"].append(found)
        stages = {stage: f"{of['launches']} launches, {of['bytes'] / 1e9:.2f} GB" for stage, of in found["stages"].items()}
        print(*cell, stages, f"host {found['host_ms']['whole']:.1f} ms", flush=True)
        if args.kernels:
            print("   ", found["kernels"])
    if args.write:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        DOCS.write_text(put(DOCS.read_text(), section(record)))
    else:
        print(section(record))


if __name__ == "__main__":
    main()
