"""Training text: make it with the target, filter it and store it.

A data directory holds `meta.json`, shards `train-00000.npz`, ... and `heldout.npz`; 2 bytes an id for vocabularies up to
65,536. Each shard depends only on the seed and its number, so a stopped run continues with the next one.
Knows files and what the text must look like; knows nothing of drafters.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ..errors import ConfigError, differences
from ..machine import write_atomically
from ..progress import tell
from .docs import Docs, load_docs
from .prompts import FAMILIES, FAMILY_IDS, KINDS, Pools, chat_ids, make_frame, read_prompts
from .rollout import Frame, Row, Written, quick_switches, write_rows

TRAIN, RESERVED = 0, 1  # RESERVED: seen families, new questions; feeds the held-out templates and is never trained on


@dataclass(frozen=True)
class DataConfig:
    """How to make a corpus. Shares are of conversations; `rows` are decoded at once.

    looped_share: at most this share of the training text may be answers that end in a loop; of other looping answers the loop is
    cut off. A loop is drafted almost for free and teaches little, but a small model decoded greedily loops often, so
    a served drafter meets some.
    """

    rows: int = 256
    max_len: int = 512
    user_limit: int = 160
    self_made: float = 0.7
    greedy: float = 0.8
    two_turns: float = 0.25
    min_answer: int = 16
    looped_share: float = 0.05
    held_out_per_kind: int = 128
    seed: int = 0


def loop_cuts(ids: np.ndarray, answer: np.ndarray, max_period: int = 96, least: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Where the first round of a repetition ends in each row, and the third; the row's width where there is none.

        a b c x y x y x y x y      period 2: the run of ids equal to the one 2 before starts at the 2nd x; cut when that
                 |      |          run is 2 periods long (three rounds) and at least `least` ids long

    Shapes:
      - ids: [B, T]; answer: [B, T] bool (rounds count only inside answers)
    Returns:
      - [B] int each: number of ids to keep without the repetition, and with three rounds of it
    """
    B, T = ids.shape
    once, cut, place = np.full(B, T), np.full(B, T), np.arange(T)
    # What is no answer equals nothing.
    said = np.where(answer, ids, -1 - place)
    columns = np.ascontiguousarray(said.T)
    for period in range(1, min(max_period, T - 1) + 1):
        long = max(2 * period, least)
        rows = np.flatnonzero(_may_repeat(columns, period, long, cut))
        same = np.zeros((len(rows), T), bool)
        same[:, period:] = said[rows, period:] == said[rows, :-period]
        run = place - np.maximum.accumulate(np.where(same, -1, place), axis=1)
        for row, lengths in zip(rows, run, strict=True):
            ends = np.flatnonzero(lengths >= long)
            if len(ends) and ends[0] + 1 < cut[row]:
                once[row], cut[row] = ends[0] + 1 - lengths[ends[0]], ends[0] + 1
    return once, cut


def _may_repeat(columns: np.ndarray, period: int, long: int, before: np.ndarray) -> np.ndarray:
    """Rows that may have a run of `long` ids equal to those `period` before: four of them are looked at, a quarter of it apart.

    Shapes:
      - columns: [T, B] ids; before: [B] int, where the run must have ended
    Returns:
      - [B] bool; False where there is no such run
    """
    step = long // 4
    same = columns[period::step] == columns[:-period:step]
    same &= np.arange(period, len(columns), step)[:, None] < before
    return (same[3:] & same[2:-1] & same[1:-2] & same[:-3]).any(0)


def _repeated(ids: np.ndarray, n: int = 4) -> float:
    """Share of n-grams that occurred before."""
    if len(ids) < n + 1:
        return 0.0
    grams = {ids[i : i + n].tobytes() for i in range(len(ids) - n + 1)}
    return 1 - len(grams) / (len(ids) - n + 1)


@dataclass
class _Filter:
    """Filters text: keeps what is worth learning, and remembers what it has seen.

    looped_share: how much of what it keeps may be loops. kept, loops: conversations so far.
    """

    config: DataConfig
    frame: Frame
    special: frozenset[int]
    looped_share: float = 1.0
    seen: set[bytes] = field(default_factory=set)
    kept: int = 0
    loops: int = 0

    def remember(self, ids: np.ndarray, first: int) -> bool:
        """True when neither this question nor this start of an answer came before."""
        keys = [
            hashlib.blake2b(part.astype(np.int32).tobytes(), digest_size=8).digest()
            for part in (ids[:first], ids[first : first + 32])
        ]
        new = not any(k in self.seen for k in keys)
        self.seen.update(keys)
        return new

    @property
    def has_room(self) -> bool:
        """Whether one more loop may be kept."""
        return self.loops + 1 <= self.looped_share * (self.kept + 1)

    def count(self, looped: bool) -> None:
        self.kept, self.loops = self.kept + 1, self.loops + looped

    def __call__(self, written: Sequence[Written], kinds, families, splits, dtype) -> Docs:
        width = max((len(w.ids) for w in written), default=1)
        ids = np.zeros((len(written), width), np.int32)
        answer = np.zeros((len(written), width), bool)
        for i, w in enumerate(written):
            ids[i, : len(w.ids)], answer[i, : len(w.ids)] = w.ids, w.answer
        once, cuts = loop_cuts(ids, answer)
        parts, kept, looped = [], [], []
        for i, w in enumerate(written):
            n = min(len(w.ids), int(cuts[i]))
            one, flags = w.ids[:n], w.answer[:n]
            if not flags.any():
                continue
            first, in_loop = int(flags.argmax()), n < len(w.ids)
            if in_loop and not self.has_room:
                # One loop too many: only the text before it is kept, which is as good as any other.
                one, flags, in_loop = w.ids[: once[i]], w.answer[: once[i]], False
            asked = one[len(w.row.given) : first - len(self.frame.glue)]
            if w.row.user and (len(asked) < 4 or _repeated(asked) > 0.3 or not self.special.isdisjoint(asked.tolist())):
                continue
            if flags.sum() < self.config.min_answer or not self.remember(one, first):
                continue
            self.count(in_loop)
            parts.append((one.astype(dtype), flags))
            kept.append(i)
            looped.append(in_loop)
        kept = np.array(kept, int)
        starts = np.concatenate([[0], np.cumsum([len(p[0]) for p in parts])]).astype(np.int64)
        return Docs(
            ids=np.concatenate([p[0] for p in parts]) if parts else np.zeros(0, dtype),
            answer=np.concatenate([p[1] for p in parts]) if parts else np.zeros(0, bool),
            starts=starts,
            kind=np.asarray(kinds, np.uint8)[kept],
            family=np.asarray(families, np.uint8)[kept],
            temp=np.array([written[i].row.temp for i in kept], np.float16),
            looped=np.array(looped, bool),
            split=np.asarray(splits, np.uint8)[kept],
        )


class _Planner:
    """Chooses what each shard asks, from the seed and the shard's number alone (and the pools of earlier shards)."""

    def __init__(self, config: DataConfig, frame: Frame, tokenizer, own: list[list[dict[str, str]]] | None):
        self.config, self.frame, self.tokenizer, self.own = config, frame, tokenizer, own
        self.chat = bool(frame.glue)
        self.trained = [f for f in FAMILIES if not f.held_out]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def whole(self, text: str) -> list[int]:
        return [*self.frame.prefix, *self.encode(text), *self.frame.glue]

    def shard(self, number: int, pools: Pools) -> tuple[list[Row], list[int], list[int]]:
        """Rows of one shard, and the kind and family of each."""
        c, rng = self.config, np.random.default_rng((self.config.seed, number))
        if self.own is not None:
            part = slice(number * c.rows, (number + 1) * c.rows)
            return self._own(rng, [p for i, p in enumerate(self.own) if not self.is_held_out(i)][part])
        if not self.chat:
            rows = [
                Row(self.frame.prefix, True, int(rng.integers(8, 65)), self._temp(rng))
                for _ in range(c.rows)
            ]  # fmt: skip
            return rows, [0] * c.rows, [0] * c.rows
        # The first two shards are self-made: templates need pieces of earlier answers.
        templates = number >= 2 and rng.random() > c.self_made
        families = [f for f in self.trained if bool(f.templates) == templates]
        weights = np.array([f.weight for f in families])
        temp = self._temp(rng)  # one for the shard: a greedy batch needs no noise
        rows, kinds, names, tries = [], [], [], 0
        while len(rows) < c.rows:
            tries += 1
            if templates and tries > 20 * c.rows:
                # No pool is filled yet, or no template fits into max_len.
                templates, families = False, [f for f in self.trained if f.openings]
                weights = np.array([f.weight for f in families])
            family = families[rng.choice(len(families), p=weights / weights.sum())]
            turns = 1 + int(rng.random() < c.two_turns)
            if templates:
                text = pools.fill(family.templates[rng.integers(len(family.templates))], rng)
                if text is None:
                    continue
                row = Row(self.whole(text), False, c.user_limit, temp, turns)
            else:
                opening = family.openings[rng.integers(len(family.openings))]
                row = Row([*self.frame.prefix, *self.encode(opening)], True, c.user_limit, temp, turns)
            if len(row.given) > c.max_len - 2 * c.min_answer:
                continue
            rows.append(row)
            kinds.append(KINDS.index(family.kind))
            names.append(FAMILY_IDS[family.name])
        return rows, kinds, names

    def is_held_out(self, i: int) -> bool:
        """Of prompts from a file, one in 20 is kept for evaluation, up to the usual number."""
        return i % 20 == 0 and i // 20 < self.config.held_out_per_kind

    def _own(self, rng, prompts) -> tuple[list[Row], list[int], list[int]]:
        """Rows that answer prompts of a file; none when the file has been gone through."""
        longest = self.config.max_len - 2 * self.config.min_answer
        given = [chat_ids(self.tokenizer, p) for p in prompts]
        rows = [Row(ids, False, 0, self._temp(rng)) for ids in given if len(ids) <= longest]
        return rows, [0] * len(rows), [255] * len(rows)

    def _temp(self, rng: np.random.Generator) -> float:
        return 0.0 if rng.random() < self.config.greedy else float(rng.choice([0.7, 1.0]))

    def held_out(self, pools: Pools) -> tuple[list[Row], list[int], list[int], list[str]]:
        """Questions of the held-out families, the same number of each kind; also as text."""
        c, rng = self.config, np.random.default_rng((self.config.seed, 1 << 30))
        if self.own is not None:
            held = [p for i, p in enumerate(self.own) if self.is_held_out(i)]
            return *self._own(rng, held), [p[-1]["content"] for p in held]
        if not self.chat:
            rows = [Row(self.frame.prefix, True, int(rng.integers(8, 65)), 0.0) for _ in range(c.held_out_per_kind)]
            return rows, [0] * len(rows), [0] * len(rows), []
        rows, kinds, names, texts = [], [], [], []
        for family in (f for f in FAMILIES if f.held_out):
            tries = 0
            while kinds.count(KINDS.index(family.kind)) < c.held_out_per_kind and tries < 50 * c.held_out_per_kind:
                tries += 1
                text = pools.fill(family.templates[tries % len(family.templates)], rng)
                if text is None or text in texts:
                    continue
                given = self.whole(text)
                if len(given) > c.max_len - 2 * c.min_answer:
                    continue
                rows.append(Row(given, False, 0, 0.0))
                kinds.append(KINDS.index(family.kind))
                names.append(FAMILY_IDS[family.name])
                texts.append(text)
        return rows, kinds, names, texts


class _Maker:
    """Makes the shards of one folder: plans, lets the target write, filters, stores, and remembers what was asked."""

    def __init__(self, model, tokenizer, folder: Path, config: DataConfig, prompts: str | Path | None, report):
        self.model, self.tokenizer, self.folder, self.config, self.report = model, tokenizer, folder, config, report
        self.frame = frame = make_frame(tokenizer)
        V = _vocab_size(model, tokenizer)
        self.dtype = np.uint16 if V <= 1 << 16 else np.uint32
        meta = {"config": asdict(config), "frame": asdict(frame), "vocab_size": V, "prompts": str(prompts) if prompts else None}
        _check_meta(folder / "meta.json", json.loads(json.dumps(meta)))
        self.own = read_prompts(prompts) if prompts else None
        self.planner, self.pools, self.reserved = _Planner(config, frame, tokenizer, self.own), Pools(), Pools()
        special = frozenset(getattr(tokenizer, "all_special_ids", None) or frame.eos)
        self.keep = _Filter(config, frame, special, config.looped_share)
        self.answers = self.docs_made = self.made_here = self.number = 0
        # For progress: beginning and deadline, or how many tokens of answers are wanted.
        self.until: tuple[float, float] | None = None
        self.wanted: int | None = None
        self.waiting: list[Future] = []
        # What the next shard asks, planned while this one is written.
        self.planned: tuple[int, Future] | None = None

    def learn(self, docs: Docs) -> None:
        """Remember stored text: questions not to repeat, and pieces for templates."""
        if not self.planner.chat or self.own is not None:
            return
        glue, prefix = len(self.frame.glue), len(self.frame.prefix)
        spans = []
        for i in range(len(docs)):
            ids, answer = docs.doc(i)
            first = int(answer.argmax())
            stop = first + int(np.argmin(np.append(answer[first:], False)))
            spans.append((ids[prefix : first - glue].tolist(), ids[first:stop].tolist()))
        texts = self.tokenizer.batch_decode([s for pair in spans for s in pair], skip_special_tokens=True)
        for i in range(len(docs)):
            (self.reserved if docs.split[i] == RESERVED else self.pools).add(texts[2 * i], texts[2 * i + 1])

    def finish(self, number: int, written: list[Written], kinds: list[int], families: list[int]) -> Docs:
        """Filter and store one shard."""
        # One in 16 of the first shards is kept apart: new questions of seen families, and text for held-out templates.
        splits = [RESERVED if number < 2 and i % 16 == 0 else TRAIN for i in range(len(written))]
        docs = self.keep(written, kinds, families, splits, self.dtype)
        docs.save(self.path(number))
        self.learn(docs)
        return docs

    def path(self, number: int) -> Path:
        return self.folder / f"train-{number:05d}.npz"

    def take_up(self) -> None:
        """Continue after a stored shard."""
        docs = Docs.load(self.path(self.number))
        for i in range(len(docs)):
            ids, answer = docs.doc(i)
            self.keep.remember(ids, int(answer.argmax()))
            self.keep.count(bool(docs.looped[i]))
        self.learn(docs)
        self.count(docs.answer_tokens(), len(docs))
        self.number += 1

    def count(self, answers: int, docs: int) -> None:
        self.answers, self.docs_made = self.answers + answers, self.docs_made + docs

    def hold_out(self) -> None:
        """Write the held-out text, once, when the shards before it are stored."""
        if not (self.folder / "heldout.npz").exists():
            self.count(*_collect(self.waiting, 0))
            _write_held_out(self.model, self.planner, self.reserved, self.folder, self.dtype, self.config, self.report)

    def tell(self, position: int, active: int, written: int) -> None:
        """Report the progress of the whole run while a shard is written."""
        if self.until is None:
            tell("Writing text", min(self.made_here + written, self.wanted), self.wanted, "tokens of answers")
        else:
            begun, deadline = self.until
            tell("Writing text", 100 * (time.monotonic() - begun) / (deadline - begun), 100, "%")

    def write(self, helper: ThreadPoolExecutor, deadline: float | None) -> bool:
        """Write one shard and hand it to the filter; False when there is nothing left to ask."""
        number, config = self.number, self.config
        # Pools hold all shards but the last: that one is still being filtered.
        self.count(*_collect(self.waiting, 1 if number > 2 else 0))
        if number - len(self.waiting) >= 8 and not self.docs_made:
            raise ConfigError(
                f"none of the target's answers in {number - len(self.waiting)} shards can be used: each was shorter than "
                f"{config.min_answer} ids, came before, or fell into a loop",
                "Give prompts, or lower greedy",
            )
        if self.planned is not None and self.planned[0] == number:
            rows, kinds, families = self.planned[1].result()
        else:
            rows, kinds, families = self.planner.shard(number, self.pools)
        if not rows:
            return False
        if number >= 2:
            # In the filter's thread, after the shard before: so the pools hold all shards before the next one, except this one.
            self.planned = number + 1, helper.submit(self.planner.shard, number + 1, self.pools)
        begun, seed = time.monotonic(), config.seed * 100_003 + number
        written = write_rows(self.model, rows, self.frame, config.max_len, seed, progress=self.tell, deadline=deadline)
        took, new = time.monotonic() - begun, int(sum(w.answer.sum() for w in written))
        self.made_here += new
        self.waiting.append(helper.submit(self.finish, number, written, kinds, families))
        self.report(
            f"Part {number}: {new} tokens of answers in {took:.1f} s ({new / took:.0f}/s), temperature {rows[0].temp:g}, "
            f"{'own prompts' if self.own else 'self-made prompts' if rows[0].user else 'templates'}; kept before: {self.answers}"
        )
        self.number += 1
        return True


def make_data(
    model,
    tokenizer,
    folder: str | Path,
    config: DataConfig = DataConfig(),  # noqa: B008 (frozen)
    answer_tokens: int | None = None,
    seconds: float | None = None,
    prompts: str | Path | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, float]:
    """Let the target write training text until there are `answer_tokens` of it or `seconds` have passed.

    Goes on from what the folder holds. `prompts`: a JSONL file to answer instead of self-made questions.

    Returns: totals (conversations, answer ids, seconds, answer ids a second).
    Raises:
      ConfigError: if neither limit is given, the folder holds text made otherwise, or no answer can be used.
    """
    if not answer_tokens and not seconds:
        raise ConfigError("nothing limits the data, neither answer tokens nor seconds", "Give one of them")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    maker = _Maker(model, tokenizer, folder, config, prompts, report)
    begun = time.monotonic()
    deadline = begun + seconds if seconds else None
    maker.until, maker.wanted = deadline and (begun, deadline), answer_tokens
    tell("Writing text", 0.0, answer_tokens if deadline is None else 100, "tokens of answers" if deadline is None else "%")
    with ThreadPoolExecutor(1) as helper, quick_switches():  # filters one shard while the target writes the next
        while not (deadline and time.monotonic() > deadline) and not (answer_tokens and maker.answers >= answer_tokens):
            if maker.path(maker.number).exists():
                maker.take_up()
                continue
            if maker.number == 2:
                maker.hold_out()
            if not maker.write(helper, deadline):
                report(f"All prompts of {prompts} are answered.")
                break
        maker.hold_out()
        _collect(maker.waiting, 0)
    total = load_docs(folder)
    took = time.monotonic() - begun
    return {
        "conversations": len(total),
        "answer_tokens": total.answer_tokens(),
        "looped_share": float(total.looped.mean()) if len(total) else 0.0,
        "seconds": took,
        "answer_tps": maker.made_here / took,
    }


def _vocab_size(model, tokenizer) -> int:
    args = getattr(model, "args", None)
    return int(getattr(args, "vocab_size", None) or len(tokenizer))


def _check_meta(path: Path, meta: dict) -> None:
    if path.exists():
        old, new = (one | one.get("config", {}) | {"config": None} for one in (json.loads(path.read_text()), meta))
        if differ := differences(old, new):
            raise ConfigError(f"{path.parent} was made with other settings: {'; '.join(differ)}", "Use another folder")
        return
    write_atomically(path, json.dumps(meta, indent=1))


def _collect(waiting: list[Future], leave: int) -> tuple[int, int]:
    """Wait for all shards in the filter but the last `leave`: answer ids and conversations that they kept."""
    answers = docs_made = 0
    while len(waiting) > leave:
        docs = waiting.pop(0).result()
        answers, docs_made = answers + docs.answer_tokens(), docs_made + len(docs)
    return answers, docs_made


def _held_out_progress(what: str, before: int, rows: int, total: int, max_len: int) -> Callable[[int, int, int], None]:
    """A `progress` of `write_rows` for `rows` of `total` answers after `before`: their share, as if all had `max_len` ids."""
    return lambda position, active, ids: tell(what, 100 * (before + rows * position / max_len) / total, 100, "%")


def _write_held_out(model, planner, pools, folder, dtype, config, report) -> None:
    """Answers to the held-out families, greedy and at temperature 1, and their questions as JSONL."""
    rows, kinds, families, texts = planner.held_out(pools)
    if not rows:
        report("No held-out question fits into --max-len: there will be no held-out text.")
        return
    asked = f"{config.held_out_per_kind} of each kind" if planner.own is None else f"{len(rows)} of the prompts"
    report(f"Writing held-out questions: {asked}, answered greedily and at temperature 1; the limits do not cover this ...")
    keep = _Filter(config, planner.frame, frozenset())
    parts = []
    for temp in (0.0, 1.0):
        again = [Row(r.given, r.user, r.user_limit, temp) for r in rows]
        written, what = [], f"Writing held-out text at temperature {temp:g}"
        for start in range(0, len(again), config.rows):
            part = again[start : start + config.rows]
            tell(what, 100 * start / len(again), 100, "%")
            progress = _held_out_progress(what, start, len(part), len(again), config.max_len)
            written += write_rows(model, part, planner.frame, config.max_len, seed=7 + start, progress=progress)
            report(f"Held out: {len(written)} of {len(rows)} answered at temperature {temp:g}.")
        keep.seen.clear()
        parts.append(keep(written, kinds, families, [TRAIN] * len(rows), dtype))
    Docs.join(parts).save(folder / "heldout.npz")
    lines = [json.dumps({"kind": KINDS[k], "prompt": text}) for k, text in zip(kinds, texts, strict=False)]
    (folder / "heldout.jsonl").write_text("\n".join(lines) + "\n" * bool(lines))
    report(f"Held out: {sum(map(len, parts))} of {2 * len(rows)} answers kept.")
