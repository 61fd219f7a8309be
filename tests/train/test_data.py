"""Training text: rows decoded in step, the chat frame, questions, filters, storage and resuming."""

import gc
import itertools
import json
import weakref

import mlx.core as mx
import numpy as np
import pytest
from kit import greedy_ids, tiny_qwen3, tiny_target

from dflash_mlx.errors import CheckpointError, ConfigError
from dflash_mlx.kernels import small_batch
from dflash_mlx.progress import listening
from dflash_mlx.train import rollout
from dflash_mlx.train.data import DataConfig, loop_cuts, make_data
from dflash_mlx.train.docs import Docs, load_docs
from dflash_mlx.train.prompts import FAMILIES, KINDS, Pools, chat_ids, make_frame, read_prompts
from dflash_mlx.train.rollout import Frame, Row, Written, _rows_of, in_loop, write_rows


class Chars:
    """One id a character; <s> <e> <m> stand for 0 1 2. The chat template is a plain function."""

    eos_token_ids, bos_token_id, all_special_ids, chat_template = {1}, None, [0, 1, 2], "yes"

    def encode(self, text, add_special_tokens=True):
        for i, name in enumerate(("<s>", "<e>", "<m>")):
            text = text.replace(name, chr(i))
        return [ord(c) % 61 if ord(c) > 2 else ord(c) for c in text]

    def batch_decode(self, rows, skip_special_tokens=False):
        return ["".join(chr(64 + i) for i in row) for row in rows]

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False, return_dict=False):
        text = "".join(f"<s>{m['role']}\n{m['content']}<e>\n" for m in messages) + "<s>a\n" * add_generation_prompt
        return self.encode(text) if tokenize else text

    def __len__(self):
        return 61


FRAME = Frame(prefix=(7, 8), glue=(5, 6, 9), again=(10, 11), eos=(0,))


@pytest.mark.parametrize("make", [tiny_target, tiny_qwen3])
def test_greedy_rows_of_any_length_equal_plain_greedy_decoding(make):
    model = make()
    prompts = [[9, 8, 7], [5], [11, 12, 13, 14, 15, 16], [20, 21]]
    written = write_rows(model, [Row(p, user=False) for p in prompts], Frame((5,), (), (), (60,)), 40, check_every=7)
    for prompt, w in zip(prompts, written, strict=True):
        want = greedy_ids(model, prompt, 40 - len(prompt))
        want = want[: want.index(60) + 1] if 60 in want else want
        got = w.ids[len(prompt) :].tolist()
        # A row that loops may leave the batch before the end.
        assert got == want[: len(got)] and len(got) >= min(len(want), 30) and w.ids[: len(prompt)].tolist() == prompt
        assert w.answer.tolist() == [False] * len(prompt) + [True] * len(got)


def test_each_half_of_a_step_waits_for_its_own_half_of_the_step_before(monkeypatch):
    model, rows, seen, made = tiny_target(), [Row([9, 8, 7], user=False), Row([5, 4, 3], user=False)], [], []
    middle, wait, enqueue = len(model.layers) // 2, mx.eval, mx.async_eval
    call = type(model.layers[middle]).__call__

    def noting(layer, x, *given, **named):
        if layer is model.layers[middle] and x.shape[1] == 1:
            made.append(x)
        return call(layer, x, *given, **named)

    monkeypatch.setattr(type(model.layers[middle]), "__call__", noting)
    monkeypatch.setattr(mx, "eval", lambda *given: (seen.append(("wait", given)), wait(*given))[1])
    monkeypatch.setattr(mx, "async_eval", lambda *given: (seen.append(("enqueue", given)), enqueue(*given))[1])
    write_rows(model, rows, Frame((5,), (), (), (60,)), 9)
    # Steps with what each waits for: nothing is under way before the first.
    first = next(i for i, (what, _) in enumerate(seen) if what == "enqueue") - 1
    steps = [seen[i : i + 4] for i in range(first, first + 4 * 6, 4)]
    assert len(made) == 6 and all([what for what, _ in step] == ["wait", "enqueue"] * 2 for step in steps)
    for step, half in zip(steps, made, strict=True):
        assert step[1][1][0] is half and step[3][1][0].shape == (2,)
    for before, step in itertools.pairwise(steps):
        assert step[0][1][0] is before[1][1][0] and step[2][1][0] is before[3][1][0]


def test_rows_that_are_written_leave_no_circle_that_holds_their_caches(monkeypatch):
    alive, begin = weakref.WeakSet(), rollout._Rollout.__init__
    monkeypatch.setattr(rollout._Rollout, "__init__", lambda run, *given: (begin(run, *given), alive.add(run))[0])
    gc.disable()
    try:
        write_rows(tiny_target(), [Row([9, 8, 7], user=False)], Frame((5,), (), (), (60,)), 9)
        assert not alive
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint8])
@pytest.mark.parametrize("shape", [(5, 2, 3, 8), (5, 1, 3, 1), (5, 7)])
def test_rows_that_stay_are_moved_whole_whatever_their_bytes(shape, dtype):
    a = (100 * mx.random.normal(shape, key=mx.random.key(2))).astype(mx.int32).astype(dtype)
    rows = mx.array([0, 3, 4])
    assert mx.array_equal(_rows_of(a, rows), a[rows]) and _rows_of(a, rows).dtype == dtype


@pytest.mark.parametrize("make", [tiny_target, tiny_qwen3])
def test_rows_of_many_texts_attend_by_products_on_cuda_and_say_the_same(make, monkeypatch):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(small_batch, "here", lambda: True)
    monkeypatch.setattr(small_batch, "HALF", (mx.float32,))  # sums of products in half types may choose other ids
    monkeypatch.setattr(small_batch, "MANY_TEXTS", 3)
    monkeypatch.setattr(small_batch.autotune, "allowed", lambda form: form is small_batch.FOLDED)
    keys, form = [], small_batch.gqa_folded_attention
    monkeypatch.setattr(small_batch, "gqa_folded_attention", lambda *given: keys.append(given[1].shape[2]) or form(*given))
    model, prompts = make(), [[9, 8, 7], [5], [11, 12, 13]]
    written = write_rows(model, [Row(p, user=False) for p in prompts], Frame((5,), (), (), (60,)), 30)
    assert keys == [n for n in range(1, 30) for _ in model.layers] and type(model.layers[0].self_attn).__name__ == "Attention"
    for prompt, w in zip(prompts, written, strict=True):
        want = greedy_ids(model, prompt, 30 - len(prompt))
        got = w.ids[len(prompt) :].tolist()
        assert got == want[: len(got)] and (len(got) == len(want) or got[-1] == 60)


def test_self_made_rows_follow_their_script():
    model = tiny_target(vocab=13)  # small: sampled turns end soon
    rows = [Row(FRAME.prefix, True, 200, temp=1.0, turns=2) for _ in range(24)]
    written = write_rows(model, rows, FRAME, 220, seed=3, min_p=1e-4)
    whole = 0
    for w in written:
        ids, answer = w.ids.tolist(), w.answer.tolist()
        if not any(answer):
            continue
        first = answer.index(True)
        assert ids[first - 3 : first] == [5, 6, 9], "the glue stands before the answer"
        assert 5 not in ids[2 : first - 3], "the first glue id ends the user turn"
        end = first + answer[first:].index(False) if False in answer[first:] else len(ids)
        if end < len(ids):
            assert ids[end - 1] == 0 and ids[end : end + 2] == [10, 11], "EOS is part of the answer, then the next turn"
            assert 0 not in ids[first : end - 1]
            second = end + answer[end:].index(True)
            assert ids[second - 3 : second] == [5, 6, 9]
        whole += w.whole
    assert whole > 6
    again = write_rows(model, rows, FRAME, 220, seed=3, min_p=1e-4)
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(written, again, strict=True))


def test_an_endless_user_turn_gives_no_answer():
    model = tiny_target()
    written = write_rows(model, [Row((7, 8), True, 5) for _ in range(4)], Frame((7, 8), (59, 6), (), (60,)), 60, seed=1)
    assert all(not w.answer.any() or 59 in w.ids[2:8] for w in written)


def test_loops_are_found_and_cut_behind_the_third_round():
    line = [9, 8, 7] + list(range(10, 22)) * 4
    ids = np.array([line, list(range(50, 50 + len(line)))])
    answer = np.ones(ids.shape, bool)
    whole = len(line)
    assert [cut.tolist() for cut in loop_cuts(ids, answer)] == [[3 + 12, whole], [3 + 36, whole]]
    answer[0, :27] = False  # rounds in the question do not count
    assert [cut.tolist() for cut in loop_cuts(ids, answer)] == [[whole, whole]] * 2
    assert [cut.tolist() for cut in loop_cuts(np.array([[4] * 30]), np.ones((1, 30), bool))] == [[1], [25]]
    tail = np.array([[1, 2, 3] * 40, list(range(120))])
    assert in_loop(tail).tolist() == [True, False]


def plain_cuts(ids, answer, max_period=96, least=24):
    """`loop_cuts` of one row, by its definition: each period and each id in turn."""
    once = cut = len(ids)
    for period in range(1, min(max_period, len(ids) - 1) + 1):
        run = 0
        for at in range(period, len(ids)):
            run = run + 1 if ids[at] == ids[at - period] and answer[at] and answer[at - period] else 0
            if run >= max(2 * period, least):
                if at + 1 < cut:
                    once, cut = at + 1 - run, at + 1
                break
    return once, cut


def test_the_first_loop_of_every_row_is_found_wherever_it_starts_and_however_long_a_round_is():
    rng, found = np.random.default_rng(4), set()
    ids, answer = rng.integers(0, 12, (80, 170)), np.ones((80, 170), bool)
    for row, said in zip(ids, answer, strict=True):
        for _ in range(2):
            period, start, rounds = int(rng.integers(1, 60)), int(rng.integers(0, 110)), int(rng.integers(2, 5))
            part = row[start : start + period * rounds]
            part[:] = np.resize(row[start : start + period], len(part))
        row[rng.integers(0, 170, 2)] = 12
        start = int(rng.integers(0, 170))
        said[start : start + int(rng.integers(0, 12))] = False
    for row, said, once, cut in zip(ids, answer, *loop_cuts(ids, answer), strict=True):
        assert (once, cut) == plain_cuts(row.tolist(), said.tolist())
        found.add(cut < 170)
    assert found == {True, False}


def test_the_frame_is_read_off_the_chat_template():
    t = Chars()
    frame = make_frame(t)
    assert frame.prefix == tuple(t.encode("<s>user\n")) and frame.glue == tuple(t.encode("<e>\n<s>a\n"))
    assert frame.again == tuple(t.encode("\n<s>user\n")) and frame.eos == (1,)
    asked = [{"role": "user", "content": "hi"}]
    assert chat_ids(t, asked) == [*frame.prefix, *t.encode("hi"), *frame.glue]


def test_without_a_template_a_text_starts_with_bos_or_eos(pair):
    _, tokenizer, _ = pair
    assert make_frame(tokenizer) == Frame((0,), (), (), (0,))


def test_prompts_are_read_from_jsonl_and_faults_named_together(tmp_path):
    path = tmp_path / "p.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path.write_text("\n".join(["plain text", json.dumps({"prompt": "x"}), json.dumps({"messages": turns}), "", "17"]))
    got = read_prompts(path)
    assert [m[-1]["content"] for m in got] == ["plain text", "x", "c", "17"]
    path.write_text("\n".join(["fine", json.dumps({"text": "x"}), json.dumps({"messages": turns[:2]})]))
    with pytest.raises(ConfigError, match="lines 2, 3"):
        read_prompts(path)


def test_held_out_families_cover_every_kind_and_share_no_wording_with_training():
    held = [f for f in FAMILIES if f.held_out]
    assert {f.kind for f in held} == set(KINDS)
    trained = {t for f in FAMILIES if not f.held_out for t in f.templates}
    assert trained.isdisjoint(t for f in held for t in f.templates)
    assert all(f.templates and not f.openings for f in held)


def test_pools_take_pieces_of_answers_and_fill_slots():
    pools, rng = Pools(), np.random.default_rng(0)
    assert pools.fill("Fix {code}", rng) is None
    words = "The river runs through the old town and people like to walk beside it in the evening. " * 3
    pools.add("Tell me about old rivers.", f"{words.strip()}\n\n```python\na = 1\nb = 2\nc = 3\n```\n")
    assert "old rivers" in pools.topic and pools.code == ["a = 1\nb = 2\nc = 3"] and pools.paragraph == [words.strip()]
    text = pools.fill("{name}: {n} {code}", rng)
    assert "{" not in text and "b = 2" in text


@pytest.mark.full
def test_make_data_stores_splits_resumes_and_refuses_other_settings(tmp_path):
    model = tiny_target(vocab=61)
    config = DataConfig(rows=32, max_len=110, held_out_per_kind=2, min_answer=4, user_limit=40, two_turns=0.5, greedy=0.5)
    said = []
    first = make_data(model, Chars(), tmp_path, config, answer_tokens=400, report=said.append)
    docs = load_docs(tmp_path)
    assert first["answer_tokens"] == docs.answer.sum() >= 400 and first["conversations"] == len(docs)
    assert docs.ids.dtype == np.uint16 and set(docs.kind.tolist()) <= set(range(4))
    starts = {docs.doc(i)[0][: int(docs.doc(i)[1].argmax())].tobytes() for i in range(len(docs))}
    assert len(starts) == len(docs), "no question twice"
    more = make_data(model, Chars(), tmp_path, config, answer_tokens=int(first["answer_tokens"]) + 300, report=said.append)
    assert more["answer_tokens"] >= first["answer_tokens"] + 300
    grown = load_docs(tmp_path)
    assert np.array_equal(grown.ids[: len(docs.ids)], docs.ids), "stored shards stay"
    with pytest.raises(ConfigError, match="other settings: .*rows 6?[0-9]*, now 16"):
        make_data(model, Chars(), tmp_path, DataConfig(rows=16), answer_tokens=10)
    with pytest.raises(ConfigError, match="neither"):
        make_data(model, Chars(), tmp_path, config)
    (tmp_path / "train-00000.npz").write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match="train-00000"):
        load_docs(tmp_path)
    with pytest.raises(CheckpointError, match="First: dflash-mlx train data"):
        load_docs(tmp_path / "nowhere")


@pytest.mark.full
def test_folders_are_joined_in_their_order_and_an_empty_one_is_named(tmp_path):
    model = tiny_target(vocab=61)
    for seed in (0, 1):
        make_data(model, Chars(), tmp_path / str(seed), DataConfig(rows=8, max_len=64, min_answer=4, seed=seed), answer_tokens=50)
    one, two = (load_docs(tmp_path / str(seed)) for seed in (0, 1))
    both = load_docs(tmp_path / "0", tmp_path / "1")
    assert both.ids.tolist() == one.ids.tolist() + two.ids.tolist() and len(both) == len(one) + len(two)
    assert both.doc(len(one))[0].tolist() == two.doc(0)[0].tolist()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty has no files"):
        load_docs(tmp_path / "0", tmp_path / "empty")


def test_make_data_answers_every_prompt_of_a_file_once_and_then_ends(tmp_path):
    model = tiny_target(vocab=61)
    (tmp_path / "p.jsonl").write_text("\n".join(f"question {i} of many" for i in range(40)))
    config = DataConfig(rows=16, max_len=64, min_answer=4)
    said = []
    told = []
    with listening(lambda *args: told.append(args)):
        make_data(model, Chars(), tmp_path / "d", config, answer_tokens=10**6, prompts=tmp_path / "p.jsonl", report=said.append)
    # Behind the minutes asked for, so how far that is must be seen.
    shares = [done for what, done, *_ in told if what == "Writing held-out text at temperature 1"]
    assert shares == sorted(shares) and shares[0] == 0 < shares[1] <= 100 == shares[-1]
    docs, held = load_docs(tmp_path / "d"), load_docs(tmp_path / "d", names="heldout.npz")
    assert "All prompts" in " ".join(said)
    assert set(docs.family.tolist()) == {255} and 5 < len(docs) <= 38
    asked = {docs.doc(i)[0][: int(docs.doc(i)[1].argmax())].tobytes() for i in range(len(docs))}
    assert not asked & {held.doc(i)[0][: int(held.doc(i)[1].argmax())].tobytes() for i in range(len(held))}


def looping_rows(model, rows, frame, max_len, seed=0, **_):
    """In place of `write_rows`: seven answers of eight end repeating two ids, the eighth counts up; nothing comes twice."""
    out = []
    for i, row in enumerate(rows):
        start = (seed * len(rows) + i) * 9 % 60_000
        said = np.arange(start, start + (20 if i % 8 == 3 else 0))
        tail = np.arange(40) + start if i % 8 == 7 else np.append(said, np.tile([start, start + 1], 20))
        asked = [*row.given, *range(start, start + 4)]
        ids = np.array([*asked, *tail], np.int32)
        out.append(Written(ids, np.arange(len(ids)) >= len(asked), row, False))
    return out


def test_loops_are_at_most_their_share_of_the_text_also_when_it_was_made_in_two_goes(tmp_path, monkeypatch, pair):
    import dflash_mlx.train.data as data

    monkeypatch.setattr(data, "write_rows", looping_rows)
    model, tokenizer, _ = pair
    config = DataConfig(rows=32, looped_share=0.2, held_out_per_kind=1)
    for folder, tokens in (("two", 1500), ("two", 3000), ("one", 3000)):
        make_data(model, tokenizer, tmp_path / folder, config, answer_tokens=tokens)
        assert 0.15 < load_docs(tmp_path / folder).looped.mean() <= 0.2
    one, two = load_docs(tmp_path / "one"), load_docs(tmp_path / "two")
    same = min(len(one.ids), len(two.ids))  # the last shard in the filter may come on top
    assert len(two) > 60 and np.array_equal(one.ids[:same], two.ids[:same])
    # What was said before a loop that has no room stays: 20 ids and the first of the loop's rounds.
    lengths = [int(two.doc(i)[1].sum()) for i in range(len(two)) if not two.looped[i]]
    assert set(lengths) == {22, 40} and abs(lengths.count(22) - lengths.count(40)) <= 2
    with pytest.raises(ConfigError, match="answers in 8 shards can be used.*fell into a loop"):
        make_data(model, tokenizer, tmp_path / "none", DataConfig(rows=3), answer_tokens=1500)


def test_docs_pick_and_join_and_survive_a_file(tmp_path):
    flags = np.array([0, 1, 1, 0, 1, 1, 1, 0, 1], bool)
    zeros = np.zeros(3, np.uint8)
    docs = Docs(np.arange(9, dtype=np.uint16), flags, np.array([0, 3, 7, 9]), np.array([0, 1, 2], np.uint8), zeros,
                np.zeros(3, np.float16), zeros.astype(bool), zeros)  # fmt: skip
    picked = docs.pick(np.array([2, 0]))
    assert picked.doc(0)[0].tolist() == [7, 8] and picked.kind.tolist() == [2, 0]
    both = Docs.join([docs, picked])
    assert len(both) == 5 and both.doc(4)[0].tolist() == [0, 1, 2] and both.doc(1)[1].tolist() == [False, True, True, True]
    both.save(tmp_path / "x.npz")
    assert np.array_equal(Docs.load(tmp_path / "x.npz").answer, both.answer)
    ids, answer = docs.pad([1, 0], 5)
    assert ids.tolist() == [[3, 4, 5, 6, 0], [0, 1, 2, 0, 0]] and answer[1].tolist() == [False, True, True, False, False]
    assert mx.array(ids).dtype == mx.int32
