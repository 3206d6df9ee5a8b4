"""`Shape` -> `Tiling` on CUDA. Blocks are powers of two, as stock Triton asks for."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from math import ceil
from typing import Any

from npu_tiling import Device
from npu_tiling.budget.arithmetic import power_of_two
from npu_tiling.launching.cuda import WARP, equal_chunks, register_cap, row_options
from npu_tiling.places import here

from ...both.tiling import KERNELS, Kernel, Tiling
from ...shape import Shape, Task
from . import ways
from .ways import Way

_MAX_CHUNKS, _MIN_CHUNK, _MIN_PADDING = 8, 512, 1.2  # of a row forward: chunks, their columns, padding that is worth them
_NARROW_PER_CORE = 4  # programs of two warps
_CHUNK_COLUMNS_PER_WARP = 256  # all warps have columns side by side: sums over sources need no exchange between warps
_MIN_EXTRA_STAGE = 4096  # columns of a row in chunks from which on one more tile is under way

TURNS = 2  # as in cuda/cooperating.py

_MAX_ROW = 16384  # wider rows are split into blocks of columns
_LAYER_ELEMENTS, _LAYER_WARPS = 32768, 16  # rows of layers times columns
_COLUMN_ELEMENTS, _COLUMN_WARPS, _COLUMN_PER_CORE = 4096, 4, 4
_ROW_ELEMENTS_PER_WARP, _ROW_PER_CORE = 1024, 2  # merge and the gradient of the RMSNorm
SCRATCH_BYTES = 1024  # of shared memory, that reductions over warps take at most
_SHARED_SCRATCH_BYTES = 8192  # the same where programs share a token: six sums, and numbers of the next token

_FORWARD = Kernel(
    "cuda.forward",
    "attn_res_forward_sources_kernel",
    ("D", "BLOCK_N", "BLOCK_D", "CHUNKS", "STAGES", "HELD", "ALIGNED"),
)
_BACKWARD = Kernel(
    "cuda.backward",
    "attn_res_backward_sources_kernel",
    ("D", "BLOCK_N", "BLOCK_D", "STAGES", "HELD", "ALIGNED"),
)
_COOPERATING = Kernel(
    "cuda.cooperating",
    "attn_res_backward_shared_kernel",
    ("D", "PER_TILE", "TILES", "BLOCK_N", "BLOCK_D", "VECTOR", "STAGES", "SHARE", "SLOTS", "ALIGNED"),
)


@dataclass(frozen=True, kw_only=True, repr=False)
class CudaTiling(Tiling):
    """The tile of a launch on CUDA.

    Attributes:
        warps: of a program.
        stages: tiles under way in a loop.
        per_core: programs resident on a multiprocessor.
        block_n: sources of a tile; 0: a kernel has one source at a time.
        chunks: pieces of block_d columns that a row of a tile comes in.
        cooperating: programs that share a token; 0: none do.
        tiles: sets of sources; some of the programs that share a token have one set, block_d columns of it each.
    """

    way: Way
    warps: int = 4
    stages: int = 1
    per_core: int = 1
    block_n: int = 0
    chunks: int = 1
    cooperating: int = 0
    tiles: int = 1

    @functools.cached_property
    def kernel(self) -> Kernel:
        if self.way is Way.COOPERATING:
            return _COOPERATING
        return {Task.FORWARD: _FORWARD, Task.BACKWARD: _BACKWARD}.get(self.shape.task) or KERNELS[self.shape.task]

    @property
    def sizes(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "BLOCK_N": self.block_n,
            "CHUNKS": self.chunks,
            "STAGES": self.stages,
            "HELD": self.way is Way.IN_REGISTERS,
            "SHARE": self.cooperating,
            "SLOTS": power_of_two(max(1, self.cooperating)),
            "TILES": self.tiles,
            "PER_TILE": ceil(shape.n_sources / self.tiles),
            "VECTOR": min(16 // shape.itemsize, max(1, self.block_d // (self.warps * WARP))),
        }

    @property
    def options(self) -> dict[str, int]:
        options = row_options(self.block_d, self.warps)
        in_registers = self.way is Way.IN_REGISTERS and self.shape.task == Task.BACKWARD and self.per_core > 2
        if self.cooperating or in_registers:
            options["maxnreg"] = register_cap(self.warps, self.per_core)
        return options

    @property
    def programs_per_core(self) -> int:
        return self.per_core

    @property
    def row_columns(self) -> int:
        return self.block_d * self.chunks * max(1, self.cooperating // self.tiles)

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Shared memory that a program takes: the tiles that its loop has under way, but for the one in use."""
        rows, shape = self.block_n, self.shape
        if self.way in (Way.IN_REGISTERS, Way.COOPERATING):  # a loop over tokens: other rows than the sources' are under way
            rows += _other_rows(shape)
        row_bytes = self.block_d * self.chunks * shape.itemsize
        return (self.stages - 1) * rows * row_bytes + (_SHARED_SCRATCH_BYTES if self.cooperating else SCRATCH_BYTES)

    def grid(self, n_tokens: int) -> int:
        return self.groups(n_tokens) * self.cooperating if self.cooperating else super().grid(n_tokens)

    def groups(self, n_tokens: int) -> int:
        """Tokens that are shared at once."""
        return max(1, min(n_tokens, self.device.vector_cores * self.per_core // self.cooperating))

    def partials(self, n_tokens: int) -> int:
        return self.groups(n_tokens) * self.tiles if self.cooperating else self.grid(n_tokens)

    def words(self, n_tokens: int) -> int:
        """Words of 8 bytes, through which programs that share a token exchange their parts."""
        return self.groups(n_tokens) * TURNS * self.cooperating * (self.block_n + self.shape.prefix)


def _other_rows(shape: Shape) -> int:
    """Rows of a token beside its sources that a program loads: dh, a prefix and its gradient, or the norm's weight."""
    if shape.prefix:
        return 3
    if shape.task == Task.FORWARD:
        return int(shape.normalised)
    return 2 if shape.fp32_dh else 1


def choose(shape: Shape, device: Device) -> CudaTiling | None:
    """The first rule that holds; None where no whole rows fit, or no rows of so many layers."""
    padded = power_of_two(shape.width)
    if shape.takes_columns:
        block_s = power_of_two(shape.layers)
        block_d = max(1, min(padded, _COLUMN_ELEMENTS // block_s))
        blocks = {"block_s": block_s, "block_d": block_d, "warps": _COLUMN_WARPS, "per_core": _COLUMN_PER_CORE}
        return _tiling(shape, device, Way.COLUMNS, f"{_COLUMN_ELEMENTS} elements a tile", **blocks)
    if shape.task == Task.LAYERS:
        block_s = power_of_two(shape.layers)
        if block_s * padded > _LAYER_ELEMENTS:
            return None
        why = f"at most {_LAYER_ELEMENTS} elements of all layers' rows"
        return _tiling(shape, device, Way.LAYERS, why, block_s=block_s, block_d=padded, warps=_LAYER_WARPS)
    if padded > _MAX_ROW:
        return None
    if shape.task not in (Task.FORWARD, Task.BACKWARD):
        warps = max(1, min(16, padded // _ROW_ELEMENTS_PER_WARP))
        return _tiling(shape, device, Way.ROW, "a row fits", block_d=padded, warps=warps, per_core=_ROW_PER_CORE)
    return _in_registers(shape, device) or _cooperating(shape, device) or _loop(shape, device)


def _tiling(shape: Shape, device: Device, way: Way, why: str, **chosen: int) -> CudaTiling:
    """A tiling, with file and line of the rule that made it."""
    return CudaTiling(shape=shape, device=device, way=way, why=why, decided_at=here(2), **chosen)


def _in_registers(shape: Shape, device: Device) -> CudaTiling | None:
    """All sources of a token in registers; None where they are too many."""
    padded, block_n = power_of_two(shape.width), power_of_two(shape.n_sources)
    elements = block_n * padded
    if shape.task == Task.FORWARD:
        if elements > ways.FORWARD_IN_REGISTERS.elements:
            return None
        warps, per_core = ways.MIN_WARPS, ways.FORWARD_IN_REGISTERS.per_core
    else:
        row = next((row for row in ways.BACKWARD_IN_REGISTERS if elements <= row.elements), None)
        if row is None or padded > ways.MAX_COLUMNS:
            return None
        warps = max(ways.MIN_WARPS, elements // row.per_warp, padded // ways.WARP_COLUMNS)
        per_core = max(1, min(row.per_core, ways.MAX_CORE_WARPS // warps))
    chosen = {"block_d": padded, "block_n": block_n, "warps": warps, "per_core": per_core}
    for stages in range(ways.STAGES, 1, -1):
        found = _tiling(shape, device, Way.IN_REGISTERS, f"{elements} elements a token", stages=stages, **chosen)
        if found.shared_bytes <= device.ub_bytes:
            return found
    return None


def _cooperating(shape: Shape, device: Device) -> CudaTiling | None:
    """A few sources and columns of a token in registers; None where too many programs would share a token."""
    if shape.task != Task.BACKWARD:
        return None
    policy = ways.COOPERATING
    tiles = power_of_two(ceil(shape.n_sources / policy.sources))
    block_n = power_of_two(ceil(shape.n_sources / tiles))
    block_d = min(policy.tile_bytes // shape.itemsize // block_n, policy.columns, power_of_two(shape.width))
    programs_of_a_tile = ceil(shape.width / block_d)
    programs = programs_of_a_tile * tiles
    if programs == 1 or programs_of_a_tile > policy.programs or block_n * power_of_two(programs) > policy.words:
        return None
    chosen = {"block_d": block_d, "block_n": block_n, "tiles": tiles, "cooperating": programs, "warps": policy.warps}
    why = f"too many elements for one program; {programs} programs share a token"
    for stages in range(ways.STAGES, 1, -1):
        found = _tiling(shape, device, Way.COOPERATING, why, stages=stages, per_core=policy.per_core, **chosen)
        if found.per_core * found.shared_bytes <= device.ub_bytes:
            return found if programs <= device.vector_cores * found.per_core else None
    return None


def _loop(shape: Shape, device: Device) -> CudaTiling:
    """A few sources of a token at a time."""
    is_backward, padded = shape.task == Task.BACKWARD, power_of_two(shape.width)
    chunk, chunks = (padded, 1) if is_backward else _chunks(shape.width)
    row, n_sources = chunk * chunks, power_of_two(shape.n_sources)
    rule = next(rule for rule in (ways.BACKWARD_LOOPS if is_backward else ways.FORWARD_LOOPS) if row <= rule.columns)
    blocks = rule.sources
    if row <= ways.TILE_ELEMENTS:
        blocks = max(blocks, power_of_two(ways.TILE_ELEMENTS // row + 1) // 2)
        if is_backward:
            blocks = max(1, min(blocks, n_sources // 2))
    block_n = min(n_sources, blocks)
    warps, stages, per_core = max(ways.MIN_WARPS, block_n * row // rule.per_warp), rule.stages, rule.per_core
    if chunks > 1:
        warps = max(1, chunk // _CHUNK_COLUMNS_PER_WARP)
        stages += _MIN_EXTRA_STAGE < row <= ways.TILE_ELEMENTS
        per_core = _NARROW_PER_CORE if warps <= 2 else per_core
    blocks_and_chunks = {"block_d": chunk, "chunks": chunks, "block_n": block_n, "warps": warps, "per_core": per_core}
    why = (
        "more sources than registers" if not is_backward else "more sources than programs that share a token have registers"
    )
    found = _tiling(shape, device, Way.LOOP, why, stages=stages, **blocks_and_chunks)
    while found.shared_bytes > device.ub_bytes:
        found = _fewer_under_way(found)
    return found


def _chunks(width: int) -> tuple[int, int]:
    """Columns of the equal chunks of a row that pad it least, and how many there are: the fewest of equal padding.

    A row that the next power of two pads by a sixth or less, as that of 7168 columns, is faster as one chunk.
    """
    chunk, chunks = equal_chunks(width, least=_MIN_CHUNK, most=_MAX_CHUNKS)
    padded = power_of_two(width)
    return (chunk, chunks) if padded > _MIN_PADDING * chunk * chunks else (padded, 1)


def smaller(tiling: CudaTiling) -> CudaTiling | None:
    """The next smaller tiling for a kernel that needs more than the device has; None at the end.

    The last one for whole rows has fewer columns than a row: none fits, and other kernels are to take columns.
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
    if tiling.block_n > 1:
        return dataclasses.replace(tiling, block_n=tiling.block_n // 2, way=Way.LOOP)
    return dataclasses.replace(tiling, stages=tiling.stages - 1)
