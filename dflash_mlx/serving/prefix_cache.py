"""Reuses the caches of earlier prompts: the tokens that a stored cache holds are not computed again.

Knows prompt caches and the generation loop. Knows no messages, terminals or HTTP. Chat and server use it.

Caches are stored under the token ids that they hold. A prompt gets a copy of the one that shares the longest beginning with it,
cut to that. Some caches cannot be cut (a recurrence, a window that has wrapped). For these, copies are made while the prompt is
read, at lengths that later prompts will share.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.models.cache import KVCache, LRUPromptCache, QuantizedKVCache

from ..exact import check_exact, check_models
from ..generation import GenerationResponse, make_prompt_cache, stream_generate
from ..prompt_cache import KVQuantization, PairCache, can_trim_prompt_cache, is_pair_cache, trim_prompt_cache
from ..prompt_files import PrefixFiles, models_key
from ..sampling import KeyedSampler, LogitsProcessor, choose_seed

# Seconds without a new prefix after which unsaved ones are written to files. An agent's tool calls take less.
WRITE_AFTER_S = 30.0


class PrefixCache(LRUPromptCache):
    """mlx-lm's store of prompt caches, for lists that also have a drafter's entries. files: the directory that keeps them."""

    files: PrefixFiles | None = None
    _changed_at = 0.0

    def keep_in(self, files: PrefixFiles, model: nn.Module, draft_model: nn.Module | None, name: str, about: object) -> None:
        """Also look for prefixes in a directory, and let `write_next` write there what is stored from now on.

        Args:
          name: the target's; about: what else caches depend on, such as `CacheOptions`.
        """
        models = [one for one in (model, draft_model) if one is not None]
        config = getattr(draft_model, "config", None)
        files.belong_to(name, models_key(models, config, about, str(mx.default_device().type)))
        self.files = files

    def write_next(self, quiet_s: float = WRITE_AFTER_S) -> bool:
        """Write one prefix that no file holds, the newest first, if nothing was stored for `quiet_s` seconds.

        Returns: whether there was one.
        """
        if self.files is None or time.monotonic() - self._changed_at < quiet_s:
            return False
        for kind, stored in self._lru._lrus.items():
            for model, tokens in reversed(stored):
                if self.files.lacks(tokens):
                    self.files.write(tokens, self._trie.get(model, tokens).prompt_cache, kind)
                    return True
        return False

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything: its size and bytes are not 0."""
        return self.max_size > 0 and self.max_bytes > 0

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """A copy of the cache that holds the longest beginning of `tokens`, never all of them; and the tokens that it lacks.

        Unlike in mlx-lm, at least one token is left, because the loop needs one to run.
        """
        entries, rest = self._nearest(model, tokens)
        file = self.files.find(tokens[:-1], len(tokens) - len(rest)) if self.files is not None and self.keeps else None
        if file is None or self._holds(model, ids := file.ids.tolist()) or (loaded := self.files.load(file)) is None:
            return entries, rest
        changed_at = self._changed_at
        self.insert_cache(model, ids, loaded, cache_type=file.kind)
        self._changed_at = changed_at
        return self._nearest(model, tokens)

    def _holds(self, model: Any, tokens: list[int]) -> bool:
        return self._trie.search(model, tokens).exact is not None

    def _nearest(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        found = self._trie.search(model, tokens[:-1])
        held = found.exact if found.exact is not None else found.shorter or []
        if found.exact is None and found.longer is not None and found.common_prefix > len(held):
            entries = copy.deepcopy(self._trie.get(model, found.longer).prompt_cache)
            surplus = len(found.longer) - found.common_prefix
            if trim_prompt_cache(entries, surplus) == surplus:
                return entries, tokens[found.common_prefix :]
        if not held:
            return None, tokens
        # Arrays are shared until one of the two lists is written to.
        return copy.deepcopy(self._trie.get(model, held).prompt_cache), tokens[len(held) :]

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant") -> None:
        """Store a cache under the tokens it holds; the shorter ones that it can be cut to are dropped."""
        if not self.keeps:
            return
        self._changed_at = time.monotonic()
        super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)
        # mlx-lm's drops them too, but calls no pair list trimmable.
        if self._holds(model, tokens) and is_pair_cache(prompt_cache) and can_trim_prompt_cache(prompt_cache):
            for length, entry in self._trie.pop_prefixes(model, tokens):
                self._n_bytes -= entry.nbytes
                self._n_bytes_by_type[entry.cache_type] -= entry.nbytes
                self._lru.remove(model, tokens[:length])


@dataclass(frozen=True)
class CacheOptions:
    """Cache options of a chat or a server, for all prompts. Names as in `stream_generate`; None is its default."""

    prefill_step_size: int | None = None
    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int | None = None
    quantized_kv_start: int | None = None
    exact: bool | None = None

    def check(self, model: nn.Module, draft_model: nn.Module | None, block_size: int | None = None) -> None:
        """Check, before the first prompt, that two models can run with these options in blocks of this size.

        Raises:
          CacheError, GenerationError, KernelError: names the option, or what exact has no kernel for.
        """
        if self.exact:
            check_exact(self)
            check_models(model, draft_model, block_size)
        entries = make_prompt_cache(model, draft_model, self.max_kv_size)
        if self.kv_bits is not None:
            target = PairCache.read(entries).target if is_pair_cache(entries) else entries
            KVQuantization(self.kv_bits, self.kv_group_size or 64, self.start).check(model, target)

    @property
    def start(self) -> int:
        """The row of a cache from which it is quantized."""
        return DEFAULT_QUANTIZED_KV_START if self.quantized_kv_start is None else self.quantized_kv_start

    def of_a_run(self) -> dict[str, Any]:
        """The cache options for `stream_generate`. A cache keeps the size with which it was made."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "max_kv_size"}


AS_THEY_ARE = CacheOptions()


@dataclass
class PrefixRun:
    """A prompt that is being answered.

    held: how many of its tokens a stored cache already had.
    responses: as from `stream_generate`. However they end, the computed cache goes back into the store.
    """

    held: int
    responses: Generator[GenerationResponse, None, None]


def stream_from_prefix(
    model: nn.Module,
    tokenizer: Any,
    prompt: list[int],
    store: PrefixCache,
    key: Any,
    *,
    draft_model: nn.Module | None = None,
    shared: Sequence[tuple[int, str]] = (),
    should_stop: Callable[[], bool] = lambda: False,
    logits_processors: Sequence[LogitsProcessor] = (),
    prompt_progress_callback: Callable[[int, int], None] = lambda done, total: None,
    caches: CacheOptions = AS_THEY_ARE,
    **options: Any,
) -> PrefixRun:
    """Generate after `prompt`, computing only the tokens that no stored cache holds.

    Args beyond those of `stream_generate`:
      prompt: every token of the conversation, not only the new ones.
      key: names models that may share caches.
      shared: (length, kind) of beginnings of `prompt` that later prompts will share, in rising order; kind is mlx-lm's
        "system", "user" or "assistant". Copies are kept there if the cache could not be cut to them later.
      should_stop: asked after every prefill pass and every token; True ends the run.
      caches: how prompts are read and held.
      logits_processors: they see the whole prompt, so the text does not depend on what a cache held.
    """
    entries, rest = store.fetch_nearest_cache(key, prompt)
    held, options = len(prompt) - len(rest), {**caches.of_a_run(), **options}
    if entries is None:
        entries = make_prompt_cache(model, draft_model, caches.max_kv_size)
    run = _Run(model, tokenizer, prompt, store, key, draft_model, entries, held, should_stop, prompt_progress_callback)
    return PrefixRun(held, run.responses(shared, logits_processors, options))


@dataclass
class _Run:
    """The state of one run. at: tokens of the prompt that `entries` hold by now; emitted: tokens that came after it."""

    model: nn.Module
    tokenizer: Any
    prompt: list[int]
    store: PrefixCache
    key: Any
    draft_model: nn.Module | None
    entries: list[Any]
    held: int
    should_stop: Callable[[], bool]
    progress: Callable[[int, int], None]

    def __post_init__(self) -> None:
        self.at, self.emitted = self.held, []
        # How far the present call of the loop fills the cache, and whether it ends there.
        self.until, self.filling = len(self.prompt), False

    def responses(
        self, shared: Sequence[tuple[int, str]], processors: Sequence[LogitsProcessor], options: dict[str, Any]
    ) -> Generator[GenerationResponse, None, None]:
        """Store copies while reading, then generate. The cache goes into the store unless an error left its entries uneven."""
        sound = True
        try:
            self._keep_copies(shared, options)
            with closing(self._generate(processors, options)) as steps:
                for response in steps:
                    self.emitted.append(response.token)
                    yield response
                    if self.should_stop():
                        break
        except _Stopped:
            pass
        except GeneratorExit:
            raise
        except BaseException:
            # Some entries may be ahead of others.
            sound = False
            raise
        finally:
            if sound:
                pair = is_pair_cache(self.entries)
                ids = PairCache.read(self.entries).ids if pair else [*self.prompt[: self.at], *self.emitted]
                if ids:
                    self.store.insert_cache(self.key, ids, self.entries)

    def _stream(self, tokens: list[int], **options: Any) -> Generator[GenerationResponse, None, None]:
        common = {"draft_model": self.draft_model, "prompt_cache": self.entries, "prompt_progress_callback": self._watch}
        return stream_generate(self.model, self.tokenizer, tokens, **common, **options)

    def _watch(self, done: int, total: int) -> None:
        # A pair runs its anchor again, which the store counts as held.
        self.at = max(self.until - (total - done), self.held)
        self.progress(self.at, len(self.prompt))
        if self.at < len(self.prompt) and self.should_stop():
            raise _Stopped
        if self.filling and done == total - 1:
            raise _Filled

    def _keep_copies(self, shared: Sequence[tuple[int, str]], options: dict[str, Any]) -> None:
        """Fill the cache up to each length that later prompts share, and store a copy where it could not be cut later."""
        for length, kind in shared:
            if not self.at < length < len(self.prompt) or not self.store.keeps or not needs_copies(self.entries):
                continue
            # The loop fills a cache with all tokens but the last and then chooses one: one more is passed, and it is left there.
            self.until, self.filling = length + 1, True
            try:
                next(self._stream(self.prompt[self.at : self.until], **_passes(options)))
            except _Filled:
                self.at = length
            self.store.insert_cache(self.key, self.prompt[:length], copy.deepcopy(self.entries), cache_type=kind)
        self.until, self.filling = len(self.prompt), False

    def _generate(
        self, processors: Sequence[LogitsProcessor], options: dict[str, Any]
    ) -> Generator[GenerationResponse, None, None]:
        processors = [after_held(self.prompt[: self.at], processor) for processor in processors] or None
        if self.draft_model is None and options.get("sampler") and not options.get("exact"):
            # By its place in the whole prompt, which entries of a recurrence alone do not know.
            seed = choose_seed(options.pop("seed", None))
            options["sampler"] = KeyedSampler(options["sampler"], seed, len(self.prompt))
        return self._stream(self.prompt[self.at :], logits_processors=processors, **options)


class _Stopped(Exception):
    """Raised to leave a prefill whose client has left."""


class _Filled(Exception):
    """Raised to leave the loop when the tokens of a shared beginning are in the cache."""


def needs_copies(entries: Sequence[Any]) -> bool:
    """Whether some entry may refuse to be cut later."""
    parts = entries[:-1] if is_pair_cache(entries) else entries
    return not all(type(entry) in (KVCache, QuantizedKVCache) for entry in parts)


def _passes(options: dict[str, Any]) -> dict[str, Any]:
    """The options that affect how a prompt is computed."""
    names = ("stream", "exact", "prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start")
    return {name: options[name] for name in names if name in options}


def after_held(held: list[int], processor: LogitsProcessor) -> LogitsProcessor:
    """A processor that sees the held tokens before those of the run."""
    if not held:
        return processor
    before = mx.array(held)

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        return processor(mx.concatenate([before, tokens]), logits)

    return process
