"""Drafters in GGUF files as llama.cpp's converter writes them, and as the forks before it did.

Names and keys are those of ggml-org/llama.cpp (its table of architectures, its DFlash loader, its converter's DFlashModel) and of
the forks that wrote "dflash-draft" files. Nothing of the package is used.
"""

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Kind

# HF name -> name in the file, without layers.
_ROOT = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "d2t": "d2t",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}


def gguf_name(name, style):
    """A published tensor's name in a file of llama.cpp ("llama.cpp", "pre-merge") or of a fork ("dflash-draft")."""
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        return f"blk.{layer}.{_LAYER[rest]}"
    if style == "dflash-draft" and name in ("fc.weight", "hidden_norm.weight"):
        return f"dflash_{name}"
    return "hidden_norm.weight" if style == "pre-merge" and name == "hidden_norm.weight" else _ROOT[name]


def write_drafter(path, raw, weights, kind=Kind.F32, style="llama.cpp", leave_out=(), keys=()):
    """Write a GGUF file; returns the weights that it stands for, float32 by published name.

    raw: a config.json with `dflash_config`; weights: published name -> array. Vectors and kernels stay F32, as llama.cpp keeps
    them; `keys` are left out or, as a mapping, replaced.
    """
    arch = "dflash-draft" if style == "dflash-draft" else "dflash"
    writer = gguf.GGUFWriter(path, arch)
    nested = raw["dflash_config"]
    taps = list(nested["target_layer_ids"])
    own = "dflash-draft.dflash." if style == "dflash-draft" else f"{arch}."
    written = {
        f"{arch}.block_count": raw["num_hidden_layers"],
        f"{arch}.context_length": raw["max_position_embeddings"],
        f"{arch}.embedding_length": raw["hidden_size"],
        f"{arch}.feed_forward_length": raw["intermediate_size"],
        f"{arch}.attention.head_count": raw["num_attention_heads"],
        f"{arch}.attention.head_count_kv": raw["num_key_value_heads"],
        f"{arch}.attention.key_length": raw["head_dim"],
        f"{arch}.attention.value_length": raw["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(raw["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(raw["rope_theta"] if "rope_theta" in raw else raw["rope_parameters"]["rope_theta"]),
        f"{own}block_size": nested.get("block_size", raw.get("block_size")),
        **{f"{own}{key}": nested[key] for key in ("conv_kernel_size", "conv_group_size") if key in nested},
        **{f"{own}{key}": nested[key] for key in ("selector_rank", "selector_top_k") if key in nested},
    }
    if "sample_from_anchor" in raw:
        written[f"{own}sample_from_anchor"] = raw["sample_from_anchor"]
    if raw.get("sliding_window") and raw.get("layer_types"):
        written[f"{arch}.attention.sliding_window"] = raw["sliding_window"]
        written[f"{arch}.attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in raw["layer_types"]]
    if style == "llama.cpp":
        # The layer whose input is tapped.
        written |= {"tokenizer.ggml.mask_token_id": nested["mask_token_id"], "dflash.target_layers": [i + 1 for i in taps]}
    elif style == "pre-merge":
        width = raw.get("target_hidden_size", raw["hidden_size"])
        written |= {
            "dflash.mask_token_id": nested["mask_token_id"],
            "dflash.target_layers": taps,
            "dflash.target_hidden_size": width,
        }
    else:
        written |= {f"{own}mask_token_id": nested["mask_token_id"], f"{own}target_layer_ids": taps}
        written[f"{own}n_target_features"] = len(taps) * raw.get("target_hidden_size", raw["hidden_size"])
    for key, value in (written | dict(keys)).items():
        if value is None:
            continue
        add = {bool: writer.add_bool, float: writer.add_float32, list: writer.add_array, str: writer.add_string}
        add.get(type(value), writer.add_uint32)(key, value)
    meant = {}
    for name, value in weights.items():
        if name in leave_out:
            continue
        if name == "d2t":
            meant[name] = np.array(value)
            writer.add_tensor(gguf_name(name, style), meant[name].astype(np.int64), raw_dtype=Kind.I64)
            continue
        data = np.array(value.astype(mx.float32))
        whole = data.ndim == 2 and data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        own_kind = kind if whole else Kind.F32
        packed = data if own_kind == Kind.F32 else gguf.quantize(data, own_kind)
        meant[name] = gguf.dequantize(packed, own_kind).reshape(data.shape)
        writer.add_tensor(gguf_name(name, style), packed, raw_dtype=own_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: mx.array(value) for name, value in meant.items()}
