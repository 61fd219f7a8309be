"""Masks that carry what they mean: attention's routes recognise one that a model passed on unchanged.

Knows mlx-lm's way of making masks, and how scores take one; knows no cache and no kernel's text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from . import small_batch


class WatchedArray(mx.array):
    """An array that tells whether it was changed in place: it is the same object afterwards."""

    changed = False


def _noting(change: Callable[..., Any]) -> Callable[..., Any]:
    def method(self, *args):
        self.changed = True
        return change(self, *args)

    return method


for _name in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor"):
    if _change := getattr(mx.array, f"__{_name}__", None):
        setattr(WatchedArray, f"__{_name}__", _noting(_change))


class WindowMask(WatchedArray):
    """The mask [N, S] of the last N positions of a text, each of which sees its last `window` of S keys in order.

    If a model computes with it, the result is an ordinary array, which no kernel takes for a window.
    """

    window: int


class BufferMask(WatchedArray):
    """A mask [N, S], True: seen, over a buffer of S keys. Its rows are the last N keys held; each sees all keys up to its own.

    added: the same mask as floats to add to scores; end: [1] int32, how many keys the buffer holds.
    """

    added: mx.array
    end: mx.array

    @classmethod
    def of(cls, seen: mx.array, added: mx.array, end: mx.array) -> BufferMask:
        mask = cls(seen)
        mask.added, mask.end = added, end
        return mask


class PassMasks:
    """The masks of a pass as attention takes them, each made once for all layers that are given it.

    The last of each kind is kept: layers with a window and layers without one take turns.
    """

    def __init__(self) -> None:
        self._last: dict[Any, tuple[Any, tuple, mx.array]] = {}

    def spread(self, mask: BufferMask, shape: tuple[int, ...]) -> mx.array:
        """What to add to scores [1, heads, N, S]."""
        return self._once("spread", mask, shape, lambda: mx.broadcast_to(mask.added, shape))

    def folded(self, mask: mx.array | str, *about: Any) -> mx.array:
        """`folded_mask` of the same arguments."""
        made = mask.added if isinstance(mask, BufferMask) and not mask.changed else mask
        return self._once("folded", mask, about, lambda: small_batch.folded_mask(made, *about))

    def _once(self, form: str, mask: mx.array | str, about: tuple, make: Callable[[], mx.array]) -> mx.array:
        kind = form, mask if isinstance(mask, str) else type(mask)
        found = self._last.get(kind)
        # An array is known by identity.
        if found is None or found[0] is not mask and not isinstance(mask, str) or found[1] != about:
            found = self._last[kind] = mask, about, make()
        return found[2]
