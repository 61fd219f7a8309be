"""A target checkpoint -> an mlx-lm model with exactly its weights.

Knows: mlx-lm's model classes, what `configs` normalised and which `layouts` exist. Knows nothing of writing files. mlx-lm's own
`sanitize` does the renaming wherever it is right; what it gets wrong is done before it (experts, `1 + weight` in float32) or
checked after it (every parameter is there, nothing is left over, shapes are equal).
"""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.checkpoint import Checkpoint, inspect_checkpoint, require_target
from dflash_mlx.errors import CheckpointError, ConfigError, ConversionError, DFlashError, one_line

from .activations import correct_activation
from .config_values import TEXT_CONFIG_KEYS, check_values
from .configs import TargetConfig, mlx_module, normalise_config
from .dequantize import decode_quantized, types_of_scales
from .layouts import NEEDED, Layout, Weights, layouts, strip_text_prefix, unused_reason, without_zero_biases
from .packings import plain
from .rope import correct_rope
from .sliding_window import add_windows

_HALF = (mx.bfloat16, mx.float16)
_MOST_NAMES = 6


@dataclass
class LoadedTarget:
    """A built model, and how it was made.

    - dropped: source tensor -> why the text model does not use it
    - layout: name of the layout that fitted
    - fates: source tensor -> its name in the model, or how it was combined with others
    - types: parameter -> the type of its tensors in the files, where the model holds it (exactly) in float32 instead
    - notes: sentences for the user
    """

    model: nn.Module
    config: dict
    target: TargetConfig
    layout: str
    dropped: dict[str, str] = field(default_factory=dict)
    fates: dict[str, str] = field(default_factory=dict)
    types: dict[str, mx.Dtype] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def cast(self, dtype: mx.Dtype | None, *, spare: bool = True) -> None:
        """Give every float parameter the type of its tensors in the files, or `dtype`.

        Args:
          spare: do not cast what the family's class keeps (`cast_predicate`: float32 decays, correction biases).
        """
        may = getattr(self.model, "cast_predicate", None) if spare else None
        due = {}
        for name, value in tree_flatten(self.model.parameters()):
            if mx.issubdtype(value.dtype, mx.floating):
                own = self.types.get(name, value.dtype)
                due[name] = value.astype(own if dtype is None or (may and not may(name)) else dtype)
        self.model.load_weights(list(due.items()), strict=False)


def load_target(
    path_or_repo: str | Path,
    *,
    revision: str | None = None,
    lazy: bool = False,
) -> tuple[nn.Module, dict]:
    """Load any target that `convert` accepts straight into an mlx-lm model, writing nothing.

    Args:
      path_or_repo: a directory saved by transformers 4 or 5 or by mlx-lm, a converted directory, a GGUF file, a hub repository
      lazy: leave the weights unread until they are used
    Returns:
      the model, in the number types of the files (computed vectors such as `1 + weight` in float32), and its config.
    Raises:
      CheckpointError: files or tensors missing, unexpected, damaged, or not a target's
      ConfigError: a config that mlx-lm cannot express
    """
    loaded = read_target(inspect_checkpoint(path_or_repo, revision=revision))
    if not lazy:
        mx.eval(loaded.model.parameters())
    return loaded.model, loaded.config


def read_target(checkpoint: Checkpoint) -> LoadedTarget:
    """`load_target` for an inspected checkpoint, with a record of what was done. Weights stay unread if possible."""
    if checkpoint.kind == "gguf":
        from .gguf.source import read_gguf

        source = read_gguf(checkpoint.path)
        loaded = build_target(source.config, gguf_weights(source), str(checkpoint.path))
        # by the names in the file, because its reader does more to a tensor than rename it
        loaded.fates = dict(source.fates)
        return loaded
    require_target(checkpoint)
    config = checkpoint.config
    weights, config, notes = decode_quantized(checkpoint.load(), config, checkpoint)
    try:
        loaded = build_target(config, weights, checkpoint.source, checkpoint)
    except CheckpointError:
        if "quantization" in checkpoint.config or "quantization" not in config:
            raise
        # Some classes, such as Falcon-H1's, multiply their matrices and need floats.
        weights, config, notes = decode_quantized(checkpoint.load(), checkpoint.config, checkpoint, keep_packed=False)
        loaded = build_target(config, weights, checkpoint.source, checkpoint)
    loaded.notes = notes + loaded.notes
    if "quantization" not in checkpoint.config:
        loaded.types |= types_of_scales(loaded.model, checkpoint)
    return loaded


def gguf_weights(source) -> Weights:
    """Tensors of a GGUF source under mlx-lm's names: affine ones as weight, scales and biases."""
    weights: Weights = {}
    for name, value in source.tensors():
        if isinstance(value, mx.array):
            weights[name] = value
            continue
        base = name.removesuffix(".weight")
        weights[name], weights[f"{base}.scales"], weights[f"{base}.biases"] = value.weight, value.scales, value.biases
    return weights


def build_target(raw_config: dict, weights: Weights, where: str, checkpoint: Checkpoint | None = None) -> LoadedTarget:
    """Build the model of a config and load `weights` (source names) into it.

    Raises:
      CheckpointError: the weights are not exactly the model's parameters; all faults are in one message.
      ConfigError: values that no model can be built from.
    """
    try:
        return _build_target(raw_config, weights, where, checkpoint)
    except DFlashError:
        raise
    except _BUILD_ERRORS as error:
        file = f"{where}/config.json" if checkpoint else where
        raise ConfigError(
            f"no model can be built from {file}: {type(error).__name__} {one_line(error)}",
            "Compare it with the original repository's",
        ) from error


# what mlx-lm's and transformers' code raises for values that it does not check
_BUILD_ERRORS = (AttributeError, LookupError, TypeError, ValueError, AssertionError, ArithmeticError, RecursionError)


def _build_target(raw_config: dict, weights: Weights, where: str, checkpoint: Checkpoint | None) -> LoadedTarget:
    check_values(raw_config, f"{where}/config.json" if checkpoint else where)
    _check_depth(raw_config, weights, where)
    target = normalise_config(raw_config, where=f"{where}/config.json" if checkpoint else where)
    weights, dropped = _drop_unused(weights, target)
    _settle_head(weights, dropped, target, where)
    as_filed = weights
    weights = _vectors_in_float32(weights)

    faults: list[str] | None = None
    for layout in layouts(target.text["model_type"], weights):
        tried = _handles(weights)
        model, ready, found = _try_layout(target, tried, layout, where)
        if not found:
            break
        if faults is None or len(found) < len(faults):
            faults = found
    else:
        raise CheckpointError(*_fault_message(faults or [], where, target))

    _refuse_lost(weights, ready, target, where)
    _refuse_types(model, ready, where)
    _refuse_changed(tried, ready, where)
    left = {_layer_and_end(name) for name in ready}
    biases = [name for name in tried if name.endswith(".bias") and _layer_and_end(_formed_names(name)[0]) not in left]
    dropped |= {name: "a bias of zeros" for name in biases if not mx.any(tried[name]).item()}
    fates = _fates({name: value for name, value in tried.items() if name not in dropped}, ready, layout.name)
    notes = list(target.notes)
    if any(target.windows):
        add_windows(model, target.windows)
    notes += correct_rope(model, target)
    notes += correct_activation(model, target)
    ready, types = _vectors_back(ready, _types_of_files(target, as_filed, layout))
    model.eval()
    model.load_weights(list(ready.items()), strict=True)
    if dropped:
        notes.append(_dropped_note(dropped))
    return LoadedTarget(model, target.config, target, layout.name, dropped, fates, types, notes)


def _check_depth(config: dict, weights: Weights, where: str) -> None:
    """Refuse a number of layers that is far from what the tensors have, before such a model is built."""
    numbers = [int(match.group(2)) for name in weights if (match := _NUMBERED.search(name))]
    found = max(numbers, default=-1) + 1
    for part in (config, *(config[key] for key in TEXT_CONFIG_KEYS if isinstance(config.get(key), dict))):
        layers = part.get("num_hidden_layers")
        # a few layers too many are reported later, by the names of the missing tensors
        if layers is not None and layers > max(4 * found, _MOST_LAYERS_UNSEEN):
            raise ConfigError(
                f"config.json says num_hidden_layers {layers}; the tensors in {where} have {found} layers",
                "Take config.json from the original repository of the model",
            )


_NUMBERED = re.compile(r"(^|\.)(?:layers|h|blocks|blk)\.(\d+)\.")
_MOST_LAYERS_UNSEEN = 256


def _drop_unused(weights: Weights, target: TargetConfig) -> tuple[Weights, dict[str, str]]:
    kept: Weights = {}
    dropped: dict[str, str] = {}
    for name, value in weights.items():
        reason = unused_reason(name, target.num_layers)
        if reason:
            dropped[name] = reason
        else:
            kept[strip_text_prefix(name) if target.unwrapped else name] = value
    return kept, dropped


def _settle_head(weights: Weights, dropped: dict[str, str], target: TargetConfig, where: str) -> None:
    """Make the tensors and `tie_word_embeddings` agree about the output head."""
    heads = [name for name in weights if name == "lm_head.weight" or name.endswith(".lm_head.weight")]
    tied = _is_tied(heads[0] if heads else None, weights, target, where)
    if tied:
        for name in heads:
            for suffix in _PARTS:
                if weights.pop(name.removesuffix("weight") + suffix, None) is not None:
                    dropped[name.removesuffix("weight") + suffix] = "tied: the output head is the embedding"
    for config in (target.text, target.config):
        config["tie_word_embeddings"] = tied


def _is_tied(head: str | None, weights: Weights, target: TargetConfig, where: str) -> bool:
    if len(target.tied) == 1:
        tied = next(iter(target.tied))
        if not tied and head is None and _has_own_head(target):
            raise CheckpointError(
                f"{where} has no lm_head.weight, and its config says tie_word_embeddings false",
                "Download the checkpoint again, or set tie_word_embeddings to true if the model shares its embedding",
            )
        return tied
    # wrapper and text model contradict each other, or neither says it: the files decide
    if head is None:
        target.notes.append("no lm_head.weight: the output head is the embedding")
        return True
    embedding = _embedding_name(weights)
    if target.tied or not target.tied_by_default or embedding is None:
        return False
    return weights[head].shape == weights[embedding].shape and mx.array_equal(weights[head], weights[embedding]).item()


_PARTS = ("weight", "scales", "biases")


def _embedding_name(weights: Weights) -> str | None:
    names = [name for name in weights if name.endswith(("embed_tokens.weight", "word_embeddings.weight", "wte.weight"))]
    return names[0] if len(names) == 1 else None


def _has_own_head(target: TargetConfig) -> bool:
    untied = copy.deepcopy(target)
    for part in (untied.config, untied.text):
        part["tie_word_embeddings"] = False
    return any(path.rpartition(".")[2] == "lm_head" for path, _ in _construct(untied).named_modules())


def _construct(target: TargetConfig) -> nn.Module:
    module = mlx_module(target.config)
    config = _private_copy(target.config)
    (config["text_config"] if target.text is not target.config else config).update(target.while_building)
    try:
        return module.Model(module.ModelArgs.from_dict(_private_copy(config)))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        for scaling in (None, _NEUTRAL_SCALING):
            # some classes refuse unknown scaling, others refuse none; `correct_rope` sets the right one later
            try:
                return module.Model(module.ModelArgs.from_dict(_with_scaling(config, scaling)))
            except (TypeError, ValueError, KeyError, AttributeError):
                continue
        raise ConfigError(
            f"mlx-lm's {target.family} cannot be built from config.json: {one_line(error, None)}",
            "Compare config.json with the original repository's",
        ) from error


_NEUTRAL_SCALING = {"rope_type": "default", "type": "default", "factor": 1.0}


def _private_copy(config: dict) -> dict:
    # some ModelArgs remove keys from the nested dicts that they get
    return copy.deepcopy(config)


def _with_scaling(config: dict, scaling: dict | None) -> dict:
    config = _private_copy(config)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and "rope_scaling" in part:
            part["rope_scaling"] = scaling
    return config


def _vectors_in_float32(weights: Weights) -> Weights:
    """Half-precision vectors to float32 before `sanitize`: `1 + weight` in bfloat16 loses up to 8 bits of the weight."""
    return {k: v.astype(mx.float32) if v.ndim == 1 and v.dtype in _HALF else v for k, v in weights.items()}


def _types_of_files(target: TargetConfig, weights: Weights, layout: Layout) -> dict[str, mx.Dtype]:
    """Parameter -> the type that mlx-lm's own loading gives it. Nothing is computed."""
    if not any(value.ndim == 1 and value.dtype in _HALF for value in weights.values()):
        return {}
    ready, model = layout.apply(_handles(weights)), _construct(target)
    ready = model.sanitize(dict(ready)) if hasattr(model, "sanitize") else ready
    return {name: value.dtype for name, value in ready.items() if value.ndim == 1}


def _vectors_back(weights: Weights, types: dict[str, mx.Dtype]) -> tuple[Weights, dict[str, mx.Dtype]]:
    """Turn vectors back into the files' types if that loses nothing.

    Returns: the weights; and the types of the vectors that `sanitize` computed and that stay float32.
    """
    out, wider = {}, {}
    for name, value in weights.items():
        due = types.get(name, value.dtype)
        if due != value.dtype:
            narrow = value.astype(due)
            if mx.array_equal(narrow.astype(value.dtype), value).item():
                value = narrow
            else:
                wider[name] = due
        out[name] = value
    return out, wider


def _handles(weights: Weights) -> Weights:
    """The same arrays as new objects: Falcon-H1's `sanitize` multiplies in place, and here it runs more than once."""
    return {name: mx.stop_gradient(value) for name, value in weights.items()}


def _try_layout(target: TargetConfig, weights: Weights, layout: Layout, where: str) -> tuple[nn.Module, Weights, list[str]]:
    """-> (model, weights under the model's names, faults). A fresh model each time: `sanitize` may change it."""
    model = _construct(target)
    try:
        ready = layout.apply(weights)
        if hasattr(model, "sanitize"):
            ready = model.sanitize(dict(ready))
    except (KeyError, ValueError, IndexError) as error:
        return model, {}, [f"{layout.name}: {type(error).__name__} {error}"] * (len(weights) + 1)
    quantize_to_match(model, ready, target.config, where)
    ready = without_zero_biases(ready, dict(tree_flatten(model.parameters())))
    _share_embedding(model, ready, target)
    _fill_shared_keys(model, ready, target)
    return model, ready, _faults(model, ready)


def _fates(source: Weights, ready: Weights, layout: str) -> dict[str, str]:
    """What became of each source tensor; arrays that `sanitize` left alone are recognised by identity."""
    names_of = {id(value): name for name, value in ready.items()}
    kept = {id(value) for value in source.values()}
    formed: dict[tuple[str, str], list[str]] = {}
    for name, value in ready.items():
        if id(value) not in kept:
            formed.setdefault(_layer_and_end(name), []).append(name)
    how = f"combined, split or transposed (layout: {layout}; mlx-lm's sanitize)"
    fates = {}
    for name, value in source.items():
        # a computed tensor of the same name; else those of the same layer with the same end of the name, if that is unique
        found = [[name]] if name in ready else [formed.get(_layer_and_end(end), []) for end in _formed_names(name)]
        into = f" into {' and '.join(names[0] for names in found)}" if all(len(names) == 1 for names in found) else ""
        fates[name] = f"as {names_of[id(value)]}" if id(value) in names_of else how + into
    return fates


def _layer_and_end(name: str) -> tuple[str, str]:
    """`model.layers.3.mlp.experts.7.up_proj.weight` -> ("3", "experts.up_proj.weight"); shared experts stay apart."""
    layer = _NUMBERED.search(name)
    routed = "experts." if re.search(r"\.(experts|switch_mlp)\.", name) else ""
    return layer.group(2) if layer else "", routed + ".".join(name.split(".")[-2:])


def _formed_names(name: str) -> list[str]:
    """A source tensor's name as mlx-lm ends it: w1 to w3 spelled out, stacked experts with `.weight`, gate and up apart."""
    for old, new in ((".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")):
        name = name.replace(old, new)
    if name.endswith("_proj"):
        name += ".weight"
    return [name.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")] if "gate_up_proj" in name else [name]


def _refuse_lost(source: Weights, ready: Weights, target: TargetConfig, where: str) -> None:
    """Refuse when mlx-lm's `sanitize` dropped a tensor that takes part in the computation."""
    kept = {NEEDED.search(name).group() for name in ready if NEEDED.search(name)}
    lost = [name for name in source if NEEDED.search(name) and NEEDED.search(name).group() not in kept]
    lost = [name for name in lost if mx.any(source[name] != 0).item()]
    if lost:
        raise ConversionError(
            f"mlx-lm's {target.family} drops {lost[0]}{_and_more(len(lost) - 1)} of {where}, not zero, which take part in the "
            "computation",
            "This checkpoint needs another implementation",
        )


def _refuse_types(model: nn.Module, weights: Weights, where: str) -> None:
    """Refuse integers where the model computes with floats, and packed weights or scales in another type than MLX packs them."""
    faults: dict[str, list[str]] = {}
    for name, value in tree_flatten(model.parameters()):
        found, due = weights[name].dtype, value.dtype
        is_float = mx.issubdtype(due, mx.floating)
        packed = not is_float and f"{name.rpartition('.')[0]}.scales" in weights
        if (is_float and not mx.issubdtype(found, mx.floating)) or (packed and found != due):
            faults.setdefault(f"{plain(found)} where {plain(due)} belongs", []).append(name)
    if faults:
        each = "; ".join(f"{kind}: {names[0]}{_and_more(len(names) - 1)}" for kind, names in faults.items())
        raise CheckpointError(
            f"{where} has other number types than mlx-lm's model: {each}", "Use the float checkpoint that it was made from"
        )


def _refuse_changed(source: Weights, ready: Weights, where: str) -> None:
    """Refuse if `sanitize` computed with the words of a packed matrix as if they were numbers."""
    for name, value in ready.items():
        packed = name in source and f"{name.rpartition('.')[0]}.scales" in source and source[name].dtype == mx.uint32
        if packed and value is not source[name] and not mx.array_equal(value, source[name]).item():
            raise CheckpointError(
                f"mlx-lm computes with {name} of {where}, which is packed", "Use the float checkpoint that it was made from"
            )


def _and_more(count: int) -> str:
    return f" and {count} more" if count else ""


def _share_embedding(model: nn.Module, weights: Weights, target: TargetConfig) -> None:
    """Give a tied model's head the embedding, in a family whose class always has a head of its own."""
    embedding = _embedding_name(weights)
    if not target.text["tie_word_embeddings"] or embedding is None:
        return
    for name, _ in tree_flatten(model.parameters()):
        path, _, part = name.rpartition(".")
        source = embedding.removesuffix("weight") + part
        if path.rpartition(".")[2] == "lm_head" and name not in weights and source in weights:
            weights[name] = weights[source]


def quantize_to_match(model: nn.Module, weights: Weights, config: dict, where: str) -> None:
    """Turn the layers whose weights come with scales into quantized ones, each with its own bits and group size."""
    from mlx_lm.utils import infer_quant_config

    if not any(name.endswith(".scales") for name in weights):
        config.pop("quantization", None)
        return
    quantization = config.get("quantization") or {}
    chosen: dict[str, dict] = {}

    def predicate(path: str, module: nn.Module) -> bool | dict:
        if not hasattr(module, "to_quantized") or not {f"{path}.scales", f"{path}.weight"} <= weights.keys():
            return False
        try:
            chosen[path] = infer_quant_config(path, module, weights)
        except (ValueError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"the scales of {path}.weight in {where} do not fit it: {error}", "Quantize the checkpoint again"
            ) from error
        if f"{path}.biases" not in weights and chosen[path]["mode"] == "affine":
            raise CheckpointError(f"{where} has {path}.scales and no {path}.biases", "Convert it again")
        return chosen[path]

    nn.quantize(model, class_predicate=predicate)
    if not chosen:
        return
    default = {k: quantization[k] for k in ("group_size", "bits", "mode") if quantization.get(k) is not None}
    common = [(tuple(sorted(entry.items()))) for entry in chosen.values()]
    usual = dict(max(set(common), key=common.count))
    default = {**usual, **default} if default.get("bits") and default.get("group_size") else usual
    spelled = {k: v for k, v in default.items() if k != "mode" or v != "affine"}
    for path, entry in chosen.items():
        if any(entry[k] != default.get(k, "affine" if k == "mode" else None) for k in entry):
            spelled[path] = entry
    config["quantization"] = spelled
    config["quantization_config"] = spelled


_SHARED_KEYS = re.compile(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.weight$")


def _fill_shared_keys(model: nn.Module, weights: Weights, target: TargetConfig) -> None:
    """Zeros for key and value projections that are never used, because the last layers share those of an earlier one."""
    shared = target.text.get("num_kv_shared_layers") or 0
    if not shared or target.num_layers is None:
        return
    for name, value in tree_flatten(model.parameters()):
        match = _SHARED_KEYS.search(name)
        if match and int(match.group(1)) >= target.num_layers - shared and name not in weights:
            own = name.replace(f"layers.{match.group(1)}.", "layers.0.")
            weights[name] = mx.zeros(value.shape, dtype=weights[own].dtype if own in weights else mx.bfloat16)


def _faults(model: nn.Module, weights: Weights) -> list[str]:
    """How `weights` differ from the model's parameters: missing names, unexpected names, wrong shapes."""
    expected = {name: value.shape for name, value in tree_flatten(model.parameters())}
    missing = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in weights]
    unexpected = [f"unexpected {name} {list(v.shape)}" for name, v in weights.items() if name not in expected]
    misshapen = [
        f"{name} is {list(weights[name].shape)} where {list(shape)} belongs"
        for name, shape in expected.items()
        if name in weights and tuple(weights[name].shape) != tuple(shape)
    ]
    return missing + unexpected + misshapen


def _fault_message(faults: list[str], where: str, target: TargetConfig) -> tuple[str, str]:
    kinds: list[tuple[str, Callable[[str], bool]]] = [
        ("missing", lambda f: f.startswith("missing ")),
        ("unexpected", lambda f: f.startswith("unexpected ")),
        ("of another shape", lambda f: not f.startswith(("missing ", "unexpected "))),
    ]
    counts = [(word, [f for f in faults if test(f)]) for word, test in kinds]
    summary = " and ".join(f"{len(items)} {word}" for word, items in counts if items)
    detail = "; ".join(
        ", ".join(items[:_MOST_NAMES]) + (f" and {len(items) - _MOST_NAMES} more" if len(items) > _MOST_NAMES else "")
        for _, items in counts
        if items
    )
    return (
        f"{where} has other tensors than mlx-lm's {target.family}; {summary}: {detail}",
        "The files do not belong to this config.json, or the architecture differs from mlx-lm's",
    )


def _dropped_note(dropped: dict[str, str]) -> str:
    counts: dict[str, int] = {}
    for reason in dropped.values():
        counts[reason] = counts.get(reason, 0) + 1
    return "dropped " + ", ".join(f"{n} tensor{'s' if n > 1 else ''} ({reason})" for reason, n in sorted(counts.items()))
