"""What several tests of kernels share."""

import emulator
import mlx.core as mx
import mlx.nn as nn
import pytest

from dflash_mlx import load, load_drafter
from dflash_mlx.kernels import autotune


@pytest.fixture(scope="module")
def quantized():
    """The built-in pair, its target in 4 bit: (model, tokenizer, drafter)."""
    model, tokenizer = load("tiny", dtype=mx.float32)
    nn.quantize(model, 32, 4)
    return model, tokenizer, load_drafter("tiny", model)


@pytest.fixture
def untried(monkeypatch):
    """The emulator is the GPU, and the last text that may serve does, untried; names of what was launched."""
    launched = set()

    def made(name, *given, **options):
        launch = emulator.metal_kernel(name, *given, **options)
        return lambda **how: launched.add(name.removeprefix("dflash_")) or launch(**how)

    monkeypatch.setattr(mx.fast, "metal_kernel", made)
    monkeypatch.setattr(autotune, "has_gpu", lambda: True)
    monkeypatch.setattr(autotune, "_choose_surely", lambda question, rows: question.candidates[-1])
    monkeypatch.setattr(autotune, "_plans", {})
    return launched
