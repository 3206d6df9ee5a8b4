"""The Unified Buffer that tilings declare, against the Ascend compilers: every row of the tables in ascend/tiling.py,
both families of chips, both widths of elements.

The widest tile that is declared to fit fits with every compiler. Of kernels that take one layer's whole rows, one that is a
third wider does not with some: rows would be split that fit.
"""

from functools import cache

import npu_offline
import npu_tiling
import pytest
import torch
from npu_attn_res import attn_res, attn_res_bank, attn_res_merge, attn_res_phase1, kernels
from npu_attn_res.ascend import kernels as ascend_kernels
from npu_attn_res.ascend.tiling import AscendTiling, Way
from npu_attn_res.ascend.tiling import rules as rules_of
from npu_attn_res.shape import COLUMN_TASKS, Shape, Task
from npu_attn_res.two_phase import plans as phase_kernels

from testing.ascend import *  # noqa: F403
from testing.ascend import FAMILIES, Declared, fits_everywhere

PAGES = (ascend_kernels, kernels, phase_kernels)
NAMES = {
    "forward": "attn_res_forward_prefetch_kernel",
    "forward, normalised": "attn_res_forward_prefetch_kernel",
    "forward, with a prefix": "attn_res_forward_prefetch_kernel",
    "backward": "attn_res_backward_kernel",
    "backward from fp32": "attn_res_backward_kernel",
    "backward, with a prefix": "attn_res_backward_kernel",
    "products": "attn_res_products_kernel",
    "weighted sum": "attn_res_weighted_sum_kernel",
    "gradient": "attn_res_gradient_kernel",
    "merge": "attn_res_merge_kernel",
    "merge backward": "attn_res_merge_backward_kernel",
    "norm backward": "attn_res_norm_backward_kernel",
}


def leaf(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def call(kernel, dtype, layers):
    """A call whose launches have the kernel among them, at a width where it is chosen."""
    width = 65536 if kernel in COLUMN_TASKS else 1024
    weights = [leaf(width, dtype=dtype) for _ in range(3)]
    blocks = leaf(4, 200, width, dtype=dtype)
    if kernel in ("merge", "merge backward", "norm backward"):
        state = leaf(200, width), leaf(200)
        partial = leaf(200, width, dtype=dtype)
        found = attn_res_merge(*state, partial, *weights[:2], layer_output=partial.detach(), output_rms_weight=weights[2])
    elif kernel.endswith("with a prefix"):
        prefix, x = (leaf(200, width, dtype=dtype) for _ in range(2))
        found = attn_res_bank(blocks.movedim(0, 1), None, prefix, *weights, layer_output=x)
    elif layers > 1:
        found = attn_res_phase1(leaf(layers, width), blocks, leaf(width))
    else:
        normalised = kernel == "forward, normalised" or kernel == "backward from fp32" and dtype != torch.float32
        found = attn_res(blocks, *weights[:2], output_rms_weight=weights[2] if normalised else None)
    found = [one for one in found if one is not None] if isinstance(found, tuple) else [found]
    torch.autograd.backward(found, [torch.empty_like(result) for result in found])


@cache
def record_of(kernel, dtype, layers, soc):
    with npu_offline.record(soc) as records:
        call(kernel, dtype, layers)
    return next(record for record in records if record.name == NAMES[kernel])


def shape_of(kernel, dtype, width, layers=1):
    """What the launch of a kernel is, by its name here."""
    name, _, option = kernel.partition(", ")
    fp32_dh = name == "backward from fp32"
    task = Task.BACKWARD if fp32_dh else Task(name)
    options = {"normalised": option == "normalised", "prefix": option == "with a prefix", "fp32_dh": fp32_dh}
    return Shape(task=task, width=width, itemsize=dtype.itemsize, layers=layers, **options)


def tile(kernel, dtype, soc, width, way, rows, layers):
    shape = shape_of(kernel, dtype, width, layers)
    return AscendTiling(shape=shape, device=npu_tiling.soc(soc), way=way, block_m=rows, block_s=layers, block_d=width)


# Ways that are declared to take more than they do. The first leaves wide rows to kernels that take columns: those are
# predicted to take half the time (12.6 instead of 25.4 us, 2 tokens of 12288 columns, CANN 9.1). The second leaves rows of
# about 4096 columns to one row at a time, which loads ahead (162 instead of 176 us, 2048 tokens of 4 blocks, CANN 9.1). The
# third leaves rows from 5648 columns on to one row at a time (1.29 instead of 1.74 times the floor, 6144 columns, CANN 9.1).
# The last two are declared for a gradient of h in fp32, whatever the sources are; one in bf16 takes less. With its bytes
# tiles of several rows stay as they are from 48 columns on, and one row with two buffers is predicted to take 1.03 and .96
# times as long (2048 tokens of 80 blocks of 6144 and 7168 columns, CANN 9.1); of up to 64 blocks another kernel runs there.
GENEROUS = [
    (FAMILIES[1], "backward from fp32", torch.bfloat16, Way.ROW),
    (FAMILIES[1], "forward", torch.float32, Way.ROWS_AHEAD),
    (FAMILIES[1], "forward", torch.bfloat16, Way.ROWS_AHEAD),
    (FAMILIES[0], "backward", torch.bfloat16, Way.ROWS),
    (FAMILIES[0], "backward", torch.bfloat16, Way.ROW_TWO_BUFFERS),
]


def ways(kernel, dtype):
    """Ways, and the rows and layers of a tile: one row, several rows, several layers."""
    if kernel in COLUMN_TASKS:
        return [(Way.COLUMNS, 2, 1), (Way.COLUMNS, 1, 4)]
    found = [row.way for row in rules_of(shape_of(kernel, dtype, 16))]
    return [(way, 1 if way.has_one_row else 4, 1) for way in found]


def declared(soc, kernel, dtype, way):
    def fits(width, tries=1):
        found = tile(kernel, dtype, soc, width, *way)
        record = record_of(kernel, dtype, found.shape.layers, soc)
        function = next(function for page in PAGES if (function := getattr(page, found.kernel, None)) is not None)
        constants = {name: value for name, value in found.constants.items() if name in function.arg_names}
        return fits_everywhere(record, constants, soc, options=found.options, kernel=function, tries=tries)

    # The bytes of tiles of columns depend on the number of layers.
    return Declared(
        f"{soc}, {kernel}, {dtype}, {way[0].name}, {way[2]}",
        soc,
        lambda width: tile(kernel, dtype, soc, width, *way).ub_bytes,
        fits,
        tight=kernel not in COLUMN_TASKS and (soc, kernel, dtype, way[0]) not in GENEROUS,
        marks=() if (soc, kernel, dtype) == (FAMILIES[1], "merge", torch.bfloat16) else pytest.mark.nightly,
    )


DECLARED = [
    declared(soc, kernel, dtype, way)
    for soc in FAMILIES
    for kernel in NAMES
    for dtype in (torch.bfloat16, torch.float32)
    if (kernel, dtype) != ("backward", torch.float32)  # whose gradient of h is fp32: "backward from fp32"
    for way in ways(kernel, dtype)
]
