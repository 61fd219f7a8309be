"""How many texts of several ranks are those of one process, or of the same ranks without drafts, and how near the two best
tokens lie where one parts: `python tests/support/near_ties.py RANKS TEXTS [SEED]`, from the root.

Drafted texts are compared with plain ones of one process; on more than two ranks with plain ones of the same ranks too (on two
these are the same bits, which a test holds). Each prompt is answered ten times together: once greedily, and with nine seeds.
"""

import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
from families import Known, some_line
from kit import run
from launching import output_of
from sharded import sharded_family

from dflash_mlx.distribution import Distribution
from dflash_mlx.sampling import KeyedNoise

NEAR = 1e-3
FAMILIES, LAYERS, TOKENS, ROWS = ("llama", "qwen3", "qwen3_moe"), 3, 16, 10


def gaps(responses, start, sampler=None, seed=None):
    """How far the two best choices of each token lie apart, noise included. start: the first one's position."""
    found = []
    for i, response in enumerate(responses):
        scores = response.logprobs
        if sampler is not None:
            scores = sampler.noised(scores, KeyedNoise(seed).rows(start + i, 1, scores.size)[0])
        assert int(mx.argmax(scores)) == response.token
        best = mx.sort(scores)[-2:].tolist()
        found.append(best[1] - best[0])
    return found


def parting(ids, reference, apart):
    """[place, how far the two best choices lie apart there] where ids leave the reference's; None: nowhere."""
    return next(([i, apart[i]] for i, (a, b) in enumerate(zip(ids, reference, strict=True)) if a != b), None)


class KnownLines(Known):
    """Drafts the line that has the anchor at its place, three tokens of ten wrong."""

    def draft(self, anchor, features, cache, start, block_size):
        self.inject(features, cache, start)
        at = start + features.shape[1]
        line = self._lines[mx.argmax(self._lines[:, min(at, self._lines.shape[1] - 1)] == anchor.reshape(1))]
        known = [line[min(i, line.size - 1)] + int(not self.right(i)) for i in range(at + 1, at + block_size)]
        return (mx.stack(known)[None] % 66).astype(mx.int32)


def prompt_of(text):
    """The prompt of ten texts, and its whole model."""
    group = text // ROWS
    return some_line(12 + group, 66)[group:], sharded_family(FAMILIES[group % len(FAMILIES)], 100 + group, layers=LAYERS)


def drawing(text):
    """The arguments that a text is sampled with; none for the first of ten."""
    return {"sampler": Distribution(0.4), "seed": text} if text % ROWS else {}


def alone(text):
    """A text of one process without a drafter, and its gaps."""
    prompt, model = prompt_of(text)
    responses = run(model, None, prompt, TOKENS, **drawing(text))
    return [r.token for r in responses], gaps(responses, len(prompt), **drawing(text))


def compare(ranks, texts, out):
    """Where texts part, in words: against one process, and on more than two ranks against plain ones of the same ranks.

    Returns: {what they are compared with: [parting or None for each text]}, and the mean number of accepted drafts a round.
    """
    worker = Path(__file__).parent / "over_ranks.py"
    cases = [{"name": str(i), "texts": i} for i in range(texts.start, texts.stop, ROWS)]
    said = output_of(ranks, worker, out, json.dumps(cases), timeout=3600)
    files = sorted(out.glob("rank-*.json"))
    assert len(files) == ranks, said
    by_rank = [json.loads(file.read_text()) for file in files]
    rows = [[{k: row[k] for k in row if k != "apart"} for group in one.values() for row in group] for one in by_rank]
    assert all(a == b for a, b in pairwise(rows)), "ranks differ"
    found, kept = {"one process": []}, []
    for text, row in zip(texts, (row for group in by_rank[0].values() for row in group), strict=True):
        kept += [round_[1] for round_ in row["drafted"]["rounds"] if round_[3]]
        found["one process"].append(parting(row["drafted"]["ids"], *alone(text)))
        if "plain" in row:
            apart = parting(row["drafted"]["ids"], row["plain"]["ids"], row["apart"])
            found.setdefault("plain ones of the same ranks", []).append(apart)
    return found, sum(kept) / len(kept)


def main(ranks, texts, seed=0):
    mx.set_default_device(mx.cpu)
    with tempfile.TemporaryDirectory() as out:
        found, kept = compare(ranks, range(seed, seed + texts), Path(out))
    print(f"{texts} texts of {TOKENS} tokens on {ranks} ranks, {kept:.2f} of 4 drafts accepted a round")
    for what, partings in found.items():
        apart = {seed + i: at for i, at in enumerate(partings) if at is not None}
        print(f"against {what}: {len(partings) - len(apart)} equal throughout")
        for text, (place, gap) in apart.items():
            print(f"  text {text} parts at token {place}, where the two best lie {gap:.1e} apart")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
