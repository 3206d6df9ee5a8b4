"""Forward-mode differentiation, Hessians and vmap: as of the same formula in PyTorch's operators, on every place."""

import pytest
import torch
from npu_embedding import embedding

from testing import forward_mode

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


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("taken", forward_mode.TAKEN)
@pytest.mark.filterwarnings("ignore:.*batching rule")
def test_is_that_of_the_formula(device, what, taken):
    dtype = torch.float64 if device.name == "cpu" else torch.float32
    forward_mode.check(*CALLS[what], taken, device.torch, dtype)


def test_max_norm_has_the_derivative_of_pytorchs():
    tables = [torch.arange(40.0).view(5, 8).cos() for _ in range(2)]
    indices, tangent = torch.tensor([1, 2, 2, 4]), torch.arange(40.0).view(5, 8).sin()
    results = [
        torch.func.jvp(lambda w, look_up=look_up: look_up(indices, w, max_norm=1.0), (table,), (tangent,))
        for look_up, table in zip((embedding, torch.nn.functional.embedding), tables, strict=True)
    ]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*tables)


def test_sparse_gradients_are_refused_by_name():
    weight = torch.randn(5, 8)
    with pytest.raises(NotImplementedError, match="npu_embedding::backward has no forward-mode"):
        torch.func.jvp(torch.func.grad(lambda w: own(w, sparse=True).square().sum()), (weight,), (weight,))
