"""The two phases of Block AttnRes, wherever they run, against attention over all blocks in fp64."""

import depth
import pytest
import torch
from npu_attn_res import BlockAttnRes, attn_res, attn_res_merge, attn_res_phase1

pytestmark = pytest.mark.usefixtures("npu_poisoned")
EPS = 1e-6


def inputs(n_blocks, n_layers, tokens, width, dtype, device, seed=0):
    """Blocks, one partial sum a layer, queries, norms and gradients of the layers' inputs."""
    case = depth.make(n_blocks + n_layers, tokens, width, dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(n_layers, width, generator=generator) * (2 / width**0.5)
    norms = 1 + 0.3 * torch.randn(n_layers, width, generator=generator)
    dh = torch.randn(n_layers, *case.dh.shape, generator=generator).to(dtype)
    blocks, partials = case.blocks[:n_blocks], case.blocks[n_blocks:]
    return [depth.leaf(tensor, device) for tensor in (blocks, partials, queries, norms)], dh.to(device)


def exact(leaves, dh):
    blocks, partials, queries, norms = (leaf.detach().cpu().double().requires_grad_() for leaf in leaves)
    h = [depth.formula(torch.cat((blocks, partials[i : i + 1])), queries[i], norms[i], EPS)[0] for i in range(len(queries))]
    gradients = torch.autograd.grad(torch.stack(h), (blocks, partials, queries, norms), dh.cpu().double())
    return [torch.stack(h).detach(), *gradients]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("n_layers", "width", "dtype"),
    [(1, 256, torch.float32), (5, 256, torch.bfloat16), (8, 4096, torch.bfloat16), (3, 16384, torch.float32)],
)
def test_both_phases_are_attention_over_all_blocks(device, n_layers, width, dtype):
    leaves, dh = inputs(3, n_layers, 6, width, dtype, device.torch)
    blocks, partials, queries, norms = leaves
    state = attn_res_phase1(queries, blocks, norms, EPS)
    assert [found.shape for found in state] == [(n_layers, 6, width), (n_layers, 6)]
    h = [
        attn_res_merge(*(found[i] for found in state), partials[i], queries[i], norms[i], rms_eps=EPS).output
        for i in range(n_layers)
    ]
    results = [torch.stack(h), *torch.autograd.grad(torch.stack(h), leaves, dh)]
    for actual, expected in zip(results, exact(leaves, dh), strict=True):
        depth.near(actual.detach().cpu(), expected, fp32=3e-4)


@pytest.mark.parametrize("width", [256, 16896])
def test_queries_weights_and_gradients_may_lie_with_their_layers_side_by_side(device, width):
    """As transposed parameters do. Of 16896 columns no whole rows fit on a GPU either."""
    (blocks, _, queries, norms), _ = inputs(3, 3, 4, width, torch.float32, device.torch)
    do = torch.randn(3, 4, width, generator=torch.Generator().manual_seed(1)).to(device.torch)

    def results(lie):
        own = [lie(leaf.detach()).requires_grad_() for leaf in (queries, norms)]
        o, lse = attn_res_phase1(own[0], blocks, own[1], EPS)
        return o, lse, *torch.autograd.grad(o, [blocks, *own], lie(do))

    for found, expected in zip(results(side_by_side), results(torch.Tensor.contiguous), strict=True):
        depth.near(found.detach().cpu(), expected.detach().cpu(), fp32=3e-4)


def side_by_side(tensor):
    found = tensor.movedim(0, -1).contiguous().movedim(-1, 0)
    assert found.stride(0) == 1
    return found


@pytest.mark.parametrize("listed", [False, True], ids=["stacked", "list"])
@pytest.mark.parametrize("norms", ["shared", "own"])
def test_first_phase_alone(device, listed, norms):
    """Each result by itself has its gradient."""
    (blocks, _, queries, weight), _ = inputs(4, 3, (2, 5), 256, torch.float32, device.torch)
    weight = weight[0].detach().requires_grad_() if norms == "shared" else weight
    given = [block.detach().requires_grad_() for block in blocks] if listed else blocks
    results = attn_res_phase1(queries, given, weight, EPS)
    wide = [tensor.detach().cpu().double().requires_grad_() for tensor in (blocks, queries, weight)]
    keys = wide[0] * torch.rsqrt(wide[0].square().mean(-1, keepdim=True) + EPS)
    score = torch.einsum("sd,nabd->nsab", wide[1] * wide[2], keys)
    expected = torch.einsum("nsab,nabd->sabd", torch.softmax(score, 0), wide[0]), torch.logsumexp(score, 0)
    for actual, wanted in zip(results, expected, strict=True):
        depth.near(actual.detach().cpu(), wanted.detach())
        direction = torch.randn_like(wanted)
        leaves = [*given, queries, weight] if listed else [given, queries, weight]
        found = torch.autograd.grad(actual, leaves, direction.float().to(device.torch), retain_graph=True)
        gradients = torch.autograd.grad(wanted, wide, direction, retain_graph=True)
        dblocks = torch.stack(found[:-2]) if listed else found[0]
        for gradient, of in zip((dblocks, *found[-2:]), gradients, strict=True):
            depth.near(gradient.cpu(), of, fp32=3e-4)


def test_weights_add_up_to_one_at_large_scores(device):
    """Blocks and a prefix that are all one row: h is that row, and no gradient reaches the scores, which are about 1000."""
    row = torch.randn(256, generator=torch.Generator().manual_seed(0)).to(device.torch)
    norm = torch.ones(256, device=device.torch)
    query = 1000 * row / row.square().mean().sqrt() / 256
    leaves = [row.expand(3, 7, 256).clone(), row.expand(7, 256).clone(), query[None].clone()]
    blocks, partial, queries = [leaf.requires_grad_() for leaf in leaves]
    o, lse = attn_res_phase1(queries, blocks, norm, EPS)
    assert lse.min() > 990
    h = attn_res_merge(o[0], lse[0], partial, queries[0], norm, rms_eps=EPS).output
    assert torch.allclose(h, row, rtol=2e-6, atol=0)
    dh = torch.randn(7, 256, generator=torch.Generator().manual_seed(1)).to(device.torch)
    dblocks, dpartial, dqueries = torch.autograd.grad(h, [blocks, partial, queries], dh)
    assert torch.allclose(dblocks.sum(0) + dpartial, dh, rtol=0, atol=2e-3)
    assert dqueries.abs().max() < 1e-3


@pytest.mark.parametrize(("width", "dtype"), [(256, torch.float32), (4096, torch.bfloat16), (16384, torch.bfloat16)])
def test_output_joins_the_partial_sum_and_norm_follows(device, width, dtype):
    (blocks, partials, queries, norms), dh = inputs(3, 1, 7, width, dtype, device.torch)
    partial, query, norm = partials[0].detach().requires_grad_(), queries[0].detach(), norms[0].detach()
    x, weight = (torch.randn(shape, device=device.torch).to(dtype).requires_grad_() for shape in ((7, width), (width,)))
    leaves = [partial, x, query.requires_grad_(), norm.requires_grad_(), weight]
    state = [found[0].detach() for found in attn_res_phase1(queries, blocks, norms, EPS)]
    h, y, total, _ = attn_res_merge(*state, *leaves[:1], query, norm, rms_eps=EPS, layer_output=x, output_rms_weight=weight)
    assert torch.equal(total, (partial.float() + x.float()).to(dtype))

    steps = attn_res_merge(*state, total.detach().requires_grad_(), query, norm, rms_eps=EPS).output
    assert torch.equal(h, steps)
    stored, wide = h.detach().cpu().double().requires_grad_(), weight.detach().cpu().double().requires_grad_()
    normalised = stored * torch.rsqrt(stored.square().mean(-1, keepdim=True) + EPS) * wide
    depth.near(y.detach().cpu(), normalised.detach())

    dy, dtotal = torch.randn(2, 7, width, device=device.torch).to(dtype)
    dpartial, dx, *_, dweight = torch.autograd.grad((h, y, total), leaves, (dh[0], dy, dtotal))
    assert torch.equal(dpartial, dx)
    of_h, of_weight = torch.autograd.grad(normalised, (stored, wide), dy.cpu().double())
    depth.near(dweight.cpu(), of_weight, fp32=1e-3)
    exact_total = total.detach().cpu().double().requires_grad_()
    everything = torch.cat((blocks.detach().cpu().double(), exact_total[None]))
    exact_h, _ = depth.formula(everything, query.detach().cpu().double(), norm.detach().cpu().double(), EPS)
    (expected,) = torch.autograd.grad(exact_h, exact_total, dh[0].cpu().double() + of_h)
    depth.near(dpartial.cpu(), expected + dtotal.cpu().double(), fp32=2e-4)


def test_state_needs_no_gradient_where_blocks_are_frozen(device):
    (blocks, partials, queries, norms), dh = inputs(3, 1, 7, 256, torch.float32, device.torch)
    state = [found[0] for found in attn_res_phase1(queries.detach(), blocks.detach(), norms.detach(), EPS)]
    h = attn_res_merge(*state, partials[0], queries[0], norms[0], rms_eps=EPS).output
    (gradient,) = torch.autograd.grad(h, partials, dh[0])
    depth.near(gradient.cpu(), exact((blocks, partials, queries, norms), dh)[2], fp32=1e-4)


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_no_tokens(device, shape):
    blocks = torch.randn(3, *shape, 64, device=device.torch, requires_grad=True)
    queries = torch.randn(2, 64, device=device.torch, requires_grad=True)
    norm = torch.ones(64, device=device.torch, requires_grad=True)
    state = [found[0] for found in attn_res_phase1(queries, blocks, norm)]
    h, _, total, _ = attn_res_merge(*state, blocks[0], queries[0], norm, layer_output=blocks[1])
    assert h.shape == total.shape == (*shape, 64)
    (h.sum() + total.sum()).backward()
    assert blocks.grad.shape == blocks.shape
    assert not queries.grad.any()


def test_helper_is_attention_over_blocks_and_partial_sums(device):
    torch.manual_seed(0)
    dtype, tolerance = torch.float32, 1e-5
    width, n_layers, block_size = 256, 5, 2
    attention = BlockAttnRes(width, n_layers + 1, block_size, device=device.torch)
    for weight in attention.parameters():
        torch.nn.init.normal_(weight, 0.1, 0.1)
    layers = [torch.randn(width, device=device.torch).to(dtype) for _ in range(n_layers)]
    embedding = torch.randn(3, 4, width, device=device.torch).to(dtype).requires_grad_()

    depth_ = attention.start(embedding)
    inputs_ = []
    for layer in layers:
        inputs_.append(depth_.input())
        depth_.add(torch.sin(inputs_[-1]) * layer)
    inputs_.append(depth_.input())

    blocks, partial, expected = [embedding], None, []
    for i in range(n_layers + 1):
        if i and i % block_size == 0:
            blocks, partial = [*blocks, partial], None
        sources = blocks if partial is None else [*blocks, partial]
        expected.append(attn_res(sources, attention.query[i], attention.rms_weight[i]))
        if i < n_layers:
            output = torch.sin(expected[-1]) * layers[i]
            partial = output if partial is None else partial + output
    for actual, wanted in zip(inputs_, expected, strict=True):
        assert actual.dtype == dtype
        assert torch.allclose(actual, wanted, rtol=tolerance, atol=tolerance)
    leaves = [embedding, *attention.parameters()]
    found = torch.autograd.grad(inputs_[-1].float().square().sum(), leaves)
    for actual, wanted in zip(found, torch.autograd.grad(expected[-1].float().square().sum(), leaves), strict=True):
        assert torch.allclose(actual, wanted, rtol=20 * tolerance, atol=20 * tolerance * wanted.abs().max())


def test_helper_refuses_a_wrong_order(device):
    attention = BlockAttnRes(8, 2, 2)
    depth_ = attention.start(torch.randn(3, 8))
    h = depth_.input()
    with pytest.raises(ValueError, match="output of layer 0 is missing"):
        depth_.input()
    depth_ = attention.start(torch.randn(3, 8))
    depth_.input()
    depth_.add(h)
    with pytest.raises(ValueError, match="twice"):
        depth_.add(h)
    depth_.input()
    depth_.add(h)
    with pytest.raises(ValueError, match="n_inputs, 2"):
        depth_.input()
