"""Rows of the widths that models have, most no power of two, and of more blocks than one program holds, against fp64."""

import banks
import depth
import pytest
import torch
from npu_attn_res import attn_res

from testing.pairs import all_pairs

pytestmark = [
    pytest.mark.usefixtures("npu_poisoned", "chip"),
    pytest.mark.uncollected("plain PyTorch computes rows of any width alike", lambda place: place == "cpu"),
]

# Blocks and widths, two of them ragged. On CUDA several programs share a token of most of them.
SHAPES = [(8, 2048), (8, 2560), (3, 2600), (12, 5120), (9, 5000), (8, 7168), (16, 7168), (8, 16384), (31, 2056)]


ON_CUDA = "of Ascend's tiles test_attn_res.py and test_row_backward.py have one each"


@pytest.fixture
def chip(device):
    if device.name == "cpu":
        pytest.skip("plain PyTorch computes rows of any width alike")


def only_on_cuda(device) -> None:
    if device.torch.type != "cuda":
        pytest.skip(ON_CUDA)


def tokens_of(device) -> int:
    """On CUDA more than there are programs, so that all of them take several."""
    return 301 if device.torch.type == "cuda" else 3


@pytest.mark.few(3)
@pytest.mark.parametrize("listed", [False, True], ids=["stacked", "list"])
@pytest.mark.parametrize(("n_blocks", "width"), SHAPES)
def test_many_tokens(device, n_blocks, width, listed):
    if (n_blocks, width, listed) not in ((3, 2600, True), (16, 7168, False), (31, 2056, True)):
        only_on_cuda(device)
    case = depth.make(n_blocks, tokens_of(device), width, torch.bfloat16)
    depth.check(case, depth.run(case, device.torch, listed))


SMALLEST = {
    "n_blocks, width": [(1, 1), (1, 2), (2, 1), (1, 3), (3, 2)],
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "listed": [False, True],
}


@pytest.mark.few(4)
@pytest.mark.parametrize(*all_pairs(**SMALLEST))
def test_the_smallest_tiles(device, dtype, n_blocks, width, listed):
    case = depth.make(n_blocks, 5, width, dtype)
    depth.check(case, depth.run(case, device.torch, listed))


@pytest.mark.uncollected("asked of CUDA's kernels alone", lambda place: place != "cuda")
@pytest.mark.parametrize(("n_blocks", "width"), [(6, 2560), (8, 5120), (5, 7168)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes(device, dtype, n_blocks, width):
    only_on_cuda(device)
    case = depth.make(n_blocks, 5, width, dtype)
    depth.check(case, depth.run(case, device.torch, listed=True))


@pytest.mark.parametrize("tokens", [1, 2])
def test_fewer_tokens_than_programs(device, tokens):
    case = depth.make(8, tokens, 7168, torch.bfloat16)
    depth.check(case, depth.run(case, device.torch))


@pytest.mark.uncollected("asked of CUDA's kernels alone", lambda place: place != "cuda")
@pytest.mark.parametrize("sharp", [30.0, 300.0])
def test_gradients_are_exact_where_weights_are_sharp(device, sharp):
    only_on_cuda(device)
    case = depth.make(16, 20, 7168, torch.bfloat16, sharp=sharp)
    depth.check(case, depth.run(case, device.torch, listed=True))


@pytest.mark.few(2)
@pytest.mark.parametrize("listed", [False, True], ids=["stacked", "list"])
@pytest.mark.parametrize(("n_blocks", "width"), [(8, 7168), (12, 5120), (3, 2600)])
def test_strided_blocks_and_gradient(device, n_blocks, width, listed):
    """Rows that begin at no whole 32 bytes, whose neighbours are NaN."""
    if width == 5120:
        only_on_cuda(device)
    case = depth.make(n_blocks, 7, width, torch.bfloat16)
    wide = torch.full((n_blocks, 7, width + 27), float("nan"), dtype=torch.bfloat16)
    wide[..., 13:-14] = case.blocks
    blocks = wide.to(device.torch)[..., 13:-14]
    given = [one.detach().requires_grad_() for one in (blocks.unbind() if listed else [blocks])]
    upstream = torch.stack([case.dh.to(device.torch)] * 2, -1).flatten(-2)[..., ::2]
    weights = depth.leaf(case.query, device.torch), depth.leaf(case.rms_weight, device.torch)
    h = attn_res(given if listed else given[0], *weights, rms_eps=case.eps)
    dblocks = torch.autograd.grad(h, [*given, *weights], upstream)
    found = torch.stack(dblocks[:-2]) if listed else dblocks[0]
    depth.check(case, tuple(one.detach().cpu() for one in (h, found, *dblocks[-2:])))


@pytest.mark.parametrize(("n_blocks", "width"), [(8, 7168), (12, 5120), (2, 2560)])
def test_banks(device, n_blocks, width):
    if width != 2560:
        only_on_cuda(device)
    tokens = 150 if device.torch.type == "cuda" else 3
    given = banks.tensors(device, tokens, capacity=n_blocks + 1, n_blocks=n_blocks, width=width)
    for counted in (False, True):
        banks.check(given, n_blocks, counted=counted)


@pytest.mark.uncollected("asked of CUDA's kernels alone", lambda place: place != "cuda")
@pytest.mark.parametrize("needed", [(0,), (2, 7), ()])
def test_blocks_and_weights_that_need_no_gradient_get_none(device, needed):
    only_on_cuda(device)
    case = depth.make(8, 5, 7168, torch.bfloat16)
    expected = depth.run(case, device.torch, listed=True)
    blocks = [block.to(device.torch).requires_grad_(i in needed) for i, block in enumerate(case.blocks)]
    query, rms_weight = case.query.to(device.torch), depth.leaf(case.rms_weight, device.torch)
    rms_weight.requires_grad_(not needed)
    attn_res(blocks, query, rms_weight, rms_eps=case.eps).backward(case.dh.to(device.torch))
    for i, block in enumerate(blocks):
        assert (block.grad is None) == (i not in needed)
        assert i not in needed or torch.equal(block.grad.cpu(), expected[1][i])
    assert rms_weight.grad is None if needed else torch.equal(rms_weight.grad.cpu(), expected[3])


def test_programs_that_share_tokens_wait_for_no_free_gpu(device):
    """Other kernels hold the GPU while the programs of a backward start, some after the others."""
    only_on_cuda(device)
    case = depth.make(8, 301, 7168, torch.bfloat16)
    expected, busy = depth.run(case, device.torch), torch.cuda.Stream()
    square = torch.randn(4096, 4096, device=device.torch)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        for _ in range(30):
            square = square @ square / 4096
    found = depth.run(case, device.torch)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
