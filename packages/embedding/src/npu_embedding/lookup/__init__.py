"""The look-up, its gradient and `max_norm`: operators in PyTorch's namespace `npu_embedding`, their autograd and plans.

`forward` is the look-up and `backward` its gradient, dense or, for `sparse`, an entry for each index: kernels on
accelerators, reference.py on a CPU. `renormalise_` is PyTorch everywhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from npu_tiling import Device, arguments
from npu_tiling.calls import Empty, derive
from npu_tiling.dispatch import Function, OperatorLibrary, apply
from npu_tiling.operators import Operator
from npu_tiling.plans import Plan, Slot
from npu_tiling.rows import row_stride
from torch import Tensor

from .. import reference
from ..call import NO_ROW, Backward, Bags, Forward, Renormalise
from ..rows import NAN_BITS, Gradient, RowShape, Rule, Way, as_bits, dense_rows, fill

LIBRARY = OperatorLibrary("npu_embedding")


def forward(p: Plan, call: Forward) -> tuple[Slot]:
    """Rows [..., D] of weight [V, D] for indices [...]: -0.0 for rows of other shards, NaN for what no shard has."""
    from . import ascend, cuda  # modules of kernels import Triton

    out, (n_rows, width), n = p.new(call.results()["out"]), call.weight.shape, call.indices.numel()
    if not out.numel():
        return (out,)
    if not n_rows:  # an empty shard; a kernel takes no tensor without elements
        p.torch(_fill_unknown, out, call.indices, call.n_total, writes=[out])
        return (out,)
    module, weight = cuda if p.chip.kind == "cuda" else ascend, dense_rows(p, call.weight)
    shape = RowShape(width=width, itemsize=weight.dtype.itemsize, device=p.chip)
    first, s_weight = call.first_row, weight.strides[0]
    p.launch_over(
        module.gather_rows_kernel,
        module.gather_tiling(shape),
        n,
        flags={"NAN": NAN_BITS[weight.dtype]},
        decision="embedding forward",
        reads={"p_index": p.contiguous(call.indices), "p_weight": as_bits(p, weight)},
        writes={"p_out": as_bits(p, out)},
        sizes={"n": n, "first_row": first, "stop_row": first + n_rows, "n_total": call.n_total, "s_weight": s_weight},
    )
    return (out,)


def _fill_unknown(out: Tensor, indices: Tensor, n_total: int) -> None:
    """-0.0 for rows of other shards, NaN for what no shard has."""
    known = (indices >= 0) & (indices.long() < n_total)  # PyTorch wraps a number that it compares int32 with
    out.copy_(torch.where(known, -0.0, torch.nan).unsqueeze(-1).expand(out.shape))


def backward(p: Plan, call: Backward) -> tuple[Slot, Slot | None]:
    """dweight [n_rows, D]; if `sparse`, values [n, D] and rows [n], as `reference.slots` has them."""
    from . import ascend, cuda

    dweight, n = p.new(call.results()["dweight"]), call.indices.numel()
    gradient = _gradient(p, call)
    module: Any = cuda if p.chip.kind == "cuda" else ascend
    if not call.sparse:
        if dweight.numel() and n:
            module.backward(p, gradient, dweight, choose(n, call.n_rows, dweight.shape[-1], p.chip, gradient.dy.dim() == 3))
        else:
            fill(p, dweight, 0)
        return dweight, None
    if p.chip.kind == "cuda" or not n or not call.n_rows:
        arguments = (gradient.indices, call.n_rows, call.padding_idx, call.first_row)
        slot, order, rows = p.torch(reference.slots, *arguments, makes=[Empty((n,), torch.int64)] * 3)
    else:
        slot, order, rows = ascend.slots(p, gradient, choose(n, call.n_rows, dweight.shape[-1], p.chip))
    if dweight.numel():
        module.sum_slots(p, gradient, dweight, slot, order)
    return dweight, rows


def renormalise_(p: Plan, call: Renormalise) -> tuple[()]:
    """Scales rows in place."""
    weight: Any = call.weight
    p.torch(reference.scale_rows, *call[:-1], writes=[weight])
    return ()


def choose(indices: int, rows: int, width: int, chip: Device, in_parts: bool = False) -> Rule:
    """The first rule of the chip's table of ways that matches these numbers, and whether rows of dy lie in parts.

    Raises:
        ValueError: there are more indices, or the table has more rows, than any way takes (Ascend).
    """
    from . import ascend_sort, cuda_sort

    ways: tuple[Rule, ...] = (cuda_sort if chip.kind == "cuda" else ascend_sort).WAYS
    for rule in ways:
        fits = indices <= rule.max_indices and indices * width <= rule.max_elements and rows <= rule.max_rows
        if fits and indices >= rule.repeats * rows and not (in_parts and rule.way is Way.REPEATED):
            return rule
    last = ways[-1]
    if indices > last.max_indices:
        raise ValueError(f"indices has {indices} elements and must have at most {last.max_indices} on {chip.name}.")
    raise ValueError(f"the table has {rows} rows and must have at most {last.max_rows} on {chip.name}.")


def _gradient(p: Plan, call: Backward) -> Gradient:
    """What the gradient's kernels read: indices [n], and dy as rows that lie in one part or in several."""
    first, indices, n = call.first_row, p.contiguous(call.indices), call.indices.numel()
    dy: Any = call.dy
    padding = call.padding_idx - first if first <= call.padding_idx < first + call.n_rows else NO_ROW
    if indices.dim() != 1:
        indices = p.view(indices, (n,), (1,))
    if dy.dim() == 3 and min(dy.shape[:2]) > 1 and dy.strides[0] != dy.shape[1] * dy.strides[1]:
        rows = dense_rows(p, dy)
    else:
        rows = _as_matrix(p, dy, n)
    return Gradient(rows, indices, call.n_rows, padding, call.scale_grad_by_freq, first)


def _as_matrix(p: Plan, dy: Any, n: int) -> Any:
    """dy [..., D] as rows [n, D] with one stride, which is a copy where it has none."""
    if dy.dim() == 2:
        return dense_rows(p, dy)
    step, width = row_stride(dy.shape, dy.strides), dy.shape[-1]
    return p.view(p.contiguous(dy), (n, width), (width, 1)) if step is None else p.view(dy, (n, width), (step, 1))


FORWARD = Operator(LIBRARY, "forward", Forward, ["out"], plan=forward, reference=reference.forward, forward_mode=True)
BACKWARD = Operator(
    LIBRARY,
    "backward",
    Backward,
    ["dweight", "rows"],
    plan=backward,
    reference=reference.backward,
    forward_mode=True,
    is_gradient=True,
)
RENORMALISE = Operator(
    LIBRARY, "renormalise_", Renormalise, [], plan=renormalise_, reference=reference.renormalise_, writes=["weight"]
)


def largest_norm(max_norm: Any, row_scales: Tensor | None) -> float:
    """max_norm, also beyond fp32: a row whose norm is infinite is larger."""
    arguments.number("max_norm", max_norm, least=0, finite=False, or_none=True)
    if row_scales is not None:
        raise ValueError(f"max_norm is {max_norm} and must be None where row_scales is given: such a table is frozen.")
    return float(max_norm)


def gradient_of_table(call: Forward | Bags, dy: Tensor, indices: Tensor, n_rows: int, dtype: torch.dtype) -> Tensor:
    """The gradient of a call's table, [n_rows, D], of dy [..., D] of indices [...]; a sparse tensor if the call says so."""
    dweight, rows = BACKWARD(derive(Backward, call, dy=dy, indices=indices, n_rows=n_rows, dtype=dtype))
    if not call.sparse:
        found: Tensor = dweight
        return found
    if not n_rows:  # a shard without rows has no entries
        rows, dweight = rows[:0], dweight[:0]
    shape = (n_rows, dweight.shape[-1])
    return torch.sparse_coo_tensor(rows.unsqueeze(0), dweight, shape, check_invariants=False)


class _Embedding(Function):
    @staticmethod
    def forward(ctx, run, indices, weight, *options):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(indices)
        ctx.call, ctx.n_rows = Forward(None, None, *options), weight.shape[0]  # the call's tensors are saved
        ctx.set_materialize_grads(False)
        return run(indices, weight, *options)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        (indices,) = ctx.saved_tensors
        dweight = None if dy is None else gradient_of_table(ctx.call, dy, indices, ctx.n_rows, dy.dtype)
        return None, None, dweight, None, None, None, None, None


FORWARD.autograd(partial(apply, _Embedding), as_given=True)
RENORMALISE.autograd(lambda run, *arguments: run(*arguments))
