"""The memory that a run needs, computed before any weight is read: models, caches for a context, trials of kernels.

Sizes come from the shapes of lazy arrays: weights that are not read yet, and what a pass over a few rows would put into a model's
own caches, of any kind. Knows no files. `machine.limit_bytes` says how much a machine has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.models.cache import ArraysCache, KVCache
from mlx_lm.models.cache import make_prompt_cache as make_target_cache

from .errors import CheckpointError
from .kernels import autotune
from .kernels.block_qmm import TRIAL_BYTES, TRIAL_COLUMNS
from .machine import array_bytes, limit_bytes, limit_text, machine_bytes, on_metal, size_text
from .models.drafter import Drafter
from .rollback import leaves

# Rows of the pass that shows what an entry takes; and of one step of a prompt, which a window holds besides its own rows.
_ROWS = 8
_PREFILL_ROWS = 2048
# Above this share of the limit a run can be slow.
_TIGHT = 0.9
# What a GPU holds cannot be swapped out, and macOS and its programs need memory too. An estimate, not measured.
_SYSTEM_BYTES = 4 << 30
# Smaller contexts than this are not worth a message.
_LEAST_TOKENS = 256


@dataclass(frozen=True)
class RunSize:
    """The size of a run, as far as it decides how large caches become.

    - tokens: rows at its end, prompt and answer
    - max_kv_size, kv_bits, kv_group_size, quantized_kv_start: as in `stream_generate`
    """

    tokens: int
    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int | None = None
    quantized_kv_start: int | None = None

    @classmethod
    def of(cls, tokens: int, options: Mapping[str, Any]) -> RunSize:
        """A run with these options. Only those that limit the length of caches matter."""
        return cls(tokens, **{field.name: options[field.name] for field in fields(cls) if field.name in options})


def model_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters; nothing is evaluated."""
    return array_bytes(a for _, a in tree_flatten(model.parameters()))


def entries_after_rows(model: nn.Module, drafter: Drafter | None = None, max_kv_size: int | None = None) -> list[Any]:
    """The entries of both models' caches after a few rows; nothing is evaluated, so the weights may be unread ones."""
    cache = make_target_cache(model, max_kv_size)
    model(mx.zeros((1, _ROWS), dtype=mx.int32), cache=cache)
    own: list[Any] = []
    if drafter is not None:
        own, width = drafter.make_cache(), len(drafter.config.target_layer_ids) * drafter.config.target_hidden_size
        drafter.inject(mx.zeros((1, _ROWS, width), dtype=drafter.norm.weight.dtype), own, 0)
    return [*leaves(cache), *leaves(own)]


def cache_bytes(entries: Sequence[Any], run: RunSize) -> int:
    """Bytes of these entries at the end of a run.

    A recurrent state counts twice: a round keeps the old one until it knows what was accepted. A window holds the rows of one
    step of the prompt besides its own.
    """
    total = 0.0
    for entry in entries:
        if isinstance(entry, ArraysCache):
            total += 2 * entry.nbytes
            continue
        if entry.keys is None:
            # The model does not use it.
            continue
        keys = entry.keys if isinstance(entry.keys, mx.array) else entry.keys[0]
        a_row, rows = entry.nbytes / keys.shape[-2], run.tokens
        most = getattr(entry, "max_size", None) or getattr(entry, "chunk_size", None)
        if most is not None:
            rows = min(rows, most + _PREFILL_ROWS)
        start = DEFAULT_QUANTIZED_KV_START if run.quantized_kv_start is None else run.quantized_kv_start
        if run.kv_bits and type(entry) is KVCache and rows > start:
            size = keys.dtype.size
            quantized = a_row * (run.kv_bits / 8 + 2 * size / (run.kv_group_size or 64)) / size
            total += max(rows * quantized, start * a_row)
        else:
            total += rows * a_row
    return int(total)


def trial_bytes(*models: nn.Module) -> int:
    """The most that one kernel's trial makes for itself: one made-up matrix in floats, and quantized copies of it."""
    if not autotune.may_run():
        return 0
    most = 0
    for model in models:
        for _, module in model.named_modules():
            if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
                rows, scales = module.scales.shape[0], module.scales.shape[1]
                inputs, floats = scales * module.group_size, module.scales.dtype.size
                a_row = inputs * (floats + module.bits / 8) + 2 * scales * floats
                most = max(most, int(min(rows, TRIAL_COLUMNS) * a_row) + TRIAL_BYTES)
    return most


@dataclass(frozen=True)
class Needs:
    """Bytes of a run by part.

    - target, drafter (0: there is none), trials
    - drafter_in_4_bits: the drafter's bytes in 4 bits, if it could be quantized and will not be
    - caches: of (run, whether there is a drafter)
    - may_window: whether --max-kv-size has an effect on this target
    """

    target: int
    drafter: int
    drafter_in_4_bits: int | None
    trials: int
    caches: Callable[[RunSize, bool], int]
    may_window: bool

    def total(self, run: RunSize, drafter: int | None = None) -> int:
        """Bytes of everything. drafter: bytes of the drafter, None for the pair's own."""
        held = self.drafter if drafter is None else drafter
        return self.target + held + self.trials + self.caches(run, held > 0)

    def text(self, run: RunSize) -> str:
        parts = [f"target {size_text(self.target)}"]
        parts += [f"drafter {size_text(self.drafter)}"] if self.drafter else []
        parts += [f"caches at {run.tokens} tokens {size_text(self.caches(run, self.drafter > 0))}"]
        parts += [f"trials of kernels {size_text(self.trials)}"] if self.trials else []
        return f"{', '.join(parts)}: {size_text(self.total(run))} in all, and {limit_text()}"

    def fitting(self, run: RunSize, limit: int) -> list[str]:
        """Ways to fit this pair into `limit` bytes, in words, the smallest change first."""
        found, drafter, prefix = [], None, ""
        if self.drafter_in_4_bits is not None:
            if (needed := self.total(run, self.drafter_in_4_bits)) <= limit:
                found.append(f"--draft-bits 4 ({size_text(needed)})")
            else:
                drafter, prefix = self.drafter_in_4_bits, "--draft-bits 4 and "
        if tokens := _most(lambda n: self.total(replace(run, tokens=n), drafter) <= limit, run.tokens):
            found.append(f"{prefix}a context of {tokens} tokens (a shorter prompt, a smaller --max-tokens)")
        if self.may_window and run.max_kv_size is None:
            if rows := _most(lambda n: self.total(replace(run, max_kv_size=n), drafter) <= limit, run.tokens):
                found.append(f"{prefix}--max-kv-size {rows}")
        if self.drafter and (needed := self.total(run, 0)) <= limit:
            found.append(f"--draft-model none ({size_text(needed)})")
        return found


def _most(fits: Callable[[int], bool], below: int) -> int:
    """The largest multiple of 256 below a number that fits; 0: none. What fits at a number does at every smaller one."""
    low, high = 0, (below - 1) // _LEAST_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * _LEAST_TOKENS) else (low, middle - 1)
    return low * _LEAST_TOKENS


def check_run(needs: Needs, run: RunSize) -> None:
    """Compare what a run needs with the memory that models may take here.

    Raises:
      CheckpointError: the models alone do not fit. If everything together does not fit, or only just, it is a warning.
    """
    limit, total = limit_bytes(), needs.total(run)
    if total <= _TIGHT * limit:
        return
    if total <= limit:
        warnings.warn(f"{needs.text(run)}: this can be slow", stacklevel=3)
        return
    fitting = needs.fitting(run, limit)
    remedy = f"What would fit: {'; or '.join(fitting)}" if fitting else "Use a smaller target, or one in fewer bits"
    remedy += _raise_the_limit(total)
    if needs.target + needs.drafter > limit:
        raise CheckpointError(f"the pair does not fit: {needs.text(run)}", remedy)
    warnings.warn(f"the run may not fit to its end: {needs.text(run)}. {remedy}", stacklevel=3)


def check_weights(source: str, own: int, held: int = 0, smaller: int | None = None, limit: int | None = None) -> None:
    """Compare one model's weights with what models may take here.

    Args:
      source: what the user called it; own: their bytes; held: bytes of what is loaded already, for a drafter its target.
      smaller: bytes of a drafter's weights in 4 bits, where it could be held so and is not to be.
      limit: what they are compared with; None: `limit_bytes`, and a warning where they hardly fit.
    Raises:
      CheckpointError: they do not fit.
    """
    hardly, limit, needed = limit is None, limit or limit_bytes(), own + held
    beside = f" beside the target's {held / 1e9:.1f} GB" if held else ""
    sizes = f"the weights of {source} take {own / 1e9:.1f} GB{beside} and {limit_text()}"
    if needed > limit:
        remedy = "Use a 4-bit conversion of it (such as mlx-community has), or a smaller model"
        if smaller is not None and smaller + held <= limit:
            remedy = f"Hold it in 4 bits (--draft-bits 4, bits=4): {smaller / 1e9:.1f} GB"
        raise CheckpointError(f"the model does not fit: {sizes}", remedy + _raise_the_limit(needed))
    if hardly and needed > _TIGHT * limit:
        warnings.warn(f"{sizes}: this can be slow", stacklevel=3)


def _raise_the_limit(needed: int) -> str:
    """How to let a Mac's GPU hold more, if the Mac has more memory and enough is left for macOS."""
    if not on_metal() or needed > min(_TIGHT * machine_bytes(), machine_bytes() - _SYSTEM_BYTES):
        return ""
    # mlx-lm's README names this setting; macOS 15 or later.
    return f". Or let the GPU hold more, until the next start: sudo sysctl iogpu.wired_limit_mb={int(needed * 1.05 / 2**20) + 1}"
