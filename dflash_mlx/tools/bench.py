"""`dflash-mlx bench`: mlx-lm's own decoding and DFlash on the same prompts, in one process, by turns.

A *cell* is (kind of prompt, temperature, tokens of context before the prompt). A *trial* goes once through all cells; in every
cell both sides answer one prompt, and who begins changes from cell to cell and from trial to trial. Trial i takes prompt i of
its kind, beginning again after the last one. What is measured so far is a whole record at any time.

Times of a run: `ttft_s` from the call to the first token (prefill); `decode_s` from the first token to the last;
`decode_tps` = (tokens - 1) / decode_s; `late_tps` the same after the first 64 tokens. Speed-up: DFlash's decode_tps over mlx-lm's
in the same pair. The first run of each side
in the process is kept apart as `cold`, and warm-up runs are not kept. At a temperature both sides draw with the same noise, keyed
by seed and position, so their texts are equal too. With `exact` DFlash runs so, a third run, exact and without a drafter,
stands in each pair, and texts are compared with its.

Knows the public functions and `stats`. Prints nothing.
"""

from __future__ import annotations

import datetime
import gc
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm

from ..exact import check_models
from ..generation import stream_generate
from ..kernels.autotune import try_waiting
from ..machine import switches_set, write_atomically
from ..models.target import Target
from ..progress import tell
from ..sampling import KeyedSampler, SamplingSettings
from ..stats import is_off
from ..text import common_start
from . import bench_batch
from .bench_batch import BatchSides
from .bench_prompts import BenchError, Prompts, builtin_prompts, chat_ids, stated_thinking
from .columns import align, count
from .place import bits_of, kernels, machine, versions, weights_of

FORMAT = 1
SIDES = ("mlx_lm", "dflash")
# With `exact`: our loop without a drafter, whose text DFlash's must be.
ALONE = "exact_alone"
_WARM_UP_TOKENS = 64
# Tokens after which the width rule should have settled.
_EARLY = 64


@dataclass(frozen=True)
class Plan:
    """What is run.

    kinds: () for all there are. contexts: tokens of text before the prompt. block_size: None lets the draft-length policy choose.
    hopeless: drafts that are never right. sampling: more fields of `SamplingSettings`, for both sides. batch: so many prompts
    at once instead of one (`bench_batch`); () for one. exact: run DFlash with exact=True.
    """

    kinds: tuple[str, ...] = ()
    temps: tuple[float, ...] = (0.0, 1.0)
    contexts: tuple[int, ...] = (0,)
    max_tokens: int = 128
    trials: int = 3
    block_size: int | None = None
    seed: int = 0
    hopeless: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    batch: tuple[int, ...] = ()
    exact: bool = False


class Bench:
    """Runs a plan over one pair into `record`, which holds plain values only.

    Args:
      names: what the user called target and drafter.
      say: called with a line now and then. keep: called with the record after every trial.
      max_seconds: no pair begins that would end later, counted from `go`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        drafter: nn.Module,
        plan: Plan,
        prompts: Prompts | None = None,
        names: tuple[str, str] = ("", ""),
        say: Callable[[str], None] = lambda text: None,
        keep: Callable[[dict], None] = lambda record: None,
        max_seconds: float | None = None,
    ):
        self.model, self.tokenizer, self.drafter, self.plan = model, tokenizer, drafter, plan
        self.prompts = prompts or builtin_prompts(tokenizer.has_chat_template)
        self.say, self.keep, self.max_seconds = say, keep, max_seconds
        if plan.hopeless:
            make_hopeless(drafter)
        if plan.exact:
            # mlx-lm's side goes first in some cells.
            check_models(model, drafter, plan.block_size)
        unknown = [kind for kind in plan.kinds if kind not in self.prompts.kinds]
        if unknown:
            raise BenchError(
                f"the prompts ({self.prompts.source}) hold no {' and no '.join(unknown)}; their kinds are "
                f"{', '.join(self.prompts.kinds)}",
                "Choose among these",
            )
        self.kinds = kinds = plan.kinds or tuple(self.prompts.kinds)
        self.batches = BatchSides(model, tokenizer, drafter, plan, kinds, self.ids) if plan.batch else None
        one = [(kind, temp, context) for context in plan.contexts for temp in plan.temps for kind in kinds]
        self.cells = self.batches.cells() if self.batches else one
        self._fillers: dict[tuple[int, int], str] = {}
        stated = stated_thinking(tokenizer, drafter)
        self.record: dict[str, Any] = {
            "what": "dflash-mlx bench",
            "format": FORMAT,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "environment": switches_set(),
            "model": names[0],
            "draft_model": names[1],
            "drafter_sha256": drafter and drafter.digest(),
            "draft_bits": drafter and bits_of(drafter),
            "thinking": stated and {"setting": stated[0], "stated_by": stated[1]},
            "weights": weights_of(model),
            "settings": json.loads(json.dumps(asdict(plan)))
            | {"kinds": list(kinds), "prompts": self.prompts.source, "digest": self.prompts.digest()},
            "cold": {},
            "warm_up_s": None,
            "runs": [],
            **({"batches": []} if self.batches else {}),
            "ended": "unfinished",
        }

    def go(self) -> dict[str, Any]:
        """Cold runs, warm-up, all trials. Ctrl-C and `max_seconds` end it early; `ended` says how it ended."""
        record, began, longest = self.record, time.perf_counter(), 0.0
        pairs = self.plan.trials * len(self.cells)
        try:
            self._warm_up()
            self.say(f"Warmed up in {record['warm_up_s']:.0f} s. Pairs of answers to time: {pairs}.")
            warm = time.perf_counter()
            for trial in range(self.plan.trials):
                for i, cell in enumerate(self.cells):
                    start = time.perf_counter()
                    tell("Timing", trial * len(self.cells) + i, pairs, "pairs of answers")
                    if self.max_seconds is not None and start - began + longest > self.max_seconds:
                        record["ended"] = "out of time"
                        return record
                    first = SIDES[(trial + i) % 2]
                    if self.batches:
                        record["batches"].append(self.batches.pair(cell, trial, sorted(SIDES, key=lambda side: side != first)))
                    else:
                        record["runs"].append(self._pair(cell, trial, first))
                    longest = max(longest, time.perf_counter() - start)
                if trial == 0 and self.plan.trials > 1:
                    left = (time.perf_counter() - warm) * (self.plan.trials - 1)
                    self.say(f"{len(self.cells)} of {pairs} pairs done; about {left:.0f} s left. Ctrl-C keeps what is measured.")
                self.keep(record)
            record["ended"] = "complete"
        except KeyboardInterrupt:
            record["ended"] = "interrupted"
        finally:
            record["kernels"] = kernels()
            record["summary"] = summarise(record["runs"])
            if self.batches:
                record["batch_summary"] = bench_batch.summarise(record["batches"])
            self.keep(record)
        return record

    def _warm_up(self) -> None:
        """The first run of each side goes into `cold`; then a short run of each for every context, temperature and row count."""
        began = time.perf_counter()
        tell("Warming up")
        short = min(self.plan.max_tokens, _WARM_UP_TOKENS)
        if self.batches:
            for side, cell in itertools.product(SIDES, self.cells):
                self.batches.run(side, cell, 0, short)
        else:
            sides = (*SIDES, ALONE) if self.plan.exact else SIDES
            for side in sides:
                self.record["cold"][side] = self._run(side, self.cells[0], 0)[0]
            for temp, context in dict.fromkeys((temp, context) for _, temp, context in self.cells):
                for side in sides:
                    self._run(side, (self.kinds[0], temp, context), 0, short)
        # Else they came after measured answers, inside of their time.
        if self.drafter is not None:
            self.drafter.pair.finish_measuring()
        try_waiting(float("inf"))
        self.record["warm_up_s"] = time.perf_counter() - began

    def ids(self, cell: tuple[str, float, int], trial: int) -> list[int]:
        """The prompt of a cell in a trial, through the chat template where there is one."""
        kind, _, context = cell
        text = self.prompts.text(kind, trial)
        if context:
            if (context, trial) not in self._fillers:
                filler = self.prompts.filler(context, lambda line: len(self.tokenizer.encode(line)), self.plan.seed + trial)
                self._fillers[context, trial] = filler
            text = self._fillers[context, trial] + text
        return chat_ids(self.tokenizer, text, self.drafter)

    def _responses(self, side: str, ids: list[int], temp: float, seed: int, max_tokens: int) -> Iterator[Any]:
        sampler, processors = SamplingSettings(temp=temp, **self.plan.sampling).make(self.tokenizer)
        options = {"max_tokens": max_tokens, "logits_processors": processors}
        if side != "mlx_lm":
            options |= {"draft_model": self.drafter, "block_size": self.plan.block_size} if side == "dflash" else {}
            options |= {"seed": seed, "exact": self.plan.exact}
            return stream_generate(self.model, self.tokenizer, ids, sampler=sampler, **options)
        keyed = KeyedSampler(sampler, seed, len(ids)) if sampler else None
        return mlx_lm.stream_generate(self.model, self.tokenizer, ids, sampler=keyed, **options)

    def _run(
        self, side: str, cell: tuple[str, float, int], trial: int, max_tokens: int | None = None
    ) -> tuple[dict[str, Any], list[int]]:
        """One answer: its figures, and its token ids."""
        ids = self.ids(cell, trial)
        return timed(self._responses(side, ids, cell[1], self.plan.seed + trial, max_tokens or self.plan.max_tokens), len(ids))

    def _pair(self, cell: tuple[str, float, int], trial: int, first: str) -> dict[str, Any]:
        """Both sides once, and whether they said the same."""
        done = {side: self._run(side, cell, trial) for side in sorted(SIDES, key=lambda side: side != first)}
        plain, ours = (done[side][1] for side in SIDES)
        alone = {ALONE: self._run(ALONE, cell, trial)} if self.plan.exact else {}
        at = first_difference(alone[ALONE][1] if alone else plain, ours)
        pair = {
            **dict(zip(("kind", "temp", "context"), cell, strict=True)),
            "trial": trial,
            "first": first,
            **{side: figures for side, (figures, _) in {**done, **alone}.items()},
            "speedup": _ratio(done["dflash"][0]["decode_tps"], done["mlx_lm"][0]["decode_tps"]),
            "late_speedup": _ratio(done["dflash"][0]["late_tps"], done["mlx_lm"][0]["late_tps"]),
            "differs_at": at,
            "loops": loops(plain),
        }
        if at is not None and not alone and cell[1] == 0 and at < min(len(plain), len(ours)):
            pair["margin"] = margin(self.model, [*self.ids(cell, trial), *plain[:at]], plain[at], ours[at])
        return pair


def timed(responses: Iterator[Any], prompt_tokens: int) -> tuple[dict[str, Any], list[int]]:
    """Drain one run of mlx-lm's or our `stream_generate`: its figures, as the module's docstring defines them, and its ids."""
    gc.collect()
    mx.reset_peak_memory()
    tokens, last, first, early = [], None, 0.0, 0.0
    began = time.perf_counter()
    for last in responses:
        if not tokens:
            first = time.perf_counter()
        tokens.append(last.token)
        if len(tokens) == _EARLY:
            early = time.perf_counter()
    ended = time.perf_counter()
    decode_s, late = ended - first, len(tokens) - _EARLY
    figures = {
        "prompt_tokens": prompt_tokens,
        "tokens": len(tokens),
        "finish_reason": last.finish_reason,
        "ttft_s": first - began,
        "decode_s": decode_s,
        "decode_tps": (len(tokens) - 1) / decode_s if len(tokens) > 1 else None,
        "late_tps": late / (ended - early) if late > 0 else None,
        "peak_memory_gb": mx.get_peak_memory() / 1e9,
    }
    if stats := getattr(last, "stats", None):
        figures |= acceptance(stats)
    return figures, tokens


def make_hopeless(drafter: nn.Module) -> None:
    """Let a drafter run as it does and propose other tokens than it would: what speculation costs where it never pays."""

    class Hopeless(type(drafter)):
        def choose(self, hidden, anchor):
            ids, confidence = super().choose(hidden, anchor)
            return mx.where(ids == 0, ids + 1, ids - 1), confidence

    drafter.__class__ = Hopeless


def acceptance(stats: Any) -> dict[str, Any]:
    """Of a run's stats what a record keeps: tau, rounds by width and source, widths in order, accepted tokens, seconds."""
    accepted = Counter(r.accepted for r in stats.rounds if r.width)
    return {
        "tau": stats.tau,
        "rounds": stats.n_rounds,
        "drafting_rounds": stats.n_drafting,
        "committed": stats.n_committed,
        "widths": {str(width): n for width, n in sorted(stats.widths.items())},
        "confidence_cut": {str(width): n for width, n in sorted(stats.confidence_cut.items())},
        "width_order": [r.width for r in stats.rounds],
        "accepted": {str(count): n for count, n in sorted(accepted.items())},
        "sources": stats.sources,
        "seconds": dict(stats.seconds),
        "width_reason": stats.width_reason,
    }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token at which two answers differ, the shorter one's length if it is the other's beginning; or None."""
    at = common_start(a, b)
    return None if at == len(a) == len(b) else at


def margin(model: nn.Module, text: Sequence[int], one: int, other: int) -> float:
    """By how many nats one pass over `text` finds the likelier of two tokens likelier: small means a near tie."""
    target = Target(model)
    hidden = target(mx.array([list(text)])).hidden
    logits = target.head(hidden[:, -1:])[0, 0].astype(mx.float32)
    return abs((logits[one] - logits[other]).item())


def loops(tokens: Sequence[int], longest: int = 64, least: int = 24) -> bool:
    """Whether an answer ends by repeating itself: its last tokens, three periods and `least` at least, have a short period."""
    for period in range(1, longest + 1):
        n = max(3 * period, least)
        if n > len(tokens):
            return False
        tail = tokens[-n:]
        if all(x == y for x, y in zip(tail, tail[period:], strict=False)):
            return True
    return False


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def summarise(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a cell, in the order of the runs, then one for all kinds of each (temperature, context).

    Medians over trials; `low` and `high` are the least and the largest speed-up; tau and mean width are over all rounds. `all`:
    geometric mean of the kinds' speed-ups, lowest and highest kind.
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
    """Where a record was made, and of what."""
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
    """A record for people; width: columns of their terminal."""
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
    """What the figures mean, how the run ended, cold figures, and every text that was not mlx-lm's."""
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
        lines.append(f"After the first {_EARLY} tokens of an answer: {_median_of(late, ' times mlx-lm')}.")
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
    """Whether DFlash ran with exact=True. Records of versions before it do not say."""
    return record["settings"].get("exact", False)


def _exact_notes(record: Mapping[str, Any]) -> list[str]:
    """What texts were compared with, and what it costs to be exact."""
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
    """How many drafts the policy had verified, where it had the choice: one sentence for each reason."""
    free = [run["dflash"] for run in record["runs"] if run["dflash"]["width_reason"]]
    off = [ours for ours in free if is_off({"confidence_cut": {}, **ours})]
    of = f"of {count(len(record['runs']), 'answer')}"
    lines = [f"Drafting was off in {len(off)} {of}: it would be slower here. --block-size forces it."] if off else []
    for reason, n in Counter(ours["width_reason"] for ours in free if ours not in off).most_common(2):
        lines.append(f"In {n} {of}: {reason.replace('in most rounds', 'mostly').replace('rounds', 'passes')}.")
    return lines


def faults(record: Mapping[str, Any]) -> int:
    """Texts that differ where rounding cannot be the reason: float32 on a CPU, or exact runs."""
    certain = record["machine"]["device"] == "cpu" and record["weights"]["dtype"] == "float32"
    return _differing(record) if certain or is_exact(record) else 0


def _differing(record: Mapping[str, Any]) -> int:
    """Texts that are not mlx-lm's, or of exact runs those without a drafter."""
    return sum(run["differs_at"] is not None for run in record["runs"]) + bench_batch.differing(record.get("batches", ()))


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
        raise BenchError(f"{path} is no record of dflash-mlx bench in format {FORMAT}", "Make one with --out")
    return record


def plan_of(record: Mapping[str, Any]) -> Plan:
    """The plan that a record followed, to repeat it."""
    settings = record["settings"]
    values = {f.name: settings[f.name] for f in fields(Plan) if f.name in settings}
    return Plan(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def compare(a: Mapping[str, Any], b: Mapping[str, Any], width: int | None = None) -> str:
    """Two records beside each other: what differs about them, then every cell that both have. width: as in `table`."""
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


def write_record(record: Mapping[str, Any], path: str | Path) -> None:
    """Write a record whole or not at all."""
    path = Path(path).expanduser()
    write_atomically(path, json.dumps(record, indent=1) + "\n")
