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
from npu_offline.declared import FAMILIES, fits_everywhere, widest
from npu_rms_norm import tiling

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
WAYS = ((4, True), (1, True), (1, False))  # rows of a tile, whether it is double-buffered


@functools.cache
def records_of(label, soc):
    with npu_offline.record(soc) as records:
        CALLS[label]()
    return {record.name: record for record in records}


def problem(label, width, backward):
    dtype = torch.float32 if label.startswith("float32") else torch.bfloat16
    gated = "gated" in label
    itemsizes = (dtype.itemsize,) * (1 + backward + ("residual" in label) + gated)
    if label == TWO:  # x and the residual; or dy in fp32, the gradient of the sum, and x
        itemsizes = (4, 2, 2) if backward else (2, 2)
    return tiling.Problem(
        1,
        4096,
        width,
        width,
        0,
        itemsizes,
        dtype == torch.bfloat16,
        label.endswith(" none"),
        gated,
        (label == TWO and not backward) or "int8" in label,
        biased="bias" in label,
        quantised="int8" in label,
    )


def cases(labels, *others):
    """Every case at night, and the first for the Ascend950 always."""
    every = [(soc, *case) for soc in reversed(FAMILIES) for case in itertools.product(labels, *others)]
    return [pytest.param(*case, marks=() if place == 0 else pytest.mark.nightly) for place, case in enumerate(every)]


@pytest.mark.parametrize(("soc", "label", "backward", "way"), cases(ROWS, (False, True), WAYS))
def test_the_widest_rows_that_are_declared_to_fit_do(soc, label, backward, way):
    rows, double_buffered = way
    if backward and "int8" in label:
        pytest.skip("what is quantised has no backward")
    if npu_tiling.soc(soc).arch == "dav-c310" and backward and rows == 1:
        pytest.skip("a backward on an Ascend950 takes no row alone")

    def launch(width):
        chip = npu_tiling.soc(soc)
        return tiling.Launch(problem(label, width, backward), chip, backward, False, double_buffered, rows, width)

    record = records_of(label, soc)["backward_kernel" if backward else "forward_kernel"]
    chosen = launch(widest(lambda width: launch(width).ub_bytes, soc))
    assert fits_everywhere(record, chosen.constants, soc, options=chosen.options), chosen


@pytest.mark.parametrize(("soc", "label", "backward"), cases(COLUMNS, (False, True)))
def test_the_widest_blocks_that_are_declared_to_fit_do(soc, label, backward):
    if backward and "int8" in label:
        pytest.skip("what is quantised has no backward")

    def launch(columns):
        chip = npu_tiling.soc(soc)
        return tiling.Launch(problem(label, 4 * columns, backward), chip, backward, True, True, 1, columns)

    most = tiling.ascend._WIDE_TRANSFER_BYTES // min(problem(label, 1, backward).itemsizes)  # wider blocks are not chosen
    chosen = launch(min(most, widest(lambda columns: launch(columns).ub_bytes, soc)))
    records = records_of(label, soc)
    for kernel in ("backward_wide_mean_kernel", "backward_wide_kernel") if backward else ("forward_wide_kernel",):
        constants = {name: value for name, value in chosen.constants.items() if name in records[kernel].constants}
        assert fits_everywhere(records[kernel], constants, soc, options=chosen.options), (kernel, chosen)
