"""The norm of DTensors: tokens may be split in any way, a row may not; the weight is whole on every rank.

Nothing is sent. The gradient of the weight is, on each rank, the sum over its own tokens: `Partial`, as from torch's norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npu_tiling.pytorch.sharding import Shards, summed
from torch import Tensor


def rms_norm(run: Callable[..., Any], x: Tensor, weight: Tensor | None) -> Any:
    """`run(x, weight)` on each rank's own rows: a tensor, or a tuple of them."""
    shards = Shards({"x": x, "weight": weight})
    rows = shards.rows("x")
    shards.replicated("weight")
    parts = run(shards.local("x", rows), shards.local("weight", summed(rows)))
    if isinstance(parts, Tensor):
        return shards.wrap(parts, rows, x.shape)
    return tuple(shards.wrap(part, rows, x.shape) for part in parts)


def add_rms_norm(run: Callable[..., Any], x: Tensor, residual: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
    """`run(x, residual, weight)` on each rank's own rows."""
    shards = Shards({"x": x, "residual": residual, "weight": weight})
    rows = shards.rows("x")
    shards.alike("residual", rows, "x")
    shards.replicated("weight")
    parts = run(shards.local("x", rows), shards.local("residual", rows), shards.local("weight", summed(rows)))
    return tuple(shards.wrap(part, rows, x.shape) for part in parts)


def gated_rms_norm(run: Callable[..., Tensor], x: Tensor, gate: Tensor, weight: Tensor | None) -> Tensor:
    """`run(x, gate, weight)` on each rank's own rows."""
    shards = Shards({"x": x, "gate": gate, "weight": weight})
    rows = shards.rows("x")
    shards.alike("gate", rows, "x")
    shards.replicated("weight")
    y = run(shards.local("x", rows), shards.local("gate", rows), shards.local("weight", summed(rows)))
    return shards.wrap(y, rows, x.shape)
