"""Probabilities as targets, against torch.nn.functional.cross_entropy in fp64."""

import losses
import pytest
import torch
from npu_fused_linear_cross_entropy import FusedLinearCrossEntropyLoss, fused_linear_cross_entropy

from testing.pairs import all_pairs

pytestmark = pytest.mark.usefixtures("npu_poisoned")

TOKENS = (3, 13)
UNITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}
CASES = {
    "plain": {},
    "smoothing, class weights": {"label_smoothing": 0.1, "class_weight": True},
    "softcap, scale, bias": {"softcap": 3.0, "logit_scale": 0.7, "bias": torch.float32},
    "columns": {"vocabulary": 3000, "memory_budget": 2**15, "class_weight": True},
    "chunks": {"chunk_tokens": 8, "vocabulary": 1000},
}


def probabilities(vocabulary):
    """Of sums other than 1 too, with zeros."""
    drawn = torch.rand(*TOKENS, vocabulary, generator=torch.Generator().manual_seed(3)).pow(8)
    return torch.where(drawn < 0.1, 0.0, drawn) / drawn.sum(-1, keepdim=True)


@pytest.mark.uncollected("fp64 is for CPUs", lambda place, dtype: place != "cpu" and dtype == torch.float64)
@pytest.mark.parametrize(*all_pairs(dtype=UNITS, reduction=["mean", "none"], what=CASES))
def test_losses_and_gradients_are_torchs(device, what, reduction, dtype):
    making = {"width": 32, "vocabulary": 123, **CASES[what]}
    if dtype == torch.float64 and "bias" in making:
        making["bias"] = torch.float64
    case = losses.make(TOKENS, making.pop("width"), making.pop("vocabulary"), dtype, **making)
    q = probabilities(case.weight.shape[0])
    x, weight, bias = (None if t is None else t.double().requires_grad_() for t in (case.x, case.weight, case.bias))
    z = (x @ weight.t() + (0 if bias is None else bias)) * case.options.get("logit_scale", 1.0)
    softcap = case.options.get("softcap")
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    class_weight = None if case.class_weight is None else case.class_weight.double()
    smoothing = case.options.get("label_smoothing", 0.0)
    given = {"weight": class_weight, "label_smoothing": smoothing, "reduction": reduction}
    wanted = torch.nn.functional.cross_entropy(z.flatten(0, -2), q.flatten(0, -2).double(), **given)
    leaves = [losses.leaf(t, device.torch) for t in (case.x, case.weight, case.bias) if t is not None]
    options = {**case.options, "reduction": reduction}
    moved = None if case.class_weight is None else case.class_weight.to(device.torch)
    q = q.to(device.torch)
    found = fused_linear_cross_entropy(
        *leaves[:2], q, leaves[2] if bias is not None else None, class_weight=moved, **options
    )
    unit = UNITS[dtype]
    assert found.shape == (TOKENS if reduction == "none" else ())
    assert (found.detach().cpu().double().flatten() - wanted.flatten()).abs().max() <= unit * (1 + wanted.abs().max())
    ours = torch.autograd.grad(found.square().sum(), leaves)
    theirs = torch.autograd.grad(wanted.square().sum(), [t for t in (x, weight, bias) if t is not None])
    for one, other in zip(ours, theirs, strict=True):
        assert (one.cpu().double() - other).norm() <= 4 * unit * other.norm()


def test_gradients_of_confident_rows_are_rounded_once(device):
    """Where p is nearly q, each rounded by itself would leave little of their difference."""
    generator = torch.Generator().manual_seed(5)
    target, weight = torch.arange(16), torch.randn(50, 64, generator=generator).bfloat16()
    x = (0.12 * weight[target].float() + 0.02 * torch.randn(16, 64, generator=generator)).bfloat16()
    wide = [each.double().requires_grad_() for each in (x, weight)]
    exact = torch.autograd.grad(torch.nn.functional.cross_entropy(wide[0] @ wide[1].t(), target), wide)
    errors = []
    for given in (target, torch.nn.functional.one_hot(target, 50).bfloat16()):
        leaves = [losses.leaf(each, device.torch) for each in (x, weight)]
        found = torch.autograd.grad(fused_linear_cross_entropy(*leaves, given.to(device.torch)), leaves)
        errors.append([(one.cpu().double() - other).norm() for one, other in zip(found, exact, strict=True)])
    for of_indices, of_probabilities in zip(*errors, strict=True):
        assert of_probabilities <= 1.5 * of_indices


def test_one_hot_targets_are_indices(device):
    case = losses.make(TOKENS, 32, 123, torch.float32)
    x, weight, target = (tensor.to(device.torch) for tensor in (case.x, case.weight, case.target))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    token_weight = torch.rand(TOKENS, generator=torch.Generator().manual_seed(4)).to(device.torch)
    one_hot = torch.nn.functional.one_hot(target, 123).float()
    options = {"lse_square_scale": 0.1, "return_z_loss": True, "return_lse": True}
    module = FusedLinearCrossEntropyLoss(**options)
    results = [module(x, weight, given, token_weight=token_weight) for given in (target, one_hot)]
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-4)
    gradients = [torch.autograd.grad(found.loss, (x, weight)) for found in results]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("tokens", [0, 3])
def test_without_weights_the_loss_is_zero(device, tokens):
    x, weight = (torch.randn(count, 4, device=device.torch, requires_grad=True) for count in (tokens, 9))
    q = torch.rand(tokens, 9, device=device.torch)
    loss = fused_linear_cross_entropy(x, weight, q, token_weight=torch.zeros(tokens, device=device.torch))
    assert loss == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, (x, weight)))


def test_class_weights_get_no_gradient(device):
    x, weight, q = (torch.randn(*shape, device=device.torch) for shape in ((3, 4), (9, 4), (3, 9)))
    class_weight = torch.rand(9, device=device.torch, requires_grad=True)
    assert not fused_linear_cross_entropy(x, weight, q.abs(), class_weight=class_weight).requires_grad


def test_what_is_wrong_is_named():
    x, weight, q = torch.randn(3, 4), torch.randn(9, 4), torch.rand(3, 9)
    with pytest.raises(ValueError, match=r"target has shape \(3, 8\) and must have shape \(3, 9\)"):
        fused_linear_cross_entropy(x, weight, q[:, :8])
    with pytest.raises(ValueError, match="target requires a gradient"):
        fused_linear_cross_entropy(x, weight, q.requires_grad_())
    with pytest.raises(ValueError, match="return_entropy is True and must be False"):
        fused_linear_cross_entropy(x, weight, q.detach(), return_entropy=True)
    with pytest.raises(ValueError, match="counted_tokens must be left out"):
        fused_linear_cross_entropy(x, weight, q.detach(), counted_tokens=3)


def test_an_upstream_gradient_without_memory_is_zero():
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    loss = fused_linear_cross_entropy(x, weight, torch.full((4, 5), 0.2))
    assert not torch.autograd.grad(loss, x, torch._efficientzerotensor(()))[0].any()
