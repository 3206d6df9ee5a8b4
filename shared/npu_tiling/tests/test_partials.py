"""Partial sums: the tile and grid that add them, and their values."""

import numpy as np
import pytest
import torch
from npu_tiling import Device, device_for, soc
from npu_tiling.partials import add_partials, choose_sum
from npu_tiling.plans import Plan, run_plan

B4 = soc("Ascend910B4")
H200 = Device(name="H200", kind="cuda", arch="sm_90", vector_cores=132, cube_cores=132, ub_bytes=232448, max_grid=2**31 - 1)
WIDTHS = (1, 7, 100, 512, 4096, 8192, 16384, 40000, 262144)


@pytest.mark.parametrize("device", [B4, soc("Ascend950PR_957b"), H200], ids=lambda device: device.name)
@pytest.mark.parametrize("width", WIDTHS)
def test_programs_cover_every_column(width, device):
    tiling = choose_sum(width, device)
    assert tiling.constants["N"] == width
    assert tiling.column_blocks * tiling.constants["BLOCK_N"] >= width
    assert tiling.grid(1) == tiling.column_blocks <= device.max_grid


def test_every_core_gets_columns():
    assert choose_sum(4096, B4).grid(1) == B4.vector_cores
    assert choose_sum(1, B4).grid(1) == 1


def test_a_single_row_has_one_buffer_on_ascend():
    assert choose_sum(262144, B4).constants["BLOCK_M"] == 1
    assert choose_sum(262144, B4).options == {"multibuffer": False}
    assert choose_sum(512, B4).options == {}


@pytest.mark.uncollected("plain PyTorch has no launch", lambda place: place == "cpu")
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 100), (40, 512), (41, 4097)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_rounded_once(npu_place, count, width, dtype):
    device = device_for(npu_place.torch)
    if device is None:
        pytest.skip("plain PyTorch has no launch")
    partials = torch.from_numpy(np.random.default_rng(0).standard_normal((count, width), np.float32)).to(npu_place.torch)
    total = torch.empty(width, dtype=dtype, device=npu_place.torch)
    p = Plan(device)
    add_partials(p, "sum", *map(p.argument, (partials, total)))
    run_plan(p, [partials, total], lambda replaced: p)
    expected = partials.double().sum(0)
    most = torch.finfo(dtype).eps * (0.5 if dtype != torch.float32 else count**0.5 + 1)
    assert ((total.double() - expected).abs() <= most * partials.double().abs().sum(0)).all()
