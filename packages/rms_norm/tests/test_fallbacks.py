"""Every launch that a device or a compiler refuses has a fallback with the same results."""

import formula
import npu_offline
import pytest
import torch
from npu_rms_norm import gated_rms_norm, rms_norm

pytestmark = [
    pytest.mark.compilers,
    pytest.mark.skipif(not npu_offline.installed(), reason="needs triton-ascend and a toolchain (npu-offline fetch)"),
]


SHAPES = {
    "rows": ((24, 256), (256,)),
    "rows that are not whole pieces of 32 bytes": ((24, 123), (123,)),
    "groups of rows": ((9, 4, 64), (64,)),
    "heads": ((9, 4, 64), (4, 64)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_that_overflow_at_any_size_become_blocks_of_columns(npu_refuse, shape, gated):
    """Ascend: fewer groups, fewer rows, one buffer, blocks of columns."""
    _, ran = npu_refuse(lambda kernel, decision: kernel in ("forward_kernel", "backward_kernel"))
    torch.manual_seed(0)
    size, parameters = SHAPES[shape]
    wider = torch.randn(*size[:-2], 3, *size[-2:]) if len(size) > 2 else torch.randn(size)
    given = [wider, torch.randn(size), torch.randn(parameters), torch.randn(parameters)]

    def results():
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        x = leaves[0][:, 1] if len(size) > 2 else leaves[0]
        y = gated_rms_norm(x, *leaves[1:3], bias=leaves[3]) if gated else rms_norm(x, leaves[2], bias=leaves[3])
        used = leaves if gated else [leaves[0], *leaves[2:]]
        return y, *torch.autograd.grad(y, used, torch.ones_like(y))

    expected = results()
    with npu_offline.emulate("Ascend910B4"), pytest.warns(RuntimeWarning, match="overflows the Unified Buffer"):
        found = results()
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    assert {"forward_wide_kernel", "backward_wide_mean_kernel", "backward_wide_kernel"} <= {kernel for kernel, _ in ran}


def test_a_compiler_that_needs_more_gets_a_smaller_tile(npu_refuse):
    """Everything above 2 rows overflows."""
    refused, _ = npu_refuse(lambda kernel, decision: kernel == "forward_kernel" and decision.constants["M"] > 2)
    case = formula.make(64, 2048, torch.bfloat16, seed=3)
    with npu_offline.emulate("Ascend910B4"), pytest.warns(RuntimeWarning, match="overflows the Unified Buffer"):
        y, *_ = formula.run(case, rms_norm, "cpu")
    formula.assert_close(y, formula.exact(case)[0], roundings=2, length=2048)
    assert refused
