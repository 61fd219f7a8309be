"""Which kernels run: the variable, trials, verdicts kept, hangs marked, and the layers of a target's pass."""

import contextlib
import copy
import json
import logging
import os
import re
import signal
import subprocess
import sys
import weakref

import emulator
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU

from dflash_mlx.kernels import (
    accept,
    autotune,
    block_attention,
    block_gather_qmm,
    block_linear,
    block_qmm,
    crash_marker,
    head_argmax,
    small_batch,
    trials,
)
from dflash_mlx.kernels.autotune import Candidate, KernelError, Question, Trial
from dflash_mlx.kernels.launch import Kernel
from dflash_mlx.kernels.routing import attention_calls, kernel_calls
from dflash_mlx.models.intercept import intercept
from dflash_mlx.models.target import Target

needs_compiler = pytest.mark.emulator
KERNEL = Kernel("accept", ("x",), ("y",), "y[0] = x[0];")
ONE = mx.array([1.0])


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No verdict of another test, an empty cache directory, the variable unset."""
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    monkeypatch.delenv("DFLASH_MLX_KERNELS", raising=False)
    for name in ("_known", "_off", "_plans", "_waiting"):
        monkeypatch.setattr(autotune, name, {})
    return tmp_path / "kernels"


@pytest.fixture
def gpu(monkeypatch):
    """As if the CPU were a GPU whose kernels are as fast as the test says: times are [kernel, stock]."""
    times = {"kernel": 1.0, "stock": 2.0}
    monkeypatch.setattr(autotune, "has_gpu", lambda: True)
    monkeypatch.setattr(trials, "medians_s", lambda kernel, stock, **_: [times["kernel"], times["stock"]])
    return times


def trial(ours=ONE, theirs=ONE, calls=None):
    def kernel(x):
        if calls is not None:
            calls.append(1)
        if isinstance(ours, Exception):
            raise ours
        return [ours]

    def stock(x):
        return [theirs]

    return lambda rows: Trial(ONE, [kernel], stock, autotune.same_floats(1e-3))


def should_use(kernel, shape, make, rows=1):
    """Whether a kernel serves a shape, once what waits was tried; `make` gives the trial of a row count."""
    question = Question(shape, (Candidate(kernel),), lambda ways: make, (rows,))
    if (chosen := autotune.choose(question, rows)) is None:
        autotune.try_waiting(60.0)
        chosen = autotune.choose(question, rows)
    return chosen is not None


def test_without_a_gpu_no_trial_runs_and_a_named_kernel_is_an_error(monkeypatch):
    assert should_use(KERNEL, "s", lambda rows: pytest.fail("tried")) is False
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "on")
    assert should_use(KERNEL, "s", lambda rows: pytest.fail("tried")) is False
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "accept")
    with pytest.raises(KernelError, match="DFLASH_MLX_KERNELS is accept and MLX finds no GPU here; kernels need one. Unset"):
        should_use(KERNEL, "s", trial())


def test_an_unknown_name_is_an_error_that_lists_the_known(monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "accept,qmm")
    with pytest.raises(KernelError, match="DFLASH_MLX_KERNELS names qmm; it must be off, .*block_qmm, .*Correct the variable"):
        autotune.setting()


def test_right_and_faster_is_used_and_tried_once(gpu, fresh):
    calls = []
    assert should_use(KERNEL, "s", trial(calls=calls)) and should_use(KERNEL, "s", trial(calls=calls))
    assert len(calls) == 1
    autotune._known.clear()  # a new process
    assert should_use(KERNEL, "s", lambda rows: pytest.fail("tried again"))
    (verdict,) = autotune.results()
    assert (verdict.kernel, verdict.use, verdict.reason) == ("accept", True, "right, 2.00 times as fast as stock MLX")
    assert not list(fresh.glob("*.trying"))


def test_right_but_slower_is_not_used_unless_asked_for(gpu, monkeypatch):
    gpu["kernel"] = 3.0
    assert not should_use(KERNEL, "s", trial())
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "accept")
    assert should_use(KERNEL, "s", trial())
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "on")
    assert should_use(KERNEL, "s", trial())
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "block_qmm")
    assert not should_use(KERNEL, "s", trial())
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "off")
    assert not should_use(KERNEL, "s", lambda rows: pytest.fail("tried"))


def test_on_cuda_a_kernel_runs_only_when_asked_for(gpu, monkeypatch):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    assert not should_use(KERNEL, "s", lambda rows: pytest.fail("tried"))
    # Nothing to compile: the pass that asks tries.
    assert autotune.choose(Question("s", (Candidate(small_batch.PRODUCTS),), lambda ways: trial(), (1,)), 1)
    for value in ("on", "accept"):
        monkeypatch.setenv("DFLASH_MLX_KERNELS", value)
        assert autotune.may_run() and should_use(KERNEL, "s", trial())


def test_of_two_kernels_for_one_operation_the_quicker_runs(gpu, monkeypatch):
    other = Kernel("block_qmm", ("x",), ("y",), "y[0] = x[0] + 1;")

    def quickest():
        calls = [lambda x: [ONE]] * 2
        make = lambda ways: lambda rows: Trial(ONE, calls[: len(ways)], calls[0], autotune.same_floats(1e-3))  # noqa: E731
        question = Question("s", (Candidate(KERNEL), Candidate(other)), make, (1,))
        autotune.choose(question, 1)
        autotune.try_waiting(60.0)
        return (chosen := autotune.choose(question, 1)) and chosen.kernel

    monkeypatch.setattr(trials, "medians_s", lambda *calls, **_: [3.0, 2.0, 4.0])
    assert quickest() is other and quickest() is other
    autotune.switch_off("block_qmm", "a test")
    assert quickest() is KERNEL
    autotune.switch_off("accept", "a test")
    assert quickest() is None


@pytest.mark.parametrize("ours, reason", [
    (mx.array([1.1]), "differs from stock MLX by 0.1 of the largest value"),
    (mx.array([float("nan")]), "not finite where stock MLX's is"),
    (mx.array([float("inf")]), "not finite where stock MLX's is"),
    (RuntimeError("no such function\nmore"), "RuntimeError: no such function$"),
])  # fmt: skip
def test_wrong_is_off_with_one_line_and_asking_for_it_is_an_error(ours, reason, gpu, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        assert not should_use(KERNEL, "s", trial(ours)) and not should_use(KERNEL, "s", trial(ours))
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()
    assert re.search(reason, autotune.results()[0].reason)
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "on")
    with pytest.raises(KernelError, match="accept cannot run here as DFLASH_MLX_KERNELS asks: "):
        should_use(KERNEL, "s", trial(ours))


def restart():
    """As a new process: what this one found out is forgotten."""
    autotune._known.clear(), autotune._off.clear(), autotune._waiting.clear(), autotune._forget()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_after_an_exit_that_is_seen_the_next_start_tries_again(error, gpu, fresh):
    def ends(rows):
        raise error

    for _ in range(3):
        with pytest.raises(error):
            should_use(KERNEL, "s", ends)
        assert not list(fresh.glob("*.trying")) and not autotune.results()
        restart()
    assert should_use(KERNEL, "s", trial())


# A process with a made-up GPU whose trial sends `sys.argv[1]` to itself, or whoever started it does so.
DIES = """
import os, signal, sys, time
import mlx.core as mx
from dflash_mlx.kernels import autotune
from dflash_mlx.kernels.launch import Kernel
autotune.has_gpu = lambda: True
kernel = Kernel("accept", ("x",), ("y",), "y[0] = x[0];")
def trial(rows):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    time.sleep(300)
made = lambda ways: trial
autotune.choose(autotune.Question("s", (autotune.Candidate(kernel),), made, (1,)), 1)
autotune.try_waiting(60.0)
"""


def dies_of(name):
    """A process that a signal ends in a trial of KERNEL at shape "s"."""
    done = subprocess.run([sys.executable, "-c", DIES, name], capture_output=True, text=True, timeout=180)
    assert done.returncode == -getattr(signal, name) or name == "SIGINT" and "KeyboardInterrupt" in done.stderr, done.stderr


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"])
def test_a_process_that_is_interrupted_in_a_trial_leaves_nothing_behind(name, gpu, fresh):
    dies_of(name)
    assert fresh.is_dir() and not list(fresh.glob("*.trying"))
    assert should_use(KERNEL, "s", trial())


# A web application or a notebook: the trial runs in a thread that the end of the program does not wait for.
LEAVES = """
import os, signal, sys, threading, time
from pathlib import Path
from dflash_mlx.kernels.crash_marker import marked
signal.signal(signal.SIGINT, signal.default_int_handler)
def trials():
    while True:
        with marked(Path(sys.argv[1]) / "s.trying"):
            began.set()
            time.sleep(20)
began = threading.Event()
threading.Thread(target=trials, daemon=True).start()
began.wait()
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError", "os.kill(os.getpid(), signal.SIGINT); time.sleep(20)"])
def test_a_program_that_ends_while_another_thread_is_in_a_trial_leaves_nothing_behind(end, tmp_path):
    done = subprocess.run([sys.executable, "-c", LEAVES + end, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert not list(tmp_path.iterdir()), done.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_one_end_that_another_thread_cannot_see_is_forgiven_and_the_second_is_a_crash(name, tmp_path):
    command = [sys.executable, "-c", LEAVES + f"os.kill(os.getpid(), signal.{name}); time.sleep(20)", str(tmp_path)]
    for is_off in (False, True):
        assert subprocess.run(command, capture_output=True, timeout=60).returncode == -getattr(signal, name)
        with crash_marker.marked(tmp_path / "s.trying") as marker:
            assert bool(marker.crash) == is_off


def test_a_child_of_a_fork_that_ends_takes_no_marker_of_its_parent_away(tmp_path):
    end = (
        "child = os.fork()\nif not child: sys.exit()\nos.waitpid(child, 0)\n"
        "print(*[file.read_text() for file in Path(sys.argv[1]).iterdir()])"
    )
    done = subprocess.run([sys.executable, "-c", LEAVES + end, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["trying"] and not list(tmp_path.iterdir()), done.stderr


def test_leaving_at_once_leaves_no_trial_behind(gpu, fresh, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "_exit", lambda status: seen.append((status, *fresh.glob("*.trying"))))

    def trial_of_somebody_in_a_hurry(rows):
        assert list(fresh.glob("*.trying"))
        crash_marker.leave_at_once(130)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        should_use(KERNEL, "s", trial_of_somebody_in_a_hurry)
    assert seen == [(130,)]


# Ctrl-C in `generate` while the first answer's trials are inside of a pass that nothing interrupts, and twice in `serve`.
HURRIES = """
import hashlib, os, signal, sys, threading
from dflash_mlx.kernels.crash_marker import marked
signal.signal(signal.SIGINT, signal.default_int_handler)
def trial():
    with marked(Path(sys.argv[1]) / "s.trying"):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)
"""


@pytest.mark.full
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_ctrl_c_within_a_long_pass_of_a_trial_leaves_nothing_behind(command, tmp_path):
    ways = {
        "generate": "from dflash_mlx.cli.generate import leave_prefill_at_ctrl_c\n"
        "with leave_prefill_at_ctrl_c(lambda: None):\n    trial()",
        "serve": "from dflash_mlx.serving.server import Options, serve\n"
        "serve(Options(port=0), trial, lambda line: line.startswith('Stopping') and os.kill(os.getpid(), signal.SIGINT))",
    }
    program = "from pathlib import Path" + HURRIES + ways[command]
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and not list(tmp_path.iterdir()), done.stderr


def test_a_shape_is_off_for_some_starts_after_a_process_was_killed_in_its_trial(gpu, fresh, caplog, monkeypatch):
    for crashes in (1, 2):
        dies_of("SIGKILL")
        (marker,) = fresh.glob("*.trying")
        for left in range(crash_marker.OFF_STARTS * crashes, 0, -1):
            restart(), caplog.clear()
            for _ in range(2):  # of one start, which counts once
                assert not should_use(KERNEL, "s", lambda rows: pytest.fail("tried again"))
            (line,) = caplog.messages
            assert f"({crashes} times); tried again {left} starts later, or delete {marker}" in line
            assert any(result.reason in line for result in autotune.results())
        # That shape alone is off.
        assert should_use(KERNEL, f"another {crashes}", trial()) and "accept" not in autotune._off
        restart()
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "accept")
    with pytest.raises(KeyboardInterrupt):
        # An interrupted new trial is no crash, and what was counted is not forgotten.
        should_use(KERNEL, "s", lambda rows: (_ for _ in ()).throw(KeyboardInterrupt))
    counted = {"trying": False, "crashes": 2, "skipped": 2 * crash_marker.OFF_STARTS}
    assert counted.items() <= json.loads(marker.read_text()).items()
    restart()
    assert should_use(KERNEL, "s", trial()) and not marker.exists()


def test_asking_by_name_for_a_kernel_at_a_shape_that_is_off_says_why(gpu, fresh, monkeypatch):
    dies_of("SIGKILL")
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "accept")
    with pytest.raises(KernelError, match=r"accept cannot run here as DFLASH_MLX_KERNELS asks: a process ended .*\(s\)\. Unset"):
        should_use(KERNEL, "s", lambda rows: pytest.fail("tried again"))
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "auto")
    (marker,) = fresh.glob("*.trying")
    marker.unlink()
    restart()
    assert should_use(KERNEL, "s", trial())


@pytest.mark.parametrize("text", ["a key, as older versions wrote it", "[]", '{"trying": 7, "crashes": "x"}'])
def test_a_marker_that_cannot_be_read_is_that_of_a_crash(text, gpu, fresh):
    names = []
    assert should_use(KERNEL, "s", lambda rows: names.extend(fresh.glob("*.trying")) or trial()(rows))
    (fresh / "tuning.json").unlink()
    names[0].write_text(text)
    restart()
    assert not should_use(KERNEL, "s", lambda rows: pytest.fail("tried again"))


def test_results_hold_for_one_system_and_no_host_name(gpu, monkeypatch):
    assert should_use(KERNEL, "s", trial())
    restart()
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    monkeypatch.setattr("platform.node", lambda: "another")
    autotune._system.cache_clear()
    assert should_use(KERNEL, "s", lambda rows: pytest.fail("tried again"))
    # An update of the system, of its build alone, or another chip.
    for number in range(len(autotune.system_identity())):
        identity = [*autotune.system_identity()]
        identity[number] += "1"
        restart()
        with monkeypatch.context() as patch:
            patch.setattr(autotune, "system_identity", lambda identity=identity: tuple(identity))
            autotune._system.cache_clear()
            calls = []
            assert should_use(KERNEL, "s", trial(calls=calls)) and calls
        autotune._system.cache_clear()


def test_a_trial_that_another_process_is_at_is_no_hang_and_its_result_is_not_ours(gpu, fresh):
    code = (
        "import pathlib, sys; from dflash_mlx.kernels import crash_marker\n"
        "with crash_marker.marked(pathlib.Path(sys.argv[1])) as marker:\n"
        "    assert marker.locked and not marker.crash\n"
        "    print('there', flush=True), sys.stdin.read()"
    )
    names = []
    with pytest.raises(KeyboardInterrupt):  # to know the marker's name
        should_use(KERNEL, "s", lambda rows: names.extend(fresh.glob("*.trying")) or (_ for _ in ()).throw(KeyboardInterrupt))
    (marker,) = names
    calls = []
    with subprocess.Popen([sys.executable, "-c", code, marker], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"there\n"
        assert should_use(KERNEL, "s", trial(calls=calls)) and len(calls) == 1
        assert marker.exists() and not autotune._results.read()
        other.kill()
    restart()  # after the other one died in its trial
    assert not should_use(KERNEL, "s", lambda rows: pytest.fail("tried again"))


def test_a_trial_that_ended_between_opening_its_marker_and_locking_it_is_no_hang(gpu, fresh, monkeypatch):
    flock, calls = crash_marker.fcntl.flock, []

    def late(file, how):
        # The other process, whole.
        monkeypatch.setattr(crash_marker.fcntl, "flock", flock)
        with monkeypatch.context() as patch:
            # Asked for by name it is tried at once, as another process does it.
            patch.setenv("DFLASH_MLX_KERNELS", "accept")
            assert should_use(KERNEL, "s", trial(calls=calls))
        autotune._known.clear()
        flock(file, how)

    monkeypatch.setattr(crash_marker.fcntl, "flock", late)
    assert should_use(KERNEL, "s", trial(calls=calls)) and len(calls) == 2
    assert not list(fresh.glob("*.trying"))


def test_another_text_or_shape_is_another_verdict(gpu):
    calls = []
    for kernel in (KERNEL, Kernel("accept", ("x",), ("y",), "y[0] = x[0] + 0;")):
        for shape in ("a", "b"):
            should_use(kernel, shape, trial(calls=calls))
    assert len(calls) == 4


def test_a_plan_holds_until_what_it_rests_on_changes(gpu, monkeypatch):
    asked = []

    def decide(about):
        asked.append(about)
        return len(asked)

    def plan(about="a"):
        return autotune.planned(decide, about)

    assert [plan(), plan()] == [1, 1] and plan("b") == 2 and autotune.planned(lambda about: 7, "a") == 7
    autotune.may_run()
    before = len(asked)
    for change in (
        lambda: monkeypatch.setenv("DFLASH_MLX_KERNELS", "off"),
        lambda: monkeypatch.setattr(autotune, "has_gpu", lambda: False),
        lambda: monkeypatch.setattr(mx.fast, "metal_kernel", emulator.metal_kernel),
    ):
        plan()
        change()
        autotune.may_run()
        autotune.may_run()
        before += 1
        assert [plan(), plan()] == [before + 1] * 2
    # These at once, whoever asks next.
    autotune.switch_off("accept", "a test")
    assert [plan(), plan()] == [before + 2] * 2
    autotune.disable_all("a test")
    assert [plan(), plan()] == [before + 3] * 2
    autotune.disable_all("again")
    assert plan() == before + 3


def test_a_plan_that_was_being_made_when_kernels_went_off_is_not_kept(gpu):
    def decide():
        autotune.switch_off("block_qmm", "in a trial, or by another thread")
        return "with block_qmm"

    assert autotune.planned(decide) == "with block_qmm"
    assert not autotune._plans
    assert autotune.planned(decide) == "with block_qmm" and len(autotune._plans) == 1


def test_a_kernel_can_be_switched_off_for_the_process(gpu, caplog):
    assert should_use(KERNEL, "s", trial())
    autotune.switch_off("accept", "a logit was not finite")
    autotune.switch_off("accept", "again")
    assert not should_use(KERNEL, "s", trial())
    assert [r.getMessage() for r in caplog.records] == ["kernel accept is off: a logit was not finite"]


def test_a_cache_that_cannot_be_written_costs_only_the_memory(gpu, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(blocked))
    assert should_use(KERNEL, "s", trial()) and autotune.results()


def test_times_are_medians_of_real_calls():
    times = trials.medians_s(lambda x: [x * 2], lambda x: [x], x=mx.ones((4,)))
    assert len(times) == 2 and all(0 < seconds < 0.1 for seconds in times)


def layer_weights(e, n, k):
    """Experts' weights as a trial is given them, and what holds them."""
    w = mx.quantize(mx.random.normal((e * n, k), key=mx.random.key(1)), group_size=32, bits=4)
    arrays = [a.reshape(e, n, -1) for a in w]
    mx.eval(arrays)
    return [weakref.ref(a) for a in arrays], arrays


@needs_compiler
def test_every_kernels_own_trials_pass_in_the_emulator():
    weights, _held = layer_weights(5, 16, 64)
    with emulator.emulated():
        plain, tiles = (block_qmm.candidates(dtype, 40, 32, 4) for dtype in (mx.float32, mx.bfloat16))
        made = [
            (block_qmm.trials(40, 64, 32, 4, mx.float32, plain), (1, 16)),
            (block_qmm.trials(40, 64, 32, 4, mx.bfloat16, tiles[2:]), (1, 16)),
            (block_linear.trials(32, 64, 32, 4, mx.float16, 1e-6, True, True, (Candidate(block_linear.KERNEL),)), (4,)),
            (block_gather_qmm.trials(2, 32, 4, mx.float32, weights, block_gather_qmm.candidates()[1:3]), (4, 16)),
            (accept.trials(2, (Candidate(accept.KERNEL),)), (16,)),
            (head_argmax.trials(200, 64, mx.float32, (32, 4), head_argmax.candidates()), (1, 16)),
            (head_argmax.trials(200, 64, mx.float32, None, head_argmax.candidates()[:1]), (4,)),
            (block_attention.trials(4, 2, 32, 64, mx.float32, True, 16, False, block_attention.candidates()), (4,)),
            (block_attention.trials(4, 2, 32, 64, mx.float32, True, 0, True, block_attention.candidates()[1:]), (4,)),
        ]
        for trials_at, rows in made:
            for m in rows:
                found = trials_at(m).check()
                assert found and not any(found)


@pytest.mark.parametrize("sinks", [False, True])
def test_trials_compile_every_form_that_a_row_count_may_take(monkeypatch, sinks):
    forms = set()

    def noted(kernel, *, template, **_):
        forms.add((kernel.name, *template))
        return lambda **_: pytest.fail("launched")

    monkeypatch.setattr(Kernel, "prepared", noted)
    weights, _held = layer_weights(12, 16, 64)
    about_of = {
        block_qmm: (lambda m: (m, 64), mx.float32, 40, 32, 4),
        block_linear: (lambda m: (m, 64), mx.float16, 48, 32, 4, 1e-6, False, True),
        block_gather_qmm: (lambda m: (m, 64), mx.float32, (12, 16), lambda m: (2 * m,), 32, 4),
        head_argmax: (lambda m: (m, 64), mx.float16, 200, (32, 4)),
        block_attention: (lambda m: (1, 8, m, 32), mx.float16, 2, 0.2, True, 16, sinks),
    }
    trials_of = {
        block_qmm: ((40, 64, 32, 4, mx.float32), block_qmm.candidates(mx.float32, 40, 32, 4)),
        block_linear: ((48, 64, 32, 4, mx.float16, 1e-6, False, True), (Candidate(block_linear.KERNEL),)),
        block_gather_qmm: ((2, 32, 4, mx.float32, weights), block_gather_qmm.candidates()),
        head_argmax: ((200, 64, mx.float16, (32, 4)), head_argmax.candidates()),
        block_attention: ((8, 2, 32, 64, mx.float16, True, 16, sinks), block_attention.candidates()),
    }
    for module, about in about_of.items():
        given, ways = trials_of[module]
        forms.clear()
        for way in ways:
            for m in range(1, 17):
                module.prepare(*(a(m) if callable(a) else a for a in about), **dict(way.options))
        may_be = set(forms)
        forms.clear()
        trial_at = module.trials(*given, ways)
        for m in block_linear._ROWS if module is block_linear else autotune.ROWS:
            for call in trial_at(m).ours:
                with contextlib.suppress(pytest.fail.Exception):
                    call(mx.zeros((1, m, 64)))
        assert len(may_be) > 1 and may_be <= forms, module.__name__


def use_all(monkeypatch, seen):
    """The first candidate for each question serves it; `seen` gets the kernels' names."""

    def first(question, rows):
        seen.append(question.candidates[0].kernel.name)
        return question.candidates[0]

    monkeypatch.setattr(autotune, "choose", first)
    monkeypatch.setattr(autotune, "_plans", {})


class Net(nn.Module):
    """A linear layer with a bias, experts, a tied head, and a layer that must be left alone."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 96, bias=True)
        self.experts = SwitchGLU(96, 64, 6)
        self.wide = nn.Linear(96, 96, bias=False)
        self.table = nn.Embedding(50, 96)

    def __call__(self, x, indices):
        h = self.up(x)
        return self.table.as_linear(self.experts(h, indices).sum(-2) + self.wide(h) + self.table(indices[..., 0]))


@pytest.fixture
def net():
    mx.random.seed(0)
    net = Net()
    nn.quantize(net, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m is not net.wide)
    mx.eval(net.parameters())
    return net


def classes(net):
    return [type(m) for _, m in net.named_modules()]


@needs_compiler
@pytest.mark.parametrize("rows", [1, 5, 16, 17])
def test_a_models_layers_run_through_the_kernels_for_one_pass(net, rows, monkeypatch):
    x = mx.random.normal((1, rows, 64))
    indices = mx.random.randint(0, 6, (1, rows, 2)).astype(mx.uint32)
    want = net(x, indices)
    before, seen = classes(net), []
    use_all(monkeypatch, seen)
    calls = kernel_calls(net)
    assert len(calls) == 5
    with emulator.emulated(), intercept(calls):
        got = net(x, indices)
        mx.eval(got)
    assert classes(net) == before
    few = ["block_qmm"] if rows <= 16 else []
    # Two of the three expert layers have one shape: it is asked about once.
    assert seen == few + ["block_gather_qmm"] * 2 + few
    assert float(mx.abs(got - want).max() / mx.abs(want).max()) < 1e-5
    assert mx.array_equal(net(x, indices), want)


@needs_compiler
def test_a_targets_block_has_the_logits_of_one_row_at_a_time(pair, monkeypatch):
    """The assembled pass: the built-in target in 4 bit, a block of 5 rows after a prompt against the same rows alone."""
    model = copy.deepcopy(pair[0])
    nn.quantize(model, 32, 4)
    ids = mx.array([[5, 9, 2, 7, 3, 11, 4, 8, 1, 6, 10, 12, 13]])
    cache = make_prompt_cache(model)
    mx.eval(model(ids[:, :8], cache=cache))
    block_cache, one_cache = copy.deepcopy(cache), copy.deepcopy(cache)
    target, seen = Target(model), []
    use_all(monkeypatch, seen)
    launched, prepare = [], block_qmm.prepare

    def noted(*about, **plan):
        launch = prepare(*about, **plan)
        return lambda *arrays: launched.append(1) or launch(*arrays)

    monkeypatch.setattr(block_qmm, "prepare", noted)
    monkeypatch.setattr(autotune, "may_run", lambda: True)

    def run(ids, cache):
        logits = target.head(target(ids, cache, kernels=True).hidden)
        mx.eval(logits)
        return logits

    with emulator.emulated():
        block = run(ids[:, 8:], block_cache)
        rows = [run(ids[:, i : i + 1], one_cache) for i in range(8, 13)]
    # The pass asks for the head too, whose logits nobody evaluates.
    assert len(launched) == 6 * (len(kernel_calls(model)) + 1) and set(seen) == {"block_attention", "block_qmm"}
    assert mx.array_equal(block, mx.concatenate(rows, axis=1))
    plain = model(ids[:, 8:], cache=cache)
    assert float(mx.abs(block - plain).max() / mx.abs(plain).max()) < 1e-4


@pytest.fixture
def ready(gpu, monkeypatch):
    """All kernels run, their launches zeros of the right shapes at once; a list of their names."""
    launched = []

    def maker(name, **_):
        return lambda *, output_shapes, output_dtypes, **_: (
            launched.append(name.removeprefix("dflash_"))
            or [mx.zeros(*out) for out in zip(output_shapes, output_dtypes, strict=True)]
        )

    monkeypatch.setattr(mx.fast, "metal_kernel", maker)
    monkeypatch.setattr(autotune, "choose", lambda question, rows: None if autotune._off else question.candidates[0])
    assert autotune.may_run()
    return launched


def layer_calls():
    """(name, the layers' handlers, a call of a layer) for each kernel that layers go through."""
    up, experts = nn.QuantizedLinear(64, 96, True, 32, 4), nn.Module()
    experts.one = SwitchGLU(64, 96, 6)
    nn.quantize(experts, 32, 4)
    attend, cache = Attend(), KVCache()
    x, q, k = mx.zeros((1, 5, 64)), mx.zeros((1, 4, 5, 32)), mx.zeros((1, 2, 40, 32))
    kv = cache.update_and_fetch(k, k)
    indices = mx.zeros((1, 5, 2), dtype=mx.uint32)
    yield "block_qmm", kernel_calls(up), lambda: up(x)
    gate = experts.one.gate_proj
    yield "block_gather_qmm", kernel_calls(gate), lambda: gate(mx.expand_dims(x, (-2, -3)), indices)
    yield "block_attention", attention_calls(attend), lambda: attend(q, *kv, cache)


class Attend(nn.Module):
    """Attention as mlx-lm's models call it."""

    def __call__(self, q, k, v, cache):
        return scaled_dot_product_attention(q, k, v, cache=cache, scale=0.2, mask="causal")


def python_calls(run):
    """The Python functions of the package that a call of `run` goes through."""
    names = []

    def note(frame, event, _):
        if event == "call" and "dflash_mlx" in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


def test_a_kernels_call_goes_through_few_python_functions(ready):
    """What a call costs the host, counted: a time would depend on the machine. A linear layer once took 15, and 6 us (x86)."""
    most = {"block_qmm": 5, "block_gather_qmm": 6, "block_attention": 7}
    for name, calls, call in layer_calls():
        with intercept(calls):
            call()
            ready.clear()
            assert len(python_calls(call)) <= most[name]
        assert ready[0] == name
    w, x = mx.zeros((50, 64)), mx.zeros((1, 5, 64))
    head_argmax.head_argmax_plan(x, w)
    assert len(python_calls(lambda: head_argmax.head_argmax_plan(x, w)(x, w))) <= 4


def test_a_layer_says_that_a_kernel_served_its_call(ready):
    """Else nobody would look at whether the pass is finite."""
    for name, calls, call in layer_calls():
        ((_, handler, _),) = calls
        with intercept(calls):
            assert handler not in handler.passes.served
            call()
        assert ready.count(name) and handler in handler.passes.served and handler not in handler.passes.left, name


def test_a_layers_plan_follows_its_arrays_and_its_input(ready, monkeypatch):
    layer, made, prepare = nn.QuantizedLinear(64, 96, False, 32, 4), [], block_qmm.prepare
    monkeypatch.setattr(block_qmm, "prepare", lambda *about, **plan: made.append(about) or prepare(*about, **plan))

    def put(dtype=mx.float32, n=96, group_size=32, bits=4):
        layer.weight, layer.scales, layer.biases = mx.quantize(mx.ones((n, 64)).astype(dtype), group_size, bits)
        layer.group_size, layer.bits = group_size, bits

    with intercept(kernel_calls(layer)):
        for rows, options in ((3, {}), (3, {}), (5, {}), (3, {"n": 40}), (3, {"bits": 8}), (3, {"group_size": 64})):
            put(**options)
            n, group_size, bits = ({"n": 96, "group_size": 32, "bits": 4} | options).values()
            assert layer(mx.ones((1, rows, 64))).shape == (1, rows, n)
            assert ((1, rows, 64), mx.float32, n, group_size, bits) in made
        assert len(made) == 5 and len(ready) == 6  # the second call made none
        put(mx.float16)
        assert layer(mx.ones((1, 3, 64), dtype=mx.float16)).dtype == mx.float16
        layer(mx.ones((1, 3, 64)))  # MLX promotes
        layer.scales += mx.zeros((1,), dtype=mx.float32)  # in place, into another type
        layer(mx.ones((1, 3, 64), dtype=mx.float16))
        layer(mx.ones((1, 17, 64)))
        assert len(made) == 6 and len(ready) == 7


def test_distrust_acts_in_the_middle_of_a_pass(ready):
    for name, calls, call in layer_calls():
        with intercept(calls):
            call()
            assert ready[0] == name
            ready.clear()
            autotune.disable_all("a test")
            call()
            assert not ready
        autotune._off.clear()
        autotune._forget()


def test_rows_that_are_not_an_experts_are_left_to_mlx(ready):
    _, calls, _ = list(layer_calls())[1]
    layer, indices = calls[0][0], mx.zeros((1, 5, 2), dtype=mx.uint32)
    with intercept(calls):
        for lead, taken in (((1, 5, 1, 1), True), ((1, 5, 2, 1), True), ((1, 5, 1, 2), False), ((5, 1, 1), False)):
            x = mx.ones((*lead, 64))
            got = layer(x, indices)
            assert bool(ready) == taken and got.shape == type(layer).__base__.__call__(layer, x, indices).shape
            ready.clear()


@pytest.mark.parametrize("old, new", [("row_products", "matmul_as_gemv"), ("folded_attention", "gqa_folded_attention")])
def test_a_form_may_be_asked_for_by_its_old_name_with_a_note(old, new, gpu, monkeypatch, caplog):
    monkeypatch.setenv("DFLASH_MLX_KERNELS", f"accept,{old}")
    autotune.parse_setting.cache_clear()
    assert autotune.setting() == autotune.setting() == {"accept", new}
    assert caplog.messages == [f"DFLASH_MLX_KERNELS: {old} is now called {new}"]


def test_an_error_names_where_the_names_were_given():
    with pytest.raises(KernelError, match="^--kernels names qmm; it must be .*block_qmm, .*[.] Correct --kernels[.]$"):
        autotune.parse_setting("qmm", "--kernels")


def test_another_machine_goes_by_what_the_first_one_found(gpu, monkeypatch):
    monkeypatch.setattr(autotune, "_is_shared", False)
    other = Kernel("block_qmm", ("x",), ("y",), "y[0] = x[0];")
    assert should_use(KERNEL, "s", trial())
    messages = []
    autotune.switch_off("head_argmax", "at fault there")
    autotune.share_results(lambda value, what: messages.append(json.dumps(value)) or value)
    assert should_use(KERNEL, "s", lambda rows: pytest.fail("tried")) and set(autotune._off) == {"head_argmax"}
    # There another kernel was at fault.
    monkeypatch.setattr(autotune, "_is_shared", False)
    autotune._known.clear()
    gpu["kernel"] = 9.0
    assert not should_use(KERNEL, "t", trial())
    autotune.switch_off("block_qmm", "at fault here")
    autotune.share_results(lambda value, what: json.loads(messages[0]))
    assert should_use(KERNEL, "s", lambda rows: pytest.fail("tried"))
    # What nobody has tried stays untried, and what was off here is on again.
    assert not should_use(other, "u", lambda rows: pytest.fail("tried")) and "block_qmm" not in autotune._off
    assert autotune.waiting() == 0
