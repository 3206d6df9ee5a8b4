"""Liger's functions, modules and patched models with our norms inside."""

import pytest
import torch

liger_kernel = pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
pytest.importorskip("triton", reason="liger-kernel needs Triton")

from npu_rms_norm import add_rms_norm, rms_norm  # noqa: E402
from npu_rms_norm.integrations import liger as integration  # noqa: E402


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    yield
    integration.unregister()


@pytest.mark.parametrize("casting_mode", ["llama", "gemma", "none"])
def test_functional_takes_ours(casting_mode):
    from liger_kernel.functional import rms_norm as of_liger

    x, weight = torch.randn(7, 48, dtype=torch.bfloat16), torch.randn(48)
    y = of_liger(x, weight, eps=1e-5, offset=1.0, casting_mode=casting_mode)
    assert torch.equal(y, rms_norm(x, weight, 1e-5, offset=1.0, casting_mode=casting_mode))


def test_added_norm_takes_ours():
    from liger_kernel.functional import fused_add_rms_norm

    x, residual, weight = torch.randn(7, 48), torch.randn(7, 48), torch.randn(48)
    for ours, expected in zip(fused_add_rms_norm(x, residual, weight), add_rms_norm(x, residual, weight), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", ["LigerRMSNorm", "LigerRMSNormForGemma", "LigerRMSNormForOlmo2"])
def test_module_takes_ours_with_gradients(name):
    from liger_kernel.transformers import rms_norm as modules

    norm = getattr(modules, name)(48)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(7, 48, requires_grad=True)
    y = norm(x)
    expected = rms_norm(x, norm.weight, norm.variance_epsilon, offset=norm.offset, casting_mode=norm.casting_mode)
    torch.testing.assert_close(y, expected)
    upstream = torch.randn(7, 48)
    gradients = torch.autograd.grad(y, [x, norm.weight], upstream.clone())
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, [x, norm.weight], upstream.clone()), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_unregister_gives_liger_its_own():
    import liger_kernel.ops
    from liger_kernel.backends.registry import list_registered

    integration.unregister()
    assert liger_kernel.ops.LigerRMSNormFunction is not integration.LigerRMSNormFunction
    assert "npu-tiling" not in str(list_registered("rms_norm"))
