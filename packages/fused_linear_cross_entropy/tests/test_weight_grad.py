"""The weight's gradient added to a tensor that the caller gives: its values against fp64, its memory, what is refused."""

import distilled
import log_probs
import losses
import pytest
import torch
from npu_fused_linear_cross_entropy import (
    FusedLinearCrossEntropyLoss,
    causal_lm_loss,
    fused_linear_cross_entropy,
    linear_distillation_loss,
    linear_log_probs,
)
from npu_fused_linear_cross_entropy.call import Options
from torch.nn.functional import cross_entropy

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
OPS = torch.ops.npu_fused_linear_cross_entropy
TOKENS, WIDTH, VOCABULARY = 37, 32, 1001
CASE = losses.make(TOKENS, WIDTH, VOCABULARY, FP32, ignored=0.2)
OTHER = log_probs.make((TOKENS,), WIDTH, VOCABULARY)
PROBS = torch.softmax(torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(3)), 1)
TEACHER = (losses.make(TOKENS, 24, VOCABULARY, FP32, seed=5).x, losses.make(3, 24, VOCABULARY, FP32, seed=6).weight)
TOP = tuple(reversed(torch.log_softmax(TEACHER[0] @ TEACHER[1].t(), 1).topk(4)))
CHUNKS = {"chunk_tokens": 16}


def on(device, *tensors):
    return tuple(tensor.to(device) for tensor in tensors)


def mean(x, weight, **options):
    return fused_linear_cross_entropy(x, weight, CASE.target.to(x.device), **options)


def capped(x, weight, **options):
    options |= {"softcap": 5.0, "label_smoothing": 0.1, "memory_budget": 2**15}  # chunks of columns
    return fused_linear_cross_entropy(x, weight, CASE.target.to(x.device), **options)


def smoothed(x, weight, **options):
    options |= {"token_weight": PROBS[:, 0].to(x.device), "reduction": "sum"}
    return fused_linear_cross_entropy(x, weight, CASE.target.to(x.device), counted_tokens=TOKENS, **options)


def probabilities(x, weight, **options):
    return fused_linear_cross_entropy(x, weight, PROBS.to(x.device), **options)


def scores(x, weight, **options):
    return linear_log_probs(x, weight, CASE.target.to(x.device), **options).sum()


def scores_of_ids(x, weight, **options):
    options |= {"ids": OTHER["ids"].to(x.device), "temperature": 0.7}
    return linear_log_probs(x, weight, **options).ids_log_probs.sum()


def student(x, weight, **options):
    return linear_distillation_loss(x, weight, teacher=on(x.device, *TEACHER), divergence="reverse_kl", **options)


def student_of_top(x, weight, **options):
    return linear_distillation_loss(x, weight, teacher_top_k=on(x.device, *TOP), **options)


def labels(x, weight, **options):
    return causal_lm_loss(x, weight, CASE.target.to(x.device), 7, shift_labels=False, **options)


def of_logits(function):
    return lambda x, weight: function(x @ weight.t())


def capped_exactly(z):
    return cross_entropy(5.0 * torch.tanh(z / 5.0), CASE.target, label_smoothing=0.1)


def weighted_exactly(z):
    return (cross_entropy(z, CASE.target, reduction="none") * PROBS[:, 0]).sum()


def scored_exactly(z):
    return -cross_entropy(z, CASE.target, reduction="sum")


def ids_exactly(z):
    log_p = torch.log_softmax(z / 0.7, 1).gather(1, OTHER["ids"].clamp_min(0))
    return torch.where(OTHER["ids"] == -100, 0.0, log_p).sum()


def top_exactly(z):
    log_p = torch.log_softmax(z, 1).gather(1, TOP[0])
    return (TOP[1].exp() * (TOP[1] - log_p)).sum() / TOKENS


FUNCTIONS = {  # a function of ours, and its definition
    "mean": (mean, of_logits(lambda z: cross_entropy(z, CASE.target))),
    "columns": (capped, of_logits(capped_exactly)),
    "counted and weighted": (smoothed, of_logits(weighted_exactly)),
    "labels": (labels, of_logits(lambda z: cross_entropy(z, CASE.target, reduction="sum") / 7)),
    "probabilities": (probabilities, of_logits(lambda z: cross_entropy(z, PROBS.double()))),
    "scores": (scores, of_logits(scored_exactly)),
    "scores of ids": (scores_of_ids, of_logits(ids_exactly)),
    "distillation": (
        student,
        lambda x, w: distilled.exact(x, w, None, None, TEACHER, divergence="reverse_kl")[0],
    ),
    "distillation of the largest": (student_of_top, of_logits(top_exactly)),
}


@pytest.mark.uncollected(
    "the same kernels without it", lambda place, what: place == "emulated" and what not in ("mean", "scores of ids")
)
@pytest.mark.parametrize("what", FUNCTIONS)
def test_gradients_of_two_calls_are_added(device, what):
    """Both forwards come before the backwards, whose upstream gradients differ; what was there stays."""
    function, definition = FUNCTIONS[what]
    before = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(4))
    x, weight = losses.leaf(CASE.x, device.torch), losses.leaf(CASE.weight, device.torch)
    wide = [leaf.detach().cpu().double().requires_grad_() for leaf in (x, weight)]
    given = before.clone().to(device.torch)
    found = [function(x * scale, weight, weight_grad=given, **CHUNKS) for scale in (1.0, 2.0)]
    assert torch.equal(given.cpu(), before)  # no forward adds
    wanted = [definition(wide[0] * scale, wide[1]) for scale in (1.0, 2.0)]
    for one, exact, factor in zip(found, wanted, (3.0, 0.5), strict=True):
        torch.testing.assert_close(one.detach().cpu().double(), exact.detach(), rtol=1e-5, atol=1e-6)
        (one * factor).backward()
        (exact * factor).backward()
    assert weight.grad is None
    wanted = before.double() + wide[1].grad
    for one, exact in ((given, wanted), (x.grad, wide[0].grad)):
        torch.testing.assert_close(one.cpu().double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("what", FUNCTIONS)
def test_a_backward_that_does_not_ask_for_the_weight_adds_nothing(what, is_leaf):
    """As autograd leaves `weight.grad` alone; one that asks adds once."""
    x, leaf, given = losses.leaf(CASE.x, "cpu"), losses.leaf(CASE.weight, "cpu"), torch.zeros_like(CASE.weight)
    weight = leaf if is_leaf else leaf * 1.0
    loss = FUNCTIONS[what][0](x, weight, weight_grad=given, **CHUNKS)
    (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(inputs=[x], retain_graph=True)
    assert torch.equal(x.grad, dx) and not given.any()
    torch.autograd.grad(loss, weight, retain_graph=True, allow_unused=True)
    once = given.clone()
    loss.backward(inputs=[leaf], retain_graph=True)
    loss.backward()
    assert torch.equal(x.grad, 2 * dx) and leaf.grad is None
    torch.testing.assert_close(given, 3 * once)
    (wanted,) = torch.autograd.grad(FUNCTIONS[what][0](x, leaf, **CHUNKS), leaf)
    torch.testing.assert_close(once, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_narrow_weight_has_its_gradient_summed_in_fp32(device, dtype):
    """Eight chunks: the sum of their products is rounded nowhere."""
    case = losses.make(128, WIDTH, VOCABULARY, dtype)
    x, weight = losses.leaf(case.x, device.torch), losses.leaf(case.weight, device.torch)
    given = torch.zeros(VOCABULARY, WIDTH, device=device.torch)
    scale = 2.0**12  # what a gradient scaler multiplies the loss by
    loss = fused_linear_cross_entropy(x, weight, case.target.to(device.torch), weight_grad=given, **CHUNKS) * scale
    loss.backward()
    wide = [leaf.double().requires_grad_() for leaf in (case.x, case.weight)]
    (exact,) = torch.autograd.grad(cross_entropy(wide[0] @ wide[1].t(), case.target), wide[1])
    error = (given.cpu().double() / scale - exact).norm() / exact.norm()
    assert error <= torch.finfo(dtype).eps / 2


def test_nothing_as_large_as_the_weight_is_allocated():
    """Of either function and its backward, on a CPU, by the profiler: chunks of 16 tokens are smaller."""
    case = losses.make(64, 128, VOCABULARY, FP32)
    x, weight = losses.leaf(case.x, "cpu"), losses.leaf(case.weight, "cpu")
    largest = {}
    for name, given in (("given", torch.zeros_like(case.weight)), ("none", None)):
        for function in (fused_linear_cross_entropy, linear_log_probs):
            with torch.profiler.profile(profile_memory=True) as profile:
                function(x, weight, case.target, weight_grad=given, **CHUNKS).sum().backward()
            largest[name] = max([event.self_cpu_memory_usage for event in profile.events()] + [largest.get(name, 0)])
    assert largest["given"] < weight.nbytes <= largest["none"]


def test_compiles_to_one_graph(device):
    def step(x, weight, given):
        return mean(torch.sin(x), weight, weight_grad=given, **CHUNKS) * 2

    found = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        x, weight = losses.leaf(CASE.x, device.torch), losses.leaf(CASE.weight, device.torch)
        given = torch.ones(VOCABULARY, WIDTH, device=device.torch)
        for _ in range(2):
            loss = function(x, weight, given)
            loss.backward()
        assert weight.grad is None
        found.append((loss.detach(), x.grad, given))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_the_operator_is_registered_properly(device, npu_opcheck):
    x, weight, target = on(device.torch, CASE.x, CASE.weight, CASE.target)
    given, options = torch.zeros_like(weight), Options(vocab_size=VOCABULARY, accum_dtype=FP32)
    inputs = (x, weight, target, None, None, None, None, given, *options)
    npu_opcheck(OPS.forward.default, (x.clone().requires_grad_(), *inputs[1:], False, False, False, False))
    statistics = OPS.forward(*inputs, True, False, False, False)[6]
    npu_opcheck(
        OPS.backward_added.default, (torch.rand((), device=device.torch), None, statistics, *inputs, True, True, False)
    )


def test_only_a_weight_that_needs_a_gradient_adds_one():
    x, given = losses.leaf(CASE.x, "cpu"), torch.zeros_like(CASE.weight)
    FusedLinearCrossEntropyLoss()(x, CASE.weight, CASE.target, weight_grad=given).backward()
    assert not given.any()


def test_under_autocast_a_wide_weight_adds_wide_gradients():
    given, weight = torch.zeros_like(CASE.weight), losses.leaf(CASE.weight, "cpu")
    with torch.autocast("cpu", dtype=BF16):
        mean(CASE.x, weight, weight_grad=given).backward()
    wide = CASE.weight.double().requires_grad_()
    (exact,) = torch.autograd.grad(cross_entropy(CASE.x.double() @ wide.t(), CASE.target), wide)
    assert (given.double() - exact).norm() <= 2.0**-6 * exact.norm()


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (torch.zeros(3, WIDTH), {}, ValueError, r"weight_grad has shape \(3, 32\) and must have shape \(1001, 32\)"),
        (torch.zeros(VOCABULARY, WIDTH, dtype=BF16), {}, TypeError, "weight_grad is torch.bfloat16"),
        (torch.zeros(VOCABULARY, WIDTH, requires_grad=True), {}, ValueError, "weight_grad requires a gradient"),
        (torch.zeros(VOCABULARY, WIDTH), {"accum_dtype": FP64}, TypeError, "accum_dtype is torch.float64 and must be"),
        ("a buffer", {}, TypeError, "weight_grad is a str"),
    ],
)
def test_what_is_refused_is_named(given, options, error, message):
    for function in (fused_linear_cross_entropy, linear_log_probs):
        with pytest.raises(error, match=message):
            function(CASE.x, CASE.weight, CASE.target, weight_grad=given, **options)


@pytest.mark.parametrize("what", ["mean", "scores of ids", "probabilities", "distillation"])
def test_several_upstream_gradients_at_once_are_refused(what):
    x, weight = losses.leaf(CASE.x, "cpu"), losses.leaf(CASE.weight, "cpu")
    loss = FUNCTIONS[what][0](x, weight, weight_grad=torch.zeros_like(CASE.weight))
    with pytest.raises(NotImplementedError, match="weight_grad must be left out where there are several upstream gradients"):
        torch.autograd.grad(loss, (x, weight), torch.ones(2), is_grads_batched=True, allow_unused=True)


def test_transforms_are_refused():
    with pytest.raises(NotImplementedError, match="weight_grad must be left out under torch.func"):
        torch.func.grad(lambda weight: mean(CASE.x, weight, weight_grad=torch.zeros_like(CASE.weight)))(CASE.weight)
