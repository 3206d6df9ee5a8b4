"""Which widths share their tilings: found by calls whose kernels are planned and not launched, on CPU tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import npu_tiling
import torch

from .calls import CALLS, Maker

# Constants that are the width itself: every width has its own.
_WIDTHS = ("N", "D")
_TWO_BYTES = (torch.bfloat16, torch.float16)  # planned as the first: a tiling changes with the bytes of an element
_ALIGNMENT = 16  # what Triton compiles another kernel for: arguments divisible by it


class Widths(NamedTuple):
    """The narrowest and the widest width of a tiling."""

    first: int
    last: int

    def joined(self, other: Widths) -> Widths:
        """Of both."""
        return Widths(min(self.first, other.first), max(self.last, other.last))


Tilings = dict[tuple[str, torch.dtype, Hashable], Widths]


def tilings(device: npu_tiling.Device, widths: Iterable[int], operators: Iterable[str] = tuple(CALLS)) -> Tilings:
    """The tilings of every operator at these widths, forward and backward, in every dtype.

    Two widths share a tiling where they launch the same kernels, with equal constants but for the width itself, equal
    compiler options, and numbers of equal divisibility.
    """
    found: Tilings = {}
    with npu_tiling.use_device(device, emulated=True), _planned() as launches:
        for width in widths:
            for name in operators:
                for dtypes in ((torch.float32,), _TWO_BYTES):
                    launches.clear()
                    CALLS[name](width, Maker(dtypes[0], torch.device("cpu"), empty=True)).launch()
                    here = Widths(width, width)
                    for dtype in dtypes:
                        key = (name, dtype, tuple(launches))
                        found[key] = here.joined(found.get(key, here))
    return found


def merged(parts: Iterable[Tilings]) -> Tilings:
    """The tilings of several ranges of widths."""
    found: Tilings = {}
    for part in parts:
        for key, widths in part.items():
            found[key] = widths.joined(found.get(key, widths))
    return found


@contextlib.contextmanager
def _planned() -> Iterator[list[Hashable]]:
    """Launches are listed and not made."""
    launches: list[Hashable] = []

    def launch(_: Any, module: str, kernel: str, spec: Any, grid: int, tensors: Any, scalars: Any) -> None:
        constants = tuple(item for item in spec.constants.items() if item[0] not in _WIDTHS)
        numbers = tuple((number == 1, number % _ALIGNMENT == 0) for number in scalars if isinstance(number, int))
        launches.append((module, kernel, constants, tuple(spec.options.items()), numbers))

    with mock.patch.object(npu_tiling.Kernels, "launch", launch):
        yield launches
