"""What several tests of kernels share."""

import emulator
import mlx.core as mx
import mlx.nn as nn
import pytest

from dflash_mlx import load, load_drafter
from dflash_mlx.kernels import autotune, trials


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


@pytest.fixture
def found_faster(monkeypatch, tmp_path):
    """A function of a kernel's name: a trial comes next, and finds it twice as fast as stock MLX by made-up times."""

    def ask(kernel):
        monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
        # On a CUDA GPU it is not tried unasked.
        monkeypatch.setenv("DFLASH_MLX_KERNELS", kernel)
        for name in ("_known", "_off", "_plans"):
            monkeypatch.setattr(autotune, name, {})
        monkeypatch.setattr(autotune, "has_gpu", lambda: True)
        monkeypatch.setattr(trials, "medians_s", lambda kernel, stock, **_: [1.0, 2.0])

    return ask
