"""Calls of `linear_distillation_loss`, and its formula in fp64."""

import math

import losses
import torch
from npu_fused_linear_cross_entropy import DistillationLoss, Teacher, linear_distillation_loss

DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation")


def exact(x, weight, target, bias, teacher, *, divergence="forward_kl", beta=0.5, temperature=1.0, **options):
    """The row losses and their parts in fp64, from torch's own functions."""
    softcap, scale = options.get("softcap"), options.get("logit_scale", 1.0)
    z = logits(x, weight, bias, softcap, scale)
    of_teacher = teacher.log() if isinstance(teacher, torch.Tensor) else logits(*teacher)
    s, t = torch.log_softmax(z / temperature, -1), torch.log_softmax(of_teacher / temperature, -1).detach()
    kl = lambda a, b: torch.nn.functional.kl_div(b, a, reduction="none", log_target=True).sum(-1)  # noqa: E731
    m = torch.logaddexp(t + math.log(beta), s + math.log1p(-beta))
    soft = {
        "forward_kl": lambda: kl(t, s),
        "reverse_kl": lambda: kl(s, t),
        "jensen_shannon": lambda: beta * kl(t, m) + (1 - beta) * kl(s, m),
        "total_variation": lambda: (s.exp() - t.exp()).abs().sum(-1) / 2,
    }[divergence]()
    counted = torch.ones(x.shape[:-1], dtype=torch.bool) if target is None else target != options.get("ignore_index", -100)
    hard = torch.zeros_like(soft)
    if options.get("hard_weight"):
        hard = torch.nn.functional.cross_entropy(z.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)
    rows = options.get("soft_weight", 1.0) * soft + options.get("hard_weight", 0.0) * hard
    reduction = options.get("reduction", "mean")

    def reduced(values):
        values = torch.where(counted, values, 0.0)
        return values if reduction == "none" else values.sum() / (max(1, int(counted.sum())) if reduction == "mean" else 1)

    return reduced(rows), reduced(soft), reduced(hard)


def logits(x, weight, bias=None, softcap=None, scale=1.0):
    z = x.double() @ weight.double().t()
    z = (z if bias is None else z + bias.double()) * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def make(
    shape=(37,),
    width=16,
    teacher_width=24,
    vocabulary=123,
    dtype=torch.float32,
    *,
    scale=1.0,
    bias=False,
    teacher_bias=False,
    teacher_options=(None, 1.0),
    ignored=0.3,
    **options,
):
    """x, weight, target, bias, teacher and options."""
    case = losses.make(shape, width, vocabulary, dtype, scale=scale, ignored=ignored, bias=dtype if bias else None, seed=1)
    other = losses.make(shape, teacher_width, vocabulary, dtype, scale=scale, bias=dtype if teacher_bias else None, seed=2)
    return case.x, case.weight, case.target, case.bias, Teacher(other.x, other.weight, other.bias, *teacher_options), options


def check(device, x, weight, target, bias, teacher, options, *, tolerance=None):
    leaves = [None if each is None else losses.leaf(each, device.torch) for each in (x, weight, bias)]
    moved = tuple(each.to(device.torch) if isinstance(each, torch.Tensor) else each for each in teacher)
    on_device = None if target is None else target.to(device.torch)
    found = linear_distillation_loss(*leaves[:2], on_device, leaves[2], teacher=moved, **options)
    wide = [None if each is None else each.double().requires_grad_() for each in (x, weight, bias)]
    expected, soft, hard = exact(*wide[:2], target, wide[2], teacher, **options)
    if options.get("return_parts"):
        assert isinstance(found, DistillationLoss)
        for part, wanted in ((found.soft, soft), (found.hard, hard)):
            assert part is None or not part.requires_grad
            torch.testing.assert_close(part.cpu().double(), wanted.detach(), rtol=1e-4, atol=2e-5)
        found = found.loss
    eps = torch.finfo(x.dtype).eps
    tolerance = tolerance or 40 * 2.0**-23
    torch.testing.assert_close(found.detach().cpu().double(), expected.detach(), rtol=tolerance, atol=tolerance)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    some = [(leaf, w) for leaf, w in zip(leaves, wide, strict=True) if leaf is not None]
    gradients = torch.autograd.grad(found, [leaf for leaf, _ in some], upstream.to(device.torch, found.dtype))
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, [w for _, w in some], upstream), strict=True):
        bound = max(tolerance, 4 * eps) * (wanted.abs().max() if wanted.numel() else 0.0)
        torch.testing.assert_close(gradient.cpu().double(), wanted, rtol=2 * eps, atol=float(bound))
