"""Fixtures that several test files share; makers and checks are in kit.py."""

# First: it has to be loaded before MLX.
import products  # noqa: F401

# isort: split
import functools
import os
from pathlib import Path

import emulator
import environment
import pytest
import rows

from dflash_mlx import load, load_drafter

# Before any test file is imported: some make arrays there.
environment.choose_device(os.environ)
environment.give_children_interrupts()
if os.environ.get(rows.VARIABLE) == "differ":
    rows.make_differ()

# What a machine may lack: the mark of the tests that need it, and what says why it is not here (None: it is).
NEEDS = {"rows_equal": rows.difference, "emulator": emulator.missing}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    for mark, missing in NEEDS.items():
        if item.get_closest_marker(mark) and (reason := missing()):
            pytest.skip(f"{mark}: {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`@pytest.mark.quick(n)`: of a test's cases n, evenly spread, are in the quick tier; the others are in the slow one.

    `@pytest.mark.long`: minutes, so it begins before all others, and no process is left alone with it at the end.
    """
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    cases = {}
    for item in items:
        if mark := item.get_closest_marker("quick"):
            cases.setdefault((item.path, item.originalname, mark.args[0]), []).append(item)
    for (_, _, n), found in cases.items():
        kept = {i * len(found) // n for i in range(n)}
        for i, item in enumerate(found):
            if i not in kept:
                item.add_marker(pytest.mark.full)


@pytest.fixture(scope="session")
def pair():
    """The built-in trained pair: (model, tokenizer, drafter), float32."""
    import mlx.core as mx

    model, tokenizer = load("tiny", dtype=mx.float32)
    return model, tokenizer, load_drafter("tiny", model)


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory):
    """The cache folder of this session: tuning results and measured costs are not the user's. Fetched models may be."""
    folder = tmp_path_factory.mktemp("cache")
    environment.own_cache(os.environ, folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def commands_made_once():
    """typer makes all commands anew at each call, a tenth of a second; of the same app they are the same."""
    import typer.main
    import typer.testing

    with pytest.MonkeyPatch.context() as patch:
        made = functools.cache(typer.main.get_command)
        patch.setattr(typer.main, "get_command", made)
        patch.setattr(typer.testing, "_get_command", made)
        yield


@pytest.fixture
def costs_file(cache_folder):
    """Where measured costs of passes are kept."""
    return cache_folder / "cost_models.json"


@pytest.fixture(scope="session")
def conformance():
    """All reference outputs, where the checkout has them beside it; tests/data holds a small part for everyone."""
    path = Path(__file__).resolve().parents[2] / "shared" / "conformance"
    if not path.is_dir():
        pytest.skip("the full reference outputs are not beside this checkout")
    return path


@pytest.fixture
def metal(monkeypatch):
    """A made-up Mac: MLX says that it computes on a Metal GPU, of `metal["..."]` bytes and so on; our kernels are off."""
    import mlx.core as mx

    info = {"device_name": "Apple M4", "architecture": "applegpu_g16g", "memory_size": 24 << 30}
    info["max_recommended_working_set_size"] = 16 << 30
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "device_info", lambda *_: dict(info))
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: limit)
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "off")
    return info


@pytest.fixture
def waits(monkeypatch):
    """Counts what makes the host wait for the device, under "wait"."""
    import mlx.core as mx

    count = {"wait": 0}

    def counting(function):
        def call(*args, **kwargs):
            count["wait"] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(mx, "eval", counting(mx.eval))
    monkeypatch.setattr(mx, "synchronize", counting(mx.synchronize))
    for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(mx.array, name, counting(getattr(mx.array, name)))
    return count
