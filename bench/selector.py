"""What a draft costs with each of several drafters of one target: launches on Metal, counted; time here, by turns in one run.

    python bench/selector.py --model smollm2 --draft-model smollm2 DRAFTER2 [--rows 16] [--context 256] [--turns 40] [--out R]

A draft is one drafter pass over a block and the choice of its ids: for DFlash 2 with candidates and the selector's path. `choice`
is the time from logits to ids. `over`: of the first drafter, median of ratios of the same turn, with both quarters. Launches are
those of `ledger.py`: of the draft's stage of a round, for the drafter's matrices as they are held.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from ledger_metal import Gpu, Ledger
from ledger_walk import Walk

from dflash_mlx import load, load_drafter
from dflash_mlx.models.drafter import Drafter


def launches(drafter: Drafter, rows: int, context: int) -> dict[str, int]:
    """Launches and bytes of the draft's stage, on an M3 Max."""
    found = Ledger(Walk(drafter, context).primitives(rows, rows // 2, rows // 2 + 1), Gpu(15, "s")).by_stage()["draft"]
    return {name: round(found[name]) for name in ("launches", "waits", "bytes")}


def drafts(drafter: Drafter, rows: int, context: int) -> tuple[Callable[[], mx.array], Callable[[], mx.array]]:
    """(a whole draft behind `context` tokens, the choice of ids from logits), each not yet evaluated."""
    config = drafter.config
    features = mx.random.normal((1, context, len(config.target_layer_ids) * config.target_hidden_size), key=mx.random.key(1))
    features = features.astype(drafter.norm.weight.dtype)
    cache, new = drafter.make_cache(), features[:, : rows // 2]
    drafter.inject(features, cache, 0)
    mx.eval([entry.state for entry in cache])
    anchor = mx.array([5])
    hidden = drafter.slots(anchor, new, cache, context, rows)
    logits, head = drafter._head(hidden), drafter._head
    mx.eval(hidden, logits)

    def whole() -> mx.array:
        for entry in cache:
            entry.trim(entry.offset - context)
        return drafter.draft(anchor, new, cache, context, rows)

    def choice() -> mx.array:
        drafter._head = lambda _: logits
        ids = drafter.choose(hidden, anchor)[0]
        drafter._head = head
        return ids

    return whole, choice


def by_turns(calls: list[Callable[[], mx.array]], turns: int) -> np.ndarray:
    """Seconds [turns, calls]; the order changes from turn to turn."""
    for call in calls:
        mx.eval(call())
    took = np.zeros((turns, len(calls)))
    for turn in range(turns):
        for i in np.roll(np.arange(len(calls)), turn):
            begun = time.perf_counter()
            mx.eval(calls[i]())
            took[turn, i] = time.perf_counter() - begun
    return took


def measure(args: argparse.Namespace) -> dict[str, Any]:
    model, _ = load(args.model)
    found = [load_drafter(name, model) for name in args.draft_model]
    record: dict[str, Any] = {"device": str(mx.default_device()), "mlx": mx.__version__, "rows": args.rows, "drafters": []}
    parts = [drafts(drafter, args.rows, args.context) for drafter in found]
    for name, drafter in zip(args.draft_model, found, strict=True):
        about = {"name": Path(name).name, "sha256": drafter.digest(), "class": type(drafter).__name__}
        record["drafters"].append(about | {"metal": launches(drafter, args.rows, args.context)})
    for place, what in enumerate(("whole", "choice")):
        took = by_turns([part[place] for part in parts], args.turns)
        over = took / took[:, :1]
        for i, entry in enumerate(record["drafters"]):
            quarters = [round(float(q), 3) for q in np.quantile(over[:, i], [0.25, 0.75])]
            entry[what] = {"ms": round(1e3 * float(np.median(took[:, i])), 3), "over": round(float(np.median(over[:, i])), 3)}
            entry[what] |= {"over_quarters": quarters}
    return record


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--draft-model", nargs="+", required=True)
    p.add_argument("--rows", type=int, default=16)
    p.add_argument("--context", type=int, default=256)
    p.add_argument("--turns", type=int, default=40)
    p.add_argument("--out", type=Path)
    record = measure(args := p.parse_args())
    print(json.dumps(record, indent=1))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
