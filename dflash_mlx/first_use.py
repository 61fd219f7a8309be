"""When kernels are tried on this GPU: before a pair's first answer and after answers, within time limits.

first run of a pair     the passes are built once without evaluating them, which shows which kernels they would use and how
                        often, so what to try first. At most 20 s, 5 s per trial; one line in the log
after an answer         the remaining trials, at most 2 s, and never while another stream is open
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from .kernels import autotune
from .kernels.accept import accept
from .kernels.block_qmm import MAX_ROWS
from .machine import open_streams
from .models.drafter import Drafter
from .models.target import Target
from .rollback import masks_by_row

_log = logging.getLogger("dflash_mlx.kernels")


def try_before_answers(target: Target, always: bool = False, drafter: Drafter | None = None) -> bool:
    """Find the kernels that passes of few rows would use, of the target and its drafter, and try them as far as time allows.

    Does nothing if kernels are off or chosen by name. On a GPU where trials may take minutes (`autotune.tries_first`) they are
    not tried, except with `always`.

    Returns: whether the kernels were found.
    """
    if not autotune.may_run() or autotune.setting() != "auto" or mx.cuda.is_available():
        return False
    with autotune.survey():
        entries, ids = make_prompt_cache(target.model), mx.arange(MAX_ROWS, dtype=mx.int32)[None] % target.vocabulary
        with masks_by_row(entries):
            output = target(ids, entries, kernels=True)
        hidden = output.hidden
        target.head(hidden)
        target.greedy_ids(hidden)
        accept(ids[:, 1:], ids)
        if drafter is not None and target.accelerator:
            # Context and block together are few rows, as in most rounds.
            target.accelerator.draft(ids[:, : MAX_ROWS // 2], output.features[:, :1], drafter.make_cache(), 0)
    if autotune.waiting() and (always or autotune.tries_first()):
        _log.warning("first run of this model on this GPU: testing kernels, at most %.0f s", autotune.FIRST_S)
        autotune.try_waiting(autotune.FIRST_S)
    return True


def try_after_answer(stop: Callable[[], bool] = lambda: False, own_streams: int = 0) -> None:
    """Try remaining kernels, for at most 2 s.

    Args:
      stop: called before each trial; True ends this. own_streams: open streams of the caller that have given their last token.
    """
    if autotune.waiting() and autotune.setting() == "auto":
        limit_s = autotune.AFTER_S
        autotune.try_waiting(limit_s, limit_s, lambda: stop() or open_streams() > own_streams)
