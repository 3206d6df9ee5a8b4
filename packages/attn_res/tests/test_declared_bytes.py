"""The Unified Buffer that tilings declare, against the Ascend compilers: every row of footprint.py's tables, both families
of chips, both widths of elements.

The widest tile that is declared to fit fits with every compiler. Of kernels that take one layer's whole rows, one that is a
third wider does not with some: rows would be split that fit.
"""

import importlib
from functools import cache, partial

import npu_offline
import npu_tiling
import pytest
import torch
from npu_attn_res import attn_res, attn_res_merge, attn_res_phase1, tiling
from npu_attn_res.tiling import footprint
from npu_offline.declared import FAMILIES, fits_everywhere, widest

REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]
UNIT = 16  # columns
NAMES = {
    "forward": "attn_res_forward_prefetch_kernel",
    "forward, normalised": "attn_res_forward_prefetch_kernel",
    "phase 1": "attn_res_forward_prefetch_kernel",
    "forward of layers": "attn_res_layers_kernel",
    "backward": "attn_res_backward_kernel",
    "backward from fp32": "attn_res_backward_kernel",
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
    width = 65536 if kernel in tiling.COLUMN_KINDS else 1024
    weights = [leaf(width, dtype=dtype) for _ in range(3)]
    blocks = leaf(4, 200, width, dtype=dtype)
    if kernel in ("merge", "merge backward", "norm backward"):
        state = leaf(200, width), leaf(200)
        partial = leaf(200, width, dtype=dtype)
        found = attn_res_merge(*state, partial, *weights[:2], layer_output=partial.detach(), output_rms_weight=weights[2])
    elif kernel == "phase 1" or layers > 1:
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


def ways(kernel):
    """Rows, layers and options of a tile: one row in each way, several rows, several layers."""
    if kernel == "forward of layers":
        return [(1, 4, {"double_buffered": double_buffered}) for double_buffered in (True, False)]
    if kernel in tiling.COLUMN_KINDS:
        return [(2, 1, {}), (1, 4, {})]
    prefetch = kernel in footprint.PREFETCHED
    single = [
        (1, 1, {"prefetch": way.prefetch, "double_buffered": way.double_buffered}) for way in footprint.ROW_WAYS[kernel]
    ]
    return [(4, 1, {"prefetch": prefetch, "double_buffered": not prefetch}), *single]


def launch(kernel, dtype, soc, width, rows, layers, options):
    problem = tiling.Problem(kernel, width, dtype.itemsize, layers)
    return tiling.Launch(problem, npu_tiling.soc(soc), block_m=rows, block_s=layers, block_d=width, **options)


def fits(tile, dtype, soc):
    """Whether every compiler for the chip takes a tile."""
    record = record_of(tile.problem.kind, dtype, tile.problem.layers, soc)
    function = record.kernel
    if tile.problem.kind in footprint.PREFETCHED:
        module, name, _ = tile.kernel
        function = getattr(importlib.import_module(f"npu_attn_res.{module}"), name)
    return fits_everywhere(record, tile.constants, soc, options=tile.options, kernel=function)


# Ways that are declared to take more than they do. The first leaves wide rows to kernels that take columns: those are
# predicted to take half the time (12.6 instead of 25.4 us, 2 tokens of 12288 columns, CANN 9.1). The second leaves rows of
# about 4096 columns to one row at a time, which loads ahead (162 instead of 176 us, 2048 tokens of 4 blocks, CANN 9.1). The
# third leaves rows of more than 15,856 columns to kernels that take columns, as the first does; its times were not compared.
GENEROUS = [
    (FAMILIES[1], "backward from fp32", torch.bfloat16, (1, 1, {"prefetch": False, "double_buffered": False})),
    (FAMILIES[1], "forward", torch.float32, (4, 1, {"prefetch": True, "double_buffered": False})),
    (FAMILIES[1], "phase 1", torch.float32, (1, 1, {"prefetch": False, "double_buffered": False})),
]
ALWAYS = (FAMILIES[1], "merge", torch.bfloat16)
CASES = [
    pytest.param(soc, kernel, dtype, marks=() if (soc, kernel, dtype) == ALWAYS else pytest.mark.nightly)
    for soc in FAMILIES
    for kernel in NAMES
    for dtype in (torch.bfloat16, torch.float32)
    if (kernel, dtype) != ("backward", torch.float32)  # whose gradient of h is fp32: "backward from fp32"
]


@pytest.mark.parametrize(("soc", "kernel", "dtype"), CASES)
def test_the_widest_tile_that_is_declared_to_fit_does(soc, kernel, dtype):
    def declared(way, width):
        return tiling.ub_bytes(launch(kernel, dtype, soc, width, *way))

    too_little, too_much = [], []
    for way in ways(kernel):
        width = widest(partial(declared, way), soc)
        if not fits(launch(kernel, dtype, soc, width, *way), dtype, soc):
            too_little.append((width, way))
        if (soc, kernel, dtype, way) in GENEROUS:
            continue
        if kernel not in (*tiling.COLUMN_KINDS, "forward of layers"):  # whose bytes depend on the number of layers
            wider = width * 4 // 3 // UNIT * UNIT
            if fits(launch(kernel, dtype, soc, wider, *way), dtype, soc):
                too_much.append((wider, way))
    assert (too_little, too_much) == ([], [])
