"""`Shape` -> `Tiling` on CUDA. Blocks are powers of two, as stock Triton asks for."""

from __future__ import annotations

import dataclasses
from math import ceil
from typing import Any

from npu_tiling import Device
from npu_tiling.budget.arithmetic import power_of_two
from npu_tiling.launching.cuda import equal_chunks
from npu_tiling.places import here

from ...shape import Shape, Task
from . import ways
from .tile import CudaTiling
from .ways import Way


def choose(shape: Shape, device: Device) -> CudaTiling | None:
    """The first rule that holds; None where no whole rows fit, or no rows of so many layers."""
    padded = power_of_two(shape.width)
    if shape.takes_columns:
        block_s = power_of_two(shape.layers)
        block_d = max(1, min(padded, ways.COLUMN_ELEMENTS // block_s))
        blocks: dict[str, Any] = {
            "block_s": block_s,
            "block_d": block_d,
            "warps": ways.COLUMN_WARPS,
            "per_core": ways.COLUMN_PER_CORE,
        }
        return _tiling(shape, device, Way.COLUMNS, f"{ways.COLUMN_ELEMENTS} elements a tile", **blocks)
    if shape.task == Task.LAYERS:
        block_s = power_of_two(shape.layers)
        if block_s * padded > ways.LAYER_ELEMENTS:
            return None
        why = f"at most {ways.LAYER_ELEMENTS} elements of all layers' rows"
        return _tiling(shape, device, Way.LAYERS, why, block_s=block_s, block_d=padded, warps=ways.LAYER_WARPS)
    if padded > ways.MAX_ROW:
        return None
    if shape.task == Task.FORWARD:
        return _loop(shape, device)
    if shape.task != Task.BACKWARD:
        warps = max(1, min(16, padded // ways.ROW_ELEMENTS_PER_WARP))
        return _tiling(shape, device, Way.ROW, "a row fits", block_d=padded, warps=warps, per_core=ways.ROW_PER_CORE)
    return _in_registers(shape, device) or _cooperating(shape, device) or _loop(shape, device)


def _tiling(shape: Shape, device: Device, way: Way, why: str, place: str = "", **chosen: Any) -> CudaTiling:
    """A tiling, with file and line of the table's row, or of the rule that made it."""
    return CudaTiling(shape=shape, device=device, way=way, why=why, decided_at=place or here(2), **chosen)


def _in_registers(shape: Shape, device: Device) -> CudaTiling | None:
    """All sources of a token in registers; None where they, or a row, have too many elements."""
    padded, block_n = power_of_two(shape.width), power_of_two(shape.n_sources)
    elements = block_n * padded
    row = next((row for row in ways.IN_REGISTERS if elements <= row.elements), None)
    if row is None or padded > ways.MAX_COLUMNS:
        return None
    warps = max(1, elements // row.per_warp, padded // ways.WARP_COLUMNS)
    per_core = max(1, min(row.per_core, ways.MAX_CORE_WARPS // warps))
    chosen = {"block_d": padded, "block_n": block_n, "warps": warps}
    why = f"{elements} elements a token, padded, are at most {row.elements}"
    for stages in range(ways.STAGES, 1, -1):
        tiling = _tiling(shape, device, Way.IN_REGISTERS, why, row.decided_at, stages=stages, **chosen)
        resident = device.ub_bytes // tiling.shared_bytes
        if resident:
            return dataclasses.replace(tiling, per_core=min(per_core, resident))
    return None


def _cooperating(shape: Shape, device: Device) -> CudaTiling | None:
    """A few sources and columns of a token in registers; None of one program, or past a limit of `COOPERATING`."""
    policy = ways.COOPERATING
    tiles = power_of_two(ceil(shape.n_sources / policy.sources))
    block_n = power_of_two(ceil(shape.n_sources / tiles))
    block_d = min(policy.tile_bytes // shape.itemsize // block_n, policy.columns, power_of_two(shape.width))
    programs_of_a_tile = ceil(shape.width / block_d)
    programs = programs_of_a_tile * tiles
    if programs == 1 or programs_of_a_tile > policy.programs or block_n * power_of_two(programs) > policy.words:
        return None
    chosen = {"block_d": block_d, "block_n": block_n, "tiles": tiles, "cooperating": programs, "warps": policy.warps}
    elements = power_of_two(shape.n_sources) * power_of_two(shape.width)
    token = f"{shape.n_sources} sources of {shape.width} columns, {elements} elements when both are padded"
    why = f"one program has no registers for a token's {token}; {programs} programs share it"
    for stages in range(ways.STAGES, 1, -1):
        tiling = _tiling(
            shape, device, Way.COOPERATING, why, policy.decided_at, stages=stages, per_core=policy.per_core, **chosen
        )
        if tiling.per_core * tiling.shared_bytes <= device.ub_bytes:
            return tiling if programs <= device.vector_cores * tiling.per_core else None
    return None


def _loop(shape: Shape, device: Device) -> CudaTiling:
    """A few sources of a token at a time."""
    is_backward, padded = shape.task == Task.BACKWARD, power_of_two(shape.width)
    chunk, chunks = (padded, 1) if is_backward else _chunks(shape.width)
    row, n_sources = chunk * chunks, power_of_two(shape.n_sources)
    rule = next(rule for rule in (ways.BACKWARD_LOOPS if is_backward else ways.FORWARD_LOOPS) if row <= rule.columns)
    tile_sources, least_warps = rule.sources, max(1, row // ways.FORWARD_WARP_COLUMNS)
    if is_backward:
        least_warps = ways.MIN_WARPS
        if row <= ways.BACKWARD_TILE:
            tile_sources = max(tile_sources, power_of_two(ways.BACKWARD_TILE // row + 1) // 2)
            tile_sources = min(tile_sources, n_sources // 2)
    block_n = max(1, min(n_sources, tile_sources))
    warps, stages, per_core = max(least_warps, block_n * row // rule.per_warp), rule.stages, rule.per_core
    if chunks > 1:
        warps = chunk // ways.CHUNK_COLUMNS_PER_WARP
        above, up_to = ways.EXTRA_STAGE
        stages += above < row <= up_to
        per_core = ways.NARROW_PER_CORE if warps <= 2 else per_core
    chosen = {"block_d": chunk, "chunks": chunks, "block_n": block_n, "warps": warps, "per_core": per_core}
    padding = f", padded to {row}" if row > shape.width else ""
    why = f"a tile has {block_n} of {shape.n_sources} sources of {shape.width} columns{padding}"
    if is_backward:
        sources = f"{shape.n_sources} sources of {shape.width} columns, padded to {n_sources} of {row}"
        why = f"the programs that may share a token have no registers for {sources}"
    tiling = _tiling(shape, device, Way.LOOP, why, rule.decided_at, stages=stages, **chosen)
    while tiling.shared_bytes > device.ub_bytes:
        tiling = _fewer_under_way(tiling)
    return tiling


def _chunks(width: int) -> tuple[int, int]:
    """Columns of the equal chunks of a row that pad it least, and how many there are: the fewest of equal padding.

    A row is one chunk where its power of two is at most `MIN_PADDING` times its chunks. 7168 columns are such a row.
    """
    chunk, chunks = equal_chunks(width, least=ways.MIN_CHUNK)
    padded = power_of_two(width)
    return (chunk, chunks) if padded > ways.MIN_PADDING * chunk * chunks else (padded, 1)


def smaller(tiling: CudaTiling) -> CudaTiling | None:
    """The next smaller tiling for a kernel that needs more than the device has; None at the end.

    The last one for whole rows is a sentinel: block_d < D, so `has_whole_rows` is False and the caller takes another way.
    """
    if tiling.cooperating:
        return _loop(tiling.shape, tiling.device)
    if tiling.block_n > 1 or tiling.stages > 1:
        return _fewer_under_way(tiling)
    if tiling.warps > 4:  # the registers of all threads
        return dataclasses.replace(tiling, warps=tiling.warps // 2)
    if tiling.block_d == 1 or not (tiling.shape.takes_columns or tiling.has_whole_rows):
        return None
    return dataclasses.replace(tiling, block_n=0, block_d=tiling.block_d // 2, chunks=1)


def _fewer_under_way(tiling: CudaTiling) -> CudaTiling:
    """Half of a tile's sources, in a loop over them; of one source a stage less."""
    if tiling.block_n > 1:
        return dataclasses.replace(tiling, block_n=tiling.block_n // 2, way=Way.LOOP)
    return dataclasses.replace(tiling, stages=tiling.stages - 1)
