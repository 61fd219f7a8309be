"""Rows of similar length in shared arrays: one launch writes the keys of many rows, and one computes their attention.

    a group of capacity 640       slot 0: row b, 470 tokens    slot 1: row d, 590    slot 2: row a, 512    slot 3: free
    keys of one of its entries    [4 slots, kv_heads, 640, D]  values: the same

While a row has a slot, its KVCache is a `SlotKV`: the same object with the same offset and methods, but its keys are in the
arrays of the group. A row that prefills, runs alone or leaves has ordinary entries. A row is copied when it joins and when it
outgrows its group, and one row is copied when another leaves; never during a round.

Capacities grow by a quarter. Rows share a group as long as that takes little more memory than separate groups (`partition`).
Knows mlx-lm's KVCache; knows no models, no rounds and no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

# The smallest capacity; the factor by which capacities grow; how much more memory sharing may take, as a share.
_LEAST, _GROWTH, _SHARED = 256, 1.25, 0.2
_ALL = slice(None)
# Arrays up to this many bytes are copied with one wait: of a small model all entries, of a large one each by itself.
_TOGETHER = 64 << 20
# The most that groups may take: this factor times the tokens of their rows, plus this many tokens.
MOST, MOST_TOKENS = _GROWTH * (1 + _SHARED), 1024


def capacity_for(tokens: int) -> int:
    """The smallest capacity that holds this many tokens."""
    size = float(_LEAST)
    while -(-size // 64) * 64 < tokens:
        size *= _GROWTH
    return int(-(-size // 64) * 64)


def partition(needs: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Divide rows into few groups by the tokens they need room for. Returns: each group's capacity and rows, longest first."""
    spare, found = max(_SHARED * sum(map(capacity_for, needs)), MOST_TOKENS), []
    for row in sorted(range(len(needs)), key=needs.__getitem__, reverse=True):
        own = capacity_for(needs[row])
        if found and found[-1][0] - own <= spare:
            spare -= found[-1][0] - own
            found[-1][1].append(row)
        else:
            found.append((own, [row]))
    return found


class SlotKV(KVCache):
    """A KVCache whose keys and values are in slot `slot` of the group's entry number `index`.

    A KVCache becomes one, and becomes a KVCache again, by a change of its class. So whoever holds the entry need not know.
    """

    group: Group
    index: int
    slot: int

    @property
    def keys(self) -> mx.array:
        """[1, kv_heads, offset, D]"""
        return self.group.held(self.index, [self.slot], self.offset)[0]

    @property
    def values(self) -> mx.array:
        return self.group.held(self.index, [self.slot], self.offset)[1]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append the keys of this row alone, as KVCache does. `Groups.arrange` has made room."""
        places = Places(self.group, [(self.slot, self.offset + i) for i in range(keys.shape[2])])
        places.write(self.index, keys[0].swapaxes(0, 1), values[0].swapaxes(0, 1))
        self.offset += keys.shape[2]
        return self.keys, self.values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """As KVCache's, for layers of mlx-lm that share another layer's keys."""
        return self.keys, self.values

    def empty(self) -> bool:
        return False


class Seat:
    """A row's place: its KVCache entries that are not empty, and its group, if it has one."""

    def __init__(self, entries: Sequence[KVCache]):
        self.entries, self.group = list(entries), None
        shapes = [(e.keys.shape[1], e.keys.shape[3], e.values.shape[3], e.keys.dtype, e.values.dtype) for e in self.entries]
        # Only rows of the same kind may share a group.
        self.kind: tuple = tuple(shapes)

    @property
    def slot(self) -> int:
        return self.entries[0].slot

    def leave(self, keep: bool = True) -> None:
        """Turn the row's entries into ordinary ones, with own arrays. keep: False copies nothing; they are useless then."""
        if (group := self.group) is None:
            return
        for some in group.pieces(1) if keep else ():
            entries = [self.entries[index] for index in some if type(self.entries[index]) is SlotKV]
            copies = [[mx.contiguous(held) for held in group.held(e.index, [e.slot], e.offset)] for e in entries]
            mx.eval(copies)
            for entry, (keys, values) in zip(entries, copies, strict=True):
                entry.__class__ = KVCache
                del entry.group, entry.index, entry.slot
                entry.keys, entry.values = keys, values
        self.group = None
        group.drop([self])


def seat_of(entries: Sequence[Any]) -> Seat | None:
    """The seat of a row with these entries; None if none of them is a KVCache that is not empty."""
    found = [entry for entry in entries if type(entry) is KVCache and not entry.empty()]
    return Seat(found) if found else None


def in_slots(rows: Sequence[Any]) -> list[Any]:
    """Rows with a `seat` in the order of a pass: rows of a group side by side, by slot, then the others."""
    groups: dict[int, int] = {}
    keyed = []
    for row in rows:
        group = row.seat and row.seat.group
        keyed.append((groups.setdefault(id(group), len(groups)), row.seat.slot) if group else (len(rows), 0))
    return [rows[i] for i in sorted(range(len(rows)), key=keyed.__getitem__)]


def group_spans(rows: Sequence[Any]) -> list[tuple[int, int]]:
    """The groups in rows that are ordered by `in_slots`: (first row, last row + 1) of each."""
    found: list[tuple[int, int]] = []
    for i, row in enumerate(rows):
        group = row.seat and row.seat.group
        if group and found and found[-1][1] == i and rows[i - 1].seat.group is group:
            found[-1] = (found[-1][0], i + 1)
        elif group:
            found.append((i, i + 1))
    return found


class Group:
    """Slots of one capacity. seats: the rows in the first slots, in this order; slots: their number, free ones included."""

    def __init__(self, capacity: int, kind: tuple):
        self.capacity, self.kind, self.slots = capacity, kind, 0
        self.seats: list[Seat] = []
        # One array per entry, [slots * kv_heads * capacity, D]: a row for each slot, head and token. A write is one scatter.
        self.keys = [mx.zeros((0, k), dtype) for _, k, _, dtype, _ in kind]
        self.values = [mx.zeros((0, v), dtype) for _, _, v, _, dtype in kind]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.keys, *self.values))

    def held(self, index: int, slots: Sequence[int], tokens: int) -> tuple[mx.array, mx.array]:
        """Views of an entry's keys and values in neighbouring slots, [len(slots), kv_heads, tokens, D] each.

        Drop them before the group is written to again, or MLX copies the arrays.
        """
        shape, at = (self.slots, self.kind[index][0], self.capacity, -1), (slice(slots[0], slots[-1] + 1), _ALL, slice(tokens))
        return self.keys[index].reshape(shape)[at], self.values[index].reshape(shape)[at]

    def pieces(self, slots: int) -> Iterator[list[int]]:
        """The numbers of the entries, in lists that take at most `_TOGETHER` bytes for so many slots. The lists are copied one
        after the other, so that only the entries of one list exist twice in memory."""
        some, taken = [], 0
        for index, (heads, k, v, k_type, v_type) in enumerate(self.kind):
            size = slots * heads * self.capacity * (k * k_type.size + v * v_type.size)
            if some and taken + size > _TOGETHER:
                yield some
                some, taken = [], 0
            some, taken = [*some, index], taken + size
        yield some

    def take(self, seats: Sequence[Seat]) -> None:
        """Give these rows the next slots and copy their entries into them."""
        first, left = len(self.seats), [(seat.group, seat) for seat in seats if seat.group is not None]
        self._resize(max(self.slots, first + len(seats)))
        for some in self.pieces(len(seats)):
            for index in some:
                for slot, seat in enumerate(seats, first):
                    self._copy(seat.entries[index], index, slot)
            mx.eval([(self.keys[index], self.values[index]) for index in some])
            for index in some:
                for slot, seat in enumerate(seats, first):
                    self._adopt(seat.entries[index], index, slot)
        for seat in seats:
            seat.group = self
            self.seats.append(seat)
        for group in {id(group): group for group, _ in left}.values():
            group.drop([seat for of, seat in left if of is group])

    def _copy(self, entry: KVCache, index: int, slot: int) -> None:
        size = self.kind[index][0] * self.capacity
        for arrays, array in ((self.keys, entry.keys), (self.values, entry.values)):
            # Fill the whole slot: an earlier row may have left NaN there, and zero times NaN is NaN.
            row = mx.pad(array[0, :, : entry.offset], [(0, 0), (0, self.capacity - entry.offset), (0, 0)])
            arrays[index][slot * size : (slot + 1) * size] = row.reshape(size, -1)

    def _adopt(self, entry: KVCache, index: int, slot: int) -> None:
        if type(entry) is not SlotKV:
            del entry.keys, entry.values
            entry.__class__ = SlotKV
        entry.group, entry.index, entry.slot = self, index, slot

    def drop(self, seats: Sequence[Seat]) -> None:
        """Free the slots of rows that leave. Later rows move into them, so that the slots in use stay the first ones."""
        places, gone = list(enumerate(self.seats)), {id(seat) for seat in seats}
        n = len(places) - len(gone)
        holes = [slot for slot, seat in places[:n] if id(seat) in gone]
        moves = [(slot, to) for (slot, _), to in zip([p for p in places[n:] if id(p[1]) not in gone], holes, strict=True)]
        for some in self.pieces(len(moves)) if moves else ():
            sizes = [
                (arrays, index, self.kind[index][0] * self.capacity) for index in some for arrays in (self.keys, self.values)
            ]
            rows = [mx.contiguous(arrays[i][a * size : (a + 1) * size]) for arrays, i, size in sizes for a, _ in moves]
            mx.eval(rows)
            places = [(arrays, i, to * size, size) for arrays, i, size in sizes for _, to in moves]
            for row, (arrays, i, begin, size) in zip(rows, places, strict=True):
                arrays[i][begin : begin + size] = row
            mx.eval([arrays[i] for arrays, i, _ in sizes])
        kept = self.seats[:n]
        for slot, to in moves:
            kept[to] = self.seats[slot]
            for entry in kept[to].entries:
                entry.slot = to
        self.seats = kept
        if not n:
            self.fit()

    def fit(self) -> None:
        """Give up the free slots."""
        self._resize(len(self.seats))

    def _resize(self, slots: int) -> None:
        """Change the number of slots. Those in use stay."""
        if slots == self.slots:
            return
        for some in self.pieces(max(slots, self.slots)):
            for index, arrays in ((index, arrays) for index in some for arrays in (self.keys, self.values)):
                old, rows = arrays[index], slots * self.kind[index][0] * self.capacity
                arrays[index] = mx.contiguous(old[:rows]) if len(old) >= rows else mx.pad(old, [(0, rows - len(old)), (0, 0)])
            mx.eval([(self.keys[index], self.values[index]) for index in some])
        self.slots = slots


class Groups:
    """The groups of a batch's rows."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def __iter__(self) -> Iterator[Group]:
        return (group for group in self._groups if group.seats)

    def arrange(self, needs: Sequence[tuple[Seat, int]]) -> None:
        """Make room for this many tokens of each row. Copies nothing while every row has room and few slots are free."""
        held = sum(group.slots * group.capacity for group in self._groups)
        if held > MOST * sum(tokens for _, tokens in needs) + MOST_TOKENS:
            for group in self._groups:
                group.fit()
        if all(seat.group is not None and tokens <= seat.group.capacity for seat, tokens in needs):
            return
        for kind in {seat.kind: None for seat, _ in needs}:
            alike = [(seat, tokens) for seat, tokens in needs if seat.kind == kind]
            for capacity, rows in partition([tokens for _, tokens in alike]):
                known = (group for group in self if (group.capacity, group.kind) == (capacity, kind))
                group = next(known, None) or Group(capacity, kind)
                if coming := [alike[row][0] for row in rows if alike[row][0].group is not group]:
                    group.take(coming)
                self._groups = [*(one for one in self if one is not group), group]


class Places:
    """Where new tokens of a group are written: the (slot, position) of each."""

    def __init__(self, group: Group, at: Sequence[tuple[int, int]]):
        self.group, self.at = group, at
        self._rows: dict[int, mx.array] = {}

    def _of(self, heads: int) -> mx.array:
        """[T * heads] int32: the rows of the group's arrays for these tokens."""
        if heads not in self._rows:
            size = self.group.capacity
            first = mx.array([slot * heads * size + position for slot, position in self.at], dtype=mx.int32)
            more = mx.arange(0, heads * size, size, dtype=mx.int32)
            self._rows[heads] = first if heads == 1 else (first[:, None] + more).reshape(-1)
        return self._rows[heads]

    def write(self, index: int, keys: mx.array, values: mx.array) -> None:
        """Write keys and values [T, kv_heads, D] or [T, kv_heads, 1, D] in place."""
        rows = self._of(self.group.kind[index][0])
        self.group.keys[index][rows] = keys.reshape(rows.size, -1)
        self.group.values[index][rows] = values.reshape(rows.size, -1)
