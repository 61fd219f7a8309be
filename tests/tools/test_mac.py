"""scripts/mac.py, the steps of the macOS job, with a made-up GPU, CPU, compiler and runner."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import emulator
import mlx.core as mx
import on_gpu
import on_off
import pytest
import rows
import yaml

from dflash_mlx.kernels import names

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("mac", ROOT / "scripts/mac.py")
mac = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mac)

RUNNER, OWN = "Apple Paravirtual device", "Apple M4"


# ---- the CPU


@pytest.fixture
def differing(monkeypatch):
    """This CPU's rows may be made to differ, and are themselves again afterwards."""
    for owner, name in ((mx, "matmul"), (mx, "addmm"), (mx.array, "__matmul__"), (mx.fast, "scaled_dot_product_attention")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    rows.difference.cache_clear()
    yield
    rows.difference.cache_clear()


def test_rows_of_a_cpu_that_differ_are_found_and_told(differing, monkeypatch, capsys):
    assert mac.main(["rows", "--made-up"]) == 0
    said = capsys.readouterr().out
    assert "rows_equal: not on this CPU: a product of 2 rows, N 61 K 24, differs from its rows alone by up to" in said
    with monkeypatch.context() as patch:
        # A search that finds nothing on a CPU that was made to differ is wrong.
        patch.setattr(rows, "difference", lambda: None)
        assert mac.main(["rows", "--made-up"]) == 1 and mac.main(["rows"]) == 0


def test_ids_are_the_same_only_up_to_a_tie_where_rows_differ(monkeypatch):
    logits = mx.array([[[0.0, 100.0, 100.0 - 2e-3, 99.9]]])

    def model(ids):
        return logits

    for reason, tie in ((None, False), ("rows differ", True)):
        monkeypatch.setattr(rows, "difference", lambda reason=reason: reason)
        assert rows.same_ids(model, [5], [7, 1], [7, 1])
        assert rows.same_ids(model, [5], [7, 1, 4], [7, 2, 9]) is tie
        assert not rows.same_ids(model, [5], [7, 1], [7, 3])
        assert not rows.same_ids(model, [5], [7, 1], [7])


def test_what_a_machine_lacks_skips_the_marked_tests_by_that_name(request, monkeypatch):
    (conftest,) = [p for p in request.config.pluginmanager.get_plugins() if getattr(p, "NEEDS", None)]
    marks = [line.split(":")[0] for line in request.config.getini("markers")]
    assert {*conftest.NEEDS} == {"rows_equal", "emulator"} <= {*marks}

    class Item:
        def get_closest_marker(self, name):
            return name == "rows_equal"

    monkeypatch.setitem(conftest.NEEDS, "rows_equal", lambda: None)
    conftest.pytest_runtest_setup(Item())
    monkeypatch.setitem(conftest.NEEDS, "rows_equal", lambda: "a product of 2 rows differs")
    with pytest.raises(pytest.skip.Exception, match="^rows_equal: a product of 2 rows differs$"):
        conftest.pytest_runtest_setup(Item())


@pytest.mark.parametrize("end, reason", [
    (0, None),
    (-11, "a small text ends with -11: Illegal instruction"),
    (None, "a small text does not end"),
])  # fmt: skip
def test_an_emulator_that_a_mac_does_not_build_is_skipped_by_its_name(monkeypatch, capsys, end, reason):
    def run(command, timeout, **options):
        assert command == [sys.executable, emulator.__file__]
        if end is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, end, "", "a warning\nIllegal instruction\n")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(emulator, "compiler", lambda: "clang++")
    monkeypatch.setattr(emulator.subprocess, "run", run)
    monkeypatch.setattr(emulator, "missing", emulator.missing.__wrapped__)
    assert emulator.missing() == reason and mac.main(["emulator"]) == 0
    assert (f"emulator: skipped, not here: {reason}" if reason else "emulator: builds and runs here") in capsys.readouterr().out
    # Elsewhere there is a compiler, and fibres are no question.
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(emulator, "compiler", lambda: None)
    assert mac.main(["emulator"]) == 1


@pytest.mark.emulator
def test_the_small_text_that_a_mac_tries_is_right_here(monkeypatch):
    emulator._try_out()
    monkeypatch.setattr(emulator, "metal_kernel", lambda *given: lambda **options: [mx.zeros((64,))])
    with pytest.raises(emulator.KernelFault, match="it must give 1520 and 496"):
        emulator._try_out()


# ---- the texts


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder of made-up tools, the first on the path: `tool(name, script)` puts one there, and `calls()` lists their calls."""
    log = tmp_path / "log"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(mac, "on_mac", lambda: True)

    def tool(name, script):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\n{script}\n')
        (tmp_path / name).chmod(0o755)

    tool.calls = lambda: log.read_text().splitlines()
    tool.folder = tmp_path
    return tool


# Refuses a text with "wrong" in it, at Metal 3.2 alone: the file is the argument behind the include folder.
COMPILER = """
for word; do case $word in *.metal) file=$word;; -std=*) version=$word;; esac; done
if [ -n "$file" ] && [ $version = -std=metal3.2 ] && grep -q wrong $file; then
  echo "$file:3:1: error: no such type" >&2; echo "1 error generated." >&2; exit 1
fi
"""


@pytest.mark.parametrize("macos, wanted", [("15.7.1", ["3.1", "3.2"]), ("26.1", ["3.1", "3.2", "4.0"])])
def test_every_text_is_compiled_in_every_version_without_fast_math(tools, monkeypatch, capsys, macos, wanted):
    tools("xcrun", COMPILER)
    monkeypatch.setattr(mac.metal_text, "collect", lambda: {"one": "sound", "two": "all wrong"})
    monkeypatch.setattr(mac.platform, "mac_ver", lambda: (macos, ("", "", ""), "arm64"))
    assert mac.main(["texts"]) == 1
    said = capsys.readouterr().out
    assert "two in Metal 3.2: " in said and "two.metal:3:1: error: no such type\n" in said and "one in" not in said
    assert said.endswith(f"texts: 2 in Metal {', '.join(wanted)}: 1 refused\n")
    compiled = [call for call in tools.calls() if " -c " in call]
    assert len(compiled) == 2 * len(wanted)
    for call in compiled:
        assert call.startswith("xcrun -sdk macosx metal -c -std=metal") and " -fmetal-math-mode=safe -I " in call
    assert sorted({call.split("-std=metal")[1].split()[0] for call in compiled}) == wanted
    include = Path(compiled[0].split(" -I ")[1].split()[0])
    assert (include / "mlx/backend/metal/kernels/utils.h").exists()


def test_no_text_is_forgotten(monkeypatch, capsys):
    files = set()
    monkeypatch.setattr(mac, "ended", lambda command, seconds: (files.add(command[-3]), (None, ""))[1])
    assert mac.texts("15.7", 5) == 0
    texts = mac.metal_text.collect()
    assert {Path(file).stem for file in files if file.endswith(".metal")} == {*texts}
    assert {name.removeprefix("dflash_").rstrip("0123456789_") for name in texts} > {*names(text=True)} - {"block_linear"}
    assert capsys.readouterr().out == f"texts: {len(texts)} in Metal 3.1, 3.2: 0 refused\n"


def test_a_missing_toolchain_is_fetched_and_a_fetch_that_fails_is_tried_again(tools, monkeypatch, capsys):
    there, tried = tools.folder / "there", tools.folder / "tried"
    tools("xcrun", f"[ -e {there} ] || {{ echo 'error: missing Metal Toolchain' >&2; exit 1; }}")
    tools("xcodebuild", f"if [ -e {tried} ]; then touch {there}; else touch {tried}; echo 'no catalog' >&2; exit 70; fi")
    monkeypatch.setattr(mac.metal_text, "collect", lambda: {"one": "sound"})
    assert mac.texts("26.1", 5) == 0
    said = capsys.readouterr().out
    assert "the download ended with 70: no catalog\n" in said and "downloaded\n" in said
    assert tools.calls().count("xcodebuild -downloadComponent MetalToolchain") == 2
    there.unlink()
    tools("xcodebuild", "echo 'no catalog' >&2; exit 70")
    assert mac.texts("26.1", 5) == 1
    assert "texts: Apple's compiler is not here: ended with 1: error: missing Metal Toolchain" in capsys.readouterr().out
    assert len([call for call in tools.calls() if call.startswith("xcodebuild")]) == 5


# ---- the GPU


@pytest.fixture
def runner(monkeypatch):
    """A runner whose checks end as said here, by name; `asked` are those that ran."""

    def made(gpu, **ends):
        made.asked = []
        monkeypatch.setattr(mac, "gpu_name", lambda made_up: gpu)
        monkeypatch.setattr(mac, "check", lambda name, made_up, seconds: made.asked.append(name) or ends.get(name))
        return made

    return made


MATRIX_KERNELS = ["block_qmm_tiles", "block_linear"]


def test_every_kernel_runs_and_one_that_is_wrong_is_named(runner, capsys):
    runner(OWN)
    assert mac.main(["kernels"]) == 0
    assert runner.asked == ["matrix_units", *names(text=True)]
    assert "accept: right, rows bit-equal (0 s)\n" in capsys.readouterr().out
    runner(OWN, accept="stopped after 300 s")
    assert mac.main(["kernels"]) == 1 and runner.asked == ["matrix_units", *names(text=True)]
    said = capsys.readouterr().out
    assert "accept: stopped after 300 s (0 s)\n" in said and said.endswith(f"kernels on {OWN}: wrong: accept\n")


def test_matrix_units_that_a_paravirtual_gpu_lacks_are_skipped_by_name(runner, capsys):
    runner(RUNNER, matrix_units="ended with 1: unlowered function call")
    assert mac.main(["kernels"]) == 0
    assert [name for name in names(text=True) if name not in runner.asked] == MATRIX_KERNELS
    said = capsys.readouterr().out
    for name in MATRIX_KERNELS:
        assert f"{name}: skipped, simdgroup_matrix is not on {RUNNER}: ended with 1: unlowered function call\n" in said
    # A Mac's own GPU has them: there the kernels have to run, and say what is wrong.
    runner(OWN, matrix_units="ended with 1", block_linear="ended with 1: it does not compile")
    assert mac.main(["kernels"]) == 1 and {*MATRIX_KERNELS} <= {*runner.asked}


def test_without_a_gpu_a_step_that_needs_one_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    for step in ("kernels", "generate"):
        assert mac.main([step]) == 1
        assert capsys.readouterr().out == f"{step}: MLX finds no GPU here\n"


def test_a_process_that_hangs_dies_or_is_not_there_is_told():
    python = [sys.executable, "-S", "-c"]
    assert mac.ended([*python, "import time; time.sleep(60)"], 0.3) == ("stopped after 0 s", "")
    assert mac.ended([*python, "import os; os.abort()"], 120)[0] == "ended with -6: nothing"
    wrong, output = mac.ended([*python, "print('x'); raise SystemExit('Error: y')"], 120)
    assert wrong == "ended with 1: Error: y" and output == "x\nError: y\n"
    assert mac.ended(["no-such-tool"], 5)[0] == "no-such-tool does not run: No such file or directory"


@pytest.mark.emulator
def test_the_checks_of_a_kernel_fail_where_it_is_wrong(monkeypatch):
    on_gpu.main(["accept", "--made-up"])
    sound = emulator.metal_kernel

    def off_by_one(**made):
        kernel = sound(**made)
        return lambda **given: [out + 1 for out in kernel(**given)]

    monkeypatch.setattr(emulator, "metal_kernel", off_by_one)
    with pytest.raises(AssertionError):
        on_gpu.main(["accept", "--made-up"])


@pytest.mark.emulator
def test_matrix_units_that_multiply_wrongly_are_found(monkeypatch):
    on_gpu.main(["matrix_units", "--made-up"])
    monkeypatch.setattr(emulator, "metal_kernel", lambda **given: lambda **options: [mx.zeros((64,))])
    with pytest.raises(AssertionError, match="half: 8 products of 2 and 3, and 1, are"):
        on_gpu.main(["matrix_units", "--made-up"])


@pytest.mark.emulator
@pytest.mark.full
def test_the_steps_of_the_gpu_run_in_the_emulator(capfd):
    assert mac.main(["kernels", "--made-up"]) == 0
    assert mac.main(["generate", "--made-up", "--pairs", "tiny", "--tokens", "3"]) == 0
    said = capfd.readouterr().out
    assert all(f"{name}: right, rows bit-equal" in said for name in names(text=True))
    assert "tiny: 9 ids, 0 ties, launches: " in said and "block_qmm " in said and "head_argmax " in said


@pytest.mark.parametrize("gpu, matrices", [(OWN, True), (RUNNER, False)])
def test_a_pair_generates_without_kernels_and_then_with_all_that_run_there(runner, monkeypatch, capsys, gpu, matrices):
    runner(gpu, **({} if matrices else {"matrix_units": "ended with 1"}))
    calls = []

    def ended(command, seconds, DFLASH_MLX_KERNELS):
        calls.append((command[2], DFLASH_MLX_KERNELS))
        if DFLASH_MLX_KERNELS != "off":
            if command[2] == "smollm2":
                return "ended with 1: no tie", ""
            Path(command[3]).write_text(json.dumps({"summary": "144 ids, 0 ties"}))
        return None, ""

    monkeypatch.setattr(mac, "ended", ended)
    assert mac.main(["generate"]) == 1
    assert [call[0] for call in calls] == ["tiny", "tiny", "smollm2", "smollm2"] and calls[0][1] == calls[2][1] == "off"
    on = calls[1][1].split(",")
    assert calls[3][1] == calls[1][1] and all((name in on) is matrices for name in MATRIX_KERNELS)
    assert {"block_qmm", "block_gather_qmm", "accept", "head_argmax", "block_attention"} <= {*on}
    said = capsys.readouterr().out
    assert "tiny: 144 ids, 0 ties\n" in said and f"smollm2, kernels {calls[1][1]}: ended with 1: no tie\n" in said
    assert said.endswith(f"generate on {gpu}: wrong\n")


@pytest.mark.parametrize("says, ties, wrong", [
    ({1: [1, 2, 3, 4]}, 0, []),
    # Id 1 of the answer ties with 2: the comparison goes on behind it.
    ({1: [1, 9, 5], 3: [3, 4]}, 1, []),
    ({1: [1, 8, 3, 4]}, 0, ["id 1 is 8 and not 2: logits 0.5 apart, no tie"]),
    ({1: [1, 2, 3]}, 0, ["after 3 ids one answer ends and the other goes on"]),
])  # fmt: skip
def test_answers_are_compared_id_by_id_and_go_on_behind_ties(says, ties, wrong):
    row = mx.zeros((12,))
    row[2], row[9], row[8] = 10.0, 10.0 - 1e-4, 5.0
    found = on_off.compare(lambda text, most: says[len(text)], lambda ids: row[None, None], [[0]], [[1, 2, 3, 4]])
    assert found == (ties, wrong)


# ---- the workflow


def test_the_workflow_runs_every_step_on_both_systems_within_limits():
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    assert jobs["macos"]["strategy"]["matrix"]["os"] == ["macos-15", "macos-26"] and jobs["linux"]["runs-on"] == "ubuntu-latest"
    for name, job in jobs.items():
        limits = [step.get("timeout-minutes") for step in job["steps"]]
        assert job["timeout-minutes"] and all(limits), name
        assert not [step["run"] for step in job["steps"] if step.get("run", "").startswith("pip")], "which Python's pip?"
    steps = [step.get("run", "").split() for step in jobs["macos"]["steps"]]
    assert [step[2] for step in steps if step[1:2] == ["scripts/mac.py"]] == ["rows", "emulator", "texts", "kernels", "generate"]
    made_up = [step["run"].split() for step in jobs["made-up-mac"]["steps"] if "mac.py" in step.get("run", "")]
    assert [step[2] for step in made_up] == ["rows", "emulator", "kernels", "generate"] and all("--made-up" in s for s in made_up)
    # What fails in one step hides no other.
    after = jobs["macos"]["steps"][[step.get("id") for step in jobs["macos"]["steps"]].index("install") + 1 :]
    assert len(after) == 7 and {step["if"] for step in after} == {"${{ !cancelled() && steps.install.outcome == 'success' }}"}
