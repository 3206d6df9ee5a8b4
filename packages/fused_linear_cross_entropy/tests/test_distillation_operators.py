"""The operators of `linear_distillation_loss` as PyTorch sees them, and what is explained of its calls."""

import losses
import pytest
import torch
from distilled import make
from npu_fused_linear_cross_entropy import explain, linear_distillation_loss
from npu_fused_linear_cross_entropy.options import DistillationOptions

OPS = torch.ops.npu_fused_linear_cross_entropy


def test_operators_are_registered_properly(device, npu_opcheck):
    x, weight, target, _, teacher, _ = make((5,))
    x, weight, target, *of_teacher = (each.to(device.torch) for each in (x, weight, target, *teacher[:2]))
    for reduction in ("mean",) if device.name == "emulated" else ("mean", "none"):
        options = DistillationOptions(reduction=reduction, hard_weight=0.5, return_parts=True, vocab_size=123)
        for first in ((x, weight), tuple(losses.leaf(each, device.torch) for each in (x, weight))):
            arguments = (*first, target, None, *of_teacher, None, None, None, None, None, *options, False, False, False)
            npu_opcheck(OPS.distillation.default, arguments)
        rest = (x, weight, target, None, *of_teacher, None, None, None, None, None, *options, True, True, False)
        if reduction == "none":
            npu_opcheck(OPS.distillation_backward.default, (torch.rand(5, device=device.torch), *rest))
        else:
            npu_opcheck(OPS.distillation.default, rest)


@pytest.mark.uncollected("what is traced is the same", lambda place, reduction: place == "emulated" and reduction == "none")
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch.func.vmap, which takes one after the other
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compilation_transforms_and_checkpoints(device, reduction):
    x, weight, target, _, teacher, _ = make((5,))
    x, weight, target, *pair = (each.to(device.torch) for each in (x, weight, target, *teacher[:2]))

    def head(x, weight):
        loss = linear_distillation_loss(torch.sin(x), weight, target, teacher=tuple(pair), reduction=reduction)
        return loss.square().sum()

    def gradients(function):
        leaves = [losses.leaf(each, device.torch) for each in (x, weight)]
        return torch.autograd.grad(function(*leaves), leaves)

    expected = gradients(head)
    compiled = torch.compile(head, backend="inductor" if device.name == "cuda" else "aot_eager", fullgraph=True)
    again = lambda *leaves: torch.utils.checkpoint.checkpoint(head, *leaves, use_reentrant=False)  # noqa: E731
    for found in (gradients(compiled), gradients(again), torch.func.grad(head, argnums=(0, 1))(x, weight)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    batched = torch.func.vmap(torch.func.grad(head), in_dims=(0, None))(torch.stack((x, 2 * x)), weight)
    torch.testing.assert_close(batched[0], expected[0], rtol=1e-5, atol=1e-7)
    (gradient,) = torch.autograd.grad(head(x.requires_grad_(), weight), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


def test_what_is_explained():
    """Four products of each chunk, whose logits of both models fit in the budget, and one of our kernels."""
    found = explain(tokens=4096, width=4096, vocabulary=128256, teacher_width=8192, chip="H200", backward=True)
    decided = found.decisions[0][1]
    assert decided["way"].startswith("DISTILLATION")
    chunks = int(decided["chunks"].split()[0])
    assert [launch.kernel for launch in found.launches].count("distillation_kernel") == chunks
    assert len(found.products) == 4 * chunks
    gradients = 2 * 4096 * (4096 + 128256)
    assert found.peak <= gradients + 512 * 2**20 + 10**6
    with pytest.raises(ValueError, match="label_smoothing must be left out where linear_distillation_loss is explained"):
        explain(tokens=1, width=1, vocabulary=1, teacher_width=1, label_smoothing=0.1, chip="H200")
