"""`dflash-mlx doctor --report FILE`: describes and measures this machine in at most five minutes, in one JSON file to send.

The most important parts run first, each in a process of its own. One that hangs or dies does not disturb the others, and its
measurements so far are kept. The file is complete at any time and names the parts that there was no time for. It holds no path,
host name or user name.

    part           of it
    machine        chip, cores, memory, working set, system, Python, wheels, power, heat
    kernels, 8B    each text: compiled or why not, right, rows equal, us beside stock MLX at 1, 2, 4, 8 and 16 rows
    pairs          tiny, and smollm2 where it is cached, kernels off and on: ids, tokens/s, parts of a round
    kernels, 27B   as 8B

Knows how parts are run and put together; `kernel_run` and `pair_run` measure. Prints nothing.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..kernels import autotune, names
from ..machine import switches_set
from ..pairs.builtin import BUILTIN_PAIRS, at_hand
from . import system
from .bench_record import write_record
from .place import versions
from .private_names import cleaner

FORMAT = 1
WHAT = "dflash-mlx doctor --report"
TEMPLATE = ".github/ISSUE_TEMPLATE/report.yml"
BUDGET_S = 300.0
# Seconds: kept for the last write; least time for a part to start; what a process gets beyond its time before it is ended.
_RESERVE_S, _LEAST_S, _GRACE_S = 5.0, 8.0, 5.0
_KERNELS_S, _PAIR_S = 30.0, 40.0
MODELS = ("8B", "27B")
# This program's own words, and makers'.
_WORDS = ("chip", "cpu", "gpu", "device", "architecture", "kernel", "plan", "what", "pair", "name", "send")


@dataclass(frozen=True)
class Part:
    """A process: `module` with `arguments`, then the file that it writes and the time (of the epoch) at which it is to end.

    group: of the record, "kernels" or "pairs". about: what is known of its result beforehand. most_s: of its time.
    """

    name: str
    group: str
    module: str
    arguments: tuple[str, ...]
    most_s: float
    about: Mapping[str, Any]
    environment: Mapping[str, str]


# What runs a part: (part, seconds) -> (its record so far, how it ended: "" for well).
Runner = Callable[[Part, float], tuple[dict[str, Any], str]]


def make_report(
    path: str | Path, say: Callable[[str], None] = lambda text: None, budget_s: float = BUDGET_S, runner: Runner | None = None
) -> dict[str, Any]:
    """Run all parts and keep `path` up to date; Ctrl-C ends it with what is measured.

    Args:
      say: called with one line per part. runner: replaces processes, for tests.
    Raises:
      OSError: the file cannot be written, found out before anything runs.
    """
    began, clean, runner = time.monotonic(), cleaner(_WORDS), runner or run_part
    record: dict[str, Any] = {
        "what": WHAT,
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "ended": "unfinished",
        "seconds": 0.0,
        "versions": versions(),
        "environment": switches_set(),
        "machine": system.facts(),
        "kernels": [],
        "pairs": [],
        "parts": [],
        "cut": [],
        "faults": [],
        "send": send_line(),
    }
    record["faults"] = system.faults(record["machine"])

    def keep() -> None:
        record["seconds"] = round(time.monotonic() - began, 1)
        write_record(clean(record), path)

    keep()
    parts = list(planned_parts())
    record["kernels"] += without_a_gpu()
    try:
        while parts:
            left = budget_s - _RESERVE_S - (time.monotonic() - began)
            if left < _LEAST_S:
                break
            # More than its own where there is more than all need.
            part, seconds = parts[0], min(left, max(parts[0].most_s, left / len(parts)))
            say(f"{part.name} (at most {seconds:.0f} s; {left:.0f} s are left)")
            _do(part, runner, seconds, record)
            parts.pop(0)
            keep()
        record["ended"] = "out of time" if parts else "complete"
    except KeyboardInterrupt:
        record["ended"] = "interrupted"
    record["cut"] += [f"{part.name}: {record['ended']}" for part in parts]
    record["machine"]["power_after"] = system.power()
    keep()
    return clean(record)


def _do(part: Part, runner: Runner, seconds: float, record: dict[str, Any]) -> None:
    """Run a part and put what it found into the record, also when Ctrl-C ends it."""
    begin, found, ended = time.monotonic(), {}, "interrupted"
    try:
        found, ended = runner(part, seconds)
    except PartInterrupted as stopped:
        found = stopped.found
        raise KeyboardInterrupt from None
    finally:
        record["parts"].append({"name": part.name, "seconds": round(time.monotonic() - begin, 1), "ended": ended or "complete"})
        stopped = [ended] if ended.startswith("stopped") or found.get("ended") == "out of time" else []
        record["cut"] += [f"{part.name}: {what or 'fewer runs than planned'}" for what in [*stopped, *found.get("cut", [])]]
        if ended or found:
            record[part.group].append(dict(part.about) | found | {"process": ended or "complete"})


class PartInterrupted(KeyboardInterrupt):
    """Ctrl-C in a part; `found` is what it had written."""

    def __init__(self, found: dict[str, Any]):
        super().__init__()
        self.found = found


def run_part(part: Part, seconds: float) -> tuple[dict[str, Any], str]:
    """Run a part in a process of its own.

    Raises:
      PartInterrupted: at Ctrl-C, which ends the process too.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        # It ends by itself, its imports included, and is ended where it does not.
        until = time.time() + max(seconds - _GRACE_S, seconds / 2)
        command = [sys.executable, "-m", part.module, *part.arguments, str(out), str(until)]

        def found() -> dict[str, Any]:
            try:
                return json.loads(out.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return {}

        environment = {**os.environ, **part.environment}
        try:
            done = subprocess.run(
                command, timeout=seconds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                text=True, errors="replace", env=environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return found(), f"stopped after {seconds:.0f} s"
        except KeyboardInterrupt:
            raise PartInterrupted(found()) from None
        if done.returncode in (130, -2):
            raise PartInterrupted(found())
        if done.returncode:
            last = [line for line in done.stderr.strip().splitlines() if line.strip()][-2:]
            return found(), f"its process ended with {done.returncode}: {' | '.join(last) or 'nothing said'}"
        return found(), ""


def planned_parts() -> Iterator[Part]:
    """All parts, the most important first."""
    first, *rest = MODELS
    yield from _kernel_parts(first)
    yield from _pair_parts()
    for model in rest:
        yield from _kernel_parts(model)


def _kernel_parts(model: str) -> Iterator[Part]:
    if not autotune.has_gpu():
        return
    on = "metal" if mx.metal.is_available() else "cuda"
    for name in names(on=on, text=True):
        about = {"kernel": name, "model": model}
        module = f"{__package__}.kernel_run"
        yield Part(f"kernel {name}, {model} shapes", "kernels", module, (name, model), _KERNELS_S, about, {})


def _pair_parts() -> Iterator[Part]:
    settings = ("off", "on") if autotune.has_gpu() else ("off",)
    for pair in sorted(BUILTIN_PAIRS, key=lambda name: name != "tiny"):
        if at_hand(pair):
            for setting in settings:
                about, given = {"pair": pair, "kernels": setting}, {autotune.VARIABLE: setting}
                name = f"pair {pair}, kernels {setting}"
                yield Part(name, "pairs", f"{__package__}.pair_run", (pair,), _PAIR_S, about, given)


def without_a_gpu() -> list[dict[str, Any]]:
    """Why texts do not run here: one entry each, [] where there is a GPU."""
    if autotune.has_gpu():
        return []
    why = "MLX sees no GPU here" if mx.default_device() == mx.cpu else "kernels need a GPU"
    return [{"kernel": name, "model": None, "process": f"not run: {why}", "entries": []} for name in names(text=True)]


def send_line() -> str:
    """Where the file goes."""
    return f"attach this file to a new issue of this project, with the template {TEMPLATE}"


# ---- for people


def summary(record: Mapping[str, Any], path: str | Path) -> list[str]:
    """The record in a screenful."""
    lines = [*system.lines(record["machine"]), *_kernel_lines(record["kernels"]), *_pair_lines(record["pairs"])]
    lines += [f"cut         {text}" for text in record["cut"]] + [f"fault       {text}" for text in record["faults"]]
    where = Path(path)
    return [
        *lines,
        f"\nWritten in {record['seconds']:.0f} s ({record['ended']}): {where}",
        f"It holds no path, no host name and no user name. To send it, {record['send'].replace('this file', str(where))}.",
    ]


def _kernel_lines(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a shape and quickest plan: right or not, and times at 1 and 16 rows over stock MLX's."""
    if parts and not any(part["entries"] for part in parts) and len({part["process"] for part in parts}) == 1:
        return [f"kernels     {parts[0]['process']}"]
    lines = []
    for part in parts:
        for shape, entries in _by_shape(part.get("entries", [])).items():
            bad = next((_fault(e) for e in entries if _fault(e)), None)
            told = ", ".join(f"{e['rows']} rows {e['kernel_us']:.0f}/{e['stock_us']:.0f} us" for e in quickest(entries))
            lines.append(f"kernel      {part['kernel']} {shape}: {bad or 'right, rows equal'}; {told or 'no times'}")
        if part["process"] != "complete":
            lines.append(f"kernel      {part['kernel']}: {part['process']}")
    return lines


def _by_shape(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list] = {}
    for entry in entries:
        found.setdefault(entry["what"], []).append(entry)
    return found


def _fault(entry: Mapping[str, Any]) -> str | None:
    """What is wrong with one plan at one row count."""
    if entry.get("refused"):
        return f"REFUSED: {entry['refused']}"
    if entry.get("wrong"):
        return f"WRONG: {entry['wrong']}"
    return "ROWS DIFFER" if entry.get("rows_bit_equal") is False else None


def quickest(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """For each row count, the quickest plan that is right."""
    best: dict[int, Mapping[str, Any]] = {}
    for entry in entries:
        rows, us = entry["rows"], entry.get("kernel_us")
        if us and entry.get("stock_us") and not _fault(entry) and (rows not in best or us < best[rows]["kernel_us"]):
            best[rows] = entry
    return [best[rows] for rows in sorted(best)]


def _pair_lines(pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for found in pairs:
        name = f"pair        {found['pair']}, kernels {found['kernels']}"
        sides = {side: of for side, of in found.get("sides", {}).items() if "decode_tps" in of}
        speeds = ", ".join(f"{side} {of['decode_tps']:.1f}" for side, of in sides.items())
        parted = [f"{side} at token {of['differs_at']}" for side, of in sides.items() if of["differs_at"] is not None]
        same = f"ids part from mlx-lm's: {', '.join(parted)}" if parted else "ids are mlx-lm's"
        ended = "" if found["process"] == "complete" else f" ({found['process']})"
        lines.append(f"{name}: {speeds + ' tokens/s; ' + same if sides else 'no run ended'}{ended}")
    return lines
