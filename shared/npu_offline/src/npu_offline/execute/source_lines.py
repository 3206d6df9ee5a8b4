"""The lines of a kernel's source that access an argument, from its TTIR, whose operations know their places."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from ..launches import LaunchRecord
from ..module.places import places_of
from ..toolchain.compilation import front_end_of

LOAD, STORE, UPDATE = 0, 1, 2  # as in runtime.h
_ACCESS = re.compile(r"(?:\w|%|:|=| )*?tt\.(load|store|atomic_rmw|atomic_cas)\b[^%]*(%\w+)")
_KINDS = {"load": LOAD, "store": STORE, "atomic_rmw": UPDATE, "atomic_cas": UPDATE}
_ASSIGNED = re.compile(r"\s*(%\w+)(?::\d+)? = (?:\w|\.)+(.*)")
_CARRIED = re.compile(r"(%\w+) = (%\w+)(?:#\d+)?")
_POINTER = re.compile(r"!tt\.ptr|: <tensor")  # the types of pointers, and of block pointers that are made or moved
_PLACE = re.compile(r"loc\((#loc\d*)\)\s*$")
_MOST = 4  # lines that are named


def lines_of(record: LaunchRecord, argument: str, access: int) -> str:
    """Where a kernel accesses an argument: "kernels.py, line 27", or several lines; nothing where that is not known.

    Args:
        record: a launch of the kernel.
        argument: a pointer's name.
        access: `LOAD`, `STORE` or `UPDATE`.
    """
    try:
        text = front_end_of(record)[1]
    except Exception:
        return ""
    names = [name for name in record.signature if name not in record.constants]
    places = places_of(text)
    found = {places.get(place, ("", 0)) for place in _accesses(text, f"%arg{names.index(argument)}", access)} - {("", 0)}
    files: dict[str, list[int]] = defaultdict(list)
    for file, line in sorted(found):
        files[file].append(line)
    return "; ".join(f"{Path(file).name}, {_listed(lines)}" for file, lines in files.items())


def _listed(lines: list[int]) -> str:
    shown = [str(line) for line in lines[:_MOST]] + (["others"] if len(lines) > _MOST else [])
    return f"line {shown[0]}" if len(shown) == 1 else f"lines {', '.join(shown[:-1])} or {shown[-1]}"


def _accesses(text: str, pointer: str, access: int) -> Iterable[str]:
    """The places of operations that access what a parameter points to."""
    lines, derived, size = text.splitlines(), {pointer}, 0
    while len(derived) > size:  # pointers that loops carry are followed from line to line
        size = len(derived)
        for line in lines:
            derived |= {name for name, start in _CARRIED.findall(line) if start in derived and "iter_args" in line}
            found = _ASSIGNED.match(line)
            if (
                found
                and ("!tt.ptr" in found[2] or ": <tensor" in found[2])
                and derived & set(re.findall(r"%\w+", found[2].partition(" : ")[0]))
            ):
                derived.add(found[1])
    for line in lines:
        found, place = _ACCESS.match(line), _PLACE.search(line)
        if found and place and found[2] in derived and _KINDS[found[1]] == access:
            yield place[1]
