"""The header of a GGUF file: keys, names and shapes, and whether it is a drafter. The data stays on disk.

Knows the container, and which architectures hold drafters. Knows nothing of what keys and tensors mean to a model (source).
Source: the GGUF specification (ggml-org/ggml, docs/gguf.md).
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import gguf
import numpy as np

from dflash_mlx.errors import CheckpointError, ConversionError

# What gguf's reader may raise for bytes that are not a whole GGUF file.
_READER_ERRORS = (ValueError, IndexError, KeyError, OverflowError, TypeError)
_LFS_POINTER = b"version https://git-lfs"


class _Mapped(np.ndarray):
    """The file's bytes. Slices beyond the end raise, where numpy's would be shorter: with a damaged array length the reader
    would otherwise collect empty slices for hours."""

    def __getitem__(self, key: slice) -> np.ndarray:
        if key.stop > self.size:
            raise IndexError(f"byte {key.stop} of {self.size} is needed")
        return self.plain[key]


class _Reader(gguf.GGUFReader):
    """gguf's reader over `_Mapped`, whose slices also cost less than `np.memmap`'s: a vocabulary is 10^5 of them."""

    @property
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        # views: still the mapped file, read on demand
        self._data = mapped.view(_Mapped)
        self._data.plain = mapped.view(np.ndarray)


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """A mapped GGUF file with its parsed header. reader: gguf's, with the tensors; metadata: key -> Python value."""

    reader: gguf.GGUFReader
    metadata: dict[str, Any]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture; "" if the file names none."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def is_drafter(self) -> bool:
        """Whether it holds a DFlash drafter: recognised by names in it, or by two tensors that only a drafter has.

        llama.cpp's architecture is "dflash", its forks' are "dflash-draft", "dspark" and others. Some files call a drafter
        "qwen3", with keys or tensors named after DFlash.
        """
        names = {tensor.name.removeprefix("model.") for tensor in self.reader.tensors}
        named = any(kind in name.lower() for name in (self.architecture, *names, *self.metadata) for kind in ("dflash", "dspark"))
        return named or {"fc.weight", "hidden_norm.weight"} <= names

    @property
    def role(self) -> str:
        """The role, as in `Checkpoint.role`."""
        if self.is_drafter:
            return "drafter"
        return next((kind for kind in ("EAGLE", "Medusa") if kind.lower() in self.architecture.lower()), "target")


_opened: WeakValueDictionary[tuple, GGUFFile] = WeakValueDictionary()


def open_gguf(path: Path) -> GGUFFile:
    """Map the file and parse its header. The result is shared as long as it is held somewhere.

    Raises:
      CheckpointError: it is no whole little-endian GGUF file
      ConversionError: it has tensors of a type that gguf does not know
    """
    if not path.is_file():
        found = "is a directory, not a GGUF file" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {found}", "Check the path")
    status = path.stat()
    key = (path.resolve(), status.st_ino, status.st_size, status.st_mtime_ns)
    if (opened := _opened.get(key)) is not None:
        return opened
    with path.open("rb") as file:
        start = file.read(40)
    if start.startswith(_LFS_POINTER):
        raise CheckpointError(f"{path} is a Git LFS pointer, not a GGUF file", "Run `git lfs pull` there")
    if start[:4] != b"GGUF":
        raise CheckpointError(f"{path} begins with {start[:4]!r}; a GGUF file begins with b'GGUF'", "Check the file")
    opened = _opened[key] = _parse(path, status.st_size)
    return opened


def _parse(path: Path, size: int) -> GGUFFile:
    try:
        # a damaged offset may overflow; the result is checked
        with np.errstate(over="ignore"):
            reader = _Reader(path)
        metadata = {name: _python_value(entry) for name, entry in reader.fields.items()}
        _check_ranges(reader, size)
    except _READER_ERRORS as error:
        if unknown := re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error)):
            raise ConversionError(
                f"{path} has tensors of type number {unknown[1]}, which the installed gguf package does not know",
                "Update gguf, or use a file of another type",
            ) from error
        raise CheckpointError(
            f"{path} is no whole GGUF file: its {size} bytes end early or are damaged ({error})", "Download it again"
        ) from error
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise CheckpointError(f"{path} is big-endian; little-endian GGUF is read", "Convert it with gguf-convert-endian")
    return GGUFFile(reader, metadata)


def _check_ranges(reader: gguf.GGUFReader, size: int) -> None:
    """Raises ValueError unless every tensor has bytes of its own between the header's end and the file's. Padding is no fault."""
    end, before = int(reader.data_offset), "the header"
    for tensor in sorted(reader.tensors, key=lambda tensor: (tensor.data_offset, tensor.n_bytes)):
        if tensor.data_offset < end:
            raise ValueError(f"{tensor.name} begins at byte {tensor.data_offset}, inside {before}")
        end, before = tensor.data_offset + tensor.n_bytes, tensor.name
    if reader.tensors and end > size:
        raise ValueError(f"{before} ends at byte {end}")


def _python_value(entry: gguf.ReaderField) -> Any:
    """A metadata value as Python's; a float32 becomes the shortest decimal that rounds to it (1e-05, not 9.99999974e-06)."""
    value = entry.contents()
    return float(str(np.float32(value))) if entry.types == [gguf.GGUFValueType.FLOAT32] else value
