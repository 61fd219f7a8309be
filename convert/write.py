"""Writing a converted directory: all of it, or nothing.

Knows files, shards and hashes. Knows no models. Everything is written to a hidden directory beside the destination, which is
renamed at the end. If the conversion ends early (an error, a full disk, Ctrl-C), that directory is removed. The source is only
read. What a killed process could not remove is removed by the next conversion to the same destination.
"""

import glob
import json
import math
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import mlx.core as mx

from dflash_mlx.checkpoint import Checkpoint, sha256_of
from dflash_mlx.errors import ConversionError, one_line
from dflash_mlx.machine import write_atomically
from dflash_mlx.progress import tell

from .finite import is_finite

_MIN_SHARD_BYTES = 16 << 20
_MAX_SHARD_BYTES = 5 << 30


@contextmanager
def staged_directory(destination: Path, source: Checkpoint, *, force: bool) -> Iterator[Path]:
    """A temporary directory that becomes `destination` when the block ends without an error.

    Raises:
      ConversionError: the destination exists (without `force`), is no directory, or touches the source; or it appeared meanwhile.
    """
    destination = Path(os.path.abspath(destination.expanduser()))
    _clear_abandoned(destination)
    _check_destination(destination, source, force)
    made = [p for p in destination.parents if not p.exists()]
    staging = None
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=_hidden(destination, "partial"), dir=destination.parent))
        yield staging
        os.chmod(staging, 0o777 & ~_umask())
        _refuse_existing(destination, force)
        _swap_in(staging, destination)
    except BaseException as error:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        for parent in made:
            # stays if something else has put files into it meanwhile
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError) and not isinstance(error, ConversionError):
            raise ConversionError(
                f"{destination} could not be written: {error.strerror or error}", "Nothing was left behind"
            ) from error
        raise


def _check_destination(destination: Path, source: Checkpoint, force: bool) -> None:
    origin = source.path.resolve() if source.kind != "gguf" else source.path.resolve().parent
    real = destination.resolve()
    if real == origin or origin.is_relative_to(real) or (source.kind != "gguf" and real.is_relative_to(origin)):
        raise ConversionError(
            f"the output {destination} and the source {source.source} contain one another", "Choose another path"
        )
    _refuse_existing(destination, force)


def _refuse_existing(destination: Path, force: bool) -> None:
    """Checked before the work and again at its end: a directory that appeared meanwhile belongs to somebody else."""
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise ConversionError(f"{destination} is a file or a link, not a new directory", "Choose another path")
    if destination.exists() and not force:
        raise ConversionError(f"{destination} exists", "Choose another path, or pass --force to replace it")


def _hidden(destination: Path, role: str) -> str:
    """Beginning of the name of a directory beside the destination, with the process that it belongs to."""
    return f".{destination.name}.{role}-{platform.node()}-{os.getpid()}-"


def _clear_abandoned(destination: Path) -> None:
    """Remove what killed conversions to this destination left on this machine; directories of running processes stay."""
    for role in ("partial", "replaced"):
        begin = _hidden(destination, role).removesuffix(f"{os.getpid()}-")
        for left in sorted(destination.parent.glob(f"{glob.escape(begin)}*")):
            pid = left.name.removeprefix(begin).partition("-")[0]
            if not pid.isdigit() or _lives(int(pid)):
                continue
            if role == "replaced" and not destination.exists() and (left / "old").is_dir():
                # Killed between the two renames: put the old directory back.
                (left / "old").rename(destination)
            shutil.rmtree(left, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _swap_in(staging: Path, destination: Path) -> None:
    """Rename into place; an existing directory is moved aside first and removed only when the new one stands."""
    if not destination.exists():
        staging.rename(destination)
        return
    aside = Path(tempfile.mkdtemp(prefix=_hidden(destination, "replaced"), dir=destination.parent)) / "old"
    destination.rename(aside)
    try:
        staging.rename(destination)
    except BaseException:
        aside.rename(destination)
        raise
    finally:
        shutil.rmtree(aside.parent, ignore_errors=True)


def check_space(directory: Path, needed_bytes: int) -> None:
    """Raises ConversionError when the disk of `directory` has not that many bytes left."""
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise ConversionError(
            f"{directory.parent} has {free / 1e9:.2f} GB of free disk space; {needed_bytes / 1e9:.2f} GB are needed",
            "Free some space",
        )


def write_weights(directory: Path, weights: dict[str, mx.array], largest_source_file_bytes: int) -> list[str]:
    """Write tensors as safetensors shards with an index, one shard in memory at a time; `weights` is emptied.

    A shard is at most half the largest source file (never under 16 MiB): with the source tensors that one shard is made from,
    memory stays below twice that file.
    Raises:
      ConversionError: tensors with NaN or infinite values (float16 overflows), named.
    """
    total, tensors = sum(value.nbytes for value in weights.values()), len(weights)
    check_space(directory, total)
    limit = min(_MAX_SHARD_BYTES, max(_MIN_SHARD_BYTES, largest_source_file_bytes // 2))
    shards: list[list[str]] = [[]]
    size = 0
    for name, value in weights.items():
        if shards[-1] and size + value.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += value.nbytes
    weight_map: dict[str, str] = {}
    files = []
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        part = {name: weights.pop(name) for name in names}
        _check_finite(part, len(weight_map), tensors)
        _save(directory / file, part)
        weight_map |= dict.fromkeys(names, file)
        files.append(file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / "model.safetensors.index.json", index)
    return files


def _save(file: Path, part: dict[str, mx.array]) -> None:
    """Save one shard and check that all of it is there: MLX does not report an incomplete write."""
    try:
        mx.save_safetensors(str(file), part, metadata={"format": "mlx"})
    except RuntimeError as error:
        raise OSError(f"{file.name} could not be written ({one_line(error, None)})") from error
    if file.stat().st_size < sum(value.nbytes for value in part.values()):
        raise OSError(f"{file.name} is cut short; the disk is full or a file size limit was met")


def _check_finite(part: dict[str, mx.array], before: int, total: int) -> None:
    """Compute a shard's tensors, and refuse those that are not finite. `before` of `total` tensors are written already."""
    names = []
    for n, (name, value) in enumerate(part.items(), start=before):
        tell("Converting", n, total, "tensors")
        if not is_finite(value):
            names.append(name)
    if not names:
        return
    listed = f"{', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
    if any(part[name].dtype == mx.float16 for name in names):
        raise ConversionError(
            f"{listed} exceed{'s' if len(names) == 1 else ''} what float16 holds (up to 65504)",
            "Convert with --dtype bfloat16 or float32",
        )
    raise ConversionError(
        f"decoding gave NaN or infinite values in {listed}", "Download the source again, or use another checkpoint"
    )


def write_json(file: Path, value: dict) -> None:
    write_atomically(file, json.dumps(_tag_infinities(value), indent=4, ensure_ascii=False) + "\n")


def _tag_infinities(value):
    """Infinities as transformers writes them, so that the file stays valid JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {k: _tag_infinities(v) for k, v in value.items()}
    return [_tag_infinities(v) for v in value] if isinstance(value, list | tuple) else value


def file_record(file: Path) -> dict:
    """{"bytes": ..., "sha256": ...} of a file."""
    return {"bytes": file.stat().st_size, "sha256": sha256_of([file])}
