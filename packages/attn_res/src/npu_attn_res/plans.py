"""The plans of forward and backward, for all chips.

Forward: one launch, of whole rows, and one for each 16 entries of a table of a list's sources. Backward: a launch through
the RMSNorm that follows h, one of whole rows, and one for each sum. Memory beside the results: the gradient of h in fp32
where there is an RMSNorm, partial sums, and exchanged words.

Where a row does not fit on chip, or the rows of a call's layers do not, kernels take blocks of columns: see
`forward_of_columns`. With a prefix PyTorch's operators compute there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from npu_tiling.calls import Empty
from npu_tiling.partials import add_partials, choose_sum
from npu_tiling.plans import Plan
from npu_tiling.rows import row_stride
from torch import Tensor

from . import kernels, reference
from .ascend import kernels as ascend
from .cuda import kernels as cuda
from .cuda import tiling as cuda_tiling
from .records import Backward, Forward, gradient_of, gradients_of, keeps_by_token, reads_h
from .shape import Shape, Task, TokenTiling
from .sources import (
    Sources,
    at_one_stride,
    choose,
    rounded_up_sources,
    sources_of,
    sources_with_prefix,
    strides_of,
    whole_rows,
    widest,
)

FP32 = torch.float32


def forward(p: Plan, call: Forward) -> tuple[Any, ...]:
    """h, its RMSNorm, the new prefix and the statistics; None for what is not asked for."""
    wanted = call.results(p.chip)
    results = {name: p.new(each) for name, each in wanted.items()}
    h, statistics = results["h"], ("score", "rstd", "lse", "norm_rstd")
    if not h.numel():
        return tuple(results.values())
    v, prefix = sources_with_prefix(p, call)
    x = at_one_stride(p, call.layer_output)
    count: Any = call.device_count
    into: Any = call.prefix if call.in_place else results["new_prefix"]
    strides = strides_of(prefix=prefix, x=x, new_prefix=into)
    shape = Shape(
        task=Task.FORWARD,
        width=v.width,
        itemsize=widest(h, v.blocks[0], prefix, x),
        row_stride=max(v.s_token, *strides.values()),
        n_sources=rounded_up_sources(call.n_blocks, p.chip),
        prefix=prefix is not None,
        normalised=call.output_rms_weight is not None,
        by_token=call.save and keeps_by_token(call, h.dtype, p.chip),
        aligned=v.pointers.aligned,
    )
    tiling = whole_rows(p, shape)
    if tiling is None:
        if prefix is not None:
            return _forward_by_pytorch(p, call, wanted)
        return forward_of_columns(p, call, v.in_tables(p), results)
    on_cuda = p.chip.kind == "cuda"
    p.launch(
        getattr(cuda if on_cuda else ascend, tiling.kernel),
        str(shape),
        tiling.grid(v.n_tokens),
        reads={
            **v.reads,
            **p.fields(call, "query", "rms_weight", "output_rms_weight"),
            "p_count": count,
            "p_prefix": prefix,
            "p_x": x,
            **({"others": v.pointers.others} if on_cuda else {}),
        },
        writes={
            "p_h": h,
            "p_y": results["y"],
            **{f"p_{name}": results[name] for name in statistics},
            "p_new_prefix": into,
            "p_append": v.pointers.base if call.append else None,
        },
        sizes={"max_blocks": call.n_blocks, "eps": call.eps, "norm_eps": call.norm_eps, **v.sizes, **strides},
    )
    return tuple(results.values())


def _forward_by_pytorch(p: Plan, call: Forward, wanted: dict[str, Any]) -> tuple[Any, ...]:
    """The definition's results, whose statistics lie [sources, T]."""
    makes = [each and each._replace(last_outermost=False) for each in wanted.values()]
    written: Any = [*(call.blocks if call.append else ()), *([call.prefix] if call.in_place else ())]
    made: tuple[Any, ...] = p.torch(reference.compute_forward, call, makes=makes, writes=written)
    return made


def backward(p: Plan, call: Backward) -> tuple[Any, ...]:
    """The gradients of blocks, prefix, query, rms_weight and output_rms_weight; None for those that are not needed."""
    dh, dweight = gradient_of_h(p, call)
    wanted = call.results()
    gradients = [p.new(each) for each in wanted["dblocks"]]
    # Kernels write the gradients of blocks that count alone.
    if call.stacked and gradients[0] is not None and call.prefix is not None:
        capacity, *shape = gradients[0].shape
        n_blocks, strides = 0 if call.device_count is not None else call.n_blocks, gradients[0].strides
        zero(p, p.view(gradients[0], (capacity - n_blocks, *shape), strides, n_blocks * strides[0]))
    elif call.device_count is not None:
        for each in gradients:
            zero(p, each)
    dprefix_sum = p.new(wanted["dprefix_sum"])
    if not dh.numel():
        return gradients, dprefix_sum, *(zero(p, p.new(wanted[name])) for name in ("dquery", "drms_weight")), dweight
    v, prefix = sources_with_prefix(p, call, gradients)
    dh = at_one_stride(p, dh)
    dprefix = None if dprefix_sum is None else at_one_stride(p, call.dprefix)
    h: Any = p.contiguous(call.h) if call.h is not None and reads_h(call.h, p.chip) else None
    shape = Shape(
        task=Task.BACKWARD,
        width=v.width,
        itemsize=v.dtype.itemsize if prefix is None else widest(dh, v.blocks[0], prefix),
        row_stride=max(v.s_token, *strides_of(dh=dh, prefix=prefix, dprefix=dprefix).values()),
        n_sources=rounded_up_sources(call.n_blocks, p.chip),
        prefix=prefix is not None,
        fp32_dh=dh.dtype == FP32,
        by_token=h is None and keeps_by_token(call, v.dtype, p.chip),
        aligned=v.pointers.aligned and v.gradient_pointers.aligned,
    )
    tiling = whole_rows(p, shape)
    # Statistics [tokens, sources] are for the kernel of one row a tile. Where it does not fit, the others get a copy.
    if tiling is None and shape.by_token:
        tiling = whole_rows(p, replace(shape, by_token=False))
    if tiling is not None:
        dweights = _backward_of_rows(p, call, tiling, v, dh, h, prefix, dprefix, dprefix_sum)
        return gradients, dprefix_sum, *dweights, dweight
    if prefix is not None:
        makes = [*wanted["dblocks"], *(wanted[name] for name in ("dprefix_sum", "dquery", "drms_weight"))]
        *dblocks, dprefix_sum, dquery, dnorm = p.torch(_compute_backward, call, dh, makes=makes)
        return dblocks, dprefix_sum, dquery, dnorm, dweight
    return gradients, dprefix_sum, *backward_of_columns(p, call, v.in_tables(p), dh), dweight


def _backward_of_rows(
    p: Plan, call: Backward, tiling: TokenTiling, v: Sources, dh: Any, h: Any, prefix: Any, dprefix: Any, dprefix_sum: Any
) -> tuple[Any, Any]:
    """Adds the launches of whole rows and of the sum of dg. Returns the gradients of query and rms_weight."""
    count: Any = call.device_count
    on_cuda, by_token = p.chip.kind == "cuda", tiling.shape.by_token
    needs_dg = call.need_weights[0] or call.need_weights[1]
    dg = p.new(Empty((tiling.partials(v.n_tokens), v.width), FP32) if needs_dg else None)
    query, norm = p.contiguous(call.query), p.contiguous(call.rms_weight)
    score, rstd = (p.contiguous(_transposed(p, each) if by_token else each) for each in (call.score, call.rstd))
    more: dict[str, Any] = {} if on_cuda or by_token else {"p_h": h}
    if on_cuda:
        more = {"others": v.pointers.others, "gradients": v.gradient_pointers.others}
    if isinstance(tiling, cuda_tiling.CudaTiling) and tiling.cooperating:
        more["p_words"] = zero(p, p.new(Empty((tiling.words(v.n_tokens),), torch.int64)))
    p.launch(
        getattr(cuda if on_cuda else ascend, tiling.kernel),
        str(tiling.shape),
        tiling.grid(v.n_tokens),
        reads={
            **v.reads,
            "p_dh": dh,
            "p_query": query,
            "p_rms_weight": norm,
            "p_score": score,
            "p_rstd": rstd,
            "p_lse": p.contiguous(call.lse),
            "p_dv_table": v.gradient_pointers.table,
            "p_count": count,
            "p_prefix": prefix,
            "p_dprefix": dprefix,
            **more,
        },
        writes={"p_dv": v.gradient_pointers.base, "p_dg": dg, "p_dprefix_sum": dprefix_sum},
        sizes={"max_blocks": call.n_blocks, **({"needed": v.gradient_pointers.needed} if on_cuda else {}), **v.sizes}
        | strides_of(dh=dh, prefix=prefix, dprefix=dprefix),
    )
    return gradients_from_dg(p, dg, query, norm, call.need_weights)


def gradient_of_h(p: Plan, call: Any) -> tuple[Any, Any]:
    """The whole gradient of h, and that of output_rms_weight. The first has what comes through the RMSNorm, in fp32 then."""
    if call.dy is None:
        return call.dh, None
    weight, n_tokens, width = call.output_rms_weight, call.norm_rstd.numel(), call.h.shape[-1]
    total = p.new(Empty(call.h.shape, FP32))
    dweight = p.new(gradient_of(weight, call.need_weights[2]))
    if not n_tokens:
        return total, zero(p, dweight)
    dy, dh = at_one_stride(p, call.dy), at_one_stride(p, call.dh)
    strides, itemsize = strides_of(dy=dy, dh=dh), call.h.dtype.itemsize
    shape = Shape(task=Task.NORM_BACKWARD, width=width, itemsize=itemsize, row_stride=max(strides.values()))
    tiling = whole_rows(p, shape)
    if tiling is None:
        makes = [Empty(call.h.shape, FP32), Empty(weight.shape, weight.dtype)]
        total, dweight = p.torch(_normalise_backward, call.dy, call.dh, call.h, weight, call.norm_rstd, makes=makes)
        return total, dweight if call.need_weights[2] else None
    grid = tiling.grid(n_tokens)
    partials = p.new(None if dweight is None else Empty((grid, width), FP32))
    p.launch(
        kernels.attn_res_norm_backward_kernel,
        str(shape),
        grid,
        reads={"p_dy": dy, "p_dh": dh, **p.fields(call, "h", "output_rms_weight", "norm_rstd")},
        writes={"p_dh_sum": total, "p_dweight": partials},
        sizes={"n_tokens": n_tokens, **strides},
    )
    if dweight is not None:
        add_partials(p, "sum of doutput_rms_weight", partials, dweight)
    return total, dweight


def gradients_from_dg(p: Plan, partials: Any, query: Any, norm: Any, needed: Sequence[bool]) -> tuple[Any, Any]:
    """Adds a launch that makes dquery and drms_weight, where needed, of fp32 partial sums of dg [n, D]."""
    if partials is None:
        return None, None
    dquery, dnorm = (p.new(each) for each in gradients_of((query, norm), needed[:2]))
    n_partials, width = partials.shape
    p.launch_over(
        kernels.attn_res_add_partials_kernel,
        choose_sum(width, p.chip),
        1,
        decision="sum of dg",
        reads={"p_partials": partials, "p_query": query, "p_rms_weight": norm},
        writes={"p_dquery": dquery, "p_drms_weight": dnorm},
        sizes={"n_partials": n_partials},
    )
    return dquery, dnorm


def zero(p: Plan, memory: Any) -> Any:
    """Fills memory with zeros; None for None."""
    if memory is not None and memory.numel():
        p.torch(torch.Tensor.zero_, memory, writes=[memory])
    return memory


def _transposed(p: Plan, statistic: Any) -> Any:
    return p.view(statistic, statistic.shape[::-1], statistic.strides[::-1])


def _compute_backward(call: Backward, dh: Tensor) -> Any:
    dblocks, *others = reference.compute_backward_of_h(call, dh)
    return *dblocks, *others


def _normalise_backward(*arguments: Any) -> Any:
    return tuple([each.contiguous() for each in reference.normalise_backward(*arguments)])


# Blocks of columns. Sums over a row come as partial sums, one for each block, which PyTorch adds. Every source is read
# twice. Statistics are [N, T, S] of N sources, T tokens and S layers.


def forward_of_columns(p: Plan, call: Forward, v: Sources, results: dict[str, Any]) -> tuple[Any, ...]:
    """The results of a forward without a prefix; h is written to the memory that `results` has for it."""
    h, width = results["h"], v.width
    score, rstd, lse = weighted_sum(
        p, v, call.query, call.rms_weight, call.eps, p.view(h, (v.n_tokens, 1, width), (width, width, 1))
    )
    y = norm_rstd = None
    if call.output_rms_weight is not None:
        # By the kernel of scores, whose products are not used: PyTorch's sums of a row depend on the number of rows.
        rows = p.view(h, (v.n_tokens, width), (width, 1))
        any_g = p.torch(_first_row, rows, makes=Empty((1, width), FP32))
        _, norm_rstd = _scores(p, sources_of(p, [rows], stacked=False), any_g, call.norm_eps)
        norm_rstd = p.view(norm_rstd, (v.n_tokens,), (1,))
        y = p.torch(_scaled, rows, call.output_rms_weight, norm_rstd, h.shape, makes=Empty(h.shape, h.dtype))
    if not call.save:
        return h, y, None, None, None, None, None
    score, lse = p.view(score, score.shape[:-1], score.strides[:-1]), p.view(lse, lse.shape[:-1], (1,))
    return h, y, None, score, rstd, lse, norm_rstd


def backward_of_columns(p: Plan, call: Backward, v: Sources, dh: Any) -> tuple[Any, Any]:
    """The gradients of query and rms_weight; those of the blocks are written where `v` says."""
    step: Any = row_stride(dh.shape, dh.strides)
    do = p.view(dh, (v.n_tokens, 1, v.width), (step, v.width, 1))
    score: Any = call.score
    score = p.view(score, (*score.shape, 1), (*score.strides, 1))
    return gradients(p, v, do, score, call.rstd, None, (call.query, call.rms_weight), call.need_weights)


def weighted_sum(p: Plan, v: Sources, query: Any, rms_weight: Any, eps: float, o: Any) -> tuple[Any, Any, Any]:
    """Writes the sums of the sources to o [T, S, D]; query [S, D] or [D]. Returns s [N, T, S], r [N, T] and lse [T, S]."""
    n_layers = o.shape[1]
    g = p.torch(_fused, query, rms_weight, makes=Empty((n_layers, v.width), FP32))
    score, rstd = _scores(p, v, g, eps)
    makes = [Empty(score.shape, FP32), Empty(score.shape[1:], FP32)]
    alpha, lse = p.torch(reference.softmax, score, makes=makes)
    tiling = _choose(p, v, Task.WEIGHTED_SUM, n_layers)
    p.launch(
        kernels.attn_res_weighted_sum_kernel,
        str(tiling.shape),
        tiling.grid(v.n_tokens),
        reads={**v.reads, "p_alpha": alpha},
        writes={"p_o": o},
        sizes={"n_blocks": v.n_blocks, **v.sizes},
    )
    return score, rstd, lse


def gradients(
    p: Plan, v: Sources, do: Any, score: Any, rstd: Any, dlse: Any, weights: tuple[Any, Any], needed: Sequence[bool]
) -> tuple[Any, Any]:
    """Writes the gradients of the sources where `v` says; returns those of query and rms_weight, `weights`, where needed.

    do [T, S, D] and dlse [S, T] are the gradients of o and lse; None: there is none of lse.
    """
    n_layers, (query, rms_weight) = do.shape[1], weights
    g = p.torch(_fused, query, rms_weight, makes=Empty((n_layers, v.width), FP32))
    s_do = (do.strides[0], do.strides[1] if n_layers > 1 else do.strides[0])
    dot, _ = _products(p, v, do, s_do, n_layers, squares=False)
    makes = [Empty(score.shape, FP32), Empty(score.shape, FP32), Empty(rstd.shape, FP32)]
    alpha, ds_rstd, coefficient = p.torch(_sum_to_score_gradients, score, rstd, dot, dlse, v.width, makes=makes)
    tiling = _choose(p, v, Task.GRADIENT, n_layers, also_aligned=v.gradient_pointers.aligned)
    splits = tiling.splits(v.n_tokens)
    partials = p.new(Empty((splits, n_layers, v.width), FP32) if needed[0] or needed[1] else None)
    p.launch(
        kernels.attn_res_gradient_kernel,
        str(tiling.shape),
        splits * tiling.column_blocks,
        reads={
            **v.reads,
            "p_do": do,
            "p_g": g,
            "p_alpha": alpha,
            "p_ds_rstd": ds_rstd,
            "p_dv_coef": coefficient,
            "p_dv_table": v.gradient_pointers.table,
        },
        writes={"p_dv": v.gradient_pointers.base, "p_dg": partials},
        sizes={"n_blocks": v.n_blocks, "n_splits": splits, "s_do_token": s_do[0], "s_do_row": s_do[1], **v.sizes},
    )
    if partials is None:
        return None, None
    makes_weights = gradients_of(weights, needed[:2])
    dquery, dnorm = p.torch(_sum_to_weight_gradients, partials, query, rms_weight, tuple(needed), makes=makes_weights)
    return dquery, dnorm


def _scores(p: Plan, v: Sources, g: Any, eps: float) -> tuple[Any, Any]:
    """s [N, T, S] and r [N, T] with g [S, D]."""
    n_layers = g.shape[0]
    dot, square = _products(p, v, g, (0, v.width if n_layers > 1 else 0), n_layers, squares=True)
    shape = (v.n_blocks, v.n_tokens)
    found: tuple[Any, Any] = p.torch(
        _sum_to_score, dot, square, v.width, eps, makes=[Empty((*shape, n_layers), FP32), Empty(shape, FP32)]
    )
    return found


def _products(p: Plan, v: Sources, a: Any, strides: tuple[int, int], n_layers: int, *, squares: bool) -> tuple[Any, Any]:
    """Partial sums, one for each block of columns, of <a, v_i> and, where asked for, <v_i, v_i>.

    `strides`: from one token of a to the next, and from one row of a tile: a layer, or a token of one layer.
    """
    tiling = _choose(p, v, Task.PRODUCTS, n_layers)
    shape = (tiling.column_blocks, v.n_blocks, v.n_tokens)
    dot = p.new(Empty((*shape, n_layers), FP32))
    square = p.new(Empty(shape, FP32) if squares else None)
    p.launch(
        kernels.attn_res_products_kernel,
        str(tiling.shape),
        tiling.grid(v.n_tokens),
        reads={**v.reads, "p_a": a},
        writes={"p_dot": dot, "p_square": square},
        sizes={"n_blocks": v.n_blocks, "s_a_token": strides[0], "s_a_row": strides[1], **v.sizes},
    )
    return dot, square


def _choose(p: Plan, v: Sources, task: Task, n_layers: int, *, also_aligned: bool = True) -> TokenTiling:
    """The tiling of a task's launch, decided in the plan under its shape's name."""
    shape = Shape(
        task=task,
        width=v.width,
        itemsize=v.dtype.itemsize,
        layers=n_layers,
        row_stride=v.s_token,
        aligned=v.pointers.aligned and also_aligned,
    )
    tiling: TokenTiling = p.decide(str(shape), choose(shape, p.chip))
    return tiling


# What PyTorch does in between, of small tensors.


def _fused(query: Tensor, rms_weight: Tensor) -> Tensor:
    g = reference.fuse_qk_weight(query, rms_weight, FP32)
    return g.reshape(-1, g.shape[-1]).contiguous()


def _sum_to_score(dot: Tensor, square: Tensor, width: int, eps: float) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(_added(square) / width + eps)
    return _added(dot) * rstd.unsqueeze(-1), rstd


def _added(partials: Tensor) -> Tensor:
    """The sum of partial sums [n, ...] over n.

    The copy puts the partial sums of a token side by side. Then PyTorch adds them in one order for any number of tokens.
    """
    return partials.movedim(0, -1).contiguous().sum(-1)


def _first_row(rows: Tensor) -> Tensor:
    return rows[:1].to(FP32)


def _scaled(h: Tensor, weight: Tensor, rstd: Tensor, shape: Sequence[int]) -> Tensor:
    return reference.scaled(h, weight, rstd).view(shape)


def _sum_to_score_gradients(score: Tensor, rstd: Tensor, dot: Tensor, dlse: Tensor | None, width: int) -> tuple[Tensor, ...]:
    found = reference.score_gradients(score, rstd, dot.sum(0), dlse, width)
    return tuple([each.contiguous() for each in found])


def _sum_to_weight_gradients(
    partials: Tensor, query: Tensor, rms_weight: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    found = reference.fuse_qk_weight_backward(partials.sum(0), query, rms_weight, needed)
    return tuple([None if each is None else each.contiguous() for each in found])
