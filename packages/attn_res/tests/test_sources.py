"""What a launch holds of the sources that it reads through a table of addresses."""

import npu_tiling
import pytest
import torch
from npu_attn_res.launch import pointers, sources

DEVICES = {
    "cuda": npu_tiling.Device("NVIDIA H200", "cuda", "sm_90", 132, 132, 232448, ub_align=16, max_grid=2**31 - 1),
    "npu": npu_tiling.soc("Ascend910B4"),
}


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize("block", ["contiguous", "transposed", "of two strides"])
def test_every_source_lives_until_the_launch_that_reads_it(place, block, monkeypatch):
    """On a device a kernel is given one source and distances: nothing else keeps the copies of the others."""
    entries = []
    monkeypatch.setattr(pointers, "Neighbours", lambda tensors: tensors[0])
    monkeypatch.setattr(pointers.KERNELS, "launch", lambda *arguments: entries.extend(arguments[-1][1:]))
    blocks = [torch.randn(6, 16) for _ in range(4)]
    if block == "transposed":
        blocks = [tensor.t().contiguous().t() for tensor in blocks]
    elif block == "of two strides":
        blocks = [tensor if i else torch.randn(6, 32)[:, :16] for i, tensor in enumerate(blocks)]
    found = sources.follow(blocks, DEVICES[place], stacked=False)
    first = found.at.base.data_ptr()
    read = {first + entry * blocks[0].itemsize for entry in entries[: len(blocks)]}
    assert len(read) == len(blocks) and read <= {tensor.data_ptr() for tensor in found.tensors}
    for tensor, copy in zip(blocks, found.tensors, strict=True):
        assert torch.equal(tensor, copy)


@pytest.fixture(params=["3.6.0"])
def triton(request, monkeypatch):
    monkeypatch.setattr(pointers, "version", lambda name: request.param)
    pointers._has_tuples.cache_clear()
    yield request.param
    pointers._has_tuples.cache_clear()


@pytest.mark.parametrize("triton", ["3.4.0", "3.10.1", None], indirect=True)
@pytest.mark.parametrize("n_blocks", [2, 5, 32])
@pytest.mark.parametrize("missing", [(), (0, 1)])
def test_a_kernel_for_cuda_gets_each_of_a_few_blocks_as_an_argument(n_blocks, missing, triton):
    blocks = [torch.randn(3, 16) for _ in range(n_blocks)]
    gradients = [None if i in missing else torch.empty(3, 16) for i in range(n_blocks)]
    found = pointers.find(blocks, gradients, DEVICES["cuda"])
    assert found[0].table is None
    for at, wanted in zip(found, (blocks, gradients), strict=True):
        if all(one is None for one in wanted):
            assert (at.base, at.others, at.needed) == (None, None, 0)
            continue
        given = (at.base, *at.others)
        assert len(given) in (2, 8, 32) and len(given) >= n_blocks
        for i, one in enumerate(wanted):
            assert bool(at.needed >> i & 1) == (one is not None)
            assert one is None or given[i] is one
        assert at.needed < 2**n_blocks
        assert all(isinstance(one, torch.Tensor) for one in given)


@pytest.mark.parametrize(
    ("place", "n_blocks", "triton"), [("cuda", 33, "3.6.0"), ("npu", 5, "3.6.0"), ("cuda", 5, "3.3.1")], indirect=["triton"]
)
def test_other_blocks_are_found_through_a_table(place, n_blocks, triton, monkeypatch):
    entries = []
    monkeypatch.setattr(pointers, "Neighbours", lambda tensors: tensors[0])
    monkeypatch.setattr(pointers.KERNELS, "launch", lambda *arguments: entries.extend(arguments[-1][1:]))
    blocks = [torch.randn(3, 16) for _ in range(n_blocks)]
    at, _ = pointers.find(blocks, (), DEVICES[place])
    assert at.others is None
    assert [blocks[0].data_ptr() + 4 * entry for entry in entries[:n_blocks]] == [block.data_ptr() for block in blocks]


def test_blocks_that_were_arguments_are_put_into_a_table_for_kernels_that_take_columns(triton, monkeypatch):
    entries = []
    monkeypatch.setattr(pointers, "Neighbours", lambda tensors: tensors[0])
    monkeypatch.setattr(pointers.KERNELS, "launch", lambda *arguments: entries.extend(arguments[-1][1:]))
    blocks, gradients = [torch.randn(3, 16) for _ in range(3)], [torch.empty(3, 16), None, torch.empty(3, 16)]
    pointers.find(blocks, gradients, DEVICES["cuda"])
    assert not entries
    tabled = sources.follow(blocks, DEVICES["cuda"], gradients, stacked=False)
    assert tabled.at.others is None and tabled.gradients_at.others is None
    assert [blocks[0].data_ptr() + 4 * entry for entry in entries[:3]] == [block.data_ptr() for block in blocks]
    assert entries[5] == pointers._NO_GRADIENT
    assert [gradients[0].data_ptr() + 4 * entries[i] for i in (4, 6)] == [gradients[i].data_ptr() for i in (0, 2)]
