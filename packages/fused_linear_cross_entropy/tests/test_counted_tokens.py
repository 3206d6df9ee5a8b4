"""Where the caller says how many tokens count, or which, others take part in no product: the results are the same."""

import functools

import losses
import pytest
import torch
from npu_fused_linear_cross_entropy import (
    FusedLinearCrossEntropyLoss,
    causal_lm_loss,
    fused_linear_cross_entropy,
    linear_log_probs,
)
from torch.utils.flop_counter import FlopCounterMode

EXTRAS = dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_lse"), True)


def counting(case, how):
    """What is passed for counted_tokens."""
    places = (case.target.reshape(-1) != case.options.get("ignore_index", -100)).nonzero().squeeze(1)
    return {"count": len(places), "more": len(places) + 5, "places": places, "places, reversed": places.flip(0)}[how]


@pytest.mark.parametrize("how", ["count", "more", "places", "places, reversed"])
@pytest.mark.parametrize("ignored", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("options", [{}, {"reduction": "none", **EXTRAS}, {"class_weight": True, **EXTRAS}])
def test_results_are_those_of_all_tokens(device, how, ignored, options):
    if device.name == "emulated" and how != "count":
        pytest.skip("the same kernels")
    case = losses.make((3, 13), 32, 1000, ignored=ignored, **options)
    counted = counting(case, how)
    counted = counted.to(device.torch) if isinstance(counted, torch.Tensor) else counted
    found = losses.run(case, device.torch, functools.partial(fused_linear_cross_entropy, counted_tokens=counted))
    losses.check(case, found)
    assert not found.gradients["x"][case.target == -100].any()


@pytest.mark.parametrize("ignored", [0.3, 1.0])
def test_log_probabilities_and_entropies(device, ignored):
    case = losses.make(29, 32, 1000, ignored=ignored)
    count = int((case.target != -100).sum())
    for some in (None, count):
        x, weight = losses.leaf(case.x, device.torch), losses.leaf(case.weight, device.torch)
        given = {"return_entropy": True, "counted_tokens": some}
        found = linear_log_probs(x, weight, case.target.to(device.torch), **given)
        sum(output.sum() for output in found).backward()
        results = [*found, x.grad, weight.grad]
        if some is None:
            wanted = results
    for one, other in zip(results, wanted, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=2**-6, atol=1e-3)


def test_only_tokens_that_count_are_multiplied(device):
    if device.name != "cpu":
        pytest.skip("what is multiplied is the same on a CPU, where all of it is counted")
    case = losses.make(100, 32, 1000, ignored=0.7)
    count, flops = counting(case, "count"), []
    for some in (None, count):
        with FlopCounterMode(display=False) as counter:
            losses.run(case, device.torch, functools.partial(fused_linear_cross_entropy, counted_tokens=some))
        flops.append(counter.get_total_flops())
    assert flops[1] * 100 == flops[0] * count


def test_fewer_than_count_are_an_error(device):
    case = losses.make(19, 32, 123)
    arguments = [tensor.to(device.torch) for tensor in (case.x, case.weight, case.target)]
    if device.name == "cpu":
        with pytest.raises(ValueError, match="counted_tokens is 18 and must be at least 19"):
            fused_linear_cross_entropy(*arguments, counted_tokens=18)
    else:
        assert torch.isnan(fused_linear_cross_entropy(*arguments, counted_tokens=18))


def test_every_way_to_call_takes_it(device):
    case = losses.make((2, 9), 32, 123, ignored=0.5)
    x, weight, target = (tensor.to(device.torch) for tensor in (case.x, case.weight, case.target))
    count = counting(case, "count")
    wanted = fused_linear_cross_entropy(x, weight, target)
    module = FusedLinearCrossEntropyLoss()(x, weight, target, counted_tokens=count)
    causal = causal_lm_loss(x, weight, target, shift_labels=False, counted_tokens=count)
    assert torch.allclose(module, wanted, rtol=1e-6)
    assert torch.allclose(causal, wanted, rtol=1e-6)


@pytest.mark.parametrize("bad", [-1, 1.5, True, "all", torch.zeros(2), torch.zeros(1, 2, dtype=torch.int64)])
def test_what_is_no_count_and_no_place_is_refused(bad):
    case = losses.make(19, 32, 123)
    with pytest.raises((TypeError, ValueError), match="counted_tokens"):
        fused_linear_cross_entropy(case.x, case.weight, case.target, counted_tokens=bad)


def test_nothing_waits_for_the_device(device):
    if device.name != "cuda":
        pytest.skip("a device that says when something waits for it")
    case = losses.make(64, 64, 1000, ignored=0.5)
    x, weight, target = (tensor.to(device.torch) for tensor in (case.x, case.weight, case.target))
    x.requires_grad_()
    count = counting(case, "count")
    fused_linear_cross_entropy(x, weight, target, counted_tokens=count).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_linear_cross_entropy(x, weight, target, counted_tokens=count).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
