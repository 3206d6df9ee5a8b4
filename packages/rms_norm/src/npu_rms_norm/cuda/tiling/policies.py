"""The policies of CUDA's tilings, as tables: of forward and backward the first row that a shape matches is taken.

Measured on an H200 with the shapes of the documentation's tables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from npu_tiling import ALL_TILES
from npu_tiling.places import here

SHARE_COLUMNS = 1024  # of each program that shares a row
BY_REGISTERS = 0  # programs of a core: as many as its registers have room for


class Policy(NamedTuple):
    """A row of the tables; the first that a shape matches is taken.

    Attributes:
        shape: traits that a shape must have, all of them: "gated", "quantised"; "one chunk": several chunks would pad
            the row as much as one block does; "chunks": they pad it less; "unshareable": no program can share its rows;
            "any".
        columns: the most columns of a row, padded to a power of two; of rows "in chunks", padded to chunks.
        kernel: "rows" holds them in registers; "wide" reads them twice; "shared": several programs hold a row.
        tile: elements of a tile of several rows; 0: a tile is one row, in chunks.
        block: columns of a block of "wide" and "shared"; below 1 a share of the padded row.
        warps: of a program; 0: by the chunk.
        per_core: programs resident on a core.
        capped: the compiler may use as many registers as leave room for them, and no more.
        why: for people.
        decided_at: file and line of the row.
    """

    shape: str
    columns: int
    kernel: str
    tile: int
    block: float
    warps: int
    per_core: int
    capped: bool
    why: str
    decided_at: str


def _row(*columns: Any) -> Policy:
    return Policy._make((*columns, here(2)))


END = 2**31
_SEVERAL = "rows fit registers: several a program"
_ONCE = "a row fits registers: the gate is read while the row is summed"
_THRICE = "other kernels would read it three times"
_CHUNKS = "a row fits registers, in chunks"
_CACHED = "the second read finds the row in a cache, and fewer registers leave room for more rows"
_ALONE = "one program a core: rows of two evict each other before the second read"
# fmt: off
FORWARD = (
    #    shape                  columns  kernel   tile  block  warps  per core   capped
    _row("gated",               1024,    "rows",  1024, 0,     4,     ALL_TILES, False, _SEVERAL),
    _row("gated, one chunk",    4096,    "rows",  4096, 0,     4,     ALL_TILES, False, _ONCE),
    _row("any",                 256,     "rows",  2048, 0,     4,     ALL_TILES, False, _SEVERAL),
    _row("any",                 1024,    "rows",  4096, 0,     4,     ALL_TILES, False, _SEVERAL),
    _row("quantised, one chunk", 2048,   "rows",  0,    0,     4,     ALL_TILES, False, _THRICE),
    _row("quantised, one chunk", 4096,   "rows",  0,    0,     8,     ALL_TILES, False, _THRICE),
    _row("quantised, one chunk", 8192,   "rows",  0,    0,     16,    ALL_TILES, False, _THRICE),
    _row("quantised, chunks",   8192,    "rows",  0,    0,     8,     ALL_TILES, False, _THRICE),
    _row("quantised, chunks",   16384,   "rows",  0,    0,     16,    ALL_TILES, False, _THRICE),
    _row("in chunks, chunks",   6144,    "rows",  0,    0,     0,     ALL_TILES, False, "chunks pad it least"),
    _row("any",                 2048,    "wide",  0,    1 / 2, 4,     ALL_TILES, False, _CACHED),
    _row("any",                 8192,    "wide",  0,    1 / 2, 8,     ALL_TILES, False, _CACHED),
    _row("any",                 16384,   "wide",  0,    4096,  16,    ALL_TILES, False, _CACHED),
    _row("any",                 END,     "wide",  0,    1 / 4, 32,    1,         True,  _ALONE),
)
BACKWARD = (
    #    shape                  columns  kernel   tile  block  warps  per core      capped
    _row("gated",               32,      "rows",  2048, 0,     8,     3,            False, _SEVERAL),
    _row("any",                 32,      "rows",  4096, 0,     8,     3,            False, _SEVERAL),
    _row("gated",               1024,    "rows",  2048, 0,     8,     3,            True,  _SEVERAL),
    _row("any",                 1024,    "rows",  4096, 0,     8,     3,            True,  _SEVERAL),
    _row("gated, one chunk",    2048,    "rows",  2048, 0,     4,     5,            True,  "a row fits registers"),
    _row("gated, one chunk",    4096,    "rows",  2048, 0,     8,     2,            True,  "a row fits registers"),
    _row("one chunk",           4096,    "rows",  4096, 0,     8,     3,            True,  "a row fits registers"),
    _row("in chunks",           4096,    "rows",  0,    0,     4,     BY_REGISTERS, True,  _CHUNKS),
    _row("in chunks",           8192,    "rows",  0,    0,     8,     BY_REGISTERS, True,  _CHUNKS),
    _row("any",                 16384,   "rows",  0,    0,     16,    BY_REGISTERS, True,  _CHUNKS),
    _row("unshareable",         END,     "wide",  0,    2048,  8,     4,            False, "no program holds a row"),
    _row("any",                 END,     "shared", 0,   SHARE_COLUMNS, 2, 8,        True,  "programs hold a row together"),
)
# Of q, k and v together: tiles of rows as narrow as a head.
QK_BACKWARD = _row("any",      1024,    "rows",  2048, 0,     4,     5,            True,  "q, k and v share a launch")
# fmt: on
