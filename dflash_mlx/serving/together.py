"""Requests of a server that one `BatchGenerator` answers together: which may start, and which cache they start from.

Knows models, generations and the prefix cache. Knows no queue and no HTTP. All of it runs in the generating thread.

A request starts if there is a row for it, if the memory that all running requests may need in the end is enough, and if no other
request is reading a beginning that both share. It starts from a stored prefix, or from a copy of a running request's cache.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..batch.generator import BatchGenerator
from ..batch.groups import MOST, MOST_TOKENS
from ..batch.row import Row, RowResponse
from ..generation import make_prompt_cache
from ..machine import limit_bytes
from ..memory import RunSize, cache_bytes, entries_after_rows, model_bytes
from ..prompt_cache import PairCache, trim_prompt_cache
from ..text import common_start
from .prefix_cache import CacheOptions, PrefixCache, after_held, needs_copies

_log = logging.getLogger(__name__)
# A copy of another request's cache must save at least this many tokens.
_WORTH = 16


@dataclass
class _Served:
    """A running request. needs: bytes that its caches may take in the end; say: passes a response on, True if it was the last."""

    generation: Any
    row: Row
    needs: int
    say: Callable[[RowResponse], bool]


class Together:
    """The running requests.

    Args:
      key: names models that may share caches in `store`. most_tokens: the limit of a job's answer. told: turns an error into what
        the client gets. is_cancelled: whether the client of a generation has left.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        drafter: Any,
        store: PrefixCache,
        key: Any,
        caches: CacheOptions,
        *,
        max_batch: int,
        prefill_share: float,
        most_tokens: Callable[[Any], int],
        told: Callable[[Exception], Exception],
        is_cancelled: Callable[[Any], bool],
        stream: Any,
    ):
        self.store, self.key, self.caches, self.drafter, self._most = store, key, caches, drafter, most_tokens
        self._told, self._is_cancelled = told, is_cancelled
        self._batch = BatchGenerator(model, tokenizer, drafter, max_batch=max_batch, prefill_share=prefill_share, stream=stream)
        self._served: dict[int, _Served] = {}
        self._open = ExitStack()
        # Memory per row, from what a few rows take.
        self._entries = entries_after_rows(model, drafter, caches.max_kv_size)
        self._room = self._batch.pair.broadcast(limit_bytes(), "room") - model_bytes(model) - model_bytes(drafter)
        if self._batch.max_batch > 1:
            # Rows that run together share arrays, which are longer than the rows.
            self._room = (self._room - self._needs_of(MOST_TOKENS)) / MOST

    def __len__(self) -> int:
        return len(self._served)

    @property
    def generations(self) -> list[Any]:
        """The running generations, the oldest first."""
        return [served.generation for served in list(self._served.values())]

    def may_start(self, generation: Any) -> bool:
        """Whether another generation may start now. The first one always may."""
        if not self._served:
            return True
        if len(self._served) >= self._batch.max_batch or not self._batch.can_add():
            return False
        running = sum(served.needs for served in self._served.values())
        if self._room - running < (needs := self._needs(generation.job)):
            return False
        prompt = generation.job.prompt
        if any(self._is_read_by(served.row, prompt) for served in self._served.values()):
            return False
        # Free stored prefixes that nobody uses, to make room.
        self.store.trim_to(n_bytes=int(self._room - running - needs))
        return True

    def _needs(self, job: Any) -> int:
        return self._needs_of(len(job.prompt) + self._most(job))

    def _needs_of(self, tokens: int) -> int:
        return cache_bytes(self._entries, RunSize.of(tokens, vars(self.caches)))

    @staticmethod
    def _is_read_by(row: Row, prompt: list[int]) -> bool:
        """Whether a row is reading a beginning that it shares with the prompt."""
        if not row.is_reading:
            return False
        ahead = [*row.run.cache.ids, *row.rest]
        return common_start(ahead, prompt) > row.run.rows + _WORTH

    def start(self, generation: Any, say: Callable[[RowResponse], bool], options: dict[str, Any]) -> None:
        """Add a request. options: as of `stream_generate`.

        Raises: as `stream_generate`.
        """
        job = generation.job
        if not self._served:
            self._open.enter_context(self._batch.open())
        entries, held = self._beginning(job.prompt)

        def progress(done: int, total: int) -> None:
            generation.done = held + done

        generation.cached = generation.done = held
        processors = [after_held(job.prompt[:held], processor) for processor in options.pop("logits_processors")]
        given = {**self.caches.of_a_run(), **options, "logits_processors": processors or None}
        try:
            uid = self._batch.insert(job.prompt[held:], prompt_cache=entries, prompt_progress_callback=progress, **given)
        except BaseException:
            self._close_if_idle()
            raise
        row = self._batch.row(uid)
        if needs_copies(entries):
            row.keep_at = {length: self._keeper(job.prompt[:length], kind) for length, kind in job.shared if length > held}
        self._served[uid] = _Served(generation, row, self._needs(job), say)

    def _keeper(self, tokens: list[int], kind: str) -> Callable[[list[Any]], None]:
        """A function that stores a copy of a cache with these tokens, for later prompts that begin with them."""
        return lambda entries: self.store.insert_cache(self.key, tokens, copy.deepcopy(entries), cache_type=kind)

    def _beginning(self, prompt: list[int]) -> tuple[list[Any], int]:
        """The cache that holds the longest beginning of the prompt, and its number of tokens."""
        entries, rest = self.store.fetch_nearest_cache(self.key, prompt)
        held = len(prompt) - len(rest)
        for served in self._served.values():
            common = min(common_start(served.row.run.cache.ids[: served.row.run.rows], prompt), len(prompt) - 1)
            if common <= held + _WORTH or needs_copies(served.row.run.cache.entries):
                continue
            copied = copy.deepcopy(served.row.leave_settled())
            surplus = len(PairCache.read(copied).ids) - common
            if trim_prompt_cache(copied, surplus) == surplus:
                entries, held = copied, common
        if entries is None:
            entries = make_prompt_cache(self._batch.model, self.drafter, self.caches.max_kv_size)
        return entries, held

    def step(self) -> None:
        """Run a round of all requests, and read a piece of a prompt. Requests whose client has left end."""
        for uid, served in list(self._served.items()):
            if self._is_cancelled(served.generation):
                self._end(uid, self._batch.remove(uid))
        if not self._served:
            return
        for response in self._batch.next():
            if (served := self._served.get(response.uid)) is None:
                # It reached its stop string earlier in this round.
                continue
            is_last = True
            if response.error is None:
                is_last = served.say(response)
            else:
                served.generation.put(self._told(response.error))
            if is_last:
                cache = response.prompt_cache or self._batch.remove(response.uid)
                self._end(response.uid, None if response.error else cache)

    def _end(self, uid: int, entries: list[Any] | None) -> None:
        self._served.pop(uid)
        if entries is not None and (ids := PairCache.read(entries).ids):
            self.store.insert_cache(self.key, ids, entries)
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self._served:
            self._open.close()

    def end_all(self, error: Exception) -> None:
        """End all running requests, for an error that concerns them all."""
        for uid, served in list(self._served.items()):
            served.generation.put(error)
            self._served.pop(uid)
            try:
                self._batch.remove(uid)
            except Exception:
                # Its cache is dropped anyway.
                _log.exception("a request could not be ended")
        self._close_if_idle()
