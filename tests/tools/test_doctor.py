"""`doctor` is right about sound checkpoints and names the fault of broken ones."""

import json
import re
import shutil

import mlx.core as mx
import pytest
from cli_kit import run
from kit import TINY, plant

from dflash_mlx import load, load_drafter, loading, stream_generate
from dflash_mlx import rollback as cache_module
from dflash_mlx.kernels import autotune
from dflash_mlx.progress import listening
from dflash_mlx.tools import doctor
from dflash_mlx.tools.doctor import diagnose, render


@pytest.fixture(scope="module")
def sound():
    return diagnose("tiny", "tiny", mx.float32)


def test_counting_accepted_drafts_says_how_far_it_is():
    model, tokenizer = load("tiny")
    drafter, told, suspicions = load_drafter("tiny", model), [], []
    with listening(lambda what, done, total, unit: told.append((what, done, total, unit))):
        doctor._acceptance(model, tokenizer, drafter, "tiny", suspicions)
    counted = [(done, total, unit) for what, done, total, unit in told if what == "Counting which drafts are accepted"]
    assert sorted(set(counted)) == [(done, 64, "tokens") for done in range(65)] and counted == sorted(counted)


@pytest.fixture(autouse=True)
def untimed(monkeypatch):
    """`sound` alone is timed in earnest: two thirds of a report's time."""
    speed = {"plain_tps": 10.0, "tps": 18.0, "gain": 1.8, "off": False, "tokens": 48, "reason": None}
    monkeypatch.setattr(doctor, "_speed", lambda *_: dict(speed))


def test_the_built_in_pair_is_sound(sound):
    assert sound["faults"] == [] and sound["suspicions"] == []
    assert sound["target"]["family"] == "qwen3" and sound["target"]["n_layers"] == 6
    assert sound["target"]["caches"] == {"KVCache: rows cut": [0, 1, 2, 3, 4, 5]}
    drafter = sound["drafter"]
    assert (drafter["block_size"], drafter["mask_token_id"], drafter["target_layer_ids"]) == (8, 3, [1, 2, 3])
    assert drafter["read_from"]["mask_token_id"] == {"key": "dflash_config.mask_token_id", "value": 3}
    assert [layer["causal"] for layer in drafter["layers"]] == [False] * 3
    assert all(result.startswith("passed") for result in sound["self_tests"].values())
    assert sound["acceptance"]["tokens"] == 32 and sound["acceptance"]["ids_equal_plain_decoding"]
    assert sound["acceptance"]["tau"] > 1.5 and set(sound["versions"]) >= {"dflash-mlx", "mlx", "mlx-lm"}
    assert json.loads(json.dumps(sound)) == sound


@pytest.mark.parametrize(
    ("change", "first", "second"),
    [
        (
            {},
            "No fault found.",
            "Faster here: about 1.8 times as fast as without drafts, on one prompt. 18 tokens/s, 10 without",
        ),
        ({"gain": 1.0}, "No fault found.", "About as fast here as without drafts"),
        ({"off": True}, "No fault found.", "Not faster here: drafting turns itself off"),
        ({"gain": None, "tokens": 3}, "No fault found.", "is not known: the answer ended after 3 tokens"),
        ({"speed": None}, "No fault found.", "needs a drafter: it was not timed"),
        ({"speed": None, "target": None}, "No fault found.", "needs --model: it was not timed"),
        ({"faults": ["x"], "suspicions": ["y", "z"]}, "1 fault found: see the end. 2 things look odd: see the end.", None),
    ],
)
def test_the_verdict_comes_first_and_says_whether_it_is_faster_here(sound, change, first, second):
    speed = {"plain_tps": 10.0, "tps": 18.0, "gain": 1.8, "off": False, "tokens": 48, "reason": None}
    speed |= {name: value for name, value in change.items() if name in speed}
    report = {**sound, "speed": speed, **{name: value for name, value in change.items() if name not in speed}}
    lines = render(report).splitlines()
    assert lines[0] == f"result      {first}"
    assert second is None or lines[1].startswith(" " * 12) and second in lines[1]


def test_both_sides_are_timed_by_turns(sound):
    speed = sound["speed"]
    assert speed["tokens"] == doctor._TIMED_TOKENS and speed["plain_tps"] > 0 and speed["tps"] > 0
    assert speed["gain"] == pytest.approx(speed["tps"] / speed["plain_tps"])


def test_the_text_says_what_the_report_holds(sound):
    text = render(sound, details=True)
    short = render(sound)
    assert "  key " in text and "  key " not in short and "  layer " not in short and "block 8, mask" in short
    for part in (
        "qwen3, 6 layers",
        "KVCache: rows cut: entries 0-5",
        "block 8, mask token 3, reads target layers [1, 2, 3]",
        "layer 2   bidirectional in the block, window none, RoPE default base 10000",
        "mask_token_id = 3 from dflash_config.mask_token_id",
        "undoing drafts: passed",
        "ids equal plain decoding's",
        "kernels     none: MLX sees no GPU",
        "compiled    none: used on a GPU only",
        "No fault found.",
    ):
        assert part in text


def test_what_a_gpu_has_found_about_kernels_is_shown(monkeypatch, sound):
    right = autotune.TuningResult(
        "block_qmm", "float16 N 8", True, "right, 1.50 times as fast as stock MLX", 1.0, 1.5, 4, "columns 2"
    )
    wrong = autotune.TuningResult("accept", "B 1", False, "ids differ from stock MLX's")
    monkeypatch.setattr(autotune, "has_gpu", lambda: True)
    monkeypatch.setattr(autotune, "results", lambda: [right, wrong])
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "on")
    text = render({**sound, "kernels": doctor._kernels()})
    assert "kernels     DFLASH_MLX_KERNELS on; 2 tried on this machine" in text
    assert "  not used  accept, B 1, 1 rows: ids differ from stock MLX's" in text
    assert "  used      block_qmm columns 2, float16 N 8, 4 rows: right, 1.50 times as fast as stock MLX" in text


def test_what_was_traced_is_shown(monkeypatch, sound):
    monkeypatch.setenv("DFLASH_MLX_COMPILE", "on")
    report = diagnose("tiny", "tiny", mx.float32)
    assert json.loads(json.dumps(report)) == report and not report["faults"]
    target, drafter = report["traced"]["found"]
    assert target["passes"] > 2 and drafter["passes"] > 2 and target["name"] == "qwen3"
    text = render(report)
    # The drafter's layers are views of the fused weights.
    assert target["held_mb"] > 0 and drafter["held_mb"] == 0
    held = f"{target['passes']} passes; {target['held_mb']} MB of copied weights"
    lines = f"compiled    DFLASH_MLX_COMPILE on\n  qwen3: {held}\n  the drafter: {drafter['passes']} passes\n"
    assert lines in f"{text}\n"
    target |= {"faster": {"4": True, "16": False}}
    drafter |= {"refused": "TypeError: no"}
    text = render(report)
    assert "passes; 4 rows faster, 16 rows not faster" in text and "  the drafter: none: TypeError: no" in text
    monkeypatch.setenv("DFLASH_MLX_COMPILE", "off")
    assert "compiled    none: DFLASH_MLX_COMPILE is off" in render({**sound, "traced": doctor._traced(None)})


def test_a_fault_that_several_steps_meet_is_said_once(monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "block_qnm")
    (fault,) = diagnose("tiny", "tiny", mx.float32)["faults"]
    assert fault.startswith("DFLASH_MLX_KERNELS names block_qnm; it must be off, on, auto or names among")


def test_memory_grows_with_the_context_by_the_rows_of_the_caches():
    report = diagnose("tiny", "tiny", mx.float32, contexts=(1000, 3000))
    one, three = (report["memory"]["total_gb"][n] for n in ("1000", "3000"))
    # 2000 rows of keys and values, 2 heads of 32 float32: six target layers and three of the drafter's.
    assert three - one == pytest.approx(2000 * (6 + 3) * 2 * 2 * 32 * 4 / 1e9, rel=0.05)


def copy(tmp_path, part="drafter"):
    path = tmp_path / part
    shutil.copytree(TINY / part, path)
    return path


def rewrite(path, **changes):
    raw = json.loads((path / "config.json").read_text())
    nested = changes.pop("dflash_config", {})
    raw |= changes
    raw["dflash_config"] = {k: v for k, v in {**raw["dflash_config"], **nested}.items() if v is not None}
    (path / "config.json").write_text(json.dumps(raw))


def retensor(path, change):
    file = path / "model.safetensors"
    tensors = dict(mx.load(str(file)))
    mx.eval(tensors)
    change(tensors)
    file.unlink()
    mx.save_safetensors(str(file), tensors)


def truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


BROKEN = {
    "mask token beyond the embedding": (
        lambda p: rewrite(p, dflash_config={"mask_token_id": 5000}, vocab_size=None),
        "mask token 5000 has no row in qwen3's embedding of 1536",
    ),
    "taps beyond the target": (
        lambda p: rewrite(p, dflash_config={"target_layer_ids": [1, 2, 7]}, num_target_layers=None),
        r"taps layers \[1, 2, 7\], qwen3 has 6",
    ),
    "no taps": (lambda p: rewrite(p, dflash_config={"target_layer_ids": None}), "target_layer_ids.* is missing"),
    "two block sizes": (
        lambda p: rewrite(p, block_size=8, dflash_config={"block_size": 16}),
        "block_size = 8 contradicts dflash_config.block_size = 16",
    ),
    "a tensor missing": (lambda p: retensor(p, lambda t: t.pop("hidden_norm.weight")), "missing hidden_norm.weight"),
    "a tensor of another shape": (
        lambda p: rewrite(p, intermediate_size=500),
        r"gate_proj.weight is \[512, 192\], the config says \[500, 192\]",
    ),
    "not a number": (
        lambda p: retensor(p, lambda t: t.update({"fc.weight": t["fc.weight"] * mx.nan})),
        "the drafter's fc gives NaN or infinity",
    ),
    "cut short": (truncate, "truncated|incomplete|shorter|damaged"),
    "config that is no JSON": (lambda p: (p / "config.json").write_text("{"), "config.json"),
    "a mask vector that is not there": (lambda p: rewrite(p, dflash_config={"mask_embedding": True}), "missing mask_embedding"),
    "another architecture": (lambda p: rewrite(p, architectures=["DFlash9DraftModel"]), "DFlash9DraftModel"),
    "trained for another target": (lambda p: rewrite(p, num_target_layers=36), "expects 36 target layers, qwen3 has 6"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.quick(5)
def test_the_fault_of_a_broken_drafter_is_named(tmp_path, name):
    path = copy(tmp_path)
    breaks, message = BROKEN[name]
    breaks(path)
    report = diagnose("tiny", str(path), mx.float32)
    assert len(report["faults"]) == 1, report["faults"]
    assert re.search(message, report["faults"][0]), report["faults"]
    # The target is looked at all the same.
    assert report["target"]["family"] == "qwen3" and "fault       " in render(report)


def test_a_target_and_a_drafter_in_each_others_place_are_named():
    report = diagnose(str(TINY / "drafter"), str(TINY / "target"), mx.float32)
    assert "is an ordinary model" in report["faults"][0] and "is a DFlash drafter" in report["faults"][1]


def test_wrong_taps_that_fit_are_a_suspicion_not_a_fault(tmp_path):
    path = copy(tmp_path)
    rewrite(path, dflash_config={"target_layer_ids": [0, 0, 0]})
    report = diagnose("tiny", str(path), mx.float32)
    assert report["faults"] == [] and "check the layers that it reads, mask token, RoPE" in report["suspicions"][0]


def test_a_rollback_that_is_wrong_fails_its_self_test(monkeypatch):
    plant(
        monkeypatch, cache_module, "rollback", "keep = length - point.length", "keep = min(length - point.length + 1, point.rows)"
    )
    monkeypatch.setattr(doctor, "rollback", cache_module.rollback)
    report = diagnose("tiny", None, mx.float32)
    assert any(text.startswith("failed: after drafts were undone") for text in report["faults"])


def test_memory_that_is_not_there_is_said_before_the_weights_are_read(monkeypatch):
    monkeypatch.setattr(loading, "machine_bytes", lambda: 1000)
    report = diagnose("tiny", None, mx.float32)
    assert "the model does not fit" in report["faults"][0] and "target" not in report


def test_a_drafter_alone_is_described():
    report = diagnose(None, "tiny", mx.float32)
    assert report["faults"] == [] and report["drafter"]["block_size"] == 8 and "target" not in report
    assert "drafter     tiny" in render(report)


def test_a_recurrent_target_says_how_its_caches_roll_back(conformance):
    report = diagnose(str(conformance / "targets" / "qwen3_next"), None, mx.float32)
    assert report["faults"] == []
    assert report["target"]["caches"] == {
        "ArraysCache: put back, then the kept rows are replayed": [0, 1, 2],
        "KVCache: rows cut": [3],
    }


@pytest.mark.full
def test_every_conformance_directory_is_sound(conformance):
    for path in sorted((conformance / "targets").iterdir()):
        report = diagnose(str(path), None, mx.float32)
        assert report["faults"] == [], path.name
        assert all(result.startswith("passed") for result in report["self_tests"].values()), path.name
    for path in [conformance / "pair" / "drafter", *sorted((conformance / "drafters").iterdir())]:
        report = diagnose(str(conformance / "pair" / "target"), str(path), mx.float32)
        assert report["faults"] == [], path.name
        raw = json.loads((path / "config.json").read_text())
        assert report["drafter"]["target_layer_ids"] == raw["dflash_config"]["target_layer_ids"]
        assert report["drafter"]["block_size"] == raw.get("block_size", raw["dflash_config"].get("block_size"))
        # Random drafters are suspected, the trained one is not.
        assert bool(report["suspicions"]) == (path.parent.name == "drafters"), (path.name, report["suspicions"])


@pytest.mark.parametrize("broken", [False, True])
def test_the_command_prints_one_object_and_its_status_says_whether_all_is_well(tmp_path, broken):
    path = copy(tmp_path)
    if broken:
        rewrite(path, dflash_config={"target_layer_ids": [1, 2, 7]}, num_target_layers=None)
    done = run("doctor", "--model", "tiny", "--draft-model", str(path), "--json")
    assert done.returncode == int(broken), done.stderr
    assert bool(json.loads(done.stdout)["faults"]) == broken


def test_what_a_card_states_and_what_nothing_reads_is_shown(tmp_path):
    path = copy(tmp_path)
    rewrite(path, dflash_config={"conv_activation": "silu"}, runtime_block_size=4)
    (path / "README.md").write_text("Trained without thinking.")
    report = diagnose("tiny", str(path), mx.float32)
    assert report["faults"] == []
    assert report["suspicions"] == ["the drafter's config has keys that nothing here reads: conv_activation, runtime_block_size"]
    assert "            trained without thinking, says its card\n" in render(report)


def test_a_target_that_computes_no_numbers_is_named_and_rendered(tmp_path):
    path = copy(tmp_path, "target")
    retensor(path, lambda t: t.update({"model.norm.weight": t["model.norm.weight"] * mx.nan}))
    report = diagnose(str(path), "tiny", mx.float32)
    sentence = "failed: the target's own logits hold NaN or infinity in float32: its weights are damaged, or overflow"
    assert sentence in report["faults"] and f"fault       {sentence}" in render(report)


def test_an_answer_that_ends_at_once_has_no_tau(sound):
    text = render({**sound, "acceptance": sound["acceptance"] | {"tau": None}})
    assert "drafts      unknown tokens a round over 32 tokens" in text


@pytest.mark.parametrize("taps", [[0, 1, 2], [2, 3, 4], [3, 2, 1]])
def test_taps_one_layer_off_or_out_of_order_are_suspected_by_their_tau(tmp_path, taps):
    path = copy(tmp_path)
    rewrite(path, dflash_config={"target_layer_ids": taps})
    (suspicion,) = diagnose("tiny", str(path), mx.float32)["suspicions"]
    assert "is what a drafter for another target gives; 2.3 is expected: check the layers that it reads, mask token" in suspicion


def test_a_mask_row_of_zeros_is_suspected(tmp_path):
    target = tmp_path / "target"
    shutil.copytree(TINY / "target", target)
    weights = mx.load(str(target / "model.safetensors"))
    name = next(name for name in weights if "embed_tokens" in name)
    weights[name] = mx.concatenate([weights[name][:3], mx.zeros_like(weights[name][3:4]), weights[name][4:]])
    mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "mlx"})
    with pytest.warns(UserWarning, match="mask token 3 is zero"):
        report = diagnose(str(target), "tiny", mx.float32)
    assert any("mask token 3 is zero" in text for text in report["suspicions"])


@pytest.mark.parametrize("generation, advised", [(13, True), (14, True), (15, False), (16, False)])
def test_float16_is_advised_on_m1_and_m2_alone(generation, advised, monkeypatch):
    facts = doctor.system.facts() | {"architecture": f"applegpu_g{generation}s"}
    model, _ = load("tiny", dtype="bfloat16")
    report = {"machine": facts, "target": {"activations": "bfloat16"}}
    advice = doctor._float16_advice(report, model, "tiny", None, None)
    assert bool(advice) == advised and (not advised or advice.endswith("stay finite in float16: try --dtype float16"))
    assert doctor._float16_advice(report | {"target": {"activations": "float16"}}, model, None, None, None) is None


@pytest.mark.parametrize("where", ["target", "drafter"])
def test_float16_is_advised_only_after_the_values_of_this_model_stayed_finite(where, tmp_path):
    model, _ = load("tiny", dtype="bfloat16")
    path = copy(tmp_path)
    if where == "target":
        model.model.layers[1].mlp.down_proj.weight = model.model.layers[1].mlp.down_proj.weight * 1e6
    else:
        weights = dict(mx.load(str(path / "model.safetensors")))
        mx.save_safetensors(str(path / "model.safetensors"), weights | {"fc.weight": weights["fc.weight"] * 1e6})
    report = {"machine": {"architecture": "applegpu_g13g"}, "target": {"activations": "bfloat16"}}
    advice = doctor._float16_advice(report, model, str(path) if where == "drafter" else None, None, None)
    assert "but float16 is not for this model" in advice and "NaN or infinity" in advice


def test_advice_is_given_by_the_whole_report(monkeypatch):
    facts = doctor.system.facts()
    monkeypatch.setattr(doctor.system, "facts", lambda: facts | {"architecture": "applegpu_g14s"})
    own = doctor.loaded_dtype
    monkeypatch.setattr(loading, "loaded_dtype", lambda checkpoint, dtype: own(checkpoint, dtype or "auto"))
    report = diagnose("tiny", None)
    assert report["faults"] == [] and "advice      this GPU computes bfloat16" in render(report)


@pytest.mark.full
def test_both_ways_to_tap_the_last_layer_are_counted_and_the_better_is_named(tmp_path):
    """Nothing in this drafter's config says which its trainer took: the last layer is trained on by neither."""
    path = copy(tmp_path)
    rewrite(path, dflash_config={"target_layer_ids": [1, 2, 5]})
    lm, tokenizer = load("tiny", dtype=mx.float32)
    taus = {}
    for way in ("before", "after"):
        drafter = load_drafter(str(path), lm, last_tap=way)
        _, prompt = doctor._prompt(tokenizer, drafter, "tiny")
        taus[way] = list(stream_generate(lm, tokenizer, prompt, 32, drafter, block_size=8))[-1].stats.tau
    better, worse = sorted(taus, key=taus.get, reverse=True)
    assert taus[better] > taus[worse]
    for said in (worse, better):
        report = diagnose("tiny", str(path), mx.float32, last_tap=said)
        # what it was told comes first, and is what its answers were counted with
        assert list(report["acceptance"]["last_tap"].items()) == [(way, taus[way]) for way in (said, *({*taus} - {said}))]
        named = [text for text in report["suspicions"] if f"--last-tap {better}" in text]
        assert bool(named) == (said == worse) and f"{better} its final norm {taus[better]:.2f}" in render(report)
