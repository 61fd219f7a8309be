"""`dflash-mlx bench`: times mlx-lm's own decoding and DFlash on the same prompts, in one process, taking turns.

A *cell* is (kind of prompt, temperature, tokens of context before the prompt). A *trial* goes through all cells once. In each
cell both sides answer the same prompt; which side goes first alternates. Trial i uses prompt i of its kind, and starts over after
the last one. The record is complete after every trial, so a run can be stopped at any time.

Times of a run: `ttft_s` from the call to the first token (prefill); `decode_s` from the first token to the last;
`decode_tps` = (tokens - 1) / decode_s; `late_tps` the same after the first 64 tokens. Speed-up: DFlash's decode_tps over mlx-lm's
in the same pair. The first run of each side in the process is stored apart, as `cold`. Warm-up runs are not stored.

Both sides sample with the same noise, keyed by seed and position, so their texts are equal at any temperature. With `exact`,
DFlash runs with exact=True. Each pair then has a third run, exact without a drafter, and DFlash's text is compared with that.

Knows the public functions and `stats`. Prints nothing. `bench_record` turns a record into tables and sentences.
"""

from __future__ import annotations

import datetime
import gc
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm

from ..exact import check_models
from ..generation import stream_generate
from ..kernels.autotune import try_waiting
from ..machine import switches_set
from ..models.target import Target
from ..progress import tell
from ..sampling import KeyedSampler, SamplingSettings
from ..text import common_start
from . import bench_batch
from .bench_batch import BatchSides
from .bench_prompts import BenchError, Prompts, builtin_prompts, chat_ids, stated_thinking
from .bench_record import ALONE, EARLY, FORMAT, SIDES, summarise
from .place import bits_of, kernels, machine, versions, weights_of

_WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class Plan:
    """What to run.

    kinds: kinds of prompts; () for all. contexts: tokens of text before the prompt. block_size: None lets the draft-length policy
    choose. hopeless: make every draft wrong. sampling: more fields of `SamplingSettings`, for both sides. batch: numbers of
    prompts to answer at once (`bench_batch`); () for one at a time. exact: run DFlash with exact=True.
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
      say: called with lines of progress. keep: called with the record after every trial.
      max_seconds: no pair starts that would end later than this, counted from the start of `go`.
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
            # Before anything is timed: in some cells mlx-lm's side goes first, and the refusal would come late.
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
        # Otherwise these would run after timed answers, and count as theirs.
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
        """Run both sides once, and compare their texts."""
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
        if len(tokens) == EARLY:
            early = time.perf_counter()
    ended = time.perf_counter()
    decode_s, late = ended - first, len(tokens) - EARLY
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
    """Make a drafter propose wrong tokens at its usual cost, to measure what speculation costs where it never pays."""

    class Hopeless(type(drafter)):
        def choose(self, hidden, anchor):
            ids, confidence = super().choose(hidden, anchor)
            return mx.where(ids == 0, ids + 1, ids - 1), confidence

    drafter.__class__ = Hopeless


def acceptance(stats: Any) -> dict[str, Any]:
    """What a record keeps of a run's stats: tau, rounds by width and source, widths in order, accepted tokens, seconds."""
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
    """Index of the first token that differs; the shorter answer's length if the other only goes on; None if they are equal."""
    at = common_start(a, b)
    return None if at == len(a) == len(b) else at


def margin(model: nn.Module, text: Sequence[int], one: int, other: int) -> float:
    """The difference in nats between two tokens' logits after `text`, in one pass; small means a near tie."""
    target = Target(model)
    hidden = target(mx.array([list(text)])).hidden
    logits = target.head(hidden[:, -1:])[0, 0].astype(mx.float32)
    return abs((logits[one] - logits[other]).item())


def loops(tokens: Sequence[int], longest: int = 64, least: int = 24) -> bool:
    """Whether an answer ends in a loop: its last tokens, at least `least` and three periods, repeat every `longest` or fewer."""
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


def plan_of(record: Mapping[str, Any]) -> Plan:
    """The plan that a record followed, to repeat it."""
    settings = record["settings"]
    values = {f.name: settings[f.name] for f in fields(Plan) if f.name in settings}
    return Plan(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
