"""The Unified Buffer that tilings declare, against the Ascend compilers: kernels of rows, both families of chips, both
widths of elements. The widest tile that is declared to fit fits with every compiler."""

import npu_tiling
import torch
from npu_rms_norm.ascend import COLUMNS_BYTES, RULES, AscendTiling
from npu_rms_norm.call import Rounding, Shape

from testing.ascend import *  # noqa: F403
from testing.ascend import FAMILIES, Declared, fits_everywhere, launches

GATED = ("bfloat16 128, gated", "bfloat16 128, gated first", "bfloat16 128, gated none", "float32 128, gated first")
TWO = "bfloat16 128, in fp32 too"
INT8 = ("bfloat16 128, int8", "bfloat16 128, residual, int8")
WIDE_GATED = ("bfloat16 16384, gated", "bfloat16 16384, gated first", "float32 16384, gated first")
# Calls whose rows are one tile, and whose rows are several.
ROWS = (
    "bfloat16 128",
    "bfloat16 128 none",
    "bfloat16 128, residual",
    "float32 123",
    "float32 128, residual",
    *GATED,
    TWO,
    "bfloat16 128, bias",
    *INT8,
)
COLUMNS = (
    "bfloat16 16384",
    "bfloat16 16384 none",
    "bfloat16 16384, residual",
    "float32 16384",
    "float32 16384, residual",
    "bfloat16 16384, bias",
    "bfloat16 16384, residual, int8",
    *WIDE_GATED,
)
SEVERAL, _, TWO_BUFFERS, ONE_BUFFER, WIDE = RULES
WAYS = ((4, SEVERAL), (1, TWO_BUFFERS), (1, ONE_BUFFER))  # rows of a tile, and how they are held


def shape(label, width, backward):
    dtype = torch.float32 if label.startswith("float32") else torch.bfloat16
    gated = "gated" in label
    itemsizes = (dtype.itemsize,) * (1 + backward + ("residual" in label) + gated)
    if label == TWO:  # x and the residual; or dy in fp32, the gradient of the sum, and x
        itemsizes = (4, 2, 2) if backward else (2, 2)
    # The buffers of a result that is rounded on the way are declared by tests of a bias alone.
    x = "bf16" if label.endswith(" none") else "fp32"
    return Shape(
        backward=backward,
        n_outer=1,
        n_inner=4096,
        width=width,
        inner_stride=width,
        itemsizes=itemsizes,
        narrow=dtype == torch.bfloat16,
        rounding=Rounding.of("none" if label.endswith(" none") else "gemma", x, x),
        activation="silu" if gated else "",
        second_output=(label == TWO and not backward) or "int8" in label,
        biased="bias" in label,
        quantised="int8" in label,
    )


def declared(soc, label, backward, rows, policy):
    """Of rows that are a tile, or of blocks of columns."""
    names, blocks, most = ("N", "G", "M", "BLOCK_N", "SPLIT"), policy is WIDE, 2**17
    kernels = ["backward_kernel" if backward else "forward_kernel"]
    if blocks:
        names, most = ("N", "BLOCK_N", "ORDER"), COLUMNS_BYTES // min(shape(label, 1, backward).itemsizes)  # as is chosen
        kernels = ["backward_wide_mean_kernel", "backward_wide_kernel"] if backward else ["forward_wide_kernel"]

    def tiling(columns):
        given = shape(label, 4 * columns if blocks else columns, backward)
        return AscendTiling(shape=given, device=npu_tiling.soc(soc), rule=policy, rows=rows, columns=columns)

    def fits(columns):
        chosen, records = tiling(columns), {record.name: record for record in launches(__file__, label, soc)}
        constants = {name: chosen.constants[name] for name in names}
        return all(fits_everywhere(records[each], constants, soc, options=chosen.options) for each in kernels)

    of = f"{soc}, {label}, {'backward' if backward else 'forward'}, {policy.way}, {rows}"
    return Declared(of, soc, lambda columns: tiling(columns).ub_bytes, fits, most=most)


ROW_CASES, COLUMN_CASES = (
    [
        declared(soc, label, backward, rows, policy)
        for soc in reversed(FAMILIES)
        for label in calls
        for backward in (False, True)
        for rows, policy in ways
        if not (backward and "int8" in label)  # what is quantised has no backward
        and not (soc == FAMILIES[1] and backward and rows == 1 and policy is not WIDE)  # takes no row alone
    ]
    for calls, ways in ((ROWS, WAYS), (COLUMNS, ((1, WIDE),)))
)
DECLARED = [cases[0]._replace(marks=()) for cases in (ROW_CASES, COLUMN_CASES)] + ROW_CASES[1:] + COLUMN_CASES[1:]
