"""What a checkpoint is, without loading its data: where it lies, its config, its tensors, which files are sound.

Knows directories, hub repositories, safetensors headers, indexes and GGUF headers. Knows no models: whether the tensors fit one
is for the converter to say. Everything that is wrong with the files is found here, before anything is built or written.
Source: the safetensors format (8-byte little-endian header length, JSON header, data); huggingface_hub's cache layout.
"""

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, DFlashError

if TYPE_CHECKING:
    from .conversion.gguf.header import GGUFFile

_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
# in the format's list of types, but not in MLX's
_UNREAD_DTYPES = ("F4", "F6_E2M3", "F6_E3M2", "F8_E5M2", "F64")

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARD = re.compile(r"^(?P<stem>.+?)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")
# what a hub repository is asked for: never code, never PyTorch pickles
_DOWNLOAD = ["*.json", "*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja", "README.md"]
_NOT_DOWNLOADED = ["consolidated*", "original/*", "*.bin"]
# what transformers' tokenizers, or copying them, may read beside the weights
_READ_BESIDE = ("*.json", "*.jsonl", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*")
_LFS_POINTER = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100_000_000
_MOST_NAMES = 6
_MOST_LETTERS = 120
# far above any config's own nesting, far below where Python's copying and walking of it end
_MOST_DEPTH = 64


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file's header describes it. dtype: safetensors' name ("BF16") or GGUF's ("Q4_1")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """An inspected checkpoint.

    - path: the directory, or the .gguf file
    - source: what the user named (repository or path), for messages and provenance
    - kind: "safetensors" or "gguf"
    - config, generation_config: parsed JSON; empty for GGUF, whose reader builds them
    - tensors: name -> header entry, in file order
    - files: weight files, relative to `path`
    - ignored: files beside them that look like weights and are not read, with the reason
    - gguf: the parsed file of a GGUF checkpoint; while it lives, opening the same file again costs nothing
    """

    path: Path
    source: str
    kind: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: tuple[str, ...]
    ignored: Mapping[str, str] = field(default_factory=dict)
    revision: str | None = None
    gguf: "GGUFFile | None" = field(default=None, repr=False, compare=False)

    @property
    def largest_file_bytes(self) -> int:
        return max((self.file_path(name).stat().st_size for name in self.files), default=0)

    @cached_property
    def role(self) -> str:
        """ "target", "drafter", or the name of another kind of speculator that is neither; see `describe_role`."""
        if self.gguf is not None:
            return "drafter" if self.gguf.is_drafter else "target"
        with _reading("architectures and dflash_config", f"{self.source}/config.json"):
            return _role(self.config, self.tensors)

    def file_path(self, name: str) -> Path:
        return self.path if self.kind == "gguf" else self.path / name

    def digest(self) -> str:
        """Which weights these are: 16 hexadecimal digits of the SHA-256 of the weight files, one after the other by name."""
        return sha256_of(self.file_path(name) for name in self.files)[:16]

    def load(self) -> dict:
        """Every tensor as an `mx.array`, unread until it is used. Safetensors only; GGUF data has its own reader."""
        import mlx.core as mx

        weights = {}
        for name in self.files:
            weights.update(mx.load(str(self.path / name), format="safetensors"))
        return weights


def sha256_of(files: Iterable[Path]) -> str:
    """SHA-256 of the bytes of files one after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            hashlib.file_digest(handle, lambda: digest)
    return digest.hexdigest()


def inspect_checkpoint(path_or_repo: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Find a checkpoint and read its headers.

    Args:
      path_or_repo: a directory, a .gguf file, or a hub repository id, which is downloaded (or found in the hub cache)
      revision: branch, tag or commit of a hub repository
    Raises:
      CheckpointError: one sentence per fault, all faults of the files in one message.
    """
    with _reading("a checkpoint", str(path_or_repo)):
        return _inspect(path_or_repo, revision)


def _inspect(path_or_repo: str | Path, revision: str | None) -> Checkpoint:
    source = str(path_or_repo)
    path = _locate(path_or_repo, revision)
    if path.is_file():
        return _inspect_gguf(path, source)
    if not any(path.glob("*.safetensors")) and not (path / _INDEX).exists():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            _check_link(path, ggufs[0].name, source)
            return _inspect_gguf(ggufs[0], source)
        if ggufs:
            raise CheckpointError(
                f"expected one checkpoint in {source}; found {len(ggufs)} GGUF files ({_some(f.name for f in ggufs)}). "
                "Give the path of one of them."
            )
    for file in sorted(file for pattern in _READ_BESIDE for file in path.glob(pattern)):
        _check_link(path, str(file.relative_to(path)), source)
    config = _read_json(path, "config.json", source, required=True)
    generation_config = _read_json(path, "generation_config.json", source, required=False)
    files, ignored, index = _weight_files(path, source)
    tensors = _read_headers(path, files, index, source)
    return Checkpoint(
        path=path,
        source=source,
        kind="safetensors",
        config=config,
        generation_config=generation_config,
        tensors=tensors,
        files=files,
        ignored=ignored,
        revision=revision,
    )


# --- where it is ------------------------------------------------------------------------------------------------------


def _locate(path_or_repo: str | Path, revision: str | None) -> Path:
    path = Path(path_or_repo).expanduser()
    if path.exists():
        if path.is_dir() or path.suffix == ".gguf":
            return path
        raise CheckpointError(
            f"expected a checkpoint directory or a .gguf file; {path_or_repo} is another kind of file. "
            "Give the directory that holds it."
        )
    text = str(path_or_repo)
    if not _is_repo_id(text):
        raise CheckpointError(
            f"expected a directory, a .gguf file or a hub repository like org/name; {text} does not exist. Check the path."
        )
    return _download(text, revision)


def _is_repo_id(text: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", text)) and not text.endswith((".gguf", ".safetensors"))


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub import errors as hub

    page = f"https://huggingface.co/{repo}"
    at = f" at revision {revision}" if revision else ""
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_DOWNLOAD, ignore_patterns=_NOT_DOWNLOADED))
    except hub.GatedRepoError as error:
        raise CheckpointError(
            f"expected access to {repo}; it is gated. "
            f"Accept its conditions at {page} and set HF_TOKEN to a token of that account."
        ) from error
    except hub.RevisionNotFoundError as error:
        raise CheckpointError(
            f"expected revision {revision} of {repo}; the hub has none of that name. See {page}/commits."
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"expected a directory or a hub repository; {repo} is neither, or it is private. "
            f"Check the name, and for a private repository set HF_TOKEN ({page})."
        ) from error
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        offline = isinstance(error, hub.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE
        found = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        todo = "Unset HF_HUB_OFFLINE and connect" if offline else "Connect"
        raise CheckpointError(
            f"expected {repo}{at} in the hub cache or a connection to the hub; {found} and the cache does not hold it. "
            f"{todo} once, or give the path of a downloaded directory."
        ) from error
    except hub.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise CheckpointError(
                f"expected access to {repo}; the hub answered {status}. Ask for access at {page} and set HF_TOKEN."
            ) from error
        raise CheckpointError(f"expected to download {repo}{at}; the hub answered {status}. Try again later: {page}.") from error
    except (OSError, hub.HFValidationError) as error:
        raise CheckpointError(
            f"expected {repo}{at} from the hub or its cache; found: {_one_line(error)}. "
            "Check the name and the connection, or give the path of a downloaded directory."
        ) from error


@contextmanager
def _reading(what: str, where: str) -> Iterator[None]:
    """Whatever reading and parsing damaged files raises, as one sentence; the steps inside only raise what they meet."""
    try:
        yield
    except DFlashError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as error:
        cause = _one_line(error)
        if isinstance(error, OSError) and error.strerror:
            cause = f"{error.strerror}: {Path(os.fsdecode(error.filename or where)).name[:_MOST_LETTERS]}"
        raise CheckpointError(f"expected {what} in {where}; found: {cause}. Download the file again.") from error


def _read_object(text: bytes) -> dict:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} where an object belongs")
    return value


def _require_file(file: Path) -> None:
    # a pipe would be waited for, a directory or a link to nowhere has no content
    if not file.is_file():
        raise ValueError("no ordinary file")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _some(names) -> str:
    names = [str(name)[:_MOST_LETTERS] for name in names]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


# --- which files ------------------------------------------------------------------------------------------------------


def _read_json(path: Path, name: str, source: str, *, required: bool) -> dict:
    file = path / name
    if not file.exists():
        if required:
            raise CheckpointError(_no_config(path, source))
        return {}
    with _reading("JSON", f"{source}/{name}"):
        _require_file(file)
        text = file.read_bytes()
        if text.startswith(_LFS_POINTER):
            raise CheckpointError(_lfs_sentence(name, source))
        return _decode_tagged_floats(_read_object(text))


def _decode_tagged_floats(value: Any, depth: int = 0) -> Any:
    """transformers writes infinities as {"__float__": "Infinity"} to keep config.json valid JSON."""
    if depth > _MOST_DEPTH:
        raise ValueError(f"values nested more than {_MOST_DEPTH} deep")
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"].replace("Infinity", "inf"))
        return {k: _decode_tagged_floats(v, depth + 1) for k, v in value.items()}
    return [_decode_tagged_floats(v, depth + 1) for v in value] if isinstance(value, list) else value


def _no_config(path: Path, source: str) -> str:
    if (path / "adapter_config.json").exists():
        return (
            f"expected a whole model in {source}; found a LoRA adapter (adapter_config.json). "
            "Merge it into its base model first, for example with peft's merge_and_unload."
        )
    if (path / "params.json").exists():
        return (
            f"expected config.json in {source}; found params.json, the publisher's own format. "
            "Use the repository in transformers' format."
        )
    return f"expected config.json in {source}; it is missing. Give the directory that holds the model's config.json."


def _weight_files(path: Path, source: str) -> tuple[tuple[str, ...], dict[str, str], dict[str, str] | None]:
    """-> (weight files, files left alone and why, the index's tensor -> file map)."""
    present = sorted(f.name for f in path.glob("*.safetensors"))
    index = _read_index(path, source)
    if index is not None:
        files = tuple(sorted(set(index.values())))
        if _SINGLE in present and _SINGLE not in files:
            raise CheckpointError(
                f"expected one set of weights in {source}; found {_SINGLE} and an index that names {len(files)} other files. "
                f"Delete the stale one: {_INDEX} or {_SINGLE}."
            )
        missing = [name for name in files if not (path / name).exists()]
        if missing:
            raise CheckpointError(
                f"expected the {len(files)} files that {_INDEX} names in {source}; missing {_some(missing)}. "
                "Download the checkpoint again (the index may also be stale)."
            )
        return files, {name: "not named by the index" for name in present if name not in files}, index
    shards = [name for name in present if _SHARD.match(name)]
    if _SINGLE in present:
        others = {name: f"beside {_SINGLE}" for name in present if name != _SINGLE}
        return (_SINGLE,), others, None
    if shards:
        return _complete_shards(shards, source), {n: "not a shard" for n in present if n not in shards}, None
    if len(present) == 1 and not present[0].startswith(("adapter", "consolidated")):
        return (present[0],), {}, None
    raise CheckpointError(_no_weights(path, source, present))


def _complete_shards(shards: list[str], source: str) -> tuple[str, ...]:
    matches = [_SHARD.match(name) for name in shards]
    sets = {(m["stem"], m["count"]) for m in matches}
    if len(sets) > 1:
        raise CheckpointError(
            f"expected the shards of one checkpoint in {source}; found files of {len(sets)} sets ({_some(shards)}). "
            "Delete the stray ones, or add the index that says which belong."
        )
    count = int(matches[0]["count"])
    numbers = {int(m["number"]) for m in matches}
    missing = [f"{matches[0]['stem']}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1) if i not in numbers]
    # some tools number shards from 0
    if missing and numbers != set(range(count)):
        raise CheckpointError(f"expected {count} shards in {source}; missing {_some(missing)}. Download the checkpoint again.")
    return tuple(shards)


def _no_weights(path: Path, source: str, present: list[str]) -> str:
    if (path / "adapter_config.json").exists():
        return (
            f"expected a whole model in {source}; found a LoRA adapter ({_some(present) or 'adapter_config.json'}). "
            "Merge it into its base model first, for example with peft's merge_and_unload."
        )
    pickles = sorted(f.name for f in path.glob("*.bin")) + sorted(f.name for f in path.glob("*.pt*"))
    if pickles:
        return (
            f"expected safetensors in {source}; found only PyTorch files ({_some(pickles)}), which can run code when read. "
            "Save the model again with transformers' save_pretrained, or use a repository with safetensors."
        )
    if present:
        return (
            f"expected {_SINGLE}, shards or an index in {source}; found {_some(present)}, which may belong to several models. "
            "Keep the files of one model, or add the index that says which belong."
        )
    return f"expected safetensors weights in {source}; found none. Download the checkpoint again."


def _read_index(path: Path, source: str) -> dict[str, str] | None:
    if not (path / _INDEX).exists():
        return None
    weight_map = _read_json(path, _INDEX, source, required=False).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(
            f'expected "weight_map" (tensor -> file) in {source}/{_INDEX}; it is missing or malformed. Download the index again.'
        )
    unsafe = sorted({name for name in weight_map.values() if not _is_safe_name(name)})
    if unsafe:
        raise CheckpointError(
            f"expected file names inside the directory in {source}/{_INDEX}; found {_some(unsafe)}. "
            "Do not use this checkpoint: such names read files from elsewhere on the disk."
        )
    # "./a.safetensors" is a.safetensors
    return {tensor: str(PurePosixPath(name)) for tensor, name in weight_map.items()}


def _is_safe_name(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and "\\" not in name and ".." not in parts and name.endswith(".safetensors")


def _check_link(path: Path, name: str, source: str) -> None:
    """Refuse a symbolic link that leaves the directory, but for the hub cache's own links into its blob store."""
    root = path.resolve()
    real = (path / name).resolve()
    if real.is_relative_to(root):
        return
    # hub cache: models--org--name/snapshots/<commit>/file -> ../../blobs/<hash>
    if root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs":
        return
    raise CheckpointError(
        f"expected {name} to lie in {source}; it is a symbolic link to {real}. Copy the file into the directory."
    )


def _lfs_sentence(name: str, source: str) -> str:
    return f"expected data in {source}/{name}; found a Git-LFS pointer. Run `git lfs pull`, or download the file again."


# --- headers ----------------------------------------------------------------------------------------------------------


def _read_headers(path: Path, files: tuple[str, ...], index: dict[str, str] | None, source: str) -> dict[str, TensorInfo]:
    faults: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    for name in files:
        try:
            with _reading("a safetensors header", f"{source}/{name}"):
                _check_link(path, name, source)
                _require_file(path / name)
                entries = _read_header(path / name, name, source)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        for entry in entries:
            if entry.name in tensors:
                faults.append(
                    f"expected each tensor once in {source}; {entry.name} is in {tensors[entry.name].file} and {name}. "
                    "Delete the file that does not belong."
                )
            tensors[entry.name] = entry
    if index is not None and not faults:
        stale = [t for t, file in index.items() if t not in tensors or tensors[t].file != file]
        if stale:
            faults.append(
                f"expected the tensors that {_INDEX} names in {source}; {len(stale)} are not in their files ({_some(stale)}). "
                "The index is stale: download it again."
            )
    if faults:
        raise CheckpointError(" ".join(faults))
    return tensors


def _read_header(file: Path, name: str, source: str) -> list[TensorInfo]:
    size = file.stat().st_size
    again = "Download the file again."
    with file.open("rb") as handle:
        start = handle.read(max(8, len(_LFS_POINTER)))
        if start.startswith(_LFS_POINTER):
            raise CheckpointError(_lfs_sentence(name, source))
        if len(start) < 8:
            raise CheckpointError(f"expected safetensors in {source}/{name}; the file is {size} bytes long. {again}")
        (length,) = struct.unpack("<Q", start[:8])
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"expected safetensors in {source}/{name}; its header claims {length} bytes of the file's {size}: "
                f"the file is truncated or not safetensors. {again}"
            )
        handle.seek(8)
        header = _read_object(handle.read(length))
    # MLX itself writes null where there is none
    metadata = {} if header.get("__metadata__") is None else header["__metadata__"]
    header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise TypeError("__metadata__ that is no map of strings")
    entries, spans = [], []
    for tensor, entry in header.items():
        found = _parse_entry(entry)
        if found is None:
            raise CheckpointError(
                f"expected dtype, shape and offsets of {tensor} in {source}/{name}; found {str(entry)[:200]}. {again}"
            )
        dtype, shape, begin, end = found
        if dtype in _UNREAD_DTYPES:
            raise CheckpointError(
                f"expected number types that MLX reads in {source}/{name}; found {dtype} ({tensor}). "
                "Use a bfloat16, float16 or float32 checkpoint."
            )
        bits = math.prod(shape) * _ITEM_BITS[dtype]
        if bits % 8 or end - begin != bits // 8:
            raise CheckpointError(
                f"expected {bits // 8} bytes for {tensor} {list(shape)} {dtype} in {source}/{name}; found {end - begin}. {again}"
            )
        if 8 + length + end > size:
            raise CheckpointError(
                f"expected at least {8 + length + end} bytes in {source}/{name}; found {size}: the file is truncated. {again}"
            )
        entries.append(TensorInfo(tensor, dtype, shape, name, end - begin))
        spans.append((begin, end, tensor))
    _check_tiling(spans, size - 8 - length, f"{source}/{name}")
    return entries


def _parse_entry(entry: Any) -> tuple[str, tuple[int, ...], int, int] | None:
    """-> (dtype, shape, begin, end) of a header's entry, None where it is malformed."""
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        (begin, end), numbers = offsets, [*shape, *offsets]
        known = dtype in _ITEM_BITS
    except (KeyError, TypeError, ValueError):
        return None
    lists = isinstance(shape, list) and isinstance(offsets, list)
    # bool is an int to Python
    if not (known and lists and all(type(n) is int and n >= 0 for n in numbers) and begin <= end):
        return None
    return dtype, tuple(shape), begin, end


def _check_tiling(spans: list[tuple[int, int, str]], data_bytes: int, where: str) -> None:
    """The safetensors rule: tensors cover the data once, from its first byte to its last, in whatever order the header has."""
    at = 0
    for begin, end, tensor in sorted(spans):
        if begin != at:
            raise CheckpointError(
                f"expected the tensors of {where} one after the other, the next at byte {at} of the data; "
                f"{tensor} begins at byte {begin}. Download the file again."
            )
        at = end
    if at != data_bytes:
        raise CheckpointError(
            f"expected tensors up to the end of the data, byte {data_bytes}, in {where}; found the last one to end at byte {at}. "
            "Download the file again."
        )


def _inspect_gguf(path: Path, source: str) -> Checkpoint:
    """Names, shapes and block types from a GGUF header; the file is mapped, its data not read."""
    from .conversion.gguf.header import open_gguf

    opened = open_gguf(path)
    infos = {
        t.name: TensorInfo(t.name, t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), path.name, int(t.n_bytes))
        for t in opened.reader.tensors
    }
    return Checkpoint(path, source, "gguf", {}, {}, infos, (path.name,), gguf=opened)


# --- what it is -------------------------------------------------------------------------------------------------------


def _role(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    names = {name.removeprefix("model.") for name in tensors}
    architectures = config.get("architectures") or []
    architectures = [architectures] if isinstance(architectures, str) else list(architectures)
    nested = config.get("dflash_config") or {}
    projector = str(nested.get("projector_type") or config.get("projector_type") or "").lower()
    speculator = str(config.get("speculators_model_type") or "")
    if speculator in ("dflash", "dspark"):
        return "drafter" if speculator == "dflash" else speculator
    if speculator or "speculators_config" in config:
        return "speculators"
    if projector in ("dspark", "domino") or any(n.startswith(("markov_head.", "confidence_head.")) for n in names):
        return projector or "dspark"
    if any("eagle" in a.lower() for a in architectures) or any(n.startswith("midlayer.") for n in names):
        return "EAGLE"
    if any("medusa" in a.lower() for a in architectures) or "medusa_num_heads" in config:
        return "Medusa"
    if any(a.startswith("MuseGlimmerAssistant") for a in architectures) or "encoder.fc.weight" in tensors:
        return "Muse assistant"
    if nested or any(a.startswith("DFlash") for a in architectures) or {"fc.weight", "hidden_norm.weight"} <= names:
        return "drafter"
    return "target"


_OTHER_SPECULATORS = {
    "speculators": "a folder of vLLM's speculators library",
    "EAGLE": "an EAGLE head",
    "Medusa": "a Medusa head",
    "dspark": "a DSpark drafter (DFlash with a Markov head)",
    "domino": "a Domino drafter",
    "Muse assistant": "a Muse assistant (a drafter with tensor names of its own)",
}


def require_target(checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> None:
    """Raises CheckpointError when a checkpoint is not a target, or needs code of its own that was not allowed to run."""
    role = checkpoint.role
    if role == "drafter":
        raise CheckpointError(
            f"expected a target (a whole language model); {checkpoint.source} is a DFlash drafter, "
            "which has no embedding and no head of its own. "
            "Give it as the draft model, beside the target that it was trained for."
        )
    if role != "target":
        raise CheckpointError(
            f"expected a target (a whole language model); {checkpoint.source} is {_OTHER_SPECULATORS[role]}. "
            "Give the language model that it belongs to."
        )
    if checkpoint.config.get("model_file") and not trust_remote_code:
        raise CheckpointError(
            f"expected a model that mlx-lm has; {checkpoint.source} brings its own code ({checkpoint.config['model_file']}), "
            "which is not run. Pass trust_remote_code=True (--trust-remote-code) if you trust it."
        )


def require_drafter(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError when a checkpoint is not a DFlash drafter."""
    role = checkpoint.role
    if role == "target":
        raise CheckpointError(
            f"expected a DFlash drafter; {checkpoint.source} is an ordinary model "
            f"(model type {checkpoint.config.get('model_type') or checkpoint.kind}, no fc.weight and no dflash_config). "
            "Give a drafter that was trained for this target."
        )
    if role != "drafter":
        raise CheckpointError(
            f"expected a DFlash drafter; {checkpoint.source} is {_OTHER_SPECULATORS[role]}, which is not supported. "
            "Use a drafter in the published DFlash layout."
        )
    if checkpoint.gguf is not None:
        raise CheckpointError(
            f"{checkpoint.source} is a DFlash drafter in a GGUF file; this version reads drafters as safetensors",
            "Give the directory or hub repository with the safetensors that the file was made from",
        )
