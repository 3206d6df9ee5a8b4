"""Attention Residuals of DTensors: tokens may be split in any way, all blocks alike; the other dimensions may not.

Nothing is sent. The gradients of the weights are, on each rank, sums over its own tokens: `Partial`, as from torch's norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npu_tiling.dtensor import Shards, moved, summed
from torch import Tensor

from .records import AttnResResult

_WEIGHTS = ("query", "rms_weight", "output_rms_weight")


def attn_res(
    run: Callable[..., Tensor | AttnResResult], residuals: Tensor | Sequence[Tensor], weights: Sequence[Tensor | None]
) -> Tensor | AttnResResult:
    """`run(residuals, *weights)` on each rank's own tokens."""
    placed = _Blocks(residuals, dict(zip(_WEIGHTS, weights, strict=True)))
    result = run(placed.local(), *[placed.shards.local(name, placed.gradient) for name in _WEIGHTS])
    if isinstance(result, Tensor):
        return placed.wrap(result, 0, placed.shape)
    return _wrapped(result, placed.shards, placed.of_tokens, placed.shape)


def phase1(
    run: Callable[..., tuple[Tensor, ...]], queries: Tensor, residuals: Tensor | Sequence[Tensor], rms_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """`run(queries, residuals, rms_weight)` on each rank's own tokens."""
    placed = _Blocks(residuals, {"queries": queries, "rms_weight": rms_weight})
    local_queries, local_norm = (placed.shards.local(name, placed.gradient) for name in ("queries", "rms_weight"))
    o, lse = run(local_queries, placed.local(), local_norm)
    return placed.wrap(o, 1, (len(queries), *placed.shape)), placed.wrap(lse, 1, (len(queries), *placed.shape[:-1]))


def with_prefix(
    run: Callable[..., AttnResResult],
    rows: Mapping[str, Tensor | None],
    weights: Sequence[Tensor | None],
    bank: Tensor | Sequence[Tensor] | None = None,
) -> AttnResResult:
    """`run` of rows, weights and the bank, by name, on each rank's own tokens; results lie as the prefix does."""
    blocks = {"bank": bank} if isinstance(bank, Tensor) else {f"bank[{i}]": block for i, block in enumerate(bank or ())}
    shards = Shards({**rows, **blocks, **dict(zip(_WEIGHTS, weights, strict=True))})
    placements = shards.rows("prefix")
    for name in (*rows, *blocks):
        shards.alike(name, placements, "prefix")
    shards.replicated(*_WEIGHTS)
    local = {name: shards.local(name, placements) for name in rows}
    local |= {name: shards.local(name, summed(placements)) for name in _WEIGHTS}
    if bank is not None:
        parts = [shards.local(name, placements) for name in blocks]
        local["bank"] = parts[0] if isinstance(bank, Tensor) else parts
    prefix = rows["prefix"]
    assert prefix is not None
    return _wrapped(run(**local), shards, placements, prefix.shape)


def _wrapped(result: AttnResResult, shards: Shards, placements: Sequence[Any], shape: Sequence[int]) -> AttnResResult:
    """Results of one rank as DTensors; rows [..., D] have these placements and this shape."""
    normalized, prefix = [None if part is None else shards.wrap(part, placements, shape) for part in result[1:3]]
    alpha = result.weights
    alpha = None if alpha is None else shards.wrap(alpha, moved(placements, 1), (len(alpha), *shape[:-1]))
    return AttnResResult(shards.wrap(result.output, placements, shape), normalized, prefix, alpha)


class _Blocks:
    """The blocks and what goes with them.

    Attributes:
        shards: all of them.
        shape: of one block, [..., D].
        of_tokens: placements of tensors [..., D].
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
        self.shape = named[first].shape[int(self._stacked) :]
        self.gradient = summed(placements)
        self._of_blocks = placements
        self.of_tokens = moved(placements, -1) if self._stacked else placements

    def local(self) -> Any:
        parts = [self.shards.local(name, self._of_blocks) for name in self._names]
        return parts[0] if self._stacked else parts

    def wrap(self, part: Tensor, leading: int, shape: Sequence[int]) -> Tensor:
        """A result with `leading` dimensions before those of the tokens."""
        return self.shards.wrap(part, moved(self.of_tokens, leading), shape)
