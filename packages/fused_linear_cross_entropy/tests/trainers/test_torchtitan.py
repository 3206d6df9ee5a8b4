"""torchtitan's chunked loss with ours inside, against torchtitan's own."""

import subprocess
import sys
from unittest import mock

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from npu_fused_linear_cross_entropy.integrations import torchtitan as integration  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss, MSELoss  # noqa: E402
from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.models.common import Linear  # noqa: E402

TARGET = "npu_fused_linear_cross_entropy.integrations.torchtitan.loss"


def losses_of(head, **config):
    """Ours and torchtitan's, with the same head."""
    config = ChunkedLossWrapper.Config(num_chunks=4, **config)
    found = integration.loss(config).build(), config.build()
    for loss in found:
        loss.set_lm_head(head)
    return found


def a_head(dtype=torch.float32, bias=False):
    if dtype is torch.float64 and torch.cuda.is_available():
        pytest.skip("our kernels take no fp64")
    torch.manual_seed(0)
    head = Linear.Config(in_features=24, out_features=52, bias=bias).build().to(dtype)
    labels = torch.randint(52, (2, 12))
    labels[0, :4] = -100
    return head, torch.randn(2, 12, 24, dtype=dtype, requires_grad=True), labels


def test_override_replaces_the_loss_of_a_configuration():
    from dataclasses import dataclass, field

    from torchtitan.config import Configurable

    class Trainer(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            loss: ChunkedLossWrapper.Config = field(default_factory=lambda: ChunkedLossWrapper.Config(num_chunks=3))

    config = Trainer.Config()
    apply_overrides(OverrideConfig(imports=[TARGET]), config)
    assert type(config.loss) is integration.FusedLinearLoss.Config
    assert isinstance(config.loss.build(), ChunkedLossWrapper)
    assert config.loss.num_chunks == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients(dtype, bias):
    head, x, labels = a_head(dtype, bias)
    results = []
    for loss in losses_of(head):
        head.zero_grad()
        value, metrics = loss(x, labels, torch.tensor(20.0), positions=torch.arange(12).expand(2, 12))
        value.backward()
        dx, x.grad = x.grad, None
        assert metrics == {}
        results.append((value.double(), dx, *(parameter.grad.clone() for parameter in head.parameters())))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # torchtitan's cross entropy is fp32


def test_evaluation_needs_no_gradient():
    head, x, labels = a_head()
    with torch.no_grad():
        ours, theirs = (loss(x.detach(), labels)[0] for loss in losses_of(head))
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-6, atol=1e-6)


def test_forward_of_the_head_is_put_back():
    head, x, labels = a_head()
    loss = losses_of(head)[0]
    loss(x, labels)
    assert "forward" not in vars(head)
    head.forward = wrapped = lambda hidden: hidden  # as torchtitan's parallelize leaves it
    loss(x, labels)
    assert head.forward is wrapped


@pytest.mark.parametrize("kind", [MSELoss, "tensor parallel"])
def test_what_is_not_ours_stays_with_torchtitan(kind):
    head, x, labels = a_head()
    loss = losses_of(head, loss_fn=(kind if kind is MSELoss else CrossEntropyLoss).Config())[0]
    size = 1 if kind is MSELoss else 2
    with (
        mock.patch.object(integration, "spmd_mesh_size", lambda name: size),
        mock.patch.object(ChunkedLossWrapper, "__call__", return_value="torchtitan's"),
    ):
        assert loss(x, labels) == "torchtitan's"


WORKER = """
import sys, copy, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from npu_fused_linear_cross_entropy.integrations import torchtitan as integration
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.models.common import Linear
rank, ranks, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=ranks)
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
torch.manual_seed(0)
head = Linear.Config(in_features=24, out_features=52).build()
model = torch.nn.ModuleDict({"body": torch.nn.Linear(24, 24), "head": head})
x, labels = torch.randn(ranks, 2, 12, 24), torch.randint(52, (ranks, 2, 12))
config = ChunkedLossWrapper.Config(num_chunks=4)
results = []
for loss in (integration.loss(config).build(), config.build()):
    sharded = copy.deepcopy(model)
    fully_shard(sharded["body"], mesh=mesh)
    fully_shard(sharded["head"], mesh=mesh)
    loss.set_lm_head(sharded["head"])
    for _ in range(2):  # a gradient that is added to
        value, _ = loss(sharded["body"](x[rank]), labels[rank], torch.tensor(24.0 * ranks))
        value.backward()
    results.append([value, *(parameter.grad.full_tensor() for parameter in sharded.parameters())])
for ours, theirs in zip(*results):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
dist.destroy_process_group()
"""


def test_head_that_fsdp_shards(tmp_path):
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(rank), "2", str(tmp_path / "store")]) for rank in range(2)
    ]
    assert [worker.wait(timeout=300) for worker in workers] == [0, 0]
