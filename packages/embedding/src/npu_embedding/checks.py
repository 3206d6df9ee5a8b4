"""Checks of arguments that several of this package's functions take."""

from __future__ import annotations

import torch
from npu_tiling.pytorch import arguments
from torch import Tensor

from .shape import NO_ROW

FROZEN = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)  # of rows with scales


def table(indices: Tensor, weight: Tensor, row_scales: Tensor | None, dtype: torch.dtype | None) -> torch.dtype:
    """Indices, and a table with the scales of its rows; the dtype of the result."""
    arguments.tensor("indices", indices)
    arguments.dtype("indices", indices, torch.int32, torch.int64)
    if row_scales is None:
        arguments.floating("weight", weight)
    else:
        arguments.tensor("weight", weight)
        if weight.dtype not in FROZEN:
            raise TypeError(
                f"weight is {weight.dtype} and must be {' or '.join(map(str, FROZEN))} where row_scales is given."
            )
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)} and must have two dimensions.")
    arguments.device("indices", indices, weight, "weight's")
    if row_scales is None:
        if dtype is not None:
            raise ValueError(
                f"dtype is {dtype} and must be left out where there are no row_scales: the result has weight's dtype."
            )
        return weight.dtype
    arguments.floating("row_scales", row_scales)
    arguments.shape("row_scales", row_scales, weight.shape[:1])
    arguments.device("row_scales", row_scales, weight, "weight's")
    for name, tensor in (("weight", weight), ("row_scales", row_scales)):
        if tensor.requires_grad:
            raise ValueError(f"{name} requires grad and must not: a table with row_scales is frozen; detach it.")
    if dtype is None:
        return row_scales.dtype
    if dtype not in arguments.DTYPES:
        raise ValueError(f"dtype is {dtype} and must be {' or '.join(map(str, arguments.DTYPES))}.")
    return dtype


def padding_row(padding_idx: int | None, rows: int | None) -> int:
    """padding_idx counted from the start, NO_ROW for none; `rows`: of the table, None where that is not known."""
    if padding_idx is None:
        return NO_ROW
    arguments.whole("padding_idx", padding_idx, or_none=True)
    if rows is None:
        if padding_idx < 0:
            raise ValueError(f"padding_idx is {padding_idx} and must be at least 0 where num_embeddings is not given.")
        return padding_idx
    if not -rows <= padding_idx < rows:
        raise ValueError(f"padding_idx is {padding_idx} and must be from {-rows} to {rows - 1}.")
    return padding_idx % rows
