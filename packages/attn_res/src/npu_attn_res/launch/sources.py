"""Sources as kernels take them: the address of one, and the distance from it to each. Nothing is stacked or copied."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from operator import or_
from typing import Any, NamedTuple

import torch
from npu_tiling import Device, LaunchSpec
from npu_tiling.budget.arithmetic import power_of_two
from npu_tiling.installation.triton import version
from npu_tiling.pytorch.rows import layout_of
from npu_tiling.pytorch.tensors import Neighbours, allocate
from torch import Tensor

from ..both.tiling import TableTiling
from .specs import KERNELS

_NO_GRADIENT = -(2**63)  # as in both/tile.py
_ENTRIES, _MORE_ENTRIES = 16, 64  # that one launch writes to a table: of the kernel for short tables, and for long ones
_ALIGNMENT = 16  # elements, as in both/tile.py
MAX_ARGUMENTS = 32  # blocks of a list that kernels for CUDA choose among


class Pointers(NamedTuple):
    """Where a kernel finds several tensors.

    Attributes:
        base: the first tensor; None where there is none.
        table: int64, elements from there to each tensor; None where there is one tensor, or `others` are given.
        aligned: every entry of the table is a multiple of 16.
        others: the tensors that follow the first, for a kernel for CUDA, then the first again, up to a power of two: few
            lengths need a compiled kernel each. None: the table, or a stride, leads to them.
        needed: bit i says whether there is a tensor i; where there is none, `others` has a second pointer to another.
    """

    base: Any
    table: Tensor | None
    aligned: bool
    others: tuple[Tensor, ...] | None = None
    needed: int = 0


_NOWHERE = Pointers(None, None, aligned=True)


class Prefix(NamedTuple):
    """One more source, of a dtype and a stride of its own, in kernels' order of arguments.

    Attributes:
        n_blocks: on the device, how many of the other sources count; None: all do.
        rows: [..., D]; None: there is no such source.
        stride: elements from one row to the next.
    """

    n_blocks: Tensor | None
    rows: Tensor | None
    stride: int


NO_PREFIX = Prefix(None, None, 0)


class Sources(NamedTuple):
    """N sources of T rows [D], and a prefix.

    Attributes:
        at: where they are; without a table source i lies at i * s_source.
        n_sources, n_tokens: N without the prefix, T.
        shape: of one source, [..., D].
        s_source, s_token: elements from one source, and from one row, to the next.
        like: a tensor of their dtype, on their device.
        gradients: where their gradients are to be written.
        held: the tensors that a table points to, copies among them, kept until the launch.
        written: the gradients that `gradients` points to, None among them.
        prefix: the source that comes before the N; its statistics are the last row.
    """

    at: Pointers
    n_sources: int
    n_tokens: int
    shape: torch.Size
    s_source: int
    s_token: int
    like: Tensor
    gradients: Pointers
    held: Sequence[Tensor]
    written: Sequence[Tensor | None] = ()
    prefix: Prefix = NO_PREFIX

    @property
    def width(self) -> int:
        return self.shape[-1]

    @property
    def n_rows(self) -> int:
        """How many rows the statistics of a token have."""
        return self.n_sources + (self.prefix.rows is not None)


def rows_of(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor [..., D], copied only if its rows do not follow one another at one stride, and that stride."""
    stride = tensor.shape[-1] if tensor.is_contiguous() else _row_stride(tensor.shape, tensor.stride())
    return (tensor.contiguous(), tensor.shape[-1]) if stride is None else (tensor, stride)


@functools.lru_cache(maxsize=4096)
def _row_stride(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """Elements from one row of a tensor to the next; None where rows do not follow one another at one stride."""
    layout = layout_of(sizes, [strides])
    return layout.strides[0][1] if layout is not None and layout.n_outer == 1 else None


def sources_and_prefix(
    tensors: Sequence[Tensor],
    stacked: bool,
    n_blocks: int,
    count: Tensor | None,
    prefix: Tensor | None,
    device: Device,
    gradients: Sequence[Tensor | None] = (),
) -> Sources:
    """As `follow`, for kernels that take a few sources as arguments on CUDA: the first n_blocks, if any, and a prefix."""
    if prefix is None:
        return follow(tensors, device, gradients, stacked=stacked, in_arguments=True)
    rows, stride = rows_of(prefix)
    given = Prefix(count, rows, stride)
    if tensors and tensors[0].numel():
        return follow(tensors, device, gradients, stacked=stacked, in_arguments=True, n_blocks=n_blocks, prefix=given)
    at, n_tokens = Pointers(rows, None, aligned=False), prod(prefix.shape[:-1])  # never read
    return Sources(at, n_blocks, n_tokens, prefix.shape, 0, prefix.shape[-1], rows, _NOWHERE, (), prefix=given)


def follow(
    tensors: Sequence[Tensor],
    device: Device,
    gradients: Sequence[Tensor | None] = (),
    *,
    stacked: bool,
    in_arguments: bool = False,
    n_blocks: int | None = None,
    prefix: Prefix = NO_PREFIX,
) -> Sources:
    """The first n_blocks sources (None: all) of one tensor [N, ..., D], or of N tensors [..., D], and their gradients.

    A source is copied only where its rows do not follow one another at one stride, the same for all sources.
    `in_arguments`: on CUDA up to 32 of N tensors are arguments of the kernel that they are for, and there is no table.
    """
    first = tensors[0]
    shape = first.shape[1:] if stacked else first.shape
    n_tokens, s_token = prod(shape[:-1]), shape[-1]
    if stacked:
        if not first.is_contiguous():
            source, s_token = rows_of(first[0])
            first = first if source.data_ptr() == first.data_ptr() else first.contiguous()
        at = Pointers(first, None, aligned=False)
        where = Pointers(gradients[0], None, aligned=False) if gradients and gradients[0] is not None else _NOWHERE
        n_sources = first.shape[0] if n_blocks is None else n_blocks
        return Sources(at, n_sources, n_tokens, shape, first.stride(0), s_token, first, where, (first,), prefix=prefix)
    if not all(map(Tensor.is_contiguous, tensors)):
        followed = [rows_of(tensor) for tensor in tensors]
        tensors, s_token = [tensor for tensor, _ in followed], followed[0][1]
        if any(stride != s_token for _, stride in followed):
            tensors, s_token = [tensor.contiguous() for tensor in tensors], shape[-1]
    if in_arguments and device.kind == "cuda" and 1 < len(tensors) <= MAX_ARGUMENTS and _has_tuples():
        at, where = _as_arguments(tensors), _as_arguments(gradients)
    else:
        at, where = point_to(tensors, gradients, device)
    n_sources = len(tensors) if n_blocks is None else n_blocks
    return Sources(at, n_sources, n_tokens, shape, 0, s_token, tensors[0], where, tensors, gradients, prefix)


@functools.lru_cache(maxsize=1)
def _has_tuples() -> bool:
    """Whether a kernel can choose among its arguments: from Triton 3.4 on, if it is installed under that name."""
    installed = version("triton")
    return installed is None or tuple(map(int, installed.split(".")[:2])) >= (3, 4)


def _as_arguments(tensors: Sequence[Tensor | None]) -> Pointers:
    needed = (1 << len(tensors)) - 1
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return _NOWHERE
    first = present[0]
    if len(present) < len(tensors):
        needed = sum(1 << i for i, tensor in enumerate(tensors) if tensor is not None)
        present = [first if tensor is None else tensor for tensor in tensors]
    padding = (first,) * (power_of_two(len(tensors)) - len(tensors))
    return Pointers(present[0], None, aligned=True, others=(*present[1:], *padding), needed=needed)


def in_tables(sources: Sources, device: Device) -> Sources:
    """The same sources for kernels that take no tuples."""
    if sources.at.others is None:
        return sources
    at, where = point_to(sources.held, sources.written, device)
    return sources._replace(at=at, gradients=where)


def point_to(sources: Sequence[Tensor], gradients: Sequence[Tensor | None], device: Device) -> tuple[Pointers, Pointers]:
    """Pointers to sources and to their gradients, which are none where none is needed.

    Tables are filled by launches that carry the numbers as arguments: no copy from the host, which would wait for it and
    could not be captured in a graph. Both tables are one tensor, so that short ones take one launch.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    if len(sources) == 1:
        return Pointers(sources[0], None, aligned=False), Pointers(present[0], None, aligned=False) if present else _NOWHERE
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
        return Pointers(_reached(sources), table, aligned), _NOWHERE
    return Pointers(_reached(sources), table, aligned), Pointers(_reached(present), table[begin:], aligned)


def _table_of(entries: list[int], like: Tensor, device: Device) -> Tensor:
    is_short = len(entries) <= _ENTRIES
    each = _ENTRIES if is_short else _MORE_ENTRIES
    kernel = "attn_res_table_kernel" if is_short else "attn_res_long_table_kernel"
    entries += [0] * (-len(entries) % each)
    table = allocate(like, (len(entries),), torch.int64)
    spec = _table_spec(device)
    for i in range(0, len(entries), each):
        KERNELS.launch("both.table", kernel, spec, 1, (table,), (i, *entries[i : i + each]))
    return table


def _reached(tensors: Sequence[Tensor]) -> Any:
    """The argument for a pointer through which a kernel reaches several tensors."""
    return Neighbours(tensors) if tensors[0].device.type == "cpu" else tensors[0]


@functools.lru_cache(maxsize=64)
def _table_spec(device: Device) -> LaunchSpec:
    return LaunchSpec.of(TableTiling(device=device), {})
