"""The corridor: the ten files in which one token goes from `stream_generate` to being committed, and that they need no others."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import dflash_mlx
from dflash_mlx import loop

PACKAGE = Path(dflash_mlx.__file__).parent
# In the order in which a reader walks them.
CORRIDOR = [
    *("generation", "options", "loop", "proposers", "models.drafter", "models.target", "verify", "target_sampler", "accept"),
    "rollback",
]
MOST_LINES = 2300
VERBS = ["propose", "verify", "accept", "commit", "emit"]


def path_of(name):
    return PACKAGE / (name.replace(".", "/") + ".py")


def imports(name):
    """The modules of the package that a module imports, in functions too."""
    here, found = name.split("."), set()
    for node in ast.walk(ast.parse(path_of(name).read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*here[: len(here) - node.level], *(node.module.split(".") if node.module else [])]
            found |= {".".join(base), *(".".join([*base, alias.name]) for alias in node.names)}
    return found


def test_the_corridor_is_ten_files_and_short():
    lines = {name: len(path_of(name).read_text().splitlines()) for name in CORRIDOR}
    assert len(lines) == 10 and sum(lines.values()) <= MOST_LINES, lines


def test_architecture_lists_the_corridor_in_order():
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    at = [text.find(name.replace(".", "/") + ".py") for name in CORRIDOR]
    assert -1 not in at and at == sorted(at), dict(zip(CORRIDOR, at, strict=True))


def test_imports_inside_the_corridor_run_one_way():
    reach = {name: imports(name) & set(CORRIDOR) for name in CORRIDOR}
    assert reach["generation"] and not any("generation" in found for found in reach.values())
    for _ in CORRIDOR:
        reach = {name: found.union(*(reach[other] for other in found)) for name, found in reach.items()}
    assert not [name for name, found in reach.items() if name in found]


def kernel_names():
    """The kernels' names: the registry's, or the modules' in whose folder they are."""
    from dflash_mlx import kernels

    registry = getattr(kernels, "REGISTRY", None)
    if registry:
        return sorted(getattr(entry, "name", entry) for entry in (registry.values() if isinstance(registry, dict) else registry))
    return ["block_attention", "block_gather_qmm", "block_linear", "block_qmm", "head_argmax", "small_batch"]


@pytest.mark.parametrize("name", CORRIDOR)
def test_the_corridor_knows_no_kernel_no_cuda_and_no_traced_pass(name):
    text = path_of(name).read_text()
    # `accept` is a rule and a kernel's name.
    words = {"cuda", "cudnn", "traced", "trace", "mx.compile", *(word for word in kernel_names() if word != "accept")}
    found = {word for word in words if re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)}
    assert not found


def test_the_loop_fits_on_one_screen_and_says_what_it_does():
    source = inspect.getsource(loop.generate_steps)
    assert len(source.splitlines()) <= 45
    calls = re.findall(r"run\.(\w+)\(", source)
    assert [call for call in calls if call in VERBS] == VERBS and "finally:\n        run.settle()" in source
    assert all(callable(getattr(loop.Run, verb)) for verb in VERBS)
