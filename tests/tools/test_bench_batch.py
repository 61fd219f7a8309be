"""dflash-mlx bench --batch: both batch_generate by turns, figures from them, and the command."""

import copy
import json

import cli_kit
import pytest

from dflash_mlx.tools import bench, bench_batch, bench_record
from dflash_mlx.tools.bench import Bench, Plan
from dflash_mlx.tools.bench_page import page

PLAN = Plan(kinds=("function", "copy"), temps=(0.0,), max_tokens=6, trials=2, block_size=4, batch=(1, 3))


def run_of(pair, plan=PLAN):
    return Bench(*pair, plan, names=("tiny", "tiny")).go()


@pytest.fixture(scope="module")
def record(pair):
    return run_of(pair)


def test_a_record_holds_every_batch_by_turns_and_every_row_said_the_same(record):
    assert record["ended"] == "complete" and record["runs"] == [] and json.loads(json.dumps(record)) == record
    assert [(one["rows"], one["trial"]) for one in record["batches"]] == [(1, 0), (3, 0), (1, 1), (3, 1)]
    assert [one["first"] for one in record["batches"]] == ["mlx_lm", "dflash", "dflash", "mlx_lm"]
    for one in record["batches"]:
        ours, plain = one["dflash"], one["mlx_lm"]
        assert one["equal"] == one["rows"] and ours["tokens"] == plain["tokens"] <= 6 * one["rows"]
        assert ours["tps"] == pytest.approx(ours["tokens"] / ours["seconds"])
        assert one["speedup"] == pytest.approx(ours["tps"] / plain["tps"])
        # A fixed block: every row's rounds checked three drafts, until little was left to write.
        assert max(map(int, ours["widths"])) == 3 and sum(ours["widths"].values()) == ours["rounds"] >= one["rows"]
    assert not bench_record.faults(record)


def test_prompts_go_through_the_kinds_and_a_larger_batch_holds_a_smaller_ones(pair):
    model, tokenizer, drafter = pair
    there = Bench(model, tokenizer, drafter, PLAN)
    one, three = (there.batches.prompts((rows, 0.0, 0), 1) for rows in (1, 3))
    assert three[:1] == one and three[1] == there.ids(("copy", 0.0, 0), 1) and three[2] == there.ids(("function", 0.0, 0), 2)


def test_a_row_that_says_something_else_is_counted_told_and_a_fault(pair, monkeypatch):
    real = bench_batch.batch_generate

    def other(*args, **kwargs):
        response = real(*args, **kwargs)
        response.token_ids[-1][2] += 1
        return response

    monkeypatch.setattr(bench_batch, "batch_generate", other)
    record = run_of(pair, Plan(kinds=("copy",), temps=(0.0,), max_tokens=4, trials=1, block_size=4, batch=(2,)))
    assert record["batches"][0]["equal"] == 1 and bench_record.faults(record) == 1
    shown = bench_record.table(record)
    assert "Text differs from mlx-lm's in 1 of 2 rows (2 at once, T 0, context 0, turn 1)." in shown
    assert "please report it" in shown


def test_figures_of_a_cell_are_medians_and_tau_is_over_all_rounds(record):
    batches = [copy.deepcopy(record["batches"][1]) for _ in range(3)]
    for one, up, committed in zip(batches, (6.0, 1.0, 2.0), (6, 12, 18), strict=True):
        one["speedup"], one["dflash"]["tps"] = up, 10 * up
        one["dflash"] |= {"committed": committed, "drafting_rounds": 6, "widths": {"0": 4, "10": 6}, "width_reasons": {"why": 3}}
    batches[0]["equal"] = 2
    [row] = bench_batch.summarise(batches)
    assert (row["speedup"], row["low"], row["high"], row["dflash_tps"], row["tau"]) == (2.0, 1.0, 6.0, 20.0, 2.0)
    assert (row["equal"], row["compared"], row["mean_width"]) == (8, 9, 6.0)
    assert bench_batch.shown(row)[-3:] == ["2.00", "0 (40%) 10 (60%)", "8/9"]
    assert bench_batch.notes(batches)[0] == "In 9 of 9 rows: why."


def test_table_page_and_comparison_show_every_cell(record):
    shown, html = bench_record.table(record), page(record)
    for row in record["batch_summary"]:
        for text in bench_batch.shown(row)[3:]:
            assert text in shown and text in html
    assert "Many prompts at once" in html and "3 rows" in html and "speed-up by kind" not in html.lower()
    assert bench_batch.MEANINGS[0] in shown and "copied" not in shown
    both = bench_record.compare(record, record)
    assert "tokens a round A/B" in both and "differs" not in both
    older = {**record, "settings": {k: v for k, v in record["settings"].items() if k != "batch"}, "batch_summary": []}
    assert bench_record.compare(older, older).endswith("No cell is in both.") and bench.plan_of(record) == PLAN


@pytest.mark.parametrize("text", ["0", "1,x", "", "4,-1"])
def test_what_is_no_number_of_rows_is_refused(text):
    done = cli_kit.run("bench", "--batch", text, env={"COLUMNS": "200"})
    assert done.returncode == 2 and "give numbers of rows from 1 on" in done.stderr


def test_the_command_times_batches_at_temperature_0():
    asked = "--model tiny --draft-model tiny --batch 2,2 --trials 1 -m 3 --kinds copy --block-size 2 --json"
    done = cli_kit.run("bench", *asked.split())
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert [(one["rows"], one["temp"]) for one in got["batches"]] == [(2, 0.0)] and got["settings"]["batch"] == [2]
    drawn = cli_kit.run("bench", "--batch", "2", "--plot", "p.png", env={"COLUMNS": "200"})
    assert drawn.returncode == 2 and "--html draws many at once" in drawn.stderr
