"""A drafter in a GGUF file -> a config.json in the published spelling and tensors under their published names.

Knows the keys and names of llama.cpp's converter and of the forks that wrote drafters before it. Knows nothing of block layouts.

    llama.cpp      architecture dflash; keys `dflash.*`; a layer is named by whose INPUT is tapped: one more than its number
    before that    the same architecture with `dflash.target_hidden_size`; a layer is named by its number
    forks          architecture dflash-draft (keys `dflash-draft.dflash.*`) or dspark; a layer is named by its number

Sources: ggml-org/llama.cpp: its converter's DFlashModel, its loader of the architecture (what a missing key means) and its names
of tensors; buun-llama-cpp and PrismML's llama.cpp for the forks' names.
"""

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.errors import ConversionError

from .blocks import GROUP_SIZE, AffineTensor, can_decode, decode
from .header import GGUFFile
from .source import KEYS, rope_scaling

ROOT = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "hidden_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "d2t": "d2t",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "markov_head_a.weight": "markov_head.markov_w1.weight",
    "markov_head_b.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "confidence_head.weight": "confidence_head.proj.weight",
    "confidence_head.bias": "confidence_head.proj.bias",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}
BARE = {"attn_conv_base": "attention_conv.base_kernel", "ffn_conv_base": "mlp_conv.base_kernel"}
# tensors that only training needs, and tables that are computed
_NOT_READ = re.compile(r"^(t2d|rope_freqs\.weight)$")
_KEYS = {
    **KEYS,
    "attention.sliding_window": "sliding_window",
    "target_hidden_size": "target_hidden_size",
    "block_size": "block_size",
    "logit_scale": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "input_embedding_scale",
    "sample_from_anchor": "sample_from_anchor",
}
_REQUIRED = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "block_size")
_NESTED = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_LISTS = ("target_layers", "target_layer_ids", "attention.sliding_window_pattern")
# llama.cpp's defaults for keys that a drafter's file lacks
_DEFAULTS = {"rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": 1e-6}
# Tensors that no drafter class here uses, and what they are.
_OTHER = {"attn_sinks": "attention sinks", "hc_head_fn": "hyper-connections", "log_snr": "log-SNR conditioning"}


def read_drafter_gguf(opened: GGUFFile, source: str) -> tuple[dict[str, Any], dict[str, mx.array], list[str]]:
    """-> (config, tensors by published bare name, notes). Blocks that MLX's affine format holds exactly stay quantized.

    Raises:
      ConversionError: keys or tensors are missing or have no place here, or a type cannot be read; all in one message.
    """
    tensors, faults = {t.name: t for t in opened.reader.tensors}, []
    found, names = _found(opened.metadata, opened.architecture), published_names(opened, faults)
    if unread := sorted({t.tensor_type.name for t in tensors.values() if not can_decode(t.tensor_type) and not _is_int(t)}):
        faults.append(f"tensors of type {', '.join(unread)}, which gguf cannot dequantize")
    shapes = {place: [int(n) for n in reversed(tensors[name].shape)] for name, place in names.items()}
    config = _config(opened, found, shapes, faults)
    if faults:
        raise ConversionError(
            f"{source} is a DFlash drafter in a GGUF file that cannot be read: {'; '.join(faults)}",
            "Give the directory or hub repository with the safetensors that the file was made from",
        )
    weights: dict[str, mx.array] = {}
    packed: dict[str, int] = {}
    for name, place in names.items():
        _put(weights, packed, place, tensors[name], f"{name} in {source}")
    if packed:
        usual = max(packed.values(), key=list(packed.values()).count)
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": usual} | {
            path: {"group_size": GROUP_SIZE, "bits": bits} for path, bits in packed.items() if bits != usual
        }
    types = sorted({t.tensor_type.name for t in tensors.values()})
    return config, weights, [f"read from GGUF ({', '.join(types)})"]


def published_names(opened: GGUFFile, faults: list[str]) -> dict[str, str]:
    """Name in the file -> published bare name, for every tensor that is carried over. Adds those without a place to `faults`."""
    named = ((t.name, _place(t.name.removeprefix("model."), opened.architecture, faults)) for t in opened.reader.tensors)
    return {name: place for name, place in named if place is not None}


def _found(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The file's keys without their prefix: `dflash.`, `dflash-draft.dflash.`, `qwen3.dflash.`."""
    first = re.compile(rf"^(?:{re.escape(architecture)}|dflash|dspark)\.(?:(?:dflash|dspark)\.)?")
    found = {first.sub("", key): value for key, value in metadata.items() if first.match(key)}
    if (mask := metadata.get("tokenizer.ggml.mask_token_id")) is not None:
        found.setdefault("mask_token_id", mask)
    # a value for each layer, all alike
    found |= {key: of[0] for key, of in found.items() if isinstance(of, list) and len(set(of)) == 1 and key not in _LISTS}
    if not found.get("attention.sliding_window"):
        found.pop("attention.sliding_window", None)  # 0 is no window
    return _DEFAULTS | found


def _place(name: str, architecture: str, faults: list[str]) -> str | None:
    """The published name of a tensor; None if it is not carried over or is a fault."""
    bare = re.sub(rf"^(?:{re.escape(architecture)}|dflash|dspark)[._](?=[a-z])", "", name)
    if bare in ROOT:
        return ROOT[bare]
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+?)(?:\.(weight|bias))?", bare):
        layer, part, kind = match.groups()
        if part in BARE:
            return f"layers.{layer}.{BARE[part]}"
        if part in LAYER and kind:
            return f"layers.{layer}.{LAYER[part]}.{kind}"
    if re.match(r"(layers\.\d+\.|norm\.|embed_tokens\.|lm_head\.|candidate_selector\.|markov_head\.|confidence_head\.)", bare):
        return bare  # some keep the published names
    if not _NOT_READ.match(bare):
        what = next((f" ({what})" for part, what in _OTHER.items() if part in bare), "")
        faults.append(f"{name}{what} has no place in the drafters that this version runs")
    return None


def _config(opened: GGUFFile, found: dict[str, Any], shapes: Mapping[str, list[int]], faults: list[str]) -> dict[str, Any]:
    """config.json as a drafter's publisher writes it."""
    arch = opened.architecture
    faults += [f"no key {arch}.{key}" for key in _REQUIRED if found.get(key) is None]
    taps = found.get("target_layers", found.get("target_layer_ids"))
    if not isinstance(taps, list) or not taps:
        faults.append(f"no key {arch}.target_layers")
        taps = []
    elif not all(type(tap) is int for tap in taps):
        faults.append(f"{arch}.target_layers = {taps}, which are no layers")
        taps = []
    if found.get("mask_token_id") is None:
        faults.append("no key tokenizer.ggml.mask_token_id")
    # llama.cpp's own converter names the layer whose input is tapped.
    by_input = "target_layers" in found and arch == "dflash" and "target_hidden_size" not in found
    nested = {
        "mask_token_id": found.get("mask_token_id"),
        "target_layer_ids": [int(i) - by_input for i in taps],
        **{key: found[key] for key in _NESTED if key in found},
    }
    second = "candidate_selector.hidden_projection.weight" in shapes
    first_table = shapes.get("markov_head.markov_w1.weight")
    config = {name: found[key] for key, name in _KEYS.items() if key in found}
    config |= {"architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"], "model_type": "qwen3"}
    config |= {"dflash_config": nested, "attention_bias": "layers.0.self_attn.q_proj.bias" in shapes}
    if first_table:
        # llama.cpp: a file with a Markov head drafts from the anchor's row unless it says otherwise
        config |= {"architectures": ["DSparkDraftModel"], "markov_rank": first_table[1]}
        config |= {"markov_head_type": found.get("markov_head_type", "vanilla")}
        config |= {"sample_from_anchor": bool(found.get("sample_from_anchor", True))}
    if rows := _vocabulary(opened, found, shapes):
        config["vocab_size"] = rows
    if "d2t" in shapes:
        config["draft_vocab_size"] = shapes["d2t"][0]
    if scaling := rope_scaling(opened.reader, arch, found, config, faults):
        config["rope_scaling"] = scaling
    window, pattern = found.get("attention.sliding_window"), found.get("attention.sliding_window_pattern")
    if window:
        if pattern is None or isinstance(pattern, bool):
            pattern = [pattern is not False] * found["block_count"] if type(found.get("block_count")) is int else []
        elif not isinstance(pattern, list):
            faults.append(f"{arch}.attention.sliding_window_pattern = {pattern!r}; which layers slide is read from a list")
            pattern = []
        config["layer_types"] = ["sliding_attention" if slide else "full_attention" for slide in pattern]
        config["use_sliding_window"] = True
    if second or found.get("attention.causal"):
        # DFlash 2's files are all bidirectional; of others one flag for all layers says less than the authors' rule does
        config["is_causal"] = bool(found.get("attention.causal", False))
    return config


def _vocabulary(opened: GGUFFile, found: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> int | None:
    """Size of the target's vocabulary, from the parts of the file that have as many rows."""
    tables = ("markov_head.markov_w1.weight", "candidate_selector.predecessor_codebook", "embed_tokens.weight")
    rows = next((shapes[name][0] for name in tables if name in shapes), None)
    tokens = opened.metadata.get("tokenizer.ggml.tokens")
    return rows or found.get("vocab_size") or (len(tokens) if isinstance(tokens, list) and tokens else None)


def _is_int(tensor: Any) -> bool:
    return np.issubdtype(tensor.data.dtype, np.integer) and tensor.tensor_type.name.startswith("I")


def _put(weights: dict[str, mx.array], packed: dict[str, int], place: str, tensor: Any, what: str) -> None:
    """Add a tensor under its name: integers as int32, blocks as MLX's affine arrays, all else as floats."""
    if _is_int(tensor):
        weights[place] = mx.array(np.ascontiguousarray(tensor.data).astype(np.int32))
        return
    try:
        value, _ = decode(tensor.data, tensor.tensor_type)
    except ValueError as error:
        raise ConversionError(f"{what} is not finite: {error}", "Download the file again") from error
    if isinstance(value, AffineTensor) and place.startswith("confidence_head."):
        value = value.dequantize()
    if isinstance(value, AffineTensor):
        path = place.removesuffix(".weight")
        packed[path] = value.bits
        weights |= {f"{path}.weight": value.weight, f"{path}.scales": value.scales, f"{path}.biases": value.biases}
        return
    shape = [int(n) for n in reversed(tensor.shape)]
    weights[place] = value.reshape(shape) if list(value.shape) != shape else value
