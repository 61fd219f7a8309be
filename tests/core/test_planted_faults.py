"""Each fault that leaves the text right and only the drafts worse is planted, and must make the comparison of rounds fail.

A fault is one replaced piece of source; `kit.plant` fails if that piece is no longer there, so the table cannot go stale.
"""

import mlx.core as mx
import pytest
from kit import DATA, Oracle, greedy_ids, ids_of, listed, plant, references, rounds_of, run, tiny_drafter, tiny_target, variant

from dflash_mlx import loading, loop, make_prompt_cache
from dflash_mlx.errors import CacheError
from dflash_mlx.models import drafter as drafter_module
from dflash_mlx.models.target import Target
from dflash_mlx.proposers import DrafterProposer

PLAIN, SLIDING, NONCAUSAL = "other-taps", "sliding", "sliding-noncausal"

FAULTS = {
    "tap one too late": (
        (Target, "__init__", "tuple(layer_ids)", "tuple(i + 1 for i in layer_ids)"),
        (PLAIN, SLIDING),
    ),
    "tap one too early": (
        (Target, "__init__", "tuple(layer_ids)", "tuple(i - 1 for i in layer_ids)"),
        (PLAIN, SLIDING),
    ),
    "query position off by one": (
        (drafter_module.Attention, "__call__", "q = self.queries(x, end)", "q = self.queries(x, end + 1)"),
        (PLAIN, SLIDING),
    ),
    "context position off by one in prefill": (
        (drafter_module.Attention, "inject", "self.cached_kv(context, start)", "self.cached_kv(context, start + 1)"),
        (PLAIN, SLIDING),
    ),
    "last context row of a round dropped": (
        (loop, "keep_rows", "output.features[:, :n]", "output.features[:, : max(n - 1, 1)]"),
        (PLAIN, SLIDING),
    ),
    "first context row of a prefill chunk dropped": (
        (loop, "inject_chunk", "run.drafter_proposer.inject(features)", "run.drafter_proposer.inject(features[:, 1:])"),
        (PLAIN, SLIDING),
    ),
    "context row doubled": (
        (
            loop,
            "keep_rows",
            "output.features[:, :n]",
            "mx.concatenate([output.features[:, :1], output.features[:, :n]], axis=1)",
        ),
        (PLAIN, SLIDING),
    ),
    "rejected row kept in the context": (
        (loop, "keep_rows", "output.features[:, :n]", "output.features[:, : n + 1]"),
        (PLAIN, SLIDING),
    ),
    "window one too wide in the mask": (
        (drafter_module, "block_mask", "+ j < window", "+ j <= window"),
        (SLIDING, NONCAUSAL),
    ),
    "window one too narrow in the mask": (
        (drafter_module, "block_mask", "+ j < window", "+ j < window - 1"),
        (SLIDING, NONCAUSAL),
    ),
    "window one too narrow in the cache": (
        # Only the anchor's own row reaches so far back; in a causal layer too little comes of it to turn a draft.
        (drafter_module.Drafter, "make_cache", "max_size=w - 1", "max_size=w - 2"),
        (NONCAUSAL,),
    ),
    "causal flag flipped": (
        (drafter_module.Attention, "__call__", "k.shape[2] - K, self.causal,", "k.shape[2] - K, not self.causal,"),
        (PLAIN, SLIDING, NONCAUSAL),
    ),
    "anchor kept in the context": (
        (drafter_module.Attention, "fetch", "cache.trim(K)", "cache.trim(K - 1)"),
        (PLAIN,),
    ),
    "drafter cache not cropped": (
        (drafter_module.Attention, "fetch", "cache.trim(K)", "pass"),
        (PLAIN,),
    ),
}  # fmt: skip
# Only a second turn on the same prompt cache shows these. The oracle compares every context row with a full forward.
KEPT = {
    "pending rows lost at the end of a turn": (DrafterProposer, "settle", ".joined()[:, :pending]", ".joined()[:, :0]"),
    "pending rows of unseen drafts kept": (DrafterProposer, "settle", ".joined()[:, :pending]", ".joined()"),
    "target's rows of unseen drafts kept": (
        loop.Run,
        "settle",
        "keep = max(point.length, min(self.rows, len(cache.ids) - 1))",
        "keep = self.rows",
    ),
    "anchor left out of the second turn": (
        loop,
        "begin_prefill",
        "feed = run.cache.ids[run.cache.rows :] + prompt",
        "feed = prompt",
    ),
    "anchor fed twice in the second turn": (
        loop,
        "begin_prefill",
        "feed = run.cache.ids[run.cache.rows :] + prompt",
        "feed = run.cache.ids[-1:] * 2 + prompt",
    ),
}


def case_of(pair, name):
    reference = references(DATA / "variants" / f"{name}.json")
    drafter = variant(pair[0], reference["config"])
    return drafter, reference["prompts"][6]


def is_seen(pair, drafter, case):
    """Whether the rounds differ from the reference. The ids must not: no comparison of text sees these faults."""
    try:
        got = run(pair[0], drafter, case["prompt_ids"], 32, pair[1])
    except AssertionError:
        # The drafter noticed that its context has a gap.
        return True
    assert ids_of(got) == case["ids"][:32]
    expected = listed(case["rounds"])
    n = min(len(expected), len(got[-1].stats.rounds))
    return rounds_of(got)[:n] != expected[:n]


@pytest.mark.parametrize("name", [PLAIN, SLIDING, NONCAUSAL])
def test_without_a_fault_the_rounds_are_the_references(pair, name):
    assert not is_seen(pair, *case_of(pair, name))


@pytest.mark.parametrize("fault,name", [(fault, name) for fault, (_, names) in FAULTS.items() for name in names])
@pytest.mark.quick(8)
def test_a_planted_fault_changes_the_rounds(pair, monkeypatch, fault, name):
    owner, function, old, new = FAULTS[fault][0]
    # It reads a tap of its own, which a shifted one may not have.
    monkeypatch.setattr(loading, "activation_dtype", lambda model: mx.float32)
    plant(monkeypatch, owner, function, old, new)
    # Built after planting: some faults sit in what a drafter makes of its config.
    assert is_seen(pair, *case_of(pair, name))


@pytest.mark.parametrize("fault", [None, *KEPT])
def test_a_fault_planted_in_what_a_turn_keeps_is_seen_in_the_second_turn(monkeypatch, fault):
    model = tiny_target(seed=2)
    oracle = tiny_drafter(model, cls=Oracle)
    first, second = [5, 9, 33, 7, 20, 41], [11, 2, 50]
    out = greedy_ids(model, first, 9)
    if fault:
        plant(monkeypatch, *KEPT[fault])
    wrong = []
    for n in range(1, 10):
        line = first + out[:n] + second
        expected = greedy_ids(model, line, 12)
        cache = make_prompt_cache(model, oracle)
        assert ids_of(run(model, oracle.learn(first + out, model), first, n, prompt_cache=cache)) == out[:n]
        try:
            if ids_of(run(model, oracle.learn(line + expected, model), second, 12, prompt_cache=cache)) != expected:
                wrong.append(n)
        except (AssertionError, CacheError, ValueError):
            wrong.append(n)
    assert bool(wrong) == (fault is not None)
