"""The grid: whatever the block size, prompt length, limit, EOS place and drafter, the answer is mlx-lm's own greedy answer.

One plain greedy run a prompt gives the line; what a cell must return follows from it by mlx-lm's rules, and a sample of cells
is also compared with mlx-lm itself.
"""

import itertools
import random
from dataclasses import dataclass

import mlx.core as mx
import pytest
from kit import Noisy, Oracle, greedy_ids, ids_of, letters, plain, run, text_of, tiny_drafter, tiny_target
from rows import tolerance

from dflash_mlx import make_prompt_cache
from dflash_mlx.prompt_cache import PairCache

STEP = 4
BLOCKS = (1, 2, 5, 8, 16)
PROMPTS = (1, 2, STEP - 1, STEP, STEP + 1)
DRAFTERS = ("oracle", "noisy", "hopeless")


@dataclass(frozen=True)
class Cell:
    block: int
    prompt: int
    max_tokens: int
    eos: int | None  # offset of the token that is declared EOS, None: no EOS
    drafter: str


GRID = [
    Cell(block, prompt, limit, eos, drafter)
    for block, prompt, drafter in itertools.product(BLOCKS, PROMPTS, DRAFTERS)
    for limit in dict.fromkeys((1, max(block - 1, 1), block, block + 1, 50))
    for eos in (None, *range(block))
]
QUICK = random.Random(20260206).sample(GRID, 150)


@pytest.fixture(scope="module")
def lines():
    """Model, greedy lines {prompt length: (prompt, 70 greedy tokens)}, and for each length the drafters, which know the line."""
    model = tiny_target(seed=5, layers=3, hidden=20, vocab=251)
    known = {n: _line(model, n) for n in PROMPTS}
    drafters = {}
    for n, (prompt, line) in known.items():
        for name, cls in (("oracle", Oracle), ("noisy", Noisy)):
            drafters[name, n] = tiny_drafter(model, cls=cls, taps=(0, 1)).learn(prompt + line, model)
        drafters["hopeless", n] = tiny_drafter(model, taps=(0, 1))
    return model, known, drafters


def _line(model, n):
    """A prompt of n tokens after which 16 different tokens come first: a repeated one would end the answer too early."""
    for first in range(251):
        prompt = [(first + 37 * i) % 251 for i in range(n)]
        line = greedy_ids(model, prompt, 17)
        if len(set(line[:16])) == 16:
            return prompt, line + greedy_ids(model, prompt + line, 53)
    raise AssertionError("no prompt gives 16 different tokens")


def check_cell(lines, cell, against_mlx_lm=False):
    model, known, drafters = lines
    prompt, line = known[cell.prompt]
    drafter = drafters[cell.drafter, cell.prompt]
    eos = () if cell.eos is None else (line[cell.eos],)
    end = min([cell.max_tokens, *(line.index(token) + 1 for token in eos)])
    expected = line[:end]
    stopped = expected[-1] in eos

    cache = make_prompt_cache(model, drafter)
    options = {"tokenizer": letters(*eos), "block_size": cell.block, "prefill_step_size": STEP, "prompt_cache": cache}
    got = run(model, drafter, prompt, cell.max_tokens, **options)

    assert ids_of(got) == expected
    assert [r.generation_tokens for r in got] == list(range(1, end + 1))
    assert [r.finish_reason for r in got] == [None] * (end - 1) + ["stop" if stopped else "length"]
    assert text_of(got) == "".join(f"<{t}>" for t in expected if t not in eos)
    assert {r.prompt_tokens for r in got} == {cell.prompt}
    # The last token is the next anchor: committed, and not in the target's cache.
    held = PairCache.read(cache)
    assert [entry.offset for entry in held.target] == [cell.prompt + end - 1] * 3
    assert held.ids == prompt + expected
    assert {entry.offset + held.pending for entry in held.drafter} == {cell.prompt + end - 1}
    stats = got[-1].stats
    assert all(len(r["drafted"]) == cell.block - 1 == r["width"] for r in stats.rounds)
    # Tokens come from the prefill (one) and from rounds; no round is run for tokens that are not wanted.
    assert 1 + sum(r["accepted"] + 1 for r in stats.rounds[:-1]) < end or not stats.rounds
    if cell.drafter == "oracle":
        assert all(r["accepted"] == cell.block - 1 for r in stats.rounds)
    if against_mlx_lm:
        theirs = plain(model, letters(*eos), prompt, max_tokens=cell.max_tokens)
        same = ("text", "token", "prompt_tokens", "generation_tokens", "finish_reason")
        assert [[getattr(r, f) for f in same] for r in theirs] == [[getattr(r, f) for f in same] for r in got]
        assert all(mx.allclose(a.logprobs, b.logprobs, atol=tolerance()).item() for a, b in zip(theirs, got, strict=True))


@pytest.mark.quick(1)
def test_150_cells_of_the_grid_equal_plain_decoding(lines):
    for i, cell in enumerate(QUICK):
        try:
            check_cell(lines, cell, against_mlx_lm=i % 15 == 0)
        except AssertionError as error:
            raise AssertionError(f"{cell}: {error}") from error


@pytest.mark.full
def test_every_cell_of_the_grid_equals_plain_decoding(lines):
    for cell in GRID:
        try:
            check_cell(lines, cell)
        except AssertionError as error:
            raise AssertionError(f"{cell}: {error}") from error
