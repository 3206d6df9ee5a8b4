"""Which kernel runs on CUDA, with which tile and grid: the first row of FORWARD or BACKWARD that a shape matches.

Tiles have sizes that are powers of two, as stock Triton asks. The tables were measured on an H200, with the shapes of the
documentation's tables.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

from npu_tiling import ALL_TILES, Device, persistent_grid
from npu_tiling.budget import CORE_REGISTERS, WARP, equal_chunks, here, power_of_two, register_cap, row_options

from ..shape import MAX_COUNTED_ROWS, Shape

SHARE_COLUMNS = 1024  # of a row that several programs hold, in each program
BY_REGISTERS = 0  # `per_core`: as many programs as a core has registers for


class Policy(NamedTuple):
    """A row of a table. A shape matches it that has all traits of `shape` and no more than `columns`.

    Attributes:
        shape: traits, with commas between them. "gated", "quantised": as `Shape` has them. "alone": there is no residual.
            "one chunk": several chunks would pad the row as much as one block does; "chunks": they pad it less.
            "unshareable": programs cannot hold a row together. "in chunks": `columns` counts the row padded to chunks.
            "any": every shape.
        columns: the most columns of a row, padded to a power of two or, "in chunks", to chunks.
        kernel: "rows": a program holds whole rows in registers. "wide": a program reads a row twice (three times where y is
            quantised). "shared": several programs hold a row together.
        tile: elements of a tile of "rows", which has as many rows as they make; 0: a tile is one row, in chunks.
        block: columns of a block of "wide" and "shared"; below 1: that part of the padded row.
        warps: of a program; 0: by the size of a chunk.
        per_core: programs resident on a core at once, or BY_REGISTERS.
        capped: the compiler may use only as many registers as leave room for `per_core` programs.
        why: the reason, which explanations print.
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


END = 2**31  # `columns` of rows of any width
_SEVERAL = "rows fit registers: several a program"
_ONCE = "a row fits registers: the gate is read while the row is summed"
_THRICE = "other kernels would read it three times"
_CHUNKS = "a row fits registers, in chunks"
_CACHED = "the second read finds the row in a cache, and fewer registers leave room for more rows"
_ALONE = "one program a core: rows of two evict each other before the second read"
# Quantised rows wait for two sums, one after the other: the fewer warps a program has, the shorter it waits, and the more
# programs are resident. Backwards of several rows keep sums of dw in registers: small programs of few warps hide more of the
# wait for memory. Microseconds on an H200, cold cache, bf16, of the row's tile and warps beside another choice (2026-11-30):
#   quantised    65536 x 1024   57.5, tile 4096 with 4 warps 61.3     16384 x 2048   32.4, 4 warps 37.0
#                8192 x 4096    33.2, 8 warps 37.4                    8192 x 8192    61.4, 16 warps 71.5
#                4096 x 16384   68.6, "wide" 86.2                     8192 x 5120    38.5, 8 warps 42.9
#                4096 x 12288   56.5, 8 warps 62.3                    16384 x 2560   37.9, 4 warps 39.5
#     of a sum   4096 x 16384   120 "wide", rows held 131             4096 x 12288   94.5 "wide", rows held 104
#   backward     65536 x 512    62.4, tile 2048 64.2, 4096 68.4       131072 x 256   65.0, tile 1024 63.1, 4096 67.8
#                262144 x 128   62.2, tile 1024 61.6, 4096 63.2       32768 x 1024   61.9, tile 1024 62.8, 4096 73.1
#   gated        65536 x 512    98.5, tile 2048 with 8 warps 104      131072 x 128   53.8, tile 1024 54.9
#                32768 x 1024   96.3, tile 2048 with 8 warps 101; with a bias 104, 114
# fmt: off
FORWARD = (
    #    shape                  columns  kernel   tile  block  warps  per core   capped
    _row("gated",               1024,    "rows",  1024, 0,     4,     ALL_TILES, False, _SEVERAL),
    _row("gated, one chunk",    4096,    "rows",  4096, 0,     4,     ALL_TILES, False, _ONCE),
    _row("quantised",           1024,    "rows",  2048, 0,     2,     ALL_TILES, False, _SEVERAL),
    _row("any",                 256,     "rows",  2048, 0,     4,     ALL_TILES, False, _SEVERAL),
    _row("any",                 1024,    "rows",  4096, 0,     4,     ALL_TILES, False, _SEVERAL),
    _row("quantised, one chunk", 2048,   "rows",  0,    0,     2,     ALL_TILES, False, _THRICE),
    _row("quantised, one chunk", 4096,   "rows",  0,    0,     4,     ALL_TILES, False, _THRICE),
    _row("quantised, one chunk", 8192,   "rows",  0,    0,     8,     ALL_TILES, False, _THRICE),
    _row("quantised, chunks",   8192,    "rows",  0,    0,     0,     ALL_TILES, False, _THRICE),
    _row("quantised, alone, one chunk", 16384, "rows", 0, 0,   16,    ALL_TILES, False, _THRICE),
    _row("quantised, alone, chunks", 16384, "rows", 0,  0,     0,     ALL_TILES, False, _THRICE),
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
    _row("gated",               256,     "rows",  2048, 0,     8,     3,            True,  _SEVERAL),
    _row("gated",               1024,    "rows",  1024, 0,     4,     6,            True,  _SEVERAL),
    _row("any",                 256,     "rows",  2048, 0,     4,     5,            True,  _SEVERAL),
    _row("any",                 512,     "rows",  1024, 0,     2,     10,           True,  _SEVERAL),
    _row("any",                 1024,    "rows",  2048, 0,     4,     5,            True,  _SEVERAL),
    _row("gated, one chunk",    2048,    "rows",  2048, 0,     4,     5,            True,  "a row fits registers"),
    _row("gated, one chunk",    4096,    "rows",  2048, 0,     8,     2,            True,  "a row fits registers"),
    _row("one chunk",           4096,    "rows",  4096, 0,     8,     3,            True,  "a row fits registers"),
    _row("in chunks",           4096,    "rows",  0,    0,     4,     BY_REGISTERS, True,  _CHUNKS),
    _row("in chunks",           8192,    "rows",  0,    0,     8,     BY_REGISTERS, True,  _CHUNKS),
    _row("any",                 16384,   "rows",  0,    0,     16,    BY_REGISTERS, True,  _CHUNKS),
    _row("unshareable",         END,     "wide",  0,    2048,  8,     4,            False, "no program holds a row"),
    _row("any",                 END,     "shared", 0,   SHARE_COLUMNS, 2, 8,        True,  "programs hold a row together"),
)
# For `qk_backward_kernel`, which `choose` never takes: see `of_qkv`.
QK_BACKWARD = _row("any",      1024,    "rows",  2048, 0,     4,     5,            True,  "q, k and v share a launch")
# fmt: on

MIN_CHUNK = 256  # columns of a chunk: the loop over chunks is unrolled, so more chunks are more code
SMALL_CHUNK = 512  # columns
CHUNK_WARPS = (4, 8)  # of a forward: its warps for small chunks, and for larger ones
WARP_COLUMNS = 256  # of a quantised row's chunk, a warp: each thread loads 8 elements, 16 bytes of bf16
WIDE_BLOCKS = (4096, 16384)  # the most columns of a block of "wide", and of one whose program has a core to itself
CORE_ALONE = 32  # warps of such a program
BACKWARD_CHUNKS = 4  # of a backward's row that chunks pad as much as one block: one block would take more registers
SHARES_A_CORE = 4  # half of the programs that "shared" keeps on a core: at least two groups are resident
# Registers of a thread in a backward's row in chunks, as ptxas counts them, by the elements of the row that it holds (up to
# and including); with a gate or a bias; and the columns above which a bias doubles the warps.
CHUNK_REGISTERS = ((20, 80), (24, 96), (END, 128))
MORE_REGISTERS = ((12, 96), (END, 128))
WIDE_BIAS, MAX_CHUNK_WARPS = 2560, 16
MAX_HEADS = 1024  # whose rows may share tiles in a forward
MAX_SHARE = 128  # programs that may hold a row together


@dataclass(frozen=True, kw_only=True)
class CudaTiling:
    """How one direction runs on CUDA.

    Attributes:
        shape, device: what it was made for.
        policy: the row of the table.
        rows, columns: of a tile; where a row is in chunks, columns of a chunk; of "wide" and "shared", of a block.
        warps: of a program.
        per_core: programs resident on a core at once.
        order: how the kernel numbers rows: ORDER of kernels.py or, for "wide" and "shared", of wide.py.
    """

    shape: Shape
    device: Device = field(repr=False)
    policy: Policy
    rows: int = 1
    columns: int
    warps: int
    per_core: int
    order: str

    @property
    def way(self) -> str:
        chunks = f" in {self.column_blocks} chunks" if self.kernel == "rows" and self.column_blocks > 1 else ""
        return self.kernel + chunks

    @property
    def why(self) -> str:
        return self.policy.why

    @property
    def decided_at(self) -> str:
        return self.policy.decided_at

    @property
    def kernel(self) -> str:
        return self.policy.kernel

    @property
    def share(self) -> int:
        """Programs that hold a row together; 0: each program holds its own."""
        return self.column_blocks if self.kernel == "shared" else 0

    @property
    def heads(self) -> int:
        """Heads with parameters of their own, of which a program sees one; 1 where a tile may have rows of several heads."""
        return self.shape.n_outer if self.order == "heads" else 1

    @property
    def row_tiles(self) -> int:
        if self.order == "heads":
            return self.shape.n_outer * ceil(self.shape.n_inner / self.rows)
        return ceil(self.shape.n_outer * self.shape.n_inner / self.rows)

    @property
    def column_blocks(self) -> int:
        return ceil(self.shape.width / self.columns)

    @property
    def _resident(self) -> int:
        return self.device.vector_cores * self.per_core

    @functools.cached_property
    def grid(self) -> int:
        """Programs of every kernel that takes rows."""
        if self.share:
            return self.splits * self.share
        if self.heads == 1:
            return persistent_grid(self.row_tiles, self.device, per_core=self.per_core)
        limit = min(max(1, self.device.max_grid // self.heads), self._resident // self.heads)
        return self.heads * max(1, min(self.row_tiles // self.heads, limit))

    @functools.cached_property
    def splits(self) -> int:
        """Rows of partial sums of dw, of all heads: one a program, of "shared" one a group, of "wide" one a set of rows."""
        if self.share:
            return min(self.row_tiles, self._resident // self.share)
        if self.kernel == "rows":
            return self.grid
        return self.heads * max(1, min(self.row_tiles // self.heads, self._resident // self.column_blocks // self.heads))

    @functools.cached_property
    def column_grid(self) -> int:
        """Programs of `backward_wide_kernel`, which take blocks of columns."""
        return persistent_grid(self.column_blocks * self.splits, self.device, per_core=self.per_core)

    @property
    def stores_sums(self) -> bool:
        """Whether the kernel stores the gradients of parameters in place of partial sums: each has one partial sum."""
        return self.splits == self.heads

    @property
    def constants(self) -> dict[str, object]:
        """`tl.constexpr` parameters."""
        sizes: dict[str, object] = {"N": self.shape.width, "BLOCK_N": self.columns, "ORDER": self.order}
        if self.kernel == "shared":
            sizes |= {"SHARE": self.share, "SLOTS": power_of_two(self.share), "STAGES": 2}
        elif self.kernel == "rows":
            sizes |= {"CHUNKS": self.column_blocks, "M": self.rows}
        takes_gate = self.kernel != "shared" and self.policy is not QK_BACKWARD
        formula = self.shape.formula_constants if takes_gate else self.shape.rounding_constants
        return {**sizes, **formula}

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        options = row_options(self.columns, self.warps)
        if self.shape.biased and self.shape.rounding.factors != "fp32":
            # Else the compiler would fuse a product and the addition of a bias, and not round in between.
            options["enable_fp_fusion"] = False
        if self.policy.capped:
            options["maxnreg"] = register_cap(self.warps, self.per_core)
        return options


def choose(shape: Shape, device: Device) -> CudaTiling:
    """The tiling of the first row that a shape matches. The last row of each table matches every shape."""
    padded = power_of_two(shape.width)
    chunk, chunks = equal_chunks(shape.width, least=MIN_CHUNK)
    share = ceil(shape.width / SHARE_COLUMNS)
    is_unshareable = shape.gated or shape.biased or shape.per_head or not shape.with_rows
    order = _order(shape)
    traits = {
        "any": True,
        "in chunks": True,
        "one chunk": chunks == 1,
        "chunks": chunks > 1,
        "gated": shape.gated,
        "quantised": shape.quantised,
        "alone": not shape.residual_itemsize,
        "unshareable": is_unshareable or share > min(MAX_SHARE, SHARES_A_CORE * device.vector_cores),
    }
    for policy in BACKWARD if shape.backward else FORWARD:
        needed = policy.shape.split(", ")
        columns = chunk * chunks if "in chunks" in needed else padded
        if columns <= policy.columns and all(traits[trait] for trait in needed):
            break
    make = functools.partial(CudaTiling, shape=shape, device=device, policy=policy)
    warps, per_core = policy.warps, policy.per_core
    if policy.kernel != "rows":
        share_of_row = min(int(policy.block * padded), WIDE_BLOCKS[warps >= CORE_ALONE])
        columns = share_of_row if policy.block < 1 else int(policy.block)
        return make(columns=columns, warps=warps, per_core=per_core, order=shape.order)
    if policy.tile:
        wanted = max(1, policy.tile // padded)
        rows = _power_of_two_below(min(shape.max_rows, wanted) if order in ("one", "heads") else wanted)
        return make(rows=rows, columns=padded, warps=warps, per_core=per_core, order=order)
    if shape.backward:
        if chunks == 1:
            chunk, chunks = padded // BACKWARD_CHUNKS, BACKWARD_CHUNKS
        warps, per_core = _programs_by_registers(shape, warps, chunk * chunks)
    elif not warps:
        warps = chunk // WARP_COLUMNS if shape.quantised else CHUNK_WARPS[chunk > SMALL_CHUNK]
    return make(columns=chunk, warps=warps, per_core=per_core, order=shape.order)


def of_qkv(tiling: CudaTiling) -> CudaTiling:
    """The tiling of one launch for q, k and v, from that for q."""
    policy = QK_BACKWARD
    rows = max(1, policy.tile // tiling.columns)
    return dataclasses.replace(tiling, policy=policy, rows=rows, warps=policy.warps, per_core=policy.per_core)


def programs_of_qkv(tiling: CudaTiling, n_outer: int, n_q_inner: int, n_k_inner: int) -> list[int]:
    """The numbers of programs for q, k and v: in proportion to the bytes that they move, and not more than tiles."""
    resident = tiling.device.vector_cores * tiling.per_core
    heads, moved = (n_q_inner, n_k_inner, n_k_inner), (3 * n_q_inner, 3 * n_k_inner, 2 * n_k_inner)
    return [
        max(1, min(-(-n_outer * each // tiling.rows), resident * share // sum(moved)))
        for each, share in zip(heads, moved, strict=True)
    ]


def _order(shape: Shape) -> str:
    """How kernels number rows where a tile may have several: ORDER of kernels.py."""
    if not shape.per_head:
        return shape.order
    in_tokens = not shape.backward and shape.n_outer <= MAX_HEADS and shape.n_outer * shape.n_inner <= MAX_COUNTED_ROWS
    return "tokens" if in_tokens else "heads"


def _programs_by_registers(shape: Shape, warps: int, padded: int) -> tuple[int, int]:
    """Warps of a backward's program that holds a row in chunks, and how many such programs a core has registers for."""
    table = MORE_REGISTERS if shape.gated or shape.biased else CHUNK_REGISTERS
    if shape.gated or (shape.biased and padded > WIDE_BIAS):
        warps = min(2 * warps, MAX_CHUNK_WARPS)
    registers = next(registers for most, registers in table if padded // (warps * WARP) <= most)
    return warps, CORE_REGISTERS // (registers * warps * WARP)


def _power_of_two_below(limit: int) -> int:
    """The largest power of two up to `limit`."""
    return 1 << (max(1, limit).bit_length() - 1)
