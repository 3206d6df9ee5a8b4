"""The norm of DTensors: tokens may be split in any way, a row may not; the weight is whole on every rank.

Nothing is sent. The gradient of the weight is, on each rank, the sum over its own tokens: `Partial`, as from torch's norms.
Where x [..., H, D] is split along its heads, a weight [H, D] is split as they are, and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from npu_tiling.pytorch.sharding import Shards, shard, summed
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def _parameter(shards: Shards, name: str, tensor: Tensor | None, rows: Sequence[Placement], x: Tensor) -> Any:
    """This rank's part of a parameter, whose gradient is the sum over the rank's rows."""
    if tensor is None:
        return None
    from torch.distributed.tensor import Replicate, Shard

    gradient = list(summed(rows))
    for dimension, own in enumerate(shards.placements(name)):
        by_head = tensor.dim() == 2 and shard(rows[dimension]) == x.dim() - 2
        if by_head:
            gradient[dimension] = Shard(0)
        if own != (Shard(0) if by_head else Replicate()):
            shards.refuse(name, dimension, "Shard(dim=0), as x's heads are" if by_head else "Replicate()")
    return shards.local(name, gradient)


def rms_norm(run: Callable[..., Any], x: Tensor, weight: Tensor | None) -> Any:
    """`run(x, weight)` on each rank's own rows: a tensor, or a tuple of them."""
    shards = Shards({"x": x, "weight": weight})
    rows = shards.rows("x")
    parts = run(shards.local("x", rows), _parameter(shards, "weight", weight, rows, x))
    if isinstance(parts, Tensor):
        return shards.wrap(parts, rows, x.shape)
    return tuple(shards.wrap(part, rows, x.shape) for part in parts)


def add_rms_norm(run: Callable[..., Any], x: Tensor, residual: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
    """`run(x, residual, weight)` on each rank's own rows."""
    shards = Shards({"x": x, "residual": residual, "weight": weight})
    rows = shards.rows("x")
    shards.alike("residual", rows, "x")
    parts = run(shards.local("x", rows), shards.local("residual", rows), _parameter(shards, "weight", weight, rows, x))
    return tuple(shards.wrap(part, rows, x.shape) for part in parts)


def gated_rms_norm(run: Callable[..., Tensor], x: Tensor, gate: Tensor, weight: Tensor | None) -> Tensor:
    """`run(x, gate, weight)` on each rank's own rows."""
    shards = Shards({"x": x, "gate": gate, "weight": weight})
    rows = shards.rows("x")
    shards.alike("gate", rows, "x")
    y = run(shards.local("x", rows), shards.local("gate", rows), _parameter(shards, "weight", weight, rows, x))
    return shards.wrap(y, rows, x.shape)
