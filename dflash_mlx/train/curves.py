"""The curves of a training run as one page that needs nothing else, from the lines of its metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..machine import write_atomically
from ..tools import svg


def write_curves(out: str | Path, path: str | Path) -> None:
    """Draw what a run has written so far. Does nothing before the first line."""
    file = Path(out) / "metrics.jsonl"
    if file.is_file():
        found = [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines() if text.strip()]
        write_atomically(path, page(Path(out).name, found))


def page(name: str, found: list[dict[str, Any]]) -> str:
    """The whole page as text. found: lines of metrics.jsonl."""

    def of(key: str) -> list[tuple[float, float]]:
        return [(line["step"], line[key]) for line in found if key in line]

    kept = {"training text, from random places": of("run"), "held-out text": of("tau_heldout")}
    kept = {label: points for label, points in kept.items() if points}
    hits = next((line["hits"] for line in reversed(found) if line.get("hits")), [])
    parts = []
    if losses := of("loss"):
        parts.append(
            svg.lines("Loss", "mean over the blocks of the last steps", {"training": losses}, x_name="step", from_zero=False)
        )
    if kept:
        about = "drafts kept, and the model's own token; from random places more, as drafts there do not begin after a miss"
        parts.append(svg.lines("Tokens a round", about, kept, x_name="step"))
    if hits:
        series = {"last line": [(i + 1, hit) for i, hit in enumerate(hits)]}
        parts.append(
            svg.lines("Right drafts by position", "share of the training text's tokens", series, x_name="position in the draft")
        )
    if rate := of("lr"):
        parts.append(svg.lines("Learning rate", "", {"learning rate": rate}, x_name="step"))
    head = ["step", "loss", "tokens a round, at random", "on held-out text"]
    cells = lambda line: [f"{line[key]:.4g}" if key in line else "" for key in ("loss", "run", "tau_heldout")]  # noqa: E731
    parts.append(svg.rows(head, [[str(line["step"]), *cells(line)] for line in found if "step" in line]))
    return svg.page(f"Training of {name}", parts)
