"""The models of `bench/ledger.py`: published configs, each with its source, as modules whose weights are never evaluated.

A config holds what decides shapes. Nothing in it is made up: where a part could not be found, the source says so.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from dflash_mlx.config import DrafterConfig
from dflash_mlx.models.architectures import build_drafter
from dflash_mlx.models.drafter import Drafter
from dflash_mlx.models.target import Target

CONFIGS = Path(__file__).parent / "ledger_configs.json"


@dataclass(frozen=True)
class Published:
    """name; target and drafter: configs; sources: where each was read; note: what of it was not."""

    name: str
    target: dict[str, Any]
    drafter: dict[str, Any]
    sources: dict[str, str]


def published() -> dict[str, Published]:
    return {name: Published(name, **entry) for name, entry in json.loads(CONFIGS.read_text()).items()}


def build(of: Published, bits: int = 4, dtype: mx.Dtype = mx.bfloat16) -> Drafter:
    """Target and drafter with weights of the true shapes and types, which nobody has evaluated.

    As a Mac holds them: the target as mlx-lm's converter quantizes it, the drafter's float layers in 4 bits.
    """
    module = importlib.import_module(f"mlx_lm.models.{of.target['model_type']}")
    with _no_random_numbers():
        model = module.Model(module.ModelArgs.from_dict(of.target))
        drafter = build_drafter(DrafterConfig.from_dict(of.drafter), {})
    for part in (model, drafter):
        part.set_dtype(dtype)
    if bits < 16:
        # Not mlx-lm's quantize_model, which prints: the same choice of layers.
        choice = getattr(model, "quant_predicate", None) or (lambda path, layer: True)
        nn.quantize(model, 64, bits, class_predicate=lambda p, m: hasattr(m, "to_quantized") and choice(p, m))
        nn.quantize(drafter, 64, 4)
    for part in (model, drafter):
        _forget_values(part)
        part.eval()
    target = Target(model)
    return drafter.bind(target.embed, target.head, model)


@contextlib.contextmanager
def _no_random_numbers() -> Iterator[None]:
    """Layers are made of zeros: nothing is drawn, and the state of MLX's random numbers stays as it is."""
    names = ("uniform", "normal")
    before = {name: getattr(mx.random, name) for name in names}
    try:
        for name in names:
            setattr(mx.random, name, lambda *_, shape=(), dtype=mx.float32, **__: mx.zeros(shape, dtype))
        yield
    finally:
        for name, function in before.items():
            setattr(mx.random, name, function)


def _forget_values(module: nn.Module) -> None:
    """Every array as zeros of its shape and type: what would compute it is let go of."""
    module.update(tree_unflatten([(k, mx.zeros(a.shape, a.dtype)) for k, a in tree_flatten(module.parameters())]))
    # Small tables that are no parameters, as of rotary positions: a run has them evaluated.
    mx.eval(
        [a for _, m in module.named_modules() for k, a in [*vars(m).items(), *m.items()] if k[0] == "_" and type(a) is mx.array]
    )
