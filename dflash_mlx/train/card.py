"""The card of a trained drafter: what it was made of, for readers and as JSON. Knows a finished run; decides nothing in it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..machine import write_atomically
from .docs import Docs

if TYPE_CHECKING:
    from .trainer import Trainer


@dataclass(frozen=True)
class Source:
    """Where a drafter comes from. target: its name; digest: of the target's weight files, if it has any."""

    target: str = ""
    digest: str | None = None
    data: tuple[str, ...] = ()


def write_card(out: Path, trainer: Trainer, docs: Docs, line: dict[str, Any], source: Source) -> None:
    """README.md beside the drafter, with the same facts as JSON at its end. line: the last one of metrics."""
    c, shape = trainer.config, trainer.raw
    facts = {
        "architecture": shape["architectures"][0],
        "target": source.target,
        "target_sha256": source.digest,
        "data": list(source.data),
        "conversations": len(docs),
        "answer_tokens": docs.answer_tokens(),
        "temperatures": {f"{t:.3g}": int((docs.temp == t).sum()) for t in np.unique(docs.temp)},
        "steps": trainer.step,
        "seconds": round(trainer.elapsed, 1),
        "conversations_seen": trainer.step * c.batch * c.accumulate,
        "block_size": trainer.K,
        "tau_heldout": line.get("tau_heldout"),
        "best_tau_heldout": trainer.best,
        "settings": asdict(c),
    }
    tau = "not measured: there was no held-out text" if trainer.best is None else f"{trainer.best:.3f}"
    rows = {
        "architecture": f"{facts['architecture']}, {shape['num_hidden_layers']} layers, block {trainer.K}",
        "target": f"{facts['target'] or 'not named'}, SHA-256 {facts['target_sha256'] or 'not known'}",
        "text": f"{facts['answer_tokens']:,} answer tokens in {facts['conversations']:,} conversations by the target",
        "conversations by temperature": ", ".join(f"{n:,} at {t}" for t, n in facts["temperatures"].items()),
        "seen": f"{facts['conversations_seen']:,} conversations in {trainer.step:,} steps, {trainer.elapsed:,.0f} s",
        "tau, greedy, held-out text": tau,
    }
    table = "\n".join(f"| {name} | {text} |" for name, text in rows.items())
    about = "tau: mean of accepted + 1 over verify rounds, from replaying known text. Held-out families are never trained on."
    text = f"# A DFlash drafter\n\n| | |\n| --- | --- |\n{table}\n\n{about}\n\n```json\n{json.dumps(facts, indent=1)}\n```\n"
    write_atomically(out / "README.md", text)
