"""What has to be installed besides this package, found from a failed import. Imports only the standard library."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from importlib import metadata

_DISTRIBUTION = "dflash-mlx"


def explain(error: ImportError) -> str | None:
    """A failed import of something that this package needs, in one sentence and what to install; None for any other import."""
    module = (error.name or "").partition(".")[0]
    no_mlx = module == "mlx" and isinstance(error, ModuleNotFoundError) or "libmlx" in str(error)
    name = module.replace("_", "-")
    wanted = _wanted(name)
    # No package that is installed helps there, so before all else. An x86 Python does not load arm64's files.
    if (no_mlx or wanted is not None) and (fault := machine_fault()):
        return fault
    if no_mlx:
        return _no_mlx()
    if wanted is None:
        return None
    try:
        found = f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f'{name} is not installed; this version needs {name}{wanted}. Install it: pip install "{name}{wanted}"'
    lacks = re.search(r"cannot import name '([^']+)'", str(error))
    what = lacks.group(1) if lacks else error.name
    return f'{found} has no {what}; this version needs {name}{wanted}. Install it: pip install "{name}{wanted}"'


def machine_fault() -> str | None:
    """Why MLX cannot run in this Python on this Mac, in one sentence and what to do; None where it can, and off a Mac."""
    if sys.platform != "darwin":
        return None
    if platform.machine() == "x86_64":
        if _under_rosetta():
            return (
                "this Python is an x86 build that runs under Rosetta, and MLX has none for it. Install an arm64 Python (3.11 to "
                "3.14, as from python.org or Homebrew) and, with it, this package in a fresh virtual environment"
            )
        return "this Mac has an Intel processor, and MLX needs Apple silicon. Run this on a Mac with an M1 or later"
    version = platform.mac_ver()[0]
    if version and int(version.partition(".")[0]) < 14:
        return f"this is macOS {version}, and MLX needs macOS 14 or later. Update macOS, then install again"
    return None


def _under_rosetta() -> bool:
    """Whether an x86 process is being translated on Apple silicon."""
    command = ["/usr/sbin/sysctl", "-n", "sysctl.proc_translated"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip() == "1"
    except (OSError, subprocess.SubprocessError):
        return False


def _no_mlx() -> str:
    if sys.platform == "darwin":
        return "MLX is not installed. Install it: pip install mlx (macOS 14 or later on Apple silicon)"
    return (
        "MLX is not installed, and on Linux an extra brings it: [cpu], [cuda12] or [cuda13]. Install one from the project's "
        'folder: pip install ".[cpu]", or ".[cuda12]" or ".[cuda13]" for an NVIDIA GPU'
    )


def _wanted(name: str) -> str | None:
    """The versions of a package that we, or else mlx-lm, require, such as ">=0.32.2,<0.33"; None: it is not required."""
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
