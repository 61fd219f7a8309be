"""A round of several rows: propose, verify, accept and commit, as `loop.generate_steps` has them, for all rows at once.

Each row is a `loop.Run`: its caches, its drafts' source, its sampler and its counts are its own, and so are their errors. What
rows share is three things: the drafter's pass, the target's pass, and the host's one wait. Knows no text and no queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..distribution import Distribution
from ..kernels.autotune import NotFiniteError
from ..loop import Kept, PendingPass, Run, evaluate, keep_rows
from ..models.target import Target, TargetOutput
from ..proposers import BlockProposer, Draft
from ..rollback import rollback_point
from ..sampling import noise_at, sample_rows
from ..target_sampler import RoundResult, TargetSampler, pack_drafts, unpack_drafts
from ..verify import logprobs
from .drafting import RowDraft, can_draft_rows, draft_rows
from .groups import Seat, in_slots
from .passes import BatchTarget, RowPass


@dataclass
class RowRound:
    """One row in one round. anchor: its last committed token; n: drafts to verify; error: what went wrong in this row alone.

    seat: where its keys are, if it shares a group.
    """

    run: Run
    anchor: int
    seat: Seat | None = None
    n: int = 0
    draft: Draft | None = None
    kept: Kept | None = None
    error: Exception | None = None


class _OneRow:
    """A target to a sampler that draws in its own way: the head was run for its states [1, n, H], with these logits."""

    def __init__(self, target: Target, hidden: mx.array, logits: mx.array):
        self._target, self._hidden, self._logits = target, hidden, logits

    def head(self, hidden: mx.array) -> mx.array:
        return self._logits if hidden is self._hidden else self._target.head(hidden)

    def choices(self, hidden: mx.array) -> None:
        return None

    def finite_flag(self, *_: Any, **__: Any) -> list[mx.array]:
        return []

    def check(self, *_: Any, **__: Any) -> None:
        pass


def run_round(target: BatchTarget, rows: Sequence[RowRound]) -> float:
    """One round of these rows, of which none is finished. `kept` or `error` of each is set. Returns: seconds.

    Rows' tokens are committed, and not handed out yet: `Run.emit` does that.
    """
    began = time.perf_counter()
    for row in rows:
        _own(row, _propose)
    _draft([row for row in rows if row.error is None and row.draft is None])
    sound = in_slots([row for row in rows if row.error is None])
    if not sound:
        return time.perf_counter() - began
    passes = [_begin_pass(row) for row in sound]
    ids = _ids(sound)
    output = target(ids, passes)
    _accept(target, sound, passes, output)
    took = time.perf_counter() - began
    for row in sound:
        if row.error is None:
            row.kept.output.seconds = took
            # What is handed to the device goes for all rows at once.
            _own(row, lambda row: keep_rows(row.run, row.kept))
    evaluate([entry for row in sound for entry in row.run.lazy], [row.kept.output.features for row in sound if row.kept])
    return took


def _own(row: RowRound, step: Callable[[RowRound], None]) -> None:
    """A step of one row, whose fault is its own."""
    try:
        step(row)
    except Exception as error:  # noqa: BLE001 - a processor, a sampler or a draft source may raise anything
        row.error = error


def _propose(row: RowRound) -> None:
    """Settle who drafts. Drafts of the drafter are left to `_draft`."""
    run = row.run
    row.n = run.next_draft_length()
    drafts = type(run.target_sampler).draft is TargetSampler.draft and can_draft_rows(run.blocks.drafter)
    together = row.n and run.proposer is run.blocks and drafts
    row.draft = None if together else run.propose(row.anchor, row.n)


def _draft(rows: Sequence[RowRound]) -> None:
    """The drafter's drafts, in one pass for each size of blocks."""
    sizes: dict[int, list[RowRound]] = {}
    for row in rows:
        sizes.setdefault(row.run.stats.block_size, []).append(row)
    for size, some in sizes.items():
        alike = in_slots(some)
        asked = [_asked(row, size) for row in alike]
        needed = [row.run.policy.drafts_needed(row.n) for row in alike]
        n = None if None in needed else max(needed)
        drafted, sure = draft_rows(alike[0].run.blocks.drafter, asked, size, n)
        mx.async_eval(drafted, sure)
        for i, row in enumerate(alike):
            confidence = sure[i : i + 1] if sure is not None and row.run.policy.wants_confidence else None
            row.draft = Draft(drafted[i : i + 1], confidence, BlockProposer.source)
            row.run.target_sampler.cut(row.draft, row.n)


def _asked(row: RowRound, size: int) -> RowDraft:
    blocks, sampler = row.run.blocks, row.run.target_sampler
    features, held = blocks.context.pending.joined(), blocks.context.rows
    asked = RowDraft(row.anchor, features, blocks.cache, held - blocks.begin, seat=row.seat)
    if isinstance(sampler.sampler, Distribution):
        position = held + features.shape[1] + 1
        asked.draw, asked.noise = sampler.sampler, sampler.noise.rows(position, size, row.run.target.vocabulary)[:-1]
    return asked


def _begin_pass(row: RowRound) -> RowPass:
    """What `Run.verify` does in front of a pass."""
    run = row.run
    run.roll_back()
    if run.quantization and run.rows > run.begun:
        run.quantization.apply(run.cache)
    run.point = rollback_point(run.cache.target, run.rows)
    return RowPass(run.cache.target, run.point, row.draft.width + 1, row.seat)


def _ids(rows: Sequence[RowRound]) -> mx.array:
    """[T] int32: anchor and drafts of each row, one row behind the other."""
    if not any(row.draft.width for row in rows):
        return mx.array([row.anchor for row in rows], dtype=mx.int32)
    parts = [part for row in rows for part in (mx.array([row.anchor], dtype=mx.int32), row.draft.row[0, : row.draft.width])]
    return mx.concatenate([part for part in parts if part.size])


def _accept(target: BatchTarget, rows: Sequence[RowRound], passes: Sequence[RowPass], output: TargetOutput) -> None:
    """Wait for the pass. Each row keeps the drafts that equal its own choices, and its own token behind them."""
    spans, start = [], 0
    for row in passes:
        spans.append(slice(start, start + row.size))
        start += row.size
    hidden, T = output.hidden.swapaxes(0, 1), start
    drafts = [part for row in rows for part in _drafts(row)]
    context = [entry.state for row in rows if row.draft.by_drafter for entry in row.run.cache.drafter]
    while True:
        logits = target.target.head(hidden)
        normed = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        flag = target.target.finite_flag(hidden, logits=normed)
        packed = mx.concatenate([_choices(rows, spans, normed[0]), *drafts, *flag])
        mx.async_eval(packed, hidden, output.features, context)
        # The round's one wait.
        values = packed.tolist()
        try:
            target.target.check([values.pop() for _ in flag])
            break
        except NotFiniteError:
            # The pass itself ran without kernels of ours; only the head is run again.
            continue
    at = T
    for row, span in zip(rows, spans, strict=True):
        n, sure = row.draft.row.shape[1], row.draft.confidence is not None
        ids, confidence = unpack_drafts(values[at : at + n * (1 + sure)], n)
        at += n * (1 + sure)
        part = TargetOutput(hidden[:, span], output.features[span].swapaxes(0, 1), logits[:, span])
        _own(row, _decide(target.target, part, values[span], ids, confidence))


def _draws_alike(sampler: TargetSampler) -> bool:
    """Whether a row's tokens are chosen on the device by its sampler alone, and its drafts kept while they equal them."""
    return type(sampler) is TargetSampler and not sampler.processors


def _drafts(row: RowRound) -> list[mx.array]:
    draft = row.draft
    return [pack_drafts(draft.row, draft.confidence)] if draft.row.shape[1] else []


def _choices(rows: Sequence[RowRound], spans: list[slice], normed: mx.array) -> mx.array:
    """[T, V] log-probabilities to [T] int32, what each row chooses; argmax in rows that choose in their own way, later.

    Rows that draw alike draw together.
    """
    chosen = mx.argmax(normed, axis=-1).astype(mx.int32)
    alike: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        sampler = row.run.target_sampler
        if sampler.sampler is not None and _draws_alike(sampler):
            alike.setdefault(sampler.sampler.settings if isinstance(sampler.sampler, Distribution) else i, []).append(i)
    for places in alike.values():
        at = [t for i in places for t in range(spans[i].start, spans[i].stop)]
        some, run = normed[mx.array(at)], rows[places[0]].run
        sampler = run.target_sampler
        if isinstance(sampler.sampler, Distribution):
            keys = [(rows[i].run, t - spans[i].start) for i in places for t in range(spans[i].start, spans[i].stop)]
            seeds, positions = [one.target_sampler.seed for one, _ in keys], [one.rows + 1 + t for one, t in keys]
            drawn = sampler.sampler.draw(some, noise_at(seeds, positions, some.shape[1]))
        else:
            drawn = sample_rows(sampler.sampler, sampler.noise, run.rows + 1, some)
        chosen[mx.array(at)] = drawn.astype(mx.int32)
    return chosen


def _decide(
    target: Target, output: TargetOutput, chosen: list[int], ids: list[int], confidence: list[float] | None
) -> Callable[[RowRound], None]:
    """What a row keeps of its part of a pass, as `kept`."""

    def decide(row: RowRound) -> None:
        run, draft, hidden = row.run, row.draft, output.hidden
        if _draws_alike(run.target_sampler):
            accepted = 0
            while accepted < draft.width and ids[accepted] == chosen[accepted]:
                accepted += 1

            def row_logprobs(i: int) -> mx.array:
                return logprobs(target, hidden[:, i : i + 1])[0, 0]

            result = RoundResult(ids, accepted, chosen[accepted], row_logprobs, confidence)
        else:
            one = _OneRow(target, hidden, output.logits)
            args = one, output, draft.row, [], run.rows + 1, draft.confidence
            result = run.target_sampler.start(*args)[1]()
        sliding = run.blocks.sliding() if draft.by_drafter else run.blocks.context.sliding
        anchor = mx.array([row.anchor], dtype=mx.int32)
        row.kept = Kept(
            PendingPass(anchor, draft, False, run.point, output.features, None, lambda: result, sliding, False), result
        )

    return decide
