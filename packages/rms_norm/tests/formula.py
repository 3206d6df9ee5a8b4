"""What the tests compare with: RMSNorm in fp64 with PyTorch's own autograd, and how far a result may be from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Case:
    """One problem: inputs in their dtypes, made on the CPU from a seed."""

    x: Tensor
    weight: Tensor | None
    dy: Tensor
    eps: float = 1e-6
    offset: float = 0.0
    casting_mode: str = "llama"

    @property
    def options(self) -> dict[str, object]:
        return {"eps": self.eps, "offset": self.offset, "casting_mode": self.casting_mode}


def make(rows, width, dtype, weight_dtype=None, seed=0, **options) -> Case:
    """x ~ N(0, 1) of different scale in each row, weights around one, `rows` a number or a shape."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, width) if isinstance(rows, int) else (*rows, width)
    scale = torch.rand(*shape[:-1], 1, generator=generator) * 3 + 0.1
    x = (torch.randn(shape, generator=generator) * scale).to(dtype)
    weight = (torch.randn(width, generator=generator) * 0.3 + 1).to(weight_dtype or dtype)
    return Case(x, weight, torch.randn(shape, generator=generator).to(dtype), **options)


def exact(case: Case) -> tuple[Tensor, Tensor, Tensor | None]:
    """y, dx and dweight in fp64."""
    x = case.x.double().requires_grad_()
    weight = None if case.weight is None else case.weight.double().requires_grad_()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + case.eps)
    if weight is not None:
        y = y * (case.offset + weight)
    inputs = [x] if weight is None else [x, weight]
    gradients = torch.autograd.grad(y, inputs, case.dy.double())
    return y.detach(), gradients[0], None if weight is None else gradients[1]


def copy(tensor: Tensor, device) -> Tensor:
    return tensor.detach().clone().to(device)


def leaf(tensor: Tensor, device) -> Tensor:
    return copy(tensor, device).requires_grad_()


def run(case: Case, function, device) -> tuple[Tensor, Tensor, Tensor | None]:
    """y, dx and dweight by `function`, on the CPU."""
    x = leaf(case.x, device)
    weight = None if case.weight is None else leaf(case.weight, device)
    y = function(x, weight, **case.options)
    inputs = [x] if weight is None else [x, weight]
    gradients = torch.autograd.grad(y, inputs, copy(case.dy, device))
    return y.detach().cpu(), gradients[0].cpu(), None if weight is None else gradients[1].cpu()


def assert_close(
    actual: Tensor,
    expected: Tensor,
    *,
    roundings: int,
    length: int,
    scale: Tensor | None = None,
    rounded_to: torch.dtype | None = None,
) -> None:
    """Every element within `roundings` of a dtype (actual's) and the fp32 error of a sum over `length` terms.

    An fp32 sum of n terms of random signs is off by about sqrt(n) roundings; three times that is allowed. The error is
    measured against the element itself or, where terms cancel, against `scale`: the size of what was added. What is past
    the dtype's range may be infinite, and what is below its normal numbers is off by a step between those that are not.
    """
    range_ = torch.finfo(actual.dtype)
    past = expected.abs() > range_.max * (1 - 8 * range_.eps)
    assert (torch.isfinite(actual) | past).all(), "not every element was written, or one overflowed"
    if scale is None:
        scale = expected.square().mean(-1, keepdim=True).sqrt()
    narrow = torch.finfo(rounded_to or actual.dtype).eps / 2
    unit = roundings * narrow + (3 * math.sqrt(length) + 4) * torch.finfo(torch.float32).eps / 2
    kinds = [torch.finfo(dtype) for dtype in (actual.dtype, rounded_to or actual.dtype)]
    step = roundings * max(kind.tiny * kind.eps / 2 for kind in kinds)
    error = ((actual.double() - expected).abs() - step) / torch.maximum(expected.abs(), scale).clamp_min(1e-30)
    worst = torch.where(past, 0.0, error).max() if error.numel() else error.new_zeros(())
    assert worst <= unit, f"off by {worst:.3g}, {unit:.3g} is allowed"


def check(case: Case, results: tuple[Tensor, Tensor | None, Tensor | None], dsum: Tensor | None = None) -> None:
    """y, dx and dweight of a case against fp64, None what was not computed; `dsum`: what dx has besides."""
    y, dx, dweight = exact(case)
    width, rows = case.x.shape[-1], max(1, case.x[..., 0].numel())
    rounds = {"llama": 2, "gemma": 1, "none": 5}[case.casting_mode]  # roundings on the way to y, its own included
    assert_close(results[0], y, roundings=rounds, length=width)
    rstd = torch.rsqrt(case.x.double().square().mean(-1, keepdim=True) + case.eps)
    scale = torch.ones(()) if case.weight is None else (case.offset + case.weight.double()).abs()
    terms = (case.dy.double() * scale * rstd).square().mean(-1, keepdim=True).sqrt()
    normalised = case.x.double() * rstd
    # dx = rstd (g - n mean(g n)): an error of n enters twice, times up to the largest |n| and the mean.
    spread = terms * (1 + normalised.abs())
    if dsum is not None:
        dx, spread = dx + dsum.double(), spread + dsum.double().abs()
    if results[1] is not None:
        # What the mode rounds on the way, it rounds to y's dtype, however wide x is.
        rounded_to = None if case.casting_mode == "gemma" else case.dy.dtype
        more = rounds + 1 + (dsum is not None)
        assert_close(results[1], dx, roundings=more, length=width, scale=spread, rounded_to=rounded_to)
    if dweight is not None and results[2] is not None:
        added = (case.dy.double() * normalised).square().reshape(-1, width).sum(0).sqrt()
        assert_close(results[2], dweight, roundings=rounds + 1, length=rows + width, scale=added, rounded_to=case.dy.dtype)


def forward_arguments(
    x,
    weight,
    bias=None,
    *,
    dtype,
    residual=None,
    gate=None,
    casting_mode="llama",
    activation="silu",
    norm_before_gate=True,
    return_fp32=False,
    save_rstd=False,
):
    """The arguments of `torch.ops.npu_rms_norm.rms_norm`, in order."""
    options = (1e-6, 0.0, casting_mode, activation, norm_before_gate, False, dtype, return_fp32, save_rstd)
    return x, residual, gate, weight, bias, *options


def check_quantised(found, scale, exact, dtype):
    """Each element within half a step, a scale within some roundings, and the largest of a row at the end of the range."""
    most = 127 if dtype == torch.int8 else 448
    assert (found.dtype, scale.dtype) == (dtype, torch.float32)
    assert (found.shape, scale.shape) == (exact.shape, exact.shape[:-1])
    assert found.is_contiguous()
    assert scale.is_contiguous()
    largest = exact.abs().amax(-1)
    torch.testing.assert_close(scale.double(), largest.clamp_min(1e-30) / most, rtol=1e-5, atol=0)
    values, steps = found.double(), exact / scale.double().unsqueeze(-1)
    assert (values.abs().amax(-1) == most * (largest > 0)).all()
    half = 0.5 if dtype == torch.int8 else torch.maximum(steps.abs() * 2.0**-4, torch.tensor(2.0**-10))
    assert ((values - steps).abs() <= half + 2e-5 * steps.abs() + 1e-6).all()
