"""Bars and lines as SVG text that stands in a page of its own: no script, no style sheet, no address of anything outside.

Colours follow the reader's light or dark setting. Every bar and point says its figure when it is pointed at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#3b82c4", "#e08a2e", "#4a9d5b", "#b0508f", "#7a6fc2", "#8a8a8a")
_WIDTH, _HEIGHT = 720, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 14, 44

STYLE = """\
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; min-width: 34rem; height: auto; font: 12px system-ui, sans-serif; fill: currentColor; }
.wide { overflow-x: auto; } figure { margin: 2rem 0; } figcaption { font-weight: 600; } .about { font-weight: 400; opacity: .75; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { text-align: right; padding: .15rem .4rem; border-bottom: 1px solid #8884; }
td:first-child, th:first-child { text-align: left; }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page; `parts` are HTML already."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width"/>'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def ticks(least: float, most: float, about: int = 5) -> list[float]:
    """Round numbers from `least` to `most`: steps of 1, 2 or 5 times a power of ten."""
    span = (most - least) or abs(most) or 1.0
    rough = span / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(least / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(most / step + 1e-9) + 1)]


class _Plane:
    """Pixels of values, and the lines that say what they are."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]):
        self.x0, self.x1 = x
        self.y0, self.y1 = y
        self.parts: list[str] = []

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x0) / ((self.x1 - self.x0) or 1)
        up = (y - self.y0) / ((self.y1 - self.y0) or 1)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    def line(self, x0: float, y0: float, x1: float, y1: float, style: str) -> None:
        self.parts.append(f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" {style}/>')

    def text(self, x: float, y: float, text: str, anchor: str = "middle") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def heights(self) -> None:
        """Lines and numbers of the upright axis."""
        for value in ticks(self.y0, self.y1):
            y = self.at(self.x0, value)[1]
            self.line(_LEFT, y, _WIDTH - _RIGHT, y, 'stroke="#8884"')
            self.text(_LEFT - 6, y + 4, f"{value:g}", "end")

    def legend(self, names: Sequence[str]) -> None:
        x = float(_LEFT)
        for i, name in enumerate(names):
            self.parts.append(f'<rect x="{x:.1f}" y="{_HEIGHT - 13}" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>')
            self.text(x + 14, _HEIGHT - 4, name, "start")
            x += 26 + 6.5 * len(name)

    def figure(self, title: str, about: str) -> str:
        drawing, view = "".join(self.parts), f"0 0 {_WIDTH} {_HEIGHT}"
        return (
            f'<figure><figcaption>{escape(title)} <span class="about">{escape(about)}</span></figcaption>\n'
            f'<div class="wide"><svg viewBox="{view}" role="img" aria-label="{escape(title)}">{drawing}</svg></div>'
            "</figure>"
        )


def bars(
    title: str,
    about: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[tuple[float, float, float] | None]],
    *,
    line_at: float | None = None,
) -> str:
    """A bar a group and series: (value, least, most), the last two as a whisker; None: no bar. line_at: a line across."""
    tops = [max(value) for values in series.values() for value in values if value]
    plane = _Plane((0, max(len(groups), 1)), (0, max([*tops, line_at or 0]) * 1.08 or 1))
    plane.heights()
    width = 0.8 / max(len(series), 1)
    for i, (name, values) in enumerate(series.items()):
        for group, value in enumerate(values):
            if value is None:
                continue
            x0, top = plane.at(group + 0.1 + i * width, value[0])
            x1, foot = plane.at(group + 0.1 + (i + 0.92) * width, 0)
            plane.parts.append(
                f'<rect x="{x0:.1f}" y="{top:.1f}" width="{x1 - x0:.1f}" height="{foot - top:.1f}" '
                f'fill="{COLOURS[i % len(COLOURS)]}"><title>{escape(f"{groups[group]}, {name}: {value[0]:.4g}")}</title></rect>'
            )
            if value[1] < value[2]:
                middle = (x0 + x1) / 2
                plane.line(middle, plane.at(0, value[1])[1], middle, plane.at(0, value[2])[1], 'stroke="currentColor"')
    for group, name in enumerate(groups):
        plane.text(plane.at(group + 0.5, 0)[0], _HEIGHT - _BOTTOM + 16, name)
    if line_at is not None:
        y = plane.at(0, line_at)[1]
        plane.line(_LEFT, y, _WIDTH - _RIGHT, y, 'stroke="currentColor" stroke-dasharray="4 3"')
    plane.legend(list(series))
    return plane.figure(title, about)


def lines(
    title: str, about: str, series: Mapping[str, Sequence[tuple[float, float]]], *, x_name: str = "", from_zero: bool = True
) -> str:
    """A line a series of (x, y) points, and each point where they are few."""
    points = [point for values in series.values() for point in values]
    xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
    least = 0.0 if from_zero else min(ys)
    plane = _Plane((min(xs), max(xs)), (least, least + ((max(ys) - least) * 1.08 or 1)))
    plane.heights()
    # Rounds, positions and steps are whole numbers.
    for x in (x for x in ticks(plane.x0, plane.x1, 8) if x == int(x)):
        plane.text(plane.at(x, 0)[0], _HEIGHT - _BOTTOM + 16, f"{x:g}")
    if x_name:
        plane.text(_WIDTH - _RIGHT, _HEIGHT - 4, x_name, "end")
    for i, (name, values) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        places = [plane.at(x, y) for x, y in values]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        # A line below another of the same values is seen through its gaps.
        dashes = ' stroke-dasharray="9 5"' if i else ""
        plane.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        for (x, y), (left, top) in zip(values, places, strict=True) if len(values) <= 200 else ():
            plane.parts.append(
                f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.5" fill="{colour}">'
                f"<title>{escape(f'{name}, {x:g}: {y:.4g}')}</title></circle>"
            )
    plane.legend(list(series))
    return plane.figure(title, about)


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table."""
    cells = lambda kind, values: "".join(f"<{kind}>{escape(value)}</{kind}>" for value in values)  # noqa: E731
    lines = "".join(f"<tr>{cells('td', values)}</tr>" for values in body)
    table = f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="wide">{table}</div>'
