"""Exact runs: ids and log-probabilities do not depend on drafts, on the block size, or on whether there is a drafter.

Every pass of up to 16 rows takes routes that give a row the same bits alone and among others (`kernels.exact_routes`). A run
without a drafter uses the same loop. MLX's own operations read a prompt in chunks of `step` tokens, which begin at multiples of
the step from the start of the text; the rows after the last whole chunk are read in passes of up to 16.

    prompt             |---- step ----|---- step ----|- 16 -|- 16 -|- 9 -| a
    a row's bits       depend on its whole chunk      depend on no other row of the pass

Options that cannot be honoured are refused here by name. Before a pair's first exact answer its passes are compared
(`row_differences`): a target that is not row-equal is refused. On a CPU in float32 MLX's own operations mostly are row-equal, and
then nothing is routed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as make_target_cache

from .draft_length.policy import DraftLengthPolicy, FixedDraftLength
from .errors import CacheError, GenerationError
from .kernels import autotune
from .kernels.block_qmm import MAX_ROWS
from .kernels.exact_routes import ExactRoutes
from .models.drafter import Drafter
from .models.intercept import own_class
from .models.recurrent import StatefulModules
from .models.target import Target, TargetOutput
from .options import RunOptions
from .pair import DFlashPair
from .progress import tell
from .prompt_cache import UNKNOWN, PairCache, is_pair_cache, trim_prompt_cache
from .rollback import leaves, masks_by_row
from .row_differences import ROWS, first_difference
from .traced import accelerate

# Rows of a whole chunk. Those after the last border, this many at most, take passes of 16 rows.
STEP = 512
# Rows that are compared before the first answer where nothing is routed; rows of text before those that doctor compares: more
# than a chunk of attention.
_FEW_ROWS, _LONG = (4, 16), 272


class ExactTarget(Target):
    """A target whose passes of up to 16 rows give each row the bits that it would get alone.

    routed: False: MLX's own operations serve everything.
    """

    def __init__(self, model: nn.Module, layer_ids: Any = (), routed: bool = True):
        super().__init__(model, layer_ids)
        self.routed = routed
        if routed:
            self.routes = ExactRoutes(model, own_class)
            self.states = StatefulModules(model, self.family, self.routes)

    def clone(self) -> ExactTarget:
        """Another one like it, for a comparison that watches every call."""
        return ExactTarget(self.model, self.layer_ids, self.routed)

    def __call__(
        self, ids: mx.array, cache: Any = None, point: Any = None, kernels: bool = False, eager: bool = False
    ) -> TargetOutput:
        if ids.size > MAX_ROWS:
            return super().__call__(ids, cache, point)
        with masks_by_row(cache or ()):
            return super().__call__(ids, cache, point, kernels=True, eager=eager)

    def prefill_chunk(self, at: int, step: int | None, left: int) -> int:
        step = step or STEP
        to_border = step - at % step
        return step if to_border == step <= left else min(to_border, left, MAX_ROWS)

    def check(self, flag: list[int], compiled: bool = False) -> None:
        """Raises: GenerationError if a value is not finite. Only a compiled pass runs again, by the same operations."""
        try:
            super().check(flag, compiled)
        except autotune.NotFiniteError:
            if compiled:
                raise
            raise GenerationError(
                f"a pass of {self.family} gave a value that is not finite, and exact has one way to compute it",
                "Run without exact",
            ) from None


def may_be_row_equal(model: nn.Module) -> bool:
    """Whether MLX's own operations may be row-equal for this model: on a CPU, where all that is not packed is float32.

    Not with a sliding window: once its ring has wrapped, one row and several see the keys in different orders.
    """
    if any(isinstance(entry, RotatingKVCache) for entry in leaves(make_target_cache(model))):
        return False
    floats = {a.dtype for _, a in tree_flatten(model.parameters()) if mx.issubdtype(a.dtype, mx.floating)}
    return mx.default_device() == mx.Device(mx.cpu) and not autotune.has_gpu() and floats <= {mx.float32}


class ExactPair(DFlashPair):
    """A pair whose runs are exact. Its passes have costs and a history of their own."""

    target_class = ExactTarget

    def __init__(self, model: nn.Module, drafter: Any):
        super().__init__(model, drafter)
        self._proved: Target | None = None

    def prepare_target(self) -> Target:
        """The target for one run, compared with itself row by row before the first.

        Raises:
          GenerationError, KernelError: it cannot be served exactly; names what differs.
        """
        if autotune.has_gpu() and autotune.setting() == "off":
            raise GenerationError(f"{autotune.VARIABLE} is 'off' and exact needs our kernels on a GPU", "Unset it")
        with self._lock:
            self._renew()
            if self._proved is not self.target:
                self.target = prove(self.target)
                self._proved = self.target
            beside = self.drafter.pair.accelerator
            self.accelerator = self.target.accelerator = accelerate(self, beside) if self.target.routed else None
            return self.target

    def prepare_cache(self, cache: PairCache, options: RunOptions) -> PairCache:
        """The cache, cut back to the rows that reading the whole text from its start would also give.

        A border is a multiple of the step; rows before the last border of a text belong to whole chunks. If the text now reaches
        over another border, or the cache was cut inside a chunk, the rows after the border before that are read again.

            read      |---- chunk ----|---- chunk ----|- 16 -|        whole: the second border
            cut                             ^                         good up to the first: its chunk lacks the other rows

        Raises:
          CacheError: the cache does not say which tokens those are.
        """
        step = options.prefill_step_size or STEP
        border = (len(cache.ids) + len(options.prompt_ids) - 1) // step * step
        held_step, whole = getattr(cache.entries[-1], "exact", None) or (None, None)
        # How many of its rows are good: none if another kind of run wrote them.
        good = 0 if held_step != step else cache.rows if border == whole <= cache.rows else min(cache.rows, border, whole)
        if good < border:
            good -= good % step
        if good < cache.rows:
            cache = self._cut(cache, good)
        cache.exact = step, border
        return cache

    def _cut(self, cache: PairCache, rows: int) -> PairCache:
        ids = cache.ids
        if UNKNOWN in ids:
            raise CacheError("the prompt cache was filled by mlx-lm and exact cannot read its tokens again", "Start a new one")
        entries = cache.entries
        if not rows or not trim_prompt_cache(entries, len(ids) - rows):
            rows, entries[:] = 0, PairCache.make(make_target_cache(self.model), self.drafter.make_cache())
        found = PairCache.read(entries)
        for entry in leaves(found.target):
            if type(entry) is KVCache and entry.keys is not None:
                # Without spare room at the end: a chunk then has the same buffers and strides as in a first reading.
                entry.keys, entry.values = entry.keys[:, :, :rows], entry.values[:, :, :rows]
        found.ids = ids
        found.write()
        return found


class NoDrafter(nn.Module):
    """Takes the place of a drafter in a run without one: it gets no features and is asked for no drafts."""

    stated_thinking = None

    def __init__(self, model: nn.Module):
        super().__init__()
        config = SimpleNamespace(block_size=1, max_position_embeddings=None, taps=lambda layers: ())
        # Not items of the module: they are no parameters.
        vars(self).update(config=config, target=model, layers=[None], pair=None)

    def make_cache(self) -> list[Any]:
        """One entry that stays empty, for the drafter's part of a prompt cache."""
        return [KVCache()]

    def inject(self, features: mx.array, cache: list[Any], start: int) -> None:
        """Nothing: there are no features."""


class ExactAlone(ExactPair):
    """A target without a drafter: the loop's own plain rounds, one row a pass."""

    def __init__(self, model: nn.Module):
        # A pair does not hold its drafter, which holds the pair.
        self._nobody = NoDrafter(model)
        super().__init__(model, self._nobody)
        object.__setattr__(self._nobody, "pair", self)

    def draft_length_policy(self, stream: Any) -> DraftLengthPolicy | FixedDraftLength:
        return FixedDraftLength(0)

    def open_cache(self, entries: list[Any] | None, max_kv_size: int | None = None) -> PairCache:
        """The target's part of a prompt cache, with or without a drafter's. From here on the cache is the target's alone."""
        if entries and is_pair_cache(entries):
            held = PairCache.read(entries)
            own = [*held.target, *self._nobody.make_cache(), ArraysCache(3)]
            PairCache(own, held.n_target, held.ids, held.rows, None).write()
            own[-1].exact, entries = getattr(entries[-1], "exact", None), own
        elif entries and not all(entry.empty() for entry in entries):
            raise CacheError("the prompt cache was filled by mlx-lm, whose rows are not exact", "Start a new one")
        return super().open_cache(entries, max_kv_size)


def exact_pair(options: RunOptions) -> ExactPair:
    """The exact pair of a run's models, made once; a run without a drafter gets one that drafts nothing.

    Raises:
      GenerationError, CacheError, PairError: an option that cannot be honoured exactly; names it.
    """
    check_exact(options)
    if options.draft_model is not None:
        check_block(options.check_drafter(), options.block_size)
        return _pair_of(options.model, options.draft_model)
    options.check_plain()
    alone = _pair_of(options.model, None)
    options.draft_model, options.block_size = alone.drafter, 1
    return alone


def _pair_of(model: nn.Module, drafter: Drafter | None) -> ExactPair:
    if drafter is not None:
        pair = DFlashPair.of(drafter)
        pair.exact = pair.exact or ExactPair(pair.model, drafter)
        return pair.exact
    alone = vars(model).get("_exact_alone")
    if alone is None or alone.model is not model:
        # Beside the module's items: neither a parameter nor seen by who walks through them.
        object.__setattr__(model, "_exact_alone", alone := ExactAlone(model))
    return alone


def check_models(model: nn.Module, drafter: Drafter | None, block_size: int | None) -> None:
    """Refuse models that cannot be served exactly, as their first answer would: for who starts long before it.

    Raises:
      GenerationError, KernelError: names the operation that differs, the kernel that is missing, or the blocks.
    """
    if drafter is not None:
        check_block(drafter, block_size)
    _pair_of(model, drafter).prepare_target()


def check_exact(options: Any) -> None:
    """Refuse what makes rows depend on more than the text.

    Args:
      options: of a run (`RunOptions`), or how a server holds its caches (`CacheOptions`).
    Raises:
      GenerationError, CacheError: names the option.
    """
    given = vars(options)
    if given.get("draft_model") is not None and not isinstance(given["draft_model"], Drafter):
        raise GenerationError("exact was given with an mlx-lm draft model; mlx-lm's own loop is not exact", "Leave one out")
    said = {
        "max_kv_size": "no kernel takes a window that keeps first rows",
        "kv_bits": "no kernel takes quantized keys",
        "input_embeddings": "prompts are token ids",
    }
    for name, why in said.items():
        if given.get(name) is not None:
            raise GenerationError(f"{name} was given with exact, which cannot honour it: {why}", "Leave one of the two out")
    if (acceptance := given.get("acceptance", "match")) != "match":
        raise GenerationError(
            f"acceptance is {acceptance!r} with exact; the text then depends on the drafter", "Leave one of the two out"
        )
    for entry in leaves(given.get("prompt_cache") or []):
        if isinstance(entry, QuantizedKVCache) or getattr(entry, "keep", 0):
            raise CacheError(
                f"the prompt cache has a {type(entry).__name__} that keeps quantized or first rows; exact has no kernel for it",
                "Start a new one without kv_bits and max_kv_size",
            )


def check_block(drafter: Drafter, block_size: int | None) -> None:
    """Refuse blocks of more rows than a kernel takes."""
    if (slots := block_size or drafter.config.block_size) > MAX_ROWS:
        raise GenerationError(
            f"block_size is {slots} with exact; a pass of exact has at most {MAX_ROWS} rows", f"Give a block_size of {MAX_ROWS}"
        )


def prove(target: ExactTarget) -> ExactTarget:
    """Compare passes of the target with its passes of one row. Returns: it, or the same left to MLX where that is row-equal.

    Raises:
      GenerationError, KernelError: names the operation that differs, or the kernel that is missing.
    """
    if may_be_row_equal(target.model):
        unrouted = ExactTarget(target.model, target.layer_ids, routed=False)
        if not first_difference(unrouted, _FEW_ROWS):
            return unrouted
    tell("Comparing rows of exact passes")
    if found := first_difference(target):
        raise GenerationError(f"{target.family} cannot be served exactly: {found}", "Run it without exact")
    return target


def row_test(model: nn.Module, layer_ids: Any) -> str:
    """What `doctor --exact` says of a target: "passed: ...", or "failed: ..." with the operation that differs."""
    target, asked = ExactTarget(model, layer_ids), ", ".join(map(str, ROWS))
    try:
        if may_be_row_equal(model):
            unrouted = ExactTarget(model, layer_ids, routed=False)
            target = target if first_difference(unrouted, _FEW_ROWS) else unrouted
        tell_rows = lambda rows: tell("Comparing rows", ROWS.index(rows), len(ROWS), "row counts")  # noqa: E731
        found = first_difference(target, ROWS, _LONG, tell_rows)
    except (GenerationError, autotune.KernelError) as error:
        return f"failed: {error}"
    if found:
        return f"failed: {found}"
    how = "by exact routes" if target.routed else "by MLX's own operations"
    return f"passed: rows are the same bits alone and among {asked} through {len(target.layers)} layers, {how}"
