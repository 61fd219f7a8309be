"""bench/kernels_generate.py on the CPU: a made-up GPU behind `mx.fast.metal_kernel`, and processes that die."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from kit import TINY, TINY_DRAFTER_SHA256

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import kernels
import kernels_generate

from dflash_mlx.kernels import autotune
from dflash_mlx.kernels.accept import accept_ops
from dflash_mlx.kernels.block_attention import block_attention_ops
from dflash_mlx.kernels.block_qmm import block_qmm_ops
from dflash_mlx.kernels.launch import Kernel


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """As if there were a GPU on which MLX's own operations stand for our texts; what is set here spoils the outputs."""
    spoilt, attended = {}, []

    def maker(name, **_):
        def launch(*, inputs, template, output_shapes, **_):
            if name == "dflash_accept":
                return accept_ops(*inputs)
            if name == "dflash_block_attention":
                q, k, v, scale, start, *_ = inputs
                attended.append(block_attention_ops(q, k, v, scale.item(), True, dict(template)["WINDOW"], None, start.item()))
                return [mx.zeros((1,))] * 3
            if name == "dflash_block_attention_reduce":
                return [attended.pop()]
            given = dict(template)
            y = block_qmm_ops(*inputs, given["GROUP"], given["BITS"]) * spoilt.get(name, 1)
            return [y.reshape(output_shapes[0])]

        return launch

    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    monkeypatch.setattr(mx.fast, "metal_kernel", maker)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    monkeypatch.setattr(autotune, "has_gpu", lambda: True)
    for name in ("_known", "_off", "_plans", "_waiting"):
        monkeypatch.setattr(autotune, name, {})
    # What a run puts in its place for good is taken back here.
    monkeypatch.setattr(autotune, "choose", autotune.choose)
    monkeypatch.setattr(Kernel, "prepared", Kernel.prepared)
    return spoilt


def run(monkeypatch, tmp_path, mode, **options):
    monkeypatch.setenv(autotune.VARIABLE, mode)
    off = tmp_path / "off.json"
    against = None if mode == "off" else off
    # float32: 16-bit types take this CPU 26 times as long with 4-bit weights.
    return kernels_generate.generate(mode, 40, "tiny", 4, 5, against, tmp_path / f"{mode}.json", dtype=mx.float32, **options)


def test_a_run_says_which_kernels_ran_and_whether_ids_are_those_without(gpu, monkeypatch, tmp_path):
    off = run(monkeypatch, tmp_path, "off")
    assert off["drafter_sha256"] == TINY_DRAFTER_SHA256
    assert off["tokens"] == 40 and not off["launches"] and off == json.loads((tmp_path / "off.json").read_text())
    for mode in ("block_qmm", "accept", "block_attention"):
        on = run(monkeypatch, tmp_path, mode)
        assert not (tmp_path / "kernels").exists()  # forced verdicts are not kept
        assert on["variants"] and all(variant.startswith(mode) for variant in on["variants"])
        names = {mode, "block_attention_reduce"} if mode == "block_attention" else {mode}
        assert set(on["launches"]) == names and min(on["launches"].values()) > 10
        assert (on["tokens"], on["ties"], on["faults"]) == (40, 0, 0) and not kernels_generate.wrong(on)


@pytest.mark.full
def test_a_kernel_that_is_wrong_is_seen(gpu, monkeypatch, tmp_path):
    run(monkeypatch, tmp_path, "off", path=str(TINY / "target"))
    gpu["dflash_block_qmm"] = 1.5
    assert kernels_generate.wrong(run(monkeypatch, tmp_path, "block_qmm"))


def test_a_kernels_process_may_use_its_share_of_the_time_and_half_as_much_again(monkeypatch):
    limits = []

    def process(command, timeout):
        limits.append(round(timeout))
        if "b" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", process)
    entries, errors = kernels.apart(["a", "b", "c"], [], seconds=300, total=120)
    assert limits == [60, 90, 120] and not entries and errors == {"b": "its process ended with stopped after 90 s"}
    kernels.apart(["a", "c"], [], seconds=300, total=float("inf"))
    assert limits[3:] == [300, 300]


class Processes:
    """Stands in for subprocess.run: which jobs die, and what each process was given."""

    def __init__(self, monkeypatch, dies=(), cuda=True):
        self.dies, self.asked, self.found, self.tokens = dies, [], [], []
        monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
        monkeypatch.setattr(subprocess, "run", self)
        monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)

    def __call__(self, command, timeout, env, **_):
        mode, out = command[2], Path(command[command.index("--out") + 1])
        rows, cudnn = int(command[command.index("--block-size") + 1]), env["MLX_CUDA_USE_CUDNN_SDPA"] == "1"
        way = "traced" if "--trace" in command else ""
        way = "without graphs" if env.get("MLX_USE_CUDA_GRAPHS") == "0" else way
        way = "core dump" if "CUDA_COREDUMP_FILE" in env else way
        job = kernels_generate.Job(mode, rows, cudnn, way)
        self.asked.append(job)
        self.tokens.append(int(command[3]))
        # What MLX compiled in runs before is there; what it compiles now lies in this run's own folder.
        compiled = Path(env["MLX_PTX_CACHE_DIR"])
        self.found.append({file.name for file in compiled.iterdir()})
        (compiled / f"{mode}-{rows}.ptx").touch()
        assert ("--against" in command) == (mode != "off")
        dead = (mode, rows, cudnn, way) in self.dies or (mode, rows, cudnn) in self.dies
        launches = {} if mode in ("off", "block_qmm") else {mode: 9}
        record = {"tokens": 9 if dead else 2000, "seconds": 1.0, "ties": 0, "faults": 0, "launches": launches, "answers": [[1]]}
        out.write_text(json.dumps(record | ({"last": ["Linear", "head_argmax [...]"]} if way == "traced" else {})))
        if dead and way == "core dump":
            Path(env["CUDA_COREDUMP_FILE"]).write_bytes(
                b"\x7fELF\0custom_kernel_dflash_head_argmax_4\0\1_Z12rms_norm_small\0_Zx\0"
            )
        return subprocess.CompletedProcess(
            command, -6 if dead else 0, stderr="warning\ncudaGetLastError() failed" if dead else ""
        )


def compare(kept=lambda runs: None, **options):
    return kernels_generate.compare(2000, options.pop("only", []), ["--pair", "tiny"], 60, kept, **options)


def test_sizes_run_side_by_side_without_kernels_and_then_with_them(monkeypatch, capsys):
    processes, kept = Processes(monkeypatch), []
    runs = compare(kept.append, only=["accept", "block_qmm"])
    settings = ["7 rows", "8 rows", "8 rows, cuDNN"]
    ours = [[f"{mode}, {s}" for mode in ("accept", "block_qmm")] for s in settings]
    assert list(runs) == ["off, 7 rows", "off, 8 rows", *ours[0], *ours[1], "off, 8 rows, cuDNN", *ours[2]]
    assert [len(names & {"off-7.ptx", "off-8.ptx"}) for names in processes.found[2:]] == [2] * 7
    # cuDNN's plans take long.
    assert processes.tokens == [2000] * 6 + [250] * 3
    assert {job.way for job in processes.asked} == {""} and "died" not in capsys.readouterr().out
    assert [name for name, r in runs.items() if kernels_generate.wrong(r)] == [f"block_qmm, {s}" for s in settings]
    assert runs["block_qmm, 7 rows"]["error"] == "no kernel ran: is there a GPU that MLX sees?"  # nothing was compared
    assert len(kept) == 4 and "answers" not in kept[-1]["off, 7 rows"]
    Processes(monkeypatch, cuda=False)
    assert list(compare(rows=[5])) == ["off, 5 rows", "on, 5 rows"]


def test_a_run_that_dies_is_run_again_in_three_ways_and_each_kernel_alone(monkeypatch, capsys):
    dies = [
        ("on", 7, False, ""),
        ("on", 8, False),
        ("head_argmax", 7, False),
        ("on", 7, False, "traced"),
        ("on", 7, False, "core dump"),
    ]
    processes = Processes(monkeypatch, dies)
    runs = compare()
    again = processes.asked[6:]
    assert {(j.mode, j.way) for j in again} == {
        ("on", "traced"), ("on", "without graphs"), ("on", "core dump"), *((name, "") for name in kernels_generate.alone_names())
    }  # fmt: skip
    assert {j.setting for j in again} == {"7 rows"}  # of the two that died, one
    assert runs["on, 7 rows"]["error"] == "exit -6: warning | cudaGetLastError() failed" and runs["on, 7 rows"]["tokens"] == 9
    said = capsys.readouterr().out
    assert "9 tokens, 0 ties, 0 faults" in said
    assert "on, 7 rows died. It ended with: exit -6" in said and "last: head_argmax [...]" in said
    assert (
        "without CUDA graphs: did not die" in said
        and "head_argmax alone: exit -6" in said
        and "accept alone: did not die" in said
    )
    assert "core dump: _Z12rms_norm_small, custom_kernel_dflash_head_argmax_4\n" in said


def test_where_stock_mlx_dies_it_alone_is_looked_at(monkeypatch, capsys):
    processes = Processes(monkeypatch, [("off", 8, True)])
    runs = compare()
    assert [job for job in processes.asked if job.mode != "off"] and "on, 8 rows, cuDNN" not in runs
    # Side by side: in any order.
    again = sorted((j.mode, j.setting, j.way) for j in processes.asked[5:])
    assert again == sorted(("off", "8 rows, cuDNN", way) for way in kernels_generate.WAYS)
    assert "off, 8 rows, cuDNN died." in capsys.readouterr().out and kernels_generate.wrong(runs["off, 8 rows, cuDNN"])


def test_a_run_that_is_stopped_is_not_looked_at_and_time_that_is_over_runs_nothing(monkeypatch):
    limits = []

    def process(command, timeout, **_):
        limits.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", process)
    runs = compare(rows=[7], total=50)
    assert list(runs) == ["off, 7 rows"] and kernels_generate.wrong(runs["off, 7 rows"]) and limits[0] <= 50
    assert compare(rows=[7], total=10)["off, 7 rows"]["error"] == "not run: the 10 s were over" and len(limits) == 1


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
