"""The plan of the backward: dx and dgate, and dweight and dbias, which are sums of the programs' partial sums.

Launches: one for rows (two for "wide" rows that need dx), and one for each of dweight and dbias, which adds partial sums;
none where a single program sees all rows and stores the gradient itself (`stores_sums`).
Memory beside the results: the partial sums, mean(g n) for "wide", the exchanged words for "shared", and copies of tensors
that kernels cannot read in place.
"""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling.calls import Empty
from npu_tiling.partials import add_partials
from npu_tiling.plans import Plan, Slot

from .ascend import kernels as ascend
from .call import Backward
from .cuda import kernels as cuda
from .layout import Rows, rows_of, smaller
from .wide import backward_wide_kernel, backward_wide_mean_kernel

NAME = "rms_norm backward"


def backward(p: Plan, call: Backward, into: Slot | None = None) -> tuple[Slot | None, ...]:
    """dx, dgate, dweight and dbias; None for what is not asked for. `into`: dx is written to this slot, which may be dy."""
    if into is not None and _needs_copies(p, call, into):
        return _backward_with_copies(p, call, into)
    wanted = call.results()
    writes_dx = call.need_dx or (call.need_dgate and not call.norm_before_gate)  # where x is gated, dgate follows from dx
    dx = into or p.new(Empty(call.x.shape, call.x.dtype) if writes_dx else None)
    dgate, dweight, dbias = (p.new(wanted[name]) for name in ("dgate", "dweight", "dbias"))
    gradients = {"p_dw": dweight, "p_db": dbias}
    if call.dy.numel():
        sums = _launch(p, call, dx, dgate, gradients)
        for name, gradient in gradients.items():
            if gradient is not None and sums[name] is not gradient:
                add_partials(p, f"sum of {name}", sums[name], gradient)
    else:
        for gradient in filter(None, gradients.values()):
            p.torch(torch.Tensor.zero_, gradient, writes=[gradient])
    return dx if call.need_dx else None, dgate, dweight, dbias


def backward_(p: Plan, call: Backward) -> tuple[Slot | None, ...]:
    """dweight and dbias; dx is written to dy."""
    into: Any = call.dy  # a plan's record has slots in place of tensors
    return backward(p, call, into)[2:]


def _tensors(call: Backward, dx: Slot | None) -> dict[str, Any]:
    return {"dy": call.dy, "dsum": call.dsum, "x": call.x, "gate": call.gate, "dx": dx}


def _needs_copies(p: Plan, call: Backward, into: Slot) -> bool:
    """Whether kernels cannot read these tensors and write `into` in place."""
    return bool(call.dy.numel()) and rows_of(call, _tensors(call, into), into, p.chip).copied


def _backward_with_copies(p: Plan, call: Backward, into: Slot) -> tuple[Slot | None, ...]:
    """The backward where `_needs_copies`: it copies dy or, where that does not help, computes dx apart and copies it."""
    if into is not call.dy and not call.dy.is_contiguous():
        return backward(p, call._replace(dy=p.contiguous(call.dy)), into)
    dx, *others = backward(p, call)
    p.torch(torch.Tensor.copy_, into, dx, writes=[into])
    return into, *others


def _launch(
    p: Plan, call: Backward, dx: Slot | None, dgate: Slot | None, parameters: dict[str, Slot | None]
) -> dict[str, Any]:
    """Adds the launches that read rows.

    Returns the slots that hold dweight and dbias, by the kernels' parameter: `parameters` itself, or fp32 partial sums.
    """
    tensors = _tensors(call, dx)
    rows = rows_of(call, tensors, dx, p.chip)
    if rows.copied:
        tensors = {name: p.contiguous(each) for name, each in tensors.items()}
    weight, bias = p.contiguous(call.weight), p.contiguous(call.bias)
    rstd = _by_head(p, call.rstd) if call.has_heads() else p.contiguous(call.rstd)
    read = {f"p_{name}": each for name, each in tensors.items() if name != "dx"}
    read |= {"p_weight": weight, "p_rstd": rstd}
    tiling = p.choose(NAME, rows.tiling, smaller)
    sums = parameters
    if not tiling.stores_sums:  # fp32 [splits, D] or [splits, H D]
        splits = tiling.splits // tiling.heads
        sums = {
            name: p.new(None if each is None else Empty((splits, each.numel()), torch.float32))
            for name, each in parameters.items()
        }
    written = {"p_dx": dx, "p_dgate": dgate, **sums}
    if tiling.kernel == "wide":
        _launch_wide(p, rows, tiling, read | {"p_bias": bias}, written)
    elif tiling.kernel == "shared":
        _launch_shared(p, rows, tiling, read, written)
    else:
        kernel = cuda.backward_kernel if p.chip.kind == "cuda" else ascend.backward_kernel
        sizes = rows.sizes("dy", "dsum", "x", "gate", "dx")
        p.launch(kernel, NAME, tiling.grid, reads=read | {"p_bias": bias}, writes=written, sizes=sizes)
    return sums


def _launch_wide(p: Plan, rows: Rows, tiling: Any, read: dict[str, Any], written: dict[str, Any]) -> None:
    """A launch for mean(g n) of each row, where dx needs it, and one for the gradients."""
    mean = None
    if written["p_dx"] is not None:
        mean = p.new(Empty(read["p_rstd"].shape, torch.float32))
        p.launch(
            backward_wide_mean_kernel,
            NAME,
            tiling.grid,
            reads={name: read[name] for name in ("p_dy", "p_x", "p_gate", "p_weight", "p_rstd")},
            writes={"p_mean": mean},
            sizes=rows.sizes("dy", "x", "gate"),
        )
    p.launch(
        backward_wide_kernel,
        NAME,
        tiling.column_grid,
        reads=read | {"p_mean": mean},
        writes=written,
        sizes=rows.sizes("dy", "dsum", "x", "gate", "dx", n_splits=tiling.splits),
    )


def _launch_shared(p: Plan, rows: Rows, tiling: Any, read: dict[str, Any], written: dict[str, Any]) -> None:
    """A launch whose programs hold a row together. They exchange parts of mean(g n) in 64-bit words, zeros at first."""
    words = p.new(Empty((read["p_rstd"].numel() * tiling.share,), torch.int64))
    assert words is not None
    p.torch(torch.Tensor.zero_, words, writes=[words])
    p.launch(
        cuda.backward_shared_kernel,
        NAME,
        tiling.grid,
        reads={name: read[name] for name in ("p_dy", "p_dsum", "p_x", "p_weight", "p_rstd")},
        writes={"p_dx": written["p_dx"], "p_dw": written["p_dw"], "p_words": words},
        sizes=rows.sizes("dy", "dsum", "x", "dx"),
    )


def _by_head(p: Plan, rstd: Any) -> Slot:
    """rstd [..., H] with its heads outermost in memory, as the forward makes it; else a copy of that form."""
    wanted = Empty(rstd.shape, rstd.dtype, last_outermost=True)
    order = (rstd.dim() - 1, *range(rstd.dim() - 1))
    shape, strides = (tuple(of[i] for i in order) for of in (rstd.shape, rstd.strides))
    heads_first = Slot(rstd.number, shape, strides, rstd.dtype, rstd.base)
    if heads_first.is_contiguous():
        return rstd
    copy = p.contiguous(p.view(rstd, shape, strides))
    assert copy is not None
    return p.view(copy, rstd.shape, wanted.strides)
