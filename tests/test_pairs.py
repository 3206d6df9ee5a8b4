"""Every pair of values of two options is in a row, in far fewer rows than there are combinations."""

from itertools import combinations
from math import prod

import pytest

from testing.pairs import all_pairs

OPTIONS = [
    {"a": "xy"},
    {"a": "xy", "b": (1, 2, 3)},
    {"a": "xy", "b": (1, 2, 3), "c": (None, True), "d": range(4)},
    dict.fromkeys("abcdefgh", (0, 1)),
    {"a": (1,), "b": (2,), "c": (3,)},
    {"a": [[1], [2]], "b": [{}, {"c": 1}], "c": "xyz"},  # values without a hash
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_pair_is_in_a_row(options):
    names, rows = all_pairs(**options)
    assert names == tuple(options)
    for (i, one), (j, other) in combinations(enumerate(options.values()), 2):
        assert all(any(row[i] == a and row[j] == b for row in rows) for a in one for b in other)
    if len(options) == 1:
        assert [row[0] for row in rows] == list(options["a"])


def test_an_option_of_several_names_is_one():
    names, rows = all_pairs(**{"rows, width": [(1, 2), (3, 4)], "dtype": "ab"})
    assert names == ("rows", "width", "dtype")
    assert sorted(rows) == [(1, 2, "a"), (1, 2, "b"), (3, 4, "a"), (3, 4, "b")]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_are_few_and_the_same_every_time(options):
    _, rows = all_pairs(**options)
    lengths = sorted(map(len, options.values()))
    assert len(rows) >= prod(lengths[-2:])
    assert len(rows) <= min(prod(lengths), prod(lengths[-2:]) + 2 * len(options))
    assert all_pairs(**options)[1] == rows
