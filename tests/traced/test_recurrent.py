"""Compiled passes of targets with recurrent layers: states, rows and rollbacks of ordinary passes, and what is not traced."""

import functools

import pytest
from families import error, family, in_blocks, known_drafter, one_at_a_time, some_line
from kit import greedy_ids, ids_of, plant, rounds_of, run
from metal_device import MetalDevice
from mlx_lm.models.cache import ArraysCache
from traced_kit import PROMPT, blocks_of, filled, near, verify

from dflash_mlx import traced
from dflash_mlx.kernels import autotune
from dflash_mlx.models import recurrent
from dflash_mlx.models.target import Target
from dflash_mlx.rollback import rollback
from dflash_mlx.traced import buffers, compiled, compiled_verify

# Gated delta rules beside attention: experts, decays of a head and of each column, one convolution a layer and three.
HYBRIDS = ("qwen3_next", "qwen3_5_moe", "kimi_linear", "olmo_hybrid")


@functools.cache
def model_of(name):
    return family(name)


def same_states(found, expected):
    """Whether two caches hold the same: rows up to the offset, and every array of a state."""
    for a, b in zip(found, expected, strict=True):
        if type(a) is ArraysCache:
            assert all(near(x, y) for x, y in zip(a.cache, b.cache, strict=True))
        else:
            assert a.offset == b.offset
            assert all(near(x[:, :, : b.offset], y[:, :, : b.offset]) for x, y in ((a.keys, b.keys), (a.values, b.values)))
    return True


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_compiled_block_and_its_rollback_leave_the_states_of_ordinary_ones(name):
    model = model_of(name)
    plain, ours = Target(model, (0, 2)), blocks_of(model)
    caches, line = [filled(model, target) for target in (plain, ours)], some_line(60)
    # Widths that no multiple of four fills, each twice, and any number of their rows kept.
    for width, keep in ((5, 2), (5, 4), (3, 3), (3, 0), (6, 1), (6, 5)):
        block = line[width * keep :][:width]
        (expected, undo), (found, undo_ours) = verify(plain, caches[0], block), verify(ours, caches[1], block)
        assert found.compiled and near(found.hidden, expected.hidden) and near(found.features, expected.features)
        for cache, point in zip(caches, (undo, undo_ours), strict=True):
            rollback(cache, point, point.length + keep)
        assert same_states(*caches)
    assert ours.accelerator.passes == 6 and not ours.accelerator.refused


def test_a_block_can_be_taken_back_twice():
    model = model_of("qwen3_next")
    plain, ours = Target(model, (0, 2)), blocks_of(model)
    caches = [filled(model, target) for target in (plain, ours)]
    points = [verify(target, cache)[1] for target, cache in zip((plain, ours), caches, strict=True)]
    for keep in (4, 2, 0):
        for cache, point in zip(caches, points, strict=True):
            rollback(cache, point, point.length + keep)
        assert same_states(*caches)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("quality", ["noisy", pytest.param("hopeless", marks=pytest.mark.full)])
def test_ids_and_drafts_of_compiled_passes_are_those_of_ordinary_ones(name, quality, monkeypatch):
    model = model_of(name)
    line, said = PROMPT + greedy_ids(model, PROMPT, 40), []
    for value in ("on", "off"):
        monkeypatch.setenv(traced.VARIABLE, value)
        drafter = known_drafter(model, line, quality, block=6)
        out = list(run(model, drafter, PROMPT, 40, block_size=6))
        said.append(rounds_of(out))
        assert ids_of(out) == line[len(PROMPT) :]
        assert value == "off" or drafter.pair.accelerator.passes[0].passes > 4
    assert said[0] == said[1]


FAULTS = {
    "states of one row less": (compiled_verify.CompiledVerify, "_states", "form.states(n,", "form.states(max(n - 1, 1),"),
    "states of the pass, not of its rows": (compiled_verify.CompiledVerify, "_record", "entry.cache = list(found[n][i])", "pass"),
    "one entry's states for the next": (compiled_verify.CompiledVerify, "_record", "list(found[n][i])", "list(found[n][i - 1])"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_what_a_trace_leaves_of_states_changes_the_logits(fault, monkeypatch):
    model, line = model_of("qwen3_next"), some_line(34)
    alone = one_at_a_time(model, line, 21)

    def compiled_blocks():
        monkeypatch.setattr("families.Target", lambda model, taps=(): blocks_of(model, taps))
        return in_blocks(model, line, 21, [(5, 2), (5, 3), (3, 1)] * 3)

    assert error(compiled_blocks(), alone) < 1e-4
    plant(monkeypatch, *FAULTS[fault])
    assert error(compiled_blocks(), alone) > 1e-4


def test_a_trial_sees_states_that_a_trace_does_not_give_back(monkeypatch, caplog):
    model = model_of("qwen3_next")
    ours = blocks_of(model)
    cache = filled(model, ours)
    plant(monkeypatch, buffers, "run_traced", "entry.cache = found", "pass")
    monkeypatch.setattr(compiled, "run_traced", buffers.run_traced)
    for _ in range(3):
        rollback(cache, verify(ours, cache)[1], len(PROMPT))
    assert ours.accelerator.passes == 0 and "rows is not used: it is off by" in caplog.text


def test_widths_are_timed_for_their_neighbours_and_compared_each(monkeypatch):
    model, timed, compared = model_of("qwen3_next"), [], []
    ours, distance = blocks_of(model, always=False), buffers.distance
    monkeypatch.setattr(compiled, "_least_s", lambda passes, keeps: timed.append(keeps) or [1.0, 2.0])
    monkeypatch.setattr(compiled, "distance", lambda *args: compared.append(args[0][0].shape[1]) or distance(*args))
    cache, line = filled(model, ours), some_line(20)
    for rows in (5, 6, 7, 9, 1, 6):
        rollback(cache, verify(ours, cache, line[:rows])[1], len(PROMPT))
    assert compared == [5, 6, 7, 9, 1] and timed == [5, 9, 1] and ours.accelerator.passes == 6
    assert ours.accelerator.findings()["faster"] == {"8": True, "12": True, "1": True}


def test_traces_of_first_rows_are_few_and_forgotten_with_the_others(monkeypatch):
    monkeypatch.setattr(compiled_verify, "_STATES_KEPT", 3)
    model = model_of("qwen3_next")
    ours = blocks_of(model)
    cache = filled(model, ours)
    for keep in (1, 2, 3, 4, 2):
        rollback(cache, verify(ours, cache)[1], buffers.rows_of(cache)[0].offset - 5 + keep)
    assert [*ours.accelerator._first] == [(5, 2), (5, 3), (5, 4)]
    monkeypatch.setattr(autotune, "_plans", {})
    verify(ours, cache)
    assert not ours.accelerator._first


def test_a_recurrence_of_another_kind_is_not_traced_and_said_once(caplog):
    model = model_of("lfm2")
    ours = blocks_of(model)
    cache = filled(model, ours)
    for _ in range(2):
        rollback(cache, verify(ours, cache)[1], len(PROMPT) + 2)
    assert ours.accelerator.passes == 0 and caplog.text.count("recurrent layers that are no gated delta rule") == 1


def test_an_entry_of_many_requests_is_not_traced():
    entry = ArraysCache(2, left_padding=[0, 1])
    kv = buffers.rows_of(filled(model_of("qwen3_next"), Target(model_of("qwen3_next"))))
    found = [buffers.may_trace(entries) for entries in ([*kv, ArraysCache(2)], [*kv, entry], [ArraysCache(2)])]
    assert found == [True, False, False]


def test_on_a_made_up_mac_a_hybrid_is_traced_from_the_second_answer_on(monkeypatch, tmp_path):
    MetalDevice().install(monkeypatch, tmp_path)
    monkeypatch.delenv(traced.VARIABLE, raising=False)
    monkeypatch.setattr(compiled, "_least_s", lambda *_: [1.0, 2.0])
    model = model_of("qwen3_next")
    line = PROMPT + greedy_ids(model, PROMPT, 30)
    drafter = known_drafter(model, line, "noisy", block=6)
    passes = []
    for _ in range(3):
        assert ids_of(run(model, drafter, PROMPT, 30, block_size=6)) == line[len(PROMPT) :]
        passes.append(drafter.pair.accelerator.passes[0].passes)
    assert passes[0] == 0 < passes[1] < passes[2]
    assert recurrent.recorded([], None) == []
