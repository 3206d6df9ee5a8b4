"""How kernels find several tensors without a copy of them: as arguments on CUDA, or through a table of distances."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import or_
from typing import Any, NamedTuple

import torch
from npu_tiling import Device, LaunchSpec
from npu_tiling.budget.arithmetic import power_of_two
from npu_tiling.installation.triton import version
from npu_tiling.launching import listening
from npu_tiling.pytorch.tensors import Neighbours, allocate
from torch import Tensor

from ..both.tiling import TableTiling
from .specs import KERNELS

_NO_GRADIENT = -(2**63)  # as in both/tile.py
_ENTRIES = 16  # entries of a table that one launch writes
_ALIGNMENT = 16  # elements, as in both/tile.py
_MAX_ARGUMENTS = 32  # tensors that kernels for CUDA choose among


class Pointers(NamedTuple):
    """Where a kernel finds several tensors.

    Attributes:
        base: the first tensor; None where there is none.
        table: int64, elements from there to each tensor; None where there is one tensor, or `others` are given.
        aligned: every entry of the table is a multiple of 16.
        others: for a kernel for CUDA, the tensors after the first. The first is repeated until there is a power of two of
            them all: a kernel is compiled for each length, and few lengths occur then. None: the table, or a stride, leads
            to them.
        needed: bit i is set where tensor i is given. Where it is not, the first given one stands in its place.
    """

    base: Any
    table: Tensor | None
    aligned: bool
    others: tuple[Tensor, ...] | None = None
    needed: int = 0


NOWHERE = Pointers(None, None, aligned=True)


def find(sources: Sequence[Tensor], gradients: Sequence[Tensor | None], device: Device) -> tuple[Pointers, Pointers]:
    """As `in_tables`, for kernels that choose among their arguments on CUDA."""
    if 1 < len(sources) <= _MAX_ARGUMENTS and device.kind == "cuda" and _has_tuples():
        return as_arguments(sources), as_arguments(gradients)
    return in_tables(sources, gradients, device)


@functools.lru_cache(maxsize=1)
def _has_tuples() -> bool:
    """Whether Triton takes tuples of pointers: from 3.4 on. A Triton installed under another name is assumed to."""
    installed = version("triton")
    return installed is None or tuple(map(int, installed.split(".")[:2])) >= (3, 4)


def as_arguments(tensors: Sequence[Tensor | None]) -> Pointers:
    """Pointers for a kernel that chooses among its arguments."""
    needed = (1 << len(tensors)) - 1
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return NOWHERE
    first = present[0]
    if len(present) < len(tensors):
        needed = sum(1 << i for i, tensor in enumerate(tensors) if tensor is not None)
        present = [first if tensor is None else tensor for tensor in tensors]
    padding = (first,) * (power_of_two(len(tensors)) - len(tensors))
    return Pointers(present[0], None, aligned=True, others=(*present[1:], *padding), needed=needed)


def in_tables(sources: Sequence[Tensor], gradients: Sequence[Tensor | None], device: Device) -> tuple[Pointers, Pointers]:
    """Pointers to sources and to their gradients; `NOWHERE` where no gradient is needed.

    Launches fill the tables from their arguments. For a copy from the host the host would wait, and no graph could capture
    it. Both tables are one tensor, so that those of up to 8 tensors take one launch.
    """
    if len(sources) == 1:
        first = gradients[0] if gradients else None
        to = NOWHERE if first is None or not first.numel() else Pointers(first, None, aligned=False)
        return Pointers(sources[0], None, aligned=False), to
    listening.refuse("numbers of its launches are distances between tensors")
    present = [gradient for gradient in gradients if gradient is not None]
    start, itemsize = sources[0].data_ptr(), sources[0].dtype.itemsize
    entries = [(address - start) // itemsize for address in map(Tensor.data_ptr, sources)]
    begin = len(entries) + len(entries) % 2  # of the gradients' table, which Triton takes to be aligned to 16 bytes
    if present:
        start = present[0].data_ptr()
        entries += [0] * (begin - len(entries))
        entries += [_NO_GRADIENT if each is None else (each.data_ptr() - start) // itemsize for each in gradients]
    aligned = device.kind == "cuda" and functools.reduce(or_, entries) % _ALIGNMENT == 0
    table = _table_of(entries, sources[0], device)
    if not present:
        return Pointers(_reached(sources), table, aligned), NOWHERE
    return Pointers(_reached(sources), table, aligned), Pointers(_reached(present), table[begin:], aligned)


def _table_of(entries: list[int], like: Tensor, device: Device) -> Tensor:
    entries += [0] * (-len(entries) % _ENTRIES)
    table = allocate(like, (len(entries),), torch.int64)
    spec = _table_spec(device)
    for i in range(0, len(entries), _ENTRIES):
        KERNELS.launch("both.table", "attn_res_table_kernel", spec, 1, (table,), (i, *entries[i : i + _ENTRIES]))
    return table


@functools.lru_cache(maxsize=64)
def _table_spec(device: Device) -> LaunchSpec:
    return LaunchSpec.of(TableTiling(device=device), {})


def _reached(tensors: Sequence[Tensor]) -> Any:
    """The argument for a pointer through which a kernel reaches several tensors."""
    return Neighbours(tensors) if tensors[0].device.type == "cpu" else tensors[0]
