"""The operator, wherever it runs, against fp64."""

import math

import depth
import pytest
import torch
from npu_attn_res import attn_res, attn_res_bank

pytestmark = pytest.mark.usefixtures("npu_poisoned")


@pytest.mark.parametrize("n_blocks", [1, 2, 3, 8, 32, 33, 128])
@pytest.mark.parametrize("listed", [False, True], ids=["stacked", "list"])
def test_any_number_of_blocks(device, n_blocks, listed):
    case = depth.make(n_blocks, 5, 256, torch.bfloat16)
    depth.check(case, depth.run(case, device.torch, listed))


@pytest.mark.few(4)
@pytest.mark.parametrize("width", [1, 123, 1000, 4096, 5120, 7168, 8192, 16384])
def test_every_width(device, width):
    case = depth.make(3, 7, width, torch.bfloat16)
    depth.check(case, depth.run(case, device.torch))


@pytest.mark.parametrize(("width", "dtype"), [(123, torch.float32), (8192, torch.float32), (4096, torch.float16)])
def test_other_dtypes(device, dtype, width):
    case = depth.make(3, 7, width, dtype)
    depth.check(case, depth.run(case, device.torch, listed=True))


@pytest.mark.parametrize("tokens", [1, (2, 3, 4), ()])
def test_any_leading_shape(device, tokens):
    case = depth.make(3, tokens, 256, torch.float32)
    results = depth.run(case, device.torch)
    assert results[0].shape == case.dh.shape
    depth.check(case, results)


def test_an_eps_beyond_fp32_leaves_the_mean(device):
    blocks, query = torch.randn(3, 5, 16, device=device.torch), torch.randn(16, device=device.torch)
    for eps in (4e38, math.inf):
        found = attn_res(blocks, query, torch.ones_like(query), rms_eps=eps)
        torch.testing.assert_close(found, blocks.mean(0))


@pytest.mark.parametrize("sharp", [30.0, 300.0])
@pytest.mark.parametrize(("n_blocks", "width"), [(8, 1000), (3, 16384)], ids=["whole rows", "columns"])
def test_gradients_are_exact_where_weights_are_sharp(device, sharp, n_blocks, width):
    """delta from the rounded h would be off by more than is allowed here."""
    case = depth.make(n_blocks, 20, width, torch.bfloat16, sharp=sharp)
    results = depth.run(case, device.torch)
    depth.check(case, results)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("n_blocks", "width", "dtype"),
    [(3, 256, torch.float32), (11, 1000, torch.bfloat16), (5, 4096, torch.bfloat16), (3, 20000, torch.float32)],
)
@pytest.mark.parametrize("beside", [False, True], ids=["", "beside a prefix"])
def test_gradients_do_not_feel_that_the_log_sum_is_rounded(device, n_blocks, width, dtype, beside):
    """Equal blocks: none of their scores has a gradient, and exp(s - lse) does not sum to 1 where scores are near 1000."""
    torch.manual_seed(0)
    direction = torch.where(torch.rand(width) < 0.5, -1.0, 1.0)
    row = (direction + 0.25 * torch.randn(9, width)).to(dtype)
    query = (1000 / width * direction).to(dtype).to(device.torch).requires_grad_()
    blocks = row.repeat(n_blocks, 1, 1).to(device.torch).requires_grad_()
    weight, dh = torch.ones(width, dtype=dtype, device=device.torch), row.to(device.torch)
    prefix = row.to(device.torch).requires_grad_()
    if beside:
        h = attn_res_bank(blocks.movedim(0, -2), None, prefix, query, weight).output
    else:
        h = attn_res(blocks, query, weight)
    h.backward(dh)
    wanted = row.double() / (n_blocks + beside)
    for gradient in (*blocks.grad, *([prefix.grad] if beside else [])):
        torch.testing.assert_close(gradient.cpu().double(), wanted, rtol=2**-8, atol=1e-3)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("width", "normalised", "by"),
    [(512, False, 25.0), (512, False, 60.0), (512, True, 200.0), (5120, True, 60.0), (5120, False, 200.0)],
)
def test_a_later_block_may_score_much_higher_than_the_first(device, width, normalised, by):
    """Of one token alone, amid others of the same program: before it, beside it and after it."""
    tokens, at = (20, 11) if device.name == "cpu" else (700, 331)  # a CPU has no programs
    case = depth.make(5, tokens, width, torch.bfloat16, seed=3)
    direction = case.query.double() * case.rms_weight.double()
    along = direction / direction.norm() * math.sqrt(width)  # scores |direction| sqrt(width)
    case.query.mul_(by / float(direction @ along))
    case.blocks[:, at] = 0.1 * torch.randn(5, width)
    case.blocks[3, at] = along.bfloat16()
    case.blocks[2, at - 1] = float("nan")
    _, query, norm = (tensor.double() for tensor in (case.blocks, case.query, case.rms_weight))
    wanted, alpha = depth.formula(case.blocks.double(), query, norm, case.eps)
    assert alpha[3, at] > 0.99
    weight = torch.ones(width, dtype=torch.bfloat16) if normalised else None
    inputs = [tensor.to(device.torch) for tensor in (case.blocks, case.query, case.rms_weight)]
    h = attn_res(*inputs, output_rms_weight=None if weight is None else weight.to(device.torch))
    h = (h[0] if normalised else h).cpu().double()
    assert h[at - 1].isnan().all()
    others = torch.arange(tokens) != at - 1
    torch.testing.assert_close(h[others], wanted[others], rtol=2**-7, atol=2**-7)


def test_parameters_may_be_fp32(device):
    case = depth.make(3, 7, 256, torch.bfloat16, torch.float32)
    results = depth.run(case, device.torch)
    depth.check(case, results)
    assert [result.dtype for result in results] == [torch.bfloat16] * 2 + [torch.float32] * 2


@pytest.mark.parametrize("shape", [(0,), (0, 7)])
@pytest.mark.parametrize("listed", [False, True], ids=["stacked", "list"])
def test_no_tokens(device, shape, listed):
    case = depth.make(3, shape, 64, torch.bfloat16)
    h, dblocks, dquery, dnorm = depth.run(case, device.torch, listed)
    assert h.shape == (*shape, 64)
    assert dblocks.shape == (3, *shape, 64)
    assert not dquery.any()
    assert not dnorm.any()


@pytest.mark.parametrize("width", [256, 16384])
def test_weights_are_returned(device, width):
    case = depth.make(4, 6, width, torch.bfloat16)
    tensors = case.blocks.to(device.torch), case.query.to(device.torch).requires_grad_(), case.rms_weight.to(device.torch)
    h, *_, alpha = attn_res(*tensors, rms_eps=case.eps, return_weights=True)
    expected = depth.formula(case.blocks.double(), case.query.double(), case.rms_weight.double(), case.eps)[1]
    assert torch.allclose(alpha.cpu().double(), expected, rtol=1e-4, atol=1e-6)
    assert h.requires_grad
    assert not alpha.requires_grad
    with torch.no_grad():
        assert torch.equal(attn_res(*tensors, rms_eps=case.eps, return_weights=True).weights, alpha)


@pytest.mark.few(2)
@pytest.mark.parametrize("listed", [False, True], ids=["stacked", "list"])
@pytest.mark.parametrize("width", [256, 4096, 16384])
def test_normalised_output_is_the_two_steps(device, width, listed):
    case = depth.make(3, 7, width, torch.bfloat16)
    weight, dy = torch.randn(width).bfloat16(), torch.randn(7, width).bfloat16()
    blocks, *weights = case.leaves(device.torch, listed)
    leaves = [*blocks, *weights, depth.leaf(weight, device.torch)]
    h, y, *_ = attn_res(
        blocks if listed else blocks[0], *weights, rms_eps=case.eps, output_rms_weight=leaves[-1], output_rms_eps=1e-5
    )
    gradients = torch.autograd.grad((h, y), leaves, (case.dh.to(device.torch), dy.to(device.torch)))
    # From the stored h on it is RMSNorm; its gradient joins that of h in fp32.
    stored, wide = h.detach().cpu().double().requires_grad_(), weight.double().requires_grad_()
    normalised = stored * torch.rsqrt(stored.square().mean(-1, keepdim=True) + 1e-5) * wide
    of_h, of_weight = torch.autograd.grad(normalised, (stored, wide), dy.double())
    depth.near(y.detach().cpu(), normalised.detach())
    depth.near(gradients[-1].cpu(), of_weight, fp32=1e-3)
    case.dh = case.dh.double() + of_h
    found = [gradient.cpu() for gradient in gradients[:-1]]
    dblocks = torch.stack(found[:-2]) if listed else found[0]
    depth.check(case, (h.detach().cpu(), dblocks, *found[-2:]))


def test_either_output_may_be_unused(device):
    case = depth.make(3, 7, 256, torch.float32)
    blocks, *weights = case.leaves(device.torch, False)
    output_rms_weight = torch.randn(256, device=device.torch, requires_grad=True)
    h, y, *_ = attn_res(blocks[0], *weights, rms_eps=case.eps, output_rms_weight=output_rms_weight)
    leaves = (blocks[0], *weights)
    only_h = torch.autograd.grad(h, leaves, case.dh.to(device.torch), retain_graph=True)
    for actual, expected in zip(only_h, depth.run(case, device.torch)[1:], strict=True):
        assert torch.equal(actual.cpu(), expected)
    only_y = torch.autograd.grad(y, leaves, case.dh.to(device.torch), retain_graph=True)
    zero = torch.zeros_like(h)
    both = torch.autograd.grad((h, y), leaves, (zero, case.dh.to(device.torch)))
    for actual, expected in zip(only_y, both, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("width", [64, 20000])
def test_a_bad_token_spoils_no_other(device, width):
    case = depth.make(3, 9, width, torch.float32)
    expected = depth.run(case, device.torch)
    case.blocks[1, 4, 7], case.dh[6, 3] = float("nan"), float("inf")
    h, dblocks, *_ = depth.run(case, device.torch)
    others = [0, 1, 2, 3, 5, 7, 8]
    assert torch.isnan(h[4]).any()
    assert torch.equal(h[[*others, 6]], expected[0][[*others, 6]])
    assert torch.equal(dblocks[:, others], expected[1][:, others])


@pytest.mark.parametrize("width", [512, 16384])
def test_same_bits_every_time(device, width):
    case = depth.make(4, 100, width, torch.bfloat16)
    first = depth.run(case, device.torch)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(first, depth.run(case, device.torch), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [-25.0, 0.0])
def test_elements_whose_squares_overflow_do_not_overflow_the_sum(device, dtype, first):
    """Their score is zero, 25 above the first block's, and their sum, not yet divided, e^25 times as large as they are."""
    blocks = torch.zeros(3, 40, 16, dtype=dtype)
    blocks[0, ..., 0] = first
    blocks[1, 17:, 1] = 1e30
    blocks[2, ..., 2] = 1.0
    query = torch.zeros(16)
    query[0] = 6.25  # of a row that is one element, k is 4 times its sign
    ones = torch.ones(16)
    h = attn_res(blocks.to(device.torch), query.to(device.torch), ones.to(device.torch)).cpu().double()
    v = blocks.double()
    k = v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    k[1, 17:] = 0.0  # in fp32
    expected = (torch.softmax(k @ query.double(), 0).unsqueeze(-1) * v).sum(0)
    assert torch.isfinite(h).all()
    torch.testing.assert_close(h, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)
