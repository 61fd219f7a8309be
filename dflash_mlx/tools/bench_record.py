"""Records of `dflash-mlx bench`: read and written, summed up, shown as tables and sentences, and compared.

Knows records, which hold plain values only. `bench` makes them. Runs nothing.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..machine import write_atomically
from ..stats import is_off
from . import bench_batch
from .bench_prompts import BenchError
from .columns import align, count

FORMAT = 1
SIDES = ("mlx_lm", "dflash")
# The third side of exact runs: our loop without a drafter. DFlash's text must equal its text.
ALONE = "exact_alone"
# Tokens after which the draft-length policy should have settled.
EARLY = 64


def read_record(path: str | Path) -> dict[str, Any]:
    """A record written by `dflash-mlx bench --out`.

    Raises:
      BenchError: the file is something else.
    """
    try:
        record = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        known = (record["what"], record["format"]) == ("dflash-mlx bench", FORMAT)
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise BenchError(f"{path} is not a record of dflash-mlx bench in format {FORMAT}", "Make one with --out")
    return record


def write_record(record: Mapping[str, Any], path: str | Path) -> None:
    """Write a record whole or not at all."""
    path = Path(path).expanduser()
    write_atomically(path, json.dumps(record, indent=1) + "\n")


def summarise(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per cell, in the order of the runs, then one row of kind "all" per (temperature, context).

    Figures are medians over trials; `low` and `high` are the smallest and the largest speed-up; tau and mean width are over all
    rounds. In "all", speed-up is the geometric mean of the kinds, `low` and `high` are the slowest and the fastest kind.
    """
    groups: dict[tuple, list] = {}
    for run in runs:
        groups.setdefault((run["kind"], run["temp"], run["context"]), []).append(run)
    rows = [row for (kind, temp, context), group in groups.items() if (row := _row(kind, temp, context, group))]
    for temp, context in dict.fromkeys((row["temp"], row["context"]) for row in rows):
        of = [row for row in rows if (row["temp"], row["context"]) == (temp, context)]
        ups, taus = [row["speedup"] for row in of], [row["tau"] for row in of if row["tau"]]
        if len(of) > 1:
            rows.append(
                {"kind": "all", "temp": temp, "context": context, "pairs": sum(row["pairs"] for row in of)}
                | {"speedup": statistics.geometric_mean(ups), "low": min(ups), "high": max(ups)}
                | {"tau": statistics.fmean(taus) if taus else None}
                | {name: sum(row[name] for row in of) for name in ("equal", "loops")}
            )
    return rows


def _row(kind: str, temp: float, context: int, runs: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    timed = [run for run in runs if run["speedup"]]
    if not timed:
        return None
    ups, ours = [run["speedup"] for run in timed], [run["dflash"] for run in runs]
    widths: Counter = Counter()
    for run in ours:
        widths.update({int(width): n for width, n in run["widths"].items()})
    rounds, drafting = sum(widths.values()), sum(run["drafting_rounds"] for run in ours)
    median = {
        f"{side}_{name}": statistics.median(run[side][name] for run in timed)
        for side in SIDES
        for name in ("ttft_s", "decode_tps")
    }
    return {
        "kind": kind,
        "temp": temp,
        "context": context,
        "pairs": len(timed),
        "speedup": statistics.median(ups),
        "low": min(ups),
        "high": max(ups),
        "tau": sum(run["committed"] for run in ours) / drafting if drafting else None,
        "mean_width": sum(width * n for width, n in widths.items()) / rounds if rounds else 0.0,
        "plain_rounds": widths[0] / rounds if rounds else 0.0,
        # "copy": records of versions before the name changed.
        "copied_rounds": sum((run["sources"].get("prompt_lookup") or run["sources"]["copy"])["rounds"] for run in ours) / rounds
        if rounds
        else 0.0,
        "prompt_tokens": statistics.median(run["mlx_lm"]["prompt_tokens"] for run in runs),
        **median,
        **{f"{side}_memory_gb": max(run[side]["peak_memory_gb"] for run in runs) for side in SIDES},
        "equal": sum(run["differs_at"] is None for run in runs),
        "loops": sum(run["loops"] for run in runs),
    }


def header(record: Mapping[str, Any]) -> str:
    """Two lines: which models, on which machine, with which versions."""
    m, w, v = record["machine"], record["weights"], record["versions"]
    bits = f"{'/'.join(map(str, w['bits']))} bit, " if w["bits"] else ""
    held = f" ({'/'.join(map(str, record['draft_bits']))} bit)" if record.get("draft_bits") else ""
    packages = ", ".join(f"{name} {version}" for name, version in v.items() if name != "commit")
    return (
        f"{record['model']} ({bits}{w['dtype']}, {w['gb']:g} GB) with {record['draft_model']}{held} on {m['chip']}, "
        f"{m['memory_gb']:g} GB, {m['system']}, {record['date'][:10]}\n"
        f"{packages}{', commit ' + v['commit'] if 'commit' in v else ''}; load before: {m['load'][0]:g} on {m['cores']} cores"
    )


def table(record: Mapping[str, Any], width: int | None = None) -> str:
    """A record as text. width: columns of the terminal."""
    if "batch_summary" in record:
        return "\n".join([header(record), "", *bench_batch.table(record["batch_summary"], width), "", *notes(record)])
    speeds = [["kind", "T", "prompt", "mlx-lm", "DFlash", "speed-up", "tokens a round", "same"]]
    rest = [["kind", "T", "prompt", "first token, s", "memory, GB", "copied", "drafts verified"]]
    for row in record["summary"]:
        of = [run for run in record["runs"] if row["kind"] in (run["kind"], "all") and _same_cell(run, row)]
        what = [
            row["kind"],
            f"{row['temp']:g}",
            f"{row['prompt_tokens']:g}" if row["kind"] != "all" else str(row["context"] or ""),
        ]
        up, tau = f"{row['speedup']:.2f} ({row['low']:.2f}-{row['high']:.2f})", f"{row['tau']:.2f}" if row["tau"] else "-"
        tps = ["", ""] if row["kind"] == "all" else [f"{row[f'{side}_decode_tps']:.1f}" for side in SIDES]
        speeds.append([*what, *tps, up, tau, f"{row['equal']}/{len(of)}"])
        if row["kind"] != "all":
            both = [" ".join(f"{row[f'{side}_{name}']:.{n}f}" for side in SIDES) for name, n in (("ttft_s", 3), ("memory_gb", 2))]
            rest.append([*what, *both, f"{row['copied_rounds']:.0%}", f"{row['mean_width']:.1f}"])
    return "\n".join([header(record), "", *align(speeds, width), "", *align(rest, width), "", *notes(record)])


def _same_cell(run: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return (run["temp"], run["context"]) == (row["temp"], row["context"])


_MEANINGS = (
    "Tokens/s from the first token to the last; the sides take turns; medians (smallest-largest); all: the geometric mean of the "
    "kinds.",
    "tokens a round: kept drafts and the model's own token, per check of drafts. same: answers with exactly mlx-lm's text.",
    "Of two numbers the first is mlx-lm's. copied: share of checks whose drafts were copied from the text. drafts verified: mean "
    "of all passes.",
)


def notes(record: Mapping[str, Any]) -> list[str]:
    """What the figures mean, how the run ended, its first (cold) figures, and every text that differs from mlx-lm's."""
    lines = list(bench_batch.MEANINGS if "batches" in record else _MEANINGS)
    exact = is_exact(record)
    lines += _exact_notes(record) if exact else []
    if (thinking := record.get("thinking")) is not None:
        trained = f"trained {'with' if thinking['setting'] else 'without'} it ({thinking['stated_by']} says so)"
        lines.append(f"Thinking is {_on_off(thinking)} for both sides, because the drafter was {trained}.")
    cold = record["cold"]
    if all(side in cold for side in SIDES):
        lines.append(
            f"First run in the process (not counted above): first token after {cold['mlx_lm']['ttft_s']:.2f} s by mlx-lm, "
            f"{cold['dflash']['ttft_s']:.2f} s by DFlash; decoding {cold['mlx_lm']['decode_s']:.2f} and "
            f"{cold['dflash']['decode_s']:.2f} s."
            + (f" Warm-up in all: {record['warm_up_s']:.1f} s." if record["warm_up_s"] else "")
        )
    late = [run["late_speedup"] for run in record["runs"] if run["late_speedup"]]
    if late:
        lines.append(f"After the first {EARLY} tokens of an answer: {_median_of(late, ' times mlx-lm')}.")
    timed = [run for run in record["runs"] if run["speedup"] and run["dflash"].get("rounds")]
    costs = [(run["dflash"]["tokens"] - 1) / run["dflash"]["rounds"] / run["speedup"] for run in timed]
    if costs:
        took = _median_of(costs, " steps of mlx-lm")
        lines.append(f"On average a pass with its drafts took as long as {took}.")
    if record["ended"] != "complete":
        s = record["settings"]
        planned = s["trials"] * len(s.get("batch") or s["kinds"]) * len(s["temps"]) * len(s["contexts"])
        done = len(record["runs"]) + len(record.get("batches", ()))
        lines.append(f"This run is {record['ended']}: {done} of {count(planned, 'pair')}.")
    if looped := sum(run["loops"] for run in record["runs"]):
        lines.append(f"Answers that end in a loop: {looped}.")
    lines += _chosen(record) + bench_batch.notes(record.get("batches", ()))
    for run in record["runs"]:
        if run["differs_at"] is not None:
            near = f", {run['margin']:.3g} nats apart" if "margin" in run else ""
            where = f"{run['kind']}, T {run['temp']:g}, context {run['context']}, turn {run['trial'] + 1}"
            whose = "exact's without a drafter" if exact else "mlx-lm's"
            lines.append(f"Text differs from {whose} at token {run['differs_at']}{near} ({where}).")
    if faults(record):
        lines.append(f"{'With --exact' if exact else 'In float32 on a CPU'} that is a fault of this program: please report it.")
    elif _differing(record):
        lines.append("A pass over many rows may round differently from a pass over one row and flip a near tie.")
    return lines


def _on_off(thinking: Mapping[str, Any] | None) -> str:
    """A record's `thinking` in a word; None: the chat template's default."""
    return "by default" if thinking is None else "on" if thinking["setting"] else "off"


def is_exact(record: Mapping[str, Any]) -> bool:
    """Whether DFlash ran with exact=True. Older records do not have the setting."""
    return record["settings"].get("exact", False)


def _exact_notes(record: Mapping[str, Any]) -> list[str]:
    """What the texts were compared with, and what exact costs."""
    lines = ["same, with --exact: answers with the text of exact without a drafter, in place of mlx-lm's."]
    both = [(run["mlx_lm"]["decode_tps"], run[ALONE]["decode_tps"]) for run in record["runs"]]
    if costs := [plain / alone for plain, alone in both if plain and alone]:
        lines.append(f"Without a drafter an exact pass took {_median_of(costs, ' of an mlx-lm step')}.")
    return lines


def _median_of(values: Sequence[float], unit: str) -> str:
    """ "1.20 (1.10-1.30) times mlx-lm, median of 3 pairs"."""
    figures = f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"
    return f"{figures}{unit}, median of {count(len(values), 'pair')}"


def _chosen(record: Mapping[str, Any]) -> list[str]:
    """How many drafts the policy chose to verify, in answers where it could choose: one sentence for each reason."""
    free = [run["dflash"] for run in record["runs"] if run["dflash"]["width_reason"]]
    off = [ours for ours in free if is_off({"confidence_cut": {}, **ours})]
    of = f"of {count(len(record['runs']), 'answer')}"
    lines = [f"Drafting was off in {len(off)} {of}: it would be slower here. --block-size forces it."] if off else []
    for reason, n in Counter(ours["width_reason"] for ours in free if ours not in off).most_common(2):
        lines.append(f"In {n} {of}: {reason.replace('in most rounds', 'mostly').replace('rounds', 'passes')}.")
    return lines


def faults(record: Mapping[str, Any]) -> int:
    """Number of texts that differ where rounding cannot be the reason: float32 on a CPU, or exact runs."""
    certain = record["machine"]["device"] == "cpu" and record["weights"]["dtype"] == "float32"
    return _differing(record) if certain or is_exact(record) else 0


def _differing(record: Mapping[str, Any]) -> int:
    """Number of texts that differ from mlx-lm's; in exact runs, from those without a drafter."""
    return sum(run["differs_at"] is not None for run in record["runs"]) + bench_batch.differing(record.get("batches", ()))


def compare(a: Mapping[str, Any], b: Mapping[str, Any], width: int | None = None) -> str:
    """Two records side by side: settings that differ, then every cell that both have. width: as in `table`."""
    lines = ["A: " + header(a), "B: " + header(b), ""]
    pairs = [(f"settings {k}", a["settings"].get(k), b["settings"].get(k)) for k in a["settings"]]
    pairs += [(f"weights {k}", a["weights"].get(k), b["weights"].get(k)) for k in a["weights"]]
    pairs += [("drafter_sha256", *(record.get("drafter_sha256", "not recorded") for record in (a, b)))]
    pairs += [(k, a["versions"].get(k), b["versions"].get(k)) for k in {**a["versions"], **b["versions"]}]
    pairs += [("machine", a["machine"]["chip"], b["machine"]["chip"]), ("ended", a["ended"], b["ended"])]
    pairs += [("thinking", *(_on_off(record.get("thinking")) for record in (a, b)))]
    # A setting that an older record lacks was not there to set.
    lines += [f"differs: {name}: A {x}, B {y}" for name, x, y in pairs if x != y and (x or y)]
    of_b = {(row["kind"], row["temp"], row["context"]): row for row in b["summary"]}
    both = [(x, of_b[cell]) for x in a["summary"] if (cell := (x["kind"], x["temp"], x["context"])) in of_b]
    rows = [["kind", "T", "context", "mlx-lm A/B", "DFlash A/B", "speed-up A/B", "B/A", "tokens a round A/B"]]
    for x, y in both:
        names = [f"{side}_decode_tps" for side in SIDES]
        speeds = [f"{x[name]:.1f}/{y[name]:.1f}" if name in x and name in y else "" for name in names]
        taus = "/".join(f"{row['tau']:.2f}" if row["tau"] else "-" for row in (x, y))
        ups = [f"{x['speedup']:.2f}/{y['speedup']:.2f}", f"{y['speedup'] / x['speedup']:.2f}"]
        rows.append([x["kind"], f"{x['temp']:g}", str(x["context"]), *speeds, *ups, taus])
    if not any(x["context"] for x, _ in both):
        rows = [[*row[:2], *row[3:]] for row in rows]
    batches = bench_batch.compare(*(record.get("batch_summary", ()) for record in (a, b)), width)
    lines += [*(align(rows, width) if both else []), *batches] or ["No cell is in both."]
    return "\n".join(lines)
