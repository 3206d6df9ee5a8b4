"""fp16, whose smallest number is 6e-8: gradients under a gradient scaler are as exact as PyTorch's own of fp16 logits."""

import distilled
import losses
import pytest
import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_distillation_loss

SCALE = 32.0  # times the tokens: 65536 for 2048


def relative_errors(case, gradients, rows):
    """Of the gradients of x and of those `rows` of the weight, in norm, against fp64."""
    expected = exact(case)
    errors = {}
    for name, chosen in (("x", slice(None)), ("weight", rows), ("bias", rows)):
        if name in gradients:
            own, wanted = gradients[name][chosen].double().cpu(), expected[name][chosen]
            errors[name] = float((own / (SCALE * len(case.x)) - wanted).norm() / wanted.norm())
    return errors


def exact(case):
    """Gradients of the plain mean, a piece of the tokens at a time."""
    weight = case.weight.double()
    bias = torch.zeros(len(weight)).double() if case.bias is None else case.bias.double()
    found = {"x": [], "weight": torch.zeros_like(weight), "bias": torch.zeros_like(bias)}
    for x, target in zip(case.x.double().split(256), case.target.split(256), strict=True):
        g = torch.softmax(x @ weight.t() + bias, 1)
        g[torch.arange(len(x)), target] -= 1.0
        g /= len(case.x)
        found["x"].append(g @ weight)
        found["weight"] += g.t() @ x
        found["bias"] += g.sum(0)
    return {**found, "x": torch.cat(found["x"])}


def gradients(case, device, function):
    leaves = {"x": losses.leaf(case.x, device), "weight": losses.leaf(case.weight, device)}
    if case.bias is not None:
        leaves["bias"] = losses.leaf(case.bias, device)
    loss = function(leaves["x"], leaves["weight"], case.target.to(device), leaves.get("bias"), **case.options)
    return dict(zip(leaves, torch.autograd.grad(loss * (SCALE * len(case.x)), list(leaves.values())), strict=True))


def unfused(x, weight, target, bias=None, **_):
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight, bias), target)


def case_of(tokens, vocabulary, **options):
    """Every target in the first rows of the weight: the others get small gradients alone."""
    case = losses.make(tokens, 16, vocabulary, torch.float16, scale=0.2, **options)
    return losses.dataclasses.replace(case, target=case.target % (vocabulary // 8)), slice(vocabulary // 8, None)


@pytest.mark.uncollected("33 million logits", lambda place: place == "emulated")
def test_small_gradients_of_a_large_problem_survive(device):
    case, rows = case_of(1024, 32000)
    ours = relative_errors(case, gradients(case, device.torch, fused_linear_cross_entropy), rows)
    assert ours["weight"] < 5e-4
    assert ours["x"] < 5e-4


WAYS = {
    "one chunk": {},
    "chunks of tokens": {"chunk_tokens": 100},
    "chunks of columns": {"chunk_tokens": 256, "memory_budget": 400_000},
    "a bias": {"bias": torch.float16},
}


@pytest.mark.uncollected(
    "differs in the products of matrices alone",
    lambda place, what: place == "emulated" and what not in ("one chunk", "chunks of columns"),
)
@pytest.mark.parametrize("what", WAYS)
def test_no_less_exact_than_logits_in_fp16(device, what):
    """Of fp16 logits, PyTorch multiplies the gradient by the scale before it rounds it."""
    case, rows = case_of(256, 4000, **WAYS[what])
    ours = relative_errors(case, gradients(case, device.torch, fused_linear_cross_entropy), rows)
    theirs = relative_errors(case, gradients(case, device.torch, unfused), rows)
    for name, error in ours.items():
        assert error <= 1.5 * theirs[name] + 2.0**-11, name


def test_sums_of_many_tokens_do_not_overflow():
    """Every token has one target and large elements, which add up to a mean within fp16's range, and no sum is."""
    tokens = 4096
    x = torch.full((tokens, 8), 200.0, dtype=torch.float16)
    weight = torch.zeros(16, 8, dtype=torch.float16, requires_grad=True)
    target = torch.zeros(tokens, dtype=torch.int64)
    (dweight,) = torch.autograd.grad(fused_linear_cross_entropy(x, weight, target), weight)
    assert torch.allclose(dweight[0].float(), torch.full((8,), -200.0 * 15 / 16), rtol=2e-3)


OPTIONS = {
    "smoothing": {"label_smoothing": 0.1},
    "class weights": {"class_weight": True},
    "z-loss": {"lse_square_scale": 0.1},
    "class weights and z-loss": {"class_weight": True, "lse_square_scale": 0.1, "label_smoothing": 0.1},
    "token scaling": {"token_scaling": True},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "some ignored": {"ignored": 0.5},
    "all ignored": {"ignored": 1.0},
    "fp32 weight": {"weight_dtype": torch.float32, "chunk_tokens": 16},
}


@pytest.mark.uncollected(
    "the two that between them have every factor",
    lambda place, what: place == "emulated" and what not in ("class weights and z-loss", "none"),
)
@pytest.mark.parametrize("what", OPTIONS)
def test_options(device, what):
    case = losses.make(37, 32, 1000, torch.float16, **OPTIONS[what])
    losses.check(case, losses.run(case, device.torch), roundings=3 if what == "fp32 weight" else 2)


def test_what_is_left_to_multiply_by_is_multiplied_twice_through_one_graph(device):
    case, _ = case_of(37, 1000)
    x, weight = losses.leaf(case.x, device.torch), losses.leaf(case.weight, device.torch)
    loss = fused_linear_cross_entropy(x, weight, case.target.to(device.torch))
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (x, weight))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


WEIGHTS = {"large": 1e5, "small": 1e-6}


@pytest.mark.uncollected(
    "the other reductions and scales take the same kernels",
    lambda place, what, reduction: place == "emulated" and (what, reduction) not in (("large", "mean"), ("small", "sum")),
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("what", WEIGHTS)
def test_the_scale_of_class_weights_costs_nothing(device, what, reduction):
    """Of a sum that is divided by the weights afterwards, and of losses that are, too."""
    case = losses.make(37, 32, 1000, torch.float16, class_weight=True, ignored=0.2, reduction=reduction)
    weights = (0.5 + case.class_weight) * WEIGHTS[what]
    weights[weights.argmax()] *= 1000  # of a class that no token has
    case.target[case.target == weights.argmax()] = 0
    divisor = 1.0 if reduction == "mean" else float(weights[case.target.clamp_min(0)][case.target >= 0].sum())
    leaves = {name: losses.leaf(getattr(case, name), device.torch) for name in ("x", "weight")}
    loss = fused_linear_cross_entropy(
        *leaves.values(), case.target.to(device.torch), class_weight=weights.to(device.torch), reduction=reduction
    )
    ours = torch.autograd.grad(loss.sum() / divisor * SCALE * 37, list(leaves.values()))
    x, weight = (getattr(case, name).double().requires_grad_() for name in ("x", "weight"))
    wanted = torch.nn.functional.cross_entropy(x @ weight.t(), case.target, weights.double())
    for own, exact in zip(ours, torch.autograd.grad(wanted * SCALE * 37, (x, weight)), strict=True):
        assert (own.double().cpu() - exact).norm() <= 1e-3 * exact.norm()


def test_class_weights_whose_sum_is_negative_leave_the_z_loss_its_gradient(device):
    case = losses.make(37, 32, 1000, torch.float16, class_weight=True, ignored=0.2, lse_square_scale=0.1)
    case = losses.dataclasses.replace(case, class_weight=case.class_weight - 1.5)
    chosen = case.class_weight[case.target.clamp_min(0)]
    assert chosen[case.target >= 0].sum() < 0
    losses.check(case, losses.run(case, device.torch))


@pytest.mark.uncollected(
    "factors of rows are PyTorch's",
    lambda place, what, class_weight: place == "emulated" and (what, class_weight) != ("large", True),
)
@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("what", [*WEIGHTS, "of few"])
def test_the_scale_of_token_weights_costs_nothing(device, what, class_weight):
    tokens, scale = (65536, 1.0) if what == "of few" else (37, WEIGHTS[what])
    case = losses.make(tokens, 8, 40, torch.float16, class_weight=class_weight, ignored=0.2, scale=4.0)
    weights = scale * torch.rand(tokens, generator=torch.Generator().manual_seed(0))
    if what == "of few":
        weights[3:] = 0
    exact = [getattr(case, name).double().requires_grad_() for name in ("x", "weight")]
    of_classes = None if case.class_weight is None else case.class_weight.double()
    rows = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), case.target, of_classes, reduction="none")
    wanted = torch.autograd.grad((rows * weights.double()).sum() / weights.sum().double() * SCALE, exact)
    for reduction in ("mean", "sum"):
        leaves = [losses.leaf(getattr(case, name), device.torch) for name in ("x", "weight")]
        given = None if of_classes is None else case.class_weight.to(device.torch)
        options = {"token_weight": weights.to(device.torch), "class_weight": given, "reduction": reduction}
        loss = fused_linear_cross_entropy(*leaves, case.target.to(device.torch), **options)
        sizes = weights if of_classes is None else weights * case.class_weight[case.target.clamp_min(0)]
        factor = ((sizes * (case.target != -100)).sum() if reduction == "mean" else 1.0) / weights.sum()
        ours = torch.autograd.grad(loss * (SCALE * factor), leaves)
        for own, other in zip(ours, wanted, strict=True):
            assert (own.double().cpu() - other).norm() <= 1e-3 * other.norm()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("scale", WEIGHTS.values())
def test_the_scale_of_a_distillations_token_weights_costs_nothing(device, scale, reduction):
    x, weight, target, _, teacher, _ = distilled.make((7,), dtype=torch.float16)
    weights, pair = torch.rand(7, generator=torch.Generator().manual_seed(0)), [t.to(device.torch) for t in teacher[:2]]
    found = []
    for factor in (1.0, scale):
        leaves = [losses.leaf(each, device.torch) for each in (x, weight)]
        each = (factor * weights).to(device.torch)
        options = {"teacher": tuple(pair), "token_weight": each, "reduction": reduction}
        loss = linear_distillation_loss(*leaves, target.to(device.torch), **options)
        found.append(torch.autograd.grad(loss * (SCALE / factor if reduction == "sum" else SCALE), leaves))
    for one, other in zip(*found, strict=True):
        assert (one.double() - other.double()).norm() <= 1e-3 * one.double().norm()


@pytest.mark.uncollected("a hundred thousand tokens", lambda place: place == "emulated")
@pytest.mark.parametrize("weighted", [False, True])
def test_one_token_has_nearly_all_the_weight(device, weighted):
    """Its gradient of the logits is the number of tokens times as large as the mean's."""
    tokens = 100_000
    x, weight = torch.randn(tokens, 8).half(), torch.randn(4, 8).half()
    target = torch.zeros(tokens, dtype=torch.int64)
    target[5] = 3
    class_weight = torch.tensor([1e-9, 1.0, 1.0, 1.0]) if weighted else None
    leaves = [losses.leaf(tensor, device.torch) for tensor in (x, weight)]
    given = None if class_weight is None else class_weight.to(device.torch)
    loss = fused_linear_cross_entropy(*leaves, target.to(device.torch), class_weight=given)
    ours = torch.autograd.grad(loss, leaves)
    exact = [tensor.double().requires_grad_() for tensor in (x, weight)]
    wide = None if class_weight is None else class_weight.double()
    wanted = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), target, wide)
    for own, other in zip(ours[1:], torch.autograd.grad(wanted, exact)[1:], strict=True):
        assert (own.double().cpu() - other).norm() <= 2e-3 * other.norm()


@pytest.mark.uncollected("a million logits", lambda place: place == "emulated")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jensen_shannon"])
def test_a_student_that_is_close_to_its_teacher_has_gradients(device, divergence, reduction):
    """Their elements are below what fp16 holds."""
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape, scale: torch.randn(shape, generator=generator) * scale  # noqa: E731
    x, head = make(32, 64, scale=1.0).half(), make(32000, 64, scale=0.1).half()
    other = (head.float() + make(32000, 64, scale=0.005)).half()
    options = {"temperature": 4.0, "divergence": divergence, "reduction": reduction}
    gradients = []
    for dtype, place in ((torch.float64, "cpu"), (torch.float16, device.torch)):
        leaves = [each.to(place, dtype).requires_grad_() for each in (x, head)]
        loss = linear_distillation_loss(*leaves, teacher=(x.to(place, dtype), other.to(place, dtype)), **options)
        gradients.append([each.double().cpu() for each in torch.autograd.grad(loss * 2.0**13, leaves)])
    for exact, ours in zip(*gradients, strict=True):
        assert (ours - exact).norm() < 0.01 * exact.norm()
