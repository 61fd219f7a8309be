"""Prompts that begin as earlier ones did: what a stored cache holds is not run again.

Knows prompt caches and the generation loop. Knows no messages, terminals or HTTP; chat and server both stand on it.

Caches are stored under the token ids that they hold. A prompt takes a copy of the one that holds most of its beginning, cut
to what both share. Where cutting is impossible (a recurrence, a window that has wrapped), copies made at `checkpoints` on
the way serve instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, LRUPromptCache, QuantizedKVCache

from ..generation import GenerationResponse, make_prompt_cache, stream_generate
from ..rollback import PairCache, can_trim_prompt_cache, is_pair_cache, trim_prompt_cache
from ..sampling import KeyedSampler, LogitsProcessor, choose_seed


class PromptStore(LRUPromptCache):
    """mlx-lm's store of prompt caches, for lists that also carry a drafter's part."""

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """A copy of the cache that holds most of `tokens`, never all of them, and the tokens that it lacks.

        Unlike mlx-lm's, at least one token is left: the loop needs one to run.
        """
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
        super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)
        # mlx-lm's drops them too, but calls no pair list trimmable.
        kept = self._trie.search(model, tokens).exact is not None
        if kept and is_pair_cache(prompt_cache) and can_trim_prompt_cache(prompt_cache):
            for length, entry in self._trie.pop_prefixes(model, tokens):
                self._n_bytes -= entry.nbytes
                self._n_bytes_by_type[entry.cache_type] -= entry.nbytes
                self._lru.remove(model, tokens[:length])


@dataclass
class Turn:
    """One prompt on its way.

    held: how many of its tokens a stored cache already had.
    responses: as from `stream_generate`. However they end, what was computed goes back into the store.
    """

    held: int
    responses: Generator[GenerationResponse, None, None]


def open_turn(
    model: nn.Module,
    tokenizer: Any,
    prompt: list[int],
    store: PromptStore,
    key: Any,
    *,
    draft_model: nn.Module | None = None,
    checkpoints: Sequence[tuple[int, str]] = (),
    should_stop: Callable[[], bool] = lambda: False,
    logits_processors: Sequence[LogitsProcessor] = (),
    prompt_progress_callback: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Turn:
    """Generate after the whole of `prompt`, running only what no stored cache holds.

    Args beyond those of `stream_generate`:
      prompt: every token of the conversation, not only the new ones.
      key: names models that may share caches.
      checkpoints: (length, kind) of beginnings of `prompt` that later prompts will share, in rising order; kind is mlx-lm's
        "system", "user" or "assistant". Copies are kept there if the cache could not be cut to them later.
      should_stop: asked after every prefill pass and every token; True ends the turn.
      logits_processors: see the whole prompt, held or not, so that text does not depend on what was held.
    """
    entries, rest = store.fetch_nearest_cache(key, prompt)
    held = len(prompt) - len(rest)
    if entries is None:
        entries = make_prompt_cache(model, draft_model)

    def respond() -> Generator[GenerationResponse, None, None]:
        at, until, filling, emitted, sound = held, len(prompt), False, [], True

        def watch(done: int, total: int) -> None:
            # A pair runs its anchor again, which the store counts as held.
            nonlocal at
            at = max(until - (total - done), held)
            prompt_progress_callback(at, len(prompt))
            if at < len(prompt) and should_stop():
                raise _Stopped
            if filling and done == total - 1:
                raise _Filled

        common = {"draft_model": draft_model, "prompt_cache": entries, "prompt_progress_callback": watch}
        try:
            for length, kind in checkpoints:
                if not at < length < len(prompt) or not _needs_copies(entries):
                    continue
                # The loop fills a cache with all tokens but the last and then chooses one: one more is passed, and it is
                # left there.
                until, filling = length + 1, True
                try:
                    next(stream_generate(model, tokenizer, prompt[at:until], **common, **_passes(options)))
                except _Filled:
                    at = length
                store.insert_cache(key, prompt[:length], copy.deepcopy(entries), cache_type=kind)
            until, filling = len(prompt), False
            processors = [_after(prompt[:at], processor) for processor in logits_processors] or None
            if draft_model is None and options.get("sampler"):
                # By its place in the whole prompt, which entries of a recurrence alone do not know.
                seed = choose_seed(options.pop("seed", None))
                options["sampler"] = KeyedSampler(options["sampler"], seed, len(prompt))
            steps = stream_generate(model, tokenizer, prompt[at:], logits_processors=processors, **common, **options)
            with closing(steps):
                for response in steps:
                    emitted.append(response.token)
                    yield response
                    if should_stop():
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
                ids = PairCache.read(entries).ids if is_pair_cache(entries) else [*prompt[:at], *emitted]
                if ids:
                    store.insert_cache(key, ids, entries)

    return Turn(held, respond())


class _Stopped(Exception):
    """Leaves a prefill that nobody waits for."""


class _Filled(Exception):
    """Leaves the loop once a checkpoint's tokens are in the cache."""


def _needs_copies(entries: Sequence[Any]) -> bool:
    """Whether some entry may refuse to be cut later."""
    parts = entries[:-1] if is_pair_cache(entries) else entries
    return not all(type(entry) in (KVCache, QuantizedKVCache) for entry in parts)


def _passes(options: dict[str, Any]) -> dict[str, Any]:
    """Those options that say how a prompt is run."""
    names = ("stream", "prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start")
    return {name: options[name] for name in names if name in options}


def _after(held: list[int], processor: LogitsProcessor) -> LogitsProcessor:
    """A processor that sees the held tokens before those of the run."""
    if not held:
        return processor
    before = mx.array(held)

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        return processor(mx.concatenate([before, tokens]), logits)

    return process
