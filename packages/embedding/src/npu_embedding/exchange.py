"""The look-up in a table that is split over ranks: rank `r` has rows `bounds[r]` to before `bounds[r + 1]`. Two ways:

Every rank looks up the indices of all ranks, where those have equally many: split_operators.py.

By counts, with any numbers of indices: the host waits once, for how many indices go to each rank.

    this rank                    the owner of a row
    indices, by owner    ->      indices of its rows, in the ranks' order
    rows                 <-      its rows
    gradient of rows     ->      dweight: the sums over all ranks

Rows are those of the whole table, bit for bit. Gradients of a row are added in the order of the ranks, in fp32, and rounded
once, as by one rank with all indices; on accelerators the last bits may differ in rows that two programs share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from npu_tiling import device_for
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.collectives import group_named
from torch import Tensor

from . import reference
from .split_operators import OPERATORS

# Bytes of rows that a rank sends where every rank looks up all: ranks - 1 rows for each index. By counts it sends, if
# indices are spread evenly, (ranks - 1) / ranks of a row. On two H100s a step by counts took 1.0 to 1.7 ms more than one
# rank's; a step of this way, with at most so many bytes, took .2 to .8 ms more.
_MOST_SENT = 32 * 2**20
_BELOW_ALL = -(2**63)  # no index is below


def by_all(
    indices: Tensor,
    weight: Tensor,
    rows: tuple[int, int],
    total: int,
    group: str | None,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    """Rows [..., D] of a split table for this rank's indices [...]; every rank looks up those of all.

    Args:
        indices: of this rank; all ranks have equally many.
        weight: [last - first, D], this rank's rows.
        rows: (first, last), which these are.
        total: rows of the whole table.
        group: its name; None: the default group. All of its ranks call.
        padding_idx: in the whole table, NO_ROW for none.
        scale_grad_by_freq: see `embedding`.

    Raises:
        ValueError: the weight has another number of rows.
    """
    first, last = rows
    arguments.shape("weight", weight, (last - first, weight.shape[1]))
    name = group or dist.distributed_c10d._get_default_group().group_name
    found: Tensor
    found, _ = OPERATORS("by_all", indices, weight, padding_idx, scale_grad_by_freq, first, total, name)
    return found


def sends_little(indices: Tensor, weight: Tensor, ranks: int) -> bool:
    """Whether `by_all` sends few enough bytes to be the faster way; the same on all ranks that have equally many indices."""
    return (ranks - 1) * indices.numel() * weight.shape[1] * weight.element_size() <= _MOST_SENT


def by_counts(run: Callable[[Tensor], Tensor], indices: Tensor, bounds: tuple[int, ...], group: str | None) -> Tensor:
    """Rows [..., D] of a split table for this rank's indices [...], any number, also none.

    Args:
        run: the look-up in this rank's rows, by indices of the whole table.
        bounds: of the ranks' rows, one more than ranks, from 0 to the rows of the whole table.
        group: its name; None: the default group. All of its ranks call.
    """
    if device_for(indices.device) is None:
        reference.check(indices, bounds[-1])  # before they are sent: an owner cannot say whose index it is
    rows = _by_counts(run, indices.reshape(-1), bounds, None if group is None else group_named(group))
    return rows.view(*indices.shape, rows.shape[-1])


def _by_counts(
    run: Callable[[Tensor], Tensor], flat: Tensor, bounds: tuple[int, ...], group: dist.ProcessGroup | None
) -> Tensor:
    """Rows [n, D] for indices [n]."""
    reached = flat.unsqueeze(-1) >= _first_rows(bounds, flat.device)  # [n, ranks]
    # CANN sorts fp32 numbers on the vector cores, integers on the AI CPU.
    order = torch.sort(reached.sum(-1, dtype=torch.float32), stable=True).indices
    ends = torch.nn.functional.pad(reached.sum(0), (0, 1))
    counts = ends.new_empty((2, len(bounds) - 1))  # of indices: sent to each rank, received from each rank
    torch.sub(ends[:-1], ends[1:], out=counts[0])
    dist.all_to_all_single(counts[1], counts[0], group=group)
    sent, received = counts.tolist()
    wanted = _all_to_all(flat.index_select(0, order), sent, received, group)
    return _RowsOfOwners.apply(run(wanted), order, sent, received, group)


@functools.lru_cache(maxsize=64)
def _first_rows(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    """The first row of each rank, [ranks], copied to the device once; no index is below the first rank's."""
    with torch.inference_mode(False):
        return torch.tensor((_BELOW_ALL, *bounds[1:-1]), dtype=torch.int64, device=device)


def _all_to_all(sent: Tensor, to: list[int], of: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Sends to[r] elements of the first dimension to rank r; gives what is received, of[r] from rank r."""
    received = sent.new_empty((sum(of), *sent.shape[1:]))
    dist.all_to_all_single(received, sent.contiguous(), of, to, group=group)
    return received


class _RowsOfOwners(torch.autograd.Function):
    """Takes the rows that other ranks asked for; gives the rows that this rank asked for, in the order of its indices."""

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
