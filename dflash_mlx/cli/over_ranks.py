"""`mlx.launch ... dflash-mlx generate | serve`: every rank runs the command, but only rank 0 reads input and prints."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from ..errors import DFlashError
from .options import flag, refuse
from .output import say

# Commands that run over ranks. Training has its own (`train.ranks`).
COMMANDS = ("generate", "serve", "train run")
# Where the output of ranks other than 0 goes, except their errors.
_muted: list[Any] = []


def is_over_ranks() -> bool:
    """Whether `mlx.launch` started this process, perhaps alone."""
    return "MLX_RANK" in os.environ


def may_compute_after(finish_reason: str | None) -> bool:
    """Whether this process may compute more with its model. Ctrl-C is rank 0's alone: the others are still in the run."""
    return finish_reason != "interrupted" or not is_over_ranks()


def check_command(name: str) -> None:
    """Refuse a command that does not run over several ranks. name: as it is typed, such as "train eval".

    Raises:
      DFlashError: names the commands that work.
    """
    if is_over_ranks() and name not in COMMANDS and _join() is not None:
        *others, last = COMMANDS
        words = f"dflash-mlx {name} does not run over several machines: {', '.join(others)} and {last} do"
        raise DFlashError(words, "Start it without mlx.launch, on one")


def _join() -> Any:
    """The ranks of this command; None if it runs alone. From now on only rank 0 uses the terminal. The others end with it."""
    if os.environ["MLX_RANK"] != "0":
        # Ctrl-C in a terminal reaches every rank of this machine. Only rank 0 reacts to it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _muted[:] = [open(os.devnull, "w")]  # noqa: SIM115
        for handler in logging.getLogger().handlers:
            # The handler still has the old stream.
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                handler.setStream(_muted[0])
        sys.stdout = sys.stderr = _muted[0]
    from ..ranks import join

    return join()


def begin(pipeline: bool, draft_model: str | None, model: str | None, **others: Any) -> Any:
    """The ranks of this command, as `_join` gives them.

    Raises:
      a usage error, DFlashError: an option that does not work over ranks. others: those options, by name.
    """
    drafts = draft_model != "none" and (draft_model is not None or model is None)
    if pipeline and drafts:
        raise refuse("--pipeline", "it needs --draft-model none: a drafter's taps would lie on other ranks")
    if not is_over_ranks():
        if pipeline:
            raise refuse("--pipeline", "it needs several machines: mlx.launch -n 2 -- dflash-mlx ...")
        return None
    if (ranks := _join()) is not None:
        for name, value in others.items():
            if value not in (None, False):
                raise DFlashError(f"{flag(name)} does not work over several machines yet", "Leave it out, or run on one")
    return ranks


def serve(run: Callable[..., None], options: Any, open_pair: Callable[[], tuple], ranks: Any) -> None:
    """Run `serving.server.serve` on one machine or on rank 0, and `follow` on the other ranks."""
    if ranks is None:
        run(options, open_pair, say)
        return
    from ..serving.rank_engine import RankEngine, follow

    if ranks.leads:
        run(options, open_pair, say, lambda *given: RankEngine(*given, ranks))
    else:
        follow(options, open_pair, ranks)


def failed(sentence: str) -> str | None:
    """An error's sentence as this rank prints it; None if rank 0 prints the same."""
    if not is_over_ranks():
        return sentence
    from ..ranks import joined

    ranks = joined()
    if not _muted:
        if ranks is not None:
            # An error of MLX may come from a lost rank. Another thread is about to report that, so wait for it.
            time.sleep(0.5)
            ranks.leave()
        return sentence
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    if ranks is not None:
        if ranks.has_ended(1.0):
            return None
        ranks.is_failed = True
    return f"On rank {os.environ['MLX_RANK']}: {sentence}"
