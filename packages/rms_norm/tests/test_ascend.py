"""What the Ascend compilers make of the kernels, and how many bytes they move: no chip, and no time, involved."""

from functools import partial

import formula
import npu_offline
import npu_tiling
import pytest
import torch
from npu_rms_norm import add_rms_norm, gated_rms_norm, qk_rms_norm, rms_norm
from npu_rms_norm.ascend import RULES, AscendTiling
from npu_rms_norm.call import Rounding, Shape

from testing.ascend import *  # noqa: F403
from testing.ascend import Batches, Computed, launches, moved, required

launches_of = partial(launches, __file__)

TILES = ("bfloat16 512", "bfloat16 8192", "float32 123", "bfloat16 65536", "bfloat16 4096, residual", "bfloat16 2048, gated")


def of_rows(rows):
    x, weight = torch.empty(rows, 512, requires_grad=True), torch.empty(512, requires_grad=True)
    rms_norm(x, weight).backward(torch.empty(rows, 512))


def computed(name, *sizes):
    case = formula.make(*sizes)
    return Computed(name, lambda: formula.run(case, rms_norm, "cpu"), lambda found: formula.check(case, found))


def every_function(width):
    case, residual = formula.make(37, width, torch.float32), torch.randn(37, width)

    def run():
        leaves = [formula.leaf(tensor, "cpu") for tensor in (case.x, residual, case.weight)]
        y, total = add_rms_norm(*leaves)
        torch.autograd.grad((y, total), leaves, (case.dy, case.dy))
        gated_rms_norm(*leaves).backward(case.dy)
        qkv, weight = torch.randn(9, 4 * width, requires_grad=True), leaves[2]
        results = tuple(qk_rms_norm(qkv, weight, weight, 2, 1))
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        return results

    return Computed(f"{width}", run, tensors=15)


INDEPENDENT = (Batches("rows", of_rows, ((2,), (3,), (64,), (1000,), (4097,)), 3),)
ON_OTHER_CHIPS = (computed("1000", 200, 1000, torch.bfloat16),)
IN_ANY_ORDER = (computed("512", 500, 512, torch.bfloat16),)
GUARDED = tuple(map(every_function, (7, 123, 512)))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", ["llama", "none"])
def test_declared_tiles_are_what_the_compiler_needs(mode, dtype, rows, backward):
    """Never less, or a chosen tile would not compile; not much more, or rows would be split that fit."""
    label = f"{dtype} 4096".removeprefix("torch.")
    if mode == "none" and dtype == torch.bfloat16:
        label += " none"
    record = launches_of(label)[backward]
    width = 16384 // rows
    itemsizes = (dtype.itemsize,) * (1 + backward)
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    shape = Shape(
        backward=backward,
        n_outer=1,
        n_inner=4096,
        width=width,
        inner_stride=width,
        itemsizes=itemsizes,
        narrow=dtype == torch.bfloat16,
        rounding=Rounding.of("llama", name, name),
    )
    two_buffers = RULES[0]
    chip = npu_tiling.soc("Ascend910B4")
    tiling = AscendTiling(shape=shape, device=chip, rule=two_buffers, rows=rows, columns=width)
    declared = tiling.ub_bytes
    needed = required(record, {"N": width, "M": rows, "BLOCK_N": width}, multibuffer=True)
    assert needed <= declared <= 1.2 * needed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [512, 1000, 4096, 8192])
def test_memory_traffic_is_the_minimum(width, dtype):
    rows = 4000 if width < 4096 else 1600
    size = rows * width * dtype.itemsize
    x = torch.randn(rows, width).to(dtype).requires_grad_()
    weight = torch.ones(width, dtype=dtype, requires_grad=True)
    with npu_offline.emulate("Ascend910B4") as emulation:
        rms_norm(x, weight).backward(torch.randn(rows, width).to(dtype))
    forward, backward, partial_sums = emulation.launches
    assert 2 * size <= moved(forward) <= 1.05 * 2 * size
    # Every core reads the weight and writes one partial sum; another launch adds those.
    parameters = 40 * width * (dtype.itemsize + 4)
    assert 3 * size <= moved(backward) <= 1.05 * 3 * size + parameters
    assert moved(partial_sums) == 40 * width * 4 + width * dtype.itemsize
    for moving in emulation.launches:
        assert all(traffic.scalars == 0 or name == "p_rstd" for name, traffic in moving.arguments.items())
        assert all(traffic.atomics == 0 for traffic in moving.arguments.values())


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_memory_traffic_of_4096_gated_columns_is_the_minimum(norm_before_gate):
    x, gate, dy = (torch.randn(400, 4096).bfloat16() for _ in range(3))
    leaves = [each.requires_grad_() for each in (x, gate, torch.ones(4096).bfloat16())]
    with npu_offline.emulate("Ascend910B4") as emulation:
        gated_rms_norm(*leaves, norm_before_gate=norm_before_gate).backward(dy)
    forward, backward, _ = emulation.launches
    size, parameters = x.numel() * 2, 40 * 4096 * (2 + 4)
    assert 3 * size <= moved(forward) <= 1.05 * 3 * size + parameters
    assert 5 * size <= moved(backward) <= 1.05 * 5 * size + parameters


def test_heads_of_a_projection_are_read_in_place_in_whole_tiles():
    q = torch.randn(3000, 3, 4, 128).bfloat16()[:, 1].requires_grad_()
    with npu_offline.emulate("Ascend910B4") as emulation:
        rms_norm(q).backward(torch.randn(3000, 4, 128).bfloat16())
    size = q.numel() * 2
    for moving, name, count in zip(emulation.launches, ("p_x", "p_dx"), (2, 3), strict=True):
        traffic = moving.arguments[name]
        assert (traffic.read + traffic.written) / traffic.transfers >= 8192
        assert count * size <= moved(moving) <= 1.05 * count * size


def test_the_gradient_of_a_projection_is_written_once_in_whole_tiles():
    leaves = [torch.randn(3000, 8 * 128).bfloat16(), torch.ones(128).bfloat16(), torch.ones(128).bfloat16()]
    with npu_offline.emulate("Ascend910B4") as emulation:
        results = qk_rms_norm(*[leaf.requires_grad_() for leaf in leaves], 4, 2)
        torch.autograd.grad(tuple(results), leaves, [torch.ones_like(result) for result in results])
    gradients = [moving.arguments["p_dx"] for moving in emulation.launches if "p_dx" in moving.arguments]
    assert [traffic.written for traffic in gradients] == [3000 * heads * 128 * 2 for heads in (4, 2)]
    assert all(traffic.written / traffic.transfers >= 8192 for traffic in gradients)


def test_transfers_are_whole_tiles():
    x = torch.randn(4096, 512).bfloat16()
    with npu_offline.emulate("Ascend910B4") as emulation:
        rms_norm(x)
    (moving,) = emulation.launches
    assert moving.arguments["p_x"].read / moving.arguments["p_x"].transfers >= 8192
