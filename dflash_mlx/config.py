"""What a DFlash drafter's config.json says, in one spelling.

Knows every published spelling of every key (`_SPELLINGS`) and the rules that turn them into per-layer facts: which layers
are causal inside the block, which have a window, how each rotates positions. Knows nothing of tensors, files or targets.
Facts: DFlash (arXiv 2602.06036) and the published z-lab checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError
from .packagings import (
    DFLY,
    DOMINO,
    DSPARK,
    DSPARKS,
    GEMMA4_DSPARK,
    KNOWN,
    LAGUNA,
    QWEN35_DSPARK,
    another_algorithm,
    architecture_of,
    flatten_speculators,
    implied_block_size,
    samples_from_anchor,
    taps_before_norm,
)
from .packagings import is_int as _is_int
from .rope_config import RopeConfig, RopeReader
from .rope_config import is_positive as _is_positive

# field: every published place of it. All places that hold a value must agree.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("intermediate_size",),
    "num_hidden_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "rms_norm_eps": ("rms_norm_eps",),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings",),
    "attention_bias": ("attention_bias",),
    "hidden_act": ("hidden_act", "hidden_activation"),
    "block_size": ("block_size", "dflash_config.block_size"),
    "mask_token_id": ("dflash_config.mask_token_id", "mask_token_id"),
    "target_layer_ids": ("dflash_config.target_layer_ids", "target_layer_ids", "aux_hidden_state_layer_ids - 1"),
    "target_hidden_size": ("target_hidden_size", "dflash_config.target_hidden_size"),
    "num_target_layers": ("num_target_layers", "dflash_config.num_target_layers"),
    "draft_vocab_size": ("draft_vocab_size", "dflash_config.draft_vocab_size"),
    "layer_types": ("layer_types", "dflash_config.layer_types"),
    "sliding_window": ("sliding_window", "dflash_config.sliding_window"),
    "sliding_window_pattern": ("sliding_window_pattern", "dflash_config.sliding_window_pattern"),
    "use_sliding_window": ("use_sliding_window",),
    "max_window_layers": ("max_window_layers",),
    "use_swa": ("dflash_config.use_swa", "use_swa"),
    "sliding_window_non_causal": ("sliding_window_non_causal", "dflash_config.sliding_window_non_causal"),
    "swa_window_size": ("dflash_config.swa_window_size", "swa_window_size"),
    "rope_is_neox_style": ("is_neox_style", "rope_is_neox_style"),
    "input_embedding_scale": ("dflash_config.input_embedding_scale", "input_embedding_scale"),
    "conv_kernel_size": ("dflash_config.conv_kernel_size", "conv_kernel_size"),
    "conv_group_size": ("dflash_config.conv_group_size", "conv_group_size"),
    "selector_rank": ("dflash_config.selector_rank", "selector_rank"),
    "selector_top_k": ("dflash_config.selector_top_k", "selector_top_k"),
    "selector_vocab_size": ("dflash_config.selector_vocab_size", "selector_vocab_size"),
    "output_multiplier": ("dflash_config.output_multiplier", "output_multiplier", "dflash_config.logit_scale", "logit_scale"),
    "final_logit_softcapping": ("dflash_config.final_logit_softcapping", "final_logit_softcapping"),
    "projector_type": ("dflash_config.projector_type", "projector_type"),
    "markov_rank": ("dflash_config.markov_rank", "markov_rank"),
    "markov_head_type": ("dflash_config.markov_head_type", "markov_head_type"),
    "confidence_head_with_markov": ("dflash_config.confidence_head_with_markov", "confidence_head_with_markov"),
    "emb_dim": ("dflash_config.emb_dim", "emb_dim"),
    "gru_hidden_dim": ("dflash_config.gru_hidden_dim", "gru_hidden_dim"),
    "pure_draft_prefix_len": ("dflash_config.pure_draft_prefix_len", "pure_draft_prefix_len"),
    "shift_label": ("dflash_config.shift_label", "shift_label"),
    "attention_k_eq_v": ("attention_k_eq_v",),
    "global_head_dim": ("global_head_dim",),
    "num_global_key_value_heads": ("num_global_key_value_heads",),
    "attention_mode": ("dflash_config.attention_mode", "attention_mode"),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "rope_interleave": ("rope_interleave", "dflash_config.mla_rope_interleaved"),
    "mla_use_output_gate": ("dflash_config.mla_use_output_gate", "mla_use_output_gate"),
    "draft_hidden_size": ("draft_hidden_size",),
    "draft_layer_types": ("draft_layer_types",),
    "fusion_type": ("fusion_type", "dflash_config.fusion_type"),
    "hidden_correction_intermediate_size": (
        *("hidden_correction_intermediate_size", "dflash_config.hidden_correction_intermediate_size"),
    ),
    "target_num_hidden_layers": ("target_num_hidden_layers",),
    "enable_hidden_correction": ("enable_hidden_correction", "dflash_config.enable_hidden_correction"),
    "enable_qwen35_gated_q_proj": ("enable_qwen35_gated_q_proj",),
    "log_snr_conditioning": ("dflash_config.log_snr_conditioning", "log_snr_conditioning"),
    "enable_confidence_head": ("dflash_config.enable_confidence_head", "enable_confidence_head"),
    "sample_from_anchor": ("sample_from_anchor", "dflash_config.sample_from_anchor"),
    "attention_sink_bias": ("dflash_config.attention_sink_bias", "attention_sink_bias", "add_swa_attention_sink_bias"),
    "attention_value_scale": ("dflash_config.attention_value_scale", "attention_value_scale"),
    "last_tap": ("last_tap", "dflash_config.last_tap"),
    "gating": ("gating", "dflash_config.gating"),
    "mask_embedding": ("dflash_config.mask_embedding", "mask_embedding"),
    "enable_thinking": ("dflash_config.enable_thinking", "enable_thinking"),
    "model_type": ("model_type",),
    "quantization": ("quantization", "quantization_config"),
}
_REQUIRED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("block_size", "mask_token_id", "target_layer_ids"),
)
# What a DFlash 2 drafter's layers and selector need besides.
_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# What the target does to its embeddings and logits, said again for code that has only its matrices.
_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "attention_value_scale")
# Extensions that change what a drafter computes. A config that sets one is refused by name.
_EXTENSIONS = (
    *("attention_sink_bias", "projector_type", "markov_rank"),
    *("enable_confidence_head", "sample_from_anchor", "log_snr_conditioning", "draft_hidden_size"),
    *("enable_qwen35_gated_q_proj", "mla_use_output_gate", "draft_layer_types", "fusion_type", "enable_hidden_correction"),
)
# Said by a true value and false by default.
_SAID = ("shift_label", "attention_k_eq_v", "enable_hidden_correction", "log_snr_conditioning")
# Those that a kind of drafter has, and what a DSpark one's Markov head may be.
_HAS = dict.fromkeys(DSPARKS, ("markov_rank", "enable_confidence_head", "sample_from_anchor")) | {DOMINO: ("projector_type",)}
# Sizes of latent attention, where `attention_mode` says "mla"; who may have it, and the modes that change nothing.
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MAY_BE_LATENT, _MODES = ("", "DFlashDraftModel", "DFlash2DraftModel", DSPARK, DOMINO), (None, "gqa", "mha")
_HAS[DSPARK] += ("log_snr_conditioning",)
_HAS[DFLY] = ("enable_hidden_correction",)
_HAS[QWEN35_DSPARK] += ("enable_qwen35_gated_q_proj",)
# Whose layers may have attention sinks.
_MAY_HAVE_SINKS = ("", "DFlashDraftModel", DSPARK)
# A tap of the last layer: before the final norm, as hooks on layers and vLLM take it, or after it, as transformers lists it.
LAST_TAPS = ("before", "after")
_MARKOV_HEADS = ("vanilla", "gated", "rnn")
_GEMMAS = (GEMMA4_DSPARK, "gelu_pytorch_tanh")
# Their values that change nothing, beside false, 0 and nothing.
_PLAIN = {"projector_type": ("dflash", "dspark"), "fusion_type": ("concat_fc",)}
_POSITIVE_INTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "target_hidden_size",
    "num_target_layers",
    "draft_vocab_size",
    "sliding_window",
    "swa_window_size",
    *_DFLASH2,
    "selector_vocab_size",
    *("emb_dim", "gru_hidden_dim", "global_head_dim", "num_global_key_value_heads"),
    *_LATENT,
    *("hidden_correction_intermediate_size", "target_num_hidden_layers"),
)
_FROM_ZERO = ("max_window_layers", "markov_rank", "pure_draft_prefix_len")
# Beyond any published drafter: a mistaken number is named before memory is asked for.
_MOST = {"num_hidden_layers": 1024, "block_size": 1024}
_FLAGS = (
    *("attention_bias", "use_swa", "use_sliding_window", "rope_is_neox_style", "sliding_window_non_causal", "enable_thinking"),
    *("enable_confidence_head", "sample_from_anchor", "shift_label", "attention_k_eq_v", "enable_qwen35_gated_q_proj"),
    *("rope_interleave", "mla_use_output_gate"),
)
# Causality inside the block, first key that holds a value wins; after these, sliding layers are causal and full ones are not.
_CAUSAL_KEYS = (("is_causal",), ("dflash_config.causal", "dflash_config.dflash_query_causal", "dflash_query_causal"))
# Published checkpoints whose config leaves out what their authors' code sets.
_ARCHITECTURE_DEFAULTS: dict[str, dict[str, Any]] = {
    "MuseGlimmerAssistantModel": {"is_causal": False, "all_sliding": True},
}
# The architecture that a model type says where `architectures` is missing. A stock drafter's sliding layers would be causal.
_ARCHITECTURE_OF = {"muse_glimmer_assistant": "MuseGlimmerAssistantModel", "k3_dspark": "K3DSparkModel"}
_OF_A_DRAFTER = re.compile(r"block_size|^dflash_|num_(speculative|draft)_tokens")
_MODEL_TYPE_DEFAULTS: dict[str, dict[str, Any]] = {
    name: {"sliding_window": 512, "sliding_window_pattern": 5} for name in ("gemma4", "gemma4_text")
}
_OURS = "Use a DFlash, DFlash 2, DSpark, Domino, DFlare or DFly drafter"
_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter, as its loader and its layers need it.

    `target_layer_ids[i]` is a 0-based target layer whose OUTPUT is tapped (-1: what the first layer is given; the last one's:
    `tapped_last`, which `last_tap` may say). `block_size` counts the anchor, also where a file's own counts drafts alone
    (`sample_from_anchor`: the anchor's row drafts the first token). Per layer: `causal[l]` (inside the block), `windows[l]`
    (query position - key position < window; None: no window), `ropes[l]`. `read_from` maps a field to the key it was read from;
    `unread`: keys that concern a drafter and that nothing here reads, such as `runtime_block_size` (a server's own limit: here
    `block_size=` or the draft-length policy says how much is drafted) and, for the published architectures,
    `partial_rotary_factor`.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig, ...]
    max_position_embeddings: int | None = None
    vocab_size: int | None = None
    draft_vocab_size: int | None = None
    num_target_layers: int | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    selector_vocab_size: int | None = None
    input_embedding_scale: float | None = None
    output_multiplier: float | None = None
    final_logit_softcapping: float | None = None
    emb_dim: int | None = None
    gru_hidden_dim: int | None = None
    pure_draft_prefix_len: int = 0
    shift_label: bool = False
    attention_k_eq_v: bool = False
    offset_norms: bool = False
    log_snr_conditioning: bool = False
    enable_hidden_correction: bool = False
    hidden_correction_intermediate_size: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    sample_from_anchor: bool = False
    attention_sinks: bool = False
    attention_value_scale: float | None = None
    last_tap: str | None = None
    mask_embedding: bool = False
    quantization: Mapping[str, Any] | None = None
    unsupported: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    read_from: Mapping[str, str] = field(default_factory=dict)

    @property
    def tapped_last(self) -> str:
        """Where a tap of the target's last layer is taken: before or after its final norm."""
        return self.last_tap or "after"

    def taps(self, n_layers: int) -> tuple[int, ...]:
        """`target_layer_ids` as `Target` takes them for a model of n_layers; the last may mean the state after the final norm."""
        return tuple(n_layers if i == n_layers - 1 and self.tapped_last == "after" else i for i in self.target_layer_ids)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> DrafterConfig:
        """Read a drafter's config.json.

        Raises:
          ConfigError: names every missing, contradicting or impossible key with its value, all at once.
        """
        return _Reader(raw, where).read()


class HookedConfig(DrafterConfig):
    """Of a packer who hooks layers, the last one before its norm (`packagings.taps_before_norm`)."""

    tapped_last = property(lambda self: self.last_tap or "before")


class _Reader(RopeReader):
    """Collects faults while reading one config, so that all of them are reported together."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw, self.where = raw, where
        self.faults: list[str] = []
        self.read_from: dict[str, str] = {}
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where} holds a {type(raw).__name__}; it must hold a JSON object", "Use a drafter's config.json")
        if kind := another_algorithm(raw):
            fault = f"{where} is of another kind of drafter: speculators_model_type = {kind}"
            raise ConfigError(fault, _OURS)
        raw = self.raw = flatten_speculators(raw, self.faults)
        nested = raw.get("dflash_config")
        if nested is not None and not isinstance(nested, Mapping):
            self.faults.append(f"dflash_config must be an object, found {nested!r}")
            self.raw = {k: v for k, v in raw.items() if k != "dflash_config"}
        architectures = raw.get("architectures") or ""
        first = architectures[0] if isinstance(architectures, (list, tuple)) else architectures
        if not isinstance(first, str):
            self.faults.append(f"architectures = {architectures!r} must be a list of names")
            first = ""
        named = first or _ARCHITECTURE_OF.get(str(raw.get("model_type")), "")
        self.architecture = architecture_of(named, raw)
        self.ignored: list[str] = []
        self.defaults = {
            **_MODEL_TYPE_DEFAULTS.get(str(raw.get("model_type")), {}),
            **_ARCHITECTURE_DEFAULTS.get(self.architecture, {}),
            "block_size": implied_block_size(raw),
        }

    def _at(self, path: str) -> Any:
        value: Any = self.raw
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def _first(self, name: str, paths: tuple[str, ...], default: Any = None) -> Any:
        """The value that all given places of a field agree on; null counts as absent."""
        found = [(path, self._at(path)) for path in paths if self._at(path) is not None]
        if not found:
            return self.defaults.get(name, default)
        path, value = found[0]
        for other, again in found[1:]:
            if again != value:
                self.faults.append(f"{path} = {value!r} contradicts {other} = {again!r}")
        self.read_from[name] = path
        return value

    def read(self) -> DrafterConfig:
        got = {name: self._first(name, paths) for name, paths in _SPELLINGS.items()}
        for name in _REQUIRED:
            if got[name] is None:
                self.faults.append(f"{' or '.join(_SPELLINGS[name])} is missing")
        for name in _POSITIVE_INTS:
            if got[name] is not None and not _is_int(got[name], 1):
                self.faults.append(f"{self.read_from.get(name, name)} = {got[name]!r} must be a positive whole number")
                got[name] = None
        for name, most in _MOST.items():
            if _is_int(got[name], most + 1):
                self.faults.append(f"{self.read_from[name]} = {got[name]} is beyond any drafter's ({most})")
                got[name] = None
        for name in _FLAGS:
            if got[name] is not None and not isinstance(got[name], bool):
                self.faults.append(f"{self.read_from[name]} = {got[name]!r} must be true or false")
        eps = 1e-6 if got["rms_norm_eps"] is None else got["rms_norm_eps"]
        if not _is_positive(eps):
            self.faults.append(f"rms_norm_eps = {eps!r} must be a positive number")
        if got["hidden_act"] not in (None, "silu", "swish") and (self.architecture, got["hidden_act"]) != _GEMMAS:
            self.faults.append(f"{self.read_from['hidden_act']} = {got['hidden_act']!r}: drafters use silu")
        for name in _SCALES:
            if got[name] is not None and not _is_positive(got[name]):
                self.faults.append(f"{self.read_from[name]} = {got[name]!r} must be a positive number")
        if got["last_tap"] is not None and got["last_tap"] not in LAST_TAPS:
            self.faults.append(f"{self.read_from['last_tap']} = {got['last_tap']!r} must be {' or '.join(LAST_TAPS)}")
        if got["model_type"] is not None and not isinstance(got["model_type"], str):
            self.faults.append(f"model_type = {got['model_type']!r} must be a name")
        if got["quantization"] and not isinstance(got["quantization"], Mapping):
            self.faults.append(f"{self.read_from['quantization']} = {got['quantization']!r} must be an object")
        for name in _FROM_ZERO:
            if got[name] is not None and not _is_int(got[name], 0):
                self.faults.append(f"{self.read_from[name]} = {got[name]!r} must be a whole number, 0 or more")
                got[name] = None
        from_anchor = samples_from_anchor(self.architecture, self.raw, got["sample_from_anchor"])

        if self.architecture == GEMMA4_DSPARK:
            _read_gemma(got)
        elif self.architecture == DFLY:
            # AngelSpec's `num_target_layers` counts the taps, and what is left out is corrected.
            got["num_target_layers"] = got["target_num_hidden_layers"]
            got["enable_hidden_correction"] = got["enable_hidden_correction"] is not False
        self._check_block(got, from_anchor)
        self._check_dflash2(got)
        heads, hidden = got["num_attention_heads"], got["hidden_size"]
        kv_heads = got["num_key_value_heads"] or heads
        head_dim = got["head_dim"] or (hidden // heads if heads and hidden else None)
        if heads and kv_heads and heads % kv_heads:
            self.faults.append(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
        latent = self._latent(got)
        if latent:
            kv_heads, head_dim = heads, (got["qk_nope_head_dim"] or 0) + (got["qk_rope_head_dim"] or 0)
        kinds = self._layer_kinds(got)
        causal = self._causal(got, kinds)
        windows = tuple(got["sliding_window"] if k == "sliding_attention" else None for k in kinds)
        ropes = self.ropes(got, kinds, latent["qk_rope_head_dim"] if latent else head_dim)
        if self.faults and self.architecture not in KNOWN:
            # What it lacks of our kinds is beside the point.
            fault = f"{self.where} is of another kind of drafter: {self.architecture}"
            raise ConfigError(fault, _OURS)
        if self.faults:
            raise ConfigError(
                f"{self.where} is not a DFlash drafter's config as published; {'; '.join(dict.fromkeys(self.faults))}",
                "Fix these keys or use the config.json that came with the weights",
            )
        kind = HookedConfig if taps_before_norm(self.architecture, self.raw) else DrafterConfig
        return kind(
            architecture=self.architecture,
            hidden_size=hidden,
            intermediate_size=got["intermediate_size"],
            num_hidden_layers=got["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(eps),
            attention_bias=bool(got["attention_bias"]),
            block_size=got["block_size"] + from_anchor,
            mask_token_id=got["mask_token_id"],
            target_layer_ids=tuple(got["target_layer_ids"]),
            target_hidden_size=got["target_hidden_size"] or hidden,
            causal=causal,
            windows=windows,
            ropes=ropes,
            max_position_embeddings=got["max_position_embeddings"],
            vocab_size=got["vocab_size"],
            draft_vocab_size=got["draft_vocab_size"],
            num_target_layers=got["num_target_layers"],
            **{name: got[name] for name in (*_DFLASH2, "selector_vocab_size", *_SCALES)},
            **{name: got[name] for name in ("emb_dim", "gru_hidden_dim")},
            **latent,
            **{name: bool(got[name]) for name in _SAID},
            hidden_correction_intermediate_size=got["hidden_correction_intermediate_size"],
            pure_draft_prefix_len=got["pure_draft_prefix_len"] or 0,
            offset_norms=got["model_type"] == "qwen3_5",
            markov_rank=got["markov_rank"] or 0,
            markov_head_type=str(got["markov_head_type"] or "vanilla"),
            sample_from_anchor=from_anchor,
            attention_sinks=bool(got["attention_sink_bias"]),
            mask_embedding=bool(got["mask_embedding"]),
            last_tap=got["last_tap"],
            quantization=got["quantization"] or None,
            unsupported=tuple(self._unsupported(got, ropes)),
            unread=self._unread(),
            read_from=self.read_from,
        )

    def _latent(self, got: dict[str, Any]) -> dict[str, Any]:
        """The sizes of latent attention, {} where it is not of that mode. Source: SpecForge, pull request 758."""
        if got["attention_mode"] != "mla":
            return {}
        self.faults += [f"{name} is missing, which attention_mode 'mla' needs" for name in _LATENT[1:] if not got[name]]
        got["rope_is_neox_style"] = got["rope_interleave"] is False
        return {name: got[name] for name in _LATENT}

    def _unsupported(self, got: dict[str, Any], ropes: tuple[RopeConfig, ...]) -> list[str]:
        """What changes the computation and is no part of this kind of drafter, by key and value."""
        has = (*_HAS.get(self.architecture, ()), *(("attention_sink_bias",) if self.architecture in _MAY_HAVE_SINKS else ()))
        found = [
            f"{self.read_from[name]} = {got[name]!r}"
            for name in _EXTENSIONS
            if got[name] and got[name] not in _PLAIN.get(name, ()) and name not in has
        ]
        if got["gating"] not in (None, "per-head", True) and self.architecture == LAGUNA:
            found.append(f"{self.read_from['gating']} = {got['gating']!r}")
        if got["attention_mode"] == "mla" and (got["attention_sink_bias"] or got["attention_value_scale"]):
            found.append("attention_mode = 'mla' with sinks or scaled values")
        if got["attention_mode"] == "mla" and any(k.kind in ("dynamic", "longrope") for k in ropes):
            found.append(f"attention_mode = 'mla' with RoPE kind {ropes[0].kind!r}")
        if got["attention_mode"] not in (*_MODES, "mla" if self.architecture in _MAY_BE_LATENT else None):
            found.append(f"{self.read_from['attention_mode']} = {got['attention_mode']!r}")
        head = got["markov_head_type"] or "vanilla"
        if self.architecture in DSPARKS and got["markov_rank"] and head not in _MARKOV_HEADS:
            found.append(f"{self.read_from['markov_head_type']} = {head!r}")
        if self.architecture == QWEN35_DSPARK and not got["enable_qwen35_gated_q_proj"]:
            found.append("Qwen35DSparkModel of model_type 'qwen3_5' without enable_qwen35_gated_q_proj")
        return found

    def _unread(self) -> tuple[str, ...]:
        known = {path for paths in (*_SPELLINGS.values(), *_CAUSAL_KEYS) for path in paths}
        nested = [key for key in self.raw.get("dflash_config") or {} if f"dflash_config.{key}" not in known]
        # Of the top level, which repeats much of a target's config, those that can only concern the drafter.
        top = [
            key for key, value in self.raw.items() if key not in known and value is not None and _OF_A_DRAFTER.search(str(key))
        ]
        return tuple(dict.fromkeys([*nested, *(key for key in sorted(top) if key != "dflash_config"), *self.ignored]))

    def _check_block(self, got: dict[str, Any], from_anchor: bool) -> None:
        block, mask, taps = got["block_size"], got["mask_token_id"], got["target_layer_ids"]
        where = self.read_from
        if block is not None and not _is_int(block, 2 - from_anchor):
            why = "at least 1" if from_anchor else "at least 2 (it counts the anchor)"
            self.faults.append(f"{where['block_size']} = {block!r} must be a whole number of {why}")
        if mask is not None:
            if not _is_int(mask, 0):
                self.faults.append(f"{where['mask_token_id']} = {mask!r} must be a token id, 0 or more")
            elif got["vocab_size"] and mask >= got["vocab_size"]:
                self.faults.append(
                    f"{where['mask_token_id']} = {mask} is outside the embedding (vocab_size = {got['vocab_size']})"
                )
        if taps is None:
            return
        if not isinstance(taps, (list, tuple)) or not taps or not all(_is_int(t, -1) for t in taps):
            self.faults.append(f"{where['target_layer_ids']} = {taps!r} must be a list of 0-based layer ids (-1: the embedding)")
            return
        n = got["num_target_layers"]
        if n and max(taps) >= n:
            self.faults.append(f"{where['target_layer_ids']} = {list(taps)} is out of range: num_target_layers = {n}")

    def _check_dflash2(self, got: dict[str, Any]) -> None:
        needs_vocabulary = got["markov_rank"] if self.architecture in DSPARKS else self.architecture == DOMINO
        if needs_vocabulary and not got["vocab_size"]:
            self.faults.append("vocab_size is missing")
        if self.architecture == DOMINO:
            self.faults += [f"{_SPELLINGS[name][0]} is missing" for name in ("emb_dim", "gru_hidden_dim") if not got[name]]
        if self.architecture != "DFlash2DraftModel":
            return
        self.faults += [f"{_SPELLINGS[name][0]} is missing" for name in _DFLASH2 if not got[name]]
        if not got["vocab_size"] and not got["selector_vocab_size"]:
            self.faults.append("vocab_size is missing")
        hidden, group = got["hidden_size"], got["conv_group_size"]
        if hidden and group and hidden % group:
            self.faults.append(f"hidden_size = {hidden} is not a multiple of conv_group_size = {group}")

    def _layer_kinds(self, got: dict[str, Any]) -> tuple[str, ...]:
        """full_attention or sliding_attention for each layer, from whichever key the file has."""
        n = got["num_hidden_layers"] or 0
        kinds, pattern, window = got["layer_types"], got["sliding_window_pattern"], got["sliding_window"]
        if got["use_swa"] or self.defaults.get("all_sliding"):
            # MiMo's spelling: every layer slides, whatever layer_types says, over its own window key.
            got["sliding_window"] = got["swa_window_size"] or window
            kinds = ["sliding_attention"] * n
        elif kinds is not None:
            if not isinstance(kinds, (list, tuple)) or len(kinds) != n or any(k not in _LAYER_KINDS for k in kinds):
                self.faults.append(f"layer_types = {kinds!r} must name {' or '.join(_LAYER_KINDS)} for each of {n} layers")
                return ("full_attention",) * n
        elif isinstance(pattern, (list, tuple)):
            if len(pattern) != n or not all(isinstance(p, (bool, int)) for p in pattern):
                self.faults.append(f"sliding_window_pattern = {pattern!r} must have one true or false for each of {n} layers")
                return ("full_attention",) * n
            kinds = ["sliding_attention" if p else "full_attention" for p in pattern]
        elif pattern is not None and window:
            if not _is_int(pattern, 1):
                self.faults.append(f"sliding_window_pattern = {pattern!r} must be a positive whole number or a list")
                return ("full_attention",) * n
            kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(n)]
        elif got["use_sliding_window"] and window:
            first = got["max_window_layers"] or 0
            kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(n)]
        else:
            kinds = ["full_attention"] * n
        if "sliding_attention" in kinds and not _is_int(got["sliding_window"], 2):
            self.faults.append(f"sliding layers need sliding_window of at least 2, found {got['sliding_window']!r}")
        return tuple(kinds)

    def _causal(self, got: dict[str, Any], kinds: tuple[str, ...]) -> tuple[bool, ...]:
        for keys in _CAUSAL_KEYS:
            value = self._first(keys[0].rsplit(".")[-1], keys)
            if value is not None:
                if not isinstance(value, bool):
                    self.faults.append(f"{keys[0]} = {value!r} must be true or false")
                return (bool(value),) * len(kinds)
        if got["use_swa"] or got["sliding_window_non_causal"]:
            return (False,) * len(kinds)
        return tuple(k == "sliding_attention" for k in kinds)


def _read_gemma(got: dict[str, Any]) -> None:
    """Gemma 4's drafter has the sizes of its target's full layers, and its embedding's scale. Source: DeepSpec, dspark/gemma4."""
    got["head_dim"] = got["global_head_dim"] or got["head_dim"]
    if got["attention_k_eq_v"]:
        got["num_key_value_heads"] = got["num_global_key_value_heads"] or got["num_key_value_heads"]
    if got["hidden_size"] and not got["input_embedding_scale"]:
        got["input_embedding_scale"] = got["hidden_size"] ** 0.5
