"""Many requests at once: `batch_generate`, as in mlx-lm, and `BatchGenerator`. Requests join and leave it between rounds.

Read `BatchGenerator.next` first. A request alone in the batch goes through `loop.generate_steps`, as `stream_generate` does.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache as make_target_cache

from ..errors import GenerationError
from ..generation import stream_generate
from ..machine import open_stream, wired_limit
from ..models.drafter import Drafter
from ..models.target import Target
from ..options import RunOptions
from ..pair import DFlashPair
from ..stats import GenerationStats
from .groups import Groups
from .passes import BatchTarget
from .policy import TRIES, TRIES_ON_GPU, BatchPolicy, RoundCosts
from .reading import choose_chunks, read_chunks
from .rounds import Round, RowRound, begin_round
from .row import Row, RowResponse, make_row

# The share of time for reading prompts while answers run, and how many tokens are then read at once.
MAX_BATCH, PREFILL_SHARE, _CHUNK = 8, 0.5, 512
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(stream_generate).parameters.items()
    if parameter.default is not parameter.empty
}


def options_of(model: nn.Module, tokenizer: Any, prompt: Any, **given: Any) -> RunOptions:
    """The options of one request, by `stream_generate`'s names and defaults.

    Raises:
      GenerationError: `stream_generate` has no such option, or `RunOptions` refuses the value.
    """
    if unknown := sorted({*given} - {*_DEFAULTS}):
        raise GenerationError(f"there is no option {', '.join(unknown)}", "Use the keywords of stream_generate")
    if given.get("exact"):
        raise GenerationError("exact was given in a batch, whose passes hold rows of several requests", "Use stream_generate")
    return RunOptions(**{**_DEFAULTS, "model": model, "tokenizer": tokenizer, "prompt": prompt, **given})


class BatchGenerator:
    """Runs requests together. They join and leave between rounds.

    Each request gets the tokens that `stream_generate` would give it alone: bit by bit on a CPU in float32; on a GPU a pass over
    more rows may round differently. Not safe for two threads.

    Args:
      draft_model: what `load_drafter` returned for `model`.
      max_batch: most requests answered at the same time; the others wait in order. None: `MAX_BATCH`.
      prefill_share: share of the time for reading prompts while answers run, above 0 and below 1.
    Raises:
      GenerationError: an argument that cannot be honoured.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        draft_model: nn.Module,
        *,
        max_batch: int | None = MAX_BATCH,
        prefill_share: float = PREFILL_SHARE,
        stream: Any = generation_stream,
    ):
        if not isinstance(draft_model, Drafter):
            raise GenerationError(
                "a batch needs a DFlash drafter", "Pass what load_drafter returns, or use mlx_lm.batch_generate"
            )
        max_batch = MAX_BATCH if max_batch is None else max_batch
        if type(max_batch) is not int or max_batch < 1:
            raise GenerationError(f"max_batch is {max_batch!r}; it must be a whole number of at least 1")
        if not 0 < prefill_share < 1:
            raise GenerationError(f"prefill_share is {prefill_share!r}; it must lie between 0 and 1")
        self.model, self.tokenizer, self.draft_model, self.stream = model, tokenizer, draft_model, stream
        self.max_batch, self.prefill_share = max_batch, prefill_share
        # Whether a new cache that a request was given is returned at its end, which copies it.
        self.keeps_caches = True
        self.pair = DFlashPair.of(draft_model)
        on_gpu = mx.default_device() == mx.gpu
        self.pair.round_costs = self.pair.round_costs or RoundCosts(TRIES_ON_GPU if on_gpu else TRIES)
        self.policy = BatchPolicy(draft_model.config.block_size - 1, self.pair.round_costs)
        self.waiting: deque[Row] = deque()
        self.rows: list[Row] = []
        self._groups = Groups()
        # A round that was started before the previous one was read.
        self._ahead: Round | None = None
        self._has_read = False
        self._uid, self._target = 0, None
        # The target for requests that are inserted before the next step.
        self._prepared: Target | None = None
        # Seconds spent on prompts and on answers, counted while there is work of both kinds.
        self._spent = [0.0, 0.0]

    def insert(self, prompt: Any, **options: Any) -> int:
        """Add a request, with the keywords of `stream_generate`. Returns: its number, which `next` and `remove` use.

        Raises: as `stream_generate`, before anything runs.
        """
        made = options_of(
            self.model, self.tokenizer, prompt, **{**options, "draft_model": self.draft_model, "stream": self.stream}
        )
        made.check_drafter()
        # Looking for modules that were replaced takes 3 ms for a model of 30 layers: once for requests that come together.
        self._prepared = self._prepared or self.pair.prepare_target()
        row = make_row(self._uid, made, self.pair, self._prepared)
        self._uid += 1
        self.waiting.append(row)
        return row.uid

    def row(self, uid: int) -> Row | None:
        """The row of a request; None if it is not here."""
        return next((row for row in [*self.rows, *self.waiting] if row.uid == uid), None)

    def can_add(self) -> bool:
        """Whether one more request would run together with those that are here."""
        return len(self) < self.max_batch and self._can_batch(len(self) + 1)

    def remove(self, uid: int) -> list[Any] | None:
        """Take a request out at any time. Returns: its prompt cache with the tokens handed out, or None if it is not here."""
        if (row := self.row(uid)) is None:
            return None
        (self.rows if row in self.rows else self.waiting).remove(row)
        # Modules may be replaced before the next request comes.
        self._prepared = None
        with mx.stream(self.stream):
            return row.end(self.keeps_caches or row.options.prompt_cache is not None)

    @property
    def reason(self) -> str | None:
        """Why requests are answered one by one; None if they run together, or if that is not known yet."""
        return self._target and self._target.reason

    def __len__(self) -> int:
        """The number of requests that are not finished."""
        return len(self.rows) + len(self.waiting)

    def next(self) -> list[RowResponse]:
        """Read a piece of a prompt, or run a round of all answers, or both. Returns the new tokens, each row's in order.

        A request's last response has its finish_reason and its prompt cache, if that is kept.
        """
        self._prepared = None
        with mx.stream(self.stream):
            found = self._step()
        # The last slot first: where several rows end, those that stay then move least.
        for response in sorted((one for one in found if one.finish_reason), key=self._slot, reverse=True):
            response.prompt_cache = self.remove(response.uid)
        return found

    def _slot(self, response: RowResponse) -> int:
        row = self.row(response.uid)
        return row.seat.slot if row and row.seat and row.seat.group else -1

    def _step(self) -> list[RowResponse]:
        room = self.max_batch if self._can_batch(len(self)) else 1
        while self.waiting and len(self.rows) < room:
            self.rows.append(self.waiting.popleft())
        reading = [row for row in self.rows if row.is_reading]
        answering = [row for row in self.rows if not row.is_reading]
        if not (reading and answering):
            self._spent = [0.0, 0.0]
        if reading and self._is_time_to_read():
            began = self.pair.clock()
            failed = self._read(reading, _CHUNK if answering else None)
            self._spent[0] += self.pair.clock() - began
            if failed:
                return failed
        if not answering:
            return []
        began = self.pair.clock()
        found = self._answer(answering)
        self._spent[1] += self.pair.clock() - began
        return found

    def _is_time_to_read(self) -> bool:
        """Whether prompts have used no more than their share of the time."""
        reading, answering = self._spent
        return reading * (1 - self.prefill_share) <= answering * self.prefill_share

    def _can_batch(self, count: int) -> bool:
        """Whether `count` rows can run together; tested when there are two, once per target, also for later batches."""
        if count < 2 or self.max_batch == 1:
            return self._target is not None and self._target.reason is None
        if self._target is None or self._target.target is not self.pair.target:
            known = self.pair.batch_target
            if known is None or known.target is not self.pair.target:
                known = BatchTarget(self.pair.target, lambda: make_target_cache(self.model))
                # An error may pass, as for want of memory: the next batch tests again.
                self.pair.batch_target = None if known.has_failed else known
            self._target = known.another()
        return self._target.reason is None

    def _read(self, rows: Sequence[Row], most: int | None) -> list[RowResponse]:
        """Read at most `most` tokens: of the first prompt, and of the next ones while they are short, so that requests which come
        together answer together. Returns: the responses of requests that failed, such as for a prompt that memory does not hold.
        """
        self._has_read = True
        can_share = self._target is not None and self._target.reason is None
        return [
            row.fail(error) for row, error in read_chunks(self._target, choose_chunks(rows[: None if can_share else 1], most))
        ]

    def _answer(self, rows: list[Row]) -> list[RowResponse]:
        """Run a round of these rows, or finish the one that was started; the next may start before this one is read."""
        if not rows:
            return []
        began, has_read, self._has_read = self.pair.clock(), self._has_read, False
        current, self._ahead, width = self._ahead, None, 0
        if not any(row.round for row in rows):
            if len(rows) == len(self.rows) == 1:
                return self._alone(rows[0])
            current, width = self._begin(rows)
        done = [row for row in rows if row.round]
        alike, can_time, seconds = all(row.did(width) for row in done), False, 0.0
        verified = sum(row.round.draft.width for row in done if row.policy.is_free and row.round.draft)
        if current is not None:
            self._ahead = current.read(self._look_ahead(current, rows))
            current.commit(seconds := self.pair.clock() - began)
            # A plain round counts among others: one that started ahead, if the next one did too and no prompt was read meanwhile.
            # Alone between drafting rounds it takes longer.
            among_plain = current.is_ahead and self._ahead is not None and not has_read
            can_time = among_plain if current.is_plain else alike or verified <= width * len(done)
        found = self._hand_out(done)
        if can_time and all(response.error is None for response in found):
            self.policy.observe([row.policy for row in done], width, seconds, alike)
        return found

    @staticmethod
    def _alone(row: Row) -> list[RowResponse]:
        """A round of the only request."""
        try:
            return row.alone()
        except Exception as error:  # noqa: BLE001 - its own
            return [row.fail(error)]

    def _begin(self, rows: list[Row]) -> tuple[Round | None, int]:
        """Start a round of these rows. Returns: the round, as `begin_round` does, and the width that most rows have."""
        width = self._plan(rows)
        for row in rows:
            row.round = RowRound(row.run, row.anchor, row.seat)
        return begin_round(self._target, [row.round for row in rows]), width

    def _hand_out(self, rows: list[Row]) -> list[RowResponse]:
        """The responses of these rows for the finished round. A row whose next round has started moves to that one."""
        found = []
        for row in rows:
            this, row.round = row.round, self._ahead and self._ahead.of(row.run)
            try:
                if this.error is not None:
                    raise this.error
                found += row.emit(this.kept)
            except Exception as error:  # noqa: BLE001 - one request's own
                found.append(row.fail(error))
        return found

    def _plan(self, rows: list[Row]) -> int:
        """Prepare the rows for a round. Returns: the width that most rows have."""
        for row in rows:
            row.join()
        self._groups.arrange([(row.seat, row.room) for row in rows if row.seat])
        return self.policy.plan([row.policy for row in rows])

    def _look_ahead(self, current: Round, rows: list[Row]) -> Round | None:
        """Start the round after a plain one before that one is read, if it is sure to be plain too. Rows that end are left out.

        None if a row has yet to give its first token: it may draft after that.
        """
        if not current.is_plain or any(row.round is None or row.round.error or not row.run.emitted for row in rows):
            return None
        current.commit_ahead()
        going = [row for row in rows if row.run.emitted + 1 < row.options.max_tokens]
        try:
            if not going or self._plan(going) or any(row.run.next_draft_length() for row in going):
                return None
        except Exception:  # noqa: BLE001 - of a row's draft source, which raises it again in a round of its own
            return None
        return current.ahead([RowRound(row.run, -1, row.seat) for row in going])

    def close(self) -> None:
        """Take every request out."""
        for row in [*self.rows, *self.waiting]:
            self.remove(row.uid)

    @contextmanager
    def open(self) -> Iterator[BatchGenerator]:
        """Use while requests run: memory is wired as in `stream_generate`, and everything is released at the end."""
        with open_stream(), wired_limit([self.model, self.draft_model], self.stream), ExitStack() as at_end:
            at_end.callback(self.close)
            yield self


@dataclass
class BatchResponse:
    """What `batch_generate` returns, in the order of the prompts: mlx-lm's fields, and what drafting did for each row.

    stats: one per row; seconds: of the whole call, prompts included.
    """

    texts: list[str]
    stats: list[GenerationStats]
    caches: list[list[Any]] | None = None
    token_ids: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None
    seconds: float = 0.0
    responses: list[RowResponse] = field(default_factory=list, repr=False)


def batch_generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Any],
    prompt_caches: Sequence[list[Any]] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    draft_model: nn.Module | None = None,
    seeds: Sequence[int] | None = None,
    max_batch: int | None = MAX_BATCH,
    prefill_share: float = PREFILL_SHARE,
    **options: Any,
) -> BatchResponse:
    """Generate for several prompts together: mlx-lm's function with a DFlash drafter.

    Each row's tokens are those of `stream_generate` with the same options; EOS is not among them, as in mlx-lm's.

    Args beyond mlx-lm's:
      seeds: one per prompt, as `seed` of `stream_generate`. options: `stream_generate`'s keywords, the same for every prompt.
      max_batch, prefill_share: as `BatchGenerator`.
    Raises:
      as `stream_generate`; or the first error of a row, after the other rows were taken out.
    """
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Sequence):
        raise GenerationError(f"prompts is of type {type(prompts).__name__}; it must be a list of prompts", "Put one into a list")
    n = len(prompts)
    several = isinstance(max_tokens, Sequence) and not isinstance(max_tokens, str)
    given = {"prompt_caches": prompt_caches, "seeds": seeds, "max_tokens": max_tokens if several else None}
    for name, values in given.items():
        if values is not None and len(values) != n:
            raise GenerationError(f"{name} has {len(values)} entries; there are {n} prompts", "Give one for each prompt")
    most = list(max_tokens) if several else [max_tokens] * n
    rows = [_Collected() for _ in range(n)]
    batch = BatchGenerator(model, tokenizer, draft_model, max_batch=max_batch, prefill_share=prefill_share)
    batch.keeps_caches = return_prompt_caches
    began, done = time.perf_counter(), 0
    with batch.open():
        places = {}
        for i, prompt in enumerate(prompts):
            own = {"prompt_cache": prompt_caches[i]} if prompt_caches is not None else {}
            own |= {"seed": seeds[i]} if seeds is not None else {}
            places[batch.insert(prompt, max_tokens=most[i], **own, **options)] = rows[i]
        while len(batch):
            for response in batch.next():
                if response.error is not None:
                    raise response.error
                places[response.uid].add(response, return_logprobs)
                done += response.finish_reason is not None
            if verbose:
                print(f"[batch_generate] Finished processing {done}/{n} ...", end="\r", flush=True)
    seconds = time.perf_counter() - began
    if verbose:
        tokens = sum(row.last.generation_tokens for row in rows)
        print(f"[batch_generate] Finished processing {done}/{n}")
        print(f"[batch_generate] {tokens} tokens in {seconds:.3f} s, {tokens / seconds:.3f} tokens-per-sec")
    return BatchResponse(
        [row.text for row in rows],
        [row.last.stats for row in rows],
        [row.last.prompt_cache for row in rows] if return_prompt_caches else None,
        [row.ids for row in rows] if return_token_ids else None,
        [row.logprobs for row in rows] if return_logprobs else None,
        seconds,
        [row.last for row in rows],
    )


class _Collected:
    """What a row of `batch_generate` has given so far."""

    def __init__(self) -> None:
        self.text, self.ids, self.logprobs, self.last = "", [], [], None

    def add(self, response: RowResponse, wants_logprobs: bool) -> None:
        self.text, self.last = self.text + response.text, response
        if response.finish_reason != "stop":
            self.ids.append(response.token)
            if wants_logprobs:
                self.logprobs.append(response.logprobs[response.token].item())
