"""What this project and the hub's client for it keep here: fetched models, measured times, chat sessions, prompt caches.

Lists and deletes by name. Deletes only what it listed, and follows no link. Knows no models.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import DFlashError
from ..machine import CACHE, CacheDirectoryError, cache_directory, state_directory

# Folder, below the cache directory, in which `generate --prompt-cache-file NAME` looks too.
PROMPT_CACHES = "prompt_caches"
# Names of the kinds, in the order in which they are shown.
KINDS = {
    "model": "Fetched models",
    "measured": "Measured times",
    "session": "Chat sessions",
    "prompts": "Prompt caches",
    "unfinished": "Left by fetching or converting that was stopped",
}


@dataclass(frozen=True)
class Stored:
    """One thing that can be deleted. name: unique in the list; kind: of `KINDS`; used_at: seconds since 1970."""

    name: str
    kind: str
    size_bytes: int
    used_at: float
    path: Path
    delete: Callable[[], None]


def stored() -> list[Stored]:
    """Everything that is kept here, by kind and name.

    Raises:
      CacheDirectoryError: a folder of ours is there and cannot be listed.
    """
    found = [*_hub_models(), *_own_models(), *_measured(), *_files("session", state_directory() / "sessions", ".json")]
    found += _files("prompts", cache_directory() / PROMPT_CACHES, ".safetensors")
    found += _unfinished()
    kinds = [*KINDS]
    return sorted(found, key=lambda one: (kinds.index(one.kind), one.name))


def named(names: Iterable[str], among: list[Stored]) -> list[Stored]:
    """Those of the list with these names, each once.

    Raises:
      DFlashError: a name that is not listed.
    """
    by_name = {one.name: one for one in among}
    if unknown := [name for name in names if name not in by_name]:
        raise DFlashError(
            f"nothing here is called {', '.join(unknown)}", "Nothing was deleted. `dflash-mlx cache` lists the names"
        )
    return [by_name[name] for name in dict.fromkeys(names)]


def _hub_models() -> Iterator[Stored]:
    """Models in the hub's own cache, which other programs share. The hub's client deletes them."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        scan = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    except ValueError as error:
        raise CacheDirectoryError(
            f"the hub's cache is {constants.HF_HUB_CACHE}, which cannot be listed: {error}",
            "Set HF_HUB_CACHE to a directory",
        ) from None
    for repo in scan.repos:
        if repo.repo_type == "model":
            # A copy of a repo, or a data set, may have a revision of the same name: only this one is to be found.
            alone = replace(scan, repos=frozenset([repo]))
            hashes = [revision.commit_hash for revision in repo.revisions]
            delete = lambda alone=alone, hashes=hashes: alone.delete_revisions(*hashes).execute()  # noqa: E731
            yield Stored(repo.repo_id, "model", repo.size_on_disk, repo.last_accessed, repo.repo_path, delete)


def _own_models() -> Iterator[Stored]:
    """Targets of built-in pairs, converted into our cache directory."""
    for folder in _listing(cache_directory()):
        if folder.is_dir() and not folder.is_symlink() and (folder / "config.json").is_file():
            yield _folder(folder.name, "model", folder)


def _unfinished() -> Iterator[Stored]:
    """Files that a full disk or a killed process left in our cache directory: the next run continues with them or clears
    it, if there is one. A process that is at work now has such a folder too."""
    for folder in _listing(cache_directory(), hidden=True):
        if folder.is_dir() and not folder.is_symlink() and _UNFINISHED.search(folder.name):
            yield _folder(f"unfinished/{folder.name[1:]}", "unfinished", folder)


# Names of `pairs/builtin.py`, and of `convert/write.py`.
_UNFINISHED = re.compile(r"^\.fetch(ed)?-|\.(partial|replaced)-")


def _folder(name: str, kind: str, folder: Path) -> Stored:
    stats = [file.stat() for file in folder.rglob("*") if file.is_file()]
    used = max(max(s.st_atime, s.st_mtime) for s in stats or [folder.stat()])
    return Stored(name, kind, sum(s.st_size for s in stats), used, folder, lambda: shutil.rmtree(folder))


def _measured() -> Iterator[Stored]:
    """What was measured here, which the next run measures again: one file a kind."""
    top = cache_directory()
    yield from _files("measured", top, ".json")
    yield from _files("measured", top / "kernels", ".json")


def _files(kind: str, folder: Path, ending: str) -> Iterator[Stored]:
    for file in _listing(folder):
        if file.suffix == ending and file.is_file() and not file.is_symlink():
            stat = file.stat()
            yield Stored(f"{kind}/{file.stem}", kind, stat.st_size, max(stat.st_atime, stat.st_mtime), file, file.unlink)


def _listing(folder: Path, hidden: bool = False) -> list[Path]:
    """A folder's entries, those that are not hidden or those that are; none where there is no folder.

    Raises:
      CacheDirectoryError: it is a file, or may not be read.
    """
    try:
        return sorted(path for path in folder.iterdir() if path.name.startswith(".") == hidden)
    except FileNotFoundError:
        return []
    except OSError as error:
        variable = CACHE if folder.is_relative_to(cache_directory()) else "XDG_STATE_HOME"
        raise CacheDirectoryError(
            f"{folder} cannot be listed: {error.strerror}", f"Set {variable} to a directory that can be read"
        ) from None
