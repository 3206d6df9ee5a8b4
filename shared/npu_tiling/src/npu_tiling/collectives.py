"""Collectives that operators call inside. A group of processes is given by its name.

Later releases of PyTorch warn of the older names. Gloo takes tensors of one dimension alone.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from .dispatch import group_named


def ranks(group: str) -> int:
    """How many processes a group has."""
    size: int = group_named(group).size()
    return size


def sum_(values: Tensor, group: str) -> None:
    """The sum over the ranks, in place. Values that are not contiguous are copied for it, and back."""
    sent = values.contiguous()
    dist.all_reduce(sent, dist.ReduceOp.SUM, group=group_named(group))
    if sent is not values:
        values.copy_(sent)


def gather(values: Tensor, group: str) -> Tensor:
    """The values [...] of each rank, [ranks, ...]."""
    gathered = values.new_empty((ranks(group), *values.shape))
    run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    run(gathered.view(-1), values.contiguous().view(-1), group=group_named(group))
    return gathered


def sum_of_own(values: Tensor, group: str) -> Tensor:
    """This rank's part [...] of the sum of values [ranks, ...] over the ranks."""
    own = values.new_empty(values.shape[1:])
    run = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    run(own.view(-1), values.contiguous().view(-1), group=group_named(group))
    return own
