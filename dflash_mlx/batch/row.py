"""A row of a batch: one request from its prompt to its last token. It makes responses as `generation` does.

Knows one run. Knows no other row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.models.cache import KVCache

from ..loop import Kept, Run, Step, begin_prefill, generate_steps, keep_chunk, make_run
from ..models.target import Target
from ..options import RunOptions
from ..pair import DFlashPair
from ..responses import GenerationResponse, Responder
from ..rollback import rollback, rollback_point
from .groups import Seat, seat_of
from .policy import RowPolicy
from .rounds import RowRound


@dataclass
class RowResponse(GenerationResponse):
    """A row's response for one token.

    uid: the number that `insert` returned. error: why the row ended, with finish_reason "error"; the other fields then stay as
    they were. prompt_cache: in the last response, the row's cache, for a request that continues; None if it is not kept.
    """

    uid: int = -1
    error: Exception | None = None
    prompt_cache: list[Any] | None = field(default=None, repr=False)


class Row:
    """uid: its number; run: its generation; rest: prompt tokens that are not read yet; anchor: its last committed token."""

    def __init__(self, uid: int, run: Run, prompt: list[int]):
        self.uid, self.run, self.rest, self.anchor = uid, run, list(prompt), -1
        self.policy = RowPolicy(run.policy)
        run.policy = run.drafter_proposer.policy = run.counter.policy = run.stats.rule = self.policy
        options, self._tell = run.options, run.options.progress
        # The most tokens of a pass in which its prompt is read.
        self.step_size, self.prompt_tokens = options.prefill_step_size or 2048, len(prompt)
        options.progress = lambda *_: None
        self.responder = Responder(run, prompt)
        # Number of prompt tokens in the cache -> a function that is called with the entries when they hold that many.
        self.keep_at: dict[int, Callable[[list[Any]], None]] = {}
        # The loop for one row, while the row runs alone.
        self._steps: Iterator[Step] | None = None
        # Where its keys are in a shared group; None: in its own entries.
        self.seat: Seat | None = None
        # Its part of the round that is not read yet.
        self.round: RowRound | None = None
        # Whether the prompt cache has been written up to date, so that it may be copied now.
        self._is_written = False

    @property
    def options(self) -> RunOptions:
        return self.run.options

    @property
    def is_reading(self) -> bool:
        return self.anchor < 0

    def next_chunk(self, most: int) -> tuple[list[int], bool]:
        """The prompt's next tokens, `most` at most and without its last one, and whether nothing is left to read after them."""
        run = self.run
        feed, stops = begin_prefill(run, self.rest), [length - run.rows for length in self.keep_at if length > run.rows]
        chunk = feed[: run.target.prefill_chunk(run.rows, min([most, *stops]), len(feed) - 1)]
        return chunk, len(chunk) == len(feed) - 1

    def keep_chunk(self, chunk: list[int]) -> None:
        """Commit what was read of the prompt. With one token left there is nothing more to read."""
        run = self.run
        if chunk:
            feed = begin_prefill(run, self.rest)
            keep_chunk(run, chunk)
            # The cache records what it holds; the next chunk begins there.
            run.cache.rows, self.rest = run.rows, feed[len(chunk) :]
        if keep := self.keep_at.pop(run.rows, None):
            keep(self.leave_settled())
        if len(feed := begin_prefill(run, self.rest)) == 1:
            run.cache.ids, self.anchor, self.rest = run.cache.ids[: run.rows] + feed, feed[0], []
        self._tell(self.prompt_tokens - len(self.rest), self.prompt_tokens)

    def undo_chunk(self) -> None:
        """Undo a pass over a chunk that was not kept."""
        run = self.run
        rollback(run.cache.target, run.point, run.rows)
        run.drafter_proposer.settle(run.rows)
        run.point = rollback_point(run.cache.target, run.rows)

    def alone(self) -> list[RowResponse]:
        """Run one round with the loop for one row. Returns: its tokens."""
        self.policy.in_company = False
        if self._steps is None:
            self.leave_settled()
            self._steps = generate_steps(self.run, [])
        found, run = [], self.run
        while not found or run.rows >= len(run.cache.ids) and not found[-1].finish_reason:
            # All tokens that a round committed are handed out before another row may join.
            found.append(self._respond(next(self._steps)))
        return found

    def join(self) -> None:
        """Leave the loop for one row, if it was running. The caches then hold exactly the tokens handed out."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None
            self._resume()
        if self._is_written:
            self.run.cache.mark_in_use()
            self._is_written = False
        self.policy.in_company, self.policy.waits = True, not self.run.emitted
        self.seat = self.seat or self._find_seat()

    def _find_seat(self) -> Seat | None:
        run = self.run
        empty = [entry for entry in run.cache.drafter if type(entry) is KVCache and entry.empty()]
        # Empty entries have no shape yet, and quantized ones have another.
        return None if empty or not run.rows or run.quantization else seat_of(run.cache.entries[:-1])

    def did(self, width: int) -> bool:
        """Whether it does in this round what the batch chose for all: draft with the drafter, or verify nothing at width 0. What
        a row of fixed width does is its own."""
        draft = self.round.draft
        as_chosen = draft is not None and self.policy.width == width and (draft.by_drafter if width else not draft.width)
        return as_chosen or not self.policy.is_free

    @property
    def room(self) -> int:
        """The most tokens that its entries may hold during the next round."""
        return self.run.rows + self.run.stats.block_size

    def leave_settled(self) -> list[Any]:
        """The prompt cache with the tokens handed out, or with what was read of the prompt. The row continues with it."""
        self._settle()
        self._steps = None
        self._resume()
        self._is_written = True
        return self.run.cache.entries

    def _resume(self) -> None:
        """Let the run continue from settled caches."""
        run = self.run
        run.rows, run.point = run.cache.rows, rollback_point(run.cache.target, run.cache.rows)
        proposer = run.proposer_class(run.drafter_proposer.model, run.target, run.cache, run.target_sampler, run.policy)
        run.drafter_proposer = run.proposer = run.counter.drafter_proposer = proposer
        run.next_width = None

    def emit(self, kept: Kept) -> list[RowResponse]:
        """Responses for the tokens that a round committed, up to the row's last token."""
        found = []
        for step in self.run.emit(kept):
            found.append(self._respond(step))
            if found[-1].finish_reason:
                break
        return found

    def _respond(self, step: Step) -> RowResponse:
        self.anchor = step[0]
        return RowResponse(**vars(self.responder.respond(step)), uid=self.uid)

    def fail(self, error: Exception) -> RowResponse:
        """The row's last response, for an error of this row alone."""
        none = {"text": "", "token": -1, "logprobs": None, "from_draft": False, "peak_memory": 0.0}
        none |= {"prompt_tps": self.responder.prompt_tps}
        counts = {"prompt_tokens": self.prompt_tokens, "generation_tokens": self.responder.n, "generation_tps": 0.0}
        return RowResponse(**none, **counts, finish_reason="error", stats=self.run.stats, uid=self.uid, error=error)

    def end(self, keep: bool = True) -> list[Any] | None:
        """Leave the batch. Returns: the prompt cache, which holds exactly the tokens handed out; None if it is not kept."""
        self._settle(keep)
        self.run.counter.finish()
        return self.run.cache.entries if keep else None

    def _settle(self, keep: bool = True) -> None:
        """Leave the caches with exactly the tokens handed out, in arrays of their own; keep: False leaves them useless."""
        if self.round is not None:
            self.round.is_gone, self.round = True, None
        if self._steps is not None:
            self._steps.close()
        elif keep:
            self.run.settle()
        if self.seat is not None:
            self.seat.leave(keep)
            self.seat = None


def make_row(uid: int, options: RunOptions, pair: DFlashPair, target: Target) -> Row:
    """Make a row that has not started. target: from `pair.prepare_target`. Refuses what cannot be done.

    Raises:
      GenerationError, CacheError, PairError, ValueError: as `stream_generate`.
    """
    prompt = options.prompt_ids
    cache = pair.open_cache(options.prompt_cache, options.max_kv_size)
    options.check_prompt(target, cache)
    run = make_run(options, pair, cache)
    if options.prompt_cache is not None:
        options.prompt_cache[:] = cache.entries
        cache.entries = options.prompt_cache
    return Row(uid, run, prompt)
