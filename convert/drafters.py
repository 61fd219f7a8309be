"""DFlash drafter checkpoints: tensors under their published bare names, and quantizing them.

Knows the names that drafters are published with. Knows nothing of targets and builds no model but a linear layer at a time, so
that variants which this version cannot run still convert. A converted drafter keeps the published names and its config.json.
"""

import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.checkpoint import Checkpoint, inspect_checkpoint, require_drafter
from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import CheckpointError, ConfigError
from dflash_mlx.packagings import QWEN35_DSPARK

from .config_values import drop_empty_quantization
from .dequantize import decode_quantized
from .gguf.drafter import read_drafter_gguf
from .layouts import Weights, unused_reason
from .quantize import FLOAT_DTYPES, Predicate, Recipe, fate_of, mlx_options

# what a wrapper puts before every name: a class with a head, torch.compile, data-parallel trainers, a training module
_PREFIX = re.compile(r"(?:(?:model|_orig_mod|module|draft_model)\.)+")
# where SpecForge's first Domino and DSpark drafters keep their heads
_EARLY_PREFIX = "logit_head."
# names of Muse-Glimmer's assistant, and of AngelSpec's and TorchSpec's trainers
_RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
_RENAMED |= {"context_proj.weight": "fc.weight", "context_norm.weight": "hidden_norm.weight", "final_norm.weight": "norm.weight"}
# the target's tensors that speculators' directories repeat (packed, or NaN if never filled), and the inverse of their map to a
# reduced vocabulary
_TARGET_COPY = re.compile(r"(verifier_(lm_head|norm)\..+|t2d)$")

# group sizes for quantizing a drafter while it is loaded
GROUP = 64


@dataclass
class LoadedDrafter:
    """A drafter's files: raw config, bare-named tensors (unread until used), what was dropped and said."""

    raw: dict
    config: DrafterConfig
    weights: Weights
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def load_drafter_weights(path_or_repo: str | Path, *, revision: str | None = None) -> tuple[dict, Weights]:
    """A drafter's config.json and its tensors under bare names, from a published or a converted directory or a hub repository.

    Returns:
      - config: as the file has it; `quantization` only where the tensors are quantized
      - weights: name -> array, without the prefix `model.`; quantized ones as weight, scales and biases
    Raises:
      CheckpointError: damaged or missing files, or not a DFlash drafter
      ConfigError: a config that is not a drafter's
    """
    drafter = read_drafter(inspect_checkpoint(path_or_repo, revision=revision))
    return drafter.raw, drafter.weights


def load_dense_drafter(path_or_repo: str | Path, *, revision: str | None = None) -> tuple[dict, Weights]:
    """`load_drafter_weights` with quantized tensors as floats, in the type of their scales."""
    config, weights = load_drafter_weights(path_or_repo, revision=revision)
    return config, write_out(config, weights)


def write_out(config: dict, weights: Weights) -> Weights:
    """Quantized tensors as floats, in the type of their scales; `quantization` is removed from the config."""
    packing, dense = config.pop("quantization", None), {}
    config.pop("quantization_config", None)
    for name, array in weights.items():
        module, _, part = name.rpartition(".")
        if f"{module}.scales" not in weights:
            dense[name] = array
        elif part == "weight":
            of = packing.get(module, packing)
            parts = (array, weights[f"{module}.scales"], weights.get(f"{module}.biases"))
            # A float codebook has no `.weight`.
            name = module if module.endswith("_codebook") else name
            dense[name] = mx.dequantize(*parts, group_size=of["group_size"], bits=of["bits"], mode=of.get("mode", "affine"))
    return dense


def read_drafter(checkpoint: Checkpoint) -> LoadedDrafter:
    """`load_drafter_weights` for an inspected checkpoint, with a record of what was done."""
    require_drafter(checkpoint)
    if checkpoint.gguf is not None:
        raw, weights, notes = read_drafter_gguf(checkpoint.gguf, checkpoint.source)
    else:
        weights, raw, notes = decode_quantized(checkpoint.load(), checkpoint.config, checkpoint)
        drop_empty_quantization(raw)
    config = _config(raw, checkpoint)
    bare: Weights = {}
    dropped: dict[str, str] = {}
    for name, value in _spread(weights, config).items():
        prefix = _PREFIX.match(name)
        short = name[prefix.end() if prefix else 0 :].removeprefix(_EARLY_PREFIX)
        reason = "the target's, repeated" if is_target_copy(short) else unused_reason(name, None)
        short = _RENAMED.get(short, short)
        if reason:
            dropped[name] = reason
        elif short in bare:
            raise CheckpointError(
                f"{checkpoint.source} has {short} twice, with and without a prefix",
                "Delete the copy that does not belong",
            )
        else:
            bare[short] = value
    if options := raw.get("quantization"):
        raw["quantization"] = {one: of for name, of in options.items() for one in _spread_names(name)}
    for prefix, count in Counter(found[0] for found in map(_PREFIX.match, weights) if found).items():
        notes.append(f"prefix {prefix} removed from {count} tensors")
    if not any(name.endswith(".scales") for name in bare):
        raw.pop("quantization", None)
    if "mask_embedding" not in bare and (vector := side_mask(checkpoint, config.hidden_size)) is not None:
        bare["mask_embedding"] = vector
        notes.append("the mask's embedding is that of a file beside the weights")
    return LoadedDrafter(raw, config, bare, dropped, notes)


def _config(raw: dict, checkpoint: Checkpoint) -> DrafterConfig:
    """Raises: ConfigError with the name of the file: for a GGUF file that is not config.json."""
    if checkpoint.gguf is None:
        return DrafterConfig.from_dict(raw, f"{checkpoint.source}/config.json")
    try:
        return DrafterConfig.from_dict(raw, checkpoint.source)
    except ConfigError as error:
        raise ConfigError(error.problem, "Give the safetensors that the GGUF file was made from") from None


def _spread(weights: Weights, config: DrafterConfig) -> Weights:
    """Split fused projections: `qkv_proj` (Laguna's drafters: rows of q, then k, then v) into three, gated queries into two."""
    heads = (config.num_attention_heads, 2, config.head_dim)
    gated = config.architecture == QWEN35_DSPARK
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    out: Weights = {}
    for name, value in weights.items():
        if ".qkv_proj." in name and value.shape[0] == q + 2 * kv:
            out.update(zip(_spread_names(name), mx.split(value, [q, q + kv]), strict=True))
        elif gated and ".q_proj." in name and value.shape[0] == 2 * q:
            # The rows of each head are its queries, then its gates.
            parts = value.reshape(*heads, *value.shape[1:])
            out[name], out[name.replace(".q_proj.", ".q_gate.")] = (parts[:, i].reshape(q, *value.shape[1:]) for i in (0, 1))
        else:
            out[name] = value
    return out


def _spread_names(name: str) -> list[str]:
    """The three names that replace the name of a fused projection or of one of its tensors; any other name unchanged."""
    return [name.replace(".qkv_proj", f".{part}_proj") for part in "qkv"] if ".qkv_proj" in name else [name]


def side_mask(checkpoint: Checkpoint, hidden: int) -> mx.array | None:
    """[H]: the mask vector that XiaomiMiMo keeps in a separate file, which no index names; None if there is none.

    `mask_embedding.safetensors` holds the tensor of that name. Of `mask_embedding.pt`, a zip, only the numbers are
    read, as one storage of H bfloat16 or float32 values: nothing is unpickled. A note says if a file holds no such vector.
    """
    for name, read in (("mask_embedding.safetensors", _stored_vector), ("mask_embedding.pt", _pickled_vector)):
        if checkpoint.gguf is None and (file := checkpoint.path / name).is_file():
            if (vector := read(file, hidden)) is None:
                warnings.warn(f"{checkpoint.source}/{name} holds no vector of {hidden} numbers; it is not used", stacklevel=4)
            return vector
    return None


def _stored_vector(file: Path, hidden: int) -> mx.array | None:
    vector = None
    with suppress(RuntimeError):
        vector = mx.load(str(file)).get("mask_embedding")
    return vector if vector is not None and vector.shape == (hidden,) else None


def _pickled_vector(file: Path, hidden: int) -> mx.array | None:
    if not zipfile.is_zipfile(file):
        return None
    with zipfile.ZipFile(file) as archive:
        sizes = {2 * hidden: mx.bfloat16, 4 * hidden: mx.float32}
        stored = [entry for entry in archive.infolist() if "/data/" in entry.filename and entry.file_size in sizes]
        if len(stored) != 1:
            return None
        data = np.frombuffer(archive.read(stored[0]), np.uint8)
    return mx.array(data).view(sizes[stored[0].file_size])


def is_target_copy(name: str) -> bool:
    """Whether a drafter's tensor was only needed for training."""
    return bool(_TARGET_COPY.match(name))


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether to quantize a drafter's tensor: matrices of layers, and a selector's codebooks. Not matrices of one row (a
    confidence head), which would save nothing, nor those for a noise level, which stay as published."""
    return not name.startswith("log_snr_embed.") and name.endswith((".weight", "_codebook")) and len(shape) == 2 and shape[0] > 1


def group_for(inputs: int) -> int | None:
    """The group size for quantizing a matrix of `inputs` inputs while it is loaded; None: it stays float."""
    return next((size for size in (GROUP, 32) if inputs % size == 0), None)


def hold_in_bits(read: LoadedDrafter, bits: int) -> list[str]:
    """Quantize a float drafter's matrices in place, in groups of 64 inputs, or of 32 where 64 does not divide them.

    One matrix is read and quantized at a time: all of them as floats, beside the target, may not fit in memory.

    Returns: names of the matrices that stay float, because neither divides their inputs.
    """
    weights = dict(read.weights)
    matrices = [name for name, value in weights.items() if is_matrix(name, value.shape)]
    left = [name for name in matrices if not group_for(weights[name].shape[-1])]
    if len(left) == len(matrices):
        return left

    def group(path: str, layer: nn.Module) -> dict:
        return {"group_size": group_for(layer.weight.shape[-1]) or GROUP, "bits": bits}

    weights, recipe = quantize_tensors(weights, GROUP, bits, group)
    # The last references to the float arrays: each is freed as soon as its quantized form exists.
    read.weights.clear()
    for value in weights.values():
        mx.eval(value)
    read.weights.update(weights)
    read.config = replace(read.config, quantization=recipe.config)
    return left


def cast_tensors(weights: Weights, dtype: str | None) -> Weights:
    """Float tensors in another number type; integers (maps of reduced vocabularies, packed weights) as they are."""
    if dtype is None:
        return weights
    to = FLOAT_DTYPES[dtype]
    return {name: value.astype(to) if mx.issubdtype(value.dtype, mx.floating) else value for name, value in weights.items()}


def quantize_tensors(
    weights: Weights, group_size: int, bits: int, predicate: Predicate | None, mode: str = "affine"
) -> tuple[Weights, Recipe]:
    """Quantize the matrices among a drafter's tensors. Shapes: `X.weight` [out, in]; a codebook [rows, rank], whose name
    then ends in `.weight` too; see `quantize` for the recipe."""
    recipe = Recipe()
    chosen: dict[str, dict] = {}
    out: Weights = {}
    usual = mlx_options(group_size, bits, mode)
    for name, value in weights.items():
        path = name.removesuffix(".weight")
        if not is_matrix(name, value.shape) or not mx.issubdtype(value.dtype, mx.floating):
            out[name] = value
            recipe.fates[name] = f"float: {'norm' if 'norm' in name else 'not a matrix'}"
            continue
        layer = nn.Embedding(1, 1) if path.endswith(("embed_tokens", "_codebook", "markov_w1")) else nn.Linear(1, 1, bias=False)
        layer.weight = value
        fate, options = fate_of(path, layer, usual, predicate, None)
        recipe.fates[name if options is None else f"{path}.weight"] = fate
        if options is None:
            out[name] = value
            continue
        chosen[path] = options
        parts = mx.quantize(value, **options)
        # Only affine has biases.
        out.update(zip((f"{path}.weight", f"{path}.scales", f"{path}.biases"), parts, strict=False))
    recipe.settle(chosen, usual)
    return out, recipe
