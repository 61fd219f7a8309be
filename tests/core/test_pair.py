"""What outlives a run of a pair, and that none of it is an attribute of a model."""

import copy
import gc
import itertools
import threading
import weakref

import mlx.core as mx
import mlx.nn as nn
import pytest
from kit import flat, greedy_ids, ids_of, letters, run, tiny_drafter, tiny_target

from dflash_mlx import load, load_drafter, pair, stream_generate
from dflash_mlx.draft_length import measure
from dflash_mlx.models.target import Target
from dflash_mlx.pair import DFlashPair

PROMPT = [5, 9, 33, 7, 20]


def attributes(module):
    """Every attribute of every module inside, by identity where it may change in place."""
    return {
        (name, key): id(value) if isinstance(value, (mx.array, nn.Module, list, dict)) or callable(value) else value
        for name, m in module.named_modules()
        for key, value in [*vars(m).items(), *m.items()]
    }


def test_a_run_sets_no_attribute_on_a_model():
    model, tokenizer = load("tiny")
    drafter = load_drafter("tiny", model)
    before = attributes(model), attributes(drafter)
    for options in ({"block_size": None}, {"block_size": 8}, {"block_size": 8, "prompt_lookup": True}):
        run(model, drafter, "import os\n", 30, tokenizer, **options)
    assert (attributes(model), attributes(drafter)) == before and "pair" not in flat(drafter)


def test_the_target_is_made_once_a_pair(monkeypatch):
    made, init = [], Target.__init__
    monkeypatch.setattr(Target, "__init__", lambda self, *args: (made.append(args), init(self, *args))[1])
    model = tiny_target(seed=2)
    drafter = tiny_drafter(model)
    made.clear()
    for block_size in (5, None, 5):
        run(model, drafter, PROMPT, 10, block_size=block_size)
    assert len(made) == 1


def test_modules_put_in_others_places_make_a_new_target():
    model = tiny_target(seed=2)
    drafter = tiny_drafter(model)
    before = DFlashPair.of(drafter).prepare_target()
    assert DFlashPair.of(drafter).prepare_target() is before
    model.layers[1].mlp.up_proj = nn.Linear(24, 44, bias=False)
    assert DFlashPair.of(drafter).prepare_target() is not before
    assert ids_of(run(model, drafter, PROMPT, 12)) == greedy_ids(model, PROMPT, 12)


def test_a_drafter_bound_to_another_target_gets_a_new_pair_and_the_old_one_stays():
    models = [tiny_target(seed=2), tiny_target(seed=3)]
    drafter = tiny_drafter(models[0])
    steps = stream_generate(models[0], letters(), PROMPT, 20, drafter, block_size=5)
    got, first = [next(steps).token for _ in range(3)], drafter.pair
    target = Target(models[1])
    drafter.bind(target.embed, target.head, models[1])
    assert ids_of(run(models[1], drafter, PROMPT, 20)) == greedy_ids(models[1], PROMPT, 20)
    assert drafter.pair is not first and first.model is models[0] and drafter.pair.model is models[1]
    assert got + [r.token for r in steps] == greedy_ids(models[0], PROMPT, 20)


def test_a_pair_keeps_neither_its_drafter_nor_its_target():
    model = tiny_target(seed=2)
    drafter = tiny_drafter(model)
    run(model, drafter, PROMPT, 10, block_size=None)
    gone = [weakref.ref(drafter), weakref.ref(drafter.pair), weakref.ref(model)]
    del model
    gc.disable()
    try:
        del drafter
        assert gone[0]() is None and gone[1]() is None
    finally:
        gc.enable()
    gc.collect()
    assert gone[2]() is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_target_that_has_run_can_be_copied_and_the_copy_has_a_pair_of_its_own(copied):
    model = tiny_target(seed=2)

    def said(model):
        return [ids_of(run(model, d, PROMPT, 10, exact=exact)) for d in (tiny_drafter(model), None) for exact in (False, True)]

    before = said(model)
    other = copied(model)
    assert said(other) == before
    pairs = [vars(each)["_exact_alone"] for each in (model, other)]
    assert [each.model for each in pairs] == [model, other] and pairs[0] is not pairs[1]


def test_two_generators_in_two_threads_share_a_pair():
    model = tiny_target(seed=2)
    drafter, line, got = tiny_drafter(model), greedy_ids(model, PROMPT, 60), {}

    def work(name, **options):
        stream = mx.new_stream(mx.default_device())
        got[name] = ids_of(run(model, drafter, PROMPT, 60, stream=stream, **options))

    threads = [threading.Thread(target=work, args=(i,), kwargs={"block_size": b}) for i, b in enumerate((5, 1, 3, 5))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == dict.fromkeys(range(4), line)


def test_a_measurement_that_one_thread_began_goes_on_in_another(monkeypatch):
    # A few passes a piece, by a clock that goes on when it is read, and none behind the answer.
    ticks = itertools.count()
    monkeypatch.setattr(measure, "load_cost_model", lambda key: None)
    monkeypatch.setattr(measure.Measurement.__init__, "__defaults__", (lambda: float(next(ticks)),))
    monkeypatch.setattr(measure.Measurement.piece, "__defaults__", (8.0,))
    monkeypatch.setattr(pair, "AFTER_S", 0.0)
    model = tiny_target(seed=2)
    drafter, line, got, left = tiny_drafter(model), greedy_ids(model, PROMPT, 6), [], []

    def work():
        got.append(ids_of(run(model, drafter, PROMPT, 6, block_size=None, stream=mx.new_stream(mx.cpu))))
        left.append(drafter.pair._measurement._n)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert got == [line, line]
    assert 0 < left[0] < left[1]
