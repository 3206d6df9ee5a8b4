"""Forward-mode differentiation, Hessians and vmap: as of the same formula in PyTorch's operators, on every place."""

import pytest
import torch
from npu_embedding import embedding
from torch.autograd import forward_ad

INDICES = torch.tensor([4, 0, 2, 2])


def own(weight, **options):
    return embedding(INDICES.to(weight.device), weight, **options)


def sharded(weight):
    return own(weight, vocab_range=(1, 6), num_embeddings=7)


def of_a_shard(weight):
    inside = (INDICES >= 1).unsqueeze(-1)
    return torch.nn.functional.embedding((INDICES - 1).clamp(min=0), weight) * inside


CALLS = {
    "embedding": (own, lambda weight: torch.nn.functional.embedding(INDICES, weight), [(5, 8)]),
    "a shard": (sharded, of_a_shard, [(5, 8)]),
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


def test_max_norm_and_sparse_gradients_are_refused_by_name():
    weight = torch.randn(5, 8)
    with pytest.raises(NotImplementedError, match="npu_embedding::renormalise_ has no forward-mode derivative"):
        torch.func.jvp(lambda w: own(w, max_norm=1.0), (weight,), (weight,))
    with pytest.raises(NotImplementedError, match="npu_embedding::embedding_sparse_backward has no forward-mode"):
        torch.func.jvp(torch.func.grad(lambda w: own(w, sparse=True).square().sum()), (weight,), (weight,))
