"""`dflash-mlx bench --batch`: times mlx-lm's `batch_generate` and ours, taking turns, on the same prompts, several at once.

A cell is (rows, temperature, tokens of context before each prompt). The rows' prompts go through the kinds in turn, so a batch of
eight holds the prompts of a batch of four, and four more. `tps`: tokens of all rows over the seconds of the whole call, in which
both sides also read the prompts. At temperature 0 the ids of each row are compared. At others each side samples with its own
noise.

Knows the two functions and its part of a record. Prints nothing.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..batch.generator import batch_generate
from ..sampling import SamplingSettings
from ..stats import GenerationStats
from .columns import align, count

# The package has a function of the module's name.
_mlx_lm = importlib.import_module("mlx_lm.generate")

Cell = tuple[int, float, int]


class BatchSides:
    """Both functions over one pair, as a `bench.Plan` says; `ids` gives the prompt of ((kind, temp, context), trial)."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, drafter: nn.Module, plan: Any, kinds: Sequence[str], ids: Callable[..., list[int]]
    ):
        self.model, self.tokenizer, self.drafter, self.plan = model, tokenizer, drafter, plan
        self.kinds, self.ids = kinds, ids

    def cells(self) -> list[Cell]:
        return [(rows, temp, context) for context in self.plan.contexts for temp in self.plan.temps for rows in self.plan.batch]

    def prompts(self, cell: Cell, trial: int) -> list[list[int]]:
        """The rows' prompts: one of each kind, then the next of each."""
        rows, temp, context = cell
        n = len(self.kinds)
        return [self.ids((self.kinds[i % n], temp, context), trial + i // n) for i in range(rows)]

    def run(self, side: str, cell: Cell, trial: int, max_tokens: int) -> tuple[dict[str, Any], list[list[int]]]:
        """One batch: its figures, and the ids of each row without an EOS."""
        rows, temp, _ = cell
        prompts = self.prompts(cell, trial)
        sampler, processors = SamplingSettings(temp=temp, **self.plan.sampling).make(self.tokenizer)
        options = {"max_tokens": max_tokens, "return_token_ids": True, "sampler": sampler, "logits_processors": processors}
        if side == "dflash":
            call, seed = batch_generate, self.plan.seed + trial
            options |= {"draft_model": self.drafter, "block_size": self.plan.block_size, "max_batch": rows}
            options |= {"seeds": [seed + i for i in range(rows)]}
        else:
            call = _mlx_lm.batch_generate
            options |= {"completion_batch_size": rows}
        gc.collect()
        mx.reset_peak_memory()
        began = time.perf_counter()
        response = call(self.model, self.tokenizer, prompts, **options)
        seconds, tokens = time.perf_counter() - began, sum(map(len, response.token_ids))
        figures = {
            "prompt_tokens": sum(map(len, prompts)),
            "tokens": tokens,
            "seconds": seconds,
            "tps": tokens / seconds,
            "peak_memory_gb": mx.get_peak_memory() / 1e9,
        }
        return figures | (of_rows(response.stats) if side == "dflash" else {}), response.token_ids

    def pair(self, cell: Cell, trial: int, order: Sequence[str]) -> dict[str, Any]:
        """Both sides once, in an order, and how many rows said the same."""
        done = {side: self.run(side, cell, trial, self.plan.max_tokens) for side in order}
        (plain, said), (ours, also) = done["mlx_lm"], done["dflash"]
        return {
            **dict(zip(("rows", "temp", "context"), cell, strict=True)),
            "trial": trial,
            "first": order[0],
            "mlx_lm": plain,
            "dflash": ours,
            "speedup": ours["tps"] / plain["tps"] if plain["tps"] else None,
            "equal": sum(a == b for a, b in zip(said, also, strict=True)) if cell[1] == 0 else None,
        }


def of_rows(stats: Sequence[GenerationStats]) -> dict[str, Any]:
    """What drafting did in all rows of a batch: rounds of rows, those that drafted, their tokens, widths, and the reasons."""
    widths: Counter = Counter()
    for one in stats:
        widths.update(one.widths)
    return {
        "rounds": sum(one.n_rounds for one in stats),
        "drafting_rounds": sum(one.n_drafting for one in stats),
        "committed": sum(one.n_committed for one in stats),
        "widths": {str(width): n for width, n in sorted(widths.items())},
        "width_reasons": dict(Counter(one.width_reason for one in stats if one.width_reason).most_common()),
    }


def summarise(batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a cell, in the order of the batches: medians over trials; tau, widths and equal rows over all of them."""
    groups: dict[Cell, list] = {}
    for one in batches:
        groups.setdefault((one["rows"], one["temp"], one["context"]), []).append(one)
    return [_row(cell, group) for cell, group in groups.items()]


def _row(cell: Cell, group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ours, ups = [one["dflash"] for one in group], [one["speedup"] for one in group if one["speedup"]]
    widths: Counter = Counter()
    for one in ours:
        widths.update({int(width): n for width, n in one["widths"].items()})
    rounds, drafting = sum(widths.values()), sum(one["drafting_rounds"] for one in ours)
    return {
        **dict(zip(("rows", "temp", "context"), cell, strict=True)),
        "batches": len(group),
        **{f"{side}_tps": statistics.median(one[side]["tps"] for one in group) for side in ("mlx_lm", "dflash")},
        "speedup": statistics.median(ups) if ups else None,
        "low": min(ups, default=None),
        "high": max(ups, default=None),
        "tau": sum(one["committed"] for one in ours) / drafting if drafting else None,
        "widths": {str(width): n for width, n in sorted(widths.items())},
        "mean_width": sum(width * n for width, n in widths.items()) / rounds if rounds else 0.0,
        "equal": sum(one["equal"] for one in group) if cell[1] == 0 else None,
        "compared": cell[0] * len(group) if cell[1] == 0 else 0,
    }


HEAD = ("rows", "T", "context", "mlx-lm", "DFlash", "speed-up", "tokens a round", "drafts verified", "same")


def shown(row: Mapping[str, Any]) -> list[str]:
    """One row of a summary in the words of HEAD. drafts verified: the widths that at least a twentieth of the rounds had."""
    rounds = sum(row["widths"].values())
    often = [f"{width} ({n / rounds:.0%})" for width, n in row["widths"].items() if n >= rounds / 20]
    return [
        str(row["rows"]),
        f"{row['temp']:g}",
        str(row["context"]),
        *(f"{row[f'{side}_tps']:.1f}" for side in ("mlx_lm", "dflash")),
        f"{row['speedup']:.2f} ({row['low']:.2f}-{row['high']:.2f})" if row["speedup"] else "-",
        f"{row['tau']:.2f}" if row["tau"] else "-",
        " ".join(often) or "-",
        f"{row['equal']}/{row['compared']}" if row["compared"] else "-",
    ]


def table(summary: Sequence[Mapping[str, Any]], width: int | None = None) -> list[str]:
    return align([HEAD, *map(shown, summary)], width)


MEANINGS = (
    "Tokens/s of all rows together, over the whole call, prompts included; both functions by turns; medians (least-largest).",
    "tokens a round: drafts kept, and the model's own token, for each check of a row's drafts. drafts verified: in a row's pass, "
    "with the share of such passes; 0 is plain decoding. same: rows with mlx-lm's ids, at temperature 0.",
)


def notes(batches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why widths were what they were, and every batch that held other texts than mlx-lm's."""
    reasons: Counter = Counter()
    for one in batches:
        reasons.update(one["dflash"]["width_reasons"])
    rows = sum(one["rows"] for one in batches)
    lines = [f"In {n} of {rows} rows: {reason}." for reason, n in reasons.most_common(2)]
    for one in batches:
        if apart := differing([one]):
            where = f"{one['rows']} at once, T {one['temp']:g}, context {one['context']}, turn {one['trial'] + 1}"
            lines.append(f"Text differs from mlx-lm's in {apart} of {count(one['rows'], 'row')} ({where}).")
    return lines


def differing(batches: Sequence[Mapping[str, Any]]) -> int:
    """Rows that were compared and said something else than mlx-lm's."""
    return sum(one["rows"] - one["equal"] for one in batches if one["equal"] is not None)


def compare(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], width: int | None = None) -> list[str]:
    """The cells that two summaries have, beside each other; [] if none."""
    of_b = {(row["rows"], row["temp"], row["context"]): row for row in b}
    both = [(x, of_b[cell]) for x in a if (cell := (x["rows"], x["temp"], x["context"])) in of_b]
    lines = [["rows", "T", "context", "mlx-lm A/B", "DFlash A/B", "speed-up A/B", "tokens a round A/B"]]
    for x, y in both:
        tps = ["/".join(f"{row[f'{side}_tps']:.1f}" for row in (x, y)) for side in ("mlx_lm", "dflash")]
        rest = ["/".join(f"{row[name]:.2f}" if row[name] else "-" for row in (x, y)) for name in ("speedup", "tau")]
        lines.append([str(x["rows"]), f"{x['temp']:g}", str(x["context"]), *tps, *rest])
    return align(lines, width) if both else []
