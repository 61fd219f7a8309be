"""Random schedules of requests that share a batch, and the check that each gets what it gets alone.

By hand: `python tests/support/schedules.py COUNT SEED` runs COUNT schedules from SEED on and says where one differs.
`python tests/support/schedules.py --soak ROUNDS SEED` runs one batch for so many rounds, with requests that come and leave all
the time; fails where what MLX holds at any end of eight parts but the first is more than at the end of the second by 1 MB.
"""

import gc
import json
import random
import resource
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx
from families import V, family, greedy_line, known_drafter
from kit import DATA, TINY, Shuffled, ids_of, letters, references, variant
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from dflash_mlx import load, make_prompt_cache, stream_generate
from dflash_mlx.batch.generator import BatchGenerator
from dflash_mlx.config import DrafterConfig
from dflash_mlx.distribution import Distribution
from dflash_mlx.loading import make_drafter
from dflash_mlx.pair import DFlashPair
from dflash_mlx.prompt_cache import PairCache
from dflash_mlx.rollback import leaves

LONGEST = 20
# Full and sliding entries, a gated delta rule, Mamba, a short convolution, MLA, shared keys, attention of its own.
TARGETS = (
    *("llama", "llama, mixed windows", "gemma2", "gemma3", "gemma4", "cohere2", "deepseek_v3", "qwen3_next", "lfm2", "mamba2"),
    *("jamba", "plamo2"),
)
VARIANTS = tuple(sorted(path.stem for path in (DATA / "variants").glob("*.json")))
SETTINGS = (
    {},
    {"sampler": Distribution(0.9), "seed": 5},
    {"sampler": Distribution(1.3, top_k=9), "seed": 6},
    {"sampler": make_sampler(0.8, top_p=0.9), "seed": 7},
    {"logits_processors": make_logits_processors(repetition_penalty=1.4)},
    {"logits_processors": make_logits_processors(repetition_penalty=1.2), "sampler": Distribution(0.7), "seed": 8},
    {"sampler": Distribution(0.9), "seed": 9, "acceptance": "rejection"},
)


@dataclass
class Case:
    """A pair, prompts for it and what each gives alone. learns: its drafter is told the line that it drafts."""

    name: str
    model: object
    drafter: object
    vocabulary: int
    eos: int
    known: dict = field(default_factory=dict)

    @cached_property
    def prompts(self):
        chance = random.Random(self.name)
        return [[chance.randrange(1, self.vocabulary) for _ in range(n)] for n in (1, 2, 7, 18, 19, 40)]

    @property
    def blocks(self):
        return [2, 4, self.drafter.config.block_size]

    def alone(self, prompt, setting, block):
        """Tokens and rounds of a request alone, LONGEST tokens or to EOS; kept."""
        key = prompt, setting, block
        if key not in self.known:
            options = {**SETTINGS[setting], "block_size": block or self.blocks[-1], "draft_model": self.drafter}
            got = list(stream_generate(self.model, letters(self.eos), self.prompts[prompt], max_tokens=LONGEST, **options))
            self.known[key] = ids_of(got), [dict(r) for r in got[-1].stats.rounds]
        return self.known[key]

    def cache_alone(self, prompt, setting, block, n):
        """The prompt cache of a request alone that was left after n tokens."""
        options = {**SETTINGS[setting], "block_size": block, "draft_model": self.drafter}
        cache = make_prompt_cache(self.model, self.drafter)
        steps = stream_generate(
            self.model, letters(self.eos), self.prompts[prompt], max_tokens=LONGEST + 1, prompt_cache=cache, **options
        )
        for _ in range(n):
            next(steps)
        steps.close()
        return cache


def make_case(name):
    """A built-in drafter's variant, DFlash 2, or a family's target with a noisy drafter."""
    if name in TARGETS:
        model = family(name)
        # It knows one line: that of its longest prompt.
        case = Case(name, model, known_drafter(model, [(i * 31) % V for i in range(80)], block_size=6), V, 7)
        case.drafter._line = greedy_line(model, case.prompts[-1], LONGEST + 1)
        return case
    model, _ = load("tiny", dtype=mx.float32)
    if name == "tiny":
        return Case(name, model, make_drafter(*_tiny(), model), 1536, 11)
    if name == "dflash2":
        reference = references(DATA / "dflash2" / "rounds.json")
        weights = dict(mx.load(str(TINY / "drafter" / "model.safetensors"))) | dict(
            mx.load(str(DATA / "dflash2" / "extra.safetensors"))
        )
        return Case(name, model, make_drafter(DrafterConfig.from_dict(reference["config"]), weights, model), 1536, 11)
    return Case(name, model, variant(model, references(DATA / "variants" / f"{name}.json")["config"]), 1536, 11)


def _tiny():
    config = json.loads((TINY / "drafter" / "config.json").read_text())
    return DrafterConfig.from_dict(config), dict(mx.load(str(TINY / "drafter" / "model.safetensors")))


NAMES = ("tiny", "dflash2", *VARIANTS, *TARGETS)


@dataclass
class Request:
    prompt: int
    setting: int
    block: int | None
    most: int
    arrives: int
    leaves: int | None
    copies: bool | None = None
    uid: int = -1
    ids: list = field(default_factory=list)
    cache: list = None
    stats: object = None
    ended: str | None = None


@contextmanager
def any_widths(chance):
    """Requests without a block size take any width, and drafts from the text, as no clock says."""
    before = DFlashPair.draft_length_policy

    def policy(self, stream):
        return Shuffled(self.drafter.config.block_size - 1, chance.random(), copies=chance.random() < 0.5)

    DFlashPair.draft_length_policy = policy
    try:
        yield
    finally:
        DFlashPair.draft_length_policy = before


def run_schedule(case, seed):
    """Run the schedule of a seed. Returns: what differs from requests alone, in words."""
    chance = random.Random(seed)
    requests = [
        Request(
            chance.randrange(len(case.prompts)),
            chance.randrange(len(SETTINGS)),
            chance.choice([None, *case.blocks]),
            chance.randint(1, LONGEST),
            chance.choice([0, 0, chance.randint(0, 12)]),
            chance.randint(0, 8) if chance.random() < 0.3 else None,
        )
        for _ in range(chance.randint(2, 6))
    ]
    step = chance.choice([3, 16, None])
    with any_widths(chance):
        batch = BatchGenerator(case.model, letters(case.eos), case.drafter, max_batch=chance.randint(1, 5))
        if random.Random(-seed).random() < 0.3:
            # Rounds that draft nothing begin ahead.
            batch.policy.plan = lambda rows: [setattr(row, "width", 0) for row in rows] and 0
            for request in requests:
                request.setting, request.block, request.copies = request.setting % 4, None, False
        _serve(batch, case, requests, step)
    assert not len(batch)
    return [fault for request in requests for fault in _faults(case, request, chance)]


def _serve(batch, case, requests, step):
    turn, left, by_uid = 0, sorted(requests, key=lambda r: r.arrives), {}
    while left or len(batch):
        while left and left[0].arrives <= turn:
            request = left.pop(0)
            options = {**SETTINGS[request.setting], "block_size": request.block, "prefill_step_size": step}
            options["prompt_lookup"] = request.copies
            request.uid = batch.insert(case.prompts[request.prompt], max_tokens=request.most, **options)
            by_uid[request.uid] = request
        for response in batch.next():
            request = by_uid[response.uid]
            assert response.error is None, response.error
            request.ids.append(response.token)
            request.stats = response.stats
            if response.finish_reason:
                request.ended, request.cache = response.finish_reason, response.prompt_cache
        for request in by_uid.values():
            # Also while it waits or is being read.
            if request.leaves is not None and not request.ended and len(request.ids) >= request.leaves:
                request.ended, request.cache = "left", batch.remove(request.uid)
        turn += 1


def _faults(case, request, chance):
    about = f"{case.name} {request.prompt} {request.setting} {request.block} {request.most}"
    ids, rounds = case.alone(request.prompt, request.setting, request.block)
    n = len(request.ids)
    if request.ids != ids[:n] or request.ended != "left" and n != min(len(ids), request.most):
        yield f"{about}: {request.ids} for {ids[: request.most]}"
    prompt = case.prompts[request.prompt]
    held = PairCache.read(request.cache).ids if request.cache is not None else None
    if held is not None and held != [*prompt, *request.ids][: len(held)] or n and len(held) != len(prompt) + n:
        yield f"{about}: its cache holds {held}"
    if request.block is None or not request.stats:
        return
    mine = [dict(r) for r in request.stats.rounds]
    if mine != rounds[: len(mine)]:
        yield f"{about}: rounds {mine} for {rounds[: len(mine)]}"
    if n and chance.random() < 0.3:
        alone = case.cache_alone(request.prompt, request.setting, request.block, n)
        if not same_caches(request.cache, alone):
            yield f"{about}: its cache after {n} tokens is not that of a run alone"


def same_caches(a, b):
    """Whether two pair caches hold the same rows, and the same wait for the drafter. A recurrence replays another number of rows
    where a request was alone for a while: so much may its states, and what follows from them, be off."""
    a, b = PairCache.read(a), PairCache.read(b)
    if (a.ids, a.rows, a.pending) != (b.ids, b.rows, b.pending):
        return False
    pairs = zip(leaves([*a.target, *a.drafter]), leaves([*b.target, *b.drafter]), strict=True)
    return all(_near(_held(x), _held(y)) for x, y in pairs) and _near([a.features], [b.features])


def _held(entry):
    """What later rows see of an entry, in the order of the text."""
    if hasattr(entry, "cache"):
        return entry.cache
    if entry.keys is None:
        return []
    if isinstance(entry, RotatingKVCache):
        rows = min(entry.offset, entry.max_size - 1)
        return [entry._temporal_order(array)[..., -rows:, :] for array in (entry.keys, entry.values)]
    return [array[..., : entry.offset, :] for array in (entry.keys, entry.values)]


def _near(a, b):
    if len(a) != len(b):
        return False
    return all(
        x is y is None or x.shape == y.shape and mx.allclose(x, y, rtol=1e-4, atol=1e-5).item() for x, y in zip(a, b, strict=True)
    )


def main(count, seed):
    cases, wrong = {}, 0
    for i in range(count):
        name = NAMES[i % len(NAMES)]
        case = cases.setdefault(name, None) or cases.update({name: make_case(name)}) or cases[name]
        for fault in run_schedule(case, seed + i):
            wrong += 1
            print(f"seed {seed + i}: {fault}", flush=True)
        if i % 50 == 49:
            print(f"{i + 1} schedules, {wrong} faults", flush=True)
    return wrong


def soak(rounds, seed, name="llama", told=print):
    """Bytes that MLX holds and the process's peak of memory, in MB, behind each eighth of so many rounds of one batch."""
    case, chance, figures = make_case(name), random.Random(seed), []
    batch, counts = BatchGenerator(case.model, letters(case.eos), case.drafter, max_batch=6), Counter()
    with batch.open():
        for turn in range(1, rounds + 1):
            if len(batch) < 7 and chance.random() < 0.3:
                prompt = chance.choice(case.prompts) * chance.choice([1, 1, 3, 12])
                options = {**SETTINGS[chance.randrange(len(SETTINGS))], "block_size": chance.choice([None, *case.blocks])}
                counts["come"] += 1
                batch.insert(prompt, max_tokens=chance.randint(1, 60), keep_rounds=False, **options)
            if len(batch) and chance.random() < 0.05:
                counts["left"] += 1
                batch.remove(chance.choice([*batch.rows, *batch.waiting]).uid)
            for response in batch.next():
                assert response.error is None, response.error
                counts["tokens"] += 1
            if turn % (rounds // 8) == 0:
                # What is left when nobody is there: requests beside each other would hide it.
                batch.close()
                gc.collect()
                mx.clear_cache()
                figures.append((mx.get_active_memory() / 1e6, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3))
                told(f"{turn} rounds: MLX {figures[-1][0]:.2f} MB, peak {figures[-1][1]:.0f} MB, {dict(counts)}", flush=True)
    return figures


def is_flat(figures):
    return max(held for held, _ in figures[2:]) <= figures[1][0] + 1


if __name__ == "__main__":
    if sys.argv[1] == "--soak":
        sys.exit(not is_flat(soak(int(sys.argv[2]), int(sys.argv[3]))))
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]))))
