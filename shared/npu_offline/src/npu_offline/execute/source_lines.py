"""The lines of a kernel's source that access an argument, from its TTIR, whose operations know their places."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..launches import RESERVED, LaunchRecord
from ..module.places import places_of
from ..toolchain.compilation import front_end_of

LOAD, STORE, UPDATE = 0, 1, 2  # as in runtime.h
_ACCESS = re.compile(r"(?:\w|%|:|=| )*?tt\.(load|store|atomic_rmw|atomic_cas)\b[^%]*(%\w+)")
_MASKS = {LOAD: 1, STORE: 2, UPDATE: 2}  # which operand a mask is
_KINDS = {"load": LOAD, "store": STORE, "atomic_rmw": UPDATE, "atomic_cas": UPDATE}
_ASSIGNED = re.compile(r"\s*(%\w+)(?::\d+)? = (?:\w|\.)+(.*)")
_CARRIED = re.compile(r"(%\w+) = (%\w+)(?:#\d+)?")
_POINTER = re.compile(r"!tt\.ptr|: <tensor")  # the types of pointers, and of block pointers that are made or moved
_PLACE = re.compile(r"loc\((#loc\d*)\)\s*$")
_ELEMENTS = re.compile(r"memref\.load .*\n *%\S+ = tensor\.insert ")  # of a tile that is loaded one by one
_NARROW_INDEX = re.compile(r"tt\.addptr .*, (?:tensor<[\dx]*xi(?:8|16)>|i8|i16) ")
_MOST = 4  # places that are named


class KernelSource:
    """What the TTIR of a kernel says of its accesses; nothing where Triton makes no TTIR of it.

    Attributes:
        text: the TTIR.
    """

    def __init__(self, record: LaunchRecord) -> None:
        """
        Args:
            record: a launch of the kernel.
        """
        self._names = [name for name in record.signature if name not in record.constants]
        try:
            _, self.text, self._linalg = front_end_of(record)
        except Exception:
            self.text = self._linalg = ""

    def lines(self, argument: str, access: int) -> str:
        """Where the kernel accesses an argument: "kernels.py:27:9", or several places; nothing where that is not known.

        Args:
            argument: a pointer's name.
            access: `LOAD`, `STORE` or `UPDATE`.
        """
        places = places_of(self.text)
        found = {str(places.get(place, "")) for place in map(_place, self._accesses(argument, access))} - {""}
        return _listed(sorted(found, key=lambda place: (place.partition(":")[0], *map(int, place.split(":")[1:]))))

    def has_mask(self, argument: str, access: int) -> bool:
        """Whether every access of the kernel to an argument has a mask."""
        found = self._accesses(argument, access)
        return bool(found) and all(len(re.findall(r"%\w+", _operands(line))) > _MASKS[access] for line in found)

    def loses_mask(self, argument: str) -> bool:
        """Whether a load of an argument copies whole tiles, or takes every element of one, in the Linalg IR."""
        memory = f"%arg{self._names.index(argument) + RESERVED}"
        tiles = re.findall(rf"(%\S+) = memref\.reinterpret_cast {memory} ", self._linalg)
        elements = "".join(_ELEMENTS.findall(self._linalg))
        return any(f"memref.copy {tile}," in self._linalg or f"memref.load {tile}[" in elements for tile in tiles)

    def only_stores(self, argument: str) -> bool:
        """Whether the kernel stores to an argument, always with a mask, and does not load from it."""
        return not self._accesses(argument, LOAD) and self.has_mask(argument, STORE)

    def has_narrow_index(self) -> bool:
        """Whether an address is computed from integers of 8 or 16 bits."""
        return bool(_NARROW_INDEX.search(self.text))

    def swaps(self) -> bool:
        """Whether the kernel has a compare-and-swap."""
        return "tt.atomic_cas" in self.text

    def _accesses(self, argument: str, access: int) -> list[str]:
        return list(_accesses(self.text, f"%arg{self._names.index(argument)}", access))


def _place(operation: str) -> str:
    found = _PLACE.search(operation)
    return found[1] if found else ""


def _operands(line: str) -> str:
    return line.partition("tt.")[2].partition(" : ")[0]


def _listed(places: list[str]) -> str:
    shown = places[:_MOST] + (["others"] if len(places) > _MOST else [])
    return " or ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def _accesses(text: str, pointer: str, access: int) -> Iterable[str]:
    """The operations that access what a parameter points to."""
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
        found = _ACCESS.match(line)
        if found and found[2] in derived and _KINDS[found[1]] == access:
            yield line
