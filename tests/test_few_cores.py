"""Operators on a chip of which a program sees a few cores alone: a MIG slice, or cores that are switched off."""

import dataclasses

import npu_tiling
import pytest
import torch
from npu_attn_res import attn_res
from npu_embedding import embedding
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy
from npu_rms_norm import rms_norm
from npu_tiling.chips import plain_pytorch

CORES = 5  # tiles are shared unevenly: no number below is a multiple of it
INDICES, TARGET = torch.arange(701) * 7 % 300, torch.arange(67)
CALLS = {
    "rms_norm": (rms_norm, [(67, 512), (512,)]),
    "attn_res": (lambda q, w, *blocks: attn_res(blocks, q, w), [(256,), (256,), *[(67, 256)] * 4]),
    "embedding": (lambda table: embedding(INDICES.to(table.device), table), [(300, 64)]),
    "cross entropy": (lambda x, w: fused_linear_cross_entropy(x, w, TARGET.to(x.device)), [(67, 64), (1001, 64)]),
}


def run(call, leaves):
    result = call(*leaves)
    upstream = torch.linspace(-1, 1, result.numel(), device=result.device).view(result.shape)
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream if result.dim() else None)]


@pytest.mark.uncollected("plain PyTorch shares no work between cores of ours", lambda place: place == "cpu")
@pytest.mark.parametrize("name", CALLS)
def test_results_are_right_on_a_few_cores(device, name):
    call, shapes = CALLS[name]
    torch.manual_seed(0)
    leaves = [torch.randn(shape) for shape in shapes]
    with plain_pytorch():
        expected = run(call, [leaf.requires_grad_() for leaf in leaves])
    chip = npu_tiling.device_for(device.torch)
    few = dataclasses.replace(chip, name=f"{CORES} cores of {chip.name}", vector_cores=CORES, cube_cores=CORES)
    with npu_tiling.use_device(few, emulated=device.name == "emulated"), npu_tiling.watch_launches() as calls:
        found = run(call, [leaf.detach().to(device.torch).requires_grad_() for leaf in leaves])
    launches = [launch for each in calls for launch in each.launches]
    assert launches and (chip.kind == "cuda" or max(launch.grid for launch in launches) == CORES)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.cpu(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
