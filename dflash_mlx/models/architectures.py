"""Which drafter each architecture name of a config.json builds. A new variant is one class and one line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn

from ..config import DrafterConfig
from .dflare import DFlareDrafter
from .dflash2 import DFlash2Drafter
from .dfly import DFlyDrafter
from .domino import DominoDrafter
from .drafter import Drafter
from .dspark import DSparkDrafter
from .dspark_layers import Gemma4DSparkDrafter, Qwen35DSparkDrafter
from .mla import LatentDFlash2Drafter, LatentDominoDrafter, LatentDrafter, LatentDSparkDrafter
from .variants import LagunaDrafter, SinkDrafter, SinkDSparkDrafter

# Architecture as config.json names it: what builds it. Any other is refused by name.
ARCHITECTURES: dict[str, type[Drafter]] = {
    "DFlashDraftModel": Drafter,
    "DFlash2DraftModel": DFlash2Drafter,
    "DSparkDraftModel": DSparkDrafter,
    "Gemma4DSparkModel": Gemma4DSparkDrafter,
    "Qwen35DSparkModel": Qwen35DSparkDrafter,
    "DominoDraftModel": DominoDrafter,
    "DFlareDraftModel": DFlareDrafter,
    "Qwen3DFlyModel": DFlyDrafter,
    "DFlashLagunaForCausalLM": LagunaDrafter,
    "MuseGlimmerAssistantModel": Drafter,
    "": Drafter,
}
# Those with attention sinks or scaled values.
_WITH_SINKS = {Drafter: SinkDrafter, DSparkDrafter: SinkDSparkDrafter}
# Those with latent attention.
_LATENT: dict[type[Drafter], type[Drafter]] = {
    Drafter: LatentDrafter,
    DFlash2Drafter: LatentDFlash2Drafter,
    DSparkDrafter: LatentDSparkDrafter,
    DominoDrafter: LatentDominoDrafter,
}


def not_computed(config: DrafterConfig) -> list[str]:
    """What of a drafter no class here computes, by name: its architecture or its extensions. []: `build_drafter` makes it."""
    return list(config.unsupported) if config.architecture in ARCHITECTURES else [config.architecture]


def build_drafter(config: DrafterConfig, shapes: Mapping[str, Sequence[int]]) -> Drafter:
    """A drafter without its weights, with an embedding, a head and a map of its own where the checkpoint holds them.

    Args:
      shapes: the checkpoint's tensors by bare name; of quantized ones the packed shape.
    """
    kind = ARCHITECTURES[config.architecture]
    if config.kv_lora_rank:
        kind = _LATENT[kind]
    drafter = (_WITH_SINKS[kind] if config.attention_sinks or config.attention_value_scale else kind)(config)
    if "embed_tokens.weight" in shapes:
        drafter.embed_tokens = nn.Embedding(shapes["embed_tokens.weight"][0], config.hidden_size)
    if "lm_head.weight" in shapes:
        drafter.lm_head = nn.Linear(config.hidden_size, shapes["lm_head.weight"][0], bias=False)
    for name in ("predecessor_codebook", "successor_codebook"):
        if shape := shapes.get(f"candidate_selector.{name}.weight"):
            # A quantized one; in floats it has no `.weight`.
            setattr(drafter.candidate_selector, name, nn.Embedding(shape[0], config.selector_rank))
    if "mask_embedding" in shapes:
        drafter.mask_embedding = mx.zeros((config.hidden_size,))
    if isinstance(drafter, DSparkDrafter) and (shape := shapes.get("confidence_head.proj.weight")):
        drafter.add_confidence_head(shape[1], "confidence_head.proj.bias" in shapes)
    if "d2t" in shapes:
        drafter.d2t = mx.zeros((config.draft_vocab_size or shapes["d2t"][0],), dtype=mx.int32)
    return drafter
