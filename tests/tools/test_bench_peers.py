"""bench/peers.py: sides in processes of their own, by turns, with the same text."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path

import kit
import mlx.core as mx
import mlx_lm
import pytest
from dflash_mlx.conversion import convert, load_drafter_weights

BENCH = Path(__file__).resolve().parents[2] / "bench"
spec = importlib.util.spec_from_file_location("peers", BENCH / "peers.py")
peers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peers)


def run_of(side, kind, trial, tps, equal=True):
    return {"side": side, "kind": kind, "trial": trial, "tokens": 9, "ttft_s": 0.1, "decode_tps": tps, "equal": equal}


def test_speed_is_over_mlx_lms_on_the_same_prompt_in_the_same_trial():
    runs = [run_of("mlx-lm", "a", 0, 10.0), run_of("mlx-lm", "a", 1, 20.0), run_of("mlx-lm", "b", 0, 40.0)]
    runs += [run_of("x", "a", 0, 20.0), run_of("x", "a", 1, 20.0), run_of("x", "b", 0, 160.0, equal=False)]
    rows = {(r["side"], r["kind"]): r for r in peers.summarise(runs)}
    assert rows["x", "a"]["ratio"] == pytest.approx(1.5) and rows["x", "b"]["ratio"] == 4.0
    of_all = rows["x", "all"]
    assert (of_all["ratio"], of_all["low"], of_all["high"], of_all["equal"], of_all["pairs"]) == (2.0, 1.0, 4.0, 2, 3)
    assert rows["mlx-lm", "all"]["ratio"] == 1.0


def test_a_pair_that_mlx_lm_did_not_answer_is_not_compared():
    rows = peers.summarise([run_of("mlx-lm", "a", 0, 10.0), run_of("x", "a", 0, 20.0), run_of("x", "a", 1, 99.0)])
    assert [(r["side"], r["kind"], r["pairs"]) for r in rows if r["side"] == "x"] == [("x", "a", 1), ("x", "all", 1)]


def test_an_answer_ends_before_eos_and_at_max_tokens():
    assert peers.said([5, 6, 0, 7], {0, 9}, 8) == peers.said([5, 6], {0}, 8) == [5, 6]
    assert peers.said([5, 6, 7], {0}, 2) == [5, 6]


def test_the_first_layers_of_a_target_are_a_model_of_their_own(pair, tmp_path):
    where = peers.first_layers(str(kit.TINY / "target"), 2, tmp_path)
    small, tokenizer = mlx_lm.load(where)
    ids, whole = mx.array([[5, 6, 7]]), pair[0]
    assert len(small.layers) == 2 and tokenizer.encode("def") == pair[1].encode("def")
    # bfloat16 weights on both sides of one float32 comparison.
    small.set_dtype(mx.float32)
    h = whole.model.norm(mx.array(kit.full_forward(whole, [5, 6, 7])[1])[None])
    assert mx.allclose(small(ids), whole.model.embed_tokens.as_linear(h), rtol=1e-4, atol=1e-4)
    assert peers.first_layers(str(kit.TINY / "target"), 2, tmp_path) == where


def test_a_quantized_drafter_is_written_out_with_the_same_numbers(tmp_path):
    source = str(kit.TINY / "drafter")
    convert(source, str(tmp_path / "q"), quantize=True, q_bits=4, q_group_size=32)
    config, dense = load_drafter_weights(peers.written_drafter("one", str(tmp_path / "q"), tmp_path))
    assert "quantization" not in config and {a.dtype for a in dense.values()} == {mx.float32}
    _, packed = load_drafter_weights(str(tmp_path / "q"))
    name = "layers.1.mlp.up_proj"
    parts = (packed[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
    assert mx.array_equal(dense[f"{name}.weight"], mx.dequantize(*parts, group_size=32, bits=4).astype(mx.float32))
    _, plain = load_drafter_weights(peers.written_drafter("two", source, tmp_path))
    assert set(plain) == set(dense) and mx.array_equal(plain["norm.weight"], load_drafter_weights(source)[1]["norm.weight"])


def test_another_drafter_of_the_same_name_is_written_out_anew(tmp_path):
    raw, weights = load_drafter_weights(str(kit.TINY / "drafter"))
    before = peers.written_drafter("one", str(kit.TINY / "drafter"), tmp_path)
    weights["norm.weight"] = weights["norm.weight"] * 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(raw))
    mx.save_safetensors(str(tmp_path / "other" / "model.safetensors"), weights)
    after = peers.written_drafter("one", str(tmp_path / "other"), tmp_path)
    assert mx.array_equal(load_drafter_weights(after)[1]["norm.weight"], weights["norm.weight"].astype(mx.float32))
    assert peers.written_drafter("one", str(kit.TINY / "drafter"), tmp_path) == before != after


def options(tmp_path, *sides, **changes):
    given = {"envs": tmp_path, "pair": "tiny", "draft_model": None, "sides": sides, "z_lab": None, "small_draft": None}
    given |= {"before": None, "block_size": None, "kinds": "function,copy", "max_tokens": 10, "trials": 2, "max_seconds": None}
    return Namespace(**given | {"dense": False, "out": tmp_path / "record.json"} | changes)


@pytest.mark.full
def test_every_side_answers_in_its_own_process_and_one_that_cannot_is_left_out(tmp_path):
    checkout = tmp_path / "no code here"
    checkout.mkdir()
    record = peers.measure(options(tmp_path, "mlx-lm", "z-lab", "ours", "mlx-lm-draft", z_lab=checkout))
    assert record["ended"] == "complete" and set(record["failed"]) == {"z-lab"}
    # Kept answer by answer.
    assert json.loads((tmp_path / "record.json").read_text())["runs"] == record["runs"]
    assert record["drafter_sha256"] == kit.TINY_DRAFTER_SHA256
    assert "No module named 'dflash'" in record["failed"]["z-lab"]
    assert [r["side"] for r in record["runs"]] == ["mlx-lm", "ours", "mlx-lm-draft"] * 2 + ["mlx-lm-draft", "ours", "mlx-lm"] * 2
    assert all(r["equal"] for r in record["runs"]) and record["versions"]["ours"]["mlx"] == mx.__version__
    shown = peers.table(record)
    assert "z-lab left out" in shown and "4/4" in shown
    # Cut short in its second trial, it is continued there.
    cut = record | {"runs": record["runs"][:9], "ended": "out of time"}
    (tmp_path / "record.json").write_text(json.dumps(cut))
    again = peers.measure(options(tmp_path, "mlx-lm", "z-lab", "ours", "mlx-lm-draft", z_lab=checkout))
    assert again["ended"] == "complete" and again["runs"][:9] == cut["runs"] and len(again["runs"]) == 12


def test_peers_warm_up_together_and_states_of_ours_alone():
    """The first peer answers only once the other one was asked; `ours` is asked when both are done."""
    asked, other = [], threading.Event()

    def ask(side):
        asked.append(side)
        if side == "z-lab":
            other.set()
        return {} if side == "mlx-dspark" else {"ids": [1]} if side != "mlx-lm" or other.wait(30) else None

    assert peers.warm_up(["mlx-lm", "ours", "z-lab", "mlx-dspark"], ask) == {"mlx-lm", "ours", "z-lab"}
    assert asked[-2:] == ["ours"] * 2 and sorted(asked[:-2]) == ["mlx-dspark", "mlx-lm", "mlx-lm", "z-lab", "z-lab"]


@pytest.mark.parametrize(("changes", "kept"), [({}, 2), ({"settings": {"trials": 9}}, 0), ({"ended": "complete"}, 0)])
def test_a_record_that_ran_out_of_time_is_continued(changes, kept, tmp_path):
    record = {"what": "w", "pair": "p", "drafter_sha256": "d", "settings": {"trials": 2}, "machine": {"chip": "C"}}
    earlier = record | {"ended": "out of time", "runs": [run_of("ours", "a", 0, 1.0), run_of("mlx-lm", "a", 0, 1.0)]} | changes
    (tmp_path / "record.json").write_text(json.dumps(earlier))
    assert len(peers.earlier_runs(record, tmp_path / "record.json")) == kept
    assert peers.earlier_runs(record, tmp_path / "none.json") == peers.earlier_runs(record, None) == []


def test_a_dense_target_has_no_quantized_matrix(tmp_path):
    def is_quantized(name, source, **options):
        return "quantization" in json.loads(
            (Path(peers.written_target(name, str(source), tmp_path, **options)) / "config.json").read_text()
        )

    convert(str(kit.TINY / "target"), str(tmp_path / "q"), quantize=True)
    assert is_quantized("q", tmp_path / "q") and not is_quantized("q", tmp_path / "q", dense=True)
    assert not is_quantized("float", kit.TINY / "target", dense=True)


def test_a_worker_says_why_it_failed_and_goes_on(tmp_path):
    """Two requests that cannot be answered, each with its sentence; nothing but JSON on stdout."""
    code = (
        "import sys, runpy; sys.argv = ['w', 'broken', '{}']\n"
        f"w = runpy.run_path({str(BENCH / 'peer_worker.py')!r})\n"
        "def broken(paths):\n"
        "    print('noise of a library')\n"
        "    def answer(ids, n):\n"
        "        raise ValueError(f'no {ids}')\n"
        "    return type('T', (), {'eos_token_ids': {3}})(), answer\n"
        "w['SIDES']['broken'] = broken; w['main']()\n"
    )
    asked = '{"ids": [1], "max_tokens": 2}\n{"ids": [2], "max_tokens": 2}\n'
    done = subprocess.run([sys.executable, "-c", code], input=asked, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and '"eos": [3]' in lines[0]
    assert lines[1:] == ['{"error": "ValueError: no [1]"}', '{"error": "ValueError: no [2]"}']


def test_speed_against_an_earlier_state_is_paired_by_prompt_and_trial():
    def run(side, trial, tps, said="a", drafted="d"):
        return {"side": side, "kind": "k", "trial": trial, "decode_tps": tps, "said": said, "drafted": drafted}

    runs = [run(side, i, tps * (i + 1)) for i in range(6) for side, tps in (("before", 10.0), ("ours", 12.0))]
    found = peers.against([*runs, run("before", 9, 1.0), run("mlx-lm", 0, 1.0)])
    assert found["pairs"] == found["same_ids"] == found["same_drafts"] == 6
    assert all(abs(found[name] - 1.2) < 1e-9 for name in ("ratio", "low", "high"))
    runs[1] = run("ours", 0, 6.0, "b")
    runs[3] = run("ours", 1, 24.0, drafted="e")
    assert (peers.against(runs)["same_ids"], peers.against(runs)["same_drafts"]) == (5, 5)
    assert peers.against(runs)["low"] < 1.0 < peers.against(runs)["ratio"]
    assert peers.against([run("ours", 0, 1.0)]) is None


def test_an_earlier_state_is_imported_whole_and_alone(tmp_path):
    checkout = tmp_path / "checkout"
    for file in ("dflash_mlx/__init__.py", "convert/__init__.py"):
        (checkout / file).parent.mkdir(parents=True)
        (checkout / file).write_text(f"NAME = {file!r}\n")
    code = "import dflash_mlx.conversion as c, dflash_mlx as d; print(d.NAME, c.NAME)"
    environment = {**os.environ, "PYTHONPATH": peers.laid_out(checkout, tmp_path / "laid")}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["dflash_mlx/__init__.py", "convert/__init__.py"]


@pytest.mark.full
def test_two_states_of_this_package_draft_the_same_ids_in_blocks_of_one_size(tmp_path):
    """The checkout beside itself: each round of both drafts a block's ids, from the drafter alone."""
    checkout = Path(__file__).resolve().parents[2]
    record = peers.measure(options(tmp_path, "ours", "before", before=checkout, block_size=5, trials=1))
    found = record["against_before"]
    assert found["pairs"] == found["same_ids"] == found["same_drafts"] == 2 and record["settings"]["block_size"] == 5
    assert all(
        r["drafts"] == 4 * r["rounds"] > 0 for r in record["runs"]
    ) and "the same drafts in all rounds in 2" in peers.table(record)
