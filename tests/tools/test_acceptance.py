"""bench/acceptance.py: its figures, and that walking replays the rounds of the real loop."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from kit import TINY_DRAFTER_SHA256

PATH = Path(__file__).resolve().parents[2] / "bench" / "acceptance.py"
spec = importlib.util.spec_from_file_location("acceptance", PATH)
acceptance = importlib.util.module_from_spec(spec)
spec.loader.exec_module(acceptance)


def test_summary_counts_rounds_slots_and_their_mean():
    got = acceptance.summarise([[2, 1, 1], [0, 0, 4]])
    assert got["rounds"] == 8 and got["histogram"] == [2, 1, 5]
    assert got["tau"] == pytest.approx((2 * 1 + 1 * 2 + 5 * 3) / 8, abs=1e-4)
    assert got["acceptance_by_slot"] == [pytest.approx(6 / 8), pytest.approx(5 / 6, abs=1e-4)]
    assert got["low"] < got["tau"] < got["high"]


@pytest.mark.parametrize("of", [1, 4, 7, 12])
def test_parts_have_all_kinds_and_together_every_text(of):
    asked = [(n, kind) for n in range(25) for kind in ("chat", "code", "maths", "rewrite")]
    parts = [acceptance.share(asked, part, of) for part in range(of)]
    assert sorted(one for part in parts for one in part) == asked
    assert all(len({kind for _, kind in part}) == 4 for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 2


def test_the_mean_over_kinds_weighs_kinds_alike_and_loops_stand_apart():
    def record(kind, counts, looped=False):
        return {"kind": kind, "temp": 0.0, "looped": looped, "series": {"walk": {"3": counts}}}

    rows = acceptance.summary([record("a", [4, 0, 0]), record("b", [0, 0, 1]), record("b", [0, 9, 0], looped=True)])
    means = {r["looped"]: r["tau"] for r in rows if r["kind"] == "mean"}
    assert means == {False: 2.0, True: 2.0}
    assert {(r["kind"], r["looped"]): r["tau"] for r in rows if r["kind"] != "mean"} == {
        ("a", False): 1.0,
        ("b", False): 3.0,
        ("b", True): 2.0,
    }


@pytest.mark.full
def test_walking_replays_the_real_rounds_of_the_built_in_pair(tmp_path, monkeypatch, capsys):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    texts = ["def add(a, b):", "import os\n"]
    prompts.write_text("\n".join(json.dumps({"kind": "code", "prompt": text}) for text in texts))
    given = ["--model", "tiny", "--draft-model", "tiny", "--prompts", str(prompts), "--real", "8", "--block-size", "4", "8"]
    monkeypatch.setattr(sys, "argv", ["acceptance.py", *given, "--max-tokens", "24", "--out", str(out)])
    acceptance.main()
    result = json.loads(out.read_text())
    assert result["walk_equals_real"] == {"compared": 4, "equal": 4}
    assert result["drafter_sha256"] == TINY_DRAFTER_SHA256
    taus = {(r["series"], r["block_size"], r["temp"]): r["tau"] for r in result["summary"] if r["kind"] == "mean"}
    assert taus["real", 8, 0.0] > taus["zeroed", 8, 0.0]
    assert "tau (95 %)" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["acceptance.py", "--merge", str(out), str(out), "--out", str(tmp_path / "two.json")])
    acceptance.main()
    assert len(json.loads((tmp_path / "two.json").read_text())["records"]) == 8
    # A part by another drafter.
    (tmp_path / "other.json").write_text(json.dumps({**result, "drafter_sha256": "0" * 16}))
    monkeypatch.setattr(sys, "argv", ["acceptance.py", "--merge", str(out), str(tmp_path / "other.json"), "--out", str(out)])
    with pytest.raises(SystemExit):
        acceptance.main()
    assert "expected parts of one drafter" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["smollm2-acceptance", "smollm2-acceptance-blocks"])
@pytest.mark.quick(1)
def test_the_table_in_docs_is_the_recorded_one(name):
    root = PATH.parents[1]
    result = json.loads((root / "bench" / "results" / f"{name}.json").read_text())
    table = acceptance.markdown(result)
    assert table in (root / "docs" / "training.md").read_text(encoding="utf-8")
    # The summary follows from the rounds, not from what somebody wrote beside them.
    assert acceptance.summary(result["records"]) == result["summary"]
    assert "| mean |" in table and len(table.splitlines()) == 7


def test_a_kind_whose_answers_all_loop_has_a_dash_and_a_record_without_the_real_loop_no_table():
    def record(kind, temp, looped=False, series="real"):
        return {"kind": kind, "temp": temp, "looped": looped, "series": {series: {"3": [1, 2, 3]}}}

    records = [record("a", 0.0), record("b", 0.0), record("a", 1.0), record("b", 1.0, looped=True)]
    assert "| b | 1 | 2.33 (2.33 to 2.33) | - |" in acceptance.markdown({"summary": acceptance.summary(records)})
    with pytest.raises(SystemExit, match="expected a record of the real loop; found none"):
        acceptance.markdown({"summary": acceptance.summary([record("a", 0.0, series="walk")])})
