"""Which kernels run: what the user said, and what this machine has shown.

    DFLASH_MLX_KERNELS   unset     a kernel serves those row counts of a shape at which a trial on this GPU found it right and
                                   faster; the result is kept. On CUDA only the forms that need no compiling (see `small_batch`)
                         off       none
                         on        all that are eligible, faster or not
                         a,b       these, faster or not; no others

Knows no kernel: each asks a `Question`. Unset on Metal, no pass waits for a trial: what is not known yet runs on stock MLX, and
`try_waiting` is called before the first answer and after answers. Where kernels were asked for, and on CUDA, the first pass that
asks runs the trial. A trial in which a process died is found by its marker (`crash_marker`).

`sure` finds candidates that give a row the same bits among any number of rows, whatever their time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from ..errors import DFlashError
from ..machine import JsonCache, cache_directory, switch, system_identity
from ..progress import tell
from . import REGISTRY, names, trials
from .crash_marker import marked
from .launch import Form, Kernel, maker
from .trials import Trial, same_floats, same_ids
from .verdicts import ROWS, Candidate, Measured, tried_rows, verdicts

__all__ = ["ROWS", "Candidate", "KernelError", "NotFiniteError", "Question", "Trial", "TuningResult", "same_floats", "same_ids"]

VARIABLE = "DFLASH_MLX_KERNELS"
# Accepted for one release, with a line in the log.
_OLD_NAMES = {"row_products": "matmul_as_gemv", "folded_attention": "gqa_folded_attention"}

# Limits of time: of one trial, of all before the first answer, of all after an answer.
TRIAL_S, FIRST_S, AFTER_S = 5.0, 20.0, 2.0
# GPUs on which trials may come before the first answer: beginnings of architecture names. Another project saw a stall of 105 s on
# g17, and a newer one may have another.
_TRIED_FIRST = ("applegpu_g13", "applegpu_g14", "applegpu_g15", "applegpu_g16")

T = TypeVar("T")

_log = logging.getLogger("dflash_mlx.kernels")
# What this process knows of each question, by row count. Kernels that it has switched off, by name, with the reason.
_known: dict[tuple[str, ...], dict[int, Measured]] = {}
_off: dict[str, str] = {}
# Questions with row counts that are not tried yet, with the bytes that their calls read in a pass. Keys of trials that took too
# long once.
_waiting: dict[tuple[str, ...], tuple[Question, int]] = {}
_slow: set[str] = set()
# Whether another machine's results hold here (`share_results`).
_is_shared = False
_survey: _Survey | None = None
_trying = threading.Lock()


class _Here(threading.local):
    """In this thread: whether a plan is made by `sure`."""

    exact = False


_here = _Here()
# (function, arguments) -> its decision; see `planned`. When decisions may no longer hold, a new dictionary takes its place; what
# another thread is deciding then goes into the old one, where nobody looks.
_plans: dict[tuple, Any] = {}
# What all plans depend on, as `may_run` saw it last: the setting, whether there is a GPU, and what compiles kernels.
_ground: tuple | None = None


class KernelError(DFlashError, RuntimeError):
    """A kernel that the user asked for by name and that cannot run here or is wrong here."""


class NotFiniteError(ArithmeticError):
    """A pass in which kernels ran gave a value that is not finite. They are off now: the pass must run again."""


@dataclass(frozen=True)
class TuningResult:
    """What one machine found about one kernel in one plan at one shape and row count. Times are medians, None where there are
    none."""

    kernel: str
    shape: str
    use: bool
    reason: str
    kernel_s: float | None = None
    stock_s: float | None = None
    rows: int = 1
    plan: str = ""


@dataclass(frozen=True)
class Question:
    """One operation at one shape: who serves it?

    Args:
      shape: what the time depends on besides the rows, e.g. "float16 4 bit group 64 N 4096 K 4096"; no other operation's.
      candidates: ways to serve it, the most promising first.
      make: given candidates, makes the arrays of their trials once. It returns a function from a row count to its trial.
      rows: counts that are tried, in this order.
      nbytes: bytes that one call reads. Questions with the largest share of a pass are tried first.
    """

    shape: str
    candidates: tuple[Candidate, ...]
    make: Callable[[tuple[Candidate, ...]], Callable[[int], Trial]]
    rows: tuple[int, ...] = ROWS
    nbytes: int = 0

    @property
    def about(self) -> tuple[str, ...]:
        """The key under which results are kept. With another source text or plan it is another question."""
        return (self.shape, *(f"{c.name} {_digest(c.kernel.text)}" for c in self.candidates))

    @property
    def families(self) -> dict[str, str]:
        return {c.name: c.family for c in self.candidates}


@functools.lru_cache(maxsize=256)
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


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
    """Whether MLX sees a GPU, and it is the default device."""
    return (mx.metal.is_available() or mx.cuda.is_available()) and mx.default_device() == mx.Device(mx.gpu)


def _directory() -> Path:
    """Where results are kept."""
    return cache_directory() / "kernels"


def may_run() -> bool:
    """Whether any kernel may run here: the cheap question that comes before a pass and before looking at a model's layers.

    Called once a pass: if DFLASH_MLX_KERNELS or the device has changed, it forgets all plans.

    Raises:
      KernelError: if kernels were named and there is no GPU.
    """
    global _ground
    said, gpu, _ = ground = (switch(VARIABLE), has_gpu(), maker())
    if ground != _ground:
        _forget()
        _ground = ground
    wanted = parse_setting(said)
    return wanted != "off" and (gpu or _gpu_for(wanted)) and not _off.keys() >= REGISTRY.keys()


def _gpu_for(wanted: str | frozenset[str]) -> bool:
    if has_gpu():
        return True
    if isinstance(wanted, frozenset):
        asked = ",".join(sorted(wanted))
        raise KernelError(f"{VARIABLE} is {asked} and MLX finds no GPU here; kernels need one", "Unset it on this machine")
    return False


def choose(question: Question, rows: int) -> Candidate | None:
    """Who serves an operation at a row count; None: stock MLX, which also serves what is not known yet.

    Raises:
      KernelError: if the user asked for a kernel and it cannot run or is wrong.
    """
    if _here.exact:
        return _choose_surely(question, rows)
    asked = tuple(c for c in question.candidates if _wanted(c.kernel))
    if not asked:
        return None
    question, forced = dataclasses.replace(question, candidates=asked), setting() != "auto"
    if _surveyed():
        _survey.note(question)
        return None
    table = _table(question)
    # Try only if no forced kernel is off; that is reported below.
    trying = len(_on(question)) == len(asked) if forced else bool(_on(question))
    if trying and not _is_shared and (missing := [count for count in question.rows if count not in table]):
        if forced or mx.cuda.is_available():
            _try(question, missing)
        else:
            # The newest one is kept: layers on which an older one would be tried may be gone.
            _, share = _waiting.get(question.about, (None, question.nbytes))
            _waiting[question.about] = (question, share)
    off = {c.name for c in asked} - {c.name for c in _on(question)}
    found = verdicts(table, forced, off).get(tried_rows(rows, question.rows))
    if forced and (off or found is None):
        name, reason = _why_not(asked, table)
        raise KernelError(f"{name} cannot run here as {VARIABLE} asks: {reason} ({question.shape})", "Unset the variable")
    return next((c for c in asked if c.name == found), None)


def sure(plan: Callable[..., T], *about: Any) -> T:
    """`plan(*about)`, where one family of candidates serves every row count, faster than stock MLX or not, or none does.

    Raises:
      KernelError: DFLASH_MLX_KERNELS leaves out all candidates, or none of them is right here at every row count.
    """
    before, _here.exact = _here.exact, True
    try:
        return plan(*about)
    finally:
        _here.exact = before


def _choose_surely(question: Question, rows: int) -> Candidate | None:
    """`choose` for `sure`: the first family that is right at all row counts, texts in matrix units first. None: no GPU."""
    if not has_gpu():
        return None
    wanted = setting()
    named = frozenset() if wanted == "off" else REGISTRY.keys() if isinstance(wanted, str) else wanted
    asked = [c for c in question.candidates if c.kernel.name in named]
    if not asked:
        left_out = " or ".join(dict.fromkeys(c.kernel.name for c in question.candidates))
        raise KernelError(f"{VARIABLE} is {switch(VARIABLE)!r}; exact needs {left_out} ({question.shape})", "Unset it")
    asked.sort(key=lambda c: -[other.kernel.name for other in question.candidates].index(c.kernel.name))
    reasons = []
    for family in dict.fromkeys(c.family for c in asked):
        of = tuple(c for c in asked if c.family == family)
        own = dataclasses.replace(question, candidates=of)
        table = _table(own)
        if (missing := [count for count in own.rows if count not in table]) and _on(own):
            _here.exact = False  # a trial's own calls are ordinary ones
            try:
                _try(own, missing)
            finally:
                _here.exact = True
        found = verdicts(table, True, {c.name for c in of} - {c.name for c in _on(own)})
        if all(count in found for count in own.rows):
            name = found[tried_rows(rows, own.rows)]
            return next(c for c in of if c.name == name)
        reasons.append(": ".join(_why_not(of, table)))
    raise KernelError(f"exact needs a kernel that cannot run here: {'; '.join(reasons)} ({question.shape})", "Run without exact")


def _on(question: Question) -> tuple[Candidate, ...]:
    return tuple(c for c in question.candidates if c.kernel.name not in _off)


def _why_not(candidates: Collection[Candidate], table: dict[int, Measured]) -> tuple[str, str]:
    """A kernel that was asked for and serves nothing, and why."""
    for candidate in candidates:
        if reason := _off.get(candidate.kernel.name):
            return candidate.kernel.name, reason
    first = next(iter(candidates))
    return first.kernel.name, next((m.reason(first.name) for m in table.values() if first.name not in m.seconds), "not tried")


def _wanted(kernel: Kernel | Form) -> bool:
    wanted = setting()
    if wanted == "off" or (isinstance(wanted, frozenset) and kernel.name not in wanted) or not _gpu_for(wanted):
        return False
    # To compile it takes longer than most answers do.
    return wanted != "auto" or not mx.cuda.is_available() or kernel.at_once


def allowed(kernel: Kernel | Form) -> bool:
    """Whether a kernel may run that needs no trial, or whose trial found it right and faster."""
    return _wanted(kernel) and kernel.name not in _off


def planned(decide: Callable[..., T], *about: Any, given: tuple = ()) -> T:
    """`decide(*about, *given)`, remembered until a kernel is switched off, a trial finds something, or `may_run` sees a change.

    A pass asks at each of its products, hundreds of times. The answer may depend on `about` and on these three alone.

    Args:
      given: for trials only, such as a layer's own weights; not held.
    """
    if _survey is not None and _surveyed():
        return decide(*about, *given)
    plans, key = _plans, (decide, about, _here.exact)
    try:
        return plans[key]
    except KeyError:
        pass
    plans[key] = plan = decide(*about, *given)
    return plan


def plans() -> object:
    """An object that is replaced when decisions may no longer hold."""
    return _plans


def _forget() -> None:
    global _plans
    _plans = {}


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


def share_results(broadcast: Callable[[Any, str], Any]) -> None:
    """On several machines: use rank 0's results. From then on this machine tries nothing and reads no results of its own.

    broadcast: returns rank 0's value, as `Ranks.broadcast` does.
    """
    global _is_shared
    mine = [[list(about), rows, dataclasses.asdict(found)] for about, of in _known.items() for rows, found in of.items()]
    known, off = broadcast([mine, dict(_off)], "results of kernels")
    _is_shared = True
    _waiting.clear()
    _known.clear()
    for about, rows, found in known:
        _known.setdefault(tuple(about), {})[rows] = Measured(**found)
    _off.clear()
    _off.update(off)
    _forget()


def results() -> list[TuningResult]:
    """All results kept for this machine, for `doctor`; those of this process included."""
    tables: dict[tuple[str, ...], dict[int, Measured]] = {}
    for key, entry in _results.read().items():
        if key.startswith(_machine()):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                tables.setdefault(tuple(entry["about"]), {})[int(entry["rows"])] = Measured(**entry["measured"])
    for about, table in _known.items():
        tables.setdefault(about, {}).update(table)
    found = []
    for (shape, *_), table in tables.items():
        serving = verdicts(table)
        for rows, measured in sorted(table.items()):
            for name in measured.families:
                kernel, _, plan = name.partition(" ")
                use, seconds = serving.get(rows) == name, measured.seconds.get(name)
                found.append(TuningResult(kernel, shape, use, measured.reason(name), seconds, measured.stock_s, rows, plan))
    return found


def fingerprint() -> str:
    """A name for what serves each operation, as far as this process knows. With another name, passes have other costs."""
    serving = [(about, sorted(verdicts(table).items())) for about, table in _known.items()]
    wanted = setting()
    said = wanted if isinstance(wanted, str) else ",".join(sorted(wanted))
    return _digest(repr((said, sorted(_off), sorted(entry for entry in serving if entry[1]))))


@functools.cache
def _system() -> str:
    """The chip, the system's version and its build: not the host's name, which changes with the network."""
    return hashlib.sha256(repr(system_identity()).encode()).hexdigest()[:12]


def _machine() -> str:
    """The device, the system and the versions that a result holds for."""
    info = mx.device_info() if has_gpu() else {}
    return f"{info.get('device_name', 'cpu')} {info.get('architecture', '')} system {_system()} mlx {mx.__version__} "


_results = JsonCache("kernels/tuning.json")


def _key(about: tuple[str, ...], rows: int) -> str:
    return f"{_machine()}{about[0]} rows {rows} {_digest(repr(about))}"


def _table(question: Question) -> dict[int, Measured]:
    """What this process or an earlier one on this machine knows, by row count."""
    known = _known.setdefault(question.about, {})
    if not _is_shared and any(rows not in known for rows in question.rows):
        kept = _results.read()
        for rows in question.rows:
            if rows not in known and (entry := kept.get(_key(question.about, rows))):
                with contextlib.suppress(KeyError, TypeError):
                    known[rows] = Measured(**entry["measured"])
                    _switch_off_faulty(question, known[rows])
    return known


# ---- trials: what is asked, and when it is tried


class _Survey:
    """Collects the questions of the passes that one thread builds."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.asked: dict[tuple[str, ...], tuple[Question, int]] = {}

    def note(self, question: Question) -> None:
        _, share = self.asked.get(question.about, (question, 0))
        self.asked[question.about] = question, share + question.nbytes


def _surveyed() -> bool:
    return _survey is not None and _survey.thread == threading.get_ident()


@contextlib.contextmanager
def survey() -> Iterator[None]:
    """Collect the questions of passes that this thread builds meanwhile, for `try_waiting`, with their shares of a pass.

    Stock MLX serves everything in these passes, and they need not be evaluated.
    """
    global _survey
    _survey = noted = _Survey()
    try:
        yield
    finally:
        _survey = None
        _forget()
    for about, (question, share) in noted.asked.items():
        if any(rows not in _table(question) for rows in question.rows):
            _waiting[about] = question, share


def tries_first() -> bool:
    """Whether trials may come before the first answer on this GPU."""
    return str(mx.device_info().get("architecture", "")).startswith(_TRIED_FIRST)


def waiting() -> int:
    """Questions that are not tried yet at some row count."""
    return len(_waiting)


def try_waiting(budget_s: float, trial_s: float = TRIAL_S, stop: Callable[[], bool] = lambda: False) -> None:
    """Run trials of what passes asked for: largest share of a pass first, one row first, until the time is over.

    Args:
      budget_s: of all; trial_s: of one; stop: asked before each trial, True ends this. What is left waits for the next call.
    """
    if not _waiting or not _trying.acquire(blocking=False):
        return
    until, tried = trials.clock() + budget_s, 0
    try:
        for about, (question, _) in sorted(_waiting.items(), key=lambda item: -item[1][1]):
            table, make = _table(question), functools.cache(question.make)
            for rows in [rows for rows in question.rows if rows not in table and _on(question)]:
                limit_s = min(trial_s, until - trials.clock())
                if limit_s <= 0 or stop():
                    return
                tried += 1
                tell("Trying kernels on this GPU" + (f", at most {budget_s:.0f} s" if budget_s < float("inf") else ""))
                _measure(question, rows, make, limit_s, limit_s == trial_s)
            if not _on(question) or all(rows in table for rows in question.rows):
                _waiting.pop(about, None)
    finally:
        _trying.release()
        if tried:
            # What trials have made is not needed again.
            mx.clear_cache()
            _forget()


def _try(question: Question, rows: list[int]) -> None:
    """Run trials now, however long they take."""
    make = functools.cache(question.make)
    for count in rows:
        if _on(question):
            _measure(question, count, make, float("inf"), True)
    mx.clear_cache()


def _measure(question: Question, rows: int, make: Callable, limit_s: float, whole: bool) -> None:
    """Run one trial of the candidates that are not off, and keep what it found.

    make: `question.make`, called once for each set of candidates; whole: whether it had all the time that a trial may have. One
      that takes too long twice is not run again.
    """
    key, table, on = _key(question.about, rows), _known.setdefault(question.about, {}), _on(question)
    # What is off for another reason than its trials here may run at the next start.
    own = {kernel for measured in table.values() for kernel in _faults(question, measured)}
    whole_table = all(c.kernel.name in own for c in question.candidates if c not in on)
    with marked(_directory() / f"{_digest(key)}.trying") as marker:
        if marker.crash:
            # Not kept, and of this shape alone: the marker counts the starts until the next trial.
            table[rows] = Measured(question.families, crash=marker.crash)
            for kernel in dict.fromkeys(c.kernel.name for c in question.candidates):
                _log.warning("kernel %s is off at %s, %d rows: %s", kernel, question.shape, rows, marker.crash)
            return
        try:
            measured = trials.run_trial(on, lambda: make(on)(rows), limit_s)
        except trials.TrialError as error:
            # This is not the kernels' fault: the next start tries again, or the next question if a layer is gone.
            if not isinstance(error.__cause__, LookupError):
                table[rows] = Measured(question.families, crash=str(error))
            return
        if measured is None:
            if not whole or key not in _slow:
                _slow.update([key] if whole else [])
                return
            measured = Measured(question.families)
        measured = dataclasses.replace(measured, families=question.families)
        if marker.locked and whole_table:
            # A cache that cannot be written costs a new trial at the next start, nothing else.
            entry = {"about": question.about, "rows": rows, "measured": dataclasses.asdict(measured)}
            _results.put(key, entry)
            marker.done = True
    table[rows] = measured
    _switch_off_faulty(question, measured)


def _faults(question: Question, measured: Measured) -> dict[str, str]:
    """Kernels that were wrong, or all of whose plans were refused, and why."""
    found = {}
    for kernel in dict.fromkeys(c.kernel.name for c in question.candidates):
        of = [c.name for c in question.candidates if c.kernel.name == kernel]
        faults = [measured.wrong[name] for name in of if name in measured.wrong]
        if not faults and all(name in measured.refused for name in of):
            faults = [measured.refused[of[0]]]
        if faults:
            found[kernel] = faults[0]
    return found


def _switch_off_faulty(question: Question, measured: Measured) -> None:
    for kernel, fault in _faults(question, measured).items():
        switch_off(kernel, f"{fault} ({question.shape})")
