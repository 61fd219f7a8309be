"""Prompt caches in files: mlx-lm's format, and a directory of prefixes that outlive the process that computed them.

Knows cache classes, weights and files. Knows no prompts' texts, no HTTP and no command line.

A directory holds one file a prefix, readable by the user alone and usable by `generate --prompt-cache-file` too:

    KEY-TOKENS-BYTES.safetensors    three times 16 hexadecimal digits: of the weights and settings that it belongs to, of its
                                    tokens, and of the file's own bytes

Files of any other name are never touched. Several processes may use one directory.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import __version__ as mlx_lm_version
from mlx_lm.models import cache as mlx_lm_cache
from safetensors import SafetensorError, safe_open

from .checkpoint import sha256_of
from .errors import CacheError, DFlashError, one_line
from .machine import FileWriteError, size_text, write_atomically
from .prompt_cache import PairCache, can_trim_prompt_cache, is_pair_cache
from .rollback import leaves

_log = logging.getLogger("dflash_mlx.prompt_files")
# Of what a file holds beside mlx-lm's own format; another one is another key.
_VERSION = 1
# Words of an array that are mixed at a time: 256 MB.
_WORDS = 1 << 26
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{16})\.safetensors")
# What a write that was killed leaves behind, and its age at which it is taken away: a living one changes all the time.
_LEFT, _LEFT_S = re.compile(r"\.[0-9a-f]{16}-.*\.safetensors"), 600
_BROKEN = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError, SafetensorError)


def read_cache_file(path: Path) -> tuple[list[Any], dict[str, str], int]:
    """A prompt cache in mlx-lm's format: entries, metadata, and the tokens that it holds. All of it is read.

    Raises:
      OSError: it cannot be read. CacheError: it is no prompt cache; the problem begins with "no prompt cache".
    """
    path.stat()
    try:
        entries, metadata = mlx_lm_cache.load_prompt_cache(str(path), return_metadata=True)
        mx.eval([entry.state for entry in entries])
        if is_pair_cache(entries):
            rows = len(PairCache.read(entries).ids)
        else:
            rows = max(getattr(entry, "offset", 0) for entry in leaves(entries))
    except _BROKEN as error:
        if isinstance(error, DFlashError):
            raise
        raise CacheError(f"no prompt cache: {one_line(error)}", "mlx_lm.cache_prompt makes one") from None
    return entries, metadata if isinstance(metadata, dict) else {}, rows


def models_key(models: Iterable[nn.Module], *about: object) -> str:
    """Which weights these are, in which number types, and what else their caches depend on: 16 hexadecimal digits.

    Every array is read, as it is in memory: what was cast, quantized or put over it by an adapter is another model. On a CPU by
    SHA-256; on a GPU by `array_sums`, a pass over its memory where a host would take a second for each GB or two.
    """
    on_host = _on_host()
    mix = None if on_host else mx.compile(mixed, shapeless=True)
    digest = hashlib.sha256(repr((_VERSION, mlx_lm_version, *about)).encode())
    for model in models:
        # A rotation's base or a window changes no weight.
        config = re.sub(r" at 0x[0-9a-f]+", "", repr((type(model).__qualname__, getattr(model, "args", None))))
        digest.update(config.encode())
        for path, module in sorted(model.named_modules(), key=lambda item: item[0]):
            for name, value in _values(module):
                if isinstance(value, mx.array):
                    digest.update(repr((path, name, value.shape, str(value.dtype))).encode())
                    if value.size:
                        data = value.reshape(-1).view(mx.uint8)
                        digest.update(memoryview(data if on_host else array_sums(data, mix)))
                else:
                    digest.update(repr((path, name, value)).encode())
    if not on_host:
        mx.clear_cache()
    return digest.hexdigest()[:16]


def _on_host() -> bool:
    return mx.default_device() == mx.cpu


def mixed(words: mx.array, places: mx.array, seed: mx.array) -> mx.array:
    """Words [N] mixed with their places [N], all uint32: one to one in each word. Source: the finalizer of MurmurHash3."""
    golden, first, second = (mx.array(value, mx.uint32) for value in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
    x = words ^ (places * golden + seed)
    x = (x ^ (x >> 16)) * first
    x = (x ^ (x >> 13)) * second
    return x ^ (x >> 16)


def array_sums(data: mx.array, mix: Callable[..., mx.array] = mixed) -> mx.array:
    """64 bits [2] uint32 that tell bytes [N] of one length apart: two sums of their words, each mixed with its place."""
    words = (mx.pad(data, (0, -data.size % 4)) if data.size % 4 else data).view(mx.uint32)
    sums = mx.zeros((2,), mx.uint32)
    for first in range(0, words.size, _WORDS):
        part = words[first : first + _WORDS]
        places = mx.arange(first, first + part.size, dtype=mx.uint32)
        sums = sums + mx.stack([mix(part, places, mx.array(seed, mx.uint32)).sum() for seed in (1, 2)])
        # What it makes on the way is as large as a part.
        mx.eval(sums)
    return sums


def _values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's own arrays, also those that are no parameters, and its numbers and texts (a LoRA layer's scale)."""
    for name, value in sorted({**vars(module), **module}.items()):
        for inner, leaf in tree_flatten(value, prefix=f".{name}", is_leaf=lambda x: isinstance(x, nn.Module)):
            if isinstance(leaf, mx.array) or (isinstance(leaf, (int, float, str)) and not name.startswith("_")):
                yield inner, leaf


@dataclass(frozen=True)
class PrefixFile:
    """One prefix in a file. ids: its tokens, [S] int32; kind: mlx-lm's, as in `LRUPromptCache`; can_cut: whether fewer of them
    can be used."""

    path: Path
    ids: np.ndarray
    kind: str
    can_cut: bool

    def shared(self, tokens: np.ndarray) -> int:
        """How many of these tokens [N] it can spare a run."""
        n = min(len(self.ids), len(tokens))
        differs = np.flatnonzero(self.ids[:n] != tokens[:n])
        same = int(differs[0]) if len(differs) else n
        return same if self.can_cut or same == len(self.ids) else 0


class PrefixFiles:
    """The prefixes in a directory that belong to one key. What cannot be read or written costs a line in the log, no answer.

    Args:
      directory: made if it is not there, for this user alone; limit_bytes: of all prefixes in it, also those of other models:
        beyond it the ones that were used longest ago go.
    Raises:
      CacheError: the directory cannot be made or written.
    """

    def __init__(self, directory: str | Path, limit_bytes: int):
        self.directory, self.limit_bytes = Path(directory).expanduser(), limit_bytes
        self.key = self.model = ""
        self._known: dict[str, PrefixFile | None] = {}
        # By their tokens' digits: written here, or not to be tried again.
        self._settled: set[str] = set()
        self._failing = False
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self.directory / f".probe-{os.getpid()}", b"")
            (self.directory / f".probe-{os.getpid()}").unlink()
        except OSError as error:
            reason = getattr(error.__cause__ or error, "strerror", None) or error
            problem = f"the directory {self.directory} for prompt caches cannot be used: {reason}"
            raise CacheError(problem, "Name one that can be written") from None
        self._take_away_left_ones()

    def belong_to(self, model: str, key: str) -> None:
        """Settle whose prefixes these are: the target's name, and `models_key`."""
        self.model, self.key = model, key
        self._known.clear()
        self._settled.clear()

    def _listing(self) -> list[os.DirEntry]:
        """The prefixes in the directory, of every key."""
        try:
            with os.scandir(self.directory) as entries:
                return [entry for entry in entries if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)]
        except OSError:
            return []

    def _take_away_left_ones(self) -> None:
        for path in self.directory.glob(".*.safetensors"):
            with suppress(OSError):
                if _LEFT.fullmatch(path.name) and time.time() - path.stat().st_mtime > _LEFT_S:
                    path.unlink()

    def prefixes(self) -> list[PrefixFile]:
        """Those of this key, also what other processes have written by now."""
        names = {entry.name for entry in self._listing() if entry.name.startswith(f"{self.key}-")}
        for name in names - self._known.keys():
            self._known[name] = self._header(self.directory / name)
        self._known = {name: file for name, file in self._known.items() if name in names}
        return [file for file in self._known.values() if file is not None]

    def _header(self, path: Path) -> PrefixFile | None:
        try:
            with safe_open(path, "np") as file:
                said = file.metadata() or {}
            ids = np.frombuffer(base64.b64decode(said["0.tokens"], validate=True), dtype="<i4")
            kind, cut = said["0.kind"], said["0.can_cut"]
            if said["0.key"] != self.key or kind not in ("system", "user", "assistant") or not len(ids):
                raise ValueError("it says another model or no tokens")
        except (OSError, *_BROKEN) as error:
            return self._unread(path, error)
        return PrefixFile(path, ids, kind, cut == "yes")

    def _unread(self, path: Path, reason: object) -> None:
        """Say once that a file is not used."""
        self._known[path.name] = None
        if path.exists():
            _log.warning("%s is not used: %s", path, one_line(reason))

    def find(self, tokens: Sequence[int], held: int) -> PrefixFile | None:
        """The file that spares a run most of these tokens; None where none spares more than `held`."""
        wanted = np.array(tokens, dtype=np.int32)
        best = max(self.prefixes(), key=lambda file: (file.shared(wanted), -len(file.ids)), default=None)
        return best if best is not None and best.shared(wanted) > held else None

    def load(self, file: PrefixFile) -> list[Any] | None:
        """The cache in a file; None, and a line in the log, where it is damaged or gone."""
        try:
            digits = _NAME.fullmatch(file.path.name)[3]
            if not sha256_of([file.path]).startswith(digits):
                raise CacheError("its bytes are not those that were written", "Delete it")
            entries, _, _ = read_cache_file(file.path)
        except (OSError, CacheError) as error:
            return self._unread(file.path, getattr(error, "problem", error))
        with suppress(OSError):
            os.utime(file.path)
        return entries

    def lacks(self, ids: Sequence[int]) -> bool:
        """Whether a prefix is to be written yet."""
        tokens = _digits(ids)
        return tokens not in self._settled and not any(name.split("-")[1] == tokens for name in self._known)

    def write(self, ids: Sequence[int], entries: list[Any], kind: str) -> bool:
        """Write a prefix, aside and renamed, then take away what it stands for and what the limit has no room for.

        Returns: whether it was written. It is tried once: a full disk costs one line.
        """
        tokens, size = _digits(ids), sum(entry.nbytes for entry in entries)
        self._settled.add(tokens)
        why = _unkept(entries) or (f"it takes {size_text(size)}, more than the limit" if size > self.limit_bytes else None)
        if why is None and size > (free := shutil.disk_usage(self.directory).free):
            why = f"it takes {size_text(size)} and the disk has {size_text(free)}"
        can_cut = can_trim_prompt_cache(entries)
        metadata = {"key": self.key, "model": self.model, "kind": kind, "can_cut": "yes" if can_cut else "no"}
        metadata["tokens"] = base64.b64encode(np.array(ids, dtype="<i4").tobytes()).decode()

        def save(part: Path) -> Path:
            mlx_lm_cache.save_prompt_cache(str(part), entries, metadata)
            return self.directory / f"{self.key}-{tokens}-{sha256_of([part])[:16]}.safetensors"

        try:
            if why is None:
                write_atomically(self.directory / f"{self.key}-{tokens}.safetensors", save, mode=0o600)
        except FileWriteError as error:
            why = error.problem
        if why is not None:
            if not self._failing:
                _log.warning("a prompt of %d tokens is not kept in %s: %s", len(ids), self.directory, why)
            self._failing = True
            return False
        self._failing = False
        self._make_room(np.array(ids, dtype=np.int32) if can_cut else None)
        return True

    def _make_room(self, ids: np.ndarray | None) -> None:
        """Take away shorter prefixes that these tokens, which can be cut, stand for; then what was used longest ago."""
        for file in self.prefixes() if ids is not None else ():
            if file.can_cut and len(file.ids) < len(ids) and file.shared(ids) == len(file.ids):
                file.path.unlink(missing_ok=True)
        stats = []
        for entry in self._listing():
            with suppress(OSError):
                stats.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
        total = sum(size for _, size, _ in stats)
        for _, size, path in sorted(stats):
            if total <= self.limit_bytes:
                break
            with suppress(OSError):
                os.unlink(path)
            total -= size


def _digits(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.array(ids, dtype="<i4").tobytes()).hexdigest()[:16]


def _unkept(entries: list[Any]) -> str | None:
    """Why mlx-lm's format cannot hold these entries; None: it can."""
    odd = {type(e).__name__ for e in leaves(entries) if getattr(mlx_lm_cache, type(e).__name__, None) is not type(e)}
    return f"mlx-lm's format does not hold {', '.join(sorted(odd))}" if odd else None
