"""Passes of a pair that are traced once and run again, where a trial on this machine finds that faster.

The only entry point is `accelerate`. Code outside of this folder imports only this file, and needs to know this much:

    pair.accelerator = accelerate(pair)         at the start of each run: None, or the last accelerator if it is still valid
    accelerator.verify(target, ids, cache, point)         instead of the target's own pass over a block or a single row
    accelerator.draft(ids, features, cache, start)        instead of `Drafter.mask_rows`
    accelerator.refuse(reason)                            after one of its target passes gave a value that is not finite

verify and draft return None if the caller has to run the ordinary pass; nothing has happened then. They wait for the device only
in a trial, once per shape. Two runs may share an accelerator, also in two threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..errors import DFlashError
from ..kernels import autotune
from ..kernels.small_batch import choose_cudnn
from ..machine import switch

if TYPE_CHECKING:
    from ..models.drafter import Drafter
    from ..models.target import Target, TargetOutput
    from ..rollback import RollbackPoint

VARIABLE = "DFLASH_MLX_COMPILE"


class CompileError(DFlashError, ValueError):
    """DFLASH_MLX_COMPILE has an unknown value."""


class Pair(Protocol):
    """What `accelerate` needs of a pair. accelerator: the result of the last call."""

    target: Target
    drafter: Drafter
    accelerator: Accelerator | None


class Accelerator(Protocol):
    """Runs a pair's passes faster than the models' own code, with the same values up to rounding. For an exact pair every value
    of the target's passes is the same.

    prepares: whether passes are traced before the first answer, which may take long.
    """

    prepares: bool

    def verify(self, target: Target, ids: mx.array, cache: Sequence[Any], point: RollbackPoint) -> TargetOutput | None:
        """The pass `target(ids, cache, point, kernels=True)`, ids [1, w] int32; None: run that.

        Always read its finite flag: rows that were rolled back stay in the buffers with weight zero, and zero times infinity is
        NaN.
        """

    def draft(self, ids: mx.array, features: mx.array, cache: Sequence[Any], start: int) -> mx.array | None:
        """`Drafter.mask_rows` with the same arguments; None: run that."""

    def refuse(self, reason: str) -> None:
        """Run no more target passes, and say so in one log line: the last one gave a value that is not finite."""

    def findings(self) -> list[dict[str, Any]]:
        """Plain values for `doctor`, for the target and the drafter: name, refused (the reason, or None), number of passes, and
        whether they were faster, by rows of a block."""


def setting() -> str:
    """The value of DFLASH_MLX_COMPILE: "off", "auto" or "on".

    Raises:
      CompileError: it has another value.
    """
    value = switch(VARIABLE).lower() or "auto"
    if value not in ("off", "auto", "on"):
        raise CompileError(f"{VARIABLE} is {value!r}; it must be off, auto or on", "Correct the variable")
    return value


def may_accelerate() -> bool:
    """Whether `accelerate` may return an accelerator: on a GPU unless it is off; elsewhere only if DFLASH_MLX_COMPILE is on.

    Raises:
      CompileError: as `setting`.
    """
    wanted = setting()
    return wanted == "on" or wanted == "auto" and autotune.has_gpu()


def prepare(model: nn.Module, windows: Sequence[int | None]) -> None:
    """Set what MLX reads once per process, at its first attention. Loading a pair calls this before the pair's first pass.

    Args:
      windows: the drafter's sliding windows, one per layer; None for full attention.
    Raises:
      CompileError: as `setting`.
    """
    plain = all(type(entry) is KVCache for entry in make_prompt_cache(model)) and not any(windows)
    choose_cudnn(plain and may_accelerate())


def accelerate(pair: Pair, beside: Accelerator | None = None) -> Accelerator | None:
    """What runs this pair's passes instead of the models' own code; None: nothing does.

    Call it at the start of each run and keep the result as `pair.accelerator`. It stays the same object as long as the weights
    of both models and DFLASH_MLX_COMPILE stay the same.

    Args:
      beside: of the same models' other pair, ordinary or exact: a drafter has one set of traces, for they make its weights views.
    Raises:
      CompileError: as `setting`.
    """
    if not may_accelerate():
        return None
    from .compiled_pair import CompiledPair

    always = setting() == "on"
    if isinstance(pair.accelerator, CompiledPair) and pair.accelerator.holds_for(pair.target, pair.drafter, always):
        return pair.accelerator.begin()
    # On Metal, costs of passes are measured without waiting for trials, since a GPU may take long over its first ones.
    prepares = always or mx.cuda.is_available()
    drafts = beside.drafts_for(pair.drafter, always) if isinstance(beside, CompiledPair) else None
    return CompiledPair(pair.target, pair.drafter, always, prepares, drafts)
