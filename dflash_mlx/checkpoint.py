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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, DFlashError, one_line
from .hub import locate, snapshot_of
from .roles import OTHER_SPECULATORS, role_of

if TYPE_CHECKING:
    from .conversion.gguf.header import GGUFFile

# in the format's list of types, but not in MLX's
_UNREAD_DTYPES = ("F4", "F6_E2M3", "F6_E3M2", "F8_E5M2", "F64")

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SHARD = re.compile(r"^(?P<start>.+?[-_.])(?P<number>\d{1,6})(?P<of>[-_]of[-_])(?P<count>0*[1-9]\d{0,4})\.safetensors$")
# files that may hold weights and are never read; what a training run leaves beside its model holds none
_OTHER_WEIGHTS = re.compile(r"\.(bin|pth?|ckpt|pkl|pickle|np[yz]|gguf|h5|msgpack|onnx|ot|pdparams)$", re.IGNORECASE)
_NO_WEIGHTS = re.compile(r"^(training_args|optimizer|scheduler|scaler|rng_state.*|.*imatrix.*)\.\w+$|^mask_embedding\.pt$")
# without macOS's `._NAME`, which stands beside each file on a drive that is not formatted for it
_SAFETENSORS = "[!.]*.safetensors"
# what transformers' tokenizers, or copying them, may read beside the weights
_READ_BESIDE = ("*.json", "*.jsonl", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*")
_LFS_POINTER = b"version https://git-lfs"
_MOST_NAMES, _MOST_LETTERS = 6, 120
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
    - ignored: files beside them that may hold weights and are not read, with the reason
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
        """ "target", "drafter", or the name of another kind of speculator that is neither, of `roles.OTHER_SPECULATORS`."""
        if self.gguf is not None:
            return self.gguf.role
        with _reading("config with architectures and dflash_config", f"{self.source}/config.json"):
            return role_of(self.config, self.tensors)

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
    with _reading("readable checkpoint", str(path_or_repo)):
        return _inspect(path_or_repo, revision)


def _inspect(path_or_repo: str | Path, revision: str | None) -> Checkpoint:
    source = str(path_or_repo)
    path = locate(path_or_repo, revision)
    if path.is_file():
        return _inspect_gguf(path, source)
    folder = _weights_folder(path, source)
    if (path / folder / "config.json").exists() or not any((path / folder).glob(_SAFETENSORS)):
        path, source, folder = path / folder, source if folder == "." else f"{source}/{folder}", "."
    if not any(path.glob(_SAFETENSORS)) and not (path / _INDEX).exists():
        ggufs = sorted(file for file in path.glob("[!.]*") if file.suffix.lower() == ".gguf")
        if len(ggufs) == 1:
            _check_link(path, ggufs[0].name, source)
            return _inspect_gguf(ggufs[0], source)
        if ggufs:
            raise CheckpointError(
                f"{source} holds {len(ggufs)} GGUF files ({_some(f.name for f in ggufs)}) and no safetensors; which one to read "
                "is not said",
                "Give the path of one of them",
            )
    for file in sorted(file for pattern in _READ_BESIDE for file in path.glob(pattern)):
        _check_link(path, str(file.relative_to(path)), source)
    config = _read_json(path, "config.json", source, required=True)
    generation_config = _read_json(path, "generation_config.json", source, required=False)
    files, ignored, index = _weight_files(path / folder, source)
    if folder != ".":
        files, ignored = tuple(f"{folder}/{name}" for name in files), {f"{folder}/{name}": why for name, why in ignored.items()}
        index = index and {tensor: f"{folder}/{name}" for tensor, name in index.items()}
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


@contextmanager
def _reading(what: str, where: str) -> Iterator[None]:
    """Whatever reading and parsing damaged files raises, as one sentence; the steps inside only raise what they meet."""
    try:
        yield
    except DFlashError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as error:
        cause = one_line(error)
        if isinstance(error, OSError) and error.strerror:
            cause = f"{error.strerror}: {Path(os.fsdecode(error.filename or where)).name[:_MOST_LETTERS]}"
        raise CheckpointError(f"{where} is no {what}: {cause}", "Download the file again") from error


def _weights_folder(path: Path, source: str) -> str:
    """The folder in a directory that has the weights: "." is the directory itself, which holds some or has no such folder.

    Raises:
      CheckpointError: several have.
    """
    if any(file.suffix.lower() in (".safetensors", ".gguf", ".bin", ".pt", ".pth") for file in path.glob("[!.]*")):
        return "."
    folders = sorted({file.parent.name for kind in ("safetensors", "gguf") for file in path.glob(f"[!.]*/[!.]*.{kind}")})
    if len(folders) > 1:
        problem = f"{source} has no weights, and {len(folders)} folders that have: {_some(folders)}"
        raise CheckpointError(problem, f"Name one: {source}/{folders[0]}")
    return folders[0] if folders else "."


def _read_object(text: bytes) -> dict:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} where an object belongs")
    return value


def _require_file(file: Path) -> None:
    # a pipe would be waited for, a directory or a link to nowhere has no content
    if not file.is_file():
        raise ValueError("no ordinary file")


def _some(names) -> str:
    names = [str(name)[:_MOST_LETTERS] for name in names]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _read_json(path: Path, name: str, source: str, *, required: bool) -> dict:
    file = path / name
    if not file.exists():
        if required:
            raise CheckpointError(*_no_config(path, source))
        return {}
    with _reading("valid JSON", f"{source}/{name}"):
        _require_file(file)
        text = file.read_bytes()
        if text.startswith(_LFS_POINTER):
            raise CheckpointError(*_lfs_pointer(name, source))
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


def _no_config(path: Path, source: str) -> tuple[str, str]:
    if (path / "adapter_config.json").exists():
        return _adapter(source, "adapter_config.json")
    if (path / "params.json").exists():
        return (
            f"{source} has params.json, the publisher's own format, and no config.json",
            "Use the repository in transformers' format",
        )
    if snapshot_of(path) is not None:
        return f"{source} has no config.json", f"If it holds GGUF files, name one of them: {source}/FILE.gguf"
    return f"{source} has no config.json", "Give the directory that holds the model's config.json"


def _adapter(source: str, files: str) -> tuple[str, str]:
    return (
        f"{source} is a LoRA adapter ({files}), not a whole model",
        "Merge it into its base model first, for example with peft's merge_and_unload",
    )


def _weight_files(path: Path, source: str) -> tuple[tuple[str, ...], dict[str, str], dict[str, str] | None]:
    """-> (weight files, files left alone and why, the index's tensor -> file map)."""
    # a drafter's vector for mask slots, which its reader looks for
    present = sorted(f.name for f in path.glob(_SAFETENSORS) if f.stem != "mask_embedding")
    others = sorted(f.name for f in path.glob("[!.]*") if _OTHER_WEIGHTS.search(f.name) and not _NO_WEIGHTS.match(f.name))
    ignored = dict.fromkeys(others, "not safetensors")
    index = _read_index(path, source)
    if index is not None:
        files = tuple(sorted(set(index.values())))
        if _SINGLE in present and _SINGLE not in files:
            raise CheckpointError(
                f"{source} holds two sets of weights: {_SINGLE}, and an index that names {len(files)} other files",
                f"Delete the stale one: {_INDEX} or {_SINGLE}",
            )
        missing = [name for name in files if not (path / name).exists()]
        if missing:
            raise CheckpointError(
                f"{source} lacks {len(missing)} of the {len(files)} files that {_INDEX} names: {_some(missing)}",
                "Download the checkpoint again (the index may also be stale)",
            )
        return files, {name: "not named by the index" for name in present if name not in files} | ignored, index
    shards = [name for name in present if _SHARD.match(name)]
    if _SINGLE in present:
        _refuse_two_sets(shards, source)
        return (_SINGLE,), {name: f"beside {_SINGLE}" for name in present if name != _SINGLE} | ignored, None
    if shards:
        return _complete_shards(shards, source), {n: "not a shard" for n in present if n not in shards} | ignored, None
    if len(present) == 1 and not present[0].startswith(("adapter", "consolidated")):
        return (present[0],), ignored, None
    raise CheckpointError(*_no_weights(path, source, present))


def _shard_sets(shards: list[str]) -> dict[tuple[str, str], list[str]]:
    """(name of a set's first shard, its number of shards) -> the shards of the set that are missing."""
    sets: dict[tuple[str, str, str], list[str]] = {}
    for match in map(_SHARD.match, shards):
        sets.setdefault((match["start"], match["of"], match["count"]), []).append(match["number"])
    missing = {}
    for (start, of, count), found in sets.items():
        numbers, width = set(map(int, found)), min(map(len, found))
        # some tools number shards from 0
        due = range(int(count)) if numbers == set(range(int(count))) else range(1, int(count) + 1)
        names = {i: f"{start}{i:0{width}}{of}{count}.safetensors" for i in due}
        missing[names[due.start], count] = [name for i, name in names.items() if i not in numbers]
    return missing


def _refuse_two_sets(shards: list[str], source: str) -> None:
    """A complete set of shards beside the single file: which one is meant, nobody says."""
    for (first, count), missing in _shard_sets(shards).items():
        if not missing:
            said = f"{int(count)} shard{'s' if int(count) > 1 else ''}"
            found = f"{source} holds two sets of weights: {_SINGLE}, and {said} ({first}{' and so on' if int(count) > 1 else ''})"
            remedy = f"Delete the one that does not belong to config.json, or add the {_INDEX} of the right one"
            raise CheckpointError(found, remedy)


def _complete_shards(shards: list[str], source: str) -> tuple[str, ...]:
    sets = _shard_sets(shards)
    if len(sets) > 1:
        raise CheckpointError(
            f"{source} holds shards of {len(sets)} sets ({_some(shards)}); they must be of one",
            "Delete the stray ones, or add the index that says which belong",
        )
    ((_, count), missing) = next(iter(sets.items()))
    if missing:
        raise CheckpointError(
            f"{source} lacks {len(missing)} of {int(count)} shards: {_some(missing)}", "Download the checkpoint again"
        )
    return tuple(shards)


def _no_weights(path: Path, source: str, present: list[str]) -> tuple[str, str]:
    if (path / "adapter_config.json").exists():
        return _adapter(source, _some(present) or "adapter_config.json")
    pickles = sorted(f.name for f in path.glob("[!.]*.bin")) + sorted(f.name for f in path.glob("[!.]*.pt*"))
    if pickles:
        return (
            f"{source} has only PyTorch files ({_some(pickles)}), which can run code when read; it must have safetensors",
            "Save the model again with transformers' save_pretrained, or use a repository with safetensors",
        )
    if present:
        return (
            f"{source} has {_some(present)}, which may belong to several models; it must have {_SINGLE}, shards or an index",
            "Keep the files of one model, or add the index that says which belong",
        )
    return f"{source} has no safetensors weights", "Download the checkpoint again"


def _read_index(path: Path, source: str) -> dict[str, str] | None:
    if not (path / _INDEX).exists():
        return None
    weight_map = _read_json(path, _INDEX, source, required=False).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f'{source}/{_INDEX} has no usable "weight_map" (tensor -> file)', "Download the index again")
    unsafe = sorted({name for name in weight_map.values() if not _is_safe_name(name)})
    if unsafe:
        raise CheckpointError(
            f"{source}/{_INDEX} names files outside the directory: {_some(unsafe)}",
            "Do not use this checkpoint: such names read files from elsewhere on the disk",
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
    snapshot = snapshot_of(root)
    if snapshot is not None and real.parent == snapshot.parent.parent / "blobs":
        return
    raise CheckpointError(f"{source}/{name} is a symbolic link out of the directory, to {real}", "Copy the file into it")


def _lfs_pointer(name: str, source: str) -> tuple[str, str]:
    return f"{source}/{name} is a Git-LFS pointer, not the file itself", "Run `git lfs pull`, or download the file again"


def _read_headers(path: Path, files: tuple[str, ...], index: dict[str, str] | None, source: str) -> dict[str, TensorInfo]:
    faults: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    for name in files:
        try:
            with _reading("whole safetensors file", f"{source}/{name}"):
                _check_link(path, name, source)
                _require_file(path / name)
                entries = _read_header(path / name, name, source)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        for entry in entries:
            if entry.name in tensors:
                faults.append(
                    f"{entry.name} is in two files of {source}, {tensors[entry.name].file} and {name}. "
                    "Delete the file that does not belong."
                )
            tensors[entry.name] = entry
    if index is not None and not faults:
        stale = [t for t, file in index.items() if t not in tensors or tensors[t].file != file]
        if stale:
            faults.append(
                f"{_INDEX} in {source} is stale: {len(stale)} tensors are not in the files that it names ({_some(stale)}). "
                "Download it again."
            )
    if faults:
        raise CheckpointError(" ".join(faults))
    return tensors


def _read_header(file: Path, name: str, source: str) -> list[TensorInfo]:
    """A safetensors file's tensors, in the order of their data. The library refuses a damaged header or a cut file."""
    from safetensors import SafetensorError, safe_open

    with file.open("rb") as handle:
        if handle.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(*_lfs_pointer(name, source))
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = [(tensor, opened.get_slice(tensor)) for tensor in opened.offset_keys()]
            described = [(tensor, part.get_dtype(), tuple(part.get_shape())) for tensor, part in slices]
    except SafetensorError as error:
        # its own kind of error, which is no ValueError
        raise ValueError(one_line(error)) from error
    unread = next(((tensor, dtype) for tensor, dtype, _ in described if dtype in _UNREAD_DTYPES), None)
    if unread:
        raise CheckpointError(
            f"{unread[0]} in {source}/{name} is {unread[1]}, a number type that MLX does not read",
            "Use a bfloat16, float16 or float32 checkpoint",
        )
    return [TensorInfo(tensor, dtype, shape, name, _nbytes(dtype, shape)) for tensor, dtype, shape in described]


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Of the types that are read: the digits in their names are their bits, and a boolean is a byte."""
    bits = re.search(r"\d+", dtype)
    return math.prod(shape) * (int(bits.group()) // 8 if bits else 1)


def _inspect_gguf(path: Path, source: str) -> Checkpoint:
    """Names, shapes and block types from a GGUF header; the file is mapped, its data not read."""
    from .conversion.gguf.header import open_gguf

    opened = open_gguf(path)
    infos = {
        t.name: TensorInfo(t.name, t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), path.name, int(t.n_bytes))
        for t in opened.reader.tensors
    }
    return Checkpoint(path, source, "gguf", {}, {}, infos, (path.name,), gguf=opened)


def require_target(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError when a checkpoint is not a target, or computes by code of its own."""
    role = checkpoint.role
    if role == "drafter":
        raise CheckpointError(
            f"{checkpoint.source} is a DFlash drafter, which has no embedding and no head of its own; "
            "a target (a whole language model) belongs here",
            "Give it as the draft model, beside the target that it was trained for",
        )
    if role != "target":
        raise CheckpointError(
            f"{checkpoint.source} is {OTHER_SPECULATORS[role]}; a target (a whole language model) belongs here",
            "Give the language model that it belongs to",
        )
    if name := checkpoint.config.get("model_file"):
        raise CheckpointError(
            f"{checkpoint.source} computes by code of its own ({name}); this package runs mlx-lm's classes only",
            "Run it with mlx-lm, or take a checkpoint of a family that mlx-lm has",
        )


def require_drafter(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError when a checkpoint is not a DFlash drafter."""
    role = checkpoint.role
    if role == "target":
        kind = checkpoint.config.get("model_type") or (checkpoint.gguf.architecture if checkpoint.gguf else checkpoint.kind)
        raise CheckpointError(
            f"{checkpoint.source} is an ordinary model (model type {kind}, "
            "no fc.weight and no dflash_config); a DFlash drafter belongs here",
            "Give a drafter that was trained for this target",
        )
    if role != "drafter":
        raise CheckpointError(
            f"{checkpoint.source} is {OTHER_SPECULATORS[role]}, which is not supported; a DFlash drafter belongs here",
            "Use a drafter in the published DFlash layout",
        )
