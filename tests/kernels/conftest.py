"""What several tests of kernels share."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from dflash_mlx import load, load_drafter


@pytest.fixture(scope="module")
def quantized():
    """The built-in pair, its target in 4 bit: (model, tokenizer, drafter)."""
    model, tokenizer = load("tiny", dtype=mx.float32)
    nn.quantize(model, 32, 4)
    return model, tokenizer, load_drafter("tiny", model)
