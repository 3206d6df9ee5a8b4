"""The loss and its gradients, wherever they run, against fp64."""

import losses
import npu_fused_linear_cross_entropy as package
import pytest
import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_distillation_loss

pytestmark = pytest.mark.usefixtures("npu_poisoned")

ALL = dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_lse"), True)


@pytest.mark.parametrize("vocabulary", [1, 2, 123, 1000, 32000])
def test_every_vocabulary(device, vocabulary):
    case = losses.make(19, 64, vocabulary)
    losses.check(case, losses.run(case, device.torch))


@pytest.mark.few(2)
@pytest.mark.uncollected("the definition has no tiles", lambda place, vocabulary: place == "cpu" and vocabulary != 50257)
@pytest.mark.parametrize("vocabulary", [50257, 128256, 151936, 256000])
def test_large_vocabularies(device, vocabulary):
    case = losses.make(3, 16, vocabulary)
    losses.check(case, losses.run(case, device.torch))


@pytest.mark.parametrize("tokens", [0, 1, 3])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_few_tokens(device, tokens, reduction):
    case = losses.make(tokens, 32, 123, reduction=reduction)
    losses.check(case, losses.run(case, device.torch))


@pytest.mark.uncollected("fp64 is for a CPU", lambda place, dtype: dtype == torch.float64 and place != "cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_every_dtype(device, dtype):
    case = losses.make((3, 7), 32, 1000, dtype)
    results = losses.run(case, device.torch)
    losses.check(case, results)
    assert results.outputs["loss"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert results.gradients["x"].dtype == dtype


def test_fp32_weight_with_bf16_input(device):
    case = losses.make(37, 32, 123, weight_dtype=torch.float32, chunk_tokens=16)
    results = losses.run(case, device.torch)
    losses.check(case, results)
    assert results.gradients["weight"].dtype == torch.float32


@pytest.mark.parametrize("vocabulary", [123, 9000])
def test_logits_up_to_ten_thousand(device, vocabulary):
    case = losses.make(19, 32, vocabulary, scale=3000.0, return_entropy=True, **ALL)
    assert losses.exact(case).largest > 1e4
    losses.check(case, losses.run(case, device.torch))


@pytest.mark.uncollected("the same kernels", lambda place, chunk_tokens: place == "emulated" and chunk_tokens != 10)
@pytest.mark.parametrize("chunk_tokens", [1, 10, 37, 64])
def test_ragged_chunks_give_the_loss_of_one(device, chunk_tokens):
    case = losses.make(37, 32, 1000, **ALL)
    whole, parts = losses.run(case, device.torch), losses.run(case.with_options(chunk_tokens=chunk_tokens), device.torch)
    losses.check(case, parts, roundings=-(-37 // chunk_tokens))
    assert torch.allclose(parts.outputs["loss"], whole.outputs["loss"], rtol=1e-6)
    assert torch.equal(parts.outputs["predicted_tokens"], whole.outputs["predicted_tokens"])


@pytest.mark.few(2)
@pytest.mark.uncollected(
    "the same kernels as with a larger budget, to compile once more",
    lambda place, budget: place == "emulated" and budget == 200_000,
)
@pytest.mark.parametrize(("tokens", "vocabulary", "budget"), [(150, 3000, 200_000), (150, 2560, 400_000), (37, 123, 1)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks_of_columns(device, tokens, vocabulary, budget, reduction):
    """Too little memory for a sensible chunk of tokens: columns come in chunks too."""
    case = losses.make(tokens, 64, vocabulary, ignored=0.1, memory_budget=budget, reduction=reduction, **ALL)
    losses.check(case, losses.run(case, device.torch), roundings=4)


@pytest.mark.uncollected("sums are PyTorch's products", lambda place: place == "emulated")
def test_fp32_sums_of_the_weights_gradient(device):
    """bf16 sums over many chunks lose what fp32 sums keep, which are the default where the budget has room for them."""
    case = losses.make(128, 16, 123, chunk_tokens=2)
    exact = losses.exact(case).gradients["weight"]
    error = {}
    for what, options in {
        "default": {},
        "asked for": {"accum_dtype": torch.float32},
        "no room": {"memory_budget": 123 * 16 * 4},
    }.items():
        gradient = losses.run(case.with_options(**options), device.torch).gradients["weight"]
        error[what] = (gradient.double() - exact).norm() / exact.norm()
    assert error["default"] == error["asked for"] < 0.5 * error["no room"]


def test_sums_of_fp64_are_fp64():
    case = losses.make(13, 16, 123, torch.float64, chunk_tokens=2)
    usual, asked = (
        losses.run(case.with_options(**o), "cpu").gradients["weight"] for o in ({}, {"accum_dtype": torch.float32})
    )
    assert torch.equal(asked, usual)


@pytest.mark.few(3)
@pytest.mark.parametrize("trained", ["x", "weight", "bias"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_one_input_is_trained(device, trained, reduction):
    case = losses.make(19, 32, 123, bias=torch.float32, reduction=reduction)
    expected = losses.run(case, device.torch)
    leaves = {name: getattr(case, name).to(device.torch) for name in ("x", "weight", "bias")}
    leaves[trained] = losses.leaf(leaves[trained], device.torch)
    loss = fused_linear_cross_entropy(
        leaves["x"], leaves["weight"], case.target.to(device.torch), leaves["bias"], reduction=reduction
    )
    seed = losses.upstream(case, {"loss": loss, "entropy": None})["loss"].to(loss)
    (gradient,) = torch.autograd.grad(loss, leaves[trained], seed)
    assert torch.equal(gradient.cpu(), expected.gradients[trained])


def test_nothing_to_train_gives_the_same_loss(device):
    case = losses.make(19, 32, 123, ignored=0.2)
    expected = losses.run(case, device.torch).outputs["loss"]
    arguments = [tensor.to(device.torch) for tensor in (case.x, case.weight, case.target)]
    assert torch.allclose(fused_linear_cross_entropy(*arguments).cpu(), expected, rtol=1e-6)
    with torch.no_grad():
        arguments[1].requires_grad_()
        assert not fused_linear_cross_entropy(*arguments).requires_grad


def test_strided_inputs(device):
    case = losses.make((4, 6), 32, 123)
    expected = losses.run(case, device.torch)
    x = case.x.to(device.torch).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    weight = case.weight.to(device.torch).t().contiguous().t().requires_grad_()
    loss = fused_linear_cross_entropy(x, weight, case.target.to(device.torch).t().contiguous().t())
    assert torch.equal(loss.cpu(), expected.outputs["loss"])
    loss.backward(losses.upstream(case, expected.outputs)["loss"].to(loss))
    assert torch.allclose(x.grad.cpu(), expected.gradients["x"], rtol=2**-7, atol=1e-6)
    assert torch.allclose(weight.grad.cpu(), expected.gradients["weight"], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("way", ["whole rows", "exponentials", "kept exponentials"])
def test_columns_of_x_and_weight_may_lie_apart(device, way):
    """As those of a transposed activation, and of a transposed weight."""
    width, vocabulary, budget = {
        "whole rows": (16, 1000, None),
        "exponentials": (16, 9001, None),
        "kept exponentials": (64, 20001, 19 * 4 * 9000),
    }[way]
    case = losses.make(19, width, vocabulary, memory_budget=budget)
    apart = losses.dataclasses.replace(case, x=case.x.t().contiguous().t(), weight=case.weight.t().contiguous().t())
    assert apart.x.stride(1) != 1
    kept = torch.bfloat16 if way == "kept exponentials" else None
    losses.check(apart, losses.run(apart, device.torch), roundings=2, kept=kept)


def test_the_default_dtype_is_not_that_of_the_loss(device):
    x, weight = torch.randn(5, 8, device=device.torch), torch.randn(40, 8, device=device.torch)
    target = torch.tensor([1, 2, -100, 3, 40 if device.name != "cpu" else 4], device=device.torch)
    torch.set_default_dtype(torch.float64)
    try:
        loss = fused_linear_cross_entropy(x, weight, target, reduction="none")
        distilled = linear_distillation_loss(x, weight, target, teacher=(x, weight), hard_weight=0.5, reduction="none")
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss.dtype == distilled.dtype == torch.float32


@pytest.mark.parametrize("entropy", [False, True])
def test_columns_that_are_ruled_out(device, entropy):
    """A bias of minus infinity, as masked vocabularies have it."""
    options = {"reduction": "none", "return_lse": True, "return_entropy": entropy}
    case = losses.make(7, 32, 300, bias=torch.float32, **options)
    case.bias[10:290] = -torch.inf
    case.target.fill_(3)
    narrow = losses.make(7, 32, 300, bias=torch.float32, **options)
    keep = torch.cat([torch.arange(10), torch.arange(290, 300)])
    narrow.weight, narrow.bias, narrow.target = narrow.weight[keep], narrow.bias[keep], case.target
    ruled_out, without = losses.run(case, device.torch), losses.run(narrow, device.torch)
    losses.check(narrow, without)
    assert torch.allclose(ruled_out.outputs["lse"], without.outputs["lse"], rtol=1e-6)
    assert torch.allclose(ruled_out.gradients["weight"][keep].float(), without.gradients["weight"].float(), rtol=2**-6)
    assert not ruled_out.gradients["weight"][10:290].any()
    dx = without.gradients["x"].float()
    assert torch.allclose(ruled_out.gradients["x"].float(), dx, rtol=2**-6, atol=2**-8 * float(dx.abs().max()))


def test_a_retained_graph_gives_the_same_gradients_again(device):
    """Gradients that were computed ahead are scaled in place only where nobody can ask for them again."""
    case = losses.make(19, 32, 123)
    x, weight = losses.leaf(case.x, device.torch), losses.leaf(case.weight, device.torch)
    loss = fused_linear_cross_entropy(x, weight, case.target.to(device.torch))
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    tripled = torch.autograd.grad(loss * 3, (x, weight), retain_graph=True)
    last = torch.autograd.grad(loss * 0.5, (x, weight))
    for one, copy, three, half in zip(first, kept, tripled, last, strict=True):
        assert torch.equal(one, copy)
        assert torch.allclose(three.float(), 3 * copy.float(), rtol=2**-7)
        assert torch.allclose(half.float(), 0.5 * copy.float(), rtol=2**-7)


def test_gradients_become_the_leaves_own(device):
    """No copy of the weight's gradient is made on its way into `.grad`."""
    case = losses.make(19, 32, 123)
    x, weight = losses.leaf(case.x, device.torch), losses.leaf(case.weight, device.torch)
    loss = fused_linear_cross_entropy(x, weight, case.target.to(device.torch))
    saved = [tensor for tensor in loss.grad_fn.saved_tensors if tensor is not None and tensor.shape == weight.shape]
    (address,) = {tensor.data_ptr() for tensor in saved} - {weight.data_ptr()}  # the weight's gradient
    del saved
    loss.backward()
    assert weight.grad.data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_class_weights_of_another_dtype_and_stride(device, dtype, reduction):
    case = losses.make(19, 32, 123, class_weight=True, label_smoothing=0.1, reduction=reduction)
    wide = case.class_weight.to(dtype).repeat_interleave(2)[::2]
    case = losses.dataclasses.replace(case, class_weight=wide)
    losses.check(case, losses.run(case, device.torch))


@pytest.mark.uncollected("kernels to compile", lambda place, budget: place == "emulated" and budget)
@pytest.mark.parametrize("budget", [None, 30_000])
def test_equal_inputs_give_equal_bits(device, budget):
    case = losses.make(40, 64, 1000, class_weight=True, label_smoothing=0.1, memory_budget=budget, chunk_tokens=16)
    first = losses.run(case, device.torch)
    for _ in range(2):
        again = losses.run(case, device.torch)
        assert torch.equal(again.outputs["loss"], first.outputs["loss"])
        assert all(torch.equal(again.gradients[name], first.gradients[name]) for name in first.gradients)


def test_logits_in_the_dtype_of_x_where_the_product_cannot_be_wider(device, monkeypatch):
    """An NPU whose matrix product has no fp32 result for bf16 operands, as with torch_npu 2.9."""
    monkeypatch.setattr(package.matmul, "_native", lambda operator, device: False)
    monkeypatch.setattr(package.matmul, "writes_fp32", lambda device, dtype: False)
    for vocabulary in (123, 9000):
        case = losses.make(19, 64, vocabulary, chunk_tokens=8)
        losses.check(case, losses.run(case, device.torch), roundings=3, logits=torch.bfloat16)


SHARED = {
    "mean": {},
    "none": {"reduction": "none"},
    "entropy": {"reduction": "none", "return_entropy": True, "token_scaling": True},
    "smoothing": {"label_smoothing": 0.3, "token_scaling": True},
    "class weights": {"label_smoothing": 0.3, "class_weight": True, "reduction": "none"},
    "columns": {"memory_budget": 2**14, "label_smoothing": 0.3, "return_entropy": True},
    "weighted columns": {"memory_budget": 2**14, "label_smoothing": 0.3, "class_weight": True},
}


@pytest.mark.few(4)
@pytest.mark.uncollected("the same kernels", lambda place, what: place == "emulated" and what in ("none", "smoothing"))
@pytest.mark.parametrize("what", SHARED)
def test_an_offset_that_logits_share_changes_nothing(device, what):
    """2^20, with logits that are multiples of 1/4: all are fp32 numbers, their log sum exp is not, nor is their sum."""
    case, found = losses.make(9, 8, 517, torch.float32, bias=torch.float32, **SHARED[what]), []
    case = losses.dataclasses.replace(case, x=case.x.round(), weight=(2 * case.weight).round() / 4)
    for offset in (0.0, 2.0**20):
        case.bias.fill_(offset)
        found.append(losses.run(case, device.torch))
    alone, together = found
    for name in ("loss", "entropy"):
        if alone.outputs[name] is not None:
            torch.testing.assert_close(together.outputs[name], alone.outputs[name], rtol=2e-6, atol=1e-6)
    for name, gradient in alone.gradients.items():
        torch.testing.assert_close(together.gradients[name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()))
