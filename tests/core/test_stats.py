import json
from types import SimpleNamespace

import pytest
from screen import private_words

from dflash_mlx.stats import GenerationStats, Round, figures_of


def make_stats(*rounds, **options):
    stats = GenerationStats(block_size=5, **options)
    for drafted, accepted, bonus, width in rounds:
        stats.add_round(drafted, accepted, bonus, width, "drafter" if width else "plain")
    return stats


ROUNDS = (([1, 2, 3, 4], 4, 9, 4), ([5, 6, 7, 8], 0, 3, 4), ([], 0, 7, 0), ([5, 6, 7, 8], 1, 2, 2))


def test_tau_is_the_mean_of_accepted_plus_one_over_rounds_that_drafted():
    stats = make_stats(*ROUNDS)
    assert stats.acceptance_lengths == [5, 1, 2]
    assert stats.tau == pytest.approx(8 / 3) and (stats.n_rounds, stats.n_drafting) == (4, 3)


def test_printed_stats_are_one_short_line():
    stats = make_stats(*ROUNDS * 100)
    assert len(stats.rounds) == 400 and len(repr(stats)) < 150
    assert repr(stats).startswith("GenerationStats(rounds: 400, with drafts: 300, tau: 2.67, draft 0.00 s, ")
    assert "tau: none" in repr(make_stats())


def test_tau_of_no_round_is_none():
    assert make_stats().tau is None and make_stats(([], 0, 7, 0)).tau is None


def test_rounds_are_plain_json_and_have_attributes():
    stats = make_stats(*ROUNDS)
    assert json.loads(json.dumps(stats.rounds))[1] == {
        "drafted": [5, 6, 7, 8],
        "accepted": 0,
        "bonus": 3,
        "width": 4,
        "source": "drafter",
    }
    assert stats.rounds[3].width == 2 and stats.rounds[0].drafted == [1, 2, 3, 4]
    with pytest.raises(AttributeError, match="colour"):
        Round(width=1).colour  # noqa: B018


def test_a_summary_keeps_counts_and_no_rounds():
    stats = make_stats(*ROUNDS, keep_rounds=False)
    assert (stats.rounds, stats.acceptance_lengths, stats.n_rounds, stats.n_drafting) == ([], [], 4, 3)
    assert stats.tau == pytest.approx(8 / 3)


def test_time_of_passes_is_split_as_the_rounds_timed_apart_say():
    stats = make_stats()
    stats.add_passes(2.0, 0.5, True)
    stats.add_passes(6.0, None, True)
    assert stats.seconds["draft"] == pytest.approx(2.0) and stats.seconds["verify"] == pytest.approx(6.0)
    stats.add_passes(2.0, 1.5, True)
    assert stats.seconds["draft"] == pytest.approx(5.0) and stats.seconds["verify"] == pytest.approx(5.0)
    # Where the drafter did not run, nothing is its part.
    stats.add_passes(4.0, None, False)
    stats.add_passes(1.0, None, False)
    assert stats.seconds["draft"] == pytest.approx(5.0) and stats.seconds["verify"] == pytest.approx(10.0)


def test_before_a_round_was_timed_apart_all_waiting_counts_as_verify():
    stats = make_stats()
    stats.add_passes(3.0, None, True)
    assert (stats.seconds["draft"], stats.seconds["verify"]) == (0.0, 3.0)


def test_the_summary_names_what_json_prints():
    summary = make_stats(*ROUNDS).summary()
    assert {"acceptance_lengths", "rounds", "tau", "sources", "seconds"} <= set(summary)
    assert set(summary["seconds"]) == {"draft", "verify", "rollback", "host"}


def test_rounds_and_accepted_drafts_are_counted_by_source():
    stats = make_stats(*ROUNDS)
    stats.add_round([7, 7, 7, 7], 3, 1, 3, "prompt_lookup")
    stats.add_round([7, 7, 7, 7], 2, 1, 3, "prompt_lookup")
    assert stats.sources == {"drafter": {"rounds": 3, "accepted": 5}, "prompt_lookup": {"rounds": 2, "accepted": 5}}
    assert stats.looked_up == {3: 2} and stats.widths[3] == 2 and stats.n_drafting == 5


def test_a_verbose_answer_says_what_drafting_did_in_no_word_of_ours():
    stats = GenerationStats(8)
    stats.add_round([1, 2], 2, 3, 2, "drafter")
    stats.add_round([], 0, 4, 0, "plain")
    figures = {"prompt_tokens": 3, "prompt_tps": 1.0, "generation_tokens": 5, "generation_tps": 2.0, "peak_memory": 0.1}
    said = figures_of(SimpleNamespace(stats=stats, **figures))
    assert said.splitlines()[-1] == "Drafting: 2.000 tokens a round" and not private_words(said)
