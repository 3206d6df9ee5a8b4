"""The operators of look-ups that sum or decode rows: `bags`, and `spread`, its backward up to dx and dsample.

dx is the gradient of each position of a bag: dy of the bag, times the sample weight of the position and the factor. dsample
is the gradient of the sample weights. `backward` of operators.py makes the table's gradient of dx. Bags of equal lengths
without sample weights need no `spread`: all ids of a bag read the same row of dy. Two kinds need it all the same: means that
leave ids out, and rows that are normalised.
"""

from __future__ import annotations

import torch
from npu_tiling import device_for
from npu_tiling.pytorch.autograd import Function, apply, needs_gradient
from torch import Tensor

from . import reference
from .launch import bags as launch
from .operators import OPERATORS, sparse_gradient
from .shape import NO_ID, NO_ROW

_IDS = "Tensor indices, Tensor? offsets, Tensor? base, Tensor? sample_weights"
_BAGS = "SymInt n_bags, bool mean, float factor, float? eps"


def _bags(indices, offsets, base, sample_weights, weight, row_scales, n_bags, mean, factor, eps, dtype, *gradient):  # type: ignore[no-untyped-def]
    padding_idx, leaves_out, _, _, first_row, n_total = gradient
    left_out = padding_idx if leaves_out and padding_idx != NO_ROW else NO_ID
    ids, numbers = (indices, offsets, base, sample_weights), (first_row, n_total)
    device = device_for(weight.device)
    if device is None:
        return reference.bags(*ids, weight, row_scales, n_bags, mean, factor, eps, dtype, left_out, *numbers)
    bags = launch.Bags(*ids, n_bags, mean, factor, eps, left_out, *numbers)
    return launch.forward(bags, weight, row_scales, dtype, device)


def _fake_bags(indices, offsets, base, sample_weights, weight, row_scales, n_bags, mean, factor, eps, dtype, *others):  # type: ignore[no-untyped-def]
    return torch.empty((n_bags, weight.shape[1]), dtype=dtype, device=weight.device)


def _spread(dy, indices, offsets, base, sample_weights, weight, rows, n_bags, mean, factor, eps, left_out, first_row):  # type: ignore[no-untyped-def]
    ids = (indices, offsets, base, sample_weights)
    device = device_for(dy.device)
    if device is None:
        return reference.spread(dy, *ids, weight, rows, n_bags, mean, factor, eps, left_out, first_row)
    bags = launch.Bags(*ids, n_bags, mean, factor, eps, left_out, first_row, launch.EVERY_ID)
    return launch.spread(dy, bags, weight, rows, device)


def _fake_spread(dy, indices, offsets, base, sample_weights, weight, rows, n_bags, mean, factor, eps, *others):  # type: ignore[no-untyped-def]
    n, wide = indices.numel(), torch.float64 if dy.dtype == torch.float64 else torch.float32
    dx = torch.empty((n, dy.shape[1]), dtype=dy.dtype, device=dy.device) if rows else None
    return dx, None if weight is None or eps is not None else torch.empty(n, dtype=wide, device=dy.device)


OPERATORS.define(
    f"bags({_IDS}, Tensor weight, Tensor? row_scales, {_BAGS}, ScalarType dtype, SymInt padding_idx, bool leaves_out, "
    "bool scale_grad_by_freq, bool sparse, SymInt first_row, SymInt n_total) -> Tensor",
    _bags,
    _fake_bags,
)
OPERATORS.define(
    f"spread(Tensor dy, {_IDS}, Tensor? weight, bool rows, {_BAGS}, SymInt left_out, SymInt first_row)"
    " -> (Tensor dx, Tensor dsample)",
    _spread,
    _fake_spread,
)


class _Bags(Function):
    @staticmethod
    def forward(ctx, run, indices, offsets, base, sample_weights, weight, row_scales, *options):  # type: ignore[no-untyped-def]
        n_bags, mean, factor, eps, _, padding_idx, leaves_out, scale_grad_by_freq, sparse, first_row, _ = options
        ids = (indices, offsets, base, sample_weights)
        asks = (weight.requires_grad, sample_weights is not None and sample_weights.requires_grad)
        ctx.save_for_backward(*ids, weight if asks[1] or eps is not None else None)
        ctx.set_materialize_grads(False)
        left_out = padding_idx if leaves_out and padding_idx != NO_ROW else NO_ID
        ctx.options = (asks, weight.shape, n_bags, mean, factor, eps, left_out, first_row)
        ctx.gradient = (weight.shape[0], padding_idx, scale_grad_by_freq, sparse, first_row)
        return run(*ids, weight, row_scales, *options)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        dweight = dsample = None
        if dy is not None:
            indices, offsets, base, sample_weights, weight = ctx.saved_tensors
            (asks_rows, asks_weights), shape, n_bags, mean, factor, eps, left_out, first_row = ctx.options
            ids = indices if base is None else (indices.view(-1, base.numel()) + base).view(-1)
            same = offsets is None and sample_weights is None and (left_out == NO_ID or not mean) and ids.numel()
            if same and eps is None:
                each = ids.numel() // n_bags
                factor = factor / each if mean else factor
                dx = dy if factor == 1 else dy * factor
                if each > 1:  # [each, n_bags, D], of which every part is dy
                    dx, ids = dx.expand(each, *dx.shape), ids.view(n_bags, each).t()
            else:
                options = (asks_rows, n_bags, mean, factor, eps, left_out, first_row)
                given = (indices, offsets, base, sample_weights, weight)
                dx, dsample = OPERATORS("spread", dy, *given, *options)
                dsample = dsample.to(sample_weights.dtype) if asks_weights else None
            if asks_rows:
                dweight, rows = OPERATORS("backward", dx, ids, *ctx.gradient)
                if ctx.gradient[3]:
                    dweight = sparse_gradient(rows, dweight, shape)
        return None, None, None, None, dsample, dweight, *[None] * 12


def _recorded(run, indices, offsets, base, sample_weights, weight, *options):  # type: ignore[no-untyped-def]
    if needs_gradient((sample_weights, weight)):
        return apply(_Bags, run, indices, offsets, base, sample_weights, weight, *options)
    return run(indices, offsets, base, sample_weights, weight, *options)


OPERATORS.autograd("bags", _recorded)
OPERATORS.gradient("spread")


def computed_rows(
    indices: Tensor,
    weight: Tensor,
    row_scales: Tensor | None,
    factor: float,
    eps: float | None,
    dtype: torch.dtype,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
    first_row: int,
    n_total: int,
) -> Tensor:
    """[..., D]: rows, decoded, times a factor, normalised: bags of one id each, of which none is left out."""
    flat = indices.reshape(-1)
    gradient = (padding_idx, False, scale_grad_by_freq, sparse, first_row, n_total)
    options = (flat.numel(), False, factor, eps, dtype, *gradient)
    out = OPERATORS("bags", flat, None, None, None, weight, row_scales, *options)
    found: Tensor = out.view(*indices.shape, weight.shape[1])
    return found
