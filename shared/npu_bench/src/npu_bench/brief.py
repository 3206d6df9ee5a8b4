"""A run in brief: a row for each case and mode, and a column for each provider; the least number of a row is bold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .report import header
from .runner import Row, Run
from .tables import Table, markdown, number
from .timing import Quantiles

_WRONG, _MISSING = "wrong", "-"
_COLUMNS: tuple[tuple[str, Callable[[Row], Quantiles | None]], ...] = (
    ("device ms", lambda row: row.device_ms),
    ("wall ms", lambda row: row.wall_ms),
    ("peak MiB above the inputs", lambda row: row.memory_mib),
)


def brief_document(run: Run) -> str:
    """The run in Markdown: device time beside the floor, wall time and memory, a table each."""
    tables = [_table(run, name, value) for name, value in _COLUMNS]
    return "\n".join([f"{header(run)}.\n", *map(markdown, tables)])


def _table(run: Run, title: str, value: Callable[[Row], Quantiles | None]) -> Table:
    modes = list(dict.fromkeys(row.mode for row in run.rows))
    known = {(row.case.name, row.provider, row.mode): row for row in run.rows}
    names = [name for name in dict.fromkeys(row.provider for row in run.rows) if _ran(run.rows, name)]
    floors = ["floor"] if value is _COLUMNS[0][1] else []
    lines: list[list[str]] = []
    for case in run.sweep.cases:
        label = case.name
        for mode in modes:
            rows = [known.get((case.name, name, mode)) for name in names]
            cells = _cells(rows, value)
            if len(modes) > 1 and set(cells) == {_MISSING}:
                continue
            lines.append([label, mode, *cells, *[number(_floor(rows)) for _ in floors]])
            label = ""
    if len(modes) == 1:
        return Table(f"{title}, {modes[0]}", ["case", *names, *floors], [[line[0], *line[2:]] for line in lines])
    return Table(title, ["case", "pass", *names, *floors], lines, labels=2)


def _ran(rows: Sequence[Row], provider: str) -> bool:
    return any(row.provider == provider and not row.verdict.startswith("unavailable") for row in rows)


def _cells(rows: Sequence[Row | None], value: Callable[[Row], Quantiles | None]) -> list[str]:
    """Of the providers; the least in bold, where there are several."""
    found = [None if row is None else value(row) for row in rows]
    numbers = [each.p50 for each in found if each is not None]
    least = number(min(numbers)) if len(numbers) > 1 else ""
    cells = [_word(row) if each is None else number(each.p50) for row, each in zip(rows, found, strict=True)]
    return [f"**{cell}**" if cell == least else cell for cell in cells]


def _word(row: Row | None) -> str:
    return _WRONG if row is not None and row.verdict.startswith("WRONG") else _MISSING


def _floor(rows: Sequence[Row | None]) -> float | None:
    """Of one case and mode: the same for every provider that was measured."""
    return next((row.floor_ms for row in rows if row is not None and row.floor_ms is not None), None)
