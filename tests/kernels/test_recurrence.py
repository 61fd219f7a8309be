"""gated_delta in a target's passes: whose recurrence it serves, what is kept of a call, and a rollback by one launch a layer."""

import emulator
import mlx.core as mx
import pytest
from families import error, in_blocks, model_of, one_at_a_time, some_line
from kit import plant
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import gated_delta as mlx_lm_recurrence

from dflash_mlx.kernels import autotune, gated_delta, routing
from dflash_mlx.models import recurrent
from dflash_mlx.models.target import Target
from dflash_mlx.rollback import rollback, rollback_point
from dflash_mlx.verify import verify_block

# Rounds with rows to take back, one row and many.
PLAN = [(5, 2), (1, 1), (16, 11), (3, 3), (4, 1)]


def wide():
    """With keys of 32, which the kernel takes."""
    return model_of("qwen3_next", linear_key_head_dim=32, linear_value_head_dim=8)


@pytest.fixture
def launched(monkeypatch):
    """Our kernel serves wherever it can, no other does; a list of (rows of the call, rows that are run) of each launch."""
    found, prepare = [], gated_delta.prepare

    def noted(k_shape, *about):
        launch = prepare(k_shape, *about)
        return lambda *given: found.append((k_shape[1], given[-1] if len(given) == 7 else None)) or launch(*given)

    monkeypatch.setattr(autotune, "may_run", lambda: True)
    monkeypatch.setattr(
        autotune, "choose", lambda question, rows: (c := question.candidates[0]).kernel.name == "gated_delta" and c or None
    )
    monkeypatch.setattr(autotune, "_plans", {})
    monkeypatch.setattr(gated_delta, "prepare", noted)
    return found


@pytest.mark.emulator
def test_blocks_and_rollbacks_by_the_kernel_give_the_logits_of_mlx_lms_single_rows(launched):
    model, line = wide(), some_line(40)
    alone = one_at_a_time(model, line, 21)
    with emulator.emulated():
        found = in_blocks(model, line, 21, PLAN)
    # Float32 sums in another order.
    assert error(found, alone) < 1e-4
    layers = 2
    # (rows, rows run again): each pass, then its rollback.
    assert launched[: 2 * layers] == [(5, None)] * layers + [(5, 2)] * layers
    assert (1, None) in launched and (16, 11) in launched


def test_a_rollback_is_one_recurrence_a_layer_and_no_call_of_the_model(monkeypatch):
    model, line = wide(), some_line(30)
    target, cache = Target(model, (0,)), mlx_lm_cache.make_prompt_cache(model)
    target(mx.array([line[:21]]), cache)
    point = rollback_point(cache, 21)
    verify_block(target, mx.array(line[21:22]), mx.array([line[22:27]]), cache, point)
    # The same states from the rows one by one.
    plain = mlx_lm_cache.make_prompt_cache(model)
    for at in range(24):
        model(mx.array([line[at : at + 1]]), cache=plain)
    runs, steps = [], mlx_lm_recurrence.gated_delta_ops
    monkeypatch.setattr(mlx_lm_recurrence, "gated_delta_ops", lambda *given: runs.append(given[0].shape[1]) or steps(*given))
    monkeypatch.setattr(type(model.layers[0].linear_attn), "__call__", None)
    rollback(cache, point, 24)
    assert runs == [3, 3]
    for ours, theirs in zip(cache, plain, strict=True):
        if type(ours) is mlx_lm_cache.ArraysCache:
            for a, b in zip(ours.cache, theirs.cache, strict=True):
                assert mx.allclose(a, b, rtol=0, atol=1e-5 * mx.abs(b).max())


BOTH = ("qwen3_next", "kimi_linear")
FAULTS = {
    "a convolution's rows begin one too early": (
        (recurrent.Form, "states", "array[:, n : n + more]", "array[:, n - 1 : n - 1 + more]"),
        BOTH,
    ),
    "a recurrence runs one row too few": ((routing.Recurred, "first", "rows)[1]", "max(rows - 1, 1))[1]"), BOTH),
    # qwen3_next's random gates forget in a row what was before it.
    "a recurrence begins behind the pass": (
        (routing.Recurred, "first", "*self.given, rows", "*self.given[:5], self.state, rows"),
        ("kimi_linear",),
    ),
}


@pytest.mark.parametrize("fault, name", [(fault, name) for fault, (_, names) in FAULTS.items() for name in names])
def test_a_fault_in_what_is_kept_of_a_call_changes_the_logits(fault, name, monkeypatch):
    model, line = model_of(name), some_line(34)
    alone = one_at_a_time(model, line, 21)
    assert error(in_blocks(model, line, 21, PLAN), alone) < 1e-4
    plant(monkeypatch, *FAULTS[fault][0])
    assert error(in_blocks(model, line, 21, PLAN), alone) > 1e-4


def test_a_call_that_is_not_of_this_form_is_run_again_as_a_whole(monkeypatch):
    model, line = model_of("qwen3_next"), some_line(34)
    monkeypatch.setattr(recurrent, "_recorded", lambda *_: None)
    assert error(in_blocks(model, line, 21, PLAN), one_at_a_time(model, line, 21)) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_gates_are_those_of_mlx_lm(dtype):
    """What `Recurrence` does in the place of mlx-lm's `gated_delta_update`: the same bits, every option of it."""

    class Module:
        def __call__(self, *args, **kwargs):
            return mlx_lm_recurrence.gated_delta_update(*args, **kwargs)

    route = routing.Recurrence(Module(), Module.__call__, routing.PassState())
    q, k = (mx.random.normal((2, 3, 2, 8), key=mx.random.key(i)).astype(dtype) for i in (0, 1))
    v, a, b = (mx.random.normal(s, key=mx.random.key(9)).astype(dtype) for s in ((2, 3, 4, 6), (2, 3, 4), (2, 3, 4)))
    log, bias, mask = (
        mx.array([0.1, 1.0, -1.0, 0.5]),
        mx.array([0.5, 0.0, 1.0, -1.0]),
        mx.array([[True] * 3, [False, True, True]]),
    )
    for options in ({}, {"mask": mask}, {"allow_neg_eigval": True, "use_kernel": False}, {"lower_bound": -5.0}):
        given = (q, k, v, a, b, log, bias)
        for ours, theirs in zip(
            route._update(*given, **options), mlx_lm_recurrence.gated_delta_update(*given, **options), strict=True
        ):
            assert ours.dtype == theirs.dtype and mx.array_equal(ours, theirs)
