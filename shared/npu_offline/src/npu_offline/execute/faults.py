"""Errors of emulated programs: from what the runtime notes to an exception."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..errors import EndlessLoopError, OfflineError, OutOfBoundsError, RaceError
from ..launches import RESERVED
from .source_lines import LOAD, STORE, KernelSource

if TYPE_CHECKING:
    import torch

_OUT_OF_MEMORY, _RACE, _ENDLESS, _INTERRUPTED, _APART = 2, 3, 5, 6, 7  # as in runtime.h, where 1 is an access out of bounds
MASK_OR_STRIDE = "; its mask or a stride is wrong"
"""A guess in a message on an access out of bounds: what follows is for a kernel whose fault that is."""
NARROW_INDEX = "; an index of 8 or 16 bits counts as signed in Triton 3.2, of unsigned integers too: `index.to(tl.int32)`"
"""Said of an address that such an index leads to."""
FRONT_END_IS_WRONG = "triton-ascend's front end is wrong"
"""The end of a message on a launch that differs from what its TTIR means."""
_ACCESSES = ("read", "write", "atomic update")
_DONE = ("read", "wrote", "updated atomically")


class Fault(NamedTuple):
    """The struct `fault` of launch.h."""

    reason: int
    argument: int
    access: int
    address: int
    size: int
    x: int
    y: int
    z: int
    other_access: int
    other: int


def fault_of(
    code: int,
    fault: Fault,
    kernel: str,
    pointers: Sequence[str],
    tensors: Sequence[torch.Tensor | None],
    bases: Sequence[int],
    ranges: Sequence[int],
    grid: tuple[int, int, int],
    after: str,
    source: KernelSource,
) -> BaseException:
    """The error of a launch that failed.

    Args:
        code: what the runtime returned.
        fault: what it noted.
        kernel: the kernel's name.
        pointers: names of its pointer arguments.
        tensors: what each is; None for what stands for others.
        bases: the address of each.
        ranges: first address and end of the storage of each argument, the reserved ones first.
        grid: programs in x, y and z.
        after: how long programs may take, for those that took longer.
        source: what is known of its accesses.
    """
    if fault.reason == _INTERRUPTED:
        return KeyboardInterrupt()
    where = f"kernel {kernel}, program {(fault.x, fault.y, fault.z)}"
    if code == _OUT_OF_MEMORY or fault.reason == _OUT_OF_MEMORY:
        return OfflineError(f"{where}: the host has no memory for the kernel's tiles")
    if fault.reason == _ENDLESS:
        why = "a loop does not end, or waits for another program"
        if source.swaps():
            why += "; tl.atomic_cas returns the new value, so that a lock that it takes is never free: compiler fault 16"
        return EndlessLoopError(f"{where}: stopped after {after}: {why}")
    what = f"{_ACCESSES[fault.access]} of {fault.size} bytes"
    if fault.argument < RESERVED:
        return OutOfBoundsError(f"{where}: {what} at address {fault.address:#x}, which is in no argument's storage")
    position = fault.argument - RESERVED
    place = f"at byte {fault.address - bases[position]} of argument {pointers[position]}"
    lines = source.lines(pointers[position], fault.access)
    named = f" ({lines})" if lines else ""
    if fault.reason not in (_RACE, _APART):
        low, high = ranges[2 * fault.argument : 2 * fault.argument + 2]
        why = _why(source, pointers[position], fault.access, tensors[position])
        if source.has_narrow_index():
            why = NARROW_INDEX
        return OutOfBoundsError(f"{where}: {what} {place}, outside its storage of {high - low} bytes{named}{why}")
    aliases = [
        name
        for i, name in enumerate(pointers)
        if i != position and ranges[2 * (i + RESERVED)] <= fault.address < ranges[2 * (i + RESERVED) + 1]
    ]
    shared = f" (in one storage with {', '.join(aliases)})" if aliases else ""
    other = source.lines(pointers[position], fault.other_access) if not aliases else ""
    done = f"{_DONE[fault.other_access]} ({other})" if other and other != lines else _DONE[fault.other_access]
    apart = ", and no lock keeps the two apart: compiler fault 31" if fault.reason == _APART else ""
    return RaceError(f"{where}: {what} {place}{shared}{named}, which {_program(fault.other, grid)} {done}{apart}")


def _why(source: KernelSource, name: str, access: int, tensor: torch.Tensor | None) -> str:
    """What may be wrong where an argument is accessed out of bounds; nothing where the access itself says it."""
    if access == LOAD and source.only_stores(name):
        stores = source.lines(name, STORE)
        store = f"its store{f' ({stores})' if stores else ''}"
        return (
            f"; the kernel does not read {name}: triton-ascend does not keep the mask of {store}, which became load, select"
            " and store of the whole tile: compiler fault 10"
        )
    if access == LOAD and source.has_mask(name, access) and source.loses_mask(name):
        return "; its mask is one that triton-ascend does not keep: compiler fault 10"
    layout = tensor is not None and f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}"
    if tensor is not None and not tensor.is_contiguous():
        repeated = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return f"; {layout}{': an expanded view, whose elements share memory' if repeated else ''}"
    if not source.has_mask(name, access):
        return ""
    return f"{MASK_OR_STRIDE}{f': {layout}' if layout else ''}"


def _program(linear: int, grid: tuple[int, int, int]) -> str:
    """A program by its place in the grid; a negative number stands for several programs."""
    if linear < 0:
        return "other programs"
    return f"program {(linear % grid[0], linear // grid[0] % grid[1], linear // grid[0] // grid[1])}"
