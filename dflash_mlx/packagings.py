"""How other tools pack a drafter's config.json: vLLM's speculators library, and the names of one kind of drafter.

Knows keys, and turns them into the published spelling for `config`; checks no values but those that it computes with.
Source: vllm-project/speculators (models/dflash, models/dspark), deepseek-ai/DeepSpec, sgl-project/SpecForge, Tencent/AngelSlim
and AngelSpec (DFlare, DFly), vLLM's reader of speculators' configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DSPARK, LAGUNA, DOMINO, DFLARE = "DSparkDraftModel", "DFlashLagunaForCausalLM", "DominoDraftModel", "DFlareDraftModel"
DFLY = "Qwen3DFlyModel"
# DSpark drafters with layers of their own: DeepSpec's for Gemma 4, and one packer's for Qwen 3.5.
GEMMA4_DSPARK, QWEN35_DSPARK = "Gemma4DSparkModel", "Qwen35DSparkModel"
DSPARKS = (DSPARK, GEMMA4_DSPARK, QWEN35_DSPARK)
# Every name that `models.architectures` has a class for.
KNOWN = ("", "DFlashDraftModel", "DFlash2DraftModel", "MuseGlimmerAssistantModel", LAGUNA, DOMINO, DFLARE, DFLY, *DSPARKS)
# What their packers call DSpark drafters: SpecForge and speculators; DeepSpec; LiquidAI.
_DSPARK_NAMES = (DSPARK, "DSparkSpeculator", "Qwen3DSparkModel", "Lfm2DSparkDraftModel")
# Further names of the same files: AngelSlim's, and those of NVIDIA's NeMo, JetSpec's included.
_SAME = {"QwenDFlareDraftModel": DFLARE, "Qwen3DFlashDraftModel": "DFlashDraftModel"}
_SPECULATORS = {"dspark": DSPARK, "dflash2": "DFlash2DraftModel", "dflare": DFLARE, "dfly": DFLY, "dflash": "DFlashDraftModel"}


def is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 31


def algorithm_of(raw: Mapping[str, Any]) -> Any:
    """What vLLM's speculators library says a drafter is; None: another tool packed it."""
    config = raw.get("speculators_config")
    said = config.get("algorithm") if isinstance(config, Mapping) and "transformer_layer_config" in raw else None
    return raw.get("speculators_model_type") or said


def another_algorithm(raw: Mapping[str, Any]) -> str | None:
    """What speculators calls a drafter that is none of ours; None: it is one, or another tool packed it."""
    kind, layers = algorithm_of(raw), raw.get("transformer_layer_config")
    if kind == "dflare" and isinstance(layers, Mapping) and layers.get("draft_hidden_size"):
        # A fork's, whose layers, names and rotations are others.
        return f"dflare with draft_hidden_size = {layers['draft_hidden_size']!r}"
    return None if kind is None or kind in list(_SPECULATORS) else repr(kind)


def implied_block_size(raw: Mapping[str, Any]) -> int | None:
    """NVIDIA's DFlash drafters for its Nemotron state no block. Source: NeMo's recipe for the model of 52 layers trains 8."""
    return 8 if "pard_token" in raw and raw.get("architectures") == ["DFlashDraftModel"] else None


def flatten_speculators(raw: Mapping[str, Any], faults: list[str]) -> Mapping[str, Any]:
    """A config of vLLM's speculators library in the published spelling: one level, and taps counted from layer 0's output.

    Its `aux_hidden_state_layer_ids` count hidden states, of which the embedding is number 0: one more than the layer.
    """
    kind = algorithm_of(raw)
    if kind not in list(_SPECULATORS):
        return raw
    parts: dict[str, Mapping[str, Any]] = {}
    for key in ("transformer_layer_config", "speculators_config"):
        parts[key] = raw.get(key) or {}
        if not isinstance(parts[key], Mapping):
            faults.append(f"{key} = {raw[key]!r} must be an object")
            parts[key] = {}
    outer = {k: v for k, v in raw.items() if k not in parts and v is not None}
    names = (kind, parts["speculators_config"].get("algorithm"))
    flat = {**parts["transformer_layer_config"], **outer}
    flat["architectures"] = [next(architecture for name, architecture in _SPECULATORS.items() if name in names)]
    ids = flat.get("aux_hidden_state_layer_ids")
    if isinstance(ids, (list, tuple)) and all(is_int(i, 0) for i in ids):
        flat["aux_hidden_state_layer_ids - 1"] = [i - 1 for i in ids]
    methods = parts["speculators_config"].get("proposal_methods")
    first = methods[0] if isinstance(methods, (list, tuple)) and methods else None
    drafts = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    if flat["architectures"] == [DSPARK] and flat.get("sample_from_anchor") is None:
        # Folders from before that key was written (July 2026) draft from the masks alone: slot j was trained on token j.
        flat["sample_from_anchor"] = is_int(drafts, 1) and drafts == flat.get("block_size")
    if flat.get("block_size") is None and is_int(drafts, 1):
        flat["block_size"] = drafts + (not flat.get("sample_from_anchor"))
    return flat


def architecture_of(architecture: str, raw: Mapping[str, Any]) -> str:
    """The name under which a drafter is built: DSpark ones are published under several, and under DFlash's own."""
    architecture = _SAME.get(architecture, architecture)
    if architecture in _DSPARK_NAMES:
        return DSPARK
    if architecture in ("", "DFlashDraftModel") and raw.get("model_type") == "laguna":
        return LAGUNA
    if architecture == QWEN35_DSPARK and not raw.get("enable_qwen35_gated_q_proj") and raw.get("model_type") != "qwen3_5":
        # Another fork's name for DeepSpec's own layers.
        return DSPARK
    if architecture not in ("", "DFlashDraftModel"):
        return architecture
    nested = raw.get("dflash_config") if isinstance(raw.get("dflash_config"), Mapping) else {}
    marks = ("markov_rank", "enable_confidence_head", "sample_from_anchor", "log_snr_conditioning")
    if "domino" in (nested.get("projector_type"), raw.get("projector_type")):
        return DOMINO
    is_dspark = any(part.get(mark) for part in (nested, raw) for mark in marks)
    return DSPARK if is_dspark or "dspark" in (nested.get("projector_type"), raw.get("projector_type")) else architecture


def samples_from_anchor(architecture: str, raw: Mapping[str, Any], stated: Any) -> bool:
    """Whether the anchor's own row drafts the first token.

    stated: the key's value, None where there is none. DeepSpec's trainer and SpecForge's DSpark set labels one token behind
    each row, the anchor's included; a DFlash drafter with DSpark's heads keeps DFlash's labels, unless DeepSpec's `num_anchors`
    says who trained it.
    """
    if stated is not None:
        return bool(stated)
    names = raw.get("architectures") or ()
    name = names[0] if isinstance(names, (list, tuple)) and names else names
    nested = raw.get("dflash_config") if isinstance(raw.get("dflash_config"), Mapping) else {}
    trained = (
        name in _DSPARK_NAMES or "num_anchors" in raw or "dspark" in (nested.get("projector_type"), raw.get("projector_type"))
    )
    return architecture in DSPARKS and (trained or name in DSPARKS)


def taps_before_norm(architecture: str, raw: Mapping[str, Any]) -> bool:
    """Whether a tap of the target's last layer was taken before the final norm, as those take it who hook layers: SpecForge, and
    vLLM, which speculators and poolside train with. transformers' list of hidden states, which z-lab's and DeepSpec's code reads,
    has the last one after the norm."""
    nested = raw.get("dflash_config") if isinstance(raw.get("dflash_config"), Mapping) else {}
    by_specforge = any(key in nested for key in ("attention_mode", "confidence_head_alpha"))
    return architecture in (LAGUNA, DOMINO) or "speculators_model_type" in raw or by_specforge
