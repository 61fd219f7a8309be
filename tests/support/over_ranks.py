"""One rank of `mlx.launch`: `over_ranks.py OUT CASES`, a list of them as JSON. Each rank writes OUT/rank-N.json.

A case: the keywords of `answers`, or {"texts": the first of ten} of `near_ties`, or {"load": a checkpoint}.
"""

import itertools
import json
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

mx.set_default_device(mx.cpu)

from families import known_drafter, some_line  # noqa: E402
from kit import letters, run  # noqa: E402
from launching import sleep_while_waiting  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from near_ties import ROWS, TOKENS, KnownLines, alone, drawing, gaps, prompt_of  # noqa: E402
from sharded import sharded_family  # noqa: E402

from dflash_mlx import loading, rank_run, ranks  # noqa: E402
from dflash_mlx.batch.generator import BatchGenerator  # noqa: E402
from dflash_mlx.checkpoint import inspect_checkpoint  # noqa: E402
from dflash_mlx.distribution import Distribution  # noqa: E402
from dflash_mlx.draft_length import measure  # noqa: E402
from dflash_mlx.draft_length.cost_model import CostModel  # noqa: E402
from dflash_mlx.models.target import Target, TargetOutput  # noqa: E402
from dflash_mlx.shares import take_share  # noqa: E402


def of(responses):
    """What of a run must be the same on every rank, as JSON has it."""
    stats = responses[-1].stats
    rounds = None if stats is None else [[r["drafted"], r["accepted"], r["bonus"], r["width"], r["source"]] for r in stats.rounds]
    return {"ids": [r.token for r in responses], "rounds": rounds}


def line_of(model, prompt, n):
    """n greedy tokens of a whole model, by mlx-lm."""
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=n)]


def go_astray(rank):
    """Make this rank's logits and its clock other than rank 0's."""
    head, call, ticks = Target.head, Target.__call__, itertools.count()

    def other_head(self, hidden):
        logits = head(self, hidden)
        return logits + 0.5 * rank * mx.random.normal(logits.shape, key=mx.random.key(rank))

    def without_logits(self, *args, **kwargs):
        output = call(self, *args, **kwargs)
        return TargetOutput(output.hidden, output.features, None, output.compiled)

    Target.head, Target.__call__ = other_head, without_logits
    # Not the time: beside other work drafts may never pay.
    time.perf_counter = lambda: next(ticks) * 1e-4 * (1 + 5 * rank)


@contextmanager
def scaled_logits(factor):
    """A fault: the target's logits are so many times as large."""
    head = Target.head
    Target.head = lambda self, hidden: head(self, hidden) * factor
    yield
    Target.head = head


def kept_costs(rank, block):
    """Costs that each rank has on its disk, every rank others: drafting pays on rank 0 alone."""
    widths = {w: 1e-3 * (1.1 + 9 * rank) for w in range(1, block)}
    measure.load_cost_model = lambda key: CostModel(1e-3, 1e-5, 1e-6, widths)


def in_one_batch(model, drafter, prompts, n, own):
    """Responses to several prompts in one batch. own: each one's keywords."""
    batch, found = BatchGenerator(model, letters(), drafter, max_batch=len(prompts)), {}
    with batch.open():
        uids = [batch.insert(p, max_tokens=n, **given) for p, given in zip(prompts, own, strict=True)]
        while len(batch):
            for response in batch.next():
                assert response.error is None, response.error
                found.setdefault(response.uid, []).append(response)
    return [found[uid] for uid in uids]


def shared(model, group, name, drafter):
    """Leave this rank its share of a model, whose pair goes by rank 0."""
    take_share(model, group, name)
    mx.eval(model.parameters())
    rank_run.RankPair(model, drafter, group)


def texts(group, first, block=5):
    """Ten texts of `near_ties` with drafts; on more than two ranks without them too, with the gaps of these."""
    prompt, model = prompt_of(first)
    drafter = known_drafter(model, [])
    drafter.__class__, drafter._lines = KnownLines, mx.array([prompt + alone(first + i)[0] for i in range(ROWS)])
    shared(model, group, "it", drafter)
    own, found = [drawing(first + i) for i in range(ROWS)], [{} for _ in range(ROWS)]
    for name, size in (("drafted", block), ("plain", 1))[: 1 + (group.size > 2)]:
        answered = in_one_batch(model, drafter, [prompt] * ROWS, TOKENS, [{**given, "block_size": size} for given in own])
        for row, responses, given in zip(found, answered, own, strict=True):
            row[name] = of(responses)
            if size == 1:
                row["apart"] = gaps(responses, len(prompt), **given)
    return found


def answers(group, family, n=16, block=5, seed=3, layers=None, astray=False, policy=False, quality="noisy", **more):
    """A family's runs of one prompt: by a whole model on this rank alone, and by the ranks' shares, with drafts and without.

    Gaps of the runs that others are compared with are under "gaps": a rank's own.
    """
    model, prompt, found = sharded_family(family, seed, layers=layers), some_line(9 + seed % 5, 66), {"gaps": {}}
    line = line_of(model, prompt, n)
    drawn = {"": {}, " sampled": {"sampler": Distribution(0.8), "seed": 5}}
    if not more.get("sampled"):
        del drawn[" sampled"]

    def reference(name, drafter, given, **sizes):
        responses = run(model, drafter, prompt, n, **given, **sizes)
        found[name], found["gaps"][name] = of(responses), gaps(responses, len(prompt), **given)

    for kind, given in drawn.items():
        reference(f"alone{kind}", None, given)
    assert found["alone"]["ids"] == line
    # On a rank that goes astray the drafter drafts something else.
    drafter = known_drafter(model, prompt + line, "hopeless" if astray and group.rank else quality)
    # Shares are cut from weights that nobody else holds.
    shared(model, group, family, drafter)
    if astray:
        go_astray(group.rank)
    for kind, given in drawn.items():
        if astray:
            found[f"plain{kind}"] = of(run(model, drafter, prompt, n, block_size=1, **given))
        else:
            reference(f"plain{kind}", drafter, given, block_size=1)
        with scaled_logits(more.get("scaled", 1)):
            found[f"drafted{kind}"] = of(run(model, drafter, prompt, n, block_size=block, **given))
    if more.get("lm"):
        found["mlx-lm's loop"] = of(run(model, None, prompt, n))
        # A whole model on each rank; on a rank that goes astray, another one.
        small = sharded_family(family, seed + astray * group.rank, layers=layers)
        responses = run(model, small, prompt, n, num_draft_tokens=3)
        found["mlx-lm's drafts"] = of(responses) | {"from_draft": [r.from_draft for r in responses]}
    if more.get("processors"):
        given = {"logits_processors": [lambda tokens, logits: logits - 0.1 * mx.arange(logits.shape[-1]) / len(tokens)]}
        found["processed plain"] = of(run(model, drafter, prompt, n, block_size=1, **given))
        found["processed"] = of(run(model, drafter, prompt, n, block_size=block, **given))
    if more.get("ends"):
        # Tokens of the first two blocks, each as the one that ends an answer.
        for i, token in enumerate([*dict.fromkeys(line)][1:6]):
            for name, size in (("ended plain", 1), ("ended", block)):
                found[f"{name} {i}"] = of(run(model, drafter, prompt, n, letters(token), block_size=size))
    if more.get("batch"):
        # One of them sampled, one with a logits processor.
        own = [{}, {"sampler": Distribution(0.8), "seed": 5}, {"logits_processors": [lambda tokens, logits: logits * 0.9]}]
        found["batch"] = [of(r) for r in in_one_batch(model, drafter, [prompt, prompt[:4], prompt[2:]], n, own)]
    if policy:
        kept_costs(group.rank, block)
        found["chosen"] = of(run(model, drafter, prompt, 4 * n, block_size=None))
    return found


def loaded(group, name):
    """Bytes that loading this rank's share took at most, of the share, of the largest whole tensor and of all of them."""
    sizes = [tensor.nbytes for tensor in inspect_checkpoint(name).tensors.values()]
    model, _ = loading.load(name, lazy=True, dtype="auto", ranks=group)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loading.read_weights(model, name)
    share = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return {"peak": mx.get_peak_memory() - before, "share": share, "largest": max(sizes), "whole": sum(sizes)}


if __name__ == "__main__":
    sleep_while_waiting()
    group = ranks.join()
    out, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    found = {}
    for case in cases:
        if "load" in case:
            found["load"] = loaded(group, case["load"])
            continue
        if "texts" in case:
            found[case["name"]] = texts(group, case["texts"])
            continue
        found[case.get("name", case["family"])] = answers(group, **{k: v for k, v in case.items() if k != "name"})
        mx.clear_cache()
    (out / f"rank-{group.rank}.json").write_text(json.dumps(found))
