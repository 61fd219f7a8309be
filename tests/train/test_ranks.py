"""Two processes of `mlx.launch`, each with half of every batch, train as one does."""

import json
from pathlib import Path

import numpy as np
import pytest
from launching import SUPPORT, output_of

SETTINGS = {"steps": 20, "batch": 8, "anchors": 24, "max_len": 64, "ema": 0.98, "noise": 0.05, "lr": 4e-3}


def trained(out, processes=1, stop_at=None, **settings):
    """(what was printed, what each rank noted at its end)."""
    worker = [SUPPORT / "ranks_worker.py", out, json.dumps({**SETTINGS, **settings})]
    said = output_of(processes, *worker, env={"STOP_AT": str(stop_at or "")})
    noted = [json.loads(path.read_text()) for path in sorted(Path(out).glob("rank-*.json"))]
    return said, noted


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [{"loss": "dpace", "dflash2": True, "learn_from": "target", "tv": 0.5}, {"loss": "decay", "accumulate": 2, "batch": 4}],
    ids=["dflash2", "dflash"],
)
def test_two_processes_train_as_one(settings, tmp_path):
    _, (alone,) = trained(tmp_path / "one", **settings)
    said, both = trained(tmp_path / "two", 2, **settings)
    assert [b["step"] for b in both] == [20, 20], said
    assert both[0]["weights"] == both[1]["weights"]
    for one in both:
        np.testing.assert_allclose(one["losses"], alone["losses"], atol=1e-4, rtol=0)
    # One drafter, written once.
    assert (tmp_path / "two/metrics.jsonl").read_text().count('"step": 20') == 1


@pytest.mark.full
def test_a_stopped_run_of_two_goes_on_from_what_rank_0_saved(tmp_path):
    _, (alone,) = trained(tmp_path / "one")
    said, noted = trained(tmp_path / "two", 2, stop_at=8)
    assert not noted and "Stopped at step 8" in said
    said, both = trained(tmp_path / "two", 2)
    assert "Going on at step 8" in said and len(both) == 2, said
    assert both[0]["weights"] == both[1]["weights"] and [len(b["losses"]) for b in both] == [12, 12]
    np.testing.assert_allclose(both[1]["losses"], alone["losses"][8:], atol=1e-4, rtol=0)


@pytest.mark.full
def test_a_batch_that_cannot_be_shared_out_ends_all_of_them(tmp_path):
    said, noted = trained(tmp_path, 2, batch=7)
    assert not noted and "a batch of 7 cannot be divided among 2 processes" in said
