"""Checks of arguments that several of this package's functions take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from npu_tiling import device_for
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.autograd import can_bypass_dispatcher
from torch import Tensor

from . import reference
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
        if weight.layout is not torch.strided:
            arguments.refuse_layout("weight", weight)
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
    arguments.tensor("row_scales", row_scales)
    arguments.dtype("row_scales", row_scales, *arguments.DTYPES)
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
        return signed("padding_idx", padding_idx, 64, least=0)
    if not -rows <= padding_idx < rows:
        allowed = f"from {-rows} to {rows - 1}" if rows else "None where there are no rows"
        raise ValueError(f"padding_idx is {padding_idx} and must be {allowed}.")
    return padding_idx % rows


def signed(name: str, value: int, bits: int, least: int | None = None) -> int:
    """A whole number that an integer of so many bits holds."""
    found: int = arguments.whole(name, value, least=least)
    if not -(2 ** (bits - 1)) <= found < 2 ** (bits - 1):
        first = -(2 ** (bits - 1)) if least is None else least
        raise ValueError(f"{name} is {value} and must be from {first} to {2 ** (bits - 1) - 1}.")
    return found


def numbers(name: str, value: Tensor | Sequence[int], like: Tensor, of: str, least: int | None = None) -> Tensor:
    """int64 [n] on the device of `like`, which the error names as `of`; `least`: of those in a sequence."""
    if not isinstance(value, Tensor):
        if not isinstance(value, Sequence):
            raise TypeError(f"{name} is a {type(value).__name__} and must be a tensor, or a sequence of whole numbers.")
        found = [signed(f"{name}[{i}]", each, 64, least) for i, each in enumerate(value)]
        return torch.tensor(found, dtype=torch.int64, device=like.device)
    arguments.dtype(name, value, torch.int64)
    if value.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)} and must have one dimension.")
    arguments.device(name, value, like, of)
    return value


def inside(indices: Tensor, n_total: int, base: Tensor | None = None) -> None:
    """On a CPU, an index outside the table is an IndexError that names its place among those given; see `reference.check`.

    Operators check again, under transforms and modes too; they are given indices in another shape.
    """
    if can_bypass_dispatcher((indices, base)) and device_for(indices.device) is None:
        reference.check(indices, n_total, base=base)
