"""RMSNorm, the embedding and Attention Residuals: operators whose results are rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from npu_attn_res import attn_res, attn_res_bank, attn_res_merge, attn_res_phase1
from npu_embedding import embedding
from npu_rms_norm import add_rms_norm, rms_norm
from torch import Tensor

from .compare import FP32_UNIT, said, sampled, shares, worst

Result = tuple[str, dict[str, float]]
EPS = 1e-6


def norms(elements: int, device: torch.device) -> Iterator[Result]:
    """Rows past 2^32 elements, and a residual."""
    for width, multiple in ((4096, 2), (20000, 1)):
        rows = multiple * elements // width + 37
        x, dy = (_random(rows, width, device=device) for _ in range(2))
        weight = (_random(width, device=device) * 0.3 + 1).requires_grad_()
        y = rms_norm(x.requires_grad_(), weight, EPS, casting_mode="gemma")
        y.backward(dy)
        found = _norm(x.detach(), weight.detach(), dy, y.detach(), x.grad, weight.grad, elements)
        yield f"rms_norm, x {said(x.shape, x.dtype)}", found
        del x, dy, y
    # Two slices of so many elements each, of a tensor with another row a slice: rows lie on two levels.
    rows, width = elements // 4096 + 1, 4096
    base, dy = _random(2, rows + 1, width, device=device), _random(2, rows, width, device=device)
    weight = (_random(width, device=device) * 0.3 + 1).requires_grad_()
    x = base[:, :rows].requires_grad_()
    y = rms_norm(x, weight, EPS, casting_mode="gemma")
    y.backward(dy)
    assert x.grad is not None
    flat = [each.detach().reshape(-1, width) for each in (x, dy, y, x.grad)]
    found = _norm(flat[0], weight.detach(), flat[1], flat[2], flat[3], weight.grad, elements)
    yield f"rms_norm, slices of x {said(x.shape, x.dtype)}", found
    del base, x, dy, y, flat
    rows, width = elements // 4096 + 37, 4096
    x, residual, dy = (_random(rows, width, device=device) for _ in range(3))
    weight = (_random(width, device=device) * 0.3 + 1).requires_grad_()
    y, total = add_rms_norm(x.requires_grad_(), residual, weight, EPS, casting_mode="gemma")
    y.backward(dy)
    found = _norm(total.detach(), weight.detach(), dy, y.detach(), x.grad, weight.grad, elements)
    whole = max(
        float((total[i].detach() - (x[i].detach() + residual[i])).abs().max()) for i in sampled(rows, width, elements)
    )
    yield f"add_rms_norm, x {said(x.shape, x.dtype)}", {**found, "the sum's distance": whole}


def _norm(
    x: Tensor, weight: Tensor, dy: Tensor, y: Tensor, dx: Tensor | None, dweight: Tensor | None, elements: int
) -> dict[str, float]:
    assert dx is not None
    assert dweight is not None
    rows, width = x.shape
    found = {"y": 0.0, "dx": 0.0}
    for i in sampled(rows, width, elements):
        row, g = x[i].double(), dy[i].double() * weight.double()
        rstd = torch.rsqrt(row.square().mean() + EPS)
        n = row * rstd
        found["y"] = max(found["y"], worst(y[i], n * weight.double(), length=width, scale=(n * weight.double()).abs()))
        size = (g.abs() + n.abs() * g.abs().mean()) * rstd
        found["dx"] = max(found["dx"], worst(dx[i], (g - n * (g * n).mean()) * rstd, length=width, scale=size))
    total, size = (torch.zeros(width, dtype=torch.float64, device=x.device) for _ in range(2))
    for part in shares(x.numel(), width):
        wide = x[part].double()
        terms = dy[part].double() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        total += terms.sum(0)
        size += terms.square().sum(0)
    found["dweight"] = worst(dweight, total, length=width, scale=size.sqrt())
    return found


def tables(elements: int, device: torch.device) -> Iterator[Result]:
    """Tables, one of rows that are parts of wider ones, what is looked up in them, and indices, of so many elements each."""
    for width, pitch, dtype in ((4096, 4096, torch.bfloat16), (1024, 1024, torch.float32), (4096, 8192, torch.bfloat16)):
        rows = elements // width + 37
        weight = _random(rows, pitch, dtype=dtype, device=device)[:, :width].requires_grad_()
        indices = torch.randint(0, rows, (rows + 5,), device=device)
        named = torch.tensor(sampled(rows, width, elements), device=device)
        indices[: 3 * len(named)] = named.repeat(3)
        indices[-len(named) :] = named
        dy = _random(rows + 5, width, dtype=dtype, device=device)
        out = embedding(indices, weight)
        out.backward(dy)
        assert weight.grad is not None
        wrong = sum(int((out[part] != weight[indices[part]]).sum()) for part in shares(out.numel(), width))
        error, zeros = 0.0, 0
        for row in named.tolist():
            terms = dy[indices == row].double()
            scale = terms.square().sum(0).sqrt()
            error = max(error, worst(weight.grad[row], terms.sum(0), length=len(terms), scale=scale))
        absent = torch.bincount(indices, minlength=rows) == 0
        zeros = sum(int((weight.grad[part][absent[part]] != 0).sum()) for part in shares(weight.numel(), width))
        found = {"elements of out that differ": wrong, "dweight": error, "of rows not named, not zero": zeros}
        yield f"embedding, table {said(weight.shape, dtype)}, rows {pitch} apart, out {said(out.shape, dtype)}", found
        del weight, dy, out, indices, absent
    count, rows = elements + 4096, 1000
    indices = torch.randint(0, rows, (count,), device=device, dtype=torch.int32)
    weight = _random(rows, 1, device=device).requires_grad_()
    out = embedding(indices, weight)
    wrong = sum(int((out[part] != weight[indices[part]]).sum()) for part in shares(count, 1))
    yield f"embedding, indices {said(indices.shape, indices.dtype)}", {"elements of out that differ": wrong}
    del out
    most = indices[: elements - 4096]  # PyTorch sorts fewer than 2^31, and the gradient sorts them
    out = embedding(most, weight)
    out.backward(torch.ones((), dtype=out.dtype, device=device).expand(out.shape))
    assert weight.grad is not None
    counts = sum(torch.bincount(most[part], minlength=rows) for part in shares(len(most), 1))
    assert isinstance(counts, Tensor)
    wide = counts.double().unsqueeze(1)
    error = worst(weight.grad, wide, length=int(counts.max()), scale=wide.sqrt())
    yield f"embedding, gradient, indices {said(most.shape, most.dtype)}", {"dweight": error}


def depths(elements: int, device: torch.device) -> Iterator[Result]:
    """Blocks of so many elements each, stacked and as a list; layers; the merge."""
    width = 4096
    tokens = elements // width + 37
    chosen = sampled(tokens, width, elements)
    weights = [(_random(width, device=device) * scale).requires_grad_() for scale in (width**-0.5, 1.0)]
    for listed in (False, True):
        blocks = _random(3, tokens, width, device=device)
        given = [block.requires_grad_() for block in blocks.unbind()] if listed else blocks.requires_grad_()
        dh = _random(tokens, width, device=device)
        h = attn_res(given, *weights, rms_eps=EPS)
        h.backward(dh)
        dv = torch.stack([block.grad[chosen] for block in given]) if listed else given.grad[:, chosen]  # type: ignore[index]
        leaves = [blocks.detach()[:, chosen].double().requires_grad_(), *(w.detach().double() for w in weights)]
        wanted = _attention(*leaves)
        (wanted_dv,) = torch.autograd.grad(wanted, leaves[0], dh[chosen].double())
        found = {"h": _row_error(h[chosen], wanted), "dv": _row_error(dv, wanted_dv)}
        yield f"attn_res, {'3 listed blocks' if listed else 'blocks'} {said(blocks.shape, blocks.dtype)}", found
        del blocks, given, dh, h, dv
        for weight in weights:
            weight.grad = None
    yield _banked(elements, tokens, width, weights, device)
    blocks = _random(2, tokens, width, device=device).requires_grad_()
    queries = (_random(2, width, device=device) * width**-0.5).requires_grad_()
    o, lse = attn_res_phase1(queries, blocks, weights[1].detach(), EPS)
    do = _random(*o.shape, dtype=torch.float32, device=device)
    torch.autograd.backward(o, do)
    assert blocks.grad is not None
    v = blocks.detach()[:, chosen].double().requires_grad_()
    score = _scores(v, queries.detach().double().unsqueeze(1), weights[1].detach().double())  # [N, S, T]
    wanted = torch.einsum("nst,ntd->std", torch.softmax(score, 0), v)
    (wanted_dv,) = torch.autograd.grad(wanted, v, do[:, chosen].double())
    found = {"o": _row_error(o[:, chosen], wanted), "lse": _row_error(lse[:, chosen], torch.logsumexp(score, 0))}
    found["dv"] = _row_error(blocks.grad[:, chosen], wanted_dv)
    yield f"attn_res_phase1, blocks {said(blocks.shape, blocks.dtype)}, o {said(o.shape, o.dtype)}", found
    del blocks, do, v, score
    o, lse = (result[0].detach() for result in (o, lse))
    partial, x, dh = (_random(tokens, width, device=device) for _ in range(3))
    state = [o.requires_grad_(), lse.clone().requires_grad_(), partial.requires_grad_()]
    h, _, joined, _ = attn_res_merge(*state, *(w.detach() for w in weights), rms_eps=EPS, layer_output=x)
    h.backward(dh)
    wide = [tensor.detach()[chosen].double().requires_grad_() for tensor in state]
    together = (wide[2] + x[chosen].double()).to(partial.dtype).double()
    score = _scores(together.unsqueeze(0), *(w.detach().double() for w in weights))[0]
    top = torch.maximum(wide[1], score).detach()
    before, last = torch.exp(wide[1] - top), torch.exp(score - top)
    wanted = (before.unsqueeze(-1) * wide[0] + last.unsqueeze(-1) * together) / (before + last).unsqueeze(-1)
    gradients = torch.autograd.grad(wanted, wide[:2], dh[chosen].double())
    assert state[0].grad is not None
    assert state[1].grad is not None
    found = {"h": _row_error(h[chosen], wanted), "do": _row_error(state[0].grad[chosen], gradients[0])}
    found["dlse"] = _row_error(state[1].grad[chosen].unsqueeze(0), gradients[1].unsqueeze(0))
    yield f"attn_res_merge, o {said(o.shape, o.dtype)}, partial {said(partial.shape, partial.dtype)}", found


def _banked(elements: int, tokens: int, width: int, weights: list[Tensor], device: torch.device) -> Result:
    """A bank whose tokens lie further apart than its blocks, and rows of prefix and gradient inside wider ones."""
    n_blocks, chosen = 2, sampled(tokens, width, elements // (2 + 1))
    bank = _random(tokens, n_blocks + 1, width, device=device).requires_grad_()
    prefix, dh = (_random(tokens, 2 * width, device=device)[:, :width] for _ in range(2))
    found = attn_res_bank(bank, n_blocks, prefix.requires_grad_(), *(w.detach() for w in weights), rms_eps=EPS)
    dbank, dprefix = torch.autograd.grad(found.output, (bank, prefix), dh)
    v = torch.stack([*bank.detach()[chosen, :n_blocks].unbind(1), prefix.detach()[chosen]]).double().requires_grad_()
    wanted = _attention(v, *(w.detach().double() for w in weights))
    (wanted_dv,) = torch.autograd.grad(wanted, v, dh[chosen].double())
    dv = torch.stack([*dbank[chosen, :n_blocks].unbind(1), dprefix[chosen]])
    errors = {"h": _row_error(found.output[chosen], wanted), "dv": _row_error(dv, wanted_dv)}
    return f"attn_res_bank, bank {said(bank.shape, bank.dtype)}, rows of a prefix {2 * width} apart", errors


def _scores(v: Tensor, query: Tensor, rms_weight: Tensor) -> Tensor:
    keys = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS) * rms_weight
    if query.dim() == 1:
        return keys @ query
    return torch.einsum("ntd,sd->nst", keys, query.squeeze(1))


def _attention(v: Tensor, query: Tensor, rms_weight: Tensor) -> Tensor:
    return (torch.softmax(_scores(v, query, rms_weight), 0).unsqueeze(-1) * v).sum(0)


def _row_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error as a share of what is allowed: one rounding, and fp32's of sums over a row of its size."""
    scale = expected.detach().square().mean(-1, keepdim=True).sqrt().expand_as(expected) * 4
    fp32_terms = int((64 * 2**-24 / FP32_UNIT) ** 2)
    return worst(actual.detach(), expected.detach(), length=fp32_terms, scale=scale)


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)
