"""What drafting and verifying cost for a pair on this machine: passes timed once on caches of their own, and kept.

Knows both models; knows nothing of the loop. What follows from the numbers is `width`'s.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from ..models.drafter import Drafter
from ..models.target import Target
from ..rollback import rollback, rollback_point
from ..target_sampler import pack_drafts
from ..traced.compiled import attach, setting
from ..verify import logprobs, verify_block
from .acceptance import AcceptanceRate
from .policy import CostModel, DraftLengthPolicy, load_cost_model, measure, pair_key, save_cost_model


def draft_length_policy(model: nn.Module, drafter: Drafter, stream: Any) -> DraftLengthPolicy:
    """The rule for one run. What passes cost, and what earlier runs accepted, is kept with the drafter for the next one."""
    known: DraftLengthPolicy | None = getattr(drafter, "_last_rule", None)
    most = drafter.config.block_size - 1
    acceptance = AcceptanceRate(most)
    if known is not None:
        acceptance.counts = [list(counts) for counts in known.acceptance.counts]
        acceptance.forget(4)
    rule = DraftLengthPolicy(most, acceptance, known and known.cost_model, lambda: stored_cost_model(model, drafter, stream))
    if known is not None:
        rule.take_up(known)
    drafter._last_rule = rule
    return rule


def stored_cost_model(model: nn.Module, drafter: Drafter, stream: Any) -> CostModel:
    """What passes of this pair cost here: as measured before, or measured now on caches of their own."""
    key = pair_key([model, drafter], drafter.config, mx.default_device(), mx.device_info(), mx.__version__, setting())
    costs = load_cost_model(key)
    if costs is None:
        with mx.stream(stream):
            costs = measure_cost_model(model, drafter)
        save_cost_model(key, costs)
    return costs


def measure_cost_model(model: nn.Module, drafter: Drafter) -> CostModel:
    target = attach(Target(model, drafter.config.target_layer_ids), drafter)
    entries, context, K = mlx_lm_cache.make_prompt_cache(model), drafter.make_cache(), drafter.config.block_size
    # Any text of different tokens.
    text = mx.arange(1, 33, dtype=mx.int32)[None] * 37 % target.vocabulary
    _, features = target(text, entries)
    mx.eval(features)
    token, text = text[0, :1], mx.broadcast_to(text, (1 + K // 32, 32)).reshape(1, -1)
    rows = injected = 0

    def choose(width: int, drafted: mx.array | None = None) -> mx.array:
        nonlocal rows
        point = rollback_point(entries, rows)
        drafted = (text if drafted is None else drafted)[:, :width]
        hidden, taps = verify_block(target, token, drafted, entries, point)
        chosen = mx.argmax(logprobs(target, hidden, target.logits), axis=-1)
        mx.async_eval(chosen, taps)
        rows += 1
        if width:
            chosen.tolist()
            rollback(entries, point, rows)
            mx.eval([entry.state for entry in entries])
        return chosen

    def plain() -> None:
        # As in the loop, the next pass is enqueued before the last one is read.
        before = choose(0)
        for _ in range(3):
            before, now = choose(0), before
            now.tolist()
        before.tolist()

    def draft() -> None:
        nonlocal injected
        mx.eval(Drafter.draft(drafter, token, features[:, :1], context, injected, K), [entry.state for entry in context])
        injected += 1

    def inject(n: int) -> None:
        nonlocal injected
        Drafter.inject(drafter, mx.broadcast_to(features[:, :1], (1, n, features.shape[2])), context, injected)
        mx.eval([entry.state for entry in context])
        injected += n

    def both(width: int, waits: bool) -> None:
        nonlocal injected
        drafted, confidence = Drafter.draft_with_confidence(drafter, token, features[:, :1], context, injected, K)
        if waits:
            pack_drafts(drafted, confidence).tolist()
        choose(width, drafted)
        mx.eval([entry.state for entry in context])
        injected += 1

    # What is tried at first use is tried before anything is timed; on empty entries nothing is.
    inject(1)
    if target.compiled:
        draft()
        choose(1)
        plain()
    costs = measure(plain, draft, inject, choose, both, K - 1)
    costs.plain_s /= 4
    return costs
