"""Where a row of a table stands, for `explain`."""

from __future__ import annotations

from pathlib import Path


def line_of(file: str, table: str, index: int) -> str:
    """File, from the package's folder on, and line of row number `index` of a table of `Policy(...)` rows."""
    path = Path(file)
    lines = path.read_text().splitlines()
    start = next(number for number, text in enumerate(lines) if text.startswith(f"{table} = "))
    rows = [number for number, text in enumerate(lines, 1) if number > start and text.lstrip().startswith("Policy(")]
    return f"{'/'.join(path.parts[-3:])}:{rows[index]}"
