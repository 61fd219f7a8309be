"""Sampling: the text for a seed depends on no drafter, and its law is the target's."""

import mlx.core as mx
import numpy as np
import pytest
from kit import Noisy, Oracle, greedy_ids, ids_of, letters, plain, run, tiny_drafter, tiny_target
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from rows import tolerance

from dflash_mlx import make_prompt_cache, sampling
from dflash_mlx.errors import GenerationError
from dflash_mlx.sampling import (
    Distribution,
    KeyedNoise,
    KeyedSampler,
    SamplingSettings,
    choose_seed,
    noise_at,
    process,
    sample_at,
    sample_rows,
)

PROMPT = [5, 9, 33, 7, 20]
SAMPLERS = {
    "temperature": {"temp": 0.8},
    "top_p": {"temp": 1.0, "top_p": 0.9},
    "top_k and min_p": {"temp": 1.3, "top_k": 12, "min_p": 0.02},
    "xtc": {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
}


@pytest.fixture(scope="module")
def tiny():
    """A target soft enough that sampling strays from its greedy line."""
    model = tiny_target(seed=2)
    model.lm_head.weight = model.lm_head.weight * 0.3
    return model


def knowing(model, line, cls=Noisy):
    return tiny_drafter(model, cls=cls).learn(line, model)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.quick(5)
def test_the_text_for_a_seed_is_the_same_for_any_drafter_block_and_none(tiny, name, ours):
    sampler = SamplingSettings(**SAMPLERS[name]).make()[0] if ours else make_sampler(**SAMPLERS[name])
    assert isinstance(sampler, Distribution) == (ours and name != "xtc")
    options = {"max_tokens": 24, "sampler": sampler, "seed": 7}
    without = ids_of(run(tiny, None, PROMPT, **options))
    assert without != greedy_ids(tiny, PROMPT, 24)
    line = PROMPT + without + [0] * 16
    for drafter in (tiny_drafter(tiny), knowing(tiny, line), knowing(tiny, line, Oracle)):
        for block in (2, 5, 9):
            got = run(tiny, drafter, PROMPT, block_size=block, **options)
            assert ids_of(got) == without
    assert got[-1].stats.acceptance_lengths[:2] == [9, 9], "drafts that the sampled text contains are accepted"


@pytest.mark.parametrize("make", [make_sampler, Distribution])
def test_the_text_for_a_seed_goes_on_the_same_over_turns(tiny, make):
    sampler = make(temp=0.8)
    texts = []
    for drafter in (None, tiny_drafter(tiny)):
        cache = make_prompt_cache(tiny, drafter)
        first = ids_of(run(tiny, drafter, PROMPT, 9, sampler=sampler, seed=3, prompt_cache=cache))
        texts.append(first + ids_of(run(tiny, drafter, [11, 2], 9, sampler=sampler, seed=4, prompt_cache=cache)))
    assert texts[0] == texts[1]


def test_another_seed_gives_another_text_and_none_draws_one_from_mx_random(tiny):
    drafter, sampler = tiny_drafter(tiny), make_sampler(temp=0.8)
    texts = [ids_of(run(tiny, drafter, PROMPT, 16, sampler=sampler, seed=seed)) for seed in (1, 2)]
    mx.random.seed(11)
    texts.append(ids_of(run(tiny, drafter, PROMPT, 16, sampler=sampler)))
    texts.append(ids_of(run(tiny, drafter, PROMPT, 16, sampler=sampler)))
    assert len({tuple(t) for t in texts}) == 4
    mx.random.seed(11)
    assert ids_of(run(tiny, None, PROMPT, 16, sampler=sampler)) == texts[2]


def test_top_k_one_is_greedy(tiny):
    drafter = tiny_drafter(tiny)
    for options in ({"temp": 1.0, "top_k": 1}, {"temp": 1.0, "top_p": 1e-4}):
        got = run(tiny, drafter, PROMPT, 16, sampler=make_sampler(**options), seed=5)
        assert ids_of(got) == greedy_ids(tiny, PROMPT, 16)


def test_the_sampler_is_given_one_row_at_a_time(tiny):
    shapes = []

    def sampler(row):
        shapes.append(row.shape)
        return mx.argmax(row, axis=-1)

    assert ids_of(run(tiny, tiny_drafter(tiny), PROMPT, 12, sampler=sampler)) == greedy_ids(tiny, PROMPT, 12)
    assert len(shapes) > 12 and set(shapes) == {(1, 61)}


def test_mx_randoms_state_is_untouched_by_a_run_with_a_seed(tiny):
    # Made first: a random drafter draws from mx.random.
    drafter, sampler = tiny_drafter(tiny), make_sampler(temp=1.0, top_p=0.9)
    mx.random.seed(42)
    mx.random.uniform()
    before = mx.random.state[0].tolist()
    for draft_model in (drafter, None):
        assert len(run(tiny, draft_model, PROMPT, 8, sampler=sampler, seed=3)) == 8
        assert mx.random.state[0].tolist() == before


def test_the_state_is_put_back_after_an_error_in_the_sampler():
    mx.random.seed(42)
    before = mx.random.state[0].tolist()
    with pytest.raises(ZeroDivisionError):
        sample_at(lambda row: 1 / 0, 3, 5, mx.zeros((1, 4)))
    assert mx.random.state[0].tolist() == before


@pytest.mark.parametrize("seed", [-1, 1 << 32, 1.5, "7", True])
def test_an_impossible_seed_is_refused(tiny, seed):
    for drafter in (None, tiny_drafter(tiny)):
        with pytest.raises(GenerationError, match="it must be a whole number from 0 to 4294967295"):
            run(tiny, drafter, PROMPT, 4, sampler=make_sampler(temp=1.0), seed=seed)
    with pytest.raises(GenerationError, match="it must be a whole number from 0 to 4294967295"):
        choose_seed(seed)


def test_the_largest_seed_works(tiny):
    assert choose_seed((1 << 32) - 1) == (1 << 32) - 1
    assert len(run(tiny, tiny_drafter(tiny), PROMPT, 4, sampler=make_sampler(temp=1.0), seed=(1 << 32) - 1)) == 4


# Processors


class Recorder:
    """A processor with memory: bans what it has chosen twice, and notes every context that it is given."""

    def __init__(self):
        self.contexts, self.counts = [], {}

    def __call__(self, history, logits):
        assert logits.shape == (1, 61)
        self.contexts.append(history.tolist())
        last = self.contexts[-1][-1]
        self.counts[last] = self.counts.get(last, 0) + 1
        banned = [token for token, count in self.counts.items() if count > 1]
        return logits if not banned else logits.at[:, mx.array(banned)].add(-100.0)


@pytest.mark.parametrize("quality", [None, Noisy, Oracle])
def test_processors_with_memory_see_exactly_plain_decodings_contexts(tiny, quality):
    theirs = Recorder()
    line = ids_of(plain(tiny, letters(), PROMPT, max_tokens=20, logits_processors=[theirs]))
    assert line != greedy_ids(tiny, PROMPT, 20)
    drafter = tiny_drafter(tiny) if quality is None else knowing(tiny, PROMPT + line + [0] * 16, quality)
    ours = Recorder()
    assert ids_of(run(tiny, drafter, PROMPT, 20, logits_processors=[ours])) == line
    # Plain decoding looks one token ahead, and a round that reaches the limit may look further.
    contexts = min(len(theirs.contexts), len(ours.contexts))
    assert contexts >= 20 and ours.contexts[:contexts] == theirs.contexts[:contexts]
    assert ours.contexts == [ours.contexts[-1][: len(PROMPT) + n] for n in range(len(ours.contexts))]


def test_penalties_and_biases_of_mlx_lm_work_as_in_plain_decoding(tiny):
    processors = make_logits_processors(logit_bias={3: 4.0}, repetition_penalty=1.5, repetition_context_size=7)
    theirs = plain(tiny, letters(), PROMPT, max_tokens=20, logits_processors=processors)
    assert ids_of(theirs) != greedy_ids(tiny, PROMPT, 20)
    drafter = knowing(tiny, PROMPT + ids_of(theirs) + [0] * 16)
    for block in (2, 5):
        got = run(tiny, drafter, PROMPT, 20, block_size=block, logits_processors=processors)
        assert ids_of(got) == ids_of(theirs)
        for a, b in zip(got, theirs, strict=True):
            # float32, many rows against one
            assert mx.allclose(a.logprobs, b.logprobs, rtol=0, atol=tolerance()).item()


def test_processors_and_a_sampler_together_give_the_seeds_text(tiny):
    options = {"logits_processors": make_logits_processors(repetition_penalty=1.3), "sampler": make_sampler(temp=0.9), "seed": 8}
    without = ids_of(run(tiny, None, PROMPT, 20, **options))
    for drafter in (tiny_drafter(tiny), knowing(tiny, PROMPT + without + [0] * 16)):
        assert ids_of(run(tiny, drafter, PROMPT, 20, **options)) == without


def test_logprobs_of_a_sampled_run_are_those_before_the_sampler(tiny):
    options = {"sampler": make_sampler(temp=0.5, top_k=4), "seed": 8}
    got, theirs = (run(tiny, d, PROMPT, 12, **options) for d in (tiny_drafter(tiny), None))
    for a, b in zip(got, theirs, strict=True):
        assert a.token == b.token and mx.allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5).item()
        # All 61 probabilities are there, not the four that the sampler kept: float32 sum.
        assert abs(mx.exp(a.logprobs).sum().item() - 1) < 1e-4 and mx.isfinite(a.logprobs).all().item()


def test_process_runs_processors_in_order_and_normalises():
    order = []
    double = lambda history, logits: (order.append(("double", history.tolist())), 2 * logits)[1]  # noqa: E731
    add = lambda history, logits: (order.append(("add", history.tolist())), logits + mx.array([[1.0, 0.0]]))[1]  # noqa: E731
    row = process([double, add], mx.array([4, 2]), mx.array([[1.0, 3.0]]))
    assert order == [("double", [4, 2]), ("add", [4, 2])]
    assert mx.allclose(row, mx.array([[3.0, 6.0]]) - mx.logsumexp(mx.array([3.0, 6.0])), atol=1e-6).item()


# The law


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


# 1 - 1e-4 quantiles of chi-square for 3, 4 and 24 degrees of freedom: fixed seeds, so these tests do not flicker.
CHI_3, CHI_4, CHI_24 = 21.1, 23.5, 61.1
P = np.array([0.5, 0.3, 0.15, 0.05])


def draw(keys):
    row = mx.log(mx.array(P, dtype=mx.float32))[None]
    tokens = [sample_at(lambda r: mx.random.categorical(r), seed, position, row) for seed, position in keys]
    return np.array(mx.concatenate(tokens))


@pytest.mark.parametrize(
    "keys",
    [
        [(seed, 17) for seed in range(2500)],
        [(3, position) for position in range(2500)],
        [(n, n) for n in range(2500)],
        [(2**32 - 1 - n, 2**31 + n) for n in range(2500)],
    ],
    ids=["over seeds", "over positions", "over both", "over large ones"],
)
def test_keyed_draws_have_the_law_of_the_row(keys):
    assert chi_square(np.bincount(draw(keys), minlength=4), P) < CHI_3


@pytest.mark.parametrize("step", [(0, 1), (1, 0)], ids=["next position", "next seed"])
def test_draws_at_neighbouring_keys_are_independent(step):
    firsts = draw([(seed, 2 * position) for seed in range(0, 120, 2) for position in range(50)])
    seconds = draw([(seed + step[1], 2 * position + step[0]) for seed in range(0, 120, 2) for position in range(50)])
    joint = np.bincount(4 * firsts + seconds, minlength=16)
    # 15 degrees of freedom; 24's bound is wider than needed.
    assert chi_square(joint, np.outer(P, P).ravel()) < CHI_24


def test_no_two_keys_share_their_noise():
    keys = [(seed, position) for seed in range(30) for position in range(30)]
    noise = [sample_at(lambda r: mx.random.uniform(shape=(2,)), *key, mx.zeros((1, 4))) for key in keys]
    assert len({tuple(row) for row in mx.stack(noise).tolist()}) == 900


@pytest.mark.parametrize(
    "numbers", [{"temp": 0.7}, {"temp": 1.3, "top_k": 9}, {"temp": 1.0, "top_p": 0.8, "min_p": 0.02}], ids=str
)
def test_a_distribution_draws_with_the_probabilities_that_it_tells_which_are_mlx_lms(numbers):
    row = mx.random.normal((1, 40), key=mx.random.key(3)) * 2
    row = row - mx.logsumexp(row, axis=-1, keepdims=True)
    ours, theirs = Distribution(**numbers), make_sampler(**numbers)
    told = np.array(ours.probabilities(row)[0], dtype=np.float64)
    assert told.sum() == pytest.approx(1, abs=1e-5)
    for sampler in (ours, theirs):
        draws = [sample_at(sampler, 1, n, row).item() for n in range(400)]
        assert all(told[draws] > 0)
        # Four standard errors of each token's share.
        share = np.bincount(draws, minlength=40) / 400
        assert np.all(np.abs(share - told) <= 4 * np.sqrt(told * (1 - told) / 400) + 1e-9)


@pytest.mark.parametrize("numbers", [{"temp": 0.7}, {"temp": 1.0, "top_p": 0.8, "min_p": 0.02, "top_k": 9}], ids=str)
def test_rows_drawn_at_once_are_those_drawn_one_by_one(numbers):
    """By a distribution, and by a function, which is asked row by row."""
    rows = mx.random.normal((5, 40), key=mx.random.key(3)) * 2
    sampler, last = Distribution(**numbers), (1 << 32) - 5
    for seed, position in ((3, 0), ((1 << 32) - 1, last)):
        one_by_one = [sample_at(sampler, seed, position + i, rows[i : i + 1]).item() for i in range(5)]
        assert sample_rows(sampler, KeyedNoise(seed), position, rows).tolist() == one_by_one
        assert sample_rows(lambda row: sampler(row), KeyedNoise(seed), position, rows).tolist() == one_by_one
    assert len({tuple(row) for row in noise_at([3, 3, 4], [7, 8, 7], 9).tolist()}) == 3


def test_noise_is_made_once_for_a_rounds_drafts_and_their_verifying(tiny, monkeypatch):
    made, noise_at = [], sampling.noise_at
    monkeypatch.setattr(sampling, "noise_at", lambda seeds, at, v: made.append([*at]) or noise_at(seeds, at, v))
    got = run(tiny, tiny_drafter(tiny), PROMPT, 20, sampler=Distribution(0.9), seed=7, block_size=4, prompt_lookup=False)
    rounds = got[-1].stats.rounds
    # The first token has a pass of its own; the last round may be cut short.
    assert len(made) == len(rounds) + 1 and all(len(at) == 4 for at in made[1:-1])


def test_drafts_share_the_noise_of_the_targets_draws(tiny):
    """A drafter whose distribution is the target's own drafts the text of the seed; likeliest tokens do not."""
    model = tiny_target(seed=2)
    model.lm_head.weight = model.lm_head.weight * 0.3
    text = ids_of(run(model, None, PROMPT, 24, sampler=Distribution(0.9), seed=7))
    logits = model(mx.array([[*PROMPT, *text]]))

    class Own(type(tiny_drafter(model))):
        def slots(self, anchor, features, cache, start, block_size, accelerator=None):
            self.inject(features, cache, start)
            return mx.arange(start + features.shape[1], start + features.shape[1] + block_size - 1)[None]

    drafter = tiny_drafter(model, cls=Own)
    drafter._head = lambda at: logits[0, at]
    for block in (4, 6):
        options = {"block_size": block, "seed": 7, "prompt_lookup": False}
        got = run(model, drafter, PROMPT, 12, sampler=Distribution(0.9), **options)
        assert ids_of(got) == text[:12] and set(got[-1].stats.acceptance_lengths[:-1]) == {block}
        likeliest = run(model, drafter, PROMPT, 12, sampler=lambda row: Distribution(0.9)(row), **options)
        assert ids_of(likeliest) == text[:12] and likeliest[-1].stats.tau < block - 1


def test_rejection_gives_a_seeds_text_again_and_a_token_that_is_certain_always(tiny):
    drafter = tiny_drafter(tiny)
    for acceptance in ("rejection", "block"):
        options = {"acceptance": acceptance, "sampler": Distribution(0.8), "max_tokens": 16}
        texts = [ids_of(run(tiny, drafter, PROMPT, seed=seed, **options)) for seed in (3, 3, 4)]
        assert texts[0] == texts[1] != texts[2]
        options["sampler"] = Distribution(1.0, top_k=1)
        assert ids_of(run(tiny, drafter, PROMPT, **options)) == greedy_ids(tiny, PROMPT, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acceptance": "often", "sampler": Distribution(1.0)}, "acceptance is 'often'; it must be match, rejection or block"),
        ({"acceptance": "rejection", "sampler": make_sampler(1.0)}, "the sampler is a function; .*Distribution"),
        ({"acceptance": "block"}, "the sampler is a NoneType"),
        (
            {"acceptance": "block", "sampler": Distribution(1.0), "logits_processors": [lambda t, x: x]},
            "logits_processors were given",
        ),
    ],
)
def test_what_rejection_needs_is_asked_for(tiny, options, message):
    with pytest.raises(GenerationError, match=message):
        run(tiny, tiny_drafter(tiny), PROMPT, **options)
    with pytest.raises(GenerationError, match="acceptance is .* and there is no DFlash drafter"):
        run(tiny, None, PROMPT, **options)
    with pytest.raises(GenerationError, match="temp is 0; it must be at least 1e-5"):
        Distribution(0)


def test_a_keyed_sampler_counts_positions_on():
    row = mx.log(mx.array(P, dtype=mx.float32))[None]
    sampler = KeyedSampler(mx.random.categorical, 3, 40)
    assert [sampler(row).item() for _ in range(30)] == draw([(3, 40 + n) for n in range(30)]).tolist()


@pytest.mark.parametrize("runs", [400, pytest.param(1500, marks=pytest.mark.full)])
def test_the_first_tokens_of_the_loop_have_the_targets_law(runs):
    model = tiny_target(seed=6, layers=3, hidden=12, vocab=5)
    model.lm_head.weight = model.lm_head.weight * 0.3
    # Always the same drafts: some are right by chance, most are wrong.
    drafter = knowing(model, [1, 2, 0, 1, 3, 4, 2, 0, 0], Loose)
    sampler = make_sampler(temp=1.0)
    check_law(model, [ids_of(run(model, drafter, [1, 2], 3, block_size=3, sampler=sampler, seed=seed)) for seed in range(runs)])


# In the quick tier test_accept_law.py has both, by 20,000 draws.
@pytest.mark.full
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_rejection_and_block_acceptance_keep_the_targets_law(acceptance):
    model = tiny_target(seed=6, layers=3, hidden=12, vocab=5)
    model.lm_head.weight = model.lm_head.weight * 0.3
    drafter = tiny_drafter(model)
    options = {"block_size": 4, "sampler": Distribution(1.0), "acceptance": acceptance}
    drawn, tau = [], []
    for seed in range(1500):
        responses = run(model, drafter, [1, 2], 3, seed=seed, **options)
        drawn.append(ids_of(responses))
        tau.append(responses[-1].stats.tau)
    check_law(model, drawn)
    assert 1.2 < np.mean(tau) < 4, "some drafts are kept and some are not"


def check_law(model, drawn):
    """Three tokens after [1, 2], many times, against the target's law of each."""

    def law(ids):
        return np.array(mx.softmax(model(mx.array([ids]))[0, -1], axis=-1), dtype=np.float64)

    first = law([1, 2])
    second = np.stack([law([1, 2, a]) for a in range(5)])
    third = np.stack([[law([1, 2, a, b]) for b in range(5)] for a in range(5)])
    assert chi_square(np.bincount([t[0] for t in drawn], minlength=5), first) < CHI_4
    pairs = np.bincount([5 * t[0] + t[1] for t in drawn], minlength=25)
    assert chi_square(pairs, (first[:, None] * second).ravel()) < CHI_24
    thirds = np.bincount([t[2] for t in drawn], minlength=5)
    assert chi_square(thirds, np.einsum("a,ab,abc->c", first, second, third)) < CHI_4


class Loose(Noisy):
    """Drafts its line whatever was committed."""

    def check(self, features, cache, start):
        pass

    def draft(self, anchor, features, cache, start, block_size):
        self.inject(features, cache, start)
        at = start + features.shape[1]
        return mx.array([self._line[at + 1 : at + block_size]], dtype=mx.int32)
