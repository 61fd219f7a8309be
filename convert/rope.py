"""RoPE of a built mlx-lm model, checked against transformers' formulas and corrected where it differs.

Knows: the frequency formulas that transformers uses (default, linear, dynamic, llama3, yarn, longrope, proportional) and the
RoPE modules of mlx-lm. Knows no files. Some mlx-lm families ignore RoPE scaling, none reads YaRN's `attention_factor` or
`truncate`, and its longrope always takes the long factors. A model with a wrong base still writes fluent text, so every RoPE
module is compared, not only those known to be wrong.
Source: transformers 5, modeling_rope_utils.py; arXiv 2309.00071 (YaRN); arXiv 2402.13753 (LongRoPE).
"""

import math

import mlx.nn as nn
import numpy as np

from dflash_mlx.errors import ConfigError
from dflash_mlx.models.rope import ExactRoPE, Frequencies, longrope, plain_inverse, yarn

from .configs import TargetConfig, rope_for_layer_type

# float32 tables agree to about 1e-6; a wrong base, factor or ramp differs by far more
_RELATIVE_TOLERANCE = 1e-4


def correct_rope(model: nn.Module, target: TargetConfig) -> list[str]:
    """Replace every RoPE module of `model` whose frequencies are not those of transformers.

    Returns: one sentence per kind of layer that was corrected.
    Raises:
      ConfigError: RoPE scaling is configured and the model has no RoPE module that could carry it.
    """
    found: dict[str, list[int]] = {}
    audited = 0
    for index, layer in enumerate(model.layers):
        kind = target.layer_types[index] if target.layer_types and index < len(target.layer_types) else None
        rope = rope_for_layer_type(target.rope, kind)
        for parent, name, module in _rope_modules(layer):
            if not rope:
                continue
            audited += 1
            found_module = _module_frequencies(module)
            if found_module is None:
                continue
            actual, dims, traditional = found_module
            dims = _rotated_dims(dims, rope, target, index)
            expected = expected_frequencies(rope, dims, target, index)
            if not _same(actual, expected):
                parent[name] = ExactRoPE(dims, expected, traditional)
                found.setdefault(str(rope.get("rope_type")), []).append(index)
    scaled = target.rope and rope_for_layer_type(target.rope, None)
    if not audited and scaled and scaled.get("rope_type") not in ("default", "proportional", "mrope", "axial"):
        raise ConfigError(
            f'mlx-lm\'s {target.family} has no RoPE module that can carry "{scaled["rope_type"]}" scaling',
            "This checkpoint needs another implementation",
        )
    return [
        f"RoPE ({kind}) of layers {_ranges(layers)} set to transformers' frequencies; mlx-lm's {target.family} computes others"
        for kind, layers in found.items()
    ]


def _ranges(layers: list[int]) -> str:
    return f"{layers[0]}-{layers[-1]}" if layers == list(range(layers[0], layers[-1] + 1)) and len(layers) > 1 else str(layers)


def _rope_modules(layer: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """-> (parent, attribute, module) of every module that rotates."""
    return [
        (parent, name, child)
        for _, parent in layer.named_modules()
        for name, child in parent.children().items()
        if isinstance(child, nn.Module) and (isinstance(child, nn.RoPE) or type(child).__name__ in _TABLE_MODULES)
    ]


# mlx-lm's RoPE modules with a table of periods -> how they pair dimensions (None: as `traditional` says). Dynamic modules have
# no table: they adapt to the length and are not compared
_TABLE_MODULES: dict[str, bool | None] = {
    "Llama3RoPE": None,
    "ProportionalRoPE": None,
    "YarnRoPE": None,
    "SuScaledRoPE": False,
    "DeepseekV2YarnRotaryEmbedding": True,
    "DynamicNTKScalingRoPE": None,
    "DynamicNTKAlphaRoPE": None,
}


def _module_frequencies(module: nn.Module) -> tuple[Frequencies, int, bool] | None:
    """-> (what an mlx-lm RoPE module computes, rotated dimensions, traditional). None for one that is not compared."""
    if isinstance(module, nn.RoPE):
        inverse = module.scale / np.power(float(module.base), np.arange(0, module.dims, 2, dtype=np.float64) / module.dims)
        return Frequencies(inverse), module.dims, module.traditional
    kind = type(module).__name__
    if kind.startswith("Dynamic"):
        return None
    with np.errstate(divide="ignore"):
        inverse = 1.0 / np.array(module._freqs, dtype=np.float64)
    scale = getattr(module, "mscale", getattr(module, "_scale", 1.0))
    traditional = _TABLE_MODULES[kind]
    return Frequencies(inverse, float(scale)), 2 * len(inverse), module.traditional if traditional is None else traditional


def _rotated_dims(dims: int, rope: dict, target: TargetConfig, layer: int) -> int:
    """The module's dimensions, or fewer when the family ignores `partial_rotary_factor` and rotates whole heads."""
    partial = rope.get("partial_rotary_factor")
    head_dim = target.head_dims[layer] if target.head_dims else None
    if partial and partial < 1 and dims == head_dim and rope.get("rope_type") != "proportional":
        return int(head_dim * partial)
    return dims


def _same(a: Frequencies, b: Frequencies) -> bool:
    return (
        b.long is None
        and a.inverse.shape == b.inverse.shape
        and np.allclose(a.inverse, b.inverse, rtol=_RELATIVE_TOLERANCE, atol=1e-12)
        and math.isclose(a.scale, b.scale, rel_tol=_RELATIVE_TOLERANCE)
    )


def expected_frequencies(rope: dict, dims: int, target: TargetConfig, layer: int) -> Frequencies:
    """Transformers' inverse frequencies for one layer.

    Args:
      rope: RoPE parameters of that kind of layer; dims: rotated dimensions of the module (even).
    Raises:
      ConfigError: a RoPE type without a formula here.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    base = float(rope["rope_theta"])
    plain = plain_inverse(base, dims)
    if kind in ("default", "mrope", "axial", "dynamic"):
        # dynamic scaling equals the default up to max_position_embeddings; mlx-lm's module handles what lies beyond
        return Frequencies(plain)
    if kind == "linear":
        return Frequencies(plain / float(rope["factor"]))
    if kind == "llama3":
        return Frequencies(_llama3(plain, rope))
    longest = target.text.get("max_position_embeddings")
    if kind in ("yarn", "deepseek_yarn"):
        return yarn(base, dims, rope, longest)
    if kind in ("longrope", "su"):
        original = rope.get("original_max_position_embeddings") or target.text.get("original_max_position_embeddings")
        return longrope(base, dims, {**rope, "original_max_position_embeddings": original}, longest)
    if kind == "proportional":
        head_dim = target.head_dims[layer] if target.head_dims else dims
        rotated = int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)
        inverse = np.zeros(dims // 2)
        inverse[:rotated] = 1.0 / np.power(base, np.arange(0, 2 * rotated, 2, dtype=np.float64) / head_dim)
        return Frequencies(inverse / float(rope.get("factor") or 1.0))
    raise ConfigError(
        f'"{kind}" is no known RoPE type; those are default, linear, dynamic, llama3, yarn, longrope, proportional',
        "This checkpoint needs another implementation",
    )


def _llama3(plain: np.ndarray, rope: dict) -> np.ndarray:
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    context = float(rope["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / plain
    smooth = (context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = np.where(wavelengths > context / low, plain / factor, plain)
    medium = (wavelengths <= context / low) & (wavelengths >= context / high)
    return np.where(medium, blended, scaled)
