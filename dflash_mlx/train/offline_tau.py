"""tau without decoding: replay the rounds on the target's known text with the drafter, block by block.

A run that commits the target's own tokens takes the same path whatever the drafter says, so on text that the target wrote
the rounds of generation can be replayed: draft at the anchor, count the leading tokens that match, go on after them.
All documents go at once and the context is read once. Greedy text gives tau at temperature 0; text sampled at
temperature T gives it for one-hot drafts and sample-and-match acceptance at T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ..draft_length.prompt_lookup import PromptLookup
from ..models.drafter import Drafter
from ..models.target import Target
from ..progress import tell
from ..sampling import Distribution, noise_at
from .docs import Docs
from .forward import context_keys_values, slot_hidden
from .prompts import KINDS

# Drafts [n, K - 1] for documents that stand at `at`: (ids [B, S], at [n], rows [n]) -> [n, K - 1]
Guess = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass
class Replay:
    """Rounds of one document: accepted tokens in each, in order. Rounds that the text's end cut short are left out."""

    accepted: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Mean of accepted + 1 over the rounds."""
        return float(np.mean(self.accepted)) + 1 if self.accepted else float("nan")


def answer_span(answer: np.ndarray, max_tokens: int | None) -> tuple[int, int]:
    """First answer: where it starts and ends, at most `max_tokens` of it."""
    first = int(answer.argmax())
    stop = first + int(np.argmin(np.append(answer[first:], False)))
    return first, stop if max_tokens is None else min(stop, first + max_tokens)


def replay_with(guess: Guess, ids: np.ndarray, spans: Sequence[tuple[int, int]], K: int) -> list[Replay]:
    """Replay the rounds with any source of drafts.

        text      ... p | t0 t1 t2 t3 t4 ...     t0 is the anchor (prefill's own token); drafts d1 d2 d3 for t1 t2 t3;
                        anchor                   with d1 d2 right, accepted = 2 and t3 is the bonus: the next anchor

    Shapes:
      - ids: [B, S]; spans: first and one past last known answer id of each document
    """
    replays = [Replay() for _ in spans]
    at, end = np.array([s for s, _ in spans]), np.array([e for _, e in spans])
    live = np.flatnonzero(at + 1 < end)
    padded = np.pad(ids, ((0, 0), (0, K)), constant_values=-1)
    while len(live):
        drafts = guess(ids, at[live], live)
        places = at[live][:, None] + np.arange(1, K)
        right = (drafts == padded[live[:, None], places]) & (places < end[live][:, None])
        accepted = np.cumprod(right, axis=1).sum(1)
        known = end[live] - 1 - at[live]  # drafts that the text can judge
        for n, i in enumerate(live):
            if accepted[n] < min(known[n], K - 1) or known[n] >= K - 1:
                replays[i].accepted.append(int(accepted[n]))
        at[live] += accepted + 1
        live = live[at[live] + 1 < end[live]]
    return replays


@dataclass(frozen=True)
class SharedNoise:
    """Drafts are drawn at `temp` by Gumbel-max, under the noise that the target's own draw at the position had.

    seeds: [B] of the documents. Their texts were drawn under `sampling.sample_at` with these, by Gumbel-max.
    """

    temp: float
    seeds: np.ndarray

    def rows(self, rows: np.ndarray, at: np.ndarray, slots: int, vocabulary: int) -> mx.array:
        """`Drafter.choose`'s noise for documents `rows` [n] that stand at `at` [n]: [n, slots, V]."""
        seeds = np.repeat(self.seeds[rows], slots)
        positions = (at[:, None] + np.arange(1, slots + 1)).ravel()
        return noise_at(seeds.tolist(), positions.tolist(), vocabulary).reshape(len(rows), slots, vocabulary)


def drafter_guess(
    drafter: Drafter,
    target: Target,
    ids: np.ndarray,
    K: int,
    zero_features: bool = False,
    docs_at_once: int = 64,
    noise: SharedNoise | None = None,
) -> Guess:
    """Drafts of a drafter for the documents `ids` [B, S]: the target reads them once, here. Without noise, its likeliest ones."""
    parts = []
    for start in range(0, len(ids), docs_at_once):
        features = target(mx.array(ids[start : start + docs_at_once])).features
        parts.append(context_keys_values(drafter, features * 0 if zero_features else features))
        mx.eval(parts[-1])
    pairs = [tuple(mx.concatenate([p[layer][j] for p in parts]) for j in range(2)) for layer in range(len(drafter.layers))]
    mx.eval(pairs)

    def guess(ids: np.ndarray, at: np.ndarray, rows: np.ndarray) -> np.ndarray:
        out = []
        for start in range(0, len(rows), docs_at_once):
            here, places = rows[start : start + docs_at_once], at[start : start + docs_at_once]
            part, anchors = mx.array(here), mx.array(places)[:, None]
            mine = [(k[part], v[part]) for k, v in pairs]
            hidden = slot_hidden(drafter, mx.array(ids[here]), anchors, mine, K)[:, 0]
            anchor = mx.array(ids[here, places])
            if noise is None:
                out.append(drafter.choose(hidden, anchor)[0])
            else:
                shared = noise.rows(here, places, K - 1, target.vocabulary)
                out.append(drafter.choose(hidden, anchor, Distribution(noise.temp).noised, shared)[0])
            mx.async_eval(out[-1])
        drafts = np.concatenate([np.array(o) for o in out])
        # Every round has fewer rows: buffers of each size would pile up.
        mx.clear_cache()
        return drafts

    return guess


def replay_docs(
    drafter: Drafter,
    target: Target,
    docs: Docs,
    K: int,
    max_tokens: int | None = 256,
    zero_features: bool = False,
    noise: SharedNoise | None = None,
) -> list[Replay]:
    """Replay the first answer of every document with a drafter; see `replay_with`."""
    spans = [answer_span(docs.doc(i)[1], max_tokens) for i in range(len(docs))]
    ids, _ = docs.pad(range(len(docs)), -(-max(e for _, e in spans) // 32) * 32)
    return replay_with(drafter_guess(drafter, target, ids, K, zero_features, noise=noise), ids, spans, K)


def lookup_guess(K: int) -> Guess:
    """Prompt lookup as in the loop (`draft_length.prompt_lookup`), used in every round, whether it gains or not."""
    lookups: dict[int, PromptLookup] = {}

    def guess(ids: np.ndarray, at: np.ndarray, rows: np.ndarray) -> np.ndarray:
        out = np.full((len(rows), K - 1), -1)
        for r, (row, end) in enumerate(zip(rows, at, strict=True)):
            lookup = lookups.setdefault(int(row), PromptLookup())
            if lookup.follow(ids[row, : end + 1].tolist()):
                out[r] = lookup.draft(K - 1)
        return out

    return guess


def bigram_guess(train: Docs, K: int) -> Guess:
    """A bigram table over the answers of the training text: always the most frequent successor."""
    ids, answer, ends = train.ids.astype(np.int64), train.answer, np.zeros(len(train.ids), bool)
    ends[train.starts[1:] - 1] = True
    pairs = np.flatnonzero(answer[1:] & ~ends[:-1])
    V = int(ids.max()) + 1
    codes, counts = np.unique(ids[pairs] * V + ids[pairs + 1], return_counts=True)
    order = np.argsort(counts, kind="stable")
    table = np.full(V, -1)
    table[codes[order] // V] = codes[order] % V  # the last write, the most frequent, stays

    def guess(ids: np.ndarray, at: np.ndarray, rows: np.ndarray) -> np.ndarray:
        out, last = np.full((len(rows), K - 1), -1), ids[rows, at].astype(np.int64)
        for k in range(K - 1):
            known = (last >= 0) & (last < V)
            last = np.where(known, table[np.where(known, last, 0)], -1)
            out[:, k] = last
        return out

    return guess


def perfect_guesses(target: Target, ids: np.ndarray, K: int, candidates: int = 16, docs_at_once: int = 8) -> dict[str, Guess]:
    """The drafts of perfect drafters for texts that the target drew, [B, S], from the target's own rows.

    Returns:
      - perfect_argmax: drafts the likeliest token of each of the target's rows
      - perfect_candidates: has the target's distribution over its best `candidates` tokens, and draws under the target's noise;
        then a draft is wrong only where the text's token is not among them
    """
    rank = np.full(ids.shape, target.vocabulary)
    for start in range(0, len(ids), docs_at_once):
        part = mx.array(ids[start : start + docs_at_once])
        rows = target.head(target(part).hidden)[:, :-1].astype(mx.float32)
        chosen = mx.take_along_axis(rows, part[:, 1:, None], axis=-1)
        rank[start : start + docs_at_once, 1:] = np.array((rows > chosen).sum(-1))
    rank = np.pad(rank, ((0, 0), (0, K)), constant_values=target.vocabulary)
    text = np.pad(ids, ((0, 0), (0, K)))

    def within(n: int) -> Guess:
        def guess(_: np.ndarray, at: np.ndarray, rows: np.ndarray) -> np.ndarray:
            places = rows[:, None], at[:, None] + np.arange(1, K)
            return np.where(rank[places] < n, text[places], -1)

        return guess

    return {"perfect_argmax": within(1), "perfect_candidates": within(candidates)}


def mean_tau(replays: Sequence[Replay]) -> float:
    """tau over all rounds of all documents."""
    rounds = [a for w in replays for a in w.accepted]
    return float(np.mean(rounds)) + 1 if rounds else float("nan")


def evaluate(
    drafter: Drafter, target: Target, held_out: Docs, train: Docs | None, block_sizes: Sequence[int], max_tokens: int | None = 256
) -> list[dict[str, Any]]:
    """tau on held-out text: per temperature, block size and kind, loops apart, beside zeroed features, lookup and bigrams.

    Returns: rows with temp, block_size, looped, kind, answers and tau of each source of drafts; above temperature 0 also of
      `perfect_guesses`.
    """
    rows = []
    for temp in np.unique(held_out.temp):
        for looped in (False, True):
            docs = held_out.pick((held_out.temp == temp) & (held_out.looped == looped))
            if not len(docs):
                continue
            spans = [answer_span(docs.doc(i)[1], max_tokens) for i in range(len(docs))]
            ids, _ = docs.pad(range(len(docs)), -(-max(e for _, e in spans) // 32) * 32)
            for K in block_sizes:
                tell(f"Measuring at temperature {temp:g}, block {K}")
                replays = {
                    "drafter": replay_docs(drafter, target, docs, K, max_tokens),
                    "zeroed": replay_docs(drafter, target, docs, K, max_tokens, zero_features=True),
                    "lookup": replay_with(lookup_guess(K), ids, spans, K),
                }
                if temp:
                    found = perfect_guesses(target, ids, K)
                    replays |= {name: replay_with(guess, ids, spans, K) for name, guess in found.items()}
                if train is not None:
                    replays["bigram"] = replay_with(bigram_guess(train, K), ids, spans, K)
                for kind in np.unique(docs.kind):
                    mine = docs.kind == kind
                    taus = {n: mean_tau([w for w, m in zip(ws, mine, strict=True) if m]) for n, ws in replays.items()}
                    row = {"temp": float(temp), "block_size": K, "looped": looped, "kind": KINDS[kind]}
                    rows.append(row | {"answers": int(mine.sum())} | taus)
    return rows
