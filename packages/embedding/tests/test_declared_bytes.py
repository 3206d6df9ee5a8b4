"""The Unified Buffer that tilings declare, against the Ascend compilers: every kernel, both families of chips, both widths
of elements. The widest tile that is declared to fit fits with every compiler."""

import functools
import itertools
from pathlib import Path

import npu_offline
import npu_tiling
import pytest
from npu_embedding.bags.ascend import BAG_TILES, BAGS, SPREAD, SPREAD_TILES
from npu_embedding.lookup.ascend import GATHER, PARTIALS, SUMS
from npu_embedding.rows import RowShape, row_tiling
from npu_offline.check import load_calls

from testing.ascend import FAMILIES, fits_everywhere, widest

REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]
CALLS = dict(load_calls(Path(__file__).parents[1]))
# Of each kernel: its name in the tiling, and the rows of a tile. Rows of odd widths are not gathered.
KERNELS = {
    "gather_rows_kernel": (GATHER, (2, 8)),
    "gather_rows_kernel, odd": (GATHER, (2, 8)),
    "sum_rows_kernel": (SUMS, (1, 8)),
    "add_partials_kernel": (PARTIALS, (1,)),
    "sum_bags_kernel": (BAGS, (1,)),
    "spread_bags_kernel": (SPREAD, (1,)),
    "sum_bags_kernel, tiles": (BAG_TILES, (2, 8)),
    "spread_bags_kernel, tiles": (SPREAD_TILES, (2, 8)),
}
LABELS = ("bf16 4096", "fp32 4096", "bf16 4096, by frequency", "fp32 4096, by frequency")
OF_BAGS_ALONE = ("sum_bags_kernel", "spread_bags_kernel")
OF_BAGS = [("bf16 160, bags", each) for each in OF_BAGS_ALONE] + [
    ("fp32 16411, bags between offsets, weights", each) for each in OF_BAGS_ALONE
]
OF_BAGS += [("e4m3 768", "sum_bags_kernel"), ("bf16 160, bags", "sum_bags_kernel, tiles")]
OF_BAGS += [("bf16 768, normalised", f"{each}, tiles") for each in OF_BAGS_ALONE]
ROWS = [case for case in itertools.product(LABELS, KERNELS) if "bags" not in case[1]]
CASES = [(soc, *case) for soc in reversed(FAMILIES) for case in [*ROWS, *OF_BAGS]]


@functools.cache
def records_of(label, soc):
    with npu_offline.record(soc) as records:
        CALLS[label]()
    return {record.name: record for record in records}


@pytest.mark.parametrize(
    ("soc", "label", "kernel"),
    [pytest.param(*case, marks=() if place == 0 else pytest.mark.nightly) for place, case in enumerate(CASES)],
)
def test_the_widest_tile_that_is_declared_to_fit_does(soc, label, kernel):
    chip, itemsize = npu_tiling.soc(soc), 4 if label.startswith("fp32") else 2
    name, _, form = kernel.partition(", ")
    kind, each = KERNELS[kernel]
    record = records_of(label, soc)[name]

    def launch(rows, width):
        shape = RowShape(width=width, itemsize=itemsize, device=chip)
        return row_tiling(kind, shape, rows, width, why="", decided_at="")

    def declared(rows, width):
        return launch(rows, width).ub_bytes

    for rows in each:
        width = widest(functools.partial(declared, rows), soc, first=7 if form == "odd" else 0)
        assert fits_everywhere(record, launch(rows, width).constants, soc), (width, rows)
