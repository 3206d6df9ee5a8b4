"""Telling autograd what a call writes to its arguments: a bank's next block, and a prefix.

A write to any block changes the version of the whole bank. So each append notes how many versions are its own, and a
backward knows whether all that came since its forward are appends behind the blocks that it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from npu_tiling.dispatch import Function, apply
from torch import Tensor


class ReadBlocks:
    """The first n blocks of a bank as a call has read them: a later backward reads them again."""

    def __init__(self, blocks: Tensor, n_blocks: int) -> None:
        """For blocks [capacity, ..., D]. With n_blocks of 0 no write is an error."""
        self._blocks, self._n_blocks = blocks.detach(), n_blocks  # of the same version
        self._others = self._count_others()

    def check(self) -> None:
        """Raises PyTorch's error where anything but appends behind these blocks was written to the bank since."""
        if self._n_blocks and self._count_others() > self._others:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a bank of "
                f"{tuple(self._blocks.shape)} (capacity first), of whose blocks the first {self._n_blocks} must keep their "
                "values until the backward; behind them append=True alone may write."
            )

    def _count_others(self) -> int:
        """Versions of the bank that are no appends behind these blocks."""
        others, own = self._blocks._version, _place(self._blocks, 0)
        for (bank, block), versions in _appends(self._blocks).items():
            if bank != own or block is None or block >= self._n_blocks:
                others -= versions
        return others


@contextmanager
def noted(bank: Tensor, n_blocks: int | Tensor | None) -> Iterator[None]:
    """Notes the versions of a bank [..., capacity, D] that the write within is, to the block behind the first n_blocks.

    None: to a prefix that lies in the bank and is no block that counts. That, what a checkpoint appends again during a
    backward, and what goes where an n_blocks on the device says, are taken to leave blocks that a call has read as they are.
    """
    version = bank._version
    is_again = torch._C._current_graph_task_id() != -1
    block = n_blocks if isinstance(n_blocks, int) and not is_again else None
    try:
        yield
    finally:  # a checkpoint leaves by an error, once it has what it needs
        _appends(bank)[_place(bank, -2), block] += bank._version - version


def _appends(bank: Tensor) -> Counter[Any]:
    """Versions that were appends, by the bank and the block, of all banks in one memory; they live as long as that does."""
    memory = vars(bank.untyped_storage())
    found: Counter[Any] = memory.setdefault("npu_attn_res_appends", Counter())
    return found


def _place(bank: Tensor, dim: int) -> tuple[Any, int]:
    """Tells banks in one memory apart, where blocks are at dimension `dim`."""
    return bank.storage_offset(), bank.stride(dim)


def is_followed(bank: Tensor) -> bool:
    """Whether the versions of a bank say what was written to it: a plain tensor's, outside of compilers and transforms."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return type(bank) in (Tensor, torch.nn.Parameter) and not bank.is_inference()


def count_as_written(tensors: Sequence[Tensor]) -> None:
    """For calls that autograd does not record: a later backward that needs the values from before is then an error."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def replace(memory: Tensor, value: Tensor, by_kernel: bool) -> None:
    """Where autograd records the call: writes the value to the memory. `by_kernel`: a kernel has written it already."""
    if by_kernel:
        apply(_Written, memory, value, None)
    else:
        _check_mapped(memory, value)
        memory.copy_(value)


def append(bank: Tensor, n_blocks: int | Tensor, block: Tensor, by_kernel: bool) -> None:
    """As `replace`, to the block behind the first n_blocks. If that is a tensor and the bank full, nothing is written."""
    if not isinstance(n_blocks, Tensor):
        replace(bank.select(-2, n_blocks), block, by_kernel)
    elif by_kernel:
        apply(_Written, bank, block, n_blocks)
    elif capacity := bank.shape[-2]:
        place = n_blocks.reshape(1).long().clamp(0, capacity - 1)
        rows = torch.where(n_blocks < capacity, block.unsqueeze(-2).to(bank.dtype), bank.index_select(-2, place))
        _check_mapped(bank, rows)
        bank.movedim(-2, 0)[place] = rows.movedim(-2, 0)


def _check_mapped(memory: Tensor, value: Tensor) -> None:
    """Raises an error where torch.func.vmap maps over the value and not over the memory."""
    is_mapped = torch._C._functorch.is_batchedtensor
    if torch._C._are_functorch_transforms_active() and is_mapped(value) and not is_mapped(memory):
        raise ValueError(
            "append or in_place is True and must be False for a bank or prefix that torch.func.vmap does not map over: all"
            " calls would write to one memory. Name its dimension in in_dims."
        )


class _Written(Function):
    """Tells autograd that memory has become a value: all of it, or block `place` at dimension -2, if there is one."""

    @staticmethod
    def forward(ctx, memory, value, place):  # type: ignore[no-untyped-def]
        ctx.mark_dirty(memory)
        ctx.dtype, ctx.is_view = value.dtype, memory._is_view()
        ctx.save_for_backward(place)
        return memory

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (place,) = ctx.saved_tensors
        need_memory, need_value, _ = ctx.needs_input_grad
        if place is None:  # for a view, autograd would take None as the gradient of the whole base
            of_memory = torch.zeros_like(gradient) if need_memory and ctx.is_view else None
            return of_memory, gradient.to(ctx.dtype) if need_value else None, None
        place = place.clamp(min=0)
        here = (torch.arange(gradient.shape[-2], device=place.device) == place).unsqueeze(-1)
        of_memory = torch.where(here, 0.0, gradient) if need_memory else None
        if not need_value:
            return of_memory, None, None
        row = gradient.index_select(-2, place.reshape(1).long().clamp(max=gradient.shape[-2] - 1)).squeeze(-2)
        return of_memory, torch.where(here.any(), row, 0.0).to(ctx.dtype), None
