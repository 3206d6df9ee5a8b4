"""Replaces the results of `npu_tiling.fit`, so that tilings use other block sizes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import npu_tiling
from npu_tiling import Block, Device, Tile

from ..errors import OfflineError

Sizes = Mapping[str, int]
_FACTORS = (1 / 4, 1 / 2, 3 / 4, 1, 5 / 4, 3 / 2, 2, 4)


@dataclass(frozen=True)
class Site:
    """One call of `npu_tiling.fit` by a tiling.

    Attributes:
        blocks: the blocks whose sizes it asks for; empty where a call lists its sizes.
        chosen: the sizes that it was given.
    """

    blocks: tuple[Block, ...]
    chosen: tuple[tuple[str, int], ...]

    def others(self) -> list[dict[str, int]]:
        """Other sizes to try: one block at a time, from a quarter of the chosen size to four times it."""
        chosen = dict(self.chosen)
        return [
            {**chosen, block.name: size}
            for block in self.blocks
            for size in _around(block, chosen[block.name])
            if size != chosen[block.name]
        ]


def _around(block: Block, chosen: int) -> list[int]:
    """Sizes near a chosen one, in steps that the block may have."""
    step = block.multiple_of
    sizes = {max(block.smallest, round(chosen * factor / step) * step) for factor in _FACTORS}
    return sorted({*sizes, chosen} - {0})


@contextlib.contextmanager
def answering(answer: Callable[[int, Site], Sizes | None]) -> Iterator[list[Site]]:
    """Until the block ends, `answer` replaces `npu_tiling.fit` in every module that has imported it.

    Args:
        answer: called with the number of a site, in the order of first calls, and the site; returns sizes, or None to keep
            the chosen ones.

    Yields:
        The sites so far.
    """
    sites: list[Site] = []
    numbers: dict[tuple[object, ...], int] = {}
    own = npu_tiling.fit

    def fit(tiles: Sequence[Tile], blocks: Sequence[Block], device: Device) -> dict[str, int]:
        chosen = own(tiles, blocks, device)
        site = Site(tuple(blocks), tuple(chosen.items()))
        key = (tuple(tiles), tuple(blocks))
        if key not in numbers:
            numbers[key] = len(sites)
            sites.append(site)
        sizes = dict(answer(numbers[key], site) or chosen)
        # A compiler may accept a tile that does not fit, without double buffering; not all of them do.
        if npu_tiling.footprint(tiles, sizes, device) > device.ub_bytes:
            raise OfflineError(f"blocks of {sizes} do not fit in {device.ub_bytes} bytes")  # not an error that tilings catch
        return sizes

    with contextlib.ExitStack() as stack:
        for module in _modules():
            stack.enter_context(mock.patch.object(module, "fit", fit))
        yield sites


def _modules() -> list[ModuleType]:
    """The modules that have imported `npu_tiling.fit`."""
    return [module for module in list(sys.modules.values()) if vars(module).get("fit") is npu_tiling.fit]
