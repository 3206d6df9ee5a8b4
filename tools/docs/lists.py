"""Lists as GitHub reads them, for Python's Markdown, which wants four spaces before all that belongs to an item."""

from __future__ import annotations

import re
from collections.abc import Iterator

_ITEM = re.compile(r"(?:-|\d+\.) ")


def indent(text: str) -> str:
    """The text with what belongs to an item of a list four spaces in, where it was as many as its marker is long."""
    return "\n".join(_lines(text.split("\n")))


def _lines(lines: list[str]) -> Iterator[str]:
    width, fenced, before, parted = 0, False, "", False  # parted: the item has a blank line inside
    for line in lines:
        inside = bool(width) and line.startswith(" " * width)
        if not inside and not fenced:
            found = _ITEM.match(line)
            if found:
                if parted and before.strip():
                    yield ""  # what follows a paragraph of an item without one is read as its next line
                width, parted = len(found[0]), False
            elif line.strip():
                width, parted = 0, False
            else:
                parted = bool(width)
        if line.lstrip().startswith("```"):
            fenced = not fenced
        before = line
        yield " " * 4 + line[width:] if inside else line
