"""Imports: each module only from its left, every public name is the function, and importing costs next to nothing."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dflash_mlx

ROOT = Path(__file__).parents[2]
PACKAGE = Path(inspect.getfile(dflash_mlx)).parent
# docs/architecture.md's order, leaves first; a module imports only from what stands before it. A package is one entry, or
# its modules are named. `version` and `__init__` are below all of it. The group may use all before it and each other.
ORDER = (
    "errors",
    "progress",
    "machine",
    "ranks",
    "requirements",
    "packagings",
    "rope_config",
    "config",
    "models.rope",
    "conversion.gguf.header",
    "roles",
    "hub",
    "checkpoint",
    "shares",
    "kernels",
    "rollback",
    "prompt_cache",
    "models.head_scale",
    "models.drafter",
    "models.dflash2",
    "models.dspark",
    "models.domino",
    "models.dflare",
    "models.dfly",
    "models.dspark_layers",
    "models.mla",
    "models.variants",
    "models.architectures",
    "conversion",
    "pairs",
    "models.intercept",
    "models.recurrent",
    "models.parts",
    "models.target",
    "traced",
    "first_use",
    "verify",
    "row_differences",
    "accept",
    "draft_length.acceptance",
    "draft_length.cost_model",
    "draft_length.policy",
    "draft_length.cost_store",
    "stats",
    "chat_template",
    "text",
    "distribution",
    "sampling_settings",
    "sampling",
    "constraint",
    "target_sampler",
    "rejection_sampler",
    "feature_rows",
    "draft_length.prompt_lookup",
    "draft_length.measure",
    "pair",
    "memory",
    "weight_layout",
    "pair_checks",
    "loading",
    "drafter_checks",
    "options",
    "exact",
    "proposers",
    "constrained",
    "round_counter",
    "loop",
    "rank_run",
    "plain",
    "responses",
    "generation",
    "batch.groups",
    "batch.group_pass",
    "batch.passes",
    "batch.drafting",
    "batch.policy",
    "batch.rounds",
    "batch.row",
    "batch.reading",
    "batch.generator",
    "prompt_files",
    "serving.prefix_cache",
    ("serving", "train", "tools"),
    "cli",
)
RANK = {name: i for i, group in enumerate(ORDER) for name in ([group] if isinstance(group, str) else group)}
TOGETHER = next(group for group in ORDER if isinstance(group, tuple))


def rank(name):
    """(entry of ORDER, its place) that a dotted name belongs to; None where no entry names it."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        if (entry := ".".join(parts[:n])) in RANK:
            return entry, RANK[entry]
    return None


def sources():
    """(dotted module, dotted package of the file, path) of every installed module."""
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts).removesuffix(".__init__"), ["dflash_mlx", *parts[:-1]], path
    import dflash_mlx.conversion

    root = Path(inspect.getfile(dflash_mlx.conversion)).parent
    for path in root.rglob("*.py"):
        parts = ("conversion", *path.relative_to(root).with_suffix("").parts)
        yield ".".join(parts).removesuffix(".__init__"), ["dflash_mlx", *parts[:-1]], path


def imported(path, package):
    """Dotted names below dflash_mlx that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            full = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            full = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in full:
            if name.startswith("dflash_mlx."):
                yield name.removeprefix("dflash_mlx."), node.lineno


def test_each_module_imports_only_from_its_left():
    wrong, unknown = [], set()
    for module, package, path in sources():
        if not path.read_text().strip() or module in ("__init__", "version", "__main__"):
            continue
        mine = rank(module)
        if mine is None:
            # A package's own docstring belongs to no entry; code in it does.
            if any(imported(path, package)):
                unknown.add(module)
            continue
        for other, line in imported(path, package):
            if other in ("version", "version.__version__", "__version__"):
                continue
            if other in dflash_mlx._PUBLIC:
                other = dflash_mlx._PUBLIC[other]
            found = rank(other) or (other, 99)
            together = mine[0] != found[0] and {mine[0], found[0]} <= set(TOGETHER)
            if found[0] != mine[0] and found[1] >= mine[1] and not together:
                wrong.append(f"{path.name}:{line} ({module}) imports {other}")
    assert not wrong and not unknown, (wrong, unknown)


def test_the_walk_sees_a_wrong_import(tmp_path):
    for text in (
        "from .generation import x",
        "from . import generation",
        "import dflash_mlx.generation",
        "def f():\n    from dflash_mlx.generation import x",
        "from dflash_mlx import generation",
    ):
        path = tmp_path / "cache.py"
        path.write_text(text)
        assert [name.split(".")[0] for name, _ in imported(path, ["dflash_mlx"])] == ["generation"], text


ORDERS = [
    ("dflash_mlx.conversion", "dflash_mlx.generation", "dflash_mlx.loading"),
    ("dflash_mlx.loading", "dflash_mlx.generation", "dflash_mlx.conversion"),
    ("dflash_mlx.cli.app", "dflash_mlx.rollback", "dflash_mlx.config"),
    (),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "+".join(n.rpartition(".")[2] for n in order) or "nothing")
@pytest.mark.quick(2)
def test_every_public_name_is_the_function_after_any_order_of_imports(order):
    code = [f"import {name}" for name in order] + [
        "import inspect, dflash_mlx",
        "for name in dflash_mlx._PUBLIC:",
        "    value = getattr(dflash_mlx, name)",
        "    assert inspect.isfunction(value) or inspect.isclass(value), (name, value)",
        "    assert value.__name__ == name, (name, value)",
        "assert set(dflash_mlx.__all__) <= set(dir(dflash_mlx))",
        "from dflash_mlx import convert, generate, load",
        "assert callable(convert) and callable(generate) and callable(load)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'dflash_mlx' has no attribute 'verifier'"):
        dflash_mlx.verifier  # noqa: B018


def test_importing_the_package_loads_no_mlx_and_takes_under_0_3_s():
    code = (
        "import sys, time; before = set(sys.modules); began = time.process_time()\n"
        "import dflash_mlx; took = time.process_time() - began\n"
        "heavy = [m for m in ('mlx', 'mlx.core', 'mlx_lm', 'transformers', 'numpy', 'rich', 'typer') if m in sys.modules]\n"
        "print(took); assert not heavy, heavy; assert dflash_mlx.__version__\n"
        # A Ctrl-C before `main` runs ends the process by the signal, not with 130: so nothing is imported until then.
        "import dflash_mlx.__main__; new = set(sys.modules) - before - {'__future__'}\n"
        "assert all(m.startswith('dflash_mlx') for m in new), new"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stdout))
    assert min(seconds) < 0.3, seconds


def test_the_converter_is_installed_inside_the_package_only():
    code = "import importlib.util as u; assert u.find_spec('dflash_mlx.conversion'); assert u.find_spec('convert') is None"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_package_is_in_the_wheel():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    files = [path for folder in ("dflash_mlx", "convert") for path in (ROOT / folder).rglob("*.py")]
    here = {path.parent.relative_to(ROOT).as_posix() for path in files}
    assert set(told) == {re.sub("^convert", "dflash_mlx/conversion", name).replace("/", ".") for name in here}
