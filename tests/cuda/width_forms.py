"""At which widths the form of a launch changes: found by calls on CPU tensors whose kernels are not launched."""

from __future__ import annotations

import pickle
import random
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import npu_tiling
import torch
from filelock import FileLock
from width_calls import CALLS, Maker

WIDEST = 70_000
PARTS = 10  # of the widths, and of the edges
_PLANNED_AS = {torch.float16: torch.bfloat16}  # a form changes with the bytes of an element
_WIDTHS = ("N", "D")  # constants that are the width itself: every width has its own
_ALIGNMENT = 16  # what Triton compiles another kernel for: numbers divisible by it


def form(device: npu_tiling.Device, name: str, dtype: torch.dtype, width: int) -> Hashable:
    """What a call launches, forward and backward.

    Two widths share a form where they launch the same kernels, with equal constants but for the width itself, equal compiler
    options, and numbers of equal divisibility.
    """
    launches: list[Hashable] = []

    def launch(_: Any, module: str, kernel: str, decision: Any, grid: int, tensors: Any, scalars: Any) -> None:
        constants = tuple(item for item in decision.constants.items() if item[0] not in _WIDTHS)
        numbers = tuple((number == 1, number % _ALIGNMENT == 0) for number in scalars if isinstance(number, int))
        launches.append((module, kernel, constants, tuple(decision.options.items()), numbers))

    with npu_tiling.use_device(device, emulated=True), mock.patch.object(npu_tiling.Kernels, "launch", launch):
        CALLS[name](width, Maker(dtype, torch.device("cpu"), empty=True)).launch()
    return tuple(launches)


Forms = dict[Hashable, tuple[int, int]]


def forms(device: npu_tiling.Device, name: str, dtype: torch.dtype, widths: Iterable[int]) -> Forms:
    """The narrowest and the widest width of every form."""
    return joined({form(device, name, dtype, width): (width, width)} for width in widths)


def joined(parts: Iterable[Forms]) -> Forms:
    """The narrowest and the widest width of every form in several parts."""
    found: Forms = {}
    for part in parts:
        for made, (first, last) in part.items():
            both = found.get(made, (first, last))
            found[made] = min(both[0], first), max(both[1], last)
    return found


def edges(
    device: npu_tiling.Device, name: str, dtype: torch.dtype, part: int, folder: Path, widest: int = WIDEST
) -> list[int]:
    """One part of the narrowest and the widest widths of all forms, up to a width.

    Processes that share a folder share the planning: each plans the parts of the widths that no other has begun.
    """
    planned = _PLANNED_AS.get(dtype, dtype)
    found: list[Forms] = []
    for other in (*range(part, PARTS), *range(part)):
        file = folder / f"{name}-{planned}-{other}"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                file.write_bytes(pickle.dumps(forms(device, name, planned, range(1 + other, widest + 1, PARTS))))
            found.append(pickle.loads(file.read_bytes()))
    return sorted({width for both in joined(found).values() for width in both})[part::PARTS]


def others(seed: int) -> list[int]:
    """Widths from a seed: primes, multiples of 16 and any, in turn."""
    mixed = list(range(1, WIDEST + 1))
    random.Random(seed).shuffle(mixed)
    primes = (n for n in mixed if n > 1 and all(n % i for i in range(2, int(n**0.5) + 1)))
    multiples = (n for n in mixed if n % 16 == 0)
    kinds = primes, multiples, iter(mixed)
    return [next(kind) for _ in range(10) for kind in kinds]
