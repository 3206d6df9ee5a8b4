"""The Unified Buffer that tilings declare, against the Ascend compilers: every kernel, both families of chips, both widths
of elements. The widest tile that is declared to fit fits with every compiler."""

import itertools

import npu_tiling
from npu_embedding.bags.ascend import BAG_TILES, BAGS, SPREAD, SPREAD_TILES
from npu_embedding.lookup.ascend import GATHER, PARTIALS, SUMS
from npu_embedding.rows import RowShape, row_tiling

from testing.ascend import *  # noqa: F403
from testing.ascend import FAMILIES, Declared, fits_everywhere, launches

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


def declared(soc, label, kernel, rows, **options):
    chip, itemsize = npu_tiling.soc(soc), 4 if label.startswith("fp32") else 2
    name, _, form = kernel.partition(", ")

    def launch(width):
        shape = RowShape(width=width, itemsize=itemsize, device=chip)
        return row_tiling(KERNELS[kernel][0], shape, rows, width, why="", decided_at="")

    def fits(width):
        record = next(record for record in reversed(launches(__file__, label, soc)) if record.name == name)
        return fits_everywhere(record, launch(width).constants, soc)

    of = f"{soc}, {label}, {kernel}, {rows}"
    return Declared(of, soc, lambda width: launch(width).ub_bytes, fits, first=7 if form == "odd" else 0, **options)


DECLARED = [declared(FAMILIES[1], *ROWS[0], rows, marks=()) for rows in KERNELS[ROWS[0][1]][1]]
DECLARED += [
    declared(soc, label, kernel, rows)
    for soc in reversed(FAMILIES)
    for label, kernel in (*ROWS, *OF_BAGS)
    for rows in KERNELS[kernel][1]
    if (soc, label, kernel) != (FAMILIES[1], *ROWS[0])
]
