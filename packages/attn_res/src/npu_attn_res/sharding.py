"""Attention Residuals of DTensors: tokens may be split in any way, all blocks alike; the other dimensions may not.

Nothing is sent. The gradients of the weights are, on each rank, sums over its own tokens: `Partial`, as from torch's norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npu_tiling.pytorch.sharding import Shards, moved, summed
from torch import Tensor

_STATE = ("o", "max", "sum")


def attn_res(
    run: Callable[..., Any], blocks: Tensor | Sequence[Tensor], weights: Mapping[str, Tensor | None], weights_too: bool
) -> Any:
    """`run(blocks, **weights)` on each rank's own tokens; its results are h, y and, `weights_too`, alpha, or h alone."""
    placed = _Blocks(blocks, weights)
    found = run(placed.local(), **{name: placed.shards.local(name, placed.gradient) for name in weights})
    parts = [found] if isinstance(found, Tensor) else list(found)
    alpha = [parts.pop()] if weights_too else []
    results = [placed.wrap(part, 0, placed.shape) for part in parts]
    results += [placed.wrap(part, 1, (placed.count, *placed.shape[:-1])) for part in alpha]
    return results[0] if isinstance(found, Tensor) else tuple(results)


def phase1(
    run: Callable[..., tuple[Tensor, ...]], queries: Tensor, blocks: Tensor | Sequence[Tensor], w_norm: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`run(queries, blocks, w_norm)` on each rank's own tokens."""
    placed = _Blocks(blocks, {"queries": queries, "w_norm": w_norm})
    local_queries, local_norm = (placed.shards.local(name, placed.gradient) for name in ("queries", "w_norm"))
    o, maximum, total = run(local_queries, placed.local(), local_norm)
    layers, tokens = len(queries), placed.shape[:-1]
    o = placed.wrap(o, 1, (layers, *placed.shape))
    return o, placed.wrap(maximum, 1, (layers, *tokens)), placed.wrap(total, 1, (layers, *tokens))


def merge(
    run: Callable[..., Any], rows: Mapping[str, Tensor | None], weights: Mapping[str, Tensor | None], partial: Tensor
) -> Any:
    """`run(**rows, **weights)` on each rank's own tokens; every result is placed as `partial` is."""
    shards = Shards({"partial": partial, **rows, **weights})
    placements = shards.rows("partial")
    for name in rows:
        shards.alike(name, placements, "partial")
    shards.replicated(*weights)
    parts = {name: shards.local(name, placements) for name in rows}
    found = run(**parts, **{name: shards.local(name, summed(placements)) for name in weights})
    if isinstance(found, Tensor):
        return shards.wrap(found, placements, partial.shape)
    return tuple([shards.wrap(part, placements, partial.shape) for part in found])


def bank(
    run: Callable[..., Any],
    blocks: Tensor | Sequence[Tensor],
    rows: Mapping[str, Tensor | None],
    weights: Mapping[str, Tensor | None],
) -> tuple[Any, ...]:
    """`run(bank=blocks, **rows, **weights)` on each rank's own tokens; every result is placed as the prefix is."""
    named = {"bank": blocks} if isinstance(blocks, Tensor) else {f"bank[{i}]": block for i, block in enumerate(blocks)}
    shards = Shards({**rows, **named, **weights})
    placements = shards.rows("prefix")
    for name in ("layer_output", *named):
        shards.alike(name, placements, "prefix")
    shards.replicated(*weights)
    parts = [shards.local(name, placements) for name in named]
    given = {name: shards.local(name, placements) for name in rows}
    given |= {name: shards.local(name, summed(placements)) for name in weights}
    found = run(bank=parts[0] if isinstance(blocks, Tensor) else parts, **given)
    prefix = rows["prefix"]
    assert prefix is not None
    leading = prefix.shape[:-1]
    return tuple(None if part is None else shards.wrap(part, placements, (*leading, part.shape[-1])) for part in found)


class _Blocks:
    """The blocks and what goes with them.

    Attributes:
        shards: all of them.
        count, shape: N and the shape [..., D] of one block.
        gradient: where the gradients of the weights are.
    """

    def __init__(self, blocks: Tensor | Sequence[Tensor], weights: Mapping[str, Tensor | None]) -> None:
        self._stacked = isinstance(blocks, Tensor)
        named = {"blocks": blocks} if isinstance(blocks, Tensor) else {f"blocks[{i}]": v for i, v in enumerate(blocks)}
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
