"""verl's head with ours inside, against verl's own in fp64."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")

from npu_fused_linear_cross_entropy.integrations import verl as integration  # noqa: E402
from verl.utils.experimental import torch_functional  # noqa: E402

WIDTH, VOCABULARY = 24, 52
OF_VERL = torch_functional.FusedLinearForPPOFunction


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    yield
    integration.unregister()


def a_head(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(*shape, WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH) / 2).to(dtype).requires_grad_()
    return x, weight, torch.randint(VOCABULARY, shape)


def in_fp64(x, weight, ids, temperature, d_log_probs, d_entropy):
    """Log-probabilities, entropies and gradients of verl's own function."""
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    logits = x.flatten(0, -2) @ weight.T / temperature
    log_p = logits.log_softmax(-1)
    log_probs = log_p.gather(-1, ids.reshape(-1, 1)).view(ids.shape)
    entropy = -(log_p.exp() * log_p).sum(-1).view(ids.shape)
    torch.autograd.backward([log_probs, entropy], [d_log_probs.double(), d_entropy.double()])
    return log_probs, entropy, x.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(19,), (3, 7)], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("backend", ["torch", "liger"])
def test_fused_linear_for_ppo(shape, dtype, temperature, backend):
    x, weight, ids = a_head(shape, dtype)
    log_probs, entropy = torch_functional.FusedLinearForPPO(impl_backend=backend)(x, weight, ids, temperature)
    assert log_probs.dtype == torch.float32
    assert entropy.dtype == dtype
    assert log_probs.shape == entropy.shape == shape
    upstream = torch.randn(shape), torch.randn(shape)
    expected = in_fp64(x, weight, ids, temperature, *upstream)
    torch.autograd.backward([log_probs, entropy], [upstream[0], upstream[1].to(dtype)])
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 6e-2}
    for ours, theirs in zip((log_probs, entropy, x.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, **tolerance)


def test_values_of_verls_own_function():
    x, weight, ids = a_head((19,), torch.float32)
    ours = torch_functional.FusedLinearForPPO()(x, weight, ids, 0.7)
    for value, theirs in zip(ours, OF_VERL.apply(x, weight, ids, 0.7, 8), strict=True):
        torch.testing.assert_close(value, theirs)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_linear_cross_entropy(reduction):
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    x, weight, ids = a_head((3, 7), torch.float32)
    log_probs, entropy = linear_cross_entropy(x, weight, ids, 0.7, reduction)
    log_p = (x.flatten(0, 1) @ weight.T / 0.7).log_softmax(-1)
    expected = log_p.gather(-1, ids.reshape(-1, 1))[:, 0]
    torch.testing.assert_close(log_probs, expected if reduction == "none" else getattr(expected, reduction)())
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1))


WORKER = """
import sys, torch, torch.distributed as dist
from npu_fused_linear_cross_entropy.integrations.verl import linear_cross_entropy
rank, ranks, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=ranks)
torch.manual_seed(0)
x, weight, ids = torch.randn(3, 7, 24), torch.randn(52, 24), torch.randint(52, (3, 7))
upstream = torch.randn(21), torch.randn(21)
def scores(x, weight, group):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    results = linear_cross_entropy(x, weight, ids, 0.7, "none", group)
    torch.autograd.backward(results, upstream)
    return *results, x.grad, weight.grad
expected = scores(x, weight, None)
log_probs, entropy, dx, dweight = scores(x, weight.chunk(ranks)[rank], dist.group.WORLD)
dist.all_reduce(dx)  # as verl's callers do
for ours, theirs in zip((log_probs, entropy, dx, dweight), (*expected[:3], expected[3].chunk(ranks)[rank])):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_vocabulary_in_equal_shards(ranks, tmp_path):
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(rank), str(ranks), str(tmp_path / "store")])
        for rank in range(ranks)
    ]
    assert [worker.wait(timeout=120) for worker in workers] == [0] * ranks


@pytest.mark.parametrize(("policy", "ours"), [("auto", True), ("none", False)])
def test_verl_loads_the_plugin_by_itself(policy, ours):
    program = (
        "from verl.utils.experimental.torch_functional import FusedLinearForPPO as head;"
        "from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy as loss;"
        "print(head.__module__.split('.')[0], loss.__module__.split('.')[0])"
    )
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": policy}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    package = "npu_fused_linear_cross_entropy" if ours else "verl"
    loss = package if ours else "torch"  # verl's own is a method of an autograd function
    assert done.stdout.split()[-2:] == [package, loss]
