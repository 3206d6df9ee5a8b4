"""The two options of torch.nn.functional.embedding that change the table, and the kind of its gradient."""

import lookup
import pytest
import torch
from lookup import KINDS
from npu_embedding import embedding

pytestmark = pytest.mark.usefixtures("npu_poisoned")


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_max_norm_scales_named_rows_in_place(device, norm_type, dtype):
    case = lookup.make(60, 40, 64, dtype, "zipf")
    case.weight[:, :] *= torch.linspace(0.01, 3, 40).unsqueeze(-1)
    limit = float(torch.linalg.vector_norm(case.weight[10].float(), norm_type))
    weight = lookup.leaf(case.weight, device.torch)
    out = embedding(case.indices.to(device.torch), weight, max_norm=limit, norm_type=norm_type)
    theirs = lookup.leaf(case.weight.float(), "cpu")
    expected = torch.nn.functional.embedding(case.indices, theirs, max_norm=limit, norm_type=norm_type)
    tolerance = 2 * torch.finfo(dtype).eps
    assert torch.allclose(out.cpu().float(), expected, rtol=tolerance, atol=1e-6)
    assert torch.allclose(weight.detach().cpu().float(), theirs.detach(), rtol=tolerance, atol=1e-6)
    assert (weight.detach().cpu() != case.weight).any()
    out.sum().backward()
    assert torch.equal(weight.grad.cpu()[:, 0].float(), torch.bincount(case.indices, minlength=40).float())


@pytest.mark.parametrize("norm_type", [1.0, 2.0, torch.inf])
@pytest.mark.parametrize("limit", [2.0, 3.4e38, 1e39, 1e300, torch.inf])
def test_rows_of_infinities_are_larger_than_any_finite_norm(device, limit, norm_type):
    rows = torch.tensor([[1.0, 2.0], [torch.inf, 1.0], [-torch.inf, torch.inf], [torch.nan, 1.0]])
    ids, table = torch.arange(4), rows.clone().to(device.torch)
    expected = torch.nn.functional.embedding(ids, rows, max_norm=limit, norm_type=norm_type)
    out = embedding(ids.to(device.torch), table, max_norm=limit, norm_type=norm_type)
    torch.testing.assert_close(out.cpu(), expected, equal_nan=True)
    torch.testing.assert_close(table.cpu(), rows, equal_nan=True)


def test_max_norm_leaves_rows_that_are_not_named_alone(device):
    weight = torch.full((6, 64), 9.0, device=device.torch)
    embedding(torch.tensor([2, 2, 4], device=device.torch), weight, max_norm=1.0)
    assert torch.equal(weight[:, 0].cpu() == 9, torch.tensor([True, True, False, True, False, True]))
    shard = torch.full((6, 64), 9.0, device=device.torch)
    embedding(torch.tensor([9, 10, 15, 16, 12], device=device.torch), shard, max_norm=1.0, vocab_range=(10, 16))
    assert torch.equal(shard[:, 0].cpu() == 9, torch.tensor([False, True, False, True, True, False]))
    untouched = torch.full((6, 64), 9.0, device=device.torch)
    embedding(torch.tensor([9, 16], device=device.torch), untouched, max_norm=1.0, vocab_range=(10, 16))
    assert torch.equal(untouched.cpu(), torch.full((6, 64), 9.0))


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"padding_idx": -40}, {"scale_grad_by_freq": True}, {"vocab_range": (10, 50)}])
def test_sparse_gradient_is_the_dense_one(device, kind, options):
    case = lookup.make(300 if kind != "distinct" else 30, 40, 64, torch.bfloat16, kind, **options)
    if case.vocab_range:
        case.indices += 25
    sparse, dense = lookup.leaf(case.weight, device.torch), lookup.leaf(case.weight, device.torch)
    for weight in (sparse, dense):
        out = embedding(case.indices.to(device.torch), weight, **case.options, sparse=weight is sparse)
        out.backward(case.dy.to(device.torch))
    assert sparse.grad.is_sparse
    assert sparse.grad.shape == (40, 64)
    assert sparse.grad._nnz() == case.indices.numel()
    assert torch.allclose(sparse.grad.coalesce().to_dense(), dense.grad, rtol=2**-7)
    _, exact, added = lookup.expected(case)
    lookup.check_gradient(sparse.grad.coalesce().to_dense().cpu(), exact, added, 300)
