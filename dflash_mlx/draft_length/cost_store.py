"""Measured costs on disk: one record a pair and machine, in the cache directory. Knows nothing of how they are measured."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from mlx.utils import tree_flatten

from ..machine import JsonCache, slowed_by, system_identity
from ..version import __version__
from .cost_model import CostModel

# Age at which a measurement is made again.
_STALE_S = 7 * 24 * 3600
# The newest 64 pairs.
_records = JsonCache("cost_models.json", most=64)
_SECONDS = ("plain_s", "draft_s", "inject_s")


def pair_key(models: Sequence[Any], *others: object) -> str:
    """A name for what costs depend on: every parameter's name, shape and type, the chip, the system with its build, and what
    else is given. The host's name is not in it: a Mac that is renamed is the same machine."""
    shapes = [(name, a.shape, str(a.dtype)) for model in models for name, a in tree_flatten(model.parameters())]
    kinds = [type(model).__qualname__ for model in models]
    return hashlib.sha256(repr((__version__, kinds, sorted(shapes), system_identity(), *map(str, others))).encode()).hexdigest()[
        :16
    ]


def load_cost_model(key: str) -> CostModel | None:
    """What an earlier run on this machine measured, if it is recent; None if there is nothing, or the file is damaged.

    None also if it was measured while battery, heat or Low Power Mode slowed the machine, and none of them does now.
    """
    try:
        entry = _records.read()[key]
        if not 0 <= time.time() - entry["saved_at"] < _STALE_S or entry.get("slowed_by") and not slowed_by():
            return None
        verify_s = {int(width): float(seconds) for width, seconds in entry["verify_s"].items()}
        costs = CostModel(*(float(entry[name]) for name in _SECONDS), verify_s, float(entry["cut_s"]))
        numbers = (costs.plain_s, costs.draft_s, costs.inject_s, *verify_s.values())
        right = verify_s and min(verify_s) > 0 and all(0 < n < 3600 for n in numbers) and 0 <= costs.cut_s < 3600
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    costs.keep = partial(save_cost_model, key)
    return costs if right else None


def save_cost_model(key: str, costs: CostModel) -> None:
    """Store costs, and keep the newest others. If the file cannot be written, the next run measures again."""
    costs.keep = partial(save_cost_model, key)
    about = {"saved_at": time.time(), "slowed_by": slowed_by()}
    _records.put(key, {name: getattr(costs, name) for name in (*_SECONDS, "verify_s", "cut_s")} | about)
