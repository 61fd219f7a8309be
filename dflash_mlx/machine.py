"""What belongs to this machine: directories, memory, files that are written whole, and every environment switch.

Knows no model. Imports without MLX; what needs MLX imports it when it is called.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DFlashError, one_line

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

_log = logging.getLogger("dflash_mlx.machine")

CACHE = "DFLASH_MLX_CACHE"


class CacheDirectoryError(DFlashError, RuntimeError):
    """The cache directory cannot be found, made or written."""


class FileWriteError(DFlashError, OSError):
    """A file that cannot be written; names it, with the system's reason."""


# ---- environment switches


@dataclass(frozen=True)
class Switch:
    """One environment variable that changes what this project does.

    values: what it may hold; about: what that does; speed: it changes how fast models run, so records of measurements name it.
    """

    name: str
    values: str
    about: str
    speed: bool = True


# The only list of them: docs, `doctor` and the benchmark's record are made from it. MLX's own come last.
ENVIRONMENT: dict[str, Switch] = {
    switch.name: switch
    for switch in (
        Switch(
            CACHE,
            "a directory",
            "Where downloads, conversions and measurements are kept. Default: dflash-mlx in the user's cache directory.",
            speed=False,
        ),
        Switch(
            "DFLASH_MLX_KERNELS",
            "auto, on, off, or names with commas",
            "Which of our kernels run. auto (default): those that a trial on this GPU found right and faster. on: all that are "
            "eligible, faster or not. off: none. Names: these and no others, faster or not.",
        ),
        Switch(
            "DFLASH_MLX_COMPILE",
            "auto, on, off",
            "Whether short passes are compiled once and reused. auto (default): on a GPU, where a trial on this machine found it "
            "faster; on a Mac from the second answer on. on: wherever possible. off: never.",
        ),
        Switch("DFLASH_TRACEBACK", "1", "The command line shows Python's traceback with each error.", speed=False),
        Switch("DFLASH_API_KEY", "text", "The key that clients of `serve` must send; `--api-key` overrides it.", speed=False),
        Switch(
            "MLX_CUDA_USE_CUDNN_SDPA",
            "0, 1",
            "MLX's own: whether cuDNN computes attention on CUDA. MLX reads it once a process.",
        ),
        Switch("MLX_USE_CUDA_GRAPHS", "0, 1", "MLX's own: whether MLX gathers CUDA launches into graphs."),
        Switch("MLX_ENABLE_TF32", "0, 1", "MLX's own: whether float32 products on CUDA may round to TF32."),
    )
}


def switch(name: str) -> str:
    """The value of a variable of `ENVIRONMENT`, without blanks round it; "" where it is not set."""
    return os.environ.get(ENVIRONMENT[name].name, "").strip()


def mistyped_switches() -> dict[str, str]:
    """Variables that are set, are none of `ENVIRONMENT` and look like one; and which one."""
    from difflib import get_close_matches

    ours = [name for name in ENVIRONMENT if name.startswith("DFLASH")]
    unknown = (name for name in sorted(os.environ) if name.startswith("DFLASH") and name not in ENVIRONMENT)
    return {name: near[0] for name in unknown if (near := get_close_matches(name, ours, 1, cutoff=0.855))}


def switches_set() -> dict[str, str]:
    """Those of `ENVIRONMENT` that change speed and are set, for records of measurements."""
    return {name: os.environ[name] for name, known in ENVIRONMENT.items() if known.speed and name in os.environ}


# ---- directories


def cache_directory() -> Path:
    """$DFLASH_MLX_CACHE, or dflash-mlx in the user's cache directory. It need not exist.

    Raises:
      CacheDirectoryError: the variables are unset and the user has no home directory.
    """
    if own := switch(CACHE):
        return _home_expanded(own)
    base = os.environ.get("XDG_CACHE_HOME") or ("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return _home_expanded(base) / "dflash-mlx"


def state_directory() -> Path:
    """Where the chat keeps its history and conversations: dflash-mlx in $XDG_STATE_HOME or ~/.local/state.

    Raises:
      CacheDirectoryError: the variables are unset and the user has no home directory.
    """
    return _home_expanded(os.environ.get("XDG_STATE_HOME") or "~/.local/state", "XDG_STATE_HOME") / "dflash-mlx"


def usable_cache_directory() -> Path:
    """`cache_directory`, made if it was not there, for files that are needed.

    Raises:
      CacheDirectoryError: it is a file, or cannot be made or written; names DFLASH_MLX_CACHE.
    """
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{os.urandom(4).hex()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unusable(directory, error) from None
    return directory


def _unusable(directory: Path, error: OSError) -> CacheDirectoryError:
    where = f"{CACHE} is {directory}" if switch(CACHE) else f"the cache directory is {directory} ({CACHE} is not set)"
    return CacheDirectoryError(
        f"{where}, which cannot be used: {error.strerror or error}",
        f"Set {CACHE} to a directory that can be written",
    )


def _home_expanded(path: str, variable: str = CACHE) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise CacheDirectoryError(f"{path} has no home directory to stand in", f"Set {variable} to a directory") from None


# ---- files


def write_atomically(path: str | Path, content: bytes | str | Callable[[Path], object], mode: int = 0o666) -> None:
    """Write a file so that a reader, or a crash, finds the old one or the new one whole.

    Args:
      content: the bytes, the text, or a function that writes the file at the path it is given (beside `path`, with its suffix).
        A path that it returns is taken in place of `path`.
      mode: permissions of the new file, less the umask.
    Raises:
      FileWriteError: the file cannot be written; `path` is then as it was.
    """
    path = Path(path)
    part = path.with_name(f".{path.stem}-{os.getpid()}-{os.urandom(4).hex()}{path.suffix}")
    try:
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        if callable(content):
            made = content(part)
            path = made if isinstance(made, Path) else path
        elif isinstance(content, str):
            part.write_text(content, encoding="utf-8")
        else:
            part.write_bytes(content)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        # MLX's writers raise RuntimeError. The system names no file where the disk is full.
        if isinstance(error, RuntimeError) and not str(error).startswith("[write]"):
            raise
        reason = getattr(error, "strerror", None) or one_line(error, None)
        raise FileWriteError(f"{path} cannot be written: {reason}", "Free some space, or write elsewhere") from error
    finally:
        with suppress(OSError):
            part.unlink()


class JsonCache:
    """One JSON object in the cache directory, entry by entry, for what can be found out again: measured times, tuning results.

    A file that is missing, damaged or cannot be written is not an error: the log names it once and the next start measures again.

    Args:
      name: path below the cache directory; most: entries that are kept, the newest (None: all).
    """

    def __init__(self, name: str, most: int | None = None):
        self.name, self.most = name, most
        self._lock, self._said = threading.Lock(), False

    @property
    def path(self) -> Path:
        return cache_directory() / self.name

    def read(self) -> dict[str, Any]:
        """All entries."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RuntimeError):
            # RuntimeError: nested too deeply, or no cache directory.
            return {}
        return found if isinstance(found, dict) else {}

    def put(self, key: str, entry: Any) -> bool:
        """Add or replace one entry, as the newest. Returns: whether it was kept."""
        with self._lock:
            entries = {name: other for name, other in self.read().items() if name != key} | {key: entry}
            while self.most is not None and len(entries) > self.most:
                del entries[next(iter(entries))]
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path, json.dumps(entries, indent=1))
            except (OSError, RuntimeError) as error:
                if not self._said:
                    self._said = True
                    text = error if isinstance(error, DFlashError) else _unusable(cache_directory(), error)
                    _log.warning("%s is not kept, so the next start measures anew: %s", self.name, text)
                return False
        return True


# ---- memory and system


def system_identity() -> tuple[str, ...]:
    """What measured times hold for, beside MLX and the models: the chip, the cores, the system's version and its build.

    Not the host's name: a Mac that is renamed is the same machine, and one name in a cluster may be many machines.
    """
    import platform

    system = platform.system(), platform.mac_ver()[0], _build(), platform.release(), platform.version()
    return (chip(), str(os.cpu_count()), *system)


def _build(path: str = "/System/Library/CoreServices/SystemVersion.plist") -> str:
    """macOS's build, such as "24F74": an update may change it alone; "" elsewhere."""
    import plistlib

    with suppress(OSError, ValueError, plistlib.InvalidFileException):
        return str(plistlib.loads(Path(path).read_bytes()).get("ProductBuildVersion", ""))
    return ""


def slowed_by() -> str:
    """Why this machine may be slower than it can be, now: "battery", "heat", "low power mode", several with "and" between
    them, or "". Only macOS tells."""
    if sys.platform != "darwin":
        return ""
    found = {
        "battery": "Battery Power" in _pmset("batt"),
        "heat": _under_pressure(_pmset("therm")),
        "low power mode": power_mode(_pmset("live")) == 1,
    }
    return " and ".join(name for name, is_so in found.items() if is_so)


def _pmset(what: str) -> str:
    return mac_says("/usr/bin/pmset", "-g", what)


def power_mode(settings: str) -> int | None:
    """0 of the usual mode, 1 of Low Power Mode, 2 of High Power Mode, as `pmset -g` prints what is in use; None: not said."""
    import re

    found = re.findall(r"^\s*(?:low)?powermode\s+(\d)\b", settings, re.MULTILINE)
    return next((int(mode) for mode in found if mode != "0"), 0) if found else None


def mac_says(*command: str) -> str:
    """What a command of macOS prints, blanks at its ends left out; "" elsewhere, and where it fails or takes 5 s."""
    import subprocess

    if sys.platform != "darwin":
        return ""
    try:
        # Else the system tells an older program an older version.
        environment = {**os.environ, "SYSTEM_VERSION_COMPAT": "0"}
        return subprocess.run(command, capture_output=True, text=True, timeout=5, env=environment).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _under_pressure(text: str) -> bool:
    """Whether `pmset -g therm` tells of a limit below 100 % or of a warning. A Mac at ease notes that none was recorded."""
    import re

    limits = re.findall(r"(?:Speed|Scheduler)_Limit\s*=\s*(\d+)", text)
    levels = re.findall(r"(?:thermal|performance) warning level\D*(\d+)", text, re.IGNORECASE)
    return any(int(limit) < 100 for limit in limits) or any(int(level) > 0 for level in levels)


@functools.cache
def chip() -> str:
    """The processor's own name, such as "Apple M4 Pro"; what the system calls its kind where it does not tell."""
    import platform

    name = mac_says("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
    if not name:
        with suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
            name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.machine()


# Of generators that are open: those that raised MLX's wired-memory limit, and all.
_limit_lock = threading.Lock()
_limit_users = 0
_limit_before: int | None = None
_streams = 0


@contextmanager
def open_stream() -> Iterator[None]:
    """Count a stream of tokens as open; see `open_streams`."""
    global _streams
    with _limit_lock:
        _streams += 1
    try:
        yield
    finally:
        with _limit_lock:
            _streams -= 1


def open_streams() -> int:
    """Streams of tokens that have begun in this process and have not ended: nothing that can wait is to hold them up."""
    return _streams


def on_metal() -> bool:
    """Whether MLX computes on a Mac's GPU."""
    import mlx.core as mx

    return mx.metal.is_available() and mx.default_device() == mx.gpu


def machine_bytes() -> int:
    """Memory that models can have here: the accelerator's, where it says, else the machine's."""
    import mlx.core as mx

    return mx.device_info().get("memory_size") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit_bytes() -> int:
    """What models, caches and all else that MLX holds may take here: on a Mac's GPU less than the machine has."""
    import mlx.core as mx

    return (mx.device_info().get("max_recommended_working_set_size") if on_metal() else None) or machine_bytes()


def limit_text() -> str:
    """`limit_bytes` as a clause."""
    if (limit := limit_bytes()) == (have := machine_bytes()):
        return f"this machine has {have / 1e9:.1f} GB"
    return f"the GPU may hold {limit / 1e9:.1f} GB of this machine's {have / 1e9:.1f} GB"


def array_bytes(arrays: Iterable[mx.array]) -> int:
    """Bytes of arrays, each counted once; nothing is evaluated."""
    return sum({id(a): a.nbytes for a in arrays}.values())


def size_text(size_bytes: float) -> str:
    """Bytes in the unit that suits them: "1.28 GB", and below 0.1 GB "5.3 MB"."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"


@contextmanager
def wired_limit(models: Sequence[nn.Module], stream: mx.Stream) -> Iterator[None]:
    """Raise MLX's wired-memory limit to the recommended size until the last open generator ends; warn if models hardly fit.

    mlx-lm's own context manager restores what it found, so two generators that end in the order in which they began would
    leave the limit raised; and it prints its warning to stdout. On a device without such a limit this does nothing.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    global _limit_users, _limit_before
    limit = mx.device_info().get("max_recommended_working_set_size")
    if limit is None:
        yield
        return
    size = array_bytes(a for m in models for _, a in tree_flatten(m.parameters()))
    if size > 0.9 * limit:
        warnings.warn(
            f"the models take {size / 1e9:.1f} GB, close to the {limit / 1e9:.1f} GB that the GPU may hold; this can be slow",
            stacklevel=3,
        )
    with _limit_lock:
        if _limit_users == 0:
            _limit_before = mx.set_wired_limit(limit)
        _limit_users += 1
    try:
        yield
    finally:
        mx.synchronize(stream)
        with _limit_lock:
            _limit_users -= 1
            if _limit_users == 0:
                mx.set_wired_limit(_limit_before)
