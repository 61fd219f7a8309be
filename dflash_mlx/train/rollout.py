"""Decode many conversations at once with any mlx-lm model: the target writes its own training text.

All rows start at position 0 and go in step, so the model's ordinary caches serve (no padding, no masks, recurrent
caches too). A row is a script: given ids first, then a user turn sampled from the target, ids of the chat template, the
answer, and perhaps another turn. Knows models and caches; knows nothing of files or of what the text says.

    given .......... user turn ....... glue . answer ............. again . user turn ... glue . answer ...
    role 0           role 0            0      1 (EOS too)           0       0             0      1
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

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
        found |= (tail[:, period:] == tail[:, :-period]).all(1)
    return found


def _keep_rows(cache: list, rows: mx.array) -> None:
    """Drop the rows of a batch that are not in `rows`, in every mlx-lm cache kind that holds arrays by row."""
    for c in cache:
        if hasattr(c, "caches"):
            _keep_rows(c.caches, rows)
        elif hasattr(c, "cache"):
            c.cache = [None if a is None else a[rows] for a in c.cache]
        else:
            c.keys, c.values = c.keys[rows], c.values[rows]


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
        logits = logits.astype(mx.float32)
        if noisy:
            key, now = mx.random.split(key)
            in_user = phase == _USER
            # min-p keeps a sampled question readable without the sort that top-p needs.
            floor = logits.max(-1, keepdims=True) + mx.log(mx.array(min_p))
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
            # The first glue id was sampled by the row itself: go on behind it.
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
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].given))
    shortest = len(rows[order[0]].given)
    longest = max(len(rows[i].given) for i in order)
    assert 0 < shortest and longest < max_len
    given = np.full((len(rows), max_len), -1, np.int32)
    for at, i in enumerate(order):
        given[at, : len(rows[i].given)] = rows[i].given
    index = np.arange(len(rows))  # place of each active row in `order`
    ids_out = np.zeros((len(rows), max_len), np.int32)
    answer_out = np.zeros((len(rows), max_len), bool)
    length = np.full(len(rows), max_len)
    whole = np.zeros(len(rows), bool)
    ids_out[:, :shortest] = given[:, :shortest]

    cache = make_prompt_cache(model)
    phase = mx.array([_USER if rows[i].user else _ANSWER for i in order], mx.int32)
    used = mx.zeros(len(rows), mx.int32)
    turns = mx.array([rows[i].turns for i in order], mx.int32)
    temp = mx.array([rows[i].temp for i in order], mx.float32)
    limit = mx.array([rows[i].user_limit for i in order], mx.int32)
    key = mx.random.key(seed)
    steps = {noisy: _step(frame, noisy, min_p) for noisy in (False, True)}
    hot = np.array([rows[i].temp > 0 for i in order])
    noisy = True

    # The ids that all rows were given and share a length for are read in one pass, in slices that bound the memory.
    at, piece = 0, max(1, 65536 // len(rows))
    while at < shortest - 1:
        end = min(at + piece, shortest - 1)
        model(mx.array(given[:, at:end]), cache=cache)
        mx.eval([c.state for c in cache])
        at = end
    ids = mx.array(given[:, shortest - 1])

    pending: list[tuple[mx.array, mx.array]] = []
    first = position = shortest
    given_on_device = mx.array(given)
    written = 0
    while position < max_len:
        logits = model(ids[:, None], cache=cache)[:, -1]
        ids, is_answer, phase, used, turns, key = steps[noisy](
            logits, given_on_device[:, position], phase, used, turns, temp, limit, key
        )
        mx.async_eval(ids, is_answer, phase)
        pending.append((ids, is_answer))
        position += 1
        if (position - shortest) % check_every and position < max_len:
            continue

        ids_out[index, first:position] = np.array(mx.stack([p[0] for p in pending], 1))
        answer_out[index, first:position] = now = np.array(mx.stack([p[1] for p in pending], 1))
        pending, first = [], position
        written += int(now.sum())
        phases = np.array(phase)
        done = phases == _DONE
        if position - shortest >= 96:
            done |= (phases == _ANSWER) & in_loop(ids_out[index, :position]) & answer_out[index, position - 96 : position].all(1)
        length[index[done]] = position
        # Buffers of outgrown caches would pile up until the device is full.
        mx.clear_cache()
        if progress:
            progress(position, int((~done).sum()), written)
        if done.all() or (deadline and time.monotonic() > deadline):
            length[index[~done]] = position
            break
        noisy = bool((phases[~done] != _ANSWER).any() or hot[index[~done]].any() or turns.max().item() > 1)
        if done.mean() >= 0.25 and position < max_len:
            kept = np.flatnonzero(~done)
            rows_kept = mx.array(kept)
            index = index[kept]
            _keep_rows(cache, rows_kept)
            ids, phase, used, turns, temp, limit, given_on_device = (
                a[rows_kept] for a in (ids, phase, used, turns, temp, limit, given_on_device)
            )
            mx.eval([c.state for c in cache], ids)

    result: list[Written | None] = [None] * len(rows)
    eos = np.array(frame.eos)
    for at, i in enumerate(order):
        answers = np.flatnonzero(answer_out[at, : length[at]])
        end = int(answers[-1]) + 1 if len(answers) else int(length[at])
        whole[at] = bool(len(answers)) and bool(np.isin(ids_out[at, end - 1], eos))
        result[i] = Written(ids_out[at, :end].copy(), answer_out[at, :end].copy(), rows[i], bool(whole[at]))
    return result
