"""Kernels of the two phases, for whole rows, and the plans.

The first phase takes whole rows on CUDA where they fit; on Ascend one layer runs `attn_res`. All else takes blocks of
columns. The second takes whole rows; where those do not fit on chip, the definition's operators run.

In the second phase one more block, the prefix p, joins a layer's (o, lse):

p = prefix + x        s = r <g, p>
w = 1 / (1 + exp(s - lse))        a = 1 - w        h = w o + a p

ds = a w <dh, p - o>              dlse = -ds       do = w dh
dp = a dh + ds r (g - s r p / D)                   dg = sum over tokens of ds r p

s - lse is exact where it counts: were log(exp(lse) + exp(s)) kept instead, w + a would be off by its rounding.
"""

from typing import Any

from npu_tiling.calls import Empty
from npu_tiling.device import tl, triton, widen
from npu_tiling.plans import Plan

from ..formula import (
    add_source,
    block_at,
    count_rows,
    load_prefix,
    load_query,
    load_rows,
    load_statistic,
    normalise_rows,
    rms_inverse,
    score_rows,
    slope,
    softmax_of_two,
    source_gradient,
    store_lse,
    store_partial_sum,
    store_rows,
    store_statistic,
)
from ..plans import FP32, forward, gradient_of_h, gradients, gradients_from_dg, weighted_sum, zero
from ..records import Forward
from ..shape import Shape, Task
from ..sources import at_one_stride, sources_of, strides_of, whole_rows, widest
from . import operator

# Several layers read every source once for all of them. On Ascend two passes over blocks of columns (../kernels.py) take
# less: the vector unit is the busiest part there, and an online softmax rescales the sums of all layers for every source.


@triton.jit(do_not_specialize=["n_blocks", "n_tokens"])
def attn_res_layers_kernel(
    # read: sources, their table (None: source i lies at i * s_block), [S, D] queries, rms_weight of one or of S rows
    p_v, p_table, p_query, p_rms_weight,
    # written: o [n_tokens, S, D]; fp32 s [n_blocks, n_tokens, S], None: no backward follows; r [n_blocks, n_tokens]; lse
    p_o, p_score, p_rstd, p_lse,
    n_blocks, n_tokens, s_block, s_token, s_weight, eps,
    D: tl.constexpr, S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """o and lse of several layers, and the statistics, from one read of every source."""
    ROWS: tl.constexpr = BLOCK_M * BLOCK_S
    b_g = load_query(p_query, p_rms_weight, s_weight, D, S, BLOCK_S, BLOCK_D)  # [BLOCK_S, BLOCK_D]
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_tokens, BLOCK_M), tl.num_programs(0)):
        i_token = i_tile.to(tl.int64) * BLOCK_M
        n_left = (n_tokens - i_token).to(tl.int32)
        n_rows = count_rows(n_left, S)
        b_max = tl.full([ROWS], float("-inf"), tl.float32)
        b_sum = tl.zeros([ROWS], tl.float32)
        b_o = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for i_block in tl.range(0, n_blocks):
            p_block = block_at(p_v, p_table, s_block, i_block, ALIGNED) + i_token * s_token
            b_v = load_rows(p_block, s_token, n_left, D, BLOCK_M, BLOCK_D, BLOCK_D == D)  # [BLOCK_M, BLOCK_D]
            b_score, b_rstd, _ = score_rows(b_v, b_g, eps, D)  # [ROWS], [BLOCK_M]
            b_o, b_sum, b_max = add_source(b_v, b_score, b_o, b_sum, b_max)
            if p_score is not None:
                i_row = tl.cast(i_block, tl.int64) * n_tokens + i_token
                store_statistic(p_score + i_row * S, b_score, n_rows, ROWS)
                store_statistic(p_rstd + i_row, b_rstd, n_left, BLOCK_M)
        b_factor = store_lse(p_lse, b_max, b_sum, i_token * S, n_rows, ROWS)
        b_stored = (b_o * b_factor[:, None]).to(p_o.dtype.element_ty)
        store_rows(p_o + i_token * S * D, D, b_stored, n_rows, D, ROWS, BLOCK_D, BLOCK_D == D)


@triton.jit(do_not_specialize=["n_tokens"])
def attn_res_merge_kernel(
    # read: a layer's first phase, the prefix, a layer's output that joins it (None: there is none), the weights
    p_o, p_lse, p_prefix, p_x, p_query, p_rms_weight, p_output_rms_weight,
    # written: h, its RMSNorm (None: there is no weight), the new prefix; fp32 [n_tokens], None: no backward follows
    p_h, p_y, p_new_prefix, p_score, p_rstd, p_norm_rstd,
    n_tokens, s_o, s_prefix, s_x, eps, norm_eps,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,  # BLOCK_D >= D
):  # fmt: skip
    """h = w o + a p and its RMSNorm, and the new prefix p."""
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    # lint: allow nan-maximum: NaN of a score stays in its exponential
    EXACT: tl.constexpr = BLOCK_D == D
    b_g = load_query(p_query, p_rms_weight, D, D, 1, 1, BLOCK_D)  # [1, BLOCK_D]
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_tokens, BLOCK_M), tl.num_programs(0)):
        i_token = i_tile.to(tl.int64) * BLOCK_M
        n_left = (n_tokens - i_token).to(tl.int32)
        b_p = load_prefix(p_prefix, p_x, p_new_prefix, i_token, n_left, s_prefix, s_x, D, D, BLOCK_M, BLOCK_D)
        # 1 / rms before the product: in the order of score_rows the time model predicts 8 % more on Ascend.
        b_rstd = rms_inverse(tl.sum(b_p * b_p, axis=1), eps, D)  # [BLOCK_M]
        b_score = tl.sum(b_p * b_g, axis=1) * b_rstd
        b_w, b_a = softmax_of_two(load_statistic(p_lse + i_token, n_left, BLOCK_M), b_score)
        b_o = load_rows(p_o + i_token * s_o, s_o, n_left, D, BLOCK_M, BLOCK_D, EXACT)
        b_h = b_o * b_w[:, None] + b_p * b_a[:, None]
        b_stored = b_h.to(p_h.dtype.element_ty)
        store_rows(p_h + i_token * D, D, b_stored, n_left, D, BLOCK_M, BLOCK_D, EXACT)
        if p_score is not None:
            store_statistic(p_score + i_token, b_score, n_left, BLOCK_M)
            store_statistic(p_rstd + i_token, b_rstd, n_left, BLOCK_M)
        if p_output_rms_weight is not None:
            b_h = widen(b_stored)
            normalise_rows(b_h, p_output_rms_weight, p_y, p_norm_rstd, i_token, n_left, norm_eps, D, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=["n_tokens"])
def attn_res_merge_backward_kernel(
    # read: gradients of h and, from elsewhere, of the new prefix (None: there is none); what the forward read and stored
    p_dh, p_dprefix, p_o, p_lse, p_new_prefix, p_query, p_rms_weight, p_score, p_rstd,
    # written: do, fp32 and contiguous, dlse, the prefix's gradient; fp32 partial sums of dg [programs, D] (None: not needed)
    # for attn_res_add_partials_kernel, which makes dquery and drms_weight of them
    p_do, p_dlse, p_dprefix_sum, p_dg,
    n_tokens, s_dh, s_dprefix, s_o, s_new_prefix,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,  # BLOCK_D >= D
):  # fmt: skip
    """do, dlse, the gradient of the prefix, and partial sums of dg."""
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    # lint: allow nan-maximum: NaN of a score stays in its exponential
    EXACT: tl.constexpr = BLOCK_D == D
    b_g = load_query(p_query, p_rms_weight, D, D, 1, 1, BLOCK_D)  # [1, BLOCK_D]
    if p_dg is not None:
        b_dg = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_tokens, BLOCK_M), tl.num_programs(0)):
        i_token = i_tile.to(tl.int64) * BLOCK_M
        n_left = (n_tokens - i_token).to(tl.int32)
        b_dh = load_rows(p_dh + i_token * s_dh, s_dh, n_left, D, BLOCK_M, BLOCK_D, EXACT)
        b_score = load_statistic(p_score + i_token, n_left, BLOCK_M)
        b_rstd = load_statistic(p_rstd + i_token, n_left, BLOCK_M)
        b_w, b_a = softmax_of_two(load_statistic(p_lse + i_token, n_left, BLOCK_M), b_score)
        b_o = load_rows(p_o + i_token * s_o, s_o, n_left, D, BLOCK_M, BLOCK_D, EXACT)
        b_dot = tl.sum(b_dh * b_o, axis=1)  # [BLOCK_M]
        b_p = load_rows(p_new_prefix + i_token * s_new_prefix, s_new_prefix, n_left, D, BLOCK_M, BLOCK_D, EXACT)
        b_e = tl.sum(b_dh * b_p, axis=1)
        b_ds = b_a * b_w * (b_e - b_dot)
        b_c = b_ds * b_rstd
        store_rows(p_do + i_token * D, D, b_dh * b_w[:, None], n_left, D, BLOCK_M, BLOCK_D, EXACT)
        store_statistic(p_dlse + i_token, -b_ds, n_left, BLOCK_M)
        if p_dg is not None:
            b_dg += b_p * b_c[:, None]
        b_slope = slope(b_score, b_rstd, D)
        b_dp = source_gradient(b_p, b_dh, b_g, b_a[:, None], b_c[:, None], b_slope[:, None])
        if p_dprefix is not None:
            b_dp += load_rows(p_dprefix + i_token * s_dprefix, s_dprefix, n_left, D, BLOCK_M, BLOCK_D, EXACT)
        store_rows(p_dprefix_sum + i_token * D, D, b_dp, n_left, D, BLOCK_M, BLOCK_D, EXACT)
    if p_dg is not None:
        store_partial_sum(p_dg, b_dg, D, BLOCK_D)


def phase1(p: Plan, call: operator.Phase1) -> tuple[Any, ...]:
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
        aligned=v.pointers.aligned,
    )
    o, tiling = p.new(wanted["o"]), whole_rows(p, shape) if on_cuda else None
    if tiling is None:
        score, rstd, lse = weighted_sum(p, v, call.queries, call.rms_weight, call.eps, o)
        statistics = (score, rstd) if call.save else (None, None)
        return o, p.torch(operator.transposed, lse, makes=wanted["lse"]), *statistics
    lse = p.new(Empty((v.n_tokens, n_layers), FP32))
    score, rstd = p.new(wanted["score"]), p.new(wanted["rstd"])
    p.launch(
        attn_res_layers_kernel,
        str(shape),
        tiling.grid(v.n_tokens),
        reads={**v.reads, "p_query": p.contiguous(call.queries), **p.fields(call, "rms_weight")},
        writes={"p_o": o, "p_score": score, "p_rstd": rstd, "p_lse": lse},
        sizes={
            "n_blocks": v.n_blocks,
            **v.sizes,
            "s_weight": 0 if call.rms_weight.dim() == 1 else v.width,
            "eps": call.eps,
        },
    )
    return o, p.torch(operator.transposed, lse, makes=wanted["lse"]), score, rstd


def _of_one_layer(p: Plan, call: operator.Phase1) -> tuple[Any, ...]:
    """The first phase of one layer is `attn_res` with an h that is not rounded."""
    weights: list[Any] = [call.queries, call.rms_weight]
    query, rms_weight = (p.view(each, each.shape[-1:], each.strides[-1:]) for each in weights)  # [1, D] or [D] as [D]
    width = query.shape[-1]
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
        dtype=FP32,
        save=True,
    )
    h, _, _, score, rstd, lse, _ = forward(p, layer)
    n_tokens = lse.shape[0]
    o = p.view(h, (n_tokens, 1, width), (width, width, 1))
    lse = p.view(lse, (1, n_tokens), (n_tokens, 1))
    return o, lse, *((p.view(score, (*score.shape, 1), (n_tokens, 1, 1)), rstd) if call.save else (None, None))


def phase1_backward(p: Plan, call: operator.Phase1Backward) -> tuple[Any, ...]:
    """The gradients of blocks, queries and rms_weight, None for those that are not needed."""
    wanted = call.results()
    dblocks = [p.new(each) for each in wanted["dblocks"]]
    if not call.score.numel():
        return dblocks, *(zero(p, p.new(wanted[name])) for name in ("dqueries", "drms_weight"))
    v = sources_of(p, call.blocks, dblocks, stacked=call.stacked, in_tables=True)
    do: Any = call.do
    if do is None:
        do = zero(p, p.new(Empty((v.n_tokens, call.queries.shape[0], v.width), FP32)))
    elif do.strides[-1] != 1:
        do = p.contiguous(do)
    weights = (call.queries, call.rms_weight)
    return dblocks, *gradients(p, v, do, call.score, call.rstd, call.dlse, weights, call.need_weights)


def merge(p: Plan, call: operator.Merge) -> tuple[Any, ...]:
    """h, its RMSNorm and the new prefix [..., D], and s, r and 1 / rms(h) [T]; None for what is not asked for."""
    wanted = call.results()
    results = {name: p.new(each) for name, each in wanted.items()}
    n_tokens = call.lse.numel()
    if not n_tokens:
        return tuple(results.values())
    o, prefix, x = (at_one_stride(p, each) for each in (call.o, call.prefix, call.layer_output))
    strides = strides_of(o=o, prefix=prefix, x=x)
    shape = Shape(task=Task.MERGE, width=prefix.shape[-1], itemsize=widest(prefix, x), row_stride=max(strides.values()))
    tiling = whole_rows(p, shape)
    if tiling is None:
        made: tuple[Any, ...] = p.torch(operator.compute_merge, call, makes=[*wanted.values()])
        return made
    p.launch(
        attn_res_merge_kernel,
        str(shape),
        tiling.grid(n_tokens),
        reads={"p_o": o, "p_prefix": prefix, "p_x": x} | p.fields(call, "lse", "query", "rms_weight", "output_rms_weight"),
        writes={f"p_{name}": each for name, each in results.items()},
        sizes={"n_tokens": n_tokens, "eps": call.eps, "norm_eps": call.norm_eps, **strides},
    )
    return tuple(results.values())


def merge_backward(p: Plan, call: operator.MergeBackward) -> tuple[Any, ...]:
    """The gradients of o, lse, the prefix, query, rms_weight and output_rms_weight."""
    dh, dweight = gradient_of_h(p, call)
    wanted, n_tokens = call.results(), call.lse.numel()
    names = ("do", "dlse", "dprefix_sum")
    do, dlse, dprefix_sum = (p.new(wanted[name]) for name in names)
    if not n_tokens:
        dweights = (zero(p, p.new(wanted[name])) for name in ("dquery", "drms_weight"))
        return do, dlse, dprefix_sum, *dweights, dweight
    rows, o, prefix, dprefix = (at_one_stride(p, each) for each in (dh, call.o, call.prefix, call.dprefix))
    width = prefix.shape[-1]
    strides = strides_of(dh=rows, dprefix=dprefix, o=o, new_prefix=prefix)
    shape = Shape(task=Task.MERGE_BACKWARD, width=width, itemsize=prefix.dtype.itemsize, row_stride=max(strides.values()))
    tiling = whole_rows(p, shape)
    if tiling is None:
        makes = [wanted[name] for name in (*names, "dquery", "drms_weight")]
        return *p.torch(operator.compute_merge_backward_of_h, call, dh, makes=makes), dweight
    grid, query, norm = tiling.grid(n_tokens), p.contiguous(call.query), p.contiguous(call.rms_weight)
    needs_dg = call.need_weights[0] or call.need_weights[1]
    dg = p.new(Empty((grid, width), FP32) if needs_dg else None)
    p.launch(
        attn_res_merge_backward_kernel,
        str(shape),
        grid,
        reads={
            "p_dh": rows,
            "p_dprefix": dprefix,
            "p_o": o,
            "p_new_prefix": prefix,
            "p_query": query,
            "p_rms_weight": norm,
            **p.fields(call, "lse", "score", "rstd"),
        },
        writes={"p_do": do, "p_dlse": dlse, "p_dprefix_sum": dprefix_sum, "p_dg": dg},
        sizes={"n_tokens": n_tokens, **strides},
    )
    return do, dlse, dprefix_sum, *gradients_from_dg(p, dg, query, norm, call.need_weights), dweight
