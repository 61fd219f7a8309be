"""`dflash-mlx bench --plot`: a record's speed-ups as a PNG, by matplotlib.

Knows records, as `bench` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .bench_prompts import BenchError
from .bench_record import header


def plot(record: Mapping[str, Any], path: str | Path) -> None:
    """Speed-up by kind as a PNG: a bar for every temperature and context, whiskers from the least to the largest.

    Raises:
      BenchError: matplotlib is missing, or the record holds no figures.
    """
    figure, axes = _pyplot().subplots(figsize=(9, 4.5), layout="constrained")
    rows = record["summary"]
    if not rows:
        raise BenchError("this record holds no figures to plot", "Let the benchmark run longer")
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    series = list(dict.fromkeys((row["temp"], row["context"]) for row in rows))
    bar = 0.8 / len(series)
    for i, (temp, context) in enumerate(series):
        of = {row["kind"]: row for row in rows if (row["temp"], row["context"]) == (temp, context)}
        at = [kinds.index(kind) + (i - (len(series) - 1) / 2) * bar for kind in of]
        ups = [row["speedup"] for row in of.values()]
        spread = [
            [up - row["low"] for up, row in zip(ups, of.values(), strict=True)],
            [row["high"] - up for up, row in zip(ups, of.values(), strict=True)],
        ]
        label = f"T = {temp:g}" + (f", {context:,} tokens before" if context else "")
        axes.bar(at, ups, bar * 0.92, yerr=spread, capsize=2, error_kw={"linewidth": 0.8}, label=label)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel("decoding, times mlx-lm")
    axes.set_title(header(record).splitlines()[0], fontsize=8)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    _pyplot().close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise BenchError("a plot needs matplotlib, which is not installed", "Run: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_plot() -> None:
    """Find out before a long run whether `plot` will work at its end.

    Raises:
      BenchError: matplotlib is missing.
    """
    _pyplot()
