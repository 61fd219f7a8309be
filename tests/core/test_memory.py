"""What a run needs of memory is told right for every kind of cache, before any weight is read, with what would fit."""

import warnings

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import FAMILIES, OTHERS, family
from kit import TINY, tiny_drafter, tiny_qwen3, tiny_target
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from typer.testing import CliRunner

from dflash_mlx import load, load_drafter, machine, memory
from dflash_mlx.checkpoint import inspect_checkpoint
from dflash_mlx.cli.app import app
from dflash_mlx.errors import CheckpointError
from dflash_mlx.kernels import autotune
from dflash_mlx.kernels.block_qmm import TRIAL_BYTES, TRIAL_COLUMNS
from dflash_mlx.loading import check_run, weight_bytes
from dflash_mlx.machine import limit_bytes, limit_text
from dflash_mlx.memory import Needs, RunSize, cache_bytes, entries_after_rows, model_bytes, trial_bytes
from dflash_mlx.prompt_cache import KVQuantization
from dflash_mlx.rollback import leaves

ROWS = 512


def held(cache):
    """Bytes of a cache's entries; a recurrent state twice, as a round has it."""
    entries = [e for e in leaves(cache) if getattr(e, "keys", e) is not None]
    return sum((1 + isinstance(e, ArraysCache)) * e.nbytes for e in entries)


# Each kind of cache, alone and beside others.
QUICK = ("llama, mixed windows", "qwen3_next", "mamba2", "recurrent_gemma", "deepseek_v32", "llama4")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in [*FAMILIES, *OTHERS]]
)
def test_caches_are_told_of_without_a_weight_being_read(name, monkeypatch):
    model = family(name)
    with monkeypatch.context() as unread:
        unread.setattr(mx, "eval", lambda *_: pytest.fail("evaluated"))
        entries = entries_after_rows(model)
        told = cache_bytes(entries, RunSize(ROWS))
    cache = make_prompt_cache(model)
    model(mx.zeros((1, ROWS), dtype=mx.int32), cache=cache)
    mx.eval([entry.state for entry in cache])
    assert told == held(cache)


@pytest.mark.parametrize("name", ["llama, mixed windows", "recurrent_gemma"])
def test_a_window_bounds_what_is_told_of_and_full_layers_grow(name):
    entries = entries_after_rows(family(name))
    near, far, farther = (cache_bytes(entries, RunSize(n)) for n in (4096, 8192, 12288))
    full = sum(e.nbytes / e.keys.shape[-2] for e in entries if hasattr(e, "keys") and not hasattr(e, "max_size"))
    assert far - near == farther - far == 4096 * full


def test_a_window_that_is_asked_for_and_the_drafters_caches_count():
    model = tiny_target()
    drafter = tiny_drafter(model)
    alone, both = (entries_after_rows(model, *more) for more in ((), (drafter,)))
    # Of its two layers one has a window.
    a_row = 2 * 2 * 8 * 4
    assert cache_bytes(both, RunSize(256)) - cache_bytes(alone, RunSize(256)) == 2 * 256 * a_row
    assert cache_bytes(both, RunSize(8192)) - cache_bytes(alone, RunSize(8192)) == (8192 + 10 + 2048) * a_row
    # A target that makes no caches of its own.
    plain = tiny_qwen3(layers=3)
    full, windowed = (cache_bytes(entries_after_rows(plain, None, size), RunSize(8192)) for size in (None, 512))
    assert windowed * 8192 == full * (512 + 2048)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_cache_is_told_of_as_mlx_lm_keeps_it(bits):
    model = tiny_target(hidden=64, head_dim=64)
    entries = entries_after_rows(model)
    cache = make_prompt_cache(model)
    model(mx.zeros((1, ROWS), dtype=mx.int32), cache=cache)
    KVQuantization(bits, 64, 0).convert(cache, 0)
    mx.eval([entry.state for entry in cache])
    assert cache_bytes(entries, RunSize(ROWS, kv_bits=bits, quantized_kv_start=0)) == held(cache)
    # Until it begins they are floats.
    assert cache_bytes(entries, RunSize(ROWS, kv_bits=bits)) == cache_bytes(entries, RunSize(ROWS))


def test_trials_count_where_kernels_may_run(monkeypatch):
    model = tiny_target(hidden=64)
    assert trial_bytes(model) == 0
    monkeypatch.setattr(autotune, "may_run", lambda: True)
    assert trial_bytes(model) == 0
    model.lm_head = nn.QuantizedLinear(64, 2 * TRIAL_COLUMNS, bias=False)
    # A row in floats and quantized, and copies.
    assert trial_bytes(model) == TRIAL_COLUMNS * (64 * 4 + 64 // 2 + 2 * 4) + TRIAL_BYTES


def test_what_a_gpu_may_hold_is_metals_working_set(metal, monkeypatch):
    assert limit_bytes() == 16 << 30 and limit_text() == "the GPU may hold 17.2 GB of this machine's 25.8 GB"
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert limit_bytes() == 24 << 30 and limit_text() == "this machine has 25.8 GB"


GB = 10**9
# As Qwen3.6-27B in 4 bits with its drafter in bfloat16 on a Mac of 24 GB.
BIG = Needs(
    target=int(15.2 * GB),
    drafter=int(3.5 * GB),
    drafter_in_4_bits=GB,
    trials=GB // 5,
    caches=lambda run, drafter: (80_000 if drafter else 64_000) * min(run.tokens, run.max_kv_size or run.tokens),
    may_window=True,
)


def test_a_pair_that_does_not_fit_is_refused_with_what_would(metal):
    with pytest.raises(CheckpointError) as caught:
        memory.check_run(BIG, RunSize(4096))
    text = str(caught.value)
    assert "target 15.20 GB, drafter 3.50 GB, caches at 4096 tokens 0.33 GB, trials of kernels 0.20 GB: 19.23 GB in all" in text
    assert "the GPU may hold 17.2 GB of this machine's 25.8 GB" in text
    assert "What would fit: --draft-bits 4 (16.73 GB); or --draft-model none (15.66 GB). Or let the GPU hold more" in text
    assert "sudo sysctl iogpu.wired_limit_mb=19254" in text


@pytest.mark.parametrize(
    "has_gib, may_gib, needs_gb, told", [(8, 5.3, 6.5, False), (16, 10.7, 12.5, True), (16, 10.7, 14, False)]
)
def test_a_gpu_is_to_hold_more_only_where_enough_is_left_for_macos(metal, monkeypatch, has_gib, may_gib, needs_gb, told):
    info = {"memory_size": has_gib << 30, "max_recommended_working_set_size": int(may_gib * 2**30)}
    monkeypatch.setattr(mx, "device_info", lambda *_: info)
    with pytest.raises(CheckpointError, match="the model does not fit: the weights of org/m take") as caught:
        memory.check_weights("org/m", int(needs_gb * GB))
    assert ("iogpu.wired_limit_mb" in str(caught.value)) is told


def test_a_context_that_does_not_fit_is_warned_of_with_the_one_that_does(metal):
    small = Needs(BIG.target, GB, None, BIG.trials, BIG.caches, True)
    with pytest.warns(UserWarning) as caught:
        memory.check_run(small, RunSize(20_000))
    text = str(caught[0].message)
    assert text.startswith("the run may not fit to its end: target 15.20 GB, drafter 1.00 GB, caches at 20000 tokens 1.60 GB")
    # (17.18 - 16.4) GB / 80,000 = 9,748.
    assert "What would fit: a context of 9728 tokens (a shorter prompt, a smaller --max-tokens); or --max-kv-size 9728" in text
    both = Needs(int(15.9 * GB), GB, int(0.9 * GB), 0, BIG.caches, False)
    with pytest.warns(UserWarning, match=r"fit: --draft-bits 4 and a context of 4608 tokens"):
        memory.check_run(both, RunSize(20_000))


def test_what_hardly_fits_is_slow_and_what_fits_is_not_spoken_of(metal):
    with pytest.warns(UserWarning, match="caches at 256 tokens .* in all, and the GPU may hold .*: this can be slow"):
        memory.check_run(Needs(int(15.9 * GB), 0, None, 0, BIG.caches, True), RunSize(256))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        memory.check_run(Needs(int(13 * GB), GB, None, 0, BIG.caches, True), RunSize(256))


def test_nothing_that_fits_is_said_too(metal):
    with pytest.raises(CheckpointError, match="Use a smaller target, or one in fewer bits$|fewer bits\\.$"):
        memory.check_run(Needs(30 * GB, 0, None, 0, BIG.caches, True), RunSize(4096))


@pytest.fixture
def little(metal, monkeypatch):
    """A made-up Mac whose GPU may hold so many bytes."""

    def hold(limit):
        metal["max_recommended_working_set_size"] = limit

    return hold


def test_a_pair_is_compared_before_its_weights_are_read(little, monkeypatch):
    model, _ = load("tiny", lazy=True)
    target = model_bytes(model)
    assert target == weight_bytes(inspect_checkpoint(TINY / "target"), None)
    monkeypatch.setattr(mx, "eval", lambda *_: pytest.fail("evaluated"))
    little(target + 1_500_000)
    with pytest.warns(UserWarning, match="this can be slow"):
        check_run(model, "tiny", RunSize(64))
    with pytest.raises(CheckpointError, match=r"target 5\.3 MB, drafter 2\.6 MB, .* fit: --draft-bits 4 \("):
        check_run(model, "tiny", RunSize(64), bits="none")
    with pytest.warns(UserWarning, match=r"fit: a context of \d+ tokens"):
        check_run(model, "tiny", RunSize(100_000))


def test_the_command_line_checks_before_it_reads(little, monkeypatch):
    little(6_500_000)
    monkeypatch.setattr(mx, "eval", lambda *_: pytest.fail("evaluated"))
    words = ["generate", "--model", "tiny", "--draft-model", "tiny", "--draft-bits", "none", "-p", "x", "-m", "8"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, CheckpointError) and "What would fit: --draft-bits 4" in str(result.exception)


def test_load_and_load_drafter_compare_with_the_working_set(little, monkeypatch):
    little(5_000_000)
    with pytest.raises(CheckpointError, match="the weights of .* take 0.0 GB and the GPU may hold 0.0 GB of this machine's 25.8"):
        load("tiny")
    little(6_500_000)
    with pytest.warns(UserWarning, match="this can be slow"):
        model, _ = load("tiny", dtype="bfloat16")
        drafter = load_drafter("tiny", model)
    assert model_bytes(model) + model_bytes(drafter) < 6_500_000
    with pytest.raises(CheckpointError, match=r"Hold it in 4 bits \(--draft-bits 4, bits=4\): 0\.0 GB"):
        load_drafter("tiny", model, bits="none")


def test_weights_that_are_written_out_as_they_are_read_count_so(tmp_path, monkeypatch):
    """Headers of packed files say less than the model takes."""
    model, _ = load("tiny", lazy=True, dtype="float32")
    monkeypatch.setattr(machine, "machine_bytes", lambda: model_bytes(model) - 1)
    told = []
    monkeypatch.setattr("dflash_mlx.loading.weight_bytes", lambda *_: told.append(1) or 1)
    with pytest.raises(CheckpointError, match="does not fit"):
        load("tiny", dtype="float32")
    assert told
