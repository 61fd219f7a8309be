"""The part of a record that says where it was made: machine, versions, the weights in memory, our kernels."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..machine import chip, machine_bytes
from ..models.target import Target


def machine() -> dict[str, Any]:
    """Chip, memory, system, and how busy the machine is with other things."""
    gpu = mx.default_device() != mx.cpu
    return {
        "chip": (mx.device_info().get("device_name") if gpu else None) or chip(),
        "device": "gpu" if gpu else "cpu",
        "memory_gb": round(machine_bytes() / 1e9, 1),
        "cpu": chip(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load": [round(x, 2) for x in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    """Versions of what computes; with the commit where the package lies in a checkout."""
    from ..conversion.report import versions as installed

    found, root = installed(), Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        git = ["git", "-C", str(root)]
        try:
            commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
            changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
        except OSError:
            return found
        if commit:
            found["commit"] = commit[:12] + (" and changes" if changed else "")
    return found


def bits_of(model: nn.Module) -> list[int]:
    """Bits of a model's quantized layers; [] if it has none."""
    return sorted({m.bits for _, m in model.named_modules() if isinstance(m, (nn.QuantizedLinear, nn.QuantizedEmbedding))})


def weights_of(model: nn.Module) -> dict[str, Any]:
    """How the target's weights lie in memory: bits of its quantized layers ([] if none), type of activations, size."""
    dtype = Target(model).embed(mx.zeros((1, 1), dtype=mx.int32)).dtype
    return {
        "bits": bits_of(model),
        "dtype": str(dtype).removeprefix("mlx.core."),
        "gb": float(f"{sum(a.nbytes for _, a in tree_flatten(model.parameters())) / 1e9:.3g}"),
    }


def kernels() -> dict[str, Any]:
    """The user's setting for our kernels, and this machine's result for each shape that was tried."""
    from ..kernels import autotune

    asked = autotune.setting()
    return {
        "asked": asked if isinstance(asked, str) else sorted(asked),
        "verdicts": [asdict(result) for result in autotune.results()],
    }
