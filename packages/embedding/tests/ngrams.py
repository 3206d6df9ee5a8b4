"""What the tests of n-grams compare with: rows found in Python's own integers, and a gradient in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from lookup import check_gradient, leaf
from npu_embedding import ngram_embedding
from torch import Tensor

VOCABULARY = 50000


@dataclass
class Case:
    """One problem, made on the CPU from a seed."""

    ids: Tensor
    table: Tensor
    multipliers: Tensor
    sizes: Tensor
    offsets: Tensor
    eos: int
    ngram_size: int
    history: Tensor | None
    mode: str
    mix: str
    fill: int | None
    dy: Tensor

    @property
    def numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.multipliers, self.sizes, self.offsets


def make(
    shape,
    width,
    dtype,
    *,
    ngram_size=3,
    heads=2,
    history=False,
    mode="concat",
    mix="xor",
    fill=None,
    base=97,
    eos=7,
    own=False,
) -> Case:
    """A case with `heads` heads for each length of n-gram; a fifth of the ids is EOS. own: each head has its multipliers."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.where(  # noqa: E731
        torch.rand(size, generator=generator) < 0.2, eos, torch.randint(0, VOCABULARY, size, generator=generator)
    )
    ids, before = draw(*shape), draw(*shape[:-1], ngram_size - 1)
    n_heads = heads * (ngram_size - 1)
    sizes = base + 2 * torch.arange(n_heads)
    offsets = sizes.cumsum(0) - sizes
    table = torch.randn(int(sizes.sum()) + 5, width, generator=generator).to(dtype)
    dy = torch.randn(*shape, width * (n_heads if mode == "concat" else 1), generator=generator).to(dtype)
    each = (n_heads, ngram_size) if own else (ngram_size,)
    multipliers = torch.randint(0, 2**63 // VOCABULARY, each, generator=generator)
    before = before if history else None
    return Case(ids, table, multipliers, sizes, offsets, eos, ngram_size, before, mode, mix, fill, dy)


def run(case: Case, device, **options) -> tuple[Tensor, Tensor]:
    """The output and the gradient of the table, on the CPU."""
    table = leaf(case.table, device)
    history = None if case.history is None else case.history.to(device)
    numbers = (each.to(device) for each in case.numbers)
    options |= {"mode": case.mode, "mix": case.mix, "fill": case.fill}
    out = ngram_embedding(case.ids.to(device), table, *numbers, case.eos, case.ngram_size, history, **options)
    (dtable,) = torch.autograd.grad(out, table, case.dy.to(device))
    return out.detach().cpu(), dtable.cpu()


def rows_of(ids, history, multipliers, sizes, offsets, eos, fill, mix) -> Tensor:
    """int64 [H, B, T]: rows for ids [B, T], from Python's integers, token by token."""
    context = multipliers.shape[-1] - 1
    heads = len(sizes) // context
    rows = torch.empty(len(sizes), *ids.shape, dtype=torch.int64)
    of_heads, texts = multipliers.expand(len(sizes), -1).tolist(), ids.tolist()
    before = [[eos] * context for _ in texts] if history is None else history.tolist()
    for b, (text, head) in enumerate(zip(texts, before, strict=True)):
        text = head + text
        for t, h in product(range(len(text) - context), range(len(sizes))):
            factors, place = of_heads[h], t + context
            mixed, apart = text[place] * factors[0], False
            for k in range(1, 2 + h // heads):
                apart |= text[place - k] == eos
                term = (fill if apart else text[place - k]) * factors[k]
                mixed = mixed + term if mix == "sum" else mixed ^ term
            signed = (mixed + 2**63) % 2**64 - 2**63
            rows[h, b, t] = signed % int(sizes[h]) + int(offsets[h])
    return rows


def check(case: Case, results: tuple[Tensor, Tensor]) -> None:
    """Concatenated rows bit for bit; sums and the gradient within fp32 sums and one rounding."""
    shape, width = case.ids.shape, case.table.shape[1]
    ids = case.ids.reshape(-1, shape[-1])
    history = None if case.history is None else case.history.reshape(len(ids), -1)
    fill = case.eos if case.fill is None else case.fill
    rows = rows_of(ids, history, *case.numbers, case.eos, fill, case.mix).flatten(1)  # [H, n]
    found = case.table[rows]  # [H, n, D]
    out = results[0].reshape(-1, results[0].shape[-1])
    assert out.dtype == case.table.dtype and results[0].shape[:-1] == shape
    if case.mode == "concat":
        assert torch.equal(out, found.transpose(0, 1).flatten(1))
    else:
        check_gradient(out, found.double().sum(0), found.double().abs().sum(0), len(rows))
    dy = case.dy.reshape(rows.shape[1], -1, width).transpose(0, 1).expand(len(rows), -1, -1).double()
    exact = torch.zeros(case.table.shape, dtype=torch.float64)
    gradient = exact.index_add(0, rows.flatten(), dy.reshape(-1, width))
    added = exact.index_add(0, rows.flatten(), dy.reshape(-1, width).abs())
    check_gradient(results[1], gradient, added, rows.numel())
