"""The loss as PyTorch sees it: the questions of testing/operators, and what is this package's alone."""

import copy
from functools import partial

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
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from testing import forks
from testing.operators import *  # noqa: F403
from testing.operators import Case, Input, integers, only_at

OPS = torch.ops.npu_fused_linear_cross_entropy
SHARDED_AT = ("cpu", "cuda")  # sharding_worker.py
OTHERS = {"scale_"}  # the backward runs it below autograd and the dispatcher
MODULE = FusedLinearCrossEntropyLoss(reduction="sum", softcap=5.0)
IGNORED = {"ignore_index": 0}
LOSS = partial(fused_linear_cross_entropy, **IGNORED)
COUNTED = partial(linear_log_probs, logit_scale=0.7, return_entropy=True, **IGNORED)
EVERYTHING = {"label_smoothing": 0.1, "lse_square_scale": 0.01, "softcap": 5.0, "logit_scale": 0.7, "reduction": "none"}
RETURNED = {f"return_{name}": True for name in ("z_loss", "token_accuracy", "predicted_tokens", "lse", "entropy")}


def tokens(n):
    return (n, 8), (5, 8), integers(5, n)


def softmax(numbers):
    return numbers.softmax(-1)


def probabilities(n):
    return (n, 8), (5, 8), Input((n, 5), of=softmax)


def everything(x, weight, target, bias, class_weight):
    return LOSS(x, weight, target, bias, class_weight=class_weight, **EVERYTHING, **RETURNED)


def of_everything(n):
    return *tokens(n), (5,), Input((5,), dtype=torch.float32, of=torch.exp)


def cross_entropy(x, weight, target, **options):
    return functional.cross_entropy(x @ weight.t(), target, **options)


def everything_formula(x, weight, target, bias, class_weight):
    z = 5.0 * torch.tanh(0.7 * (x @ weight.t() + bias) / 5.0)
    counted, lse = target != 0, z.logsumexp(-1)
    options = {"weight": class_weight, "label_smoothing": 0.1, "reduction": "none"}
    row, z_loss = functional.cross_entropy(z, target, **options) * counted, 0.01 * lse.square() * counted
    accuracy = ((z.argmax(-1) == target) & counted).sum() / counted.sum().double()
    predicted = torch.where(counted, z.argmax(-1), -1)
    return row + z_loss, z_loss.detach(), accuracy, predicted, (lse * counted).detach(), entropy_of(z) * counted


def entropy_of(z):
    return torch.special.entr(z.softmax(-1)).sum(-1)


def of_target(x, weight, target):
    return torch.log_softmax(x @ weight.t(), -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def of_counted(x, weight, target):
    z, counted = 0.7 * x @ weight.t(), target != 0
    log_probs = torch.log_softmax(z, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return torch.where(counted, log_probs, 0.0), torch.where(counted, entropy_of(z), 0.0)


def with_entropy(x, weight, target):
    return of_target(x, weight, target), entropy_of(x @ weight.t())


def of_ids(x, weight, target, ids, temperature):
    options = {"return_square_sum": True, "return_mean_logit": True}
    return linear_log_probs(x, weight, target, ids=ids, temperature=temperature, **options)


def largest(x, weight):
    found = linear_log_probs(x, weight, top_k=2, return_entropy=True)
    return found.top_log_probs, found.entropy


def largest_formula(x, weight):
    z = x @ weight.t()
    return torch.log_softmax(z, -1).topk(2).values, entropy_of(z)


def distilled(x, weight, target, teacher_x, teacher_weight, **options):
    return linear_distillation_loss(x, weight, target, teacher=(teacher_x, teacher_weight), **IGNORED, **options)


def of_teacher(n):
    return *tokens(n), Input((n, 6)), Input((5, 6))


def distilled_formula(x, weight, target, teacher_x, teacher_weight):
    s, t = torch.log_softmax(x @ weight.t(), -1), torch.log_softmax(teacher_x @ teacher_weight.t(), -1)
    rows = (t.exp() * (t - s)).sum(-1) * (target != 0)
    return rows.sum() / (target != 0).sum()


def distilled_by_ids(x, weight, ids, log_probs):
    return linear_distillation_loss(x, weight, teacher_top_k=(ids, log_probs))


def causal(x, weight, labels, items):
    return causal_lm_loss(x, weight, labels, items, **IGNORED)


def causal_formula(x, weight, labels, items):
    """Hugging Face's ForCausalLMLoss."""
    rows = cross_entropy(x[:, :-1].flatten(0, 1), weight, labels[:, 1:].flatten(), reduction="none", **IGNORED)
    return rows.sum() / ((labels[:, 1:] != 0).sum() if items is None else items)


def of_labels(n):
    return (2, n, 8), (5, 8), integers(5, 2, n)


def adapted(x, weight, target, u, b):
    return LOSS(x, weight, target, adapter=(u, b))


def adapted_formula(x, weight, target, u, b):
    return functional.cross_entropy(x @ weight.t() + u @ b.t(), target, **IGNORED)


def adding(function, **options):
    """With memory that the weight's gradient is added to."""
    return lambda x, weight, *given: function(x, weight, *given, weight_grad=torch.zeros_like(weight), **options)


def of_adapter(n):
    return (n, 8), Input((5, 8)), integers(5, n), (n, 2), (5, 2)


def of_ids_and_temperature(n):
    return *tokens(n), integers(5, n, 1), Input((n,), dtype=torch.float32, of=torch.exp)


def of_top_k(n):
    return (n, 8), (5, 8), integers(5, n, 1), Input((n, 1), of=functional.logsigmoid)


linear = partial(Case, tangents=False, cast=(0, 1))
of_four = partial(Case, tangents=False, cast=(0, 1, 3, 4))
option = partial(linear, option=True)
added = partial(Case, option=True, cast=(0, 1))
CASES = (
    linear("mean", partial(LOSS, chunk_tokens=2), tokens, partial(cross_entropy, **IGNORED)),
    linear("none", partial(LOSS, reduction="none"), tokens, partial(cross_entropy, reduction="none", **IGNORED)),
    Case("everything", everything, of_everything, everything_formula, tangents=False, cast=(0, 1, 3)),
    option("module", MODULE, tokens),
    linear("probabilities", fused_linear_cross_entropy, probabilities, cross_entropy),
    linear("causal_lm_loss", partial(causal, items=7), of_labels, partial(causal_formula, items=7)),
    option("causal, mean", partial(causal, items=None), of_labels, partial(causal_formula, items=None)),
    option("causal, a tensor", partial(causal, items=torch.tensor(7)), of_labels, partial(causal_formula, items=7)),
    of_four("an adapter", adapted, of_adapter, adapted_formula),
    linear("log_probs", linear_log_probs, tokens, of_target),
    option("entropy", partial(linear_log_probs, return_entropy=True), tokens, with_entropy),
    *(option(f"counted, {each}", partial(COUNTED, memory_budget=each), tokens, of_counted) for each in (None, 1)),
    linear("ids", of_ids, of_ids_and_temperature),
    option("batch invariant", partial(linear_log_probs, batch_invariant=True, return_entropy=True), tokens, with_entropy),
    option("one token", linear_log_probs, lambda n: ((8,), (5, 8), integers(5)), of_target),
    option("largest", largest, lambda n: ((n, 8), (5, 8)), largest_formula),
    of_four("distillation", distilled, of_teacher, distilled_formula),
    of_four("distillation, none", partial(distilled, reduction="none", hard_weight=0.5, return_parts=True), of_teacher),
    option("distillation by ids", distilled_by_ids, of_top_k),
    added("adding", adding(LOSS), tokens),
    added("adding, probabilities", adding(fused_linear_cross_entropy), probabilities),
    added("adding, ids", adding(linear_log_probs, top_k=2), lambda n: ((n, 8), (5, 8))),
    added("adding, distillation", adding(distilled, reduction="none"), of_teacher),
)


def _batches():
    problems = (
        ("bf16", torch.bfloat16, 64, 1000, {"chunk_tokens": 32}),
        ("fp16, entropy", torch.float16, 40, 517, {"chunk_tokens": 32, "return_entropy": True}),
        ("fp32", torch.float32, 64, 1000, {"chunk_tokens": 32, "softcap": 5.0}),
        ("columns", torch.bfloat16, 64, 3000, {"chunk_tokens": 32, "memory_budget": 2**17, "return_entropy": True}),
        ("chunks of the default length", torch.bfloat16, 64, 1000, {"return_entropy": True}),
    )
    for name, dtype, width, vocabulary, options in problems:
        head = Input((vocabulary, width), of=lambda weight: weight * 2 * weight.shape[1] ** -0.5)
        inputs = lambda n, h=head: (Input((n, h.shape[1])), h, integers(h.shape[0], n))  # noqa: E731
        function = partial(linear_log_probs, batch_invariant=True, ignore_index=7, **options)
        yield Case(name, function, inputs, dtype=dtype, tokens=75)


BATCHES = tuple(_batches())


def tensors(device, tokens=5, vocabulary=123, dtype=torch.float32, **changes):
    case = losses.make(tokens, 32, vocabulary, dtype, ignored=0.2, **changes)
    return case.x.to(device.torch), case.weight.to(device.torch), case.target.to(device.torch)


def test_autocast_leaves_fp64_and_what_comes_with_it():
    case = losses.make(3, 4, 9, torch.float32, bias=torch.float32)
    given = case.x.double(), case.weight, case.target, case.bias
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fused_linear_cross_entropy(*given)
    assert torch.equal(loss, fused_linear_cross_entropy(*given))


def test_a_loss_may_be_divided_in_place():
    case = losses.make(8, 9, 23, torch.float32)
    x = losses.leaf(case.x, "cpu")
    (expected,) = torch.autograd.grad(fused_linear_cross_entropy(x, case.weight, case.target), x)
    loss = fused_linear_cross_entropy(x, case.weight, case.target)
    loss /= 2
    loss.backward()
    assert torch.equal(x.grad, expected / 2)


def test_module_keeps_options_and_class_weights(device):
    x, weight, target = tensors(device)
    class_weight = torch.rand(123, device=device.torch)
    module = FusedLinearCrossEntropyLoss(class_weight, label_smoothing=0.1, reduction="sum")
    assert list(module.state_dict()) == ["class_weight"]
    expected = fused_linear_cross_entropy(x, weight, target, class_weight=class_weight, label_smoothing=0.1, reduction="sum")
    assert torch.equal(copy.deepcopy(module)(x, weight, target), expected)
    theirs = torch.nn.CrossEntropyLoss(class_weight, label_smoothing=0.1, reduction="sum")(x @ weight.t(), target)
    assert torch.allclose(expected, theirs, rtol=1e-5)
    assert "label_smoothing=0.1" in repr(module)
    with pytest.raises(TypeError, match="smoothing is no option"):
        FusedLinearCrossEntropyLoss(smoothing=0.1)


class TestCausalLM:
    @pytest.mark.few(2)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("options", [{}, {"lse_square_scale": 0.1, "label_smoothing": 0.1}, {"return_entropy": True}])
    def test_nothing_counts_of_a_step_without_labels(self, device, dtype, options):
        """transformers' loss is NaN, and its gradients are 0; where other batches of the step have labels, both are 0."""
        hidden, weight, labels = tensors(device, tokens=(2, 9))
        leaves = [losses.leaf(each.to(dtype), device.torch) for each in (hidden, weight)]
        for number in (0, torch.tensor(0), 7):
            class_weight = torch.rand(weight.shape[0], device=device.torch) if number == 7 else None
            loss = causal_lm_loss(*leaves, torch.full_like(labels, -100), number, class_weight=class_weight, **options)
            loss = getattr(loss, "loss", loss)
            assert loss.isnan() if number != 7 else loss == 0.0
            assert all(not gradient.any() for gradient in torch.autograd.grad(loss, leaves))

    def test_labels_may_be_shifted_already(self, device):
        hidden, weight, labels = tensors(device, tokens=(2, 9))
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        expected = causal_lm_loss(hidden, weight, labels)
        assert torch.equal(causal_lm_loss(hidden, weight, shifted, shift_labels=False), expected)
        assert torch.equal(causal_lm_loss(hidden, weight, labels, shift_labels=shifted), expected)

    def test_takes_the_options_of_the_loss(self, device):
        hidden, weight, labels = tensors(device, tokens=(2, 9))
        out = causal_lm_loss(hidden, weight, labels, 10, softcap=5.0, return_token_accuracy=True, chunk_tokens=4)
        target = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        total = fused_linear_cross_entropy(hidden, weight, target, softcap=5.0, reduction="sum")
        assert torch.allclose(out.loss, total / 10, rtol=1e-6)
        assert out.token_accuracy is not None
        with pytest.raises(TypeError, match="reduction is no option here"):
            causal_lm_loss(hidden, weight, labels, reduction="sum")


@only_at("cuda", "npu")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("vocabulary", [123, 20000])
def test_graph_capture_of_chunks(device, vocabulary, reduction, npu_capture):
    x, weight, target = tensors(device, 64, vocabulary, torch.bfloat16)
    leaves = [x.requires_grad_(), weight.requires_grad_()]

    def step():
        loss = fused_linear_cross_entropy(*leaves, target, reduction=reduction, chunk_tokens=16)
        return loss, *torch.autograd.grad(loss.sum() * 3, leaves)

    captured, replay = npu_capture(step)
    with torch.no_grad():
        x.normal_()
    replay()
    for replayed, eager in zip(captured, step(), strict=True):
        assert torch.equal(replayed, eager)


def uniform(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


# In products of x [5, 32] and the weight [123, 32]; an adapter's have rank 8, and a teacher's width is 16.
PRODUCTS = {
    "mean": (3, lambda x, w, t: fused_linear_cross_entropy(x, w, t)),
    "none": (3, lambda x, w, t: fused_linear_cross_entropy(x, w, t, reduction="none").sum()),
    "a frozen weight": (2, lambda x, w, t: fused_linear_cross_entropy(x, w.detach(), t)),
    "a frozen x": (2, lambda x, w, t: fused_linear_cross_entropy(x.detach(), w, t)),
    "weight_grad": (3, lambda x, w, t: fused_linear_cross_entropy(x, w, t, weight_grad=torch.zeros(123, 32))),
    "an adapter": (
        2.75,
        lambda x, w, t: fused_linear_cross_entropy(
            x, w.detach(), t, adapter=(uniform(5, 8).requires_grad_(), uniform(123, 8).requires_grad_())
        ),
    ),
    "causal": (3, lambda x, w, t: causal_lm_loss(x[None], w, t[None])),
    "probabilities": (3, lambda x, w, t: fused_linear_cross_entropy(x, w, uniform(5, 123).softmax(-1))),
    "log-probabilities": (3, lambda x, w, t: linear_log_probs(x, w, t).sum()),
    "entropies": (3, lambda x, w, t: linear_log_probs(x, w, return_entropy=True).entropy.sum()),
    "a teacher": (3.5, lambda x, w, t: linear_distillation_loss(x, w, t, teacher=(uniform(5, 16), uniform(123, 16)))),
    "a teacher's probabilities": (
        3,
        lambda x, w, t: linear_distillation_loss(x, w, teacher_probs=uniform(5, 123).softmax(-1)),
    ),
    "a teacher's largest": (
        3,
        lambda x, w, t: linear_distillation_loss(x, w, teacher_top_k=(torch.tensor([[1, 2]] * 5), -uniform(5, 2))),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_are_those_of_the_layer_and_its_gradients(name):
    case = losses.make(5, 32, 123, torch.float32, ignored=0.2)
    products, function = PRODUCTS[name]
    with FlopCounterMode(display=False) as counter:
        function(case.x.requires_grad_(), case.weight.requires_grad_(), case.target).backward()
    assert counter.get_total_flops() == products * 2 * 5 * 32 * 123


def test_the_counter_is_not_imported_with_the_package():
    """It imports Triton."""
    found = "'triton' in sys.modules, 'torch.utils.flop_counter' in sys.modules"
    counted = "from torch.utils.flop_counter import FlopCounterMode, flop_registry; import torch"
    known = "torch.ops.npu_fused_linear_cross_entropy.forward in flop_registry"
    code = f"import sys, npu_fused_linear_cross_entropy; assert not any(({found})); {counted}; assert {known}"
    assert forks.run("-c", code).returncode == 0


@pytest.mark.parametrize("factor", [1.0, -1.5])
def test_gradients_are_scaled_in_place(npu_place, factor):
    values = torch.randn(5, 300, device=npu_place.torch)
    expected = values * factor
    OPS.scale_(values, torch.tensor(factor, device=npu_place.torch))
    assert torch.equal(values, expected)
