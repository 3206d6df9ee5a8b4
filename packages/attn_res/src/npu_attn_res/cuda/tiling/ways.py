"""The ways to run a kernel on CUDA, and the policies, as tables.

`measured` is a row of the documentation, tokens x sources x width of a list in bf16 on an H200, and the milliseconds of its
forward and backward together, or of its forward. It is empty where the documentation has none.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from npu_tiling import ALL_TILES
from npu_tiling.places import here


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
        measured: with this policy.
        decided_at: file and line of the row.
    """

    elements: int
    per_warp: int
    per_core: int
    measured: str
    decided_at: str


class Loop(NamedTuple):
    """A few sources of a token at a time.

    Attributes:
        columns: of a row, padded, at most.
        sources: of a tile, at most. A backward takes more until a tile has `BACKWARD_TILE` elements.
        per_warp: elements of a warp.
        per_core: programs that the grid has for each multiprocessor, at most. ALL_TILES: a program for each tile.
        stages: tiles under way.
        measured: with this policy.
        decided_at: file and line of the row.
    """

    columns: int
    sources: int
    per_warp: int
    per_core: int
    stages: int
    measured: str
    decided_at: str


class Cooperating(NamedTuple):
    """Programs that share a token.

    Attributes:
        sources, tile_bytes, columns: of a program's tile, at most.
        warps: of a program.
        per_core: programs resident on a multiprocessor.
        words: that a program reads for each token, at most.
        programs: that share the columns of a tile, at most.
        measured: with this policy.
        decided_at: file and line of the policy.
    """

    sources: int
    tile_bytes: int
    columns: int
    warps: int
    per_core: int
    words: int
    programs: int
    measured: str
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
BACKWARD_TILE = (
    8192  # elements: a loop backward takes more sources of narrow rows, at most half of a token's, until it has them
)
FORWARD_WARP_COLUMNS = 2048  # a warp has no more columns of one source

# fmt: off
IN_REGISTERS = (
    # elements  per_warp  per_core
    InRegisters(4096,   2048,     4, "", here()),
    InRegisters(8192,   2048,     3, "4096 x 4 x 2048: .0777", here()),
    InRegisters(16384,  2048,     2, "", here()),
    InRegisters(32768,  4096,     1, "8192 x 8 x 4096: .458; 4096 x 8 x 2560: .163", here()),
)
# In registers: warps of all programs of a multiprocessor, columns of a warp, columns of a row.
MAX_CORE_WARPS, WARP_COLUMNS, MAX_COLUMNS = 16, 512, 8192

# Narrow rows have few warps. Several that share 256 columns exchange sums over sources: 32768 x 8 x 256 take .340 ms forward
# on an H100 with four warps, .061 with one.
FORWARD_LOOPS = (
    # columns  sources  per_warp  per_core   stages
    Loop(2048,   4,       2048,    ALL_TILES, STAGES,     "", here()),
    Loop(4096,   2,       2048,    ALL_TILES, STAGES,     "8192 x 8 x 4096: .149 forward", here()),
    Loop(8192,   2,       4096,    ALL_TILES, STAGES,     "4096 x 8 x 7168: .135 forward", here()),
    Loop(16384,  1,       1024,    1,         STAGES + 1, "2048 x 8 x 16384: .162 forward", here()),
)
BACKWARD_LOOPS = (
    Loop(4096,   4,       4096,    2,         STAGES,     "", here()),
    Loop(8192,   2,       2048,    4,         STAGES,     "", here()),
    Loop(16384,  1,       1024,    1,         STAGES,     "", here()),
)
COOPERATING = Cooperating(
    sources=8, tile_bytes=16384, columns=4096, warps=4, per_core=3, words=256, programs=16,
    measured="4096 x 12 x 5120: .469; 4096 x 8 x 7168: .402; 2048 x 8 x 16384: .477; 8192 x 16 x 7168: 1.54",
    decided_at=here(),
)
# fmt: on
