"""Every launch that a device or a compiler refuses has a fallback with the same results."""

import npu_offline
import pytest
import torch
from npu_rms_norm import gated_rms_norm, rms_norm
from npu_tiling import Kernels
from npu_tiling import launch as fallback

pytestmark = [
    pytest.mark.compilers,
    pytest.mark.skipif(not npu_offline.installed(), reason="needs triton-ascend and a toolchain (npu-offline fetch)"),
]


@pytest.fixture
def refuse(monkeypatch):
    """Launches of the kernels that are named raise an error; a list of all that are launched."""
    names, real = [], Kernels.launch

    def starting(*refused, error):
        def launch(self, module, kernel, decision, grid, tensors, scalars):
            names.append(kernel)
            if kernel in refused:
                raise RuntimeError(error)
            real(self, module, kernel, decision, grid, tensors, scalars)

        monkeypatch.setattr(Kernels, "launch", launch)
        return names

    return starting


OVERFLOW = "error: ub overflow, requires 1966592 bits while 1572864 bits available!"
SHAPES = {
    "rows": ((24, 256), (256,)),
    "rows that are not whole pieces of 32 bytes": ((24, 123), (123,)),
    "groups of rows": ((9, 4, 64), (64,)),
    "heads": ((9, 4, 64), (4, 64)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_that_overflow_at_any_size_become_blocks_of_columns(refuse, monkeypatch, shape, gated):
    """Ascend: fewer groups, fewer rows, one buffer, blocks of columns."""
    names = refuse("forward_kernel", "backward_kernel", error=OVERFLOW)
    monkeypatch.setattr(fallback, "replaced", {})
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
    assert {"forward_wide_kernel", "backward_wide_mean_kernel", "backward_wide_kernel"} <= set(names)
