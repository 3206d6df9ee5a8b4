"""What the tests of several ids a result compare with: sums and means in fp64, with autograd."""

import torch
from lookup import ROWS, check_gradient, leaf
from npu_embedding import embedding_bag

OFFSETS = [0, 0, 3, 4, 30, 30, 59, 61]  # empty bags, short ones, long ones


def expected(indices, weight, bags, mode, samples=None, padding_idx=None):
    """Sums or means in fp64, with autograd, and the sums of magnitudes; `bags`: the bag of each index."""
    kept = torch.ones(len(indices), dtype=torch.bool) if padding_idx is None else indices != padding_idx % ROWS
    factors = kept.double() if samples is None else kept * samples
    n_bags = int(bags.max()) + 1
    if mode == "mean":
        factors = factors / torch.bincount(bags[kept], minlength=n_bags).clamp(min=1)[bags]
    terms = weight[indices] * factors.unsqueeze(-1)
    out = terms.new_zeros(n_bags, weight.shape[1]).index_add(0, bags, terms)
    return out, torch.zeros_like(out).index_add(0, bags, terms.abs()).detach()


def compare(device, indices, weight, samples, bags, shape=None, offsets=None, **options):
    """The result and the gradients of the table and of the weights."""
    table, scales = (None if each is None else leaf(each, device.torch) for each in (weight, samples))
    given = (None if each is None else each.to(device.torch) for each in (indices.view(shape or -1), offsets))
    ids, ends = given
    weights = None if scales is None else scales.view(ids.shape)
    out = embedding_bag(ids, table, ends, per_sample_weights=weights, **options)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(weight.dtype)
    asked = [table] if scales is None else [table, scales]
    found = torch.autograd.grad(out, asked, dy.to(device.torch))
    wide = [leaf(each.detach().double(), "cpu") for each in (weight, samples) if each is not None]
    mode, padding_idx = options.get("mode", "mean"), options.get("padding_idx")
    exact, size = expected(indices.long(), wide[0], bags, mode, wide[1] if len(wide) > 1 else None, padding_idx)
    check_gradient(out.detach().cpu().view(exact.shape), exact.detach(), size, len(indices))
    gradients = torch.autograd.grad(exact, wide, dy.double().view(exact.shape))
    for actual, gradient, like in zip(found, gradients, wide, strict=True):
        assert actual.dtype == weight.dtype and actual.shape == like.shape
        terms = max(len(indices), weight.shape[1]) ** 0.5  # a weight's gradient is a sum over columns
        rounding = torch.finfo(weight.dtype).eps * (terms + 4)
        assert torch.allclose(actual.cpu().double(), gradient, rtol=rounding, atol=terms * rounding)
    return out
