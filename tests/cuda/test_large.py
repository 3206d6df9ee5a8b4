"""Every operator on tensors of more than 2^31 elements: `hatch run cuda:large`, on a GPU of 100 GiB.

Sampled rows are compared with fp64. The same with small tensors runs on a CPU.
"""

from __future__ import annotations

import pytest
import torch
from large import EPS, Size, assert_near, assert_norm_near, assert_rows_near, attention, head, pieces, scores
from marks import cuda
from npu_attn_res import attn_res, attn_res_bank, attn_res_merge, attn_res_phase1
from npu_embedding import embedding
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_log_probs
from npu_rms_norm import add_rms_norm, rms_norm

SMALL = Size(2**16, "cpu")


@pytest.fixture(params=[pytest.param(SMALL, id="small"), pytest.param(Size(2**31, "cuda"), id="large", marks=cuda)])
def size(request):
    """The operators' tensors have that many elements."""
    torch.manual_seed(0)
    return request.param


def _norm_weight(size, width):
    return (size.random(width) * 0.3 + 1).requires_grad_()


@pytest.mark.parametrize(("width", "multiple"), [(4096, 2), (20000, 1)])
def test_rms_norm(size, width, multiple):
    rows = multiple * size.elements // width + 37
    x, dy, weight = size.random(rows, width), size.random(rows, width), _norm_weight(size, width)
    y = rms_norm(x.requires_grad_(), weight, EPS, casting_mode="gemma")
    y.backward(dy)
    assert_norm_near(x.detach(), weight.detach(), dy, y.detach(), x.grad, weight.grad, size.sampled(rows, width))


def test_rms_norm_of_slices(size):
    """Two slices of so many elements each, of a tensor with another row a slice: rows lie on two levels."""
    rows, width = size.elements // 4096 + 1, 4096
    x = size.random(2, rows + 1, width)[:, :rows].requires_grad_()
    dy, weight = size.random(2, rows, width), _norm_weight(size, width)
    y = rms_norm(x, weight, EPS, casting_mode="gemma")
    y.backward(dy)
    x_rows, dy, y, dx = (each.detach().reshape(-1, width) for each in (x, dy, y, x.grad))
    assert_norm_near(x_rows, weight.detach(), dy, y, dx, weight.grad, size.sampled(2 * rows, width))


def test_add_rms_norm(size):
    rows, width = size.elements // 4096 + 37, 4096
    x, residual, dy = (size.random(rows, width) for _ in range(3))
    weight, chosen = _norm_weight(size, width), size.sampled(rows, width)
    y, total = add_rms_norm(x.requires_grad_(), residual, weight, EPS, casting_mode="gemma")
    y.backward(dy)
    assert_norm_near(total.detach(), weight.detach(), dy, y.detach(), x.grad, weight.grad, chosen)
    assert torch.equal(total[chosen], x[chosen] + residual[chosen])


@pytest.mark.parametrize(
    ("width", "pitch", "dtype"), [(4096, 4096, torch.bfloat16), (1024, 1024, torch.float32), (4096, 8192, torch.bfloat16)]
)
def test_embedding(size, width, pitch, dtype):
    """Tables, one of rows that are parts of wider ones, and what is looked up in them."""
    rows = size.elements // width + 37
    weight = size.random(rows, pitch, dtype=dtype)[:, :width].requires_grad_()
    indices = torch.randint(0, rows, (rows + 5,), device=size.device)
    named = torch.tensor(size.sampled(rows, width), device=size.device)
    indices[: 3 * len(named)] = named.repeat(3)
    indices[-len(named) :] = named
    dy = size.random(rows + 5, width, dtype=dtype)
    out = embedding(indices, weight)
    out.backward(dy)
    for part in pieces(*out.shape):
        assert torch.equal(out[part], weight[indices[part]])
    for row in named.tolist():
        terms = dy[indices == row].double()
        assert_near(weight.grad[row], terms.sum(0), length=len(terms), scale=terms.square().sum(0).sqrt())
    absent = torch.bincount(indices, minlength=rows) == 0
    for part in pieces(rows, width):
        assert not weight.grad[part][absent[part]].any()


def _many_indices(size):
    weight = size.random(1000, 1).requires_grad_()
    return weight, torch.randint(0, 1000, (size.elements + 4096,), device=size.device, dtype=torch.int32)


def test_embedding_of_many_indices(size):
    weight, indices = _many_indices(size)
    out = embedding(indices, weight)
    for part in pieces(len(indices), 1):
        assert torch.equal(out[part], weight[indices[part]])


def test_gradient_of_many_indices(size):
    weight, indices = _many_indices(size)
    indices = indices[: size.elements - 4096]  # PyTorch sorts fewer than 2^31, and the gradient sorts them
    out = embedding(indices, weight)
    out.backward(torch.ones((), dtype=out.dtype, device=size.device).expand(out.shape))
    counts = sum(torch.bincount(indices[part], minlength=len(weight)) for part in pieces(len(indices), 1))
    wide = counts.double().unsqueeze(1)
    assert_near(weight.grad, wide, length=int(counts.max()), scale=wide.sqrt())


class Depth:
    """Tokens of so many elements, chosen ones, and the weights of Attention Residuals."""

    def __init__(self, size):
        self.width = 4096
        self.tokens = size.elements // self.width + 37
        self.chosen = size.sampled(self.tokens, self.width)
        self.weights = [(size.random(self.width) * scale).requires_grad_() for scale in (self.width**-0.5, 1.0)]
        self.constants = [weight.detach() for weight in self.weights]
        self.wide = [weight.double() for weight in self.constants]


@pytest.mark.parametrize("listed", [False, True])
def test_attn_res(size, listed):
    depth = Depth(size)
    blocks, dh = size.random(3, depth.tokens, depth.width), size.random(depth.tokens, depth.width)
    given = [block.requires_grad_() for block in blocks.unbind()] if listed else blocks.requires_grad_()
    h = attn_res(given, *depth.weights, rms_eps=EPS)
    h.backward(dh)
    dv = torch.stack([block.grad[depth.chosen] for block in given]) if listed else given.grad[:, depth.chosen]
    v = blocks.detach()[:, depth.chosen].double().requires_grad_()
    wanted = attention(v, *depth.wide)
    assert_rows_near(h[depth.chosen], wanted)
    assert_rows_near(dv, *torch.autograd.grad(wanted, v, dh[depth.chosen].double()))


def test_attn_res_bank(size):
    """A bank whose tokens lie further apart than its blocks, and rows of prefix and gradient inside wider ones."""
    depth, n_blocks = Depth(size), 2
    chosen = size._replace(elements=size.elements // (n_blocks + 1)).sampled(depth.tokens, depth.width)
    bank = size.random(depth.tokens, n_blocks + 1, depth.width).requires_grad_()
    prefix, dh = (size.random(depth.tokens, 2 * depth.width)[:, : depth.width] for _ in range(2))
    h = attn_res_bank(bank, n_blocks, prefix.requires_grad_(), *depth.constants, rms_eps=EPS).output
    dbank, dprefix = torch.autograd.grad(h, (bank, prefix), dh)
    v = torch.stack([*bank.detach()[chosen, :n_blocks].unbind(1), prefix.detach()[chosen]]).double().requires_grad_()
    wanted = attention(v, *depth.wide)
    assert_rows_near(h[chosen], wanted)
    dv = torch.stack([*dbank[chosen, :n_blocks].unbind(1), dprefix[chosen]])
    assert_rows_near(dv, *torch.autograd.grad(wanted, v, dh[chosen].double()))


def _layers(size, depth):
    """Two blocks, and the queries of two layers."""
    return size.random(2, depth.tokens, depth.width), size.random(2, depth.width) * depth.width**-0.5


def test_attn_res_phase1(size):
    depth = Depth(size)
    blocks, queries = (each.requires_grad_() for each in _layers(size, depth))
    o, lse = attn_res_phase1(queries, blocks, depth.constants[1], EPS)
    do = size.random(*o.shape, dtype=torch.float32)
    torch.autograd.backward(o, do)
    v = blocks.detach()[:, depth.chosen].double().requires_grad_()
    score = scores(v, queries.detach().double(), depth.wide[1])  # [N, S, T]
    wanted = torch.einsum("nst,ntd->std", torch.softmax(score, 0), v)
    assert_rows_near(o[:, depth.chosen], wanted)
    assert_rows_near(lse[:, depth.chosen], torch.logsumexp(score, 0))
    dv = torch.autograd.grad(wanted, v, do[:, depth.chosen].double())
    assert_rows_near(blocks.grad[:, depth.chosen], *dv)


def test_attn_res_merge(size):
    depth = Depth(size)
    blocks, queries = _layers(size, depth)
    o, lse = (each[0] for each in attn_res_phase1(queries, blocks, depth.constants[1], EPS))
    partial, x, dh = (size.random(depth.tokens, depth.width) for _ in range(3))
    state = [each.requires_grad_() for each in (o, lse.clone(), partial)]
    h = attn_res_merge(*state, *depth.constants, rms_eps=EPS, layer_output=x)[0]
    h.backward(dh)
    before, lse, last = (each.detach()[depth.chosen].double().requires_grad_() for each in state)
    together = (last + x[depth.chosen].double()).to(partial.dtype).double()
    score = torch.stack([lse, scores(together.unsqueeze(0), *depth.wide)[0]])
    wanted = (torch.softmax(score, 0).unsqueeze(-1) * torch.stack([before, together])).sum(0)
    do, dlse = torch.autograd.grad(wanted, (before, lse), dh[depth.chosen].double())
    assert_rows_near(h[depth.chosen], wanted)
    assert_rows_near(o.grad[depth.chosen], do)
    assert_rows_near(state[1].grad[depth.chosen].unsqueeze(0), dlse.unsqueeze(0))


@pytest.fixture(params=["x", "rows of x apart", "weight", "logits"])
def model(size, request):
    """Activations, weights, or one chunk of logits, of so many elements; options for the chunk."""
    many, narrow = size.elements // 2048 + 37, min(1024, size.elements // 1024)
    tokens, width, pitch, vocabulary = {
        "x": (many, 2048, 2048, 1000),
        "rows of x apart": (many, 2048, 4096, 1000),
        "weight": (256, 2048, 2048, many),
        "logits": (size.elements // 131072 + 37, narrow, narrow, 131101),
    }[request.param]
    chunks = {"chunk_tokens": tokens, "memory_budget": 2**36} if request.param == "logits" else {}
    x, weight = size.random(tokens, pitch)[:, :width], size.random(vocabulary, width) * (2 * width**-0.5)
    target = torch.randint(0, vocabulary, (tokens,), device=size.device)
    rows, columns = size.sampled(tokens, vocabulary if chunks else width), size.sampled(vocabulary, width)
    return head(x, weight, target, rows, columns), chunks


@pytest.mark.slow
def test_cross_entropy(model, request):
    exact, chunks = model
    loss = fused_linear_cross_entropy(exact.x, exact.weight, exact.target, reduction="sum", **chunks)
    loss.backward()
    wanted = -float(exact.log_probs.sum())
    assert loss.item() == pytest.approx(wanted, rel=0, abs=float(exact.log_probs.abs().sum()) * exact.logit_error)
    exact.assert_gradients_near(exact.distance() if request.node.callspec.params["model"] == "weight" else 0)


@pytest.mark.slow
def test_log_probs(model):
    exact, chunks = model
    log_probs = linear_log_probs(exact.x, exact.weight, exact.target, **chunks)
    (-log_probs).backward(torch.ones_like(log_probs))
    # A tensor core cuts digits off: its errors are shares of a logit.
    allowed = (1 + exact.log_probs.abs() + exact.logits.abs()) * exact.logit_error
    assert ((log_probs.detach().double() - exact.log_probs).abs() / allowed).max() <= 1
    exact.assert_gradients_near()


def test_a_wrong_row_is_found(monkeypatch):
    right = rms_norm
    monkeypatch.setitem(globals(), "rms_norm", lambda *args, **options: _last_row_off(right(*args, **options)))
    with pytest.raises(AssertionError, match="a share of what is allowed"):
        test_rms_norm(SMALL, 4096, 2)


def _last_row_off(y):
    return torch.cat((y[:-1], y[-1:] * 1.05))
