"""The operators of a table whose rows are split over ranks that have equally many indices.

Every rank looks up the indices of all. Sizes are known, so that no host waits for numbers, a graph can capture it, and a
repeated call makes its collectives without deciding anything again.

    this rank                    every rank
    indices              ->      indices of all ranks, in the ranks' order
    rows                 <-      the sum over the ranks of what they look up; a rank gives -0.0, which changes no sum, for
                                 rows that it does not have
    gradient of rows     ->      gradients of all rows; dweight: the sums over those of its own

The forward takes `padding_idx` and `scale_grad_by_freq` for autograd alone.
"""

from __future__ import annotations

import torch
from npu_tiling import device_for
from npu_tiling.pytorch import collectives
from npu_tiling.pytorch.autograd import Function, apply, needs_gradient
from torch import Tensor

from . import reference
from .operators import OPERATORS, backward, forward

_GRADIENT = "SymInt padding_idx, bool scale_grad_by_freq, SymInt first_row"


def _by_all(
    indices: Tensor, weight: Tensor, padding_idx: int, scale_grad_by_freq: bool, first_row: int, n_total: int, group: str
) -> tuple[Tensor, Tensor]:
    if device_for(indices.device) is None:
        reference.check(indices, n_total)  # here, where it is known whose index it is; other ranks then wait for this one
    of_all = collectives.gather(indices, group)
    rows = forward(of_all, weight, padding_idx, scale_grad_by_freq, False, first_row, n_total)
    return collectives.sum_of_own(rows, group), of_all


def _by_all_backward(
    dy: Tensor, of_all: Tensor, n_rows: int, padding_idx: int, scale_grad_by_freq: bool, first_row: int, group: str
) -> Tensor:
    options = (n_rows, padding_idx, scale_grad_by_freq, False, first_row)
    dweight, _ = backward(collectives.gather(dy, group), of_all, *options)
    return dweight


def _fake_by_all(indices, weight, padding_idx, scale_grad_by_freq, first_row, n_total, group):  # type: ignore[no-untyped-def]
    rows = torch.empty((*indices.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)
    return rows, torch.empty((collectives.ranks(group), *indices.shape), dtype=indices.dtype, device=indices.device)


def _fake_by_all_backward(dy, of_all, n_rows, padding_idx, scale_grad_by_freq, first_row, group):  # type: ignore[no-untyped-def]
    return torch.empty((n_rows, dy.shape[-1]), dtype=dy.dtype, device=dy.device)


OPERATORS.define(
    f"by_all(Tensor indices, Tensor weight, {_GRADIENT}, SymInt n_total, str group) -> (Tensor rows, Tensor of_all)",
    _by_all,
    _fake_by_all,
)
OPERATORS.define(
    f"by_all_backward(Tensor dy, Tensor of_all, SymInt n_rows, {_GRADIENT}, str group) -> Tensor",
    _by_all_backward,
    _fake_by_all_backward,
)


class _ByAll(Function):
    @staticmethod
    def forward(ctx, run, indices, weight, *options):  # type: ignore[no-untyped-def]
        rows, of_all = run(indices, weight, *options)
        ctx.save_for_backward(of_all)
        ctx.mark_non_differentiable(of_all)
        ctx.set_materialize_grads(False)
        padding_idx, scale_grad_by_freq, first_row, _, group = options
        ctx.options = (weight.shape[0], padding_idx, scale_grad_by_freq, first_row, group)
        ctx.of_rows = rows.shape, rows.dtype
        return rows, of_all

    @staticmethod
    def backward(ctx, dy, _):  # type: ignore[no-untyped-def]
        (of_all,) = ctx.saved_tensors
        if dy is None:  # other ranks wait for this one's
            shape, dtype = ctx.of_rows
            dy = of_all.new_zeros(shape, dtype=dtype)
        dweight = OPERATORS("by_all_backward", dy, of_all, *ctx.options)
        return None, None, dweight, None, None, None, None, None


def _recorded(run, indices, weight, *options):  # type: ignore[no-untyped-def]
    if needs_gradient((weight,)):
        return apply(_ByAll, run, indices, weight, *options)
    return run(indices, weight, *options)


OPERATORS.autograd("by_all", _recorded)
OPERATORS.gradient("by_all_backward")
