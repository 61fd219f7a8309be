"""A target and its drafter, with what outlives a run: the tapped target, compiled passes, the draft-length history.

What changes during runs is kept here, never on a model. Several runs may use a pair at the same time.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache as make_target_cache

from .draft_length.cost_model import CostModel, NotYet
from .draft_length.measure import Measurement
from .draft_length.policy import DraftLengthHistory, DraftLengthPolicy
from .errors import CacheError
from .first_use import try_after_answer, try_before_answers
from .machine import open_streams
from .models.drafter import Drafter
from .models.target import Target, family
from .prompt_cache import PairCache, is_pair_cache
from .rollback import check_rollback
from .traced import Accelerator, accelerate

# Longest time for measuring after an answer, plus the last pass: a shell must get its prompt back.
AFTER_S = 10.0


class DFlashPair:
    """One target model object with one drafter that is bound to it.

    The drafter holds its pair as `drafter.pair`, set once. Bound to another model object it gets a new pair; the old one stays
    valid.

    target: the tapped target. It is made once, and again only if modules of the model were replaced, as adapters do.
    accelerator: runs passes of both models faster than their own code, or None.
    history: what runs have learned about draft lengths. exact: the pair of the same models for exact runs, once one was made.
    """

    target_class = Target
    # The class of its runs; None: `loop.Run`.
    run_class: type | None = None
    clock = staticmethod(time.perf_counter)

    def __init__(self, model: nn.Module, drafter: Drafter):
        # The drafter holds this pair.
        self._drafter = weakref.ref(drafter)
        self.model, self._lock = model, threading.Lock()
        self.target = self.target_class(model, drafter.config.taps(len(model.layers)))
        self.accelerator: Accelerator | None = None
        self.history = DraftLengthHistory()
        # The drafter's rounds and accepted drafts, and whether the user was warned that these are very few.
        self.judged: Counter[str] = Counter()
        # Costs of rounds with several rows (`batch.policy.RoundCosts`), kept from one batch to the next.
        self.round_costs: Any = None
        # How several rows run in one pass of the target (`batch.passes.BatchTarget`), found by the first batch.
        self.batch_target: Any = None
        # The target whose kernels were tried before its first answer.
        self._tried: Target | None = None
        self._measurement: Measurement | None = None
        self.exact: Any = None

    def __deepcopy__(self, memo: Any) -> None:
        """None: a target that is copied gets an exact pair of its own at its first exact run."""

    @staticmethod
    def of(drafter: Drafter) -> DFlashPair:
        """The pair of a drafter and the model that it is bound to."""
        pair = drafter.pair
        if pair is None or pair.model is not drafter.target or pair.drafter is not drafter:
            pair = DFlashPair(drafter.target, drafter)
            # Bypasses nn.Module's attributes, so that it is neither a parameter nor a submodule.
            object.__setattr__(drafter, "pair", pair)
        return pair

    @property
    def drafter(self) -> Drafter:
        return self._drafter()

    def broadcast(self, value: Any, what: str) -> Any:
        """The value. Where several machines share the target (`rank_run`): rank 0's value, on each of them.

        what: names the value in errors.
        """
        return value

    def broadcast_array(self, ids: mx.array) -> mx.array:
        """As `broadcast`, for integers on the device."""
        return ids

    def broadcast_result(self, result: Any) -> Any:
        """As `broadcast`, for a `RoundResult`."""
        return result

    def prepare_target(self) -> Target:
        """The target for one run, with an accelerator that fits the models as they are now."""
        with self._lock:
            self._renew()
            self.accelerator = self.target.accelerator = accelerate(self, self.exact and self.exact.accelerator)
            if self._tried is not self.target and try_before_answers(self.target, drafter=self.drafter):
                self._tried = self.target
            return self.target

    def _renew(self) -> None:
        """Make the target again if modules of the model were replaced."""
        now, known = dict(self.model.named_modules()), self.target.modules
        if now.keys() != known.keys() or any(now[path] is not known[path] for path in now):
            self.target = self.target_class(self.model, self.target.layer_ids)

    def prepare_cache(self, cache: PairCache, options: Any) -> PairCache:
        """The cache in the form that a run with these options needs."""
        return cache

    def after_answer(self) -> None:
        """Measurements and kernel trials that wait for the end of an answer; none while another stream is open."""
        self.finish_measuring(stop=lambda: open_streams() > 1, limit_s=AFTER_S)
        try_after_answer(own_streams=1)

    def finish_measuring(self, stop: Callable[[], bool] = lambda: False, limit_s: float = float("inf")) -> None:
        """Finish measuring passes, exact ones too, if that has begun. stop: called before each; True leaves the rest."""
        until = time.monotonic() + limit_s
        if self._is_measuring:
            self.history.take(lambda: self._measurement.finish(lambda: stop() or time.monotonic() > until))
        if self.exact is not None:
            self.exact.finish_measuring(stop, until - time.monotonic())

    @property
    def measures_later(self) -> bool:
        """Whether measuring has begun and is not finished, of exact passes too."""
        return self._is_measuring or self.exact is not None and self.exact.measures_later

    @property
    def _is_measuring(self) -> bool:
        return self._measurement is not None and self._measurement.costs is None

    def measure(self, stream: Any) -> CostModel | NotYet:
        """Run a piece of the measurement, between two tokens."""
        with mx.stream(stream):
            return self._measuring().piece()

    def _measuring(self) -> Measurement:
        if self._measurement is None or self._measurement.target is not self.target:
            self._measurement = Measurement(self.target, self.drafter)
        return self._measurement

    def draft_length_policy(self, stream: Any) -> DraftLengthPolicy:
        """The policy for one run. It knows the costs of passes and the acceptance of earlier runs."""
        most, this = self.drafter.config.block_size - 1, weakref.ref(self)
        # A weak reference: the policy must not keep the drafter alive, which holds this pair.
        policy = self.history.next_policy(most, lambda: pair.measure(stream) if (pair := this()) else NotYet.LATER)
        if not policy.ready and self.target.accelerator and self.target.accelerator.prepares:
            with mx.stream(stream):
                self.history.take(lambda: self._measuring().prepare())
        return policy

    def open_cache(self, entries: list[Any] | None, max_kv_size: int | None = None) -> PairCache:
        """The caller's prompt cache, or a new one. An empty cache of mlx-lm's gets the drafter's entries added.

        Raises:
          CacheError: it is not one for these two models.
        """
        if entries is None:
            entries = make_pair_cache(self.model, self.drafter, max_kv_size)
        elif not is_pair_cache(entries) and all(entry.empty() for entry in entries):
            check_rollback(entries, self.target.family)
            entries = PairCache.make(list(entries), self.drafter.make_cache())
        cache = PairCache.read(entries)
        wanted = len(make_target_cache(self.model)), len(self.drafter.layers)
        if (found := (len(cache.target), len(cache.drafter))) != wanted:
            raise CacheError(
                f"the prompt cache has {found[0]} target and {found[1]} drafter entries; this pair has {wanted[0]} and "
                f"{wanted[1]}",
                "Make it with make_prompt_cache(model, draft_model)",
            )
        if cache.features is not None and (width := cache.features.shape[2]) != (takes := self._feature_width):
            by = "by another drafter" if width else "without a drafter"
            raise CacheError(
                f"the prompt cache was filled {by}: features of width {width} wait in it, and this drafter takes {takes}",
                "Start a new one",
            )
        return cache

    @property
    def _feature_width(self) -> int:
        config = self.drafter.config
        return len(config.target_layer_ids) * config.target_hidden_size


def make_pair_cache(model: nn.Module, drafter: Drafter, max_kv_size: int | None) -> list[Any]:
    """An empty list of a target's and a drafter's entries.

    Raises:
      CacheError: a cache kind of the target that cannot be rolled back, or a max_kv_size that is too small or without effect.
    """
    check_window(model, max_kv_size)
    entries = make_target_cache(model, max_kv_size)
    kept = max((getattr(entry, "keep", 0) for entry in entries), default=0)
    if max_kv_size is not None and max_kv_size <= kept:
        raise CacheError(
            f"max_kv_size is {max_kv_size}; with a drafter it must be at least {kept + 1}, for mlx-lm keeps {kept} rows "
            "always and no other would fit"
        )
    check_rollback(entries, family(model))
    return PairCache.make(entries, drafter.make_cache())


def adopt_cache(model: nn.Module, drafter: Drafter, entries: list[Any]) -> list[Any]:
    """A prompt cache that mlx-lm filled without a drafter, for both: drafting starts from what follows.

    Raises:
      CacheError: it is not of this target, or of a kind that cannot be rolled back or does not say how long it is.
    """
    if (wanted := len(make_target_cache(model))) != len(entries):
        raise CacheError(
            f"the prompt cache has {len(entries)} entries; {family(model)} needs {wanted}", "Make it with this model"
        )
    check_rollback(entries, family(model))
    return PairCache.adopt(entries, drafter.make_cache())


def check_window(model: nn.Module, max_kv_size: int | None) -> None:
    """Refuse a window for a target that makes its own caches: mlx-lm would ignore it.

    Raises:
      CacheError: names the target.
    """
    if max_kv_size is not None and hasattr(model, "make_cache"):
        raise CacheError(
            f"max_kv_size is {max_kv_size} and {family(model)} sizes its caches itself, so the number would have no effect",
            "Leave it out",
        )
