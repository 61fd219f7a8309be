"""When a pair's kernels are tried: before its first answer, within limits of time, and after answers. Knows both models' passes.

first run of a pair     the passes are put together once and not evaluated: that tells what will be asked, how often a pass
                        asks it, and so what to try first. At most 20 s, 5 s a trial, one line in the log
after an answer         what was left, at most 2 s; never while a stream is open besides
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
from .rollback import exact_windows

_log = logging.getLogger("dflash_mlx.kernels")


def try_before_answers(target: Target, always: bool = False, drafter: Drafter | None = None) -> bool:
    """Find out what passes over few rows of this target, and of its drafter, ask for, and try it as far as time allows.

    Nothing is tried on a GPU where trials may take minutes (`autotune.tries_first`), except with `always`; nor where kernels were
    asked for by name or are off: then nobody waits for a verdict.

    Returns: whether that was found out.
    """
    if not autotune.may_run() or autotune.setting() != "auto" or mx.cuda.is_available():
        return False
    with autotune.survey():
        entries, ids = make_prompt_cache(target.model), mx.arange(MAX_ROWS, dtype=mx.int32)[None] % target.vocabulary
        with exact_windows(entries):
            output = target(ids, entries, kernels=True)
        hidden = output.hidden
        target.head(hidden)
        target.greedy_ids(hidden)
        accept(ids[:, 1:], ids)
        if drafter is not None and target.accelerator:
            # Context and block together are few rows, as in most rounds.
            target.accelerator.draft(ids[:, : MAX_ROWS // 2], output.features[:, :1], drafter.make_cache(), 0)
    if autotune.waiting() and (always or autotune.tries_first()):
        _log.warning("first run with this model on this GPU: kernels are tried first, at most %.0f s", autotune.FIRST_S)
        autotune.try_waiting(autotune.FIRST_S)
    return True


def try_after_answer(stop: Callable[[], bool] = lambda: False, own_streams: int = 0) -> None:
    """Try what still waits, for at most 2 s.

    Args:
      stop: asked before each trial, True ends this. own_streams: open ones of the caller's that have given their last token.
    """
    if autotune.waiting() and autotune.setting() == "auto":
        limit_s = autotune.AFTER_S
        autotune.try_waiting(limit_s, limit_s, lambda: stop() or open_streams() > own_streams)
