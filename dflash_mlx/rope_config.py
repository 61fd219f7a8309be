"""How a drafter's layers rotate positions: what its config.json says, in one spelling for each layer.

Knows the published spellings of RoPE and its scalings, and what each kind needs. Knows nothing of the rest of a config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .packagings import DSPARK

# Their authors' class rotates like Qwen3's: whole heads, whatever `partial_rotary_factor` says. Configs inherit that
# key (0.25, say) from their targets, and the weights were trained without it.
_WHOLE_HEADS = ("", "DFlashDraftModel", "DFlash2DraftModel", DSPARK)
# What each kind of RoPE scaling needs; anything else is refused by name.
ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (),
    "proportional": (),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
_ROPE_NUMBERS = (
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "attention_factor"),
)


@dataclass(frozen=True)
class RopeConfig:
    """How one layer rotates positions.

    theta: base; kind: a key of `ROPE_NEEDS`; parameters: the kind's own keys; dims: rotated part of head_dim;
    traditional: pairs (2i, 2i + 1) instead of halves.
    """

    theta: float
    dims: int
    kind: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    traditional: bool = False


class RopeReader:
    """Reads a config's rotations; the attributes are those of whoever reads the rest."""

    raw: Mapping[str, Any]
    faults: list[str]
    read_from: dict[str, str]
    ignored: list[str]
    architecture: str

    def ropes(self, got: dict[str, Any], kinds: tuple[str, ...], head_dim: int | None) -> tuple[RopeConfig, ...]:
        """One for each of `kinds`; () where `faults` says why there is none."""
        new, old = self.raw.get("rope_parameters"), self.raw.get("rope_scaling")
        for key, value in (("rope_parameters", new), ("rope_scaling", old)):
            if value is not None and not isinstance(value, Mapping):
                self.faults.append(f"{key} = {value!r} must be an object")
                return ()
        per_kind = new is not None and bool(new) and all(isinstance(v, Mapping) for v in new.values())
        made: dict[str, RopeConfig | None] = {}
        for kind in dict.fromkeys(kinds):
            mine = new.get(kind) if per_kind else new
            if per_kind and mine is None:
                self.faults.append(f"rope_parameters has no entry for {kind}")
                continue
            made[kind] = self._rope(mine, old, got, head_dim)
        if len(made) < len(set(kinds)) or None in made.values():
            return ()
        return tuple(made[k] for k in kinds)

    def _theta(self, new: Mapping | None, old: Mapping | None) -> float | None:
        """The base that all places agree on; None, and a fault, where there is none."""
        thetas = [
            (name, value)
            for name, value in (
                ("rope_theta", self.raw.get("rope_theta")),
                ("rope_parameters.rope_theta", (new or {}).get("rope_theta")),
                ("rope_scaling.rope_theta", (old or {}).get("rope_theta")),
            )
            if value is not None
        ]
        if not thetas:
            self.faults.append("rope_theta or rope_parameters.rope_theta is missing")
            return None
        for name, value in thetas:
            if not is_positive(value):
                self.faults.append(f"{name} = {value!r} must be a positive number")
                return None
            if value != thetas[0][1]:
                self.faults.append(f"{thetas[0][0]} = {thetas[0][1]!r} contradicts {name} = {value!r}")
        self.read_from["rope_theta"] = thetas[0][0]
        return float(thetas[0][1])

    def _rope(self, new: Mapping | None, old: Mapping | None, got: dict[str, Any], head_dim: int | None) -> RopeConfig | None:
        theta = self._theta(new, old)
        if theta is None:
            return None
        readings = {name: _scaling(value) for name, value in (("rope_parameters", new), ("rope_scaling", old)) if value}
        if len(readings) == 2 and readings["rope_parameters"] != readings["rope_scaling"]:
            self.faults.append(f"rope_parameters = {dict(new)!r} contradicts rope_scaling = {dict(old)!r}")
        kind, parameters = next(iter(readings.values()), ("default", {}))
        if readings:
            self.read_from["rope_scaling"] = next(iter(readings))
        if not isinstance(kind, str) or kind not in ROPE_NEEDS:
            self.faults.append(f"RoPE kind {kind!r} is not known (known: {', '.join(ROPE_NEEDS)})")
            return None
        missing = [key for key in ROPE_NEEDS[kind] if parameters.get(key) is None]
        if missing:
            self.faults.append(f"RoPE kind {kind!r} needs {', '.join(missing)}")
            return None
        parameters = dict(parameters)
        partials = (parameters.pop("partial_rotary_factor", None), self.raw.get("partial_rotary_factor"), 1.0)
        partial = next(value for value in partials if value is not None)
        odd = [f"{key} = {value!r}" for key, value in parameters.items() if key in _ROPE_NUMBERS and not is_positive(value)]
        if not is_positive(partial) or partial > 1:
            odd.append(f"partial_rotary_factor = {partial!r}")
        if odd:
            self.faults.append(f"RoPE kind {kind!r} has {', '.join(odd)}: these must be positive numbers, a part at most 1")
            return None
        if kind == "yarn":
            original = parameters.setdefault("original_max_position_embeddings", got["max_position_embeddings"])
            if original and parameters.get("factor") is None and got["max_position_embeddings"]:
                parameters["factor"] = got["max_position_embeddings"] / original
            if not original or not parameters.get("factor"):
                self.faults.append("RoPE kind 'yarn' needs factor and original_max_position_embeddings")
                return None
        elif kind in ("dynamic", "longrope") and not got["max_position_embeddings"]:
            self.faults.append(f"RoPE kind {kind!r} needs max_position_embeddings")
            return None
        if partial != 1 and kind == "default" and self.architecture in _WHOLE_HEADS:
            # With another kind the authors' class cannot run a part at all, so such a config means what it says.
            self.ignored.append("partial_rotary_factor")
            partial = 1.0
        if kind == "proportional":
            # Gemma 4's: frequencies of the whole head, of which the first part turns.
            parameters["partial_rotary_factor"], partial = partial, 1.0
        dims = int((head_dim or 0) * partial)
        if dims % 2 or dims < 1:
            if head_dim:
                self.faults.append(f"RoPE rotates pairs: head_dim = {head_dim} times partial_rotary_factor = {partial} is {dims}")
            return None
        if kind == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
            self.faults.append(
                f"RoPE kind 'llama3' has low_freq_factor = {parameters['low_freq_factor']!r} not below "
                f"high_freq_factor = {parameters['high_freq_factor']!r}"
            )
            return None
        for key in ("short_factor", "long_factor") if kind == "longrope" else ():
            factors = parameters[key]
            if not isinstance(factors, (list, tuple)) or len(factors) != dims // 2 or not all(map(is_positive, factors)):
                self.faults.append(f"RoPE kind 'longrope' has {key} = {factors!r}: it must be {dims // 2} positive numbers")
                return None
        traditional = got["rope_is_neox_style"] is False
        return RopeConfig(theta, dims, kind, parameters, traditional)


def _scaling(value: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A rope_scaling or rope_parameters object as (kind, the kind's own keys)."""
    kind = value.get("rope_type") or value.get("type") or "default"
    return kind, {k: v for k, v in value.items() if k not in ("rope_type", "type", "rope_theta") and v is not None}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_positive(value: Any) -> bool:
    return is_number(value) and 0 < value < math.inf
