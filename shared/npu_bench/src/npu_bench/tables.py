"""Tables for a terminal and for Markdown."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_PIPED_WIDTH = 240  # columns where the output is not a terminal, so that nothing is cut


@dataclass(frozen=True)
class Table:
    """A title, column headers and rows of text; the first `labels` columns are words, the others numbers."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1


def number(value: float | None, digits: int = 3) -> str:
    """`value` with so many significant digits, without an exponent; a dash for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, decimals)}f}"


def markdown(table: Table) -> str:
    """The table in Markdown, its title in bold above it."""
    rule = ["---" if i < table.labels else "--:" for i in range(len(table.headers))]
    lines = [_line(table.headers), _line(rule), *(_line(row) for row in table.rows)]
    return f"**{table.title}**\n\n" + "\n".join(lines) + "\n"


def show(table: Table) -> None:
    """Print the table, with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        print(plain(table))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPED_WIDTH
    rich_table = RichTable(title=Text(table.title, style="bold"), title_justify="left")
    for i, header in enumerate(table.headers):
        rich_table.add_column(Text(header), justify="left" if i < table.labels else "right", overflow="fold")
    for previous, row in zip([None, *table.rows], table.rows, strict=False):
        if table.labels > 1 and previous is not None and previous[0] != row[0]:
            rich_table.add_section()
        wrong = any(cell.startswith(("WRONG", "failed")) for cell in row)
        rich_table.add_row(*map(Text, row), style="red" if wrong else None)
    Console(width=width).print(rich_table)


def plain(table: Table) -> str:
    """The table with its columns aligned by blanks."""
    lines = [table.headers, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.headers))]

    def aligned(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(w) if i < table.labels else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([table.title, aligned(table.headers), *(aligned(row) for row in table.rows), ""])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"
