"""What the tests compare with: Attention Residuals in fp64 with PyTorch's own autograd; how far a result may be from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from npu_attn_res import attn_res
from torch import Tensor


@dataclass
class Case:
    """One problem: inputs in their dtypes, made on the CPU from a seed."""

    blocks: Tensor  # [N, ..., D]
    query: Tensor
    rms_weight: Tensor
    dh: Tensor
    eps: float = 1e-6

    def leaves(self, device, listed: bool) -> tuple[list[Tensor], Tensor, Tensor]:
        """Blocks (one stacked, or each), query and rms_weight on a device, which ask for gradients."""
        blocks = [leaf(block, device) for block in self.blocks] if listed else [leaf(self.blocks, device)]
        return blocks, leaf(self.query, device), leaf(self.rms_weight, device)


def make(n_blocks, tokens, width, dtype, weight_dtype=None, seed=0, sharp=1.0) -> Case:
    """v ~ N(0, 1) of a scale for every row; scores of about `sharp`; `tokens` a number or a shape."""
    generator = torch.Generator().manual_seed(seed)
    leading = (tokens,) if isinstance(tokens, int) else tuple(tokens)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    scale = torch.rand(n_blocks, *leading, 1, generator=generator) * 3 + 0.1
    blocks = (randn(n_blocks, *leading, width) * scale).to(dtype)
    query = (randn(width) * sharp / math.sqrt(width)).to(weight_dtype or dtype)
    rms_weight = (randn(width) * 0.3 + 1).to(weight_dtype or dtype)
    return Case(blocks, query, rms_weight, randn(*leading, width).to(dtype))


def leaf(tensor: Tensor, device) -> Tensor:
    return tensor.detach().clone().to(device).requires_grad_()


def formula(blocks: Tensor, query: Tensor, rms_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """h and alpha as the paper has them."""
    keys = blocks * torch.rsqrt(blocks.square().mean(-1, keepdim=True) + eps) * rms_weight
    alpha = torch.softmax((keys * query).sum(-1), 0)
    return (alpha.unsqueeze(-1) * blocks).sum(0), alpha


def exact(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, dblocks [N, ..., D], dquery and drms_weight in fp64."""
    leaves = [tensor.double().requires_grad_() for tensor in (case.blocks, case.query, case.rms_weight)]
    h, _ = formula(*leaves, case.eps)
    return h.detach(), *torch.autograd.grad(h, leaves, case.dh.double())


def run(case: Case, device, listed: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same by the operator, on the CPU."""
    blocks, *weights = case.leaves(device, listed)
    h = attn_res(blocks if listed else blocks[0], *weights, rms_eps=case.eps)
    gradients = torch.autograd.grad(h, [*blocks, *weights], case.dh.to(device))
    dblocks = torch.stack(gradients[:-2]) if listed else gradients[0]
    return tuple(tensor.detach().cpu() for tensor in (h, dblocks, *gradients[-2:]))


def assert_close(actual: Tensor, expected: Tensor, *, length: int, scale: Tensor, amplified: Tensor | float = 0.0) -> None:
    """Every element within one rounding to actual's dtype and the fp32 error of a sum over `length` terms of size `scale`.

    An fp32 sum of n terms of random signs is off by about sqrt(n) roundings; three times that is allowed. `amplified` is how
    much more of it there may be, because a sum went through exp.
    """
    assert torch.isfinite(actual).all(), "not every element was written, or one overflowed"
    rounding = torch.finfo(actual.dtype).eps / 2 * expected.abs() + torch.finfo(actual.dtype).tiny
    fp32 = (3 * math.sqrt(length) + 8) * torch.finfo(torch.float32).eps / 2
    excess = (actual.double() - expected).abs() - rounding - fp32 * scale * (1 + amplified)
    assert excess.max() <= 0, f"off by {excess.max():.3g} more than is allowed"


def check(case: Case, results: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Results of a case against fp64."""
    h, dblocks, dquery, dnorm = exact(case)
    v, dh = case.blocks.double(), case.dh.double()
    width, tokens = v.shape[-1], max(1, dh[..., 0].numel())
    rstd = torch.rsqrt(v.square().mean(-1, keepdim=True) + case.eps)
    g = case.query.double() * case.rms_weight.double()
    terms = (v * rstd * g).square().sum(-1, keepdim=True).sqrt()  # what a score is the sum of
    _, alpha = formula(v, case.query.double(), case.rms_weight.double(), case.eps)
    alpha = alpha.unsqueeze(-1)
    # A score that is off by d shifts every weight by a factor of exp(d).
    size = (v * v).mean(-1, keepdim=True).sqrt().expand_as(v)
    amplified = terms.amax(0)
    assert_close(results[0], h, length=width, scale=(alpha * (v.abs() + size)).sum(0), amplified=amplified)

    dots = (dh * v).square().sum(-1, keepdim=True).sqrt() + (dh * v).sum(-1, keepdim=True).abs()  # of e_i
    delta = (alpha * dots).sum(0)
    dscore = alpha * (dots + delta)  # what ds_i is a difference of
    pulled = g.abs() + (v * rstd).abs() * terms
    sizes = alpha * dh.abs() + dscore * rstd * pulled
    assert_close(results[1], dblocks, length=width, scale=sizes, amplified=2 * amplified)

    added = (dscore * rstd * v.abs()).reshape(-1, width)
    added = added.square().sum(0).sqrt() + added.mean(0)
    for actual, expected, weight in zip(results[2:], (dquery, dnorm), (case.rms_weight, case.query), strict=True):
        scale = added * weight.double().abs()
        length = tokens * len(v) + width
        assert_close(actual, expected, length=length, scale=scale, amplified=2 * amplified.max())


def near(actual: Tensor, expected: Tensor, *, fp32: float = 2e-5, cancelled: float = 1e-12) -> None:
    """Every element within one rounding to actual's dtype, `fp32` of the size of its row, and `cancelled`."""
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all(), "not every element was written, or one overflowed"
    if not actual.numel():
        return
    size = expected.double().square().mean(-1, keepdim=True).sqrt() if expected.dim() else expected.abs()
    allowed = torch.finfo(actual.dtype).eps / 2 * expected.abs() + fp32 * torch.maximum(size, expected.abs()) + cancelled
    excess = (actual.double() - expected).abs() - allowed
    assert excess.max() <= 0, f"off by {excess.max():.3g} more than is allowed"
