"""Reading the prompts of several rows: one target pass over a chunk of each.

    rows      a: 90 tokens    b: 300 tokens    c: 2,500 tokens         chunks of one pass, 2,048 tokens at most
    a pass    a a a ... | b b b ... | c c c ...                        90 + 300 + 1,658
              c c c ...                                                842

Knows rows and passes. Does not know when it is time to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx

from ..loop import inject_chunk
from .passes import BatchTarget, RowPass
from .row import Row

# A piece of a prompt that does not end it is read beside others only if it has as many tokens.
_LEAST = 256


def choose_chunks(rows: Sequence[Row], most: int | None) -> list[tuple[Row, list[int]]]:
    """The chunks of these prompts that the next pass reads, in order. most: its tokens; None: what each row's step allows."""
    found, taken = [], 0
    for row in rows:
        # No row is in a pass of more tokens than its own step allows.
        most = min(most or row.step_size, row.step_size)
        if (room := most - taken) <= 0:
            break
        chunk, is_last = row.next_chunk(room)
        if found and not is_last and room < _LEAST:
            break
        found.append((row, chunk))
        taken += len(chunk)
    return found


def read_chunks(target: BatchTarget | None, chunks: Sequence[tuple[Row, list[int]]]) -> list[tuple[Row, Exception]]:
    """Read these chunks, in one pass if there are several. Returns: the rows that failed, with their errors.

    A pass of several rows that fails is undone, and each row is read alone: the fault may be one row's own. If it failed while it
    was computed, the rows' entries may still hold its operations, and fail like it.
    """
    passed, failed, broken = [(row, chunk) for row, chunk in chunks if chunk], [], {}
    if len(passed) > 1:
        try:
            _run_pass(target, passed)
            passed = []
        except Exception:  # noqa: BLE001 - of one row, or of all
            for row, _ in passed:
                try:
                    row.undo_chunk()
                except Exception as error:  # noqa: BLE001 - of this request
                    broken[id(row)] = error
    alone = {id(row) for row, _ in passed}
    for row, chunk in chunks:
        try:
            if id(row) in broken:
                raise broken[id(row)]
            if id(row) in alone:
                _run_pass(target, [(row, chunk)])
            row.keep_chunk(chunk)
        except Exception as error:  # noqa: BLE001 - of this request
            failed.append((row, error))
    return failed


def _run_pass(target: BatchTarget | None, chunks: Sequence[tuple[Row, list[int]]]) -> None:
    """Run one pass of the target over these chunks, and give each row's drafter its features."""
    runs = [row.run for row, _ in chunks]
    if len(runs) == 1:
        features = [runs[0].target(mx.array([chunks[0][1]]), runs[0].cache.target).features]
    else:
        rows = [
            RowPass(run.cache.target, run.point, len(chunk), is_chunk=True) for run, (_, chunk) in zip(runs, chunks, strict=True)
        ]
        out = target(mx.array([token for _, chunk in chunks for token in chunk]), rows, eager=False)
        features = mx.split(out.features.swapaxes(0, 1), [*accumulate(row.size for row in rows[:-1])], axis=1)
    mx.eval([inject_chunk(run, part) for run, part in zip(runs, features, strict=True)])
    mx.clear_cache()
