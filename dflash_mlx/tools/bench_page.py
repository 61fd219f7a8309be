"""A record of `dflash-mlx bench` as one page that needs nothing else: pictures in it are SVG, and the record itself is in it.

Knows records, as `bench` writes them. Measures nothing.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..machine import write_atomically
from . import bench_batch, svg
from .bench_record import header, notes
from .columns import count

# Points of a line at most; more rounds are averaged.
_POINTS = 120


def write_page(record: Mapping[str, Any], path: str | Path) -> None:
    write_atomically(path, page(record))


def page(record: Mapping[str, Any]) -> str:
    """The whole page as text."""
    title = f"{record['model']} with {record['draft_model']}"
    parts = [f"<p>{escape(line)}</p>" for line in header(record).splitlines()]
    if "batches" in record:
        parts += _batches(record["batch_summary"])
    else:
        parts += [_speed_ups(record), _figures(record), _acceptance(record), _widths(record), _memory(record)]
    parts.append(_machine(record))
    parts += [f"<p>{escape(note)}</p>" for note in notes(record)]
    # "</script>" in a name must not end the element.
    inside = json.dumps(record).replace("<", "\\u003c")
    parts.append(f'<script type="application/json" id="record">{inside}</script>')
    return svg.page(title, parts)


def _series(record: Mapping[str, Any]) -> list[tuple[float, int]]:
    """(temperature, context) of the record's cells."""
    return list(dict.fromkeys((row["temp"], row["context"]) for row in record["summary"]))


def _name(temp: float, context: int) -> str:
    return f"temperature {temp:g}" + (f", {context:,} tokens before" if context else "")


def _speed_ups(record: Mapping[str, Any]) -> str:
    kinds = list(dict.fromkeys(row["kind"] for row in record["summary"]))
    found = {(row["kind"], row["temp"], row["context"]): row for row in record["summary"]}
    series = {}
    for cell in _series(record):
        of = [found.get((kind, *cell)) for kind in kinds]
        series[_name(*cell)] = [row and (row["speedup"], row["low"], row["high"]) for row in of]
    return svg.bars(
        "Speed-up by kind of prompt",
        "times mlx-lm's own decoding; whiskers from the least to the largest pair; 1 is no gain",
        kinds,
        series,
        line_at=1.0,
    )


def _figures(record: Mapping[str, Any]) -> str:
    head = ["kind", "temperature", "tokens before", "speed-up", "mlx-lm, tokens/s", "DFlash, tokens/s"]
    head += ["tokens a round", "equal texts"]
    body = []
    for row in record["summary"]:
        rates = [f"{row[name]:.1f}" if name in row else "" for name in ("mlx_lm_decode_tps", "dflash_decode_tps")]
        tau = f"{row['tau']:.2f}" if row["tau"] else ""
        same = f"{row['equal']} of {row['pairs']}"
        body.append([row["kind"], f"{row['temp']:g}", f"{row['context']}", f"{row['speedup']:.2f}", *rates, tau, same])
    return svg.rows(head, body)


def acceptance_by_position(runs: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(position, share): of the drafts that were verified at a position, those that were kept. Positions count from 1."""
    kept: Counter = Counter()
    verified: Counter = Counter()
    for run in runs:
        for width, n in run["dflash"]["widths"].items():
            verified.update(dict.fromkeys(range(1, int(width) + 1), n))
        for accepted, n in run["dflash"].get("accepted", {}).items():
            kept.update(dict.fromkeys(range(1, int(accepted) + 1), n))
    return [(position, kept[position] / n) for position, n in sorted(verified.items())]


def _by_temperature(record: Mapping[str, Any]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    for temp in dict.fromkeys(run["temp"] for run in record["runs"]):
        yield f"temperature {temp:g}", [run for run in record["runs"] if run["temp"] == temp]


def _acceptance(record: Mapping[str, Any]) -> str:
    series = {name: points for name, runs in _by_temperature(record) if (points := acceptance_by_position(runs))}
    if not series:
        return "<p>Acceptance by position: no draft was verified.</p>"
    title = "Acceptance by position"
    return svg.lines(title, "share of the verified drafts at a position that were kept", series, x_name="position in the draft")


def width_over_time(runs: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """(round, mean number of drafts verified in it), over the runs that have this round; [] for records without that."""
    orders = [order for run in runs if (order := run["dflash"].get("width_order"))]
    longest = max(map(len, orders), default=0)
    step = -(-longest // _POINTS) or 1
    points = []
    for start in range(0, longest, step):
        widths = [width for order in orders for width in order[start : start + step]]
        points.append((start + (min(step, longest - start) + 1) / 2, statistics.fmean(widths)))
    return points


def _widths(record: Mapping[str, Any]) -> str:
    series = {name: points for name, runs in _by_temperature(record) if (points := width_over_time(runs))}
    if not series:
        return "<p>Drafts over time: not in this record.</p>"
    about = "drafts verified in a round, mean over the answers; 0 is plain decoding"
    return svg.lines("Drafts over time", about, series, x_name="round")


def _memory(record: Mapping[str, Any]) -> str:
    kinds = list(dict.fromkeys(run["kind"] for run in record["runs"]))
    series = {}
    for side, name in (("mlx_lm", "mlx-lm"), ("dflash", "DFlash")):
        peaks = [max(run[side]["peak_memory_gb"] for run in record["runs"] if run["kind"] == kind) for kind in kinds]
        series[name] = [(peak, peak, peak) for peak in peaks]
    return svg.bars("Peak memory", "GB (1e9 bytes) that MLX held at most in an answer", kinds, series)


def _batches(summary: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A picture a temperature and context, tokens/s by rows; then all figures."""
    for temp, context in dict.fromkeys((row["temp"], row["context"]) for row in summary):
        of = [row for row in summary if (row["temp"], row["context"]) == (temp, context)]
        series = {name: [(row[f"{side}_tps"],) * 3 for row in of] for side, name in (("mlx_lm", "mlx-lm"), ("dflash", "DFlash"))}
        about = f"tokens/s of all rows together, prompts included; {_name(temp, context)}"
        yield svg.bars("Many prompts at once", about, [count(row["rows"], "row") for row in of], series)
    yield svg.rows(bench_batch.HEAD, [bench_batch.shown(row) for row in summary])


def _machine(record: Mapping[str, Any]) -> str:
    about = {name.replace("_gb", ", GB"): value for name, value in record["machine"].items()} | record["versions"]
    text = lambda value: ", ".join(map(str, value)) if isinstance(value, list) else str(value)  # noqa: E731
    return "<h2>Machine</h2>" + svg.rows(["", ""], [[name.replace("_", " "), text(value)] for name, value in about.items()])
