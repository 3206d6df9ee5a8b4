"""For tests of operators: compares forward-mode derivatives, vmap and batched gradients of a function with a formula's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

Function = Callable[..., Tensor]


def forward_derivatives(function: Function, inputs: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
    """All derivatives that use forward mode: jvp, a dual tensor, jvp of the gradient, the Hessian's blocks."""
    of_sum, every = _of_sum(function), tuple(range(len(inputs)))
    value, tangent, *_ = torch.func.jvp(function, tuple(inputs), tuple(tangents))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(*map(forward_ad.make_dual, inputs, tangents))).tangent
    of_gradient = torch.func.jvp(torch.func.grad(of_sum, every), tuple(inputs), tuple(tangents))[1]
    return [value, tangent, dual, *of_gradient, torch.func.hessian(of_sum)(*inputs)]


def batched(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """vmap of the function and of its gradient, over two of each input."""
    several = [torch.stack([tensor, 2 * tensor]) for tensor in inputs]
    every = tuple(range(len(inputs)))
    return [torch.func.vmap(function)(*several), *torch.func.vmap(torch.func.grad(_of_sum(function), every))(*several)]


def at_once(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of several upstream gradients in one backward."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    value = function(*leaves)
    upstream = torch.stack([value.detach(), value.detach().cos()])
    return [*torch.autograd.grad(value, leaves, upstream, is_grads_batched=True)]


TAKEN: dict[str, Callable[..., list[Tensor]]] = {"forward": forward_derivatives, "batched": batched, "at once": at_once}


def check(
    own: Function, formula: Function, shapes: Sequence[tuple[int, ...]], taken: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Compare the derivatives of `own` with those of the formula in fp64 on a CPU.

    Args:
        own: the operator.
        formula: the same in PyTorch's operators.
        shapes: of the inputs.
        taken: a name of `TAKEN`.
        device: where `own` runs.
        dtype: in which; fp64 or fp32.

    Raises:
        AssertionError: they differ, or the formula's are zero.
    """
    generator = torch.Generator().manual_seed(0)
    groups = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(2)]
    groups = groups[: 2 if taken == "forward" else 1]  # inputs, and tangents of them
    expected = TAKEN[taken](formula, *groups)
    found = TAKEN[taken](own, *([tensor.to(device, dtype) for tensor in group] for group in groups))
    near = 1e-9 if dtype == torch.float64 else 2e-3
    for actual, wanted in zip(found, expected, strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(actual.cpu().double(), wanted, rtol=near, atol=near)


def _of_sum(function: Function) -> Function:
    return lambda *given: torch.sin(function(*given)).sum()
