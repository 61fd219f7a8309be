"""What is special about a model family, one entry each. Other families need no code in this package.

Knows names only: of model types (config.json's `model_type`) and of mlx-lm's modules. An entry may stand under either.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class FusedExperts:
    """How a family stores [experts, ...] gate and up projections in one tensor.

    - transposed: [E, H, 2I] and [E, I, H] instead of [E, 2I, H] and [E, H, I]
    - interleaved: gate and up alternate instead of following each other
    """

    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class Family:
    """What a family needs beyond what its config and mlx-lm's class say.

    - same_as: the model type of mlx-lm whose text model it is, tensor for tensor
    - implied: keys that transformers has in its code and mlx-lm needs in the config
    - layer_names: transformers' names of layer kinds -> those that mlx-lm's class compares with
    - fused_experts: the layout of its expert tensors, if not [E, 2I, H]
    - activation: the one in mlx-lm's code, if not transformers' default
    - copied_head: its class scales the logits only if it has a head; so a tied model gets a copy of the embedding as head
    - two_head_sizes: its full-attention layers have a head size and a number of key heads of their own
    - differs: what mlx-lm computes differently from transformers, found with reference outputs; such a checkpoint is refused
    """

    same_as: str | None = None
    implied: Mapping[str, Any] = field(default_factory=dict)
    layer_names: Mapping[str, str] = field(default_factory=dict)
    fused_experts: FusedExperts = FusedExperts()
    activation: str | None = None
    copied_head: bool = False
    two_head_sizes: bool = False
    differs: str | None = None


_MAMBA_LAYERS = {"linear_attention": "mamba", "full_attention": "attention"}

FAMILIES: dict[str, Family] = {
    "apertus": Family(implied={"mlp_bias": False, "post_norm": False, "qk_norm": True}),
    "gemma": Family(activation="gelu"),
    "gemma4": Family(two_head_sizes=True),
    "gemma4_text": Family(two_head_sizes=True),
    "gemma4_unified_text": Family(same_as="gemma4_text", two_head_sizes=True),
    "glm_moe_dsa": Family(implied={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}),
    "gpt_bigcode": Family(activation="gelu"),
    "gpt_neox": Family(activation="gelu_pytorch_tanh"),
    "gpt_oss": Family(fused_experts=FusedExperts(transposed=True, interleaved=True)),
    "granitemoehybrid": Family(layer_names=_MAMBA_LAYERS),
    "jamba": Family(
        layer_names=_MAMBA_LAYERS, differs="normalises the expert weights over the chosen experts, transformers over all"
    ),
    "llama4": Family(fused_experts=FusedExperts(transposed=True)),
    "llama4_text": Family(fused_experts=FusedExperts(transposed=True)),
    "longcat_flash": Family(
        implied={
            "attention_method": "MLA",
            "zero_expert_type": "identity",
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
        }
    ),
    "minicpm3": Family(copied_head=True),
    "minimax": Family(differs="has MiniMax-M2's attention, not MiniMax-Text-01's"),
    "minimax_m2": Family(implied={"shared_intermediate_size": 0}),
    "ministral": Family(same_as="mistral"),
    "qwen2_5_vl_text": Family(same_as="qwen2"),
    "qwen2_vl_text": Family(same_as="qwen2"),
    "qwen3_vl_moe": Family(implied={"norm_topk_prob": True}),
    "qwen3_vl_moe_text": Family(same_as="qwen3_moe", implied={"norm_topk_prob": True}),
    "qwen3_vl_text": Family(same_as="qwen3"),
    "solar_open": Family(implied={"first_k_dense_replace": 0, "use_qk_norm": False, "partial_rotary_factor": 1.0}),
    "starcoder2": Family(activation="gelu"),
}


def special(*names: str | None) -> Family:
    """The entry of a family that goes by several names: for each field, the first name that says something about it."""
    entries = [FAMILIES[name] for name in names if name in FAMILIES]
    plain = Family()
    found = {}
    for item in fields(Family):
        usual = getattr(plain, item.name)
        found[item.name] = next((v for e in entries if (v := getattr(e, item.name)) != usual), usual)
    return Family(**found)
