"""The plans of the two phases.

The first phase takes whole rows on CUDA where they fit; on Ascend one layer runs `attn_res`. All else takes blocks of
columns. The second takes whole rows; where those do not fit on chip, the definition's operators run.
"""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling.calls import Empty
from npu_tiling.plans import Plan
from npu_tiling.tensors import without_autocast
from torch import Tensor

from .. import columns
from ..backward import add_partials, gradient_of_h, zero
from ..forward import forward
from ..records import Forward
from ..shape import Shape, Task
from ..sources import followed, row_stride, sources_of, stride_of, whole_rows, widest
from .kernels import attn_res_layers_kernel, attn_res_merge_backward_kernel, attn_res_merge_kernel
from .records import Merge, MergeBackward, Phase1, Phase1Backward, compute_merge, compute_merge_backward_of_h


def phase1(p: Plan, call: Phase1) -> tuple[Any, ...]:
    """o [T, S, D], lse [S, T], s [N, T, S] and r [N, T]; None for s and r unless `save`."""
    n_layers, on_cuda, wanted = call.queries.shape[0], p.chip.kind == "cuda", call.results()
    if not wanted["o"] or 0 in wanted["o"].shape:
        return tuple(p.new(each) for each in wanted.values())
    if n_layers == 1 and not on_cuda:
        return _of_one_layer(p, call)
    v = sources_of(p, call.blocks, stacked=call.stacked, in_tables=True)
    shape = Shape(
        task=Task.LAYERS,
        width=v.width,
        itemsize=v.dtype.itemsize,
        layers=n_layers,
        row_stride=v.s_token,
        aligned=v.at.aligned,
    )
    o, tiling = p.new(wanted["o"]), whole_rows(p, shape) if on_cuda else None
    if tiling is None:
        score, rstd, lse = columns.weighted_sum(p, v, call.queries, call.rms_weight, call.eps, o)
        statistics = (score, rstd) if call.save else (None, None)
        return o, p.torch(_transposed, lse, makes=wanted["lse"]), *statistics
    lse = p.new(Empty((v.n_tokens, n_layers), torch.float32))
    score, rstd = p.new(wanted["score"]), p.new(wanted["rstd"])
    p.launch(
        attn_res_layers_kernel,
        str(shape),
        tiling.grid(v.n_tokens),
        reads={
            "p_v": v.at.base,
            "p_table": v.at.table,
            "p_query": p.contiguous(call.queries),
            "p_norm": p.contiguous(call.rms_weight),
        },
        writes={"p_o": o, "p_score": score, "p_rstd": rstd, "p_lse": lse},
        sizes={
            "n_blocks": v.n_blocks,
            "n_tokens": v.n_tokens,
            "s_block": v.s_block,
            "s_token": v.s_token,
            "s_norm": 0 if call.rms_weight.dim() == 1 else v.width,
            "eps": call.eps,
        },
    )
    return o, p.torch(_transposed, lse, makes=wanted["lse"]), score, rstd


def _of_one_layer(p: Plan, call: Phase1) -> tuple[Any, ...]:
    """The first phase of one layer is `attn_res` with an h that is not rounded."""
    width, weights = call.queries.shape[-1], [call.queries, call.rms_weight]
    query, rms_weight = (_as_row(p, each) for each in weights)
    layer = Forward(
        blocks=call.blocks,
        device_count=None,
        prefix=None,
        layer_output=None,
        query=query,
        rms_weight=rms_weight,
        output_rms_weight=None,
        stacked=call.stacked,
        n_blocks=call.blocks[0].shape[0] if call.stacked else len(call.blocks),
        eps=call.eps,
        norm_eps=call.eps,
        dtype=torch.float32,
        save=True,
    )
    h, _, _, score, rstd, lse, _ = forward(p, layer)
    n_tokens = lse.shape[0]
    o = p.view(h, (n_tokens, 1, width), (width, width, 1))
    lse = p.view(lse, (1, n_tokens), (n_tokens, 1))
    return o, lse, *((p.view(score, (*score.shape, 1), (n_tokens, 1, 1)), rstd) if call.save else (None, None))


def _as_row(p: Plan, weight: Any) -> Any:
    """[1, D] or [D] as [D]."""
    return p.view(weight, weight.shape[-1:], weight.strides[-1:])


def phase1_backward(p: Plan, call: Phase1Backward) -> tuple[Any, ...]:
    """The gradients of blocks, queries and rms_weight, None for those that are not needed."""
    wanted = call.results()
    dblocks = [p.new(each) for each in wanted["dblocks"]]
    if not call.score.numel():
        return dblocks, *(zero(p, p.new(wanted[name])) for name in ("dqueries", "drms_weight"))
    v = sources_of(p, call.blocks, dblocks, stacked=call.stacked, in_tables=True)
    do: Any = call.do
    if do is None:
        do = zero(p, p.new(Empty((v.n_tokens, call.queries.shape[0], v.width), torch.float32)))
    elif do.strides[-1] != 1:
        do = p.contiguous(do)
    weights = (call.queries, call.rms_weight)
    return dblocks, *columns.gradients(p, v, do, call.score, call.rstd, call.dlse, weights, call.need_weights)


def merge(p: Plan, call: Merge) -> tuple[Any, ...]:
    """h, its RMSNorm and the new prefix [..., D], and s, r and 1 / rms(h) [T]; None for what is not asked for."""
    wanted = call.results()
    results = {name: p.new(each) for name, each in wanted.items()}
    n_tokens = call.lse.numel()
    if not n_tokens:
        return tuple(results.values())
    o, prefix, x = (followed(p, each) for each in (call.o, call.prefix, call.layer_output))
    shape = Shape(
        task=Task.MERGE,
        width=prefix.shape[-1],
        itemsize=widest(prefix, x),
        row_stride=max(row_stride(o), row_stride(prefix), stride_of(x)),
    )
    tiling = whole_rows(p, shape)
    if tiling is None:
        made: tuple[Any, ...] = p.torch(_compute_merge, *call, makes=[*wanted.values()])
        return made
    p.launch(
        attn_res_merge_kernel,
        str(shape),
        tiling.grid(n_tokens),
        reads={
            "p_o": o,
            "p_lse": p.contiguous(call.lse),
            "p_prefix": prefix,
            "p_x": x,
            "p_query": p.contiguous(call.query),
            "p_norm": p.contiguous(call.rms_weight),
            "p_weight": p.contiguous(call.output_rms_weight),
        },
        writes={f"p_{name}": each for name, each in results.items()},
        sizes={
            "n_tokens": n_tokens,
            "s_o": row_stride(o),
            "s_prefix": row_stride(prefix),
            "s_x": stride_of(x),
            "eps": call.eps,
            "norm_eps": call.norm_eps,
        },
    )
    return tuple(results.values())


def merge_backward(p: Plan, call: MergeBackward) -> tuple[Any, ...]:
    """The gradients of o, lse, the prefix, query, rms_weight and output_rms_weight."""
    dh, dweight = gradient_of_h(p, call)
    wanted, n_tokens = call.results(), call.lse.numel()
    names = ("do", "dlse", "dprefix_sum")
    do, dlse, dprefix_sum = (p.new(wanted[name]) for name in names)
    if not n_tokens:
        dweights = (zero(p, p.new(wanted[name])) for name in ("dquery", "drms_weight"))
        return do, dlse, dprefix_sum, *dweights, dweight
    rows, o, prefix, dprefix = (followed(p, each) for each in (dh, call.o, call.prefix, call.dprefix))
    width = prefix.shape[-1]
    strides = [stride_of(each) for each in (rows, dprefix, o, prefix)]
    shape = Shape(task=Task.MERGE_BACKWARD, width=width, itemsize=prefix.dtype.itemsize, row_stride=max(strides))
    tiling = whole_rows(p, shape)
    if tiling is None:
        makes = [wanted[name] for name in (*names, "dquery", "drms_weight")]
        return *p.torch(_compute_merge_backward, dh, *call, makes=makes), dweight
    grid, query, norm = tiling.grid(n_tokens), p.contiguous(call.query), p.contiguous(call.rms_weight)
    needs_dg = call.need_weights[0] or call.need_weights[1]
    dg = p.new(Empty((grid, width), torch.float32) if needs_dg else None)
    p.launch(
        attn_res_merge_backward_kernel,
        str(shape),
        grid,
        reads={
            "p_dh": rows,
            "p_dprefix": dprefix,
            "p_o": o,
            "p_lse": p.contiguous(call.lse),
            "p_new_prefix": prefix,
            "p_query": query,
            "p_norm": norm,
            "p_score": p.contiguous(call.score),
            "p_rstd": p.contiguous(call.rstd),
        },
        writes={"p_do": do, "p_dlse": dlse, "p_dprefix_sum": dprefix_sum, "p_dg": dg},
        sizes=dict(zip(("s_dh", "s_dprefix", "s_o", "s_new_prefix"), strides, strict=True)) | {"n_tokens": n_tokens},
    )
    return do, dlse, dprefix_sum, *add_partials(p, dg, query, norm, call.need_weights), dweight


def _transposed(lse: Tensor) -> Tensor:
    return lse.t().contiguous()


def _compute_merge(*fields: Any) -> Any:
    return compute_merge(Merge(*fields))


@without_autocast
def _compute_merge_backward(dh: Tensor, *fields: Any) -> Any:
    return compute_merge_backward_of_h(MergeBackward(*fields), dh)
