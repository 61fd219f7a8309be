"""bench/table.py: docs/benchmarks.md's table is what the records say."""

import importlib.util
import json
from pathlib import Path

import pytest

from dflash_mlx.tools import bench_record
from dflash_mlx.tools.bench import Bench, Plan

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("bench_table", ROOT / "bench" / "table.py")
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)


def row(kind, speedup, temp=0.0, context=0, tau=3.0):
    return {"kind": kind, "temp": temp, "context": context, "speedup": speedup, "tau": tau, "pairs": 7, "equal": 7} | {
        "mlx_lm_decode_tps": 100.0 * speedup
    }


def record(chip, bits, *rows, **changes):
    runs = [{} for r in rows if r["kind"] != "all" for _ in range(7)]
    return {
        "date": "2026-01-02T00:00:00",
        "machine": {"chip": chip},
        "versions": {"mlx": "1.2", "mlx-lm": "3.4"},
        "model": "pair",
        "draft_model": "pair",
        "weights": {"bits": bits, "dtype": "bfloat16"},
        "settings": {"kinds": ["chat", "code"], "max_tokens": 64},
        "summary": list(rows),
        "runs": runs,
        "ended": "complete",
    } | changes


def shape(*cells):
    blocks = [{"block_size": 4, "break_even": 0.25, "cells": []}, {"block_size": 8, "break_even": None, "cells": []}]
    blocks.append({"block_size": None, "cells": []})
    for accept, *ups in cells:
        for block, up in zip(blocks, ups, strict=True):
            block["cells"].append({"accept": accept, "speedup": up})
    return {
        "shape": "big",
        "machine": {"chip": "C"},
        "weights": {"bits": [4], "dtype": "bfloat16"},
        "summary": {"blocks": blocks},
    }


def written(folder, **records):
    for name, content in records.items():
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(content))
    return table.section(folder)


def test_pages_table_is_what_the_records_say():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert table.put(text, table.section()) == text, "run: python bench/table.py --write"


def test_records_of_the_same_kinds_are_columns_of_one_table(tmp_path):
    a = record("A", [4], row("chat", 1.5), row("code", 2.0, tau=4.25), row("all", 1.7), row("all", 1.1, temp=1.0, tau=None))
    b = record("B", [], row("chat", 2.5), row("all", 2.25, context=1024), ended="out of time")
    shown = written(tmp_path, bench_b=b, bench_a=a)
    lines = shown.splitlines()
    assert lines[0] == "| decoding, times mlx-lm | pair, 4 bit, A | pair, bfloat16, B |"
    assert "| chat | 1.50 (tau 3.0) | 2.50 (tau 3.0) |" in lines
    assert "| code | 2.00 (tau 4.2) |  |" in lines
    assert "| all kinds, temperature 1 | 1.10 (plain) |  |" in lines
    assert "| all kinds, temperature 0, 1,024 tokens before |  | 2.25 (tau 3.0) |" in lines
    (of_a,) = [line for line in lines if line.startswith("- `bench-a.json`")]
    assert "mlx-lm alone 150 to 200 tokens/s" in of_a and "medians of 7 pairs; same text in 14 of 14." in of_a
    assert "same text in 7 of 7, out of time." in shown


def test_records_of_other_kinds_have_a_table_of_their_own(tmp_path):
    a, b = record("A", [4], row("chat", 1.5)), record("A", [4], row("function", 1.25))
    b["settings"]["kinds"] = ["function"]
    assert written(tmp_path, bench_a=a, bench_b=b).count("| decoding, times mlx-lm |") == 2


def test_shapes_show_the_rule_the_best_block_and_where_blocks_break_even(tmp_path):
    shown = written(tmp_path, shapes_x=shape((0.5, 1.2, 0.8, 1.25), (0.9, 1.5, 2.5, 2.4)))
    assert "| shape, random weights | accept 0.5 | accept 0.9 | break-even at block |" in shown
    assert "| big, 4 bit, C | 1.25, best 1.20 (4) | 2.40, best 2.50 (8) | 4: 0.25, 8: never |" in shown


def test_peers_are_rows_with_their_speed_and_how_often_they_said_the_same(tmp_path):
    def of(chip, **sides):
        rows = [{"side": side, "kind": "all", "ratio": up, "equal": 5, "pairs": 6} for side, up in sides.items()]
        rows += [{"side": side, "kind": "chat", "ratio": 9.0, "equal": 0, "pairs": 6} for side in sides]
        return {"pair": "p", "settings": {"dtype": "float32"}, "machine": {"chip": chip}, "summary": rows}

    shown = written(tmp_path, peers_a=of("A", ours=1.25, other=0.5), peers_b=of("B", ours=1.0))
    assert "| decoding, times mlx-lm | p, float32, A | p, float32, B |" in shown
    assert "| ours | 1.25, same text 5/6 | 1.00, same text 5/6 |\n| other | 0.50, same text 5/6 |  |" in shown


def test_a_record_without_figures_is_left_out(tmp_path):
    shown = written(tmp_path, bench_a=record("A", [4], summary=[]), shapes_a=shape() | {"summary": {"blocks": []}})
    assert shown == "No speed is recorded yet."


@pytest.mark.parametrize("text", ["none", table.BEGIN, table.END + table.BEGIN, f"{table.BEGIN}{table.END}{table.BEGIN}"])
def test_a_page_without_its_markers_is_refused(text):
    with pytest.raises(ValueError, match="once each in docs/benchmarks.md"):
        table.put(text, "new")


def test_only_what_stands_between_the_markers_is_replaced():
    text = f"head\n{table.BEGIN}\nold\n{table.END}\ntail"
    assert table.put(text, "new") == f"head\n{table.BEGIN}\nnew\n{table.END}\ntail"


@pytest.mark.full
def test_a_record_is_repeated_here_with_its_own_settings(pair, tmp_path):
    plan = Plan(kinds=("data",), temps=(0.0,), contexts=(0,), max_tokens=8, trials=1, block_size=3)
    there = Bench(*pair, plan, names=("tiny", "tiny")).go()
    out = tmp_path / "here" / "r.json"
    mine = table.here(there, None, out)
    assert bench_record.read_record(out) == mine and mine["ended"] == "complete"
    assert mine["settings"] == there["settings"] and len(mine["runs"]) == 1
    assert "differs: settings" not in bench_record.compare(there, mine)


def test_users_reports_are_in_the_page_and_another_file_is_refused(tmp_path):
    def entry(rows, us, **changes):
        found = {"what": "8B head", "rows": rows, "kernel_us": us, "stock_us": 20.0, "plan": "columns 4"}
        return found | {"refused": None, "wrong": None, "rows_bit_equal": True} | changes

    side = {"decode_tps": 40.0, "differs_at": None, "tau": 2.5}
    sent = {
        "what": "dflash-mlx doctor --report",
        "format": 1,
        "machine": {"chip": "Apple M9", "macos": "27.1 (X)"},
        "pairs": [
            {"pair": "tiny", "kernels": "off", "process": "complete", "sides": {"mlx_lm": side, "drafting": side}},
            {"pair": "tiny", "kernels": "on", "process": "stopped after 40 s", "sides": {}},
        ],
        # The quicker plan is wrong.
        "kernels": [{"kernel": "block_qmm", "entries": [entry(1, 10.0), entry(1, 5.0, wrong="differs"), entry(16, 12.0)]}],
    }
    written(tmp_path, **{"report_m9": sent})
    text = table.section(tmp_path)
    assert "| Apple M9 macOS 27.1 (X) | tiny | off | 40.0 |  | 40.0 |  | 2.50 | same |" in text
    assert "| tiny | on |  |  |  |  |  | stopped after 40 s |" in text
    assert "| Apple M9 | block_qmm | 8B head | 10 / 20 |  |  |  | 12 / 20 |" in text
    with pytest.raises(ValueError, match="report-x.json is 'other' of format None; it must be"):
        written(tmp_path, report_x={"what": "other"})
