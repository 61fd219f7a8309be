import itertools

import mlx.core as mx
import pytest

from dflash_mlx.accept import accept_match


def accept_rows(draft, target):
    """The rule by hand, one row at a time."""
    n = next((i for i, (d, t) in enumerate(zip(draft, target, strict=False)) if d != t), len(draft))
    return n, target[n]


def test_accept_match_stops_at_the_first_mismatch():
    accepted, bonus = accept_match(mx.array([[4, 5, 6]]), mx.array([[4, 5, 9, 6]]))
    assert (accepted.tolist(), bonus.tolist()) == ([2], [9])


def test_accept_match_takes_nothing_after_a_mismatch_that_matches_again():
    accepted, bonus = accept_match(mx.array([[1, 5, 6]]), mx.array([[4, 5, 6, 7]]))
    assert (accepted.tolist(), bonus.tolist()) == ([0], [4])


def test_accept_match_equals_the_rule_by_hand_for_every_small_case():
    cases = list(itertools.product(itertools.product(range(2), repeat=3), itertools.product(range(2), repeat=4)))
    accepted, bonus = accept_match(mx.array([d for d, _ in cases]), mx.array([t for _, t in cases]))
    assert accepted.dtype == mx.int32
    assert list(zip(accepted.tolist(), bonus.tolist(), strict=True)) == [accept_rows(*case) for case in cases]


def test_accept_match_without_drafts_gives_the_targets_choice():
    accepted, bonus = accept_match(mx.zeros((2, 0), dtype=mx.int32), mx.array([[3], [8]]))
    assert (accepted.tolist(), bonus.tolist()) == ([0, 0], [3, 8])


@pytest.mark.parametrize("n", [2, 3, 5])
def test_accept_match_needs_one_target_choice_more_than_drafts(n):
    with pytest.raises(ValueError, match=f"target is .1, {n}. for drafts .1, 3.; it must have one choice more"):
        accept_match(mx.zeros((1, 3), dtype=mx.int32), mx.zeros((1, n), dtype=mx.int32))
