"""The sampling options: what 0 and out-of-range values mean, and that mlx-lm's own sampler gets them."""

import re
from dataclasses import fields

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_sampler

from dflash_mlx.cli.options import checked
from dflash_mlx.errors import GenerationError
from dflash_mlx.sampling import Distribution, SamplingSettings, sample_at
from dflash_mlx.sampling_settings import check_max_tokens, recommended, wanted
from dflash_mlx.serving.conversation import Settings

NAMES = [one.name for one in fields(SamplingSettings)]
# For every setting: whether 0 is refused, off (nothing is made for it), or takes the likeliest token; then what is refused.
TABLE = {
    "temp": ("likeliest", (-0.1, float("nan"), float("inf"), "hot", True, None)),
    "top_p": ("likeliest", (-0.1, 1.5, float("nan"), "half")),
    "top_k": ("off", (-2, -1.5, 2.5, True)),
    "min_p": ("off", (-0.1, 1.1)),
    "xtc_probability": ("off", (-0.1, 1.1)),
    "xtc_threshold": ("strictest", (-0.1, 0.6)),
    "repetition_penalty": ("refused", (0, 0.0, 1e-300, -1, float("inf"))),
    "repetition_context_size": ("refused", (0, -1, 1.5)),
    "presence_penalty": ("off", (float("nan"), 2e6, -2e6)),
    "presence_context_size": ("refused", (0, -1, 1.5)),
    "frequency_penalty": ("off", (float("nan"), 2e6, -2e6)),
    "frequency_context_size": ("refused", (0, -1, 1.5)),
    "seed": ("value", (-1, 1 << 32, 1.5, True)),
}


def row():
    logits = mx.random.normal((1, 40), key=mx.random.key(3)) * 2
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def test_every_setting_is_in_the_table():
    assert list(TABLE) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_0_means(name):
    means = TABLE[name][0]
    others = {} if name == "temp" else {"temp": 1.0}
    if means == "refused":
        with pytest.raises(GenerationError, match=f"{name} is 0; it must be"):
            SamplingSettings(**{name: 0})
        return
    sampler, processors = SamplingSettings(**others, **{name: 0}).make()
    if means == "likeliest":
        assert sampler is None
    if means == "off":
        plain, _ = SamplingSettings(**others).make()
        assert processors == []
        assert [sample_at(sampler, 1, n, row()).item() for n in range(50)] == [
            sample_at(plain, 1, n, row()).item() for n in range(50)
        ]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in TABLE for value in TABLE[name][1]])
def test_what_is_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(GenerationError, match=f"^{name} is .*; it must be "):
        SamplingSettings(**{name: value})


@pytest.mark.parametrize(
    "one", [one for one in fields(SamplingSettings) if one.metadata["off"] is not None], ids=lambda one: one.name
)
def test_what_other_programs_write_for_off_is_off(one):
    off = one.metadata["off"]
    for value in (off, float(off)):
        assert SamplingSettings(temp=1.0, **{one.name: value}) == SamplingSettings(temp=1.0)
        assert recommended({"temperature": 0.7, one.name: value}, 100) == ({"temp": 0.7}, {})
    # In a chat and on the command line it is typed, and said to be allowed.
    assert Settings(temp=1.0, **{one.name: 3}).changed(one.name, str(off)) == Settings(temp=1.0)
    assert f"or {off} for off" in wanted(one) and checked(one, off) == off


def test_a_distribution_takes_the_likeliest_token_at_top_p_0():
    ours = Distribution(1.5, top_p=0)
    assert ours.probabilities(row())[0, mx.argmax(row())].item() == pytest.approx(1)
    assert {sample_at(ours, 1, n, row()).item() for n in range(50)} == {mx.argmax(row()).item()}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("settings", [{"temp": 1e-5}, {"temp": 2.1e-4}, {"top_p": 1e-50}, {"top_p": 1e-30}])
@pytest.mark.parametrize("more", [{}, {"xtc_probability": 0.5}, {"xtc_probability": 0.5, "top_k": 9, "min_p": 0.01}])
def test_a_value_near_0_samples_as_strictly_as_0(dtype, settings, more):
    # A large vocabulary, of which even the likeliest token is not likely.
    flat = mx.zeros((1, 50_000)).at[0, 7].add(2)
    row = (flat - mx.logsumexp(flat, axis=-1, keepdims=True)).astype(dtype)
    sampler, _ = SamplingSettings(**{"temp": 1.0, **settings, **more}).make()
    assert sampler is None or {sample_at(sampler, 1, n, row).item() for n in range(5)} == {7}


def test_the_sampler_is_mlx_lms_own_with_xtcs_special_tokens():
    class Words:
        eos_token_ids = (7,)

        def encode(self, text):
            return [5]

    given = {"temp": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "xtc_probability": 0.5, "xtc_threshold": 0.05}
    ours, _ = SamplingSettings(**given).make(Words())
    theirs = make_sampler(
        0.9, top_p=0.9, top_k=20, min_p=0.01, xtc_probability=0.5, xtc_threshold=0.05, xtc_special_tokens=[5, 7]
    )
    draws = [[sample_at(sampler, 1, n, row()).item() for n in range(200)] for sampler in (ours, theirs)]
    assert draws[0] == draws[1]


def test_penalties_become_mlx_lms_processors_in_order():
    given = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_context_size": 2}
    sampler, processors = SamplingSettings(**given).make(logit_bias={3: 9.0})
    assert sampler is None and len(processors) == 4
    logits = mx.ones((1, 8))
    for processor in processors:
        logits = processor(mx.array([1, 2, 2]), logits)
    # Token 1: presence and frequency. Token 2: repetition too, and frequency twice. Token 3: the bias.
    assert logits[0, :4].tolist() == pytest.approx([1, 0.25, 1 / 1.5 - 1, 10])


def test_settings_that_change_nothing_are_named_with_the_reason():
    given = {"top_p": 0.9, "seed": 3, "xtc_threshold": 0.2, "presence_context_size": 5, "presence_penalty": 1.0}
    assert SamplingSettings(**given).without_effect(given) == {
        "top_p": "at temperature 0",
        "seed": "at temperature 0",
        "xtc_threshold": "without xtc_probability",
    }
    assert SamplingSettings(temp=1, top_p=0, seed=3).without_effect({"temp", "top_p", "seed"}) == {"seed": "with top_p 0"}
    assert SamplingSettings(temp=1, seed=3, top_p=0.5).without_effect({"temp", "top_p", "seed"}) == {}


def test_top_k_beyond_the_vocabulary_is_refused():
    SamplingSettings(top_k=39).check_vocabulary(40)
    with pytest.raises(GenerationError, match="top_k is 40; it must be below 40"):
        SamplingSettings(top_k=40).check_vocabulary(40)


@pytest.mark.parametrize("value", [0, -5, 1.5, True, None])
def test_max_tokens_is_a_positive_whole_number_or_minus_1(value):
    check_max_tokens(1)
    check_max_tokens(-1)
    with pytest.raises(GenerationError, match="max_tokens is .*or -1 for no limit"):
        check_max_tokens(value)


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temp": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, {"temp": 1.0, "top_p": 0.95, "top_k": 64}),
        ({"temperature": 0.6}, {"temp": 0.6}),
        ({"temperature": 1}, {"temp": 1}),
        # Greedy: what belongs to sampling has no meaning; a penalty has.
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"do_sample": True, "temperature": 0, "top_p": 0.9}, {}),
        ({"top_p": 0.9, "top_k": 20}, {}),
        # Off, in the ways that files have.
        ({"temperature": 0.7, "top_k": -1, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}, {"temp": 0.7}),
        ({"temperature": 0.7, "top_k": 20.0, "eos_token_id": [1, 2], "max_new_tokens": 5}, {"temp": 0.7, "top_k": 20}),
        # The strictest value is no filter that is off.
        ({"temperature": 0.7, "top_p": 0}, {"temp": 0.7, "top_p": 0}),
    ],
)
def test_what_a_generation_config_recommends(config, want):
    assert recommended(config, 100) == (want, {})
    assert SamplingSettings(**want)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("temperature", "hot", "temperature is 'hot'; it must be a number from 0 to"),
        ("temperature", -0.1, "temperature is -0.1; it must be"),
        ("temperature", float("nan"), "temperature is nan; it must be"),
        ("temperature", True, "temperature is True; it must be"),
        ("top_p", 95, "top_p is 95; it must be a number from 0 to 1"),
        ("top_p", [0.9], r"top_p is \[0.9\]; it must be"),
        ("top_k", 2.5, "top_k is 2.5; it must be a whole number"),
        ("top_k", 50, "top_k is 50; it must be below 50, the target's vocabulary"),
        ("min_p", 2, "min_p is 2; it must be"),
        ("repetition_penalty", 0, "repetition_penalty is 0; it must be a number above 0"),
        ("presence_penalty", float("inf"), "presence_penalty is inf; it must be"),
    ],
)
def test_a_bad_recommended_value_is_ignored_by_name_and_the_others_hold(key, value, reason):
    other = {"do_sample": True, "min_p": 0.1} if key != "min_p" else {"do_sample": True, "top_p": 0.9}
    found, ignored = recommended({**other, key: value}, 50)
    assert [*ignored] == [key] and re.match(reason, ignored[key])
    # Without a temperature nothing is sampled.
    assert ([*other][1] in found) == (key != "temperature")


def test_a_generation_config_that_is_no_object_recommends_nothing():
    assert recommended([1], 50) == ({}, {"generation_config.json": "it holds list; it must be an object"})
