"""Float32 weights on a Linux CPU: columns lie together, and no bit of what a model gives changes."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from kit import TINY

from dflash_mlx import load, load_drafter, weight_layout


def strides(array):
    return memoryview(array).strides


@pytest.fixture
def due(monkeypatch):
    monkeypatch.setattr(weight_layout, "is_due", lambda: True)


def test_a_loaded_pair_has_its_columns_together_and_gives_the_bits_of_mlx_lm_s(due):
    laid, _ = load("tiny", dtype=mx.float32)
    drafter = load_drafter("tiny", laid)
    products = [m for model in (laid, drafter) for _, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert len(products) > 50 and all(strides(m.weight)[0] == 4 for m in products)
    # The head is the embedding.
    assert strides(laid.model.embed_tokens.weight)[0] == 4
    plain, _ = mlx_lm.load(str(TINY / "target"))
    plain.set_dtype(mx.float32)
    assert strides(plain.model.layers[0].self_attn.q_proj.weight)[1] == 4
    for ids in (mx.array([[7]]), mx.arange(5)[None] * 31, mx.arange(120)[None] % 97):
        assert mx.array_equal(laid(ids), plain(ids)).item()


class Parts(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.embed, self.head = nn.Embedding(60, 16), nn.Linear(16, rows, bias=False)
        self.biased, self.half = nn.Linear(16, 24), nn.Linear(16, 24, bias=False)
        self.half.weight = self.half.weight.astype(mx.bfloat16)
        mx.eval(self.parameters())


def test_only_float32_products_without_a_bias_are_laid_out_and_an_embedding_where_it_is_the_head(due):
    parts = Parts(60)
    weight_layout.lay_out(parts)
    assert strides(parts.head.weight) == (4, 240) and strides(parts.embed.weight) == (64, 4)
    assert strides(parts.biased.weight) == (64, 4)
    assert mx.array_equal(parts.half.weight, mx.contiguous(parts.half.weight)).item() and parts.half.weight.shape == (24, 16)
    tied = Parts(20)
    weight_layout.lay_out(tied)
    assert strides(tied.embed.weight) == (4, 240)


def test_elsewhere_weights_stay_as_they_were_read(monkeypatch):
    monkeypatch.setattr(weight_layout, "is_due", lambda: False)
    parts = Parts(60)
    weight_layout.lay_out(parts)
    assert strides(parts.head.weight) == (64, 4)


def test_a_model_that_was_laid_out_is_saved_as_its_files_have_it(due, tmp_path):
    laid, _ = load("tiny", dtype=mx.float32)
    laid.save_weights(str(tmp_path / "model.safetensors"))
    written = mx.load(str(tmp_path / "model.safetensors"))["model.layers.0.mlp.up_proj.weight"]
    source = mx.load(str(TINY / "target" / "model.safetensors"))["model.layers.0.mlp.up_proj.weight"]
    assert mx.array_equal(written, source.astype(mx.float32)).item() and strides(written)[1] == 4


def test_a_model_that_was_laid_out_computes_in_another_thread(due):
    # What is lazy belongs to the thread that made it: a server's is another than the one that loaded.
    laid, _ = load("tiny", dtype=mx.float32)
    with ThreadPoolExecutor(1) as pool:
        logits = pool.submit(lambda: laid(mx.array([[1, 2]])).tolist()).result()
    assert logits == laid(mx.array([[1, 2]])).tolist()
