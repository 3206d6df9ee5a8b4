"""Options, alone and together, wherever the loss runs, against fp64."""

import itertools
import random

import losses
import pytest
import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy

pytestmark = pytest.mark.usefixtures("npu_poisoned")

ALONE = {
    "nothing": {},
    "bias": {"bias": torch.bfloat16},
    "fp32 bias": {"bias": torch.float32},
    "class weights": {"class_weight": True},
    "label smoothing": {"label_smoothing": 0.1},
    "both": {"class_weight": True, "label_smoothing": 0.1},
    "z-loss": {"lse_square_scale": 1e-2, "return_z_loss": True},
    "softcap": {"softcap": 2.0},
    "logit scale": {"logit_scale": 0.5},
    "token scaling": {"token_scaling": True},
    "accuracy": {"return_token_accuracy": True, "return_predicted_tokens": True},
    "lse": {"return_lse": True},
    "entropy": {"return_entropy": True},
    "fp32 sums": {"accum_dtype": torch.float32, "chunk_tokens": 10},
    "another ignore_index": {"ignore_index": 5},
}


@pytest.mark.parametrize("what", ALONE)
def test_each_option_alone(device, what):
    for reduction in ("mean",) if device.name == "emulated" else ("mean", "none"):  # each is kernels to compile
        case = losses.make(37, 32, 123, ignored=0.3, reduction=reduction, **ALONE[what])
        losses.check(case, losses.run(case, device.torch), roundings=4 if "chunk_tokens" in case.options else 1)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_token_scaling_of_ignored_tokens_with_low_logits(device, reduction):
    """exp(0 - L) overflows where L, here -150, is below -88. Ignored tokens have no target's logit: it counts as 0."""
    case = losses.make(37, 32, 123, ignored=0.3, reduction=reduction, bias=torch.float32, token_scaling=True)
    case.bias.sub_(150.0)
    losses.check(case, losses.run(case, device.torch), roundings=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("token_weight", [None, torch.ones(3)])
def test_a_smoothed_loss_whose_class_weights_add_up_to_0_is_pytorchs_nan(device, dtype, token_weight):
    case = losses.make(3, 32, 123, dtype, class_weight=True)
    case.class_weight[case.target] = 0.0
    of_options = {"class_weight": case.class_weight.to(device.torch), "label_smoothing": 0.1}
    of_options["token_weight"] = None if token_weight is None else token_weight.to(device.torch)
    x, weight = (losses.leaf(tensor, device.torch) for tensor in (case.x, case.weight))
    loss = fused_linear_cross_entropy(x, weight, case.target.to(device.torch), **of_options)
    logits, options = (case.x @ case.weight.t()).float(), {"weight": case.class_weight, "label_smoothing": 0.1}
    torch.testing.assert_close(
        loss.detach().cpu(), torch.nn.functional.cross_entropy(logits, case.target, **options), equal_nan=True
    )
    assert all(gradient.isnan().all() for gradient in torch.autograd.grad(loss, (x, weight)))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("frozen", [True, False])
def test_class_weights_get_no_gradient(frozen, reduction):
    x, weight = torch.randn(5, 8).requires_grad_(not frozen), torch.randn(11, 8)
    class_weight, target = torch.rand(11, requires_grad=True), torch.arange(5)
    loss = fused_linear_cross_entropy(x, weight, target, class_weight=class_weight, reduction=reduction)
    assert loss.requires_grad == (not frozen)
    if not frozen:
        loss.sum().backward()
        assert x.grad is not None and class_weight.grad is None


def random_options(seed):
    """Inputs and options drawn from everything there is."""
    draw = random.Random(f"options {seed}")
    inputs = {
        "bias": draw.choice([None, torch.float32]),
        "class_weight": draw.random() < 0.4,
        "ignored": draw.choice([0.0, 0.3]),
        "scale": draw.choice([0.5, 3.0]),
    }
    options = {
        "reduction": draw.choice(["mean", "sum", "none"]),
        "label_smoothing": draw.choice([0.0, 0.2, 1.0]),
        "lse_square_scale": draw.choice([0.0, 1e-3]),
        "softcap": draw.choice([None, 5.0, 30.0]),
        "logit_scale": draw.choice([1.0, 0.7]),
        "token_scaling": draw.random() < 0.3,
        "chunk_tokens": draw.choice([None, 16]),
        "memory_budget": draw.choice([None, None, 2000]),
    }
    flags = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_lse", "return_entropy")
    options |= {flag: draw.random() < 0.4 for flag in flags}
    options |= {"accum_dtype": draw.choice([None, torch.float32])}
    shape = draw.choice([(37, 32, 129), (5, 16, 1000), (19, 24, 2500), (2, 8, 2)])
    return shape, inputs, options


@pytest.mark.uncollected("each seed compiles kernels of its own", lambda place, seed: place == "emulated" and seed >= 3)
@pytest.mark.parametrize("seed", range(24))
def test_options_together(device, seed):
    shape, inputs, options = random_options(seed)
    case = losses.make(*shape, dtype=[torch.float32, torch.bfloat16][seed % 2], seed=seed, **inputs, **options)
    losses.check(case, losses.run(case, device.torch), roundings=4)


def test_random_options_are_all_drawn():
    """Every pair of yes and no of two options is among the seeds."""
    drawn = [random_options(seed)[2] for seed in range(24)]
    on = [{name: bool(value) for name, value in options.items()} for options in drawn]
    for first, second in itertools.combinations(("label_smoothing", "softcap", "return_entropy", "memory_budget"), 2):
        assert len({(options[first], options[second]) for options in on}) == 4
