"""Blocks as lists and as views, wherever they lie; blocks and weights that need no gradient."""

import collections

import depth
import pytest
import torch
from npu_attn_res import attn_res, attn_res_bank, attn_res_phase1

from testing import memory

pytestmark = pytest.mark.usefixtures("npu_poisoned")


def test_list_gives_the_bits_of_the_stacked_tensor_where_blocks_are_anywhere(device):
    case = depth.make(5, 37, 256, torch.bfloat16)
    expected = depth.run(case, device.torch)
    for actual, wanted in zip(depth.run(case, device.torch, listed=True), expected, strict=True):
        assert torch.equal(actual, wanted)
    # Higher and lower addresses, and not at multiples of 16 elements.
    memory = torch.zeros(38880 + 37 * 256, dtype=torch.bfloat16, device=device.torch)
    blocks = [memory[start : start + 37 * 256].view(37, 256) for start in (29300, 10000, 0, 19777, 38880)]
    for block, values in zip(blocks, case.blocks, strict=True):
        block.copy_(values)
    h = attn_res(blocks, case.query.to(device.torch), case.rms_weight.to(device.torch), rms_eps=case.eps)
    assert torch.equal(h.cpu(), expected[0])


@pytest.mark.few(2)
@pytest.mark.parametrize("needed", [(), (0,), (2,), (1, 3)])
def test_blocks_that_need_no_gradient_get_none(device, needed):
    case = depth.make(4, 7, 256, torch.bfloat16)
    expected = depth.run(case, device.torch, listed=True)
    blocks = [block.to(device.torch).requires_grad_(i in needed) for i, block in enumerate(case.blocks)]
    weights = depth.leaf(case.query, device.torch), depth.leaf(case.rms_weight, device.torch)
    attn_res(blocks, *weights, rms_eps=case.eps).backward(case.dh.to(device.torch))
    for i, block in enumerate(blocks):
        assert (block.grad is None) == (i not in needed)
        assert i not in needed or torch.equal(block.grad.cpu(), expected[1][i])
    for weight, wanted in zip(weights, expected[2:], strict=True):
        assert torch.equal(weight.grad.cpu(), wanted)


def test_gradients_of_a_list_have_memory_of_their_own(device):
    """One memory for all would be held until the last of them is free, and PyTorch would not add to them in place."""
    case = depth.make(4, 6, 256, torch.bfloat16)
    blocks = [block.to(device.torch).requires_grad_() for block in case.blocks]
    wide = torch.randn(6, 512).to(device.torch, torch.bfloat16).requires_grad_()
    found = attn_res([*blocks, wide[:, :256]], case.query.to(device.torch), case.rms_weight.to(device.torch))
    gradients = torch.autograd.grad(found, [*blocks, wide], torch.ones_like(found))
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == 5
    for gradient in gradients[:4]:
        assert gradient.is_contiguous() and gradient.untyped_storage().nbytes() < 2 * gradient.numel() * gradient.itemsize


@pytest.mark.few(1)
@pytest.mark.parametrize("frozen", ["both", "query", "rms_weight"])
def test_frozen_weights(device, frozen):
    case = depth.make(3, 7, 256, torch.float32)
    _, dblocks, *dweights = depth.run(case, device.torch)
    blocks, *weights = case.leaves(device.torch, False)
    for name, weight in zip(("query", "rms_weight"), weights, strict=True):
        weight.requires_grad_(frozen not in (name, "both"))
    attn_res(blocks[0], *weights, rms_eps=case.eps).backward(case.dh.to(device.torch))
    assert torch.equal(blocks[0].grad.cpu(), dblocks)
    for weight, wanted in zip(weights, dweights, strict=True):
        assert weight.grad is None if not weight.requires_grad else torch.equal(weight.grad.cpu(), wanted)


STRIDED = {
    "slice of a wider tensor": lambda: torch.randn(3, 9, 700)[..., 50:562],
    "pitch of no whole 32 bytes": lambda: torch.randn(3, 9, 131)[..., :123],
    "every second token": lambda: torch.randn(3, 18, 256)[:, ::2],
    "transposed tokens": lambda: torch.randn(3, 5, 4, 256).transpose(1, 2),
    "blocks inside": lambda: torch.randn(9, 3, 256).transpose(0, 1),
    "one block for all": lambda: torch.randn(1, 9, 256).expand(3, 9, 256),
    "columns not side by side": lambda: torch.randn(3, 256, 9).transpose(1, 2),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("view", STRIDED)
@pytest.mark.parametrize("listed", [False, True], ids=["stacked", "list"])
def test_strided_blocks_and_gradient(device, view, listed):
    torch.manual_seed(0)
    blocks = STRIDED[view]().to(device.torch)
    width = blocks.shape[-1]
    dh = torch.randn(*blocks.shape[1:-1], 2 * width, device=device.torch)[..., :width]
    weights = torch.randn(width, device=device.torch), torch.randn(width, device=device.torch)

    def results(blocks, dh):
        given = [block.detach().requires_grad_() for block in blocks.unbind()]
        stacked = blocks.detach().requires_grad_()
        h = attn_res(given if listed else stacked, *weights)
        return h, *torch.autograd.grad(h, given if listed else stacked, dh)

    for strided, copied in zip(results(blocks, dh), results(blocks.contiguous(), dh.contiguous()), strict=True):
        assert torch.allclose(strided, copied, rtol=1e-4, atol=1e-4)


@pytest.mark.uncollected(
    "plain PyTorch has offsets of its own; on an NPU it takes more memory than a test should",
    lambda place: place in ("cpu", "npu"),
)
@pytest.mark.slow
def test_blocks_further_apart_than_32_bits_reach(device):
    stride = 2**31 + 64
    storage = memory.untouched(stride + 512, torch.bfloat16, device.torch)
    case = depth.make(2, 2, 256, torch.bfloat16)
    far = storage.as_strided((2, 2, 256), (stride, 256, 1)).copy_(case.blocks)
    weights = case.query.to(device.torch), case.rms_weight.to(device.torch)
    expected = attn_res(case.blocks.to(device.torch), *weights)
    assert torch.equal(attn_res(far, *weights), expected)
    assert torch.equal(attn_res([far[0], far[1]], *weights), expected)
    assert torch.equal(attn_res([far[1], far[0]], *weights), attn_res(case.blocks.flip(0).to(device.torch), *weights))


@pytest.mark.parametrize("kind", [tuple, collections.deque, torch.nn.ParameterList])
def test_any_kind_of_list(device, kind):
    case = depth.make(3, 5, 256, torch.float32)
    weights = case.query.to(device.torch), case.rms_weight.to(device.torch)
    blocks = [block.to(device.torch) for block in case.blocks]
    assert torch.equal(attn_res(kind(blocks), *weights), attn_res(blocks, *weights))
    phases = [attn_res_phase1(torch.stack([weights[0]] * 2), v, weights[1]) for v in (kind(blocks), blocks)]
    assert all(torch.equal(one, other) for one, other in zip(*phases, strict=True))
    found, expected = (attn_res_bank(v, None, blocks[0], *weights) for v in (kind(blocks[1:]), blocks[1:]))
    assert torch.equal(found.output, expected.output)
