"""The operator, wherever it runs, against the look-up as it is and its gradient in fp64."""

import lookup
import pytest
import torch
from lookup import KINDS
from npu_embedding import embedding

pytestmark = pytest.mark.usefixtures("npu_poisoned")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Plain rows; rows that are no multiple of 32 bytes; rows wide enough to be cut in columns.
WIDTHS = [1, 7, 64, 100, 123, 768, 1000, 4096, 7168, 16384, 16411]


@pytest.mark.few(6)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_width(device, width, dtype):
    case = lookup.make(83, 97, width, dtype, "zipf")
    lookup.check(case, lookup.run(case, device.torch))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "rows"), [(1, 1), (1, 500), (700, 1), (350, 351), (2000, 40), (500, 4000)])
def test_every_distribution_and_size(device, n, rows, kind):
    case = lookup.make(min(n, rows) if kind == "distinct" else n, rows, 100, torch.bfloat16, kind)
    lookup.check(case, lookup.run(case, device.torch))


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_every_dtype(device, dtype, index_dtype):
    case = lookup.make(200, 60, 64, dtype, padding_idx=3)
    case.indices = case.indices.to(index_dtype)
    lookup.check(case, lookup.run(case, device.torch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_small_gradients_add_up(device, dtype):
    n = 4096
    weight = torch.zeros(3, 40, dtype=dtype, device=device.torch, requires_grad=True)
    embedding(torch.ones(n, dtype=torch.int64, device=device.torch), weight).sum().backward()
    assert torch.equal(weight.grad.cpu(), torch.tensor([[0.0], [n], [0.0]], dtype=dtype).expand(3, 40))


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_every_time(device, kind):
    case = lookup.make(900, 900, 40, torch.float32, kind)
    case.dy *= 10 ** torch.randint(-4, 5, case.dy.shape)  # so that the order of a sum shows
    first = lookup.run(case, device.torch)
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(first, lookup.run(case, device.torch), strict=True))


@pytest.mark.parametrize("padding_idx", [0, 7, 39, -1, -40])
@pytest.mark.parametrize("kind", ["zipf", "equal"])
def test_padding_row_is_looked_up_and_gets_no_gradient(device, padding_idx, kind):
    case = lookup.make(800, 40, 64, kind=kind, padding_idx=padding_idx)
    if kind == "equal":
        case.indices.fill_(padding_idx % 40)
    case.dy[case.indices == padding_idx % 40] = torch.nan  # what reaches padded positions must not leak
    out, dweight, added = lookup.expected(case)
    results = lookup.run(case, device.torch)
    assert torch.equal(results[0], out)
    assert torch.equal(results[1][padding_idx], torch.zeros(64))
    lookup.check_gradient(results[1], dweight, added, 800)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_divided_by_frequency(device, dtype, kind):
    case = lookup.make(600, 601, 64, dtype, kind, scale_grad_by_freq=True, padding_idx=5)
    lookup.check(case, lookup.run(case, device.torch))


@pytest.mark.parametrize(("first", "rows"), [(0, 30), (30, 50), (80, 20), (40, 1)])
@pytest.mark.parametrize("width", [64, 123])
def test_a_shard_gives_zeros_for_other_rows_and_takes_no_gradient_from_them(device, first, rows, width):
    generator = torch.Generator().manual_seed(0)
    case = lookup.make(500, rows, width, vocab_range=(first, first + rows), padding_idx=45)
    case.indices = torch.randint(0, 100, (500,), generator=generator)
    lookup.check(case, lookup.run(case, device.torch))


@pytest.mark.parametrize("first", [0, 30, 2**31 - 20, 2**33])
def test_a_shard_of_a_table_of_unknown_size_takes_32_bit_indices(device, first):
    weight = torch.randn(40, 64).to(device.torch).requires_grad_()
    indices = torch.tensor([0, 31, 2**31 - 1], dtype=torch.int32, device=device.torch)
    out = embedding(indices, weight, vocab_range=(first, first + 40))
    (gradient,) = torch.autograd.grad(out.sum(), weight)
    inside = [int(i) - first for i in indices.tolist() if first <= i < first + 40]
    for i, index in enumerate(indices.tolist()):
        expected = weight[index - first] if index - first in inside else torch.zeros_like(weight[0])
        assert torch.equal(out[i], expected)
    assert gradient[:, 0].tolist() == [float(row in inside) for row in range(40)]
    empty = embedding(indices, weight[:0], vocab_range=(first, first))
    assert torch.equal(empty.view(torch.int32), torch.full_like(empty, -0.0).view(torch.int32))


def test_shards_add_up_to_the_table(device):
    case = lookup.make(300, 100, 64, torch.bfloat16)
    case.weight[::3] = -0.0
    whole = lookup.run(case, device.torch)
    total, gradients = torch.full_like(whole[0], -0.0), []
    for first, last in ((0, 33), (33, 34), (34, 100)):
        shard = lookup.Case(case.indices, case.weight[first:last], case.dy, vocab_range=(first, last))
        out, dweight = lookup.run(shard, device.torch)
        total += out
        gradients.append(dweight)
    assert torch.equal(total.view(torch.int16), whole[0].view(torch.int16))
    for shard, expected in zip(torch.cat(gradients), whole[1], strict=True):
        assert torch.allclose(shard, expected, rtol=2**-7)


OUTSIDE = [-1, 40, 2**31 - 1, -(2**31), 2**32 + 5, -(2**40)]


def test_index_outside_the_table(device):
    """On a CPU an error that names it. Elsewhere its row is NaN, and it passes no gradient."""
    case = lookup.make(7 * 6, 40, 64)
    case.indices = case.indices.view(7, 6)
    case.indices[2, :] = torch.tensor(OUTSIDE)
    case.dy = case.dy.view(7, 6, 64)
    if device.name == "cpu":
        with pytest.raises(IndexError, match=r"^indices\[2, 0\] is -1 and must be from 0 to 39\.$"):
            lookup.run(case, device.torch)
        return
    out, dweight = lookup.run(case, device.torch)
    assert out[2].isnan().all()
    case.vocab_range = (0, 40)  # as if they were another shard's
    expected, gradient, added = lookup.expected(case)
    rest = [0, 1, 3, 4, 5, 6]
    assert torch.equal(out[rest], expected[rest])
    lookup.check_gradient(dweight, gradient, added, 42)


def test_index_outside_a_sharded_table(device):
    weight = torch.ones(10, 64, device=device.torch)
    inside, outside = [5, 10, 19, 20, 0, 29], [-1, 30, 2**40]
    indices = torch.tensor(inside + outside, device=device.torch)
    place = {"vocab_range": (10, 20), "num_embeddings": 30}
    if device.name == "cpu":
        with pytest.raises(IndexError, match=r"indices\[6\] is -1 and must be from 0 to 29"):
            embedding(indices, weight, **place)
        return
    out = embedding(indices, weight, **place).cpu()
    assert torch.equal(out[:6], torch.tensor([0.0, 1, 1, 0, 0, 0]).unsqueeze(-1).expand(6, 64))
    assert out[6:].isnan().all()
    # Where nobody says how large the table is, only a negative index is known to be wrong.
    out = embedding(indices, weight, vocab_range=(10, 20)).cpu()
    assert out[6].isnan().all()
    assert torch.equal(out[7:], torch.zeros(2, 64))


@pytest.mark.parametrize("shape", [(0,), (0, 7), (3, 0)])
def test_no_indices(device, shape):
    weight = torch.randn(5, 64, device=device.torch, requires_grad=True)
    out = embedding(torch.empty(shape, dtype=torch.int64, device=device.torch), weight)
    assert out.shape == (*shape, 64)
    out.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_empty_tables(device):
    none = torch.empty(0, dtype=torch.int64, device=device.torch)
    weight = torch.empty(0, 64, device=device.torch, requires_grad=True)
    embedding(none, weight).sum().backward()
    assert weight.grad.shape == (0, 64)
    shard = torch.empty(0, 64, device=device.torch, requires_grad=True)  # more ranks than rows
    for sparse in (False, True):
        indices = torch.tensor([3, 1], device=device.torch)
        out = embedding(indices, shard, vocab_range=(2, 2), num_embeddings=4, sparse=sparse)
        (gradient,) = torch.autograd.grad(out.sum(), shard)
        assert torch.equal(out.detach().cpu(), torch.zeros(2, 64))
        assert gradient.to_dense().shape == (0, 64)
    no_columns = torch.empty(5, 0, device=device.torch, requires_grad=True)
    assert embedding(torch.tensor([3, 1], device=device.torch), no_columns).shape == (2, 0)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_a_table_without_columns(device, shape, sparse):
    weight = torch.empty(5, 0, device=device.torch, requires_grad=True)
    out = embedding(torch.ones(shape, dtype=torch.int64, device=device.torch), weight, sparse=sparse)
    assert out.shape == (*shape, 0)
    assert torch.autograd.grad(out.sum(), weight)[0].shape == (5, 0)


def test_gradient_that_is_one_number_everywhere(device):
    weight = torch.randn(5, 64, device=device.torch, requires_grad=True)
    embedding(torch.tensor([1, 1, 4], device=device.torch), weight).sum().backward()
    assert torch.equal(weight.grad.cpu(), torch.tensor([0.0, 2, 0, 0, 1]).unsqueeze(-1).expand(5, 64))


def test_frozen_table(device):
    weight = torch.randn(5, 64, device=device.torch)
    assert not embedding(torch.tensor([1], device=device.torch), weight).requires_grad


def test_table_tied_to_an_output_head(device):
    case = lookup.make(30, 20, 64)
    head = torch.randn(30, 20)
    tied, table, other = (lookup.leaf(case.weight, device.torch) for _ in range(3))
    indices, scale = case.indices.to(device.torch), head.to(device.torch)
    ((embedding(indices, tied) @ tied.t()) * scale).sum().backward()
    ((embedding(indices, table) @ other.t()) * scale).sum().backward()
    assert torch.allclose(tied.grad, table.grad + other.grad, rtol=1e-5, atol=1e-5)
    again = tied.grad.clone()
    ((embedding(indices, tied) @ tied.t()) * scale).sum().backward()
    assert torch.allclose(tied.grad, 2 * again)
