"""What a launch holds of the sources that it reads through a table of addresses."""

import npu_tiling
import pytest
import torch
from npu_attn_res.launch import sources

DEVICES = {
    "cuda": npu_tiling.Device("NVIDIA H200", "cuda", "sm_90", 132, 132, 232448, ub_align=16, max_grid=2**31 - 1),
    "npu": npu_tiling.soc("Ascend910B4"),
}


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize("block", ["contiguous", "transposed", "of two strides"])
def test_every_source_lives_until_the_launch_that_reads_it(place, block, monkeypatch):
    """On a device a kernel is given one source and distances: nothing else keeps the copies of the others."""
    entries = []
    monkeypatch.setattr(sources, "Neighbours", lambda tensors: tensors[0])
    monkeypatch.setattr(sources.KERNELS, "launch", lambda *arguments: entries.extend(arguments[-1][1:]))
    blocks = [torch.randn(6, 16) for _ in range(4)]
    if block == "transposed":
        blocks = [tensor.t().contiguous().t() for tensor in blocks]
    elif block == "of two strides":
        blocks = [tensor if i else torch.randn(6, 32)[:, :16] for i, tensor in enumerate(blocks)]
    found = sources.follow(blocks, False, DEVICES[place])
    first = found.at.base.data_ptr()
    read = {first + entry * blocks[0].itemsize for entry in entries[: len(blocks)]}
    assert len(read) == len(blocks) and read <= {tensor.data_ptr() for tensor in found.held}
    for tensor, copy in zip(blocks, found.held, strict=True):
        assert torch.equal(tensor, copy)
