"""Every launch that a device or a compiler refuses has a fallback with the same results."""

import formula
import npu_offline
import npu_tiling
import pytest
import torch
from npu_rms_norm import add_rms_norm, gated_rms_norm, rms_norm
from npu_rms_norm.launch.arguments import KERNELS
from npu_tiling.launching import fallback

pytestmark = [
    pytest.mark.compilers,
    pytest.mark.skipif(not npu_offline.installed(), reason="needs triton-ascend and a toolchain (npu-offline fetch)"),
]
H200 = npu_tiling.Device("H200", "cuda", "sm_90", vector_cores=32, cube_cores=32, ub_bytes=2**17, ub_align=16)


@pytest.fixture
def refuse(monkeypatch):
    """Launches of the kernels that are named raise an error; a list of all that are launched."""
    names, real = [], KERNELS.launch

    def starting(*refused, error):
        def launch(module, kernel, spec, grid, tensors, scalars):
            names.append(kernel)
            if kernel in refused:
                raise RuntimeError(error)
            real(module, kernel, spec, grid, tensors, scalars)

        monkeypatch.setattr(KERNELS, "launch", launch)
        return names

    return starting


@pytest.mark.parametrize("mode", ["llama", "gemma"])
@pytest.mark.parametrize("residual", [False, True])
def test_the_backward_of_wide_rows_where_cooperation_is_refused(refuse, monkeypatch, residual, mode):
    """The tiles of CUDA, on the emulated chip."""
    names = refuse("backward_shared_kernel", error="cooperative launch is too large")
    case = formula.make(5, 17000, torch.float32, casting_mode=mode)
    added = torch.zeros_like(case.x).requires_grad_()
    function = (lambda x, *given, **options: add_rms_norm(x, added, *given, **options).y) if residual else rms_norm
    monkeypatch.setattr(fallback, "_replaced", {})
    warns = pytest.warns(RuntimeWarning, match="wait for one another")
    with npu_offline.emulate("Ascend910B4"), npu_tiling.use_device(H200, emulated=True), warns:
        formula.check(case, formula.run(case, function, "cpu"))
    assert names[1:] == [
        "backward_shared_kernel",
        "backward_wide_mean_kernel",
        "backward_wide_kernel",
        "sum_partials_kernel",
    ]


OVERFLOW = "error: ub overflow, requires 1966592 bits while 1572864 bits available!"
SHAPES = {
    "rows": ((24, 256), (256,)),
    "rows that are not whole pieces of 32 bytes": ((24, 123), (123,)),
    "groups of rows": ((9, 4, 64), (64,)),
    "heads": ((9, 4, 64), (4, 64)),
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_that_overflow_at_any_size_become_blocks_of_columns(refuse, monkeypatch, shape, gated):
    """Ascend: fewer groups, fewer rows, one buffer, blocks of columns."""
    names = refuse("forward_kernel", "backward_kernel", error=OVERFLOW)
    monkeypatch.setattr(fallback, "_replaced", {})
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
