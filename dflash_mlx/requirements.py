"""What has to be installed beside this package, told from an import that failed. Imports nothing but the standard library."""

from __future__ import annotations

import re
import sys
from importlib import metadata

_DISTRIBUTION = "dflash-mlx"


def explain(error: ImportError) -> str | None:
    """A failed import of something that this package needs, in one sentence and what to install; None for any other import."""
    module = (error.name or "").partition(".")[0]
    if module == "mlx" and isinstance(error, ModuleNotFoundError) or "libmlx" in str(error):
        return _no_mlx()
    name = module.replace("_", "-")
    wanted = _wanted(name)
    if wanted is None:
        return None
    try:
        found = f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f'{name} is not installed; this version needs {name}{wanted}. Install it: pip install "{name}{wanted}"'
    lacks = re.search(r"cannot import name '([^']+)'", str(error))
    what = lacks.group(1) if lacks else error.name
    return f'{found} has no {what}; this version needs {name}{wanted}. Install it: pip install "{name}{wanted}"'


def _no_mlx() -> str:
    if sys.platform == "darwin":
        return "MLX is not installed. Install it: pip install mlx (macOS 14 or later on Apple silicon)"
    return (
        "MLX is not installed, and on Linux an extra brings it: [cpu], [cuda12] or [cuda13]. Install one from the project's "
        'folder: pip install ".[cpu]", or ".[cuda12]" or ".[cuda13]" for an NVIDIA GPU'
    )


def _wanted(name: str) -> str | None:
    """The versions of a package that we, or else mlx-lm, ask for, such as ">=0.32.2,<0.33"; None: nobody asks for it."""
    for asking in (_DISTRIBUTION, "mlx-lm"):
        try:
            requirements = metadata.requires(asking) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in requirements:
            found = re.match(r"([\w.-]+)\s*(?:\[[^\]]*\])?\s*([^;]*)", requirement)
            if found and found.group(1).replace("_", "-").lower() == name.lower():
                return found.group(2).strip().strip("()")
    return None
