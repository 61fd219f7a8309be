"""Compiled passes whose values are not finite, kernels that go off, traces that are dropped, costs that are kept apart."""

import math

import mlx.core as mx
import pytest
from families import family, known_drafter
from kit import greedy_ids, ids_of, run, tiny_drafter, tiny_target
from traced_kit import PROMPT, blocks_of, filled, verify

from dflash_mlx import loop, traced
from dflash_mlx.draft_length import measure as costs
from dflash_mlx.kernels import REGISTRY, autotune
from dflash_mlx.kernels.autotune import NotFiniteError
from dflash_mlx.kernels.layer_routes import LayerRoutes
from dflash_mlx.kernels.routing import KernelRoute
from dflash_mlx.models.target import Target
from dflash_mlx.pair import DFlashPair
from dflash_mlx.rollback import rollback
from dflash_mlx.traced import compiled


def poisoned(cache):
    """The buffers with values that are no numbers where no row counts, as drafts that overflowed float16 leave them."""
    for entry in cache:
        for name in ("keys", "values"):
            array = getattr(entry, name)
            array[..., entry.offset :, :] = math.nan
            setattr(entry, name, array)


def test_of_two_compiled_passes_in_flight_that_are_not_finite_neither_is_laid_on_the_kernels(monkeypatch):
    model = tiny_target()
    monkeypatch.setattr(autotune, "_off", {})
    blocks, spoilt = blocks_of(model).accelerator, mx.full((1, 5, 48), math.nan)
    answers, outputs = [Target(model, (0, 2)) for _ in range(2)], []
    for target in answers:
        target.accelerator = blocks
        outputs.append(verify(target, filled(model, target))[0])
    for target, output in zip(answers, outputs, strict=True):
        with pytest.raises(NotFiniteError):
            target.check([bits.item() for bits in target.finite_flag(spoilt, compiled=output.compiled)], output.compiled)
    assert blocks.refused and not autotune._off
    # An ordinary pass in which nothing of a compiled one was is another matter.
    ordinary, _ = verify(answers[0], filled(model, answers[0]))
    with pytest.raises(NotFiniteError):
        answers[0].check([0x7F800000], ordinary.compiled)
    assert autotune._off


def test_a_compiled_pass_is_flagged_by_its_states_alone():
    model = tiny_target()
    ours = blocks_of(model)
    output, _ = verify(ours, filled(model, ours))
    hidden = output.hidden
    assert output.compiled and output.logits is None
    spoilt = mx.where(mx.arange(hidden.shape[2]) == 3, mx.array(math.nan), hidden)
    # MLX's own head made these of sound states, as plain decoding would.
    ours.check([bits.item() for bits in ours.finite_flag(hidden, None, mx.full((1, 5, 50), math.nan), True)], True)
    with pytest.raises(NotFiniteError):
        ours.check([bits.item() for bits in ours.finite_flag(spoilt, None, ours.head(hidden), True)], True)


def test_a_compiled_pass_that_rows_without_meaning_reach_is_undone_and_the_last(caplog):
    model = tiny_target()
    ours, plain = blocks_of(model), Target(model, (0, 2))
    cache, other = filled(model, ours), filled(model, plain)
    rollback(cache, verify(ours, cache)[1], len(PROMPT))
    poisoned(cache)
    output, point = verify(ours, cache)
    assert ours.accelerator.passes == 2
    with pytest.raises(NotFiniteError):
        ours.check([bits.item() for bits in ours.finite_flag(output.hidden, compiled=output.compiled)], output.compiled)
    assert "compiled: a pass gave a value that is not finite" in caplog.text and not autotune._off
    rollback(cache, point, len(PROMPT))
    output, _ = verify(ours, cache)
    assert ours.accelerator.passes == 2 and not output.compiled and not ours.finite_flag(output.hidden)
    assert mx.array_equal(output.hidden, verify(plain, other)[0].hidden)


def test_an_answer_survives_rows_without_meaning(forced, monkeypatch):
    model = family("llama")
    want = greedy_ids(model, PROMPT, 40)
    drafter = known_drafter(model, PROMPT + want, "noisy", block=6)

    def spoils(entries, point, keep):
        rollback(entries, point, keep)
        if drafter.pair.accelerator.passes[0].passes == 3:
            poisoned(entries)

    monkeypatch.setattr(loop, "rollback", spoils)
    assert ids_of(list(run(model, drafter, PROMPT, 40, block_size=6))) == want
    assert drafter.pair.accelerator.passes[0].passes == 4 and "not finite" in drafter.pair.accelerator.passes[0].refused


def test_where_a_head_is_at_fault_compiled_passes_are_not(monkeypatch):
    monkeypatch.setattr(autotune, "_off", {})
    model = tiny_target()
    ours = blocks_of(model)
    output, _ = verify(ours, filled(model, ours))
    sound, infinite = mx.array([-3.0, -math.inf]).view(mx.int32).tolist()
    ours.check([sound])
    with pytest.raises(NotFiniteError):
        ours.check([infinite])
    assert set(autotune._off) == set(REGISTRY) and not ours.accelerator.refused
    monkeypatch.setattr(autotune, "_off", {})
    for refused, off in ((True, False), (True, True)):
        with pytest.raises(NotFiniteError):
            ours.check([sound, infinite], output.compiled)
        assert (bool(ours.accelerator.refused), bool(autotune._off)) == (refused, off)
        # What is run again is an ordinary pass.
        output, _ = verify(ours, filled(model, ours))


def test_a_kernel_that_is_switched_off_is_traced_away(monkeypatch):
    model = tiny_target()
    ours = blocks_of(model)
    handlers = []

    class Serving(KernelRoute):
        def __call__(self, inner, args, kwargs):
            self.passes.served.add(self)
            return inner(*args, **kwargs)

    def calls(self, rows):
        mlp = self.model.layers[0].mlp
        self._calls = [] if autotune._off else [(mlp, Serving(mlp, self._passes), "__call__")]
        handlers.append(self._calls)
        return self._calls

    monkeypatch.setattr(LayerRoutes, "calls", calls)
    monkeypatch.setattr(autotune, "_off", {})
    cache = filled(model, ours)
    for _ in range(2):
        output, _ = verify(ours, cache)
        assert len(ours.finite_flag(output.hidden, compiled=output.compiled)) == 1
    traces = len(handlers)
    autotune.disable_all("a test")
    verify(ours, cache)
    assert len(handlers) > traces and handlers[-1] == [] and ours.accelerator.passes == 3


def test_traces_that_are_kept_are_few(monkeypatch):
    model = tiny_target()
    ours = blocks_of(model)
    monkeypatch.setattr(compiled, "_KEPT", 3)
    cache = filled(model, ours)
    for w in range(4, 24, 4):
        rollback(cache, verify(ours, cache, list(range(w)))[1], len(PROMPT))
    assert [key[0] for key in ours.accelerator._known] == [(0, 12), (0, 16), (0, 20)] and ours.accelerator.passes == 5


def test_costs_are_measured_and_kept_apart_from_those_of_uncompiled_passes(forced, monkeypatch):
    model, keys = tiny_target(), []
    drafter = tiny_drafter(model, block=6)
    monkeypatch.setattr(costs, "save_cost_model", lambda key, _: keys.append(key))
    for value in ("on", "off"):
        monkeypatch.setenv(traced.VARIABLE, value)
        target = DFlashPair.of(drafter).prepare_target()
        costs.Measurement(target, drafter).finish()
        assert value == "off" or drafter.pair.accelerator.passes[0].passes
    assert len(set(keys)) == 2
