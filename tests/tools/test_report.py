"""`doctor --report`: parts in order of worth within their time, a file that is whole at any time, and nobody's name in it."""

import json
import os
import subprocess
import sys
import time

import mlx.core as mx
import pytest

from dflash_mlx.kernels import autotune, names
from dflash_mlx.tools import private_names, report, system
from dflash_mlx.tools.report import make_report, summary


def entry(kernel, rows, us=10.0, **changes):
    found = {"kernel": kernel, "what": "head", "plan": "columns 4", "rows": rows, "refused": None, "wrong": None}
    return found | {"rows_bit_equal": True, "first_s": 1.0, "kernel_us": us, "stock_us": 20.0} | changes


def side(tps, differs_at=None):
    return {"decode_tps": tps, "ttft_s": 0.1, "ids": [1, 2], "differs_at": differs_at, "ms_a_round": {"draft": 1.0}}


class Runner:
    """Stands in for the parts' processes: what each finds, and how long it takes on a clock of its own."""

    def __init__(self, monkeypatch, seconds=1.0, **ends):
        self.seconds, self.ends, self.now, self.asked = seconds, ends, 0.0, []
        monkeypatch.setattr(report.time, "monotonic", lambda: self.now)

    def __call__(self, part, seconds):
        self.asked.append((part.name, seconds))
        self.now += min(self.seconds, seconds)
        found = self.ends.get(part.name.replace(" ", "_").replace(",", ""))
        if isinstance(found, BaseException):
            raise found
        if part.group == "kernels":
            kernel = part.arguments[0]
            return found or ({"entries": [entry(kernel, 1), entry(kernel, 16)], "cut": []}, "")
        return found or ({"sides": {"mlx_lm": side(9.0), "drafting": side(27.0)}}, "")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(autotune, "has_gpu", lambda: True)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    monkeypatch.setattr(system, "facts", lambda: system_facts)


system_facts = system.facts()


def test_parts_run_the_most_telling_first_and_all_are_in_the_file(gpu, monkeypatch, tmp_path):
    runner, path = Runner(monkeypatch), tmp_path / "report.json"
    said = []
    record = make_report(path, said.append, runner=runner)
    asked = [name for name, _ in runner.asked]
    texts = names(on="metal", text=True)
    assert asked[: len(texts)] == [f"kernel {name}, 8B shapes" for name in texts]
    assert asked[len(texts) : len(texts) + 2] == ["pair tiny, kernels off", "pair tiny, kernels on"]
    assert asked[-1].endswith("27B shapes") and len(said) == len(asked)
    assert json.loads(path.read_text()) == record and record["ended"] == "complete" and not record["cut"]
    assert len(record["kernels"]) == 2 * len(texts) and record["pairs"][1]["kernels"] == "on"
    text = "\n".join(summary(record, path))
    assert "head: right, rows equal; 1 rows 10/20 us, 16 rows 10/20 us" in text
    assert "pair        tiny, kernels on: mlx_lm 9.0, drafting 27.0 tokens/s; ids are mlx-lm's" in text
    assert report.TEMPLATE in text and "http" not in record["send"]


def test_the_time_is_kept_and_what_was_cut_is_named(gpu, monkeypatch, tmp_path):
    runner = Runner(monkeypatch, seconds=1000.0)
    record = make_report(tmp_path / "r.json", runner=runner)
    assert record["ended"] == "out of time" and record["seconds"] <= report.BUDGET_S
    assert len(record["cut"]) + len(runner.asked) == len(list(report.planned_parts()))
    assert record["cut"][-1].endswith("27B shapes: out of time") and all(s <= report._PAIR_S for _, s in runner.asked[:-1])


def test_where_there_is_more_time_than_parts_need_they_may_take_it(monkeypatch, tmp_path):
    runner = Runner(monkeypatch, pair_tiny_kernels_off=({"sides": {}, "ended": "out of time"}, ""))
    record = make_report(tmp_path / "r.json", runner=runner)
    assert runner.asked[0][1] > report._PAIR_S and record["cut"] == ["pair tiny, kernels off: fewer runs than planned"]


def test_a_part_that_dies_or_is_wrong_costs_the_others_nothing(gpu, monkeypatch, tmp_path):
    ends = {
        "kernel_block_qmm_8B_shapes": (
            {"entries": [entry("block_qmm", 1)], "cut": ["x, 16 rows: no time"]},
            "stopped after 30 s",
        ),
        "kernel_accept_8B_shapes": ({"entries": [entry("accept", 1, wrong="ids differ")]}, ""),
        "kernel_head_argmax_8B_shapes": ({"entries": [entry("head_argmax", 1, refused="no simd")]}, ""),
        "pair_tiny_kernels_on": ({"sides": {"mlx_lm": side(9.0), "drafting": side(8.0, 7)}}, ""),
    }
    record = make_report(tmp_path / "r.json", runner=Runner(monkeypatch, **ends))
    assert record["ended"] == "complete" and record["cut"] == [
        "kernel block_qmm, 8B shapes: stopped after 30 s",
        "kernel block_qmm, 8B shapes: x, 16 rows: no time",
    ]
    text = "\n".join(summary(record, "r.json"))
    assert "block_qmm: stopped after 30 s" in text and "accept head: WRONG: ids differ" in text
    assert "REFUSED: no simd" in text and "ids part from mlx-lm's: drafting at token 7" in text


def test_ctrl_c_keeps_what_the_part_had_found(gpu, monkeypatch, tmp_path):
    stopped = report.PartInterrupted({"sides": {"mlx_lm": side(9.0)}})
    path = tmp_path / "r.json"
    record = make_report(path, runner=Runner(monkeypatch, pair_tiny_kernels_on=stopped))
    assert record["ended"] == "interrupted" and json.loads(path.read_text()) == record
    assert record["pairs"][-1]["process"] == "interrupted" and "mlx_lm" in record["pairs"][-1]["sides"]
    assert record["cut"][0] == "pair tiny, kernels on: interrupted" and record["parts"][-1]["ended"] == "interrupted"
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_no_name_of_the_user_or_the_host_is_in_the_file(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("USER", "jdoe")
    monkeypatch.setenv("HOME", str(tmp_path / "jdoe"))
    monkeypatch.setattr(private_names.socket, "gethostname", lambda: "janes-mac.local")
    error = f"exit 1: {tmp_path}/jdoe/cache/k.cuh of jdoe on Janes-Mac"
    ends = {"kernel_accept_8B_shapes": ({"entries": [entry("accept", 1, refused=error)], "cut": [error]}, error)}
    path = tmp_path / "r.json"
    record = make_report(path, runner=Runner(monkeypatch, **ends))
    found = path.read_text().lower()
    assert "jdoe" not in found and "janes-mac" not in found and str(tmp_path) not in found
    (accept,) = (part for part in record["kernels"] if part["kernel"] == "accept" and part["model"] == "8B")
    assert accept["process"] == "exit 1: ~/k.cuh of user on host"


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(monkeypatch, tmp_path):
    with pytest.raises(OSError):
        make_report(tmp_path / "none" / "r.json", runner=lambda part, seconds: pytest.fail("ran"))


def test_without_a_gpu_each_text_says_why_it_did_not_run(monkeypatch, tmp_path):
    record = make_report(tmp_path / "r.json", runner=Runner(monkeypatch))
    assert {part["kernel"]: part["process"] for part in record["kernels"]} == {
        name: "not run: MLX sees no GPU here" for name in names(text=True)
    }
    assert [(pair["pair"], pair["kernels"]) for pair in record["pairs"]][0] == ("tiny", "off")
    assert "kernels     not run: MLX sees no GPU here" in summary(record, "r.json")


def child(code):
    return report.Part("p", "pairs", "runpy_stand_in", (), 9, {}, {"CODE": code})


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("keep(); end()", ""),
        ("keep(); sys.exit('no room in there')", "its process ended with 1: no room in there"),
        ("keep(); time.sleep(60)", "stopped after 3 s"),
        ("keep(); os.kill(os.getpid(), 9)", "its process ended with -9: nothing said"),
    ],
)
def test_a_process_that_dies_or_hangs_leaves_what_it_had_written(tmp_path, monkeypatch, code, ended):
    text = (
        "import os, sys, time\nout = sys.argv[-2]\n"
        "def keep(): open(out, 'w').write('{\"sides\": {}}')\ndef end(): assert 0 < float(sys.argv[-1]) - time.time() <= LIMIT\n"
        "exec(os.environ['CODE'])\n"
    )
    # Time to start is the machine's; only the one that hangs waits for its limit.
    seconds = 3.0 if "sleep" in code else 90.0
    (tmp_path / "runpy_stand_in.py").write_text(text.replace("LIMIT", str(seconds - min(report._GRACE_S, seconds / 2))))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found, how = report.run_part(child(code), seconds)
    assert found == {"sides": {}} and how == ended


@pytest.mark.full
def test_the_command_writes_a_file_here(tmp_path):
    path = tmp_path / "report.json"
    began = time.monotonic()
    command = [sys.executable, "-m", "dflash_mlx.cli.app", "doctor", "--report", str(path)]
    # Where smollm2 is not cached the report is of tiny alone: a minute in place of five.
    given = {**os.environ, "DFLASH_MLX_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=given)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert time.monotonic() - began < report.BUDGET_S + 30 and record["what"] == report.WHAT
    assert record["pairs"][0]["sides"]["drafting"]["differs_at"] is None and "Written in" in done.stdout


def test_report_refuses_what_names_a_model():
    from typer.testing import CliRunner

    from dflash_mlx.cli.app import app

    done = CliRunner().invoke(app, ["doctor", "--report", "x.json", "--model", "tiny"])
    assert done.exit_code == 2 and "--report" in done.output
