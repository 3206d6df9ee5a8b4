"""Scaled rows, normalised rows and rows of 8 bits, against their definition and PyTorch's own functions."""

import pytest
import torch
from lookup import ROWS, check_gradient, leaf, small_table
from npu_embedding import embedding, embedding_bag

pytestmark = pytest.mark.usefixtures("npu_poisoned")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_rows_are_those_of_gemma(device, dtype):
    """Equal in bits to the rows times a scale that is rounded to the table's dtype. The gradient sums rounded rows."""
    indices, weight, _ = small_table(30, 72, dtype)
    scale = torch.tensor(72**0.5).to(dtype)
    ours, theirs = leaf(weight, device.torch), leaf(weight, "cpu")
    out = embedding(indices.to(device.torch), ours, multiplier=float(scale))
    exact = theirs[indices] * scale
    assert torch.equal(out.cpu(), exact)
    dy = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (gradient,) = torch.autograd.grad(out, ours, dy.to(device.torch))
    rows = (dy * scale).double()
    summed, size = (torch.zeros(ROWS, 72).double().index_add(0, indices, each) for each in (rows, rows.abs()))
    check_gradient(gradient.cpu(), summed, size, 30)


@pytest.mark.parametrize(
    ("width", "dtype"), [(64, torch.bfloat16), (37, torch.float32), (7168, torch.bfloat16), (70000, torch.float32)]
)
def test_normalised_rows(device, width, dtype):
    """Scaled, then an RMSNorm without a weight: against fp64. Rows that are moved as tiles, one by one, and in columns:
    on Ascend the gradient of 7168, and both of 70000, on CUDA too."""
    indices, weight, _ = small_table(90, width, dtype)
    ours, exact = leaf(weight, device.torch), weight.double().requires_grad_()
    out = embedding(indices.to(device.torch), ours, 3, multiplier=2.0, rms_norm_eps=1e-3)
    rows = torch.nn.functional.rms_norm(2 * torch.nn.functional.embedding(indices, exact, 3), (width,), eps=1e-3)
    tolerance = 2 * torch.finfo(dtype).eps
    assert torch.allclose(out.cpu().double(), rows, rtol=tolerance, atol=1e-5)
    dy = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (gradient,), (expected,) = (
        torch.autograd.grad(out, ours, dy.to(device.torch)),
        torch.autograd.grad(rows, exact, dy.double()),
    )
    assert torch.allclose(gradient.cpu().double(), expected, rtol=4 * tolerance, atol=8 * tolerance)
    shards = [
        embedding(
            indices.to(device.torch), weight[first:last].to(device.torch), vocab_range=(first, last), num_embeddings=ROWS,
            multiplier=2.0, rms_norm_eps=1e-3,
        )
        for first, last in ((0, 13), (13, ROWS))
    ]  # fmt: skip
    assert torch.equal(sum(shards), out)


@pytest.mark.parametrize("width", [64, 37, 70000])
def test_normalised_rows_of_a_shard_without_eps(device, width):
    """Rows of other shards are zeros, and an id outside the whole table is NaN: rows one by one, tiles, and columns."""
    indices, weight, _ = small_table(30, width)
    given = indices if device.name == "cpu" else torch.cat((indices, torch.tensor([ROWS])))
    whole, parts = leaf(weight, device.torch), []
    for first, last in ((0, 13), (13, 13), (13, ROWS)):
        shard, options = whole[first:last], {"vocab_range": (first, last), "num_embeddings": ROWS, "rms_norm_eps": 0.0}
        parts.append(embedding(given.to(device.torch), shard, **options))
    out = torch.nn.functional.rms_norm(whole[indices.to(device.torch)], (width,), eps=0.0)
    assert torch.allclose(sum(parts)[:30], out, rtol=1e-5, atol=1e-6)
    assert sum(parts)[30:].isnan().all()
    found, right = (torch.autograd.grad(each[:30].square().sum(), whole)[0] for each in (sum(parts), out))
    assert torch.allclose(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", [0, 1])
def test_the_scale_of_no_row_reaches_rows_of_other_shards(device, place):
    rows, scales = torch.ones(5, 64, dtype=torch.int8, device=device.torch), torch.ones(5, device=device.torch)
    scales[0] = torch.inf
    ids = torch.tensor([[7, 1], [1, 7]][place], device=device.torch)
    out = embedding(ids, rows, row_scales=scales, vocab_range=(0, 5), num_embeddings=10)
    assert out[:, 0].tolist() == [[0, 1], [1, 0]][place]


def test_scaled_rows_of_a_shard(device):
    indices, weight, _ = small_table(30, 64)
    parts = [
        embedding(
            indices.to(device.torch), weight[first:last].to(device.torch), vocab_range=(first, last), num_embeddings=ROWS,
            multiplier=2.0,
        )
        for first, last in ((0, 13), (13, 13), (13, ROWS))
    ]  # fmt: skip
    assert torch.equal(sum(parts).cpu(), 2 * weight[indices])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(torch.int8, torch.float32), (torch.float8_e4m3fn, torch.bfloat16), (torch.float8_e5m2, torch.float32)],
)
def test_rows_of_8_bits(device, kind, dtype):
    """Every number that 8 bits have, decoded and scaled in one launch, alone and in bags; int32 and int64 indices."""
    numbers = torch.arange(256).to(torch.uint8).view(torch.int8).view(kind)
    table = torch.stack([numbers.view(torch.int8).roll(i) for i in range(6)]).view(kind)[:, :250]
    scales, indices = torch.tensor([1.0, 0.5, 3, 1e-3, 7, 100]), torch.tensor([[5, 0, 2], [1, 1, 3]])
    exact = table.float()[indices.view(-1)].view(2, 3, 250) * scales[indices].unsqueeze(-1)
    ours = [each.to(device.torch) for each in (indices.int(), table.view(torch.int8), scales)]
    ours[1] = ours[1].view(kind)  # torch_npu copies no 8-bit floats over the stand-in of CANN
    out = embedding(*ours[:2], row_scales=ours[2], dtype=dtype).cpu()
    assert torch.equal(out.isnan(), exact.isnan()) and torch.equal(out.nan_to_num(3), exact.to(dtype).nan_to_num(3))
    bags = embedding_bag(ours[0].long(), *ours[1:2], mode="sum", row_scales=ours[2], dtype=dtype).cpu()
    tolerance = torch.finfo(dtype).eps
    assert torch.allclose(bags.float(), exact.sum(1), rtol=tolerance, atol=1e-5, equal_nan=True)
