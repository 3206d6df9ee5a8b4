"""With `batch_invariant` a token's log-probability and entropy are the same bits among any tokens, in any place."""

import pytest
import torch
from npu_fused_linear_cross_entropy import linear_log_probs

pytestmark = pytest.mark.usefixtures("npu_poisoned")

TOKENS = 75
SHARES = [(0, 1), (5, 6), (74, 75), (0, 2), (3, 10), (20, 65), (1, 75)]  # first and last token of what is computed apart
PROBLEMS = {
    "bf16": (torch.bfloat16, 64, 1000, {"chunk_tokens": 32}),
    "fp16, entropy": (torch.float16, 40, 517, {"chunk_tokens": 32, "return_entropy": True}),
    "fp32": (torch.float32, 64, 1000, {"chunk_tokens": 32, "softcap": 5.0}),
    "columns": (torch.bfloat16, 64, 3000, {"chunk_tokens": 32, "memory_budget": 2**17, "return_entropy": True}),
    "chunks of the default length": (torch.bfloat16, 64, 1000, {"return_entropy": True}),
}


@pytest.fixture(autouse=True)
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def problem(name, device):
    dtype, width, vocabulary, options = PROBLEMS[name]
    torch.manual_seed(0)
    x, others = (torch.randn(TOKENS, width).to(dtype).to(device) for _ in range(2))
    weight = (torch.randn(vocabulary, width) * 2 * width**-0.5).to(dtype).to(device)
    target = torch.randint(0, vocabulary, (TOKENS,), device=device)
    target[7] = -100

    def run(x, target):
        found = linear_log_probs(x, weight, target, batch_invariant=True, **options)
        return torch.stack((found.log_probs, found.entropy)) if "return_entropy" in options else found.unsqueeze(0)

    return x, others, target, run


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_token_depends_on_the_others(device, name):
    x, others, target, run = problem(name, device.torch)
    whole = run(x, target)
    for first, last in SHARES:
        assert torch.equal(run(x[first:last], target[first:last]), whole[:, first:last])
    order = torch.randperm(TOKENS, device=device.torch)
    assert torch.equal(run(x[order], target[order]), whole[:, order])
    assert torch.equal(run(torch.cat((others, x)), torch.cat((target, target)))[:, TOKENS:], whole)
    apart = torch.stack((x, others), 1)[:, 0]
    assert torch.equal(run(apart, target), whole)


def test_it_is_the_same_function(device):
    x, _, target, run = problem("bf16", device.torch)
    weight = (torch.randn(1000, 64) / 4).bfloat16().to(device.torch)
    leaves = [[tensor.clone().requires_grad_() for tensor in (x.view(3, 25, 64), weight)] for _ in range(2)]
    found = [
        linear_log_probs(*own, target.view(3, 25).int(), return_entropy=True, batch_invariant=invariant, chunk_tokens=32)
        for own, invariant in zip(leaves, (False, True), strict=True)
    ]
    for plain, invariant in zip(*(outputs[:2] for outputs in found), strict=True):
        assert invariant.shape == (3, 25)
        assert torch.allclose(plain, invariant, rtol=1e-5, atol=1e-5)
    for outputs in found:
        (outputs.log_probs.sum() + outputs.entropy.sum()).backward()
    for plain, invariant in zip(*leaves, strict=True):
        assert torch.allclose(plain.grad.float(), invariant.grad.float(), rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
def test_no_tokens_or_one(device, shape):
    x = torch.randn(*shape, 16, device=device.torch)
    target = torch.zeros(shape, dtype=torch.int64, device=device.torch)
    assert linear_log_probs(x, torch.randn(9, 16, device=device.torch), target, batch_invariant=True).shape == shape


def test_wrong_shapes_are_refused_as_without_it():
    with pytest.raises(ValueError, match="target has shape"):
        linear_log_probs(torch.randn(3, 4), torch.randn(9, 4), torch.zeros(2, dtype=torch.int64), batch_invariant=True)
