"""The look-up in a table whose rows lie with their owners: indices are sent to them, and rows come back.

    this rank                    owner of rows `bounds[r]` to before `bounds[r + 1]`
    indices, by owner    ->      indices of all ranks, in the ranks' order
    rows                 <-      its rows
    gradient of rows     ->      dweight: the sums over all ranks

An owner adds the gradients of a row in the order of the ranks, in fp32, rounded once, as one rank with all indices does.
The host waits once, for the numbers of indices: how much is sent depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from npu_tiling import device_for
from torch import Tensor

from . import reference


def look_up(
    run: Callable[[Tensor], Tensor], indices: Tensor, bounds: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Rows [..., D] of a split table for this rank's indices [...].

    Args:
        run: the look-up in this rank's rows, by indices of the whole table.
        indices: of this rank; any number, also none.
        bounds: of the ranks' rows, one more than ranks, from 0 to the rows of the whole table.
        group: the ranks, all of which call.
    """
    flat = indices.reshape(-1)
    if device_for(indices.device) is None:
        reference.check(indices, bounds[-1])  # here: an owner could not tell whose index it is
    reached = flat.unsqueeze(-1) >= torch.tensor(bounds[1:-1], dtype=torch.int64, device=flat.device)  # [n, ranks - 1]
    # CANN sorts fp32 numbers on the vector cores, integers on the AI CPU.
    order = torch.sort(reached.sum(-1, dtype=torch.float32), stable=True).indices
    ends = torch.nn.functional.pad(reached.sum(0), (1, 1))
    ends[0] = flat.numel()
    counts = ends[:-1] - ends[1:]  # [ranks]
    asked = torch.empty_like(counts)
    dist.all_to_all_single(asked, counts, group=group)
    sent, received = torch.stack((counts, asked)).tolist()
    wanted = _all_to_all(flat.index_select(0, order), sent, received, group)
    rows = _RowsOfOwners.apply(run(wanted), order, sent, received, group)
    return rows.view(*indices.shape, rows.shape[-1])


def _all_to_all(sent: Tensor, to: list[int], of: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """What the ranks send this one, `of` elements of the first dimension each, for what it sends `to` them."""
    received = sent.new_empty((sum(of), *sent.shape[1:]))
    dist.all_to_all_single(received, sent.contiguous(), of, to, group=group)
    return received


class _RowsOfOwners(torch.autograd.Function):
    """The rows that this rank asked for, in the order of its indices, for the rows that it was asked for."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, order: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.save_for_backward(order)
        ctx.exchanged = sent, received, group
        back = _all_to_all(rows, received, sent, group)
        return torch.empty_like(back).index_copy_(0, order, back)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return _all_to_all(dy.index_select(0, order), *ctx.exchanged), None, None, None, None
