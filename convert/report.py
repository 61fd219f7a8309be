"""The record beside converted weights: where they come from, what became of every tensor, and how close the result is.

Knows hashes, versions and how to compare two models on fixed ids. Knows nothing of how a conversion is done. The comparison
loads the written directory again, so it tests what was written, not what was intended.
"""

import platform
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.checkpoint import Checkpoint
from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import ConversionError
from dflash_mlx.hub import snapshot_of
from dflash_mlx.models.architectures import build_drafter
from dflash_mlx.models.drafter import Drafter
from dflash_mlx.progress import tell
from dflash_mlx.version import __version__

from .finite import is_finite
from .tokenizers import TOKENIZER_FILES
from .write import file_record

_POSITIONS = 48
_HEAD_ROWS = 1024
_PACKAGES = ("mlx", "mlx-lm", "transformers", "gguf", "numpy")

CANNOT_PROVE = (
    "Both sides were read through the same mapping of names, layouts and config, so an error in that mapping would show on "
    "neither. That is what the reference outputs in the project's tests are for."
)


def fixed_ids(vocabulary: int) -> mx.array:
    """[1, 48] int32: the same ids in every run, spread over the vocabulary so that none is a special token."""
    return mx.array([[(17 + 7919 * i) % vocabulary for i in range(_POSITIONS)]], dtype=mx.int32)


def target_logits(load: Callable[[], tuple[nn.Module, int]]) -> mx.array:
    """Logits [48, V] in float32 of the model that `load` returns with its vocabulary size.

    The model is dropped before its graph runs, so that each layer's weights are freed once they are used.
    """
    from mlx_lm.models.cache import make_prompt_cache

    tell("Comparing with the source")
    model, vocabulary = load()
    model.set_dtype(mx.float32)
    # with a cache, as in generation: layers that share keys with earlier ones find them only there
    logits = model(fixed_ids(vocabulary), cache=make_prompt_cache(model))[0]
    del model
    mx.eval(logits)
    return logits


def compare_logits(source: mx.array, written: mx.array) -> dict:
    """How far the written model's logits differ from the source's. Both [48, V] float32.

    Raises:
      ConversionError: one of them has NaN or infinite values, which no comparison would show.
    """
    _require_numbers("logits", source, written)
    p, q = _log_softmax(source), _log_softmax(written)
    kl = mx.sum(mx.exp(p) * (p - q), axis=-1)
    return {
        "positions": _POSITIONS,
        "max_logit_difference": float(mx.abs(source - written).max()),
        "max_logit": float(mx.abs(source).max()),
        "mean_kl_nats": max(0.0, float(kl.mean())),
        "argmax_agreement": float((mx.argmax(source, -1) == mx.argmax(written, -1)).mean()),
        "computed_in": "float32",
    }


def _require_numbers(what: str, source: mx.array, written: mx.array) -> None:
    for whose, value in (("the source", source), ("the converted model", written)):
        if not is_finite(value):
            raise ConversionError(
                f"{whose} gives NaN or infinite {what}; nothing was written",
                "Compare config.json with the original repository's, or convert with other options",
            )


def _log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def drafter_outputs(config: DrafterConfig, weights: dict[str, mx.array], fill: Callable[[Drafter, dict], None]) -> mx.array:
    """Hidden states [K, H] in float32 of one drafter pass over fixed random context features and block.

    Args:
      fill: puts the weights into a fresh drafter (quantizing its layers first where they are quantized).
    """
    drafter = build_drafter(config, {name: value.shape for name, value in weights.items()})
    fill(drafter, weights)
    drafter.set_dtype(mx.float32)
    keys = mx.random.split(mx.random.key(7), 2)
    features = mx.random.normal((1, _POSITIONS, len(config.target_layer_ids) * config.target_hidden_size), key=keys[0])
    # As in a real block: one anchor, then equal mask rows. Both are small, so what the layers add dominates.
    anchor, mask = 0.1 * mx.random.normal((2, 1, 1, config.hidden_size), key=keys[1])
    block = mx.concatenate([anchor, mx.repeat(mask, config.block_size - 1, axis=1)], axis=1)
    hidden = drafter(block, features, drafter.make_cache(), 0)[0]
    mx.eval(hidden)
    return hidden


def compare_drafters(source: mx.array, written: mx.array) -> dict:
    """Difference of hidden states [K, H], and agreement of the ids that a fixed random head would draft from them.

    Raises:
      ConversionError: one of them has NaN or infinite values.
    """
    _require_numbers("hidden states", source, written)
    head = mx.random.normal((_HEAD_ROWS, source.shape[-1]), key=mx.random.key(11))
    ids = [mx.argmax(hidden[1:] @ head.T, axis=-1) for hidden in (source, written)]
    return {
        "context_rows": _POSITIONS,
        "max_hidden_difference": float(mx.abs(source - written).max()),
        "max_hidden": float(mx.abs(source).max()),
        "rms_hidden_difference_share": float(mx.sqrt(mx.square(source - written).mean() / mx.square(source).mean())),
        "drafted_id_agreement": float((ids[0] == ids[1]).mean()),
        "head": f"a fixed random head of {_HEAD_ROWS} rows: a drafter has none of its own",
        # Measured, 5-layer drafter at 4 bits: rms share 0.25, 53 % of ids; on real features 0.08, 78 % and 100 % in slots 1 to 3.
        "inputs": "random context features: they show more difference than a target's own would",
        "computed_in": "float32",
    }


def provenance(checkpoint: Checkpoint) -> dict:
    """Source, revision and the hash of every weight, config and tokenizer file."""
    record = {"path_or_repo": checkpoint.source, "kind": checkpoint.kind}
    if checkpoint.revision:
        record["revision"] = checkpoint.revision
    if (snapshot := snapshot_of(checkpoint.path)) is not None:
        record["commit"] = snapshot.name
    names = list(checkpoint.files)
    if checkpoint.kind != "gguf":
        files = [file for pattern in ("config.json", *TOKENIZER_FILES) for file in sorted(checkpoint.path.glob(pattern))]
        names += dict.fromkeys(file.relative_to(checkpoint.path).as_posix() for file in files if file.is_file())
    record["files"] = {name: file_record(checkpoint.file_path(name)) for name in names}
    if checkpoint.ignored:
        record["ignored_files"] = dict(checkpoint.ignored)
    return record


def versions() -> dict:
    found = {"dflash-mlx": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def number_types(dtypes: Mapping[str, str]) -> dict[str, int]:
    """The number of tensors of each number type."""
    return dict(Counter(dtypes.values()).most_common())


def written_files(directory: Path) -> dict:
    """The hash of every file of a converted directory, except the record itself."""
    files = [file for file in sorted(directory.iterdir()) if file.is_file() and file.name != "conversion.json"]
    return {file.name: file_record(file) for file in files}
