"""The loads of asc-devkit's example data_copy, as its README says: a 12288 x 12288 matrix of halves, by 48 cores."""

from __future__ import annotations

from collections.abc import Iterator

from npu_offline.timing import costs_of
from npu_offline.timing.cache import Cache
from npu_offline.timing.cores import rates_of
from npu_offline.timing.instructions import Transfer
from npu_offline.timing.program import Issue
from npu_offline.timing.simulation import simulate

_SIDE, _BYTES, _LOOP = 12288, 2, 2  # columns and rows; of a half; scalar operations of a loop's turn


def seconds(soc: str, rows: int, columns: int, repeats: int, slices: int) -> tuple[float, dict[str, float]]:
    """The predicted time, and that of each pipe.

    Args:
        soc: the chip.
        rows, columns: of a load.
        repeats: how often the matrix, or each slice of its columns, is read.
        slices: of columns, one after the other.
    """
    costs = costs_of(soc)
    load = Transfer("load", "MTE2", "x", rows * columns * _BYTES, rows * columns * _BYTES, False)

    def issues() -> Iterator[Issue]:
        for part in range(slices):
            for _ in range(repeats):
                for row in range(0, _SIDE // costs.vector_cores, rows):
                    for column in range(part * _SIDE // slices, (part + 1) * _SIDE // slices, columns):
                        yield _LOOP * costs.scalar_op, load, (row, column)

    cache = Cache(costs.cache_bytes / costs.vector_cores, {})
    share = costs.read_bandwidth / costs.vector_cores
    outcome = simulate({"AIV": (issues(), rates_of("AIV", costs))}, share, cache, 0)
    launch = costs.launch + costs.vector_cores * costs.launch_block
    return launch + outcome.seconds, {str(pipe): busy for pipe, busy in outcome.busy["AIV"].items()}
