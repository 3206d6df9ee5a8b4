"""`Shape` -> `Tiling` on Ascend: the first way of the table that fits the Unified Buffer."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from math import ceil
from typing import Any

from npu_tiling import Block, Device, TileTooLargeError, UnifiedBufferError, fit, footprint
from npu_tiling.budget.arithmetic import INT32_END, equal_blocks, round_up

from ...both.tiling import KERNEL_OF_TASK, Kernel, Tiling
from ...shape import Shape, Task
from .ways import Footprint, Way, ways

# Rows share a tile until one transfer has this many bytes: 8 KB reach 76 % of the bandwidth. 16 KB would reach 94 %, but
# when tiles fill the Unified Buffer the compilers reuse the idle half of a double buffer, and each load then waits for the
# arithmetic before it: `npu-offline tune` predicts less time for the smaller tiles. A forward that loads ahead keeps its
# buffers; with more than nine rows the time of its arithmetic on one number a row shows.
_TRANSFER_BYTES = 8 * 1024
_AHEAD_BYTES = 14 * 1024
_MAX_AHEAD_ROWS = 9
_COLUMN_BYTES = 8 * 1024  # of a transfer in the kernels that take columns
# Columns from which on a backward keeps <dh, v_i>. Predicted times over that of the bytes, of the kernel that keeps them and
# of tiles of rows, on CANN 8.5 and about 9.1: 1536 columns 2.18 : 3.26 and 2.36 : 2.16, 2048 1.86 : 2.96 and 2.02 : 1.98,
# 3072 1.70 : 2.65 and 1.80 : 1.99; 4096 beside a prefix, where one row is a tile, 1.65 : 2.25 and 1.62 : 2.10.
_MIN_KEPT_WIDTH = 2048
_MAX_KEPT_SOURCES = 64  # as SLOTS of ascend/backward_row.py

_ROWS = ("D", "BLOCK_M", "BLOCK_D")
_FORWARD_CONSTANTS = (*_ROWS, "BY_TOKEN")
_FORWARD = Kernel("ascend.forward", "attn_res_forward_kernel", _FORWARD_CONSTANTS)
_FORWARD_AHEAD = Kernel("ascend.prefetch", "attn_res_forward_prefetch_kernel", _FORWARD_CONSTANTS)
_BACKWARD = Kernel("ascend.backward", "attn_res_backward_kernel", _ROWS)
_BACKWARD_ROW = Kernel("ascend.backward_row", "attn_res_backward_row_kernel", ("D", "BLOCK_D", "HALVES"))


@dataclass(frozen=True, kw_only=True, repr=False)
class AscendTiling(Tiling):
    """The tile of a launch on Ascend; a program for each vector core."""

    way: Way

    @functools.cached_property
    def kernel(self) -> Kernel:
        task = self.shape.task
        if task == Task.FORWARD:
            return _FORWARD_AHEAD if self.way.ahead else _FORWARD
        if task == Task.BACKWARD:
            return _BACKWARD_ROW if self.shape.by_token else _BACKWARD
        return KERNEL_OF_TASK[task]

    @property
    def sizes(self) -> dict[str, Any]:
        return {"HALVES": self.way is Way.HALVES_KEPT, "BY_TOKEN": self.shape.by_token}

    @property
    def options(self) -> dict[str, int]:
        return {"multibuffer": self.way.two_buffers}

    @property
    def ub_bytes(self) -> int:
        """Declared bytes of Unified Buffer."""
        row = next(row for row in ways(self.shape) if row.way is self.way)
        tiles = row.tiles(self.shape, self.device, self.block_d, self.block_m * self.block_s)
        return footprint(tiles, {}, self.device)


def choose(shape: Shape, device: Device) -> AscendTiling | None:
    """The fastest way that fits; None where no whole rows do.

    Raises:
        UnifiedBufferError: not even the smallest block of columns fits.
    """
    error, refusals = None, []
    for row in ways(shape):
        try:
            blocks = _blocks(row, shape, device)
        except UnifiedBufferError as refused:
            error = refused
            refusals.append(f"{row.way}: {refused.needed:,} bytes")
            continue
        if blocks is not None:
            chosen = AscendTiling(shape=shape, device=device, way=row.way)
            why = f"faster ways cannot run ({', '.join(refusals)})" if refusals else "the fastest way of the table fits"
            return dataclasses.replace(chosen, **blocks, why=why, decided_at=row.decided_at)  # type: ignore[arg-type]
        refusals.append(f"{row.way}: two rows are further apart than 32-bit offsets reach")
    if shape.takes_columns and isinstance(error, TileTooLargeError):
        raise error
    return None


def _blocks(row: Footprint, shape: Shape, device: Device) -> dict[str, int] | None:
    """The largest tile of a way; None where rows cannot share one. Raises `UnifiedBufferError` where none fits."""
    padded = round_up(shape.width, _unit(shape, device))
    if shape.takes_columns:
        # Two rows at least: one alone reduces through the scalar unit, and loses its double buffer to CANN 9.0 on dav-c310.
        block_m = min(2, _addressable(shape)) if shape.layers == 1 else 1
        unit = _unit(shape, device)
        columns = Block("COLUMNS", min(padded, _COLUMN_BYTES // shape.itemsize), unit, unit)
        largest = fit(row.tiles(shape, device, "COLUMNS", shape.layers * block_m), (columns,), device)["COLUMNS"]
        return {"block_m": block_m, "block_s": shape.layers, "block_d": equal_blocks(padded, largest, unit)}
    if row.way.has_one_row:
        fit(row.tiles(shape, device, padded, 1), (), device)
        return {"block_d": padded}
    rows = _rows(row.way, padded * shape.itemsize, _addressable(shape))
    if rows < 2:  # one row alone has ways of its own
        return None
    return {
        "block_m": fit(row.tiles(shape, device, padded, "ROWS"), (Block("ROWS", rows, 2),), device)["ROWS"],
        "block_d": padded,
    }


def _rows(way: Way, row_bytes: int, addressable: int) -> int:
    """Rows that a tile should have: two or more keep row reductions in the vector unit."""
    ahead = min(_MAX_AHEAD_ROWS, _AHEAD_BYTES // row_bytes) if way.ahead else 0
    return min(max(2, _TRANSFER_BYTES // row_bytes, ahead), addressable)


def statistics_by_token(width: int, itemsize: int, n_sources: int, device: Device) -> bool:
    """Whether the statistics that a forward keeps are [tokens, sources], for a backward that keeps <dh, v_i>.

    An Ascend950 never has such a backward: nothing predicts its time there. Sources in fp32 have h, and one sweep.
    """
    if device.arch != "dav-c220" or itemsize > 2 or width < _MIN_KEPT_WIDTH or n_sources > _MAX_KEPT_SOURCES:
        return False
    return _can_keep(width, itemsize, device)


@functools.lru_cache(maxsize=256)
def _can_keep(width: int, itemsize: int, device: Device) -> bool:
    return choose(Shape(task=Task.BACKWARD, width=width, itemsize=itemsize, by_token=True), device) is not None


def smaller(tiling: AscendTiling) -> AscendTiling | None:
    """The next smaller tiling for a compiler that needs more Unified Buffer than was declared; None at the end.

    The last one for whole rows is a sentinel: block_d < D, so `has_whole_rows` is False and the caller takes another way.
    """
    shape = tiling.shape
    single = [row for row in ways(shape) if row.way.has_one_row]
    if tiling.block_m > 1:
        rows = tiling.block_m // 2
        if rows == 1 and single:
            return dataclasses.replace(tiling, block_m=1, way=single[0].way, decided_at=single[0].decided_at)
        return dataclasses.replace(tiling, block_m=rows)
    if single:
        tried = [row.way for row in single].index(tiling.way) + 1
        if tried < len(single):
            return dataclasses.replace(tiling, way=single[tried].way, decided_at=single[tried].decided_at)
    unit = _unit(shape, tiling.device)
    if tiling.block_d <= unit or not (shape.takes_columns or tiling.has_whole_rows):
        return None
    return dataclasses.replace(tiling, block_d=round_up(ceil(tiling.block_d / 2), unit))


def _unit(shape: Shape, device: Device) -> int:
    """Columns that make up one aligned piece of a row in every tensor."""
    return device.ub_align // (2 if shape.prefix else shape.itemsize)


def _addressable(shape: Shape) -> int:
    """Rows that one tile may have: offsets inside a tile are 32-bit."""
    return max(1, (INT32_END - shape.width) // max(shape.row_stride, shape.width))
