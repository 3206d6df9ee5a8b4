"""The way of a gradient, and blocks of the kernels, on CUDA."""

from __future__ import annotations

import dataclasses
from math import ceil, inf
from typing import NamedTuple

from npu_tiling import Device
from npu_tiling.budget.arithmetic import FP32, power_of_two
from npu_tiling.places import here

from ..both.tiling import MIN_CHUNK, Launch, Rule, Way, way_launch
from ..shape import RowShape

# The most indices, and the most elements of dy, for which no sort is made. Each program looks through all indices and sums
# 128 columns. One launch and four, on an H200: 1024 x 256 take as long, 64 x 768 .008 and .015 ms, 1024 x 768 .041 and .019.
SEARCHED, _SEARCHED_ELEMENTS = 1024, 2**18
RANKED = 131072  # the most indices that kernels of our own sort

# The first row that holds runs. RANKED and SORTED, the gradient of n rows of 160 on an H200: 32768 .077 and .111 ms, 65536
# .097 and .121, 131072 .142 and .140, 262144 .242 and .168. torch.sort takes the host longer than all of RANKED.
WAYS = (
    # way, indices, elements of dy, rows of the table (kernels count them in 32 bits, but those of SORTED), why
    Rule(Way.SEARCHED, SEARCHED, _SEARCHED_ELEMENTS, 2**30, f"{SEARCHED} are looked through sooner than sorted", here()),
    Rule(Way.RANKED, RANKED, inf, 2**30, f"up to {RANKED} torch.sort takes as long or longer, and more of the host", here()),
    Rule(Way.SORTED, inf, inf, inf, "a radix sort, whose time is a multiple of the number of indices", here()),
)
_RULE_OF = {rule.way: rule for rule in WAYS}


class Blocks(NamedTuple):
    """A row of the table of blocks: columns and warps at most, bytes of a tile for each warp, why, its file and line."""

    max_columns: int
    warp_bytes: int
    max_warps: int
    why: str
    decided_at: str


class Stage(NamedTuple):
    """A launch that searches the keys of each sorted run in the others of its set.

    Attributes:
        run: keys of a run.
        runs: of a set; 0: all.
        together: runs that are searched at a time.
    """

    run: int
    runs: int
    together: int

    @property
    def places(self) -> int:
        """Keys of a set; their number is a multiple of it."""
        return self.run * (self.runs or 1)

    def launch(self, device: Device) -> Launch:
        """The launch."""
        blocks = {"STEPS": self.run.bit_length() - 1, "SET": self.runs, "BLOCK_M": 32, "BLOCK_G": self.together}
        return way_launch(_RULE_OF[Way.RANKED], device, blocks, 32)


# The fastest on an H200. Each thread moves vectors of 16 bytes.
_GATHER = Blocks(1024, 4096, 1, "copies share nothing: a warp is a program", here())
_SUMS = Blocks(2048, 1024, 8, "a row is one load of all threads, and many rows are under way", here())
_SEARCH = Blocks(128, 4096, 4, "few columns: several programs add a row that all indices name", here())
_PARTIALS = Blocks(256, 4096, 4, "few columns: several programs add a run of thousands of partial sums", here())

GROUP = 512  # indices that the first kernel of RANKED sorts
_RANKED_AT_ONCE = 16384  # indices whose sorted groups become one run in one launch as fast as in two
_ALL_GROUPS, _SETS, _ALL_SETS = Stage(GROUP, 0, 16), Stage(GROUP, 16, 8), Stage(16 * GROUP, 0, 8)
_WARPS_PER_CORE = 32  # resident on a multiprocessor
_WAVES = 4  # of programs that sum, so that the last ones end together
_ROW_COLUMNS = 512  # a tile with more columns is one row
_MAX_ROWS = 32  # of a tile that is copied, and rows or partial sums that are added at once
_NORM_COLUMNS = 65536
_ZEROS_COLUMNS = 512  # stored at once by a warp
_ZEROS_BYTES, _MAX_ZERO_ROWS = 16384, 64  # of a program
_BITS = 32  # of a number that says which rows of zeros are none
_BORDERS = 16  # between chunks, that a program of the launch of partial sums looks at


def gather_launch(shape: RowShape) -> Launch:
    """Blocks of the look-up."""
    columns = _columns(shape, _GATHER)
    rows = _rows(_GATHER, columns * shape.itemsize) if columns <= _ROW_COLUMNS else 1
    return _launch(shape, _GATHER, {"BLOCK_M": rows}, per_program=rows, warps=_GATHER.max_warps)


def bags_launch(shape: RowShape) -> Launch:
    """Blocks of the look-up that sums or decodes rows (bags), and of its backward up to dx and dsample."""
    return _launch(shape, _GATHER, {}, warps=_GATHER.max_warps)


def norm_launch(shape: RowShape) -> Launch:
    """Blocks of rows that are normalised: a row is a block, up to so many columns."""
    columns = min(power_of_two(shape.width), _NORM_COLUMNS)
    rule = Blocks(columns, 1024, 16, "a row is a block: its squares are added in one program", here())
    warps = max(1, min(rule.max_warps, columns // rule.warp_bytes))
    return Launch(
        device=shape.device,
        blocks=(("N", shape.width), ("BLOCK_N", columns)),
        column_blocks=ceil(shape.width / columns),
        warps=warps,
        why=rule.why,
        decided_at=rule.decided_at,
    )


def sums_launch(shape: RowShape) -> Launch:
    """Blocks of the gradient's sums and zeros; a program fills `per_program` rows with zeros."""
    rows, warps = _zero_rows(shape), _row_warps(shape)
    blocks = {"ZERO_M": rows, "ZERO_N": _zero_columns(shape, warps)}
    return _launch(shape, _SUMS, blocks, per_program=rows, warps=warps)


def chunks(sums: Launch, n: int) -> int:
    """Pieces that n sorted positions are cut in, each through one block of columns."""
    resident = sums.device.vector_cores * _WARPS_PER_CORE // sums.warps // sums.column_blocks
    return max(1, min(_WAVES * resident, ceil(n / MIN_CHUNK)))


def partials_launch(shape: RowShape) -> Launch:
    """Blocks of the gradient's partial sums; a program looks at `per_program` borders between chunks."""
    blocks = {"BLOCK_C": _BORDERS, "BLOCK_P": _rows(_PARTIALS, _columns(shape, _PARTIALS) * FP32)}
    return _launch(shape, _PARTIALS, blocks, per_program=_BORDERS, warps=_PARTIALS.max_warps)


def search_launch(shape: RowShape) -> Launch:
    """Blocks of the gradient of few indices; a program fills `per_program` rows with zeros."""
    warps = _SEARCH.max_warps
    blocks = {"BLOCK_M": SEARCHED, "BLOCK_K": _rows(_SEARCH, _columns(shape, _SEARCH) * FP32)}
    blocks |= {"ZERO_M": _BITS, "ZERO_N": _zero_columns(shape, warps)}
    rule, launch = _RULE_OF[Way.SEARCHED], _launch(shape, _SEARCH, blocks, per_program=_BITS, warps=warps)
    return dataclasses.replace(launch, way=rule.way, why=rule.why, decided_at=rule.decided_at)


def sort_launch(device: Device) -> Launch:
    """The launch that sorts groups of indices."""
    return way_launch(_RULE_OF[Way.RANKED], device, {"GROUP": GROUP, "BLOCK_M": 8, "BLOCK_Z": 4096}, 8)


def rank_stages(n: int) -> tuple[Stage, ...]:
    """The launches that make one run of the sorted groups of n indices."""
    return (_ALL_GROUPS,) if n <= _RANKED_AT_ONCE else (_SETS, _ALL_SETS)


def mark_launch(device: Device) -> Launch:
    """The launch that marks rows and makes keys."""
    return way_launch(_RULE_OF[Way.SORTED], device, {"BLOCK_M": 512}, 512)


def _launch(shape: RowShape, rule: Blocks, blocks: dict[str, int], *, per_program: int = 1, warps: int) -> Launch:
    columns = _columns(shape, rule)
    return Launch(
        device=shape.device,
        blocks=tuple({"N": shape.width, "BLOCK_N": columns, **blocks}.items()),
        per_program=per_program,
        column_blocks=ceil(shape.width / columns),
        warps=warps,
        why=rule.why,
        decided_at=rule.decided_at,
    )


def _rows(rule: Blocks, row_bytes: int) -> int:
    """Rows of a tile of all warps."""
    return max(1, min(_MAX_ROWS, rule.max_warps * rule.warp_bytes // row_bytes))


def _zero_rows(shape: RowShape) -> int:
    """Rows that a program fills with zeros."""
    return power_of_two(max(1, min(_MAX_ZERO_ROWS, _ZEROS_BYTES // (shape.width * shape.itemsize))))


def _zero_columns(shape: RowShape, warps: int) -> int:
    """Columns that it stores at once."""
    return min(power_of_two(shape.width), _ZEROS_COLUMNS * warps)


def _row_warps(shape: RowShape) -> int:
    """Warps for a row that is summed."""
    return max(1, min(_SUMS.max_warps, _columns(shape, _SUMS) * shape.itemsize // _SUMS.warp_bytes))


def _columns(shape: RowShape, rule: Blocks) -> int:
    """A power of two that divides the width, or one that takes a mask where that would be a short one."""
    divisor = min(shape.width & -shape.width, rule.max_columns)
    return divisor if divisor >= 128 else min(power_of_two(shape.width), rule.max_columns)
