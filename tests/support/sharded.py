"""Tiny targets of every family that mlx-lm shards, whose heads and vocabulary divide by 2 and by 3."""

import importlib
import json
import shutil
from dataclasses import asdict

import mlx.core as mx
from families import BASE, FAMILIES, OTHERS, varied
from kit import TINY
from mlx.utils import tree_flatten

SIXES = {"vocab_size": 66, "hidden_size": 48, "intermediate_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}
# What divides by 6 wherever a family has it.
_SIZES = {
    **SIXES,
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "dense_intermediate_size": 48,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 6,
    "index_n_heads": 6,
    "num_attention_groups": 6,
    "num_heads": 6,
}
# Families that mlx-lm shards and tests/support/families.py has not got, has under another name, or leaves sizes of as they are.
_MLA = {"q_lora_rank": 20, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16}
_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24}
_ONES = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "first_k_dense_replace": 1}
MORE = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "moe_intermediate_size": 24,
        },
    ),
    "qwen3_5": (
        "qwen3_5",
        {"text_config": {**OTHERS["qwen3_5_moe"][1]["text_config"], "num_experts": 0, "model_type": "qwen3_5_text"}},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **_MLA,
            **_MOE,
            **_ONES,
            "scoring_func": "softmax",
            "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {**_MOE, **_ONES, "use_qk_norm": True, "attention_bias": False, "partial_rotary_factor": 0.5, "rope_scaling": None},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**_MLA, **_MOE, **_ONES, "partial_rotary_factor": 1.0}),
    "exaone_moe": (
        "exaone_moe",
        {
            **_ONES,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 24,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "is_moe_layer": [False, True, True, True],
        },
    ),
    "step3p5": (
        "step3p5",
        {
            **{**FAMILIES, **OTHERS}["step3p5"][1],
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_intermediate_size": 24,
            "share_expert_dim": 24,
        },
    ),
    "iquestloopcoder": ("iquestloopcoder", {}),
    "longcat_flash": (
        "longcat_flash",
        {name: v for name, v in FAMILIES["longcat_flash_ngram"][1].items() if "ngram" not in name}
        | {"attention_method": "MLA", "zero_expert_type": "identity", "attention_bias": False},
    ),
}
# What has no drafter on one machine either (each family's own reason), or cannot be made small here.
LEFT_OUT = ("iquestloopcoder",)


def _sized(args):
    sized = {name: _sized(v) if isinstance(v, dict) else _SIZES.get(name, v) for name, v in args.items()}
    if isinstance(args.get("text_config"), dict):
        sized["text_config"]["vocab_size"] = 66
    return sized


def sharded_families():
    """Names of the families whose models mlx-lm shards, of those that can be made here."""
    everything = {**FAMILIES, **OTHERS, **MORE}
    found = []
    for name, (module, _) in everything.items():
        if hasattr(importlib.import_module(f"mlx_lm.models.{module}").Model, "shard") and name not in LEFT_OUT:
            found.append(name)
    return found


def sharded_family(name, seed=3, factor=3.0, layers=None, **sizes):
    """A random whole model of a family, float32, whose sizes divide by 6. sizes: others than these."""
    module, args = {**FAMILIES, **OTHERS, **MORE}[name]
    module = importlib.import_module(f"mlx_lm.models.{module}")
    mx.random.seed(seed)
    args = _sized({**BASE, **SIXES, "model_type": module.__name__.rpartition(".")[2], **args}) | sizes
    if layers is not None:
        args["num_hidden_layers"] = layers
    return varied(module.Model(module.ModelArgs.from_dict(args)), factor)


def saved_family(folder, name):
    """Such a model with the built-in pair's tokenizer, as files in a folder."""
    model = sharded_family(name, vocab_size=1536)
    for file in (TINY / "target").glob("tokenizer*"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(asdict(model.args)))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return str(folder)
