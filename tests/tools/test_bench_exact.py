"""bench/exact.py: what differs is counted, and a record goes on where it was stopped."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "exact.py"
spec = importlib.util.spec_from_file_location("bench_exact", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def test_ids_and_bits_that_differ_are_counted():
    stats = SimpleNamespace(rounds=[{"accepted": 2}], widths={3: 1})
    rows = mx.arange(12).reshape(3, 4) * 0.5
    plain = ([5, 6, 7], rows, stats)
    assert script.compared(plain, plain)["unequal_logprobs"] == script.compared(plain, plain)["different_ids"] == 0
    found = script.compared(plain, ([5, 6, 8], rows + mx.array([[0.0], [2.0**-20], [0.0]]), stats))
    assert (found["different_ids"], found["first"], found["unequal_logprobs"], found["accepted"]) == (1, 2, 1, 2)


@pytest.mark.full
def test_a_record_goes_on_where_it_was_stopped(tmp_path, capsys):
    given = ["--pair", "tiny", "--prompts", "2", "--block-prompts", "1", "--tokens", "6", "--out", str(tmp_path / "r.json")]
    for options, status, answers in (("--seconds 0", 3, 0), ("--part 1/2", 0, 1), ("--part 0/2", 0, 4), ("", 0, 4)):
        with pytest.raises(SystemExit) as end:
            script.main([*given, *options.split()])
        assert end.value.code == status
        cases = json.loads((tmp_path / "r.json").read_text())["cases"] if (tmp_path / "r.json").exists() else {}
        assert len(cases) == answers
    assert "4 answers, 24 tokens: 0 ids differ, 0 log-probabilities are not the same bits" in capsys.readouterr().out
