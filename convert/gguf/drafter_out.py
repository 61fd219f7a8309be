"""A drafter -> a GGUF file with llama.cpp's keys and names, which is read again and compared before it counts as written.

Knows for which parts of a drafter llama.cpp has keys and names. Other parts are refused by name, never left out.
Source: as convert/gguf/drafter.py, which has the same names.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Kind

from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import ConversionError

from .drafter import BARE, LAYER, ROOT, read_drafter_gguf
from .header import open_gguf

_FLOATS = {mx.float32: Kind.F32, mx.float16: Kind.F16, mx.bfloat16: Kind.BF16}
_BLOCKS = {8: Kind.Q8_0, 4: Kind.Q4_0}
# If several names can be read, the first is llama.cpp's.
_ROOT_NAMES = {place: name for name, place in reversed(ROOT.items())}
_LAYER_NAMES = {place: name for name, place in (LAYER | BARE).items()}
# Keys that are not needed to compute, or that only say how a config is spelled.
_NOT_COMPARED = ("read_from", "unread", "unsupported", "quantization", "num_target_layers", "architecture")


def write_drafter_gguf(
    path: Path, config: DrafterConfig, weights: Mapping[str, mx.array], bits: int | None, vocabulary: str | Path | None = None
) -> tuple[dict[str, str], list[str]]:
    """Write a drafter and read it back.

    Args:
      weights: published bare name -> array, none of them quantized
      bits: 8 or 4: matrices in Q8_0 or Q4_0, if their rows are whole blocks; None: in the type of `fc.weight`. Vectors, kernels
        and the confidence head are float32, as in llama.cpp
      vocabulary: a GGUF file whose `tokenizer.*` keys are copied: llama.cpp reads no drafter without its target's vocabulary
    Returns:
      - the type in the file of each tensor, by published name
      - notes for the user
    Raises:
      ConversionError: llama.cpp's layout has no place for a part of the drafter, or what is read differs from what was given.
    """
    if bits is not None and bits not in _BLOCKS:
        raise ConversionError(f"--to gguf is given and {bits} bits", "Give 8 (Q8_0) or 4 (Q4_0), or leave -q out")
    faults = [name for name in weights if _name(name) is None]
    if faults:
        raise _no_place(faults)
    kind = _BLOCKS[bits] if bits else _FLOATS.get(weights["fc.weight"].dtype, Kind.F32)
    writer = gguf.GGUFWriter(path, "dflash")
    for key, value in _keys(config).items():
        add = {bool: writer.add_bool, float: writer.add_float32, list: writer.add_array, str: writer.add_string}
        add.get(type(value), writer.add_uint32)(key, value)
    if vocabulary is not None:
        _carry_vocabulary(writer, vocabulary)
    packed, types = {}, {}
    for name, value in weights.items():
        packed[name], of = _packed(name, value, kind)
        types[name] = of.name
        writer.add_tensor(_name(name), packed[name], raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _compare(path, config, packed)
    said = "" if vocabulary else "; llama.cpp wants the target's vocabulary in it: give the target's GGUF file as --vocab"
    return types, [f"written as GGUF ({kind.name}), and read again bit for bit{said}"]


def _name(place: str) -> str | None:
    if not place.startswith("layers."):
        return _ROOT_NAMES.get(place)
    _, layer, rest = place.split(".", 2)
    if rest in _LAYER_NAMES:
        return f"blk.{layer}.{_LAYER_NAMES[rest]}"
    part, _, last = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{last}" if part in _LAYER_NAMES and last in ("weight", "bias") else None


def _keys(config: DrafterConfig) -> dict[str, Any]:
    rope = config.ropes[0]
    sliding = [window is not None for window in config.windows]
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope.theta),
        "vocab_size": config.vocab_size,
        "block_size": config.block_size - config.sample_from_anchor,
        # llama.cpp names the layer whose input is tapped.
        "target_layers": [i + 1 for i in config.target_layer_ids],
        "logit_scale": config.output_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
        "embedding_scale": config.input_embedding_scale,
        "conv_kernel_size": config.conv_kernel_size,
        "conv_group_size": config.conv_group_size,
        "selector_rank": config.selector_rank,
        "selector_top_k": config.selector_top_k,
    }
    if config.markov_rank:
        keys["sample_from_anchor"] = config.sample_from_anchor
    if any(sliding):
        keys["attention.sliding_window"] = next(window for window in config.windows if window is not None)
        keys["attention.sliding_window_pattern"] = sliding
    if all(config.causal):
        keys["attention.causal"] = True
    if rope.kind == "yarn":
        keys["rope.scaling.type"] = "yarn"
        named = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
        named |= {f"beta_{end}": f"yarn_beta_{end}" for end in ("fast", "slow")}
        for ours, theirs in named.items():
            if (value := rope.parameters.get(ours)) is not None:
                keys[f"rope.scaling.{theirs}"] = int(value) if ours.startswith("original") else float(value)
    keys = {f"dflash.{key}": value for key, value in keys.items() if value is not None}
    return keys | {"tokenizer.ggml.mask_token_id": config.mask_token_id}


def _carry_vocabulary(writer: gguf.GGUFWriter, path: str | Path) -> None:
    reader = open_gguf(Path(path).expanduser()).reader
    carried = [field for name, field in reader.fields.items() if name.startswith("tokenizer.") and "mask_token_id" not in name]
    if not carried:
        raise ConversionError(f"{path} has no vocabulary", "Give the GGUF file of the drafter's target")
    for field in carried:
        of, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), of, sub_type=inner)


def _packed(name: str, value: mx.array, kind: Kind) -> tuple[np.ndarray, Kind]:
    """The bytes of a tensor in the file, and their type."""
    if name == "d2t":
        return np.array(value).astype(np.int64), Kind.I64
    data = np.array(value.astype(mx.float32))
    whole = data.ndim == 2 and not name.startswith("confidence_head.") and data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    if not whole or kind == Kind.F32:
        return data, Kind.F32
    return gguf.quantize(data, kind), kind


def _compare(path: Path, config: DrafterConfig, packed: Mapping[str, np.ndarray]) -> None:
    """Read the file like any drafter's: config and bytes must equal what was given."""
    opened = open_gguf(path)
    raw, _, _ = read_drafter_gguf(opened, str(path))
    read = DrafterConfig.from_dict(raw, where=str(path))
    names = [field.name for field in fields(DrafterConfig) if field.name not in _NOT_COMPARED]
    if lost := [name for name in names if _rounded(getattr(read, name)) != _rounded(getattr(config, name))]:
        raise _no_place([f"{name} = {getattr(config, name)!r}" for name in lost])
    found = {tensor.name: tensor.data for tensor in opened.reader.tensors}
    for name, data in packed.items():
        if found[_name(name)].tobytes() != data.tobytes():
            raise ConversionError(f"{name} was not read from {path.name} as it was written", "Please report this")


def _rounded(value: Any) -> Any:
    """Floats as a GGUF file keeps them: in 32 bits."""
    return float(np.float32(value)) if isinstance(value, float) else value


def _no_place(parts: list[str]) -> ConversionError:
    shown = ", ".join(parts[:6]) + (f" and {len(parts) - 6} more" if len(parts) > 6 else "")
    return ConversionError(
        f"llama.cpp's layout has no place for {shown}", "Convert without --to gguf: an MLX directory keeps every part"
    )
