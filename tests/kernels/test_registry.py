"""One registry of kernels: tests, bench, docs and the names that users give are made from it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import metal_text
import on_gpu
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import kernels as bench
import kernels_generate

from dflash_mlx.kernels import REGISTRY, Registered, autotune, names, table
from dflash_mlx.kernels.launch import Form, Kernel
from dflash_mlx.tools import kernel_shapes

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
TEXTS = names(text=True)


def module_of(name):
    spec = importlib.util.spec_from_file_location(f"registry_checks_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def missing(name):
    """What the tests lack for a registered kernel, by name of the file that is to have it."""
    entry = REGISTRY[name]
    if not entry.text:
        return [] if name in (HERE / "test_small_batch.py").read_text() else ["test_small_batch.py"]
    has = {
        f"test_{entry.module}.py": (HERE / f"test_{entry.module}.py").exists(),
        "test_mutations.py": any(entry.module == module.__name__.split(".")[-1] for module, *_ in MUTATED),
        "test_cuda_text.py": hasattr(CUDA, f"test_{name}"),
        "metal_text.py": name in metal_text.EXAMPLES,
        "on_gpu.py": name in on_gpu.CHECKS,
        "kernel_shapes.py": name in kernel_shapes.SHAPES,
    }
    return [file for file, there in has.items() if not there]


MUTATED, CUDA = module_of("test_mutations").TEXTS, module_of("test_cuda_text")


@pytest.mark.parametrize("name", REGISTRY)
def test_a_registered_kernel_loads_and_has_its_tests_and_its_bench(name):
    entry = REGISTRY[name]
    first, *_ = loaded = entry.load()
    assert first.name == entry.name == name and entry.serves and set(entry.on) <= {"metal", "cuda"}
    assert all(isinstance(kernel, Kernel if entry.text else Form) for kernel in loaded)
    assert " ".join(missing(name)) == ""


def test_every_kernel_object_is_registered():
    registered = {kernel.name for entry in REGISTRY.values() for kernel in entry.load()}
    found = set()
    for file in (ROOT / "dflash_mlx/kernels").glob("[a-z]*.py"):
        module = importlib.import_module(f"dflash_mlx.kernels.{file.stem}")
        found |= {value.name for value in vars(module).values() if isinstance(value, Kernel | Form)}
    assert found == registered


def test_docs_list_is_the_registrys_and_nine_kernels_can_run_on_a_mac():
    assert table() in (ROOT / "docs/kernels.md").read_text()
    assert len(names(on="metal", text=True)) == 9 and "matmul_as_gemv" not in names(on="metal")
    assert names() == tuple(REGISTRY) and set(names(on="cuda")) == set(REGISTRY)


def test_a_kernel_that_is_added_appears_in_names_tests_bench_and_docs(monkeypatch):
    monkeypatch.setitem(REGISTRY, "made_up", Registered("made_up", "accept", "nothing"))
    autotune.parse_setting.cache_clear()
    assert autotune.parse_setting("made_up") == {"made_up"} and "made_up" in names(on="metal", text=True)
    assert missing("made_up") == ["test_cuda_text.py", "metal_text.py", "on_gpu.py", "kernel_shapes.py"]
    with pytest.raises(KeyError, match="made_up"):
        metal_text.collect()
    assert bench.parser().parse_args(["--only", "made_up"]).only == ["made_up"]
    assert "made_up" in kernels_generate.alone_names()
    assert "| `made_up` | nothing | metal, cuda | own text |\n" in table()
    assert table() not in (ROOT / "docs/kernels.md").read_text()
    monkeypatch.delitem(REGISTRY, "made_up")
    autotune.parse_setting.cache_clear()
    with pytest.raises(autotune.KernelError, match="made_up"):
        autotune.parse_setting("made_up")


def test_the_registry_imports_no_kernel():
    heavy = "[name for name in sys.modules if name.startswith(('mlx', f'{k.__name__}.'))]"
    code = f"import sys, dflash_mlx.kernels as k; k.table(); print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
