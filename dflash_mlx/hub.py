"""Where a checkpoint lies: a directory, a .gguf file, or in a hub repository (`org/name`, `org/name/folder`,
`org/name/file.gguf`), from which it is fetched.

Knows the hub and its cache's layout. Reads nothing of what it finds.
"""

import errno
import os
import re
from pathlib import Path

from .errors import CheckpointError, one_line
from .progress import hub_bar

# what a hub repository is asked for: never code, and of PyTorch's files one vector, which is read without unpickling
_DOWNLOAD = [
    "*.json",
    "*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
    "README.md",
    "mask_embedding.pt",
]
_NOT_DOWNLOADED = ["consolidated*", "original/*", "*.bin"]

# the address of a page of a repository, of a branch, or of a folder or file in it
_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface|hf)\.co/([^/?#]+/[^/?#]+)(?:/(?:tree|blob|resolve)/([^/?#]+))?(/[^?#]+?)?/?(?:[?#].*)?"
)


def locate(path_or_repo: str | Path, revision: str | None) -> Path:
    """The directory or .gguf file that a name means. A hub repository, or the address of its page, is fetched, or found in the
    hub cache.

    Raises:
      CheckpointError: there is no such thing, or it cannot be fetched.
    """
    path = Path(path_or_repo).expanduser()
    text, revision = hub_name(str(path_or_repo), revision)
    if text and path.is_dir():
        return snapshot_in(path, revision)
    if text and path.exists():
        # Ollama names its GGUF files by their digests alone.
        if path.suffix.lower() == ".gguf" or _begins_as_gguf(path):
            return path
        raise CheckpointError(
            f"{path_or_repo} is neither a checkpoint directory nor a GGUF file", "Give the directory that holds it"
        )
    if not _is_repo_id(text):
        raise CheckpointError(
            f"{text or 'an empty name'} does not exist; it must be a directory, a GGUF file or a hub repository like org/name",
            "Check the path",
        )
    return _download(text, revision)


def hub_name(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """The hub name and the revision that the address of a page means, unless another is given; any other name as it is."""
    page = _PAGE.fullmatch(name)
    return (page[1] + (page[3] or ""), revision or page[2]) if page else (name, revision)


def file_beside(path_or_repo: str | Path, file: str, revision: str | None) -> Path | None:
    """A file in the directory that a name means, as in `locate`; None: it is not on this machine. Nothing is fetched."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    directory = snapshot_in(Path(path_or_repo).expanduser(), revision)
    if directory.exists():
        return found if (found := directory / file).is_file() else None
    name, revision = hub_name(str(path_or_repo), revision)
    repo, part = parts_of(name)
    try:
        cached = try_to_load_from_cache(repo, f"{part}/{file}" if part else file, revision=revision)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def _begins_as_gguf(path: Path) -> bool:
    # a pipe would be waited for
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def snapshot_in(path: Path, revision: str | None) -> Path:
    """Of the hub cache's own folder of a repository (`models--org--name`) that of a commit in it; any other directory itself."""
    try:
        commit = (path / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        commit = revision
    found = path / "snapshots" / (commit or "")
    return found if commit and found.is_dir() else path


def _is_repo_id(text: str) -> bool:
    least = 2 if text.lower().endswith(".gguf") else 0
    named = re.fullmatch(rf"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*){{{least},}}", text)
    return bool(named) and not text.lower().endswith(".safetensors")


def parts_of(name: str) -> tuple[str, str]:
    """A hub name's repository, and the folder or file in it; "" is its top."""
    parts = name.split("/")
    return "/".join(parts[:2]), "/".join(parts[2:])


def snapshot_of(path: Path) -> Path | None:
    """The hub cache's folder of one commit that this directory is, or lies in; None: it is elsewhere."""
    return next((folder for folder in (path, *path.parents) if folder.parent.name == "snapshots"), None)


def cached_repo(path: Path) -> str | None:
    """The hub name (org/name) of what lies in the hub cache; None: it is elsewhere."""
    folders = (folder.name.removeprefix("models--") for folder in (path, *path.parents) if folder.name.startswith("models--"))
    return next((name.replace("--", "/") for name in folders), None)


def _download(name: str, revision: str | None) -> Path:
    """A repository's folder in the hub cache; of `org/name/folder` and `org/name/file.gguf` that, which alone is fetched."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub import errors as hub

    repo, part = parts_of(name)
    gguf = part.lower().endswith(".gguf")
    page = f"https://huggingface.co/{repo}"
    at = f" at revision {revision}" if revision else ""
    try:
        patterns = [part] if gguf else [f"{part}/{pattern}" if part else pattern for pattern in _DOWNLOAD]
        wanted = {"allow_patterns": patterns, "ignore_patterns": _NOT_DOWNLOADED}
        found = Path(snapshot_download(repo, revision=revision, tqdm_class=hub_bar(f"Fetching {name}"), **wanted))
        if not ((found / part).is_file() if gguf else (found / part).is_dir()):
            what = "file" if gguf else "folder"
            raise CheckpointError(f"{repo}{at} has no {what} {part}", f"See {page}/tree/{revision or 'main'}")
        return found / part
    except hub.GatedRepoError:
        raise CheckpointError(
            f"{repo} is gated: you have to accept its conditions first",
            f"Accept them at {page}, then log in with `hf auth login` or set HF_TOKEN",
        ) from None
    except hub.RevisionNotFoundError:
        raise CheckpointError(f"{repo} has no revision {revision}", f"See {page}/commits") from None
    except hub.RepositoryNotFoundError:
        raise CheckpointError(
            f"{name} is neither a directory here nor {'in ' if part else ''}a Hugging Face repository, or it is private",
            f"Check the name, and for a private repository set HF_TOKEN ({page})",
        ) from None
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        if fault := _disk_fault(error):
            raise CheckpointError(*fault) from None
        offline = isinstance(error, hub.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE
        found = "HF_HUB_OFFLINE is set" if offline else "Hugging Face cannot be reached"
        todo = "Unset HF_HUB_OFFLINE and connect once" if offline else "Connect once (behind a proxy, set HTTPS_PROXY)"
        raise CheckpointError(
            f"{name}{at} is not on this machine yet and {found}", f"{todo}, or give the path of a downloaded directory"
        ) from None
    except hub.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise CheckpointError(
                f"Hugging Face gives no access to {repo} (it answered {status})", f"Ask for access at {page} and set HF_TOKEN"
            ) from None
        raise CheckpointError(
            f"{repo}{at} could not be downloaded; Hugging Face answered {status}", f"Try again later: {page}"
        ) from None
    except (OSError, hub.HFValidationError) as error:
        if fault := _disk_fault(error):
            raise CheckpointError(*fault) from None
        raise CheckpointError(
            f"{repo}{at} could not be fetched from Hugging Face or its cache: {one_line(error)}",
            "Check the name and the connection, or give the path of a downloaded directory",
        ) from None


# What a file system answers where a directory is a file, or may not be written.
_UNUSABLE = (errno.EEXIST, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)


def _disk_fault(error: BaseException | None) -> tuple[str, str] | None:
    """(problem, remedy) where a full disk, or a hub cache that cannot be used, lies behind a failed download."""
    from huggingface_hub import constants

    while error is not None:
        number, file = getattr(error, "errno", None), getattr(error, "filename", None)
        if number in (errno.ENOSPC, errno.EDQUOT):
            problem = f"the disk of the hub cache ({constants.HF_HUB_CACHE}) is full"
            return problem, "Free some space and start again: what was fetched is kept; or move the cache with HF_HOME"
        if number in _UNUSABLE and file is not None:
            problem = f"the hub cache ({constants.HF_HUB_CACHE}) cannot be used: {os.fsdecode(file)}: {error.strerror}"
            return problem, "Set HF_HOME to a directory that can be written"
        error = error.__cause__ or error.__context__
    return None
