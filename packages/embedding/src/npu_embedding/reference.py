"""The definition of the embedding in plain PyTorch, which also runs on a CPU.

    out[...] = weight[indices[...] - first_row]        dweight[r] = sum of dy over the positions whose index is first_row + r

The table at hand may be a shard, rows `first_row` to `first_row + weight.shape[0] - 1` of `n_total`: rows of other shards
come out as -0.0, which changes nothing that it is added to, and pass no gradient. Sums are fp32 (fp64 for fp64), rounded
once.
"""

from __future__ import annotations

from functools import reduce

import torch
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

from .shape import NO_ROW


def forward(indices: Tensor, weight: Tensor, first_row: int, n_total: int) -> Tensor:
    """Rows [..., D] of weight [V, D] for indices [...]. Raises IndexError where an index is outside 0 to n_total - 1."""
    check(indices, n_total)
    local, inside = _local(indices, first_row, weight.shape[0])
    if not weight.shape[0]:
        return weight.new_full((*indices.shape, weight.shape[1]), -0.0)
    out = weight[local]
    return out if inside is None else out.masked_fill(~inside.unsqueeze(-1), -0.0)


def backward(dy: Tensor, indices: Tensor, n_rows: int, padding_idx: int, scale_grad_by_freq: bool, first_row: int) -> Tensor:
    """dweight [n_rows, D] in dy's dtype, from dy [..., D] and indices [...]."""
    rows, named = _named(indices.reshape(-1), n_rows, padding_idx, first_row)
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    dweight = torch.zeros((n_rows, dy.shape[-1]), dtype=wide, device=dy.device)
    dweight.index_add_(0, rows[named], dy.reshape(len(rows), dy.shape[-1])[named].to(wide))
    if scale_grad_by_freq:
        dweight /= torch.bincount(rows[named], minlength=n_rows).clamp_(min=1).unsqueeze(-1)
    return dweight.to(dy.dtype)


def sparse_backward(
    dy: Tensor, indices: Tensor, n_rows: int, padding_idx: int, scale_grad_by_freq: bool, first_row: int
) -> tuple[Tensor, Tensor]:
    """An entry for each index, in the order of their rows: values [n, D], and rows [n] (see `slots`)."""
    slot, order, rows = slots(indices.reshape(-1), n_rows, padding_idx, first_row)
    slot_of = torch.empty_like(slot).scatter_(0, order, slot)
    return backward(dy, slot_of, slot.numel(), NO_ROW, scale_grad_by_freq, 0), rows


def renormalise_(indices: Tensor, weight: Tensor, max_norm: float, norm_type: float, first_row: int) -> None:
    """Scales rows that an index names down to a norm of at most `max_norm`, in place. No shape depends on the indices."""
    if not (indices.numel() and weight.numel()):
        return
    rows, inside = _local(indices.reshape(-1), first_row, weight.shape[0], always=True)
    assert inside is not None
    # An index outside the table stands for a row that another index names: both write the same values, in any order.
    stand_in = torch.where(inside, rows, -1).max()
    rows = torch.where(inside, rows, stand_in.clamp(min=0))
    # Not weight[rows], whose rows might be a mask: `Repeats` repeats no operator whose result's size may depend on values.
    wide = weight.index_select(0, rows).to(statistics_dtype(weight.dtype))
    norm = torch.linalg.vector_norm(wide, norm_type, dim=-1, keepdim=True)
    scale = torch.where((norm > max_norm) & (stand_in >= 0), max_norm / (norm + 1e-7), 1.0)
    weight.index_put_((rows,), (wide * scale).to(weight.dtype))


def check(indices: Tensor, n_total: int, counted: Tensor | None = None, base: Tensor | None = None) -> None:
    """Raises IndexError naming the first index, of those that count, that is outside 0 to n_total - 1.

    With `base` [K] the row that an index names is base[k] more, k its place in the last dimension.
    """
    if not indices.numel():
        return
    rows = indices.long()  # PyTorch wraps a number that it compares int32 with
    rows = rows if base is None else rows + base
    wrong = (rows < 0) | (rows >= n_total)
    wrong = wrong if counted is None else wrong & counted.view(wrong.shape)
    if not wrong.any():
        return
    where = tuple(wrong.nonzero()[0].tolist())
    index = f"indices{list(where) if where else ''} is {int(indices[where])}"
    row = "" if base is None else f", row {int(rows[where])} with table_offsets[{where[-1]}],"
    allowed = f"must be from 0 to {n_total - 1}" if n_total else "the table has no rows"
    raise IndexError(f"{index}{row} and {allowed}.")


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


def ngram_rows(
    ids: Tensor,
    history: Tensor | None,
    multipliers: Tensor,
    sizes: Tensor,
    offsets: Tensor,
    eos: int,
    fill: int,
    add: bool,
) -> Tensor:
    """int64 [H, B, T]: the row that each head looks up for ids [B, T]; see `ngram_embedding`."""
    context = multipliers.shape[-1] - 1
    before = ids.new_full((len(ids), context), eos) if history is None else history
    ids = torch.cat((before.long(), ids.long()), dim=1)
    n_tokens = ids.shape[1] - context
    tokens = [ids[:, context:]]
    apart = torch.zeros_like(tokens[0], dtype=torch.bool)  # where EOS stands between
    mix = torch.add if add else torch.bitwise_xor
    rows = []
    for k in range(1, context + 1):
        token = ids[:, context - k : context - k + n_tokens]
        apart = apart | (token == eos)
        tokens.append(torch.where(apart, fill, token))
        heads = slice((k - 1) * len(sizes) // context, k * len(sizes) // context)
        factors = multipliers[None] if multipliers.dim() == 1 else multipliers[heads]
        mixed = reduce(mix, (each * factors[:, j, None, None] for j, each in enumerate(tokens)))
        rows.append(torch.remainder(mixed, sizes[heads, None, None]) + offsets[heads, None, None])
    return torch.cat(rows)


def ngram_forward(
    ids: Tensor,
    history: Tensor | None,
    table: Tensor,
    multipliers: Tensor,
    sizes: Tensor,
    offsets: Tensor,
    eos: int,
    fill: int,
    add: bool,
    concat: bool,
) -> tuple[Tensor, Tensor]:
    """[B, T, H * D], or [B, T, D] for the sum over heads, and the rows, int32 [H, B, T]."""
    for head, (size, offset) in enumerate(zip(sizes.tolist(), offsets.tolist(), strict=True)):
        if size < 1 or offset < 0 or offset + size > len(table):
            raise ValueError(
                f"sizes[{head}] and offsets[{head}] are {size} and {offset} and must name rows of table, from 0 to "
                f"{len(table) - 1}."
            )
    rows = ngram_rows(ids, history, multipliers, sizes, offsets, eos, fill, add)
    found = table[rows]
    if concat:
        return found.permute(1, 2, 0, 3).flatten(2).contiguous(), rows.int()
    wide = found if found.dtype == torch.float64 else found.float()
    return wide.sum(0).to(table.dtype), rows.int()


def bags(
    indices: Tensor,
    offsets: Tensor | None,
    base: Tensor | None,
    sample_weights: Tensor | None,
    weight: Tensor,
    row_scales: Tensor | None,
    n_bags: int,
    mean: bool,
    factor: float,
    eps: float | None,
    dtype: torch.dtype,
    left_out: int,
    first_row: int,
    n_total: int,
) -> Tensor:
    """[n_bags, D] in `dtype`: sums, or means, of the rows of ids [n] in each bag; see `launch.bags.Bags`."""
    ids, bag, counted = _bag_of_ids(indices, offsets, base, n_bags, left_out)
    shape = indices.shape if offsets is not None else (n_bags, indices.numel() // max(n_bags, 1))
    check(indices.view(shape), n_total, counted, base)
    local, inside = _local(ids, first_row, weight.shape[0], always=True)
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    assert inside is not None
    if weight.shape[0]:
        narrow = weight.dtype.itemsize == 1  # PyTorch does not index 8-bit floats
        rows = (weight.view(torch.int8)[local].view(weight.dtype) if narrow else weight[local]).to(wide)
    else:
        rows = torch.zeros((ids.numel(), weight.shape[1]), dtype=wide, device=weight.device)
    if row_scales is not None and weight.shape[0]:
        rows *= row_scales[local].to(wide).unsqueeze(-1)
    if sample_weights is not None:
        rows *= sample_weights.to(wide).unsqueeze(-1)
    rows = rows.masked_fill(~(inside & counted).unsqueeze(-1), 0)
    out = rows.new_zeros(n_bags + 1, rows.shape[1]).index_add_(0, bag, rows)
    out = out[:n_bags] / _counts(bag, counted, n_bags, mean, wide) * factor
    return (out if eps is None else normalise(out, inside, eps)).to(dtype)


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


def spread(
    dy: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    base: Tensor | None,
    sample_weights: Tensor | None,
    weight: Tensor | None,
    rows: bool,
    n_bags: int,
    mean: bool,
    factor: float,
    eps: float | None,
    left_out: int,
    first_row: int,
) -> tuple[Tensor | None, Tensor | None]:
    """What dy [n_bags, D] gives to each id, dx [n, D] where `rows`, and with `weight` to each sample weight [n]; with `eps`
    to none of these.
    """
    ids, bag, counted = _bag_of_ids(indices, offsets, base, n_bags, left_out)
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    shares = dy.to(wide) * factor / _counts(bag, counted, n_bags, mean, wide)
    share = torch.cat((shares, shares.new_zeros(1, dy.shape[1])))[bag]
    dsample = None
    if weight is not None:
        local, inside = _local(ids, first_row, weight.shape[0], always=True)
        assert inside is not None
        found = weight[local].to(wide) if len(weight) else torch.zeros_like(share)
        if eps is not None:
            found = found.masked_fill(~inside.unsqueeze(-1), 0)
            return normalise_backward(found * factor, share, eps).to(dy.dtype), None
        dsample = (found * share).sum(-1).masked_fill(~(inside & counted), 0)
    if sample_weights is not None:
        share = share * sample_weights.to(wide).unsqueeze(-1)
    return share.to(dy.dtype) if rows else None, dsample


def _bag_of_ids(
    indices: Tensor, offsets: Tensor | None, base: Tensor | None, n_bags: int, left_out: int
) -> tuple[Tensor, Tensor, Tensor]:
    """int64 [n]: ids, and the bag of each, n_bags for none; and whether each is in its bag."""
    n = indices.numel()
    ids = indices.long() if base is None else (indices.view(-1, base.numel()).long() + base).view(-1)
    place = torch.arange(n, device=indices.device)
    if offsets is None:
        bag = place // max(n // max(n_bags, 1), 1)
    else:
        ends = offsets.long()
        if ends.numel() and (int(ends[0]) != 0 or bool((ends.diff() < 0).any()) or int(ends[-1]) > n):
            raise ValueError(f"offsets must begin with 0, not descend, and end at {n} or before, the number of indices.")
        bag = (torch.searchsorted(ends, place, right=True) - 1).clamp(max=n_bags)
    return ids, bag, (ids != left_out) & (bag < n_bags)


def _counts(bag: Tensor, counted: Tensor, n_bags: int, mean: bool, dtype: torch.dtype) -> Tensor | int:
    """[n_bags, 1]: how many ids each bag has, 1 where it has none; 1 without `mean`."""
    return torch.bincount(bag[counted], minlength=n_bags).clamp(min=1).unsqueeze(-1).to(dtype) if mean else 1
