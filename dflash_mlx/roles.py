"""What a checkpoint's config and tensor names say it is: a target, a drafter, or another kind of speculator."""

from collections.abc import Iterable, Mapping
from typing import Any

OTHER_SPECULATORS = {
    "speculators": "a folder of vLLM's speculators library",
    "EAGLE": "an EAGLE head",
    "Medusa": "a Medusa head",
}

# Parts of the architectures' names of drafters, also of those that are refused.
_DRAFTERS = ("DFlash", "DSpark", "DFlare", "DFly", "Domino", "MuseGlimmerAssistant")


def role_of(config: Mapping[str, Any], tensors: Iterable[str]) -> str:
    """ "target", "drafter", or a key of `OTHER_SPECULATORS`."""
    names = {name.removeprefix("model.") for name in tensors}
    architectures = config.get("architectures") or []
    architectures = [architectures] if isinstance(architectures, str) else list(architectures)
    nested = (config.get("dflash_config") or {}).keys()
    speculator = str(config.get("speculators_model_type") or "")
    if speculator in ("dflash", "dflash2", "dspark", "dflare", "dfly"):
        return "drafter"
    if speculator or "speculators_config" in config:
        return "speculators"
    if any("eagle" in a.lower() for a in architectures) or any(n.startswith("midlayer.") for n in names):
        return "EAGLE"
    if any("medusa" in a.lower() for a in architectures) or "medusa_num_heads" in config:
        return "Medusa"
    named = any(kind in name for name in architectures for kind in _DRAFTERS)
    named = named or str(config.get("model_type")).endswith("_dspark")
    if nested or named or {"fc.weight", "hidden_norm.weight"} <= names or "encoder.fc.weight" in names:
        return "drafter"
    return "target"
