"""Passes of a pair that are put together once and run again, where a trial on this machine finds that faster.

One door, `accelerate`. Outside of this folder nothing but this file is imported, and a caller needs to know this much:

    pair.accelerator = accelerate(pair)         at the start of each run: it is None, or the last one as long as that holds
    accelerator.verify(target, ids, cache, point)         in the place of the target's own pass over a block or a single row
    accelerator.draft(ids, features, cache, start)        in the place of `Drafter.mask_rows`
    accelerator.refuse(reason)                            after one of its target passes gave a value that is not finite

verify and draft answer None where the ordinary pass is to be run; nothing has happened then. They wait for the device only in a
trial, once for a shape. Two runs may share an accelerator, in two threads too.
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
    """DFLASH_MLX_COMPILE says what is not known."""


class Pair(Protocol):
    """What `accelerate` needs of a pair. accelerator: what the last call gave."""

    target: Target
    drafter: Drafter
    accelerator: Accelerator | None


class Accelerator(Protocol):
    """Runs a pair's passes faster than the models' own code does, with the same values up to rounding; of an exact pair the
    target's with every value the same.

    prepares: whether passes are put together before the first answer, which may take long.
    """

    prepares: bool

    def verify(self, target: Target, ids: mx.array, cache: Sequence[Any], point: RollbackPoint) -> TargetOutput | None:
        """The pass `target(ids, cache, point, kernels=True)`, ids [1, w] int32; None: run that.

        Its finite flag is to be read always: rows that are rolled back stay in its buffers with weight zero, and zero times
        infinity is no number.
        """

    def draft(self, ids: mx.array, features: mx.array, cache: Sequence[Any], start: int) -> mx.array | None:
        """`Drafter.mask_rows` of the same arguments; None: run that."""

    def refuse(self, reason: str) -> None:
        """No target pass any more, with one line in the log: the last one gave a value that is not finite."""

    def findings(self) -> list[dict[str, Any]]:
        """Plain values for `doctor`, for the target and the drafter: name, refused (why, or None), passes run, and by rows of a
        block whether faster."""


def setting() -> str:
    """What DFLASH_MLX_COMPILE says: "off", "auto" or "on".

    Raises:
      CompileError: if it says anything else.
    """
    value = switch(VARIABLE).lower() or "auto"
    if value not in ("off", "auto", "on"):
        raise CompileError(f"{VARIABLE} is {value!r}; it must be off, auto or on", "Correct the variable")
    return value


def may_accelerate() -> bool:
    """Whether `accelerate` gives anything here: on a GPU unless it is off, elsewhere where DFLASH_MLX_COMPILE is on.

    Raises:
      CompileError: as `setting`.
    """
    wanted = setting()
    return wanted == "on" or wanted == "auto" and autotune.has_gpu()


def prepare(model: nn.Module, windows: Sequence[int | None]) -> None:
    """Make the choices of a process that MLX reads at its first attention. Loading a pair calls it before the pair's first pass.

    Args:
      windows: the drafter's, one a layer, None for full attention.
    Raises:
      CompileError: as `setting`.
    """
    plain = all(type(entry) is KVCache for entry in make_prompt_cache(model)) and not any(windows)
    choose_cudnn(plain and may_accelerate())


def accelerate(pair: Pair) -> Accelerator | None:
    """What runs the passes of this pair in the place of its models' own code; None: nothing does.

    Call it at the start of each run and keep what it gives as `pair.accelerator`. It is the same one again as long as both
    models' weights and DFLASH_MLX_COMPILE are what they were.

    Raises:
      CompileError: as `setting`.
    """
    if not may_accelerate():
        return None
    from .compiled import CompiledPair

    always = setting() == "on"
    if isinstance(pair.accelerator, CompiledPair) and pair.accelerator.holds_for(pair.target, pair.drafter, always):
        return pair.accelerator.begin()
    # On Metal what passes cost is measured without waiting for trials, and a GPU may take long over its first ones.
    return CompiledPair(pair.target, pair.drafter, always, prepares=always or mx.cuda.is_available())
