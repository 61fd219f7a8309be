"""bench/shapes.py, host.py and train_data.py: planned texts, every pass paid, passes made again, processes by turns."""

import importlib.util
import io
import json
import sys
from argparse import Namespace
from pathlib import Path

import mlx.core as mx
import pytest
from kit import TINY_DRAFTER_SHA256

BENCH = Path(__file__).resolve().parents[2] / "bench"


def script(name):
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


shapes, host, prefill, train_data = (script(name) for name in ("shapes", "host", "prefill", "train_data"))

QWEN3 = {
    **shapes.SHAPES["qwen3-8b"][0],
    **{"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 32, "vocab_size": 1100},
}
HYBRID = shapes.qwen3_5(64, 192, tied=True)
HYBRID["text_config"] |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
HYBRID["text_config"] |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "vocab_size": 1100}
HYBRID["text_config"] |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
DRAFTER = {**shapes.drafter_config(64, 128, 1100, 1099, [0, 1, 2], 1e6), "num_attention_heads": 4, "num_key_value_heads": 2}


def options(shape, **changes):
    given = {"shape": shape, "bits": 16, "dtype": "float32", "accept": [0.0, 0.7, 1.0], "block_size": [2, 5], "context": 20}
    return Namespace(**given | {"tokens": 61, "trials": 1, "max_seconds": None, "out": None} | changes)


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "small", (QWEN3, DRAFTER, "this test"))
    monkeypatch.setitem(shapes.SHAPES, "hybrid", (HYBRID, DRAFTER, "this test"))


@pytest.mark.parametrize(("shape", "bits"), [("small", 16), ("small", 4), ("hybrid", 16)])
@pytest.mark.full
def test_the_planned_text_comes_out_at_the_set_acceptance(shape, bits):
    record = shapes.measure(options(shape, bits=bits))
    summary = record["summary"]
    assert record["ended"] == "complete" and summary["equal"] == summary["runs"] == 3 * 3 + 10
    of = {(b["block_size"], c["accept"]): c for b in summary["blocks"] for c in b["cells"]}
    for K in (2, 5):
        assert of[K, 0.0]["tau"] == 1 and of[K, 1.0]["tau"] == K
        # 20 rounds and more of a hashed coin.
        assert of[K, 0.7]["tau"] == pytest.approx(shapes.expected_tau(0.7, K - 1), rel=0.35)
    assert {b["block_size"] for b in summary["blocks"]} == {2, 5, None}
    shown = shapes.table(record)
    assert "Planned text in 19 of 19 runs" in shown and "\npolicy" in shown


def test_errors_come_at_the_set_rate_and_nothing_repeats():
    line = shapes.Line(151936)
    ids = mx.array(line.tokens(7, line.period))
    assert line.period == 65536 and len(set(ids.tolist())) == line.period
    assert mx.array_equal(line.next(ids[:-1]), ids[1:]) and line.next(ids[-1:]).tolist() == [7]
    for accept in (0.0, 0.5, 0.9, 1.0):
        line.accept = accept
        assert 1 - line.wrong(ids).astype(mx.float32).mean().item() == pytest.approx(accept, abs=0.01)
    line.accept = 0.5
    wrong = line.wrong(ids).tolist()
    pairs = sum(a and b for a, b in zip(wrong, wrong[1:], strict=False)) / len(wrong)
    assert pairs == pytest.approx(0.25, abs=0.02)


def test_drafts_are_the_line_after_the_anchor_with_wrong_ones_in_their_places():
    line = shapes.Line(1100)
    line.accept = 0.6
    right = line.tokens(5, 9)[1:]
    (drafts,) = line.drafts(mx.array([5], dtype=mx.int32), 8).tolist()
    wrong = line.wrong(mx.array(right, dtype=mx.uint32)).tolist()
    assert any(wrong) and not all(wrong)
    assert drafts == [(t + 1) % line.period if w else t for t, w in zip(right, wrong, strict=True)]


def nodes(array, name):
    """How many operations of a kind an array waits for."""
    text = io.StringIO()
    mx.export_to_dot(text, array)
    return text.getvalue().count(f'label ="{name}"')


def test_planned_values_wait_for_every_pass():
    model, line = shapes.planned_target(QWEN3, 16, mx.float32)
    drafter = shapes.planned_drafter(DRAFTER, model, line)
    output = shapes.Target(model, drafter.config.target_layer_ids)(mx.array([[1, 2, 3]]))
    hidden, features = output.hidden, output.features
    assert nodes(hidden, "ScaledDotProductAttention") + nodes(hidden, "Softmax") == 4
    assert nodes(hidden, "Matmul") >= 4 * 7
    mx.eval(hidden, features)
    cache = drafter.make_cache()
    drafted = drafter.draft(mx.array([3]), features[:, :2], cache, 0, 5)
    assert nodes(drafted, "Matmul") >= 5 * 7 + 1 and nodes(drafted, "ArgReduce") == 1


def test_a_planned_pass_walks_no_modules(monkeypatch):
    """Its head is known: looking for it in each pass would be timed as a part of it."""
    model, _ = shapes.planned_target(HYBRID, 16, mx.float32)
    monkeypatch.setattr(shapes.nn.Module, "named_modules", lambda _: pytest.fail("walked"))
    mx.eval(model(mx.array([[1, 2, 3]])))


def timed_run(tps, accept=None, block_size=None, widths=None):
    about = {"accept": accept, "block_size": block_size, "plain": accept is None, "equal": True}
    rounds = {"rounds": 10, "drafting_rounds": 5, "committed": 15, "decode_s": 1.0, "widths": widths or {}}
    return about | rounds | {"decode_tps": tps}


def test_a_speed_up_is_over_the_plain_runs_beside_it():
    """The machine slows down to half of its speed; the policy gains a half throughout."""
    plain, ours = [timed_run(tps) for tps in (100.0, 60.0, 40.0)], [timed_run(120.0, 0.5), timed_run(75.0, 0.5)]
    assert shapes.speed_ups([plain[0], ours[0], plain[1], ours[1], plain[2]]) == [None, 1.5, None, 1.5, None]
    # The last one was cut off before its second plain run.
    assert shapes.speed_ups([plain[0], ours[0]]) == [None, 1.2]


def test_the_summary_has_all_widths_that_the_policy_chose():
    """One run from a file, with its widths as text, and one of this process."""
    runs = [timed_run(100.0), timed_run(150.0, 0.5, widths={"7": 3, "0": 2}), timed_run(100.0)]
    runs += [timed_run(50.0, 0.5, widths={7: 1, 15: 4}), timed_run(100.0)]
    (cell,) = shapes.summarise(runs)["blocks"][0]["cells"]
    assert cell["widths"] == {"7": 4, "0": 2, "15": 4} and (cell["low"], cell["speedup"], cell["high"]) == (0.5, 1.0, 1.5)


@pytest.mark.full
def test_a_record_that_ran_out_of_time_is_continued_where_it_stopped(tmp_path):
    given = {"accept": [0.7], "block_size": [], "tokens": 9, "trials": 2, "out": tmp_path / "record.json"}
    whole = shapes.measure(options("small", **given))
    cut = whole | {"runs": whole["runs"][:4], "ended": "out of time"}
    (tmp_path / "record.json").write_text(json.dumps(cut))
    again = shapes.measure(options("small", **given))
    assert [r["plain"] for r in again["runs"]] == [True, False, True] * 2 and again["ended"] == "complete"
    assert again["runs"][:4] == json.loads(json.dumps(cut["runs"]))
    # Nothing of a finished record, or of one with other settings.
    (tmp_path / "record.json").write_text(json.dumps(cut | {"ended": "complete"}))
    assert shapes.earlier_runs(again, tmp_path / "record.json") == []
    (tmp_path / "record.json").write_text(json.dumps(cut | {"settings": {}}))
    assert shapes.earlier_runs(again, tmp_path / "record.json") == []


@pytest.mark.parametrize(
    ("cost", "width", "accept"), [(0.9, 3, 0.0), (4.1, 3, None), (1.5, 1, 0.5), (1.75, 2, 0.5), (4.0, 3, 1.0)]
)
def test_break_even_is_where_expected_tau_is_the_cost(cost, width, accept):
    got = shapes.break_even(cost, width)
    assert got is None if accept is None else got == pytest.approx(accept, abs=1e-6)


@pytest.mark.full
def test_a_run_out_of_time_has_the_figures_that_it_got_to():
    record = shapes.measure(options("small", max_seconds=1e-9))
    assert record["ended"] == "out of time" and record["runs"] == [] and "no figures: out of time" in shapes.table(record)


def test_the_published_shapes_are_of_their_published_size():
    def weights(config):
        H, inter, V = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
        return H, inter, V

    assert weights(shapes.SHAPES["qwen3-8b"][0]) == (4096, 12288, 151936)
    for name in shapes.SHAPES:
        target, drafter, source = shapes.SHAPES[name]
        text = target.get("text_config", target)
        assert drafter["hidden_size"] == text["hidden_size"] and drafter["vocab_size"] == text["vocab_size"] and source
        assert max(drafter["dflash_config"]["target_layer_ids"]) < text["num_hidden_layers"] - 1


@pytest.mark.parametrize("K", [2, 8])
def test_the_passes_made_again_are_those_of_the_loop(pair, K):
    model, tokenizer, drafter = pair
    got = host.measure(model, tokenizer, drafter, tokenizer.encode("def test_"), K, tokens=24, repeats=1)
    assert got["block_size"] == K and got["rounds"] >= 24 // K and set(got["ms_a_round"]) == set(got["spread_ms"])
    assert got["host_share"] == pytest.approx(1 - got["ms_a_round"]["passes_with_waits"] / got["ms_a_round"]["loop"])


def test_building_is_timed_beside_an_older_state_by_turns(tmp_path, monkeypatch):
    """Stands in for both: each writes its name; the older one's clock goes on by one at each look, and its round looks twice."""
    log = f"open({str(tmp_path / 'log')!r}, 'a').write"
    (tmp_path / "now.py").write_text(f"import json; {log}('now '); print(json.dumps({{'round': 6.0, 'traced_round': 1.5}}))")
    checkout, laid = tmp_path / "checkout", tmp_path / "laid"
    (checkout / "bench").mkdir(parents=True)
    (laid / "dflash_mlx").mkdir(parents=True)
    (laid / "dflash_mlx" / "__init__.py").write_text("OLD = True")
    (checkout / "bench" / "ledger_walk.py").write_text(
        "import contextlib\nas_on_metal = lambda _: contextlib.nullcontext()\n_one_node_each = contextlib.nullcontext\n"
    )
    (checkout / "bench" / "ledger.py").write_text(
        "import itertools, time, dflash_mlx\nassert dflash_mlx.OLD\nclock = itertools.count()\n"
        "time.thread_time = lambda: next(clock) / 1000\n"
        "class Walk:\n"
        "    def inputs(self, pending): return [time.thread_time()] * pending\n"
        "    def _round(self, arrays, rows, accepted, pending, enter):\n"
        "        assert (len(arrays), rows, accepted, pending) == (3, 4, 2, 3)\n"
        "        time.thread_time(), enter('draft'), time.thread_time(), enter('verify'), time.thread_time()\n"
        f"def walk(name, context):\n    {log}(f'{{name}} {{context}} ')\n    return Walk()\n"
    )
    monkeypatch.setattr(host, "__file__", str(tmp_path / "now.py"))
    found = host.beside("one", 4, str(laid), checkout, 2)
    assert (tmp_path / "log").read_text().split() == ["now", "one", "1024", "one", "1024", "now"]
    assert found["before"] == pytest.approx(3.0) and found["round over before"] == pytest.approx(2.0)
    assert found["traced_round over before"] == pytest.approx(0.5) and len(found["turns"]) == 2


def test_the_record_of_host_time_says_what_it_was_measured_with(monkeypatch, tmp_path, capsys):
    given = ["--model", "tiny", "--tokens", "8", "--repeats", "1", "--out", str(tmp_path / "h.json")]
    monkeypatch.setattr(sys, "argv", ["host.py", *given])
    host.main()
    record = json.loads((tmp_path / "h.json").read_text())
    assert record["drafter_sha256"] == TINY_DRAFTER_SHA256 and record["weights"]["dtype"] == "float32"
    assert "host share" in capsys.readouterr().out


def test_passes_that_are_not_those_of_the_loop_are_noticed(pair):
    from dflash_mlx import stream_generate

    model, tokenizer, drafter = pair
    prompt = tokenizer.encode("def test_")
    run = list(stream_generate(model, tokenizer, prompt, max_tokens=24, draft_model=drafter, block_size=4))
    rounds, ids = run[-1].stats.rounds, [r.token for r in run]
    assert host.bare_s(model, drafter, prompt, rounds, ids, waits=False) > 0
    ids[sum(r.accepted + 1 for r in rounds[:3])] += 1
    with pytest.raises(AssertionError, match="not those of the run"):
        host.bare_s(model, drafter, prompt, rounds, ids, waits=True)


def test_prefills_are_told_by_medians_over_mlx_lms_and_no_prompt_begins_as_another(pair):
    def run(side, seconds, cpu):
        return {"side": side, "length": 1000, "tokens": 1000, "seconds": seconds, "cpu_seconds": cpu}

    runs = [run("mlx-lm", s, None) for s in (2.0, 3.0, 9.0)] + [run("ours", s, None) for s in (1.0, 2.0, 7.0)]
    theirs, ours = prefill.summarise(runs)
    assert (theirs["ratio"], ours["ratio"], ours["tokens_per_second"], ours["cpu_ratio"]) == (1.0, 1.5, 500.0, None)
    assert prefill.summarise([run("mlx-lm", 1, 4.0), run("ours", 1, 5.0)])[1]["cpu_ratio"] == 0.8
    prompts = [prefill.prompt_of(40, pair[1], number) for number in (1, 2, 12)]
    ids = [pair[1].encode(prompt) for prompt in prompts]
    assert all(abs(len(one) - 40) <= 2 for one in ids) and len({tuple(one[:3]) for one in ids}) == 3


def test_train_data_compares_one_process_with_several_turn_by_turn():
    turns = [
        {"processes": n, "tokens_per_s": rate} for n, rate in ((1, 80.0), (4, 100.0), (4, 50.0), (1, 45.0), (1, 30.0), (4, 60.0))
    ]
    assert train_data.summary(turns) == {"one": 51.7, "several": 70.0, "over": 0.738, "by_turn": [0.8, 0.9, 0.5]}


def test_a_turn_of_train_data_counts_what_was_written_between_its_line_and_its_answer(monkeypatch, capsys):
    turns, now = train_data.Turns(), [0.0]
    monkeypatch.setattr(turns, "clocks", lambda: (now[0], now[0] / 2, now[0] / 4))
    monkeypatch.setattr(sys, "stdin", io.StringIO("2\n3\n"))
    for now[0], done in ((10, 100), (11, 150), (12.5, 220), (13, 230), (15, 300)):
        monkeypatch.setattr(train_data.time, "monotonic", lambda: now[0])
        turns("Writing text", done, 1000, "tokens of answers")
        turns("Writing held-out text at temperature 1", 7, 100, "%")
    now[0] = 16
    with pytest.raises(SystemExit):
        turns("Writing text", 500, 1000, "tokens of answers")
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"tokens_per_s": 120 / 2.5, "seconds": 2.5, "cpu": 0.5, "main": 0.25}
    assert second == {"tokens_per_s": 280 / 3.5, "seconds": 3.5, "cpu": 0.5, "main": 0.25}


@pytest.mark.full
def test_train_data_writes_by_turns_in_processes_that_wait_for_each_other(tmp_path, monkeypatch, capsys):
    out = tmp_path / "record.json"
    sizes = ["--rows", "6", "--rows-each", "4", "--processes", "2", "--max-len", "64", "--seconds", "1", "--turns", "2"]
    monkeypatch.setattr(sys, "argv", ["train_data.py", "--model", "tiny", "--out", str(out), *sizes])
    train_data.main()
    record = json.loads(out.read_text())
    assert [turn["processes"] for turn in record["turns"]] == [1, 2, 2, 1]
    for turn in record["turns"]:
        rates = [one["tokens_per_s"] for one in turn["by_process"]]
        assert min(rates) > 0 and turn["tokens_per_s"] == pytest.approx(sum(rates), abs=0.1)
        assert all(one["seconds"] > 0.5 and 0 < one["main"] <= one["cpu"] for one in turn["by_process"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == record["summary"]
