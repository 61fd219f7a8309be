"""Tiny GGUF files for tests, as llama.cpp's converter writes them: names by gguf's own table, rows and norms changed as there."""

import json
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tokenizers import pre_tokenizers

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# Every dimension of its own; 32 divides the inputs of every matrix, so that all of them can be quantized.
_BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-5,
    "vocab_size": 288,
    "max_position_embeddings": 512,
    "rope_theta": 50000.0,
    "tie_word_embeddings": True,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96}

# GGUF architecture -> config of mlx-lm's model
FAMILIES = {
    "llama": _BASE | {"model_type": "llama", "tie_word_embeddings": False},
    "llama with biases": _BASE | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mixtral": _BASE
    | {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    | {"head_dim": 16},
    "smollm3": _BASE | {"model_type": "smollm3", "num_hidden_layers": 5},
    "qwen2": _BASE | {"model_type": "qwen2", "head_dim": 16},
    "qwen3": _BASE | {"model_type": "qwen3", "tie_word_embeddings": False},
    "qwen3moe": _BASE
    | _EXPERTS
    | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    "gemma": _BASE | {"model_type": "gemma"},
    "gemma2": _BASE
    | {"model_type": "gemma2", "query_pre_attn_scalar": 24, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    "gemma3": _BASE
    | {"model_type": "gemma3_text", "query_pre_attn_scalar": 24, "sliding_window": 16, "rope_local_base_freq": 10000.0}
    | {"num_hidden_layers": 7},
}
_ARCH = {"llama with biases": "llama", "mixtral": "llama"}
_MIXTRAL_EXPERTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def byte_level(pre: str, merges: list[str] = (), **keys) -> dict:
    """Metadata of a byte-level vocabulary: three control tokens, a user-defined one, all bytes, merges' results, one unused."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    joined = list(dict.fromkeys(merge.replace(" ", "") for merge in merges))
    tokens = [*CONTROL, "<tool>", *letters, *joined, "[PAD0]"]
    types = [3, 3, 3, 4, *[1] * (len(letters) + len(joined)), 5]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": list(merges),
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    } | keys


def random_weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of mlx-lm's model for this config, scaled so that a tiny model does not merely repeat itself."""
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    if config["model_type"] == "gemma3_text":
        # its sanitizing is what ties the head
        model.sanitize({})
    rng = np.random.default_rng(seed)
    shift = 0.0 if config["model_type"].startswith("gemma") else 1.0
    return {
        name: (
            shift + 0.3 * rng.normal(size=w.shape) if "norm" in name else rng.normal(size=w.shape) * 2 / w.shape[-1] ** 0.5
        ).astype(np.float32)
        for name, w in tree_flatten(model.parameters())
    }


def llama_cpp_permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of its "llama" models: halves of each head interleaved. [rows, ...]."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_model(
    path: Path, family: str, weights: dict[str, np.ndarray], kind: Kind = Kind.F32, config: dict | None = None, **changes
) -> dict[str, np.ndarray]:
    """Write a GGUF file of `weights` (HF names) with matrices of type `kind`; returns the weights that the file stands for.

    changes: `keys` (more metadata), `tokenizer` (metadata), `drop` (tensors left out), `add` (more tensors), `endianess`
    """
    config = config or FAMILIES[family]
    arch = _ARCH.get(family, family)
    writer = gguf.GGUFWriter(path, arch, **{key: changes[key] for key in ("endianess",) if key in changes})
    _write_keys(writer, family, config)
    for key, value in (changes.get("keys") or {}).items():
        _write_value(writer, key, value)
    for key, value in changes.get("tokenizer", byte_level("smollm", ["a b"], **{"ggml.add_bos_token": False})).items():
        _write_value(writer, f"tokenizer.{key}", value)

    # smollm3 is younger than the oldest gguf that the project takes, and has llama's names
    table_arch = "llama" if arch == "smollm3" else arch
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == table_arch)
    table = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    meant = {}
    for name, weight in weights.items():
        gguf_name = table.get_name(_hf_spelling(name), try_suffixes=(".weight", ".bias"))
        assert gguf_name, name
        own = kind if weight.ndim > 1 and ".gate.weight" not in name else Kind.F32
        data = weight if own == Kind.F32 else gguf.quantize(weight, own)
        meant[name] = gguf.dequantize(data, own)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            data = data + np.float32(1)
        if arch in ("llama", "smollm3") and (".q_proj." in name or ".k_proj." in name):
            data = llama_cpp_permute(data, config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"])
        if gguf_name not in changes.get("drop", ()):
            writer.add_tensor(gguf_name, np.ascontiguousarray(data), raw_dtype=own)
    for name, (data, own) in (changes.get("add") or {}).items():
        writer.add_tensor(name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def save_model(directory: Path, config: dict, tensors: dict[str, mx.array]) -> None:
    """A directory that `mlx_lm.utils.load_model` opens."""
    directory.mkdir(exist_ok=True)
    mx.save_safetensors(str(directory / "model.safetensors"), tensors)
    (directory / "config.json").write_text(json.dumps(config))


def _hf_spelling(name: str) -> str:
    """mlx-lm's names of stacked experts -> the ones in gguf's table."""
    if "block_sparse_moe.switch_mlp" in name:
        _, _, layer, _, _, projection, _ = name.split(".")
        return f"layers.{layer}.feed_forward.experts.{_MIXTRAL_EXPERTS[projection]}.weight"
    return name.replace("mlp.switch_mlp", "mlp.experts")


def _write_keys(writer: gguf.GGUFWriter, family: str, config: dict) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if family in ("mixtral", "qwen3moe"):
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if family == "qwen3moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if family == "gemma3":
        writer.add_sliding_window(config["sliding_window"])


def _write_value(writer: gguf.GGUFWriter, key: str, value) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
