"""Matrix products: what is taken apart for cuBLAS, and what PyTorch misreads on a CPU."""

import math

import pytest
import torch
from npu_fused_linear_cross_entropy import matmul
from npu_tiling import device_for
from npu_tiling.plans import Plan

from testing.pairs import all_pairs
from testing.steps import run_once


def strided(rows, columns, order, generator, dtype=torch.bfloat16):
    """Values on a grid that sums of them stay on, in memory with NaN between the rows, or the columns."""
    values = torch.randint(-8, 9, (rows, columns), generator=generator)
    lines, length = (rows, columns) if order == "rows" else (columns, rows)
    memory = torch.full((lines, length + 5), math.nan, dtype=dtype)[:, :length]
    memory = memory if order == "rows" else memory.t()
    return memory.copy_(values)


def multiply(a, b, out, **options):
    run_once(lambda p, *slots: matmul.multiply(p, *slots, **options), device_for(a.device), a, b, out)


PRODUCTS = {
    "add, alpha": [(False, 1.0), (False, 0.25), (True, 0.25)],
    "dtype, left, right": [
        (torch.bfloat16, "rows", "rows"),
        (torch.bfloat16, "rows", "columns"),
        (torch.bfloat16, "columns", "rows"),
        (torch.float32, "rows", "columns"),
    ],
    "shape": [(7, 1003, 16), (1003, 7, 16), (16, 5, 1003), (513, 515, 517), (0, 600, 3), (3, 0, 601)],
}


@pytest.mark.parametrize(*all_pairs(**PRODUCTS))
def test_parts_make_up_the_product(monkeypatch, shape, left, right, dtype, add, alpha):
    monkeypatch.setattr(matmul, "_is_taken_apart", lambda *_: True)
    generator = torch.Generator().manual_seed(0)
    m, k, n = shape
    a, b = strided(m, k, left, generator), strided(k, n, right, generator)
    before = strided(m, n, "rows", generator).to(dtype)
    out = before.clone() if add else torch.full_like(before, math.nan)
    multiply(a, b, out, adds=add, alpha=alpha)
    expected = alpha * (a.double() @ b.double()) + (before.double() if add else 0)
    rounding = 2 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=rounding * 8)


def test_only_what_is_contiguous_is_taken_apart():
    tokens, width, vocabulary = 1001, 1024, 2003
    x, weight = torch.empty(tokens, width), torch.empty(vocabulary, width)
    logits = torch.empty(tokens, 2016)[:, :vocabulary]

    def parts(*matrices):
        a, b, out = map(Plan(None).argument, matrices)
        found = matmul._parts(a, b, out, True)
        return [
            ((m.stop - m.start, k.stop - k.start), (k.stop - k.start, n.stop - n.start), first) for m, k, n, first in found
        ]

    assert parts(x, weight.t(), logits) == [((1001, 1024), (1024, 2000), True), ((1001, 1024), (1024, 3), True)]
    assert parts(logits, weight, x) == [((1001, 3), (3, 1024), True), ((1001, 2000), (2000, 1024), False)]
    assert parts(logits.t(), x, weight) == [((2000, 1001), (1001, 1024), True), ((3, 1001), (1001, 1024), True)]
    small = torch.empty(100, 101)
    assert len(parts(small, small.t(), torch.empty(100, 100))) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nothing_between_rows_is_read(dtype, one_thread):
    """Fails on a CPU with matrix tiles (AMX) where PyTorch's own product is given such rows; fp16 on one thread alone."""
    generator = torch.Generator().manual_seed(0)
    for terms in (5, 123, 1000, 1003):
        a, b = strided(64, terms, "rows", generator, dtype), strided(terms, 96, "rows", generator, dtype)
        out = torch.zeros(64, 96, dtype=dtype)
        multiply(a, b, out)
        assert torch.isfinite(out).all()
        multiply(a, b, out, adds=True)
        assert torch.isfinite(out).all()


@pytest.mark.parametrize("native", [True, False], ids=["written as such", "of operands made wider"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_narrow_operands_can_be_fp32(device, dtype, native, monkeypatch):
    """torch_npu has `mm.dtype_out` from 2.13 on, not in 2.9: there the widening is for sums in fp32 alone."""
    if native and not matmul._native("mm", device.torch):
        pytest.skip("PyTorch has no such product here")
    if not native:
        monkeypatch.setattr(matmul, "_native", lambda operator, where: False)
        assert matmul.writes_fp32(device.torch, dtype) == (device.torch.type == "cpu")
    generator = torch.Generator().manual_seed(0)
    a, b = strided(70, 33, "rows", generator, dtype), strided(33, 90, "columns", generator, dtype)
    out = torch.full((70, 90), math.nan, device=device.torch)
    expected = 0.25 * (a.double() @ b.double())
    a, b = a.to(device.torch), b.to(device.torch)
    multiply(a, b, out, alpha=0.25)
    assert torch.equal(out.cpu().double(), expected)
    multiply(a, b, out, adds=True)
    assert torch.equal(out.cpu().double(), 5 * expected)
    multiply(a, b, out)
    assert torch.equal(out.cpu().double(), 4 * expected)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
