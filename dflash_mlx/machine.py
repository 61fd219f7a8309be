"""Where this machine keeps what is fetched, converted and measured. Knows the environment and nothing else."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_directory() -> Path:
    """$DFLASH_MLX_CACHE, or dflash-mlx in the user's cache directory.

    Raises:
      RuntimeError: neither is told and the user has no home directory.
    """
    if own := os.environ.get("DFLASH_MLX_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or ("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return Path(base).expanduser() / "dflash-mlx"
