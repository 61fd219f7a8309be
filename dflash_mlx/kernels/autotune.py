"""Which kernels run: what the user said, and what this machine has shown.

    DFLASH_MLX_KERNELS   unset     a kernel runs where a trial on this GPU found it right and faster; the result is kept. On CUDA
                                   only the forms that need no compiling (see `small_batch`)
                         off       none
                         on        all that are eligible, faster or not
                         a,b       these, faster or not; no others

Knows no kernel: each hands over a trial. A trial runs on its own stream, and a marker file stands beside the results, locked,
while it runs. A trial in which a process died is found by its marker, which nobody locks: that shape is off for some starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import mlx.core as mx

from ..errors import DFlashError
from ..machine import JsonCache, cache_directory, switch, system_identity
from . import REGISTRY, names
from .launch import Form, Kernel, maker

VARIABLE = "DFLASH_MLX_KERNELS"
# Accepted for one release, with a line in the log.
_OLD_NAMES = {"row_products": "matmul_as_gemv", "folded_attention": "gqa_folded_attention"}

# Starts at which a shape is off after a process died in its trial, for each time that one did.
OFF_STARTS = 5

T = TypeVar("T")

_log = logging.getLogger("dflash_mlx.kernels")
# This process's results, and kernels switched off in it by name, with the reason.
_known: dict[tuple[Kernel | Form, str], TuningResult] = {}
_off: dict[str, str] = {}
# (who decides, on what) -> what was decided; see `planned`. Another dictionary where a decision may no longer hold: one that is
# being made meanwhile is kept in the old one, where nobody looks.
_plans: dict[tuple, Any] = {}
# What all plans rest on, as `may_run` saw it last.
_ground: tuple | None = None
_local = threading.local()


class KernelError(DFlashError, RuntimeError):
    """A kernel that the user asked for by name and that cannot run here or is wrong here."""


class NotFiniteError(ArithmeticError):
    """A pass in which kernels ran gave a value that is not finite. They are off by then: the pass is to be run again."""


@dataclass(frozen=True)
class TuningResult:
    """What one machine found about one kernel at one shape. Times are medians, None where the trial did not get there."""

    kernel: str
    shape: str
    use: bool
    reason: str
    kernel_s: float | None = None
    stock_s: float | None = None


@dataclass(frozen=True)
class Trial:
    """One comparison: both callables return the same outputs from the same made-up inputs.

    `same(kernel_outputs, stock_outputs)` says whether the kernel is right: None, or what is wrong.
    """

    kernel: Callable[[], Sequence[mx.array]]
    stock: Callable[[], Sequence[mx.array]]
    same: Callable[[Sequence[mx.array], Sequence[mx.array]], str | None]


def setting() -> str | frozenset[str]:
    """What DFLASH_MLX_KERNELS says: "auto", "off", "on" or the names given.

    Raises:
      KernelError: if it names a kernel that does not exist.
    """
    return parse_setting(switch(VARIABLE))


@functools.lru_cache(maxsize=16)
def parse_setting(value: str, source: str = VARIABLE) -> str | frozenset[str]:
    """`setting` of a value; `source` is what errors call it, such as "--kernels".

    Raises:
      KernelError: if it names a kernel that does not exist.
    """
    value = value.lower()
    if value in ("", "auto", "on", "off"):
        return value or "auto"
    given = [name.strip() for name in value.split(",") if name.strip()]
    if old := [name for name in given if name in _OLD_NAMES]:
        _log.warning("%s: %s", source, "; ".join(f"{name} is now called {_OLD_NAMES[name]}" for name in old))
    asked = frozenset(_OLD_NAMES.get(name, name) for name in given)
    if unknown := sorted(asked - {*REGISTRY}):
        raise KernelError(
            f"{source} names {', '.join(unknown)}; it must be off, on, auto or names among {', '.join(names())}",
            f"Correct {'the variable' if source == VARIABLE else source}",
        )
    return asked


def has_gpu() -> bool:
    """Whether launches have somewhere to go: a GPU that MLX sees and that is the default device."""
    return (mx.metal.is_available() or mx.cuda.is_available()) and mx.default_device() == mx.Device(mx.gpu)


def _directory() -> Path:
    """Where results are kept."""
    return cache_directory() / "kernels"


def may_run() -> bool:
    """Whether any kernel may run here: the cheap question that comes before a pass and before looking at a model's layers.

    What was planned before DFLASH_MLX_KERNELS or the device changed is forgotten here, so once a pass.

    Raises:
      KernelError: if kernels were named and there is no GPU.
    """
    global _ground
    wanted, ground = setting(), (switch(VARIABLE), has_gpu(), maker())
    if ground != _ground:
        _forget()
        _ground = ground
    return wanted != "off" and _gpu_for(wanted) and any(name not in _off for name in REGISTRY)


def _gpu_for(wanted: str | frozenset[str]) -> bool:
    if has_gpu():
        return True
    if isinstance(wanted, frozenset):
        asked = ",".join(sorted(wanted))
        raise KernelError(f"{VARIABLE} is {asked} and MLX finds no GPU here; kernels need one", "Unset it on this machine")
    return False


def should_use(kernel: Kernel | Form, shape: str, trial: Callable[[], Sequence[Trial]]) -> bool:
    """Whether an eligible kernel runs at this shape. The first call for a shape on a machine runs the trials.

    Args:
      shape: what the time depends on, e.g. "float16 4 bit group 64 N 4096 K 4096"; one result each.
      trial: makes the trials; faster means a smaller sum of times over them.
    Raises:
      KernelError: if the user asked for this kernel and it cannot run or is wrong.
    """
    if not _wanted(kernel):
        return False
    wanted = setting()
    result = None if kernel.name in _off else _result(kernel, shape, trial)
    reason = _off.get(kernel.name)  # the trial may have put it there
    if reason is None and result.kernel_s is None:
        reason = f"{result.reason} ({shape})"
    if reason:
        if wanted == "auto":
            return False
        raise KernelError(f"{kernel.name} cannot run here as {VARIABLE} asks: {reason}", "Unset the variable")
    return result.use or wanted != "auto"


def _wanted(kernel: Kernel | Form) -> bool:
    wanted = setting()
    if wanted == "off" or (isinstance(wanted, frozenset) and kernel.name not in wanted) or not _gpu_for(wanted):
        return False
    # To compile it takes longer than most answers do.
    return wanted != "auto" or not mx.cuda.is_available() or kernel.at_once


def allowed(kernel: Kernel | Form) -> bool:
    """Whether one runs that needs no trial, or whose trials are found right and faster."""
    return _wanted(kernel) and kernel.name not in _off


def planned(decide: Callable[..., T], *about: Any) -> T:
    """What `decide(*about)` answers, asked once: until a kernel is switched off, and until `may_run` sees other ground.

    A pass asks at each of its products, hundreds of times. The answer may rest on `about` and on what is named above alone.
    """
    plans, key = _plans, (decide, about)
    try:
        return plans[key]
    except KeyError:
        pass
    plans[key] = plan = decide(*about)
    return plan


def plans() -> object:
    """The same object as long as what was planned holds."""
    return _plans


def _forget() -> None:
    global _plans
    _plans = {}


def fastest(candidates: dict[Kernel, Callable[[], Sequence[Trial]]], shape: str) -> Kernel | None:
    """The quickest of several kernels for one operation among those that `should_use` lets run; None: stock MLX."""
    used = [kernel for kernel, trial in candidates.items() if should_use(kernel, shape, trial)]
    return min(used, key=lambda k: _known[k, shape].kernel_s, default=None) if len(used) > 1 else next(iter(used), None)


def switch_off(name: str, reason: str) -> None:
    """No launch of this kernel for the rest of the process: it did not compile, was wrong or gave a value that is not finite.

    One line says so, whatever the number of shapes.
    """
    if name not in _off:
        _off[name] = reason
        _forget()
        _log.warning("kernel %s is off: %s", name, reason)


def disable_all(reason: str) -> None:
    """All kernels off for the rest of the process: one of those that ran is at fault, and which one is not known."""
    if rest := {name: reason for name in REGISTRY if name not in _off}:
        _off.update(rest)
        _forget()
        _log.warning("all kernels are off: %s", reason)


def results() -> list[TuningResult]:
    """All results kept for this machine, for `doctor`; those of this process included."""
    kept = {k: TuningResult(**v) for k, v in _results.read().items() if k.startswith(_machine())}
    return list({**kept, **{_key(*known): result for known, result in _known.items()}}.values())


@functools.cache
def _system() -> str:
    """The chip, the system's version and its build: not the host's name, which changes with the network."""
    return hashlib.sha256(repr(system_identity()).encode()).hexdigest()[:12]


def _machine() -> str:
    """The device, the system and the versions that a result holds for."""
    info = mx.device_info() if has_gpu() else {}
    return f"{info.get('device_name', 'cpu')} {info.get('architecture', '')} system {_system()} mlx {mx.__version__} "


_results = JsonCache("kernels/tuning.json")


def _key(kernel: Kernel | Form, shape: str) -> str:
    text = hashlib.sha256(kernel.text.encode()).hexdigest()[:12]
    return f"{_machine()}{kernel.name} {text} {shape}"


def _result(kernel: Kernel | Form, shape: str, trial: Callable[[], Sequence[Trial]]) -> TuningResult:
    """The result of this process, of an earlier one on this machine, or of a trial now."""
    if known := _known.get((kernel, shape)):
        return known
    key = _key(kernel, shape)
    if kept := _results.read().get(key):
        result = TuningResult(**kept)
    else:
        with _marked(_directory() / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.trying") as marker:
            if crash := marker.crash:
                # Not kept, and of this shape alone: the marker counts the starts until the next trial.
                _known[kernel, shape] = result = TuningResult(kernel.name, shape, False, crash)
                _log.warning("kernel %s is off at %s: %s", kernel.name, shape, crash)
                return result
            result = _judge(kernel.name, shape, trial)
            if marker.locked:
                # A cache that cannot be written costs a new trial at the next start, nothing else.
                _results.put(key, asdict(result))
                marker.done = True
    _known[kernel, shape] = result
    if result.kernel_s is None:
        switch_off(kernel.name, f"{result.reason} ({shape})")
    return result


@dataclass
class _Marker:
    """What is known of processes that died in the trial of one kernel at one shape.

    locked: whether this process may run the trial as its own. Where another one is at it, or there is no cache, the result is
      this process's alone.
    crash: why there is to be no trial; None: try. done: set when the trial's result is kept, so that nothing is left behind.
    """

    locked: bool = False
    crash: str | None = None
    done: bool = False


@contextlib.contextmanager
def _marked(path: Path) -> Iterator[_Marker]:
    """Round one trial: a locked file says "trying" for as long as it runs.

        file         {"trying": true, "crashes": 0, "skipped": 0}
        exit seen    an error, Ctrl-C, SIGTERM: the file is as it was before, and the next start tries again
        exit unseen  a later start finds "trying" in a file that nobody locks: the process died, or the GPU hung

    After a crash the shape is off for `OFF_STARTS` starts, after each further one for as many more; then it is tried again.
    """
    with contextlib.ExitStack() as open_files:
        file, marker = _locked(path, open_files), _Marker()
        if file is None:
            yield marker
            return
        marker.locked = True
        before = _marker_state(file.read())
        if before["trying"]:
            before = {"trying": False, "crashes": before["crashes"] + 1, "skipped": 0}
        if before["crashes"] and before["skipped"] < OFF_STARTS * before["crashes"]:
            before["skipped"] += 1
            left, times = OFF_STARTS * before["crashes"] - before["skipped"] + 1, before["crashes"]
            marker.crash = f"a process ended in its trial ({times} times); tried again {left} starts later, or delete {path}"
            _write_marker(path, file, before)
            yield marker
            return
        try:
            with _sigterm_first(lambda: _write_marker(path, file, before)):
                _write_marker(path, file, {**before, "trying": True})
                yield marker
        finally:
            _write_marker(path, file, None if marker.done else before)


def _locked(path: Path, open_files: contextlib.ExitStack) -> IO[str] | None:
    """The file at `path`, locked; the system lets go of the lock when the process ends, however it ends. None: it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_files.enter_context(path.open("a+"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.seek(0)
        return file
    except OSError:
        return None


def _marker_state(text: str) -> dict[str, Any]:
    """What a marker says; one that cannot be read was left by a crash."""
    state = {"trying": bool(text), "crashes": 0, "skipped": 0}
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        state |= {name: type(state[name])(value) for name, value in json.loads(text).items() if name in state}
    return state


def _write_marker(path: Path, file: IO[str], state: dict[str, Any] | None) -> None:
    """Write a locked marker. One that says nothing is removed: emptied too, for another process may have opened it already."""
    with contextlib.suppress(OSError):
        file.truncate(0)
        if state and (state["trying"] or state["crashes"]):
            file.write(json.dumps(state))
            file.flush()
        else:
            path.unlink()


@contextlib.contextmanager
def _sigterm_first(then: Callable[[], None]) -> Iterator[None]:
    """Call `then` before SIGTERM ends the process, where nobody else handles it. Only the main thread may ask for that."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def handler(number: int, frame: Any) -> None:
        then()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _judge(name: str, shape: str, trial: Callable[[], Sequence[Trial]]) -> TuningResult:
    """Run the trials: right first, then faster."""
    try:
        with mx.stream(_stream()):
            trials = trial()
            for t in trials:
                ours, theirs = t.kernel(), t.stock()
                mx.eval(ours, theirs)
                if wrong := t.same(ours, theirs):
                    return TuningResult(name, shape, False, wrong)
            kernel_s, stock_s = (sum(times) for times in zip(*(_medians_s(t.kernel, t.stock) for t in trials), strict=True))
    except Exception as e:  # a text that does not compile or launch comes as any of several types
        return TuningResult(name, shape, False, f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'no message'}")
    faster = kernel_s < stock_s
    reason = f"right, {stock_s / kernel_s:.2f} times as fast as stock MLX"
    return TuningResult(name, shape, faster, reason, kernel_s, stock_s)


def _stream() -> mx.Stream:
    """This thread's own stream for trials: a stream belongs to the thread that made it."""
    if not hasattr(_local, "stream"):
        _local.stream = mx.new_stream(mx.default_device())
    return _local.stream


def _medians_s(*runs: Callable[[], Sequence[mx.array]], samples: int = 7, calls: int = 8) -> list[float]:
    """Seconds of one call of each: the median over samples of `calls` calls evaluated together.

    By turns, because a machine is now faster, now slower.
    """
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(samples):
        for run, into in zip(runs, times, strict=True):
            begin = time.perf_counter()
            mx.eval([run() for _ in range(calls)])
            into.append((time.perf_counter() - begin) / calls)
    return [statistics.median(into) for into in times]


def same_floats(tolerance: float) -> Callable[[Sequence[mx.array], Sequence[mx.array]], str | None]:
    """A `same` for float outputs: finite where stock is, and within `tolerance` of the largest stock value of each output."""

    def same(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> str | None:
        for a, b in zip(ours, theirs, strict=True):
            a, b = a.astype(mx.float32), b.astype(mx.float32)
            if not bool(mx.all(mx.isfinite(a) | ~mx.isfinite(b))):
                return "a value is not finite where stock MLX's is"
            off = float(mx.max(mx.abs(a - b)) / mx.maximum(mx.max(mx.abs(b)), 1e-30))
            if not off <= tolerance:
                return f"differs from stock MLX by {off:.2g} of the largest value, {tolerance:.2g} allowed"
        return None

    return same


def same_ids(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> str | None:
    """A `same` for integer outputs."""
    return None if all(bool(mx.array_equal(a, b)) for a, b in zip(ours, theirs, strict=True)) else "ids differ from stock MLX's"
