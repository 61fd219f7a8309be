"""Facts about this machine and this Python: chip, cores, memory, system, the wheels of MLX, power and heat.

Asks the system's own commands, each with a time limit; unknown values are None. Prints nothing, and names neither host nor user.
"""

from __future__ import annotations

import platform
import re
import sysconfig
from importlib import metadata
from typing import Any

import mlx.core as mx

from ..machine import mac_says, power_mode
from ..requirements import machine_fault
from .place import machine

_WHEELS = ("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
# The first GPU with matrix units of its own (M5), and the first wheel that uses them.
_MATRIX_UNITS, _THEIR_WHEEL = 17, 26


def facts() -> dict[str, Any]:
    """`place.machine`, and: architecture, working set, cores by kind, macOS, Python's build, wheels, power, heat."""
    gpu = mx.device_info(mx.Device(mx.gpu)) if mx.metal.is_available() or mx.cuda.is_available() else {}
    working_set = gpu.get("max_recommended_working_set_size")
    return machine() | {
        "gpu": gpu.get("device_name"),
        "architecture": gpu.get("architecture"),
        "working_set_gb": round(working_set / 1e9, 2) if working_set else None,
        "cores_by_kind": _cores_by_kind(),
        "macos": _macos(),
        "python": python(),
        "wheels": wheels(),
        "power": power(),
    }


def faults(found: dict[str, Any]) -> list[str]:
    """Reasons in these facts why MLX cannot run, or not fast, each with what to do."""
    return [fault for fault in (machine_fault(), _wheel_fault(found)) if fault]


def wheels() -> dict[str, str]:
    """The installed parts of MLX: version and the tag of the wheel that pip took, "0.32.4 cp312-cp312-macosx_26_0_arm64"."""
    found = {}
    for name in _WHEELS:
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        tags = re.findall(r"^Tag: (\S+)", package.read_text("WHEEL") or "", re.MULTILINE)
        found[name] = f"{package.version} {' '.join(tags) or 'not from a wheel'}"
    return found


def python() -> dict[str, Any]:
    """The build of this Python. `macos`: the version that it sees, 16 for 26 where it was built with an older SDK."""
    return {
        "version": platform.python_version(),
        "build": " ".join(platform.python_build()),
        "compiler": platform.python_compiler(),
        "machine": platform.machine(),
        "macos": platform.mac_ver()[0] or None,
        "built_for": sysconfig.get_config_var("MACOSX_DEPLOYMENT_TARGET"),
    }


def power() -> dict[str, Any]:
    """What `pmset` says of power and heat, without the battery's number."""
    battery, heat, settings = (mac_says("/usr/bin/pmset", "-g", *more) for more in (["batt"], ["therm"], []))
    source = re.search(r"drawing from '([^']+)'", battery)
    percent = re.search(r"(\d+)%;\s*([\w ]+)", battery)
    return {
        "source": source and source.group(1),
        "battery": percent and f"{percent.group(1)} %, {percent.group(2).strip()}",
        "power_mode": power_mode(settings),
        "heat": [" ".join(line.split()) for line in heat.splitlines() if line.strip()] or None,
    }


def _macos() -> str | None:
    """The system's own version and build, "26.1 (25B78)"."""
    version, build = (mac_says("/usr/bin/sw_vers", name) for name in ("-productVersion", "-buildVersion"))
    return f"{version} ({build})" if version else None


def _cores_by_kind() -> dict[str, int] | None:
    """{"performance": 8, "efficiency": 4} of a Mac."""
    counts = (mac_says("/usr/sbin/sysctl", "-n", f"hw.perflevel{level}.physicalcpu") for level in (0, 1))
    found = {kind: int(n) for kind, n in zip(("performance", "efficiency"), counts, strict=True) if n.isdigit()}
    return found or None


def _wheel_fault(found: dict[str, Any]) -> str | None:
    """That pip took the wheel without the M5's matrix units, and why; None where they are not there or used."""
    generation = re.search(r"applegpu_g(\d+)", found["architecture"] or "")
    system = re.match(r"\d+", found["macos"] or "")
    wheel = re.search(r"(\S+) \S*macosx_(\d+)_\d+", found["wheels"].get("mlx-metal", ""))
    if not (generation and system and wheel):
        return None
    has_units, could = int(generation.group(1)) >= _MATRIX_UNITS, int(system.group(0)) >= _THEIR_WHEEL
    if not (has_units and could and int(wheel.group(2)) < _THEIR_WHEEL):
        return None
    sees = found["python"]["macos"]
    return (
        f"mlx-metal is the wheel for macOS {wheel.group(2)}, which does not use this GPU's matrix units, on macOS "
        f"{found['macos']} (this Python sees macOS {sees}). Run: SYSTEM_VERSION_COMPAT=0 pip install --force-reinstall --no-deps "
        f"mlx=={wheel.group(1)} mlx-metal=={wheel.group(1)}"
    )


def lines(found: dict[str, Any]) -> list[str]:
    """These facts for a terminal."""
    kinds = ", ".join(f"{n} {kind}" for kind, n in (found["cores_by_kind"] or {}).items())
    cores = f"{found['cores']} cores{f' ({kinds})' if kinds else ''}"
    p, power_ = found["python"], found["power"]
    working = f", working set {found['working_set_gb']:.1f} GB" if found["working_set_gb"] else ""
    mode = {1: "Low Power Mode", 2: "High Power Mode"}.get(power_["power_mode"])
    told = [power_["source"], power_["battery"], mode, *(power_["heat"] or [])]
    return [
        f"machine     {found['chip']}, {found['memory_gb']:.1f} GB{working}, {cores}, {found['architecture'] or 'no GPU'}",
        f"system      {'macOS ' + found['macos'] if found['macos'] else found['system']}; Python {p['version']} {p['machine']}, "
        f"{p['compiler']}",
        "wheels      " + "; ".join(f"{name} {wheel}" for name, wheel in found["wheels"].items()),
        *([f"power       {'; '.join(x for x in told if x)}"] if any(told) else []),
    ]
