"""Kernels of the fused verify step: each file holds one, with its reference in MLX operations, its launch and its contract.

Knows arrays and devices; knows nothing of models' families, caches or the loop. `docs/kernels.md` draws each kernel, and explains
the words of this folder: text, body, candidate, family, plan, question, trial.
`REGISTRY` is the only list of them: the names that users give, the tests, the bench and the docs' lists are made from it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .launch import Form, Kernel


@dataclass(frozen=True)
class Registered:
    """One entry of `REGISTRY`. Importing it imports no kernel.

    Args:
      name: what a user gives in DFLASH_MLX_KERNELS and `--kernels`, and what records call it.
      module: its file in this folder; attributes: its kernels there, first the one that trials compare.
      serves: what it does, in a few words, for lists.
      on: where it can run: "metal", "cuda".
      text: True: a kernel of our own; False: MLX's operations, arranged in another way.
    """

    name: str
    module: str
    serves: str
    attributes: tuple[str, ...] = ("KERNEL",)
    on: tuple[str, ...] = ("metal", "cuda")
    text: bool = True

    def load(self) -> tuple[Kernel | Form, ...]:
        """Its kernels: the one that trials compare, then others that its launch needs."""
        module = importlib.import_module(f"{__name__}.{self.module}")
        return tuple(getattr(module, attribute) for attribute in self.attributes)


REGISTRY: dict[str, Registered] = {
    entry.name: entry
    for entry in (
        Registered("block_qmm", "block_qmm", "quantized products of 1 to 16 rows"),
        Registered("block_qmm_tiles", "block_qmm", "quantized products of 1 to 16 rows in matrix units", ("TILES",)),
        # Asked for by compiled passes, and by exact runs for weights that are not quantized.
        Registered("block_linear", "block_linear", "a product with the norm, sum or gate that stands around it"),
        # Asked for by a drafter's compiled passes.
        Registered("block_heads", "block_heads", "norms, rotation and layout of a drafter's queries, keys and values"),
        Registered("block_gather_qmm", "block_gather_qmm", "quantized products of chosen experts"),
        Registered("accept", "accept", "comparing drafts, counting and laying out what is committed"),
        Registered("head_argmax", "head_argmax", "the head's argmax without logits", ("KERNEL", "REDUCE")),
        Registered("block_attention", "block_attention", "attention of 1 to 16 rows to a long cache", ("KERNEL", "REDUCE")),
        Registered("gated_delta", "gated_delta", "the gated delta rule over 1 to 16 rows, and again over the first of them"),
        Registered("matmul_as_gemv", "small_batch", "float products of 2 to 16 rows", ("PRODUCTS",), ("cuda",), text=False),
        Registered("gqa_folded_attention", "small_batch", "attention of 2 to 16 rows", ("FOLDED",), text=False),
    )
}


def names(on: str | None = None, text: bool | None = None) -> tuple[str, ...]:
    """Names of all kernels, or of those that can run on "metal" or on "cuda"; only texts of ours, or only MLX's operations.

    README counts `names(on="metal", text=True)`.
    """
    entries = REGISTRY.values()
    return tuple(e.name for e in entries if (on is None or on in e.on) and (text is None or text == e.text))


def table() -> str:
    """The list of `docs/kernels.md`, in Markdown."""
    rows = [
        f"| `{e.name}` | {e.serves} | {', '.join(e.on)} | {'own text' if e.text else 'MLX operations'} |"
        for e in REGISTRY.values()
    ]
    return "\n".join(["| name | serves | can run on | made of |", "| --- | --- | --- | --- |", *rows]) + "\n"
