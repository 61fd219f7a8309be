"""A round of several rows: propose, verify, accept and commit, as `loop.generate_steps` has them, for all rows at once.

If no row drafts, the next round starts before the host has read this one, from the tokens on the device.

Each row is a `loop.Run` with its own caches, draft source, sampler and counts, and its errors stay its own. Rows share three
things: the drafter's pass, the target's pass, and the one wait of the host. Knows no text and no queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from ..distribution import Distribution
from ..kernels.autotune import NotFiniteError
from ..loop import Kept, PendingPass, Run, evaluate, keep_rows
from ..models.target import Target, TargetOutput
from ..proposers import Draft, DrafterProposer
from ..sampling import noise_at, sample_rows
from ..target_sampler import RoundResult, TargetSampler, pack_drafts, unpack_drafts
from ..verify import logprobs
from .drafting import RowDraft, can_draft_rows, draft_rows
from .groups import Seat, in_slots
from .passes import BatchTarget, RowPass


@dataclass
class RowRound:
    """One row in one round. anchor: its last committed token; n: drafts to verify; error: what went wrong in this row alone.

    seat: where its keys are, if it shares a group; is_gone: the row continued without this round, which was started ahead.
    """

    run: Run
    anchor: int
    seat: Seat | None = None
    n: int = 0
    draft: Draft | None = None
    kept: Kept | None = None
    error: Exception | None = None
    is_gone: bool = False
    # The drafts [B, N] of all rows in the same drafter pass, and the index of this row.
    block: tuple[mx.array, int] | None = None


class _OneRow:
    """Stands for the target in a sampler of another kind: its head returns these logits for the states [1, n, H]."""

    def __init__(self, target: Target, hidden: mx.array, logits: mx.array):
        self._target, self._hidden, self._logits = target, hidden, logits

    def head(self, hidden: mx.array) -> mx.array:
        return self._logits if hidden is self._hidden else self._target.head(hidden)

    def greedy_ids(self, hidden: mx.array) -> None:
        return None

    def finite_flag(self, *_: Any, **__: Any) -> list[mx.array]:
        return []

    def check(self, *_: Any, **__: Any) -> None:
        pass


class Round:
    """A round of unfinished rows. It is enqueued when it is made, and read later.

    ids: [T] int32, anchor and drafts, row after row, for a round that starts ahead; None: made from the rows. Rows are in the
    order of a pass (`in_slots`).
    """

    def __init__(self, target: BatchTarget, rows: Sequence[RowRound], ids: mx.array | None = None):
        self.target, self.rows, self.is_ahead, self._is_committed = target, rows, ids is not None, False
        self.pair, self._of_run = rows[0].run.drafter_proposer.model.pair, {id(row.run): row for row in rows}
        self._passes = [_begin_pass(row) for row in rows]
        self._output = target(_ids(rows) if ids is None else ids, self._passes, eager=not self.is_ahead)
        self._spans, start = [], 0
        for row in self._passes:
            self._spans.append(slice(start, start + row.size))
            start += row.size
        self._hidden = self._output.hidden.swapaxes(0, 1)
        self._enqueue()
        if self.is_plain:
            evaluate([entry for row in rows for entry in row.run.lazy])

    @cached_property
    def is_plain(self) -> bool:
        """Whether no row drafts and all tokens are chosen on the device: the next round may start before this one is read."""
        return all(not row.draft.width and _draws_alike(row.run.target_sampler) for row in self.rows)

    def of(self, run: Run) -> RowRound | None:
        """The part of this run, or None."""
        return self._of_run.get(id(run))

    @cached_property
    def _each(self) -> list[mx.array]:
        """Log-probabilities [V] of each token. They keep those of the whole round alive. In plain rounds mlx-lm does the same."""
        return list(self._normed[0])

    def _enqueue(self) -> None:
        """Enqueue what will be read: each row's choices, the drafts, and whether a kernel was at fault."""
        target = self.target.target
        self._logits = target.head(self._hidden)
        self._normed = self._logits - mx.logsumexp(self._logits, axis=-1, keepdims=True)
        self._flag = target.finite_flag(self._hidden, logits=self._normed)
        self._chosen = self.pair.broadcast_array(
            _choices(self.rows, [row.point.length + 1 for row in self._passes], self._spans, self._normed[0])
        )
        drafts, self._starts = _drafts(self.rows)
        parts = [self._chosen, *drafts, *self._flag]
        self._packed = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        sliding = [row for row in self.rows if row.draft.by_drafter]
        context = [entry.state for row in sliding for entry in row.run.cache.drafter if type(entry) is RotatingKVCache]
        mx.async_eval(self._packed, self._hidden, self._output.features, context)

    def commit_ahead(self) -> None:
        """Commit the anchors of a plain round before it is read."""
        for row, span in zip(self.rows, self._spans, strict=True):
            if not row.is_gone:
                row.run.drafter_proposer.context.pending.append(self._output.features[span])
                row.run.rows += 1
        self._is_committed = True

    def ahead(self, rows: Sequence[RowRound]) -> Round:
        """The plain round after this committed one, for some of its rows. It starts from the tokens that they choose here."""
        places = {id(row.run): i for i, row in enumerate(self.rows)}
        rows = in_slots(rows)
        at = [places[id(row.run)] for row in rows]
        for row in rows:
            row.draft = row.run.propose(-1, 0)
        return Round(self.target, rows, self._chosen if at == [*range(len(self.rows))] else self._chosen[mx.array(at)])

    def read(self, following: Round | None = None) -> Round | None:
        """Wait for the device, then set `kept` or `error` of each row that is still here. Call `commit` afterwards.

        Returns: the following round, which has started already; None if a kernel was at fault, which makes that round void.
        """
        target = self.target.target
        while True:
            # The round's one wait.
            values = self.pair.broadcast(self._packed.tolist(), "a round of several")
            try:
                target.check([values.pop() for _ in self._flag])
                break
            except NotFiniteError:
                # The pass itself ran without our kernels; only the head is run again. The next round rolls the following round
                # back, like all rows of a pass that were not kept.
                following = None
                self._enqueue()
        for row, span, start in zip(self.rows, self._spans, self._starts, strict=True):
            n, at = row.draft.row.shape[1], self._hidden.shape[1] + start
            # Ids, then one confidence for each, if there are any.
            ids, confidence = unpack_drafts(values[at : at + (n if row.draft.confidence is None else 2 * n)], n)
            if not row.is_gone:
                _guarded(row, self._decide(span, values[span], ids, confidence))
        for row in following.rows if following else ():
            row.anchor = self.of(row.run).kept.bonus
        return following

    def commit(self, seconds: float) -> None:
        """Commit what was kept, unless that was done ahead. seconds: the duration of the round."""
        sound = [row for row in self.rows if row.kept and not row.error]
        for row in sound:
            row.kept.output.seconds = seconds
            if not self._is_committed:
                # Arrays are evaluated below, for all rows at once.
                _guarded(row, lambda row: keep_rows(row.run, row.kept))
        if not self.is_plain:
            evaluate([entry for row in sound for entry in row.run.lazy], [row.kept.output.features for row in sound])

    def _decide(
        self, span: slice, chosen: list[int], ids: list[int], confidence: list[float] | None
    ) -> Callable[[RowRound], None]:
        """A step that sets a row's `kept` from its part of the pass."""
        target, hidden, features = self.target.target, self._hidden[:, span], self._output.features[span].swapaxes(0, 1)

        def row_logprobs(i: int) -> mx.array:
            if len(chosen) == 1:
                return self._each[span.start]
            return logprobs(target, hidden[:, i : i + 1])[0, 0]

        def decide(row: RowRound) -> None:
            run, draft = row.run, row.draft
            if _draws_alike(run.target_sampler):
                accepted = 0
                while accepted < draft.width and ids[accepted] == chosen[accepted]:
                    accepted += 1
                result = RoundResult(ids, accepted, chosen[accepted], row_logprobs, confidence)
            else:
                logits = self._logits[:, span]
                part, one = TargetOutput(hidden, features, logits), _OneRow(target, hidden, logits)
                read = run.target_sampler.enqueue(one, part, draft.row, [], run.rows + 1, draft.confidence)[1]
                result = self.pair.broadcast_result(read())
            sliding = run.drafter_proposer.sliding() if draft.by_drafter else run.drafter_proposer.context.sliding
            anchor = mx.array([row.anchor], dtype=mx.int32)
            args = anchor, draft, self.is_ahead, run.point, features, None, lambda: result, sliding, False
            row.kept = Kept(PendingPass(*args), result)

        return decide


def begin_round(target: BatchTarget, rows: Sequence[RowRound]) -> Round | None:
    """Propose, and enqueue the pass that verifies. Rows with an `error` are left out; None if all have one."""
    for row in rows:
        _guarded(row, _propose)
    _draft([row for row in rows if row.error is None and row.draft is None])
    sound = in_slots([row for row in rows if row.error is None])
    return Round(target, sound) if sound else None


def _guarded(row: RowRound, step: Callable[[RowRound], None]) -> None:
    """Run a step of one row; an error is stored in that row alone."""
    try:
        step(row)
    except Exception as error:  # noqa: BLE001 - a processor, a sampler or a draft source may raise anything
        row.error = error


def _propose(row: RowRound) -> None:
    """Choose the draft source. The drafter's own drafts are made later, by `_draft`."""
    run = row.run
    row.n = run.next_draft_length()
    drafts = type(run.target_sampler).draft is TargetSampler.draft and can_draft_rows(run.drafter_proposer.model)
    together = row.n and run.proposer is run.drafter_proposer and drafts
    row.draft = None if together else run.propose(row.anchor, row.n)


def _draft(rows: Sequence[RowRound]) -> None:
    """Make the drafter's drafts, with one pass per block size."""
    sizes: dict[int, list[RowRound]] = {}
    for row in rows:
        sizes.setdefault(row.run.stats.block_size, []).append(row)
    for size, some in sizes.items():
        alike = in_slots(some)
        asked = [_row_draft(row, size) for row in alike]
        needed = [row.run.policy.drafts_needed(row.n) for row in alike]
        n = None if None in needed else max(needed)
        drafter = alike[0].run.drafter_proposer.model
        drafted, confidences = draft_rows(drafter, asked, size, n)
        drafted = drafter.pair.broadcast_array(drafted)
        mx.async_eval(drafted, confidences)
        for i, row in enumerate(alike):
            is_wanted = confidences is not None and row.run.policy.wants_confidence
            confidence = confidences[i : i + 1] if is_wanted else None
            row.draft = Draft(drafted[i : i + 1], confidence, DrafterProposer.source)
            row.block = (drafted, i) if confidence is None else None
            row.run.target_sampler.set_width(row.draft, row.n)


def _row_draft(row: RowRound, size: int) -> RowDraft:
    proposer, sampler = row.run.drafter_proposer, row.run.target_sampler
    features, held = proposer.context.pending.joined(), proposer.context.rows
    asked = RowDraft(row.anchor, features, proposer.cache, held - proposer.skipped, seat=row.seat)
    if isinstance(sampler.sampler, Distribution):
        position = held + features.shape[1] + 1
        asked.draw, asked.noise = sampler.sampler, sampler.noise.rows(position, size, row.run.target.vocabulary)[:-1]
    return asked


def _begin_pass(row: RowRound) -> RowPass:
    """What `Run.verify` does before a pass."""
    run = row.run
    run.roll_back()
    run.mark_rollback_point()
    return RowPass(run.cache.target, run.point, row.draft.width + 1, row.seat)


def _ids(rows: Sequence[RowRound]) -> mx.array:
    """[T] int32: anchor and drafts, row after row."""
    if not any(row.draft.width for row in rows):
        return mx.array([row.anchor for row in rows], dtype=mx.int32)
    (parts, starts), at = _drafts(rows), []
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        at += [i, *range(len(rows) + start, len(rows) + start + row.draft.width)]
    return mx.concatenate([mx.array([row.anchor for row in rows], dtype=mx.int32), *parts])[mx.array(at)]


def _draws_alike(sampler: TargetSampler) -> bool:
    """Whether the sampler alone chooses a row's tokens, on the device, and drafts are kept as long as they equal these."""
    return type(sampler) is TargetSampler and not sampler.processors


def _drafts(rows: Sequence[RowRound]) -> tuple[list[mx.array], list[int]]:
    """The drafts of all rows, [n] int32 in few parts (each is a launch), and where each row's drafts begin in them."""
    parts, starts, known, end = [], [], {}, 0
    for row in rows:
        block, i = row.block or (row.draft.row, 0)
        if id(block) not in known:
            known[id(block)] = end
            if block.size:
                parts.append(block.reshape(-1) if row.block else pack_drafts(block, row.draft.confidence))
                end += parts[-1].size
        starts.append(known[id(block)] + i * block.shape[1])
    return parts, starts


def _choices(rows: Sequence[RowRound], positions: list[int], spans: list[slice], normed: mx.array) -> mx.array:
    """[T] int32: what each row chooses from [T, V] log-probabilities; the argmax for rows that choose later in their own way.

    Rows with the same sampling settings draw together. positions: absolute position of the first token that each row chooses.
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
            keys = [(i, t - spans[i].start) for i in places for t in range(spans[i].start, spans[i].stop)]
            seeds, where = [rows[i].run.target_sampler.seed for i, _ in keys], [positions[i] + t for i, t in keys]
            drawn = sampler.sampler.draw(some, noise_at(seeds, where, some.shape[1]))
        else:
            drawn = sample_rows(sampler.sampler, sampler.noise, positions[places[0]], some)
        chosen[mx.array(at)] = drawn.astype(mx.int32)
    return chosen
