"""What mlx-lm's model class needs to know, from whatever a checkpoint's `config.json` says.

Knows: every spelling of a target's config (transformers 4 and 5, mlx-lm, multimodal wrappers), transformers' own defaults
(its config classes are pure Python and are asked, never copied), and the keys that mlx-lm reads. Knows no tensors.

The value of a key is what the file says; else what transformers would use; else mlx-lm's default. RoPE and layer patterns have
several spellings and are derived, so that a directory saved by any version gives the same model.
"""

import copy
import importlib
import math
import re
import types
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

from dflash_mlx.errors import ConfigError, one_line

from .config_values import TEXT_CONFIG_KEYS, check_values, drop_empty_quantization
from .families import special

# where the replaced model type is kept, since transformers' defaults depend on it
_ORIGINAL_TYPE = "transformers_model_type"

# several names for the same key: mlx-lm's ModelArgs use any of these
THETA_KEYS = ("rope_theta", "rotary_emb_base")
PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct", "rope_pct")
LOCAL_THETA_KEYS = ("rope_local_base_freq", "swa_rope_theta")
ROPE_KEYS = {"rope_scaling", "rope_parameters", *THETA_KEYS, *PARTIAL_KEYS, *LOCAL_THETA_KEYS}

# a key of the full-attention layers alone, and the per-layer key it overrides (gemma 4)
FULL_ATTENTION_KEYS = {
    "global_head_dim": "head_dim",
    "num_global_key_value_heads": "num_key_value_heads",
}

# same value under another name in mlx-lm
RENAMED_KEYS = {
    "block_dim": "hidden_size",
    "block_ff_dim": "intermediate_size",
    "layernorm_epsilon": "layer_norm_eps",
    "layer_norm_epsilon": "rms_norm_eps",
    "n_ctx": "n_positions",
    "sliding_window_size": "sliding_window",
    "attention_out_bias": "attention_bias",
}

# wrapper keys that also concern the text model; copied to the side that lacks them
SHARED_KEYS = ("eos_token_id", "bos_token_id", "pad_token_id", "quantization", "quantization_config", "tie_word_embeddings")


@dataclass
class TargetConfig:
    """A config from which mlx-lm's model class can be built, and what else the conversion needs.

    - config: dict for mlx-lm, wrapper and `text_config` included; safe to write as `config.json`
    - text: the dict inside `config` that describes the text model (`config` itself without a wrapper)
    - layer_types: one of "full_attention", "sliding_attention", ... per layer, or None when all layers are alike
    - windows: per layer, the sliding window that mlx-lm's class ignores and the loader adds, else None
    - while_building: keys of the text config that need another value until the windows are added
    - rope: transformers' RoPE parameters, flat or one dict per layer type; None when the config has none
    - head_dims: rotated head size of each layer before any partial factor, or None when not known
    - unwrapped: the text model was taken out of a multimodal wrapper, so tensor names have the wrapper's prefixes
    - activation, usual_activation: the config's name for it, and transformers' default for the family; None when mlx-lm reads it
    - tied: every value of `tie_word_embeddings` in the file; wrapper and text model may contradict each other
    - tied_by_default: what transformers assumes when the file says nothing
    - notes: sentences for the user about everything that was assumed
    """

    config: dict
    text: dict
    family: str
    layer_types: list[str] | None = None
    windows: list[int | None] = field(default_factory=list)
    while_building: dict[str, Any] = field(default_factory=dict)
    rope: dict | None = None
    head_dims: list[int] | None = None
    unwrapped: bool = False
    activation: str | None = None
    usual_activation: str | None = None
    tied: set[bool] = field(default_factory=set)
    tied_by_default: bool | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def num_layers(self) -> int | None:
        return self.text.get("num_hidden_layers")


def normalise_config(raw: dict, where: str = "config.json") -> TargetConfig:
    """Turn a target's config, in any published spelling, into what mlx-lm's ModelArgs expect.

    Raises:
      ConfigError: no model type; a model type that mlx-lm does not have; a layer pattern that its class cannot express.
    """
    check_values(raw, where)
    raw = copy.deepcopy(raw)
    model_type = raw.get("model_type")
    if not model_type:
        raise ConfigError(f'{where} has no "model_type"', "Take config.json from the original repository of the model")
    outer, text, unwrapped = _place_text_config(raw, where)
    module = mlx_module(outer)
    known = argument_fields(module)
    notes: list[str] = []

    _spell_full_attention(raw, text)
    reference = _transformers_config(text, notes)
    tied = {part["tie_word_embeddings"] for part in (raw, text) if part.get("tie_word_embeddings") is not None}
    activation, usual_activation = _activations(reference, known)
    family = module.__name__.rpartition(".")[2]
    own = special(text.get(_ORIGINAL_TYPE), text["model_type"], family)
    if own.differs and reference is not None and text["model_type"] == family:
        raise ConfigError(
            f"mlx-lm computes {family}, of {where}, differently from transformers: it {own.differs}",
            "This checkpoint needs another implementation",
        )
    layer_types = _layer_types(text, reference)
    rope = _rope_parameters(text, reference)
    head_dims = _head_dims(text, reference)

    _fill_defaults(text, reference, known)
    _fill_rope(text, rope, known)
    _fill_renamed(text, known)
    _fill_full_attention(text, reference, layer_types, known)
    _fill_expert_layers(text, reference, known)
    windows, while_building = _fill_patterns(text, layer_types, known, where)
    if any(windows) and "full_attention" not in layer_types:
        _drop_derived_pattern(text, layer_types)
    for key, value in own.implied.items():
        if text.get(key) is None:
            text[key] = value
    for key in ("layer_types", "layers_block_type"):
        if text.get(key) and own.layer_names:
            text[key] = [own.layer_names.get(kind, kind) for kind in text[key]]
    if own.copied_head:
        while_building["tie_word_embeddings"] = False
    if any(windows):
        size = max(filter(None, windows))
        notes.append(f"plain mlx-lm has no sliding window in {text['model_type']}; dflash_mlx.load adds it ({size} tokens)")
    if outer is not text:
        for key in SHARED_KEYS:
            if text.get(key) is None and outer.get(key) is not None:
                text[key] = outer[key]
            elif outer.get(key) is None and text.get(key) is not None:
                outer[key] = text[key]
        # some wrappers read keys of the text model beside it (gemma 4: vocab_size)
        for item in fields(module.ModelArgs):
            if item.name in text and item.name not in outer:
                outer[item.name] = text[item.name]
    drop_empty_quantization(outer)
    drop_empty_quantization(text)
    return TargetConfig(
        config=outer,
        text=text,
        family=family,
        layer_types=layer_types,
        windows=windows,
        while_building=while_building,
        rope=rope,
        head_dims=head_dims,
        unwrapped=unwrapped,
        activation=activation,
        usual_activation=usual_activation,
        tied=tied,
        tied_by_default=text.get("tie_word_embeddings"),
        notes=notes,
    )


def mlx_module(config: dict) -> types.ModuleType:
    """The `mlx_lm.models` module for a config. Raises ConfigError naming the model type when mlx-lm has none."""
    from mlx_lm.utils import _get_classes

    try:
        model_class, _ = _get_classes(config)
    except (ValueError, AttributeError) as error:
        # an AttributeError: a module in mlx-lm's models that is no model, such as "cache"
        raise ConfigError(
            f'the installed mlx-lm has no model type "{config.get("model_type")}"', "Use a newer mlx-lm or another checkpoint"
        ) from error
    return importlib.import_module(model_class.__module__)


def has_mlx_module(model_type: Any) -> bool:
    from mlx_lm.utils import _get_classes

    # the name becomes a module path: only plain identifiers may reach the importer
    if not isinstance(model_type, str) or not model_type.replace("-", "_").isidentifier():
        return False
    try:
        _get_classes({"model_type": model_type})
    except (ValueError, AttributeError, SystemExit):
        # mlx-lm's olmo ends the process when a package that it needs is missing
        return False
    return True


def argument_fields(module: types.ModuleType) -> dict[str, Any]:
    """Every key that a family reads: the fields of its ModelArgs and of the ModelArgs of the modules it is made of.

    Returns: field name -> default, or MISSING when the class requires the key.
    """
    found: dict[str, Any] = {}
    for value in [module, *vars(module).values()]:
        if isinstance(value, types.ModuleType) and value.__name__.startswith("mlx_lm.models."):
            found |= {k: v for k, v in _own_fields(value).items() if k not in found}
    found.pop("model_type", None)
    found.pop("text_config", None)
    return found


def _own_fields(module: types.ModuleType) -> dict[str, Any]:
    from mlx_lm.models.base import BaseModelArgs

    found: dict[str, Any] = {}
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, BaseModelArgs) and is_dataclass(value):
            for item in fields(value):
                default = item.default
                if default is MISSING and item.default_factory is not MISSING:
                    default = item.default_factory()
                found.setdefault(item.name, default)
    return found


def _place_text_config(raw: dict, where: str) -> tuple[dict, dict, bool]:
    """-> (config for mlx-lm, the text part inside it, whether the text model was taken out of a wrapper)."""
    model_type = raw["model_type"]
    inner_key = next((key for key in TEXT_CONFIG_KEYS if isinstance(raw.get(key), dict)), None)
    if has_mlx_module(model_type):
        module = mlx_module(raw)
        if inner_key is None:
            if "text_config" in _own_fields(module) and _has_text_keys(raw):
                return {"model_type": model_type, "text_config": raw}, raw, False
            return raw, raw, False
        if "text_config" in _own_fields(module):
            if inner_key != "text_config":
                raw["text_config"] = raw[inner_key]
            raw["text_config"].setdefault("model_type", model_type + "_text")
            return raw, raw["text_config"], False
    if inner_key is not None:
        inner = raw[inner_key]
        for key in SHARED_KEYS:
            if inner.get(key) is None and raw.get(key) is not None:
                inner[key] = raw[key]
        inner.setdefault("model_type", model_type + "_text")
        outer, text, _ = _place_text_config(inner, where)
        return outer, text, True
    if same_as := special(model_type).same_as:
        raw["model_type"], raw[_ORIGINAL_TYPE] = same_as, model_type
        return _place_text_config(raw, where)
    base = model_type.removesuffix("_text")
    if base != model_type and has_mlx_module(base):
        if "text_config" in _own_fields(mlx_module({"model_type": base})):
            return {"model_type": base, "text_config": raw}, raw, False
    raise ConfigError(
        f'the installed mlx-lm has no model type "{model_type}", which {where} names', "Use a newer mlx-lm or another checkpoint"
    )


def _has_text_keys(raw: dict) -> bool:
    return "num_hidden_layers" in raw and "hidden_size" in raw


@contextmanager
def _quiet_transformers():
    """Transformers logs advice about keys while it parses; the caller gets its exceptions, not its log lines."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _transformers_config(text: dict, notes: list[str]):
    """Transformers' config object for a text config: the source of every default. None for a type that it does not know."""
    with _quiet_transformers():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        name = next((n for n in (text.get(_ORIGINAL_TYPE), text["model_type"]) if n in CONFIG_MAPPING), None)
        if name is None:
            return None
        try:
            values = copy.deepcopy(text)
            for key in ("model_type", _ORIGINAL_TYPE):
                values.pop(key, None)
            if _is_per_layer_type(values.get("rope_parameters") or {}):
                # transformers prefers the older key, which cannot hold one entry per kind of layer
                values.pop("rope_scaling", None)
            reference = CONFIG_MAPPING[name].from_dict(values)
        except Exception as error:  # noqa: BLE001 - its validators raise many kinds; the text goes to the user
            notes.append(f"transformers cannot read this config ({one_line(error)}); keys that it lacks take mlx-lm's defaults")
            return None
    inner = getattr(reference, "text_config", None)
    return inner if inner is not None and hasattr(inner, "num_hidden_layers") else reference


def _reference_value(reference, key: str) -> tuple[bool, Any]:
    """-> (whether transformers' config has the key, its value). A key that differs between layers counts as absent."""
    try:
        value = getattr(reference, key)
    except Exception:  # noqa: BLE001 - heterogeneous configs raise their own error for per-layer keys
        return False, None
    return True, value


def _plain(value: Any) -> Any:
    return value.to_dict() if hasattr(value, "to_dict") else list(value) if isinstance(value, tuple) else value


def _fill_defaults(text: dict, reference, known: dict[str, Any]) -> None:
    """Set every key that mlx-lm reads and the file lacks to the value that transformers would use."""
    if reference is None:
        return
    for key in known:
        if key in ROPE_KEYS or text.get(key) is not None:
            continue
        has, value = _reference_value(reference, key)
        if has and not callable(value):
            text[key] = _plain(value)


def _fill_renamed(text: dict, known: dict[str, Any]) -> None:
    for key, source in RENAMED_KEYS.items():
        if key in known and text.get(key) is None and text.get(source) is not None:
            text[key] = text[source]
    if "n_inner" in known and text.get("n_inner") is None and text.get("n_embd"):
        text["n_inner"] = 4 * text["n_embd"]
    if "head_dim" in known and text.get("head_dim") is None and text.get("num_attention_heads"):
        text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]


def _layer_types(text: dict, reference) -> list[str] | None:
    """One entry per layer; all sliding when the config has a window and no pattern, as in mistral."""
    if reference is not None:
        has, value = _reference_value(reference, "layer_types")
        if has and value:
            return list(value)
        # an unknown key of the file becomes an attribute too: only a window that the class itself declares is used
        has, window = _reference_value(reference, "sliding_window")
        layers = text.get("num_hidden_layers")
        if has and window and layers and hasattr(type(reference), "sliding_window"):
            return ["sliding_attention"] * layers
        return None
    value = text.get("layer_types")
    return list(value) if value else None


def _activations(reference, known: dict[str, Any]) -> tuple[str | None, str | None]:
    """-> (the activation that the config names, transformers' default for the family), or (None, None)."""
    for key in ("hidden_activation", "hidden_act", "activation_function"):
        if reference is None or key in known:
            continue
        value, usual = _reference_value(reference, key)[1], getattr(type(reference), key, None)
        if isinstance(value, str) and isinstance(usual, str):
            return value, usual
    return None, None


def _fill_expert_layers(text: dict, reference, known: dict[str, Any]) -> None:
    """Which layers have experts: transformers 5 lists them, mlx-lm counts the dense ones that come first."""
    has, kinds = _reference_value(reference, "mlp_layer_types") if reference is not None else (False, None)
    kinds = kinds if has else text.get("mlp_layer_types")
    if not kinds:
        return
    if "is_moe_layer" in known and text.get("is_moe_layer") is None:
        text["is_moe_layer"] = [kind == "sparse" for kind in kinds]
    if "first_k_dense_replace" in known and text.get("first_k_dense_replace") is None:
        text["first_k_dense_replace"] = kinds.index("sparse") if "sparse" in kinds else len(kinds)


def _rope_parameters(text: dict, reference) -> dict | None:
    if reference is not None:
        has, value = _reference_value(reference, "rope_parameters")
        if has and value:
            return _plain(value)
        return None
    rope = copy.deepcopy(text.get("rope_parameters") or text.get("rope_scaling") or {})
    if _is_per_layer_type(rope):
        return rope
    theta = next((text[key] for key in THETA_KEYS if text.get(key) is not None), None)
    if theta is not None:
        rope.setdefault("rope_theta", theta)
    partial = next((text[key] for key in PARTIAL_KEYS if text.get(key) is not None), None)
    if partial is not None:
        rope.setdefault("partial_rotary_factor", partial)
    if "rope_theta" not in rope:
        return None
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def _is_per_layer_type(rope: dict) -> bool:
    return bool(rope) and all(value is None or isinstance(value, dict) for value in rope.values())


def rope_for_layer_type(rope: dict | None, layer_type: str | None) -> dict | None:
    """The RoPE parameters of one kind of layer, however the config nests them."""
    if not rope or not _is_per_layer_type(rope):
        return rope
    return rope.get(layer_type or "full_attention")


def _fill_rope(text: dict, rope: dict | None, known: dict[str, Any]) -> None:
    """Write the RoPE base and scaling in every spelling, so that whichever one mlx-lm reads is right."""
    if not rope:
        return
    nested = _is_per_layer_type(rope)
    entries = {k: v for k, v in rope.items() if v} if nested else {"full_attention": rope}
    main = entries.get("full_attention") or next(iter(entries.values()))
    text["rope_parameters"] = {k: _both_spellings(v) for k, v in entries.items()} if nested else _both_spellings(rope)
    if not nested or "rope_scaling" in known:
        text["rope_scaling"] = _scaling(main)
    else:
        # transformers refuses the older key beside one entry per kind of layer
        text.pop("rope_scaling", None)
    text["rope_theta"] = main["rope_theta"]
    local = entries.get("sliding_attention")
    for keys, value in (
        (THETA_KEYS, main["rope_theta"]),
        (PARTIAL_KEYS, main.get("partial_rotary_factor")),
        (LOCAL_THETA_KEYS, local["rope_theta"] if local else None),
        (("original_max_position_embeddings",), main.get("original_max_position_embeddings")),
    ):
        for key in keys:
            if value is not None and key in known:
                text[key] = value


def _both_spellings(rope: dict) -> dict:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return {**rope, "rope_type": kind, "type": kind}


def _scaling(rope: dict) -> dict | None:
    """transformers 4's `rope_scaling`: None without scaling; YaRN's attention factor in the form that mlx-lm can compute."""
    scaling = _both_spellings(rope)
    if scaling["rope_type"] == "default":
        return None
    for key in ("rope_theta", "partial_rotary_factor"):
        scaling.pop(key, None)
    factor, attention = scaling.get("factor"), scaling.get("attention_factor")
    if attention is not None and factor and factor > 1 and "mscale" not in scaling:
        # mlx-lm's YaRN multiplies by 0.1 * mscale * ln(factor) + 1 and has no attention_factor
        scaling["mscale"] = (attention - 1.0) / (0.1 * math.log(factor))
        scaling["mscale_all_dim"] = 0
    return scaling


def _head_dims(text: dict, reference) -> list[int] | None:
    layers = text.get("num_hidden_layers")
    if not layers:
        return None
    if reference is not None and getattr(reference, "is_heterogeneous", False):
        return [_one_head_dim(reference.per_layer_config[i]) for i in range(layers)]
    dim = _one_head_dim(reference) if reference is not None else None
    dim = dim or text.get("head_dim") or _ratio(text.get("hidden_size"), text.get("num_attention_heads"))
    return [dim] * layers if dim else None


def _one_head_dim(config) -> int | None:
    has, value = _reference_value(config, "head_dim")
    if has and value:
        return value
    return _ratio(_reference_value(config, "hidden_size")[1], _reference_value(config, "num_attention_heads")[1])


def _ratio(size: Any, count: Any) -> int | None:
    return size // count if isinstance(size, int) and isinstance(count, int) and count else None


def _spell_full_attention(raw: dict, text: dict) -> None:
    """Keys of the full-attention layers, which newer transformers write per layer, in the form that older ones read.

    What a newer transformers has saved is complete: a layer that it does not name is like the others.
    """
    layer_types = text.get("layer_types") or []
    if "full_attention" not in layer_types or not special(text["model_type"]).two_head_sizes:
        return
    layers = text.get("per_layer_config") or {}
    own = layers.get(str(layer_types.index("full_attention")), {})
    from transformers import __version__ as installed

    newer = _release(raw.get("transformers_version")) > _release(installed)
    for key, source in FULL_ATTENTION_KEYS.items():
        value = own.get(source, text.get(source) if newer else None)
        if text.get(key) is None and value is not None:
            text[key] = value


def _release(version: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", str(version or ""))[:2])


def _fill_full_attention(text: dict, reference, layer_types: list[str] | None, known: dict[str, Any]) -> None:
    """Keys of the full-attention layers alone, from transformers 5's `per_layer_config`."""
    if reference is None or not layer_types or not getattr(reference, "is_heterogeneous", False):
        return
    if "full_attention" not in layer_types:
        return
    full = reference.per_layer_config[layer_types.index("full_attention")]
    usual = next((i for i, kind in enumerate(layer_types) if kind != "full_attention"), None)
    for key, source in FULL_ATTENTION_KEYS.items():
        if key not in known:
            continue
        value = _reference_value(full, source)[1]
        if value is not None and text.get(key) is None:
            text[key] = value
        if usual is not None and text.get(source) is None:
            text[source] = _reference_value(reference.per_layer_config[usual], source)[1]


def _fill_patterns(
    text: dict, layer_types: list[str] | None, known: dict[str, Any], where: str
) -> tuple[list[int | None], dict[str, Any]]:
    """Tell mlx-lm which layers have a window, in the one of its three ways that the family reads.

    Returns:
      - per layer, the window that the family's class cannot express and that must be added to the built model
      - keys that need another value while the class is built, so that it makes layers without windows
    """
    if not layer_types:
        return [], {}
    text["layer_types"] = layer_types
    sliding = [kind == "sliding_attention" for kind in layer_types]
    if "hybrid_layer_pattern" in known and text.get("hybrid_layer_pattern") is None:
        text["hybrid_layer_pattern"] = [int(flag) for flag in sliding]
    if "full_attention_interval" in known:
        text["full_attention_interval"] = _period(layer_types, "full_attention", text, where)
    if "layer_types" in known:
        native = "full_attention" in layer_types or not any(sliding)
        # classes look for the first full layer: if all layers have windows, the pattern names no window
        instead = {"layer_types": ["full_attention"] * len(layer_types)}
    elif "sliding_window_pattern" in known:
        if isinstance(text.get("sliding_window_pattern"), str) or known["sliding_window_pattern"] is MISSING:
            text["sliding_window_pattern"] = "".join("LG"[not flag] for flag in sliding) if any(sliding) else None
            return [], {}
        period = sliding.index(False) + 1 if False in sliding else 0
        native = period > 0 and sliding == [(i + 1) % period != 0 for i in range(len(sliding))]
        instead = {"sliding_window_pattern": 1}
        if native:
            text["sliding_window_pattern"] = period
    else:
        native, instead = not any(sliding) or bool(known.keys() & {"hybrid_layer_pattern", "attention_window_size"}), {}
    if native:
        return [], {}
    window = text.get("sliding_window")
    if not window:
        raise ConfigError(
            f'{where} has layer_types {layer_types} and no "sliding_window"',
            "Take config.json from the original repository of the model",
        )
    return [window if flag else None for flag in sliding], instead


def _drop_derived_pattern(text: dict, layer_types: list[str]) -> None:
    """Leave out a pattern without full layers, which mlx-lm's classes cannot be built from, where transformers derives it."""
    short = {key: value for key, value in text.items() if key != "layer_types"}
    if _layer_types(short, _transformers_config(short, [])) == layer_types:
        del text["layer_types"]


def _period(layer_types: list[str], kind: str, text: dict, where: str) -> int:
    """n such that exactly every n-th layer is of that kind. Raises ConfigError for any other arrangement."""
    period = layer_types.index(kind) + 1 if kind in layer_types else len(layer_types) + 1
    if [(i + 1) % period == 0 for i in range(len(layer_types))] != [entry == kind for entry in layer_types]:
        raise ConfigError(
            f"{where} has layer_types {layer_types}; mlx-lm's {text['model_type']} can express only full attention at every "
            "n-th layer",
            "This checkpoint needs another implementation",
        )
    return period
