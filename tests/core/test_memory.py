import warnings

import mlx.core as mx
import mlx.nn as nn
import pytest
from kit import Oracle, flat, greedy_ids, letters, run, tiny_drafter, tiny_target

import dflash_mlx
from dflash_mlx.memory import size_text, wired_limit

LIMIT, BEFORE = 1_000_000_000, 123


@pytest.fixture
def device(monkeypatch):
    """A device with a wired limit, as an Apple GPU has; returns the list of limits set."""
    limits = [BEFORE]

    def set_limit(value):
        limits.append(value)
        return limits[-2]

    monkeypatch.setattr(mx, "device_info", lambda *_: {"max_recommended_working_set_size": LIMIT})
    monkeypatch.setattr(mx, "set_wired_limit", set_limit)
    return limits


def test_the_limit_is_raised_once_and_put_back_by_the_last_of_overlapping_generators(device):
    model, stream = tiny_target(), mx.default_stream(mx.default_device())
    first, second = wired_limit([model], stream), wired_limit([model], stream)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert device == [BEFORE, LIMIT]
    second.__exit__(None, None, None)
    assert device == [BEFORE, LIMIT, BEFORE]


def test_the_limit_is_put_back_after_an_error(device):
    with pytest.raises(KeyError), wired_limit([tiny_target()], mx.default_stream(mx.default_device())):
        raise KeyError
    assert device == [BEFORE, LIMIT, BEFORE]


def test_both_models_count_and_shared_arrays_count_once(device, monkeypatch):
    stream = mx.default_stream(mx.default_device())
    model, other = tiny_target(), tiny_target(seed=4)
    size = sum(a.nbytes for a in flat(model).values())
    monkeypatch.setattr(mx, "device_info", lambda *_: {"max_recommended_working_set_size": int(1.5 * size)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with wired_limit([model, nn.Sequential(model)], stream):
            pass
    with (
        pytest.warns(UserWarning, match="the models take .* GB, close to the .* GB that the GPU may hold"),
        wired_limit([model, other], stream),
    ):
        pass


def test_without_such_a_limit_nothing_is_set(monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda *_: {})
    monkeypatch.setattr(mx, "set_wired_limit", lambda _: pytest.fail("set"))
    with wired_limit([tiny_target()], mx.default_stream(mx.default_device())):
        pass


def test_generators_raise_the_limit_while_they_are_open_and_print_nothing(device, capsys):
    model = tiny_target()
    prompt = [5, 9, 33]
    oracle = tiny_drafter(model, cls=Oracle).learn(prompt + greedy_ids(model, prompt, 30), model)
    steps = [dflash_mlx.stream_generate(model, letters(), prompt, 20, oracle, block_size=5) for _ in range(2)]
    next(steps[0]), next(steps[1])
    assert device == [BEFORE, LIMIT]
    steps[0].close()
    assert device == [BEFORE, LIMIT]
    steps[1].close()
    assert device == [BEFORE, LIMIT, BEFORE]
    run(model, oracle, prompt, 9)
    assert device == [BEFORE, LIMIT, BEFORE, LIMIT, BEFORE]
    assert capsys.readouterr() == ("", "")


def test_sizes_below_a_tenth_of_a_gigabyte_are_told_in_megabytes():
    assert [size_text(n) for n in (5_300_000, 99_940_000, 100_000_000, 1_280_000_000)] == [
        "5.3 MB",
        "99.9 MB",
        "0.10 GB",
        "1.28 GB",
    ]
