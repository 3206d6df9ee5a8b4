"""The embedding of DTensors: a table split in rows or in columns, or the indices split, or indices and rows.

    indices        weight         result               gradient of weight
    Replicate()    Replicate()    Replicate()          Replicate()
    Shard(i)       Replicate()    Shard(i)             Partial(): on each rank the sum over its own indices
    Replicate()    Shard(0)       Partial()            Shard(0)
    Replicate()    Shard(1)       Shard of the last    Shard(1)
    Shard(i)       Shard(0)       Shard(i)             Shard(0)

on each dimension of the mesh. With whole indices and the table split in rows each rank looks up what it has and gives -0.0
for the rest, so that their sum, which `redistribute` takes, is the look-up. With both split, indices and rows are sent: see
exchange.py. Where indices divide evenly, ranks have equally many, and each looks up those of all, unless `max_norm` scales
rows or there are too many bytes. The other four send nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from npu_tiling.pytorch.sharding import Shards, is_replicated, shard
from torch import Tensor

from . import checks, exchange

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def embedding(
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
    met = [i for i, p in enumerate(split) if shard(p) >= 0 and shard(table[i]) == 0]
    must = "Replicate() or Shard(0) where indices is split"
    shards.check("weight", lambda i, p: is_replicated(p) or is_replicated(split[i]) or i in met, must)
    if sparse:
        raise ValueError("sparse is True and must be False where weight is a DTensor.")
    # Ranks have partial sums of the weight's gradient.
    apart = any(not is_replicated(p) and i not in met for i, p in enumerate(split))
    if scale_grad_by_freq and apart:
        limits = "must be False where indices is split and weight's rows are not: each rank counts its own"
        raise ValueError(f"scale_grad_by_freq is True and {limits}.")
    if max_norm is not None and (apart or any(shard(p) == 1 for p in table)):
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
    if met:
        assert rows is not None
        ranks, cut = shards.mesh.size(met[0]), shard(split[met[0]])
        parts = math.prod(shards.mesh.size(i) for i, p in enumerate(split) if shard(p) == cut)
        wanted, group = shards.local("indices"), shards.mesh.get_group(met[0]).group_name
        equal_counts = indices.shape[cut] % parts == 0
        if equal_counts and wanted.shape[cut] * parts != indices.shape[cut]:
            ours = f"this rank's part of indices has shape {tuple(wanted.shape)}"
            raise ValueError(f"{ours} and must have 1 / {parts} of dimension {cut} of {tuple(indices.shape)}.")
        if equal_counts and max_norm is None and exchange.sends_little(wanted, own, ranks):
            padding_row = checks.padding_row(padding_idx, total)
            part = exchange.by_all(wanted, own, rows, total, group, padding_row, scale_grad_by_freq)
            part = part if multiplier is None else part * multiplier
        else:
            bounds = tuple(min(r * -(-total // ranks), total) for r in range(ranks + 1))
            part = exchange.by_counts(local, wanted, bounds, group)
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
