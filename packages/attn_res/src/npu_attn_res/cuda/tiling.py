"""Tiles on CUDA: the policies as tables, and the first rule that holds for a `Shape`.

Blocks are powers of two, as stock Triton asks for.

Comments beside rows are of the documentation: tokens x sources x width of a list in bf16 on an H200, and the milliseconds of
forward and backward together, or of the forward, with that row.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import Any, NamedTuple

from npu_tiling import ALL_TILES, Device
from npu_tiling.budget import WARP, equal_chunks, here, power_of_two, register_cap, row_options

from ..shape import Shape, Task, TokenTiling


class Way(Enum):
    """How the sources of a token are read."""

    LOOP = "a program loops over a few sources of a token at a time; a backward reads them twice"
    IN_REGISTERS = "a program has all sources of a token in registers, and loads the next token's meanwhile"
    COOPERATING = "several programs have some sources and columns of a token each, and exchange their parts of the sums"
    LAYERS = "a program has a source's row, and those of all layers, in registers"
    ROW = "a program has one row in registers"
    COLUMNS = "a program has a block of columns in registers"

    def __str__(self) -> str:
        return self.value


class InRegisters(NamedTuple):
    """All sources of a token in registers, backward.

    Attributes:
        elements: of a token's sources, padded to powers of two, at most.
        per_warp: elements of a warp, at most.
        per_core: programs resident on a multiprocessor, at most.
        decided_at: file and line of the row.
    """

    elements: int
    per_warp: int
    per_core: int
    decided_at: str


class Loop(NamedTuple):
    """A few sources of a token at a time.

    Attributes:
        columns: of a row, padded, at most.
        sources: of a tile, at most. A backward takes more until a tile has `BACKWARD_TILE` elements.
        per_warp: elements of a warp.
        per_core: programs that the grid has for each multiprocessor, at most. ALL_TILES: a program for each tile.
        stages: tiles under way.
        decided_at: file and line of the row.
    """

    columns: int
    sources: int
    per_warp: int
    per_core: int
    stages: int
    decided_at: str


MAX_ROW = 16384  # columns; wider rows are split into blocks of columns
LAYER_ELEMENTS, LAYER_WARPS = 32768, 16  # rows of layers times columns
COLUMN_ELEMENTS, COLUMN_WARPS, COLUMN_PER_CORE = 4096, 4, 4
ROW_ELEMENTS_PER_WARP, ROW_PER_CORE = 1024, 2  # merge and the gradient of the RMSNorm

# A row forward in chunks: their columns at least, and the padding of a whole row that they are worth.
MIN_CHUNK, MIN_PADDING = 512, 1.2
CHUNK_COLUMNS_PER_WARP = 256  # all warps have columns side by side: sums over sources need no exchange between warps
NARROW_PER_CORE = 4  # programs of two warps
EXTRA_STAGE = 4096, 8192  # a row in chunks, of more columns than the first and at most the second, has one more stage

# Several small tiles under way are faster than one large one.
STAGES = 3  # tiles under way in a loop over sources, or over tokens
MIN_WARPS = 4  # of a loop backward
# A loop backward takes more sources of narrow rows, at most half of a token's, until a tile has so many elements.
BACKWARD_TILE = 8192
FORWARD_WARP_COLUMNS = 2048  # a warp has no more columns of one source

# fmt: off
IN_REGISTERS = (
    # elements  per_warp  per_core
    InRegisters(4096,   2048,     4, here()),
    InRegisters(8192,   2048,     3, here()),  # 4096 x 4 x 2048: .0777
    InRegisters(16384,  2048,     2, here()),
    InRegisters(32768,  4096,     1, here()),  # 8192 x 8 x 4096: .458; 4096 x 8 x 2560: .163
)
# In registers: warps of all programs of a multiprocessor, columns of a warp, columns of a row.
MAX_CORE_WARPS, WARP_COLUMNS, MAX_COLUMNS = 16, 512, 8192

# Narrow rows have few warps. Several that share 256 columns exchange sums over sources: 32768 x 8 x 256 take .340 ms forward
# on an H100 with four warps, .061 with one.
FORWARD_LOOPS = (
    # columns  sources  per_warp  per_core   stages
    Loop(2048,   4,       2048,    ALL_TILES, STAGES, here()),
    Loop(4096,   2,       2048,    ALL_TILES, STAGES, here()),  # 8192 x 8 x 4096: .149 forward
    Loop(8192,   2,       4096,    ALL_TILES, STAGES, here()),  # 4096 x 8 x 7168: .135 forward
    Loop(16384,  1,       1024,    1,         STAGES + 1, here()),  # 2048 x 8 x 16384: .162 forward
)
BACKWARD_LOOPS = (
    Loop(4096,   4,       4096,    2,         STAGES, here()),
    Loop(8192,   2,       2048,    4,         STAGES, here()),
    Loop(16384,  1,       1024,    1,         STAGES, here()),
)
# fmt: on

# Programs that share a token. 4096 x 12 x 5120: .469; 4096 x 8 x 7168: .402; 2048 x 8 x 16384: .477; 8192 x 16 x 7168: 1.54
TILE_SOURCES, TILE_BYTES, TILE_COLUMNS = 8, 16384, 4096  # of a program's tile, at most
COOPERATING_WARPS, COOPERATING_PER_CORE = 4, 3  # of a program; programs resident on a multiprocessor
MAX_WORDS, MAX_PROGRAMS = 256, 16  # that a program reads for each token; that share the columns of a tile
COOPERATING_AT = here()

# Turns that words are for. A program publishes token t + 1 only once it has read t of all others: t + 2 may overwrite t.
TURNS = 2
SCRATCH_BYTES = 1024  # of shared memory, that reductions over warps take at most
_COOPERATING_SCRATCH_BYTES = 8192  # the same where programs share a token: six sums, and numbers of the next token


@dataclass(frozen=True, kw_only=True, repr=False)
class CudaTiling(TokenTiling):
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
    def kernel(self) -> str:
        own = {
            Task.FORWARD: "attn_res_forward_sources_kernel",
            Task.BACKWARD: f"attn_res_backward_{'shared' if self.cooperating else 'sources'}_kernel",
            Task.LAYERS: "attn_res_layers_kernel",
        }
        return own.get(self.shape.task) or super().kernel

    @property
    def sizes(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "BLOCK_N": self.block_n,
            "STAGES": self.stages,
            "HELD": self.way is Way.IN_REGISTERS,
            "PARTS": power_of_two(max(1, self.cooperating)),
            "TILES": self.tiles,
            "PER_TILE": ceil(shape.n_sources / self.tiles),
            "VECTOR": min(16 // shape.itemsize, max(1, self.block_d // (self.warps * WARP))),
        }

    @property
    def options(self) -> dict[str, int]:
        options = row_options(self.block_d, self.warps)
        if self.cooperating or (self.way is Way.IN_REGISTERS and self.per_core > 2):
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
        return (self.stages - 1) * rows * row_bytes + (_COOPERATING_SCRATCH_BYTES if self.cooperating else SCRATCH_BYTES)

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

    def _smaller(self) -> CudaTiling | None:
        """The next smaller tiling for a kernel that needs more than the device has; None at the end.

        The last one for whole rows has block_d < D: `has_whole_rows` is then False, and the caller takes another way.
        """
        if self.cooperating:
            return _loop(self.shape, self.device)
        if self.block_n > 1 or self.stages > 1:
            return _fewer_under_way(self)
        if self.warps > 4:  # the registers of all threads
            return dataclasses.replace(self, warps=self.warps // 2)
        if self.block_d == 1 or not (self.shape.takes_columns or self.has_whole_rows):
            return None
        return dataclasses.replace(self, block_n=0, block_d=self.block_d // 2, chunks=1)


def _other_rows(shape: Shape) -> int:
    """Rows of a token beside its sources that a program of a backward loads: dh, or a prefix, its gradient and dh."""
    if shape.prefix:
        return 3
    return 2 if shape.fp32_dh else 1


def choose(shape: Shape, device: Device) -> CudaTiling | None:
    """The first rule that holds; None where no whole rows fit, or no rows of so many layers."""
    padded = power_of_two(shape.width)
    if shape.takes_columns:
        block_s = power_of_two(shape.layers)
        block_d = max(1, min(padded, COLUMN_ELEMENTS // block_s))
        blocks: dict[str, Any] = {
            "block_s": block_s,
            "block_d": block_d,
            "warps": COLUMN_WARPS,
            "per_core": COLUMN_PER_CORE,
        }
        return _tiling(shape, device, Way.COLUMNS, f"{COLUMN_ELEMENTS} elements a tile", **blocks)
    if shape.task == Task.LAYERS:
        block_s = power_of_two(shape.layers)
        if block_s * padded > LAYER_ELEMENTS:
            return None
        why = f"at most {LAYER_ELEMENTS} elements of all layers' rows"
        return _tiling(shape, device, Way.LAYERS, why, block_s=block_s, block_d=padded, warps=LAYER_WARPS)
    if padded > MAX_ROW:
        return None
    if shape.task == Task.FORWARD:
        return _loop(shape, device)
    if shape.task != Task.BACKWARD:
        warps = max(1, min(16, padded // ROW_ELEMENTS_PER_WARP))
        return _tiling(shape, device, Way.ROW, "a row fits", block_d=padded, warps=warps, per_core=ROW_PER_CORE)
    return _in_registers(shape, device) or _cooperating(shape, device) or _loop(shape, device)


def _tiling(shape: Shape, device: Device, way: Way, why: str, place: str = "", **chosen: Any) -> CudaTiling:
    """A tiling, with file and line of the table's row, or of the rule that made it."""
    return CudaTiling(shape=shape, device=device, way=way, why=why, decided_at=place or here(2), **chosen)


def _in_registers(shape: Shape, device: Device) -> CudaTiling | None:
    """All sources of a token in registers; None where they, or a row, have too many elements."""
    padded, block_n = power_of_two(shape.width), power_of_two(shape.n_sources)
    elements = block_n * padded
    row = next((row for row in IN_REGISTERS if elements <= row.elements), None)
    if row is None or padded > MAX_COLUMNS:
        return None
    warps = max(1, elements // row.per_warp, padded // WARP_COLUMNS)
    per_core = max(1, min(row.per_core, MAX_CORE_WARPS // warps))
    chosen = {"block_d": padded, "block_n": block_n, "warps": warps}
    why = f"{elements} elements a token, padded, are at most {row.elements}"
    for stages in range(STAGES, 1, -1):
        tiling = _tiling(shape, device, Way.IN_REGISTERS, why, row.decided_at, stages=stages, **chosen)
        resident = device.ub_bytes // tiling.shared_bytes
        if resident:
            return dataclasses.replace(tiling, per_core=min(per_core, resident))
    return None


def _cooperating(shape: Shape, device: Device) -> CudaTiling | None:
    """A few sources and columns of a token in registers; None of one program, or past a limit."""
    tiles = power_of_two(ceil(shape.n_sources / TILE_SOURCES))
    block_n = power_of_two(ceil(shape.n_sources / tiles))
    block_d = min(TILE_BYTES // shape.itemsize // block_n, TILE_COLUMNS, power_of_two(shape.width))
    programs_of_a_tile = ceil(shape.width / block_d)
    programs = programs_of_a_tile * tiles
    if programs == 1 or programs_of_a_tile > MAX_PROGRAMS or block_n * power_of_two(programs) > MAX_WORDS:
        return None
    chosen = {"block_d": block_d, "block_n": block_n, "tiles": tiles, "cooperating": programs, "warps": COOPERATING_WARPS}
    elements = power_of_two(shape.n_sources) * power_of_two(shape.width)
    token = f"{shape.n_sources} sources of {shape.width} columns, {elements} elements when both are padded"
    why = f"one program has no registers for a token's {token}; {programs} programs share it"
    for stages in range(STAGES, 1, -1):
        tiling = _tiling(
            shape, device, Way.COOPERATING, why, COOPERATING_AT, stages=stages, per_core=COOPERATING_PER_CORE, **chosen
        )
        if tiling.per_core * tiling.shared_bytes <= device.ub_bytes:
            return tiling if programs <= device.vector_cores * tiling.per_core else None
    return None


def _loop(shape: Shape, device: Device) -> CudaTiling:
    """A few sources of a token at a time."""
    is_backward, padded = shape.task == Task.BACKWARD, power_of_two(shape.width)
    chunk, chunks = (padded, 1) if is_backward else _chunks(shape.width)
    row, n_sources = chunk * chunks, power_of_two(shape.n_sources)
    rule = next(rule for rule in (BACKWARD_LOOPS if is_backward else FORWARD_LOOPS) if row <= rule.columns)
    tile_sources, least_warps = rule.sources, max(1, row // FORWARD_WARP_COLUMNS)
    if is_backward:
        least_warps = MIN_WARPS
        if row <= BACKWARD_TILE:
            tile_sources = max(tile_sources, power_of_two(BACKWARD_TILE // row + 1) // 2)
            tile_sources = min(tile_sources, n_sources // 2)
    block_n = max(1, min(n_sources, tile_sources))
    warps, stages, per_core = max(least_warps, block_n * row // rule.per_warp), rule.stages, rule.per_core
    if chunks > 1:
        warps = chunk // CHUNK_COLUMNS_PER_WARP
        above, up_to = EXTRA_STAGE
        stages += above < row <= up_to
        per_core = NARROW_PER_CORE if warps <= 2 else per_core
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
    chunk, chunks = equal_chunks(width, least=MIN_CHUNK)
    padded = power_of_two(width)
    return (chunk, chunks) if padded > MIN_PADDING * chunk * chunks else (padded, 1)


def _fewer_under_way(tiling: CudaTiling) -> CudaTiling:
    """Half of a tile's sources, in a loop over them; of one source a stage less."""
    if tiling.block_n > 1:
        return dataclasses.replace(tiling, block_n=tiling.block_n // 2, way=Way.LOOP)
    return dataclasses.replace(tiling, stages=tiling.stages - 1)
