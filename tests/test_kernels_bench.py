"""bench/kernels_generate.py on the CPU: a made-up GPU behind `mx.fast.metal_kernel`, and processes that die."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
import kernels_generate

from dflash_mlx.kernels import choice
from dflash_mlx.kernels.accept import accept_ops
from dflash_mlx.kernels.block_qmm import block_qmm_ops
from dflash_mlx.kernels.kernel import Kernel


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """As if there were a GPU on which MLX's own operations stand for our texts; what is set here spoils the outputs."""
    spoilt = {}

    def maker(name, **_):
        def launch(*, inputs, template, **_):
            if name == "dflash_accept":
                return accept_ops(*inputs)
            given = dict(template)
            return [block_qmm_ops(*inputs, given["GROUP"], given["BITS"]) * spoilt.get(name, 1)]

        return launch

    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    monkeypatch.setattr(mx.fast, "metal_kernel", maker)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    for name in ("_known", "_off", "_memo"):
        monkeypatch.setattr(choice, name, {})
    # What a run puts in its place for good is taken back here.
    monkeypatch.setattr(choice, "_judge", choice._judge)
    monkeypatch.setattr(Kernel, "__call__", Kernel.__call__)
    return spoilt


def run(monkeypatch, tmp_path, mode, **options):
    monkeypatch.setenv(choice.VARIABLE, mode)
    off = tmp_path / "off.json"
    against = None if mode == "off" else off
    # float32: 16-bit types take this CPU 26 times as long with 4-bit weights.
    return kernels_generate.generate(mode, 40, "tiny", 4, 5, against, tmp_path / f"{mode}.json", dtype=mx.float32, **options)


def test_a_run_says_which_kernels_ran_and_whether_ids_are_those_without(gpu, monkeypatch, tmp_path):
    off = run(monkeypatch, tmp_path, "off")
    assert off["tokens"] == 40 and not off["launches"] and off == json.loads((tmp_path / "off.json").read_text())
    for mode in ("block_qmm", "accept"):
        on = run(monkeypatch, tmp_path, mode)
        assert set(on["launches"]) == {mode} and min(on["launches"].values()) > 10
        assert (on["tokens"], on["ties"], on["faults"]) == (40, 0, 0) and not kernels_generate.wrong(on)


def test_a_kernel_that_is_wrong_is_seen(gpu, monkeypatch, tmp_path):
    run(monkeypatch, tmp_path, "off")
    gpu["dflash_block_qmm"] = 1.5
    assert kernels_generate.wrong(run(monkeypatch, tmp_path, "block_qmm"))


def test_a_run_that_dies_is_traced_and_each_kernel_runs_alone(monkeypatch, capsys):
    asked, kept, launches = [], [], {mode: {mode: 9} for mode in ("on", "block_qmm_tiles", "head_argmax", "accept")}

    def process(command, env, **_):
        mode, out = command[2], Path(command[command.index("--out") + 1])
        asked.append((mode, "--trace" in command))
        dead = mode in ("on", "head_argmax")
        record = {
            "tokens": 9 if dead else 2000,
            "seconds": 1.0,
            "ties": 0,
            "faults": 0,
            "launches": launches.get(mode, {}),
            "answers": [[1]],
        }
        out.write_text(json.dumps(record | ({"last": ["head_argmax"]} if "--trace" in command else {})))
        return subprocess.CompletedProcess(
            command, -6 if dead else 0, stderr="warning\ncudaGetLastError() failed" if dead else ""
        )

    monkeypatch.setattr(subprocess, "run", process)
    runs = kernels_generate.compare(2000, [], ["--pair", "tiny"], 9, kept.append)
    assert asked == [
        ("off", False), ("on", False), ("on", True), ("block_qmm_tiles", False), ("block_qmm", False), ("head_argmax", False),
        ("head_argmax", True), ("accept", False),
    ]  # fmt: skip
    assert [mode for mode, r in runs.items() if kernels_generate.wrong(r)] == ["on", "block_qmm", "head_argmax"]
    assert runs["block_qmm"]["error"] == "no kernel ran: is there a GPU that MLX sees?"  # nothing was compared
    assert runs["on"]["error"] == "exit -6: warning | cudaGetLastError() failed" and runs["on"]["tokens"] == 9
    assert runs["on"]["traced"]["last"] == ["head_argmax"] and len(kept) == 6 and "answers" not in kept[-1]["off"]
    assert "9 tokens, 0 ties, 0 faults" in capsys.readouterr().out


def test_where_stock_mlx_dies_nothing_else_is_run(monkeypatch):
    def process(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", process)
    runs = kernels_generate.compare(2000, ["accept"], [], 9, lambda runs: None)
    assert list(runs) == ["off"] and runs["off"]["error"] == "stopped after 9 s" and kernels_generate.wrong(runs["off"])


def test_a_trace_names_the_operation_that_fails(gpu, monkeypatch, tmp_path):
    run(monkeypatch, tmp_path, "off")
    import mlx.nn as nn
    from mlx_lm.models.cache import KVCache

    for owner in (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding, nn.RMSNorm, nn.RoPE):
        monkeypatch.setattr(owner, "__call__", owner.__call__)
    monkeypatch.setattr(nn.QuantizedEmbedding, "as_linear", nn.QuantizedEmbedding.as_linear)
    monkeypatch.setattr(KVCache, "update_and_fetch", KVCache.update_and_fetch)
    for owner, name in ((mx.fast, "scaled_dot_product_attention"), *((mx, n) for n in ("concatenate", "argmax", "logsumexp"))):
        monkeypatch.setattr(owner, name, getattr(owner, name))

    def broken(name, **_):
        def launch(**_):
            raise RuntimeError("misaligned address")

        return launch

    monkeypatch.setattr(mx.fast, "metal_kernel", broken)
    with pytest.raises(RuntimeError, match="misaligned"):
        run(monkeypatch, tmp_path, "accept", trace=True)
    assert json.loads((tmp_path / "accept.json").read_text())["last"][-1].startswith("accept ['mlx.core.int32 (1, 4)'")
