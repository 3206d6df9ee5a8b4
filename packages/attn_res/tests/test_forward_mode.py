"""Forward-mode differentiation, Hessians and vmap: as of the same formula in PyTorch's operators, on every place."""

import pytest
import torch
from npu_attn_res import attn_res, attn_res_merge, attn_res_phase1
from torch.autograd import forward_ad


def formula(blocks, query, norm):
    keys = blocks / (blocks.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm
    alpha = torch.softmax(keys @ query, 0)
    return (alpha.unsqueeze(-1) * blocks).sum(0)


def normalised(blocks, query, norm, weight):
    h = formula(blocks, query, norm)
    return torch.cat([h, h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight])


def phases(blocks, query, norm):
    o, maximum, total = attn_res_phase1(torch.stack([query, 2 * query]), list(blocks[:-1].unbind()), norm)
    return attn_res_merge(o[0], maximum[0], total[0], blocks[-1], query, norm)


WEIGHTS = [(8,), (8,)]
CALLS = {
    "stacked": (attn_res, formula, [(2, 3, 8), *WEIGHTS]),
    "a list": (lambda blocks, *weights: attn_res(list(blocks.unbind()), *weights), formula, [(2, 3, 8), *WEIGHTS]),
    "normalised": (
        lambda blocks, query, norm, weight: torch.cat(attn_res(blocks, query, norm, norm_weight=weight)),
        normalised,
        [(2, 3, 8), *WEIGHTS, (8,)],
    ),
    "two phases": (phases, formula, [(3, 3, 8), *WEIGHTS]),
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
