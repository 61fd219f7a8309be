"""Every error the package raises on purpose: what is wrong, with the values found and wanted; then what to do.

Each is also the built-in exception that `mlx-lm` or Python would raise in its place, so `except ValueError` keeps working.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping


class DFlashError(Exception):
    """Base of all errors below. The command line prints it as one line and exits with 1.

        raise GenerationError(f"max_kv_size is {n}; it must be at least 1", "Leave it out for the default")
        Error: max_kv_size is 0; it must be at least 1. Leave it out for the default.

    problem: what is wrong, the found value first, then the wanted one. remedy: what to do about it.
    """

    def __init__(self, problem: str, remedy: str = ""):
        self.problem, self.remedy = problem.rstrip("."), remedy.rstrip(".")
        text = ". ".join(part for part in (self.problem, self.remedy) if part)
        super().__init__(text if text.endswith("?") else f"{text}.")


def os_error_text(error: OSError) -> str:
    """What the system refused, in a sentence: never the number of an error alone."""
    if error.filename and error.strerror:
        return f"{error.filename} cannot be used: {error.strerror}. Check the path."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "The disk is full. Free some space."
    return error.strerror or str(error)


def error_text(error: Exception) -> str:
    """Any error as a sentence; one that nobody meant for a reader has its type in front."""
    if isinstance(error, (DFlashError, ValueError)):
        return str(error)
    return os_error_text(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def one_line(error: object, most: int | None = 200) -> str:
    """An error's text in one line of at most `most` letters (None: all); the name of its class if it has no text."""
    return " ".join(str(error).split())[:most] or type(error).__name__


class ConfigError(DFlashError, ValueError):
    """A config.json that cannot be read as a DFlash drafter or a target; all faults are in one message."""


class CheckpointError(DFlashError, ValueError):
    """Files or tensors of a checkpoint are missing, unexpected, damaged or unsafe."""


class ConversionError(DFlashError, ValueError):
    """A checkpoint that was read but cannot be converted as asked."""


class PairError(DFlashError, ValueError):
    """A drafter and a target that do not belong together."""


class TapError(DFlashError, RuntimeError):
    """A target whose layers cannot be tapped; names the family and the layer."""


class CacheError(DFlashError, ValueError):
    """A cache kind that cannot be rolled back, or a prompt cache that does not fit the models."""


class GenerationError(DFlashError, ValueError):
    """An option of the generation loop that cannot be honoured as asked."""


def differences(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """For a message: settings that are not what they were, sorted, with both values where these are short."""
    names = (name for name in sorted(now) if then.get(name) != now[name])
    short = {name: not isinstance(then.get(name), (dict, list)) and not isinstance(now[name], (dict, list)) for name in now}
    return [f"{name} {then.get(name)}, now {now[name]}" if short[name] else name for name in names]
