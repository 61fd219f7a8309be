"""Checks that a source's weights are finite: one NaN or infinity makes every logit NaN, and comparisons with NaN say nothing.

Knows the tensors of a checkpoint by their names in the files. Reads them one at a time and keeps none.
"""

from collections.abc import Collection, Iterator

import mlx.core as mx

from dflash_mlx.checkpoint import Checkpoint
from dflash_mlx.errors import CheckpointError
from dflash_mlx.progress import tell

_MOST_NAMES = 8


def require_finite(checkpoint: Checkpoint, unused: Collection[str] = ()) -> None:
    """Raises CheckpointError naming every tensor, but the unused ones, that holds NaN or infinite values."""
    found, total = [], len(checkpoint.tensors)
    for n, (name, value) in enumerate(_parts(checkpoint)):
        tell(f"Checking {checkpoint.source}", min(n, total), total, "tensors")
        if name not in unused and not is_finite(value):
            found.append(name)
    if found:
        more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
        raise CheckpointError(
            f"{len(found)} tensor{'s' if len(found) > 1 else ''} of {checkpoint.source} "
            f"{'have' if len(found) > 1 else 'has'} NaN or infinite values: {', '.join(found[:_MOST_NAMES])}{more}",
            "Download the files again, or use another checkpoint",
        )


def is_finite(value: mx.array) -> bool:
    """Whether no element is NaN or infinite; integers are finite."""
    return not mx.issubdtype(value.dtype, mx.floating) or mx.all(mx.isfinite(value)).item()


def _parts(checkpoint: Checkpoint) -> Iterator[tuple[str, mx.array]]:
    if checkpoint.kind == "gguf" and checkpoint.role == "drafter":
        from .gguf.drafter import read_drafter_gguf

        yield from read_drafter_gguf(checkpoint.gguf, checkpoint.source)[1].items()
        return
    if checkpoint.kind == "gguf":
        from .gguf.source import read_gguf

        source = read_gguf(checkpoint.path)
        own = {info.hf_name: info.name for info in source.tensor_infos}
        for name, value in source.tensors():
            for part in (value,) if isinstance(value, mx.array) else (value.scales, value.biases):
                yield own.get(name, name), part
        return
    weights = checkpoint.load()
    for name in list(weights):
        # removed from the dict before it is read, so that it is freed once it was checked
        yield name, weights.pop(name)
