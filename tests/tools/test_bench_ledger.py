"""bench/ledger.py: what a round launches on Metal is what the record says, and a change that adds to it fails."""

import dataclasses
import importlib
import itertools
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.models.drafter import DecoderLayer, Drafter

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module", autouse=True)
def scripts():
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def ledger():
    return importlib.import_module("ledger")


@pytest.fixture(scope="module")
def recorded(ledger):
    cells = json.loads(ledger.RECORD.read_text())["cells"]
    return {(c["model"], c["rows"], c["context"]): {k: v for k, v in c.items() if k != "host_ms"} for c in cells}


@pytest.fixture
def afresh(ledger):
    """Rounds counted again in a test that changes a layer, and after it."""
    for counted in (ledger.ledger, ledger.walk):
        counted.cache_clear()
    yield
    for counted in (ledger.ledger, ledger.walk):
        counted.cache_clear()


@pytest.mark.parametrize("name, rows", [("qwen3-8b", 4), ("qwen3.5-9b", 8)])
def test_round_launches_what_the_record_says(ledger, recorded, name, rows):
    assert ledger.count(name, rows, 1024) == recorded[name, rows, 1024], "python bench/ledger.py --write"


@pytest.mark.full
def test_every_cell_of_the_record_is_what_the_loop_does(ledger, recorded):
    cells = list(ledger.cells(list(ledger.ledger_models.published())))
    assert list(recorded) == cells
    different = [cell for cell in cells if ledger.count(*cell) != recorded[cell]]
    assert not different, "python bench/ledger.py --write"


@pytest.mark.full
def test_docs_hold_the_table_of_the_record(ledger):
    text = ledger.DOCS.read_text()
    assert ledger.put(text, ledger.section(json.loads(ledger.RECORD.read_text()))) == text, "python bench/ledger.py --write"


def _one_more_add(self, h, attend, inner=DecoderLayer.sublayers):
    return inner(self, h, attend) + h


def _one_more_copy(self, h, attend, inner=DecoderLayer.sublayers):
    return mx.contiguous(inner(self, h, attend).transpose(0, 2, 1)).transpose(0, 2, 1)


@pytest.mark.parametrize("planted, kernel", [(_one_more_add, "elementwise"), (_one_more_copy, "copy")])
def test_one_more_operation_in_a_layer_is_counted(ledger, recorded, afresh, monkeypatch, planted, kernel):
    monkeypatch.setattr(DecoderLayer, "sublayers", planted)
    found, before = ledger.count("qwen3-8b", 4, 1024), recorded["qwen3-8b", 4, 1024]
    assert found["kernels"][kernel] >= before["kernels"][kernel] + 5
    assert found["stages"]["draft"]["launches"] >= before["stages"]["draft"]["launches"] + 5
    assert found["stages"]["draft"]["bytes"] > before["stages"]["draft"]["bytes"]
    assert found["stages"]["verify"] == before["stages"]["verify"]


def test_cache_that_is_held_twice_is_copied_whole(ledger, recorded, afresh, monkeypatch):
    inner = Drafter.mask_rows

    def holding(self, ids, features, cache, start):
        # Read before the pass writes into it.
        held = cache[0].keys.sum()
        return inner(self, ids, features, cache, start) + held.astype(mx.bfloat16)

    monkeypatch.setattr(Drafter, "mask_rows", holding)
    found = ledger.count("qwen3-8b", 4, 1024)
    assert "copy of a whole cache" not in recorded["qwen3-8b", 4, 1024]["kernels"]
    assert found["kernels"]["copy of a whole cache"] == 1


def test_draft_is_handed_over_by_itself_and_its_head_runs_for_the_drafts_that_are_needed(ledger):
    round_ = ledger.walk("qwen3-8b", 1024).primitives(4, 2, 3)
    # The pass at each of its 5 taps, and as a whole.
    real = [h for h in round_.handed if h.real]
    assert [h.stage for h in real][:8] == ["draft", *["verify"] * 6, "accept"]
    assert [len(h.arrays) == 0 and len(h.names) for h in real[1:6]] == [1] * 5
    vocabulary = 151936
    heads = {
        p.stage: p.outputs[0][1] for p in round_.primitives if p.kind == "QuantizedMatmul" and p.outputs[0][1][-1] == vocabulary
    }
    assert heads == {"draft": (1, 4, vocabulary), "accept": (1, 4, vocabulary)}


def test_a_rollback_is_one_launch_a_recurrent_layer(ledger):
    launches = [launch.kernel for launch in ledger.ledger("qwen3.5-9b", 8, 1024).launches if launch.stage == "rollback"]
    assert launches == ["gated delta"] * 24


def test_walk_leaves_weights_and_memory_as_they_were(ledger):
    walk = ledger.walk("qwen3-8b", 1024)
    before = {k: id(v) for k, v in walk.drafter.items()}
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    walk.primitives(4, 2, 3)
    assert mx.get_peak_memory() - held < 1 << 20
    assert {k: id(v) for k, v in walk.drafter.items()} == before
    assert walk.drafter.fc.weight.shape == (4096, 5 * 4096 // 8)


def test_primitive_without_a_rule_is_refused(ledger):
    walk = importlib.import_module("ledger_walk")
    array = ("a", (2, 3), mx.float32)
    one = walk.Round([walk.Primitive("Mystery", [], [array], [("b", (2, 3), mx.float32)])], {"a": array}, [])
    with pytest.raises(KeyError, match="no rule says what Mystery launches"):
        ledger.Ledger(one, ledger.GPU)


def test_strides_of_a_reshape_are_those_that_need_no_copy(ledger):
    metal = importlib.import_module("ledger_metal")
    base = np.zeros((2, 3, 4, 5), np.int8)
    seen = set()
    shapes = ((6, 20), (24, 5), (2, 60), (120,), (1, 2, 12, 5), (40, 3), (4, 15), (2, 3, 2, 5))
    for axes, (start, step), shape in itertools.product(itertools.permutations(range(4)), ((0, 1), (1, 1), (0, 2)), shapes):
        view = base.transpose(axes)[..., start::step]
        if view.size != np.prod(shape):
            continue
        layout = metal.Layout(view.shape, mx.int8, view.strides, 0, base.size)
        again = view.reshape(shape)
        found = metal.reshaped(layout, shape)
        assert (found is not None) == np.shares_memory(again, base), (view.strides, view.shape, shape)
        if found is not None:
            assert all(n == 1 or s == t for n, s, t in zip(shape, found, again.strides, strict=True))
        seen.add(found is None)
    assert seen == {True, False}


def test_milliseconds_follow_bytes_products_and_waits():
    time, metal = importlib.import_module("ledger_time"), importlib.import_module("ledger_metal")
    chip = time.Chip("made up", metal.Gpu(15, "s"), 100, 2 / 0.65, bandwidth=0.5, wide=1e12, block=2e12, gap_us=10, block_rows=32)
    # 50 GB/s and 1e12 multiply-adds a second.
    assert time.round_ms([metal.Launch("copy", "", 50e6, waits=False)], chip) == pytest.approx(1)
    assert time.round_ms([metal.Launch("copy", "", 50e6)], chip) == pytest.approx(1.01)
    assert time.round_ms([metal.Launch("attention", "", 50e6, macs=2e9, waits=False)], chip) == pytest.approx(2)
    # 6 rows in 2 tiles of 3: the weight is read twice; 10 rows padded to 32.
    few = metal.Launch("qmv wide", "", 50e6, macs=6e8, weight_bytes=50e6, rows=6, tiles=2, waits=False)
    assert time.round_ms([few], chip) == pytest.approx(2)
    many = metal.Launch("qmm", "", 50e6, macs=10e9, weight_bytes=50e6, rows=10, waits=False)
    assert time.round_ms([many], chip) == pytest.approx(16)


@pytest.mark.full
def test_predictions_within_a_quarter_of_figures_that_were_not_fitted(ledger):
    tried = [check for check in ledger.checks() if not check.fitted]
    assert len(tried) >= 10
    assert {check.what: check.error for check in tried if abs(check.error) > 0.25} == {}


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.5-9b", pytest.param("qwen3.6-35b-a3b", marks=pytest.mark.full)])
def test_building_traced_passes_costs_the_host_little(name):
    found = importlib.import_module("host").built(name, 16, repeats=12)
    # Measured: 0.4, 0.6 and 1.8 ms of 2.2, 3.4 and 7.0, and rounds of 0.6, 1.1 and 3.2 of 3.0, 4.5 and 9.0.
    assert found["traced"] < 0.5 * found["ordinary"] and found["traced"] < found["mlx_lm"]
    assert found["traced_round"] < 0.75 * found["round"] and "of these ordinary" not in found


def test_a_product_of_ours_takes_the_longer_of_reading_and_its_instructions():
    ours, time, metal = (importlib.import_module(name) for name in ("ledger_ours", "ledger_time", "ledger_metal"))
    # 50 GB/s; 0.79e12 instructions a second.
    chip = time.Chip("made up", metal.Gpu(15, "s"), 100, 2.0, bandwidth=0.5, wide=1e9, block=1e9)
    few = metal.Launch("qmv wide", "", 51e6, macs=4 * 89e6, weight_bytes=50e6, rows=4, tiles=1)
    assert ours.launch_s(few, chip) == pytest.approx(1e-3 * (1 + 1 / 50))
    many = metal.Launch("qmm", "", 50e6, macs=7 * 89e6, weight_bytes=50e6, rows=7, tiles=1)
    assert ours.launch_s(many, chip) == pytest.approx(89e6 * ours.INSTRUCTIONS[8] / 0.79e12)
    # MLX's where that is quicker: here by its bytes alone.
    assert ours.launch_s(many, dataclasses.replace(chip, block=1e15)) == pytest.approx(1e-3)


@pytest.mark.full
def test_docs_hold_the_prediction_with_our_own_products(ledger):
    ours, docs = importlib.import_module("ledger_ours"), ledger.DOCS.read_text()
    assert ours.table() in docs and ours.long_table() in docs, "python bench/ledger_ours.py"


def test_folded_rows_read_keys_once_for_all_heads_that_share_them(ledger):
    ours, rows, context, keys = importlib.import_module("ledger_ours"), 8, 4096, 4 * 4104 * 256 * 2
    ways = ledger.walk("qwen3.5-27b", context).primitives(rows, 4, 5), ours.folded("qwen3.5-27b", rows, context)
    launches = [ledger.Ledger(way, ledger.GPU).launches for way in ways]
    products = [[x for x in way if x.kernel == "matmul" and x.stage == "verify"] for way in launches]
    # Two in each of 16 layers, of 24 heads to 4; as many multiply-adds.
    stock, folded = ([product.nbytes for product in way] for way in products)
    assert len(stock) == len(folded) == 32 and sum(stock) - sum(folded) == pytest.approx(32 * 5 * keys, rel=0.01)
    assert sum(x.macs for x in products[0]) == sum(x.macs for x in products[1])
    chip = next(chip for chip in ours.chips() if chip.name.startswith("M1"))
    before, after = ours.folding_ms("qwen3.5-27b", rows, context, chip)
    assert 0.9 < after / before < 0.95
    # One row, and what MLX does as well, stays MLX's.
    stock_ms, folded_ms = ours.folding_ms("qwen3.5-27b", 1, context, chip)
    assert stock_ms == pytest.approx(folded_ms)


@pytest.mark.parametrize("block, ordinary, traced", [(8, 135, 60), (16, 151, 55)])
def test_a_drafters_pass_launches_what_the_docs_say(block, ordinary, traced):
    draft = importlib.import_module("ledger_draft")
    assert [len(draft.launches(block, way)) for way in (False, True)] == [ordinary, traced], "docs/kernels.md says these"
