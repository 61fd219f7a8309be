"""How many drafts the rows of a batch verify: by what rounds took and what each row accepted."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from dflash_mlx.batch.policy import BatchPolicy, RoundCosts, RowPolicy
from dflash_mlx.draft_length.acceptance import AcceptanceRate
from dflash_mlx.draft_length.cost_model import CostModel
from dflash_mlx.draft_length.policy import DraftLengthPolicy, FixedDraftLength

MOST = 7
# Of one row: a round of 7 drafts costs 1.5 tokens' time.
ALONE = CostModel(1.0, 0.2, 0.0, {1: 1.05, 3: 1.15, 7: 1.3})


def row(rate, costs=ALONE):
    """A row whose drafts are accepted at this rate."""
    acceptance = AcceptanceRate(MOST)
    acceptance.counts = [[1000 * rate, 1000.0] for _ in range(MOST)]
    policy = RowPolicy(DraftLengthPolicy(MOST, acceptance, costs, lambda: pytest.fail("measured")))
    policy.in_company, policy.waits = True, False
    return policy


def play(rows, seconds, rounds=60, policy=None):
    """The widths of the last rounds, where one of B rows takes seconds(B, tokens)."""
    policy, seen = policy or BatchPolicy(MOST), []
    for _ in range(rounds):
        width = policy.plan(rows)
        drafts = [one.next_length() for one in rows]
        alike = all(row.width == width for row in rows if row.is_free)
        policy.observe(rows, width, seconds(len(rows), sum(drafts) + len(rows), any(drafts)), alike)
        seen.append(drafts)
    return seen


def fixed_row(width):
    policy = RowPolicy(FixedDraftLength(width))
    policy.in_company, policy.waits = True, False
    return policy


def by_tokens(B, tokens, drafts):
    """A CPU: each token costs the same, and a draft half of one."""
    return tokens + (B * MOST / 2 if drafts else 0)


def by_pass(B, tokens, drafts):
    """A large GPU: a pass costs the same whatever is in it."""
    return 1.0 + 0.2 * drafts


def test_where_tokens_cost_a_batch_goes_back_to_plain_decoding():
    seen = play([row(0.6) for _ in range(8)], by_tokens)
    assert seen[-20:] == [[0] * 8] * 20
    # What was found out cost few rounds.
    assert sum(any(drafts) for drafts in seen) <= 4


@pytest.mark.parametrize("rates", [[0.6] * 7 + [0.02], [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]])
def test_a_batch_with_poor_rows_goes_back_to_plain_decoding_as_fast_as_one_without(rates):
    """One row drafts for next to nothing; a batch's rounds with drafts take three times as long as plain ones."""
    seen = play(
        [row(rate, CostModel(1.0, 0.2, 0.0, {1: 1.0, 3: 1.05, 7: 1.1})) for rate in rates], lambda B, n, drafts: 1 + 2 * drafts
    )
    assert 1 <= sum(any(drafts) for drafts in seen) <= 4 and seen[3] == [7] * 8


def test_where_a_pass_costs_the_same_every_row_drafts_as_much_as_pays():
    assert play([row(0.8) for _ in range(8)], by_pass)[-11:] == [[7] * 8] * 11


def test_the_first_round_of_a_width_which_prepares_its_kernels_does_not_decide():
    begun = set()

    def seconds(B, tokens, drafts):
        first = (B, tokens) not in begun
        begun.add((B, tokens))
        return by_pass(B, tokens, drafts) + 5 * first

    policy, rows = BatchPolicy(MOST), [row(0.8) for _ in range(9)]
    for B in (8, 9, 4):
        assert play(rows[:B], seconds, 30, policy)[-11:] == [[7] * B] * 11


def test_rounds_in_which_rows_differ_end_drafting_if_they_take_long():
    """One row does not draft after a while; each other number of tokens prepares kernels."""
    rows, policy = [row(0.8) for _ in range(7)] + [row(0.02)], BatchPolicy(MOST)

    def seconds(B, tokens, drafts):
        return by_pass(B, tokens, drafts) + 5 * (drafts and tokens < B * (MOST + 1))

    seen = play(rows, seconds, 200, policy)
    mixed = [drafts for drafts in seen if any(drafts) and drafts != [MOST] * 8]
    assert 1 <= len(mixed) <= 14 and sum(any(drafts) for drafts in seen[60:]) <= 4
    # They are tried again, as their kernels may be ready by then.
    seen = play(rows, by_pass, 700, policy)
    assert sum(any(drafts) for drafts in seen) > 200 and seen[-1] == [MOST] * 7 + [0]


@pytest.mark.parametrize(("tries", "drafts"), [(2, False), (4, True)])
def test_on_a_gpu_a_width_is_judged_by_more_rounds(tries, drafts):
    """The first three of each width prepare kernels: the drafter's, the target's, and those of a longer cache."""
    ran = Counter()

    def seconds(B, tokens, drafts):
        ran[tokens] += 1
        return by_pass(B, tokens, drafts) + 9 * (drafts and ran[tokens] < 4)

    policy = BatchPolicy(MOST, RoundCosts(tries))
    assert (play([row(0.8) for _ in range(8)], seconds, 40, policy)[-1] == [7] * 8) == drafts


def test_a_row_looks_up_beside_plain_ones_only_for_more_than_they_lose():
    """A round in which one looks up begins after the one before it was read."""
    for n, looks_up in ((2, True), (8, False)):
        policy, rows = BatchPolicy(MOST), [row(0.0) for _ in range(n)]
        for _ in range(3):
            policy.observe(rows, 0, 1.0)
        assert policy.plan(rows) == 0
        # The first promise 2.1 tokens more at most, the others 5.6.
        assert (rows[0].prompt_lookup_width(0, [0.7] * 7) > 0) == looks_up and rows[0].prompt_lookup_width(0, [0.95] * 7) == 7


def test_a_width_is_not_tried_if_another_one_costs_far_more_with_many_rows_than_with_one():
    rows = [row(0.6, CostModel(1.0, 0.2, 0.0, {1: 1.0, 3: 1.05, 7: 1.1})) for _ in range(8)]
    seen = [drafts[0] for drafts in play(rows, lambda B, tokens, drafts: 1 + 9 * drafts)]
    # Twice, as the first round may have prepared kernels.
    assert seen.count(7) == 2 and not {1, 3} & {*seen}


@pytest.mark.parametrize(("rate", "is_tried"), [(0.62, False), (0.8, True)])
def test_a_width_that_never_ran_is_not_tried_for_a_few_hundredths(rate, is_tried):
    """At 0.62 seven drafts promise 1.02 times what three do, at 0.8 1.26 times."""
    policy, alone = BatchPolicy(MOST), CostModel(1.0, 0.2, 0.0, {1: 1.02, 3: 1.05, 7: 1.2})

    def seconds(B, tokens, drafts):
        return {0: 1.0, 1: 1.22, 3: 1.25, 7: 1.4}[tokens // B - 1]

    assert [3] * 8 in play([row(0.5, alone) for _ in range(8)], seconds, 20, policy)
    assert ([7] * 8 in play([row(rate, alone) for _ in range(8)], seconds, 20, policy)) == is_tried


def test_a_row_whose_drafts_are_refused_drafts_nothing_beside_others_that_gain():
    def seconds(B, tokens, drafts):
        return 1.0 + tokens / 16

    seen = play([row(0.9), row(0.9), row(0.02)], seconds)
    assert sum(drafts[0] > 0 for drafts in seen[-24:]) >= 22 and sum(drafts[2] > 0 for drafts in seen[-24:]) <= 2


def test_a_width_that_one_row_cannot_gain_by_is_not_tried_with_many():
    dear = CostModel(1.0, 3.0, 0.0, {1: 3.0, 3: 5.0, 7: 9.0})
    assert play([row(0.5, dear) for _ in range(4)], by_tokens) == [[0] * 4] * 60


def test_fixed_rows_keep_their_width_and_rows_that_wait_do_not_draft():
    fixed, waiting, free = RowPolicy(FixedDraftLength(3)), row(0.9), row(0.9)
    fixed.in_company, waiting.waits = True, True
    BatchPolicy(MOST).plan([fixed, waiting, free])
    assert (fixed.next_length(), waiting.next_length()) == (3, 0)


def test_a_row_of_fixed_width_does_not_keep_poor_rows_drafting():
    policy, cheap = BatchPolicy(MOST), CostModel(1.0, 0.2, 0.0, {1: 1.0, 3: 1.05, 7: 1.1})
    # Plain rounds are known from an earlier batch.
    play([row(0.0, cheap) for _ in range(4)], lambda *about: 1.0, 4, policy)
    rows = [row(0.6, cheap), row(0.6, cheap), row(0.02, cheap), fixed_row(3)]
    seen = play(rows, lambda B, tokens, drafts: 1.0 + 2.0 * (tokens > B + 3), 300, policy)
    assert sum(drafts[2] > 0 for drafts in seen) <= 12 and {drafts[3] for drafts in seen} == {3}


def test_rows_draft_beside_one_of_fixed_width_where_it_gains_and_know_what_a_token_costs():
    rows = [row(0.9), row(0.9), fixed_row(3)]
    seen = play(rows, lambda B, tokens, drafts: 1.0 + 0.01 * tokens, 300)
    assert sum(drafts[0] > 0 for drafts in seen) >= 280 and rows[0].price > 0


def test_rounds_beside_rows_of_fixed_width_say_nothing_of_rounds_without_them():
    policy = BatchPolicy(MOST)
    policy.observe([row(0.9), row(0.9), fixed_row(3)], 0, 9.0)
    assert policy.costs.seconds(3, 0) is None
    policy.observe([row(0.9), row(0.9), row(0.9)], 0, 1.0)
    assert policy.costs.seconds(3, 0) == 1.0


def test_no_row_looks_up_in_the_rounds_that_say_what_a_width_costs():
    rows, policy, looked = [row(0.8), row(0.8)], BatchPolicy(MOST), []
    for _ in range(10):
        play(rows, by_pass, 1, policy)
        looked.append(rows[0].prompt_lookup_width(0, [0.99] * 7) > 0)
    # Three plain rounds and three of the drafter.
    assert looked == [False] * 6 + [True] * 4


def test_an_id_of_the_text_is_not_charged_with_the_drafters_pass():
    policy, rows = BatchPolicy(MOST), [row(0.0), row(0.0)]
    for _ in range(3):
        for width in (0, 1, 7):
            policy.observe(rows, width, 1.0 + (2.0 + 0.02 * width if width else 0.0))
    assert policy.plan(rows) == 0
    # 0.02 seconds of two rows, of which the batch makes two tokens a second.
    assert rows[0].price == pytest.approx(0.02) and rows[0].prompt_lookup_width(0, [0.9] * 7) == 7


def test_costs_of_other_numbers_of_rows_are_a_guess_until_seen():
    costs = RoundCosts()
    costs.add(4, 0, 1.0)
    assert costs.seconds(4, 0) == 1.0 and costs.seconds(4, 7) is None
    assert costs.seconds(8, 0) == pytest.approx(1.5)
    # Of the first three the fastest counts. Then one odd round moves it little, a fast one at once.
    costs.add(4, 0, 50.0)
    costs.add(4, 0, 1.2)
    assert costs.seconds(4, 0) == 1.0
    costs.add(4, 0, 50.0)
    assert costs.seconds(4, 0) == pytest.approx(1.25)
    costs.add(4, 0, 0.2)
    assert costs.seconds(4, 0) == 0.2


def test_a_round_is_never_taken_to_cost_more_than_one_of_more_rows():
    costs = RoundCosts()
    costs.add(3, 0, 9.0)
    costs.add(4, 0, 2.0)
    costs.add(2, 0, 1.0)
    assert [costs.seconds(rows, 0) for rows in (2, 3, 4)] == [1.0, 2.0, 2.0]
    # A guess neither.
    costs.add(8, 0, 2.2)
    assert costs.seconds(6, 0) == 2.2


def test_plain_rounds_that_other_work_has_made_slow_do_not_leave_rows_drafting_for_good():
    """Each token costs the same, so that drafts never pay; while the first rounds ran, the machine had other work."""
    rounds = iter(range(1000))

    def seconds(B, tokens, drafts):
        return by_tokens(B, tokens, drafts) * (8 if next(rounds) < 12 and not drafts else 1)

    seen = play([row(0.6) for _ in range(4)], seconds, rounds=300)
    assert sum(any(drafts) for drafts in seen[150:]) <= 2 and sum(any(drafts) for drafts in seen) <= 64


def by_block(B, tokens, drafts):
    """A CPU: a draft costs as much as a plain round or two. Milliseconds of `tiny`."""
    return 10 + 0.8 * B + (20 + 1.5 * tokens) * drafts


@pytest.mark.parametrize(("seconds", "gains"), [(by_block, False), (by_pass, True)])
def test_what_is_chosen_stays_while_other_work_makes_rounds_slower_and_faster_again(seconds, gains):
    rounds, chance = iter(range(10_000)), random.Random(1)

    def loaded(B, tokens, drafts):
        i = next(rounds)
        # Up to 6 times as slow for a while, and a fifth of rounds once more twice.
        slow = 1 + 5 * min(max(i % 400 - 100, 0) / 40, 1) * (i % 400 < 300)
        return seconds(B, tokens, drafts) * slow * (2 if chance.random() < 0.2 else 1)

    seen = [any(drafts) for drafts in play([row(0.7) for _ in range(4)], loaded, rounds=1200)]
    assert (sum(seen) > 1000) if gains else (sum(seen) <= 10), sum(seen)


def test_rows_that_gain_by_drafts_run_a_plain_round_now_and_then():
    seen = play([row(0.8) for _ in range(8)], by_pass, rounds=200)
    plain = [i for i, drafts in enumerate(seen) if not any(drafts)]
    # Four in a row, three times.
    assert plain[:3] == [0, 1, 2] and [b - a for a, b in pairwise(plain[3:])] == [1, 1, 1, 61, 1, 1, 1, 61, 1, 1, 1]


def test_a_batch_that_rows_leave_goes_on_without_measuring_plain_rounds_again():
    rows, policy = [row(0.8) for _ in range(8)], BatchPolicy(MOST)
    seen = [drafts for n in range(8, 1, -1) for drafts in play(rows[:n], by_pass, 5, policy)]
    assert [any(drafts) for drafts in seen] == [False] * 3 + [True] * 32
    # With more rows than ever it does measure.
    assert [any(drafts) for drafts in play([row(0.8) for _ in range(9)], by_pass, 5, policy)] == [False] * 3 + [True] * 2


def test_a_batchs_rounds_say_nothing_of_what_one_row_costs():
    one = row(0.5)
    told = one.own.cost_model.rounds_since_plain
    one.width = 3
    one.observe(3, 2, False, 9.0, True)
    assert one.own.cost_model.rounds_since_plain == told and one.own.acceptance.counts[0][0] > 0


def test_ids_of_the_text_are_verified_as_far_as_they_gain():
    free, sure = row(0.2), [0.95] * 7
    free.price = 0.0
    assert free.prompt_lookup_width(0, sure) == 7
    # At this price a token must be likely: the seventh is right in 0.7 of rounds.
    free.price = 0.8
    assert 0 < free.prompt_lookup_width(0, sure) < 7
    free.price = 1.0
    assert free.prompt_lookup_width(0, sure) == 0
