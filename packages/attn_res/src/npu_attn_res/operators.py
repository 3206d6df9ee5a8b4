"""What the operators do, without autograd; registration.py makes them known to PyTorch.

`attn_res`, `phase1`, `merge` and the gradient of each; kernels on accelerators, reference.py on a CPU. Blocks come as a
list of tensors [..., D], or, `stacked`, as a list of one tensor [N, ..., D]. Statistics have one dimension for all tokens,
T. A result that is not asked for is an empty tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from npu_tiling import device_for
from npu_tiling.pytorch.tensors import allocate, nothing
from torch import Tensor

from . import reference
from .launch import single, two_phase
from .launch.sources import follow


def attn_res(
    blocks: Sequence[Tensor],
    stacked: bool,
    w_query: Tensor,
    w_norm: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    norm_eps: float,
    save: bool,
) -> tuple[Tensor, ...]:
    like = blocks[0]
    shape = like.shape[1:] if stacked else like.shape
    device = device_for(like.device)
    results: Sequence[Tensor | None]
    if device is None:
        rows = rows_of_blocks(blocks, stacked)
        g = reference.fuse_qk_weight(w_query, w_norm, reference.statistics_dtype(like.dtype)).unsqueeze(0)
        score, rstd = reference.scores(rows, g, eps)
        lse = torch.logsumexp(score.movedim(0, -1).contiguous(), -1)  # one token's at a time: in one order for any number
        h = reference.weighted_sum(rows, torch.exp(score - lse)).to(like.dtype)
        y, norm_rstd = (None, None) if norm_weight is None else reference.normalise(h.squeeze(1), norm_weight, norm_eps)
        results = (h, y, score.squeeze(-1), rstd, lse.squeeze(-1), norm_rstd)
    else:
        taken = follow(blocks, stacked, device)
        results = single.forward(taken, w_query, w_norm, norm_weight, eps, norm_eps, save, device)
    h, y, *statistics = results
    assert h is not None
    outputs = (h.view(shape), nothing(h) if y is None else y.view(shape))
    return *outputs, *(found if save and found is not None else nothing(h) for found in statistics)


def attn_res_backward(
    dh: Tensor | None,
    dy: Tensor | None,
    h: Tensor | None,
    blocks: Sequence[Tensor],
    stacked: bool,
    w_query: Tensor,
    w_norm: Tensor,
    norm_weight: Tensor | None,
    score: Tensor,
    rstd: Tensor,
    lse: Tensor,
    norm_rstd: Tensor,
    need_blocks: Sequence[bool],
    need_weights: Sequence[bool],
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    needed = (need_weights[0], need_weights[1])
    device = device_for(score.device)
    dh, dweight = whole_gradient(dh, dy, h, norm_weight, norm_rstd, need_weights[2])
    if device is None:
        rows = rows_of_blocks(blocks, stacked)
        g = reference.fuse_qk_weight(w_query, w_norm, score.dtype).unsqueeze(0)
        do = dh.reshape(-1, 1, dh.shape[-1]).to(g.dtype)
        weights = torch.exp(score - lse).unsqueeze(-1)
        dscore = reference.softmax_backward(weights, reference.products(rows, do))
        ds_rstd, dv_coef = reference.score_gradients(score.unsqueeze(-1), rstd, dscore, dh.shape[-1])
        dv, dg = reference.gradients(rows, do, g, weights, ds_rstd, dv_coef, spread(need_blocks, rows))
        gradients = gathered(dv, blocks, stacked)
        dquery, dnorm = reference.fuse_qk_weight_backward(dg, w_query, w_norm, needed)
    else:
        outputs = [allocate(v, v.shape, v.dtype) if need else None for v, need in zip(blocks, need_blocks, strict=True)]
        taken = follow(blocks, stacked, device)
        unrounded = h if reads_h(blocks[0]) else None
        tensors = (dh, unrounded, taken, w_query, w_norm, score, rstd, lse, outputs)
        dquery, dnorm = single.backward(*tensors, needed, device)
        gradients = [nothing(dh) if gradient is None else gradient for gradient in outputs]
    return gradients, *(nothing(dh) if found is None else found for found in (dquery, dnorm, dweight))  # type: ignore[return-value]


def phase1(
    queries: Tensor, blocks: Sequence[Tensor], stacked: bool, w_norm: Tensor, eps: float, save: bool
) -> tuple[Tensor, ...]:
    device = device_for(queries.device)
    score: Tensor | None
    rstd: Tensor | None
    if device is None:
        rows = rows_of_blocks(blocks, stacked)
        g = reference.fuse_qk_weight(queries, w_norm, reference.statistics_dtype(rows[0].dtype))
        score, rstd = reference.scores(rows, g, eps)
        maximum = score.amax(0)
        weights = torch.exp(score - maximum)
        o, total = reference.weighted_sum(rows, weights), weights.sum(0)
    else:
        taken = follow(blocks, stacked, device)
        o, maximum, total, score, rstd = two_phase.phase1(taken, queries, w_norm, eps, save, device)
    statistics = (found if save and found is not None else nothing(o) for found in (score, rstd))
    return o, maximum.t().contiguous(), total.t().contiguous(), *statistics


def phase1_backward(
    do: Tensor | None,
    dmaximum: Tensor | None,
    dtotal: Tensor | None,
    queries: Tensor,
    blocks: Sequence[Tensor],
    stacked: bool,
    w_norm: Tensor,
    maximum: Tensor,
    score: Tensor,
    rstd: Tensor,
    need_blocks: Sequence[bool],
    need_weights: Sequence[bool],
) -> tuple[list[Tensor], Tensor, Tensor]:
    needed = (need_weights[0], need_weights[1])
    device = device_for(score.device)
    maximum = maximum.t()
    dmaximum, dtotal = (None if found is None else found.t() for found in (dmaximum, dtotal))
    if device is None:
        rows = rows_of_blocks(blocks, stacked)
        g = reference.fuse_qk_weight(queries, w_norm, score.dtype)
        if do is None:
            do = score.new_zeros((*maximum.shape, g.shape[1]))
        e = reference.products(rows, do)
        weights, dscore = reference.exponentials_backward(score, maximum, e, dmaximum, dtotal)
        ds_rstd, dv_coef = reference.score_gradients(score, rstd, dscore, g.shape[1])
        dv, dg = reference.gradients(rows, do, g, weights, ds_rstd, dv_coef, spread(need_blocks, rows))
        gradients = gathered(dv, blocks, stacked)
        dqueries, dnorm = reference.fuse_qk_weight_backward(dg, queries, w_norm, needed)
    else:
        outputs = [allocate(v, v.shape, v.dtype) if need else None for v, need in zip(blocks, need_blocks, strict=True)]
        if score.numel():
            taken = follow(blocks, stacked, device)
            tensors = (do, dmaximum, dtotal, taken, queries, w_norm, maximum, score, rstd, outputs)
            dqueries, dnorm = two_phase.phase1_backward(*tensors, needed, device)
        else:
            dqueries, dnorm = torch.zeros_like(queries), torch.zeros_like(w_norm)
        gradients = [nothing(score) if gradient is None else gradient for gradient in outputs]
    return gradients, *(nothing(score) if found is None else found for found in (dqueries, dnorm))  # type: ignore[return-value]


def merge(
    o: Tensor,
    maximum: Tensor,
    total: Tensor,
    partial: Tensor,
    x: Tensor | None,
    w_query: Tensor,
    w_norm: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    norm_eps: float,
    save: bool,
) -> tuple[Tensor, ...]:
    device = device_for(partial.device)
    options = (norm_weight, eps, norm_eps)
    if device is not None:
        found = two_phase.merge(o, maximum, total, partial, x, w_query, w_norm, *options, save, device)
    else:
        found = two_phase.merge_formula(o, maximum, total, partial, x, w_query, w_norm, *options)
    h, y, joined, *statistics = laid_out(found)
    assert h is not None
    outputs = (nothing(h) if result is None else result for result in (y, joined))
    return h, *outputs, *(kept if save and kept is not None else nothing(h) for kept in statistics)


def merge_backward(
    dh: Tensor | None,
    dy: Tensor | None,
    dpartial: Tensor | None,
    h: Tensor | None,
    o: Tensor,
    maximum: Tensor,
    total: Tensor,
    partial: Tensor,
    w_query: Tensor,
    w_norm: Tensor,
    norm_weight: Tensor | None,
    score: Tensor,
    rstd: Tensor,
    lse: Tensor,
    norm_rstd: Tensor,
    need_weights: Sequence[bool],
) -> tuple[Tensor, ...]:
    needed = (need_weights[0], need_weights[1])
    device = device_for(partial.device)
    if dh is None and dy is None:
        dh = torch.zeros_like(partial)
    dh, dweight = whole_gradient(dh, dy, h, norm_weight, norm_rstd, need_weights[2])
    tensors = (dh, dpartial, o, maximum, total, partial, w_query, w_norm, score, rstd, lse)
    if device is None:
        found = two_phase.merge_backward_formula(*tensors, needed)
    else:
        found = two_phase.merge_backward(*tensors, needed, device)
    return tuple([nothing(dh) if result is None else result for result in (*laid_out(found), dweight)])


def whole_gradient(
    dh: Tensor | None,
    dy: Tensor | None,
    h: Tensor | None,
    norm_weight: Tensor | None,
    norm_rstd: Tensor,
    need_dweight: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of h with what reaches it through y, and that of the RMSNorm's weight."""
    if dy is None:
        assert dh is not None
        return dh, None
    assert h is not None
    assert norm_weight is not None
    device = device_for(dy.device)
    if device is None:
        return reference.normalise_backward(dy, dh, h, norm_weight, norm_rstd.view(h.shape[:-1]))
    return two_phase.normalise_backward(dy, dh, h, norm_weight, norm_rstd, need_dweight, device)


def reads_h(block: Tensor) -> bool:
    """Whether the backward takes delta from h: where h is not rounded, on Ascend; elsewhere it sums delta up again."""
    device = device_for(block.device)
    return block.dtype == torch.float32 and device is not None and device.kind == "ascend"


def rows_of_blocks(blocks: Sequence[Tensor], stacked: bool) -> list[Tensor]:
    """Every block as [T, D]."""
    each = blocks[0].unbind() if stacked else blocks
    return [block.reshape(-1, block.shape[-1]) for block in each]


def spread(needed: Sequence[bool], rows: Sequence[Tensor]) -> list[bool]:
    """Which of the blocks need a gradient."""
    return list(needed) if len(needed) == len(rows) else [needed[0]] * len(rows)


def gathered(gradients: Sequence[Tensor | None], blocks: Sequence[Tensor], stacked: bool) -> list[Tensor]:
    """The gradients of blocks [T, D] as the blocks were given; nothing for those that need none."""
    if stacked and gradients[0] is not None:
        return [torch.stack([gradient for gradient in gradients if gradient is not None]).view(blocks[0].shape)]
    return [
        nothing(block) if gradient is None else gradient.view(block.shape)
        for block, gradient in zip(blocks, gradients, strict=False)
    ]


def laid_out(results: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Results with the strides that the fake functions promise: PyTorch's follow those of the inputs."""
    return [None if result is None else result.contiguous() for result in results]
