"""Kernels checked and timed on a made-up Metal device: right, rows equal, refused, in time."""

import itertools
import json
import sys
from pathlib import Path

import emulator
import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import kernels as script

from dflash_mlx.kernels import block_linear, names, trials
from dflash_mlx.kernels.block_qmm import block_qmm_ops
from dflash_mlx.tools import kernel_run, kernel_shapes
from dflash_mlx.tools.kernel_run import Bench, line


@pytest.fixture
def small(monkeypatch):
    """Shapes of a few values, and no spare copies."""
    given = {
        "LAYERS": [("head", 96, 64), ("down", 32, 128)],
        "HEADS": (160, 64),
        "CACHES": [("full", 4, 2, 32, 48, 0), ("windowed", 4, 2, 32, 48, 16)],
        "EXPERTS": [("experts", 8, 2, 32, 64)],
        "AROUND": [("gate and up", 32, 64, "norm gated"), ("down", 24, 64, "residual")],
    }
    for name, shapes in given.items():
        monkeypatch.setattr(kernel_shapes, name, {"8B": shapes})
    monkeypatch.setattr(kernel_shapes, "SPREAD_BYTES", 0)
    monkeypatch.setattr(trials, "SAMPLES", 1)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)


@pytest.fixture
def device(small, monkeypatch):
    """A Metal device on which MLX's own product stands for the texts; what a test sets here happens to a plan's columns."""
    faults = {}

    def maker(name, **_):
        def launch(*, inputs, template, output_shapes, **_):
            given, (x, *weights) = dict(template), inputs
            fault = faults.get(given["COLS"])
            if fault == "refused":
                raise RuntimeError("[metal] too many threads")
            y = block_qmm_ops(x, *weights, given["GROUP"], given["BITS"])
            if fault == "wrong":
                y = y * 1.5
            if fault == "rows" and x.shape[0] > 1:
                # Within the tolerance, as another order of sums would be.
                y = y * mx.array(1 + 1e-6, dtype=y.dtype)
            return [y.reshape(output_shapes[0])]

        return launch

    monkeypatch.setattr(mx.fast, "metal_kernel", maker)
    return faults


def entries(kernel="block_qmm", dtype=mx.float32, **options):
    record, kept = {}, []
    bench = Bench(record, lambda so_far: kept.append(json.dumps(so_far)), dtype, **options)
    bench.bits = (4,)
    bench.run(kernel)
    assert kept and json.loads(kept[-1]) == record
    return record


def test_each_plan_is_checked_and_timed_at_each_row_count(device):
    found = entries()["entries"]
    assert {(e["what"], e["rows"]) for e in found} == {
        (f"4 bit 8B {name}", rows) for name in ("head N 96 K 64", "down N 32 K 128") for rows in (1, 2, 4, 8, 16)
    }
    assert {e["plan"] for e in found} == {"columns 2", "columns 4"}
    assert all(e["wrong"] is e["refused"] is None and e["rows_bit_equal"] and e["kernel_us"] > 0 < e["stock_us"] for e in found)
    assert "right" in line(found[0]) and "rows agree" in line(found[0])


@pytest.mark.parametrize("fault", ["refused", "wrong", "rows"])
def test_a_fault_of_one_plan_is_that_plans(device, fault):
    device[4] = fault
    found = entries(rows=(1, 4))["entries"]
    sound = [e for e in found if e["plan"] == "columns 2"]
    faulty = [e for e in found if e["plan"] == "columns 4" and e["rows"] == 4]
    assert len(sound) == 4 and all(e["wrong"] is e["refused"] is None and e["rows_bit_equal"] for e in sound)
    for e in faulty:
        found = {"refused": e["refused"], "wrong": e["wrong"], "rows": e["rows_bit_equal"] is False or None}
        assert [name for name, said in found.items() if said] == [fault]
        assert ("kernel_us" in e) == (fault != "refused") and script.fault(e)
    assert fault != "refused" or faulty[0]["refused"] == "RuntimeError: [metal] too many threads"


def test_what_there_is_no_time_or_no_memory_for_is_named(device, monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(trials, "clock", lambda: next(now))
    record = entries(until=4)
    assert any(text.endswith("no time was left") for text in record["cut"])
    monkeypatch.setattr(kernel_run, "limit_bytes", lambda: 14_000)
    record = entries()
    assert record["cut"][0].startswith("4 bit 8B head N 96 K 64: it needs 0.0 MB and") and len(record["cut"]) == 1


def test_columns_that_are_given_are_the_plans(device):
    bench = Bench(record := {}, lambda so_far: None, mx.float32, (1,))
    bench.columns, bench.bits = [1, 8], (4,)
    bench.run("block_qmm")
    assert {e["plan"] for e in record["entries"]} == {"columns 1", "columns 8"}


def test_on_cuda_stock_mlx_is_timed_when_all_else_is_done(device, monkeypatch):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "cuda_kernel", mx.fast.metal_kernel, raising=False)
    told = []
    bench = Bench({}, lambda so_far: None, mx.float32, (1, 4), say=told.append)
    bench.bits = (4,)
    bench.run("block_qmm")
    assert ["stock" in text for text in told] == [False] * 4 + [True] * 4


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("kernel", names(text=True))
def test_every_text_is_right_and_its_rows_are_equal_in_all_its_plans(small, kernel):
    with emulator.emulated():
        record = entries(kernel, mx.float16, rows=(1, 2, 16))
    assert record["entries"] and not record["cut"] and not any(map(script.fault, record["entries"])), record
    # Rows of accept and of a recurrence depend on those before them: kernels/test_gated_delta.py compares blocks of them.
    alone = kernel not in ("accept", "gated_delta")
    assert all(e["kernel_us"] > 0 and (e["rows_bit_equal"] or not alone) for e in record["entries"])


@pytest.mark.full
@pytest.mark.emulator
def test_what_stands_around_products_is_in_the_comparison(small, monkeypatch):
    ops = block_linear.block_linear_ops
    monkeypatch.setattr(block_linear, "block_linear_ops", lambda x, w, norm, *rest: ops(x, w, None, *rest))
    with emulator.emulated():
        record = entries("block_linear", mx.float16, rows=(1,))
    assert {e["what"].split()[-1] for e in record["entries"] if e["wrong"]} == {"gated"}
