"""Fixtures that several test files share; makers and checks are in kit.py."""

from pathlib import Path

import pytest

from dflash_mlx import load, load_drafter


@pytest.fixture(scope="session")
def pair():
    """The built-in trained pair: (model, tokenizer, drafter), float32."""
    import mlx.core as mx

    model, tokenizer = load("tiny", dtype=mx.float32)
    return model, tokenizer, load_drafter("tiny", model)


@pytest.fixture(scope="session", autouse=True)
def costs_file(tmp_path_factory):
    """Measured costs of passes go to a file of this session, not to the user's cache."""
    from dflash_mlx.draft_length import cost_store

    before, file = cost_store._records.name, tmp_path_factory.mktemp("costs") / "cost_models.json"
    cost_store._records.name = str(file)
    yield file
    cost_store._records.name = before


@pytest.fixture(scope="session")
def conformance():
    """All reference outputs, where the checkout has them beside it; tests/data holds a small part for everyone."""
    path = Path(__file__).resolve().parents[2] / "shared" / "conformance"
    if not path.is_dir():
        pytest.skip("the full reference outputs are not beside this checkout")
    return path


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
