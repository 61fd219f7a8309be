"""docs/benchmarks.md's table of speeds, made from the records in bench/results/.

    python bench/table.py                       print it
    python bench/table.py --write               put it into docs/benchmarks.md, between its two markers
    python bench/table.py --here [--max-seconds 600] [--only bench-tiny]
                                                repeat the records on this machine and show its figures beside them

Records: bench-*.json by `dflash-mlx bench --out`, shapes-*.json by bench/shapes.py, peers-*.json by bench/peers.py, report-*.json
as users send what `dflash-mlx doctor --report` wrote. `--here` repeats bench-*.json with each record's own settings (at most
--max-seconds each), keeps the new records in bench/here/, and needs the named pairs; the others have their own scripts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_mlx.tools import bench, bench_record
from dflash_mlx.tools.report import WHAT, quickest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- made by bench/table.py -->", "<!-- end -->"


def read(pattern: str, results: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Records by file name, in the order of names; those without figures are left out."""
    found = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob(pattern))}
    return {name: record for name, record in found.items() if record["summary"]}


def label(record: dict[str, Any]) -> str:
    """What a column or a row is about: weights and chip."""
    weights = record["weights"]
    bits = f"{'/'.join(map(str, weights['bits']))} bit" if weights["bits"] else weights["dtype"]
    return f"{record.get('model') or record['shape']}, {bits}, {record['machine']['chip']}"


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['speedup']:.2f}" + (f" (tau {row['tau']:.1f})" if row["tau"] else " (plain)")


def pair_table(records: Sequence[dict[str, Any]]) -> list[str]:
    """One table for records with the same kinds, which are its columns: a row a kind at temperature 0 without context, then one
    for all kinds at every temperature and context.
    """
    rows = [{(r["kind"], r["temp"], r["context"]): r for r in record["summary"]} for record in records]
    kinds = records[0]["settings"]["kinds"]
    lines = ["| decoding, times mlx-lm | " + " | ".join(map(label, records)) + " |", "| --- |" + " --- |" * len(records)]
    for kind in kinds:
        if any((kind, 0.0, 0) in of for of in rows):
            lines.append(f"| {kind} | " + " | ".join(cell(of.get((kind, 0.0, 0))) for of in rows) + " |")
    others = dict.fromkeys(key for of in rows for key in of if key[0] == "all")
    for key in others:
        place = f"temperature {key[1]:g}" + (f", {key[2]:,} tokens before" if key[2] else "")
        lines.append(f"| all kinds, {place} | " + " | ".join(cell(of.get(key)) for of in rows) + " |")
    return lines


def about(name: str, record: dict[str, Any]) -> str:
    """One line under a table: what a record's figures stand on."""
    rows, v = [row for row in record["summary"] if row["kind"] != "all"], record["versions"]
    plain = [row["mlx_lm_decode_tps"] for row in rows]
    equal, pairs = sum(row["equal"] for row in rows), len(record["runs"])
    ended = "" if record["ended"] == "complete" else f", {record['ended']}"
    return (
        f"- `{name}`: {record['date'][:10]}, {record['machine']['chip']}, mlx {v['mlx']}, mlx-lm {v['mlx-lm']}; mlx-lm alone "
        f"{min(plain):.0f} to {max(plain):.0f} tokens/s; {record['settings']['max_tokens']} tokens an answer, medians of "
        f"{max(row['pairs'] for row in rows)} pairs; same text in {equal} of {pairs}{ended}."
    )


def shape_table(records: Sequence[dict[str, Any]]) -> list[str]:
    """A row a record; by acceptance what the width rule reaches, the best fixed block, and where blocks break even."""
    accepts = sorted({c["accept"] for record in records for block in record["summary"]["blocks"] for c in block["cells"]})
    lines = [
        "| shape, random weights | " + " | ".join(f"accept {a:g}" for a in accepts) + " | break-even at block |",
        "| --- |" + " --- |" * (len(accepts) + 1),
    ]
    for record in records:
        blocks = record["summary"]["blocks"]
        by = {(b["block_size"], c["accept"]): c["speedup"] for b in blocks for c in b["cells"]}
        cells = []
        for a in accepts:
            fixed = {K: up for (K, accept), up in by.items() if accept == a and K is not None}
            best = max(fixed, key=fixed.get, default=None)
            parts = [f"{by[None, a]:.2f}"] if (None, a) in by else []
            cells.append(", ".join(parts + ([f"best {fixed[best]:.2f} ({best})"] if best else [])))
        even = [(b["block_size"], b["break_even"]) for b in blocks if b["block_size"] is not None]
        marks = ", ".join(f"{K}: {'never' if e is None else format(e, '.2f')}" for K, e in even)
        lines.append(f"| {label(record)} | " + " | ".join(cells) + f" | {marks} |")
    return lines


def peer_table(records: Sequence[dict[str, Any]]) -> list[str]:
    """A row a side, a column a record: median speed over mlx-lm's over all kinds, and how often it said what mlx-lm says."""
    heads = [f"{r['pair']}, {r['settings']['dtype']}, {r['machine']['chip']}" for r in records]
    lines = ["| decoding, times mlx-lm | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(records)]
    rows = [{row["side"]: row for row in r["summary"] if row["kind"] == "all"} for r in records]
    for side in dict.fromkeys(side for of in rows for side in of):
        cells = [
            f"{of[side]['ratio']:.2f}, same text {of[side]['equal']}/{of[side]['pairs']}" if side in of else "" for of in rows
        ]
        lines.append(f"| {side} | " + " | ".join(cells) + " |")
    return lines


def reports(results: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Users' reports by file name.

    Raises:
      ValueError: a file is no report, or of another format.
    """
    found = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("report-*.json"))}
    for name, record in found.items():
        if (record.get("what"), record.get("format")) != (WHAT, 1):
            given = f"{record.get('what')!r} of format {record.get('format')}"
            raise ValueError(f"{name} is {given}; it must be {WHAT!r} of format 1. Take it out of bench/results.")
    return found


def report_tables(found: Sequence[dict[str, Any]]) -> list[str]:
    """Pairs: a row a machine, pair and kernels off or on. Kernels: a row a machine and shape, us of the quickest right plan over
    stock MLX's at each row count.
    """
    sides = ("mlx_lm", "width_0", "drafting", "policy")
    lines = ["| machine | pair | kernels | mlx-lm, tokens/s | no drafts | drafting | policy | tau | text |"]
    lines.append("| --- |" + " --- |" * 8)
    for r in found:
        machine = " ".join([r["machine"]["chip"], *([f"macOS {r['machine']['macos']}"] if r["machine"]["macos"] else [])])
        for p in r["pairs"]:
            of = {side: p.get("sides", {}).get(side, {}) for side in sides}
            speeds = [f"{of[side]['decode_tps']:.1f}" if "decode_tps" in of[side] else "" for side in sides]
            timed = [o for o in of.values() if "decode_tps" in o]
            same = "same" if timed and all(o["differs_at"] is None for o in timed) else "differs" if timed else p["process"]
            tau = f"{of['drafting']['tau']:.2f}" if of["drafting"].get("tau") else ""
            lines.append("| " + " | ".join([machine, p["pair"], p["kernels"], *speeds, tau, same]) + " |")
    counts = (1, 2, 4, 8, 16)
    heads = " | ".join(f"{n} {'row' if n == 1 else 'rows'}" for n in counts)
    table = [f"| machine | kernel | shape | {heads} |", "| --- |" + " --- |" * (2 + len(counts))]
    for r in found:
        for part in r["kernels"]:
            for what in dict.fromkeys(e["what"] for e in part.get("entries", [])):
                best = {e["rows"]: e for e in quickest([e for e in part["entries"] if e["what"] == what])}
                cells = [f"{best[n]['kernel_us']:.0f} / {best[n]['stock_us']:.0f}" if n in best else "" for n in counts]
                table.append("| " + " | ".join([r["machine"]["chip"], part["kernel"], what, *cells]) + " |")
    return [*lines, "", *([*table, ""] if len(table) > 2 else [])]


def section(results: Path = RESULTS) -> str:
    """All that stands between docs/benchmarks.md's markers."""
    pairs, shapes = read("bench-*.json", results), read("shapes-*.json", results)
    shapes = {name: record for name, record in shapes.items() if record["summary"]["blocks"]}
    groups: dict[tuple, dict] = {}
    for name, record in pairs.items():
        groups.setdefault(tuple(record["settings"]["kinds"]), {})[name] = record
    lines = []
    for group in groups.values():
        lines += [*pair_table(list(group.values())), "", *(about(name, record) for name, record in group.items()), ""]
    if shapes:
        lines += [
            "Drafts that are right at a set rate, at the shapes of larger models (`bench/shapes.py`): the width rule's speed-up, "
            "the best fixed block, and the acceptance from which a block pays:",
            "",
            *shape_table(list(shapes.values())),
            "",
        ]
    if peers := list(read("peers-*.json", results).values()):
        lines += ["The same pair through other implementations, each with its own defaults (`bench/peers.py`):", ""]
        lines += [*peer_table(peers), ""]
    if sent := list(reports(results).values()):
        lines += ["What users' machines said (`dflash-mlx doctor --report`); kernels in us, ours over stock MLX's:", ""]
        lines += report_tables(sent)
    return "\n".join(lines).strip() or "No speed is recorded yet."


def put(page: str, text: str) -> str:
    """The page with the text between its markers replaced.

    Raises:
      ValueError: the markers are not there once each, in order.
    """
    head, found, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (found and end) or BEGIN in tail or END in tail:
        raise ValueError(f"expected {BEGIN} and {END} once each in docs/benchmarks.md; found otherwise. Put them back.")
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def here(record: dict[str, Any], max_seconds: float | None, out: Path) -> dict[str, Any]:
    """Repeat one record on this machine, in the number type that is usual here and with a drafter of the record's bits."""
    from dflash_mlx import load, load_drafter
    from dflash_mlx.loading import activation_dtype
    from dflash_mlx.train.start import dense

    model, tokenizer = load(record["model"])
    write_out = not record["weights"]["bits"] and bool(bench.weights_of(model)["bits"])
    model = dense(model, activation_dtype(model)) if write_out else model
    drafter = load_drafter(record["draft_model"], model, bits="none")
    if (held := record.get("draft_bits")) and not bench.bits_of(drafter):
        drafter = load_drafter(record["draft_model"], model, bits=held[0])
    drafter = dense(drafter, activation_dtype(model)) if write_out else drafter
    out.parent.mkdir(exist_ok=True)
    names = (record["model"], record["draft_model"])
    runs = bench.Bench(
        model,
        tokenizer,
        drafter,
        bench.plan_of(record),
        names=names,
        say=print,
        keep=lambda r: bench_record.write_record(r, out),
        max_seconds=max_seconds,
    )
    return runs.go()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--write", action="store_true")
    p.add_argument("--here", action="store_true")
    p.add_argument("--only", default="bench-", help="records whose file names begin so")
    p.add_argument("--max-seconds", type=float)
    args = p.parse_args()
    if args.here:
        for name, record in read(f"{args.only}*.json").items():
            print(f"\n{name} (A: there, B: here)", flush=True)
            mine = here(record, args.max_seconds, ROOT / "bench" / "here" / name)
            print(bench_record.compare(record, mine), flush=True)
            if mine["ended"] == "interrupted":
                p.exit(130)
        return
    page = ROOT / "docs" / "benchmarks.md"
    if args.write:
        page.write_text(put(page.read_text(encoding="utf-8"), section()), encoding="utf-8")
    else:
        print(section())


if __name__ == "__main__":
    main()
