"""Many requests at once: each gets what it gets alone, whatever the others do."""

import copy
import importlib.util
import itertools
import sys
import threading

import mlx.core as mx
import pytest
import schedules
from families import family, greedy_line, known_drafter
from kit import ids_of, letters, offsets, tiny_drafter, tiny_target
from mlx_lm.models.cache import make_prompt_cache as make_target_cache

from dflash_mlx import BatchGenerator, batch_generate, make_prompt_cache, stream_generate
from dflash_mlx.batch import generator, passes, reading
from dflash_mlx.batch.groups import MOST, MOST_TOKENS, SlotKV
from dflash_mlx.batch.passes import BatchTarget
from dflash_mlx.batch.row import Row
from dflash_mlx.errors import GenerationError
from dflash_mlx.loop import Run
from dflash_mlx.memory import entries_after_rows
from dflash_mlx.models.target import Target
from dflash_mlx.pair import DFlashPair
from dflash_mlx.prompt_cache import PairCache

PROMPTS = [[5, 9, 2, 7], [3] * 30, [8, 1], [4, 4, 6, 1, 9]]


@pytest.fixture(scope="module")
def pairs():
    """A random target with a random drafter."""
    model = tiny_target()
    return model, tiny_drafter(model)


def alone(model, drafter, prompt, n=12, **options):
    return ids_of(stream_generate(model, letters(), prompt, max_tokens=n, draft_model=drafter, block_size=5, **options))


@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.full
@pytest.mark.rows_equal
def test_random_schedules_give_each_request_what_it_gets_alone(name):
    case = schedules.make_case(name)
    assert not [fault for seed in range(6) for fault in schedules.run_schedule(case, seed)]


@pytest.mark.rows_equal
def test_a_random_schedule_gives_each_request_what_it_gets_alone():
    case = schedules.make_case("llama, mixed windows")
    assert not [fault for seed in range(2) for fault in schedules.run_schedule(case, seed)]


@pytest.mark.rows_equal
def test_batch_generate_gives_what_mlx_lms_would_and_the_stats_of_each_row(pairs):
    model, drafter = pairs
    options = {"draft_model": drafter, "block_size": 5, "return_token_ids": True, "return_prompt_caches": True}
    got = batch_generate(model, letters(), PROMPTS, max_tokens=[12, 3, 7, 12], return_logprobs=True, **options)
    assert got.token_ids == [alone(model, drafter, p, n) for p, n in zip(PROMPTS, (12, 3, 7, 12), strict=True)]
    assert got.texts == [letters().decode(ids) for ids in got.token_ids]
    assert [stats.n_rounds > 0 for stats in got.stats] == [True] * 4
    assert [len(row) for row in got.logprobs] == [12, 3, 7, 12] and max(map(max, got.logprobs)) <= 0
    for prompt, ids, cache in zip(PROMPTS, got.token_ids, got.caches, strict=True):
        assert PairCache.read(cache).ids == [*prompt, *ids]


def test_a_request_that_goes_on_takes_its_cache_along(pairs):
    model, drafter = pairs
    cache = make_prompt_cache(model, drafter)
    options = {"draft_model": drafter, "block_size": 5, "return_token_ids": True}
    first = batch_generate(model, letters(), [PROMPTS[0]], [cache], max_tokens=4, return_prompt_caches=True, **options)
    second = batch_generate(
        model, letters(), [[6], PROMPTS[1]], [first.caches[0], make_prompt_cache(model, drafter)], max_tokens=5, **options
    )
    assert second.token_ids[0] == alone(model, drafter, [*PROMPTS[0], *first.token_ids[0], 6], 5)


@pytest.mark.parametrize("returns", [False, True])
def test_caches_are_settled_only_for_who_gets_them(pairs, monkeypatch, returns):
    settled, settle = [], Run.settle
    monkeypatch.setattr(Run, "settle", lambda self: (settled.append(self), settle(self))[1])
    given = [None, make_prompt_cache(*pairs), None]
    asked = {"draft_model": pairs[1], "block_size": 5, "return_token_ids": True, "return_prompt_caches": returns}
    # All end in the same round, so that none is alone at last.
    got = batch_generate(pairs[0], letters(), PROMPTS[:3], given, max_tokens=1, **asked)
    assert len(settled) == (3 if returns else 1)
    assert got.token_ids == [alone(*pairs, p, 1) for p in PROMPTS[:3]]
    assert PairCache.read(given[1]).ids == [*PROMPTS[1], *got.token_ids[1]]
    assert got.caches is None if not returns else [PairCache.read(cache).rows for cache in got.caches] == [4, 30, 2]


def test_a_processor_that_fails_ends_its_own_request_only(pairs):
    model, drafter = pairs

    def fails(tokens, logits):
        if len(tokens) > len(PROMPTS[1]) + 2:
            raise OSError("no such grammar")
        return logits

    batch, got, errors = BatchGenerator(model, letters(), drafter), {}, {}
    uids = [
        batch.insert(p, max_tokens=9, block_size=5, logits_processors=[fails] if i == 1 else None) for i, p in enumerate(PROMPTS)
    ]
    while len(batch):
        for response in batch.next():
            if response.error:
                errors[response.uid] = str(response.error)
            else:
                got.setdefault(response.uid, []).append(response.token)
    assert errors == {uids[1]: "no such grammar"}
    assert [got[uid] for i, uid in enumerate(uids) if i != 1] == [
        alone(model, drafter, p, 9) for i, p in enumerate(PROMPTS) if i != 1
    ]


def test_a_request_that_leaves_while_its_prompt_is_read_leaves_its_rows_behind(pairs):
    model, drafter = pairs
    batch = BatchGenerator(model, letters(), drafter)
    short = batch.insert(PROMPTS[0], max_tokens=40, block_size=5)
    batch.next()
    long = batch.insert([7] * 50, max_tokens=4, block_size=5, prefill_step_size=8)
    while len(batch.rows) < 2 or not batch.rows[1].run.rows:
        batch.next()
    cache = PairCache.read(batch.remove(long))
    assert cache.rows == 8 and cache.ids == [7] * 8 and {*offsets(cache.target)} == {8}
    assert [row.uid for row in batch.rows] == [short] and batch.remove(long) is None
    batch.close()
    assert not len(batch)


def test_a_long_prompt_and_running_answers_share_the_time(pairs):
    model, drafter = pairs
    batch = BatchGenerator(model, letters(), drafter, prefill_share=0.05)
    batch.insert(PROMPTS[0], max_tokens=2000, block_size=5)
    batch.next()
    batch.insert([7] * 40, max_tokens=4, block_size=5, prefill_step_size=4)
    rounds, read = 0, 0
    while len(batch.rows) < 2 or batch.rows[1].is_reading:
        before = batch.rows[1].run.rows if len(batch.rows) > 1 else 0
        rounds += any(r.uid == 0 for r in batch.next())
        read += len(batch.rows) > 1 and batch.rows[1].run.rows > before
    # A piece of a prompt takes about as long as a round: at half of the time there would be one round to each.
    assert read >= 9 and rounds > 3 * read
    batch.close()


@pytest.mark.rows_equal
def test_rows_of_every_setting_join_one_that_was_alone():
    model = family("llama")
    line = greedy_line(model, [3, 1, 4], 30)
    drafter = known_drafter(model, line, block_size=4)

    def options(i):
        return {**schedules.SETTINGS[i], "max_tokens": 10, "block_size": 4}

    every = range(len(schedules.SETTINGS))
    alone = [list(stream_generate(model, letters(), [3, 1, 4], draft_model=drafter, **options(i))) for i in every]
    batch, got = BatchGenerator(model, letters(), drafter, max_batch=8), {}
    batch.insert([3, 1, 4], **options(0))
    # Its first token, and a round in which drafts were accepted.
    while sum(map(len, got.values())) < 3:
        for response in batch.next():
            got.setdefault(response.uid, []).append(response)
    for i in every[1:]:
        batch.insert([3, 1, 4], **options(i))
    while len(batch):
        for response in batch.next():
            got.setdefault(response.uid, []).append(response)
    assert any(r.accepted > 1 for r in alone[0][-1].stats.rounds)
    for i, responses in enumerate(alone):
        assert ids_of(got[i]) == ids_of(responses)
        rounds = got[i][-1].stats.rounds
        assert rounds == responses[-1].stats.rounds[: len(rounds)]


@pytest.mark.parametrize("name", ["bailing_hybrid", "llama4"])
def test_a_target_that_cannot_run_rows_together_answers_one_after_the_other_and_says_so(name):
    model = family(name)
    drafter = known_drafter(model, [1] * 60, block_size=4)
    batch, order, answers = BatchGenerator(model, letters(), drafter), [], {}
    for prompt in PROMPTS[:2]:
        batch.insert(prompt, max_tokens=4, block_size=4)
    while len(batch):
        for response in batch.next():
            order.append(response.uid)
            answers.setdefault(response.uid, []).append(response.token)
    assert order == [0] * 4 + [1] * 4 and "several rows" in batch.reason
    assert [answers[i] for i in (0, 1)] == [
        ids_of(stream_generate(model, letters(), p, max_tokens=4, draft_model=drafter, block_size=4)) for p in PROMPTS[:2]
    ]


def test_a_target_whose_rows_differ_is_found_by_two_rows():
    model = tiny_target()
    mlp = model.model.layers[1].mlp

    class Odd(type(mlp)):
        def __call__(self, x):
            return super().__call__(x) * (2 if x.shape[0] > 1 else 1)

    mlp.__class__ = Odd
    assert "give other values" in BatchTarget(Target(model, (0, 2)), lambda: make_target_cache(model)).reason


@pytest.mark.rows_equal
def test_a_target_is_tested_with_two_rows_once_and_again_when_it_is_another(monkeypatch):
    tested, probe = [], BatchTarget._probe
    monkeypatch.setattr(BatchTarget, "_probe", lambda self, make: (tested.append(self.target), probe(self, make))[1])
    model = tiny_target()
    asked = {"max_tokens": 6, "max_batch": 2, "draft_model": tiny_drafter(model), "return_token_ids": True}
    got = [batch_generate(model, letters(), PROMPTS[:2], **asked).token_ids for _ in range(2)]
    assert len(tested) == 1 and got[0] == got[1]
    # As adapters replace modules.
    model.layers[0].mlp = tiny_target(seed=5).layers[0].mlp
    batch_generate(model, letters(), PROMPTS[:2], **asked)
    assert len(tested) == 2 and tested[0] is not tested[1]


def test_an_error_that_passes_costs_one_batch_only_its_rows_together(monkeypatch):
    prompts, failing = BatchTarget._prompts, [True]

    def once(self, make):
        if failing:
            failing.pop()
            raise RuntimeError("no memory is left")
        return prompts(self, make)

    monkeypatch.setattr(BatchTarget, "_prompts", once)
    model = tiny_target()
    drafter, reasons = tiny_drafter(model), []
    for _ in range(2):
        batch = BatchGenerator(model, letters(), drafter)
        for prompt in PROMPTS[:2]:
            batch.insert(prompt, max_tokens=2, block_size=5)
        batch.next()
        reasons.append(batch.reason)
        batch.close()
    assert "no memory is left" in reasons[0] and reasons[1] is None


def test_no_array_of_a_pass_belongs_to_the_thread_that_imported_it():
    made = []

    def load():
        spec = importlib.util.spec_from_file_location("dflash_mlx.batch.passes_again", passes.__file__)
        module = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, spec.name, module)
            spec.loader.exec_module(module)
        made.append(module._NOTHING)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert made[0].shape == (1, 1, 1, 1) and made[0].tolist() == [[[[0.0]]]]


def test_none_as_max_batch_is_the_default(pairs):
    assert BatchGenerator(pairs[0], letters(), pairs[1], max_batch=None).max_batch == generator.MAX_BATCH
    got = batch_generate(
        pairs[0], letters(), PROMPTS[:2], max_tokens=2, draft_model=pairs[1], max_batch=None, return_token_ids=True
    )
    assert [len(ids) for ids in got.token_ids] == [2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0; it must be a whole number of at least 1"),
        ({"prefill_share": 1.0}, "prefill_share is 1.0; it must lie between 0 and 1"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(pairs, options, message):
    with pytest.raises(GenerationError, match=message):
        BatchGenerator(pairs[0], letters(), pairs[1], **options)
    with pytest.raises(GenerationError, match="max_tokens has 2 entries; there are 1 prompts"):
        batch_generate(pairs[0], letters(), PROMPTS[:1], max_tokens=[1, 2], draft_model=pairs[1])


@pytest.mark.parametrize("n", [1.5, None, "5", True, -5])
def test_a_length_of_a_batch_that_is_none_is_refused(pairs, n):
    for given in (n, [3, n]):
        with pytest.raises(
            GenerationError, match="max_tokens is .*; it must be a whole number of at least 1, or -1 for no limit"
        ):
            batch_generate(pairs[0], letters(), PROMPTS[:2], max_tokens=given, draft_model=pairs[1])


@pytest.mark.parametrize("prompts", ["abc", b"abc", None, {"a": 1}, 5])
def test_prompts_that_are_no_list_are_refused(pairs, prompts):
    with pytest.raises(GenerationError, match="prompts is of type .*; it must be a list of prompts. Put one into a list"):
        batch_generate(pairs[0], letters(), prompts, draft_model=pairs[1])


def test_what_rounds_took_is_known_to_the_next_batch(pairs):
    model, drafter = pairs
    first, other = (BatchGenerator(model, letters(), one) for one in (drafter, tiny_drafter(model)))
    first.policy.costs.add(2, 3, 0.5)
    assert BatchGenerator(model, letters(), drafter).policy.costs.seconds(2, 3) == 0.5
    assert other.policy.costs.seconds(2, 3) is None


@pytest.mark.full
@pytest.mark.parametrize("leaks", [False, True])
def test_a_batch_that_requests_join_and_leave_holds_no_more_as_it_goes_on(monkeypatch, leaks):
    kept, end = [], Row.end
    monkeypatch.setattr(Row, "end", lambda self, keep: (leaks and kept.append(self.run.cache.entries), end(self, keep))[1])
    assert schedules.is_flat(schedules.soak(320, 5, told=lambda *about, **named: None)) != leaks


def test_prompts_that_come_together_are_read_together_a_chunk_at_most(pairs, monkeypatch):
    model, drafter = pairs
    # Reading and answering take equally long, whatever else the machine does.
    monkeypatch.setattr(DFlashPair.of(drafter), "clock", itertools.count().__next__)
    passes, run_pass = [], reading._run_pass
    monkeypatch.setattr(reading, "_run_pass", lambda target, chunks: passes.append(chunks) or run_pass(target, chunks))
    batch, chunk = BatchGenerator(model, letters(), drafter, prefill_share=0.9), generator._CHUNK
    for n in (chunk // 4, chunk // 8, 3 * chunk, 7):
        batch.insert([i % 50 for i in range(n)], max_tokens=30, block_size=5)
    batch.next()
    # One pass: nobody is waiting for a token.
    assert [row.run.rows for row in batch.rows] == [chunk // 4 - 1, chunk // 8 - 1, 3 * chunk - 1, 6] and len(passes) == 1
    late = [batch.insert([i % 50 for i in range(n)], max_tokens=30, block_size=5) for n in (2 * chunk - 99, 9)]
    read, answers = [0] * 2, 0
    while len(batch) == 6 and batch.row(late[1]).is_reading:
        answers += len(batch.next())
        rows = [batch.row(uid).run.rows for uid in late]
        assert sum(rows) - sum(read) <= chunk
        read = rows
    assert answers and read == [2 * chunk - 100, 8]
    batch.close()


@pytest.mark.parametrize("steps", [(8, None), (None, 8)])
def test_a_prompt_is_read_in_no_pass_of_more_tokens_than_its_step(pairs, steps):
    batch = BatchGenerator(pairs[0], letters(), pairs[1])
    for prompt, step in zip(([7] * 6, [3] * 30), steps, strict=True):
        batch.insert(prompt, max_tokens=4, block_size=5, prefill_step_size=step)
    batch.next()
    assert [row.run.rows for row in batch.rows] == [5, 0]
    batch.close()


@pytest.mark.rows_equal
@pytest.mark.parametrize("name", ["llama, mixed windows", "lfm2", "deepseek_v3"])
def test_a_pass_over_several_prompts_that_fails_is_undone_and_each_is_read_alone(name, monkeypatch):
    case, call, failed = schedules.make_case(name), BatchTarget.__call__, []

    def fails(self, ids, rows, eager=True):
        out = call(self, ids, rows, eager)
        if rows[0].is_chunk:
            failed.append(len(rows))
            raise RuntimeError("no memory is left")
        return out

    monkeypatch.setattr(BatchTarget, "__call__", fails)
    batch, got = BatchGenerator(case.model, letters(case.eos), case.drafter), {}
    for prompt in (3, 5, 4):
        batch.insert(case.prompts[prompt], max_tokens=6, block_size=4, prefill_step_size=96)
    while len(batch):
        for response in batch.next():
            assert response.error is None
            got.setdefault(response.uid, []).append(response.token)
    assert failed == [3]
    assert list(got.values()) == [case.alone(prompt, 0, 4)[0][:6] for prompt in (3, 5, 4)]


def test_a_row_that_cannot_be_undone_fails_alone(pairs, monkeypatch):
    model, drafter = pairs
    batch, got, run_pass, undo = BatchGenerator(model, letters(), drafter), {}, reading._run_pass, Row.undo_chunk
    uids = [batch.insert(p, max_tokens=5, block_size=5) for p in PROMPTS]

    def fails(target, chunks):
        if len(chunks) > 1:
            raise RuntimeError("no memory is left")
        run_pass(target, chunks)

    def damaged(self):
        if self.uid == uids[1]:
            raise RuntimeError("damaged")
        undo(self)

    monkeypatch.setattr(reading, "_run_pass", fails)
    monkeypatch.setattr(Row, "undo_chunk", damaged)
    while len(batch):
        for response in batch.next():
            got.setdefault(response.uid, []).append(response.error or response.token)
    assert [str(error) for error in got.pop(uids[1])] == ["damaged"]
    assert {*got} == {uid for uid in uids if uid != uids[1]} and all(len(ids) == 5 for ids in got.values())


def test_a_request_after_one_that_was_removed_meets_modules_that_were_replaced_between():
    model = tiny_target()
    batch = BatchGenerator(model, letters(), tiny_drafter(model))
    first = batch.insert(PROMPTS[0], max_tokens=5)
    before = batch.row(first).run.target
    batch.remove(first)
    layer = model.layers[0]
    layer.self_attn.q_proj = copy.deepcopy(layer.self_attn.q_proj)
    assert batch.row(batch.insert(PROMPTS[0], max_tokens=5)).run.target is not before
    batch.close()


def test_a_prompt_that_cannot_be_kept_fails_alone(pairs):
    model, drafter = pairs
    batch, got = BatchGenerator(model, letters(), drafter), {}
    uids = [batch.insert(p, max_tokens=5, block_size=5) for p in PROMPTS]

    def fails(entries):
        raise OSError("the disk is full")

    batch.row(uids[1]).keep_at = {9: fails}
    while len(batch):
        for response in batch.next():
            got.setdefault(response.uid, []).append(str(response.error) if response.error else response.token)
    wanted = [alone(model, drafter, p, 5) for p in PROMPTS]
    assert list(map(got.get, uids)) == [wanted[0], ["the disk is full"], *wanted[2:]]


def filled(model, drafter, n):
    """A prompt cache of n made-up tokens."""
    entries = make_prompt_cache(model, drafter)
    cache, shapes = PairCache.read(entries), entries_after_rows(model, drafter)
    for entry, like in zip(entries[:-1], shapes, strict=True):
        entry.update_and_fetch(*(mx.ones((*a.shape[:2], n, a.shape[3])) for a in (like.keys, like.values)))
    cache.ids, cache.rows = [i % 60 for i in range(n)], n
    cache.write()
    return entries


def test_a_long_row_beside_seven_short_ones_takes_little_more_than_their_tokens_do(pairs):
    """Entries of both models, while all eight answer and as they leave one by one."""
    model = pairs[0]
    drafter = tiny_drafter(model, layer_types=["full_attention"] * 2, sliding_window=None, max_position_embeddings=20_000)
    held, a_token = [16_384] + [200] * 7, sum(e.nbytes / e.keys.shape[2] for e in entries_after_rows(model, drafter))
    batch = BatchGenerator(model, letters(), drafter)
    for i, n in enumerate(held):
        batch.insert([5], max_tokens=40 - 4 * i, block_size=5, prompt_cache=filled(model, drafter, n))
    together, before = [], 0
    while len(batch):
        batch.next()
        going = [row for row in batch.rows if row.seat and row.seat.group]
        entries = [e for row in going for e in row.run.cache.entries[:-1]]
        if len(going) < 2:
            continue
        assert {type(entry) for entry in entries} == {SlotKV}
        groups = {id(entry.group): entry.group for entry in entries}.values()
        taken, tokens = sum(group.nbytes for group in groups), sum(row.run.rows for row in going)
        # Slots of rows that have just left are given up with the next round.
        assert len(going) != before or taken <= (MOST * tokens + MOST_TOKENS) * a_token
        before = len(going)
        if len(going) == 8:
            together.append(taken / (tokens * a_token))
    assert len(together) > 5 and max(together) <= 1.5, together
