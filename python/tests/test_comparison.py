"""The result of a comparison."""

import math

from baton._comparison import Difference, comparison

EQUAL = Difference("loss", 0.0, 0.0)
SMALL = Difference("grad.fc.weight", 1e-8, 2e-7)
LARGE = Difference("grad.conv.weight", 0.5, 1e-9)
NAN = Difference("output", math.nan, math.nan)


def test_the_worst_comes_first_and_nan_is_worse_than_any_number():
    found = comparison([EQUAL, SMALL, NAN, LARGE], atol=0.0, threads=1, switched_off=[])
    assert [row.name for row in found.rows] == ["output", "grad.conv.weight", "grad.fc.weight", "loss"]
    assert found.worst is NAN


def test_equal_rows_keep_their_order():
    rows = [Difference(name, 0.0, 0.0) for name in "cab"]
    assert comparison(rows, 0.0, 1, []).rows == tuple(rows)


def test_equal_means_within_the_tolerance_and_never_nan():
    assert comparison([EQUAL], 0.0, 1, []).is_equal
    assert not comparison([EQUAL, SMALL], 0.0, 1, []).is_equal
    assert comparison([EQUAL, SMALL], 1e-8, 1, []).is_equal
    assert not comparison([NAN], math.inf, 1, []).is_equal


def test_the_table_shows_the_worst_rows_and_what_was_switched_off():
    rows = [Difference(f"grad.layer{number}.weight", number * 1e-9, 0.0) for number in range(12)]
    text = str(comparison(rows, 0.0, 2, ["a.drop", "b.drop", "c.drop", "d.drop"]))
    assert text.splitlines()[:4] == [
        "DIFFERENT: 12 tensors, at most 0 apart allowed, 2 threads",
        "without 4 random layers: a.drop, b.drop, c.drop and 1 more",
        "tensor                absolute   relative",
        "grad.layer11.weight    1.1e-08    0.0e+00",
    ]
    assert text.endswith("… and 2 more, no farther apart")
    assert len(text.splitlines()) == 14


def test_an_equal_result_says_so():
    text = str(comparison([EQUAL], 0.0, 1, ["drop"]))
    assert text.startswith("equal: 1 tensor, at most 0 apart allowed, 1 thread\nwithout 1 random layer: drop\n")
