"""The Unified Buffer that tilings declare, against the Ascend compilers: kernels of rows, both families of chips, both
widths of elements. The widest tile that is declared to fit fits with every compiler."""

import functools
import itertools
from pathlib import Path

import npu_offline
import npu_tiling
import pytest
import torch
from npu_offline.check import load_calls
from npu_rms_norm.ascend import COLUMNS_BYTES, RULES, AscendTiling
from npu_rms_norm.call import Rounding, Shape

from testing.ascend import FAMILIES, fits_everywhere, widest

REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]
CALLS = dict(load_calls(Path(__file__).parents[1]))
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


@functools.cache
def records_of(label, soc):
    with npu_offline.record(soc) as records:
        CALLS[label]()
    return {record.name: record for record in records}


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


def cases(labels, *others):
    """Every case at night, and the first for the Ascend950 always."""
    every = [(soc, *case) for soc in reversed(FAMILIES) for case in itertools.product(labels, *others)]
    return [pytest.param(*case, marks=() if place == 0 else pytest.mark.nightly) for place, case in enumerate(every)]


@pytest.mark.parametrize(("soc", "label", "backward", "way"), cases(ROWS, (False, True), WAYS))
def test_the_widest_rows_that_are_declared_to_fit_do(soc, label, backward, way):
    rows, rule = way
    if backward and "int8" in label:
        pytest.skip("what is quantised has no backward")
    if npu_tiling.soc(soc).arch == "dav-c310" and backward and rows == 1:
        pytest.skip("a backward on an Ascend950 takes no row alone")

    def tiling(width):
        given = shape(label, width, backward)
        return AscendTiling(shape=given, device=npu_tiling.soc(soc), rule=rule, rows=rows, columns=width)

    record = records_of(label, soc)["backward_kernel" if backward else "forward_kernel"]
    chosen = tiling(widest(lambda width: tiling(width).ub_bytes, soc))
    constants = {name: chosen.constants[name] for name in ("N", "G", "M", "BLOCK_N", "SPLIT")}
    assert fits_everywhere(record, constants, soc, options=chosen.options), chosen


@pytest.mark.uncollected("what is quantised has no backward", lambda label, backward: backward and "int8" in label)
@pytest.mark.parametrize(("soc", "label", "backward"), cases(COLUMNS, (False, True)))
def test_the_widest_blocks_that_are_declared_to_fit_do(soc, label, backward):

    def tiling(columns):
        given = shape(label, 4 * columns, backward)
        return AscendTiling(shape=given, device=npu_tiling.soc(soc), rule=WIDE, rows=1, columns=columns)

    limit = COLUMNS_BYTES // min(shape(label, 1, backward).itemsizes)  # wider blocks are not chosen
    chosen = tiling(min(limit, widest(lambda columns: tiling(columns).ub_bytes, soc)))
    records = records_of(label, soc)
    for kernel in ("backward_wide_mean_kernel", "backward_wide_kernel") if backward else ("forward_wide_kernel",):
        constants = {name: chosen.constants[name] for name in ("N", "BLOCK_N", "ORDER")}
        assert fits_everywhere(records[kernel], constants, soc, options=chosen.options), (
            kernel,
            chosen,
        )
