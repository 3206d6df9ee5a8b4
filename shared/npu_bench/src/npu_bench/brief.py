"""A run in brief: a row for each case, a column for each provider, and in a cell a number for each mode."""

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
    modes = " / ".join(_modes(run))
    tables = [_table(run, f"{name}, {modes}", value) for name, value in _COLUMNS]
    return "\n".join([f"{header(run)}.\n", *map(markdown, tables)])


def _table(run: Run, title: str, value: Callable[[Row], Quantiles | None]) -> Table:
    modes = _modes(run)
    known = {(row.case.name, row.provider, row.mode): row for row in run.rows}
    names = [name for name in dict.fromkeys(row.provider for row in run.rows) if _ran(run.rows, name)]
    has_floor = value is _COLUMNS[0][1]
    lines = []
    for case in run.sweep.cases:
        rows = [[known.get((case.name, name, mode)) for mode in modes] for name in names]
        cells = [_cell(each, value) for each in rows]
        if has_floor:
            cells.append(_joined([number(_floor(each)) for each in zip(*rows, strict=True)]))
        lines.append([case.name, *cells])
    return Table(title, ["case", *names, *["floor"] * has_floor], lines)


def _modes(run: Run) -> list[str]:
    return list(dict.fromkeys(row.mode for row in run.rows))


def _ran(rows: Sequence[Row], provider: str) -> bool:
    return any(row.provider == provider and not row.verdict.startswith("unavailable") for row in rows)


def _cell(rows: Sequence[Row | None], value: Callable[[Row], Quantiles | None]) -> str:
    return _joined([_number(row, value) for row in rows])


def _floor(rows: Sequence[Row | None]) -> float | None:
    """Of one case and mode: the same for every provider that was measured."""
    return next((row.floor_ms for row in rows if row is not None and row.floor_ms is not None), None)


def _number(row: Row | None, value: Callable[[Row], Quantiles | None]) -> str:
    if row is None:
        return _MISSING
    found = value(row)
    if found is None:
        return _WRONG if row.verdict.startswith("WRONG") else _MISSING
    return number(found.p50)


def _joined(numbers: Sequence[str]) -> str:
    words = set(numbers) & {_WRONG, _MISSING}
    return numbers[0] if len(numbers) == 1 or (len(set(numbers)) == 1 and words) else " / ".join(numbers)
