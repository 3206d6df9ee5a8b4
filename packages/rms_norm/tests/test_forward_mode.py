"""Forward-mode differentiation, Hessians and vmap: as of the same formula in PyTorch's operators, on every place."""

import pytest
import torch
from npu_rms_norm import RMSNorm, add_rms_norm, rms_norm
from torch.autograd import forward_ad


def formula(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def module(x, weight):
    return torch.func.functional_call(RMSNorm(8), {"weight": weight}, (x,))


CALLS = {
    "rms_norm": (rms_norm, formula, [(3, 8), (8,)]),
    "in place": (lambda x, w: rms_norm(x, w, in_place=True), formula, [(3, 8), (8,)]),
    "add_rms_norm": (
        lambda x, residual, w: torch.cat(add_rms_norm(x, residual, w)),
        lambda x, residual, w: torch.cat([formula(x + residual, w), x + residual]),
        [(3, 8), (3, 8), (8,)],
    ),
    "module": (module, formula, [(3, 8), (8,)]),
}


def forward_derivatives(function, inputs, tangents):
    """Everything that takes a tangent, in one list."""
    of_sum = lambda *given: torch.sin(function(*given)).sum()  # noqa: E731
    value, tangent = torch.func.jvp(function, inputs, tangents)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(*map(forward_ad.make_dual, inputs, tangents))).tangent
    every = tuple(range(len(inputs)))
    found = [value, tangent, dual, *torch.func.jvp(torch.func.grad(of_sum, every), inputs, tangents)[1]]
    return [*found, torch.func.hessian(of_sum)(*inputs)]


def batched(function, inputs):
    several = [torch.stack([tensor, 2 * tensor]) for tensor in inputs]
    every = tuple(range(len(inputs)))
    of_sum = lambda *given: torch.sin(function(*given)).sum()  # noqa: E731
    return [torch.func.vmap(function)(*several), *torch.func.vmap(torch.func.grad(of_sum, every))(*several)]


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("taken", [forward_derivatives, batched])
@pytest.mark.filterwarnings("ignore:.*batching rule")
def test_is_that_of_the_formula(device, what, taken):
    own, plain, shapes = CALLS[what]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tangents = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    arguments = (inputs, tangents) if taken is forward_derivatives else (inputs,)
    expected = taken(plain, *map(tuple, arguments))
    dtype = torch.float64 if device.name == "cpu" else torch.float32
    found = taken(own, *(tuple(tensor.to(device.torch, dtype) for tensor in given) for given in arguments))
    for actual, wanted in zip(found, expected, strict=True):
        assert wanted.abs().max() > 0
        limit = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-3, "atol": 2e-3}
        torch.testing.assert_close(actual.cpu().double(), wanted, **limit)
