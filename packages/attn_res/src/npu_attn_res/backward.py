"""The plan of the backward: a launch through the RMSNorm that follows h, one of whole rows, and one for each sum.

Where rows do not fit on chip, kernels take blocks of columns (columns.py); with a prefix PyTorch's operators compute.
Memory beside the results: the gradient of h in fp32 where there is an RMSNorm, partial sums, and exchanged words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from npu_tiling.calls import Empty
from npu_tiling.partials import choose_sum, sum_partials_kernel
from npu_tiling.plans import Plan, Slot
from npu_tiling.tensors import without_autocast

from . import columns, reference
from .ascend import kernels as ascend
from .cuda import kernels as cuda
from .cuda import tiling as cuda_tiling
from .kernels import attn_res_add_partials_kernel, attn_res_norm_backward_kernel
from .records import Backward, gradient_of, gradients_of, keeps_by_token, reads_h
from .shape import Shape, Task, Tiling
from .sources import Sources, followed, row_stride, sources_on_chip, sources_with_prefix, stride_of, whole_rows, widest


def backward(p: Plan, call: Backward) -> tuple[Any, ...]:
    """The gradients of blocks, prefix, query, rms_weight and output_rms_weight; None for those that are not needed."""
    dh, dweight = gradient_of_h(p, call)
    wanted = call.results()
    gradients = [p.new(each) for each in wanted["dblocks"]]
    if call.stacked and gradients[0] is not None and call.prefix is not None:
        # Kernels write the gradients of blocks that count alone.
        zero(p, _behind(p, gradients[0], 0 if call.device_count is not None else call.n_blocks))
    dprefix_sum = p.new(wanted["dprefix_sum"])
    if not dh.numel():
        return gradients, dprefix_sum, *(zero(p, p.new(wanted[name])) for name in ("dquery", "drms_weight")), dweight
    v, prefix = sources_with_prefix(p, call, gradients)
    dh = followed(p, dh)
    dprefix = None if dprefix_sum is None else followed(p, call.dprefix)
    h: Any = p.contiguous(call.h) if call.h is not None and reads_h(call.h, p.chip) else None
    by_token = h is None and keeps_by_token(call, v.dtype, p.chip)
    for rows_by_token in (True, False) if by_token else (False,):
        shape = Shape(
            task=Task.BACKWARD,
            width=v.width,
            itemsize=v.dtype.itemsize if prefix is None else widest(dh, v.blocks[0], prefix),
            row_stride=max(v.s_token, row_stride(dh), stride_of(prefix), stride_of(dprefix)),
            n_sources=sources_on_chip(call.n_blocks, p.chip),
            prefix=prefix is not None,
            fp32_dh=dh.dtype == torch.float32,
            by_token=rows_by_token,
            aligned=v.at.aligned and v.to.aligned,
        )
        tiling = whole_rows(p, shape)
        if tiling is not None:
            dweights = _launch(p, call, tiling, v, dh, h, {"prefix": prefix, "dprefix": dprefix, "sum": dprefix_sum})
            return gradients, dprefix_sum, *dweights, dweight
    if prefix is not None:
        return *_by_pytorch(p, call, dh, wanted), dweight
    return gradients, dprefix_sum, *columns.backward(p, call, v.in_tables(p), dh), dweight


def _launch(p: Plan, call: Backward, tiling: Tiling, v: Sources, dh: Any, h: Any, prefix: dict[str, Any]) -> tuple[Any, Any]:
    """Adds the launches of whole rows and of the sum of dg. `prefix`: it, and its gradients. Returns those of weights."""
    count: Any = call.device_count
    on_cuda, by_token = p.chip.kind == "cuda", tiling.shape.by_token
    needs_dg = call.need_weights[0] or call.need_weights[1]
    dg = p.new(Empty((tiling.partials(v.n_tokens), v.width), torch.float32) if needs_dg else None)
    query, norm = p.contiguous(call.query), p.contiguous(call.rms_weight)
    score, rstd = (p.contiguous(_transposed(p, each) if by_token else each) for each in (call.score, call.rstd))
    more: dict[str, Any] = {} if on_cuda or by_token else {"p_h": h}
    if on_cuda:
        more = {"others": v.at.others, "gradients": v.to.others}
    if isinstance(tiling, cuda_tiling.CudaTiling) and tiling.cooperating:
        more["p_words"] = zero(p, p.new(Empty((tiling.words(v.n_tokens),), torch.int64)))
    p.launch(
        getattr(cuda if on_cuda else ascend, tiling.kernel.name),
        str(tiling.shape),
        tiling.grid(v.n_tokens),
        reads={
            "p_dh": dh,
            "p_v": v.at.base,
            "p_table": v.at.table,
            "p_query": query,
            "p_norm": norm,
            "p_score": score,
            "p_rstd": rstd,
            "p_lse": p.contiguous(call.lse),
            "p_dv_table": v.to.table,
            "p_count": count,
            "p_prefix": prefix["prefix"],
            "p_dprefix": prefix["dprefix"],
            **more,
        },
        writes={"p_dv": v.to.base, "p_dg": dg, "p_dprefix_sum": prefix["sum"]},
        sizes={
            "n_slots": call.n_blocks,
            "n_tokens": v.n_tokens,
            "s_block": v.s_block,
            "s_token": v.s_token,
            "s_dh": row_stride(dh),
            "s_prefix": stride_of(prefix["prefix"]),
            "s_dprefix": stride_of(prefix["dprefix"]),
            **({"needed": v.to.needed} if on_cuda else {}),
        },
    )
    return add_partials(p, dg, query, norm, call.need_weights)


def gradient_of_h(p: Plan, call: Any) -> tuple[Any, Any]:
    """The whole gradient of h, and that of output_rms_weight. The first has what comes through the RMSNorm, in fp32 then."""
    if call.dy is None:
        return call.dh, None
    weight, n_tokens, width = call.output_rms_weight, call.norm_rstd.numel(), call.h.shape[-1]
    total = p.new(Empty(call.h.shape, torch.float32))
    dweight = p.new(gradient_of(weight, call.need_weights[2]))
    if not n_tokens:
        return total, zero(p, dweight)
    dy, dh = followed(p, call.dy), followed(p, call.dh)
    shape = Shape(
        task=Task.NORM_BACKWARD, width=width, itemsize=call.h.dtype.itemsize, row_stride=max(stride_of(dy), stride_of(dh))
    )
    tiling = whole_rows(p, shape)
    if tiling is None:
        makes = [Empty(call.h.shape, torch.float32), Empty(weight.shape, weight.dtype)]
        total, dweight = p.torch(_normalise_backward, call.dy, call.dh, call.h, weight, call.norm_rstd, makes=makes)
        return total, dweight if call.need_weights[2] else None
    grid = tiling.grid(n_tokens)
    partials = p.new(None if dweight is None else Empty((grid, width), torch.float32))
    p.launch(
        attn_res_norm_backward_kernel,
        str(shape),
        grid,
        reads={
            "p_dy": dy,
            "p_dh": dh,
            "p_h": p.contiguous(call.h),
            "p_weight": p.contiguous(weight),
            "p_norm_rstd": p.contiguous(call.norm_rstd),
        },
        writes={"p_dh_sum": total, "p_dweight": partials},
        sizes={"n_tokens": n_tokens, "s_dy": stride_of(dy), "s_dh": stride_of(dh)},
    )
    if dweight is not None:
        decision = "sum of doutput_rms_weight"
        p.launch(
            sum_partials_kernel,
            decision,
            p.choose(decision, choose_sum(width, p.chip)).grid,
            reads={"p_partials": partials},
            writes={"p_total": dweight},
            sizes={"n_partials": grid},
        )
    return total, dweight


def add_partials(p: Plan, partials: Any, query: Any, norm: Any, needed: Sequence[bool]) -> tuple[Any, Any]:
    """Adds a launch that makes dquery and drms_weight, where needed, of fp32 partial sums of dg [n, D]."""
    if partials is None:
        return None, None
    dquery, dnorm = (p.new(each) for each in gradients_of((query, norm), needed[:2]))
    n_partials, width = partials.shape
    decision = "sum of dg"
    p.launch(
        attn_res_add_partials_kernel,
        decision,
        p.choose(decision, choose_sum(width, p.chip)).grid,
        reads={"p_partials": partials, "p_query": query, "p_norm": norm},
        writes={"p_dquery": dquery, "p_dnorm": dnorm},
        sizes={"n_partials": n_partials},
    )
    return dquery, dnorm


def zero(p: Plan, memory: Any) -> Any:
    """Fills memory with zeros; None for None."""
    if memory is not None and memory.numel():
        p.torch(torch.Tensor.zero_, memory, writes=[memory])
    return memory


def _behind(p: Plan, blocks: Slot, n_blocks: int) -> Any:
    """What lies behind the first n blocks of [capacity, ..., D]."""
    capacity, *shape = blocks.shape
    return p.view(blocks, (capacity - n_blocks, *shape), blocks.strides, n_blocks * blocks.strides[0])


def _transposed(p: Plan, statistic: Any) -> Any:
    return p.view(statistic, statistic.shape[::-1], statistic.strides[::-1])


def _by_pytorch(p: Plan, call: Backward, dh: Any, wanted: dict[str, Any]) -> tuple[Any, ...]:
    """The definition's gradients of blocks, prefix, query and rms_weight."""
    makes = [*wanted["dblocks"], *(wanted[name] for name in ("dprefix_sum", "dquery", "drms_weight"))]
    *dblocks, dprefix_sum, dquery, dnorm = p.torch(_compute_backward, dh, *call, makes=makes)
    return dblocks, dprefix_sum, dquery, dnorm


@without_autocast
def _compute_backward(dh: Any, *fields: Any) -> Any:
    dblocks, *others = reference.compute_backward_of_h(Backward(*fields), dh)
    return *dblocks, *others


@without_autocast
def _normalise_backward(*arguments: Any) -> Any:
    return tuple([each.contiguous() for each in reference.normalise_backward(*arguments)])
