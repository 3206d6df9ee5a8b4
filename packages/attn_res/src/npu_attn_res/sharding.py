"""Attention Residuals of DTensors: tokens may be split in any way, all blocks alike; the other dimensions may not.

Nothing is sent. The gradients of the weights are, on each rank, sums over its own tokens: `Partial`, as from torch's norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npu_tiling.pytorch.sharding import Shards, moved, summed
from torch import Tensor

from .results import AttnResResult


def attn_res(
    run: Callable[..., Tensor | AttnResResult], residuals: Tensor | Sequence[Tensor], weights: Mapping[str, Tensor | None]
) -> Tensor | AttnResResult:
    """`run(residuals, **weights)` on each rank's own tokens."""
    placed = _Blocks(residuals, weights)
    result = run(placed.local(), **{name: placed.shards.local(name, placed.gradient) for name in weights})
    if isinstance(result, Tensor):
        return placed.wrap(result, 0, placed.shape)
    output, normalized, _, alpha = result
    if normalized is not None:
        normalized = placed.wrap(normalized, 0, placed.shape)
    if alpha is not None:
        alpha = placed.wrap(alpha, 1, (placed.count, *placed.shape[:-1]))
    return AttnResResult(placed.wrap(output, 0, placed.shape), normalized, None, alpha)


def phase1(
    run: Callable[..., tuple[Tensor, ...]], queries: Tensor, residuals: Tensor | Sequence[Tensor], rms_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """`run(queries, residuals, rms_weight)` on each rank's own tokens."""
    placed = _Blocks(residuals, {"queries": queries, "rms_weight": rms_weight})
    local_queries, local_norm = (placed.shards.local(name, placed.gradient) for name in ("queries", "rms_weight"))
    o, lse = run(local_queries, placed.local(), local_norm)
    layers, tokens = len(queries), placed.shape[:-1]
    o = placed.wrap(o, 1, (layers, *placed.shape))
    return o, placed.wrap(lse, 1, (layers, *tokens))


def with_prefix(
    run: Callable[..., AttnResResult],
    rows: Mapping[str, Tensor | None],
    weights: Mapping[str, Tensor | None],
    bank: Tensor | Sequence[Tensor] | None = None,
) -> AttnResResult:
    """`run(**rows, **weights)`, with a bank if there is one, on each rank's own tokens; results lie as the prefix does."""
    blocks = {"bank": bank} if isinstance(bank, Tensor) else {f"bank[{i}]": block for i, block in enumerate(bank or ())}
    shards = Shards({**rows, **blocks, **weights})
    placements = shards.rows("prefix")
    for name in (*rows, *blocks):
        shards.alike(name, placements, "prefix")
    shards.replicated(*weights)
    local = {name: shards.local(name, placements) for name in rows}
    local |= {name: shards.local(name, summed(placements)) for name in weights}
    if bank is not None:
        parts = [shards.local(name, placements) for name in blocks]
        local["bank"] = parts[0] if isinstance(bank, Tensor) else parts
    result = run(**local)
    prefix = rows["prefix"]
    assert prefix is not None
    shape, alpha = prefix.shape, result.weights
    return AttnResResult(
        output=shards.wrap(result.output, placements, shape),
        normalized=None if result.normalized is None else shards.wrap(result.normalized, placements, shape),
        prefix=None if result.prefix is None else shards.wrap(result.prefix, placements, shape),
        weights=None if alpha is None else shards.wrap(alpha, moved(placements, 1), (len(alpha), *shape[:-1])),
    )


class _Blocks:
    """The blocks and what goes with them.

    Attributes:
        shards: all of them.
        count, shape: N and the shape [..., D] of one block.
        gradient: where the gradients of the weights are.
    """

    def __init__(self, blocks: Tensor | Sequence[Tensor], weights: Mapping[str, Tensor | None]) -> None:
        self._stacked = isinstance(blocks, Tensor)
        named = {"residuals": blocks} if isinstance(blocks, Tensor) else {f"residuals[{i}]": v for i, v in enumerate(blocks)}
        self.shards = Shards({**named, **weights})
        self._names = list(named)
        first = self._names[0]
        placements = self.shards.rows(first, int(self._stacked))
        for name in self._names[1:]:
            self.shards.alike(name, placements, first)
        self.shards.replicated(*weights)
        self.count, self.shape = len(blocks), named[first].shape[int(self._stacked) :]
        self.gradient = summed(placements)
        self._of_blocks = placements
        self._of_tokens = moved(placements, -1) if self._stacked else placements

    def local(self) -> Any:
        parts = [self.shards.local(name, self._of_blocks) for name in self._names]
        return parts[0] if self._stacked else parts

    def wrap(self, part: Tensor, leading: int, shape: Sequence[int]) -> Tensor:
        """A result with `leading` dimensions before those of the tokens."""
        return self.shards.wrap(part, moved(self._of_tokens, leading), shape)
