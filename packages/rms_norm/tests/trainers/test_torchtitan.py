"""torchtitan's norms with ours inside, in a configuration that torchtitan's own override rewrites."""

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.models.common import RMSNorm as OfTorchtitan  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402

TARGET = "npu_rms_norm.integrations.torchtitan.rms_norm"


def norms_of(config, found=None):
    """Every configuration of a norm in a model's."""
    found = [] if found is None else found
    if isinstance(config, OfTorchtitan.Config):
        found.append(config)
    elif isinstance(config, (list, tuple)):
        for part in config:
            norms_of(part, found)
    elif hasattr(config, "__dataclass_fields__"):
        for name in config.__dataclass_fields__:
            norms_of(getattr(config, name), found)
    return found


def test_every_norm_of_a_model_is_ours():
    config = model_registry("debugmodel").model
    before = norms_of(config)
    apply_overrides(OverrideConfig(imports=[TARGET]), config)
    after = norms_of(config)
    assert len(before) == len(after) > 2
    for one, other in zip(before, after, strict=True):
        assert type(other).__module__ == TARGET.rpartition(".")[0]
        assert (other.normalized_shape, other.eps, other.param_init) == (one.normalized_shape, one.eps, one.param_init)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_values_and_gradients(dtype, affine):
    from npu_rms_norm.integrations.torchtitan import RMSNorm, rms_norm

    torch.manual_seed(0)
    config = OfTorchtitan.Config(normalized_shape=48, eps=1e-4, elementwise_affine=affine)
    theirs, ours = config.build().to(dtype), rms_norm(config).build().to(dtype)
    assert type(ours) is RMSNorm
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 1, 0.25)
    ours.load_state_dict(theirs.state_dict())
    x, upstream = torch.randn(3, 5, 48, dtype=dtype), torch.randn(3, 5, 48, dtype=dtype)
    results = []
    for norm in (ours, theirs):
        given = x.clone().requires_grad_()
        y = norm(given)
        results.append((y, *torch.autograd.grad(y, [given, *norm.parameters()], upstream.clone())))
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype is torch.bfloat16 else {}
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **tolerance)
