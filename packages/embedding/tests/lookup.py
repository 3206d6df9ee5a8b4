"""What the tests compare with: the look-up as it is, its gradient in fp64, and how far a result may be from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from npu_embedding import embedding
from npu_embedding import lookup as operator
from npu_embedding.lookup import cuda_sort
from npu_embedding.rows import Gradient, Way
from npu_tiling import Device
from npu_tiling.plans import Plan, run_plan
from torch import Tensor

ALL_WAYS = cuda_sort.WAYS
KINDS = ["uniform", "zipf", "equal", "distinct"]  # of indices, see `draw`
ROWS = 40  # of a small table


@dataclass
class Case:
    """One problem, made on the CPU from a seed."""

    indices: Tensor
    weight: Tensor
    dy: Tensor
    padding_idx: int | None = None
    scale_grad_by_freq: bool = False
    vocab_range: tuple[int, int] | None = None

    @property
    def options(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("padding_idx", "scale_grad_by_freq", "vocab_range")}


def draw(kind: str, n: int, rows: int, generator: torch.Generator | None = None) -> Tensor:
    """n indices below `rows`: "uniform", "zipf" (the r-th row 1 / r as often as the first), "equal" or "distinct"."""
    if kind == "uniform" or not n:
        return torch.randint(0, rows, (n,), generator=generator)
    if kind == "equal":
        return torch.full((n,), rows // 2)
    if kind == "distinct":
        return torch.randperm(rows, generator=generator)[:n]
    return torch.multinomial(1 / torch.arange(1, rows + 1).double(), n, replacement=True, generator=generator)


def make(n: int, rows: int, width: int, dtype=torch.float32, kind="uniform", seed=0, **options) -> Case:
    generator = torch.Generator().manual_seed(seed)
    indices = draw(kind, n, rows, generator)
    weight = torch.randn(rows, width, generator=generator).to(dtype)
    return Case(indices, weight, torch.randn(n, width, generator=generator).to(dtype), **options)


def take(way: Way, setattr: Callable[[object, str, object], None]) -> None:
    """From now on gradients on CUDA go one way, whatever the number of indices."""
    setattr(
        cuda_sort,
        "WAYS",
        [rule._replace(max_indices=inf, max_elements=inf, repeats=0) for rule in ALL_WAYS if rule.way is way],
    )
    for known in ("_plans", "_functions"):
        setattr(operator.BACKWARD, known, {})


def planned(
    write: Callable[[Plan, Gradient], tuple[Any, ...]], chip: Device, indices: Tensor, *numbers: Any
) -> tuple[Tensor, ...]:
    """The results of the steps that `write` adds for a gradient of indices [n], which `numbers` complete."""
    p = Plan(chip)
    slot: Any = p.argument(indices)
    p.results = write(p, Gradient(slot, slot, *numbers))
    results, _ = run_plan(p, [indices], lambda replaced: p)
    return results


def leaf(tensor: Tensor, device) -> Tensor:
    return tensor.detach().clone().to(device).requires_grad_()


def run(case: Case, device, function=embedding) -> tuple[Tensor, Tensor]:
    """The output and the gradient of weight, on the CPU."""
    weight = leaf(case.weight, device)
    out = function(case.indices.to(device), weight, **case.options)
    (dweight,) = torch.autograd.grad(out, weight, case.dy.to(device))
    return out.detach().cpu(), dweight.cpu()


def expected(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The output, dweight in fp64, and the sum of the magnitudes that each element of dweight is the sum of."""
    rows, width = case.weight.shape
    first = case.vocab_range[0] if case.vocab_range else 0
    local = case.indices.reshape(-1).long() - first
    inside = (local >= 0) & (local < rows)
    out = torch.zeros(local.numel(), width, dtype=case.weight.dtype)
    out[inside] = case.weight[local[inside]]
    if case.padding_idx is not None:
        total = case.padding_idx % rows if case.vocab_range is None else case.padding_idx
        inside &= local + first != total
    dy = case.dy.reshape(local.numel(), width)[inside].double()
    counts = torch.bincount(local[inside], minlength=rows).clamp(min=1).unsqueeze(-1)
    divisor = counts if case.scale_grad_by_freq else torch.ones_like(counts)
    dweight = torch.zeros(rows, width, dtype=torch.float64).index_add_(0, local[inside], dy) / divisor
    added = torch.zeros(rows, width, dtype=torch.float64).index_add_(0, local[inside], dy.abs()) / divisor
    return out.view(*case.indices.shape, width), dweight, added


def check(case: Case, results: tuple[Tensor, Tensor]) -> None:
    """The output bit for bit; the gradient within fp32 sums of up to n terms and one rounding."""
    out, dweight, added = expected(case)
    assert results[0].dtype == results[1].dtype == case.weight.dtype
    assert torch.equal(results[0], out)
    check_gradient(results[1], dweight, added, case.indices.numel())


def renormalised(case: Case, max_norm: float, norm_type: float) -> Tensor:
    """The table, of which the rows that are named have a norm of at most `max_norm`."""
    local = case.indices.reshape(-1).long() - (case.vocab_range[0] if case.vocab_range else 0)
    named = torch.zeros(case.weight.shape[0], dtype=torch.bool)
    named[local[(local >= 0) & (local < len(named))]] = True
    wide = case.weight.double()
    norm = torch.linalg.vector_norm(wide, norm_type, dim=-1) if wide.numel() else wide.new_zeros(len(wide))
    scale = torch.where(named & (norm > max_norm), max_norm / (norm + 1e-7), 1.0)
    return (wide * scale.unsqueeze(-1)).to(case.weight.dtype)


def check_gradient(actual: Tensor, dweight: Tensor, added: Tensor, n: int) -> None:
    range_ = torch.finfo(actual.dtype)
    past = dweight.abs() > range_.max * (1 - 2 * range_.eps)  # the sum fits in fp32 and not in this dtype
    assert (torch.isfinite(actual) | past).all(), "not every element was written"
    # Of n terms of random signs, the errors of an fp32 sum grow with the square root; three times that is allowed.
    sums = (3 * n**0.5 + 4) * torch.finfo(torch.float32).eps / 2 * added
    rounding = torch.finfo(actual.dtype).eps / 2 * dweight.abs() + torch.finfo(actual.dtype).tiny
    excess = (actual.double() - dweight).abs() - 1.01 * (sums + rounding)
    assert ((excess <= 0) | past).all(), f"off by {excess[~past].max():.3g} more than is allowed"
    assert torch.equal(actual[(added == 0).all(-1)], torch.zeros_like(actual[(added == 0).all(-1)]))


def small_table(n, width, dtype=torch.float32, seed=0):
    """Indices [n], a table [ROWS, width] and weights [n]."""
    generator = torch.Generator().manual_seed(seed)
    indices = draw("zipf", n, ROWS, generator)
    weight = torch.randn(ROWS, width, generator=generator).to(dtype)
    return indices, weight, torch.randn(n, generator=generator).to(dtype)
