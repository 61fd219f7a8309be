"""The generating thread: it takes requests from one queue, and runs them together (`together`) or one after the other.

Knows models, prompts as token ids and the prefix cache. Knows no HTTP, no messages and no JSON. Others use three calls, all from
one event loop: `Engine.submit`, `Generation.bursts` and `Generation.cancel`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import PurePath
from typing import Any

import mlx.core as mx

from ..batch.generator import MAX_BATCH, PREFILL_SHARE
from ..constraint import Grammar
from ..drafter_checks import largest_block
from ..errors import DFlashError
from ..first_use import try_after_answer
from ..models.target import Target
from ..prompt_files import PrefixFiles
from ..sampling import LogitsProcessor, SamplingSettings
from ..stats import tokens_a_round
from ..text import StopText, TextStream, begun_character, token_bytes
from .draft_kinds import DraftKinds
from .errors import ClientDisconnected, RequestError
from .prefix_cache import CacheOptions, PrefixCache, stream_from_prefix
from .together import Together

_log = logging.getLogger(__name__)
# Retry-After of a client that found the queue full.
_RETRY_S = 5


@dataclass
class Options:
    """What the server was started with.

    model_name, aliases: further names of the target; any_model_name: accept any name.
    max_queue: requests that may wait. unload_after_s: free the models after so long without a request; None: never.
    recommended: sampling settings from the target's generation_config.json. They apply unless the user or the request sets
    them, or the request's temperature is 0. prompt_cache_size: prompts kept in memory, at most prompt_cache_bytes in all (None:
    no limit; 0: keep nothing); prompt_cache_dir: where they are also kept in files.
    log_prompts: log the text of each prompt. max_batch: requests answered at the same time; None: `MAX_BATCH` with a
    drafter, else 1, because only drafted requests run together. prefill_share: as in `BatchGenerator`.
    """

    model_name: str | None = None
    aliases: list[str] = field(default_factory=list)
    any_model_name: bool = False
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    max_body_bytes: int = 8_000_000
    max_queue: int = 128
    unload_after_s: float | None = None
    allowed_origins: list[str] = field(default_factory=list)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    recommended: dict[str, Any] = field(default_factory=dict)
    block_size: int | None = None
    max_tokens: int = 512
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    caches: CacheOptions = field(default_factory=CacheOptions)
    prompt_cache_size: int = 10
    prompt_cache_bytes: int | None = None
    prompt_cache_dir: str | None = None
    prompt_cache_dir_bytes: int = 20 * 10**9
    log_prompts: bool = False
    max_batch: int | None = None
    prefill_share: float = PREFILL_SHARE


@dataclass
class LoadedPair:
    """The pair that is served.

    names: the model names that requests may use. limit: the target's context length, if known. block, most_drafts: the drafter's
    default block size and the largest number of drafts; None without a drafter. These stay while the models are unloaded.
    """

    name: str
    draft_name: str | None
    model: Any
    tokenizer: Any
    drafter: Any

    def __post_init__(self) -> None:
        target = Target(self.model)
        self.vocabulary, self.limit = target.vocabulary, target.context_length
        self.block = None if self.drafter is None else self.drafter.config.block_size
        self.most_drafts = None if self.drafter is None else largest_block(self.drafter) - 1
        self.names = {self.name, PurePath(self.name).name, "default_model"}

    def rename(self, options: Options) -> None:
        """Add the names that the options give."""
        self.names |= {*options.aliases, options.model_name or self.name}
        self.name = options.model_name or self.name

    def check(self, options: Options) -> None:
        """Raises: DFlashError for options that would make every request fail."""
        options.sampling.check_vocabulary(self.vocabulary)
        if self.drafter is not None and (options.block_size or 1) > (largest := largest_block(self.drafter)):
            raise DFlashError(f"block_size is {options.block_size}; with this drafter it must be at most {largest}")
        if self.drafter is None and (options.max_batch or 1) > 1:
            problem = f"max_batch is {options.max_batch}; requests run together with a drafter only"
            raise DFlashError(problem, "Give a drafter, or leave it out")
        if options.caches.exact and (options.max_batch or 1) > 1:
            problem = f"max_batch is {options.max_batch} with exact; a pass over several requests is not exact"
            raise DFlashError(problem, "Leave one of the two out")
        options.caches.check(self.model, self.drafter, options.block_size)

    def most_tokens(self, job: Job) -> int:
        """The maximum length of a job's answer, in tokens."""
        room = self.limit - len(job.prompt) if self.limit else job.max_tokens
        return room if job.max_tokens == -1 else min(job.max_tokens, room)

    def run_options(self, job: Job) -> dict[str, Any]:
        """A job's keywords for `stream_generate`."""
        sampler, processors = job.sampling.make(self.tokenizer, job.logit_bias)
        return {
            "logits_processors": [*processors, *job.processors],
            "max_tokens": self.most_tokens(job),
            "sampler": sampler,
            "seed": job.sampling.seed,
            "block_size": job.block_size,
            "constraint": job.constraint,
            "keep_rounds": False,
        }


@dataclass
class Job:
    """What to generate.

    prompt, shared: as in `messages.Prompt`. after_template: whether the prompt was rendered by a chat template.
    top: how many of the likeliest tokens to report for each token; None: no log-probabilities.
    processors: applied after those of the sampling settings. constraint: a grammar that the answer must follow.
    """

    prompt: list[int]
    shared: list[tuple[int, str]] = field(default_factory=list)
    after_template: bool = False
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    logit_bias: dict[int, float] = field(default_factory=dict)
    max_tokens: int = 512
    block_size: int | None = None
    stop: list[str] = field(default_factory=list)
    top: int | None = None
    processors: list[LogitsProcessor] = field(default_factory=list)
    constraint: Grammar | None = None


@dataclass
class Token:
    """One generated token, from the generating thread to the client's.

    text: new text that cannot be part of a stop string.
    offset, logprob, top: only with log-probabilities: characters of the answer before this token; its log-probability;
      (id, logprob) of the likeliest tokens, in order.
    verified: drafts verified so far in this run; rounds, tau: rounds that verified drafts, and their mean of accepted + 1.
    stop: the stop string that ended the answer. kind: as in `draft_kinds`. tps, a_round: tokens per second and per round so far.
    """

    text: str
    token: int
    offset: int
    finish_reason: str | None
    from_draft: bool
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)
    verified: int = 0
    stop: str | None = None
    rounds: int = 0
    tau: float | None = None
    kind: str = "plain"
    tps: float = 0.0
    a_round: float | None = None


class Generation:
    """A submitted job. cached: tokens of its prompt found in the prompt cache; done: prompt tokens read so far, with these.

    Events go from the generating thread to the event loop in which the generation was made.
    """

    def __init__(self, job: Job):
        self.job, self.cached, self.done, self.cancelled = job, 0, 0, False
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue()

    def cancel(self) -> None:
        """Stop: no more tokens come from now on. The pass that is running is finished."""
        self.cancelled = True
        self._events.put_nowait(ClientDisconnected())

    async def bursts(self, tick_s: float | None = None) -> AsyncIterator[list[Token]]:
        """Lists of new tokens, those of a round together; an empty list whenever none came for tick_s seconds.

        Raises:
          RequestError: the job failed. ClientDisconnected: it was cancelled.
        """
        while True:
            try:
                events = [await asyncio.wait_for(self._events.get(), tick_s)]
            except TimeoutError:
                yield []
                continue
            while not self._events.empty():
                events.append(self._events.get_nowait())
            tokens = list(takewhile(lambda event: isinstance(event, Token), events))
            if tokens:
                yield tokens
            if len(tokens) < len(events):
                end = events[len(tokens)]
                if end is None:
                    return
                raise end

    def put(self, event: Token | BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            # The event loop has ended: nobody waits for this.
            self.cancelled = True


class Engine:
    """Owns the pair and the thread that runs it.

    Args:
      open_pair: returns the names of target and drafter, then target, tokenizer and drafter. It runs in the generating
        thread, which owns the arrays' stream.
    """

    def __init__(self, options: Options, open_pair: Callable[[], tuple[str, str | None, Any, Any, Any]]):
        self.options, self._open = options, open_pair
        self.ready, self.fault = threading.Event(), None
        # What runs now: one generation alone, or several together.
        self._alone: Generation | None = None
        self._together: Together | None = None
        self.pair: LoadedPair | None = None
        self._cache = self._new_cache()
        # First, before any model is loaded, because the directory may be unusable.
        kept = options.prompt_cache_dir
        self._files = PrefixFiles(kept, options.prompt_cache_dir_bytes) if kept is not None else None
        self._queue: queue.Queue[Generation] = queue.Queue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="generate")

    def _new_cache(self) -> PrefixCache:
        limit = self.options.prompt_cache_bytes
        return PrefixCache(self.options.prompt_cache_size, 1 << 63 if limit is None else limit)

    def start(self) -> None:
        """Load the pair and wait for jobs."""
        self._thread.start()

    @property
    def current(self) -> Generation | None:
        """The generation that runs now; of several the oldest."""
        return next(iter(self.generations), None)

    @property
    def generations(self) -> list[Generation]:
        """All generations that run now."""
        together = self._together
        return [self._alone] if self._alone is not None else together.generations if together is not None else []

    @property
    def running(self) -> bool:
        return self.current is not None

    @property
    def waiting(self) -> int:
        """Number of requests in the queue whose clients are still there."""
        return sum(not generation.cancelled for generation in [*self._queue.queue])

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_alive() and self.fault is None and not self._closing.is_set()

    def submit(self, job: Job) -> Generation:
        """Put a job in the queue.

        Raises:
          RequestError: the prompt does not fit, the queue is full, or the thread has ended.
        """
        if not job.prompt:
            raise RequestError("the prompt is empty; it must have at least one token", "Send some text")
        if (limit := self.pair.limit) and len(job.prompt) >= limit:
            problem = f"the prompt has {len(job.prompt)} tokens; it must stay below the target's {limit} positions"
            tokens = len(job.prompt), limit
            raise RequestError(problem, "Send less", code="context_length_exceeded", tokens=tokens)
        if not self.is_healthy:
            raise RequestError("the generating thread has ended", "Start the server again", 503)
        if self.running and (waiting := self.waiting) >= self.options.max_queue:
            problem = f"{waiting} requests are waiting; at most {self.options.max_queue} may"
            raise RequestError(problem, "Ask again later", 503, "overloaded", {"Retry-After": str(_RETRY_S)})
        generation = Generation(job)
        self._queue.put(generation)
        return generation

    def close(self) -> None:
        """End after the running pass; waiting requests fail."""
        self._closing.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end. Returns: whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            try:
                self._load()
            except BaseException as error:
                self.fault = error
            finally:
                self.ready.set()
            stream, answered, since = mx.default_stream(mx.default_device()), False, time.monotonic()
            while self.fault is None and not self._read(self._closing.is_set()):
                if self._together:
                    self._step_batch()
                    answered, since = True, time.monotonic()
                    continue
                try:
                    generation = self._next_job()
                except queue.Empty:
                    if answered:
                        answered = False
                        stop = lambda: not self._queue.empty() or self._closing.is_set()  # noqa: E731
                        if self.is_loaded and self.pair.drafter is not None:
                            self.pair.drafter.pair.finish_measuring(stop)
                        try_after_answer(stop=stop)
                    self._cache.write_next()
                    if self.is_loaded and time.monotonic() - since > (self.options.unload_after_s or float("inf")):
                        self._unload()
                    continue
                self._start(generation, stream)
                answered, since = True, time.monotonic()
        finally:
            self._closing.set()
            if self._together is not None:
                self._together.end_all(_stopping())
            while not self._queue.empty():
                self._queue.get().put(_stopping())
            while self._cache.write_next(quiet_s=0):
                pass
            # Arrays must be freed in the thread that made them, and an MLX stream that is left behind aborts the process.
            del self._cache
            self._together = None
            if self.pair is not None:
                self.pair.model = self.pair.drafter = None
            mx.clear_streams()

    @property
    def is_loaded(self) -> bool:
        return self.pair is not None and self.pair.model is not None

    def _load(self) -> None:
        pair = LoadedPair(*self._open())
        pair.check(self.options)
        pair.rename(self.options)
        if self._files is not None:
            self._cache.keep_in(self._files, pair.model, pair.drafter, pair.name, self.options.caches)
        self.pair = pair

    def _unload(self) -> None:
        """Free the models and all prompt caches; the next job loads the models again."""
        while self._cache.write_next(quiet_s=0):
            pass
        self._cache, self._together = self._new_cache(), None
        self.pair.model = self.pair.drafter = None
        gc.collect()
        mx.clear_cache()
        _log.info("models unloaded: no request for %g s", self.options.unload_after_s)

    def _read(self, value: bool) -> bool:
        """A value that another thread may set. `RankEngine` overrides this and the next three: all ranks act on rank 0's."""
        return value

    def _next_job(self) -> Generation:
        return self._queue.get(timeout=0.1)

    def _first_waiting(self) -> Generation | None:
        return None if self._queue.empty() else self._queue.queue[0]

    def _take_first(self) -> None:
        self._queue.get()

    def _start(self, generation: Generation, stream: Any) -> None:
        """Begin a request in the batch, if requests run together here; else answer it alone, to its end."""
        if self._read(generation.cancelled):
            return
        self._alone = generation
        try:
            if not self.is_loaded:
                self._load()
            if self._can_run_together(stream):
                self._start_in_batch(generation)
                return
            finished = self._run_alone(generation, stream)
            generation.put(None if finished else _stopping())
        except Exception as error:
            generation.put(_request_error(error))
        finally:
            self._alone = None

    def _can_run_together(self, stream: Any) -> bool:
        """Whether requests run together here. If so, `_together` is made."""
        pair, options, most = self.pair, self.options, self.options.max_batch or MAX_BATCH
        if pair.drafter is None or most == 1 or options.caches.exact:
            return False
        if self._together is None:
            models, key = (pair.model, pair.tokenizer, pair.drafter), (pair.name, pair.draft_name)
            how = {
                "max_batch": most,
                "prefill_share": options.prefill_share,
                "most_tokens": pair.most_tokens,
                "told": _request_error,
                "is_cancelled": lambda generation: self._read(generation.cancelled),
            }
            self._together = Together(*models, self._cache, key, options.caches, stream=stream, **how)
        return True

    def _start_in_batch(self, generation: Generation) -> None:
        """Add a request to the batch."""
        text, options = _AnswerText(self.pair.tokenizer, generation.job), self.pair.run_options(generation.job)

        def say(response: Any) -> bool:
            token = text.token(response)
            generation.put(token)
            if token.finish_reason:
                generation.put(None)
            return token.finish_reason is not None

        self._together.start(generation, say, options)

    def _step_batch(self) -> None:
        """Start the waiting requests that fit, and run one round of the batch."""
        try:
            while (generation := self._first_waiting()) is not None:
                is_gone = self._read(generation.cancelled)
                if not is_gone and not self._together.may_start(generation):
                    break
                self._take_first()
                try:
                    if not is_gone:
                        self._start_in_batch(generation)
                except Exception as error:
                    generation.put(_request_error(error))
            self._together.step()
        except Exception as error:
            self._together.end_all(_request_error(error))

    def _run_alone(self, generation: Generation, stream: Any) -> bool:
        """Run a request by itself. Returns: whether its answer is complete."""
        pair, job = self.pair, generation.job

        def progress(done: int, total: int) -> None:
            generation.done = done

        run = stream_from_prefix(
            pair.model,
            pair.tokenizer,
            job.prompt,
            self._cache,
            (pair.name, pair.draft_name),
            draft_model=pair.drafter,
            shared=job.shared,
            should_stop=lambda: self._read(generation.cancelled or self._closing.is_set()),
            prompt_progress_callback=progress,
            caches=self.options.caches,
            stream=stream,
            **self.pair.run_options(job),
        )
        generation.cached = generation.done = run.held
        text, reason = _AnswerText(pair.tokenizer, job), None
        with closing(run.responses) as responses:
            for response in responses:
                token = text.token(response)
                generation.put(token)
                if reason := token.finish_reason:
                    break
        return reason is not None


def _request_error(error: Exception) -> RequestError:
    """An error in the form that clients get."""
    if isinstance(error, RequestError):
        return error
    # Requests were checked before, so any other error is a fault of this program.
    _log.error("a request failed", exc_info=error)
    told = str(error) if isinstance(error, DFlashError) else f"{type(error).__name__}: {error}"
    return RequestError(told, status=500)


def _stopping() -> RequestError:
    return RequestError("the server is stopping", "Ask again later", 503)


class _AnswerText:
    """Turns responses into `Token`s; their text ends at a stop string."""

    def __init__(self, tokenizer: Any, job: Job):
        self.tokenizer, self.top = tokenizer, job.top
        # With the whole prompt: the run gets only the part that was not cached.
        self.stream, self.stop = TextStream(tokenizer, job.prompt, job.after_template), StopText(job.stop)
        self.kinds = DraftKinds()
        # Characters given out so far; bytes of tokens whose characters are still held back.
        self.letters = 0
        self.held = b"" if self.top is None else begun_character(tokenizer, job.prompt)

    def token(self, response: Any) -> Token:
        reason = response.finish_reason
        piece = "" if reason == "stop" else self.stream.feed(response.token)
        piece += self.stream.finish() if reason else ""
        text, found = self.stop.feed(piece, last=reason is not None)
        row = response.logprobs if self.top is not None else None
        return Token(
            text,
            response.token,
            0 if row is None else self._place(None if reason == "stop" else response.token, piece),
            "stop" if found else reason,
            response.from_draft,
            None if row is None else row[response.token].item(),
            [] if row is None else top_tokens(row, self.top),
            response.stats.n_verified if response.stats else 0,
            self.stop.found,
            response.stats.n_drafting if response.stats else 0,
            response.stats.tau if response.stats else None,
            self.kinds.of(response),
            response.generation_tps,
            tokens_a_round(response),
        )

    def _place(self, token: int | None, piece: str) -> int:
        """The offset of a token's text, also while characters of earlier tokens are held back."""
        start = self.letters + len(self.held.decode(errors="ignore"))
        self.held += (token_bytes(self.tokenizer, token) or b"") if token is not None else b""
        self.letters += len(piece)
        if not self.stream.holds:
            self.held = b""
        elif piece:
            known = self.held.decode(errors="ignore")
            rest = self.held[len(known[: len(piece)].encode()) :]
            # No character has more than 4 bytes: longer rests are not the beginning of one.
            self.held = rest if len(rest) < 4 or known[len(piece) :] else b""
        return start


def top_tokens(row: mx.array, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest ids of a row [V] with their log-probabilities, the likeliest first."""
    count = min(count, row.shape[-1] - 1)
    if count <= 0:
        return []
    ids = mx.argpartition(-row, kth=count - 1)[:count]
    return sorted(zip(ids.tolist(), row[ids].tolist(), strict=True), key=lambda pair: -pair[1])
