"""Importing any module changes no environment variable and no global of mlx or mlx-lm."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import dflash_mlx
from dflash_mlx import conversion

ROOTS = {
    "dflash_mlx": Path(inspect.getfile(dflash_mlx)).parent,
    "dflash_mlx.conversion": Path(inspect.getfile(conversion)).parent,
}

# Run in a fresh process with mlx and mlx-lm imported first: what a module does is done once, when it is first imported, and is
# seen there, whatever was imported before. `python -c CHECK module ...` prints {module: changes}.
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

# What is held keeps its id to itself.
held, now = [], state()

def changes(module):
    global now
    held.append([vars(m).copy() for name, m in list(sys.modules.items()) if name.split(".")[0] in ("mlx", "mlx_lm")])
    before, modules = now, set(sys.modules)
    try:
        importlib.import_module(module)
    except Exception:
        return [traceback.format_exc()]
    now = state()
    after = {k: v for k, v in now.items() if k in before or k[0] in ("environ", "device") or k[0] in modules}
    return sorted(" ".join(key) for key in before.keys() | after.keys() if before.get(key) != after.get(key))

json.dump({name: changes(name) for name in sys.argv[1:]}, sys.stdout)
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


def run(*names, cwd=None):
    # The folder of the made-up modules first on the path, nothing of the tests' own environment besides.
    env = os.environ | ({"PYTHONPATH": str(cwd)} if cwd else {})
    done = subprocess.run([sys.executable, "-c", CHECK, *names], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_any_module_changes_no_environment_variable_and_no_global_of_mlx_or_mlx_lm():
    names = modules()
    assert len(names) > 50 and {"dflash_mlx.models.drafter", "dflash_mlx.conversion.gguf.source"} <= {*names}
    assert {name: found for name, found in run(*names).items() if found} == {}


# A line of a module, and what is found to have changed by it.
CHANGES = [
    ("import os; os.environ.setdefault('A_SWITCH', '0')", "environ A_SWITCH"),
    ("import mlx.core as mx; mx.fast.rope = print", ""),
    ("import mlx.nn as nn; nn.Linear.__call__ = print", "mlx.nn Linear __call__"),
    ("from mlx_lm.models import cache; cache.KVCache.trim = print", "mlx_lm.models.cache KVCache trim"),
    ("import sys; sys.modules['mlx_lm.generate'].generation_stream = None", "mlx_lm.generate generation_stream"),
    ("import os; os.environ.setdefault('A_SWITCH', '0')", None),
    ("import nothing_of_this_name", "ModuleNotFoundError"),
]


def test_each_kind_of_change_is_seen_in_the_module_that_makes_it(tmp_path):
    for i, (line, _) in enumerate(CHANGES):
        (tmp_path / f"changes_{i}.py").write_text(line)
    seen = run(*(f"changes_{i}" for i in range(len(CHANGES))), cwd=tmp_path)
    for i, (line, found) in enumerate(CHANGES):
        changed = seen[f"changes_{i}"]
        assert any(found in change for change in changed) if found is not None else changed == [], (line, changed)
