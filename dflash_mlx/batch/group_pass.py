"""One pass over rows of a group: the tokens of each go into its slot, and all rows attend in one call.

    sizes 2 1 2     tokens    a a b c c           [T, heads, 1, D]
                    queries   a a | b . | c c     [slots, heads, 2, D]; the result of an empty place (.) is never read
                    mask      [slots, 1, 2, L]    a token sees its own row's tokens up to itself; L: what the longest row holds

If a row must get the same bits as alone, and would not in a shared call, each row attends by itself (`attends_apart`).
Knows groups and MLX's attention; knows no model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from .groups import Group, Places

# The number of keys is rounded up to a multiple of this: cuDNN makes a new plan for each number.
_STEP = 64

# Numbers of queries and keys with which padding is tested.
_PROBED = tuple((n, end) for end in (19, 66, 131, 321, 385, 769, 1030, 2047) for n in (1, 3, 16))

Attend = Callable[..., mx.array]


def attends_apart(dtype: mx.Dtype, shared: int, D: int, E: int) -> bool:
    """Whether each row must attend by itself: in float32 on a CPU where padding a row changes its sums.

    In float32 on a CPU a row is promised the bits that it would get alone. shared, D, E: as in `padding_keeps_bits`.
    """
    return dtype == mx.float32 and mx.default_device() == mx.cpu and not padding_keeps_bits(shared, D, E)


@functools.cache
def padding_keeps_bits(shared: int, D: int, E: int) -> bool:
    """Whether masked keys after those that a row sees leave its float32 attention unchanged, bit by bit, on this CPU.

    Tested at lengths around those where BLAS splits its sums; takes some 50 ms. True with OpenBLAS on x86-64, at each length from
    17 to 700 and at some up to 4,200. shared: query heads per key head; D, E: head sizes of keys and values.
    """
    key = mx.random.split(mx.random.key(0), 3)
    queries = mx.random.normal((1, shared, _PROBED[-1][0], D), key=key[0])
    keys = mx.random.normal((1, 1, _PROBED[-1][1] + 2 * _STEP, D), key=key[1])
    values = mx.random.normal((1, 1, _PROBED[-1][1] + 2 * _STEP, E), key=key[2])
    for n, end in _PROBED:
        q, length = queries[:, :, :n], -(-end // _STEP) * _STEP + _STEP
        attend = functools.partial(mx.fast.scaled_dot_product_attention, q, scale=D**-0.5)
        alone = attend(keys[:, :, :end], values[:, :, :end], mask=None if n == 1 else "causal")
        mask = mx.arange(length) <= mx.arange(end - n, end)[:, None]
        if not mx.array_equal(alone, attend(keys[:, :, :length], values[:, :, :length], mask=mask)).item():
            return False
    return True


class GroupPass:
    """Some rows of a group in a pass.

    slots: the rows' slots, in order; ends: the tokens that each slot holds when it attends; sizes: how many of these attend.
    n: query places of a slot; None: as many as the largest size.
    """

    def __init__(self, group: Group, slots: Sequence[int], ends: Sequence[int], sizes: Sequence[int], n: int | None = None):
        self.group, self.slots, self.ends, self.sizes = group, slots, ends, sizes
        self._n, self._in_use = n or max(sizes), range(len(group.seats))
        self._length = min(-(-max(ends) // _STEP) * _STEP, group.capacity)
        # Every slot in use has a row here, and all rows have the same number of tokens: queries need no rearranging.
        self._is_even = min(sizes) == self._n and [*slots] == [*self._in_use]
        self._masks: dict[Any, mx.array] = {}

    def is_apart(self, queries: mx.array, index: int) -> bool:
        heads, D, E = self.group.kind[index][:3]
        return attends_apart(queries.dtype, queries.shape[1] // heads, D, E)

    @functools.cached_property
    def places(self) -> Places:
        """Where the tokens that attend are written."""
        every = zip(self.slots, self.ends, self.sizes, strict=True)
        return Places(self.group, [(slot, end - n + i) for slot, end, n in every for i in range(n)])

    def row_mask(self, row: int, **asked: Any) -> mx.array | str | None:
        """The mask that the row's own KVCache would make."""
        n = self.sizes[row]
        asked = {"return_array": False, "window_size": None, **asked}
        return create_attention_mask(n, self.ends[row] - n, **asked)

    def mask(self, is_causal: bool = True, window: int | None = None) -> mx.array:
        """[slots, 1, n, L] bool: the keys that each query sees; made once per pass. An empty place sees some keys too.

        is_causal: False, allowed only if all sizes are equal, lets a query see everything that its row holds.
        """
        if (is_causal, window) not in self._masks:
            last = dict.fromkeys(self._in_use, (self._n, self._n))
            last |= dict(zip(self.slots, zip(self.ends, self.sizes, strict=True), strict=True))
            ends = [last[slot] for slot in self._in_use]
            first = mx.array([end - n for end, n in ends], dtype=mx.int32)[:, None, None, None]
            own, at = first + mx.arange(self._n)[:, None], mx.arange(self._length)
            seen = at <= (own if is_causal else own[:, :, -1:])
            self._masks[is_causal, window] = seen if window is None else seen & (at > own - window)
        return self._masks[is_causal, window]

    @functools.cached_property
    def _out_and_back(self) -> tuple[mx.array, mx.array]:
        """The token of each query place, [slots, n], and the query place of each token, [T]."""
        out, back, token = [[0] * self._n for _ in self._in_use], [], 0
        for slot, n in zip(self.slots, self.sizes, strict=True):
            out[slot][:n] = range(token, token + n)
            back += range(slot * self._n, slot * self._n + n)
            token += n
        return mx.array(out), mx.array(back)

    def attend(self, queries: mx.array, index: int, scale: float, mask: mx.array, sinks: mx.array | None = None) -> mx.array:
        """Attention of all rows in one call. Takes and returns [T, heads, 1, D]."""
        heads, D = queries.shape[1], queries.shape[3]
        if not self._is_even:
            queries = queries.squeeze(2)[self._out_and_back[0]].swapaxes(1, 2)
        elif self._n > 1:
            queries = queries.reshape(len(self._in_use), self._n, heads, D).swapaxes(1, 2)
        out = self.attend_slots(queries, index, scale, mask, sinks)
        if self._is_even and self._n == 1:
            return out
        out = out.swapaxes(1, 2).reshape(-1, heads, 1, out.shape[3])
        return out if self._is_even else out[self._out_and_back[1]]

    def attend_rows(self, queries: mx.array, index: int, scale: float, is_causal: bool) -> mx.array:
        """Attention of rows that all have n tokens. Takes and returns [rows of the pass, heads, n, D]."""
        if self._is_even:
            return self.attend_slots(queries, index, scale, self.mask(is_causal))
        rows = dict(zip(self.slots, range(len(self.slots)), strict=True))
        every = queries[mx.array([rows.get(slot, 0) for slot in self._in_use])]
        return self.attend_slots(every, index, scale, self.mask(is_causal))[mx.array([*self.slots])]

    def attend_slots(
        self, queries: mx.array, index: int, scale: float, mask: mx.array, sinks: mx.array | None = None
    ) -> mx.array:
        """Attention of all slots in use. Takes and returns [slots, heads, n, D]."""
        keys, values = self.group.held(index, self._in_use, self._length)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)

    def split(self, queries: mx.array) -> list[mx.array]:
        """Split [T, heads, 1, D] into each row's [1, heads, n, D]."""
        start, found = 0, []
        for n in self.sizes:
            found.append(queries[start : start + n] if n == 1 else queries[start : start + n].swapaxes(0, 2))
            start += n
        return found

    def attend_apart(self, queries: Sequence[mx.array], index: int, attend: Attend, masks: Sequence[Any]) -> list[mx.array]:
        """Attention of queries [1, heads, n, D], a row each, to own keys. attend: (queries, keys, values, mask) -> same shape."""
        rows = zip(queries, self.slots, self.ends, masks, strict=True)
        return [attend(q, *self.group.held(index, [slot], end), mask) for q, slot, end, mask in rows]
