"""A simulated machine for the draft-length policy: a table of costs, an acceptance process with a seed.

Times are simulated: nothing here depends on how busy the machine is.
"""

import functools
import math
import random

from dflash_mlx.draft_length.acceptance import AcceptanceRate
from dflash_mlx.draft_length.cost_model import CostModel
from dflash_mlx.draft_length.policy import DraftLengthHistory, DraftLengthPolicy, FixedDraftLength
from dflash_mlx.draft_length.prompt_lookup import PromptLookup

MOST = 15


def logit(p):
    return math.log(p / (1 - p))


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def stairs(w):
    """Kernels that work by 4, 8 and 16 rows."""
    return 6.0 if w < 4 else 9.0 if w < 8 else 14.0


# Milliseconds: one plain token, one drafter pass, a target pass over w + 1 rows.
MACHINES = {
    "flat": (5.3, 3.0, lambda w: 6.1 + 0.7 * w / 15),
    "quantized": (6.0, 3.0, lambda w: 6.0 + 8.3 * w / 15),
    "every row costs one": (2.7, 7.0, lambda w: 2.7 * (1 + 0.55 * w)),
    "every row costs one, cheap drafter": (2.7, 0.5, lambda w: 2.7 * (1 + 0.55 * w)),
    "stairs": (6.0, 1.5, stairs),
}
# Chance that a slot is accepted if those before it are, by tokens so far and slot.
PROCESSES = {
    "hopeless": lambda t, i: 0.03,
    "fair": lambda t, i: 0.75 * 0.97**i,
    "good": lambda t, i: 0.9,
    "bad, then good": lambda t, i: 0.05 if t < 2000 else 0.9,
    "good, then bad": lambda t, i: 0.9 if t < 2000 else 0.05,
}
# What the drafter says it is sure of, by the true chance of a slot in this round.
TELLS = {
    "of the truth": lambda c, chance: sigmoid(logit(c) + chance.gauss(0, 0.5)),
    "of anything": lambda c, chance: chance.random(),
    "of all": lambda c, chance: c**0.1,
    "of the opposite": lambda c, chance: 1 - c,
}
SETTINGS = [(machine, process) for machine in MACHINES for process in PROCESSES]
# Texts in which stretches of earlier text stand again: by tokens so far, the chance that one begins, and that it goes on.
COPIES = {
    "never": lambda t: (0.0, 0.0),
    "seldom": lambda t: (0.02, 0.9),
    "often": lambda t: (0.05, 0.97),
    "in short": lambda t: (0.1, 0.6),
    "long, then short": lambda t: (0.05, 0.97) if t < 1500 else (0.15, 0.5),
    "short, then long": lambda t: (0.15, 0.5) if t < 1500 else (0.05, 0.97),
}


def repeating(process, seed, tokens=4000, prompt=300):
    """A prompt and as many tokens in which stretches stand again."""
    chance, source = random.Random(seed), 0
    ids = [chance.randrange(5000) for _ in range(prompt)]
    while len(ids) < prompt + tokens:
        begins, goes_on = process(len(ids) - prompt)
        if source and chance.random() < goes_on:
            source += 1
        else:
            source = chance.randrange(1, len(ids)) if chance.random() < begins else 0
        ids.append(ids[source] if source else chance.randrange(5000))
    return ids


class Simulation:
    """Runs rounds of the widths that `rule` chooses, until `tokens` are committed; adds up what they take.

    caller: what the consumer takes for a token; only a plain pass after a plain one runs meanwhile.
    text: what is committed, after 300 tokens of prompt, where drafts may be copied from it.
    tells: a drafter that says how sure it is; then a slot's chance differs from round to round round that of the process.
    cut: what a cut takes.
    """

    def __init__(
        self, machine, process, rule, seed, tokens=6000, noise=0.05, inject=0.02, caller=0.0, text=None, tells=None, cut=0.1
    ):
        plain, draft, verify = machine
        chance, lookup, ids = random.Random(seed), PromptLookup(), text[:300] if text else []
        self.seconds, self.switching, self.tried, self.widths, pending, before = 0.0, 0.0, 0.0, [], 0, None
        self.copied, self.confidence_cut, drafts = [], [], random.Random(seed + 1000)
        t, tokens = 0, len(text) - 300 if text else tokens
        while t < tokens:
            w = rule.next_length(pending)
            c = rule.prompt_lookup_width(w, lookup.rates(MOST)) if text and lookup.follow(ids) else 0
            accepted, more, late, confidence, confidence_cut, drafted = 0, False, 0.0, None, False, bool(w and not c)
            waits = False
            at = [process(t, i) for i in range(MOST)] if drafted else ()
            if tells and drafted:
                luck = drafts.gauss(0, 1)
                at = [sigmoid(logit(p) + 1.5 * luck + 1.5 * drafts.gauss(0, 1)) for p in at]
                says = [tells(p, drafts) for p in at]
                confidence, confidence_cut = says if rule.wants_confidence else None, rule.cuts_by_confidence
                w = rule.confidence_cut(says) if confidence_cut else w
                # The loop times one round in 64 apart, with the same wait.
                waits = confidence_cut or len(self.widths) % 64 == 1
            right = 0
            while drafted and right < MOST and chance.random() < at[right]:
                right += 1
            passes = verify(c) if c else draft + verify(w) + cut * waits if drafted else plain
            seconds = passes * chance.uniform(1 - noise, 1 + noise)
            if c:
                rest = text[len(ids) :]
                while accepted < min(c, len(rest)) and lookup.draft(c)[accepted] == rest[accepted]:
                    accepted += 1
                self.copied.append((c, accepted))
                w, pending = c, pending + accepted + 1
            elif drafted:
                accepted, more = min(w, right), right > w
                # What the drafter was not given while it was not used.
                late, pending = max(pending - MOST, 0) * inject, accepted + 1
                if getattr(rule, "_trying", False):
                    self.tried += max(seconds + late - (accepted + 1) * plain, 0)
            else:
                pending += 1
            # A plain pass after a drafting round is not enqueued ahead.
            kind = "confidence_cut" if confidence_cut else w
            late += 0.3 if not drafted and not c and before else 0.0
            self.switching += late
            if kind == before == 0:
                seconds = max(seconds - caller, 0.01 * plain)
            self.seconds += seconds + late + caller * (accepted + 1)
            if text:
                ids += text[len(ids) : len(ids) + accepted + 1]
            t += accepted + 1
            self.widths.append(w)
            self.confidence_cut.append(confidence_cut)
            rule.observe(w, accepted, more, seconds + late, kind == before, bool(c), confidence, waits)
            before = kind


def rule_for(machine, off=1.0, plain_off=1.0, cut=0.1):
    """`off`, `plain_off`: how wrong the measured costs of drafting and of plain decoding are; cut: the measured price."""
    plain, draft, verify = machine
    costs = CostModel(plain * plain_off, draft * off, 0.02, {w: verify(w) * off for w in range(1, 16)}, cut)
    return DraftLengthPolicy(MOST, AcceptanceRate(MOST), costs, None)


@functools.cache
def best_fixed(machine, process, seeds=(1, 2), **how):
    totals = [[Simulation(machine, process, FixedDraftLength(w), seed, **how).seconds for seed in seeds] for w in range(MOST + 1)]
    return min(sum(runs) / len(seeds) for runs in totals)


def answers(monkeypatch, machine, process, n, tokens=128, slow=1.0, seed=1, **how):
    """Answers of one drafter, each with a rule of its own; the first four rounds that verify drafts take `slow` times as long."""
    costs, (plain, draft, verify), rounds = rule_for(machine).cost_model, machine, []
    history = DraftLengthHistory()

    def slow_at_first(w):
        rounds.append(w)
        return verify(w) * (slow if len(rounds) <= 4 else 1)

    for i in range(n):
        rule = history.next_policy(MOST, lambda: costs)
        yield Simulation((plain, draft, slow_at_first), process, rule, 1000 * seed + i, tokens=tokens, **how)
