"""The blocks as a kernel takes them: one address, and how far from it each block lies. Nothing is stacked or copied."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from npu_tiling import Device, Kernels, LaunchSpec, row_layout
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import tiling

KERNELS = Kernels(__package__.rpartition(".")[0], "npu-attn-res")
_NO_GRADIENT = -(2**63)  # as in kernels/backward.py
_ENTRIES, _MORE_ENTRIES = 16, 64  # of a table that one launch fills, of the kernel for short lists and of that for long ones
_ALIGNMENT = 16  # elements, as in kernels/tile.py


@dataclass(frozen=True)
class Blocks:
    """N blocks of T rows [D].

    Attributes:
        base: where the kernel's pointer points: a tensor, or what stands for one (`_Span`).
        table: int64 [N], elements from there to each block; None: block i lies at i * s_block.
        n_blocks, n_tokens, width: N, T, D.
        s_block, s_token: elements from one block, and from one row, to the next.
        aligned: every entry of the table is a multiple of 16.
        dtype: of the elements.
        tensors: what the addresses belong to.
    """

    base: Any
    table: Tensor | None
    n_blocks: int
    n_tokens: int
    width: int
    s_block: int
    s_token: int
    aligned: bool
    dtype: torch.dtype
    tensors: Sequence[Tensor]


def rows_of(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor [..., D], copied only if its rows do not follow one another at one stride, and that stride."""
    if not tensor.is_contiguous():
        layout = row_layout(tensor)
        if layout is not None and layout.n_outer == 1:
            return tensor, layout.strides[0][1]
    return tensor.contiguous(), tensor.shape[-1]


def follow(tensors: Sequence[Tensor], stacked: bool, device: Device) -> Blocks:
    """The blocks of one tensor [N, ..., D], or of N tensors [..., D].

    A block is copied only where its rows do not follow one another at one stride, the same for all blocks.
    """
    first = tensors[0]
    width = first.shape[-1]
    if stacked:
        n_blocks, n_tokens = first.shape[0], prod(first.shape[1:-1])
        block, s_token = rows_of(first[0])
        if block.data_ptr() != first.data_ptr():
            first = first.contiguous()
        return Blocks(first, None, n_blocks, n_tokens, width, first.stride(0), s_token, False, first.dtype, (first,))
    n_tokens = prod(first.shape[:-1])
    followed = [rows_of(tensor) for tensor in tensors]
    s_token = followed[0][1]
    if any(stride != s_token for _, stride in followed):
        s_token = width
        followed = [(tensor.contiguous(), width) for tensor, _ in followed]
    reached = [tensor for tensor, _ in followed]
    base, table, aligned = table_of(reached, device)
    return Blocks(base, table, len(reached), n_tokens, width, 0, s_token, aligned, first.dtype, reached)


def table_of(tensors: Sequence[Tensor | None], device: Device) -> tuple[Any, Tensor | None, bool]:
    """The first tensor there is, how far from it each one lies (int64, in elements), and whether all are aligned.

    The table is filled by launches that carry the numbers as arguments: no copy from the host, which would wait for it and
    could not be captured in a graph. One tensor needs no table.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    first = present[0]
    if len(tensors) == 1:
        return first, None, False
    start, itemsize = first.data_ptr(), first.dtype.itemsize
    offsets = [_NO_GRADIENT if tensor is None else (tensor.data_ptr() - start) // itemsize for tensor in tensors]
    aligned = device.kind == "cuda" and all(offset % _ALIGNMENT == 0 for offset in offsets)
    short = len(offsets) <= _ENTRIES
    each = _ENTRIES if short else _MORE_ENTRIES
    kernel = "attn_res_table_kernel" if short else "attn_res_long_table_kernel"
    table = allocate(first, (-(-len(offsets) // each) * each,), torch.int64)
    spec = _table_spec(device)
    for i in range(0, len(offsets), each):
        entries = offsets[i : i + each]
        entries += [0] * (each - len(entries))
        KERNELS.launch("kernels.table", kernel, spec, 1, (table,), (i, *entries))
    return first if first.device.type != "cpu" else _Span(present), table, aligned


@functools.lru_cache(maxsize=64)
def _table_spec(device: Device) -> LaunchSpec:
    return LaunchSpec.of(tiling.TableLaunch(device), {})


class _Span:
    """Memory from the lowest to the highest of several CPU tensors: the one argument that an emulated kernel gets for all.

    An emulated launch checks that a kernel stays inside its arguments, and the tensors of a list are no arguments.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._first = tensors[0]
        self.dtype, self.device = self._first.dtype, self._first.device
        self.storages = [tensor.untyped_storage() for tensor in tensors]  # an emulation that watches looks no further
        self._storage = _Bounds(self.storages)

    def data_ptr(self) -> int:
        return self._first.data_ptr()

    def untyped_storage(self) -> _Bounds:
        return self._storage


class _Bounds:
    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self._low = min(storage.data_ptr() for storage in storages)
        self._high = max(storage.data_ptr() + storage.nbytes() for storage in storages)

    def data_ptr(self) -> int:
        return self._low

    def nbytes(self) -> int:
        return self._high - self._low
