"""Decode many conversations at once with any mlx-lm model: the target writes its own training text.

All rows start at position 0 and go in step, so the model's ordinary caches serve (no padding, no masks, recurrent
caches too). A row is a script: given ids first, then a user turn sampled from the target, ids of the chat template, the
answer, and perhaps another turn. Knows models and caches; knows nothing of files or of what the text says.

    given .......... user turn ....... glue . answer ............. again . user turn ... glue . answer ...
    role 0           role 0            0      1 (EOS too)           0       0             0      1
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..kernels import small_batch
from ..kernels.routing import ManyTexts, attention_calls
from ..models.intercept import intercept, own_class

# Phases of a row. Script phases are pointers into the table glue + again and lie at 0 and above.
_USER, _ANSWER, _DONE = -1, -2, -3


@dataclass(frozen=True)
class Frame:
    """Ids that the chat template puts round the turns.

    prefix: up to the first user turn; glue: after a user turn, up to the answer (its first id ends the user turn);
    again: after an answer's EOS, up to the next user turn. A base model has empty glue and again.
    """

    prefix: tuple[int, ...]
    glue: tuple[int, ...]
    again: tuple[int, ...]
    eos: tuple[int, ...]


@dataclass
class Row:
    """One conversation to write.

    given: ids to start from; user: the target goes on with the user turn (else with the answer); user_limit: longest
    sampled user turn (without glue: its exact length); temp: of the answer, 0 is greedy; turns: answers to write.
    """

    given: Sequence[int]
    user: bool = True
    user_limit: int = 160
    temp: float = 0.0
    turns: int = 1
    tag: int = 0


@dataclass
class Written:
    """What a row became: ids, and per id whether it belongs to an answer. `whole`: the last answer ended with EOS."""

    ids: np.ndarray
    answer: np.ndarray
    row: Row
    whole: bool


def in_loop(tail: np.ndarray, max_period: int = 32) -> np.ndarray:
    """Which rows end in a repetition: the last 96 ids have one period of at most `max_period`.

    Shapes:
      - tail: [B, T >= 96] int
    Returns:
      - [B] bool
    """
    tail = tail[:, -96:]
    found = np.zeros(len(tail), bool)
    for period in range(1, max_period + 1):
        # Few rows end like this, and only those are looked at.
        rows = np.flatnonzero((tail[:, -1] == tail[:, -1 - period]) & ~found)
        found[rows] = (tail[rows, period:] == tail[rows, :-period]).all(1)
    return found


def _rows_of(a: mx.array, rows: mx.array) -> mx.array:
    """a[rows], in words of eight bytes where a row has whole ones: MLX's CUDA kernel takes as long for each as for two bytes."""
    flat = a.reshape(len(a), -1)
    if flat.nbytes // len(a) % 8:
        return a[rows]
    return flat.view(mx.uint64)[rows].view(a.dtype).reshape(-1, *a.shape[1:])


def _keep_rows(cache: list, rows: mx.array) -> None:
    """Drop the rows of a batch that are not in `rows`, in every mlx-lm cache kind that holds arrays by row; one after the other,
    so that no more than one is there twice."""
    for c in cache:
        if hasattr(c, "caches"):
            _keep_rows(c.caches, rows)
            continue
        if hasattr(c, "cache"):
            c.cache = [None if a is None else _rows_of(a, rows) for a in c.cache]
        else:
            c.keys, c.values = _rows_of(c.keys, rows), _rows_of(c.values, rows)
        mx.eval(c.state)


def _step(frame: Frame, noisy: bool, min_p: float):
    """One position for all rows: choose the id, then move each row's phase.

    Returns a compiled function of (logits [B, V], given [B], state) -> (ids [B], is_answer [B], state), where state is
    (phase, used, turns, temp, limit, key) and given is -1 where the row's own script has run out.
    """
    glue, again = len(frame.glue), len(frame.again)
    table = mx.array([*frame.glue, *frame.again, 0], mx.int32)
    eos = mx.array(frame.eos, mx.int32)

    @partial(mx.compile)
    def step(logits, given, phase, used, turns, temp, limit, key):
        # Maxima are taken in the model's own type: float32 copies of all logits would be written and read again.
        if noisy:
            key, now = mx.random.split(key)
            in_user = phase == _USER
            # min-p keeps a sampled question readable without the sort that top-p needs.
            floor = logits.max(-1, keepdims=True).astype(mx.float32) + mx.log(mx.array(min_p))
            logits = logits.astype(mx.float32)
            logits = mx.where(in_user[:, None] & (logits < floor), -mx.inf, logits)
            heat = mx.where(in_user, 1.0, temp)[:, None]
            logits = logits + heat * mx.random.gumbel(logits.shape, key=now)
        sampled = mx.argmax(logits, -1).astype(mx.int32)
        scripted = table[mx.maximum(phase, 0)]
        free = given < 0
        ids = mx.where(free, mx.where(phase >= 0, scripted, mx.where(phase == _DONE, eos[0], sampled)), given)
        is_answer = free & (phase == _ANSWER)

        ended = (ids[:, None] == eos).any(-1) & is_answer
        user = free & (phase == _USER)
        used = mx.where(user, used + 1, 0)
        next_phase = phase
        if glue:
            # The first glue id was sampled by the row itself: go on after it.
            after = 1 if glue > 1 else _ANSWER
            over = user & (used >= limit)
            next_phase = mx.where(user & (ids == frame.glue[0]), after, mx.where(over, _DONE, next_phase))
        else:
            next_phase = mx.where(user & (used >= limit), _ANSWER, next_phase)
        script = free & (phase >= 0)
        moved = phase + 1
        moved = mx.where(moved == glue + again, _USER, mx.where(moved == glue, _ANSWER, moved))
        next_phase = mx.where(script, moved, next_phase)
        turns = mx.where(ended, turns - 1, turns)
        next_phase = mx.where(ended, mx.where((turns > 0) & (again > 0), glue, _DONE), next_phase)
        return ids, is_answer, next_phase, used, turns, key

    return step


class _Rollout:
    """Rows in the order of their given lengths, the state of those that are still written, and what was written so far."""

    def __init__(self, model, rows: Sequence[Row], frame: Frame, max_len: int, seed: int):
        self.model, self.rows, self.frame, self.max_len = model, rows, frame, max_len
        self.order = order = sorted(range(len(rows)), key=lambda i: len(rows[i].given))
        self.shortest = shortest = len(rows[order[0]].given)
        assert 0 < shortest and max(len(row.given) for row in rows) < max_len
        given = np.full((len(rows), max_len), -1, np.int32)
        for at, i in enumerate(order):
            given[at, : len(rows[i].given)] = rows[i].given
        self.index = np.arange(len(rows))  # place of each active row in `order`
        self.ids_out = np.zeros((len(rows), max_len), np.int32)
        self.answer_out = np.zeros((len(rows), max_len), bool)
        self.length = np.full(len(rows), max_len)
        self.ids_out[:, :shortest] = given[:, :shortest]
        self.cache = make_prompt_cache(model)
        self.calls = attention_calls(model, own_class, route=ManyTexts) if small_batch.here() else []
        phase = mx.array([_USER if rows[i].user else _ANSWER for i in order], mx.int32)
        turns = mx.array([rows[i].turns for i in order], mx.int32)
        temp = mx.array([rows[i].temp for i in order], mx.float32)
        limit = mx.array([rows[i].user_limit for i in order], mx.int32)
        # (phase, used, turns, temp, limit): one value a row
        self.state = (phase, mx.zeros(len(rows), mx.int32), turns, temp, limit)
        self.key = mx.random.key(seed)
        self.hot = np.array([rows[i].temp > 0 for i in order])
        self.noisy = True
        self.given, self.ids = mx.array(given), mx.array(given[:, shortest - 1])
        # What the first half of the layers made of the last ids.
        self.half = self.ids

    def prefill(self) -> None:
        """Read the ids that all rows were given and share a length for in one pass, in slices that bound the memory."""
        at, piece = 0, max(1, 65536 // len(self.rows))
        while at < self.shortest - 1:
            end = min(at + piece, self.shortest - 1)
            self.model(self.given[:, at:end], cache=self.cache)
            mx.eval([c.state for c in self.cache])
            at = end

    def step(self, take, position: int) -> tuple[mx.array, mx.array]:
        """One position for all active rows, enqueued: ids and whether each belongs to an answer."""
        before, half_before, layers = self.ids, self.half, self.model.layers

        # Not a method that `self.calls` holds: in a circle the caches would outlive the rows.
        def note_half(inner, args, kwargs):
            self.half = args[0]
            return inner(*args, **kwargs)

        with intercept([(layers[len(layers) // 2], note_half), *self.calls]):
            logits = self.model(before[:, None], cache=self.cache)[:, -1]
        phase, used, turns, temp, limit = self.state
        self.ids, is_answer, phase, used, turns, self.key = take(
            logits, self.given[:, position], phase, used, turns, temp, limit, self.key
        )
        self.state = (phase, used, turns, temp, limit)
        # A cache takes its new row in place only if no pass under way still reads it: else MLX copies the whole cache. So each
        # half of the layers waits for its half of the step before, and the device has one while the host enqueues the other.
        mx.eval(half_before)
        mx.async_eval(self.half)
        mx.eval(before)
        mx.async_eval(self.ids, is_answer, phase)
        return self.ids, is_answer

    def store(self, pending: list[tuple[mx.array, mx.array]], first: int, position: int) -> int:
        """Keep the ids of positions first .. position - 1; returns how many of them are answers."""
        self.ids_out[self.index, first:position] = np.array(mx.stack([p[0] for p in pending], 1))
        self.answer_out[self.index, first:position] = now = np.array(mx.stack([p[1] for p in pending], 1))
        return int(now.sum())

    def done(self, position: int) -> np.ndarray:
        """Which active rows have ended or loop; notes their lengths."""
        phases, long = np.array(self.state[0]), position - self.shortest >= 96
        done = phases == _DONE
        if long:
            last = slice(position - 96, position)
            done |= (phases == _ANSWER) & self.answer_out[self.index, last].all(1) & in_loop(self.ids_out[self.index, last])
        self.length[self.index[done]] = position
        left = self.index[~done]
        self.noisy = bool((phases[~done] != _ANSWER).any() or self.hot[left].any() or self.state[2].max().item() > 1)
        return done

    def drop(self, done: np.ndarray) -> None:
        """Take rows out of the batch."""
        kept = np.flatnonzero(~done)
        rows = mx.array(kept)
        self.index = self.index[kept]
        _keep_rows(self.cache, rows)
        self.ids, self.given, *state = (a[rows] for a in (self.ids, self.given, *self.state))
        self.state = tuple(state)
        mx.eval(self.ids, self.given, self.state)

    def written(self) -> list[Written]:
        """What the rows became, in the order given."""
        result: list[Written | None] = [None] * len(self.rows)
        for at, i in enumerate(self.order):
            answers = np.flatnonzero(self.answer_out[at, : self.length[at]])
            end = int(answers[-1]) + 1 if len(answers) else int(self.length[at])
            whole = bool(len(answers)) and int(self.ids_out[at, end - 1]) in self.frame.eos
            result[i] = Written(self.ids_out[at, :end].copy(), self.answer_out[at, :end].copy(), self.rows[i], whole)
        return result


@contextmanager
def quick_switches() -> Iterator[None]:
    """Let Python switch threads ten times as often: so the thread that filters text does not make the one with kernels wait."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def write_rows(
    model,
    rows: Sequence[Row],
    frame: Frame,
    max_len: int,
    seed: int = 0,
    min_p: float = 0.02,
    check_every: int = 32,
    progress: Callable[[int, int, int], None] | None = None,
    deadline: float | None = None,
) -> list[Written]:
    """Write all rows, in step, to at most `max_len` ids each; rows that end or loop leave the batch.

    Rows come back in the order given. `progress(position, active rows, answer ids so far)` is called at each check.
    After `deadline` (`time.monotonic()`) the rows are cut as they are.
    """
    run = _Rollout(model, rows, frame, max_len, seed)
    steps = {noisy: _step(frame, noisy, min_p) for noisy in (False, True)}
    run.prefill()
    pending: list[tuple[mx.array, mx.array]] = []
    first = position = run.shortest
    written = 0
    while position < max_len:
        pending.append(run.step(steps[run.noisy], position))
        position += 1
        if (position - run.shortest) % check_every and position < max_len:
            continue
        written += run.store(pending, first, position)
        pending, first = [], position
        done = run.done(position)
        # Buffers of outgrown caches would pile up until the device is full. Not at each step: then all would be allocated again.
        if mx.get_cache_memory() > mx.get_active_memory() / 2:
            mx.clear_cache()
        if progress:
            progress(position, int((~done).sum()), written)
        if done.all() or (deadline and time.monotonic() > deadline):
            run.length[run.index[~done]] = position
            break
        if done.mean() >= 0.125 and position < max_len:
            run.drop(done)
    return run.written()
