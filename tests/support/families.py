"""Tiny random targets of many mlx-lm families, and drafters that are right, noisy or hopeless for any of them.

Every kind of cache of mlx-lm is here: plain, rotating, chunked, arrays (gated delta, Mamba, RWKV, short convolution, linear
attention), lists of these, caches shared between layers, and MLA's. Windows are 16, so that a run wraps them many times.
"""

import importlib

import mlx.core as mx
import mlx.nn as nn
from kit import greedy_ids, ids_of, raw_config, run
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx import rollback as cache_module
from dflash_mlx.config import DrafterConfig
from dflash_mlx.models.drafter import Drafter
from dflash_mlx.models.target import Target
from dflash_mlx.verify import verify_block

WINDOW = 16
V = 83
BASE = {
    "vocab_size": V,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_MLA = {"q_lora_rank": 20, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16}
_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "n_shared_experts": 1}
_GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
_MAMBA = {"state_size": 10, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True}
_LFM2 = {"norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "full_attn_idxs": [1, 3]}

# name: (module of mlx_lm.models, its arguments beyond the base)
FAMILIES = {
    "llama": ("llama", {}),
    "llama, mixed windows": ("llama", {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8.0}),
    "gemma3": ("gemma3_text", {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "cohere2": (
        "cohere2",
        {"head_dim": 12, "sliding_window": WINDOW, "sliding_window_pattern": 2, "layer_norm_eps": 1e-5, "logit_scale": 1.0},
    ),
    "deepseek_v3": ("deepseek_v3", {**_MLA, **_MOE, "first_k_dense_replace": 1}),
    "deepseek_v32": (
        "deepseek_v32",
        {**_MLA, **_MOE, "first_k_dense_replace": 1, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 12},
    ),
    "kimi_k25": ("kimi_k25", {"text_config": {**BASE, "num_key_value_heads": 4, **_MLA, **_MOE, "first_k_dense_replace": 1}}),
    "qwen3_next": (
        "qwen3_next",
        {
            **_GDN,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [],
            "moe_intermediate_size": 28,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
            "full_attention_interval": 2,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            **_LFM2,
            "block_dim": 48,
            "block_ff_dim": 40,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "mamba": ("mamba", {**_MAMBA, "time_step_rank": 6}),
    "mamba2": (
        "mamba2",
        {
            **_MAMBA,
            "num_heads": 8,
            "head_dim": 12,
            "layer_norm_epsilon": 1e-5,
            "n_groups": 2,
            "time_step_limit": (0.0, 100.0),
            "time_step_rank": 6,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "attention_bias": False,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "mamba_proj_bias": False,
            "ssm_state_size": 10,
            "conv_kernel": 4,
            "n_groups": 2,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
            "hybrid_override_pattern": "M*-M*-",
            "num_hidden_layers": 6,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            "attention_bias": False,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.7,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "shared_intermediate_size": 40,
            "mamba_n_heads": 8,
            "mamba_d_head": 12,
            "mamba_proj_bias": False,
            "mamba_d_state": 10,
            "mamba_d_conv": 4,
            "mamba_n_groups": 2,
            "mamba_conv_bias": True,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {"mamba_d_conv": 4, "mamba_d_head": 12, "mamba_d_ssm": 96, "mamba_d_state": 10, "mamba_n_groups": 2, "mamba_n_heads": 8},
    ),
    "jamba": (
        "jamba",
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 10,
            "mamba_expand": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "rwkv7": (
        "rwkv7",
        {"norm_eps": 1e-5, "a_low_rank_dim": 6, "v_low_rank_dim": 7, "gate_low_rank_dim": 9, "decay_low_rank_dim": 5},
    ),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            "attention_bias": False,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "num_key_value_heads": 1,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "attention"],
        },
    ),
    "baichuan_m1": (
        "baichuan_m1",
        {"sliding_window": WINDOW, "sliding_window_layers": [0, 2], "conv_window": 2},
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            **_MLA,
            "num_key_value_heads": 4,
            "linear_attn_config": {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "kda_layers": [1, 3]},
            "model_max_length": 4096,
            "num_experts": 4,
            "moe_intermediate_size": 28,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
        },
    ),
    "bailing_moe_linear": (
        "bailing_moe_linear",
        {
            "moe_intermediate_size": 28,
            "num_experts": 4,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "layer_group_size": 2,
            "group_norm_size": 2,
            "topk_group": 1,
        },
    ),
    "plamo2": (
        "plamo2",
        {"hidden_size_per_head": 12, "full_attention_idx": [1], "mamba_d_state": 10, "mamba_num_heads": 4},
    ),
    "llama4": (
        "llama4",
        {
            "text_config": {
                **BASE,
                "model_type": "llama4_text",
                "attention_bias": False,
                "attention_chunk_size": WINDOW,
                "interleave_moe_layer_step": 2,
                "intermediate_size_mlp": 44,
                "num_experts_per_tok": 1,
                "num_local_experts": 4,
                "rope_scaling": None,
                "use_qk_norm": True,
                "num_hidden_layers": 5,
            }
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {
            **_GDN,
            "linear_allow_neg_eigval": True,
            "attention_bias": False,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "longcat_flash_ngram": (
        "longcat_flash_ngram",
        {
            **_MLA,
            "ffn_hidden_size": 40,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 28,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "num_layers": 4,
            "routed_scaling_factor": 1.0,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "ngram_vocab_size_ratio": 3,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "global_head_dim": 8,
            "num_kv_shared_layers": 2,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": V,
            "hidden_size_per_layer_input": 6,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": False,
            "final_logit_softcapping": 30.0,
        },
    ),
}

# Families whose caches are of the kinds above: nobody has written a line for any of them. Rows only, in the full tier.
OTHERS = {
    "muse_glimmer": ("muse_glimmer", {"sliding_window": WINDOW}),
    "step3p5": ("step3p5", {"num_attention_groups": 2, "sliding_window": WINDOW}),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            "num_experts_per_tok": 2,
            "hybrid_layer_pattern": [1, 0, 1, 0],
            "moe_layer_freq": [0, 1, 0, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": WINDOW,
            "moe_intermediate_size": 28,
            "n_shared_experts": None,
            "n_routed_experts": 4,
            "routed_scaling_factor": 1.0,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "layernorm_epsilon": 1e-05,
            "swa_rope_theta": 10000.0,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "v_head_dim": 8,
            "swa_head_dim": 8,
            "swa_v_head_dim": 8,
            "partial_rotary_factor": 0.5,
        },
    ),
    "afm7": ("afm7", {"hidden_dim": 48, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2}),
    "bailing_hybrid": (
        "bailing_hybrid",
        {
            **_MLA,
            "moe_intermediate_size": 28,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "layer_group_size": 2,
            "group_norm_size": 2,
            "routed_scaling_factor": 1.0,
        },
    ),
    "minimax": ("minimax", {"num_experts_per_tok": 2, "num_local_experts": 4, "shared_intermediate_size": 20, "rotary_dim": 4}),
    "gpt_oss": (
        "gpt_oss",
        {
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_attention_heads": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("phi3", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "ministral3": (
        "ministral3",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64},
        },
    ),
    "minicpm3": (
        "minicpm3",
        {
            "dim_model_base": 24,
            "q_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "kv_lora_rank": 24,
            "scale_depth": 1.4,
            "scale_emb": 2.0,
            "rope_scaling": {
                "original_max_position_embeddings": 4096,
                "short_factor": [1.0, 1.0, 1.0, 1.0],
                "long_factor": [1.0, 1.0, 1.0, 1.0],
            },
        },
    ),
    "nemotron": ("nemotron", {"hidden_act": "relu2", "norm_eps": 1e-05}),
    "laguna": ("laguna", {"sliding_window": WINDOW}),
    "afmoe": (
        "afmoe",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"], "sliding_window": WINDOW},
    ),
    "olmo3": (
        "olmo3",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
    ),
    "kimi_vl": ("kimi_vl", {"text_config": {**BASE, **_MLA, **_MOE, "num_key_value_heads": 4, "first_k_dense_replace": 1}}),
    "llama4_text": ("llama4_text", {"intermediate_size_mlp": 40, "no_rope_layers": [1, 1, 1, 0], "use_qk_norm": True}),
    "nanochat": ("nanochat", {}),
    "gpt2": ("gpt2", {"n_ctx": 512, "n_embd": 48, "n_head": 4, "n_layer": 4, "n_positions": 512, "layer_norm_epsilon": 1e-05}),
    "glm4": ("glm4", {"attention_bias": False, "partial_rotary_factor": 0.5}),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **_LFM2,
            "moe_intermediate_size": 28,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "num_dense_layers": 1,
        },
    ),
    "gemma": ("gemma", {}),
    "olmo2": ("olmo2", {}),
    "internlm3": ("internlm3", {}),
    "exaone4": ("exaone4", {"rope_scaling": {"rope_type": "default"}, "sliding_window": WINDOW, "sliding_window_pattern": "LG"}),
    "starcoder2": ("starcoder2", {"norm_epsilon": 1e-05}),
    "plamo": ("plamo", {"n_shared_head": 2}),
    # Its mask asks for one row more than its rotating caches hold, and its norm stands outside of the module with the layers.
    "plamo3": ("plamo3", {"window_size": WINDOW, "sliding_window_pattern": 2}),
    "gear": (
        "gear",
        {
            "layer_types": ["conv_mixer", "sliding_attention", "full_attention", "conv_mixer"],
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "kimi_k3": (
        "kimi_k3",
        {
            "text_config": {
                **BASE,
                **_MLA,
                "num_key_value_heads": 4,
                "linear_attn_config": {
                    "num_heads": 4,
                    "head_dim": 8,
                    "short_conv_kernel_size": 4,
                    "kda_layers": [1, 3],
                    "full_attn_layers": [2, 4],
                },
                "attn_res_block_size": 2,
                "num_experts": 4,
                "num_experts_per_token": 2,
                "num_shared_experts": 1,
                "moe_intermediate_size": 28,
                "first_k_dense_replace": 1,
            }
        },
    ),
    "bailing_moe_v3": (
        "bailing_moe_v3",
        {
            **_MLA,
            "moe_intermediate_size": 28,
            "moe_shared_expert_intermediate_size": 28,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "layer_group_size": 2,
        },
    ),
    "minimax_m3_vl": (
        "minimax_m3_vl",
        {
            "text_config": {
                **BASE,
                "model_type": "minimax_m3",
                "dense_intermediate_size": 40,
                "shared_intermediate_size": 28,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "rotary_dim": 4,
                "moe_layer_freq": [0, 1, 1, 1],
                "index_n_heads": 2,
                "index_head_dim": 8,
                "index_block_size": 4,
                "index_topk_blocks": 2,
                "layer_types": ["full_attention", "sparse", "sparse", "full_attention"],
            }
        },
    ),
    "mistral4": (
        "mistral4",
        {
            **_MLA,
            **_MOE,
            "num_key_value_heads": 4,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "topk_group": 1,
            "n_group": 1,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "type": "yarn",
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "nemotron-nas": (
        "nemotron-nas",
        {
            "block_configs": [
                {
                    "attention": {"no_op": kind == "none", "replace_with_linear": kind == "linear", "n_heads_in_group": 2},
                    "ffn": {"no_op": kind == "linear", "replace_with_linear": False, "ffn_mult": 1.0},
                }
                for kind in ("full", "none", "linear", "full")
            ]
        },
    ),
    "hunyuan": (
        "hunyuan",
        {
            "attention_bias": False,
            "moe_topk": 2,
            "num_experts": 4,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "use_qk_norm": True,
            "use_cla": True,
            "cla_share_factor": 2,
            "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        },
    ),
    "spark2_5": (
        "spark2_5",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_theta": 10000.0, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 5000.0, "rope_type": "default"},
            },
        },
    ),
    "openelm": (
        "openelm",
        {
            "num_transformer_layers": 4,
            "model_dim": 48,
            "ffn_dim_divisor": 8,
            "num_query_heads": [4] * 4,
            "num_kv_heads": [2] * 4,
            "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
        },
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {
            "text_config": {
                **BASE,
                **_GDN,
                "model_type": "qwen3_5_moe_text",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "shared_expert_intermediate_size": 20,
                "moe_intermediate_size": 28,
                "full_attention_interval": 2,
            }
        },
    ),
    "cohere": ("cohere", {"head_dim": 12, "layer_norm_eps": 1e-05}),
}


def family(name, seed=3, factor=3.0):
    """A random model of a family, float32, its matrices scaled up so that its tokens vary."""
    module, args = {**FAMILIES, **OTHERS}[name]
    module = importlib.import_module(f"mlx_lm.models.{module}")
    mx.random.seed(seed)
    args = {**BASE, "model_type": module.__name__.rpartition(".")[2], **args}
    return varied(module.Model(module.ModelArgs.from_dict(args)), factor)


def varied(model, factor):
    """Matrices times `factor`; what a model begins with as zeros (RWKV's mixing, biases) gets values too: it hides faults."""

    def vary(a):
        if a.ndim > 1 and a.shape[-1] > 1:
            a = a * factor
        return mx.random.normal(a.shape) * 0.3 if mx.all(a == 0).item() else a

    model.update(tree_map(vary, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


class Known(Drafter):
    """Drafts a known line where `right(position)` says so and another token elsewhere; its context is not looked at."""

    right = staticmethod(lambda position: True)

    def draft(self, anchor, features, cache, start, block_size):
        self.inject(features, cache, start)
        at = start + features.shape[1]
        known = [*self._line[at + 1 : at + block_size], *[0] * block_size][: block_size - 1]
        return mx.array([[t if self.right(at + 1 + i) else (t + 1) % 50 for i, t in enumerate(known)]], dtype=mx.int32)

    def draft_with_confidence(self, anchor, features, cache, start, block_size, *noise, n=None, accelerator=None):
        drafted = self.draft(anchor, features, cache, start, block_size)[:, :n]
        return drafted, mx.full(drafted.shape, 0.5)


RIGHT = {
    "oracle": lambda position: True,
    "noisy": lambda position: (position * 7919) % 10 > 2,
    "hopeless": lambda position: False,
}


def model_of(name, **changes):
    """A family's random model with other arguments."""
    module, args = FAMILIES[name]
    module = importlib.import_module(f"mlx_lm.models.{module}")
    mx.random.seed(3)
    args = {**BASE, "model_type": module.__name__.rpartition(".")[2], **args, **changes}
    return varied(module.Model(module.ModelArgs.from_dict(args)), 3.0)


def known_drafter(model, line, quality="noisy", taps=(0, 2), **changes):
    """A random drafter for any target that drafts `line` as well as `quality` says."""
    token = mx.zeros((1, 1), dtype=mx.int32)
    target = Target(model, taps)
    features = target(token).features
    width = features.shape[-1] // len(taps)
    raw = raw_config(target.embed(token).shape[-1], target.vocabulary, taps, target_hidden_size=width, **changes)
    drafter = Known(DrafterConfig.from_dict(raw))
    drafter._line, drafter.right = list(line), RIGHT[quality]
    mx.eval(drafter.parameters())
    return drafter.bind(target.embed, target.head, model)


def greedy_line(model, prompt, n, **options):
    return [*prompt, *greedy_ids(model, prompt, n, **options)]


def one_at_a_time(model, line, start, cache=None):
    """Logits [T - start, V] of mlx-lm's own passes over single rows, after the first `start` tokens in one pass."""
    cache = make_prompt_cache(model) if cache is None else cache
    model(mx.array([line[:start]]), cache=cache)
    rows = [model(mx.array([[token]]), cache=cache)[0, -1] for token in line[start:]]
    mx.eval(rows)
    return mx.stack(rows)


def in_blocks(model, line, start, plan, cache=None):
    """The same logits from passes over blocks. `plan`: (rows of the block, rows of it that are kept) again and again; rows that
    are not kept hold other tokens than the line. A round that keeps none was interrupted."""
    cache = make_prompt_cache(model) if cache is None else cache
    target = Target(model, (0,))
    target(mx.array([line[:start]]), cache)
    at, rows, i = start, [], 0
    while at < len(line):
        size, keep = plan[i % len(plan)]
        keep, i = min(keep, len(line) - at), i + 1
        block = [*line[at : at + keep], *((t + 1) % 50 for t in [*line[at + keep : at + size], *[7] * size])][:size]
        point = cache_module.rollback_point(cache, at)
        hidden = verify_block(target, mx.array(block[:1]), mx.array([block[1:]], dtype=mx.int32), cache, point).hidden
        rows.append(target.head(hidden)[0, :keep])
        cache_module.rollback(cache, point, at + keep)
        mx.eval(rows[-1])
        at += keep
    return mx.concatenate(rows)


# Rounds of all depths, several of them one row; the sum is no divisor of the window.
PLAN = [(5, 2), (3, 3), (1, 1), (8, 1), (1, 1), (1, 1), (4, 0), (16, 11), (2, 1), (1, 0), (5, 5), (20, 3)]


def error(got, expected):
    """Largest difference relative to the largest logit."""
    return (mx.abs(got - expected).max() / mx.abs(expected).max()).item()


def some_line(n, vocab=V):
    return [(i * i * 31 + i * 17 + 5) % vocab for i in range(n)]


# The noisy drafter's rounds end at every depth of every block. The other two's are all alike: of the hopeless one the most rows
# are taken back, as many as a window holds.
EVERY = (("noisy", 2), ("noisy", 5), ("noisy", 16), ("oracle", 5), ("hopeless", 16))
NOISY = (("noisy", 5),)


def agree(model, line, n_prompt, runs=EVERY, **options):
    """Every (drafter, block size) of `runs` whose ids are not the line's."""
    wrong, prompt = [], line[:n_prompt]
    for quality, block in runs:
        got = run(model, known_drafter(model, line, quality), prompt, len(line) - n_prompt, block_size=block, **options)
        if ids_of(got) != line[n_prompt:]:
            wrong.append((quality, block))
        lengths = got[-1].stats.acceptance_lengths
        if options:
            # A block is cut where a quantized cache begins.
            continue
        # The oracle is always right and the hopeless one never, so each run is what it claims to be.
        if quality == "oracle" and any(n != block for n in lengths[:-1]) or quality == "hopeless" and max(lengths) > 1:
            wrong.append((quality, block, lengths))
    return wrong


class Recorder(Known):
    """Drafts as a random drafter does, writes that down, and hands on the known line, so that rounds of all depths follow."""

    def draft(self, anchor, features, cache, start, block_size):
        at = start + features.shape[1]
        drafted = Drafter.draft(self, anchor, features, cache, start, block_size)
        self.drafted[at] = drafted[0].tolist()
        known = [*self._line[at + 1 : at + block_size], *[0] * block_size][: block_size - 1]
        return mx.array([[t if self.right(at + 1 + i) else (t + 1) % 50 for i, t in enumerate(known)]], dtype=mx.int32)


def quantize(model, bits):
    """Every matrix whose rows have a multiple of 32 columns; the tiny ones of other sizes stay."""

    def can(_, module):
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

    nn.quantize(model, 32, bits, class_predicate=can)
    mx.eval(model.parameters())
