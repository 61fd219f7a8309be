"""A rank's share of a target, by mlx-lm's own `shard`. What cannot be split is refused before a weight is read.

Knows mlx-lm's models as modules with integers on them. Knows no family.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import version

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .checkpoint import Checkpoint
from .ranks import Ranks, RanksError

_VERSION = version("mlx-lm")


def check_files(checkpoint: Checkpoint, ranks: Ranks) -> None:
    """Refuse files that cannot be split, and files that differ from rank 0's in names, shapes or types of tensors.

    Raises:
      RanksError: says which.
    """
    if checkpoint.kind == "gguf":
        raise RanksError(
            f"{checkpoint.source} is a GGUF file, which is read whole before it is shared out",
            "Make an MLX directory of it with dflash-mlx convert, and copy that to all machines",
        )
    text = repr(sorted((name, tuple(t.shape), str(t.dtype)) for name, t in checkpoint.tensors.items()))
    same = {"the digest of the model's tensors": hashlib.sha256(text.encode()).hexdigest()[:16]}
    ranks.agree({**same, "the version of mlx": mx.__version__, "the version of mlx-lm": _VERSION})


def take_share(model: nn.Module, ranks: Ranks, name: str, pipeline: bool = False) -> None:
    """Reduce a model whose weights are not read yet to this rank's share. `ranks_of` then returns the ranks.

    Args:
      name: what the user calls the model. pipeline: take whole layers instead of a share of each.
    Raises:
      RanksError: mlx-lm does not shard it, or its sizes cannot be divided by the number of ranks.
    """
    object.__setattr__(model, "ranks", ranks)
    if pipeline:
        if not hasattr(getattr(model, "model", None), "pipeline"):
            raise RanksError(f"{name} is of a family that mlx-lm {_VERSION} does not pipeline", "Leave --pipeline out")
        model.model.pipeline(ranks.group)
        return
    if not hasattr(model, "shard"):
        raise RanksError(
            f"{name} is a {getattr(model, 'model_type', type(model).__name__)}, which mlx-lm {_VERSION} does not shard",
            "Run it on one machine",
        )
    before = {path: _numbers(module) for path, module in model.named_modules()}
    wholes = {path: array.shape for path, array in tree_flatten(model.parameters())}
    try:
        model.shard(ranks.group)
    except (ValueError, AssertionError, IndexError, ZeroDivisionError) as error:
        heads = _uneven_heads(before, ranks.size)
        raise _uneven(name, heads or f"a size of it does not ({_first_line(error)})", ranks.size) from None
    if heads := _uneven_heads(before, ranks.size, {path: _numbers(module) for path, module in model.named_modules()}):
        raise _uneven(name, heads, ranks.size)
    if not any(wholes.get(path) != array.shape for path, array in tree_flatten(model.parameters())):
        raise RanksError(f"mlx-lm's shard leaves {name} whole", "Run it on one machine")


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks that hold a model's shares; None: it is whole."""
    return getattr(model, "ranks", None)


def _uneven(name: str, what: str, size: int) -> RanksError:
    return RanksError(f"{name} does not divide by {size} ranks: {what}", "Use another number of machines, or one")


def _numbers(module: nn.Module) -> dict[str, int]:
    return {name: value for name, value in vars(module).items() if type(value) is int}


# Words in the attribute names of mlx-lm's classes for numbers of heads that are split.
_HEADS = ("head", "groups")


def _uneven_heads(before: dict[str, dict[str, int]], size: int, after: dict[str, dict[str, int]] | None = None) -> str:
    """Numbers of heads that cannot be divided by `size`, in words; "" if none. after: check only those that `shard` has changed.

    If there are fewer key heads than ranks, they may be repeated, so that each rank has one.
    """
    found: dict[str, int] = {}
    for path, numbers in before.items():
        for name, whole in numbers.items():
            if not any(word in name for word in _HEADS) or "dim" in name or whole < 1:
                continue
            share = None if after is None else after.get(path, {}).get(name, whole)
            if share is None:
                uneven = whole % size
            else:
                uneven = share != whole and share * size != whole and not (share == 1 and size % whole == 0)
            if uneven:
                found.setdefault(name, whole)
    return ", ".join(f"{name} is {whole}" for name, whole in found.items())


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
