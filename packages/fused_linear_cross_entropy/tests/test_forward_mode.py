"""Forward-mode differentiation is refused by name; vmap and batched gradients give what each call alone does."""

import pytest
import torch
from npu_fused_linear_cross_entropy import FusedLinearCrossEntropyLoss, fused_linear_cross_entropy, linear_log_probs
from torch.autograd import forward_ad

TARGET = torch.tensor([0, 4, 4])


def of(function, **options):
    def call(x, weight):
        given = {name: each.to(x.device) if isinstance(each, torch.Tensor) else each for name, each in options.items()}
        found = function(x, weight, TARGET.to(x.device), **given)
        return (
            found if isinstance(found, torch.Tensor) else torch.cat([part.reshape(-1) for part in found if part is not None])
        )

    return call


CALLS = {
    "mean": of(fused_linear_cross_entropy),
    "none": of(fused_linear_cross_entropy, reduction="none"),
    "entropy": of(linear_log_probs, return_entropy=True),
    "log_probs": of(linear_log_probs),
    "more of distributions": of(
        linear_log_probs,
        ids=torch.tensor([[1], [4], [0]]),
        temperature=torch.tensor([0.5, 1.0, 2.0]),
        return_square_sum=True,
        return_mean_logit=True,
    ),
    "largest": lambda x, weight: linear_log_probs(x, weight, top_k=2, return_entropy=True).top_log_probs,
    "probabilities": lambda x, weight: fused_linear_cross_entropy(x, weight, torch.full((3, 5), 0.2, device=x.device)),
    "module": of(FusedLinearCrossEntropyLoss(reduction="sum")),
}


def tensors(device):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device.torch) for shape in ((3, 8), (5, 8))]


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("position", [0, 1])
def test_a_tangent_is_refused_by_name(device, what, position):
    inputs, function = tensors(device), CALLS[what]

    def one(given):
        return function(*(given if i == position else tensor for i, tensor in enumerate(inputs)))

    def dual(given):
        with forward_ad.dual_level():
            return one(forward_ad.make_dual(given, given))

    def of_sum(given):
        return torch.sin(one(given)).sum()

    given = inputs[position]
    calls = [
        lambda: torch.func.jvp(one, (given,), (given,)),
        lambda: dual(given),
        lambda: torch.func.jvp(torch.func.grad(of_sum), (given,), (given,)),
        lambda: torch.func.hessian(of_sum)(given),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match=r"npu_fused_linear_cross_entropy::\w+ has no forward-mode derivative"):
            call()


@pytest.mark.few(2)
@pytest.mark.parametrize("what", CALLS)
@pytest.mark.filterwarnings("ignore:.*batching rule")
def test_vmap_gives_what_each_call_does(device, what):
    inputs, function = tensors(device), CALLS[what]
    several = [torch.stack([tensor, 2 * tensor]) for tensor in inputs]

    def results(x, weight):
        gradients = torch.func.grad(lambda *given: torch.sin(function(*given)).sum(), (0, 1))(x, weight)
        return function(x, weight), *gradients

    found = torch.func.vmap(results)(*several)
    for i in range(2):
        for one, every in zip(results(*(tensor[i] for tensor in several)), found, strict=True):
            torch.testing.assert_close(every[i], one, rtol=1e-5, atol=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("what", CALLS)
@pytest.mark.filterwarnings("ignore:.*batching rule")
def test_several_upstream_gradients_give_what_each_does(device, what):
    leaves, function = [tensor.requires_grad_() for tensor in tensors(device)], CALLS[what]
    value = function(*leaves)
    upstream = torch.stack([value.detach(), value.detach().cos()])
    found = torch.autograd.grad(value, leaves, upstream, is_grads_batched=True)
    for i in range(2):
        for one, every in zip(torch.autograd.grad(function(*leaves), leaves, upstream[i]), found, strict=True):
            torch.testing.assert_close(every[i], one, rtol=1e-5, atol=1e-6)
