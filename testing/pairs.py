"""Few combinations of options that have every pair of values of two options among them, instead of all combinations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any


def all_pairs(**options: Sequence[Any]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Arguments of `pytest.mark.parametrize`: the options' names, and rows of values.

    An option whose name is of several, as "rows, width", has tuples for values, and counts as one.

    Most faults that depend on options depend on one or two of them. The rows are the same at each call: each begins with the
    first pair that no row has yet, and takes for every other option the value that adds most pairs.
    """
    names, values = list(options), [list(each) for each in options.values()]
    missing = {  # (option, value's place), (option, value's place), in order
        ((i, a), (j, b)): None
        for i, j in combinations(range(len(names)), 2)
        for a in range(len(values[i]))
        for b in range(len(values[j]))
    }
    rows: list[list[Any]] = []
    if len(names) == 1:
        rows = [[value] for value in values[0]]
    while missing:
        chosen = dict(next(iter(missing)))
        for i in range(len(names)):
            if i not in chosen:
                chosen[i] = max(
                    range(len(values[i])),
                    key=lambda a: (sum(tuple(sorted(((i, a), other))) in missing for other in chosen.items()), -a),  # noqa: B023
                )
        for pair in combinations(sorted(chosen.items()), 2):
            missing.pop(pair, None)
        rows.append([values[i][chosen[i]] for i in range(len(names))])
    every = tuple(name for option in names for name in option.split(", "))
    return every, [tuple(_flat(names, row)) for row in rows]


def _flat(names: Sequence[str], row: Sequence[Any]) -> Iterator[Any]:
    for name, value in zip(names, row, strict=True):
        yield from value if ", " in name else (value,)
