"""At which widths the form of a launch changes: found by calls on CPU tensors whose kernels are not launched."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any
from unittest import mock

import npu_tiling
import torch
from width_calls import CALLS, Maker

WIDEST = 70_000
MARGIN = 32  # widths beside a range: twice the period of what Triton compiles another kernel for
_WIDTHS = ("N", "D")  # constants that are the width itself: every width has its own
_ALIGNMENT = 16  # what Triton compiles another kernel for: numbers divisible by it


def form(device: npu_tiling.Device, name: str, dtype: torch.dtype, width: int) -> Hashable:
    """What a call launches, forward and backward.

    Two widths share a form where they launch the same kernels, with equal constants but for the width itself, equal compiler
    options, and numbers of equal divisibility.
    """
    launches: list[Hashable] = []

    def launch(_: Any, module: str, kernel: str, spec: Any, grid: int, tensors: Any, scalars: Any) -> None:
        constants = tuple(item for item in spec.constants.items() if item[0] not in _WIDTHS)
        numbers = tuple((number == 1, number % _ALIGNMENT == 0) for number in scalars if isinstance(number, int))
        launches.append((module, kernel, constants, tuple(spec.options.items()), numbers))

    with npu_tiling.use_device(device, emulated=True), mock.patch.object(npu_tiling.Kernels, "launch", launch):
        CALLS[name](width, Maker(dtype, torch.device("cpu"), empty=True)).launch()
    return tuple(launches)


def edges(device: npu_tiling.Device, name: str, dtype: torch.dtype, widths: range) -> list[int]:
    """The narrowest and the widest width of every form, as far as they are in a range.

    A form that goes on beside the range has no edge there: ranges beside one another have the edges of all of them.
    """
    near = range(max(1, widths.start - MARGIN), min(widths.stop + MARGIN, WIDEST + 1))
    forms = {width: form(device, name, dtype, width) for width in near}
    first, last = {forms[width]: width for width in reversed(near)}, {forms[width]: width for width in near}
    return sorted({*first.values(), *last.values()} & {*widths})


def others(seed: int) -> list[int]:
    """Widths from a seed: primes, multiples of 16 and any, in turn."""
    mixed = list(range(1, WIDEST + 1))
    random.Random(seed).shuffle(mixed)
    primes = (n for n in mixed if n > 1 and all(n % i for i in range(2, int(n**0.5) + 1)))
    multiples = (n for n in mixed if n % 16 == 0)
    kinds = primes, multiples, iter(mixed)
    return [next(kind) for _ in range(10) for kind in kinds]
