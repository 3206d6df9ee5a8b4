"""Tables that are split over ranks: DTensors, and the exchange of indices and rows that they and the module ask for.

DTensors may be split in rows or in columns, or the indices, or indices and rows:

    indices        weight         result               gradient of weight
    Replicate()    Replicate()    Replicate()          Replicate()
    Shard(i)       Replicate()    Shard(i)             Partial(): on each rank the sum over its own indices
    Replicate()    Shard(0)       Partial()            Shard(0)
    Replicate()    Shard(1)       Shard of the last    Shard(1)
    Shard(i)       Shard(0)       Shard(i)             Shard(0)

on each dimension of the mesh. With whole indices and the table split in rows each rank looks up what it has and gives -0.0
for the rest, so that their sum, which `redistribute` takes, is the look-up. With both split, indices and rows are sent: see
below. Where indices divide evenly, ranks have equally many, and each looks up those of all, unless `max_norm` scales rows or
there are too many bytes. The other four send nothing.

The exchange, where rank `r` has rows `bounds[r]` to before `bounds[r + 1]`. Where ranks have equally many indices, every
rank looks up the indices of all (`by_all`): sizes are known, so that no host waits for numbers and a graph can capture it.

    this rank                    every rank
    indices              ->      indices of all ranks, in the ranks' order
    rows                 <-      the sum over the ranks of what they look up; a rank gives -0.0, which changes no sum, for
                                 rows that it does not have
    gradient of rows     ->      gradients of all rows; dweight: the sums over those of its own

With any numbers of indices (`by_counts`) the host waits once, for how many indices go to each rank.

    this rank                    the owner of a row
    indices, by owner    ->      indices of its rows, in the ranks' order
    rows                 <-      its rows
    gradient of rows     ->      dweight: the sums over all ranks

Rows are those of the whole table, bit for bit. Gradients of a row are added in the order of the ranks, in fp32, and rounded
once, as by one rank with all indices; on accelerators the last bits may differ in rows that two programs share.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from npu_tiling import arguments, collectives, device_for
from npu_tiling.calls import Empty, derive
from npu_tiling.dispatch import Function, apply, group_named
from npu_tiling.dtensor import Shards, is_replicated, shard
from npu_tiling.operators import Operator
from npu_tiling.plans import Plan, Slot
from torch import Tensor

from . import reference
from .call import Backward, ByAll, ByAllBackward, Forward, check_indices, padding_row
from .lookup import LIBRARY, backward, forward

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

# Bytes of rows that a rank sends where every rank looks up all: ranks - 1 rows for each index. By counts it sends, if
# indices are spread evenly, (ranks - 1) / ranks of a row. On two H100s a step by counts took 1.0 to 1.7 ms more than one
# rank's; a step of this way, with at most so many bytes, took .2 to .8 ms more.
_MOST_SENT = 32 * 2**20
_BELOW_ALL = -(2**63)  # no index is below


def of_dtensors(
    run: Callable[..., Tensor],
    indices: Tensor,
    weight: Tensor,
    padding_idx: int | None,
    max_norm: float | None,
    scale_grad_by_freq: bool,
    sparse: bool,
    multiplier: float | None,
) -> Tensor:
    """`run(indices, weight)` on the part of each rank, with its range of rows and the options that the split allows."""
    shards = Shards({"indices": indices, "weight": weight})
    split = shards.check("indices", lambda _, p: is_replicated(p) or shard(p) >= 0, "Replicate() or Shard")
    table = shards.check("weight", lambda _, p: is_replicated(p) or shard(p) >= 0, "Replicate(), Shard(0) or Shard(1)")
    both = [i for i, p in enumerate(split) if shard(p) >= 0 and shard(table[i]) == 0]  # mesh dimensions that split both
    must = "Replicate() or Shard(0) where indices is split"
    shards.check("weight", lambda i, p: is_replicated(p) or is_replicated(split[i]) or i in both, must)
    if sparse:
        raise ValueError("sparse is True and must be False where weight is a DTensor.")
    has_partial_sums = any(not is_replicated(p) and i not in both for i, p in enumerate(split))  # of the weight's gradient
    if scale_grad_by_freq and has_partial_sums:
        limits = "must be False where indices is split and weight's rows are not: each rank counts its own"
        raise ValueError(f"scale_grad_by_freq is True and {limits}.")
    if max_norm is not None and (has_partial_sums or any(shard(p) == 1 for p in table)):
        limits = "must be None where indices is split and weight's rows are not, or weight in columns"
        raise ValueError(f"max_norm is {max_norm} and {limits}.")
    rows, total = shards.part("weight", 0), weight.shape[0]
    options: dict[str, Any] = {"padding_idx": padding_idx, "max_norm": max_norm, "multiplier": multiplier}
    options["scale_grad_by_freq"] = scale_grad_by_freq
    if rows is not None:
        options |= {"vocab_range": rows, "num_embeddings": total}
    placed = [_placed(i, w, indices.dim()) for i, w in zip(split, table, strict=True)]
    own = shards.local("weight", [gradient for _, gradient in placed])
    local = partial(run, weight=own, **options)
    if both:
        assert rows is not None
        ranks, cut = shards.mesh.size(both[0]), shard(split[both[0]])
        parts = math.prod(shards.mesh.size(i) for i, p in enumerate(split) if shard(p) == cut)
        wanted, group = shards.local("indices"), shards.mesh.get_group(both[0]).group_name
        equal_counts = indices.shape[cut] % parts == 0
        if equal_counts and wanted.shape[cut] * parts != indices.shape[cut]:
            ours = f"this rank's part of indices has shape {tuple(wanted.shape)}"
            raise ValueError(f"{ours} and must have 1 / {parts} of dimension {cut} of {tuple(indices.shape)}.")
        if equal_counts and max_norm is None and sends_little(wanted, own, ranks):
            padding = padding_row(padding_idx, total)
            part = by_all(wanted, own, rows, total, group, ranks, padding, scale_grad_by_freq)
            part = part if multiplier is None else part * multiplier
        else:
            bounds = tuple(min(r * -(-total // ranks), total) for r in range(ranks + 1))
            part = by_counts(local, wanted, bounds, group)
    else:
        part = local(shards.local("indices"))
    return shards.wrap(part, [result for result, _ in placed], (*indices.shape, weight.shape[1]))


def _placed(indices: Placement, weight: Placement, last: int) -> tuple[Any, Any]:
    """Where the result and the gradient of the weight are, on one dimension of the mesh."""
    from torch.distributed.tensor import Partial, Shard

    if not is_replicated(indices):
        return indices, weight if shard(weight) == 0 else Partial()
    if is_replicated(weight):
        return weight, weight
    return Partial() if shard(weight) == 0 else Shard(last), weight


def by_all(
    indices: Tensor,
    weight: Tensor,
    rows: tuple[int, int],
    total: int,
    group: str | None,
    ranks: int,
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
        ranks: how many it has.
        padding_idx: in the whole table, NO_ROW for none.
        scale_grad_by_freq: see `embedding`.

    Raises:
        ValueError: the weight has another number of rows.
    """
    first, last = rows
    arguments.shape("weight", weight, (last - first, weight.shape[1]))
    name = group or group_named().group_name
    call = ByAll(
        indices=indices,
        weight=weight,
        padding_idx=padding_idx,
        scale_grad_by_freq=scale_grad_by_freq,
        first_row=first,
        n_total=total,
        group=name,
        ranks=ranks,
    )
    found: Tensor
    found, _ = BY_ALL(call)
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
        check_indices(indices, bounds[-1])  # before they are sent: an owner cannot say whose index it is
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


def _plan_by_all(p: Plan, call: ByAll) -> tuple[Slot, Slot]:
    """The rows of this rank's indices, and the indices of all ranks."""
    wanted = call.results()
    of_all = p.torch(collectives.gather, call.indices, call.group, makes=wanted["of_all"])
    (rows,) = forward(p, _of_all(call, of_all))
    return p.torch(collectives.sum_of_own, rows, call.group, makes=wanted["rows"]), of_all


def _plan_by_all_backward(p: Plan, call: ByAllBackward) -> tuple[Slot]:
    dy: Any = call.dy
    dy = p.torch(collectives.gather, dy, call.group, makes=Empty((call.ranks, *dy.shape), dy.dtype))
    dweight, _ = backward(p, _gradient_of_all(call, dy))
    return (dweight,)


def _compute_by_all(call: ByAll) -> tuple[Tensor, Tensor]:
    # Before they are sent, while it is known whose index it is. After an error the other ranks wait for this one.
    check_indices(call.indices, call.n_total)
    of_all = collectives.gather(call.indices, call.group)
    (rows,) = reference.forward(_of_all(call, of_all))
    return collectives.sum_of_own(rows, call.group), of_all


def _compute_by_all_backward(call: ByAllBackward) -> tuple[Tensor]:
    dweight, _ = reference.backward(_gradient_of_all(call, collectives.gather(call.dy, call.group)))
    return (dweight,)


def _of_all(call: ByAll, of_all: Any) -> Forward:
    return derive(Forward, call, indices=of_all, sparse=False)


def _gradient_of_all(call: ByAllBackward, dy: Any) -> Backward:
    return derive(Backward, call, dy=dy, indices=call.of_all, sparse=False, dtype=dy.dtype)


BY_ALL = Operator(LIBRARY, "by_all", ByAll, ["rows", "of_all"], plan=_plan_by_all, reference=_compute_by_all)
BY_ALL_BACKWARD = Operator(
    LIBRARY,
    "by_all_backward",
    ByAllBackward,
    ["dweight"],
    plan=_plan_by_all_backward,
    reference=_compute_by_all_backward,
    is_gradient=True,
)


class _ByAll(Function):
    @staticmethod
    def forward(ctx, run, indices, weight, *options):  # type: ignore[no-untyped-def]
        rows, of_all = run(indices, weight, *options)
        ctx.save_for_backward(of_all)
        ctx.mark_non_differentiable(of_all)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.n_rows = ByAll(None, None, *options), weight.shape[0]  # the call's tensors are saved
        ctx.of_rows = rows.shape, rows.dtype
        return rows, of_all

    @staticmethod
    def backward(ctx, dy, _):  # type: ignore[no-untyped-def]
        (of_all,) = ctx.saved_tensors
        if dy is None:  # other ranks wait for this one's
            shape, dtype = ctx.of_rows
            dy = of_all.new_zeros(shape, dtype=dtype)
        dweight = BY_ALL_BACKWARD(derive(ByAllBackward, ctx.call, dy=dy, of_all=of_all, n_rows=ctx.n_rows))
        return None, None, dweight, *[None] * 6


BY_ALL.autograd(partial(apply, _ByAll), as_given=True)
