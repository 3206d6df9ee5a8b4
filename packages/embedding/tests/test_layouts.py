"""Indices, tables and gradients that lie in memory in other ways than one row after another."""

import lookup
import pytest
import torch
from npu_embedding import embedding

from testing import memory

pytestmark = pytest.mark.usefixtures("npu_poisoned")

VIEWS = {
    "a number": lambda x: x.view(-1)[0],
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[::2, 1::3],
    "one for all": lambda x: x[:1].expand(6, -1),
    "four dimensions": lambda x: x.view(2, 3, 2, 6).permute(3, 0, 2, 1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_at_any_strides(device, view, dtype):
    indices = VIEWS[view](torch.randint(0, 50, (6, 12), dtype=dtype, device=device.torch))
    case = lookup.make(0, 50, 64)
    case.indices, case.dy = indices.cpu(), torch.randn(*indices.shape, 64)
    weight = lookup.leaf(case.weight, device.torch)
    out = embedding(indices, weight)
    out.backward(case.dy.to(device.torch))
    lookup.check(case, (out.detach().cpu(), weight.grad.cpu()))


STRIDED = {
    "columns of a wider table": lambda x: x.repeat(1, 3)[:, 64:128],
    "every third row": lambda x: x.repeat_interleave(3, 0)[::3],
    "columns not side by side": lambda x: x.t().contiguous().t(),
    "one row for all": lambda x: x[:1].expand(50, 64),
}


@pytest.mark.parametrize("view", STRIDED)
def test_table_and_gradient_at_any_strides(device, view):
    case = lookup.make(50, 50, 64)
    case.weight, case.dy = STRIDED[view](case.weight), STRIDED[view](case.dy)
    weight = STRIDED[view](lookup.make(50, 50, 64).weight.to(device.torch)).requires_grad_()
    out = embedding(case.indices.to(device.torch), weight)
    (dweight,) = torch.autograd.grad(out, weight, STRIDED[view](lookup.make(50, 50, 64).dy.to(device.torch)))
    lookup.check(case, (out.detach().cpu(), dweight.cpu()))


@pytest.mark.uncollected("takes more memory than a test should on an NPU", lambda place: place == "npu")
@pytest.mark.slow
def test_rows_further_apart_than_32_bits_reach(device):
    stride = 2**31 + 64
    storage = memory.untouched(stride + 256, torch.bfloat16, device.torch)
    weight = storage.as_strided((2, 256), (stride, 1))
    values = torch.randn(2, 256).bfloat16()
    weight.copy_(values)
    indices = torch.tensor([1, 0, 1], device=device.torch)
    assert torch.equal(embedding(indices, weight).cpu(), values[[1, 0, 1]])
    table = torch.zeros(4, 256, dtype=torch.bfloat16, device=device.torch, requires_grad=True)
    out = embedding(torch.tensor([3, 1], device=device.torch), table)
    (dweight,) = torch.autograd.grad(out, table, weight)
    assert torch.equal(dweight.cpu()[[3, 1]], values)


@pytest.mark.uncollected(
    "writes 4 GiB, which takes a GPU a millisecond and other places minutes", lambda place: place != "cuda"
)
def test_gradient_past_2_to_the_31_elements(device):
    rows, width = 2**15 + 3, 2**16
    weight = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    indices = torch.tensor([rows - 1, 5, rows - 1], device="cuda")
    (dweight,) = torch.autograd.grad(embedding(indices, weight).sum(), weight)
    assert torch.equal(dweight[:, 0].nonzero().flatten().cpu(), torch.tensor([5, rows - 1]))
    assert torch.equal(dweight[rows - 1].cpu(), torch.full((width,), 2.0).bfloat16())
    assert dweight.count_nonzero() == 2 * width
