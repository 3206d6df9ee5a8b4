"""The look-up in a table that is split over ranks: rank `r` has rows `bounds[r]` to before `bounds[r + 1]`. Two ways:

Every rank looks up the indices of all ranks, where ranks have equally many: sizes are known, nothing waits, and a graph can
capture it. A rank gives -0.0 for rows that it does not hold; to add -0.0 changes nothing.

    this rank                    every rank
    indices              ->      indices of all ranks, in the ranks' order
    rows                 <-      the sum over the ranks of what they look up
    gradient of rows     ->      gradients of all rows; dweight: the sums over those of its own

By counts, with any numbers of indices: the host waits once, for how many indices go to each rank.

    this rank                    the owner of a row
    indices, by owner    ->      indices of its rows, in the ranks' order
    rows                 <-      its rows
    gradient of rows     ->      dweight: the sums over all ranks

Rows are equal bit for bit. (Rows times a `multiplier` may have 0.0 for -0.0: other ranks give 0.0 for them.) Gradients of a
row are added in the order of the ranks, in fp32, and rounded once, as by one rank with all indices; on accelerators the last
bits may differ in rows that two programs share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from npu_tiling import device_for
from torch import Tensor

from . import reference

# Bytes of rows that a rank sends where every rank looks up all: (ranks - 1) rows for each index. By counts it sends
# (ranks - 1) / ranks. On two H100s a step by counts took 1.0 to 1.7 ms more than one rank's, a step of this way .2 to .4 ms
# more; this is the most that was measured.
_MOST_SENT = 32 * 2**20
_BELOW_ALL = -(2**63)  # no index is below


def look_up(
    run: Callable[[Tensor], Tensor],
    indices: Tensor,
    bounds: tuple[int, ...],
    group: dist.ProcessGroup | None,
    *,
    row_bytes: int,
    equal_counts: bool,
) -> Tensor:
    """Rows [..., D] of a split table for this rank's indices [...].

    Args:
        run: the look-up in this rank's rows, by indices of the whole table: -0.0 for rows of other ranks.
        indices: of this rank; any number, also none.
        bounds: of the ranks' rows, one more than ranks, from 0 to the rows of the whole table.
        group: the ranks, all of which call.
        row_bytes: of a row of the result, the same on all ranks.
        equal_counts: whether all ranks have equally many indices, the same on all ranks.
    """
    if device_for(indices.device) is None:
        reference.check(indices, bounds[-1])  # before it is sent: an owner cannot say whose index it is
    ranks = len(bounds) - 1
    if equal_counts and (ranks - 1) * indices.numel() * row_bytes <= _MOST_SENT:
        return _OwnRows.apply(run(_gathered(indices, ranks, group)), group)
    rows = _by_counts(run, indices.reshape(-1), bounds, group)
    return rows.view(*indices.shape, rows.shape[-1])


def _gathered(own: Tensor, ranks: int, group: dist.ProcessGroup | None) -> Tensor:
    """The tensors [...] of all ranks, [ranks, ...]; this rank's is `own`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # later releases warn of this name
    gathered = own.new_empty((ranks, *own.shape))
    gather(gathered.view(-1), own.contiguous().view(-1), group=group)
    return gathered


class _OwnRows(torch.autograd.Function):
    """Takes what this rank looked up for each rank, [ranks, ..., D], contiguous; gives rows [..., D] of its own indices."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.gathering = len(rows), group
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        own = rows.new_empty(rows.shape[1:])
        scatter(own.view(-1), rows.view(-1), group=group)
        return own

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(dy, *ctx.gathering), None


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
    """The first row of each rank, [ranks], copied to the device once; the first rank's is below any index."""
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
