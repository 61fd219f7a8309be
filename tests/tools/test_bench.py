"""dflash-mlx bench: pairs by turns, figures from them, records, and the command."""

import copy
import json
import statistics
from dataclasses import replace

import kit
import mlx.core as mx
import pytest
from screen import private_words

from dflash_mlx import load, load_drafter
from dflash_mlx.machine import switches_set
from dflash_mlx.stats import is_off
from dflash_mlx.tools import bench, bench_plot, bench_prompts, bench_record
from dflash_mlx.tools.bench import Bench, BenchError, Plan

TINY = ["--model", "tiny", "--draft-model", "tiny"]
SMALL = Plan(kinds=("function", "copy"), temps=(0.0, 1.0), contexts=(0,), max_tokens=12, trials=2, block_size=4)


@pytest.fixture(scope="module")
def record(pair):
    model, tokenizer, drafter = pair
    return Bench(model, tokenizer, drafter, SMALL, names=("tiny", "tiny")).go()


def run_of(kind, speedup, temp=0.0, widths=None, committed=30, drafting=10, differs_at=None):
    """One pair of a record, both sides of 10 tokens/s times what is asked."""
    side = {"prompt_tokens": 5, "tokens": 20, "ttft_s": 0.5, "decode_s": 1.0, "peak_memory_gb": 1.0, "decode_tps": 10.0}
    ours = side | {
        "decode_tps": 10.0 * speedup,
        "committed": committed,
        "drafting_rounds": drafting,
        "widths": widths or {"3": 10},
        "sources": {"drafter": {"rounds": drafting, "accepted": 0}, "prompt_lookup": {"rounds": 0, "accepted": 0}},
    }
    return {"kind": kind, "temp": temp, "context": 0, "trial": 0, "mlx_lm": side, "dflash": ours} | {
        "speedup": speedup,
        "late_speedup": None,
        "differs_at": differs_at,
        "loops": False,
    }


def test_a_record_holds_every_pair_of_the_plan_and_both_sides_said_the_same(record):
    assert record["ended"] == "complete"
    cells = {(kind, temp) for kind in SMALL.kinds for temp in SMALL.temps}
    assert [(r["kind"], r["temp"]) for r in record["runs"]].count(("copy", 1.0)) == SMALL.trials
    assert {(r["kind"], r["temp"]) for r in record["runs"]} == cells and len(record["runs"]) == len(cells) * SMALL.trials
    assert all(r["differs_at"] is None and r["mlx_lm"]["tokens"] == r["dflash"]["tokens"] for r in record["runs"])
    assert set(record["cold"]) == set(bench_record.SIDES) and record["warm_up_s"] > 0
    assert record["machine"]["device"] == "cpu" and record["weights"]["dtype"] == "float32"
    assert record["versions"]["mlx"] == mx.__version__ and not bench_record.faults(record)
    assert record["environment"] == switches_set()
    assert record["drafter_sha256"] == kit.TINY_DRAFTER_SHA256
    assert json.loads(json.dumps(record)) == record


def test_who_begins_changes_from_cell_to_cell_and_from_trial_to_trial(record):
    first = {}
    for run in record["runs"]:
        first.setdefault((run["kind"], run["temp"]), []).append(run["first"])
    assert all(sorted(sides) == sorted(bench_record.SIDES) for sides in first.values())
    assert len({tuple(sides) for sides in first.values()}) == 2


def test_a_trial_takes_the_next_prompt_of_its_kind_and_figures_are_of_that_run(record, pair):
    model, tokenizer, drafter = pair
    there = Bench(model, tokenizer, drafter, SMALL)
    for run in record["runs"]:
        ids = there.ids((run["kind"], run["temp"], run["context"]), run["trial"])
        assert run["mlx_lm"]["prompt_tokens"] == run["dflash"]["prompt_tokens"] == len(ids)
        ours = run["dflash"]
        assert run["speedup"] == pytest.approx(ours["decode_tps"] / run["mlx_lm"]["decode_tps"])
        assert ours["decode_tps"] == pytest.approx((ours["tokens"] - 1) / ours["decode_s"])
        assert sum(ours["widths"].values()) == ours["rounds"] and set(ours["widths"]) == {"3"}
    assert there.ids(("copy", 0.0, 0), 0) != there.ids(("copy", 0.0, 0), 1) == there.ids(("copy", 0.0, 0), 5)


def test_figures_of_a_cell_are_medians_and_tau_is_over_all_rounds():
    runs = [run_of("a", up, widths={"3": 6, "0": 4}, committed=c, drafting=6) for up, c in ((6.0, 6), (1.0, 12), (2.0, 18))]
    runs[0]["dflash"]["sources"] = {"prompt_lookup": {"rounds": 3, "accepted": 2}}
    (row,) = bench_record.summarise(runs)
    assert row["copied_rounds"] == pytest.approx(0.1)
    assert (row["speedup"], row["low"], row["high"], row["pairs"]) == (2.0, 1.0, 6.0, 3)
    assert row["tau"] == 2.0 and row["mean_width"] == pytest.approx(1.8) and row["plain_rounds"] == pytest.approx(0.4)
    assert row["dflash_decode_tps"] == 20.0 and row["equal"] == 3


def test_all_kinds_together_are_a_geometric_mean_a_temperature():
    rows = bench_record.summarise([run_of("a", 4.0), run_of("b", 1.0), run_of("a", 9.0, temp=1.0), run_of("b", 1.0, temp=1.0)])
    of_all = {row["temp"]: row for row in rows if row["kind"] == "all"}
    assert of_all[0.0]["speedup"] == pytest.approx(2.0) and of_all[1.0]["speedup"] == pytest.approx(3.0)
    assert (of_all[0.0]["low"], of_all[0.0]["high"]) == (1.0, 4.0)


def test_what_a_round_cost_is_told_pair_by_pair(record):
    record = copy.deepcopy(record)
    # Tokens a round, without the first of all: 4, 3, 5. The last pair has no speed-up.
    for run, speedup, tokens in zip(record["runs"], (1.0, 3.0, 2.0, None), (41, 31, 51, 41), strict=False):
        run["speedup"], run["dflash"]["tokens"], run["dflash"]["rounds"] = speedup, tokens, 10
    shown = bench_record.table(record | {"runs": record["runs"][:4]})
    assert "On average a pass with its drafts took as long as 2.50 (1.00-4.00) steps of mlx-lm, median of 3 pairs." in shown
    assert "On average a pass" not in bench_record.table(record | {"runs": record["runs"][3:4]})


@pytest.mark.full
def test_a_text_that_is_not_mlx_lms_is_reported_with_its_place_and_margin(pair, monkeypatch):
    model, tokenizer, drafter = pair
    real = bench.stream_generate

    def other(*args, **kwargs):
        for n, response in enumerate(real(*args, **kwargs)):
            response.token += n == 5
            yield response

    monkeypatch.setattr(bench, "stream_generate", other)
    plan = Plan(kinds=("function",), temps=(0.0,), contexts=(0,), max_tokens=8, trials=1, block_size=4)
    record = Bench(model, tokenizer, drafter, plan, names=("tiny", "tiny")).go()
    (run,) = record["runs"]
    assert run["differs_at"] == 5 and run["margin"] > 0
    text = kit.greedy_ids(model, Bench(model, tokenizer, drafter, plan).ids(("function", 0.0, 0), 0), 6)
    logits = model(mx.array([[*tokenizer.encode("def test_"), *text[:5]]]))[0, -1]
    # One float32 pass against another, whose head saw one row: 1e-4 is far below any gap that is no tie.
    assert run["margin"] == pytest.approx(abs((logits[text[5]] - logits[text[5] + 1]).item()), abs=1e-4)
    assert bench_record.faults(record) == 1
    shown = bench_record.table(record)
    assert "differs from mlx-lm's at token 5" in shown and "please report it" in shown and "0/1" in shown
    record["weights"]["dtype"] = "bfloat16"
    assert bench_record.faults(record) == 0 and "near tie" in bench_record.table(record)
    record["weights"]["dtype"], record["machine"]["device"] = "float32", "gpu"
    assert bench_record.faults(record) == 0


@pytest.mark.filterwarnings("error:thinking is")
def test_both_sides_think_as_the_drafter_was_trained_and_that_is_said(tmp_path):
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if enable_thinking %}<think>{% else %}[A]{% endif %}"
    model, tokenizer = load(kit.with_template(tmp_path, template))
    drafter, plan = load_drafter("tiny", model), replace(SMALL, kinds=("code",), temps=(0.0,), max_tokens=4, trials=1)
    shown = {}
    for setting, end in ((False, "[A]"), (True, "<think>")):
        drafter.stated_thinking = (setting, "its card")
        run = Bench(model, tokenizer, drafter, plan, names=("tiny", "tiny"))
        assert tokenizer.decode(run.ids(("code", 0.0, 0), 0)).endswith(end)
        shown[setting] = run.go()
        assert shown[setting]["thinking"] == {"setting": setting, "stated_by": "its card"}
    said = "for both sides, because the drafter was trained"
    assert f"Thinking is off {said} without it (its card says so)." in bench_record.table(shown[False])
    assert f"Thinking is on {said} with it (its card says so)." in bench_record.table(shown[True])
    assert "differs: thinking: A off, B on" in bench_record.compare(shown[False], shown[True])
    # A template that does not read it, or a drafter that states nothing.
    drafter.stated_thinking = None
    assert Bench(model, tokenizer, drafter, plan).record["thinking"] is None
    drafter.stated_thinking = (False, "its card")
    (tmp_path / "other").mkdir()
    _, other = load(kit.with_template(tmp_path / "other"))
    assert Bench(model, other, drafter, plan).record["thinking"] is None


def test_exact_is_compared_with_its_own_text_without_a_drafter(pair, monkeypatch):
    real, asked = bench.stream_generate, []

    def noted(*args, **options):
        asked.append((options["exact"], options.get("draft_model") is not None))
        for n, response in enumerate(real(*args, **options)):
            # Other than mlx-lm's text, with a drafter and without: no fault.
            response.token += n == 5
            yield response

    monkeypatch.setattr(bench, "stream_generate", noted)
    plan = Plan(kinds=("function",), temps=(0.0,), contexts=(0,), max_tokens=8, trials=1, block_size=4, exact=True)
    record = Bench(*pair, plan, names=("tiny", "tiny")).go()
    assert set(asked) == {(True, True), (True, False)} and record["settings"]["exact"]
    (run,) = record["runs"]
    assert run["differs_at"] is None and not bench_record.faults(record) and run[bench_record.ALONE]["tokens"] == 8
    assert "Without a drafter an exact pass took" in bench_record.table(record)
    # What differs from it is one, on any device and in any type.
    run["differs_at"], record["weights"]["dtype"], record["machine"]["device"] = 3, "bfloat16", "gpu"
    shown = bench_record.table(record)
    assert bench_record.faults(record) == 1 and "Text differs from exact's without a drafter at token 3" in shown
    assert "With --exact that is a fault of this program: please report it." in shown


@pytest.mark.full
def test_ctrl_c_keeps_what_is_measured(pair, monkeypatch):
    real, pairs, kept = Bench._pair, [], []

    def third_is_interrupted(self, *args, **kwargs):
        if len(pairs) == 2:
            raise KeyboardInterrupt
        pairs.append(real(self, *args, **kwargs))
        return pairs[-1]

    monkeypatch.setattr(Bench, "_pair", third_is_interrupted)
    record = Bench(*pair, SMALL, names=("tiny", "tiny"), keep=lambda r: kept.append(json.dumps(r))).go()
    assert record["ended"] == "interrupted" and record["runs"] == pairs and len(record["summary"]) == 3
    assert json.loads(kept[-1]) == record
    assert f"This run is interrupted: 2 of {SMALL.trials * 4} pairs" in bench_record.table(record)


def test_no_pair_begins_that_would_end_after_max_seconds(pair):
    record = Bench(*pair, SMALL, names=("tiny", "tiny"), max_seconds=0.0).go()
    assert record["ended"] == "out of time" and record["runs"] == [] and "out of time" in bench_record.table(record)


@pytest.mark.full
def test_chosen_widths_are_shown_with_their_reason(pair):
    plan = Plan(kinds=("copy",), temps=(0.0,), contexts=(0,), max_tokens=16, trials=1)
    record = Bench(*pair, plan, names=("tiny", "tiny")).go()
    ours = record["runs"][0]["dflash"]
    off = "Drafting was off in 1 of 1 answer: it would be slower here."
    shown = off if is_off({"confidence_cut": {}, **ours}) else f"In 1 of 1 answer: {ours['width_reason'][:20]}"
    assert ours["width_reason"] and shown in bench_record.table(record)
    assert sum(ours["widths"].values()) == ours["rounds"] and record["runs"][0]["differs_at"] is None


@pytest.mark.full
def test_a_hopeless_drafter_is_never_accepted_and_its_late_tokens_are_timed_apart():
    from dflash_mlx import load, load_drafter

    model, tokenizer = load("tiny", dtype=mx.float32)
    plan = Plan(kinds=("copy",), temps=(0.0,), contexts=(0,), max_tokens=80, trials=1, block_size=3, hopeless=True)
    record = Bench(model, tokenizer, load_drafter("tiny", model), plan, names=("tiny", "tiny")).go()
    (run,) = record["runs"]
    # Drafts next to the drafter's own choice: right by chance only.
    assert run["dflash"]["tau"] < 1.1 and run["differs_at"] is None
    assert run["late_speedup"] == pytest.approx(run["dflash"]["late_tps"] / run["mlx_lm"]["late_tps"])
    ours = run["dflash"]
    assert 16 / ours["late_tps"] < ours["decode_s"]
    assert ours["width_reason"] is None and "1 of 1 answer" not in bench_record.table(record)
    assert f"After the first 64 tokens of an answer: {run['late_speedup']:.2f}" in bench_record.table(record)


def test_a_users_prompts_are_json_lines_or_plain_lines(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one", "kind": "k"}\n\nplain text\n{"prompt": "two", "kind": "k"}\n')
    got = bench_prompts.read_prompts(str(path), chat=True)
    assert got.kinds == {"k": ["one", "two"], "own": ["plain text"]} and got.source == str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "holds no prompts"),
        ('ok\n{"promt": "x"}', "line 2 of"),
        ('{"prompt": ', "line 1 of .* is no JSON"),
        ('{"prompt": ""}', "line 1 of"),
        ('{"prompt": "x", "kind": 3}', "line 1 of"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_read_is_refused_by_line(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=message):
        bench_prompts.read_prompts(str(path), chat=True)


@pytest.mark.parametrize("chat", [True, False])
def test_the_packages_prompts_are_six_kinds_without_twice_the_same(chat):
    kinds = bench_prompts.builtin_prompts(chat).kinds
    texts = [text for of in kinds.values() for text in of]
    assert len(kinds) == 6 and len(set(texts)) == len(texts) and min(map(len, kinds.values())) >= 4


@pytest.mark.parametrize("chat", [True, False])
def test_a_long_contexts_text_has_its_length_and_is_the_same_for_a_seed(pair, chat):
    prompts, count = bench_prompts.builtin_prompts(chat), lambda text: len(pair[1].encode(text))
    one = prompts.filler(300, count, seed=1)
    assert 300 <= count(one) < 380
    assert one == prompts.filler(300, count, seed=1) != prompts.filler(300, count, seed=2)
    assert "$" not in one


def test_a_prompt_goes_through_the_chat_template_and_after_its_context(pair, tmp_path):
    from dflash_mlx import load, load_drafter

    model, tokenizer = load(kit.with_template(tmp_path), dtype=mx.float32)
    drafter = load_drafter("tiny", model)
    there = Bench(model, tokenizer, drafter, Plan(kinds=("json",), contexts=(0, 100)))
    short, long = (tokenizer.decode(there.ids(("json", 0.0, context), 0)) for context in (0, 100))
    question = there.prompts.text("json", 0)
    assert short == f"[user] {question}\n[assistant] "
    assert long.startswith("[user] Here are my notes.") and long.endswith(f"\n\n{question}\n[assistant] ")


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        ([*range(40)], False),
        ([*range(20), *[7, 8] * 12], True),
        ([*range(20), *[7, 8] * 11], False),
        ([*range(5), *[*range(30, 50)] * 3], True),
        ([*range(5), *[*range(30, 50)] * 2], False),
        ([*range(5), *[*range(30, 50)] * 3, 1], False),
    ],
)
def test_an_answer_that_ends_in_a_loop_is_marked(tokens, ends):
    assert bench.loops(tokens) is ends


@pytest.mark.parametrize(
    ("a", "b", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2], 2), ([], [], None)],
)
def test_the_first_difference_is_a_token_or_an_end(a, b, at):
    assert bench.first_difference(a, b) == at


def test_two_records_beside_each_other(record):
    other = json.loads(json.dumps(record))
    other["versions"]["mlx"], other["settings"]["max_tokens"] = "0.99", 77
    for row in other["summary"]:
        row["speedup"] *= 2
    shown = bench_record.compare(record, other)
    assert f"differs: mlx: A {mx.__version__}, B 0.99" in shown and "differs: settings max_tokens: A 12, B 77" in shown
    assert all(" 2.00 " in line for line in shown.splitlines() if line.startswith(("copy", "function", "all")))
    assert shown.count("\ncopy") == 2 and "drafter_sha256" not in shown
    other["drafter_sha256"] = "0" * 16
    assert f"differs: drafter_sha256: A {kit.TINY_DRAFTER_SHA256}, B {'0' * 16}" in bench_record.compare(record, other)
    del other["drafter_sha256"]  # as of records made before there was one
    assert f"differs: drafter_sha256: A not recorded, B {kit.TINY_DRAFTER_SHA256}" in bench_record.compare(other, record)
    assert "drafter_sha256" not in bench_record.compare(other, other)
    other["summary"] = []
    assert "No cell is in both." in bench_record.compare(record, other)


def test_a_record_is_read_back_and_its_plan_repeated(record, tmp_path):
    path = tmp_path / "r.json"
    bench_record.write_record(record, path)
    assert bench_record.read_record(path) == record and list(tmp_path.iterdir()) == [path]
    assert bench.plan_of(record) == SMALL
    path.write_text('{"what": "something else"}')
    with pytest.raises(BenchError, match="is not a record of dflash-mlx bench"):
        bench_record.read_record(path)


def test_a_plot_is_a_png(record, tmp_path):
    pytest.importorskip("matplotlib")
    bench_plot.plot(record, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(BenchError, match="pip install matplotlib"):
        bench_plot.check_plot()


def test_the_table_has_a_line_a_cell_and_says_what_the_figures_are(record):
    shown = bench_record.table(record)
    lines = [line for line in shown.splitlines() if line.startswith(("copy", "function", "all"))]
    assert len(lines) == 10 and sum("2/2" in line or "4/4" in line for line in lines) == 6
    assert max(map(len, lines)) <= 80 and not private_words(shown)
    row = record["summary"][0]
    assert f"{row['speedup']:.2f} ({row['low']:.2f}-{row['high']:.2f})" in shown and "tokens a round: kept drafts" in shown
    assert f"mlx {mx.__version__}" in shown and "First run in the process" in shown
    assert row["speedup"] == statistics.median(
        r["speedup"] for r in record["runs"] if (r["kind"], r["temp"]) == ("function", 0.0)
    )


def cli(monkeypatch, *args):
    """Exit status of a command in this process."""
    from dflash_mlx.cli import app as module

    monkeypatch.setattr("sys.argv", ["dflash-mlx", *args])
    try:
        module.main()
    except SystemExit as stop:
        return stop.code or 0
    return 0


def test_the_command_prints_one_record_keeps_it_and_compares_it(monkeypatch, capsys, tmp_path):
    prompts, out = tmp_path / "mine.txt", tmp_path / "r.json"
    prompts.write_text("def add(a, b):\nimport os\n")
    given = [*TINY, "--prompts", str(prompts), "--temp", "0", "-m", "6", "--block-size", "3", "--out", str(out), "--json"]
    assert cli(monkeypatch, "bench", *given) == 0
    got = json.loads(capsys.readouterr().out)
    assert got == bench_record.read_record(out) and got["settings"]["trials"] == 2 and got["settings"]["contexts"] == [0]
    assert {r["kind"] for r in got["runs"]} == {"own"} and got["kernels"]["asked"] == "auto"
    assert cli(monkeypatch, "bench", "--compare", str(out), str(out)) == 0
    assert "own " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["--model", "tiny"], 2, "nothing to compare"),
        (["--draft-model", "tiny"], 2, "it needs --model"),
        ([*TINY, "--kinds", "nope"], 1, "hold no nope; their kinds are function"),
        ([*TINY, "--kernels", "nope"], 2, "--kernels"),
        (["--compare", "a.json", "b.json"], 1, "a.json"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(monkeypatch, capsys, args, status, message):
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "auto")  # what --kernels sets is undone with it
    monkeypatch.setenv("COLUMNS", "200")
    assert cli(monkeypatch, "bench", *args) == status
    shown = capsys.readouterr()
    assert message in shown.err and not shown.out


def test_kernels_that_do_not_exist_are_refused_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "auto")
    monkeypatch.setattr("dflash_mlx.cli.inputs.load_pair", lambda *args: pytest.fail("loaded"))
    assert cli(monkeypatch, "bench", "--kernels", "nope") == 2
    assert "--kernels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "args", "contexts"),
    [("cpu", [], (0,)), ("gpu", [], (0, 1024)), ("gpu", ["--prompts", "FILE"], (0,)), ("cpu", ["--context", "9"], (9,))],
)
def test_long_contexts_are_for_gpus_unless_asked_for(monkeypatch, capsys, tmp_path, device, args, contexts):
    class Stop(Exception):
        pass

    def planned(lm, tokenizer, drafter, plan, *rest):
        raise Stop(plan.contexts)

    (tmp_path / "p.txt").write_text("def f():")
    here = bench.machine()
    monkeypatch.setattr(bench, "machine", lambda: {**here, "device": device})
    monkeypatch.setattr(bench, "Bench", planned)
    assert cli(monkeypatch, "bench", *TINY, *[str(tmp_path / "p.txt") if a == "FILE" else a for a in args]) == 1
    assert f"Stop: {contexts}" in capsys.readouterr().err


@pytest.mark.full
def test_dense_writes_the_quantized_layers_of_both_models_out(monkeypatch, capsys, tmp_path):
    from dflash_mlx import convert

    for part in ("target", "drafter"):
        convert(str(kit.TINY / part), str(tmp_path / part), quantize=True, q_group_size=32)
    built = []
    monkeypatch.setattr(bench, "Bench", lambda *args: built.append(Bench(*args)) or built[-1])
    given = ["--model", str(tmp_path / "target"), "--draft-model", str(tmp_path / "drafter"), "--kinds", "data", "--temp", "0"]
    for dense, bits in ([], [4]), (["--dense"], []):
        assert cli(monkeypatch, "bench", *given, "-m", "4", "--trials", "1", "--block-size", "3", "--json", *dense) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["weights"]["bits"] == bits and record["runs"][0]["differs_at"] is None
        layers = [type(m).__name__ for _, m in built[-1].drafter.named_modules()]
        assert ("QuantizedLinear" in layers) is not bool(dense)


@pytest.mark.full
def test_a_differing_text_in_float32_is_an_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(bench, "first_difference", lambda a, b: 1)
    args = [*TINY, "--kinds", "function", "--temp", "0", "--context", "0", "-m", "4", "--trials", "1", "--block-size", "2"]
    assert cli(monkeypatch, "bench", *args) == 1
    assert "differs from mlx-lm's at token 1" in capsys.readouterr().out


@pytest.mark.full
def test_sampling_options_of_a_plan_reach_both_sides(monkeypatch, pair):
    seen = []

    class Seen(bench.SamplingSettings):
        def make(self, tokenizer=None, logit_bias=None):
            seen.append((self.temp, self.top_k, self.repetition_penalty))
            return super().make(tokenizer, logit_bias)

    monkeypatch.setattr(bench, "SamplingSettings", Seen)
    model, tokenizer, drafter = pair
    plan = Plan(("copy",), (0.7,), (0,), 8, 1, block_size=3, sampling={"top_k": 5, "repetition_penalty": 1.3})
    record = Bench(model, tokenizer, drafter, plan).go()
    assert record["ended"] == "complete" and record["runs"][0]["differs_at"] is None
    assert set(seen) == {(0.7, 5, 1.3)} and record["settings"]["sampling"] == plan.sampling
    assert bench.plan_of(record) == replace(plan, kinds=("copy",))
