"""Importing any module changes no environment variable and no global of mlx or mlx-lm."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_mlx
from dflash_mlx import conversion

ROOTS = {
    "dflash_mlx": Path(inspect.getfile(dflash_mlx)).parent,
    "dflash_mlx.conversion": Path(inspect.getfile(conversion)).parent,
}

# Run in a fresh process with mlx and mlx-lm imported first, then a fork a module: no module sees what another one did, and
# mlx and mlx-lm are imported once. `python -c CHECK [module ...]` prints {module: changes}.
CHECK = """
import importlib, json, os, sys, traceback, types
import mlx.core, mlx.nn, mlx.optimizers, mlx.utils
import mlx_lm, mlx_lm.generate, mlx_lm.server, mlx_lm.sample_utils, mlx_lm.models.cache, mlx_lm.models.base, mlx_lm.utils
import mlx_lm.models.qwen3, mlx_lm.models.rope_utils, mlx_lm.models.activations, mlx_lm.tokenizer_utils

def state():
    found = {("environ", k): v for k, v in os.environ.items()} | {("device", ""): str(mlx.core.default_device())}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("mlx", "mlx_lm"):
            for key, value in list(vars(module).items()):
                # A submodule becomes an attribute of its package when somebody imports it.
                if not key.startswith("__") and not isinstance(value, types.ModuleType):
                    found[name, key] = id(value)
                    if isinstance(value, type) and value.__module__.split(".")[0] in ("mlx", "mlx_lm"):
                        found |= {(name, key, k): id(v) for k, v in vars(value).items() if not k.startswith("__abc")}
    return found

def changes(module):
    # What is held keeps its id to itself.
    held, before = [vars(m).copy() for m in list(sys.modules.values())], state()
    modules = set(sys.modules)
    importlib.import_module(module)
    after = {k: v for k, v in state().items() if k in before or k[0] in ("environ", "device") or k[0] in modules}
    return sorted(" ".join(key) for key in before.keys() | after.keys() if before.get(key) != after.get(key))

def forked(module):
    read, write = os.pipe()
    if not os.fork():
        try:
            answer = changes(module)
        except BaseException:
            answer = [traceback.format_exc()]
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        answer = json.loads(file.read())
    os.wait()
    return answer

names = sys.argv[1:]
json.dump({name: (forked if len(names) > 1 else changes)(name) for name in names}, sys.stdout)
"""


def modules():
    """Dotted names of all modules of the package, `__main__` excepted, which runs the command line."""
    found = []
    for root, folder in ROOTS.items():
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            if parts[-1] != "__main__":
                found.append(".".join([root, *(part for part in parts if part != "__init__")]))
    return found


def run(*names, code=CHECK, cwd=None):
    # The folder of the made-up module first on the path, nothing of the tests' own environment besides.
    env = os.environ | ({"PYTHONPATH": str(cwd)} if cwd else {})
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_any_module_changes_no_environment_variable_and_no_global_of_mlx_or_mlx_lm():
    names = modules()
    assert len(names) > 50 and {"dflash_mlx.models.drafter", "dflash_mlx.conversion.gguf.source"} <= {*names}
    # A fork of a process in which macOS frameworks are loaded may not use them: there, a process each.
    parts = [[name] for name in names] if sys.platform == "darwin" else [names]
    assert {name: found for part in parts for name, found in run(*part).items() if found} == {}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import os; os.environ.setdefault('A_SWITCH', '0')", "environ A_SWITCH"),
        ("import mlx.core as mx; mx.fast.rope = print", None),
        ("import mlx.nn as nn; nn.Linear.__call__ = print", "mlx.nn Linear __call__"),
        ("from mlx_lm.models import cache; cache.KVCache.trim = print", "mlx_lm.models.cache KVCache trim"),
        ("import sys; sys.modules['mlx_lm.generate'].generation_stream = None", "mlx_lm.generate generation_stream"),
    ],
)
def test_each_kind_of_change_is_seen(tmp_path, line, found):
    (tmp_path / "changes_something.py").write_text(line)
    seen = run("changes_something", cwd=tmp_path)["changes_something"]
    assert seen and (found is None or any(found in change for change in seen))
