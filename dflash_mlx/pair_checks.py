"""Whether a drafter and a target belong together, asked once when a drafter is loaded.

Compares sizes and tokens, runs one small draft, and looks at the mask token's embedding. Knows no files.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from .config import LAST_TAPS, DrafterConfig
from .errors import ConfigError, PairError, TapError
from .models.drafter import Drafter
from .models.target import Target

# Rows by which publishers pad an embedding; vocabularies of two models differ by more.
_MOST_PADDING = 2048


def with_last_tap(config: DrafterConfig, last_tap: str, layers: int) -> DrafterConfig:
    """The config with the last layer's tap taken before or after the final norm. layers: of the target; a warning says if the
    last is not tapped.

    Raises:
      ConfigError: neither of the two.
    """
    if last_tap not in LAST_TAPS:
        raise ConfigError(f"the last tap is {last_tap!r}; it must be {' or '.join(LAST_TAPS)}", "Leave it out for the default")
    if layers - 1 not in config.target_layer_ids:
        taps = list(config.target_layer_ids)
        warnings.warn(f"the last tap has no effect: the drafter reads layers {taps}, not the last ({layers - 1})", stacklevel=3)
    return replace(config, last_tap=last_tap)


def check_pair(config: DrafterConfig, target: Target, drafter: Drafter | None = None) -> None:
    """Compare a drafter's config with the target as it is, by one pass over one token.

    Args:
      drafter: built from the checkpoint's shapes; None: one without an embedding of its own.

    Raises:
      PairError: lists every contradiction.
      TapError: if the target cannot be tapped (compiled, or no module owns its layers).
    """
    n, family, faults = len(target.layers), target.family, []
    ids = config.target_layer_ids
    if max(ids) >= n:
        faults.append(f"drafter taps layers {list(ids)}, {family} has {n}")
    if config.num_target_layers not in (None, n):
        faults.append(f"drafter expects {config.num_target_layers} target layers, {family} has {n}")
    token = mx.zeros((1, 1), dtype=mx.int32)
    tapped = Target(target.model, [i for i in dict.fromkeys(config.taps(n)) if i <= n] or [0])
    features = tapped(token).features
    try:
        mx.eval(features)
    except (RuntimeError, ValueError) as error:
        raise TapError(
            f"{family}'s layer outputs are traced ones ({error}); they must be plain arrays", "Pass the uncompiled model"
        ) from None
    width = features.shape[-1] // len(tapped.layer_ids)
    if width != config.target_hidden_size:
        faults.append(f"drafter expects target hidden_size {config.target_hidden_size}, {family} has {width}")
    own_embedding = drafter is not None and "embed_tokens" in drafter
    own_head = drafter is not None and "lm_head" in drafter
    embedding = target.embed(token).shape[-1]
    if embedding != config.hidden_size and not (own_embedding and own_head):
        faults.append(f"drafter has hidden_size {config.hidden_size}, {family} embeds into {embedding}")
    rows, whose = target.vocabulary, f"{family}'s embedding"
    if own_embedding:
        rows, whose = drafter.embed_tokens.weight.shape[0], "its own embedding"
        if rows < target.vocabulary:
            faults.append(f"drafter's own embedding has {rows} rows, {family}'s has {target.vocabulary}")
    if config.vocab_size and not own_head and config.vocab_size != target.vocabulary:
        sizes = f"vocab_size {config.vocab_size}, {family}'s embedding has {target.vocabulary} rows"
        if abs(config.vocab_size - target.vocabulary) > _MOST_PADDING:
            faults.append(f"drafter's config says {sizes}")
        else:
            warnings.warn(f"the drafter's config says {sizes}: right only where one of them is padded", stacklevel=4)
    if config.mask_token_id >= rows:
        faults.append(f"drafter's mask token {config.mask_token_id} has no row in {whose} of {rows}")
    if faults:
        raise PairError(
            f"this drafter and this target do not belong together: {'; '.join(faults)}", "Use the drafter trained for this target"
        )


def check_own_head(drafter: Drafter, target: Target) -> None:
    """A drafter's own head may only give tokens that the target can embed: others would read garbage."""
    ids = drafter.target_ids(mx.arange(drafter.lm_head.weight.shape[0]))
    low, high = ids.min().item(), ids.max().item()
    if low < 0 or high >= target.vocabulary:
        raise PairError(
            f"the drafter's head names tokens {low}..{high}; {target.family}'s embedding has rows 0..{target.vocabulary - 1}",
            "Use the drafter trained for this target",
        )


def check_finite(drafter: Drafter, model: nn.Module) -> None:
    """One small draft with the weights and number types as they are: overflow shows as a drafter that accepts nothing.

    Raises:
      PairError: names the first part that gives NaN or infinity, and the number type.
    """
    target = Target(model, drafter.config.taps(len(model.layers)))
    if not math.isfinite(_largest_of_mask_row(drafter)):
        whose = "drafter" if "mask_embedding" in drafter else "target"
        raise PairError(f"{_mask_row(drafter)} has NaN or infinity", f"The {whose}'s files are damaged: get them again")
    step = max(target.vocabulary // 8, 1)
    features = target(mx.arange(0, 8 * step, step)[None] % target.vocabulary).features
    if fault := drafter.first_not_finite(features):
        where = f"layers {list(target.layer_ids)} of {target.family}" if fault[0] == "the tapped layers" else fault[0]
        remedy = "Its weights are damaged: get them again"
        if fault[1] == "float16":
            remedy = "Load the target with another dtype (bfloat16 or float32)"
        raise PairError(f"{where} gives NaN or infinity in {fault[1]}", remedy)


def _largest_of_mask_row(drafter: Drafter) -> float:
    row = drafter.embed_block(mx.array([[drafter.config.mask_token_id]]))
    return mx.max(mx.abs(row.astype(mx.float32))).item()


def _mask_row(drafter: Drafter) -> str:
    """What stands for every slot to be filled, in words."""
    if "mask_embedding" in drafter:
        return "the drafter's own vector for mask slots"
    return f"the embedding's row of the mask token {drafter.config.mask_token_id}"


def mask_row_fault(drafter: Drafter) -> str | None:
    """A sentence where the row that stands for every slot to be filled is zero, or so small that a norm's epsilon hides it: most
    drafters accept next to nothing then."""
    largest = _largest_of_mask_row(drafter)
    if largest > 1e-3 * math.sqrt(drafter.config.rms_norm_eps):
        return None
    missing = "the row is missing from the target, or the drafter's publisher keeps it in a file of its own"
    if "mask_embedding" in drafter:
        missing = "get the drafter's files again"
    return (
        f"{_mask_row(drafter)} is {'next to ' if largest else ''}zero, which few drafters were trained with: if tau stays near "
        f"1, {missing}"
    )
