"""Several ids a result: sums, means and concatenations of rows. It checks its arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.sharding import is_distributed
from torch import Tensor

from . import checks
from .bag_operators import computed_rows
from .operators import OPERATORS


def embedding_bag(
    indices: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    *,
    table_offsets: Tensor | Sequence[int] | None = None,
    row_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sums, means or concatenations of rows of a table, by index: `torch.nn.functional.embedding_bag`, in one launch.

        out[b] = sum over the positions i of bag b of per_sample_weights[i] * weight[indices[i]]      mode "sum"
        out[b] = sum over the positions i of bag b of weight[indices[i]] / their number               mode "mean"
        out[b] = weight[indices[b, 0]], ..., weight[indices[b, K - 1]]                                mode "concat"

    Sums are fp32, rounded once, in the order of the positions. A bag without ids is zeros. The gradient of `weight` is that
    of `embedding`, of rows that are dy of their bag times their weight, rounded to dy's dtype. An index outside the table is
    an error on a CPU; elsewhere its bag is NaN.

    Args:
        indices: [n] with `offsets`, or [..., K]: bags of K ids. int32 or int64.
        weight, max_norm, norm_type, scale_grad_by_freq, sparse, row_scales, dtype: see `embedding`.
        offsets: [B], int32 or int64: the first position of each bag, ascending from 0.
        mode: "sum", "mean" or "concat" (indices [..., K] alone).
        per_sample_weights: of indices' shape, in weight's dtype or fp32; mode "sum" alone. They have a gradient too.
        include_last_offset: `offsets` is [B + 1]: where the last bag ends, too.
        padding_idx: such ids are not in their bag and do not count for the mean. Mode "concat" has the row as it is. It gets
            no gradient. With `table_offsets` it counts in the whole of the tables.
        table_offsets: [K], int64: `weight` is K tables one after the other; a bag's k-th id counts from the k-th offset.
            It is compared with the rows of all tables, not with those of its own.

    Returns:
        [B, D] or [..., D], or [..., K * D] for mode "concat"; in weight's dtype, or `dtype`.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes, devices or options do not match.
        IndexError: an index is outside the table (CPU).
        NotImplementedError: mode is "max".

    Source: torch.nn.functional.embedding_bag.
    """
    if is_distributed((indices, weight)):
        raise TypeError("weight or indices is a DTensor and must be a plain tensor.")
    dtype = checks.table(indices, weight, row_scales, dtype)
    padding = checks.padding_row(padding_idx, len(weight))
    max_norm = arguments.number("max_norm", max_norm, least=0, finite=False, or_none=True)
    norm_type = arguments.number("norm_type", norm_type, finite=False)
    arguments.flags(scale_grad_by_freq=scale_grad_by_freq, sparse=sparse, include_last_offset=include_last_offset)
    check_mode(mode)
    n_bags = _check_bags(indices, offsets, include_last_offset, mode)
    _check_weights(per_sample_weights, indices, weight, row_scales, mode)
    base = None if table_offsets is None else _table_offsets(table_offsets, indices, offsets)
    if offsets is None:
        checks.inside(indices, len(weight), base)
    flat = indices.reshape(-1)
    if max_norm is not None:
        if row_scales is not None:
            raise ValueError(f"max_norm is {max_norm} and must be None where row_scales is given: such a table is frozen.")
        ids = flat if base is None else (flat.view(-1, base.numel()) + base).view(-1)
        OPERATORS("renormalise_", ids, weight.detach(), max_norm, norm_type, 0, len(weight))
    gradient = (scale_grad_by_freq, sparse, 0, len(weight))
    if mode == "concat":
        if base is not None:
            indices = indices + base
        if row_scales is None:
            out = OPERATORS("forward", indices, weight, padding, *gradient)
        else:
            out = computed_rows(indices, weight, row_scales, 1.0, None, dtype, padding, *gradient)
        return out.flatten(-2)
    sample = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    options = (n_bags, mode == "mean", 1.0, None, dtype, padding, True, *gradient)
    out = OPERATORS("bags", flat, offsets, base, sample, weight, row_scales, *options)
    found: Tensor = out if offsets is not None else out.view(*indices.shape[:-1], weight.shape[1])
    return found


def check_mode(mode: str) -> None:
    """Raises ValueError for what is no mode, and NotImplementedError for one of torch's that there is no kernel for."""
    if mode == "max":
        raise NotImplementedError(
            "mode is 'max' and must be 'sum', 'mean' or 'concat': for ids [..., K] without padding take "
            "embedding(...).amax(-2)."
        )
    arguments.one_of("mode", mode, ("sum", "mean", "concat"))


def _check_bags(indices: Tensor, offsets: Tensor | None, include_last_offset: bool, mode: str) -> int:
    """How many bags."""
    arguments.tensor("offsets", offsets, or_none=True)
    if offsets is None:
        if indices.dim() < 2:
            shape = tuple(indices.shape)
            raise ValueError(f"indices has shape {shape} and must have at least two dimensions, or offsets must be given.")
        if include_last_offset:
            raise ValueError("include_last_offset is True and must be False where offsets is None.")
        return math.prod(indices.shape[:-1])
    if indices.dim() != 1:
        raise ValueError(f"indices has shape {tuple(indices.shape)} and must have one dimension where offsets is given.")
    arguments.dtype("offsets", offsets, torch.int32, torch.int64)
    if offsets.dim() != 1 or offsets.numel() < int(include_last_offset):  # compilers' symbolic sizes take no bool
        least = " of at least 1" if include_last_offset else ""
        raise ValueError(f"offsets has shape {tuple(offsets.shape)} and must have one dimension{least}.")
    arguments.device("offsets", offsets, indices, "indices'")
    if indices.numel() and not offsets.numel():
        raise ValueError(f"offsets is empty and must begin with 0 where there are indices: there are {indices.numel()}.")
    if mode == "concat":
        raise ValueError("mode is 'concat' and must be 'sum' or 'mean' where offsets is given.")
    return offsets.numel() - int(include_last_offset)


def _check_weights(weights: Tensor | None, indices: Tensor, weight: Tensor, row_scales: Tensor | None, mode: str) -> None:
    if weights is None:
        return
    arguments.floating("per_sample_weights", weights)
    arguments.shape("per_sample_weights", weights, indices.shape)
    arguments.device("per_sample_weights", weights, indices, "indices'")
    if row_scales is None:
        arguments.parameter_dtype("per_sample_weights", weights, weight, "weight's")
    elif weights.requires_grad:
        raise ValueError("per_sample_weights requires grad and must not where row_scales is given: detach it.")
    if mode != "sum":
        raise ValueError(f"mode is {mode!r} and must be 'sum' where per_sample_weights is given.")


def _table_offsets(value: Tensor | Sequence[int], indices: Tensor, offsets: Tensor | None) -> Tensor | None:
    """int64 [K] where the indices are; None for no tables."""
    if offsets is not None:
        raise ValueError(
            "table_offsets is given and must be None where offsets is: bags have as many ids as there are tables."
        )
    found = checks.numbers("table_offsets", value, indices, "indices'", least=0)
    arguments.shape("table_offsets", found, indices.shape[-1:])
    return found if found.numel() else None
