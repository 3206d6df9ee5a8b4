"""The operators as PyTorch sees them: registration, compilation, transforms, modules."""

import contextlib
import copy
import io

import losses
import pytest
import torch
import torch._dynamo.testing
from npu_fused_linear_cross_entropy import (
    FusedLinearCrossEntropyLoss,
    causal_lm_loss,
    fused_linear_cross_entropy,
    linear_log_probs,
)
from npu_fused_linear_cross_entropy.calls import LossInputs
from npu_fused_linear_cross_entropy.options import Options

OPS = torch.ops.npu_fused_linear_cross_entropy


def tensors(device, tokens=5, vocabulary=123, dtype=torch.float32, **changes):
    case = losses.make(tokens, 32, vocabulary, dtype, ignored=0.2, **changes)
    return case.x.to(device.torch), case.weight.to(device.torch), case.target.to(device.torch)


@pytest.mark.uncollected("schemas and shapes are a CPU's", lambda place, changes: changes and place == "emulated")
@pytest.mark.parametrize("changes", [{}, {"reduction": "none", "return_entropy": True}, {"return_token_accuracy": True}])
def test_operators_are_registered_properly(device, changes, npu_opcheck):
    x, weight, target = tensors(device)
    options = Options(**changes, vocab_size=123)
    none = LossInputs(x, weight, target)[3:]
    leaves = (x.clone().requires_grad_(), weight.clone().requires_grad_())
    npu_opcheck(OPS.forward.default, (*leaves, target, *none, *options, False, False, False, False))
    if changes.get("return_entropy"):
        npu_opcheck(OPS.forward.default, (x, weight, target, *none, *options, True, False, False, False))
    else:
        npu_opcheck(OPS.forward.default, (x, weight, target, *none, *options, False, True, True, False))
    statistics = OPS.forward(x, weight, target, *none, *options, True, False, False, False)[6]
    dloss = torch.rand(5 if changes.get("reduction") == "none" else (), device=device.torch)
    arguments = (dloss, None, statistics, x, weight, target, *none, *options, True, True, False)
    npu_opcheck(OPS.backward.default, arguments)
    if not changes:
        npu_opcheck(OPS.scale.default, ([x, weight], list(torch.rand(2, device=device.torch))))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_to_one_graph(device, reduction):
    backend = "inductor" if device.name == "cuda" else "aot_eager"

    def head(x, weight, target):
        out = fused_linear_cross_entropy(torch.sin(x), weight, target, reduction=reduction, return_lse=True)
        return out.loss.sum() * 2, out.lse

    compiled = torch.compile(head, backend=backend, fullgraph=True)
    results = []
    for function in (head, compiled):
        x, weight, target = tensors(device)
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        loss, lse = function(*leaves, target)
        results.append((loss, lse, *torch.autograd.grad(loss, leaves)))
    for eager, traced in zip(*results, strict=True):
        assert torch.allclose(eager, traced, rtol=1e-5, atol=1e-6)


def test_tokens_may_be_dynamic_under_compile(device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fused_linear_cross_entropy, backend=counter, fullgraph=True)
    for tokens in (3, 17, 64):
        x, weight, target = tensors(device, tokens)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(target, 0)
        assert torch.equal(compiled(x, weight, target), fused_linear_cross_entropy(x, weight, target))
    assert counter.frame_count == 1


def test_export(device):
    x, weight, target = tensors(device)
    module = FusedLinearCrossEntropyLoss(softcap=5.0, return_lse=True)
    tokens = torch.export.Dim("tokens")
    program = torch.export.export(module, (x, weight, target), dynamic_shapes=({0: tokens}, None, {0: tokens}))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    saved = torch.export.load(file)
    for n in (5, 9):
        x, weight, target = tensors(device, n)
        expected = module(x, weight, target)
        for made in (program, saved):
            exported = made.module()(x, weight, target)
            assert torch.equal(exported.loss, expected.loss)
            assert torch.equal(exported.lse, expected.lse)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_functional_gradient(device, reduction):
    x, weight, target = tensors(device)
    loss = lambda x, w: fused_linear_cross_entropy(x, w, target, reduction=reduction).square().sum()  # noqa: E731
    gradients = torch.func.grad(loss, argnums=(0, 1))(x, weight)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    for functional, expected in zip(gradients, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert torch.allclose(functional, expected, rtol=1e-5, atol=1e-6)


SECOND = {  # ways to ask for a second derivative of a function of one tensor
    "grad of grad": lambda f, x: torch.func.grad(lambda x: torch.func.grad(f)(x).square().sum())(x),
    "jacrev of grad": lambda f, x: torch.func.jacrev(torch.func.grad(f))(x),
    "the value that comes with a gradient": lambda f, x: torch.func.grad(lambda x: torch.func.grad_and_value(f)(x)[1])(x),
    "hvp": lambda f, x: torch.autograd.functional.hvp(f, x, torch.ones_like(x)),
}


@pytest.mark.parametrize("way", SECOND)
@pytest.mark.parametrize("of", ["x", "weight"])
def test_no_way_to_a_second_derivative_gives_zeros(way, of):
    x, weight, target = torch.randn(8, 9), torch.randn(23, 9), torch.arange(8)
    losses = {
        "x": (lambda x: fused_linear_cross_entropy(x, weight, target), x),
        "weight": (lambda weight: fused_linear_cross_entropy(x, weight, target, reduction="sum"), weight),
    }
    with pytest.raises(NotImplementedError, match="no second derivative"):
        SECOND[way](*losses[of])


def test_a_loss_may_be_divided_in_place():
    x, weight = torch.randn(8, 9, requires_grad=True), torch.randn(23, 9)
    (expected,) = torch.autograd.grad(fused_linear_cross_entropy(x, weight, torch.arange(8)), x)
    loss = fused_linear_cross_entropy(x, weight, torch.arange(8))
    loss /= 2
    loss.backward()
    assert torch.equal(x.grad, expected / 2)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivative_is_refused(device, reduction):
    x, weight, target = tensors(device)
    loss = fused_linear_cross_entropy(x.requires_grad_(), weight, target, reduction=reduction)
    (gradient,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_activation_checkpointing(device, reentrant, reduction):
    case = losses.make(7, 32, 123, torch.float32, reduction=reduction)

    def checkpointed(x, weight, target, bias, class_weight, **options):
        function = lambda x, w: fused_linear_cross_entropy(x, w, target, **options)  # noqa: E731
        return torch.utils.checkpoint.checkpoint(function, x, weight, use_reentrant=reentrant)

    expected, actual = losses.run(case, device.torch), None
    x, weight = losses.leaf(case.x, device.torch), losses.leaf(case.weight, device.torch)
    loss = checkpointed(x, weight, case.target.to(device.torch), None, None, **case.options)
    loss.backward(losses.upstream(case, expected.outputs)["loss"].to(loss))
    for actual, wanted in ((x.grad, expected.gradients["x"]), (weight.grad, expected.gradients["weight"])):
        assert torch.equal(actual.cpu(), wanted)


def test_inference_mode(device):
    x, weight, target = tensors(device)
    with torch.inference_mode():
        loss = fused_linear_cross_entropy(x, weight, target)
    assert torch.equal(loss, fused_linear_cross_entropy(x, weight, target))


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
    def logits_loss(self, hidden, weight, labels, num_items=None):
        """Hugging Face's ForCausalLMLoss."""
        labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        logits = (hidden @ weight.t()).reshape(-1, weight.shape[0])
        reduction = "mean" if num_items is None else "sum"
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction=reduction)
        return loss if num_items is None else loss / num_items

    @pytest.mark.parametrize("num_items", [None, 7, torch.tensor(7)])
    def test_is_the_loss_of_shifted_labels(self, device, num_items):
        case = losses.make((2, 9), 32, 123, torch.float32, ignored=0.2)
        hidden, weight = losses.leaf(case.x, device.torch), losses.leaf(case.weight, device.torch)
        labels = case.target.to(device.torch)
        results = []
        for function in (causal_lm_loss, self.logits_loss):
            loss = function(hidden, weight, labels, num_items)
            results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
        for ours, theirs in zip(*results, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)

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


@pytest.mark.parametrize("budget", [None, 1])
def test_log_probs_and_entropy_are_differentiable(device, budget):
    case = losses.make((3, 5), 32, 123, torch.float32, ignored=0.2)
    x, weight = losses.leaf(case.x, device.torch), losses.leaf(case.weight, device.torch)
    target = case.target.to(device.torch)
    out = linear_log_probs(x, weight, target, logit_scale=0.7, return_entropy=True, memory_budget=budget)
    log_p = torch.log_softmax(0.7 * x @ weight.t(), -1)
    counted = target != -100
    log_probs = torch.where(counted, log_p.gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1), 0.0)
    entropy = torch.where(counted, -(log_p.exp() * log_p).sum(-1), 0.0)
    assert torch.allclose(out.log_probs, log_probs, rtol=1e-5, atol=1e-5)
    assert torch.allclose(out.entropy, entropy, rtol=1e-5, atol=1e-5)
    advantage = torch.randn(3, 5, device=device.torch)
    ours = torch.autograd.grad((out.log_probs.exp() * advantage + 0.1 * out.entropy).sum(), (x, weight))
    theirs = torch.autograd.grad((log_probs.exp() * advantage + 0.1 * entropy).sum(), (x, weight))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("vocabulary", [123, 20000])
def test_graph_capture(device, vocabulary, reduction, npu_capture):
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


def test_nothing_waits_for_the_device(device, npu_no_waits):
    x, weight, target = tensors(device, 64, 1000, torch.bfloat16)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    class_weight = torch.rand(1000, device=device.torch)
    options = {"chunk_tokens": 16, "return_token_accuracy": True, "label_smoothing": 0.1, "class_weight": class_weight}
    for context in (contextlib.nullcontext, npu_no_waits):  # the first round compiles
        with context():
            for reduction in ("mean", "none"):
                loss = fused_linear_cross_entropy(*leaves, target, reduction=reduction, **options).loss
                torch.autograd.grad(loss.sum() * 3, leaves)
