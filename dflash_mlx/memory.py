"""How much memory there is, how sizes are told, and MLX's wired-memory limit while generating.

The limit is raised as mlx-lm raises it, for several models and several generators at once.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

_lock = threading.Lock()
_users = 0
_before: int | None = None


def machine_bytes() -> int:
    """Memory that models can have here: the accelerator's, where it says, else the machine's."""
    return mx.device_info().get("memory_size") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def wired_limit(models: Sequence[nn.Module], stream: mx.Stream) -> Iterator[None]:
    """Raise the wired limit to the recommended size until the last open generator ends; warn if the models hardly fit.

    mlx-lm's own context manager restores what it found, so two generators that end in the order in which they began would
    leave the limit raised; and it prints its warning to stdout. On a device without such a limit this does nothing.
    """
    global _users, _before
    limit = mx.device_info().get("max_recommended_working_set_size")
    if limit is None:
        yield
        return
    size = sum({id(a): a.nbytes for m in models for _, a in tree_flatten(m.parameters())}.values())
    if size > 0.9 * limit:
        warnings.warn(
            f"the models take {size / 1e9:.1f} GB, close to the {limit / 1e9:.1f} GB that the GPU may hold; this can be slow",
            stacklevel=3,
        )
    with _lock:
        if _users == 0:
            _before = mx.set_wired_limit(limit)
        _users += 1
    try:
        yield
    finally:
        mx.synchronize(stream)
        with _lock:
            _users -= 1
            if _users == 0:
                mx.set_wired_limit(_before)


def size_text(size_bytes: float) -> str:
    """Bytes in the unit that suits them: "1.28 GB", and below 0.1 GB "5.3 MB"."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"
