"""Finds the parts of any mlx-lm model: the module with its layers, its token embedding, how many positions it has.

Looked for once, when a model gets its `Target`. Knows no family by name.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.nn as nn

from ..errors import TapError


def learned_positions(model: nn.Module) -> int | None:
    """Rows of the position embedding that a model learned, as GPT-2 did; None for RoPE and the like."""
    return getattr(getattr(model, "args", None), "n_positions", None)


def token_embedding(model: nn.Module, *others: nn.Module) -> nn.Module | None:
    """The token embedding of a model and `others` of its modules, without any scale that the model applies; None if it has none.

    A model may have several tables. It is the one with the most rows, apart from learned positions.
    """
    positions = learned_positions(model)
    modules = [m for part in (*others, model) for _, m in part.named_modules()]
    tables = [m for m in modules if isinstance(m, (nn.Embedding, nn.QuantizedEmbedding))]
    return max(tables, key=lambda table: (table.weight.shape[0] != positions, table.weight.shape[0]), default=None)


def find_backbone(modules: dict[str, nn.Module], first: nn.Module, family: str) -> nn.Module:
    """The innermost module that holds the layers and the token embedding: its output is the final normed hidden state.

    The list of layers may be in an inner module that is never called, or whose output is not normed yet.
    """
    owners = [path for path, m in modules.items() if any(isinstance(v, list) and any(x is first for x in v) for v in m.values())]
    if len(owners) != 1 or owners[0] == "":
        raise TapError(
            f"{len(owners)} modules of {family} own its layers; there must be one, inside the model",
            "This model keeps its head and its layers in one module and cannot be tapped",
        )
    embeddings = [path for path, m in modules.items() if isinstance(m, (nn.Embedding, nn.QuantizedEmbedding))]
    outwards = owners[0]
    while outwards:
        if any(path.startswith(f"{outwards}.") for path in embeddings):
            return modules[outwards]
        outwards = outwards.rpartition(".")[0]
    return modules[owners[0]]


def context_length(modules: Iterable[nn.Module]) -> int | None:
    """Positions that the config of the first of these modules with one gives, scaled RoPE included; None if none does."""
    for module in modules:
        for args in (getattr(module, "args", None), getattr(module, "config", None)):
            args = args if isinstance(args, dict) else getattr(args, "__dict__", {})
            for part in (args, args.get("text_config")):
                part = part if isinstance(part, dict) else getattr(part, "__dict__", {})
                if isinstance(length := part.get("max_position_embeddings"), int):
                    scaling = part.get("rope_scaling") or part.get("rope_parameters") or {}
                    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
                    return max(length, int(factor * original)) if factor and original else length
    return None
