"""racecheck's products: right, and taken inside of operators of ours too."""

import pytest
import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy
from products import ProductsInFp32

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_products_are_of_fp32_operands(dtype):
    a, b, c = torch.randn(5, 7).to(dtype), torch.randn(7, 3).to(dtype), torch.randn(5, 3).to(dtype)
    out, added = torch.empty_like(c), c.clone()
    with ProductsInFp32(CPU):
        returned = torch.mm(a, b)
        torch.mm(a, b, out=out)
        torch.addmm(added, a, b, beta=0.5, alpha=2.0, out=added)
    wide = torch.promote_types(dtype, torch.float32)
    right = a.to(wide) @ b.to(wide)
    assert returned.dtype == dtype and torch.equal(returned, right.to(dtype)) and torch.equal(out, returned)
    torch.testing.assert_close(added, (0.5 * c.to(wide) + 2 * right).to(dtype))


def test_products_of_our_operators_are_seen():
    seen = []

    class Noted(ProductsInFp32):
        def run(self, func, args, kwargs):
            seen.append(func.overloadpacket)
            return super().run(func, args, kwargs)

    x, weight = torch.randn(8, 16).bfloat16(), torch.randn(32, 16).bfloat16()
    target = torch.arange(8)
    with Noted(CPU):
        loss = fused_linear_cross_entropy(x, weight, target)
    assert {torch.ops.aten.mm, torch.ops.aten.addmm} & set(seen)
    torch.testing.assert_close(loss, fused_linear_cross_entropy(x, weight, target), rtol=2**-7, atol=0)
