"""What a training run starts from: the drafter's config and first weights, and the target as training runs it.

Knows a target's sizes and the published layout of a drafter's config. Knows nothing of data, losses or optimisers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..config import DrafterConfig
from ..errors import CheckpointError, ConfigError, PairError
from ..models.dflash2 import DFlash2Drafter
from ..models.drafter import Drafter
from ..models.dspark import DSparkDrafter
from ..models.target import Target
from .docs import Docs

# Architecture as config.json names it: what is trained. The training pass computes the layers of these alone.
TRAINED = {"": Drafter, "DFlashDraftModel": Drafter, "DFlash2DraftModel": DFlash2Drafter, "DSparkDraftModel": DSparkDrafter}


def default_taps(num_layers: int, n: int = 5) -> list[int]:
    """n layers (fewer in a small target) spread evenly from the second to the third from last. Source: the paper, section 5."""
    n = min(n, max(1, num_layers - 3))
    if n == 1:
        return [num_layers // 2]
    return [round(1 + i * (num_layers - 4) / (n - 1)) for i in range(n)]


def target_shape(model: nn.Module) -> dict[str, Any]:
    """What a target's arguments say about its sizes, wherever the family keeps them."""
    found: dict[str, Any] = {}
    args = getattr(model, "args", None)
    places = [vars(args) if args is not None else {}]
    places += [places[0].get("text_config") or {}]
    inner = getattr(getattr(model, "language_model", None), "args", None)
    places += [vars(inner) if inner is not None else {}]
    for place in places:
        found.update({k: v for k, v in place.items() if v is not None and k not in found})
    return found


def drafter_config(
    model: nn.Module,
    mask_token_id: int,
    layers: int = 5,
    block_size: int = 16,
    target_layer_ids: list[int] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A config.json in the published layout for a drafter of this target; sizes are the target's unless changed."""
    shape = target_shape(model)
    n, hidden = len(model.layers), shape.get("hidden_size")
    if not hidden:
        raise PairError("the target's arguments name no hidden_size", "Pass hidden_size")
    heads = shape.get("num_attention_heads") or max(1, hidden // 64)
    theta = shape.get("rope_theta") or (shape.get("rope_parameters") or {}).get("rope_theta") or 10000.0
    taps = target_layer_ids or default_taps(n)
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": shape.get("intermediate_size") or 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shape.get("num_key_value_heads") or heads,
        "head_dim": shape.get("head_dim") or hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": shape.get("rms_norm_eps") or 1e-6,
        "vocab_size": shape.get("vocab_size"),
        "max_position_embeddings": shape.get("max_position_embeddings") or 32768,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": float(theta),
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(theta)},
        "tie_word_embeddings": False,
        "block_size": block_size,
        "num_target_layers": n,
        "dflash_config": {"mask_token_id": int(mask_token_id), "target_layer_ids": [int(t) for t in taps]},
        **changes,
    }
    raw["layer_types"] = ["full_attention"] * raw["num_hidden_layers"]
    DrafterConfig.from_dict(raw)
    return {k: v for k, v in raw.items() if v is not None or k == "rope_scaling"}


def own_share(model: nn.Module, docs: Docs, conversations: int = 8, max_len: int = 256) -> float | None:
    """The share of tokens of greedy answers that the target itself finds likeliest there; None if no answer is greedy."""
    greedy = np.flatnonzero(docs.temp == 0)
    same = many = 0
    for i in greedy[np.linspace(0, len(greedy) - 1, min(conversations, len(greedy))).astype(int)] if len(greedy) else []:
        ids, answer = (part[:max_len] for part in docs.doc(i))
        if ids.max() >= (target_shape(model).get("vocab_size") or np.inf):
            return 0.0
        best = np.array(mx.argmax(model(mx.array(ids[None].astype(np.int32)))[0, :-1], axis=-1))
        same, many = same + int(((best == ids[1:]) & answer[1:]).sum()), many + int(answer[1:].sum())
    return same / many if many else None


def check_text(model: nn.Module, docs: Docs, name: str) -> None:
    """Refuse text that another target wrote. The same target in other number types still says nine tokens of ten.

    Raises:
      ConfigError: less than 0.7 of the tokens of greedy answers are what this target would write.
    """
    share = own_share(model, docs)
    if share is not None and share < 0.7:
        raise ConfigError(
            f"another model wrote this text: {share:.0%} of its greedy answers' tokens are what {name} says there, "
            "and a drafter learns what its own target says",
            f"Write text with it: dflash-mlx train data --model {name}",
        )


def mask_token(tokenizer, vocab_size: int, used: set[int]) -> int:
    """A special id that the target never writes: the last special token that no text and no template uses.

    Raises:
      ConfigError: if the tokenizer has no such id.
    """
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    taken = used | set(tokenizer.eos_token_ids) | {tokenizer.bos_token_id, getattr(tokenizer, "pad_token_id", None)}
    free = [i for i, token in added.items() if getattr(token, "special", True) and i < vocab_size and i not in taken]
    if not free:
        raise ConfigError(
            "this tokenizer has no unused special token to serve as the mask",
            "Pass mask_token_id: an id of the embedding that never occurs in text",
        )
    return max(free)


def dense(model: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """The same target with quantized layers written out in `dtype`: on a GPU, training needs no quantized kernels.

    Values are formed in float32 and rounded once: float16 keeps 4-bit weights to 1 part in 2,000, bfloat16 to 1 in 250.
    """
    from mlx_lm.utils import dequantize_model

    model.set_dtype(mx.float32)
    with mx.stream(mx.cpu):
        model = dequantize_model(model)
        mx.eval(model.parameters())
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def not_trained(config: DrafterConfig) -> list[str]:
    """What of a drafter the training pass does not compute, by name. []: it can be trained."""
    extras = {
        "attention sinks": config.attention_sinks,
        "scaled values": config.attention_value_scale,
        "latent attention": config.kv_lora_rank,
        "a vocabulary of its own": config.draft_vocab_size not in (None, config.vocab_size),
        "LongRoPE": any(rope.kind == "longrope" for rope in config.ropes),
    }
    other = [] if config.architecture in TRAINED else [f"the architecture {config.architecture}"]
    return [*other, *config.unsupported, *(name for name, has in extras.items() if has)]


def init_drafter(raw: dict[str, Any], target: Target, sample: np.ndarray, seed: int) -> Drafter:
    """A fresh drafter: normal weights of size 0.02, smaller where they add to the residual; `fc` evens out the taps.

    What DFlash 2 and DSpark add does nothing yet: convolutions that copy their row; zeros for the successor codebook and for the
    Markov head's second matrix.

    Shapes:
      - sample: [B, S] ids to measure the taps on
    Raises:
      ConfigError: the drafter is of a kind that cannot be trained here.
    """
    config = DrafterConfig.from_dict(raw)
    if unknown := not_trained(config):
        raise ConfigError(
            f"this drafter has {', '.join(unknown)}, which training does not compute; it trains DFlash, DFlash 2 and DSpark",
            "Give such a drafter, or leave init out",
        )
    drafter = TRAINED[config.architecture](config)
    features = target(mx.array(sample)).features.astype(mx.float32)
    B, S, _ = features.shape
    n = len(config.target_layer_ids)
    size = mx.sqrt(mx.square(features).reshape(B * S, n, -1).mean(-1))
    # The median row: the first id of a text may be a hundred times larger than all others.
    size = mx.sort(size, axis=0)[B * S // 2]
    key = mx.random.key(seed)
    weights = []
    # Sorted: MLX lists parameters in another order in each process, and a seed should mean the same weights in all.
    for name, value in sorted(tree_flatten(drafter.parameters())):
        if value.ndim < 2:
            weights.append((name, mx.zeros_like(value) if name.endswith("bias") else mx.ones_like(value)))
            continue
        if name.endswith("base_kernel"):
            weights.append((name, mx.zeros_like(value).at[:, 0].add(1.0)))
            continue
        if name.endswith(("kernel_projection.weight", "successor_codebook", "markov_w2.weight")):
            weights.append((name, mx.zeros_like(value)))
            continue
        key, now = mx.random.split(key)
        std = 0.02 / math.sqrt(2 * config.num_hidden_layers) if ("o_proj" in name or "down_proj" in name) else 0.02
        std = 1.0 if name.endswith(("predecessor_codebook", "markov_w1.weight")) else std
        value = std * mx.random.normal(value.shape, key=now)
        if name == "fc.weight":
            H = config.hidden_size
            value = (value.reshape(H, n, -1) * (size.mean() / size)[None, :, None]).reshape(H, -1)
        weights.append((name, value))
    drafter.load_weights(weights)
    mx.eval(drafter.parameters())
    # A drafter in bfloat16 beside a target in float16 would meet the head in float32.
    act = target.embed(mx.array(sample[:1, :1])).dtype
    return drafter.bind(target.embed, lambda hidden: target.head(hidden.astype(act)), target.model)


def as_dflash2(raw: dict[str, Any], rank: int = 64, top_k: int = 16) -> dict[str, Any]:
    """The config of a DFlash 2 drafter with the layers of a DFlash drafter: convolutions of 2 rows, a selector of `rank`."""
    raw = {k: v for k, v in raw.items() if k not in ("quantization", "quantization_config")}
    hidden = raw["hidden_size"]
    group = next(g for g in (16, 8, 4, 2, 1) if hidden % g == 0)
    new = {
        "conv_kernel_size": 2,
        "conv_group_size": group,
        "selector_rank": rank,
        "selector_top_k": min(top_k, raw["vocab_size"]),
    }
    raw |= {"architectures": ["DFlash2DraftModel"], "dflash_config": {**raw["dflash_config"], **new}}
    DrafterConfig.from_dict(raw)
    return raw


def as_dspark(raw: dict[str, Any], rank: int = 64) -> dict[str, Any]:
    """The config of a DSpark drafter with the layers and the labels of a DFlash drafter, and a Markov head of `rank`."""
    raw = {k: v for k, v in raw.items() if k not in ("quantization", "quantization_config")}
    raw |= {"architectures": ["DSparkDraftModel"], "sample_from_anchor": False}
    raw |= {"dflash_config": {**raw["dflash_config"], "markov_rank": rank, "markov_head_type": "vanilla"}}
    DrafterConfig.from_dict(raw)
    return raw


def load_start(drafter: Drafter, init: str | Path) -> None:
    """Give a fresh drafter the weights of another, bfloat16 or quantized.

    A DFlash 2 or DSpark drafter may start from a DFlash one. A confidence head is left behind: it knows another drafter.

    Raises:
      CheckpointError: the other drafter has other tensors or other shapes.
    """
    from ..conversion import load_dense_drafter

    given, own = load_dense_drafter(init)[1], dict(tree_flatten(drafter.parameters()))
    given = {name: value for name, value in given.items() if not name.startswith("confidence_head.")}
    new = {name for name in own if "_conv." in name or name.startswith(("candidate_selector.", "markov_head."))}
    if not new.isdisjoint(given):
        new = set()
    wrong = sorted(set(own) - new ^ set(given))
    wrong += [name for name in own if name in given and own[name].shape != given[name].shape]
    if wrong:
        raise CheckpointError(
            f"{init} is no drafter to start from: {', '.join(wrong[:4])} differ from the drafter that is to be trained",
            "Give a drafter of the same layers, or leave init out.",
        )
    drafter.load_weights([(name, given.get(name, value)) for name, value in own.items()])
