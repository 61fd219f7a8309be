"""From a table of measured times to who serves each row count: no device, no clock."""

import pytest

from dflash_mlx.kernels.launch import Kernel
from dflash_mlx.kernels.verdicts import ROWS, Candidate, Measured, tried_rows, verdicts

A, B = (Kernel(name, ("x",), ("y",), "") for name in "AB")
PLANS = {c.name: c.family for c in (Candidate(A, (("columns", 2),)), Candidate(A, (("columns", 4),)), Candidate(B))}


def table(stock_s, **seconds):
    """Times by row count, in the order of `ROWS` as far as given; a name's blank is an underscore."""
    measured = {}
    for i, rows in enumerate(ROWS[: len(stock_s)]):
        of = {name.replace("_", " "): times[i] for name, times in seconds.items()}
        measured[rows] = Measured(PLANS, stock_s[i], of)
    return measured


def test_each_row_count_has_its_own_verdict():
    """A text that wins by far at 16 rows does not serve the one row at which it loses."""
    found = verdicts(table((10, 10, 20, 40, 80), B=(11, 11, 12, 13, 14)))
    assert found == {4: "B", 8: "B", 16: "B"}


@pytest.mark.parametrize("took, serves", [(10.2, True), (10.3, True), (10.31, False), (9, True)])
def test_one_row_within_3_percent_is_served_where_many_rows_gain(took, serves):
    assert (1 in verdicts(table((10, 20), B=(took, 10)))) is serves
    # Two rows within 3 % are not: what they gain is nothing.
    assert 2 not in verdicts(table((10, 20, 20), B=(9, took * 2.01, 10))) or took < 10


def test_a_slack_of_one_row_alone_is_no_gain():
    assert verdicts(table((10, 20), B=(10.1, 30))) == {}


def test_one_family_serves_and_at_each_count_its_quickest_plan():
    given = table(
        (10, 10, 20, 20, 20), A_columns_2=(10.4, 9, 12, 14, 15), A_columns_4=(10.2, 9, 11, 13, 30), B=(9, 9, 10.5, 20, 21)
    )
    assert verdicts(given) == {1: "A columns 4", 2: "A columns 2", 4: "A columns 4", 8: "A columns 4", 16: "A columns 2"}


def test_an_option_that_changes_the_order_of_sums_is_another_family():
    few, many = (Candidate(A, (("columns", 4), ("simdgroups", n)), order=("simdgroups",)) for n in (4, 8))
    assert few.family == "A simdgroups 4" and many.family == "A simdgroups 8" and few.name == "A columns 4 simdgroups 4"
    families = {few.name: few.family, many.name: many.family}
    times = {1: (5, 6), 16: (20, 8)}
    given = {rows: Measured(families, 30, {few.name: a, many.name: b}) for rows, (a, b) in times.items()}
    # By itself one row would be the other's.
    assert verdicts(given) == {1: many.name, 16: many.name}


def test_another_family_serves_the_counts_at_which_it_is_quicker_by_a_tenth():
    """The text for 4 rows is not that for 8; one row stays with those that it has among others."""
    given = table((10, 10, 13, 25, 40), A_columns_4=(8, 10, 10, 17, 33), B=(14, 14, 14, 14, 26))
    assert verdicts(given) == {4: "A columns 4", 8: "B", 16: "B"}
    # Asked for, and in exact runs, one family serves all.
    assert set(verdicts(given, forced=True).values()) == {"A columns 4"}
    assert verdicts(given, off={"B"}) == {rows: "A columns 4" for rows in (1, 4, 8, 16)}
    # 11.8 of 13 is less than a tenth.
    assert verdicts(table((10, 10, 13, 25), A_columns_4=(8, 10, 11.8, 24), B=(14, 14, 14, 14))) == {8: "B"}


def test_who_is_wrong_or_refused_at_one_count_serves_none():
    for fault in ({"wrong": {"B": "ids differ"}}, {"refused": {"B": "512 threads"}}):
        given = table((10, 20), A_columns_2=(9, 19), B=(1, 2)) | {4: Measured(PLANS, 10, **fault)}
        assert verdicts(given) == {1: "A columns 2", 2: "A columns 2"}
    assert verdicts(table((10,), B=(1,)), off={"B"}) == {}


def test_what_was_not_tried_or_took_too_long_is_stock_mlx():
    given = table((10, 20), B=(9, 9)) | {16: Measured(PLANS), 8: Measured(PLANS, crash="a process ended in its trial")}
    assert verdicts(given) == {1: "B", 2: "B"} and verdicts({}) == {}
    assert given[16].reason("B") == "not timed: its trial took too long, or it was off"
    assert given[8].reason("B") == "a process ended in its trial"


def test_asked_for_it_serves_faster_or_not():
    assert verdicts(table((10, 10), A_columns_2=(20, 20), B=(30, 30)), forced=True) == dict.fromkeys((1, 2), "A columns 2")


@pytest.mark.parametrize("rows, of", [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (16, 16), (40, 16)])
def test_a_count_between_two_tried_ones_takes_the_larger_ones_verdict(rows, of):
    assert tried_rows(rows, ROWS) == of
