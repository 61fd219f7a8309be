"""A built-in pair in this process, with kernels as DFLASH_MLX_KERNELS says: ids, tokens/s and the parts of a round.

    python -m dflash_mlx.tools.pair_run tiny out.json $(($(date +%s) + 40))

Sides: `mlx_lm` alone; `width_0`, our loop without drafts; `drafting`, the drafter's own block in every round; `policy`, what a
user gets. They take turns; a side's figures are medians of its runs. A target without a quantized layer is quantized to 4 bits
first, or the kernels for quantized products would have no work. The record is written after each run, for one that dies.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm

from ..generation import stream_generate
from ..kernels import autotune
from ..loading import load, load_drafter
from ..pairs.builtin import BUILTIN_PAIRS
from .bench import first_difference, margin, timed
from .bench_prompts import chat_ids
from .bench_record import write_record
from .place import weights_of

TOKENS, TRIALS, WARM_UP = 128, 3, 8
GROUP, BITS = 32, 4
# Ids that the record shows.
_SHOWN = 48


def run(pair: str, seconds: float, keep: Callable[[dict], None], tokens: int = TOKENS) -> dict[str, Any]:
    """Load the pair and let the sides take turns until each has run `TRIALS` times or the time is over.

    Args:
      seconds: no run begins that would end later; keep: given the record after each run.
    """
    end = time.perf_counter() + seconds
    record: dict[str, Any] = {"pair": pair, "tokens": tokens, "ended": "unfinished", "sides": {}}
    model, tokenizer = load(pair)
    if not weights_of(model)["bits"]:
        nn.quantize(model, GROUP, BITS)
        record["quantized_here"] = True
    drafter = load_drafter(pair, model)
    record |= {"weights": weights_of(model), "drafter_sha256": drafter.digest(), "block_size": drafter.config.block_size}
    prompt = chat_ids(tokenizer, BUILTIN_PAIRS[pair].prompt)

    def responses(side: str, most: int) -> Iterator[Any]:
        if side == "mlx_lm":
            return mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=most)
        block_size = {"width_0": 1, "drafting": drafter.config.block_size, "policy": None}[side]
        return stream_generate(model, tokenizer, prompt, max_tokens=most, draft_model=drafter, block_size=block_size)

    runs: dict[str, list[dict]] = {"mlx_lm": [], "width_0": [], "drafting": [], "policy": []}
    ids: dict[str, list[int]] = {}
    longest = 0.0
    keep(record)
    for trial in range(TRIALS + 1):
        for side in runs:
            began = time.perf_counter()
            # The first time is for what is compiled and measured then.
            if trial and began + longest > end:
                record["ended"] = "out of time"
                return record
            figures, ids[side] = timed(responses(side, tokens if trial else WARM_UP), len(prompt))
            if trial:
                longest = max(longest, time.perf_counter() - began)
                runs[side].append(figures)
                record["sides"][side] = _side(runs[side], ids[side], ids["mlx_lm"])
                if (at := record["sides"][side]["differs_at"]) is not None and at < min(len(ids[side]), len(ids["mlx_lm"])):
                    theirs = ids["mlx_lm"]
                    record["sides"][side]["margin"] = margin(model, [*prompt, *theirs[:at]], theirs[at], ids[side][at])
            else:
                if side == "policy":
                    drafter.pair.finish_measuring()
                record["sides"][side] = {"warm_up_s": time.perf_counter() - began}
            record["verdicts"] = [asdict(result) for result in autotune.results()]
            keep(record)
    record["ended"] = "complete"
    return record


def _side(runs: Sequence[dict[str, Any]], ids: list[int], plain: list[int]) -> dict[str, Any]:
    """Medians of a side's runs, and where its ids part from mlx-lm's (None: nowhere)."""
    median = {name: statistics.median(of) for name in ("decode_tps", "ttft_s") if (of := [r[name] for r in runs if r[name]])}
    last = runs[-1]
    found = {"runs": len(runs), **median, "peak_memory_gb": last["peak_memory_gb"], "ids": ids[:_SHOWN]}
    found["differs_at"] = first_difference(plain, ids)
    if rounds := last.get("rounds"):
        found |= {name: last[name] for name in ("tau", "rounds", "widths", "accepted", "width_reason")}
        found["ms_a_round"] = {part: 1e3 * spent / rounds for part, spent in last["seconds"].items()}
    return found


def main() -> None:
    """`pair_run PAIR OUT UNTIL`, seconds of the epoch."""
    pair, out, until = sys.argv[1:]
    path = Path(out)
    record = run(pair, float(until) - time.time(), lambda so_far: write_record(so_far, path))
    record["device"] = str(mx.default_device())
    write_record(record, path)


if __name__ == "__main__":
    main()
