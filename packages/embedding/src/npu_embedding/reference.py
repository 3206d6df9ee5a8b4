"""The definition of the embedding in plain PyTorch, which also runs on a CPU.

    out[...] = weight[indices[...] - first_row]        dweight[r] = sum of dy over the positions whose index is first_row + r

The table at hand may be a shard, rows `first_row` to `first_row + weight.shape[0] - 1` of `n_total`: rows of other shards
come out as -0.0, which changes nothing that it is added to, and pass no gradient. Sums are fp32 (fp64 for fp64), rounded
once.
"""

from __future__ import annotations

from functools import reduce

import torch
from npu_tiling.calls import statistics_dtype
from npu_tiling.dispatch import forward_mode
from torch import Tensor

from .call import NO_ROW, Backward, Bags, Forward, NGram, Renormalise, Spread, check_indices


def forward(call: Forward) -> tuple[Tensor]:
    """Rows [..., D] of weight [V, D] for indices [...]. Raises IndexError where an index is outside 0 to n_total - 1."""
    indices, weight = call.indices, call.weight
    check_indices(indices, call.n_total)
    local, inside = _local(indices, call.first_row, weight.shape[0])
    if not weight.shape[0]:
        return (weight.new_full((*indices.shape, weight.shape[1]), -0.0),)
    out = weight[local]
    return ((out if inside is None else out.masked_fill(~inside.unsqueeze(-1), -0.0)).contiguous(),)


def backward(call: Backward) -> tuple[Tensor, Tensor | None]:
    """dweight [n_rows, D], from dy [..., D] and indices [...]; if `sparse`, an entry for each index.

    Entries are values [n, D], in the order of their rows, and rows [n] (see `slots`).

    Raises:
        NotImplementedError: dy has a tangent, and the gradient is sparse.
    """
    if not call.sparse:
        return _sums(call), None
    if forward_mode((call.dy,)):
        raise NotImplementedError("npu_embedding::backward has no forward-mode derivative where sparse is True.")
    slot, order, rows = slots(call.indices.reshape(-1), call.n_rows, call.padding_idx, call.first_row)
    slot_of = torch.empty_like(slot).scatter_(0, order, slot)
    return _sums(call._replace(indices=slot_of, n_rows=slot.numel(), padding_idx=NO_ROW, first_row=0)), rows


def _sums(call: Backward) -> Tensor:
    dy, n_rows = call.dy, call.n_rows
    rows, named = _named(call.indices.reshape(-1), n_rows, call.padding_idx, call.first_row)
    dweight = torch.zeros((n_rows, dy.shape[-1]), dtype=statistics_dtype(dy.dtype), device=dy.device)
    dweight.index_add_(0, rows[named], dy.reshape(len(rows), dy.shape[-1])[named].to(dweight.dtype))
    if call.scale_grad_by_freq:
        dweight /= torch.bincount(rows[named], minlength=n_rows).clamp_(min=1).unsqueeze(-1)
    return dweight.to(call.dtype)


def renormalise_(call: Renormalise) -> tuple[()]:
    """Scales rows that an index names down to a norm of at most `max_norm`, in place; raises IndexError as `forward`."""
    check_indices(call.indices, call.n_total)
    scale_rows(*call[:-1])
    return ()


def scale_rows(indices: Tensor, weight: Tensor, max_norm: float, norm_type: float, first_row: int) -> None:
    """Scales rows of `weight` as `renormalise_`, on any device. No shape depends on the indices."""
    if not (indices.numel() and weight.numel()):
        return
    rows, inside = _local(indices.reshape(-1), first_row, weight.shape[0], always=True)
    assert inside is not None
    # An index outside the table stands for a row that another index names: both write the same values, in any order.
    stand_in = torch.where(inside, rows, -1).max()
    rows = torch.where(inside, rows, stand_in.clamp(min=0))
    wide = weight.index_select(0, rows).to(statistics_dtype(weight.dtype))
    norm = torch.linalg.vector_norm(wide, norm_type, dim=-1, keepdim=True)
    if max_norm != torch.inf:
        max_norm = min(max_norm, torch.finfo(norm.dtype).max)
    scale = torch.where((norm > max_norm) & (stand_in >= 0), max_norm / (norm + 1e-7), 1.0)
    weight.index_put_((rows,), (wide * scale).to(weight.dtype))


def _local(indices: Tensor, first_row: int, n_rows: int, always: bool = False) -> tuple[Tensor, Tensor | None]:
    """Rows of this table, 0 where an index lies outside, and a mask of the indices inside (None: all are)."""
    local = indices.long() - first_row
    inside = (local >= 0) & (local < n_rows)
    if not always and bool(inside.all()):
        return local, None
    return torch.where(inside, local, 0), inside


def _named(indices: Tensor, n_rows: int, padding_idx: int, first_row: int) -> tuple[Tensor, Tensor]:
    """Rows of this table, and a mask of the indices whose row gets a gradient."""
    rows = indices.long() - first_row
    return rows, (rows >= 0) & (rows < n_rows) & (rows != padding_idx - first_row)


def slots(indices: Tensor, n_rows: int, padding_idx: int, first_row: int) -> tuple[Tensor, Tensor, Tensor]:
    """The entries of a sparse gradient for indices [n]: n entries in the order of their rows; equal rows share a slot.

    Returns:
        For each entry, in ascending order of rows: its slot, the first entry of its row, or n where it gets no gradient;
        where in `indices` it stood; and its row. An entry that gets no gradient has a row that an index names, so that an
        optimizer changes no other; where there is none, the padding row, else row 0.
    """
    rows, named = _named(indices, n_rows, padding_idx, first_row)
    ordered, order = torch.sort(torch.where(named, rows, n_rows), stable=True)
    known = ordered < n_rows
    slot = torch.where(known, torch.searchsorted(ordered, ordered), ordered.numel())
    unnamed = padding_idx - first_row if first_row <= padding_idx < first_row + n_rows else 0
    return slot, order, torch.where(known, ordered, torch.where(known[:1], ordered[:1], unnamed))


def ngram_rows(call: NGram) -> Tensor:
    """int64 [H, B, T]: the row that each head looks up for ids [B, T]; see `ngram_embedding`."""
    sizes, multipliers, context = call.sizes, call.multipliers, call.multipliers.shape[-1] - 1
    before = call.ids.new_full((len(call.ids), context), call.eos) if call.history is None else call.history
    ids = torch.cat((before.long(), call.ids.long()), dim=1)
    n_tokens = ids.shape[1] - context
    tokens = [ids[:, context:]]
    apart = torch.zeros_like(tokens[0], dtype=torch.bool)  # where EOS stands between
    mix = torch.add if call.add else torch.bitwise_xor
    rows = []
    for k in range(1, context + 1):
        token = ids[:, context - k : context - k + n_tokens]
        apart = apart | (token == call.eos)
        tokens.append(torch.where(apart, call.fill, token))
        heads = slice((k - 1) * len(sizes) // context, k * len(sizes) // context)
        factors = multipliers[None] if multipliers.dim() == 1 else multipliers[heads]
        mixed = reduce(mix, (each * factors[:, j, None, None] for j, each in enumerate(tokens)))
        rows.append(torch.remainder(mixed, sizes[heads, None, None]) + call.offsets[heads, None, None])
    return torch.cat(rows)


def ngram(call: NGram) -> tuple[Tensor, Tensor]:
    """[B, T, H * D], or [B, T, D] for the sum over heads, and the rows, int32 [H, B, T]."""
    table = call.table
    for head, (size, offset) in enumerate(zip(call.sizes.tolist(), call.offsets.tolist(), strict=True)):
        if size < 1 or offset < 0 or offset + size > len(table):
            raise ValueError(
                f"sizes[{head}] and offsets[{head}] are {size} and {offset} and must name rows of table, from 0 to "
                f"{len(table) - 1}."
            )
    rows = ngram_rows(call)
    found = table[rows]
    if call.concat:
        return found.permute(1, 2, 0, 3).flatten(2).contiguous(), rows.int()
    wide = found if found.dtype == torch.float64 else found.float()
    return wide.sum(0).to(table.dtype), rows.int()


def bags(call: Bags) -> tuple[Tensor]:
    """[n_bags, D] in `dtype`: sums, or means, of the rows of ids [n] in each bag."""
    indices, weight, n_bags = call.indices, call.weight, call.n_bags
    ids, bag, counted = _bag_of_ids(call)
    shape = indices.shape if call.offsets is not None else (n_bags, indices.numel() // max(n_bags, 1))
    check_indices(indices.view(shape), call.n_total, counted, call.base)
    local, inside = _local(ids, call.first_row, weight.shape[0], always=True)
    wide = statistics_dtype(weight.dtype)
    assert inside is not None
    if weight.shape[0]:
        narrow = weight.dtype.itemsize == 1  # PyTorch does not index 8-bit floats
        rows = (weight.view(torch.int8)[local].view(weight.dtype) if narrow else weight[local]).to(wide)
    else:
        rows = torch.zeros((ids.numel(), weight.shape[1]), dtype=wide, device=weight.device)
    if call.row_scales is not None and weight.shape[0]:
        rows *= call.row_scales[local].to(wide).unsqueeze(-1)
    if call.sample_weights is not None:
        rows *= call.sample_weights.to(wide).unsqueeze(-1)
    rows = rows.masked_fill(~(inside & counted).unsqueeze(-1), 0)
    out = rows.new_zeros(n_bags + 1, rows.shape[1]).index_add_(0, bag, rows)
    out = out[:n_bags] / _counts(bag, counted, n_bags, call.mean, wide) * call.factor
    return ((out if call.eps is None else normalise(out, inside, call.eps)).to(call.dtype),)


def normalise(x: Tensor, inside: Tensor, eps: float) -> Tensor:
    """Rows [n, D] over the roots of their mean squares plus eps: an RMSNorm without a weight.

    Zeros and NaN, of ids that are not `inside` [n], stay what they are, also with an eps of 0.
    """
    return x * (x.square().mean(-1, keepdim=True) + eps).masked_fill(~inside.unsqueeze(-1), 1).rsqrt()


def normalise_backward(x: Tensor, dy: Tensor, eps: float) -> Tensor:
    """The gradient of the rows x [n, D] of `normalise`."""
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = x * rstd
    return (dy - y * (dy * y).mean(-1, keepdim=True)) * rstd


def spread(call: Spread) -> tuple[Tensor | None, Tensor | None]:
    """dx [n, D] where `need_dx` or `eps`; dsample [n] where there is a `weight` and no `eps`."""
    dy, weight, n_bags = call.dy, call.weight, call.n_bags
    ids, bag, counted = _bag_of_ids(call)
    wide = statistics_dtype(dy.dtype)
    shares = dy.to(wide) * call.factor / _counts(bag, counted, n_bags, call.mean, wide)
    share = torch.cat((shares, shares.new_zeros(1, dy.shape[1])))[bag]
    dsample = None
    if weight is not None:
        local, inside = _local(ids, call.first_row, weight.shape[0], always=True)
        assert inside is not None
        found = weight[local].to(wide) if len(weight) else torch.zeros_like(share)
        if call.eps is not None:
            found = found.masked_fill(~inside.unsqueeze(-1), 0)
            return normalise_backward(found * call.factor, share, call.eps).to(dy.dtype), None
        dsample = (found * share).sum(-1).masked_fill(~(inside & counted), 0)
    if call.sample_weights is not None:
        share = share * call.sample_weights.to(wide).unsqueeze(-1)
    return share.to(call.dtype) if call.need_dx else None, dsample


def _bag_of_ids(call: Bags | Spread) -> tuple[Tensor, Tensor, Tensor]:
    """int64 [n]: ids, and the bag of each, n_bags for none; and whether each is in its bag."""
    indices, n, n_bags = call.indices, call.indices.numel(), call.n_bags
    ids = indices.long() if call.base is None else (indices.view(-1, call.base.numel()).long() + call.base).view(-1)
    place = torch.arange(n, device=indices.device)
    if call.offsets is None:
        bag = place // max(n // max(n_bags, 1), 1)
    else:
        ends = call.offsets.long()
        if ends.numel() and (int(ends[0]) != 0 or bool((ends.diff() < 0).any()) or int(ends[-1]) > n):
            raise ValueError(f"offsets must begin with 0, not descend, and end at {n} or before, the number of indices.")
        bag = (torch.searchsorted(ends, place, right=True) - 1).clamp(max=n_bags)
    return ids, bag, (ids != call.left_out) & (bag < n_bags)


def _counts(bag: Tensor, counted: Tensor, n_bags: int, mean: bool, dtype: torch.dtype) -> Tensor | int:
    """[n_bags, 1]: how many ids each bag has, 1 where it has none; 1 without `mean`."""
    return torch.bincount(bag[counted], minlength=n_bags).clamp(min=1).unsqueeze(-1).to(dtype) if mean else 1
