"""Turns tensor names and layouts of published checkpoints into those that mlx-lm's own `sanitize` expects.

Knows: prefixes of multimodal wrappers, expert tensors stacked or per expert, tensors that a text model does not use. Knows no
files and no configs. One checkpoint can be laid out in several ways, so `layouts` lists the candidates; the first one whose
names and shapes are exactly the model's parameters is the right one, and none is ever half applied.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import mlx.core as mx

from .families import FusedExperts, special

Weights = dict[str, mx.array]

# tensors that a text model does not use: what they are -> how they are named
UNUSED = {
    "vision tower": re.compile(
        r"(^|\.)(visual|vision_tower|vision_model|vision_encoder|vision_embedder|embed_vision|vit|vpm|resampler)\."
    ),
    "audio tower": re.compile(r"(^|\.)(audio_tower|audio_model|audio_encoder|embed_audio|apm)\."),
    "modality projector": re.compile(
        r"(^|\.)(multi_modal_projector|mm_projector|multimodal_projector|connector|patch_merge(r|_mlp)|mlp1|perceive|image_newline)(\.|$)"
    ),
    "multi-token prediction": re.compile(r"(^|\.)(mtp|mtp_layers|nextn|mtp_block)\."),
    "derived buffer": re.compile(
        r"(rotary_emb\.(\w*inv_freq|cos_cached|sin_cached)|rotary_pos_emb\.inv_freq|\.attn\.(masked_)?bias|attention\.(masked_)?bias)$"
    ),
    "fp8 activation scale": re.compile(r"\.(input|activation)_scale$"),
    "calibration range": re.compile(r"\.(input|output)_(min|max)$"),
}

_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_STACKED = re.compile(
    r"^(?P<base>.*\.experts)\.(?P<name>gate_up_proj|gate_proj|up_proj|down_proj)(?P<kind>\.weight|\.bias|_bias)?$"
)
_PER_EXPERT = re.compile(r"^(?P<base>.*\.experts)\.(?P<expert>\d+)\.(?P<name>\w+)\.(?P<kind>weight|bias|scales|biases)$")

# tensors that change the result: if a family's `sanitize` drops one that is not zero, the model computes something else
NEEDED = re.compile(r"e_score_correction_bias$|_proj\.bias$|router\.bias$")

# prefixes under which multimodal wrappers keep the text model -> its own
_TEXT_PREFIXES = (
    ("model.language_model.model.", "model."),
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
    ("thinker.model.", "model."),
    ("thinker.lm_head.", "lm_head."),
    ("llm.", ""),
)

# a text model's names as wrappers spell them, tried for a text checkpoint that mlx-lm only has inside a wrapper
_WRAPPER_PREFIXES = (
    ("model.", "model.language_model."),
    ("model.", "language_model.model."),
    ("model.language_model.", "language_model.model."),
    ("transformer.", ""),
    # of torch.compile and of data-parallel trainers
    ("_orig_mod.", ""),
    ("module.", ""),
)

# other spellings of the names around experts, tried when mlx-lm's `sanitize` does not recognise the usual ones
_MIXTRAL_NAMES = (
    (re.compile(r"\.mlp\.(experts\.|gate\.)"), r".block_sparse_moe.\1"),
    (re.compile(r"(\.experts\.\d+\.)gate_proj\."), r"\1w1."),
    (re.compile(r"(\.experts\.\d+\.)down_proj\."), r"\1w2."),
    (re.compile(r"(\.experts\.\d+\.)up_proj\."), r"\1w3."),
)
_SWITCH_NAMES = ((re.compile(r"\.experts\.(gate_proj|up_proj|down_proj)\."), r".switch_mlp.\1."),)


@dataclass(frozen=True)
class Layout:
    """A named way to rewrite tensors before `sanitize`."""

    name: str
    apply: Callable[[Weights], Weights]


def unused_reason(name: str, num_layers: int | None) -> str | None:
    """Why a text model does not use this tensor, or None when it does (or may)."""
    for reason, pattern in UNUSED.items():
        if pattern.search(name):
            return reason
    layer = _LAYER.search(name)
    if layer and num_layers is not None and int(layer.group(2)) >= num_layers:
        return f"layer {layer.group(2)} of {num_layers} (multi-token prediction)"
    return None


def strip_text_prefix(name: str) -> str:
    """`model.language_model.layers.0...` -> `model.layers.0...`, for a text model taken out of its wrapper."""
    for prefix, own in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return own + name[len(prefix) :]
    return name


def layouts(model_type: str, weights: Weights) -> Iterator[Layout]:
    """Candidate layouts, most specific first. With ordinary names the first is the identity."""
    fused = special(model_type).fused_experts
    stacked = any(_STACKED.match(name) for name in weights)
    per_expert = any(_PER_EXPERT.match(name) for name in weights)

    def one_per_expert(source: Weights) -> Weights:
        return unstack_experts(split_experts(source, fused))

    if stacked:
        # per expert first: with stacked tensors some families' sanitize returns early and skips its other work
        yield Layout("experts unstacked", one_per_expert)
        yield Layout("experts unstacked, w1 w2 w3", lambda source: rename(one_per_expert(source), _MIXTRAL_NAMES))
    yield Layout("as saved", dict)
    if stacked:
        yield Layout("experts split", lambda source: split_experts(source, fused))
        yield Layout("experts split, switch_mlp", lambda source: rename(split_experts(source, fused), _SWITCH_NAMES))
    if per_expert:
        yield Layout("w1 w2 w3", lambda source: rename(source, _MIXTRAL_NAMES))
        yield Layout("experts stacked", lambda source: rename(stack_experts(source), _SWITCH_NAMES))
        yield Layout("experts fused", fuse_experts)
    yield Layout("model. added", add_model_prefix)
    for old, new in _WRAPPER_PREFIXES:
        yield Layout(f"{old} -> {new}", lambda source, old=old, new=new: swap_prefix(source, old, new))


def without_zero_biases(weights: Weights, expected: Collection[str]) -> Weights:
    """Remove biases of zeros where the layer has no bias: AutoGPTQ writes one for every matrix.

    Args:
      expected: names of the model's parameters.
    """

    def adds_nothing(name: str, value: mx.array) -> bool:
        return name.endswith(".bias") and name not in expected and not mx.any(value).item()

    return {name: value for name, value in weights.items() if not adds_nothing(name, value)}


def rename(weights: Weights, rules: tuple[tuple[re.Pattern, str], ...]) -> Weights:
    out = {}
    for name, value in weights.items():
        for pattern, replacement in rules:
            name = pattern.sub(replacement, name)
        out[name] = value
    return out


def add_model_prefix(weights: Weights) -> Weights:
    """A bare text model (`layers.0...`), as `AutoModel` saves it, under the name that a language model gives it."""
    return {name if name.startswith(("model.", "lm_head.")) else "model." + name: value for name, value in weights.items()}


def swap_prefix(weights: Weights, old: str, new: str) -> Weights:
    """Names that begin with `old` begin with `new` instead; the head goes where the wrapper keeps it."""
    head = "language_model.lm_head." if new == "language_model.model." else "lm_head."
    pairs = ((old, new), ("lm_head.", head))
    out: Weights = {}
    for name, value in weights.items():
        before, after = next(((b, a) for b, a in pairs if name.startswith(b)), ("", ""))
        out[after + name[len(before) :]] = value
    return out


def split_experts(weights: Weights, fused: FusedExperts) -> Weights:
    """Fused `gate_up_proj` -> separate gate and up; every stacked expert tensor to [E, out, in] and named `.weight`/`.bias`.

    Shapes:
      - gate_up_proj: [E, 2I, H] (or [E, H, 2I] transposed); bias [E, 2I]
      - out: gate_proj, up_proj [E, I, H]; down_proj [E, H, I]; biases [E, I], [E, H]
    """
    out: Weights = {}
    for name, value in weights.items():
        match = _STACKED.match(name)
        if not match or value.dtype == mx.uint32:
            out[name] = value
            continue
        base, part = match["base"], match["name"]
        bias = match["kind"] in (".bias", "_bias")
        kind = "bias" if bias else "weight"
        if not bias and fused.transposed and match["kind"] != ".weight":
            value = value.swapaxes(-1, -2)
        if part != "gate_up_proj":
            out[f"{base}.{part}.{kind}"] = value
            continue
        axis = 1
        if fused.interleaved:
            gate, up = value[:, ::2], value[:, 1::2]
        else:
            gate, up = mx.split(value, 2, axis=axis)
        out[f"{base}.gate_proj.{kind}"], out[f"{base}.up_proj.{kind}"] = gate, up
    return out


def unstack_experts(weights: Weights) -> Weights:
    """`experts.gate_proj.weight` [E, ...] -> `experts.0.gate_proj.weight`, ...: the layout that hubs and mlx-lm know."""
    out: Weights = {}
    for name, value in weights.items():
        match = _STACKED.match(name)
        if not match or match["kind"] not in (".weight", ".bias") or value.ndim < 2 or value.dtype == mx.uint32:
            out[name] = value
            continue
        for expert in range(value.shape[0]):
            out[f"{match['base']}.{expert}.{match['name']}{match['kind']}"] = value[expert]
    return out


def stack_experts(weights: Weights) -> Weights:
    """`experts.0.gate_proj.weight`, ... -> `experts.gate_proj.weight` [E, ...]."""
    groups: dict[str, dict[int, mx.array]] = {}
    out: Weights = {}
    for name, value in weights.items():
        match = _PER_EXPERT.match(name)
        if match:
            groups.setdefault(f"{match['base']}.{match['name']}.{match['kind']}", {})[int(match["expert"])] = value
        else:
            out[name] = value
    for name, members in groups.items():
        if sorted(members) == list(range(len(members))):
            out[name] = mx.stack([members[i] for i in range(len(members))])
    return out


def fuse_experts(weights: Weights) -> Weights:
    """Per-expert gate and up -> `experts.gate_up_proj` [E, 2I, H], for families whose hub layout is fused."""
    stacked = stack_experts(weights)
    out: Weights = {}
    for name, value in stacked.items():
        match = _STACKED.match(name)
        if not match or match["kind"] != ".weight":
            out[name] = value
        elif match["name"] == "down_proj":
            out[f"{match['base']}.down_proj"] = value
        elif match["name"] == "gate_proj":
            up = stacked[f"{match['base']}.up_proj.weight"]
            out[f"{match['base']}.gate_up_proj"] = mx.concatenate([value, up], axis=1)
    return out
