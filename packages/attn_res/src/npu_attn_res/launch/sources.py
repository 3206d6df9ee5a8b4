"""Sources as kernels take them: pointers and strides. Nothing is stacked or copied where rows lie at one stride."""

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
from .pointers import Pointers


class Sources(NamedTuple):
    """N blocks of T rows [D], for kernels that take one base pointer, with a table or without.

    Attributes:
        at: where the blocks are; where there is no table, block i lies at i * s_block.
        n_blocks, n_tokens: N and T.
        shape: of one block, [..., D].
        s_block, s_token: elements from one block, and from one row, to the next.
        like: a tensor of the blocks' dtype, on their device.
        gradients_at: where the gradients of the blocks go.
        tensors: those that a table points to, copies among them, which live until the launch.
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

    @property
    def width(self) -> int:
        return self.shape[-1]


@functools.lru_cache(maxsize=4096)
def row_stride(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """Elements from one row of a tensor to the next; None where rows do not follow one another at one stride."""
    layout = layout_of(sizes, [strides])
    return layout.strides[0][1] if layout is not None and layout.n_outer == 1 else None


def rows_of(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor [..., D], copied only if its rows do not follow one another at one stride, and that stride."""
    stride = tensor.shape[-1] if tensor.is_contiguous() else row_stride(tensor.shape, tensor.stride())
    return (tensor.contiguous(), tensor.shape[-1]) if stride is None else (tensor, stride)


def followed(tensor: Tensor) -> Tensor:
    """The tensor, copied if its rows do not lie at one stride."""
    return tensor if tensor.is_contiguous() else rows_of(tensor)[0]


def followed_sources(call: Forward | Backward) -> tuple[Sequence[Tensor], bool, Tensor | None]:
    """The blocks of a call, whether they are stacked, and its prefix. Without a block to read, the prefix is one, too."""
    blocks, prefix = followed_blocks(call.blocks, stacked=call.stacked), call.prefix
    if prefix is None:
        return blocks, call.stacked, None
    prefix = followed(prefix)
    return (blocks, call.stacked, prefix) if blocks and blocks[0].numel() else ([prefix], False, prefix)


def followed_blocks(blocks: Sequence[Tensor], *, stacked: bool) -> Sequence[Tensor]:
    """One tensor [N, ..., D], or N tensors [..., D]; rows lie at one stride, the same for all blocks, or are copied."""
    if all(map(Tensor.is_contiguous, blocks)):
        return blocks
    if stacked:
        (first,) = blocks
        return blocks if row_stride(first.shape[1:], first.stride()[1:]) is not None else [first.contiguous()]
    rows = [rows_of(block) for block in blocks]
    alike = len({stride for _, stride in rows}) == 1
    return [block if alike else block.contiguous() for block, _ in rows]


def follow(blocks: Sequence[Tensor], device: Device, gradients: Sequence[Tensor | None] = (), *, stacked: bool) -> Sources:
    """One tensor [N, ..., D], or N tensors [..., D], and their gradients."""
    blocks = followed_blocks(blocks, stacked=stacked)
    return sources_at(blocks, pointers.in_tables(blocks, gradients, device), stacked=stacked)


def sources_at(blocks: Sequence[Tensor], found: tuple[Pointers, Pointers], *, stacked: bool) -> Sources:
    """The same for blocks whose rows lie at one stride, and pointers that `in_tables` made of them and their gradients."""
    first, (at, to) = blocks[0], found
    block = first[0] if stacked else first
    n_blocks, s_block = (first.shape[0], first.stride(0)) if stacked else (len(blocks), 0)
    return Sources(at, n_blocks, prod(block.shape[:-1]), block.shape, s_block, rows_of(block)[1], first, to, blocks)
