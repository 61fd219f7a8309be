"""Turns weights that other tools quantized into MLX's own modes or into floats.

The tensors decide what a matrix is; the config's `quantization_config` only says what they leave open. Integer weights of unknown
meaning are refused: taken as numbers, they would give a model that writes noise. Knows where each tool keeps its record, and fp8
with scales; `packings` knows the other layouts. Knows no models.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.checkpoint import Checkpoint
from dflash_mlx.errors import ConversionError

from .families import special
from .layouts import Weights, unused_reason
from .packings import FLOAT_CHECKPOINT, PARTS, Packed, plain, read_matrix

# the scale beside `X.weight`, as fp8 checkpoints name it
_SCALE_SUFFIXES = ("weight_scale_inv", "weight_scale", "scale")
# the same for integers; and the float types in which models compute
_SCALES = (".weight_scale", ".scales")
_HALF = {"F16": mx.float16, "BF16": mx.bfloat16}
# where GPTQ's tools and AutoRound keep the record too, or alone
_RECORD_FILES = ("quantize_config.json", "quantization_config.json")
# methods of checkpoints that mlx-lm's own `sanitize` unpacks (gpt-oss's experts) -> the mode, and a tensor that shows it
_UNPACKED_BY_MLX_LM = {"mxfp4": ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, "_blocks")}
# projections of stacked experts -> the modules of one expert that they hold, rows after rows
_STACKED = {name: (name,) for name in ("gate_proj", "up_proj", "down_proj")} | {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13_weight": ("gate_proj", "up_proj"),
    "w2_weight": ("down_proj",),
}
_JOINED = re.compile(rf"^(?P<module>.*\.experts\.({'|'.join(_STACKED)}))_(?P<part>weight_\w+|qweight|qzeros|g_idx)$")
# formats of GPTQ's packing that store zero points as they are, not one less (AutoRound has two)
_ZEROS_AS_MEANT = ("gptq_v2", "auto_round", "auto_round:gptqmodel")
# what compressed-tensors rotates while the model runs; weights are stored rotated
_ROTATED_IN_RUNS = ("input", "output", "q_attn", "k_cache")
# scales for activations and caches, which stay float here
_CALIBRATION = re.compile(r"\.(((input|output)_(scale|zero_point|global_scale))|[qkv]_(scale|zero_point)|kv_scale)$")
# tensors that remain beside a weight that was written back as floats
_LEFT_OVER = PARTS - {"weight", "weight_packed", "scale", "scales", "meta", "qweight"}
# integers that are not quantized weights: maps between vocabularies, positions, counters
_INDEX = re.compile(r"(^|\.)(t2d|d2t|\w*position_ids|num_batches_tracked|tid2eid)$")
# parts of matrices in packings that nothing here reads
_UNREAD = re.compile(
    r"\.(weight_packed|qweight|qzeros|B|W_q|SCB|bitmask|compressed|absmax|quant_map|nested_\w+|quant_state\.\w+|pre_quant_scale)$"
    r"|_weight_(packed|scale|scale_2)$"
)


@dataclass(frozen=True)
class Record:
    """What a config says about the quantization of its weights. settings: the object as it is, {} if there is none."""

    settings: Mapping

    @classmethod
    def of(cls, config: Mapping, folder: Path) -> "Record":
        """The record in config.json, else in a file of its own beside it."""
        inner = config.get("text_config")
        for part in (config, inner if isinstance(inner, Mapping) else {}):
            if isinstance(found := part.get("quantization_config"), Mapping):
                return cls(found)
        for file in _RECORD_FILES:
            with suppress(OSError, ValueError):
                if isinstance(found := json.loads((folder / file).read_text()), dict):
                    # the oldest of these files do not name their tool
                    return cls({"quant_method": "gptq"} | found)
        return cls({})

    @property
    def method(self) -> str | None:
        method = self.settings.get("quant_method")
        return method if isinstance(method, str) else None

    @property
    def name(self) -> str:
        """The method and, where it has several, its format: "compressed-tensors (marlin-24)"."""
        form = self.settings.get("format") or self.settings.get("quant_algo") or self.settings.get("checkpoint_format")
        return f"{self.method} ({form})" if form else str(self.method)

    def of_module(self, name: str) -> Mapping:
        """What is stated about one matrix, with the keys of `Packed.stated`."""
        if self.method == "compressed-tensors":
            return self._group_of(name)
        if self.method in ("gptq", "awq", "auto-round", "intel/auto-round"):
            stated = {"num_bits": self.settings.get("bits"), "group_size": self.settings.get("group_size")}
            formats = [self.settings.get(key) for key in ("checkpoint_format", "format", "packing_format")]
            if isinstance(zeros := self.settings.get("zero_point"), bool):
                stated["symmetric"] = not zeros
            stated["act_order"] = self.settings.get("desc_act")
            stated["zeros_minus_one"] = not any(form in _ZEROS_AS_MEANT for form in formats)
            own = self._own_of(name)
            stated |= {key: own[part] for part, key in (("bits", "num_bits"), ("group_size", "group_size")) if part in own}
            return _numbers(stated)
        return {}

    def _own_of(self, name: str) -> Mapping:
        """The settings of one module alone. AutoRound's `extra_config` gives its name, or a pattern that occurs in the name;
        GPTQModel's `dynamic` gives a pattern that the name begins with, with or without "+:" before it."""
        extra, dynamic = (self.settings.get(key) for key in ("extra_config", "dynamic"))
        extra, dynamic = (rules if isinstance(rules, Mapping) else {} for rules in (extra, dynamic))
        named = [own for target, own in extra.items() if _matches(target, name)]
        patterns = [(f".*(?:{pattern})", own) for pattern, own in extra.items() if not re.fullmatch(r"[\w.]+", pattern)]
        patterns += [(pattern.removeprefix("+:"), own) for pattern, own in dynamic.items()]
        found = named + [own for pattern, own in patterns if _matches(f"re:{pattern}", name)]
        return next((own for own in found if isinstance(own, Mapping)), {})

    @property
    def rotations(self) -> list[str]:
        """Names of the record's transforms that change activations while the model runs (SpinQuant's and QuIP's)."""
        transforms = self.settings.get("transform_config")
        groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
        found = []
        for name, scheme in groups.items() if isinstance(groups, Mapping) else ():
            places = scheme.get("apply") if isinstance(scheme, Mapping) else None
            places = [place.get("location") for place in places or () if isinstance(place, Mapping)]
            if any(place in _ROTATED_IN_RUNS for place in places):
                found.append(str(name))
        return found

    def _group_of(self, name: str) -> Mapping:
        """The arguments for weights of the group whose targets name this module, or its class; of the only group otherwise."""
        groups = self.settings.get("config_groups")
        groups = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
        listed = [(group["targets"], group) for group in groups if isinstance(group.get("targets"), list)]
        targets = [(target, group) for some, group in listed for target in some if isinstance(target, str) and target]
        named = [group for target, group in targets if _matches(target, name)]
        by_class = [group for target, group in targets if target.isidentifier() and target[0].isupper()]
        found = named or by_class or (groups if len(groups) == 1 else [])
        weights = found[0].get("weights") if found else None
        if not isinstance(weights, Mapping):
            return {}
        stated = _numbers(weights) | {"act_order": weights.get("actorder") in ("group", True)}
        return stated | ({"in_blocks": weights["strategy"] == "block"} if weights.get("strategy") else {})


def _numbers(stated: Mapping) -> dict:
    """The entries that are integers or booleans: all that reading a matrix needs."""
    return {key: value for key, value in stated.items() if isinstance(value, int)}


def _matches(target: str, name: str) -> bool:
    """Whether a target pattern names a module; wrappers and drafters spell the beginning of names in several ways."""
    if not target.startswith("re:"):
        return name == target or name.endswith(f".{target}") or target.endswith(f".{name}")
    try:
        return any(re.match(target[3:], spelled) for spelled in (name, f"model.{name}", name.removeprefix("model.")))
    except re.error:
        return False


def decode_quantized(
    weights: Weights, config: Mapping, checkpoint: Checkpoint, *, keep_packed: bool = True
) -> tuple[Weights, dict, list[str]]:
    """Turn weights that another tool quantized into MLX's modes if these can hold them exactly, else into floats.

    Args:
      keep_packed: False: to floats always, for a family whose class in mlx-lm computes with its matrices while it loads.
    Returns: (weights, config with mlx-lm's `quantization` where weights stay packed, sentences for the user).
    Raises:
      ConversionError: a method or a tensor that is not understood, named.
    """
    config, record = dict(config), Record.of(config, checkpoint.path)
    floats = _floats_of(checkpoint)
    if rotations := record.rotations:
        raise ConversionError(
            f"{checkpoint.source} rotates activations while it runs ({record.name}, transform_config {', '.join(rotations)}), "
            "which mlx-lm's classes do not",
            FLOAT_CHECKPOINT,
        )
    inner = config.get("text_config")
    own = inner.get("model_type") if isinstance(inner, Mapping) else None
    alternating = special(own, config.get("model_type")).fused_experts.interleaved
    weights, packed, hows = _decode_packed(weights, record, checkpoint, floats, keep_packed, alternating)
    weights, fp8 = _decode_fp8(weights, checkpoint, floats, declared=record.method in ("fp8", "compressed-tensors"))
    notes = [f"{count} {'matrices' if count > 1 else 'matrix'}, {how}" for how, count in hows.items()] + fp8
    mode, shows = _UNPACKED_BY_MLX_LM.get(record.method, (None, ""))
    if mode is not None and any(name.endswith(shows) for name in weights):
        config["quantization"] = mode
        notes.append(f"{record.method} weights kept packed as {mode['bits']}-bit {mode['mode']}")
    if packed:
        config["quantization"] = _quantization(packed)
    if record.method is not None:
        _refuse_unread(weights, record, checkpoint, decoded=bool(notes))
    weights, note = _without_calibration(weights)
    notes += note
    if record.method is not None:
        if not notes:
            notes.append(f"config.json says {record.name}, the weights are float: read as they are")
        if isinstance(inner, Mapping):
            config["text_config"] = {key: value for key, value in inner.items() if key != "quantization_config"}
        config.pop("quantization_config", None)
    _refuse_integers(weights, checkpoint)
    return weights, config, notes


def _decode_packed(
    weights: Weights, record: Record, checkpoint: Checkpoint, floats: mx.Dtype, keep_packed: bool, alternating: bool
) -> tuple[Weights, dict[str, Mapping], Counter[str]]:
    """-> (weights, module -> options of those that stay packed, what was done -> number of matrices)."""
    modules: dict[str, dict[str, tuple[str, mx.array]]] = {}
    for name, value in weights.items():
        module, part = _module_and_part(name)
        if part in PARTS:
            modules.setdefault(module, {})[part] = (name, value)
    out, packed, hows = dict(weights), {}, Counter()
    for module, filed in modules.items():
        if len(filed) == 1 and not filed.keys() & {"weight_packed", "qweight"}:
            continue
        tensors = {part: value for part, (_, value) in filed.items()}
        types = {part: checkpoint.tensors[name].dtype for part, (name, _) in filed.items()}
        whole = Packed(module, checkpoint.source, tensors, types, record.of_module(module), floats)
        read = [(names, read_matrix(one, keep_packed)) for names, one in _experts_of(whole)]
        if any(matrix is None for _, matrix in read):
            continue
        for name, _ in filed.values():
            del out[name]
        for names, matrix in read:
            for place, name in enumerate(names):
                for part, value in matrix.tensors.items():
                    # gate and up are the two halves of the rows, or alternate row by row
                    out[f"{name}.{part}"] = value[place :: len(names)] if alternating else mx.split(value, len(names))[place]
                hows[matrix.how] += 1
                if matrix.options is not None:
                    packed[name] = matrix.options
    return out, packed, hows


def _floats_of(checkpoint: Checkpoint) -> mx.Dtype:
    """The half type of most of a checkpoint's own floats. Matrices that no mode of MLX can hold are written in it: with two half
    types in one model, MLX would compute everything in float32."""
    own = [t for t in checkpoint.tensors.values() if t.dtype in _HALF and "scale" not in t.name.rpartition(".")[2]]
    sizes = Counter()
    for tensor in own:
        sizes[_HALF[tensor.dtype]] += tensor.nbytes
    return max(sizes, key=sizes.get, default=mx.bfloat16)


def _module_and_part(name: str) -> tuple[str, str]:
    """ "a.up_proj.weight_packed" -> ("a.up_proj", "weight_packed"); stacked experts' parts may be joined by "_"."""
    if joined := _JOINED.search(name):
        return joined["module"], joined["part"]
    module, _, part = name.rpartition(".")
    return module, part


def _experts_of(whole: Packed) -> list[tuple[tuple[str, ...], Packed]]:
    """One matrix, or stacked experts one by one; each with the modules to which its rows belong.

    Shapes:
      - of stacked experts: [E, ...] where one expert has [...]; a global scale [E] or []; weight_shape [E, 2], [3] or [2]
    Raises:
      ConversionError: three axes that are no experts' projection.
    """
    main = next((whole.tensors[part] for part in ("weight_packed", "qweight") if part in whole.tensors), None)
    if main is None or main.ndim != 3:
        return [((whole.name,), whole)]
    base, _, projection = whole.name.rpartition(".")
    if projection not in _STACKED or not base.endswith("experts"):
        raise whole.refuse(f"is packed with the shape {list(main.shape)}; two axes, or stacked experts' three, are read")
    experts = main.shape[0]

    def of(expert: int) -> dict[str, mx.array]:
        parts = {part: value[expert] if value.shape[:1] == (experts,) else value for part, value in whole.tensors.items()}
        if (shape := whole.tensors.get("weight_shape")) is not None:
            parts["weight_shape"] = shape[expert] if shape.ndim == 2 else shape[-2:]
        return parts

    return [
        (tuple(f"{base}.{expert}.{name}" for name in _STACKED[projection]), replace(whole, tensors=of(expert)))
        for expert in range(experts)
    ]


def types_of_scales(model: nn.Module, checkpoint: Checkpoint) -> dict[str, mx.Dtype]:
    """The scales and biases that became float32 because a zero point times its scale needs that -> the type of the files' scales.

    Activations take the widest type of a layer, so float32 scales would make everything run in float32. A layer whose scale is
    float32 in the files keeps it. Only for checkpoints of other tools: MLX's own files hold scales in the intended type.
    """
    filed = Counter(_HALF[t.dtype] for t in checkpoint.tensors.values() if t.dtype in _HALF and t.name.endswith(_SCALES))
    if not filed:
        return {}
    due, wide = filed.most_common(1)[0][0], tree_flatten(model.parameters())
    single = [t.name.rpartition(".")[0] for t in checkpoint.tensors.values() if t.dtype == "F32" and t.name.endswith(_SCALES)]

    def is_meant(name: str) -> bool:
        # A family's model may put its own prefix before a layer's name, or leave one out.
        layer = f".{name.rpartition('.')[0]}"
        return any(layer.endswith(f".{base}") or f".{base}".endswith(layer) for base in single)

    found = [name for name, value in wide if name.endswith((".scales", ".biases")) and value.dtype == mx.float32]
    return {name: due for name in found if not is_meant(name)}


def _quantization(packed: Mapping[str, Mapping]) -> dict:
    """mlx-lm's `quantization`: the options of most matrices, and by name those of the others."""
    counts = Counter(tuple(options.items()) for options in packed.values())
    usual = dict(counts.most_common(1)[0][0])
    return usual | {name.removeprefix("model."): dict(own) for name, own in packed.items() if own != usual}


def _without_calibration(weights: Weights) -> tuple[Weights, list[str]]:
    """Remove scales for activations, and scales of weights that are float already."""
    leftover = [name for name in weights if _CALIBRATION.search(name)]
    for name in weights:
        module, _, part = name.rpartition(".")
        weight = weights.get(f"{module}.weight")
        if part in _LEFT_OVER:
            if weight is not None and mx.issubdtype(weight.dtype, mx.floating):
                leftover.append(name)
    if not leftover:
        return weights, []
    note = f"{len(leftover)} scales that were calibrated for activations or caches, or are left over, are not used"
    return {name: value for name, value in weights.items() if name not in set(leftover)}, [note]


def _refuse_unread(weights: Weights, record: Record, checkpoint: Checkpoint, *, decoded: bool) -> None:
    """Refuse matrices that are still packed, naming the method. If nothing was decoded, every integer tensor is suspected."""
    unread = _integers(weights)
    for name, value in weights.items():
        mlx_packed = f"{name.rpartition('.')[0]}.scales" in weights
        suspected = not decoded and not mlx_packed and not mx.issubdtype(value.dtype, mx.floating) and not _INDEX.search(name)
        if (suspected or _UNREAD.search(name)) and name not in unread:
            unread.append(name)
    if unread:
        shown = ", ".join(f"{name} ({checkpoint.tensors[name].dtype})" for name in unread[:2])
        raise ConversionError(
            f"{checkpoint.source} is quantized with {record.name}, which is not read: {shown}"
            f"{f' and {len(unread) - 2} more' if len(unread) > 2 else ''}",
            f"{FLOAT_CHECKPOINT}, or one that is MLX-quantized, fp8, AWQ, GPTQ, MXFP4, NVFP4 or compressed-tensors",
        )


# --- fp8 --------------------------------------------------------------------------------------------------------------


def _decode_fp8(weights: Weights, checkpoint: Checkpoint, floats: mx.Dtype, *, declared: bool) -> tuple[Weights, list[str]]:
    """fp8 weights times their scales, in float32 and rounded once to the half type of the checkpoint's own floats."""
    headers = {name: checkpoint.tensors[name].dtype for name in weights if name in checkpoint.tensors}
    fp8 = [name for name, dtype in headers.items() if dtype == "F8_E4M3"]
    if declared:
        fp8 += [n for n, dtype in headers.items() if dtype == "U8" and n.endswith(".weight") and _scale_of(n, weights)]
    # leave out those that are packed again by now: their type is no longer the file's
    fp8 = [name for name in fp8 if weights[name].dtype == mx.uint8 and not name.endswith("_scale")]
    if not fp8:
        return weights, []
    unscaled = [n for n in fp8 if not _scale_of(n, weights)]
    if unscaled:
        raise ConversionError(
            f"{checkpoint.source} has fp8 weights without a scale beside them: {_some(unscaled)}",
            "Use the bfloat16 checkpoint that it was made from",
        )
    out = dict(weights)
    for name in fp8:
        scale = _scale_of(name, weights)
        factor = _factor(weights[scale], headers.get(scale))
        out[name] = _times_scale(mx.from_fp8(weights[name], dtype=mx.float32), factor, name, checkpoint).astype(floats)
        out.pop(scale, None)
    return out, [f"{len(fp8)} fp8 tensors dequantized to {plain(floats)}"]


def _factor(scale: mx.array, dtype: str | None) -> mx.array:
    """A scale as float32; bytes are exponents of two (E8M0)."""
    if dtype in ("F8_E8M0", "U8"):
        return mx.power(2.0, scale.astype(mx.float32) - 127)
    return scale.astype(mx.float32)


def _scale_of(name: str, weights: Mapping) -> str | None:
    base = name.removesuffix("weight") if name.endswith("weight") else name + "_"
    candidates = [base + suffix for suffix in _SCALE_SUFFIXES] + [name + "_scale_inv", name + "_scale"]
    return next((c for c in candidates if c in weights), None)


def _times_scale(value: mx.array, scale: mx.array, name: str, checkpoint: Checkpoint) -> mx.array:
    """value [..., out, in] times a scale per tensor, per row, or per block (the block size follows from both shapes)."""
    if scale.size == 1:
        return value * scale.reshape(())
    if scale.ndim == 1:
        scale = scale[:, None]
    if scale.ndim != value.ndim:
        raise ConversionError(
            f"{name} {list(value.shape)} in {checkpoint.source} has a scale of shape {list(scale.shape)}; "
            "it must have one for the tensor, or one a row or block",
            "Use the bfloat16 checkpoint that it was made from",
        )
    for axis in (-2, -1):
        block = _block(value.shape[axis], scale.shape[axis])
        scale = mx.repeat(scale, block, axis=axis)
    rows, columns = value.shape[-2:]
    return value * scale[..., :rows, :columns]


def _block(size: int, blocks: int) -> int:
    """Block length: a power of two such that `blocks` of them cover `size` (the last one may be partial); else an even split."""
    block = 1
    while block * blocks < size:
        block *= 2
    return block if -(-size // block) == blocks else -(-size // blocks)


# --- integers that nobody explained -----------------------------------------------------------------------------------


def _integers(weights: Weights) -> list[str]:
    return [
        name
        for name, value in weights.items()
        if name.endswith((".weight", ".bias"))
        and not mx.issubdtype(value.dtype, mx.floating)
        and f"{name.rpartition('.')[0]}.scales" not in weights
        and unused_reason(name, None) is None
    ]


def _refuse_integers(weights: Weights, checkpoint: Checkpoint) -> None:
    if integers := _integers(weights):
        raise ConversionError(
            f"{checkpoint.source} has integers without a stated meaning: "
            f"{_some([f'{name} ({checkpoint.tensors[name].dtype})' for name in integers])}. "
            "They may be fp8 saved as bytes, or floats saved as their bits",
            "Use the bfloat16 checkpoint that it was made from",
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
