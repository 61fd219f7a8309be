"""Exact runs in tests: random models of every family, in sizes that kernels take too."""

import importlib

import mlx.core as mx
from families import BASE, FAMILIES, OTHERS, varied


def wide(name, sized=True, **changes):
    """The family's random model. sized: its heads are of 32."""
    module, args = {**FAMILIES, **OTHERS}[name]
    module = importlib.import_module(f"mlx_lm.models.{module}")
    mx.random.seed(3)
    args = {**BASE, "model_type": module.__name__.rpartition(".")[2], **args, **({"head_dim": 32} if sized else {}), **changes}
    return varied(module.Model(module.ModelArgs.from_dict(args)), 3.0)
