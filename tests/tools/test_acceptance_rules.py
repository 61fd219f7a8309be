"""bench/acceptance_rules.py: its kinds of draft run in the real loop and its figures are what they say."""

import importlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from kit import TINY_DRAFTER_SHA256, Oracle, ids_of, letters, run, tiny_drafter, tiny_target

from dflash_mlx.models.drafter import Drafter
from dflash_mlx.sampling import Distribution

BENCH = Path(__file__).resolve().parents[2] / "bench"
PROMPT = [5, 9, 33, 7, 20]


@pytest.fixture
def rules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("acceptance_rules")


class Known(Oracle):
    """A drafter whose distribution is the target's own along a known line."""

    def learn(self, line, model):
        logits = model(mx.array([line]))
        self._head = lambda rows: logits[:, rows[0]]
        return super().learn(line, model)

    def slots(self, anchor, features, cache, start, block_size, accelerator=None):
        self.inject(features, cache, start)
        at = start + features.shape[1]
        return mx.arange(at, at + block_size - 1)[None]  # [1, N]: places in the line, in the place of rows

    draft, draft_with_confidence = Drafter.draft, Drafter.draft_with_confidence


def test_shared_noise_draws_what_the_target_draws_where_their_laws_agree(rules):
    model = tiny_target(seed=2)
    model.lm_head.weight = model.lm_head.weight * 0.3
    sampler = Distribution(0.9)
    text = ids_of(run(model, None, PROMPT, 24, sampler=sampler, seed=7))
    drafter = tiny_drafter(model, cls=Known).learn([*PROMPT, *text, *[0] * 16], model)
    options = {"max_tokens": 16, "block_size": 6}
    got = {m: rules.answer(m, model, letters(), drafter, PROMPT, 0.9, 7, **options) for m in rules.METHODS[:2]}
    assert got["shared"] == (text[:16], [5, 5, 5]) and got["argmax"][0] == text[:16]
    assert sum(got["argmax"][1]) / len(got["argmax"][1]) < 5


@pytest.mark.full
def test_rules_are_those_of_the_library(rules, pair):
    model, tokenizer, drafter = pair
    texts = []
    for method in rules.METHODS[2:]:
        options = {"max_tokens": 40, "block_size": 8}
        ours = rules.answer(method, model, tokenizer, drafter, "def add(a, b):", 1.0, 3, **options)
        sampler = Distribution(1.0)
        theirs = run(model, drafter, "def add(a, b):", tokenizer=tokenizer, acceptance=method, sampler=sampler, seed=3, **options)
        assert ours == (ids_of(theirs), [n - 1 for n in theirs[-1].stats.acceptance_lengths])
        texts.append(ours[0])
    texts.append(rules.answer("argmax", model, tokenizer, drafter, "def add(a, b):", 1.0, 3, **options)[0])
    assert len(set(map(tuple, texts))) == 3


def test_a_difference_is_taken_text_by_text(rules):
    a, b = [[0, 4, 0], [2, 0, 0]], [[4, 0, 0], [2, 0, 0]]
    same = rules.paired(a, a)
    assert (same["less"], same["less_low"], same["less_high"]) == (0, 0, 0) and (same["over"], same["over_high"]) == (1, 1)
    got = rules.paired(a, b)
    assert got["less"] == round(10 / 6 - 1, 4) and got["less_low"] == 0.0 and got["less_high"] == 1.0
    assert got["over"] == round(10 / 6, 4) and got["over_low"] == 1.0 and got["over_high"] == 2.0


@pytest.mark.full
def test_every_method_is_measured_on_the_built_in_pair(rules, tmp_path, monkeypatch, capsys):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    lines = [{"kind": "code", "prompt": text} for text in ("def add(a, b):", "import os\n", "not asked")]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    given = ["--model", "tiny", "--draft-model", "tiny", "tiny", "--prompts", str(prompts), "--limit", "2"]
    monkeypatch.setattr(sys, "argv", ["acceptance_rules.py", *given, "--max-tokens", "24", "--temp", "0.7", "--out", str(out)])
    rules.main()
    result = json.loads(out.read_text())
    rows = [r for r in result["rows"] if r["kind"] == "all" and not r["looped"]]
    assert result["drafters_sha256"] == [TINY_DRAFTER_SHA256] * 2
    assert [(r["method"], r["drafter"], r["prompts"], r["keeps_seed"]) for r in rows] == [
        (method, drafter, 2, method in ("argmax", "shared"))
        for method in ("argmax", "block", "rejection", "shared")
        for drafter in (0, 1)
    ]
    # The same drafter twice: every pair is equal.
    assert all(r["to_first_drafter"]["over"] == 1 for r in rows if r["drafter"]) and all(1 < r["tau"] < 8 for r in rows)
    # Four of these 24 tokens a text at least come from drafts.
    assert all(r["rounds"] < 40 and len(r["histogram"]) == 8 for r in rows)
    assert "times the first" in capsys.readouterr().out
    merged = tmp_path / "merged.json"
    monkeypatch.setattr(sys, "argv", ["acceptance_rules.py", "--merge", str(out), "--out", str(merged)])
    rules.main()
    assert json.loads(merged.read_text())["rows"] == result["rows"]


def test_the_prompts_of_the_built_in_pair_are_all_different():
    texts = [json.loads(line)["prompt"] for line in (BENCH / "prompts" / "tiny.jsonl").read_text().splitlines()]
    assert len(set(texts)) == len(texts) >= 36
