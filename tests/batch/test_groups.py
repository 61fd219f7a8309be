"""Rows in shared arrays: what each holds is what its own entries would, and how much memory and how many copies that takes."""

import random

import mlx.core as mx
import pytest
import schedules
from mlx_lm.models.cache import KVCache

from dflash_mlx.batch import group_pass
from dflash_mlx.batch import groups as groups_module
from dflash_mlx.batch.group_pass import GroupPass
from dflash_mlx.batch.groups import MOST, MOST_TOKENS, Group, Groups, SlotKV, capacity_for, in_slots, partition, seat_of

# Of each entry: heads, the widths of keys and values.
KINDS = ((2, 8, 4), (1, 6, 6), (3, 4, 8))


def tokens(n, kind, key):
    heads, *widths = kind
    return [mx.random.normal((1, heads, n, width), key=mx.random.key(key + i)) for i, width in enumerate(widths)]


def row(n, key=0, kinds=KINDS):
    entries = [KVCache() for _ in kinds]
    for entry, kind in zip(entries, kinds, strict=True):
        entry.update_and_fetch(*tokens(n, kind, key))
    return entries


class Row:
    """A row, and a twin of it that is never in a group."""

    def __init__(self, n, key):
        self.entries, self.twins = row(n, key), row(n, key)
        self.seat = seat_of(self.entries)

    def grow(self, n, key):
        for entry, twin, kind in zip(self.entries, self.twins, KINDS, strict=True):
            for one in (entry, twin):
                held = one.update_and_fetch(*tokens(n, kind, key))
            assert mx.array_equal(held[0], twin.keys[..., : twin.offset, :]).item()

    def trim(self, n):
        for one in (*self.entries, *self.twins):
            one.trim(n)

    def check(self):
        for entry, twin in zip(self.entries, self.twins, strict=True):
            assert entry.offset == twin.offset
            for a, b in ((entry.keys, twin.keys), (entry.values, twin.values)):
                assert mx.array_equal(a[..., : entry.offset, :], b[..., : entry.offset, :]).item()


def test_rows_that_join_grow_are_cut_and_leave_hold_what_they_hold_alone():
    chance, groups, rows = random.Random(3), Groups(), []
    for step in range(150):
        action = chance.choice(["join", "leave", "grow", "grow", "trim"])
        if action == "join" and len(rows) < 6:
            rows.append(Row(chance.choice([3, 40, 250, 700]), step))
        elif action == "leave" and rows:
            gone = rows.pop(chance.randrange(len(rows)))
            gone.seat.leave()
            gone.check()
            assert {type(entry) for entry in gone.entries} == {KVCache} and "group" not in vars(gone.entries[0])
        groups.arrange([(row.seat, row.entries[0].offset + 16) for row in rows])
        for row in rows:
            if action == "grow":
                row.grow(chance.randint(1, 16), 1000 + step)
            elif action == "trim":
                row.trim(chance.randint(0, 3))
        if step % 10 == 0:
            for row in rows:
                row.check()
        room = sum(-(-(row.entries[0].offset + 16) // 256) * 256 for row in rows)
        assert sum(group.slots * group.capacity for group in groups) <= MOST * room + MOST_TOKENS
        for group in groups:
            assert [seat.slot for seat in group.seats] == [*range(len(group.seats))]
    assert len(rows) > 1 and {type(entry) for row in rows for entry in row.entries} == {SlotKV}


@pytest.mark.parametrize("held", [[16_384] + [200] * 7, [3000] * 8, [100, 300, 900, 2700, 8100], [50, 60, 16_384]])
def test_groups_take_at_most_one_and_a_half_times_what_tokens_take_alone(held):
    kinds = ((1, 8, 8),)
    rows = [row(n, kinds=kinds) for n in held]
    seats, groups = [seat_of(entries) for entries in rows], Groups()
    groups.arrange([(seat, n + 16) for seat, n in zip(seats, held, strict=True)])
    # A KVCache's own step is 256 tokens.
    alone = sum(-(-n // 256) * 256 for n in held) * (8 + 8) * 4
    assert sum(group.nbytes for group in groups) <= MOST * alone and MOST <= 1.5
    # The rows' old arrays are gone.
    assert not any("keys" in vars(entry) for entries in rows for entry in entries)
    assert len(list(groups)) < len(held)


def test_a_row_is_copied_when_it_outgrows_its_group_and_not_every_round(monkeypatch):
    copied, take = [], Group.take
    monkeypatch.setattr(Group, "take", lambda self, seats: (copied.append((self.capacity, len(seats))), take(self, seats)))
    rows, groups = [Row(200, 1), Row(230, 2)], Groups()
    for n in range(200, 1000, 8):
        groups.arrange([(row.seat, row.entries[0].offset + 16) for row in rows])
        for row in rows:
            row.grow(8, n)
    assert copied == [(capacity, 2) for capacity in (256, 320, 448, 512, 640, 832, 1024, 1280)][: len(copied)]
    assert len(copied) >= 6


@pytest.mark.parametrize(("together", "lists"), [(1 << 20, 1), (0, len(KINDS))])
def test_rows_are_copied_with_one_wait_for_all_entries_or_with_one_for_each_large_one(monkeypatch, together, lists):
    monkeypatch.setattr(groups_module, "_TOGETHER", together)
    waits, evaluate = [], mx.eval
    rows, groups = [Row(20 + n, n) for n in range(4)], Groups()
    monkeypatch.setattr(mx, "eval", lambda *arrays: waits.append(1) or evaluate(*arrays))
    groups.arrange([(row.seat, 60) for row in rows])
    # Room for four slots, and the rows' copies.
    assert len(waits) == 2 * lists
    waits.clear()
    rows[1].seat.leave()
    # Its own copy; then the last row is copied and moves into its slot.
    assert len(waits) == 3 * lists and rows[3].seat.slot == 1
    waits.clear()
    rows[2].seat.leave()
    assert len(waits) == lists
    for row in rows:
        row.check()


def test_what_is_written_is_written_in_place():
    rows, groups = [row(500, key) for key in range(4)], Groups()
    seats = [seat_of(entries) for entries in rows]
    groups.arrange([(seat, 1000) for seat in seats])
    group = next(iter(groups))
    del rows
    mx.clear_cache()
    for n in range(500, 520):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        made = GroupPass(group, range(4), [n + 1] * 4, [1] * 4)
        for index, (heads, k, v) in enumerate(KINDS):
            new = [mx.ones((4, heads, width)) for width in (k, v)]
            made.places.write(index, *new)
            out = group.held(index, range(4), n + 1)
            mx.eval(out[0].sum(), out[1].sum())
            del out, new
        # Not even one entry's keys were copied.
        assert mx.get_peak_memory() - before < min(array.nbytes for array in group.keys) / 2


def test_a_value_that_is_no_number_stays_in_the_row_that_had_it():
    bad, groups = row(300, 1), Groups()
    for entry in bad:
        entry.keys, entry.values = entry.keys * mx.nan, entry.values * mx.nan
    others = [row(300, 2), row(20, 3)]
    seats = [seat_of(entries) for entries in (others[0], bad)]
    groups.arrange([(seat, 310) for seat in seats])
    seats[1].leave()
    seats[1] = seat_of(others[1])
    groups.arrange([(seat, 310) for seat in seats])
    group = next(iter(groups))
    made = GroupPass(group, range(2), [300, 20], [1, 1])
    out = made.attend(mx.ones((2, 4, 1, 6)), 1, 0.4, made.mask())
    assert mx.isfinite(out).all().item()


@pytest.mark.parametrize(("slots", "sizes"), [([0, 1, 2], [3, 3, 3]), ([0, 1, 2], [1, 1, 1]), ([0, 2], [2, 4]), ([1], [5])])
def test_rows_that_attend_together_get_what_each_gets_apart(slots, sizes):
    held = [70, 12, 33]
    rows, groups = [Row(n, n) for n in held], Groups()
    groups.arrange([(row.seat, 90) for row in rows])
    ends = [held[[r.seat.slot for r in rows].index(slot)] for slot in slots]
    made = GroupPass(rows[0].seat.group, slots, ends, sizes)
    queries = mx.random.normal((sum(sizes), 6, 1, 4), key=mx.random.key(9))

    def alone(q, k, v, mask):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask=mask)

    for window in (None, 7):
        together = made.attend(queries, 2, 0.5, made.mask(True, window))
        masks = [made.row_mask(i, window_size=window) for i in range(len(slots))]
        apart = made.attend_apart(made.split(queries), 2, alone, masks)
        apart = mx.concatenate([a.swapaxes(0, 2) for a in apart])
        # Sums of up to 70 float32 in two orders.
        assert mx.allclose(together, apart, rtol=1e-5, atol=1e-5).item()


def test_few_groups_are_made_of_rows_of_like_length():
    assert partition([200, 230, 256, 250]) == [(256, [2, 3, 1, 0])]
    assert [capacity for capacity, _ in partition([16_000, 200, 200, 230])] == [capacity_for(16_000), 256]
    assert len(partition([220, 300, 500, 420, 260, 333])) == 1


def test_rows_of_a_group_stand_side_by_side_in_a_pass():
    rows, groups = [Row(n, 1) for n in (20, 9000, 30, 9100)], Groups()
    lone = Row(5, 1)
    groups.arrange([(row.seat, row.entries[0].offset + 16) for row in rows])
    lone.seat = None
    ordered = in_slots([lone, *rows])
    assert [row.twins[0].offset for row in ordered] == [30, 20, 9100, 9000, 5]


@pytest.mark.rows_equal
@pytest.mark.parametrize("is_apart", [True, False])
@pytest.mark.parametrize("name", ["llama, mixed windows", pytest.param("dflash2", marks=pytest.mark.full)])
def test_rows_get_the_ids_of_requests_alone_whether_they_attend_together_or_apart(monkeypatch, name, is_apart):
    # Where padding changes last places, the ids of these short texts are still the same.
    monkeypatch.setattr(group_pass, "attends_apart", lambda *about: is_apart)
    calls = {"attend_slots": 0, "attend_apart": 0}

    def counted(way, call):
        return lambda *args, **named: calls.update({way: calls[way] + 1}) or call(*args, **named)

    for way in calls:
        monkeypatch.setattr(GroupPass, way, counted(way, getattr(GroupPass, way)))
    case = schedules.make_case(name)
    assert not [fault for seed in (7001, 7005) for fault in schedules.run_schedule(case, seed)]
    assert (calls["attend_apart"] > 0, calls["attend_slots"] > 0) == (is_apart, not is_apart)


@pytest.mark.rows_equal
@pytest.mark.full
@pytest.mark.parametrize("name", ["block-16", "sliding", "gemma3", "lfm2", "cohere2"])
def test_random_schedules_are_the_same_where_rows_attend_the_other_way(monkeypatch, name):
    usual = group_pass.padding_keeps_bits(2, 8, 8)
    monkeypatch.setattr(group_pass, "attends_apart", lambda *about: usual)
    assert not [*schedules.run_schedule(schedules.make_case(name), 7100)]


def test_rows_attend_apart_where_padding_changes_their_bits(monkeypatch):
    attention = mx.fast.scaled_dot_product_attention
    # As a CPU whose sums depend on how long they are.
    longer = lambda q, k, v, **named: attention(q, k, v, **named) * (1 + 2.0**-23 * (k.shape[2] % 64 == 0))  # noqa: E731
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", longer)
    group_pass.padding_keeps_bits.cache_clear()
    try:
        assert group_pass.attends_apart(mx.float32, 2, 8, 8)
        assert not group_pass.attends_apart(mx.bfloat16, 2, 8, 8)
    finally:
        group_pass.padding_keeps_bits.cache_clear()
