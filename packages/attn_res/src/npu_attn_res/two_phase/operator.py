"""The operators of the two phases: records, their definition in plain PyTorch, registration and autograd functions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from npu_tiling.calls import Empty, statistics_dtype
from npu_tiling.dispatch import Function, apply, save_tensors, unviewed
from npu_tiling.operators import Operator
from torch import Tensor

from .. import reference
from ..operator import LIBRARY, split_gradient
from ..records import DWEIGHTS, gradient_flops, gradients_of, needed_blocks, weight_gradients
from ..reference import flat, fuse_qk_weight


class Phase1(NamedTuple):
    """The first phase of several layers: as `Forward`, with queries [S, D] and rms_weight [D] or [S, D]."""

    queries: Tensor
    blocks: Sequence[Tensor]
    rms_weight: Tensor
    stacked: bool
    eps: float
    save: bool

    def results(self) -> dict[str, Empty | None]:
        """o [T, S, D] and lse [S, T]; the statistics s [N, T, S] and r [N, T]."""
        first, n_layers = self.blocks[0], self.queries.shape[0]
        shape, dtype = first.shape[1:] if self.stacked else first.shape, statistics_dtype(first.dtype)
        n_blocks, n_tokens = first.shape[0] if self.stacked else len(self.blocks), prod(shape[:-1])
        return {
            "o": Empty((n_tokens, n_layers, shape[-1]), dtype),
            "lse": Empty((n_layers, n_tokens), dtype),
            "score": Empty((n_blocks, n_tokens, n_layers), dtype) if self.save else None,
            "rstd": Empty((n_blocks, n_tokens), dtype) if self.save else None,
        }

    def flops(self) -> int:
        """Of the products of each layer: <g, v_i> of each block, and the sum of alpha_i v_i."""
        return 4 * len(self.queries) * sum(block.numel() for block in self.blocks)


class Phase1Backward(NamedTuple):
    """The gradients of the first phase.

    Attributes:
        do, dlse: the gradients of o [T, S, D] and of lse [S, T]; None: there is none.
        queries, blocks, rms_weight, stacked: the forward's.
        score, rstd: the forward's statistics.
        need_blocks: which tensors of blocks need a gradient.
        need_weights: which of queries and rms_weight do.
    """

    do: Tensor | None
    dlse: Tensor | None
    queries: Tensor
    blocks: Sequence[Tensor]
    rms_weight: Tensor
    score: Tensor
    rstd: Tensor
    stacked: bool
    need_blocks: Sequence[bool]
    need_weights: Sequence[bool]

    def results(self) -> dict[str, Any]:
        """The gradients of blocks, queries and rms_weight; None for those that are not needed."""
        dqueries, dnorm = gradients_of((self.queries, self.rms_weight), self.need_weights)
        return {
            "dblocks": gradients_of(self.blocks, self.need_blocks),
            "dqueries": dqueries,
            "drms_weight": dnorm,
        }

    def flops(self) -> int:
        """See `gradient_flops`."""
        width, need_g = self.queries.shape[-1], any(self.need_weights)
        return gradient_flops(self.score, width, len(self.score), needed_blocks(self), need_g)


class Merge(NamedTuple):
    """The second phase: o [..., D] and lse [...] of one layer, and otherwise as `Forward`."""

    o: Tensor
    lse: Tensor
    prefix: Tensor
    layer_output: Tensor | None
    query: Tensor
    rms_weight: Tensor
    output_rms_weight: Tensor | None
    eps: float
    norm_eps: float
    save: bool

    def results(self) -> dict[str, Empty | None]:
        """h, its RMSNorm and the new prefix [..., D]; the statistics s, r and 1 / rms(h) [T]."""
        rows = Empty(self.prefix.shape, self.prefix.dtype)
        of_tokens, has_norm = Empty((self.lse.numel(),), self.lse.dtype), self.output_rms_weight is not None
        return {
            "h": rows,
            "y": rows if has_norm else None,
            "new_prefix": None if self.layer_output is None else rows,
            "score": of_tokens if self.save else None,
            "rstd": of_tokens if self.save else None,
            "norm_rstd": of_tokens if self.save and has_norm else None,
        }

    def flops(self) -> int:
        """Of the prefix's products: <g, p>, and alpha p."""
        return 4 * self.prefix.numel()


class MergeBackward(NamedTuple):
    """The gradients of the second phase: as `Backward`, with o and lse in place of blocks."""

    dh: Tensor | None
    dy: Tensor | None
    dprefix: Tensor | None
    h: Tensor | None
    o: Tensor
    lse: Tensor
    prefix: Tensor
    query: Tensor
    rms_weight: Tensor
    output_rms_weight: Tensor | None
    score: Tensor
    rstd: Tensor
    norm_rstd: Tensor | None
    need_weights: Sequence[bool]

    def results(self) -> dict[str, Empty | None]:
        """The gradients of o, lse, the prefix with the layer's output, and the weights; None for weights that need none."""
        state = {"do": self.o, "dlse": self.lse, "dprefix_sum": self.prefix}
        return {name: Empty(of.shape, of.dtype) for name, of in state.items()} | weight_gradients(self)

    def flops(self) -> int:
        """See `gradient_flops`, of the prefix alone."""
        return gradient_flops(self.score, self.query.shape[-1], 1, 1, any(self.need_weights[:2]))


def compute_phase1(call: Phase1) -> tuple[Tensor | None, ...]:
    """See `Phase1.results`."""
    v = reference.Sources(call)
    score, rstd = v.scores(fuse_qk_weight(call.queries, call.rms_weight, v.dtype), call.eps)
    alpha, lse = reference.softmax(score)
    return v.weighted_sum(alpha, v.dtype), lse.t().contiguous(), *((score, rstd) if call.save else (None, None))


def compute_phase1_backward(call: Phase1Backward) -> tuple[Any, ...]:
    """See `Phase1Backward.results`."""
    v, do, score = reference.Sources(call), call.do, call.score
    g = fuse_qk_weight(call.queries, call.rms_weight, v.dtype)
    if do is None:
        do = score.new_zeros((*score.shape[1:], v.width))
    alpha, ds_rstd, coefficient = reference.score_gradients(score, call.rstd, v.products(do), call.dlse, v.width)
    dg = v.gradients(do, g, alpha, ds_rstd, coefficient)
    dweights = reference.fuse_qk_weight_backward(dg, call.queries, call.rms_weight, call.need_weights)
    return _contiguous(v.dv), *_contiguous(dweights)


def compute_merge(call: Merge) -> tuple[Tensor | None, ...]:
    """See `Merge.results`."""
    prefix, new_prefix, dtype = call.prefix, None, call.o.dtype
    if call.layer_output is not None:
        prefix = new_prefix = (prefix.to(dtype) + call.layer_output).to(prefix.dtype)
    o, p = flat(call.o), flat(prefix).to(dtype)
    rstd = torch.rsqrt(p.square().mean(-1) + call.eps)
    score = (p @ fuse_qk_weight(call.query, call.rms_weight, dtype)) * rstd
    w, a = shares(call.lse.reshape(-1), score)
    h = (o * w.unsqueeze(-1) + p * a.unsqueeze(-1)).to(prefix.dtype)
    norm_rstd = y = None
    if call.output_rms_weight is not None:
        norm_rstd = torch.rsqrt(h.to(dtype).square().mean(-1) + call.norm_eps)
        y = reference.scaled(h, call.output_rms_weight, norm_rstd).view(prefix.shape)
    statistics = (score, rstd, norm_rstd) if call.save else (None, None, None)
    return tuple(_contiguous([h.view(prefix.shape), y, new_prefix, *statistics]))


def compute_merge_backward(call: MergeBackward) -> tuple[Tensor | None, ...]:
    """See `MergeBackward.results`."""
    dh, dweight = reference.gradient_of_h(call)
    return *compute_merge_backward_of_h(call, dh), *_contiguous([dweight])


def compute_merge_backward_of_h(call: MergeBackward, dh: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of o, lse, the prefix, with `dprefix` added, query and rms_weight, from dh [..., D]."""
    score, rstd, dtype = call.score, call.rstd, call.o.dtype
    o, dh, p = flat(call.o), flat(dh).to(dtype), flat(call.prefix).to(dtype)
    w, a = shares(call.lse.reshape(-1), score)
    dscore = a * w * ((dh * p).sum(-1) - (dh * o).sum(-1))
    ds_rstd = dscore * rstd
    dv_coef = ds_rstd * score * rstd / call.prefix.shape[-1]
    g = fuse_qk_weight(call.query, call.rms_weight, dtype)
    dp = dh * a.unsqueeze(-1) + ds_rstd.unsqueeze(-1) * g - dv_coef.unsqueeze(-1) * p
    if call.dprefix is not None:
        dp = dp + flat(call.dprefix)
    gradients = (
        (dh * w.unsqueeze(-1)).view(call.o.shape),
        -dscore.view(call.lse.shape),
        dp.to(call.prefix.dtype).view(call.prefix.shape),
        *reference.fuse_qk_weight_backward(ds_rstd @ p, call.query, call.rms_weight, call.need_weights),
    )
    return tuple(_contiguous(gradients))


def shares(lse: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """exp(lse) and exp(score) over their sum."""
    largest = torch.maximum(lse, score)
    first, second = torch.exp(lse - largest), torch.exp(score - largest)
    total = first + second
    return first / total, second / total


def _contiguous(results: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Results with the strides that records promise: those of PyTorch's operators follow the inputs."""
    return [None if result is None else result.contiguous() for result in results]


def transposed(lse: Tensor) -> Tensor:
    return lse.t().contiguous()


PHASE1 = Operator(
    LIBRARY,
    "phase1",
    Phase1,
    ["o", "lse", "score", "rstd"],
    plan=f"{__package__}.plans:phase1",
    reference=compute_phase1,
    forward_mode=True,
    batched=True,
)
PHASE1_BACKWARD = Operator(
    LIBRARY,
    "phase1_backward",
    Phase1Backward,
    ["dblocks", "dqueries", "drms_weight"],
    plan=f"{__package__}.plans:phase1_backward",
    reference=compute_phase1_backward,
    lists=["dblocks"],
    forward_mode=True,
    batched=True,
    is_gradient=True,
)
MERGE = Operator(
    LIBRARY,
    "merge",
    Merge,
    ["h", "y", "new_prefix", "score", "rstd", "norm_rstd"],
    plan=f"{__package__}.plans:merge",
    reference=compute_merge,
    forward_mode=True,
)
MERGE_BACKWARD = Operator(
    LIBRARY,
    "merge_backward",
    MergeBackward,
    ["do", "dlse", "dprefix_sum", *DWEIGHTS],
    plan=f"{__package__}.plans:merge_backward",
    reference=compute_merge_backward,
    forward_mode=True,
    is_gradient=True,
)


class _Phase1(Function):
    @staticmethod
    def forward(ctx, run, stacked, eps, save, queries, rms_weight, *blocks):  # type: ignore[no-untyped-def]
        save_statistics = True
        o, lse, score, rstd = run(queries, blocks, rms_weight, stacked, eps, save_statistics)
        save_tensors(ctx, queries, rms_weight, score, rstd, *blocks)
        ctx.stacked = stacked
        ctx.set_materialize_grads(False)
        if not save:
            return o, lse, None, None
        ctx.mark_non_differentiable(score, rstd)
        return o, lse, score, rstd

    @staticmethod
    def backward(ctx, do, dlse, *_):  # type: ignore[no-untyped-def]
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        queries, rms_weight, score, rstd, *blocks = ctx.saved_tensors
        _, _, _, _, need_queries, need_rms_weight, *need_blocks = ctx.needs_input_grad
        call = Phase1Backward(
            do=do,
            dlse=dlse,
            queries=queries,
            blocks=blocks,
            rms_weight=rms_weight,
            score=score,
            rstd=rstd,
            stacked=ctx.stacked,
            need_blocks=tuple(need_blocks),
            need_weights=(need_queries, need_rms_weight),
        )
        dblocks, *dweights = PHASE1_BACKWARD(call)
        return None, None, None, None, *dweights, *dblocks


class _Merge(Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, run, o, lse, prefix, layer_output, query, rms_weight, output_rms_weight, eps, norm_eps, save
    ):
        weights, save_statistics = (query, rms_weight, output_rms_weight), True
        h, y, new_prefix, *statistics = run(o, lse, prefix, layer_output, *weights, eps, norm_eps, save_statistics)
        h, y = unviewed(h), None if y is None else unviewed(y)
        kept = None if output_rms_weight is None else h
        save_tensors(ctx, kept, o, lse, prefix if layer_output is None else new_prefix, *weights, *statistics)
        ctx.output_dtype = None if layer_output is None else layer_output.dtype
        ctx.set_materialize_grads(False)
        if not save:
            return h, y, new_prefix, None, None, None
        ctx.mark_non_differentiable(*[each for each in statistics if each is not None])
        return h, y, new_prefix, *statistics

    @staticmethod
    def backward(ctx, dh, dy, dprefix, *_):  # type: ignore[no-untyped-def]
        _, _, _, need_prefix, need_output, need_query, need_rms_weight, need_output_weight, *_ = ctx.needs_input_grad
        state, dweights = [None] * 2, [None] * 3
        if dh is not None or dy is not None:
            needed = (need_query, need_rms_weight, need_output_weight and dy is not None)
            *state, dprefix, dquery, dnorm, dweight = MERGE_BACKWARD(
                MergeBackward(dh, dy, dprefix, *ctx.saved_tensors, needed)
            )
            dweights = [dquery, dnorm, dweight]
        of_prefix = split_gradient(dprefix, need_prefix, need_output, ctx.output_dtype)
        return None, *state, *of_prefix, *dweights, None, None, None


def _phase1_with_gradient(run: Any, queries: Any, blocks: Any, rms_weight: Any, stacked: Any, eps: Any, save: Any) -> Any:
    return apply(_Phase1, run, stacked, eps, save, queries, rms_weight, *blocks)


PHASE1.autograd(_phase1_with_gradient)
MERGE.autograd(partial(apply, _Merge))
