"""The memory of a launch: copies of the storages of its arguments, each at an address far from the others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..final.compare import Bounds, bytes_at
from ..storage import bounds_of

READ, WRITE, UPDATE = range(3)
_NOBODY, _SEVERAL = -1, -2  # programs
_CONFLICTS = (
    (WRITE, UPDATE),
    (READ, WRITE, UPDATE),
    (READ, WRITE),
)  # of each access: those of other programs that race with it
_APART = 48  # bits of the distance between storages: an address of one never reaches the next


class OutsideError(Exception):
    """An access outside of all arguments.

    Attributes:
        address: the first byte of it.
        at: its place among the addresses.
    """

    def __init__(self, address: int, at: int) -> None:
        super().__init__(address, at)
        self.address, self.at = address, at


class RacingError(Exception):
    """Two programs access one address, and not both by reading or both atomically."""


class Memory:
    """What a kernel reads and writes; the arguments themselves are left as they are.

    Attributes:
        program: with `races`, the number of the only program that is executed now.
    """

    def __init__(
        self, pointers: Mapping[str, Any], before: Mapping[Bounds, Any] | None = None, *, races: bool = False
    ) -> None:
        """
        Args:
            pointers: pointer arguments by name.
            before: bytes of each storage, as `bytes_at` has them; None for what they have now.
            races: refuse what races. Programs are then executed one by one.
        """
        self.program, self.races = 0, races
        self._pointers = dict(pointers)
        storages: dict[Bounds, None] = {}
        for value in pointers.values():
            bounds = bounds_of(value)
            storages.update(dict.fromkeys(zip(bounds[::2], bounds[1::2], strict=True)))
        self._storages = sorted(bounds for bounds in storages if bounds[1] > bounds[0])
        self._data = [(bytes_at(*each) if before is None else before[each]).numpy().copy() for each in self._storages]
        # Of each byte the program that has read, written and updated it.
        self._users = [np.full((3, data.size), _NOBODY, np.int32) if races else None for data in self._data]
        # Several tensors behind one pointer keep their real distances, and so do pointers that tensors hold.
        self._places = [*((low, low, high, i) for i, (low, high) in enumerate(self._storages))]
        self._places += [((i + 1) << _APART, *bounds, i) for i, bounds in enumerate(self._storages)]
        self._firsts = [first for first, *_ in self._places]

    def address_of(self, name: str) -> int:
        """Where an argument begins."""
        value = self._pointers[name]
        bounds, real = bounds_of(value), int(value.data_ptr())
        if len(bounds) > 2 or bounds[1] == bounds[0]:  # noqa: PLR2004 - one storage has two
            return real
        position = self._storages.index((bounds[0], bounds[1]))
        return ((position + 1) << _APART) + real - bounds[0]

    @staticmethod
    def is_real(address: int) -> bool:
        """Whether an address is one of this process, as pointers that tensors hold are."""
        return address < 1 << _APART

    def named(self, address: int) -> tuple[str, int, int]:
        """The argument that an address is nearest to, the byte of it that is meant, and the bytes of its storage."""
        if not self._storages:
            return "", address, 0
        first, low, high, _ = self._places[max(0, bisect_right(self._firsts, address + (1 << _APART - 1)) - 1)]
        if self.is_real(address):
            first, low, high, _ = self._places[max(0, bisect_right(self._firsts, address) - 1)]
        offset = address - first
        for name, value in self._pointers.items():
            if bounds_of(value)[:2] == [low, high]:
                return name, offset - (int(value.data_ptr()) - low), high - low
        return "", offset, high - low

    def read(self, addresses: NDArray[Any], mask: NDArray[Any] | None, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Elements at addresses; anything where the mask is false.

        Raises:
            OutsideError: an element is in no argument.
        """
        found = np.zeros(addresses.shape, dtype)
        for data, index, chosen in self._parts(addresses, mask, dtype, READ):
            if chosen is None:
                return data[index]
            found[chosen] = data[index]
        return found

    def write(self, addresses: NDArray[Any], mask: NDArray[Any] | None, values: NDArray[Any]) -> None:
        """Store elements, those of later programs last.

        Raises:
            OutsideError: an element is in no argument.
        """
        for data, index, chosen in self._parts(addresses, mask, values.dtype, WRITE):
            data[index] = values if chosen is None else values[chosen]

    def places(self, addresses: NDArray[Any], dtype: np.dtype[Any]) -> list[tuple[NDArray[Any], int]]:
        """Of each address the storage and the position in it, in order.

        Raises:
            OutsideError: an element is in no argument.
        """
        found: list[Any] = [None] * addresses.size
        for data, index, chosen in self._parts(addresses, None, dtype, UPDATE):
            positions = list(range(addresses.size)) if chosen is None else np.flatnonzero(chosen).tolist()
            for position, at in zip(positions, index.ravel().tolist(), strict=True):
                found[position] = (data, at)
        return found

    def _parts(self, addresses: NDArray[Any], mask: NDArray[Any] | None, dtype: np.dtype[Any], access: int) -> Any:
        """The typed memory, the positions in it, and which elements those are (None for all), for each storage."""
        whole = mask is None or bool(mask.all())
        active = addresses if whole else addresses[mask]
        if not active.size:
            return
        low, high = int(active.min()), int(active.max())
        place = bisect_right(self._firsts, low) - 1
        if place >= 0 and low >= self._firsts[place] and high + dtype.itemsize <= self._stop(place):
            self._note(place, active, access)
            yield self._typed(place, dtype), (active - self._firsts[place]) // dtype.itemsize, None if whole else mask
            return
        of = np.searchsorted(np.array(self._firsts), active, side="right") - 1
        stops = np.array([self._stop(i) for i in range(len(self._places))] or [0])
        outside = (of < 0) | (active + dtype.itemsize > stops[np.maximum(of, 0)])
        if outside.any():
            everywhere = np.arange(addresses.size).reshape(addresses.shape)
            at = (everywhere.ravel() if whole else everywhere[mask])[np.flatnonzero(outside.ravel())[0]]
            raise OutsideError(int(active.ravel()[np.flatnonzero(outside.ravel())[0]]), int(at))
        for each in np.unique(of).tolist():
            chosen = np.zeros(addresses.shape, bool)
            chosen[np.ones(addresses.shape, bool) if whole else mask] = (of == each).ravel()
            self._note(each, active[of == each], access)
            yield self._typed(each, dtype), (active[of == each] - self._firsts[each]) // dtype.itemsize, chosen

    def _note(self, place: int, addresses: NDArray[Any], access: int) -> None:
        """Remember who accesses what.

        Raises:
            RacingError: another program has.
        """
        users = self._users[self._places[place][3]]
        if users is None:
            return
        at = (addresses - self._firsts[place]).ravel()
        for other in _CONFLICTS[access]:
            if ((users[other, at] != _NOBODY) & (users[other, at] != self.program)).any():
                raise RacingError
        mine = (users[access, at] == _NOBODY) | (users[access, at] == self.program)
        users[access, at] = np.where(mine, self.program, _SEVERAL)

    def _stop(self, place: int) -> int:
        first, low, high, _ = self._places[place]
        return first + high - low

    def _typed(self, place: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        data = self._data[self._places[place][3]]
        return data[: data.size // dtype.itemsize * dtype.itemsize].view(dtype)

    def copy(self) -> dict[Bounds, Any]:
        """The bytes of each storage as a tensor."""
        import torch

        return {bounds: torch.from_numpy(data) for bounds, data in zip(self._storages, self._data, strict=True)}
