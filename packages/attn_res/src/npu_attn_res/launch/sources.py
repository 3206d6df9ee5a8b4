"""Sources as kernels take them: pointers and distances. Nothing is stacked or copied where rows lie at one stride."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.pytorch.rows import layout_of
from torch import Tensor

from ..calls import Backward, Forward
from . import pointers
from .pointers import NOWHERE, Pointers


class Prefix(NamedTuple):
    """One more source, of a dtype and a stride of its own, in kernels' order of arguments.

    Attributes:
        device_count: on the device, how many blocks count; None: all do.
        rows: [..., D]; None: there is no prefix.
        stride: elements from one row to the next.
    """

    device_count: Tensor | None
    rows: Tensor | None
    stride: int


NO_PREFIX = Prefix(None, None, 0)


class Sources(NamedTuple):
    """N blocks of T rows [D], and a prefix.

    Attributes:
        at: where the blocks are; without a table block i lies at i * s_block.
        n_blocks, n_tokens: N and T.
        shape: of one block, [..., D].
        s_block, s_token: elements from one block, and from one row, to the next.
        like: a tensor of the blocks' dtype, on their device.
        gradients_at: where the gradients of the blocks go.
        tensors: those that a table points to, copies among them, which live until the launch.
        gradients: those that `gradients_at` points to, None among them.
        prefix: the last source by number, so that its statistics are the last row; kernels of a forward process it first.
    """

    at: Pointers
    n_blocks: int
    n_tokens: int
    shape: torch.Size
    s_block: int
    s_token: int
    like: Tensor
    gradients_at: Pointers
    tensors: Sequence[Tensor]
    gradients: Sequence[Tensor | None] = ()
    prefix: Prefix = NO_PREFIX

    @property
    def width(self) -> int:
        return self.shape[-1]

    def in_tables(self, device: Device) -> Sources:
        """The same for kernels that do not choose among arguments."""
        if self.at.others is None:
            return self
        at, gradients_at = pointers.in_tables(self.tensors, self.gradients, device)
        return self._replace(at=at, gradients_at=gradients_at)


def rows_of(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor [..., D], copied only if its rows do not follow one another at one stride, and that stride."""
    stride = tensor.shape[-1] if tensor.is_contiguous() else _row_stride(tensor.shape, tensor.stride())
    return (tensor.contiguous(), tensor.shape[-1]) if stride is None else (tensor, stride)


@functools.lru_cache(maxsize=4096)
def _row_stride(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """Elements from one row of a tensor to the next; None where rows do not follow one another at one stride."""
    layout = layout_of(sizes, [strides])
    return layout.strides[0][1] if layout is not None and layout.n_outer == 1 else None


def sources_of(call: Forward | Backward, device: Device, gradients: Sequence[Tensor | None] = ()) -> Sources:
    """The sources of a call whose kernels choose among arguments on CUDA: the blocks that count, if any, and a prefix."""
    blocks, n_blocks, stacked = call.blocks, call.n_blocks, call.stacked
    if call.prefix is None:
        return follow(blocks, device, gradients, stacked=stacked, as_arguments=True)
    rows, stride = rows_of(call.prefix)
    prefix = Prefix(call.device_count, rows, stride)
    if blocks and blocks[0].numel():
        return follow(blocks, device, gradients, stacked=stacked, as_arguments=True, n_blocks=n_blocks, prefix=prefix)
    at, n_tokens, shape = Pointers(rows, None, aligned=False), prod(rows.shape[:-1]), rows.shape  # never read
    return Sources(at, n_blocks, n_tokens, shape, 0, shape[-1], rows, NOWHERE, (), prefix=prefix)


def follow(
    blocks: Sequence[Tensor],
    device: Device,
    gradients: Sequence[Tensor | None] = (),
    *,
    stacked: bool,
    as_arguments: bool = False,
    n_blocks: int | None = None,
    prefix: Prefix = NO_PREFIX,
) -> Sources:
    """The first n_blocks (None: all) of one tensor [N, ..., D], or of N tensors [..., D], and their gradients.

    A block is copied only where its rows do not follow one another at one stride, the same for all blocks. `as_arguments`:
    a kernel for CUDA chooses among up to 32 tensors, and there is no table.
    """
    first = blocks[0]
    shape = first.shape[1:] if stacked else first.shape
    n_tokens, s_token = prod(shape[:-1]), shape[-1]
    if stacked:
        if not first.is_contiguous():
            source, s_token = rows_of(first[0])
            first = first if source.data_ptr() == first.data_ptr() else first.contiguous()
        at = Pointers(first, None, aligned=False)
        to = Pointers(gradients[0], None, aligned=False) if gradients and gradients[0] is not None else NOWHERE
        n_blocks = first.shape[0] if n_blocks is None else n_blocks
        return Sources(at, n_blocks, n_tokens, shape, first.stride(0), s_token, first, to, (first,), prefix=prefix)
    if not all(map(Tensor.is_contiguous, blocks)):
        followed = [rows_of(block) for block in blocks]
        blocks, s_token = [block for block, _ in followed], followed[0][1]
        if any(stride != s_token for _, stride in followed):
            blocks, s_token = [block.contiguous() for block in blocks], shape[-1]
    if as_arguments and pointers.can_be_arguments(blocks, device):
        at, to = pointers.as_arguments(blocks), pointers.as_arguments(gradients)
    else:
        at, to = pointers.in_tables(blocks, gradients, device)
    n_blocks = len(blocks) if n_blocks is None else n_blocks
    return Sources(at, n_blocks, n_tokens, shape, 0, s_token, blocks[0], to, blocks, gradients, prefix)
