"""Where operations stand in the source: TTIR's text has a location behind each operation."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

_DEFINED = re.compile(r"^(#loc\d*) = loc\((.*)\)\s*$", re.MULTILINE)
_TRITON = "/triton/language/"
_PLACE = re.compile(r'^"([^"]+)":(\d+):(\d+)$')
_OPERATION = re.compile(r'^\s*(?:%[^=]+ = )?"?(\w+\.[\w.]+)"?\b.*loc\((#loc\d*)\)\s*$', re.MULTILINE)
_NAMED = re.compile(r"\b([\w.-]+\.py)(:\d+:\d+)")


class Place(NamedTuple):
    """A line and a column of a file, both from 1 on; as text `kernels.py:7:5`, or nothing where the file is not known."""

    file: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}:{self.column}" if self.file else ""


def places_of(text: str) -> dict[str, Place]:
    """The place of each location of a TTIR text; of a call the one in the helper, unless that is Triton's own."""
    defined = dict(_DEFINED.findall(text))

    def resolved(location: str) -> Place:
        direct = _PLACE.match(location)
        if direct:
            return Place(direct[1], int(direct[2]), int(direct[3]) + 1)
        found = [resolved(defined[inner]) for inner in re.findall(r"#loc\d*", location) if inner in defined]
        known = [each for each in found if each.file]
        return next((each for each in known if _TRITON not in each.file), known[0] if known else Place())

    return {name: resolved(location) for name, location in defined.items()}


def lines_by_operation(text: str) -> dict[str, list[str]]:
    """By an operation's name, the places of all operations of that name in their order: "kernels.py:7:5", or nothing.

    Operations with regions are left out: their location stands behind their end.
    """
    places, found = places_of(text), defaultdict(list)
    for name, location in _OPERATION.findall(text):
        found[name].append(str(places.get(location, "")))
    return dict(found)


def located(message: str, ttir: str, beside: Path | str = "") -> str:
    """A message about a kernel as editors read it, `FILE:LINE:COLUMN: message`, the file relative to the working directory.

    Args:
        message: the first place that it names is the message's; the kernel's own, where it names none.
        ttir: of the kernel; empty where Triton refuses it.
        beside: its file, where that is known.
    """
    places = places_of(ttir)
    named = _NAMED.search(message)
    if named:
        files = {Path(place.file).name: place.file for place in (Place(str(beside)), *places.values())}
        file, at = files.get(named[1], named[1]), named[2]
    else:
        place = places.get("#loc", Place())  # of the module: the kernel's first line
        file, at = place.file, f":{place.line}:{place.column}"
    if not file:
        return message
    path = Path(file).absolute()
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}{at}: {message.replace(f' ({named[0]})', '', 1) if named else message}"
