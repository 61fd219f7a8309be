"""Whole answers with the choices of a Mac and of a CUDA GPU, both made up: what a trace is made of, and plain decoding's ids."""

import cuda_device
import mlx.core as mx
import mlx.nn as nn
import pytest
from families import model_of
from kit import greedy_ids, ids_of, rounds_of, run, tiny_drafter, tiny_target
from metal_device import MetalDevice
from traced_kit import PROMPT

from dflash_mlx import traced
from dflash_mlx.kernels import block_linear
from dflash_mlx.models.target import Target
from dflash_mlx.traced import compiled

N = 30


class Gpu:
    """A made-up GPU. ran: the names of what ran on it."""

    def __init__(self, kind, monkeypatch, tmp_path):
        self.kind = kind
        if kind == "cuda":
            self.launches = cuda_device.install(monkeypatch, tmp_path)
            return
        self.launches = MetalDevice().install(monkeypatch, tmp_path).launches
        # Its text takes 16 bits; what stands in its place takes any.
        monkeypatch.setattr(block_linear, "TILE_TYPES", (mx.float32,))

    @property
    def ran(self):
        return {what if isinstance(what, str) else what[0].split("_EIGHTS")[0] for what in self.launches}


@pytest.fixture(params=["metal", "cuda"])
def gpu(request, monkeypatch, tmp_path):
    monkeypatch.delenv(traced.VARIABLE, raising=False)
    monkeypatch.setattr(compiled, "_least_s", lambda *_: [1.0, 2.0])
    return Gpu(request.param, monkeypatch, tmp_path)


def quantized(model):
    nn.quantize(model, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0)
    return model


def drafter_of(model):
    """A random drafter in 4 bits, with full attention."""
    H = Target(model).embed(mx.array([[0]])).shape[-1]
    sizes = {"hidden_size": H, "intermediate_size": 64, "target_hidden_size": H, "vocab_size": Target(model).vocabulary}
    drafter = tiny_drafter(model, layer_types=None, sliding_window=None, **sizes)
    for layer in drafter.layers:
        nn.quantize(layer, 32, 4)
    return drafter


def hybrid():
    """Gated delta layers with keys of 32, experts, products of 4 bits."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "intermediate_size": 64}
    return quantized(model_of("qwen3_next", linear_key_head_dim=32, linear_value_head_dim=8, **sizes))


# A target, and what runs in answers of it on a Mac and on a CUDA GPU.
CUDA = {"matmul_as_gemv", "gqa_folded_attention"}
TARGETS = {
    "dense": (lambda: tiny_target(hidden=32), {"head_argmax", "head_argmax_reduce"}, CUDA),
    "4 bit": (
        lambda: quantized(tiny_target(hidden=32)),
        {"block_qmm", "block_linear", "block_heads", "head_argmax", "accept"},
        CUDA,
    ),
    "hybrid": (
        hybrid,
        {"block_qmm", "block_linear", "block_heads", "block_gather_qmm", "gated_delta", "accept"},
        CUDA | {"gated_delta"},
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_ids_and_drafts_of_traced_answers_are_those_of_no_kernel_and_no_trace(name, gpu, monkeypatch):
    make, on_metal, on_cuda = TARGETS[name]
    model = make()
    drafter = drafter_of(model)
    answers, passes = [], []
    # The second answer's passes ask for trials of what a trace is made of, so that the third's are made of it.
    for _ in range(3):
        answers.append(list(run(model, drafter, PROMPT, N, block_size=6)))
        passes.append([p.passes for p in drafter.pair.accelerator.passes])
    assert (on_metal if gpu.kind == "metal" else on_cuda) <= gpu.ran
    assert all(now > before for before, now in zip(*passes[1:], strict=True))
    monkeypatch.setenv(traced.VARIABLE, "off")
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "off")
    answers.append(list(run(model, drafter, PROMPT, N, block_size=6)))
    assert {tuple(ids_of(a)) for a in answers} == {tuple(greedy_ids(model, PROMPT, N))}
    assert all(rounds_of(a) == rounds_of(answers[-1]) for a in answers)
