"""From a path, a hub repo or a built-in pair to a loaded target, and to a drafter that is checked and bound to it.

Knows where built-in pairs lie, and what fits in memory. `pair_checks` knows whether a drafter and a target belong together. Knows
nothing of generation.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from . import memory
from .checkpoint import Checkpoint, inspect_checkpoint
from .config import DrafterConfig
from .errors import CheckpointError, ConfigError, PairError, TapError, one_line
from .machine import limit_bytes, machine_bytes, on_metal, size_text
from .memory import Needs, RunSize, cache_bytes, check_weights, entries_after_rows, model_bytes, trial_bytes
from .models.architectures import ARCHITECTURES, build_drafter, not_computed
from .models.drafter import Drafter
from .models.head_scale import finish_head
from .models.target import Target
from .pair import DFlashPair
from .pair_checks import check_finite, check_own_head, check_pair, mask_row_fault, with_last_tap
from .pairs.builtin import builtin_path
from .pairs.published import stated_thinking
from .progress import tell
from .ranks import Ranks
from .shares import check_files, ranks_of, take_share
from .traced import prepare
from .weight_layout import lay_out

_log = logging.getLogger("dflash_mlx.loading")
# Progress is shown each time this many bytes of weights are read.
_TOLD_BYTES = 64 << 20

DRAFT_BITS = (4, 8)
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def loaded_dtype(checkpoint: Checkpoint, dtype: mx.Dtype | str | None) -> mx.Dtype | None:
    """What `load` casts a checkpoint's float weights to. None: each keeps the type that it has in the files.

    Args:
      dtype: an MLX type or its name; "auto": the files' types; None: float32 on a CPU, the files' types on a GPU.
    """
    if dtype is None and mx.default_device() == mx.cpu:
        return mx.float32
    if dtype is None or dtype == "auto":
        return _gguf_dtype(checkpoint) if checkpoint.kind == "gguf" else None
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)} or auto", "Leave it out for the default")
    return found


def _gguf_dtype(checkpoint: Checkpoint) -> mx.Dtype:
    """The type of most floats among a GGUF file's matrices. Blocks have none that MLX computes in: bfloat16. Its vectors are
    always float32, which would have everything computed in float32."""
    sizes = Counter()
    for tensor in checkpoint.tensors.values():
        if len(tensor.shape) > 1:
            sizes[_GGUF_TYPES.get(tensor.dtype, mx.bfloat16)] += math.prod(tensor.shape)
    return max(sizes, key=sizes.get, default=mx.bfloat16)


_GGUF_TYPES = {"F32": mx.float32, "F16": mx.float16}


def activation_dtype(model: nn.Module) -> mx.Dtype:
    """The type in which a target computes: that of its first layer's output. Nothing is evaluated."""
    return Target(model, (0,))(mx.zeros((1, 1), dtype=mx.int32)).features.dtype


def _two_types(model: nn.Module) -> str | None:
    """What it costs that the matrices of a model have two number types, as other tools leave them; None if it costs nothing."""
    kinds = {value.dtype for _, value in tree_flatten(model.parameters()) if value.ndim > 1 and value.dtype in DTYPES.values()}
    try:
        if len(kinds) < 2 or activation_dtype(model) != mx.float32:
            return None
    except TapError:
        # It runs without a drafter all the same.
        return None
    names = " and ".join(name for name, kind in sorted(DTYPES.items()) if kind in kinds)
    return (
        f"has matrices or scales in {names}, so everything is computed in float32. --dtype bfloat16 (in Python dtype='bfloat16') "
        "gives all of them one type, which is faster and rounds some"
    )


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    dtype: mx.Dtype | str | None = None,
    ranks: Ranks | None = None,
    pipeline: bool = False,
) -> tuple[nn.Module, Any] | tuple[nn.Module, Any, dict[str, Any]]:
    """Load a target and its tokenizer, as `mlx_lm.load`.

    Args:
      path_or_hf_repo: a directory (saved by transformers 4 or 5, mlx-lm or `convert`), a GGUF file, a hub repo, or the name
        of a built-in pair.
      dtype: type of the float weights (of quantized layers: scales and biases) that the family's `cast_predicate` lets be
        cast. "auto": every weight keeps the type of its file, as in mlx_lm.load. None: "auto" on a GPU, float32 on a CPU.
      adapter_path: the directory of what mlx-lm trained for this model; it is put over it. Taps see the adapted model.
      ranks, pipeline: hold this rank's share alone, or with pipeline its layers.
      The others are mlx-lm's; `model_config`, which changes what a checkpoint says of itself, is refused.
    Returns: the mlx-lm model and its TokenizerWrapper, and the config with `return_config`.
    """
    from .conversion import load_tokenizer
    from .conversion.targets import read_target

    if model_config:
        raise ConfigError(
            f"model_config is {model_config!r}; a checkpoint's own config is used", "Change config.json in a copy instead"
        )
    path, checkpoint = _find(path_or_hf_repo, "target", revision)
    due = loaded_dtype(checkpoint, dtype)
    check_memory(checkpoint, due, 1 if ranks is None else ranks.size)
    if ranks is not None:
        check_files(checkpoint, ranks)
    loaded = read_target(checkpoint)
    model, config = loaded.model, loaded.config
    keep_positions(model, config)
    # Without a word everything is float32 on a CPU; a type that was asked for spares what the family's class keeps.
    loaded.cast(due, spare=dtype is not None)
    if adapter_path is not None:
        _put_adapter(model, adapter_path, path_or_hf_repo)
        # The adapter's own weights; layers that it wraps have other names now and must be cast before.
        loaded.cast(due, spare=dtype is not None)
    if due is None and (said := _two_types(model)):
        warnings.warn(f"{checkpoint.source} {said}", stacklevel=2)
    if ranks is not None:
        take_share(model, ranks, path_or_hf_repo, pipeline)
    if not lazy:
        check_weights(checkpoint.source, model_bytes(model))
        read_weights(model, f"Loading {path_or_hf_repo}")
    tokenizer = load_tokenizer(path, revision=revision, trust_remote_code=trust_remote_code, tokenizer_config=tokenizer_config)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def _put_adapter(model: nn.Module, adapter_path: str, name: str) -> None:
    """Put what mlx-lm trained for a model over it, by mlx-lm's own loader.

    Raises:
      CheckpointError: it is not mlx-lm's, or was trained for another model.
    """
    from mlx_lm.utils import load_adapters

    folder = Path(adapter_path).expanduser()
    try:
        load_adapters(model, str(folder))
    except FileNotFoundError as error:
        found = f"{error.filename} is not there" if error.filename else "there is no such directory"
        if (folder / "adapter_model.safetensors").exists():
            found = "its files are those of PEFT"
        raise CheckpointError(
            f"the adapter {adapter_path} cannot be read: {found}", "Give the directory that mlx_lm.lora wrote"
        ) from None
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the adapter {adapter_path} does not fit {name}: {one_line(error, 300)}",
            "Give the one that mlx_lm.lora trained for this model",
        ) from None
    model.eval()


def read_weights(module: nn.Module, what: str) -> None:
    """Evaluate a module's parameters, which loading leaves lazy, and lay them out for this machine; tells how far it is."""
    # A share is cut from whole tensors: of those no more than one is held at a time.
    step = 0 if ranks_of(module) else _TOLD_BYTES
    _evaluate([array for _, array in tree_flatten(module.parameters())], what, step)
    lay_out(module)


def _evaluate(arrays: list[mx.array], what: str, step: int) -> None:
    total, read, told = sum(array.nbytes for array in arrays), 0, 0
    part: list[mx.array] = []
    for array in arrays:
        part.append(array)
        read += array.nbytes
        if read - told >= step:
            mx.eval(part)
            part, told = [], read
            tell(what, read, total, "bytes")
    mx.eval(part)


def _find(name: str, part: str, revision: str | None) -> tuple[Any, Checkpoint]:
    """-> (path or hub repository of a name, its checkpoint); warns of files beside the weights that are not read."""
    path = builtin_path(str(name), part) or name
    checkpoint = inspect_checkpoint(path, revision=revision)
    warn_of_unread(checkpoint)
    return path, checkpoint


def warn_of_unread(checkpoint: Checkpoint) -> None:
    """One warning that names the files of a checkpoint that may hold weights and are not read."""
    if checkpoint.ignored:
        files = ", ".join(f"{name} ({reason})" for name, reason in checkpoint.ignored.items())
        warnings.warn(f"not read in {checkpoint.source}: {files}", stacklevel=4)


def keep_positions(model: nn.Module, config: dict[str, Any]) -> None:
    """Leave the config's number of positions on a model whose class does not keep it (gpt_oss): `Target.context_length`."""
    text = config.get("text_config") or config
    args, length = getattr(model, "args", None), text.get("max_position_embeddings")
    try:
        if args is not None and isinstance(length, int) and Target(model).context_length is None:
            args.max_position_embeddings = length
    except TapError:
        # It runs without a drafter all the same.
        return


# Bytes of a float in a file, and where they stay as they are: fp8 becomes bfloat16.
_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 2}


def weight_bytes(checkpoint: Checkpoint, dtype: mx.Dtype | None) -> int:
    """Bytes of a target's weights once loaded, from the files' headers alone: of packed ones, as they are packed.

    Args:
      dtype: what float tensors are cast to; None: they keep their types.
    """
    sizes = {name: dtype.size if dtype else own for name, own in _FLOAT_BYTES.items()}
    return sum(math.prod(t.shape) * sizes[t.dtype] if t.dtype in sizes else t.nbytes for t in checkpoint.tensors.values())


def check_memory(checkpoint: Checkpoint, dtype: mx.Dtype | None, shares: int = 1) -> None:
    """Refuse a target that is larger than this machine's memory, before anything of it is read; `load` then compares exactly.

    A GGUF file's tensors are read as the model is built, so it must fit where models may be.

    Args:
      dtype: as in `weight_bytes`. shares: machines that hold it together.
    Raises:
      CheckpointError: it does not fit.
    """
    limit = limit_bytes() if checkpoint.kind == "gguf" else machine_bytes()
    check_weights(checkpoint.source, weight_bytes(checkpoint, dtype) // shares, limit=limit)


def drafter_bytes(weights: Mapping[str, mx.array], dtype: mx.Dtype | None, bits: int | None) -> int:
    """Bytes of a drafter's tensors once it is loaded; nothing is evaluated.

    Args:
      weights: by bare name, as `read_drafter` gives them; dtype: the target's activation type, None: the files'; bits: as of
        `held_bits`.
    """
    from .conversion.drafters import group_for, is_matrix

    total = 0.0
    for name, value in weights.items():
        each = dtype.size if dtype and mx.issubdtype(value.dtype, mx.floating) else value.itemsize
        if bits and is_matrix(name, value.shape) and (group := group_for(value.shape[-1])):
            # A scale and a bias for each group.
            each = bits / 8 + 2 * each / group
        total += value.size * each
    return int(total)


def check_run(
    model: nn.Module, draft_model: str | None, run: RunSize, *, revision: str | None = None, bits: int | str | None = None
) -> None:
    """Compare what a pair and a run with it need with what models may take here, before any weight is read.

    Args:
      model: what `load` returned with lazy=True; draft_model, revision, bits: as in `load_drafter`; None: there is no drafter.
    Raises:
      CheckpointError: both models do not fit; names what would. A warning, where the run may not.
    """
    from .conversion.drafters import read_drafter

    drafter, own, smaller, dtype = None, 0, None, activation_dtype(model)
    if draft_model is not None:
        checkpoint = inspect_checkpoint(builtin_path(str(draft_model), "drafter") or draft_model, revision=revision)
        read = read_drafter(checkpoint)
        _check_architecture(read.config)
        held = held_bits(read.weights, checkpoint.source, bits)
        own = drafter_bytes(read.weights, dtype, held)
        smaller = _smaller(read.weights, dtype, held, own)
        drafter = build_drafter(read.config, {name: value.shape for name, value in read.weights.items()})
        drafter.set_dtype(dtype)
    entries: dict[tuple[bool, int | None], list[Any]] = {}

    def caches(run: RunSize, with_drafter: bool) -> int:
        key = with_drafter, run.max_kv_size
        if key not in entries:
            entries[key] = entries_after_rows(model, drafter if with_drafter else None, run.max_kv_size)
        return cache_bytes(entries[key], run)

    may_window = not hasattr(model, "make_cache")
    memory.check_run(Needs(model_bytes(model), own, smaller, trial_bytes(model), caches, may_window), run)


def _smaller(weights: Mapping[str, mx.array], dtype: mx.Dtype, held: int | None, own: int) -> int | None:
    """Bytes of a drafter in 4 bits where it takes more; None: its files are quantized, or it is to be held so."""
    if held == DRAFT_BITS[0] or any(name.endswith(".scales") for name in weights):
        return None
    least = drafter_bytes(weights, dtype, DRAFT_BITS[0])
    return least if least < own else None


def held_bits(names: Iterable[str], source: str, bits: int | str | None) -> int | None:
    """In how many bits the matrices of a drafter are to be held; None: as its files have them.

    Args:
      names: of its tensors; source: what the user called it.
      bits: 4 or 8 (also as text), if the files hold floats; "none": never quantize; None: 4 on Metal, else "none".
    Raises:
      ConfigError: another value, or bits for a drafter whose files are quantized already.
    """
    quantized = any(name.endswith(".scales") for name in names)
    if bits is None:
        return DRAFT_BITS[0] if on_metal() and not quantized else None
    if bits == "none":
        return None
    if str(bits) not in map(str, DRAFT_BITS) or isinstance(bits, bool):
        raise ConfigError(f"a drafter's bits are {bits!r}; they must be 4, 8 or none", "Leave them out for the default")
    if quantized:
        raise ConfigError(
            f"the drafter cannot be quantized to {bits} bits: {source} is quantized already",
            "Leave the bits out, or use the float drafter that it was made from",
        )
    return int(bits)


def load_drafter(
    path_or_hf_repo: str,
    model: nn.Module,
    *,
    revision: str | None = None,
    bits: int | str | None = None,
    last_tap: str | None = None,
) -> Drafter:
    """Load a drafter, check that it belongs to `model`, and let it borrow that target's embedding and head.

    Args:
      path_or_hf_repo: a directory, a hub repo, or the name of a built-in pair.
      model: what `load` returned. The drafter runs in its activation type.
      bits: 4 or 8: quantize a float drafter's matrices to that; "none": keep them as they are. None: 4 on Metal, with one line in
        the log, and "none" elsewhere. A drafter whose files are quantized stays as it is.
      last_tap: where a tap of the target's last layer is taken, "before" or "after" the final norm. None: as whoever packed the
        drafter takes it.
    Raises:
      ConfigError, CheckpointError: the drafter's config or tensors; every fault in one message.
      PairError: hidden size, taps, mask row or layer count contradict the target; all of them in one message.
    """
    from .conversion.drafters import hold_in_bits, read_drafter

    if not isinstance(path_or_hf_repo, (str, Path, NoneType)) or not isinstance(model, (nn.Module, NoneType)):
        found = f"{type(path_or_hf_repo).__name__} and {type(model).__name__}"
        raise PairError(
            f"load_drafter was given {found}; it takes the drafter's name and the target",
            "Write: model, tokenizer = load(...), then drafter = load_drafter(name, model)",
        )
    _, checkpoint = _find(path_or_hf_repo, "drafter", revision)
    read = read_drafter(checkpoint)
    if last_tap is not None:
        read.config = with_last_tap(read.config, last_tap, len(Target(model).layers))
    prepare(model, read.config.windows)
    held = held_bits(read.weights, checkpoint.source, bits)
    dtype = activation_dtype(model)
    own, floats = drafter_bytes(read.weights, dtype, held), drafter_bytes(read.weights, dtype, None)
    check_weights(checkpoint.source, own, model_bytes(model), _smaller(read.weights, dtype, held, own))
    left_float = hold_in_bits(read, held) if held else []
    if held and (bits is None or left_float):
        _log.warning("%s", _held_sentence(held, own, floats, left_float))
    drafter = make_drafter(read.config, read.weights, model)
    drafter.digest = checkpoint.digest
    drafter.stated_thinking = stated_thinking(str(path_or_hf_repo), checkpoint.path, read.raw)
    DFlashPair.of(drafter)
    return drafter


def _held_sentence(bits: int, own: int, floats: int, left_float: list[str]) -> str:
    """What was done to a float drafter, which takes `own` bytes instead of `floats`, and how to have it otherwise."""
    layers = sorted({re.sub(r"\d+", "*", name.removesuffix(".weight")) for name in left_float})
    named = f"{', '.join(layers)} stay float, because no group size divides their inputs"
    if own == floats:
        return f"the drafter cannot be held in {bits} bits: {named}"
    return (
        f"the drafter is held in {bits} bits: {size_text(own)} instead of {size_text(floats)}{'; ' + named if layers else ''} "
        "(--draft-bits none, or bits='none', leaves it as it is)"
    )


def _check_architecture(config: DrafterConfig) -> None:
    if what := not_computed(config):
        known = ", ".join(name for name in ARCHITECTURES if name)
        raise ConfigError(
            f"the drafter has {', '.join(what)}, which this version does not run; it runs {known} without extensions",
            "Use another drafter for this target",
        )


def make_drafter(config: DrafterConfig, weights: dict[str, mx.array], model: nn.Module) -> Drafter:
    """Build a drafter from its config and bare-named tensors, and bind it to a target; faults as in `load_drafter`."""
    from .conversion import quantize_to_match
    from .conversion.drafters import is_target_copy

    _check_architecture(config)
    weights = {name: value for name, value in weights.items() if not is_target_copy(name)}
    target = Target(model)
    drafter = build_drafter(config, {name: value.shape for name, value in weights.items()})
    check_pair(config, target, drafter)
    quantize_to_match(drafter, weights, {"quantization": config.quantization}, "the drafter")
    expected = {name: value.shape for name, value in _flat(drafter)}
    faults = [f"missing {name}" for name in expected if name not in weights]
    faults += [f"unexpected {name}" for name in weights if name not in expected]
    faults += [
        f"{name} is {list(weights[name].shape)}, the config says {list(shape)}"
        for name, shape in expected.items()
        if name in weights and weights[name].shape != shape
    ]
    if config.mask_embedding and "mask_embedding" not in weights:
        faults.append("missing mask_embedding, which the config says the drafter has")
    if config.draft_vocab_size and ("lm_head" in drafter or config.draft_vocab_size != config.vocab_size):
        rows = drafter.lm_head.weight.shape[0] if "lm_head" in drafter else 0
        if rows != config.draft_vocab_size:
            faults.append(f"lm_head.weight has {rows} rows, draft_vocab_size says {config.draft_vocab_size}")
        if "d2t" not in drafter and config.draft_vocab_size != config.vocab_size:
            faults.append("missing d2t, the map from the reduced vocabulary to the target's")
    elif "d2t" in drafter and not config.draft_vocab_size:
        faults.append("d2t maps a reduced vocabulary, and the config has no draft_vocab_size")
    if faults:
        raise CheckpointError(
            f"the drafter's tensors are not those that its config describes: {'; '.join(faults)}",
            "Use the config that came with the weights, or download both again",
        )
    if "d2t" in drafter:
        weights["d2t"] = weights["d2t"].astype(mx.int32)
    drafter.load_weights(list(weights.items()))
    drafter.set_dtype(activation_dtype(model))
    drafter.eval()
    read_weights(drafter, "Loading the drafter")
    if "lm_head" in drafter:
        check_own_head(drafter, target)
    head = finish_head(config, target.head, target.matrix, target.family) if "lm_head" not in drafter else target.head
    drafter.bind(_scaled_embedding(config, target), head, model)
    check_finite(drafter, model)
    if fault := mask_row_fault(drafter):
        warnings.warn(fault, stacklevel=3)
    return drafter


def _scaled_embedding(config: DrafterConfig, target: Target) -> Callable[[mx.array], mx.array]:
    """The target's embedding times the config's scale, unless the target's own code has that scale in it (Gemma).

    Raises:
      PairError: the target scales its embedding by another number.
    """
    scale = config.input_embedding_scale or 1.0
    if scale == 1.0:
        return target.embed
    ids = mx.array([[1, 2, 3]])
    given, rows = target.embed(ids).astype(mx.float32), target.embedding(ids).astype(mx.float32)
    ratio = (mx.abs(given).mean() / mx.abs(rows).mean()).item()
    # Within the rounding of a scale kept in bfloat16.
    if abs(ratio / scale - 1) < 0.02:
        return target.embed
    if abs(ratio - 1) < 0.02:
        return lambda ids: target.embed(ids) * scale
    raise PairError(
        f"{target.family} scales its embedding by {ratio:.3g}; the drafter's input_embedding_scale says {scale:g}",
        "Use the drafter trained for this target",
    )


def _flat(module: nn.Module) -> list[tuple[str, mx.array]]:
    return tree_flatten(module.parameters())
