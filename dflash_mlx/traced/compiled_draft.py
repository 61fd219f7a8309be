"""A drafter's compiled passes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels import autotune
from ..kernels.routing import Dense, kernel_calls
from ..models.drafter import Drafter
from ..models.intercept import intercept
from .buffers import Pass, may_trace
from .compiled import CompiledPass
from .draft_attention import attention_calls
from .fusion import Call

# The most new context rows of a drafter, in blocks: after looked-up drafts there are more than one block's.
MOST_BLOCKS = 4


def _draft_calls(model: nn.Module) -> list[tuple]:
    """The calls of a drafter's layers that take another route. Its finite flag is not read: an error costs drafts, never text.

    On CUDA only those of `kernel_calls` that are MLX's own operations: kernels for products are compiled again in each process.
    """
    return [call for call in kernel_calls(model) if isinstance(call[1], Dense) or not mx.cuda.is_available()]


class CompiledDraft(CompiledPass):
    """A drafter's passes: `Accelerator.draft`."""

    kernels, windows = staticmethod(_draft_calls), True

    @property
    def fused(self) -> bool:
        """True except on CUDA, where kernels for products are compiled again in each process."""
        return not mx.cuda.is_available()

    # The drafter was loaded by us. On CUDA its fused weights are filled up, so they are copies.
    own = fused

    def __init__(self, drafter: Drafter, parts: list[Any], always: bool):
        # The drafter holds this object.
        held = weakref.ref(drafter)

        def passes(fused: list[Call]) -> Pass:
            def run(arrays: Sequence[mx.array], entries: Sequence[Any], start: int | mx.array) -> tuple[mx.array]:
                (ids, features), drafter = arrays, held()
                with intercept([*(calls() if autotune.may_run() else []), *fused]):
                    return (drafter.mask_rows(ids, features, entries, start),)

            return run

        calls = functools.cache(lambda: _draft_calls(held()))
        self._calls, self._routed = calls, passes([])
        super().__init__("the drafter", self._routed, passes, drafter, parts, always)

    def _attention(self, arrays: Sequence[mx.array]) -> tuple[list[Call], list[nn.Module]]:
        ids, features = arrays
        return attention_calls(self._model(), self.kernels, ids.shape[1], features.shape[1])

    def draft(self, ids: mx.array, features: mx.array, cache: Sequence[Any], start: int) -> mx.array | None:
        """`Drafter.mask_rows`, compiled, or on Metal with kernels; None: run that instead."""
        if (out := self._filled_up(ids, features, cache, start)) is not None:
            return out
        if mx.cuda.is_available() or not autotune.may_run() or not self._calls():
            return None
        return self._routed([ids, features], cache, start)[0]

    def _filled_up(self, ids: mx.array, features: mx.array, cache: Sequence[Any], start: int) -> mx.array | None:
        """The compiled pass. New context rows are filled up to one block's or a few."""
        S, K = features.shape[1], ids.shape[1]
        if cache[0].offset != start:
            return None
        most = MOST_BLOCKS * K
        if S > most and self.serves(K) and may_trace(cache, S + K):
            # Context from plain decoding, or a prompt. Its keys and values need no attention, whose length would be a new one.
            # Few lengths are used, since a product of a new shape has to be planned first.
            n = (S - 1) // most * most
            self._model().inject(features[:, :n], cache, start)
            features, start, S = features[:, n:], start + n, S - n
        # Filled up at the front, so that all later rows keep their distances.
        spare = -S % K
        rows = mx.take(features, _filled_rows(spare, S), axis=1) if spare else features
        out = self.run([ids, features], [ids, rows], cache, spare, S, K, S)
        return None if out is None else out[0]


@functools.lru_cache(64)
def _filled_rows(spare: int, S: int) -> mx.array:
    """[spare + S] int32: the first of S rows in place of rows without meaning, then all of them. Made once: see `Place.of`."""
    return mx.array([*[0] * spare, *range(S)], dtype=mx.int32)
