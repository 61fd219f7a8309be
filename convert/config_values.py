"""Checks that the values of a target's config.json can be used at all, before anything is derived from them.

Knows the keys that every family has, and where multimodal wrappers keep the config of their text model. Knows no family.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dflash_mlx.errors import ConfigError

# where multimodal wrappers keep the config of their text model
TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")

# what the keys that every family has must hold; null counts as absent, and other keys are the family's own
_POSITIVE_KEYS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "intermediate_size", "vocab_size",
    "max_position_embeddings", "num_key_value_heads",
)  # fmt: skip
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_POSITIVE_KEYS, ("a positive integer", lambda value: is_positive(value))),
    "tie_word_embeddings": ("true or false", lambda value: isinstance(value, bool)),
    **dict.fromkeys(("rope_parameters", *TEXT_CONFIG_KEYS), ("an object", lambda value: isinstance(value, dict))),
    "rope_scaling": ("an object", lambda value: isinstance(value, dict) or value is False),
    "quantization": ("an object", lambda value: isinstance(value, dict) or value is False),
    "quantization_config": ("an object", lambda value: isinstance(value, dict) or value is False),
    "layer_types": (
        "a list of strings",
        lambda value: isinstance(value, list) and all(isinstance(kind, str) for kind in value),
    ),
}
# some families give one of these per layer, with 0 where a layer has no such part
_PER_LAYER_KEYS = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim")


def is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_values(raw: Mapping, where: str) -> None:
    """Raises ConfigError naming every key of a target's config, text part included, whose value cannot be used."""
    faults = []
    parts = [("", raw), *((f"{key}.", raw[key]) for key in TEXT_CONFIG_KEYS if isinstance(raw.get(key), Mapping))]
    for prefix, part in parts:
        if part.get("model_type") is not None and not isinstance(part["model_type"], str):
            faults.append(f"{prefix}model_type {part['model_type']!r} (a string)")
        for key, (kind, fits) in _KINDS.items():
            value = part.get(key)
            if (
                key in _PER_LAYER_KEYS
                and isinstance(value, list)
                and all(entry is None or isinstance(entry, int) for entry in value)
            ):
                continue
            if value is not None and not fits(value):
                faults.append(f"{prefix}{key} {str(value)[:40]!r} ({kind})")
    if faults:
        raise ConfigError(
            f"{where} has values of no use: {'; '.join(faults)}", "Take config.json from the original repository of the model"
        )


def drop_empty_quantization(config: dict) -> None:
    """`quantization: {"bits": null}` means not quantized; some tools write it (mlx-lm then multiplies by None)."""
    for key in ("quantization", "quantization_config"):
        value = config.get(key)
        if key in config and (not value or (isinstance(value, dict) and "bits" in value and value["bits"] is None)):
            del config[key]
