"""The norm of DTensors: tokens may be split in any way, a row may not; weight and bias are whole on every rank.

Nothing is sent. The gradient of the weight is, on each rank, the sum over its own tokens: `Partial`, as from torch's norms.
Where x [..., H, D] is split along its heads, a weight [H, D] is split as they are, and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from npu_tiling.pytorch.sharding import Shards, shard, summed
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def on_own_rows(run: Callable[..., Any], rows: Mapping[str, Tensor], parameters: Mapping[str, Tensor | None]) -> Any:
    """`run(*rows, **parameters)` on each rank's part: a tensor, or a tuple of them, of the rows of the first of `rows`."""
    first, x = next(iter(rows.items()))
    shards = Shards({**rows, **parameters})
    placements = shards.rows(first)
    for name in rows:
        shards.alike(name, placements, first)
    own = {name: _parameter(shards, name, tensor, placements, x) for name, tensor in parameters.items()}
    parts = run(*(shards.local(name, placements) for name in rows), **own)
    wrap = lambda part: shards.wrap(part, placements, (*x.shape[:-1], *part.shape[x.dim() - 1 :]))  # noqa: E731
    return wrap(parts) if isinstance(parts, Tensor) else tuple(map(wrap, parts))


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
