"""Where operations stand in the source: TTIR's text has a location behind each operation."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

_DEFINED = re.compile(r"^(#loc\d*) = loc\((.*)\)\s*$", re.MULTILINE)
_TRITON = "/triton/language/"
_FILE = re.compile(r'^"([^"]+)":(\d+):\d+$')
_OPERATION = re.compile(r'^\s*(?:%[^=]+ = )?"?(\w+\.[\w.]+)"?\b.*loc\((#loc\d*)\)\s*$', re.MULTILINE)


def places_of(text: str) -> dict[str, tuple[str, int]]:
    """File and line of each location of a TTIR text; of a call the line in the helper, unless that is Triton's own."""
    defined = dict(_DEFINED.findall(text))

    def resolved(place: str) -> tuple[str, int]:
        direct = _FILE.match(place)
        if direct:
            return direct[1], int(direct[2])
        found = [resolved(defined[inner]) for inner in re.findall(r"#loc\d*", place) if inner in defined]
        known = [each for each in found if each[0]]
        return next((each for each in known if _TRITON not in each[0]), known[0] if known else ("", 0))

    return {name: resolved(place) for name, place in defined.items()}


def lines_by_operation(text: str) -> dict[str, list[str]]:
    """By an operation's name, the lines of all operations of that name in their order: "kernels.py, line 7", or nothing.

    Operations with regions are left out: their location stands behind their end.
    """
    places, found = places_of(text), defaultdict(list)
    for name, place in _OPERATION.findall(text):
        file, line = places.get(place, ("", 0))
        found[name].append(f"{Path(file).name}, line {line}" if file else "")
    return dict(found)
