"""Rounds: what is enqueued ahead, and how much of a round there is once a row."""

import io
import re
import sys
from collections import Counter

import mlx.core as mx
import pytest
import schedules
from kit import ids_of, letters, tiny_drafter, tiny_target

from dflash_mlx import BatchGenerator, stream_generate
from dflash_mlx.batch import group_pass, passes
from dflash_mlx.batch.groups import Seat
from dflash_mlx.batch.policy import BatchPolicy
from dflash_mlx.batch.rounds import Round
from dflash_mlx.kernels.autotune import NotFiniteError
from dflash_mlx.models.target import Target
from dflash_mlx.pair import DFlashPair
from dflash_mlx.proposers import Draft
from dflash_mlx.sampling import Distribution

PROMPTS = [[5, 9, 2, 7], [3] * 30, [8, 1], [4, 4, 6, 1, 9]]


@pytest.fixture(scope="module")
def pair():
    model = tiny_target()
    return model, tiny_drafter(model)


def plain_batch(model, drafter, prompts, n=14, options=({},)):
    """A batch that never drafts."""
    batch = BatchGenerator(model, letters(), drafter)
    batch.policy.plan = lambda rows: [setattr(row, "width", 0) for row in rows] and 0
    for i, prompt in enumerate(prompts):
        batch.insert(prompt, max_tokens=n + i, prompt_lookup=False, **options[i % len(options)])
    return batch


def run(batch, got=None, at=lambda step: None):
    got, step = {} if got is None else got, 0
    while len(batch):
        for response in batch.next():
            assert response.error is None
            got.setdefault(response.uid, []).append(response)
        at(step := step + 1)
    return {uid: ids_of(responses) for uid, responses in got.items()}


def alone(pair, prompt, n, **options):
    return ids_of(stream_generate(pair[0], letters(), prompt, max_tokens=n, draft_model=pair[1], block_size=5, **options))


@pytest.mark.rows_equal
def test_plain_rounds_begin_before_the_one_in_front_is_read(pair, monkeypatch):
    options, began = ({}, {"sampler": Distribution(0.9), "seed": 5}), []
    ahead, read = Round.ahead, Round.read
    monkeypatch.setattr(Round, "ahead", lambda self, rows: began.append(("begun", len(rows))) or ahead(self, rows))
    monkeypatch.setattr(Round, "read", lambda self, next=None: began.append(("read", len(self.rows))) or read(self, next))
    got = run(plain_batch(*pair, PROMPTS, 24, options))
    assert got == {i: alone(pair, p, 24 + i, **options[i % 2]) for i, p in enumerate(PROMPTS)}
    # A row that ends is not in the round that begins ahead, and each round but the first ones is one.
    assert began.count(("begun", 4)) >= 10 and ("begun", 3) in began
    first = began.index(("begun", 4))
    assert began[first : first + 6] == [("begun", 4), ("read", 4)] * 3


@pytest.mark.rows_equal
def test_rows_leave_join_and_are_copied_while_a_round_has_begun(pair):
    batch, got, caches = plain_batch(*pair, PROMPTS[:3], n=30), {}, []

    def at(step):
        if step == 14:
            assert batch._ahead is not None
            caches.append(batch.remove(1))
        elif step == 16:
            batch.row(0).leave_settled()
        elif step == 18:
            batch.insert(PROMPTS[3], max_tokens=9, prompt_lookup=False)

    ids = run(batch, got, at)
    wanted = {0: (PROMPTS[0], 30), 2: (PROMPTS[2], 32), 3: (PROMPTS[3], 9)}
    assert {uid: ids[uid] for uid in wanted} == {uid: alone(pair, p, n) for uid, (p, n) in wanted.items()}
    n, cache = len(ids[1]), caches[0]
    assert 4 < n < 30 and ids[1] == alone(pair, PROMPTS[1], 31)[:n]
    more = stream_generate(pair[0], letters(), [4], max_tokens=3, draft_model=pair[1], prompt_cache=cache, block_size=5)
    assert ids_of(more) == alone(pair, [*PROMPTS[1], *ids[1], 4], 3)


@pytest.mark.rows_equal
def test_a_round_that_began_behind_a_faulty_kernel_counts_for_nothing(pair, monkeypatch):
    enqueue, check, read, rounds, spoilt, dropped = Round._enqueue, Target.check, Round.read, [], [], []

    def wrong(self):
        enqueue(self)
        if self not in rounds:
            rounds.append(self)
            if len(rounds) in (10, 20):
                spoilt.append(self)
                self._chosen = self._packed = (self._chosen + 1) % 61

    def says_so(self, flag, compiled=False):
        if spoilt and spoilt[0] is reading.now:
            spoilt.pop()
            raise NotFiniteError
        return check(self, flag, compiled)

    def reading(self, following=None):
        reading.now = self
        got = read(self, following)
        dropped.extend([self] if following and not got else [])
        return got

    for cls, name, ours in ((Round, "_enqueue", wrong), (Target, "check", says_so), (Round, "read", reading)):
        monkeypatch.setattr(cls, name, ours)
    got = run(plain_batch(*pair, PROMPTS, 24))
    monkeypatch.undo()
    assert len(dropped) == 2 and got == {i: alone(pair, p, 24 + i) for i, p in enumerate(PROMPTS)}


def without_windows(model):
    """A pair whose drafter has no sliding layers: those attend row by row."""
    return model, tiny_drafter(model, sliding_window=None, layer_types=["full_attention"] * 2)


def answering(pair, rows, block=None):
    """A batch of so many rows in the middle of their answers; block: a fixed block size, None for plain rounds."""
    prompts = [[3 + i] * (6 + i) for i in range(rows)]
    batch = plain_batch(*pair, prompts, 40, [{"block_size": block}] if block else [{}])
    while batch.waiting or any(row.is_reading for row in batch.rows):
        batch.next()
    for _ in range(4):
        batch.next()
    return batch


def python_calls(batch):
    """Calls of Python functions in the next round."""
    seen = Counter()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, about: seen.update([event]))
    try:
        batch.next()
    finally:
        sys.setprofile(before)
    return seen["call"]


def test_rows_that_end_together_leave_from_the_last_slot_on_so_that_none_moves(pair, monkeypatch):
    slots, leave = [], Seat.leave
    monkeypatch.setattr(Seat, "leave", lambda self, keep: (slots.append(self.slot), leave(self, keep))[1])
    batch = plain_batch(*pair, PROMPTS, 12)
    for row in batch.waiting:
        row.options.max_tokens = 12
    run(batch)
    assert slots == [3, 2, 1, 0]


def nodes(batch, monkeypatch):
    """Operations by kind of the next round, as they are handed to the device; views aside."""
    seen, views = Counter(), "Broadcast Reshape Transpose Slice ExpandDims Squeeze Split Flatten Unflatten".split()

    def counting(evaluate):
        def evaluate_and_count(*what):
            arrays, rest = [], [*what]
            while rest:
                one = rest.pop()
                rest += one if isinstance(one, (list, tuple)) else []
                arrays += [one] if isinstance(one, mx.array) else []
            if arrays:
                mx.export_to_dot(text := io.StringIO(), *arrays)
                seen.update(re.findall(r'label ="(\w+)"', text.getvalue()))
            return evaluate(*what)

        return evaluate_and_count

    with monkeypatch.context() as patch:
        for name in ("eval", "async_eval"):
            patch.setattr(mx, name, counting(getattr(mx, name)))
        batch.next()
    return sum(n for kind, n in seen.items() if kind not in views)


@pytest.mark.parametrize("block", [None, 5])
def test_a_round_of_many_rows_is_hardly_more_operations_than_one_of_two(pair, monkeypatch, block):
    monkeypatch.setattr(group_pass, "attends_apart", lambda *about: False)
    counts = {}
    for rows in (2, 8):
        batch = answering(without_windows(pair[0]), rows, block)
        counts[rows] = nodes(batch, monkeypatch)
        batch.close()
    assert 50 < counts[2] and counts[8] <= 1.05 * counts[2]


# Four: what rejected drafts left is cut entry by entry.
@pytest.mark.parametrize(("block", "most"), [(None, 1), (5, 4)])
def test_a_row_more_costs_hardly_any_python_once_a_layer(monkeypatch, block, most):
    monkeypatch.setattr(group_pass, "attends_apart", lambda *about: False)
    counts = {}
    for layers in (4, 12):
        pair = without_windows(tiny_target(layers=layers))
        for rows in (2, 8):
            batch = answering(pair, rows, block)
            counts[layers, rows] = python_calls(batch)
            batch.close()
    more = {layers: (counts[layers, 8] - counts[layers, 2]) / 6 for layers in (4, 12)}
    assert 0 < more[4] and (more[12] - more[4]) / 8 < most + 0.5, (counts, more)


class Sure:
    """A draft source that always has drafts and is sure of them."""

    source = "sure"

    def rates(self, ids, n):
        return [0.99] * n

    def propose(self, anchor, n):
        return Draft([7] * n, source=self.source)


def test_only_rounds_of_the_drafter_and_plain_ones_say_what_a_width_costs(monkeypatch):
    """In text that repeats itself most drafts come from it."""
    model, noted, mixed, rounds = tiny_target(), [], [], []
    commit, observe = Round.commit, BatchPolicy.observe
    monkeypatch.setattr(Round, "commit", lambda self, seconds: rounds.append(self) or commit(self, seconds))

    def note(self, rows, width, seconds, alike):
        (noted if alike else mixed).append((width, rounds[-1]))
        observe(self, rows, width, 1.0 + width / 50, alike)

    monkeypatch.setattr(BatchPolicy, "observe", note)
    batch = BatchGenerator(model, letters(), tiny_drafter(model))
    for prompt in PROMPTS[:3]:
        batch.insert(prompt, max_tokens=30, proposers=[Sure()])
    run(batch)
    drafts = [(width, row.draft) for width, one in noted for row in one.rows]
    assert all(draft.by_drafter if width else not draft.width for width, draft in drafts)
    assert {bool(width) for width, _ in noted} == {False, True}
    # What verifies more than the drafter's rounds says nothing of them.
    assert all(sum(row.draft.width for row in one.rows) <= width * len(one.rows) for width, one in mixed)
    assert sum(row.draft.source == "sure" for one in rounds for row in one.rows) > len(rounds)


def test_plain_rounds_count_only_among_others_without_what_the_next_one_took(pair, monkeypatch):
    clock, noted, init = [0.0], [], Round.__init__

    def begins(self, *about):
        clock[0] += 1.0
        init(self, *about)

    monkeypatch.setattr(Round, "__init__", begins)
    monkeypatch.setattr(DFlashPair.of(pair[1]), "clock", lambda: clock[0])
    batch = plain_batch(*pair, PROMPTS)
    batch.policy.observe = lambda rows, width, seconds, alike: noted.append(seconds)
    run(batch)
    assert len(noted) >= 10 and {*noted} == {1.0}
    noted.clear()
    batch = plain_batch(*pair, PROMPTS)
    # As between drafting rounds.
    batch._look_ahead = lambda current, rows: None
    batch.policy.observe = lambda rows, width, seconds, alike: noted.append(seconds)
    run(batch)
    assert not noted


@pytest.mark.rows_equal
@pytest.mark.parametrize(("block", "places"), [(2, 2), (3, 4), (5, 8)])
def test_a_pass_has_one_two_four_or_eight_places_for_the_tokens_of_a_row(pair, monkeypatch, block, places):
    """Each number of places has kernels of its own on a GPU."""
    made, pair = [], without_windows(pair[0])
    monkeypatch.setattr(passes, "GroupPass", lambda *about: made.append(group_pass.GroupPass(*about)) or made[-1])
    batch = BatchGenerator(pair[0], letters(), pair[1])
    for prompt in PROMPTS[:3]:
        batch.insert(prompt, max_tokens=12, block_size=block)
    assert run(batch) == {i: alone(pair, p, 12) for i, p in enumerate(PROMPTS[:3])}
    assert {one._n for one in made if max(one.sizes) == block} == {places}


def test_rounds_beside_a_row_of_fixed_width_say_what_they_cost(monkeypatch):
    model, noted, observe = tiny_target(), [], BatchPolicy.observe
    monkeypatch.setattr(
        BatchPolicy,
        "observe",
        lambda self, rows, width, seconds, alike: noted.append(width) or observe(self, rows, width, 1.0 + width / 50, alike),
    )
    batch = BatchGenerator(model, letters(), tiny_drafter(model))
    for prompt, options in zip(PROMPTS, ({}, {}, {"block_size": 4}), strict=False):
        batch.insert(prompt, max_tokens=20, prompt_lookup=False, **options)
    while len(batch) == 3:
        batch.next()
    batch.close()
    assert noted.count(0) >= 3 and any(noted)


@pytest.mark.full
@pytest.mark.rows_equal
def test_schedules_meet_rounds_that_begin_ahead(monkeypatch):
    began, ahead = [], Round.ahead
    monkeypatch.setattr(Round, "ahead", lambda self, rows: began.append(rows) or ahead(self, rows))
    case = schedules.make_case("llama")
    assert not [fault for seed in (7000, 7002) for fault in schedules.run_schedule(case, seed)] and began
