"""Training text as stored and as batches: conversations end to end, shards of them, batches with anchors.

Knows arrays and files; knows nothing of how text is written, nor of drafters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..errors import CheckpointError, ConfigError
from ..machine import write_atomically


@dataclass
class Docs:
    """Conversations end to end, and one value of each kind for each of them."""

    ids: np.ndarray  # [total]
    answer: np.ndarray  # [total] bool: written by the target as an answer, EOS included
    starts: np.ndarray  # [n + 1]
    kind: np.ndarray  # [n] index into KINDS
    family: np.ndarray  # [n] index into FAMILIES; 255: from a file
    temp: np.ndarray  # [n]
    looped: np.ndarray  # [n] bool: the answer fell into a loop and was cut after its third round
    split: np.ndarray  # [n] TRAIN or RESERVED

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def answer_tokens(self, max_len: int | None = None) -> int:
        """Tokens of answers, of conversations cut to max_len."""
        if max_len is None:
            return int(self.answer.sum())
        places = np.arange(len(self.ids)) - np.repeat(self.starts[:-1], self.lengths)
        return int((self.answer & (places < max_len)).sum())

    def doc(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and answer flags of one conversation."""
        part = slice(self.starts[i], self.starts[i + 1])
        return self.ids[part], self.answer[part]

    def pad(self, docs: Sequence[int], S: int) -> tuple[np.ndarray, np.ndarray]:
        """Conversations cut or filled on the right to S ids: ids [B, S] int32, answer [B, S] bool."""
        ids, answer = np.zeros((len(docs), S), np.int32), np.zeros((len(docs), S), bool)
        for row, i in enumerate(docs):
            one, flags = self.doc(i)
            ids[row, : len(one)], answer[row, : len(one)] = one[:S], flags[:S]
        return ids, answer

    def pick(self, which: np.ndarray) -> Docs:
        """The conversations at these places (or where this is true), in this order."""
        which = np.flatnonzero(which) if which.dtype == bool else which
        parts = [self.doc(i) for i in which]
        starts = np.concatenate([[0], np.cumsum([len(p[0]) for p in parts])]).astype(np.int64)
        ids = np.concatenate([p[0] for p in parts]) if parts else self.ids[:0]
        answer = np.concatenate([p[1] for p in parts]) if parts else self.answer[:0]
        rest = {name: getattr(self, name)[which] for name in ("kind", "family", "temp", "looped", "split")}
        return Docs(ids, answer, starts, **rest)

    @staticmethod
    def join(parts: Sequence[Docs]) -> Docs:
        offsets = np.cumsum([0] + [p.starts[-1] for p in parts])
        starts = np.concatenate([[0]] + [p.starts[1:] + o for p, o in zip(parts, offsets[:-1], strict=True)])
        fields = ("ids", "answer", "kind", "family", "temp", "looped", "split")
        return Docs(starts=starts, **{name: np.concatenate([getattr(p, name) for p in parts]) for name in fields})

    def save(self, path: Path) -> None:
        """A shard is whole or absent."""
        arrays = {**asdict(self), "answer": np.packbits(self.answer), "starts": self.starts.astype(np.uint32)}
        write_atomically(path, lambda part: np.savez(part, **arrays))

    @staticmethod
    def load(path: Path) -> Docs:
        try:
            with np.load(path) as z:
                got = {name: z[name] for name in z.files}
            got["answer"] = np.unpackbits(got["answer"], count=len(got["ids"])).astype(bool)
            got["starts"] = got["starts"].astype(np.int64)
            return Docs(**got)
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise CheckpointError(f"{path} is no whole shard of training text: {e}", "Delete it and make it again") from e


def load_docs(*folders: str | Path, names: str = "train-*.npz") -> Docs:
    """All conversations of data directories, in their order (or of their `heldout.npz` alone)."""
    parts = []
    for folder in folders:
        paths = sorted(Path(folder).glob(names))
        if not paths:
            begun = (Path(folder) / "meta.json").exists()
            todo = "Run the same `train data` command again to finish it." if begun else "First: dflash-mlx train data."
            raise CheckpointError(f"{folder} has no files {names}", todo)
        parts += [Docs.load(p) for p in paths]
    return Docs.join(parts)


def choose_anchors(rng: np.random.Generator, answer: np.ndarray, A: int) -> tuple[np.ndarray, np.ndarray]:
    """A places in each document where a block may start, without repeats, sorted; fewer if there are fewer.

    A block may start at any answer id that an answer id follows: the first one is the block after prefill.

    Shapes:
      - answer: [B, S] bool
    Returns:
      - anchors: [B, A] int32; keep: [B, A] bool
    """
    valid = answer[:, :-1] & answer[:, 1:]
    draw = np.where(valid, rng.random(valid.shape), 2.0)
    if draw.shape[1] < A:
        draw = np.pad(draw, ((0, 0), (0, A - draw.shape[1])), constant_values=2.0)
    chosen = np.sort(np.argpartition(draw, A - 1, axis=1)[:, :A], axis=1)
    keep = np.take_along_axis(draw, chosen, axis=1) < 2.0
    return np.where(keep, chosen, 0).astype(np.int32), keep


def batches(
    docs: Docs, B: int, A: int, max_len: int, seed: int, bucket: int = 128, skip: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]]:
    """Endless batches of documents of like length, each document once an epoch, anchors drawn anew each time.

    What batch n holds follows from the seed and n alone; `skip` starts after that many of them.

    Yields: ids [B, S] int32, answer [B, S] bool, anchors [B, A] int32, keep [B, A] bool, temps [B] float32, epoch. S is a
      multiple of `bucket`.
    """
    widths = np.minimum(-(-docs.lengths // bucket) * bucket, max_len)
    n = epoch = 0
    if len(docs) < B:
        raise ConfigError(f"there are {len(docs)} conversations, and one batch takes {B}", "Make more data or lower batch")
    waiting: dict[int, list[int]] = {}
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(len(docs))
        for i in order:
            width = int(widths[i])
            waiting.setdefault(width, []).append(int(i))
            if len(waiting[width]) < B:
                continue
            chosen = waiting.pop(width)
            n += 1
            if n <= skip:
                continue
            ids, answer = docs.pad(chosen, width)
            anchors, keep = choose_anchors(np.random.default_rng((seed, 1 << 20, n)), answer, A)
            yield ids, answer, anchors, keep, docs.temp[chosen].astype(np.float32), epoch
        epoch += 1
