"""A GGUF file -> what the converter needs of any checkpoint: an HF-style config, named tensors, a tokenizer.

Knows the architectures of llama.cpp that are listed in `_ARCHITECTURES`: their keys, their tensor names and what llama.cpp's own
converter did to the weights, which is undone here. Knows nothing of block layouts (blocks), of rebuilding a tokenizer
(tokenizer) or of writing MLX weights. Opening a file maps it; tensor data is read one tensor at a time by `tensors()`.

    source = read_gguf("SmolLM2-135M-Instruct.Q4_1.gguf")
    for name, value in source.tensors():      # value: mx.array or AffineTensor
        ...
    source.write_tokenizer(directory)

Sources: the GGUF specification (ggml-org/ggml, docs/gguf.md); ggml-org/llama.cpp, conversion/ (what was done to names and
weights) and src/llama-model.cpp (what a missing key means).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

from dflash_mlx.errors import CheckpointError, ConversionError

from .blocks import GROUP_SIZE, AffineTensor, affine_bits, can_decode, decode
from .header import open_gguf
from .tokenizer import special_ids, tokenizer_faults, write_tokenizer


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file, without its data: `shape` is row-major ([out, in]), `hf_name` None if it is not carried over."""

    name: str
    hf_name: str | None
    shape: tuple[int, ...]
    type: str


@dataclass(frozen=True)
class _Architecture:
    """What llama.cpp's name for an architecture means in mlx-lm's terms.

    - model_type: mlx-lm's module
    - layer: GGUF name of a layer's tensor -> HF name; every layer has all of them
    - optional: config flag -> names that either all layers have or none; the flag says which
    - keys: GGUF key -> config key, beside `KEYS`; required, unless `defaults` has llama.cpp's default
    - extra: config entries that the file lacks, computed from those that it has
    - permuted: rows of q and k are interleaved, because llama.cpp's RoPE for this architecture rotates neighbours
    - norm_shift: what llama.cpp's converter added to every norm weight, and mlx-lm's model would add again
    - ignored: keys that llama.cpp does not read for this architecture
    - fixed_head_dim: mlx-lm's model only supports a head size of hidden_size / num_attention_heads
    - scales_rope: mlx-lm's model reads `rope_scaling`
    """

    model_type: str
    layer: dict[str, str]
    optional: dict[str, dict[str, str]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, float] = field(default_factory=dict)
    extra: Callable[[dict], dict] = lambda config: {}
    permuted: bool = False
    norm_shift: float = 0.0
    ignored: frozenset[str] = frozenset()
    fixed_head_dim: bool = False
    scales_rope: bool = True


KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_REQUIRED_KEYS = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
# Read by `_config` and `rope_scaling`; `vocab_size` and `tensor_data_layout` do not affect the computation.
_CHECKED_KEYS = frozenset(
    {
        "attention.causal",
        "attention.value_length",
        "expert_count",
        "expert_used_count",
        "rope.dimension_count",
        "rope.scale_linear",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "tensor_data_layout",
        "vocab_size",
    }
)

_ATTENTION = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
}
_QKV_BIASES = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
_QK_NORMS = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_MLP = {
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_MLP_NORM = {"ffn_norm.weight": "post_attention_layernorm.weight"}
_GEMMA_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}


def _experts(block: str) -> dict[str, str]:
    """A router and stacked experts, [experts, out, in], under mlx-lm's own names (its sanitizing leaves these as they are)."""
    return {
        "ffn_gate_inp.weight": f"{block}.gate.weight",
        "ffn_gate_exps.weight": f"{block}.switch_mlp.gate_proj.weight",
        "ffn_up_exps.weight": f"{block}.switch_mlp.up_proj.weight",
        "ffn_down_exps.weight": f"{block}.switch_mlp.down_proj.weight",
    }


def _query_scalar(layers_of_27b: int) -> Callable[[dict], dict]:
    """Gemma's 27B scales queries by hidden / heads, the others by head_dim. No key says it; llama.cpp counts layers, as here."""

    def extra(config: dict) -> dict:
        per_head = config["hidden_size"] // config["num_attention_heads"]
        return {"query_pre_attn_scalar": per_head if config["num_hidden_layers"] == layers_of_27b else config["head_dim"]}

    return extra


_LLAMA_LAYER = _ATTENTION | _MLP_NORM | _MLP
_LLAMA_OPTIONAL = {
    "attention_bias": _QKV_BIASES | {"attn_output.bias": "self_attn.o_proj.bias"},
    "mlp_bias": {
        "ffn_gate.bias": "mlp.gate_proj.bias",
        "ffn_up.bias": "mlp.up_proj.bias",
        "ffn_down.bias": "mlp.down_proj.bias",
    },
}
# llama.cpp loads no window for the llama architecture, so such a key (early Mistral files) never had an effect
_LLAMA_IGNORED = frozenset({"attention.sliding_window", "expert_feed_forward_length"})

_ARCHITECTURES = {
    "llama": _Architecture("llama", _LLAMA_LAYER, _LLAMA_OPTIONAL, permuted=True, ignored=_LLAMA_IGNORED),
    "smollm3": _Architecture("smollm3", _LLAMA_LAYER, permuted=True),
    "qwen2": _Architecture("qwen2", _LLAMA_LAYER | _QKV_BIASES, fixed_head_dim=True),
    "qwen3": _Architecture("qwen3", _LLAMA_LAYER | _QK_NORMS),
    "qwen3moe": _Architecture(
        "qwen3_moe",
        _ATTENTION | _MLP_NORM | _QK_NORMS | _experts("mlp"),
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        extra=lambda config: {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    ),
    "gemma": _Architecture("gemma", _ATTENTION | _MLP_NORM | _MLP, norm_shift=1.0, scales_rope=False),
    "gemma2": _Architecture(
        "gemma2",
        _ATTENTION | _MLP | _GEMMA_NORMS,
        keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
            "attention.sliding_window": "sliding_window",
        },
        defaults={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 4096},
        extra=_query_scalar(layers_of_27b=46),
        norm_shift=1.0,
        scales_rope=False,
    ),
    "gemma3": _Architecture(
        "gemma3_text",
        _ATTENTION | _QK_NORMS | _MLP | _GEMMA_NORMS,
        keys={
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        defaults={"attention.sliding_window_pattern": 6, "rope.freq_base_swa": 10000.0},
        extra=_query_scalar(layers_of_27b=62),
        norm_shift=1.0,
    ),
}
# llama.cpp names Mixtral "llama" too; it is recognised by its experts.
_MIXTRAL = _Architecture(
    "mixtral",
    _ATTENTION | _MLP_NORM | _experts("block_sparse_moe"),
    keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    permuted=True,
    ignored=_LLAMA_IGNORED,
    fixed_head_dim=True,
)

# Architectures with an error message of their own.
_REFUSED = {
    "clip": "the image encoder of a multimodal model",
}

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FREQS = "rope_freqs.weight"

# Per-layer tables in early llama.cpp files; mlx-lm computes them.
_ROT_EMBD = "attn_rot_embd.weight"


class GGUFSource:
    """An open GGUF file, made by `read_gguf`. It maps the file and does not load the data.

    - path: the file
    - config: HF-style config for mlx-lm's model, with `quantization` in mlx-lm's spelling if any tensor stays quantized
    - tensor_infos: every tensor of the file
    - fates: GGUF tensor name -> what was done to it; `tensors()` adds each as it goes
    """

    def __init__(
        self,
        path: Path,
        reader: gguf.GGUFReader,
        architecture: _Architecture,
        config: dict[str, Any],
        names: dict[str, str],
        fates: dict[str, str],
        tokenizer: dict[str, Any],
    ):
        self.path = path
        self.config = config
        self.fates = fates
        self.tensor_infos = [TensorInfo(t.name, names.get(t.name), _shape(t), t.tensor_type.name) for t in reader.tensors]
        self._reader = reader
        self._architecture = architecture
        self._tokenizer = tokenizer

    def tensors(self) -> Iterator[tuple[str, mx.array | AffineTensor]]:
        """Every tensor of the model as (HF name, value), in file order, read from disk one at a time.

        Shapes:
          - value: as `TensorInfo.shape`, [out, in]; experts [experts, out, in]
        Raises:
          CheckpointError: if a quantized tensor holds scales that are not finite.
        """
        shift = self._architecture.norm_shift
        for info, tensor in zip(self.tensor_infos, self._reader.tensors, strict=True):
            if info.hf_name is None:
                continue
            data, notes = tensor.data, []
            if heads := self._interleaved_heads(info.hf_name):
                data = _to_rotate_half(data, info.shape[0], heads)
                notes.append("rows un-permuted from interleaved to rotate-half RoPE")
            try:
                value, fate = decode(data, tensor.tensor_type)
            except ValueError as error:
                raise CheckpointError(f"{info.name} in {self.path} is not finite: {error}", "Download the file again") from error
            if shift and info.hf_name.endswith("norm.weight"):
                value = value.astype(mx.float32) - shift
                notes.append(f"minus {shift:g} in float32, which mlx-lm adds again")
            self.fates[info.name] = "; ".join([fate, *notes])
            yield info.hf_name, value

    def write_tokenizer(self, directory: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, as the file has them, a chat template and a list of EOS ids."""
        write_tokenizer(self._tokenizer, Path(directory))

    def _interleaved_heads(self, hf_name: str) -> int:
        """The number of heads whose rows are interleaved in this tensor; 0 for none."""
        if not self._architecture.permuted:
            return 0
        if ".q_proj." in hf_name:
            return self.config["num_attention_heads"]
        return self.config["num_key_value_heads"] if ".k_proj." in hf_name else 0


def read_gguf(path: str | Path) -> GGUFSource:
    """Open a GGUF file: its header, names and tokenizer are read and checked, tensor data is not.

    Raises:
      CheckpointError: if the file is missing, is not GGUF or is damaged.
      ConversionError: if it is sound but cannot be converted: an unknown architecture, tensor type, RoPE scaling, pre-tokenizer
        or key, tensors missing or without a place. All such faults are in one message.
    """
    path = Path(path)
    opened = open_gguf(path)
    if opened.is_drafter:
        raise ConversionError(
            f"{path} is a DFlash drafter in GGUF; a target (a whole language model) belongs here",
            "Give it as the draft model, beside the target that it was trained for",
        )
    reader, metadata = opened.reader, opened.metadata
    arch = metadata.get("general.architecture")
    architecture = _MIXTRAL if arch == "llama" and metadata.get("llama.expert_count") else _ARCHITECTURES.get(arch)

    faults = []
    if (parts := metadata.get("split.count", 1)) != 1:
        faults.append(f"it is one of {parts} parts (join them with `llama-gguf-split --merge`)")
    unreadable = Counter(t.tensor_type.name for t in reader.tensors if not can_decode(t.tensor_type))
    faults += [f"{count} tensors of type {kind}, which gguf cannot dequantize" for kind, count in unreadable.items()]
    tokenizer = {key.removeprefix("tokenizer."): value for key, value in metadata.items() if key.startswith("tokenizer.")}
    faults += tokenizer_faults(tokenizer)
    if architecture is None:
        known = ", ".join(sorted(_ARCHITECTURES))
        faults.append(f"architecture {arch!r}, {_REFUSED.get(arch, f'which is not one of {known}')}")
        raise _conversion_error(path, faults)

    config, config_faults = _config(reader, metadata, architecture, len(tokenizer.get("ggml.tokens", [])))
    faults += config_faults
    if config is not None:
        names, fates = _names(reader, architecture, config, faults)
    if faults:
        raise _conversion_error(path, faults)
    config |= special_ids(tokenizer)
    return GGUFSource(path, reader, architecture, config, names, fates, tokenizer)


def _conversion_error(path: Path, faults: list[str]) -> ConversionError:
    return ConversionError(
        f"{path} cannot be converted: {'; '.join(faults)}",
        "Convert the original Hugging Face checkpoint, or use another GGUF file of it",
    )


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    """ggml counts axes from the innermost: [in, out, experts] -> (experts, out, in)."""
    return tuple(int(n) for n in reversed(tensor.shape))


def _config(
    reader: gguf.GGUFReader, metadata: dict[str, Any], architecture: _Architecture, tokens: int
) -> tuple[dict[str, Any] | None, list[str]]:
    """The HF-style config and the faults found; None if the keys do not give one."""
    arch = metadata["general.architecture"]
    keys = KEYS | architecture.keys
    found = {key.removeprefix(f"{arch}."): value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    found = {key: value[0] if isinstance(value, list) and len(set(value)) == 1 else value for key, value in found.items()}

    faults = [f"{arch}.{key}, which differs by layer or is an array" for key, value in found.items() if isinstance(value, list)]
    required = [*_REQUIRED_KEYS, *(key for key in architecture.keys if key not in architecture.defaults)]
    if missing := [f"{arch}.{key}" for key in required if key not in found]:
        faults.append(f"no {', '.join(missing)}")
    faults += [
        f"{arch}.{key} = {found[key]!r}, which is no positive number"
        for key in keys
        if key in found and not isinstance(found[key], list) and not (isinstance(found[key], int | float) and found[key] > 0)
    ]
    # also stops a damaged count before a loop over its layers
    if isinstance(layers := found.get("block_count"), int) and layers > len(reader.tensors):
        faults.append(f"{arch}.block_count = {layers} for {len(reader.tensors)} tensors")
    if faults:
        return None, faults
    if unknown := sorted(found.keys() - keys.keys() - _CHECKED_KEYS - architecture.ignored):
        faults.append(f"keys with an unknown effect: {', '.join(f'{arch}.{key} = {found[key]}' for key in unknown)}")

    per_head = found["embedding_length"] // found["attention.head_count"]
    # llama.cpp's defaults for what a file lacks
    found = {
        "attention.head_count_kv": found["attention.head_count"],
        "attention.key_length": per_head,
        "rope.freq_base": 10000.0,
        **architecture.defaults,
    } | found
    config = {"model_type": architecture.model_type}
    config |= {name: found[key] for key, name in keys.items() if key in found}
    config |= architecture.extra(config)

    head_dim = config["head_dim"]
    for key in ("rope.dimension_count", "attention.value_length"):
        if found.get(key, head_dim) != head_dim:
            faults.append(f"{arch}.{key} = {found[key]} beside heads of {head_dim}")
    if architecture.fixed_head_dim and head_dim != per_head:
        faults.append(f"heads of {head_dim}, where mlx-lm's {architecture.model_type} has hidden / heads = {per_head}")
    if found.get("attention.causal") is False:
        faults.append(f"{arch}.attention.causal = False")
    if found.get("expert_count") and "expert_count" not in keys:
        faults.append(f"{arch}.expert_count = {found['expert_count']}")
    if scaling := rope_scaling(reader, arch, found, config, faults):
        config["rope_scaling"] = scaling
        if not architecture.scales_rope:
            faults.append(f"RoPE scaling {scaling}, which mlx-lm's {architecture.model_type} does not have")

    tensors = {t.name: t for t in reader.tensors}
    config["vocab_size"] = _shape(tensors["token_embd.weight"])[0] if "token_embd.weight" in tensors else tokens
    if tokens > config["vocab_size"]:
        faults.append(f"{tokens} tokens for {config['vocab_size']} embedding rows")
    config["tie_word_embeddings"] = "output.weight" not in tensors
    return config, faults


def rope_scaling(reader: gguf.GGUFReader, arch: str, found: dict, config: dict, faults: list[str]) -> dict[str, Any] | None:
    """`rope_scaling` in HF's spelling, from the keys or from the frequency factors of a Llama 3 file."""
    # `rope.scale_linear` is how early files spelled a linear factor
    factor = found.get("rope.scaling.factor", found.get("rope.scale_linear", 1.0))
    kind = found.get("rope.scaling.type", "linear")
    scaling = None
    if kind == "linear" and factor not in (0.0, 1.0):
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        original = found.get("rope.scaling.original_context_length", config["max_position_embeddings"])
        betas = {name: found.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        scaling |= {name: beta for name, beta in betas.items() if beta is not None}
    elif kind not in ("none", "linear"):
        faults.append(f"{arch}.rope.scaling.type = {kind!r}")

    factors = next((t.data for t in reader.tensors if t.name == _ROPE_FREQS), None)
    if factors is None or (factors == 1).all():
        return scaling
    llama3 = _llama3_scaling(factors, config["head_dim"], config["rope_theta"])
    if llama3 is None or scaling:
        faults.append(f"frequency factors in {_ROPE_FREQS} that no Llama 3 scaling gives")
    return llama3


def _llama3_factors(wavelengths: np.ndarray, factor: float, high: float, original: float) -> np.ndarray:
    """What Llama 3's scaling divides each RoPE frequency by, with low_freq_factor 1. [head_dim / 2]."""
    smooth = np.clip((original / wavelengths - 1) / (high - 1), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _llama3_scaling(factors: np.ndarray, head_dim: int, theta: float) -> dict[str, Any] | None:
    """The Llama 3 parameters from which a file's frequency factors were made; None if there are none.

    Between the plateaus 1 and `factor`, 1 / factors is linear in 1 / wavelength; slope and offset give the two other parameters.
    Low, high and original length have a common scale, so low_freq_factor is taken as 1; with too few points for a slope,
    high_freq_factor as 4 (both as in every published model). The result must give the same factors.

    Shapes:
      - factors: [head_dim / 2] float32
    Source: `generate_extra_tensors` of llama.cpp's LlamaModel; `Llama3RoPE` of mlx-lm.
    """
    factor = float(factors.max())
    if factors.shape != (head_dim // 2,) or not (factors.min() > 0.9999 and 1.0001 < factor < math.inf):
        return None
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    slanted = (factors > 1.0001) & (factors < 0.9999 * factor)
    smooth = (1 / factors[slanted].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    high = 4.0
    if slanted.sum() > 1:
        slope, offset = np.polyfit(1 / wavelengths[slanted], smooth, 1)
        if slope <= 0 or offset >= 0:
            return None
        high, original = round(1 - 1 / offset, 3), -slope / offset
    elif slanted.sum() == 1:
        original = float(wavelengths[slanted][0] * (1 + smooth[0] * (high - 1)))
    else:
        # no frequency lies between the plateaus: any length between them gives these factors
        original = math.sqrt(high * wavelengths[factors < 1.0001].max(initial=1) * wavelengths[factors > 1.0001].min())
    original = round(original)
    if not np.allclose(_llama3_factors(wavelengths, factor, high, original), factors, rtol=1e-4):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _names(
    reader: gguf.GGUFReader, architecture: _Architecture, config: dict[str, Any], faults: list[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """GGUF name -> HF name of every tensor that is carried over, and what became of the others.

    Adds to `config` the flags of optional tensors and `quantization`, and to `faults` the tensors missing or without a place.
    """
    tensors = {t.name: t for t in reader.tensors}
    layers = range(config["num_hidden_layers"])
    expected = dict(_GLOBAL)
    if config["tie_word_embeddings"]:
        del expected["output.weight"]
    per_layer = dict(architecture.layer)
    for flag, optional in architecture.optional.items():
        config[flag] = any(f"blk.{i}.{name}" in tensors for i in layers for name in optional)
        per_layer |= optional if config[flag] else {}
    expected |= {f"blk.{i}.{name}": f"model.layers.{i}.{hf_name}" for i in layers for name, hf_name in per_layer.items()}

    fates = {name: "not carried over: a RoPE table, which mlx-lm computes" for name in tensors if name.endswith(_ROT_EMBD)}
    if _ROPE_FREQS in tensors:
        fates[_ROPE_FREQS] = f"turned into rope_scaling {config.get('rope_scaling')}"
    missing, unexpected = expected.keys() - tensors.keys(), tensors.keys() - expected.keys() - fates.keys()
    for fault, names in (("missing", sorted(missing)), ("unexpected", sorted(unexpected))):
        if names:
            faults.append(f"{len(names)} {fault} tensors: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}")

    for name, hf_name in expected.items():
        heads = "num_attention_heads" if ".q_proj." in hf_name else "num_key_value_heads" if ".k_proj." in hf_name else None
        if heads and name in tensors and _shape(tensors[name])[0] != config[heads] * config["head_dim"]:
            rows = _shape(tensors[name])[0]
            faults.append(f"{rows} rows in {name} for {config[heads]} heads of {config['head_dim']}")

    bits = {
        hf_name.removesuffix(".weight"): affine_bits(tensors[name].tensor_type)
        for name, hf_name in expected.items()
        if name in tensors and len(tensors[name].shape) > 1 and affine_bits(tensors[name].tensor_type)
    }
    if bits:
        usual = Counter(bits.values()).most_common(1)[0][0]
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": usual} | {
            path: {"group_size": GROUP_SIZE, "bits": own} for path, own in bits.items() if own != usual
        }
    return expected, fates


def _to_rotate_half(data: np.ndarray, rows: int, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k: per head, pairs (x0 y0 x1 y1 ...) become halves (x0 x1 ... y0 y1 ...).

    Rows are whole runs of blocks, so this moves bytes and changes no value, whatever the type.

    Shapes:
      - data: [rows, row bytes or values], or a bias as [rows] values or [rows * 2] bytes (BF16)
    Source: `LlamaModel.permute` in llama.cpp's converter, inverted.
    """
    order = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
    return data.reshape(rows, -1)[order].reshape(data.shape)
