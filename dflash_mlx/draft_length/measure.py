"""Timing the passes of a pair once on this machine, on caches of their own. Knows both models; nothing of the loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from ..kernels.autotune import fingerprint
from ..models.drafter import Drafter
from ..models.target import Target
from ..rollback import rollback, rollback_point
from ..target_sampler import pack_drafts
from ..traced import setting
from ..verify import logprobs, verify_block
from .cost_model import CostModel, first_widths
from .cost_store import load_cost_model, pair_key, save_cost_model


def stored_cost_model(target: Target, drafter: Drafter, stream: Any) -> CostModel:
    """What passes of this pair cost here: as measured before, or measured now on caches of their own."""
    info = mx.device_info()
    device = (mx.default_device(), info.get("device_name"), info.get("architecture"), info.get("memory_size"))
    key = pair_key([target.model, drafter], drafter.config, *device, mx.__version__, setting(), fingerprint())
    costs = load_cost_model(key)
    if costs is None:
        with mx.stream(stream):
            costs = measure_cost_model(target, drafter)
        save_cost_model(key, costs)
    return costs


def measure_cost_model(target: Target, drafter: Drafter) -> CostModel:
    """Time the passes of a pair."""
    entries, context, K = mlx_lm_cache.make_prompt_cache(target.model), drafter.make_cache(), drafter.config.block_size
    # Any text of different tokens.
    text = mx.arange(1, 33, dtype=mx.int32)[None] * 37 % target.vocabulary
    features = target(text, entries).features
    mx.eval(features)
    token, text = text[0, :1], mx.broadcast_to(text, (1 + K // 32, 32)).reshape(1, -1)
    rows = injected = 0

    def choose(width: int, drafted: mx.array | None = None) -> mx.array:
        nonlocal rows
        point = rollback_point(entries, rows)
        drafted = (text if drafted is None else drafted)[:, :width]
        output = verify_block(target, token, drafted, entries, point)
        chosen = mx.argmax(logprobs(target, output.hidden, output.logits), axis=-1)
        mx.async_eval(chosen, output.features)
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
    if target.accelerator:
        draft()
        choose(1)
        plain()
    costs = time_by_turns(plain, draft, inject, choose, both, K - 1)
    costs.plain_s /= 4
    return costs


def time_by_turns(
    plain: Callable[[], None],
    draft: Callable[[], None],
    inject: Callable[[int], None],
    verify: Callable[[int], None],
    both: Callable[[int, bool], None],
    most: int,
    budget_s: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel:
    """Time passes by turns, because a machine is now faster, now slower; each function runs one to its end. The fastest counts.

    Args:
      draft, verify: one block; inject: that many rows, of which plain decoding gathers many.
      both: draft and verify a width with one wait, or (True) with a second one in between, at which the drafter's confidences
        are read.
      most: the largest width, block_size - 1.
      budget_s: once it is spent, without each pass's first run, no wider block is measured; two always are. The widths between
        are measured only while all runs together took no longer. What is left goes to more turns.
    """
    began, spent = clock(), 0.0
    runs: dict[Any, Callable[[], object]] = {}
    times: dict[Any, list[float]] = {}

    def once(name: object) -> float:
        nonlocal spent
        start = clock()
        runs[name]()
        took = max(clock() - start, 1e-9)
        # The first run may compile, for seconds or minutes.
        spent += took if name in times else 0.0
        times.setdefault(name, []).append(took)
        return took

    def begin(name: object, run: Callable[[], object]) -> float:
        runs[name] = run
        return min(once(name), once(name))

    begin("plain", plain)
    begin("draft", draft)
    pending = [32]
    if begin(("inject", 32), lambda: inject(32)) < budget_s / 50:
        begin(("inject", 256), lambda: inject(256))
        pending.append(256)
    first, widths = first_widths(most), []
    for width in [*first, *(w for w in range(1, most) if w not in first)]:
        if len(widths) >= 2 and (spent > budget_s or (width not in first and clock() - began > budget_s)):
            break
        begin(width, lambda width=width: verify(width))
        widths.append(width)
    some = first[len(widths) > 2]
    runs.update({("both", waits): lambda waits=waits: both(some, waits) for waits in (False, True)})
    for _ in range(1 + (spent <= budget_s)):
        once(("both", False))
        once(("both", True))
    while spent < budget_s and len(times["plain"]) < 9:
        for name in runs:
            once(name)
    least = {name: min(took) for name, took in times.items()}
    inject_s = min(least["inject", n] / n for n in pending)
    cut_s = max(least["both", True] - least["both", False], 0.0)
    return CostModel(least["plain"], least["draft"], inject_s, _level({w: least[w] for w in widths}), cut_s, clock() - began)


def _level(verify_s: dict[int, float]) -> dict[int, float]:
    """Costs by width without what is noise in them: a wider pass that took up to a quarter less than narrower ones takes as long,
    so what they were measured to take is shared out among them."""
    pools: list[tuple[float, list[int]]] = []
    for width in sorted(verify_s):
        mean, pool = verify_s[width], [width]
        while pools and mean < pools[-1][0]:
            before, widths = pools[-1]
            # Of what is shared out too: by small steps, one would come to be far less.
            if min(verify_s[w] for w in pool) < 0.75 * max(verify_s[w] for w in widths):
                break
            pools.pop()
            mean, pool = (before * len(widths) + mean * len(pool)) / (len(widths) + len(pool)), widths + pool
        pools.append((mean, pool))
    return {width: mean for mean, pool in pools for width in pool}
