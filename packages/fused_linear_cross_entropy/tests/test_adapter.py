"""LoRA's share of the logits: values against fp64, memory, what is refused."""

import losses
import pytest
import test_weight_grad as functions
import torch
from npu_fused_linear_cross_entropy import (
    FusedLinearCrossEntropyLoss,
    fused_linear_cross_entropy,
    linear_distillation_loss,
    linear_log_probs,
)
from torch.nn.functional import cross_entropy, linear

RANK, SCALING = 4, 0.5
CASE, CHUNKS = functions.CASE, functions.CHUNKS


def leaves_of(device, dtype=torch.float32):
    """x, lora_a and lora_b, of which all get gradients."""
    generator = torch.Generator().manual_seed(7)
    pair = (torch.randn(*size, generator=generator) for size in ((RANK, functions.WIDTH), (functions.VOCABULARY, RANK)))
    return [losses.leaf(tensor.to(dtype), device) for tensor in (CASE.x, *pair)]


def adapted(x, lora_a, lora_b):
    return SCALING * linear(x, lora_a.to(x.dtype)), lora_b


@pytest.mark.uncollected(
    "the same kernels without it", lambda place, what: place == "emulated" and what not in ("mean", "scores of ids")
)
@pytest.mark.parametrize("what", functions.FUNCTIONS)
def test_values_and_gradients_are_those_of_the_merged_weight(device, what):
    function, definition = functions.FUNCTIONS[what]
    leaves = leaves_of(device.torch)
    found = function(leaves[0], CASE.weight.to(device.torch), adapter=adapted(*leaves), **CHUNKS)
    x, lora_a, lora_b = wide = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    wanted = definition(x, CASE.weight.double() + SCALING * lora_b @ lora_a)
    torch.testing.assert_close(found.detach().cpu().double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    for one, exact in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, wide), strict=True):
        torch.testing.assert_close(one.cpu().double(), exact, rtol=1e-5, atol=2e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_head_and_a_wide_adapter(device, dtype):
    """As peft has them: B's gradient has B's dtype, and is summed over chunks in fp32."""
    x, lora_a, lora_b = leaves_of(device.torch)
    weight, narrow = CASE.weight.to(device.torch, dtype), x.to(dtype)
    loss = fused_linear_cross_entropy(
        narrow, weight, CASE.target.to(device.torch), adapter=(SCALING * linear(narrow.float(), lora_a), lora_b), **CHUNKS
    )
    found = torch.autograd.grad(loss, (x, lora_a, lora_b))
    wide = [tensor.detach().cpu().double().requires_grad_() for tensor in (narrow, lora_a, lora_b)]
    merged = weight.cpu().double() + SCALING * wide[2] @ wide[1]
    exact = torch.autograd.grad(cross_entropy(wide[0] @ merged.t(), CASE.target), wide)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one.cpu().double() - other).norm() <= 2 * torch.finfo(dtype).eps * other.norm()


def test_nothing_as_large_as_the_weight_is_allocated():
    """By the profiler, on a CPU; what concatenates the adapter to the weight allocates that, and its gradient."""
    case = losses.make(64, 256, functions.VOCABULARY, torch.float32)
    lora_a, lora_b = torch.randn(RANK, 256, requires_grad=True), torch.randn(functions.VOCABULARY, RANK, requires_grad=True)
    x = losses.leaf(case.x, "cpu")

    def beside(function):
        return function(x, case.weight, case.target, adapter=adapted(x, lora_a, lora_b), **CHUNKS)

    def concatenated(function):
        u, b = adapted(x, lora_a, lora_b)
        return function(torch.cat((x, u), -1), torch.cat((case.weight, b), 1), case.target, **CHUNKS)

    largest = []
    for head in (beside, concatenated):
        with torch.profiler.profile(profile_memory=True) as profile:
            for function in (fused_linear_cross_entropy, linear_log_probs):
                head(function).sum().backward()
        largest.append(max(event.self_cpu_memory_usage for event in profile.events()))
    assert largest[0] < case.weight.nbytes / 4 < case.weight.nbytes < largest[1]


def test_under_autocast_and_in_a_module():
    x, lora_a, lora_b = leaves_of("cpu")
    weight, target = CASE.weight, CASE.target
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = FusedLinearCrossEntropyLoss()(x, weight, target, adapter=(SCALING * linear(x, lora_a), lora_b))
    (found,) = torch.autograd.grad(loss, lora_b)
    merged = lora_b.double() @ lora_a.double() * SCALING + weight.double()
    (exact,) = torch.autograd.grad(cross_entropy(x.double() @ merged.t(), target), lora_b)
    assert (found - exact).norm() <= 2.0**-5 * exact.norm()


X, W, Y = CASE.x, CASE.weight, CASE.target
U, B = torch.zeros(functions.TOKENS, RANK), torch.zeros(functions.VOCABULARY, RANK)


@pytest.mark.parametrize(
    ("weight", "options", "error", "message"),
    [
        (
            W.clone().requires_grad_(),
            {"adapter": (U, B)},
            ValueError,
            "weight requires a gradient and must not where there is",
        ),
        (W, {"adapter": U}, TypeError, "adapter is a Tensor and must be a tuple"),
        (W, {"adapter": (U[1:], B)}, ValueError, r"adapter\[0\] has shape \(36, 4\) and must have shape \(37, 4\)"),
        (W, {"adapter": (U, B[1:])}, ValueError, r"adapter\[1\] has shape \(1000, 4\) and must have shape \(1001, 4\)"),
        (W, {"adapter": (U, B.half())}, TypeError, r"adapter\[1\] is torch.float16"),
        (W, {"adapter": (U, B), "weight_grad": torch.zeros_like(W)}, ValueError, "weight_grad must be left out where there"),
        (W[:, 1:], {"adapter": (U, B)}, ValueError, r"x has shape \(37, 32\) and must have weight's last dimension, 31"),
        (W.half(), {"adapter": (U, B)}, TypeError, "weight is torch.float16 and must be x's dtype, torch.float32"),
    ],
)
def test_what_is_refused_is_named(weight, options, error, message):
    for function in (fused_linear_cross_entropy, linear_log_probs):
        with pytest.raises(error, match=message):
            function(X, weight, Y, **options)
    if "weight_grad" not in options:
        with pytest.raises(error, match=message):
            linear_distillation_loss(X, weight, teacher=functions.TEACHER, **options)
