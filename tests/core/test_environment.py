"""What tests run in, and what the processes that they start are given: the device, the cache folder, Ctrl-C."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import environment
import mlx.core as mx
import pytest

from dflash_mlx.machine import cache_directory

SUPPORT = str(Path(environment.__file__).parent)


def python(code, **env):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_tests_and_the_processes_that_they_start_run_on_one_device():
    assert str(mx.default_device()) == f"Device({os.environ['DFLASH_MLX_TEST_DEVICE']}, 0)"
    code = "import mlx.core as mx; print(mx.default_device())"
    assert python(code) == str(mx.default_device())


def test_the_device_is_chosen_when_mlx_is_imported(tmp_path):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx/core.py").write_text(
        "cpu, chosen = 'the CPU', []\nDevice = lambda kind: kind\nset_default_device = chosen.append\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mlx.core as mx; print(mx.chosen)"
    assert python(code, DFLASH_MLX_TEST_DEVICE="cpu") == "['the CPU']"


def test_the_cache_folder_is_the_sessions_own_and_fetched_models_are_the_users(tmp_path, monkeypatch, cache_folder):
    assert cache_directory() == cache_folder and "dflash-mlx" not in cache_folder.parts
    assert python("from dflash_mlx.machine import cache_directory; print(cache_directory())") == str(cache_folder)
    users, own, environ = tmp_path / "users", tmp_path / "own", {}
    (users / "a-model").mkdir(parents=True), (users / "kernels").mkdir(), own.mkdir()
    (users / "a-model/config.json").write_text("{}"), (users / "cost_models.json").write_text("{}")
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(users))
    environment.own_cache(environ, own)
    assert environ == {"DFLASH_MLX_CACHE": str(own)} and [path.name for path in own.iterdir()] == ["a-model"]


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
def test_processes_of_tests_can_be_interrupted_where_the_shell_ignores_it():
    names = "(signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)"
    child = f"import signal; print(*(signal.getsignal(n) != signal.SIG_IGN for n in {names}))"
    code = (
        f"import signal, subprocess, sys; [signal.signal(n, signal.SIG_IGN) for n in {names}]\n"
        f"sys.path.insert(0, {SUPPORT!r})\n"
        f"run = lambda: print(subprocess.run([sys.executable, '-c', {child!r}], capture_output=True, text=True).stdout.strip())\n"
        "run(); import environment; environment.give_children_interrupts(); run()\n"
        f"[signal.raise_signal(n) for n in {names}]; print('goes on')"
    )
    assert python(code).split("\n") == ["False False False", "True True True", "goes on"]
    assert signal.getsignal(signal.SIGINT) != signal.SIG_IGN
