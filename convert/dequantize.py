"""Weights that other tools quantized, brought to floats or to MLX's own packed formats.

Knows: fp8 with scales, MXFP4 and MXFP8, AWQ and GPTQ, compressed-tensors packings that mlx-lm names. Knows no models. A weight
of integers whose meaning is not stated is refused: read as numbers, it gives a model of noise.
"""

from collections.abc import Mapping

import mlx.core as mx

from dflash_mlx.checkpoint import Checkpoint
from dflash_mlx.errors import ConversionError

from .layouts import Weights, unused_reason

# how fp8 checkpoints name the scale beside `X.weight`
_SCALE_SUFFIXES = ("weight_scale_inv", "weight_scale", "scale")
# methods whose packed weights mlx-lm's format holds as they are -> that format
_PACKED = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}
_COMPRESSED = {
    "nvfp4-pack-quantized": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp4-pack-quantized": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "pack-quantized": {"group_size": 32, "bits": 4, "mode": "affine"},
}


def decode_quantized(weights: Weights, config: Mapping, checkpoint: Checkpoint) -> tuple[Weights, dict, list[str]]:
    """Undo or adopt a foreign quantization.

    Returns: (weights, config with mlx-lm's `quantization` where the weights stay packed, sentences for the user).
    Raises:
      ConversionError: a method or a tensor that is not understood, named.
    """
    config = dict(config)
    foreign = config.get("quantization_config")
    inner = config.get("text_config")
    if foreign is None and isinstance(inner, Mapping):
        foreign = inner.get("quantization_config")
    method = foreign.get("quant_method") if isinstance(foreign, Mapping) else None
    weights, notes = _decode_fp8(weights, checkpoint, declared=method in ("fp8", "compressed-tensors"))
    if method is None:
        _refuse_integers(weights, checkpoint)
        return weights, config, notes
    if method in ("awq", "gptq"):
        weights, quantization = _awq(weights, foreign, checkpoint)
    elif method in _PACKED:
        quantization = _PACKED[method]
    elif method == "compressed-tensors" and foreign.get("format") in _COMPRESSED:
        quantization = _COMPRESSED[foreign["format"]]
    elif notes and method in ("fp8", "compressed-tensors"):
        quantization = None
    else:
        what = f"{method} ({foreign['format']})" if foreign.get("format") else method
        raise ConversionError(
            f"expected weights that are float, MLX-quantized, fp8, MXFP4, AWQ or GPTQ; {checkpoint.source} is quantized "
            f"with {what}. "
            "Use the float checkpoint that it was made from."
        )
    for part in (config, inner):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
    if quantization is None:
        _refuse_integers(weights, checkpoint)
    else:
        config["quantization"] = quantization
        mode = quantization.get("mode", "affine")
        notes.append(f"{method} weights kept packed as {quantization['bits']}-bit {mode}")
    return weights, config, notes


def _awq(weights: Weights, foreign: Mapping, checkpoint: Checkpoint) -> tuple[Weights, dict]:
    from mlx_lm.utils import _transform_awq_weights

    try:
        return _transform_awq_weights(weights, dict(foreign))
    except (ValueError, KeyError) as error:
        raise ConversionError(
            f"expected AWQ or GPTQ weights that MLX's format can hold in {checkpoint.source}; found: {error}. "
            "Use the float checkpoint that it was made from."
        ) from error


def _decode_fp8(weights: Weights, checkpoint: Checkpoint, *, declared: bool) -> tuple[Weights, list[str]]:
    """fp8 weights times their scales, in float32 and kept in bfloat16 (what the scales' publishers compute in)."""
    fp8 = [n for n, info in checkpoint.tensors.items() if info.dtype == "F8_E4M3" and n in weights]
    if declared:
        fp8 += [
            n
            for n, info in checkpoint.tensors.items()
            if info.dtype == "U8" and n.endswith(".weight") and _scale_of(n, weights) and n in weights
        ]
    if not fp8:
        return weights, []
    unscaled = [n for n in fp8 if not _scale_of(n, weights)]
    if unscaled:
        raise ConversionError(
            f"expected fp8 weights with a scale each in {checkpoint.source}; found no scale beside them: {_some(unscaled)}. "
            "Use the bfloat16 checkpoint that it was made from."
        )
    out = dict(weights)
    for name in fp8:
        scale = _scale_of(name, weights)
        out[name] = _times_scale(mx.from_fp8(weights[name], dtype=mx.float32), weights[scale], name, checkpoint)
        out.pop(scale, None)
    return out, [f"{len(fp8)} fp8 tensors dequantized to bfloat16"]


def _scale_of(name: str, weights: Mapping) -> str | None:
    base = name.removesuffix("weight") if name.endswith("weight") else name + "_"
    candidates = [base + suffix for suffix in _SCALE_SUFFIXES] + [name + "_scale_inv", name + "_scale"]
    return next((c for c in candidates if c in weights), None)


def _times_scale(value: mx.array, scale: mx.array, name: str, checkpoint: Checkpoint) -> mx.array:
    """value [..., out, in] times a scale per tensor, per row, or per block (the block size follows from both shapes)."""
    scale = scale.astype(mx.float32)
    if scale.size == 1:
        return (value * scale.reshape(())).astype(mx.bfloat16)
    if scale.ndim == 1:
        scale = scale[:, None]
    if scale.ndim != value.ndim:
        raise ConversionError(
            f"expected a scale per tensor, row or block for {name} {list(value.shape)} in {checkpoint.source}; "
            f"found one of shape {list(scale.shape)}. Use the bfloat16 checkpoint that it was made from."
        )
    for axis in (-2, -1):
        block = _block(value.shape[axis], scale.shape[axis])
        scale = mx.repeat(scale, block, axis=axis)
    rows, columns = value.shape[-2:]
    return (value * scale[..., :rows, :columns]).astype(mx.bfloat16)


def _block(size: int, blocks: int) -> int:
    """Block length: a power of two such that `blocks` of them cover `size` (the last one may be partial); else an even split."""
    block = 1
    while block * blocks < size:
        block *= 2
    return block if -(-size // block) == blocks else -(-size // blocks)


def _refuse_integers(weights: Weights, checkpoint: Checkpoint) -> None:
    integers = [
        f"{n} ({checkpoint.tensors[n].dtype})"
        for n, value in weights.items()
        if n.endswith((".weight", ".bias"))
        and not mx.issubdtype(value.dtype, mx.floating)
        and f"{n.rpartition('.')[0]}.scales" not in weights
        and unused_reason(n, None) is None
    ]
    if integers:
        raise ConversionError(
            f"expected floating-point or MLX-quantized weights in {checkpoint.source}; found integers without a "
            f"stated meaning: {_some(integers)}. They may be fp8 saved as bytes, or floats saved as their bits: "
            "use the bfloat16 checkpoint that it was made from."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
