"""The embedding of DTensors: a table split in rows or in columns, or whole with the indices split. Nothing is sent.

    indices        weight         result               gradient of weight
    Replicate()    Replicate()    Replicate()          Replicate()
    Shard(i)       Replicate()    Shard(i)             Partial(): on each rank the sum over its own indices
    Replicate()    Shard(0)       Partial()            Shard(0)
    Replicate()    Shard(1)       Shard of the last    Shard(1)

on each dimension of the mesh. With the table split in rows each rank looks up what it has and gives zeros for the rest, so
that their sum, which `redistribute` takes, is the look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from npu_tiling.pytorch.sharding import Shards, is_replicated, shard
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def embedding(
    run: Callable[..., Tensor],
    indices: Tensor,
    weight: Tensor,
    max_norm: float | None,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> Tensor:
    """`run(indices, weight)` on the part of each rank, with its range of rows and the options that the split allows."""
    shards = Shards({"indices": indices, "weight": weight})
    split = shards.check("indices", lambda _, p: is_replicated(p) or shard(p) >= 0, "Replicate() or Shard")
    table = shards.check("weight", lambda _, p: is_replicated(p) or shard(p) >= 0, "Replicate(), Shard(0) or Shard(1)")
    shards.check("weight", lambda i, p: is_replicated(p) or is_replicated(split[i]), "Replicate() where indices is split")
    if sparse:
        raise ValueError("sparse is True and must be False where weight is a DTensor.")
    if scale_grad_by_freq and not all(map(is_replicated, split)):
        raise ValueError("scale_grad_by_freq is True and must be False where indices is split: each rank counts its own.")
    if max_norm is not None and not all(is_replicated(i) and shard(w) != 1 for i, w in zip(split, table, strict=True)):
        raise ValueError(f"max_norm is {max_norm} and must be None where indices is split, or weight in columns.")
    rows = shards.part("weight", 0)
    options: dict[str, Any] = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq}
    if rows is not None:
        options |= {"vocab_range": rows, "num_embeddings": weight.shape[0]}
    placed = [_placed(i, w, indices.dim()) for i, w in zip(split, table, strict=True)]
    local_weight = shards.local("weight", [gradient for _, gradient in placed])
    part = run(shards.local("indices"), local_weight, **options)
    return shards.wrap(part, [result for result, _ in placed], (*indices.shape, weight.shape[1]))


def _placed(indices: Placement, weight: Placement, last: int) -> tuple[Any, Any]:
    """Where the result and the gradient of the weight are, on one dimension of the mesh."""
    from torch.distributed.tensor import Partial, Shard

    if not is_replicated(indices):
        return indices, Partial()
    if is_replicated(weight):
        return weight, weight
    return Partial() if shard(weight) == 0 else Shard(last), weight
